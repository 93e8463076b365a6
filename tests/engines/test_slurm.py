"""Jobs of SLURM: the content of their scripts, and runs on a small cluster."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess

import pytest
from helpers import certificates, ports, slurm
from helpers.commands import ROOT, command, fails, succeeds
from helpers.waiting import wait_until

import agn_optax
from agn_optax import service
from agn_optax.center import Journal

RUN = """
program = "train.py"
arguments = ["a b"]
name = "tiny"
workers = 2
storage = "kept"
restarts = 1
center-restarts = 3

[rule]
rule = "downpour"

[center]
insecure = true

[resources.worker]
cpus = 2
memory = "2GiB"
seconds = 5400

[slurm]
partition = "main"
setup = ["echo set up"]
"""
ARRAY = "--array=0-1"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current directory with the file of a run."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def planned(*arguments):
    """Return the scripts of a dry run by their names, and the commands."""
    output = succeeds("launch", "run.toml", "--on", "slurm", "--dry-run", *arguments)
    files, name = {}, ""
    for line in output.splitlines(keepends=True):
        if line.startswith("# ") and line.strip().endswith((".sh", "Commands")):
            name = line[2:].strip()
            files[name] = ""
        else:
            files[name] += line
    return files, files.pop("Commands").split("\n")[:-1]


def test_scripts_are_valid_shell_and_have_no_secrets(here):
    files, commands = planned()
    assert list(files) == ["center.sh", "workers.sh", "end.sh"]
    for text in [*files.values(), *commands]:
        subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    center, workers = '"${center%;*}"', '"${workers%;*}"'
    assert commands == [
        "center=$(sbatch --parsable center.sh)",
        f"workers=$(sbatch --parsable {ARRAY} --dependency=after:{center} workers.sh)",
        f"end=$(sbatch --parsable --dependency=afterany:{workers} end.sh {center})",
    ]
    center, workers, end = files.values()
    kept = here / "kept"
    for text in (workers, center, end):
        assert "#SBATCH --requeue\n" in text
        assert "#SBATCH --open-mode=append\n" in text
        assert "#SBATCH --partition=main\n" in text
        assert "\necho set up\n" in text
    assert f"--address-file={kept}/center --journal={kept}/journal" in center
    assert f"--address=0.0.0.0:0 --json --tokens={kept}/keys/tokens" in center
    assert "-le 3 ] && scontrol requeue" in center
    assert "-le 1 ] && scontrol requeue" in workers
    assert "#SBATCH --mem=2048M\n#SBATCH --time=90\n" in workers
    assert "export AGN_OPTAX_WORKER='worker-'\"$SLURM_ARRAY_TASK_ID\"''\n" in workers
    assert "export AGN_OPTAX_INSECURE=1\n" in workers
    assert f"{kept}/keys/worker-'\"$SLURM_ARRAY_TASK_ID\"'.token'\n" in workers
    assert "train.py 'a b' &\n" in workers
    assert not kept.exists()


def test_slurm_table_of_the_run_file_is_applied(here):
    (here / "run.toml").write_text(
        RUN.replace("cpus = 2", "cpus = 2\nprocesses = 3\ngpus = 4")
        + 'account = "x&y"\npython = "python3"\n'
        'options = ["--exclusive"]\ncenter-options = ["--partition=cpu"]\n'
        'worker-options = ["--switches=1"]\nrequeue-at-limit = true\n'
    )
    files, _ = planned()
    center, workers, end = files.values()
    for text in (workers, center, end):
        assert "#SBATCH '--account=x&y'\n" in text
        assert "#SBATCH --exclusive\n" in text
    for text in (center, end):  # the later one wins
        assert text.index("--partition=cpu") > text.index("--partition=main")
    assert "#SBATCH --switches=1\n" in workers
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n" in workers
    assert "#SBATCH --gpus-per-node=4\n" in workers
    step = "srun --kill-on-bad-exit=1 --cpus-per-task=2 python3 train.py 'a b' &"
    assert step in workers
    assert "trap 'limit=1; scancel --signal=TERM \"$job\"' USR1" in workers
    assert '    true && scontrol requeue "$job"\n' in workers


def test_worker_script_names_its_task_not_the_array(here):
    """The SLURM_JOB_ID of the last task of an array is that of the array."""
    files, _ = planned()
    array = (here / "run.toml").read_text()
    (here / "run.toml").write_text(array.replace("cpus = 2", "processes = 2"))
    spanning, _ = planned()
    for text in (files["workers.sh"], spanning["workers.sh"]):
        assert '\njob="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n' in text
        assert "$SLURM_JOB_ID" not in text
    assert '\njob="$SLURM_JOB_ID"\n' in files["center.sh"]


def test_certificates_are_passed_by_path(here):
    (here / "run.toml").write_text(
        ('tls-ca = "/keys/ca.pem"\n' + RUN).replace("insecure = true", "")
    )
    certificate, key = certificates.make(here)
    files, _ = planned(f"--tls-certificate={certificate}", f"--tls-key={key}")
    assert f"--tls-certificate={certificate} --tls-key={key}" in files["center.sh"]
    assert "export AGN_OPTAX_TLS_CA=/keys/ca.pem\n" in files["workers.sh"]
    assert "AGN_OPTAX_INSECURE" not in files["workers.sh"]
    assert "--tls-ca=/keys/ca.pem" in files["end.sh"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('storage = "kept"\n', "", "jobs of SLURM need storage"),
        ("insecure = true", "", "workers and center need TLS"),
        (
            "insecure = true",
            'insecure = true\njournal = "j"',
            "journal of a run on SLURM",
        ),
        (
            "insecure = true",
            'insecure = true\ntokens = "t"',
            "tokens of a run on SLURM",
        ),
        ('partition = "main"', 'queue = "main"', "unknown key 'queue'"),
    ],
)
def test_bad_run_files_are_rejected_before_anything_is_submitted(
    here, old, new, message
):
    assert old in RUN
    (here / "t").write_text(f"chief worker-0 {'a' * 64}\n")
    (here / "run.toml").write_text(RUN.replace(old, new, 1))
    output = fails("launch", "run.toml", "--on=slurm", "--dry-run", code=2)
    assert message in " ".join(output.split())


def test_missing_sbatch_is_reported(here, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no sbatch" in " ".join(
        fails("launch", "run.toml", "--on=slurm", code=2).split()
    )
    assert not (here / "kept").exists()


@pytest.fixture
def sbatch(here, monkeypatch):
    """A stand-in for sbatch, and for an empty queue."""
    (here / "bin").mkdir()
    squeue = here / "bin/squeue"
    squeue.write_text("#!/bin/bash\ncat queue 2>/dev/null\n")
    squeue.chmod(0o755)
    sbatch = here / "bin/sbatch"
    sbatch.write_text(f"""#!/bin/bash
