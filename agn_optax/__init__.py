"""Train one model with many workers that talk rarely, as Optax transformations."""

from agn_optax import errors, rules
from agn_optax._version import __version__
from agn_optax.center import (
    Center,
    CenterState,
    LocalCenter,
    Snapshot,
    Worker,
    WorkerState,
)
from agn_optax.rules._center_params import center_params
from agn_optax.rules._combinators import (
    AccumulateState,
    accumulate,
    elastic_pull,
    normalize,
    scale_by_staleness,
)
from agn_optax.rules._forms import (
    ExchangeState,
    Phases,
    exchange_every,
    phases,
    scan_round,
)
from agn_optax.rules._optimizers import (
    agn,
    agn_window,
    average,
    diloco,
    downpour,
    dynsgd,
    easgd,
)
from agn_optax.rules._period import local_warmup, synchronous_warmup

__all__ = [
    "AccumulateState",
    "Center",
    "CenterState",
    "ExchangeState",
    "LocalCenter",
    "Phases",
    "Snapshot",
    "Worker",
    "WorkerState",
    "__version__",
    "accumulate",
    "agn",
    "agn_window",
    "average",
    "center_params",
    "diloco",
    "downpour",
    "dynsgd",
    "easgd",
    "elastic_pull",
    "errors",
    "exchange_every",
    "local_warmup",
    "normalize",
    "phases",
    "rules",
    "scale_by_staleness",
    "scan_round",
    "synchronous_warmup",
]
