"""A center receives the pieces of a worker's processes in the memory of one message."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from agn_optax import rules, service
from agn_optax.center import Pieces, Region, Share, Submission
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import FrameReader

RULE = rules.downpour()
TIMEOUT = 60  # s, generous: no test should come near it
SHAPE = 64, 600  # large enough for shared memory
PROCESSES = 3
PIECES = {
    "rows": [(slice(0, 10),), (slice(10, 40),), (slice(40, 64),)],
    "columns": [(slice(None), slice(200 * i, 200 * i + 200)) for i in range(3)],
}


def shares(pieces):
    """Return the shares of all processes, each with its piece of the only leaf."""
    numbers, like = (
        np.arange(np.prod(SHAPE)).reshape(SHAPE),
        np.zeros(SHAPE, np.float32),
    )
    found = []
    for process, piece in enumerate(pieces):
        own = numbers[piece]
        start = tuple(map(int, np.unravel_index(own[0, 0], SHAPE)))
        regions = (Region(0, start, own.shape),)
        share = Share("group", process, PROCESSES, like, regions, regions)
        found.append(share)
    return found


class CountedBuffers(Buffers):
    """Buffers that remember the sizes that were taken."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def take(self, size):
        self.sizes.append(size)
        return super().take(size)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("transport", ["grpc", "socket", "memory"])
def test_center_takes_the_memory_of_one_message_for_all_pieces(
    transport, pieces, monkeypatch
):
    places = PIECES[pieces]
    taken = CountedBuffers()
    monkeypatch.setattr("agn_optax.service.server._servicer.Buffers", lambda: taken)
    first = np.zeros(SHAPE, np.float32)
    sent = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    answered = threading.Barrier(PROCESSES)
    token = ["", uuid.uuid4().hex]

    def exchange(share):
        connect = service.connect(server.address, RULE, transports=[transport])
        own = sent[places[share.process]]
        with connect as center:
            session = center.join("anna", Pieces(share, ()), resume_token=token)
            answer = session.exchange(Submission(1, [own], 0)).params[0].copy()
            answered.wait(TIMEOUT)  # the first one that closes leaves for all
        return answer

    with (
        service.serve(RULE, first, address="127.0.0.1:0") as server,
        ThreadPoolExecutor(PROCESSES) as threads,
    ):
        answers = list(threads.map(exchange, shares(places)))
    for place, answer in zip(places, answers, strict=True):
        np.testing.assert_array_equal(answer, -sent[place])
    assert [size for size in taken.sizes if size > 1000] == [first.nbytes]


def test_processes_of_a_chief_send_first_parameters_at_the_same_time(monkeypatch):
    reading, read_into = threading.Barrier(PROCESSES), FrameReader.read_into
    sent = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    places = PIECES["columns"]

    def read_with_others(*args):
        reading.wait(TIMEOUT)  # until all pieces arrive
        read_into(*args)

    monkeypatch.setattr(FrameReader, "read_into", read_with_others)

    def initialize(share):
        with service.connect(server.address, RULE) as center:
            pieces = Pieces(share, [sent[places[share.process]]])
            center.initialize(pieces, worker="anna")

    with (
        service.serve(RULE, address="127.0.0.1:0") as server,
        ThreadPoolExecutor(PROCESSES) as threads,
        service.connect(server.address, RULE) as center,
    ):
        list(threads.map(initialize, shares(places)))
        np.testing.assert_array_equal(center.pull().params, sent)
