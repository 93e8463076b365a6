"""Loss scaling: one bad gradient anywhere makes every tower skip the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, support

import agn_optax
from agn_optax import errors


def scaled_step(tx):
    def step(state, batch):
        params, opt_state = state
        data, poison = batch

        def loss(params):
            return problem.loss(params, data) * agn_optax.loss_scale(opt_state)

        grads = jax.grad(loss)(params)
        grads["s"] = grads["s"] + poison[0]
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return step


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["data parallel", "independent", "islands"])
def test_one_bad_gradient_skips_the_step_on_every_tower(mode):
    """It is neither recorded nor counted, as if the batch did not exist."""
    workers = {"data parallel": 1, "independent": 4, "islands": 2}[mode]
    towers = agn_optax.Towers(4, workers=workers)
    data, bad = problem.batches(7), {2: np.inf, 4: np.nan}
    own = problem.agn(optax.adam(0.05), period=2)
    axes = ("workers", "towers")
    tx = optax.chain(
        agn_optax.all_reduce("towers"), agn_optax.loss_scaling(own, axis_name=axes)
    )
    step = towers.step(scaled_step(tx))
    state = towers.create(lambda p: (p, tx.init(p)), problem.params())
    clean = np.zeros(16, np.float32)
    for i, batch in enumerate(data):
        poison = clean.copy()
        if i in bad:
            poison[4 * 2] = bad[i]  # only on tower 2
        before = jax.tree.map(np.asarray, state)
        state, _ = step(state, towers.shard((batch, poison)))
        if i in bad:
            for was, now in ((before[0], state[0]), (before[1][1][3], state[1][1][3])):
                support.assert_identical(jax.tree.map(np.asarray, now), was)
    good = [batch for i, batch in enumerate(data) if i not in bad]
    expected, _ = problem.reference(own, good, problem.params(), workers)
    support.assert_close(problem.of_workers(towers, state[0]), expected[0])
    scaling = towers.unreplicate(state[1][1])
    assert scaling.skipped == len(bad)
    assert scaling.scale == 2.0**13
    assert scaling.good_steps == 2


def test_scale_falls_to_the_minimum_and_grows_again():
    tx = agn_optax.loss_scaling(
        optax.sgd(1.0),
        initial_scale=8.0,
        growth_interval=3,
        factor=2.0,
        min_scale=2.0,
        max_scale=16.0,
    )
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros(2))
    scales = []
    for gradient in [jnp.inf] * 5 + [1.0] * 12 + [jnp.nan, 1.0, 1.0, 1.0]:
        updates, state = update(jnp.array([1.0, gradient]), state)
        assert np.isfinite(updates).all()
        scales.append(float(state.scale))
    assert scales == (
        [4.0] + [2.0] * 4 + [2.0, 2.0] + [4.0] * 3 + [8.0] * 3 + [16.0] * 4
    ) + [8.0, 8.0, 8.0, 16.0]
    assert state.skipped == 6


def test_scaling_preserves_small_float16_gradients():
    """The float16 gradient of x * w is zero for small numbers unless it is scaled."""
    x = jnp.full(4, 1e-8, jnp.float32)
    tx = agn_optax.loss_scaling(optax.sgd(1.0), initial_scale=2.0**15)
    state = tx.init(x)

    def loss(params, scale):
        half = params.astype(jnp.float16)  # its gradient passes through float16
        return (half.astype(jnp.float32) * x).sum() * scale

    plain = jax.grad(loss)(jnp.ones(4), 1.0)
    np.testing.assert_array_equal(plain, 0.0)
    scaled = jax.grad(loss)(jnp.ones(4), agn_optax.loss_scale(state))
    updates, _ = tx.update(scaled, state)
    np.testing.assert_allclose(updates, -1e-8, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "min_scale"),
        ({"factor": 1.0}, "factor"),
        ({"initial_scale": 0.5}, "initial_scale"),
        ({"initial_scale": float("inf")}, "initial_scale"),
        ({"max_scale": 0.5}, "max_scale"),
        ({"growth_interval": 0}, "growth_interval must be a positive int"),
    ],
)
def test_invalid_loss_scaling_options_are_rejected(options, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        agn_optax.loss_scaling(optax.sgd(0.1), **options)


def test_invalid_loss_scaling_calls_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="found 0 in"):
        agn_optax.loss_scale(optax.sgd(0.1).init(jnp.zeros(2)))
    with pytest.raises(errors.InvalidTypeError, match="inner"):
        agn_optax.loss_scaling(None)
    tx = agn_optax.loss_scaling(optax.sgd(0.1), axis_name="towers")
    with pytest.raises(errors.UnboundAxisError):
        tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))


def test_split_form_works_inside_loss_scaling():
    """Wrappers use phases() as an optimizer, and its exchange finds its own state."""
    rule = agn_optax.rules.agn(optax.sgd(0.5))
    split = agn_optax.phases(optax.sgd(0.1), rule)
    tx = optax.chain(optax.clip(10.0), agn_optax.loss_scaling(split, initial_scale=2.0))
    params = jnp.array([1.0])
    state = tx.init(params)
    for gradient in (2.0, jnp.inf, 4.0):
        updates, state = tx.update(jnp.array([gradient]), state, params)
        params = optax.apply_updates(params, updates)
    params, state = split.exchange(params, state)
    # inf is clipped to 10 before loss_scaling sees it, so three steps count.
    np.testing.assert_allclose(params, 1.0 - 0.5 * (2 + 10 + 4) / 2 / 3, rtol=1e-6)
    assert state[1].inner_state.exchanges == 1


@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.adam(0.1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inner_optimizer_gets_float32_gradients_of_narrow_params(inner, dtype):
    """The inner optimizer's state and the updates keep the narrow dtype."""
    params = jnp.ones(2, dtype)
    tx = agn_optax.loss_scaling(inner, initial_scale=2.0**15)
    for grads in (jnp.full(2, 3e-4, dtype), jnp.full(2, 3e-4, jnp.float32)):
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert updates.dtype == dtype
        expected = jax.tree.map(jnp.result_type, tx.init(params))
        assert jax.tree.map(jnp.result_type, state) == expected
    if dtype == "float16":
        # 3e-4 / 2**15 is zero in float16, but not in float32.
        seen = agn_optax.loss_scaling(
            optax.chain(optax.scale(2.0**15), optax.sgd(1.0)), initial_scale=2.0**15
        )
        updates, _ = seen.update(jnp.full(2, 3e-4, dtype), seen.init(params), params)
        np.testing.assert_allclose(updates, -3e-4, rtol=1e-2)


