"""The biased fixed point of asynchronous SGD, in small."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import biased_fixed_point
from biased_fixed_point import PLAIN, RINGLEADER, RULES, SECONDS, TURNAROUND

pytestmark = pytest.mark.slow

B = np.array([1.0, -2.0, 3.0, 0.5, -1.0])


def test_minimum_weights_functions_by_speed():
    alike = np.ones(5)
    assert biased_fixed_point.minimum(alike, B) == pytest.approx(0.3)
    weights = np.array([12, 6, 4, 3, 2]) / 27
    found = biased_fixed_point.minimum(alike, B, 1 / np.array(SECONDS))
    assert found == pytest.approx(np.sum(weights * B))


def test_only_repaired_methods_end_at_the_minimum_of_the_mean(capsys):
    assert biased_fixed_point.main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count("reproduced: ") == 5
    assert "in part: " not in out
    assert "not reproduced: " not in out


@pytest.mark.parametrize("rate", [0.03, 0.06])
def test_ends_do_not_depend_on_the_rate(rate):
    alike = np.ones(5)
    ends = {
        name: biased_fixed_point.end(name, alike, B, rate, cycles=80) for name in RULES
    }
    biased = biased_fixed_point.minimum(alike, B, 1 / np.array(SECONDS))
    assert abs(biased - 0.3) > 0.05
    assert ends[PLAIN] == pytest.approx(biased, abs=1e-5)
    assert ends[TURNAROUND] == pytest.approx(0.3, abs=1e-5)
    assert ends[RINGLEADER] == pytest.approx(0.3, abs=1e-5)
