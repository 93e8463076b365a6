"""Center optimizers for messages that arrive one at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import assert_identical, submissions, tree
from jax.extend.core import jaxprs_in_params

import agn_optax
from agn_optax import center_optimizers as outer
from agn_optax import codecs, errors, rules
from agn_optax.center import Store, Submission, ringmaster
from agn_optax.round import elementwise

seeded = functools.partial(np.random.default_rng, 0)
GRADS = [jnp.asarray(g, jnp.float32) for g in seeded().normal(size=(12, 3))]
ABOUT = {"staleness": 1, "steps": 2, "weight": 3.0, "worker": 0}

# A new center optimizer is a new line here. All but those in ACROSS run on shards and
# on packed parameters.
ALL = {
    "delayed_nesterov": lambda: outer.delayed_nesterov(0.7, 0.9, delay=2),
    "momentum_lookahead": lambda: outer.momentum_lookahead(0.7, 0.9),
    "heloco": lambda: outer.heloco(0.7, 0.9, messages=2),
    "ordered_momentum": lambda: outer.ordered_momentum(0.7, 0.9, messages=2),
    "buffered": lambda: outer.buffered(shared.adam(0.1), 2),
    "isoloco": lambda: outer.isoloco(0.7, 0.9),
    "rennala": lambda: outer.rennala(shared.adam(0.1), 2),
    "restart_momentum": lambda: outer.restart_momentum(shared.adam(0.1), 2),
    "ringleader": lambda: outer.ringleader(shared.adam(0.1), 1),
    "scale_by_drift": lambda: optax.chain(
        outer.scale_by_drift(0.1, history=2), shared.sgd(0.5)
    ),
    "scale_by_weight": lambda: optax.chain(
        agn_optax.scale_by_weight(), shared.sgd(0.5)
    ),
    "scale_by_turnaround": lambda: optax.chain(
        agn_optax.scale_by_turnaround(4), shared.sgd(0.5)
    ),
}
# These read across a leaf, or have several models in their state.
ACROSS = ("heloco", "isoloco", "ringleader", "scale_by_drift")


@functools.cache
def rule_of(name):
    return rules.diloco(ALL[name]())


def trained(tx, grads, params=None, **extra):
    params = jnp.zeros(3) if params is None else params
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_dtypes_are_kept_under_strict_promotion(name, dtype):
    """Leaves are nested, scalar, empty or absent; unknown extra args are ignored."""
    tx, params = ALL[name](), tree(dtype)

    @jax.jit
    def run(params):
        def body(carry, message):
            params, state = carry
            updates, state = tx.update(message, state, params, unknown=1, **ABOUT)
            return (optax.apply_updates(params, updates), state), updates

        messages = jax.tree.map(lambda x: jnp.stack([x, x, -3 * x]), params)
        return jax.lax.scan(body, (params, tx.init(params)), messages)

    with jax.numpy_dtype_promotion("strict"):
        (moved, state), updates = run(params)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(
        jnp.result_type, params
    )
    for leaf in jax.tree.leaves((moved, state)):
        assert jnp.isfinite(leaf).all()
    with pytest.raises(AssertionError):
        assert_identical(moved, params)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ALL)
def test_masked_leaves_have_no_state(name):
    tx = optax.masked(ALL[name](), {"a": True, "b": False})
    params = {"a": jnp.ones(2), "b": jnp.ones(5)}
    updates, state = tx.update(params, tx.init(params), params, **ABOUT)
    assert_identical(updates["b"], params["b"])
    assert not any(leaf.shape[-1:] == (5,) for leaf in jax.tree.leaves(state))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ALL)
def test_restored_center_continues_bit_for_bit(name):
    messages = [{"w": g, "b": g[:2]} for g in GRADS[:5]]

    def sent(center, numbers):
        session = center.join("worker-0")
        for sequence, i in enumerate(numbers, start=1):
            session.exchange(
                Submission(
                    sequence, messages[i], anchor_version=max(center.version - 1, 0)
                )
            )
        session.leave()
        return center.save()

    first = {"w": jnp.ones(3), "b": jnp.ones(2)}
    whole = sent(agn_optax.LocalCenter(rule_of(name), first), range(5))
    half = sent(agn_optax.LocalCenter(rule_of(name), first), range(3))
    again = agn_optax.LocalCenter.restore(rule_of(name), half)
    assert_identical(sent(again, range(3, 5)), whole)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ALL)
def test_packed_center_is_equal_bit_for_bit_or_not_packed(name):
    rng = seeded()
    params = {"a": rng.normal(size=(25, 20)), "b": rng.normal(size=70)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    both = [Store(rule_of(name), params, flatten=each) for each in (False, True)]
    assert (both[1].packing is None) == (name in ACROSS)
    for late in (0, 1, 2, 0):
        message = jax.tree.map(
            lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params
        )
        for store in both:
            store.apply(submissions(store.place(message)), [late])
    assert_identical(*(jax.tree.map(np.asarray, store.save()) for store in both))


@pytest.mark.parametrize("name", ALL)
def test_optimizer_runs_on_shards_or_is_rejected(name):
    whole = {"a": jnp.ones((4, 3)), "b": jnp.ones(6)}
    parts = [
        {"a": jnp.ones((2, 3)), "b": None},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(6)},
    ]
    if name not in ACROSS:
        elementwise.check(rule_of(name), whole, parts)
        return
    with pytest.raises(errors.InvalidArgumentError, match="in shards and a rule"):
        elementwise.check(rule_of(name), whole, parts)


def test_delayed_nesterov_with_delay_1_is_nesterov():
    ours, _ = trained(agn_optax.delayed_nesterov(0.5, 0.75, delay=1), GRADS)
    expected, _ = trained(optax.sgd(0.5, 0.75, nesterov=True), GRADS)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.125, 0.25])
def test_delayed_nesterov_of_n_messages_is_a_step_of_their_mean(spread):
    """After each full buffer, the momentum is that of steps on the means.

    With all momentum in the last of N messages (spread 0), the center equals that of
    Nesterov momentum. Otherwise each message carries a part of the earlier momentum.
    """
    tx = agn_optax.delayed_nesterov(0.5, 0.75, delay=4, spread=spread)
    params, state = trained(tx, GRADS)
    means = [sum(GRADS[i : i + 4]) / 4 for i in range(0, 12, 4)]
    sgd = optax.sgd(0.5, 0.75, nesterov=True)
    wanted, expected = trained(sgd, means)
    np.testing.assert_allclose(state.momentum, expected[0].trace, rtol=1e-5)
    if spread == 0.0:
        np.testing.assert_allclose(params, wanted, rtol=1e-5)
    assert int(state.buffered) == 0
    assert not state.buffer.any()


def test_delay_aware_optimizers_converge_where_momentum_overshoots():
    """Four workers send stale messages of one quadratic."""

    def distance(tx, rounds=60):
        tx = optax.with_extra_args_support(tx)

        @jax.jit
        def one(x, state, stale, late):
            updates, state = tx.update(stale, state, x, staleness=late)
            return optax.apply_updates(x, updates), state

        x = jnp.ones(1)
        state, worst = tx.init(x), 0.0
        for _ in range(rounds):
            stale = x  # all four have pulled the same center
            for late in range(4):
                x, state = one(x, state, 0.4 * stale, late)
            worst = max(worst, abs(float(x[0])))
        return worst, abs(float(x[0]))

    plain = distance(optax.sgd(0.7, 0.9, nesterov=True))
    assert plain[0] > 1.0
    for tx in (
        outer.delayed_nesterov(0.7, 0.9, delay=4),
        outer.ordered_momentum(0.7, 0.9, messages=4),
        outer.heloco(0.7, 0.9, messages=4),
    ):
        worst, last = distance(tx)
        assert last < 1e-2
        assert worst < 1.0


def test_delayed_nesterov_center_can_be_saved_and_restored():
    rule = rules.diloco(agn_optax.delayed_nesterov(0.7, 0.9, delay=2))
    center = agn_optax.LocalCenter(rule, jnp.ones(2))
    workers = [agn_optax.Worker(center, optax.sgd(0.1), period=1) for _ in range(2)]
    loops = [worker.start() for worker in workers]
    for _ in range(4):
        for i, worker in enumerate(workers):
            params, state = loops[i]
            updates, state = worker.tx.update(params, state, params)
            loops[i] = worker.exchange(optax.apply_updates(params, updates), state)
    assert center.version == 8
    saved = center.save()
    again = agn_optax.LocalCenter.restore(rule, saved).save()
    assert_identical(again.center_state, saved.center_state)


def test_scale_by_staleness_uses_its_exponent():
    g = jnp.full(3, 8.0)
    for settings, late, wanted in [
        ({}, 3, 2.0),
        ({"exponent": 0.5}, 3, 4.0),
        ({"exponent": 0.0}, 2, 8.0),
    ]:
        tx = agn_optax.scale_by_staleness(**settings)
        moved, _ = tx.update(g, tx.init(g), staleness=late)
        np.testing.assert_allclose(moved, np.full(3, wanted), rtol=1e-6)


def test_multi_steps_as_center_optimizer_is_fedbuff():
    """The center moves once every k messages, by their mean."""
    every = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    rule = dataclasses.replace(rules.downpour(), name="fedbuff", center=every)
    center = agn_optax.LocalCenter(rule, jnp.zeros(1))
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=1)
    params, state = worker.start()
    seen = []
    for step in range(4):
        updates, state = worker.tx.update(jnp.array([1.0 + step]), state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
        seen.append(float(center.pull().params[0]))
    assert seen == [0.0, -1.5, -1.5, -5.0]


def test_momentum_lookahead_matches_its_equations():
    """The center is the lookahead point, and the base point is the one to evaluate."""
    rate, mu = 0.5, 0.75
    tx = outer.momentum_lookahead(rate, mu)
    center = base = np.ones(3, np.float32)
    m, state = np.zeros(3, np.float32), tx.init(jnp.ones(3))
    for g in map(np.asarray, GRADS):
        updates, state = tx.update(g, state)
        center = center + updates
        m = mu * m + (1 - mu) * g
        base = base - rate * (g + mu * m)
        np.testing.assert_allclose(center, base - rate * mu * m, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            outer.evaluated(state, center), base, rtol=1e-4, atol=1e-5
        )


def test_lookahead_of_plain_momentum_is_optax_nesterov():
    """The base point moves by momentum alone."""
    rate, mu = 0.5, 0.75
    base, m = np.zeros(3), np.zeros(3)
    for g in map(np.asarray, GRADS):
        m = mu * m + (1 - mu) * g
        base = base - rate * m
    nesterov, _ = trained(optax.sgd(rate * (1 - mu), mu, nesterov=True), GRADS)
    np.testing.assert_allclose(nesterov, base - rate * mu * m, rtol=1e-4)


def corrected(message, momentum, **settings):
    """Return HeLoCo's corrected message, computed back from its momentum."""
    tx = outer.heloco(1.0, 0.5, **settings)
    message, momentum = jnp.asarray(message), jnp.asarray(momentum)
    state = tx.init(momentum)._replace(momentum=momentum)
    _, after = tx.update(message, state)
    return np.asarray((after.momentum - 0.5 * momentum) / 0.5)


