"""Helpers of several test files: optimizers, trees, gradients and loops."""

import contextlib
import functools
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import agn_optax
from agn_optax.center import Submission
from helpers import ports, shared


def leaves_on_the_host():
    """Return whether this JAX leaves outputs of programs in host memory.

    JAX 0.10.0 moves them to the device.
    """
    program = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
    compiled = program.lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
    return compiled.output_shardings.memory_kind == "pinned_host"


needs_host = pytest.mark.skipif(
    not leaves_on_the_host(), reason="this JAX leaves nothing on the host"
)
# Sealed memory files, which two processes of a user may share, are a part of Linux.
SHARES_MEMORY = hasattr(os, "memfd_create")
shares = pytest.mark.skipif(
    not SHARES_MEMORY, reason="no processes share memory on this system"
)
MEMORIES = ["device", pytest.param("host", marks=needs_host)]

INNERS = {
    "sgd": lambda: shared.sgd(0.1),
    "momentum": lambda: shared.sgd(0.05, momentum=0.9),
    "nesterov": lambda: shared.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: shared.adam(0.05),
    "adamw": lambda: shared.adamw(0.05, weight_decay=0.01),
}


@functools.cache
def each_inner(names=tuple(INNERS)):
    """Return several inner optimizers in one: each trains the subtree of its name."""
    return optax.partition(
        {name: INNERS[name]() for name in names}, {name: name for name in names}
    )


# The rules, with a center optimizer for those that take one.
RULES = {
    "agn": lambda: shared.agn(shared.adam(0.05)),
    "agn_window": shared.agn_window,
    "downpour": shared.downpour,
    "dynsgd": shared.dynsgd,
    "average": shared.average,
    "diloco": shared.diloco,
    "easgd": lambda: shared.easgd(0.3),
    "easgd_rho": lambda: shared.easgd(0.3, rho=0.5),
}

DROP_INS = {
    "agn": agn_optax.agn,
    "agn_window": agn_optax.agn_window,
    "downpour": agn_optax.downpour,
    "dynsgd": agn_optax.dynsgd,
    "average": agn_optax.average,
    "diloco": agn_optax.diloco,
    "easgd": agn_optax.easgd,
    "easgd_rho": functools.partial(agn_optax.easgd, rho=0.1),
}

# Relative and absolute tolerance after a few dozen steps, for values of about 1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-2}


def tree(dtype="float32", seed=0):
    """Return a small nested tree with a scalar, an empty leaf and a None."""
    rng = np.random.default_rng(seed)
    leaf = lambda *shape: jnp.asarray(  # noqa: E731
        np.asarray(rng.normal(size=shape)).astype(jnp.dtype(dtype))
    )
    return {
        "layers": [{"w": leaf(3, 2)}, (None,)],
        "scale": leaf(),
        "unused": leaf(0, 5),
    }


def each_tree(names=tuple(INNERS), dtype="float32"):
    """Return the parameters of `each_inner`: a leaf for each optimizer."""
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(3, 2)), dtype) for name in names}


def feeds(like, steps, seed=1, workers=()):
    """Return ``steps`` targets for every leaf, as numpy [steps, *workers, ...]."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.normal(size=(steps, *workers, *x.shape)).astype(x.dtype),
        like,
    )


def gradient(params, feed):
    """Return the gradient of a quadratic with its minimum at ``feed``."""
    return jax.tree.map(lambda x, f: (x - f) * jnp.asarray(0.7, x.dtype), params, feed)


def step(tx, params, state, feed):
    updates, state = tx.update(gradient(params, feed), state, params)
    return optax.apply_updates(params, updates), state


def run(tx, params, all_feeds, state=None):
    """Return every step's parameters (stacked), the last ones, and the last state."""
    state = tx.init(params) if state is None else state
    (params, state), trajectory = trajectories(tx)((params, state), all_feeds)
    return trajectory, params, state


@functools.lru_cache(maxsize=32)
def trajectories(tx):
    """Compile a loop once for all runs of the same optimizer."""

    def body(carry, feed):
        params, state = step(tx, *carry, feed)
        return (params, state), params

    return jax.jit(lambda carry, all_feeds: jax.lax.scan(body, carry, all_feeds))


@functools.lru_cache(maxsize=32)
def local_step(tx):
    """Compile a step once for all runs of the same optimizer."""
    return jax.jit(functools.partial(step, tx))


