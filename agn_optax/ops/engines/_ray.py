"""Actors of a Ray cluster: a detached center, and workers with a place each."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from agn_optax import errors
from agn_optax._internal import check, extras
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._local import CENTER
from agn_optax.ops.engines._run import Resources, Run

_STRATEGIES = dict.fromkeys(("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
_ON_FAILURE = dict.fromkeys(("stop", "go on"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Which cluster, and where on it.

    Attributes:
      address: of the cluster, as of ``ray.init``; None for ``RAY_ADDRESS``, or one that
        runs here, or a new one of this machine, which ends with the run.
      namespace: of the actors.
      runtime_env: of the actors, in terms of JSON, as Ray has it:
        ``{"working_dir": "."}`` takes the folder with the program along.
      center_needs: of the node of the center, beside cores and memory: Ray's custom
        resources, as ``{"on_demand": 0.01}``.
      worker_needs: of those of each process of a worker, as ``{"TPU": 4}``.
      strategy: how the processes of a worker are placed, as of Ray's placement groups;
        by default each on a node of its own.
      on_failure: whether a worker that has failed for good is to ``"stop"`` the others,
        or these ``"go on"``.
      give_up: seconds after which the run ends with an error because a task of it,
        which has not run so far, needs what no node of the cluster has, even an idle
        one. What others use, and what a lost task needs, is waited for without end.
    """

    address: str | None = None
    namespace: str = "agn_optax"
    runtime_env: dict[str, Any] = dataclasses.field(default_factory=dict)
    center_needs: dict[str, float] = dataclasses.field(default_factory=dict)
    worker_needs: dict[str, float] = dataclasses.field(default_factory=dict)
    strategy: str = "STRICT_SPREAD"
    on_failure: str = "stop"
    give_up: float = 600.0


class Ray(Engine):
    """Actors of a Ray cluster.

    The center is a detached actor that Ray restarts, anywhere, with the journal in the
    run's storage; each worker is an actor that Ray restarts, in a placement group of
    its own. What is lost with an actor or a node is no failure of a program, and is not
    counted as one.
    """

    name = "ray"
    Settings = RaySettings

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        extras.require("ray", "ray")
        settings: RaySettings = self.settings
        check.choose(settings.strategy, _STRATEGIES, "strategy in [ray]")
        check.choose(settings.on_failure, _ON_FAILURE, "on-failure in [ray]")
        if not settings.give_up > 0:
            raise errors.InvalidArgumentError(
                "give-up in [ray] must be a positive number of seconds, or inf, got "
                f"{settings.give_up!r}"
            )
        for needs in (settings.center_needs, settings.worker_needs):
            for name, value in needs.items():
                if value <= 0 or name in ("CPU", "GPU", "memory"):
                    raise errors.InvalidArgumentError(
                        "center-needs and worker-needs in [ray] are positive amounts "
                        f"of custom resources, got {name} = {value:g}; cpus, gpus and "
                        "memory are in [resources.worker] and [resources.center]"
                    )
        if run.has_center and run.storage is None:
            raise errors.InvalidArgumentError(
                "a center on Ray needs storage, a folder that all nodes reach: Ray "
                "restarts it, maybe elsewhere, and it finds there what it had"
            )
        if "snapshots" in run.serve:
            raise errors.InvalidArgumentError(
                "a center on Ray keeps a journal: with snapshots alone, exchanges "
                "since the last one would be lost with its actor"
            )
        # What is relative is so here, and not where an actor is.
        self.run = dataclasses.replace(
            run,
            serve={name: _absolute(value) for name, value in run.serve.items()},
            storage=_absolute(run.storage),
            token_file=_absolute(run.token_file),
            tls_ca=_absolute(run.tls_ca),
        )

    def files(self) -> Mapping[str, str]:
        """None: the driver makes actors."""
        return {}

    def commands(self) -> list[str]:
        """What the actors run, each with its environment, the center first."""
        run, said = self.run, []
        where = {}
        if run.has_center:
            file = run.storage / CENTER if run.storage is not None else None
            where = {"AGN_OPTAX_CENTER": f"file:{file}"}
            address = run.serve.get("address", "NODE:0")
            options = {"address": address, "address_file": file, **run.durable()}
            said += [
                f"# actor {run.name}-{CENTER}, detached, with {self._needs(CENTER)}",
                shlex.join(run.serve_command(json=True, **options)),
            ]
        processes = run.worker_resources.processes
        for rank in range(run.workers):
            told = run.worker_environment(rank, **where)
            variables = [f"{name}={shlex.quote(text)}" for name, text in told.items()]
            times = f"{processes} times, {self.settings.strategy}, "
            about = f"{times if processes > 1 else ''}with {self._needs('worker')}"
            said += [
                f"# actor {run.name}-{run.worker_name(rank)}, {about}",
                " ".join([*variables, shlex.join(run.worker_command())]),
            ]
        return said

    def launch(self, output: Output) -> dict[str, Any]:
        """Makes the actors, and ends them when the workers have ended.

        The center of a run whose driver was killed is there, and goes on; its workers
        start again. SIGINT and the like end all; the return code is then 128 and the
        signal's number.

        Raises:
          InvalidArgumentError: there is no cluster; another run has this one's name, or
            another driver runs it, and both go on untouched; or no node has what a task
            needs.
        """
        # What Ray's nodes say of themselves would be among the workers' lines, and a
        # summary's. It reads this when it is imported.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        import ray  # noqa: PLC0415 heavy, an extra of its own

        from agn_optax.ops.engines._ray_driver import Driver  # noqa: PLC0415 it needs that

        settings: RaySettings = self.settings
        is_ours = not ray.is_initialized()
        if is_ours:
            try:
                ray.init(
                    settings.address,
                    namespace=settings.namespace,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise errors.InvalidArgumentError(
                    f"there is no Ray cluster at {settings.address}: {error}"
                ) from error
        driver = Driver(
            self.run,
            output,
            namespace=settings.namespace,
            runtime_env=settings.runtime_env,
            center=self._needs(CENTER),
            worker=self._needs("worker"),
            strategy=settings.strategy,
            give_up=settings.give_up,
            goes_on=settings.on_failure == "go on",
        )
        try:
            return driver.run()
        finally:
            if is_ours:
                ray.shutdown()

    def _needs(self, task: str) -> dict[str, float]:
        """Of a node, in Ray's words, for one process."""
        settings: RaySettings = self.settings
        if task == CENTER:
            return _bundle(self.run.center_resources) | settings.center_needs
        return _bundle(self.run.worker_resources) | settings.worker_needs


def _bundle(needs: Resources) -> dict[str, float]:
    given = {
        "CPU": 1 if needs.cpus is None else needs.cpus,
        "GPU": needs.gpus,
        "memory": needs.memory,
    }
    return {name: float(value) for name, value in given.items() if value}


def _absolute(value: Any) -> Any:
    """A path as it is from everywhere; what is none, as it is."""
    return value.absolute() if isinstance(value, pathlib.Path) else value
