"""The center outside the program.

`_protocol` is the seam (`Center`), `_local` the center in this process, `_worker` the
worker's side of either kind. `_ledger` decides who is there and which message is next,
`_store` makes one version of the center after the other, and `_sharded` makes one
center of several. `_durability` lets a center outlive its process. What happens at an
exchange is not written here but in `agn_optax.rules._exchange`, whose pieces both sides
call.
"""

from agn_optax.center._durability import Journal, Snapshots
from agn_optax.center._ledger import Asynchronous, BoundedStaleness, Synchronous
from agn_optax.center._local import LocalCenter
from agn_optax.center._protocol import Center, Snapshot
from agn_optax.center._store import CenterState
from agn_optax.center._worker import Worker, WorkerState

__all__ = [
    "Asynchronous",
    "BoundedStaleness",
    "Center",
    "CenterState",
    "Journal",
    "LocalCenter",
    "Snapshot",
    "Snapshots",
    "Synchronous",
    "Worker",
    "WorkerState",
]
