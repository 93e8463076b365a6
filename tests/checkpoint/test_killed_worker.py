"""Kill a worker repeatedly and check that each sample counts exactly once.

`AGN_OPTAX_KILLS=50 pytest tests/checkpoint/test_killed_worker.py` kills it more often.
"""

import contextlib
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import children, shared
from helpers.waiting import LIMIT, wait_until

from agn_optax import service

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).with_name("resumed_worker.py")
KILLS = int(os.environ.get("AGN_OPTAX_KILLS", "10"))
EXCHANGES = 4 * KILLS + 1  # the last one is not full
BATCH, PERIOD = 4, 2
SAMPLES = BATCH * (PERIOD * EXCHANGES - 1)


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("fragments", [1, 2])
def test_every_sample_of_an_epoch_counts_once(fragments, tmp_path):
    rng = np.random.default_rng()
    options = {"samples": SAMPLES, "batch": BATCH, "period": PERIOD}
    with contextlib.ExitStack() as stack:
        servers = []
        for p in range(fragments):
            params = [None] * fragments
            params[p] = jnp.zeros(SAMPLES)
            servers.append(
                stack.enter_context(service.serve(shared.downpour(), params))
            )
        server = servers[0]
        for kill in range(KILLS + 1):
            with children.processes(PROGRAM, 1) as (worker,):
                worker.send(
                    do="train",
                    addresses=[shard.address for shard in servers],
                    directory=str(tmp_path),
                    overlap=kill % 2 == 1,
                    **options,
                )
                # Kill it at a random time after some exchanges.
                until = server.center.version + rng.integers(1, 3)

                def is_there(worker=worker, until=until):
                    return server.center.version >= until or worker.answers_already()

                if kill < KILLS:
                    wait_until(is_there, 2 * LIMIT)
                    time.sleep(rng.uniform(0.0, 0.25))
                if kill == KILLS or worker.answers_already():
                    result = worker.answer()
        for shard in servers:
            (center,) = jax.tree.leaves(shard.center.pull().params)
            np.testing.assert_array_equal(center, np.ones(SAMPLES))
        version = servers[-1].center.version
    assert result == {"exchanges": EXCHANGES, "resumed": True}
    assert version == EXCHANGES
