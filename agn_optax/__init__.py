"""Train one model with many workers that talk rarely, as Optax transformations."""

import importlib as _importlib
from typing import Any as _Any

from agn_optax import errors, rules, towers
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
from agn_optax.rules._placement import Placement
from agn_optax.towers import (
    AllReduceState,
    LossScaleState,
    Towers,
    all_reduce,
    densify,
    initialize_distributed,
    loss_scale,
    loss_scaling,
    reduce_loss,
)

__all__ = [
    "AccumulateState",
    "AllReduceState",
    "Center",
    "CenterState",
    "ExchangeState",
    "LocalCenter",
    "LossScaleState",
    "Phases",
    "Placement",
    "Snapshot",
    "Towers",
    "Worker",
    "WorkerState",
    "__version__",
    "accumulate",
    "agn",
    "agn_window",
    "all_reduce",
    "average",
    "center_params",
    "densify",
    "diloco",
    "downpour",
    "dynsgd",
    "easgd",
    "elastic_pull",
    "errors",
    "exchange_every",
    "initialize_distributed",
    "local_warmup",
    "loss_scale",
    "loss_scaling",
    "normalize",
    "phases",
    "reduce_loss",
    "rules",
    "scale_by_staleness",
    "scan_round",
    "synchronous_warmup",
    "towers",
]


def __getattr__(name: str) -> _Any:
    """Modules that few need are imported when used; `service` needs an extra."""
    if name in ("planning", "service"):
        return _importlib.import_module(f"agn_optax.{name}")
    raise AttributeError(f"module 'agn_optax' has no attribute {name!r}")
