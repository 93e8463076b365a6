"""How a round runs inside a program: the order of a rule's parts, and its three forms.

`_exchange` is the one place where a round is written; `_forms` the three ways to run it
with the center in an optimizer state, and `_optimizers` the drop-in optimizers. Periods
that are schedules are in `_period`, the center of a mesh in `_placement`, collectives
in `_collectives`. `_parts` divides a tree, `_elementwise` says which rules may work on
parts, `_leafwise` works on a few leaves at a time, and `_center_params` finds the
center in a state.

Users find what is for them in `agn_optax`; the rest is for the layers above.
"""

from agn_optax.round import _collectives as collectives
from agn_optax.round import _elementwise as elementwise
from agn_optax.round import _parts as parts
from agn_optax.round._center_params import center_params
from agn_optax.round._exchange import (
    LocalState,
    adopt,
    adopt_late,
    answer_of,
    begin_round,
    check_step,
    contribute,
    contribution_like,
    empty_record,
    init_local,
    local_step,
    message_of,
    move_anchor,
    move_center,
    overwrite,
    recover,
    recovers,
    with_progress,
)
from agn_optax.round._forms import (
    ExchangeState,
    Phases,
    exchange_every,
    find_state,
    phases,
    scan_round,
)
from agn_optax.round._optimizers import (
    agn,
    agn_window,
    average,
    diloco,
    downpour,
    dynsgd,
    easgd,
)
from agn_optax.round._period import as_schedule, local_warmup, synchronous_warmup
from agn_optax.round._placement import OnHost, Placement, ShardedCenter

__all__ = [
    "ExchangeState",
    "LocalState",
    "OnHost",
    "Phases",
    "Placement",
    "ShardedCenter",
    "adopt",
    "adopt_late",
    "agn",
    "agn_window",
    "answer_of",
    "as_schedule",
    "average",
    "begin_round",
    "center_params",
    "check_step",
    "collectives",
    "contribute",
    "contribution_like",
    "diloco",
    "downpour",
    "dynsgd",
    "easgd",
    "elementwise",
    "empty_record",
    "exchange_every",
    "find_state",
    "init_local",
    "local_step",
    "local_warmup",
    "message_of",
    "move_anchor",
    "move_center",
    "overwrite",
    "parts",
    "phases",
    "recover",
    "recovers",
    "scan_round",
    "synchronous_warmup",
    "with_progress",
]
