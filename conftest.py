"""Pytest settings: eight CPU devices, and programs that compile quickly."""

import collections
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator

# Tests compile hundreds of tiny programs, many of them alike, and run each a few times.
# All test processes share a cache of compiled programs, which the next session reuses,
# and late optimization passes are off. Memory use and collectives, which tests check,
# are decided before these passes.
flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # The fusion emitters of 0.10 take four fifths of the compile time. Newer releases
    # are faster, and reject the flag.
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
# By default XLA makes one thread per device. A device that is ahead takes a thread for
# its next step, and the last device of a collective may then find none: a deadlock.
os.environ.setdefault("PJRT_NPROC", "32")
if importlib.metadata.version("jaxlib") == "0.10.0":
    # 0.10.0 warns for every program from the cache that another machine compiled it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = pathlib.Path(__file__).parent / ".pytest_cache" / "compiled"
    if len(list(_compiled.glob("*"))) > 30_000:  # the programs of a few sessions
        shutil.rmtree(_compiled)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled)

# The folder where centers write their tokens, for programs of the same user to read.
_runtime = tempfile.mkdtemp(prefix="agn-optax-")
os.environ["XDG_RUNTIME_DIR"] = _runtime

# JAX reads its environment variables when it is imported.
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# No deadline, because an example may have to compile a program first.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")

# A shell that runs the tests in the background makes them ignore Ctrl-C. The processes
# that tests start and interrupt would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    """Turn the garbage collector off while pytest collects: nothing becomes garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark combinations of a test's parameters as slow if they cover no new value.

    `make test` then runs just enough combinations of each test to cover every value of
    every parameter, and `make slow` runs the others. A test marked ``few(n)`` covers
    only n: which of them differs from test to test, so that together such tests cover
    every rule.
    """
    tests = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for combinations in tests.values():
        # By their text, because objects that are alike may still compare as different.
        values = {
            item: set(map(repr, item.callspec.params.items())) for item in combinations
        }
        seen: set[str] = set()
        covering = []
        while values:
            best = max(values, key=lambda item: len(values[item] - seen))
            if values[best] <= seen:
                break
            seen |= values.pop(best)
            covering.append(best)
        left = [*values]
        if (few := covering[0].get_closest_marker("few")) is not None:
            covering.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            left += covering[few.args[0] :]
        for item in left:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Turn the garbage collector on again, for objects made from now on."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Delete the folder of tokens: all processes that used it have ended."""
    shutil.rmtree(_runtime, ignore_errors=True)


@pytest.fixture
def unix_address() -> Iterator[str]:
    """An address of a Unix socket: systems limit its path, and ``tmp_path`` is long."""
    with tempfile.TemporaryDirectory(prefix="agn-optax-") as folder:
        yield f"unix:{folder}/center"
