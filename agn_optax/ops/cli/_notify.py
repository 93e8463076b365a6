"""Notifications of a service to systemd: `sd_notify(3)`, in one datagram."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*said: str) -> None:
    """Send a notification to the service manager, if one has asked for them.

    Args:
      *said: assignments, such as ``"READY=1"``.
    """
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    if where.startswith("@"):  # an abstract socket, which has no file
        where = "\0" + where[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end,
    ):
        end.sendto("\n".join(said).encode(), where)
