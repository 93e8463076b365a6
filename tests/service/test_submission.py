"""Submissions and answers on the wire: all plain fields come back as they were."""

import dataclasses

import numpy as np
import pytest
from helpers import shared

from agn_optax import service
from agn_optax.center import Answer, LocalSession, Submission, plain
from agn_optax.service.transports import GrpcLink

RULE = shared.downpour()
START, ONES = np.zeros(3, np.float32), np.ones(3, np.float32)
ANSWER = Answer(
    None, 7, 1, staleness=2, norm=1.5, applied=False, rejected="?", pace=0.5
)


@pytest.fixture
def center():
    """A served center, as one of its workers sees it."""
    with (
        service.serve(RULE, START) as server,
        service.connect(server.address, RULE, transports=["grpc"]) as center,
    ):
        yield center


@pytest.fixture
def received(monkeypatch):
    """A list of the submissions that have reached the center."""
    found, submit = [], LocalSession.submit

    def noted(session, submission):
        found.append(submission)
        submit(session, submission)

    monkeypatch.setattr(LocalSession, "submit", noted)
    return found


@pytest.fixture
def headers(monkeypatch):
    """A list of the headers that the worker has sent."""
    found, send = [], GrpcLink.send

    def noted(link, frame):
        found.append(frame.header)
        send(link, frame)

    monkeypatch.setattr(GrpcLink, "send", noted)
    return found


def set_answer(monkeypatch, other):
    """Have the center give another answer to each message."""
    answer = LocalSession.answer

    def answers(*arguments):
        kept = answer(*arguments)
        return None if kept is None else dataclasses.replace(kept, answer=other)

    monkeypatch.setattr(LocalSession, "answer", answers)


def at_each_snapshot(monkeypatch, act):
    """Call ``act(snapshot)`` with each snapshot that the worker has received."""
    read = GrpcLink.read_header

    def reads(link):
        header = read(link)
        if header.HasField("snapshot"):
            act(header.snapshot)
        return header

    monkeypatch.setattr(GrpcLink, "read_header", reads)


@pytest.mark.parametrize("weight", [None, 0.1])
def test_submission_comes_back(weight, center, received):
    session = center.join("anna")
    for number in (1, 2):
        session.exchange(Submission(number, ONES, anchor_version=number - 1))
    notices = {"residual": "it grows"}
    sent = Submission(3, ONES, 2, 5, weight, {"loss": np.float32(0.25)}, notices)
    answer = session.exchange(sent)
    came = received[2]._replace(contribution=None)
    assert came == sent._replace(contribution=None)
    assert isinstance(came.reported["loss"], float)
    np.testing.assert_array_equal(answer.params, -3 * ONES)


@pytest.mark.parametrize("answer", [Answer(None, 7, 1), ANSWER])
def test_answer_comes_back(answer, center, monkeypatch):
    set_answer(monkeypatch, answer)
    came = center.join("anna").exchange(Submission(1, ONES, anchor_version=0))
    np.testing.assert_array_equal(came.params, -ONES)
    assert came._replace(params=None) == answer._replace(received=ONES.nbytes)
    assert came.norm is None or isinstance(came.norm, np.float32)


def test_pulled_snapshot_has_a_version_and_answers_nothing(center, monkeypatch):
    center.join("anna").exchange(Submission(1, ONES, anchor_version=0))
    found = []
    at_each_snapshot(monkeypatch, found.append)
    assert center.pull().version == 1
    (snapshot,) = found
    assert (snapshot.version, snapshot.sequence) == (1, 0)
    assert not any(map(snapshot.HasField, ("staleness", "norm", "pace")))


def test_answer_of_a_center_that_leaves_fields_out_has_defaults(center, monkeypatch):
    def leave_out(snapshot):
        assert snapshot.staleness == 2
        for field, _ in snapshot.ListFields():
            if field.name not in ("version", "sequence", "applied", "schema_hash"):
                snapshot.ClearField(field.name)

    set_answer(monkeypatch, ANSWER._replace(applied=True))
    at_each_snapshot(monkeypatch, leave_out)
    came = center.join("anna").exchange(Submission(1, ONES, anchor_version=0))
    assert plain(came) == plain(Answer(None, 7, 1))


def test_center_keeps_at_most_64_reported_numbers(center, received):
    reported = {f"{i:03}" + "x" * 100: float(i) for i in range(100)}
    sent = Submission(1, ONES, anchor_version=0, reported=reported)
    center.join("anna").exchange(sent)
    kept = received[0].reported
    assert len(kept) == 64
    assert {len(name) for name in kept} == {64}
