"""The axes of collectives in traced programs, with the JAX that is installed.

`Towers` rejects programs without collectives by this reading. If a new JAX renames the
parameters that it reads, these tests fail.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import pytest

from agn_optax.round import axes_of_collectives

P = jax.sharding.PartitionSpec
ONTO_THE_NEXT = [(0, 1), (1, 0)]


def ragged(x):
    starts, ones = jnp.arange(2), jnp.ones(2, jnp.int32)
    return jax.lax.ragged_all_to_all(
        x, jnp.zeros_like(x), starts, ones, starts, ones, axis_name="workers"
    )


def sent_and_received(x):
    token = jax.lax.psend(x, "workers", ONTO_THE_NEXT)
    return jax.lax.precv(token, jax.typeof(x), "workers", ONTO_THE_NEXT)


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "workers"),
    "pmean": lambda x: jax.lax.pmean(x, "workers"),
    "pmax": lambda x: jax.lax.pmax(x, "workers"),
    "pmin": lambda x: jax.lax.pmin(x, "workers"),
    "all_gather": lambda x: jax.lax.all_gather(x, "workers"),
    "all_gather to invarying": lambda x: jax.lax.all_gather(
        x, "workers", to="invarying"
    ),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "workers", tiled=True),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "workers", 0, 0, tiled=True),
    "ragged_all_to_all": ragged,
    "pswapaxes": lambda x: jax.lax.pswapaxes(x[:2], "workers", 0),
    "ppermute": lambda x: jax.lax.ppermute(x, "workers", ONTO_THE_NEXT),
    "pshuffle": lambda x: jax.lax.pshuffle(x, "workers", [1, 0]),
    "pbroadcast": lambda x: jax.lax.pbroadcast(x, ("workers",), 0),
    "psend precv": sent_and_received,
}
SILENT = {
    "axis_index": lambda x: x * jax.lax.axis_index("workers"),
    "axis_size": lambda x: x * jax.lax.axis_size("workers"),
    "pcast": lambda x: x * jax.lax.pcast(jnp.ones(()), "workers", to="varying"),
}
INSIDE = {
    "the program": lambda f: f,
    "jit": jax.jit,
    "a scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, length=2),
    "a loop": lambda f: (
        lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + f(x).sum(), 0.0)
    ),
    "a branch": lambda f: lambda x: jax.lax.cond(True, f, f, x),
    "a gradient": lambda f: jax.grad(lambda x: f(x).sum()),
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
}


def axes(function, *, check_vma=False):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("workers",), axis_types=auto)
    mapped = jax.shard_map(
        lambda x: jnp.stack([jnp.sum(y) for y in jax.tree.leaves(function(x))]),
        mesh=mesh,
        in_specs=P("workers"),
        out_specs=P("workers"),
        check_vma=check_vma,
    )
    return axes_of_collectives(jax.make_jaxpr(mapped)(jnp.ones(8)).jaxpr)


@pytest.mark.filterwarnings("ignore:jax.lax.p(send|recv) is:DeprecationWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_axes_of_each_collective_are_found(name):
    assert axes(COLLECTIVES[name]) == {"workers"}


@pytest.mark.parametrize("place", INSIDE)
def test_axes_of_collectives_inside_other_programs_are_found(place):
    assert axes(INSIDE[place](COLLECTIVES["psum"])) == {"workers"}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", SILENT)
def test_programs_without_collectives_have_no_axes(name, check_vma):
    assert axes(SILENT[name], check_vma=check_vma) == set()


def test_every_function_of_jax_with_an_axis_name_is_tested_here():
    """A function that a new JAX adds belongs in `COLLECTIVES` or in `SILENT`."""
    named = set()
    for name, function in vars(jax.lax).items():
        with contextlib.suppress(TypeError, ValueError):  # no function with a signature
            if "axis_name" in inspect.signature(function).parameters:
                named.add(name)
    tested = {name for names in [*COLLECTIVES, *SILENT] for name in names.split()}
    assert named <= tested


def test_collectives_in_an_ignored_scope_do_not_count():
    def program(x):
        with jax.named_scope("metrics"):
            return jax.lax.psum(x, "workers")

    traced = jax.make_jaxpr(program, axis_env=[("workers", 2)])(jnp.ones(2))
    assert axes_of_collectives(traced.jaxpr, ignored_scope="metrics") == set()
    assert axes_of_collectives(traced.jaxpr) == {"workers"}
