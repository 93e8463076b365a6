"""Workers that join, leave, crash and come back: every message counts once.

Every message adds 1 to an element of its own, so the center shows exactly which
messages it has applied, and how often.
"""

import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import children, links, sessions, shared
from helpers.waiting import BUSY, wait_until

from agn_optax import errors, service
from agn_optax.center import Asynchronous, BoundedStaleness, Submission, Synchronous

PROGRAM = pathlib.Path(__file__).with_name("counting_worker.py")
WORKERS, MESSAGES = 12, 5
RULE = shared.downpour()
LIMIT = 60  # s, generous: no test should come near it


def crash(center):
    """End a connection as a kill of its process would: without leaving."""
    sessions.connection(center).stop()
    for session in sessions.of_center(center):
        session.disconnect()
    sessions.connection(center).close()


def lose_an_answer(center, *, after, dies):
    """Cut the connection of the next exchange, before or after its answer."""
    remote = sessions.remote(center)
    receive = remote.answer_in

    def lost(snapshot, link, sequence, schema):
        remote.answer_in = receive
        if after:
            receive(snapshot, link, sequence, schema)
        if dies:
            sessions.connection(center).stop()  # no retries
        link.cancel()
        raise errors.CenterUnreachableError("the test has cut it")

    remote.answer_in = lost


def members(server):
    return server.center.core.members()[1]


def wait_until_lost(server, name):
    """Wait until the server knows that a worker has no connection."""

    def lost():
        member = members(server).get(name)
        return member is None or not member.connected

    wait_until(lost)


class RestartingWorker:
    """One of many workers, over all of its sessions."""

    def __init__(self, server, number, seed, acts):
        self.name = f"w{number}"
        self.acknowledged, self.rejected, self.unsure = set(), set(), set()
        self.failure = None
        self._server = server
        self._elements = range(number * MESSAGES, (number + 1) * MESSAGES)
        self._rng = np.random.default_rng([seed, number])
        self._acts = acts
        self._center = None

    def run(self):
        try:
            self._join()
            for element in self._elements:
                getattr(self, self._rng.choice(self._acts))(element)
            self._leave()
        except BaseException as error:
            self.failure = error
        finally:
            if self._center is not None:
                self._center.close()

    def exchange(self, element):
        message = np.zeros(WORKERS * MESSAGES, np.float32)
        message[element] = 1
        answer = sessions.exchange(
            self._center, message, anchor_version=self._version, worker=self.name
        )
        (self.acknowledged if answer.applied else self.rejected).add(element)
        self._version = answer.version
        now = -np.asarray(answer.params)
        assert set(np.unique(now)) <= {0, 1}
        assert all(now[list(self.acknowledged)] == 1)
        assert not any(now[list(self.rejected)])

    def come_back(self, element):
        self._leave()
        self._join()
        self.exchange(element)

    def crash(self, element):
        self.exchange(element)
        crash(self._center)
        self._join()

    def crash_in_an_exchange(self, element):
        lose_an_answer(self._center, after=self._rng.random() < 0.5, dies=True)
        with pytest.raises(errors.CenterUnreachableError):
            self.exchange(element)
        self.unsure.add(element)
        crash(self._center)
        self._join()

    def reconnect(self, element):
        lose_an_answer(self._center, after=self._rng.random() < 0.5, dies=False)
        self.exchange(element)

    def _join(self):
        wait_until_lost(self._server, self.name)
        self._center = service.connect(self._server.address, RULE, timeout=LIMIT)
        sessions.join(self._center, self.name)
        self._version = self._center.pull().version

    def _leave(self):
        self._center.close()
        wait_until(lambda: self.name not in members(self._server))


def live(server, acts, seed=0):
    """Run all workers at once until they have ended."""
    workers = [RestartingWorker(server, n, seed, acts) for n in range(WORKERS)]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
    return workers


ACTS = ["exchange", "come_back", "crash", "crash_in_an_exchange", "reconnect"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "lease"),
    [
        (Asynchronous(), 10.0),
        (Asynchronous(), 0.0),
        (BoundedStaleness(rounds=2), 0.2),
        (Synchronous(), 0.2),
        (Synchronous(quorum=4, grace=0.02), 10.0),
        (Synchronous(quorum=4, grace=0.02, late="drop"), 0.0),
    ],
    ids=repr,
)
def test_each_message_counts_once_with_random_crashes(mode, lease):
    start = np.zeros(WORKERS * MESSAGES, np.float32)
    with service.serve(
        RULE, start, mode=mode, limits=service.Limits(lease=lease)
    ) as server:
        workers = live(server, ACTS)
        assert not members(server)
        end = server.center.pull()
    applied = set(np.flatnonzero(end.params))
    assert set(np.unique(end.params)) <= {-1, 0}
    acknowledged = set().union(*(each.acknowledged for each in workers))
    rejected = set().union(*(each.rejected for each in workers))
    unsure = set().union(*(each.unsure for each in workers))
    assert acknowledged <= applied <= acknowledged | unsure
    assert len(acknowledged) + len(rejected) + len(unsure) == WORKERS * MESSAGES
    assert acknowledged
    if isinstance(mode, Synchronous):
        assert 0 < end.version <= len(applied)
    else:
        assert end.version == len(applied)


