"""Simulations of asynchronous runs, made of the code of real centers and workers.

`schedule` computes who exchanges when, without arrays: workers' speeds, links, the
center's host and failures are those of a `Cluster`, and every decision is made by the
real ledger, modes and exchange machines under a virtual clock. `run` computes its
messages, too, in the programs of real workers and of a real center.
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
from agn_optax.simulate._events import Outcome, SessionEvent
from agn_optax.simulate._numbers import Trained, run
from agn_optax.simulate._schedule import Schedule, schedule

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
    "Trained",
    "run",
    "schedule",
]
