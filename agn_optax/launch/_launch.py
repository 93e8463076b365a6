"""Several programs side by side on one machine, ended all together."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Sequence

from agn_optax import errors
from agn_optax.launch._program import Ended, Program
from agn_optax.launch._signals import signals_to
from agn_optax.launch._supervisor import FORWARDED, Supervisor


def run(
    programs: Sequence[Program],
    *,
    output: Callable[[str, str], None],
    grace: float = 10.0,
    restart_delay: float = 1.0,
) -> list[Ended]:
    r"""Runs programs side by side until they have ended, and leaves none behind.

    A program that fails is started again after ``restart_delay``, up to its bound. When
    one fails beyond that, or the launcher is interrupted, or anything here raises, all
    are ended: by a signal first, by SIGKILL after ``grace`` seconds. A program ends
    with its first process: what else is in its process group is ended with it, and has
    the same ``grace`` if it holds the program's output open. Only a process that leaves
    the group and its session can escape.

    A program reads nothing from stdin, and finds ``AGN_OPTAX_RESTARTS`` in its
    environment, the number of restarts so far. Should the launcher itself be killed,
    the programs are killed as well.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded, unless they are ignored. That
    takes the main thread; in another one, signals are the caller's business.

    Args:
      programs: what to run; the names differ, and one at least is waited for, or has
        followers.
      output: called as ``output(name, line)``, from this thread, with every line of a
        program's stdout and stderr, and, beginning with ``agn-optax:``, with what
        happens to it. ``\n``, ``\r`` and ``\r\n`` end a line; a very long one comes
        in pieces. While it does not return, programs with much to say wait.
      grace: seconds from the first signal to SIGKILL.
      restart_delay: seconds before a program that failed is started again.

    Returns:
      What became of each program, in the order of ``programs``; followers come last.

    Raises:
      InvalidArgumentError: a setting is wrong, or a command cannot be started.
      KeyboardInterrupt: SIGINT came, and all programs have ended.
      SystemExit: another of the signals came, and all programs have ended; with the
        status of a shell, 128 and the signal's number.

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
            f"one program at least must be waited for, got {list(programs)}"
        )
    for what, seconds in (("grace", grace), ("restart_delay", restart_delay)):
        if not 0 <= seconds < math.inf:
            raise errors.InvalidArgumentError(
                f"{what} must be a number of seconds, got {seconds!r}"
            )
    supervisor = Supervisor(programs, output, grace, restart_delay)
    try:
        # It is closed after the handlers are restored, and has heard all signals then.
        with contextlib.closing(supervisor), contextlib.ExitStack() as heard:
            if threading.current_thread() is threading.main_thread():
                heard.enter_context(signals_to(supervisor.waker, FORWARDED))
            return supervisor.run()
    finally:
        # Also when something else was raised: whoever reads the lines may have been
        # interrupted as well, so that writing them has failed.
        if supervisor.signals:
            signum = supervisor.signals[0]
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)
