"""Exchanges in pieces: processes of one worker, without `jax.distributed`."""

import contextlib
import dataclasses
import functools
import gc
import shutil
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import links, network, pieces, sessions, shared, tuning
from helpers.pieces import Pod, pod, random_shares, row_shares, together
from helpers.support import assert_identical, shares
from helpers.waiting import LIMIT, in_background, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from agn_optax import codecs, errors, service
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    MessageLimits,
    Region,
    Submission,
    Synchronous,
    uncovered,
)
from agn_optax.service import center_pb2 as pb
from agn_optax.service.server._exchanges import waiting_for
from agn_optax.service.wire import _pieces
from agn_optax.service.wire._frames import Frame

DOWNPOUR = shared.downpour()
TRANSPORTS = ["grpc", "socket", pytest.param("memory", marks=shares)]


def quantize():
    return codecs.quantize(8, block=16)


CODECS = {
    "identity": codecs.identity,
    "cast": lambda: codecs.cast("bfloat16"),
    "quantize": quantize,
    "top_k": lambda: codecs.top_k(3, block=16),
    "sign": codecs.sign,
    "feedback": lambda: codecs.error_feedback(quantize()),
    "two_way": lambda: codecs.two_way(codecs.error_feedback(codecs.sign()), "bfloat16"),
}
RULES = {
    "agn": lambda codec: shared.agn(shared.adam(0.05), codec=codec),
    "agn_window": lambda codec: shared.agn_window(codec=codec),
    "downpour": lambda codec: shared.downpour(codec=codec),
    "dynsgd": lambda codec: shared.dynsgd(codec=codec),
    "average": lambda codec: shared.average(codec=codec),
    "diloco": lambda codec: shared.diloco(shared.sgd(0.5, momentum=0.9), codec=codec),
    "easgd": lambda codec: shared.easgd(0.3, codec=codec),
}


@functools.cache
def rule_of(rule, codec):
    return RULES[rule](CODECS[codec]())


@functools.cache
def tree(number):
    """Return one of a few trees, so that examples share compiled programs."""
    rng = np.random.default_rng(number)

    def leaf(*shape, dtype="float32"):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return [
        {"w": leaf(5, 7), "b": leaf(7), "scale": leaf()},
        {"z": [leaf(4), (leaf(2, 3, 2), None)], "a": leaf(0, 3), "m": leaf(33)},
        {"wide": leaf(6, 4), "narrow": leaf(8, dtype="bfloat16")},
    ][number]


def like(params, seed):
    """Return a random tree like ``params``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params
    )


def decoded(worker, contribution):
    """Return what the center decodes: each process's pieces by themselves."""
    leaves, treedef = jax.tree.flatten(contribution)
    whole = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in leaves]
    for share in worker.shares:
        own = pieces.cut(contribution, share.owned)
        sent = worker.encoded(contribution, share)
        for region, piece in zip(
            share.owned, pieces.decoding(worker.rule.codec)(sent, own), strict=True
        ):
            whole[region.leaf][region.slices] = piece
    return jax.tree.unflatten(treedef, whole)


