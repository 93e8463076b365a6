"""What of a center outlives its process: snapshots, and a journal of exchanges.

`_keeper` is told what happens and decides what is written, `_writer` is the thread
that writes, `_directory` the files, and `_records` what is in them. `_found` is what an
earlier process has left, and `_backup` copies it.
"""

from agn_optax.center.durability._backup import backup
from agn_optax.center.durability._directory import Room
from agn_optax.center.durability._keeper import (
    Durability,
    Image,
    Journal,
    Keeper,
    Snapshots,
    read,
)

__all__ = [
    "Durability",
    "Image",
    "Journal",
    "Keeper",
    "Room",
    "Snapshots",
    "backup",
    "read",
]
