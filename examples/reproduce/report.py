"""The report of a program of this folder: claims, verdicts, tables and a picture.

A program measures, says with `Report.claim` what its source says and what was seen,
and ends with `Report.finish`, which prints all and, with ``--folder``, writes
NAME.json and NAME.svg. `results.py` writes docs/results.md from these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

Verdict = Literal["reproduced", "in part", "not reproduced", "not measured"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of a source beside what was measured here."""

    says: str  # what the source says, as one sentence
    expected: str  # the source's numbers
    measured: str  # this program's numbers, with their spread
    verdict: Verdict
    reason: str = ""  # why it is not, or only in part, reproduced


@dataclasses.dataclass(frozen=True)
class Table:
    """Numbers under a title, for people."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as Markdown, without its title."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(each) + " |" for each in lines)

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        words = (
            "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join([self.title, *(line.rstrip() for line in words)])


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Return the median of some values, one per seed, with the smallest and largest."""
    seen = np.sort(np.asarray(list(values), float))
    middle = f"{np.median(seen):.{digits}f}"
    if len(seen) == 1:
        return middle
    return f"{middle} ({seen[0]:.{digits}f} to {seen[-1]:.{digits}f})"


def arguments(
    doc: str, given: Sequence[str] | None = None, **more: Any
) -> argparse.Namespace:
    """Parse the options that all programs have, and a program's own.

    Args:
      doc: the program's docstring; its first line becomes the description.
      given: the words of the command line, by default those of the process.
      **more: default values of the program's own options; an option has the type of
        its default.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="in small, in a minute")
    parser.add_argument("--seeds", type=int, help="number of seeds (3; with --quick 1)")
    parser.add_argument("--folder", type=pathlib.Path, help="write NAME.json, NAME.svg")
    for name, default in more.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default
        )
    options = parser.parse_args(given)
    if options.seeds is None:
        options.seeds = 1 if options.quick else 3
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    return options


class Report:
    """The claims, tables and picture of a program.

    Args:
      name: the program's name, which its files carry.
      title: the heading of its section.
      source: authors, title, year and arXiv id.
      options: the options of `arguments`.
    """

    def __init__(
        self, name: str, title: str, source: str, options: argparse.Namespace
    ) -> None:
        self.name, self.title, self.source = name, title, source
        self.claims: list[Claim] = []
        self.tables: list[Table] = []
        self.figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        self._options = options
        self._began, self._cpu = time.monotonic(), time.process_time()

    def progress(self, words: str) -> None:
        """Say on the standard error stream what is being measured."""
        seconds = time.monotonic() - self._began
        print(f"{self.name} {seconds:6.0f} s  {words}", file=sys.stderr, flush=True)

    def claim(
        self,
        says: str,
        expected: str,
        measured: str,
        verdict: Verdict,
        reason: str = "",
    ) -> None:
        """Add a claim; a verdict other than "reproduced" needs a reason."""
        if verdict != "reproduced" and not reason:
            raise ValueError(f"the claim {says!r} is {verdict}: give the reason")
        self.claims.append(Claim(says, expected, measured, verdict, reason))

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Add a table; cells that are not strings are written with `str`."""
        cells = [[str(cell) for cell in row] for row in rows]
        self.tables.append(Table(title, list(columns), cells))

    def finish(self) -> int:
        """Print tables and claims, write the files, and return the exit status, 0."""
        for table in self.tables:
            print(table, end="\n\n")
        for claim in self.claims:
            print(f"{claim.verdict}: {claim.says}")
            print(f"  source: {claim.expected}\n  here: {claim.measured}")
            if claim.reason:
                print(f"  {claim.reason}")
        if self._options.folder is not None:
            self._write(self._options.folder)
        return 0

    def _write(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "title": self.title,
            "source": self.source,
            "quick": self._options.quick,
            "seeds": self._options.seeds,
            "cpu_minutes": round((time.process_time() - self._cpu) / 60, 1),
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "tables": [dataclasses.asdict(table) for table in self.tables],
        }
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        if self.figure.axes:
            # Text stays text: it is small, and the same at every run.
            with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
                path = folder / f"{self.name}.svg"
                self.figure.savefig(path, metadata={"Date": None})
