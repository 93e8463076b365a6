"""A tree of centers: a center that is itself a worker of a parent center.

The workers of a site talk to the site's own center, often; the sites talk to their
parent, rarely. For the parent, a site is a `Worker` like any other: its parameters are
the site's center, and an exchange at the site is one of its local steps. The site does
not stop while it waits for its parent, so it adopts the answer with the progress that
it has made since.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, in_background, trees
from agn_optax.center import Center, Claim, Core
from agn_optax.round import LocalState
from agn_optax.worker._worker import Worker

PyTree = Any
T = TypeVar("T")
_log = logging.getLogger("agn_optax")
_POLL = 0.5  # seconds; how soon it sees that somebody else initialized the parent


class Uplink:
    """Keeps a center in touch with its parent, on a thread of its own.

    Args:
      core: of the site's center. Without parameters, it gets the parent's; if the
        parent has none either, the parent gets those of the site's chief.
      parent: the center that the sites share; its rule says what a site sends, and how
        it adopts.
      period: exchanges at the site between two exchanges with the parent.
      name: of the site, unique among the workers of the parent.

    Attributes:
      ready: an event, set when the site has joined its parent, or failed to.
      error: why the site goes on alone; None while it does not.

    Raises:
      InvalidArgumentError: the parent's rule keeps a record of gradients, and the
        site's rule has none to offer, or does not trust all of them.
    """

    def __init__(self, core: Core, parent: Center, *, period: int, name: str) -> None:
        self._period = int(check.positive_int(period, "parent_period"))
        rule = parent.rule
        self._keeps_record = bool(jax.tree.leaves(rule.record.init(jnp.zeros(()))))
        if self._keeps_record and core.rule.message is not None:
            raise errors.InvalidArgumentError(
                f"rule {rule.name!r} of the parent sums gradients, and rule "
                f"{core.rule.name!r} of this center does not send any; give the "
                "parent a rule that sends displacements, such as downpour or diloco"
            )
        if self._keeps_record and not core.rule.is_summed:
            raise errors.InvalidArgumentError(
                f"rule {rule.name!r} of the parent sums all gradients that the workers "
                f"of this site send, also those that {core.rule.combine} of its rule "
                f"{core.rule.name!r} leaves out; give the parent a rule that sends "
                "displacements, such as downpour or diloco"
            )
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._core = core
        self._parent = parent
        # A lost parent is an error of its exchange, which is then tried again.
        self._worker = Worker(
            parent, optax.identity(), period=period, name=name, patience=0
        )
        self._state: LocalState  # of that worker
        # Under the lock of the site's center: what its exchanges add up to since it
        # last adopted the parent.
        self._steps = 0
        self._weight: float | None = None  # None while none of them says anything
        self._record: PyTree = None
        self._accumulate = jax.jit(self._recorded, donate_argnums=1)
        self._stopped = threading.Event()
        self._given_up = threading.Event()  # nothing that it owes is waited for
        self._ended = in_background(self._run, f"{name} uplink", lasting=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Exchanges once more, if there is something to say, and leaves the parent."""
        self._stopped.set()
        wait([self._ended], timeout)
        self._given_up.set()

    def _run(self) -> None:
        try:
            if not self._begin():
                return
            self.ready.set()
            while not self._stopped.is_set():
                if self._core.wait_for(lambda: self._steps >= self._period, _POLL):
                    self._exchange()
            if self._steps:
                self._exchange()
        except BaseException as error:
            self.error = error
            _log.error("this center goes on without its parent: %s", error)
        finally:
            self.ready.set()
            with contextlib.suppress(Exception):
                self._worker.leave()  # the other sites do not wait for this one

    def _begin(self) -> bool:
        """Both centers have parameters, and the site has joined; False: stopped."""
        while not self._stopped.is_set():
            with contextlib.suppress(errors.NotInitializedError):
                params = self._insist(self._parent.pull).params
                with contextlib.suppress(errors.AlreadyInitializedError):
                    self._core.initialize(params, worker=None)
                break
            if self._core.wait_for(lambda: self._core.is_initialized, _POLL):
                # If another site is quicker, this one adopts what that gave.
                with contextlib.suppress(errors.AlreadyInitializedError):
                    self._insist(self._initialize_parent)
                break
        else:
            return False
        with self._core.atomically():  # its workers may have begun already
            first = self._core.snapshot().params
            self._record = self._parent.rule.record.init(first)
            self._core.observer = self._observe
        adopted, self._state = self._insist(lambda: self._worker.start(first))
        if not jax.tree.all(jax.tree.map(jnp.array_equal, first, adopted)):
            self._core.shift(adopted, first)
        return True

    def _initialize_parent(self) -> None:
        params = self._core.snapshot().params
        self._parent.initialize(params, worker=self._worker.name)

    def _insist(self, call: Callable[[], T], *, owes: bool = False) -> T:
        """What ``call`` returns, as soon as the parent can be reached.

        When it is told to stop it gives up; where it owes something, at the end of the
        time that it has for that.
        """
        end = self._given_up if owes else self._stopped
        while True:
            try:
                return call()
            except errors.CenterUnreachableError:
                if end.wait(_POLL):
                    raise

    def _observe(self, contribution: PyTree, claim: Claim) -> None:
        """An exchange at the site; called under the lock of its center."""
        self._steps += 1
        if claim.weight is not None:
            self._weight = (self._weight or 0.0) + claim.weight
        if self._keeps_record:
            self._record = self._accumulate(contribution, self._record)
            # The contribution may be overwritten when its exchange is answered.
            jax.block_until_ready(self._record)

    def _recorded(self, contribution: PyTree, record: PyTree) -> PyTree:
        """The parent's record with a contribution at the site, which came encoded."""
        like = jax.tree.map(
            lambda c: jnp.zeros(c.shape, c.dtype), self._core.store.like
        )
        gradients = self._core.rule.codec.decode(contribution, like)
        return self._parent.rule.record.update(gradients, record, gradients)[1]

    def _exchange(self) -> None:
        with self._core.atomically():
            sent = self._core.snapshot().params
            steps, self._steps = self._steps, 0
            weight, self._weight = self._weight, None
            record, self._record = self._record, self._parent.rule.record.init(sent)
        state = self._state._replace(local_steps=jnp.int32(steps), record=record)
        params = trees.copy(sent)  # for an exchange donates what it is given
        adopted, self._state = self._insist(
            lambda: self._worker.flush(params, state, steps=steps, weight=weight),
            owes=True,
        )
        self._core.shift(adopted, sent)
