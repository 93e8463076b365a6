"""The page of a center and its metrics over HTTP: content, access and limits."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import ssl
import sys
import threading
import time

import numpy as np
import pytest
from helpers import certificates, ports, sessions, shared, tuning
from helpers.waiting import returned, wait_until
from prometheus_client import parser

from agn_optax import errors, service
from agn_optax.center import Submission
from agn_optax.service import Access, Tls

RULE = shared.downpour()
START, ONES = np.zeros(3, np.float32), np.ones(3, np.float32)
HERE = "127.0.0.1:0"
LOOKS, WORKS = "observer-0123456789", "worker-0123456789"
TOKENS = f"observer * {LOOKS}\nchief anna {WORKS}".encode()
LIMIT = 20  # s, generous: no test should come near it


@pytest.fixture(scope="module")
def open_server():
    """A server with a page, which tests must not change."""
    with (
        service.serve(RULE, START, page=HERE) as server,
        service.connect(server.address, RULE) as center,
    ):
        session = center.join('a"n\\n\na')
        session.exchange(
            Submission(1, ONES, anchor_version=0, reported={"loss": 0.5, "x": np.nan})
        )
        center.join("bert").exchange(Submission(1, ONES, anchor_version=0))
        sessions.listener(server, "page").monitor.update()
        yield server


def place(server):
    host, _, port = server.page_address.split("//")[1].strip("/").rpartition(":")
    return host, int(port)


def ask(server, path="/", method="GET", context=None, body=None, **headers):
    """Make a request; return status, headers and body of the answer."""
    kind = http.client.HTTPConnection
    more = {}
    if context is not None:
        kind, more = http.client.HTTPSConnection, {"context": context}
    with contextlib.closing(kind(*place(server), timeout=LIMIT, **more)) as end:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        end.request(method, path, body=body, headers=names)
        answer = end.getresponse()
        return answer.status, answer.headers, answer.read()


def response_to(server, text, timeout=LIMIT):
    """Send any bytes; return all that comes back until the connection ends."""
    with socket.create_connection(place(server), timeout=timeout) as end:
        with contextlib.suppress(OSError):
            end.sendall(text)
        received = b""
        with contextlib.suppress(ConnectionError):
            while more := end.recv(1 << 16):
                received += more
        return received


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_page_is_one_file_without_other_resources(open_server):
    status, headers, body = ask(open_server)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.search(rb"(?:src|href)=.?(?:https?:)?//", body)
    assert b"innerHTML" not in body
    policy = dict(
        part.strip().split(" ", 1)
        for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize("path", ["/", "/state.json", "/metrics", "/else"])
def test_headers_forbid_caching_framing_and_sniffing(open_server, path):
    _, headers, _ = ask(open_server, path)
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]


def test_routes_of_the_page(open_server):
    status, headers, body = ask(open_server, "/state.json?a=b")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    view = json.loads(body)
    assert view["version"] == view["exchanges"] == 2
    assert view["rule"] == "downpour"
    for path in ("/favicon.ico", "/page.html", "/../../etc/passwd", "/state"):
        assert ask(open_server, path)[0] == 404
    assert ask(open_server, "/", "HEAD")[2] == b""
    assert int(ask(open_server, "/", "HEAD")[1]["Content-Length"]) > 10_000
    assert ask(open_server, "/state.json", "POST", body=b"a=b")[0] == 501
    assert ask(open_server, "/", "DELETE")[0] == 501


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        *(("GET", "/", {}, 200), ("GET", "/nothing", {}, 404)),
        ("DELETE", "/", {}, 501),
        ("POST", "/", {"body": b"a"}, 501),
        ("GET", "/", {"headers": {"Host": "evil.example"}}, 421),
        ("GET", "/", {"headers": {"Connection": "keep-alive"}}, 200),
    ],
)
def test_connection_closes_after_a_request(open_server, method, path, more, status):
    with contextlib.closing(
        http.client.HTTPConnection(*place(open_server), timeout=LIMIT)
    ) as end:
        end.request(method, path, **more)
        answer = end.getresponse()
        answer.read()
        assert (answer.status, answer.headers["Connection"]) == (status, "close")
        assert end.sock is None


NEXT = b"GET /state.json HTTP/1.1\r\nHost: localhost\r\nX: "


@pytest.mark.parametrize("head", [b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"])
@pytest.mark.parametrize("length", [b"Content-Length: %d\r\n", b""])
def test_body_is_never_taken_for_a_request(open_server, head, length):
    """A browser could send this to a foreign name for this host, to evade `Host`."""
    length = length % len(NEXT) if length else b""
    body = head + b"Host: evil.example\r\n" + length + b"\r\n" + NEXT
    received = response_to(open_server, body + head + b"Host: evil.example\r\n\r\n")
    assert received.count(b"HTTP/1.0 ") == 1
    assert received.split(b" ")[1] == (b"421" if head.startswith(b"GET") else b"501")
    assert b"downpour" not in received


def test_metrics_can_be_parsed_by_prometheus(open_server):
    status, headers, body = ask(open_server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    families = {f.name: f for f in parser.text_string_to_metric_families(body.decode())}

    def value(name, /, **labels):
        (found,) = [
            sample.value
            for family in families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        return found

    assert value("agn_optax_exchanges_total") == value("agn_optax_version") == 2
    name = 'a"n\\n\na'
    assert value("agn_optax_worker_exchanges_total", worker=name) == 1
    assert value("agn_optax_worker_reported", worker=name, name="loss") == 0.5
    assert value("agn_optax_staleness_bucket", le="0.0") == 1
    assert value("agn_optax_staleness_bucket", le="1.0") == 2
    assert value("agn_optax_staleness_bucket", le="+Inf") == 2
    assert value("agn_optax_staleness_sum") == value("agn_optax_staleness_count") - 1
    assert value("agn_optax_events_total", kind="joined") == 2
    assert families["agn_optax_exchanges"].type == "counter"
    assert all(family.documentation for family in families.values())


def test_metrics_without_their_package_name_the_extra(open_server, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, _, body = ask(open_server, "/metrics")
    assert status == 501
    assert b"pip install 'agn_optax[metrics]'" in body
    assert ask(open_server, "/state.json")[0] == 200


def test_foreign_host_name_is_rejected(open_server):
    for path in ("/", "/state.json", "/metrics"):
        status, _, body = ask(open_server, path, Host="evil.example:80")
        assert status == 421
        assert b"ssh -L" in body
        assert b"downpour" not in body
    for own in ("localhost:9999", "[::1]:9999", "[::ffff:127.0.0.1]:9999"):
        assert ask(open_server, "/state.json", Host=own)[0] == 200
    assert b" 421 " in response_to(open_server, b"GET / HTTP/1.0\r\n\r\n")


def test_page_needs_the_tokens_of_the_center():
    with service.serve(
        RULE, START, page=HERE, security=service.Security(access=Access(TOKENS))
    ) as server:
        for path in ("/state.json", "/metrics"):
            status, headers, body = ask(server, path)
            assert (status, headers["WWW-Authenticate"]) == (
                401,
                'Bearer realm="agn_optax"',
            )
            assert b"downpour" not in body
            assert ask(server, path, **bearer(LOOKS))[0] == 200
            assert ask(server, path, **bearer(WORKS))[0] == 200
            status, _, body = ask(server, path, **bearer("wrong-0123456789"))
            assert status == 401
            assert b"does not know that token" in body
            assert ask(server, path, Authorization="Basic YTpi")[0] == 401
            assert ask(server, path + "?token=" + LOOKS)[0] == 401
            assert ask(server, path, Cookie="token=" + LOOKS)[0] == 401
            assert ask(server, path, **bearer("tok\u00e9n-0123456789"))[0] == 401
        assert ask(server, "/")[0] == 200  # the page itself has no data
        page = sessions.listener(server, "page")
        page.monitor.update()
        page.state._next = 0.0  # do not use the cached state
        seen = ask(server, "/state.json", **bearer(LOOKS))[2].decode()
        assert "does not know that token" in seen
        assert not any(token in seen for token in (LOOKS, WORKS, "wrong-012"))


def test_rate_limited_request_gets_status_503(monkeypatch):
    tuning.set_call_burst(monkeypatch, -8.0)  # the calls of one worker are added
    settings = {
        "security": service.Security(access=Access(TOKENS)),
        "limits": service.Limits(max_workers=1, calls=0.01),
    }
    with service.serve(RULE, START, page=HERE, **settings) as server:
        assert ask(server, "/state.json", **bearer(LOOKS))[0] == 200
        assert ask(server, "/state.json", **bearer(LOOKS))[0] == 503


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("page"))


def test_page_uses_the_tls_of_the_center(authority):
    own = authority.issue("/CN=center")
    trusts = ssl.create_default_context(cafile=str(authority.ca))
    tls = Tls(None, own.certificate, own.key)
    security = service.Security(tls=tls, access=Access(TOKENS))
    with service.serve(RULE, START, page=HERE, security=security) as server:
        assert server.page_address.startswith("https://127.0.0.1:")
        assert ask(server, "/", context=trusts)[0] == 200
        assert ask(server, "/state.json", context=trusts)[0] == 401
        found = ask(server, "/state.json", context=trusts, **bearer(LOOKS))
        assert json.loads(found[2])["rule"] == "downpour"
        assert not response_to(
            server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ).startswith(b"HTTP")
        with pytest.raises(ssl.SSLError):
            ask(server, "/", context=ssl.create_default_context())


def test_page_needs_certificates_if_the_center_does(authority):
    own, mine = authority.issue("/CN=center"), authority.issue("/CN=anna/OU=observer")
    with service.serve(
        RULE, START, security=service.Security(tls=own), page=HERE
    ) as server:
        bare = ssl.create_default_context(cafile=str(authority.ca))
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            ask(server, "/", context=bare)
        bare.load_cert_chain(mine.certificate, mine.key)
        assert ask(server, "/state.json", context=bare)[0] == 200


def test_bad_addresses_of_the_page_are_rejected(open_server):
    for page, why in [
        ("0.0.0.0:0", "is not for this machine only"),
        ("unix:/tmp/page", 'page must be "host:port"'),
        ("nonsense", "an address must be"),
        (":".join(map(str, place(open_server))), "cannot listen at 127.0.0.1"),
    ]:
        with pytest.raises(errors.InvalidArgumentError, match=why):
            service.serve(RULE, START, page=page)
    tls = Tls(None, b"-----BEGIN", b"-----BEGIN")
    with pytest.raises(errors.InvalidArgumentError, match="give access="):
        service.serve(RULE, START, page="0.0.0.0:0", security=service.Security(tls=tls))
    with service.serve(
        RULE, START, page="0.0.0.0:0", security=service.Security(insecure=True)
    ) as server:
        assert ask(server, "/state.json", Host="center.example")[0] == 200
        assert server.page_address.startswith("http://0.0.0.0:")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"GET\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\xff" * 100 + b"\n\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
    ],
)
def test_malformed_request_gets_an_error_and_is_closed(open_server, text, answer):
    received = response_to(open_server, text)
    assert received.split(b" ")[1] == answer
    assert b"<script" not in received
    assert ask(open_server, "/state.json")[0] == 200


@pytest.mark.parametrize(
    "text", [b"a" * 30_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000]
)
def test_large_request_is_closed_without_an_answer(open_server, text):
    assert not response_to(open_server, text)
    assert ask(open_server, "/state.json")[0] == 200


def test_slow_request_is_disconnected(open_server, monkeypatch):
    tuning.set_page_timeout(monkeypatch, 0.3)
    with socket.create_connection(place(open_server), timeout=LIMIT) as end:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < LIMIT:
                end.sendall(b"G")
                end.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    assert not end.recv(1)
                    break
        assert time.monotonic() - began < LIMIT


def test_client_that_does_not_read_is_disconnected(open_server, monkeypatch):
    page = sessions.listener(open_server, "page")
    tuning.set_page_timeout(monkeypatch, 0.3)
    monkeypatch.setattr(page, "html", bytes(64 << 20))
    wait_until(lambda: not page._connections)
    cut = returned(monkeypatch, page, "_forget")
    with socket.create_connection(place(open_server), timeout=LIMIT) as end:
        end.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert cut.wait(LIMIT)  # without reading anything


def test_many_connections_use_few_threads_and_block_no_request(monkeypatch):
    most = 16
    tuning.set_page_connections(monkeypatch, most)
    with (
        service.serve(RULE, START, page=HERE) as server,
        service.connect(server.address, RULE) as center,
        contextlib.ExitStack() as stack,
    ):
        session = center.join("anna")
        before = threading.active_count()
        for _ in range(3 * most):
            end = socket.create_connection(place(server), timeout=LIMIT)
            stack.enter_context(end)
            end.sendall(b"G")  # without it, the system accepts no connection yet
        assert ask(server, "/state.json")[0] == 200
        assert len(sessions.listener(server, "page")._connections) <= most
        # Some are about to end; silent connections would be closed after 10 s only.
        wait_until(lambda: threading.active_count() <= before + most + 1, limit=5)
        session.exchange(Submission(1, ONES, anchor_version=0))
        server.stop()
        wait_until(lambda: threading.active_count() < before)


def test_expensive_state_is_cached_longer(open_server, monkeypatch):
    now, computed = 100.0, []
    tuning.set_page_clock(monkeypatch, lambda: now)

    def make():
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        computed.append(1)
        return b""

    state = type(sessions.listener(open_server, "page").state)(make)
    for _ in range(100):
        state()
    assert len(computed) == 1
    now += 0.35  # less than the pause: 0.02 / 0.05 = 0.4, and 0.5 at least
    state()
    assert len(computed) == 1
    now += 0.65
    state()
    assert len(computed) == 2


def test_page_ends_with_its_server():
    server = service.serve(RULE, START, page=ports.free_address())
    host, port = place(server)
    with contextlib.closing(http.client.HTTPConnection(host, port)) as end:
        end.request("GET", "/")
        end.getresponse().read()
        sessions.listener(server, "page").drain()
        end.request("GET", "/state.json")
        view = json.loads(end.getresponse().read())
        assert view["draining"]
        assert view["events"][-1]["kind"] == "draining"
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=LIMIT)
    again = service.serve(RULE, START, page=f"{host}:{port}")
    assert again.page_address == server.page_address
    again.stop()


def test_status_has_the_address_of_the_page(open_server):
    with service.Observer(open_server.address) as observer:
        assert observer.status()["page_address"] == open_server.page_address
