"""Servers that are killed: every acknowledged step counts once after the restart."""

import contextlib
import pathlib
import shutil
import signal
import threading

import numpy as np
import pytest
from helpers import children, sessions, shared, tuning
from helpers.commands import ServerProcess
from helpers.support import SHARES_MEMORY
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, service
from agn_optax.center import Journal

PROGRAM = pathlib.Path(__file__).with_name("durable_worker.py")
RULE = shared.downpour()
WORKERS, PROCESSES = 6, 2
LIMIT = 60  # s, generous: no test should come near it


@pytest.mark.slow
def test_every_step_counts_once_through_kill_and_drain(tmp_path, unix_address):
    """SIGKILL, then SIGTERM, while workers in other processes keep training."""
    address, directory = unix_address, tmp_path / "kept"
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(children.processes(PROGRAM, PROCESSES))
        # A journal so small that snapshots are written during the test.
        served = ServerProcess(address, f"--journal={directory}", "--journal-size=1000")
        stack.callback(lambda: served.end(signal.SIGKILL))
        center = stack.enter_context(service.connect(address, RULE, timeout=LIMIT))
        start = np.zeros(WORKERS, np.float32)
        center.initialize(start, worker="chief")
        elements = np.arange(WORKERS).reshape(PROCESSES, -1).tolist()
        for process, own in zip(workers, elements, strict=True):
            process.ask(
                do="start",
                address=address,
                names=[f"w{element}" for element in own],
                elements=own,
            )
        for signum in (signal.SIGKILL, signal.SIGTERM):
            before = center.pull().version
            wait_until(lambda n=before: center.pull().version >= n + 5 * WORKERS)
            seen = center.pull()
            code = served.end(signum)
            assert code == (0 if signum == signal.SIGTERM else -signum)
            if signum == signal.SIGTERM:  # nothing is left to be replayed
                names = {each.name.split("-")[0] for each in directory.iterdir()}
                assert "snapshot" in names
                kept = shutil.copytree(directory, tmp_path / "copy")
                for each in kept.glob("journal-*"):
                    each.unlink()
                whole = agn_optax.LocalCenter(RULE, durability=Journal(kept))
                assert whole.version >= seen.version
                whole.close()
            served.start()
            again = center.pull()
            assert again.version >= seen.version
            assert np.all(np.asarray(again.params) <= np.asarray(seen.params))
        results = [process.ask(do="stop") for process in workers]
        assert not any(each["failures"] for each in results)
        steps_by_element = {
            name: n for each in results for name, n in each["steps"].items()
        }
        end = center.pull()
        expected = [steps_by_element[f"w{element}"] for element in range(WORKERS)]
        np.testing.assert_array_equal(-np.asarray(end.params), expected)


@pytest.fixture
def killed(tmp_path, unix_address):
    """A context that serves, with a function that restarts as after a SIGKILL.

    The function copies the files of the running server, as a kill would leave them,
    stops that server, and serves from the copy at the same address.
    """
    address = unix_address

    @contextlib.contextmanager
    def serve():
        servers = [
            service.serve(
                RULE,
                np.zeros(2, np.float32),
                address=address,
                durability=Journal(tmp_path / "a"),
            )
        ]

        def kill(*, loses_lock=False):
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            if loses_lock:
                (tmp_path / "b" / "lock").unlink()
            servers.pop().stop()
            again = service.serve(
                RULE, address=address, durability=Journal(tmp_path / "b")
            )
            servers.append(again)
            return again

        try:
            with service.connect(address, RULE, timeout=LIMIT) as center:
                yield center, kill
        finally:
            for server in servers:
                server.stop()

    return serve


def test_worker_continues_at_a_killed_center_with_a_journal(killed):
    with killed() as (center, kill):
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="w")
        params, state = worker.start()
        params, state = worker.exchange(params - 1, state)
        server = kill()
        assert server.center.version == 1
        params, state = worker.exchange(params - 1, state)
        np.testing.assert_array_equal(params, -2)
        assert server.center.core.members()[1]["w"].exchanges == 2


def test_killed_shard_with_a_journal_continues(killed):
    with killed() as (one, kill), service.serve(RULE) as other:
        servers = [one.address, other.address]
        with service.connect(servers, RULE, timeout=LIMIT) as center:
            # The first shard has its part already: two of four elements.
            other.center.initialize(np.zeros(2, np.float32), worker="")
            center.join("w")
            for version in (1, 2):
                answer = sessions.exchange(
                    center,
                    np.ones(4, np.float32),
                    anchor_version=(version - 1, version - 1),
                    worker="w",
                )
                assert answer.version == (version, version)
                np.testing.assert_array_equal(answer.params, -version)
                if version == 1:
                    server = kill()
            assert server.center.version == other.center.version == 2


