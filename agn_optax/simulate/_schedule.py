"""Schedules: who exchanges when, with which anchor, and what becomes of a message."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check
from agn_optax.center import Asynchronous, Ledger, Limits, Mode, check_combine
from agn_optax.round import DynamicPeriod, Fragments
from agn_optax.rules import Rule, check_rule
from agn_optax.simulate._cluster import (
    LAST,
    NANOSECONDS,
    Cluster,
    memory_left,
    nanoseconds,
)
from agn_optax.simulate._events import (
    COLUMNS,
    ROW_BYTES,
    SESSION_COLUMNS,
    Numbers,
    Outcome,
    SessionEvent,
    Settings,
    Simulation,
)
from agn_optax.worker import check_fragments

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """All exchanges of a simulation, as arrays with an entry for each message.

    Messages are in the order of sending. Times are in nanoseconds since the simulation
    began, and -1 if the event did not happen. ``order`` gives the order in which the
    center settled messages; messages with the same fragment and version were applied
    together, with their `weight`, `staleness` and number of registered ``workers``.

    Attributes:
      names: names of the workers.
      seed: the seed.
      digest: 64-bit digest of all that happened, as 16 hexadecimal digits. The same
        arguments give the same digest in any process of one machine.
      duration: seconds that were simulated.
      events: number of events that were simulated.
      combines: whether the center applies messages in rounds.
      rule: the rule; None if none was given.
      limits: the limits of the center.
      message_bytes: bytes of a message of each fragment.
      answer_bytes: bytes of an answer of each fragment.
      worker: index of the worker.
      fragment: index of the fragment; 0 without fragments.
      session: number of the worker's session: 1, 2, 3, ...
      sequence: number of the exchange in its session, for each fragment.
      steps: local steps in the message.
      step_time: nanoseconds of each of these local steps.
      began: begin of the round.
      sent: time of sending.
      anchor_version: version that the worker adopted last.
      arrived: time at which the last byte reached the center.
      settled: time at which the center applied, dropped or rejected the message.
      received: time at which the last byte of the answer reached the worker.
      adopted: time at which the worker adopted the answer.
      version: version that the message made, alone or with others; -1 if not applied.
      answer_version: version that the answer carried.
      staleness: versions between the anchor and the message.
      outcome: an `Outcome`.
      order: number of the center's decision on the message.
      workers: registered workers at that time.
      steps_since: local steps between sending and adopting the answer.
      in_background: 1 if local steps go on while the message is in flight.
      index: index of the worker at the center, which center optimizers get; -1 before
        the decision.
      weight: factor of the message in its round; 1 without rounds.
      sessions: ``time``, ``worker``, ``session`` and ``event`` (a `SessionEvent`) of
        each begin and end of a session.
      present: nanoseconds of each worker in sessions.
      busy: nanoseconds of each worker in local steps.
      claimed_weight: weight that the worker claims for the message, NaN for none; None
        if no worker claims one. Simulated workers claim none.
    """

    names: tuple[str, ...]
    seed: int
    digest: str
    duration: float
    events: int
    combines: bool
    rule: Rule | None
    limits: Limits
    message_bytes: tuple[int, ...]
    answer_bytes: tuple[int, ...]
    worker: np.ndarray
    fragment: np.ndarray
    session: np.ndarray
    sequence: np.ndarray
    steps: np.ndarray
    step_time: np.ndarray
    began: np.ndarray
    sent: np.ndarray
    anchor_version: np.ndarray
    arrived: np.ndarray
    settled: np.ndarray
    received: np.ndarray
    adopted: np.ndarray
    version: np.ndarray
    answer_version: np.ndarray
    staleness: np.ndarray
    outcome: np.ndarray
    order: np.ndarray
    workers: np.ndarray
    steps_since: np.ndarray
    in_background: np.ndarray
    index: np.ndarray
    weight: np.ndarray
    sessions: dict[str, np.ndarray]
    present: np.ndarray
    busy: np.ndarray
    claimed_weight: np.ndarray | None = None

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.worker)

    def __repr__(self) -> str:
        """Return a summary."""
        return (
            f"Schedule({len(self.names)} workers, {self.duration:g} s, {len(self)} "
            f"messages, seed={self.seed}, digest={self.digest})"
        )

    @property
    def applied(self) -> np.ndarray:
        """The indices of the applied messages, in the order of the center."""
        (applied,) = np.nonzero(self.outcome == Outcome.APPLIED)
        return applied[np.argsort(self.order[applied])]

    @property
    def exchanges_per_second(self) -> float:
        """The applied messages per second."""
        return float(np.sum(self.outcome == Outcome.APPLIED) / self.duration)

    @property
    def goodput(self) -> float:
        """The local steps in applied messages, per second.

        With n fragments, a local step is in a message of each, and counts as 1 / n.
        """
        steps = self.steps[self.outcome == Outcome.APPLIED].sum()
        return float(steps / self.duration / len(self.message_bytes))

    @property
    def staleness_histogram(self) -> np.ndarray:
        """The number of applied messages by their staleness, from 0 on."""
        return np.bincount(self.staleness[self.outcome == Outcome.APPLIED])

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that reached the center."""
        sent = self.fragment[self.arrived >= 0]
        return int(np.asarray(self.message_bytes, np.int64)[sent].sum())

    @property
    def bytes_received(self) -> int:
        """The bytes of all answers that reached a worker."""
        received = self.fragment[self.received >= 0]
        return int(np.asarray(self.answer_bytes, np.int64)[received].sum())

    @property
    def utilization(self) -> np.ndarray:
        """The fraction of each worker's time in sessions that it makes local steps."""
        return self.busy / np.maximum(self.present, 1)

    @property
    def waiting(self) -> np.ndarray:
        """The seconds that each worker spends in sessions without local steps."""
        return (self.present - self.busy) / 1e9

    def summary(self) -> dict[str, Any]:
        """Return the main numbers by name."""
        counts = {
            outcome.name.lower(): int(np.sum(self.outcome == outcome))
            for outcome in Outcome
        }
        stale = self.staleness[self.outcome == Outcome.APPLIED]
        return {
            "workers": len(self.names),
            "seconds": self.duration,
            **counts,
            "exchanges_per_second": self.exchanges_per_second,
            "steps_per_second": self.goodput,
            "staleness_mean": float(stale.mean()) if stale.size else None,
            "staleness_max": int(stale.max()) if stale.size else None,
            "utilization": float(self.busy.sum() / max(self.present.sum(), 1)),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "failures": int(np.sum(self.sessions["event"] == SessionEvent.FAILED)),
        }


