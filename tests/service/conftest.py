"""What several tests of the service need."""

import pytest
from helpers import sessions

from agn_optax.service.server import _servicer
from agn_optax.service.transports import _socket


@pytest.fixture(autouse=True)
def patient_farewells(monkeypatch):
    """A worker that leaves has left, however busy the center is."""
    sessions.wait_for_farewells(monkeypatch)


@pytest.fixture
def patient_dials(monkeypatch):
    """A center that takes long to greet is not taken for one that does not."""
    monkeypatch.setattr(_socket, "_DIALLING", 20.0)


@pytest.fixture
def lively(monkeypatch):
    """Centers that say ten times a second that somebody waits there."""
    monkeypatch.setattr(_servicer, "WAITING_INTERVAL", 0.1)
    monkeypatch.setattr(_servicer, "LONGEST", 0.05)
