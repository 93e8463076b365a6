"""The center in this process. Every other center gives the same numbers as this one."""

from __future__ import annotations

import logging
from typing import Any

from agn_optax import errors
from agn_optax.center._core import Core
from agn_optax.center._ledger import Mode, Synchronous
from agn_optax.center._protocol import Session, Snapshot
from agn_optax.center._refusals import Refuse
from agn_optax.center._store import CenterState
from agn_optax.center.durability import Durability
from agn_optax.rules import Rule

PyTree = Any
_log = logging.getLogger("agn_optax")


class LocalCenter:
    """The center variable of the workers in this process, which may be threads.

    An exchange is atomic: its message, its staleness, the center optimizer's step and
    the new version are made under one lock. The lock is held while programs are handed
    to the device, and not while they run. A version never changes, so that readers keep
    what they have, and hold nobody up.

    Args:
      rule: a record of `agn_optax.rules`. One that combines messages by their mean, as
        ``average`` and ``diloco``, is for ``mode=Synchronous()``: in any other mode n
        workers move the center n times as far, and the log warns of that.
      params: the first parameters, copied; None leaves it to a chief to `initialize`
        them.
      dtype: floating dtype of the center and its optimizer; None keeps that of the
        parameters. float32 under workers with bfloat16 parameters is a master copy.
      device: where the center lives; None leaves it where its first parameters are.
      mode: when messages are applied: `agn_optax.center.Asynchronous` (the default),
        `BoundedStaleness` or `Synchronous`.
      barrier: workers that must have joined before any of them starts.
      max_workers: workers that may be there at a time; None for any number.
      lease: seconds after which a worker that lost its connection is given up. Workers
        in this process have no connection, and are never given up.
      refuse: which messages are refused, an `agn_optax.center.Refuse`; None for those
        that are not finite, or after which the center would not be. To know how large
        a message is, the center waits for the device at every exchange. With
        ``Refuse(nonfinite=False)`` all are applied, and nobody waits.
      durability: `agn_optax.center.Journal` or `Snapshots`, with a directory in which
        the center outlives its process. If there is a center in the directory, it goes
        on, and the values of ``params`` do not matter. None keeps the center in memory.
      packs: keeps the parameters in two arrays, where the rule does the same to all
        elements, so that an exchange over a wire costs nothing per leaf; `pull` then
        takes them apart. Their numbers are the same.

    Attributes:
      rule: the rule.
      life: names this center for its workers. One that an earlier process kept on disk
        has the same name again, unless something of it was lost.
      core: for a server around this center, or a parent above it.

    Raises:
      InvalidTypeError: ``rule`` is not a rule, or ``mode`` not a mode.
      InvalidArgumentError: another setting is out of range.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays, or the
        center that was found is of another model.
      RuleMismatchError: the center that was found is one of another rule.
      DurabilityError: what was found cannot be read, or nothing can be written.

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

    It is a context manager, whose block ends with `close`:

      >>> with agn_optax.LocalCenter(rule, jnp.zeros(2)) as center:
      ...     print(center.version)
      0
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree = None,
        *,
        dtype: Any = None,
        device: Any = None,
        mode: Mode | None = None,
        barrier: int = 0,
        max_workers: int | None = None,
        lease: float = 10.0,
        refuse: Refuse | None = None,
        durability: Durability | None = None,
        packs: bool = False,
    ) -> None:
        self.rule = rule
        self.core = Core(
            rule,
            params,
            dtype=dtype,
            device=device,
            mode=mode,
            barrier=barrier,
            max_workers=max_workers,
            lease=lease,
            refuse=refuse,
            durability=durability,
            packs=packs,
        )
        self.life = self.core.life
        if rule.combine == "mean" and not isinstance(
            self.core.ledger.mode, Synchronous
        ):
            _log.warning(
                "%s is a rule for rounds: mode=Synchronous() (--mode synchronous) "
                "combines the messages of all workers by their mean, and in mode %s n "
                "workers move the center n times as far, unless its optimizer is one "
                "for messages one by one (agn_optax.center_optimizers)",
                rule.name,
                self.core.ledger.mode,
            )

    @classmethod
    def restore(cls, rule: Rule, saved: CenterState, **settings: Any) -> LocalCenter:
        """A center that goes on where `save` was called.

        Args:
          rule: the rule of the saved center; its optimizer must have the same state.
          saved: what `save` returned, or its arrays read back from a checkpoint.
          **settings: of the center, as when it is made.

        Returns:
          A center at the saved version, which further exchanges take where the saved
          one would have gone, bit for bit.

        Raises:
          TreeMismatchError: the saved state is not one of this rule's center optimizer.
          InvalidArgumentError: the saved version is negative.
          AlreadyInitializedError: there is a center in the directory of a durability
            that is one of the settings.

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
            center.close("it could not be restored")
            raise
        return center

    @property
    def version(self) -> int:
        """Exchanges applied so far."""
        return self.core.store.current.number

    @property
    def workers(self) -> frozenset[str]:
        """Names of the workers that are there, or may still be back."""
        return frozenset(self.core.members()[1])

    def save(self) -> CenterState:
        """A copy of everything that the center is, consistent, for a checkpoint."""
        return self.core.save()

    def write_snapshot(self) -> int:
        """Writes a snapshot now, where its durability is; returns when it is on disk.

        Of a `Journal` it takes the place, so that a start has nothing to replay.

        Returns:
          Its version, or that of another one that was written meanwhile.

        Raises:
          DurabilityError: it cannot be written, or the center has no durability.
          NotInitializedError: there are no parameters yet.
          CenterClosedError: the center has ended meanwhile.

        Example:
          >>> import tempfile, jax.numpy as jnp, agn_optax
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     center = agn_optax.LocalCenter(
          ...         agn_optax.rules.downpour(),
          ...         jnp.ones(2),
          ...         durability=agn_optax.center.Journal(folder),
          ...     )
          ...     print(center.write_snapshot())
          ...     center.close()
          0
        """
        return self.core.write_snapshot()

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters: see `Center.initialize`."""
        self.core.initialize(params, worker=worker)
        return self.pull(public=True)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized: see `Center.wait`."""
        if not self.core.wait_until_initialized(timeout):
            raise errors.NotInitializedError(
                f"no chief has initialized this center within {timeout} s; start "
                "one worker with start(params, chief=True)"
            )
        return self.pull(public=True)

    def pull(self, *, public: bool = False) -> Snapshot:
        """The center as it is: ``.params`` and ``.version``, at any time.

        See `Center.pull`.
        """
        return self.core.snapshot(public=public)

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        life: Any = None,
    ) -> Session:
        """A worker is there: see `Center.join`.

        A worker whose name is taken replaces the one that has it: within a process
        nobody can tell whether that one still runs.
        """
        center, incarnation = (self.life, None) if life is None else life
        if center != self.life:
            raise errors.WorkerStateError(
                f"worker {worker!r} comes back to a center that has been started anew "
                "since, or is another one; start() again"
            )
        session = self.core.join(
            worker, incarnation, params, replace=True, back=life is not None
        )
        try:
            if self.core.wait_for_barrier(timeout):
                return session
        except BaseException:  # by Ctrl-C, too
            session.leave()
            raise
        session.leave()
        raise errors.NotInitializedError(
            f"worker {worker!r} waited {timeout} s for {self.core.ledger.barrier} "
            f"workers to start together, and {len(self.core.ledger.present())} "
            "others are there"
        )

    def close(self, reason: str = "this center has been closed") -> None:
        """Takes no more exchanges; those that wait are told so, and nothing is lost.

        With a ``durability``, writes down what is not yet on disk, and lets go of the
        directory.
        """
        self.core.close(reason)

    def __enter__(self) -> LocalCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        is_there = self.core.is_initialized
        version = f"version {self.version}" if is_there else "no parameters yet"
        return f"LocalCenter({self.rule.name}, {version}, {len(self.workers)} workers)"
