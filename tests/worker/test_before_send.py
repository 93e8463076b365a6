"""The hook of a worker before its messages are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import shared

import agn_optax
from agn_optax.center import ShardedCenter


def make_worker(center, calls, **settings):
    worker = agn_optax.Worker(center, shared.sgd(1.0), **{"period": 2, **settings})

    def before_send(numbers, params, state):
        calls.append((dict(numbers), center.pull().version))

    worker.before_send = before_send
    return worker


def step(worker, params, state):
    """Make a local step by hand, and call exchange."""
    return worker.exchange(params - 1.0, state)


@pytest.mark.parametrize("overlap", [False, True])
def test_hook_is_called_once_before_each_message(overlap):
    """Earlier messages have been answered then, also those in flight."""
    center, calls = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2)), []
    worker = make_worker(center, calls, overlap=overlap)
    loop = worker.start()
    for _ in range(6):
        loop = step(worker, *loop)
    worker.flush(*loop)
    assert calls == [({0: 1}, 0), ({0: 2}, 1), ({0: 3}, 2)]
    assert worker.exchanges == center.version == 3
    np.testing.assert_array_equal(center.pull().params, -6.0)


def test_nothing_is_sent_if_the_hook_raises():
    steps, calls = [], []
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2))
    worker = make_worker(
        center, calls, callbacks=[lambda _, values: steps.append(values["steps"])]
    )
    record = worker.before_send

    def raises(*message):
        record(*message)
        raise OSError("no space left")

    params, state = step(worker, *worker.start())
    worker.before_send = raises
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            step(worker, params, state)
        assert (center.version, worker.exchanges) == (0, 0)
        worker.save(params, state)  # no message is under way
    worker.before_send = record
    params, state = step(worker, params, state)
    assert calls == [({0: 1}, 0)] * 3
    assert steps == [2]
    np.testing.assert_array_equal(params, -2.0)


def test_worker_is_saved_before_its_message_and_sends_the_same_again():
    """The saved counts are those of the message, and the center applies it once."""
    saved = []
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2))
    worker = make_worker(center, [], name="anna")
    worker.before_send = lambda numbers, *loop: saved.append(
        (list(numbers), jax.tree.map(np.array, worker.save(*loop)), worker.resume_token)
    )
    loop = worker.start()
    for _ in range(2):
        loop = step(worker, *loop)
    assert center.version == 1
    ((parts, state, token),) = saved
    assert state.fragments[0].local_steps == 2
    second = make_worker(center, calls := [], name="anna")
    second.resend(*second.restore(state, resume_token=token), parts)
    assert (center.version, second.exchanges, calls) == (1, 1, [])
    np.testing.assert_array_equal(center.pull().params, -2.0)


@pytest.mark.parametrize("late", [{}, {"delay": 1}], ids=repr)
def test_hook_is_called_once_for_all_messages_of_a_flush(late):
    zeros = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    fragments = agn_optax.Fragments(2, **late)
    center = ShardedCenter(
        [agn_optax.LocalCenter(shared.downpour()) for _ in range(2)],
        fragments=fragments,
    )
    center.initialize(zeros, worker="chief")
    worker = make_worker(center, calls := [], fragments=fragments, period=4)
    params, state = worker.start()
    moved = {name: leaf - 1.0 for name, leaf in params.items()}
    worker.flush(*worker.exchange(moved, state))
    assert calls == [({0: 1, 1: 1}, (0, 0))]
    assert worker.version == (1, 1)
    for leaf in center.pull().params.values():
        np.testing.assert_array_equal(leaf, -1.0)
