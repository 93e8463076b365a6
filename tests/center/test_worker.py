"""The worker: start, properties of its loop, and error handling."""

import functools
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import (
    RULES,
    assert_close,
    assert_identical,
    feeds,
    held,
    run_worker,
    step,
    tree,
)

import agn_optax
from agn_optax import errors
from agn_optax.center import Limits
from agn_optax.round import steps as rounds


def test_chief_initializes_and_others_wait_and_adopt():
    center = agn_optax.LocalCenter(shared.downpour())
    workers = [
        agn_optax.Worker(center, shared.sgd(0.1), period=2, name=f"worker-{i}")
        for i in range(4)
    ]
    started = {}

    def start(rank):
        own = tree(seed=rank)
        started[rank] = workers[rank].start(own, chief=rank == 0, timeout=60)[0]

    waiting = [threading.Thread(target=start, args=(rank,)) for rank in (1, 2, 3)]
    for thread in waiting:
        thread.start()
    assert not started  # no worker starts before the chief
    start(0)
    for thread in waiting:
        thread.join(timeout=60)
    assert set(started) == {0, 1, 2, 3}
    for params in started.values():
        assert_identical(params, tree(seed=0))


def test_waiting_for_the_chief_times_out():
    center = agn_optax.LocalCenter(shared.downpour())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2)
    with pytest.raises(errors.NotInitializedError, match=r"within 0.01 s.*chief=True"):
        worker.start(tree(), chief=False, timeout=0.01)
    with pytest.raises(errors.NotInitializedError, match="chief=True"):
        worker.start()


def test_chief_needs_params():
    center = agn_optax.LocalCenter(shared.downpour())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2, name="anna")
    with pytest.raises(errors.MissingArgumentError, match=r"'anna'.*params=None"):
        worker.start(chief=True)
    worker.start(tree(), chief=True)  # it can still start


def test_second_chief_is_rejected():
    center = agn_optax.LocalCenter(shared.downpour())
    anna = agn_optax.Worker(center, shared.sgd(0.1), period=2, name="anna")
    bert = agn_optax.Worker(center, shared.sgd(0.1), period=2, name="bert")
    anna.start(tree(), chief=True)
    with pytest.raises(errors.AlreadyInitializedError, match=r"'bert'.*'anna'"):
        bert.start(tree(seed=1), chief=True)
    assert_identical(bert.start(tree(seed=1), chief=False)[0], tree())


def test_exchange_before_start_raises():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1, name="anna")
    state = worker.tx.init(tree())
    for call in (worker.exchange, worker.flush, worker.save):
        with pytest.raises(errors.WorkerStateError, match="'anna' has not started"):
            call(tree(), state)


@pytest.mark.parametrize("center", [None, shared.downpour(), "localhost:50051"])
def test_invalid_center_is_rejected(center):
    with pytest.raises(errors.InvalidTypeError, match="center must be a center"):
        agn_optax.Worker(center, shared.sgd(0.1), period=1)


@pytest.mark.parametrize("name", ["", 3])
def test_invalid_worker_name_is_rejected(name):
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    with pytest.raises(errors.InvalidTypeError, match="name must be a non-empty str"):
        agn_optax.Worker(center, shared.sgd(0.1), period=1, name=name)


def test_default_worker_names_are_unique():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    names = {agn_optax.Worker(center, shared.sgd(0.1), period=1).name for _ in range(5)}
    assert len(names) == 5


def test_exchange_within_a_period_returns_its_arguments():
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=3)
    params, state = worker.start()
    for _ in range(2):
        same_params, same_state = worker.exchange(params, state)
        assert same_params is params
        assert same_state is state
    worker.exchange(params, state)
    assert center.version == 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "donate"),
    [*[(rule, (0, 1)) for rule in RULES], ("agn", ()), ("easgd", ())],
)
def test_exchange_does_not_block_on_the_device(rule, donate):
    """A whole round is dispatched while its first step still computes."""
    reject = agn_optax.center.MessageLimits(
        nonfinite=False
    )  # otherwise it waits for norms
    center = agn_optax.LocalCenter(
        RULES[rule](), jnp.ones(3), limits=Limits(messages=reject)
    )
    worker = agn_optax.Worker(center, shared.adam(0.1), period=2)
    local = jax.jit(functools.partial(step, worker.tx), donate_argnums=donate)
    params, state = worker.start()
    target = np.zeros(3, np.float32)
    for _ in range(4):  # compile everything
        params, state = worker.exchange(*local(params, state, target))
    jax.block_until_ready((params, state))

    with held() as hold:
        params, state = worker.exchange(*local(hold(params), state, target))
        params, state = worker.exchange(
            *local(params, state, target)
        )  # this call exchanges
        assert not any(x.is_ready() for x in jax.tree.leaves(params))
        assert center.version == 3
        assert not center.pull().params.is_ready()
    jax.block_until_ready(params)


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
def test_loop_may_donate_params_and_state(rule):
    params = tree()
    targets = feeds(params, 6)
    expected_center = agn_optax.LocalCenter(RULES[rule](), params)
    plain = agn_optax.Worker(expected_center, shared.adam(0.1), period=2)
    expected = run_worker(plain, *plain.start(), targets)

    center = agn_optax.LocalCenter(RULES[rule](), params)
    worker = agn_optax.Worker(center, shared.adam(0.1), period=2)
    local = jax.jit(functools.partial(step, worker.tx), donate_argnums=(0, 1))
    loop = worker.start()
    snapshots = []
    for i in range(6):
        loop = worker.exchange(*local(*loop, jax.tree.map(lambda f: f[i], targets)))  # noqa: B023
        snapshots.append(center.pull())
    assert_close(loop, expected, tolerance=1e-6)
    for snapshot in snapshots:  # no version was deleted by a donation
        jax.tree.map(np.asarray, snapshot.params)


