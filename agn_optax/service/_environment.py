"""Settings of a launched worker, read from its environment variables.

``agn-optax launch`` sets the variables on every engine. Processes may also be numbered
by the cluster engine that has started them: Ray Train, a JobSet, SLURM, Kubeflow
Trainer or Cloud TPU. Variables of an earlier job, for which JAX would wait, are unset.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
from typing import Any, NamedTuple

import jax

from agn_optax import errors, rules

RULE = "AGN_OPTAX_RULE"

_log = logging.getLogger("agn_optax")

# Process 0 of a worker with several processes listens at a port in this range. The port
# depends on the worker's rank, because workers may share a host.
_FIRST_PORT, _PORTS = 20_000, 10_000


class Environment(NamedTuple):
    """The settings of a launched worker.

    Attributes:
      address: the center's address, for `connect`.
      rank: 0, 1, ...; rank 0 can be the chief.
      workers: the number of workers.
      worker: this worker's name.
      restarts: how often this worker has failed and been restarted.
      distributed: the arguments of `jax.distributed.initialize` that join the processes
        of this worker, and no process of another worker; empty for one process, which
        stays alone, and if the processes are already joined.
    """

    address: str
    rank: int
    workers: int
    worker: str
    restarts: int
    distributed: dict[str, Any]

    @property
    def rule(self) -> rules.Rule:
        """The rule of the center, from ``AGN_OPTAX_RULE``, which `launch` sets.

        Raises:
          MissingArgumentError: the variable is not set.
          InvalidArgumentError: the variable's value is not valid.
        """
        text = os.environ.get(RULE)
        if text is None:
            raise errors.MissingArgumentError(
                f"{RULE} is not set: start this program with `agn-optax launch`, which "
                "sets it, or make the rule of the center in this program"
            )
        settings = None
        with contextlib.suppress(ValueError):
            settings = json.loads(text)
        if not isinstance(settings, dict):
            raise errors.InvalidArgumentError(
                f"{RULE} must be a JSON object, got {text!r}"
            )
        return rules.rule_from_settings(settings)


def environment() -> Environment:
    """Return this worker's settings from its environment variables, and log them.

    The variables are ``AGN_OPTAX_CENTER``, ``AGN_OPTAX_RANK``, ``AGN_OPTAX_WORKERS``,
    ``AGN_OPTAX_WORKER`` (default ``worker-RANK``) and ``AGN_OPTAX_RESTARTS`` (default
    ``SLURM_RESTART_COUNT`` or 0). `agn-optax launch` sets them on every engine; without
    it, set them from the engine's, as in ``AGN_OPTAX_RANK=$SLURM_ARRAY_TASK_ID``.

    A worker with several processes also has ``AGN_OPTAX_PROCESSES``, and for each
    process ``AGN_OPTAX_PROCESS`` (0, 1, ...) and ``AGN_OPTAX_COORDINATOR``
    (``host:port`` of its first process). If these two are not set, they are taken from
    the first of these that is found: a worker of Ray Train (its context), a pod of a
    JobSet (``JOBSET_NAME``, ``REPLICATED_JOB_NAME``, ``JOB_INDEX`` and
    ``JOB_COMPLETION_INDEX``), a task of a step of SLURM (``SLURM_PROCID``), a node of a
    TrainJob of Kubeflow (``JAX_PROCESS_ID``, ``JAX_NUM_PROCESSES`` and
    ``JAX_COORDINATOR_ADDRESS``), a host of a TPU slice (``TPU_WORKER_ID``).

    Ray Train and Kubeflow also say how many processes they start. All of them are one
    worker if Ray Train has joined them, and on Kubeflow without
    ``AGN_OPTAX_PROCESSES=1``. Otherwise each is a worker, and ranks and the number of
    workers are theirs if neither ``AGN_OPTAX_RANK`` nor ``AGN_OPTAX_WORKERS`` is set.

    Call this before JAX uses a device: variables that would join this worker to other
    processes, or make it wait for processes that have ended, are unset, and the log
    warns of them. These are all ``MEGASCALE_*``, unless ``AGN_OPTAX_SLICES`` says that
    a worker spans several slices of TPUs, and a ``JAX_COORDINATOR_ADDRESS`` of another
    job. A worker of several slices needs ``AGN_OPTAX_PROCESS`` and
    ``AGN_OPTAX_COORDINATOR``, unless Ray Train joins it.

    Returns:
      The center's address, this worker's rank and name, the number of workers, and the
      other fields of `Environment`.

    Raises:
      InvalidArgumentError: a variable is missing or not valid; the message names it. Or
        this process is in a `jax.distributed` job that has another number of processes
        than this worker, and whose processes all end if one does.

    Example:
      >>> import os
      >>> from agn_optax import service
      >>> os.environ["AGN_OPTAX_CENTER"] = "127.0.0.1:5000"
      >>> os.environ["AGN_OPTAX_RANK"] = "1"
      >>> os.environ["AGN_OPTAX_WORKERS"] = "2"
      >>> service.environment().worker
      'worker-1'
      >>> for name in ("CENTER", "RANK", "WORKERS"):
      ...     del os.environ[f"AGN_OPTAX_{name}"]
    """
    unit = _unit()
    processes = _number(
        "AGN_OPTAX_PROCESSES", minimum=1, default=unit.processes, source=unit.source
    )
    rank, workers = _rank_and_workers(unit, processes)
    address = os.environ.get("AGN_OPTAX_CENTER")
    if not address:
        raise _missing("AGN_OPTAX_CENTER", "the center's address")
    requeued = os.environ.get("SLURM_RESTART_COUNT") or "0"
    restarts = _number("AGN_OPTAX_RESTARTS", default=requeued)
    name = os.environ.get("AGN_OPTAX_WORKER") or f"worker-{rank}"
    slices = _slices(processes)
    # Engines number the processes of each slice, beginning at 0.
    distributed = _distributed(unit if slices == 1 else _Unit(), rank, processes)
    coordinator = distributed.get("coordinator_address", "")
    if coordinator:
        _check_bind_address(coordinator)
    _unset_stale_variables(coordinator, slices)
    _log.info(
        "this is worker %r, rank %d of %d, with %d process(es); its center is %s",
        *(name, rank, workers, processes, address),
    )
    if coordinator:
        _log_coordinator(coordinator, distributed["process_id"])
    if jax.distributed.is_initialized() and jax.process_count() != processes:
        raise errors.InvalidArgumentError(
            f"worker {name!r} has {processes} process(es), but this process is in a "
            f"job of jax.distributed with {jax.process_count()}: if one of these ends, "
            "all end. Join the worker's processes, before anything else, by "
            "jax.distributed.initialize(**service.environment().distributed)"
        )
    return Environment(address, rank, workers, name, restarts, distributed)


class _Unit(NamedTuple):
    """This process, among those that a cluster engine starts and ends together."""

    source: str = ""  # where the engine says this, for errors
    number: str = ""  # the number of this process; "" if unknown
    total: str = ""  # how many processes there are; "" if unknown
    coordinator: str = ""  # host or host:port of process 0; "" if unknown
    processes: str = "1"  # how many of them are one worker, by default


def _unit() -> _Unit:
    """Return this process as the engine that has started it numbers it."""
    variables = os.environ
    if unit := _unit_of_ray_train():
        return unit
    # A JobSet's manifest sets these, from the annotations of its pods.
    if {"JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"} <= variables.keys():
        form = "{JOBSET_NAME}-{REPLICATED_JOB_NAME}-{JOB_INDEX}-0.{JOBSET_NAME}"
        number = variables.get("JOB_COMPLETION_INDEX", "")
        host = form.format_map(variables)
        return _Unit("JOB_COMPLETION_INDEX", number, coordinator=host)
    if "SLURM_PROCID" in variables:
        # The first host of node[001-015,020],other is node001.
        nodes = variables.get("SLURM_STEP_NODELIST", "")
        match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodes)
        host = "".join(match.groups("")) if match else ""
        return _Unit("SLURM_PROCID", variables["SLURM_PROCID"], coordinator=host)
    if {"JAX_PROCESS_ID", "JAX_NUM_PROCESSES"} <= variables.keys():
        total = variables["JAX_NUM_PROCESSES"]
        return _Unit(
            "JAX_PROCESS_ID or JAX_NUM_PROCESSES",
            number=variables["JAX_PROCESS_ID"],
            total=total,
            coordinator=variables.get("JAX_COORDINATOR_ADDRESS", ""),
            processes=total,
        )
    host = variables.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0]
    return _Unit("TPU_WORKER_ID", variables.get("TPU_WORKER_ID", ""), coordinator=host)


def _unit_of_ray_train() -> _Unit | None:
    """Return a worker of Ray Train; None in any other process."""
    # A worker of Ray Train has imported this.
    ray_train = sys.modules.get("ray.train")
    if ray_train is None:
        return None
    try:
        context = ray_train.get_context()
        number, total = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, DeprecationWarning):  # a driver, or a trial of Ray Tune
        return None
    # JaxTrainer joins all of its workers, or none.
    processes = total if jax.distributed.is_initialized() else 1
    return _Unit(
        "the context of Ray Train", str(number), str(total), processes=str(processes)
    )


def _rank_and_workers(unit: _Unit, processes: int) -> tuple[int, int]:
    """Return a worker's rank, and the number of workers."""
    given = any(os.environ.get(f"AGN_OPTAX_{name}") for name in ("RANK", "WORKERS"))
    # An engine that starts a single process is one of several that do.
    if given or processes > 1 or unit.total in ("", "1"):
        unit = _Unit()
    workers = _number(
        "AGN_OPTAX_WORKERS",
        "the number of workers",
        minimum=1,
        default=unit.total,
        source=unit.source,
    )
    rank = _number(
        "AGN_OPTAX_RANK",
        "0, 1, ...",
        below=workers,
        default=unit.number,
        source=unit.source,
    )
    return rank, workers


