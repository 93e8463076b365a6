"""Several programs side by side on one machine, which end together.

`run` is for callers. A `_Supervisor` is the loop of one call, which starts programs,
reads their output, and ends them. This module needs no extra.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from agn_optax import errors
from agn_optax._signals import handled
from agn_optax.ops.launch._guard import Guard
from agn_optax.ops.launch._process import Process
from agn_optax.ops.launch._program import Outcome, Program

# Signals by which a terminal, a shell or a scheduler ends the launcher. Programs are in
# sessions of their own, and receive these signals only if they are forwarded.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE = 10.0  # s, the default, also of runs on engines
_POLL_INTERVAL = (
    0.02  # seconds, at most, until an end, a signal or a deadline is noticed
)


def run(
    programs: Sequence[Program],
    *,
    output: Callable[[str, str], None],
    grace: float = GRACE,
    restart_delay: float = 1.0,
) -> list[Outcome]:
    r"""Run programs side by side until they have ended, and leave none behind.

    A program that fails is started again after ``restart_delay``, up to its number of
    restarts. If a program fails after its last restart, if the
    launcher is interrupted, or if an exception is raised, all programs are ended: by a
    signal first, and by SIGKILL after ``grace`` seconds.

    Programs that are not waited for are ended after all others, by SIGTERM and with the
    same grace, so that a server still receives the last messages of its clients. If one
    of them ends by itself before the others, the others are ended too; after half of
    the grace they get a second SIGTERM, because they may be waiting for the ended
    program. A program ends with its first process: other processes in its process group
    are ended with it, with the same ``grace`` if they hold the program's output open.
    Only a process that leaves the group can escape.

    A program gets no stdin, and ``AGN_OPTAX_RESTARTS`` in its environment is the number
    of restarts so far (unless the program's own environment sets it). If the launcher
    itself is killed, the programs are killed as well.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded, unless they are ignored: the
    first one to the programs that are waited for, any further one to all. SIGINT is
    forwarded as SIGTERM, at which a Python program ends without a traceback. Signals
    are handled in the main thread only; in another thread they are left to the caller.

    Args:
      programs: the programs to run; their names differ, and at least one is waited for,
        or has followers.
      output: called as ``output(name, line)``, from this thread, with every line of a
        program's stdout and stderr, and with events of the program in lines that begin
        with ``agn-optax:``. ``\n``, ``\r`` and ``\r\n`` end a line; a very long line
        comes in pieces. Until ``output`` returns, programs may block in writing.
      grace: seconds from the first signal to SIGKILL.
      restart_delay: seconds before a program that failed is started again.

    Returns:
      The outcome of each program, in the order of ``programs``; followers come last.

    Raises:
      InvalidArgumentError: a setting is wrong, or a command cannot be started.
      KeyboardInterrupt: SIGINT came, and all programs have ended.
      SystemExit: another of the signals came, and all programs have ended; with a
        shell's exit status, 128 plus the signal's number.

    Example:
      >>> import sys
      >>> hello = Program("worker-0", [sys.executable, "-c", "print('hello')"])
      >>> (ended,) = run([hello], output=lambda name, line: print(name, line))
      worker-0 hello
      >>> ended.returncode
      0
    """
    names = [program.name for program in programs]
    if len(set(names)) < len(names):
        raise errors.InvalidArgumentError(f"names of programs must differ, got {names}")
    if not any(program.waited_for or program.followers for program in programs):
        raise errors.InvalidArgumentError(
            f"at least one program must be waited for, got {list(programs)}"
        )
    for what, seconds in (("grace", grace), ("restart_delay", restart_delay)):
        if not 0 <= seconds < math.inf:
            raise errors.InvalidArgumentError(
                f"{what} must be a finite number of seconds from 0, got {seconds!r}"
            )
    supervisor = _Supervisor(output, grace, restart_delay)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with handled(_FORWARDED if is_main else (), supervisor.on_signal):
            return supervisor.run(programs)
    finally:
        # Also after another exception: the signal may have ended the program that reads
        # the lines, too, so that writing them failed.
        if supervisor.signals:
            signum = supervisor.signals[0]
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)


@dataclasses.dataclass
class _Supervisor:
    """One call of `run`: a loop in one thread, which polls programs and signals.

    The arguments are those of `run`. ``signals`` has the received signals, in order.
    """

    output: Callable[[str, str], None]
    grace: float
    restart_delay: float
    signals: list[int] = dataclasses.field(default_factory=list)
    _forwarded: int = 0  # number of signals that were forwarded
    _states: list[_ProgramState] = dataclasses.field(default_factory=list)
    _stopping: bool = False

    def run(self, programs: Sequence[Program]) -> list[Outcome]:
        """Run all programs to their end, whatever is raised meanwhile."""
        self._add(programs)
        with (
            selectors.DefaultSelector() as self._selector,
            contextlib.closing(Guard()) as self._guard,
        ):
            try:
                self._loop()
            except BaseException:
                # The programs' last output is read so that they do not block; it is
                # discarded.
                self.output = lambda name, line: None
                self._stop(signal.SIGTERM)
                self._loop()
                raise
            finally:
                for state in self._states:
                    if state.process is not None:  # only if the lines above raised
                        self._close(state, state.process)
        return [
            Outcome(
                state.program.name,
                returncode=state.returncode,
                restarts=max(0, state.restarts),
                seconds=state.seconds,
                stopped=state.stopped,
            )
            for state in self._states
        ]

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal, which the loop then forwards."""
        self.signals.append(signum)

    def _add(self, programs: Sequence[Program]) -> None:
        now = time.monotonic()
        self._states += [
            _ProgramState(program, now, now, program.followers) for program in programs
        ]

    def _loop(self) -> None:
        while True:
            for signum in self.signals[self._forwarded :]:
                self._forwarded += 1
                # SIGINT would have every Python program print a traceback.
                signum = signal.SIGTERM if signum == signal.SIGINT else signum
                self._stop(signum, everything=self._forwarded > 1)
            for state in self._states:
                self._update(state, time.monotonic())
            active = [state for state in self._states if state.is_active]
            if not active:
                return
            self._stopping |= not any(state.waited_for for state in active)
            if self._stopping and not any(s.program.waited_for for s in active):
                for state in active:
                    if not state.is_stopping:
                        state.end(signal.SIGTERM, self.grace)
            for key, _ in self._selector.select(_POLL_INTERVAL):
                self._read(key.data, key.data.process)

    def _update(self, state: _ProgramState, now: float) -> None:
        process = state.process
        if process is None:
            if now >= state.start_at:
                self._start(state)
                if state.restarts:
                    number = f"{state.restarts} of {state.program.restarts}"
                    cause = _describe(state.returncode).removeprefix("killed by ")
                    self._log(state, f"restarted ({number}) after {cause}")
            return
        exited = process.exited  # read once, because it may change at any time
        if exited and not process.at_end and process.deadline == math.inf:
            process.signal(signal.SIGTERM)  # the rest of its group
            process.deadline = now + self.grace
        if now >= state.second_signal_at and not exited:
            state.second_signal_at = math.inf
            process.signal(signal.SIGTERM)
        if now >= process.deadline and not process.killed:
            process.signal(signal.SIGKILL)
            self._log(
                state, f"killed processes that had not ended within {self.grace:g} s"
            )
        if exited and (process.at_end or process.killed):
            self._end(state, process, now)

    def _start(self, state: _ProgramState) -> None:
        state.start_at = math.inf
        state.restarts += 1
        program = state.program
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "AGN_OPTAX_RESTARTS": str(state.restarts),
            **program.environment,
        }
        try:
            state.process = Process(program.command, environment)
        except (OSError, ValueError) as error:
            raise errors.InvalidArgumentError(
                f"{program.name!r} cannot be started: {error}; its command is "
                f"{list(program.command)}"
            ) from error
        self._guard.add(state.process.group)
        self._selector.register(state.process.output, selectors.EVENT_READ, state)

    def _end(self, state: _ProgramState, process: Process, now: float) -> None:
        if not process.at_end:
            self._read(state, process, last=True)
        self._close(state, process)
        state.seconds = now - state.began
        has_failed = state.returncode != 0
        if has_failed:
            self._log(state, _describe(state.returncode))
        if self._stopping:
            return
        if has_failed and state.restarts < state.program.restarts:
            state.start_at = now + self.restart_delay
        elif not state.program.waited_for:
            if any(s.program.waited_for and s.is_active for s in self._states):
                self._log(state, "has ended, so the other programs are ended")
            self._stop(signal.SIGTERM, twice=True)
        elif has_failed:
            self._stop(signal.SIGTERM)

    def _close(self, state: _ProgramState, process: Process) -> None:
        if process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        self._guard.remove(process.group)
        state.returncode = process.close()
        state.process = None

    def _stop(
        self, signum: int, *, everything: bool = False, twice: bool = False
    ) -> None:
        """End the programs that are waited for; the others are ended after them."""
        self._stopping = True
        for state in self._states:
            if state.program.waited_for or everything:
                state.end(signum, self.grace, twice=twice)

    def _read(
        self, state: _ProgramState, process: Process, *, last: bool = False
    ) -> None:
        lines = process.read(last=last)
        if process.at_end:
            self._selector.unregister(process.output)
        for line in lines:  # last, because `output` may raise
            self.output(state.program.name, line)
            if state.followers is None or self._stopping:
                continue
            if programs := state.followers(line):
                state.followers = None
                self._add(programs)

    def _log(self, state: _ProgramState, event: str) -> None:
        self.output(state.program.name, f"agn-optax: {event}")


