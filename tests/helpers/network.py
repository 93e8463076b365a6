"""A network that can fail: TCP proxies between workers and their center."""

import contextlib
import dataclasses
import queue
import socket
import threading
import time

from agn_optax.service.center_pb2 import Offer
from helpers import sessions

TRANSPORTS = ["grpc", "socket"]
_TICK = 0.02  # s, between two pieces of a slowed transfer
_TURN = 0.002  # s, of a connection on a link that several share
_MIN_PIECE = 4096  # bytes


class Proxy:
    """Forward TCP connections and simulate network faults.

    Args:
      bandwidth: bytes per second that all connections share in each direction.
      records: whether data from clients is kept, so that it can be replayed.

    Attributes:
      there, back: the two directions, which can be held, slowed down, or cut.
    """

    def __init__(self, bandwidth=None, records=False):
        self.there, self.back = Direction(bandwidth), Direction(bandwidth)
        self._lock = threading.Lock()
        self._pairs, self._stranded = [], set()
        self._listeners, self._threads = [], []
        self._records = records
        self._open = True

    def forward(self, target, at=("127.0.0.1", 0)):
        """Listen, and return the port."""
        listener = socket.create_server(at)
        self._listeners.append(listener)
        self._begin(self._accept, listener, target)
        return listener.getsockname()[1]

    def cut(self):
        """Break all connections and accept no new ones."""
        self._open = False
        self.cut_once()

    def cut_once(self):
        """Break all connections; new ones are accepted."""
        with self._lock:
            for pair in self._pairs:
                _shut(*pair.ends)

    def strand(self, *, there=True, back=True):
        """Drop all data on the current connections forever; new connections work."""
        with self._lock:
            for pair in self._pairs:
                client, server = pair.ends
                self._stranded.update([client] * there + [server] * back)

    def close_half(self, *, there):
        """Shut down one direction of each connection; one end sees the end of data."""
        self.strand(there=there, back=not there)
        with self._lock:
            for pair in self._pairs:
                with contextlib.suppress(OSError):
                    pair.ends[there].shutdown(socket.SHUT_WR)

    def replay(self, seconds=1.0):
        """Send again, over new connections, what clients sent on current ones."""
        with self._lock:
            known = [pair for pair in self._pairs if pair.sent is not None]
            recorded = [(pair.target, bytes(pair.sent)) for pair in known]
        for target, data in recorded:
            self._begin(self._resend, target, data, seconds)

    def forget(self):
        """Delete recorded data, so that it is not replayed."""
        with self._lock:
            for pair in self._pairs:
                pair.sent = None

    def mend(self):
        self._open = True
        for direction in (self.there, self.back):
            direction.mend()

    def close(self):
        self.cut()
        for direction in (self.there, self.back):
            direction.mend()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        for listener in self._listeners:
            listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _begin(self, call, *args):
        thread = threading.Thread(target=call, args=args)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _accept(self, listener, target):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(target)
            except OSError:  # the client sees a closed connection
                client.close()
                continue
            for end in (client, server):  # so that only configured delays apply
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair((client, server), target, bytearray())
            with self._lock:
                is_open = self._open
                if is_open:
                    self._pairs.append(pair)
            if not is_open:
                client.close()
                server.close()
                continue
            self._begin(self._forward, pair, client, server, self.there)
            self._begin(self._forward, pair, server, client, self.back)

    def _forward(self, pair, source, sink, direction):
        arriving = iter(lambda: source.recv(1 << 16), b"")
        with contextlib.suppress(OSError):
            for data in direction.carry(arriving):
                if self._records and direction is self.there and pair.sent is not None:
                    pair.sent += data
                direction.gate.wait()
                if source not in self._stranded:
                    direction.send(sink, data)
        _shut(source, sink)
        with self._lock:
            pair.ended += 1
            if pair.ended == 2:
                self._pairs.remove(pair)
                for end in pair.ends:
                    self._stranded.discard(end)
                    end.close()

    def _resend(self, target, data, seconds):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(target, seconds) as end,
        ):
            end.sendall(data)
            stop = time.monotonic() + seconds
            while time.monotonic() < stop and end.recv(1 << 16):
                pass


