"""The service on real sockets: its answers, its errors, and lost connections."""

import concurrent.futures
import contextlib
import functools
import gc
import inspect
import pathlib
import struct
import subprocess
import sys
import threading

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpc._server import _RPCState
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers import network, ports, sessions, shared, tuning
from helpers.support import RULES, assert_identical, tree
from helpers.waiting import BUSY, LIMIT, wait_until

import agn_optax
from agn_optax import codecs, errors, rules, service
from agn_optax.center import (
    BoundedStaleness,
    MessageLimits,
    ShardedCenter,
    Submission,
    Synchronous,
)
from agn_optax.service import center_pb2 as pb

PACKAGE = pathlib.Path(service.__file__).parent
ONES = {"w": jnp.ones(5), "v": jnp.ones((4, 2))}
HEAD = struct.Struct("<IQ")  # of a frame: sizes of its header message and buffer


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack):
    def serve(rule=None, params=ONES, **settings):
        rule = rule or shared.downpour()
        return stack.enter_context(service.serve(rule, params, **settings))

    return serve


@pytest.fixture
def connect(stack):
    def connect(address, rule=None, **settings):
        settings = {"timeout": 10, **settings}
        center = service.connect(address, rule or shared.downpour(), **settings)
        return stack.enter_context(center)

    return connect


def test_fingerprint_of_the_rule_is_computed_at_the_start(serve, connect):
    """Otherwise concurrent first calls would each compute it."""
    rules.fingerprint(shared.downpour())  # that of the worker
    server = serve(rules.downpour())
    before = rules.fingerprint.cache_info().misses
    connect(server.address)._remote.describe()
    assert rules.fingerprint.cache_info().misses == before


def a_step(worker, params, state):
    """Make a local step with a gradient of 1, and an exchange if one is due."""
    slope = jax.tree.map(jnp.ones_like, params)
    updates, state = worker.tx.update(slope, state, params)
    return worker.exchange(optax.apply_updates(params, updates), state)


def a_worker(center, name="anna", period=1, **settings):
    return agn_optax.Worker(
        center, shared.sgd(1.0), period=period, name=name, **settings
    )


# Answers of the service.


def test_generated_code_is_up_to_date_with_the_proto(tmp_path):
    root = PACKAGE.parents[1]
    subprocess.run(  # noqa: S603 our own command
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(root)),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"),
            str(PACKAGE / "center.proto"),
        ],
        check=True,
    )
    for name in ("center_pb2.py", "center_pb2.pyi"):
        generated = (tmp_path / "agn_optax" / "service" / name).read_text()
        assert generated == (PACKAGE / name).read_text(), "run `make proto`"


def test_health_is_served(serve):
    server = serve()
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "agn_optax.center.v1.Center"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_status_reports_exchanges_and_traffic(serve, connect):
    server = serve()
    center = connect(server.address)
    worker = a_worker(center, period=3)
    params, state = worker.start()
    for _ in range(6):
        params, state = a_step(worker, params, state)
    status = center.status()
    assert status["version"] == 2
    assert status["rule"] == "downpour"
    assert status["parameters"] == 13
    (row,) = status["workers"]
    assert (row["name"], row["exchanges"], row["period"]) == ("anna", 2, 3)
    assert row["connected"]
    assert row["staleness"] == 0
    np.testing.assert_allclose(row["norm"], 3 * 13**0.5, rtol=1e-6)
    assert row["bytes_received"] > 2 * 13 * 4
    worker.leave()
    assert center.status()["workers"] == []


@pytest.mark.parametrize("direct", [None, False])
def test_ended_connection_is_read_for_the_reason_before_a_retry(serve, connect, direct):
    """The message is not sent again: it would be rejected a second time."""
    limits = service.Limits(messages=MessageLimits(norm=1.0, in_a_row=1))
    server = serve(limits=limits, direct_address=direct)
    center = connect(server.address)
    session = center.join("anna", ONES)
    session.submit(Submission(1, jax.tree.map(lambda x: x + 9, ONES), anchor_version=0))
    wait_until(lambda: center.status()["rejected"])
    if direct is False:  # gRPC notices the end by itself
        wait_until(lambda: sessions.link(session).is_done())
    with pytest.raises(errors.MessageRejectedError, match="its norm is"):
        session.collect(1)
    assert center.status()["rejected"] == {"norm": 1}


