"""One process's part in the exchanges of its worker."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax.center import Answer, KeptAnswer, Share, Submission, Version
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.server._assembly import Assembly, Key
from agn_optax.service.server._whole import WholeTree
from agn_optax.service.wire import _pieces, _trees
from agn_optax.service.wire._frames import Frame, FrameReader
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._submission import snapshot_of

PyTree = Any


class ProcessPart:
    """One process's connection to its `Assembly`, used like a `LocalSession`.

    It also converts the process's pieces to frames, like `CenterFrames`.

    Args:
      assembly: the assembly.
      share: the process's share.
      closer: closes the connection.
    """

    def __init__(
        self, assembly: Assembly, share: Share, closer: Callable[[], None]
    ) -> None:
        self._assembly, self._share, self._closer = assembly, share, closer
        self._frames = assembly.frames
        self.worker, self.session_id = assembly.worker, assembly.session_id
        self._key: Key = (0, 0)
        self._dtype = ""  # of the message

    @property
    def is_first(self) -> bool:
        """True for the process whose exchanges count as those of the worker."""
        return self._share.process == 0

    # As a session.

    def begin(self, message: pb.Message) -> None:
        """Begin to receive a message."""
        self._key = message.sequence, message.attempt
        self._dtype = message.dtype
        self._assembly.begin(self._share.process, self._key, self)

    def end(self) -> None:
        """Receive no more of a message."""
        self._assembly.end(self._share.process, self)

    def add_notices(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Add this process's notices to the others: see `Assembly.add_notices`."""
        return self._assembly.add_notices(self._share.process, texts)

    def submit(self, submission: Submission) -> None:
        """Add this process's pieces to the message."""
        if submission.contribution is not None:  # else `receive` has written them
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in self._like())
            pieces = _decode(self._frames.rule, shapes)(submission.contribution)
            with self._writing() as whole:
                if whole is not None:
                    whole.write(self._share.owned, pieces)
        self._assembly.add(self._share, self._key, submission.checked())

    def answer(self, sequence: int, timeout: float) -> KeptAnswer | None:
        """Return the answer to this process's exchange: see `LocalSession.answer`."""
        assert self._key[0] == sequence
        return self._assembly.answer(self._key, timeout)

    def fail(self, error: Exception) -> None:
        """Let the exchange fail in all processes."""
        self._assembly.fail(self._key, error)

    def missing(self) -> list[int]:
        """Return the processes for whose pieces this one waits."""
        return self._assembly.missing(self._key)

    def wait_for_processes(self, timeout: float) -> list[int]:
        """Wait for the other processes: see `Assembly.wait_for_processes`."""
        return self._assembly.wait_for_processes(timeout)

    def wait_until_kept(self, kept: KeptAnswer) -> None:
        """Wait until an answer is on disk: see `LocalSession.wait_until_kept`."""
        self._assembly.wait_until_kept(kept)

    def acknowledge(self, sequence: int) -> None:
        """Record that this process has its answer."""
        self._assembly.acknowledge(self._share.process, sequence)

    def disconnect(self) -> None:
        """Report a broken connection."""
        self._assembly.disconnect(self._share.process, self._closer)

    # As frames.

    @functools.cached_property
    def schemas(self) -> _trees.WireSchemas:
        """The schemas of this process's messages and answers."""
        self._assembly.check()
        center = self._frames.schemas.center
        return _pieces.piece_schemas(self._frames.rule, center, self._share).schemas

    def message_schema(self, message: pb.Message) -> Schema:
        """Return the schema of a message: see `CenterFrames.message_schema`."""
        if not message.sequence:
            return Schema([])
        return self._frames.checked_schema(message, self.schemas.message)

    def receive(self, schema: Schema, reader: FrameReader) -> PyTree:
        """Receive this process's pieces of a message, and write them to the message.

        Encoded pieces are returned instead, for `submit` to decode and write them.
        """
        if not schema.leaves:
            reader.read_buffer(schema, "a message")
            return None
        if not self._frames.sends_elements:
            like = rounds.contribution_like(self._frames.rule, self._like())
            buffer = reader.read_buffer(schema, "a message")
            return _trees.build(schema, schema.views(buffer), like)
        with self._writing() as whole:
            if whole is None:
                reader.read_buffer(schema, "a message")
            else:
                places = whole.places(self._share.owned)
                reader.read_into(schema, places, "a message")
        return None

    def _writing(self) -> contextlib.AbstractContextManager[WholeTree | None]:
        return self._assembly.writing(self._share.process, self._key, self._dtype)

    def _like(self) -> list[jax.ShapeDtypeStruct]:
        """Return this process's own pieces of the center, abstract."""
        dtypes = self._frames.schemas.center.numpy_dtypes
        return [
            jax.ShapeDtypeStruct(r.shape, dtypes[r.leaf]) for r in self._share.owned
        ]

    def answer_frame(self, version: Version, answer: Answer) -> Frame:
        """Return the frame with this process's pieces of an answer."""
        # The first center is sent exactly, as by a pull.
        schema = self.schemas.answer if answer.sequence else self.schemas.center
        leaves = self._frames.host_leaves(version)
        arrays = [leaves[r.leaf][r.slices] for r in self._share.wanted]
        snapshot = snapshot_of(answer, schema_hash=schema.hash)
        return Frame(pb.Header(snapshot=snapshot), schema, arrays)


@functools.lru_cache(maxsize=64)
def _decode(rule: Rule, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Any:
    """Return a program that decodes a list of pieces of these shapes and dtypes."""

    def decode(pieces: PyTree) -> PyTree:
        like = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
        return rounds.decode(rule, pieces, like)

    return jax.jit(decode)
