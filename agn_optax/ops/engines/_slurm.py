"""The engine for SLURM: a job for the center, an array of workers, and a final job.

The three jobs are scripts in the run's storage, submitted by `sbatch`. Each worker is a
task of the array, which SLURM requeues alone. The center is requeued with its journal,
and writes its address to a file that workers read again. The final job ends the center
after all workers, and names the workers that failed.

A script outlives its task, so that it can requeue the job, and write the outcome of the
task to the storage: a worker that is done does not run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from agn_optax import errors
from agn_optax._internal import check, write_whole
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._run import Resources, Run, arguments
from agn_optax.service import tokens

_INDEX = "$SLURM_ARRAY_TASK_ID"
_ANY_ADDRESS = "0.0.0.0:0"
_END_MARGIN = 10  # seconds between the end of a task's grace and its time limit
_POLL = 2.0  # seconds between two calls of squeue
# Variables of the submitting process that jobs must not inherit; scripts set their own.
_NOT_INHERITED = re.compile(r"AGN_OPTAX_|SLURM_(?!CONF$)")

# In the last task of an array, SLURM_JOB_ID is the id of the whole array, and a command
# that names it would act on all tasks.
_TASK = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
_JOB = '"$SLURM_JOB_ID"'
_SIGNAL_PROCESS = 'kill -TERM "$task"'
_SIGNAL_STEPS = 'scancel --signal=TERM "$job"'  # SIGTERM to srun would kill its tasks

_PREPARE_SCRIPT = """\
#!/bin/bash
# Makes the folders of {name} and a token for each caller of its center. Keeps existing
# tokens, and removes the states of an earlier run.
set -eu
mkdir -p {folder}
cd {folder}
mkdir -p logs states failures"""
_WAIT_FOR_ADDRESS = """\
# Wait for the center's address; a center in the queue has none.
for ((i = 0; i < {address_timeout}; i++)); do
    [ -s {address} ] && break
    sleep 1
done"""
_MAKE_TOKENS = """\
mkdir -p -m 700 keys
umask 077
roles() {{
    echo chief {chief}
    for ((i = 1; i < {workers}; i++)); do echo "worker worker-$i"; done
    echo operator operator
}}
roles | while read -r role name; do
    if [ ! -s "keys/$name.token" ]; then
        made=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n')
        echo "$made" > keys/new
        mv keys/new "keys/$name.token"
    fi
    echo "$role $name $(cat "keys/$name.token")"
done > keys/new-tokens
mv keys/new-tokens keys/tokens"""
_BEGIN = """\
# The state of this task is in a file: the job, an exit code and a reason.
job={job}
storage={storage}
state="$storage"/states/{name}
mkdir -p "$storage/states" "$storage/failures"
became() {{ echo "$job $*" > "$state.new" && mv "$state.new" "$state"; }}
if [ "$(cat "$state" 2>/dev/null)" = "$job 0 done" ]; then
    echo "$job is done, and does not run again"
    exit 0
fi
became 1 "began on $SLURMD_NODENAME\""""
_SETUP = """\
# A line of setup that fails ends the task, which is then not queued again. Commands in
# a sourced file may fail, as long as the file returns 0.
setup_failed() {{
    [ "$2" -gt 1 ] && return
    reason="setup failed on $SLURMD_NODENAME, exit code $1: $BASH_COMMAND"
    echo "$reason" >&2
    {on_failure}
    exit "$1"
}}
trap 'setup_failed $? ${{#BASH_SOURCE[@]}}' ERR
{setup}
trap - ERR
set +eu"""
_RUN_TASK = """\
# When a job ends early (scancel, preemption), SLURM signals script and task. Before a
# time limit it signals the script alone, which then signals the task.
ending= limit=
trap 'ending=1; became 143 "told to end on $SLURMD_NODENAME"' TERM
trap 'limit=1; {signal_task}' USR1
{command} &
task=$!
while kill -0 "$task" 2>/dev/null; do wait "$task"; done
wait "$task"
code=$?

# SLURM queues a job again if its node failed, or if the job was preempted. If the task
# failed, or has work left at its time limit, the job queues itself again.
reason="exit code $code on $SLURMD_NODENAME"
failures=$storage/failures/$job
if [ "$code" -eq 0 ]{and_if}; then
    became 0 done
elif [ "$ending" ]; then
    became "$code" "$reason, when told to end"
elif [ "$limit" ]; then
    became "$code" "$reason, at its time limit"
    {requeue_at_limit} && scontrol requeue "$job"
else
    became "$code" "$reason"
    echo "$reason" >> "$failures"
    [ "$(wc -l < "$failures")" -le {restarts} ] && scontrol requeue "$job"
fi
exit $code"""
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
    read -r _ outcome why < {states}/"$name"
    [ "$outcome" = 0 ] && continue
    [[ $why == began* ]] && why="$why, and was lost"
    echo "failed: $name: $why"
    [ "$code" = 0 ] && code=$outcome
