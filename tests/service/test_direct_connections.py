"""Direct connections beside gRPC: over sockets and through shared memory."""

import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import weakref

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import network, ports, sessions, shared, tuning
from helpers.support import RULES, assert_identical, shares, tree
from helpers.waiting import BUSY, in_background, wait_until

import agn_optax
from agn_optax import codecs, errors, service
from agn_optax.center import Submission, Synchronous
from agn_optax.service import _address, _watchdog
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import _connection, _memory, _socket
from agn_optax.service.wire import _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import MAX_HEADER, SIZES, FrameReader

RULE = shared.downpour()  # the center subtracts each message
LIMIT = 20  # s, generous: no test should come near it
SIZE = 50_000  # elements, enough for shared memory to be used
TRANSPORTS = ["memory", "socket", "grpc"]
pytestmark = pytest.mark.usefixtures("patient_dials")


@pytest.fixture(params=[pytest.param("memory", marks=shares), "socket", "grpc"])
def transport(request):
    return request.param


def center_params():
    return {"w": jnp.ones(SIZE), "b": jnp.zeros(3)}


@contextlib.contextmanager
def served(*transports, rule=RULE, params=None, **settings):
    params = center_params() if params is None else params
    with (
        service.serve(rule, params, **settings) as server,
        connect(server, *transports, rule=rule) as center,
    ):
        yield server, center


def connect(server, *transports, rule=RULE, **settings):
    """Connect over the given transports; over any if none is given."""
    settings = {"timeout": LIMIT, **settings}
    names = transports or TRANSPORTS
    return service.connect(server.address, rule, transports=names, **settings)


def links(center):
    return [sessions.link(session) for session in sessions.of_center(center)]


def transport_of(center):
    """Return the transport of the only session of a connected center."""
    (session,) = sessions.of_center(center)
    return session.transport


def listener(server, name="socket"):
    return sessions.listener(server, name)


def accepted(server):
    """Return the server's ends of all direct connections."""
    return [
        each
        for name in ("memory", "socket")
        if name in server._listeners
        for each in listener(server, name)._connections.values()
    ]


# Results are the same over every transport.


@functools.cache
def trained(transport, rule):
    like = {**tree(), "large": jnp.ones(SIZE)}
    with served(transport, rule=RULES[rule](), params=like) as (_, center):
        worker = agn_optax.Worker(center, shared.adam(0.1), period=2, name="anna")
        params, state = worker.start(like)
        for i in range(8):
            grads = jax.tree.map(lambda x, i=i: jnp.cos(x + i), params)
            updates, state = worker.tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        assert transport_of(center) == transport
        pulled = center.pull()
        assert pulled.version == worker.exchanges == 4
        return jax.tree.map(np.asarray, (params, state, pulled.params))


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", ["agn", "easgd", "diloco", "average"])
@pytest.mark.parametrize("other", [pytest.param("memory", marks=shares), "socket"])
def test_every_transport_gives_identical_results(other, rule):
    assert_identical(trained(other, rule), trained("grpc", rule))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_center_stays_float32_with_a_narrow_codec(transport, dtype):
    rule = dataclasses.replace(RULE, codec=codecs.cast(dtype))
    with served(rule=rule) as (server, _):
        with connect(server, transport, rule=rule) as center:
            ones = jax.tree.map(jnp.ones_like, center.pull().params)
            answer = sessions.exchange(center, ones, anchor_version=0, worker="anna")
        assert answer.params["w"].dtype == jnp.float32
        np.testing.assert_array_equal(answer.params["w"], 0.0)
        np.testing.assert_array_equal(answer.params["b"], -1.0)


