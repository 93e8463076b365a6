"""A center that runs, given what is nearly right by every way there is.

Others must be answered meanwhile, and afterwards nothing of it may be left.
"""

import array
import contextlib
import os
import socket
import threading
import time
from typing import NamedTuple

import grpc
import numpy as np
import sessions
from chaos import model
from chaos.processes import Held, Spares
from fuzz import mutate
from fuzz.parsers import RULE

from agn_optax import service
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import _memory, _socket
from agn_optax.service.wire import _trees
from agn_optax.service.wire._packets import Parcel, of_bytes

LEASE = 1.0  # seconds
SLOTS = 64
LIMIT = 20.0  # seconds that nobody waits for an answer
_READS = 0.02  # seconds that an enemy reads
_CALLS = ["Describe", "Alive", "Leave", "Status"]
_STREAMS = ["Exchange", "Exchange", "Initialize", "Pull"]


class Result(NamedTuple):
    """What came of it.

    Attributes:
      before, after: what the center held.
      answers: that a well-behaved worker got meanwhile.
      slowest: seconds that it waited for one.
    """

    before: Held
    after: Held
    answers: int
    slowest: float


def fuzz(seed, count, warm=200):
    """Sends ``count`` conversations, after some that warm the center up.

    Raises:
      AssertionError: the center is not what it was.
    """
    with Spares(workers=0, centers=0) as spares:
        center = spares.center()
        try:
            # Rounds would wait for those who never answer: that is what leases are for.
            at = center.serve(
                ["--rule=downpour", "--address=127.0.0.1:0", f"--lease={LEASE}"]
            )
            return _fuzz(center.pid, at["address"], seed, count, warm)
        finally:
            center.kill()


def _fuzz(pid, address, seed, count, warm):
    rng = mutate.generator(seed, "live")
    with (
        service.connect(address, RULE, timeout=LIMIT) as friend,
        service.connect(address, RULE, timeout=LIMIT) as other,
    ):
        friend.initialize(model.params(SLOTS), worker="friend")
        enemy = _Enemy(other._connection, rng)
        friendly = _Friend(friend)
        enemy.talk(warm)
        before = _settled(pid)
        enemy.talk(count)
        after = _settled(pid, before)
        friendly.stop()
        assert np.all(np.isfinite(np.asarray(friend.pull().params["w"])))
        return Result(before, after, friendly.answers, friendly.slowest)


class _Friend:
    """A worker that goes on exchanging, on a thread of its own."""

    def __init__(self, center):
        self.answers, self.slowest, self._failure = 0, 0.0, None
        self._center = center
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self):
        self._stopping.set()
        self._thread.join(2 * LIMIT)
        if self._failure is not None:
            raise AssertionError("others were not answered") from self._failure
        assert self.answers

    def _run(self):
        try:
            message, version = model.params(SLOTS), 0
            while not self._stopping.is_set():
                begin = time.monotonic()
                answer = sessions.exchange(
                    self._center, message, anchor_version=version, worker="friend"
                )
                assert answer.version > version
                version = answer.version
                self.answers += 1
                self.slowest = max(self.slowest, time.monotonic() - begin)
                self._stopping.wait(0.01)
        except Exception as error:
            self._failure = error


