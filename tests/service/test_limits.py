"""Limits on peers: memory, time, connections and calls that one of them may take."""

import contextlib
import dataclasses
import functools
import inspect
import queue
import resource
import select
import socket
import threading
import time

import grpc
import numpy as np
import pytest
from helpers import sessions, shared, tuning
from helpers.waiting import returned, wait_until

from agn_optax import errors, service
from agn_optax.center import Submission
from agn_optax.service import _address, _watchdog
from agn_optax.service import center_pb2 as pb
from agn_optax.service._address import SERVICE
from agn_optax.service.security import _call_limits, _rate_limits
from agn_optax.service.server import _servicer
from agn_optax.service.transports import GrpcLink, Target, _connection, _grpc, _socket
from agn_optax.service.wire import _errors, _frames, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import SIZES

RULE = shared.downpour()
TIMEOUT = 60  # s, generous: no test should come near it
SIZE = 1 << 20  # elements
START = np.zeros(SIZE, np.float32)
pytestmark = pytest.mark.usefixtures("patient_dials")
transports = pytest.mark.parametrize("transport", ["grpc", "socket"])


@pytest.fixture
def server():
    with service.serve(RULE, START, limits=service.Limits(max_workers=4)) as server:
        yield server


@pytest.fixture
def center(server):
    with service.connect(server.address, RULE, timeout=TIMEOUT) as center:
        yield center


class Peer:
    """A client that sends arbitrary bytes as a call to the center."""

    def __init__(self, center, transport, call="Exchange"):
        remote = sessions.remote(center)
        if transport == "grpc":
            self._requests = queue.SimpleQueue()
            messages = iter(self._requests.get, None)
            self.link = GrpcLink(remote.connection, call, Buffers(), messages)
        else:
            offer = remote._offers["socket"]
            self.link = _socket.SOCKET.dial(Target(remote.connection, offer, Buffers()))
        self._transport = transport

    def send_bytes(self, data):
        if self._transport == "grpc":
            self._requests.put(data)
        else:
            self.link._sock.sendall(data)

    def join(self, name="anna"):
        join = pb.Join(protocol=_address.PROTOCOL, worker=name, session_id=name)
        self.send_bytes(frame_bytes(pb.Header(join=join)))
        assert self.link.read_header().HasField("joined")

    def wait_for_end(self):
        """Wait until the center has ended the call; return its error, if any."""
        try:
            with contextlib.suppress(*self.link.end_errors):
                while self.link.read_header():
                    pass
        except errors.AgnOptaxError as error:
            return error
        return self.link.end_reason()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._transport == "grpc":
            self._requests.put(None)
        self.link.cancel()


def frame_bytes(header, buffer_size=0):
    header = header.SerializeToString()
    return SIZES.pack(len(header), buffer_size) + header


def message(server, sequence=1):
    schema = sessions.servicer(server)._frames.schemas.message
    sent = pb.Message(sequence=sequence, schema_hash=schema.hash)
    return frame_bytes(pb.Header(message=sent), schema.size)


@contextlib.contextmanager
def sending_single_bytes(send_bytes):
    """Send a byte every 50 ms meanwhile."""
    ended = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not ended.wait(0.05):
                send_bytes(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def others_continue(center, versions=3):
    before = center.pull().version
    for version in range(before, before + versions):
        ones = np.ones(SIZE, np.float32)
        sessions.exchange(center, ones, anchor_version=version, worker="bert")
    assert center.pull().version == before + versions


@transports
def test_peer_that_stalls_within_a_message_is_disconnected(
    server, center, transport, monkeypatch
):
    tuning.set_transfer_timeout(monkeypatch, 1.0)
    with Peer(center, transport) as peer:
        peer.join()
        peer.send_bytes(message(server) + bytes(100))
        others_continue(center)
        peer.wait_for_end()
        wait_until(lambda: not sessions.servicer(server).exchanges.running)
    wait_until(lambda: not _watchdog.watchdog._watched)


@transports
def test_peer_that_sends_single_bytes_is_disconnected(
    server, center, transport, monkeypatch
):
    """Bytes keep coming, but too slowly."""
    tuning.set_transfer_timeout(monkeypatch, 1.0)
    monkeypatch.setattr(_watchdog, "MIN_RATE", 1 << 40)
    with Peer(center, transport) as peer:
        peer.join()
        peer.send_bytes(message(server))
        with sending_single_bytes(peer.send_bytes):
            peer.wait_for_end()
    wait_until(lambda: not sessions.servicer(server).exchanges.running)


@transports
def test_unauthenticated_connections_are_closed_after_timeout(
    server, center, transport, monkeypatch
):
    tuning.set_handshake_timeout(monkeypatch, 1.0)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(center, transport)) for _ in range(50)]
        for peer in peers[:25]:
            peer.send_bytes(b"\x01\0")  # the beginning of a head
        assert center.status()["version"] == 0
        for peer in peers:
            peer.wait_for_end()
        others_continue(center)
    wait_until(lambda: threading.active_count() < before + 25)


