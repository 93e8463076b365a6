"""Links to a center as its clients make them, and single frames."""

import numpy as np

from agn_optax.service import address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import TRANSPORTS, GrpcLink, Target
from agn_optax.service.wire import _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel, in_bytes, of_bytes
from helpers import sessions


def dialled(observer, server, transport):
    """Return a link from an observer to a served center, by a transport."""
    (way,) = (each for each in TRANSPORTS if each.name == transport)
    offer = sessions.offer(server, transport)
    return way.dial(Target(observer._connection, offer, Buffers()))


def send(link, control, size=0):
    """Send a frame with a control message and a buffer of random bytes."""
    link.send(in_bytes(control, size))


def receive(link, size):
    """Return the buffer of the last frame, which must have this size."""
    return link.buffer(of_bytes(size), "a buffer")


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
    link = GrpcLink(center._connection, "Initialize", Buffers())
    link.send(Parcel(pb.Frame(start=start), of_bytes(described.size), [described]))
    return link, Parcel(pb.Frame(parameters=pb.Parameters()), schema, arrays)


def as_bytes(control, schema=None, arrays=()):
    """Return a frame as it travels, with arrays of a schema if one is given."""
    return b"".join(Parcel(control, schema, arrays).pieces())


def around(control, data):
    """Return a frame as it travels, with other bytes as its buffer."""
    return as_bytes(control, of_bytes(len(data)), [np.frombuffer(data, np.uint8)])
