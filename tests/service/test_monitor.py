"""The monitor of a served center: events, workers and curves, in bounded memory."""

import contextlib
import json
import math
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sessions, shared
from helpers.waiting import LIMIT, wait_until

from agn_optax import center as centers
from agn_optax import errors, service
from agn_optax.center import Submission
from agn_optax.ops.watch import _metrics, _monitor
from agn_optax.ops.watch._monitor import Series
from agn_optax.service import center_pb2 as pb
from agn_optax.service.server import _servicer

RULE = shared.downpour()
START = np.zeros(3, np.float32)
ONES = np.ones(3, np.float32)
HERE = "127.0.0.1:0"


@contextlib.contextmanager
def watched(params=START, **settings):
    """Yield a served center, its monitor, and a connection to it."""
    with (
        service.serve(RULE, params, page=HERE, **settings) as server,
        service.connect(server.address, RULE) as center,
    ):
        yield server, sessions.listener(server, "page").monitor, center


def events(monitor, kind=None):
    found = monitor.view()["events"]
    return [(e["kind"], e["worker"]) for e in found if kind in (None, e["kind"])]


def event_texts(monitor, kind):
    return [e["text"] for e in monitor.view()["events"] if e["kind"] == kind]


def worker(monitor, name):
    (found,) = [each for each in monitor.view()["workers"] if each["name"] == name]
    return found


def exchanged(session, sequence, anchor=0, value=ONES, **fields):
    session.submit(Submission(sequence, value, anchor_version=anchor, **fields))
    session.collect(sequence)


@pytest.mark.parametrize("seconds", [5, 599, 600, 601, 5_000, 200_000])
def test_series_covers_the_whole_run_with_few_points(seconds):
    series = Series()
    for second in range(seconds):
        series.add(second + 0.001 * (second % 7), second)
    times, values = series.columns()
    assert len(times) == len(values) == min(seconds, len(times))
    assert min(seconds, 300) <= len(times) <= 601
    assert values[0] == 0
    assert values[-1] == seconds - 1
    gaps = np.diff(values[:-1])
    assert np.ptp(gaps) <= 0.01 * seconds / 300


def test_worker_without_recent_exchanges_has_stalled():
    """Also while it is connected; page, status and metrics all report it."""
    with watched() as (server, monitor, center):
        session = center.join("anna")
        exchanged(session, 1)
        member = server.center.core.ledger.registered()["anna"]
        now = time.monotonic()
        with server.center.core.atomically():
            member.recent = centers.Recent(now - 60.0)
            for second in range(60, 22, -1):
                member.recent.add(now - second, 1, 10)
        monitor.update()
        anna = worker(monitor, "anna")
        assert anna["connected"]
        assert anna["stalled"] >= 23
        assert anna["exchanges_per_second"] == anna["steps_per_second"] == 0
        with service.Observer(server.address) as observer:
            (status,) = observer.status()["workers"]
        assert status["stalled"] >= anna["stalled"]
        assert status["exchanges_per_second"] == 0
        gauge = 'agn_optax_worker_stalled_seconds{worker="anna"} '
        assert gauge in _metrics.exposition(monitor.view()).decode()
        exchanged(session, 2, anchor=1, steps=10)
        monitor.update()
        anna = worker(monitor, "anna")
        assert anna["stalled"] is None
        assert anna["exchanges_per_second"] > 0
        assert gauge not in _metrics.exposition(monitor.view()).decode()


def test_worker_that_waits_for_a_round_has_not_stalled():
    mode = centers.Synchronous()
    with watched(mode=mode) as (server, monitor, center):
        anna, _ = center.join("anna"), center.join("bert")
        anna.submit(Submission(1, ONES, anchor_version=0))
        ledger = server.center.core.ledger
        wait_until(lambda: "anna" in ledger.pending)
        now = time.monotonic()
        with server.center.core.atomically():
            for member in ledger.registered().values():
                member.recent = centers.Recent(now - 60.0)
                member.recent.add(now - 59.0, 1, 10)
        monitor.update()
        assert worker(monitor, "anna")["stalled"] is None
        assert worker(monitor, "bert")["stalled"] >= 59


