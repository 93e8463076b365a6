"""Robust aggregation functions: the combined message of a round."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.support import assert_close

from agn_optax import errors, robust, rules

ALL = {
    "median": robust.median(),
    "krum": robust.krum(1),
    "multi-krum": robust.krum(1, keep=3),
}
ARBITRARY = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0]
every = pytest.mark.parametrize("name", ALL)


def messages(count, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return (2.0 + spread * rng.normal(size=(count, *shape))).astype("f4")

    return {"w": leaf(3, 4), "b": leaf(5), "s": leaf(), "none": None, "e": leaf(0, 2)}


def combined(combine, tree):
    return jax.tree.map(
        np.asarray, jax.jit(lambda m: combine.function(m, robust.total_of_leaves))(tree)
    )


def krum_reference(tree, faulty, keep):
    """Compute Krum one message at a time in double precision."""
    rows = np.concatenate(
        [np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(tree)], axis=1
    ).astype("f8")
    scores = []
    for i, row in enumerate(rows):
        squares = sorted(
            np.sum((row - other) ** 2) for j, other in enumerate(rows) if j != i
        )
        scores.append(sum(squares[: len(rows) - faulty - 2]))
    best = np.argsort(scores)[:keep]
    return jax.tree.map(lambda x: x[best].mean(axis=0), tree)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 6, 9, 32, 33])
def test_robust_functions_match_their_equations(count):
    tree = messages(count)
    expected = jax.tree.map(lambda x: np.median(x, axis=0), tree)
    assert_close(combined(robust.median(), tree), expected, tolerance=1e-6)
    assert_close(
        combined(robust.krum(1), tree), krum_reference(tree, 1, 1), tolerance=1e-6
    )
    keep = robust.krum(1, keep=2)
    assert_close(combined(keep, tree), krum_reference(tree, 1, 2), tolerance=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("count", range(1, 18))
def test_in_order_sorts_any_number_of_messages(count):
    values = np.random.default_rng(count).integers(0, 9, (count, 200)).astype("f4")
    found = np.stack(robust._sorted_rows(jnp.asarray(values)))
    np.testing.assert_array_equal(found, np.sort(values, axis=0))


@pytest.mark.few(3)
@pytest.mark.parametrize("bad", ARBITRARY)
@every
def test_one_arbitrary_message_stays_within_the_range_of_others(name, bad):
    for count in (6, 7):
        tree = messages(count, seed=count)
        others = jax.tree.map(lambda x: x[1:], tree)
        attacked = jax.tree.map(lambda x: x.copy(), tree)
        for leaf in jax.tree.leaves(attacked):
            leaf[0] = bad
        made = combined(ALL[name], attacked)
        for found, good in zip(
            jax.tree.leaves(made), jax.tree.leaves(others), strict=True
        ):
            assert (found >= good.min(axis=0, initial=np.inf)).all()
            assert (found <= good.max(axis=0, initial=-np.inf)).all()


def test_krum_rejects_a_message_with_one_bad_leaf():
    tree = messages(5, spread=0.1)
    tree["s"][2] = 50.0
    made = combined(robust.krum(1), tree)
    assert any(np.array_equal(made["w"], tree["w"][i]) for i in (0, 1, 3, 4))


@every
def test_robust_functions_are_close_to_the_mean_without_attack(name):
    tree = messages(25)
    made, means = combined(ALL[name], tree), jax.tree.map(lambda x: x.mean(0), tree)
    # The standard error of 25 normal numbers is 0.2 for the mean, 0.25 for the median;
    # that of one number is 1.
    most = {"krum": 1.5, "multi-krum": 0.8}.get(name, 0.4)
    for found, mean in zip(jax.tree.leaves(made), jax.tree.leaves(means), strict=True):
        assert np.sqrt(np.mean((found - mean) ** 2) if mean.size else 0.0) < most


@pytest.mark.few(1)
@every
def test_robust_functions_ignore_the_order_of_workers(name):
    tree = messages(6)
    made = combined(ALL[name], tree)
    for order in itertools.islice(itertools.permutations(range(6)), 1, 720, 101):
        other = jax.tree.map(lambda x, o=list(order): x[o], tree)
        assert_close(combined(ALL[name], other), made, tolerance=1e-6)


@every
def test_equal_messages_combine_to_that_message(name):
    tree = jax.tree.map(lambda x: np.stack([x[0]] * 6), messages(6))
    expected = jax.tree.map(lambda x: x[0], tree)
    assert_close(combined(ALL[name], tree), expected, tolerance=1e-6)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("krum", 4, r"krum\(1\) needs a round of at least 5 messages, got 4"),
        (
            "multi-krum",
            5,
            r"krum\(1, keep=3\) needs a round of at least 6 messages, got 5",
        ),
    ],
)
def test_too_few_messages_are_rejected(name, count, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        combined(ALL[name], messages(count))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: robust.krum(0), "faulty must be a positive int"),
        (lambda: robust.krum(1, keep=0), "keep must be a positive int"),
        (
            lambda: rules.Rule(
                name="r",
                center=rules.downpour().center,
                contribution=max,
                combine="max",
            ),
            "combine of rule 'r' must be one of .*robust.median",
        ),
    ],
)
def test_invalid_combine_settings_are_rejected(make, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        make()


def test_named_rule_selects_combine():
    made = rules.rule_from_settings({"rule": "average", "combine": "krum"})
    assert str(made.combine) == "krum(1)"
    assert not made.is_summed
    assert rules.rule_from_settings({"rule": "average", "combine": "sum"}).is_summed
    with pytest.raises(errors.InvalidArgumentError, match="combine must be one of sum"):
        rules.rule_from_settings({"rule": "average", "combine": "mode"})
    print_ = rules.fingerprint(made)
    assert rules.difference(print_, rules.average()).startswith(
        "its combine is 'krum(1)', and here it is 'mean'"
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_radial_averages_lengths_and_directions_separately(count):
    tree = messages(count, spread=3.0)

    def of_leaf(rows):
        flat = rows.reshape(count, -1).astype("f8")
        lengths = np.linalg.norm(flat, axis=1)
        direction = (flat / np.maximum(lengths, 1e-300)[:, None]).sum(axis=0)
        size = np.linalg.norm(direction)
        direction = direction / size if size else direction
        return (lengths.mean() * direction).reshape(rows.shape[1:])

    expected = jax.tree.map(of_leaf, tree)
    assert_close(combined(robust.radial(), tree), expected, tolerance=1e-5)
    zeros = jax.tree.map(np.zeros_like, tree)
    found = combined(robust.radial(), zeros)
    assert not any(np.any(x) for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_radial_message_of_twice_the_weight_counts_as_two_messages():
    tree = messages(3, spread=3.0)
    twice = jax.tree.map(lambda x: np.concatenate([x[:1], x]), tree)
    weights = 3 * jnp.array([2.0, 1.0, 1.0]) / 4
    weighted = robust.radial().function(tree, robust.total_of_leaves, weights)
    assert_close(weighted, combined(robust.radial(), twice), tolerance=1e-6)


def test_weight_without_a_weighted_combine_is_rejected():
    for combine in ("sum", robust.median()):
        with pytest.raises(errors.InvalidArgumentError, match="has no effect"):
            dataclasses.replace(rules.decoupled_diloco(), combine=combine)


def test_weight_is_compared_with_the_rule_of_the_center():
    print_ = rules.fingerprint(rules.decoupled_diloco())
    other = dataclasses.replace(rules.decoupled_diloco(), weight=lambda w, steps: w)
    assert rules.difference(print_, other).startswith("its weight turns")
    given = dataclasses.replace(other, weight=lambda w, steps: 1.0 * w)
    by_steps = dataclasses.replace(other, weight=lambda w, steps: w * steps / 2)
    difference = rules.difference(rules.fingerprint(given), by_steps)
    assert difference == ("its weight turns test values into [3], and here into [7.5]")


@jax.jit
@jax.vmap
def radial(messages):
    """Combine all messages at once, as on a mesh or in a synchronous round."""
    return robust.radial().function(messages, robust.total_of_leaves)


def opposite_pairs(shape, dtype, cases=200):
    """Return pairs of messages in opposite directions with different lengths."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(cases, *shape))
    sizes = np.exp(rng.normal(size=(cases, 1, *(1 for _ in shape))))
    return jnp.asarray(np.stack([first, -sizes[:, 0] * first], axis=1), dtype)


