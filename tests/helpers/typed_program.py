"""A user's program for a strict type checker, used by test_packaging.py.

It also runs, so the calls that it types are valid.
"""

# mypy: disallow-untyped-calls, warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax
from agn_optax import center, errors, rules, service, towers, worker


class State(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: Any


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((params["w"] - x) ** 2)


def train_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    return step


def in_one_program() -> float:
    rule: rules.Rule = rules.average()
    tx = optax.chain(
        agn_optax.all_reduce("towers"),
        agn_optax.exchange_every(optax.sgd(0.1), rule, period=2, axis_name="workers"),
    )
    mesh = agn_optax.Towers(2, workers=2)
    assert_type(mesh, towers.Towers)
    params = {"w": jnp.zeros(())}
    state = mesh.replicate(State(params, tx.init(params)))
    step = mesh.step(train_step(tx))
    for _ in range(2):
        state, _ = step(state, mesh.shard(np.ones(4, np.float32)))
    agreement = mesh.towers_agree(state)
    assert_type(agreement, towers.Agreement)
    slots = agn_optax.slots(state.opt_state)
    assert_type(slots, dict[str, Any])
    return float(mesh.center_params(state.opt_state)["w"])


def with_a_center(where: center.Center) -> int:
    with agn_optax.Worker(where, optax.sgd(0.1), period=1, name="anna") as own:
        assert_type(own, worker.Worker)
        params, state = own.start({"w": jnp.zeros(())}, chief=True)
        grads = {"w": jnp.ones(())}
        updates, state = own.tx.update(grads, state, params)
        params, state = own.exchange(optax.apply_updates(params, updates), state)
        saved: worker.WorkerState = own.save(params, state)
        assert_type(own.exchanges, int)
        assert_type(own.staleness, int | None)
    snapshot: center.Snapshot = where.pull()
    assert saved.params is params
    version: int = snapshot.version
    return version


def of_an_exchange(session: center.Session, message: center.Submission) -> bool:
    answer = session.exchange(message)
    assert_type(answer, center.Answer)
    assert_type(answer.snapshot, center.Snapshot)
    assert_type(session.collect(message.sequence), center.Answer | None)
    assert_type(answer.applied, bool)
    return answer.applied


def served() -> int:
    rule = rules.agn(optax.adam(0.1), codec=agn_optax.codecs.cast("bfloat16"))
    mode: center.Mode = center.BoundedStaleness(versions=4)
    try:
        service.connect("127.0.0.1:1", rule, timeout=0.5)
    except errors.AgnOptaxError as error:
        assert_type(error, errors.AgnOptaxError)
    with service.serve(
        rule, mode=mode, limits=service.Limits(messages=center.MessageLimits(norm=10.0))
    ) as server:
        assert_type(server, service.Server)
        assert_type(server.address, str)
        with service.connect(server.address, rule) as remote:
            return with_a_center(remote)


def embedded() -> int:
    own = agn_optax.LocalCenter(rules.easgd(0.1), mode=center.Synchronous())
    version = with_a_center(own)
    assert_type(own.version, int)
    assert_type(own.save(), center.CenterState)
    return version


def wrong() -> None:
    """Make calls that fail and that a type checker rejects."""
    rule = rules.downpour()
    where = agn_optax.LocalCenter(rule, jnp.zeros(3))
    for call in (
        lambda: agn_optax.Worker(rule, optax.sgd(0.1), period=1),  # type: ignore[arg-type]
        lambda: agn_optax.Worker(where, optax.sgd(0.1)),  # type: ignore[call-arg]
        lambda: center.Limits(messages=10.0),  # type: ignore[arg-type]
        lambda: center.Synchronous(late="never"),  # type: ignore[arg-type]
        lambda: rules.easgd(),  # type: ignore[call-arg]
    ):
        try:
            call()
        except (TypeError, ValueError):
            continue
        raise AssertionError(call)


def main() -> tuple[int, int, float]:
    wrong()
    return embedded(), served(), in_one_program()


if __name__ == "__main__":
    main()
