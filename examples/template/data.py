"""The data: Python's own source text, as rows of bytes. Replace this file by yours."""

from __future__ import annotations

import pathlib
import sysconfig
from typing import Any

import grain
import numpy as np
from config import Config

VOCABULARY = 256  # bytes
_HELD_OUT = 20  # every 20th row is for evaluation


def read_rows(config: Config) -> Any:
    """Return all of the text as uint8 ``[rows, context + 1]``."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    width = config.context + 1
    count = len(text) // width
    return np.frombuffer(text, np.uint8, count * width).reshape(count, width)


def training_batches(config: Config, rank: int, workers: int) -> grain.IterDataset[Any]:
    """Return a worker's batches ``[batch, context + 1]``, one for each local step.

    Each worker draws from its own share of the rows. All processes of a worker draw the
    same batches, of which each device gets its piece, whatever the mesh is.
    """
    rows = read_rows(config)
    own = np.arange(len(rows))
    own = own[own % _HELD_OUT != 0][rank::workers]
    numbers = grain.MapDataset.source(own).seed(rank).shuffle().repeat()
    batches = numbers.map(lambda number: rows[number]).batch(config.batch)
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return batches[: config.steps].to_iter_dataset(read)


def held_out_batches(config: Config) -> Any:
    """Return rows that no worker trains on, uint8 ``[n, batch, context + 1]``."""
    rows = read_rows(config)[::_HELD_OUT]
    count = len(rows) // config.batch * config.batch
    return rows[:count].reshape(-1, config.batch, config.context + 1)