@pytest.mark.parametrize("direct", [None, False])
def test_worker_gets_the_reason_of_a_rejection(serve, connect, direct, caplog):
    reject = MessageLimits(norm=10.0, in_a_row=2)
    server = serve(limits=service.Limits(messages=reject), direct_address=direct)
    center = connect(server.address)
    worker = a_worker(center)
    params, state = worker.start()
    params, state = worker.exchange(jax.tree.map(lambda x: x + 9, params), state)
    assert worker.rejection.startswith("its norm is 32.45, and this center takes 10")
    assert "a message of worker 'anna' was rejected: its norm is 32.45" in caplog.text
    assert_identical(params, ONES)
    params, state = a_step(worker, params, state)
    assert (worker.exchanges, worker.rejected, server.center.version) == (2, 1, 1)
    for bound in (2, 3):
        far = jax.tree.map(lambda x: x * jnp.nan, params)
        if bound == 3:
            with pytest.raises(errors.MessageRejectedError, match=r"2 .* not finite"):
                worker.exchange(far, state)
        else:
            params, state = worker.exchange(far, state)
    status = center.status()
    assert status["rejected"] == {"norm": 1, "nonfinite": 2}
    (row,) = status["workers"]
    assert (row["rejected"], row["dropped"], row["exchanges"]) == (3, 0, 1)


def test_worker_exchanges_over_a_unix_socket(serve, connect, unix_address):
    address = unix_address
    server = serve(address=address)
    worker = a_worker(connect(server.address))
    a_step(worker, *worker.start())
    assert server.center.version == 1
    with pytest.raises(errors.InvalidArgumentError, match="another server"):
        serve(address=address)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codec_casts_messages_but_not_the_center(serve, connect, dtype):
    params = {"w": jnp.linspace(0.1, 1.0, 1000)}
    rule = shared.downpour(codec=codecs.cast(dtype))
    server = serve(rule, params=params)
    narrow = connect(server.address, rule)
    worker = a_worker(narrow)
    adopted, state = worker.start()
    assert_identical(adopted["w"], params["w"])  # a pull is not cast
    adopted, _ = a_step(worker, adopted, state)
    assert_identical(server.center.pull().params, {"w": params["w"] - 1.0})
    rounded = (params["w"] - 1.0).astype(dtype).astype(jnp.float32)
    assert_identical(adopted["w"], rounded)
    assert narrow.status()["workers"][0]["bytes_received"] < 2300


def test_bfloat16_workers_of_a_float32_center(serve, connect):
    """Messages of a bfloat16 model are sent in bfloat16, without loss."""
    rule = shared.agn(shared.sgd(0.5))
    server = serve(rule, None, dtype="float32")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ONES)
    center = connect(server.address, rule)
    worker = a_worker(center, period=2)
    params, state = worker.start(params, chief=True)
    for _ in range(4):
        params, state = a_step(worker, params, state)
    assert params["w"].dtype == jnp.bfloat16
    assert server.center.pull().params["w"].dtype == jnp.float32
    np.testing.assert_array_equal(server.center.pull().params["w"], 0.0)
    assert center.status()["workers"][0]["bytes_received"] == 2 * (128 + 5 * 2)


def test_float64_parameters_need_a_center_with_x64(serve, connect):
    center = connect(serve(params=None).address)
    with jax.enable_x64(True), pytest.raises(errors.TreeMismatchError, match="X64"):
        # The server's threads have the setting of the process, which is 32 bits.
        center.initialize({"w": np.ones(3)}, worker="anna")


@pytest.mark.slow
def test_large_leaf_and_many_small_ones_are_exchanged(serve, connect):
    params = {"large": jnp.zeros((3_000_000,))} | {
        f"small-{i}": jnp.full((i % 5,), float(i)) for i in range(300)
    }
    server = serve(params=params)
    worker = a_worker(connect(server.address))
    a_step(worker, *worker.start())
    assert_identical(server.center.pull().params, jax.tree.map(lambda x: x - 1, params))


def test_pull_keeps_the_containers_of_the_tree(serve, connect):
    rule, params = shared.downpour(), tree()
    center = connect(serve(rule, params).address, rule)
    assert_identical(center.pull().params, params)


