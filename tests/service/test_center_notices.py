"""Notices of a served center about workers that misbehave, in its status and log."""

import contextlib
import functools
import logging
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.waiting import LIMIT, in_background, wait_until

import agn_optax
from agn_optax import center as centers
from agn_optax import codecs, service
from agn_optax._internal import notices, trees
from agn_optax.center import (
    MessageLimits,
    Synchronous,
    Thresholds,
    _inspector,
    _recent,
)

ONES = {"a": np.ones((40, 50), np.float32), "b": np.ones(30, np.float32)}
DOWNPOUR = shared.downpour()


def scaled(factor):
    return jax.tree.map(lambda leaf: leaf * np.float32(factor), ONES)


def send(center, worker, value=ONES, behind=0):
    version = center.pull().version - behind
    sessions.exchange(center, value, anchor_version=version, worker=worker, steps=3)


def messages_are_rejected(center):
    for turn in range(4):
        send(center, "anna", scaled(1.0 if turn % 2 else 1e6))


def messages_are_dropped(center):
    for _ in range(5):
        send(center, "bert")
        send(center, "anna", behind=1)
        send(center, "anna")


def messages_miss_their_round(center):
    for _ in range(3):  # the first round of each worker begins when it joins
        send(center, "bert")
        send(center, "anna", behind=1)


def zeros_are_sent(center):
    for _ in range(10):
        send(center, "anna", scaled(0.0))


def steps_are_lost_in_rounding(center):
    like = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), ONES)
    for _ in range(10):
        send(center, "anna", like)


def sends_with_norm(factor):
    def exchange(center):
        for _ in range(3):
            send(center, "bert")
            send(center, "carl")
            send(center, "anna", scaled(factor))

    return exchange


def directions_differ(center):
    for _ in range(10):
        send(center, "bert")
        send(center, "carl")
        send(center, "anna", scaled(-0.5))


def two_workers_exchange(center):
    for worker in ("anna", "bert"):
        send(center, worker)


LIMITS = service.Limits(messages=MessageLimits(norm=1e5))
BOUNDED = centers.BoundedStaleness(versions=0)
ROUNDS = Synchronous(quorum=1)
# Name, worker and text of a notice, the value that is measured, what provokes it, and
# the center.
PROVOKED = {
    "rejected": (
        *("lost_messages", "anna", "2 of the last 4 messages of worker 'anna'"),
        *(0.2, messages_are_rejected, DOWNPOUR, {"limits": LIMITS}),
    ),
    "dropped": (
        *("lost_messages", "anna", "the last one was dropped"),
        *(0.4, messages_are_dropped, DOWNPOUR, {"mode": BOUNDED}),
    ),
    "late": (
        *("lost_messages", "anna", "the last one missed its round"),
        *(0.2, messages_miss_their_round, DOWNPOUR, {"mode": ROUNDS}),
    ),
    "zero": (
        *("still_center", "", "has hardly moved in 10 updates: all messages are zero"),
        *(10, zeros_are_sent, DOWNPOUR, {}),
    ),
    "rounding": (
        *("still_center", "", "or smaller than the rounding of bfloat16"),
        *(10, steps_are_lost_in_rounding, agn_optax.rules.agn(shared.sgd(1e-4)), {}),
    ),
    "large": (
        *("other_norm", "anna", "have a norm of"),
        *(1e3, sends_with_norm(1e3), DOWNPOUR, {}),
    ),
    "small": (
        *("other_norm", "anna", "have a norm of"),
        *(1e3, sends_with_norm(1e-3), DOWNPOUR, {}),
    ),
    "apart": (
        *("apart", "anna", "10 messages of worker 'anna' point away"),
        *(10, directions_differ, DOWNPOUR, {}),
    ),
    "one by one": (
        *("one_by_one", "", "2 workers move the center 2 times as far.*sgd.1/2"),
        *(2, two_workers_exchange, shared.diloco(), {}),
    ),
}
START = {"rounding": jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), ONES)}


