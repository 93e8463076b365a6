"""Records on disk: all written data is read back, and damage is detected."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agn_optax.center.durability import _records

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.float32(3.5).reshape(()),
    np.zeros((0, 5), np.float32),
    np.asarray(jnp.arange(3, dtype="bfloat16")),
    np.arange(3000, dtype=np.int32)[::2],  # larger than a page, not contiguous
    np.array([True, False]),
]


@pytest.fixture
def file(tmp_path):
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """Return a function that fills one file, shared by all examples of a property."""
    opened = os.open(tmp_path_factory.mktemp("records") / "f", os.O_RDWR | os.O_CREAT)

    def of(contents):
        os.ftruncate(opened, 0)
        os.pwrite(opened, contents, 0)
        return opened

    yield of
    os.close(opened)


def put(file, records, position=0, on_disk=0, parent=bytes(16)):
    """Write ``{number: arrays}``; return where each record begins, and the end."""
    begins = []
    for number, arrays in records.items():
        begins.append(position)
        about = {"n": number}
        record = _records.encode(number, about, [arrays], parent, on_disk)
        assert sum(map(len, record.pieces)) == record.size
        _records.write(file, record.pieces, position)
        position, parent = position + record.size, record.digest
    return [*begins, position]


def numbers(file, first):
    """Return the numbers of readable records, and of bytes reported as cut off."""
    cut = []
    read = [record.number for record in _records.read_all(file, first, cut.append)]
    return read, sum(cut)


def damage(file, position):
    byte = os.pread(file, 1, position)
    os.pwrite(file, bytes([byte[0] ^ 1]), position)


def test_written_records_are_read(file):
    put(file, {7: ARRAYS, 8: []})
    cut = []
    first, second = _records.read_all(file, 7, cut.append)
    assert not cut
    assert (first.number, second.number) == (7, 8)
    assert first.about == {"n": 7}
    for before, after in zip(ARRAYS, first.arrays, strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        np.testing.assert_array_equal(before, after)
        assert not after.size or after.ctypes.data % 64 == 0


def test_record_with_more_pieces_than_one_call_accepts_is_written(file):
    many = [np.full(1, i, np.int32) for i in range(3000)]
    put(file, {0: many})
    (record,) = _records.read_all(file, 0, pytest.fail)
    assert [int(each[0]) for each in record.arrays] == list(range(3000))


def test_short_writes_are_continued(file, monkeypatch):
    whole = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda f, pieces, at: whole(f, [pieces[0][:100]], at)
    )
    put(file, {0: ARRAYS[:2], 1: []})
    assert numbers(file, 0) == ([0, 1], 0)


WRITTEN = b"".join(_records.encode(0, {"n": 0}, [ARRAYS], bytes(16)).pieces)


@given(st.integers(0, len(WRITTEN) - 1), st.integers(0, 7))
def test_every_bit_flip_is_detected(file_of, at, bit):
    """Bits in the padding do not matter."""
    changed = bytearray(WRITTEN)
    changed[at] ^= 1 << bit
    try:
        record = _records.read(file_of(changed), 0, len(changed))
    except _records.DamagedError:
        return
    if record is not None:
        assert (record.number, record.about) == (0, {"n": 0})
        for before, after in zip(ARRAYS, record.arrays, strict=True):
            np.testing.assert_array_equal(before, after)


def test_exchanged_pages_are_detected(file):
    pages = np.arange(1024, dtype=np.float32)
    _, end = put(file, {0: [np.concatenate([pages, pages + 1])]})
    begin = next(
        at for at in range(64, end, 64) if os.pread(file, 8, at) == bytes(pages[:2])
    )
    first, second = (os.pread(file, 4096, begin + i * 4096) for i in (0, 1))
    os.pwrite(file, second + first, begin)
    assert _records.read(file, 0, end) is None


@pytest.mark.parametrize("allocated", [0, 1 << 20])
def test_truncated_last_record_is_ignored(file, allocated):
    begins = put(file, {0: ARRAYS, 1: ARRAYS})
    end = begins[-1]
    for cut in (begins[1] + 1, begins[1] + 64, begins[1] + 4100, begins[1] + 5000):
        os.ftruncate(file, cut)
        os.ftruncate(file, max(cut, allocated))
        assert numbers(file, 0)[0] == [0]
        assert numbers(file, 0)[1] > 0
        put(file, {0: ARRAYS, 1: ARRAYS})
    damage(file, end - 5000)
    assert numbers(file, 0)[0] == [0]
    os.ftruncate(file, begins[1])
    os.ftruncate(file, max(begins[1], allocated))
    assert numbers(file, 0) == ([0], 0)


def test_damage_within_the_last_unsynced_write_is_ignored(file):
    """The second record reached the disk, the first did not; neither was confirmed."""
    _, end = put(file, {0: []})
    begin, _, _ = put(file, {1: [], 2: []}, end, on_disk=end)
    damage(file, begin + 70)
    assert numbers(file, 0)[0] == [0]


def test_damage_to_synced_records_raises(file):
    begins = put(file, {0: ARRAYS, 1: ARRAYS})
    put(file, {2: []}, begins[-1], on_disk=begins[-1])
    damage(file, begins[1] + 5000)
    with pytest.raises(_records.DamagedError, match=r"record 1 at byte .* damaged"):
        numbers(file, 0)
    damage(file, begins[1] + 5000)
    damage(file, begins[1])  # its length is damaged, too
    with pytest.raises(_records.DamagedError, match=r"record 2 after it is complete"):
        numbers(file, 0)


def test_missing_record_raises(file):
    put(file, {3: [], 5: []})
    with pytest.raises(_records.DamagedError, match="record 4 is missing"):
        numbers(file, 3)


def test_record_that_does_not_name_the_one_before_raises(file):
    _, end = put(file, {0: ARRAYS})
    put(file, {1: ARRAYS}, end)
    with pytest.raises(_records.DamagedError, match="record 1 does not continue the"):
        numbers(file, 0)


def test_records_are_read_without_their_arrays(file, file_of):
    put(file, {0: ARRAYS, 1: []})
    whole = list(_records.read_all(file, 0, pytest.fail))
    short = list(_records.read_all(file, 0, pytest.fail, with_arrays=False))
    chain = file_of(b"".join(record.head_and_about for record in whole))
    found = list(_records.read_all(chain, 0, pytest.fail, is_chain=True))
    for before, *after in zip(whole, short, found, strict=True):
        for record in after:
            assert not record.arrays
            assert record.digest == before.digest
            assert record.contents[0].digest == before.contents[0].digest
            assert record.contents[0].leaves == before.contents[0].leaves


def test_later_format_raises(file):
    _, end = put(file, {0: []})
    os.pwrite(file, b"\x09", 8)
    with pytest.raises(_records.DamagedError, match="format 9"):
        _records.read(file, 0, end)
