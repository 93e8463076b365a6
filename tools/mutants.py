"""Put faults into the package, one at a time, and print which ones the tests notice.

A fault is a changed operator or constant, a dropped statement or keyword, a negated
condition, or two swapped arguments. Each is put into a copy of the project, where the
tests for the file run until one fails. Tried faults are recorded in mutants-output/ and
not tried again: a run continues where the last one ended.

    python tools/mutants.py                             # everything, in random order
    python tools/mutants.py rules/_rule.py --count 20   # some faults of one file
    python tools/mutants.py rules round --list          # only lists the faults
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
OUTPUT = ROOT / "mutants-output"
# The tests for each folder, fast ones first.
NEAR = {
    "rules": ("tests/rules", "tests/laws", "tests/parity"),
    "round": ("tests/rules", "tests/laws", "tests/towers/test_placement.py"),
    "center": ("tests/center", "tests/parity"),
    "worker": ("tests/center", "tests/laws", "tests/parity"),
}
NEEDED = ("agn_optax", "conftest.py", "pyproject.toml", "tests")

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A piece of a file, and its replacement."""

    path: str  # path within the package
    line: int
    start: int  # offset of the piece, in bytes of the file
    end: int
    text: str

    @property
    def name(self) -> str:
        """A name that stays the same as long as the file does."""
        return f"{self.path}:{self.line}:{self.start}: {' '.join(self.text.split())}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield replacements for ``node``, each wrong in one point."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            yield changed(node, op=SWAPPED[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield changed(node, ops=[SWAPPED[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(args=args, keywords=keywords):
            if len(args) > 1:
                yield changed(node, args=[args[1], args[0], *args[2:]])
            for i in range(len(keywords)):
                yield changed(node, keywords=keywords[:i] + keywords[i + 1 :])
        case ast.If(test=test):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below ``node`` that compute: no annotations, no error texts."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                yield child
                yield from code_of(child)


def faults_of(path: pathlib.Path) -> Iterator[Fault]:
    """Yield all faults that can be put into one file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in code_of(ast.parse(source)):
        for variant in variants(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(variant))
            if isinstance(node, ast.If):  # the condition only, not the body
                start = starts[node.test.lineno - 1] + node.test.col_offset
                end = starts[node.test.end_lineno - 1] + node.test.end_col_offset
                text = f"not ({ast.unparse(node.test)})"
            elif isinstance(node, ast.expr):
                text = f"({text})"
            yield Fault(
                str(path.relative_to(ROOT / "agn_optax")), node.lineno, start, end, text
            )


def source_with(fault: Fault, source: bytes) -> bytes:
    """Return the source of a file with a fault."""
    return source[: fault.start] + fault.text.encode() + source[fault.end :]


def is_noticed(fault: Fault, project: pathlib.Path, seconds: float) -> bool:
    """Return whether a test fails or hangs with ``fault`` in the copy ``project``."""
    file = project / "agn_optax" / fault.path
    whole = file.read_bytes()
    file.write_bytes(source_with(fault, whole))
    try:
        return not passes(NEAR[fault.path.split("/")[0]], project, seconds)
    finally:
        file.write_bytes(whole)


def passes(tests: tuple[str, ...], project: pathlib.Path, seconds: float) -> bool:
    """Return whether all tests pass in time."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:randomly"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(project / "compiled")}
    with (project / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(project), **cache},
            stdout=output,
            stderr=output,
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("where", nargs="*", default=list(NEAR), help="folders or files of the package")
    add("--count", type=int, help="number of faults to try (default: all)")
    add("--seed", type=int, default=0, help="seed of the random order (default 0)")
    add(
        "--seconds",
        type=float,
        default=1800,
        help="timeout of the tests for one fault, in seconds (default 1800)",
    )
    add("--list", action="store_true", help="list the faults without trying them")
    args = parser.parse_args()
    paths = [ROOT / "agn_optax" / where for where in args.where]
    files = [
        f for path in paths for f in (path.rglob("*.py") if path.is_dir() else [path])
    ]
    faults = [fault for file in sorted(files) for fault in faults_of(file)]
    random.Random(args.seed).shuffle(faults)  # noqa: S311 not for secrets
    if args.list:
        print(*(fault.name for fault in faults), sep="\n")
        return

    OUTPUT.mkdir(exist_ok=True)
    results = OUTPUT / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    tried = {found["fault"]: found["noticed"] for found in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        project = pathlib.Path(folder)
        for name in NEEDED:
            make = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            make(ROOT / name, project / name)
        for near in {NEAR[fault.path.split("/")[0]] for fault in faults}:
            if not passes(near, project, args.seconds):
                print((project / "output.txt").read_text())
                sys.exit(f"tests fail even without a fault: {', '.join(near)}")
        for fault in [f for f in faults if f.name not in tried][: args.count]:
            tried[fault.name] = is_noticed(fault, project, args.seconds)
            print("noticed" if tried[fault.name] else "MISSED ", fault.name, flush=True)
            with results.open("a") as file:
                line = {"fault": fault.name, "noticed": tried[fault.name]}
                file.write(json.dumps(line) + "\n")
    here = [tried[fault.name] for fault in faults if fault.name in tried]
    print(
        f"{sum(here)} of {len(here)} faults were noticed; "
        f"{len(faults) - len(here)} have not been tried"
    )


if __name__ == "__main__":
    main()
