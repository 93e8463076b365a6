"""The tests on the oldest and the newest versions that are supported: `make nox`.

They run on the wheel, in a folder where the checkout's agn_optax cannot be imported,
and with XLA's default flags, as users have them (`make test` turns optimization passes
off to compile faster). Options after `--` are passed to pytest:

    nox --session oldest -- tests/laws

The sessions `extras` and `sdist` install the package as users do, each in an empty
environment, and use it. `make frameworks` runs the session `frameworks`.
"""

import pathlib
import re
import shlex
import shutil
import sys

import nox

# The files and folders of the checkout that the tests read, besides the package.
NEEDED = (
    "README.md",
    "benchmarks",
    "conftest.py",
    "docs",
    "examples",
    "pyproject.toml",
    "tests",
    "tools",
)


HERE = pathlib.Path(__file__).parent
# The extras that the tests need besides the group dev; the same as in `make lock`.
EXTRAS = "cli,flax,grain,keys,kubernetes,metrics,plot"
# For each extra, statements that must run with only that extra installed.
USES = {
    "": "agn_optax.agn(optax.sgd(0.1), 3).init(1.0)",
    "service": "from agn_optax import service; service.serve(rules.downpour()).stop()",
    "cli": "from agn_optax import cli; sys.argv[1:] = ['--version']; cli.main()",
    "keys": "from agn_optax import cli; sys.argv[1:] = ['keys', 'made', '--host=a', "
    "'--chief=b']; cli.main()",
    "flax": "import flax.linen; from orbax.checkpoint import v1",
    "grain": "import grain",
    "kubernetes": "import yaml",
    "metrics": "import prometheus_client",
}


# The frameworks of docs/levanter.md, which has a command that installs each. Names of
# tests contain them, too.
FRAMEWORKS = ("levanter", "tunix", "kauldron", "transformers")


def make(session: nox.Session, kind: str) -> pathlib.Path:
    """Build a wheel or an sdist of the checkout in a new folder; return its path."""
    folder = pathlib.Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    folder.mkdir(parents=True)
    session.chdir(HERE)
    build = (sys.executable, "-m", "hatchling", "build", "--target", kind)
    session.run(*build, "--directory", folder, external=True)
    (made,) = folder.iterdir()
    session.chdir(folder)  # where the checkout's agn_optax cannot be imported
    return made


def copy_tests(folder: pathlib.Path) -> pathlib.Path:
    """Copy the tests to a new folder in ``folder``, and return its path."""
    copy = folder / "copy"
    copy.mkdir()
    for name in NEEDED:
        if (HERE / name).is_dir():
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / name, copy / name, ignore=without)
        else:
            shutil.copy(HERE / name, copy)
    return copy


def run_tests(session: nox.Session, *versions: str) -> None:
    """Install the wheel with ``versions`` of other packages, and run the tests."""
    wheel = make(session, "wheel")
    project = nox.project.load_toml(HERE / "pyproject.toml")
    group = nox.project.dependency_groups(project, "dev")
    session.install(f"{wheel}[{EXTRAS}]", *group, *versions)
    session.run("pip", "list")
    session.chdir(copy_tests(wheel.parent))
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    where = () if session.posargs else ("tests", "--pyargs", "agn_optax")
    options = ("-n", "2", "--dist", "loadfile", *where, *session.posargs)
    session.run("python", "-B", "-m", "pytest", *options, env=environment)


@nox.session(python="3.11")
@nox.parametrize("extra", list(USES))
def extras(session: nox.Session, extra: str) -> None:
    """Use the wheel with one extra, or with none, in an empty environment."""
    use_alone(session, make(session, "wheel"), extra)


@nox.session(python="3.11")
def sdist(session: nox.Session) -> None:
    """Use the sdist, from which pip builds a wheel."""
    use_alone(session, make(session, "sdist"), "")


def use_alone(session: nox.Session, made: pathlib.Path, extra: str) -> None:
    """Install a wheel or an sdist with an extra, and run the statements for it."""
    session.install(f"{made}[{extra}]" if extra else made)
    session.run("python", "-m", "pip", "check")
    program = (
        f"import sys, optax, agn_optax\nfrom agn_optax import rules\n{USES[extra]}"
    )
    session.run("python", "-c", program, env={"JAX_PLATFORMS": "cpu"})


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Run the tests on the lowest versions that pyproject.toml allows."""
    run_tests(
        session,
        "jax==0.10.0",
        "jaxlib==0.10.0",
        "optax==0.2.8",
        "flax==0.12.2",
        "grpcio==1.76.0",
        "protobuf==6.31.*",
    )


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """Run the tests on the latest releases."""
    run_tests(session)


@nox.session(python="3.11", default=False)
@nox.parametrize("framework", FRAMEWORKS)
def frameworks(session: nox.Session, framework: str) -> None:
    """Install a framework as docs/levanter.md says, and run its tests."""
    wheel = make(session, "wheel")
    page = (HERE / "docs" / "levanter.md").read_text()
    (line,) = re.findall(rf"^pip install (.*{framework}==.*)$", page, re.MULTILINE)
    needed = line.replace("agn_optax[", f"{wheel}[")
    session.install(*shlex.split(needed), "hypothesis", "pytest", "pytest-timeout")
    session.run("pip", "list")
    session.chdir(copy_tests(wheel.parent))
    own = pathlib.Path(f"tests/examples/test_{framework}.py")
    tests = own if own.exists() else "tests/test_frameworks.py"
    output = session.run(
        *("python", "-B", "-m", "pytest", tests, "-k", framework, *session.posargs),
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        silent=True,  # return the output
    )
    session.log(output)
    if "skipped" in output:
        session.error(f"tests do not find {framework}")
