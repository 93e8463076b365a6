"""Waiting for what is to come, however busy the machine is."""

import threading
import time

LIMIT = 60  # seconds that nothing takes
BUSY = 5.0  # seconds that a busy machine may add to what is promised


def wait_until(condition, limit=LIMIT, pause=0.002):
    """Returns as soon as ``condition()`` holds, which is asked after each pause."""
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
