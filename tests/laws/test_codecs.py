"""Laws 11 to 13: lossless codecs, and codecs that keep a residual.

Gradients, and all numbers computed from them, are multiples of a power of two: sums are
exact in every program, and numbers can be compared bit for bit.
"""

import concurrent.futures
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.sessions import exchange
from helpers.support import assert_identical, tree

import agn_optax
from agn_optax import codecs, errors, rules
from agn_optax.center import Journal, Limits, PackedCenter, Synchronous

PERIOD = 2
WORKERS = 2
INNER = shared.sgd(0.25)

RULES = {
    "agn": functools.partial(shared.agn, shared.sgd(0.5)),
    "agn_window": shared.agn_window,
    "diloco": functools.partial(shared.diloco, shared.sgd(0.5, momentum=0.5)),
    "easgd": functools.partial(shared.easgd, 0.5, rho=0.5),
}


def lossless_codec():
    """Return a lossless codec that sends arrays of other shapes and another dtype."""

    def encode(leaf):
        data = jax.lax.bitcast_convert_type(leaf, jnp.uint8)  # [..., itemsize]
        half = data.shape[-1] // 2
        return {"low": data[..., :half], "high": data[..., half:].reshape(-1, half)}

    def decode(leaf, sent):
        high = sent["high"].reshape(sent["low"].shape)
        data = jnp.concatenate([sent["low"], high], axis=-1)
        return jax.lax.bitcast_convert_type(data, leaf.dtype)

    return codecs.Codec(
        lambda params: optax.EmptyState(),
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        lambda encoded, like: jax.tree.map(decode, like, encoded),
        name="bytes",
    )


def dyadic(like, *shape, seed=1):
    """Return multiples of 1/128, shaped like ``like`` with leading dimensions."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (rng.integers(-300, 301, (*shape, *x.shape)) / 128).astype(x.dtype),
        like,
    )


PARAMS = jax.tree.map(jnp.asarray, dyadic(tree(), seed=0))
GRADS = dyadic(tree(), 3 * PERIOD, WORKERS)  # [steps, workers, ...]


def step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@functools.lru_cache(maxsize=32)
def local_step(tx):
    """Compile a step once for all workers of a rule."""
    return jax.jit(functools.partial(step, tx))


def train(tx):
    """Return a drop-in's loop, to be mapped over workers in any way."""

    def one(params, grads):
        def body(carry, grads):
            return step(tx, *carry, grads), ()

        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), grads)
        return params, state.local.codec_state, agn_optax.center_params(state)

    return one


# Every placement returns parameters, the codec's state and the center: of one worker,
# or of several with a leading dimension.


def drop_in(rule, params, grads):
    tx = agn_optax.exchange_every(INNER, rule, PERIOD)
    return jax.jit(train(tx))(params, of_worker(grads, 0))


def split(rule, params, grads):
    tx = agn_optax.phases(INNER, rule)
    local = jax.jit(functools.partial(step, tx))
    exchange = jax.jit(tx.exchange)
    state = jax.jit(tx.init)(params)
    for i, each in enumerate(steps(of_worker(grads, 0))):
        params, state = local(params, state, each)
        if (i + 1) % PERIOD == 0:
            params, state = exchange(params, state)
    return params, state.local.codec_state, state.center


def scanned(rule, params, grads):
    tx = agn_optax.phases(INNER, rule)
    one_round = jax.jit(
        agn_optax.scan_round(
            lambda params, state, grads: (*step(tx, params, state, grads), ()),
            tx.exchange,
        )
    )
    state = jax.jit(tx.init)(params)
    every = list(steps(of_worker(grads, 0)))
    for i in range(0, len(every), PERIOD):
        batches = jax.tree.map(lambda *g: np.stack(g), *every[i : i + PERIOD])
        params, state, _ = one_round(params, state, batches)
    return params, state.local.codec_state, state.center


def train_worker(worker, loop, grads):
    local = local_step(worker.tx)
    for each in steps(grads):
        loop = worker.exchange(*local(*loop, each))
    return loop


