"""Numbers that workers report, as observers see them."""

import jax.numpy as jnp
import optax
import pytest

import agn_optax
from agn_optax import errors, service

RULE = agn_optax.rules.downpour()
PARAMS = {"w": jnp.ones(3)}


def exchanged(worker, params, state):
    updates, state = worker.tx.update(PARAMS, state, params)
    return worker.exchange(optax.apply_updates(params, updates), state)


@pytest.mark.parametrize("transport", ["grpc", "socket", "memory"])
@pytest.mark.parametrize("overlap", [False, True])
def test_observer_sees_reported_numbers_and_transport(transport, overlap):
    with (
        service.serve(RULE, PARAMS, address="127.0.0.1:0") as server,
        service.connect(server.address, RULE, transports=[transport]) as center,
        agn_optax.Worker(
            center, optax.sgd(0.1), period=1, name="anna", overlap=overlap
        ) as worker,
        service.Observer(server.address) as observer,
    ):
        params, state = worker.start()
        assert observer.status()["workers"][0]["transport"] == transport
        worker.report(loss=jnp.float32(0.5), accuracy=1)
        params, state = exchanged(worker, params, state)
        worker.report(loss=0.25)
        params, state = worker.flush(*exchanged(worker, params, state))
        (status,) = observer.status()["workers"]
        assert status["reported"] == {"loss": 0.25, "accuracy": 1.0}


def test_report_of_other_than_numbers_is_rejected_by_name():
    center = agn_optax.LocalCenter(RULE, PARAMS)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1)
    for wrong in ("a", None, True, 1j, jnp.ones(2), jnp.array(True)):
        with pytest.raises(errors.InvalidTypeError, match=r"report\(loss=...\) must"):
            worker.report(loss=wrong)
    with pytest.raises(errors.InvalidArgumentError, match="64 characters at most"):
        worker.report(**{"a" * 65: 1.0})
    worker.report(**{f"n{i}": i for i in range(64)})
    worker.report(n0=1.0)
    with pytest.raises(errors.InvalidArgumentError, match="64 numbers at most"):
        worker.report(another=1.0)
