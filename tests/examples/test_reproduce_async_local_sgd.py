"""Asynchronous local SGD on a small language model, in small."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import async_local_sgd

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_delayed_momentum_is_stable_and_rounds_are_slow(tmp_path):
    assert async_local_sgd.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "async_local_sgd.json").read_text())
    rows = {row[0]: row[1:] for row in found["tables"][0]["rows"]}
    assert list(rows) == [method.name for method in async_local_sgd.METHODS]
    loss = {name: float(row[0]) for name, row in rows.items()}
    assert max(loss, key=loss.__getitem__) == "DyLU"
    # With periods by speed, plain momentum is unstable even at half of the rate.
    assert loss["both"] < loss["DyLU"] - 0.03
    # The slowest of the speeds 1, 2, 4 and 8 sets the pace of rounds.
    seconds = {name: float(row[2]) for name, row in rows.items()}
    assert seconds["synchronous"] == 576 / 4
    assert seconds["both"] < 1.3 * 576 / (1 + 2 + 4 + 8)


def test_runs_have_the_same_number_of_local_steps():
    for method in async_local_sgd.METHODS:
        planned = async_local_sgd.simulate.schedule(
            **method.settings, exchanges=async_local_sgd.messages(method, 960)
        )
        steps = planned.steps[planned.applied].sum()
        assert 960 <= steps < 960 + async_local_sgd.PERIOD
        if method.period == async_local_sgd.PERIOD:
            assert steps == 960