@contextlib.contextmanager
def watched(rule=DOWNPOUR, start=ONES, **settings):
    """Yield a served center, a connection to it, and an observer."""
    with (
        service.serve(rule, start, **settings) as server,
        service.connect(server.address, rule) as center,
        service.Observer(server.address) as observer,
    ):
        yield server, center, observer


def found(observer, name, worker):
    """Return the notices of a check about a worker, in the status of a center."""
    listed = observer.status()["notices"]
    return [n for n in listed if (n["check"], n["worker"]) == (name, worker)]


@pytest.mark.few(3)
@pytest.mark.parametrize("case", PROVOKED)
def test_misbehaviour_is_said_within_ten_exchanges_of_a_worker(case, caplog):
    name, worker, text, _, provoke, rule, settings = PROVOKED[case]
    with watched(rule, START.get(case, ONES), **settings) as (_, center, observer):
        provoke(center)
        # The device may still compute what is compared.
        wait_until(lambda: found(observer, name, worker))
        (notice,) = found(observer, name, worker)
        assert all(each["exchanges"] <= 10 for each in observer.status()["workers"])
    assert re.search(text, notice["text"])
    assert notice["remedy"] == notices.CHECKS[name].remedy
    lines = [line for line in caplog.messages if line.endswith(notice["remedy"])]
    assert any(worker in line for line in lines)


@pytest.mark.few(3)
@pytest.mark.parametrize("side", ["below", "above", "off"])
@pytest.mark.parametrize("case", PROVOKED)
def test_threshold_decides_what_is_said(case, side, caplog):
    name, worker, _, value, provoke, rule, settings = PROVOKED[case]
    is_count = isinstance(value, int)
    moved = {
        "below": value - 1 if is_count else 0.99 * value,
        "above": value + 1 if is_count else 1.01 * value,
        "off": None,
    }
    changed = Thresholds(**{name: moved[side]})
    start = START.get(case, ONES)
    with watched(rule, start, thresholds=changed, **settings) as (
        server,
        center,
        observer,
    ):
        provoke(center)
        wait_until(lambda: sessions.is_compared(server.center.core))
        assert bool(found(observer, name, worker)) == (side == "below")
    remedy = notices.CHECKS[name].remedy
    lines = [line for line in caplog.messages if line.endswith(remedy)]
    assert bool(lines) == (side == "below")


@pytest.mark.few(3)
@pytest.mark.parametrize("good", range(5))
def test_center_that_stops_is_said_after_ten_versions(good):
    with watched() as (server, center, observer):
        for _ in range(good):
            send(center, "anna")
        for turn in range(1, 11):
            send(center, "anna", scaled(0.0))
            wait_until(lambda: sessions.is_compared(server.center.core))
            assert bool(found(observer, "still_center", "")) == (turn == 10)


@pytest.mark.parametrize(
    ("threshold", "said"), [(1, True), (2, True), (3, False), (None, False)]
)
def test_center_that_cannot_be_written_is_said(threshold, said, tmp_path, monkeypatch):
    kept = centers.Journal(tmp_path, size=1)
    changed = Thresholds(not_on_disk=threshold)
    with watched(durability=kept, thresholds=changed) as (server, center, observer):
        keeper = server.center.core.keeper
        monkeypatch.setattr(keeper._directory, "save", lambda *_: 1 / 0)
        sessions.join(center, "anna")  # a change, too
        wait_until(lambda: keeper.failures == 1)
        send(center, "anna")
        wait_until(lambda: keeper.failures == 2)
        assert bool(found(observer, "not_on_disk", "")) == said
        monkeypatch.undo()


def test_notice_ends_when_messages_are_good_again():
    with watched(limits=LIMITS) as (_, center, observer):
        messages_are_rejected(center)
        assert found(observer, "lost_messages", "anna")
        for _ in range(8):
            send(center, "anna")
        assert not found(observer, "lost_messages", "anna")


def test_notices_about_a_worker_end_when_it_leaves():
    with watched(limits=LIMITS) as (_, center, observer):
        messages_are_rejected(center)
        sessions.leave(center, "anna")
        wait_until(lambda: not observer.status()["notices"])


