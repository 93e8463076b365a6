"""Simulations of asynchronous runs, made of the code of real centers and workers.

`schedule` computes who exchanges when, without arrays: workers' speeds, links, the
center's host and failures are those of a `Cluster`, and every decision is made by the
real ledger, modes and exchange machines under a virtual clock. `execute` then computes
the numbers of a schedule, in the programs of real workers and centers; `run` does both.
`cluster_of` and `schedule_of` take both from the tape of a recorded run.
"""

from agn_optax.simulate._cluster import (
    CenterHost,
    Cluster,
    Drifting,
    Failure,
    Failures,
    Fixed,
    Link,
    LogNormal,
    Recorded,
    Speed,
)
from agn_optax.simulate._cluster_of import cluster_of
from agn_optax.simulate._events import Outcome, SessionEvent
from agn_optax.simulate._execute import execute, run
from agn_optax.simulate._schedule import Schedule, schedule
from agn_optax.simulate._schedule_of import schedule_of
from agn_optax.simulate._traces import Traces

__all__ = [
    "CenterHost",
    "Cluster",
    "Drifting",
    "Failure",
    "Failures",
    "Fixed",
    "Link",
    "LogNormal",
    "Outcome",
    "Recorded",
    "Schedule",
    "SessionEvent",
    "Speed",
    "Traces",
    "cluster_of",
    "execute",
    "run",
    "schedule",
    "schedule_of",
]
