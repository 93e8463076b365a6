"""The engine of this machine, whose tasks are processes that end together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.ops import launch
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Ended, Program
from agn_optax.service import tokens

CENTER = "center"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 nothing is bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Settings of the engine of this machine.

    Attributes:
      restart_delay: seconds before a failed process is started again.
      on_failure: whether to ``"stop"`` the other workers when one has failed after its
        last restart, or to let them ``"go on"``.

    Raises:
      InvalidArgumentError: a value is out of range.
    """

    restart_delay: float = 1.0
    on_failure: str = "stop"

    def __post_init__(self) -> None:
        check.seconds(self.restart_delay, "restart_delay")


class Local(Engine):
    """Processes of this machine.

    Workers start once the center serves, and get its address. Each worker has a token
    of its own, by which the center knows its name. Another token is left for this
    user's programs that observe the center. No token is on a command line.
    """

    name = "local"
    Settings = LocalSettings

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.worker_resources.processes > 1:
            raise errors.InvalidArgumentError(
                "a worker is one process on this machine, got processes = "
                f"{run.worker_resources.processes}"
            )
        if run.center_restarts and run.storage is None:
            raise errors.InvalidArgumentError(
                f"a center that is started again (center-restarts = "
                f"{run.center_restarts}) needs storage, from which it continues"
            )
        # A token for each worker, one for this user's other programs, and one to paste
        # into a browser, which allows no more than to observe.
        names = run.worker_names if run.is_closed else []
        self._tokens = {name: tokens.generate() for name in names}
        self._operator_token = tokens.generate()
        has_page = run.serve.get("page") or run.serve.get("page_address") is not None
        self.page_token = tokens.generate() if run.is_closed and has_page else ""

    def commands(self) -> list[str]:
        """Return the commands of all processes with their environment, center first."""
        run = self.run
        center = {} if run.center is not None else {"AGN_OPTAX_CENTER": "ADDRESS"}
        workers = [
            run.worker_line(rank, sys.executable, **center)
            for rank in range(run.workers)
        ]
        return (
            [shlex.join(run.center_command(sys.executable)), *workers]
            if run.has_center
            else workers
        )

    def launch(self, output: Output) -> dict[str, Any]:
        """Start all processes, and wait until they have ended."""
        run = self.run
        begin = time.monotonic()
        with contextlib.ExitStack() as left:

            def show(name: str, line: str) -> None:
                if run.is_closed and name == CENTER and (event := serving(line)):
                    # A restarted center may listen at another port.
                    left.close()
                    with contextlib.suppress(OSError):  # then no program has a token
                        address = reached_at(event)
                        token = tokens.token_file(address, self._operator_token)
                        left.enter_context(token)
                output(name, line)

            ended = launch.run(
                [self._center()] if run.has_center else self._workers(),
                output=show,
                grace=run.stop_grace,
                restart_delay=self.settings.restart_delay,
                on_failure=cast(Any, self.settings.on_failure),  # `run` checks it
            )
        code = exit_code(ended, run)
        if run.has_center and (problem := _problem(*ended)):
            code = code or 1
            output(CENTER, f"agn-optax: {problem}")
        return {
            "returncode": code,
            "seconds": time.monotonic() - begin,
            "programs": [vars(program) for program in ended],
        }

    def _center(self) -> Program:
        """Return the center's program, which the workers follow once it serves."""
        run = self.run
        if run.storage is not None:
            _make(run.storage)

        def workers(line: str) -> Sequence[Program]:
            event = serving(line)
            if not event:
                return ()
            is_moving = run.storage is not None
            address = f"file:{run.address_file}" if is_moving else reached_at(event)
            return self._workers(AGN_OPTAX_CENTER=address)

        return Program(
            CENTER,
            run.center_command(sys.executable),
            {tokens.TOKENS: self._callers()} if run.is_closed else {},
            restarts=run.center_restarts,
            waited_for=False,
            followers=workers,
        )

    def _workers(self, **variables: str) -> list[Program]:
        run = self.run
        made = []
        for rank, name in enumerate(run.worker_names):
            if run.is_closed:
                variables[tokens.TOKEN] = self._tokens[name]
            made.append(
                Program(
                    name,
                    run.worker_command(sys.executable),
                    run.worker_environment(rank, **variables),
                    restarts=run.restarts,
                )
            )
        return made

    def _callers(self) -> str:
        """Return the callers' lines: each worker, this user's programs, a browser."""
        lines = self.run.callers(self._tokens, self._operator_token)
        return lines + (f"\nobserver * {self.page_token}" if self.page_token else "")


def _make(storage: pathlib.Path) -> None:
    """Make the storage's folder if it does not exist.

    Raises:
      InvalidArgumentError: the folder cannot be made.
    """
    try:
        storage.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"storage must be a folder, or one that can be made, got {str(storage)!r} "
            f"({error.strerror})"
        ) from None


def _problem(center: Ended, *workers: Ended) -> str:
    """Return what was wrong with the end of a center; "" if nothing was."""
    if not workers:
        return "the center ended before it served"
    cut_off = [worker.name for worker in workers if worker.stopped]
    if center.stopped or center.returncode or not cut_off:
        return ""
    return (
        f"failed: the center ended like a drained one, while {', '.join(cut_off)} "
        "still worked with it"
    )


def serving(line: str) -> dict[str, Any]:
    """Return the event that ``serve --json`` prints once it serves, if a line is it."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    is_serving = isinstance(event, dict) and event.get("event") == "serving"
    return event if is_serving else {}


def reached_at(event: Mapping[str, Any]) -> str:
    """Return the address for this machine's workers, from the event of `serving`."""
    # If the center listens at every address, loopback allows plain text.
    host, _, port = str(event["address"]).rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def exit_code(ended: Sequence[Ended], run: Run) -> int:
    """Return the exit code of the first program at fault, as a shell does; 0 if none.

    A center that was stopped is at fault, after all others, if it did not end as a
    drained center does: it failed in its last work, such as to save.
    """
    at_fault = [program for program in ended if not program.stopped]
    at_fault += [
        program
        for program in ended
        if program.stopped and program.name == CENTER and not is_drained(program, run)
    ]
    codes = (program.returncode for program in at_fault if program.returncode)
    code = next(codes, 0)
    return code if code >= 0 else 128 - code


def is_drained(center: Ended, run: Run) -> bool:
    """Return whether SIGTERM drained a center, or ended it before it could drain."""
    codes = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    return center.returncode in (*codes, run.serve.get("signal_exit_code"))
