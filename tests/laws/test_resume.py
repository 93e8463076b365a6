"""Law 9: stop, save, restore, go on = never stopped, bit for bit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1 as ocp
from support import DROP_INS, RULES, assert_identical, feeds, run, run_worker, tree

import agn_optax

STOPS = [3, 5]  # at the end of a round, and within one


def part(targets, start, stop):
    return jax.tree.map(lambda f: f[start:stop], targets)


def through_orbax(path, saved):
    # Orbax writes no empty arrays; they have nothing to lose.
    leaves, structure = jax.tree.flatten(saved)
    full = {str(i): x for i, x in enumerate(leaves) if jnp.size(x)}
    ocp.save(path, full)
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        full,
    )
    back = ocp.load(path, abstract)
    return structure.unflatten([back.get(str(i), x) for i, x in enumerate(leaves)])


@pytest.mark.parametrize("name", DROP_INS)
@pytest.mark.parametrize("stop", STOPS)
def test_drop_in(name, stop, tmp_path):
    params = tree()
    targets = feeds(params, 8)
    make = lambda: DROP_INS[name](optax.adam(0.05), 3)  # noqa: E731
    _, expected, expected_state = run(make(), params, targets)
    _, params, state = run(make(), params, part(targets, 0, stop))
    params, state = through_orbax(tmp_path / "checkpoint", (params, state))
    _, params, state = run(make(), params, part(targets, stop, 8), state)
    assert_identical((params, state), (expected, expected_state))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stop", STOPS)
def test_worker_and_center(rule, stop, tmp_path):
    first = tree()
    targets = feeds(first, 8)

    def begin():
        center = agn_optax.LocalCenter(RULES[rule](), first)
        return center, agn_optax.Worker(center, optax.adam(0.05), period=3)

    center, worker = begin()
    expected = run_worker(worker, *worker.start(), targets)
    expected_center = center.save()

    center, worker = begin()
    loop = run_worker(worker, *worker.start(), part(targets, 0, stop))
    saved = {"center": center.save(), "worker": worker.save(*loop)}
    saved = through_orbax(tmp_path / "checkpoint", saved)

    center = agn_optax.LocalCenter.restore(RULES[rule](), saved["center"])
    worker = agn_optax.Worker(center, optax.adam(0.05), period=3)
    loop = worker.restore(saved["worker"])
    assert worker.exchanges == stop // 3
    loop = run_worker(worker, *loop, part(targets, stop, 8))
    assert_identical(loop, expected)
    assert_identical(center.save(), expected_center)
