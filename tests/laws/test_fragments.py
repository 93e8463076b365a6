"""Law 14: all fragments at once equal no fragments; further laws of fragments."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared
from helpers.support import (
    RULES,
    assert_close,
    assert_identical,
    at,
    feeds,
    needs_host,
    step,
    tree,
)

import agn_optax
from agn_optax import codecs, errors

PERIOD = 4
STEPS = 2 * PERIOD + 3
WORKERS = 2
TURNS = agn_optax.Fragments(2)  # with a period of 4: after 2 steps, and after 4
AT_ONCE = agn_optax.Fragments(2, offsets=(PERIOD, PERIOD))
ONE = agn_optax.Fragments(1)
LATE = agn_optax.Fragments(2, delay=1, mixing=0.5)
RANDOM_AT_ONCE = dataclasses.replace(AT_ONCE, seed=1)
INNER = shared.adam(0.05)


@functools.cache
def drop_in(rule, fragments, **options):
    made = (RULES | {"decoupled_diloco": shared.decoupled_diloco})[rule]()
    return agn_optax.exchange_every(INNER, made, PERIOD, fragments=fragments, **options)


@functools.cache
def split(rule, fragments):
    return agn_optax.phases(INNER, RULES[rule](), fragments=fragments)


@functools.cache
def train(tx):
    """Return a drop-in's loop: last parameters, center, and all parameters."""

    def one(params, targets):
        def body(carry, target):
            carry = step(tx, *carry, target)
            return carry, carry[0]

        carry, trajectory = jax.lax.scan(body, (params, tx.init(params)), targets)
        return carry[0], agn_optax.center_params(carry[1]), trajectory

    return jax.jit(one)


def steps_of(params, count=STEPS, **options):
    return feeds(params, count, **options)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rule", "dtype", "fragments"),
    [
        *((rule, "float32", AT_ONCE) for rule in RULES),
        *((rule, "bfloat16", AT_ONCE) for rule in ("agn", "easgd_rho")),
        *((rule, "float32", RANDOM_AT_ONCE) for rule in RULES),
        ("diloco", "float32", ONE),
        ("decoupled_diloco", "float32", AT_ONCE),
    ],
)
def test_14_all_fragments_at_once_equal_no_fragments(rule, dtype, fragments):
    """They are equal up to rounding, because the programs differ."""
    params = tree(dtype)
    targets = steps_of(params)
    expected = train(drop_in(rule, None))(params, targets)
    actual = train(drop_in(rule, fragments))(params, targets)
    assert_close(actual, expected, tolerance=1e-6 if dtype == "float32" else None)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == b.dtype


def test_worker_adopts_the_random_elements_that_traveled_and_keeps_the_others():
    fragments = agn_optax.Fragments(4, seed=7)
    tx = agn_optax.phases(INNER, shared.diloco(), fragments=fragments)
    params = tree()
    params, state = step(tx, params, tx.init(params), at(steps_of(params), 0))
    adopted, state = tx.exchange(params, state, fragment=2)
    center = agn_optax.center_params(state)
    parts = fragments.divide(params)
    for part in range(4):
        new, old, c = (parts.take(part, x) for x in (adopted, params, center))
        assert_identical(new, c if part == 2 else old)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (adopted, params))))


def run_turns(tx, fragments, params, targets):
    """Run the loop of the split form."""
    local, exchange = programs(tx)
    state = tx.init(params)
    for i in range(jax.tree.leaves(targets)[0].shape[0]):
        params, state = local(params, state, at(targets, i))
        for which in fragments.due(i + 1, PERIOD):
            params, state = exchange(params, state, **which)
    return params, state


@functools.cache
def programs(tx):
    return jax.jit(functools.partial(step, tx)), jax.jit(
        tx.exchange, static_argnames=("fragment", "receive"), donate_argnums=(0, 1)
    )


