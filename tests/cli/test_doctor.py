"""``agn-optax doctor`` on one machine; test_doctor_networks.py has faulty networks."""

import contextlib
import json
import socket
import threading

import jax.numpy as jnp
import pytest
from helpers import certificates, sessions
from helpers.commands import PATIENCE, command, fails, succeeds

from agn_optax import rules, service
from agn_optax.ops.doctor import Checks, _checks

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
    assert len(lines) == 11
    assert all(line.startswith("ok ") for line in lines), output
    found = checks(server.address, *options, code=0)
    assert found["state"] == ("ok", "2 leaves, 32 B")
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
    assert "1 of 11 checks failed" in fails(
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


def test_doctor_reports_that_nothing_listens(nowhere, unix_address):
    for address in (nowhere, unix_address):
        found = checks(address, code=1)
        assert list(found) == ["address", "connection"]
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
            setattr(described, name, value)
        return described


@pytest.mark.parametrize(
    ("check", "result", "message", "altered"),
    [
        ("release", "warning", "agn_optax 9.9 at the center", {"release": "9.9"}),
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
    others = found.keys() - {check}
    assert {found[name].result for name in others} == {"ok"}


def test_doctor_reports_that_the_center_is_going_down(server, monkeypatch):
    monkeypatch.setattr(service.Observer, "health", lambda self: "NOT_SERVING")
    found = checks(server.address, code=1)
    assert "draining" in found["health"][1]


def test_doctor_reports_an_unreachable_direct_port():
    """gRPC connects, but nothing listens at the port that the center offers."""
    with service.serve(RULE, jnp.zeros(3)) as own:
        for offer in sessions.servicer(own).offers:
            if offer.transport == "socket":
                offer.address = ":1"
        result, message = checks(own.address, code=0)["second port"]
    assert result == "warning"
    assert "cannot connect by socket: " in message
    assert "open :1 in the firewall" in message
    assert "--direct-address" in message


def test_doctor_compares_the_interface_with_the_expected_one(server):
    found = checks(server.address, "--interface=lo", code=0)["connection"]
    assert found == ("ok", f"connected to {server.address} over interface 'lo'")
    said = fails("doctor", server.address, "--interface=none0", code=2)
    assert "interface must be one of this machine's" in said


def test_doctor_warns_when_its_token_may_not_exchange(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("observer * 0123456789abcdef\n")
    mine = tmp_path / "mine"
    mine.write_text("0123456789abcdef\n")
    access = service.Access(tokens)
    with service.serve(
        RULE, jnp.zeros(3), security=service.Security(access=access)
    ) as own:
        found = checks(own.address, f"--token-file={mine}", code=0)
    result, message = found["role"]
    assert result == "warning"
    assert "may only call Describe, Health, Status: a worker needs a token" in message


def test_doctor_warns_of_a_slow_round_trip(server, monkeypatch):
    monkeypatch.setattr(_checks, "_SLOW_ROUND_TRIP", 0.0)
    result, message = checks(server.address, code=0)["round trip"]
    assert result == "warning"
    assert "ms: long periods or overlap=True hide it" in message
    monkeypatch.setattr(_checks, "_MAX_ROUND_TRIP", 0.0)
    result, message = checks(server.address, code=1)["round trip"]
    assert result == "failed"
    assert "workers can hardly join" in message


def test_doctor_reads_an_address_from_a_file(server, tmp_path):
    where = tmp_path / "center"
    found = checks(f"file:{where}", code=1)
    assert "no center has published its address" in found["address"][1]
    where.write_text(f"{server.address}\n")
    found = checks(f"file:{where}", code=0)
    assert found["address"][1].startswith(f"{server.address} is 127.0.0.1")
    assert found["second port"][1].startswith("connected to 127.0.0.1:")
