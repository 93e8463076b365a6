"""One started program: its process group, its lines, and the moment of its end."""

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

# What is read at once: all that a pipe holds.
_CHUNK = 1 << 16

# A longer line is cut, so that one without an end takes no more memory than this.
LONGEST_LINE = 1 << 16


class Process:
    """A program in a session and process group of its own; nothing here blocks.

    A process that has ended is not waited for until `close`, so that the number of its
    group cannot become somebody else's while signals are sent to it.

    Args:
      command: program and arguments.
      environment: all of its environment.

    Attributes:
      group: the number of its process group.
      output: the file descriptor to wait on before `read`.
      at_end: whether nobody can write to its output any more.
      killed: whether the group has been killed.
      deadline: when the group is to be killed, in `time.monotonic` seconds.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 running it is what we are for
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
        """Whether the process has ended; others of its group may be alive."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._popen.poll() is not None
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        try:
            return os.waitid(os.P_PID, self.group, how) is not None
        except ChildProcessError:  # SIGCHLD is ignored
            return True

    def signal(self, signum: int) -> None:
        """Sends a signal to all of the group."""
        self.killed = self.killed or signum == signal.SIGKILL
        _guard.signal_group(self.group, signum)

    def read(self, *, last: bool = False) -> list[str]:
        """The lines that are complete by now; the last time, what is left as well."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.output, _CHUNK)
            self.at_end = not data
        return self._lines.feed(data, final=last or self.at_end)

    def close(self) -> int:
        """Ends what is left of the group, and gives the program's exit status.

        Returns:
          Its exit status, or the negative number of the signal that killed it.
        """
        self.signal(signal.SIGKILL)
        with self._popen:  # closes the pipe and waits
            pass
        return self._popen.returncode


class _Lines:
    r"""Bytes to lines: ``\n``, ``\r`` and ``\r\n`` end one, whatever the bytes are."""

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
