"""Fixtures for the tests of the command line: servers and an unused address."""

import contextlib

import jax.numpy as jnp
import optax
import pytest
from helpers import ports

import agn_optax
from agn_optax import rules, service

RULE = rules.easgd(0.25)


@pytest.fixture(scope="module")
def server():
    """A center with one worker that made two exchanges, one of them stale."""
    with serving() as server:
        yield server


@pytest.fixture
def new_server():
    """A new server of the same kind, whose worker has not stalled yet."""
    with serving() as server:
        yield server


@contextlib.contextmanager
def serving():
    params = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.zeros(2)}
    with (
        service.serve(RULE, params, limits=service.Limits(calls=None)) as server,
        service.connect(server.address, RULE) as center,
    ):
        worker = agn_optax.Worker(center, optax.sgd(0.5), period=2, name="worker-0")
        params, state = worker.start()
        for _ in range(4):
            updates, state = worker.tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        yield server


@pytest.fixture
def nowhere():
    """An address at which nothing listens."""
    return ports.free_address()
