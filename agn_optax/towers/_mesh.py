"""Meshes of workers and towers."""

from __future__ import annotations

import functools
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
    names = (worker_axis, *axes)
    if mesh.axis_names not in (axes, names):
        raise errors.InvalidArgumentError(
            f"the mesh has the axes {mesh.axis_names}; those of the towers, {axes}, "
            f"perhaps after {worker_axis!r}, are expected in this order. Name its axes "
            "with axis_name and worker_axis"
        )
    devices = mesh.devices if mesh.axis_names == names else mesh.devices[None]
    if workers not in (None, len(devices)):
        raise errors.InvalidArgumentError(
            f"workers={workers} was asked for, and the mesh has {len(devices)}"
        )
    return Mesh(devices, names)
