"""Exchanges with a center by worker name; sessions are remembered."""

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


def exchange(center, contribution, *, anchor_version, worker, steps=0):
    """Make the next exchange of a worker, which joins if needed; single-threaded."""
    known = _sessions.setdefault(center, {})
    if worker not in known:
        join(center, worker)
    session, done = known[worker]
    answer = session.exchange(
        Submission(done + 1, contribution, anchor_version=anchor_version, steps=steps)
    )
    known[worker][1] = done + 1
    return answer


def of_worker(worker, fragment=0):
    """Return the current session of a worker, or of one of its fragments."""
    return worker._workers[fragment].session


def leave(center, worker):
    _sessions[center].pop(worker)[0].leave()


def offer(server, transport, caller=EVERYBODY):
    """Return the offer of a transport besides gRPC, with its key, or None."""
    request = pb.DescribeRequest(protocol=address.PROTOCOL)
    described = server._servicer.describe(request, caller)
    offers = described.offers
    return next((each for each in offers if each.transport == transport), None)
