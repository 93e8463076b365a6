"""Real data: scikit-learn's digits, MNIST from its idx files, and Python's source."""

from __future__ import annotations

import gzip
import math
import pathlib
import struct
import sysconfig
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# The third byte of an idx file's magic number is the type of the elements, which are
# big-endian.
_IDX_TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


class Split(NamedTuple):
    """Images and their classes."""

    images: Array  # float32 [n, height, width, 1], in [0, 1]
    labels: Array  # int32 [n]


class Dataset(NamedTuple):
    """Training and test images."""

    name: str
    train: Split
    test: Split


class Text(NamedTuple):
    """Training and test characters; uint8 below 128."""

    name: str
    train: Array
    test: Array


def digits(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 slow, and for these only

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., None]
    labels = bunch.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = np.split(order, [round(test_fraction * len(labels))])
    return Dataset(
        "digits",
        train=Split(images[train], labels[train]),
        test=Split(images[test], labels[test]),
    )


def mnist(folder: str | pathlib.Path) -> Dataset:
    """Load MNIST, or a dataset in its format, from a folder with the four idx files.

    Args:
      folder: the folder of ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
        ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, plain or gzipped.

    Returns:
      The dataset, with pixels scaled to [0, 1].

    Raises:
      FileNotFoundError: one of the files is missing.
      ValueError: one of the files does not have the content of its name.
    """
    folder = pathlib.Path(folder)

    def split(prefix: str) -> Split:
        images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"))
        labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{folder}: expected {prefix} images [n, height, width] and as many "
                f"labels [n], got {list(images.shape)} and {list(labels.shape)}"
            )
        return Split(
            images.astype(np.float32)[..., None] / 255, labels.astype(np.int32)
        )

    return Dataset(folder.resolve().name, train=split("train"), test=split("t10k"))


def read_idx(path: pathlib.Path) -> Array:
    """Read an idx file: two zero bytes, type, rank, sizes, then the elements."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise ValueError(
            f"{path} is not an idx file: it begins with {raw[:4].hex(' ')}"
        )
    dtype, rank = _IDX_TYPES[raw[2]], raw[3]
    header = 4 + 4 * rank
    if len(raw) < header:
        raise ValueError(f"{path} ends within its header of {header} bytes")
    shape = struct.unpack(f">{rank}I", raw[4:header])
    expected = header + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise ValueError(
            f"{path} has {len(raw)} bytes, expected {expected} for {list(shape)}"
        )
    return np.frombuffer(raw, dtype, offset=header).reshape(shape)


def _find(folder: pathlib.Path, name: str) -> pathlib.Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"neither {name} nor {name}.gz in {folder}")


def python_source(megabytes: float = 8.0, *, test_fraction: float = 0.05) -> Text:
    """Load source text of Python's standard library, which every machine has."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if "site-packages" not in path.parts and "test" not in path.parts
    )
    # A fixed random order: all machines with the same Python version take the same
    # files, from all parts of the library.
    np.random.default_rng(0).shuffle(files)
    parts: list[bytes] = []
    size, wanted = 0, round(megabytes * 1e6)
    for path in files:
        if size >= wanted:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if size < wanted:
        raise ValueError(f"{folder} has {size / 1e6:.1f} MB of source, not {megabytes}")
    characters = np.frombuffer(b"".join(parts)[:wanted], np.uint8)
    characters = np.where(characters < 128, characters, ord("?")).astype(np.uint8)
    cut = round(len(characters) * (1 - test_fraction))
    return Text("Python's standard library", characters[:cut], characters[cut:])
