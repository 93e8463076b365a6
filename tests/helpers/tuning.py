"""Private settings of the package that tests change: pauses, timeouts and calls.

Tests use a public setting instead where there is one.
"""

import types

from agn_optax.center import _core
from agn_optax.center.durability import _writer
from agn_optax.round.placements import _host
from agn_optax.service.client import _client, _session
from agn_optax.service.security import _call_limits, _files
from agn_optax.service.server import _exchanges, _servicer
from agn_optax.service.transports import _connection, _socket
from agn_optax.worker import _processes, _tree


def set_center_clock(monkeypatch, monotonic):
    """Have centers call ``monotonic()`` for the time."""
    monkeypatch.setattr(_core, "time", types.SimpleNamespace(monotonic=monotonic))


def set_greeting_timeout(monkeypatch, seconds):
    """Set the timeout of a direct connection's greeting."""
    monkeypatch.setattr(_socket, "_CONNECT_TIMEOUT", seconds)


def set_waiting_interval(monkeypatch, seconds, longest):
    """Set the pause after which a center tells a waiting worker to keep waiting."""
    for module in (_servicer, _exchanges):
        monkeypatch.setattr(module, "WAITING_INTERVAL", seconds)
    monkeypatch.setattr(_servicer, "MAX_WAIT", longest)


def set_stall_timeout(monkeypatch, seconds):
    """Set the timeout of a center for any part of a frame."""
    monkeypatch.setattr(_call_limits, "TRANSFER_TIMEOUT", seconds)


def set_session_patience(monkeypatch, seconds):
    """Set for how long a session retries to send a message or to get its answer."""
    monkeypatch.setattr(_session, "SHORT_TIMEOUT", seconds)


def set_call_patience(monkeypatch, seconds):
    """Set the timeout of a call to a center that did not answer the last one."""
    monkeypatch.setattr(_connection, "SHORT_TIMEOUT", seconds)


def set_chief_warnings(monkeypatch, first, others):
    """Set the pauses before the first and the later warnings of a missing chief."""
    monkeypatch.setattr(_client, "_FIRST_WARNING", first)
    monkeypatch.setattr(_client, "_WARNING_INTERVAL", others)


def set_file_checks(monkeypatch, seconds):
    """Set the pause between two checks whether a token or certificate has changed."""
    monkeypatch.setattr(_files, "_CHECK_INTERVAL", seconds)


def set_file_patience(monkeypatch, seconds):
    """Set for how long the last content of an unreadable file stays in use."""
    monkeypatch.setattr(_files, "MAX_AGE", seconds)


def set_parent_pauses(monkeypatch, first, longest=None):
    """Set the first and the longest pause of a site that has lost its parent."""
    monkeypatch.setattr(_tree, "_POLL", first)
    if longest is not None:
        monkeypatch.setattr(_tree, "_MAX_PAUSE", longest)


def set_broadcast_pause(monkeypatch, seconds):
    """Set the pause between broadcasts of a worker of several processes that waits."""
    monkeypatch.setattr(_processes, "_PAUSE", seconds)


def set_journal_sync(monkeypatch, act):
    """Have journals call ``act(file, sync)`` where they would call ``sync(file)``."""
    sync = _writer._sync
    monkeypatch.setattr(_writer, "_sync", lambda file: act(file, sync))


def set_host_support(monkeypatch, *, is_there):
    """Set the result of the check whether JAX keeps program outputs in host memory."""
    monkeypatch.setattr(_host, "_stays_on_host", lambda: is_there)