def cosine(a, b):
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def test_heloco_corrects_by_the_angle_to_momentum():
    along, across = np.array([1.0, 0.0], np.float32), np.array([0.1, 1.0], np.float32)
    against = np.array([-1.0, 1.0], np.float32)
    assert_identical(corrected(along, 2 * along), along)
    # Nearly orthogonal: rotated towards momentum, with the same length.
    turned = corrected(across, along)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(across), rel=1e-6)
    assert cosine(turned, along) > cosine(across, along) + 0.1
    # Against momentum: that component shrinks by at most a half; the other stays.
    shrunk = corrected(against, along)
    assert shrunk[1] == against[1]
    r, q = -(0.5**0.5), 2**0.5 / (2**0.5 + 3)
    assert shrunk[0] == pytest.approx(-1 + 0.5 * -r * q)
    # A message much smaller than momentum hardly changes; without momentum, not at all.
    assert cosine(corrected(against, 1e4 * along), against) > 1 - 1e-6
    assert_identical(corrected(against, 0 * along), against)
    np.testing.assert_allclose(corrected(along, along, messages=4), along / 2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
def test_ordered_momentum_of_one_worker_is_optax_sgd_bit_for_bit(momentum, dtype):
    with jax.enable_x64(dtype == "float64"):
        grads = np.asarray(seeded().normal(size=(200, 3)), dtype)

        @functools.partial(jax.jit, static_argnums=0)
        def ends(tx, grads):
            def body(carry, g):
                params, state = carry
                updates, state = tx.update(g, state, params, staleness=0)
                return (optax.apply_updates(params, updates), state), updates

            params = jnp.zeros(3, dtype)
            return jax.lax.scan(body, (params, tx.init(params)), grads)[1]

        plain = optax.with_extra_args_support(optax.sgd(0.5, momentum))
        found = ends(outer.ordered_momentum(0.5, momentum, messages=1), grads)
        assert_identical(found, ends(plain, grads))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999, 1 - 2.0**-20])
