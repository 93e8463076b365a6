"""A worker that is killed again and again, whose samples count once each.

`AGN_OPTAX_KILLS=50 pytest tests/checkpoint/test_kills.py` kills it more often.
"""

import os
import pathlib
import time

import jax.numpy as jnp
import numpy as np
import pytest
import shared
import talking
from waiting import LIMIT, wait_until

from agn_optax import service

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).with_name("resumed_worker.py")
KILLS = int(os.environ.get("AGN_OPTAX_KILLS", "10"))
EXCHANGES = 4 * KILLS + 1  # the last one is not full
BATCH, PERIOD = 4, 2
SAMPLES = BATCH * (PERIOD * EXCHANGES - 1)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_every_sample_of_an_epoch_counts_once(tmp_path):
    rng = np.random.default_rng()
    options = {"samples": SAMPLES, "batch": BATCH, "period": PERIOD}
    with service.serve(shared.downpour(), jnp.zeros(SAMPLES)) as server:
        for kill in range(KILLS + 1):
            with talking.processes(PROGRAM, 1) as (worker,):
                worker.tell(
                    do="train",
                    address=server.address,
                    directory=str(tmp_path),
                    overlap=kill % 2 == 1,
                    **options,
                )
                # Somewhere in the middle of a life that has made some exchanges.
                until = server.center.version + rng.integers(1, 3)

                def is_there(worker=worker, until=until):
                    return server.center.version >= until or worker.answers_already()

                if kill < KILLS:
                    wait_until(is_there, 2 * LIMIT)
                    time.sleep(rng.uniform(0.0, 0.25))
                if kill == KILLS or worker.answers_already():
                    said = worker.answer()
        center = np.asarray(server.center.pull().params)
        version = server.center.version
    np.testing.assert_array_equal(center, np.ones(SAMPLES))
    assert said == {"exchanges": EXCHANGES, "resumed": True}
    assert version == EXCHANGES
