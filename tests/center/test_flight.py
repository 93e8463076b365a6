"""Exchanges in flight: lost, rejected, late, and overlapped with local steps."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared, waiting
from helpers.support import RULES, assert_close, assert_identical, tree

import agn_optax
from agn_optax import checkpoint, errors
from agn_optax.center import BoundedStaleness, Journal, Session, ShardedCenter

LIMIT = 60  # s, generous: no test should come near it


class Watched(agn_optax.LocalCenter):
    """A center behind a link that can fail; it records the messages."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.there = threading.Event()
        self.there.set()
        self.rejects = False
        self.sent = []  # sequence, contribution and steps of every attempt

    def submitted(self, submission):
        """Hook for centers with planned failures."""

    def join(self, *args, **kwargs):
        return Link(self, super().join(*args, **kwargs))


class Link(Session):
    def __init__(self, center, session):
        self.worker, self.session_id = session.worker, session.session_id
        self.resume_token = session.resume_token
        self.center, self.session = center, session

    def submit(self, submission):
        seen = jax.tree.map(np.array, submission.contribution)
        self.center.sent.append((submission.sequence, seen, submission.steps))
        self.center.submitted(submission)
        if self.center.rejects:
            raise errors.MessageRejectedError("not this one")
        if not self.center.there.is_set():
            raise errors.CenterUnreachableError("nobody answers")
        self.session.submit(submission)

    def collect(self, sequence, timeout=None):
        return self.session.collect(sequence, timeout)

    def acknowledge(self, sequence):
        self.session.acknowledge(sequence)

    def disconnect(self):
        self.session.disconnect()

    def leave(self):
        self.session.leave()


class Loop:
    """A loop of local steps with a gradient of 1, which donates its arrays."""

    def __init__(self, center, lr=1.0, **settings):
        self.worker = agn_optax.Worker(center, shared.sgd(lr), name="anna", **settings)
        self.params, self.state = self.worker.start()

        def step(params, state):
            ones = jax.tree.map(jnp.ones_like, params)
            updates, state = self.worker.tx.update(ones, state, params)
            return optax.apply_updates(params, updates), state

        self.local = jax.jit(step, donate_argnums=(0, 1))

    def local_step(self):
        self.params, self.state = self.local(self.params, self.state)

    def step(self, times=1):
        for _ in range(times):
            self.local_step()
            self.exchange()

    def exchange(self, **arguments):
        loop = self.worker.exchange(self.params, self.state, **arguments)
        self.params, self.state = loop

    def flush(self):
        self.params, self.state = self.worker.flush(self.params, self.state)

    @property
    def sent(self):
        return self.worker.center.sent


def of_one_round(name, steps):
    """Return a contribution for gradients of 1; None if it depends on the center."""
    if "easgd" in name:
        return None
    return 1.0 if "agn" in name else float(steps)


@pytest.mark.few(3)
@pytest.mark.parametrize("how", ["overlaps", "is lost"])
@pytest.mark.parametrize("name", RULES)
def test_message_is_that_of_its_round_and_does_not_change(name, how):
    """This holds for repeated sends, and while the loop reuses its arrays."""
    center = Watched(RULES[name](), tree())
    loop = Loop(center, period=2, overlap=how == "overlaps")
    loop.step(4)
    if how == "is lost":
        center.there.clear()
    loop.step(3)
    center.there.set()
    loop.step(2)
    loop.flush()
    assert loop.worker.exchanges == center.version == 5
    first = {}
    for sequence, contribution, steps in center.sent:
        assert steps == (1 if sequence == 5 else 2)
        assert_identical(contribution, first.setdefault(sequence, contribution))
        expected = of_one_round(name, steps)
        if expected is not None:
            for leaf in jax.tree.leaves(contribution):
                np.testing.assert_allclose(leaf, expected, rtol=1e-5)
    assert sorted(first) == [1, 2, 3, 4, 5]
    attempts = [sequence for sequence, *_ in center.sent]
    assert (len(attempts) > 5) == (how == "is lost")
    end = center.pull().params
    if name in ("downpour", "dynsgd", "average"):
        assert_close(end, jax.tree.map(lambda x: x - 9, tree()))
    if name == "easgd":  # the sum of worker and center has moved by 9
        total = jax.tree.map(jnp.add, end, loop.params)
        assert_close(total, jax.tree.map(lambda x: 2 * x - 9, tree()))


@pytest.mark.parametrize("overlap", [False, True])
def test_penalty_pulls_to_the_last_adopted_center(overlap):
    center = Watched(shared.easgd(0.3, rho=0.5), tree())
    loop = Loop(center, lr=0.1, period=2, overlap=overlap)
    for _ in range(3):
        before = center.pull()
        loop.step(2)
        loop.flush()
        assert loop.worker.version == before.version
        assert_identical(loop.state.anchor, before.params)


