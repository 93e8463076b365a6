"""Tapes: what can be done with the records of a center after its run, or beside it.

- `_tape`: `read` a tape, check it, and replay it to any version.
- `_events`: the events of a tape, as plain records.
- `_audit`: what each worker did.
- `_difference`: the first difference of two runs.
- `_forks`: centers that go on from a recorded version.
- `_what_if`: recorded contributions through another center.
- `_evaluate`: numbers of past versions.

A tape is the directory of a center with a `Journal`; docs/tape.md has its format.
"""

from agn_optax.center import Segment
from agn_optax.tape._audit import Audit, WorkerAudit, audit
from agn_optax.tape._difference import Difference, diff
from agn_optax.tape._evaluate import Measured, evaluate
from agn_optax.tape._events import Event, FailedJoin, Message
from agn_optax.tape._forks import Fork, fork
from agn_optax.tape._forks import check_new as check_new
from agn_optax.tape._tape import Checked, Found, Tape, TapeSnapshot, read
from agn_optax.tape._what_if import Parted, Share, WhatIf, what_if

__all__ = [
    "Audit",
    "Checked",
    "Difference",
    "Event",
    "FailedJoin",
    "Fork",
    "Found",
    "Measured",
    "Message",
    "Parted",
    "Segment",
    "Share",
    "Tape",
    "TapeSnapshot",
    "WhatIf",
    "WorkerAudit",
    "audit",
    "diff",
    "evaluate",
    "fork",
    "read",
    "what_if",
]
