"""A parser for the subject and the validity of a certificate in DER.

TLS has already verified the certificate. The parser is needed because Python's ssl
gives the subject at only one end of a connection, and gRPC gives it in another format.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import NamedTuple

from agn_optax import errors

_NAME, _UNIT = b"\x55\x04\x03", b"\x55\x04\x0b"  # OIDs 2.5.4.3 and 2.5.4.11
_VERSION, _BMP_STRING, _UTC_TIME = 0xA0, 0x1E, 0x17


class Certificate(NamedTuple):
    """The parts of a certificate that are used here.

    Attributes:
      names: common names of the subject (CN).
      units: organizational units of the subject (OU).
      begins, ends: start and end of the validity.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    begins: datetime.datetime
    ends: datetime.datetime


def read(der: bytes) -> Certificate:
    """Parse a certificate in DER.

    Raises:
      InvalidArgumentError: the bytes are not a certificate.
    """
    try:
        ((_, certificate),) = _items(der)
        _, content = next(_items(certificate))
        fields = [value for tag, value in _items(content) if tag != _VERSION]
        _, _, _, validity, subject = fields[:5]  # after serial, algorithm and issuer
        pairs = [
            (kind, _text(tag, value))
            for _, attributes in _items(subject)
            for _, attribute in _items(attributes)
            for (_, kind), (tag, value) in [tuple(_items(attribute))]
        ]
        begins, ends = (_time(tag, value) for tag, value in _items(validity))
    except (ValueError, IndexError, StopIteration):
        raise errors.InvalidArgumentError("it is not an X.509 certificate") from None
    return Certificate(
        tuple(text for kind, text in pairs if kind == _NAME),
        tuple(text for kind, text in pairs if kind == _UNIT),
        begins,
        ends,
    )


def _items(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tags and values of the elements in DER bytes."""
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
    format_ = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    time = datetime.datetime.strptime(value.decode("ascii"), format_)
    return time.replace(tzinfo=datetime.UTC)
