"""The cluster of a recorded run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import Limits
from agn_optax.simulate._cluster import Cluster, Failure, Failures, Recorded
from agn_optax.simulate._events import SessionEvent
from agn_optax.simulate._tape_events import Change, Sent, by_number, events_of
from agn_optax.tape import Tape

# s: workers of a simulation leave and fail at least so long after an answer, as times
# of a tape are rounded to microseconds.
_AFTER_ANSWER = 1e-3


def cluster_of(
    tape: Tape,
    *,
    lease: float = Limits.lease,
    reported: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Cluster:
    """Return the cluster of a recorded run, for simulations of others.

    Args:
      tape: the tape.
      lease: ``lease`` of the center's limits, which a tape does not have.
      reported: name of a number that workers report: the seconds of a local step. None
        takes them from the times of the messages.
      progress: called with the number of each record.

    Returns:
      The cluster. Workers are in the order of their names, in which numbers are
      compared as numbers.

      Each has `Recorded` times: the time from the center's last answer to the arrival
      of the message, divided by its local steps; or from the arrival of the message
      before, if local steps went on while it was in flight. So the times include
      transfers, local work around an exchange, and in the first round of a session
      compilation and waiting for a barrier; links have no latency. They do not include
      the time for which a message waits at the center. A round that no message ended
      has the median of its worker, or twice the time that is known, if that is longer.

      Joins and leaves have their times. A worker failed when its connection broke. If
      that is not recorded: a ``lease`` before the center gave it up, or if it joined
      again before, in the middle of the time in which it can have failed. Workers that
      left and joined again are failures, too, which are ``announced`` if there are no
      others.

      Local steps of a round, mode, limits and barrier are no part of a cluster.

    Raises:
      InvalidArgumentError: the tape has no message with local steps, or an argument is
        out of range.
      DurabilityError: the tape is damaged.

    Example:
      >>> import tempfile, jax.numpy as jnp, agn_optax
      >>> from agn_optax import simulate
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     durability = agn_optax.center.Journal(folder, keep="hashes")
      ...     rule = agn_optax.rules.downpour()
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=durability)
      ...     session = center.join("worker-0")
      ...     for i in range(3):
      ...         sent = agn_optax.center.Submission(i + 1, jnp.ones(2), i, steps=5)
      ...         _ = session.exchange(sent)
      ...     center.close()
      ...     cluster = simulate.cluster_of(agn_optax.tape.read(folder))
      >>> cluster.names, len(cluster.speeds[0].seconds)
      (('worker-0',), 4)
    """
    check.instance(tape, Tape, "tape must be the result of agn_optax.tape.read(...)")
    check.seconds(lease, "lease")
    histories: dict[str, list[Sent | Change]] = {}
    for found in events_of(tape, lease, progress):
        name = found.worker if isinstance(found, Change) else found.message.worker
        histories.setdefault(name, []).append(found)
    times = {name: _step_times(h, reported) for name, h in histories.items()}
    finished = [each for of_worker in times.values() for each in of_worker.values()]
    if not finished:
        raise errors.InvalidArgumentError(
            f"{tape.path} has no message with local steps, so that it does not tell "
            "the speed of a worker"
        )
    typical = statistics.median(finished)
    names = sorted(histories, key=by_number)
    origin = next(tape.events(tape.begin)).time if tape.begin else 0.0
    joins: dict[str, float] = {}
    leaves: dict[str, float] = {}
    failures: list[Failure] = []
    ends: set[SessionEvent] = set()  # of sessions after which the worker joined again
    for name, history in histories.items():
        changes = [each for each in history if isinstance(each, Change)]
        joined = [c.at for c in changes if c.event is SessionEvent.JOINED]
        joins[name] = max(joined[0] - origin, 0.0) if joined else 0.0
        for i, change in enumerate(changes):
            if change.event is SessionEvent.JOINED:
                continue
            at = change.at if math.isnan(change.lost) else change.lost
            # NaN, of what the tape does not have, is never the larger one.
            at = max(at, change.began + _AFTER_ANSWER, origin) - origin
            back = changes[i + 1].at - origin if i + 1 < len(changes) else None
            if back is None and change.event is SessionEvent.LEFT:
                leaves[name] = at
                continue
            down = None if back is None else max(back - at, 0.0)
            failures.append(Failure(at, [name], down))
            ends.add(change.event)
    return Cluster(
        workers=names,
        speed=[Recorded(_rounds(histories[n], times[n], typical)) for n in names],
        failures=Failures(recorded=failures, announced=ends == {SessionEvent.LEFT}),
        joins=joins,
        leaves=leaves,
    )


def _step_times(
    history: Sequence[Sent | Change], reported: str | None
) -> dict[int, float]:
    """Return the seconds of a local step, by the index of the message in a history."""
    found: dict[int, float] = {}
    for i, each in enumerate(history):
        if isinstance(each, Change):
            continue
        message = each.message
        seconds = message.reported.get(reported or "")
        if seconds is None and message.steps:
            seconds = (message.arrived - each.began) / message.steps
        if seconds is not None and not math.isnan(seconds):
            found[i] = max(float(seconds), 1e-9)
    return found


def _rounds(
    history: Sequence[Sent | Change], times: dict[int, float], typical: float
) -> list[float]:
    """Return the seconds of a local step in each round, also those without a message.

    Args:
      history: the messages and changes of a worker.
      times: result of `_step_times`.
      typical: seconds that a worker without a message takes.
    """
    median = statistics.median(times.values()) if times else typical
    found, steps = [], 1
    for i, each in enumerate(history):
        if isinstance(each, Sent):
            found.append(times.get(i, median))
            steps = each.message.steps or steps
        elif each.event is not SessionEvent.JOINED:
            found.append(max(median, 2 * (each.at - each.began) / steps))
    return [*found, median]
