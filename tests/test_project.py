"""Layers, exports, README and docs of the project."""

import ast
import contextlib
import io
import pathlib
import re
import subprocess
import sys

import pytest

import agn_optax
import agn_optax.service

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(agn_optax.__file__).parent  # the checkout or the installed wheel

# The layers that each layer may import. `errors` and `_version` are below all.
LAYERS = {
    "_internal": set(),
    "rules": {"_internal"},
    "round": {"_internal", "rules"},
    "planning": {"_internal", "rules", "round"},
    "sinks": {"_internal"},
    "towers": {"_internal", "rules", "round"},
    "center": {"_internal", "rules", "round"},
    "worker": {"_internal", "rules", "round", "center"},
    "training": {"_internal", "towers", "worker", "flax", "checkpoint", "launch"},
    "service": {"_internal", "rules", "round", "center", "worker", "launch"},
    "flax": {"_internal"},
    "checkpoint": {"_internal", "rules", "round", "towers", "center", "worker"},
    "launch": {"_internal"},
    "engines": {"_internal", "service", "launch"},
    "cli": {"_internal", "rules", "center", "planning", "service", "launch", "engines"},
}
# Packages that a layer needs beyond jax, numpy, optax and the standard library.
EXTRAS = {
    "service": {
        "google",
        "grpc",
        "grpc_channelz",
        "grpc_health",
        "grpc_reflection",
        "ml_dtypes",
        "prometheus_client",
    },
    "flax": {"flax"},
    "checkpoint": {"orbax"},
    "training": {"rich"},
    "engines": {"ray", "yaml"},
    "cli": {"cryptography", "grpc", "orbax", "rich", "typer"},
}


def imports(path):
    """Yield the modules that a file imports, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(layer):
    """Return the files of a layer, which is a folder or a file."""
    folder = PACKAGE / layer
    return folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer):
    allowed = LAYERS[layer] | {layer, "errors", "_version"}
    for path in files(layer):
        for name in imports(path):
            top, *rest = name.split(".")
            if top == "agn_optax":
                assert rest[0] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_of_other_layers_use_their_public_modules(layer):
    for path in files(layer):
        for name in imports(path):
            top, *rest = name.split(".")
            if top == "agn_optax" and rest[0] != layer and (PACKAGE / rest[0]).is_dir():
                past = len(rest) > 2 or any(part[0] == "_" for part in rest[1:])
                assert not past, f"{path.relative_to(PACKAGE)} imports {name}"


def test_every_folder_is_a_layer():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name[:2] != "__"}
    assert folders == {layer for layer in LAYERS if (PACKAGE / layer).is_dir()}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_jax_optax_and_its_extras(layer):
    known = {"agn_optax", "jax", "numpy", "optax", "__future__", *EXTRAS.get(layer, ())}
    for path in files(layer):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in known or top in sys.stdlib_module_names, (
                f"{path.name} imports {name}"
            )


def test_import_loads_no_heavy_package_and_no_backend():
    heavy = [
        "flax",
        "jax.experimental.sparse",
        "grpc",
        "google.protobuf",
        "orbax",
        "matplotlib",
        "sklearn",
    ]
    program = (
        "import sys, agn_optax\n"
        f"print([m for m in {heavy} if m in sys.modules])\n"
        "import jax._src.xla_bridge as bridge\n"
        "print(bridge.backends_are_initialized())"
    )
    out = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.split("\n")[:2] == ["[]", "False"]


@pytest.mark.parametrize(
    "module",
    [
        agn_optax,
        agn_optax.rules,
        agn_optax.towers,
        agn_optax.training,
        agn_optax.center,
        agn_optax.checkpoint,
        agn_optax.service,
        agn_optax.errors,
    ],
)
def test_all_lists_exactly_the_public_names(module):
    assert sorted(module.__all__) == sorted(set(module.__all__))
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    for_layers = {  # re-exported for other layers, not for users
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert not for_layers & set(module.__all__)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in {"annotations", *for_layers}
        and not (type(value).__name__ == "module" and name not in module.__all__)
    }
    assert public | {"__version__"} == set(module.__all__) | {"__version__"}


@pytest.mark.parametrize(
    "name",
    [n for n in agn_optax.__all__ if callable(getattr(agn_optax, n))],
)
def test_public_docstrings_have_all_sections(name):
    public = getattr(agn_optax, name)
    assert public.__doc__
    if isinstance(public, type):
        return
    for section in ("Args:", "Returns:", "Example:"):
        assert section in public.__doc__ or (
            section == "Args:"
            and not public.__code__.co_argcount
            and not public.__code__.co_kwonlyargcount
        ), f"{name} has no {section}"


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


# The pages for newcomers; the other guides are slow tests.
FIRST = ("README.md", "start.md", "choosing.md", "loops.md")
BLOCKS = [
    pytest.param(
        block,
        id=f"{path.name}-{i}",
        marks=[] if path.name in FIRST else pytest.mark.slow,
    )
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for i, block in enumerate(python_blocks(path))
    if (path.name, i) != ("README.md", 0)  # it has its own test
]


def run_as_printed(block, scope):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "block", "exec"), scope)  # noqa: S102 our own text
    assert "nan" not in printed.getvalue()


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_readme_and_docs_runs_as_printed(block):
    run_as_printed(block, {})


def test_first_example_of_the_readme_finds_the_minimum():
    block = python_blocks(ROOT / "README.md")[0]
    assert len(block.strip().splitlines()) <= 10 + 1  # and a blank line
    scope = {}
    run_as_printed(block, scope)
    center = agn_optax.center_params(scope["state"])["w"]
    assert abs(float(center[0]) - 1.0) < 0.1


def test_file_tree_in_the_design_matches_the_package():
    tree = re.search(
        r"```text\n(agn_optax/.*?)```", (ROOT / "docs/design.md").read_text(), re.S
    )
    named = set(re.findall(r"\b(_?\w+\.py)\b", tree.group(1)))
    package = {p.name for p in PACKAGE.rglob("*.py")} - {"__init__.py", "_version.py"}
    assert package <= named
    folders = ("examples", "benchmarks", "tools", "docs")
    others = {path.name for folder in folders for path in (ROOT / folder).iterdir()}
    assert named - package <= others


def test_table_of_rules_has_every_rule():
    concepts = (ROOT / "docs/concepts.md").read_text()
    for name in agn_optax.rules.__all__:
        if name != "Rule":
            assert f"| `{name}` |" in concepts


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