echo "$*" >> {here}/submitted
env >> {here}/environment
echo $((6 + $(wc -l < {here}/submitted)))
""")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("sbatch")
def test_run_in_the_queue_is_not_submitted_again(here):
    (here / "kept").mkdir()
    (here / "kept/queue").write_text("7\n8\n8\n")
    output = " ".join(fails("launch", "run.toml", "--on=slurm", code=2).split())
    assert "a run named 'tiny' is in the queue: scancel 7 8 ends it" in output
    assert not (here / "submitted").exists()


@pytest.mark.usefixtures("sbatch")
def test_ids_of_jobs_are_not_in_the_environment_of_jobs(here):
    """``sbatch`` gives its environment to the jobs."""
    succeeds("launch", "run.toml", "--on=slurm")
    assert (here / "submitted").read_text().splitlines() == [
        "--parsable center.sh",
        f"--parsable {ARRAY} --dependency=after:7 workers.sh",
        "--parsable --dependency=afterany:8 end.sh 7",
    ]
    lines = (here / "environment").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("center=", "workers="))]


def run_as_task(here, setup, **environment):
    """Run the script of worker 1 here, as SLURM would; its program prints one line."""
    (here / "train.py").write_text("print('it ran')\n")
    text = RUN.replace('["echo set up"]', json.dumps(setup))
    (here / "run.toml").write_text(text)
    (here / "kept").mkdir(exist_ok=True)
    (here / "kept/center").write_text("127.0.0.1:9")  # never contacted
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    (here / "script").write_text(planned()[0]["workers.sh"])
    return subprocess.run(
        ["/bin/bash", "script"],
        env={**os.environ, **variables, "SLURMD_NODENAME": "n1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        (["false", "true"], 1, "false"),
        (["true", "no-such-module load x"], 127, "no-such-module load x"),
        (["source nowhere"], 1, "source nowhere"),
        (["for i in 1 2; do", "(exit $i)", "done"], 1, "( exit $i )"),
        (["source ./returns.sh"], 9, "source ./returns.sh"),
        (["set -e; false"], 1, "false"),
    ],
)
def test_failed_line_of_setup_ends_the_task(here, setup, code, line):
    (here / "returns.sh").write_text("return 9\n")
    done = run_as_task(here, setup)
    assert done.returncode == code
    message = f"setup failed on n1, exit code {code}: {line}"
    assert message in done.stderr
    assert "it ran" not in done.stdout
    assert "scontrol" not in done.stderr  # no requeue: it would fail again
    assert (here / "kept/states/worker-1").read_text() == f"7_1 {code}\n"


@pytest.mark.parametrize(
    "setup",
    [
        [],
        ["if false; then", "false", "fi"],
        ["[ -e nowhere ] && false", "false || true"],
        ["source ./sloppy.sh"],
        ["sloppy() { false; true; }", "sloppy"],
        ["set -eu"],
    ],
)
def test_program_runs_after_setup_that_succeeds(here, setup):
    (here / "sloppy.sh").write_text("false\ntrue\n")
    done = run_as_task(here, setup)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "it ran\nexit code 0 on n1\n"
    assert (here / "kept/states/worker-1").read_text() == "7_1 0\n"


def test_finished_worker_does_not_run_again(here):
    assert "it ran" in run_as_task(here, []).stdout
    again = run_as_task(here, [])
    assert (again.returncode, again.stdout) == (
        0,
        "7_1 is done, and does not run again\n",
    )
    # The same worker of a later run is another task.
    assert "it ran" in run_as_task(here, [], SLURM_ARRAY_JOB_ID="8").stdout


@pytest.mark.usefixtures("sbatch")
def test_prepared_files_are_private_and_tokens_are_kept(here):
    succeeds("launch", "run.toml", "--on=slurm")
    keys = here / "kept/keys"
    assert keys.stat().st_mode & 0o777 == 0o700
    first = lines_of(keys / "tokens")
    roles = ["chief worker-0", "worker worker-1", "operator operator"]
    assert [" ".join(each[:2]) for each in first] == roles
    for _, name, token in first:
        path = keys / f"{name}.token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() == f"{token}\n"
        assert re.fullmatch("[0-9a-f]{64}", token)
    assert len({token for _, _, token in first}) == 3
    assert (here / "kept/logs").is_dir()
    succeeds("launch", "run.toml", "--on=slurm", "--workers=3")
    second = lines_of(keys / "tokens")
    assert [each for each in second if each in first] == first
    assert second[2][:2] == ["worker", "worker-2"]
    assert (here / "kept/states/worker-2").read_text() == "- 1\n"


TRAIN = """
import pathlib, sys, time
import jax.numpy as jnp, optax, agn_optax
from agn_optax import checkpoint, service

