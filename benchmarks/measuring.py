"""Measurement, tables, command line and helper processes that all benchmarks share.

On a shared machine only ratios of neighbors in time are meaningful, so the forms of a
task are run in turns.
"""

import argparse
import contextlib
import importlib.metadata
import inspect
import json
import multiprocessing
import os
import pathlib
import platform
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "examples")]  # some benchmarks use examples

T = TypeVar("T")
Row = dict[str, Any]
Run = Callable[[], float | None]  # returns the seconds if it measures the time itself
PATIENCE = 600.0  # s for one answer of a process; a longer wait is an error
# Wide enough for tables, if the output is not a terminal.
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)


class Form(NamedTuple):
    """One way to do a task, which can be run repeatedly."""

    name: str
    peer: str  # the form whose time is 1
    run: Run


class Times(dict[str, list[float]]):
    """The seconds of every run of every form, by the form's name."""

    def median(self, name: str) -> float:
        """Return the median seconds of a form."""
        return float(np.median(self[name]))

    def relative(self, name: str, peer: str) -> Any:
        """Return the times of a form relative to those of its peer."""
        return np.array(self[name]) / np.array(self[peer])

    def rows(self, forms: Iterable[Form], size: float | None = None) -> list[Row]:
        """Return a table row for each form, with its time relative to its peer's.

        If it moves ``size`` bytes in both directions, it has speeds and rates.
        """
        rows = []
        for name, peer, _ in forms:
            seconds, relative = self.median(name), self.relative(name, peer)
            more = spread("ratio", relative)
            if size is not None:
                more = spread("speed", 1 / relative) | {"a_second": 1 / seconds}
                more["GB/s"] = 2e-9 * size / seconds
            row: Row = {"form": name, "milliseconds": 1e3 * seconds, "peer": peer}
            rows.append(row | more)
        return rows


def spread(name: str, values: Any) -> Row:
    """Return the median of some values as ``name``, and their quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75]).round(3).tolist()
    return {name: middle, "quartiles": [low, high]}


class Benchmark:
    """A benchmark; the annotated attributes of a subclass are its options.

    An option whose default is a tuple takes several values; one named ``only`` takes
    some of its default. A subclass says which options ``--quick`` stands for, beside
    ``--repeats 1``: it only shows that everything works. Others may follow.
    """

    _quick: ClassVar[str]
    repeats = 7  # also an option

    def __init_subclass__(cls, quick: str = "") -> None:
        cls._quick = f"--repeats 1 {quick}"

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)
        self.tables: list[Row] = []
        self.stack = contextlib.ExitStack()  # resources of the next table

    def run(self) -> None:
        """Measure, and add tables."""
        raise NotImplementedError

    def use(self, resource: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context, which ends with the next table."""
        return self.stack.enter_context(resource)

    def turns(self, forms: Sequence[Form], *, shuffled: bool = False) -> Times:
        """Measure every form ``repeats`` times, after a warm-up run.

        If ``shuffled``, each turn has a new random order, for forms that leave work
        behind that slows down the next one.
        """
        for form in forms:
            form.run()
        times = Times((form.name, []) for form in forms)
        order = np.random.default_rng(0)
        for _ in track(range(self.repeats), console=CONSOLE, transient=True):
            turn = np.arange(len(forms))
            for i in order.permutation(turn) if shuffled else turn:
                start = time.perf_counter()
                own = forms[i].run()
                whole = time.perf_counter() - start
                times[forms[i].name].append(whole if own is None else own)
        return times

    def add(self, key: str, title: str, rows: Sequence[Row]) -> None:
        """Print a table, and end what it used; ``key`` names it for programs.

        Raises:
          ValueError: a number is not finite.
        """
        self.stack.close()
        for row in rows:
            try:
                json.dumps(row, allow_nan=False)
            except ValueError:
                raise ValueError(f"{title}: a number is not finite: {row}") from None
        self.tables.append({"key": key, "title": title, "rows": rows})
        CONSOLE.print(Markdown(markdown(self.tables[-1])))

    @classmethod
    def main(cls) -> None:
        """Run with the options of the command line, and write the JSON if requested."""
        parser = argparse.ArgumentParser(
            description=inspect.getdoc(inspect.getmodule(cls)),
            epilog=inspect.getdoc(cls),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--json", type=pathlib.Path, help="also write the numbers")
        parser.add_argument("--quick", action="store_true", help="tiny: does it work?")
        for name in (*cls.__annotations__, "repeats"):
            default = getattr(cls, name)
            is_many = isinstance(default, tuple)
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                default=default,
                type=type(default[0] if is_many else default),
                nargs="*" if is_many else None,
                choices=default if name == "only" else None,
            )
        options = vars(parser.parse_args())
        if options["quick"]:
            options = vars(parser.parse_args([*cls._quick.split(), *sys.argv[1:]]))
        benchmark = cls(**options)
        with benchmark.stack:
            benchmark.run()
        described = machine()  # after `run`, which may configure JAX
        CONSOLE.print(", ".join(f"{key} {value}" for key, value in described.items()))
        if (file := options["json"]) is not None:
            program, *given = sys.argv
            command = ["python", f"benchmarks/{pathlib.Path(program).name}", *given]
            found = {"command": shlex.join(command), "machine": described}
            file.write_text(json.dumps(found | {"tables": benchmark.tables}, indent=1))


def machine() -> Row:
    """Describe the machine of the measurements."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    packages = ("jax", "optax", "grpcio", "agn_optax")
    return {
        "device": jax.devices()[0].device_kind,
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def text(value: Any) -> str:
    """Format a number, quartiles or words for a table."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
    return "" if value is None else str(value)


def markdown(table: Row) -> str:
    """Format a table of the JSON as Markdown."""
    columns = list(table["rows"][0])
    lines = [
        [column.replace("_", " ") for column in columns],
        ["---", *["---:"] * (len(columns) - 1)],
        *([text(row[column]) for column in columns] for row in table["rows"]),
    ]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table['title']}**\n\n{body}\n"


class Process(ProcessPoolExecutor):
    """A separate process, which runs functions for this one, in order.

    It is spawned, never forked: neither JAX nor gRPC survives a fork. As a context
    manager it is killed at the end.

    Args:
      cores: cores on which it may run; None for all cores of this process.
    """

    def __init__(self, cores: Collection[int] | None = None) -> None:
        super().__init__(1, multiprocessing.get_context("spawn"))
        with on_cores(cores):  # inherited by the child, before it imports anything
            self.pid: int = self.call(os.getpid)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in the process, and return its result or raise its error."""
        return self.submit(function, *args, **kwargs).result(PATIENCE)

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.shutdown()


@contextlib.contextmanager
def on_cores(cores: Collection[int] | None) -> Iterator[None]:
    """Let threads and processes that this thread starts run on these cores only."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, before if cores is None else cores)
        yield
    finally:
        os.sched_setaffinity(0, before)