def test_ordered_momentum_applies_the_missed_powers_of_late_messages(momentum):
    """It is as exact as float32 even for momentum near 1."""
    tx = outer.ordered_momentum(1.0, momentum, messages=1)
    begun = tx.init(jnp.zeros(()))._replace(applied=jnp.int32(1000))
    for late in (0, 1, 2, 10, 300):
        moved, state = tx.update(jnp.ones(()), begun, staleness=late)
        powers = np.float64(momentum) ** np.arange(late + 1)
        np.testing.assert_allclose(-moved, powers.sum(), rtol=3e-7)
        np.testing.assert_allclose(state.momentum, powers[-1], rtol=2e-6, atol=1e-30)


def test_ordered_momentum_of_one_worker_is_close_to_optax_sgd():
    ours, _ = trained(outer.ordered_momentum(0.5, 0.75, messages=1), GRADS, staleness=0)
    expected, _ = trained(optax.sgd(0.5, 0.75), GRADS)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "arrivals",
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 2, 1, 0, 4, 5, 6, 7],
        [0, 4, 5, 1, 2, 6, 7, 3],  # one worker is five messages late
    ],
)
def test_ordered_momentum_ignores_the_order_of_arrival(arrivals):
    """Two rounds of four messages have a known result.

    Messages 0 to 3 were begun at version 0, and 4 to 7 at versions 1 to 4.
    """
    rate, beta = 0.5, 0.75
    tx = outer.ordered_momentum(rate, beta, messages=4)
    begun = [0, 0, 0, 0, 1, 2, 3, 4]
    params, state = jnp.zeros(3), tx.init(jnp.zeros(3))
    for version, message in enumerate(arrivals):
        late = version - begun[message]
        updates, state = tx.update(GRADS[message], state, params, staleness=late)
        params = optax.apply_updates(params, updates)
    first, second = (np.mean(GRADS[i : i + 4], axis=0) for i in (0, 4))
    u = beta * first + second
    # The momentum step of the third round is applied, too.
    center = -rate * (first + u + beta * u)
    np.testing.assert_allclose(params, center, rtol=1e-4)
    np.testing.assert_allclose(state.momentum, beta * u, rtol=1e-4)


@pytest.mark.parametrize("inner", [optax.sgd(0.5, 0.9), optax.adam(0.1)])
def test_buffered_applies_the_inner_optimizer_to_means(inner):
    alone, _ = trained(outer.buffered(inner, 1), GRADS)
    np.testing.assert_allclose(alone, trained(inner, GRADS)[0], rtol=1e-6)
    ours, state = trained(outer.buffered(inner, 4), GRADS)
    means = [sum(GRADS[i : i + 4]) / 4 for i in range(0, 12, 4)]
    wanted, _ = trained(inner, means)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    assert not state.buffer.any()
    waiting, state = trained(outer.buffered(inner, 4), GRADS[:3])
    assert not waiting.any()
    assert int(state.buffered) == 3


