"""What every layer may use, and none of it is about training.

`check` has the checks of input, `combinations` the features that do not go together,
`trees` what `optax.tree` lacks, `description` which
leaves a tree has, `layout` where they lie in one buffer, `tracing` what a traced
program makes of its arguments, `extras` whether what an extra installs is there,
`in_background` and `keep_running` threads that a process does not wait for,
`write_whole` files that are there whole or not at all.
"""

from agn_optax._internal import check as check
from agn_optax._internal import combinations as combinations
from agn_optax._internal import description as description
from agn_optax._internal import extras as extras
from agn_optax._internal import layout as layout
from agn_optax._internal import tracing as tracing
from agn_optax._internal import trees as trees
from agn_optax._internal.background import in_background as in_background
from agn_optax._internal.background import keep_running as keep_running
from agn_optax._internal.description import Description as Description
from agn_optax._internal.description import Leaf as Leaf
from agn_optax._internal.files import write_whole as write_whole
from agn_optax._internal.signals import handled as handled
from agn_optax._internal.signals import told_to_end as told_to_end
