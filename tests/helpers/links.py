"""Links to a center as its clients make them, and single frames."""

import io

import numpy as np

from agn_optax.service import address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import TRANSPORTS, GrpcLink, Target
from agn_optax.service.wire import _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import (
    Frame,
    FrameReader,
    bytes_schema,
)
from helpers import sessions


def dialled(observer, server, transport):
    """Return a link from an observer to a served center, by a transport."""
    (kind,) = (each for each in TRANSPORTS if each.name == transport)
    offer = sessions.offer(server, transport)
    return kind.dial(Target(sessions.connection(observer), offer, Buffers()))


def begin_to_initialize(center, params, worker):
    """Announce parameters as a chief does; return the link, and the frame with them."""
    schema, arrays = _trees.schema_of(params), _trees.host_arrays(params)
    described = np.frombuffer(_trees.to_bytes(schema), np.uint8)
    start = pb.Start(
        protocol=address.PROTOCOL,
        worker=worker,
        schema_hash=schema.hash,
        schema_size=described.size,
    )
    link = GrpcLink(sessions.connection(center), "Initialize", Buffers())
    link.send(Frame(pb.Header(start=start), bytes_schema(described.size), [described]))
    return link, Frame(pb.Header(parameters=pb.Parameters()), schema, arrays)


def as_bytes(header, schema=None, arrays=()):
    """Return a frame as it travels, with arrays of a schema if one is given."""
    return b"".join(Frame(header, schema, arrays).pieces())


def reader_of(data):
    """Return a reader of the frames that have travelled as these bytes."""
    return FrameReader(io.BytesIO(data).readinto, Buffers())


def around(header, data):
    """Return a frame as it travels, with other bytes as its buffer."""
    return as_bytes(header, bytes_schema(len(data)), [np.frombuffer(data, np.uint8)])
