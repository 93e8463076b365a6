"""The contract of every center: embedded, served and sharded."""

import concurrent.futures
import contextlib
import functools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import center_kinds, sessions, shared, tuning
from helpers.support import (
    RULES,
    assert_close,
    assert_identical,
    feeds,
    held,
    run_worker,
    tree,
)

import agn_optax
from agn_optax import errors, service
from agn_optax.center import Submission


@pytest.fixture(params=center_kinds.KINDS)
def kind(request):
    return request.param


def count(version):
    """Return the number of applied exchanges for any kind of version."""
    numbers = set(jax.tree.leaves(version))
    assert len(numbers) == 1
    return numbers.pop()


@functools.cache
def trained(kind, rule):
    """Train two workers that exchange in turns and so have stale messages."""
    with center_kinds.made(kind, RULES[rule]()) as center:
        workers = [
            agn_optax.Worker(center, shared.adam(0.05), period=2, name=f"w{i}")
            for i in range(2)
        ]
        loops = [w.start(tree(), chief=not i) for i, w in enumerate(workers)]
        answers = []
        for part in range(3):
            for i, worker in enumerate(workers):
                more = feeds(tree(), 3, seed=10 * part + i)
                loops[i] = run_worker(worker, *loops[i], more)
                answers.append((worker.staleness, np.float32(worker.norm)))
        pulled = center.pull()
        assert count(pulled.version) == sum(w.exchanges for w in workers) == 8
        return jax.tree.map(np.asarray, (loops, pulled.params)), answers


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *(("server", rule) for rule in ("agn", "dynsgd", "diloco", "easgd_rho")),
        *(("shards", rule) for rule in ("agn", "easgd_rho")),
    ],
)
def test_law_7_every_center_gives_the_numbers_of_the_embedded_one(kind, rule):
    ours, answers = trained(kind, rule)
    embedded, expected = trained("local", rule)
    if kind == "shards":  # each shard compiles a program for its own leaves
        assert_close(ours, embedded, tolerance=1e-6)
    else:
        assert_identical(ours, embedded)
    assert [s for s, _ in answers] == [s for s, _ in expected]
    np.testing.assert_allclose(
        [n for _, n in answers], [n for _, n in expected], rtol=1e-6
    )


def test_chief_initializes_and_others_adopt(kind):
    with center_kinds.made(kind, shared.downpour()) as center:
        with pytest.raises(errors.NotInitializedError, match="chief"):
            center.pull()
        with pytest.raises(errors.NotInitializedError, match=r"within 0.1 s"):
            center.wait(timeout=0.1)
        anna, bert = (
            agn_optax.Worker(center, shared.sgd(0.1), period=1, name=name)
            for name in ("anna", "bert")
        )
        started = {}
        waiting = threading.Thread(
            target=lambda: started.update(
                bert=bert.start(tree(seed=1), chief=False, timeout=60)[0]
            )
        )
        waiting.start()
        anna.start(tree(), chief=True)
        waiting.join(60)
        assert_identical(started["bert"], tree())
        with pytest.raises(errors.AlreadyInitializedError, match=r"'bert'.*'anna'"):
            bert.start(tree(seed=1), chief=True)
        assert_identical(
            anna.start(tree(seed=2), chief=True)[0], tree()
        )  # the chief came back


def test_versions_are_immutable_and_count_exchanges(kind):
    with center_kinds.made(kind, shared.downpour(), tree()) as center:
        first = center.pull()
        answer = sessions.exchange(
            center, tree(seed=1), anchor_version=first.version, worker="w"
        )
        assert count(answer.version) == count(first.version) + 1
        assert answer.staleness == 0
        assert answer.applied
        expected = jax.tree.map(lambda c, m: c - m, tree(), tree(seed=1))
        assert_identical(first.params, tree())
        assert_identical(answer.params, expected)
        again = sessions.exchange(
            center, tree(seed=2), anchor_version=first.version, worker="w"
        )
        assert again.staleness == 1
        assert_identical(answer.params, expected)


@pytest.mark.parametrize(
    ("contribution", "message"),
    [
        ({"b": jnp.ones(2)}, r"b'\]"),
        (tree() | {"scale": jnp.ones(3)}, r"scale"),
        (tree() | {"scale": jnp.int32(1)}, r"int32"),
    ],
)
def test_contribution_of_another_model_is_rejected(kind, contribution, message):
    with center_kinds.made(kind, shared.downpour(), tree()) as center:
        version = center.pull().version
        with pytest.raises(errors.TreeMismatchError, match=message):
            sessions.exchange(center, contribution, anchor_version=version, worker="w")
        assert center.pull().version == version
        assert_identical(center.pull().params, tree())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_message_is_rejected_and_worker_continues(kind, value):
    with center_kinds.made(kind, shared.downpour(), tree()) as center:
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="anna")
        params, state = worker.start()
        bad = params | {"layers": jax.tree.map(lambda x: x * value, params["layers"])}
        params, state = worker.exchange(bad, state)
        assert "not finite" in worker.rejection
        assert_identical(center.pull().params, tree())
        assert_identical(params, tree())  # it continues from the center
        worker.exchange(params, state)
        assert (worker.exchanges, worker.rejected, worker.dropped) == (2, 1, 0)
        assert worker.rejection == ""