# Errors.


def test_connect_to_an_unused_port_times_out(unused_port):
    with pytest.raises(
        errors.CenterUnreachableError,
        match=rf"127.0.0.1:{unused_port} does not answer since .*attempts",
    ):
        service.connect(f"127.0.0.1:{unused_port}", shared.downpour(), timeout=0.3)


@pytest.fixture
def unused_port():
    return ports.free()


def test_worker_waits_for_a_center_that_starts_later(
    unused_port, serve, connect, caplog
):
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(connect(f"127.0.0.1:{unused_port}").pull())
    )
    waiting.start()
    while "does not answer" not in caplog.text:
        waiting.join(0.01)
    serve(address=f"127.0.0.1:{unused_port}")
    waiting.join(20)
    assert_identical(found[0].params, ONES)
    assert "answers again" in caplog.text


def test_another_grpc_server_is_no_center(stack):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        other = grpc.server(threads)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(errors.ProtocolError, match="not a center of agn_optax"):
            service.connect(f"127.0.0.1:{port}", shared.downpour(), timeout=5)
        other.stop(0).wait()


@pytest.mark.parametrize(
    "address", ["", "localhost", "host:", "host:70000", "::1:80", 5, ["a:1", "a:1"]]
)
def test_bad_addresses_are_rejected(address):
    with pytest.raises(errors.InvalidArgumentError, match="address"):
        service.connect(address, shared.downpour())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"limits": agn_optax.center.Limits()},
            r"limits must be agn_optax.service.Limits",
        ),
        ({"security": MessageLimits()}, r"security must be agn_optax.service.Security"),
    ],
)
def test_settings_of_another_type_are_rejected(settings, message):
    with pytest.raises(errors.InvalidTypeError, match=message):
        service.serve(shared.downpour(), **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own: service.Limits(lease=-1.0), "lease must be .* got -1.0"),
        (
            lambda own: service.Limits(messages=1.0),
            r"messages must be MessageLimits\(...\)",
        ),
    ],
)
def test_invalid_groups_of_settings_are_rejected(call, message):
    own = agn_optax.LocalCenter(shared.downpour(), ONES)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        call(own)


@pytest.mark.parametrize("make", [agn_optax.LocalCenter, service.serve])
def test_unknown_and_missing_arguments_are_named(make):
    name = make.__name__
    with pytest.raises(TypeError, match=rf"{name}.*\(\) .* argument 'modes'"):
        make(shared.downpour(), modes=None)
    with pytest.raises(TypeError, match=rf"{name}.*\(\) missing .* argument: 'rule'"):
        make()


def test_served_and_local_centers_have_the_same_settings():
    local = inspect.signature(agn_optax.LocalCenter).parameters
    served = inspect.signature(service.serve).parameters
    changed = [n for n, each in local.items() if served[n].default != each.default]
    assert changed == ["device"]
    assert all(served[name].kind == each.kind for name, each in local.items())
    for make, names in (
        (agn_optax.LocalCenter.__init__, local),
        (service.serve, served),
    ):
        assert all(f"  {name}: " in make.__doc__ for name in names)


def test_local_center_rejects_limits_of_a_service():
    with pytest.raises(errors.InvalidTypeError, match=r"must be agn_optax.center.Lim"):
        agn_optax.LocalCenter(shared.downpour(), limits=service.Limits(calls=1.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: service.connect("10.1.2.3:50051", shared.downpour()),
        lambda: service.serve(shared.downpour(), address="0.0.0.0:0"),
    ],
)
def test_plain_text_to_other_machines_needs_insecure(call):
    with pytest.raises(errors.InvalidArgumentError, match="insecure=True"):
        call()


def test_port_in_use_is_reported(serve):
    with pytest.raises(errors.InvalidArgumentError, match="cannot listen at"):
        service.serve(shared.downpour(), address=serve().address)


