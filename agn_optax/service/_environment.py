"""Who a worker is, as ``agn-optax launch`` or the engine that started it says."""

from __future__ import annotations

import json
import logging
import os
from typing import Any, NamedTuple

import jax

from agn_optax import errors, rules
from agn_optax.service._engines import Task, Variables, number, tasks

RULE = "AGN_OPTAX_RULE"

_log = logging.getLogger("agn_optax")

# Process 0 of a worker of several processes listens at one of so many ports, by the
# worker's rank: workers may share a host.
_FIRST_PORT, _PORTS = 20_000, 10_000


class Environment(NamedTuple):
    """Who a worker is.

    Attributes:
      address: of the center, for `connect`.
      rank: 0, 1, ...; the chief may be rank 0.
      workers: how many there are.
      worker: this worker's name.
      restarts: how often this worker failed and was started again.
      distributed: the arguments of `initialize_distributed` for this worker alone:
        of one process, it stays alone; of several, they join each other, and no other
        worker's.
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
          MissingArgumentError: it was told none, as with ``--center HOST:PORT``.
          InvalidArgumentError: the variable makes no sense.
        """
        text = os.environ.get(RULE)
        if text is None:
            raise errors.MissingArgumentError(
                f"{RULE} is not in the environment, where `agn-optax launch --rule "
                "...` has it for the center that it starts itself: make the rule here, "
                "as that of the center"
            )
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise errors.InvalidArgumentError(
                f"{RULE} must be an object of JSON, got {text!r}: {error}"
            ) from None
        if not isinstance(settings, dict):
            raise errors.InvalidArgumentError(
                f"{RULE} must be an object of JSON, got {text!r}"
            )
        return rules.named(settings)


def environment() -> Environment:
    """Who this program is: found in its environment, and told in the log.

    Each answer comes from the first of these that has one:

    1. ``AGN_OPTAX_CENTER``, ``AGN_OPTAX_RANK``, ``AGN_OPTAX_WORKERS``,
       ``AGN_OPTAX_WORKER`` (``worker-RANK`` if it is not there),
       ``AGN_OPTAX_RESTARTS``; and of a worker of several processes
       ``AGN_OPTAX_PROCESSES``, ``AGN_OPTAX_PROCESS`` and ``AGN_OPTAX_COORDINATOR``
       (``host:port`` of its first process). `agn-optax launch` sets them on every
       engine. An actor of Ray takes nothing else, for what its node was started by is
       not about the actor.
    2. SkyPilot's nodes (``SKYPILOT_NODE_RANK``, ...).
    3. Kubernetes' Indexed Jobs (``JOB_COMPLETION_INDEX``), JobSets (``JOBSET_NAME`` and
       ``JOB_INDEX`` as well) and LeaderWorkerSets (``LWS_WORKER_INDEX``, ...), whose
       leader is the center.
    4. SLURM's arrays (``SLURM_ARRAY_TASK_ID``, ...) and steps (``SLURM_PROCID``, ...).
    5. Slices of TPUs (``MEGASCALE_SLICE_ID``, ``TPU_WORKER_ID``, ...).

    What is restarted alone is a worker: a task of an array, a pod of a Job, a slice.
    Processes that start together, such as the tasks of a step, may be one worker or
    several: ``AGN_OPTAX_PROCESSES`` says how many of them a worker has.

    Returns:
      The center's address, this worker's rank and name, and how many workers there are.

    Raises:
      InvalidArgumentError: a variable is missing or makes no sense, or engines do not
        agree; names the variables. Or this process is in a job of `jax.distributed`
        with others than those of its worker, all of which would end with it.

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
        raise _missing("AGN_OPTAX_CENTER", "with the center's address")
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
            f"worker {name!r} has {processes} process(es), and this one is in a job of "
            f"jax.distributed with {jax.process_count()}: with one of these, all would "
            "end. Join them by agn_optax.initialize_distributed("
            "**service.environment().distributed), before anything else"
        )
    return Environment(address, rank, workers, name, restarts, distributed)


def _place(own: Variables, found: list[Task]) -> tuple[int, int, str]:
    """This worker's rank, of how many, and who says so."""
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
        raise _missing("AGN_OPTAX_RANK", "with 0, 1, ...")
    if workers is None:
        raise _missing("AGN_OPTAX_WORKERS", "with the number of workers")
    if rank >= workers:
        raise errors.InvalidArgumentError(
            f"the rank must be below AGN_OPTAX_WORKERS ({workers}), got {rank} ({by})"
        )
    return rank, workers, by


def _counted(task: Task) -> int | None:
    """How many workers an engine says that there are."""
    if task.engine == "SLURM" and task.count is None:
        raise errors.InvalidArgumentError(
            "an array that does not begin at 0, or has gaps, may have grown or may be "
            f"a part ({task.said}): say --array=0-N, or AGN_OPTAX_WORKERS with the "
            "number of all workers, of whom this is then the one with its task's number"
        )
    return task.count


def _of_processes(
    own: Variables, found: list[Task], workers: int | None
) -> tuple[int | None, int | None, str]:
    """Rank and number of workers whose processes are started together."""
    task = _agreed([task for task in found if task.processes > 1], "process")
    if task is None or task.is_gang:
        return None, workers, ""
    each = number(own, "AGN_OPTAX_PROCESSES", least=1)
    if each is None or task.processes % each:
        raise errors.InvalidArgumentError(
            f"{task.engine} has started {task.processes} processes together "
            f"({task.said}): say AGN_OPTAX_PROCESSES=1 if each is a worker, or "
            f"{task.processes} if all are one worker's towers, got {each}"
        )
    return task.process // each, workers or task.processes // each, task.said


def _processes(own: Variables, found: list[Task], rank: int) -> dict[str, Any]:
    """The arguments of `initialize_distributed` for this worker."""
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
        raise _missing("AGN_OPTAX_PROCESS", f"with 0 to {processes - 1}")
    if process >= processes:
        raise errors.InvalidArgumentError(
            f"AGN_OPTAX_PROCESS must be below AGN_OPTAX_PROCESSES ({processes}), got "
            f"{process}"
        )
    coordinator = own.get("AGN_OPTAX_COORDINATOR")
    if not coordinator and host is None:
        raise _missing("AGN_OPTAX_COORDINATOR", "with host:port of the first process")
    return {
        "coordinator_address": coordinator or f"{host}:{_FIRST_PORT + rank % _PORTS}",
        "num_processes": processes,
        "process_id": process,
    }


def _agreed(found: list[Task], what: str) -> Task | None:
    """The first of them, where none of the others says something else."""
    for task in found[1:]:
        if getattr(task, what) != getattr(found[0], what):
            raise errors.InvalidArgumentError(
                f"{found[0].engine} ({found[0].said}) and {task.engine} ({task.said}) "
                "both say which worker this is, and do not agree: say it by "
                "AGN_OPTAX_RANK and AGN_OPTAX_WORKERS, or AGN_OPTAX_PROCESS and "
                "AGN_OPTAX_PROCESSES"
            )
    return found[0] if found else None


def _first(values: list[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _missing(name: str, what: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{name} is not in the environment, and no engine says it: start this program "
        f"with `agn-optax launch`, which sets it, or set it yourself, {what}"
    )
