"""Goodput under failures: examples/reproduce/goodput.py, in small."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import goodput

from agn_optax import simulate
from agn_optax.center import Asynchronous

pytestmark = pytest.mark.slow


def test_goodput_grows_with_rarer_failures_and_with_more_learners(tmp_path):
    assert goodput.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["claims"][0]["verdict"] == "reproduced"
    modes, learners, centers = (
        [[float(cell.split()[0]) for cell in row] for row in table["rows"]]
        for table in found["tables"]
    )
    for column in zip(*modes, strict=True):
        assert list(column) == sorted(column)
    for _, in_rounds, quorum, one_by_one in modes:
        assert one_by_one > max(in_rounds, quorum)
    for _, decoupled, without_rounds in learners:
        assert 0.9 * without_rounds < decoupled <= without_rounds + 0.01
    for column in zip(*centers, strict=True):
        assert list(column) == sorted(column)
    assert centers[0][2] < centers[0][1] - 0.02
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


def test_center_without_a_journal_loses_what_came_after_its_snapshot():
    found = simulate.schedule(
        goodput.cluster(4), period=goodput.PERIOD, seconds=1000.0, seed=0
    )
    at = found.settled[found.applied] / 1e9
    began = found.began[found.applied] / 1e9
    steps = found.steps[found.applied]
    seconds = found.duration + goodput.CENTER_DOWN
    journal, none = goodput.with_failing_center(found, [500.0], 200.0)
    assert journal * seconds == pytest.approx(steps.sum())
    lost = steps[(at > 400.0) & (began <= 500.0)].sum()
    assert none * seconds == pytest.approx(steps.sum() - lost)
    assert lost > 0.1 * steps.sum()