def test_each_message_is_acknowledged_without_crashes():
    """Workers come back and reconnect, but do not crash."""
    start = np.zeros(WORKERS * MESSAGES, np.float32)
    with service.serve(RULE, start) as server:
        workers = live(server, ["exchange", "come_back", "reconnect"])
        end = server.center.pull()
    assert set().union(*(each.acknowledged for each in workers)) == set(
        range(len(start))
    )
    np.testing.assert_array_equal(end.params, -1)
    assert end.version == WORKERS * MESSAGES


@contextlib.contextmanager
def served(elements=8, **settings):
    start = np.zeros(elements, np.float32)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(service.serve(RULE, start, **settings))

        def connected():
            center = service.connect(server.address, RULE, timeout=LIMIT)
            return stack.enter_context(center)

        yield server, connected


def in_background(work, *args, **kwargs):
    """Call ``work`` in a thread; return a function that waits for its result."""
    done, outcome = threading.Event(), {}

    def run():
        try:
            outcome["value"] = work(*args, **kwargs)
        except Exception as error:
            outcome["error"] = error
        done.set()

    def result():
        assert done.wait(LIMIT), "it hangs"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    threading.Thread(target=run, daemon=True).start()
    return result


def send(center, worker, element, version=0):
    message = np.zeros(8, np.float32)
    message[element] = 1
    return sessions.exchange(center, message, anchor_version=version, worker=worker)


def is_soon(server, condition):
    """Return whether a condition holds within a second."""
    changed = server.center.core.atomically()
    with changed:
        return changed.wait_for(condition, 1.0)


def wait_until_it_waits(server, worker):
    wait_until(lambda: worker in server.center.core.members()[2])


def test_new_session_does_not_get_the_answer_of_an_earlier_one():
    """The new session counts its exchanges from 1 again."""
    limits = service.Limits(lease=60.0)
    with served(mode=Synchronous(), limits=limits) as (server, connected):
        anna, first = connected(), connected()
        sessions.join(anna, "anna")
        sessions.join(first, "bert")
        lost = in_background(send, first, "bert", 0)
        wait_until_it_waits(server, "bert")
        crash(first)
        with pytest.raises(errors.CenterError):
            lost()
        wait_until_lost(server, "bert")
        assert send(anna, "anna", 1).version == 1  # bert's counts: its lease runs
        second = connected()
        sessions.join(second, "bert")
        answer = in_background(send, second, "bert", 2, 1)
        wait_until_it_waits(server, "bert")
        assert send(anna, "anna", 3, 1).version == 2
        assert answer().version == 2
        np.testing.assert_array_equal(
            server.center.pull().params, [-1, -1, -1, -1, 0, 0, 0, 0]
        )


def test_repeated_exchange_learns_that_it_was_dropped():
    """Although its answer was discarded when the worker was given up."""
    mode = BoundedStaleness(versions=0)
    with served(mode=mode, limits=service.Limits(lease=0.0)) as (server, connected):
        anna, bert = connected(), connected()
        sessions.join(anna, "anna")
        session = sessions.join(bert, "bert")
        send(anna, "anna", 0)
        # The center gives bert up before bert comes back.
        lose_an_answer(bert, after=True, dies=False)
        again = session._open

        def open_late():
            wait_until(lambda: "bert" not in members(server))
            return again()

        session._open = open_late
        answer = send(bert, "bert", 1)
        assert not answer.applied
        assert server.center.version == 1


class CallContext:
    """The context of a call on the server, ended by hand."""

    def __init__(self):
        self._active, self._callbacks = True, []

    def is_active(self):
        return self._active

    def add_callback(self, callback):
        self._callbacks.append(callback)
        return self._active

    def cancel(self):
        self.cancelled = True

    def end(self):
        self._active = False
        for callback in self._callbacks:
            callback()


def joining(worker="anna"):
    join = service.center_pb2.Join(
        protocol=service.address.PROTOCOL, worker=worker, session_id="1"
    )
    return links.reader_of(links.as_bytes(service.center_pb2.Header(join=join)))


def exchange_by(server, call):
    servicer = sessions.servicer(server)
    return servicer.exchange(joining(), call, servicer.authenticator.caller(), "grpc")


