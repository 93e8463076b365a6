"""Fuzzing of a live center with mutated conversations over every transport.

A well-behaved worker must be answered meanwhile, and afterwards the center must hold no
more memory, threads or files than before.
"""

import array
import contextlib
import fcntl
import os
import pathlib
import secrets
import socket
import ssl
import tempfile
import threading
import time
from typing import NamedTuple

import grpc
import jax
import numpy as np
from chaos import model
from chaos.processes import ProcessPool, Resources
from fuzz import mutate
from helpers import certificates, links, pieces, sessions

from agn_optax import service
from agn_optax.service import address as addresses
from agn_optax.service import center_pb2 as pb
from agn_optax.service import sockets
from agn_optax.service.wire import _pieces

LEASE = 1.0  # seconds
SLOTS = 64
LIMIT = 20.0  # s, timeout for an answer
_READS = 0.02  # s, timeout of the enemy's reads
_CALLS = ["Describe", "Alive", "Leave", "Status"]
_STREAMS = ["Exchange", "Exchange", "Initialize", "Pull"]


class Kind(NamedTuple):
    """A kind of center.

    Attributes:
      codec: name of the rule's codec, see `chaos.model.CODECS`.
      options: options of its command, besides the rule.
      secure: whether it uses TLS and tokens.
    """

    codec: str = "none"
    options: tuple[str, ...] = ()
    secure: bool = False


KINDS = {
    "plain": Kind(),
    "top_k": Kind("top_k", ("--reject-norm=1000", "--reject-weight=10")),
    "chained": Kind("chained", ("--mode=bounded", "--max-versions-behind=3")),
    "secure": Kind(secure=True),
}


class Result(NamedTuple):
    """The result of fuzzing.

    Attributes:
      before, after: memory, threads and files of the center.
      answers: number of answers that a well-behaved worker got meanwhile.
      slowest: its longest wait for an answer, in seconds.
    """

    before: Resources
    after: Resources
    answers: int
    slowest: float


def fuzz(seed, count, warm=200, kind="plain"):
    """Send ``count`` conversations, after ``warm`` others that warm the center up.

    Raises:
      AssertionError: the center holds more than before, or did not answer others.
    """
    kind, own = KINDS[kind], {}
    with (
        ProcessPool(workers=0, centers=0) as spares,
        tempfile.TemporaryDirectory(prefix="agn-optax-fuzz-") as folder,
    ):
        # A short lease, so that rounds do not wait for workers that never answer.
        options = [*kind.options, "--address=127.0.0.1:0", f"--lease={LEASE}"]
        if kind.secure:
            more, own = _secured(pathlib.Path(folder))
            options += more
        center = spares.center()
        try:
            at = center.serve(
                [*model.rule_options("downpour", kind.codec, False), *options]
            )
            rule = model.rule("downpour", kind.codec)
            return _fuzz(center.pid, at["address"], rule, own, seed, count, warm)
        finally:
            center.kill()


def _secured(folder):
    """Return options of a center with TLS and tokens, and settings of its clients."""
    certificate, key = certificates.make(folder)
    token, tokens = secrets.token_hex(16), folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"chief,operator * {token}\n")
    options = [f"--tls-certificate={certificate}", f"--tls-key={key}"]
    own = {"tls": service.Tls(certificate), "token": token}
    return [*options, f"--tokens={tokens}"], own


def _fuzz(pid, address, rule, own, seed, count, warm):
    rng = mutate.generator(seed, "live")
    with (
        service.connect(address, rule, timeout=LIMIT, **own) as friend,
        service.connect(address, rule, timeout=LIMIT, **own) as other,
    ):
        friend.initialize(model.params(SLOTS), worker="friend")
        enemy = _MutatingClient(other, rng, **own)
        friendly = _GoodWorker(friend)
        enemy.send(warm)
        before = _settled(pid)
        enemy.send(count)
        after = _settled(pid, before)
        friendly.stop()
        assert np.all(np.isfinite(model.table(friend.pull().params)))
        return Result(before, after, friendly.answers, friendly.slowest)


