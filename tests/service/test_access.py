"""Access control by roles, names, tokens and certificates, over every transport."""

import contextlib
import dataclasses
import itertools
import logging
import os
import pathlib
import socket
import stat
import subprocess
import sys

import grpc
import jax.numpy as jnp
import pytest
from helpers import certificates, sessions, shared
from helpers.support import shares

from agn_optax import center, errors, service, tape
from agn_optax.service import Access, Tls, sockets
from agn_optax.service import address as addresses
from agn_optax.service import center_pb2 as pb

RULE = shared.downpour()
LIMIT = 20  # s, generous: no test should come near it
SIZE = 50_000  # elements: enough for shared memory
# The calls of each role, written down a second time on purpose.
ALLOWED = {
    "observer": "Status Health",
    "reader": "Status Health Pull",
    "worker": "Status Health Pull Exchange Alive Leave",
    "chief": "Status Health Pull Exchange Alive Leave Initialize",
    "operator": "Status Health Pull",
}
TRANSPORTS = [
    *("grpc", "socket", "unix"),
    pytest.param("memory", marks=shares),
    "tls",
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


def token(role, name="*"):
    """Return the token of a role and a name."""
    return f"{role}-{'any' if name == '*' else name}-0123456789"


def params():
    return {"w": jnp.zeros(SIZE)}


TOKENS = "\n".join(
    f"{role} {name} {token(role, name)}"
    for role, name in itertools.product(ALLOWED, ("*", "anna"))
).encode()


@contextlib.contextmanager
def served(transport, unix_address, authority, access):
    """Serve a center; yield it and the settings to connect over one transport."""
    settings, tls, client = {}, None, {"timeout": LIMIT}
    client["transports"] = ["grpc" if transport == "grpc" else "socket"]
    if transport == "unix":
        settings["address"] = unix_address
    elif transport == "tls":
        tls = authority.issue("/CN=center")._replace(ca=None)
        client["tls"] = Tls(authority.ca)
    elif transport == "memory":
        client["transports"] = ["memory"]
    security = service.Security(tls=tls, access=access)
    with service.serve(RULE, params(), security=security, **settings) as server:
        yield server, client


def calls(center, observer, name):
    """Return functions that make each call of a center in a worker's name."""
    unary = sessions.connection(center).unary
    session = pb.Session(worker=name, session_id="1")
    leave = pb.LeaveRequest(worker=name, session_id="1")
    return {
        "Status": center.status,
        "Health": observer.health,
        "Pull": center.pull,
        "Exchange": lambda: sessions.exchange(
            center, params(), anchor_version=0, worker=name
        ),
        "Alive": lambda: unary(
            "Alive", pb.AliveRequest(sessions=[session]), pb.AliveReply
        ),
        "Leave": lambda: unary("Leave", leave, pb.LeaveReply),
        "Initialize": lambda: sessions.remote(center).initialize(params(), name),
    }


def allowed(address, client, name="anna", **shown):
    """Return the calls that a caller may make, also if they fail later."""
    found = []
    settings = {key: value for key, value in client.items() if key != "transports"}
    with (
        service.connect(address, RULE, **client, **shown) as center,
        service.Observer(address, **settings, **shown) as observer,
    ):
        for call, make in calls(center, observer, name).items():
            try:
                make()
            except errors.NotAllowedError:
                continue
            except errors.CenterError:  # allowed, but failed
                pass
            found.append(call)
    return " ".join(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_role_allows_its_calls_and_no_others(transport, unix_address, authority):
    with served(transport, unix_address, authority, Access(TOKENS)) as (server, client):
        for role, expected in ALLOWED.items():
            found = allowed(server.address, client, token=token(role))
            assert found == expected, role
            own = allowed(server.address, client, "anna", token=token(role, "anna"))
            assert own == expected, role
            others = allowed(server.address, client, "bert", token=token(role, "anna"))
            calls_of_no_name = [
                name for name in expected.split() if name in ALLOWED["operator"]
            ]
            assert others == " ".join(calls_of_no_name), role


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shown", [None, "x" * 20])
def test_error_without_valid_token_says_what_is_missing(
    transport, shown, unix_address, authority
):
    with served(transport, unix_address, authority, Access(TOKENS)) as (server, client):
        lacks = "does not know that token" if shown else "give connect"
        with pytest.raises(errors.NotAllowedError, match=lacks):
            service.connect(server.address, RULE, token=shown, **client)


def test_error_names_the_roles_or_the_name_that_are_needed():
    with service.serve(
        RULE, params(), security=service.Security(access=Access(TOKENS))
    ) as server:
        with service.connect(
            server.address, RULE, token=token("observer", "anna")
        ) as center:
            with pytest.raises(errors.NotAllowedError) as rejected:
                center.pull()
            expected = "Pull needs the role reader or worker or chief or operator"
            assert expected in str(rejected.value)
            assert "observer 'anna'" in str(rejected.value)
            assert isinstance(rejected.value, PermissionError)
        with service.connect(
            server.address, RULE, token=token("worker", "anna")
        ) as center:
            own = r"worker 'anna': .*Worker\(\.\.\., name='anna'\)"
            with pytest.raises(errors.NotAllowedError, match=own):
                center.join("bert")
            assert not server.center.core.members()[1]


def code_of(address, path, *metadata):
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=LIMIT)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_other_grpc_clients_get_status_codes():
    """Health checks need the same tokens."""
    status, health = f"/{addresses.SERVICE}/Status", "/grpc.health.v1.Health/Check"
    unknown = grpc.StatusCode.UNAUTHENTICATED
    with service.serve(
        RULE, params(), security=service.Security(access=Access(TOKENS))
    ) as server:
        for path in (status, health):
            assert code_of(server.address, path) == unknown
            wrong = ("authorization", "Bearer " + "x" * 20)
            assert code_of(server.address, path, wrong) == unknown
            right = ("authorization", f"bearer {token('observer')}")
            assert code_of(server.address, path, right) == grpc.StatusCode.OK
        right = ("authorization", f"Bearer {token('observer')}")
        pull = f"/{addresses.SERVICE}/Leave"
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert code_of(server.address, pull, right) == denied
        basic = ("authorization", "Basic " + token("observer"))
        assert code_of(server.address, status, basic) == unknown


# Direct connections.


def received(server, key, worker):
    """Return whether a center greets a connection with this key."""
    host, _, port = server.direct_address.rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT) as end:
        end.sendall(sockets.GREETING + key)
        return end.recv(100) == sockets.GREETING