def assert_known_elements(found, expected):
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        known = ~np.isnan(one)
        other = np.asarray(other, np.float64)
        np.testing.assert_array_equal(one[known], other[known])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "codec", "transport"),
    [
        ("agn", "identity", "grpc"),
        ("agn_window", "cast", "socket"),
        ("downpour", "quantize", "grpc"),
        pytest.param("dynsgd", "top_k", "socket", marks=pytest.mark.slow),
        pytest.param("average", "sign", "grpc", marks=pytest.mark.slow),
        pytest.param("diloco", "feedback", "memory", marks=shares),
        ("easgd", "identity", "socket"),
        pytest.param("diloco", "two_way", "grpc", marks=pytest.mark.slow),
    ],
)
@settings(max_examples=2)
@given(
    number=st.integers(0, 2),
    processes=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_pieces_move_the_center_like_a_whole_message(
    rule, codec, transport, number, processes, seed
):
    params, rng = tree(number), np.random.default_rng(seed)
    made = rule_of(rule, codec)
    plain = rule_of(rule, "identity")
    is_sent_as_it_is = codec in ("identity", "cast")
    reference_rule = made if is_sent_as_it_is else plain
    with (
        service.serve(made, params) as server,
        service.serve(reference_rule, params) as reference,
        service.connect(reference.address, reference_rule) as whole_worker,
        pod(
            server.address,
            made,
            random_shares(params, processes, rng),
            transports=[transport],
        ) as worker,
    ):
        assert_known_elements(worker.whole(worker.pull()), params)
        version = 0
        for i in range(2):
            contribution = like(params, seed + i)
            sent = decoded(worker, contribution)
            if is_sent_as_it_is:
                codec_of = made.codec
                sent, _ = codec_of.encode(contribution, codec_of.init(contribution))
            expected = sessions.exchange(
                whole_worker, sent, anchor_version=version, worker="whole", steps=2
            )
            answers = worker.exchange(contribution, anchor_version=version, steps=2)
            version = expected.version
            for answer in answers:
                assert answer[1:4] == expected[1:4]
                np.testing.assert_allclose(answer.norm, expected.norm, rtol=1e-5)
            adopted = expected.params
            if not is_sent_as_it_is and made.codec.answers is not None:
                adopted = jax.tree.map(lambda x: x.astype(made.codec.answers), adopted)
            assert_known_elements(worker.whole(answers), adopted)
            assert_identical(server.center.pull(), reference.center.pull())


SHORT = 1.0  # s, timeout of a connection to a lively center
ZEROS = {"v": np.zeros((7, 3), np.float32), "w": np.zeros((9,), np.float32)}
ONES = jax.tree.map(np.ones_like, ZEROS)
THREE = functools.partial(row_shares, ZEROS, 3)


def assert_all(records, value):
    """Check that all elements of answers or snapshots have one value."""
    for record in records:
        for piece in record.params:
            np.testing.assert_array_equal(piece, np.full_like(piece, value))


@pytest.fixture
def impatient(lively, monkeypatch):
    """Have processes wait for a second only for others, and to reach the center."""
    tuning.set_session_patience(monkeypatch, SHORT)


def set_timeout(worker, seconds):
    """Set the timeout of all connections of a worker."""
    for center in worker.centers:
        for shard in getattr(center, "centers", [center]):
            sessions.connection(shard).timeout = seconds


def assert_errors(outcomes, kinds, match=None):
    """Check that each process got an error of these kinds."""
    for outcome in outcomes:
        with pytest.raises(kinds, match=match):
            pieces.results([outcome])


def ones_of(worker):
    return [worker.encoded(ONES, share) for share in worker.shares]


def cut(session):
    """Break the connection of a session, which opens another one when it needs it."""
    sessions.link(session).cancel()


def assert_one_more(server, worker, expected):
    """Check that another exchange of a worker moves the center by one."""
    answers = worker.exchange(ONES, anchor_version=0)
    assert_all(answers, -expected)
    assert all(answer.applied for answer in answers)
    assert server.center.version == expected
    np.testing.assert_array_equal(server.center.pull().params["w"], -float(expected))


def test_all_processes_get_one_version_while_others_move_the_center():
    """Each message moves each element by one, so an element shows its version."""
    params = {
        "large": np.zeros((600, 700), np.float32),
        "small": np.zeros(5, np.float32),
    }
    ones = jax.tree.map(np.ones_like, params)
    stopping = threading.Event()

    def move():
        count = 0
        while not stopping.is_set():
            sessions.exchange(other, ones, anchor_version=0, worker="other")
            count += 1
        return count

    with (
        service.serve(DOWNPOUR, params) as server,
        service.connect(server.address, DOWNPOUR) as other,
        pod(server.address, DOWNPOUR, row_shares(params, 3)) as worker,
    ):
        moving = in_background(move, "mover")
        for worker.done in range(1, 11):
            sent = [worker.encoded(ones, share) for share in worker.shares]
            answers = pieces.results(worker.attempt(sent))
            (version,) = {answer.version for answer in answers}
            assert_all(answers, -version)
            for session in worker.sessions:
                session.acknowledge(worker.done)
        stopping.set()
        others = moving.result(LIMIT)
        assert server.center.version == worker.done + others


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["identity", "quantize"])
def test_center_in_shards_gets_pieces_that_cross_its_parts(codec):
    """The first parameters come in pieces, too, and some leaves are cut to rows."""
    params = {"w": np.arange(60, dtype=np.float32).reshape(20, 3), "b": np.ones(4)}
    params = jax.tree.map(np.float32, params)
    rule = rule_of("downpour", codec)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(service.serve(rule)).address for _ in range(3)]
        made = random_shares(params, 2, np.random.default_rng(0))
        worker = stack.enter_context(Pod([addresses] * 2, rule, made))
        worker.join()
        worker.initialize(params)
        assert_known_elements(worker.whole(worker.pull()), params)
        contribution = like(params, 1)
        sent = decoded(worker, contribution)
        for version in range(2):
            answers = worker.exchange(contribution, anchor_version=(version,) * 3)
            params = jax.tree.map(lambda x, sent: x - sent, params, sent)
            assert_known_elements(worker.whole(answers), params)
            assert all(answer.version == (version + 1,) * 3 for answer in answers)


