"""A process with one worker that only exchanges: run by test_many_workers.py."""

import numpy as np
from helpers import children, sessions

from agn_optax import rules, service


class Commands:
    """The commands that the test sends."""

    def join(self, address, worker, transports=("memory", "socket", "grpc")):
        self._worker = worker
        self._center = service.connect(
            address, rules.downpour(), timeout=60, transports=transports
        )
        sessions.join(self._center, worker)

    def exchange(self, element):
        """Exchange a message of one element; return the negated center after it."""
        seen = self._center.pull()
        message = np.zeros_like(seen.params)
        message[element] = 1
        answer = sessions.exchange(
            self._center, message, anchor_version=seen.version, worker=self._worker
        )
        return {
            "applied": answer.applied,
            "version": answer.version,
            "sum": (-np.asarray(answer.params)).tolist(),
        }

    def leave(self):
        self._center.close()


if __name__ == "__main__":
    me = Commands()
    children.serve_commands(
        {name: getattr(me, name) for name in ("join", "exchange", "leave")}
    )
