"""The shardings of a worker's arrays, which its programs keep.

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
from agn_optax._internal import check, combinations
from agn_optax.rules import Rule, codecs

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ParamShardings:
    """The shardings of a worker's parameters.

    Args:
      treedef: structure of the parameters.
      paths: paths of their leaves.
      shapes: shapes of their leaves.
      of_leaves: shardings of their leaves, on one mesh.
      processes: indices of the processes that have devices of the mesh.
    """

    treedef: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    of_leaves: tuple[NamedSharding, ...]
    processes: tuple[int, ...]

    @property
    def mesh(self) -> Any:
        """The mesh of all leaves."""
        return self.of_leaves[0].mesh

    @property
    def spans_processes(self) -> bool:
        """True if the worker has several processes."""
        return len(self.processes) > 1

    def of(self, tree: PyTree) -> PyTree:
        """Return the shardings of a tree of a worker: parameters, state or message.

        An array has the sharding of the parameter of its shape whose path ends its own
        path. For other arrays, such as counts, it is None: the compiler decides.
        """
        leaves = zip(self.shapes, self.of_leaves, strict=True)
        known = dict(zip(self.paths, leaves, strict=True))

        def find(path: Any, leaf: Any) -> NamedSharding | None:
            for begin in range(len(path) + 1):
                shape, sharding = known.get(keystr(path[begin:]), (None, None))
                if shape == leaf.shape:
                    return sharding
            return None

        return jax.tree_util.tree_map_with_path(find, tree)

    def placed(self, tree: PyTree) -> PyTree:
        """Return an abstract tree with its shardings; other arrays are replicated."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding or everywhere
            ),
            *(tree, self.of(tree)),
        )

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

    def by_device(self, function: Callable[[PyTree], jax.Array], tree: PyTree) -> Any:
        """Return a function's results for what each device has of a tree, stacked."""
        return jax.shard_map(
            lambda own: function(own)[None],
            mesh=self.mesh,
            in_specs=(self._specs_of(tree),),
            out_specs=PartitionSpec(self.mesh.axis_names),
            check_vma=False,
        )(tree)

    def encodes_pieces(self, rule: Rule) -> bool:
        """Return whether each device's piece is encoded by itself, see `rule`."""
        return self.spans_processes and rule.codec.reads != "element"

    def rule(self, rule: Rule) -> Rule:
        """Return a worker's rule, whose codec encodes the piece of every device.

        Raises:
          InvalidArgumentError: the codec reads more than one leaf.
        """
        codec = rule.codec
        if not self.encodes_pieces(rule):
            return rule
        if codec.reads == "tree":
            combinations.reject(
                "a worker of several processes",
                "a codec that reads the whole tree",
                f"rule {rule.name!r} with codec {codec}",
            )
        own = codecs.by_pieces(codec, self._on_devices)
        return dataclasses.replace(rule, codec=own)

    def _on_devices(
        self,
        function: Callable[..., Any],
        of_arguments: tuple[str, ...],
        of_results: Any,
        arguments: tuple[PyTree, ...],
    ) -> Any:
        """Call a function of a codec for what each device has: see `codecs.by_pieces`.

        Encoded contributions have a row for each device. A state has the shardings of
        the parameters where it is like them.
        """
        given = dict(zip(of_arguments, arguments, strict=True))
        specs = {
            "params": jax.tree.unflatten(
                self.treedef, [sharding.spec for sharding in self.of_leaves]
            ),
            "sent": PartitionSpec(self.mesh.axis_names),
            "state": self._specs_of(given.get("state")),
        }

        def call(*pieces: PyTree) -> Any:
            without_rows = [
                jax.tree.map(lambda x: x[0], piece) if kind == "sent" else piece
                for kind, piece in zip(of_arguments, pieces, strict=True)
            ]
            results = function(*without_rows)
            if of_results == ("sent", "state"):
                sent, state = results
                return jax.tree.map(lambda x: x[None], sent), state
            return results

        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=tuple(specs[kind] for kind in of_arguments),
            out_specs=jax.tree.map(lambda kind: specs[kind], of_results),
            check_vma=False,
        )(*arguments)

    def _specs_of(self, state: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf, s: PartitionSpec() if s is None else s.spec,
            *(state, self.of(state)),
            is_leaf=lambda node: node is None,
        )


def shardings_of(params: PyTree) -> ParamShardings | None:
    """Return the shardings of parameters; None if every device has them in full.

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
    return ParamShardings(
        treedef,
        tuple(path for path, _ in found),
        tuple(leaf.shape for _, leaf in found),
        tuple(named),
        tuple(processes),
    )


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not check.is_traced(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
        )
    return leaf
