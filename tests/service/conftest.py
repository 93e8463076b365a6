"""Fixtures that several tests of the service use."""

import pytest
from helpers import sessions

from agn_optax.service.server import _servicer
from agn_optax.service.transports import _socket


@pytest.fixture(autouse=True)
def patient_farewells(monkeypatch):
    """Wait for the answer to each leave, however busy the center is."""
    sessions.wait_for_farewells(monkeypatch)


@pytest.fixture
def patient_dials(monkeypatch):
    """Raise the timeout of the greeting, for a busy machine."""
    monkeypatch.setattr(_socket, "_DIALLING", 20.0)


@pytest.fixture
def lively(monkeypatch):
    """Make centers tell waiting workers ten times a second to keep waiting."""
    monkeypatch.setattr(_servicer, "WAITING_INTERVAL", 0.1)
    monkeypatch.setattr(_servicer, "LONGEST", 0.05)
