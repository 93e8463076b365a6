"""Exchange of fields of the inner optimizer's state (DES-LOC, Local Adam)."""

import contextlib
import functools
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import center_kinds, problem, shared
from helpers.support import (
    assert_close,
    assert_identical,
    at,
    feeds,
    find_state,
    nothing_compiles,
    step,
)

import agn_optax
from agn_optax import codecs, errors
from agn_optax.center import Synchronous

PERIOD = 2
WORKERS = 4
STEPS = 6 * PERIOD
MOMENTS = {"mu": 1, "nu": 3}
EACH = tuple(MOMENTS.items())
ADAM = shared.adam(0.05)
TURNS = agn_optax.Fragments(["^a", "."])  # with a period of 2: after 1 step, after 2
LATE = agn_optax.Fragments(["^a", "."], delay=1)


def params():
    return {"a": jnp.ones((2, 3)), "b": {"c": jnp.zeros(3), "d": jnp.ones(())}}


def targets(steps=STEPS):
    return feeds(params(), steps, workers=(WORKERS,))


@functools.cache
def drop_in(moments=EACH, inner=ADAM, period=PERIOD, **options):
    return agn_optax.average(
        inner, period, axis_name="workers", moments=dict(moments), **options
    )


def loop_of(tx):
    """Return a worker's loop: its last carry, and its inner state after each step."""

    def run(params, feeds):
        def body(carry, feed):
            params, state = step(tx, *carry, feed)
            return (params, state), inner_state(state)

        return jax.lax.scan(body, (params, tx.init(params)), feeds)

    return run


def inner_state(state):
    return getattr(state, "local", state).inner_state


@functools.cache
def over_vmap(tx):
    return jax.jit(jax.vmap(loop_of(tx), in_axes=(None, 1), axis_name="workers"))


def trained(tx, steps=STEPS):
    """Return parameters and state, and inner states [workers, steps, ...]."""
    return over_vmap(tx)(params(), targets(steps))


def spread(tree):
    """Return the largest difference of two workers; their axis is the first."""
    return max(np.ptp(np.asarray(x), axis=0).max() for x in jax.tree.leaves(tree))


def mean(tree):
    return jax.tree.map(lambda x: np.mean(x, axis=0), tree)


def test_each_field_has_its_own_period_in_exchanges():
    _, states = trained(drop_in())
    equal = {
        name: [k + 1 for k in range(STEPS) if spread(at_step(states, name, k)) == 0.0]
        for name in MOMENTS
    }
    assert equal == {"mu": [2, 4, 6, 8, 10, 12], "nu": [6, 12]}


def at_step(states, name, k):
    return jax.tree.map(lambda x: x[:, k], getattr(states[0], name))


def test_exchanged_field_is_the_mean_over_the_workers():
    """Until the first exchange, workers with and without moments are the same."""
    _, alone = trained(drop_in(()))
    _, states = trained(drop_in())
    last = PERIOD - 1
    for k in range(PERIOD):
        assert_identical(at_step(states, "nu", k), at_step(alone, "nu", k))
    assert_identical(at_step(states, "mu", 0), at_step(alone, "mu", 0))
    mu = jax.tree.map(lambda x: x[0], at_step(states, "mu", last))
    assert_close(mu, mean(at_step(alone, "mu", last)), tolerance=1e-6)
    np.testing.assert_array_equal(states[0].count, alone[0].count)


def test_momentum_averaged_at_every_step_is_that_of_the_mean_gradient():
    """Local SGD with period 1 is SGD: the step is linear in gradient and momentum."""
    inner = shared.sgd(0.05, momentum=0.9)
    (found, state), _ = trained(drop_in((("trace", 1),), inner, 1))
    feed = jax.tree.map(lambda x: x.mean(axis=1), targets())
    (expected, expected_state), _ = jax.jit(loop_plain(inner))(params(), feed)
    for worker in range(WORKERS):
        own = at((found, state.local.inner_state), worker)
        assert_close(own, (expected, expected_state))


def loop_plain(tx):
    def run(params, feeds):
        def body(carry, feed):
            return step(tx, *carry, feed), ()

        return jax.lax.scan(body, (params, tx.init(params)), feeds)

    return run


def test_local_adam_of_workers_with_the_same_data_is_adam():
    feed = jax.tree.map(lambda x: x[:, :1], targets())
    repeated = jax.tree.map(lambda x: np.repeat(x, WORKERS, axis=1), feed)
    tx = drop_in((("mu", 1), ("nu", 1)), period=1)
    (found, state), _ = over_vmap(tx)(params(), repeated)
    expected, _ = jax.jit(loop_plain(ADAM))(params(), at_worker(feed, 0))
    for worker in range(WORKERS):
        assert_close(at((found, state.local.inner_state), worker), expected)


