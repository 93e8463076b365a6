"""Optax transformations to train one model with many workers that talk rarely."""

import importlib as _importlib
import typing as _typing

from agn_optax import errors, rules
from agn_optax._version import __version__
from agn_optax.round import (
    ExchangeState,
    Fragments,
    Phases,
    Placement,
    agn,
    agn_window,
    average,
    center_params,
    diloco,
    downpour,
    dynamic_period,
    dynsgd,
    easgd,
    exchange_every,
    moments_of,
    phases,
    scan_round,
    slots,
    with_moments,
)
from agn_optax.rules import (
    accumulate,
    by_local_steps,
    center_optimizers,
    codecs,
    delayed_nesterov,
    elastic_pull,
    elementwise,
    normalize,
    robust,
    scale_by_staleness,
    scale_by_turnaround,
    scale_by_weight,
)

if _typing.TYPE_CHECKING:
    from agn_optax import towers
    from agn_optax.center import Center, LocalCenter, Snapshot
    from agn_optax.towers import (
        Towers,
        all_reduce,
        densify,
        loss_scale,
        loss_scaling,
        reduce_loss,
    )
    from agn_optax.worker import Worker

__all__ = [
    "Center",
    "ExchangeState",
    "Fragments",
    "LocalCenter",
    "Phases",
    "Placement",
    "Snapshot",
    "Towers",
    "Worker",
    "__version__",
    "accumulate",
    "agn",
    "agn_window",
    "all_reduce",
    "average",
    "by_local_steps",
    "center_optimizers",
    "center_params",
    "codecs",
    "delayed_nesterov",
    "densify",
    "diloco",
    "downpour",
    "dynamic_period",
    "dynsgd",
    "easgd",
    "elastic_pull",
    "elementwise",
    "errors",
    "exchange_every",
    "loss_scale",
    "loss_scaling",
    "moments_of",
    "normalize",
    "phases",
    "reduce_loss",
    "robust",
    "rules",
    "scale_by_staleness",
    "scale_by_turnaround",
    "scale_by_weight",
    "scan_round",
    "slots",
    "towers",
    "with_moments",
]


# Optimizers do not need these modules, so each is imported at its first use.
_OPERATIONS = ("cli", "engines", "launch", "planning")  # in agn_optax.ops
_MODULES = (
    *_OPERATIONS,
    "center",
    "checkpoint",
    "service",
    "simulate",
    "tape",
    "towers",
    "worker",
)
# The folders of the other lazy names; a name that is missing here is in `towers`.
_FOLDERS = {
    **dict.fromkeys(("Center", "LocalCenter", "Snapshot"), "center"),
    "Worker": "worker",
}


def __getattr__(name: str) -> _typing.Any:
    if name in _MODULES:
        parent = "agn_optax.ops" if name in _OPERATIONS else "agn_optax"
        return _importlib.import_module(f"{parent}.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'agn_optax' has no attribute {name!r}")
    folder = _FOLDERS.get(name, "towers")
    module = _importlib.import_module(f"agn_optax.{folder}")
    value = getattr(module, name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
