"""Workers are witnesses: a center without what they have seen is refused by name."""

import contextlib
import logging
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import shared
from helpers.commands import ServerProcess
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, service
from agn_optax.center import Journal, LocalCenter, Submission
from agn_optax.center.durability._directory import Files

RULE = shared.downpour()
LIMIT = 60  # s, generous: no test should come near it
START = np.zeros(2, np.float32)
REFUSED = "does not contain what worker 'w' has seen: record"


def serve(directory, address, **journal):
    durability = Journal(directory, **journal)
    return service.serve(RULE, START, address=address, durability=durability)


def connect(address):
    return service.connect(address, RULE, timeout=LIMIT)


def make_worker(center, name="w"):
    return agn_optax.Worker(center, shared.sgd(1.0), period=1, name=name)


@pytest.fixture
def old_copy(tmp_path, unix_address):
    """Return a context of a worker whose center is replaced by an old copy."""

    @contextlib.contextmanager
    def replaced(transport="grpc", **journal):
        servers = [serve(tmp_path / "a", unix_address, **journal)]
        try:
            with service.connect(
                unix_address, RULE, timeout=LIMIT, transports=[transport]
            ) as center:
                worker = make_worker(center)
                params, state = worker.start()
                params, state = worker.exchange(params - 1, state)
                shutil.copytree(tmp_path / "a", tmp_path / "old")
                params, state = worker.exchange(params - 1, state)
                servers.pop().stop()
                servers.append(serve(tmp_path / "old", unix_address, **journal))
                yield center, worker, (params, state)
        finally:
            for server in servers:
                server.stop()

    return replaced


@pytest.mark.parametrize("transport", ["grpc", "socket", "memory"])
def test_old_copy_of_a_folder_is_refused_on_both_sides(transport, old_copy, caplog):
    with old_copy(transport) as (center, worker, (params, state)):
        token = worker.resume_token
        with pytest.raises(errors.OtherHistoryError, match=REFUSED):
            worker.exchange(params - 1, state)
        with pytest.raises(errors.OtherHistoryError, match="may be an old copy"):
            make_worker(center).start()  # a new session of the same connection
        again = connect(center.address)  # a process that restarts
        with again, pytest.raises(errors.OtherHistoryError, match=REFUSED):
            again.join("w", resume_token=token[0])
        with connect(center.address) as other:  # has seen nothing
            params, _ = make_worker(other, "other").start()
            np.testing.assert_array_equal(params, -1)
        logged = [r for r in caplog.records if REFUSED in r.getMessage()]
        assert logged
        assert all(record.levelno == logging.ERROR for record in logged)


def test_worker_of_a_checkpoint_is_refused_by_an_old_copy(old_copy, tmp_path):
    with old_copy() as (center, worker, loop):
        saved, token = worker.save(*loop), worker.resume_token
        with connect(center.address) as again:
            other = make_worker(again, "other")
            there = other.start()
            for _ in range(3):  # the old copy is now at a later version
                there = other.exchange(there[0] - 1, there[1])
            with pytest.raises(errors.OtherHistoryError, match=REFUSED):
                make_worker(again).restore(saved, resume_token=token)


@pytest.mark.parametrize("transport", ["grpc", "socket", "memory"])
def test_answer_has_the_witness_of_its_own_record(transport, tmp_path, unix_address):
    """Unless it is large, so that it is sent while its record is written."""
    own = []
    for size, folder in ((2, "small"), (1 << 18, "large")):
        durability = Journal(tmp_path / folder)
        start = np.zeros(size, np.float32)
        with (
            service.serve(
                RULE, start, address=unix_address, durability=durability
            ) as server,
            service.connect(
                unix_address, RULE, timeout=LIMIT, transports=[transport]
            ) as center,
        ):
            session = center.join("w")
            for sequence in (1, 2, 3):
                answer = session.exchange(Submission(sequence, start, sequence - 1))
                number = int(answer.witness.split(":")[1])
                own.append(number == sequence)  # record 0 is the join
                assert sequence - 1 <= number <= sequence
                assert server.center.core.witness.split(":")[1] == str(sequence)
    assert all(own[:3])


def test_restarted_center_without_loss_accepts_all_witnesses(tmp_path, unix_address):
    """Also those of records that are only on disk, or not any more."""
    for keep in (None, "hashes", "contributions"):
        folder, tokens = tmp_path / str(keep), []
        for _ in range(2):
            with contextlib.closing(
                LocalCenter(RULE, START, durability=Journal(folder, size=1, keep=keep))
            ) as center:
                session = center.core.join("w", None)
                for sequence in range(1, 6):
                    session.submit(Submission(sequence, jnp.ones(2), center.version))
                    session.wait_until_kept(session.answer(sequence))
                    tokens.append(session.resume_token[2])
                    session.acknowledge(sequence)
                wait_until(lambda: center.core.keeper.saved_version == center.version)
        with contextlib.closing(
            LocalCenter(RULE, durability=Journal(folder, keep=keep))
        ) as center:
            for witness in tokens:
                center.core.join("other", None, witnesses=[witness], replace=True)
            number = int(tokens[0].split(":")[1])
            changed = f"{center.center_id}:{number}:{'0' * 32}"
            if keep is None:  # the record was not kept, so nothing is known
                center.core.join("other", None, witnesses=[changed], replace=True)
            else:
                with pytest.raises(errors.OtherHistoryError, match="another record"):
                    center.core.join("other", None, witnesses=[changed], replace=True)