def test_rejected_exchange_changes_nothing_and_may_be_repeated(monkeypatch):
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(1.0)), jnp.zeros(2))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2)
    params, state = worker.start()
    submit, rejections = sessions.of_worker(worker).submit, [None, None]

    def flaky(*args, **kwargs):
        if rejections:
            rejections.pop()
            raise errors.MessageRejectedError("not now")
        submit(*args, **kwargs)

    monkeypatch.setattr(sessions.of_worker(worker), "submit", flaky)
    rejected = 0
    for _ in range(4):
        updates, state = worker.tx.update(jnp.ones(2), state, params)
        params = optax.apply_updates(params, updates)
        try:
            params, state = worker.exchange(params, state)
        except errors.MessageRejectedError:
            rejected += 1
    assert rejected == 2
    assert worker.exchanges == center.version == 1
    # Four steps in one round: the mean of four gradients of 1.
    np.testing.assert_allclose(center.pull().params, -1.0)
    np.testing.assert_allclose(params, -1.0)


def test_late_worker_starts_from_the_current_center():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    first = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    run_worker(first, *first.start(), feeds(tree(), 5))
    late = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    params, state = late.start()
    assert_identical(params, center.pull().params)
    assert int(state.local_steps) == 0
    run_worker(late, params, state, feeds(tree(), 1))
    assert late.staleness == 0


@pytest.mark.parametrize("rule", ["agn", "easgd"])
def test_old_versions_are_released(rule):
    """A rule that does not read its anchor must not keep old centers alive."""
    center = agn_optax.LocalCenter(RULES[rule](), jnp.zeros(1000))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    loop = run_worker(worker, *worker.start(), np.zeros((3, 1000), np.float32))
    live = sum(x.shape == (1000,) for x in jax.live_arrays())
    loop = run_worker(worker, *loop, np.zeros((5, 1000), np.float32))
    assert sum(x.shape == (1000,) for x in jax.live_arrays()) <= live


