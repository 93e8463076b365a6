"""What the sessions of one remote center share: its tree, and the way there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.rules import Rule
from agn_optax.service import _address, _fingerprint
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import Connection
from agn_optax.service._tls import Tls
from agn_optax.service.transports import GrpcLink, Link, Target
from agn_optax.service.transports._dialling import Dialler
from agn_optax.service.wire import _buffers, _schema, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel

PyTree = Any


class Remote:
    """A center on the other side of a connection.

    Args:
      connection: to it.
      rule: the rule that it must run.
      transports: how exchanges may travel, the preferred way first.
      tls: what encrypts sockets; None for plain text.

    Attributes:
      connection: to it.
      address: of it.
      travelling: see `travels`; None until somebody has initialized it.
      description: what it said of itself last.
      dialler: finds the way for exchanges.
    """

    def __init__(
        self,
        connection: Connection,
        rule: Rule,
        transports: Sequence[str],
        tls: Tls | None,
    ) -> None:
        self.connection = connection
        self.address = connection.address
        self.travelling: _trees.Travelling | None = None
        self.description: pb.Description
        self._rule = rule
        self._wide_buffers = Buffers()
        target = Target(
            self.address,
            offer=None,
            tls=tls,
            is_encrypted=connection.is_encrypted,
            buffers=Buffers(),
            begin=connection.stream,
        )
        self.dialler = Dialler(transports, target)
        # The kind of contribution that was found to belong here, and its wire dtype.
        self._known: dict[Any, str] = {}

    # What it is.

    def describe(self) -> pb.Description:
        """What the center says of itself, fresh."""
        self._learn(self.connection.retry(self._ask))
        return self.description

    def travels(self) -> _trees.Travelling:
        """In which form the center's tree, messages and answers travel.

        Raises:
          NotInitializedError: nobody has initialized the center.
        """
        if self.travelling is None:
            self.describe()
        if self.travelling is None:
            raise errors.NotInitializedError(
                f"the center at {self.address} has no parameters yet: start one worker "
                "with start(params, chief=True)"
            )
        return self.travelling

    def _ask(self) -> pb.Description:
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        return self.connection.unary("Describe", request)

    def _learn(self, said: pb.Description) -> None:
        """What a center says of itself, if it is one to be used."""
        if said.protocol != _address.PROTOCOL:
            raise errors.ProtocolError(
                f"the center at {self.address} speaks version {said.protocol} of the "
                f"protocol, and this release {_address.PROTOCOL}"
            )
        _fingerprint.compare(said.rule, self._rule, self.address)
        self.description = said
        self.dialler.learn(said.offers)
        if said.HasField("schema"):
            schema = _trees.from_proto(said.schema)
            known = self.travelling
            if known is None or schema.hash != known.center.hash:
                leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in schema.leaves]
                like = _trees.build(schema, leaves)
                self._known = {}
                self.travelling = _trees.travelling(self._rule, like)

    # What travels.

    def as_message(
        self, contribution: PyTree, worker: str
    ) -> tuple[str, _schema.Schema, list[np.ndarray]]:
        """A contribution as it travels: its dtype there, schema and arrays.

        Raises:
          TreeMismatchError: it does not belong to this center.
          NotInitializedError: the center has no tree yet.
        """
        travelling = self.travels()
        leaves, treedef = jax.tree.flatten(contribution)
        kind = (treedef, *map(_abstract, leaves))
        if (dtype := self._known.get(kind)) is None:
            self._check_message(contribution, worker)
            # Narrower than the center without a loss, where the contribution is.
            own = {jnp.result_type(leaf).name for leaf in leaves}
            narrow = own.pop() if len(own) == 1 else ""
            if narrow not in ("bfloat16", "float16"):
                narrow = ""
            dtype = "" if narrow in travelling.message.dtypes else narrow
            self._known = {kind: dtype}
        schema = travelling.message.cast(dtype)
        return dtype, schema, _trees.host_arrays(contribution, schema)

    def check_model(self, params: PyTree, worker: str) -> None:
        """A worker's parameters belong to this center, if that has some already.

        Raises:
          TreeMismatchError: they do not.
        """
        check.float_leaves(params, "parameters")
        if self.travelling is None:
            self.describe()
        if self.travelling is not None:
            dtype = "float32" if self.description.dtype else ""
            own = _trees.schema_of(params)
            self._check_same(own, self.travelling.center, dtype, worker, "parameters")

    def _check_message(self, contribution: PyTree, worker: str) -> None:
        own = _trees.schema_of(contribution)
        theirs = self.travels().message
        self._check_same(own, theirs, "float32", worker, "contribution")

    def _check_same(
        self,
        own: _schema.Schema,
        theirs: _schema.Schema,
        dtype: str,
        worker: str,
        what: str,
    ) -> None:
        """Two schemas are one, if all that is floating in them had one dtype."""
        difference = own.cast(dtype).difference(
            theirs.cast(dtype),
            f"worker {worker!r} has",
            f"the center at {self.address} has",
        )
        if difference:
            raise errors.TreeMismatchError(
                f"{what} of another model: {difference}. (Of a center in shards, every "
                "worker must have all addresses, in one order)"
            )

    def answer_in(
        self, said: pb.Frame, link: Link
    ) -> tuple[pb.Snapshot, list[np.ndarray]]:
        """The center as a worker gets it back: what is said of it, and its arrays."""
        return self._version_in(said, link, self.travels().answer)

    def _version_in(
        self, said: pb.Frame, link: Link, schema: _schema.Schema
    ) -> tuple[pb.Snapshot, list[np.ndarray]]:
        if not said.HasField("snapshot"):
            raise errors.ProtocolError("a snapshot was expected, got another packet")
        if said.snapshot.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                f"the center at {self.address} holds another tree than it did before"
            )
        return said.snapshot, schema.views(link.buffer(schema, "an answer"))

    def widened(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """What travelled narrow, as wide as the center again, its values rounded."""
        schema, _, answer = self.travels()
        if answer is schema or jax.default_backend() != "cpu":  # `as_tree` does it
            return arrays
        buffer = self._wide_buffers.take(schema.size)
        _buffers.write(schema, arrays, buffer)
        return schema.views(buffer)

    def as_tree(self, leaves: list[jax.Array], like: PyTree) -> PyTree:
        """What came, in the containers of ``like``."""
        schema = self.travels().center
        for dtype in schema.dtypes:
            if jax.dtypes.canonicalize_dtype(dtype).name != dtype:
                raise errors.TreeMismatchError(
                    f"the center at {self.address} sends {dtype}, which needs "
                    "jax.config.update('jax_enable_x64', True) here"
                )
        tree = _trees.build(schema, leaves, like)
        # On the device, where that is an accelerator: fewer bytes go there.
        return _trees.cast(tree, schema)

    # How it gets there.

    def pull(self, wait: float) -> tuple[pb.Snapshot, list[np.ndarray]]:
        """One version of the center, in one attempt."""
        request = pb.PullRequest(wait=wait)

        def begin(channel: Any, _: Any) -> Any:
            return channel.unary_stream(
                f"/{_address.SERVICE}/Pull",
                request_serializer=pb.PullRequest.SerializeToString,
            )(request)

        link = self._grpc_link(begin)
        with self.connection.watching(link):
            while (said := link.control()).HasField("waiting"):
                pass
            return self._version_in(said, link, self.travels().center)

    def initialize(self, params: PyTree, worker: str) -> None:
        """Gives the center its first parameters."""
        schema, arrays = _trees.schema_of(params), _trees.host_arrays(params)
        start = pb.Start(
            protocol=_address.PROTOCOL, worker=worker, schema=_trees.to_proto(schema)
        )

        def begin(channel: Any, messages: Iterator[bytes]) -> Any:
            return channel.stream_unary(
                f"/{_address.SERVICE}/Initialize",
                response_deserializer=pb.Initialized.FromString,
            ).future(messages)

        def attempt() -> None:
            link = self._grpc_link(begin)
            with self.connection.watching(link):
                link.send(Parcel(pb.Frame(start=start), schema, arrays))
                link.no_more()
                link.result()

        self.connection.retry(attempt)
        self.describe()

    def _grpc_link(self, begin: Callable[[Any, Iterator[bytes]], Any]) -> GrpcLink:
        """A call that ``begin(channel, messages)`` begins, and that is made once."""

        def begun(messages: Iterator[bytes]) -> Any:
            return self.connection.begin(lambda channel: begin(channel, messages))

        return GrpcLink(begun, self.address, Buffers(keeps=False))

    def dial(self) -> Link:
        """A way to the center, for a worker's exchanges."""
        return self.dialler.dial(lambda: self._learn(self._ask()))


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # as most are; the other way takes ten times longer
        return leaf.aval
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
