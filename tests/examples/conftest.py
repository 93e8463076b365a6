import gzip
import struct

import numpy as np
import pytest


def idx_bytes(array):
    header = struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape)
    return header + np.ascontiguousarray(array, np.uint8).tobytes()


@pytest.fixture
def write_mnist(tmp_path):
    """A function that writes two splits as the four files of MNIST, some gzipped."""

    def write(train, t10k):
        folder = tmp_path / "my-mnist"
        folder.mkdir()
        for prefix, (images, labels) in {"train": train, "t10k": t10k}.items():
            (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(
                gzip.compress(idx_bytes(images))
            )
            (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
        return folder

    return write


@pytest.fixture
def squares(write_mnist):
    """A folder in MNIST's format: the class of an image is the place of its square."""
    rng = np.random.default_rng(0)

    def draw(n):
        labels = rng.integers(0, 10, n)
        images = rng.integers(0, 60, (n, 28, 28))
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(label, 5)
            image[10 * row : 10 * row + 5, 5 * column : 5 * column + 5] = 255
        return images.astype(np.uint8), labels.astype(np.uint8)

    return write_mnist(train=draw(400), t10k=draw(100))