def test_client_with_another_protocol_is_rejected(serve, connect, monkeypatch):
    server = serve()
    monkeypatch.setattr(service.address, "PROTOCOL", 7)
    with pytest.raises(errors.ProtocolError, match=r"speaks version 1.*got 7"):
        connect(server.address)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (shared.downpour(), "its name is 'agn', and here it is 'downpour'"),
        (shared.agn(shared.adam(0.2)), "its center optimizer turns"),
        (shared.agn(shared.sgd(0.1)), "its center optimizer turns"),
    ],
)
def test_worker_with_another_rule_is_rejected(serve, connect, rule, message):
    server = serve(shared.agn(shared.adam(0.1)))
    with pytest.raises(errors.RuleMismatchError, match=message):
        connect(server.address, rule)
    connect(server.address, rules.agn(optax.adam(0.1)))  # an equal rule


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({**ONES, "w": jnp.ones(4)}, r"'w'\] float32\[4\], where .*\[5\]"),
        ({"w": jnp.ones(5)}, r"v'\] float32\[4, 2\]"),
        ({**ONES, "x": jnp.ones(1)}, r"x'\] float32\[1\], which the center"),
        (jax.tree.map(jnp.bfloat16, ONES), r"bfloat16\[4, 2\], where .* float32"),
    ],
)
def test_worker_with_another_model_is_rejected(serve, connect, params, message):
    worker = a_worker(connect(serve().address))
    for chief in (None, False):
        with pytest.raises(errors.TreeMismatchError, match=message):
            worker.start(params, chief=chief)
    worker.start(ONES)


def test_second_worker_of_the_same_name_is_rejected(serve, connect):
    server = serve()
    first = a_worker(connect(server.address))
    params, state = first.start()
    second = a_worker(connect(server.address))
    with pytest.raises(errors.NameTakenError, match="a worker 'anna' already"):
        second.start()
    a_step(first, params, state)  # not affected
    first.leave()
    a_step(second, *second.start())
    assert server.center.version == 2


def test_worker_beyond_max_workers_is_rejected(serve, connect):
    server = serve(limits=service.Limits(max_workers=2))
    workers = [a_worker(connect(server.address), str(i)) for i in range(3)]
    for worker in workers[:2]:
        worker.start()
    with pytest.raises(
        errors.CenterFullError, match="takes at most 2 workers, and 2 are"
    ):
        workers[2].start()
    workers[0].leave()
    workers[2].start()


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_wrong_sizes_and_hostile_frames_are_rejected(serve, size):
    def frame_bytes(header, follows, rest=b""):
        header = header.SerializeToString()
        return HEAD.pack(len(header), follows) + header + rest

    server = serve()
    with service.Observer(server.address) as observer:
        schema = service.wire.from_bytes(observer.describe().schema)
    join = pb.Join(protocol=service.address.PROTOCOL, worker="eve", session_id="1")
    joining = frame_bytes(pb.Header(join=join), 0)
    message = pb.Header(message=pb.Message(sequence=1, schema_hash=schema.hash))
    other = pb.Header(message=pb.Message(sequence=1, schema_hash=b"x"))
    hostile = [
        [frame_bytes(message, size, bytes(size))],
        [frame_bytes(message, schema.size, bytes(8))],
        [frame_bytes(message, 2**63, bytes(8))] * 2,
        [frame_bytes(other, schema.size, bytes(schema.size))],
        [joining],
        [b"\xff" * 20],
        [frame_bytes(message, 0)[:-1]],
        [b"\x01"],
    ]
    with grpc.insecure_channel(server.address) as channel:
        exchange = channel.stream_stream("/agn_optax.center.v1.Center/Exchange")
        for frames in hostile:
            call = exchange(iter([joining, *frames]))
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, frames
        with pytest.raises(grpc.RpcError):
            list(exchange(iter([b"\x00\x01"])))
    assert server.center.version == 0
    assert_identical(server.center.pull().params, ONES)