def test_repeated_exchange_is_counted_once():
    with watched() as (_, monitor, center):
        session = center.join("anna")
        exchanged(session, 1, steps=10, reported={"loss": 2.0})
        exchanged(session, 1, steps=10)  # a repetition
        exchanged(session, 2, steps=10, reported={"loss": 1.0})
        exchanged(center.join("bert"), 1)  # anchored at version 0: staleness 2
        monitor.update()
        view = monitor.view()
        assert (view["version"], view["exchanges"]) == (3, 3)
        assert view["staleness"]["bins"] == [
            {"from": n, "to": n, "count": 1} for n in range(3)
        ]
        anna = worker(monitor, "anna")
        assert (anna["exchanges"], anna["staleness"]) == (2, 1)
        assert anna["norm"] == pytest.approx(3**0.5, rel=1e-5)
        assert anna["reported"] == {"loss": 1.0}
        assert anna["transport"] in ("memory", "socket")
        assert sum(view["series"]["exchanges_per_second"]) > 0
        (curve,) = view["curves"]
        assert (curve["name"], curve["worker"], curve["value"][-1]) == (
            "loss",
            "anna",
            1.0,
        )


def test_joining_losing_and_leaving_are_events():
    with watched(limits=service.Limits(lease=LIMIT)) as (server, monitor, center):
        monitor.update()
        session = center.join("anna")
        carl = center.join("carl")
        monitor.update()
        carl.leave()
        sessions.link(session).cancel()  # as at a network failure
        wait_until(lambda: monitor.update() or ("lost", "anna") in events(monitor))
        assert worker(monitor, "anna")["end_reason"] == ""
        exchanged(session, 1)
        monitor.update()
        sessions.link(session).cancel()
        wait_until(
            lambda: monitor.update() or events(monitor).count(("lost", "anna")) == 2
        )
        ledger = server.center.core.ledger
        with server.center.core.atomically():  # as if its lease were over
            ledger.registered()["anna"].seen -= LIMIT
        monitor.update()
        with server.center.core.atomically():
            ledger._expire_at(ledger.registered()["anna"], 0.0)
        monitor.update()
        center.join("anna")
        monitor.update()
        assert [e for e in events(monitor) if e[1] == "anna"] == [
            *(("joined", "anna"), ("lost", "anna"), ("back", "anna")),
            *(("lost", "anna"), ("lease expired", "anna"), ("joined", "anna")),
        ]
        assert [e for e in events(monitor) if e[1] == "carl"] == [
            *(("joined", "carl"), ("left", "carl"))
        ]
        assert worker(monitor, "carl")["end_reason"] == "left"
        assert worker(monitor, "anna")["end_reason"] == ""


def test_new_session_of_the_same_worker_is_an_event():
    """A worker that was killed and restarted between two looks of the monitor."""
    with (
        watched() as (server, monitor, center),
        service.connect(server.address, RULE) as again,
    ):
        session = center.join("anna")
        exchanged(session, 1)
        monitor.update()
        sessions.link(session).cancel()
        wait_until(lambda: not server.center.core.members()[1]["anna"].connected)
        exchanged(again.join("anna"), 1)
        monitor.update()
        texts = event_texts(monitor, "joined")
        assert [text.split(", by")[0] for text in texts] == [
            *("joined", "joined again, with a new session")
        ]
        assert worker(monitor, "anna")["exchanges"] == 1


def test_workers_in_the_server_process_are_shown():
    with watched() as (server, monitor, _):
        session = server.center.join("here")
        monitor.update()
        session.leave()
        monitor.update()
        assert events(monitor)[1:] == [("joined", "here"), ("left", "here")]
        server.center.join("here")
        monitor.update()
        assert events(monitor, "joined") == [("joined", "here")] * 2


def test_rejections_are_events_with_their_reason():
    with watched(limits=service.Limits(max_workers=1)) as (_, monitor, center):
        session = center.join("anna")
        for _ in range(2):
            with pytest.raises(errors.CenterFullError):
                center.join("bert")
        exchanged(session, 1, value=np.full(3, np.nan, np.float32))
        monitor.update()
        (rejected,) = [
            e for e in monitor.view()["events"] if e["kind"] == "call rejected"
        ]
        assert rejected["worker"] == "bert"
        assert rejected["count"] == 2
        assert "was rejected: no room for worker 'bert'" in rejected["text"]
        assert "not finite" in event_texts(monitor, "message rejected")[0]
        assert worker(monitor, "anna")["rejected"] == 1
        json.dumps(monitor.view(), allow_nan=False)