@pytest.mark.parametrize("size", [3, 4])
def test_buffered_messages_equal_a_synchronous_round(size):
    """Workers that begin at one version act the same in a round and one by one."""
    sgd, params, rng = optax.sgd(0.3, momentum=0.9), jnp.ones(500), seeded()
    rounds = Store(rules.diloco(sgd), params)
    one_by_one = Store(rules.diloco(outer.buffered(sgd, size)), params)
    for _ in range(3):
        messages = [np.asarray(rng.normal(size=500), np.float32) for _ in range(size)]
        rounds.apply(submissions(*messages), [0] * size, [1.0] * size)
        for late, message in enumerate(messages):
            one_by_one.apply(submissions(message), [late])
    found = rounds.save().params, one_by_one.save().params
    if size == 4:  # division by 4 is exact
        assert_identical(*found)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def schedule_of(count, workers=4):
    """Return random (worker, version of its anchor) of messages, one by one."""
    rng, anchors, made = seeded(), [0] * workers, []
    for version in range(count):
        worker = int(rng.choice(workers, p=[0.4, 0.3, 0.2, 0.1]))
        made.append((worker, anchors[worker]))
        anchors[worker] = version + 1
    return made


def applied(rule, made, first, message):
    """Return the versions of a center that gets one message after the other."""
    center = agn_optax.LocalCenter(rule, jnp.asarray(first))
    # So that worker 3 has index 3, also if it is not the fourth one to send.
    sessions = [center.join(f"worker-{i}") for i in range(4)]
    versions, sent = [np.asarray(first)], [0] * 4
    for number, (worker, anchor) in enumerate(made):
        sent[worker] += 1
        contribution = message(number, worker, versions[anchor])
        answer = sessions[worker].exchange(
            Submission(sent[worker], jnp.asarray(contribution), anchor)
        )
        versions.append(np.asarray(answer.params))
    return versions


def noisy_gradient(number, worker, center):
    """Return a gradient of a quadratic with the minimum 0 for all workers."""
    noise = np.random.default_rng((number, worker)).normal(size=3)
    return np.float32(0.1 * (center + noise))


def test_rennala_is_the_listing_of_its_paper():
    """Gradients of older iterations are ignored; the others make steps."""
    size, made = 3, schedule_of(60)
    rule = rules.diloco(outer.rennala(optax.sgd(1.0), size))
    versions = applied(rule, made, np.float32([3, -2, 1]), noisy_gradient)

    x, iteration, batch = np.float32([3, -2, 1]), 0, []
    iterations, points, ignored = [0], [x], 0  # after each message
    for number, (worker, anchor) in enumerate(made):
        if iterations[anchor] == iteration:
            batch.append(noisy_gradient(number, worker, points[anchor]))
        else:
            ignored += 1
        if len(batch) == size:
            x, iteration, batch = x - np.mean(batch, axis=0), iteration + 1, []
        iterations.append(iteration)
        points.append(x)
    assert iteration > 5
    assert ignored > 5
    np.testing.assert_allclose(versions, points, rtol=1e-5, atol=1e-6)


def test_inner_optimizer_of_rennala_gets_staleness_in_steps():
    inner = optax.chain(agn_optax.scale_by_staleness(), optax.sgd(1.0))
    tx, one = outer.rennala(inner, 2), jnp.ones(1)
    state = tx.init(one)
    for staleness in (0, 1, 1):  # the last one is from before the step
        updates, state = tx.update(one, state, one, staleness=staleness)
        assert float(updates[0]) == (-1.0 if staleness and state.versions == 0 else 0.0)
    assert int(state.versions) == 1


def ringleader_by_its_phases(made, x, gradient, workers=4):
    """Return the versions of the method, and the largest delay, as it is described."""
    points, steps_at, delay, steps = [x], [0], 0, 0
    table, following = [[] for _ in range(workers)], [[] for _ in range(workers)]
    waiting = None  # in the second phase: workers without a step
    for number, (worker, anchor) in enumerate(made):
        sent = gradient(number, worker, points[anchor]), steps_at[anchor]
        if waiting is not None and worker not in waiting:
            following[worker].append(sent)
        else:
            table[worker].append(sent)
            if waiting is None and all(table):
                waiting = set(range(workers))
            if waiting is not None:
                means = [np.mean([g for g, _ in each], axis=0) for each in table]
                delay = max([delay, *(steps - at for each in table for _, at in each)])
                x, steps = x - np.mean(means, axis=0), steps + 1
                waiting.remove(worker)
                if not waiting:
                    waiting = None
                    table, following = following, [[] for _ in range(workers)]
        points.append(x)
        steps_at.append(steps)
    return points, steps, delay


def test_ringleader_is_the_method_with_its_two_phases():
    made, first = schedule_of(300), np.float32([3, -2, 1])
    wanted, steps, delay = ringleader_by_its_phases(made, first, noisy_gradient)
    rule = rules.diloco(outer.ringleader(optax.sgd(1.0), 4))
    versions = applied(rule, made, first, noisy_gradient)
    np.testing.assert_allclose(versions, wanted, rtol=1e-4, atol=1e-5)
    assert 4 * 5 < steps < 300
    assert 0 < delay <= 2 * 4 - 2


