"""Runs of real centers that keep a tape."""

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax.center import Journal, LocalCenter, Submission
from helpers import shared
from helpers.waiting import wait_until

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), "b": jnp.ones(2)}
DOWNPOUR = shared.downpour()


class Recording:
    """A center with a tape, and workers that send it random messages.

    Attributes:
      center: the center.
      states: the center's states by version, as NumPy arrays.
    """

    def __init__(
        self,
        path,
        rule=DOWNPOUR,
        *,
        keep="contributions",
        size=None,
        limit=None,
        params=PARAMS,
        seed=0,
        **settings,
    ):
        journal = Journal(path, size=size, keep=keep, limit=limit)
        self.center = LocalCenter(rule, params, durability=journal, **settings)
        self._sessions, self._sent, self._anchors = {}, {}, {}
        self._random = np.random.default_rng(seed)
        self.states = {}
        self.remember()

    def remember(self):
        saved = self.center.save()
        self.states[saved.version] = jax.tree.map(np.array, saved)

    def send(self, worker="w0", *, scale=1.0, steps=2, weight=None, anchor=None):
        """Send a random message of a worker; return the answer."""
        self.submit(worker, scale=scale, steps=steps, weight=weight, anchor=anchor)
        return self.collect(worker)

    def join(self, worker):
        self._sessions[worker] = self.center.join(worker)
        self._sent[worker], self._anchors[worker] = 0, self.center.version

    def submit(self, worker, *, scale=1.0, steps=2, weight=None, anchor=None):
        if worker not in self._sessions:
            self.join(worker)
        self._sent[worker] += 1
        draw = self._random.normal
        like = self.center.core.store.contribution_like
        contribution = jax.tree.map(
            lambda leaf: jnp.asarray(scale * draw(size=leaf.shape), leaf.dtype), like
        )
        sent = Submission(
            self._sent[worker],
            contribution,
            self._anchors[worker] if anchor is None else anchor,
            steps,
            weight,
        )
        self._sessions[worker].submit(sent)

    def collect(self, worker):
        answer = self._sessions[worker].collect(self._sent[worker], timeout=60)
        assert answer is not None
        self._anchors[worker] = answer.version
        self.remember()
        return answer

    def leave(self, worker):
        self._sessions.pop(worker).leave()

    def write(self):
        """Wait until all is on disk, and no snapshot is being written."""
        keeper = self.center.core.keeper

        def is_written():
            with self.center.core.atomically():
                saved = keeper._saved[0] == keeper._attempted
                return keeper.is_kept(keeper.recorded) and saved and not keeper._is_due

        wait_until(is_written)

    def close(self):
        self.center.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def record(path, rule=DOWNPOUR, exchanges=12, workers=2, **settings):
    """Record a run of workers that take turns; return its `Recording`, closed."""
    with Recording(path, rule, **settings) as run:
        for i in range(exchanges):
            run.send(f"w{i % workers}")
            run.write()
    return run
