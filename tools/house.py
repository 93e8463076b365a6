"""Print the sizes of this checkout, and the docstring summaries that break the style.

python tools/house.py
"""

import ast
import inspect
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agn_optax"
TESTS = ROOT / "tests"
NOT_SUMMARIES = re.compile(
    r"(What|Whether|Of|As|How|Who|Whoever|Where|Those|Which|Whose|That)\b"
)


def python_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the Python files of a folder, without generated ones."""
    return sorted(f for f in folder.rglob("*.py") if not f.stem.endswith("_pb2"))


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """Return the docstring nodes of a module and of all that it defines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            assert isinstance(first.value, ast.Constant)
            found.append(first.value)
    return found


def code_lines(path: pathlib.Path) -> int:
    """Count the lines with code: without docstrings, comments and blank lines."""
    text = path.read_text()
    written = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type
        not in (
            *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
            *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
        )
        for line in range(token.start[0], token.end[0] + 1)
    }
    for each in docstrings(ast.parse(text)):
        assert each.end_lineno is not None
        written -= set(range(each.lineno, each.end_lineno + 1))
    return len(written)


def odd_summaries(folder: pathlib.Path) -> list[str]:
    """Return the docstring summaries that begin with a forbidden word."""
    return [
        f"{path.relative_to(ROOT)}: {summary}"
        for path in python_files(folder)
        for each in docstrings(ast.parse(path.read_text()))
        if NOT_SUMMARIES.match(summary := inspect.cleandoc(each.value).split("\n")[0])
    ]


def words(paths: list[pathlib.Path]) -> int:
    """Count words as `wc -w` does."""
    return sum(len(path.read_text().split()) for path in paths)


def mentions(word: str) -> int:
    """Count the files of the package with a name in their code."""
    return sum(
        any(
            token.type == tokenize.NAME and token.string == word
            for token in tokenize.generate_tokens(io.StringIO(f.read_text()).readline)
        )
        for f in python_files(PACKAGE)
    )


def shared_class_names(folder: pathlib.Path) -> set[str]:
    """Return the names of classes that are defined in more than one file.

    A leading underscore is ignored, and so is a class that extends one of its name.
    """
    files: dict[str, set[pathlib.Path]] = {}
    for path in python_files(folder):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                bases = [ast.unparse(base) for base in node.bases]
                if not any(base.endswith(name) for base in bases):
                    files.setdefault(name, set()).add(path)
    return {name for name, paths in files.items() if len(paths) > 1}


def has_private_import(path: pathlib.Path) -> bool:
    """Return whether a test imports a private module or name of the package."""
    names = [f"{module}.{name}" for module, name, _ in imports(path)]
    return any(n.startswith("agn_optax.") and "._" in n for n in names)


def is_private(name: str) -> bool:
    """Return whether a dotted name has a private part."""
    return re.search(r"(^|\.)_[^_]", name) is not None


def private_patches(path: pathlib.Path) -> int:
    """Count the calls of `setattr` on private modules, objects and members."""
    return sum(
        any(is_private(ast.unparse(each).strip("'")) for each in node.args[:2])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setattr"
    )


def has_private_reads(path: pathlib.Path, private: set[str]) -> bool:
    """Return whether a test uses a private attribute of an object of the package."""
    tree = ast.parse(path.read_text())
    own = {"self", "cls", *(local for _, _, local in imports(path))}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in private
        and ast.unparse(node.value) not in own
        for node in ast.walk(tree)
    )


def private_attributes(folder: pathlib.Path) -> set[str]:
    """Return the private attributes that classes in a folder assign or define."""
    text = "\n".join(path.read_text() for path in python_files(folder))
    found = re.findall(r"(?:\bself\.|^    def )(_[a-z]\w*)", text, re.M)
    return set(found) - {"_replace", "_asdict", "_fields"}  # public, of NamedTuple


def imports(path: pathlib.Path) -> list[tuple[str, str, str]]:
    """Return the module, name and local name of each import, lazy ones too.

    The name is empty where a whole module is imported.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, "", a.asname or a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(module, a.name, a.asname or a.name) for a in node.names]
    return found


def file_of(package: pathlib.Path, module: str, name: str = "") -> pathlib.Path | None:
    """Return the file of the package with a module or name, past re-exports."""
    path = package.parent.joinpath(*module.split("."), *name.split())
    if path.is_dir():
        return path / "__init__.py"
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    if not name or module.split(".", maxsplit=1)[0] != package.name:
        return None
    file = file_of(package, module)
    if file is not None and file.stem == "__init__":
        for source, original, local in imports(file):
            if local == name and (found := file_of(package, source, original)):
                return found
    return file


def circles(package: pathlib.Path) -> list[set[str]]:
    """Return the groups of files of a package that import each other in a circle.

    An import from a folder leads to the file that defines the name, and if the folder
    belongs to another layer, to its `__init__.py` as well.
    """
    files = set(python_files(package)) - {package / "__init__.py"}
    after: dict[pathlib.Path, set[pathlib.Path]] = {}
    for path in sorted(files):
        found = {file_of(package, *names[:2]) for names in imports(path)}
        folders = {file_of(package, module) for module, *_ in imports(path)}
        layer = package / path.relative_to(package).parts[0]
        found |= {f for f in folders if f and not f.is_relative_to(layer)}
        after[path] = {f for f in found if f in files and f != path}
    for middle, beyond in after.items():  # add the files behind these
        for reached in after.values():
            if middle in reached:
                reached |= beyond
    groups: list[set[str]] = []
    for path, reached in after.items():
        group = {f for f in reached if path in after[f]}
        names = {f.relative_to(package).as_posix() for f in group}
        if names and names not in groups:
            groups.append(names)
    return groups


def main() -> None:
    """Print a line for each number, and the summaries that break the style."""
    from agn_optax import service  # noqa: PLC0415

    pages = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    pages = [page for page in pages if page.name != "notes.md"]
    private = private_attributes(PACKAGE)
    odd = odd_summaries(PACKAGE) + odd_summaries(TESTS)
    rows = {
        "code lines of the package": sum(map(code_lines, python_files(PACKAGE))),
        "code lines of ops/, a part of the package": sum(
            map(code_lines, python_files(PACKAGE / "ops"))
        ),
        "code lines of the tests": sum(map(code_lines, python_files(TESTS))),
        "code lines of benchmarks/": sum(
            map(code_lines, python_files(ROOT / "benchmarks"))
        ),
        "files with the exact name `weight` in their code": mentions("weight"),
        "docstring summaries that break the style": len(odd),
        "circles of files": len(circles(PACKAGE)),
        "class names for two things, but for a class that extends its namesake": len(
            shared_class_names(PACKAGE)
        ),
        "parameters of `serve`": len(inspect.signature(service.serve).parameters),
        "words of the docs": words(pages),
        "test files with private imports": sum(
            map(has_private_import, python_files(TESTS))
        ),
        "private patches in tests": sum(map(private_patches, python_files(TESTS))),
        "test files that use private attributes": sum(
            has_private_reads(path, private) for path in python_files(TESTS)
        ),
    }
    for name, number in rows.items():
        print(f"{number:>8,}  {name}")
    for each in odd:
        print(f"          {each}")


if __name__ == "__main__":
    main()