EVERY = {
    **dict.fromkeys(RULES, TURNS),
    "agn late": LATE,
    "diloco late": LATE,
    "easgd_rho late": dataclasses.replace(LATE, mixing=0.0),
    "average mixed": agn_optax.Fragments(2, mixing=0.25),
    "diloco random": agn_optax.Fragments(3, seed=1),
    "easgd_rho random": agn_optax.Fragments(3, seed=1),
    "agn random late": agn_optax.Fragments(3, delay=1, mixing=0.5, seed=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_8_drop_in_split_and_round_give_the_same_numbers(name):
    rule, fragments = name.split()[0], EVERY[name]
    params = tree()
    targets = steps_of(params, 3 * PERIOD)
    expected, center, _ = train(drop_in(rule, fragments))(params, targets)
    tx = split(rule, fragments)
    by_hand, state = run_turns(tx, fragments, trees_copy(params), targets)
    assert_close(
        (by_hand, agn_optax.center_params(state)), (expected, center), tolerance=1e-6
    )
    one_round = jax.jit(
        agn_optax.scan_round(
            lambda params, state, target: (*step(tx, params, state, target), params),
            tx.exchange,
            fragments=fragments,
        ),
        donate_argnums=(0, 1),
    )
    loop = trees_copy(params), tx.init(params)
    for begin in range(0, 3 * PERIOD, PERIOD):
        batches = jax.tree.map(lambda x, b=begin: x[b : b + PERIOD], targets)
        *loop, before = one_round(*loop, batches)
        assert {x.shape[0] for x in jax.tree.leaves(before)} == {PERIOD}
    assert_close(tuple(loop), (by_hand, state), tolerance=1e-6)


def trees_copy(tree):
    return jax.tree.map(jnp.copy, tree)


def test_only_the_due_fragment_is_exchanged():
    params = tree()
    tx = agn_optax.exchange_every(
        shared.sgd(0.1), shared.downpour(), PERIOD, fragments=TURNS
    )
    state = tx.init(params)
    fragments = TURNS.divide(params).cut(params)
    assert [len(jax.tree.leaves(part)) for part in fragments] == [1, 2]
    local = jax.jit(functools.partial(step, tx))
    exchanged = []
    for i in range(2 * PERIOD):
        before = state
        params, state = local(params, state, at(steps_of(params), i))
        moved = [
            p
            for p, (old, new) in enumerate(
                zip(before.fragments, state.fragments, strict=True)
            )
            if int(new.exchanges) > int(old.exchanges)
        ]
        exchanged.append(moved)
        for p, (old, new) in enumerate(
            zip(before.fragments, state.fragments, strict=True)
        ):
            if p not in moved:
                assert_identical(new.center, old.center)
    assert exchanged == [[], [0], [], [1], [], [0], [], [1]]
    assert [int(own.exchanges) for own in state.fragments] == [2, 2]


def test_fragment_offsets_scale_with_a_period_schedule():
    """Offsets keep their share of each round: 1 and 2 of 2 steps, 3 and 6 of 6."""
    params = tree()
    lengths = jnp.array([2, 6, 4, 4])
    tx = agn_optax.exchange_every(
        shared.sgd(0.1), shared.average(), lambda k: lengths[k], fragments=TURNS
    )
    local, state = jax.jit(functools.partial(step, tx)), tx.init(params)
    made = []
    for i in range(12):
        params, state = local(params, state, at(feeds(params, 12), i))
        made.append([int(own.exchanges) for own in state.fragments])
    first = [i + 1 for i in range(12) if made[i][0] > (made[i - 1][0] if i else 0)]
    last = [i + 1 for i in range(12) if made[i][1] > (made[i - 1][1] if i else 0)]
    assert first == [1, 5, 10]
    assert last == [2, 8, 12]


def total(params, center):
    """Return Σ_i x_i + c; the first dimension is that of the workers."""
    return jax.tree.map(lambda x, c: np.sum(x, 0) + np.asarray(c)[0], params, center)


@pytest.mark.parametrize("delay", [0, 1])
def test_5_easgd_conserves_the_sum_of_workers_and_center(delay):
    fragments = agn_optax.Fragments(2, delay=delay)
    one = tree()
    tx = agn_optax.phases(
        INNER, shared.easgd(0.2, rho=0.5), axis_name="workers", fragments=fragments
    )
    many = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), one)
    state = jax.vmap(tx.init)(many)
    params = jax.tree.map(
        lambda x: x + np.arange(WORKERS, dtype="f").reshape(-1, *[1] * (x.ndim - 1)),
        many,
    )

    def halves(params, state, fragment):
        params, state = tx.exchange(params, state, fragment=fragment)
        return (
            tx.exchange(params, state, receive=fragment) if delay else (params, state)
        )

    for fragment in range(2):
        exchange = functools.partial(halves, fragment=fragment)
        exchange = jax.jit(jax.vmap(exchange, axis_name="workers"))
        before = total(params, agn_optax.center_params(state))
        center = agn_optax.center_params(state)
        params, state = exchange(params, state)
        assert_close(total(params, agn_optax.center_params(state)), before)
        moved = fragments.divide(one).take(fragment, agn_optax.center_params(state))
        old = fragments.divide(one).take(fragment, center)
        for new, c in zip(*map(jax.tree.leaves, (moved, old)), strict=True):
            assert new.size == 0 or np.min(np.abs(new - c)) > 1e-4


