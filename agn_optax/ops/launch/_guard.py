"""Ends process groups when the launcher dies without a chance to end them itself.

Nothing runs in a process that is killed by SIGKILL. So another one, the guard, knows
its process groups, and kills them when the pipe from the launcher is closed. Linux
could signal the children itself (PR_SET_PDEATHSIG), but that has to be asked for
between fork and exec, reaches no grandchildren, and belongs to one thread.

This file is also the guard's program, and so imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """A process that kills the groups it has been told of, should this one die."""

    def __init__(self) -> None:
        # A session of its own: what ends the launcher must not end the guard as well.
        self._process = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """To be called as soon as the group exists."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """To be called before the group's number can become somebody else's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard; no group is killed."""
        self._process.kill()
        with self._process:  # closes the pipe and waits
            pass

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the guard
            self._process.stdin.write(line.encode())


def signal_group(group: int, signum: int) -> None:
    """Sends a signal to a whole process group, if there is anyone to receive it."""
    # macOS answers EPERM where all of a group have ended but are not waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def main() -> None:
    """The guard's program: groups come and go on stdin until the launcher is gone."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
