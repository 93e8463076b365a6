"""Fragments of a served center: each server has one, and holds only its messages."""

import contextlib
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
from helpers import sessions, shared
from helpers.support import assert_identical, feeds, run_worker
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, service

PERIOD = 4
FRAGMENTS = 4
PARAMS = {f"layer {i}": jnp.ones((64, 64)) for i in range(2 * FRAGMENTS)}
MODEL = sum(leaf.nbytes for leaf in PARAMS.values())


class HeldBytes:
    """The bytes that servers hold for messages, now and at most so far."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def watch(self, server):
        buffers = sessions.servicer(server).buffers
        take = buffers.take

        def watched(size):
            # JAX's threads may be late to release the previous message. A chief's
            # schema may still be held while its parameters come.
            wait_until(lambda: self.now < MODEL / 100, limit=20)
            buffer = take(size)
            with self._lock:
                self.now += size
                self.most = max(self.most, self.now)
            weakref.finalize(buffer, self._given_back, size)
            return buffer

        buffers.take = watched

    def _given_back(self, size):
        with self._lock:
            self.now -= size


@contextlib.contextmanager
def served(count):
    """Yield a worker of a sharded center, the held bytes, and the bytes sent."""
    rule, held, sent = shared.average(), HeldBytes(), []
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(service.serve(rule)) for _ in range(count)]
        for server in servers:
            held.watch(server)
        addresses = [server.address for server in servers]
        center = service.connect(addresses, rule, transports=["socket"])
        stack.enter_context(contextlib.closing(center))
        fragments = agn_optax.Fragments(count) if count > 1 else None
        worker = agn_optax.Worker(
            center,
            shared.adam(0.05),
            period=PERIOD,
            fragments=fragments,
            callbacks=[lambda number, values: sent.append(values["bytes_sent"])],
        )
        with worker:
            yield worker, held, sent


@pytest.mark.parametrize("count", [1, FRAGMENTS])
@pytest.mark.few(1)
def test_servers_hold_one_fragment_at_a_time(count):
    with served(count) as (worker, held, sent):
        loop = worker.start(PARAMS, chief=True)
        params, _ = run_worker(worker, *loop, feeds(PARAMS, 2 * PERIOD))
        assert sent == [MODEL / count] * 2 * count
        assert jax.tree.leaves(worker.version) == [2] * count
        # Apart from arrays, buffers hold less than 1 %.
        assert MODEL / count <= held.most <= 1.01 * MODEL / count
        # The last fragment has just been exchanged.
        last = agn_optax.Fragments(count).divide(PARAMS)
        center = worker.center.pull().params
        assert_identical(last.take(count - 1, params), last.take(count - 1, center))


@pytest.mark.slow
def test_worker_without_fragments_joins_if_connect_knows_them():
    rule, fragments = shared.average(), agn_optax.Fragments(2)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(service.serve(rule)) for _ in range(2)]
        addresses = [server.address for server in servers]
        center = service.connect(addresses, rule, fragments=fragments)
        stack.enter_context(contextlib.closing(center))
        params = {"a": jnp.ones((8, 4)), "b": jnp.ones(3)}
        settings = {"period": 2, "name": "whole"}
        whole = stack.enter_context(
            agn_optax.Worker(center, shared.adam(0.1), **settings)
        )
        loop = whole.start(params, chief=True)
        other = service.connect(addresses, rule)
        stack.enter_context(contextlib.closing(other))
        settings = {"period": 2, "fragments": fragments}
        worker = agn_optax.Worker(other, shared.adam(0.1), **settings)
        stack.enter_context(worker)
        run_worker(whole, *loop, feeds(params, 2))
        run_worker(worker, *worker.start(params), feeds(params, 2))
        assert worker.version == (2, 2)
        with pytest.raises(errors.TreeMismatchError):  # large leaves would be divided
            agn_optax.Worker(other, shared.adam(0.1), period=2).start(params)
        with pytest.raises(errors.InvalidArgumentError, match="got one address"):
            service.connect(addresses[0], rule, fragments=fragments)
