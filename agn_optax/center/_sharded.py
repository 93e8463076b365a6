"""A center in shards: several centers as one, each with a part of the parameters.

Leaves are assigned to shards by size. Leaves larger than a shard's share are split
along their first dimension (`parts.balanced`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, combinations, in_background
from agn_optax.center._pieces import Pieces, Share
from agn_optax.center._protocol import Center, Session
from agn_optax.center._submission import Answer, Snapshot, Submission
from agn_optax.center._transfer import Transfer
from agn_optax.round import elementwise, parts

PyTree = Any
T = TypeVar("T")


class ShardedCenter:
    """Several centers as one; ``agn_optax.service.connect`` makes it from addresses.

    A worker pulls from all shards and exchanges with all of them in parallel. Each
    shard is atomic and counts its own versions: a version is a tuple with one int per
    shard, and the staleness is the largest of the shards.

    Args:
      centers: the shards, in the same order for every worker.
      like: a tree with the containers in which `pull` returns the parameters.
      fragments: the parts of the parameters, one fragment per shard; None divides them
        by size. Pass them if other workers exchange these fragments.

    Raises:
      InvalidArgumentError: there are no centers, their rules differ or combine whole
        messages, or the number of fragments is not that of the centers.
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
                f"a center in {len(centers)} shards needs as many fragments, got "
                f"{len(fragments)}"
            )
        self.rule = centers[0].rule
        if self.rule.combine_reads == "tree" and len(centers) > 1:
            combinations.reject(
                "a center in shards",
                "a combine of whole messages",
                f"rule {self.rule.name!r} with {self.rule.combine}",
            )
        self.centers = tuple(centers)
        self.fragments = fragments
        self._like = like
        # Set on the first pull: abstract parameters, contribution, and parts of shards.
        self._model: PyTree = None
        self._message_like: PyTree
        self._parts: parts.Parts
        self._shard_likes: list[PyTree]  # abstract parameters of each shard

    def __repr__(self) -> str:
        """Return a description with all shards."""
        return f"ShardedCenter({', '.join(map(repr, self.centers))})"

    def divided_by(self, fragments: rounds.Fragments) -> ShardedCenter:
        """Return a center of the same shards, with one fragment per shard."""
        return ShardedCenter(self.centers, like=self._like, fragments=fragments)

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> ShardedSession:
        """Register a worker at all shards: see `Center.join`."""
        shards = len(self.centers)
        tokens = [None] * shards if resume_token is None else resume_token
        if len(tokens) != shards:
            raise errors.WorkerStateError(
                f"worker {worker!r} cannot resume its session at a center in "
                f"{shards} shards, because it had joined {len(tokens)} shards; "
                "start() again"
            )
        shard_params: list[PyTree] = [None] * shards
        share = params.share if isinstance(params, Pieces) else None
        if params is not None:
            self._check_model(params if share is None else share.like)
            shard_params = self.cut(params)
        with contextlib.ExitStack() as joined:

            def join(center: Center, part: PyTree, resume_token: Any) -> Session:
                session = center.join(
                    worker, part, timeout=timeout, resume_token=resume_token
                )
                joined.callback(session.leave)
                return session

            sessions = self.call_all(join, self.centers, shard_params, tokens)
            joined.pop_all()
        return ShardedSession(self, sessions, share)

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Set every shard's part of the first parameters: see `Center.initialize`."""
        like = params.share.like if isinstance(params, Pieces) else params
        check.float_leaves(like, "params")
        # In order: the chief of the first shard is the chief of all shards.
        for center, part in zip(self.centers, self.cut(params), strict=True):
            center.initialize(part, worker=worker)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait until all shards are initialized, and return the center."""
        waited = self.call_all(lambda center: center.wait(timeout), self.centers)
        return self.unite(waited)

    def pull(self) -> Snapshot:
        """Return the center, in which every part is one version of its shard.

        See `Center.pull`.
        """
        return self.unite(self.call_all(lambda center: center.pull(), self.centers))

    def describe(self) -> Snapshot:
        """Return the versions of all shards without arrays: see `Center.describe`."""
        described = self.call_all(lambda center: center.describe(), self.centers)
        like = jax.eval_shape(parts.join, [snapshot.params for snapshot in described])
        like = self._in_containers(like)
        self._learn(like)
        return Snapshot(like, tuple(snapshot.version for snapshot in described))

    @property
    def takes_pieces(self) -> bool:
        """True if the processes of a worker may each exchange their own pieces."""
        return all(getattr(center, "takes_pieces", False) for center in self.centers)

    def current_ids(self) -> list[str]:
        """Return the center ids of the shards, in their order."""
        centers: Sequence[Any] = self.centers
        shard_ids = self.call_all(lambda center: center.current_ids(), centers)
        return [center_id for ids in shard_ids for center_id in ids]

    @property
    def timeout(self) -> float:
        """The longest timeout of the shards' connections, in seconds."""
        return max(getattr(center, "timeout", 0.0) for center in self.centers)

    @property
    def address(self) -> str:
        """The addresses of the shards, separated by commas, as `connect` takes them."""
        return ",".join(getattr(center, "address", "") for center in self.centers)

    def close(self) -> None:
        """Close the connections to all shards."""
        for center in self.centers:
            if hasattr(center, "close"):
                center.close()

    def __enter__(self) -> ShardedCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call_all(self, call: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Call a function for all shards in parallel; raise once all have ended."""
        futures = [
            in_background(functools.partial(call, *shard), "agn-optax shard")
            for shard in zip(*arguments, strict=True)
        ]
        wait(futures)
        return [future.result() for future in futures]

    def cut(self, tree: PyTree) -> list[PyTree]:
        """Split a tree of parameters into the parts of the shards.

        Raises:
          InvalidArgumentError: the rule cannot work on parts of the parameters.
        """
        pieces = tree if isinstance(tree, Pieces) else None
        whole = jax.eval_shape(lambda: tree) if pieces is None else pieces.share.like
        shard_parts = self._divide(whole)
        elementwise.check(self.rule, whole, jax.eval_shape(shard_parts.cut, whole))
        return shard_parts.cut(tree) if pieces is None else pieces.cut(shard_parts)

    def cut_message(self, contribution: PyTree) -> list[PyTree]:
        """Split a contribution into the parts of the shards.

        Raises:
          TreeMismatchError: the contribution does not match the whole center, even if
            its parts match those of the shards.
        """
        self.known_parts()
        fragments = self.fragments
        if fragments is not None and fragments.seed is not None:
            sent: Any = jax.tree.structure(self._message_like)
            if bool(sent != jax.tree.structure(self._model)):
                combinations.reject(
                    "fragments of random elements",
                    "a worker that encodes the whole model",
                    f"{fragments}, codec {self.rule.codec}",
                )
        check.same_tree(contribution, self._message_like, "contribution", "center")
        check.same_kinds(contribution, self._message_like, "contribution")
        # A contribution has a tree of arrays in place of each leaf of the center.
        owners = jax.tree.broadcast(parts.numbers(self._model), contribution)
        return [
            jax.tree.map(
                lambda leaf, sent: None if leaf is None else sent,
                *(like, part),
                is_leaf=lambda leaf: leaf is None,
            )
            for like, part in zip(
                self._shard_likes, self._parts.cut(contribution, owners), strict=True
            )
        ]

    def known_parts(self) -> parts.Parts:
        """Return the parts of the shards.

        Raises:
          NotInitializedError: the center has no parameters yet.
        """
        if self._model is None:
            self.describe()
        return self._parts

    def _check_model(self, params: PyTree) -> None:
        """Check ``params`` against the whole center, so that errors name its paths."""
        if self._model is None:
            with contextlib.suppress(errors.NotInitializedError):
                self.describe()
        if self._model is not None:
            check.float_leaves(params, "params")
            check.same_tree(params, self._model, "params", "center")

    def _divide(self, whole: PyTree) -> parts.Parts:
        """Return the parts of the shards.

        A leaf is split if it is sent as one array, and if its messages are combined
        element by element.
        """
        if self.fragments is not None:
            return self.fragments.divide(whole)
        sent: Any = jax.tree.structure(rounds.contribution_like(self.rule, whole))
        rows = bool(sent == jax.tree.structure(whole))
        rows = rows and self.rule.combine_reads == "element"
        return parts.balanced(whole, len(self.centers), rows=rows)

    def unite(
        self, snapshots: Sequence[Snapshot | Answer], share: Share | None = None
    ) -> Snapshot:
        """Combine the snapshots of all shards into one.

        Args:
          snapshots: the snapshots, or answers.
          share: share of the process that gets them, which gets its pieces; None for a
            worker of one process.
        """
        received = [snapshot.params for snapshot in snapshots]
        if share is None:
            whole = self._in_containers(parts.join(received))
            self._learn(whole)
        else:
            whole = share.join_wanted(received, self.known_parts())
        return Snapshot(whole, tuple(snapshot.version for snapshot in snapshots))

    def _in_containers(self, tree: PyTree) -> PyTree:
        if self._like is None:
            return tree
        return jax.tree.unflatten(jax.tree.structure(self._like), jax.tree.leaves(tree))

    def _learn(self, whole: PyTree) -> None:
        """Keep the shapes of the center, and the parts of its shards."""
        if self._model is None:
            model = jax.eval_shape(lambda: whole)
            self._message_like = rounds.contribution_like(self.rule, model)
            self._parts = self._divide(model)
            self._shard_likes = jax.eval_shape(self._parts.cut, model)
            self._model = model  # last, because other threads check it first

    def unite_answers(
        self, answers: Sequence[Answer], share: Share | None = None
    ) -> Answer:
        """Combine the answers of all shards to one exchange: see `unite`."""
        norms = [answer.norm for answer in answers if answer.norm is not None]
        paces = [answer.pace for answer in answers if answer.pace is not None]
        received = [a.received for a in answers if a.received is not None]
        return Answer(
            *self.unite(answers, share),
            answers[0].sequence,
            staleness=max(answer.staleness for answer in answers),
            norm=np.sqrt(np.sum(np.square(norms))) if norms else None,
            applied=all(answer.applied for answer in answers),
            rejected="; ".join(
                dict.fromkeys(a.rejected for a in answers if a.rejected)
            ),
            pace=min(paces, default=None),
            is_partial=len({answer.applied for answer in answers}) > 1,
            received=sum(received) if received else None,
            notices=tuple(notice for answer in answers for notice in answer.notices),
            witness=tuple(answer.witness for answer in answers),
        )


class ShardedSession(Session):
    """A worker's session at all shards of a center; made by `ShardedCenter.join`.

    If a message reached only some shards, repeating the exchange sends it to the
    others. If the worker is killed before that, only some shards have applied it.
    """

    def __init__(
        self,
        center: ShardedCenter,
        sessions: Sequence[Session],
        share: Share | None = None,
    ) -> None:
        self._share = share  # None for a worker of one process
        self.worker = sessions[0].worker
        self.session_id = sessions[0].session_id
        self._center = center
        self._sessions = sessions
        self._must_restart = False  # whether shards may differ about a message

    @property
    def while_missing(self) -> Any:
        """The function of that name of `RemoteSession`, the same for all shards."""
        return self._sessions[0].while_missing  # type: ignore[attr-defined]

    @while_missing.setter
    def while_missing(self, check: Any) -> None:
        for session in self._sessions:
            session.while_missing = check  # type: ignore[attr-defined]

    @property
    def resume_token(self) -> Any:
        """The `Session.resume_token` of every shard."""
        return [session.resume_token for session in self._sessions]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The `Session.transfers` of all shards."""
        return tuple(t for session in self._sessions for t in session.transfers)

    def submit(self, submission: Submission) -> None:
        """Submit every shard's part of a contribution: see `Session.submit`."""
        shards = len(self._sessions)
        if self._must_restart:
            raise errors.WorkerStateError(
                f"a shard has rejected a message of worker {self.worker!r} that other "
                "shards may have applied; they would take the next message for a "
                "repetition: start() again"
            )
        versions, contribution = submission.anchor_version, submission.contribution
        if not isinstance(versions, tuple) or len(versions) != shards:
            raise errors.InvalidArgumentError(
                f"anchor_version must be a tuple of {shards} versions, one for each "
                f"shard, got {versions!r}"
            )
        if self._share is not None:  # its processes make all pieces not finite at once
            shard_parts = self._center.known_parts()
            contributions = self._share.cut_owned(contribution, shard_parts)
        else:
            contributions = self._center.cut_message(contribution)
            if not is_finite(contribution):  # so that every shard rejects its part
                contributions = not_finite(contributions)

        def submit(session: Session, part: PyTree, version: int) -> None:
            session.submit(
                submission._replace(contribution=part, anchor_version=version)
            )

        self._center.call_all(submit, self._sessions, contributions, versions)

    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """Return the combined answers of all shards: see `Session.collect`."""
        try:
            answers = self._center.call_all(
                lambda session: session.collect(sequence, timeout), self._sessions
            )
        except errors.MessageRejectedError:
            self._must_restart = True
            raise
        collected = [answer for answer in answers if answer is not None]
        if len(collected) < len(answers):
            return None
        return self._center.unite_answers(collected, self._share)

    def pull(self, attempt: int, timeout: float | None = None) -> Snapshot:
        """Return this process's pieces of one version of each shard."""
        sessions: Sequence[Any] = self._sessions
        pulled = self._center.call_all(lambda s: s.pull(attempt, timeout), sessions)
        assert self._share is not None
        return self._center.unite(pulled, self._share)

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge the answers of all shards: see `Session.acknowledge`."""
        for session in self._sessions:
            session.acknowledge(sequence)

    def disconnect(self) -> None:
        """Report broken connections to all shards: see `Session.disconnect`."""
        for session in self._sessions:
            session.disconnect()

    def leave(self) -> None:
        """End the session at all shards: see `Session.leave`."""
        for session in self._sessions:
            session.leave()


def not_finite(tree: PyTree) -> PyTree:
    """Return a tree whose floating elements are all NaN."""

    def fill(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.full_like(leaf, jnp.nan) if is_float else leaf

    return jax.tree.map(fill, tree)


@jax.jit
def is_finite(tree: PyTree) -> jax.Array:
    """Return whether all elements are finite."""
    return jax.tree.reduce(
        lambda finite, leaf: finite & jnp.isfinite(leaf).all(), tree, jnp.array(True)
    )
