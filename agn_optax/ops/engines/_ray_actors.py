"""The actors of a run on Ray, each with one program in a process of its own.

The separate process keeps JAX and signal handlers of the program apart from Ray. The
program ends with its actor, however the actor ends. When Ray restarts an actor, here or
on another node, the actor starts its program again.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import itertools
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax._internal import in_background, write_whole
from agn_optax.ops import launch
from agn_optax.ops.engines._local import CENTER, is_drained, serving
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Ended, Program
from agn_optax.service import tokens

_LINES = 10_000  # lines of output that are kept for the driver
_PAUSE = 1.0  # seconds before a program that failed is started again
# Seconds within which a center that was lost with its node releases the journal.
_HANDOVER = 120.0


class ActorPlace(NamedTuple):
    """The node and the process of an actor."""

    node: str  # Ray's id of the node
    host: str
    pid: int


class Said(NamedTuple):
    """The output of a program since the last look.

    Attributes:
      life: session id of the program, new at each start; "" before the first one.
      lines: the new lines.
      seen: number of lines in this session so far, for the next look.
      missed: number of new lines that were discarded.
      ended: how the program ended; None while it runs.
    """

    life: str
    lines: list[str]
    seen: int
    missed: int
    ended: Ended | None


class Supervisor:
    """An actor that runs one program at a time, and keeps its latest output."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._said = self._shown = 0  # numbers of lines
        self._life = ""
        self._ended: Ended | None = None
        self._stopping = threading.Event()

    def where(self) -> ActorPlace:
        """Return the node and the process of this actor."""
        import ray  # noqa: PLC0415 only inside an actor

        context = ray.get_runtime_context()
        return ActorPlace(
            context.get_node_id(), ray.util.get_node_ip_address(), os.getpid()
        )

    def look(self, life: str, seen: int, seconds: float) -> Said:
        """Return the new output; wait for it, or for the program's end.

        Args:
          life: session id of the last look.
          seen: number of lines that the last look returned.
          seconds: maximum time to wait.
        """

        def is_new() -> bool:
            return self._life != life or self._said > seen or self._ended is not None

        with self._news:
            if self._life == life:
                self._shown = max(self._shown, seen)
            self._news.wait_for(is_new, seconds)
            seen = seen if self._life == life else 0
            first = self._said - len(self._lines)
            new = list(self._lines)[max(0, seen - first) :]
            missed = max(0, first - seen)
            return Said(self._life, new, self._said, missed, self._ended)

    def shown(self) -> tuple[str, int]:
        """Return the session id, and the number of its lines that a driver has shown.

        A driver that replaces one that was killed continues from there.
        """
        with self._news:
            return self._life, self._shown

    def stop(self) -> None:
        """Have the program end, as SIGTERM does."""
        self._stopping.set()

    @property
    def _is_running(self) -> bool:
        return bool(self._life) and self._ended is None

    def _begin(self, program: Program, grace: float) -> str:
        """Start a program once the last one has ended, and return its session id."""
        with self._news:
            self._stopping.set()
            self._news.wait_for(lambda: not self._is_running)
            self._stopping = stopping = threading.Event()
            if self._life:  # lines from before the first start are kept
                self._lines.clear()
                self._said = self._shown = 0
            self._life, self._ended = os.urandom(8).hex(), None
        in_background(
            lambda: self._run(program, grace, stopping), program.name, lasting=True
        )
        return self._life

    def _run(self, program: Program, grace: float, stopping: threading.Event) -> None:
        try:
            while True:
                (ended,) = launch.run(
                    [program],
                    output=self._hear,
                    grace=grace,
                    restart_delay=_PAUSE,
                    until=stopping,
                )
                if not self._goes_on(ended) or stopping.wait(_PAUSE):
                    break
        except errors.InvalidArgumentError as error:  # the program cannot be started
            self._hear(program.name, f"agn-optax: {error}")
            ended = Ended(program.name, 127, 0, 0.0, stopped=False)
        with self._news:
            self._ended = ended
            self._news.notify_all()

    def _goes_on(self, ended: Ended) -> bool:
        """Return whether to start a program again, not counted as a restart."""
        return False

    def _hear(self, name: str, line: str) -> None:
        with self._news:
            self._lines.append(line)
            self._said += 1
            self._news.notify_all()


