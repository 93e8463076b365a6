"""What a served center says of workers that misbehave, in its status and its log."""

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
from agn_optax.center import MessageLimits, Synchronous, Thresholds

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
# Name, worker and text of a notice, what provokes it, and the center.
PROVOKED = {
    "rejected": (
        *("lost_messages", "anna", "2 of the last 4 messages of worker 'anna'"),
        *(messages_are_rejected, DOWNPOUR, {"limits": LIMITS}),
    ),
    "dropped": (
        *("lost_messages", "anna", "the last one was dropped"),
        *(messages_are_dropped, DOWNPOUR, {"mode": BOUNDED}),
    ),
    "late": (
        *("lost_messages", "anna", "the last one missed its round"),
        *(messages_miss_their_round, DOWNPOUR, {"mode": ROUNDS}),
    ),
    "zero": (
        *("still_center", "", "has hardly moved in 10 updates: all messages are zero"),
        *(zeros_are_sent, DOWNPOUR, {}),
    ),
    "rounding": (
        *("still_center", "", "or smaller than the rounding of bfloat16"),
        *(steps_are_lost_in_rounding, agn_optax.rules.agn(shared.sgd(1e-4)), {}),
    ),
    "large": (
        *("other_norm", "anna", "have a norm of"),
        *(sends_with_norm(1e3), DOWNPOUR, {}),
    ),
    "small": (
        *("other_norm", "anna", "have a norm of"),
        *(sends_with_norm(1e-3), DOWNPOUR, {}),
    ),
    "apart": (
        *("apart", "anna", "10 messages of worker 'anna' point away"),
        *(directions_differ, DOWNPOUR, {}),
    ),
    "one by one": (
        *("one_by_one", "", "2 workers move the center 2 times as far.*0.35 for"),
        *(two_workers_exchange, shared.diloco(), {}),
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


@pytest.mark.parametrize("case", PROVOKED)
def test_misbehaviour_is_said_within_ten_exchanges_of_a_worker(case, caplog):
    name, worker, text, provoke, rule, settings = PROVOKED[case]
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


@pytest.mark.parametrize("case", PROVOKED)
def test_check_without_a_threshold_says_nothing(case, caplog):
    name, _, _, provoke, rule, settings = PROVOKED[case]
    off = Thresholds(**{name: None})
    start = START.get(case, ONES)
    with watched(rule, start, thresholds=off, **settings) as (_, center, observer):
        provoke(center)
        assert name not in {n["check"] for n in observer.status()["notices"]}
    remedy = notices.CHECKS[name].remedy
    assert not [line for line in caplog.messages if line.endswith(remedy)]


def test_threshold_can_be_changed():
    for share, said in ((0.3, True), (0.4, False)):
        changed = Thresholds(lost_messages=share)
        with watched(limits=LIMITS, thresholds=changed) as (_, center, observer):
            for turn in range(6):
                send(center, "anna", scaled(1.0 if turn % 2 else 1e6))
            assert bool(found(observer, "lost_messages", "anna")) == said


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


def test_worker_that_makes_no_exchanges_is_said_without_any_call(caplog):
    with watched() as (server, center, observer):
        for worker in ("anna", "bert"):
            send(center, worker)
        core = server.center.core
        with core.atomically():  # as if its last exchange were long ago
            now = time.monotonic()
            recent = centers.Recent(now - 100.0, 2)
            for second in range(90, 39, -1):
                recent.add(now - second, 1, 3)
            core.ledger.registered()["anna"].recent = recent
        wait_until(lambda: caplog.messages)
        (line,) = caplog.messages
        assert line.startswith("worker 'anna' has made no exchange for 4")
        anna, bert = observer.status()["workers"]
        assert anna["stalled"] >= 40
        assert bert["stalled"] is None
        send(center, "anna")
        assert not observer.status()["notices"]


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


def test_embedded_center_has_the_same_notices(caplog):
    center = agn_optax.LocalCenter(DOWNPOUR, ONES)
    zeros_are_sent(center)
    wait_until(lambda: center.notices)
    (notice,) = center.notices
    assert (notice.check, notice.worker) == ("still_center", "")
    assert str(notice) in caplog.messages
