"""Background threads: exceptions are logged, loops continue, and pauses grow."""

import itertools
import threading
import time

import pytest
from helpers.waiting import LIMIT, wait_until

from agn_optax._internal import Backoff, background, in_background, keep_running
from agn_optax.service._watchdog import Transfer, Transfers, Watchdog


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
        return Transfer(cancel, size=0, timeout=0.0)

    with watchdog.watching(late(fails)), watchdog.watching(late(cancelled.set)):
        assert cancelled.wait(LIMIT)
    cancelled.clear()
    with watchdog.watching(late(cancelled.set)):
        assert cancelled.wait(LIMIT)
    assert "could not be cancelled" in caplog.text


def test_failing_cut_does_not_block_other_connections():
    transfers, cancelled = Transfers(), threading.Event()
    with (
        transfers.timed(fails, 0, LIMIT),
        transfers.timed(cancelled.set, 0, LIMIT),
    ):
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() > begun)
        transfers.cancel_stalled(0.0)
        assert cancelled.is_set()


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (Backoff(0.5), [0.5, 0.5, 0.5, 0.5]),
        (Backoff(0.1, longest=0.7), [0.1, 0.2, 0.4, 0.7, 0.7]),
        (Backoff(1.0, factor=3.0, longest=9.0), [1.0, 3.0, 9.0, 9.0]),
        (Backoff(2.0, longest=1.0), [1.0, 1.0]),
    ],
    ids=repr,
)
def test_pauses_grow_by_the_factor_up_to_the_longest(backoff, expected):
    assert list(itertools.islice(backoff.pauses(), len(expected))) == expected
