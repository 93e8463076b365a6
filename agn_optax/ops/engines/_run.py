"""The description of a run, which every engine can carry out."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.ops.launch import GRACE
from agn_optax.service import INSECURE, RULE, TLS_CA, Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a task; None leaves a value to the engine.

    Attributes:
      cpus: number of cores of each process.
      memory: bytes of each process.
      gpus: number of GPUs of each process.
      processes: number of processes of a worker, on as many hosts; they join each other
        by ``jax.distributed.initialize(**environment().distributed)``.
      seconds: time after which the engine may end the task.
    """

    cpus: int | None = None
    memory: int | None = None
    gpus: int | None = None
    processes: int = 1
    seconds: float | None = None


def worker_limit(workers: int) -> dict[str, int]:
    """Return the option of a center that lets in more workers than its default."""
    default = Limits().max_workers or workers
    return {"max_workers": workers} if workers > default else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The description of a run: a center and its workers.

    Attributes:
      name: name of the run, for engines and people: small letters, digits and dashes.
      program: program of each worker with its arguments, as written after ``python``.
      workers: number of workers.
      rule: settings of the rule, by the names of the options of ``agn-optax serve``.
      serve: options of ``agn-optax serve`` beside the rule's, such as
        ``{"barrier": 2}``.
      tls_ca: PEM file with the CA certificates to verify the center with; None without
        TLS.
      storage: folder that all tasks reach and that outlives them, for the center's
        journal; None for no folder.
      restarts: maximum restarts of a worker that fails.
      center_restarts: maximum restarts of the center, which needs ``storage``.
      stop_grace: seconds for the workers to end after SIGTERM, and then for the
        center.
      environment: environment variables of every worker.
      worker_resources, center_resources: resources of each worker, and of the center.
      settings: settings of the engine, from its own table of the run's file.

    Raises:
      InvalidArgumentError: a value is out of range, or values exclude each other.

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
    rule: Mapping[str, Any]
    serve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tls_ca: pathlib.Path | None = None
    storage: pathlib.Path | None = None
    restarts: int = 0
    center_restarts: int = 0
    stop_grace: float = GRACE
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    worker_resources: Resources = dataclasses.field(default_factory=Resources)
    center_resources: Resources = dataclasses.field(default_factory=Resources)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise errors.InvalidArgumentError(
                "the name of a run must be at most 40 small letters, digits and "
                f"inner dashes, got {self.name!r}"
            )
        if not self.program:
            raise errors.InvalidArgumentError(
                "nothing to run: give a program, or a module"
            )
        for name, least in (("workers", 1), ("restarts", 0), ("center_restarts", 0)):
            check.whole_number(getattr(self, name), name, least=least, optional=False)
        check.seconds(self.stop_grace, "stop_grace")
        limit = self.serve.get("max_workers")
        if limit is not None and limit < self.workers:
            raise errors.InvalidArgumentError(
                f"max-workers of the center is {limit}, and there are {self.workers} "
                "workers"
            )
        if not self.rule:
            raise errors.InvalidArgumentError("the center of a run needs a rule")

    @property
    def is_insecure(self) -> bool:
        """True if the center allows plain text between machines."""
        return bool(self.serve.get("insecure"))

    @property
    def uses_tokens(self) -> bool:
        """True if the center requires tokens."""
        return not self.serve.get("open")

    @property
    def address_file(self) -> pathlib.Path:
        """The file in the storage to which the center writes its address."""
        assert self.storage is not None
        return self.storage.absolute() / "center"

    @property
    def worker_names(self) -> list[str]:
        """The names of the workers, in the order of their ranks."""
        return [self.worker_name(rank) for rank in range(self.workers)]

    def worker_name(self, rank: int | str) -> str:
        """Return the name of a worker by its rank, or an engine's variable for it."""
        return f"worker-{rank}"

    def callers(self, worker_tokens: Mapping[str, str], *others: str) -> str:
        """Return lines with the callers of the center, as in its tokens file.

        Args:
          worker_tokens: tokens by names of workers; the first worker may be the chief.
          *others: lines of the other callers.
        """
        lines = [
            f"{'worker' if rank else 'chief'} {name} {token}"
            for rank, (name, token) in enumerate(worker_tokens.items())
        ]
        return "\n".join([*lines, *others])

    def serve_command(self, python: str = "python", **options: Any) -> list[str]:
        """Return the command that serves the center, with its journal in the storage.

        Args:
          python: the interpreter on the center's machine.
          **options: options of ``serve`` from the engine, which override the run's.
        """
        given = {**worker_limit(self.workers), **self.rule, **self.serve}
        if self.storage is not None:
            given["address_file"] = self.address_file
            if "journal" not in self.serve:
                given["journal"] = self.storage.absolute() / "journal"
        words = arguments({**given, **options})
        return [python, "-m", "agn_optax.ops.cli", "serve", *words]

    def worker_command(self, python: str = "python") -> list[str]:
        """Return the command of every worker."""
        return [python, *self.program]

    def worker_environment(self, rank: int | str, **variables: str) -> dict[str, str]:
        """Return the environment of a worker, without the center's address.

        Args:
          rank: rank of the worker, or the engine's variable for it, such as
            ``$SLURM_ARRAY_TASK_ID``.
          **variables: variables that only the engine knows.
        """
        environment = {
            **self.environment,
            "AGN_OPTAX_RANK": str(rank),
            "AGN_OPTAX_WORKERS": str(self.workers),
            "AGN_OPTAX_WORKER": self.worker_name(rank),
            "AGN_OPTAX_PROCESSES": str(self.worker_resources.processes),
            RULE: json.dumps(dict(self.rule)),
        }
        if self.tls_ca is not None:
            environment[TLS_CA] = str(self.tls_ca)
        if self.is_insecure:
            environment[INSECURE] = "1"
        return {**environment, **variables}


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options by name as a command line; None leaves an option out."""
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is False:
            words.append(option.replace("--", "--no-", 1))
        elif value is not None:
            words.append(f"{option}={value}")
    return words