def test_bfloat16_message_gets_a_float32_answer(transport):
    """The worker has bfloat16 parameters; the two segments have different sizes."""
    with served(transport) as (_, center):
        ones = {"w": jnp.ones(SIZE, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
        for version in range(3):
            answer = sessions.exchange(
                center, ones, anchor_version=version, worker="anna"
            )
        np.testing.assert_array_equal(answer.params["w"], 1.0 - 3)


def test_tree_without_elements_is_exchanged(transport):
    for params in ({}, {"w": jnp.zeros((0, 3))}):
        with served(transport, params=params) as (_, center):
            assert (
                sessions.exchange(center, params, anchor_version=0, worker="a").version
                == 1
            )


@pytest.mark.few(1)
def test_answers_are_not_overwritten(transport):
    """Also if many are kept, and after many more exchanges."""
    with served(transport) as (_, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        kept = [
            sessions.exchange(center, ones, anchor_version=version, worker="anna")
            for version in range(2 * _memory.MAX_SEGMENTS)
        ]
        for version, answer in enumerate(kept):
            np.testing.assert_array_equal(answer.params["w"], -float(version))
        view = np.asarray(kept[5].params["w"])
        del kept, answer
        gc.collect()
        for version in range(2 * _memory.MAX_SEGMENTS, 100):
            sessions.exchange(center, ones, anchor_version=version, worker="anna")
        np.testing.assert_array_equal(view, -5.0)


@pytest.mark.parametrize("transport", [pytest.param("memory", marks=shares), "socket"])
def test_memory_of_messages_and_answers_is_reused(transport):
    with served(transport) as (_, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        places = set()
        for version in range(12):
            answer = sessions.exchange(
                center, ones, anchor_version=version, worker="anna"
            )
            places.add(answer.params["w"].unsafe_buffer_pointer())
            del answer
        assert len(places) <= 3
        if transport == "memory":
            assert links(center)[0]._created <= 1 + 3


def test_buffer_is_reused_for_messages_that_fit_into_it():
    """Workers with messages of different sizes may alternate."""
    buffers = Buffers()
    place = buffers.take(1000).ctypes.data
    for size in (500, 1):
        buffer = buffers.take(size)
        assert (buffer.size, buffer.ctypes.data) == (size, place)
        view = buffer[:1]
        del buffer
        assert buffers.take(size).ctypes.data != place  # a view is still alive
        del view
    both = buffers.take(1000), buffers.take(1000)
    places = {buffer.ctypes.data for buffer in both}
    del both  # one of them is kept
    small, large = buffers.take(10), buffers.take(2000)
    assert small.ctypes.data in places
    largest = large.ctypes.data
    del large, small
    assert buffers.take(2000).ctypes.data == largest


@shares
def test_message_is_read_before_it_is_overwritten():
    """Also if the answer, the center before the message, does not depend on it."""
    rule = shared.easgd(0.5)
    assert rule.adopts == "before"
    params = {"w": jnp.zeros(4 * SIZE)}
    with served("memory", rule=rule, params=params) as (server, center):
        expected = np.zeros(4 * SIZE, np.float32)
        for version in range(20):
            sent = np.full(4 * SIZE, float(version), np.float32)
            sessions.exchange(
                center, {"w": sent}, anchor_version=version, worker="anna"
            )
            expected += np.float32(0.5) * (sent - expected)
        np.testing.assert_allclose(server.center.pull().params["w"], expected, 1e-6)


def test_message_is_read_before_its_answer_overwrites_it(transport):
    """Elastic rules answer, in the message's place, before the center has moved."""
    rule = shared.easgd(0.5)
    params = {"a": jnp.zeros(400_000), "b": jnp.zeros(300_001)}
    with served(transport, rule=rule, params=params) as (server, center):
        assert server.center.core.store.packing is not None
        # The server believes that a message of another worker is always in flight.
        sessions.servicer(server).exchanges.running += 1
        expected = np.float32(0.0)
        for version in range(10):
            sent = jax.tree.map(
                lambda x, v=version: np.full(x.shape, v, np.float32), params
            )
            sessions.exchange(center, sent, anchor_version=version, worker="anna")
            expected += np.float32(0.5) * (np.float32(version) - expected)
            for leaf in jax.tree.leaves(server.center.pull().params):
                np.testing.assert_array_equal(leaf, expected)


def test_many_workers_of_one_process_exchange_in_rounds(transport):
    with served(transport, mode=Synchronous()) as (server, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        names = [str(i) for i in range(6)]
        for name in names:
            sessions.join(center, name)

        def work(name):
            for version in range(5):
                sessions.exchange(center, ones, anchor_version=version, worker=name)

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert server.center.version == 5


def test_closed_center_rejects_exchanges(transport):
    with served(transport) as (server, center):
        sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        center.close()
        with pytest.raises(errors.CenterClosedError):
            sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        with pytest.raises(errors.CenterClosedError):
            center.join("bert")
        assert server.center.version == 1
        assert not server.center.core.members()[1]


def test_connection_made_during_close_is_closed():
    with served("socket") as (_, center):
        dial = sessions.remote(center).dial

        def late():
            link = dial()
            center.close()
            return link

        sessions.remote(center).dial = late
        with pytest.raises((errors.CenterClosedError, errors.WorkerStateError)):
            center.join("anna")
        assert all(link.is_done() for link in links(center))


@shares
def test_memory_of_a_closed_center_is_released_at_once():
    with served("memory") as (_, center):
        center.join("anna").exchange(Submission(1, center_params(), anchor_version=0))
        gone = [weakref.ref(link) for link in links(center)]
        gc.collect()
        gc.disable()
        try:
            center.close()
            # A heartbeat in flight holds the link for some milliseconds.
            wait_until(lambda: [link() for link in gone] == [None], limit=BUSY)
        finally:
            gc.enable()


@shares
def test_memory_of_a_worker_that_left_is_released_at_once():
    """No thread keeps a reference to its last connection."""
    with served("memory") as (server, _):
        gone = []
        for name in ("anna", "bert"):
            with connect(server, "memory") as center:
                sessions.exchange(
                    center, center_params(), anchor_version=0, worker=name
                )
                gone += map(weakref.ref, accepted(server))
            wait_until(lambda: not accepted(server))
        assert len(gone) == 2
        wait_until(lambda: not any(connection() for connection in gone))


@pytest.mark.parametrize(
    "kind",
    [_socket.SocketConnection, pytest.param(_memory.MemoryConnection, marks=shares)],
)
def test_received_bytes_are_reported_as_progress(kind):
    """Without this, a slow transfer counts as stalled."""
    peer, end = socket.socketpair()
    with peer, end, service.serve(RULE) as server:
        connection = kind(end, sessions.servicer(server))
        progress = []
        connection.on_received = lambda: progress.append(True)
        peer.sendall(b"1234")
        connection.fill(memoryview(bytearray(4)))
    assert progress


@contextlib.contextmanager
def silent_link():
    """Yield a link to a peer that never sends anything."""
    end, other = socket.socketpair()
    with other:
        yield _socket.SocketLink(end, Buffers())


def wait_until_late(link, connection):
    with (
        pytest.raises(errors.CenterUnreachableError, match="no data came"),
        connection.watching(link),
    ):
        link.read_header()


def test_link_that_timed_out_is_released_at_once(monkeypatch):
    monkeypatch.setattr(_connection, "watchdog", _watchdog.Watchdog())
    connection = _connection.Connection("127.0.0.1:1", timeout=0.2)
    with silent_link() as link:
        wait_until_late(link, connection)
    gone = weakref.ref(link)
    del link
    gc.collect()
    wait_until(lambda: gone() is None)


def no_more_files(*_):
    raise OSError(errno.EMFILE, "too many open files")


@shares
@pytest.mark.parametrize("end", ["create", "attach"])
def test_failed_segment_is_made_by_a_later_exchange(monkeypatch, end):
    """At either end: without a file descriptor, large messages use the socket."""
    with served("memory") as (_, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        wide = {"w": jnp.ones(SIZE, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
        version = 0

        def send(contribution):
            nonlocal version
            answer = sessions.exchange(
                center, contribution, anchor_version=version, worker="anna"
            )
            version += 1
            np.testing.assert_array_equal(answer.params["w"], 1.0 - version)
            return links(center)[0]._created

        for contribution in (ones, wide):  # no segment yet, then one of another size
            with monkeypatch.context() as patch:
                patch.setattr(_memory, end, no_more_files)
                before = {send(contribution) for _ in range(2)}
            assert len(before) == 1
            assert send(contribution) >= 2


@pytest.mark.slow
@shares
def test_without_file_descriptors_messages_go_over_the_socket(monkeypatch):
    """A process needs a free file descriptor to receive a segment."""
    program = (
        "import os, resource, sys\n"
        "import jax.numpy as jnp\n"
        "from agn_optax import rules, service\n"
        f"server = service.serve(rules.downpour(), {{'w': jnp.ones({SIZE})}})\n"
        "print(server.address, flush=True)\n"
        "sys.stdin.readline()\n"
        "free = os.dup(0); os.close(free)\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))\n"
        "print('few', flush=True)\n"
        "sys.stdin.readline()\n"
        "server.stop()\n"
    )
    process = subprocess.Popen(  # noqa: S603 our own program
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        address, ones = process.stdout.readline().strip(), {"w": jnp.ones(SIZE)}
        with service.connect(
            address, RULE, timeout=LIMIT, transports=["memory"]
        ) as center:
            send = functools.partial(sessions.exchange, center, ones, worker="anna")
            with monkeypatch.context() as patch:  # JAX opens its files meanwhile
                patch.setattr(_memory, "create", no_more_files)
                for version in range(2):
                    send(anchor_version=version)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "few\n"
            for version in range(2, 5):
                answer = send(anchor_version=version)
            np.testing.assert_array_equal(answer.params["w"], -4.0)
            (link,) = links(center)
            assert link._created == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("lively")
def test_exchange_behind_another_one_does_not_time_out(monkeypatch):
    """The other worker may be compiling its programs."""
    clock = tuning.ConnectionClock(monkeypatch)
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    with served("socket", params=ones) as (server, other):
        other.join("bert")
        with connect(server, "socket", timeout=LIMIT) as center:
            send = functools.partial(
                sessions.exchange, center, ones, anchor_version=0, worker="anna"
            )
            send()
            with sessions.servicer(server).exchanges._applying:
                sent = in_background(send, "anna")
                clock.pass_waiting(center, 1.5 * LIMIT)
            assert sent.result(LIMIT).version == 2

            store = server.center.core.store
            compiles, compiled = threading.Event(), threading.Event()
            measure = store.measure

            def slow(contribution, center, **settings):
                if jax.tree.leaves(contribution)[0].dtype == jnp.bfloat16:
                    compiles.set()
                    assert compiled.wait(LIMIT)
                return measure(contribution, center, **settings)

            store.measure = slow
            narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ones)
            first = in_background(
                lambda: sessions.exchange(
                    other, narrow, anchor_version=0, worker="bert"
                ),
                "bert",
            )
            assert compiles.wait(LIMIT)
            # An exchange does not wait for programs of another one.
            assert send().version == 3
            compiled.set()
            assert first.result(LIMIT).version == 4


def test_watchdog_that_failed_to_start_starts_later(monkeypatch):
    """The system may have no room for another thread, for a while."""
    monkeypatch.setattr(_connection, "watchdog", _watchdog.Watchdog())
    connection = _connection.Connection("127.0.0.1:1", timeout=0.2)

    def no_room(_):
        raise RuntimeError("can't start new thread")

    with silent_link() as link, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        with pytest.raises(RuntimeError), connection.watching(link):
            pass
    with silent_link() as link:
        wait_until_late(link, connection)


# Choice of the transport.


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_each_large_answer_is_one_consistent_version(transport, dtype):
    """Answers replace the messages while the center is updated in place."""
    workers, messages = 3, 8
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    params = jax.tree.map(jnp.zeros_like, ones)
    versions = []
    rule = dataclasses.replace(RULE, codec=codecs.cast(dtype or "float32"))
    with served(rule=rule, params=params) as (server, _):

        def work(number):
            with connect(server, transport, rule=rule) as center:
                version = 0
                for _ in range(messages):
                    answer = sessions.exchange(
                        center, ones, anchor_version=version, worker=f"w{number}"
                    )
                    version = answer.version
                    for leaf in jax.tree.leaves(answer.params):
                        np.testing.assert_array_equal(leaf, -version)
                    versions.append(version)

        threads = [threading.Thread(target=work, args=[i]) for i in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        np.testing.assert_array_equal(server.center.pull().params["b"], -24)
    assert sorted(versions) == list(range(1, workers * messages + 1))


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_lost_answer_is_sent_again_while_others_exchange(wire):
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    rule = dataclasses.replace(RULE, codec=codecs.cast(wire or "float32"))
    start = jax.tree.map(jnp.zeros_like, ones)
    with served("socket", rule=rule, params=start) as (server, other):
        send = functools.partial(
            sessions.exchange, other, ones, anchor_version=0, worker="bert"
        )
        send()
        # The server believes that a message of another worker is always in flight.
        sessions.servicer(server).exchanges.running += 1
        with connect(server, "socket", rule=rule) as center:
            receive = sessions.remote(center).answer_in

            def lost(*args):
                sessions.remote(center).answer_in = receive
                receive(*args)
                send()  # the center moves on meanwhile
                raise errors.CenterUnreachableError("the test has lost it")

            sessions.remote(center).answer_in = lost
            answer = sessions.exchange(center, ones, anchor_version=0, worker="anna")
            assert (answer.version, server.center.version) == (2, 3)
            for leaf in jax.tree.leaves(answer.params):
                np.testing.assert_array_equal(leaf, -2)


def test_fastest_transport_is_chosen():
    with served() as (server, center):
        fastest = "memory" if _memory.IS_SUPPORTED else "socket"
        assert center.join("anna").transport == fastest
        for offer in sessions.servicer(server).offers:
            if offer.transport == "memory":
                offer.address = "unix:nobody-listens-here"  # another machine
        with connect(server) as farther:
            assert farther.join("bert").transport == "socket"


class RecordingTransport:
    """A transport that records when it is tried."""

    def __init__(self, transport, tried):
        self.name, self._transport, self._tried = transport.name, transport, tried

    def dial(self, target):
        self._tried.append(self.name)
        return self._transport.dial(target)


@pytest.mark.usefixtures("lively")
def test_grpc_is_used_without_direct_connections(caplog):
    caplog.set_level(logging.INFO, "agn_optax")
    with served() as (server, _):
        sessions.servicer(server).offers = [
            pb.Offer(transport="memory", address="unix:nobody", key=b"k" * 16),
            pb.Offer(transport="socket", address=":1", key=b"k" * 16),
        ]
        with connect(server) as center:
            tried, remote = [], sessions.remote(center)
            remote._transports = [
                RecordingTransport(t, tried) for t in remote._transports
            ]
            assert center.join("anna").transport == "grpc"
            assert "transports that failed" in caplog.text
            assert tried == ["memory", "socket", "grpc"]
        for insisting in (["memory"], ["socket"], ["socket", "memory"]):
            with (
                connect(server, *insisting, timeout=1.0) as center,
                pytest.raises(errors.CenterUnreachableError, match="cannot connect to"),
            ):
                center.join("anna")
    with served(direct_address=False) as (server, center):
        assert sessions.offer(server, "socket") is None
        assert server.direct_address is None
        assert center.join("anna").transport == "grpc"


def test_transports_are_tried_in_the_order_of_the_list():
    with served("socket", "memory") as (_, center):
        assert center.join("anna").transport == "socket"
    with served("grpc", "socket") as (_, center):
        assert center.join("anna").transport == "grpc"


@pytest.mark.parametrize("greeting", [b"220 mail.example.org ESMTP\r\n", b"x" * 5000])
def test_another_server_at_the_direct_port_is_ignored(greeting):
    """The port may belong to another service, for instance behind a firewall."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        served() as (server, _),
    ):

        def answer():
            end, _ = listening.accept()
            with end, contextlib.suppress(ConnectionError):
                end.sendall(greeting * 3)
                while end.recv(100):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        address = f":{listening.getsockname()[1]}"
        sessions.servicer(server).offers = [
            pb.Offer(transport="socket", address=address, key=b"k" * 16)
        ]
        with connect(server) as center:
            assert center.join("anna").transport == "grpc"
        thread.join(LIMIT)


@pytest.mark.parametrize(
    ("transports", "kind", "message"),
    [
        (["pigeon"], errors.InvalidArgumentError, "some of memory, socket, grpc"),
        ([], errors.InvalidArgumentError, "some of memory, socket, grpc"),
        (["grpc", "grpc"], errors.InvalidArgumentError, "each once"),
        ("grpc", errors.InvalidTypeError, "a list of names such as"),
        (7, errors.InvalidTypeError, "a list of names such as"),
    ],
)
def test_bad_transports_are_rejected(transports, kind, message):
    with served() as (server, _), pytest.raises(kind, match=message):
        service.connect(server.address, RULE, transports=transports)


@shares
def test_direct_transports_work_at_a_unix_socket(unix_address):
    address = unix_address
    for transports in ((), ["memory"], ["socket"]):
        with served(*transports, address=address) as (server, center):
            assert center.join("anna").transport == (transports or ["memory"])[0]
            assert server.direct_address is None


def test_direct_address_can_be_chosen():
    port = ports.free()
    chosen = f"{ports.HOST}:{port}"
    with served("socket", direct_address=chosen) as (server, center):
        assert server.direct_address == chosen != server.address
        status = center.status()
        assert status["listens_at"] == server.address
        assert status["direct_address"] == chosen
        center.join("anna")
        assert links(center)[0]._sock.getpeername()[1] == port
        with pytest.raises(errors.InvalidArgumentError, match=f"listen at {chosen}"):
            service.serve(RULE, direct_address=chosen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"direct_address": "here"}, "an address must be"),
        ({"direct_address": f"unix:/{'x' * 200}"}, "path of a Unix socket can have 10"),
        ({"direct_address": "unix:/tmp/x"}, 'must be "host:port"'),
        ({"direct_address": True}, "an address must be"),
        ({"direct_address": "8.8.8.8:0"}, "plain text"),
        (
            {"direct_address": "127.0.0.1:0", "address": "unix:x"},
            "got .* address='unix:x'",
        ),
    ],
)
def test_bad_direct_addresses_are_rejected(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        service.serve(RULE, **settings)


# Lost connections, restarts and shutdown.


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_silent_connection_is_replaced(transport):
    """A host or a firewall may drop a connection without notice."""
    ones = center_params()
    with (
        service.serve(RULE, ones) as server,
        network.Network(server, transport) as net,
        service.connect(net.address, RULE, timeout=1.0) as center,
    ):
        sessions.exchange(center, ones, anchor_version=0, worker="a")
        assert transport_of(center) == transport
        for version in range(1, 4):
            net.strand()
            began, answer = time.monotonic(), None
            while answer is None and time.monotonic() - began < LIMIT:
                with contextlib.suppress(errors.CenterUnreachableError):
                    answer = sessions.exchange(
                        center, ones, anchor_version=version, worker="a"
                    )
            assert answer.version == server.center.version == version + 1
            assert time.monotonic() - began < 12  # gRPC's own pings take 15
            assert transport_of(center) == transport


@pytest.mark.parametrize("transport", [pytest.param("memory", marks=shares), "socket"])
def test_broken_connection_is_reestablished(transport):
    with served(transport) as (server, center):
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="anna")
        loop = worker.start()
        for broken in range(6):
            if broken:
                for each in accepted(server):
                    each.cancel()
                wait_until(
                    lambda: not server.center.core.members()[1]["anna"].connected
                )
            params, state = loop
            ones = jax.tree.map(jnp.ones_like, params)
            updates, state = worker.tx.update(ones, state, params)
            loop = worker.exchange(optax.apply_updates(params, updates), state)
        assert server.center.version == worker.exchanges == 6
        np.testing.assert_array_equal(server.center.pull().params["w"], 1.0 - 6)


@pytest.mark.parametrize(
    "transports", [pytest.param(["memory"], marks=shares), ["socket"], []]
)
def test_restarted_center_is_found_again(transports):
    """The restarted center has another key and another direct port."""
    address = ports.free_address()
    with served(*transports, address=address) as (server, center):
        session = center.join("anna")
        before = session.transport
        session.leave()
        server.stop()
        with service.serve(RULE, center_params(), address=address):
            assert center.join("anna").transport == before != "grpc"


@pytest.mark.parametrize("transport", [pytest.param("memory", marks=shares), "socket"])
def test_reason_of_a_closed_center_reaches_the_worker(transport):
    """Its error is not mistaken for a broken connection, also if it is an OSError."""
    with served(transport, mode=Synchronous()) as (server, center):
        center.join("other")
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        reasons = []

        def exchange():
            with pytest.raises(errors.CenterClosedError) as caught:
                sessions.exchange(center, ones, anchor_version=0, worker="anna")
            reasons.append(str(caught.value))

        sessions.connection(center).retry = lambda attempt, within=0.0: attempt()
        thread = threading.Thread(target=exchange)
        thread.start()
        wait_until(lambda: "anna" in server.center.core.members()[2])
        server.center.close("for the holidays")
        thread.join(LIMIT)
        assert reasons == ["for the holidays"]


@pytest.mark.parametrize("transport", [pytest.param("memory", marks=shares), "socket"])
def test_disconnect_of_a_worker_that_waits_in_a_round_is_noticed(transport):
    """At once, although its thread at the server is blocked in the round."""
    hasty = service.Limits(lease=0.1)
    with (
        served("grpc", mode=Synchronous(), limits=hasty) as (server, other),
        connect(server, transport) as center,
    ):
        other.join("other")
        center.join("anna")
        ones = jax.tree.map(jnp.ones_like, other.pull().params)

        def exchange():
            with pytest.raises(errors.AgnOptaxError):
                sessions.exchange(center, ones, anchor_version=0, worker="anna")

        thread = threading.Thread(target=exchange)
        thread.start()
        wait_until(lambda: "anna" in server.center.core.members()[2])
        center.close()
        thread.join(LIMIT)
        assert (
            sessions.exchange(other, ones, anchor_version=0, worker="other").version
            == 1
        )


def test_stop_ends_idle_connections(transport):
    with served(transport) as (server, center):
        session = center.join("anna")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 10
        with pytest.raises(errors.CenterUnreachableError):
            session.exchange(Submission(1, center_params(), anchor_version=0))


def a_message(schema):
    """Return the bytes of a join and of a message of ones."""
    message = pb.Message(sequence=1, schema_hash=schema.hash)
    buffer = np.ones(schema.size // 4, np.float32).tobytes()
    return joining() + frame_bytes(pb.Header(message=message), schema.size, buffer)


@contextlib.contextmanager
def unread(server, transport, frames):
    """Send ``frames`` as a peer that reads no answer."""
    if transport == "socket":
        with greeted(server) as end:
            end.sendall(frames)
            yield
        return
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/agn_optax.center.v1.Center/Exchange")
        pieces = [frames[at : at + (1 << 20)] for at in range(0, len(frames), 1 << 20)]
        never = threading.Event()

        def messages():
            yield from pieces
            never.wait(2 * LIMIT)

        answers = call(messages())
        yield
        never.set()
        answers.cancel()


@pytest.mark.parametrize(
    "transport", ["socket", pytest.param("grpc", marks=pytest.mark.slow)]
)
def test_stop_does_not_wait_for_a_peer_that_does_not_read(transport, monkeypatch):
    tuning.set_transfer_timeout(monkeypatch, 2.0)
    params = {"w": jnp.ones(10_000_000)}
    with served("grpc", params=params) as (server, _):
        frames = a_message(_trees.schema_of(params))
        with unread(server, transport, frames):
            wait_until(lambda: server.center.version == 1)
            wait_until(lambda: sessions.servicer(server).exchanges.answering)
            began = time.monotonic()
            server.stop(grace=6 * LIMIT)
            assert time.monotonic() - began < LIMIT


def test_observer_is_answered_while_many_calls_are_open():
    """The open calls are those of peers that send only the head of a message."""
    with served() as (server, _), grpc.insecure_channel(server.address) as channel:
        begin = channel.stream_stream("/agn_optax.center.v1.Center/Exchange")
        ended = threading.Event()

        def nothing():
            yield SIZES.pack(100, 0)
            ended.wait(2 * LIMIT)

        calls = [begin(nothing()) for _ in range(200)]
        wait_until(lambda: len(_watchdog.watchdog._watched) >= 128)  # of one host
        with service.Observer(server.address, timeout=LIMIT) as observer:
            assert observer.status()["version"] == 0
            assert observer.health() == "SERVING"
        with connect(server, "grpc") as center:
            ones = center_params()
            assert (
                sessions.exchange(center, ones, anchor_version=0, worker="a").version
                == 1
            )
        ended.set()
        for call in calls:
            call.cancel()


def test_stopped_server_has_no_threads_that_hold_the_center(transport):
    """Python may abort at exit while another thread releases arrays of JAX."""
    with served(transport) as (server, center):
        sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        threads = [
            each._threads._running
            for name, each in server._listeners.items()
            if name in ("memory", "socket")
        ]
        assert sum(map(len, threads)) >= 3
        server.stop()
        assert not any(threads)


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_descriptors_are_left_open():
    def opened():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 a count is enough

    def use():
        for transport in TRANSPORTS:
            with served(transport) as (_, center):
                ones = jax.tree.map(jnp.ones_like, center.pull().params)
                for version in range(3):
                    sessions.exchange(
                        center, ones, anchor_version=version, worker="anna"
                    )

    use()  # gRPC keeps some open for good
    before = opened()
    use()
    gc.collect()
    jnp.zeros(2).block_until_ready()  # JAX releases memory at its next call
    wait_until(lambda: opened() <= before)


# Bad input.


def greeted(server, key=None):
    host, _, port = server.direct_address.rpartition(":")
    end = socket.create_connection((host, int(port)))
    end.settimeout(LIMIT)
    key = sessions.offer(server, "socket").key if key is None else key
    end.sendall(_socket.GREETING + key)
    return end


def everything(end):
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := end.recv(1 << 16):
            received += more
    return received


def frame_bytes(header, length=0, rest=b""):
    header = header if isinstance(header, bytes) else header.SerializeToString()
    return SIZES.pack(len(header), length) + header + rest


def test_connection_without_the_key_gets_no_answer():
    with served() as (server, _), greeted(server, b"x" * 16) as end:
        assert everything(end) == b""


def joining():
    join = pb.Join(protocol=_address.PROTOCOL, worker="eve", session_id="1")
    return frame_bytes(pb.Header(join=join))


def hostile():
    schema = _trees.schema_of({"w": jnp.ones(SIZE), "b": jnp.zeros(3)})
    message = pb.Message(sequence=1, schema_hash=schema.hash)
    return {
        "short": frame_bytes(pb.Header(message=message), 8, bytes(8)),
        "long": frame_bytes(pb.Header(message=message), 1 << 62),
        "no buffer": frame_bytes(pb.Header(message=message)),
        "another tree": frame_bytes(
            pb.Header(message=pb.Message(sequence=1, schema_hash=b"x")), 8, bytes(8)
        ),
        "a buffer for nothing": frame_bytes(pb.Header(acknowledge=1), 8, bytes(8)) * 2,
        "no header": frame_bytes(b"\xff" * 20),
        "empty header": frame_bytes(b""),
        "huge header": SIZES.pack(MAX_HEADER + 1, 0),
        "ends in a head": b"\x01\x02",
        "ends in a buffer": frame_bytes(
            pb.Header(message=message), schema.size, bytes(9)
        ),
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("name", hostile())
def test_hostile_frames_are_rejected(name):
    with served() as (server, center):
        with greeted(server) as end:
            end.sendall(joining() + hostile()[name])
            if name.startswith("ends"):
                end.shutdown(socket.SHUT_WR)
            received = everything(end)
            assert (b"Error" in received) != name.startswith("ends")
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        assert (
            sessions.exchange(center, ones, anchor_version=0, worker="anna").version
            == 1
        )


@contextlib.contextmanager
def by_hand(server):
    """Yield a raw connection for shared memory after a join, and its reader."""
    offer = sessions.offer(server, "memory")
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(LIMIT)
        end.connect("\0" + offer.address.removeprefix("unix:"))
        end.sendall(_socket.GREETING + offer.key)
        assert end.recv(100) == _socket.GREETING
        end.sendall(joining())
        reader = FrameReader(end.recv_into, Buffers())
        assert reader.read_header().HasField("joined")
        yield end, reader


def attach(end, number, size, descriptor=None):
    """Send a segment, or another descriptor declared as one; return its array."""
    array = None
    if descriptor is None:
        descriptor, array = _memory.create(size)
    header = pb.Header(attach=pb.Segment(number=number, size=size))
    socket.send_fds(end, [frame_bytes(header)], [descriptor])
    os.close(descriptor)
    return array


@shares
@pytest.mark.parametrize(
    ("size", "seals", "number"),
    [(100, True, 1), (1 << 20, False, 1), (1 << 20, True, 0), (1 << 20, True, 99)],
)
def test_segments_that_could_shrink_are_rejected(size, seals, number):
    """Reading beyond the end of a shrunken segment would kill the server."""
    with served() as (server, center):
        with by_hand(server) as (end, _):
            if seals:
                descriptor, _ = _memory.create(size)
            else:
                descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, size)
            attach(end, number, 1 << 20, descriptor)
            assert b"ProtocolError" in everything(end)
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        assert (
            sessions.exchange(center, ones, anchor_version=0, worker="anna").version
            == 1
        )


@shares
@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ({"segment": 3}, b"segment 3 was never attached"),
        ({"answer_segment": 7}, b"segment 7 was never attached"),
        ({"segment": 1, "answer_segment": 1}, b"another segment than its message"),
    ],
)
def test_bad_segment_numbers_are_rejected(segments, message):
    schema = _trees.schema_of(center_params())
    with served() as (server, center):
        with by_hand(server) as (end, reader):
            attach(end, 1, schema.size)
            assert reader.read_header().HasField("attached")
            request = pb.Message(sequence=1, schema_hash=schema.hash)
            end.sendall(frame_bytes(pb.Header(message=request, **segments)))
            assert message in everything(end)
        assert server.center.version == 0
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        assert (
            sessions.exchange(center, ones, anchor_version=0, worker="anna").version
            == 1
        )


@shares
def test_segment_without_its_descriptor_is_rejected():
    with served() as (server, _), by_hand(server) as (end, reader):
        end.sendall(frame_bytes(pb.Header(attach=pb.Segment(number=1, size=100))))
        assert "file descriptor" in reader.read_header().attached.error


@shares
def test_message_changed_after_its_check_is_not_applied():
    """A worker can write into shared memory while the center reads its message."""
    schema = _trees.schema_of(center_params())
    with served() as (server, _):
        store, seen = server.center.core.store, threading.Event()
        measure = store.measure

        def checked(contribution, center, **settings):
            result = jax.block_until_ready(measure(contribution, center, **settings))
            message[...] = np.nan  # between the check and the update
            seen.set()
            return result

        store.measure = checked
        with by_hand(server) as (end, reader):
            arrays = [attach(end, number, schema.size) for number in (1, 2)]
            for _ in arrays:
                assert not reader.read_header().attached.error
            message = arrays[0].view(np.float32)
            message[...] = 1.0
            request = pb.Message(sequence=1, schema_hash=schema.hash)
            end.sendall(
                frame_bytes(pb.Header(message=request, segment=1, answer_segment=2))
            )
            while not (header := reader.read_header()).HasField("snapshot"):
                assert header.HasField("waiting")
            assert seen.is_set()
            assert header.segment == 2
            np.testing.assert_array_equal(schema.views(arrays[1])[1], 0.0)
        np.testing.assert_array_equal(server.center.pull().params["w"], 0.0)


@pytest.mark.slow
@shares
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="needs root to be another user",
)
@pytest.mark.usefixtures("lively")
def test_shared_memory_is_for_processes_of_one_user(caplog):
    """Any user of this machine can reach the Unix socket and ask for its key."""
    # Adam's exchanges import everything that Eve's need, because the other user may
    # not be allowed to read the folders of the packages.
    program = (
        "import os, sys, jax.numpy as jnp\n"
        "from agn_optax import errors, rules, service\n"
        "from agn_optax.center import Submission\n"
        f"ones = {{'w': jnp.ones({SIZE}), 'b': jnp.ones(3)}}\n"
        "def exchange(name, *transports, timeout=20.0):\n"
        "    settings = {'timeout': timeout, 'transports': transports}\n"
        "    with service.connect(\n"
        "        sys.argv[1], rules.downpour(), **settings\n"
        "    ) as center:\n"
        "        session = center.join(name)\n"
        "        sent = Submission(1, ones, anchor_version=0)\n"
        "        return session.exchange(sent).version\n"
        "exchange('adam', 'memory')\n"
        "exchange('adam', 'socket')\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    exchange('eve', 'memory', timeout=1.5)\n"
        "except errors.CenterUnreachableError as error:\n"
        "    print(error)\n"
        "print(exchange('eve', 'memory', 'socket'))\n"
    )
    with served() as (server, _):
        done = subprocess.run(  # noqa: S603 our own program
            [sys.executable, "-B", "-c", program, server.address],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            },
            capture_output=True,
            text=True,
            timeout=3 * LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        rejected, version = done.stdout.splitlines()
        assert "rejected the handshake" in rejected
        assert version == "3"
        assert "of another user, 65534" in caplog.text


def test_rejection_is_read_while_the_message_is_being_sent():
    """The message is of another tree, and larger than the buffers of a socket."""
    with served("socket", params={"w": jnp.ones(5_000_000)}) as (_, center):
        center.join("anna")
        other = {"w": jnp.ones(5_000_001)}
        sessions.remote(center).schemas = _trees.wire_schemas(RULE, other)
        with pytest.raises(
            errors.TreeMismatchError, match="not match the center's tree"
        ):
            sessions.exchange(center, other, anchor_version=0, worker="anna")


@pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="needs TCP_CONGESTION"
)
def test_local_socket_uses_reno():
    with served("socket") as (_, center):
        center.join("w")
        (link,) = links(center)
        ours = link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert ours.rstrip(b"\0") == b"reno"


def test_exchange_repeated_before_its_answer_counts_once(transport):
    """This happens at working shards while another shard fails."""
    with served(transport) as (server, center):
        session = center.join("w")
        ones = {"w": np.ones(SIZE, np.float32), "b": np.ones(3, np.float32)}
        for sequence in (1, 2, 3):
            for _ in range(2):
                session.submit(Submission(sequence, ones, anchor_version=sequence - 1))
            answer = session.collect(sequence)
            session.acknowledge(sequence)
            assert answer.version == sequence
            np.testing.assert_array_equal(answer.params["w"], 1.0 - sequence)
        assert server.center.version == 3
