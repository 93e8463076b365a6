"""Whose a certificate is, and until when: what DER says of its subject and validity.

TLS has checked by then who vouches for it. Python's ssl tells the subject at one end of
a connection only, and gRPC's in a text of its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import NamedTuple

from agn_optax import errors

_NAME, _UNIT = b"\x55\x04\x03", b"\x55\x04\x0b"  # 2.5.4.3 and 2.5.4.11
_VERSION, _BMP_STRING, _UTC_TIME = 0xA0, 0x1E, 0x17


class Certificate(NamedTuple):
    """What matters here of a certificate.

    Attributes:
      names: common names of its subject (CN).
      units: organizational units of its subject (OU).
      begins, ends: when it is valid.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    begins: datetime.datetime
    ends: datetime.datetime


def read(der: bytes) -> Certificate:
    """What a certificate says.

    Raises:
      InvalidArgumentError: it is none.
    """
    try:
        ((_, certificate),) = _items(der)
        _, content = next(_items(certificate))
        fields = [value for tag, value in _items(content) if tag != _VERSION]
        _, _, _, validity, subject = fields[:5]  # after number, algorithm and issuer
        said = [
            (kind, _text(tag, value))
            for _, attributes in _items(subject)
            for _, attribute in _items(attributes)
            for (_, kind), (tag, value) in [tuple(_items(attribute))]
        ]
        begins, ends = (_time(tag, value) for tag, value in _items(validity))
    except (ValueError, IndexError, StopIteration):
        raise errors.InvalidArgumentError("it is no certificate of X.509") from None
    return Certificate(
        tuple(text for kind, text in said if kind == _NAME),
        tuple(text for kind, text in said if kind == _UNIT),
        begins,
        ends,
    )


def _items(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and values, one after the other."""
    while der:
        tag, length, begin = der[0], der[1], 2
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(der[2:begin], "big")
        if len(der) < begin + length:
            raise ValueError("cut off")
        yield tag, der[begin : begin + length]
        der = der[begin + length :]


def _text(tag: int, value: bytes) -> str:
    return value.decode("utf-16-be" if tag == _BMP_STRING else "utf-8")


def _time(tag: int, value: bytes) -> datetime.datetime:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    made = datetime.datetime.strptime(value.decode("ascii"), form)
    return made.replace(tzinfo=datetime.UTC)
