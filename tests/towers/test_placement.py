"""Sharded centers and centers in host memory equal a plain center."""

import dataclasses
import itertools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, support, tuning
from helpers.support import find_state
from helpers.traffic import traffic

import agn_optax
from agn_optax import errors
from agn_optax.round import OnHost

# The axes to shard over: workers, the towers of a worker, or both.
SHARDS = ["workers", "towers", ("workers", "towers")]


def make(rule, placement=None, period=3, inner=None):
    return optax.chain(
        agn_optax.all_reduce("towers"),
        agn_optax.exchange_every(
            optax.adam(0.05) if inner is None else inner,
            rule,
            period,
            axis_name="workers",
            placement=placement,
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", support.RULES)
def test_sharded_center_gives_the_same_numbers(rule):
    """Every rule is sharded over all axes; three rules over single axes, too."""
    # With three towers for each of two workers, no leaf divides evenly, and small
    # leaves stay whole.
    towers = agn_optax.Towers(6, workers=2)
    data = problem.batches(6, rows=12)
    (params, state), _ = problem.train(
        towers, make(support.RULES[rule]()), data, problem.params()
    )
    every = rule in ("agn", "diloco", "easgd_rho")
    for axes in SHARDS if every else SHARDS[-1:]:
        placement = agn_optax.Placement(shard_axis=axes)
        tx = make(support.RULES[rule](), placement)
        (own, own_state), _ = problem.train(towers, tx, data, problem.params())
        support.assert_close(own, params)
        support.assert_close(
            towers.center_params(own_state), towers.center_params(state)
        )
        assert towers.towers_agree((own, own_state))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", support.DROP_INS)
def test_drop_in_accepts_a_placement(name):
    towers, params = agn_optax.Towers(2), {"w": jnp.zeros((4, 3))}
    placement = agn_optax.Placement(shard_axis="towers")
    tx = support.DROP_INS[name](optax.sgd(0.1), 2, placement=placement)
    state = towers.create(tx.init, params)
    assert state.center.pieces["w"].shape == (2, 1, 6)  # one row for each tower
    support.assert_identical(towers.center_params(state), params)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "memory"),
    [
        *((axes, "device") for axes in SHARDS),
        pytest.param(None, "host", marks=support.needs_host),
    ],
)
def test_penalty_reads_the_whole_anchor(axes, memory):
    """It reads it at every step, though no tower has a whole center on its device."""
    rule = dataclasses.replace(
        agn_optax.rules.downpour(), penalty=agn_optax.elastic_pull(0.3)
    )
    towers = agn_optax.Towers(4, workers=2)
    data = problem.batches(5)
    inner = optax.sgd(0.1)
    expected, _ = problem.train(towers, make(rule, inner=inner), data, problem.params())
    tx = make(rule, agn_optax.Placement(shard_axis=axes, memory=memory), inner=inner)
    found, _ = problem.train(towers, tx, data, problem.params())
    support.assert_close(found[0], expected[0])


@support.needs_host
@pytest.mark.parametrize("axes", [None, "towers"])
def test_center_in_host_memory_gives_the_same_numbers(axes):
    towers = agn_optax.Towers(4, workers=2)
    data = problem.batches(6)
    rule = agn_optax.rules.diloco()
    inner = optax.sgd(0.1)
    plain = make(rule, inner=inner)
    (params, state), _ = problem.train(towers, plain, data, problem.params())
    placement = agn_optax.Placement(shard_axis=axes, memory="host")
    tx = make(rule, placement, inner=inner)
    (own, own_state), _ = problem.train(towers, tx, data, problem.params())
    support.assert_close(own, params)
    support.assert_close(towers.center_params(own_state), towers.center_params(state))
    held = find_state(own_state)
    for leaf in jax.tree.leaves((held.center, held.center_state)):
        assert leaf.sharding.memory_kind == "pinned_host"
    for leaf in jax.tree.leaves(held.local):
        assert leaf.sharding.memory_kind == "device"
    # It stays in host memory when it is saved and restored.
    restored = towers.replicate(towers.unreplicate(own_state))
    support.assert_identical(restored, own_state)
    for leaf in jax.tree.leaves(find_state(restored).center):
        assert leaf.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("memory", support.MEMORIES)
