"""The loaders of the examples: the data they read, and the files they reject."""

import pathlib
import struct
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import datasets


@pytest.mark.slow
def test_digits_are_complete_and_split():
    data = datasets.digits()
    assert len(data.train.labels) + len(data.test.labels) == 1797
    assert data.train.images.shape[1:] == data.test.images.shape[1:] == (8, 8, 1)
    for split in (data.train, data.test):
        assert split.images.dtype == np.float32
        assert split.images.min() == 0.0
        assert split.images.max() == 1.0
        assert set(split.labels) == set(range(10))
    both = np.concatenate([data.train.images, data.test.images]).reshape(1797, -1)
    assert both.sum() * 16 == 561718  # of all pixels, as scikit-learn ships them


def test_mnist_files_are_read(write_mnist):
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (7, 5, 4)), rng.integers(0, 10, 7)
    t10k = rng.integers(0, 256, (3, 5, 4)), rng.integers(0, 10, 3)
    data = datasets.mnist(write_mnist(train, t10k))
    assert data.name == "my-mnist"
    for split, (images, labels) in ((data.train, train), (data.test, t10k)):
        np.testing.assert_allclose(split.images[..., 0], images / 255, rtol=1e-6)
        np.testing.assert_array_equal(split.labels, labels)


@pytest.mark.parametrize(
    ("code", "dtype"), [(0x08, "u1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4")]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_idx_file_is_read(code, dtype, shape, tmp_path):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = tmp_path / "file"
    header = struct.pack(f">2xBB{len(shape)}I", code, len(shape), *shape)
    path.write_bytes(header + array.tobytes())
    np.testing.assert_array_equal(datasets.read_idx(path), array)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an idx file"),
        (b"\x89PNG\r\n", "not an idx file: it begins with 89 50 4e 47"),
        (b"\0\0\x07\x01\0\0\0\1a", "not an idx file"),
        (b"\0\0\x08\x03\0\0\0\1", "ends within its header of 16 bytes"),
        (b"\0\0\x08\x01\0\0\0\3ab", r"has 10 bytes, expected 11 for \[3\]"),
        (b"\0\0\x08\x01\0\0\0\1ab", r"has 10 bytes, expected 9 for \[1\]"),
        (b"\0\0\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", "expected"),
    ],
)
def test_bad_idx_file_is_rejected(raw, message, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        datasets.read_idx(path)


def test_mnist_rejects_unequal_numbers_of_images_and_labels(write_mnist):
    images = np.zeros((3, 2, 2))
    folder = write_mnist((images, np.zeros(2)), (images, np.zeros(3)))
    with pytest.raises(ValueError, match=r"got \[3, 2, 2\] and \[2\]"):
        datasets.mnist(folder)
