"""Placements of the center on a mesh: whole, in shards or each worker's own.

`Placement` is the caller's choice. `layout_of` makes a `Layout` of it, whose methods
the round calls, so that the round distinguishes no cases.

- `_placement`: the caller's choice.
- `_layout`: the protocol, and what placements have in common.
- `_whole`: a center that is whole on every tower, and gossip.
- `_shards`: a center in shards.
- `_host`: moves of a center to the host's memory, and back.
- `_stored`: centers as optimizer states store them.
"""

from __future__ import annotations

from typing import Any

from agn_optax._internal import check
from agn_optax.round.placements._host import check_host_memory as check_host_memory
from agn_optax.round.placements._host import to_device
from agn_optax.round.placements._layout import Layout as Layout
from agn_optax.round.placements._placement import Placement as Placement
from agn_optax.round.placements._shards import Sharded, gather_center
from agn_optax.round.placements._shards import piece_length as piece_length
from agn_optax.round.placements._stored import HOST_SHAPE as HOST_SHAPE
from agn_optax.round.placements._stored import CenterShards as CenterShards
from agn_optax.round.placements._stored import OnHost as OnHost
from agn_optax.round.placements._stored import OwnCenter as OwnCenter
from agn_optax.round.placements._stored import center_arrays as center_arrays
from agn_optax.round.placements._stored import rewrapped as rewrapped
from agn_optax.round.placements._stored import unwrapped as unwrapped
from agn_optax.round.placements._whole import Gossip, Whole, mean_center

PyTree = Any

# The layout of a whole center on the device, with one worker.
WHOLE = Whole()


def layout_of(axis_name: Any = None, placement: Any = None) -> Layout:
    """Return the layout of a placement, by default that of a whole center.

    Raises:
      InvalidTypeError: ``placement`` is neither a `Placement` nor None.
    """
    if placement is None:
        return Whole(axis_name)
    such_as = "an agn_optax.Placement or None, such as Placement(shard_axis='towers')"
    check.instance(placement, Placement, f"placement must be {such_as}")
    if placement.shard_axis is not None:
        return Sharded(axis_name, placement)
    if placement.gossip is not None:
        return Gossip(axis_name, placement)
    return Whole(axis_name, placement)


def whole_center(stored: PyTree) -> PyTree:
    """Return a stored center as a tree like the parameters, on the device."""
    center = unwrapped(stored)
    if isinstance(stored, OnHost):
        center = to_device(center)
    if isinstance(center, OwnCenter):
        return mean_center(center)
    return gather_center(center) if isinstance(center, CenterShards) else center
