"""All forms of all rules work under strict dtype promotion in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem
from helpers.support import INNERS, RULES, feeds, gradient, run, run_worker, tree

import agn_optax

rules = pytest.mark.parametrize("rule", RULES)
PERIOD = 2
DTYPE = "bfloat16"


@pytest.fixture(autouse=True)
def strictly():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.few(3)
@rules
def test_drop_in_works_under_strict_promotion(rule):
    params = tree(DTYPE)
    tx = agn_optax.exchange_every(INNERS["adamw"](), RULES[rule](), PERIOD)
    run(tx, params, feeds(params, 2))


@pytest.mark.few(3)
@rules
def test_split_and_round_work_under_strict_promotion(rule):
    params = tree(DTYPE)
    split = agn_optax.phases(INNERS["adam"](), RULES[rule](), center_dtype="float32")

    def local_step(params, state, target):
        updates, state = split.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state, ()

    scanned = agn_optax.scan_round(local_step, split.exchange)
    jax.jit(scanned)(params, split.init(params), feeds(params, PERIOD))


@pytest.mark.slow
@rules
@pytest.mark.parametrize("overlap", [False, True])
def test_worker_works_under_strict_promotion(rule, overlap):
    params = tree(DTYPE)

    center = agn_optax.LocalCenter(
        RULES[rule](),
        params,
        dtype="float32",
        mode=agn_optax.center.Synchronous() if overlap else None,
    )
    inner = INNERS["adam"]()
    worker = agn_optax.Worker(center, inner, period=PERIOD, overlap=overlap)
    loop = worker.start(params)
    loop = run_worker(worker, *loop, feeds(params, 3 * PERIOD))
    worker.flush(*loop)
    assert worker.exchanges == 3


@pytest.mark.slow
@rules
def test_towers_work_under_strict_promotion(rule):
    towers = agn_optax.Towers(4, workers=2)
    params = tree(DTYPE)
    split = agn_optax.phases(
        INNERS["adam"](),
        RULES[rule](),
        axis_name="workers",
        placement=agn_optax.Placement(shard_axis="workers"),
    )
    tx = optax.chain(agn_optax.all_reduce("towers"), split)
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(jnp.dtype(DTYPE))

    def train_step(state, batch):
        params, opt_state = state

        def objective(params):
            losses = batch @ params["layers"][0]["w"] * params["scale"]
            return agn_optax.reduce_loss(
                losses, axis_name="towers", reduction="sum_by_nonzero_weights"
            )

        loss, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = towers.create(lambda params: (params, tx.init(params)), params)
    whole = towers.step(problem.whole_round(train_step, split.exchange))
    batches = towers.shard(problem.stacked([rows] * PERIOD))
    state, losses = whole(state, batches)
    assert towers.towers_agree(state)
    towers.unreplicate(state)
    towers.center_params(state[1])
    towers.mean(losses)


def test_loss_scaling_works_under_strict_promotion():
    params = tree(DTYPE)
    run(agn_optax.loss_scaling(INNERS["momentum"]()), params, feeds(params, 3))
