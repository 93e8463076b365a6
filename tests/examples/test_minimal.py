"""Examples are short; the two minimal ones run as their docstrings say, and learn."""

import pathlib
import re

import pytest
from helpers import commands

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


# The examples that are made to be copied, and the most lines that each may have.
LINES = {
    "minimal_worker.py": 40,
    "minimal_mesh.py": 40,
    "levanter_lm.py": 100,
    "on_ray_train.py": 100,
    **{f"template/{path.name}": 100 for path in sorted(EXAMPLES.glob("template/*.*"))},
}


@pytest.mark.parametrize("name", LINES)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= LINES[name]


@pytest.mark.slow
def test_minimal_workers_meet_and_learn():
    launch = ["-m", "agn_optax.ops.cli", "launch", "--workers=2", "--rule=diloco"]
    program = ["--mode=synchronous", "minimal_worker.py"]
    output = commands.printed(EXAMPLES, *launch, *program)
    found = re.findall(r"loss ([0-9.]+) after (\d+) exchanges", output)
    assert len(found) == 2, output
    assert all(exchanges == "20" and float(loss) < 1.0 for loss, exchanges in found)


@pytest.mark.slow
def test_minimal_mesh_learns():
    output = commands.printed(
        EXAMPLES, "minimal_mesh.py", PJRT_NPROC="32", JAX_NUM_CPU_DEVICES="4"
    )
    assert float(re.search(r"loss of the center ([0-9.]+)", output)[1]) < 0.5
