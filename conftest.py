"""Pytest: eight devices where there is one CPU, and programs that compile quickly."""

import collections
import gc
import importlib.metadata
import multiprocessing
import os
import pathlib
import shutil
import signal
import tempfile

# Tests compile hundreds of tiny programs, many of them alike, and run each a few times:
# all processes share what is compiled, and the next session finds it. What is said of
# memory and collectives is settled before the passes that are left out.
flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its fusion emitters take four fifths of the time. Newer ones are quicker, and do
    # not know the flag.
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
# One thread for each device is what XLA makes, and all of them may come to wait for one
# another in collectives of two steps, of which one has a device that has no thread.
os.environ.setdefault("PJRT_NPROC", "32")
if importlib.metadata.version("jaxlib") == "0.10.0":
    # It says of every program from the cache that another machine made it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = pathlib.Path(__file__).parent / ".pytest_cache" / "compiled"
    if len(list(_compiled.glob("*"))) > 30_000:  # of a few sessions
        shutil.rmtree(_compiled)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled)

# Where centers leave their tokens, and programs of the same user find them.
_runtime = tempfile.mkdtemp(prefix="agn-optax-")
os.environ["XDG_RUNTIME_DIR"] = _runtime

# JAX reads its variables when it is imported.
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# An example may compile something, which takes as long as it takes.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would the
# processes that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    """Turn the garbage collector off during collection, of which all stays."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what meets no new value, where a test has several parameters.

    So `make test` runs as many of a test's combinations as it takes for every value of
    every parameter to be there once, and `make slow` runs the others.
    """
    tests = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for combinations in tests.values():
        # Objects may differ where they are equal, and have no order: text will do.
        values = {
            item: set(map(repr, item.callspec.params.items())) for item in combinations
        }
        seen: set[str] = set()
        while values:
            best = max(values, key=lambda item: len(values[item] - seen))
            if values[best] <= seen:
                break
            seen |= values.pop(best)
        for item in values:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Turn it on again, for what is made from now on."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs semaphores where the system has none: without /dev/shm, say."""
    if "TensorBoard" in item.name or "tensorboard_reads" in item.name:
        try:
            multiprocessing.Lock()
        except OSError as error:
            pytest.skip(f"tensorboardX needs semaphores: {error}")


def pytest_unconfigure() -> None:
    """The processes that found something there have ended."""
    shutil.rmtree(_runtime, ignore_errors=True)
