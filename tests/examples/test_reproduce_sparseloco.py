"""SparseLoCo beside DiLoCo: examples/reproduce/sparseloco.py, in small."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import sparseloco

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_sparse_messages_are_small_and_need_error_feedback(tmp_path):
    assert sparseloco.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "sparseloco.json").read_text())
    size, *_, feedback = found["claims"]
    assert size["verdict"] == "reproduced"
    assert feedback["verdict"] == "reproduced"
    rows = {
        row[0]: [float(cell) for cell in row[1:]] for row in found["tables"][0]["rows"]
    }
    bits, _, loss, _ = rows[sparseloco.SPARSE]
    # 64 elements with 2 bits and a position of 12 bits, and a scale for each leaf.
    assert bits == pytest.approx((64 * 14 * 16 + 6 * 32) / 65536, abs=0.01)
    assert rows["DiLoCo, no momentum"][0] == 32
    assert loss < rows[sparseloco.LOSSY][2] < 4.9  # nats of random characters
    assert (tmp_path / "sparseloco.svg").stat().st_size > 1000