def test_end_of_an_old_call_does_not_disconnect_its_successor():
    """The server learns of the old call's end while the worker reconnects."""
    with served() as (server, _):
        old, new = CallContext(), CallContext()
        first = exchange_by(server, old)
        next(first)
        ending = threading.Thread(target=old.end)
        join = server.center.core.join

        def join_meanwhile(*args, **kwargs):
            session = join(*args, **kwargs)
            ending.start()
            ending.join(0.2)  # it can continue only after this function returns
            return session

        server.center.core.join = join_meanwhile
        second = exchange_by(server, new)
        next(second)
        ending.join(LIMIT)
        assert members(server)["anna"].connected
        assert old.cancelled
        new.end()  # passed on to the center by a thread
        wait_until(lambda: not members(server)["anna"].connected)


def test_call_that_ended_before_its_start_disconnects_no_worker():
    with served() as (server, _):
        late, live = CallContext(), CallContext()
        late.end()
        next(exchange_by(server, live))
        assert list(exchange_by(server, late)) == []
        assert members(server)["anna"].connected


def test_retry_does_not_bring_back_a_worker_that_left():
    """Its exchange was being retried when it left."""
    with served(mode=Synchronous()) as (server, connected):
        center = connected()
        session = sessions.join(center, "anna")
        repeats, may_go_on = threading.Event(), threading.Event()
        send_it = session._send

        def repeated():
            if repeats.is_set():
                return send_it()
            repeats.set()
            may_go_on.wait()
            raise errors.CenterUnreachableError("the test has cut it")

        session._send = repeated
        sent = in_background(send, center, "anna", 0)
        assert repeats.wait(LIMIT)
        session.leave()
        may_go_on.set()
        with pytest.raises(errors.WorkerStateError, match=r"'anna' has left"):
            sent()
        assert not members(server)
        assert server.center.version == 0


@pytest.fixture
def workers():
    with children.processes(PROGRAM, 3) as made:
        yield made


