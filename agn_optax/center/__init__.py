"""The center outside the program.

`_protocol` is the seam (`Center`), `_local` the center in this process, `_worker` the
worker's side of either kind. What happens at an exchange is not written here but in
`agn_optax.rules._exchange`, whose pieces both sides call.
"""

from agn_optax.center._local import CenterState, LocalCenter
from agn_optax.center._protocol import Center, Snapshot
from agn_optax.center._worker import Worker, WorkerState

__all__ = ["Center", "CenterState", "LocalCenter", "Snapshot", "Worker", "WorkerState"]
