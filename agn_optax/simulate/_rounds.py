"""The rounds of simulated workers, in the programs of real ones.

`Rounds.message` makes a worker's next message: it adopts the answer to the last one,
makes the local steps of the round and encodes its contribution, by calling the programs
of `agn_optax.worker` one after another. Called directly, these are the programs that a
real worker runs. `Batches` traces the same function for many workers at once.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax._internal import trees
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.worker import programs

PyTree = Any

_WIDTH = 32  # messages that are made by one call of a program
_BATCH_BYTES = 1 << 28  # bytes of their workers


class Begin(enum.Enum):
    """The ways in which a round begins."""

    STARTED = "the worker adopts its first center"
    APPLIED = "the worker adopts the answer to a message that was applied"
    DROPPED = "the worker adopts the answer to a message that was dropped"
    REJECTED = "the worker is reset after a rejection"
    REJECTED_AGAIN = "the worker is reset after two rejections in a row"

    @property
    def resets(self) -> bool:
        """True if the worker is reset to the center."""
        return self in (Begin.REJECTED, Begin.REJECTED_AGAIN)


class Kind(NamedTuple):
    """The actions of a round."""

    begin: Begin
    is_late: bool = False  # whether the answer is adopted after further local steps
    in_background: bool = False  # whether local steps follow before the next answer


class Loop(NamedTuple):
    """A worker between its messages; fields that no later round needs are None."""

    params: PyTree
    state: PyTree  # `LocalState`, after its last message
    contribution: PyTree  # the last message
    sent: PyTree  # `rounds.Sent` of the last message
    anchor: PyTree  # anchor of the last message


class Plan(NamedTuple):
    """The local steps of a round, or arrays with those of several."""

    worker: Any  # int
    first: Any  # int: number of local steps that the worker has made before
    late: Any  # int: local steps before the answer is adopted
    steps: Any  # int: local steps after that
    batches: PyTree = None  # one for each; None if the program makes them


class Made(NamedTuple):
    """A message that was made."""

    contribution: PyTree
    loss: Any  # mean loss of its local steps
    norm: Any  # its norm; None if the message depends on the newest center


class Rounds:
    """The rounds of all workers of a run; made by `rounds_of`.

    Args:
      rule: the rule.
      inner: the inner optimizer.
      loss: parameters and a batch -> scalar.
      data: number of a worker and of its local step -> batch.
      overlap: whether messages are sent in the background.
      keeps_contribution: whether a message may be rejected.

    Attributes:
      makes_batches: whether programs can make the batches.
      data: the function, compiled if it can be.
      together: kind of the rounds, and whether all have the same plan of local steps
        -> the compiled program of `Batches`.
    """

    def __init__(
        self,
        rule: Rule,
        inner: optax.GradientTransformation,
        loss: Callable[[PyTree, PyTree], jax.Array],
        data: Callable[[Any, Any], PyTree],
        *,
        overlap: bool,
        keeps_contribution: bool,
    ) -> None:
        self.rule, self.overlap = rule, overlap
        self._programs = programs(rule, inner)
        self.makes_batches = _is_traceable(data)
        self.data = jax.jit(data) if self.makes_batches else data
        gradient = jax.value_and_grad(loss)

        def step(
            params: PyTree, state: PyTree, batch: PyTree
        ) -> tuple[PyTree, PyTree, jax.Array]:
            value, grads = gradient(params, batch)
            updates, state = self._programs.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step = jax.jit(step)
        self._keeps_contribution = (
            overlap or keeps_contribution or self._programs.restore_residual is not None
        )
        self._keeps_anchor = overlap and self._programs.holds_anchor
        self.together = functools.cache(self._together)

    def batch_like(self) -> PyTree:
        """Return the shapes and dtypes of a batch."""
        if self.makes_batches:
            return jax.eval_shape(self.data, np.int32(0), np.int32(0))
        return jax.eval_shape(lambda batch: batch, self.data(0, 0))

    def message(
        self, kind: Kind, loop: Loop | None, center: PyTree, plan: Plan
    ) -> tuple[Loop, PyTree, Any]:
        """Make the next message of a worker.

        Args:
          kind: the actions of the round.
          loop: the worker after its last message; None if it starts.
          center: the center that it adopts.
          plan: its local steps.

        Returns:
          The worker, the contribution, and the mean loss of the local steps.
        """
        run, total = self._programs, np.float32(0)
        if kind.begin is Begin.STARTED:
            params, state = run.start(center, center)
        else:
            assert loop is not None
            params, state = loop.params, loop.state
            if kind.is_late:
                params, state, total = self._steps(params, state, plan, 0, plan.late)
            params, state = self._adopt(kind, loop, params, state, center)
        params, state, later = self._steps(params, state, plan, plan.late, plan.steps)
        anchor = center if run.holds_anchor else None
        sent = None
        if kind.in_background:
            spare, *_ = run.contribute(state, params, anchor)
            copied = params if run.keeps_sent else None
            contribution, sent, state, _ = run.send(
                trees.copy((spare, copied)), params, state, anchor
            )
        else:
            contribution, codec_state, _ = run.contribute(state, params, anchor)
            state = state._replace(codec_state=codec_state)
            if self.overlap:  # every round returns the same tree
                copied = params if run.keeps_sent else None
                sent = rounds.Sent(copied, state.local_steps)
        kept = contribution if self._keeps_contribution else None
        anchor = anchor if self._keeps_anchor else None
        loss = (total + later) / _as_float(plan.late + plan.steps)
        return Loop(params, state, kept, sent, anchor), contribution, loss

    def _adopt(
        self, kind: Kind, loop: Loop, params: PyTree, state: PyTree, center: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Adopt the answer to the last message, as `FragmentWorker` does."""
        run = self._programs
        if kind.begin.resets:
            is_second = kind.begin is Begin.REJECTED_AGAIN
            residual = "discarded" if is_second else "restored"
            return run.reset(
                params, state, loop.contribution, center, residual=residual
            )
        if kind.begin is Begin.DROPPED and run.restore_residual is not None:
            state = run.restore_residual(state, loop.contribution)
        if kind.is_late:
            return run.receive(
                params, state, loop.contribution, loop.sent, loop.anchor, center
            )
        return run.adopt(params, state, center)

    def _steps(
        self, params: PyTree, state: PyTree, plan: Plan, begin: Any, count: Any
    ) -> tuple[PyTree, PyTree, Any]:
        """Make local steps of a plan, and return the sum of their losses, too."""

        def body(i: Any, carry: Any) -> Any:
            params, state, total = carry
            if plan.batches is None:
                batch = self.data(plan.worker, plan.first + i)
            else:
                batch = jax.tree.map(lambda leaf: leaf[i], plan.batches)
            params, state, loss = self._step(params, state, batch)
            return params, state, total + loss.astype(np.float32)

        carry = params, state, jnp.float32(0)
        if not isinstance(count, int):
            return jax.lax.fori_loop(begin, begin + count, body, carry)
        for i in range(begin, begin + count):
            carry = body(i, carry)
        return carry

    def start(self, params: PyTree) -> Loop:
        """Return a worker that has started, with arrays for all fields."""
        run = self._programs
        copied, state = run.start(params, params)
        contribution, _, _ = run.contribute(state, copied, params)
        sent = rounds.Sent(copied if run.keeps_sent else None, state.local_steps)
        return Loop(
            copied,
            state,
            contribution if self._keeps_contribution else None,
            sent if self.overlap else None,
            params if self._keeps_anchor else None,
        )

    def _together(self, kind: Kind, is_uniform: bool) -> Any:
        steps = None if is_uniform else 0
        batches = None if self.makes_batches else 0
        axes = (0, 0, Plan(0, 0, late=steps, steps=steps, batches=batches))

        def message(loop: Loop, center: PyTree, plan: Plan) -> Any:
            loop, contribution, loss = self.message(kind, loop, center, plan)
            norm = None
            if self.rule.message is None:
                message = rounds.message_of(self.rule, contribution, center)
                norm = optax.tree.norm(message)
            return loop, (contribution, loss, norm)

        return jax.jit(jax.vmap(message, in_axes=axes), donate_argnums=0)


