"""Fixtures that several tests of the service use."""

import pytest
from helpers import tuning


@pytest.fixture(autouse=True)
def patient_farewells(monkeypatch):
    """Wait for the answer to each leave, however busy the center is."""
    tuning.set_farewell_patience(monkeypatch, 20.0)


@pytest.fixture
def patient_dials(monkeypatch):
    """Raise the timeout of the greeting, for a busy machine."""
    tuning.set_greeting_timeout(monkeypatch, 20.0)


@pytest.fixture
def lively(monkeypatch):
    """Have centers tell waiting workers ten times a second to keep waiting."""
    tuning.set_waiting_interval(monkeypatch, 0.1, longest=0.05)
