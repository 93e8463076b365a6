"""The number of workers counts, and not the delays, in small."""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import delays

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("staleness", "scale"), [(0, 1.0), (3, 1.0), (15, 0.25)])
def test_adaptive_rate_falls_with_delays_above_the_number_of_workers(staleness, scale):
    tx = delays.adaptive(4)
    updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), staleness=staleness)
    np.testing.assert_allclose(updates, [scale, scale])


def test_cost_depends_on_workers_and_not_on_delays(tmp_path, capsys):
    assert delays.main(["--quick", "--folder", str(tmp_path)]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "delays.json").read_text())
    assert [claim["verdict"] for claim in found["claims"][:3]] == ["reproduced"] * 3