def lengths_of(messages):
    return np.linalg.norm(np.float64(messages).reshape(*messages.shape[:2], -1), axis=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (64, 3)])
def test_radial_mean_of_opposite_messages_is_zero(shape, dtype):
    messages = opposite_pairs(shape, dtype)
    made = np.float64(radial(messages)).reshape(len(messages), -1)
    sizes = np.linalg.norm(made, axis=1) / lengths_of(messages).mean(axis=1)
    assert sizes.max() <= 64 * float(jnp.finfo(dtype).eps) / 2


def test_radial_mean_is_continuous_where_directions_cancel():
    """Changing the last bit of the messages changes the radial mean by a few bits."""
    # Pairs of messages of length 1, nearly opposite.
    turn = np.concatenate([[0.0], np.geomspace(1e-8, 0.2, 100)])
    turn = np.concatenate([-turn, turn])
    first = np.broadcast_to([1.0, 0.0], (len(turn), 2))
    second = np.stack([-np.cos(turn), np.sin(turn)], axis=1)
    messages = jnp.asarray(np.stack([first, second], axis=1), jnp.float32)
    made = radial(messages)
    rounded = radial(messages * (1 + jnp.finfo("float32").eps))
    np.testing.assert_allclose(made, rounded, atol=64 * 1.2e-7)
    # The result points along the sum; below an agreement of 1 / 32 it shrinks to 0.
    w = np.float64(messages).sum(axis=1)
    agreement = np.linalg.norm(w, axis=1) / 2
    expected = w / 2 / np.maximum(agreement, 1 / 32)[:, None]
    np.testing.assert_allclose(made, expected, atol=1e-5)


@pytest.mark.slow
def test_robust_functions_keep_float64():
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.asarray(x, "f8"), messages(5))
        for combine in ALL.values():
            if combine is not ALL["multi-krum"]:
                made = combine.function(tree, robust.total_of_leaves)
                assert {x.dtype for x in jax.tree.leaves(made)} == {np.dtype("f8")}
