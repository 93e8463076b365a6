"""A network that can break: TCP proxies between workers and their center."""

import contextlib
import queue
import socket
import threading
import time

from agn_optax.service.center_pb2 import Offer

TRANSPORTS = ["grpc", "socket"]


class Network:
    """Forwards connections to a server; may be cut, and may swallow answers.

    With "socket" for ``transport`` exchanges go through it on direct connections. With
    ``bandwidth``, in bytes a second, it is slow: all connections share that much in
    either direction.
    """

    def __init__(self, server, transport="grpc", bandwidth=None):
        self._lock = threading.Lock()
        self._pairs, self._stranded = [], set()
        self._links = [None if bandwidth is None else _Link(bandwidth) for _ in "io"]
        self._listeners, self._threads, self._ends = [], [], []
        self._open = True
        self.answering = threading.Event()
        self.answering.set()
        host, _, port = server.address.rpartition(":")
        self.address = f"127.0.0.1:{self._forward_to(host, int(port))}"
        known = server._servicer
        offers = [offer for offer in known.offers if offer.transport == transport]
        known.offers = []
        for offer in offers:
            port = self._forward_to(host, int(offer.address.removeprefix(":")))
            known.offers.append(
                Offer(transport=transport, address=f":{port}", key=offer.key)
            )

    def _forward_to(self, *target):
        """Listens, and returns the port."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        self._ends.append(listener)
        self._threads.append(
            threading.Thread(target=self._accept, args=(listener, target))
        )
        self._threads[-1].start()
        return listener.getsockname()[1]

    def cut(self):
        """Breaks all connections and takes no new ones."""
        with self._lock:
            self._open = False
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def strand(self):
        """Swallows what goes over the connections of now, for good; others work."""
        with self._lock:
            self._stranded.update(end for pair in self._pairs for end in pair)

    def mend(self):
        with self._lock:
            self._open = True
        self.answering.set()

    def close(self):
        self.cut()
        self.answering.set()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _accept(self, listener, target):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._open:
                    client.close()
                    continue
                server = socket.create_connection(target)
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

    def _forward(self, source, sink, link, gate):
        arriving = iter(lambda: source.recv(1 << 16), b"")
        with contextlib.suppress(OSError):
            for data in arriving if link is None else link.carry(arriving):
                if gate is not None:
                    gate.wait()
                if source not in self._stranded:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Link:
    """One direction of a slow network, with room for all that waits to be carried."""

    def __init__(self, bandwidth):
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free = 0.0  # when all that it has taken is through

    def carry(self, arriving):
        """Yields what arrives when it is through, after all that came before.

        What arrives is taken at once, by a thread of its own. So the link is as fast as
        it should be however late a busy machine lets somebody run, who then finds that
        more has come through meanwhile.
        """
        carried = queue.SimpleQueue()
        taking = threading.Thread(target=self._take, args=(arriving, carried))
        taking.start()
        for through, data in iter(carried.get, None):
            time.sleep(max(0.0, through - time.monotonic()))
            yield data
        taking.join()

    def _take(self, arriving, carried):
        with contextlib.suppress(OSError):
            for data in arriving:
                with self._lock:
                    begin = max(self._free, time.monotonic())
                    through = self._free = begin + len(data) / self._bandwidth
                carried.put((through, data))
        carried.put(None)
