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
        self._tokens = {name: tokens.generated() for name in names}
        self._operator_token = tokens.generated()
        has_page = run.serve.get("page") or run.serve.get("page_address") is not None
        self.page_token = tokens.generated() if run.is_closed and has_page else ""

    def files(self) -> Mapping[str, str]:
        """Return no files: processes are started directly."""
        return {}

    def commands(self) -> list[str]:
        """Return the commands of all processes with their environment, center first."""
        run = self.run
        where = {} if run.center is not None else {"AGN_OPTAX_CENTER": "ADDRESS"}
        said = [shlex.join(self._serve())] if run.has_center else []
        for rank in range(run.workers):
            told = run.worker_environment(rank, **where)
            variables = [f"{name}={shlex.quote(text)}" for name, text in told.items()]
            command = shlex.join(run.worker_command(sys.executable))
            said.append(" ".join([*variables, command]))
        return said

    def launch(self, output: Output) -> dict[str, Any]:
        """Start all processes, and wait until they have ended."""
        run, settings = self.run, self.settings
        if run.storage is not None:
            _make(run.storage)
        stack = contextlib.ExitStack()
        if run.is_closed:
            output = _Leaves(self._operator_token, output, stack)

        def when_it_serves(line: str) -> Sequence[Program]:
            said = serving(line)
            if not said:
                return ()
            address = reached_at(said)
            where = address if run.storage is None else f"file:{run.address_file}"
            return self._workers(AGN_OPTAX_CENTER=where)

        if run.has_center:
            programs = [
                Program(
                    CENTER,
                    self._serve(),
                    {tokens.TOKENS: self._callers()} if run.is_closed else {},
                    restarts=run.center_restarts,
                    waited_for=False,
                    followers=when_it_serves,
                )
            ]
        else:
            programs = self._workers()
        begin = time.monotonic()
        with stack:
            ended = launch.run(
                programs,
                output=output,
                grace=run.stop_grace,
                restart_delay=settings.restart_delay,
                on_failure=cast(Any, settings.on_failure),  # `run` checks it
            )
            return self._summary(ended, output, time.monotonic() - begin)

    def _summary(
        self, ended: Sequence[Ended], output: Output, seconds: float
    ) -> dict[str, Any]:
        """Return the run's exit code, and the outcome of each program."""
        run, code = self.run, exit_code(ended, self.run)
        if run.has_center and len(ended) == 1:
            code = code or 1
            output(CENTER, "agn-optax: the center ended before it served")
        if cut_off := _cut_off(ended) if run.has_center else []:
            code = code or 1
            output(
                CENTER,
                "agn-optax: failed: the center ended like a drained one, while "
                f"{', '.join(cut_off)} still worked with it",
            )
        return {
            "returncode": code,
            "seconds": seconds,
            "programs": [vars(each) for each in ended],
        }

    def _serve(self) -> list[str]:
        more: dict[str, Any] = {"json": True}
        if self.run.storage is not None:
            more |= {"address_file": self.run.address_file, **self.run.durable()}
        return self.run.serve_command(sys.executable, **more)

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


class _Leaves:
    """An output that also leaves a token for the address at which the center serves.

    A restarted center may listen at another port, for which the token is left again.
    """

    def __init__(self, token: str, output: Output, stack: contextlib.ExitStack) -> None:
        self._token, self._output = token, output
        self._left = stack.enter_context(contextlib.ExitStack())

    def __call__(self, name: str, line: str) -> None:
        if name == CENTER and (said := serving(line)):
            self._left.close()
            with contextlib.suppress(OSError):  # then no other program has a token
                left = tokens.left_here(reached_at(said), self._token)
                self._left.enter_context(left)
        self._output(name, line)


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


def _cut_off(ended: Sequence[Ended]) -> list[str]:
    """Return the workers that were stopped because the center had ended with 0."""
    center, *workers = ended
    if center.stopped or center.returncode:
        return []
    return [each.name for each in workers if each.stopped]


def serving(line: str) -> dict[str, Any]:
    """Return the event that ``serve --json`` prints once it serves, if a line is it."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    is_that = isinstance(said, dict) and said.get("event") == "serving"
    return said if is_that else {}


def reached_at(said: Mapping[str, Any]) -> str:
    """Return the address for this machine's workers, from the event of `serving`."""
    # If the center listens at every address, loopback allows plain text.
    host, _, port = str(said["address"]).rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def exit_code(ended: Sequence[Ended], run: Run) -> int:
    """Return the exit code of the first program at fault, as a shell does; 0 if none.

    A center that was stopped is at fault, after all others, if it did not end as a
    drained center does: it failed in its last work, such as to save.
    """
    at_fault = [each for each in ended if not each.stopped]
    at_fault += [
        each
        for each in ended
        if each.stopped and each.name == CENTER and not is_drained(each, run)
    ]
    codes = (each.returncode for each in at_fault if each.returncode)
    code = next(codes, 0)
    return code if code >= 0 else 128 - code


def is_drained(center: Ended, run: Run) -> bool:
    """Return whether SIGTERM drained a center, or ended it before it could drain."""
    codes = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    return center.returncode in (*codes, run.serve.get("signal_exit_code"))
