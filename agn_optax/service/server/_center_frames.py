"""A center's parameters as frames, and received buffers as contributions."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax.center import (
    Answer,
    Core,
    KeptAnswer,
    LocalSession,
    Packed,
    Snapshot,
    Version,
)
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire import _buffers, _trees
from agn_optax.service.wire._frames import Frame
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._submission import snapshot_of

PyTree = Any


class CenterFrames:
    """Conversion between the trees of a center and frames.

    Args:
      core: the core of the center.

    Raises:
      InvalidArgumentError: the center's tree is too large to be sent.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        if core.is_initialized:
            _ = self.schema_bytes  # raises now if the tree has no valid schema

    @functools.cached_property
    def schemas(self) -> _trees.WireSchemas:
        """The schemas of the center, messages and answers.

        Raises:
          NotInitializedError: the center has no parameters.
        """
        return _trees.wire_schemas(self._core.rule, self._core.store.like)

    @functools.cached_property
    def schema_bytes(self) -> bytes:
        """The schema of the center as it is sent."""
        return _trees.to_bytes(self.schemas.center)

    @property
    def schema(self) -> Schema | None:
        """The schema of the center; None if it has no parameters yet."""
        return self.schemas.center if self._core.is_initialized else None

    @functools.cached_property
    def parameters(self) -> tuple[int, int]:
        """The number of the center's parameters, and their size in bytes."""
        leaves = self.schemas.center.leaves
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        return numbers, sum(leaf.nbytes for leaf in leaves)

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if the center's arrays have the layout of the buffer on the wire."""
        store = self._core.store
        return store.packing is not None and _trees.has_schema_order(store.like)

    def message_schema(self, message: pb.Message) -> Schema:
        """Return the schema of a message's contribution: see `checked_schema`."""
        return self.checked_schema(message, self.schemas.message)

    def checked_schema(self, message: pb.Message, expected: Schema) -> Schema:
        """Return the schema of a message, whose expected schema is given.

        Raises:
          InvalidArgumentError: JAX does not support its dtype with these settings.
          TreeMismatchError: it does not match the center's tree.
        """
        if message.dtype and not _trees.is_representable(message.dtype):
            raise errors.InvalidArgumentError(
                f"a message in {message.dtype} needs JAX_ENABLE_X64=1 in this center's "
                "environment"
            )
        schema = expected.cast(message.dtype)
        if message.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                "the message does not match the center's tree; the worker must ask for "
                "the center's description again"
            )
        return schema

    def contribution(self, schema: Schema, buffer: np.ndarray) -> PyTree:
        """Return a received buffer as a contribution for the center."""
        if self.is_flat:
            return Packed(*schema.packed.views(buffer))
        like = self._core.store.contribution_like
        return _trees.build(schema, schema.views(buffer), like)

    # Of workers of several processes.

    @property
    def rule(self) -> Rule:
        """The rule of the center."""
        return self._core.rule

    @functools.cached_property
    def sends_elements(self) -> bool:
        """True if pieces of a contribution can be put together as they are sent."""
        center, sent = self.schemas.center, self.schemas.message
        shapes = [[leaf.shape for leaf in schema.leaves] for schema in (center, sent)]
        return self.rule.codec.reads == "element" and shapes[0] == shapes[1]

    def assembled_schema(self, dtype: str) -> Schema:
        """Return the schema of a whole contribution, whose pieces come in a dtype."""
        if not self.sends_elements:
            return self.schemas.center
        return self.schemas.message.cast(dtype)

    def assembled(self, schema: Schema, buffer: np.ndarray) -> PyTree:
        """Return a buffer in which pieces were put together as a contribution."""
        if self.sends_elements:
            return self.contribution(schema, buffer)
        like = self._core.store.like
        return rounds.Decoded(_trees.build(schema, schema.views(buffer), like))

    def host_leaves(self, version: Version) -> list[np.ndarray]:
        """Return the leaves of a version in host memory, in the order of the schema."""
        return _trees.host_arrays(self._core.store.unplace(version.params))

    def copy_over_message(
        self,
        session: LocalSession,
        kept: KeptAnswer,
        schema: Schema,
        buffer: np.ndarray,
    ) -> KeptAnswer:
        """Copy an answer over its message if both have the same schema; return it.

        Sending the version itself would keep other messages from updating the center in
        place. The copy takes less time than the allocation of another version.
        """
        if schema.hash != self.schemas.center.hash or kept.recorded:
            return kept  # the journal may still read a recorded message
        with self._core.reading(kept.version) as version, self._core.reading() as now:
            # Wait until no program reads the message. The newest version depends on it,
            # but the answer's does not if the rule adopts the version before it.
            jax.block_until_ready(
                (version.params, now.params, kept.answer.norm, kept.read)
            )
            flat = schema.packed
            _buffers.write(flat, _trees.host_arrays(version.params, flat), buffer)
        return session.replace(kept, Packed(*flat.views(buffer)))

    def answer_frame(self, version: Version, answer: Answer) -> Frame:
        """Return the frame with an answer to a message."""
        return self._frame(version, answer, self.schemas.answer)

    def snapshot(self, version: Version) -> Frame:
        """Return the frame with a version that was pulled."""
        pulled = Snapshot(None, version.number)
        return self._frame(version, pulled, self.schemas.center)

    def _frame(
        self, version: Version, record: Answer | Snapshot, schema: Schema
    ) -> Frame:
        """Return the frame with a version, with views of its arrays if possible."""
        snapshot = snapshot_of(record, schema_hash=schema.hash)
        if self.is_flat:
            params, schema = version.params, schema.packed
        else:
            params = self._core.store.tree(version)
        arrays = _trees.host_arrays(params, schema)
        return Frame(pb.Header(snapshot=snapshot), schema, arrays)
