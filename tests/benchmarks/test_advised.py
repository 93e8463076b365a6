"""The sweep behind `planning.advise`, in small, and its table in the package."""

import json

import advised
import numpy as np
import pytest

from agn_optax import planning
from docs.figures import advice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_quick_sweep_writes_a_table_and_draws_its_chart(tmp_path):
    table, chart = tmp_path / "advice.json", tmp_path / "advice.svg"
    assert not advice.main(["--quick", "--table", str(table), "--chart", str(chart)])
    near, far = json.loads(table.read_text())["cells"]
    assert (near["exchange"], far["exchange"]) == (0.1, 3.0)
    for cell in (near, far):
        means = [best["loss"][0] for best in cell["best"]]
        assert means == sorted(means)
        assert len(means) == advice.FINALISTS
    # An exchange of three steps at each step leaves few steps for training.
    assert far["best"][0]["loss"][2] < far["data_parallel"][1]
    assert near["data_parallel"][0] < far["data_parallel"][0]
    assert far["best"][0]["period"] > 1
    assert chart.read_text().count("period") == 2


def test_table_of_the_package_is_that_of_the_sweep():
    """A setting is simulated again: the table belongs to the code of today."""
    setting = advice.Setting(2, 3.0)
    found = planning.advise(**setting._asdict())
    candidate = advice.candidate_of(**found.best[0]._asdict())
    losses = [
        advice.simulated(
            advice.Task(),
            advice.cluster_of(setting),
            candidate,
            advice.TIME[setting.exchange],
            seed,
        )
        for seed in advice.SEEDS
    ]
    assert np.mean(losses) == pytest.approx(found.best[0].loss.mean, rel=0.02)


def test_candidates_of_a_real_run_are_the_advised_one_and_three_others():
    for case in advised.CASES.values():
        first, *others = advised.candidates(case.setting)
        best = planning.advise(**case.setting._asdict()).best[0]
        assert first == advice.candidate_of(**best._asdict())
        assert len({first, *others}) == 4
        assert all(one.method in advice.METHODS for one in (first, *others))