def embedded(rule, params, grads, **settings):
    center = agn_optax.LocalCenter(rule, params)
    worker = agn_optax.Worker(center, INNER, period=PERIOD, **settings)
    loop = train_worker(worker, worker.start(), of_worker(grads, 0))
    params, state = worker.flush(*loop)
    return params, state.codec_state, center.pull().params


# A worker waits for the response after one local step, so timing changes nothing.
overlapping = functools.partial(embedded, overlap=True, patience=1)


def over_vmap(rule, params, grads):
    tx = agn_optax.exchange_every(INNER, rule, PERIOD, axis_name="workers")
    run = jax.vmap(train(tx), in_axes=(None, 1), axis_name="workers")
    return jax.jit(run)(params, grads)


def over_shard_map(rule, params, grads, placement=None):
    tx = agn_optax.exchange_every(
        INNER, rule, PERIOD, axis_name="workers", placement=placement
    )
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def one(params, grads):
        first = jax.tree.map(lambda x: x[0], params)
        return jax.tree.map(lambda x: x[None], train(tx)(first, of_worker(grads, 0)))

    run = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P("workers"), P(None, "workers")),
        out_specs=P("workers"),
        check_vma=placement is None,
    )
    params = jax.tree.map(lambda x: np.stack([x] * WORKERS), params)
    return jax.jit(run)(params, grads)


def synchronous(rule, params, grads):
    center = agn_optax.LocalCenter(rule, params, mode=Synchronous(), barrier=WORKERS)
    workers = [
        agn_optax.Worker(center, INNER, period=PERIOD, name=f"worker-{i}")
        for i in range(WORKERS)
    ]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
        ends = threads.map(
            lambda i: train_worker(workers[i], workers[i].start(), of_worker(grads, i)),
            range(WORKERS),
        )
        ends = [
            (params, state.codec_state, center.pull().params) for params, state in ends
        ]
    return jax.tree.map(lambda *x: np.stack(x), *ends)


ONE = [drop_in, split, scanned, embedded, overlapping]
MANY = [over_vmap, over_shard_map, synchronous]
placements = pytest.mark.parametrize("place", [*ONE, *MANY], ids=lambda p: name_of(p))


def name_of(place):
    return getattr(place, "__name__", "overlapping")


def of_worker(grads, worker):
    return jax.tree.map(lambda g: g[:, worker], grads)


def steps(grads):
    for i in range(jax.tree.leaves(grads)[0].shape[0]):
        yield jax.tree.map(lambda g: g[i], grads)  # noqa: B023


@functools.cache
def without_codec(place, rule):
    params, _, center = place(RULES[rule](), PARAMS, GRADS)
    return params, center


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES)
@placements
def test_11_lossless_codec_changes_nothing(place, rule):
    """Every placement gives the numbers of one program without a codec.

    An overlapping worker adopts responses later, so it is compared with another one.
    """
    if place is overlapping:
        plain = overlapping
    else:
        plain = over_vmap if place in MANY else drop_in
    params, _, center = place(RULES[rule](codec=lossless_codec()), PARAMS, GRADS)
    assert_identical(
        jax.tree.map(np.asarray, (params, center)),
        jax.tree.map(np.asarray, without_codec(plain, rule)),
    )


def observed(codec):
    """Wrap a codec to keep the last message and the sums of its input and output."""

    def init(params):
        zeros, own = jax.tree.map(jnp.zeros_like, params), codec.init(params)
        return {
            "own": own,
            "message": codec.encode(zeros, own)[0],
            "contributed": zeros,
            "sent": zeros,
        }

    def encode(contribution, state):
        message, own = codec.encode(contribution, state["own"])
        sent = codec.decode(message, contribution)
        return message, {
            "own": own,
            "message": message,
            "contributed": jax.tree.map(jnp.add, state["contributed"], contribution),
            "sent": jax.tree.map(jnp.add, state["sent"], sent),
        }

    def returned(message, state):
        decoded = codec.decode(message, state["sent"])
        sent = jax.tree.map(jnp.subtract, state["sent"], decoded)
        return {**state, "own": codec.returned(message, state["own"]), "sent": sent}

    return dataclasses.replace(
        codec,
        init=init,
        encode=encode,
        name=f"observed({codec})",
        returned=codec.returned and returned,
    )


