"""The properties that every optax optimizer has, tested for every drop-in."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers.support import (
    DROP_INS,
    assert_close,
    assert_identical,
    feeds,
    gradient,
    nothing_compiles,
    run,
    tree,
)

import agn_optax

drop_ins = pytest.mark.parametrize("name", DROP_INS)
# Wrappers do not depend on the rule; these have the most different states: a sum of
# gradients, the momentum of a center optimizer, and an anchor.
some_drop_ins = pytest.mark.parametrize("name", ["agn", "diloco", "easgd_rho"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@functools.cache
def make(name, inner=None, period=3):
    """Return one cached object for all tests, which then share compiled programs."""
    return DROP_INS[name](inner or optax.adam(0.05), period)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@drop_ins
def test_drop_in_converges(name):
    target = {"w": jnp.array([1.0, -1.0, 2.0]), "b": jnp.asarray(3.0)}
    params = jax.tree.map(jnp.zeros_like, target)
    tx = make(name, optax.sgd(0.1))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params, target), state, params)
        return (optax.apply_updates(params, updates), state), ()

    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=3000))(
        (params, tx.init(params))
    )
    assert_close(params, target, tolerance=1e-3)
    assert_close(agn_optax.center_params(state), target, tolerance=1e-3)


@pytest.mark.few(3)
@drop_ins
def test_ignores_unknown_extra_arguments(name):
    params = tree()
    tx = make(name)
    grads = gradient(params, tree(seed=1))
    plain = tx.update(grads, tx.init(params), params)
    extra = tx.update(grads, tx.init(params), params, unexpected=1, value=2.0)
    assert_identical(extra, plain)


@drop_ins
def test_passes_extra_arguments_to_the_inner_optimizer(name):
    seen = {}

    def update(updates, state, params=None, *, value, other, **extra_args):
        seen.update(value=value, other=other)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = make(name, inner)
    params = jnp.ones(2)
    tx.update(jnp.ones(2), tx.init(params), params, value=7, other=8)
    assert seen == {"value": 7, "other": 8}


@pytest.mark.few(3)
@drop_ins
@dtypes
def test_does_not_recompile_on_the_second_call(name, dtype):
    params = tree(dtype)
    tx = make(name)
    target = tree(dtype, seed=1)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    loop = step(params, state)
    with nothing_compiles():
        for _ in range(4):  # one of them exchanges
            loop = step(*loop)
    assert types(loop) == types((params, state))


@pytest.mark.slow
@drop_ins
@dtypes
def test_dtypes_and_weak_types_are_stable(name, dtype):
    params = tree(dtype)
    tx = make(name)
    target = tree(dtype, seed=1)
    state = tx.init(params)
    expected = types(state)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    moved, compiled = params, jax.jit(tx.update)
    for _ in range(4):
        updates, state = compiled(gradient(moved, target), state, moved)
        assert types(state) == expected
        assert types(updates) == types(params)
        moved = optax.apply_updates(moved, updates)

    def update(state, params=params):
        return tx.update(gradient(params, target), state, params)[1]

    def all_transformed(state, taken):
        many = jax.tree.map(lambda x: jnp.stack([x, x]), (state, params))
        batched = jax.vmap(update)(*many)
        yield jax.lax.scan(lambda s, _: (update(s), ()), state, length=4)[0]
        yield jax.lax.cond(taken, update, lambda s: s, state)
        yield jax.tree.map(lambda x: x[0], batched)

    for transformed in jax.eval_shape(lambda *a: [*all_transformed(*a)], state, True):
        assert types(transformed) == expected


@some_drop_ins
@pytest.mark.few(1)
def test_vmap_runs_independent_workers(name):
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree())
    targets = feeds(tree(), 7, workers=(2,))
    tx = make(name)
    both = jax.jit(jax.vmap(lambda p, f: run(tx, p, f)[1], in_axes=(0, 1)))(
        params, targets
    )
    for i in range(2):
        alone = run(
            tx,
            jax.tree.map(lambda x: x[i], params),  # noqa: B023
            jax.tree.map(lambda f: f[:, i], targets),  # noqa: B023
        )[1]
        assert_close(jax.tree.map(lambda x: x[i], both), alone)  # noqa: B023


@some_drop_ins
def test_works_in_masked(name):
    params = {"trained": jnp.ones(3), "frozen": jnp.ones(2)}
    mask = {"trained": True, "frozen": False}
    tx = optax.chain(
        optax.masked(make(name), mask),
        optax.masked(optax.set_to_zero(), {"trained": False, "frozen": True}),
    )
    targets = feeds(params, 7)
    _, last, state = run(tx, params, targets)
    alone = run(
        make(name), {"trained": params["trained"]}, {"trained": targets["trained"]}
    )
    assert_identical(last["frozen"], params["frozen"])
    assert_close(last["trained"], alone[1]["trained"])
    center = agn_optax.center_params(state)
    assert isinstance(center["frozen"], optax.MaskedNode)
    filled = agn_optax.center_params(state, last)
    assert_identical(filled["frozen"], params["frozen"])
    assert_identical(filled["trained"], center["trained"])


@some_drop_ins
def test_works_in_multi_transform(name):
    params = {"trained": jnp.ones(3), "b": jnp.ones(2)}
    tx = optax.multi_transform(
        {"rare": make(name), "often": optax.sgd(0.1)},
        {"trained": "rare", "b": "often"},
    )
    targets = feeds(params, 7)
    _, last, state = run(tx, params, targets)
    alone = run(
        make(name), {"trained": params["trained"]}, {"trained": targets["trained"]}
    )
    assert_close(last["trained"], alone[1]["trained"])
    assert_close(agn_optax.center_params(state)["trained"], alone[2].center["trained"])


@some_drop_ins
@pytest.mark.few(1)
def test_works_in_multi_steps(name):
    params = tree()
    tx = optax.MultiSteps(make(name), every_k_schedule=2)
    _, last, state = run(tx, params, feeds(params, 12))
    assert int(state.inner_opt_state.exchanges) == 2
    assert np.isfinite(last["scale"])
    assert_close(agn_optax.center_params(state), state.inner_opt_state.center)


@some_drop_ins
@pytest.mark.parametrize("static", [(), ("period",)])
@pytest.mark.few(1)
def test_works_in_inject_hyperparams(name, static):
    if name == "easgd_rho":
        factory, hyperparameters = agn_optax.easgd, {"rho": 0.1}
    else:
        factory, hyperparameters = DROP_INS[name], {}
    injected = optax.inject_hyperparams(factory, static_args=static)(
        optax.adam(0.05), 3, **hyperparameters
    )
    params = tree()
    targets = feeds(params, 7)
    actual, _, state = run(injected, params, targets)
    expected, _, plain = run(make(name), params, targets)
    assert_close(actual, expected)
    assert_close(agn_optax.center_params(state), plain.center)


def test_every_setting_of_easgd_can_be_injected():
    injected = optax.inject_hyperparams(agn_optax.easgd)
    params = tree()
    targets = feeds(params, 7)
    for settings in (
        {"num_workers": 4},
        {"moving_rate": 1},
        {"moving_rate": 0.5, "rho": 1},
    ):
        tx = injected(optax.sgd(0.1), 3, **settings)
        expected = run(agn_optax.easgd(optax.sgd(0.1), 3, **settings), params, targets)
        assert_close(run(tx, params, targets)[1], expected[1])


def test_static_period_schedule_works_in_inject_hyperparams():
    injected = optax.inject_hyperparams(agn_optax.easgd, static_args="period")

    def period(exchanges):
        return jnp.where(exchanges == 0, 4, 2)

    tx = injected(optax.sgd(0.1), period, moving_rate=0.5)
    params = jnp.ones(2)
    _, _, state = run(tx, params, np.zeros((9, 2), np.float32))
    assert int(state.inner_state.exchanges) == 3  # after 4, 6 and 8 steps


def test_injected_moving_rate_schedule_is_followed():
    rate = optax.linear_schedule(0.5, 0.1, transition_steps=6)
    tx = optax.inject_hyperparams(agn_optax.easgd)(optax.sgd(0.1), 3, moving_rate=rate)
    params = jnp.asarray(1.0)
    state = tx.init(params)
    center = params
    for i in range(6):
        updates, state = tx.update(params, state, params)
        stepped = params - 0.1 * params
        params = optax.apply_updates(params, updates)
        if (i + 1) % 3 == 0:
            pull = rate(i) * (stepped - center)
            np.testing.assert_allclose(params, stepped - pull, rtol=1e-6)
            center = center + pull
            np.testing.assert_allclose(
                agn_optax.center_params(state), center, rtol=1e-6
            )


def test_injected_period_schedule_counts_steps():
    """Under inject_hyperparams a callable is a schedule of steps, not of exchanges."""
    period = lambda step: jnp.where(step < 4, 1, 3)  # noqa: E731
    tx = optax.inject_hyperparams(agn_optax.downpour)(optax.sgd(0.1), period)
    params = jnp.ones(2)
    _, _, state = run(tx, params, np.zeros((10, 2), np.float32))
    assert int(state.inner_state.exchanges) == 4 + 2


@some_drop_ins
def test_works_with_map_params(name):
    params = tree()
    tx = make(name)
    state = tx.init(params)
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert_identical(
        agn_optax.center_params(doubled), jax.tree.map(lambda x: x + 1, params)
    )
    assert_identical(doubled.exchanges, state.exchanges)
    specs = optax.tree.map_params(
        tx, lambda _: "params", state, transform_non_params=lambda _: "other"
    )
    assert set(jax.tree.leaves(specs.center)) == {"params"}
    assert specs.exchanges == specs.local.local_steps == "other"


@some_drop_ins
def test_state_fields_are_found_by_optax_tree_get(name):
    state = make(name, optax.sgd(0.1)).init(tree())
    for field in ("center", "exchanges", "local_steps", "anchor"):
        optax.tree.get(state, field)  # raises if a name occurs twice


@pytest.mark.few(3)
@drop_ins
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_params_and_state_can_both_be_donated(name):
    params = tree()
    tx = make(name)
    expected = run(tx, params, feeds(params, 7))[1]
    targets = feeds(params, 7)

    def step(params, state, target):
        updates, state = tx.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    loop = (jax.tree.map(jnp.copy, params), tx.init(params))
    first = loop
    for i in range(7):
        loop = donating(*loop, jax.tree.map(lambda f: f[i], targets))  # noqa: B023
    assert first[0]["scale"].is_deleted()
    assert_close(loop[0], expected)


@drop_ins
@dtypes
def test_init_copies_what_it_keeps(name, dtype):
    """Donating the parameters leaves the state whole, and the other way round."""
    params = {"w": jnp.ones(4, dtype)}
    state = make(name).init(params)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size > 1}
    assert len(pointers) == len([x for x in jax.tree.leaves(state) if x.size > 1])
    assert params["w"].unsafe_buffer_pointer() not in pointers


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 1


@some_drop_ins
@pytest.mark.few(1)
def test_works_in_flax_train_state(name):
    model = Linear()
    params = model.init(jax.random.key(0), X)["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=make(name, optax.sgd(0.05))
    )

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, X) - Y) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(300):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    center = agn_optax.center_params(state.opt_state)
    assert jnp.mean((model.apply({"params": center}, X) - Y) ** 2) < 0.3 * losses[0]


@some_drop_ins
@pytest.mark.few(1)
def test_works_in_nnx_optimizer(name):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(name, optax.sgd(0.05)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(300)]
    assert losses[-1] < 0.2 * losses[0]
    center = agn_optax.center_params(optimizer.opt_state)
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    averaged = nnx.merge(graph, nnx.state(model, nnx.Param), rest)
    nnx.update(averaged, center)
    assert jnp.mean((averaged(X) - Y) ** 2) < 0.3 * losses[0]


# `Rule` makes rules. The others run on a mesh by `exchange_every`, or only in rounds.
WITHOUT_DROP_IN = ("Rule", "decoupled_diloco", "moments")


def test_drop_ins_have_the_same_signature():
    for name, factory in agn_optax.rules.__dict__.items():
        if name not in agn_optax.rules.__all__ or name in WITHOUT_DROP_IN:
            continue
        drop_in = getattr(agn_optax, name)
        parameters = inspect.signature(drop_in).parameters
        assert list(parameters)[:2] == ["inner", "period"]
        keywords = {
            key
            for key, p in parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert set(parameters) - keywords == {"inner", "period"}
        assert {"axis_name", "center_dtype"} <= keywords
        # Every setting of the rule is also a setting of the drop-in.
        assert set(inspect.signature(factory).parameters) <= keywords
