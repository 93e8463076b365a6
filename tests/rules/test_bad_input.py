"""Invalid input raises an error that says what came and what was expected."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions
from helpers.support import DROP_INS, RULES

import agn_optax
from agn_optax import errors, rules

drop_ins = pytest.mark.parametrize("name", DROP_INS)

PARAMS = {"layers": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2)}]}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def raises(error, *parts):
    """Expect an error whose message has all of ``parts`` in their order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


PERIODS = [
    (0, errors.InvalidArgumentError, "got 0"),
    (-3, errors.InvalidArgumentError, "got -3"),
    (2.5, errors.InvalidArgumentError, "got 2.5"),
    (2.0, errors.InvalidArgumentError, "got 2.0"),
    (True, errors.InvalidTypeError, "got True"),
    (np.True_, errors.InvalidTypeError, "got"),
    (None, errors.InvalidTypeError, "got None"),
    ("3", errors.InvalidTypeError, "got '3'"),
    (np.float32(1.5), errors.InvalidTypeError, "got"),
    (jnp.asarray(0), errors.InvalidArgumentError, "got 0"),
    (jnp.asarray(1.5), errors.InvalidArgumentError, "got 1.5"),
    (jnp.asarray([1, 2]), errors.InvalidTypeError, "got an array int32[2]"),
    (jnp.asarray(True), errors.InvalidTypeError, "got an array bool[]"),
    (jnp.asarray(jnp.inf), errors.InvalidArgumentError, "got inf"),
    (jnp.asarray(1j), errors.InvalidTypeError, "got an array complex64[]"),
    (2**40, errors.InvalidArgumentError, "got 1099511627776"),
    (lambda exchanges: 0, errors.InvalidArgumentError, "got 0"),
    (optax.sgd(0.1), errors.InvalidTypeError, "GradientTransformation"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("period", "error", "came"), PERIODS)
def test_invalid_period_is_rejected(period, error, came):
    rule = rules.downpour()
    with raises(error, "period", "must be a positive int", came):
        agn_optax.exchange_every(optax.sgd(0.1), rule, period)
    center = agn_optax.LocalCenter(rule, PARAMS)
    with raises(error, "period", "must be a positive int", came):
        agn_optax.Worker(center, optax.sgd(0.1), period=period)


@drop_ins
@pytest.mark.parametrize("period", [0, True])
def test_every_drop_in_rejects_invalid_period(name, period):
    with raises(errors.InvalidArgumentError, "period must be a positive int, got"):
        DROP_INS[name](optax.sgd(0.1), period)


@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.01, float("nan"), float("inf")])
@pytest.mark.parametrize("array", [False, True])
def test_moving_rate_out_of_range_is_rejected(rate, array):
    rate = jnp.asarray(rate, jnp.float32) if array else rate
    with raises(errors.InvalidArgumentError, "moving_rate must be a number in (0, 1]"):
        rules.easgd(rate)
    with raises(errors.InvalidArgumentError, "moving_rate must be a number in (0, 1]"):
        agn_optax.easgd(optax.sgd(0.1), 3, moving_rate=rate)


@pytest.mark.parametrize("rate", [True, "0.5", jnp.ones(2), jnp.asarray(True)])
def test_moving_rate_of_wrong_type_is_rejected(rate):
    with raises(errors.InvalidTypeError, "moving_rate must be a number in (0, 1], got"):
        rules.easgd(rate)


@pytest.mark.parametrize("rho", [-0.1, float("inf"), float("nan")])
def test_rho_out_of_range_is_rejected(rho):
    with raises(errors.InvalidArgumentError, "rho must be a number in [0, inf)"):
        agn_optax.easgd(optax.sgd(0.1), 3, moving_rate=0.5, rho=rho)


def test_easgd_default_rate_needs_num_workers_and_constant_period():
    with raises(errors.InvalidArgumentError, "moving_rate or num_workers"):
        agn_optax.easgd(optax.sgd(0.1), 3, axis_name="workers")
    with raises(errors.InvalidArgumentError, "moving_rate", "schedule"):
        agn_optax.easgd(optax.sgd(0.1), lambda exchanges: 3)


@pytest.mark.parametrize("workers", [0, -1, 2.0, True])
def test_invalid_num_workers_is_rejected(workers):
    with raises(errors.InvalidArgumentError, "num_workers must be a positive int, got"):
        agn_optax.easgd(optax.sgd(0.1), 3, num_workers=workers)


@drop_ins
@pytest.mark.parametrize("inner", [None, optax.sgd, 0.1, "adam", (1, 2)])
def test_invalid_inner_optimizer_is_rejected(name, inner):
    with raises(
        errors.InvalidTypeError, "inner must be an optax.GradientTransf", "got"
    ):
        DROP_INS[name](inner, 3)