CODECS = {
    "cast": functools.partial(codecs.cast, "bfloat16"),
    "quantize": functools.partial(codecs.quantize, 8, block=4),
    "error_feedback": lambda: codecs.error_feedback(codecs.quantize(4, block=5)),
    "of a cast": lambda: codecs.error_feedback(codecs.cast("bfloat16")),
    "top_k": lambda: codecs.error_feedback(
        codecs.chain_codecs(codecs.top_k(2, block=5), codecs.quantize(2))
    ),
    "sign": lambda: codecs.error_feedback(codecs.sign(block=4)),
    "two_way": lambda: two_way("bfloat16"),
}


def two_way(answers):
    return codecs.two_way(codecs.error_feedback(codecs.quantize(4, block=5)), answers)


OBSERVED = {
    "cast": functools.partial(shared.easgd, 0.5),
    "quantize": functools.partial(shared.agn, shared.sgd(0.5)),
    "error_feedback": shared.downpour,
    "of a cast": functools.partial(shared.agn, shared.sgd(0.5)),
    "top_k": shared.downpour,
    "two_way": functools.partial(shared.diloco, shared.sgd(0.5, momentum=0.5)),
}


@functools.cache
def observed_rule(codec):
    return OBSERVED[codec](codec=observed(CODECS[codec]()))


@functools.cache
def trained(place, codec):
    return place(observed_rule(codec), PARAMS, GRADS)


@pytest.mark.slow
@pytest.mark.parametrize("codec", OBSERVED)
def test_12_encoded_messages_are_equal_in_every_placement(codec):
    """Equal contributions give equal bits.

    This is shown for one worker, and for several with different contributions.
    """
    for group in ([drop_in, split, scanned, embedded], MANY):
        first, *others = [trained(place, codec) for place in group]
        for other in others:
            assert_identical(jax.tree.map(np.asarray, other), first)


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.few(3)
@placements
def test_13_sent_plus_residual_is_what_was_contributed(place):
    """All progress is contributed exactly once, also with overlap."""
    _, state, center = double(trained(place, "error_feedback"))
    residual, sent = state["own"].residual, state["sent"]
    assert_identical(jax.tree.map(np.add, sent, residual), state["contributed"])
    assert any(np.any(e) for e in jax.tree.leaves(residual))
    many = place in MANY
    progress = jax.tree.map(
        lambda g: -0.25 * np.sum(g if many else g[:, :1], axis=(0, 1), dtype=float),
        GRADS,
    )
    if many:
        residual = jax.tree.map(lambda e: e.sum(axis=0), residual)
        center = jax.tree.map(lambda c: c[0], center)
    assert_identical(
        jax.tree.map(np.subtract, center, residual),
        jax.tree.map(np.add, double(PARAMS), progress),
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "codec",
    [
        codecs.cast("bfloat16"),
        *(codecs.quantize(bits, block=5) for bits in (2, 4, 8)),
        codecs.quantize(4, block=5, format="e3m0"),
        codecs.top_k(2, block=5),
    ],
    ids=str,
)
def test_13_sent_plus_residual_is_exact_for_numbers_of_any_size(codec, dtype):
    rng = np.random.default_rng(0)
    like = {"w": jnp.zeros((4, 7), dtype), "none": None, "s": jnp.zeros((), dtype)}
    like["empty"] = jnp.zeros((0, 3), dtype)
    codec = codecs.error_feedback(codec)
    state = codec.init(like)
    encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
    total_of = jax.jit(
        lambda residual, contribution: jax.tree.map(
            lambda e, k: e + k.astype(e.dtype), residual, contribution
        )
    )
    for _ in range(5):
        contribution = jax.tree.map(
            lambda x: np.asarray(
                rng.normal(size=x.shape) * 10.0 ** rng.integers(-4, 4, x.shape),
                x.dtype,
            ),
            like,
        )
        total = total_of(state.residual, contribution)
        encoded, state = encode(contribution, state)
        sent = decode(encoded, total)
        assert_identical(
            jax.tree.map(np.add, double(sent), double(state.residual)), double(total)
        )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("codec", "is_exact"),
    [
        *((codecs.quantize(bits, block=5), True) for bits in (2, 4, 8)),
        (codecs.quantize(2, block=5, format="codebook"), False),
        (codecs.sign(block=5), False),
        (codecs.top_k(2, block=5), False),
    ],
    ids=str,
)
def test_13_narrow_center_rounds_decoded_messages_once(codec, is_exact, dtype):
    """The residual is that of the float32 message; the center decodes to its own dtype.

    The center thus misses at most half a unit in the last place of that dtype, and
    nothing if the decoded numbers have few digits.
    """
    rng = np.random.default_rng(0)
    center = {"w": jnp.zeros((4, 7), dtype), "s": jnp.zeros((), dtype)}
    codec = codecs.error_feedback(codec)
    state = codec.init(center)
    encode = jax.jit(codec.encode)
    decode = jax.jit(codec.decode)
    missed = 0.0
    for _ in range(5):
        contribution = jax.tree.map(
            lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), center
        )
        total = jax.tree.map(
            lambda e, k: np.float64(e) + np.float64(k), state.residual, contribution
        )
        encoded, state = encode(contribution, state)
        sent_leaves = double(decode(encoded, center))
        for summed, decoded, rest in zip(
            *map(jax.tree.leaves, (total, sent_leaves, double(state.residual))),
            strict=True,
        ):
            lost = np.abs(summed - decoded - rest)
            # The constant allows for the float32 rounding of the sums.
            most = 0.5 * float(jnp.finfo(dtype).eps) * np.abs(decoded) + 1e-6
            assert (lost <= most).all()
            missed = max(missed, lost.max())
    assert (missed < 1e-6) == is_exact


