"""Background threads and retries: exceptions are logged, and pauses grow."""

import math
import threading

import pytest
from helpers.waiting import LIMIT, wait_until

from agn_optax._internal import (
    Outage,
    background,
    in_background,
    keep_running,
    retries,
    retry,
)
from agn_optax.service._watchdog import TimedTransfer, Watchdog


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(background, "_PAUSE", 0.001)


class Error(Exception):
    """An error raised in a thread."""


def fails(*_):
    raise Error("on purpose")


@pytest.mark.parametrize("how", [{"lasting": True}, {"unread": True}])
def test_unread_exception_of_a_thread_is_logged(how, caplog):
    future = in_background(fails, "a thread", **how)
    assert isinstance(future.exception(LIMIT), Error)
    wait_until(lambda: "thread 'a thread' ended with an exception" in caplog.text)
    assert "on purpose" in caplog.text  # with its traceback


def test_exception_read_from_the_future_is_not_logged(caplog):
    assert isinstance(in_background(fails, "a thread").exception(LIMIT), Error)
    assert not caplog.records


def test_loop_that_raises_is_restarted_until_it_returns(caplog):
    runs = []

    def loop():
        runs.append(1)
        if len(runs) < 5:
            fails()

    assert keep_running(loop, "a loop").result(LIMIT) is None
    assert len(runs) == 5
    (record,) = caplog.records  # the same error is logged once a minute
    assert "thread 'a loop' failed, and goes on" in record.message
    assert record.exc_info


def test_failing_cancel_does_not_block_other_timeouts(caplog):
    watchdog, cancelled = Watchdog(), threading.Event()

    def late(cancel):
        return TimedTransfer(cancel, size=0, timeout=0.0)

    with watchdog.watching(late(fails)), watchdog.watching(late(cancelled.set)):
        assert cancelled.wait(LIMIT)
    cancelled.clear()
    with watchdog.watching(late(cancelled.set)):
        assert cancelled.wait(LIMIT)
    assert "could not be cancelled" in caplog.text


class Clock:
    """A clock that stands still but for pauses, and a call that fails on purpose."""

    def __init__(self):
        self.now, self.pauses = 100.0, []
        self.failures, self.stops_after = 99, math.inf

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        self.pauses.append(seconds)
        return len(self.pauses) > self.stops_after

    def attempt(self):
        if len(self.pauses) < self.failures:
            raise Error(len(self.pauses))
        return "the result"

    def retry(self, outage, pauses=(0.1, 0.7), **settings):
        return retry(self.attempt, outage, pauses=pauses, wait=self.wait, **settings)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("pauses", "longest"),
    [
        ((0.5, 0.5), [0.5, 0.5, 0.5, 0.5, 0.5]),
        ((0.1, 0.7), [0.1, 0.2, 0.4, 0.7, 0.7]),
        ((2.0, 1.0), [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_pauses_between_attempts_double_and_differ_at_random(clock, pauses, longest):
    clock.failures = len(longest)
    told = []
    assert clock.retry(Outage(), pauses, record=told.append) == "the result"
    assert [str(error) for error in told] == ["0", "1", "2", "3", "4"]
    for pause, most in zip(clock.pauses, longest, strict=True):
        assert most / 2 <= pause <= most
    shares = {pause / most for pause, most in zip(clock.pauses, longest, strict=True)}
    assert len(shares) == len(longest)


def test_retries_end_with_the_last_error_when_time_is_over(clock):
    outage = Outage(5.0, since=98.0)
    with pytest.raises(Error) as raised:
        clock.retry(outage, record=lambda _: None)
    assert 102.3 <= clock.now <= 103.0  # another pause would end too late
    assert raised.value.args == (len(clock.pauses),)
    assert outage.attempts == len(clock.pauses) + 1


def test_time_of_retries_begins_when_the_first_attempt_fails(clock):
    def attempt():
        if not clock.pauses:
            clock.now += 1000.0  # a round of a center with a slow worker
        return clock.attempt()

    outage = Outage(2.0)
    with pytest.raises(Error):
        retry(attempt, outage, pauses=(0.5, 0.5), wait=clock.wait)
    assert outage.since == 1100.0
    assert 1101.5 <= clock.now <= 1102.0


def test_call_without_time_is_attempted_once(clock):
    with pytest.raises(Error):
        clock.retry(Outage(0.0))
    assert not clock.pauses


def test_final_error_is_raised_at_once(clock):
    told = []
    with pytest.raises(Error, match="3"):
        clock.retry(
            Outage(),
            is_final=lambda error: error.args == (3,),
            record=lambda error: told.extend(error.args),
        )
    assert told == [0, 1, 2]


def test_retries_end_with_the_last_error_when_the_caller_leaves(clock):
    clock.stops_after = 2
    with pytest.raises(Error, match="2"):
        clock.retry(Outage())
    assert len(clock.pauses) == 3


def test_outage_that_begins_anew_has_all_its_time_and_short_pauses(clock):
    outage = Outage(2.0)

    def record(error):
        if error.args == (4,):
            outage.since, outage.attempts, clock.at = clock.now, 1, clock.now

    with pytest.raises(Error):
        clock.retry(outage, record=record)
    assert clock.pauses[3] > 0.3
    assert clock.pauses[4] <= 0.1
    assert clock.at + 1.3 <= clock.now <= clock.at + 2.0


def test_leaving_ends_a_pause():
    left, failed = threading.Event(), threading.Event()
    retried = in_background(
        lambda: retry(
            fails,
            Outage(),
            pauses=(2 * LIMIT, 2 * LIMIT),
            wait=left.wait,
            record=lambda _: failed.set(),
        ),
        "a test",
    )
    assert failed.wait(LIMIT)
    left.set()
    assert isinstance(retried.exception(LIMIT), Error)
