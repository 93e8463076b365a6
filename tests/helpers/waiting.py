"""Wait for conditions with generous timeouts, and run calls on other threads."""

import concurrent.futures
import threading
import time

LIMIT = 60  # s, generous: no test should come near it
BUSY = 5.0  # s, that a busy machine may add to an expected time


def wait_until(condition, limit=LIMIT, pause=0.002):
    """Return as soon as ``condition()`` holds; it is checked after each pause."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
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


def in_background(call, name):
    """Run ``call`` on a new daemon thread with a name, and return its future."""
    future = concurrent.futures.Future()

    def run():
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
