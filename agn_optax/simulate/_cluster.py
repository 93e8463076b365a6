"""The cluster of a simulation: workers' speeds, links, the center and failures."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from agn_optax import errors
from agn_optax._internal import check

NANOSECONDS = 1_000_000_000  # in a second

# The last time of a simulation, ns: 146 years. The sum of two such times fits into an
# int64, of which schedules are made.
LAST = 1 << 62
_DRAWS = 32  # random numbers that are drawn at a time
_MOST_LOG = 300.0  # logarithm of a time that no simulation reaches
_WORKER_BYTES = 8192  # of a worker with its machine, member and stream


def nanoseconds(seconds: float) -> int:
    """Return a time as a whole number of nanoseconds, at most `LAST`."""
    return round(min(seconds * NANOSECONDS, LAST))


def stream(seed: int, worker: str, purpose: str) -> np.random.Generator:
    """Return the random stream of a worker for a purpose.

    Streams are independent, so that one more worker or failure changes no other.
    """
    text = f"{seed}/{worker}/{purpose}".encode()
    key = _Key(text)
    philox = np.random.Philox(key)  # type: ignore[arg-type]  # takes any ISeedSequence
    return np.random.Generator(philox)


class _Key(np.random.bit_generator.ISeedSequence):
    """The key of a stream: the hash of a text.

    ``Philox(key=...)`` gives the same stream, but reads random numbers of the operating
    system first, which takes longer than all other work on a new worker.
    """

    def __init__(self, text: bytes) -> None:
        self._key = hashlib.blake2b(text, digest_size=16).digest()

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.frombuffer(self._key, "<u8")


@runtime_checkable
class Speed(Protocol):
    """The time of a worker's local steps, as `Fixed` and others define it."""

    def draws(self, seed: int, worker: str) -> Iterator[int]:
        """Yield the nanoseconds of a local step, for each round of a worker."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Local steps that all take the same time.

    Args:
      seconds: seconds of a local step.

    Raises:
      InvalidArgumentError: ``seconds`` is not positive.

    Example:
      >>> from agn_optax import simulate
      >>> next(simulate.Fixed(0.25).draws(0, "worker-0"))
      250000000
    """

    seconds: float

    def __post_init__(self) -> None:
        check.seconds(self.seconds, "seconds", positive=True)

    def draws(self, seed: int, worker: str) -> Iterator[int]:
        """Yield the nanoseconds of a local step, for each round of a worker."""
        return itertools.repeat(max(1, nanoseconds(self.seconds)))


@dataclasses.dataclass(frozen=True)
class LogNormal:
    r"""Local steps whose time varies from round to round.

    .. math:: t = \text{seconds} \cdot e^{\sigma z}, \qquad z \sim N(0, 1)

    Args:
      seconds: median seconds of a local step. All steps of a round take the same time.
      sigma: standard deviation of the logarithm.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.LogNormal(0.1, sigma=0.3).sigma
      0.3
    """

    seconds: float
    sigma: float

    def __post_init__(self) -> None:
        check.seconds(self.seconds, "seconds", positive=True)
        check.rate(self.sigma, "sigma", low=0.0, high=math.inf)

    def draws(self, seed: int, worker: str) -> Iterator[int]:
        """Yield the nanoseconds of a local step, for each round of a worker."""
        normal = stream(seed, worker, "speed")
        while True:
            logs = self.sigma * normal.standard_normal(_DRAWS)
            logs = np.minimum(logs, _MOST_LOG)
            yield from _as_nanoseconds(self.seconds * np.exp(logs))