def test_rejected_message_is_not_sent_again():
    """Its steps are in the next message, which is computed anew."""
    center = Watched(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=2)
    loop.step(1)
    center.rejects = True
    loop.local_step()
    for steps in (1, 2):  # steps since the last call that returned
        with pytest.raises(errors.MessageRejectedError, match="not this one"):
            loop.exchange(steps=steps)
        loop.local_step()
    center.rejects = False
    loop.exchange(steps=3)
    assert [(sequence, steps) for sequence, _, steps in center.sent] == [
        (1, 2),
        (1, 3),
        (1, 4),
    ]
    np.testing.assert_array_equal(center.sent[-1][1], 4.0)
    np.testing.assert_array_equal(center.pull().params, -4.0)
    assert loop.worker.exchanges == 1
    loop.step(2)
    assert center.sent[-1][0] == center.version == 2


def test_rejected_message_in_flight_affects_only_its_round():
    """The next messages are complete and have their own buffers."""
    center = Watched(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=2, overlap=True)
    loop.step(4)  # the second message is in flight
    loop.flush()
    loop.step(1)
    center.rejects = True
    loop.step(1)
    with pytest.raises(errors.MessageRejectedError, match="not this one"):
        loop.flush()
    center.rejects = False
    loop.step(2)
    loop.flush()
    loop.step(2)
    loop.flush()
    sent = [(sequence, steps) for sequence, _, steps in center.sent]
    assert sent == [(1, 2), (2, 2), (3, 2), (3, 2), (4, 2)]
    for _, contribution, _ in center.sent[3:]:
        assert np.isfinite(contribution).all()
    assert loop.worker.exchanges == center.version == 4


def test_message_in_flight_is_not_overwritten():
    """Even a worker that left and started again does not overwrite it."""
    center = Watched(shared.average(), jnp.zeros(1000))
    loop = Loop(center, period=1, overlap=True)
    loop.step(3)
    loop.flush()
    loop.step(1)
    loop.flush()
    center.there.clear()
    loop.step(1)
    flying = sessions.fragment(loop.worker).message
    sent = np.array(flying.submission.contribution)
    loop.params, loop.state = loop.worker.start()
    center.there.set()
    loop.step(4)
    loop.flush()
    np.testing.assert_array_equal(flying.submission.contribution, sent)
    with pytest.raises(errors.CenterError):
        flying.flight.result(LIMIT)
    np.testing.assert_array_equal(center.pull().params, -8.0)


def test_restarted_worker_sends_in_its_new_dtype():
    """It does not use the buffers of its last session."""
    center = Watched(shared.agn(shared.sgd(0.1)), jnp.zeros(2))
    loop = Loop(center, period=1, overlap=True)
    for dtype in ("bfloat16", "float32"):
        loop.params, loop.state = loop.worker.start(jnp.zeros(2, dtype))
        loop.step(4)
        loop.flush()
        assert {each.dtype.name for _, each, _ in center.sent[-4:]} == {dtype}


@pytest.mark.parametrize("overlap", [False, True])
def test_repeated_flush_sends_its_steps_once(overlap):
    """This holds even if the first call donated the loop's arrays before it raised."""
    center = Watched(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=4, overlap=overlap, patience=0, give_up=0.0)
    loop.step(4)
    assert center.version == 1
    center.there.clear()
    loop.step(3)
    for _ in range(3):
        with pytest.raises(errors.CenterUnreachableError, match="nobody answers"):
            loop.flush()
    center.there.set()
    with contextlib.suppress(errors.CenterUnreachableError):
        loop.flush()  # of an attempt that began before
    loop.flush()
    assert {(sequence, steps) for sequence, _, steps in center.sent} == {(1, 4), (2, 3)}
    assert (loop.worker.exchanges, center.version) == (2, 2)
    np.testing.assert_array_equal(center.pull().params, -7.0)
    loop.step(4)
    loop.flush()
    np.testing.assert_array_equal(center.pull().params, -11.0)


def test_response_adopted_before_an_error_is_kept():
    """The loop's arrays were donated to it, and the next message is rejected."""
    center = Watched(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=2)
    center.there.clear()
    loop.step(3)  # the loop continues without the center
    loop.local_step()
    center.there.set()
    waiting.wait_until(lambda: sessions.fragment(loop.worker).message.is_answered())
    center.rejects = True
    for _ in range(3):
        with pytest.raises(errors.MessageRejectedError, match="not this one"):
            loop.exchange()
        assert loop.worker.due
    assert loop.worker.exchanges == center.version == 1
    center.rejects = False
    loop.exchange()
    assert {(sequence, steps) for sequence, _, steps in center.sent} == {(1, 2), (2, 2)}
    np.testing.assert_array_equal(center.pull().params, -4.0)
    np.testing.assert_array_equal(loop.params, -4.0)


