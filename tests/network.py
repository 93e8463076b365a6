"""A network that can break: a TCP proxy between a worker and its center."""

import contextlib
import socket
import threading
import time


class Network:
    """Forwards connections to ``address``; may be cut, and may swallow answers.

    With ``bandwidth``, in bytes a second, it is slow: all connections share that much
    in either direction.
    """

    def __init__(self, address, bandwidth=None):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs = []
        self._links = [None if bandwidth is None else _Link(bandwidth) for _ in "io"]
        self._ends = [self._listener]
        self._open = True
        self.answering = threading.Event()
        self.answering.set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self):
        """Breaks all connections and takes no new ones."""
        with self._lock:
            self._open = False
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self):
        with self._lock:
            self._open = True
        self.answering.set()

    def close(self):
        self.cut()
        self.answering.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._open:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                for end in (client, server):  # what it adds is what it is told to add
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pairs.append((client, server))
                self._ends += [client, server]
            there, back = self._links
            for way in (
                (client, server, there, None),
                (server, client, back, self.answering),
            ):
                thread = threading.Thread(target=self._forward, args=way)
                thread.start()
                self._threads.append(thread)

    @staticmethod
    def _forward(source, sink, link, gate):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if link is not None:
                    link.carry(len(data))
                if gate is not None:
                    gate.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Link:
    """One direction of a slow network: a bucket of tokens, empty most of the time."""

    _BURST = 0.01  # seconds of carrying that an idle link has saved up

    def __init__(self, bandwidth):
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free = 0.0  # when all that it has taken is through

    def carry(self, size):
        """Returns when so many bytes are through, after those of earlier callers."""
        with self._lock:
            earliest = time.monotonic() - self._BURST
            self._free = max(self._free, earliest) + size / self._bandwidth
            through = self._free
        time.sleep(max(0.0, through - time.monotonic()))
