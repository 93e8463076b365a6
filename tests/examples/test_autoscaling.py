"""Rules while workers join and leave: a small run behind docs/autoscaling.md."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import autoscaling

pytestmark = pytest.mark.slow


def test_small_run_prints_a_row_for_every_rule(capsys):
    assert autoscaling.main(["--workers=1,2", "--rounds=1", "--seeds=1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "workers", "2", "workers"]
    assert [row[: row.index("  ")] for row in rows] == list(autoscaling.CASES)


def test_rate_divided_by_staleness_stays_stable_with_four_workers():
    data = autoscaling.datasets.digits()
    plain, follows = (
        autoscaling.errors_of(autoscaling.CASES[name], data, [2, 4], 15, seed=0)
        for name in ("agn, adam(0.01)", "agn, adam(0.01) / (staleness + 1)")
    )
    assert plain[0] < 10
    assert follows[0] < 10
    assert follows[1] < 6 < 15 < plain[1]
