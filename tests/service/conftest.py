"""What several tests of the service need."""

import pytest

from agn_optax.service import _servicer


@pytest.fixture
def lively(monkeypatch):
    """Centers that say ten times a second that somebody waits there."""
    monkeypatch.setattr(_servicer, "WAITING_INTERVAL", 0.1)
    monkeypatch.setattr(_servicer, "LONGEST", 0.05)