def test_only_those_who_may_join_have_failed_joins_on_the_tape(tmp_path, unix_address):
    durability = center.Journal(tmp_path, keep="contributions")
    with service.serve(
        RULE,
        params(),
        address=unix_address,
        durability=durability,
        security=service.Security(access=Access(TOKENS)),
    ):
        ours = {"token": token("worker", "anna"), "timeout": LIMIT}
        for shown in (None, "wrong-0123456789", token("reader"), ours["token"]):
            with (
                pytest.raises(errors.NotAllowedError),
                service.connect(
                    unix_address, RULE, **{**ours, "token": shown}
                ) as other,
            ):
                other.join("bert")
        with (
            service.connect(unix_address, RULE, **ours) as first,
            service.connect(unix_address, RULE, **ours) as second,
        ):
            first.join("anna")
            with pytest.raises(errors.NameTakenError) as taken:
                second.join("anna")
    joined, failed = list(tape.read(tmp_path).events())[:2]
    assert (joined.kind, joined.workers) == ("join", ("anna",))
    assert failed.failed_join[1:] == ("anna", str(taken.value))
    (counted,) = tape.audit(tape.read(tmp_path)).failed_joins
    assert counted == failed.failed_join


def test_key_belongs_to_its_caller():
    anna, bert = token("worker", "anna"), token("worker", "bert")
    access = Access(f"worker anna {anna}\nworker bert {bert}\n".encode())
    with service.serve(
        RULE, params(), security=service.Security(access=access)
    ) as server:
        authenticator = sessions.servicer(server).authenticator
        keys = [
            authenticator.issue_key(authenticator.caller(t.encode()))
            for t in (anna, bert)
        ]
        assert keys[0] != keys[1]
        assert keys[0] == authenticator.issue_key(authenticator.caller(anna.encode()))
        assert authenticator.caller_of_key(keys[0]).name == "anna"
        assert received(server, keys[0], "anna")
        assert not received(server, b"k" * 16, "anna")
        assert received(server, keys[1], "bert")