def test_uncalled_inner_optimizer_error_says_to_call_it():
    with raises(errors.InvalidTypeError, "got function sgd; call it first"):
        agn_optax.agn(optax.sgd, 3)
    with raises(errors.InvalidTypeError, "got function adam; call it first"):
        agn_optax.Worker(
            agn_optax.LocalCenter(rules.downpour(), PARAMS), optax.adam, period=3
        )


@pytest.mark.parametrize("center", [optax.sgd, 0.1, "sgd"])
def test_invalid_center_optimizer_is_rejected(center):
    with raises(errors.InvalidTypeError, "center of rule 'agn'", "got"):
        rules.agn(center)
    with raises(errors.InvalidTypeError, "center of rule 'diloco'", "got"):
        agn_optax.diloco(optax.sgd(0.1), 3, center=center)


@pytest.mark.parametrize("rule", [None, rules.downpour, "agn"])
def test_invalid_rule_is_rejected(rule):
    for call in (
        lambda: agn_optax.exchange_every(optax.sgd(0.1), rule, 3),
        lambda: agn_optax.phases(optax.sgd(0.1), rule),
        lambda: agn_optax.LocalCenter(rule, PARAMS),
    ):
        with raises(errors.InvalidTypeError, "rule must be a record", "got"):
            call()


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_non_floating_dtypes_are_rejected(dtype):
    with raises(errors.InvalidArgumentError, "dtype must be a floating dtype", dtype):
        agn_optax.accumulate(dtype=dtype)
    with raises(errors.InvalidArgumentError, "center_dtype", "floating", dtype):
        agn_optax.average(optax.sgd(0.1), 3, center_dtype=dtype)
    with raises(errors.InvalidArgumentError, "dtype must be a floating dtype", dtype):
        agn_optax.LocalCenter(rules.average(), PARAMS, dtype=dtype)


def test_unknown_dtype_name_is_rejected():
    with raises(errors.InvalidTypeError, "dtype must be a floating dtype", "'float33'"):
        agn_optax.accumulate(dtype="float33")


@drop_ins
def test_drop_in_update_needs_params(name):
    tx = DROP_INS[name](optax.sgd(0.1), 3)
    state = tx.init(PARAMS)
    with raises(errors.MissingArgumentError, "needs the current parameters", "None"):
        tx.update(GRADS, state)


def test_exchange_and_worker_need_params():
    split = agn_optax.phases(optax.sgd(0.1), rules.downpour())
    with raises(errors.MissingArgumentError, "downpour", "params=None"):
        split.exchange(None, split.init(PARAMS))
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=3, name="anna")
    params, state = worker.start()
    with raises(errors.MissingArgumentError, "worker.tx", "params=None"):
        worker.tx.update(GRADS, state)
    with raises(errors.MissingArgumentError, "elastic_pull", "params=None"):
        agn_optax.elastic_pull(0.1).update(params, optax.EmptyState(), center=params)


MISFITS = {
    "a leaf too few": ({"layers": [{"w": jnp.ones((3, 2))}]}, "['b']"),
    "a None for a leaf": (
        {"layers": [{"w": jnp.ones((3, 2)), "b": None}]},
        "['b']",
    ),
    "a leaf too many": (
        {"layers": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2), "z": jnp.ones(1)}]},
        "['z']",
    ),
    "another name": (
        {"layers": [{"w": jnp.ones((3, 2)), "c": jnp.ones(2)}]},
        "['layers'][0]['c']",
    ),
    "another shape": (
        {"layers": [{"w": jnp.ones((3, 3)), "b": jnp.ones(2)}]},
        "has ['layers'][0]['w'] float32[3, 3], where",
    ),
    "one layer more": ({"layers": PARAMS["layers"] * 2}, "['layers'][1]"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@drop_ins
def test_gradients_of_wrong_tree_are_rejected(name, misfit):
    grads, path = MISFITS[misfit]
    tx = DROP_INS[name](optax.sgd(0.1), 3)
    with raises(errors.TreeMismatchError, "grads", path):
        tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("misfit", MISFITS)
def test_params_of_wrong_tree_are_rejected(misfit):
    params, path = MISFITS[misfit]
    tx = agn_optax.agn(optax.sgd(0.1), 3)
    with raises(errors.TreeMismatchError, "params", path):
        tx.update(params, tx.init(PARAMS), params)
    split = agn_optax.phases(optax.sgd(0.1), rules.average())
    with raises(errors.TreeMismatchError, "params", path):
        split.exchange(params, split.init(PARAMS))


@pytest.mark.parametrize("misfit", MISFITS)
def test_worker_params_of_wrong_tree_are_rejected(misfit):
    params, path = MISFITS[misfit]
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1)
    with raises(errors.TreeMismatchError, "params", path):
        worker.start(params)
    with raises(errors.TreeMismatchError, "contribution", path):
        sessions.exchange(center, params, anchor_version=0, worker="w")
    assert center.version == 0


