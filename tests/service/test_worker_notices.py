"""Notices of workers about their steps, their link and their residual."""

import contextlib
import dataclasses
import functools
import socket

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import network, pieces, ports, sessions, shared
from helpers.waiting import wait_until

import agn_optax
from agn_optax import codecs, errors, service
from agn_optax._internal import notices
from agn_optax.center import (
    BoundedStaleness,
    MessageLimits,
    Submission,
    Synchronous,
    Thresholds,
    Transfer,
)
from agn_optax.center._links import Links
from agn_optax.service import ExpectedLink
from agn_optax.service import center_pb2 as pb
from agn_optax.worker._checks import ExchangeChecks

RULE = shared.downpour()
PARAMS = {"w": jnp.zeros(25_000)}  # 100 KB
ONES = jax.tree.map(jnp.ones_like, PARAMS)
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
LARGE = jax.tree.map(lambda leaf: 1e6 * leaf, ONES)
SLOW = 0.5e6  # bytes/s, at which an exchange takes 0.4 s
OF_CENTER = {n for n, row in notices.CHECKS.items() if row.observer == "center"}
OTHER = [name for _, name in socket.if_nameindex() if name != "lo"]
pytestmark = pytest.mark.usefixtures("patient_dials")


class Loop:
    """The training loop of a worker, whose callbacks record what they get."""

    def __init__(self, center, rule=RULE, name="anna", **settings):
        self.values = []
        self.worker = agn_optax.Worker(
            center,
            shared.sgd(0.1),
            period=1,
            name=name,
            callbacks=[lambda step, values: self.values.append(values)],
            **settings,
        )
        self.params, self.state = self.worker.start()

    def exchange(self, times=1, grads=ONES):
        for _ in range(times):
            updates, self.state = self.worker.tx.update(grads, self.state, self.params)
            self.params = optax.apply_updates(self.params, updates)
            self.params, self.state = self.worker.exchange(self.params, self.state)

    @property
    def found(self):
        """The names of the checks whose notices hold, after the last exchange."""
        names = [notice.check for notice in self.worker.notices]
        last = self.values[-1]
        assert last["notices"] == len(names)
        assert {k for k in last if k.startswith("notice_")} == {
            f"notice_{name}" for name in names
        }
        return names

    def exchange_until_found(self, name, most=10, grads=ONES):
        """Exchange until a notice holds, and return it; ``most`` times at most."""
        for _ in range(most):
            self.exchange(grads=grads)
            if name in self.found:
                return next(n for n in self.worker.notices if n.check == name)
        raise AssertionError(f"no {name} in {most} exchanges")


def at_center(server):
    """Return the notices about workers in the status of a center, by check."""
    with service.Observer(server.address) as observer:
        found = observer.status()["notices"]
    return {n["check"]: n for n in found if n["check"] not in OF_CENTER}


@contextlib.contextmanager
def proxied(transport, bandwidth=None, **settings):
    """Yield a network, a loop whose center is behind it, and the center's notices."""
    with (
        service.serve(RULE, PARAMS, address="127.0.0.1:0") as server,
        network.Network(server, transport, bandwidth) as between,
        service.connect(
            between.address, RULE, transports=[transport], **settings
        ) as center,
    ):
        yield between, Loop(center), lambda: at_center(server)


@pytest.mark.parametrize("transport", network.TRANSPORTS)
def test_exchange_ten_times_slower_than_the_best_is_said(transport, caplog):
    with proxied(transport) as (between, loop, known_at_center):
        loop.exchange(5)
        assert loop.found == []
        between.there.rate = between.back.rate = SLOW
        notice = loop.exchange_until_found("slow_exchange")
        for part in (f"by {transport!r} over interface 'lo' at 0.", "its best so far"):
            assert part in notice.text
            assert part in caplog.text
        loop.exchange()  # the message takes the notice to the center
        known = known_at_center()["slow_exchange"]
        assert (known["worker"], known["remedy"]) == ("anna", notice.remedy)
        assert known["text"].startswith("an exchange of worker 'anna' took")
        between.mend()
        loop.exchange(2)
        assert loop.found == []
        assert known_at_center() == {}


