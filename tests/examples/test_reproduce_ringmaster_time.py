"""Ringmaster's bound on time, in small."""

import json
import pathlib
import sys
from fractions import Fraction

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import ringmaster_time

pytestmark = pytest.mark.slow


def test_bound_is_that_of_the_best_number_of_workers():
    # The fastest alone: 2 * 1 * (1 + 3); both: 2 * 4/3 * (1 + 3/2) = 20/3.
    assert ringmaster_time.bound([2, 1], 3) == Fraction(20, 3)
    assert ringmaster_time.bound([1, 1000], 1) == Fraction(4)


def test_every_window_of_updates_is_within_the_bound(tmp_path, capsys):
    assert ringmaster_time.main(["--quick", "--folder", str(tmp_path)]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "ringmaster_time.json").read_text())
    assert [claim["verdict"] for claim in found["claims"]] == ["reproduced"] * 2
    assert (tmp_path / "ringmaster_time.svg").exists()


def test_longest_windows_come_near_the_bound():
    random = np.random.default_rng(0)
    found = [ringmaster_time.measured("lognormal, sigma 1.5", random) for _ in range(9)]
    assert max(each.longest for each in found) <= 1
    assert max(each.longest for each in found) > Fraction(1, 4)
