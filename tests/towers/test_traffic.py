"""The counter of communication in programs: kinds of collectives and their syntax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.traffic import Traffic, traffic
from jax.sharding import Mesh

P = jax.P


def compiled(function, shape=(8, 96)):
    mesh = Mesh(np.array(jax.devices()), ("towers",))
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=P("towers"),
        out_specs=P("towers"),
        check_vma=False,
    )
    return jax.jit(mapped).lower(jnp.zeros(shape)).compile()


@pytest.mark.parametrize(
    ("function", "kind", "sent"),
    [
        (lambda x: jax.lax.psum(x, "towers"), "all-reduce", 2 * 7 / 8 * 384),
        (lambda x: jax.lax.all_gather(x[0], "towers"), "all-gather", 7 / 8 * 8 * 384),
        (
            lambda x: jax.lax.psum_scatter(x[0], "towers", tiled=True),
            "reduce-scatter",
            7 * 48,
        ),
        (
            lambda x: jax.lax.all_to_all(x.reshape(8, 12), "towers", 0, 0),
            "all-to-all",
            7 / 8 * 384,
        ),
        (
            lambda x: jax.lax.ppermute(x, "towers", [(i, i ^ 1) for i in range(8)]),
            "collective-permute",
            384,
        ),
    ],
)
def test_bytes_of_each_kind_of_collective(function, kind, sent):
    assert traffic(compiled(function)) == Traffic(1, sent, {kind: 1})


def test_collectives_in_loops_count_once_per_iteration():
    def scanned(x):
        def body(carry, _):
            return carry + jax.lax.pmean(carry, "towers"), None

        def outer(carry, _):
            return jax.lax.scan(body, carry, None, length=4)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    assert traffic(compiled(scanned)) == Traffic(20, 20 * 672, {"all-reduce": 20})

    def chosen(x):  # such as the exchange of a drop-in optimizer
        return jax.lax.fori_loop(
            0, (x[0, 0] > 0).astype(int), lambda _, c: jax.lax.psum(c, "towers"), x
        )

    assert traffic(compiled(chosen)) == Traffic(1, 672, {"all-reduce": 1})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (  # asynchronous, as GPUs and TPUs do it
            "%s = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}",
            Traffic(1, 256, {"all-reduce": 1}),
        ),
        ("%d = f32[64]{0} all-reduce-done(%s)", Traffic(0, 0, {})),
        (
            "%s = (bf16[8], bf16[32]) all-gather-start(%x), replica_groups=[2,4]<=[8]",
            Traffic(1, 48, {"all-gather": 1}),
        ),
        (
            "%r = (f32[4]{0}, s8[8]{0}) all-reduce(%x, %y), replica_groups={{0,1}}",
            Traffic(1, 24, {"all-reduce": 1}),
        ),
        ("%r = f32[4]{0} all-reduce(%x), replica_groups={{0},{1}}", Traffic(0, 0, {})),
        (  # as JAX 0.12 has it
            "%r = f32[4]{0} all-reduce(%x), replica_groups=mesh['w'=2,'t'=4] {'t'}",
            Traffic(1, 24, {"all-reduce": 1}),
        ),
        (
            "%r = s8[8] all-reduce(), replica_groups=mesh['w'=2,'t'=4] {'w','t':(2)2}",
            Traffic(1, 12, {"all-reduce": 1}),
        ),
        (
            "%r = f32[4]{0} all-reduce(%x), replica_groups={}",
            Traffic(1, 28, {"all-reduce": 1}),
        ),
    ],
)
def test_syntax_variants_of_collectives_are_read(line, expected):
    program = f"HloModule m, num_partitions=8\n  {line}, to_apply=%sum\n"
    assert traffic(program) == expected


def test_unknown_syntax_raises():
    line = "%r = f32[4]{0} all-reduce(%x), replica_groups=others"
    with pytest.raises(ValueError, match="cannot be read: %r = f32"):
        traffic(f"HloModule m\n  {line}\n")


def test_argument_that_is_not_a_program_raises():
    with pytest.raises(TypeError, match="compiled program"):
        traffic(42)
