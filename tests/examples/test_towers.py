"""The transformer on a mesh, small: real text, all modes, in two processes."""

import pathlib
import subprocess
import sys

import support

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "towers.py"
SMALL = ["--layers", 1, "--width", 16, "--context", 16, "--period", 3, "--rounds", 12]


def rows(output):
    lines = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {line[1].strip(): [x.strip() for x in line[2:6]] for line in lines}


def test_trains_in_every_mode_and_in_two_processes(tmp_path):
    """The same script: the first process alone says something and draws the plot."""
    arguments = [*SMALL, "--towers", 2, "--megabytes", 1, "--output", tmp_path]
    first, second = support.run_processes(PROGRAM, arguments, count=2)
    found = rows(first)
    assert set(found) == {"data parallel", "independent", "islands"}
    assert not rows(second)
    for mode, workers in (("data parallel", 1), ("independent", 4), ("islands", 2)):
        shape, loss, sent, _ = found[mode]
        assert shape == f"{workers} x {4 // workers}"
        assert float(loss) < 4.5  # 128 characters by chance: 4.9
        assert float(sent) > 0
    assert (tmp_path / "towers.png").read_bytes().startswith(b"\x89PNG")


def test_refuses_what_cannot_be(tmp_path):
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", PROGRAM, "--period", "0", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert "--period must be at least 1, got 0" in done.stderr