def schedule(
    cluster: Cluster,
    *,
    period: Any,
    mode: Mode = Asynchronous(),  # noqa: B008 it is immutable
    rule: Rule | None = None,
    params: PyTree = None,
    exchanges: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    overlap: bool = False,
    patience: int | None = None,
    fragments: Fragments | None = None,
    limits: Limits | None = None,
    barrier: int = 0,
    progress: Callable[[float], object] | None = None,
) -> Schedule:
    """Simulate when the workers of a cluster exchange with their center.

    Modes, staleness, leases, rounds, overlap, fragments and dynamic periods are decided
    by the code of real centers and workers; only the clock is virtual. No array of the
    model exists. Messages are not rejected for their norm, which only `run` knows.

    Args:
      cluster: the workers, their links and the center's host.
      period: the period of a `Worker`: a number, a schedule, or `dynamic_period`.
      mode: the mode of the center.
      rule: the rule, whose codec gives the bytes of messages and answers; None for
        messages without bytes, after which workers adopt the center.
      params: parameters, or a tree of their shapes and dtypes, for the bytes.
      exchanges: number of settled messages after which the simulation ends.
      steps: number of local steps in settled messages after which it ends. A message
        or round is settled as a whole, so there may be a few more. With n fragments, a
        local step is in a message of each, and counts as 1 / n.
      seconds: simulated seconds after which it ends. Give at least one of these.
      seed: seed of all random streams.
      overlap: ``overlap`` of the workers.
      patience: ``patience`` of the workers.
      fragments: ``fragments`` of the workers. Each has a center of its own, and all
        share the center's host and link.
      limits: limits of the center; None for no limit of workers.
      barrier: number of workers that must have joined before any may start.
      progress: function that is called from time to time with the fraction done.

    Returns:
      The schedule.

    Raises:
      InvalidTypeError: an argument has another type.
      InvalidArgumentError: an argument is out of range, no worker could ever start, a
        real center or worker would reject the settings, or the schedule would not fit
        into memory.
      SimulationError: the number of exchanges or steps is never reached, because
        nothing more can happen.

    Example:
      >>> from agn_optax import simulate
      >>> speeds = [simulate.Fixed(0.1), simulate.Fixed(0.3)]
      >>> cluster = simulate.Cluster(workers=2, speed=speeds)
      >>> found = simulate.schedule(cluster, period=10, seconds=3.05)
      >>> found.worker.tolist(), found.staleness.tolist()
      ([0, 0, 0, 1], [0, 0, 0, 3])
    """
    return simulate(
        None,
        cluster,
        period=period,
        mode=mode,
        rule=rule,
        params=params,
        exchanges=exchanges,
        steps=steps,
        seconds=seconds,
        seed=seed,
        overlap=overlap,
        patience=patience,
        fragments=fragments,
        limits=limits,
        barrier=barrier,
        progress=progress,
    )


