"""Handlers of signals, for a time; and a loop that is told to end by one."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

_ONCE = 1.0  # seconds in which a signal that comes twice was sent once: by srun, too


@contextlib.contextmanager
def handled(
    signums: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Has signals call ``handler``, in the main thread, between two instructions.

    A wait of the main thread may go on meanwhile: Python wakes nobody if the signal
    comes right before it, or to another thread. So whoever is told of signals in this
    way waits a little at a time.

    Those that are ignored, as nohup and background jobs have it, stay so.
    """
    with contextlib.ExitStack() as stack:
        for signum in signums:
            # None is a handler not of Python's, which could not be restored.
            if (before := signal.getsignal(signum)) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, signum, before)
                signal.signal(signum, handler)
        yield


@contextlib.contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """SIGTERM waits for the end of a block, which then ends the program.

    An engine that takes a worker's place away (``scancel``, preemption, a drained node)
    says so by SIGTERM, and kills some seconds later. A loop that asks at every step
    still sends what it has, and leaves; the exit code is the one that shells have for
    the signal, 143, so that whoever started the program knows why it ended.

    A call that waits, as an exchange does for a lost center, goes on waiting, until
    another SIGTERM comes more than a second later: that one ends the program at once,
    with the same exit code. Outside of the main thread, and where SIGTERM is ignored,
    nothing changes.

    Yields:
      A function that says whether this process was told to end.

    Raises:
      SystemExit: it was, at the end of the block, which has had its time.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax import service
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.ones(2))
      >>> with agn_optax.Worker(center, optax.sgd(0.1), period=10) as worker:
      ...     params, state = worker.start()
      ...     with service.told_to_end() as told:
      ...         for step in range(25):
      ...             updates, state = worker.tx.update(params, state, params)
      ...             params = optax.apply_updates(params, updates)
      ...             params, state = worker.exchange(params, state)
      ...             if told():
      ...                 break
      ...         params, state = worker.flush(params, state)
      >>> worker.exchanges
      3
    """
    heard: list[float] = []  # when

    def hear(signum: int, frame: FrameType | None) -> None:
        heard.append(time.monotonic())
        if heard[-1] > heard[0] + _ONCE:
            raise SystemExit(128 + signum)

    is_main = threading.current_thread() is threading.main_thread()
    signums = [signal.SIGTERM] if is_main else []
    with handled(signums, hear):
        yield lambda: bool(heard)
    if heard:
        raise SystemExit(128 + signal.SIGTERM)
