"""Gossip: workers with a center each, which exchange messages in pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared
from helpers.support import (
    assert_close,
    assert_identical,
    feeds,
    find_state,
    needs_host,
    step,
)
from helpers.traffic import traffic

import agn_optax
from agn_optax import errors
from agn_optax.round import OwnCenter

P = jax.sharding.PartitionSpec
PLAIN, FAST = shared.sgd(1.0), shared.sgd(0.7, momentum=0.5)
SIZE = 3


# The partner of each worker, for each number of workers and each exchange.
PARTNERS = {
    2: [[1, 0]],
    3: [[0, 2, 1], [2, 1, 0], [1, 0, 2]],
    4: [[1, 0, 3, 2], [2, 3, 0, 1]],
    6: [[1, 0, 5, 4, 3, 2], [3, 2, 1, 0, 5, 4], [5, 4, 3, 2, 1, 0]],
    8: [[1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3]],
}


def make(rule, gossip=1.0, period=1, inner=None, **options):
    placement = agn_optax.Placement(gossip=gossip)
    inner = shared.sgd(0.1) if inner is None else inner
    options = {"axis_name": "workers", "placement": placement, **options}
    return agn_optax.exchange_every(inner, rule, period, **options)


def begun(tx, workers, params):
    rows = jax.tree.map(lambda x: jnp.stack([x] * workers), params)
    return rows, jax.vmap(tx.init, axis_name="workers")(rows)


def trained(tx, workers, targets, params=None):
    """Return parameters and state of all workers, [workers, ...]."""

    @jax.jit
    def run(carry, targets):
        one = jax.vmap(functools.partial(step, tx), axis_name="workers")
        return jax.lax.scan(lambda c, feed: (one(*c, feed), ()), carry, targets)[0]

    params = jnp.zeros(SIZE) if params is None else params
    return run(begun(tx, workers, params), targets)


def with_numpy(targets, gossip, rate, momentum, period, combine="mean"):
    """Compute the same in NumPy, with plain momentum at the centers."""
    steps, workers, _ = targets.shape
    x = np.zeros((workers, SIZE))
    c, v = x.copy(), x.copy()
    for done in range(steps):
        x = x - 0.1 * 0.7 * (x - targets[done])
        if (done + 1) % period:
            continue
        met = np.array(PARTNERS[workers][done // period % len(PARTNERS[workers])])
        message = c - x
        single = (met == np.arange(workers))[
            :, None
        ]  # a worker without a partner has only its own message
        both = message + np.where(single, 0, message[met])
        message = both / np.where(single, 1, 2) if combine == "mean" else both
        v = momentum * v + message + gossip * (c - (c + c[met]) / 2)
        c = c - rate * v
        x = c.copy()
    return x


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        (shared.average(), (1.0, 1.0, 0.0)),
        (shared.diloco(FAST), (1.0, 0.7, 0.5)),  # NoLoCo
        (shared.diloco(FAST), (0.4, 0.7, 0.5)),
        (shared.downpour(), (0.5, 1.0, 0.0)),
    ],
    ids=["gossip averaging", "NoLoCo", "NoLoCo that pulls less", "downpour"],
)
def test_gossip_matches_the_numpy_reference(rule, numbers, workers):
    targets = feeds(jnp.zeros(SIZE), 12, workers=(workers,))
    gossip, rate, momentum = numbers
    params, state = trained(make(rule, gossip, 2), workers, targets)
    expected = with_numpy(targets, gossip, rate, momentum, 2, rule.combine)
    assert_close(params, expected.astype(np.float32))
    assert_close(agn_optax.center_params(state), params)
    assert int(state.exchanges[0]) == 6


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", ["agn", "average", "diloco", "downpour", "easgd"])
@pytest.mark.parametrize("gossip", [0.3, 1.0])
def test_gossip_of_two_workers_equals_a_common_center(rule, gossip):
    """The two workers always meet, so they behave as on a mesh."""
    settings = {"agn": [FAST], "easgd": [0.3]}.get(rule, [])
    rule = getattr(shared, rule)(*settings)
    targets = feeds(jnp.zeros(SIZE), 9, workers=(2,))
    expected, state = trained(make(rule, period=3, placement=None), 2, targets)
    params, own = trained(make(rule, gossip, 3), 2, targets)
    assert_close(params, expected)
    assert_close(own.center.center, state.center)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_gossip_reaches_all_workers_in_log2_exchanges(workers):
    targets = feeds(jnp.zeros(SIZE), 1, workers=(workers,))
    still = optax.set_to_zero()
    tx = make(shared.average(), inner=still)
    params, state = begun(tx, workers, jnp.zeros(SIZE))
    params = jnp.asarray(
        targets[0]
    )  # parameters of each worker before the first exchange
    step = jax.jit(jax.vmap(tx.update, axis_name="workers"))
    for meeting in range(1, workers.bit_length()):
        updates, state = step(params, state, params)
        params = optax.apply_updates(params, updates)
        received = np.asarray(targets[0]).reshape(-1, 2**meeting, SIZE).mean(axis=1)
        assert_close(params, np.repeat(received, 2**meeting, axis=0))


@pytest.mark.parametrize("workers", [3, 4, 6])
@pytest.mark.parametrize("rule", [shared.average(), shared.diloco(FAST)])
def test_gossip_workers_converge_to_the_same_minimum(rule, workers):
    """They first train on different data, and then on the same."""
    distance = feeds(jnp.zeros(SIZE), 100, workers=(workers,))
    same = np.broadcast_to(np.float32([1, -2, 3]), (800, workers, SIZE))
    params, _ = trained(make(rule, period=4), workers, np.concatenate([distance, same]))
    assert_close(params, same[0], tolerance=1e-3)


def test_gossip_agrees_in_vmap_shard_map_pmap_and_towers():
    tx = make(shared.diloco(FAST), period=2, inner=shared.adam(0.05))
    targets = feeds(jnp.zeros(SIZE), 8, workers=(4,))
    expected, state = trained(tx, 4, targets)
    devices = jax.devices()[:4]

    def one(targets):
        params = targets[0] * 0
        return jax.lax.scan(
            lambda carry, feed: (step(tx, *carry, feed), ()),
            (params, tx.init(params)),
            targets,
        )[0][0]

    parallel = jax.pmap(one, axis_name="workers", in_axes=1, devices=devices)
    assert_close(parallel(targets), expected)
    mesh = jax.make_mesh(
        (4,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    sharded = jax.shard_map(
        lambda rows: one(rows[:, 0])[None],
        mesh=mesh,
        in_specs=P(None, "workers"),
        out_specs=P("workers"),
    )
    assert_close(jax.jit(sharded)(targets), expected)

    towers = agn_optax.Towers(8, workers=4)  # two towers for each worker
    tx = optax.chain(agn_optax.all_reduce("towers"), tx)
    on_all = towers.step(lambda carry, feed: (step(tx, *carry, feed[0]), None))
    rows = towers.create(lambda: (jnp.zeros(SIZE), tx.init(jnp.zeros(SIZE))))
    for feed in targets:
        rows, _ = on_all(rows, towers.shard(np.repeat(feed, 2, axis=0)))
    assert_close(problem.of_workers(towers, rows[0]), expected)
    assert towers.towers_agree(rows)
    # There is no common center; the mean of all centers is the one to evaluate.
    mean = jax.tree.map(lambda c: c.mean(axis=0), state.center.center)
    assert_close(towers.center_params(rows[1]), mean)
    first = towers.unreplicate(rows)
    assert_close(first[0], expected[0])
    assert_close(agn_optax.center_params(first[1]), mean)


def test_gossip_makes_a_center_per_worker_of_replicated_params():
    """It runs in a shard_map that checks varying axes."""
    tx = make(shared.diloco(FAST), period=2)
    targets = feeds(jnp.zeros(SIZE), 6, workers=(4,))
    expected, _ = trained(tx, 4, targets)
    mesh = jax.make_mesh((4,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(params, rows):
        state = tx.init(params)
        for feed in rows[:, 0]:
            params, state = step(tx, params, state, feed)
        return params[None]

    specs = {"in_specs": (P(), P(None, "workers")), "out_specs": P("workers")}
    run = jax.jit(jax.shard_map(one, mesh=mesh, **specs))
    assert_close(run(jnp.zeros(SIZE), targets), expected)


@pytest.mark.parametrize("gossip", [0.1, 1.0])
def test_gossip_keeps_messages_much_smaller_than_the_center(gossip):
    """A worker's own message is not rounded away beside the difference of centers."""
    tx = make(shared.agn(shared.adam(0.01)), gossip, inner=optax.set_to_zero())
    params, state = begun(tx, 2, jnp.linspace(1.0, 4.0, 200))
    signs = jnp.where(jnp.arange(200) % 2 == 0, 1.0, -1.0)
    grads = jnp.stack([1e-8 * signs, jnp.zeros(200)])
    updates, _ = jax.vmap(tx.update, axis_name="workers")(grads, state, params)
    np.testing.assert_array_equal(jnp.sign(updates[0]), -signs)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.few(1)
