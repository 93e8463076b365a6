"""Two hosts on one machine: real data, two devices each, a center between them."""

import contextlib
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import two_hosts

from agn_optax import errors

PROGRAM = two_hosts.__file__
LIMIT = 800  # s, for a busy machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Host:
    """A process of the program, and its output."""

    def __init__(self, *arguments):
        self.popen = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", PROGRAM, "--towers", "2", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self.text = ""
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern):
        """Wait for a line that matches; return the match."""
        while (line := self._lines.get(timeout=LIMIT)) is not None:
            self.text += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"{pattern!r} was not printed:\n{self.text}")

    def ends(self):
        """Wait for the end; return the exit status."""
        while (line := self._lines.get(timeout=LIMIT)) is not None:
            self.text += line
        return self.popen.wait(LIMIT)


@pytest.fixture
def hosts():
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            host = Host(*arguments)
            stack.callback(host.popen.stdout.close)
            stack.callback(host._reader.join, LIMIT)
            stack.callback(host.popen.wait, LIMIT)
            stack.callback(host.popen.kill)
            return host

        yield start


def test_two_hosts_finish_while_a_third_one_is_interrupted(hosts):
    common = ("--steps=305", "--report=100")
    first = hosts("--serve", "127.0.0.1:0", "--hosts=3", "--name=anna", *common)
    third = ("--steps=1000000", "--report=10", "--name=carl")
    address = first.wait_for(r"center at (127\.0\.0\.1:[1-9]\d*)$")[1]
    second = hosts("--center", address, "--name=bert", *common)
    third = hosts("--center", address, *third)
    third.wait_for("carl: step 20/")
    third.popen.send_signal(signal.SIGINT)
    for host, status in ((third, 130), (second, 0), (first, 0)):
        assert host.ends() == status, host.text
    assert third.text.endswith("carl was interrupted and has left the center\n")
    for name, host in (("anna", first), ("bert", second)):
        assert f"{name} trains on Towers(1 x 2 cpu)" in host.text
        assert f"{name}: step 300/305" in host.text
    assert re.search(r"when this host left: [\d.]+%", second.text), second.text
    found = re.search(r"of the center: ([\d.]+)% after (\d+) exchanges", first.text)
    assert float(found[1]) > 88
    # The first two hosts: 30 full periods and a partial one. The third: at least two.
    assert int(found[2]) >= 2 * 31 + 2


def test_unreachable_center_is_reported():
    args = two_hosts.parse(["--center", "127.0.0.1:1", "--give-up", "0.1"])
    with pytest.raises(errors.CenterUnreachableError, match=r"127\.0\.0\.1:1"):
        two_hosts.run(args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--hosts", "0"], "--hosts must be at least 1, got 0"),
        (["--serve", "--give-up", "0"], "--give-up must be positive, got 0"),
        (["--serve", "--center", "x:1"], "not allowed with"),
        ([], "one of the arguments --serve --center is required"),
    ],
)
def test_bad_options_are_rejected(arguments, message, capsys):
    with pytest.raises(SystemExit):
        two_hosts.parse(arguments)
    assert message in capsys.readouterr().err