def test_snapshots_and_restarts_are_events(tmp_path):
    kept = centers.Journal(tmp_path, size=1)
    with watched(None, durability=kept) as (server, monitor, center):
        assert monitor.view()["version"] is None
        center.initialize({"w": jnp.zeros(3)}, worker="anna")
        monitor.update()
        assert event_texts(monitor, "snapshot") == [
            "a snapshot of version 0 was written"
        ]
        assert event_texts(monitor, "initialized") == [
            "the center has its first parameters, 3 numbers"
        ]
        center.join("anna").exchange(Submission(1, {"w": ONES}, anchor_version=0))
        wait_until(lambda: server.center.core.keeper.saved_version == 1)
        monitor.update()
        assert event_texts(monitor, "snapshot")[1:] == [
            "a snapshot of version 1 was written"
        ]
    with watched(None, durability=kept) as (_, monitor, _):
        (text,) = event_texts(monitor, "restarted")
        assert text == f"the center in {tmp_path} continues at version 1"


def test_failure_of_the_disk_is_an_event(tmp_path, monkeypatch):
    kept = centers.Journal(tmp_path, size=1)
    with watched(durability=kept) as (server, monitor, center):
        keeper = server.center.core.keeper
        monkeypatch.setattr(keeper._directory, "save", lambda *_: 1 / 0)
        center.join("anna")
        wait_until(lambda: keeper.degraded)
        monitor.update()
        monitor.update()
        (text,) = event_texts(monitor, "warning")
        view = monitor.view()
        assert [notice["text"] for notice in view["notices"]] == [text]
        assert text == f"the center on disk lacks changes: {view['degraded']}"
        gauge = 'agn_optax_notice{check="not_on_disk",worker=""} 1.0'
        assert gauge in _metrics.exposition(view).decode()
        monkeypatch.undo()


def test_workers_from_before_a_restart_are_shown_as_disconnected(tmp_path):
    kept = centers.Journal(tmp_path)
    with watched(durability=kept) as (server, _, center):
        center.join("anna").exchange(Submission(1, ONES, anchor_version=0))
        server.stop()  # before it leaves
    with watched(None, durability=kept) as (_, monitor, center):
        monitor.update()
        assert not worker(monitor, "anna")["connected"]
        assert not events(monitor, "joined")
        center.join("anna")
        monitor.update()
        assert events(monitor, "joined") == [("joined", "anna")]


def test_rejected_callers_do_not_displace_other_events():
    with watched() as (server, monitor, center):
        center.join("anna")
        monitor.update()
        on_event = sessions.servicer(server).on_event
        for n in range(1000):
            error = errors.NotAllowedError(f"number {n}")
            on_event("rejected", f"stranger-{n}", error, "192.0.2.1")
        for _ in range(1000):
            on_event("rejected", "", errors.NotAllowedError("who?"), "192.0.2.1")
        monitor.update()
        found = monitor.view()["events"]
        assert len(found) <= _monitor.MAX_EVENTS + 5
        assert {"started", "joined"} < {event["kind"] for event in found}
        (who,) = [e for e in found if e["kind"] == "call rejected" and not e["worker"]]
        assert who["count"] == 1000
        assert who["text"] == "a caller at 192.0.2.1 was rejected: who?"
        numbers = [event["number"] for event in found]
        assert numbers == sorted(set(numbers))
        assert monitor.view()["event_counts"]["call rejected"] == 2000


def test_workers_that_left_last_are_shown():
    limits = service.Limits(max_workers=None)
    assert limits.workers_of_service == 1024
    with watched(limits=limits) as (server, monitor, _):
        for n in range(50):
            session = server.center.join(f"worker-{n:02}")
            monitor.update()
            session.leave()
            monitor.update()
        shown = [each["name"] for each in monitor.view()["workers"]]
        assert shown == [f"worker-{n:02}" for n in range(50 - _monitor.MAX_ENDED, 50)]


