"""Rounds with robust aggregation: the same numbers in every placement."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leaf_groups, shared
from helpers.support import assert_close, assert_identical
from helpers.traffic import traffic

import agn_optax
from agn_optax import codecs, errors, robust, rules
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Journal,
    ShardedCenter,
    Submission,
    Synchronous,
)

WORKERS, PERIOD, ROUNDS = 8, 2, 2
INNER = shared.sgd(0.25)
COMBINATIONS = {
    "median": robust.median(),
    "krum": robust.krum(2),
    "multi-krum": robust.krum(1, keep=3),
    "radial": robust.radial(),
}


@functools.cache
def rule(name, base="average", codec=None):
    made = {
        "average": lambda: rules.average(codec=codec),
        "agn": lambda: rules.agn(optax.sgd(0.5, momentum=0.5), codec=codec),
        "easgd": lambda: rules.easgd(0.5, codec=codec),
    }[base]()
    return dataclasses.replace(made, combine=COMBINATIONS[name])


PARAMS = {"w": jnp.ones((3, 7)), "b": jnp.zeros(5), "s": jnp.zeros(()), "none": None}


def gradients(seed=1):
    rng = np.random.default_rng(seed)
    shape = (ROUNDS * PERIOD, WORKERS)
    return jax.tree.map(
        lambda x: (rng.integers(-300, 301, (*shape, *x.shape)) / 128).astype(x.dtype),
        PARAMS,
    )


GRADS = gradients()


def mesh_program(made, workers=WORKERS, towers=1, shard_axis=None):
    """Return the towers, their step on gradients of each worker, and an init."""
    mesh = agn_optax.Towers(workers * towers, workers=workers)
    tx = agn_optax.exchange_every(
        INNER,
        made,
        PERIOD,
        axis_name="workers",
        placement=agn_optax.Placement(shard_axis=shard_axis),
    )
    # All towers of a worker have the same gradients.
    chain = optax.chain(agn_optax.all_reduce("towers"), tx)

    def step(state, grads):
        params, opt_state = state
        grads = jax.tree.map(lambda g: g[0], grads)
        updates, opt_state = chain.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def begin():
        return mesh.create(lambda p: (p, chain.init(p)), PARAMS)

    return mesh, mesh.step(step), begin


def over_mesh(made, grads=GRADS, towers=1, shard_axis=None):
    mesh, step, begin = mesh_program(made, grads_workers(grads), towers, shard_axis)
    state = begin()
    for i in range(ROUNDS * PERIOD):
        each = jax.tree.map(lambda g: np.repeat(g[i], towers, axis=0), grads)  # noqa: B023
        state, _ = step(state, each)
    assert mesh.towers_agree(state)
    return mesh.center_params(state[1])


def grads_workers(grads):
    return jax.tree.leaves(grads)[0].shape[1]


def over_vmap(made, grads=GRADS, weights=None, **options):
    tx = agn_optax.exchange_every(INNER, made, PERIOD, axis_name="workers", **options)

    def run(params, grads, given):
        def body(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params, **given)
            return (optax.apply_updates(params, updates), state), ()

        (_, state), _ = jax.lax.scan(body, (params, tx.init(params)), grads)
        return agn_optax.center_params(state)

    run = jax.jit(jax.vmap(run, in_axes=(None, 1, 0), axis_name="workers"))
    given = {} if weights is None else {"weight": weights}
    return jax.tree.map(lambda c: c[0], run(PARAMS, grads, given))


def train(worker, grads, weight=None):
    params, state = worker.start()
    step = local_step(worker.tx)
    for i in range(ROUNDS * PERIOD):
        params, state = step(params, state, jax.tree.map(lambda g: g[i], grads))  # noqa: B023
        params, state = worker.exchange(params, state, weight=weight)


@functools.lru_cache(maxsize=32)
def local_step(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def embedded(made, grads=GRADS, weights=()):
    count = grads_workers(grads)
    center = agn_optax.LocalCenter(made, PARAMS, mode=Synchronous(), barrier=count)
    workers = [
        agn_optax.Worker(center, INNER, period=PERIOD, name=f"worker-{i}")
        for i in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        of_workers = [jax.tree.map(lambda g, i=i: g[:, i], grads) for i in range(count)]
        # The weight of a round is the sum of those of its steps.
        each = [weight / PERIOD for weight in weights] or [None] * count
        list(threads.map(train, workers, of_workers, each))
    return center.pull().params


@functools.cache
def at_a_center(name, base):
    return embedded(rule(name, base))


PLACES = {
    "vmap": over_vmap,
    "mesh": over_mesh,
    "in shards": functools.partial(over_mesh, shard_axis="workers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "base"),
    [
        *((name, "average") for name in COMBINATIONS),
        ("median", "agn"),
        ("krum", "easgd"),
    ],
)
def test_mesh_equals_a_synchronous_center(place, name, base):
    found = PLACES[place](rule(name, base))
    assert_close(found, at_a_center(name, base), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shard_axis", ["towers", ("towers", "workers"), "workers"])
@pytest.mark.parametrize("name", ["median", "krum"])
def test_workers_of_two_towers_equal_a_synchronous_center(name, shard_axis):
    """Four workers of two towers: shards within a worker, across workers, and both."""
    combine = robust.krum(1) if name == "krum" else COMBINATIONS[name]
    if name == "krum":
        combine = dataclasses.replace(combine, function=least_distance)
    made = dataclasses.replace(rules.average(), combine=combine)
    grads = jax.tree.map(lambda g: g[:, :4], GRADS)
    found = over_mesh(made, grads, towers=2, shard_axis=shard_axis)
    assert_close(found, embedded(made, grads), tolerance=1e-6)


def least_distance(messages, total):
    """Return the message nearest to the others: Krum for any number of messages."""

    def squares(m):
        differences = jnp.square(m[:, None] - m[None]).reshape(len(m), len(m), -1)
        return differences.sum(axis=2)

    best = jnp.argmin(total(jax.tree.map(squares, messages)).sum(axis=1))
    return jax.tree.map(lambda m: m[best], messages)


@pytest.mark.parametrize(
    "name", ["median", pytest.param("krum", marks=pytest.mark.slow)]
)
def test_encoded_messages_are_combined_equally_in_every_placement(name):
    codec = codecs.error_feedback(codecs.quantize(4, block=5))
    made = rule(name, "average", codec)
    expected = embedded(made)
    assert_close(over_mesh(made), expected, tolerance=1e-6)
    cast = rule(name, "average", codecs.cast("bfloat16"))
    expected = embedded(cast)
    assert_close(over_mesh(cast, shard_axis="workers"), expected, tolerance=1e-6)


@pytest.mark.parametrize("codec", [None, codecs.cast("bfloat16")])
@pytest.mark.few(1)
def test_messages_of_decoupled_diloco_count_by_tokens_in_every_placement(codec):
    made = rules.decoupled_diloco(optax.sgd(1.0), codec=codec)
    weights = [1.0, 2.0, 5.0, 3.0, 1.0, 8.0, 2.0, 4.0]
    found = over_vmap(made, weights=jnp.array(weights))
    assert_close(found, embedded(made, weights=weights), tolerance=2e-6)
    alike = embedded(made)
    assert float(jnp.abs(found["w"] - alike["w"]).max()) > 0.01
    assert_close(over_vmap(made), alike, tolerance=2e-6)


def test_exchange_of_decoupled_diloco_without_local_steps_changes_nothing():
    split = agn_optax.phases(INNER, rules.decoupled_diloco(optax.sgd(1.0)))
    params, _ = split.exchange(PARAMS, split.init(PARAMS))
    assert_identical(params, PARAMS)


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_center_names_a_rule_that_makes_an_invalid_weight(weight):
    made = dataclasses.replace(
        rules.average(), name="own", weight=lambda given, steps: weight
    )
    center = agn_optax.LocalCenter(made, PARAMS, mode=Synchronous())
    worker = agn_optax.Worker(center, INNER, period=1)
    params, state = worker.start()
    with pytest.raises(errors.InvalidArgumentError, match=r"weight of rule 'own'.*got"):
        worker.exchange(params, state)
    assert_identical(center.pull().params, PARAMS)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_leaf_without_elements_is_combined_on_a_mesh(name):
    mesh = agn_optax.Towers(WORKERS, workers=WORKERS)
    split = agn_optax.phases(INNER, rule(name), axis_name="workers")
    params = {"empty": jnp.zeros((0, 3)), "w": jnp.ones(2)}
    state = mesh.create(lambda p: (p, split.init(p)), params)
    moved, _ = mesh.apply(lambda s: split.exchange(*s))(state)
    assert_identical(mesh.unreplicate(moved), params)


@pytest.mark.parametrize("bad", [np.nan, 1e20, -np.inf])
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if name != "radial"])
@pytest.mark.few(1)
def test_one_arbitrary_worker_keeps_the_center_in_the_range_of_others(name, bad):
    grads = jax.tree.map(lambda g: g[:PERIOD], GRADS)
    ends = jax.tree.map(lambda p, g: p - 0.25 * g.sum(axis=0), PARAMS, grads)
    attacked = jax.tree.map(lambda g: g.copy(), GRADS)
    for leaf in jax.tree.leaves(attacked):
        leaf[0, 3] = bad
    center = first_round(rule(name), attacked)
    for found, x in zip(jax.tree.leaves(center), jax.tree.leaves(ends), strict=True):
        others = np.delete(np.asarray(x), 3, axis=0)
        assert (found >= others.min(axis=0) - 1e-6).all()
        assert (found <= others.max(axis=0) + 1e-6).all()


@functools.cache
def programs(made):
    return mesh_program(made)


def first_round(made, grads):
    mesh, step, begin = programs(made)
    state = begin()
    for i in range(PERIOD):
        state, _ = step(state, jax.tree.map(lambda g: g[i], grads))  # noqa: B023
    return jax.tree.map(np.asarray, mesh.center_params(state[1]))


def test_permuting_the_workers_changes_nothing():
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    permuted = jax.tree.map(lambda g: g[:, order], GRADS)
    for name in ("median", "krum"):
        expected = over_vmap(rule(name))
        assert_close(over_vmap(rule(name), permuted), expected, tolerance=1e-6)


def test_mesh_sends_pieces_by_all_to_all():
    size = 8 * 1000
    for name in ("median", "krum"):
        mesh = agn_optax.Towers(WORKERS, workers=WORKERS)
        split = agn_optax.phases(INNER, rule(name), axis_name="workers")
        ending = mesh.apply(lambda s: split.exchange(*s))  # noqa: B023
        state = mesh.create(lambda p: (p, split.init(p)), jnp.zeros(size))  # noqa: B023
        sent = traffic(ending.lower(state).compile())
        expected = {"all-to-all": 1, "all-gather": 1}
        pieces = 2 * 7 / 8 * 4 * size  # as much as an all-reduce
        if name == "krum":
            expected["all-reduce"] = 1
            pieces += 2 * 7 / 8 * 4 * WORKERS * WORKERS  # distances
        assert sent.kinds == expected
        assert sent.bytes_sent == pieces


def test_krum_uses_the_whole_tree_with_leaf_groups(monkeypatch):
    expected = over_vmap(rule("krum"))
    leaf_groups.allow(monkeypatch)
    again = dataclasses.replace(rule("krum"), name="again")
    assert_close(over_vmap(again), expected, tolerance=1e-6)


@pytest.mark.parametrize("mode", [None, Asynchronous(), BoundedStaleness(versions=2)])
def test_center_without_rounds_rejects_robust_aggregation(mode):
    with pytest.raises(
        errors.InvalidArgumentError, match=r"'average' with median, .* one by one"
    ):
        agn_optax.LocalCenter(rule("median"), PARAMS, mode=mode)


def test_center_without_rounds_rejects_a_rule_with_a_weight():
    rule = dataclasses.replace(rules.average(), weight=lambda weight, steps: steps)
    with pytest.raises(errors.InvalidArgumentError, match="scale_by_weight"):
        agn_optax.LocalCenter(rule, PARAMS)


def test_round_of_too_few_messages_leaves_the_center_unchanged():
    made = dataclasses.replace(rules.average(), combine=robust.krum(1))
    center = agn_optax.LocalCenter(made, jnp.ones(3), mode=Synchronous())
    sessions = [center.join(f"worker-{i}") for i in range(4)]
    for session in sessions:
        session.submit(Submission(1, np.ones(3, "f4"), anchor_version=0))
    for session in sessions:
        with pytest.raises(errors.InvalidArgumentError, match="at least 5 messages"):
            session.collect(1)
    assert center.pull().version == 0
    np.testing.assert_array_equal(center.pull().params, 1.0)
    sessions.append(center.join("worker-4"))
    for session in sessions:  # repeat the exchange in a round that is large enough
        session.submit(Submission(1, np.ones(3, "f4"), anchor_version=0))
    assert sessions[0].collect(1).version == 1
    np.testing.assert_array_equal(center.pull().params, 0.0)


@pytest.mark.parametrize("name", ["median", "krum"])
def test_journal_replays_a_round(name, tmp_path):
    keeps = {"mode": Synchronous(late="weighted"), "durability": Journal(tmp_path)}
    center = agn_optax.LocalCenter(rule(name), jnp.ones(3), **keeps)
    sessions = [center.join(f"worker-{i}") for i in range(WORKERS)]
    rng = np.random.default_rng(0)
    for version in range(2):
        for session in sessions:
            message = rng.normal(size=3).astype("f4")
            session.submit(Submission(version + 1, message, anchor_version=version))
        for session in sessions:
            assert session.collect(version + 1).version == version + 1
            session.acknowledge(version + 1)
    expected = center.pull()
    center.close()
    again = agn_optax.LocalCenter(rule(name), jnp.ones(3), **keeps)
    assert_identical(again.pull(), expected)
    again.close()


def test_mesh_of_too_few_workers_is_rejected():
    grads = jax.tree.map(lambda g: g[:, :4], GRADS)
    with pytest.raises(errors.InvalidArgumentError, match="7 messages, got 4"):
        over_vmap(rule("krum"), grads)


def test_sharded_center_rejects_aggregation_of_whole_messages():
    centers = [
        agn_optax.LocalCenter(rule("krum"), jnp.ones(3), mode=Synchronous())
        for _ in range(2)
    ]
    with pytest.raises(errors.InvalidArgumentError, match=r"krum\(2\): each shard has"):
        ShardedCenter(centers)
    assert ShardedCenter(centers[:1]).rule.combine is rule("krum").combine
    medians = [
        agn_optax.LocalCenter(rule("median"), jnp.ones(3), mode=Synchronous())
        for _ in range(2)
    ]
    assert ShardedCenter(medians).rule.combine is rule("median").combine


def test_fragments_reject_combinations_of_whole_messages():
    message = r"with krum\(2\): a fragment has a part"
    with pytest.raises(errors.InvalidArgumentError, match=message):
        agn_optax.phases(
            INNER,
            rule("krum"),
            axis_name="workers",
            fragments=agn_optax.Fragments(2),
        )


@pytest.mark.slow
def test_all_fragments_at_once_equal_no_fragments_for_median():
    expected = over_vmap(rule("median"))
    found = over_vmap(
        rule("median"), fragments=agn_optax.Fragments(2, offsets=(PERIOD, PERIOD))
    )
    assert_close(found, expected, tolerance=1e-6)
