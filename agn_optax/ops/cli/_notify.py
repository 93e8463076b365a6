"""Notifications of a service to systemd: `sd_notify(3)`, in one datagram."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """Send a notification to the service manager, if it asks for notifications.

    Args:
      *assignments: lines of the notification, such as ``"READY=1"``.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    if path.startswith("@"):  # an abstract socket, which has no file
        path = "\0" + path[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end,
    ):
        end.sendto("\n".join(assignments).encode(), path)
