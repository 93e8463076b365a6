"""The HTTP parser of a center's page: valid and invalid requests."""

import itertools
import re
import socket

import numpy as np
import pytest
from helpers import shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agn_optax import service
from agn_optax.ops.watch import _http

RULE = shared.downpour()
STATE = b"GET /state.json HTTP/1.1\r\n"
LIMIT = 20  # s, generous: no test should come near it


@pytest.fixture(scope="module")
def address():
    """Host and port of the page of an open center without rate limits."""
    start = np.zeros(3, np.float32)
    with service.serve(
        RULE, start, page="127.0.0.1:0", limits=service.Limits(calls=None)
    ) as server:
        host, _, port = server.page_address.strip("/").rpartition("/")[2].partition(":")
        yield host, int(port)


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
def test_loopback_hosts_are_recognized(host, is_own):
    assert _http.is_loopback(host) is is_own


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost@evil\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost:80:80\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHOST: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: evil\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\rc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\0\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / http/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\na", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: ::1\r\nHost: ::1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + 2 * b"Content-Length: 0\r\n" + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: \r\n\r\n", 400),
    ],
)
def test_bad_requests_are_rejected(text, status, is_local):
    with pytest.raises(_http.RejectedRequestError) as rejected:
        _http.parse(text, is_local=is_local)
    assert rejected.value.status == status


def test_foreign_host_is_rejected_before_all_else():
    for rest in (b"Content-Length: 9\r\n\r\n", b"\r\nGET / HTTP/1.1\r\n\r\n", b"\r\n"):
        for line in (b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"):
            with pytest.raises(_http.RejectedRequestError) as rejected:
                _http.parse(line + b"Host: evil.example\r\n" + rest, is_local=True)
            assert rejected.value.status == 421


def test_request_is_parsed():
    text = (
        b"HEAD /a?b=c HTTP/1.1\r\nHOST:localhost:80 \r\nAccept: a\r\naccept: b\r\n"
        b"Content-Length: 0\r\nConnection: x, Close\r\n\r\n"
    )
    read = _http.parse(text, is_local=True)
    assert (read.method, read.path) == ("HEAD", "/a")
    assert (read.fields["host"], read.fields["accept"]) == ("localhost:80", "a, b")


@given(st.data())
def test_request_is_received_in_any_pieces(data):
    text = STATE + b"Host: localhost\r\n\r\n"
    cuts = data.draw(st.sets(st.integers(1, len(text) - 1)))
    ends = [0, *sorted(cuts), len(text)]
    pieces = iter([text[a:b] for a, b in itertools.pairwise(ends)])
    assert _http.receive(lambda most: next(pieces)) == text


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
    head, blank, rest = text.partition(b"\r\n\r\n")
    names = re.findall(rb"(?m)^([^\r\n:]*):", head.partition(b"\n")[2])
    hosts = re.findall(rb"\nHost: (\S+)\r", head + b"\r")
    return (
        bool(blank)
        and not rest
        and re.match(rb"(GET|HEAD) /(state.json|metrics) HTTP/1\.[01]\r\n", head)
        and not re.search(rb"(?<!\r)\n|\r(?!\n)", head)
        and all(re.match(rb"[A-Za-z-]+:", line) for line in head.split(b"\r\n")[1:])
        and [name.lower() for name in names].count(b"host") == len(hosts) == 1
        and hosts[0].decode() in OWN
        and b"Transfer-Encoding" not in head
        and b"Content-Length: 60" not in head
        and head.count(b"Content-Length") <= 1
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=STREAMS)
def test_state_is_shown_only_for_one_loopback_host(address, text):
    """For any bytes; and nothing is answered after a body or an error."""
    with socket.create_connection(address, timeout=LIMIT) as end:
        end.sendall(text)
        end.shutdown(socket.SHUT_WR)
        received = b""
        while more := end.recv(1 << 16):
            received += more
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", received)
    assert len(statuses) <= 1
    if b"downpour" in received or (b"200" in statuses and b"/html" not in received):
        assert is_answered(text)
    if is_answered(text):
        assert statuses == [b"200"]
