"""The engine for Ray: an actor for the center, and one for each worker."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import shlex
from typing import Any

from agn_optax import errors
from agn_optax._internal import check, extras
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._local import CENTER
from agn_optax.ops.engines._run import Resources, Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Settings of the engine for Ray.

    Attributes:
      address: address of the cluster, as for ``ray.init``; None for ``RAY_ADDRESS``, or
        else a cluster that runs here, or else a new one of this machine, which ends
        with the run.
      namespace: namespace of the actors.
      runtime_env: Ray's runtime environment of the actors, as JSON values:
        ``{"working_dir": "."}`` uploads the folder with the program.
      center_custom_resources: Ray's custom resources that the center needs, beside
        cores and memory, such as ``{"on_demand": 0.01}``.
      worker_custom_resources: the same for a worker, such as ``{"TPU": 4}``.
      on_failure: whether to ``"stop"`` the other workers when one has failed after its
        last restart, or to let them ``"continue"``.
    """

    address: str | None = None
    namespace: str = "agn_optax"
    runtime_env: dict[str, Any] = dataclasses.field(default_factory=dict)
    center_custom_resources: dict[str, float] = dataclasses.field(default_factory=dict)
    worker_custom_resources: dict[str, float] = dataclasses.field(default_factory=dict)
    on_failure: str = "stop"


class Ray(Engine):
    """Actors of a Ray cluster.

    The center is an actor that Ray restarts on any node, with the journal in the run's
    storage. Each worker is an actor that Ray restarts, too. The loss of an actor or a
    node is not counted as a failure of its program.
    """

    name = "ray"
    Settings = RaySettings
    settings: RaySettings

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        extras.require("ray", "ray")
        settings = self.settings
        check.one_of(settings.on_failure, "on-failure in [ray]", ("stop", "continue"))
        for name, value in (
            settings.center_custom_resources | settings.worker_custom_resources
        ).items():
            if value <= 0 or name in ("CPU", "GPU", "memory"):
                raise errors.InvalidArgumentError(
                    "custom resources in [ray] must be positive, and not CPU, GPU or "
                    f"memory, got {name} = {value:g}; cpus, gpus and memory are in "
                    "[resources.worker] and [resources.center]"
                )
        if run.worker_resources.processes > 1:
            raise errors.InvalidArgumentError(
                "a worker on Ray is one process, got processes = "
                f"{run.worker_resources.processes}: SLURM and Kubernetes have workers "
                "of several processes"
            )
        if run.has_center and run.storage is None:
            raise errors.InvalidArgumentError(
                "a center on Ray needs storage, a folder that all nodes reach, from "
                "which a restarted center continues"
            )
        # Relative paths are relative to the folder here, and not to an actor's.
        self.run = dataclasses.replace(
            run,
            serve={name: _absolute(value) for name, value in run.serve.items()},
            storage=_absolute(run.storage),
            token_file=_absolute(run.token_file),
            tls_ca=_absolute(run.tls_ca),
        )

    def commands(self) -> list[str]:
        """Return the commands of all actors with their environment, center first."""
        run = self.run
        lines: list[str] = []
        center: dict[str, str] = {}
        if run.has_center:
            center["AGN_OPTAX_CENTER"] = f"file:{run.address_file}"
            command = run.center_command(address="NODE:0")
            lines += [
                f"# actor {run.name}-{CENTER}, with {self._center_resources()}",
                shlex.join(command),
            ]
        for rank, name in enumerate(run.worker_names):
            lines += [
                f"# actor {run.name}-{name}, with {self._worker_resources()}",
                run.worker_line(rank, "python", **center),
            ]
        return lines

    def launch(self, output: Output) -> dict[str, Any]:
        """Make the actors, and end them when the workers have ended.

        If an earlier driver of this run was killed, its actors ended with it, and the
        center continues from its journal. SIGINT, SIGTERM, SIGHUP and SIGQUIT end the
        run; the return code is then 128 plus the signal's number.

        Raises:
          InvalidArgumentError: there is no cluster; or another driver runs a run of
            this name, and that run continues untouched.
        """
        # Otherwise log lines of Ray's nodes would appear among those of the workers and
        # of the summary. Ray reads this variable when it is imported.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        import ray  # noqa: PLC0415 a heavy, optional dependency

        from agn_optax.ops.engines._ray_driver import Driver  # noqa: PLC0415 imports ray

        settings = self.settings
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
                    f"no Ray cluster at {settings.address or 'this machine'}: {error}"
                ) from error
        driver = Driver(
            self.run,
            output,
            settings,
            center=self._center_resources(),
            worker=self._worker_resources(),
        )
        try:
            return driver.run()
        finally:
            if is_ours:
                ray.shutdown()

    def _center_resources(self) -> dict[str, float]:
        """Return the resources of the center, by Ray's names."""
        return (
            _bundle(self.run.center_resources) | self.settings.center_custom_resources
        )

    def _worker_resources(self) -> dict[str, float]:
        """Return the resources of a worker, by Ray's names."""
        return (
            _bundle(self.run.worker_resources) | self.settings.worker_custom_resources
        )


def _bundle(needs: Resources) -> dict[str, float]:
    cpus = 1 if needs.cpus is None else needs.cpus
    given = {"CPU": cpus, "GPU": needs.gpus, "memory": needs.memory}
    return {name: float(value) for name, value in given.items() if value}


def _absolute(value: Any) -> Any:
    """Return a path as an absolute one, and any other value as it is."""
    return value.absolute() if isinstance(value, pathlib.Path) else value
