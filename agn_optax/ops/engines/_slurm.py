"""The engine for SLURM: a job for the center, an array of workers, and a final job.

The three jobs are scripts in the run's storage, submitted by `sbatch`. Each worker is a
task of the array, which SLURM requeues alone. The center is requeued with its journal,
and writes its address to a file that workers read again. The final job ends the center
after all workers, and names the workers that failed.

A script outlives its task, so that it can requeue the job, and write the exit code of
the task to the storage: a worker that is done does not run again. SLURM itself queues a
job again if its node failed, or if the job was preempted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from agn_optax import errors
from agn_optax._internal import write_whole
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._run import Resources, Run, arguments
from agn_optax.service import tokens

_INDEX = "$SLURM_ARRAY_TASK_ID"
_END_MARGIN = 10  # seconds between the end of a task's grace and its time limit
_OPERATOR = "operator"
# Variables of the submitting process that jobs must not inherit; scripts set their own.
_NOT_INHERITED = re.compile(r"AGN_OPTAX_|SLURM_(?!CONF$)")

# In the last task of an array, SLURM_JOB_ID is the id of the whole array, and a command
# that names it would act on all tasks.
_TASK = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
_JOB = '"$SLURM_JOB_ID"'
_SIGNAL_PROCESS = 'kill -TERM "$task"'
_SIGNAL_STEPS = 'scancel --signal=TERM "$job"'  # SIGTERM to srun would kill its tasks

# Jobs that were submitted before the one that is rejected are cancelled.
_SUBMIT = """\
center= workers= end=
trap 'echo "$BASH_COMMAND" >&2; scancel $center $workers 2>/dev/null' ERR
set -e
{commands}
echo "$center" "$workers" "$end"
"""
_WAIT_FOR_ADDRESS = """\
# Wait for the center's address; a center in the queue has none.
for ((i = 0; i < 600; i++)); do
    [ -s {address} ] && break
    sleep 1
done"""
# If the node is lost, the exit code is 1.
_BEGIN = """\
# A file has the job of this task and its exit code.
job={job}
storage={storage}
state="$storage"/states/{name}
mkdir -p "$storage/states" "$storage/failures"
ended() {{ echo "$job $1" > "$state.new" && mv "$state.new" "$state"; }}
if [ "$(cat "$state" 2>/dev/null)" = "$job 0" ]; then
    echo "$job is done, and does not run again"
    exit 0
fi
ended 1"""
# Commands in a sourced file may fail, as long as the file returns 0.
_SETUP = """\
# A line of setup that fails ends the task, which is then not queued again.
setup_failed() {{
    [ "$2" -gt 1 ] && return
    echo "setup failed on $SLURMD_NODENAME, exit code $1: $BASH_COMMAND" >&2
    {on_failure}
    exit "$1"
}}
trap 'setup_failed $? ${{#BASH_SOURCE[@]}}' ERR
{setup}
trap - ERR
set +eu"""
# When a job ends early (scancel, preemption), SLURM signals script and task. Before a
# time limit it signals the script alone, which then signals the task.
_RUN_TASK = """\
ending= limit=
trap 'ending=1; ended 143' TERM
trap 'limit=1; {signal_task}' USR1
{command} &
task=$!
while kill -0 "$task" 2>/dev/null; do wait "$task"; done
wait "$task"
code=$?
echo "exit code $code on $SLURMD_NODENAME"
{correct_code}
ended "$code"
failures=$storage/failures/$job
if [ "$code" -eq 0 ] || [ "$ending" ]; then
    exit $code
elif [ "$limit" ]; then
    {requeue_at_limit} && scontrol requeue "$job"
else
    echo "$code" >> "$failures"
    [ "$(wc -l < "$failures")" -le {restarts} ] && scontrol requeue "$job"