# Lost connections and restarts.


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_lost_answer_is_sent_again_without_applying_twice(
    serve, connect, transport, monkeypatch
):
    """The retry of an applied message gets its answer, and is not applied again."""
    # Also if the network is mended late.
    tuning.set_session_patience(monkeypatch, LIMIT)
    server = serve()
    with network.Network(server, transport) as net:
        center = connect(net.address)
        worker = a_worker(center)
        params, state = a_step(worker, *worker.start())
        net.answering.clear()
        ended = []
        exchange = threading.Thread(
            target=lambda: ended.append(a_step(worker, params, state))
        )
        exchange.start()
        while server.center.version < 2:
            exchange.join(0.01)
        net.cut()
        # A message of another worker comes between; the answer is still the first one.
        other = a_worker(connect(server.address), "bert")
        a_step(other, *other.start())
        net.mend()
        exchange.join(20)
        assert worker.exchanges == 2
        assert server.center.version == 3
        np.testing.assert_array_equal(ended[0][0]["w"], 1.0 - 2)
        np.testing.assert_array_equal(server.center.pull().params["w"], 1.0 - 3)


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_worker_with_patience_trains_through_an_outage(serve, connect, transport):
    server = serve()
    with network.Network(server, transport) as net:
        center = connect(net.address)
        worker = a_worker(center, period=2, patience=6)
        params, state = worker.start()
        for _ in range(2):
            params, state = a_step(worker, params, state)
        net.cut()
        sessions.connection(center).timeout = 0.2
        for _ in range(2 + 5):  # the message cannot be sent; patience covers it
            params, state = a_step(worker, params, state)
        assert worker.exchanges == server.center.version == 1
        assert center.unreachable_since is not None
        sessions.connection(center).timeout = 10.0
        mending = threading.Timer(0.3, net.mend)
        mending.start()
        params, state = a_step(worker, params, state)  # waits
        mending.join()
        assert worker.exchanges == 3  # the lost one, and one of more steps
        params, state = worker.flush(params, state)
        assert server.center.version == worker.exchanges == 3
        for leaf in jax.tree.leaves((params, server.center.pull().params)):
            np.testing.assert_array_equal(leaf, 1.0 - 10)  # every step counts once
        assert center.unreachable_since is None


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_worker_without_patience_raises_for_a_lost_center(serve, connect, transport):
    server = serve()
    with network.Network(server, transport) as net:
        center = connect(net.address)
        worker = a_worker(center, patience=0)
        params, state = worker.start()
        net.cut()
        sessions.connection(center).timeout = 0.2
        with pytest.raises(errors.CenterUnreachableError, match="not answer since"):
            worker.exchange(params, state)
        net.mend()
        sessions.connection(center).timeout = 10.0
        worker.exchange(params, state)
        assert server.center.version == worker.exchanges == 1


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_worker_with_overlap_does_not_wait_for_an_answer(serve, connect, transport):
    server = serve()
    with network.Network(server, transport) as net:
        worker = a_worker(connect(net.address), period=2, overlap=True, patience=5)
        params, state = worker.start()
        for _ in range(2):
            params, state = a_step(worker, params, state)
        assert worker.exchanges == 1
        net.answering.clear()
        for _ in range(2 + 4):
            params, state = a_step(worker, params, state)
        assert worker.exchanges == 1
        net.answering.set()
        params, state = worker.flush(params, state)
        assert worker.exchanges == server.center.version
        for leaf in jax.tree.leaves((params, server.center.pull().params)):
            np.testing.assert_array_equal(leaf, 1.0 - 8)


