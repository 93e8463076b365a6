"""Probes of rules: which center optimizers can run on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import agn_optax
from agn_optax import errors
from agn_optax.center import ShardedCenter
from agn_optax.round import _elementwise, _parts

PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.ones(4), "c": jnp.ones((2, 4))}


def on_each_leaf(act):
    return optax.stateless(lambda updates, _: jax.tree.map(act, updates))


def rejection(optimizer, params=PARAMS, shards=2):
    """Return the error raised for an optimizer on shards, or "" for none."""
    parts = jax.eval_shape(_parts.balanced(params, shards).cut, params)
    try:
        _elementwise.check(agn_optax.rules.agn(optimizer), params, parts)
    except errors.InvalidArgumentError as error:
        return str(error)
    return ""


def halves(array):
    return tuple(np.array_split(array, 2))


def cumulative_row_sums(x):
    """Return the running sum of the rows, computed in a scan."""
    return jax.lax.scan(lambda total, row: (total + row, total + row), x[0] * 0, x)[1]


ALLOWED = {
    "every second message": optax.MultiSteps(  # a cond
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "every twelfth message": optax.MultiSteps(
        optax.sgd(0.1, 0.9), 12
    ).gradient_transformation(),
    **{
        name: getattr(optax, name)(0.1)
        for name in ("sgd", "adam", "adamw", "lion", "rmsprop", "adagrad", "adadelta")
    },
    "Nesterov's momentum": optax.sgd(0.7, 0.9, nesterov=True),
    "a loop in a leaf": on_each_leaf(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x)
    ),
    "a loop of unknown length": on_each_leaf(
        lambda x: jax.lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, -s[1]), (0, x)
        )[1]
    ),
    "functions with derivatives of their own": on_each_leaf(jax.nn.silu),
    "one that is computed again": on_each_leaf(jax.checkpoint(jnp.sin)),
    "a callback": on_each_leaf(lambda x: jax.pure_callback(lambda y: y, x, x)),
}
REJECTED = {
    "a check of all numbers": optax.apply_if_finite(optax.sgd(0.1), 3),
    "a large norm of every twelfth message": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(0.1)), 12
    ).gradient_transformation(),
    "a sum row by row": on_each_leaf(cumulative_row_sums),
    "the number of leaves": optax.stateless(
        lambda u, _: jax.tree.map(lambda x: x / len(jax.tree.leaves(u)), u)
    ),
    "the leaf before": optax.stateless(
        lambda u, _: {**u, "c": u["c"] + jnp.broadcast_to(u["b"], (2, 4))}
    ),
    "a loop in which leaves change places": optax.stateless(
        lambda u, _: dict(
            zip(
                u,
                jax.lax.fori_loop(
                    0, 3, lambda _, s: (s[1], s[0], s[2]), (u["a"], u["a"] * 2, u["c"])
                ),
                strict=True,
            )
        )
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_leafwise_optimizer_is_accepted_on_shards(name):
    assert not rejection(ALLOWED[name])


@pytest.mark.parametrize("name", REJECTED)
def test_optimizer_that_mixes_leaves_or_rows_is_rejected_on_shards(name):
    assert "a center in shards and a rule" in rejection(REJECTED[name])


@pytest.mark.parametrize("name", agn_optax.rules.__all__)
def test_rules_of_the_package_run_on_shards_and_leaf_by_leaf(name):
    if name == "Rule":
        return
    settings = {"agn": [optax.adam(0.1)], "easgd": [0.1]}
    rule = getattr(agn_optax.rules, name)(*settings.get(name, ()))
    parts = jax.eval_shape(_parts.balanced(PARAMS, 2).cut, PARAMS)
    _elementwise.check(rule, PARAMS, parts)
    assert _elementwise.is_leafwise(rule, PARAMS)
    assert _elementwise.is_uniform(rule, PARAMS, halves)


def test_rule_with_a_traced_setting_is_probed():
    @jax.jit
    def is_leafwise(rate):
        rule = agn_optax.rules.easgd(rate)
        whole = agn_optax.rules.agn(
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
        )
        assert _elementwise.is_leafwise(rule, PARAMS)
        assert not _elementwise.is_leafwise(whole, PARAMS)
        return rate

    is_leafwise(0.1)


def test_sharded_center_rejects_optimizer_that_counts_leaves():
    """Each shard would be moved by the number of its own leaves."""
    rule = agn_optax.rules.agn(REJECTED["the number of leaves"])
    center = ShardedCenter([agn_optax.LocalCenter(rule) for _ in range(2)])
    with pytest.raises(errors.InvalidArgumentError, match="or their number"):
        center.initialize(PARAMS, worker="anna")


def test_log_reports_skipped_optimization_of_masked_optimizer(caplog):
    mask = {"a": True, "b": False, "c": True}
    rule = agn_optax.rules.agn(optax.masked(optax.adam(0.1), mask))
    with caplog.at_level("DEBUG", "agn_optax"):
        assert not _elementwise.is_uniform(rule, PARAMS, halves)
    (record,) = caplog.records
    assert record.message.startswith("not done: rule 'agn' in parts, because of")
