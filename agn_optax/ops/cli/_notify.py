"""What systemd is told of a service: `sd_notify(3)`, in a datagram."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*said: str) -> None:
    """Tells whoever has started this, if it wants to know.

    Args:
      *said: assignments, such as ``"READY=1"``.
    """
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    if where.startswith("@"):  # a name without a file
        where = "\0" + where[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end,
    ):
        end.sendto("\n".join(said).encode(), where)