@pytest.mark.parametrize(
    "transport", ["socket", pytest.param("grpc", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_memory_of_a_message_is_released_with_its_answer(transport):
    """Although JAX is not called again in the center's process."""
    with (
        children.processes(PROGRAM, 1) as (worker,),
        served(1 << 18) as (server, _),
    ):
        join = {"address": server.address, "worker": "anna", "transports": [transport]}
        worker.ask(do="join", **join)
        messages, free = [], 0
        buffers = sessions.servicer(server).buffers
        take = buffers.take

        def recorded(size):
            buffer = take(size)
            messages.append(weakref.ref(buffer))
            return buffer

        buffers.take = recorded
        gc.disable()
        try:
            for version in range(1, 5):
                worker.ask(do="exchange", element=version)
                assert server.center.version == version
                free += is_soon(server, lambda: messages[-1]() is None)
        finally:
            gc.enable()
        assert len(messages) == 4
        assert free >= 2  # JAX's own threads may be late
        worker.ask(do="leave")


@pytest.mark.slow
def test_round_counts_message_of_a_killed_process_within_its_lease(workers):
    """The others continue; a new process continues under the same name."""
    names = ["anna", "bert", "carl"]
    anna, bert, carl = workers

    def meet(process, name, element):
        process.send(do="exchange", element=element)
        wait_until_it_waits(server, name)

    def meet_at_last(process, element):
        process.send(do="exchange", element=element)

    def all_answer(processes, version, elements):
        for process in processes:
            answer = process.answer()
            assert answer["applied"]
            assert answer["version"] == version
            assert answer["sum"] == [float(e in elements) for e in range(8)]

    # With a long lease the worker may come back, so its message counts.
    with served(mode=Synchronous(), limits=service.Limits(lease=600.0)) as (server, _):
        for process, name in zip(workers, names, strict=True):
            process.ask(do="join", address=server.address, worker=name)
        meet(carl, "carl", 0)
        carl.kill()
        carl = children.Process(PROGRAM)
        workers.append(carl)
        wait_until_lost(server, "carl")
        meet(anna, "anna", 1)
        meet_at_last(bert, 2)
        all_answer([anna, bert], 1, {0, 1, 2})
        carl.ask(do="join", address=server.address, worker="carl")
        meet(carl, "carl", 3)
        meet(anna, "anna", 4)
        assert not carl.answers_already()
        meet_at_last(bert, 5)
        all_answer([anna, bert, carl], 2, set(range(6)))
        for process in (anna, bert, carl):
            process.ask(do="leave")
        assert not members(server)

    # Without a lease the worker is given up at once, and so is its message.
    with served(mode=Synchronous(), limits=service.Limits(lease=0.0)) as (server, _):
        for process, name in zip((anna, bert, carl), names, strict=True):
            process.ask(do="join", address=server.address, worker=name)
        meet(anna, "anna", 0)
        meet(carl, "carl", 1)
        carl.kill()
        wait_until(lambda: set(members(server)) == {"anna", "bert"})
        meet_at_last(bert, 2)
        all_answer([anna, bert], 1, {0, 2})


@pytest.mark.parametrize("transports", [["memory", "socket"], ["grpc"]])
def test_stopped_server_and_client_leave_no_threads(transports):
    before = {*threading.enumerate()}
    with served() as (server, _):
        center = service.connect(server.address, RULE, transports=transports)
        with center:
            center.join("anna")
            send(center, "anna", 0)
    for thread in {*threading.enumerate()} - before:
        if thread.name != "agn-optax watchdog":  # shared by all connections
            thread.join(LIMIT)
            assert not thread.is_alive(), thread


@pytest.mark.slow
@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="starts no threads at its end"
)
def test_failing_process_of_a_server_ends_with_connected_workers():
    """Without a call of `Server.stop`."""
    program = (
        "import numpy as np\n"
        "from agn_optax import rules, service\n"
        "rule = rules.downpour()\n"
        "server = service.serve(rule, np.zeros(8, np.float32))\n"
        "print(server.address, flush=True)\n"
        "input()\n"
        "raise RuntimeError('it fails')\n"
    )
    process = subprocess.Popen(  # noqa: S603 our own program
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        with service.connect(address, RULE, timeout=LIMIT) as center:
            center.join("anna")
            send(center, "anna", 0)
            stderr = process.communicate("\n", timeout=LIMIT)[1]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert stderr.endswith("RuntimeError: it fails\n")


def test_sessions_that_left_are_released():
    """A session also holds a contribution, which is as large as the model."""
    with served() as (_, connected):
        center = connected()
        session = center.join("anna")
        session.exchange(Submission(1, np.ones(8, np.float32), anchor_version=0))
        held = weakref.ref(session)
        session.leave()
        assert not center._sessions
        del session

        def is_forgotten():
            gc.collect()
            return held() is None

        wait_until(is_forgotten, limit=BUSY)  # a heartbeat in flight holds it


def test_leave_of_an_old_session_keeps_the_new_one():
    with served() as (_, connected):
        center = connected()
        first, second = center.join("anna"), center.join("anna")
        first.leave()
        assert list(sessions.of_center(center)) == [second]


def test_bytes_of_concurrent_exchanges_are_all_counted():
    """Also if threads switch between reading and writing a sum."""

    with served() as (server, connected):
        center = connected()
        exchanges, workers = 5, [center.join(f"worker {i}") for i in range(4)]
        total = sessions.servicer(server)._traffic.total

        class Slow(type(total)):
            def __getattribute__(self, name):
                found = super().__getattribute__(name)
                if name.startswith("bytes_"):
                    time.sleep(0.005)  # so that other threads run meanwhile
                return found

        total.__class__ = Slow

        def work(session):
            for sequence in range(1, 1 + exchanges):
                sent = np.ones(8, np.float32)
                session.exchange(
                    Submission(sequence, sent, anchor_version=sequence - 1)
                )

        threads = [threading.Thread(target=work, args=(each,)) for each in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        status = center.status()
        for name in ("bytes_received", "bytes_sent"):
            assert status[name] == sum(each[name] for each in status["workers"])
        assert status["bytes_received"] == len(workers) * exchanges * 8 * 4


def test_signs_of_life_continue_after_one_that_raises(monkeypatch, caplog):
    calls, again = [], threading.Event()

    def fails_once(name, *args, **kwargs):
        if name == "Alive":
            calls.append(name)
            if len(calls) == 1:
                raise RuntimeError("on purpose")
            again.set()
        return unary(name, *args, **kwargs)

    with served(limits=service.Limits(lease=1.0)) as (_, connected):
        center = connected()
        unary = sessions.connection(center).unary
        monkeypatch.setattr(sessions.connection(center), "unary", fails_once)
        center.join("anna")
        assert again.wait(LIMIT)
    assert "thread 'agn-optax heartbeat' failed, and goes on" in caplog.text


@pytest.mark.parametrize("transport", ["memory", "socket"])
def test_connections_are_accepted_after_one_that_raised(transport, monkeypatch, caplog):
    calls = []

    def fails_once(call, *args, **kwargs):
        if call.__name__ == "_serve" and not calls:
            calls.append(call)
            raise ValueError("on purpose")
        return submit(call, *args, **kwargs)

    with served() as (server, _):
        threads = sessions.listener(server, transport)._threads
        submit = threads.submit
        monkeypatch.setattr(threads, "submit", fails_once)
        for _ in range(2):  # the first one finds no transport
            with (
                contextlib.suppress(errors.CenterUnreachableError),
                service.connect(
                    server.address, RULE, timeout=5, transports=[transport]
                ) as center,
            ):
                send(center, "anna", 0)
        assert server.center.version
    assert "a direct connection is rejected: on purpose" in caplog.text
