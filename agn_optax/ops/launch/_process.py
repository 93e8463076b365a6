"""One running program: its process group, its lines of output, and its end."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from agn_optax.ops.launch import _guard

# Bytes that are read at once: the capacity of a pipe.
_CHUNK = 1 << 16

# Characters at which a line is cut, so that an endless line takes bounded memory.
LONGEST_LINE = 1 << 16


class Process:
    """A program in a session and process group of its own; only `close` may block.

    A process that has ended is not reaped until `close`, so that the system cannot
    reuse the number of its group while signals are sent to it.

    Args:
      command: program and arguments.
      environment: the complete environment of the program.

    Attributes:
      group: number of the process group.
      output: the file descriptor to wait on before `read`.
      at_end: whether no process can write to the output any more.
      killed: whether the group has been killed.
      deadline: time at which the group is to be killed, in `time.monotonic` seconds.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 the caller's program
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        self._lines = _Lines()
        self.group = self._popen.pid
        self.output = self._popen.stdout.fileno()
        os.set_blocking(self.output, False)
        self.at_end = self.killed = False
        self.deadline = math.inf

    @property
    def exited(self) -> bool:
        """True if the process has ended; others of its group may still run."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; this reaps it
            return self._popen.poll() is not None
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        try:
            return os.waitid(os.P_PID, self.group, how) is not None
        except ChildProcessError:  # SIGCHLD is ignored
            return True

    def signal(self, signum: int) -> None:
        """Send a signal to the whole group."""
        self.killed = self.killed or signum == signal.SIGKILL
        _guard.signal_group(self.group, signum)

    def read(self, *, last: bool = False) -> list[str]:
        """Return the lines that are complete; at the end, also an incomplete one."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.output, _CHUNK)
            self.at_end = not data
        return self._lines.feed(data, final=last or self.at_end)

    def close(self) -> int:
        """End the rest of the group, and return the program's exit status.

        Returns:
          The exit status, or the negative number of the signal that killed the program.
        """
        self.signal(signal.SIGKILL)
        with self._popen:  # closes the pipe and waits
            pass
        return self._popen.returncode


class _Lines:
    r"""A decoder of any bytes into lines that end with ``\n``, ``\r`` or ``\r\n``."""

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._rest = ""

    def feed(self, data: bytes, final: bool) -> list[str]:
        text = self._rest + self._decoder.decode(data, final)
        *lines, self._rest = itertools.chain.from_iterable(
            map(_pieces, text.split("\n"))
        )
        if final and self._rest:
            lines.append(self._rest)
            self._rest = ""
        return lines


def _pieces(line: str) -> list[str]:
    starts = range(0, max(len(line), 1), LONGEST_LINE)
    return [line[start : start + LONGEST_LINE] for start in starts]
