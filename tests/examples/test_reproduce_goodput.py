"""Goodput under failures: examples/reproduce/goodput.py, in small."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import goodput

from agn_optax.center import Asynchronous

pytestmark = pytest.mark.slow


def test_goodput_grows_with_rarer_failures_and_with_more_learners(tmp_path):
    assert goodput.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["claims"][0]["verdict"] == "reproduced"
    modes, learners = (
        [[float(cell.split()[0]) for cell in row] for row in table["rows"]]
        for table in found["tables"]
    )
    for column in zip(*modes, strict=True):
        assert list(column) == sorted(column)
    for _, in_rounds, quorum, one_by_one in modes:
        assert one_by_one > max(in_rounds, quorum)
    for _, decoupled, without_rounds in learners:
        assert 0.9 * without_rounds < decoupled <= without_rounds + 0.01
    assert (tmp_path / "goodput.svg").stat().st_size > 1000


def test_restart_time_leaves_one_learner_the_goodput_of_data_parallel_training():
    found = goodput.goodput(
        1,
        Asynchronous(),
        every=goodput.BETWEEN,
        down=goodput.restart_time(),
        seconds=200_000.0,
        seed=0,
    )
    assert found == pytest.approx(goodput.MONOLITHIC, abs=0.02)