@dataclasses.dataclass(frozen=True)
class Drifting:
    r"""Local steps whose time drifts: slow rounds follow slow rounds.

    .. math:: t_k = \text{seconds} \cdot e^{x_k}, \qquad
        x_{k+1} = \rho \, x_k + \sqrt{1 - \rho^2} \, \sigma z_k, \qquad z \sim N(0, 1)

    Args:
      seconds: median seconds of a local step. All steps of a round take the same time.
      sigma: standard deviation of the logarithm.
      memory: :math:`\rho`, correlation of successive rounds.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.Drifting(0.1, sigma=0.3, memory=0.99).memory
      0.99
    """

    seconds: float
    sigma: float
    memory: float = 0.95

    def __post_init__(self) -> None:
        check.seconds(self.seconds, "seconds", positive=True)
        check.rate(self.sigma, "sigma", low=0.0, high=math.inf)
        check.rate(self.memory, "memory", low=0.0, high=1.0)

    def draws(self, seed: int, worker: str) -> Iterator[int]:
        """Yield the nanoseconds of a local step, for each round of a worker."""
        normal = stream(seed, worker, "speed")
        log = self.sigma * float(normal.standard_normal())
        new = self.sigma * math.sqrt(1 - self.memory**2)
        while True:
            for z in normal.standard_normal(_DRAWS).tolist():
                yield max(1, nanoseconds(self.seconds * math.exp(min(log, _MOST_LOG))))
                log = self.memory * log + new * z


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Local steps that take recorded times.

    Args:
      seconds: seconds of a local step in one round after another, as a sequence or an
        array; they are repeated from the first.

    Raises:
      InvalidArgumentError: there is none, or one is not positive.

    Example:
      >>> from agn_optax import simulate
      >>> times = simulate.Recorded([0.1, 0.5]).draws(0, "worker-0")
      >>> [next(times) for _ in range(3)]
      [100000000, 500000000, 100000000]
    """

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        given: Any = self.seconds
        if isinstance(given, np.ndarray) and given.ndim == 1:
            given = given.tolist()
        if not isinstance(given, Sequence) or not given:
            raise errors.InvalidArgumentError(
                f"seconds must be a sequence with at least one number, got {given!r}"
            )
        object.__setattr__(self, "seconds", tuple(given))
        for each in self.seconds:
            check.seconds(each, "each of seconds", positive=True)

    def draws(self, seed: int, worker: str) -> Iterator[int]:
        """Yield the nanoseconds of a local step, for each round of a worker."""
        return itertools.cycle(_as_nanoseconds(np.asarray(self.seconds)))


def _as_nanoseconds(seconds: np.ndarray) -> list[int]:
    with np.errstate(over="ignore"):  # infinite times end at `LAST`, too
        rounded = np.clip(np.rint(seconds * NANOSECONDS), 1, LAST)
    return rounded.astype(np.int64).tolist()


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between a worker and the center, which carries both directions at once.

    Args:
      latency: seconds of a round trip.
      bandwidth: bytes per second in either direction; None for no limit.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.Link(latency=0.05, bandwidth=125e6).bandwidth
      125000000.0
    """

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        check.seconds(self.latency, "latency")
        _check_rate(self.bandwidth, "bandwidth")


@dataclasses.dataclass(frozen=True)
class CenterHost:
    """The host of the center, which serves one message after another.

    Args:
      seconds: seconds that a message takes, beside those for its bytes.
      rate: bytes per second of messages and answers that the center processes; None for
        no limit.
      bandwidth: bytes per second of the center's link in either direction, which all
        transfers share fairly; None for no limit.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.CenterHost(seconds=0.001, bandwidth=1.25e9).rate is None
      True
    """

    seconds: float = 0.0
    rate: float | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        check.seconds(self.seconds, "seconds")
        _check_rate(self.rate, "rate")
        _check_rate(self.bandwidth, "bandwidth")


