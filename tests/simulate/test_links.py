"""Links that transfers share fairly."""

import pytest

from agn_optax.simulate._shared_link import SharedLink


def ends(link):
    """Return (time in s, names) of all ends of transfers."""
    found = []
    while (at := link.next_end) is not None:
        if ended := link.end(at):
            found.append((pytest.approx(at / 1e9, abs=1e-6), "".join(ended)))
    return found


def test_transfers_share_the_capacity_equally():
    link = SharedLink(100.0)
    link.start(0, 100, 1e9, "a")
    link.start(0, 100, 1e9, "b")
    link.start(1_000_000_000, 25, 1e9, "c")
    # Until 1 s, a and b have 50 B each; then all three have 33 B/s.
    assert ends(link) == [(1.75, "c"), (2.25, "ab")]


def test_slow_worker_leaves_the_rest_to_the_others():
    link = SharedLink(100.0)
    link.start(0, 100, 10.0, "slow")
    link.start(0, 90, 1e9, "a")
    link.start(0, 45, 60.0, "b")
    # 10 B/s, and 45 B/s for each of the others; then a has 90 B/s.
    assert ends(link) == [(1.0, "b"), (1.5, "a"), (10.0, "slow")]


def test_each_transfer_ends_after_many_others():
    """Rounding must not keep a transfer from its end."""
    link, now, started, ended = SharedLink(12.5e9), 0, 0, 0
    for i in range(2000):
        link.start(now, 4_000_000_000 + i, 1.25e9 + i % 7, i)
        started += 1
        now += 1_000_003
        while (at := link.next_end) is not None and at <= now:
            ended += len(link.end(at))
    while (at := link.next_end) is not None:
        ended += len(link.end(at))
    assert ended == started
