"""The rounds of simulated workers, in the programs of real ones.

`Rounds.stretch` lets a worker train up to its next message: it adopts an answer, makes
local steps and encodes a contribution, by calling the programs of `agn_optax.worker`
one after another. Called directly, these are the programs that a real worker runs.
`Batches` traces the same function for many workers at once.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from agn_optax._internal import check, trees
from agn_optax.round import Fragments
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.worker import (
    NO_INNER,
    FragmentedModel,
    WholeModel,
    programs,
)

PyTree = Any

_WIDTH = 32  # stretches that are made by one call of a program
_BATCH_BYTES = 1 << 28  # bytes of their workers
_FIRST = np.int32(0), np.int32(0)  # the first batch
# In place of the center optimizer, which workers do not call.
_NO_CENTER = optax.with_extra_args_support(optax.identity())


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
    """The actions of a stretch: local steps, an adoption, local steps, a message."""

    begin: Begin | None  # how an answer is adopted; None if none is
    adopts: int = 0  # its fragment
    is_late: bool = False  # whether it is adopted after further local steps
    sends: int | None = 0  # fragment of the message; None without a message
    in_background: bool = False  # whether local steps follow before the answer

    @property
    def reads_anchor(self) -> bool:
        """True if the anchor of the message is not among what is adopted."""
        if self.sends is None or self.begin is Begin.STARTED:
            return False
        return self.begin is None or self.adopts != self.sends


class Loop(NamedTuple):
    """A worker between two stretches."""

    params: PyTree
    state: PyTree  # `LocalState`, or `StreamingState`
    # `rounds.Sent` of the last message of each fragment; None unless some are sent in
    # the background.
    sent: PyTree


class Inputs(NamedTuple):
    """Arrays that a stretch reads; those that it does not need are None."""

    centers: PyTree  # what is adopted; of all fragments if the worker starts
    contribution: PyTree  # the message to which the adopted center is the answer
    sent_anchor: PyTree  # the anchor of that message
    anchor: PyTree  # the anchor of the message to be made


class Plan(NamedTuple):
    """The local steps of a stretch, or arrays with those of several."""

    worker: Any  # int
    first: Any  # int: number of local steps that the worker has made before
    late: Any  # int: local steps before the answer is adopted
    steps: Any  # int: local steps after that
    batches: PyTree = None  # one for each; None if the program makes them
    data: Any = None  # `Partial` that makes them; None for `Rounds.data`


class Made(NamedTuple):
    """The results of a stretch."""

    contribution: PyTree  # None without a message
    loss: Any  # sum over its local steps
    norm: Any  # norm of the message; None if it depends on the newest center


class Rounds:
    """The rounds of all workers of a run; made by `rounds_of`.

    Args:
      rule: the rule.
      inner: the inner optimizer.
      loss: parameters and a batch -> scalar.
      fragments: the fragments; None without.
      in_background: whether some messages are sent in the background.

    Attributes:
      data: number of a worker and of its local step -> batch; compiled if it can be.
      source: the same as an argument of programs that make batches; None if none do.
      batch_like: shapes and dtypes of the first batch.
      holds_anchor: whether messages need an anchor that the state does not keep.
      has_residual: whether dropped messages are added to the residual of the codec.
      together: kind of the stretches, and whether all have the same plan of local steps
        -> the compiled program of `Batches`.
    """

    def __init__(
        self,
        rule: Rule,
        inner: optax.GradientTransformation,
        loss: Callable[[PyTree, PyTree], jax.Array],
        *,
        fragments: Fragments | None,
        in_background: bool,
    ) -> None:
        self.rule, self._in_background = rule, in_background
        self._model: WholeModel | FragmentedModel
        if fragments is None:
            self._programs = programs(rule, inner)
            self._model = WholeModel(self._programs.tx)
        else:
            self._programs = programs(rule, NO_INNER, fragments.delay, fragments.mixing)
            self._model = FragmentedModel(
                fragments, lambda: [self._programs] * len(fragments), rule, inner
            )
        self.holds_anchor = self._programs.holds_anchor
        self.has_residual = self._programs.restore_residual is not None
        self.data: Callable[[Any, Any], PyTree]
        self.source: Partial | None
        self.batch_like: PyTree
        self._call = jax.jit(lambda data, worker, step: data(worker, step))
        gradient = jax.value_and_grad(loss)

        def step(
            params: PyTree, state: PyTree, batch: PyTree
        ) -> tuple[PyTree, PyTree, jax.Array]:
            value, grads = gradient(params, batch)
            updates, state = self._model.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step = jax.jit(step)
        self.together = functools.cache(self._together)

    def shared(
        self, rule: Rule, data: Callable[[Any, Any], PyTree], *, is_traceable: bool
    ) -> Rounds:
        """Return rounds that share the programs, with this rule and these batches."""
        rounds = copy.copy(self)
        rounds.rule = rule
        if is_traceable:
            rounds.source = _partial(data)
            rounds.data = functools.partial(self._call, rounds.source)
            first = self._call.eval_shape(rounds.source, *_FIRST)
        else:
            rounds.source, rounds.data = None, data
            first = jax.eval_shape(lambda batch: batch, data(0, 0))
        rounds.batch_like = first
        return rounds

    def stretch(
        self, kind: Kind, loop: Loop | None, inputs: Inputs, plan: Plan
    ) -> tuple[Loop, PyTree, Any]:
        """Let a worker train until its next message, or until it adopts an answer.

        Args:
          kind: the actions of the stretch.
          loop: the worker after its last stretch; None if it starts.
          inputs: further arrays.
          plan: its local steps.

        Returns:
          The worker, the contribution, and the sum of the losses of its local steps.
        """
        total: Any = np.float32(0)
        if kind.begin is Begin.STARTED:
            loop = self.start(inputs.centers)
        assert loop is not None
        if kind.is_late:
            loop, total = self._steps(loop, plan, 0, plan.late)
        if kind.begin not in (None, Begin.STARTED):
            loop = self._adopt(kind, loop, inputs)
        loop, later = self._steps(loop, plan, plan.late, plan.steps)
        contribution = None
        if kind.sends is not None:
            anchor = self._anchor(kind, inputs)
            loop, contribution = self._send(kind, loop, anchor)
        return loop, contribution, total + later

    def start(self, centers: Sequence[PyTree]) -> Loop:
        """Return a worker that has adopted its first center."""
        run = self._programs
        loops = [run.start(center, center) for center in centers]
        sent = tuple(self._sent(*each) for each in loops)
        return Loop(*self._model.join(loops, None), sent)

    def _sent(self, params: PyTree, state: PyTree) -> PyTree:
        """Return a record of a message that is not sent in the background."""
        if not self._in_background:
            return None
        copied = params if self._programs.keeps_sent else None
        return rounds.Sent(copied, state.local_steps)

    def _adopt(self, kind: Kind, loop: Loop, inputs: Inputs) -> Loop:
        """Adopt the answer to the last message, as `FragmentWorker` does."""
        run, begin, whole = self._programs, kind.begin, (loop.params, loop.state)
        params, state = self._model.take(*whole, kind.adopts)
        (center,), contribution = inputs.centers, inputs.contribution
        assert begin is not None
        if begin.resets:
            residual = "discarded" if begin is Begin.REJECTED_AGAIN else "restored"
            adopted = run.reset(params, state, contribution, center, residual=residual)
        else:
            if begin is Begin.DROPPED and self.has_residual:
                state = run.restore_residual(state, contribution)
            if kind.is_late:
                sent = loop.sent[kind.adopts]
                anchor = inputs.sent_anchor
                adopted = run.receive(params, state, contribution, sent, anchor, center)
            else:
                adopted = run.adopt(params, state, center)
        resets = begin.resets
        whole = self._model.put(*whole, kind.adopts, adopted, resets=resets)
        return Loop(*whole, loop.sent)

    def _anchor(self, kind: Kind, inputs: Inputs) -> PyTree:
        """Return the anchor of the message to be made."""
        if not self.holds_anchor or kind.reads_anchor:
            return inputs.anchor
        return inputs.centers[kind.sends if kind.begin is Begin.STARTED else 0]

    def _send(self, kind: Kind, loop: Loop, anchor: PyTree) -> tuple[Loop, PyTree]:
        """Make a message, as `FragmentWorker` does."""
        assert kind.sends is not None
        run, all_sent, whole = self._programs, [*loop.sent], (loop.params, loop.state)
        params, state = self._model.take(*whole, kind.sends)
        if kind.in_background:
            spare, *_ = run.contribute(state, params, anchor)
            copied = params if run.keeps_sent else None
            contribution, sent, state, _ = run.send(
                trees.copy((spare, copied)), params, state, anchor
            )
        else:
            contribution, codec_state, _ = run.contribute(state, params, anchor)
            state = state._replace(codec_state=codec_state)
            sent = self._sent(params, state)
        all_sent[kind.sends] = sent
        whole = self._model.put(*whole, kind.sends, (params, state))
        return Loop(*whole, tuple(all_sent)), contribution

    def _steps(
        self, loop: Loop, plan: Plan, begin: Any, count: Any
    ) -> tuple[Loop, Any]:
        """Make local steps of a plan, and return the sum of their losses, too."""

        def body(i: Any, carry: Any) -> Any:
            params, state, total = carry
            if plan.batches is not None:
                batch = jax.tree.map(lambda leaf: leaf[i], plan.batches)
            else:
                data = self.data if plan.data is None else plan.data
                batch = data(plan.worker, plan.first + i)
            params, state, loss = self._step(params, state, batch)
            return params, state, total + loss.astype(np.float32)

        carry = loop.params, loop.state, jnp.float32(0)
        if isinstance(count, int):
            for i in range(begin, begin + count):
                carry = body(i, carry)
        else:
            carry = jax.lax.fori_loop(begin, begin + count, body, carry)
        params, state, total = carry
        return Loop(params, state, loop.sent), total

    def _together(self, kind: Kind, is_uniform: bool) -> Any:
        steps = None if is_uniform else 0
        axes = (0, 0, Plan(0, 0, late=steps, steps=steps, batches=0))

        def stretch(loop: Loop, inputs: Inputs, plan: Plan) -> Any:
            loop, contribution, loss = self.stretch(kind, loop, inputs, plan)
            norm = None
            if kind.sends is not None and self.rule.message is None:
                like, _ = self._model.take(loop.params, loop.state, kind.sends)
                message = rounds.message_of(self.rule, contribution, like)
                norm = optax.tree.norm(message)
            return loop, Made(contribution, loss, norm)

        return jax.jit(jax.vmap(stretch, in_axes=axes), donate_argnums=0)


def _partial(function: Callable[..., Any]) -> Partial:
    """Return a function as an argument of programs."""
    return function if isinstance(function, Partial) else Partial(function)


# The rounds of all runs with these arguments and this function of batches.
_kept = functools.lru_cache(maxsize=16)(
    lambda function, *arguments, **settings: Rounds(*arguments, **settings)
)


def rounds_of(
    rule: Rule,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, PyTree], jax.Array],
    data: Callable[[Any, Any], PyTree],
    *,
    fragments: Fragments | None,
    in_background: bool,
) -> Rounds:
    """Return the rounds of a run, which share the programs of earlier runs.

    The arrays of a `Partial`, and batches that are made on the host, are arguments of
    the programs: data that differ in them only compile nothing, nor do rules that
    differ in their center optimizers.
    """
    of_workers = dataclasses.replace(rule, center=_NO_CENTER)
    source = _partial(data)
    makes_batches = is_traceable(lambda data, *step: data(*step), source, *_FIRST)
    function = source.func if makes_batches else None
    kept = _kept(
        *(function, of_workers, inner, loss),
        fragments=fragments,
        in_background=in_background,
    )
    return kept.shared(rule, data, is_traceable=makes_batches)


class OneByOne:
    """Stretches made worker by worker, in the programs of `Worker` itself."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._loops: dict[int, Loop] = {}

    def make(
        self, kind: Kind, inputs: Sequence[Inputs], plans: Sequence[Plan]
    ) -> list[Made]:
        """Make stretches of different workers."""
        made = []
        for each, plan in zip(inputs, plans, strict=True):
            loop = self._loops.pop(plan.worker, None)
            loop, contribution, loss = self._rounds.stretch(kind, loop, each, plan)
            self._loops[plan.worker] = loop
            made.append(Made(contribution, loss, None))
        return made