def at_worker(feed, worker):
    return jax.tree.map(lambda x: x[:, worker], feed)


@functools.cache
def split(fragments=None, **options):
    return agn_optax.phases(
        ADAM,
        shared.average(),
        axis_name="workers",
        fragments=fragments,
        moments=MOMENTS,
        **options,
    )


@pytest.mark.parametrize("fragments", [None, TURNS, LATE])
@pytest.mark.few(1)
def test_drop_in_split_and_round_give_the_same_numbers(fragments):
    expected, _ = trained(drop_in(fragments=fragments))
    tx = split(fragments)
    one_round = agn_optax.scan_round(
        lambda params, state, feed: (*step(tx, params, state, feed), None),
        tx.exchange,
        fragments=fragments,
    )

    def loop_by_rounds(params, feeds):
        carry = params, tx.init(params)
        for begin in range(0, STEPS, PERIOD):
            batch = jax.tree.map(lambda x, b=begin: x[b : b + PERIOD], feeds)
            *carry, _ = one_round(*carry, batch)
        return tuple(carry)

    def loop_by_calls(params, feeds):
        carry = params, tx.init(params)
        for i in range(STEPS):
            carry = step(tx, *carry, at(feeds, i))
            if fragments is not None:
                for which in fragments.due(i + 1, PERIOD):
                    carry = tx.exchange(*carry, **which)
            elif (i + 1) % PERIOD == 0:
                carry = tx.exchange(*carry)
        return carry

    for loop in (loop_by_rounds, loop_by_calls):
        run = jax.jit(jax.vmap(loop, in_axes=(None, 1), axis_name="workers"))
        assert_close(run(params(), targets()), expected, tolerance=1e-6)


def test_leaves_of_a_field_are_exchanged_with_the_fragments_of_their_parameters():
    _, states = trained(drop_in((("mu", 1), ("nu", 2)), fragments=TURNS))
    equal = {
        (name, key): [
            k + 1 for k in range(4) if spread(at_step(states, name, k)[key]) == 0
        ]
        for name in ("mu", "nu")
        for key in ("a", "b")
    }
    assert equal == {
        ("mu", "a"): [1, 3],
        ("mu", "b"): [2, 4],
        ("nu", "a"): [3],
        ("nu", "b"): [4],
    }


@pytest.mark.slow
def test_arrays_of_no_parameter_are_exchanged_with_the_last_fragment():
    inner = optax.contrib.reduce_on_plateau()
    tx = agn_optax.average(
        inner, 2, axis_name="workers", moments={"best_value": 1}, fragments=TURNS
    )
    state = jax.vmap(tx.init, axis_size=WORKERS, in_axes=None, axis_name="workers")(
        params()
    )

    @functools.partial(jax.vmap, in_axes=(None, 0, 0), axis_name="workers")
    def one_step(params, state, value):
        return tx.update(params, state, params, value=value)[1]

    best = []
    for k in range(2):
        state = one_step(params(), state, jnp.arange(4.0, 0.0, -1.0) - k)
        best.append(state.inner_state.best_value.tolist())
    assert best == [[4.0, 3.0, 2.0, 1.0], [1.5] * 4]


def test_vmap_pmap_and_shard_map_agree():
    tx, P = drop_in(), jax.P
    expected, _ = trained(tx)
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def one(params, feeds):
        carry, _ = loop_of(tx)(at(params, 0), at_worker(feeds, 0))
        return jax.tree.map(lambda x: x[None], carry)

    rows = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params())
    specs = P("workers"), P(None, "workers")
    run = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("workers"))
    assert_close(jax.jit(run)(rows, targets()), expected)
    devices = jax.devices()[:WORKERS]
    mapped = jax.pmap(loop_of(tx), axis_name="workers", in_axes=(0, 1), devices=devices)
    assert_close(mapped(rows, targets())[0], expected)


@pytest.mark.parametrize("shard_axis", ["workers", ("workers", "towers")])
@pytest.mark.few(1)
def test_center_in_shards_changes_nothing(shard_axis):
    towers = agn_optax.Towers(4, workers=2)
    found = []
    for placement in (None, agn_optax.Placement(shard_axis=shard_axis)):
        tx = split(placement=placement)
        local = optax.chain(agn_optax.all_reduce("towers"), tx)
        run = towers.step(problem.whole_round(problem.train_step(local), tx.exchange))
        state = towers.create(
            lambda p, local=local: (p, local.init(p)), problem.params()
        )
        batches = towers.shard(problem.stacked(problem.batches(PERIOD)))
        for _ in range(3):
            state, _ = run(state, batches)
        assert towers.towers_agree(state)
        moments = find_state(state[1]).local.inner_state[0]
        assert spread((moments.mu, moments.nu)) == 0.0
        found.append((towers.center_params(state[1]), moments))
    assert_close(found[1], found[0])


