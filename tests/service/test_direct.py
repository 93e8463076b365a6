"""Exchanges beside gRPC: over sockets of their own, and through shared memory."""

import contextlib
import functools
import gc
import logging
import os
import pathlib
import socket
import threading
import time
import weakref

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sessions
from support import RULES, assert_identical, tree

import agn_optax
from agn_optax import errors, rules, service
from agn_optax._internal.background import in_background
from agn_optax.center import Synchronous
from agn_optax.service import _connection
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import _links, _memory, _packets
from agn_optax.service.wire import _trees

RULE = rules.downpour()  # whose center goes where its messages point away from
LIMIT = 20  # seconds that nothing here takes
SIZE = 50_000  # elements: large enough to be worth shared memory
TRANSPORTS = ["memory", "socket", "grpc"]
shares = pytest.mark.skipif(not _memory.IS_SUPPORTED, reason="Linux only")


@pytest.fixture(params=[pytest.param("memory", marks=shares), "socket", "grpc"])
def transport(request):
    return request.param


def center_params():
    return {"w": jnp.ones(SIZE), "b": jnp.zeros(3)}


@contextlib.contextmanager
def made(transport="auto", rule=RULE, params=None, **settings):
    params = center_params() if params is None else params
    with (
        service.serve(rule, params, **settings) as server,
        service.connect(server.address, rule, timeout=LIMIT, transport=transport) as c,
    ):
        yield server, c


def links(center):
    return [session.link for session in center._sessions.values()]


def way(center):
    """How a connected center's exchanges travel."""
    (link,) = links(center)
    if not isinstance(link, service._links.DirectLink):
        return "grpc"
    return "memory" if link._segments is not None else "socket"


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


# What travels is the same.


@functools.cache
def trained(transport, rule):
    like = {**tree(), "large": jnp.ones(SIZE)}
    with made(transport, RULES[rule](), like) as (_, center):
        worker = agn_optax.Worker(center, optax.adam(0.1), period=2, name="anna")
        params, state = worker.start(like)
        for i in range(8):
            grads = jax.tree.map(lambda x, i=i: jnp.cos(x + i), params)
            updates, state = worker.tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        assert way(center) == transport
        pulled = center.pull()
        assert pulled.version == worker.exchanges == 4
        return jax.tree.map(np.asarray, (params, state, pulled.params))


@pytest.mark.parametrize("rule", ["agn", "easgd", "diloco", "average"])
@pytest.mark.parametrize("other", [pytest.param("memory", marks=shares), "socket"])
def test_every_way_gives_the_same_numbers(other, rule):
    assert_identical(trained(other, rule), trained("grpc", rule))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_wire(transport, dtype):
    with made() as (server, _):
        center = service.connect(
            server.address, RULE, transport=transport, wire_dtype=dtype
        )
        with center:
            ones = jax.tree.map(jnp.ones_like, center.pull().params)
            answer = sessions.exchange(center, ones, anchor_version=0, worker="anna")
        assert answer.params["w"].dtype == jnp.float32
        np.testing.assert_array_equal(answer.params["w"], 0.0)
        np.testing.assert_array_equal(answer.params["b"], -1.0)