fi
exit $code"""
# A center that is told to end drains, but is done only if an operator has drained it.
_TOLD_IS_NOT_DONE = '[ "$ending$limit" ] && [ "$code" -eq 0 ] && code=143'
_DRAIN_CENTER = """\
while true; do
    # If SLURM does not answer, the center may still be in the queue.
    jobs=$(squeue --noheader --me --format=%A) &&
        ! grep -qx "$center" <<< "$jobs" && break
    {drain}
    sleep 2
done"""
_OUTCOME = """\
# The exit code of the run is that of the first task that failed.
code=0
for name in $(ls -v --ignore='*.new' {states}); do
    read -r _ outcome < {states}/"$name"
    [ "$outcome" = 0 ] && continue
    echo "failed: $name: exit code $outcome"
    [ "$code" = 0 ] && code=$outcome
done
[ "$code" = 0 ] && echo "all workers are done"
exit $code"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of the engine for SLURM.

    Attributes:
      partition, account: options of ``sbatch`` for all jobs.
      options: further options of ``sbatch`` for all jobs, such as ``["--qos=low"]``.
      center_options: options for the center's job and the final job, which override the
        others.
      worker_options: options for the workers' array, which override the others.
      setup: lines of bash that run before each task's program, such as
        ``["module load cuda"]``. A line that fails ends its task.
      python: the interpreter on the nodes; by default the one that runs here.
      requeue_at_limit: whether a worker is queued again at its time limit. Its program
        must then continue from its own checkpoint. A center is always queued again.
    """

    partition: str | None = None
    account: str | None = None
    options: list[str] = dataclasses.field(default_factory=list)
    center_options: list[str] = dataclasses.field(default_factory=list)
    worker_options: list[str] = dataclasses.field(default_factory=list)
    setup: list[str] = dataclasses.field(default_factory=list)
    python: str = sys.executable
    requeue_at_limit: bool = False


class Slurm(Engine):
    """Jobs of SLURM, on nodes that share a disk."""

    name = "slurm"
    Settings = SlurmSettings
    settings: SlurmSettings

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.storage is None:
            raise errors.InvalidArgumentError(
                "jobs of SLURM need storage, a folder on a disk that all nodes share: "
                "scripts, tokens, the center's address and its journal are there"
            )
        for name in ("address_file", "journal", "tokens"):
            if name in run.serve:
                raise errors.InvalidArgumentError(
                    f"{name.replace('_', '-')} of a run on SLURM is in its storage, "
                    f"and cannot be {run.serve[name]}"
                )
        encrypts = run.serve.get("tls_certificate") is not None
        if not (encrypts or run.is_insecure):
            raise errors.InvalidArgumentError(
                "between nodes, workers and center need TLS (tls-certificate and "
                "tls-key in [center], and tls-ca at the top), or insecure = true in "
                "[center], in a network that you trust"
            )
        self._folder = run.storage.absolute()
        self._keys = self._folder / "keys"

    def files(self) -> Mapping[str, str]:
        """Return the scripts of the jobs."""
        return {
            "center.sh": self._center(),
            "workers.sh": self._workers(),
            "end.sh": self._end(),
        }

    def commands(self) -> list[str]:
        """Return the commands that submit the jobs."""
        array = f"--array=0-{self.run.workers - 1}"
        # Some clusters print "ID;CLUSTER".
        center, workers = '"${center%;*}"', '"${workers%;*}"'
        array += f" --dependency=after:{center}"
        return [
            "center=$(sbatch --parsable center.sh)",
            f"workers=$(sbatch --parsable {array} workers.sh)",
            f"end=$(sbatch --parsable --dependency=afterany:{workers} end.sh {center})",
        ]

    def launch(self, output: Output) -> dict[str, Any]:
        """Write scripts and tokens, and submit the jobs.

        Raises:
          InvalidArgumentError: SLURM is not installed here, the run is in the queue, or
            a job is rejected; the jobs submitted before it are then cancelled.
        """
        if shutil.which("sbatch") is None:
            raise errors.InvalidArgumentError(
                "--on slurm needs SLURM's commands on this machine, and there is no "
                "sbatch; --dry-run prints what would be submitted"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        names = ",".join(f"{self.run.name}-{job}" for job in ("center", "workers"))
        queued = self._shell(f"squeue --noheader --me --name={names} --format=%F || :")
        if queued:
            raise errors.InvalidArgumentError(
                f"a run named {self.run.name!r} is in the queue: scancel "
                f"{' '.join(sorted(set(queued.split())))} ends it"
            )
        self._prepare()
        printed = self._shell(_SUBMIT.format(commands="\n".join(self.commands())))
        jobs = ("center", "workers", "end")
        ids = [each.partition(";")[0] for each in printed.split()]
        for job, number in zip(jobs, ids, strict=True):
            output(job, f"job {number}")
        summary = {"jobs": dict(zip(jobs, ids, strict=True))}
        return {"returncode": 0, **summary, "storage": str(self._folder)}

    def _prepare(self) -> None:
        """Write scripts, tokens and first states, in place of an earlier run's."""
        for name, text in self.files().items():
            write_whole(self._folder / name, text, 0o644)
        (self._folder / "logs").mkdir(exist_ok=True)
        shutil.rmtree(self._folder / "failures", ignore_errors=True)
        states = self._folder / "states"
        shutil.rmtree(states, ignore_errors=True)
        states.mkdir()
        for name in self.run.worker_names:
            (states / name).write_text("- 1\n")
        if self.run.uses_tokens:
            self._make_tokens()

    def _make_tokens(self) -> None:
        """Make a token for each caller of the center, and keep those that exist."""
        self._keys.mkdir(mode=0o700, exist_ok=True)
        made = {}
        for name in [*self.run.worker_names, _OPERATOR]:
            path = self._keys / f"{name}.token"
            if not path.exists():
                write_whole(path, f"{tokens.generate()}\n")
            made[name] = path.read_text().strip()
        operator = f"operator {_OPERATOR} {made.pop(_OPERATOR)}"
        write_whole(self._keys / "tokens", self.run.callers(made, operator) + "\n")

    def _shell(self, script: str) -> str:
        """Return the output of a script, which runs in the storage.

        Raises:
          InvalidArgumentError: the script fails.
        """
        inherited = {
            name: v for name, v in os.environ.items() if not _NOT_INHERITED.match(name)
        }
        done = subprocess.run(  # noqa: S603 the commands of --dry-run
            ["/bin/bash", "-c", script],
            cwd=self._folder,
            env=inherited,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise errors.InvalidArgumentError(f"sbatch failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def _center(self) -> str:
        run = self.run
        address = run.serve.get("address", "0.0.0.0:0")
        options = {"tokens": self._keys / "tokens"} if run.uses_tokens else {}
        command = run.serve_command(
            self.settings.python, address=address, json=True, **options
        )
        remove_address = shlex.join(["rm", "-f", str(run.address_file)])
        return self._script(
            "center",
            f"The center of {run.name}, which may be queued again on any node.",
            run.center_resources,
            self._begin(_JOB, "center"),
            self._setup(),
            "# Until the center serves again, workers find no address and wait.\n"
            f"trap {shlex.quote(remove_address)} EXIT",
            _RUN_TASK.format(
                command=shlex.join(command),
                signal_task=_SIGNAL_PROCESS,
                correct_code=_TOLD_IS_NOT_DONE,
                requeue_at_limit="true",
                restarts=run.center_restarts,
            ),
        )

    def _workers(self) -> str:
        run, settings = self.run, self.settings
        variables = {"AGN_OPTAX_CENTER": f"file:{run.address_file}"}
        if run.uses_tokens:
            token = self._keys / f"{run.worker_name(_INDEX)}.token"
            variables[tokens.TOKEN_FILE] = str(token)
        environment = run.worker_environment(_INDEX, **variables).items()
        needs, command = run.worker_resources, run.worker_command(settings.python)
        if needs.processes > 1:
            # Steps do not inherit the number of cores of their task.
            cpus = [] if needs.cpus is None else [f"--cpus-per-task={needs.cpus}"]
            command = ["srun", "--kill-on-bad-exit=1", *cpus, *command]
        return self._script(
            "workers",
            f"A worker of {run.name} in each task of the array.",
            needs,
            self._begin(_TASK, run.worker_name(_INDEX)),
            self._setup(),
            "\n".join(f"export {name}={_quoted(v)}" for name, v in environment),
            _WAIT_FOR_ADDRESS.format(address=shlex.quote(str(run.address_file))),
            _RUN_TASK.format(
                command=shlex.join(command),
                signal_task=_SIGNAL_PROCESS if needs.processes == 1 else _SIGNAL_STEPS,
                correct_code="",
                requeue_at_limit="true" if settings.requeue_at_limit else "false",
                restarts=run.restarts,
            ),
        )

    def _end(self) -> str:
        run = self.run
        options: dict[str, Any] = {"insecure": run.is_insecure or None}
        if run.uses_tokens:
            options["token_file"] = self._keys / f"{_OPERATOR}.token"
        if run.tls_ca is not None:
            options["tls_ca"] = run.tls_ca.absolute()
        command = [self.settings.python, "-m", "agn_optax.ops.cli", "drain"]
        drain = shlex.join([*command, f"file:{run.address_file}", *arguments(options)])
        return self._script(
            "end",
            f"Ends the center of {run.name}, job $1, after all workers.",
            Resources(),
            "center=$1",
            # If setup fails, this job cannot run `drain`, but SIGTERM also drains.
            self._setup('scancel --full --signal=TERM "$center"'),
            _DRAIN_CENTER.format(drain=drain),
            _OUTCOME.format(states=shlex.quote(str(self._folder / "states"))),
        )

    def _begin(self, job: str, name: str) -> str:
        """Return the lines that name the task, and end it if it is done."""
        storage = shlex.quote(str(self._folder))
        return _BEGIN.format(job=job, storage=storage, name=_quoted(name))

    def _setup(self, on_failure: str = 'ended "$1"') -> str:
        """Return the lines of setup; if one of them fails, ``on_failure`` runs."""
        setup = "\n".join(self.settings.setup)
        return _SETUP.format(setup=setup, on_failure=on_failure) if setup else ""

    def _script(self, job: str, summary: str, needs: Resources, *blocks: str) -> str:
        """Return the script of a job; of its options for sbatch, later ones win."""
        settings = self.settings
        is_array = job == "workers"
        log = "worker-%a" if is_array else job
        requested: dict[str, Any] = {
            "job_name": f"{self.run.name}-{job}",
            "chdir": pathlib.Path.cwd(),
            "output": self._folder / "logs" / f"{log}.log",
            "open_mode": "append",
            "requeue": True,
            "signal": f"B:USR1@{math.ceil(self.run.stop_grace) + _END_MARGIN}",
            "partition": settings.partition,
            "account": settings.account,
            "nodes": needs.processes,
            "ntasks_per_node": 1,
            "cpus_per_task": needs.cpus,
            "mem": None if needs.memory is None else f"{-(-needs.memory >> 20)}M",
            "gpus_per_node": needs.gpus,
            # SLURM counts whole minutes.
            "time": None if needs.seconds is None else math.ceil(needs.seconds / 60),
        }
        job_options = settings.worker_options if is_array else settings.center_options
        options = map(shlex.quote, arguments(requested))
        lines = [
            *("#!/bin/bash", f"# {summary}"),
            *(
                f"#SBATCH {each}"
                for each in [*options, *settings.options, *job_options]
            ),
        ]
        return "\n\n".join(filter(None, ["\n".join(lines), *blocks])) + "\n"


def _quoted(text: str) -> str:
    """Quote a text for a shell, which then expands the number of the worker only."""
    return shlex.quote(text).replace(_INDEX, f"'\"{_INDEX}\"'")
