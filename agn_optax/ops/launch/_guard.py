"""A guard, which ends process groups if the launcher dies without ending them itself.

A process that is killed by SIGKILL runs no more code. Therefore another process, the
guard, knows the process groups of the launcher, and kills them when the pipe from the
launcher is closed. Linux could signal the children itself (PR_SET_PDEATHSIG), but this
has to be requested between fork and exec, reaches no grandchildren, and is tied to one
thread.

This file is also the guard's program, and therefore imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """A process that kills the groups that were added to it, if this process dies."""

    def __init__(self) -> None:
        # In a session of its own: a signal to the launcher must not end the guard.
        self._process = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Add a group; call this as soon as the group exists."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Remove a group; call this before the system can reuse the group's number."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """End the guard without killing any group."""
        self._process.kill()
        with self._process:  # closes the pipe and waits
            pass

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was ended
            self._process.stdin.write(line.encode())


def signal_group(group: int, signum: int) -> None:
    """Send a signal to a whole process group, if any of its processes is left."""
    # macOS raises EPERM if all processes of a group have ended but are not reaped.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def main() -> None:
    """Run the guard: read the groups from stdin until the launcher ends."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
