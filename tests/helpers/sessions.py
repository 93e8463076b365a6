"""Exchanges with a center by worker name, and the parts of workers and services.

The sessions of workers are remembered. Tests that look inside a worker, a center or a
server use these accessors, so that only this file knows the private attributes.
"""

import weakref

from agn_optax.center import Submission
from agn_optax.service import EVERYBODY, address
from agn_optax.service import center_pb2 as pb

_sessions = (
    weakref.WeakKeyDictionary()
)  # by center and worker: session and number of exchanges


def join(center, worker, *args, **kwargs):
    session = center.join(worker, *args, **kwargs)
    _sessions.setdefault(center, {})[worker] = [session, 0]
    return session


def exchange(center, contribution, *, worker, **fields):
    """Make the next exchange of a worker, which joins if needed; single-threaded.

    Other fields are those of `Submission`.
    """
    known = _sessions.setdefault(center, {})
    if worker not in known:
        join(center, worker)
    session, done = known[worker]
    answer = session.exchange(Submission(done + 1, contribution, **fields))
    known[worker][1] = done + 1
    return answer


def fragment(worker, number=0):
    """Return the part of a worker that exchanges one fragment, or the whole model."""
    return worker._workers[number]


def of_worker(worker, number=0):
    """Return the current session of a worker, or of one of its fragments."""
    return fragment(worker, number).session


def of_shards(worker):
    """Return the sessions of a process of several at the shards of its center."""
    return of_worker(worker)._session._sessions


def of_center(center):
    """Return the open sessions of a connected center."""
    return list(center._sessions.values())


def link(session):
    """Return the link that a session uses, or None."""
    return session._link


def connection(center):
    """Return the connection of a connected center or of an observer."""
    return center._connection


def remote(center):
    """Return the calls of a connected center."""
    return center._remote


def servicer(server):
    """Return the servicer, which answers the calls to a server."""
    return server._servicer


def assembly(server, worker):
    """Return the assembly of a worker of several processes."""
    return servicer(server)._assemblies[worker]


def listener(server, name):
    """Return the server's end of a transport, or its page."""
    return server._listeners[name]


def leave(center, worker):
    _sessions[center].pop(worker)[0].leave()


def offer(server, transport, caller=EVERYBODY):
    """Return the offer of a transport besides gRPC, with its key, or None."""
    request = pb.DescribeRequest(protocol=address.PROTOCOL)
    described = servicer(server).describe(request, caller)
    offers = described.offers
    return next((each for each in offers if each.transport == transport), None)


def is_compared(core):
    """Return whether a center has compared all messages and versions that it has."""
    core.look()
    return not core._inspector._waiting
