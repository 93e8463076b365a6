"""A process of a job that agrees with others, and takes commands from its test."""

import jax
from jax._src import distributed

from agn_optax import errors
from agn_optax._internal import agreement
from helpers import children

groups = {}


def start(coordinator, processes, process):
    jax.distributed.initialize(
        coordinator, processes, process, heartbeat_timeout_seconds=100
    )
    everyone = tuple(range(processes))
    groups["start"] = agreement.of_job(everyone, "start")
    groups["group"] = agreement.Processes(everyone, "group")
    return {}


def gather(group, value, timeout, times=1):
    """Return what all gave, or the last error."""
    answer = {}
    for _ in range(times):
        try:
            answer = {"all": groups[group].gather(value, timeout, "a round")}
        except errors.CenterError as error:
            answer = {"raised": str(error)}
    return answer


def end():
    """Agree that the group is not needed any more."""
    start = groups["start"]
    start.ended.add("group")
    start.forget_groups(start.gather(sorted(start.ended), 60.0, "the end"))
    return {}


def keys():
    """Return the number of keys in the store of the job."""
    return {"keys": len(distributed.global_state.client.key_value_dir_get("agn_optax"))}


def has(group, key):
    """Return whether the store has a key."""
    return {"has": groups[group]._try_get(key) is not None}


if __name__ == "__main__":
    children.serve_commands(
        {"start": start, "gather": gather, "end": end, "keys": keys, "has": has}
    )
