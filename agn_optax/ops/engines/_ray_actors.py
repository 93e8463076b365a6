"""What runs in actors of Ray: one program each, a process beside its actor's.

A program has a process of its own, so that JAX and signals are its own business. It
ends with its actor, however that ends, and in the order in which Ray has it: an actor
that Ray restarts, here or on another node, begins its program again.
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

from agn_optax import errors, service
from agn_optax._internal import in_background, write_whole
from agn_optax.ops import launch
from agn_optax.ops.engines._local import CENTER, is_drained, serving
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Ended, Program
from agn_optax.service import tokens

_LINES = 10_000  # that are kept for whoever looks
_PAUSE = 1.0  # seconds before a program that failed is started again
# Seconds in which a center that was lost with its node lets go of the journal.
_HANDOVER = 120.0


class Place(NamedTuple):
    """Where an actor is."""

    node: str  # Ray's id of it
    host: str
    pid: int


class Said(NamedTuple):
    """What a program has said since somebody looked.

    Attributes:
      life: of the program; "" before the first one.
      lines: those that are new.
      seen: to be said at the next look.
      missed: lines that were new and are forgotten.
      ended: how it ended; None while it runs.
    """

    life: str
    lines: list[str]
    seen: int
    missed: int
    ended: Ended | None


class Supervisor:
    """Runs one program at a time, and remembers what it said."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._said = self._shown = 0  # lines
        self._life = ""
        self._ended: Ended | None = None
        self._stopping = threading.Event()

    def where(self) -> Place:
        """Where this is."""
        import ray  # noqa: PLC0415 it is what runs this

        context = ray.get_runtime_context()
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def look(self, life: str, seen: int, seconds: float) -> Said:
        """What is new; waits for that.

        Args:
          life: that the last look was at.
          seen: as it said.
          seconds: to wait.
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
        """Return the life and the number of its lines that a driver has shown.

        A driver that takes over from one that was killed looks on from there.
        """
        with self._news:
            return self._life, self._shown

    def stop(self) -> None:
        """Has the program end, as SIGTERM does."""
        self._stopping.set()

    @property
    def _is_running(self) -> bool:
        return bool(self._life) and self._ended is None

    def _begin(self, program: Program, grace: float) -> str:
        """Starts a program once the last one has ended; returns its life."""
        with self._news:
            self._stopping.set()
            self._news.wait_for(lambda: not self._is_running)
            self._stopping = stopping = threading.Event()
            if self._life:  # else there is what was said on the way to the first one
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
        except errors.InvalidArgumentError as error:  # it cannot be started
            self._hear(program.name, f"agn-optax: {error}")
            ended = Ended(program.name, 127, 0, 0.0, stopped=False)
        with self._news:
            self._ended = ended
            self._news.notify_all()

    def _goes_on(self, ended: Ended) -> bool:
        """Return whether a program that has ended is started again, uncounted."""
        return False

    def _hear(self, name: str, line: str) -> None:
        with self._news:
            self._lines.append(line)
            self._said += 1
            self._news.notify_all()


class Center(Supervisor):
    """Serves the center of a run from its storage; made again, it goes on.

    Args:
      run: whose center it is.
    """

    def __init__(self, run: Run) -> None:
        import ray  # noqa: PLC0415 it is what runs this

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
        """What it serves by, but for where, which tells two of them apart."""
        return self._run_of.serve_command(**self._run_of.durable())

    def serve(self, seconds: float) -> bool:
        """Wait until the center serves, again if it was stopped; return whether."""
        if self._ended is not None and self._ended.stopped:
            self._serve()
        with self._news:
            self._news.wait_for(
                lambda: self._serving or self._ended is not None, seconds
            )
            return bool(self._serving) and self._ended is None

    def token(self, name: str) -> str:
        """That of a worker; "" if none is needed."""
        return _derived(self._key, name) if self._key else ""

    def status(self) -> dict[str, Any] | None:
        """What the center says of its workers; None while it does not answer."""
        told = self._run_of.connection_environment()
        ca = told.get(service.TLS_CA)
        try:
            with service.Observer(
                f"file:{address_file(self._run_of)}",
                tls=None if ca is None else service.Tls(ca),
                insecure=self._run_of.is_insecure,
                token=self._key or None,
            ) as observer:
                return observer.status()
        except errors.AgnOptaxError:
            return None

    def _serve(self) -> None:
        import ray  # noqa: PLC0415 it is what runs this

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
        """Who may call: each worker by its name, and whoever has the key."""
        lines = [f"chief,operator * {self._key}"]
        for rank, name in enumerate(self._run_of.worker_names):
            lines.append(f"{'worker' if rank else 'chief'} {name} {self.token(name)}")
        return "\n".join(lines)

    def _set_aside(self) -> None:
        """Make room for the checkpoint of a run that goes on, but was drained before.

        A node that is taken away drains what runs on it, and a center that is drained
        saves; nothing else can have saved there since the run began.
        """
        save = self._run_of.serve.get("save")
        if save is None or not (path := pathlib.Path(save)).exists():
            return
        numbers = itertools.count(1)
        kept = next(p for n in numbers if not (p := _numbered(path, n)).exists())
        path.rename(kept)
        self._hear(CENTER, f"agn-optax: what it saved when it was drained is in {kept}")

    def _hear(self, name: str, line: str) -> None:
        if said := serving(line):
            self._serving = said
        super()._hear(name, line)

    def _goes_on(self, ended: Ended) -> bool:
        if ended.stopped:
            return False
        if is_drained(ended, self._run_of):
            # Not by the driver: workers have no other center to go on with.
            self._serving = {}
            self._hear(CENTER, "agn-optax: somebody drained it; it serves again")
            self._set_aside()
            return True
        # The one before it, on a node that is being lost, may have the journal yet.
        return not self._serving and time.monotonic() < self._insists_until


class Claim:
    """Has the name of a run taken for as long as its driver lives.

    It is the driver's own, and Ray ends it with the driver. The center, which outlives
    drivers, cannot tell whether there is one.
    """


class Process(Supervisor):
    """One process of a worker.

    Args:
      run: of which it is a worker.
      rank: of the worker.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self._run_of, self._rank = run, rank
        self._reserved: socket.socket | None = None

    def meeting(self) -> str:
        """An address here that is free, for the processes of a worker to meet.

        The port stays reserved for this user until the next one is asked for.
        """
        host = self.where().host
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = reserved(host)
        return f"{host}:{self._reserved.getsockname()[1]}"

    def start(self, **told: str) -> str:
        """Starts the worker's program; returns its life.

        Args:
          **told: variables beside those that any engine tells it.
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

    The system gives the port to nobody else, neither for port 0 nor for a connection.
    gRPC, by which JAX listens, sets SO_REUSEPORT as this does, so that it can bind the
    port too; and this socket, which does not listen, takes none of its connections.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, 0))
    return made


def is_closed(run: Run) -> bool:
    """Whether its center wants tokens."""
    return run.has_center and not run.serve.get("open")


def address_file(run: Run) -> pathlib.Path:
    """Where the center says where it is."""
    assert run.storage is not None
    return run.storage / CENTER


def key_file(run: Run) -> pathlib.Path:
    """With the operator's token."""
    assert run.storage is not None
    return run.storage / "keys" / "operator.token"


def _key(storage: pathlib.Path) -> str:
    """The operator's token, of which those of the workers are made; it stays."""
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
