"""agn_optax.fit: the training loop with embedded and served centers, and towers."""

import functools
import logging
import signal
import sys
import threading
import time

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import problem, shared, support

import agn_optax
from agn_optax import errors, service

try:
    import pty
except ImportError:  # not available on every system
    pty = None

STEPS, PERIOD = 12, 3
DATA = problem.batches(STEPS)


class StoppedError(Exception):
    """Stand-in for the end of a process."""


def batches():
    source = grain.MapDataset.source(range(STEPS))
    return iter(source.map(lambda i: DATA[i]).to_iter_dataset())


def a_worker(center, inner=None):
    inner = shared.adam(0.05) if inner is None else inner
    return agn_optax.Worker(center, inner, period=PERIOD, name="w")


class NormedState(TrainState):
    batch_stats: object
    key: jax.Array


@functools.cache
def normed(tx):
    """Return a state with batch statistics and a random key, and its train step."""
    model = nn.BatchNorm(use_running_average=False, momentum=0.5)
    variables = model.init(jax.random.key(0), DATA[0]["x"])
    state = NormedState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
    )

    def train_step(state, batch):
        noise = jax.random.normal(jax.random.fold_in(state.key, state.step))

        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            x, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((x - batch["y"] - noise) ** 2), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": value}

    return state, train_step


def fit_train_state(directory=None, callbacks=()):
    center = agn_optax.LocalCenter(shared.agn(shared.adam(0.05)))
    worker = a_worker(center)
    state, train_step = normed(worker.tx)
    fitted = agn_optax.fit(
        train_step,
        state,
        batches(),
        worker=worker,
        chief=True,
        every=4,
        directory=directory,
        callbacks=callbacks,
    )
    return fitted, center


def at(step):
    def callback(now, metrics):
        if now == step:
            raise StoppedError

    return callback


def test_fit_leaves_the_worker_without_its_checkpoints(tmp_path):
    center = agn_optax.LocalCenter(shared.agn(shared.adam(0.05)))
    worker = a_worker(center)
    state, train_step = normed(worker.tx)
    settings = {"worker": worker, "chief": True, "directory": tmp_path}
    agn_optax.fit(train_step, state, batches(), **settings)
    assert worker.before_send is None


@pytest.mark.slow
def test_fit_resumes_a_worker_bit_for_bit(tmp_path):
    expected, its_center = fit_train_state()
    seen = []
    with pytest.raises(StoppedError):
        fit_train_state(tmp_path, [at(8)])
    fitted, center = fit_train_state(tmp_path, [lambda step, _: seen.append(step)])
    assert seen == [8, 12]  # from the exchange at step 6
    assert fitted.steps == int(fitted.state.step) == STEPS
    support.assert_identical(
        (fitted.state.params, fitted.state.opt_state, fitted.state.batch_stats),
        (expected.state.params, expected.state.opt_state, expected.state.batch_stats),
    )
    support.assert_identical(center.pull().params, its_center.pull().params)
    assert fitted.metrics == expected.metrics
    assert center.version == STEPS // PERIOD


def fit_towers(directory=None, callbacks=()):
    towers = agn_optax.Towers(4, workers=2)
    tx = optax.chain(
        agn_optax.all_reduce("towers"), problem.agn(shared.adam(0.05), PERIOD)
    )
    state = towers.create(lambda p: (p, tx.init(p)), problem.params())
    return agn_optax.fit(
        problem.train_step(tx),
        state,
        batches(),
        towers=towers,
        every=5,
        directory=directory,
        callbacks=callbacks,
        evaluate=lambda params: {"scale": params["s"]},
    )


@pytest.mark.slow
def test_fit_resumes_towers_bit_for_bit(tmp_path):
    expected = fit_towers()
    with pytest.raises(StoppedError):
        fit_towers(tmp_path, [at(10)])
    seen = []
    fitted = fit_towers(tmp_path, [lambda *record: seen.append(record)])
    assert [step for step, _ in seen] == [
        12
    ]  # only the last record, after the restart at step 10
    support.assert_identical(fitted.state, expected.state)
    assert fitted.metrics == expected.metrics == seen[0][1]
    assert sorted(fitted.metrics) == ["center/scale", "loss"]
    again = fit_towers(tmp_path)  # the data has ended
    assert again.steps == STEPS
    support.assert_identical(again.state, expected.state)