@pytest.mark.slow
def test_with_gossip_a_field_is_the_mean_of_two_partners():
    placement = agn_optax.Placement(gossip=1.0)
    tx = drop_in((("mu", 1),), placement=placement)
    _, states = trained(tx, PERIOD)
    _, alone = trained(drop_in((), placement=placement), PERIOD)
    before = at_step(alone, "mu", PERIOD - 1)
    expected = jax.tree.map(lambda x: (x + x[jnp.array([1, 0, 3, 2])]) / 2, before)
    assert_close(at_step(states, "mu", PERIOD - 1), expected, tolerance=1e-6)


@pytest.mark.parametrize("form", ["drop-in", "split"])
def test_second_call_compiles_nothing_and_state_can_be_donated(form):
    def rows(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), tree)

    tx = drop_in() if form == "drop-in" else split()
    state = jax.vmap(tx.init, axis_name="workers")(rows(params()))
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
    local = jax.vmap(functools.partial(step, tx), axis_name="workers")
    programs = [jax.jit(local, donate_argnums=(0, 1))]
    if form == "split":
        exchange = jax.vmap(tx.exchange, axis_name="workers")
        programs.append(jax.jit(exchange, donate_argnums=(0, 1)))
    carry = rows(params()), state
    feed = jax.tree.map(jnp.asarray, at(targets(), 0))

    def once(carry):
        carry = programs[0](*carry, feed)
        return programs[-1](*carry) if form == "split" else carry

    carry, before = once(carry), carry
    with nothing_compiles():
        carry = once(carry)
    assert before[1].local.inner_state[0].mu["a"].is_deleted()


def test_fields_are_found_inside_wrappers_and_masks():
    inner = optax.chain(
        optax.clip(1.0),
        optax.multi_transform(
            {"adam": shared.adam(0.05), "sgd": shared.sgd(0.1, momentum=0.9)},
            {"a": "adam", "b": "sgd"},
        ),
    )
    tx = drop_in((("mu", 1), ("trace", 1)), inner)
    (_, state), _ = trained(tx)
    found = state.local.inner_state[1].inner_states
    moments = agn_optax.moments_of(found, "mu", "trace")
    assert [*moments] == [
        "adam/inner_state/0/mu/a",
        "sgd/inner_state/0/trace/b/c",
        "sgd/inner_state/0/trace/b/d",
    ]
    assert spread(moments) == 0.0
    assert spread(agn_optax.moments_of(found, "nu")) > 0.0


@pytest.mark.slow
def test_mean_of_16_bit_moments_is_rounded_once():
    inner = optax.adam(0.05, mu_dtype="bfloat16")
    _, states = trained(drop_in((("mu", 1),), inner), PERIOD)
    _, alone = trained(drop_in((), inner), PERIOD)
    for found, own in zip(
        jax.tree.leaves(at_step(states, "mu", -1)),
        jax.tree.leaves(at_step(alone, "mu", -1)),
        strict=True,
    ):
        expected = own.astype(jnp.float32).mean(axis=0).astype(jnp.bfloat16)
        np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize(
    ("moments", "error", "message"),
    [
        ({"foo": 1}, errors.InvalidArgumentError, "got 'foo'.*such fields are: mu, nu"),
        ({"count": 1}, errors.InvalidArgumentError, "got 0/count of int32.*mu, nu"),
        ({"mu": 0}, errors.InvalidArgumentError, r"moments\['mu'\].*got 0"),
        ({"mu": True}, errors.InvalidArgumentError, "got True"),
        ({"mu": 1.5}, errors.InvalidArgumentError, "got 1.5"),
        ({1: 1}, errors.InvalidTypeError, "got the name 1"),
        (["mu"], errors.InvalidTypeError, "must be a dict.*got list"),
    ],
)
def test_invalid_moments_are_rejected(moments, error, message):
    with pytest.raises(error, match=message):
        agn_optax.diloco(ADAM, 2, moments=moments).init(params())
    with pytest.raises(error, match=message):
        agn_optax.phases(ADAM, shared.diloco(), moments=moments).init(params())


def test_moments_of_an_optimizer_without_any_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="such fields are: none"):
        agn_optax.diloco(optax.sgd(0.1), 2, moments={"mu": 1}).init(params())


# Around a center outside the program.


