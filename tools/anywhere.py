"""Run `make test` in places that differ from a developer's machine: `make anywhere`.

Each place gets a copy of the checkout and runs the README's command there, with the
checkout's virtual environment. Tests that cannot hold in a place are skipped with a
reason; none may fail. All places together take an hour on two idle cores:

    make anywhere
    make anywhere ARGS="--only user offline -- tests/service -k token"
    make anywhere ARGS="--only here --times 20"

Places that need another user, or separate network and mount namespaces, need root.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
VENV = HERE / ".venv"
COMPILED = HERE / ".pytest_cache" / "compiled"  # programs of tests in the checkout
NOBODY = 65534  # the unprivileged user on every Linux


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in which the tests run.

    Args:
      summary: what differs here.
      folder: the name of the folder around the copy; every user may enter its parent.
      mode: the permissions of that folder.
      is_user: run as a plain user instead of as the caller.
      namespaces: kinds of new namespaces, as `unshare` names them.
      setup: shell commands run before, in these namespaces and as the caller.
      environment: variables to set; ``{base}`` is the folder of all places.
      arguments: arguments for pytest.
    """

    summary: str
    folder: str = "copy"
    mode: int = 0o755
    is_user: bool = False
    namespaces: tuple[str, ...] = ()
    setup: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def obstacle(self) -> str:
        """Return why the tests cannot run in this place, or an empty string."""
        if os.geteuid() == 0 or not (self.is_user or self.namespaces):
            return ""
        return "skipped: only root can set up this place"


# A /dev without shm: the device files of the machine in a new file system.
WITHOUT_SHM = """
new=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$new"
for name in null zero full random urandom tty; do
    touch "$new/$name"
    mount --bind "/dev/$name" "$new/$name"
done
mkdir "$new/pts"
mount --bind /dev/pts "$new/pts"
ln -s pts/ptmx "$new/ptmx"
ln -s /proc/self/fd "$new/fd"
mount --move "$new" /dev
rmdir "$new"
"""

OFFLINE = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ip link set lo up\n"
FULL_SHM = """
mount -t tmpfs -o size=64k full /dev/shm
head -c 65536 /dev/zero >/dev/shm/all
"""
MISSING_HOME = {"HOME": "{base}/home/missing"}
ASCII = {"LANG": "C", "LC_ALL": "C", "LANGUAGE": ""}

PLACES = {
    "here": Place("the caller, in a copy of the checkout"),
    "root": Place("a folder that only its owner may enter", mode=0o700),
    "user": Place(
        "a plain user, umask 077, a path with a space and an accent",
        folder="a plâce",
        is_user=True,
        setup="umask 077",
    ),
    "home-read-only": Place(
        "a plain user whose HOME cannot be written to",
        is_user=True,
        environment={"HOME": "/"},
    ),
    "home-missing": Place(
        "a plain user whose HOME does not exist", is_user=True, environment=MISSING_HOME
    ),
    "offline": Place(
        "no network but loopback, and no IPv6", namespaces=("net",), setup=OFFLINE
    ),
    "few-files": Place("256 open files a process", setup="ulimit -n 256"),
    "no-shm": Place("no /dev/shm", namespaces=("mount",), setup=WITHOUT_SHM),
    "full-shm": Place("a full /dev/shm", namespaces=("mount",), setup=FULL_SHM),
    "c-locale": Place("a locale of ASCII only", environment=ASCII),
    "one-core": Place("one core", setup="taskset --pid --cpu-list 0 $$ >/dev/null"),
    **{
        f"seed-{seed}": Place(
            f"tests in the order of seed {seed}",
            arguments=("-p", "randomly", "--randomly-seed", str(seed)),
        )
        for seed in (1, 2, 3)
    },
    "worst": Place(
        "user, home-missing, offline, few-files, full-shm and c-locale at once",
        folder="a plâce",
        is_user=True,
        namespaces=("net", "mount"),
        setup=f"{OFFLINE}{FULL_SHM}umask 077; ulimit -n 256",
        environment=MISSING_HOME | ASCII,
    ),
}


