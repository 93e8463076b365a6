"""Silent peers: others wait for them no longer than the lease or the grace."""

import contextlib
import os
import pathlib
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import children, sessions, shared
from helpers.support import shares
from helpers.waiting import BUSY, wait_until

from agn_optax import errors, service
from agn_optax.center import BoundedStaleness, Submission, Synchronous

PROGRAM = pathlib.Path(__file__).with_name("counting_worker.py")
RULE = shared.downpour()
LIMIT = 90  # s, generous: no test should come near it
LARGE = 4_000_000  # elements: more than all buffers of a socket hold
TRANSPORTS = ["grpc", "socket", pytest.param("memory", marks=shares)]


@contextlib.contextmanager
def stopped(process):
    """Stop a process by SIGSTOP: its connections stay open, and silent."""
    os.kill(process._popen.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process._popen.pid, signal.SIGCONT)


def connect(server, *transports):
    names = transports or ("memory", "socket", "grpc")
    return service.connect(server.address, RULE, transports=names, timeout=LIMIT)


@pytest.fixture(scope="module")
def process():
    """A process for all tests, as its start takes longer than they do."""
    with children.processes(PROGRAM, 1) as (made,):
        yield made


@pytest.mark.parametrize(
    "mode",
    [BoundedStaleness(rounds=1), pytest.param(Synchronous(), marks=pytest.mark.slow)],
    ids=repr,
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_worker_is_given_up_after_its_lease(process, transport, mode):
    """The others wait until its lease is over; afterwards it can come back."""
    start = np.zeros(8, np.float32)
    with (
        service.serve(
            RULE, start, mode=mode, limits=service.Limits(lease=1.0)
        ) as server,
        connect(server) as center,
    ):
        join = {"address": server.address, "worker": "anna", "transports": [transport]}
        process.ask(do="join", **join)
        with stopped(process):
            for number in range(4):
                answer = sessions.exchange(
                    center, np.ones(8, np.float32), anchor_version=number, worker="bert"
                )
            assert answer.version == 4
            assert server.center.workers == {"bert"}
        # The worker continues, and is registered again by its next exchange.
        sessions.leave(center, "bert")
        assert process.ask(do="exchange", element=1)["version"] == 5
        assert server.center.workers == {"anna"}
        process.ask(do="leave")


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("unread", ["grpc", "socket"])
def test_worker_that_does_not_read_its_answer_blocks_no_others(unread, transport):
    start = {"a": jnp.zeros(LARGE), "b": jnp.zeros(LARGE)}
    ones = {name: np.ones(LARGE, np.float32) for name in start}
    with (
        service.serve(RULE, start) as server,
        connect(server, unread) as silent,
        connect(server, transport) as center,
    ):
        anna = silent.join("anna")
        anna.submit(Submission(1, ones, anchor_version=0))
        # Its answer is in flight from then on.
        wait_until(lambda: server.center.version == 1, LIMIT)
        for version in range(1, 5):
            answer = sessions.exchange(
                center, ones, anchor_version=version, worker="bert"
            )
            assert answer.version == version + 1
        assert float(answer.params["a"][0]) == -5.0
        assert anna.collect(1, timeout=LIMIT).version == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stop_ends_within_a_second_after_the_grace(process, transport):
    """Also if workers are stopped, or do not read their answers."""
    start = {"a": jnp.zeros(LARGE), "b": jnp.zeros(LARGE)}
    ones = {name: np.ones(LARGE, np.float32) for name in start}
    server = service.serve(RULE, start, limits=service.Limits(lease=LIMIT))
    with connect(server, transport) as silent:
        join = {"address": server.address, "worker": "bert", "transports": [transport]}
        process.ask(do="join", **join)
        with stopped(process):
            silent.join("anna").submit(Submission(1, ones, anchor_version=0))
            wait_until(lambda: server.center.version == 1)
            began = time.monotonic()
            server.stop(grace=0.5)
            took = time.monotonic() - began
        process.ask(do="leave")
    assert took < 0.5 + 1.0 + BUSY


def test_timeout_below_the_waiting_interval_is_rejected():
    with (
        service.serve(RULE, jnp.zeros(3)) as server,
        pytest.raises(errors.InvalidArgumentError, match=r"than 3 s.* got 2\.5"),
    ):
        service.connect(server.address, RULE, timeout=2.5)