def test_gossip_keeps_float64_under_strict_promotion(workers):
    tx = make(shared.diloco(FAST))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params, state = begun(tx, workers, jnp.zeros(SIZE))
        assert params.dtype == "float64"
        update = jax.vmap(tx.update, axis_name="workers")
        updates, after = update(jnp.ones_like(params), state, params)
        assert updates.dtype == "float64"
        kinds = jax.tree.map(lambda x: x.dtype, (state, after))
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workers", [2, 8])
def test_gossip_sends_one_model_and_has_no_global_collective(workers, dtype):
    towers = agn_optax.Towers(workers, workers=workers)
    split = agn_optax.phases(
        shared.sgd(0.1),
        shared.diloco(FAST),
        axis_name="workers",
        placement=agn_optax.Placement(gossip=1.0),
    )
    params = {"w": jnp.zeros((50, 4), dtype), "v": jnp.zeros(100, dtype)}
    state = towers.create(lambda p: (p, split.init(p)), params)
    exchange = towers.step(lambda state, _: (split.exchange(*state), None))
    program = exchange.lower(state, None).compile()
    sent = traffic(program)
    assert set(sent.kinds) == {"collective-permute"}
    partners = max(1, workers.bit_length() - 1)  # an exchange takes one of them
    assert sent.bytes_sent == partners * 300 * 4
    assert "conditional" in program.as_text() or partners == 1


