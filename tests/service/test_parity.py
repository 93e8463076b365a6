"""The recorded trajectories with a served center and one process per worker."""

import pathlib

import pytest
from helpers import children, parity_records
from helpers.parity_records import ADAM, RECORDS
from helpers.support import assert_identical

import agn_optax
from agn_optax import service

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).with_name("parity_worker.py")


class RemoteParticipant:
    """A `parity_records.Participant` in another process."""

    def __init__(self, process, address, record, number):
        self._process = process
        self._process.ask(do="connect", address=address, record=record, number=number)

    def start(self):
        self._process.ask(do="start")

    def step(self, event):
        return children.from_hex(self._process.ask(do="step", event=event))

    def close(self):
        self._process.ask(do="close")


@pytest.fixture(scope="module")
def processes():
    largest = max(parity_records.load(name)["num_worker"] for name in RECORDS)
    with children.processes(PROGRAM, largest) as made:
        yield made


def embedded(record, rule, start):
    center = agn_optax.LocalCenter(rule, start)
    workers = [
        parity_records.Participant(center, record, number)
        for number in range(record["num_worker"])
    ]
    return list(parity_records.replay(record, center, workers))


@pytest.mark.parametrize("name", [n for n in RECORDS if n != ADAM])
def test_trajectory_over_processes_is_as_recorded(processes, name):
    record = parity_records.load(name)
    rule = parity_records.rule_of(record)
    start = parity_records.as_arrays(record["params_init"])
    with (
        service.serve(rule, start) as server,
        service.connect(server.address, rule, timeout=60) as center,
    ):
        workers = [
            RemoteParticipant(process, server.address, name, number)
            for number, process in enumerate(processes[: record["num_worker"]])
        ]
        replayed = list(parity_records.replay(record, center, workers))
        for worker in workers:
            worker.close()
        assert not server.center.core.members()[1]
    assert replayed[-1][1].version > 0
    parity_records.assert_as_recorded(record, replayed)
    for ours, theirs in zip(replayed, embedded(record, rule, start), strict=True):
        assert_identical(ours, theirs)