def test_two_centers_of_one_folder_are_told_apart(tmp_path):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve(tmp_path / "a", "127.0.0.1:0"))
        one = stack.enter_context(connect(first.address))
        worker = make_worker(one)
        loop = worker.start()
        loop = worker.exchange(loop[0] - 1, loop[1])
        before = worker.resume_token[0]
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        second = stack.enter_context(serve(tmp_path / "b", "127.0.0.1:0"))
        two = stack.enter_context(connect(second.address))
        two.join("w", resume_token=before)  # both have what it has seen
        other = make_worker(two, "other")
        there = other.start()
        for _ in range(3):
            loop = worker.exchange(loop[0] - 1, loop[1])
            there = other.exchange(there[0] - 1, there[1])
        with pytest.raises(errors.OtherHistoryError, match="has another record"):
            two.join("w", resume_token=worker.resume_token[0])
        with pytest.raises(errors.OtherHistoryError, match="'other' has seen"):
            one.join("other", resume_token=other.resume_token[0])
        loop = worker.exchange(loop[0] - 1, loop[1])


def test_center_with_a_new_id_says_so_and_accepts_new_sessions(tmp_path, unix_address):
    """Its history is known to have lost something, so workers start again."""
    with serve(tmp_path / "a", unix_address) as server:
        center = connect(unix_address)
        worker = make_worker(center)
        loop = worker.start()
        loop = worker.exchange(loop[0] - 1, loop[1])
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        loop = worker.exchange(loop[0] - 1, loop[1])
    (tmp_path / "b" / "lock").unlink()
    with serve(tmp_path / "b", unix_address), center:
        with pytest.raises(errors.WorkerStateError, match="not the one that worker"):
            worker.exchange(loop[0] - 1, loop[1])
        loop = worker.start()
        worker.exchange(loop[0] - 1, loop[1])
        assert worker.resume_token[0][2] != ""
        assert server.center.center_id not in worker.resume_token[0][2]


def test_each_shard_has_its_own_witness(tmp_path, unix_address):
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(serve(tmp_path / "a", "127.0.0.1:0"))
        b = serve(tmp_path / "b", unix_address)
        stack.callback(lambda: b.stop())
        addresses = [a.address, unix_address]
        center = stack.enter_context(service.connect(addresses, RULE, timeout=LIMIT))
        session = center.join("w")
        for version in range(3):
            session.exchange(
                Submission(version + 1, np.ones(4, np.float32), (version, version))
            )
            if not version:
                shutil.copytree(tmp_path / "b", tmp_path / "old")
        token = session.resume_token
        assert len({witness.split(":")[0] for *_, witness in token}) == 2
        b.stop()
        b = serve(tmp_path / "old", unix_address)
        again = stack.enter_context(service.connect(addresses, RULE, timeout=LIMIT))
        with pytest.raises(errors.OtherHistoryError, match=REFUSED):
            again.join("w", resume_token=token)


def test_center_without_a_journal_has_no_witness(unix_address):
    served = service.serve(RULE, START, address=unix_address)
    with served, connect(unix_address) as center:
        worker = make_worker(center)
        loop = worker.start()
        worker.exchange(loop[0] - 1, loop[1])
        assert worker.resume_token[0][2] == ""


def test_tokens_of_earlier_releases_are_accepted(tmp_path, unix_address):
    with serve(tmp_path, unix_address) as server, connect(unix_address) as center:
        session = center.join("w")
        short = session.resume_token[:2]
        session.disconnect()
        assert center.join("w", resume_token=short).session_id == short[1]
        local = server.center.join("local")
        assert server.center.join("local", resume_token=local.resume_token[:2])


@pytest.mark.parametrize("text", ["x", "1:2:3", f"{'a' * 32}:-1:{'b' * 32}"])
def test_text_that_is_no_witness_is_rejected(text, tmp_path):
    with contextlib.closing(
        LocalCenter(RULE, START, durability=Journal(tmp_path))
    ) as center:
        with pytest.raises(errors.InvalidArgumentError, match="a witness must be"):
            center.core.join("w", None, witnesses=[text])
        assert not center.workers


@pytest.mark.slow
def test_chain_of_a_killed_server_is_whole(tmp_path, unix_address):
    """SIGKILL in the middle of exchanges, three times; workers see nothing of it."""
    options = ["--journal-keep=contributions", "--journal-size=3000"]
    options.append(f"--journal={tmp_path}")
    with contextlib.ExitStack() as stack:
        served = ServerProcess(unix_address, *options)
        stack.callback(lambda: served.end(signal.SIGKILL))
        center = stack.enter_context(connect(unix_address))
        worker = make_worker(center)
        params, state = worker.start(START, chief=True)
        for _ in range(3):
            for _ in range(10):
                params, state = worker.exchange(params - 1, state)
            served.end(signal.SIGKILL)
            served.start()
        assert center.pull().version == 30
    files, parent, number, version = Files(tmp_path), None, 0, 0
    for segment in files.segments():
        assert segment.number == number
        for record in files.read_segment(segment):
            assert parent in (None, record.parent)
            parent, number = record.digest, number + 1
            if record.about["kind"] == "exchange":
                version += 1
                assert record.about["version"] == version
                assert len(record.arrays) == 1
    assert version == 30
    assert len(files.segments()) > 4
