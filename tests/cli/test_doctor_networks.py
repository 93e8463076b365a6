"""``agn-optax doctor`` in faulty networks, made of Linux network namespaces.

Two hosts, "here" and "there", have two network cards each; cards of the same number are
connected. The center runs on "there" and is addressed by the first card.
"""

import json
import os
import shutil
import subprocess
import uuid

import pytest
from helpers.commands import PATIENCE, python

CENTER = "10.77.1.2:5000"
DIRECT = 5001


def run(*command, **settings):
    return subprocess.run(  # noqa: S603 our own programs
        [str(each) for each in command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **settings,
    )


class Hosts:
    """The two hosts, with methods that change their network."""

    def __init__(self):
        name = uuid.uuid4().hex[:6]
        self.here, self.there = f"here-{name}", f"there-{name}"

    def make(self):
        """Create both hosts; skip the test where that is impossible."""
        if os.getuid():
            pytest.skip("only root can make a network")
        if shutil.which("ip") is None or shutil.which("tc") is None:
            pytest.skip("iproute2 is not installed")
        for host in (self.here, self.there):
            if (made := run("ip", "netns", "add", host)).returncode:
                pytest.skip(f"no namespaces here: {made.stderr.strip()}")
            self.ip(host, "link", "set", "lo", "up")

    def wire(self):
        """Connect the hosts by new cards without faults."""
        for number in (1, 2):
            card = f"eth{number}"
            run("ip", "-n", self.here, "link", "del", card)
            wire = ("type", "veth", "peer", card, "netns", self.there)
            made = run("ip", "link", "add", card, "netns", self.here, *wire)
            if made.returncode:
                pytest.skip(f"no wires here: {made.stderr.strip()}")
            for end, host in enumerate((self.here, self.there), 1):
                self.ip(host, "addr", "add", f"10.77.{number}.{end}/24", "dev", card)
                self.ip(host, "link", "set", card, "up")

    def remove(self):
        for host in (self.here, self.there):
            run("ip", "netns", "del", host)

    def ip(self, host, *arguments):
        done = run("ip", "-n", host, *arguments)
        assert not done.returncode, done.stderr


@pytest.fixture(scope="module")
def hosts():
    """Two hosts and a center; each test gets new connections between them."""
    made = Hosts()
    try:
        made.make()
        made.wire()
        arguments, environment = python(
            *("-m", "agn_optax.ops.cli", "serve", "--rule=downpour", "--insecure"),
            *("--open", "--address=0.0.0.0:5000", f"--direct-address=0.0.0.0:{DIRECT}"),
        )
        with subprocess.Popen(  # noqa: S603 our own program
            ["ip", "netns", "exec", made.there, *arguments],  # noqa: S607
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout.readline().startswith("serving")
                yield made
            finally:
                process.terminate()
                process.wait(PATIENCE)
    finally:
        made.remove()


@pytest.fixture
def wired(hosts):
    hosts.wire()
    return hosts


def doctor(hosts, *options, **environment):
    """Run the doctor on the host "here"; return its results by check."""
    arguments, known = python(
        *("-m", "agn_optax.ops.cli", "doctor", CENTER, "--insecure", "--json", *options)
    )
    done = run(
        *("ip", "netns", "exec", hosts.here, *arguments), env={**known, **environment}
    )
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["checks"]
    return {each["check"]: (each["result"], each["message"]) for each in checks}


@pytest.mark.slow
def test_doctor_finds_no_fault_in_a_good_network(wired):
    found = doctor(wired)
    assert {name for name, (result, _) in found.items() if result == "failed"} == set()


@pytest.mark.slow
def test_doctor_finds_another_interface_than_expected(wired):
    result, message = doctor(wired, "--interface=eth2")["connection"]
    assert result == "warning"
    assert "over interface 'eth1', and 'eth2' was expected" in message
    assert doctor(wired, "--interface=eth1")["connection"][0] == "ok"


@pytest.mark.slow
def test_doctor_finds_a_firewall_before_the_direct_port(wired):
    answers = ("from", "10.77.1.2", "ipproto", "tcp", "sport", DIRECT, "blackhole")
    wired.ip(wired.there, "rule", "add", *answers)
    try:
        found = doctor(wired, "--timeout=2")
    finally:
        wired.ip(wired.there, "rule", "del", *answers)
    result, message = found["second port"]
    assert result == "warning"
    assert "cannot connect by socket" in message


@pytest.mark.slow
def test_doctor_finds_a_broken_proxy_in_the_environment(wired):
    proxy = {"http_proxy": "http://10.77.1.2:1"}
    found = doctor(wired, "--timeout=2", **proxy)
    assert list(found)[-1] == "health"  # which gRPC cannot ask
    result, message = found["health"]
    assert result == "failed"
    assert "a proxy of the environment (http_proxy; add the center to no_p" in message
    found = doctor(wired, no_proxy="10.77.1.2", **proxy)
    assert found["health"] == ("ok", "SERVING")
