"""What every layer may use, and none of it is about training.

`check` has the checks of input, `trees` what `optax.tree` lacks, `description` which
leaves a tree has, `layout` where they lie in one buffer, `tracing` what a traced
program makes of its arguments, `in_background` threads that a process does not wait
for.
"""

from agn_optax._internal import check, description, layout, tracing, trees
from agn_optax._internal.background import in_background
from agn_optax._internal.description import Description, Leaf

__all__ = [
    "Description",
    "Leaf",
    "check",
    "description",
    "in_background",
    "layout",
    "tracing",
    "trees",
]
