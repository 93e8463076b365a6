"""Codecs between processes: identical results in every placement, and no loss."""

import contextlib
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import center_kinds, shared
from helpers.support import assert_identical, shares

import agn_optax
from agn_optax import codecs, service
from agn_optax.center import Journal

CODECS = {
    "cast": lambda: codecs.cast("bfloat16"),
    "feedback": lambda: codecs.error_feedback(codecs.quantize(8, block=64)),
    "two_way": lambda: codecs.two_way(
        codecs.error_feedback(codecs.quantize(8, block=64)), "bfloat16"
    ),
}
PLACES = [
    "grpc",
    "socket",
    pytest.param("memory", marks=shares),
    "shards",
    "journal",
]


@pytest.fixture(params=CODECS)
def codec(request):
    return request.param


@functools.cache
def rule(codec):
    return shared.diloco(shared.sgd(0.5, momentum=0.9), codec=CODECS[codec]())


def start():
    return {
        "w": jnp.linspace(-1.0, 1.0, 700).reshape(7, 100),
        "b": jnp.ones(3),
        "scale": jnp.float32(2.0),
    }


def train(worker, *steps, loop=None):
    """Return parameters and state of a worker after some local steps."""
    params, state = worker.start() if loop is None else loop
    local = jax.jit(worker.tx.update)
    for i in range(*steps):
        grads = jax.tree.map(lambda x, i=i: x * 0.3 + jnp.sin(x * 50 + i), params)
        updates, state = local(grads, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    return params, state


def a_worker(center):
    return agn_optax.Worker(center, shared.sgd(0.1), period=2, name="anna")


@functools.cache
def embedded(codec):
    """Return the result of a worker and a center in one process."""
    center = agn_optax.LocalCenter(rule(codec), start())
    loop = train(a_worker(center), 8)
    return jax.tree.map(np.asarray, (loop, center.pull().params))


def placed(stack, place, codec, tmp_path):
    """Return a connection to a center in the given placement."""

    def serve(params, **settings):
        return stack.enter_context(service.serve(rule(codec), params, **settings))

    def connect(address, **settings):
        return stack.enter_context(service.connect(address, rule(codec), **settings))

    if place == "shards":
        center = connect([serve(None).address for _ in range(2)])
        center.initialize(start(), worker="")
        return center
    if place == "journal":
        return connect(serve(start(), durability=Journal(tmp_path / "a")).address)
    return connect(serve(start()).address, transports=[place])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_law_12_results_are_identical_in_every_placement(place, codec, tmp_path):
    with contextlib.ExitStack() as stack:
        center = placed(stack, place, codec, tmp_path)
        loop = train(a_worker(center), 8)
        assert_identical((loop, center.pull().params), embedded(codec))


@pytest.mark.few(1)
def test_bytes_sent_are_those_of_the_codec(codec):
    with (
        service.serve(rule(codec), start()) as server,
        service.connect(server.address, rule(codec)) as center,
    ):
        worker = a_worker(center)
        train(worker, 2)
        (seen,) = center.status()["workers"]
        elements = 704
        most = {"cast": 2}.get(codec, 1 + 4 / 64) * elements
        assert (
            elements < seen["bytes_received"] < most + 3 * 64 * 4
        )  # leaves are aligned


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_law_9_center_resumes_from_its_journal(codec, killed, tmp_path):
    """The journal replays encoded messages; the worker restores its residual."""
    kept = Journal(tmp_path / "a")
    with (
        service.serve(rule(codec), start(), durability=kept) as server,
        service.connect(server.address, rule(codec)) as center,
    ):
        worker = a_worker(center)
        loop = train(worker, 4)
        saved = jax.tree.map(np.array, worker.save(*loop))
        if killed:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / ("b" if killed else "a")
    with (
        service.serve(rule(codec), durability=Journal(folder)) as server,
        service.connect(server.address, rule(codec)) as center,
    ):
        worker = a_worker(center)
        again = train(worker, 4, 8, loop=worker.restore(saved))
        assert_identical((again, center.pull().params), embedded(codec))


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", PLACES[:3])
def test_law_13_sent_plus_residual_equals_contributed(transport):
    """Also with overlap; with powers of two, so that sums are exact."""
    codec = codecs.error_feedback(codecs.quantize(2))
    made = shared.downpour(codec=codec)
    params = {"w": jnp.zeros(40), "b": jnp.zeros(())}
    with (
        service.serve(made, params) as server,
        service.connect(server.address, made, transports=[transport]) as center,
    ):
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, overlap=True)
        params, state = worker.start()
        grads = {"w": jnp.arange(40.0) / 64, "b": jnp.float32(0.25)}
        for _ in range(6):
            updates, state = worker.tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        params, state = worker.flush(params, state)
        sent = center.pull().params
        residual = state.codec_state.residual
        for name, gradient in grads.items():
            np.testing.assert_array_equal(
                np.asarray(sent[name]) - residual[name], -6 * gradient
            )


@functools.cache
def in_turns(kind, name, overlap):
    """Return the result of two workers with stale messages and rounded answers."""
    codec = codecs.two_way(
        codecs.error_feedback(codecs.quantize(4, block=64)), "bfloat16"
    )
    made = {"easgd": shared.easgd(0.5, rho=0.1, codec=codec)}.get(name)
    made = made or shared.agn(shared.adam(0.05), codec=codec)
    with center_kinds.made(kind, made, start()) as center:
        workers = [
            agn_optax.Worker(
                center,
                shared.sgd(0.1),
                period=2,
                name=f"w{i}",
                overlap=overlap,
                patience=1,
            )
            for i in range(2)
        ]
        loops = [worker.start() for worker in workers]
        for part in range(3):
            for i, worker in enumerate(workers):
                some = 4 * part, 4 * part + 3 + i
                loops[i] = worker.flush(*train(worker, *some, loop=loops[i]))
        return jax.tree.map(np.asarray, (loops, center.pull().params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "overlap"),
    [
        ("server", "agn", False),
        ("server", "agn", True),
        ("server", "easgd", False),
        ("shards", "easgd", False),
    ],
)
def test_law_7_stale_workers_adopt_the_same_center(kind, name, overlap):
    ours, expected = (in_turns(each, name, overlap) for each in (kind, "local"))
    assert_identical(ours, expected)
