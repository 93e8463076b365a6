"""Orbax checkpoints of workers, towers and centers, for whoever stops and goes on.

What is saved is checked by name before anything is changed: the rule by its
fingerprint, the model leaf by leaf, workers and towers by their number. Whatever else
Orbax can save, a Grain iterator say, goes beside it. `_tree` turns any pytree into what
Orbax keeps, `_parts` is what there is to save, `_save` puts it together. `Resumable` is
a worker that is never without a checkpoint. What is imported `as` itself is for the
layers above.
"""

from agn_optax.checkpoint._resumable import Resumable
from agn_optax.checkpoint._save import Rotation as Rotation
from agn_optax.checkpoint._save import checkpointables, load, save

__all__ = ["Resumable", "checkpointables", "load", "save"]
