"""Center optimizers that optax lacks, most of them for asynchronous workers.

Each is an optax transformation that gets messages in place of gradients, the center in
place of parameters, and the extra argument ``staleness``.

- `_delayed_nesterov`, `_lookahead`, `_ordered_momentum`: momentum for asynchronous
  workers
- `_restart_momentum`: for any center
- `_buffered`: combine several messages into one
- `_drift`: scale late messages by how far the center has moved
"""

from agn_optax.rules.center_optimizers._buffered import BufferedState, buffered
from agn_optax.rules.center_optimizers._delayed_nesterov import (
    DelayedNesterovState,
    delayed_nesterov,
)
from agn_optax.rules.center_optimizers._drift import DriftState, scale_by_drift
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
from agn_optax.rules.center_optimizers._restart_momentum import (
    RestartState,
    restart_momentum,
)

__all__ = [
    "BufferedState",
    "DelayedNesterovState",
    "DriftState",
    "LookaheadState",
    "OrderedMomentumState",
    "RestartState",
    "buffered",
    "delayed_nesterov",
    "evaluated",
    "heloco",
    "momentum_lookahead",
    "ordered_momentum",
    "restart_momentum",
    "scale_by_drift",
]
