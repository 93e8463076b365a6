"""A connection that only watches."""

import contextlib
import socket
import threading
import time

import shared

from agn_optax import service


@contextlib.contextmanager
def slow_link(address, delay):
    """An address at which a connection is passed on to another, but late."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                threads.append(threading.Thread(target=join, args=(near,)))
                threads[-1].start()

    def join(near):
        time.sleep(delay)  # what is tested
        host, port = address.split(":")
        with near, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far)
            back.join()

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=serve)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads[0].start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30.0)


def test_a_connection_may_take_its_time():
    """As over continents, where greetings of TCP, TLS and HTTP go back and forth."""
    with (
        service.serve(shared.downpour()) as server,
        slow_link(server.address, 1.5) as address,
        service.Observer(address, timeout=30.0) as observer,
    ):
        assert observer.status()["rule"] == "downpour"