def test_exchange_three_times_slower_than_the_given_rate_is_said():
    expected = ExpectedLink(rate=100 * SLOW)
    # Not ten times: a busy machine has long round trips, which are expected, too.
    thresholds = Thresholds(slow_exchange=3)
    with proxied("socket", SLOW, expected=expected) as (_, first, _):
        loop = Loop(first.worker.center, name="ben", thresholds=thresholds)
        notice = loop.exchange_until_found("slow_exchange")
        assert "and 50 MB/s was expected (as given)" in notice.text


@pytest.mark.slow
def test_link_as_slow_as_its_given_rate_is_not_said():
    expected = ExpectedLink(rate=SLOW)
    with proxied("socket", SLOW, expected=expected) as (_, loop, _):
        loop.exchange(6)
        assert loop.found == []


@pytest.mark.parametrize(
    ("seconds", "found"), [(0.9, []), (1.5, []), (11.5, ["slow_exchange"])]
)
def test_exchange_that_is_slow_once_is_said_if_it_loses_ten_seconds(seconds, found):
    checks = ExchangeChecks("anna", RULE, None)
    usual = Transfer("center:1", "socket", "eth0", 10**6, 0.1)
    slow = usual._replace(seconds=seconds)
    for transfer, names in ((usual, []), (slow, found), (usual, [])):
        checks.after_exchange([transfer])
        assert [notice.check for notice in checks.notices.current()] == names


def test_transfer_that_takes_milliseconds_longer_is_not_said():
    checks = ExchangeChecks("anna", RULE, None)
    usual = Transfer("center:1", "socket", "eth0", 10**4, 0.001)
    for seconds in (0.001, *[0.09] * 10):
        checks.after_exchange([usual._replace(seconds=seconds)])
    assert checks.notices.current() == []


@pytest.mark.parametrize(("seconds", "found"), [(3.0, []), (5.0, ["slow_exchange"])])
def test_expected_time_is_that_of_the_given_rate_and_the_round_trip(seconds, found):
    checks = ExchangeChecks("anna", RULE, None)
    expected = ExpectedLink(rate=1e7)
    slow = Transfer("center:1", "socket", "eth0", 10**6, seconds, expected)
    for _ in range(5):
        checks.after_exchange([slow._replace(round_trip=0.3)])
    assert [notice.check for notice in checks.notices.current()] == found


@pytest.mark.slow
def test_time_at_the_center_is_not_that_of_the_link():
    """A worker of a synchronous round waits for the other one, not for the link."""
    mode = Synchronous()
    with (
        service.serve(RULE, PARAMS, address="127.0.0.1:0", mode=mode) as server,
        service.connect(server.address, RULE) as center,
        service.connect(server.address, RULE) as another,
    ):
        session, other = center.join("anna"), another.join("ben")
        message = Submission(1, PARAMS, anchor_version=0)
        session.submit(message)
        assert session.collect(1, timeout=0.0) is None  # after two seconds
        other.submit(message)
        assert session.collect(1) is not None
        (transfer,) = session.transfers
        assert transfer.nbytes == 200_000
        assert transfer.seconds < 1.9


@pytest.fixture
def served():
    with service.serve(RULE, PARAMS, address="127.0.0.1:0") as server:
        yield server


def test_direct_connection_that_falls_back_to_grpc_is_said(served, caplog):
    known = sessions.servicer(served)
    closed = f":{ports.free()}"  # as behind a firewall
    known.offers = [pb.Offer(transport="socket", address=closed)]
    with service.connect(served.address, RULE) as center:
        loop = Loop(center)
        notice = loop.exchange_until_found("other_link", most=1)
        assert "by 'grpc' over interface 'lo' at " in notice.text
        assert " MB/s, and a direct connection (" in notice.text
        assert "refused" in notice.text
        loop.exchange()
        assert list(at_center(served)) == ["other_link"]
    assert caplog.text.count("a direct connection (") == 2  # worker and center, once
    with service.connect(served.address, RULE, transports=["grpc"]) as center:
        loop = Loop(center)
        loop.exchange()
        assert loop.found == []


