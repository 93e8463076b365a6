"""Center optimizers that optax lacks, most of them for asynchronous workers.

Each is an optax transformation that gets messages in place of gradients, the center in
place of parameters, and the extra argument ``staleness``.

- `_delayed_nesterov`, `_lookahead`, `_ordered_momentum`: momentum for asynchronous
  workers
- `_restart_momentum`, `_isoloco`: for any center
- `_buffered`, `_rennala`, `_ringleader`: combine several messages into one
- `_drift`: scale late messages by how far the center has moved
"""

from agn_optax.rules.center_optimizers._buffered import BufferedState, buffered
from agn_optax.rules.center_optimizers._delayed_nesterov import (
    DelayedNesterovState,
    delayed_nesterov,
)
from agn_optax.rules.center_optimizers._drift import DriftState, scale_by_drift
from agn_optax.rules.center_optimizers._isoloco import isoloco
from agn_optax.rules.center_optimizers._lookahead import (
    LookaheadState,
    evaluated,
    heloco,
    momentum_lookahead,
)
from agn_optax.rules.center_optimizers._ordered_momentum import (
    OrderedMomentumState,
    ordered_momentum,
)
from agn_optax.rules.center_optimizers._rennala import RennalaState, rennala
from agn_optax.rules.center_optimizers._restart_momentum import (
    RestartState,
    restart_momentum,
)
from agn_optax.rules.center_optimizers._ringleader import RingleaderState, ringleader
from agn_optax.rules.center_optimizers._ringleader import max_workers as max_workers

__all__ = [
    "BufferedState",
    "DelayedNesterovState",
    "DriftState",
    "LookaheadState",
    "OrderedMomentumState",
    "RennalaState",
    "RestartState",
    "RingleaderState",
    "buffered",
    "delayed_nesterov",
    "evaluated",
    "heloco",
    "isoloco",
    "momentum_lookahead",
    "ordered_momentum",
    "rennala",
    "restart_momentum",
    "ringleader",
    "scale_by_drift",
]