done
[ "$code" = 0 ] && echo "all workers are done"
exit $code"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of the engine for SLURM.

    Attributes:
      partition, account, qos, constraint: options of ``sbatch`` for all jobs.
      options: further options of ``sbatch`` for all jobs, such as ``["--exclusive"]``.
      center_options: options for the center's job and the final job, which override the
        others.
      worker_options: options for the workers' array, which override the others.
      setup: lines of bash that run before each task's program, such as
        ``["module load cuda"]``. A line that fails ends its task.
      python: the interpreter on the nodes; by default the one that runs here.
      max_running: maximum number of workers that run at a time; None for no maximum.
      requeue_at_limit: whether a worker is queued again at its time limit. Its program
        must then continue from its own checkpoint. A center is always queued again.
      address_timeout: seconds that a worker waits for the center's address.
      wait: return only when the run is over, with the exit code of the first task that
        failed; otherwise return as soon as the jobs are submitted.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: list[str] = dataclasses.field(default_factory=list)
    center_options: list[str] = dataclasses.field(default_factory=list)
    worker_options: list[str] = dataclasses.field(default_factory=list)
    setup: list[str] = dataclasses.field(default_factory=list)
    python: str = sys.executable
    max_running: int | None = None
    requeue_at_limit: bool = False
    address_timeout: int = 600
    wait: bool = False


@dataclasses.dataclass
class _Jobs:
    """The ids of a run's jobs, as recorded in its storage; "" for no job."""

    center: str = ""
    end: str = ""
    arrays: list[str] = dataclasses.field(default_factory=list)
    workers: int = 0  # number of workers that were submitted

    @property
    def ids(self) -> set[str]:
        """The ids of all jobs."""
        return {self.center, self.end, *self.arrays} - {""}


