"""A worker of several processes, each of which has pieces of the parameters.

A process exchanges the pieces that it owns, as the list of arrays that belongs to the
regions of its `Share`. The center sees whole messages: a server assembles them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agn_optax._internal import combinations
from agn_optax.round import Elements, parts

PyTree = Any


class Region(NamedTuple):
    """A box of one leaf."""

    leaf: int  # index among the leaves of the whole tree
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[Any, ...]:
        """The region as an index of its leaf, which gives a view of it."""
        ends = zip(self.start, self.shape, strict=True)
        return (*(slice(begin, begin + size) for begin, size in ends), ...)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Share:
    """The regions of one process of a worker.

    Args:
      group: id of the processes that join together.
      process: index of this process in the group.
      processes: number of processes in the group.
      like: the whole tree, abstract.
      owned: the regions that this process sends. Those of all processes cover every
        leaf once.
      wanted: the regions in which this process receives the center.
    """

    group: str
    process: int
    processes: int
    like: PyTree
    owned: tuple[Region, ...]
    wanted: tuple[Region, ...]

    def cut(self, shards: parts.Parts) -> list[Share]:
        """Divide the share into those of the shards of a center."""
        likes = jax.eval_shape(shards.cut, self.like)
        return [
            dataclasses.replace(
                self,
                like=like,
                owned=tuple(inside for _, inside, _ in _inside(self.owned, pieces)),
                wanted=tuple(inside for _, inside, _ in _inside(self.wanted, pieces)),
            )
            for like, pieces in zip(likes, shards, strict=True)
        ]

    def cut_owned(self, arrays: Sequence[Any], shards: parts.Parts) -> list[list[Any]]:
        """Divide the arrays of owned regions, which may be encoded, among shards."""
        return [
            [
                arrays[i] if rows is None else arrays[i][rows]
                for i, _, rows in _inside(self.owned, pieces)
            ]
            for pieces in shards
        ]

    def join_wanted(
        self, received: Sequence[Sequence[Any]], shards: parts.Parts
    ) -> list[Any]:
        """Join what shards sent to the arrays of the wanted regions."""
        found: list[list[tuple[int, Any]]] = [[] for _ in self.wanted]
        for arrays, pieces in zip(received, shards, strict=True):
            inside = _inside(self.wanted, pieces)
            for (i, _, rows), array in zip(inside, arrays, strict=True):
                found[i].append((0 if rows is None else rows.start, array))
        joined = []
        for parts_of_region in found:
            ordered = [array for _, array in sorted(parts_of_region, key=_row)]
            joined.append(ordered[0] if len(ordered) == 1 else np.concatenate(ordered))
        return joined


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A process's pieces of a tree.

    Args:
      share: the regions.
      arrays: the arrays of the owned regions, in their order; none to join a center.
    """

    share: Share
    arrays: Sequence[Any]

    def cut(self, shards: parts.Parts) -> list[Pieces]:
        """Divide the pieces into those of the shards of a center."""
        shares = self.share.cut(shards)
        if not self.arrays:
            return [Pieces(share, ()) for share in shares]
        arrays = self.share.cut_owned(self.arrays, shards)
        return [Pieces(*own) for own in zip(shares, arrays, strict=True)]


def _row(found: tuple[int, Any]) -> int:
    return found[0]


def _inside(
    regions: Sequence[Region], pieces: Sequence[parts.Piece]
) -> list[tuple[int, Region, slice | None]]:
    """Return what a shard has of some regions.

    Args:
      regions: regions of the whole tree.
      pieces: the leaves of the shard, or rows of them.

    Returns:
      The number of each region, the region in the shard's own tree, and the rows of the
      region; None for all.
    """
    places: dict[int, tuple[int, slice | None]] = {}
    for i, piece in enumerate(pieces):
        if isinstance(piece.rows, Elements):
            combinations.reject(
                "fragments of random elements",
                "a worker of several processes",
                f"{piece.rows.parts} fragments, seed={piece.rows.seed}",
            )
        places[piece.leaf] = i, piece.rows
    inside: list[tuple[int, Region, slice | None]] = []
    for number, region in enumerate(regions):
        if region.leaf not in places:
            continue
        leaf, rows = places[region.leaf]
        if rows is None:
            inside.append((number, region._replace(leaf=leaf), None))
            continue
        first, count = region.start[0], region.shape[0]
        begin, end = max(first, rows.start), min(first + count, rows.stop)
        if begin < end:
            own = Region(
                leaf,
                (begin - rows.start, *region.start[1:]),
                (end - begin, *region.shape[1:]),
            )
            inside.append((number, own, slice(begin - first, end - first)))
    return inside


