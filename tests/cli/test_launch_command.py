"""``agn-optax launch``: a center with its workers, and one exit code for the run."""

import json
import os
import re
import shutil
import sys

import pytest
from helpers.commands import ROOT, command, fails

from agn_optax.ops import launch
from agn_optax.ops.engines import Run, local_address, serving_event

WORKER = """
import sys, jax.numpy as jnp, optax, agn_optax
from agn_optax import service

me = service.environment()
print("argv", *sys.argv[1:])
with service.connect(me.address, me.rule) as center:
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name=me.worker)
    params, state = worker.start({"w": jnp.ones(3)}, chief=me.rank == 0)
    for _ in range(4):
        updates, state = worker.tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    print(worker.name, "of", me.workers, "made", worker.exchanges, "exchanges")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Use a temporary current directory whose programs import this checkout."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


@pytest.mark.slow
def test_launch_runs_two_workers_and_their_center(here):
    (here / "train.py").write_text(WORKER)
    options = ["--workers=2", "--rule=easgd", "--moving-rate=0.25", "--json"]
    result = command(
        "launch", *options, "--barrier=2", "train.py", "--json", "--", "-x"
    )
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert reply["returncode"] == 0
    assert [each["name"] for each in reply["programs"]] == [
        "center",
        "worker-0",
        "worker-1",
    ]
    assert [each["returncode"] for each in reply["programs"]] == [0, 0, 0]
    assert "center   | serving at 127.0.0.1:" in result.stderr
    assert '{"event"' not in result.stderr
    for rank in range(2):
        prefix = f"worker-{rank} | "
        assert f"{prefix}argv --json -- -x\n" in result.stderr
        assert f"{prefix}worker-{rank} of 2 made 2 exchanges\n" in result.stderr
    assert "center   | draining after SIGTERM" in result.stderr


@pytest.mark.parametrize("program", ["false", "true"])
def test_center_that_does_not_serve_fails_the_run(monkeypatch, program):
    monkeypatch.setattr(sys, "executable", shutil.which(program))
    result = command("launch", "--workers=2", "--rule=downpour", "train.py")
    assert result.exit_code == 1
    assert "agn-optax: the center ended before it served" in result.stdout
    assert "worker-0 |" not in result.stdout


@pytest.mark.slow
def test_program_in_the_start_guide_runs(here):
    (program,) = re.findall(
        r"```py\n(.*?)```", (ROOT / "docs/start.md").read_text(), re.S
    )
    (here / "train.py").write_text(program)
    result = command("launch", "--workers=2", "--rule=downpour", "train.py")
    assert result.exit_code == 0, result.output
    for rank in range(2):
        assert f"worker-{rank} | [" in result.stdout


DRAINS = """
import os, subprocess, sys, time
from agn_optax import service

me = service.environment()
del os.environ["AGN_OPTAX_TOKEN"]  # as an operator, who is this user
cli = [sys.executable, "-m", "agn_optax.ops.cli"]
drain = [*cli, "drain", me.address]
subprocess.run(drain, check=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_drained_center_ends_its_workers_and_fails_the_run(here):
    (here / "train.py").write_text(DRAINS)
    result = command("launch", "--workers=1", "--rule=downpour", "train.py")
    assert result.exit_code == 1, result.output
    assert "worker-0 | draining 127.0.0.1:" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("center")]
    assert sum("draining" in line for line in lines) == 1
    assert "agn-optax: has ended, so the other programs are ended" in lines[-2]
    assert lines[-1].endswith("while worker-0 still worked with it")


# Stands in for Python: runs one shell command as the center, one as each worker.
PRETENDER = """#!/bin/sh
case "$*" in
*" serve "*) {center} ;;
*) {worker} ;;
esac
"""
# Each process of the center announces another port.
SERVES = """address=127.0.0.1:$AGN_OPTAX_RESTARTS
echo '{"event": "serving", "address": "'$address'"}'
"""
WAITS = "while :; do sleep 0.02; done"


@pytest.fixture
def pretend(here, monkeypatch):
    """A function that replaces the center and the workers with shell commands."""

    def pretend(center, worker):
        program = here / "pretender"
        program.write_text(PRETENDER.format(center=center, worker=worker))
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return pretend


