"""The transformer on a mesh, in small: real text, all modes, in two processes."""

import importlib.util
import pathlib
import sys

import pytest
from helpers import support

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # real processes, on a busy machine
PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "towers.py"
SMALL = ["--layers", 1, "--width", 16, "--context", 16, "--period", 3, "--rounds", 5]


def rows(output):
    lines = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {line[1].strip(): [x.strip() for x in line[2:6]] for line in lines}


def test_example_trains_in_every_mode_in_two_processes(tmp_path):
    """Both processes run the same script; only the first one prints and plots."""
    text = ["--megabytes", 0.2, "--learning-rate", 0.01]
    arguments = [*SMALL, *text, "--towers", 2, "--hosts", 2]
    arguments += ["--output", tmp_path]
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


def test_period_of_zero_is_rejected(capsys, monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    spec = importlib.util.spec_from_file_location("towers_example", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, program)  # its dataclasses look there
    spec.loader.exec_module(program)
    with pytest.raises(SystemExit) as rejected:
        program.main(["--period", "0"])
    assert rejected.value.code == 2
    assert "--period must be at least 1, got 0" in capsys.readouterr().err