def test_worker_threads_train_one_model():
    """Four asynchronous workers on a least-squares problem reach its solution."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(256, 4)).astype(np.float32)
    solution = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    Y = X @ solution
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)))
    failures = []

    def work(rank):
        try:
            worker = agn_optax.Worker(
                center, shared.sgd(0.05), period=5, name=f"worker-{rank}"
            )
            mine = slice(rank * 64, (rank + 1) * 64)

            @jax.jit
            def local(params, state):
                error = X[mine] @ params - Y[mine]
                grads = X[mine].T @ error / 64
                updates, state = worker.tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            loop = worker.start(jnp.zeros(4), chief=rank == 0, timeout=60)
            for _ in range(300):
                loop = worker.exchange(*local(*loop))
            worker.flush(*loop)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=120)
    assert not failures
    assert center.version == 4 * 60
    np.testing.assert_allclose(center.pull().params, solution, atol=0.05)


def test_due_is_true_when_the_next_call_exchanges():
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2))
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=lambda n: n + 1)
    loop = worker.start()
    acted = []
    for _ in range(6):
        due, before = worker.due, worker.exchanges
        loop = worker.exchange(*loop)
        assert due == (worker.exchanges > before)
        acted.append(due)
    assert acted == [True, False, True, False, False, True]


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_late_response_keeps_local_progress(rule, dtype):
    """The sent parameters are recovered from the contribution, or from a copy."""
    made = RULES[rule]()
    center = agn_optax.LocalCenter(made, tree(dtype), dtype="float32")
    worker = agn_optax.Worker(center, shared.sgd(0.05), period=2, overlap=True)
    loop = worker.start(tree(dtype))
    target = tree(dtype, seed=1)

    def local_step(params, state):
        return step(worker.tx, params, state, target)

    for _ in range(3):  # the third step begins the round whose end sends a message
        loop = worker.exchange(*local_step(*loop))
    params, state = local_step(*loop)
    sent = jax.tree.map(np.array, params)
    loop = worker.exchange(params, state)
    message = sessions.fragment(worker).message
    answer = message.flight.result(60)
    assert (message.sent.params is None) == (rule != "agn")
    params, state = local_step(*loop)
    expected = rounds.adopt_late(made, params, sent, answer.params)
    params, state = worker.exchange(params, state)
    assert worker.exchanges == 2
    assert_close(params, expected, dtype)
    worker.leave()


ENDS_IN_FLIGHT = """
import atexit, threading
import jax.numpy as jnp, optax
# Runs after what registers later.
atexit.register(lambda: print(*(t.name for t in threading.enumerate() if t.daemon)))
import agn_optax
center = agn_optax.LocalCenter(agn_optax.rules.agn(optax.adam(0.1)))
worker = agn_optax.Worker(center, optax.sgd(0.1), period=1, overlap=True)
params, state = worker.start(jnp.ones(3_000_000), chief=True)
for _ in range(2):  # of which the first is not overlapped
    updates, state = worker.tx.update(params, state, params)
    params, state = worker.exchange(optax.apply_updates(params, updates), state)