def test_ringleader_converges_with_unlike_data_and_speeds():
    """The worker of each minimum sends 0.4 to 0.1 of the messages."""

    def pulled(number, worker, center):
        return np.float32(0.1 * (center - np.arange(4)[worker]))

    def end(center):
        versions = applied(rules.diloco(center), schedule_of(400), np.ones(1), pulled)
        return float(np.mean(versions[-100:]))

    assert end(outer.ringleader(optax.sgd(0.5), 4)) == pytest.approx(1.5, abs=0.02)
    assert end(optax.sgd(0.5)) < 1.2


def test_combined_message_makes_a_step_of_ringleader_at_once():
    tx, one = outer.ringleader(optax.sgd(0.5), 3), jnp.ones(2)
    state = tx.init(one)
    _, state = tx.update(one, state, one, worker=1)
    updates, after = tx.update(4 * one, state, one, worker=-1)
    assert_identical(updates, -2 * one)
    assert_identical(after, state)


def test_worker_beyond_the_table_of_ringleader_is_rejected():
    rule = rules.diloco(outer.ringleader(optax.sgd(1.0), 2))
    center = agn_optax.LocalCenter(rule, jnp.zeros(1))
    sessions = [center.join(name) for name in ("anna", "bert", "carl")]
    before = center.save()
    with pytest.raises(errors.CenterFullError, match="2 workers, and this is worker"):
        sessions[2].exchange(Submission(1, jnp.ones(1), 0))
    assert_identical(center.save(), before)
    sessions[0].leave()
    assert sessions[1].exchange(Submission(1, jnp.ones(1), 0)).applied
    assert center.join("dora").exchange(Submission(1, jnp.ones(1), 0)).params == -1.0

    tx = outer.ringleader(optax.sgd(1.0), 2)
    with pytest.raises(errors.InvalidArgumentError, match=r"worker must be in \[-1, 2"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)), worker=2)


def test_ringleader_updates_its_table_in_place():
    """One entry is written and read; the table is not copied."""
    tx = outer.ringleader(optax.sgd(1.0), 16)
    params = jnp.zeros(1 << 16)

    def update(message, state, worker):
        return tx.update(message, state, worker=worker)

    state = tx.init(params)
    program = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, 1)
    assert program.compile().memory_analysis().temp_size_in_bytes < 4 * params.nbytes


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_isoloco_makes_singular_values_equal(shape, dtype):
    exact = np.random.default_rng(1).normal(size=shape)
    matrix = jnp.asarray(exact, dtype)
    tx = outer.isoloco(1.0, 0.0)
    updates, _ = tx.update(matrix, tx.init(matrix), matrix)
    u, sigma, v = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    wanted = -sigma.mean() * u @ v
    rtol = 1e-4 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(updates, np.float64), wanted, rtol=rtol, atol=rtol
    )


def test_isoloco_has_the_directions_of_muon():
    """The test compares directions: those of optax have singular values near 1."""
    matrix = jnp.asarray(seeded().normal(size=(6, 9)), jnp.float32)
    ours, muon = outer.isoloco(1.0, 0.0), optax.contrib.scale_by_muon(beta=0.0)
    a = -ours.update(matrix, ours.init(matrix), matrix)[0]
    b = muon.update(matrix, muon.init(matrix), matrix)[0]
    cosine = jnp.sum(a * b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)
    assert 0.97 < float(cosine) <= 1.0


def test_isoloco_is_nesterov_on_other_leaves_and_of_isotropic_matrices():
    nesterov = optax.sgd(0.7, 0.9, nesterov=True)
    grads = [jnp.stack([g, g, 2 * g]) for g in GRADS]  # rank 1 stays as it is
    for each in (GRADS, [g[0] for g in GRADS], [g[None, None] for g in GRADS]):
        start = jnp.zeros_like(each[0])
        ours, _ = trained(outer.isoloco(), each, start)
        assert_identical(ours, trained(nesterov, each, start)[0])
    start = jnp.zeros((3, 3))
    ours, _ = trained(outer.isoloco(), grads, start)
    thirds = [g / 3 for g in grads]  # one singular value of three is not zero
    wanted, _ = trained(nesterov, thirds, start)
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
    still, _ = trained(outer.isoloco(), [start], start)
    assert not still.any()


def test_ringmaster_is_downpour_with_bounded_staleness():
    """Gradients with a delay of R or more steps are ignored."""
    made, bound, rate = schedule_of(80), 3, 0.1
    first = np.float32([3, -2, 1])
    run = ringmaster(bound)
    center = agn_optax.LocalCenter(run.rule, jnp.asarray(first), mode=run.mode)
    workers = [
        agn_optax.Worker(center, optax.sgd(rate), period=1, name=f"worker-{i}")
        for i in range(4)
    ]
    loops = [worker.start() for worker in workers]
    x, steps, ignored = first, 0, 0
    began = [(x, 0)] * 4
    for number, (i, _) in enumerate(made):
        noise = np.random.default_rng(number).normal(size=3).astype(np.float32)
        params, state = loops[i]
        updates, state = workers[i].tx.update(params + noise, state, params)
        params = optax.apply_updates(params, updates)
        loops[i] = workers[i].exchange(params, state)

        point, at = began[i]
        if steps - at < bound:
            x, steps = x - rate * (point + noise), steps + 1
        else:
            ignored += 1
        began[i] = x, steps
        np.testing.assert_allclose(loops[i][0], x, rtol=1e-4, atol=1e-5)
    assert ignored > 5


