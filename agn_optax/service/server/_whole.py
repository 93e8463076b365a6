"""Whole trees that are put together from the pieces of several processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax.center import Region, Share, outside, uncovered
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._schema import Schema


class WholeTree:
    """A buffer in which the pieces of a whole tree are put together.

    Args:
      schema: schema of the tree.
      buffers: where the buffer is taken from.
    """

    def __init__(self, schema: Schema, buffers: Buffers) -> None:
        self.schema = schema
        self.buffer = buffers.take(schema.size)
        schema.clear_gaps(self.buffer)
        self.views = schema.views(self.buffer)

    def places(self, regions: Sequence[Region]) -> list[np.ndarray]:
        """Return views of regions, whose leaves are numbered as in the schema."""
        return [self.views[region.leaf][region.slices] for region in regions]

    def write(self, regions: Sequence[Region], arrays: Sequence[Any]) -> None:
        """Write arrays to their regions."""
        for place, array in zip(self.places(regions), arrays, strict=True):
            place[...] = array


def check_regions(share: Share, schema: Schema) -> None:
    """Check that the regions of a share are within the leaves of a schema.

    Raises:
      InvalidArgumentError: one of them is not.
    """
    shapes = [leaf.shape for leaf in schema.leaves]
    if problem := outside([*share.owned, *share.wanted], shapes):
        raise errors.InvalidArgumentError(f"{problem}, which a process has joined with")


def check_cover(owned: Iterable[Sequence[Region]], schema: Schema) -> None:
    """Check that the owned regions of all processes cover each leaf once.

    Raises:
      InvalidArgumentError: they do not.
    """
    regions = [region for of_process in owned for region in of_process]
    if problem := uncovered(regions, [leaf.shape for leaf in schema.leaves]):
        raise errors.InvalidArgumentError(
            f"the processes of a worker must own every element once: {problem}. The "
            f"leaves are {[leaf.path for leaf in schema.leaves][:8]}, ..."
        )
