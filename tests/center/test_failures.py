"""Failures during an exchange: no message is lost or sent twice."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import RULES, assert_identical, feeds, run_worker, tree

import agn_optax
from agn_optax import errors


@pytest.fixture(params=RULES)
def started(request):
    center = agn_optax.LocalCenter(RULES[request.param](), {"a": jnp.ones(2)})
    worker = agn_optax.Worker(center, shared.adam(0.1), period=1, name="anna")
    params, state = worker.start()
    updates, state = worker.tx.update({"a": jnp.ones(2)}, state, params)
    return center, worker, optax.apply_updates(params, updates), state


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"b": jnp.ones(2)}, errors.TreeMismatchError, r"params has \['b'\]"),
        (
            {"a": jnp.ones((3, 2))},
            errors.TreeMismatchError,
            r"\['a'\] .*\[3, 2\], where",
        ),
        ({"a": jnp.ones(2, jnp.int32)}, errors.TreeMismatchError, "dtype int32"),
        (None, errors.MissingArgumentError, "'anna'.*params=None"),
    ],
)
def test_wrong_params_are_rejected_before_anything_is_sent(
    started, params, error, message
):
    center, worker, right, state = started
    for _ in range(3):
        with pytest.raises(error, match=message):
            worker.exchange(params, state)
    assert center.version == worker.exchanges == 0
    worker.exchange(right, state)
    assert center.version == worker.exchanges == 1


def test_wrong_state_is_rejected_before_anything_is_sent(started):
    center, worker, params, state = started
    other = state._replace(inner_state=shared.sgd(0.1).init(params))
    with pytest.raises(errors.TreeMismatchError, match="state"):
        worker.exchange(params, other)
    assert center.version == 0


@pytest.mark.parametrize("what", ["params", "state"])
def test_donated_arrays_are_rejected_before_anything_is_sent(started, what):
    center, worker, params, state = started
    gone = params if what == "params" else state.inner_state
    kept = jax.tree.map(jnp.copy, (params, state))
    jax.tree.leaves(gone)[-1].delete()
    for _ in range(3):
        with pytest.raises(errors.WorkerStateError, match=rf"{what}.*donated.*'anna'"):
            worker.exchange(params, state)
    assert center.version == worker.exchanges == 0
    worker.exchange(*kept)
    assert center.version == worker.exchanges == 1


def test_interrupted_adoption_is_completed_without_a_second_exchange(
    started, monkeypatch
):
    center, worker, params, state = started
    expected = agn_optax.LocalCenter(center.rule, {"a": jnp.ones(2)})
    sessions.exchange(
        expected,
        sessions.fragment(worker).programs.contribute(
            state, params, {"a": jnp.ones(2)}
        )[0],
        anchor_version=0,
        worker="w",
    )
    programs = sessions.fragment(worker).programs

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(programs, "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.exchange(params, state)
    assert center.version == 1
    worker.exchange(params, state)
    assert center.version == worker.exchanges == 1
    assert_identical(center.pull().params, expected.pull().params)


@pytest.mark.parametrize("optimizer", ["dog", "dowg", "prodigy"])
@pytest.mark.few(1)
def test_center_optimizer_may_keep_the_initial_params(optimizer):
    make = getattr(optax.contrib, optimizer)
    factory = make if optimizer == "prodigy" else lambda: make(learning_rate=1.0)
    center = agn_optax.LocalCenter(shared.agn(factory()), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    run_worker(worker, *worker.start(), feeds(tree(), 3))
    assert center.version == 3
    assert np.isfinite(center.pull().params["scale"])


def test_saved_worker_state_can_be_restored_twice():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.adam(0.1), period=1)
    saved = worker.save(*worker.start())
    first = run_worker(worker, *worker.restore(saved), feeds(tree(), 1))
    again = worker.restore(saved)
    assert_identical(again, (saved.params, saved.state))
    assert_identical(again[0], tree())
    assert int(first[1].inner_state[0].count) == 1  # and the first run has moved on


def test_worker_stays_at_its_center_if_a_restore_cannot_copy():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.adam(0.1), period=1)
    saved = worker.save(*worker.start())
    token = worker.resume_token
    jax.tree.leaves(saved.state.inner_state)[-1].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        worker.restore(saved)
    assert worker.resume_token == token
    assert worker.version == 0


def test_restore_rejects_the_state_of_another_worker():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.adam(0.1), period=1)
    saved = worker.save(*worker.start())
    other = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    with pytest.raises(errors.TreeMismatchError, match=r"saved\.state"):
        other.restore(saved)
    without = (saved.fragments[0]._replace(anchor=None),)
    with pytest.raises(errors.TreeMismatchError, match=r"saved\.anchor"):
        worker.restore(saved._replace(fragments=without))
    with pytest.raises(errors.TreeMismatchError, match=r"saved\.params"):
        worker.restore(saved._replace(params={"b": jnp.ones(2)}))


def test_restore_rejects_a_center_older_than_the_worker():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    saved = worker.save(*run_worker(worker, *worker.start(), feeds(tree(), 3)))
    older = agn_optax.LocalCenter(shared.downpour(), tree())
    again = agn_optax.Worker(older, shared.sgd(0.1), period=1)
    with pytest.raises(errors.WorkerStateError, match=r"seen version 3.*is at 0"):
        again.restore(saved)


def test_failed_start_of_the_chief_leaves_the_center_uninitialized():
    def init(params):
        raise RuntimeError("no memory for this")

    broken = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    center = agn_optax.LocalCenter(shared.downpour())
    worker = agn_optax.Worker(center, broken, period=1)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.start(tree(), chief=True)
    with pytest.raises(errors.NotInitializedError):
        center.pull()


def test_restored_center_has_one_chief():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    again = agn_optax.LocalCenter.restore(center.rule, center.save())
    again.initialize(tree(seed=1), worker="anna")  # returns to the restored parameters
    assert_identical(again.pull().params, tree())
    with pytest.raises(errors.AlreadyInitializedError, match="'anna'"):
        again.initialize(tree(), worker="bert")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"center_state": {}}, errors.TreeMismatchError, "center_state"),
        ({"version": -5}, errors.InvalidArgumentError, "negative, got -5"),
        ({"params": {"w": "x"}}, errors.TreeMismatchError, r"params\['w'\].*'x'"),
    ],
)
def test_restore_rejects_an_invalid_center_state(change, error, message):
    saved = agn_optax.LocalCenter(shared.downpour(), tree()).save()
    with pytest.raises(error, match=message):
        agn_optax.LocalCenter.restore(shared.downpour(), saved._replace(**change))


@pytest.mark.parametrize("version", [None, "0", 0.0])
def test_version_that_is_not_an_int_is_rejected(version):
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    with pytest.raises(errors.InvalidArgumentError, match="anchor_version"):
        sessions.exchange(center, tree(), anchor_version=version, worker="w")
    assert center.version == 0


@pytest.mark.parametrize("after", ["submit", "collect", "acknowledge"])
def test_interrupted_exchange_is_not_applied_twice(after, monkeypatch):
    center = agn_optax.LocalCenter(shared.downpour(), {"a": jnp.ones(2)})
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=1)
    params, state = worker.start()
    real = getattr(sessions.of_worker(worker), after)

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(sessions.of_worker(worker), after, interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.exchange({"a": params["a"] - 1}, state)
    monkeypatch.undo()
    assert center.version == 1
    params, state = worker.exchange(params, state)
    assert center.version == worker.exchanges == 1
    assert_identical(params, {"a": jnp.zeros(2)})
    worker.exchange({"a": params["a"] - 1}, state)
    assert_identical(center.pull().params, {"a": -jnp.ones(2)})


def test_interrupted_wait_is_resumed(monkeypatch):
    center = agn_optax.LocalCenter(
        shared.downpour(), {"a": jnp.ones(2)}, mode=agn_optax.center.Synchronous()
    )
    anna, bert = (
        agn_optax.Worker(center, shared.sgd(1.0), period=1, name=name)
        for name in ("anna", "bert")
    )
    params, state = anna.start()
    bert.start()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        anna.exchange(params, state)
    monkeypatch.undo()
    assert center.version == 0
    bert.leave()  # leaving ends the round
    anna.exchange(params, state)
    assert center.version == anna.exchanges == 1
