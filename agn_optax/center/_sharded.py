"""A center in shards: one center of several, each with its part of the parameters.

Leaves are assigned by size, and those above a server's share are cut along their first
dimension (`parts.balanced`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, in_background, trees
from agn_optax.center._protocol import Center, Session, Snapshot
from agn_optax.round import elementwise, parts

PyTree = Any
T = TypeVar("T")


class ShardedCenter:
    """Several centers as one; made by ``agn_optax.service.connect`` of many addresses.

    A worker pulls from all and exchanges with all of them in parallel. Each shard is
    atomic and counts by itself: a version is a tuple, one number for each, and
    staleness is that of the stalest part.

    Args:
      centers: the shards, in an order that is the same for every worker.
      like: a tree with the containers in which `pull` returns the parameters.
      fragments: what each shard keeps, one fragment for each; None divides by size.
        For workers beside those that exchange by these fragments.

    Raises:
      InvalidArgumentError: there are no centers, or their rules differ or look at whole
        messages, or there are not as many fragments.
    """

    def __init__(
        self,
        centers: Sequence[Center],
        *,
        like: PyTree = None,
        fragments: rounds.Fragments | None = None,
    ) -> None:
        if not centers or any(c.rule.name != centers[0].rule.name for c in centers):
            raise errors.InvalidArgumentError(
                "a center in shards needs one or more centers of one rule, got "
                f"{[c.rule.name for c in centers]}"
            )
        if fragments is not None and len(fragments) != len(centers):
            raise errors.InvalidArgumentError(
                f"a center in {len(centers)} shards keeps as many fragments, got "
                f"{len(fragments)}"
            )
        self.rule = centers[0].rule
        how = self.rule.combine
        if not self.rule.combines_elements and len(centers) > 1:
            raise errors.InvalidArgumentError(
                f"rule {self.rule.name!r} cannot move a center in shards: "
                f"{how} looks at whole messages, and a shard has a part "
                "of each. Keep the center whole, or take robust.median() or "
                "robust.trimmed_mean(), which take each element for itself"
            )
        self.centers = tuple(centers)
        self.fragments = fragments
        self._like = like
        self._checked: Any = None  # the kind of tree that the rule was checked with
        # Once the center is known: it, what workers send, and who keeps what of it.
        self._model: PyTree = None
        self._message_like: PyTree
        self._own: parts.Parts
        self._likes: list[PyTree]  # what each of them keeps, abstract

    def __repr__(self) -> str:
        """Its shards."""
        return f"ShardedCenter({', '.join(map(repr, self.centers))})"

    def divided_by(self, fragments: rounds.Fragments) -> ShardedCenter:
        """The same shards, each of which keeps a fragment."""
        return ShardedCenter(self.centers, like=self._like, fragments=fragments)

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        life: Any = None,
    ) -> ShardedSession:
        """A worker is there: see `Center.join`."""
        own: list[PyTree] = [None] * len(self.centers)
        lives = own if life is None else life
        if len(lives) != len(own):
            raise errors.WorkerStateError(
                f"worker {worker!r} comes back to a center in {len(own)} shards, and "
                f"had joined one in {len(lives)}; start() again"
            )
        if params is not None:
            self._check_model(params)
            own = self.cut(params)
        with contextlib.ExitStack() as undone:

            def join(center: Center, part: PyTree, life: Any) -> Session:
                session = center.join(worker, part, timeout=timeout, life=life)
                undone.callback(session.leave)
                return session

            sessions = self.all(join, self.centers, own, lives)
            undone.pop_all()
        return ShardedSession(self, sessions)

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives every shard its part of the parameters: see `Center.initialize`."""
        check.float_leaves(params, "params")
        # Who is the chief of the first shard is the chief of all.
        for center, part in zip(self.centers, self.cut(params), strict=True):
            center.initialize(part, worker=worker)
        return self.pull(public=True)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once all shards are initialized."""
        return self.unite(self.all(lambda center: center.wait(timeout), self.centers))

    def pull(self, *, public: bool = False) -> Snapshot:
        """The center as it is: every part is one version of its shard.

        See `Center.pull`.
        """
        how = {"public": True} if public else {}
        return self.unite(self.all(lambda center: center.pull(**how), self.centers))

    @property
    def address(self) -> str:
        """Those of all shards, where they have any, as `connect` takes them."""
        return ",".join(getattr(center, "address", "") for center in self.centers)

    def announce(self, address: str) -> None:
        """Says to all shards where their workers are themselves a center."""
        for center in self.centers:
            if hasattr(center, "announce"):
                center.announce(address)

    def close(self) -> None:
        """Closes the connections to all shards."""
        for center in self.centers:
            if hasattr(center, "close"):
                center.close()

    def __enter__(self) -> ShardedCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def all(self, call: Callable[..., T], *each: Sequence[Any]) -> list[T]:
        """``call(...)`` for every shard at once; raises when all have ended."""
        futures = [
            in_background(functools.partial(call, *of_one), "agn-optax shard")
            for of_one in zip(*each, strict=True)
        ]
        wait(futures)
        return [future.result() for future in futures]

    def cut(self, tree: PyTree) -> list[PyTree]:
        """A tree of parameters as the parts of the shards.

        Raises:
          InvalidArgumentError: the rule cannot work on parts.
        """
        whole, kind = jax.eval_shape(lambda: tree), trees.kinds(tree)
        divided = self._divided(whole)
        if self._checked != kind:  # a chief joins and initializes with the same tree
            elementwise.check(self.rule, whole, jax.eval_shape(divided.cut, whole))
            self._checked = kind
        return divided.cut(tree)

    def cut_message(self, contribution: PyTree) -> list[PyTree]:
        """What a worker sends as the parts of the shards.

        Raises:
          TreeMismatchError: it does not belong to the center; its parts might.
        """
        if self._model is None:
            self.pull()  # or there is no center yet
        check.same_tree(contribution, self._message_like, "contribution", "center")
        check.same_kinds(contribution, self._message_like, "contribution")
        # It has a tree of arrays for each leaf of the center.
        owners = jax.tree.broadcast(parts.numbers(self._model), contribution)
        return [
            jax.tree.map(
                lambda leaf, sent: None if leaf is None else sent,
                *(own, part),
                is_leaf=lambda leaf: leaf is None,
            )
            for own, part in zip(
                self._likes, self._own.cut(contribution, owners), strict=True
            )
        ]

    def cut_adopted(self, center: PyTree) -> list[PyTree]:
        """A center that this one has given, as the parts of the shards: at no cost."""
        assert self._own is not None  # it has given one
        return self._own.cut(center)

    def _check_model(self, params: PyTree) -> None:
        """``params`` belong to the center: said of the whole, which its owner knows."""
        if self._model is None:
            with contextlib.suppress(errors.NotInitializedError):
                self.pull()
        if self._model is not None:
            check.float_leaves(params, "params")
            check.same_tree(params, self._model, "params", "center")

    def _divided(self, whole: PyTree) -> parts.Parts:
        """Who keeps what; a leaf is cut only where the codec sends it as it is."""
        if self.fragments is not None:
            return self.fragments.divide(whole)
        sent: Any = jax.tree.structure(rounds.contribution_like(self.rule, whole))
        rows = bool(sent == jax.tree.structure(whole))
        rows = rows and self.rule.codec.answer_codec is None
        return parts.balanced(whole, len(self.centers), rows=rows)

    def unite(self, snapshots: Sequence[Snapshot]) -> Snapshot:
        """The answers of all shards as one."""
        staleness = [s.staleness for s in snapshots if s.staleness is not None]
        norms = [s.norm for s in snapshots if s.norm is not None]
        paces = [s.pace for s in snapshots if s.pace is not None]
        received = [s.received for s in snapshots if s.received is not None]
        whole = parts.join([snapshot.params for snapshot in snapshots])
        if self._like is not None:
            treedef = jax.tree.structure(self._like)
            whole = jax.tree.unflatten(treedef, jax.tree.leaves(whole))
        if self._model is None:
            model = jax.eval_shape(lambda: whole)
            self._message_like = rounds.contribution_like(self.rule, model)
            self._own = self._divided(model)
            self._likes = jax.eval_shape(self._own.cut, model)
            self._model = model  # and only now another thread may look
        return Snapshot(
            whole,
            tuple(snapshot.version for snapshot in snapshots),
            max(staleness, default=None),
            np.sqrt(np.sum(np.square(norms))) if norms else None,
            all(snapshot.applied for snapshot in snapshots),
            "; ".join(dict.fromkeys(s.refused for s in snapshots if s.refused)),
            min(paces, default=None),
            in_part=len({snapshot.applied for snapshot in snapshots}) > 1,
            received=sum(received) if received else None,
        )


class ShardedSession(Session):
    """A worker's life at all shards of a center; made by `ShardedCenter.join`.

    A message that reached some shards only reaches the others when the exchange is
    repeated. If its worker is killed before that, it stays there alone.
    """

    def __init__(self, center: ShardedCenter, sessions: Sequence[Session]) -> None:
        self.worker = sessions[0].worker
        self.incarnation = sessions[0].incarnation
        self._center = center
        self._sessions = sessions
        self._is_over = False  # a shard has refused what others may have applied

    @property
    def life(self) -> Any:
        """As `Session.life`, of every shard."""
        return [session.life for session in self._sessions]

    @property
    def before(self) -> Any:
        """The `Session.before` of every shard."""
        return [session.before for session in self._sessions]

    def submit(
        self,
        sequence: int,
        contribution: PyTree,
        *,
        anchor_version: Any,
        steps: int = 0,
        weight: float | None = None,
        reported: Mapping[str, Any] | None = None,
        anchor: PyTree = None,
    ) -> None:
        """Gives every shard its part of a contribution: see `Session.submit`."""
        shards = len(self._sessions)
        if self._is_over:
            raise errors.WorkerStateError(
                f"a shard has refused a message of worker {self.worker!r} that others "
                "may have applied, who would take the next one for the same: start() "
                "again"
            )
        if not isinstance(anchor_version, tuple) or len(anchor_version) != shards:
            raise errors.InvalidArgumentError(
                f"anchor_version must be a tuple of {shards} versions, one for each "
                f"shard, got {anchor_version!r}"
            )
        own = self._center.cut_message(contribution)
        anchors = [None] * shards
        if anchor is not None:
            anchors = self._center.cut_adopted(anchor)
        if not _is_finite(contribution):  # else one refuses it, and another takes it
            own = jax.tree.map(_not_finite, own)

        def submit(
            session: Session, part: PyTree, version: int, anchor: PyTree
        ) -> None:
            session.submit(
                sequence,
                part,
                anchor_version=version,
                steps=steps,
                weight=weight,
                reported=reported,
                anchor=anchor,
            )

        self._center.all(submit, self._sessions, own, anchor_version, anchors)

    def collect(self, sequence: int, timeout: float | None = None) -> Snapshot | None:
        """The answers of all shards as one: see `Session.collect`."""
        try:
            answers = self._center.all(
                lambda session: session.collect(sequence, timeout), self._sessions
            )
        except errors.MessageRefusedError:
            self._is_over = True
            raise
        there = [answer for answer in answers if answer is not None]
        return self._center.unite(there) if len(there) == len(answers) else None

    def acknowledge(self, sequence: int) -> None:
        """As `Session.acknowledge`."""
        for session in self._sessions:
            session.acknowledge(sequence)

    def disconnect(self) -> None:
        """As `Session.disconnect`."""
        for session in self._sessions:
            session.disconnect()

    def leave(self) -> None:
        """As `Session.leave`."""
        for session in self._sessions:
            session.leave()


def _not_finite(leaf: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.full_like(leaf, jnp.nan) if is_float else leaf


@jax.jit
def _is_finite(tree: PyTree) -> jax.Array:
    return jax.tree.reduce(
        lambda finite, leaf: finite & jnp.isfinite(leaf).all(), tree, jnp.array(True)
    )