def one_worker(tx):
    def run(params, targets):
        def body(carry, target):
            return step(tx, *carry, target), ()

        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), targets)
        return params, agn_optax.center_params(state)

    return run


def over_shard_map(tx):
    P = jax.P
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def one(params, targets):
        own = jax.tree.map(lambda x: x[:, 0], targets)
        params = jax.tree.map(lambda x: x[0], params)
        return jax.tree.map(lambda x: x[None], one_worker(tx)(params, own))

    run = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P("workers"), P(None, "workers")),
        out_specs=P("workers"),
    )
    return lambda params, targets: jax.jit(run)(
        jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params), targets
    )


def over_vmap(tx):
    return jax.jit(
        jax.vmap(one_worker(tx), in_axes=(None, 1), axis_name="workers"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agn", "diloco", "easgd_rho", "diloco late"])
def test_6_vmap_and_shard_map_agree(name):
    rule, fragments = name.split()[0], EVERY[name]
    tx = drop_in(rule, fragments, axis_name="workers")
    params = tree()
    targets = steps_of(params, workers=(WORKERS,))
    expected = over_vmap(tx)(params, targets)
    actual = over_shard_map(tx)(params, targets)
    assert_close(actual, expected)
    _, center = actual  # one center for all workers
    for leaf in jax.tree.leaves(center):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_6_fragments_at_once_equal_no_fragments_with_several_workers():
    params = tree()
    targets = steps_of(params, workers=(WORKERS,))
    expected, actual = (
        over_vmap(drop_in("diloco", fragments, axis_name="workers"))(params, targets)
        for fragments in (None, AT_ONCE)
    )
    assert_close(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize("name", ["agn", "diloco", "diloco late"])
def test_9_restored_state_continues_bit_for_bit(name):
    rule, fragments = name.split()[0], EVERY[name]
    tx, params = drop_in(rule, fragments), tree()
    targets = steps_of(params)
    local = jax.jit(functools.partial(step, tx))
    loop = params, tx.init(params)
    for i in range(STEPS):
        if i == PERIOD + 3:  # with a message in flight if there is a delay
            saved = jax.tree.map(np.asarray, loop)
        loop = local(*loop, at(targets, i))
    again = jax.tree.map(jnp.asarray, saved)
    for i in range(PERIOD + 3, STEPS):
        again = local(*again, at(targets, i))
    assert_identical(again, loop)


@pytest.mark.few(1)
@pytest.mark.parametrize("fragments", [AT_ONCE, TURNS])
@pytest.mark.parametrize("codec", [codecs.quantize(4), codecs.sign()])
def test_13_fragment_residual_is_what_its_codec_lost(codec, fragments):
    rule = shared.downpour(codec=codecs.error_feedback(codec))
    tx = agn_optax.phases(shared.sgd(0.25), rule, fragments=fragments)
    params = {"a": jnp.zeros((6, 4)), "b": jnp.zeros((4, 6)), "c": jnp.zeros(3)}
    targets = feeds(params, PERIOD)
    loop = params, tx.init(params)
    for i in range(PERIOD):
        loop = step(tx, *loop, at(targets, i))
    contributed = jax.tree.map(lambda a, x: a - x, params, loop[0])
    for p in range(2):
        loop = tx.exchange(*loop, fragment=p)
        sent = jax.tree.map(
            lambda a, c: a - c, params, agn_optax.center_params(loop[1])
        )
        residual = agn_optax.slots(loop[1])["codec/residual"]
        parts = fragments.divide(params)
        assert_close(
            jax.tree.map(jnp.add, parts.take(p, sent), parts.take(p, residual)),
            parts.take(p, contributed),
            tolerance=1e-6,
        )
        assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(residual))


def test_11_lossless_codec_changes_nothing():
    params = tree()
    targets = steps_of(params)
    plain = train(drop_in("diloco", TURNS))(params, targets)
    rule = shared.diloco(codec=codecs.cast("float32"))
    tx = agn_optax.exchange_every(INNER, rule, PERIOD, fragments=TURNS)
    assert_close(train(tx)(params, targets), plain, tolerance=1e-6)


# Delay and mixing.


def quadratic(fragments, targets, *, rule=None, inner=0.1, workers=1):
    """Return parameters and center after every step, with a single fragment."""
    tx = agn_optax.phases(
        shared.sgd(inner), rule or shared.diloco(shared.sgd(0.5)), fragments=fragments
    )
    params = jnp.float32(1.0)
    state = tx.init(params)
    seen = []
    for i, target in enumerate(targets):
        params, state = step(tx, params, state, target)
        for which in fragments.due(i + 1, len(targets) // 2):
            params, state = tx.exchange(params, state, **which)
        seen.append((float(params), float(agn_optax.center_params(state))))
    return seen


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_delay_and_mixing_match_the_equation_of_streaming_diloco(mixing):
    """There is one fragment, with a period of 3, an offset of 2 and a delay of 1."""
    fragments = agn_optax.Fragments(1, offsets=(2,), delay=1, mixing=mixing)
    targets = [0.0, 0.5, -0.5, 1.0, 0.0, 0.25]
    x = c = 1.0
    expected, sent = [], None
    for t, target in enumerate(targets, start=1):
        x -= 0.1 * 0.7 * (x - target)
        if t % 3 == 0:
            c -= 0.5 * sent
            x = mixing * x + (1 - mixing) * c
        if t % 3 == 2:
            sent = c - x
        expected.append((x, c))
    np.testing.assert_allclose(quadratic(fragments, targets), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_send_and_receive_without_steps_between_equal_an_exchange(rule):
    """Both halves of a delayed exchange together equal a whole one, for every rule."""
    late = agn_optax.Fragments(2, delay=1)
    params = tree()
    made = []
    for fragments in (TURNS, late):
        local, exchange = programs(split(rule, fragments))
        loop = params, split(rule, fragments).init(params)
        for i in range(4):
            loop = local(*loop, at(steps_of(params), i))
            loop = exchange(*loop, fragment=i % 2)
            if fragments is late:
                loop = exchange(*loop, receive=i % 2)
        made.append((loop[0], agn_optax.center_params(loop[1]), loop[1].inner_state))
    assert_close(made[1], made[0], tolerance=1e-6)


def test_receiving_without_a_message_in_flight_changes_nothing():
    tx = split("diloco", LATE)
    params = tree()
    local, exchange = programs(tx)
    loop = local(params, tx.init(params), at(steps_of(params), 0))
    expected = jax.tree.map(np.asarray, loop)
    assert_identical(exchange(*loop, receive=0), expected)


def test_message_in_flight_is_received_before_the_next_is_sent():
    tx = split("diloco", LATE)
    params = tree()
    local, exchange = programs(tx)
    loop = local(params, tx.init(params), at(steps_of(params), 0))
    loop = exchange(*loop, fragment=0)
    assert bool(loop[1].fragments[0].in_flight.is_sent)
    before = np.asarray(agn_optax.center_params(loop[1])["layers"][0]["w"])
    loop = exchange(*local(*loop, at(steps_of(params), 1)), fragment=0)
    assert np.any(before != agn_optax.center_params(loop[1])["layers"][0]["w"])
    assert bool(loop[1].fragments[0].in_flight.is_sent)


# On a mesh, local steps do not depend on a message in flight.


def scans_that_need(program, of):
    """Return, for each scan of a program, if it needs a result of an operation."""
    tainted, found = set(), []
    for equation in program.eqns:
        reads = {id(atom) for atom in equation.invars if not hasattr(atom, "val")}
        is_tainted = bool(reads & tainted)
        if equation.primitive.name == "scan":
            found.append(is_tainted)
        if is_tainted or equation.primitive.name in of:
            tainted |= {id(variable) for variable in equation.outvars}
    return found


def round_of_a_mesh(fragments):
    tx = agn_optax.phases(
        shared.sgd(0.1), shared.diloco(), axis_name="workers", fragments=fragments
    )

    def local_step(
        params, state, target
    ):  # the gradient of a fragment depends on the other
        def loss(params):
            off = jax.tree.map(lambda x, f: (x - f).sum(), params, target)
            return (off["a"] * off["b"]) ** 2

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state, ()

    whole = agn_optax.scan_round(local_step, tx.exchange, fragments=fragments)
    params = {"a": jnp.ones((8, 4)), "b": jnp.ones(32)}
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    mapped = jax.shard_map(
        whole, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    targets = feeds(params, 4)
    return jax.jit(mapped), (params, tx.init(params), targets)


def test_local_steps_do_not_depend_on_a_message_in_flight():
    """A mesh may thus send the message while local steps run."""

    def scans(fragments):
        function, arguments = round_of_a_mesh(fragments)
        (call,) = jax.make_jaxpr(function)(*arguments).eqns
        (mapped,) = call.params["jaxpr"].eqns
        return scans_that_need(mapped.params["jaxpr"], {"psum", "psum_invariant"})

    # Scans of 2, 1 and 1 steps end with the send, the receive and the period.
    assert scans(agn_optax.Fragments(1, offsets=(2,), delay=1)) == [False, False, True]
    # Without a delay the steps after an exchange wait for it.
    assert scans(agn_optax.Fragments(1, offsets=(2,))) == [False, True]


def test_compiled_round_sends_one_fragment_at_a_time():
    from helpers.traffic import traffic  # noqa: PLC0415 it is rarely needed

    function, arguments = round_of_a_mesh(agn_optax.Fragments(2, delay=1))
    text = function.lower(*arguments).compile().as_text()
    sent = traffic(text)
    assert sent.kinds == {"all-reduce": 2}
    assert sent.bytes_sent == 2 * 32 * 4  # the size of a message for two workers
    sizes = re.findall(r"= f32\[([\d,]*)\]\S* all-reduce\(", text)
    assert sorted(sizes) == ["32", "8,4"]


# Invalid settings and calls are rejected.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: agn_optax.Fragments(0), "parts must be a positive int, got 0"),
        (lambda: agn_optax.Fragments("layers"), "a sequence of regular expressions"),
        (lambda: agn_optax.Fragments(["("]), r"got '\('"),
        (lambda: agn_optax.Fragments([]), "at least one"),
        (lambda: agn_optax.Fragments(2, (1,)), "must have 2 numbers, one for each"),
        (lambda: agn_optax.Fragments(2, (0, 1)), "each of offsets must be a positive"),
        (lambda: agn_optax.Fragments(2, delay=-1), "delay must be a whole number"),
        (lambda: agn_optax.Fragments(2, mixing=1.0), "mixing must be below 1"),
        (lambda: agn_optax.Fragments(2, delay=4).due(1, 4), "delay=4.* period of 4"),
        (lambda: agn_optax.Fragments(2, (1, 9)).due(1, 4), r"\(1, 9\) and a period"),
        (lambda: agn_optax.Fragments(9).divide(tree()), "3 leaves, too few for 9"),
        (lambda: agn_optax.Fragments(2, seed=-1), "seed must be a whole number"),
        (lambda: agn_optax.Fragments(["."], seed=1), "parts must be a number"),
        (
            lambda: agn_optax.Fragments(99, seed=1).divide(jnp.ones(3)),
            "have 3 elements, too few for 99 fragments",
        ),
        (
            lambda: agn_optax.Fragments(["layers"]).divide(tree()),
            "found in the path 'scale'",
        ),
        (
            lambda: agn_optax.Fragments([".", "x"]).divide(tree()),
            r"no leaf is left for \['x'\]",
        ),
    ],
)
def test_invalid_fragments_are_rejected(given, message):
    with pytest.raises((errors.InvalidArgumentError, errors.InvalidTypeError)) as error:
        given()
    assert re.search(message, str(error.value))


def test_settings_that_fragments_do_not_support_are_rejected():
    make = functools.partial(agn_optax.phases, shared.sgd(0.1))
    shards = agn_optax.Placement(shard_axis="workers")
    rejected = pytest.raises
    with rejected(errors.InvalidArgumentError, match="'easgd', mixing=0.5: the rule"):
        make(shared.easgd(0.3), fragments=agn_optax.Fragments(2, mixing=0.5))
    with rejected(
        errors.InvalidArgumentError, match="one center, whole on every device"
    ):
        make(
            shared.downpour(),
            axis_name="workers",
            placement=shards,
            fragments=agn_optax.Fragments(2, delay=1),
        )
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    for rule in (shared.diloco(clipped), shared.decoupled_diloco()):
        with rejected(
            errors.InvalidArgumentError, match="fragments of random elements"
        ):
            make(rule, fragments=agn_optax.Fragments(2, seed=0))
    with rejected(errors.InvalidTypeError, match="fragments must be an agn_optax.Frag"):
        make(shared.downpour(), fragments=2)
    with rejected(errors.InvalidArgumentError, match="delay=3, offsets=None and a per"):
        late = agn_optax.Fragments(2, delay=3)
        agn_optax.exchange_every(INNER, shared.downpour(), 3, fragments=late)


def test_invalid_exchange_arguments_are_rejected():
    tx, whole, params = split("diloco", TURNS), split("diloco", None), tree()
    state = tx.init(params)
    for which in ({"fragment": 2}, {"receive": -1}, {"fragment": 0, "receive": 0}):
        with pytest.raises(errors.InvalidArgumentError, match="there are 2: got"):
            tx.exchange(params, state, **which)
    with pytest.raises(errors.InvalidArgumentError, match="there are no fragments"):
        whole.exchange(params, whole.init(params), fragment=0)
    with pytest.raises(errors.InvalidTypeError, match="static_argnames"):
        jax.jit(tx.exchange)(params, state, fragment=0)
    seeds = [agn_optax.Fragments(2, seed=seed) for seed in (1, 2)]
    with pytest.raises(
        errors.TreeMismatchError, match=r"seed=1.*seed=2|seed=2.*seed=1"
    ):
        split("diloco", seeds[0]).exchange(
            params, split("diloco", seeds[1]).init(params)
        )
    for other in (whole, split("diloco", agn_optax.Fragments(3))):
        with pytest.raises(errors.TreeMismatchError, match="fragments"):
            other.exchange(params, state)
    with pytest.raises(errors.TreeMismatchError, match="but here delay=1"):
        split("diloco", LATE).exchange(params, state)


def test_rule_that_fails_on_a_part_of_the_tree_is_rejected():
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u, w: -u * w, updates, WEIGHTS), state

    odd = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x, w: w * x, params, WEIGHTS), update
    )
    tx = agn_optax.phases(INNER, shared.diloco(odd), fragments=agn_optax.Fragments(2))
    message = r"got rule 'diloco': .* cannot begin with"
    with pytest.raises(errors.InvalidArgumentError, match=message):
        tx.init({"a": jnp.ones(3), "b": jnp.ones(2)})


