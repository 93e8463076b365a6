"""Random shares that are drawn anew, and one partition, in small."""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import random_shares

pytestmark = pytest.mark.slow


def drawn(method, steps, seed=0):
    """Return the masks of some steps for 4,000 elements."""
    params = {"w": jnp.zeros((40, 100))}
    masks = jax.jit(functools.partial(random_shares.masks, method, params))
    return np.stack([masks(seed, step)["w"] for step in steps])


def test_partition_has_each_element_once_in_a_period_and_is_drawn_anew():
    period = random_shares.PERIOD
    first, second = (
        drawn("new partitions", range(k * period + 1, (k + 1) * period + 1))
        for k in (0, 1)
    )
    assert (first.sum(0) == 1).all()
    assert (second.sum(0) == 1).all()
    assert (first.argmax(0) == second.argmax(0)).mean() < 0.1


def test_new_shares_are_independent_and_as_large():
    masks = drawn("new shares", range(1, 201))
    assert masks.mean() == pytest.approx(1 / random_shares.PERIOD, rel=0.05)
    both = (masks[0] & masks[1]).mean()
    assert both < 0.01
    assert (drawn("new shares", [1], seed=1)[0] != masks[0]).any()


@pytest.mark.timeout(600)
def test_partition_of_the_package_is_as_good(tmp_path):
    assert random_shares.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "random_shares.json").read_text())
    rows = {row[0]: row for row in found["tables"][0]["rows"]}
    losses = {name: float(row[1]) for name, row in rows.items()}
    assert losses["one partition"] < losses["alone"]
    for name in random_shares.HERE:
        assert losses[name] == pytest.approx(losses["one partition"], abs=0.005)
        assert float(rows[name][2]) > float(rows["alone"][2])
    assert found["claims"][-1]["measured"].endswith("local SGD differ by at most 0")
