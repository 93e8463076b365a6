"""Submissions and answers on the wire: all plain fields come back as they were."""

import numpy as np
import pytest

from agn_optax.center import Answer, Snapshot, Submission, plain
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire._submission import (
    answer_of,
    message_of,
    snapshot_of,
    submission_of,
)


@pytest.mark.parametrize("weight", [None, 0.1])
@pytest.mark.parametrize("anchor", [None, "arrays"])
def test_submission_comes_back(weight, anchor):
    reported = {"loss": np.float32(0.25)}
    sent = Submission(3, "arrays", 2, 5, weight, reported, anchor)
    packed = message_of(sent, schema_hash=b"x").SerializeToString()
    message = pb.Message.FromString(packed)
    assert (message.schema_hash, message.has_anchor) == (b"x", anchor is not None)
    came = submission_of(message, "contribution")
    assert came == sent._replace(contribution="contribution", anchor=None)
    assert isinstance(came.reported["loss"], float)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(None, 7, 3),
        Answer(
            None, 7, 3, staleness=2, norm=1.5, applied=False, rejected="?", pace=0.5
        ),
    ],
)
def test_answer_comes_back(answer):
    packed = snapshot_of(answer, schema_hash=b"x").SerializeToString()
    came = answer_of(pb.Snapshot.FromString(packed), "arrays", 12)
    assert came == answer._replace(params="arrays", received=12)
    assert came.norm is None or isinstance(came.norm, np.float32)


def test_pulled_snapshot_has_a_version_and_answers_nothing():
    said = snapshot_of(Snapshot(None, 7), schema_hash=b"x")
    assert (said.version, said.sequence) == (7, 0)
    assert not any(map(said.HasField, ("staleness", "norm", "pace", "differences")))


def test_answer_of_a_center_that_leaves_fields_out_has_defaults():
    came = answer_of(pb.Snapshot(version=7, sequence=3, applied=True), None, 0)
    assert plain(came) == plain(Answer(None, 7, 3))


def test_center_keeps_at_most_64_reported_numbers():
    said = pb.Message(reported={f"{i:03}" + "x" * 100: float(i) for i in range(100)})
    kept = submission_of(said, None).reported
    assert len(kept) == 64
    assert {len(name) for name in kept} == {64}
