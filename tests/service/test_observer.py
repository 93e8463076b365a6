"""A connection for observers."""

import contextlib
import socket
import time

from helpers import shared
from helpers.network import answered_by, joined

from agn_optax import service


@contextlib.contextmanager
def slow_link(address, delay):
    """Yield an address that forwards connections after a delay."""

    def answer(near):
        time.sleep(delay)  # the delay under test
        host, port = address.split(":")
        with near, socket.create_connection((host, int(port))) as far:
            joined(near, far)

    with answered_by(answer) as link:
        yield link


def test_slow_connection_is_not_given_up():
    """Long distances take several round trips of TCP, TLS and HTTP."""
    with (
        service.serve(shared.downpour()) as server,
        slow_link(server.address, 1.5) as address,
        service.Observer(address, timeout=30.0) as observer,
    ):
        assert observer.status()["rule"] == "downpour"