class Batches:
    """Stretches made together, by one program for a fixed number of workers.

    Args:
      rounds: the rounds.
      centers: the first parameters of each fragment.
      workers: number of workers.
      is_uniform: whether all stretches have the same plan of local steps.
      width: stretches that are made together; None for a number that suits their size.
    """

    def __init__(
        self,
        rounds: Rounds,
        centers: Sequence[PyTree],
        workers: int,
        *,
        is_uniform: bool,
        width: int | None,
    ) -> None:
        self._rounds, self._is_uniform = rounds, is_uniform
        first = rounds.start(centers)
        self.width = width or width_for(trees.nbytes(first), workers)
        self._padding = workers  # this row is of no worker
        # The rows of all workers: a multiple of the width, so that runs with a few more
        # workers have the same programs.
        count = -(-(workers + 1) // self.width) * self.width
        self._loops = _repeated(first, count)
        self._most_steps = 1  # batches of one stretch in an array

    def make(
        self, kind: Kind, inputs: Sequence[Inputs], plans: Sequence[Plan]
    ) -> list[Made]:
        """Make stretches of different workers."""
        made = []
        for begin in range(0, len(plans), self.width):
            part = slice(begin, begin + self.width)
            made += self._make(kind, [*inputs[part]], [*plans[part]])
        return made

    def _make(self, kind: Kind, inputs: list[Inputs], plans: list[Plan]) -> list[Made]:
        count = len(plans)
        missing = self.width - count
        plans = plans + [plans[0]._replace(worker=self._padding)] * missing
        inputs = inputs + [inputs[0]] * missing
        rows, firsts, late, steps = [
            np.array(column, np.int32) for column in [*zip(*plans, strict=True)][:4]
        ]
        batches = None
        if self._rounds.source is None:
            most = int((late + steps).max())
            if most > self._most_steps:  # few sizes, each of which is compiled
                exact = self._is_uniform
                self._most_steps = most if exact else 1 << (most - 1).bit_length()
            made = [self._batches(plan) for plan in plans[:count]]
            batches = _stack([*made, *made[:1] * missing])
        if self._is_uniform:
            late, steps = late[0], steps[0]
        plan = Plan(rows, firsts, late, steps, batches, self._rounds.source)
        program = self._rounds.together(kind, self._is_uniform)
        loops, found = program(_rows(self._loops, rows), _stack(inputs), plan)
        self._loops = _with_rows(self._loops, rows, loops)
        found = jax.device_get(found)
        # Copies, as one message that waits would keep the arrays of all.
        return [jax.tree.map(lambda leaf: leaf[i].copy(), found) for i in range(count)]  # noqa: B023

    def _batches(self, plan: Plan) -> PyTree:
        """Return the batches of a stretch, and repeat one for the longest stretch."""
        count = plan.late + plan.steps
        made = [self._rounds.data(plan.worker, plan.first + i) for i in range(count)]
        made = made or [self._rounds.data(plan.worker, 0)]
        for i, batch in enumerate(made):
            what = f"the batch of worker {plan.worker} for its step {plan.first + i}"
            like = self._rounds.batch_like
            check.same_tree(batch, like, what, "its first batch, of worker 0,")
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


def is_traceable(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether JAX can trace a function of these arguments."""
    try:
        jax.eval_shape(function, *arguments)
    except Exception:  # an error of its own is raised again when it is called
        return False
    return True


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def width_for(nbytes: int, workers: int) -> int:
    """Return the number of workers, with this many bytes each, that run together."""
    fits = max(1, _BATCH_BYTES // max(nbytes, 1))
    width = min(_WIDTH, workers, fits)
    return 1 << (width - 1).bit_length() if width == workers else width