def main() -> int:
    """Run the tests in the chosen places, and print the result and time of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PLACES,
        metavar="PLACE",
        help="places to run in (default: all but here)",
    )
    parser.add_argument(
        "--times", type=int, default=1, help="runs in each place (default 1)"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    places = options.only or [name for name in PLACES if name != "here"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="agn-optax-anywhere-") as folder:
        base = pathlib.Path(folder)
        base.chmod(0o755)
        if COMPILED.exists():
            shutil.copytree(COMPILED, base / "compiled")
        for name in (name for name in places for _ in range(options.times)):
            place = PLACES[name]
            print(f"--- {name}: {place.summary}", flush=True)
            began = time.monotonic()
            result = place.obstacle() or run(place, base, options.pytest)
            seconds = time.monotonic() - began
            rows.append((name, result, f"{seconds // 60:.0f}:{seconds % 60:02.0f}"))
    print()
    for name, result, taken in rows:
        print(f"{name:15} {taken:>6}  {result}")
    return any("FAILED" in result for _, result, _ in rows)


def run(place: Place, base: pathlib.Path, arguments: list[str]) -> str:
    """Run the tests in a new copy of the checkout, and return their last line."""
    outer = base / "places" / place.folder
    copy = outer / "agn_optax"
    copied(copy)
    outer.chmod(place.mode)
    home, compiled = base / "home", base / "compiled"
    for each in (home, compiled):  # all places share compiled programs
        each.mkdir(exist_ok=True)
        each.chmod(0o777)
    script = place.setup
    command = ["make", "--no-print-directory", "test"]
    command.append(f"ARGS={' '.join([*place.arguments, *arguments])}")
    environment = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "PYTHONPATH": str(copy)}
    if place.is_user:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", outer], check=True)
        script = opened(base) + script
        command = [
            *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
            *command,
        ]
        environment |= {"HOME": str(home), "USER": "nobody", "LOGNAME": "nobody"}
    environment |= {k: v.format(base=base) for k, v in place.environment.items()}
    command = ["sh", "-ec", f'{script}\nexec "$@"', "sh", *command]
    namespaces = {*place.namespaces, *(["mount"] if place.is_user else [])}
    if namespaces:
        command = ["unshare", *(f"--{each}" for each in namespaces), *command]
    last = "no summary was printed"
    with subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.search(r"\d+ (passed|failed|error)", line):
                last = line.strip(" =\n")
    shutil.rmtree(outer)
    return last if process.returncode == 0 else f"FAILED ({process.returncode}): {last}"


def copied(folder: pathlib.Path) -> None:
    """Copy all files that git tracks or would add, and link the virtual environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=HERE,
        capture_output=True,
        check=True,
    ).stdout
    for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
        if (HERE / name).exists():  # git may list files that were removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / name, folder / name)
    (folder / ".venv").symlink_to(VENV)


def opened(base: pathlib.Path) -> str:
    """Return commands that let every user reach Python and its packages.

    Both may be in a folder that only root may enter. In a mount namespace, that folder
    is replaced by an empty one that contains only these two.
    """
    closed: dict[pathlib.Path, list[pathlib.Path]] = {}
    for path in (pathlib.Path(sys.base_prefix).resolve(), VENV.resolve()):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append(path)
                break
    lines = []
    for parent, paths in closed.items():
        aside = {path: base / f"aside-{hash(path) & 0xFFFFFF}" for path in paths}
        for path, kept in aside.items():
            lines += [f"mkdir -p '{kept}'", f"mount --bind '{path}' '{kept}'"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs '{parent}'")
        for path, kept in aside.items():
            lines += [f"mkdir -p '{path}'", f"mount --move '{kept}' '{path}'"]
            lines.append(f"rmdir '{kept}'")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