@pytest.mark.parametrize(
    ("end", "worker", "code"),
    [
        ("exit 0", 0, 0),
        ("exit 143", 0, 0),
        ("trap - TERM; kill -TERM $$", 0, 0),
        ("exit 1", 0, 1),
        ("kill -KILL $$", 0, 137),
        ("exit 1", 7, 7),
    ],
)
def test_center_that_fails_at_its_end_fails_the_run(pretend, end, worker, code):
    pretend(f"trap '{end}' TERM; {SERVES} {WAITS}", f"exit {worker}")
    options = ["--workers=1", "--rule=downpour"]
    result = command("launch", *options, "train.py")
    assert result.exit_code == code, result.output


def test_center_that_does_not_end_in_its_grace_fails_the_run(pretend):
    pretend(f"trap : TERM; {SERVES} {WAITS}", "exit 0")
    options = ["--workers=1", "--rule=downpour", "--stop-grace=0.1"]
    result = command("launch", *options, "train.py")
    assert result.exit_code == 137, result.output
    assert "killed by SIGKILL" in result.stdout


TRAINS = """
import os, subprocess, sys, jax.numpy as jnp, optax, agn_optax
from agn_optax import service

operator = {n: v for n, v in os.environ.items() if n != "AGN_OPTAX_TOKEN"}
me = service.environment()
with service.connect(me.address, me.rule) as center:
    with agn_optax.Worker(center, optax.sgd(0.1), period=1, name=me.worker) as worker:
        params, state = worker.start({"w": jnp.ones(3)}, chief=True)
        with service.delay_sigterm() as terminated:
            for step in range(100_000):
                updates, state = worker.tx.update(params, state, params)
                params = optax.apply_updates(params, updates)
                params, state = worker.exchange(params, state)
                if step == 0:
                    cli = [sys.executable, "-m", "agn_optax.ops.cli"]
                    drain = [*cli, "drain", me.address]
                    # Not of this program's group, which is told to end meanwhile.
                    subprocess.run(drain, env=operator, check=True, process_group=0)
            worker.flush(params, state)
"""


@pytest.mark.slow
def test_worker_that_waits_for_a_drained_center_is_not_killed(here):
    (here / "train.py").write_text(TRAINS)
    options = ["--workers=1", "--rule=downpour", "--json", "--stop-grace=20"]
    result = command("launch", *options, "train.py")
    assert result.exit_code == 1, result.output
    center, worker = json.loads(result.stdout)["programs"]
    assert (center["returncode"], center["stopped"]) == (0, False)
    assert (worker["returncode"], worker["stopped"]) == (143, True)
    assert "while worker-0 still worked with it" in result.stderr
    assert "Traceback" not in result.stderr


RULE = "--rule=downpour"


@pytest.fixture
def idle_center(monkeypatch):
    """A stand-in for the center, which announces an address and does nothing."""
    command = ["/bin/sh", "-c", f"trap 'exit 0' TERM; {SERVES} {WAITS}"]
    monkeypatch.setattr(Run, "serve_command", lambda *_, **options: command)


def worker_lines(output):
    """Return the lines of an output that come from the workers."""
    return [line for line in output.splitlines() if line.startswith("worker-")]


@pytest.mark.usefixtures("idle_center")
def test_failed_worker_is_restarted(here):
    (here / "train.py").write_text(
        "import os, sys\n"
        "start = int(os.environ['AGN_OPTAX_RESTARTS'])\n"
        "print('start', start, os.environ['AGN_OPTAX_CENTER'])\n"
        "sys.exit(5 if start < 2 and os.environ['AGN_OPTAX_RANK'] == '1' else 0)\n"
    )
    options = ["--workers=2", RULE, "--restarts=2"]
    result = command("launch", *options, "--", "-S", "train.py")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("worker-0")] == [
        "worker-0 | start 0 127.0.0.1:0"
    ]
    starts = [line for line in lines if line.startswith("worker-1 | start")]
    assert starts == [f"worker-1 | start {i} 127.0.0.1:0" for i in range(3)]
    assert "worker-1 | agn-optax: restarted (2 of 2) after exit status 5" in lines


@pytest.mark.usefixtures("idle_center")
@pytest.mark.parametrize(
    ("death", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)]
)
def test_exit_code_is_that_of_the_failed_worker(here, death, code):
    (here / "train.py").write_text(
        "import os, signal, sys\n"
        f"if os.environ['AGN_OPTAX_WORKER'] == 'worker-1': {death}\n"
        "signal.pause()\n"
    )
    options = ["--workers=3", RULE, "--json", "-S"]
    result = command("launch", *options[:3], "--", *options[3:], "train.py")
    assert result.exit_code == code
    reply = json.loads(result.stdout)
    assert reply["returncode"] == code
    assert [each["stopped"] for each in reply["programs"]] == [True, True, False, True]