def _check_rate(value: float | None, argument: str) -> None:
    """Raise unless a rate is None or at least a byte per second."""
    if value is not None:
        check.rate(value, argument, low=1.0, high=math.inf)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A recorded failure.

    Args:
      at: second at which the workers fail.
      workers: names of the workers.
      down: seconds after which they join again, as new sessions; None if they do not.

    Raises:
      InvalidArgumentError: a number is out of range, or there is no name.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.Failure(at=60.0, workers=["worker-3"], down=30.0).workers
      ('worker-3',)
    """

    at: float
    workers: Sequence[str]
    down: float | None = None

    def __post_init__(self) -> None:
        check.seconds(self.at, "at")
        if self.down is not None:
            check.seconds(self.down, "down")
        if not self.workers or isinstance(self.workers, str):
            raise errors.InvalidArgumentError(
                f"workers must be a sequence of names, got {self.workers!r}"
            )
        object.__setattr__(self, "workers", tuple(self.workers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of workers, at random times or as recorded.

    A worker that fails loses its connection and its local steps since its last message.
    The center waits for it until its lease ends, or until it joins again.

    Args:
      every: mean seconds between the failures of a group of workers; None for no random
        failures.
      down: seconds after which the workers join again, as new sessions.
      together: number of workers in a group; all workers of a group fail together.
      announced: whether workers leave the center when they fail, as with a preemption
        that they are told of, so that the center does not wait for them.
      recorded: failures at known times.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import simulate
      >>> simulate.Failures(every=3600.0, down=60.0, together=8).announced
      False
    """

    every: float | None = None
    down: float = 0.0
    together: int = 1
    announced: bool = False
    recorded: Sequence[Failure] = ()

    def __post_init__(self) -> None:
        if self.every is not None:
            check.seconds(self.every, "every", positive=True)
        check.seconds(self.down, "down")
        check.positive_int(self.together, "together")
        check.instance(self.recorded, Sequence, "recorded must be a sequence")
        object.__setattr__(self, "recorded", tuple(self.recorded))
        for each in self.recorded:
            check.instance(each, Failure, "each of recorded must be a Failure(...)")

    def waits(self, seed: int, group: str) -> Iterator[int]:
        """Yield the nanoseconds until each random failure of a group."""
        if self.every is None:
            return
        random = stream(seed, group, "failures")
        while True:
            yield nanoseconds(self.every * float(random.standard_exponential()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The workers of a simulation, their links, and the host of the center.

    Args:
      workers: the number of workers, which are then called ``worker-0`` and so on; or
        their names.
      speed: the time of local steps, such as `Fixed`; one for all workers, or a
        sequence with one for each.
      link: the link of a worker; one for all, or a sequence with one for each.
      center: the host of the center.
      failures: failures of workers.
      joins: second at which workers join, by name; 0 for the others.
      leaves: second at which workers leave, by name; the others stay.

    Raises:
      InvalidTypeError: an argument has another type.
      InvalidArgumentError: a number is out of range, names are not unique, a name is
        not that of a worker, a worker leaves before it joins, or there is no memory
        for the workers.

    Example:
      >>> from agn_optax import simulate
      >>> speeds = [simulate.Fixed(0.1), simulate.Fixed(0.3)]
      >>> simulate.Cluster(workers=2, speed=speeds).names
      ('worker-0', 'worker-1')
    """

    workers: int | Sequence[str]
    speed: Speed | Sequence[Speed]
    link: Link | Sequence[Link] = Link()
    center: CenterHost = CenterHost()
    failures: Failures = Failures()
    joins: Mapping[str, float] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.workers, Sequence) or isinstance(self.workers, str):
            memory_left(check.positive_int(self.workers, "workers"))
        names = self.names
        for name in names:
            if not isinstance(name, str) or not name:
                raise errors.InvalidTypeError(
                    f"each name of workers must be a non-empty str, got {name!r}"
                )
        known = set(names)
        if not names or len(known) < len(names):
            raise errors.InvalidArgumentError(
                f"workers must have unique names, and at least one, got {names}"
            )
        for argument, kind, such_as in (
            ("speed", Speed, "a speed such as Fixed(0.1)"),
            ("link", Link, "a Link(...)"),
        ):
            given = _for_each(getattr(self, argument), len(names), argument)
            for each in {id(each): each for each in given}.values():
                check.instance(each, kind, f"{argument} must be {such_as}")
        check.instance(self.center, CenterHost, "center must be a CenterHost(...)")
        check.instance(self.failures, Failures, "failures must be Failures(...)")
        recorded = self.failures.recorded
        groups = [("joins", self.joins), ("leaves", self.leaves)]
        groups += [("failures", dict.fromkeys(f.workers, f.at)) for f in recorded]
        for argument, times in groups:
            check.instance(times, Mapping, f"{argument} must be seconds by name")
            for name, second in times.items():
                check.seconds(second, f"{argument} of {name!r}")
                if name not in known:
                    raise errors.InvalidArgumentError(
                        f"{argument} must name workers, got {name!r}; there are "
                        f"{len(names)}, the first of which is {names[0]!r}"
                    )
        for name, second in self.leaves.items():
            if second < (joins := self.joins.get(name, 0.0)):
                raise errors.InvalidArgumentError(
                    f"leaves of {name!r} must not be before it joins, at {joins:g} s, "
                    f"got {second:g}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers."""
        if isinstance(self.workers, Sequence):
            return tuple(self.workers)
        return tuple(f"worker-{i}" for i in range(self.workers))

    @property
    def speeds(self) -> Sequence[Speed]:
        """The speed of each worker."""
        return _for_each(self.speed, len(self.names), "speed")

    @property
    def links(self) -> Sequence[Link]:
        """The link of each worker."""
        return _for_each(self.link, len(self.names), "link")


def memory_left(workers: int) -> int:
    """Return the bytes that a simulation of these workers has for its messages.

    They are half of the machine's memory, without that for the workers.

    Raises:
      InvalidArgumentError: there is no memory for the workers.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    needed = workers * _WORKER_BYTES
    if needed > memory:
        raise errors.InvalidArgumentError(
            f"{workers} workers need {needed / 1e9:.3g} GB, more than half of this "
            f"machine's memory, {memory / 1e9:.3g} GB"
        )
    return memory - needed


def _for_each(value: Any, count: int, argument: str) -> Sequence[Any]:
    """Return a value for each worker."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise errors.InvalidArgumentError(
            f"{argument} must be one for all {count} workers, or a sequence with one "
            f"for each, got {len(value)}"
        )
    return value