me = service.environment()
here = pathlib.Path(sys.argv[1])
at = {"step": jnp.zeros((), jnp.int32)}


def report(what):
    with (here / f"{me.worker}.output").open("a") as file:
        file.write(f"{me.restarts} {what} {int(at['step'])}\\n")


with service.connect(me.address, me.rule) as center:
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=2, name=me.worker)
    with checkpoint.Resumable(worker, here / me.worker, at=at) as loop:
        params, state = loop.start(jnp.zeros(4), chief=me.rank == 0)
        report("starts")
        with service.delay_sigterm() as terminated:
            while not (terminated() or (here / "enough").exists()):
                ones = jnp.zeros(4).at[me.rank].set(1.0)
                updates, state = loop.tx.update(-ones, state, params)
                params = optax.apply_updates(params, updates)
                at["step"] = at["step"] + 1
                params, state = loop.exchange(params, state)
                if int(at["step"]) % 2 == 0:
                    report("made")
                time.sleep(0.02)
            loop.flush(params, state)
            report("leaves" if terminated() else "ends")
"""


@pytest.fixture
def cluster(monkeypatch):
    with slurm.cluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        yield cluster


def launched(*arguments):
    result = command("launch", "run.toml", "--on=slurm", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["jobs"]


def read(path):
    """Return the text of a file; an empty text if it does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def lines_of(path):
    return [line.split() for line in path.read_text().splitlines()]


def serving(folder):
    """Return the id of the process that serves a center with files in this folder."""
    for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and f"--address-file={folder}/center".encode() in words:
            return int(each.parent.name)
    raise AssertionError("no center is served")


