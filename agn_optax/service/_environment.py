"""Settings of a launched worker, read from its environment variables.

``agn-optax launch`` or the cluster engine that started the worker sets the variables.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any, NamedTuple

import jax

from agn_optax import errors, rules
from agn_optax.service._task_variables import Task, Variables, number, tasks

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
      distributed: the arguments of `initialize_distributed`. They join the processes of
        this worker, and no process of another worker; a worker with one process stays
        alone.
    """

    address: str
    rank: int
    workers: int
    worker: str
    restarts: int
    distributed: dict[str, Any]

    @property
    def rule(self) -> rules.Rule:
        """The rule of the center that `launch` has started (``AGN_OPTAX_RULE``).

        Raises:
          MissingArgumentError: the variable is not set, because `launch` did not start
            the center itself, as with ``--center HOST:PORT``.
          InvalidArgumentError: the variable's value is not valid.
        """
        text = os.environ.get(RULE)
        if text is None:
            raise errors.MissingArgumentError(
                f"{RULE} is not set: `agn-optax launch --rule ...` sets it only if it "
                "starts the center itself. Make the rule of the center in this program"
            )
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise errors.InvalidArgumentError(
                f"{RULE} must be a JSON object, got {text!r}: {error}"
            ) from None
        if not isinstance(settings, dict):
            raise errors.InvalidArgumentError(
                f"{RULE} must be a JSON object, got {text!r}"
            )
        return rules.named(settings)


def environment() -> Environment:
    """Return this worker's settings from its environment variables, and log them.

    Each setting comes from the first of these sources that has it:

    1. ``AGN_OPTAX_CENTER``, ``AGN_OPTAX_RANK``, ``AGN_OPTAX_WORKERS``,
       ``AGN_OPTAX_WORKER`` (default ``worker-RANK``) and ``AGN_OPTAX_RESTARTS``. A
       worker with several processes also has ``AGN_OPTAX_PROCESSES``,
       ``AGN_OPTAX_PROCESS`` and ``AGN_OPTAX_COORDINATOR`` (``host:port`` of its first
       process). `agn-optax launch` sets them on every engine. In an actor of Ray they
       are the only source, because the variables of an engine describe the node and
       not the actor.
    2. SkyPilot's nodes (``SKYPILOT_NODE_RANK``, ...).
    3. Kubernetes' Indexed Jobs (``JOB_COMPLETION_INDEX``), JobSets (``JOBSET_NAME`` and
       ``JOB_INDEX`` as well) and LeaderWorkerSets (``LWS_WORKER_INDEX``, ...), whose
       leader is the center.
    4. SLURM's arrays (``SLURM_ARRAY_TASK_ID``, ...) and steps (``SLURM_PROCID``, ...).
    5. Slices of TPUs (``MEGASCALE_SLICE_ID``, ``TPU_WORKER_ID``, ...).

    A unit that is restarted alone is a worker: a task of an array, a pod of a Job, a
    slice. Processes that start together, such as the tasks of a step, may be one worker
    or several: ``AGN_OPTAX_PROCESSES`` is the number of processes of a worker.

    Returns:
      The center's address, this worker's rank and name, the number of workers, and the
      other fields of `Environment`.

    Raises:
      InvalidArgumentError: a variable is missing or not valid, or engines disagree; the
        message names the variables. Or this process is in a job of `jax.distributed`
        with processes of other workers, all of which would end if this one does.

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
    own, found = os.environ, tasks(os.environ)
    rank, workers, by = _place(own, found)
    distributed = _processes(own, found, rank)
    address = own.get("AGN_OPTAX_CENTER") or _first([task.center for task in found])
    if address is None:
        raise _missing("AGN_OPTAX_CENTER", "the center's address")
    restarts = number(own, "AGN_OPTAX_RESTARTS")
    if restarts is None:
        restarts = _first([task.restarts for task in found]) or 0
    name = own.get("AGN_OPTAX_WORKER") or f"worker-{rank}"
    processes = distributed["num_processes"]
    _log.info(
        "this is worker %r, rank %d of %d by %s, with %d process(es); its center is %s",
        *(name, rank, workers, by, processes, address),
    )
    if jax.distributed.is_initialized() and jax.process_count() != processes:
        raise errors.InvalidArgumentError(
            f"worker {name!r} has {processes} process(es), but this one is in a job of "
            f"jax.distributed with {jax.process_count()}: if one of these ends, all "
            "end. Join the worker's processes by agn_optax.initialize_distributed("
            "**service.environment().distributed), before anything else"
        )
    return Environment(address, rank, workers, name, restarts, distributed)


def _place(own: Variables, found: list[Task]) -> tuple[int, int, str]:
    """Return this worker's rank, the number of workers, and the source of the rank."""
    rank = number(own, "AGN_OPTAX_RANK")
    workers = number(own, "AGN_OPTAX_WORKERS", least=1)
    by = "AGN_OPTAX_RANK"
    if rank is None:
        task = _agreed([task for task in found if task.index is not None], "index")
        if task is not None:
            rank, by = task.index, task.said
            workers = workers or _counted(task)
        else:
            rank, workers, by = _of_processes(own, found, workers)
    if rank is None:
        raise _missing("AGN_OPTAX_RANK", "0, 1, ...")
    if workers is None:
        raise _missing("AGN_OPTAX_WORKERS", "the number of workers")
    if rank >= workers:
        raise errors.InvalidArgumentError(
            f"the rank must be below AGN_OPTAX_WORKERS ({workers}), got {rank} ({by})"
        )
    return rank, workers, by


