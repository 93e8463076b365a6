"""Methods on workers with classes of their own: a program of the results, in small."""

import json
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import non_iid


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.slow
def test_workers_have_classes_of_their_own(workers):
    batches = non_iid.Problem(workers).data(seed=1)
    for worker in range(workers):
        _, labels = zip(*(batches(worker, step) for step in range(4)), strict=True)
        classes = set(np.concatenate(labels).tolist())
        assert classes == set(range(worker, 10, workers))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_time_and_bias_of_the_methods(tmp_path):
    assert non_iid.main(["--quick", "--folder", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "non_iid.json").read_text())
    (table,) = found["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [row["method"] for row in rows] == [*non_iid.METHODS]

    def of(method, column):
        (row,) = (row for row in rows if row["method"] == method)
        return float(row[column])

    # The rounds of all workers are as slow as the slowest, and asynchronous ones not.
    seconds = [of(method, "simulated s") for method in ("synchronous DiLoCo", "HeLoCo")]
    assert seconds[0] > 3 * seconds[1]
    assert of("quorum and grace", "simulated s") < 0.6 * seconds[0]
    # Late messages are of classes that nobody else has: who discounts them forgets.
    slow = "on the slowest worker's classes"
    assert of("rescaled", slow) < of("asynchronous SGD", slow) < of("dynsgd", slow)
    for method in set(non_iid.METHODS) - {"dynsgd"}:
        assert of(method, "loss at equal samples") < np.log(10), method
    assert (tmp_path / "non_iid.svg").read_text().count("HeLoCo") == 1
