"""Meshes of workers and towers, and jobs of several processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.round import collectives

_Method = TypeVar("_Method", bound=Callable[..., Any])
_NO_MESH = Mesh(np.empty((), object), ())


def on_own_mesh(method: _Method) -> _Method:
    """Decorate a method of an object with a ``mesh``, to ignore jax.set_mesh.

    The programs that the method runs name their mesh, so it runs as if no mesh were
    set.
    """

    @functools.wraps(method)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        context = jax.sharding.get_abstract_mesh()
        if context.empty:
            return method(self, *args, **kwargs)
        try:
            no_mesh = jax.set_mesh(_NO_MESH)
        except ValueError:  # inside a traced program
            if context == self.mesh.abstract_mesh:
                return method(self, *args, **kwargs)
            raise errors.InvalidArgumentError(
                f"this program is compiled for a mesh {dict(context.shape)}, and these "
                f"towers have {dict(self.mesh.shape)}: call their methods outside of it"
            ) from None
        with no_mesh:
            return method(self, *args, **kwargs)

    return cast(_Method, run)


def make(
    devices: int | Sequence[Any] | Mesh | None,
    workers: int | None,
    axes: collectives.Axes,
    worker_axis: str,
) -> Mesh:
    """Return a mesh with ``worker_axis`` first and then the axes of the towers."""
    names = (worker_axis, *axes)
    if not axes or not all(isinstance(n, str) and n for n in names):
        raise errors.InvalidTypeError(
            "axis_name must be a name or a tuple of names, and worker_axis a name, got "
            f"{axes!r} and {worker_axis!r}"
        )
    if len(set(names)) < len(names):
        raise errors.InvalidArgumentError(f"the axes need different names, got {names}")
    if isinstance(devices, Mesh):
        return _from_mesh(devices, workers, axes, worker_axis)
    if len(axes) > 1:
        raise errors.InvalidTypeError(
            f"with several tower axes {axes} devices must be a Mesh that has them, got "
            f"{check.show(devices)}"
        )
    towers = _devices(devices)
    workers = 1 if workers is None else check.positive_int(workers, "workers")
    if len(towers) % workers:
        raise errors.InvalidArgumentError(
            f"workers must divide the number of towers, got {workers} workers for "
            f"{len(towers)} towers"
        )
    return Mesh(np.array(towers).reshape(workers, -1), names)


def _devices(devices: Any) -> list[Any]:
    if devices is None:
        return list(jax.local_devices())
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        count, local = check.positive_int(devices, "devices"), jax.local_devices()
        if count > len(local):
            raise errors.InvalidArgumentError(
                f"devices={count} were asked for, and this process has {len(local)}: "
                f"{', '.join(map(str, local))}"
            )
        return list(local[:count])
    if not isinstance(devices, Sequence | np.ndarray) or not all(
        isinstance(d, jax.Device) for d in devices
    ):
        raise errors.InvalidTypeError(
            "devices must be None, a number, a list of devices or a Mesh, got "
            f"{check.show(devices)}"
        )
    if not len(devices) or len(set(devices)) < len(devices):
        raise errors.InvalidArgumentError(
            f"devices must be one or more, each only once, got {list(devices)}"
        )
    return list(devices)


def _from_mesh(
    mesh: Mesh, workers: int | None, axes: collectives.Axes, worker_axis: str
) -> Mesh:
    if {worker_axis, *mesh.axis_names} != {worker_axis, *axes}:
        raise errors.InvalidArgumentError(
            f"the mesh has the axes {mesh.axis_names}; those of the towers, {axes}, "
            f"and perhaps {worker_axis!r} are expected. Name its axes with axis_name "
            "and worker_axis"
        )
    has_workers = worker_axis in mesh.axis_names
    found = mesh.shape[worker_axis] if has_workers else 1
    if workers not in (None, found):
        raise errors.InvalidArgumentError(
            f"workers={workers} was asked for, and the mesh has {found}"
        )
    order = [mesh.axis_names.index(n) for n in ((worker_axis,) * has_workers + axes)]
    shape = [found, *(mesh.shape[name] for name in axes)]
    return Mesh(mesh.devices.transpose(order).reshape(shape), (worker_axis, *axes))


# Environment variables of the launchers that jax.distributed detects by itself.
_CLUSTER = (
    "JAX_COORDINATOR_ADDRESS",  # set by hand, such as without the kubernetes package
    "SLURM_JOB_ID",
    "OMPI_MCA_orte_hnp_uri",  # Open MPI
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",  # Cloud TPU
    "MEGASCALE_COORDINATOR_ADDRESS",
)


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = 100,
) -> int:
    """Connect the processes of a job, if there are several; call it before JAX is used.

    Without arguments, it detects SLURM, Open MPI, Kubernetes and TPU pods, as
    `jax.distributed.initialize` does, or the variables ``JAX_COORDINATOR_ADDRESS``,
    ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``. If it detects none of these, the
    process is a job of its own, so one script runs unchanged on a laptop and on a
    cluster. On CPUs the processes communicate through gloo.

    Workers around a center are separate jobs, so that the loss of one worker does not
    end the others. In their environment, a call without arguments never connects
    processes: it raises if it detects a cluster. For a worker of several processes,
    ``initialize_distributed(**service.environment().distributed)`` connects the
    processes of this worker only.

    Args:
      coordinator_address: ``host:port`` of process 0.
      num_processes: number of processes; with 1, no connection is made in any
        environment.
      process_id: index of this process, from 0.
      heartbeat_timeout: seconds until a dead process is detected, and all other
        processes end (SIGABRT) unless they ended before. The death of process 0 is
        detected at once.

    Returns:
      The number of processes.

    Raises:
      InvalidArgumentError: ``heartbeat_timeout`` is not a positive whole number; or
        ``coordinator_address`` came without the others; or no argument came in the
        environment of a worker, which would be connected with the other workers.
      RuntimeError: JAX was used already, or other processes do not connect.

    Example:
      >>> import agn_optax
      >>> agn_optax.initialize_distributed()
      1
    """
    check.positive_int(heartbeat_timeout, "heartbeat_timeout")
    arguments: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    for argument in ("num_processes", "process_id"):
        variable = f"JAX_{argument.upper()}"
        if arguments[argument] is None and variable in os.environ:
            arguments[argument] = int(os.environ[variable])
    given = {name: value for name, value in arguments.items() if value is not None}
    if coordinator_address is not None and len(given) < len(arguments):
        missing = [name for name in arguments if name not in given]
        raise errors.InvalidArgumentError(
            f"coordinator_address came without {' and '.join(missing)}"
        )
    if num_processes == 1:
        return 1
    cluster = next((name for name in _CLUSTER if name in os.environ), None)
    if not given and cluster is None:
        return 1
    if not given and "AGN_OPTAX_CENTER" in os.environ:
        raise errors.InvalidArgumentError(
            "this is a worker around a center (AGN_OPTAX_CENTER), and all workers that "
            f"its cluster ({cluster}) has started would become one job, which ends "
            "when any of them ends: give **service.environment().distributed"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(**given, heartbeat_timeout_seconds=heartbeat_timeout)
    return jax.process_count()