@pytest.mark.parametrize("rule", ["agn", "easgd_rho"])
@pytest.mark.few(1)
def test_overlap_with_agn_and_elastic_rules(serve, connect, rule):
    """A single worker with constant gradients, so only the time of answers varies."""
    rule = RULES[rule]()
    server = serve(rule, ONES)
    worker = a_worker(connect(server.address, rule), period=3, overlap=True)
    params, state = worker.start()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def local_step(params, state):  # donates arrays that may still be in flight
        slope = jax.tree.map(jnp.ones_like, params)
        updates, state = worker.tx.update(slope, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(30):
        params, state = worker.exchange(*local_step(params, state))
    params, state = worker.flush(params, state)
    assert worker.exchanges == server.center.version
    assert 8 <= worker.exchanges <= 10
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert float(server.center.pull().params["w"][0]) < 0.7


def test_drain_ends_waiting_exchanges_without_applying_them(serve, connect):
    """An exchange that waits in a round ends with an error and is not applied."""
    server = serve(mode=Synchronous(quorum=2, grace=0.0))
    center = connect(server.address)
    anna, bert = (a_worker(connect(server.address), name) for name in ("anna", "bert"))
    loops = {w.name: w.start() for w in (anna, bert)}
    waiting = []

    def exchange():
        try:
            a_step(anna, *loops["anna"])
        except errors.CenterUnreachableError as error:
            waiting.append(error)

    sessions.fragment(anna).machine.patience = 0
    sessions.connection(anna.center).timeout = 1.0
    thread = threading.Thread(target=exchange)
    thread.start()
    while not any(row["waits"] for row in center.status()["workers"]):
        thread.join(0.01)
    server.stop(grace=5)
    assert server.wait(0)
    thread.join(20)
    assert "going down" in str(waiting[0]) or "does not answer" in str(waiting[0])
    assert server.center.version == 0
    server.stop()  # a second stop does nothing


def test_new_center_at_the_same_address_is_detected(serve, connect, unused_port):
    address = f"127.0.0.1:{unused_port}"
    server = serve(address=address)
    worker = a_worker(connect(address))
    params, state = a_step(worker, *worker.start())
    server.stop()
    serve(address=address)
    with pytest.raises(errors.WorkerStateError, match="started anew"):
        a_step(worker, params, state)
    params, state = a_step(worker, *worker.start())
    np.testing.assert_array_equal(params["w"], 0.0)


def test_synchronous_rounds_apply_the_mean(serve, connect):
    """Two workers in synchronous rounds; each applies the mean, as on a mesh."""
    server = serve(shared.average(), mode=Synchronous())
    center = connect(server.address, shared.average())
    workers = [a_worker(center, name) for name in ("anna", "bert")]
    loops = [worker.start() for worker in workers]
    slopes, ends = (1.0, 3.0), {}

    def work(i):
        params, state = loops[i]
        for _ in range(3):
            grads = jax.tree.map(lambda x: jnp.full_like(x, slopes[i]), params)
            updates, state = workers[i].tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            params, state = workers[i].exchange(params, state)
        ends[i] = params

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert server.center.version == 3
    for params in (*ends.values(), server.center.pull().params):
        np.testing.assert_array_equal(params["w"], 1.0 - 3 * 2.0)


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_round_does_not_wait_for_a_worker_with_expired_lease(serve, connect, transport):
    server = serve(mode=Synchronous(), limits=service.Limits(lease=0.3))
    net = network.Network(server, transport)
    with net:
        anna = a_worker(connect(server.address), "anna")
        bert = a_worker(connect(net.address), "bert")
        loop = anna.start()
        bert.start()
        net.cut()
        a_step(anna, *loop)
        assert server.center.version == 1


def test_worker_too_far_behind_continues_from_the_center(serve, connect):
    server = serve(mode=BoundedStaleness(versions=2))
    center = connect(server.address)
    slow, fast = a_worker(center, "slow"), a_worker(center, "fast")
    slow_loop, fast_loop = slow.start(), fast.start()
    for _ in range(3):
        fast_loop = a_step(fast, *fast_loop)
    params, state = a_step(slow, *slow_loop)
    assert (slow.dropped, slow.staleness) == (1, 3)
    np.testing.assert_array_equal(params["w"], 1.0 - 3)
    a_step(slow, params, state)
    assert server.center.version == 4


@pytest.mark.parametrize("chief", [True, False])
def test_center_is_updated_in_place_without_readers(serve, connect, chief):
    rule = shared.agn(shared.adam(0.1))
    server = serve(rule, None if chief else {"w": jnp.ones(100_000)})
    worker = a_worker(connect(server.address, rule))
    params, state = worker.start({"w": jnp.ones(100_000)}, chief=chief or None)
    places = {server.center.core.store.current.params["w"].unsafe_buffer_pointer()}
    for _ in range(6):
        params, state = a_step(worker, params, state)
        while server.center.core._answers:  # until the acknowledgement has come
            with server.center.core.atomically():
                server.center.core.atomically().wait(0.01)
        current = server.center.core.store.current
        assert not current.readers
        places.add(current.params["w"].unsafe_buffer_pointer())
    assert len(places) == 1


def test_worker_that_waits_for_a_chief_logs_it_repeatedly(
    serve, connect, monkeypatch, caplog
):
    """The log names the center, and the call that is missing."""
    tuning.set_chief_warnings(monkeypatch, 0.02)
    center = connect(serve(params=None).address)
    worker = a_worker(center, name="second")
    running = threading.Thread(
        target=worker.start, args=(ONES,), kwargs={"chief": False}
    )
    running.start()
    wait_until(lambda: caplog.text.count("no chief has started at") > 1)
    assert center.address in caplog.text
    assert "start(params, chief=True)" in caplog.text
    a_worker(connect(center.address), name="first").start(ONES, chief=True)
    running.join(LIMIT)
    assert not running.is_alive()


# Shards.


def test_rule_that_needs_the_whole_tree_is_rejected_at_shards(serve, connect):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), shared.sgd(0.1))
    rule = shared.agn(clipped)
    center = connect([serve(rule, None).address for _ in range(2)], rule)
    worker = a_worker(center)
    with pytest.raises(errors.InvalidArgumentError, match="not elementwise"):
        worker.start(ONES, chief=True)
    with pytest.raises(errors.NotInitializedError):
        center.pull()


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_retry_completes_an_exchange_that_reached_one_shard(serve, connect, transport):
    rule = shared.downpour()
    servers = [serve(params=None) for _ in range(2)]
    with network.Network(servers[1], transport) as net:
        center = connect([servers[0].address, net.address], rule)
        worker = a_worker(center, patience=0)
        params, state = worker.start(ONES, chief=True)
        net.cut()
        sessions.connection(center.centers[1]).timeout = 0.2
        with pytest.raises(errors.CenterUnreachableError, match=net.address):
            worker.exchange(jax.tree.map(lambda x: x - 1, params), state)
        # Over gRPC the message may still be in flight.
        wait_until(lambda: servers[0].center.version == 1)
        assert servers[1].center.version == 0
        net.mend()
        sessions.connection(center.centers[1]).timeout = 10.0
        params, state = worker.exchange(params, state)
        assert [s.center.version for s in servers] == [1, 1]
        for leaf in jax.tree.leaves((params, center.pull().params)):
            np.testing.assert_array_equal(leaf, 0.0)


