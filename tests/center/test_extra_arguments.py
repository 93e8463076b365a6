"""Extra arguments of center optimizers: staleness, steps, weight and others.

They are the same for every kind of center, after a restart, in rounds and on meshes.
"""

import contextlib
import dataclasses
import functools
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import center_kinds, sessions, shared
from helpers.support import (
    assert_close,
    assert_identical,
    at,
    feeds,
    nothing_compiles,
    run_worker,
    tree,
)

import agn_optax
from agn_optax import checkpoint, errors, rules, service
from agn_optax.center import Journal, MessageLimits, Submission, Synchronous, _store
from agn_optax.service.transports import GrpcLink

LIMIT = 60  # s, generous: no test should come near it
NAMES = ("staleness", "steps", "weight", "since", "workers", "worker")


class Extras(NamedTuple):
    """The extra arguments for the last message."""

    staleness: Any
    steps: Any
    weight: Any
    since: Any
    workers: Any
    worker: Any


def move(updates, state, params=None, *, outside=False, **extra):
    """Move along the message by its weight per step, less for stale messages."""
    del params, outside
    extra = Extras(*(extra[name] for name in NAMES))
    rate = 0.1 * extra.weight / extra.steps / (1 + extra.staleness)
    rate = rate * (1 + 0.01 * (extra.since % 7) + 0.1 * extra.workers)
    rate = rate * (1 + 0.05 * extra.worker)
    return jax.tree.map(lambda u: -(u * rate).astype(u.dtype), updates), extra


def no_extras(params):
    del params
    return Extras(*(jnp.zeros((), "f4" if n == "weight" else "i4") for n in NAMES))


ASKS = agn_optax.elementwise(optax.GradientTransformationExtraArgs(no_extras, move))
RULE = rules.diloco(ASKS)
AGN = rules.agn(ASKS)


def received_extras(center):
    """Return the extra arguments that an embedded center's optimizer received."""
    return tuple(
        float(x) if name == "weight" else int(x)
        for name, x in zip(NAMES, center.save().center_state, strict=True)
    )


def test_center_optimizer_gets_the_extras_of_each_message():
    center = agn_optax.LocalCenter(RULE, jnp.ones(3))
    anna, bert = (
        agn_optax.Worker(center, shared.sgd(0.1), period=4, name=name)
        for name in ("anna", "bert")
    )
    loops = {worker: worker.start() for worker in (anna, bert)}

    def local(worker, **arguments):
        loops[worker] = worker.exchange(*loops[worker], **arguments)

    local(anna, weight=3)
    local(anna, steps=3, weight=np.float32(0.5))  # the sum over the round
    assert received_extras(center) == (0, 4, 3.5, 0, 2, 0)
    local(bert, steps=6)  # the default weight is 1
    assert received_extras(center) == (1, 6, 1.0, 0, 2, 1)
    local(anna, steps=4)  # the weight of the round before is gone
    assert received_extras(center) == (1, 4, 1.0, 1, 2, 0)
    anna.leave()
    local(bert, weight=2.0)
    loops[bert] = bert.flush(*loops[bert])
    assert received_extras(center) == (1, 1, 2.0, 2, 1, 1)
    local(bert, steps=3, weight=7.0)
    loops[bert] = bert.flush(*loops[bert])
    assert received_extras(center) == (0, 3, 7.0, 4, 1, 1)


@functools.cache
def trained(kind, rule):
    """Train two workers in turns, with their own round lengths and weights."""
    with center_kinds.made(kind, rule) as center:
        workers = [
            agn_optax.Worker(center, shared.adam(0.05), period=2 + i, name=f"w{i}")
            for i in range(2)
        ]
        loops = [w.start(tree(), chief=not i) for i, w in enumerate(workers)]
        for part in range(3):
            for i, worker in enumerate(workers):
                more = feeds(tree(), 3, seed=10 * part + i)
                loops[i] = run_worker(worker, *loops[i], more)
                loops[i] = worker.flush(*worker.exchange(*loops[i], weight=2.5 + i))
        return jax.tree.map(np.asarray, (loops, center.pull().params))


@pytest.mark.parametrize("rule", [RULE, AGN], ids=["diloco", "agn"])
@pytest.mark.parametrize("kind", [k for k in center_kinds.KINDS if k != "local"])
def test_law_7_every_center_gives_the_numbers_of_the_embedded_one(kind, rule):
    expected = trained("local", rule)
    assert_of = assert_close if kind == "shards" else assert_identical
    assert_of(trained(kind, rule), expected)