@pytest.mark.parametrize("codec", ["identity", "cast", "quantize"])
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
@pytest.mark.few(1)
def test_assembled_messages_are_replayed_from_the_journal(codec, sent, tmp_path):
    params, rule = tree(0), rule_of("diloco", codec)
    durability = Journal(tmp_path / "kept")
    with (
        service.serve(rule, params, durability=durability) as server,
        pod(
            server.address, rule, random_shares(params, 3, np.random.default_rng(1))
        ) as worker,
    ):
        for i in range(2):
            contribution = like(params, i)
            if codec == "identity":
                contribution = jax.tree.map(lambda x: x.astype(sent), contribution)
            worker.exchange(contribution, anchor_version=i)
        shutil.copytree(tmp_path / "kept", tmp_path / "copy")
        replayed = service.serve(rule, durability=Journal(tmp_path / "copy"))
        assert_identical(replayed.center.pull(), server.center.pull())
        replayed.stop()


STEPS = ["joined", "sent", "completed", "answered", "acknowledged"]


@pytest.mark.few(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("step", STEPS)
def test_lost_connection_moves_the_center_neither_early_nor_twice(step, transport):
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        pod(server.address, DOWNPOUR, THREE(), transports=[transport]) as worker,
    ):
        worker.done = 1
        first, victim, last = worker.sessions
        messages = worker.submissions(ones_of(worker))
        if step == "joined":
            cut(victim)
        first.submit(messages[0])
        victim.submit(messages[1])
        assembly = sessions.assembly(server, "pod")
        wait_until(lambda: assembly._arrived == {0, 1})
        if step == "sent":
            cut(victim)
        assert server.center.version == 0
        last.submit(messages[2])
        wait_until(lambda: server.center.version == 1)
        if step == "completed":
            cut(victim)
        answers = [first.collect(1), last.collect(1), victim.collect(1)]
        assert_all(answers, -1)
        if step == "answered":
            cut(victim)
        for session in worker.sessions:
            session.acknowledge(1)
        if step == "acknowledged":
            cut(victim)
        assert server.center.version == 1
        assert_one_more(server, worker, 2)


def test_connection_may_break_within_a_message_or_its_answer():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(service.serve(DOWNPOUR, ZEROS))
        nets = [stack.enter_context(network.Network(server)) for _ in range(3)]
        addresses = [net.address for net in nets]
        worker = stack.enter_context(Pod(addresses, DOWNPOUR, THREE())).join()
        for number, (direction, passing) in enumerate(
            [(d, n) for n in (0, 40, 90, 140) for d in ("there", "back")], start=1
        ):
            getattr(nets[number % 3], direction).left = passing
            assert_one_more(server, worker, number)