WEIGHTS = {"a": 1.0, "b": 2.0}


# Other functions of a state with fragments.


def test_slots_of_fragments():
    params = tree()
    tx = split("diloco", LATE)
    loop = step(tx, params, tx.init(params), at(steps_of(params), 0))
    found = agn_optax.slots(loop[1])
    assert list(found) == [
        "inner/mu",
        "inner/nu",
        "center",
        "center_optimizer/trace",
        "in_flight/message",
    ]
    assert_identical(found["center"], agn_optax.center_params(loop[1]))


def test_fragments_are_selected_by_path():
    params = {"embed": jnp.ones(3), "layers": [jnp.ones(2), jnp.ones(2)], "s": None}
    fragments = agn_optax.Fragments([r"layers/0", r"layers", "."])
    parts = fragments.divide(params)
    assert [[piece.leaf for piece in part] for part in parts] == [[1], [2], [0]]
    tx = agn_optax.phases(INNER, shared.average(), fragments=fragments)
    state = tx.init(params)
    assert state.fragments[2].center["layers"] == [None, None]
    assert_identical(agn_optax.center_params(state), params)


def test_fragments_work_within_mask_and_chain():
    params = {"a": jnp.ones(3), "frozen": jnp.ones(2), "b": jnp.ones(4)}
    tx = optax.chain(
        optax.clip(1.0),
        optax.masked(drop_in("diloco", TURNS), {"a": True, "frozen": False, "b": True}),
    )
    state = tx.init(params)
    for _ in range(PERIOD):
        grads = {"a": jnp.ones(3), "frozen": jnp.zeros(2), "b": jnp.ones(4)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    center = agn_optax.center_params(state, params)
    np.testing.assert_array_equal(center["frozen"], 1)
    assert np.all(np.asarray(center["a"]) < 1)
    assert np.all(np.asarray(center["b"]) < 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "placement",
    [
        {"shard_axis": "towers"},
        {"shard_axis": ("workers", "towers")},
        pytest.param({"memory": "host"}, marks=needs_host),
    ],
)
def test_fragments_on_towers_are_equal_for_every_placement(placement):
    towers = agn_optax.Towers(4, workers=WORKERS)
    found = []
    for place in (None, agn_optax.Placement(**placement)):
        tx = agn_optax.phases(
            INNER,
            shared.agn(shared.adam(0.05)),
            axis_name="workers",
            placement=place,
            fragments=TURNS,
        )
        local = optax.chain(agn_optax.all_reduce("towers"), tx)
        run = towers.step(
            problem.whole_round(problem.train_step(local), tx.exchange, TURNS)
        )
        state = towers.create(
            lambda p, local=local: (p, local.init(p)), problem.params()
        )
        for _ in range(2):
            state, _ = run(
                state, towers.shard(problem.stacked(problem.batches(PERIOD)))
            )
        assert towers.towers_agree(state)
        found.append(towers.center_params(state[1]))
    assert_close(found[1], found[0])
    first = problem.params()["hidden"]["w"]
    assert np.max(np.abs(found[0]["hidden"]["w"] - first)) > 0.01