def calls_that_are_kept():
    gc.collect()
    return sum(isinstance(each, _RPCState) for each in gc.get_objects())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["Describe", "Alive", "Leave", "Status", "Pull"])
def test_malformed_request_is_rejected_and_released(serve, name):
    server, before = serve(), calls_that_are_kept()
    with grpc.insecure_channel(server.address) as channel:
        path = f"/{service.address.SERVICE}/{name}"
        call = channel.unary_stream(path)  # works for unary methods, too
        for _ in range(20):
            with pytest.raises(grpc.RpcError, match="not a request") as raised:
                list(call(b"\xff\xff", timeout=20))
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        del raised
    server.stop()
    wait_until(lambda: calls_that_are_kept() <= before, limit=BUSY, pause=0.05)


def test_repr_has_rule_version_workers_address_and_transport():
    """Covers workers, local, remote and sharded centers, and servers."""
    rule, zeros = shared.downpour(), jnp.zeros(2)
    local = agn_optax.LocalCenter(rule)
    assert repr(local) == "LocalCenter(downpour, no parameters yet, 0 workers)"
    with (
        service.serve(rule, zeros) as server,
        service.connect(server.address, rule, transports=["socket"]) as center,
    ):
        worker = agn_optax.Worker(center, shared.sgd(0.1), period=1, name="anna")
        assert repr(worker).startswith("Worker('anna', downpour, 0 exchanges, not st")
        assert repr(center) == f"RemoteCenter(downpour, at {server.address})"
        worker.exchange(*worker.start())
        assert repr(worker) == (
            "Worker('anna', downpour, 1 exchanges, version 1, at RemoteCenter(downpour,"
            f" at {server.address}, 'anna' by socket))"
        )
        its_center = "LocalCenter(downpour, version 1, 1 workers)"
        assert repr(server) == f"Server(at {server.address}, {its_center})"
        both = ShardedCenter([center, center])
        assert repr(both) == f"ShardedCenter({center!r}, {center!r})"
    assert "which has ended" in repr(server)
    assert set(public(agn_optax.LocalCenter)) == {
        *("close", "describe", "initialize", "join", "notices", "pull", "restore"),
        *("save",),
        *("version", "wait", "workers"),
    }


def public(kind):
    return [name for name in dir(kind) if not name.startswith("_")]
