"""Wait for conditions with generous timeouts."""

import threading
import time

LIMIT = 60  # s, generous: no test should come near it
BUSY = 5.0  # s, that a busy machine may add to an expected time


def wait_until(condition, limit=LIMIT, pause=0.002):
    """Return as soon as ``condition()`` holds; it is checked after each pause."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(pause)


def returned(monkeypatch, owner, name):
    """Return an event that is set once a method of an object has returned."""
    event, method = threading.Event(), getattr(owner, name)

    def noted(*args):
        result = method(*args)
        event.set()
        return result

    monkeypatch.setattr(owner, name, noted)
    return event
