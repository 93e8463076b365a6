"""The records of an exchange: what of them is checked, and what JSON can hold."""

import json

import numpy as np
import pytest

from agn_optax import errors
from agn_optax.center import Answer, Snapshot, Submission, plain, plain_fields


def test_checked_submission_has_python_numbers():
    sent = Submission(np.int64(3), "arrays", np.int32(2), np.int64(5), np.float32(0.5))
    checked = sent.checked()
    assert checked == sent
    assert {type(number) for number in plain(checked).values()} <= {int, float}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"steps": -1}, errors.InvalidArgumentError, "steps must be a whole number"),
        ({"steps": 1 << 31}, errors.InvalidArgumentError, "steps must be a whole"),
        ({"steps": 1.5}, errors.InvalidArgumentError, "steps must be a whole number"),
        ({"late_steps": -1}, errors.InvalidArgumentError, "late_steps must be"),
        ({"late_steps": 3, "steps": 2}, errors.InvalidArgumentError, "late_steps must"),
        ({"weight": 0.0}, errors.InvalidArgumentError, "weight must be a positive"),
        ({"weight": "3"}, errors.InvalidTypeError, "weight must be a positive"),
        ({"anchor_version": -1}, errors.InvalidArgumentError, "anchor_version must"),
        ({"anchor_version": (0, 0)}, errors.InvalidArgumentError, "anchor_version"),
        ({"anchor_version": None}, errors.InvalidArgumentError, "anchor_version must"),
    ],
)
def test_numbers_out_of_range_are_errors(fields, error, message):
    with pytest.raises(error, match=message):
        Submission(
            **{"sequence": 1, "contribution": 0, "anchor_version": 0, **fields}
        ).checked()


@pytest.mark.parametrize("weight", [None, 0.1])
def test_plain_fields_come_back_from_json(weight):
    sent = Submission(3, None, 2, steps=5, weight=weight, late_steps=1)
    fields = json.loads(json.dumps(plain(sent)))
    assert Submission(contribution=None, **fields) == sent
    answer = Answer(None, 7, 3, norm=1.5, applied=False, rejected="why", pace=0.5)
    assert Answer(params=None, **json.loads(json.dumps(plain(answer)))) == answer


def test_submission_without_arrays_keeps_its_plain_fields():
    sent = Submission(3, "arrays", 2, 5, 0.5, {"loss": "array"})
    kept = sent.without_arrays()
    assert plain(kept) == plain(sent)
    assert {n for n, v in kept._asdict().items() if v is None} == (
        set(Submission._fields) - set(plain_fields(Submission)) - {"attempt"}
    )


def test_answer_has_the_snapshot_that_is_adopted():
    assert Answer("arrays", 7, 3).snapshot == Snapshot("arrays", 7)
