"""The tests on the oldest and the newest versions that are supported: `make nox`.

They run on the wheel, in a folder where the checkout's agn_optax cannot be imported,
and with programs compiled as users have them: `make test` leaves out what takes long.
Options after `--` are pytest's:

    nox --session oldest -- tests/laws
"""

import pathlib
import shutil

import nox

# What the tests read, beside the package.
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


def run_tests(session: nox.Session, *versions: str) -> None:
    """Installs the wheel with ``versions``, and runs the tests on it."""
    here = pathlib.Path(__file__).parent
    folder = pathlib.Path(session.create_tmp())
    shutil.rmtree(folder)
    copy = folder / "copy"
    copy.mkdir(parents=True)
    for name in NEEDED:
        if (here / name).is_dir():
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(here / name, copy / name, ignore=without)
        else:
            shutil.copy(here / name, copy)
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, here)
    (wheel,) = folder.glob("*.whl")
    session.install(f"{wheel}[dev]", *versions)
    session.run("pip", "list")
    session.chdir(copy)
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    where = () if session.posargs else ("tests", "--pyargs", "agn_optax")
    options = ("-n", "2", "--dist", "loadfile", *where, *session.posargs)
    session.run("python", "-B", "-m", "pytest", *options, env=environment)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml allows."""
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
    """Whatever was released last."""
    run_tests(session)
