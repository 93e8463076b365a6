"""Private settings of the package that tests change: pauses, timeouts and calls.

Tests use a public setting instead where there is one.
"""

import time
import types

from agn_optax.center._core import Core
from agn_optax.center._runtime import Runtime
from agn_optax.center.durability import _directory, _keeper, _writer
from agn_optax.ops.watch import _page
from agn_optax.round.placements import _host
from agn_optax.service import _watchdog
from agn_optax.service.client import _client, _session
from agn_optax.service.security import _call_limits
from agn_optax.service.server import _exchanges, _servicer
from agn_optax.service.transports import _connection, _socket
from helpers import sessions
from helpers.waiting import wait_until


def set_center_clock(monkeypatch, monotonic):
    """Have centers call ``monotonic()``."""
    defaults = Core.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "runtime", Runtime(clock=monotonic))


class ConnectionClock:
    """A clock of connections and of the watchdog, which a test can set forward."""

    def __init__(self, monkeypatch):
        self._ahead = 0.0  # s
        clock = types.SimpleNamespace(**{**vars(time), "monotonic": self._monotonic})
        for module in (_connection, _watchdog):
            monkeypatch.setattr(module, "time", clock)

    def _monotonic(self):
        return time.monotonic() + self._ahead

    def pass_waiting(self, center, seconds):
        """Let seconds pass while a call waits, never 20 without a sign of life."""
        end = self._monotonic() + seconds
        while self._monotonic() < end:
            last = sessions.connection(center)._last_received
            wait_until(
                lambda last=last: sessions.connection(center)._last_received > last
            )
            self._ahead += 20.0


def set_greeting_timeout(monkeypatch, seconds):
    """Set the timeout of a direct connection's greeting."""
    monkeypatch.setattr(_socket, "_CONNECT_TIMEOUT", seconds)


def set_waiting_interval(monkeypatch, seconds, longest):
    """Set the pause after which a center tells a waiting worker to keep waiting."""
    for module in (_servicer, _exchanges):
        monkeypatch.setattr(module, "WAITING_INTERVAL", seconds)
    monkeypatch.setattr(_servicer, "MAX_WAIT", longest)


def set_transfer_timeout(monkeypatch, seconds):
    """Let a center end transfers after these seconds without progress."""
    monkeypatch.setattr(_call_limits, "TRANSFER_TIMEOUT", seconds)


def set_handshake_timeout(monkeypatch, seconds):
    """Set after how long a center closes a connection that is not authenticated."""
    monkeypatch.setattr(_call_limits, "HANDSHAKE_TIMEOUT", seconds)


def set_call_burst(monkeypatch, tokens):
    """Set how many calls a caller may make at once beyond its rate."""
    monkeypatch.setattr(_call_limits, "BURST", tokens)


def set_session_patience(monkeypatch, seconds):
    """Set for how long a session retries to send a message or to get its answer."""
    monkeypatch.setattr(_session, "SHORT_TIMEOUT", seconds)


def set_call_patience(monkeypatch, seconds):
    """Set the timeout of a call to a center that did not answer the last one."""
    monkeypatch.setattr(_connection, "SHORT_TIMEOUT", seconds)


def set_farewell_patience(monkeypatch, seconds):
    """Set the timeout of leaving: if that call is lost, a worker keeps its lease."""
    leave = _session.RemoteSession.leave
    monkeypatch.setattr(leave, "__defaults__", (seconds,))


def set_chief_warnings(monkeypatch, seconds):
    """Set the pause between two warnings of a missing chief."""
    monkeypatch.setattr(_client, "_WARNING_INTERVAL", seconds)


def set_journal_sync(monkeypatch, act):
    """Have journals call ``act(file, sync)`` where they would call ``sync(file)``."""
    sync = _writer._sync
    monkeypatch.setattr(_writer, "_sync", lambda file: act(file, sync))


def set_least_reserved(monkeypatch, size):
    """Set the least bytes that a journal reserves, so that it is copied quickly."""
    monkeypatch.setattr(_directory, "_MIN_RESERVED", size)


def set_most_records(monkeypatch, most):
    """Set the number of records after which a snapshot replaces a journal."""
    monkeypatch.setattr(_keeper, "_MAX_RECORDS", most)


def set_page_clock(monkeypatch, monotonic):
    """Have pages call ``monotonic()`` for the time; they still measure CPU time."""
    clock = types.SimpleNamespace(monotonic=monotonic, thread_time=time.thread_time)
    monkeypatch.setattr(_page, "time", clock)


def set_page_timeout(monkeypatch, seconds):
    """Set a page's timeout of a connection."""
    monkeypatch.setattr(_page, "_TIMEOUT", seconds)


def set_page_connections(monkeypatch, most):
    """Set the maximum number of connections of a page that starts later."""
    monkeypatch.setattr(_page, "_MAX_CONNECTIONS", most)


def set_host_support(monkeypatch, *, is_there):
    """Set the result of the check whether JAX keeps program outputs in host memory."""
    monkeypatch.setattr(_host, "_stays_on_host", lambda: is_there)


def is_journal_idle(core):
    """Return whether nothing waits to be written to a center's journal."""
    writer = core.keeper and core.keeper._writer
    return writer is None or writer.is_idle


def write_journal(core):
    """Write what waits for it, as the journal's thread does."""
    try:
        core.keeper._writer.write_next()
    except OSError as error:
        core.keeper._fail(error)


def is_snapshot_due(core):
    """Return whether a snapshot would replace a center's journal."""
    keeper = core.keeper
    if keeper is None or keeper._writer is None or keeper.failure:
        return False
    return keeper._is_due