def test_placement_works_on_one_device_without_a_mesh(memory):
    """A drop-in optimizer trains, and center_params works outside of jit."""
    placement = agn_optax.Placement(memory=memory)
    rule = agn_optax.rules.agn(optax.adam(0.05))
    params, data = support.tree(), support.feeds(support.tree(), 6)
    tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 3, placement=placement)
    _, _, state = support.run(tx, params, data)
    plain = agn_optax.exchange_every(optax.sgd(0.1), rule, 3)
    expected = agn_optax.center_params(support.run(plain, params, data)[2])
    center = agn_optax.center_params(state)
    support.assert_close(center, expected)
    assert center["scale"] + 1 == center["scale"] + 1  # the result is on the device


@support.needs_host
@pytest.mark.slow
def test_one_device_may_donate_a_center_on_the_host():
    """It runs in its own process, because JAX aborts on failure."""
    program = pathlib.Path(__file__).with_name("donating_program.py")
    ended = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@support.needs_host
@pytest.mark.parametrize("inner", support.INNERS)
def test_host_leaves_differ_from_device_leaves_in_shape_or_dtype(inner):
    """JAX pairs donated buffers with outputs by shape and dtype alone."""
    weighed = optax.chain(agn_optax.scale_by_weight(), support.INNERS[inner]())
    tx = agn_optax.phases(
        support.INNERS[inner](),
        agn_optax.rules.agn(weighed),
        placement=agn_optax.Placement(memory="host"),
    )
    params = support.tree()
    state = tx.init(params)
    kept = (state.center, state.center_state)
    others = (params, state._replace(center=None, center_state=None))
    kinds = [
        {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)}
        for tree in (kept, others)
    ]
    assert all(kinds)
    assert kinds[0].isdisjoint(kinds[1])


def test_each_tower_holds_only_its_part_of_the_center():
    towers = agn_optax.Towers(8)
    params = {"w": jnp.zeros((80, 100))}
    rule = agn_optax.rules.agn(optax.adam(0.1))

    def held(placement):
        tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 10, placement=placement)
        state = towers.create(tx.init, params)
        own = (state.center, state.center_state, state.local.record)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(own)) / 8

    whole = held(agn_optax.Placement())
    sharded = held(agn_optax.Placement(shard_axis="towers"))
    assert whole > 4 * 4 * 8000  # center, two moments, record
    assert sharded < whole / 8 + 64


@pytest.mark.parametrize("rule", ["agn", "average"])
def test_sharded_exchange_sends_no_more_than_an_all_reduce(rule):
    """It sends as much as an all-reduce, and one all-gather more for an anchor."""
    towers = agn_optax.Towers(workers=8)
    params = {"w": jnp.zeros(8000)}

    def sent(axes):
        tx = agn_optax.phases(
            optax.sgd(0.1),
            support.RULES[rule](),
            axis_name="workers",
            placement=agn_optax.Placement(shard_axis=axes),
        )
        state = towers.create(lambda p: (p, tx.init(p)), params)
        exchange = towers.step(lambda state, _: (tx.exchange(*state), 0))
        batch = towers.shard(np.zeros(8))
        return traffic(exchange.lower(state, batch).compile())

    whole, sharded = sent(None), sent("workers")
    assert whole.kinds == {"all-reduce": 1}
    gathers = 1 if rule == "agn" else 2
    assert sharded.kinds == {"reduce-scatter": 1, "all-gather": gathers}
    assert whole.bytes_sent == 2 * 7 * 4000
    assert sharded.bytes_sent == (1 + gathers) * 7 * 4000


