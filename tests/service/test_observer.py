"""A connection that only watches."""

import contextlib
import socket
import time

from helpers import shared
from helpers.network import answered_by, joined

from agn_optax import service


@contextlib.contextmanager
def slow_link(address, delay):
    """An address at which a connection is passed on to another, but late."""

    def answer(near):
        time.sleep(delay)  # what is tested
        host, port = address.split(":")
        with near, socket.create_connection((host, int(port))) as far:
            joined(near, far)

    with answered_by(answer) as link:
        yield link


def test_a_connection_may_take_its_time():
    """As over continents, where greetings of TCP, TLS and HTTP go back and forth."""
    with (
        service.serve(shared.downpour()) as server,
        slow_link(server.address, 1.5) as address,
        service.Observer(address, timeout=30.0) as observer,
    ):
        assert observer.status()["rule"] == "downpour"
