"""A tree of centers: a center that is itself a worker of a parent center.

The workers of a site talk to the site's own center, often; the sites talk to their
parent, rarely. For the parent, a site is a worker like any other: its parameters are
the site's center, and an exchange at the site is one of its local steps. The site does
not stop while it waits for its parent, so it adopts the answer as a worker that
overlaps does, with the progress made since.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.center import Center, LocalCenter
from agn_optax.worker._worker import Worker

PyTree = Any
T = TypeVar("T")
_log = logging.getLogger("agn_optax")
_POLL = 0.5  # seconds; how soon it sees that somebody else initialized the parent


class Uplink:
    """Keeps a center in touch with its parent, on a thread of its own.

    Args:
      center: of the site. Without parameters, it gets the parent's; if the parent has
        none either, the parent gets those of the site's chief.
      parent: the center that the sites share; its rule says what a site sends, and how
        it adopts.
      period: exchanges at the site between two exchanges with the parent.
      name: of the site, unique among the workers of the parent.

    Attributes:
      worker: the site as a worker of the parent.
      ready: an event, set when the site has joined its parent, or failed to.
      error: why the site goes on alone; None while it does not.

    Raises:
      InvalidArgumentError: the parent's rule keeps a record of gradients, and the
        site's rule has none to offer.
    """

    def __init__(
        self, center: LocalCenter, parent: Center, *, period: int, name: str
    ) -> None:
        self._period = int(check.positive_int(period, "parent_period"))
        self._keeps_record = bool(
            jax.tree.leaves(parent.rule.record.init(jnp.zeros(())))
        )
        if self._keeps_record and center.rule.message is not None:
            raise errors.InvalidArgumentError(
                f"rule {parent.rule.name!r} of the parent sums gradients, and rule "
                f"{center.rule.name!r} of this center does not send any; give the "
                "parent a rule that sends displacements, such as downpour or diloco"
            )
        self._center = center
        self._parent = parent
        # No inner optimizer: the site's center has moved already.
        self.worker = Worker(parent, optax.identity(), period=1, name=name, patience=0)
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._record = jax.jit(self.worker.tx.update, donate_argnums=1)
        self._state: Any = None  # of the site as a worker; steps are its exchanges
        self._steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{name} uplink", daemon=True
        )
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Exchanges once more, if there is something to say, and leaves the parent."""
        self._stopped.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            if not self._begin():
                return
            self.ready.set()
            while not self._stopped.is_set():
                self._center.wait_for(self._has_work, _POLL)
                if self._steps >= self._period:
                    self._exchange()
            if self._steps:
                self._exchange()
            self.worker.leave()
        except BaseException as error:
            self.error = error
            with contextlib.suppress(Exception):  # the other sites do not wait for us
                self.worker.leave()
            _log.error("this center goes on without its parent: %s", error)
        finally:
            self.ready.set()

    def _has_work(self) -> bool:
        return self._steps >= self._period or self._stopped.is_set()

    def _begin(self) -> bool:
        """Both centers have parameters, and the site has joined; False: stopped."""
        while not self._stopped.is_set():
            try:
                self._center.initialize_from(self._insist(self._parent.pull).params)
                break
            except errors.NotInitializedError:
                pass
            if self._center.wait_until_initialized(_POLL):
                # If another site is quicker, this one adopts what that gave.
                with contextlib.suppress(errors.AlreadyInitializedError):
                    self._insist(self._initialize_parent)
                break
        else:
            return False
        with self._center.atomically():  # its workers may have begun already
            first = self._center.pull().params
            self._state = self.worker.tx.init(first)
            self._center.observe(self._observe)
        adopted, state = self._insist(lambda: self.worker.start(first))
        with self._center.atomically():
            if not _alike(first, adopted):
                self._center.shift(adopted, first)
            self._state = self._state._replace(anchor=state.anchor)
        return True

    def _initialize_parent(self) -> None:
        params = self._center.pull().params
        self._parent.initialize(params, worker=self.worker.name)

    def _insist(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, as soon as the parent can be reached."""
        while True:
            try:
                return call()
            except errors.CenterUnreachableError:
                if self._stopped.wait(_POLL):
                    raise

    def _observe(self, contribution: PyTree) -> None:
        """An exchange at the site; called under the lock of its center."""
        self._steps += 1
        if self._keeps_record:
            _, self._state = self._record(contribution, self._state, contribution)
            # The contribution may be overwritten when its exchange is answered.
            jax.block_until_ready(self._state)

    def _exchange(self) -> None:
        with self._center.atomically():
            sent = self._center.pull().params
            state = self._state._replace(local_steps=jnp.int32(self._steps))
            self._state = trees.copy(state)._replace(
                record=self._parent.rule.record.init(sent)
            )
            # The next call of exchange is the last of so many local steps.
            self.worker._local_steps = self._steps - 1
            self._steps = 0
        params = trees.copy(sent)
        adopted, after = self._insist(lambda: self.worker.exchange(params, state))
        with self._center.atomically():
            self._center.shift(adopted, sent)
            self._state = self._state._replace(anchor=after.anchor)


def _alike(tree: PyTree, other: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(bool(jnp.array_equal(a, b)) for a, b in pairs)
