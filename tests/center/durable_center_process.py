"""A process that keeps a center on disk and makes exchanges, for test_disk_failures.py.

It shares a file with the test that holds the last confirmed version and center id.
"""

import mmap
import os
import pathlib
import struct
import threading

import jax.numpy as jnp
from helpers import children, shared

from agn_optax.center import Journal, LocalCenter, Submission

ANSWERED = struct.Struct("<q32s")


class Commands:
    """The commands that the test can send."""

    def start(self, directory, answered, uid=None, elements=100, **settings):
        """Exchange continuously; each exchange subtracts one from all elements."""
        with pathlib.Path(answered).open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), ANSWERED.size)
        if uid is not None:
            os.setuid(uid)
        self._center = LocalCenter(
            shared.downpour(),
            jnp.zeros(elements),
            durability=Journal(directory, **settings),
        )
        self._ended, self._error = False, ""
        self._message = jnp.ones(elements)
        self._thread = threading.Thread(target=self._exchange)
        self._thread.start()

    def status(self):
        core = self._center.core
        return {
            "failure": core.failure,
            "degraded": core.keeper.degraded,
            "raised": self._error,
            "version": self._center.version,
        }

    def stop(self):
        self._ended = True
        self._thread.join()
        self._center.close()
        return self.status()

    def _exchange(self):
        session, version = self._center.join("w"), 0
        center_id = self._center.center_id.encode()
        try:
            while not self._ended:
                version = session.exchange(
                    Submission(version + 1, self._message, anchor_version=version)
                ).version
                ANSWERED.pack_into(self._shared, 0, version, center_id)
        except Exception as error:
            self._error = repr(error)


if __name__ == "__main__":
    me = Commands()
    children.serve_commands({"start": me.start, "status": me.status, "stop": me.stop})