class CenterActor(Supervisor):
    """The actor that serves a run's center from its storage, also when made again.

    Args:
      run: the run that the center belongs to.
    """

    def __init__(self, run: Run) -> None:
        import ray  # noqa: PLC0415 only inside an actor

        super().__init__()
        assert run.storage is not None
        self._run_of = run
        run.storage.mkdir(parents=True, exist_ok=True)
        self._key = _key(run.storage) if is_closed(run) else ""
        self._serving: dict[str, Any] = {}
        is_back = ray.get_runtime_context().was_current_actor_reconstructed
        self._insists_until = time.monotonic() + (_HANDOVER if is_back else 0.0)
        if is_back:
            self._set_aside()
        self._serve()

    def command(self) -> list[str]:
        """Return the command of the center without addresses, to compare two runs."""
        return self._run_of.serve_command(**self._run_of.durable())

    def serve(self, seconds: float) -> bool:
        """Return whether the center serves; wait for it, and restart it if stopped."""
        if self._ended is not None and self._ended.stopped:
            self._serve()
        with self._news:
            self._news.wait_for(
                lambda: self._serving or self._ended is not None, seconds
            )
            return bool(self._serving) and self._ended is None

    def token(self, name: str) -> str:
        """Return the token of a worker; "" if none is needed."""
        return _derived(self._key, name) if self._key else ""

    def _serve(self) -> None:
        import ray  # noqa: PLC0415 only inside an actor

        run = self._run_of
        self._serving = {}
        address = run.serve.get("address", f"{ray.util.get_node_ip_address()}:0")
        command = run.serve_command(
            sys.executable,
            json=True,
            address=address,
            address_file=address_file(run),
            **run.durable(),
        )
        lines = {tokens.TOKENS: self._access()} if self._key else {}
        program = Program(CENTER, command, lines, restarts=run.center_restarts)
        self._begin(program, run.stop_grace)

    def _access(self) -> str:
        """Return the callers' lines: each worker by name, and the owner of the key."""
        lines = [f"chief,operator * {self._key}"]
        for rank, name in enumerate(self._run_of.worker_names):
            lines.append(f"{'worker' if rank else 'chief'} {name} {self.token(name)}")
        return "\n".join(lines)

    def _set_aside(self) -> None:
        """Rename the checkpoint of a center that was drained, if its run continues.

        The checkpoint at the end of the run needs the path. A node that is taken away
        drains its center, and a drained center saves. Nothing else can have saved there
        since the run began.
        """
        save = self._run_of.serve.get("save")
        if save is None or not (path := pathlib.Path(save)).exists():
            return
        numbers = itertools.count(1)
        kept = next(p for n in numbers if not (p := _numbered(path, n)).exists())
        path.rename(kept)
        self._hear(CENTER, f"agn-optax: the checkpoint of its drain is in {kept}")

    def _hear(self, name: str, line: str) -> None:
        if said := serving(line):
            self._serving = said
        super()._hear(name, line)

    def _goes_on(self, ended: Ended) -> bool:
        if ended.stopped:
            return False
        if is_drained(ended, self._run_of):
            # The driver did not drain it, and the workers have no other center.
            self._serving = {}
            self._hear(
                CENTER, "agn-optax: drained before the run's end; it serves again"
            )
            self._set_aside()
            return True
        # The previous center, on a node that is being lost, may still hold the journal.
        return not self._serving and time.monotonic() < self._insists_until


class Claim:
    """An actor that holds the name of a run for as long as its driver lives.

    Ray ends this actor with the driver that owns it. The center cannot show whether a
    driver lives, because the center outlives drivers.
    """


class WorkerActor(Supervisor):
    """The actor of one process of a worker.

    Args:
      run: the run that the worker belongs to.
      rank: rank of the worker.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self._run_of, self._rank = run, rank
        self._reserved: socket.socket | None = None

    def meeting(self) -> str:
        """Return a free address here, at which the processes of a worker can meet.

        The port stays reserved for this user until the next call.
        """
        host = self.where().host
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = reserved(host)
        return f"{host}:{self._reserved.getsockname()[1]}"

    def start(self, **told: str) -> str:
        """Start the worker's program, and return its session id.

        Args:
          **told: environment variables beside those of `Run.worker_environment`.
        """
        run = self._run_of
        program = Program(
            run.worker_name(self._rank),
            run.worker_command(sys.executable),
            run.worker_environment(self._rank, **told),
        )
        return self._begin(program, run.stop_grace)


def reserved(host: str) -> socket.socket:
    """Bind a socket to a free port that only JAX's coordinator can share.

    The system gives the port to no other socket, neither for port 0 nor for a
    connection. JAX's coordinator listens by gRPC, which sets SO_REUSEPORT as this
    socket does, and so it can bind the port too. This socket does not listen, so it
    takes none of the coordinator's connections.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, 0))
    return made


def is_closed(run: Run) -> bool:
    """Return whether the run's own center requires tokens."""
    return run.has_center and not run.serve.get("open")


def address_file(run: Run) -> pathlib.Path:
    """Return the file to which the center writes its address."""
    assert run.storage is not None
    return run.storage / CENTER


def key_file(run: Run) -> pathlib.Path:
    """Return the file with the operator's token."""
    assert run.storage is not None
    return run.storage / "keys" / "operator.token"


def _key(storage: pathlib.Path) -> str:
    """Return the operator's token, kept on disk, from which workers' tokens derive."""
    folder = storage / "keys"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "operator.token"
    if not path.exists():
        write_whole(path, tokens.generated() + "\n")
    return path.read_text().strip()


def _numbered(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_name(f"{path.name}-{number}")


def _derived(key: str, name: str) -> str:
    return hmac.new(key.encode(), name.encode(), hashlib.sha256).hexdigest()