def _counted(task: Task) -> int | None:
    """Return the number of workers according to an engine; None if it is unknown."""
    if task.engine == "SLURM" and task.count is None:
        raise errors.InvalidArgumentError(
            "an array that does not begin at 0, or has gaps, may be only a part of the "
            f"workers ({task.said}): use --array=0-N, or set AGN_OPTAX_WORKERS to the "
            "number of all workers; the rank is then the task's number"
        )
    return task.count


def _of_processes(
    own: Variables, found: list[Task], workers: int | None
) -> tuple[int | None, int | None, str]:
    """Return rank, number of workers and source, if the workers start together."""
    task = _agreed([task for task in found if task.processes > 1], "process")
    if task is None or task.is_gang:
        return None, workers, ""
    each = number(own, "AGN_OPTAX_PROCESSES", least=1)
    if each is None or task.processes % each:
        raise errors.InvalidArgumentError(
            f"{task.engine} has started {task.processes} processes together "
            f"({task.said}): set AGN_OPTAX_PROCESSES=1 if each is a worker, or "
            f"{task.processes} if all are one worker's towers, got {each}"
        )
    return task.process // each, workers or task.processes // each, task.said


def _processes(own: Variables, found: list[Task], rank: int) -> dict[str, Any]:
    """Return the arguments of `initialize_distributed` for this worker."""
    processes = number(own, "AGN_OPTAX_PROCESSES", least=1)
    process = number(own, "AGN_OPTAX_PROCESS")
    host = None
    task = _agreed([task for task in found if task.processes > 1], "process")
    if task is not None:
        if processes is None:
            processes = task.processes
        if process is None:
            process = task.process % processes
        if processes == task.processes:
            host = task.host
    processes = processes or 1
    if processes == 1:
        return {"num_processes": 1}
    if process is None:
        raise _missing("AGN_OPTAX_PROCESS", f"a number from 0 to {processes - 1}")
    if process >= processes:
        raise errors.InvalidArgumentError(
            f"AGN_OPTAX_PROCESS must be below AGN_OPTAX_PROCESSES ({processes}), got "
            f"{process}"
        )
    coordinator = own.get("AGN_OPTAX_COORDINATOR")
    if not coordinator and host is None:
        raise _missing("AGN_OPTAX_COORDINATOR", "host:port of the first process")
    return {
        "coordinator_address": coordinator or f"{host}:{_FIRST_PORT + rank % _PORTS}",
        "num_processes": processes,
        "process_id": process,
    }


def _agreed(found: list[Task], what: str) -> Task | None:
    """Return the first task; None if there are none.

    Args:
      found: tasks according to several engines.
      what: name of the attribute of `Task` that all must agree on.

    Raises:
      InvalidArgumentError: the attribute is not the same in all of them.
    """
    for task in found[1:]:
        if getattr(task, what) != getattr(found[0], what):
            raise errors.InvalidArgumentError(
                f"{found[0].engine} ({found[0].said}) and {task.engine} ({task.said}) "
                "disagree on which worker this is: set AGN_OPTAX_RANK and "
                "AGN_OPTAX_WORKERS, or AGN_OPTAX_PROCESS and AGN_OPTAX_PROCESSES"
            )
    return found[0] if found else None


def _first(values: list[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _missing(name: str, what: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{name} is not set, and no engine gives its value: start this program with "
        f"`agn-optax launch`, which sets it, or set it to {what}"
    )
