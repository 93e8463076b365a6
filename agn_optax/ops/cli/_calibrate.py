"""Measure the constants of `agn_optax.ops.planning.Machine` on this machine.

The time of an exchange is modeled as a straight line: an overhead plus seconds per
byte. Exchanges of two sizes, with a center in another process and over a real socket,
determine the line. The center's arithmetic is also timed alone, in this process, to
separate its part of the time per byte.
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

from agn_optax import errors, rules, service
from agn_optax.center import Center, Store, Submission
from agn_optax.ops.planning import Machine
from agn_optax.rules import codecs

_SIZES = (1_000, 10_000_000)  # float32 parameters
# Bytes per float32 parameter: in message and answer; read and written by downpour's
# arithmetic, which reads the message twice, and reads and writes the center.
_BYTES_SENT, _BYTES_APPLIED = 8, 16
_CODEC_SHAPE = (10, 1_000_000)  # leaves and elements of each, on which codecs are timed
_REPEATS = 9
_ROUNDS = 5  # at most, of `_REPEATS` samples each, until the times grow with the size
_SERVE = (*("-m", "agn_optax.ops.cli", "serve"), *("--rule", "downpour", "--json"))


def calibrate(
    codec: codecs.Codec | None = None,
    *,
    sizes: Sequence[int] = _SIZES,
    repeats: int = _REPEATS,
) -> Machine:
    r"""Measure the constants of `agn_optax.ops.planning.Machine`, in a few seconds.

    .. math::
        \text{endpoint rate} = \frac{\Delta (m + b)}{\Delta T - \Delta T'}; \qquad
        \text{apply rate} = \frac{\Delta u}{\Delta T'}; \qquad
        \text{overhead} = T_0 - \frac{(m + b)_0}{\text{endpoint rate}}
            - \frac{u_0}{\text{apply rate}}

    where :math:`T` is the time of an exchange with a center in another process,
    :math:`T'` the time of the center's arithmetic in this process, :math:`m` and
    :math:`b` the bytes of message and answer, and :math:`u` the bytes that the
    arithmetic reads and writes. :math:`\Delta` is the difference between the two sizes,
    and the index 0 marks the smaller one. Exchanges go over a socket, as between
    machines. All arrays are in host memory; copies to and from an accelerator take
    additional time.

    Each time is the minimum of its samples. Other load on the machine only adds time,
    so the minimum is the best estimate, and more samples improve it; a median would
    include the load of the moment. The four times are sampled in turns, so that a slow
    moment affects all of them.

    A codec is timed alone, in this process, on vectors of normal random numbers.
    Without a codec, or with the identity, `Machine` keeps its default rates.

    Args:
      codec: the codec of the contributions; None for no codec.
      sizes: two numbers of float32 parameters.
      repeats: samples of each time. While more bytes seem to take no longer, more
        samples are taken, up to five times as many in all.

    Returns:
      The constants.

    Raises:
      CenterError: the center did not start, or the times are only noise: more bytes
        took no longer.
    """
    with jax.default_device(jax.devices("cpu")[0]), contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_server()) for _ in sizes]
        timers = [_arithmetic(size) for size in sizes]
        for process, size in zip(processes, sizes, strict=True):
            center = stack.enter_context(_connection(process))
            timers.append(_exchange(center, size))
        fastest = np.full(len(timers), np.inf)
        for _ in range(_ROUNDS):
            for _ in range(repeats):
                fastest = np.minimum(fastest, [timer() for timer in timers])
            local, remote = fastest[:2].tolist(), fastest[2:].tolist()
            machine = _machine(sizes, local, remote)
            if machine is not None:
                return dataclasses.replace(machine, **coding_rates(codec, repeats))
    raise errors.CenterError(
        f"exchanges of {sizes[0]} and {sizes[1]} parameters took {remote} s with a "
        f"center in another process, and their arithmetic {local} s in this process: "
        "times must grow with the size, so this machine is too busy; try again"
    )


def _machine(
    sizes: Sequence[int], local: Sequence[float], remote: Sequence[float]
) -> Machine | None:
    """Return the constants, or None if more bytes took no longer."""
    arithmetic = local[1] - local[0]
    ends = remote[1] - remote[0] - arithmetic
    if arithmetic <= 0 or ends <= 0:
        return None
    endpoint_rate = _BYTES_SENT * (sizes[1] - sizes[0]) / ends
    apply_rate = _BYTES_APPLIED * (sizes[1] - sizes[0]) / arithmetic
    line = sizes[0] * (_BYTES_SENT / endpoint_rate + _BYTES_APPLIED / apply_rate)
    return Machine(
        overhead=max(0.0, remote[0] - line),
        endpoint_rate=endpoint_rate,
        apply_rate=apply_rate,
    )


def coding_rates(
    codec: codecs.Codec | None, repeats: int = _REPEATS
) -> dict[str, float]:
    """Return a codec's rates for `Machine`, in bytes per second before encoding."""
    if codec is None or codec.is_identity:
        return {}
    # The arrays are larger than an allocator's reserve, so that temporary memory of the
    # codec comes from the system, as in an exchange.
    numbers = np.random.default_rng(0).standard_normal(_CODEC_SHAPE, np.float32)
    params = [jnp.asarray(row) for row in numbers]
    state = jax.jit(codec.init)(params)
    encode = jax.jit(codec.encode, donate_argnums=1)
    # Decoded into donated memory, as in a center.
    decode = jax.jit(codec.decode, donate_argnums=1, keep_unused=True)
    into = jax.tree.map(jnp.zeros_like, params)
    sent, state = encode(params, state)

    def encoding() -> object:
        nonlocal sent, state
        sent, state = encode(params, state)
        return sent, state

    def decoding() -> object:
        nonlocal into
        into = decode(sent, into)
        return into

    def rate(run: Callable[[], object]) -> float:
        seconds = _timed(run)
        return numbers.nbytes / min(seconds() for _ in range(repeats))

    return {"encode_rate": rate(encoding), "decode_rate": rate(decoding)}


def _arithmetic(size: int) -> Callable[[], float]:
    """Return a function that times a served center's arithmetic for one message."""
    # A `LocalCenter` would take longer: its callers may keep its versions, so it
    # allocates each one. A served center overwrites the last one, as this store does.
    store = Store(rules.downpour(), jnp.zeros(size), None, None)
    message = jnp.zeros(size)
    submission = Submission(1, message, anchor_version=0)

    def run() -> object:
        norm = store.norm(message, store.current.params)
        np.asarray(norm)  # a center waits for it, to check that it is finite
        store.apply([submission], [0])
        return store.current.params

    return _timed(run)


def _exchange(center: Center, size: int) -> Callable[[], float]:
    """Return a function that times one exchange."""
    params = jnp.zeros(size)  # also the message
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
    """Return a function that measures the seconds until ``run``'s result is ready."""

    def seconds() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - begin

    for _ in range(2):  # warm-up: compiles and connects
        seconds()
    return seconds


@contextlib.contextmanager
def _server() -> Iterator[subprocess.Popen[str]]:
    """Run a process that serves a center without parameters, and kill it at the end."""
    command = [sys.executable, *_SERVE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 our own program
    with process:  # waits for its end
        try:
            yield process
        finally:
            process.kill()


def _connection(process: subprocess.Popen[str]) -> service.RemoteCenter:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise errors.CenterError("the center for the measurement did not start")
    # Through a socket, as between machines, and not through shared memory.
    center = service.connect(
        json.loads(line)["address"], rules.downpour(), transports=["socket"]
    )
    assert isinstance(center, service.RemoteCenter)  # because of the one address
    return center
