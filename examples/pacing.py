"""A link that is slower than loopback: the kernel paces the sockets of a process.

The kernel limits the rate at which bytes are sent. No byte is lost, and there is no
further latency. Linux sends the first ten segments of a connection at once, and half a
segment (32 KB on loopback) after every pause. Therefore a message of 40 KB is not paced
at all, one of 500 KB takes 0.9 of the time that it should, and one of 2 MB 0.94.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys

_SO_MAX_PACING_RATE = 47  # a Linux constant that Python's socket module lacks


def pace(rate: float) -> None:
    """Limit each TCP socket of this process to sending ``rate`` bytes/s.

    This applies to all sockets that are open now, and to the connections that they
    accept later.
    """
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 names are enough
        with contextlib.suppress(OSError):  # the socket was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.setsockopt(
                        socket.SOL_SOCKET,
                        _SO_MAX_PACING_RATE,
                        int(rate).to_bytes(8, sys.byteorder),
                    )
