"""How the arrays of a worker are sharded, and its programs keep that.

A program may create arrays, such as an empty record, that depend on no sharded array;
the compiler would replicate these. So the results of a worker's programs are compiled
with the shardings of the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax import errors
from agn_optax._internal import combinations
from agn_optax.rules import Rule
from agn_optax.rules.codecs import Codec

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of a worker's parameters.

    Args:
      treedef: structure of the parameters.
      paths: paths of their leaves.
      shapes: shapes of their leaves.
      shardings: shardings of their leaves, on one mesh.
      processes: indices of the processes that have devices of the mesh.
    """

    treedef: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...]
    processes: tuple[int, ...]

    @property
    def mesh(self) -> Any:
        """The mesh of all leaves."""
        return self.shardings[0].mesh

    @property
    def spans_processes(self) -> bool:
        """True if the worker has several processes."""
        return len(self.processes) > 1

    def of(self, tree: PyTree) -> PyTree:
        """Return the shardings of a tree of a worker: parameters, state or message.

        An array has the sharding of the parameter of its shape whose path ends its own
        path. For other arrays, such as counts, it is None: the compiler decides.
        """
        leaves = zip(self.shapes, self.shardings, strict=True)
        known = dict(zip(self.paths, leaves, strict=True))

        def find(path: Any, leaf: Any) -> NamedSharding | None:
            for begin in range(len(path) + 1):
                shape, sharding = known.get(keystr(path[begin:]), (None, None))
                if shape == leaf.shape:
                    return sharding
            return None

        return jax.tree_util.tree_map_with_path(find, tree)

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compile a function like `jax.jit`, with the shardings of its results."""
        compiled: dict[Any, Callable[..., Any]] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            key = jax.tree.structure(args), *sorted(kwargs.items())
            if key not in compiled:
                abstract = jax.tree.map(_abstract, args)
                result = jax.eval_shape(
                    functools.partial(function, **kwargs), *abstract
                )
                compiled[key] = jax.jit(
                    function, out_shardings=self.of(result), **options
                )
            return compiled[key](*args, **kwargs)

        return call

    def rule(self, rule: Rule) -> Rule:
        """Return a worker's rule, whose codec encodes the piece of every device.

        Raises:
          InvalidArgumentError: the codec reads more than one leaf.
        """
        codec = rule.codec
        if not self.spans_processes or codec.reads == "element":
            return rule
        if codec.reads == "tree":
            combinations.reject(
                "a worker of several processes",
                "a codec that reads the whole tree",
                f"rule {rule.name!r} with codec {codec}",
            )
        return dataclasses.replace(rule, codec=self._piecewise(codec))

    def _piecewise(self, codec: Codec) -> Codec:
        """Return a codec that encodes what each device has by itself.

        Its messages have a row for each device. Its state has the shardings of the
        parameters where it is like them.
        """
        rows = PartitionSpec(self.mesh.axis_names)
        specs = jax.tree.unflatten(self.treedef, [s.spec for s in self.shardings])

        def specs_of(state: PyTree) -> PyTree:
            shardings = self.of(state)
            return jax.tree.map(
                lambda leaf, s: PartitionSpec() if s is None else s.spec,
                *(state, shardings),
                is_leaf=lambda node: node is None,
            )

        def on_devices(function: Any, in_specs: Any, out_specs: Any) -> Any:
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )

        def encode(contribution: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            def encode_piece(piece: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
                sent, state = codec.encode(piece, state)
                return jax.tree.map(lambda x: x[None], sent), state

            state_specs = specs_of(state)
            return on_devices(encode_piece, (specs, state_specs), (rows, state_specs))(
                contribution, state
            )

        def decode(encoded: PyTree, like: PyTree) -> PyTree:
            def decode_piece(sent: PyTree, like: PyTree) -> PyTree:
                return codec.decode(jax.tree.map(lambda x: x[0], sent), like)

            return on_devices(decode_piece, (rows, specs), specs)(encoded, like)

        def returned(encoded: PyTree, state: PyTree) -> PyTree:
            def put_back(sent: PyTree, state: PyTree) -> PyTree:
                assert codec.returned is not None
                return codec.returned(jax.tree.map(lambda x: x[0], sent), state)

            state_specs = specs_of(state)
            return on_devices(put_back, (rows, state_specs), state_specs)(
                encoded, state
            )

        return dataclasses.replace(
            codec,
            encode=encode,
            decode=decode,
            returned=None if codec.returned is None else returned,
        )


def layout_of(params: PyTree) -> Layout | None:
    """Return the layout of sharded parameters; None if every device has them in full.

    Raises:
      InvalidTypeError: some leaves are sharded over several processes, and others are
        not arrays on the same mesh.
    """
    found = [
        (keystr(path), leaf)
        for path, leaf in tree_leaves_with_path(params)
        if isinstance(leaf, jax.Array)
    ]
    is_global = any(not leaf.is_fully_addressable for _, leaf in found)
    if not is_global and all(leaf.is_fully_replicated for _, leaf in found):
        return None
    shardings = [leaf.sharding for _, leaf in found]
    treedef: Any = jax.tree.structure(params)
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    meshes = {s.mesh for s in named}
    if len(meshes) != 1 or len(named) != treedef.num_leaves:
        if not is_global:
            return None  # such as leaves on different devices of this process
        raise errors.InvalidTypeError(
            "the parameters of a worker of several processes must all be arrays with "
            "a NamedSharding on one mesh, such as jax.device_put(x, "
            "NamedSharding(mesh, PartitionSpec())) for a replicated one, got "
            + ", ".join(sorted({type(s).__name__ for s in shardings}))
            + f" on {len(meshes)} meshes, for {len(named)} of {treedef.num_leaves} "
            "leaves"
        )
    (mesh,) = meshes
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return Layout(
        treedef,
        tuple(path for path, _ in found),
        tuple(leaf.shape for _, leaf in found),
        tuple(named),
        tuple(processes),
    )


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
        )
    return leaf
