"""Mutations of sample bytes, determined by a seed."""

import random

_INTERESTING = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x7FFFFFFF, 2**31, 2**32 - 1]
_INTERESTING += [2**40, 2**63 - 1, 2**63, 2**64 - 1]
_TOKENS = [b"\0", b"\n", b"-1", b"1e999", b"NaN", b'"', b"\\u0000", b"[" * 3, b"{}"]
_TOKENS += [b"null", b"\xff\xfe", "\u00b2".encode(), b"agnoptax", b":", b"unix:"]
_MOST = 6  # changes of one input


def mutated(rng, samples):
    """Return one of the samples with up to six changes."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, _MOST])):
        _CHANGES[rng.randrange(len(_CHANGES))](rng, data, samples)
    return bytes(data)


def _at(rng, data):
    return rng.randrange(len(data) + 1)


def _flip(rng, data, samples):
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng, data, samples):
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _number(rng, data, samples):
    size = rng.choice([1, 2, 4, 8])
    at = _at(rng, data)
    number = rng.choice(_INTERESTING) % 256**size
    data[at : at + size] = number.to_bytes(size, "little")


def _remove(rng, data, samples):
    at = _at(rng, data)
    del data[at : at + 1 + int(rng.expovariate(0.1))]


def _cut(rng, data, samples):
    del data[_at(rng, data) :]


def _insert(rng, data, samples):
    at = _at(rng, data)
    data[at:at] = rng.randbytes(1 + int(rng.expovariate(0.2)))


def _token(rng, data, samples):
    at = _at(rng, data)
    data[at : at + rng.choice([0, 1, 4])] = rng.choice(_TOKENS)


def _again(rng, data, samples):
    begin, at = _at(rng, data), _at(rng, data)
    data[at:at] = data[begin : begin + 1 + int(rng.expovariate(0.05))]


def _deep(rng, data, samples):
    """Insert an opening bracket many times: nesting too deep for honest input."""
    at = _at(rng, data)
    data[at:at] = rng.choice([b"[", b"(", b'{"list":[']) * rng.choice([10, 3000])


def _splice(rng, data, samples):
    other = rng.choice(samples)
    data[_at(rng, data) :] = other[rng.randrange(len(other) + 1) :]


_CHANGES = [_flip, _flip, _byte, _number, _remove, _cut, _insert, _token, _again]
_CHANGES += [_splice]
_CHANGES = [*_CHANGES, *_CHANGES, _deep]


def generator(seed, name):
    return random.Random(f"{seed} {name}")  # noqa: S311 it is to be repeated