def test_restart_momentum_resets_momentum_but_not_schedules():
    schedule = optax.linear_schedule(1.0, 0.0, 12)
    for sgd in (
        optax.sgd(schedule, 0.9),
        optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9),
    ):
        ours, _ = trained(outer.restart_momentum(sgd, 4), GRADS)
        wanted = np.zeros(3)
        for i, g in enumerate(map(np.asarray, GRADS)):
            m = g if i % 4 == 0 else 0.9 * m + g  # noqa: F821 set in the first iteration
            wanted = wanted - float(schedule(i)) * m
        np.testing.assert_allclose(ours, wanted, rtol=1e-5)


def test_restart_momentum_resets_all_of_adam():
    ours, _ = trained(outer.restart_momentum(optax.adam(0.1), 6), GRADS)
    half, _ = trained(optax.adam(0.1), GRADS[:6])
    wanted, _ = trained(optax.adam(0.1), GRADS[6:], half)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


def test_restart_momentum_keeps_injected_hyperparameters():
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    tx = outer.restart_momentum(sgd, 1)
    state = tx.init(jnp.zeros(1))
    state.inner_state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    for _ in range(3):
        updates, state = tx.update(jnp.ones(1), state, jnp.zeros(1))
        assert float(updates[0]) == -0.25


def test_restarts_damp_the_oscillation_of_momentum():
    """The momentum is too large for this quadratic."""
    curvature = jnp.array([1.0, 0.01])

    def distance(tx, steps=100):
        def body(carry, _):
            x, state = carry
            updates, state = tx.update(curvature * x, state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.ones(2)
        (x, _), _ = jax.lax.scan(body, (x, tx.init(x)), length=steps)
        return float(jnp.sum(curvature * x * x))

    sgd = optax.sgd(0.5, 0.99, nesterov=True)
    assert distance(outer.restart_momentum(sgd, 20)) < 0.1 * distance(sgd)


def test_schedule_free_works_as_center_optimizer():
    """Workers begin at the center; its average is the point to evaluate."""
    free = optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.9)
    center = agn_optax.LocalCenter(rules.diloco(free), jnp.ones(2))
    worker = agn_optax.Worker(center, optax.sgd(0.2), period=2)
    params, state = worker.start()
    for _ in range(60):
        updates, state = worker.tx.update(params, state, params)
        params, state = worker.exchange(optax.apply_updates(params, updates), state)
    saved = center.save()
    average = optax.contrib.schedule_free_eval_params(saved.center_state, saved.params)
    assert 0 < float(jnp.abs(average).max()) < 0.1
    assert not np.array_equal(average, saved.params)


@pytest.mark.parametrize(
    "state", [optax.sgd(0.1).init(jnp.ones(1)), (outer.heloco().init(jnp.ones(1)),) * 2]
)
def test_evaluated_rejects_states_without_a_single_evaluation_point(state):
    with pytest.raises(errors.InvalidArgumentError, match="one state of"):
        outer.evaluated(state, jnp.ones(1))


def test_scale_by_drift_scales_each_element_by_its_drift():
    """Drift is what the center moved since the message's version, up to the history."""
    tx = outer.scale_by_drift(0.25, history=4)
    message = jnp.array([1.0, 1.0])
    state = tx.init(message)
    centers = [np.array([float(t), 0.0], np.float32) for t in range(6)]
    for t, center in enumerate(centers):
        fresh, after = tx.update(message, state, center, staleness=0)
        assert_identical(fresh, message)
        for late in (1, 2, 3, 9):
            scaled, _ = tx.update(message, state, center, staleness=late)
            since = min(late, t, 3)  # older versions are not kept
            np.testing.assert_allclose(scaled, [1 / (4 * since**2 + 1), 1.0], rtol=1e-6)
        state = after


def stale_workers(center_optimizer, workers=30, rounds=12):
    """Return the center of a quadratic after each round of AGN workers in turn."""
    rule = rules.agn(center_optimizer)
    center = agn_optax.LocalCenter(rule, jnp.ones(4))
    inner = shared.sgd(0.01)
    crew = [agn_optax.Worker(center, inner, period=10) for _ in range(workers)]
    loops = [worker.start() for worker in crew]

    @jax.jit
    def local_steps(params, state):
        def body(carry, _):
            params, state = carry
            updates, state = crew[0].tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, state), length=10)[0]

    found = []
    for _ in range(rounds):
        for i, worker in enumerate(crew):
            loops[i] = worker.exchange(*local_steps(*loops[i]), steps=10)
        found.append(float(jnp.abs(center.pull().params).max()))
    assert crew[-1].staleness == workers - 1
    return found


def test_scale_by_drift_stops_the_divergence_of_agn():
    """With 30 workers and a period of 10, AGN diverges without it."""
    plain = stale_workers(optax.sgd(0.3))
    adaptive = stale_workers(
        optax.chain(outer.scale_by_drift(1e-4, history=30), optax.sgd(0.3))
    )
    few = stale_workers(optax.sgd(0.3), workers=2, rounds=30)
    assert few[-1] < 1e-3
    assert plain[-1] > 1e3
    assert adaptive[-1] < 0.1 < max(adaptive) < 1.0