@pytest.fixture
def short_times(monkeypatch):
    """Make the times short after which a worker is missed."""
    monkeypatch.setattr(_recent, "_WINDOW", 1.0)
    monkeypatch.setattr(_recent, "_MIN_DISTANCE", 0.05)
    monkeypatch.setattr(_inspector, "_MIN_FIRST", 0.3)


@contextlib.contextmanager
def connected_worker(server, name):
    """Yield a member of a served center, and a function that makes a round."""
    with (
        service.connect(server.address, DOWNPOUR) as center,
        agn_optax.Worker(center, shared.sgd(0.1), period=1, name=name) as worker,
    ):
        params, state = worker.start()

        def make_round():
            nonlocal params, state
            updates, state = worker.tx.update(params, state, params)
            params, state = worker.exchange(optax.apply_updates(params, updates), state)

        yield server.center.core.ledger.registered()[name], make_round


def make_rounds(member, make_round):
    """Make rounds until the intervals between the last ones are short."""

    def is_regular():
        make_round()
        return member.recent.longest() < 0.3

    wait_until(is_regular, pause=0.02)


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("has_exchanged", [True, False])
def test_worker_that_stops_is_said_without_any_call(has_exchanged, caplog):
    with (
        watched() as (server, _, observer),
        connected_worker(server, "anna") as (anna, make_round),
        connected_worker(server, "bert") as (bert, make_other_round),
    ):
        if has_exchanged:
            make_rounds(anna, make_round)

        def is_said():
            make_other_round()
            text = "worker 'anna' has made no exchange for .* times the"
            return [line for line in caplog.messages if re.match(text, line)]

        make_rounds(bert, make_other_round)
        wait_until(is_said, pause=0.02)
        assert len(is_said()) == 1
        first, second = observer.status()["workers"]
        expected = anna.recent.longest() if has_exchanged else 0.3
        assert first["stalled"] >= 3 * expected
        assert second["stalled"] is None
        make_round()
        assert not found(observer, "missed_periods", "anna")


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("threshold", [1000.0, None])
def test_worker_that_stops_is_not_said_below_the_threshold(threshold):
    changed = Thresholds(missed_periods=threshold)
    with (
        watched(thresholds=changed) as (server, _, observer),
        connected_worker(server, "anna") as (anna, make_round),
    ):
        make_rounds(anna, make_round)
        longest = anna.recent.longest()
        wait_until(lambda: (anna.recent.idle(time.monotonic()) or 0.0) > 4 * longest)
        assert not observer.status()["notices"]


@pytest.mark.usefixtures("short_times")
def test_new_worker_has_as_long_as_the_slowest_of_the_others():
    with watched() as (server, center, observer):
        center.join("anna")
        send(center, "bert")
        core = server.center.core
        with core.atomically():
            bert = core.ledger.registered()["bert"]
            bert.recent = centers.Recent(time.monotonic() - 1000.0)
            bert.recent.add(time.monotonic(), 1, 3)
            anna = core.ledger.registered()["anna"]
        wait_until(lambda: (anna.recent.idle(time.monotonic()) or 0.0) > 4 * 0.3)
        assert not observer.status()["notices"]


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("waits_for", ["barrier", "chief"])
def test_wait_for_other_workers_is_not_missed_time(waits_for):
    start, barrier = (ONES, 2) if waits_for == "barrier" else (None, 0)
    with watched(start=start, barrier=barrier) as (server, _, observer):
        core = server.center.core
        core.join("anna")
        anna = core.ledger.registered()["anna"]
        wait_until(lambda: anna.recent.idle(time.monotonic() - 3 * 0.3))
        assert not observer.status()["notices"]
        core.join("bert")
        if waits_for == "chief":
            core.initialize(ONES, worker="bert")
        assert anna.recent.idle(time.monotonic() - 0.5) is None
        wait_until(lambda: found(observer, "missed_periods", "anna"))