def restarted(server, folder):
    """Return a server that continues from another one's disk, at its address."""
    keeper = server.center.core.keeper
    wait_until(lambda: keeper.is_kept(keeper.recorded))
    shutil.copytree(folder / "a", folder / "b")
    server.stop()
    return service.serve(
        DOWNPOUR, address=server.address, durability=Journal(folder / "b")
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("step", STEPS[:-1])
def test_killed_center_has_applied_a_message_as_a_whole_or_not_at_all(
    step, tmp_path, monkeypatch
):
    tuning.set_session_patience(monkeypatch, 20.0)
    with contextlib.ExitStack() as stack:
        server = service.serve(DOWNPOUR, ZEROS, durability=Journal(tmp_path / "a"))
        stack.callback(lambda: server.stop())
        nets = [stack.enter_context(network.Network(server)) for _ in range(3)]
        addresses = [net.address for net in nets]
        worker = stack.enter_context(Pod(addresses, DOWNPOUR, THREE())).join()
        worker.done, pieces_sent = 1, ones_of(worker)
        messages = worker.submissions(pieces_sent)
        for net in nets[1:]:
            net.answering.clear()
        sending = {"joined": 0, "sent": 2}.get(step, 3)
        for session, message in zip(worker.sessions[:sending], messages, strict=False):
            session.submit(message)
        if step == "sent":
            wait_until(lambda: sessions.assembly(server, "pod")._arrived == {0, 1})
        if sending == 3:
            wait_until(lambda: server.center.version == 1)
        if step == "answered":
            assert_all([worker.sessions[0].collect(1)], -1)
        for net in nets:
            net.cut()
        server = restarted(server, tmp_path)
        assert server.center.version == int(sending == 3)
        with service.connect(server.address, DOWNPOUR) as other:
            sessions.exchange(other, ONES, anchor_version=0, worker="other")
        for net in nets:
            net.mend()
        answers = worker.repeat(pieces_sent)
        assert_all(answers, -2)
        assert server.center.version == 2
        assert_one_more(server, worker, 3)


def test_process_that_has_its_answer_need_not_join_a_restarted_center(
    tmp_path, monkeypatch
):
    """It waits for the others, and they must not wait for it."""
    tuning.set_session_patience(monkeypatch, 20.0)
    with contextlib.ExitStack() as stack:
        server = service.serve(DOWNPOUR, ZEROS, durability=Journal(tmp_path / "a"))
        stack.callback(lambda: server.stop())
        net = stack.enter_context(network.Network(server))
        addresses = [server.address, net.address]
        made = row_shares(ZEROS, 2)
        worker = stack.enter_context(Pod(addresses, DOWNPOUR, made, timeout=20)).join()
        worker.done, sent = 1, ones_of(worker)
        net.answering.clear()
        for session, message in zip(
            worker.sessions, worker.submissions(sent), strict=True
        ):
            session.submit(message)
        assert_all([worker.sessions[0].collect(1)], -1)
        net.cut()
        server = restarted(server, tmp_path)
        net.mend()
        assert_all([worker.sessions[1].collect(1)], -1)
        assert_one_more(server, worker, 2)


@pytest.mark.usefixtures("impatient")
def test_shard_that_one_process_cannot_reach_applies_the_message_later(monkeypatch):
    """The other shard has applied its part, and does so once."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(service.serve(DOWNPOUR)) for _ in range(2)]
        net = stack.enter_context(network.Network(servers[1]))
        one, other = (server.address for server in servers)
        places, made = [[one, other], [one, net.address]], row_shares(ZEROS, 2)
        worker = stack.enter_context(Pod(places, DOWNPOUR, made))
        worker.join()
        worker.initialize(ZEROS)
        assert_all(worker.pull(), 0)
        net.cut()
        set_timeout(worker, SHORT)
        worker.done, sent = 1, ones_of(worker)
        versions = {"anchor_version": (0, 0)}
        outcomes = worker.attempt(sent, **versions)
        assert_errors(outcomes, errors.CenterError)
        assert [server.center.version for server in servers] == [1, 0]
        net.mend()
        set_timeout(worker, LIMIT)
        tuning.set_session_patience(monkeypatch, LIMIT)
        answers = pieces.results(worker.attempt(sent, 1, **versions))
        assert_all(answers, -1)
        assert [server.center.version for server in servers] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(3))
def test_each_message_counts_once_with_random_cuts(transport, seed):
    """Every message moves all elements by one, so an element counts the messages."""

    def live(worker, rng):
        for _ in range(20):
            cutting = in_background(functools.partial(cut_some, worker, rng), "cuts")
            answers = worker.exchange(ONES, anchor_version=0)
            cutting.result(LIMIT)
            assert_all(answers, -answers[0].version)

    def cut_some(worker, rng):
        for _ in range(rng.integers(3)):
            time.sleep(rng.exponential(0.003))  # anywhere in the exchange
            cut(worker.sessions[rng.integers(3)])

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(service.serve(DOWNPOUR, ZEROS))
        workers = [
            stack.enter_context(
                pod(server.address, DOWNPOUR, THREE(), name=n, transports=[transport])
            )
            for n in "ab"
        ]
        rngs = np.random.default_rng(seed).spawn(2)
        lives = [
            functools.partial(live, *each) for each in zip(workers, rngs, strict=True)
        ]
        pieces.results(together(lives))
        assert server.center.version == 40
        np.testing.assert_array_equal(server.center.pull().params["w"], -40.0)


# Sessions that end.

LEAVING = "not registered|was replaced|joined|not sent|has left"


def submit_first(server, worker, count):
    """Let some processes send their pieces of the first exchange."""
    worker.done = 1
    messages = worker.submissions(ones_of(worker))
    for session, message in list(zip(worker.sessions, messages, strict=True))[:count]:
        session.submit(message)
    assembly = sessions.assembly(server, worker.name)
    wait_until(lambda: assembly._arrived == set(range(count)))
    return assembly


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("end", ["leaves", "is lost", "is replaced"])
def test_incomplete_message_ends_with_its_session(end):
    limits = service.Limits(lease=0.3)
    with (
        service.serve(DOWNPOUR, ZEROS, limits=limits) as server,
        pod(server.address, DOWNPOUR, THREE()) as worker,
        Pod([server.address] * 3, DOWNPOUR, THREE()) as successor,
    ):
        set_timeout(worker, SHORT)
        assembly = submit_first(server, worker, 2)
        assert assembly._whole is not None
        collecting = [
            in_background(lambda s=session: s.collect(1), "a process")
            for session in worker.sessions[:2]
        ]
        if end == "leaves":
            worker.sessions[2].leave()
        if end == "is replaced":
            with pytest.raises(errors.NameTakenError):
                successor.join()
            assert assembly._whole is not None
        if end in ("is lost", "is replaced"):
            sessions.connection(worker.centers[2]).stop()
            cut(worker.sessions[2])
            wait_until(lambda: not server.center.core.members()[1]["pod"].connected)
        if end == "is replaced":
            successor.join()
        for future in collecting:
            with pytest.raises(errors.AgnOptaxError, match=LEAVING):
                future.result(LIMIT)
        assert assembly._whole is None
        assert server.center.version == 0
        if end != "is replaced":
            for session in worker.sessions:
                session.leave()
            successor.join()
        assert_one_more(server, successor, 1)


@pytest.mark.usefixtures("impatient")
def test_session_whose_lease_ended_unnoticed_is_continued(monkeypatch):
    """Its message was dropped, and is sent again."""
    ahead = [0.0]
    tuning.set_center_clock(monkeypatch, lambda: time.monotonic() + ahead[0])
    mode, limits = Synchronous(), service.Limits(lease=20.0)
    with (
        service.serve(DOWNPOUR, ZEROS, mode=mode, limits=limits) as server,
        pod(server.address, DOWNPOUR, row_shares(ZEROS, 2)) as worker,
    ):
        other = server.center.core.join("other")
        assembly = submit_first(server, worker, 2)
        wait_until(lambda: assembly._is_submitted)
        for session in worker.sessions:
            cut(session)
        member = server.center.core.ledger.registered()["pod"]
        wait_until(lambda: not member.connected)
        wait_until(lambda: not sessions.servicer(server).exchanges.running)
        ahead[0] = 30.0
        collecting = [
            in_background(lambda s=session: s.collect(1), "a process")
            for session in worker.sessions
        ]
        wait_until(lambda: sessions.assembly(server, "pod") is not assembly)
        wait_until(lambda: sessions.assembly(server, "pod")._is_submitted)
        other.submit(Submission(1, ONES, anchor_version=0))
        assert_all([future.result(LIMIT) for future in collecting], -2)
        other.leave()


@pytest.mark.usefixtures("impatient")
def test_process_that_joins_again_and_sends_nothing_is_missed():
    """Its connection broke within its message, so its pieces had begun to arrive."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(service.serve(DOWNPOUR, ZEROS))
        nets = [stack.enter_context(network.Network(server)) for _ in range(2)]
        addresses = [net.address for net in nets]
        worker = Pod(addresses, DOWNPOUR, row_shares(ZEROS, 2))
        stack.enter_context(worker).join()
        set_timeout(worker, SHORT)
        assembly = submit_first(server, worker, 1)
        frozen, link = worker.sessions[1], sessions.link(worker.sessions[1])
        nets[1].there.left = 100
        frozen.submit(worker.submissions(ones_of(worker))[1])
        wait_until(link.is_done)
        frozen.join(LIMIT)
        wait_until(lambda: 1 not in assembly._arriving)
        with pytest.raises(errors.CenterError, match=r"processes \[1\]"):
            worker.sessions[0].collect(1)


# Bad input.

BOXES = {
    "a gap": ("no process owns 1 of 9 elements", [(1, (0,), (4,)), (1, (5,), (4,))]),
    "an overlap": ("two processes own", [(1, (0,), (5,)), (1, (4,), (5,))]),
    "an overlap and a gap": (
        "two processes own",
        [(1, (0,), (5,)), (1, (4,), (3,)), (1, (8,), (1,))],
    ),
    "beyond a leaf": ("no region of", [(1, (0,), (4,)), (1, (4,), (6,))]),
    "another shape": ("no region of", [(1, (0, 0), (9, 1))]),
    "another leaf": ("no leaf 7", [(1, (0,), (9,)), (7, (0,), (1,))]),
}


@pytest.mark.parametrize("problem", BOXES)
def test_shares_that_are_no_division_of_the_leaves_are_rejected(problem):
    match, regions = BOXES[problem]
    owned = [[Region(0, (0, 0), (7, 3))], [Region(*box) for box in regions]]
    owned[0].append(owned[1].pop(0))
    eight_leaves = [np.zeros(1, np.float32)] * 8  # so that a share may name leaf 7
    to_bytes = _pieces.to_bytes
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        service.connect(server.address, DOWNPOUR) as other,
        Pod(
            [server.address] * 2, DOWNPOUR, pieces.shares_of(ZEROS, owned, owned)
        ) as worker,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(
            _pieces,
            "to_bytes",
            lambda share: to_bytes(dataclasses.replace(share, like=eight_leaves)),
        )
        worker.join()
        for session in worker.sessions:  # the message of a client that checks nothing
            header = pb.Header(message=pb.Message(sequence=1))
            session._in_flight = 1, Frame(header)
        assert_errors(
            together([functools.partial(s.collect, 1) for s in worker.sessions]),
            errors.InvalidArgumentError,
            match,
        )
        assert server.center.version == 0
        sessions.exchange(other, ONES, anchor_version=0, worker="other")


DIFFERENT = {
    "steps": {"steps": 2},
    "weight": {"weight": 3.0},
    "anchor_version": {"anchor_version": 1},
    "sequence": {"sequence": 3},
}


@pytest.mark.parametrize("field", DIFFERENT)
@pytest.mark.usefixtures("impatient")
def test_processes_that_disagree_about_an_exchange_all_get_an_error(field):
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        pod(server.address, DOWNPOUR, row_shares(ZEROS, 2)) as worker,
    ):
        assert_one_more(server, worker, 1)
        if field == "sequence":  # each waits for the other
            set_timeout(worker, SHORT)
        worker.done = 2
        one, two = worker.submissions(ones_of(worker))
        first, second = worker.sessions
        calls = (first, one), (second, two._replace(**DIFFERENT[field]))
        outcomes = together([functools.partial(pieces.answer, *call) for call in calls])
        match = None if field == "sequence" else field
        assert_errors(outcomes, errors.AgnOptaxError, match)
        assert server.center.version == 1
        if field != "sequence":
            assert_all(pieces.results(worker.attempt(ones_of(worker), 1)), -2)


