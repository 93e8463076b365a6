"""Towers: meshes, replicas, and saved state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, support
from jax.sharding import AxisType, Mesh

import agn_optax
from agn_optax import errors


def test_towers_select_devices_and_axes():
    assert agn_optax.Towers().size == 8
    assert repr(agn_optax.Towers()) == "Towers(1 x 8 cpu)"
    assert agn_optax.Towers(3).mesh.shape == {"workers": 1, "towers": 3}
    assert (
        list(agn_optax.Towers(jax.devices()[5:]).mesh.devices.flat)
        == (jax.devices()[5:])
    )
    assert agn_optax.Towers(6, workers=3).mesh.shape == {"workers": 3, "towers": 2}
    named = agn_optax.Towers(4, workers=2, axis_name="gpus", worker_axis="hosts")
    assert named.mesh.axis_names == ("hosts", "gpus")


def test_towers_accept_a_mesh():
    devices = np.array(jax.devices())
    only = agn_optax.Towers(Mesh(devices, ("towers",)))
    assert only.mesh.shape == {"workers": 1, "towers": 8}
    both = agn_optax.Towers(Mesh(devices.reshape(2, 4), ("workers", "towers")))
    assert both.mesh.shape == {"workers": 2, "towers": 4}
    cube = agn_optax.Towers(
        Mesh(devices.reshape(2, 2, 2), ("workers", "hosts", "chips")),
        axis_name=("hosts", "chips"),
    )
    assert (cube.size, cube.workers) == (8, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices must be a positive int, got 0"),
        ({"devices": 9}, "devices=9 were asked for, and this process has 8"),
        ({"devices": "gpu"}, "devices must be None, a number, a list"),
        ({"devices": []}, "must be one or more, each only once"),
        ({"devices": 6, "workers": 4}, "4 workers for 6 towers"),
        ({"workers": 0}, "workers must be a positive int, got 0"),
        ({"axis_name": "workers"}, "the axes need different names"),
        ({"axis_name": ("a", "b")}, "devices must be a Mesh that has them"),
        ({"axis_name": ()}, "axis_name must be a name"),
    ],
)
def test_invalid_towers_arguments_are_rejected(arguments, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        agn_optax.Towers(**arguments)


def test_invalid_meshes_are_rejected():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    with pytest.raises(errors.InvalidArgumentError, match=r"has the axes .*'model'"):
        agn_optax.Towers(mesh)
    with pytest.raises(errors.InvalidArgumentError, match="the mesh has 2"):
        agn_optax.Towers(mesh, workers=4, worker_axis="data", axis_name="model")
    with pytest.raises(errors.InvalidArgumentError, match="in this order"):
        agn_optax.Towers(mesh, worker_axis="model", axis_name="data")


def test_unreplicate_undoes_replicate():
    towers = agn_optax.Towers(4, workers=2)
    state = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.ones(3, jnp.bfloat16),
        "step": 7,
        "empty": jnp.zeros((0, 3)),
        "none": None,
    }
    stacked = towers.replicate(state)
    assert stacked["w"].shape == (4, 2, 3)
    assert stacked["w"].sharding.shard_shape(stacked["w"].shape) == (1, 2, 3)
    assert stacked["step"].shape == (4,)
    restored = towers.unreplicate(stacked)
    support.assert_identical(restored, jax.tree.map(jnp.asarray, state))
    assert restored["w"].devices() == {jax.devices()[0]}
    # Both have their own memory.
    stacked["w"].delete()
    np.testing.assert_array_equal(restored["w"], state["w"])
    with pytest.raises(errors.TreeMismatchError, match=r"state\['empty'\].*one row"):
        towers.unreplicate(state)


def test_towers_agree_names_the_first_leaf_that_differs():
    towers = agn_optax.Towers(4, workers=2)
    state = towers.replicate({"a": jnp.zeros(2), "b": {"c": jnp.zeros(2), "d": 0}})
    agreement = towers.towers_agree(state)
    assert agreement
    assert str(agreement) == "all towers agree"
    assert agreement.differs is None
    # Workers may differ; the towers of a worker may not.
    state["b"]["c"] = state["b"]["c"].at[2:].set(1.0)
    assert towers.towers_agree(state)
    state["b"]["c"] = state["b"]["c"].at[3, 1].set(jnp.nan)
    state["b"]["d"] = state["b"]["d"].at[1].set(1)
    assert not towers.towers_agree(state)
    assert towers.towers_agree(state).differs == "['b']['c']"
    # Bits are compared: NaN equals itself, and -0 is not 0.
    assert towers.towers_agree(towers.replicate({"nan": jnp.nan}))
    signs = towers.replicate(jnp.zeros(()))
    assert not towers.towers_agree(signs.at[1].set(-0.0))


def test_replicated_random_keys_differ_between_towers():
    towers = agn_optax.Towers(4)
    key = jax.random.key(3)
    state = towers.replicate({"key": key, "keys": jax.random.split(key, 2)})
    drawn = jax.vmap(jax.random.normal)(state["key"])
    assert len(set(np.asarray(drawn).tolist())) == 4
    assert towers.unreplicate(state)["key"] == key
    assert state["keys"].shape == (4, 2)
    assert (state["key"][2] == jax.random.fold_in(key, 2)).item()
    assert towers.towers_agree(state)  # they differ on purpose


def test_mean_keeps_floating_dtypes():
    towers = agn_optax.Towers(4)
    tree = {
        "loss": jnp.arange(4.0),
        "half": jnp.arange(4).astype(jnp.bfloat16),
        "step": jnp.full(4, 9),
    }
    assert jax.tree.map(float, towers.mean(tree)) == {
        "loss": 1.5,
        "half": 1.5,
        "step": 9.0,
    }
    assert towers.mean(tree)["half"].dtype == jnp.bfloat16


def test_center_params_are_found_in_every_mode():
    for workers in (1, 4):
        towers = agn_optax.Towers(4, workers=workers)
        tx = optax.chain(agn_optax.all_reduce("towers"), problem.agn(optax.sgd(0.1)))
        state = towers.replicate({"opt_state": tx.init(problem.params())})
        support.assert_identical(towers.center_params(state), problem.params())
    with pytest.raises(errors.CenterNotFoundError):
        towers.center_params(towers.replicate(optax.adam(0.1).init(jnp.ones(3))))


def test_replicate_compiles_once(caplog):
    towers = agn_optax.Towers(2)
    state = {"w": jnp.ones(3), "key": jax.random.key(0)}
    with jax.log_compiles():
        for _ in range(3):
            state = towers.unreplicate(towers.replicate(state))
    messages = [record.getMessage() for record in caplog.records]
    compiled = [
        m for m in messages if m.startswith("Finished XLA compilation of jit(on_all")
    ]
    assert len(compiled) == 1


def test_towers_agree_accepts_empty_leaves():
    towers = agn_optax.Towers(4, workers=2)
    assert towers.towers_agree(towers.replicate({"a": jnp.zeros((0, 3)), "b": 1.0}))


def test_state_that_was_not_replicated_is_rejected():
    towers = agn_optax.Towers(4, workers=4)
    step = towers.step(lambda state, batch: (state, batch.sum()))
    for wrong in (jnp.zeros((8, 3)), jnp.zeros(3), jnp.zeros(())):
        with pytest.raises(errors.TreeMismatchError, match="one row for each tower"):
            step(wrong, towers.shard(np.ones(4)))


def test_step_on_python_number_compiles_once():
    towers = agn_optax.Towers(2, workers=2)
    step = towers.step(lambda state, batch: (state + 1, None))
    state = towers.replicate(0.0)
    for _ in range(2):
        state, _ = step(state, towers.shard(np.ones(2)))
    assert step.jitted._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_another_current_mesh_changes_nothing(kind):
    towers = agn_optax.Towers(4, workers=2)
    tx = agn_optax.average(optax.sgd(0.1), 1, axis_name="workers")

    def train_step(state, batch):
        params, opt_state = state
        grads = jax.lax.pmean(params - batch.mean(), "towers")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), batch.sum()

    step = towers.step(train_step, donate=False)

    def everything():
        params = np.arange(3.0, dtype=np.float32)
        state = towers.replicate((params, tx.init(jnp.asarray(params))))
        batch = towers.shard(np.arange(8.0, dtype=np.float32))
        step.lower(state, batch)
        state, metrics = step(state, batch)
        state = towers.apply(lambda state: state)(state)
        assert towers.towers_agree(state)
        towers.shard_padded(np.ones(7))
        double = functools.partial(jnp.multiply, 2)
        return jax.tree.map(
            np.asarray,
            (
                towers.mean(metrics),
                towers.center_params(state),
                towers.unreplicate(state),
                towers.predict(double, np.ones((5, 2))),
                towers.evaluate(lambda batch: {"rows": batch}, np.arange(6.0)),
            ),
        )

    expected = everything()
    devices = np.array(jax.devices())
    for axes in (("data",), ("workers", "towers")):
        shape = (-1,) if len(axes) == 1 else (2, -1)
        other = Mesh(devices.reshape(shape), axes, axis_types=(kind,) * len(axes))
        with jax.set_mesh(other):
            support.assert_identical(everything(), expected)
    with jax.set_mesh(towers.mesh):
        support.assert_identical(everything(), expected)


def test_step_within_a_program_of_another_mesh_is_rejected():
    towers = agn_optax.Towers(4)
    step = towers.step(lambda state, batch: (state, jax.lax.psum(batch, "towers")))
    state, batch = towers.replicate(0.0), towers.shard(np.ones(4))
    with (
        jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))),
        pytest.raises(errors.InvalidArgumentError, match="their methods outside"),
    ):
        jax.jit(step)(state, batch)


def test_unhashable_function_is_rejected():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(errors.InvalidTypeError, match="fn must be hashable"):
        agn_optax.Towers(2).predict(Unhashable(), np.ones(4))


def test_donated_state_is_rejected():
    towers = agn_optax.Towers(4, workers=4)
    step = towers.step(lambda state, batch: (state + batch.sum(), None))
    state, batch = towers.replicate(jnp.zeros(3)), towers.shard(np.ones(8))
    step(state, batch)
    with pytest.raises(errors.InvalidArgumentError, match="donated to an earlier call"):
        step(state, batch)


def test_batches_that_were_not_sharded_are_rejected():
    towers = agn_optax.Towers(4, workers=4)
    step = towers.step(lambda state, batch: (state, batch["x"].sum()))
    state = towers.replicate(0.0)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"batch\['x'\] has shape \[7, 3\].*shard\("
    ):
        step(state, {"x": np.ones((7, 3))})


@pytest.mark.parametrize("leaf", [print, "adam", object()])
def test_leaf_that_is_not_an_array_is_named_in_the_error(leaf):
    towers = agn_optax.Towers(2)
    with pytest.raises(
        agn_optax.errors.InvalidTypeError,
        match=r"state\['b'\]\['apply'\] is .*nnx\.split, or equinox\.partition",
    ):
        towers.replicate({"a": 1.0, "b": {"apply": leaf, "w": np.ones(2)}})
    key = jax.random.key(0)
    assert towers.replicate({"a": True, "k": key, "n": None})["k"].shape == (2,)