RULES = {
    "downpour": (shared.downpour(), {}),
    "agn": (agn_optax.rules.agn(shared.sgd(0.1)), {}),
    "easgd": (shared.easgd(0.3), {}),
    "rounds": (shared.diloco(), {"mode": Synchronous()}),
    "sparse": (
        agn_optax.rules.downpour(codec=codecs.error_feedback(codecs.top_k(8))),
        {},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RULES)
def test_nothing_is_said_of_workers_that_behave(name, caplog):
    rule, settings = RULES[name]
    inner = shared.sgd(0.05)

    def train(server, worker_name, seed):
        with (
            service.connect(server.address, rule) as center,
            agn_optax.Worker(center, inner, period=2, name=worker_name) as worker,
        ):
            params, state = worker.start()
            rng = np.random.default_rng(seed)
            for _ in range(60):
                grads = jax.tree.map(
                    lambda p: p - 3.0 + rng.normal(size=p.shape).astype(p.dtype), params
                )
                updates, state = worker.tx.update(grads, state, params)
                params, state = worker.exchange(
                    optax.apply_updates(params, updates), state
                )

    with watched(rule, barrier=3, **settings) as (server, _, observer):
        named = enumerate(("anna", "bert", "carl"))
        running = [
            in_background(functools.partial(train, server, name, seed), name)
            for seed, name in named
        ]
        for future in running:
            future.result(LIMIT)
        assert observer.status()["notices"] == []
    assert caplog.messages == []


def test_totals_of_steps_and_weight_outlive_the_center(tmp_path):
    kept = centers.Journal(tmp_path)
    message = centers.Submission(1, ONES, anchor_version=0, steps=5, weight=100.0)
    bad = message._replace(sequence=2, contribution=scaled(np.nan), steps=7)
    with watched(durability=kept) as (_, center, observer):
        session = center.join("anna")
        session.exchange(message)
        session.exchange(bad)
        expected = {
            "steps_made": 12,
            "steps_delivered": 5,
            "weight_made": 200.0,
            "weight_delivered": 100.0,
        }
        status = observer.status()
        for totals in (status, status["workers"][0]):
            assert {name: totals[name] for name in expected} == expected
        session.leave()
    with watched(start=None, durability=kept) as (_, center, observer):
        center.join("anna").exchange(message._replace(anchor_version=1))
        status = observer.status()
        for totals in (status, status["workers"][0]):
            assert (totals["steps_made"], totals["steps_delivered"]) == (17, 10)


def test_log_has_hashes_and_totals_from_start_to_end(tmp_path, caplog):
    caplog.set_level(logging.INFO, "agn_optax")
    kept = centers.Journal(tmp_path)
    first = trees.digest(ONES)
    with watched(durability=kept) as (server, center, _):
        send(center, "anna", scaled(0.5))
        last = trees.digest(center.pull().params)
        assert last == trees.digest(server.center.pull().params) != first
    lines = caplog.messages
    assert f"the center starts at version 0, hash {first}" in lines
    snapshot = f"a snapshot is in {tmp_path}, at version"
    assert f"{snapshot} 0, hash {first}" in lines
    assert f"{snapshot} 1, hash {last}" in lines
    *_, worker, everybody, end = lines
    assert worker == "worker 'anna': 3 of 3 local steps were delivered"
    assert everybody == "all workers: 3 of 3 local steps were delivered"
    assert end == f"the center ends at version 1, hash {last}"


def test_log_has_the_hash_of_a_center_at_a_checkpoint(caplog):
    caplog.set_level(logging.INFO, "agn_optax")
    center = agn_optax.LocalCenter(DOWNPOUR, ONES)
    send(center, "anna", scaled(0.5))
    saved = center.save()
    copied = "the center is copied for a checkpoint at version 1, hash "
    lines = [line for line in caplog.messages if line.startswith(copied)]
    assert lines == [copied + trees.digest(saved.params)]
    assert trees.digest(saved.params) != trees.digest(ONES)


def test_embedded_center_has_the_same_notices(caplog):
    center = agn_optax.LocalCenter(DOWNPOUR, ONES)
    zeros_are_sent(center)
    wait_until(lambda: center.notices)
    (notice,) = center.notices
    assert (notice.check, notice.worker) == ("still_center", "")
    assert str(notice) in caplog.messages