def test_processes_that_send_different_dtypes_get_an_error():
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        pod(server.address, DOWNPOUR, THREE()) as worker,
    ):
        worker.done, sent = 1, ones_of(worker)
        sent[1] = [jnp.asarray(piece, "bfloat16") for piece in sent[1]]
        outcomes = worker.attempt(sent)
        assert_errors(outcomes, errors.InvalidArgumentError, "dtypes are")
        sent = [[jnp.asarray(piece, "bfloat16") for piece in own] for own in sent]
        assert_all(pieces.results(worker.attempt(sent, 1)), -1)


def test_process_that_owns_nothing_does_not_widen_a_narrow_message():
    """Others send bfloat16, and its message has no dtype."""
    everything = [Region(0, (0, 0), (7, 3)), Region(1, (0,), (9,))]
    made = pieces.shares_of(ZEROS, [[], everything], [everything, everything])
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        pod(server.address, DOWNPOUR, made) as worker,
    ):
        narrow = jax.tree.map(lambda x: jnp.asarray(x, "bfloat16"), ONES)
        worker.done, sent = 1, [[], worker.encoded(narrow, made[1])]
        seen, session = [], server.center.core.join("unused")
        submit = type(session).submit
        session.leave()

        def watched(session, submission):
            seen.append(
                {x.dtype.name for x in jax.tree.leaves(submission.contribution)}
            )
            return submit(session, submission)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(session), "submit", watched)
            assert_all(pieces.results(worker.attempt(sent)), -1)
        assert seen == [{"bfloat16"}]