@pytest.mark.parametrize("workers", [1, 2])
def test_restored_shards_continue_as_before(workers):
    towers = agn_optax.Towers(4, workers=workers)
    placement = agn_optax.Placement(shard_axis=("workers", "towers"))
    # At the end of a round, workers differ only in their inner state, of which the
    # first worker's is saved; sgd has none.
    tx = make(support.RULES["diloco"](), placement, inner=optax.sgd(0.1))
    step = towers.step(problem.train_step(tx))
    data = problem.batches(6)
    through, _ = problem.train(towers, tx, data, problem.params(), step)
    stopped, _ = problem.train(towers, tx, data[:3], problem.params(), step)
    pieces = jax.tree.map(np.asarray, find_state(stopped).center.pieces)
    saved = jax.tree.map(np.asarray, towers.unreplicate(stopped))
    elements = sum(x.size for x in jax.tree.leaves(find_state(saved).center.pieces))
    whole = sum(x.size for x in jax.tree.leaves(problem.params()))
    assert elements < whole + 4 * 4  # each piece is saved once; some pieces are padded
    state = towers.replicate(saved)
    support.assert_identical(find_state(state).center.pieces, pieces)
    for batch in data[3:]:
        state, _ = step(state, towers.shard(batch))
    if workers == 1:
        support.assert_identical(state, through)
    else:
        # A worker adopts the center by adding an update to its parameters, so other
        # workers may differ from the first in the last bit.
        support.assert_close(state, through, tolerance=1e-6)


REJECTED = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "scale_by_trust_ratio": optax.lamb(0.1),
    "scale_by_factored_rms": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "scale_by_muon": optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("name", REJECTED)
def test_optimizer_that_is_not_elementwise_is_rejected(name):
    towers = agn_optax.Towers(2)
    for placement in (None, agn_optax.Placement(shard_axis="towers")):
        tx = agn_optax.exchange_every(
            optax.sgd(0.1), agn_optax.rules.agn(REJECTED[name]), 3, placement=placement
        )
        params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
        if placement is None:
            towers.create(tx.init, params)
            continue
        with pytest.raises(
            errors.InvalidArgumentError, match="rule 'agn', whose center optimizer"
        ):
            towers.create(tx.init, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "center",
    [
        agn_optax.elementwise(
            optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
        ),
        optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True),
        agn_optax.by_local_steps(optax.sgd(optax.linear_schedule(0.1, 0.0, 6))),
        optax.chain(optax.clip(1.0), optax.rmsprop(0.1)),
        optax.lion(0.1),
    ],
)
def test_elementwise_optimizers_are_accepted(center):
    towers = agn_optax.Towers(4)
    data, rule = problem.batches(2), agn_optax.rules.agn(center)
    params = []
    for axes in (None, "towers"):
        placement = agn_optax.Placement(shard_axis=axes)
        tx = make(rule, placement, period=2, inner=optax.sgd(0.1))
        params.append(problem.train(towers, tx, data, problem.params())[0][0])
    support.assert_close(*params)


def test_optimizer_that_depends_on_leaf_shapes_is_rejected():
    def by_shape(updates, params):
        del params
        return jax.tree.map(lambda u: -u if u.shape[0] > 2 else u * 0.5, updates)

    rule = agn_optax.rules.agn(optax.stateless(by_shape))
    placement = agn_optax.Placement(shard_axis="towers")
    tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 3, placement=placement)
    with pytest.raises(errors.InvalidArgumentError, match=r"agn_optax\.elementwise"):
        agn_optax.Towers(4).create(tx.init, {"w": jnp.ones((8, 8))})


def test_host_memory_is_rejected_if_jax_does_not_support_it(monkeypatch):
    tuning.set_host_support(monkeypatch, is_there=False)
    placement = agn_optax.Placement(memory="host")
    tx = agn_optax.phases(
        optax.sgd(0.1), agn_optax.rules.average(), placement=placement
    )
    with pytest.raises(errors.InvalidArgumentError, match="needs a newer JAX"):
        tx.init(jnp.ones(3))


def test_invalid_placements_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="'device' or 'host'"):
        agn_optax.Placement(memory="disk")
    rule = agn_optax.rules.average()
    with pytest.raises(errors.InvalidTypeError, match="placement must be"):
        agn_optax.phases(optax.sgd(0.1), rule, placement="towers")
    sharded = agn_optax.Placement(shard_axis="towers")
    tx = agn_optax.phases(optax.sgd(0.1), rule, placement=sharded)
    with pytest.raises(errors.UnboundAxisError):
        tx.init(jnp.ones(16))
    towers = agn_optax.Towers(4)
    state = towers.create(tx.init, jnp.ones(16))
    with pytest.raises(errors.UnboundAxisError, match=r"towers\.center_params"):
        agn_optax.center_params(state)
    whole = agn_optax.phases(optax.sgd(0.1), rule)
    for one, other in itertools.permutations((tx, whole)):
        made = towers.create(one.init, jnp.ones(16))
        with pytest.raises(errors.TreeMismatchError, match="but the placement is"):
            towers.step(lambda s, _: (other.exchange(jnp.ones(16), s)[1], 0))(  # noqa: B023
                made, towers.shard(np.ones(4))
            )


