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
