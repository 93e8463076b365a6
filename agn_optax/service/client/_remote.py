"""The remote center as its sessions share it: its tree and its transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import ExpectedLink, Pieces, Submission, newest
from agn_optax.rules import Rule
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import GrpcLink, Link, Target, Transport
from agn_optax.service.transports._connection import Connection
from agn_optax.service.wire import (
    _buffers,
    _fingerprint,
    _pieces,
    _submission,
    _trees,
)
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame, bytes_schema
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._trees import WireSchemas

PyTree = Any
_log = logging.getLogger("agn_optax")


class Remote:
    """A center at the other end of a connection.

    Args:
      connection: the connection to the center.
      rule: the rule that the center must run.
      transports: transports that exchanges may use, in order of preference.
      expected: how exchanges are expected to travel; None expects nothing.

    Attributes:
      connection: the connection to the center.
      rule: the rule of the center.
      expected: as given.
      schemas: see `known_schemas`; None until the center is initialized.
      description: the last description that the center gave.
      witness: the newest `Answer.witness` that any session has seen; "" for none.
    """

    def __init__(
        self,
        connection: Connection,
        rule: Rule,
        transports: Sequence[Transport],
        expected: ExpectedLink | None = None,
    ) -> None:
        self.connection = connection
        self.rule = rule
        self.expected = expected or ExpectedLink()
        self.schemas: WireSchemas | None = None
        self.description: pb.Description
        self.witness = ""
        self._buffers, self._wide_buffers = Buffers(), Buffers()
        self._transports = transports
        self._offers: dict[str, pb.Offer] = {}  # the center's, by transport
        # The last type of contribution that was checked, and its dtype on the wire.
        self._checked_dtypes: dict[Any, str] = {}

    # The description.

    @property
    def address(self) -> str:
        """The center's address."""
        return self.connection.address

    def describe(self) -> pb.Description:
        """Ask the center for its current description."""
        self._set_description(self.connection.retry(self.connection.describe))
        return self.description

    def known_schemas(self) -> WireSchemas:
        """Return the wire formats of the center's tree, messages and answers.

        Raises:
          NotInitializedError: the center is not initialized.
        """
        if self.schemas is None:
            self.describe()
        if self.schemas is None:
            raise errors.NotInitializedError(
                f"the center at {self.address} has no parameters yet: start one worker "
                "with start(params, chief=True)"
            )
        return self.schemas

    def _set_description(self, described: pb.Description) -> None:
        """Check and store a description.

        Raises:
          ProtocolError: the center speaks another version of the protocol.
          RuleMismatchError: the center runs another rule.
          InvalidArgumentError: the timeout is too short for this center.
        """
        if described.protocol != _address.PROTOCOL:
            raise errors.ProtocolError(
                f"the center at {self.address} speaks version {described.protocol} of "
                f"the protocol, but this release speaks version {_address.PROTOCOL}"
            )
        _fingerprint.compare(described.rule, self.rule, self.address)
        if self.connection.timeout <= described.waiting_interval:
            raise errors.InvalidArgumentError(
                f"timeout must be longer than {described.waiting_interval:g} s, for "
                f"which the center at {self.address} may send nothing to a waiting "
                f"worker, got {self.connection.timeout:g}"
            )
        self.description = described
        self._offers = {offer.transport: offer for offer in described.offers}
        if described.HasField("schema"):
            schemas = self.schemas
            if schemas is None or described.schema_hash != schemas.center.hash:
                schema = _trees.from_bytes(described.schema)
                leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in schema.leaves]
                like = _trees.build(schema, leaves)
                self._checked_dtypes = {}
                self.schemas = _trees.wire_schemas(self.rule, like)

    # Messages and answers.

    def frame(self, submission: Submission, worker: str, schemas: WireSchemas) -> Frame:
        """Return the frame of a submission; the session sends copies of the frame.

        Args:
          submission: the submission, as `Submission.checked` returned it.
          worker: the worker's name, for error messages.
          schemas: the schemas of the worker's messages and answers.

        Raises:
          TreeMismatchError: the contribution does not match the center's tree.
        """
        contribution = submission.contribution
        leaves, treedef = jax.tree.flatten(contribution)
        signature = (treedef, *map(_abstract, leaves))
        if (dtype := self._checked_dtypes.get(signature)) is None:
            sent, expected = _trees.schema_of(contribution), schemas.message
            self._check_schema(sent, expected, "float32", worker, "contribution")
            # A contribution in a narrower dtype than the center's is sent as it is.
            narrow = {"bfloat16", "float16"} - expected.dtypes
            is_narrow = len(sent.dtypes) == 1 and sent.dtypes <= narrow
            (dtype,) = sent.dtypes if is_narrow else ("",)
            self._checked_dtypes = {signature: dtype}
        schema = schemas.message.cast(dtype)
        message = _submission.message_of(
            submission, schema_hash=schema.hash, dtype=dtype, attempt=submission.attempt
        )
        arrays = _trees.host_arrays(contribution, schema)
        wanted = schemas.answer.size
        return Frame(pb.Header(message=message), schema, arrays, answer_size=wanted)

    def check_model(self, params: PyTree, worker: str) -> None:
        """Check that a worker's parameters match the center's, if it has any yet.

        Raises:
          TreeMismatchError: they do not match.
        """
        check.float_leaves(params, "parameters")
        if self.schemas is None:
            self.describe()
        if self.schemas is not None:
            dtype = "float32" if self.description.dtype else ""
            sent = _trees.schema_of(params)
            self._check_schema(sent, self.schemas.center, dtype, worker, "parameters")

    def _check_schema(
        self, sent: Schema, expected: Schema, dtype: str, worker: str, what: str
    ) -> None:
        """Check that two schemas are equal once floating leaves are cast to ``dtype``.

        Raises:
          TreeMismatchError: they differ; the message names the first difference.
        """
        difference = sent.cast(dtype).difference(
            expected.cast(dtype),
            f"worker {worker!r} has",
            f"the center at {self.address} has",
        )
        if difference:
            raise errors.TreeMismatchError(
                f"{what} of another model: {difference}. (If the center is in shards, "
                "give every worker all addresses, in the same order)"
            )

    def answer_in(
        self, header: pb.Header, link: Link, sequence: int, schema: Schema
    ) -> tuple[pb.Snapshot, list[np.ndarray]]:
        """Return the metadata and the arrays of the received answer to an exchange."""
        received = header.snapshot.sequence
        if received != sequence:
            raise errors.ProtocolError(
                f"expected an answer to exchange {sequence}, got one to {received}"
            )
        snapshot, arrays = _version_in(header, link, schema, self.address)
        self.witness = newest(self.witness, snapshot.witness)
        return snapshot, arrays

    def in_center_dtype(
        self, arrays: list[np.ndarray], schemas: WireSchemas
    ) -> list[np.ndarray]:
        """Cast arrays that were sent in a narrower dtype to that of the center."""
        schema, answer = schemas.center, schemas.answer
        if answer is schema or jax.default_backend() != "cpu":  # then `as_tree` casts
            return arrays
        buffer = self._wide_buffers.take(schema.size)
        _buffers.write(schema, arrays, buffer)
        return schema.views(buffer)

    def check_dtypes(self) -> None:
        """Raise unless JAX can represent all dtypes of the center."""
        for dtype in self.known_schemas().center.dtypes:
            if not _trees.is_representable(dtype):
                raise errors.TreeMismatchError(
                    f"the center at {self.address} sends {dtype}, which needs "
                    "jax.config.update('jax_enable_x64', True) here"
                )

    def as_tree(self, leaves: list[jax.Array], like: PyTree) -> PyTree:
        """Return leaves as a tree with the containers of ``like``."""
        self.check_dtypes()
        schema = self.known_schemas().center
        tree = _trees.build(schema, leaves, like)
        # Casting on an accelerator, and not before, moves fewer bytes to it.
        return _trees.cast(tree, schema)

    # Calls.

    def pull(self, wait: float) -> tuple[pb.Snapshot, list[np.ndarray]]:
        """Pull the current version of the center, in one attempt."""
        return pull(self.connection, lambda: self.known_schemas().center, wait)

    def initialize(self, params: PyTree | Pieces, worker: str) -> None:
        """Give the center its first parameters, or a process's pieces of them."""
        if isinstance(params, Pieces):
            schema, share = _trees.schema_of(params.share.like), params.share
            share_bytes = _pieces.to_bytes(share)
            sent = _pieces.piece_schemas(
                self.rule, schema, _pieces.in_schema_order(share)
            ).owned
            arrays = _trees.host_arrays([*params.arrays])
        else:
            schema, arrays = _trees.schema_of(params), _trees.host_arrays(params)
            share_bytes, sent = np.empty(0, np.uint8), schema
        leaves = _trees.to_bytes(schema)
        start = pb.Start(
            protocol=_address.PROTOCOL,
            worker=worker,
            schema_hash=schema.cast(self.description.dtype).hash,
            schema_size=len(leaves),
            share_size=share_bytes.size,
        )

        def attempt() -> None:
            link = GrpcLink(self.connection, "Initialize", Buffers())
            with self.connection.watching(link):
                described = [np.frombuffer(leaves + share_bytes.tobytes(), np.uint8)]
                schema_of_bytes = bytes_schema(described[0].size)
                link.send(Frame(pb.Header(start=start), schema_of_bytes, described))
                first = pb.Header(parameters=pb.Parameters())
                link.send(Frame(first, sent, arrays))
                link.end()

        try:
            self.connection.retry(attempt)
        except errors.TreeMismatchError:
            self.describe()
            like = params.share.like if isinstance(params, Pieces) else params
            self.check_model(like, worker)  # says what differs
            raise
        self.describe()

    def dial(self) -> Link:
        """Open a link for a worker's exchanges, by the first transport that works.

        Raises:
          CenterUnreachableError: none of the transports works.
        """
        failed: dict[str, OSError] = {}
        for transport in self._transports:
            offer = self._offers.get(transport.name)
            try:
                link = transport.dial(Target(self.connection, offer, self._buffers))
            except OSError as error:
                failed[transport.name] = error
            else:
                if failed:
                    _log.info("%s: transports that failed: %s", self.address, failed)
                link.transport = transport.name
                # Shared memory fails for every worker on another machine.
                if "socket" in failed and "socket" in self._offers:
                    link.detour = str(failed["socket"])
                return link
            if len(failed) == 1:  # the center may have restarted with other offers
                old_offers = self._offers
                self._set_description(self.connection.describe())
                if self._offers != old_offers:
                    return self.dial()
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise errors.CenterUnreachableError(
            f"cannot connect to the center at {self.address}: "
            f"{reasons or 'none of the transports works'}"
        )


