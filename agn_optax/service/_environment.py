"""Settings of a launched worker, read from its environment variables.

``agn-optax launch`` sets the variables on every engine. The processes of one worker may
also be numbered by the cluster engine that has started them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
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
        stays alone.
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
    the first of these that is found: a pod of a JobSet (``JOBSET_NAME``,
    ``REPLICATED_JOB_NAME``, ``JOB_INDEX`` and ``JOB_COMPLETION_INDEX``), a task of a
    step of SLURM (``SLURM_PROCID``), a host of a TPU slice (``TPU_WORKER_ID``).

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
    workers = _number("AGN_OPTAX_WORKERS", "the number of workers", minimum=1)
    rank = _number("AGN_OPTAX_RANK", "0, 1, ...", below=workers)
    address = os.environ.get("AGN_OPTAX_CENTER")
    if not address:
        raise _missing("AGN_OPTAX_CENTER", "the center's address")
    requeued = os.environ.get("SLURM_RESTART_COUNT") or "0"
    restarts = _number("AGN_OPTAX_RESTARTS", default=requeued)
    name = os.environ.get("AGN_OPTAX_WORKER") or f"worker-{rank}"
    distributed = _distributed(rank)
    processes = distributed.get("num_processes", 1)
    _log.info(
        "this is worker %r, rank %d of %d, with %d process(es); its center is %s",
        *(name, rank, workers, processes, address),
    )
    if jax.distributed.is_initialized() and jax.process_count() != processes:
        raise errors.InvalidArgumentError(
            f"worker {name!r} has {processes} process(es), but this process is in a "
            f"job of jax.distributed with {jax.process_count()}: if one of these ends, "
            "all end. Join the worker's processes, before anything else, by "
            "jax.distributed.initialize(**service.environment().distributed)"
        )
    return Environment(address, rank, workers, name, restarts, distributed)


def _distributed(rank: int) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` for a worker."""
    processes = _number("AGN_OPTAX_PROCESSES", minimum=1, default="1")
    if processes == 1:
        return {}
    process, host = _process_and_host()
    coordinator = os.environ.get("AGN_OPTAX_COORDINATOR")
    if not coordinator and not host:
        raise _missing("AGN_OPTAX_COORDINATOR", "host:port of the first process")
    return {
        "coordinator_address": coordinator or f"{host}:{_FIRST_PORT + rank % _PORTS}",
        "num_processes": processes,
        "process_id": _number(
            "AGN_OPTAX_PROCESS", "0, 1, ...", default=process, below=processes
        ),
    }


def _process_and_host() -> tuple[str, str]:
    """Return the number of this process, and the host of process 0; "" if unknown.

    The processes are those that a cluster engine starts and ends together.
    """
    variables = os.environ
    # A JobSet's manifest sets these, from the annotations of its pods.
    if {"JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"} <= variables.keys():
        form = "{JOBSET_NAME}-{REPLICATED_JOB_NAME}-{JOB_INDEX}-0.{JOBSET_NAME}"
        return variables.get("JOB_COMPLETION_INDEX", ""), form.format_map(variables)
    if "SLURM_PROCID" in variables:
        # The first host of node[001-015,020],other is node001.
        nodes = variables.get("SLURM_STEP_NODELIST", "")
        match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodes)
        return variables["SLURM_PROCID"], "".join(match.groups("")) if match else ""
    host = variables.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0]
    return variables.get("TPU_WORKER_ID", ""), host


def _number(
    name: str,
    description: str = "",
    *,
    minimum: int = 0,
    below: int | None = None,
    default: str = "",
) -> int:
    """Return the value of an environment variable as an int.

    Args:
      name: name of the variable.
      description: description of its value, for the error if there is none.
      minimum: the least allowed value.
      below: exclusive upper limit of the value; None for no limit.
      default: the value if the variable is unset or empty; "" for none.

    Raises:
      InvalidArgumentError: there is no value, or it is not such an integer.
    """
    text = os.environ.get(name) or default
    if not text:
        raise _missing(name, description)
    is_number = text.isascii() and text.isdigit() and int(text) >= minimum
    if not is_number or (below is not None and int(text) >= below):
        limit = "" if below is None else f" and below {below}"
        raise errors.InvalidArgumentError(
            f"{name} must be a whole number >= {minimum}{limit}, got {text!r}"
        )
    return int(text)


def _missing(name: str, description: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{name} is not set: start this program with `agn-optax launch`, which sets "
        f"it, or set it to {description}"
    )
