"""Centers outside the workers' programs.

`_protocol` is the interface (`Center` and its sessions), and `_submission` has the
records of an exchange (`Submission` and `Answer`). Each center with parameters of its
own uses `_core`: there, `_ledger` tracks the workers and decides by `_modes` which
message is next, `_store` computes one version after another, and `durability` saves
them on disk. `_local` is the center in this process, and `_sharded` combines several
centers into one. The computation of an exchange is in `agn_optax.round`, whose
functions centers and workers call. Names imported `as` themselves are not public: the
layers above use them.
"""

from agn_optax._internal import Notice, Thresholds
from agn_optax.center._core import Core as Core
from agn_optax.center._core import KeptAnswer as KeptAnswer
from agn_optax.center._core import LocalSession as LocalSession
from agn_optax.center._inspector import LOOK_INTERVAL as LOOK_INTERVAL
from agn_optax.center._ledger import Batch as Batch
from agn_optax.center._ledger import Ledger as Ledger
from agn_optax.center._ledger import Member as Member
from agn_optax.center._ledger import Totals as Totals
from agn_optax.center._limits import Limits
from agn_optax.center._local import LocalCenter
from agn_optax.center._local import PackedCenter as PackedCenter
from agn_optax.center._message_limits import MessageLimits
from agn_optax.center._message_limits import Rejections as Rejections
from agn_optax.center._modes import Asynchronous, BoundedStaleness, Synchronous
from agn_optax.center._modes import Due as Due
from agn_optax.center._modes import Mode as Mode
from agn_optax.center._packing import Packed as Packed
from agn_optax.center._packing import release_arguments as release_arguments
from agn_optax.center._pieces import Pieces as Pieces
from agn_optax.center._pieces import Region as Region
from agn_optax.center._pieces import Share as Share
from agn_optax.center._pieces import outside as outside
from agn_optax.center._pieces import region_of as region_of
from agn_optax.center._pieces import shares_of as shares_of
from agn_optax.center._pieces import uncovered as uncovered
from agn_optax.center._presets import (
    DecoupledDiloco,
    Ringmaster,
    decoupled_diloco,
    ringmaster,
)
from agn_optax.center._protocol import MAX_REPORTED as MAX_REPORTED
from agn_optax.center._protocol import Center, Session, WorkerSession
from agn_optax.center._recent import Recent as Recent
from agn_optax.center._runtime import Runtime as Runtime
from agn_optax.center._settings import CenterSettings as CenterSettings
from agn_optax.center._settings import check_combine as check_combine
from agn_optax.center._sharded import ShardedCenter as ShardedCenter
from agn_optax.center._sharded import is_finite as is_finite
from agn_optax.center._sharded import not_finite as not_finite
from agn_optax.center._store import CenterState
from agn_optax.center._store import Store as Store
from agn_optax.center._store import Version as Version
from agn_optax.center._submission import Answer, Snapshot, Submission
from agn_optax.center._submission import plain as plain
from agn_optax.center._submission import plain_fields as plain_fields
from agn_optax.center._transfer import ExpectedLink as ExpectedLink
from agn_optax.center._transfer import Transfer
from agn_optax.center.durability import History as History
from agn_optax.center.durability import Journal
from agn_optax.center.durability import Origin as Origin
from agn_optax.center.durability import Record as Record
from agn_optax.center.durability import Segment as Segment
from agn_optax.center.durability import apply_record as apply_record
from agn_optax.center.durability import contribution_in as contribution_in
from agn_optax.center.durability import newest as newest
from agn_optax.center.durability import stack as stack
from agn_optax.center.durability import state_in as state_in
from agn_optax.center.durability import write_fork as write_fork

__all__ = [
    "Answer",
    "Asynchronous",
    "BoundedStaleness",
    "Center",
    "CenterState",
    "DecoupledDiloco",
    "Journal",
    "Limits",
    "LocalCenter",
    "MessageLimits",
    "Notice",
    "Ringmaster",
    "Session",
    "Snapshot",
    "Submission",
    "Synchronous",
    "Thresholds",
    "Transfer",
    "WorkerSession",
    "decoupled_diloco",
    "ringmaster",
]
