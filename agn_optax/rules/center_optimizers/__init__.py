"""Center optimizers that optax does not have: for messages that come one by one.

Each is an optax transformation. It sees messages in place of gradients, the center in
place of parameters, and the extra argument ``staleness``.

`_delayed_nesterov`, `_lookahead` and `_ordered_momentum` are what momentum becomes
where nobody waits; `_primal_averaging` and `_restart_momentum` are for any center.
`_buffered` makes one message of several, and `_drift` trusts a late one where the
center has stayed. `_evaluated` finds the point to evaluate where that is not the
center.
"""

from agn_optax.rules.center_optimizers._buffered import BufferedState, buffered
from agn_optax.rules.center_optimizers._delayed_nesterov import (
    DelayedNesterovState,
    delayed_nesterov,
)
from agn_optax.rules.center_optimizers._drift import DriftState, scale_by_drift
from agn_optax.rules.center_optimizers._evaluated import evaluated
from agn_optax.rules.center_optimizers._lookahead import (
    LookaheadState,
    heloco,
    momentum_lookahead,
)
from agn_optax.rules.center_optimizers._ordered_momentum import (
    OrderedMomentumState,
    ordered_momentum,
)
from agn_optax.rules.center_optimizers._primal_averaging import (
    PrimalAveragingState,
    primal_averaging,
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
    "PrimalAveragingState",
    "RestartState",
    "buffered",
    "delayed_nesterov",
    "evaluated",
    "heloco",
    "momentum_lookahead",
    "ordered_momentum",
    "primal_averaging",
    "restart_momentum",
    "scale_by_drift",
]
