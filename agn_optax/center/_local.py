"""The center in this process. Every other center computes the same numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from agn_optax import errors
from agn_optax._internal import Notice, arguments
from agn_optax.center._core import Core
from agn_optax.center._protocol import Session
from agn_optax.center._settings import CenterSettings
from agn_optax.center._store import CenterState
from agn_optax.center._submission import Snapshot
from agn_optax.rules import Rule

PyTree = Any


class LocalCenter:
    """The center variable of the workers in this process, which may be threads.

    An exchange is atomic: its message, its staleness, the center optimizer's step and
    the new version are computed under one lock. The lock is held while programs are
    dispatched to the device, and not while they run. A version never changes, so that
    readers may keep its arrays and delay no exchange.

    Attributes:
      rule: the rule.
      center_id: the center id, for workers. A center that continues from disk keeps its
        id, unless updates were lost.
      core: the core, for a server of this center.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.array([1.0, 2.0]))
      >>> worker = agn_optax.Worker(center, optax.sgd(0.5), period=2)
      >>> params, state = worker.start()
      >>> for _ in range(2):
      ...     updates, state = worker.tx.update(jnp.ones(2), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> print(center.pull().params, center.pull().version)
      [0. 1.] 1

    A center is a context manager that calls `close` at the end of its block:

      >>> with agn_optax.LocalCenter(rule, jnp.zeros(2)) as center:
      ...     print(center.version)
      0
    """

    _flatten: ClassVar[bool] = False

    @arguments.for_method(CenterSettings)
    def __init__(self, settings: CenterSettings) -> None:
        """Make a center, or continue with one on disk.

        Raises:
          InvalidTypeError: ``rule`` is not a rule, ``mode`` not a mode, or ``limits``
            are not those of a center in this process.
          InvalidArgumentError: another argument is out of range.
          TreeMismatchError: ``params`` has leaves that are not real floating arrays, or
            the center on disk has another model.
          RuleMismatchError: the center on disk has another rule.
          DurabilityError: the center on disk cannot be read, or the directory cannot be
            written.
        """
        self.rule = settings.rule
        self.core = Core(settings, flatten=self._flatten)
        self.center_id = self.core.center_id

    @classmethod
    def restore(cls, rule: Rule, saved: CenterState, **settings: Any) -> LocalCenter:
        """Return a center that continues from a saved state.

        Args:
          rule: the saved center's rule; its optimizer's state must have the same tree.
          saved: the result of `save`, or its arrays as read from a checkpoint.
          **settings: arguments of `LocalCenter`.

        Returns:
          A center at the saved version. Further exchanges give the same numbers as at
          the saved center, bit for bit.

        Raises:
          TreeMismatchError: the saved state does not match the rule's center optimizer.
          InvalidArgumentError: the saved version is negative.
          AlreadyInitializedError: ``durability`` is given, and its directory has a
            center already.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(), jnp.ones(2))
          >>> agn_optax.LocalCenter.restore(center.rule, center.save()).version
          0
        """
        center = cls(rule, **settings)
        try:
            if center.core.is_initialized:
                raise errors.AlreadyInitializedError(
                    f"there is a center in {settings['durability'].directory} already; "
                    "restore the saved one in another directory"
                )
            center.core.restore(saved)
        except BaseException:
            center.close("this center could not be restored")
            raise
        return center

    @property
    def version(self) -> int:
        """The number of updates so far; a round of messages is one update."""
        return self.core.store.current.number

    @property
    def workers(self) -> frozenset[str]:
        """Names of the registered workers, including those that may reconnect."""
        return frozenset(self.core.members()[1])

    @property
    def notices(self) -> list[Notice]:
        """The notices that hold now, as `Thresholds` describes them."""
        self.core.look()
        return self.core.notices.current()

    def save(self) -> CenterState:
        """Return a consistent copy of the center's complete state, for a checkpoint."""
        return self.core.save()

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Set the center's first parameters: see `Center.initialize`."""
        self.core.initialize(params, worker=worker)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait until the center is initialized, and return it: see `Center.wait`."""
        if not self.core.wait_until_initialized(timeout):
            raise errors.NotInitializedError(
                f"no chief has initialized this center within {timeout} s; start "
                "one worker with start(params, chief=True)"
            )
        return self.pull()

    def pull(self) -> Snapshot:
        """Return the current version, at any time, as ``.params`` and ``.version``.

        See `Center.pull`.
        """
        return self.core.snapshot()

    def describe(self) -> Snapshot:
        """Return the current version without its arrays: see `Center.describe`."""
        return Snapshot(self.core.store.like, self.version)

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> Session:
        """Register a worker: see `Center.join`.

        If the name is taken, the new worker replaces the old one, because within a
        process the center cannot tell whether the old worker still runs.
        """
        is_new = resume_token is None
        # Tokens of earlier releases have no witness.
        center_id, session_id, *witnesses = resume_token or (self.center_id, None)
        with self.core.recording_failed_join(worker):
            if center_id != self.center_id:
                raise errors.WorkerStateError(
                    f"worker {worker!r} cannot resume its session at this center, "
                    "which has restarted without it or is another one; start() again"
                )
            session = self.core.join(
                worker,
                session_id,
                params,
                witnesses=filter(None, witnesses),
                replace=True,
                resume=not is_new,
            )
        try:
            if self.core.wait_for_barrier(timeout):
                return session
        except BaseException:  # also after Ctrl-C
            session.leave()
            raise
        session.leave()
        raise errors.NotInitializedError(
            f"worker {worker!r} waited {timeout} s for {self.core.ledger.barrier} "
            "workers to start together; other workers that have joined: "
            f"{len(self.core.ledger.registered())}"
        )

    def close(self, reason: str = "this center has been closed") -> None:
        """Take no more exchanges; waiting workers get an error, and no update is lost.

        With a ``durability``, write the remaining records to disk, and release the
        directory. If the log takes information, it gets the version and hash of the
        center, and the totals of its workers.
        """
        self.core.close(reason)
        self.core.log_end()

    def __enter__(self) -> LocalCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        is_there = self.core.is_initialized
        version = f"version {self.version}" if is_there else "no parameters yet"
        return f"LocalCenter({self.rule.name}, {version}, {len(self.workers)} workers)"


class PackedCenter(LocalCenter):
    """A `LocalCenter` for exchanges over a network, with the same numbers.

    If the rule is elementwise, the parameters are flattened into two arrays, so that
    the cost of an exchange does not grow with the number of leaves. `pull` takes the
    arrays apart.
    """

    _flatten = True
