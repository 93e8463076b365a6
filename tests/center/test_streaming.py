"""Workers that exchange fragments, each with the shard that holds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.pieces import row_shares
from helpers.support import (
    assert_close,
    assert_identical,
    at,
    feeds,
    run_worker,
    step,
    tree,
)
from helpers.waiting import LIMIT, in_background

import agn_optax
from agn_optax import codecs, errors
from agn_optax.center import Journal, ShardedCenter, Synchronous
from agn_optax.worker._shardings import ParamShardings

PERIOD = 4
FRAGMENTS = agn_optax.Fragments(2)
RANDOM = agn_optax.Fragments(2, seed=5)
PARAMS = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(5), "s": jnp.ones(())}
INNER = shared.adam(0.05)


def shards(rule=None, params=PARAMS, fragments=FRAGMENTS, **settings):
    """Return a center in shards with one fragment of the parameters each."""
    rule = rule or shared.diloco()
    parts = fragments.divide(params).cut(params)
    return ShardedCenter(
        [agn_optax.LocalCenter(rule, part, **settings) for part in parts],
        fragments=fragments,
    )


def worker_of(center, *, inner=INNER, **settings):
    settings = {"period": PERIOD, "fragments": FRAGMENTS, **settings}
    return agn_optax.Worker(center, inner, **settings)


def versions(center):
    return tuple(shard.version for shard in center.centers)


RULES = {
    "diloco": shared.diloco,
    "agn": lambda: shared.agn(shared.adam(0.05)),
    "easgd_rho": lambda: shared.easgd(0.3, rho=0.5),
    "codec": lambda: shared.downpour(codec=QUANTIZED),
}
QUANTIZED = codecs.error_feedback(codecs.quantize(4))


def test_8_periods_may_become_shorter_than_the_delay():
    """A message in flight is received, at the latest, when the next one is sent."""
    rule, params = shared.diloco(), tree()
    fragments = agn_optax.Fragments(2, delay=3)
    period = lambda exchanges: 4 - 2 * (exchanges > 0)  # noqa: E731
    targets = feeds(params, 11)
    tx = agn_optax.exchange_every(INNER, rule, period, fragments=fragments)
    local = jax.jit(functools.partial(step, tx))
    loop = params, tx.init(params)
    for i in range(11):
        loop = local(*loop, at(targets, i))
    worker = worker_of(shards(rule, params), fragments=fragments, period=period)
    actual, _ = run_worker(worker, *worker.start(), targets)
    assert_close(actual, loop[0], tolerance=2e-6)
    assert min(worker.version) == 3


def in_a_program(rule, params, targets, fragments):
    """Train one worker and its center with the split form."""
    tx = agn_optax.phases(INNER, rule, fragments=fragments)
    local, exchange = jax.jit(functools.partial(step, tx)), tx.exchange
    exchange = jax.jit(exchange, static_argnames=("fragment", "receive"))
    loop = params, tx.init(params)
    for i in range(len(jax.tree.leaves(targets)[0])):
        loop = local(*loop, at(targets, i))
        for which in fragments.due(i + 1, PERIOD):
            loop = exchange(*loop, **which)
    return loop


@pytest.mark.few(2)
@pytest.mark.parametrize("fragments", [FRAGMENTS, RANDOM], ids=["leaves", "elements"])
@pytest.mark.parametrize("name", RULES)
def test_8_fragments_give_the_numbers_of_the_split_form(name, fragments):
    rule, params = RULES[name](), tree()
    targets = feeds(params, 3 * PERIOD)
    loop = in_a_program(rule, params, targets, fragments)
    center = shards(rule, params, fragments)
    worker = worker_of(center, fragments=fragments)
    assert isinstance(worker, agn_optax.Worker)
    actual, state = run_worker(worker, *worker.start(), targets)
    assert versions(center) == (3, 3)
    before = name.startswith("easgd")  # easgd adopts the version before the message
    assert worker.version == ((2, 2) if before else (3, 3))
    assert worker.exchanges == 3
    assert_close(actual, loop[0], tolerance=2e-6)
    assert_close(center.pull().params, agn_optax.center_params(loop[1]), tolerance=2e-6)
    assert_close(state.inner_state, loop[1].inner_state, tolerance=2e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "receive"),
    [
        ("agn", {"mixing": 0.25}),
        ("codec", {"delay": 1}),
        ("agn", {"delay": 3, "mixing": 0.5}),
        ("diloco", {"delay": 2}),
    ],
)
def test_8_delay_and_mixing_give_the_numbers_of_the_split_form(name, receive):
    """With a delay of 2, a fragment is received when another one is sent."""
    rule, params = RULES[name](), tree()
    fragments = agn_optax.Fragments(2, **receive)
    targets = feeds(params, 3 * PERIOD + 1)
    loop = in_a_program(rule, params, targets, fragments)
    center = shards(rule, params)
    worker = worker_of(center, fragments=fragments)
    actual, state = run_worker(worker, *worker.start(), targets)
    assert_close(actual, loop[0], tolerance=2e-6)
    assert_close(state.inner_state, loop[1].inner_state, tolerance=2e-6)
    worker.flush(actual, state)  # messages in flight are received


def test_one_fragment_at_a_time_is_in_flight():
    """Each message, and what a center holds for it, has the size of a fragment."""
    sent = []
    params = {f"layer {i}": jnp.ones((16, 16)) for i in range(8)}
    model = sum(leaf.nbytes for leaf in params.values())

    def record(number, values):
        sent.append((values["fragment"], number, values["bytes_sent"]))

    center = shards(params=params)
    worker = worker_of(center, callbacks=[record])
    run_worker(worker, *worker.start(), feeds(params, 2 * PERIOD))
    assert sent == [(p, n, model / 2) for n in (1, 2) for p in (0, 1)]
    whole = agn_optax.LocalCenter(shared.diloco(), params)
    sent.clear()
    worker = agn_optax.Worker(
        whole, INNER, period=PERIOD, callbacks=[lambda n, v: sent.append(v)]
    )
    run_worker(worker, *worker.start(), feeds(params, PERIOD))
    assert [values["bytes_sent"] for values in sent] == [model]


@pytest.mark.parametrize("where", ["submit", "collect", "acknowledge"])
def test_failed_exchange_is_applied_once(where, monkeypatch):
    center = shards(shared.downpour())
    worker = worker_of(center, patience=0)
    local = jax.jit(functools.partial(step, worker.tx))
    loop = worker.start()
    targets = feeds(PARAMS, PERIOD)
    for i in range(PERIOD // 2 - 1):
        loop = worker.exchange(*local(*loop, at(targets, i)))
    loop = local(*loop, at(targets, PERIOD // 2))
    before = jax.tree.map(np.asarray, loop)

    def lost(*args, **kwargs):
        raise errors.CenterUnreachableError("nobody answers")

    session = sessions.of_worker(worker)
    with monkeypatch.context() as patch:
        patch.setattr(session, where, lost)
        with pytest.raises(errors.CenterUnreachableError):
            worker.exchange(*loop)
    assert_identical(loop, before)  # nothing has changed
    assert versions(center) == (int(where != "submit"), 0)
    params, _ = worker.exchange(*loop, steps=1)
    assert versions(center) == (*worker.version[:1], 0) == (1, 0)
    fragment = FRAGMENTS.divide(PARAMS)
    moved = center.pull().params
    assert_identical(fragment.take(0, params), fragment.take(0, moved))
    assert_identical(fragment.take(1, moved), fragment.take(1, PARAMS))


def test_interrupted_flush_is_continued(monkeypatch):
    center = shards(shared.downpour())
    worker = worker_of(center, patience=0)
    loop = step(worker.tx, *worker.start(), at(feeds(PARAMS, 1), 0))
    loop = worker.exchange(*loop)

    def lost(*args, **kwargs):
        raise errors.CenterUnreachableError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(sessions.of_worker(worker, 1), "submit", lost)
        with pytest.raises(errors.CenterUnreachableError):
            worker.flush(*loop)
    assert versions(center) == (1, 0)
    params, _ = worker.flush(*loop)
    assert versions(center) == (1, 1)
    assert_identical(params, center.pull().params)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"patience": 0},
        {"fragments": agn_optax.Fragments(2, delay=1)},
    ],
    ids=["waits", "overlaps", "has no patience", "delay"],
)
def test_flushes_of_synchronous_workers_a_step_apart_end(settings):
    """Otherwise workers in rounds a step apart would wait for each other."""
    center = shards(shared.downpour(), mode=Synchronous())
    workers = [worker_of(center, name=name, **settings) for name in "ab"]
    loops = [worker.start() for worker in workers]
    ended = []

    def train(worker, loop, steps):
        for i in range(steps):
            loop = worker.exchange(*step(worker.tx, *loop, at(feeds(PARAMS, 4), i)))
        worker.flush(*loop)
        worker.leave()
        ended.append(steps)

    calls = zip(workers, loops, (PERIOD // 2, PERIOD // 2 + 1), strict=True)
    futures = [
        in_background(functools.partial(train, *each), "a worker") for each in calls
    ]
    try:
        for future in futures:
            future.result(LIMIT)
    finally:
        for worker in workers:  # otherwise the other one would wait forever
            worker.leave()
    assert sorted(ended) == [PERIOD // 2, PERIOD // 2 + 1]


@pytest.mark.parametrize("fails", [0, 1])
def test_fragments_sent_before_an_error_are_not_sent_again(fails, monkeypatch):
    center = shards(shared.downpour())
    worker = worker_of(center)
    loop = step(worker.tx, *worker.start(), at(feeds(PARAMS, 1), 0))
    loop = worker.exchange(*loop)
    sent = []

    def counted(p, submit, submission):
        sent.append((p, submission.sequence))
        if sent.count((fails, 1)) == 1 and p == fails:
            raise errors.MessageRejectedError("not this one")
        return submit(submission)

    for p, each in enumerate(worker._workers):
        submit = each.session.submit
        monkeypatch.setattr(
            each.session, "submit", functools.partial(counted, p, submit)
        )
    with pytest.raises(errors.MessageRejectedError):
        worker.flush(*loop)
    params, _ = worker.flush(*loop)
    assert sorted(sent) == sorted([(0, 1), (1, 1), (fails, 1)])
    assert versions(center) == worker.version == (1, 1)
    assert_identical(params, center.pull().params)


def test_fragments_due_at_the_same_step_take_turns():
    together = agn_optax.Fragments(2, offsets=(2, 2))
    center = shards()
    worker = worker_of(center, fragments=together)
    local = jax.jit(functools.partial(step, worker.tx))
    loop, seen = worker.start(), []
    for i in range(2 * PERIOD):
        assert worker.due == (i % PERIOD in (1, 2))
        loop = worker.exchange(*local(*loop, at(feeds(PARAMS, 2 * PERIOD), i)))
        seen.append(worker.version)
    assert seen == [(0, 0), (1, 0), *[(1, 1)] * 3, (2, 1), (2, 2), (2, 2)]


def test_3_delayed_elastic_force_conserves_the_sum():
    """All gradient steps of the worker are in the sum of worker and center."""
    center = shards(shared.easgd(0.3))
    worker = worker_of(
        center, inner=shared.sgd(0.1), fragments=agn_optax.Fragments(2, delay=1)
    )
    params, state = worker.start()
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    for step_ in range(1, 3 * PERIOD + 2):
        updates, state = worker.tx.update(ones, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
        if step_ % PERIOD in (1, 3):  # all messages were received
            total = optax.tree.add(params, center.pull().params)
            made = jax.tree.map(lambda x, n=step_: 2 * x - 0.1 * n, PARAMS)
            assert_close(total, made, tolerance=1e-6)
    assert versions(center) == (3, 3)
    assert not np.allclose(params["b"], 1.0 - 0.1 * step_)  # the force is not zero


def test_fragment_is_received_exactly_after_its_delay():
    """It is not received earlier, even if its response is there, nor later."""
    center = shards()
    fragments = agn_optax.Fragments(2, delay=2)
    worker = worker_of(center, fragments=fragments)
    local = jax.jit(functools.partial(step, worker.tx))
    loop, due, seen = worker.start(), [], []
    for i in range(2 * PERIOD):
        loop = local(*loop, at(feeds(PARAMS, 2 * PERIOD), i))
        if i % PERIOD == PERIOD // 2 and i:  # a message was sent at the step before
            flight = sessions.fragment(worker).message.flight
            flight.result(60)
        due.append(worker.due)
        loop = worker.exchange(*loop)
        seen.append(worker.version)
    assert due == [False, True] * PERIOD
    assert seen == [*[(0, 0)] * 3, *[(1, 0)] * 2, *[(1, 1)] * 2, (2, 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("late", [{}, {"overlap": True}, {"delay": 1}], ids=repr)
def test_all_fragments_take_turns_if_a_call_makes_a_whole_period(late):
    delay = late.get("delay", 0)
    worker = worker_of(
        shards(),
        fragments=agn_optax.Fragments(2, delay=delay),
        overlap=late.get("overlap", False),
    )
    loop = worker.start()
    for i in range(8):
        loop = step(worker.tx, *loop, at(feeds(PARAMS, 8), i))
        loop = worker.exchange(*loop, steps=PERIOD)
    worker.flush(*loop)
    counts = worker.version  # one for each exchange of a fragment
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 4


def test_receive_without_a_message_keeps_the_norm():
    worker = worker_of(shards(), fragments=agn_optax.Fragments(2, delay=1))
    targets = feeds(PARAMS, PERIOD)
    loop = run_worker(worker, *worker.start(), at_first(targets, PERIOD // 2 + 1))
    assert worker.exchanges == 0  # the second fragment has none
    norm = float(worker.norm)
    worker.receive(*loop)
    assert float(worker.norm) == norm > 0


@pytest.mark.parametrize("late", [{}, {"overlap": True}, {"delay": 1, "mixing": 0.5}])
def test_9_restored_worker_continues_bit_for_bit(late):
    targets = feeds(PARAMS, 3 * PERIOD)
    stop = PERIOD + 1
    part = lambda begin, end: jax.tree.map(lambda x: x[begin:end], targets)  # noqa: E731
    # It waits after one local step at most, so timing changes nothing.
    delayed = {k: v for k, v in late.items() if k != "overlap"}
    settings = {"overlap": "overlap" in late, "patience": 1}
    settings["fragments"] = agn_optax.Fragments(2, **delayed)

    center = shards()
    worker = worker_of(center, **settings)
    loop = run_worker(worker, *worker.start(), part(0, stop))
    loop = worker.receive(*loop)
    saved = worker.save(*loop)
    saved = jax.tree.map(np.asarray, saved)
    again = ShardedCenter(
        [
            agn_optax.LocalCenter.restore(shard.rule, shard.save())
            for shard in center.centers
        ],
        fragments=FRAGMENTS,
    )
    end = jax.tree.map(
        np.asarray, worker.flush(*run_worker(worker, *loop, part(stop, 3 * PERIOD)))
    )
    other = worker_of(again, **settings)
    loop = other.restore(saved)
    assert other.exchanges == 1
    loop = other.flush(*run_worker(other, *loop, part(stop, 3 * PERIOD)))
    assert_identical(loop, end)
    assert_identical(again.pull().params, center.pull().params)


def test_restarted_shards_have_all_messages_of_their_fragments(tmp_path):
    rule, targets = shared.downpour(), feeds(PARAMS, 2 * PERIOD)
    parts = FRAGMENTS.divide(PARAMS).cut(PARAMS)

    def begun(parts):
        return ShardedCenter(
            [
                agn_optax.LocalCenter(rule, part, durability=Journal(tmp_path / str(p)))
                for p, part in enumerate(parts)
            ],
            fragments=FRAGMENTS,
        )

    center = begun(parts)
    worker = worker_of(center)
    loop = run_worker(worker, *worker.start(), at_first(targets, PERIOD + 2))
    assert versions(center) == (2, 1)
    saved, token, before = worker.save(*loop), worker.resume_token, center.pull().params
    for shard in center.centers:
        shard.close()
    center = begun([None, None])
    assert versions(center) == (2, 1)
    assert_identical(center.pull().params, before)
    other = worker_of(center, name=worker.name)
    loop = other.restore(saved, resume_token=token)
    rest = jax.tree.map(lambda x: x[PERIOD + 2 :], targets)
    run_worker(other, *loop, rest)
    assert versions(center) == (2, 2)
    for shard in center.centers:
        shard.close()


def at_first(targets, count):
    return jax.tree.map(lambda x: x[:count], targets)


def test_rejected_message_resets_a_non_finite_inner_state():
    center = shards(shared.downpour())
    worker = worker_of(center)
    params, state = worker.start()
    bad = jax.tree.map(jnp.zeros_like, PARAMS) | {"b": jnp.full(5, jnp.nan)}
    for _ in range(PERIOD):
        updates, state = worker.tx.update(bad, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    assert worker.rejected == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


def test_invalid_fragment_settings_and_calls_are_rejected():
    whole = agn_optax.LocalCenter(shared.downpour(), PARAMS)
    for center, message in [
        (whole, "2 fragments, and shards: 1"),
        (shards(), "3 fragments"),
    ]:
        with pytest.raises(errors.InvalidArgumentError, match=message):
            worker_of(
                center, fragments=agn_optax.Fragments(3 if center is not whole else 2)
            )
    with pytest.raises(errors.InvalidArgumentError, match="delay=1, overlap=True"):
        worker_of(shards(), fragments=agn_optax.Fragments(2, delay=1), overlap=True)
    with pytest.raises(errors.InvalidArgumentError, match="must be complete before"):
        worker_of(shards(), fragments=agn_optax.Fragments(2, delay=PERIOD))
    elastic = shards(shared.easgd(0.3))
    with pytest.raises(errors.InvalidArgumentError, match="same force, and mixing"):
        worker_of(elastic, fragments=agn_optax.Fragments(2, mixing=0.5))
    with pytest.raises(errors.InvalidTypeError, match="that exchanges all at once"):
        worker_of(shards(), period=agn_optax.dynamic_period(8))
    with pytest.raises(errors.InvalidTypeError, match="fragments must be an agn_optax"):
        worker_of(shards(), fragments=2)
    with pytest.raises(errors.InvalidArgumentError, match="offsets=\\(1, 9\\)"):
        worker_of(shards(), fragments=agn_optax.Fragments(2, offsets=(1, 9)))
    with pytest.raises(errors.InvalidArgumentError, match="exchanges with a center of"):
        worker_of(shards(), inner=agn_optax.downpour(optax.sgd(0.1), 2)).start()
    with pytest.raises(errors.WorkerStateError, match="has not started"):
        worker_of(shards()).exchange(PARAMS, None, steps=PERIOD)
    worker = worker_of(shards())
    params, state = worker.start()
    with pytest.raises(
        errors.TreeMismatchError, match=r"pass the state that worker\.start"
    ):
        worker.flush(params, None)
    with pytest.raises(errors.TreeMismatchError, match="1 fragments, and this wor"):
        worker.flush(params, state._replace(fragments=state.fragments[:1]))
    saved = worker.save(params, state)
    with pytest.raises(
        errors.WorkerStateError, match="resume_token is of a worker with 1"
    ):
        worker.restore(saved, resume_token=worker.resume_token[:1])
    with pytest.raises(errors.InvalidArgumentError, match="in 2 shards needs as many"):
        ShardedCenter(worker.center.centers, fragments=agn_optax.Fragments(3))


def test_workers_with_and_without_fragments_share_a_center():
    center = shards(shared.downpour())
    streaming, plain = worker_of(center, name="a"), None
    plain = agn_optax.Worker(center, INNER, period=PERIOD, name="b")
    loops = [streaming.start(), plain.start()]
    targets = feeds(PARAMS, PERIOD)
    loops = [
        run_worker(worker, *loop, targets)
        for worker, loop in zip((streaming, plain), loops, strict=True)
    ]
    assert versions(center) == (2, 2)
    assert_identical(loops[1][0], center.pull().params)


def test_subclass_of_worker_takes_fragments():
    class Own(agn_optax.Worker):
        pass

    worker = worker_of(shards())
    own = Own(shards(), INNER, period=PERIOD, fragments=FRAGMENTS)
    targets = feeds(PARAMS, PERIOD)
    each = [run_worker(w, *w.start(), targets) for w in (worker, own)]
    assert_identical(*each)


def test_worker_with_another_seed_is_rejected_by_name():
    center = shards(fragments=RANDOM)
    worker_of(center, fragments=RANDOM).start(PARAMS)
    other = worker_of(center, fragments=agn_optax.Fragments(2, seed=6), name="other")
    with pytest.raises(errors.TreeMismatchError, match=r"seed=6.*seed=5"):
        other.start(PARAMS)


@pytest.mark.parametrize("fragments", [FRAGMENTS, RANDOM], ids=["leaves", "elements"])
def test_donated_parameters_are_rejected_by_name(fragments):
    worker = worker_of(shards(fragments=fragments), fragments=fragments, period=1)
    params, state = worker.start()
    params["a"].delete()
    with pytest.raises(errors.WorkerStateError, match=r"\['a'\] has been donated"):
        worker.exchange(params, state)


def test_worker_of_several_processes_rejects_random_elements(monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.device_put({"w": jnp.ones((4, 2))}, rows)
    worker = worker_of(shards(params=params, fragments=RANDOM), fragments=RANDOM)
    monkeypatch.setattr(ParamShardings, "spans_processes", True)
    rejected = r"random elements.*several processes"
    with pytest.raises(errors.InvalidArgumentError, match=rejected):
        worker.start(params)
    share, *_ = row_shares(params, 2)  # of a worker that exchanges the whole model
    with pytest.raises(errors.InvalidArgumentError, match=rejected):
        share.cut(RANDOM.divide(params))


def test_whole_model_is_read_and_exchanged_in_random_elements():
    center = shards(shared.downpour(), fragments=RANDOM)
    assert_identical(center.pull().params, PARAMS)
    worker = worker_of(center, fragments=None, inner=shared.sgd(0.1), period=1)
    params, state = worker.start(PARAMS)
    moved = jax.tree.map(lambda x: x + 1, params)
    adopted, _ = worker.exchange(moved, state)
    assert_close(adopted, jax.tree.map(lambda x: x + 1, PARAMS))
    encoded = shards(shared.downpour(codec=QUANTIZED), fragments=RANDOM)
    worker = worker_of(encoded, fragments=None, inner=shared.sgd(0.1), period=1)
    with pytest.raises(errors.InvalidArgumentError, match="a center in shards and"):
        worker.start(PARAMS)
    params, state = worker.start()
    with pytest.raises(errors.InvalidArgumentError, match="encodes the whole model"):
        worker.exchange(params, state)
