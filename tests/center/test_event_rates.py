"""Rates of frequent and rare events, and the time since the last one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agn_optax.center import Recent


def after(*times, each=(1, 10)):
    recent = Recent(0.0)
    for time in times:
        recent.add(time, *each)
    return recent


def test_rates_are_unknown_before_the_first_event():
    recent = after()
    assert recent.rates(100.0) is None
    assert (recent.idle(10.0), recent.idle(100.0)) == (None, 100.0)
    assert recent.longest() is None
    assert recent.totals == (0, 0)


@pytest.mark.parametrize("interval", [0.01, 0.3, 1.0, 4.0, 60.0, 3600.0])
def test_regular_events_have_their_rate_until_one_is_overdue(interval):
    count = max(20, round(20 / interval))
    recent = after(*(interval * n for n in range(1, count + 1)))
    last = count * interval
    for now in (last, last + 0.9 * interval, last + 1.9 * interval):
        assert recent.rates(now) == pytest.approx((1 / interval, 10 / interval), 0.06)
        assert (recent.idle(now) or 0.0) < 2 * recent.longest()
    late = last + max(10.0, 2 * interval) + 0.5
    assert recent.rates(late)[0] == 0
    assert recent.idle(late) == pytest.approx(late - last)
    assert recent.longest() == pytest.approx(max(interval, 0.5), 0.2)


def test_rate_is_that_of_the_last_ten_seconds():
    recent = after(*range(1, 101), *(100 + n / 4 for n in range(1, 41)))
    assert recent.rates(110.0) == (4, 40)
    falling = [recent.rates(110.0 + n)[0] for n in range(2, 12)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == pytest.approx(3.2)
    assert falling[-1] == 0


def test_time_since_the_last_event_is_compared_with_regular_pauses():
    """For example, a worker may evaluate every third round."""
    times = itertools.accumulate([1.0, 1.0, 60.0] * 5)
    recent = after(*times)
    assert recent.idle(310.0 + 120.0) == pytest.approx(120.0)
    assert recent.longest() == pytest.approx(60.0)


def test_slow_first_event_is_forgotten():
    """A worker's first round is slow because it compiles."""
    recent = after(100.0, *(100.0 + n for n in range(1, 20)))
    assert (recent.idle(119.0 + 11.0), recent.longest()) == (11.0, 1.0)


@given(
    gaps=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=200),
    wait=st.floats(0.0, 1000.0),
)
def test_few_points_are_kept_and_rates_are_bounded(gaps, wait):
    times = list(itertools.accumulate(gaps))
    recent = after(*times)
    now = times[-1] + wait
    assert len(recent._points) <= 25
    assert recent.totals == (len(times), 10 * len(times))
    exchanges, steps = recent.rates(now)
    assert 0 <= exchanges <= len(times) / 0.5
    assert steps == pytest.approx(10 * exchanges)
    assert recent.idle(now) in (None, now - times[-1])
    copied = recent.copy()
    recent.add(now + 1.0, 1, 1)
    assert copied.rates(now) == (exchanges, steps)
