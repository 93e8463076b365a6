"""service.delay_sigterm: SIGTERM ends a loop after its step."""

import signal
import threading
import time

import jax.numpy as jnp
import optax
import pytest

import agn_optax
from agn_optax import service


def test_sigterm_makes_a_worker_flush_and_leave():
    center = agn_optax.LocalCenter(agn_optax.rules.downpour())
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=4, name="w")

    def train():
        with service.delay_sigterm() as terminated, worker:
            params, state = worker.start(jnp.zeros(2), chief=True)
            for step in range(100):
                if step == 5:
                    signal.raise_signal(signal.SIGTERM)
                updates, state = worker.tx.update(-jnp.ones(2), state, params)
                params = optax.apply_updates(params, updates)
                params, state = worker.exchange(params, state)
                if terminated():
                    break
            worker.flush(params, state)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train()
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
