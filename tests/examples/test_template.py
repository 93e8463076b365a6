"""The template of a project, run as its README says: it learns, stops and continues."""

import contextlib
import json
import pathlib
import re
import runpy
import shutil
import signal
import subprocess

import pytest
from helpers.commands import ROOT, python
from helpers.waiting import LIMIT, wait_until

TEMPLATE = ROOT / "examples" / "template"
STEPS, PERIOD = 36, 4  # more steps than the warmup
# The folders of the README's two commands: to start, and to continue.
SAVED = re.findall(
    r"launch run\.toml --save (\S+)", (TEMPLATE / "README.md").read_text()
)
DEVICES = {"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "32", "JAX_PLATFORMS": "cpu"}


def test_readme_and_guide_name_every_file_of_the_template():
    names = {
        path.name for path in TEMPLATE.iterdir() if path.suffix in (".py", ".toml")
    }
    for page in (TEMPLATE / "README.md", ROOT / "docs" / "template.md"):
        assert names == set(re.findall(r"^\| `([\w.]+)` \|", page.read_text(), re.M))


def test_steps_of_the_template_must_be_above_the_warmup(capsys):
    parse = runpy.run_path(str(TEMPLATE / "config.py"))["parse"]
    assert parse(["--steps", "21"]).steps == 21
    with pytest.raises(SystemExit):
        parse(["--steps", "20"])
    assert "steps must be above warmup, got 20, 20" in capsys.readouterr().err


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the template, for a shorter run, as the current directory."""
    pytest.importorskip("grain")
    folder = tmp_path / "project"
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    run = (folder / "run.toml").read_text()
    assert '"400", "--period", "10"' in run
    run = run.replace('"400", "--period", "10"', f'"{STEPS}", "--period", "{PERIOD}"')
    (folder / "run.toml").write_text(run)
    monkeypatch.chdir(folder)
    return folder


@contextlib.contextmanager
def launched(workers, *options):
    """Launch the run; if it has not ended at the end, end it as an engine does."""
    launch = ["-m", "agn_optax.ops.cli", "launch", "run.toml", "--workers", workers]
    command, environment = python(*launch, *options)
    with subprocess.Popen(  # noqa: S603 our own program
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=LIMIT)
            finally:
                process.kill()


def exchanges(rank):
    """Return what a worker has logged, by the number of the exchange.

    A process that continues logs the last exchange of the process before it again.
    """
    path = pathlib.Path(f"output/worker-{rank}-0.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in map(json.loads, lines):
        found.setdefault(int(line["exchange"]), line)
    return found


def finish(workers, to):
    """Launch the run until its end, and return its output."""
    with launched(workers, "--save", to) as process:
        output, _ = process.communicate(timeout=4 * LIMIT)
    assert process.returncode == 0, output
    return output


def held_out_loss():
    command, environment = python("evaluate.py", SAVED[0])
    output = subprocess.run(  # noqa: S603 our own program
        command, env=environment | DEVICES, capture_output=True, text=True, check=True
    ).stdout
    return float(re.search(r"held-out text: ([0-9.]+) nats", output)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_template_learns_stops_and_continues_from_its_checkpoint():
    first, second = SAVED
    with launched(1, "--save", first):
        wait_until(lambda: len(exchanges(0)) >= 2, 2 * LIMIT)
    assert pathlib.Path(first).is_dir()
    output = finish(1, second)
    before = int(re.search(r"worker-0 starts after (\d+) exchanges", output)[1])
    assert before >= 2
    logged = exchanges(0)
    assert list(logged) == [*range(1, len(logged) + 1)]
    assert before < len(logged), "the run had ended before it was stopped"
    assert "donated" not in output  # by steps whose state has come back elsewhere
    assert sum(line["steps"] for line in logged.values()) == STEPS
    assert f"version {len(logged)} is in {second}" in output
    losses = [line["loss"] for line in logged.values()]
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_two_workers_of_the_template_learn_together():
    finish(2, SAVED[0])
    for rank in range(2):
        assert sum(line["steps"] for line in exchanges(rank).values()) == STEPS
    assert held_out_loss() < exchanges(0)[1]["loss"] - 1.0
