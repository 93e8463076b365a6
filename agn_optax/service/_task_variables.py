"""Environment variables that cluster engines such as SLURM set for their tasks.

Each engine is a function of the environment. A task may be one of several that are
started and restarted alone (`Task.index`), as workers are. It may also be one of
several processes that start and end together (`Task.process`), such as the hosts of a
slice of TPUs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from agn_optax import errors

Variables = Mapping[str, str]

# Default of AGN_OPTAX_PORT, the center's port if an engine's variables name its host.
PORT = 5000


@dataclasses.dataclass(frozen=True)
class Task:
    """The position of this process according to one engine; None where it is unknown.

    Attributes:
      engine: name of the engine.
      said: the variables that were read, with their values, for messages.
      index, count: index and number of the units that are restarted alone, such as
        tasks of an array, pods or slices.
      process, processes: index and number of the processes that start and end together.
      host: host of process 0 of these.
      center: address of the center.
      restarts: number of times that this task was restarted.
      is_gang: whether these processes must be one worker.
    """

    engine: str
    said: str
    index: int | None = None
    count: int | None = None
    process: int = 0
    processes: int = 1
    host: str | None = None
    center: str | None = None
    restarts: int | None = None
    is_gang: bool = False


def tasks(variables: Variables) -> list[Task]:
    """Return the task of each engine that is found, the innermost engine first.

    Raises:
      InvalidArgumentError: a variable's value is not valid.
    """
    if "RAY_JOB_ID" in variables or "RAY_RAYLET_PID" in variables:
        # The variables describe Ray's node and not the actor that runs on it.
        return []
    found = (_skypilot, _kubernetes, _leader_worker_set, _slurm, _tpu)
    return [task for engine in found if (task := engine(variables)) is not None]


def number(variables: Variables, name: str, *, least: int = 0) -> int | None:
    """Return the value of a variable as an int; None if it is unset or empty.

    Raises:
      InvalidArgumentError: the value is not a whole number, or is below ``least``.
    """
    text = variables.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise errors.InvalidArgumentError(
            f"{name} must be a whole number >= {least}, got {text!r}"
        )
    return int(text)


def _skypilot(variables: Variables) -> Task | None:
    """Return the position among a task's nodes, which SkyPilot restarts together."""
    rank = number(variables, "SKYPILOT_NODE_RANK")
    nodes = number(variables, "SKYPILOT_NUM_NODES", least=1)
    if rank is None or nodes is None:
        return None
    return Task(
        "SkyPilot",
        _said(variables, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        process=rank,
        processes=nodes,
        host=variables.get("SKYPILOT_NODE_IPS", "").split("\n")[0] or None,
    )


def _kubernetes(variables: Variables) -> Task | None:
    """Return the position among the pods of an Indexed Job or the Jobs of a JobSet.

    The pods of one Job of a JobSet start together. A JobSet's manifest must set
    ``JOBSET_NAME``, ``REPLICATED_JOB_NAME`` and ``JOB_INDEX`` from the annotations of
    its pods.
    """
    pod = number(variables, "JOB_COMPLETION_INDEX")
    if pod is None:
        return None
    name, job = variables.get("JOBSET_NAME"), number(variables, "JOB_INDEX")
    if name and job is not None:
        kind = variables.get("REPLICATED_JOB_NAME", "worker")
        return Task(
            "JobSet",
            _said(variables, "JOBSET_NAME", "JOB_INDEX", "JOB_COMPLETION_INDEX"),
            index=job,
            process=pod,
            processes=number(variables, "AGN_OPTAX_PROCESSES", least=1) or 1,
            host=f"{name}-{kind}-{job}-0.{name}",
            center=f"{name}-center-0-0.{name}:{_port(variables)}",
            is_gang=True,
        )
    said = _said(variables, "JOB_COMPLETION_INDEX")
    if len(_hosts_of_slice(variables)) > 1:  # the pods are hosts of one TPU slice
        return None
    return Task("Kubernetes", said, index=pod)


def _leader_worker_set(variables: Variables) -> Task | None:
    """Return the position in a group, which is one worker or is led by the center."""
    leader = variables.get("LWS_LEADER_ADDRESS")
    size = number(variables, "LWS_GROUP_SIZE", least=1)
    pod = number(variables, "LWS_WORKER_INDEX")
    if leader is None or size is None or pod is None:
        return None
    said = _said(variables, "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    if number(variables, "AGN_OPTAX_PROCESSES") == size > 1:
        group = re.search(r"-(\d+)$", leader.partition(".")[0])
        return Task(
            "LeaderWorkerSet",
            said,
            index=None if group is None else int(group[1]),
            process=pod,
            processes=size,
            host=leader,
            is_gang=True,
        )
    if pod == 0:
        raise errors.InvalidArgumentError(
            "this is the leader of a LeaderWorkerSet, which runs the center and is no "
            f"worker ({said}); with AGN_OPTAX_PROCESSES={size} a group is one worker"
        )
    address = f"{leader}:{_port(variables)}"
    return Task("LeaderWorkerSet", said, index=pod - 1, count=size - 1, center=address)


def _slurm(variables: Variables) -> Task | None:
    """Return the position in an array, whose tasks are jobs, and in a step.

    In a heterogeneous job, the first component is the center and the others are
    workers. In a step of all components, the workers' tasks are counted from 0.
    """
    if "SLURM_JOB_ID" not in variables:
        return None
    step = number(variables, "SLURM_STEP_NUM_TASKS", least=1)
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"] if step else []
    process = number(variables, "SLURM_PROCID") or 0
    nodes, center = variables.get("SLURM_STEP_NODELIST", ""), None
    if step and (size := number(variables, "SLURM_HET_SIZE")):
        tasks = [f"SLURM_NTASKS_HET_GROUP_{i}" for i in range(size)]
        each = [number(variables, name) or 0 for name in tasks]
        names += ["SLURM_HET_SIZE", *tasks]
        host = _first_host(variables.get("SLURM_JOB_NODELIST_HET_GROUP_0", ""))
        center = host and f"{host}:{_port(variables)}"
        if step == sum(each):
            if process < each[0]:
                raise errors.InvalidArgumentError(
                    "this is the first component of a heterogeneous job, which runs "
                    f"the center and is no worker ({_said(variables, *names)})"
                )
            process, step = process - each[0], step - each[0]
            nodes = variables.get("SLURM_JOB_NODELIST_HET_GROUP_1", "")
    index = number(variables, "SLURM_ARRAY_TASK_ID")
    count = None
    if index is not None:
        array = ["SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"]
        names = [*array, "SLURM_ARRAY_TASK_COUNT", *names]
        count = _whole_array(variables, array)
    return Task(
        "SLURM",
        _said(variables, *names) or _said(variables, "SLURM_JOB_ID"),
        index=index,
        count=count,
        process=process if step else 0,
        processes=step or 1,
        host=_first_host(nodes),
        center=center,
        restarts=number(variables, "SLURM_RESTART_COUNT"),
    )


def _whole_array(variables: Variables, names: list[str]) -> int | None:
    """Return the size of an array with the indices 0, 1, ...; None for other arrays."""
    _, least, most = (number(variables, name) for name in names)
    count = number(variables, "SLURM_ARRAY_TASK_COUNT")
    if least is None or most is None or count is None:
        return None
    return count if (least, most) == (0, count - 1) else None


def _tpu(variables: Variables) -> Task | None:
    """Return the position among the hosts of a TPU slice, and among several slices."""
    hosts = _hosts_of_slice(variables)
    host = number(variables, "TPU_WORKER_ID")
    slices = number(variables, "MEGASCALE_NUM_SLICES", least=1)
    if host is None or (len(hosts) < 2 and slices is None):
        return None
    names = ["TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"]
    if slices is not None:
        names += ["MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"]
    return Task(
        "TPU",
        _said(variables, *names),
        index=None if slices is None else number(variables, "MEGASCALE_SLICE_ID"),
        count=slices,
        process=host,
        processes=max(1, len(hosts)),
        host=hosts[0] if hosts else None,
        is_gang=True,
    )


def _hosts_of_slice(variables: Variables) -> list[str]:
    return [h for h in variables.get("TPU_WORKER_HOSTNAMES", "").split(",") if h]


def _first_host(nodes: str) -> str | None:
    """Return the first host of SLURM's short form of a list of nodes.

    The first host of ``node[001-015,020],other`` is ``node001``.
    """
    found = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodes)
    return None if found is None else found[1] + (found[2] or "")


def _port(variables: Variables) -> int:
    return number(variables, "AGN_OPTAX_PORT", least=1) or PORT


def _said(variables: Variables, *names: str) -> str:
    return " ".join(f"{name}={variables[name]}" for name in names if name in variables)
