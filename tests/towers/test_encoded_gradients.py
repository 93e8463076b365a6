"""Encoded gradients: bytes sent, reduced values, and residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import support
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P
from traffic import traffic

import agn_optax
from agn_optax import codecs, errors

INT8 = codecs.quantize(8, block=16)
KEPT = codecs.error_feedback(codecs.quantize(4, block=16))
TOWERS = 4


def dyadic(*shape, seed=0):
    """Return multiples of 1/512, whose sums are exact in float32."""
    return np.random.default_rng(seed).integers(-2000, 2001, shape).astype("f4") / 512


def reducer(tx, towers=None):
    """Return ``(state, grads) -> (state, reduced)`` of all towers, and an init."""
    towers = towers or agn_optax.Towers(TOWERS)

    def update(state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        reduced, state = tx.update(grads, state)
        return state, reduced

    return towers.step(update), lambda like: towers.create(tx.init, like)


def lossless_codec():
    """Return a lossless codec that sends bytes."""
    return codecs.Codec(
        optax.init_empty_state,
        lambda tree, state: (
            jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, "uint8"), tree),
            state,
        ),
        lambda sent, like: jax.tree.map(
            lambda x, s: jax.lax.bitcast_convert_type(s, jnp.float32).astype(x.dtype),
            like,
            sent,
        ),
        name="bytes",
    )


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}], ids=str)
def test_lossless_codec_changes_nothing(options):
    grads = {"w": dyadic(TOWERS, 5, 7), "b": dyadic(TOWERS, 3), "s": dyadic(TOWERS)}
    like = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)
    found = []
    for codec in (None, codecs.identity(), lossless_codec()):
        step, begin = reducer(agn_optax.all_reduce("towers", codec=codec, **options))
        found.append(step(begin(like), grads)[1])
    support.assert_identical(found[1], found[0])
    support.assert_identical(found[2], found[0])


SENT = {
    "8 bits": (codecs.quantize(8), 8 + 32 / 4096),
    "4 bits": (codecs.quantize(4), 4 + 32 / 4096),
    "sign": (codecs.error_feedback(codecs.sign()), 1 + 32 / 4096),
    "top_k": (
        codecs.chain_codecs(codecs.top_k(64), codecs.quantize(2)),
        64 * (2 + 12) / 4096 + 32 / 4096,
    ),
    "cast": (codecs.error_feedback(codecs.cast("bfloat16")), 16),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_sent_with_each_codec(name):
    codec, bits = SENT[name]
    towers, size = agn_optax.Towers(8), 8 * 4096
    step, begin = reducer(agn_optax.all_reduce("towers", codec=codec), towers)
    compiled = step.lower(begin(jnp.zeros(size)), np.zeros((8, size), "f4")).compile()
    sent = traffic(compiled)
    assert sent.bytes_sent == 2 * 7 / 8 * size * bits / 8
    assert set(sent.kinds) == {"all-to-all", "all-gather"}


def residuals(state, size):
    """Return the sum of the senders' residuals, and those of the owners."""
    sender, owner = state.codec_state.states[0]
    of_sender = np.asarray(sender.residual, "f8").sum(axis=0).reshape(-1)[:size]
    return of_sender, np.asarray(owner.residual, "f8").reshape(-1)[:size]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "reduction"),
    [
        (KEPT, "sum"),
        (KEPT, "mean"),
        (codecs.error_feedback(codecs.cast("bfloat16")), "sum"),
        (codecs.error_feedback(codecs.random_k(2, block=8)), "sum"),
        (
            codecs.error_feedback(
                codecs.chain_codecs(codecs.top_k(2, block=8), codecs.quantize(2))
            ),
            "mean",
        ),
    ],
    ids=str,
)
def test_reduced_plus_residuals_is_the_sum_of_gradients(codec, reduction):
    size, steps = 70, 5
    tx = agn_optax.all_reduce("towers", codec=codec, reduction=reduction)
    step, begin = reducer(tx)
    state, out = begin(jnp.zeros(size)), np.zeros(size)
    grads = dyadic(steps, TOWERS, size)
    share = 1 / TOWERS if reduction == "mean" else 1.0
    for each in grads:
        state, reduced = step(state, each)
        np.testing.assert_array_equal(reduced, reduced[:1].repeat(TOWERS, axis=0))
        out += np.asarray(reduced[0], "f8")
    of_senders, of_owners = residuals(state, size)
    assert of_senders.any()
    assert of_owners.any()
    expected = grads.sum(axis=(0, 1), dtype="f8") * share
    np.testing.assert_array_equal(out + of_senders * share + of_owners, expected)


def descent(codec, towers, steps=60, rate=0.2, **options):
    """Return a run that descends to the mean of the rows, its state and its error."""
    tx = optax.chain(
        agn_optax.all_reduce("towers", codec=codec, **options), optax.sgd(rate)
    )

    def train_step(state, batch):
        params, opt_state = state
        grads = jax.tree.map(lambda p: p - batch[0, : p.size].reshape(p.shape), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    params = {"w": jnp.zeros((5, 7)), "b": jnp.zeros(())}
    state = towers.create(lambda p: (p, tx.init(p)), params)
    batch = dyadic(towers.size, 35)
    step = towers.step(train_step)

    def run(state, steps=steps):
        for _ in range(steps):
            state, _ = step(state, batch)
        return state

    def error(state):
        target = batch.mean(axis=0).reshape(5, 7)
        return float(np.abs(np.asarray(state[0]["w"][0]) - target).max())

    return run, state, error


@pytest.mark.slow
def test_sign_converges_only_with_error_feedback():
    towers = agn_optax.Towers(TOWERS)
    signs = codecs.sign(block=16)
    errors_ = {}
    for codec in (signs, codecs.error_feedback(signs)):
        run, state, error = descent(codec, towers, steps=600, rate=0.02)
        state = run(state)
        assert towers.towers_agree(state)
        errors_[codec] = error(state)
    alone, kept = errors_.values()
    assert kept < 0.1 < 0.5 < alone


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1000}, {"delay": 1}], ids=str)
def test_residuals_are_saved_and_restored(options):
    towers = agn_optax.Towers(TOWERS)
    run, state, _ = descent(KEPT, towers, **options)
    middle = run(state, 3)
    saved = towers.unreplicate(middle)
    again, expected = run(towers.replicate(saved), 3), run(middle, 3)
    kept = saved[1][0].codec_state.states
    assert any(np.any(e) for e in jax.tree.leaves(kept.rows))
    if not options.get("delay"):  # gradients in flight are saved as their mean
        support.assert_identical(
            jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, expected)
        )
    fewer = agn_optax.Towers(2)
    with pytest.raises(errors.TreeMismatchError, match="of a codec's state"):
        fewer.replicate(saved)