@transports
def test_peer_that_does_not_read_its_answer_is_disconnected(
    server, center, transport, monkeypatch
):
    large = np.zeros(8 * SIZE, np.float32)  # more than sockets hold
    tuning.set_transfer_timeout(monkeypatch, 0.5)
    with (
        service.serve(RULE, large) as large_server,
        service.connect(large_server.address, RULE, transports=[transport]) as other,
    ):
        anna = other.join("anna")
        anna.submit(Submission(1, large, anchor_version=0))
        wait_until(lambda: large_server.center.version == 1)
        wait_until(lambda: not sessions.servicer(large_server).exchanges.running)
        # Nothing is lost: the worker asks again.
        assert anna.collect(1, timeout=TIMEOUT).version == 1


@transports
@pytest.mark.parametrize("size", [0, 257, 60_000])
def test_empty_and_long_names_are_rejected(server, center, transport, size):
    with Peer(center, transport) as peer:
        join = pb.Join(protocol=_address.PROTOCOL, worker="a" * size, session_id="1")
        peer.send_bytes(frame_bytes(pb.Header(join=join)))
        why = peer.wait_for_end()
    assert isinstance(why, errors.ProtocolError)
    assert f"1 to 256 bytes, got {size}" in str(why)
    assert server.center.workers == set()


def test_leave_of_an_unknown_name_is_not_remembered(server, center):
    ledger = server.center.core.ledger
    for i in range(20):
        request = pb.LeaveRequest(worker=f"{i}" + "a" * 100_000, session_id="1")
        sessions.connection(center).unary("Leave", request, pb.LeaveReply)
    assert not ledger._ended
    assert not sessions.servicer(server)._traffic._workers
    assert not center.status()["workers"]


@transports
def test_large_control_part_is_rejected(server, center, transport):
    with Peer(center, transport) as peer:
        peer.send_bytes(SIZES.pack(_frames.MAX_HEADER + 1, 0))
        why = peer.wait_for_end()
    assert isinstance(why, errors.ProtocolError)
    assert "at most 65536 bytes" in str(why)


def test_heartbeat_for_more_sessions_than_max_workers_is_rejected(center):
    reported = [pb.Session(worker="anna", session_id="1")] * 5
    with pytest.raises(errors.ProtocolError, match=r"has at most 4 workers, .* 5$"):
        sessions.connection(center).unary(
            "Alive", pb.AliveRequest(sessions=reported), pb.AliveReply
        )


def start(schema, worker="a", schema_hash=b""):
    frame = pb.Start(protocol=_address.PROTOCOL, worker=worker, schema_size=len(schema))
    frame.schema_hash = schema_hash
    return frame_bytes(pb.Header(start=frame), len(schema))


BOMB = pb.Schema(leaves=bytes(4 << 20)).SerializeToString()


@pytest.mark.parametrize("size", [len(BOMB), 60 << 20])
def test_center_serves_others_while_it_rejects_an_oversized_schema(size, monkeypatch):
    """Neither does a schema larger than the limit of its bytes."""
    monkeypatch.setattr(_trees, "MAX_LEAVES", 1 << 13)
    with (
        service.serve(RULE) as server,
        service.connect(server.address, RULE, timeout=TIMEOUT) as center,
        Peer(center, "grpc", "Initialize") as peer,
    ):
        peer.send_bytes(start(bytes(size)))
        for begin in range(0, len(BOMB), 1 << 20):
            peer.send_bytes(BOMB[begin : begin + (1 << 20)])
        why = peer.wait_for_end()
        assert isinstance(why, errors.ProtocolError)
        assert "at most" in str(why)
        center.initialize(START, worker="c")
        assert center.describe().version == 0


