"""MuLoCo: examples/reproduce/muloco.py, in small."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import language
import muloco

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_directions_and_losses_have_their_bounds(tmp_path):
    assert muloco.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "muloco.json").read_text())
    directions, losses = (table["rows"] for table in found["tables"])
    ((k, *cosines, floor),) = directions
    assert (k, floor) == ("4", "0.500")
    right, alike = np.array(cosines, float).reshape(2, 2)
    assert (right > 0.5).all()
    assert (right < 1).all()
    assert (alike > 0.5).all()  # more than independent messages have
    assert (alike < 1).all()
    assert [row[0] for row in losses] == ["AdamW", "Muon"]
    for _, parallel, one, many, *_ in losses:
        # Workers with a row each learn less than one with all, but they learn.
        assert float(parallel) < float(many) < 3.5
        assert float(one) < float(many)


def test_workers_divide_a_batch_among_them():
    data = muloco.Shares(language.Batches(16), 4)
    rows = np.concatenate([data(worker, 3) for worker in range(4)])
    whole = language.Batches(16)(0, 3)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, whole))


def test_one_worker_makes_the_move_of_data_parallel_training():
    """One round of averaging with one worker adopts its local parameters."""
    optimizer = muloco.inner("AdamW", 1e-2, None)
    start = language.init(0)
    wanted, state = start, optimizer.init(start)
    step = jax.jit(jax.grad(language.loss))
    for i in range(muloco.PERIOD):
        gradient = step(wanted, language.Batches(4, seed=5)(0, i))
        updates, state = optimizer.update(gradient, state, wanted)
        wanted = jax.tree.map(lambda p, u: p + u, wanted, updates)
    found = muloco.trained(
        muloco.AVERAGE, optimizer, start, rows=4, workers=1, rounds=1, seed=5
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
