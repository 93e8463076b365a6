"""Layers, exports, README and docs of the project."""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import agn_optax
import agn_optax.service
from agn_optax import errors
from agn_optax._internal import combinations, notices

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(agn_optax.__file__).parent  # the checkout or the installed wheel

# The layers that each layer may import. `errors` and `_version` are below all.
LAYERS = {
    "_internal": set(),
    "rules": {"_internal"},
    "round": {"_internal", "rules"},
    "towers": {"_internal", "rules", "round"},
    "center": {"_internal", "rules", "round"},
    "tape": {"_internal", "rules", "round", "center"},
    "worker": {"_internal", "rules", "round", "center"},
    "service": {"_internal", "rules", "round", "center", "worker"},
    "simulate": {"_internal", "rules", "round", "center", "worker", "tape"},
    "checkpoint": {"_internal", "rules", "round", "towers", "center", "worker"},
    "ops": {
        "_internal",
        "rules",
        "round",
        "center",
        "service",
        "simulate",
        "tape",
    },
}
# Packages that a layer needs beyond jax, numpy, optax and the standard library.
EXTRAS = {
    "service": {
        "google",
        "grpc",
        "grpc_health",
        "ml_dtypes",
    },
    "checkpoint": {"orbax"},
    "simulate": {"matplotlib"},
    "ops": {
        "cryptography",
        "grpc",
        "matplotlib",
        "orbax",
        "prometheus_client",
        "rich",
        "typer",
        "yaml",
    },
}

# The rooms of these folders, and the other rooms that each of them may import. The one
# circle is meant: a transport hands calls to the servicer, and a server has transports.
ROOMS = {
    "service": {
        "wire": set(),
        "security": set(),
        "server": {"wire", "security", "transports"},
        "transports": {"wire", "security", "server"},
        "client": {"wire", "security", "transports"},
    },
    "ops": {
        "planning": set(),
        "launch": set(),
        "keys": set(),
        "watch": set(),
        "doctor": set(),
        "engines": {"launch"},
        "cli": {"planning", "launch", "keys", "doctor", "engines"},
    },
}
# The only import of the operations wing from outside: made when a page is asked for.
INTO_OPS = {("service/server/_server.py", "agn_optax.ops.watch.Page")}


@functools.cache
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools/house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imports(path):
    """Yield the modules that a file imports, as dotted names."""
    for module, name, _ in house().imports(path):
        assert not module.startswith("."), f"relative import in {path}"
        yield f"{module}.{name}" if name else module


def files(layer):
    """Return the files of a layer, which is a folder or a file."""
    folder = PACKAGE / layer
    return folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]


# The page is imported when `serve(page=...)` asks for it, and needs the service.
CIRCLE = {
    "ops/watch/__init__.py",
    "ops/watch/_monitor.py",
    "ops/watch/_page.py",
    "service/__init__.py",
    "service/server/_server.py",
}


def test_no_files_import_each_other_but_for_the_page():
    assert house().circles(PACKAGE) == [CIRCLE]


@pytest.mark.parametrize("line", ["from pkg.a import A", "from pkg.b import A"])
def test_search_finds_circles_of_lazy_and_typed_imports(line, tmp_path):
    for folder in ("pkg", "pkg/a", "pkg/b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/a/__init__.py").write_text("from pkg.a._a import A as A")
    (tmp_path / "pkg/b/__init__.py").write_text("from pkg.a import A as A")
    (tmp_path / "pkg/a/_a.py").write_text("def f():\n    from pkg.b._b import B")
    (tmp_path / "pkg/b/_b.py").write_text(f"if TYPE_CHECKING:\n    {line}")
    assert {"a/_a.py", "b/_b.py"} <= set.union(*house().circles(tmp_path / "pkg"))


def is_into_ops(path, name):
    return (path.relative_to(PACKAGE).as_posix(), name) in INTO_OPS


