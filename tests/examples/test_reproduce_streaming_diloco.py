"""DiLoCo and Streaming DiLoCo on a small language model, in small."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import language
import streaming_diloco

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_streaming_sends_an_exact_share_of_the_bytes_and_trains_as_well(tmp_path):
    assert streaming_diloco.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "streaming_diloco.json").read_text())
    whole, part, bits = found["claims"][2:]
    assert whole["measured"] == "1/32 exactly"
    assert part["measured"] == "1/4 exactly, and 1 times the total"
    assert "7.98 times fewer bytes" in bits["measured"]
    loss = {row[0]: float(row[1]) for row in found["tables"][0]["rows"]}
    for name in ("DiLoCo", "streaming", "overlapping", "4 bits"):
        assert loss[name] == pytest.approx(loss["data parallel"], rel=0.05)
    assert loss["4 bits"] == pytest.approx(loss["overlapping"], rel=0.01)


def test_data_parallel_training_is_adamw_along_the_mean_gradient():
    steps, workers = 3, streaming_diloco.WORKERS
    first = language.init(0)
    found = streaming_diloco.train(
        streaming_diloco.data_parallel(1e-3, steps), steps, first, seed=0
    ).params
    tx = streaming_diloco.adamw(1e-3, steps)
    params, state = first, tx.init(first)
    for step in range(steps):
        batch = np.concatenate(
            [streaming_diloco.BATCHES(i, step) for i in range(workers)]
        )
        updates, state = tx.update(
            jax.grad(language.loss)(params, batch), state, params
        )
        params = optax.apply_updates(params, updates)
    for key, leaf in found["layer 0"].items():
        moved = jnp.abs(leaf - first["layer 0"][key]).max()
        assert jnp.abs(leaf - params["layer 0"][key]).max() < 0.01 * moved