def test_hierarchical_reduction_encodes_only_on_the_slow_axis():
    both, size = ("hosts", "towers"), 2 * 4 * 16
    mesh = jax.make_mesh((2, 4), both, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = agn_optax.all_reduce(both, algorithm="hierarchical", codec=KEPT)

    def update(grads):
        reduced, state = tx.update(grads[0], tx.init(grads[0]))
        sender, owner = state.codec_state.states[0]
        assert sender.residual.shape == (2, size // 4 // 2)
        assert owner.residual.shape == (size // 4 // 2,)
        return reduced[None]

    run = jax.jit(
        jax.shard_map(
            update, mesh=mesh, in_specs=P(both), out_specs=P(both), check_vma=False
        )
    )
    grads = dyadic(8, size)
    reduced = np.asarray(run(grads))
    np.testing.assert_array_equal(reduced, reduced[:1].repeat(8, axis=0))
    np.testing.assert_allclose(reduced[0], grads.mean(axis=0), atol=0.5)
    sent = traffic(run.lower(grads).compile())
    assert set(sent.kinds) == {
        "reduce-scatter",
        "all-to-all",
        "all-gather",
    }
    fast = 2 * 3 / 4 * 4 * size  # in float32: scattered, then gathered
    slow = 2 * 1 / 2 * 2 * (16 / 2 + 4)  # two pieces of 16 in 4 bits, each with a scale
    assert sent.bytes_sent == fast + slow


def test_non_finite_gradients_do_not_stay_in_the_residual():
    step, begin = reducer(agn_optax.all_reduce("towers", codec=KEPT))
    state, grads = begin(jnp.zeros(40)), dyadic(TOWERS, 40)
    bad = grads.copy()
    bad[1, 3] = np.nan
    state, reduced = step(state, bad)
    assert (
        not np.isfinite(reduced).all(axis=1).any()
    )  # every tower gets the non-finite result
    assert all(np.isfinite(e).all() for e in jax.tree.leaves(state))
    state, reduced = step(state, grads)
    assert np.isfinite(reduced).all()


def test_encoded_float16_gradients_keep_their_dtype():
    tx = agn_optax.all_reduce("towers", codec=INT8)
    step, begin = reducer(tx)
    grads = jnp.full((TOWERS, 20), 30000.0, jnp.float16)
    _, reduced = step(begin(jnp.zeros(20)), grads)
    assert reduced.dtype == jnp.float16
    np.testing.assert_allclose(reduced, 30000.0, rtol=0.02)


@pytest.mark.slow
def test_stochastic_codec_works_under_vmap():
    codec = codecs.quantize(8, block=4, rounding="stochastic")
    tx = agn_optax.all_reduce("towers", codec=codec, reduction="sum")

    def two_steps(x):
        grads = {"used": x * jnp.ones(6), "unused": jnp.full((2, 3), 2.0)}
        state = tx.init(grads)
        _, state = tx.update(grads, state)
        return tx.update(grads, state)

    reduced, state = jax.vmap(two_steps, axis_name="towers")(jnp.arange(3.0))
    np.testing.assert_allclose(reduced["used"], 3.0, rtol=0.05)
    np.testing.assert_allclose(reduced["unused"], 6.0, rtol=0.05)
    senders = [sender.encoded for sender, _ in state.codec_state.states]
    np.testing.assert_array_equal(senders, 2)


def test_unsupported_uses_of_codecs_are_rejected():
    tx = agn_optax.all_reduce("towers", codec=KEPT)
    with pytest.raises(errors.UnboundAxisError, match=r"towers\.create\(tx\.init"):
        tx.init(jnp.zeros(3))
    rows = sparse.BCOO((jnp.ones((1, 2)), jnp.zeros((1, 1), int)), shape=(4, 2))
    plain = agn_optax.all_reduce("towers", codec=INT8)
    with pytest.raises(errors.TreeMismatchError, match=r"quantize.* whole gradients"):
        jax.vmap(
            lambda x: plain.update({"t": rows, "x": x}, plain.init({"t": x, "x": x})),
            axis_name="towers",
        )(jnp.zeros((2, 4)))
    with pytest.raises(errors.TreeMismatchError, match=r"state\.codec_state"):
        jax.vmap(lambda x: tx.update(x, tx.init(x[:2])), axis_name="towers")(
            jnp.zeros((2, 40))
        )


def test_equal_casts_compare_equal():
    assert codecs.cast("bfloat16") == codecs.cast(jnp.bfloat16)
    assert codecs.cast_dtype(codecs.cast("bfloat16")) == jnp.bfloat16
    for other in (
        codecs.identity(),
        KEPT,
        codecs.error_feedback(codecs.cast("float16")),
    ):
        assert codecs.cast_dtype(other) is None