def test_gossip_sums_the_weights_of_both_partners():
    received = optax.GradientTransformationExtraArgs(
        lambda params: {"workers": jnp.int32(0), "weight": jnp.float32(0)},
        lambda updates, state, params=None, *, workers, weight, **_: (
            updates,
            {"workers": workers, "weight": weight},
        ),
    )
    tx = make(agn_optax.rules.diloco(received))
    params, state = begun(tx, 4, jnp.zeros(SIZE))
    weights = jnp.asarray([1.0, 3.0, 5.0, 7.0])
    update = jax.jit(
        jax.vmap(
            lambda g, s, p, weight: tx.update(g, s, p, weight=weight),
            axis_name="workers",
        )
    )
    for expected in ([2, 2, 6, 6], [3, 5, 3, 5]):
        _, state = update(params, state, params, weights)
        np.testing.assert_array_equal(state.center_state["weight"], expected)
        np.testing.assert_array_equal(state.center_state["workers"], 2)


def test_gossip_exchanges_fragments_in_turns():
    options = {"period": 3, "fragments": agn_optax.Fragments(2)}
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    targets = feeds(params, 12, workers=(2,))
    of_mesh = make(shared.diloco(FAST), placement=None, **options)
    expected, _ = trained(of_mesh, 2, targets, params)
    found, state = trained(make(shared.diloco(FAST), **options), 2, targets, params)
    assert_close(found, expected)
    assert all(isinstance(each.center, OwnCenter) for each in state.fragments)
    assert agn_optax.center_params(state)["b"].shape == (2, 3)


@needs_host
def test_gossip_centers_can_be_in_host_memory():
    towers = agn_optax.Towers(4, workers=4)
    data = problem.batches(6)
    found = []
    for memory in ("device", "host"):
        placement = agn_optax.Placement(gossip=1.0, memory=memory)
        tx = make(shared.diloco(FAST), period=2, placement=placement)
        (params, state), _ = problem.train(towers, tx, data, problem.params())
        found.append((params, towers.center_params(state)))
    assert_close(*found)
    for leaf in jax.tree.leaves(find_state(state).center):
        assert leaf.sharding.memory_kind == "pinned_host"


def test_restored_gossip_state_continues_bit_for_bit(tmp_path):
    towers = agn_optax.Towers(4, workers=4)
    tx = make(shared.diloco(FAST), period=2)
    data = problem.batches(9)
    step = towers.step(problem.train_step(tx))
    state, _ = problem.train(towers, tx, data[:5], problem.params(), step)
    agn_optax.checkpoint.save(tmp_path / "saved", towers=(towers, state))
    like = towers.create(lambda p: (p, tx.init(p)), problem.params())
    restored = agn_optax.checkpoint.load(tmp_path / "saved", towers=(towers, like))[
        "towers"
    ]
    assert_identical(restored, state)
    for batch in data[5:]:
        state, _ = step(state, towers.shard(batch))
        restored, _ = step(restored, towers.shard(batch))
    assert_identical(restored, state)