class WorkerOutput:
    """The lines that workers have written to files."""

    def __init__(self, here):
        self._here = here

    def lines(self, worker):
        path = self._here / f"{worker}.output"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(r), what, int(n)) for r, what, n in map(str.split, lines)]

    def steps(self, worker):
        """Return the last step that the worker has recorded."""
        return max((n for _, _, n in self.lines(worker)), default=0)

    def has(self, worker, what, restarts=0):
        return any(line[:2] == (restarts, what) for line in self.lines(worker))


@pytest.mark.slow
def test_every_step_counts_once_through_requeue_cancel_and_kill(here, cluster):
    (here / "train.py").write_text(TRAIN)
    # A long lease: a worker missing from the center has left by itself.
    here_alone = f"DNS:{socket.gethostname()}"
    certificate, private = certificates.make(here, names=here_alone)
    tls = f'tls-certificate = "{certificate}"\ntls-key = "{private}"\nlease = 600'
    run = f'tls-ca = "{certificate}"\n' + RUN.replace("insecure = true", tls)
    run = run.replace('["a b"]', f'["{here}"]').replace('"kept"', '"kept here"')
    run = run.replace("workers = 2", "workers = 3")
    (here / "run.toml").write_text(run)
    kept, output = here / "kept here", WorkerOutput(here)
    address, key = kept / "center", kept / "keys/operator.token"
    files, _ = planned()
    jobs = launched()
    for name, text in files.items():
        assert (kept / name).read_text() + "\n" == text
    assert (kept / "keys/tokens").stat().st_mode & 0o777 == 0o600
    assert [each[:2] for each in lines_of(kept / "keys/tokens")] == [
        ["chief", "worker-0"],
        ["worker", "worker-1"],
        ["worker", "worker-2"],
        ["operator", "operator"],
    ]

    def goes_on(*workers):
        before = {each: output.steps(each) for each in workers}
        wait_until(lambda: all(output.steps(w) > n for w, n in before.items()))

    # SLURM requeues a worker.
    goes_on("worker-0", "worker-1", "worker-2")
    cluster("scontrol", "requeue", f"{jobs['workers']}_1")
    assert "is in the queue" in fails("launch", "run.toml", "--on=slurm", code=2)
    wait_until(lambda: output.has("worker-1", "starts", restarts=1))
    _, left, started = (n for _, what, n in output.lines("worker-1") if what != "made")
    assert started == left > 0
    goes_on("worker-1")

    # A cancelled worker sends its last steps, and leaves.
    cluster("scancel", f"{jobs['workers']}_2")
    wait_until(lambda: output.has("worker-2", "leaves"))
    wait_until(lambda: f"{jobs['workers']}_2" not in cluster.queue)
    where = service.Observer(
        f"file:{address}", tls=service.Tls(certificate), token=key, timeout=30
    )
    with where as center:
        names = {worker["name"] for worker in center.status()["workers"]}
        assert names == {"worker-0", "worker-1"}
        assert center.pull().params[2] == output.steps("worker-2")

    # The center is killed, and restarts at another port.
    before = address.read_text()
    os.kill(serving(kept), signal.SIGKILL)
    wait_until(lambda: read(address) not in ("", before))
    goes_on("worker-0", "worker-1")

    # The center ends when all workers have ended.
    (here / "enough").touch()
    wait_until(lambda: not cluster.queue)
    assert not address.exists()
    assert "exit code 137 on " in (kept / "logs/center.log").read_text()
    center = agn_optax.LocalCenter(
        agn_optax.rules.downpour(), durability=Journal(kept / "journal")
    )
    acknowledged = [output.steps(f"worker-{rank}") for rank in range(3)] + [0.0]
    assert center.pull().params.tolist() == acknowledged


SPANNING = """
import pathlib, sys, time
import jax, jax.numpy as jnp
import agn_optax
from agn_optax import service
from jax.experimental import multihost_utils

me = service.environment()
jax.distributed.initialize(**me.distributed)
here, process = pathlib.Path(sys.argv[1]), jax.process_index()
report = here / f"{me.worker}.{process}.{me.restarts}"
count = int(multihost_utils.process_allgather(jnp.ones(())).sum())
report.write_text(f"{jax.process_count()} {count} ")
with service.delay_sigterm() as terminated:
    until = time.monotonic() + 60
    # All processes of a worker end at the same step.
    any_terminated = lambda: bool(
        multihost_utils.process_allgather(jnp.asarray(terminated())).any()
    )
    while not (ends := any_terminated()):
        if me.restarts or time.monotonic() > until:
            break
        time.sleep(0.1)
    with report.open("a") as file:
        # Also if so far only the other process was terminated.
        file.write("terminated" if ends else "ended")
"""


