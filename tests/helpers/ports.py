"""Free ports, known before a server listens there."""

import random
import socket

HOST = "127.0.0.1"
# Systems assign higher ports to clients and to port 0 (Linux from 32768 on, others from
# 49152 on), so no process takes one of these by chance meanwhile.
_FIRST, _LAST = 15_000, 32_000
# Tests that run in parallel have the same random seed.
_random = random.SystemRandom()


def in_a_row(count):
    """Return free consecutive ports."""
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
