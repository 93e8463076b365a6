"""Restarts of the center's momentum: examples/reproduce/restarts.py, in small."""

import json
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import restarts

pytestmark = pytest.mark.slow


def test_restarts_widen_the_range_of_momenta_but_not_of_learning_rates(tmp_path):
    assert restarts.main(["--quick", f"--folder={tmp_path}", "--seeds=2"]) == 0
    found = json.loads((tmp_path / "restarts.json").read_text())
    momenta, rates, modes = found["claims"]
    assert modes["verdict"] == "reproduced"
    assert momenta["verdict"] == "reproduced"
    assert rates["verdict"] == "not reproduced"
    never, restarted = (row[2:] for row in found["tables"][0]["rows"])
    median = 1
    assert float(restarted[median].split()[0]) < float(never[median].split()[0])
    assert restarted[-1] == never[-1]  # as many learning rates diverge
    assert (tmp_path / "restarts.svg").stat().st_size > 1000


def test_a_mode_becomes_smaller_up_to_the_limit():
    """With a momentum above 1, small modes do so only with restarts."""
    for momentum, every in ((0.9, None), (0.9, 10), (1.02, 10)):
        limit = restarts.largest(momentum, every)
        assert 1.2 < limit < 1.4
        for below in (0.01, 0.1, 0.5, limit - 0.01):
            assert restarts.contraction(below, momentum, every) < 1
        assert restarts.contraction(limit + 0.01, momentum, every) > 1
    assert restarts.contraction(0.01, 1.02, None) > 1


def test_pairs_do_not_disturb_each_other():
    """Each pair ends where it ends when it trains alone."""
    loss, data, _ = restarts.regression(seeds=1)
    etas, momenta = np.array([0.5, 2.0, 1.0]), np.array([0.9, 0.9, 0.0])

    def trained(pairs):
        center = restarts.outer(etas[pairs, None], momenta[pairs, None], 5)
        start = np.zeros((1, len(etas[pairs]), len(restarts.CURVATURES)), np.float32)
        return restarts.trained(center, loss, data, start, period=20, rounds=12)

    together = trained(slice(None))
    for i in (0, 2):  # the other one diverges
        alone = trained(slice(i, i + 1))
        np.testing.assert_allclose(alone[:, 0], together[:, i], rtol=1e-3, atol=1e-4)
    assert np.abs(together[:, 1]).max() > 10
