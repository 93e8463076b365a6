"""Orbax checkpoints of workers, towers and centers, to stop a run and continue it.

Loading checks a checkpoint before anything is changed: the rule by its fingerprint, the
model leaf by leaf, workers and towers by their number. Other objects that Orbax can
save, such as a Grain iterator, may be saved with them. `_tree` converts any pytree to
the form that Orbax saves, `_parts` has the parts of a checkpoint, and `_save` combines
them. `Resumable` is a worker that always has a checkpoint.
"""

from agn_optax.checkpoint._resumable import Resumable
from agn_optax.checkpoint._save import checkpointables, load, save

__all__ = ["Resumable", "checkpointables", "load", "save"]
