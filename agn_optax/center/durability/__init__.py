"""Durability of a center: a journal of exchanges on disk, and snapshots for it.

`_keeper` records what happens to the center and decides what is written, `_writer` is
the thread that writes the journal, `_directory` manages the files, and `_records` is
their format. `_events` describes what happens, and `_replay` repeats it. `_chain`
compares the records with those that workers have seen. `_files` has the contents of the
lock, and `_stack` names the versions on which numbers depend.
"""

from agn_optax.center.durability._chain import newest
from agn_optax.center.durability._events import Arrival, event_of
from agn_optax.center.durability._keeper import Image, Journal, Keeper

__all__ = [
    "Arrival",
    "Image",
    "Journal",
    "Keeper",
    "event_of",
    "newest",
]
