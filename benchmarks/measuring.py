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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

ROOT = pathlib.Path(__file__).parents[1]
# For examples and helpers of tests.
sys.path += map(str, (ROOT, ROOT / "examples", ROOT / "tests"))

Row = dict[str, Any]
Run = Callable[[], float | None]  # returns the seconds if it measures the time itself
PACKAGES = ("jax", "optax", "grpcio", "agn_optax")
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

    def rows(self, forms: Iterable[Form], size: float | None = None) -> list[Row]:
        """Return a table row for each form, with its time relative to its peer's.

        If it moves ``size`` bytes in both directions, it has speeds and rates.
        """
        rows = []
        for name, peer, _ in forms:
            seconds, ratios = self.median(name), np.divide(self[name], self[peer])
            row: Row = {"form": name, "milliseconds": 1e3 * seconds, "peer": peer}
            if size is None:
                row |= spread("ratio", ratios)
            else:
                row |= spread("speed", 1 / ratios) | {"a_second": 1 / seconds}
                row["GB/s"] = 2e-9 * size / seconds
            rows.append(row)
        return rows


def spread(name: str, values: Any) -> Row:
    """Return the median of some values as ``name``, and their quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75]).round(3).tolist()
    return {name: middle, "quartiles": [low, high]}


class Benchmark:
    """A benchmark; the annotated attributes of a subclass are options of its `run`.

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
        self.use = self.stack.enter_context

    def turns(self, forms: Sequence[Form]) -> Times:
        """Measure every form ``repeats`` times, after a warm-up run.

        Each turn has a new random order, because a form may leave work behind that
        slows down the next one.
        """
        for form in forms:
            form.run()
        times = Times((form.name, []) for form in forms)
        order = np.random.default_rng(0)
        for _ in track(range(self.repeats), console=CONSOLE, transient=True):
            for i in order.permutation(len(forms)):
                start = time.perf_counter()
                seconds = forms[i].run()
                whole = time.perf_counter() - start
                times[forms[i].name].append(whole if seconds is None else seconds)
        return times

    def add(self, key: str, title: str, rows: Sequence[Row]) -> None:
        """Print a table, and end what it used; ``key`` names it for programs.

        Raises:
          ValueError: a number is not finite.
        """
        self.stack.close()
        for row in rows:
            if {"NaN", "Infinity"} & set(re.findall(r"\w+", json.dumps(row))):
                raise ValueError(f"{title}: a number is not finite: {row}")
        self.tables.append({"key": key, "title": title, "rows": rows})
        shown = markdown(self.tables[-1])
        if CONSOLE.is_terminal:
            CONSOLE.print(Markdown(shown))
        else:  # in a file, as a page of the docs has it
            print(shown)

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
        benchmark: Any = cls(**options)
        with benchmark.stack:
            benchmark.run()
        described = machine()  # after `run`, which may configure JAX
        CONSOLE.print(", ".join(f"{key} {value}" for key, value in described.items()))
        if (file := options["json"]) is not None:
            program = f"benchmarks/{pathlib.Path(sys.argv[0]).name}"
            command = shlex.join(["python", program, *sys.argv[1:]])
            results = {"command": command, "machine": described}
            file.write_text(
                json.dumps(results | {"tables": benchmark.tables}, indent=1)
            )


def machine() -> Row:
    """Describe the machine of the measurements."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    return {
        "device": jax.devices()[0].device_kind,
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
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

    It is spawned, never forked: neither JAX nor gRPC survives a fork. It is a
    context manager, which kills the process at the end.
    """

    def __init__(self) -> None:
        super().__init__(1, multiprocessing.get_context("spawn"))
        self._pid: int | None = self.call(os.getpid)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in the process, and return its result or raise its error."""
        return self.submit(function, *args, **kwargs).result(PATIENCE)

    def kill(self) -> None:
        """Kill the process, once: its number may soon be another process's."""
        pid, self._pid = self._pid, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __exit__(self, *exception: Any) -> None:
        self.kill()
        self.shutdown()