LOOKS_FURTHER = {
    "size": lambda x: x / x.size**0.5,
    "neighbors": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (3,) * x.ndim, (1,) * x.ndim, "SAME"
    ),
    "product": lambda x: x @ x,
    "transpose": lambda x: x + x.T,
    "cumulative": lambda x: jnp.cumsum(x, axis=0),
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
}


@pytest.mark.parametrize("name", LOOKS_FURTHER)
def test_center_optimizer_that_is_not_elementwise_is_rejected(name):
    further = optax.stateless(lambda u, p: jax.tree.map(LOOKS_FURTHER[name], u))
    placement = agn_optax.Placement(shard_axis="towers")
    rule = agn_optax.rules.agn(further)
    tx = agn_optax.phases(optax.sgd(0.1), rule, placement=placement)
    with pytest.raises(
        errors.InvalidArgumentError, match="a center in shards and a rule"
    ):
        agn_optax.Towers(4).create(tx.init, {"w": jnp.ones((8, 8))})


def test_record_that_is_not_elementwise_is_rejected():
    def update(updates, state, params=None):
        del params
        norm = optax.tree.norm(updates)
        return updates, jax.tree.map(lambda s, u: s + u / norm, state, updates)

    record = optax.GradientTransformation(optax.tree.zeros_like, update)
    rule = agn_optax.rules.Rule(
        name="direction",
        center=optax.sgd(1.0),
        record=record,
        contribution=lambda record, params, anchor, steps: record,
        needs_params=False,
        needs_anchor=False,
    )
    placement = agn_optax.Placement(shard_axis="towers")
    tx = agn_optax.phases(optax.sgd(0.1), rule, placement=placement)
    with pytest.raises(errors.InvalidArgumentError, match="rule 'direction', whose"):
        agn_optax.Towers(4).create(tx.init, {"w": jnp.ones((8, 8))})