def test_a_narrow_message_and_a_wide_answer(transport):
    """As of a worker with bfloat16 parameters: each has a segment of its own size."""
    with made(transport) as (_, center):
        ones = {"w": jnp.ones(SIZE, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
        for version in range(3):
            answer = sessions.exchange(
                center, ones, anchor_version=version, worker="anna"
            )
        np.testing.assert_array_equal(answer.params["w"], 1.0 - 3)


def test_a_tree_without_elements(transport):
    for params in ({}, {"w": jnp.zeros((0, 3))}):
        with made(transport, params=params) as (_, center):
            assert (
                sessions.exchange(center, params, anchor_version=0, worker="a").version
                == 1
            )


def test_answers_stay_what_they_are(transport):
    """However many of them are kept, and whatever comes after."""
    with made(transport) as (_, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        kept = [
            sessions.exchange(center, ones, anchor_version=version, worker="anna")
            for version in range(2 * _packets.MOST_SEGMENTS)
        ]
        for version, answer in enumerate(kept):
            np.testing.assert_array_equal(answer.params["w"], -float(version))
        view = np.asarray(kept[5].params["w"])
        del kept, answer
        gc.collect()
        for version in range(2 * _packets.MOST_SEGMENTS, 100):
            sessions.exchange(center, ones, anchor_version=version, worker="anna")
        np.testing.assert_array_equal(view, -5.0)


@pytest.mark.parametrize("way_of", [pytest.param("memory", marks=shares), "socket"])
def test_memory_is_used_again(way_of):
    with made(way_of) as (_, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        places = set()
        for version in range(12):
            answer = sessions.exchange(
                center, ones, anchor_version=version, worker="anna"
            )
            places.add(answer.params["w"].unsafe_buffer_pointer())
            del answer
        assert len(places) <= 3
        if way_of == "memory":
            assert links(center)[0]._segments._made <= 1 + 3


def test_a_buffer_is_used_again_by_what_fits_into_it():
    """Workers may send half as many bytes as others, in turns."""
    buffers = _memory.Buffers()
    place = buffers.take(1000).ctypes.data
    for size in (500, 1):
        buffer = buffers.take(size)
        assert (buffer.size, buffer.ctypes.data) == (size, place)
        view = buffer[:1]
        del buffer
        assert buffers.take(size).ctypes.data != place  # it is still looked at
        del view
    both = buffers.take(1000), buffers.take(1000)
    places = {buffer.ctypes.data for buffer in both}
    del both  # of which one is kept
    small, large = buffers.take(10), buffers.take(2000)
    assert small.ctypes.data in places
    largest = large.ctypes.data
    del large, small
    assert buffers.take(2000).ctypes.data == largest


@shares
def test_a_message_is_read_before_it_is_overwritten():
    """Also where the answer does not depend on it: the center before the message."""
    rule = rules.easgd(0.5)
    assert rule.adopts == "before"
    with made("memory", rule, {"w": jnp.zeros(4 * SIZE)}) as (server, center):
        expected = np.zeros(4 * SIZE, np.float32)
        for version in range(20):
            sent = np.full(4 * SIZE, float(version), np.float32)
            sessions.exchange(
                center, {"w": sent}, anchor_version=version, worker="anna"
            )
            expected += np.float32(0.5) * (sent - expected)
        np.testing.assert_allclose(server.center.pull().params["w"], expected, 1e-6)


@shares
def test_a_site_reads_what_its_workers_send_in_shared_memory():
    parent = agn_optax.LocalCenter(RULE)
    with made("memory", parent=parent, parent_period=4) as (server, center):
        assert server.uplink.ready.wait(LIMIT)
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        for i in range(8):
            scaled = jax.tree.map(lambda x, i=i: i * x, ones)
            version = center.pull().version
            sessions.exchange(center, scaled, anchor_version=version, worker="anna")
        wait_for(lambda: parent.version == 2)
        server.stop()
        np.testing.assert_array_equal(parent.pull().params["w"], 1.0 - 28)


def test_many_workers_of_one_process(transport):
    with made(transport, mode=Synchronous()) as (server, center):
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        names = [str(i) for i in range(6)]
        for name in names:
            center.join(name)

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


def test_a_closed_center_takes_no_more_exchanges(transport):
    with made(transport) as (server, center):
        sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        center.close()
        with pytest.raises(errors.CenterClosedError):
            sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        with pytest.raises(errors.CenterClosedError):
            center.join("bert")
        assert server.center.version == 1
        assert not server.center.core.members()[1]


def test_who_joins_while_a_center_is_closed_is_cut_off():
    with made("socket") as (_, center):
        link = center._link

        def late():
            made = link()
            center.close()
            return made

        center._link = late
        with pytest.raises((errors.CenterClosedError, errors.WorkerStateError)):
            center.join("anna")
        assert all(link.done() for link in links(center))


@shares
def test_the_memory_of_a_closed_center_is_free_at_once():
    with made("memory") as (_, center):
        sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        (link,) = links(center)
        gone = weakref.ref(link)
        del link
        gc.collect()
        gc.disable()
        try:
            center.close()
            assert gone() is None
        finally:
            gc.enable()


@shares
def test_the_memory_of_a_worker_that_has_gone_is_free_at_once():
    """No thread holds on to the connection that it has heard of last."""
    with made("memory") as (server, _):
        gone = []
        listener = server._listener
        for name in ("anna", "bert"):
            with service.connect(server.address, RULE, transport="memory") as center:
                sessions.exchange(
                    center, center_params(), anchor_version=0, worker=name
                )
                (own,) = listener._connections.values()
                gone.append(weakref.ref(own))
                del own
            wait_for(lambda: not listener._connections)
        wait_for(lambda: not any(connection() for connection in gone))


@contextlib.contextmanager
def silent_link():
    """To somebody who never says anything."""
    end, other = socket.socketpair()
    with other:
        yield _links.DirectLink(end, _memory.Buffers(), shares=False)


def wait_until_late(link, connection):
    with (
        pytest.raises(errors.CenterUnreachableError, match="nothing came"),
        connection.watching(link),
    ):
        link.control()


def test_a_link_that_was_late_is_free_at_once(monkeypatch):
    monkeypatch.setattr(_connection, "_watchdog", _connection._Watchdog())
    connection = _connection.Connection("127.0.0.1:1", timeout=0.2)
    with silent_link() as link:
        wait_until_late(link, connection)
    gone = weakref.ref(link)
    del link
    gc.collect()
    wait_for(lambda: gone() is None)


@shares
def test_a_segment_that_could_not_be_made_may_be_made_later(monkeypatch):
    segments = _memory.Segments(1)

    def take(size):
        number, descriptor, array = segments.take(size)
        if descriptor is not None:
            _memory.close(descriptor)
        return number, array.size

    def fail(size):
        raise OSError("too many open files")

    for size in (100, 200):  # there is none at first, and then one of another size
        with monkeypatch.context() as patch:
            patch.setattr(_memory, "create", fail)
            for _ in range(2):
                with pytest.raises(OSError, match="too many"):
                    take(size)
        assert take(size) == (1, size)


def test_a_crowd_is_heard_of_while_it_waits(monkeypatch):
    """For the turn of another, who may have programs to compile."""
    monkeypatch.setattr(service._servicer, "WAITING_INTERVAL", 0.1)
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    with made("socket", params=ones) as (server, other):
        other.join("bert")
        with service.connect(
            server.address, RULE, transport="socket", timeout=1.0
        ) as center:
            send = functools.partial(
                center.exchange, ones, anchor_version=0, worker="anna"
            )
            send()
            with server._servicer._turn:
                sent = in_background(send, "anna")
                time.sleep(2.0)  # longer than anybody waits for a silent center
            assert sent.result(LIMIT).version == 2

            store = server.center.core.store
            norm, compiles, compiled = store.norm, threading.Event(), threading.Event()

            def slow(contribution, center):
                if jax.tree.leaves(contribution)[0].dtype == jnp.bfloat16:
                    compiles.set()
                    assert compiled.wait(LIMIT)
                return norm(contribution, center)

            store.norm = slow
            narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ones)
            first = in_background(
                lambda: sessions.exchange(
                    other, narrow, anchor_version=0, worker="bert"
                ),
                "bert",
            )
            assert compiles.wait(LIMIT)
            sent = in_background(send, "anna")
            time.sleep(2.0)
            compiled.set()
            assert first.result(LIMIT).version == 3
            assert sent.result(LIMIT).version == 4


def test_a_watchdog_that_could_not_start_starts_later(monkeypatch):
    """There may be no room for a thread, for a while."""
    monkeypatch.setattr(_connection, "_watchdog", _connection._Watchdog())
    connection = _connection.Connection("127.0.0.1:1", timeout=0.2)

    def no_room(_):
        raise RuntimeError("can't start new thread")

    with silent_link() as link, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        with pytest.raises(RuntimeError), connection.watching(link):
            pass
    with silent_link() as link:
        wait_until_late(link, connection)


# Which way is taken.


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_large_answers_of_a_crowd_are_versions(transport, dtype):
    """Answers lie where messages came, and the center moves in place meanwhile."""
    workers, messages = 3, 8
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    params = jax.tree.map(jnp.zeros_like, ones)
    versions = []
    with made(params=params) as (server, _):

        def work(number):
            with service.connect(
                server.address,
                RULE,
                timeout=LIMIT,
                transport=transport,
                wire_dtype=dtype,
            ) as center:
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
def test_a_lost_answer_of_a_crowd_is_given_again(wire):
    ones = {"a": jnp.ones(400_000), "b": jnp.ones(300_001)}
    with made("socket", params=jax.tree.map(jnp.zeros_like, ones)) as (server, other):
        send = functools.partial(other.exchange, ones, anchor_version=0, worker="bert")
        send()
        # As if somebody else's message were always on its way.
        server._servicer._talking += 1
        with service.connect(
            server.address, RULE, transport="socket", wire_dtype=wire
        ) as center:
            center.join("anna")
            receive = center._receive

            def lost(link):
                center._receive = receive
                receive(link)
                send()  # and the center goes on
                raise errors.CenterUnreachableError("the test has lost it")

            center._receive = lost
            answer = sessions.exchange(center, ones, anchor_version=0, worker="anna")
            assert (answer.version, server.center.version) == (2, 3)
            for leaf in jax.tree.leaves(answer.params):
                np.testing.assert_array_equal(leaf, -2)


def test_the_fastest_way_is_found():
    with made() as (server, center):
        center.join("anna")
        assert way(center) == ("memory" if _memory.IS_SUPPORTED else "socket")
        server._servicer.direct.socket = "nobody-listens-here"  # another machine
        with service.connect(server.address, RULE) as farther:
            farther.join("bert")
            assert way(farther) == "socket"


def test_without_a_way_beside_it_there_is_grpc(caplog):
    caplog.set_level(logging.INFO, "agn_optax")
    with made() as (server, center):
        server._servicer.direct = pb.Direct(key=b"k" * 16, port=1, socket="nobody")
        with service.connect(server.address, RULE) as center:
            center.join("anna")
            assert way(center) == "grpc"
            assert "over gRPC" in caplog.text
        for insisting in ("memory", "socket"):
            with (
                service.connect(
                    server.address, RULE, transport=insisting, timeout=0.2
                ) as center,
                pytest.raises(errors.CenterUnreachableError, match="no direct conn"),
            ):
                center.join("anna")
    with made(direct=False) as (server, center):
        assert not server._servicer.describe(
            pb.DescribeRequest(protocol=1), None
        ).HasField("direct")
        center.join("anna")
        assert way(center) == "grpc"


def test_somebody_else_at_the_port():
    """A port that means something else, such as one that a firewall has mapped."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        made() as (server, _),
    ):

        def answer():
            end, _ = listening.accept()
            with end, contextlib.suppress(ConnectionError):
                end.sendall(b"220 mail.example.org ESMTP\r\n" * 3)
                while end.recv(100):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        server._servicer.direct = pb.Direct(
            key=b"k" * 16, port=listening.getsockname()[1]
        )
        with service.connect(server.address, RULE) as center:
            center.join("anna")
            assert way(center) == "grpc"
        thread.join(LIMIT)


def test_settings_that_make_no_sense():
    with made() as (server, _):
        with pytest.raises(errors.InvalidArgumentError, match="auto, memory, socket"):
            service.connect(server.address, RULE, transport="pigeon")
        with pytest.raises(errors.InvalidArgumentError, match="plain text"):
            service.connect(
                server.address,
                RULE,
                transport="socket",
                credentials=grpc.ssl_channel_credentials(),
            )


@shares
def test_at_a_unix_socket(tmp_path):
    address = f"unix:{tmp_path}/center"
    for transport in ("auto", "memory", "socket"):
        with made(transport, address=address) as (server, center):
            center.join("anna")
            assert way(center) == transport.replace("auto", "memory")
            assert not server._servicer.direct.port


# What it survives.


@pytest.mark.parametrize("way_of", [pytest.param("memory", marks=shares), "socket"])
def test_a_broken_connection_is_made_again(way_of):
    with made(way_of) as (server, center):
        worker = agn_optax.Worker(center, optax.sgd(1.0), period=1, name="anna")
        loop = worker.start()
        for broken in range(6):
            if broken:
                for connection in list(server._listener._connections.values()):
                    connection.shut()
                wait_for(lambda: not server.center.core.members()[1]["anna"].connected)
            params, state = loop
            ones = jax.tree.map(jnp.ones_like, params)
            updates, state = worker.tx.update(ones, state, params)
            loop = worker.exchange(optax.apply_updates(params, updates), state)
        assert server.center.version == worker.exchanges == 6
        np.testing.assert_array_equal(server.center.pull().params["w"], 1.0 - 6)


@pytest.mark.parametrize(
    "way_of", [pytest.param("memory", marks=shares), "socket", "auto"]
)
def test_a_center_that_was_started_anew_is_found_again(way_of):
    """It has another key, and another port beside that of gRPC."""
    with made(way_of) as (server, center):
        center.join("anna")
        before = way(center)
        address = server.address
        center.leave("anna")
        server.stop()
        with service.serve(RULE, center_params(), address=address):
            center.join("anna")
            assert way(center) == before != "grpc"


@pytest.mark.parametrize("way_of", [pytest.param("memory", marks=shares), "socket"])
def test_what_a_center_says_at_its_end_is_heard(way_of):
    """Some exceptions are errors of the system, too, and a broken connection is not."""
    with made(way_of, mode=Synchronous()) as (server, center):
        center.join("other")
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        said = []

        def exchange():
            with pytest.raises(errors.CenterClosedError) as caught:
                sessions.exchange(center, ones, anchor_version=0, worker="anna")
            said.append(str(caught.value))

        center._retry = lambda attempt, within=0.0: attempt()
        thread = threading.Thread(target=exchange)
        thread.start()
        wait_for(lambda: "anna" in server.center.core.members()[2])
        server.center.close("for the holidays")
        thread.join(LIMIT)
        assert said == ["for the holidays"]


@pytest.mark.parametrize("way_of", [pytest.param("memory", marks=shares), "socket"])
def test_a_worker_whose_message_waits_is_seen_to_go(way_of):
    """At once, although its thread at the server waits for a round."""
    with (
        made("grpc", mode=Synchronous(), lease=0.1) as (server, other),
        service.connect(server.address, RULE, transport=way_of) as center,
    ):
        other.join("other")
        center.join("anna")
        ones = jax.tree.map(jnp.ones_like, other.pull().params)

        def exchange():
            with pytest.raises(errors.AgnOptaxError):
                sessions.exchange(center, ones, anchor_version=0, worker="anna")

        thread = threading.Thread(target=exchange)
        thread.start()
        wait_for(lambda: "anna" in server.center.core.members()[2])
        center.close()
        thread.join(LIMIT)
        assert (
            sessions.exchange(other, ones, anchor_version=0, worker="other").version
            == 1
        )


def test_stopping_ends_idle_connections(transport):
    with made(transport) as (server, center):
        center.join("anna")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 10
        with pytest.raises(errors.CenterUnreachableError):
            sessions.exchange(
                center,
                {"w": jnp.ones(SIZE), "b": jnp.ones(3)},
                anchor_version=0,
                worker="anna",
            )


def test_a_stopped_service_has_no_thread_that_holds_the_center(transport):
    """Python aborts where it ends while another thread lets go of JAX's arrays."""
    with made(transport) as (server, center):
        sessions.exchange(center, center_params(), anchor_version=0, worker="anna")
        threads = server._listener._threads
        assert len(threads) >= 2
        server.stop()
        assert not threads


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc")
def test_nothing_is_left_open():
    def opened():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 a count is enough

    def use():
        for transport in TRANSPORTS:
            with made(transport) as (_, center):
                ones = jax.tree.map(jnp.ones_like, center.pull().params)
                for version in range(3):
                    sessions.exchange(
                        center, ones, anchor_version=version, worker="anna"
                    )

    use()  # grpc keeps some for good
    before = opened()
    use()
    gc.collect()
    jnp.zeros(2).block_until_ready()  # JAX lets go of memory when it is called next
    wait_for(lambda: opened() <= before)


# What it refuses.


def greeted(server, key=None):
    end = socket.create_connection(("127.0.0.1", server._servicer.direct.port))
    end.settimeout(LIMIT)
    key = server._servicer.direct.key if key is None else key
    end.sendall(_packets.GREETING + key)
    return end


def everything(end):
    heard = b""
    with contextlib.suppress(ConnectionError):
        while more := end.recv(1 << 16):
            heard += more
    return heard


def packet(frame, length=0, rest=b""):
    control = frame if isinstance(frame, bytes) else frame.SerializeToString()
    return _packets.HEAD.pack(len(control), length) + control + rest


def test_without_the_key_nothing_is_said():
    with made() as (server, _), greeted(server, b"x" * 16) as end:
        assert everything(end) == b""


def hostile():
    schema = _trees.schema_of({"w": jnp.ones(SIZE), "b": jnp.zeros(3)})
    message = pb.Message(sequence=1, schema_hash=schema.hash)
    return {
        "short": packet(pb.Frame(message=message), 8, bytes(8)),
        "long": packet(pb.Frame(message=message), 1 << 62),
        "no buffer": packet(pb.Frame(message=message)),
        "another tree": packet(
            pb.Frame(message=pb.Message(sequence=1, schema_hash=b"x")), 8, bytes(8)
        ),
        "no frame": packet(b"\xff" * 20),
        "empty frame": packet(b""),
        "huge control": _packets.HEAD.pack(2**32 - 1, 0),
        "no such segment": packet(pb.Frame(message=message, segment=3)),
        "no such answer": packet(
            pb.Frame(message=message, answer_segment=7), schema.size, bytes(schema.size)
        ),
        "attach nothing": packet(pb.Frame(attach=pb.Segment(number=1, size=100))),
        "ends in a head": b"\x01\x02",
        "ends in a buffer": packet(pb.Frame(message=message), schema.size, bytes(9)),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_packets_are_refused(name):
    join = pb.Frame(join=pb.Join(protocol=1, worker="eve", incarnation="1"))
    with made() as (server, center):
        with greeted(server) as end:
            end.sendall(packet(join) + hostile()[name])
            if name.startswith("ends"):
                end.shutdown(socket.SHUT_WR)
            heard = everything(end)
            assert (b"Error" in heard) != name.startswith("ends")
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        assert (
            sessions.exchange(center, ones, anchor_version=0, worker="anna").version
            == 1
        )


@shares
@pytest.mark.parametrize(
    ("size", "seals", "number"),
    [(100, True, 1), (1 << 20, False, 1), (1 << 20, True, 0), (1 << 20, True, 99)],
)
def test_segments_that_could_be_taken_away_are_refused(size, seals, number):
    """The server would die of reading what its owner has cut off."""
    with made() as (server, center):
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(LIMIT)
        end.connect("\0" + server._servicer.direct.socket)
        with end:
            end.sendall(_packets.GREETING + server._servicer.direct.key)
            join = pb.Frame(join=pb.Join(protocol=1, worker="eve", incarnation="1"))
            end.sendall(packet(join))
            if seals:
                descriptor, _ = _memory.create(size)
            else:
                descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, size)
            attach = pb.Frame(attach=pb.Segment(number=number, size=1 << 20))
            socket.send_fds(end, [packet(attach)], [descriptor])
            os.close(descriptor)
            assert b"ProtocolError" in everything(end)
        ones = jax.tree.map(jnp.ones_like, center.pull().params)
        assert (
            sessions.exchange(center, ones, anchor_version=0, worker="anna").version
            == 1
        )


def test_a_refusal_is_heard_although_the_message_is_still_being_sent():
    """Of a tree that the center does not have, and that no socket takes at once."""
    with made("socket", params={"w": jnp.ones(5_000_000)}) as (_, center):
        center.join("anna")
        center._schema = _trees.schema_of({"w": jnp.ones(5_000_001)})
        with pytest.raises(errors.TreeMismatchError, match="of another tree"):
            sessions.exchange(
                center, {"w": jnp.ones(5_000_001)}, anchor_version=0, worker="anna"
            )


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux only")
def test_nothing_is_congested_within_a_host():
    with made("socket") as (_, center):
        center.join("w")
        (link,) = links(center)
        ours = link._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert ours.rstrip(b"\0") == b"reno"