@pytest.mark.parametrize("receives", [0, 1, 2])
@pytest.mark.parametrize("then", ["exchange", "flush"])
def test_steps_and_weight_of_a_repeated_call_count_once_after_receive(receives, then):
    """The call raised after its steps were in arrays that are kept."""
    center = Watched(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=2)
    weights = []
    center.submitted = lambda sent: weights.append(sent.weight)
    center.there.clear()
    for weight in (1.0, 2.0, 3.0):
        loop.local_step()
        loop.exchange(weight=weight)  # the second call continues without the center
    loop.local_step()
    center.there.set()
    waiting.wait_until(lambda: sessions.fragment(loop.worker).message.is_answered())
    center.rejects = True
    with pytest.raises(errors.MessageRejectedError, match="not this one"):
        loop.exchange(weight=4.0)
    for _ in range(receives):
        loop.params, loop.state = loop.worker.receive(loop.params, loop.state)
    center.rejects = False
    if then == "exchange":
        loop.exchange(weight=4.0)
    else:
        loop.flush()
    assert (center.sent[-1][2], weights[-1]) == (2, 7.0)
    loop.local_step()
    loop.exchange(weight=1.0)
    assert sessions.fragment(loop.worker).machine.committed == (1, 1.0)


class Flaky(Watched):
    """A center at which the first attempts of each message fail."""

    failures = ()

    def submitted(self, submission):
        sequence = submission.sequence
        attempts = [sequence for sequence, *_ in self.sent].count(sequence)
        self.weights = {**getattr(self, "weights", {}), sequence: submission.weight}
        if attempts <= len(self.failures):
            raise self.failures[attempts - 1]("not now")


KINDS = {
    "waits": {},
    "overlaps": {"overlap": True},
    "in shards": {},
    "by fragments": {"fragments": agn_optax.Fragments(2)},
    "by fragments, overlaps": {"fragments": agn_optax.Fragments(2), "overlap": True},
    "by fragments, delay": {"fragments": agn_optax.Fragments(2, delay=1)},
    "resumable": {},
    "resumable, overlaps": {"overlap": True},
    "resumable, by fragments": {"fragments": agn_optax.Fragments(2)},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_call_counts_steps_and_weight_once(kind, tmp_path):
    """Every message has the same metadata as at a center without failures."""

    def run(failures, folder):
        def kept(name):
            return Journal(folder / name) if "resumable" in kind else None

        center = Flaky(shared.downpour(), jnp.zeros(2), durability=kept("center"))
        shards = []
        if "fragments" in KINDS[kind] or "shards" in kind:
            center.close()
            shards = [
                Flaky(shared.downpour(), durability=kept(str(i))) for i in range(2)
            ]
            center = ShardedCenter(shards, fragments=KINDS[kind].get("fragments"))
            center.initialize({"a": jnp.zeros(2), "b": jnp.zeros(2)}, worker="chief")
        for each in shards or [center]:
            each.failures = failures
        settings = {"patience": 0, "give_up": 0.0, "period": 4, **KINDS[kind]}
        loop = Loop(center, **settings)
        member = loop.worker
        if "resumable" in kind:
            member = checkpoint.Resumable(loop.worker, folder / "own")
            loop.params, loop.state = member.start()
        raised = 0
        for number in range(1, 11):
            loop.local_step()
            end = member.flush if number == 10 else member.exchange
            arguments = {} if number == 10 else {"weight": float(number)}
            while True:
                try:
                    loop.params, loop.state = end(loop.params, loop.state, **arguments)
                    break
                except failures:
                    raised += 1
        sent = [
            sorted({(seq, steps, each.weights[seq]) for seq, _, steps in each.sent})
            for each in shards or [center]
        ]
        found = sent, raised, center.pull().params
        for each in shards or [center]:
            each.close()
        return found

    failures = [errors.CenterUnreachableError, errors.CenterUnreachableError]
    if not (
        "overlap" in kind or "delay" in kind
    ):  # a rejected message is lost in these cases
        failures[0] = errors.MessageRejectedError
    sent, raised, params = run(tuple(failures), tmp_path / "lost")
    expected, never, there = run((), tmp_path / "there")
    assert sent == expected
    assert raised > 0 == never
    assert_identical(params, there)


def test_dropped_messages_are_counted():
    mode = BoundedStaleness(versions=0)
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2), mode=mode)
    workers = [
        agn_optax.Worker(center, shared.sgd(1.0), period=1, name=name) for name in "ab"
    ]
    loops = [worker.start() for worker in workers]
    for turn in range(3):
        for i, worker in enumerate(workers):
            params, state = loops[i]
            loops[i] = worker.exchange(params - 1, state)
        counts = [(worker.exchanges, worker.dropped) for worker in workers]
        assert counts == [(turn + 1, 0), (turn + 1, turn + 1)]
    assert center.version == 3
    assert_identical(loops[1][0], center.pull().params)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, errors.CenterError])
def test_message_whose_answer_failed_is_sent_again_with_its_number(error, overlap):
    """It was applied, so the center would return its response for the next message."""
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2))
    loop = Loop(center, period=1, overlap=overlap)
    loop.step(1)
    loop.flush()
    snapshot, attempts = center.core.snapshot, itertools.count()

    def answered(*args, **kwargs):
        if next(attempts) == 0:
            raise error("out of memory")
        return snapshot(*args, **kwargs)

    center.core.snapshot = answered

    def exchange():
        loop.step(1)
        loop.flush()

    with pytest.raises(error, match="out of memory"):
        exchange()
    loop.flush()
    loop.step(3)
    loop.flush()
    assert loop.worker.exchanges == center.version == 5
    np.testing.assert_array_equal(center.pull().params, -5.0)