class Slurm(Engine):
    """Jobs of SLURM, on nodes that share a disk.

    A run that is in the queue can grow: if ``workers`` is larger than before, only the
    additional workers are submitted.
    """

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
        for name in ("max_running", "address_timeout"):
            argument = f"{name.replace('_', '-')} in [slurm]"
            check.whole_number(getattr(self.settings, name), argument, least=1)
        for name in ("address_file", "journal", "tokens"):
            if run.has_center and name in run.serve:
                raise errors.InvalidArgumentError(
                    f"{name.replace('_', '-')} of a run on SLURM is in its storage, "
                    f"and cannot be {run.serve[name]}"
                )
        encrypts = run.serve.get("tls_certificate") is not None
        if run.has_center and not (encrypts or run.is_insecure):
            raise errors.InvalidArgumentError(
                "between nodes, workers and center need TLS (tls-certificate and "
                "tls-key in [center], and tls-ca at the top), or insecure = true in "
                "[center], in a network that you trust"
            )
        self._folder = run.storage.absolute()
        self._keys = self._folder / "keys"

    def files(self) -> Mapping[str, str]:
        """Return the scripts; for a run in the queue, those that change as it grows."""
        queued = self._jobs_in_queue().workers
        scripts = {"prepare.sh": self._prepare(queued), "workers.sh": self._workers()}
        if queued or not self.run.has_center:
            return scripts
        return {**scripts, "center.sh": self._center(), "end.sh": self._end()}

    def commands(self) -> list[str]:
        """Return the commands that submit the jobs, or a queued run's new workers."""
        commands = self._commands(self._jobs_in_queue())
        return [f"{job}=$({line})" if job else line for job, line in commands]

    def launch(self, output: Output) -> dict[str, Any]:
        """Write scripts and tokens, submit the jobs, and wait if the settings say so.

        Raises:
          InvalidArgumentError: SLURM is not installed here, or rejects a job; the jobs
            submitted before it are then cancelled.
        """
        if shutil.which("sbatch") is None:
            raise errors.InvalidArgumentError(
                "--on slurm needs SLURM's commands on this machine, and there is no "
                "sbatch; --dry-run prints what would be submitted"
            )
        jobs = self._jobs_in_queue()
        commands = self._commands(jobs)
        files = self.files()
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(self._folder / name, text, 0o644)
        ids: dict[str, str] = {}
        try:
            for job, line in commands:
                printed = _output_of(line, self._folder, ids)
                if job:
                    ids[job] = printed.partition(";")[0]  # without the cluster's name
                    output(job, f"job {ids[job]}")
        except errors.InvalidArgumentError:
            with contextlib.suppress(errors.InvalidArgumentError):
                if ids:
                    _output_of(shlex.join(["scancel", *ids.values()]))
            raise
        jobs.center = ids.get("center", jobs.center)
        jobs.end = ids.get("end", jobs.end)
        jobs.arrays.append(ids["workers"])
        jobs.workers = self.run.workers
        record = json.dumps(dataclasses.asdict(jobs))
        write_whole(self._folder / "jobs.json", record + "\n", 0o644)
        summary = {"returncode": 0, "jobs": ids, "storage": str(self._folder)}
        return summary | (self._wait(output) if self.settings.wait else {})

    def _wait(self, output: Output) -> dict[str, Any]:
        """Wait until no job of the run is left, and report the tasks that failed.

        Returns:
          The exit code of the first task at fault, and the reason of each failure.
        """
        ids = " ".join(sorted(self._jobs().ids))
        output("end", f"agn-optax: waits for the jobs; scancel {ids} ends them")
        is_over = False
        while not is_over:
            time.sleep(_POLL)
            # If SLURM does not answer, the state of the queue is unknown.
            with contextlib.suppress(errors.InvalidArgumentError):
                is_over = not self._jobs().ids & _queued()
        done = subprocess.run(  # noqa: S603 as at the end of end.sh
            ["/bin/bash", "-c", self._outcome()],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        failed = {}
        for line in done.stdout.splitlines():
            kind, _, problem = line.partition(": ")
            if kind == "failed":
                name, _, failed[name] = problem.partition(": ")
                output(name, f"agn-optax: failed: {failed[name]}")
        return {"returncode": done.returncode, "failed": failed}

    def _commands(self, queued: _Jobs) -> list[tuple[str, str]]:
        """Return the commands that submit the jobs that are not in the queue.

        Each comes with the name of the job whose id it prints, or "". In later
        commands, a variable of this name stands for the id.
        """
        last = self.run.workers - 1
        if queued.workers > last:
            raise errors.InvalidArgumentError(
                f"the run in {self._folder} has {queued.workers} workers in the queue "
                f"(jobs {', '.join(queued.arrays)}): a larger --workers adds "
                "workers, and scancel ends the jobs"
            )
        max_running = self.settings.max_running
        limit = "" if max_running is None else f"%{max_running}"
        sbatch = "sbatch --parsable"
        prepare = ("", "bash prepare.sh")
        array = f"{sbatch} --array={queued.workers}-{last}{limit}"
        if self.run.has_center and not queued.workers:
            ends = '--dependency=afterany:"$workers"'
            return [
                prepare,
                ("center", f"{sbatch} center.sh"),
                ("workers", f'{array} --dependency=after:"$center" workers.sh'),
                ("end", f'{sbatch} {ends} end.sh "$center"'),
            ]
        commands = [prepare, ("workers", f"{array} workers.sh")]
        if queued.end:
            arrays = ":".join([*queued.arrays, '"$workers"'])
            after = f"Dependency=afterany:{arrays}"
            commands.append(("", f"scontrol update JobId={queued.end} {after}"))
        return commands

    def _jobs(self) -> _Jobs:
        """Return the jobs that were submitted last."""
        try:
            return _Jobs(**json.loads((self._folder / "jobs.json").read_text()))
        except FileNotFoundError:
            return _Jobs()

    def _jobs_in_queue(self) -> _Jobs:
        """Return the jobs of this run if it is in the queue; else none.

        A run is in the queue while its center is or, without a center, a worker is.
        """
        jobs = self._jobs()
        if not jobs.workers or shutil.which("squeue") is None:
            return _Jobs()
        queued = _queued()
        jobs.arrays = [array for array in jobs.arrays if array in queued]
        is_queued = jobs.center in queued if self.run.has_center else jobs.arrays
        return jobs if is_queued else _Jobs()

    def _prepare(self, queued: int) -> str:
        """Return the script that makes folders, tokens and first states.

        The first ``queued`` workers are in the queue, and have their states already.
        """
        run = self.run
        blocks = [
            _PREPARE_SCRIPT.format(name=run.name, folder=_quoted(str(self._folder)))
        ]
        if not queued:
            blocks.append("rm -f states/* failures/*")
        blocks.append(
            f"for ((i = {queued}; i < {run.workers}; i++)); do\n"
            '    echo "- 1 did not begin" > "states/worker-$i"\n'
            "done"
        )
        if run.uses_tokens:
            blocks.append(
                _MAKE_TOKENS.format(chief=run.worker_name(0), workers=run.workers)
            )
        return _joined(*blocks)

    def _center(self) -> str:
        run = self.run
        options = {"tokens": self._keys / "tokens"} if run.uses_tokens else {}
        command = run.center_command(self.settings.python, _ANY_ADDRESS, **options)
        remove_address = shlex.join(["rm", "-f", str(run.address_file)])
        return _joined(
            self._header(
                f"The center of {run.name}, which may be queued again on any node.",
                "center",
                run.center_resources,
            ),
            self._begin(_JOB, "center"),
            self._setup(),
            "# Until the center serves again, workers find no address and wait.\n"
            f"trap {shlex.quote(remove_address)} EXIT",
            _RUN_TASK.format(
                command=shlex.join(command),
                signal_task=_SIGNAL_PROCESS,
                # A center that is told to end drains, but is done only if an operator
                # has drained it.
                and_if=' && [ -z "$ending$limit" ]',
                requeue_at_limit="true",
                restarts=run.center_restarts,
            ),
        )

    def _workers(self) -> str:
        run, settings = self.run, self.settings
        variables, wait = {}, ""
        if run.has_center:
            variables["AGN_OPTAX_CENTER"] = f"file:{run.address_file}"
            wait = _WAIT_FOR_ADDRESS.format(
                address_timeout=settings.address_timeout,
                address=_quoted(str(run.address_file)),
            )
        if run.uses_tokens:
            token = self._keys / f"{run.worker_name(_INDEX)}.token"
            variables[tokens.TOKEN_FILE] = str(token)
        environment = run.worker_environment(_INDEX, **variables).items()
        exports = [f"export {name}={_quoted(v, _INDEX)}" for name, v in environment]
        needs, command = run.worker_resources, run.worker_command(settings.python)
        if needs.processes > 1:
            # Steps do not inherit the number of cores of their task.
            cpus = [] if needs.cpus is None else [f"--cpus-per-task={needs.cpus}"]
            command = ["srun", "--kill-on-bad-exit=1", *cpus, *command]
        return _joined(
            self._header(
                f"A worker of {run.name} in each task of the array.", "workers", needs
            ),
            self._begin(_TASK, run.worker_name(_INDEX)),
            self._setup(),
            "\n".join(exports),
            wait,
            _RUN_TASK.format(
                command=shlex.join(command),
                signal_task=_SIGNAL_PROCESS if needs.processes == 1 else _SIGNAL_STEPS,
                and_if="",
                requeue_at_limit="true" if settings.requeue_at_limit else "false",
                restarts=run.restarts,
            ),
        )

    def _end(self) -> str:
        run = self.run
        options: dict[str, Any] = {"insecure": run.is_insecure or None}
        if run.uses_tokens:
            options["token_file"] = self._keys / "operator.token"
        if run.tls_ca is not None:
            options["tls_ca"] = run.tls_ca.absolute()
        command = [self.settings.python, "-m", "agn_optax.ops.cli", "drain"]
        drain = shlex.join([*command, f"file:{run.address_file}", *arguments(options)])
        return _joined(
            self._header(
                f"Ends the center of {run.name}, job $1, after all workers.",
                "end",
                Resources(),
            ),
            "center=$1",
            # If setup fails, this job cannot run `drain`, but SIGTERM also drains.
            self._setup('scancel --full --signal=TERM "$center"'),
            _DRAIN_CENTER.format(drain=drain),
            self._outcome(),
        )

    def _outcome(self) -> str:
        """Return the lines that name failed tasks and set the exit code."""
        return _OUTCOME.format(states=_quoted(str(self._folder / "states")))

    def _begin(self, job: str, name: str) -> str:
        """Return the lines that name the task, and end it if it is done."""
        storage, name = _quoted(str(self._folder)), _quoted(name, _INDEX)
        return _BEGIN.format(job=job, storage=storage, name=name)

    def _setup(self, on_failure: str = 'became "$1" "$reason"') -> str:
        """Return the lines of setup; if one of them fails, ``on_failure`` runs."""
        setup = "\n".join(self.settings.setup)
        return _SETUP.format(setup=setup, on_failure=on_failure) if setup else ""

    def _header(self, summary: str, job: str, needs: Resources) -> str:
        """Return the head of a script: options of sbatch, where later options win."""
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
            "qos": settings.qos,
            "constraint": settings.constraint,
            "nodes": needs.processes,
            "ntasks_per_node": 1,
            "cpus_per_task": needs.cpus,
            "mem": None if needs.memory is None else f"{-(-needs.memory >> 20)}M",
            "gpus_per_node": needs.gpus,
            "time": None if needs.seconds is None else _minutes(needs.seconds),
        }
        job_options = settings.worker_options if is_array else settings.center_options
        options = [*map(_quoted, arguments(requested)), *settings.options, *job_options]
        lines = ["#!/bin/bash", f"# {summary}"]
        return "\n".join([*lines, *(f"#SBATCH {option}" for option in options)])