def test_law_9_restored_worker_keeps_the_weight_of_its_round(tmp_path):
    """It is stopped within a round for which a weight was given."""
    targets = feeds(tree(), 8)

    def part(loop, worker, start, stop):
        for i in range(start, stop):
            feed = at(targets, i)
            updates, state = worker.tx.update(feed, loop[1], loop[0])
            params = optax.apply_updates(loop[0], updates)
            arguments = {} if i % 3 == 1 else {"weight": 1.5 + i}
            loop = worker.exchange(params, state, **arguments)
        return loop

    def begin():
        center = agn_optax.LocalCenter(RULE, tree())
        return center, agn_optax.Worker(center, shared.adam(0.05), period=3)

    center, worker = begin()
    expected = part(worker.start(), worker, 0, 8)
    for stop in (3, 5):
        first, stopped = begin()
        loop = part(stopped.start(), stopped, 0, stop)
        saved = first.save(), stopped.save(*loop)
        again = agn_optax.LocalCenter.restore(RULE, saved[0])
        other = agn_optax.Worker(again, shared.adam(0.05), period=3)
        loop = part(other.restore(saved[1]), other, stop, 8)
        assert_identical((loop, again.save()), (expected, center.save()))
        # The same through checkpoint files.
        place = tmp_path / f"after {stop}"
        loop = stopped.restore(saved[1])
        checkpoint.save(place, worker=(stopped, *loop), center=first)
        again = agn_optax.LocalCenter(RULE)
        other = agn_optax.Worker(again, shared.adam(0.05), period=3)
        there = checkpoint.load(place, worker=other, center=again, like=tree())
        loop = part(there["worker"], other, stop, 8)
        assert_identical((loop, again.save()), (expected, center.save()))


@pytest.mark.parametrize("mode", [None, Synchronous()], ids=["one by one", "rounds"])
def test_journal_replays_extras_bit_for_bit(mode, tmp_path):
    kept = Journal(tmp_path / "a")
    center = agn_optax.LocalCenter(RULE, jnp.ones(3), mode=mode, durability=kept)
    joined = [center.join(f"w{i}") for i in range(3)]
    for sequence in (1, 2):
        for i, session in enumerate(joined):
            session.submit(
                Submission(
                    sequence,
                    jnp.full(3, 0.1 * i + sequence),
                    anchor_version=0,
                    steps=i + sequence,
                    weight=None if i == 1 else 0.3 + i,
                )
            )
    for session in joined:
        session.collect(2, LIMIT)
    shutil.copytree(
        tmp_path / "a", tmp_path / "b"
    )  # as the end of the process leaves it
    again = agn_optax.LocalCenter(RULE, durability=Journal(tmp_path / "b"), mode=mode)
    assert again.version == (2 if mode else 6)
    assert_identical(again.save(), center.save())
    again.close()
    center.close()


def test_worker_has_the_same_index_after_a_restart(tmp_path):
    """Another worker gets it only if its last worker has left."""
    center = agn_optax.LocalCenter(RULE, jnp.ones(3), durability=Journal(tmp_path))

    def index_of(center, worker):
        sessions.exchange(center, jnp.ones(3), anchor_version=0, worker=worker)
        return received_extras(center)[-1]

    assert [index_of(center, name) for name in "abc"] == [0, 1, 2]
    center.close()
    again = agn_optax.LocalCenter(RULE, durability=Journal(tmp_path))
    assert [index_of(again, name) for name in "cad"] == [2, 0, 3]
    again.join("b").leave()
    assert [index_of(again, name) for name in "eb"] == [1, 4]
    again.close()


# Rounds and meshes.

SENT = np.array([[1.0, 3.0], [-6.0, 12.0], [0.5, 0.25]], np.float32)
STEPS = (2, 4, 9)


def a_round(rule, weights, steps=STEPS):
    center = agn_optax.LocalCenter(rule, jnp.zeros(2), mode=Synchronous())
    joined = [center.join(f"w{i}") for i in range(3)]
    for session, sent, weight, made in zip(joined, SENT, weights, steps, strict=True):
        session.submit(Submission(1, sent, anchor_version=0, steps=made, weight=weight))
    for session in joined:
        assert session.collect(1, LIMIT).applied
    return center


