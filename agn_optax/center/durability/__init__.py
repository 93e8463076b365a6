"""Durability of a center: a journal of exchanges on disk, and snapshots for it.

`_keeper` records what happens to the center and decides what is written, `_writer` is
the thread that writes the journal, `_directory` manages the files, and `_records` is
their format. `_events` describes what happens, and `_replay` repeats it. `_history`
reads a directory without its lock, and `_fork` writes one that goes on from it.
`_chain` compares the records with those that workers have seen. `_files` has the
contents of the lock, and `_stack` names the versions on which numbers depend.
"""

from agn_optax.center.durability._chain import newest
from agn_optax.center.durability._directory import Segment
from agn_optax.center.durability._events import Arrival, event_of
from agn_optax.center.durability._fork import Origin, write_fork
from agn_optax.center.durability._history import History
from agn_optax.center.durability._keeper import Image, Journal, Keeper
from agn_optax.center.durability._records import Record
from agn_optax.center.durability._replay import apply_record, contribution_in, state_in
from agn_optax.center.durability._stack import stack

__all__ = [
    "Arrival",
    "History",
    "Image",
    "Journal",
    "Keeper",
    "Origin",
    "Record",
    "Segment",
    "apply_record",
    "contribution_in",
    "event_of",
    "newest",
    "stack",
    "state_in",
    "write_fork",
]
