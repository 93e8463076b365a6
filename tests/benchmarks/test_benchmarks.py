"""Every benchmark runs, tiny, and what it writes are numbers."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(900)  # real processes, on a busy machine
ROOT = pathlib.Path(__file__).parents[2]
DRAWN = ("exchange", "fan_in", "size")
OTHERS = (
    "journal",
    "link",
    "memory",
    "optimizer_overhead",
    "overlap",
    "startup",
    "towers",
    "train_step",
)


def run(program, *options):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", ROOT / "benchmarks" / f"{program}.py", *options],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def numbers(row):
    """Of a row, with what quartiles have."""
    for value in row.values():
        if isinstance(value, list):
            yield from value
        elif isinstance(value, int | float):
            yield value


def check(found, benchmark):
    """What one benchmark found is whole."""
    assert found["command"].startswith(f"python benchmarks/{benchmark}.py --quick")
    assert found["machine"]["jax"]
    assert found["tables"]
    for table in found["tables"]:
        assert table["rows"]
        for row in table["rows"]:
            assert all(math.isfinite(number) for number in numbers(row)), row
            for ratio in {"ratio", "speed"} & row.keys():
                assert 0 < row["quartiles"][0] <= row[ratio] <= row["quartiles"][1]


@pytest.mark.parametrize("benchmark", OTHERS)
def test_a_quick_run_finds_numbers(benchmark, tmp_path):
    file = tmp_path / "found.json"
    run(benchmark, "--quick", "--json", file)
    check(json.loads(file.read_text()), benchmark)


def test_what_they_find_becomes_a_page_and_pictures(tmp_path):
    run("run_all", "--quick", "--only", *DRAWN, "--output", tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "results.md", *(f"{name}.png" for name in DRAWN)}
    everything = json.loads((tmp_path / "results.json").read_text())
    for found, benchmark in zip(everything, DRAWN, strict=True):
        check(found, benchmark)
    page = (tmp_path / "results.md").read_text()
    assert "## fan_in\n\n`python benchmarks/fan_in.py --quick`" in page
    assert "| workers | a second |" in page