def test_scale_by_drift_updates_its_history_in_place():
    """One version is written and one is read; the history is not copied."""
    tx = outer.scale_by_drift(history=16)
    params = jnp.zeros(1 << 16)

    def update(message, state, params, late):
        return tx.update(message, state, params, staleness=late)

    state = tx.init(params)
    program = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, params, 1)
    assert program.compile().memory_analysis().temp_size_in_bytes < 4 * params.nbytes


def computed(program):
    """Return the values that a jaxpr and the jaxprs inside it compute."""
    made = []
    for equation in program.eqns:
        made += equation.outvars
        for inner in jaxprs_in_params(equation.params):
            made += computed(inner)
    return made


def float32_in(program):
    """Return the values that a traced program computes in float32."""
    return [value for value in computed(program) if value.aval.dtype == jnp.float32]


FLOAT64 = {
    **ALL,
    "scale_by_weight reference": lambda: agn_optax.scale_by_weight(reference=3.0),
    "scale_by_weight measure": lambda: agn_optax.scale_by_weight(
        lambda weight, steps: weight**2 / steps
    ),
    "scale_by_staleness": lambda: agn_optax.scale_by_staleness(exponent=0.5),
}


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_center_computes_nothing_in_float32(name):
    with jax.enable_x64(True):
        params = {"w": jnp.ones((3, 2), "float64"), "s": jnp.ones((), "float64")}
        rule = dataclasses.replace(rules.diloco(), center=FLOAT64[name]())
        extra_args = rules.extra_arguments(ABOUT)

        def train(params, extra_args):
            state = rule.center.init(params)
            for _ in range(2):
                updates, state = rule.center.update(params, state, params, **extra_args)
                params = optax.apply_updates(params, updates)
            return params, state

        jaxpr = jax.make_jaxpr(train)(params, extra_args)
        assert not float32_in(jaxpr.jaxpr)
        assert not [x for x in jaxpr.consts if x.dtype == jnp.float32]
        kinds = {
            x.dtype for x in jax.tree.leaves(jax.eval_shape(train, params, extra_args))
        }
        assert jnp.dtype("float32") not in kinds


@pytest.mark.parametrize("name", ["momentum_lookahead", "heloco"])
def test_point_to_evaluate_is_as_exact_as_the_center(name):
    """It matches the equations to float64 precision."""
    with jax.enable_x64(True):
        tx, grads = ALL[name](), jnp.asarray(GRADS, "float64")
        center, state = trained(tx, grads[:5], jnp.ones(3, "float64"))
        found = np.asarray(outer.evaluated(state, center))
        assert found.dtype == np.float64
        center = np.asarray(center)
        expected = center + 0.7 * 0.9 * np.asarray(state.momentum)
        np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("codec", ["identity", "cast"])
def test_weighted_mean_of_a_float64_mesh_is_as_exact_as_float64(codec):
    weights, messages = [0.1, 0.2, 0.7], np.stack(np.float64(GRADS[:3]))
    with jax.enable_x64(True):
        codec = codecs.cast("float64") if codec == "cast" else codecs.identity()
        rule = rules.diloco(optax.sgd(1.0), codec=codec)
        tx = agn_optax.exchange_every(optax.sgd(1.0), rule, 1, axis_name="workers")
        params = jnp.zeros(3, "float64")

        def one(message, weight):
            updates, _ = tx.update(message, tx.init(params), params, weight=weight)
            return params + updates

        run = jax.vmap(one, axis_name="workers")
        found = run(jnp.asarray(messages), jnp.asarray(weights))[0]
    expected = -np.average(messages, axis=0, weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.slow
def test_mean_weight_holds_after_more_than_2_to_24_messages():
    """Equal weights count as one, also after more messages than float32 can count."""
    tx = agn_optax.scale_by_weight()
    one = jnp.ones(())

    @jax.jit
    def after(messages):
        def body(_, state):
            return tx.update(one, state, weight=3.0)[1]

        state = jax.lax.fori_loop(0, messages, body, tx.init(one))
        return tx.update(one, state, weight=3.0)[0]

    for messages in (1, 2**12, 2**24, 2**25):
        assert float(after(messages)) == 1.0


def test_scale_by_weight_makes_a_weighted_mean():
    tokens, steps = [100.0, 300.0, 400.0], [10.0, 10.0, 40.0]
    for measure, weights in (
        (None, tokens),
        (lambda t, s: t**2 / s, [t**2 / s for t, s in zip(tokens, steps, strict=True)]),
    ):
        by = agn_optax.scale_by_weight(measure, reference=float(np.mean(weights)))
        tx = optax.chain(by, outer.buffered(optax.sgd(1.0), 3))
        params, state = jnp.zeros(3), tx.init(jnp.zeros(3))
        for g, t, s in zip(GRADS, tokens, steps, strict=False):
            updates, state = tx.update(g, state, params, weight=t, steps=s)
            params = optax.apply_updates(params, updates)
        wanted = -np.average(GRADS[:3], axis=0, weights=weights)
        np.testing.assert_allclose(params, wanted, rtol=1e-5)


def test_scale_by_weight_divides_by_the_mean_weight_so_far():
    tx = agn_optax.scale_by_weight()
    one, state = jnp.ones(1), tx.init(jnp.zeros(1))
    for weight, wanted in ((4.0, 1.0), (2.0, 2 / 3), (6.0, 1.5)):
        scaled, state = tx.update(one, state, weight=weight)
        assert float(scaled[0]) == pytest.approx(wanted)


def test_worker_passes_weight_and_steps_to_the_center():
    by = agn_optax.scale_by_weight(lambda tokens, steps: tokens / steps, reference=64.0)
    rule = rules.diloco(optax.chain(by, shared.sgd(1.0)))
    center = agn_optax.LocalCenter(rule, jnp.zeros(1))
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=2)
    params, state = worker.start()
    for _ in range(2):
        updates, state = worker.tx.update(jnp.ones(1), state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state, weight=16.0)
    # The displacement is 2, scaled by (16 + 16) / 2 / 64.
    assert float(center.pull().params[0]) == -0.5