def test_initialize_of_an_initialized_center_reads_no_schema(server, center):
    """Another worker, or the same chief with another model, gets an error at once."""
    with Peer(center, "grpc", "Initialize") as peer:
        peer.send_bytes(start(BOMB))
        assert isinstance(peer.wait_for_end(), errors.AlreadyInitializedError)
    with service.serve(RULE) as other:
        with service.connect(other.address, RULE) as chief:
            chief.initialize(START, worker="chief")
            chief.initialize(START, worker="chief")
            assert chief.describe().version == 0
            with Peer(chief, "grpc", "Initialize") as peer:
                peer.send_bytes(start(BOMB, "chief"))
                assert isinstance(peer.wait_for_end(), errors.TreeMismatchError)
        with (
            service.connect(other.address, RULE) as late,
            pytest.raises(errors.TreeMismatchError, match=r"float32\[3\], where"),
        ):
            sessions.remote(late).initialize(np.zeros(3, np.float32), "chief")


def test_one_chief_initializes_at_a_time(monkeypatch):
    """Others wait, because the parameters of each would be held in memory."""
    monkeypatch.setattr(_call_limits, "CHIEF_TIMEOUT", 1.0)
    with (
        service.serve(RULE) as server,
        service.connect(server.address, RULE, timeout=TIMEOUT) as center,
        Peer(center, "grpc", "Initialize") as peer,
    ):
        taken = returned(
            monkeypatch,
            sessions.servicer(server).call_limits.initializations,
            "acquire",
        )
        schema = _trees.to_bytes(_trees.schema_of(START))
        peer.send_bytes(start(schema) + schema)
        peer.send_bytes(
            frame_bytes(pb.Header(parameters=pb.Parameters()), START.nbytes)
        )
        peer.send_bytes(bytes(1000))
        assert taken.wait(TIMEOUT)
        other = service.connect(server.address, RULE, timeout=TIMEOUT)
        with other:
            sessions.remote(other).initialize(START, "b")
        peer.wait_for_end()  # disconnected, because it stalled
        with pytest.raises(errors.AlreadyInitializedError, match="'b'"):
            center.initialize(START, worker="c")


def test_initialized_center_answers_a_chief_while_another_one_sends(server):
    initializations = sessions.servicer(server).call_limits.initializations
    busy = errors.CenterBusyError("not free")
    with (
        service.connect(server.address, RULE, timeout=4) as chief,
        initializations.held("another chief", busy),
        pytest.raises(errors.AlreadyInitializedError),
    ):
        chief.initialize(START, worker="chief")


def test_stalled_chief_is_disconnected_before_others_time_out():
    timeout = inspect.signature(service.connect).parameters["timeout"].default
    waits = _call_limits.CHIEF_TIMEOUT + _servicer.WAITING_INTERVAL
    assert 2 * waits < timeout


def test_number_of_concurrent_pulls_is_limited(server, center):
    """Each may keep a version in memory; further pulls wait for their turn."""
    places = _call_limits.MAX_PULLS
    for number in range(places):
        assert sessions.servicer(server).call_limits.pulls.acquire(
            number, timeout=TIMEOUT
        )
    pulled = []
    pulling = threading.Thread(target=lambda: pulled.append(center.pull()))
    pulling.start()
    ones = np.ones(SIZE, np.float32)
    sessions.exchange(center, ones, anchor_version=0, worker="bert")
    assert not pulled
    for number in range(places):
        sessions.servicer(server).call_limits.pulls.release(number)
    pulling.join(TIMEOUT)
    assert pulled[0].version == 1


def test_one_caller_cannot_take_all_pulls(server, center):
    """A caller may read as slowly as is just allowed."""
    pulls = sessions.servicer(server).call_limits.pulls
    while pulls.acquire("eve", timeout=0.0):
        pass
    assert center.pull().version == 0
    pulls.release("eve")
    assert pulls.acquire("eve", timeout=0.0)


SMALL = np.zeros(10, np.float32)
TOKEN_LINES = b"worker anna 0123456789abcdef\nobserver * fedcba9876543210"
WITH_TOKENS = service.Security(access=service.Access(TOKEN_LINES))
FEW_CALLS = service.Limits(max_workers=1, calls=1e-3)
READERS = TOKEN_LINES.replace(b"observer", b"reader")
ANNA, EVE = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def serve_few_calls(monkeypatch):
    """A function that serves with so few calls that 60 at once block for hours."""
    tuning.set_call_burst(monkeypatch, 45.0)
    return functools.partial(service.serve, RULE, SMALL, limits=FEW_CALLS)