def pull(
    connection: Connection, schema: Callable[[], Schema], wait: float = 0.0
) -> tuple[pb.Snapshot, list[np.ndarray]]:
    """Pull the current version of a center, in one attempt.

    Args:
      connection: the connection to the center.
      schema: returns the schema of the center; called once a version arrives.
      wait: seconds that the center may wait for its first parameters.

    Returns:
      The metadata and the arrays of the version.
    """
    request = iter([pb.PullRequest(wait=wait).SerializeToString()])
    link = GrpcLink(connection, "Pull", Buffers(), request)
    with connection.watching(link):
        while (header := link.read_header()).HasField("waiting"):
            pass
        return _version_in(header, link, schema(), connection.address)


def _version_in(
    header: pb.Header, link: Link, schema: Schema, address: str
) -> tuple[pb.Snapshot, list[np.ndarray]]:
    """Return the metadata and the arrays of a received version."""
    if not header.HasField("snapshot"):
        raise errors.ProtocolError("expected a snapshot, got another frame")
    if header.snapshot.schema_hash != schema.hash:
        raise errors.TreeMismatchError(
            f"the tree of the center at {address} has changed"
        )
    return header.snapshot, schema.views(link.read_buffer(schema, "an answer"))


def _abstract(leaf: Any) -> Any:
    # Most leaves are JAX arrays; jax.typeof takes ten times longer.
    return leaf.aval if isinstance(leaf, jax.Array) else jax.typeof(leaf)