def outside(regions: Iterable[Region], shapes: Sequence[tuple[int, ...]]) -> str:
    """Return which region is not within its leaf; "" if all are."""
    for leaf, start, shape in regions:
        if leaf >= len(shapes):
            return f"there is no leaf {leaf}"
        whole = shapes[leaf]
        if not len(start) == len(shape) == len(whole) or any(
            begin + size > length
            for begin, size, length in zip(start, shape, whole, strict=True)
        ):
            return f"leaf {leaf} of shape {whole} has no region of {shape} at {start}"
    return ""


def uncovered(regions: Sequence[Region], shapes: Sequence[tuple[int, ...]]) -> str:
    """Return which leaf the regions, which are within it, do not cover exactly once.

    Return "" if they cover all.
    """
    by_leaf: dict[int, list[Region]] = {}
    for region in regions:
        if region.size:
            by_leaf.setdefault(region.leaf, []).append(region)
    for leaf, shape in enumerate(shapes):
        found, size = by_leaf.get(leaf, []), math.prod(shape)
        covered = sum(region.size for region in found)
        if covered < size:
            return f"no process owns {size - covered} of {size} elements of leaf {leaf}"
        if covered > size or _corners(found) != _corners(_whole(leaf, shape, size)):
            return f"two processes own a part of leaf {leaf}, and others may be missing"
    return ""


def _whole(leaf: int, shape: tuple[int, ...], size: int) -> list[Region]:
    return [Region(leaf, (0,) * len(shape), shape)] if size else []


def _corners(boxes: Sequence[Region]) -> dict[tuple[int, ...], int]:
    """Return how often boxes that are not empty have each corner, with signs.

    These are the differences, along all axes, of how many boxes contain each element.
    So two sets of boxes contain the same elements, and as often, if they have the same
    corners. Boxes are many for large models: comparing all pairs would take too long.
    """
    corners: dict[tuple[int, ...], int] = {}
    for _, start, shape in boxes:
        ends = [((a, 1), (a + n, -1)) for a, n in zip(start, shape, strict=True)]
        for corner in itertools.product(*ends):
            at = tuple(place for place, _ in corner)
            corners[at] = corners.get(at, 0) + math.prod(sign for _, sign in corner)
    return {at: count for at, count in corners.items() if count}


def shares_of(
    group: str, like: PyTree, process: int, processes: Sequence[int]
) -> Share:
    """Return the share of a process of a tree of global arrays.

    A region that several devices hold is owned by one of them, in turn, so that all
    processes send about as much.

    Args:
      group: id of the processes that join together.
      like: a tree of arrays, or of abstract arrays, with shardings.
      process: this process.
      processes: all processes that have devices of the shardings.
    """
    owned, wanted = [], []
    for leaf, array in enumerate(jax.tree.leaves(like)):
        for turn, (region, devices) in enumerate(_regions(array)):
            region = region._replace(leaf=leaf)
            owner = devices[(leaf + turn) % len(devices)]
            if owner.process_index == process:
                owned.append(region)
            if any(device.process_index == process for device in devices):
                wanted.append(region)
    return Share(
        group,
        processes.index(process),
        len(processes),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like),
        tuple(owned),
        tuple(wanted),
    )


def _regions(array: Any) -> list[tuple[Region, list[Any]]]:
    """Return the different regions of a sharded array, each with its devices."""
    return _regions_of(array.sharding, array.shape)


@functools.lru_cache(maxsize=1024)
def _regions_of(
    sharding: Any, shape: tuple[int, ...]
) -> list[tuple[Region, list[Any]]]:
    found: dict[Region, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(region_of(index, shape), []).append(device)
    return [
        (region, sorted(devices, key=lambda d: (d.process_index, d.id)))
        for region, devices in sorted(found.items(), key=lambda item: item[0])
    ]


def region_of(
    index: tuple[slice, ...], shape: tuple[int, ...], leaf: int = 0
) -> Region:
    """Return an index of a leaf as a region."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return Region(
        leaf,
        tuple(begin for begin, _, _ in bounds),
        tuple(end - begin for begin, end, _ in bounds),
    )
