"""Waiting for what is to come, however busy the machine is."""

import time

LIMIT = 60  # seconds that nothing takes
BUSY = 5.0  # seconds that a busy machine may add to what is promised


def wait_until(condition, limit=LIMIT, pause=0.002):
    """Returns as soon as ``condition()`` holds, which is asked after each pause."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(pause)