@functools.lru_cache(maxsize=16)
def rounds_of(
    rule: Rule,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, PyTree], jax.Array],
    data: Callable[[Any, Any], PyTree],
    *,
    overlap: bool,
    keeps_contribution: bool,
) -> Rounds:
    """Return the rounds of all runs with these arguments, which share the programs."""
    return Rounds(
        rule,
        inner,
        loss,
        data,
        overlap=overlap,
        keeps_contribution=keeps_contribution,
    )


class OneByOne:
    """Messages made worker by worker, in the programs of `Worker` itself."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._loops: dict[int, Loop] = {}

    def make(self, kind: Kind, centers: Sequence[PyTree], plans: Sequence[Plan]) -> Any:
        """Make messages of different workers, and return them as `Made`."""
        made = []
        for center, plan in zip(centers, plans, strict=True):
            loop = self._loops.pop(plan.worker, None)
            loop, contribution, loss = self._rounds.message(kind, loop, center, plan)
            self._loops[plan.worker] = loop
            made.append(Made(contribution, loss, None))
        return made


class Batches:
    """Messages made together, by one program for a fixed number of workers.

    Args:
      rounds: the rounds.
      params: parameters of a worker.
      workers: number of workers.
      is_uniform: whether all rounds have the same plan of local steps.
      most_steps: largest number of local steps of a round.
      width: messages that are made together.
    """

    def __init__(
        self,
        rounds: Rounds,
        params: PyTree,
        workers: int,
        *,
        is_uniform: bool,
        most_steps: int,
        width: int | None,
    ) -> None:
        self._rounds, self._most_steps = rounds, most_steps
        self._is_uniform = is_uniform
        first = rounds.start(params)
        self.width = width or width_for(trees.nbytes(first), workers)
        self._padding = workers  # this row is of no worker
        # The rows of all workers: a multiple of the width, so that runs with a few more
        # workers have the same programs.
        count = -(-(workers + 1) // self.width) * self.width
        self._loops = _repeated(first, count)

    def make(self, kind: Kind, centers: Sequence[PyTree], plans: Sequence[Plan]) -> Any:
        """Make messages of different workers, and return them as `Made`."""
        made = []
        for begin in range(0, len(plans), self.width):
            part = slice(begin, begin + self.width)
            made += self._make(kind, [*centers[part]], [*plans[part]])
        return made

    def _make(self, kind: Kind, centers: list[PyTree], plans: list[Plan]) -> list[Made]:
        count = len(plans)
        missing = self.width - count
        plans = plans + [plans[0]._replace(worker=self._padding)] * missing
        centers = centers + [centers[0]] * missing
        center = _stack(centers)
        rows, firsts, late, steps = [
            np.array(column, np.int32) for column in [*zip(*plans, strict=True)][:4]
        ]
        if self._is_uniform:
            late, steps = late[0], steps[0]
        batches = None
        if not self._rounds.makes_batches:
            made = [self._batches(plan) for plan in plans[:count]]
            batches = _stack([*made, *made[:1] * missing])
        plan = Plan(rows, firsts, late, steps, batches)
        program = self._rounds.together(kind, self._is_uniform)
        loops, found = program(_rows(self._loops, rows), center, plan)
        self._loops = _with_rows(self._loops, rows, loops)
        contributions, losses, norms = jax.device_get(found)
        # Copies, as one message that waits would keep the arrays of all.
        return [
            Made(
                jax.tree.map(lambda leaf: leaf[i].copy(), contributions),  # noqa: B023
                losses[i],
                None if norms is None else norms[i],
            )
            for i in range(count)
        ]

    def _batches(self, plan: Plan) -> PyTree:
        """Return the batches of a round, and repeat the last for the longest round."""
        last = plan.late + plan.steps - 1
        made = [self._rounds.data(plan.worker, plan.first + i) for i in range(last + 1)]
        return _stack(made + made[-1:] * (self._most_steps - len(made)))


# Programs of their own, because they depend on the number of workers.
@functools.partial(jax.jit, static_argnums=1)
def _repeated(loop: Loop, count: int) -> Loop:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), loop)


@jax.jit
def _rows(loops: Loop, rows: Any) -> Loop:
    return jax.tree.map(lambda leaf: leaf[rows], loops)


@functools.partial(jax.jit, donate_argnums=0)
def _with_rows(loops: Loop, rows: Any, new: Loop) -> Loop:
    return jax.tree.map(lambda x, y: x.at[rows].set(y), loops, new)


def _is_traceable(data: Callable[[Any, Any], PyTree]) -> bool:
    """Return whether a function of integers can be traced by JAX."""
    try:
        jax.eval_shape(data, np.int32(0), np.int32(0))
    except Exception:  # an error of its own is raised again when it is called
        return False
    return True


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _as_float(count: Any) -> Any:
    return np.float32(count) if isinstance(count, int) else count.astype(np.float32)


def width_for(nbytes: int, workers: int) -> int:
    """Return the number of workers, with this many bytes each, that run together."""
    fits = max(1, _BATCH_BYTES // max(nbytes, 1))
    width = min(_WIDTH, workers, fits)
    return 1 << (width - 1).bit_length() if width == workers else width
