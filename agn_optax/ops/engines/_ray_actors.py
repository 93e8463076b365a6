"""The actors of a run on Ray, each with one program in a process of its own.

The separate process keeps JAX and signal handlers of the program apart from Ray. The
program ends with its actor, however the actor ends. When Ray restarts an actor, here or
on another node, the driver starts its program again.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import hmac
import itertools
import os
import sys
import threading
from typing import NamedTuple

from agn_optax import errors
from agn_optax._internal import in_background, write_whole
from agn_optax.ops import launch
from agn_optax.ops.engines._local import CENTER
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Outcome, Program
from agn_optax.service import tokens

_MAX_LINES = 10_000  # lines of output that are kept for the driver


class ActorLocation(NamedTuple):
    """The node and the process of an actor."""

    node: str  # Ray's id of the node
    host: str
    pid: int


class NewOutput(NamedTuple):
    """The output of a program since the last call of `new_output`.

    Attributes:
      session: id of the program's session, new at each start; "" before any start.
      lines: the new lines.
      outcome: the program's outcome; None while it runs.
    """

    session: str
    lines: list[str]
    outcome: Outcome | None


class ProgramActor:
    """An actor that runs one program at a time, and keeps its latest output."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._session = ""
        self._outcome: Outcome | None = None
        self._stopping = threading.Event()

    def location(self) -> ActorLocation:
        """Return the node and the process of this actor."""
        import ray  # noqa: PLC0415 only inside an actor

        context = ray.get_runtime_context()
        return ActorLocation(
            context.get_node_id(), ray.util.get_node_ip_address(), os.getpid()
        )

    def new_output(self, seconds: float) -> NewOutput:
        """Wait for a line of output or the program's end; return the new output.

        Args:
          seconds: maximum time to wait.
        """
        with self._news:
            self._news.wait_for(lambda: self._lines or not self._is_running, seconds)
            lines = list(self._lines)
            self._lines.clear()
            return NewOutput(self._session, lines, self._outcome)

    def stop(self) -> None:
        """End the program by SIGTERM, and by SIGKILL after its grace; do not wait."""
        self._stopping.set()

    @property
    def _is_running(self) -> bool:
        return bool(self._session) and self._outcome is None

    def _begin(self, program: Program, grace: float) -> str:
        """Stop the current program, start a new one, and return its session id."""
        with self._news:
            self._stopping.set()
            self._news.wait_for(lambda: not self._is_running)
            self._stopping = stopping = threading.Event()
            self._session, self._outcome = os.urandom(8).hex(), None
        run = functools.partial(self._run_program, program, grace, stopping)
        in_background(run, program.name, lasting=True)
        return self._session

    def _run_program(
        self, program: Program, grace: float, stopping: threading.Event
    ) -> None:
        try:
            (outcome,) = launch.run(
                [program], output=self._emit, grace=grace, until=stopping
            )
        except errors.InvalidArgumentError as error:  # the program cannot be started
            self._emit(program.name, f"agn-optax: {error}")
            outcome = Outcome(program.name, 127, 0, 0.0, stopped=False)
        with self._news:
            self._outcome = outcome
            self._news.notify_all()

    def _emit(self, name: str, line: str) -> None:
        with self._news:
            self._lines.append(line)
            self._news.notify_all()


class CenterActor(ProgramActor):
    """The actor that serves a run's center from its storage.

    Args:
      run: the run that the center belongs to.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def start(self, restarts: int) -> str:
        """Start the center's program, and return its session id.

        Args:
          restarts: number of earlier starts.
        """
        run = self._run
        run.address_file.parent.mkdir(parents=True, exist_ok=True)
        if restarts:
            self._set_aside()
        command = run.center_command(sys.executable, f"{self.location().host}:0")
        environment = {}
        if run.uses_tokens:
            workers = {name: _token(run, name) for name in run.worker_names}
            environment[tokens.TOKENS] = run.callers(workers, _operator_token(run))
        return self._begin(Program(CENTER, command, environment), run.stop_grace)

    def _set_aside(self) -> None:
        """Rename the checkpoint that a drain has saved during the run, if there is one.

        A node that is taken away drains its center, and a drained center saves to the
        path that the end of the run needs. Nothing else can have saved there, because
        `agn-optax launch` rejects a path that exists.
        """
        save = self._run.serve.get("save")
        if save is None or not save.exists():
            return
        names = (save.with_name(f"{save.name}-{n}") for n in itertools.count(1))
        kept = next(path for path in names if not path.exists())
        save.rename(kept)
        self._emit(CENTER, f"agn-optax: the drained center's checkpoint is in {kept}")


class WorkerActor(ProgramActor):
    """The actor of a worker.

    Args:
      run: the run that the worker belongs to.
      rank: rank of the worker.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self._run, self._rank = run, rank

    def start(self, restarts: int) -> str:
        """Start the worker's program, and return its session id.

        Args:
          restarts: number of earlier starts.
        """
        run, name = self._run, self._run.worker_name(self._rank)
        variables = {"AGN_OPTAX_RESTARTS": str(restarts)}
        if run.has_center:
            variables["AGN_OPTAX_CENTER"] = f"file:{run.address_file}"
        if run.uses_tokens:
            variables[tokens.TOKEN] = _token(run, name)
        environment = run.worker_environment(self._rank, **variables)
        program = Program(name, run.worker_command(sys.executable), environment)
        return self._begin(program, run.stop_grace)


def _operator_token(run: Run) -> str:
    """Return the operator's token, kept on disk, from which workers' tokens derive."""
    path = run.address_file.with_name("keys") / "operator.token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        write_whole(path, tokens.generate() + "\n")
    return path.read_text().strip()


def _token(run: Run, name: str) -> str:
    """Return the token of a worker."""
    return hmac.new(
        _operator_token(run).encode(), name.encode(), hashlib.sha256
    ).hexdigest()