def test_session_is_resumed_from_another_process(kind):
    """Its applied messages get a response, and are not applied again."""
    with center_kinds.made(kind, shared.downpour(), jnp.zeros(4)) as center:
        first = center.join("w")
        version = center.pull().version
        first.exchange(Submission(1, jnp.ones(4), anchor_version=version))
        token = json.loads(json.dumps(first.resume_token))  # as if stored in a file
        first.disconnect()
        again = center.join("w", resume_token=token)
        assert again.resume_token == token
        again.exchange(Submission(1, jnp.ones(4), anchor_version=version))
        after = again.exchange(Submission(2, jnp.ones(4), anchor_version=version))
        np.testing.assert_array_equal(after.params, np.full(4, -2.0))
        center.join("w").leave()  # a new session of the worker
        with pytest.raises(errors.WorkerStateError, match="was replaced"):
            center.join("w", resume_token=token)
    with (
        center_kinds.made(kind, shared.downpour(), jnp.zeros(4)) as other,
        pytest.raises(errors.WorkerStateError, match="start"),
    ):
        other.join("w", resume_token=token)


def test_anchor_version_of_the_future_is_rejected(kind):
    with center_kinds.made(kind, shared.downpour(), tree()) as center:
        version = jax.tree.map(lambda v: v + 1, center.pull().version)
        for wrong in (version, None):
            with pytest.raises(errors.InvalidArgumentError, match="anchor_version"):
                sessions.exchange(center, tree(), anchor_version=wrong, worker="w")
        assert_identical(center.pull().params, tree())


@pytest.mark.few(1)
def test_concurrent_exchanges_are_atomic_and_counted(kind):
    """Integers in float32 make the sum exact in any order."""
    workers, exchanges = 4, 6
    start = {"a": jnp.zeros(1000), "b": jnp.zeros((3, 7))}
    with center_kinds.made(kind, shared.downpour(), start) as center:
        begin, failures = count(center.pull().version), []

        def work(number):
            try:
                name = f"w{number}"
                sessions.join(center, name)
                message = jax.tree.map(lambda x: x + float(number + 1), start)
                version = center.pull().version
                for _ in range(exchanges):
                    answer = sessions.exchange(
                        center, message, anchor_version=version, worker=name
                    )
                    version = answer.version
                    if kind != "shards":  # each shard has its own versions
                        for leaf in jax.tree.leaves(answer.params):
                            assert np.min(leaf) == np.max(leaf)
                sessions.leave(center, name)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        total = exchanges * workers * (workers + 1) / 2
        end = center.pull()
        assert count(end.version) == begin + workers * exchanges
        for leaf in jax.tree.leaves(end.params):
            np.testing.assert_array_equal(leaf, -total)


def test_barrier_lets_workers_start_together(kind, monkeypatch):
    # Otherwise a busy center may keep their names.
    tuning.set_farewell_patience(monkeypatch, 20.0)
    with center_kinds.made(kind, shared.downpour(), barrier=2) as center:
        names, started = ("anna", "bert"), []
        workers = {
            name: agn_optax.Worker(center, shared.sgd(0.1), period=1, name=name)
            for name in names
        }
        with pytest.raises(errors.CenterError, match="2 workers"):
            workers["anna"].start(tree(), chief=True, timeout=0.2)

        def start(name):
            workers[name].start(tree(), chief=name == "anna", timeout=60)
            started.append(name)

        threads = [threading.Thread(target=start, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(started) == ["anna", "bert"]


def test_overlap_keeps_progress_made_while_a_message_is_in_flight(kind):
    """With linear losses, no progress is lost or repeated."""
    start = {"w": jnp.zeros(5), "v": jnp.zeros((4, 2))}
    with center_kinds.made(kind, shared.downpour(), start) as center:
        worker = agn_optax.Worker(
            center, shared.sgd(1.0), period=2, name="anna", overlap=True
        )
        params, state = worker.start()
        local = jax.jit(worker.tx.update)
        for _ in range(11):
            updates, state = local(jax.tree.map(jnp.ones_like, params), state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        params, state = worker.flush(params, state)
        for leaf in jax.tree.leaves((params, center.pull().params)):
            np.testing.assert_array_equal(leaf, -11.0)
        worker.leave()


def test_worker_that_leaves_while_computing_a_message_stays_away(kind):
    start = {"w": jnp.zeros(5), "v": jnp.zeros((4, 2))}
    with center_kinds.made(kind, shared.downpour(), start) as center:
        worker = agn_optax.Worker(
            center, shared.sgd(1.0), period=1, name="anna", overlap=True
        )
        loop = worker.start()
        for _ in range(2):
            loop = worker.flush(*worker.exchange(*loop))
        version = center.pull().version
        with held() as hold:
            worker.exchange(jax.tree.map(hold, loop[0]), loop[1])
            message = sessions.fragment(worker).message
            worker.leave()
        concurrent.futures.wait([message.flight])
        assert center.pull().version == version
        if kind == "local":
            assert not center.workers


@pytest.mark.parametrize("shards", [1, 2])
def test_connection_is_closed_at_the_end_of_its_block(shards):
    rule = shared.downpour()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(service.serve(rule)) for _ in range(shards)]
        with service.connect([server.address for server in servers], rule) as center:
            center.initialize({"w": jnp.ones((4, 2))}, worker="")
        with pytest.raises(errors.CenterClosedError):
            center.pull()