def test_worker_gets_an_error_at_a_center_with_a_new_id(killed):
    with killed() as (center, kill):
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="w")
        params, state = worker.start()
        params, state = worker.exchange(params - 1, state)
        server = kill(loses_lock=True)
        assert server.center.version == 1
        with pytest.raises(errors.WorkerStateError, match="not the one that worker"):
            worker.exchange(params - 1, state)
        params, state = worker.start()
        params, state = worker.exchange(params - 1, state)
        np.testing.assert_array_equal(params, -2)


def test_no_answer_or_pull_before_the_journal_is_on_disk(tmp_path, monkeypatch):
    """While a sync of the journal is blocked, exchange and pull both wait."""
    may, syncing = threading.Event(), threading.Event()

    def slow(file, sync):
        syncing.set()
        assert may.wait(LIMIT)
        sync(file)

    with (
        service.serve(
            RULE, np.zeros(2, np.float32), durability=Journal(tmp_path / "a")
        ) as server,
        service.connect(server.address, RULE) as center,
    ):
        sessions.join(center, "w")
        tuning.set_journal_sync(monkeypatch, slow)
        received = {}

        def exchange():
            message = np.ones(2, np.float32)
            answer = sessions.exchange(center, message, anchor_version=0, worker="w")
            received["answer"] = answer.version

        def pull():
            received["pull"] = center.pull().version

        exchanging = threading.Thread(target=exchange)
        exchanging.start()
        assert syncing.wait(LIMIT)
        wait_until(lambda: server.center.version == 1)
        pulling = threading.Thread(target=pull)
        pulling.start()
        pulling.join(0.2)
        assert not received
        may.set()
        exchanging.join(LIMIT)
        pulling.join(LIMIT)
        assert received == {"answer": 1, "pull": 1}


def test_exchange_raises_same_error_over_all_transports_if_journal_failed(
    tmp_path, monkeypatch
):
    tuning.set_call_patience(monkeypatch, 0.5)
    tuning.set_session_patience(monkeypatch, 0.5)
    transports = ["memory"] * SHARES_MEMORY + ["socket", "grpc"]
    raised = {}

    def exchange(transport, worker, params, state):
        try:
            worker.exchange(params, state)
        except errors.AgnOptaxError as error:
            raised[transport] = error

    with contextlib.ExitStack() as stack:
        durability = Journal(tmp_path / "a")
        server = stack.enter_context(
            service.serve(RULE, np.zeros(2, np.float32), durability=durability)
        )
        ready = []
        for transport in transports:
            center = stack.enter_context(
                service.connect(
                    server.address, RULE, timeout=5.0, transports=[transport]
                )
            )
            worker = agn_optax.Worker(
                center, shared.sgd(1.0), period=1, patience=0, give_up=6.0
            )
            params, state = worker.exchange(*worker.start())
            ready.append((transport, worker, params, state))
        shutil.rmtree(tmp_path / "a")
        threads = [
            threading.Thread(target=exchange, args=each, daemon=True) for each in ready
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert set(raised) == set(transports)
        assert {type(error) for error in raised.values()} == {
            errors.CenterUnreachableError
        }
        for error in raised.values():
            assert str(error).endswith(server.center.core.failure)
        # All other calls raise, too.
        for ask in (center.pull, lambda: center.join("another")):
            with pytest.raises(
                errors.CenterUnreachableError, match="no longer be saved"
            ):
                ask()


def test_join_at_a_barrier_raises_if_the_journal_failed(tmp_path):
    center = agn_optax.LocalCenter(
        RULE, np.zeros(2, np.float32), barrier=2, durability=Journal(tmp_path / "a")
    )
    raised = []

    def join():
        try:
            center.join("w")
        except errors.CenterClosedError as error:
            raised.append(str(error))

    joining = threading.Thread(target=join, daemon=True)
    shutil.rmtree(tmp_path / "a")
    joining.start()
    joining.join(10.0)
    assert raised == [center.core.failure]
    center.close()


def test_wait_for_parameters_of_a_closed_center_raises():
    center = agn_optax.LocalCenter(RULE)
    center.close("it goes down")
    with pytest.raises(errors.CenterClosedError, match="it goes down"):
        center.wait()


def test_failed_server_releases_its_directory(tmp_path):
    kept = Journal(tmp_path / "a")
    with (
        service.serve(RULE) as other,
        pytest.raises(errors.InvalidArgumentError, match="cannot listen"),
    ):
        service.serve(RULE, address=other.address, durability=kept)
    service.serve(RULE, durability=kept).stop()