@pytest.mark.parametrize("wanted", ["memory", "socket", "grpc"])
def test_other_transport_than_expected_is_said(wanted, served):
    expected = ExpectedLink(transport=wanted)
    transports = ["grpc"]
    with service.connect(
        served.address, RULE, transports=transports, expected=expected
    ) as center:
        loop = Loop(center)
        loop.exchange()
        assert loop.found == ([] if wanted == "grpc" else ["other_link"])
        assert all(f"and transport {wanted!r}" in n.text for n in loop.worker.notices)


@pytest.mark.parametrize("transport", network.TRANSPORTS)
@pytest.mark.skipif(not OTHER, reason="the only network interface is lo")
def test_other_interface_than_expected_is_said(transport, served):
    for wanted, found in ("lo", []), (OTHER[0], ["other_link"]):
        with service.connect(
            served.address,
            RULE,
            transports=[transport],
            expected=ExpectedLink(interface=wanted),
        ) as center:
            loop = Loop(center)
            loop.exchange()
            assert loop.found == found
            said = f" MB/s, and interface {wanted!r} was expected"
            assert all(said in notice.text for notice in loop.worker.notices)
            assert all("interface 'lo' at " in n.text for n in loop.worker.notices)


def test_interface_that_the_system_does_not_tell_is_said_if_one_is_expected():
    checks = ExchangeChecks("anna", RULE, None)
    transfer = Transfer("center:1", "socket", None, 10**6, 0.1)
    checks.after_exchange([transfer])
    assert checks.notices.current() == []
    expected = ExpectedLink(interface="lo")
    checks.after_exchange([transfer._replace(expected=expected)])
    (notice,) = checks.notices.current()
    assert "at 10 MB/s, and interface 'lo' (this system does not tell" in notice.text


def test_shared_memory_uses_no_interface(served):
    expected = ExpectedLink(interface=[name for _, name in socket.if_nameindex()][-1])
    with service.connect(
        served.address, RULE, transports=["memory"], expected=expected
    ) as center:
        loop = Loop(center)
        loop.exchange()
        (transfer,) = sessions.of_worker(loop.worker).transfers
        assert (transfer.transport, transfer.interface) == ("memory", "")
        assert loop.found == []


def test_transfers_of_a_center_in_shards_are_those_of_all_shards(served):
    with (
        service.serve(RULE, address="127.0.0.1:0") as first,
        service.serve(RULE, address="127.0.0.1:0") as second,
    ):
        addresses = [first.address, second.address]
        params = {"a": jnp.ones(8), "b": jnp.ones(8)}
        with service.connect(addresses, RULE, transports=["grpc"]) as center:
            worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
            worker.exchange(*worker.start(params, chief=True))
            found = sessions.of_worker(worker).transfers
            assert [transfer.address for transfer in found] == addresses


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (
            {"rate": 0},
            errors.InvalidArgumentError,
            r"rate must be .* in \(0, inf",
        ),
        ({"rate": "fast"}, errors.InvalidTypeError, "rate must be a number"),
        ({"interface": "none0"}, errors.InvalidArgumentError, "which are .*'none0'"),
    ],
)
def test_link_that_cannot_be_expected_is_an_error(settings, error, text):
    with pytest.raises(error, match=text):
        ExpectedLink(**settings)


def test_expected_transport_without_that_name_is_an_error():
    with pytest.raises(errors.InvalidArgumentError, match="got \\('infiniband',\\)"):
        service.connect("[::1]:1", RULE, expected=ExpectedLink(transport="infiniband"))
    with pytest.raises(errors.InvalidTypeError, match="expected must be an Expected"):
        service.connect("[::1]:1", RULE, expected=1e9)


