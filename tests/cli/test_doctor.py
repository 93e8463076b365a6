"""``agn-optax doctor`` on one machine; test_doctor_networks.py has faulty networks."""

import contextlib
import itertools
import json
import re
import socket
import threading
import time

import jax.numpy as jnp
import pytest
from helpers import certificates
from helpers.commands import PATIENCE, command, fails, succeeds
from helpers.disks import small_disks
from helpers.network import Network

from agn_optax import center, rules, service
from agn_optax.ops.doctor import Checks

RULE = rules.easgd(0.25)


def checks(*arguments, code):
    """Run the doctor; return result and text of each check."""
    result = command("doctor", *arguments, "--json")
    assert result.exit_code == code, result.output
    reply = json.loads(result.stdout)
    assert reply["ok"] == (not code)
    return {
        each["check"]: (each["result"], each["message"]) for each in reply["checks"]
    }


def test_doctor_finds_no_fault_in_a_healthy_center(server):
    options = ["--rule=easgd", "--moving-rate=0.25"]
    output = succeeds("doctor", server.address, *options)
    lines = output.splitlines()
    assert len(lines) == 13
    # (The rates depend on how busy the machine is.)
    assert all(line.startswith("ok ") for line in lines if "rates" not in line), output
    found = checks(server.address, *options, code=0)
    assert found["schema"] == ("ok", "2 leaves, 32 B")
    assert found["rule"] == ("ok", "easgd at both ends")
    assert found["health"] == ("ok", "SERVING")


def test_doctor_compares_rules(server, tmp_path):
    result, message = checks(server.address, "--rule=downpour", code=1)["rule"]
    assert result == "failed"
    assert "its name is 'easgd', and here it is 'downpour'" in message
    path = tmp_path / "center.toml"
    path.write_text("rule = 'easgd'\nmoving-rate = 0.5\nlease = 3\n")
    assert checks(server.address, f"--config={path}", code=1)["rule"][0] == "failed"
    assert "no rule" in fails("doctor", server.address, "--moving-rate=0.5", code=2)
    assert "1 of 13 checks failed" in fails(
        "doctor", server.address, f"--config={path}", code=1
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", "must be"),
        ("127.0.0.1:0", "port 0 means any port"),
        ("no-such-host.invalid:80", "no-such-host.invalid is not found"),
    ],
)
def test_doctor_rejects_bad_addresses(address, message):
    found = checks(address, code=1)
    assert list(found) == ["address"]
    assert message in found["address"][1]


def test_doctor_reports_that_nothing_listens(nowhere, tmp_path):
    for address in (nowhere, f"unix:{tmp_path}/nobody"):
        found = checks(address, code=1)
        assert list(found) == ["address", "proxy", "connection"]
        assert f"nothing listens at {address}" in found["connection"][1]


