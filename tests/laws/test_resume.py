"""Law 9: a run restored from a checkpoint continues bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import shared
from helpers.support import (
    DROP_INS,
    RULES,
    assert_identical,
    at,
    feeds,
    run_worker,
    step,
    tree,
)
from orbax.checkpoint import v1 as ocp

import agn_optax

STOPS = [3, 5]  # at the end of a round, and within one


def part(targets, start, stop):
    return jax.tree.map(lambda f: f[start:stop], targets)


def through_orbax(path, saved):
    # Orbax writes no empty arrays; they are taken from the original.
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
    restored = ocp.load(path, abstract)
    return structure.unflatten([restored.get(str(i), x) for i, x in enumerate(leaves)])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DROP_INS)
def test_restored_drop_in_continues_bit_for_bit(name, tmp_path):
    first = tree()
    targets = feeds(first, 8)
    local = jax.jit(functools.partial(step, DROP_INS[name](shared.adam(0.05), 3)))

    def go_on(loop, steps, save_at=()):
        saved = {}
        for i in steps:
            loop = local(*loop, at(targets, i))
            if i + 1 in save_at:
                saved[i + 1] = through_orbax(tmp_path / f"after {i + 1}", loop)
        return loop, saved

    begin = (first, DROP_INS[name](shared.adam(0.05), 3).init(first))
    expected, _ = go_on(begin, range(8))
    _, saved = go_on(begin, range(max(STOPS)), STOPS)
    for stop, loop in saved.items():
        assert_identical(go_on(loop, range(stop, 8))[0], expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES)
def test_restored_worker_and_center_continue_bit_for_bit(rule, tmp_path):
    first = tree()
    targets = feeds(first, 8)

    def begin():
        center = agn_optax.LocalCenter(RULES[rule](), first)
        return center, agn_optax.Worker(center, shared.adam(0.05), period=3)

    center, worker = begin()
    expected = run_worker(worker, *worker.start(), targets)
    expected_center = center.save()

    center, worker = begin()
    loop, saved = worker.start(), {}
    for start, stop in zip([0, *STOPS], STOPS, strict=False):
        loop = run_worker(worker, *loop, part(targets, start, stop))
        both = {"center": center.save(), "worker": worker.save(*loop)}
        saved[stop] = through_orbax(tmp_path / f"after {stop}", both)

    for stop, both in saved.items():
        center = agn_optax.LocalCenter.restore(RULES[rule](), both["center"])
        worker = agn_optax.Worker(center, shared.adam(0.05), period=3)
        loop = worker.restore(both["worker"])
        assert worker.exchanges == stop // 3
        loop = run_worker(worker, *loop, part(targets, stop, 8))
        assert_identical(loop, expected)
        assert_identical(center.save(), expected_center)
