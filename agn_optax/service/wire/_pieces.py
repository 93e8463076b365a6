"""The shares of a worker's processes on the wire, and the schemas of their pieces."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax.center import Region, Share
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire import _trees
from agn_optax.service.wire._schema import Schema

PyTree = Any

MAX_SHARE = _trees.MAX_SCHEMA  # bytes
_MAX_PROCESSES = 1 << 16


def to_bytes(share: Share) -> np.ndarray:
    """Return a share as it is sent, with leaves numbered as in the schema."""
    order = _trees.leaf_order(jax.tree.structure(share.like)).indices
    numbers = {leaf: number for number, leaf in enumerate(order)}

    def sent(regions: tuple[Region, ...]) -> list[pb.Region]:
        return [
            pb.Region(leaf=numbers[r.leaf], start=r[1], shape=r[2]) for r in regions
        ]

    message = pb.Share(
        group=share.group,
        process=share.process,
        processes=share.processes,
        owned=sent(share.owned),
        wanted=sent(share.wanted),
    )
    return np.frombuffer(message.SerializeToString(), np.uint8)


def from_bytes(data: bytes) -> Share:
    """Decode a received share, whose ``like`` is None.

    Raises:
      ProtocolError: the share is malformed.
    """
    try:
        message = pb.Share.FromString(data)
    except DecodeError as error:
        raise errors.ProtocolError(f"not a share: {error}") from None
    owned, wanted = (
        tuple(Region(r.leaf, tuple(r.start), tuple(r.shape)) for r in regions)
        for regions in (message.owned, message.wanted)
    )
    if any(len(r.start) != len(r.shape) for r in itertools.chain(owned, wanted)):
        raise errors.ProtocolError("a region has other dimensions than its start")
    if not 0 <= message.process < message.processes <= _MAX_PROCESSES:
        raise errors.ProtocolError(
            f"there is no process {message.process} of {message.processes}"
        )
    return Share(message.group, message.process, message.processes, None, owned, wanted)


class PieceSchemas(NamedTuple):
    """The schemas of a process's pieces, as lists of arrays."""

    owned: Schema  # the owned pieces of the center
    schemas: _trees.WireSchemas  # `center` has the wanted pieces


def piece_schemas(rule: Rule, center: Schema, share: Share) -> PieceSchemas:
    """Return the schemas of what a process sends and receives.

    Args:
      rule: the rule.
      center: the schema of the center.
      share: the share, with leaves numbered as in the schema.
    """

    def abstract(regions: tuple[Region, ...]) -> list[jax.ShapeDtypeStruct]:
        dtypes = center.numpy_dtypes
        return [jax.ShapeDtypeStruct(r.shape, dtypes[r.leaf]) for r in regions]

    sent = _trees.wire_schemas(rule, abstract(share.owned))
    received = _trees.wire_schemas(rule, abstract(share.wanted))
    return PieceSchemas(sent.center, received._replace(message=sent.message))


def in_schema_order(share: Share) -> Share:
    """Return a share with leaves numbered as in the schema."""
    return from_bytes(to_bytes(share).tobytes())