@pytest.mark.parametrize("folder", ["train.py", "train.py/storage"])
def test_storage_that_cannot_be_made_is_reported(here, folder):
    (here / "train.py").write_text("print('is never run')\n")
    options = ["--workers=1", "--rule=downpour", "--open", f"--storage={folder}"]
    result = command("launch", *options, "train.py")
    assert result.exit_code == 2, result.output
    assert "storage must be a folder" in result.stderr
    assert folder in result.stderr
    assert "is never run" not in result.stdout


@pytest.mark.usefixtures("idle_center")
def test_launch_runs_a_module(here):
    (here / "echo.py").write_text("import sys; print(__name__, *sys.argv[1:])\n")
    result = command(
        *("launch", "--workers=1", RULE, "--", "-m", "echo", "--epochs", "3")
    )
    assert result.exit_code == 0, result.output
    assert worker_lines(result.stdout) == ["worker-0 | __main__ --epochs 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--workers"),
        (
            ["--workers=0", RULE, "train.py"],
            "workers must be a whole number >= 1, got 0",
        ),
        (["--workers=1", RULE, "--restarts=-1", "t.py"], "restarts must be"),
        (["--workers=1", RULE], "PROGRAM.py"),
        (["--workers=1", "train.py"], "the center has no rule: give --rule"),
        (["--workers=1", "--b1=0.5", "train.py"], "the center has no rule"),
        (["--workers=1", "--rule=easgd", "train.py"], "needs --moving-rate"),
        (["--workers=1", "--rule=downpour", "--quorum=1", "t.py"], "applies to --mode"),
    ],
)
def test_wrong_usage_is_rejected(arguments, message):
    output = fails("launch", *arguments, code=2)
    assert message in output
    assert "Traceback" not in output


@pytest.mark.usefixtures("idle_center")
def test_prefixes_are_colored_on_a_terminal_only(here, monkeypatch):
    (here / "train.py").write_text("print('a\\x1b[1mb')\nprint('a[red]b')\n")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--workers=1", RULE, "train.py"]
    result = command("launch", "--json", *arguments)
    assert worker_lines(result.stderr) == ["worker-0 | ab", "worker-0 | a[red]b"]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the output were a terminal
    text = command("launch", *arguments).stdout
    assert "a[red]b\n" in text
    assert "\x1b[" in text.partition("worker-0")[0].rpartition("\n")[2]


@pytest.mark.usefixtures("idle_center")
def test_interrupt_gives_exit_code_130(here, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt  # as `run` does when all have ended

    monkeypatch.setattr(launch, "run", interrupted)
    assert command("launch", "--workers=1", RULE, "train.py").exit_code == 130


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("unix:/a b/c:d", "unix:/a b/c:d"),
    ],
)
def test_address_is_read_from_the_serving_line(address, local):
    line = json.dumps({"event": "serving", "rule": "agn", "address": address})
    assert local_address(serving_event(line)) == local


def test_serving_line_is_printed_with_page_and_its_token(pretend):
    event = {"event": "serving", "address": "127.0.0.1:80"}
    event |= {"page": "http://127.0.0.1:1/", "token": "a" * 64}
    where = f"center   | serving at 127.0.0.1:80, page at {event['page']}"
    for page_token, line in (
        ("b" * 64, f"{where} with token {'b' * 64}"),
        (None, where),
    ):
        printed = json.dumps({**event, "page_token": page_token})
        pretend(f"trap 'exit 0' TERM; echo '{printed}'; {WAITS}", "exit 0")
        options = ["--workers=1", "--rule=downpour", "--page", "train.py"]
        output = command("launch", *options).stdout
        assert line in output.splitlines()
        assert event["token"] not in output


@pytest.mark.parametrize(
    "line", ["", "serving", "3", '{"event": "other", "address": "a"}', "{"]
)
def test_other_lines_are_not_taken_for_the_serving_line(line):
    assert not serving_event(line)


@pytest.mark.usefixtures("idle_center")
@pytest.mark.parametrize("line", ["done \u2713", f"\x1b[{'9' * 5000}m done"])
def test_line_that_a_terminal_cannot_show_does_not_end_the_run(line, here):
    written = f"{line}\nnext\n".encode()
    (here / "train.py").write_text(f"import os; os.write(1, {written!r})\n")
    arguments = ["--workers=1", RULE, "train.py"]
    result = command("launch", *arguments, charset="latin-1")
    assert result.exit_code == 0, result.output
    assert "done" in result.stdout
    assert worker_lines(result.stdout)[-1] == "worker-0 | next"