@contextlib.contextmanager
def raises_too_many_calls():
    with pytest.raises(errors.CenterUnreachableError, match="too many calls: "):
        yield


def call_many_times(call, ignored_error=()):
    for _ in range(200):
        with contextlib.suppress(*ignored_error):
            call()


def test_rate_of_calls_of_one_caller_is_limited(monkeypatch):
    tuning.set_call_burst(monkeypatch, 0.0)
    calls, free = 10.0, _call_limits._CALLS_OF_WORKER
    with (
        service.serve(
            RULE, SMALL, limits=service.Limits(max_workers=1, calls=calls)
        ) as server,
        service.Observer(server.address) as eve,
    ):
        begin, count = time.monotonic(), 0
        while time.monotonic() < begin + 1.0:
            eve.status()
            count += 1
        seconds = time.monotonic() - begin
        assert count <= free + calls * (seconds + 1.0)


def test_rate_limit_of_one_caller_does_not_affect_others(serve_few_calls):
    with (
        serve_few_calls(security=WITH_TOKENS) as server,
        service.Observer(server.address, token=EVE) as eve,
        service.connect(server.address, RULE, token=ANNA) as center,
    ):
        anna = center.join("anna")
        with raises_too_many_calls():
            call_many_times(eve.status)
        for number in range(1, 100):  # exchanges are not limited
            assert (
                anna.exchange(Submission(number, SMALL, anchor_version=0)).version
                == number
            )
        assert center.pull().version == 99


def test_rate_limited_host_loses_no_worker(serve_few_calls):
    """At a center without tokens, callers are only known by their host."""
    with (
        serve_few_calls(limits=dataclasses.replace(FEW_CALLS, lease=1.5)) as server,
        service.Observer(server.address) as eve,
        service.connect(server.address, RULE) as center,
    ):
        anna = center.join("anna")
        with raises_too_many_calls():
            call_many_times(sessions.connection(eve).describe)

        def seen():
            return server.center.core.members()[1]["anna"].seen

        for _ in range(3):
            before = seen()
            wait_until(lambda before=before: seen() > before)
        assert anna.exchange(Submission(1, SMALL, anchor_version=0)).version == 1


def test_guessing_tokens_is_rate_limited(serve_few_calls):
    with serve_few_calls(security=WITH_TOKENS) as server:
        with (
            service.Observer(server.address, token="0" * 16) as eve,
            raises_too_many_calls(),
        ):
            call_many_times(eve.status, [errors.NotAllowedError])
        with service.Observer(server.address, token=EVE) as known:
            assert known.status()["version"] == 0


def test_health_checks_are_rate_limited(serve_few_calls):
    with serve_few_calls() as server, service.Observer(server.address) as eve:
        assert eve.health() == "SERVING"
        with raises_too_many_calls():
            call_many_times(eve.health)


CHECK = "/grpc.health.v1.Health/Check"
EVERY_CALL = (
    *(f"/{SERVICE}/{m.name}" for m in pb.DESCRIPTOR.services_by_name["Center"].methods),
    CHECK,
)


@contextlib.contextmanager
def open_call(address, path, token="", messages=()):
    """Yield a call that sends these messages, and does not end by itself."""
    sent = queue.SimpleQueue()
    for message in messages:
        sent.put(message)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)
        stream = call(iter(sent.get, None), metadata=metadata, timeout=10.0)
        try:
            yield stream
        finally:
            stream.cancel()
            sent.put(None)


@pytest.mark.parametrize("path", EVERY_CALL)
def test_silent_call_without_token_is_rejected_at_once(path):
    access = service.Access(TOKEN_LINES)
    with (
        service.serve(RULE, SMALL, security=service.Security(access=access)) as server,
        open_call(server.address, path) as call,
    ):
        assert call.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", EVERY_CALL)
def test_silent_call_is_ended_after_timeout(path, monkeypatch):
    for timeout in ("HANDSHAKE_TIMEOUT", "CHIEF_TIMEOUT"):
        monkeypatch.setattr(_call_limits, timeout, 0.2)
    with service.serve(RULE) as server, open_call(server.address, path) as call:
        assert call.code() != grpc.StatusCode.DEADLINE_EXCEEDED


