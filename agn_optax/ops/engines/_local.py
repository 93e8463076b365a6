"""The engine of this machine, whose tasks are processes that end together."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import combinations
from agn_optax.ops import launch
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Outcome, Program
from agn_optax.service import tokens

CENTER = "center"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 nothing is bound


class Local(Engine):
    """Processes of this machine.

    Workers start once the center serves, and get its address. Each worker has its own
    token, by which the center knows the worker's name. No token is on a command line.
    """

    name = "local"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if (processes := run.worker_resources.processes) > 1:
            combinations.reject(
                "a worker of several processes",
                "an engine other than SLURM",
                f"processes = {processes} on this machine",
            )
        if run.center_restarts and run.storage is None:
            raise errors.InvalidArgumentError(
                f"a center that is started again (center-restarts = "
                f"{run.center_restarts}) needs storage, from which it continues"
            )
        names = run.worker_names if run.uses_tokens else []
        self._tokens = {name: tokens.generate() for name in names}

    def commands(self) -> list[str]:
        """Return the commands of all processes with their environment, center first."""
        run = self.run
        lines = [shlex.join(self._center_command())]
        for rank in range(run.workers):
            environment = run.worker_environment(
                rank, AGN_OPTAX_CENTER="ADDRESS"
            ).items()
            words = [f"{name}={shlex.quote(text)}" for name, text in environment]
            lines.append(
                " ".join([*words, shlex.join(run.worker_command(sys.executable))])
            )
        return lines

    def launch(self, output: Output) -> dict[str, Any]:
        """Start all processes, and wait until they have ended."""
        run = self.run
        begin = time.monotonic()
        outcomes = launch.run([self._center()], output=output, grace=run.stop_grace)
        code = _exit_code(outcomes)
        if problem := _problem(*outcomes):
            code = code or 1
            output(CENTER, f"agn-optax: {problem}")
        return {
            "returncode": code,
            "seconds": time.monotonic() - begin,
            "programs": [vars(outcome) for outcome in outcomes],
        }

    def _center_command(self) -> list[str]:
        return self.run.serve_command(sys.executable, json=True)

    def _center(self) -> Program:
        """Return the center's program, which the workers follow once it serves."""
        run = self.run
        if run.storage is not None:
            try:
                run.storage.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise errors.InvalidArgumentError(
                    f"storage must be a folder, or one that can be made: {error}"
                ) from None

        def start_workers(line: str) -> Sequence[Program]:
            event = serving_event(line)
            if not event:
                return ()
            # A restarted center may have another address, which is then in the file.
            has_file = run.storage is not None
            address = f"file:{run.address_file}" if has_file else local_address(event)
            return self._workers(AGN_OPTAX_CENTER=address)

        return Program(
            CENTER,
            self._center_command(),
            {tokens.TOKENS: run.callers(self._tokens)} if run.uses_tokens else {},
            restarts=run.center_restarts,
            waited_for=False,
            followers=start_workers,
        )

    def _workers(self, **variables: str) -> list[Program]:
        run, command = self.run, self.run.worker_command(sys.executable)
        programs = []
        for rank, name in enumerate(run.worker_names):
            if run.uses_tokens:
                variables[tokens.TOKEN] = self._tokens[name]
            environment = run.worker_environment(rank, **variables)
            programs.append(Program(name, command, environment, run.restarts))
        return programs


def _problem(center: Outcome, *workers: Outcome) -> str:
    """Describe how a center ended too early; return "" if it did not."""
    if not workers:
        return "the center ended before it served"
    interrupted = [worker.name for worker in workers if worker.stopped]
    if center.stopped or center.returncode or not interrupted:
        return ""
    return (
        f"failed: the center was drained while {', '.join(interrupted)} still worked "
        "with it"
    )


def serving_event(line: str) -> dict[str, Any]:
    """Return the event that ``serve --json`` prints first; {} for another line."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    is_serving = isinstance(event, dict) and event.get("event") == "serving"
    return event if is_serving else {}


def local_address(event: Mapping[str, Any]) -> str:
    """Return the center's address for this machine, from the event of `serve`."""
    # Loopback reaches a center that listens at every address, and allows plain text.
    host, _, port = str(event["address"]).rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return a shell's exit code for the first program at fault; 0 if there is none.

    A stopped center comes last, and is at fault if SIGTERM neither drained it nor ended
    it before it could drain: its last work failed, such as saving.
    """
    drained = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    codes = [outcome.returncode for outcome in outcomes if not outcome.stopped]
    codes += [
        outcome.returncode
        for outcome in outcomes
        if outcome.stopped and outcome.name == CENTER
        if outcome.returncode not in drained
    ]
    code = next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code
