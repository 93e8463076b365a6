"""Helpers that run the command line, in this process and in others."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

from typer.testing import CliRunner

from agn_optax import service
from agn_optax.ops.cli import _app

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 60.0  # s, generous: no test should come near it


def command(*arguments, charset="utf-8"):
    """Run the command in this process, with an encoding of its output."""
    runner = CliRunner(charset=charset)
    return runner.invoke(_app.app, [str(each) for each in arguments])


def succeeds(*arguments):
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    assert not result.stderr
    return result.stdout


def fails(*arguments, code):
    """Run a command that exits with the code and no traceback; return its stderr."""
    result = command(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result.stderr


def printed(folder, *arguments, **variables):
    """Run Python in a folder, on the CPU; return what it prints."""
    ended = subprocess.run(  # noqa: S603 our own programs
        [sys.executable, "-B", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def serve(address, rule, *arguments, then=None, **connection):
    """Run ``agn-optax serve`` in this process until a client with the rule connected.

    The client is connected in another thread, because this one handles signals.
    """
    raised = []

    def visit():
        try:
            with service.connect(
                address, rule, timeout=PATIENCE, **connection
            ) as center:
                if then is not None:
                    then(center)
        except BaseException as error:
            raised.append(error)
        finally:
            if not returned.is_set():
                # Signal this thread: the system could choose any thread that does not
                # block it.
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    returned = threading.Event()
    before = signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # in case serve does not handle it
    visitor = threading.Thread(target=visit)
    visitor.start()
    try:
        result = command("serve", "--address", address, *arguments)
    finally:
        returned.set()
        visitor.join(PATIENCE)
        signal.signal(signal.SIGTERM, before)
    if raised:
        raise AssertionError(result.output) from raised[0]
    assert result.exit_code == 0, result.output
    return result


def python(*arguments):
    """Return a command line and an environment that find this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [sys.executable, *map(str, arguments)], {**os.environ, "PYTHONPATH": path}


class ServerProcess:
    """``agn-optax serve`` as a process that can be restarted at the same address.

    Attributes:
      version: the version of the center that its last start has found on disk.
    """

    def __init__(self, address, *options):
        self._options = ["--json", "--rule=downpour", f"--address={address}", *options]
        self.start()

    def start(self):
        arguments, environment = python(
            "-m", "agn_optax.ops.cli", "serve", *self._options
        )
        self._process = subprocess.Popen(  # noqa: S603 our own program
            arguments, env=environment, stdout=subprocess.PIPE, text=True
        )
        line = json.loads(self._process.stdout.readline())
        assert line["event"] == "serving"
        self.version = line["version"]

    def peak_memory(self):
        """Return the most bytes that the process has had in memory since its start."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        (peak,) = [x for x in status.splitlines() if x.startswith("VmHWM:")]
        return int(peak.split()[1]) << 10

    def end(self, signum):
        """Send a signal, wait for the end, and return the exit code."""
        self._process.send_signal(signum)
        code = self._process.wait(PATIENCE)
        self._process.stdout.close()
        return code