def test_call_without_its_message_is_rejected(server):
    with grpc.insecure_channel(server.address) as channel:
        status = channel.stream_unary(f"/{SERVICE}/Status")
        with pytest.raises(grpc.RpcError, match="must have a message, got none"):
            status(iter(()), timeout=TIMEOUT)


def test_call_beyond_the_maximum_is_answered_later(monkeypatch):
    """The calls within the maximum continue."""
    monkeypatch.setattr(_grpc, "_MAX_CALLS", 3 - 16)
    tuning.set_handshake_timeout(monkeypatch, TIMEOUT)
    with (
        service.serve(RULE, SMALL, limits=service.Limits(max_workers=1)) as server,
        service.connect(server.address, RULE, transports=["grpc"]) as center,
        service.Observer(server.address) as observer,
    ):
        anna = center.join("anna")
        with Peer(center, "grpc"), Peer(center, "grpc"):
            wait_until(lambda: len(_watchdog.watchdog._watched) == 2)
            with pytest.raises(errors.CenterUnreachableError, match="Concurrent RPC"):
                observer.status()
            assert anna.exchange(Submission(1, SMALL, anchor_version=0)).version == 1
        wait_until(lambda: not _watchdog.watchdog._watched)
        # gRPC counts a call until some milliseconds after its end.
        assert sessions.connection(observer).retry(observer.status)["version"] == 1


def test_calls_of_a_start_are_not_delayed():
    """All workers may be one caller, and start at once."""
    workers = 100
    limits = service.Limits(max_workers=workers, calls=1e-9)
    with service.serve(RULE, SMALL, limits=limits) as server:
        for _ in range(workers * _call_limits._CALLS_OF_WORKER):
            sessions.servicer(server).call_limits.admit("anna")


def test_callers_that_spent_most_are_remembered_longest(monkeypatch):
    monkeypatch.setattr(_rate_limits, "_MAX_BUCKETS", 8)
    limiter = _rate_limits.RateLimiter(1e-3)
    for _ in range(100):
        assert limiter.take("eve", 100.0)
    for number in range(100):
        assert limiter.take(number, 1.0)
    assert len(limiter._full_at) <= 8
    assert not limiter.take("eve", 1.0, max_wait=0.0)


def test_busy_center_is_not_reported_as_unreachable(serve_few_calls, caplog):
    with (
        serve_few_calls() as server,
        contextlib.closing(_connection.Connection(server.address, TIMEOUT)) as anna,
    ):
        with raises_too_many_calls():
            call_many_times(anna.describe)
        with pytest.raises(errors.CenterBusyError, match="answers, but has not"):
            anna.retry(anna.describe, within=0.0)
        assert anna.unreachable_since is None
    assert "is busy (too many calls" in caplog.text
    assert "does not answer" not in caplog.text


@contextlib.contextmanager
def asking(server, what):
    """Yield a function that makes a call which is rejected."""
    token = ANNA if what == "heartbeat of an unknown session" else EVE
    unknown = [pb.Session(worker="anna", session_id="of another")]
    with (
        service.Observer(server.address, token=token) as observer,
        service.connect(server.address, RULE, token=ANNA) as center,
    ):
        unary = sessions.connection(observer).unary
        yield {
            "heartbeat of an unknown session": lambda: unary(
                "Alive", pb.AliveRequest(sessions=unknown), pb.AliveReply
            ),
            "what it may not": observer.drain,
            "nothing that makes sense": lambda: unary(
                "Status", _InvalidMessage(), pb.StatusReply
            ),
            "by no token": lambda: grpc_call(server.address, "Status", "Basic abc"),
            "joins that are none": lambda: send_acknowledge_first(center),
        }[what]


class _InvalidMessage:
    def SerializeToString(self):  # noqa: N802 as that of protobuf
        return b"\xff" * 9


def grpc_call(address, name, authorization):
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{name}")
        try:
            call(b"", metadata=[("authorization", authorization)])
        except grpc.RpcError as error:
            raise _errors.exception_of(error, address) from None