@pytest.mark.slow
@pytest.mark.parametrize("place", [drop_in, split, embedded])
@pytest.mark.parametrize("codec", CODECS)
def test_10_codecs_preserve_dtypes_and_leaves(place, codec):
    like = {**tree("bfloat16"), "none": None}
    rule = shared.diloco(shared.sgd(0.5), codec=CODECS[codec]())
    params, _, center = place(rule, like, dyadic(like, 2 * PERIOD, 1))
    kind = jax.tree.map(lambda x: (jnp.shape(x), x.dtype), like)
    for tree_ in (params, center):
        assert jax.tree.map(lambda x: (jnp.shape(x), x.dtype), tree_) == kind


@pytest.mark.parametrize("stop", [2, 3])  # at the end of a round, and within one
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("codec", ["error_feedback", "two_way"])
def test_9_residual_is_restored(stop, overlap, codec):
    rule = shared.agn(shared.sgd(0.5), codec=CODECS[codec]())
    grads = of_worker(GRADS, 0)
    settings = {"period": PERIOD, "overlap": overlap, "patience": 1}

    def begin(center):
        return agn_optax.Worker(center, INNER, **settings)

    center = agn_optax.LocalCenter(rule, PARAMS)
    worker = begin(center)
    expected = train_worker(worker, worker.start(), grads)
    expected = worker.flush(*expected), center.save()

    center = agn_optax.LocalCenter(rule, PARAMS)
    worker = begin(center)
    first = jax.tree.map(lambda g: g[:stop], grads)
    saved = worker.save(*train_worker(worker, worker.start(), first))
    assert any(np.any(e) for e in jax.tree.leaves(saved.state.codec_state.residual))
    center = agn_optax.LocalCenter.restore(rule, center.save())
    worker = begin(center)
    rest = jax.tree.map(lambda g: g[stop:], grads)
    loop = train_worker(worker, worker.restore(saved), rest)
    assert_identical((worker.flush(*loop), center.save()), expected)


@pytest.mark.parametrize("codec", ["error_feedback", "two_way"])
def test_journal_replays_encoded_messages(codec, tmp_path):
    rule = shared.downpour(codec=CODECS[codec]())
    center = agn_optax.LocalCenter(rule, PARAMS, durability=Journal(tmp_path / "a"))
    worker = agn_optax.Worker(center, INNER, period=PERIOD)
    train_worker(worker, worker.start(), of_worker(GRADS, 0))
    expected = center.save()
    shutil.copytree(tmp_path / "a", tmp_path / "killed")
    center.close()
    for name in ("a", "killed"):  # from its last snapshot, and from its journal
        kept = Journal(tmp_path / name)
        again = agn_optax.LocalCenter(rule, PARAMS, durability=kept)
        assert_identical(again.save(), expected)
        again.close()