@pytest.mark.usefixtures("impatient")
def test_process_cannot_join_again_with_other_regions():
    """Elements that nobody owned would be sent to the center uninitialized."""
    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        pod(server.address, DOWNPOUR, row_shares(ZEROS, 2)) as worker,
    ):
        assert_one_more(server, worker, 1)
        set_timeout(worker, SHORT)
        victim = worker.sessions[1]
        victim._share = worker.shares[1] = dataclasses.replace(
            worker.shares[1], owned=worker.shares[1].owned[:1]
        )
        victim._piece_schemas = None
        cut(victim)
        worker.done = 2
        outcomes = worker.attempt(ones_of(worker))
        assert_errors(outcomes, errors.AgnOptaxError, "other regions|not sent")
        assert server.center.version == 1


OTHERS = {
    "rule": lambda share: (shared.average(), "pod", share),
    "name": lambda share: (DOWNPOUR, "tod", share),
    "group": lambda share: (DOWNPOUR, "pod", dataclasses.replace(share, group="other")),
    "number of processes": lambda share: (
        DOWNPOUR,
        "pod",
        dataclasses.replace(share, processes=3),
    ),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", OTHERS)
def test_process_with_another_rule_name_or_number_hangs_nobody(what):
    one, other = row_shares(ZEROS, 2)
    rule, name, other = OTHERS[what](other)
    token = ["", "session"]

    def join(rule, name, share):
        with service.connect(server.address, rule, timeout=SHORT) as center:
            center.join(name, pieces.Pieces(share, ()), resume_token=token)

    with (
        service.serve(DOWNPOUR, ZEROS) as server,
        service.connect(server.address, DOWNPOUR) as friend,
    ):
        outcomes = together(
            [
                functools.partial(join, DOWNPOUR, "pod", one),
                functools.partial(join, rule, name, other),
            ]
        )
        kinds = errors.CenterError, errors.RuleMismatchError, errors.WorkerStateError
        assert_errors(outcomes, kinds)
        sessions.exchange(friend, ONES, anchor_version=0, worker="friend")


@pytest.mark.parametrize("other", [np.zeros(9, np.float16), np.zeros(8, np.float32)])
def test_chief_whose_processes_have_different_parameters_is_rejected(other):
    first, second = row_shares(ZEROS, 2)
    with (
        service.serve(DOWNPOUR) as server,
        service.connect(server.address, DOWNPOUR) as one,
        service.connect(server.address, DOWNPOUR) as two,
    ):
        one.initialize(pieces.Pieces(first, pieces.cut(ZEROS, first.owned)), worker="w")
        params = {**ZEROS, "w": other}
        (_, second) = row_shares(params, 2)
        second = dataclasses.replace(second, group=first.group)
        with pytest.raises(errors.InvalidArgumentError, match="disagree"):
            two.initialize(
                pieces.Pieces(second, pieces.cut(params, second.owned)), worker="w"
            )
        assert sessions.servicer(server)._first_parameters.is_empty
        assert not server.center.core.is_initialized


def test_second_chief_of_several_processes_waits_for_the_first():
    with (
        service.serve(DOWNPOUR) as server,
        Pod([server.address] * 2, DOWNPOUR, row_shares(ZEROS, 2), "first") as first,
        Pod([server.address] * 2, DOWNPOUR, row_shares(ZEROS, 2), "other") as other,
    ):
        one, two = first.shares

        def initialize(share, center):
            arrays = pieces.cut(ZEROS, share.owned)
            center.initialize(pieces.Pieces(share, arrays), worker="first")

        initialize(one, first.centers[0])
        late = in_background(lambda: other.initialize(ONES), "the other chief")
        with pytest.raises(TimeoutError):
            late.result(0.3)
        initialize(two, first.centers[1])
        with pytest.raises(errors.AlreadyInitializedError):
            late.result(LIMIT)
        np.testing.assert_array_equal(server.center.pull().params["w"], 0.0)


def test_pieces_of_a_chief_that_failed_are_released():
    first, _ = row_shares(ZEROS, 2)
    with (
        service.serve(DOWNPOUR) as server,
        service.connect(server.address, DOWNPOUR) as center,
    ):
        arrays = pieces.cut(ZEROS, first.owned)
        center.initialize(pieces.Pieces(first, arrays), worker="dead")
        assert not sessions.servicer(server)._first_parameters.is_empty
        center.initialize(ONES, worker="alive")
        assert sessions.servicer(server)._first_parameters.is_empty


def test_waiting_frame_for_many_processes_can_be_read():
    data = b"".join(waiting_for(list(range(1 << 16))).pieces())
    assert links.reader_of(data).read_header().waiting.missing


@given(data=st.binary(max_size=300), at=st.integers(0, 300), is_prefix=st.booleans())
def test_malformed_share_is_a_protocol_error(data, at, is_prefix):
    sent = _pieces.to_bytes(THREE()[0]).tobytes()
    sent = data if is_prefix else sent[:at] + data + sent[at + len(data) :]
    with contextlib.suppress(errors.ProtocolError):
        share = _pieces.from_bytes(sent)
        assert 0 <= share.process < share.processes
        assert all(len(r.start) == len(r.shape) for r in (*share.owned, *share.wanted))


@pytest.mark.slow
def test_share_with_too_many_regions_is_rejected_before_they_take_memory():
    many = b"\0" * (_pieces._MAX_REGIONS + 1)  # as many regions without dimensions
    share = pb.Share(group="g", processes=1, owned=many)
    with pytest.raises(errors.ProtocolError, match="at most"):
        _pieces.from_bytes(share.SerializeToString())


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), dimensions=st.integers(0, 3), moves=st.booleans())
def test_division_of_a_leaf_is_recognized(seed, dimensions, moves):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(0, 6, dimensions))
    regions = [Region(0, *box) for box in pieces.boxes(shape, rng, 8)]
    if moves and dimensions:
        index = rng.integers(len(regions))
        start = [int(rng.integers(n + 1)) for n in shape]
        size = [int(rng.integers(n - a + 1)) for a, n in zip(start, shape, strict=True)]
        regions[index] = Region(0, tuple(start), tuple(size))
    counts = np.zeros(shape, int)
    for region in regions:
        counts[region.slices] += 1
    assert bool(uncovered(regions, [shape])) == bool((counts != 1).any())