def simulate(
    numbers_of: Callable[[Settings], Numbers] | None,
    cluster: Cluster,
    *,
    period: Any,
    mode: Mode = Asynchronous(),  # noqa: B008 it is immutable
    rule: Rule | None = None,
    params: PyTree = None,
    exchanges: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    overlap: bool = False,
    patience: int | None = None,
    fragments: Fragments | None = None,
    limits: Limits | None = None,
    barrier: int = 0,
    progress: Callable[[float], object] | None = None,
) -> Schedule:
    """Return the schedule of a simulation, in which messages may have numbers.

    ``numbers_of`` returns what computes them; None leaves them out. The
    other arguments are those of `schedule`.
    """
    check.instance(cluster, Cluster, "cluster must be a Cluster(...)")
    check.instance(mode, Mode, "mode must be a mode such as Asynchronous()")
    if exchanges is None and steps is None and seconds is None:
        raise errors.InvalidArgumentError(
            "give exchanges=, steps= or seconds=, after which the simulation ends"
        )
    check.whole_number(exchanges, "exchanges", least=1)
    check.whole_number(steps, "steps", least=1)
    if seconds is not None:
        check.seconds(seconds, "seconds", positive=True)
        if nanoseconds(seconds) == LAST:
            raise errors.InvalidArgumentError(
                f"seconds must be less than {LAST / NANOSECONDS:.3g}, got {seconds:g}"
            )
    check.whole_number(seed, "seed", least=0, optional=False)
    check.whole_number(patience, "patience", least=0)
    names = cluster.names
    limits = Limits(max_workers=None) if limits is None else limits
    check.instance(limits, Limits, "limits must be Limits(...)")
    if rule is not None:
        check_rule(rule)
        check_combine(rule, mode)
    _check_start(len(names), limits, barrier)
    if fragments is not None:
        check_fragments(fragments, rule, period, overlap=overlap)
    sizes = _sizes(rule, params, fragments)
    most_rows = memory_left(len(names)) // ROW_BYTES
    if exchanges is not None and exchanges > most_rows:
        raise errors.InvalidArgumentError(
            f"{exchanges} exchanges of {len(names)} workers need "
            f"{(exchanges * ROW_BYTES) / 1e9:.3g} GB, and there is memory for "
            f"{most_rows}"
        )
    is_dynamic = isinstance(period, DynamicPeriod)
    settings = Settings(
        cluster=cluster,
        ledgers=[Ledger(mode, limits=limits, barrier=barrier) for _ in sizes],
        sizes=sizes,
        lengths=[] if is_dynamic else _lengths(period, fragments),
        dynamic=period if is_dynamic else None,
        adopts_before=rule is not None and rule.adopts == "before",
        overlap=overlap,
        delay=0 if fragments is None else fragments.delay,
        patience=patience,
        seed=seed,
        exchanges=exchanges,
        steps=steps,
        seconds=seconds,
        most_rows=most_rows,
        progress=progress,
    )
    if numbers_of is not None:
        settings.numbers = numbers_of(settings)
    simulation = Simulation(settings)
    # Computed messages leave arrays in cycles.
    is_plain = numbers_of is None
    with _without_garbage_collection() if is_plain else contextlib.nullcontext():
        simulation.run()
    arguments = {"combines": mode.combines, "rule": rule, "limits": limits}
    return _result(simulation, names, seed, sizes, arguments)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, which would find nothing.

    The objects of a schedule have no cycles. Looking for them takes a fifth of the time
    of 10,000 workers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_start(workers: int, limits: Limits, barrier: int) -> None:
    """Raise if some workers can never start."""
    check.whole_number(barrier, "barrier", least=0, optional=False)
    if barrier > workers:
        raise errors.InvalidArgumentError(
            f"barrier must be at most the number of workers, {workers}, or no worker "
            f"ever starts; got {barrier}"
        )
    if limits.max_workers is not None and limits.max_workers < workers:
        raise errors.InvalidArgumentError(
            f"this center takes at most {limits.max_workers} workers, and the cluster "
            f"has {workers}"
        )