class HalfReachableCenter(agn_optax.LocalCenter):
    """A center whose sessions respond every other time."""

    def join(self, *args, **kwargs):
        self.received = []
        return HalfReachableSession(super().join(*args, **kwargs), self.received)


class HalfReachableSession:
    """A session that records the messages and loses the response of every other."""

    transfers = ()

    def __init__(self, session, received):
        self.worker, self.leave = session.worker, session.leave
        self._session, self._received = session, received

    def exchange(self, submission):
        self._received.append(jax.tree.map(np.array, submission.contribution))
        if len(self._received) % 2:
            raise errors.CenterUnreachableError("no answer")
        return self._session.exchange(submission)


@pytest.mark.parametrize("codec", ["error_feedback", "top_k"])
def test_repeated_message_is_encoded_once(codec):
    rule = shared.downpour(codec=CODECS[codec]())
    center = HalfReachableCenter(rule, PARAMS)
    worker = agn_optax.Worker(center, INNER, period=PERIOD, patience=0)
    local = local_step(worker.tx)
    loop = worker.start()
    for each in steps(of_worker(GRADS, 0)):
        loop = local(*loop, each)
        try:
            loop = worker.exchange(*loop)
        except errors.CenterUnreachableError:
            loop = worker.flush(*loop)
    assert len(center.received) == 6
    for first, again in zip(center.received[::2], center.received[1::2], strict=True):
        assert_identical(again, first)
    _, state, expected = embedded(rule, PARAMS, GRADS)
    assert_identical((loop[1].codec_state, center.pull().params), (state, expected))


overlaps = pytest.mark.parametrize("overlap", [False, True])


def a_worker(center, overlap):
    return agn_optax.Worker(
        center, INNER, period=PERIOD, name="anna", overlap=overlap, patience=1
    )


@overlaps
def test_non_finite_message_leaves_the_residual_unchanged(overlap):
    rule = shared.downpour(codec=CODECS["error_feedback"]())
    center = agn_optax.LocalCenter(rule, PARAMS)
    worker = a_worker(center, overlap)
    loop = train_worker(worker, worker.start(), of_worker(GRADS, 0))
    loop = worker.flush(*loop)
    before = jax.tree.map(np.array, loop[1].codec_state)
    assert any(np.any(e) for e in jax.tree.leaves(before.residual))
    bad = jax.tree.map(lambda g: g * np.float32("nan"), of_worker(GRADS, 0))
    loop = worker.flush(*train_worker(worker, loop, bad))
    assert worker.rejected > 1
    assert_identical(jax.tree.map(np.asarray, loop[1].codec_state), before)


@overlaps
def test_13_rejected_message_is_restored_to_the_residual(overlap):
    """A message that is rejected once is sent again with a later one."""
    rule = observed_rule("error_feedback")
    center = agn_optax.LocalCenter(rule, PARAMS)
    worker = a_worker(center, overlap)
    loop = worker.start()
    for i in range(3):
        norm = 1e-9 if i == 1 else None
        center.core.ledger.rejections.limits = agn_optax.center.MessageLimits(norm=norm)
        loop = worker.flush(*train_worker(worker, loop, first(PERIOD + overlap, 2 * i)))
    assert (worker.rejected, worker.dropped) == (1, 0)
    state = double(loop[1].codec_state)
    residual, sent = state["own"].residual, state["sent"]
    assert_identical(jax.tree.map(np.add, sent, residual), state["contributed"])
    expected = jax.tree.map(np.subtract, double(PARAMS), sent)
    assert_identical(double(center.pull().params), expected)


def first(count, begin=0):
    """Return the gradients of a worker's steps."""
    return jax.tree.map(lambda g: g[begin : begin + count, 0], GRADS)


