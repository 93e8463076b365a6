"""The shares of a worker's processes on the wire, and the schemas of their pieces."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import jax
import numpy as np
from google.protobuf import proto
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax.center import Region, Share
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire import _trees
from agn_optax.service.wire._schema import Schema

PyTree = Any

MAX_SHARE = _trees.MAX_SCHEMA  # bytes
_MAX_PROCESSES, _MAX_REGIONS = 1 << 16, 1 << 18
_MAX_GROUP = 256  # characters of the id of a group


def to_bytes(share: Share) -> np.ndarray:
    """Return a share as it is sent, with leaves numbered as in the schema.

    Raises:
      InvalidArgumentError: it has more regions than the receiver accepts.
    """
    order = _trees.leaf_order(jax.tree.structure(share.like)).indices
    numbers = {leaf: number for number, leaf in enumerate(order)}

    def sent(regions: tuple[Region, ...]) -> bytes:
        data = io.BytesIO()
        for leaf, start, shape in regions:
            region = pb.Region(leaf=numbers[leaf], start=start, shape=shape)
            proto.serialize_length_prefixed(region, data)
        return data.getvalue()

    if (most := max(len(share.owned), len(share.wanted))) > _MAX_REGIONS:
        raise errors.InvalidArgumentError(
            f"a process of a worker has at most {_MAX_REGIONS} pieces, got {most}: "
            "stack leaves that are alike, such as those of equal layers"
        )

    message = pb.Share(
        group=share.group,
        process=share.process,
        processes=share.processes,
        owned=sent(share.owned),
        wanted=sent(share.wanted),
    )
    return np.frombuffer(message.SerializeToString(), np.uint8)


def from_bytes(data: bytes) -> Share:
    """Decode a received share, whose ``like`` is None, with bounded memory.

    Raises:
      ProtocolError: the share is malformed.
    """
    try:
        message = pb.Share.FromString(data)
        owned, wanted = _regions_in(message.owned), _regions_in(message.wanted)
    except (DecodeError, ValueError) as error:
        raise errors.ProtocolError(f"not a share: {error}") from None
    if len(message.group) > _MAX_GROUP:
        raise errors.ProtocolError(
            f"the id of a group has at most {_MAX_GROUP} characters, got "
            f"{len(message.group)}"
        )
    if not 0 <= message.process < message.processes <= _MAX_PROCESSES:
        raise errors.ProtocolError(
            f"there is no process {message.process} of {message.processes}"
        )
    return Share(message.group, message.process, message.processes, None, owned, wanted)


def _regions_in(data: bytes) -> tuple[Region, ...]:
    regions: list[Region] = []
    stream = io.BytesIO(data)
    while (received := proto.parse_length_prefixed(pb.Region, stream)) is not None:
        start, shape = tuple(received.start), tuple(received.shape)
        if not len(start) == len(shape) <= _trees.MAX_DIMENSIONS:
            raise errors.ProtocolError(
                f"a region has the same number of dimensions as its start, at most "
                f"{_trees.MAX_DIMENSIONS}, got {len(shape)} and {len(start)}"
            )
        regions.append(Region(received.leaf, start, shape))
        if len(regions) > _MAX_REGIONS:
            raise errors.ProtocolError(
                f"a process of a worker has at most {_MAX_REGIONS} pieces"
            )
    return tuple(regions)


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
