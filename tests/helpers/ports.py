"""Ports that are known before anybody listens there, or that are listened at again."""

import random
import socket

HOST = "127.0.0.1"
# Systems give away higher ones (Linux from 32768 on, others from 49152 on), to whoever
# connects, or listens at port 0: nobody takes one of these by chance meanwhile.
_FIRST, _LAST = 15_000, 32_000
# Tests that run beside each other begin with the same seed.
_random = random.SystemRandom()


def in_a_row(count):
    """So many that are free, each one more than the last."""
    while True:
        first = _random.randrange(_FIRST, _LAST - count)
        found = list(range(first, first + count))
        try:
            for port in found:
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return found


def free():
    return in_a_row(1)[0]


def free_address():
    return f"{HOST}:{free()}"