def _distributed(unit: _Unit, rank: int, processes: int) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` for a worker."""
    if processes == 1 or jax.distributed.is_initialized():
        return {}
    address = os.environ.get("AGN_OPTAX_COORDINATOR") or unit.coordinator
    if not address:
        raise _missing("AGN_OPTAX_COORDINATOR", "host:port of the first process")
    if not re.search(r":\d+$", address):
        address = f"{address}:{_FIRST_PORT + rank % _PORTS}"
    process = _number(
        "AGN_OPTAX_PROCESS",
        "0, 1, ...",
        below=processes,
        default=unit.number,
        source=unit.source,
    )
    return {
        "coordinator_address": address,
        "num_processes": processes,
        "process_id": process,
    }


def _slices(processes: int) -> int:
    """Return how many slices of TPUs a worker spans.

    Raises:
      InvalidArgumentError: the variables of Multislice say otherwise, so that the TPUs
        would wait for slices that never come.
    """
    slices = _number("AGN_OPTAX_SLICES", minimum=1, default="1")
    if slices == 1:
        return 1
    if processes % slices:
        raise errors.InvalidArgumentError(
            f"AGN_OPTAX_PROCESSES must be a multiple of AGN_OPTAX_SLICES, {slices}, "
            f"got {processes}"
        )
    number = os.environ.get("MEGASCALE_NUM_SLICES")
    if number != str(slices):
        raise errors.InvalidArgumentError(
            f"MEGASCALE_NUM_SLICES must be AGN_OPTAX_SLICES, {slices}, got {number!r}: "
            "JAX would wait for another number of slices than this worker has. Set "
            "both to the number of slices of the worker"
        )
    _number("MEGASCALE_SLICE_ID", "0, 1, ...", below=slices)
    return slices


def _check_bind_address(address: str) -> None:
    """Raise if process 0 would listen at another port than that of ``address``."""
    port = address.rpartition(":")[2]
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bound and bound.rpartition(":")[2] != port:
        raise errors.InvalidArgumentError(
            f"JAX_COORDINATOR_BIND_ADDRESS must have port {port} of the coordinator's "
            f"address {address}, got {bound!r}: no process would find the coordinator. "
            "Unset it, or set AGN_OPTAX_COORDINATOR"
        )


def _unset_stale_variables(address: str, slices: int) -> None:
    """Unset variables of another job, for which JAX would wait, and log them.

    Args:
      address: the coordinator's address; "" if the processes need not be joined.
      slices: how many slices of TPUs the worker spans.
    """
    found = sorted(name for name in os.environ if name.startswith("MEGASCALE_"))
    if found and slices == 1:
        removed = ", ".join(f"{name}={os.environ.pop(name)}" for name in found)
        _log.warning(
            "unset %s: with these, the TPUs of this worker would wait for other slices "
            "(if a worker spans several slices, set AGN_OPTAX_SLICES to their number)",
            removed,
        )
    if jax.distributed.is_initialized():
        return
    if os.environ.get("JAX_COORDINATOR_ADDRESS", address) != address:
        other = os.environ.pop("JAX_COORDINATOR_ADDRESS")
        _log.warning(
            "unset JAX_COORDINATOR_ADDRESS=%s: no process of this worker listens "
            "there, and jax.distributed.initialize() would wait for one",
            other,
        )


def _log_coordinator(address: str, process: int) -> None:
    """Log the address at which the processes meet, because they hang at an old one."""
    if process == 0 and not _is_local(address):
        _log.warning(
            "this is process 0 of its worker, but the coordinator's address %s belongs "
            "to another machine: if it is an old address, jax.distributed waits there "
            "until its timeout, 300 s by default",
            address,
        )
    else:
        _log.info(
            "process %d joins the others of its worker at %s: if it waits for them, "
            "this may be an old address, where process 0 does not listen",
            *(process, address),
        )


def _is_local(address: str) -> bool:
    """Return whether this machine has the address; True if its name is unknown."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # a pod's name may be unknown for some seconds
    for family, kind, protocol, _, where in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as end:
            end.bind(where)
            return True
    return False


def _number(
    name: str,
    description: str = "",
    *,
    minimum: int = 0,
    below: int | None = None,
    default: str = "",
    source: str = "",
) -> int:
    """Return the value of an environment variable as an int.

    Args:
      name: name of the variable.
      description: description of its value, for the error if there is none.
      minimum: the least allowed value.
      below: exclusive upper limit of the value; None for no limit.
      default: the value if the variable is unset or empty; "" for none.
      source: where the default is from, for the error.

    Raises:
      InvalidArgumentError: there is no value, or it is not such an integer.
    """
    given = os.environ.get(name)
    text = given or default
    if not text:
        raise _missing(name, description)
    is_number = text.isascii() and text.isdigit() and int(text) >= minimum
    if not is_number or (below is not None and int(text) >= below):
        limit = "" if below is None else f" and below {below}"
        origin = f" from {source}" if source and not given else ""
        raise errors.InvalidArgumentError(
            f"{name} must be a whole number >= {minimum}{limit}, got {text!r}{origin}"
        )
    return int(text)


def _missing(name: str, description: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{name} is not set: start this program with `agn-optax launch`, which sets "
        f"it, or set it to {description}"
    )
