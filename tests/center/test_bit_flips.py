"""Every bit flip in the files of a center is detected.

The result is the original data, or an error that names the file and the record. With
``AGN_OPTAX_STRIDE=1`` every byte of every file is changed in turn, else every 7th.
"""

import contextlib
import logging
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest
from helpers import sessions, shared, tuning

from agn_optax import errors
from agn_optax.center import Journal, LocalCenter
from agn_optax.center.durability._directory import Directory

RESERVED = 1 << 13
STRIDE = int(os.environ.get("AGN_OPTAX_STRIDE", "7"))


def read(directory):
    """Return all records found in a directory as bytes, and why the id would change."""
    with contextlib.closing(Directory(directory)) as opened:
        snapshot = opened.load()
        records = [snapshot, *opened.replay(snapshot)]
        return [
            (each.number, each.about, [array.tobytes() for array in each.arrays])
            for each in records
        ], opened.new_id_reason


@pytest.fixture(params=["journal", "ended"])
def kept(request, tmp_path, monkeypatch):
    """Return the directory of a center that was killed or has ended."""
    tuning.set_least_reserved(monkeypatch, RESERVED)
    durability = Journal(tmp_path / "a")
    # Arrays of 12 and 4 bytes leave gaps in blocks of 64.
    params = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    center = LocalCenter(shared.downpour(), params, durability=durability)
    for version in range(3):
        message = {"a": jnp.full(3, 0.1), "b": jnp.ones(())}
        sessions.exchange(center, message, anchor_version=version, worker="w")
    if request.param == "ended":
        center.close()
    yield shutil.copytree(tmp_path / "a", tmp_path / "copy")
    center.close()


@pytest.mark.few(1)
def test_every_bit_flip_in_a_file_is_detected(kept, caplog):
    caplog.set_level(logging.WARNING, "agn_optax")
    whole, reason = read(kept)
    assert not caplog.text
    for path in sorted(kept.iterdir()):
        data = path.read_bytes()
        end, is_lock = len(data), path.name == "lock"
        if path.name.startswith("journal"):  # a journal is longer than its records
            end = len(data.rstrip(b"\0"))
            end += -end % 64
        positions = [*range(0, end, STRIDE), *range(end, len(data), 97)]
        for at in positions:
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            path.write_bytes(changed)
            where = f"byte {at} of {path.name}"
            if at >= end:  # nothing had been written here, so nothing is lost
                caplog.clear()
                assert read(kept) == (whole, reason), where
                assert "these bytes are ignored" in caplog.text, where
                continue
            with pytest.raises(errors.DurabilityError) as raised:
                pytest.fail(f"{where}: {len(read(kept)[0])} of {len(whole)} records")
            assert str(path) in str(raised.value), where
            assert is_lock or "record" in str(raised.value), where
        path.write_bytes(data)
    assert read(kept) == (whole, reason)


def test_file_truncated_anywhere_is_detected(kept):
    whole, _ = read(kept)
    for path in sorted(kept.iterdir()):
        data = path.read_bytes()
        for size in range(1, len(data), 61 * STRIDE):
            path.write_bytes(data[:size])
            where = f"{size} bytes of {path.name}"
            with pytest.raises(errors.DurabilityError) as raised:
                pytest.fail(f"{where}: {len(read(kept)[0])} of {len(whole)} records")
            assert str(path) in str(raised.value), where
        path.write_bytes(data)


def test_empty_or_missing_lock_file_is_accepted(kept):
    """It may be empty after a power failure, or removed as an error message advises."""
    whole, _ = read(kept)
    lock = pathlib.Path(kept, "lock")
    for change in (lambda: lock.write_bytes(b""), lock.unlink):
        change()
        found, reason = read(kept)
        assert found == whole
        assert "lock is missing or empty, so the number of records" in reason