def test_loss_scaling_accepts_python_numbers():
    tx = agn_optax.loss_scaling(optax.sgd(1.0), initial_scale=2.0)
    updates, _ = tx.update({"w": 4.0}, tx.init({"w": jnp.zeros(())}))
    assert updates["w"] == -2.0


def test_delayed_gradients_are_divided_by_their_own_scale():
    """Each gradient is divided by the scale that it was computed with."""
    tx = agn_optax.loss_scaling(
        optax.chain(agn_optax.all_reduce("towers", delay=1), optax.sgd(1.0)),
        initial_scale=2.0,
        growth_interval=2,
        axis_name="towers",
    )

    def run(x):
        state, seen = tx.init(x), []
        for _ in range(6):
            grads = jnp.ones_like(x) * agn_optax.loss_scale(state)
            updates, state = tx.update(grads, state)
            seen.append(updates)
        return jnp.stack(seen)

    updates = jax.vmap(run, axis_name="towers")(jnp.zeros(2))
    np.testing.assert_array_equal(updates, np.tile([0, -1, -1, -1, -1, -1], (2, 1)))


def test_loss_scaling_needs_the_axes_of_its_inner_optimizer():
    """Members that do not skip would wait for the others forever."""
    towers = agn_optax.Towers(4, workers=4)
    tx = agn_optax.loss_scaling(problem.agn(optax.sgd(0.1), period=3))
    with pytest.raises(errors.InvalidArgumentError, match="over 'workers', and if"):
        problem.train(towers, tx, problem.batches(1), problem.params())
