"""Two real processes with two devices each equal one process with four."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest
from helpers import support

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # real processes, on a busy machine
PROGRAM = pathlib.Path(__file__).with_name("distributed_program.py")


def test_two_processes_equal_one_process(tmp_path):
    support.run_processes(PROGRAM, [tmp_path], count=2)
    spec = importlib.util.spec_from_file_location("distributed_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            module.results(jax.devices()[:4], module.Part(0, 1))
        )
    }
    found = [np.load(tmp_path / f"{i}.npz") for i in range(2)]
    assert set(expected) == set(found[0])
    for name, value in expected.items():
        if "predict" in name:  # each process has the outputs of its own rows
            own = np.concatenate([f[name] for f in found])
            np.testing.assert_allclose(own, value, rtol=1e-4, atol=1e-5, err_msg=name)
            continue
        for f in found:
            np.testing.assert_allclose(
                f[name], value, rtol=1e-4, atol=1e-5, err_msg=name
            )
        assert value.all() or "agree" not in name