@dataclasses.dataclass
class _ProgramState:
    """The state of one program, which runs, is to start (again), or has ended.

    Times are those of `time.monotonic`.
    """

    program: Program
    began: float
    start_at: float  # infinite if no start is due
    followers: Callable[[str], Sequence[Program]] | None  # None once they were added
    process: Process | None = None
    seconds: float = 0.0
    returncode: int = 0
    restarts: int = -1  # 0 after the first start
    is_stopping: bool = False  # whether it was signaled to end, or must not start
    second_signal_at: float = math.inf  # time of a second SIGTERM
    stopped: bool = False

    @property
    def is_active(self) -> bool:
        """True if the program runs, or is to start."""
        return self.process is not None or self.start_at < math.inf

    @property
    def waited_for(self) -> bool:
        """True if the run goes on until this program has ended, or has followers."""
        return self.program.waited_for or self.followers is not None

    def end(self, signum: int, grace: float, *, twice: bool = False) -> None:
        """Prevent further starts, and end the program within the grace if it runs."""
        self.is_stopping = True
        if twice:
            self.second_signal_at = time.monotonic() + grace / 2
        if self.process is not None:
            self.stopped = self.stopped or not self.process.exited
            self.process.signal(signum)
            deadline = time.monotonic() + grace
            self.process.deadline = min(self.process.deadline, deadline)
        elif self.is_active:
            self.stopped = True
            self.start_at = math.inf


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-returncode}"