def _sizes(
    rule: Rule | None, params: PyTree, fragments: Fragments | None
) -> list[tuple[int, int]]:
    """Return the bytes of a message and of an answer, of each fragment."""
    count = 1 if fragments is None else len(fragments)
    if rule is None:
        if params is not None:
            raise errors.InvalidArgumentError("params needs a rule, got rule=None")
        return [(0, 0)] * count
    if params is None:
        return [(0, 0)] * count
    check.float_leaves(params, "params")
    like = jax.eval_shape(lambda tree: tree, params)
    parts = [like] if fragments is None else fragments.divide(like).cut(like)
    return [rounds.exchange_bytes(rule, part) for part in parts]


def _lengths(
    period: Any, fragments: Fragments | None
) -> Sequence[Callable[[int], int]]:
    """Return functions from exchanges made to the local steps of the next round."""
    schedule = rounds.as_schedule(period)
    if fragments is not None:
        schedules = [fragments.periods(f, schedule) for f in range(len(fragments))]
    else:
        schedules = [schedule]

    def checked(schedule: Callable[[int], Any]) -> Callable[[int], int]:
        @functools.cache
        def length(exchanges: int) -> int:
            return int(check.positive_int(schedule(exchanges), f"period({exchanges})"))

        return length

    return [*map(checked, schedules)]


def _result(
    simulation: Simulation,
    names: tuple[str, ...],
    seed: int,
    sizes: Sequence[tuple[int, int]],
    arguments: dict[str, Any],
) -> Schedule:
    types = [(name, np.float64 if name == "weight" else np.int64) for name in COLUMNS]
    table = np.frombuffer(simulation.rows, types)
    order = np.argsort(table["number"])  # rows are written at the messages' ends
    rows: dict[str, Any] = {name: table[name][order] for name in COLUMNS[1:]}
    events = np.frombuffer(simulation.sessions, np.int64)
    by_event = events.reshape(-1, len(SESSION_COLUMNS)).T.copy()
    sessions = dict(zip(SESSION_COLUMNS, by_event, strict=True))
    return Schedule(
        names=names,
        seed=seed,
        digest=digest_of((seed, names, sizes, simulation.now), rows, sessions),
        duration=simulation.now / 1e9,
        events=simulation.events,
        **arguments,
        message_bytes=tuple(message for message, _ in sizes),
        answer_bytes=tuple(answer for _, answer in sizes),
        sessions=sessions,
        present=np.array([w.present for w in simulation.workers], np.int64),
        busy=np.array([w.busy for w in simulation.workers], np.int64),
        **rows,
    )


def digest_of(
    about: Any, rows: dict[str, np.ndarray], sessions: dict[str, np.ndarray]
) -> str:
    """Return the digest of a schedule.

    Args:
      about: what the arrays do not say.
      rows: the arrays of messages.
      sessions: the arrays of the sessions' events.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(about).encode())
    for column in (*rows.values(), *sessions.values()):
        digest.update(column.tobytes())
    return digest.hexdigest()