@pytest.mark.parametrize("tree", ["x", {"x": jnp.ones(2)}])
def test_leaf_in_place_of_tree_is_rejected(tree):
    tx = agn_optax.agn(optax.sgd(0.1), 3)
    params = jnp.ones(2)
    if tree == "x":
        with raises(errors.TreeMismatchError, "grads", "params has ['x']"):
            tx.update(params, tx.init({"x": params}), {"x": params})
    else:
        with raises(errors.TreeMismatchError, "grads has ['x']"):
            tx.update(tree, tx.init(params), params)


def test_different_containers_are_rejected():
    tx = agn_optax.agn(optax.sgd(0.1), 3)
    params = [jnp.ones(1), jnp.ones(2)]
    with raises(errors.TreeMismatchError, "grads and params", "different containers"):
        tx.update(tuple(params), tx.init(params), params)
    with raises(errors.TreeMismatchError, "params and center are different trees"):
        agn_optax.center_params(tx.init(params), {"other": params})


@pytest.mark.parametrize("leaf", ["hello", object()])
def test_leaf_that_is_not_an_array_is_rejected(leaf):
    with raises(errors.TreeMismatchError, "params['w'] has dtype", "floating"):
        agn_optax.agn(optax.sgd(0.1), 3).init({"w": leaf})


def test_float64_without_x64_is_rejected():
    with raises(errors.InvalidArgumentError, "float64 needs", "jax_enable_x64"):
        agn_optax.average(optax.sgd(0.1), 3, center_dtype="float64")


@pytest.mark.parametrize(
    ("field", "value"), [("combine", "max"), ("adopts", "Before"), ("center", None)]
)
def test_invalid_rule_field_is_rejected(field, value):
    with raises(errors.InvalidArgumentError, f"{field} of rule 'average'", "got"):
        dataclasses.replace(rules.average(), **{field: value})


def test_penalty_with_state_is_rejected():
    rule = dataclasses.replace(rules.average(), penalty=optax.trace(0.9))
    with raises(errors.InvalidArgumentError, "penalty of rule 'average'", "stateless"):
        agn_optax.exchange_every(optax.sgd(0.1), rule, 3).init(PARAMS)


def test_combinators_reject_wrong_tree():
    tx = agn_optax.accumulate()
    with raises(errors.TreeMismatchError, "updates", "['layers']"):
        tx.update(jnp.ones(2), tx.init(PARAMS))
    tx = agn_optax.elastic_pull(0.1)
    with raises(errors.TreeMismatchError, "center", "['layers']"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, center=jnp.ones(2))


@pytest.mark.parametrize(
    "bad", [jnp.arange(3), jnp.ones(3, bool), jnp.ones(3, jnp.complex64)], ids=str
)
@drop_ins
def test_leaves_that_are_not_real_floats_are_rejected(name, bad):
    params = {"fine": jnp.ones(2), "bad": bad}
    tx = DROP_INS[name](optax.sgd(0.1), 3)
    with raises(errors.TreeMismatchError, "params['bad'] has dtype", "floating"):
        tx.init(params)
    good = {"fine": jnp.ones(2), "bad": jnp.ones(3)}
    with raises(errors.TreeMismatchError, "grads['bad'] has dtype", "floating"):
        tx.update(params, tx.init(good), good)
    if name in RULES:
        with raises(errors.TreeMismatchError, "params['bad'] has dtype", "floating"):
            agn_optax.LocalCenter(RULES[name](), params)


@drop_ins
def test_unbound_axis_is_rejected(name):
    extra = {"num_workers": 2} if name.startswith("easgd") else {}
    tx = DROP_INS[name](optax.sgd(0.1), 3, axis_name="workers", **extra)
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        with raises(errors.UnboundAxisError, "axis_name 'workers' is not bound"):
            update(GRADS, state, PARAMS)
    split = agn_optax.phases(optax.sgd(0.1), rules.average(), axis_name="workers")
    with raises(errors.UnboundAxisError, "axis_name 'workers' is not bound"):
        split.exchange(PARAMS, split.init(PARAMS))


def test_missing_or_negative_extra_arguments_are_rejected():
    tx = agn_optax.elastic_pull(0.1)
    with raises(errors.MissingArgumentError, "elastic_pull", "center"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)
    tx = agn_optax.scale_by_staleness()
    with raises(errors.MissingArgumentError, "scale_by_staleness", "staleness"):
        tx.update(GRADS, tx.init(PARAMS))
    for staleness in (-1, np.int32(-1), jnp.asarray(-1)):
        with raises(errors.InvalidArgumentError, "staleness", "-1"):
            tx.update(GRADS, tx.init(PARAMS), staleness=staleness)


def test_errors_have_one_base_class_and_are_documented():
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.AgnOptaxError)
        assert name in errors.__doc__
