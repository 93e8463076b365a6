"""What the two ends of an exchange take on this machine, measured.

Exchanges of two sizes with a center in another process, over a real socket, lie on a
straight line: overhead, and seconds a byte. The same with a center in this process tell
which part of a byte's time is the center's arithmetic.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors, rules, service
from agn_optax.center import Center, LocalCenter
from agn_optax.planning import Cluster, Cost, Machine, abstract, plan

_SIZES = (1_000, 10_000_000)  # float32 parameters
_REPEATS = 9
_SERVE = (*("-m", "agn_optax.cli", "serve"), *("--rule", "downpour", "--json"))


def calibrate(sizes: Sequence[int] = _SIZES, repeats: int = _REPEATS) -> Machine:
    r"""Measures the constants of `agn_optax.planning.Machine`, in about ten seconds.

    .. math::
        \text{endpoint rate} = \frac{\Delta (m + b)}{\Delta T - \Delta T'}; \qquad
        \text{apply rate} = \frac{\Delta u}{\Delta T'}; \qquad
        \text{overhead} = T_0 - \frac{(m + b)_0}{\text{endpoint rate}}
            - \frac{u_0}{\text{apply rate}}

    with medians :math:`T` of exchanges with a center in another process, :math:`T'`
    with one in this process, and differences between two sizes. All arrays are in the
    host's memory; what an accelerator takes to copy them comes on top.

    Args:
      sizes: two numbers of float32 parameters.
      repeats: timed exchanges of each size.

    Returns:
      The constants.

    Raises:
      CenterError: the center did not start, or the times are all noise: more bytes
        took no longer.
    """
    small, large = (_cost(size) for size in sizes)
    with jax.default_device(jax.devices("cpu")[0]), contextlib.ExitStack() as stack:
        here = [
            _seconds(LocalCenter(rules.downpour()), size, repeats) for size in sizes
        ]
        processes = [stack.enter_context(_serving()) for _ in sizes]
        there = []
        for process, size in zip(processes, sizes, strict=True):
            with _connected(process) as center:
                there.append(_seconds(center, size, repeats))
    arithmetic = here[1] - here[0]
    ends = there[1] - there[0] - arithmetic
    if arithmetic <= 0 or ends <= 0:
        raise errors.CenterError(
            f"exchanges of {sizes[0]} and {sizes[1]} parameters took {there} s with a "
            f"center in another process and {here} s in this one, which is no line: "
            "this machine is too busy, try again"
        )
    endpoint_rate = (_bytes(large) - _bytes(small)) / ends
    apply_rate = (large.applied - small.applied) / arithmetic
    line = _bytes(small) / endpoint_rate + small.applied / apply_rate
    return Machine(
        overhead=max(0.0, there[0] - line),
        endpoint_rate=endpoint_rate,
        apply_rate=apply_rate,
    )


def _cost(size: int) -> Cost:
    """For its bytes; the cluster does not matter."""
    cluster = Cluster(step_time=1.0, bandwidth=1.0)
    return plan(rules.downpour(), abstract(size), cluster, inner=optax.sgd(1.0))


def _bytes(cost: Cost) -> int:
    return cost.message + cost.answer


def _seconds(center: Center, size: int, repeats: int) -> float:
    """Of one exchange, the median."""
    params = jnp.zeros(size)  # a message of zeros, too
    version = center.initialize(params, worker="calibrate").version
    times = []
    for _ in range(repeats + 2):  # the first ones compile and connect
        begin = time.perf_counter()
        answer: Any = center.exchange(
            params, anchor_version=version, worker="calibrate"
        )
        jax.block_until_ready(answer.params)
        times.append(time.perf_counter() - begin)
        version = answer.version
    center.leave("calibrate")
    return statistics.median(times[2:])


@contextlib.contextmanager
def _serving() -> Iterator[subprocess.Popen[str]]:
    """A process with a center that has no parameters yet."""
    command = [sys.executable, *_SERVE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 our own program
    with process:  # at the end, waits for it
        try:
            yield process
        finally:
            process.kill()


def _connected(process: subprocess.Popen[str]) -> service.RemoteCenter:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise errors.CenterError("the center to be measured did not start")
    center = service.connect(json.loads(line)["address"], rules.downpour())
    assert isinstance(center, service.RemoteCenter)  # as it has one address
    return center