"""


@pytest.mark.slow
def test_process_exit_waits_for_an_exchange_in_flight():
    """Otherwise Python 3.13 aborts."""
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", "-c", ENDS_IN_FLIGHT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize("overlap", [False, True])
def test_flush_does_not_ask_the_period_schedule(overlap):
    """An invalid value of the schedule must not prevent the last message."""
    asked = []

    def period(exchanges):
        asked.append(exchanges)
        return 2 if exchanges == 0 or len(asked) > 4 else -1

    center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.zeros(2))
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=period, overlap=overlap)
    params, state = worker.start()
    updates, state = worker.tx.update(jnp.ones(2), state, params)
    params = optax.apply_updates(params, updates)
    params, state = worker.exchange(params, state)
    params, state = worker.flush(params, state)
    assert worker.exchanges == 1
    np.testing.assert_array_equal(center.pull().params, [-1, -1])
    # A further exchange does ask, before anything changes.
    with pytest.raises(agn_optax.errors.InvalidArgumentError, match=r"period\(1\)"):
        worker.exchange(params, state)
    asked.extend([0] * 4)
    worker.exchange(params, state)
    assert asked[-1] == 1
    assert worker.due


def test_inner_optimizer_does_not_change_the_recorded_gradients():
    """Clipping before ``tx.update`` does."""
    inner = optax.chain(optax.clip(1.0), optax.sgd(1.0))
    for gradient, moved in ((jnp.full(4, 100.0), 100.0), (jnp.ones(4), 1.0)):
        agn = agn_optax.rules.agn(optax.sgd(1.0))
        center = agn_optax.LocalCenter(agn, jnp.zeros(4))
        worker = agn_optax.Worker(center, inner, period=1)
        params, state = worker.start()
        updates, state = worker.tx.update(gradient, state, params)
        worker.exchange(optax.apply_updates(params, updates), state)
        assert center.pull().params[0] == -moved


def test_rejected_message_resets_the_inner_optimizer():
    center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.zeros(2))
    inner = optax.chain(optax.trace(1.0), optax.sgd(1.0))
    worker = agn_optax.Worker(center, inner, period=1)
    params, state = worker.start()
    for gradient, expected in ((jnp.nan, 0.0), (1.0, -1.0)):
        updates, state = worker.tx.update(jnp.full(2, gradient), state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
        assert params[0] == expected
    assert worker.rejected == 1


def test_drop_in_as_inner_optimizer_is_rejected():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    for inner in (
        agn_optax.agn(shared.sgd(0.1), 3),
        optax.chain(optax.clip(1.0), agn_optax.average(shared.sgd(0.1), 3)),
    ):
        worker = agn_optax.Worker(center, inner, period=2)
        with pytest.raises(errors.InvalidArgumentError, match="local steps alone"):
            worker.start()
    assert not center.workers


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_exchange_inside_jit_is_rejected(period, first):
    """It would be counted once, while tracing, and never exchange."""
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=period)
    loop = worker.start()

    def whole(loop, end=worker.exchange):
        return end(*step(worker.tx, *loop, tree(seed=1)))

    for _ in range(first):
        loop = whole(loop)
    counted = worker.save(*loop).fragments[0].local_steps
    for end in (worker.exchange, worker.flush, worker.save):
        with pytest.raises(errors.InvalidTypeError, match=r"not inside jax\.jit"):
            jax.eval_shape(functools.partial(whole, end=end), loop)
    scanned = jax.jit(
        lambda loop: jax.lax.scan(lambda c, _: (whole(c), 0), loop, None, 2)
    )
    with pytest.raises(errors.InvalidTypeError, match="compile the gradients"):
        scanned(loop)
    assert worker.save(*loop).fragments[0].local_steps == counted
    assert center.version == first // period


def test_compiled_function_may_make_several_local_steps():
    """A period counts local steps; the round ends at the first call after it."""
    seen = []
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2))
    worker = agn_optax.Worker(
        center,
        shared.sgd(1.0),
        period=10,
        callbacks=[lambda _, values: seen.append(values["steps"])],
    )

    @jax.jit
    def four(params, state):
        def one(loop, _):
            params, state = loop
            updates, state = worker.tx.update(jnp.ones(2), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, state), None, length=4)[0]

    loop = worker.start()
    for calls in range(1, 7):
        loop = worker.exchange(*four(*loop), steps=4)
        assert center.version == calls // 3
    assert seen == [12, 12]
    np.testing.assert_array_equal(center.pull().params, [-24, -24])
    for steps in (0, 1.5, None):
        with pytest.raises(errors.InvalidArgumentError, match="steps must be a whole"):
            worker.exchange(*loop, steps=steps)


@pytest.mark.parametrize(
    ("steps", "calls", "warning"),
    [(3, 1, "rounds are longer.*steps="), (1, 1, ""), (1, 2, "rounds are shorter")],
)
def test_loop_that_miscounts_its_steps_gets_a_warning(steps, calls, warning, caplog):
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=4)
    loop = worker.start()
    for _ in range(8):
        for _ in range(steps):
            loop = step(worker.tx, *loop, tree(seed=1))
        for _ in range(calls):
            loop = worker.exchange(*loop)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == bool(warning)  # one warning is enough
    assert all(re.search(warning, line) for line in warned)
    assert worker.exchanges == 8 * calls // 4
    assert_identical(loop[0], center.pull().params)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_another_optimizer_give_a_warning_at_second_exchange(
    overlap, compiled, caplog
):
    """The worker's state is passed through, so AGN's messages are empty."""
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)), jnp.ones(2))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=5, overlap=overlap)
    own, (params, state) = shared.sgd(0.1), worker.start()

    def step(params, state, mine):
        updates, mine = own.update(params, mine)
        return optax.apply_updates(params, updates), state, mine

    step = jax.jit(step) if compiled else step
    mine, messages = own.init(params), {}
    for number in range(1, 21):
        params, state, mine = step(params, state, mine)
        params, state = worker.exchange(params, state)
        if number % 5 == 0:
            params, state = worker.receive(params, state)
            messages[worker.exchanges] = [each.getMessage() for each in caplog.records]
    assert messages[1] == []
    assert messages[2] == messages[4]
    assert len(messages[2]) == 1
    wanted = r"no local step in 2 rounds .* counted 5 .* are empty.*worker\.tx\.update"
    assert re.search(wanted, messages[2][0])


def test_steps_of_another_optimizer_count_if_params_are_sent(caplog):
    center = agn_optax.LocalCenter(shared.average(), jnp.ones(2))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    params, state = worker.start()
    caplog.clear()  # discards the center's warning about its rule
    for _ in range(3):
        params, state = worker.exchange(params - 1.0, state)
    np.testing.assert_array_equal(center.pull().params, -2.0)
    assert not caplog.records


def test_round_of_skipped_steps_gives_no_warning(caplog):
    """Loss scaling starts with a scale that is too large for some steps."""
    center = agn_optax.LocalCenter(shared.agn(shared.sgd(0.1)), jnp.ones(2))
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2)
    params, state = worker.start()
    for number in range(8):
        if number not in (0, 1, 4, 5):
            updates, state = worker.tx.update(jnp.ones(2), state, params)
            params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    assert worker.exchanges == 4
    assert not caplog.records


def test_state_of_another_optimizer_is_rejected():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=1)
    params, _ = worker.start()
    chained = optax.chain(optax.clip(1.0), worker.tx)
    for tx in (shared.sgd(0.1), optax.adam(0.1), chained):
        with pytest.raises(errors.TreeMismatchError, match=r"worker\.tx itself"):
            worker.exchange(params, tx.init(params))