def test_many_regions_are_checked_quickly():
    regions = [Region(0, (i,), (1,)) for i in range(30_000)]
    begin = time.process_time()
    assert not uncovered(regions, [(30_000,)])
    assert time.process_time() - begin < 5.0


# Modes and limits.


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_connection_of_a_process_is_released_when_it_ends(transport):
    """Segments of killed processes would fill the memory until a garbage collection."""
    gc.disable()
    try:
        with (
            service.serve(DOWNPOUR, ZEROS) as server,
            pod(server.address, DOWNPOUR, THREE(), transports=[transport]) as worker,
        ):
            assert_one_more(server, worker, 1)
            known = sessions.listener(server, transport)._connections
            ends = [weakref.ref(connection) for connection in known.values()]
            assert len(ends) == 3
            for session in worker.sessions:
                session.disconnect()
            wait_until(lambda: all(end() is None for end in ends))
    finally:
        gc.enable()


def test_synchronous_round_of_two_workers_in_pieces_and_a_plain_one():
    with (
        service.serve(DOWNPOUR, ZEROS, mode=Synchronous(), barrier=3) as server,
        service.connect(server.address, DOWNPOUR) as plain,
        Pod([server.address] * 2, DOWNPOUR, row_shares(ZEROS, 2), "two") as two,
        Pod([server.address] * 3, DOWNPOUR, THREE(), "three") as three,
    ):
        joins = [two.join, three.join, lambda: sessions.join(plain, "plain")]
        pieces.results(together(joins))
        for number in (1, 2):
            anchor = {"anchor_version": number - 1}
            calls = [
                functools.partial(two.exchange, ONES, **anchor),
                functools.partial(three.exchange, ONES, **anchor),
                functools.partial(
                    sessions.exchange, plain, ONES, worker="plain", **anchor
                ),
            ]
            outcomes = together(calls)
            *answers, alone = pieces.results(outcomes)
            assert_all([*answers[0], *answers[1]], -3 * number)
            np.testing.assert_array_equal(alone.params["w"], -3.0 * number)
            assert server.center.version == number


