"""Failures at inconvenient moments: no step is lost, and none counts twice."""

import functools
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import links, network, sessions, shared, tuning
from helpers.waiting import BUSY, LIMIT, in_background, wait_until

import agn_optax
from agn_optax import errors, service
from agn_optax.center import Synchronous
from agn_optax.service import center_pb2 as pb

RULE = shared.downpour()
ZEROS = {"w": jnp.zeros(2), "v": jnp.zeros(2)}
ONES = {"w": jnp.ones(2), "v": jnp.ones(2)}
PAGE = 0.1  # s between requests, below the rate limit of the page


def step(worker, params, state):
    updates, state = worker.tx.update(ONES, state, params)
    return optax.apply_updates(params, updates), state


def start(center, **settings):
    worker = agn_optax.Worker(center, shared.sgd(1.0), name="w", **settings)
    return worker, worker.start()


def test_many_workers_of_one_process_share_a_sharded_center():
    count = 6
    servers = [service.serve(RULE, mode=Synchronous(), barrier=count) for _ in "ab"]
    with service.connect([s.address for s in servers], RULE) as center:
        center.initialize(ZEROS, worker="")

        def work(rank):
            worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name=f"{rank}")
            loop = worker.start()
            worker.exchange(*step(worker, *loop))
            worker.leave()

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert center.pull().version == (1, 1)
    for server in servers:
        server.stop()


def test_nonfinite_message_reaches_no_shard():
    servers = [service.serve(RULE) for _ in "ab"]
    with service.connect([s.address for s in servers], RULE) as center:
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1)
        params, state = worker.start(ZEROS, chief=True)
        params, state = worker.exchange({**params, "v": jnp.full(2, jnp.nan)}, state)
        assert worker.rejected == 1
        assert center.pull().version == (0, 0)
        params, _ = worker.exchange(*step(worker, params, state))
        assert params["w"][0] == params["v"][0] == -1
    for server in servers:
        server.stop()


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_message_in_flight_does_not_bring_back_a_worker_that_left(transport):
    with (
        service.serve(RULE, ZEROS, limits=service.Limits(lease=0.5)) as server,
        network.Network(server, transport) as net,
        service.connect(net.address, RULE, timeout=10) as center,
    ):
        worker, loop = start(center, period=1, overlap=True)
        loop = worker.exchange(*step(worker, *loop))
        net.cut()
        before = threading.enumerate()
        worker.exchange(*step(worker, *loop))
        exchanging = [each for each in threading.enumerate() if each not in before]
        worker.leave()
        net.mend()
        for thread in exchanging:
            thread.join(LIMIT)
        wait_until(lambda: not server.center.core.members()[1])  # its lease expires
        assert server.center.version == 1
        worker.start()


@pytest.mark.slow
@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_no_step_is_lost_after_an_exchange_gave_up(transport):
    with (
        service.serve(RULE, ZEROS) as server,
        network.Network(server, transport) as net,
        service.connect(net.address, RULE, timeout=1) as center,
    ):
        worker, loop = start(center, period=1, give_up=0.5)
        net.answering.clear()
        loop = worker.exchange(*step(worker, *loop))  # applied, its answer is lost
        loop = step(worker, *loop)
        with pytest.raises(errors.CenterUnreachableError):
            worker.exchange(*loop)
        with pytest.raises(errors.WorkerStateError, match="has not ended"):
            worker.save(*loop)
        net.cut()
        net.mend()
        for _ in range(2):
            loop = worker.exchange(*step(worker, *loop))
        worker.flush(*loop)
        assert center.pull().params["w"][0] == -4


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_reconnection_timeout_begins_at_the_last_sign_of_life(transport, monkeypatch):
    clock = tuning.ConnectionClock(monkeypatch)
    with (
        service.serve(RULE, ZEROS, mode=Synchronous()) as server,
        network.Network(server, transport) as net,
        service.connect(net.address, RULE, timeout=10) as center,
        service.connect(server.address, RULE) as other,
    ):
        sessions.join(other, "other")
        worker, loop = start(center, period=1, patience=0)
        sessions.connection(center).timeout = LIMIT

        def hiccup():
            clock.pass_waiting(center, 1.5 * LIMIT)
            net.cut()
            net.mend()
            sessions.exchange(other, ONES, anchor_version=0, worker="other")

        thread = threading.Thread(target=hiccup)
        thread.start()
        worker.exchange(*step(worker, *loop))
        thread.join()
        assert worker.exchanges == 1


def reject(net):
    net.cut()
    yield
    net.mend()


def swallow(net):
    """Accept connections and drop their bytes; then let only new ones work again."""
    gates = (net.there.gate, net.back.gate)
    for gate in gates:
        gate.clear()
    yield
    net.strand()
    for gate in gates:
        gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("outage", [reject, swallow])
@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_worker_joins_soon_after_an_outage(transport, outage):
    with (
        service.serve(RULE, ZEROS, limits=service.Limits(lease=60.0)) as server,
        network.Network(server, transport) as net,
        service.connect(
            net.address, RULE, transports=[transport], timeout=60
        ) as center,
    ):
        center.pull()
        breaking = outage(net)
        next(breaking)
        joined = in_background(functools.partial(center.join, "anna"), "a test")
        with pytest.raises(TimeoutError):  # until the backoff is at its longest
            joined.result(7.0)
        next(breaking, None)
        ended = time.monotonic()
        joined.result(60)
        took = time.monotonic() - ended
        assert took < 5.0 + BUSY
        assert server.center.workers == {"anna"}


def test_closing_a_connection_ends_its_retries(caplog):
    with (
        service.serve(RULE, ZEROS) as server,
        service.connect(server.address, RULE, timeout=2 * LIMIT) as center,
    ):
        server.stop()
        pulled = in_background(center.pull, "a test")
        wait_until(lambda: "does not answer" in caplog.text)
        center.close()
        with pytest.raises(errors.CenterClosedError, match="is closed"):
            pulled.result(LIMIT)


def test_message_in_a_dtype_without_x64_is_rejected():
    with service.serve(RULE, ZEROS) as server:
        message = pb.Message(sequence=1, dtype="float64")
        with pytest.raises(errors.InvalidArgumentError, match="JAX_ENABLE_X64"):
            sessions.servicer(server)._frames.message_schema(message)


@pytest.mark.parametrize("ends", ["breaks off", "initializes"])
def test_chief_waits_while_another_one_initializes_the_center(ends, lively, caplog):
    """A chief may reconnect before the center has noticed its lost connection."""
    caplog.set_level("WARNING")
    params = np.zeros(2, np.float32)
    with (
        service.serve(RULE) as server,
        service.connect(server.address, RULE) as first,
        service.connect(server.address, RULE) as second,
    ):
        link, frame = links.begin_to_initialize(first, params, "first")
        wait_until(
            lambda: sessions.servicer(server).call_limits.initializations._counts
        )
        initializing = in_background(
            lambda: second.initialize(params + 1, worker="second"), "second"
        )
        wait_until(lambda: "another worker is initializing this center" in caplog.text)
        assert not initializing.done()
        if ends == "breaks off":
            link.cancel()
            initializing.result(LIMIT)
            np.testing.assert_array_equal(second.pull().params, params + 1)
            return
        link.send(frame)
        link.end()
        with pytest.raises(errors.AlreadyInitializedError, match="'first'"):
            initializing.result(LIMIT)
        np.testing.assert_array_equal(second.pull().params, params)
