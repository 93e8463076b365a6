"""What several tests of the service need."""

import pytest

from agn_optax.service import _servicer
from agn_optax.service._session import RemoteSession
from agn_optax.service.transports import _socket


@pytest.fixture(autouse=True)
def patient_farewells(monkeypatch):
    """A busy center that misses a farewell keeps the worker until its lease ends."""
    monkeypatch.setattr(RemoteSession.leave, "__defaults__", (20.0,))


@pytest.fixture
def patient_dials(monkeypatch):
    """A center that takes long to greet is not taken for one that does not."""
    monkeypatch.setattr(_socket, "_DIALLING", 20.0)


@pytest.fixture
def lively(monkeypatch):
    """Centers that say ten times a second that somebody waits there."""
    monkeypatch.setattr(_servicer, "WAITING_INTERVAL", 0.1)
    monkeypatch.setattr(_servicer, "LONGEST", 0.05)