def test_exchange_that_one_process_begins_anew_is_repeated_by_all_and_counts_once():
    """Its message is whole, and waits for the other messages of its round."""
    with (
        service.serve(DOWNPOUR, ZEROS, mode=Synchronous(), barrier=2) as server,
        service.connect(server.address, DOWNPOUR) as plain,
        Pod([server.address] * 2, DOWNPOUR, row_shares(ZEROS, 2), "two") as two,
    ):
        pieces.results(together([two.join, lambda: sessions.join(plain, "plain")]))
        encoded, two.done = [two.encoded(ONES, share) for share in two.shares], 1
        first, other = two.sessions
        default = first.while_missing

        def give_up(missing):
            raise errors.CenterError("given up")

        first.while_missing = give_up
        attempts = [two.submissions(encoded, number) for number in range(3)]
        with pytest.raises(errors.CenterError, match="given up"):
            pieces.answer(first, attempts[0][0])
        late = in_background(lambda: pieces.answer(other, attempts[0][1]), "late")
        wait_until(lambda: "two" in server.center.core.ledger.pending)
        with pytest.raises(errors.CenterError, match="given up"):
            pieces.answer(first, attempts[1][0])
        error = late.exception(LIMIT)
        assert type(error) is errors.CenterError  # its message may be applied
        assert "begun exchange 1 anew" in str(error)
        first.while_missing = default
        both = in_background(lambda: two.attempt(encoded, 2), "both")
        alone = sessions.exchange(plain, ONES, worker="plain", anchor_version=0)
        assert_all(pieces.results(both.result(LIMIT)), -2)
        assert alone.version == server.center.version == 1


def test_late_message_is_dropped_for_all_processes():
    mode = BoundedStaleness(versions=1)
    with (
        service.serve(DOWNPOUR, ZEROS, mode=mode) as server,
        service.connect(server.address, DOWNPOUR) as plain,
        pod(server.address, DOWNPOUR, THREE()) as worker,
    ):
        for version in range(3):
            sessions.exchange(plain, ONES, anchor_version=version, worker="plain")
        answers = worker.exchange(ONES, anchor_version=0)
        assert not any(answer.applied for answer in answers)
        assert_all(answers, -3)


def test_rejected_message_and_last_error_reach_all_processes():
    limits = service.Limits(messages=MessageLimits(norm=100.0, in_a_row=2))
    with (
        service.serve(DOWNPOUR, ZEROS, limits=limits) as server,
        pod(server.address, DOWNPOUR, THREE()) as worker,
    ):
        for nonsense in (np.nan, 1e6):
            worker.done, bad = worker.done + 1, ones_of(worker)
            bad[1] = [piece * np.float32(nonsense) for piece in bad[1]]
            outcomes = worker.attempt(bad)
            if worker.done == 1:
                answers = pieces.results(outcomes)
                assert len({answer.rejected for answer in answers}) == 1
                assert all(answer.rejected for answer in answers)
        assert_errors(outcomes, errors.MessageRejectedError, "in a row")
        assert server.center.version == 0
        assert_all(pieces.results(worker.attempt(ones_of(worker), 1)), -1)