@pytest.mark.few(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer):
    allowed = LAYERS[layer] | {layer, "errors", "_version", "_signals"}
    for path in files(layer):
        for name in imports(path):
            top, *rest = name.split(".")
            if top == "agn_optax" and not is_into_ops(path, name):
                assert rest[0] in allowed, f"{path.name} imports {name}"


@pytest.mark.few(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_imports_of_other_layers_use_their_public_modules(layer):
    for path in files(layer):
        for name in imports(path):
            top, *rest = name.split(".")
            if is_into_ops(path, name):
                continue
            if top == "agn_optax" and rest[0] != layer and (PACKAGE / rest[0]).is_dir():
                past = len(rest) > 2 or any(part[0] == "_" for part in rest[1:])
                assert not past, f"{path.relative_to(PACKAGE)} imports {name}"


# A function of a rule's part, called or passed on, perhaps from a variable with the
# part's name; and a function of the rule itself, unless it is compared with None.
FUNCTION_OF_A_PART = re.compile(
    r"(record|penalty|center|discount|codec|combine|method)"
    r"\.(init|update|encode|decode|returned|function)$"
)
FUNCTION_OF_A_RULE = re.compile(r"rule\.(contribution|message|adopt)$")
PART_TO_MAP = re.compile(r"([\w.]+\.)?map_params\([^,]*rule\b")  # it calls `init`


def uses_functions_of_a_rule(code):
    """Return whether code calls, passes on or stores a function of a rule."""
    nodes = list(ast.walk(ast.parse(code)))
    only_compared = {
        node.left
        for node in nodes
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
        and ast.unparse(node.comparators[0]) == "None"
    }
    calls = {ast.unparse(node) for node in nodes if isinstance(node, ast.Call)}
    attributes = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and node not in only_compared
    }
    searches = FUNCTION_OF_A_PART.search, FUNCTION_OF_A_RULE.search
    return any(map(PART_TO_MAP.match, calls)) or any(
        search(text) for search in searches for text in attributes
    )


def test_only_the_round_uses_the_functions_of_a_rule():
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if uses_functions_of_a_rule(path.read_text())
    }
    outside = {each for each in users if not each.startswith("rules/")}
    assert outside == {"round/_round.py"}


@pytest.mark.parametrize(
    "code",
    [
        "rule.message(k, c)",
        "self._rule.adopt(x, c)",
        "rule.center.init(c)",
        "jax.eval_shape(core.rule.record.init, c)",
        "rule.penalty.update(g, s)",
        "rule.discount.init(m)",
        "codec.encode(k, s)",
        "rule.codec.decode(k, c)",
        "rule.combine.function(m, total)",
        "jax.vmap(rule.message)(k, c)",
        "f = rule.contribution",
        "partial(rule.adopt, c)",
        "rule.contribution.recover(k, x, a, steps)",
        "(rule.adopt or f)(x, c)",
        "rule.message(k, c) if rule.message else k",
        "(f if rule.adopt is None else rule.adopt)(x, c)",
        "functions = [core.rule.message]",
        "rule.adopt is f",
        "optax.tree.map_params(rule.center, pack, state)",
        "map_params(self._rule.record.init, f, state)",
        "optax.tree.map_params(\n    rule.center,\n    pack,\n    state,\n)",
    ],
)
def test_search_finds_uses_of_the_functions_of_a_rule(code):
    assert uses_functions_of_a_rule(code)


@pytest.mark.parametrize(
    "code",
    [
        "rule.message is None",
        "if x and rule.adopt is not None: pass",
        "submission.message",
        "rule.codec.answers",
        "optax.tree.map_params(optimizer, f, state)",
    ],
)
def test_search_ignores_what_calls_no_function_of_a_rule(code):
    assert not uses_functions_of_a_rule(code)


@pytest.mark.parametrize(
    ("layer", "room"),
    [(layer, room) for layer, rooms in ROOMS.items() for room in rooms],
)
def test_rooms_import_only_the_rooms_below_them(layer, room):
    allowed = ROOMS[layer][room] | {room}
    for path in files(f"{layer}/{room}"):
        for name in imports(path):
            _, *rest = name.split(".")
            if rest[:1] == [layer] and rest[1] in ROOMS[layer]:
                assert rest[1] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("layer", ROOMS)