def test_round_is_the_weighted_mean():
    weights = (1.0, 2.5, 4.0)
    center = a_round(shared.average(), weights)
    expected = -np.average(SENT, axis=0, weights=weights)
    np.testing.assert_allclose(center.pull().params, expected, rtol=1e-6)
    # A sum ignores weights.
    center = a_round(shared.downpour(), weights)
    np.testing.assert_allclose(center.pull().params, -SENT.sum(0), rtol=1e-6)


@pytest.mark.parametrize("weights", [(1.0,) * 3, (None, 1, None), (1e30,) * 3])
def test_equal_weights_change_nothing(weights):
    expected = a_round(shared.average(), (None,) * 3)
    assert_identical(a_round(shared.average(), weights).save(), expected.save())
    total = SENT[0] + SENT[1] + SENT[2]
    np.testing.assert_array_equal(expected.pull().params, -(total / np.float32(3)))


def test_round_has_the_mean_steps_and_weight():
    center = a_round(RULE, (1.0, 2.5, 4.0))
    assert received_extras(center) == (0, 5, 2.5, 0, 3, -1)
    center = a_round(RULE, (None,) * 3, (0, 0, 0))
    assert received_extras(center) == (0, 1, 1.0, 0, 3, -1)


def test_late_message_is_scaled_by_staleness_and_weight():
    """Both the rounds that it missed and its weight count."""
    mode = Synchronous(quorum=1, late="weighted")
    center = agn_optax.LocalCenter(shared.average(), jnp.zeros(2), mode=mode)
    late, early = center.join("b"), center.join("a")
    early.exchange(Submission(1, SENT[0], anchor_version=0))
    with center.core.atomically():  # both messages must be there when the round ends
        center.core.ledger.mode = Synchronous()
    late.submit(Submission(1, SENT[1], anchor_version=0, weight=3.0))
    with center.core.atomically():
        center.core.ledger.mode = dataclasses.replace(mode, quorum=2)
    early.submit(Submission(2, SENT[2], anchor_version=1, weight=1.0))
    answer = early.collect(2, LIMIT)
    # The mean weight is 2; the late message is one round late.
    expected = -SENT[0] - (SENT[1] * 1.5 / 2 + SENT[2] * 0.5) / 2
    np.testing.assert_allclose(answer.params, expected, rtol=1e-6)


