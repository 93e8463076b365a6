"""Placements of the center on a mesh: whole, in shards or each worker's own.

`Placement` is the caller's choice. `layout_of` makes a `Layout` of it, whose methods
the round calls, so that the round distinguishes no cases.

- `_placement`: the caller's choice.
- `_layout`: the protocol, and what placements have in common.
- `_whole`: a center that is whole on every tower, and gossip.
- `_shards`: a center in shards.
- `_host`: memory of the device, and of the host.
- `_stored`: the protocol of centers as optimizer states store them.
"""

from __future__ import annotations

from typing import Any

from agn_optax._internal import check
from agn_optax.round.placements._host import OnHost as OnHost
from agn_optax.round.placements._host import to_host as to_host
from agn_optax.round.placements._layout import Layout as Layout
from agn_optax.round.placements._placement import Placement as Placement
from agn_optax.round.placements._shards import CenterShards as CenterShards
from agn_optax.round.placements._shards import Sharded
from agn_optax.round.placements._shards import piece_length as piece_length
from agn_optax.round.placements._stored import as_stored as as_stored
from agn_optax.round.placements._stored import center_arrays as center_arrays
from agn_optax.round.placements._whole import Gossip, Whole
from agn_optax.round.placements._whole import OwnCenter as OwnCenter

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
