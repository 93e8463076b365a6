"""One description of a run, which every engine carries out."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.service import INSECURE, RULE, TLS_CA, Limits, check_reachable, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a task needs; None leaves it to the engine.

    Attributes:
      cpus: cores of each process.
      memory: bytes of each process.
      gpus: of each process.
      processes: of a worker, on as many hosts; they join each other by
        ``initialize_distributed(**environment().distributed)``.
      seconds: after which the engine may end it.
    """

    cpus: int | None = None
    memory: int | None = None
    gpus: int | None = None
    processes: int = 1
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A center and its workers.

    Attributes:
      name: of the run, for engines and people: letters, digits and dashes.
      program: what each worker runs, as after ``python``.
      workers: number of workers to start.
      rule: its settings, as ``serve`` takes them.
      serve: options of ``agn-optax serve`` beside the rule's, as ``{"barrier": 2}``.
      center: the address of a center that is there; None for one of the run's own.
      token_file: file with the workers' token, for a center that is there.
      tls_ca: certificate authorities that workers check the center's certificate
        against, a PEM file; None for those of the operating system.
      storage: directory that all tasks reach and that outlives them, for the center's
        journal; None for a center in memory.
      transports: how exchanges may travel, as of `connect`; None for any way.
      restarts: how often a worker that failed is started again.
      center_restarts: how often a center of the run's own that failed is started again,
        which needs ``storage``.
      stop_grace: seconds that workers have to end when told to, and the center after
        them.
      environment: variables for every worker.
      worker_resources, center_resources: what one of them needs.
      settings: of the engine, from its own table.

    Raises:
      InvalidArgumentError: a value is out of range, or some do not go together.

    Example:
      >>> from agn_optax.ops.engines import Run
      >>> run = Run(
      ...     name="digits",
      ...     program=["train.py"],
      ...     workers=2,
      ...     rule={"rule": "downpour"},
      ...     serve={"barrier": 2},
      ... )
      >>> " ".join(run.serve_command())
      'python -m agn_optax.ops.cli serve --rule=downpour --barrier=2'
      >>> run.worker_environment(1)["AGN_OPTAX_WORKER"]
      'worker-1'
    """

    name: str
    program: Sequence[str]
    workers: int
    rule: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    serve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    center: str | None = None
    token_file: pathlib.Path | None = None
    tls_ca: pathlib.Path | None = None
    storage: pathlib.Path | None = None
    transports: Sequence[str] | None = None
    restarts: int = 0
    center_restarts: int = 0
    stop_grace: float = 10.0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    worker_resources: Resources = dataclasses.field(default_factory=Resources)
    center_resources: Resources = dataclasses.field(default_factory=Resources)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise errors.InvalidArgumentError(
                "the name of a run must be at most 40 small letters, digits and "
                f"dashes, got {self.name!r}"
            )
        if not self.program:
            raise errors.InvalidArgumentError(
                "nothing to run: give a program, or a module"
            )
        if self.workers < 1:
            raise errors.InvalidArgumentError(
                f"workers must be positive, got {self.workers}"
            )
        check.whole_number(self.restarts, "restarts", least=0, optional=False)
        check.whole_number(
            self.center_restarts, "center_restarts", least=0, optional=False
        )
        check.seconds(self.stop_grace, "stop_grace")
        room = self.serve.get("max_workers")
        if room is not None and room < self.workers:
            raise errors.InvalidArgumentError(
                f"max-workers of the center is {room}, and there are {self.workers} "
                "workers"
            )
        if self.center is not None:
            for each in self.center.split(","):
                check_reachable(each.strip())
        elif not self.rule:
            raise errors.InvalidArgumentError("the run's own center needs a rule")

    @property
    def has_center(self) -> bool:
        """Whether it has a center of its own, which is a task of it."""
        return self.center is None

    @property
    def is_insecure(self) -> bool:
        """Whether its own center speaks plain text beyond a machine."""
        return bool(self.serve.get("insecure"))

    def connection_environment(self) -> dict[str, str]:
        """What whoever calls the center is told of how that is done."""
        told = {} if self.tls_ca is None else {TLS_CA: str(self.tls_ca)}
        return told | ({INSECURE: "1"} if self.is_insecure else {})

    @property
    def worker_names(self) -> list[str]:
        """In the order of their ranks."""
        return [self.worker_name(rank) for rank in range(self.workers)]

    def worker_name(self, rank: int | str) -> str:
        """Of the worker of a rank, or of the engine's word for it."""
        return f"worker-{rank}"

    def serve_command(self, python: str = "python", **options: Any) -> list[str]:
        """The command that serves the center.

        Args:
          python: the interpreter where it runs.
          **options: of ``serve``, which the engine says; they win.
        """
        given = {**self.rule, **self.serve, **options}
        if self.workers > (Limits().max_workers or self.workers):
            given.setdefault("max_workers", self.workers)
        return [python, "-m", "agn_optax.ops.cli", "serve", *arguments(given)]

    def durable(self) -> dict[str, Any]:
        """Options of ``serve`` by which the center outlives its process."""
        if self.storage is None or {"journal", "snapshots"} & set(self.serve):
            return {}
        return {"journal": self.storage.absolute() / "journal"}

    def worker_command(self, python: str = "python") -> list[str]:
        """The command of every worker."""
        return [python, *self.program]

    def worker_environment(self, rank: int | str, **more: str) -> dict[str, str]:
        """What a worker is told, but for where its own center is.

        Args:
          rank: of it, or the engine's word for it, such as ``$SLURM_ARRAY_TASK_ID``.
          **more: what only the engine knows.
        """
        told = {
            **self.environment,
            "AGN_OPTAX_RANK": str(rank),
            "AGN_OPTAX_WORKERS": str(self.workers),
            "AGN_OPTAX_WORKER": self.worker_name(rank),
            "AGN_OPTAX_PROCESSES": str(self.worker_resources.processes),
            **self.connection_environment(),
        }
        if self.center is not None:
            told["AGN_OPTAX_CENTER"] = self.center
        if self.token_file is not None:
            told[tokens.TOKEN_FILE] = str(self.token_file)
        if self.rule:
            told[RULE] = json.dumps(dict(self.rule))
        if self.transports is not None:
            told["AGN_OPTAX_TRANSPORTS"] = ",".join(self.transports)
        return {**told, **more}


def arguments(options: Mapping[str, Any]) -> list[str]:
    """A command line of options by their names; of None it says nothing."""
    made = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            made.append(option)
        elif value is False:
            made.append(option.replace("--", "--no-", 1))
        elif value is not None:
            made.append(f"{option}={value}")
    return made