def test_every_folder_of_a_layer_is_a_room(layer):
    folders = {p.name for p in (PACKAGE / layer).iterdir() if p.is_dir()}
    assert folders - {"__pycache__"} == set(ROOMS[layer])


TRAINS = """
import jax.numpy as jnp, optax, agn_optax
from agn_optax import errors, service

rule = agn_optax.rules.agn(optax.sgd(0.1))
try:
    service.serve(rule, jnp.zeros(2), page="localhost:0")
except errors.MissingExtraError as error:
    print(error)
with service.serve(rule, jnp.zeros(2)) as server:
    center = service.connect(server.address, rule)
    with agn_optax.Worker(center, optax.sgd(0.1), period=2) as worker:
        params, state = worker.start()
        for _ in range(4):
            updates, state = worker.tx.update(jnp.ones(2), state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
    center.close()
    print(agn_optax.__file__, server.center.version)
"""


def test_package_works_without_the_operations_wing(tmp_path):
    left_out = shutil.ignore_patterns("ops", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "agn_optax", ignore=left_out)
    ended = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", TRAINS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rejection, trained = ended.stdout.splitlines()
    assert rejection.startswith("page needs agn_optax/ops, which this copy")
    assert trained == f"{tmp_path / 'agn_optax/__init__.py'} 2"


def test_every_folder_is_a_layer():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name[:2] != "__"}
    assert folders == {layer for layer in LAYERS if (PACKAGE / layer).is_dir()}


@pytest.mark.few(3)
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
        agn_optax.center,
        agn_optax.checkpoint,
        agn_optax.service,
        agn_optax.simulate,
        agn_optax.tape,
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
def test_code_in_readme_and_docs_runs_as_printed(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
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


def test_page_of_combinations_has_exactly_the_rows_of_the_table():
    lines = (ROOT / "docs/combinations.md").read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line[:2] == "| "]
    assert found[2:] == [
        [*features, reason] for features, reason in combinations.COMBINATIONS.items()
    ]


def test_every_row_of_the_combinations_has_a_check():
    known = {
        (combinations.plain(first), combinations.plain(second))
        for first, second in combinations.COMBINATIONS
    }
    checked = {
        tuple(ast.literal_eval(argument) for argument in node.args[:2])
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "combinations.reject"
    }
    assert checked == known
    assert len(known) == len(combinations.COMBINATIONS)


@pytest.mark.parametrize("features", combinations.COMBINATIONS, ids=" and ".join)
def test_error_of_a_combination_says_what_came_and_why(features):
    first, second = map(combinations.plain, features)
    with pytest.raises(errors.InvalidArgumentError) as error:
        combinations.reject(first, second, "a=1, b=2")
    reason = combinations.plain(combinations.COMBINATIONS[features])
    assert str(error.value) == (
        f"{first} and {second} do not go together, got a=1, b=2: {reason}"
    )


def test_page_of_notices_has_exactly_the_rows_of_the_table():
    lines = (ROOT / "docs/notices.md").read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line[:2] == "| "]
    assert found[2:] == [
        [
            f"`{name}`",
            row.observer,
            f"{getattr(notices.Thresholds, name):g}",
            notices.condition(name),
            row.remedy,
        ]
        for name, row in notices.CHECKS.items()
    ]


def test_every_check_has_a_threshold():
    fields = dataclasses.fields(notices.Thresholds)
    assert [field.name for field in fields] == list(notices.CHECKS)


@pytest.mark.parametrize("observer", ["center", "worker"])
def test_every_check_is_measured_by_its_observer(observer):
    measured = {
        node.args[0].value
        for path in (PACKAGE / observer).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("notices.measure", "self._measure"))
        and isinstance(node.args[0], ast.Constant)  # not in a method that passes it on
    }
    rows = notices.CHECKS.items()
    assert measured == {name for name, row in rows if row.observer == observer}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