@contextlib.contextmanager
def other_server(answer):
    """Run a server that gives the same answer to every connection."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE)
                    connection.recv(100)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_doctor_reports_that_another_server_listens():
    with other_server(b"HTTP/1.0 400 Bad Request\r\n\r\n") as address:
        found = checks(address, "--timeout=2", code=1)
    assert list(found)[-1] == "health"
    assert "no gRPC server" in found["health"][1]


def test_doctor_reports_tls_options_for_a_center_without_tls(server, tmp_path):
    ca, _ = certificates.make(tmp_path)
    found = checks(server.address, f"--tls-ca={ca}", code=1)
    assert "leave --tls-ca out" in found["encryption"][1]


class AlteredObserver:
    """An observer of a center whose description has some fields replaced."""

    def __init__(self, server, **altered):
        self._observer = service.Observer(server.address)
        self._altered = altered

    def __getattr__(self, name):
        return getattr(self._observer, name)

    def describe(self):
        described = self._observer.describe()
        for name, value in self._altered.items():
            if isinstance(value, dict):
                described.versions.update(value)
            else:
                setattr(described, name, value() if callable(value) else value)
        return described


@pytest.mark.parametrize(
    ("check", "result", "message", "altered"),
    [
        ("release", "warning", "the center runs agn_optax 9.9", {"release": "9.9"}),
        ("clocks", "warning", "s ahead", {"clock": lambda: time.time() + 60}),
        ("clocks", "warning", "s behind", {"clock": lambda: time.time() - 60}),
        ("release", "warning", "jax 9.9 at the center", {"versions": {"jax": "9.9"}}),
    ],
)
def test_doctor_judges_the_description_of_a_center(
    server, check, result, message, altered
):
    checks = Checks(
        server.address,
        lambda: AlteredObserver(server, **altered),
        None,
        timeout=5.0,
        tls=None,
    )
    found = {finding.check: finding for finding in checks.run()}
    assert found[check].result == result
    assert message in found[check].message
    others = found.keys() - {check, "rates"}  # rates depend on the machine's load
    assert {found[name].result for name in others} == {"ok"}


def test_doctor_reports_that_the_center_is_going_down(server, monkeypatch):
    monkeypatch.setattr(service.Observer, "health", lambda self: "NOT_SERVING")
    found = checks(server.address, code=1)
    assert "draining" in found["health"][1]


@pytest.mark.parametrize(("transport", "slow"), [("socket", "up"), ("grpc", "down")])
def test_doctor_names_the_slow_direction(transport, slow):
    with service.serve(RULE, jnp.zeros(3)) as own, Network(own, transport) as net:
        direction = net.there if slow == "up" else net.back
        direction.rate = 1e6
        with service.Observer(net.address) as observer:
            measured = observer.measure(transport)
        result, message = checks(net.address, code=0)["rates"]
    quick = measured.down if slow == "up" else measured.up
    assert 3e5 < getattr(measured, slow) < 1.5e6
    assert quick > 4e6
    assert result == "warning"
    assert f"the way {slow}, " in message
    assert "duplex" in message


@pytest.mark.slow
def test_doctor_fails_for_a_connection_that_is_far_too_slow():
    with (
        service.serve(RULE, jnp.zeros(3), direct_address=False) as own,
        Network(own) as net,
    ):
        net.there.rate = 8e3
        result, message = checks(net.address, code=1)["rates"]
    assert result == "failed"
    assert "slower than the 32.8 kB/s" in message


def test_doctor_reports_an_unreachable_direct_port():
    """gRPC connects, but nothing listens at the port that the center offers."""
    with service.serve(RULE, jnp.zeros(3)) as own:
        for offer in own._servicer.offers:
            if offer.transport == "socket":
                offer.address = ":1"
        result, message = checks(own.address, code=0)["rates"]
    assert result == "warning"
    assert "cannot connect by socket: " in message
    assert "open :1 in the firewall" in message
    assert "--direct-address" in message


def test_doctor_warns_when_its_token_may_not_measure(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("observer * 0123456789abcdef\n")
    mine = tmp_path / "mine"
    mine.write_text("0123456789abcdef\n")
    access = service.Access(tokens)
    with service.serve(
        RULE, jnp.zeros(3), security=service.Security(access=access)
    ) as own:
        found = checks(own.address, f"--token-file={mine}", code=0)
    assert found["rates"][0] == "warning"
    assert "Probe needs the role reader or worker" in found["rates"][1]


def test_doctor_compares_free_disk_with_the_next_snapshot(tmp_path):
    disk = tmp_path / "disk"
    kept = center.Journal(disk)
    with service.serve(RULE, jnp.zeros(3), durability=kept) as own:
        result, message = checks(own.address, code=0)["disk"]
        assert result == "ok"
        assert "are free, and the next snapshot with its journal takes" in message
        status = service.Observer(own.address).status()
        (snapshot,) = disk.glob("snapshot-*")
        assert status["disk_needed"] == snapshot.stat().st_size + (64 << 10)
        assert status["disk_free"] > 0


@pytest.fixture
def small_disk(tmp_path):
    """A mounted file system of 8 MB."""
    with small_disks(tmp_path) as mount:
        yield mount("size=8m")


def test_doctor_warns_of_a_disk_that_is_nearly_full(small_disk):
    kept = center.Journal(small_disk / "center")
    params = jnp.zeros(250_000)
    with service.serve(RULE, params, durability=kept) as own:
        assert checks(own.address, code=0)["disk"][0] == "ok"  # two more fit
        taken = small_disk / "taken"
        taken.write_bytes(bytes(3_500_000))  # one more does
        result, message = checks(own.address, code=0)["disk"]
        assert (result, "make room before a second" in message) == ("warning", True)
        taken.write_bytes(bytes(6_500_000))
        result, message = checks(own.address, code=1)["disk"]
        taken.unlink()
    assert result == "failed"
    assert re.match(r"\d+ kB are free, and .* takes 2 MB: make room, or", message)


@pytest.mark.parametrize(
    ("address", "environment", "result"),
    [
        ("10.1.2.3:5000", {}, "ok"),
        ("10.1.2.3:5000", {"HTTPS_PROXY": "http://127.0.0.1:1"}, "ok"),
        ("10.1.2.3:5000", {"http_proxy": "http://anna:secret@127.0.0.1:1"}, "warning"),
        ("127.0.0.1:5000", {"grpc_proxy": "http://127.0.0.1:1"}, "ok"),
        ("unix:/tmp/center", {"grpc_proxy": "http://127.0.0.1:1"}, "ok"),
        ("a.b:1", {"grpc_proxy": "http://127.0.0.1:1", "no_proxy": "b, c"}, "ok"),
        ("a.d:1", {"grpc_proxy": "http://127.0.0.1:1", "no_proxy": "b, c"}, "warning"),
    ],
)
def test_doctor_warns_of_a_proxy(monkeypatch, address, environment, result):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    there = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **how: [there])
    checks = Checks(address, None, None, timeout=1.0, tls=None)
    # The next check would connect.
    (proxy,) = (
        found for found in itertools.islice(checks.run(), 2) if found.check == "proxy"
    )
    assert proxy.result == result
    assert "secret" not in proxy.message


def test_doctor_reads_an_address_from_a_file(server, tmp_path):
    where = tmp_path / "center"
    found = checks(f"file:{where}", code=1)
    assert "no center has published its address" in found["address"][1]
    where.write_text(f"{server.address}\n")
    found = checks(f"file:{where}", code=0)
    assert found["address"][1].startswith(f"{server.address} is 127.0.0.1")
    assert "socket" in found["rates"][1]