@functools.lru_cache(maxsize=32)
def exchange_of(split):
    """Compile an exchange once for all runs of the same optimizer."""
    return jax.jit(split.exchange)


def run_split(split, params, all_feeds, period, state=None):
    """Run the split form's loop, with one period or with a period for each round."""
    local, exchange = local_step(split), exchange_of(split)
    state = split.init(params) if state is None else state
    steps = jax.tree.leaves(all_feeds)[0].shape[0]
    periods = [period] * (steps // period) if isinstance(period, int) else period
    ends = set(np.cumsum(periods).tolist())
    for i in range(steps):
        params, state = local(params, state, at(all_feeds, i))
        if i + 1 in ends:
            params, state = exchange(params, state)
    return params, state


def at(all_feeds, i):
    """Return the feeds of one step."""
    return jax.tree.map(lambda f: f[i], all_feeds)


def submissions(*contributions):
    """Return contributions as the first messages of as many workers."""
    return [Submission(1, each, anchor_version=0) for each in contributions]


def run_worker(worker, params, state, all_feeds):
    """Run a worker's loop with a center outside the program."""
    local = local_step(worker.tx)
    for i in range(jax.tree.leaves(all_feeds)[0].shape[0]):
        params, state = worker.exchange(*local(params, state, at(all_feeds, i)))
    return params, state


@contextlib.contextmanager
def held():
    """Yield a function that keeps the first device busy with an array until the end.

    Its program loops until it finds a number in memory that it shares with the host, so
    no test has to guess how long a computation takes. Code that blocks on the array
    before the end waits for a minute.
    """
    memory = np.zeros(32, np.int32)
    aligned = (
        -memory.ctypes.data // 4 % 16
    )  # JAX copies arrays that are not aligned to 64 bytes
    ended = memory[aligned : aligned + 16]
    words = jax.device_put(ended, jax.devices()[0], may_alias=True)
    assert words.unsafe_buffer_pointer() == ended.ctypes.data

    def end():
        ended[:] = 1

    def hold(x):
        first, *others = [shard.data for shard in x.addressable_shards]
        shards = [_until(words, first), *others]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    watchdog = threading.Timer(60, end)
    watchdog.start()
    try:
        yield hold
    finally:
        watchdog.cancel()
        watchdog.join()
        end()


@jax.jit
def _until(ended, x):
    """Return ``x`` once ``ended`` is set."""
    _, product = jax.lax.while_loop(
        lambda carry: ended[carry[0] % ended.size] == 0,
        lambda carry: (carry[0] + 1, carry[1] @ carry[1]),
        (0, jnp.eye(64)),
    )
    return x + (0 * product[0, 0]).astype(x.dtype)


@contextlib.contextmanager
def nothing_compiles():
    """Assert that nothing is traced, lowered or compiled in any thread."""
    with compilations(stage="") as compiled:
        yield
    assert not compiled, compiled


@contextlib.contextmanager
def compilations(stage="backend_compile"):
    """List the compilations in any thread; ``stage=""`` adds tracing and lowering."""
    compiled = []

    def listen(event, seconds, **details):
        if event.startswith(f"/jax/core/compile/{stage}"):
            compiled.append((event, details))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def find_state(opt_state):
    """Return the one `ExchangeState` of an optimizer state, inside any wrappers."""

    def is_found(node):
        return isinstance(node, agn_optax.ExchangeState)

    nodes = jax.tree.leaves(opt_state, is_leaf=is_found)
    (found,) = filter(is_found, nodes)
    return found


def assert_close(actual, expected, dtype=None, tolerance=None):
    """Compare to ``tolerance``, or to that of ``dtype`` or of each leaf's dtype."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        near = tolerance or TOLERANCE.get(dtype or str(jnp.result_type(b)), 0)
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(b, np.float64),
            rtol=near,
            atol=near,
            err_msg=jax.tree_util.keystr(path),
        )


def assert_identical(actual, expected):
    """Compare bit for bit, including dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def run_processes(program, arguments, count, timeout=800):
    """Run the processes of one `jax.distributed` job and return their outputs."""
    job = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": ports.free_address(),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", program, *map(str, arguments)],
            env={**os.environ, **job, "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, text in zip(processes, outputs, strict=True):
        assert process.returncode == 0, text
    return outputs