@pytest.mark.parametrize(("exponent", "wanted"), [(1.0, 4.0), (-1.0, 0.25), (0.5, 2.0)])
def test_scale_by_weight_scales_by_a_power_of_the_steps(exponent, wanted):
    tx = agn_optax.scale_by_weight(
        lambda weight, steps: (steps / 10) ** exponent, reference=1.0
    )
    scaled, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), weight=1.0, steps=40)
    np.testing.assert_allclose(scaled, np.full(2, wanted), rtol=1e-6)


def test_scale_by_turnaround_balances_fast_and_slow_workers():
    """The minima are at -1 and 1; the first worker sends nine times as often."""

    def where(*scale):
        rule = rules.diloco(optax.chain(*scale, optax.sgd(0.04)))
        center = agn_optax.LocalCenter(rule, jnp.zeros(1))
        sessions = [center.join(f"worker-{i}") for i in range(2)]
        anchors, sent, seen = [center.pull()] * 2, [0, 0], []
        for turn in range(400):
            i = int(turn % 10 == 9)
            sent[i] += 1
            message = anchors[i].params - (1.0 if i else -1.0)
            anchors[i] = sessions[i].exchange(
                Submission(sent[i], message, anchor_version=anchors[i].version)
            )
            seen.append(float(anchors[i].params[0]))
        return np.mean(seen[-100:])

    tx = agn_optax.scale_by_turnaround()
    updates, _ = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), staleness=7, workers=4)
    assert float(updates[0]) == 2.0
    assert where() == pytest.approx(-0.8, abs=0.05)
    assert where(agn_optax.scale_by_turnaround(2)) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("tx", "named"),
    [
        (outer.ordered_momentum(messages=2), "staleness"),
        (outer.scale_by_drift(history=2), "params"),
        (outer.restart_momentum(optax.sgd(0.1), 2), "params"),
        (agn_optax.scale_by_weight(), "weight"),
        (agn_optax.scale_by_weight(lambda w, s: w / s), "weight"),
        (agn_optax.scale_by_turnaround(2), "staleness"),
        (agn_optax.scale_by_turnaround(), "workers"),
        (outer.rennala(optax.sgd(0.1), 2), "staleness"),
        (outer.ringleader(optax.sgd(0.1), 2), "worker"),
    ],
)
def test_missing_argument_is_named_in_the_error(tx, named):
    one = jnp.ones(1)
    with pytest.raises(errors.MissingArgumentError, match=named):
        tx.update(one, tx.init(one))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: outer.heloco(momentum=1.5), "momentum must be"),
        (lambda: outer.momentum_lookahead(momentum=1.0), r"\[0, 1\)"),
        (lambda: outer.heloco(messages=0), "messages must be"),
        (lambda: outer.momentum_lookahead(-0.1), "learning_rate must be"),
        (lambda: outer.ordered_momentum(momentum=1.0, messages=2), r"\[0, 1\)"),
        (lambda: outer.ordered_momentum(messages=-1), "messages must be"),
        (lambda: outer.buffered(optax.sgd(0.1), 0), "size must be"),
        (lambda: outer.restart_momentum(optax.sgd(0.1), 0), "every must be"),
        (lambda: outer.rennala(optax.sgd(0.1), 0), "size must be"),
        (lambda: outer.ringleader(optax.sgd(0.1), 0), "workers must be"),
        (lambda: outer.isoloco(momentum=1.0), r"\[0, 1\)"),
        (lambda: outer.isoloco(-1.0), "learning_rate must be"),
        (lambda: outer.scale_by_drift(0.0, history=2), "gamma must be"),
        (lambda: outer.scale_by_drift(history=0), "history must be"),
        (lambda: agn_optax.scale_by_weight(reference=0.0), "reference must be"),
        (lambda: agn_optax.scale_by_turnaround(0), "workers must be"),
        (lambda: agn_optax.delayed_nesterov(delay=0), "delay must be"),
        (lambda: agn_optax.delayed_nesterov(delay=4, spread=0.3), "spread must be"),
        (lambda: agn_optax.delayed_nesterov(momentum=1.5, delay=4), "momentum must be"),
        (lambda: agn_optax.delayed_nesterov(momentum=1, delay=4), r"\[0, 1\)"),
        (lambda: agn_optax.scale_by_staleness(exponent=-1.0), "exponent must be"),
    ],
)
def test_invalid_center_optimizer_settings_are_rejected(make, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        make()