@pytest.mark.slow
def test_gossip_on_other_workers_starts_from_the_mean_of_centers():
    tx = make(shared.diloco(FAST), period=2)
    many, few = agn_optax.Towers(4, workers=4), agn_optax.Towers(3, workers=3)
    state, _ = problem.train(many, tx, problem.batches(5), problem.params())
    mean = many.center_params(state[1])
    first = find_state(state[1]).center.center["s"]
    assert not np.allclose(first, first[0])
    restored = few.replicate(many.unreplicate(state))
    assert_close(few.center_params(restored[1]), mean)
    trace = find_state(restored[1]).center_state[0].trace["s"]
    before = find_state(state[1]).center_state[0].trace["s"]
    assert_close(trace, jnp.full(3, before.mean()))


@pytest.mark.slow
def test_gossip_over_several_mesh_axes_equals_one_axis():
    tx = make(shared.diloco(FAST), axis_name=("hosts", "workers"))
    params = jnp.zeros((2, 4, SIZE))
    both = [
        jax.vmap(jax.vmap(each, axis_name="workers"), axis_name="hosts")
        for each in (tx.init, tx.update)
    ]
    state = both[0](params)
    with pytest.raises(errors.InvalidArgumentError, match="over the other axes"):
        both[1](params, state, params)
    targets = feeds(jnp.zeros(SIZE), 4, workers=(8,))
    expected, _ = trained(make(shared.diloco(FAST)), 8, targets)
    mesh = jax.make_mesh(
        (2, 4), ("hosts", "workers"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def one(rows):
        params = rows[0, 0] * 0
        state = tx.init(params)
        for feed in rows[:, 0]:
            params, state = step(tx, params, state, feed)
        return params[None]

    specs = P(None, ("hosts", "workers")), P(("hosts", "workers"))
    run = jax.shard_map(one, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    assert_close(jax.jit(run)(targets), expected)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (shared.downpour(), {"axis_name": None}, "axis of the workers that"),
        (
            agn_optax.rules.downpour(codec=agn_optax.codecs.cast("bfloat16")),
            {},
            "sends centers along",
        ),
        (
            agn_optax.rules.Rule(
                name="robust",
                center=PLAIN,
                contribution=shared.downpour().contribution,
                combine=agn_optax.robust.median(),
            ),
            {},
            "must be 'sum' or 'mean'",
        ),
        (
            shared.downpour(),
            {"fragments": agn_optax.Fragments(1, delay=1), "period": 3},
            "delay",
        ),
    ],
    ids=["no partner", "codec", "robust", "delay"],
)
def test_settings_that_gossip_does_not_support_are_rejected(rule, options, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        make(rule, **options)


@pytest.mark.parametrize(
    "settings", [{"gossip": 0.0}, {"gossip": -1.0}, {"gossip": 1.0, "shard_axis": "x"}]
)
def test_gossip_settings_out_of_range_are_rejected(settings):
    with pytest.raises(errors.InvalidArgumentError, match="gossip"):
        agn_optax.Placement(**settings)


@pytest.mark.slow
def test_gossip_rejects_the_state_of_a_common_center():
    tx = make(shared.average())
    params = jnp.zeros(SIZE)
    mesh = jax.make_mesh((4,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(rows, state):
        updates, state = tx.update(rows[0], state, rows[0])
        return (rows[0] + updates)[None], state

    update = jax.shard_map(
        step, mesh=mesh, in_specs=(P("workers"), P()), out_specs=(P("workers"), P())
    )
    with pytest.raises(
        errors.InvalidArgumentError, match="a row of the state for each"
    ):
        update(jnp.zeros((4, SIZE)), tx.init(params))
    renamed = make(shared.average(), axis_name="w")
    rows = jnp.zeros((4, SIZE))
    with pytest.raises(errors.TreeMismatchError, match="for each worker of"):
        jax.vmap(renamed.update, axis_name="w")(
            rows, jax.vmap(tx.init, axis_name="workers")(rows), rows
        )
    other = make(shared.average(), placement=None)
    with pytest.raises(
        errors.TreeMismatchError, match="center is whole, on the device"
    ):
        jax.vmap(tx.update, axis_name="workers")(
            *(jnp.zeros((4, SIZE)), jax.vmap(other.init)(jnp.zeros((4, SIZE)))),
            jnp.zeros((4, SIZE)),
        )
