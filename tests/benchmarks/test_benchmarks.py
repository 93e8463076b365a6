"""Every benchmark runs, tiny, and what it writes are numbers."""

import importlib
import json
import math
import os
import pathlib
import subprocess
import sys

import plots
import pytest
import report
import run_all

pytestmark = pytest.mark.timeout(900)  # real processes, on a busy machine
ROOT = pathlib.Path(__file__).parents[2]
OF_A_PAGE = "train_step"  # the quickest, which run_all runs
ALONE = ("memory", "towers")  # they measure, or set, what is of a whole process


def run(program, *options):
    """In a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", ROOT / "benchmarks" / f"{program}.py", *options],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def found(tmp_path, monkeypatch):
    """What a quick run finds; in this process, which has imported everything."""

    def run_here(benchmark):
        file = tmp_path / f"{benchmark}.json"
        options = ["--quick", "--json", file]
        if benchmark in ALONE:
            run(benchmark, *options)
        else:
            program = str(ROOT / "benchmarks" / f"{benchmark}.py")
            monkeypatch.setattr(sys, "argv", [program, *map(str, options)])
            importlib.import_module(benchmark).main()
        results = json.loads(file.read_text())
        return {"benchmark": benchmark, **results}

    return run_here


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


@pytest.mark.parametrize(
    "benchmark", [each for each in run_all.BENCHMARKS if each != OF_A_PAGE]
)
def test_a_quick_run_finds_numbers(benchmark, found, tmp_path):
    check(results := found(benchmark), benchmark)
    pictures = plots.draw([results], tmp_path)
    drawn = [f"{benchmark}.png"] if benchmark in plots.DRAWINGS else []
    assert [path.name for path in pictures] == drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_what_they_find_becomes_a_page(tmp_path):
    run("run_all", "--quick", "--only", OF_A_PAGE, "--output", tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "results.md"}
    (results,) = json.loads((tmp_path / "results.json").read_text())
    check(results, OF_A_PAGE)
    page = (tmp_path / "results.md").read_text()
    assert f"## {OF_A_PAGE}\n\n`python benchmarks/{OF_A_PAGE}.py --quick`" in page
    for table in results["tables"]:
        assert report.markdown(table) in page
