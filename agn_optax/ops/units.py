"""Rates and sizes as people write them: ``1Gbit``, ``100Mbit/s``, ``1.2GB``."""

from __future__ import annotations

import math
import re

from agn_optax import errors

_POWERS = " kmgt"
_RATE = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?) *"
    r"(?:(?P<prefix>[kmgt])(?P<binary>i?))?"
    r"(?P<unit>bits?|bytes?|b)"
    r"(?P<per_second>/s|ps)?",
    re.IGNORECASE,
)


def rate(text: str, what: str) -> float:
    """Parse a rate, and return it in bytes per second.

    The unit ``b`` is a bit and ``B`` a byte of 8 bits; ``bit`` and ``byte`` are written
    in any case. Prefixes, in any case, are k, M, G and T for powers of 1000, and Ki,
    Mi, Gi and Ti for powers of 1024. ``/s`` or ``ps`` may follow.

    Args:
      text: a rate such as ``"1Gbit"``, ``"100 Mb/s"`` or ``"1.2GB"``.
      what: name of the rate, for the error message.

    Returns:
      The rate in bytes per second.

    Raises:
      InvalidArgumentError: the text is not a rate, or the rate is not positive.

    Example:
      >>> rate("1Gbit", "bandwidth"), rate("100Mb/s", "bandwidth")
      (125000000.0, 12500000.0)
      >>> rate("1.5GB", "bandwidth"), rate("1KiB", "bandwidth")
      (1500000000.0, 1024.0)
    """
    found = _RATE.fullmatch(text.strip())
    number = float(found["number"]) if found else 0.0
    if found is None or not 0 < number < math.inf:
        raise errors.InvalidArgumentError(
            f"{what} must be a positive rate with its unit, such as 1Gbit, 100Mbit or "
            f"1.2GB (per second; b is a bit, B a byte), got {text!r}"
        )
    base = 1024 if found["binary"] else 1000
    power = _POWERS.index((found["prefix"] or " ").lower())
    return number * base**power / (8 if _is_bits(found["unit"]) else 1)


def size(text: str, what: str) -> int:
    """Parse a size, and return it in bytes.

    A size is written like a rate in bytes, but without ``/s`` or ``ps``.

    Raises:
      InvalidArgumentError: the text is not a size, or the size is not positive.

    Example:
      >>> size("1.5GB", "memory"), size("16 GiB", "memory")
      (1500000000, 17179869184)
    """
    found = _RATE.fullmatch(text.strip())
    is_size = found is not None and not (found["per_second"] or _is_bits(found["unit"]))
    if not is_size:
        raise errors.InvalidArgumentError(
            f"{what} must be a size with its unit, such as 512MB or 16GiB, got {text!r}"
        )
    return int(rate(text, what))


def _is_bits(unit: str) -> bool:
    return unit == "b" or unit.lower().startswith("bit")


def in_bytes(number: float) -> str:
    """Return a number of bytes as text, with about three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
