"""Submissions and answers as protobuf messages, whose fields have the same names.

The plain fields of a record are not named here: all of them are sent and received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from agn_optax._internal import Notice
from agn_optax.center import (
    MAX_REPORTED,
    Answer,
    Snapshot,
    Submission,
    plain,
    plain_fields,
)
from agn_optax.service import center_pb2 as pb

PyTree = Any

_MAX_NOTICE = 500  # characters


class _Field(NamedTuple):
    """A field of a protobuf message that holds a plain field of a record."""

    name: str
    is_optional: bool  # whether a message may lack it
    is_float32: bool


def _fields(
    record: type[Submission] | type[Answer], message: type[Message]
) -> list[_Field]:
    """Return the fields of a message for the plain fields of a record.

    Raises:
      KeyError: center.proto, or the code generated from it, lacks one of them.
    """
    fields = [message.DESCRIPTOR.fields_by_name[name] for name in plain_fields(record)]
    return [
        _Field(field.name, field.has_presence, field.type == FieldDescriptor.TYPE_FLOAT)
        for field in fields
    ]


_SUBMITTED = _fields(Submission, pb.Message)
_ANSWERED = _fields(Answer, pb.Snapshot)


def message_of(submission: Submission, **others: Any) -> pb.Message:
    """Return a submission as it is sent, without its contribution.

    Args:
      submission: the submission, as `Submission.checked` returned it.
      **others: the fields of the message that a submission does not have.
    """
    reported = {k: float(v) for k, v in (submission.reported or {}).items()}
    notices = submission.notices
    return pb.Message(**plain(submission), reported=reported, notices=notices, **others)


def submission_of(message: pb.Message, contribution: PyTree) -> Submission:
    """Return a received submission, with limits on its metrics, names and notices."""
    reported = sorted(message.reported.items())[:MAX_REPORTED]
    return Submission(
        contribution=contribution,
        reported={name[:MAX_REPORTED]: value for name, value in reported},
        notices={k: _line(text) for k, text in message.notices.items()} or None,
        **_present(message, _SUBMITTED),
    )


def _line(text: str) -> str:
    """Return a text of the other end as one line, of limited length, for the log."""
    text = text[:_MAX_NOTICE]
    if text.isprintable():  # much faster than the loop, and almost always so
        return text
    return "".join(c if c.isprintable() else " " for c in text)


def snapshot_of(record: Answer | Snapshot, **others: Any) -> pb.Snapshot:
    """Return an answer, or the result of a pull, as it is sent without its parameters.

    Args:
      record: the answer, whose norm is a Python float, or the snapshot.
      **others: the fields of the message that the record does not have.
    """
    notices = record.notices if isinstance(record, Answer) else ()
    sent = [pb.Notice(**notice._asdict()) for notice in notices]
    return pb.Snapshot(**plain(record), notices=sent, **others)


def answer_of(snapshot: pb.Snapshot, params: PyTree, received: int) -> Answer:
    """Return a received answer with its parameters and its size in bytes."""
    notices = (
        Notice(sent.check, sent.worker, _line(sent.text), _line(sent.remedy))
        for sent in snapshot.notices
    )
    return Answer(
        params=params,
        received=received,
        notices=tuple(notices),
        **_present(snapshot, _ANSWERED),
    )


def _present(message: Message, fields: Sequence[_Field]) -> dict[str, Any]:
    """Return the values of the fields that a message has, by their names."""
    values: dict[str, Any] = {}
    for field in fields:
        if field.is_optional and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        values[field.name] = np.float32(value) if field.is_float32 else value
    return values