def _queued() -> set[str]:
    """Return the ids of this user's jobs in the queue; an array has one id."""
    return set(_output_of("squeue --noheader --me --format=%F").split())


def _output_of(
    line: str,
    folder: pathlib.Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the output of a command of SLURM, or of a script.

    Args:
      line: the command as a line of a shell.
      folder: the folder to run it in.
      variables: variables that the shell expands in the line. It does not export
        them, because sbatch passes its environment on to the jobs.

    Raises:
      InvalidArgumentError: the command fails.
    """
    inherited = {
        name: v for name, v in os.environ.items() if not _NOT_INHERITED.match(name)
    }
    assigned = [f"{name}={shlex.quote(v)}" for name, v in (variables or {}).items()]
    result = subprocess.run(  # noqa: S603 the commands of --dry-run
        ["/bin/bash", "-c", "; ".join([*assigned, line])],
        cwd=folder,
        env=inherited,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise errors.InvalidArgumentError(f"{line} failed: {result.stderr.strip()}")
    return result.stdout.strip()


def _joined(*blocks: str) -> str:
    """Return a script of the blocks that are not empty, with blank lines between."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def _quoted(text: str, *variables: str) -> str:
    """Quote a text for a shell, which then expands the given variables only."""
    if not variables:
        return shlex.quote(text)
    parts = re.split("(" + "|".join(map(re.escape, variables)) + ")", text)
    # Parts with an odd index are variables.
    quoted = [f'"{p}"' if i % 2 else p and shlex.quote(p) for i, p in enumerate(parts)]
    return "".join(quoted) or "''"


def _minutes(seconds: float) -> str:
    """Return a time limit for SLURM, rounded up because SLURM counts whole minutes."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"
