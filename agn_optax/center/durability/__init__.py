"""Durability of a center: a journal of exchanges on disk, and snapshots for it.

`_keeper` records what happens to the center and decides what is written, `_writer` is
the thread that writes the journal, `_directory` manages the files, and `_records` is
their format. `_files` has the contents of the lock.
"""

from agn_optax.center.durability._keeper import Image, Journal, Keeper

__all__ = [
    "Image",
    "Journal",
    "Keeper",
]
