"""What the two ends of an exchange take on this machine, measured.

Exchanges of two sizes with a center in another process, over a real socket, lie on a
straight line: overhead, and seconds a byte. The center's arithmetic alone, in this
process, tells which part of a byte's time that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import errors, rules, service
from agn_optax.center import Center, Store, Submission
from agn_optax.ops.planning import Cluster, Cost, Machine, abstract, plan
from agn_optax.rules import codecs

_SIZES = (1_000, 10_000_000)  # float32 parameters
_CODED = (10, 1_000_000)  # leaves of so many, of which a codec's times are measured
_REPEATS = 9
_ROUNDS = 5  # of so many repeats, until there is a line
_SERVE = (*("-m", "agn_optax.ops.cli", "serve"), *("--rule", "downpour", "--json"))


def calibrate(
    codec: codecs.Codec | None = None,
    *,
    sizes: Sequence[int] = _SIZES,
    repeats: int = _REPEATS,
) -> Machine:
    r"""Measures the constants of `agn_optax.ops.planning.Machine`, in a few seconds.

    .. math::
        \text{endpoint rate} = \frac{\Delta (m + b)}{\Delta T - \Delta T'}; \qquad
        \text{apply rate} = \frac{\Delta u}{\Delta T'}; \qquad
        \text{overhead} = T_0 - \frac{(m + b)_0}{\text{endpoint rate}}
            - \frac{u_0}{\text{apply rate}}

    with times :math:`T` of exchanges with a center in another process, :math:`T'` of
    its arithmetic in this one, and differences between two sizes. Exchanges go over a
    socket, as between machines. All arrays are in the host's memory; what an
    accelerator takes to copy them comes on top.

    Each time is the minimum of its samples. Whoever else is at work here only adds to
    them, so the minimum is nearest to what this machine takes, and more samples bring
    it nearer; a median has in it whatever went on just then. The four are measured in
    turns, so that a slow spell hits all of them.

    What a codec takes for vectors of normal numbers is measured alone, in this
    process; `Machine` has defaults for it where none is given that takes any time.

    Args:
      codec: how contributions will travel.
      sizes: two numbers of float32 parameters.
      repeats: samples of each time, and five times as many at most, if what was found
        is no line.

    Returns:
      The constants.

    Raises:
      CenterError: the center did not start, or the times are all noise: more bytes
        took no longer.
    """
    costs = [_cost(size) for size in sizes]
    with jax.default_device(jax.devices("cpu")[0]), contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_serving()) for _ in sizes]
        forms = [_arithmetic(size) for size in sizes]
        for process, size in zip(processes, sizes, strict=True):
            center = stack.enter_context(_connected(process))
            forms.append(_exchange(center, size))
        least = np.full(len(forms), np.inf)
        for _ in range(_ROUNDS):
            for _ in range(repeats):
                least = np.minimum(least, [form() for form in forms])
            here, there = least[:2].tolist(), least[2:].tolist()
            if (found := _line(costs, here, there)) is not None:
                return dataclasses.replace(found, **coding_rates(codec, repeats))
    raise errors.CenterError(
        f"exchanges of {sizes[0]} and {sizes[1]} parameters took {there} s with a "
        f"center in another process, and their arithmetic {here} s in this one, which "
        "is no line: this machine is too busy, try again"
    )


def _line(
    costs: Sequence[Cost], here: Sequence[float], there: Sequence[float]
) -> Machine | None:
    """The constants, if more bytes took longer."""
    small, large = costs
    arithmetic = here[1] - here[0]
    ends = there[1] - there[0] - arithmetic
    if arithmetic <= 0 or ends <= 0:
        return None
    endpoint_rate = (_bytes(large) - _bytes(small)) / ends
    apply_rate = (large.applied - small.applied) / arithmetic
    line = _bytes(small) / endpoint_rate + small.applied / apply_rate
    return Machine(
        overhead=max(0.0, there[0] - line),
        endpoint_rate=endpoint_rate,
        apply_rate=apply_rate,
    )


def coding_rates(
    codec: codecs.Codec | None, repeats: int = _REPEATS
) -> dict[str, float]:
    """Bytes a second, as they are, that a codec encodes and decodes: for `Machine`."""
    if codec is None or codec.is_identity:
        return {}
    # As much as no allocator keeps at hand: a codec that needs memory for a moment has
    # it from the system, as in an exchange.
    numbers = np.random.default_rng(0).standard_normal(_CODED, np.float32)
    params = [jnp.asarray(row) for row in numbers]
    state = jax.jit(codec.init)(params)
    encode = jax.jit(codec.encode, donate_argnums=1)
    # Into memory that is there, as a center's programs do.
    decode = jax.jit(codec.decode, donate_argnums=1, keep_unused=True)
    into = jax.tree.map(jnp.zeros_like, params)
    sent, state = encode(params, state)

    def encoding() -> object:
        nonlocal state
        sent, state = encode(params, state)
        return sent, state

    def decoding() -> object:
        nonlocal into
        into = decode(sent, into)
        return into

    forms = {"encode_rate": _timed(encoding), "decode_rate": _timed(decoding)}
    return {
        name: numbers.nbytes / min(form() for _ in range(repeats))
        for name, form in forms.items()
    }


def _cost(size: int) -> Cost:
    """For its bytes; the cluster does not matter."""
    cluster = Cluster(step_time=1.0, bandwidth=1.0)
    return plan(rules.downpour(), abstract(size), cluster, inner=optax.sgd(1.0))


def _bytes(cost: Cost) -> int:
    return cost.message + cost.answer


def _arithmetic(size: int) -> Callable[[], float]:
    """Measures what a served center does with a message, each time it is called."""
    # A `LocalCenter` here would take longer: whoever adopts its versions may keep them,
    # so each is in new memory. A served one writes over the last, as this store does.
    store = Store(rules.downpour(), jnp.zeros(size), None, None)
    message = jnp.zeros(size)
    submission = Submission(1, message, anchor_version=0)

    def run() -> object:
        norm = store.norm(message, store.current.params)
        np.asarray(norm)  # which must be finite before the message is applied
        store.apply([submission], [0])
        return store.current.params

    return _timed(run)


def _exchange(center: Center, size: int) -> Callable[[], float]:
    """Measures an exchange, each time it is called."""
    params = jnp.zeros(size)  # a message of zeros, too
    version = center.initialize(params, worker="calibrate").version
    session = center.join("calibrate")
    sequences = itertools.count(1)

    def run() -> object:
        nonlocal version
        answer = session.exchange(Submission(next(sequences), params, version))
        version = answer.version
        return answer.params

    return _timed(run)


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    """Seconds until what ``run`` returns is there."""

    def seconds() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - begin

    for _ in range(2):  # the first ones compile and connect
        seconds()
    return seconds


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
    # Not through shared memory, as if both were on one machine for good.
    center = service.connect(
        json.loads(line)["address"], rules.downpour(), transports=["socket"]
    )
    assert isinstance(center, service.RemoteCenter)  # as it has one address
    return center