def test_number_of_curves_is_limited(monkeypatch):
    monkeypatch.setattr(_monitor, "MAX_CURVES", 8)
    with watched() as (_, monitor, center):
        anna, bert = center.join("anna"), center.join("bert")
        exchanged(anna, 1, reported={f"n{i}": i for i in range(6)})
        monitor.update()
        assert len(monitor.view()["curves"]) == 6
        exchanged(bert, 1, reported={f"n{i}": i for i in range(6)})
        monitor.update()
        assert len(monitor.view()["curves"]) == 8
        assert len(worker(monitor, "bert")["reported"]) == 6
        anna.leave()
        exchanged(bert, 2, anchor=1, reported={f"n{i}": i for i in range(6)})
        monitor.update()
        assert {curve["worker"] for curve in monitor.view()["curves"]} == {"bert"}


def test_reports_with_ever_new_names_take_no_more_memory():
    with watched() as (server, _, center):
        session = center.join("anna")
        for n in range(1, 5):
            reported = {f"{n}-{i}": 0.0 for i in range(60)}
            exchanged(session, n, anchor=n - 1, reported=reported)
        assert len(sessions.servicer(server)._traffic._workers["anna"].reported) == 60


def test_curve_has_points_at_exchanges_and_gaps_between_sessions():
    with watched() as (_, monitor, center):
        session = center.join("anna")
        exchanged(session, 1, reported={"loss": 3.0})
        for _ in range(3):
            monitor.update()
        exchanged(session, 2, anchor=1, reported={"loss": 3.0})
        monitor.update()
        session.leave()
        monitor.update()
        exchanged(center.join("anna"), 1, reported={"loss": 1.0})
        monitor.update()
        (curve,) = monitor.view()["curves"]
        assert curve["value"] == [3.0, 3.0, None, 1.0]
        assert curve["time"] == sorted(curve["time"])


def test_nonfinite_reports_are_null():
    with watched() as (_, monitor, center):
        reported = {"loss": math.nan, "scale": math.inf, "fine": 1 / 3}
        exchanged(center.join("anna"), 1, reported=reported)
        monitor.update()
        view = json.loads(json.dumps(monitor.view(), allow_nan=False))
        assert view["workers"][0]["reported"] == {
            "fine": 0.333333,
            "loss": None,
            "scale": None,
        }


def test_bins_of_staleness_are_narrow_and_adjacent():
    """A bin is at most 1/16 of its values wide, so 50 workers fill more than one."""
    first, seen = 0, set()
    while first < 1 << 12:
        last = _monitor._bin_end(first)
        assert last - first < max(1, first / 16 + 1)
        assert {_monitor._bin(n) for n in range(first, last + 1)} == {first}
        seen.update(range(first, last + 1))
        first = last + 1
    assert seen == set(range(1 << 12))
    assert len({_monitor._bin(n) for n in range(35, 65)}) > 10
    assert _monitor._bin_end(_monitor._bin(1 << 40)) < (1 << 40) * 17 / 16
    for n in range(20):  # metrics use powers of two
        assert _monitor._bin(1 << n) == 1 << n


def test_event_queue_is_bounded_and_does_not_block(monkeypatch):
    """Exchanges append to the queue while the monitor's lock is held."""
    with watched() as (server, monitor, _), monitor._lock:
        began = time.monotonic()
        for n in range(2 * _monitor._MAX_INBOX):
            answer = centers.Answer(None, n, n)
            sessions.servicer(server).on_event("exchange", "anna", "1", answer)
        assert len(monitor._inbox) == _monitor._MAX_INBOX
        assert time.monotonic() - began < 10


def test_monitor_thread_survives_errors_and_ends_with_its_server(caplog):
    with watched() as (server, monitor, center):
        sessions.servicer(server).on_event("exchange", "wrong")
        center.join("anna")
        wait_until(lambda: ("joined", "anna") in events(monitor))
    assert "thread 'agn-optax monitor' failed" in caplog.text
    names = {thread.name for thread in threading.enumerate()}
    assert "agn-optax monitor" not in names


def test_server_without_a_page_keeps_no_events():
    with service.serve(RULE, START) as server:
        assert server.page_address is None
        assert sessions.servicer(server).on_event is _servicer._ignore_event
        status = sessions.servicer(server).status(
            pb.StatusRequest(), _monitor.EVERYBODY
        )
        assert status.page_address == ""
