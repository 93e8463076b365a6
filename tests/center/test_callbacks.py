"""Callbacks with the metrics of each exchange."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import support

import agn_optax
from agn_optax import codecs, errors, rules

PARAMS = {"w": jnp.array([1.0, 2.0, 3.0]), "b": jnp.array([0.5])}
ONES = jax.tree.map(jnp.ones_like, PARAMS)


class Records(list):
    def __call__(self, step, values):
        self.append((step, dict(values)))


def run(worker, steps, records):
    params, state = worker.start()
    for _ in range(steps):
        updates, state = worker.tx.update(ONES, state, params)
        params, state = worker.exchange(optax.apply_updates(params, updates), state)
    params, state = worker.flush(params, state)
    return params


@pytest.mark.parametrize("overlap", [False, True])
def test_callback_gets_the_metrics_of_every_exchange(overlap):
    records = Records()
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(
        center, optax.sgd(0.5), period=2, overlap=overlap, callbacks=[records]
    )
    worker.report(loss=jnp.float32(0.25))
    run(worker, 4, records)
    assert [step for step, _ in records] == [1, 2]
    for step, values in records:
        assert values.pop("seconds") >= 0
        assert values == {
            "steps": 2,
            "message_norm": pytest.approx(2.0),  # 4 elements, each moved by 1.0
            "staleness": 0,
            "applied": 1,
            "rejected": 0,
            "version": step,
            "bytes_sent": 16,
            "bytes_received": 16,
            "notices": 0,
            "loss": 0.25,
        }
        assert {type(value) for value in values.values()} == {float}


def test_callback_gets_the_bytes_of_a_codec():
    records = Records()
    codec = codecs.cast("bfloat16")
    center = agn_optax.LocalCenter(rules.easgd(0.5, codec=codec), PARAMS)
    worker = agn_optax.Worker(center, optax.sgd(0.3), period=1, callbacks=[records])
    run(worker, 1, records)
    ((_, values),) = records
    assert (values["bytes_sent"], values["bytes_received"]) == (8, 8)


def test_callback_is_called_for_a_rejected_message():
    records = Records()
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(center, optax.sgd(jnp.nan), period=1, callbacks=[records])
    run(worker, 1, records)
    ((_, values),) = records
    assert (values["rejected"], values["applied"]) == (1, 0)


def test_failing_callback_is_logged_and_loses_no_exchange(caplog):
    def fails(step, values):
        raise ValueError("no disk")

    records = Records()
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(
        center, optax.sgd(0.5), period=1, callbacks=[fails, records]
    )
    params = run(worker, 2, records)
    support.assert_close(params, center.pull().params)
    assert len(records) == 2
    assert "no disk" in caplog.text
    with pytest.raises(errors.InvalidTypeError, match="functions of a step"):
        agn_optax.Worker(center, optax.sgd(0.5), period=1, callbacks=["print"])


def progress(overlap, callbacks=(), interrupt=None):
    """Train for six steps, repeating calls that raise; return the parameters."""
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(
        center, optax.sgd(0.5), period=2, overlap=overlap, callbacks=callbacks
    )
    params, state = worker.start()
    raised = 0
    for step in range(6):
        updates, state = worker.tx.update(ONES, state, params)
        params = optax.apply_updates(params, updates)
        if interrupt is not None:
            interrupt(worker, step)
        try:
            params, state = worker.exchange(params, state)
        except BaseException:
            raised += 1
            params, state = worker.exchange(params, state)
        params, state = worker.receive(params, state)
    return params, center.pull(), worker.exchanges, raised


class Interrupts(list):
    def __call__(self, step, values):
        self.append(step)
        if step == 2:
            raise KeyboardInterrupt


def test_interrupted_callback_loses_no_arrays():
    calls = Interrupts()
    *expected, _ = progress(overlap=False)
    *got, raised = progress(overlap=False, callbacks=[calls])
    assert (raised, calls) == (1, [1, 2, 3])
    support.assert_identical(got, expected)


def test_interrupted_receive_loses_no_arrays():
    center = agn_optax.LocalCenter(rules.downpour(), PARAMS)
    worker = agn_optax.Worker(
        center, optax.sgd(0.5), period=1, overlap=True, callbacks=[Interrupts()]
    )
    params, state = worker.start()
    for _ in range(2):
        updates, state = worker.tx.update(ONES, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    with pytest.raises(KeyboardInterrupt):
        worker.receive(params, state)
    params, state = worker.receive(params, state)
    support.assert_identical(params, center.pull().params)


def test_deleted_report_is_logged_and_loses_no_arrays(caplog):
    def report(worker, step):
        loss = jnp.float32(0.25)
        worker.report(loss=loss)
        loss.delete()

    *expected, _ = progress(overlap=False)
    *got, raised = progress(overlap=False, callbacks=[Records()], interrupt=report)
    assert raised == 0
    support.assert_identical(got, expected)
    assert "deleted" in caplog.text


def test_missing_thread_loses_no_arrays(monkeypatch):
    start, failures = threading.Thread.start, []

    def fails_once(thread):
        if thread.name == "agn-optax exchange" and not failures:
            failures.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    *expected, _ = progress(overlap=True)
    monkeypatch.setattr(threading.Thread, "start", fails_once)
    *got, raised = progress(overlap=True)
    assert raised == len(failures) == 1
    support.assert_identical(got, expected)