def elements(saved, like):
    """Return the moments of a center's Adam, by leaf, without padding."""
    rows = saved.center_state.rows
    rows = rows.tree if isinstance(rows, OnHost) else rows
    (state,) = [node for node in rows if hasattr(node, "mu")]
    sizes = [leaf.size for leaf in jax.tree.leaves(like)]
    leaves = [jax.tree.leaves(moment) for moment in (state.mu, state.nu)]
    return [
        # Some leaves are whole on every tower; the first copy is used.
        np.asarray(leaf).reshape(-1)[:size]
        for moment in leaves
        for leaf, size in zip(moment, sizes, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("memory", support.MEMORIES)
@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        # Towers of one worker, and islands with varying numbers of workers.
        # (test_checkpoint tests workers.)
        ("towers", [(8, 1), (2, 1), (1, 1), (3, 1), (8, 1)]),
        (("workers", "towers"), [(8, 2), (4, 1), (6, 3), (8, 2)]),
    ],
)
def test_sharded_center_can_be_restored_on_other_numbers_of_towers(
    axes, shapes, memory
):
    placement = agn_optax.Placement(shard_axis=axes, memory=memory)
    tx = make(agn_optax.rules.agn(optax.adam(0.05)), placement)
    towers = agn_optax.Towers(shapes[0][0], workers=shapes[0][1])
    data = problem.batches(5, rows=24)
    (params, state), _ = problem.train(towers, tx, data[:4], problem.params())
    first = saved = towers.unreplicate((params, state))
    center = jax.device_get(towers.center_params(state))
    moments = elements(find_state(saved), center)
    for size, workers in shapes[1:]:
        towers = agn_optax.Towers(size, workers=workers)
        params, state = towers.replicate(saved)
        assert towers.towers_agree((params, state))
        support.assert_identical(jax.device_get(towers.center_params(state)), center)
        saved = towers.unreplicate((params, state))
        for own, other in zip(
            elements(find_state(saved), center), moments, strict=True
        ):
            np.testing.assert_array_equal(own, other)
    support.assert_identical(find_state(saved).center, find_state(first).center)
    # A sharded record is restored, too: the last step is within a period.
    record, expected = (find_state(s).local.record.rows for s in (saved, first))
    support.assert_identical(record, expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", support.MEMORIES)
def test_restored_on_fewer_towers_continues_as_before(memory):
    """The next exchange continues with the state of the center optimizer."""
    tx = make(
        agn_optax.rules.agn(optax.adam(0.05)),
        agn_optax.Placement(shard_axis="towers", memory=memory),
    )
    data = problem.batches(6, rows=24)
    eight, two = agn_optax.Towers(8), agn_optax.Towers(2)
    state, _ = problem.train(eight, tx, data[:4], problem.params())
    state = two.replicate(eight.unreplicate(state))
    step = two.step(problem.train_step(tx))
    for batch in data[4:]:
        state, _ = step(state, two.shard(batch))
    expected, _ = problem.train(two, tx, data, problem.params())
    support.assert_close(state[0], expected[0])
    support.assert_close(two.center_params(state[1]), two.center_params(expected[1]))


def test_residual_is_kept_by_each_tower_and_restored():
    codec = agn_optax.codecs.error_feedback(agn_optax.codecs.cast("bfloat16"))
    rule = dataclasses.replace(agn_optax.rules.average(), codec=codec)
    tx = make(rule, agn_optax.Placement(shard_axis="towers"))
    towers = agn_optax.Towers(4)
    state, _ = problem.train(towers, tx, problem.batches(4), problem.params())
    assert towers.towers_agree(
        state
    )  # residuals are not compared, as they differ on purpose
    again = towers.replicate(towers.unreplicate(state))
    residual, expected = (find_state(s).local.codec_state for s in (again, state))
    assert any(np.any(leaf != leaf[:1]) for leaf in jax.tree.leaves(expected))
    support.assert_identical(residual, expected)


def test_shards_of_another_mesh_are_rejected():
    tx = make(
        agn_optax.rules.average(), agn_optax.Placement(shard_axis=("workers", "towers"))
    )
    made = agn_optax.Towers(4)
    state = made.create(tx.init, problem.params())
    saved = made.unreplicate(state)
    other = agn_optax.Towers(4, axis_name="devices")
    expected = r"axes \('towers',\), but .* only the axes \('workers', 'devices'\)"
    with pytest.raises(errors.TreeMismatchError, match=expected):
        other.replicate(saved)
    turned = agn_optax.Towers(4, workers=2)
    with pytest.raises(errors.TreeMismatchError, match=r"of sizes \(4, 1\), but here"):
        turned.center_params(jax.tree.map(np.asarray, state))


@pytest.mark.parametrize("axes", SHARDS)
def test_each_shard_is_saved_once(axes):
    towers = agn_optax.Towers(8, workers=2)
    rule = agn_optax.rules.agn(optax.adam(0.1))
    tx = make(rule, agn_optax.Placement(shard_axis=axes))
    state = towers.create(tx.init, {"w": jnp.zeros(800)})
    saved = find_state(towers.unreplicate(state))
    assert sum(x.size for x in jax.tree.leaves(saved.center.pieces)) == 800
    assert (
        sum(x.size for x in jax.tree.leaves(saved.local.record.rows)) <= 804
    )  # including counters
    support.assert_identical(towers.replicate(towers.unreplicate(state)), state)


def test_split_form_exchanges_on_islands():
    towers = agn_optax.Towers(4, workers=2)
    tx = agn_optax.phases(
        optax.sgd(0.1), agn_optax.rules.average(), axis_name="workers"
    )
    params = jnp.array([1.0, 2.0])
    state = towers.replicate((params, tx.init(params)))
    state = (
        state[0].at[2:].add(1.0),
        state[1],
    )  # the second worker has other parameters
    exchange = towers.apply(lambda state: tx.exchange(*state))
    state = exchange(state)
    np.testing.assert_allclose(state[0], np.tile([1.5, 2.5], (4, 1)))