def test_fit_evaluates_a_served_center_and_stops_early(caplog):
    def train_step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(problem.loss)(params, batch)
        updates, opt_state = worker.tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    def evaluate(params):
        return {"loss": problem.loss(params, DATA[0])}

    seen = []
    with (
        service.serve(shared.downpour(), problem.params()) as server,
        service.connect(server.address, shared.downpour()) as center,
        caplog.at_level(logging.INFO, "agn_optax"),
    ):
        worker = a_worker(center, shared.sgd(0.1))
        fitted = agn_optax.fit(
            train_step,
            problem.params(),
            DATA,
            worker=worker,
            evaluate=evaluate,
            every=2,
            callbacks=[lambda step, metrics: seen.append((step, dict(metrics)))],
            stop=lambda metrics: len(seen) == 4,
        )
        last = center.pull().params
    assert [step for step, _ in seen] == [2, 4, 6, 8]
    assert fitted.steps == 8
    assert fitted.metrics == seen[-1][1]
    # Steps 7 and 8, after the last exchange, were sent as well.
    support.assert_close(fitted.state[0], last)
    assert worker.exchanges == 3
    # The center was evaluated: it has the initial parameters before the first exchange.
    start = float(problem.loss(problem.params(), DATA[0]))
    np.testing.assert_allclose(seen[0][1]["center/loss"], start, rtol=1e-5)
    assert seen[-1][1]["center/loss"] != seen[1][1]["center/loss"]
    lines = [record.message for record in caplog.records if "step" in record.message]
    assert len(lines) == 4
    assert lines[-1].startswith("step 8, loss ")


def test_fit_needs_a_worker_or_towers():
    worker = a_worker(agn_optax.LocalCenter(shared.downpour()), shared.sgd(0.1))
    towers = agn_optax.Towers(2)
    for wrong in ({}, {"worker": worker, "towers": towers}):
        with pytest.raises(errors.InvalidArgumentError, match="not both"):
            agn_optax.fit(print, None, [], **wrong)
    for wrong in ({"worker": towers}, {"towers": worker}):
        with pytest.raises(errors.InvalidTypeError, match="must be"):
            agn_optax.fit(print, None, [], **wrong)
    with pytest.raises(errors.InvalidArgumentError, match="every must be"):
        agn_optax.fit(print, None, [], worker=worker, every=0)
    assert worker.version is None


@pytest.mark.parametrize("kind", ["worker", "towers"])
@pytest.mark.parametrize("data", [list, lambda made: made])
def test_restarted_data_gives_a_warning_when_a_run_resumes(
    kind, data, tmp_path, caplog
):
    """The warning comes if a run resumes but its data cannot."""

    def train_step(state, batch):
        return state, {"scale": state[0] + 0.0 * batch["x"].sum()}

    def run():
        if kind == "worker":
            center = agn_optax.LocalCenter(shared.downpour())
            arguments = {"worker": a_worker(center), "chief": True}
            state = jnp.zeros(())
        else:
            towers = arguments = {"towers": agn_optax.Towers(1)}
            state = towers["towers"].replicate((jnp.zeros(()),))
        made = data(batches())
        agn_optax.fit(train_step, state, made, **arguments, directory=tmp_path)

    run()
    assert "starts from the beginning" not in caplog.text
    run()
    assert caplog.text.count("starts from the beginning") == (data is list)


def test_sigterm_makes_a_worker_flush_and_leave():
    center = agn_optax.LocalCenter(agn_optax.rules.downpour())
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=4, name="w")

    def train_step(state, batch):
        params, opt_state = state
        updates, opt_state = worker.tx.update(-batch, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    def data():
        for step in range(100):
            if step == 5:
                signal.raise_signal(signal.SIGTERM)
            yield jnp.ones(2)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        agn_optax.fit(
            train_step, jnp.zeros(2), data(), worker=worker, chief=True, progress=False
        )
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert worker.exchanges == 2  # one of four steps, and one of the remaining two
    assert center.pull().params.tolist() == [6.0, 6.0]
    assert not center.workers


def test_second_signal_interrupts_waiting_after_the_first(monkeypatch):
    closed, clock = [], time.monotonic

    def waits():
        with service.delay_sigterm() as terminated:
            try:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)  # a repetition of the same signal
                assert terminated()
                with monkeypatch.context() as later:
                    later.setattr(time, "monotonic", lambda: clock() + 2.0)
                    signal.raise_signal(signal.SIGTERM)
                pytest.fail("it goes on waiting")
            finally:
                closed.append(True)

    with pytest.raises(SystemExit) as ended:
        waits()
    assert ended.value.code == 143
    assert closed


def test_signals_are_handled_only_in_the_main_thread():
    asked = []

    def elsewhere():
        with service.delay_sigterm() as terminated:
            asked.append(terminated())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert asked == [False]


def test_every_record_is_a_line_on_the_terminal(monkeypatch, capsys):
    worker = a_worker(agn_optax.LocalCenter(shared.downpour()), shared.sgd(0.1))

    def train_step(loop, batch):
        params, state = loop
        updates, state = worker.tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": 1 / batch}

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    data = map(jnp.float32, (1, 2))
    agn_optax.fit(train_step, jnp.ones(2), data, worker=worker, chief=True, every=1)
    assert capsys.readouterr().err == "step 1, loss 1\nstep 2, loss 0.5\n"
