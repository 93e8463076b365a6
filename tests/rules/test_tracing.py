"""Analysis of traced programs: which center optimizers can run on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import agn_optax
from agn_optax import errors
from agn_optax._internal import tracing
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


def cumulative_row_sums(x):
    """Return the running sum of the rows, computed in a scan."""
    return jax.lax.scan(lambda total, row: (total + row, total + row), x[0] * 0, x)[1]


ALLOWED = {
    "every second message": optax.MultiSteps(  # a cond
        optax.adam(0.1), 2
    ).gradient_transformation(),
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
}
REFUSED = {
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
    "a callback": on_each_leaf(lambda x: jax.pure_callback(lambda y: y, x, x)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_leafwise_optimizer_is_accepted_on_shards(name):
    assert not rejection(ALLOWED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_mixes_leaves_or_rows_is_rejected_on_shards(name):
    assert "a center in shards and a rule" in rejection(REFUSED[name])


def test_sharded_center_rejects_optimizer_that_counts_leaves():
    """Each shard would be moved by the number of its own leaves."""
    rule = agn_optax.rules.agn(REFUSED["the number of leaves"])
    center = ShardedCenter([agn_optax.LocalCenter(rule) for _ in range(2)])
    with pytest.raises(errors.InvalidArgumentError, match="or their number"):
        center.initialize(PARAMS, worker="anna")


def test_equal_expressions_are_equal_values():
    """The shapes, and how the program is cut into functions, make no difference."""

    def one(x):
        return jnp.where(x > 0, x * 2.0, x)

    def other(x):
        return jax.jit(lambda y: jnp.where(y > 0, y * 2.0, y))(x)

    def third(x):
        return jnp.where(x > 0, x * 3.0, x)

    (first,) = tracing.read(one, jnp.ones(3)).made.values()
    assert [first] == [*tracing.read(other, jnp.ones((5, 2))).made.values()]
    assert [first] != [*tracing.read(third, jnp.ones(3)).made.values()]


def test_each_result_lists_the_leaves_it_depends_on():
    def act(tree):
        a, b, c = tree
        chosen = jax.lax.cond(c > 0, lambda: (a, b), lambda: (a * 2, -b))
        return (*chosen, jnp.sum(a), jax.lax.fori_loop(0, 2, lambda _, x: x + b, a))

    reading = tracing.read(act, (jnp.ones(3), jnp.ones(3), jnp.ones(())))
    leaves = [set(value.leaves) for value in reading.made.values()]
    assert leaves == [{0, 2}, {1, 2}, {0}, {0, 1}]
    assert [operation.primitive.name for operation, _ in reading.across] == [
        "reduce_sum"
    ]


def test_array_constants_distinguish_expressions():
    def times(values):
        return lambda x: x * jnp.asarray(values)

    first, again, other = (
        tracing.read(times(np.array(values)), jnp.ones(2)).made[""]
        for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0])
    )
    assert first == again != other


def test_log_reports_skipped_optimization_of_masked_optimizer(caplog):
    mask = {"a": True, "b": False, "c": True}
    rule = agn_optax.rules.agn(optax.masked(optax.adam(0.1), mask))
    abstract = jax.eval_shape(lambda: PARAMS)
    parts = (jnp.ones(24), jnp.ones(4))
    with caplog.at_level("DEBUG", "agn_optax"):
        assert not _elementwise.is_uniform(rule, abstract, parts)
    (record,) = caplog.records
    assert record.message.startswith("not done: the center of rule 'agn' in two")