def diverging():
    """Return a codec that sends three times too much: its residual doubles each time.

    Codecs that are scaled to be right on average, such as a random choice of elements
    divided by its probability, do the same with error feedback.
    """
    scaled = codecs.cast("float32")
    return codecs.error_feedback(
        dataclasses.replace(
            scaled,
            decode=lambda sent, like: jax.tree.map(lambda x: 3.0 * x, sent),
            name="threefold",
        )
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_residual_that_doubles_is_said_within_ten_exchanges(overlap, caplog):
    rule = shared.downpour(codec=diverging())
    with (
        service.serve(rule, PARAMS, address="127.0.0.1:0") as server,
        service.connect(server.address, rule) as center,
    ):
        loop = Loop(center, overlap=overlap)
        notice = loop.exchange_until_found("residual", most=10 + 2 * overlap)
        assert "that its codec usually keeps, and grows" in notice.text
        loop.exchange(1 + overlap)
        assert list(at_center(server)) == ["residual"]
    assert notice.text in caplog.text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("codec", "times"),
    [
        (codecs.top_k(5, block=100), 30),
        (codecs.top_k(1, block=100), 120),
        (codecs.quantize(4, block=100), 20),
        (codecs.sign(), 30),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_residual_of_a_sparse_or_coarse_codec_is_not_said(codec, times):
    """It grows at first, up to what the codec leaves out."""
    rule = shared.downpour(codec=codecs.error_feedback(codec))
    loop = Loop(agn_optax.LocalCenter(rule, PARAMS))
    for _ in range(times):
        loop.exchange()
        assert loop.found == []


def test_messages_rejected_by_the_center_are_said_by_the_worker(caplog):
    limits = service.Limits(messages=MessageLimits(norm=100.0))
    with (
        service.serve(RULE, PARAMS, address="127.0.0.1:0", limits=limits) as server,
        service.connect(server.address, RULE) as center,
    ):
        loop, other = Loop(center), Loop(center, name="ben")
        other.exchange()
        loop.exchange()
        caplog.clear()
        notice = loop.exchange_until_found("lost_messages", grads=LARGE)
        assert (notice.worker, notice.check) == ("anna", "lost_messages")
        assert "the last one was rejected" in notice.text
        assert caplog.text.count(notice.text) == 2  # by the center, and the worker
        other.exchange()
        assert other.found == []  # it is about anna
        with service.Observer(server.address) as observer:
            (known,) = observer.status()["notices"]  # it is not sent back
        assert known == notice._asdict()
        loop.exchange(10)
        assert loop.found == []


def test_notices_of_the_center_reach_the_callbacks_of_its_workers(caplog):
    center = agn_optax.LocalCenter(RULE, PARAMS, thresholds=Thresholds(still_center=2))
    loop = Loop(center)
    loop.exchange(2, grads=ZEROS)
    wait_until(lambda: center.notices)  # it looks at most once a second by itself
    notice = loop.exchange_until_found("still_center", grads=ZEROS)
    assert notice.worker == ""
    assert caplog.text.count("has hardly moved") == 1  # the center is in this process


def test_notices_of_the_shards_of_a_center_reach_its_workers():
    limits = service.Limits(messages=MessageLimits(norm=1.0))
    with (
        service.serve(RULE, address="127.0.0.1:0", limits=limits) as first,
        service.serve(RULE, address="127.0.0.1:0", limits=limits) as second,
        service.connect([first.address, second.address], RULE) as center,
    ):
        worker = agn_optax.Worker(center, shared.sgd(0.1), period=1, name="anna")
        params, state = worker.start({"a": jnp.ones(8), "b": jnp.ones(8)}, chief=True)
        for _ in range(2):
            grads = jax.tree.map(lambda leaf: 1e6 * leaf, params)
            updates, state = worker.tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        assert [n.check for n in worker.notices] == ["lost_messages"]


@pytest.mark.parametrize(("threshold", "found"), [(4, True), (6, False), (None, False)])
def test_threshold_of_slow_links_can_be_changed(threshold, found):
    known = notices.Notices(Thresholds(slow_link=threshold))
    links = Links(known)
    for _ in range(10):
        for worker, seconds in (("anna", 5.0), ("ben", 1.0), ("carl", 1.0)):
            links.add(worker, "by 'socket'", 10**7, seconds)
    said = [(notice.check, notice.worker) for notice in known.current()]
    assert said == ([("slow_link", "anna")] if found else [])


@pytest.mark.slow
def test_link_that_is_slow_from_the_start_is_said_by_comparison(served):
    offers = sessions.servicer(served).offers
    with (
        network.Network(served, "socket", SLOW) as between,
        service.connect(between.address, RULE, transports=["socket"]) as far,
        service.connect(served.address, RULE, transports=["memory"]) as near,
        service.Observer(served.address) as observer,
    ):
        loop = Loop(far)
        sessions.servicer(served).offers = offers
        memory = Loop(near, name="ben")
        for _ in range(8):
            loop.exchange()
            memory.exchange()
            assert loop.found == []  # exchanges in shared memory are not compared
        with service.connect(served.address, RULE, transports=["grpc"]) as third:
            other = Loop(third, name="carl")
            other.exchange(6)
            notice = loop.exchange_until_found("slow_link", most=2)
            assert notice.worker == "anna"
            assert "exchanges by 'socket' over interface 'lo' at 0.4" in notice.text
            other.exchange()
            assert other.found == []
            workers = {w["name"]: w for w in observer.status()["workers"]}
    assert workers["anna"]["interface"] == "lo"
    assert 0.3e6 < workers["anna"]["rate"] <= SLOW
    assert workers["ben"]["interface"] == ""
    assert workers["carl"]["rate"] > 10 * SLOW


@pytest.mark.parametrize("speaking", [0, 1])
def test_notices_of_every_process_of_a_worker_reach_the_center(served, speaking):
    with pieces.pod(served.address, RULE, pieces.row_shares(PARAMS, 2)) as worker:
        for version, texts in enumerate([{"residual": "it grows"}, {}]):
            worker.done += 1
            own = [pieces.cut(ONES, share.owned) for share in worker.shares]
            messages = worker.submissions(own, anchor_version=version)
            messages[speaking] = messages[speaking]._replace(notices=texts)
            calls = zip(worker.sessions, messages, strict=True)
            pieces.results(
                pieces.together([functools.partial(pieces.answer, *c) for c in calls])
            )
            found = at_center(served)
            assert {k: n["text"] for k, n in found.items()} == {
                check: f"process {speaking}: {text}" for check, text in texts.items()
            }


@pytest.mark.slow
def test_link_far_away_is_as_fast_as_its_given_rate(caplog):
    """The round trip, which is measured, does not count as slowness of the link."""
    caplog.set_level("INFO", "agn_optax")
    expected = ExpectedLink(rate=1e9)
    with (
        service.serve(RULE, PARAMS, address="127.0.0.1:0") as server,
        network.Network(server, "socket") as between,
    ):
        between.there.delay = between.back.delay = 0.1
        with service.connect(
            between.address, RULE, transports=["socket"], expected=expected
        ) as center:
            loop = Loop(center)
            loop.exchange(6)
            assert loop.found == []
            (transfer,) = sessions.of_worker(loop.worker).transfers
            assert transfer.seconds > 0.2
            assert 0.2 < transfer.round_trip < 2.0
    lines = [r.getMessage() for r in caplog.records if "round trip" in r.getMessage()]
    assert len(lines) == 1
    assert "worker 'anna' exchanges with" in lines[0]
    assert "by 'socket' over interface 'lo': 0.2 MB at " in lines[0]


def steps_are_not_recorded(thresholds):
    rule, of_center = shared.agn(shared.sgd(0.1)), Thresholds(still_center=None)
    center = agn_optax.LocalCenter(rule, PARAMS, thresholds=of_center)
    loop = Loop(center, thresholds=thresholds)
    for _ in range(8):  # the state does not pass through worker.tx
        loop.params, loop.state = loop.worker.exchange(loop.params, loop.state)
        jax.block_until_ready(loop.state)
    return loop.worker.notices


def steps_are_counted_three_times(thresholds):
    loop = Loop(agn_optax.LocalCenter(RULE, PARAMS), thresholds=thresholds)
    for _ in range(3):
        updates, loop.state = loop.worker.tx.update(ONES, loop.state, loop.params)
        loop.params, loop.state = loop.worker.exchange(
            optax.apply_updates(loop.params, updates), loop.state, steps=3
        )
        jax.block_until_ready(loop.state)
    return loop.worker.notices


def messages_travel(*transfers):
    def travel(thresholds):
        checks = ExchangeChecks("anna", RULE, thresholds)
        for transfer in transfers:
            checks.after_exchange([transfer])
        return checks.notices.current()

    return travel


def all_messages_are_dropped(thresholds):
    """The center drops them as too stale, and error feedback adds them up."""
    rule = shared.downpour(codec=codecs.error_feedback(codecs.cast("bfloat16")))
    center = agn_optax.LocalCenter(rule, PARAMS, mode=BoundedStaleness(0))
    loop, other = Loop(center, thresholds=thresholds), Loop(center, name="ben")
    for number in range(1, 11):
        other.exchange()
        loop.exchange()
        assert loop.worker.dropped == number
    return [n for n in loop.worker.notices if n.check != "lost_messages"]


USUAL = Transfer("center:1", "socket", "eth0", 10**6, 0.1)
LATE = USUAL._replace(seconds=2.0)
OTHERWISE = USUAL._replace(expected=ExpectedLink(transport="memory"))
# What provokes a notice, a threshold that is reached, and one that is not.
THRESHOLDS = {
    "unrecorded_steps": (steps_are_not_recorded, 3, 9),
    "miscounted_steps": (steps_are_counted_three_times, 2.9, 3.1),
    "slow_exchange": (messages_travel(USUAL, *[LATE] * 5), 19.9, 20.1),
    "other_link": (messages_travel(*[OTHERWISE] * 3), 3, 4),
    "residual": (all_messages_are_dropped, 4, 6),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_threshold_of_a_worker_can_be_changed(name, caplog):
    provoke, reached, beyond = THRESHOLDS[name]
    remedy = notices.CHECKS[name].remedy
    for changed in ({}, {name: reached}):
        found = provoke(Thresholds(**changed))
        assert [notice.check for notice in found] == [name]
        assert remedy in caplog.text
        caplog.clear()
    for threshold in (beyond, None, 0):
        assert provoke(Thresholds(**{name: threshold})) == []
        assert remedy not in caplog.text


def test_thresholds_of_another_type_are_an_error():
    center = agn_optax.LocalCenter(RULE, PARAMS)
    with pytest.raises(errors.InvalidTypeError, match="thresholds must be agn_optax"):
        agn_optax.Worker(center, shared.sgd(0.1), period=1, thresholds={"residual": 1})


def test_steps_that_reach_the_record_again_end_the_notice():
    rule = shared.agn(shared.sgd(0.1))
    with (
        service.serve(rule, PARAMS, address="127.0.0.1:0") as served,
        service.connect(served.address, rule) as center,
    ):
        loop = Loop(center)
        for _ in range(3):  # the state is not passed through worker.tx
            loop.params, loop.state = loop.worker.exchange(loop.params, loop.state)
        assert loop.found == ["unrecorded_steps"]
        assert list(at_center(served)) == ["unrecorded_steps"]
        loop.exchange(2)
        assert loop.found == []
        assert at_center(served) == {}


def test_text_of_a_worker_is_one_short_line_in_the_log_of_the_center(served, caplog):
    with service.connect(served.address, RULE) as center:
        session = center.join("anna")
        texts = {"residual": "a\nb\x1b[2J" + "c" * 1000, "unknown": "x", "apart": "y"}
        session.exchange(Submission(1, PARAMS, anchor_version=0, notices=texts))
        with service.Observer(served.address) as observer:
            found = observer.status()["notices"]
    (known,) = found  # none for a check of the center, or an unknown one
    assert known["text"].startswith("a b [2Jccc")
    assert len(known["text"]) == 500
