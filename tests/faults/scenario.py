"""Scenarios: settings, workers and faults, drawn from a seed; and smaller ones."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from helpers import shared

from agn_optax.center import Asynchronous, BoundedStaleness, Synchronous

_MODES = (
    Asynchronous(),
    Asynchronous(),
    BoundedStaleness(versions=2),
    BoundedStaleness(rounds=1),
    BoundedStaleness(versions=3, rounds=1),
    Synchronous(),
    Synchronous(quorum=2, grace=0.5),
    Synchronous(quorum=1, grace=0.2, late="drop"),
    Synchronous(quorum=1, grace=0.2, late="weighted"),
)
_JOURNALS = 0.25  # share of scenarios with a journal, which take three times as long
_DISK_FAULTS = ("before", "after", "after", "torn", "full")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A worker, and what happens to it.

    Attributes:
      exchanges: number of exchanges after which it leaves for good.
      resumes: whether its processes continue from a checkpoint.
      slowness: factor of the time of a local step.
      starts: time of its start, s.
      kills: points of its program at which its process is killed.
      leaves: numbers of exchanges after which it leaves, and comes back.
      pauses: times and durations in which its process is stopped, s.
      cuts: times at which its connection breaks, s.
      twins: times at which another process takes its name, s.
    """

    exchanges: int = 3
    resumes: bool = False
    slowness: float = 1.0
    starts: float = 0.0
    kills: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    cuts: tuple[float, ...] = ()
    twins: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The settings and the faults of one run.

    Attributes:
      lost, late, repeated: share of packets to which that happens.
      poisoned: numbers of messages that are not finite.
      journal: whether exchanges are written to disk. Without a journal, the center's
        process is not killed: another one would be another center.
      disk: what happens at calls of the disk, by their numbers: see `FaultyDisk`.
      power: whether the power may fail when the center's process ends.
      kills: times at which the center's process is killed, s.
      replies: numbers of packets of the center, after which it is killed at once.
      pulls: numbers of versions, right after which an observer asks for parameters.
      pauses: times and durations in which the center's process is stopped, s.
      closes: whether the center is closed at the end, or killed.
    """

    seed: int
    rule: Any
    mode: Any
    barrier: int = 0
    overlap: bool = False
    journal: bool = True
    keep: str | None = "contributions"
    journal_size: int | None = None
    workers: tuple[Plan, ...] = ()
    lost: float = 0.0
    late: float = 0.0
    repeated: float = 0.0
    poisoned: tuple[int, ...] = ()
    disk: tuple[tuple[int, str], ...] = ()
    power: bool = False
    kills: tuple[float, ...] = ()
    replies: tuple[int, ...] = ()
    pulls: tuple[int, ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    closes: bool = True


def drawn(seed):
    """Return the scenario of a seed."""
    dice = random.Random(seed)  # noqa: S311
    mode = dice.choice(_MODES)
    rules = [shared.downpour(), shared.average() if mode.combines else EASGD]
    some = lambda share, make: tuple(make() for _ in range(3) if dice.random() < share)  # noqa: E731
    time = lambda: round(dice.uniform(0.2, 8.0), 3)  # noqa: E731
    network = dice.random() < 0.6
    workers = tuple(
        Plan(
            exchanges=dice.randint(1, 3),
            resumes=dice.random() < 0.5,
            slowness=dice.choice((0.3, 1.0, 1.0, 3.0)),
            starts=round(dice.uniform(0.0, 1.0), 3),
            kills=some(0.2, lambda: dice.randint(1, 15)),
            leaves=some(0.07, lambda: dice.randint(1, 3)),
            pauses=some(0.07, lambda: (time(), dice.choice((1.0, 6.0)))),
            cuts=some(0.15, time),
            twins=some(0.03, time),
        )
        for _ in range(dice.choice((1, 2, 2, 3)))
    )
    scenario = Scenario(
        seed,
        rule=dice.choice(rules),
        mode=mode,
        barrier=dice.choice((0, 0, len(workers))),
        overlap=dice.random() < 0.3,
        keep=dice.choice(("contributions", "contributions", "hashes", None)),
        journal_size=dice.choice((None, None, 2500)),
        workers=workers,
        lost=dice.choice((0.0, 0.1)) * network,
        late=dice.choice((0.0, 0.2)) * network,
        repeated=dice.choice((0.0, 0.2)) * network,
        poisoned=some(0.05, lambda: dice.randint(1, 8)),
        disk=some(0.25, lambda: (dice.randint(1, 90), dice.choice(_DISK_FAULTS))),
        power=dice.random() < 0.5,
        kills=some(0.1, time),
        replies=some(0.1, lambda: dice.randint(1, 20)),
        pulls=some(0.2, lambda: dice.randint(1, 6)),
        pauses=some(0.07, lambda: (time(), dice.choice((1.0, 6.0)))),
        closes=dice.random() < 0.75,
    )
    return scenario if dice.random() < _JOURNALS else without_journal(scenario)


EASGD = shared.easgd(0.25)


def without_journal(scenario):
    """Return a scenario without a journal, and without what needs one."""
    return dataclasses.replace(
        scenario,
        journal=False,
        keep="contributions",
        journal_size=None,
        disk=(),
        power=False,
        kills=(),
        replies=(),
        closes=True,
    )


def smaller(scenario) -> Iterator[Scenario]:
    """Yield scenarios that are smaller in one point, the smallest first."""
    replace = dataclasses.replace
    plans = scenario.workers
    for i in range(len(plans)):
        if len(plans) > 1:
            barrier = min(scenario.barrier, len(plans) - 1)
            yield replace(scenario, workers=plans[:i] + plans[i + 1 :], barrier=barrier)
    if scenario.journal:
        yield without_journal(scenario)
    for plain in (
        {"lost": 0.0, "late": 0.0, "repeated": 0.0},
        {"lost": 0.0},
        {"late": 0.0},
        {"repeated": 0.0},
        {"power": False},
        {"overlap": False},
        {"barrier": 0},
        {"journal_size": None},
        {"keep": "contributions"},
        {"closes": True},
    ):
        if any(getattr(scenario, name) != value for name, value in plain.items()):
            yield replace(scenario, **plain)
    yield from _shorter(
        scenario, ("poisoned", "disk", "kills", "replies", "pulls", "pauses")
    )
    for i, plan in enumerate(plans):
        less = [replace(plan, exchanges=n) for n in range(1, plan.exchanges)]
        if plan.resumes:
            less.append(replace(plan, resumes=False))
        if plan.slowness != 1.0:
            less.append(replace(plan, slowness=1.0))
        less += _shorter(plan, ("kills", "leaves", "pauses", "cuts", "twins"))
        for each in less:
            yield replace(scenario, workers=(*plans[:i], each, *plans[i + 1 :]))


def _shorter(plan, names):
    """Yield plans with one fault less."""
    for name in names:
        faults = getattr(plan, name)
        for i in range(len(faults)):
            yield dataclasses.replace(plan, **{name: faults[:i] + faults[i + 1 :]})


def show(scenario):
    """Return a scenario as text, without what is as in the simplest one."""
    parts = []
    for field in dataclasses.fields(scenario):
        value = getattr(scenario, field.name)
        if field.name == "rule":
            value = value.name
        elif field.name == "workers":
            value = [show(plan) for plan in value]
        elif value == field.default:
            continue
        parts.append(f"{field.name}={value}")
    return f"{type(scenario).__name__}({', '.join(parts)})"
