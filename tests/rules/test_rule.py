"""The contract of `Rule`: the inputs of each part of a rule and their dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions
from helpers.support import (
    RULES,
    assert_close,
    assert_identical,
    feeds,
    run_split,
    tree,
)

import agn_optax
from agn_optax import codecs, rules
from agn_optax.round import steps as rounds

DTYPES = ["float32", "bfloat16", "float16"]


def optimizer_that_keeps_params():
    """Return an optimizer whose state is the parameter arrays that it is given."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: -u, updates), state

    return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("name", ["agn", "agn_window"])
def test_mean_divides_by_the_number_of_local_steps(name, steps):
    """The round counts the steps; the record may be updated more often."""
    rule = RULES[name]()
    params, anchor = tree(seed=1), tree(seed=2)
    _, record = rule.record.update(params, rule.record.init(params), params)
    made = rule.contribution(record, params, anchor, jnp.int32(steps))
    whole = params
    if name == "agn_window":
        whole = jax.tree.map(jnp.subtract, anchor, params)
    assert_close(made, jax.tree.map(lambda x: x / steps, whole))


@pytest.mark.parametrize("form", ["rule", "drop_in"])
def test_float32_record_of_bfloat16_gradients_is_exact(form):
    params, grads = jnp.zeros(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    steps, settings = 300, {"record_dtype": "float32"}
    if form == "rule":
        tx = agn_optax.phases(optax.sgd(0.0), rules.agn(optax.sgd(1.0), **settings))
    else:
        tx = agn_optax.agn(optax.sgd(0.0), steps + 1, center=optax.sgd(1.0), **settings)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(steps):
        _, state = update(grads, state, params)
    np.testing.assert_array_equal(state.local.record.sum, [300.0] * 3)


def test_record_sums_gradients_without_the_penalty():
    rule = dataclasses.replace(
        rules.agn(optax.sgd(1.0)), penalty=agn_optax.elastic_pull(0.5)
    )
    split = agn_optax.phases(optax.sgd(0.1), rule)
    params, grads = tree(), tree(seed=1)
    state = split.init(tree(seed=2))
    updates, state = split.update(grads, state, params)
    assert_identical(state.local.record.sum, grads)
    pulled = jax.tree.map(
        lambda g, x, c: -0.1 * (g + 0.5 * (x - c)), grads, params, tree(seed=2)
    )
    assert_close(updates, pulled)


def test_diloco_default_center_optimizer_is_that_of_the_paper():
    """Nesterov momentum of 0.9 at a rate of 0.7 on the mean displacement."""
    params = tree()
    split = agn_optax.phases(optax.sgd(0.1), rules.diloco())
    targets = feeds(params, 6)
    _, state = run_split(split, params, targets, 2)

    center = trained = params
    momentum = jax.tree.map(jnp.zeros_like, params)
    for begin in range(0, 6, 2):
        trained = center
        for i in (begin, begin + 1):
            trained = jax.tree.map(
                lambda x, f: x - 0.1 * 0.7 * (x - f[i]),  # noqa: B023
                trained,
                targets,
            )
        moved = jax.tree.map(jnp.subtract, center, trained)
        momentum = jax.tree.map(lambda v, m: 0.9 * v + m, momentum, moved)
        center = jax.tree.map(
            lambda c, v, m: c - 0.7 * (0.9 * v + m), center, momentum, moved
        )
    assert_close(state.center, center)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_anchor_is_stored_only_for_rules_that_need_it(name):
    rule, params = RULES[name](), tree()
    split = agn_optax.phases(optax.sgd(0.1), rule)
    assert (split.init(params).local.anchor is None) == (name != "easgd_rho")
    worker = agn_optax.Worker(
        agn_optax.LocalCenter(rule, params), optax.sgd(0.1), period=1
    )
    _, state = worker.start()
    assert (state.anchor is None) == (name != "easgd_rho")
    # A rule that does not need an anchor is not given one, so that none is stored.
    reads = {"agn": False, "easgd": False}.get(name, True)
    assert rule.needs_anchor == reads


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center_dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_center_optimizer_gets_messages_in_the_center_dtype(name, dtype, center_dtype):
    """This holds on a mesh (decoded before or after the sum) and outside jit."""
    seen = []

    def update(updates, state, params=None, *, staleness, **extra_args):
        seen.append(jax.tree.map(lambda u: u.dtype, (updates, params)))
        assert staleness.dtype == jnp.int32
        return updates, state

    sees = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    rule = dataclasses.replace(RULES[name](), center=sees)
    params, center = tree(dtype), tree(center_dtype)
    for codec in (rule.codec, codecs.cast("bfloat16")):
        sent_so = dataclasses.replace(rule, codec=codec)
        split = agn_optax.phases(optax.sgd(0.1), sent_so, center_dtype=center_dtype)
        jax.eval_shape(split.exchange, params, split.init(params))
        move = functools.partial(rounds.receive, sent_so)
        sent = rounds.contribution_like(sent_so, center, params)
        jax.eval_shape(move, sent, center, optax.EmptyState(), {})
    assert len(seen) == 4
    assert set(jax.tree.leaves(seen)) == {jnp.dtype(center_dtype)}


@pytest.mark.parametrize("place", ["phases", "drop_in", "center"])
def test_optimizers_that_keep_params_get_copies(place):
    """Otherwise donating one array would delete the other."""
    params = {"w": jnp.ones(4), "b": jnp.arange(3.0)}
    rule = rules.agn(optimizer_that_keeps_params())
    if place == "center":
        center = agn_optax.LocalCenter(rule, params)
        store = center.core.store
        state = (store.current.params, store._center_state)
    else:
        make = {
            "phases": agn_optax.phases,
            "drop_in": functools.partial(agn_optax.exchange_every, period=1),
        }[place]
        tx = make(optimizer_that_keeps_params(), rule)
        state = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(set(buffers)) == len(buffers)
    if place == "center":  # the center moves in place
        for version in range(3):
            sessions.exchange(center, params, anchor_version=version, worker="a")
        np.testing.assert_array_equal(center.pull().params["w"], [-2.0] * 4)


@pytest.mark.parametrize("name", ["easgd", "easgd_rho"])
def test_late_elastic_response_pulls_from_the_sent_params(name):
    rule = RULES[name]()  # the rate is 0.3
    now, sent, center = tree(seed=1), tree(seed=2), tree(seed=3)
    expected = jax.tree.map(
        lambda x, s, c: s - 0.3 * (s - c) + (x - s), now, sent, center
    )
    assert_close(rounds.adopt_late(rule, now, sent, center), expected)


@pytest.mark.parametrize("name", ["downpour", "agn_window", "average", "diloco"])
def test_contribution_recovers_bfloat16_params_exactly(name):
    """A worker adopts the rounded anchor; its small parameters show the difference.

    Recovery from the contribution restores bfloat16 parameters to the last bit.
    """
    rule = RULES[name]()
    params = (jnp.arange(1.0, 200.0) / 997).astype(jnp.bfloat16)
    anchor = jnp.float32(3.0) + jnp.arange(1.0, 200.0) / 1013
    for steps in (1, 2, 4):
        sent = rule.contribution((), params, anchor, jnp.int32(steps))
        found = rule.contribution.recover(
            sent, jnp.zeros_like(params), anchor, jnp.int32(steps)
        )
        assert_identical(found, params)


def test_elastic_pull_rounds_once():
    # 1 + 2^-8 is halfway between two bfloat16 numbers; a little more rounds up.
    tx = agn_optax.elastic_pull(1.0)
    updates, params = jnp.ones(1, jnp.bfloat16), jnp.full(1, 2**-8 + 2**-20)
    pulled, _ = tx.update(updates, tx.init(params), params, center=jnp.zeros(1))
    assert pulled.dtype == jnp.bfloat16
    assert float(pulled[0]) == 1 + 2**-7


def momentum(rate, momentum):
    return rules.diloco(optax.sgd(rate, momentum=momentum, nesterov=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("other", "own", "named", "not_named"),
    [
        (
            momentum(0.7, 0.9),
            momentum(0.35, 0.9),
            ["its center optimizer turns test values into [", "and here into ["],
            ["message", ";"],
        ),
        (
            rules.diloco(optax.sgd(0.7, momentum=0.9)),
            rules.diloco(optax.sgd(0.7, momentum=0.5)),
            ["its center optimizer turns test values into ["],
            ["message", ";"],
        ),
        (
            rules.agn(optax.adam(1e-3)),
            rules.agn(optax.sgd(0.1)),
            ["its center optimizer turns test values into ["],
            ["message", ";"],
        ),
        (
            rules.diloco(codec=codecs.quantize(8)),
            rules.diloco(codec=codecs.quantize(4)),
            ["its codec is 'quantize(8", "here it is 'quantize(4"],
            ["encoding", ";"],
        ),
        (
            rules.diloco(optax.sgd(0.2), codec=codecs.quantize(8)),
            rules.diloco(optax.sgd(0.1)),
            ["its codec is 'quantize(8", "; its center optimizer"],
            [],
        ),
        (
            rules.easgd(0.5),
            rules.easgd(0.25),
            ["its adopt turns", "; its center optimizer"],
            [],
        ),
        (rules.downpour(), rules.average(), ["name is 'downpour'"], ["combine", ";"]),
    ],
)
def test_rule_difference_names_the_parts_that_differ(other, own, named, not_named):
    assert rules.difference(rules.fingerprint(own), own) is None
    difference = rules.difference(rules.fingerprint(other), own)
    for words in named:
        assert words in difference, difference
    for words in not_named:
        assert words not in difference, difference
