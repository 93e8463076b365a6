"""The wheel, the sdist, the extras, the lock file, and types as users see them."""

import ast
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import jax
import pytest
import test_project
from helpers import typed_program
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agn_optax

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
pytestmark = pytest.mark.slow
in_checkout = pytest.mark.skipif(
    not (ROOT / "agn_optax").is_dir(), reason="builds the checkout, which is not here"
)


def run(*command, where, **environment):
    """Run a program and return its output; on failure, show all output."""
    ended = subprocess.run(  # noqa: S603 our own programs
        [sys.executable, *map(str, command)],
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(source, to):
    """Build wheel and sdist as `python -m build` or pip would."""
    run("-m", "hatchling", "build", "--directory", to, where=source)
    (wheel,), (sdist,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return a folder with the contents of the wheel, which has no scripts to build."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(folder)  # noqa: S202 our own
    return folder


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@in_checkout
def test_wheel_contains_exactly_the_package(built):
    tracked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "agn_optax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "agn_optax/py.typed" in tracked
    names = set(names_in(built[0]))
    assert {name for name in names if "dist-info" not in name} == tracked
    about = {name.partition(".dist-info/")[2] for name in names - tracked}
    assert about == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


@in_checkout
def test_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for needed in (
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "tests",
        "docs",
        "Makefile",
    ):
        assert (source / needed).exists(), needed
    wheel, _ = build(source, tmp_path / "dist")
    assert names_in(wheel) == names_in(built[0])


@in_checkout
def test_wheel_metadata(installed):
    (about,) = importlib.metadata.distributions(name="agn_optax", path=[str(installed)])
    assert about.version == agn_optax.__version__
    extras = about.metadata.get_all("Provides-Extra")
    assert {canonicalize_name(name) for name in extras} == set(EXTRAS)
    alone = [
        Requirement(each).name for each in about.requires if "extra ==" not in each
    ]
    assert sorted(alone) == ["jax", "jaxlib", "optax"]
    (script,) = about.entry_points
    assert (script.name, script.value) == ("agn-optax", "agn_optax.ops.cli:main")


# Import every module with the packages of the extras hidden, and run the command.
WITHOUT_EXTRAS = """
import importlib, json, pathlib, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import agn_optax

folder = pathlib.Path(agn_optax.__file__).parent
failed, count = {}, 0
for path in sorted(folder.rglob("*.py")):
    parts = path.relative_to(folder.parent).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    if name.endswith("__main__"):
        continue
    count += 1
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = [type(error).__name__, str(error)]
try:
    agn_optax.ops.cli.main()
except SystemExit as end:
    print(json.dumps([str(folder), count, failed, end.code]))
"""


@in_checkout
def test_package_works_without_any_extra(installed):
    """Modules that need no extra are imported; errors of the others name the extra."""
    hidden = {
        *("google", "grpc", "grpc_health"),
        *("rich", "typer", "cryptography", "flax", "orbax", "matplotlib", "sklearn"),
        *("prometheus_client", "grain", "equinox", "chex", "yaml"),
    }
    path = str(installed)
    output = run(
        *("-c", WITHOUT_EXTRAS, ",".join(hidden)), where=installed, PYTHONPATH=path
    )
    folder, count, failed, ended = json.loads(output.splitlines()[-1])
    assert folder == str(installed / "agn_optax")
    assert count > 90
    assert {name.split(".")[1] for name in failed} <= set(test_project.EXTRAS)
    assert "grpc" in failed["agn_optax.service"][1]
    assert "agn_optax.ops.cli" not in failed  # `run` needs no extra
    for name, (error, message) in failed.items():
        if not name.startswith("agn_optax.ops.cli."):
            assert error == "MissingExtraError", name
            assert "pip install 'agn_optax[" in message
    assert "typer" in ended
    assert "pip install 'agn_optax[cli]'" in ended


def requirements(extra):
    """Yield the requirements of an extra, including those of other extras."""
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "agn-optax":
            for other in requirement.extras:
                yield from requirements(other)
        else:
            yield requirement


def test_every_package_that_a_layer_imports_is_in_an_extra():
    extras = {
        "checkpoint": ["flax"],
        "simulate": ["plot"],
        "training": ["cli"],
        "ops": ["cli", "keys", "flax", "metrics", "kubernetes", "plot"],
    }
    distributions = importlib.metadata.packages_distributions()
    for layer, modules in test_project.EXTRAS.items():
        brought = {
            canonicalize_name(each.name)
            for extra in extras.get(layer, [layer])
            for each in requirements(extra)
        }
        for module in modules - {"ml_dtypes"}:  # JAX requires it
            found = {canonicalize_name(name) for name in distributions[module]}
            assert found & brought, f"{layer} imports {module}"


def test_extra_all_has_every_extra_except_accelerators():
    others = set(EXTRAS) - {"all", "cuda13", "tpu"}
    wanted = {str(each) for extra in others for each in requirements(extra)}
    assert {str(each) for each in requirements("all")} == wanted
    (itself,) = EXTRAS["all"]
    assert Requirement(itself).extras == others


class TestVersions:
    """The promises of docs/versions.md are declared and tested."""

    @staticmethod
    def sessions():
        """Yield the sessions of the noxfile: name, Python version, pinned versions."""
        tree = ast.parse((ROOT / "noxfile.py").read_text())
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and function.decorator_list:
                text = ast.unparse(function)
                python = re.search(r"python='([\d.]+)'", text)
                pins = dict(re.findall(r"'([a-z]+)==([\d.]+)[^']*'", text))
                yield function.name, python and python[1], pins

    @in_checkout
    def test_oldest_supported_versions_are_tested(self):
        name, python, pins = next(s for s in self.sessions() if s[0] == "oldest")
        assert PROJECT["project"]["requires-python"] == f">={python}"
        declared = [Requirement(each) for each in PROJECT["project"]["dependencies"]]
        declared += [*requirements("flax"), *requirements("service")]
        floors = {
            each.name: next(iter(each.specifier)).version
            for each in declared
            if each.name in pins
        }
        assert set(pins) == {"jax", "jaxlib", "optax", "flax", "grpcio", "protobuf"}
        for package, version in pins.items():
            assert version.rstrip(".").startswith(floors[package]), (name, package)

    def test_python_versions_match_the_classifiers(self):
        pythons = re.findall(
            r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"])
        )
        assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
        assert f"{sys.version_info.major}.{sys.version_info.minor}" in pythons

    def test_installed_versions_are_supported(self):
        for line in PROJECT["project"]["dependencies"]:
            requirement = Requirement(line)
            here = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(here, prereleases=True), line


@in_checkout
class TestLock:
    """requirements-dev.txt: all packages are pinned and hashed, without sources."""

    @pytest.fixture
    def text(self):
        return (ROOT / "requirements-dev.txt").read_text()

    def test_lock_names_no_source(self, text):
        for line in text.splitlines():
            assert not re.search(r"://|^\s*-(?!-hash=)|(^|\s)\.?/", line), line
            assert not re.search(r"--(?!hash=sha256:[0-9a-f]{64}\b)", line), line

    def test_lock_has_all_packages_of_groups_and_extras(self, text):
        pinned = set(re.findall(r"^([a-z0-9-]+)==\S+ [^\n]*\\$", text, re.M))
        groups = [
            line
            for lines in PROJECT["dependency-groups"].values()
            for line in lines
            if isinstance(line, str)
        ]
        extras = [
            str(each)
            for extra in set(EXTRAS) - {"cuda13", "tpu"}
            for each in requirements(extra)
        ]
        wanted = {canonicalize_name(Requirement(line).name) for line in groups + extras}
        assert wanted <= pinned


def test_typed_program_runs():
    assert len(jax.devices()) > 1
    version, other, average = typed_program.main()
    assert (version, other) == (1, 1)
    assert average == pytest.approx(0.36)


def test_typed_program_passes_mypy(tmp_path):
    """It is checked strictly against the package with its py.typed, as if installed."""
    package = pathlib.Path(agn_optax.__file__).parents[1]
    output = run(
        *("-m", "mypy", "--config-file", ROOT / "pyproject.toml"),
        # The cache of `make types`, because JAX alone takes 20 s.
        *("--cache-dir", ROOT / ".mypy_cache", typed_program.__file__),
        where=tmp_path,
        PYTHONPATH=str(package),
    )
    assert "no issues found in 1 source file" in output