@overlaps
def test_message_rejected_twice_is_discarded(overlap):
    rule = shared.downpour(codec=CODECS["error_feedback"]())
    reject = agn_optax.center.MessageLimits(norm=1000.0)
    center = agn_optax.LocalCenter(rule, PARAMS, limits=Limits(messages=reject))
    worker = a_worker(center, overlap)
    loop, norms = worker.start(), []
    for i in range(4):
        grads = jax.tree.map(lambda g, i=i: g * 2.0 ** (12 * (i == 1)), first(PERIOD))
        loop = worker.flush(*train_worker(worker, loop, grads))
        norms.append(float(worker.norm))
    assert worker.rejected == 2
    assert max(norms[0], norms[3]) < 100 < min(norms[1], norms[2])


@pytest.mark.parametrize("rule", ["agn_window", "easgd"])
def test_cast_codec_works_with_a_sharded_center_on_a_mesh(rule):
    rule = RULES[rule](codec=codecs.cast("bfloat16"))
    shards = agn_optax.Placement(shard_axis="workers")
    assert_identical(
        over_shard_map(rule, PARAMS, GRADS, shards),
        over_shard_map(rule, PARAMS, GRADS),
    )


def test_block_codec_is_rejected_with_a_sharded_center_on_a_mesh():
    rule = shared.downpour(codec=codecs.quantize())
    shards = agn_optax.Placement(shard_axis="workers")
    with pytest.raises(errors.InvalidArgumentError, match="not known to work"):
        over_shard_map(rule, PARAMS, GRADS, shards)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_packed_center_gives_the_same_numbers(codec):
    rule = shared.agn(shared.adam(0.5), codec=CODECS[codec]())
    params = {
        "b": jnp.ones(4),
        "w": jnp.ones((3, 2)),
    }  # without scalars, which are not packed
    plain = agn_optax.LocalCenter(rule, params)
    packed = PackedCenter(rule, params)
    assert (packed.core.store.packing is not None) == ("cast" in codec)
    for center in (plain, packed):
        worker = agn_optax.Worker(center, INNER, period=PERIOD, name="worker")
        train_worker(worker, worker.start(), dyadic(params, 2 * PERIOD))
    assert_identical(packed.save(), plain.save())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shared.agn(shared.sgd(1.0), codec="int8"), "codec of rule 'agn' must"),
        (lambda: shared.downpour(codec=codecs.quantize), "call it first"),
        (lambda: codecs.error_feedback(8), "codec must be one of agn_optax.codecs"),
        (lambda: codecs.quantize(3), "bits must be 8, 4 or 2, got 3"),
        (lambda: codecs.quantize(block=0), "block must be a positive int, got 0"),
        (lambda: codecs.cast("int8"), "dtype must be a floating dtype, got int8"),
        (lambda: codecs.cast(None), "dtype must be a floating dtype, got None"),
        (lambda: two_way(codecs.sign()), "must be a floating dtype or None, got Codec"),
        (lambda: two_way("int8"), "must be a floating dtype, got int8"),
        (lambda: two_way(8), "must be a floating dtype or None, got 8"),
        (lambda: codecs.two_way("int8", "bfloat16"), "codec must be one of"),
    ],
)
def test_invalid_codec_input_is_rejected(call, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        call()


def test_contribution_of_another_codec_is_rejected():
    center = agn_optax.LocalCenter(
        shared.downpour(codec=codecs.quantize()), jnp.ones(3)
    )
    right = {"codes": jnp.zeros((1, 3), jnp.uint8), "scales": jnp.ones(1)}
    for wrong, where in (
        (jnp.ones(3), "different trees"),
        (
            {**right, "codes": jnp.zeros(4, jnp.uint8)},
            r"contribution has \['codes'\] uint8",
        ),
        ({**right, "codes": jnp.zeros((1, 3), jnp.int32)}, "uint8 is expected"),
    ):
        with pytest.raises(errors.TreeMismatchError, match=where):
            exchange(center, wrong, anchor_version=0, worker="w")
    assert exchange(center, right, anchor_version=0, worker="w").version == 1


def test_rule_difference_names_different_codecs():
    print_ = rules.fingerprint(shared.downpour(codec=codecs.quantize()))
    difference = rules.difference(print_, shared.downpour())
    assert (
        difference
        == "its codec is 'quantize(8, block=4096)', and here it is 'identity'"
    )
    named = dataclasses.replace(codecs.quantize(4), name=codecs.quantize().name)
    assert "encoding" in rules.difference(print_, shared.downpour(codec=named))