def send_acknowledge_first(center):
    with Peer(center, "socket") as peer:
        peer.send_bytes(frame_bytes(pb.Header(acknowledge=1)))
        peer.link.read_header()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "what",
    [
        "heartbeat of an unknown session",
        "what it may not",
        "nothing that makes sense",
        "by no token",
        "joins that are none",
    ],
)
def test_rejected_calls_are_rate_limited(serve_few_calls, what):
    rejected = errors.NotAllowedError, errors.ProtocolError
    with (
        serve_few_calls(security=WITH_TOKENS) as server,
        asking(server, what) as call,
        raises_too_many_calls(),
    ):
        call_many_times(call, rejected)


def test_number_of_waiting_pulls_per_caller_is_limited(monkeypatch):
    """Each has a thread, and one caller cannot take all threads."""
    monkeypatch.setattr(_servicer, "WAITING_INTERVAL", 0.1)
    with (
        service.serve(
            RULE,
            limits=service.Limits(max_workers=1),
            security=service.Security(access=service.Access(READERS)),
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        waiting_pulls = sessions.servicer(server).call_limits.waiting_pulls
        monkeypatch.setattr(waiting_pulls, "_limit_of_caller", 3)
        centers = [
            stack.enter_context(
                service.connect(server.address, RULE, token=token, timeout=TIMEOUT)
            )
            for token in (ANNA, EVE)
        ]
        for count in range(1, 4):
            request = iter([pb.PullRequest(wait=1e9).SerializeToString()])
            link = GrpcLink(sessions.connection(centers[0]), "Pull", Buffers(), request)
            stack.callback(link.cancel)
            assert link.read_header().HasField("waiting")
            assert waiting_pulls._counts.total() == count
        with pytest.raises(errors.CenterUnreachableError, match="too many pulls are"):
            sessions.remote(centers[0]).pull(0.0)
        with pytest.raises(errors.NotInitializedError):
            sessions.remote(centers[1]).pull(0.0)


def test_rejected_peer_is_disconnected_after_timeout(server, center, monkeypatch):
    with Peer(center, "socket") as peer:
        tuning.set_handshake_timeout(monkeypatch, 0.3)
        peer.send_bytes(
            frame_bytes(pb.Header(join=pb.Join(protocol=_address.PROTOCOL)))
        )
        begin, accepted = (
            time.monotonic(),
            sessions.listener(server, "socket")._connections,
        )
        with sending_single_bytes(peer.send_bytes):
            wait_until(lambda: not accepted)
        assert time.monotonic() - begin < TIMEOUT / 2


def test_peer_with_a_slow_greeting_is_disconnected(server, monkeypatch):
    tuning.set_handshake_timeout(monkeypatch, 0.3)
    port = int(server.direct_address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as end:
        with contextlib.suppress(OSError):
            for byte in _socket.GREETING:
                end.sendall(bytes([byte]))
                if select.select([end], [], [], 0.1)[0]:  # the server closes it
                    break
        with contextlib.suppress(ConnectionResetError):
            assert not end.recv(1)
    wait_until(lambda: not _watchdog.watchdog._watched)


def test_traffic_of_workers_that_left_is_forgotten(server, center):
    ones = np.ones(SIZE, np.float32)
    for number in range(20):
        session = center.join(f"worker {number}")
        session.exchange(Submission(1, ones, anchor_version=number))
        session.leave()
    assert (
        len(sessions.servicer(server)._traffic._workers)
        <= 2 * sessions.servicer(server).max_workers + 1
    )
    assert center.status()["bytes_received"] == 20 * ones.nbytes


@pytest.mark.parametrize("calls", [0.0, -1.0, float("inf"), float("nan")])
def test_calls_must_be_a_positive_number(calls):
    with pytest.raises(errors.InvalidArgumentError, match=r"in \(0, inf\), got"):
        service.Limits(calls=calls)


def test_calls_of_none_is_no_limit(monkeypatch):
    tuning.set_call_burst(monkeypatch, -1.0)
    with (
        service.serve(RULE, SMALL, limits=service.Limits(calls=None)) as server,
        service.Observer(server.address) as eve,
    ):
        for _ in range(20):
            eve.status()


@pytest.fixture
def serve_few_connections(monkeypatch):
    """A function that serves with two new connections per host, for hours."""
    monkeypatch.setattr(_call_limits, "HANDSHAKE_BURST", 2.0)
    return functools.partial(service.serve, RULE, SMALL, limits=FEW_CALLS)


def is_rejected(end):
    end.settimeout(TIMEOUT)
    with contextlib.suppress(ConnectionResetError):
        return not end.recv(1)
    return True


UNKNOWN_KEY_GREETING = _socket.GREETING + bytes(16)


def open_rejected_connections(port, count=5):
    """Make connections from this host that greet with an unknown key."""
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.sendall(UNKNOWN_KEY_GREETING)
            assert is_rejected(end)


def threads_of_connections(server):
    return len(sessions.listener(server, "socket")._threads._running)


def test_connections_of_a_host_beyond_its_limit_use_no_thread(
    serve_few_connections, monkeypatch
):
    with serve_few_connections() as server:
        listener = sessions.listener(server, "socket")
        served = []
        monkeypatch.setattr(listener, "_serve", lambda end: served.append(end.close()))
        open_rejected_connections(int(server.direct_address.rpartition(":")[2]), 20)
        assert len(served) <= 3  # the last one comes before the limit is reached


@pytest.mark.parametrize("transport", ["grpc", "socket", "memory"])
@pytest.mark.parametrize("security", [None, WITH_TOKENS])
def test_worker_joins_from_a_host_with_too_many_connections(
    serve_few_connections, transport, security
):
    """Open connections continue, and a new one is made over gRPC."""
    with serve_few_connections(security=security) as server:
        transports = dict.fromkeys([transport, "grpc"])
        options = {"token": ANNA, "transports": transports, "timeout": TIMEOUT}
        port = int(server.direct_address.rpartition(":")[2])
        with service.connect(server.address, RULE, **options) as center:
            anna = center.join("anna")
            open_rejected_connections(port)
            assert anna.exchange(Submission(1, SMALL, anchor_version=0)).version == 1
            sessions.link(anna).cancel()
            assert anna.exchange(Submission(2, SMALL, anchor_version=1)).version == 2
        assert not sessions.servicer(server).call_limits.accepts_connection(
            "this machine"
        )


def test_accept_rate_of_a_port_is_limited(monkeypatch):
    """All hosts share the limit; more connections wait in the system's queue."""
    monkeypatch.setattr(_socket, "_ACCEPT_PAUSE", 0.1)
    with (
        _socket.listen_at("127.0.0.1:0") as listening,
        contextlib.ExitStack() as stack,
    ):
        accepted = _socket.accept_connections(listening, lambda: False)
        begin = time.monotonic()
        for _ in range(4):
            end = socket.create_connection(listening.getsockname())
            stack.enter_context(end).sendall(b"a")
            stack.enter_context(next(accepted)[0])
        assert time.monotonic() - begin >= 0.3


def is_answered(port, text):
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.sendall(text)
        return not is_rejected(end)


def test_connections_to_the_page_are_limited(serve_few_connections):
    with serve_few_connections(page="127.0.0.1:0") as server:
        port = int(server.page_address.rstrip("/").rpartition(":")[2])
        text = PAGE_REQUEST.replace(b"localhost", b"evil.example")
        assert 0 < sum(is_answered(port, text) for _ in range(10)) <= 3


PAGE_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1024,
    reason="needs 1024 open files for both ends of 300 connections",
)
def test_silent_connections_do_not_keep_workers_out(server):
    """Also long before they time out."""
    port = int(server.direct_address.rpartition(":")[2])
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with service.connect(server.address, RULE, transports=["socket"]) as center:
            center.join("anna")
        assert threading.active_count() < before + 250


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        *(
            (each, "this machine")
            for each in ("", "::1", "127.0.0.5", "::ffff:127.0.0.1")
        ),
    ],
)
def test_addresses_of_one_host_are_grouped(address, expected):
    assert _address.network(address) == expected


def test_center_that_sends_single_bytes_is_unreachable(monkeypatch):
    monkeypatch.setattr(_connection, "MIN_RATE", 1 << 40)
    connection = _connection.Connection("127.0.0.1:1", timeout=0.5)
    end, other = socket.socketpair()
    with other:
        other.sendall(SIZES.pack(60_000, 0))
        link = _socket.SocketLink(end, Buffers())
        with (
            sending_single_bytes(other.sendall),
            pytest.raises(errors.CenterUnreachableError, match="far too slowly"),
            connection.watching(link),
        ):
            link.read_header()