class _Enemy:
    """Says what is nearly right."""

    def __init__(self, connection, rng):
        self._connection, self._rng = connection, rng
        said = connection.describe()
        self._offers = {offer.transport: offer for offer in said.offers}
        self._schema = _trees.from_bytes(said.schema)
        self._leaves = said.schema
        self._channel = grpc.insecure_channel(connection.address)

    def talk(self, count):
        ways = [self._call, self._stream, self._direct, self._direct]
        for _ in range(count):
            # Who is refused, or finds it cut off, is not surprised.
            with contextlib.suppress(OSError, grpc.RpcError):
                self._rng.choice(ways)()

    def _conversation(self):
        """What a worker would say, in packets: some changed, away, or twice."""
        name = f"enemy {self._rng.randrange(20)}"
        join = pb.Join(
            protocol=_address.PROTOCOL,
            worker=name,
            incarnation=str(self._rng.randrange(3)),
        )
        tree = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._schema.leaves]
        said = [(pb.Frame(join=join), None)]
        for sequence in (1, 2):
            message = pb.Message(sequence=sequence, schema_hash=self._schema.hash)
            said.append((pb.Frame(message=message), tree))
            said.append((pb.Frame(acknowledge=sequence), None))
        segment = pb.Segment(number=1, size=self._rng.choice([4096, 1 << 40, 0]))
        said.append((pb.Frame(attach=segment), None))
        said.append((pb.Frame(message=message, segment=1, answer_segment=2), None))
        if self._rng.random() < 0.1:
            said.insert(0, (pb.Frame(parameters=pb.Parameters()), tree))
        packets = []
        if self._rng.random() < 0.1:
            leaves = mutate.mutated(self._rng, [self._leaves])
            start = pb.Start(protocol=_address.PROTOCOL, schema_size=len(leaves))
            start.schema_hash = self._rng.choice([self._schema.hash, b""])
            start.worker = self._rng.choice(["friend", name])
            described = [np.frombuffer(leaves, np.uint8)]
            parcel = Parcel(pb.Frame(start=start), of_bytes(len(leaves)), described)
            packets.append(b"".join(parcel.pieces()))
        for frame, arrays in said:
            schema = None if arrays is None else self._schema
            packets.append(b"".join(Parcel(frame, schema, arrays or []).pieces()))
        count = self._rng.randrange(1, len(packets) + 1)
        if self._rng.random() < 0.3:
            self._rng.shuffle(packets)
        chosen = packets[:count]
        if self._rng.random() < 0.8:
            at = self._rng.randrange(count)
            chosen[at] = mutate.mutated(self._rng, [chosen[at]])
        return chosen

    def _call(self):
        path = f"/{_address.SERVICE}/{self._rng.choice(_CALLS)}"
        sample = pb.LeaveRequest(worker="enemy 1", incarnation="1").SerializeToString()
        data = mutate.mutated(self._rng, [b"", b"\x08\x02", sample])
        self._channel.unary_unary(path)(data, timeout=LIMIT)

    def _stream(self):
        path = f"/{_address.SERVICE}/{self._rng.choice(_STREAMS)}"
        packets = self._conversation()
        call = self._channel.stream_stream(path)(iter(packets), timeout=LIMIT)
        if self._rng.random() < 0.5:
            time.sleep(_READS)
            call.cancel()
        else:
            for _ in call:
                pass

    def _direct(self):
        offer = self._rng.choice(list(self._offers.values()))
        if offer.transport == "memory":
            end = socket.socket(socket.AF_UNIX)
            where = "\0" + offer.address.removeprefix("unix:")
        else:
            end = socket.socket()
            where = ("127.0.0.1", int(offer.address.removeprefix(":")))
        with end:
            end.settimeout(_READS)
            end.connect(where)
            greeting = _socket.GREETING + offer.key
            if self._rng.random() < 0.1:
                greeting = mutate.mutated(self._rng, [greeting])
            end.sendall(greeting)
            for packet in self._conversation():
                if offer.transport == "memory" and self._rng.random() < 0.3:
                    self._send_file(end, packet)
                else:
                    end.sendall(packet)
            if self._rng.random() < 0.3:
                end.shutdown(socket.SHUT_WR)
            while end.recv(1 << 16):
                pass

    def _send_file(self, end, packet):
        """With a descriptor of what may be no segment, or of one that is not whole."""
        if self._rng.random() < 0.5:
            file, _ = _memory.create(self._rng.choice([4096, 1 << 16]))
        elif self._rng.random() < 0.5:
            file = os.memfd_create("fuzz")
        else:
            file = os.open(os.devnull, os.O_RDWR)
        try:
            count = self._rng.choice([1, 1, 1, 3])
            data = array.array("i", [file] * count)
            end.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)])
        finally:
            os.close(file)


def _settled(pid, before=None):
    """What a process holds when it has let go of what it lets go of."""
    end = time.monotonic() + LIMIT
    held = Held.by(pid)
    while time.monotonic() < end:
        time.sleep(0.2)
        last, held = held, Held.by(pid)
        if before is None and held[1:] == last[1:]:
            return held
        if before is not None and not held.is_more_than(before):
            return held
    assert before is None, f"the center held {before} before, and holds {held} now"
    return held
