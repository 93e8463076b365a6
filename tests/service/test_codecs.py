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
from helpers.support import assert_identical, nothing_compiles, shares

import agn_optax
from agn_optax import codecs, errors, service
from agn_optax.center import Journal, Submission

CODECS = {
    "cast": lambda: codecs.cast("bfloat16"),
    "feedback": lambda: codecs.error_feedback(codecs.quantize(8, block=64)),
    "two_way": lambda: codecs.two_way(
        codecs.error_feedback(codecs.quantize(8, block=64)),
        codecs.quantize(4, block=64),
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
    return jax.tree.map(np.asarray, (loop, *both_of(center)))


def both_of(center):
    """Return the exact center and the broadcast parameters."""
    return center.pull().params, center.pull(broadcast=True).params


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
        assert_identical((loop, *both_of(center)), embedded(codec))


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
        assert_identical((again, *both_of(center)), embedded(codec))


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


SIZE = 20_000  # elements of a model whose encoded difference takes 1/8 of its bytes
ONE = SIZE // 2 + 4 * -(-SIZE // 4096)  # bytes


@functools.cache
def differing():
    by = codecs.two_way(codecs.identity(), codecs.quantize(4))
    return shared.agn(shared.sgd(0.5), codec=by)


class ScriptedWorker:
    """A worker that sends given messages, and records the bytes of each answer."""

    def __init__(self, center, name, **settings):
        self.worker = agn_optax.Worker(
            center, shared.sgd(0.0), period=1, name=name, callbacks=[self], **settings
        )
        self.local = jax.jit(self.worker.tx.update)
        self.received = []

    def __call__(self, step, values):
        self.received.append(int(values["bytes_received"]))

    def send(self, seed):
        grads = {"w": jnp.sin(seed + jnp.arange(float(SIZE)))}
        _, state = self.local(grads, self.loop[1], self.loop[0])
        self.loop = self.worker.exchange(self.loop[0], state)

    def start(self, **how):
        self.loop = self.worker.start(**how)
        return self


@pytest.fixture
def served():
    params = {"w": jnp.zeros(SIZE)}
    with service.serve(differing(), params) as server:
        yield server


@pytest.mark.parametrize("transport", PLACES[:3])
def test_answer_has_the_differences_that_a_worker_missed(transport, served):
    """All parameters are sent if they are smaller; the result is identical."""
    with service.connect(served.address, differing(), transports=[transport]) as center:
        anna = ScriptedWorker(center, "anna").start()
        bert = ScriptedWorker(center, "bert").start()
        for i in range(3):
            anna.send(i)
        bert.send(3)
        assert anna.received == [ONE, ONE, ONE]
        assert bert.received == [4 * ONE]
        # Any number of differences is applied without another compilation.
        with nothing_compiles():
            for behind in (1, 2):
                for i in range(behind):
                    anna.send(i)
                bert.send(behind)
        assert bert.received[1:] == [2 * ONE, 3 * ONE]
        assert anna.received[3:] == [2 * ONE, 2 * ONE, ONE]
        for i in range(8):
            anna.send(i)
        bert.send(8)
        assert bert.received[3:] == [4 * SIZE]
        assert anna.received[6:] == [2 * ONE, *[ONE] * 7]
        exact, public = both_of(center)
        assert_identical(bert.loop[0], public)
        assert np.any(np.asarray(public["w"]) != exact["w"])
        sent = {w["name"]: w["bytes_sent"] for w in center.status()["workers"]}
        gaps = 1024  # leaves are aligned
        assert sum(anna.received) <= sent["anna"] < sum(anna.received) + 16 * gaps


def test_repeated_exchange_gets_an_identical_answer(served):
    def grads(i):
        return {"w": jnp.sin(float(i) + jnp.arange(float(SIZE)))}

    with service.connect(served.address, differing()) as center:
        anchor = center.pull(broadcast=True)
        how = {"anchor_version": anchor.version, "anchor": anchor.params}
        session = center.join("anna")
        session.submit(Submission(1, grads(1), **how))
        first = session.collect(1)
        center.join("bert").exchange(Submission(1, grads(2), anchor_version=0))
        session.disconnect()
        session.submit(Submission(1, grads(1), **how))
        again = session.collect(1)
        whole = center.join("bert").exchange(Submission(1, grads(2), anchor_version=0))
        session.acknowledge(1)
        assert_identical((again.params, again.version), (first.params, first.version))
        assert (first.received, again.received, whole.received) == (ONE, ONE, 4 * SIZE)
        # A worker that has the version already gets no bytes.
        session.submit(Submission(2, grads(3), anchor_version=1, anchor=first.params))
        two = session.collect(2)
        session.disconnect()
        session.submit(
            Submission(2, grads(3), anchor_version=two.version, anchor=two.params)
        )
        same = session.collect(2)
        assert_identical((same.params, same.version), (two.params, two.version))
        assert same.received == 0


@pytest.mark.parametrize("known", [False, True])
def test_worker_that_resumes_gets_the_differences_it_missed(known, tmp_path):
    """With the same center id it gets differences; otherwise all parameters."""
    kept = Journal(tmp_path)
    with (
        service.serve(differing(), {"w": jnp.zeros(SIZE)}, durability=kept) as server,
        service.connect(server.address, differing()) as center,
    ):
        anna = ScriptedWorker(center, "anna").start()
        anna.send(1)
        saved = jax.tree.map(np.array, anna.worker.save(*anna.loop))
        token = anna.worker.resume_token
    with (
        service.serve(differing(), durability=kept) as server,
        service.connect(server.address, differing()) as center,
    ):
        anna = ScriptedWorker(center, "anna")
        anna.loop = anna.worker.restore(saved, resume_token=token if known else None)
        anna.send(2)
        anna.send(3)
        assert anna.received == ([ONE, ONE] if known else [4 * SIZE, ONE])
        assert_identical(anna.loop[0], both_of(center)[1])


def test_unrequested_differences_are_rejected(served, monkeypatch):
    with service.connect(served.address, differing()) as center:
        session = center.join("anna")
        anchor = center.pull(broadcast=True)
        how = {"anchor_version": anchor.version, "anchor": anchor.params}
        session.submit(Submission(1, anchor.params, **how))
        submission, frame = session._in_flight
        session._in_flight = submission._replace(anchor=None), frame
        with pytest.raises(
            errors.ProtocolError, match="the whole center was asked for"
        ):
            session.collect(1)


@functools.cache
def in_turns(kind, name, overlap):
    """Return the result of two workers with stale messages and encoded answers."""
    codec = codecs.two_way(
        codecs.error_feedback(codecs.quantize(4, block=64)),
        codecs.chain_codecs(codecs.top_k(16, block=64), codecs.quantize(4)),
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
        return jax.tree.map(np.asarray, (loops, *both_of(center)))


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
def test_law_7_stale_workers_adopt_the_same_broadcast_parameters(kind, name, overlap):
    ours, expected = (in_turns(each, name, overlap) for each in (kind, "local"))
    assert_identical(ours, expected)