class _GoodWorker:
    """A well-behaved worker that keeps exchanging in a separate thread."""

    def __init__(self, center):
        self.answers, self.slowest, self._failure = 0, 0.0, None
        self._center, codec = center, center.rule.codec
        encode = jax.jit(lambda tree: codec.encode(tree, codec.init(tree))[0])
        self._message = encode(model.params(SLOTS))
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
            message, version = self._message, 0
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


class _MutatingClient:
    """A client that sends mutated messages."""

    def __init__(self, center, rng, tls=None, token=None):
        self._rng, self._tls, self._token = rng, tls, token
        connection = sessions.connection(center)
        description = connection.describe()
        self._offers = {offer.transport: offer for offer in description.offers}
        travels = sessions.remote(center).known_schemas()
        self._whole, self._schema = travels.center, travels.message
        self._leaves = description.schema
        # Shares of two processes, and of one that is a worker by itself.
        made = [*pieces.row_shares(model.params(SLOTS), 2)]
        made += pieces.row_shares(model.params(SLOTS), 1)
        self._shares = [_pieces.to_bytes(share).tobytes() for share in made]
        self._piece_schemas = [
            _pieces.piece_schemas(center.rule, self._whole, share).schemas.message
            for share in map(_pieces.in_schema_order, made)
        ]
        if tls is None:
            self._channel = grpc.insecure_channel(connection.address)
        else:
            trusted = tls.client_credentials()
            self._channel = grpc.secure_channel(connection.address, trusted)

    def send(self, count):
        kinds = [self._call, self._stream, self._direct, self._direct]
        for _ in range(count):
            # Rejected calls and closed connections are expected.
            with contextlib.suppress(OSError, grpc.RpcError):
                self._rng.choice(kinds)()

    def _conversation(self):
        """Return the frames of a worker, some of them changed, missing or moved."""
        name = f"enemy {self._rng.randrange(20)}"
        join = pb.Join(
            protocol=addresses.PROTOCOL,
            worker=name,
            session_id=str(self._rng.randrange(3)),
        )
        first, schema = self._joining(join)
        frames = [first]
        for sequence in (1, 2):
            message = pb.Message(
                sequence=sequence,
                schema_hash=schema.hash,
                attempt=self._rng.choice([0, 0, 1]),
                steps=self._rng.choice([0, 1, 1 << 63]),
                weight=self._rng.choice([1.0, -1.0, 1e300, float("nan")]),
                anchor_version=self._rng.choice([0, 1, 1 << 40]),
            )
            frame = pb.Header(message=message)
            frames.append(links.as_bytes(frame, schema, self._tree(schema)))
            frames.append(links.as_bytes(pb.Header(acknowledge=sequence)))
        segment = pb.Segment(number=1, size=self._rng.choice([4096, 1 << 40, 0]))
        frames.append(links.as_bytes(pb.Header(attach=segment)))
        lent = pb.Header(message=message, segment=1, answer_segment=2)
        frames.append(links.as_bytes(lent))
        if self._rng.random() < 0.1:
            zeros = [np.zeros(each.shape, each.dtype) for each in self._whole.leaves]
            frame = pb.Header(parameters=pb.Parameters())
            frames.insert(0, links.as_bytes(frame, self._whole, zeros))
        if self._rng.random() < 0.1:
            leaves = mutate.mutated(self._rng, [self._leaves])
            start = pb.Start(protocol=addresses.PROTOCOL, schema_size=len(leaves))
            start.schema_hash = self._rng.choice([self._whole.hash, b""])
            start.worker = self._rng.choice(["friend", name])
            frames.insert(0, links.around(pb.Header(start=start), leaves))
        count = self._rng.randrange(1, len(frames) + 1)
        if self._rng.random() < 0.3:
            self._rng.shuffle(frames)
        chosen = frames[:count]
        if self._rng.random() < 0.8:
            at = self._rng.randrange(count)
            chosen[at] = mutate.mutated(self._rng, [chosen[at]])
        return chosen

    def _joining(self, join):
        """Return the first frame of a worker, and the schema of its messages.

        The worker may be one of several processes.
        """
        if self._rng.random() < 0.5:
            return links.as_bytes(pb.Header(join=join)), self._schema
        index = self._rng.randrange(len(self._shares))
        data = self._shares[index]
        if self._rng.random() < 0.3:
            data = mutate.mutated(self._rng, [data])
        join.share_size = len(data)
        frame = links.around(pb.Header(join=join), data)
        return frame, self._piece_schemas[index]

    def _tree(self, schema):
        """Return the leaves of a contribution: zeros, or random bytes."""
        if self._rng.random() < 0.5:
            return [np.zeros(leaf.shape, leaf.dtype) for leaf in schema.leaves]
        return [
            np.frombuffer(self._rng.randbytes(leaf.nbytes), leaf.dtype).reshape(
                leaf.shape
            )
            for leaf in schema.leaves
        ]

    def _metadata(self):
        """Return metadata with the right token or a mutated one; or None."""
        token = self._token
        if token is None or self._rng.random() < 0.2:
            return None
        if self._rng.random() < 0.2:
            token = mutate.mutated(self._rng, [token.encode()]).hex()
        return [("authorization", f"Bearer {token}")]

    def _call(self):
        path = f"/{addresses.SERVICE}/{self._rng.choice(_CALLS)}"
        sample = pb.LeaveRequest(worker="enemy 1", session_id="1").SerializeToString()
        data = mutate.mutated(self._rng, [b"", b"\x08\x02", sample])
        call = self._channel.unary_unary(path)
        call(data, timeout=LIMIT, metadata=self._metadata())

    def _stream(self):
        path = f"/{addresses.SERVICE}/{self._rng.choice(_STREAMS)}"
        frames = self._conversation()
        call = self._channel.stream_stream(path)(
            iter(frames), timeout=LIMIT, metadata=self._metadata()
        )
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
        with contextlib.ExitStack() as closing:
            closing.enter_context(end)
            end.settimeout(_READS)
            end.connect(where)
            if self._tls is not None and self._rng.random() < 0.7:
                end.settimeout(LIMIT)  # for the handshake
                context = self._tls.context(serves=False)
                end = context.wrap_socket(end, server_hostname="127.0.0.1")
                closing.enter_context(end)
                end.settimeout(_READS)
            greeting = sockets.GREETING + offer.key
            if self._rng.random() < 0.1:
                greeting = mutate.mutated(self._rng, [greeting])
            end.sendall(greeting)
            for frame_bytes in self._conversation():
                plain = not isinstance(end, ssl.SSLSocket)
                if offer.transport == "memory" and plain and self._rng.random() < 0.3:
                    self._send_file(end, frame_bytes)
                else:
                    end.sendall(frame_bytes)
            if self._rng.random() < 0.3:
                end.shutdown(socket.SHUT_WR)
            while end.recv(1 << 16):
                pass

    def _send_file(self, end, frame_bytes):
        """Send a frame with a descriptor of another file or of an invalid segment."""
        if self._rng.random() < 0.5:
            file = _segment(self._rng.choice([4096, 1 << 16]))
        elif self._rng.random() < 0.5:
            file = os.memfd_create("fuzz")
        else:
            file = os.open(os.devnull, os.O_RDWR)
        try:
            count = self._rng.choice([1, 1, 1, 3])
            data = array.array("i", [file] * count)
            end.sendmsg([frame_bytes], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)])
        finally:
            os.close(file)


def _segment(size):
    """Return the descriptor of memory that a worker may share with a center."""
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _settled(pid, before=None):
    """Return what a process holds once it has released its resources.

    Without ``before``, wait until threads and files no longer change; with it, until
    the process holds no more than before.
    """
    end = time.monotonic() + LIMIT
    held = Resources.by(pid)
    while time.monotonic() < end:
        time.sleep(0.2)  # only time can show that nothing changes any more
        last, held = held, Resources.by(pid)
        if before is None and held[1:] == last[1:]:
            return held
        if before is not None and not held.is_more_than(before):
            return held
    assert before is None, f"the center held {before} before, and holds {held} now"
    return held