def test_taken_moments_can_be_put_back():
    state = ADAM.init(params())
    taken = agn_optax.moments_of(state, "mu", "nu")
    assert [*taken] == [f"0/{m}/{x}" for m in MOMENTS for x in ("a", "b/c", "b/d")]
    moved = jax.tree.map(lambda x: x + 1, taken)
    changed = agn_optax.with_moments(state, moved)
    assert_identical(agn_optax.moments_of(changed, "mu", "nu"), moved)
    np.testing.assert_array_equal(changed[0].count, state[0].count)
    assert_identical(agn_optax.with_moments(changed, taken), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {**m, "0/mu/e": jnp.ones(3)}, "0/mu/e"),
        (lambda m: {**m, "0/mu/a": jnp.ones(3)}, "0/mu/a"),
    ],
)
def test_moments_of_another_state_are_rejected(change, message):
    state = ADAM.init(params())
    with pytest.raises(errors.TreeMismatchError, match=message):
        agn_optax.with_moments(state, change(agn_optax.moments_of(state, "mu")))


def test_moments_without_a_name_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="got none"):
        agn_optax.moments_of(ADAM.init(params()))


def worker_loop(center, seconds, index):
    """Run a worker around a center, and its moments around centers of their own."""
    name = f"worker-{index}"
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(
            agn_optax.Worker(center, ADAM, period=PERIOD, name=name)
        )
        x, state = worker.start()
        others = {}
        for field, second in seconds.items():
            other = agn_optax.Worker(
                second, optax.identity(), period=MOMENTS[field] * PERIOD, name=name
            )
            stack.enter_context(other)
            first = agn_optax.moments_of(state.inner_state, field)
            others[field] = other, other.start(first, chief=index == 0)[1]
        local = jax.jit(functools.partial(step, worker.tx))
        for k in range(STEPS):
            x, state = worker.exchange(*local(x, state, at(at(targets(), k), index)))
            for field, (other, own) in others.items():
                values = agn_optax.moments_of(state.inner_state, field)
                values, own = other.exchange(values, own)
                others[field] = other, own
                inner = agn_optax.with_moments(state.inner_state, values)
                state = state._replace(inner_state=inner)
        assert [other.exchanges for other, _ in others.values()] == [6, 2]
        return x, state.inner_state


@pytest.mark.parametrize(
    "kind",
    ["local", *(pytest.param(k, marks=pytest.mark.slow) for k in ["server", "shards"])],
)
def test_mesh_and_rounds_around_centers_agree(kind):
    (expected, state), _ = trained(drop_in())
    with contextlib.ExitStack() as stack:

        def made(rule, first=None):
            settings = {"mode": Synchronous(), "barrier": WORKERS}
            return stack.enter_context(center_kinds.made(kind, rule, first, **settings))

        center = made(shared.average(), params())
        seconds = {field: made(agn_optax.rules.moments()) for field in MOMENTS}
        run = functools.partial(worker_loop, center, seconds)
        with futures.ThreadPoolExecutor(WORKERS) as pool:
            found = [*pool.map(run, range(WORKERS))]
    for worker, (x, inner) in enumerate(found):
        own = at((expected, state.local.inner_state), worker)
        assert_close((at(x, ...), inner), own, tolerance=1e-6)


def test_center_is_exactly_the_mean_of_much_smaller_moments():
    """Displacements would leave rounding errors, and negative numbers in place of 0."""
    rule = agn_optax.rules.moments()
    center = agn_optax.LocalCenter(rule, mode=Synchronous(), barrier=7)
    first = jnp.asarray(np.random.default_rng(0).uniform(size=4096), jnp.float32)
    last = jnp.concatenate([jnp.zeros(2048), 1e-12 * first[2048:]])

    def run(index):
        worker = agn_optax.Worker(center, optax.identity(), period=1, name=f"{index}")
        with worker:
            _, state = worker.start(first, chief=index == 0)
            return worker.exchange(jnp.array(last, copy=True), state)[0]

    with futures.ThreadPoolExecutor(7) as pool:
        found = [*pool.map(run, range(7))]
    for values in found:
        np.testing.assert_allclose(values, last, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_worker_adopts_the_mean_in_place_of_values_that_changed_meanwhile(overlap):
    """The difference since sending could be larger than the mean, and negative."""
    center = agn_optax.LocalCenter(agn_optax.rules.moments(), mode=Synchronous())
    with agn_optax.Worker(
        center, optax.identity(), period=2, overlap=overlap, patience=100
    ) as worker:
        values, state = worker.start(jnp.ones(3), chief=True)
        values, state = worker.exchange(values, state, steps=2)
        values, state = worker.exchange(values + 4.0, state, steps=2)  # sends 5
        values, state = worker.receive(jnp.zeros(3), state)
        expected = 5.0 if overlap else 0.0
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(center.pull().params, 5.0)


def test_center_without_rounds_rejects_moments():
    with pytest.raises(errors.InvalidArgumentError, match=r"'moments'.*whole round"):
        agn_optax.LocalCenter(agn_optax.rules.moments(), jnp.zeros(2))


def test_codec_that_leaves_out_moments_is_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="leaves out elements"):
        agn_optax.rules.moments(codec=codecs.top_k(1))
