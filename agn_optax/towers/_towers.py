"""The class `Towers`: local devices, or a mesh over hosts, as one or many workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.round import OnHost, collectives
from agn_optax.round import center_params as _center_params
from agn_optax.towers import _batches, _evaluate, _mesh, _programs, _replicas, _rows

PyTree = Any


class Towers:
    """The devices of a mesh, and the programs that run on all of them.

    A mesh has an axis of workers and an axis of towers. The towers of one worker are
    data-parallel: `all_reduce` over ``axis_name`` reduces their gradients. Each worker
    has its own parameters, and workers exchange by a rule over ``worker_axis``.
    Therefore one optimizer and one ``train_step`` serve all modes::

        tx = optax.chain(
            agn_optax.all_reduce("towers"),
            agn_optax.agn(optax.adam(1e-3), period=10, axis_name="workers"),
        )
        Towers()                # data parallel: one worker of all devices
        Towers(workers=8)       # independent: each of 8 devices is a worker
        Towers(workers=2)       # islands: 2 workers of 4 towers each

    Collectives over an axis of one member are not compiled. State has one replica per
    tower, stacked along a new first dimension, so that every device holds one replica.

    Args:
      devices: None for all devices of this process (its accelerators, or else the CPU);
        a number of devices of this process; a list of devices, such as
        ``jax.devices()`` for the devices of all processes; or a `jax.sharding.Mesh`
        of ``axis_name``, or of ``worker_axis`` and then ``axis_name``.
      workers: number of workers, which must divide the number of devices; None for one
        worker, or for the size of the mesh's worker axis.
      axis_name: axis of the towers of a worker. A tuple of axes for a mesh that has
        several (``("hosts", "towers")`` for a hierarchical `all_reduce`).
      worker_axis: axis of the workers.

    Attributes:
      mesh: the mesh, with the axes ``worker_axis`` and then ``axis_name``.
      size: number of towers of all workers.
      workers: number of workers.

    Raises:
      InvalidArgumentError: there are too few devices, or ``workers`` does not divide
        their number, or the mesh has other axes.
      InvalidTypeError: ``devices`` has another type.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> towers = agn_optax.Towers()
      >>> tx = optax.chain(agn_optax.all_reduce("towers"), optax.sgd(0.5))
      >>> def train_step(state, batch):
      ...     params, opt_state = state
      ...     objective = lambda p: jnp.mean((p - batch) ** 2)
      ...     loss, grads = jax.value_and_grad(objective)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), loss
      >>> step = towers.step(train_step)
      >>> params = jnp.zeros(())
      >>> state = towers.replicate((params, tx.init(params)))
      >>> batch = towers.shard(jnp.arange(16.0))
      >>> state, losses = step(state, batch)  # one loss per tower
      >>> params, opt_state = towers.unreplicate(state)
      >>> print(params, bool(towers.towers_agree(state)))
      7.5 True
    """

    def __init__(
        self,
        devices: int | Sequence[Any] | Mesh | None = None,
        *,
        workers: int | None = None,
        axis_name: str | tuple[str, ...] = "towers",
        worker_axis: str = "workers",
    ) -> None:
        self.axis_name = axis_name
        self.worker_axis = worker_axis
        self._tower_axes = collectives.names(axis_name)
        self.mesh = _mesh.make(devices, workers, self._tower_axes, worker_axis)
        self.size: int = self.mesh.size
        self.workers: int = self.mesh.shape[worker_axis]
        self._local_towers = len(self.mesh.local_devices)
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._create_program = self._cached(_programs.create)
        self._sums_program = self._cached(_evaluate.sums)
        self._outputs_program = self._cached(_evaluate.outputs)
        self._unstack_program = self._cached(_unstack_program)
        self._mean_of_rows = jax.jit(
            _replicas.mean_of_rows, out_shardings=self._replicated
        )
        self._first_row = jax.jit(_programs.row, out_shardings=self._replicated)
        self._whole_center = jax.jit(
            _programs.per_tower(
                self.mesh,
                lambda state: _center_params(_programs.row(state)),
                _programs.rows(self.mesh),
                PartitionSpec(),
            )
        )

    def _cached(self, make: Callable[[Mesh, Any], Any]) -> Callable[[Any], Any]:
        """Return ``function -> make(mesh, function)``, which caches the programs."""
        return functools.lru_cache(64)(functools.partial(make, self.mesh))

    def __repr__(self) -> str:
        """Show the number of workers, the towers of each, and the platform."""
        towers, platform = self.size // self.workers, self.mesh.devices.flat[0].platform
        return f"Towers({self.workers} x {towers} {platform})"

    # State: one replica per tower.

    @_mesh.on_own_mesh
    def create(self, make: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Create state on every tower, with the axes of the mesh bound.

        Use it for state that differs between towers: optimizers with a sharded center
        (`Placement`) can only be initialized here.

        Args:
          make: ``make(*arguments) -> state``. It is compiled once; pass the same
            function object to use the compiled program again.
          arguments: pytrees, the same for every tower.

        Returns:
          The state, one row per tower. Typed random keys in it are folded with the
          index of the tower, except those of tower 0.

        Raises:
          InvalidArgumentError: the state has a center that differs between towers.

        Example:
          >>> import jax.numpy as jnp, optax, agn_optax
          >>> towers = agn_optax.Towers(2)
          >>> state = towers.create(optax.adam(0.1).init, jnp.zeros(3))
          >>> state[0].mu.shape
          (2, 3)
        """
        _check_function(make, "make")
        state = self._create_program(make)(*self._put_on_all(arguments))
        if make is not _replicas.one_tower:  # which makes equal centers
            _replicas.check_centers(state)
        return state

    def replicate(self, state: PyTree) -> PyTree:
        """Copy ``state`` to every tower; ``state`` itself stays valid.

        On a mesh that spans processes, the values of process 0 are used.

        Args:
          state: any pytree of arrays and numbers, such as a ``TrainState``; or a state
            that `unreplicate` returned.

        Returns:
          The same tree, whose leaves have a new first dimension of one row per tower.
          Typed random keys (`jax.random.key`) are folded with the index of the tower,
          except those of tower 0, so that towers draw different dropout masks.

        Raises:
          InvalidTypeError: a leaf, which the error names, is neither array nor number.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> agn_optax.Towers(2).replicate({"w": jnp.ones(3)})["w"].shape
          (2, 3)
        """
        check.array_leaves(state, "state")
        state = _replicas.cut_again(state, self.mesh.shape)
        return self.create(_replicas.one_tower, state)

    @_mesh.on_own_mesh
    def unreplicate(self, state: PyTree) -> PyTree:
        """Return the values of tower 0, which is the state to save.

        A sharded center is returned in its pieces, each once, and so are its
        optimizer's state and the record; `replicate` restores them on any number of
        towers. For gradients in flight (``all_reduce(delay=1)``) the mean is returned,
        and if every worker has its own center (``gossip``), the mean of these centers.

        Other values that differ between towers are lost: the inner states of all
        independent workers but the first, and random keys that towers have advanced
        since `replicate`. (To resume with the same random numbers, fold a step counter
        into a key that does not change.)

        Args:
          state: a state that `replicate` or a step returned.

        Returns:
          The tree without its first dimension, in new memory.

        Raises:
          TreeMismatchError: a leaf does not have a row for each tower.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> towers = agn_optax.Towers(2)
          >>> towers.unreplicate(towers.replicate({"w": jnp.ones(3)}))["w"].shape
          (3,)
        """
        _replicas.check_stacked(state, self.size)

        def first(node: Any) -> Any:
            if isinstance(node, _replicas.PerTower):
                rows = jax.device_put(node.rows, jax.memory.Space.Device)
                return _replicas.PerTower(
                    self._unstack_program(node.axes)(rows), node.axes
                )
            if isinstance(node, _replicas.Mean):
                towers = self.size if node.of_workers else self.size // self.workers
                rows = jax.tree.map(lambda x: x[:towers], node.rows)
                return self._mean_of_rows(jax.device_put(rows, jax.memory.Space.Device))
            if self.mesh.is_multi_process:
                return self._first_row(node)
            shards = node.addressable_shards
            row = next(s.data for s in shards if not s.index[0].start)
            on_device = row.sharding.memory_kind == row.device.default_memory().kind
            return row[0] if on_device else np.asarray(row)[0].copy()

        return jax.tree.map(
            first, _replicas.mark_differing(state), is_leaf=_replicas.is_marked
        )

    @_mesh.on_own_mesh
    def towers_agree(self, state: PyTree) -> _replicas.Agreement:
        """Return whether the towers of each worker have the same state, bit for bit.

        Leaves that differ on purpose are not compared: typed random keys, pieces of a
        sharded center, and gradients in flight (``all_reduce(delay=1)``).

        Args:
          state: a state that `replicate` or a step returned.

        Returns:
          An object that is true if the towers agree. Its ``differs`` is the path of the
          first leaf that differs, which its ``str`` shows too.

        Raises:
          TreeMismatchError: a leaf does not have a row for each tower.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> towers = agn_optax.Towers(2)
          >>> state = towers.replicate({"w": jnp.zeros(3)})
          >>> state["w"] = state["w"].at[1, 0].set(1.0)
          >>> print(towers.towers_agree(state))
          towers differ, first in state['w']
        """
        _replicas.check_stacked(state, self.size)
        return _replicas.agreement(state, self.workers)

    @_mesh.on_own_mesh
    def mean(self, tree: PyTree) -> PyTree:
        """Return the mean over all towers, for metrics or batch statistics.

        For batch statistics that differ between towers, use
        ``towers.replicate(towers.mean(state.batch_stats))``.

        Args:
          tree: pytree whose leaves have a row for each tower.

        Returns:
          The tree without its first dimension, the same in every process. Leaves that
          are not floating arrays, such as integers, are those of tower 0.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> print(agn_optax.Towers(2).mean(jnp.array([1.0, 3.0])))
          2.0
        """
        _replicas.check_stacked(tree, self.size)
        return self._mean_of_rows(tree)

    @_mesh.on_own_mesh
    def center_params(self, opt_state: PyTree) -> PyTree:
        """Return the whole center from an optimizer state with a replica per tower.

        Args:
          opt_state: state of one of this package's optimizers, or a state that contains
            it (a ``TrainState``), as returned by `replicate` or a step.

        Returns:
          The center, without a dimension of towers, the same in every process.

        Raises:
          CenterNotFoundError, AmbiguousCenterError: see `agn_optax.center_params`.

        Example:
          >>> import jax.numpy as jnp, optax, agn_optax
          >>> towers = agn_optax.Towers(2)
          >>> tx = agn_optax.agn(optax.sgd(0.1), period=4)
          >>> state = towers.replicate(tx.init(jnp.array([1.0, 2.0])))
          >>> print(towers.center_params(state))
          [1. 2.]
        """
        _replicas.check_stacked(opt_state, self.size)
        return self._whole_center(opt_state)

    # Data: rows for every tower.

    @_mesh.on_own_mesh
    def shard(self, batch: PyTree) -> PyTree:
        """Distribute the rows of a batch equally over the towers.

        On a mesh that spans processes, each process gives the rows of its own towers,
        the same number in each process (which is not checked, because a check would
        cost a message per batch).

        Args:
          batch: pytree of arrays with rows along dimension 0 (nested dictionaries,
            registered dataclasses, None for absent labels), and of sparse matrices
            (`jax.experimental.sparse.BCOO` with ``n_batch=0``). In a step, each tower
            gets its own rows, also of sparse matrices.

        Returns:
          The batch on the mesh.

        Raises:
          InvalidArgumentError: the number of rows is not divisible by the number of
            towers (`shard_padded` pads them), or differs between leaves, or there are
            no rows.

        Example:
          >>> import numpy as np, agn_optax
          >>> towers = agn_optax.Towers(2)
          >>> batch = towers.shard({"image": np.zeros((4, 28)), "label": None})
          >>> batch["image"].sharding.shard_shape(batch["image"].shape)
          (2, 28)
        """
        _batches.check_divisible(batch, self._local_towers)
        return _batches.put_rows(_batches.split_sparse(batch, self.mesh), self.mesh)

    @_mesh.on_own_mesh
    def shard_padded(self, batch: PyTree) -> tuple[PyTree, jax.Array]:
        """Pad a batch of any number of rows and `shard` it, with a mask of real rows.

        Give the mask to `reduce_loss` as ``weights``, so that padding does not count in
        the loss and its gradient.

        Args:
          batch: see `shard`.

        Returns:
          The batch, padded with copies of its last row (sparse matrices with empty
          rows), and a float32 mask ``[rows]``, 1 for real rows and 0 for padding.

        Example:
          >>> import numpy as np, agn_optax
          >>> batch, mask = agn_optax.Towers(2).shard_padded(np.array([1.0, 2.0, 3.0]))
          >>> print(batch, mask)
          [1. 2. 3. 3.] [1. 1. 1. 0.]
        """
        rows = _batches.rows_of(batch)
        counts = _batches.gather_from_processes(self.mesh, rows)
        if not min(counts):  # raised in all processes, or others would wait
            raise errors.InvalidArgumentError(
                f"batch has no rows: {rows} here, {counts} in all processes"
            )
        padded = -(-max(counts) // self._local_towers) * self._local_towers
        mask = (np.arange(padded) < rows).astype(np.float32)
        batch = self.shard(_batches.pad(batch, padded))
        return batch, _batches.put_rows(mask, self.mesh)

    # Programs.

    def step(
        self,
        train_step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        *,
        donate: bool = True,
    ) -> _programs.MeshProgram:
        """Compile a training step for all towers.

        Args:
          train_step: ``(state, batch) -> (state, metrics)`` for one tower, with its own
            replica and its own rows; the axes of the mesh are bound. A train step for
            one device works unchanged, except for an `all_reduce` in its optimizer.
          donate: whether the memory of the input state is reused for the output state;
            the input state is then invalid.

        Returns:
          ``(state, batch) -> (state, metrics)``, compiled at its first call, with the
          ``lower`` of a jitted function. The state comes from `replicate`, the batch
          from `shard`, and each metric has a row for every tower.

        Raises:
          InvalidArgumentError: (when called) a worker has several towers, but
            ``train_step`` has no collective over their axis; or the state was already
            donated; or the batch does not have rows for every tower.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> towers = agn_optax.Towers(workers=len(jax.devices()))
          >>> step = towers.step(lambda state, batch: (state + batch.sum(), state))
          >>> state = towers.replicate(jnp.zeros(()))
          >>> state, metrics = step(state, towers.shard(jnp.ones(16)))
          >>> print(towers.mean(state))
          2.0
        """

        def one_step(state: PyTree, batch: PyTree) -> Any:
            own = _rows.take_own_rows(batch)
            state, metrics = _programs.call_checked(
                train_step, self._tower_axes, state, own
            )
            return state, metrics

        rows = _programs.rows(self.mesh)
        return _programs.apply(self.mesh, one_step, rows, donate=donate)

    def apply(
        self, function: Callable[[PyTree], PyTree], *, donate: bool = True
    ) -> _programs.MeshProgram:
        """Compile a function of the state alone for all towers.

        Use it for functions that are not train steps, such as the exchange of `phases`
        or a moving average of weights.

        Args:
          function: ``state -> state`` for one tower; the axes of the mesh are bound.
          donate: see `step`.

        Returns:
          ``state -> state``, a program like that of `step`; the state comes from
          `replicate`.

        Example:
          >>> import jax, jax.numpy as jnp, agn_optax
          >>> towers = agn_optax.Towers()
          >>> halve = towers.apply(lambda state: jax.tree.map(lambda x: x / 2, state))
          >>> print(towers.unreplicate(halve(towers.replicate(jnp.array(8.0)))))
          4.0
        """
        return _programs.apply(self.mesh, function, donate=donate)

    @_mesh.on_own_mesh
    def evaluate(self, metric_fn: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        r"""Return the mean metrics of a data set, in which every row counts equally.

        .. math:: \frac{\sum_j m_j}{\sum_j 1}

        over the rows of all batches and towers; it is not a mean of means. Padding rows
        do not count. Nothing is kept between calls.

        Args:
          metric_fn: ``(*arguments, batch) -> metrics``: a pytree of arrays ``[rows,
            ...]``, one value per row. It is compiled once; pass the same function
            object to use the compiled program again.
          arguments: arguments of ``metric_fn``, the same on every tower (parameters of
            the center, or those from `unreplicate`). The last argument is the batch, of
            any number of rows; or a data loader or iterator of batches
            (``iter(list_of_batches)``, because a list itself is one batch). On a mesh
            that spans processes, each process gives its own data, the same number of
            batches in each.

        Returns:
          The metrics as floats (or arrays if a row has several values), the same in
          every process.

        Raises:
          InvalidArgumentError: a metric does not have one value per row, or there is no
            data.

        Example:
          >>> import numpy as np, agn_optax
          >>> def metrics(threshold, x):
          ...     return {"above": x > threshold}
          >>> towers = agn_optax.Towers(2)
          >>> batches = iter([np.array([1.0, 2.0, 3.0]), np.array([4.0])])
          >>> print(towers.evaluate(metrics, 1.5, batches))
          {'above': 0.75}
        """
        *constant, data = _checked_arguments(metric_fn, "metric_fn", arguments)
        placed = self._put_on_all(tuple(constant))
        program = self._sums_program(metric_fn)
        parts = []
        for batch in data if _is_loader(data) else [data]:
            padded, mask = self.shard_padded(batch)
            parts.append(program(placed, padded, mask > 0))
        if not parts:
            raise errors.InvalidArgumentError("there are no batches to evaluate on")
        return _evaluate.combine(parts)

    @_mesh.on_own_mesh
    def predict(self, fn: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Compute outputs for every row of a batch, in order, on all towers.

        Args:
          fn: ``(*arguments, batch) -> outputs``: a pytree (classes, scores, ...) of
            arrays ``[rows, ...]``. It is compiled once; pass the same function object
            to use the compiled program again.
          arguments: arguments of ``fn``, the same on every tower; the last one is the
            batch, of any number of rows.

        Returns:
          The outputs on the host, numpy arrays ``[rows, ...]``. On a mesh that spans
          processes, the outputs for the rows that this process gave.

        Raises:
          InvalidArgumentError: an output does not have one value per row.

        Example:
          >>> import numpy as np, agn_optax
          >>> double = lambda x: {"doubled": 2 * x}
          >>> print(agn_optax.Towers(2).predict(double, np.array([1.0, 2.0, 3.0])))
          {'doubled': array([2., 4., 6.], dtype=float32)}
        """
        *constant, batch = _checked_arguments(fn, "fn", arguments)
        rows = _batches.rows_of(batch)
        padded, mask = self.shard_padded(batch)
        outputs = self._outputs_program(fn)(
            self._put_on_all(tuple(constant)), padded, mask > 0
        )

        def local_rows(leaf: jax.Array) -> Any:
            shards = sorted(
                leaf.addressable_shards, key=lambda s: s.index[0].start or 0
            )
            return _batches.concatenate([s.data for s in shards])[:rows]

        return jax.tree.map(local_rows, outputs)

    def _put_on_all(self, arguments: PyTree) -> PyTree:
        """Put ``arguments`` on every tower, with the values of process 0."""
        if self.mesh.is_multi_process:
            arguments = _batches.broadcast_from_first_process(arguments)
        return _put_nodes(arguments, self._replicated)


def _put_nodes(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Put ``tree`` on the mesh; pieces go to their towers, `OnHost` to host memory."""

    def is_special(node: Any) -> bool:
        return isinstance(node, _replicas.PerTower | OnHost) and node is not tree

    def put(node: Any) -> Any:
        if is_special(node):
            return _put_nodes(node, node.sharding(sharding))
        return _batches.put(node, sharding)

    return jax.tree.map(put, tree, is_leaf=is_special)


def _unstack_program(mesh: Mesh, axes: collectives.Axes) -> Callable[[PyTree], PyTree]:
    """Compile `_replicas.unstack_rows` for some axes."""
    return jax.jit(
        lambda rows: _replicas.unstack_rows(rows, axes, mesh.shape),
        out_shardings=NamedSharding(mesh, PartitionSpec(*axes)),
    )


def _is_loader(data: Any) -> bool:
    """Return whether ``data`` is an iterable of batches; lists are single batches."""
    if isinstance(data, Iterator):
        return True
    is_leaf = all(leaf is data for leaf in jax.tree.leaves(data))
    return is_leaf and isinstance(data, Iterable) and not hasattr(data, "shape")


def _check_function(function: Any, what: str) -> None:
    """Raise unless ``function`` is hashable, as the cache of programs needs."""
    try:
        hash(function)
    except TypeError:
        raise errors.InvalidTypeError(
            f"{what} must be hashable, such as a plain function, got "
            f"{check.show(function)}"
        ) from None


def _checked_arguments(
    function: Any, what: str, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the arguments of a function after a check; the last one is a batch."""
    if not arguments:
        raise errors.InvalidArgumentError(
            "the last argument must be the batch, got no arguments"
        )
    _check_function(function, what)
    return arguments