def test_tokens_are_never_in_logs_errors_or_reprs(caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    secret = "secret-0123456789abc"  # noqa: S105 of nothing
    file = tmp_path / "tokens"
    file.write_text(f"observer anna {secret}")
    texts = []
    access = Access(file, f"reader * other-{secret}".encode())
    with service.serve(
        RULE, params(), security=service.Security(access=access)
    ) as server:
        texts += [repr(access), repr(access.caller(secret.encode())), repr(server)]
        with service.connect(server.address, RULE, token=secret) as center:
            texts.append(repr(center))
            for call in (center.pull, lambda: center.join("bert")):
                with pytest.raises(errors.NotAllowedError) as rejected:
                    call()
                texts.append(repr(rejected.value))
        with pytest.raises(errors.NotAllowedError) as rejected:
            service.connect(server.address, RULE, token=f"unknown-{secret}")
        texts.append(repr(rejected.value))
    for lines in (f"reader {secret}", f"king * {secret}", f"reader * {secret}\n" * 2):
        with pytest.raises(errors.InvalidArgumentError) as rejected:
            Access(lines.encode())
        texts.append(repr(rejected.value))
    with pytest.raises(errors.InvalidArgumentError) as rejected:
        service.connect("127.0.0.1:1", RULE, token=f"{secret}\n{secret}")
    texts.append(repr(rejected.value))
    assert secret not in "".join(texts) + caplog.text


# Sources of tokens.


def test_token_is_read_from_the_environment(monkeypatch, tmp_path):
    own, file = token("observer"), tmp_path / "token"
    file.write_text(f"{token('reader')}\n")
    with service.serve(
        RULE, params(), security=service.Security(access=Access(TOKENS))
    ) as server:
        monkeypatch.setenv("AGN_OPTAX_TOKEN_FILE", str(file))
        assert allowed(server.address, {}) == ALLOWED["reader"]
        monkeypatch.setenv("AGN_OPTAX_TOKEN", own)
        assert allowed(server.address, {}) == ALLOWED["observer"]
        given = {"token": token("worker")}
        assert allowed(server.address, {}, **given) == ALLOWED["worker"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("short", "must have at least 16 characters, got 5"),
        ("with a space in the middle", "without spaces"),
        (b"0123456789abcdef", "token must be a str, or the path"),
        (pytest.param, "token must be a str"),
    ],
)
def test_bad_tokens_are_rejected(given, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        service.connect("127.0.0.1:1", RULE, token=given)


def test_missing_token_file_is_rejected(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(errors.InvalidArgumentError, match="cannot read the token in"):
        service.connect("127.0.0.1:1", RULE, token=missing)
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot read .*missing"):
        Access(missing)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "worker anna",
            "line 1 of the tokens must have roles, a name and a token, got",
        ),
        ("# none\n\nworker anna 0123456789abcdef more", "line 3 .* got 4 words"),
        ("worker anna 0123", "in line 1 .*must have at least 16 characters, got 4"),
        ("chief,king * 0123456789abcdef", "roles in line 1 .*observer, .*'chief,king'"),
        ("worker a 0123456789abcdef\nworker b 0123456789abcdef", "line 2 .*same token"),
        ("worker anna 0123456789abcdéf", "printable ASCII characters"),
    ],
)
def test_bad_lines_of_a_tokens_file_are_rejected(lines, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        Access(lines.encode())


def test_tokens_file_can_have_comments_and_several_roles():
    access = Access(b"# all\n\nobserver,operator anna 0123456789abcdef # hers\n")
    caller = access.caller(b"0123456789abcdef")
    watches = ("Describe", "Status", "Health")
    assert caller.calls == {*watches, "Pull", "Drain"}
    assert caller.name == "anna"


# Certificates.


@pytest.mark.parametrize("transport", ["grpc", "socket"])
def test_center_with_tokens_needs_one_beside_the_certificate(transport, authority):
    tls = authority.issue("/CN=center")
    client = {"timeout": LIMIT, "transports": [transport]}
    client["tls"] = authority.issue("/CN=anna")
    with service.serve(
        RULE, params(), security=service.Security(tls=tls, access=Access(TOKENS))
    ) as server:
        found = allowed(server.address, client, token=token("reader"))
        assert found == ALLOWED["reader"]
        with pytest.raises(errors.NotAllowedError, match="requires a token"):
            service.connect(server.address, RULE, **client)
    with service.serve(RULE, params(), security=service.Security(tls=tls)) as server:
        expected = {*ALLOWED["chief"].split(), *ALLOWED["operator"].split()}
        assert set(allowed(server.address, client).split()) == expected


# Centers without access settings.


def test_public_address_needs_access_settings(authority):
    elsewhere = "0.0.0.0:0"
    tls = authority.issue("/CN=center")
    alone = service.Security(tls=tls._replace(ca=None))
    with pytest.raises(errors.InvalidArgumentError, match="give access=Access"):
        service.serve(RULE, address=elsewhere, security=alone)
    with pytest.raises(errors.InvalidArgumentError, match="access must be an Access"):
        service.Security(access="tokens")
    for security in (
        service.Security(tls=tls),
        dataclasses.replace(alone, access=Access(TOKENS)),
        service.Security(insecure=True),
        service.Security(insecure=True, access=Access(TOKENS)),
    ):
        service.serve(RULE, address=elsewhere, security=security).stop()


def test_unix_socket_is_for_its_user_only(unix_address):
    path = pathlib.Path(unix_address.removeprefix("unix:"))
    with service.serve(RULE, params(), address=unix_address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_user_cannot_connect_over_abstract_unix_sockets(unix_address):
    """Not even with a key, although any user can reach abstract socket names."""
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "end = socket.socket(socket.AF_UNIX)\n"
        "end.connect('\\0' + sys.argv[1])\n"
        f"end.sendall({sockets.GREETING!r} + bytes.fromhex(sys.argv[2]))\n"
        "print(end.recv(100).decode())\n"
    )
    with service.serve(RULE, params(), address=unix_address) as server:
        for transport in ("socket", "memory"):
            offer = sessions.offer(server, transport)
            name = offer.address.removeprefix("unix:")
            output = subprocess.run(  # noqa: S603 our own program
                [sys.executable, "-c", program, name, offer.key.hex()],
                capture_output=True,
                text=True,
                check=True,
                timeout=LIMIT,
            ).stdout
            assert output == "\n"
