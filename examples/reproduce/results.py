"""Run the programs of this folder, and write the tables of docs/results.md.

    python examples/reproduce/results.py                # all of them
    python examples/reproduce/results.py --only agn     # one; the others' files stay
    python examples/reproduce/results.py --write        # only the page, from the files

Each program writes its numbers and its picture into docs/figures/results/. The page's
text is written by hand; what stands between a pair of comments is written from the
files: the table of all claims, and the tables of each program.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from report import Table

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGE, FOLDER = DOCS / "results.md", DOCS / "figures/results"
HELPERS = {"report", "results", "language", "classes"}  # not programs


def programs() -> list[str]:
    """Return the names of all programs of this folder, sorted."""
    return sorted({path.stem for path in HERE.glob("*.py")} - HELPERS)


def found(name: str) -> dict[str, Any] | None:
    """Return a program's numbers, or None if it has not run."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _summary() -> str:
    """Return the table of all claims."""
    rows = []
    for name in programs():
        for claim in (found(name) or {"claims": []})["claims"]:
            verdict = f"**{claim['verdict']}**"
            if claim["reason"]:
                verdict += f": {claim['reason']}"
            rows.append(
                [
                    f"[{name}](#{name.replace('_', '-')})",
                    claim["says"],
                    claim["expected"],
                    claim["measured"],
                    verdict,
                ]
            )
    columns = ["program", "claim", "source", "here", "verdict"]
    return Table("", columns, rows).markdown()


def _section(name: str) -> str:
    """Return what the page shows of a program."""
    numbers = found(name)
    if numbers is None:
        raise SystemExit(
            f"{FOLDER / name}.json is missing: run results.py --only {name}"
        )
    parts = []
    if (FOLDER / f"{name}.svg").exists():
        parts.append(f"![{numbers['title']}](figures/results/{name}.svg)")
    for table in (Table(**each) for each in numbers["tables"]):
        title = table.title.rstrip(":")
        parts.append(f"{title}:\n\n{table.markdown()}")
    seeds = f"{numbers['seeds']} seeds" if numbers["seeds"] else "Nothing is random"
    parts.append(
        f"Source: {numbers['source']}. {seeds}; "
        f"{numbers['cpu_minutes']} minutes of one core's time"
        f"{' in small (`--quick`)' if numbers['quick'] else ''}."
    )
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page's text with its written parts made anew."""

    def part(found: re.Match[str]) -> str:
        name = found[1]
        inside = _summary() if name == "claims" else _section(name)
        return f"<!-- begin {name} -->\n\n{inside}\n\n<!-- end {name} -->"

    pattern = r"<!-- begin (\w+) -->.*?<!-- end \1 -->"
    return re.sub(pattern, part, text, flags=re.DOTALL)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=programs(), default=programs())
    parser.add_argument("--quick", action="store_true", help="in small, and no page")
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args(given)
    failed = []
    for name in () if options.write else options.only:
        print(f"== {name}", flush=True)
        words = ["--quick"] if options.quick else ["--folder", str(FOLDER)]
        command = [sys.executable, "-B", str(HERE / f"{name}.py"), *words]
        if subprocess.call(command) != 0:  # noqa: S603 - our own program
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not options.quick:
        PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
