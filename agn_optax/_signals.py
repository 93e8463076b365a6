"""Temporary signal handlers, and a delay of SIGTERM until the end of a block."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

# s within which repeated signals count as one: srun may forward a signal that the
# process has also received directly.
_REPEAT_TIME = 1.0


@contextlib.contextmanager
def handled(
    signums: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Call ``handler`` when one of these signals comes, on the main thread.

    A blocking call of the main thread may continue after a signal: Python does not
    interrupt it if the signal comes right before the call, or to another thread. So the
    main thread should block for short times only.

    Signals that are ignored, as by nohup or in background jobs, stay ignored.
    """
    with contextlib.ExitStack() as stack:
        for signum in signums:
            # None is a handler that Python did not set and cannot restore.
            if (before := signal.getsignal(signum)) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, signum, before)
                signal.signal(signum, handler)
        yield


@contextlib.contextmanager
def delay_sigterm() -> Iterator[Callable[[], bool]]:
    """Delay SIGTERM until the end of a block, which then ends the program.

    An engine that takes a worker's resources away (``scancel``, preemption, a drained
    node) sends SIGTERM, and kills the worker some seconds later. A loop that checks for
    SIGTERM at every step can still send its contribution and leave. The exit code is
    143, as shells report SIGTERM, so that the engine knows why the program ended.

    A blocking call, such as an exchange with a lost center, continues to wait until
    another SIGTERM comes more than a second later, which ends the program at once with
    the same exit code. Outside of the main thread, and if SIGTERM is ignored, nothing
    changes.

    Yields:
      A function that returns whether SIGTERM has come.

    Raises:
      SystemExit: at the end of the block, if SIGTERM has come.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax import service
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.ones(2))
      >>> with agn_optax.Worker(center, optax.sgd(0.1), period=10) as worker:
      ...     params, state = worker.start()
      ...     with service.delay_sigterm() as terminated:
      ...         for step in range(25):
      ...             updates, state = worker.tx.update(params, state, params)
      ...             params = optax.apply_updates(params, updates)
      ...             params, state = worker.exchange(params, state)
      ...             if terminated():
      ...                 break
      ...         params, state = worker.flush(params, state)
      >>> worker.exchanges
      3
    """
    times: list[float] = []  # times of the signals

    def record(signum: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if times[-1] > times[0] + _REPEAT_TIME:
            raise SystemExit(128 + signum)

    is_main = threading.current_thread() is threading.main_thread()
    signums = [signal.SIGTERM] if is_main else []
    with handled(signums, record):
        yield lambda: bool(times)
    if times:
        raise SystemExit(128 + signal.SIGTERM)
