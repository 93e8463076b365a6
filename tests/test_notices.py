"""Notices: their thresholds, and when they are logged."""

import dataclasses
import logging

import pytest

from agn_optax import errors
from agn_optax._internal import notices
from agn_optax._internal.notices import Notices, Thresholds


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Thresholds)])
@pytest.mark.parametrize("value", [-1, float("nan"), "1"])
def test_threshold_out_of_range_is_an_error(name, value):
    with pytest.raises(errors.InvalidArgumentError, match=f"{name} must be a"):
        Thresholds(**{name: value})


def test_share_beyond_one_is_an_error():
    with pytest.raises(errors.InvalidArgumentError, match="lost_messages must be"):
        Thresholds(lost_messages=1.5)


def measure(noticed, value, worker="anna"):
    return noticed.measure("apart", value, worker, cosine=-0.5)


def test_notice_is_logged_when_it_starts_and_ends_with_its_reason(caplog):
    noticed = Notices(Thresholds(apart=3))
    assert [measure(noticed, value) for value in (2, 3, 4, 0, 3)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "last 3 messages of worker 'anna' point away" in record.getMessage()
    assert notices.CHECKS["apart"].remedy in record.getMessage()
    (notice,) = noticed.current()
    assert (notice.check, notice.worker) == ("apart", "anna")
    measure(noticed, None)
    assert noticed.current() == []


def test_notice_is_logged_again_after_a_while(caplog, monkeypatch):
    monkeypatch.setattr(notices, "REPEAT", 0.0)
    noticed = Notices()
    for _ in range(2):
        assert measure(noticed, 10)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("threshold", [None, 0])
def test_check_without_threshold_says_nothing(threshold, caplog):
    noticed = Notices(Thresholds(apart=threshold))
    assert not measure(noticed, 1000)
    assert not noticed.is_on("apart")
    assert noticed.current() == []
    assert not caplog.records


def test_notices_of_a_worker_that_left_are_forgotten():
    noticed = Notices()
    for worker in ("anna", "ben"):
        measure(noticed, 10, worker)
    noticed.forget("anna")
    assert [notice.worker for notice in noticed.current()] == ["ben"]


def test_notice_of_a_worker_is_kept_whatever_the_threshold_of_the_center():
    noticed = Notices(Thresholds(residual=None))
    noticed.take("anna", {"residual": "it grows"})
    assert [notice.text for notice in noticed.current()] == ["it grows"]
    noticed.take("anna", {})
    assert noticed.current() == []
