"""The rules: training methods in pure optax and jax, without devices, axes or I/O.

- `_combinators`: the optax transformations that rules are built of
- `_rule`: the record `Rule`, and the rules of the literature
- `_declared`: a table of how much of a tree each optax transformation reads
- `codecs`: encodings of contributions for transmission
- `robust`: combinations of a round's messages if some are not trusted
- `center_optimizers`: center optimizers that optax lacks
- `_weights`: transformations that scale a message by its weight or speed
- `_schedules`: center optimizers whose schedules count local steps
- `_one_by_one`: rules for rounds at a center that applies messages one by one
- `_fingerprint`: the comparison of two rules
- `_named`: rules, codecs and center optimizers by their names and settings

``__all__`` has `Rule` and the rules; the drop-in optimizers of the rules' names are in
`agn_optax`. The names that are imported ``as`` themselves are for other layers.
"""

from agn_optax.rules import center_optimizers as center_optimizers
from agn_optax.rules import codecs as codecs
from agn_optax.rules import robust as robust
from agn_optax.rules._combinators import AccumulateState as AccumulateState
from agn_optax.rules._combinators import accumulate as accumulate
from agn_optax.rules._combinators import elastic_pull as elastic_pull
from agn_optax.rules._combinators import normalize as normalize
from agn_optax.rules._combinators import scale_by_staleness as scale_by_staleness
from agn_optax.rules._declared import Reads as Reads
from agn_optax.rules._declared import elementwise as elementwise
from agn_optax.rules._declared import parts_of as parts_of
from agn_optax.rules._declared import widest as widest
from agn_optax.rules._fingerprint import SETTINGS as SETTINGS
from agn_optax.rules._fingerprint import difference as difference
from agn_optax.rules._fingerprint import fingerprint as fingerprint
from agn_optax.rules._fingerprint import workers_difference as workers_difference
from agn_optax.rules._named import CENTER_OPTIMIZERS as CENTER_OPTIMIZERS
from agn_optax.rules._named import CODECS as CODECS
from agn_optax.rules._named import COMBINE_METHODS as COMBINE_METHODS
from agn_optax.rules._named import DOWNLINK_DTYPES as DOWNLINK_DTYPES
from agn_optax.rules._named import OPTIMIZER_SETTINGS as OPTIMIZER_SETTINGS
from agn_optax.rules._named import OPTIMIZERS as OPTIMIZERS
from agn_optax.rules._named import RULES as RULES
from agn_optax.rules._named import rule_from_settings as rule_from_settings
from agn_optax.rules._one_by_one import instead_one_by_one as instead_one_by_one
from agn_optax.rules._rule import (
    Rule,
    agn,
    agn_window,
    average,
    decoupled_diloco,
    diloco,
    downpour,
    dynsgd,
    easgd,
    moments,
)
from agn_optax.rules._rule import check_rule as check_rule
from agn_optax.rules._rule import discounted as discounted
from agn_optax.rules._rule import extra_arguments as extra_arguments
from agn_optax.rules._schedules import by_local_steps as by_local_steps
from agn_optax.rules._schedules import check_outside as check_outside
from agn_optax.rules._schedules import counts_exchanges as counts_exchanges
from agn_optax.rules._weights import WeightState as WeightState
from agn_optax.rules._weights import scale_by_turnaround as scale_by_turnaround
from agn_optax.rules._weights import scale_by_weight as scale_by_weight
from agn_optax.rules.center_optimizers import delayed_nesterov as delayed_nesterov
from agn_optax.rules.center_optimizers import max_workers as max_workers

__all__ = [
    "Rule",
    "agn",
    "agn_window",
    "average",
    "decoupled_diloco",
    "diloco",
    "downpour",
    "dynsgd",
    "easgd",
    "moments",
]
