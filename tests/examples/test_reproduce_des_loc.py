"""DES-LOC's claims, in small."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import des_loc
from report import Report, arguments

pytestmark = pytest.mark.slow


def test_toy_problem_needs_the_exchange_of_moments_at_a_high_rate():
    report = Report("des_loc", "", "", arguments("A test.", ["--quick"]))
    last = {name: each for name, (each,) in des_loc.measure_toy(report, 1, 20).items()}
    assert last[des_loc.LOCAL_ADAM] < 0.5
    assert last[des_loc.DES_LOC] < 0.5
    assert last[des_loc.KEPT] > 1.0
    assert last[des_loc.RESET] > 1.0
    (table,) = report.tables
    assert [row[0] for row in table.rows] == list(des_loc.MOMENTS)
    at_low_rate = {name: float(cell) for name, cell, *_ in table.rows}
    assert at_low_rate[des_loc.KEPT] < 0.1


def test_des_loc_trains_as_local_adam_does_and_sends_half():
    found = {
        name: des_loc.character_model("average", name, seed=0, exchanges=8)
        for name in (des_loc.LOCAL_ADAM, des_loc.DES_LOC)
    }
    local_adam, of_des_loc = (losses[-1] for losses in found.values())
    assert local_adam < 3.0  # 4.9 at the start
    assert of_des_loc == pytest.approx(local_adam, abs=0.05)
    sent = [des_loc.sent(des_loc.MOMENTS[name]) for name in found]
    assert sent == [3.0, 1.5]