class Network(Proxy):
    """A proxy between the workers of a server in this process and the server.

    With "socket" for ``transport``, exchanges go through it on direct connections. With
    ``bandwidth``, in bytes per second, it is slow: all connections share it in each
    direction.
    """

    def __init__(self, server, transport="grpc", bandwidth=None):
        super().__init__(bandwidth)
        self.answering = self.back.gate
        host, _, port = server.address.rpartition(":")
        self.address = f"127.0.0.1:{self.forward((host, int(port)))}"
        known = sessions.servicer(server)
        offers = [offer for offer in known.offers if offer.transport == transport]
        known.offers = []
        for offer in offers:
            port = self.forward((host, int(offer.address.removeprefix(":"))))
            known.offers.append(Offer(transport=transport, address=f":{port}"))


@dataclasses.dataclass(eq=False)
class _Pair:
    """A connection: its client's end and its server's end."""

    ends: tuple
    target: tuple
    sent: bytearray | None  # data sent by the client
    ended: int = 0  # number of directions that have ended


class Direction:
    """One direction of all connections of a proxy.

    Attributes:
      gate: while it is cleared, data is held but not lost.
      delay: seconds that each piece takes.
      rate: bytes per second of each connection; None for no limit.
      left: bytes that still pass before a connection is cut, or before data is held;
        None for no limit.
    """

    def __init__(self, bandwidth=None):
        self.gate = threading.Event()
        self._link = None if bandwidth is None else _Link(bandwidth)
        self.mend()

    def mend(self):
        self.delay, self.rate, self.left = 0.0, None, None
        self._holds = False
        self.gate.set()

    def hold_after(self, size):
        """Hold data, which is not lost, once as many bytes have passed."""
        self._holds, self.left = True, size

    def is_holding(self):
        """Return whether data is held."""
        return not self.gate.is_set()

    def carry(self, arriving):
        return arriving if self._link is None else self._link.carry(arriving)

    def send(self, sink, data):
        if self.delay:
            time.sleep(self.delay)
        left = self.left
        if left is not None:
            self.left = None if len(data) > left else left - len(data)
            if len(data) > left:
                sink.sendall(data[:left])
                if not self._holds:
                    raise ConnectionAbortedError
                data = data[left:]
                self.gate.clear()
                self.gate.wait()
        view = memoryview(data)
        due = time.monotonic()
        while view:
            rate = self.rate
            size = len(view) if rate is None else max(1, int(rate * _TICK))
            sink.sendall(view[:size])
            view = view[size:]
            if rate is not None:
                due += _TICK  # a late wake-up shortens the next sleep
                time.sleep(max(0.0, due - time.monotonic()))


def _shut(*ends):
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Link:
    """One direction of a slow network, which its connections share, piece by piece."""

    def __init__(self, bandwidth):
        self._bandwidth = bandwidth
        self._size = max(_MIN_PIECE, int(bandwidth * _TURN))
        self._lock = threading.Lock()
        self._free = 0.0  # time when all pieces so far have passed

    def carry(self, arriving):
        """Yield arriving data in pieces, each once it has passed.

        A piece gets its turn only when the connection's last piece has passed, so that
        connections with much data share the link equally. Its turn may have been in the
        past, if it had arrived by then: so the link has its nominal speed however late
        a busy machine wakes this thread. A separate thread notes when data arrives.
        """
        arrived = queue.SimpleQueue()
        taking = threading.Thread(target=self._take, args=(arriving, arrived))
        taking.start()
        for at, data in iter(arrived.get, None):
            for begin in range(0, len(data), self._size):
                piece = data[begin : begin + self._size]
                with self._lock:
                    turn = max(self._free, at)
                    through = self._free = turn + len(piece) / self._bandwidth
                time.sleep(max(0.0, through - time.monotonic()))
                yield piece
        taking.join()

    def _take(self, arriving, arrived):
        with contextlib.suppress(OSError):
            for data in arriving:
                arrived.put((time.monotonic(), data))
        arrived.put(None)


@contextlib.contextmanager
def answered_by(answer):
    """Yield an address; ``answer`` gets each connection in a new thread."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                threads.append(threading.Thread(target=answer, args=(near,)))
                threads[-1].start()

    threads = [threading.Thread(target=serve)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads[0].start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()


def joined(near, far):
    """Forward data both ways until both ends have closed."""
    back = threading.Thread(target=_copy, args=(far, near))
    back.start()
    _copy(near, far)
    back.join()


def _copy(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
