"""Rounds inside a program: the steps of an exchange, and three forms to run them.

- `_round`: the steps of a round, and the only place that knows their order; `steps`
  for the layers above.
- `_forms`: the three forms that keep the center in the optimizer state, and the
  functions that find the center in that state.
- `_optimizers`: the drop-in optimizers.
- `_period`: periods, including schedules.
- `placements`: where the center lives on a mesh.
- `_collectives`: collectives over mesh axes.
- `_reading`: the axes over which traced programs have collectives.
- `_parts`: division of a tree into parts.
- `_fragments`: which part is exchanged when.
- `_elementwise`: checks that a rule may work on parts.
- `_moments`: exchange of fields of the inner optimizer's state.
- `_leafwise`: exchanges of a few leaves at a time, to save memory.
- `_slots`: the names of the arrays that a state keeps for each parameter.

The public names are in `agn_optax`. The names here are for the layers above.
"""

from agn_optax.round import _collectives as collectives
from agn_optax.round import _elementwise as elementwise
from agn_optax.round import _parts as parts
from agn_optax.round import _round as steps
from agn_optax.round._elements import Elements as Elements
from agn_optax.round._forms import Phases as Phases
from agn_optax.round._forms import center_params as center_params
from agn_optax.round._forms import exchange_every as exchange_every
from agn_optax.round._forms import phases as phases
from agn_optax.round._forms import scan_round as scan_round
from agn_optax.round._fragments import Fragments as Fragments
from agn_optax.round._fragments import FragmentsState as FragmentsState
from agn_optax.round._moments import moments_of as moments_of
from agn_optax.round._moments import with_moments as with_moments
from agn_optax.round._optimizers import agn as agn
from agn_optax.round._optimizers import agn_window as agn_window
from agn_optax.round._optimizers import average as average
from agn_optax.round._optimizers import diloco as diloco
from agn_optax.round._optimizers import downpour as downpour
from agn_optax.round._optimizers import dynsgd as dynsgd
from agn_optax.round._optimizers import easgd as easgd
from agn_optax.round._period import DynamicPeriod as DynamicPeriod
from agn_optax.round._period import as_schedule as as_schedule
from agn_optax.round._period import dynamic_period as dynamic_period
from agn_optax.round._reading import axes_of_collectives as axes_of_collectives
from agn_optax.round._round import ExchangeState as ExchangeState
from agn_optax.round._round import InFlight as InFlight
from agn_optax.round._round import LocalState as LocalState
from agn_optax.round._round import contribution_like as contribution_like
from agn_optax.round._round import exchange_bytes as exchange_bytes
from agn_optax.round._slots import slots as slots
from agn_optax.round.placements import CenterShards as CenterShards
from agn_optax.round.placements import OnHost as OnHost
from agn_optax.round.placements import OwnCenter as OwnCenter
from agn_optax.round.placements import Placement as Placement
from agn_optax.round.placements import as_stored as as_stored
from agn_optax.round.placements import piece_length as piece_length

__all__ = ["collectives", "elementwise", "parts", "steps"]
