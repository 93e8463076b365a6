"""The mathematics: pure optax and jax; no device, no clock, no I/O.

`_combinators` are the pieces, `_rule` the records made of them, `_exchange` the one
place where a round is written, `_forms` the three ways to run it with the center in an
optimizer state, `_optimizers` the drop-in optimizers.

The names here are the rule records; the drop-in optimizers of the same names are in
`agn_optax`.
"""

from agn_optax.rules._rule import (
    Rule,
    agn,
    agn_window,
    average,
    diloco,
    downpour,
    dynsgd,
    easgd,
)

__all__ = [
    "Rule",
    "agn",
    "agn_window",
    "average",
    "diloco",
    "downpour",
    "dynsgd",
    "easgd",
]