@pytest.mark.slow
def test_worker_on_two_nodes_continues_after_its_time_limit(here, cluster):
    (here / "train.py").write_text(SPANNING)
    # The names of this cluster's nodes cannot be resolved.
    port = f'environment = {{AGN_OPTAX_COORDINATOR = "{ports.free_address()}"}}\n'
    text = port + RUN.replace("workers = 2", "workers = 1").replace(
        '"a b"', f'"{here}"'
    )
    text = (
        text.replace("cpus = 2", "cpus = 2\nprocesses = 2")
        + "requeue-at-limit = true\n"
    )
    (here / "run.toml").write_text(text)
    jobs = launched()
    first = [here / f"worker-0.{process}.0" for process in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in first))
    # SLURM sends this signal when the time limit is near.
    cluster("scancel", "--batch", "--signal=USR1", f"{jobs['workers']}_0")
    wait_until(lambda: not cluster.queue)
    assert [path.read_text() for path in first] == ["2 2 terminated"] * 2
    second = [here / f"worker-0.{process}.1" for process in range(2)]
    assert [path.read_text() for path in second] == ["2 2 ended"] * 2


@pytest.mark.slow
def test_submission_that_slurm_rejects_leaves_no_jobs(here, cluster):
    text = RUN.replace('partition = "main"', 'worker-options = ["--partition=none"]')
    (here / "run.toml").write_text(text)
    output = " ".join(fails("launch", "run.toml", "--on=slurm", code=2).split())
    assert "sbatch --parsable --array=0-1" in output
    assert "failed: " in output
    wait_until(lambda: not cluster.queue)


STARTS = """
import os, pathlib, sys, time

me, here = os.environ["AGN_OPTAX_WORKER"], pathlib.Path(sys.argv[1])
with (here / "starts").open("a") as file:
    file.write(f"{me}\\n")
states = here / "kept/states"
is_done = lambda name: (states / name).read_text().endswith(" 0\\n")
if me == "worker-2":  # the last one, whose id is that of the array
    while not (is_done("worker-0") and is_done("worker-1")):
        time.sleep(0.05)
    sys.exit(3)
"""


@pytest.mark.slow
def test_failure_of_the_last_task_ends_only_it(here, cluster):
    (here / "train.py").write_text(STARTS)
    text = RUN.replace("a b", str(here))
    (here / "run.toml").write_text(text.replace("workers = 2", "workers = 3"))
    jobs = launched()
    wait_until(lambda: not cluster.queue)
    log = (here / "kept/logs/worker-2.log").read_text()
    assert re.search(r"^exit code 3 on n[12]$", log, re.M), log

    def starts():
        return sorted((here / "starts").read_text().split())

    assert starts() == ["worker-0", "worker-1", "worker-2", "worker-2"]
    (here / "kept/center").write_text("127.0.0.1:9")  # never contacted
    # The whole array is requeued; finished workers do not run again.
    cluster("scontrol", "requeue", jobs["workers"])
    wait_until(lambda: starts().count("worker-2") == 3)
    wait_until(lambda: not cluster.queue)
    assert starts() == ["worker-0", "worker-1", *["worker-2"] * 3]


DIES = """
import os, signal, sys
import jax.numpy as jnp, optax, agn_optax
from agn_optax import service

me = service.environment()
with service.connect(me.address, me.rule) as center:
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=1, name=me.worker)
    params, state = worker.start(jnp.zeros(4), chief=me.rank == 0)
    updates, state = worker.tx.update(-jnp.ones(4), state, params)
    params = optax.apply_updates(params, updates)
    params, state = worker.exchange(params, state)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_last_job_reports_which_worker_failed(here, cluster):
    (here / "train.py").write_text(DIES)
    kept, end = here / "kept", launched("--restarts=0")["end"]
    wait_until(lambda: not cluster.queue)
    output = (kept / "logs/end.log").read_text()
    assert re.search(r"^failed: worker-1: exit code 137$", output, re.M), output
    assert "failed: worker-0" not in output
    assert "failed: center" not in output
    assert "ExitCode=137:0" in cluster("scontrol", "show", "job", end)
    assert (kept / "states/center").read_text().endswith(" 0\n")
