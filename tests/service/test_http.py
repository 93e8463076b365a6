"""Requests for a center's page, valid and invalid, as bytes."""

import contextlib
import itertools
import re
import socket

import numpy as np
import pytest
from helpers import shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agn_optax import service

RULE = shared.downpour()
STATE = b"GET /state.json HTTP/1.1\r\n"
LIMIT = 20  # s, generous: no test should come near it


@contextlib.contextmanager
def page_at(host):
    """Yield an address of the page of an open center without rate limits."""
    with service.serve(
        RULE,
        np.zeros(3, np.float32),
        page=f"{host}:0",
        limits=service.Limits(calls=None),
        security=service.Security(insecure=True),
    ) as server:
        yield "127.0.0.1", int(server.page_address.strip("/").rpartition(":")[2])


@pytest.fixture(scope="module")
def address():
    """The address of a page for this machine only."""
    with page_at("127.0.0.1") as found:
        yield found


@pytest.fixture(scope="module")
def public_address():
    """The address of a page for all machines."""
    with page_at("0.0.0.0") as found:  # noqa: S104 that is tested
        yield found


def answer_to(address, text):
    """Send bytes and nothing after them; return all that comes back."""
    with socket.create_connection(address, timeout=LIMIT) as end:
        end.sendall(text)
        end.shutdown(socket.SHUT_WR)
        received = b""
        while more := end.recv(1 << 16):
            received += more
    return received


def status_of(address, text):
    """Return the status of the answer to a request."""
    return int(answer_to(address, text).split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *(("localhost", True), ("LOCALHOST:1", True), ("127.0.0.1", True)),
        *(("127.0.0.1:8080", True), ("127.1.2.3:1", True), ("[::1]:80", True)),
        *(("[::1]", True), ("localhost.:1", True), ("", False), (":80", False)),
        *(("evil.example", False), ("evil.example:80", False), ("8.8.8.8", False)),
        *(("localhost.evil.example", False), ("127.0.0.1.evil.example:1", False)),
        *(("192.0.2.1:80", False), ("[::]", False), ("localhost:80:80", False)),
    ],
)
def test_loopback_hosts_are_recognized(host, is_own, address):
    status = status_of(address, f"HEAD / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status == (200 if is_own else 421)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost@evil\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHOST: localhost\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: evil\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 421),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET / http/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"GET /\r\n\r\n", 421),
    ],
)
def test_bad_requests_are_rejected(text, status, address):
    assert status_of(address, text) == status


def test_public_page_has_any_name(public_address):
    for host in ("localhost", "center.example:80", "192.0.2.1"):
        text = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"
        assert status_of(public_address, text.encode()) == 200


def test_foreign_host_is_rejected_whatever_follows(address):
    for rest in (b"Content-Length: 9\r\n\r\n", b"\r\nGET / HTTP/1.1\r\n\r\n", b"\r\n"):
        text = b"GET / HTTP/1.1\r\nHost: evil.example\r\n" + rest
        assert status_of(address, text) == 421


def test_request_is_parsed(address):
    text = (
        b"HEAD /state.json?b=c HTTP/1.1\r\nHOST:localhost:80 \r\nAccept: a\r\n"
        b"accept: b\r\nContent-Length: 0\r\nConnection: x, Close\r\n\r\n"
    )
    head, _, body = answer_to(address, text).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"\r\nContent-Type: application/json\r\n" in head
    assert not body
    # The names of fields have no case, and the first line is no field.
    assert status_of(address, text.replace(b"HOST", b"hOsT")) == 200


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_request_is_received_in_any_pieces(address, data):
    text = STATE + b"Host: localhost\r\n\r\n"
    cuts = data.draw(st.sets(st.integers(1, len(text) - 1)))
    ends = [0, *sorted(cuts), len(text)]
    sizes = [end - begin for begin, end in itertools.pairwise(ends)]
    receive = socket.socket.recv

    def in_pieces(end, most, *flags):
        is_page = end.getsockname()[1] == address[1]
        return receive(end, sizes.pop(0) if is_page and sizes else most, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "recv", in_pieces)
        assert answer_to(address, text).startswith(b"HTTP/1.0 200 ")
    assert not sizes


OWN = ["localhost", "127.0.0.1:8080", "[::1]"]
FIELDS = st.one_of(
    st.sampled_from([*OWN, "evil.example", "evil.example:80", ""]).map(
        lambda host: f"Host: {host}"
    ),
    st.sampled_from(
        [
            *("Content-Length: 0", "Content-Length: 60", "Transfer-Encoding: chunked"),
            *("Connection: keep-alive", "X: ", " folded", "no field"),
            "A: b\nHost: localhost",
            *("Host : localhost", "Expect: 100-continue", "A:\rHost: localhost"),
        ]
    ),
)
LINES = st.builds(
    lambda method, path, version: f"{method} {path} HTTP/{version}",
    st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]),
    st.sampled_from(["/state.json", "/metrics", "/", "http://localhost/state.json"]),
    st.sampled_from(["1.1", "1.1", "1.0", "2.0"]),
)
ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n"])


@st.composite
def requests(draw):
    """Draw bytes that resemble a request, valid or not."""
    lines = [draw(LINES), *draw(st.lists(FIELDS, max_size=4)), ""]
    return "".join(line + draw(ENDS) for line in lines).encode()


STREAMS = st.lists(
    st.one_of(requests(), requests(), st.binary(max_size=20)), min_size=1, max_size=3
).map(b"".join)


def is_answered(text):
    """Return whether bytes are a request that may see the state: another parser."""
    head, blank, _ = text.partition(b"\r\n\r\n")
    names = re.findall(rb"(?m)^([^\r\n:]*):", head.partition(b"\n")[2])
    hosts = re.findall(rb"\nHost: (\S+)\r", head + b"\r")
    return (
        bool(blank)
        and re.match(rb"(GET|HEAD) /(state.json|metrics) HTTP/1\.[01]\r\n", head)
        and not re.search(rb"(?<!\r)\n|\r(?!\n)", head)
        and all(re.match(rb"[A-Za-z-]+:", line) for line in head.split(b"\r\n")[1:])
        and [name.lower() for name in names].count(b"host") == len(hosts) == 1
        and hosts[0].decode() in OWN
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=STREAMS)
def test_state_is_shown_only_for_one_loopback_host(address, text):
    """A connection gets at most one answer, for any bytes that it sends."""
    received = answer_to(address, text)
    statuses = re.findall(rb"HTTP/1\.0 (\d+) ", received)
    assert len(statuses) <= 1
    if b"downpour" in received:
        first = re.search(rb"(?i)[\r\n]host:\s*([^\r\n]*)", text)
        assert first[1].decode().strip() in OWN
    if is_answered(text):
        assert statuses == [b"200"]