CODECS = {
    "as they are": None,
    "in 8 bits": agn_optax.codecs.quantize(8, block=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_mesh_weights_messages_like_a_round(codec):
    weights = jnp.array([1.0, 2.5, 4.0])
    rule = rules.average(codec=CODECS[codec])
    tx = agn_optax.exchange_every(optax.sgd(1.0), rule, 1, axis_name="workers")

    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers")
    def step(sent, weight):
        params = jnp.zeros(2)
        _, state = tx.update(sent, tx.init(params), params, weight=weight)
        return agn_optax.center_params(state)

    expected = -np.average(SENT, axis=0, weights=weights)
    exact = {"rtol": 1e-6} if CODECS[codec] is None else {"atol": 0.05}
    found = step(SENT, weights)
    np.testing.assert_allclose(found, np.stack([expected] * 3), **exact)


def test_sharded_center_weights_messages_like_a_whole_one():
    """It has pieces of a leaf and a whole leaf, from workers in two orders."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("groups", "workers"), axis_types=kinds)
    weights = jnp.array([1.0, 2.0, 3.0, 10.0])
    sent = {
        "cut": jnp.arange(4.0 * 8).reshape(4, 8),
        "whole": jnp.array([[1.0], [5.0], [-3.0], [8.0]]),
    }
    found = {}
    for codec in (None, agn_optax.codecs.cast("float32")):
        rule = rules.average(codec=codec)
        tx = agn_optax.exchange_every(
            optax.sgd(1.0),
            rule,
            1,
            axis_name=("groups", "workers"),
            placement=agn_optax.Placement(shard_axis="workers"),
        )

        def step(sent, weight, tx=tx):
            own = jax.tree.map(lambda x: x[0], sent)
            params = jax.tree.map(jnp.zeros_like, own)
            updates, _ = tx.update(own, tx.init(params), params, weight=weight[0])
            return jax.tree.map(lambda u: u[None], updates)

        rows = jax.P(("groups", "workers"))
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
        )
        found[codec] = jax.jit(run)(sent, weights)
        for name, of in sent.items():
            expected = -np.average(of, axis=0, weights=weights)
            np.testing.assert_allclose(
                found[codec][name], np.stack([expected] * 4), rtol=1e-5
            )


def test_center_optimizer_on_a_mesh_gets_mean_steps_and_weight():
    tx = agn_optax.exchange_every(optax.sgd(1.0), RULE, 2, axis_name="workers")

    @functools.partial(jax.vmap, axis_name="workers")
    def run(sent, weight):
        params = jnp.zeros(2)
        state = tx.init(params)
        for i in range(6):
            arguments = {"weight": weight} if i == 3 else {}
            updates, state = tx.update(sent, state, params, **arguments)
            params = optax.apply_updates(params, updates)
            if i == 3:
                second = state.center_state
        return second, state.center_state

    second, third = jax.jit(run)(SENT, jnp.array([1.0, 2.5, 4.0]))
    for received, expected in (
        (second, (0, 2, 2.5, 1, 3, -1)),
        (third, (0, 2, 1.0, 2, 3, -1)),
    ):
        for found, one in zip(received, expected, strict=True):
            np.testing.assert_array_equal(found, np.full(3, one, found.dtype))
    with pytest.raises(errors.InvalidArgumentError, match=r"weight.*\(0"):
        jax.vmap(
            lambda p: tx.update(p, tx.init(p), p, weight=0.0), axis_name="workers"
        )(jnp.zeros((3, 2)))


# Costs.


def test_changing_extras_compile_nothing_and_transfer_explicitly():
    center = agn_optax.LocalCenter(RULE, jnp.ones(3))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    loop = worker.start()
    for i in range(2):
        loop = worker.exchange(*loop, weight=0.5 + i)
    with nothing_compiles(), jax.transfer_guard("disallow"):
        for i in range(5):
            loop = worker.exchange(*loop, steps=1 + i, weight=10.0 + i)
    assert received_extras(center)[1:3] == (5, 14.0)


def test_unused_extras_are_no_program_arguments():
    """Arguments that a center optimizer ignores are not arguments of its program."""
    seen = {}
    for rule, name in ((shared.diloco(), "ignores"), (RULE, "asks")):
        center = agn_optax.LocalCenter(rule, jnp.ones(3))
        sessions.exchange(center, jnp.ones(3), anchor_version=0, worker="w")
        store = center.core.store
        sent = Submission(2, jnp.ones(3), anchor_version=1, steps=2, weight=3.0)
        extra = _store._extra(1, 0, sent, workers=1, index=0)
        params, state = store.current.params, store._center_state
        lowered = store._programs.move.in_place.lower(
            sent.contribution, extra, params, state
        )
        main = lowered.as_text().split("@main(", 1)[1].split("->", 1)[0]
        seen[name] = main.count("%arg")
    # The message, the center and its momentum; the state of ASKS is not read.
    assert seen["ignores"] == 3
    assert seen["asks"] >= 2 + 7


# Rejected values.

BAD = [0, -1.0, float("nan"), float("inf"), 1e39, 1e-40]


@pytest.mark.parametrize("weight", BAD)
def test_weight_out_of_range_is_rejected(weight):
    center = agn_optax.LocalCenter(RULE, jnp.ones(3))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    loop = worker.start()
    with pytest.raises(errors.InvalidArgumentError, match="weight must be a posit"):
        worker.exchange(*loop, weight=weight)
    assert worker.exchange(*loop, weight=2.0) is not None
    assert received_extras(center)[1:3] == (
        1,
        2.0,
    )  # the rejected weights were not counted
    session = center.join("w")
    with pytest.raises(errors.InvalidArgumentError, match="weight"):
        session.exchange(Submission(1, jnp.ones(3), anchor_version=1, weight=weight))
    assert center.version == 1


@pytest.mark.parametrize("weight", ["3", True, jnp.float32(3.0), np.ones(1)])
def test_weight_that_is_not_a_number_is_rejected(weight):
    """A device array is rejected because the worker would have to wait for it."""
    center = agn_optax.LocalCenter(RULE, jnp.ones(3))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    loop = worker.start()
    with pytest.raises(errors.InvalidTypeError, match="weight must be a positive"):
        worker.exchange(*loop, weight=weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": float("nan")}, "weight must be"),
        ({"weight": -2.0}, "weight must be"),
        ({"weight": 0.0}, "weight must be"),
        ({"weight": 1e300}, "weight must be"),
        ({"steps": 1 << 40}, "steps must be"),
    ],
)
def test_service_rejects_invalid_extras(fields, message, monkeypatch):
    """The worker's own checks are disabled."""
    send = GrpcLink.send

    def lies(link, frame):
        if frame.header.HasField("message"):
            for name, value in fields.items():
                setattr(frame.header.message, name, value)
        send(link, frame)

    with (
        service.serve(RULE, jnp.ones(3)) as server,
        service.connect(server.address, RULE, transports=["grpc"]) as center,
    ):
        session = center.join("w")
        with monkeypatch.context() as patch:
            patch.setattr(GrpcLink, "send", lies)
            with pytest.raises(errors.InvalidArgumentError, match=message):
                session.exchange(Submission(1, jnp.ones(3), anchor_version=0))
        answer = session.exchange(
            Submission(1, jnp.ones(3), anchor_version=0, weight=2.0)
        )
        assert (answer.version, answer.staleness) == (1, 0)


@pytest.mark.parametrize("kind", ["local", "server"])
def test_center_limits_steps_and_weight(kind):
    limits = MessageLimits(steps=10, weight=100.0)
    with center_kinds.made(kind, shared.downpour(), jnp.zeros(3), messages=limits) as c:
        session = c.join("w")
        one = jnp.ones(3)
        answer = session.exchange(
            Submission(1, one, anchor_version=0, steps=10, weight=100.0)
        )
        assert answer.applied
        for sequence, claim in ((2, {"steps": 11}), (3, {"weight": 100.5})):
            answer = session.exchange(
                Submission(sequence, one, anchor_version=1, **claim)
            )
            (name,) = claim
            assert f"claims {name}=1" in answer.rejected
        assert answer.version == 1
    for name, value in (("steps", 0), ("weight", 0.0), ("weight", float("inf"))):
        with pytest.raises(errors.InvalidArgumentError, match=name):
            MessageLimits(**{name: value})


def test_by_local_steps_is_rejected_outside_the_program():
    """It is also rejected within another optimizer."""
    inner = rules.by_local_steps(optax.sgd(optax.constant_schedule(0.1)))
    rule = rules.diloco(optax.chain(optax.clip(1.0), inner))
    center = agn_optax.LocalCenter(rule, jnp.ones(3))
    with pytest.raises(errors.InvalidArgumentError, match="cannot count local steps"):
        center.join("w").exchange(Submission(1, jnp.ones(3), anchor_version=0))
    tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 1)
    params = jnp.ones(3)
    tx.update(params, tx.init(params), params)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.masked(tx, {"a": True, "b": False}),
        lambda tx: optax.chain(optax.scale(1.0), tx),
        lambda tx: optax.partition({"x": tx, "y": tx}, {"a": "x", "b": "y"}),
        lambda tx: optax.apply_if_finite(tx, 2),
    ],
    ids=["masked", "chain", "partition", "apply_if_finite"],
)
def test_optax_wrappers_pass_extras_on(around):
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    center = agn_optax.LocalCenter(rules.diloco(around(ASKS)), params)
    center.join("w").exchange(
        Submission(1, params, anchor_version=0, steps=4, weight=2.0)
    )
    expected = 1 - 0.1 * 2 / 4 * 1.1
    np.testing.assert_allclose(center.pull().params["a"], expected, rtol=1e-6)


def test_resumed_message_has_the_same_extras(tmp_path):
    """The checkpoint is written before the message is sent, with its metadata."""
    kept = Journal(tmp_path / "center")
    center = agn_optax.LocalCenter(RULE, jnp.zeros(3), durability=kept)

    def resumable():
        worker = agn_optax.Worker(center, shared.sgd(0.1), period=2, name="w")
        return checkpoint.Resumable(worker, tmp_path / "worker")

    class KilledError(BaseException):
        """Stand-in for a signal."""

    with contextlib.closing(resumable()) as first:
        loop = first.start()
        loop = first.exchange(*loop, weight=1.5)

        def killed(*args, **kwargs):
            raise KilledError

        sessions.of_worker(first.worker).exchange = killed
        with pytest.raises(KilledError):
            first.exchange(*loop, weight=2.0)
        sessions.fragment(first.worker).session = None  # it does not leave
    assert center.version == 0
    with contextlib.closing(resumable()) as again:
        again.start()
        assert received_extras(center) == (0, 2, 3.5, 0, 1, 0)
    center.close()
