"""The main job, small: real data, real threads, real checkpoints and a real picture."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_demo(*arguments):
    return subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-B", EXAMPLES / "digits.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def accuracies(output):
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {row[1].strip(): float(row[2].strip().rstrip("%")) for row in rows}


def test_trains_on_the_digits(tmp_path):
    done = run_demo("--steps", 300, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(accuracies(done.stdout)) == {"AGN", "EASGD", "DOWNPOUR", "one worker"}
    assert accuracies(done.stdout)["AGN"] > 90
    picture = (tmp_path / "digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    saved = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"agn", "easgd", "downpour", "one-worker"}


def test_trains_on_idx_files(tmp_path, write_mnist):
    """Images of MNIST's size, in which the class is where the bright square is."""
    rng = np.random.default_rng(0)

    def draw(n):
        labels = rng.integers(0, 10, n)
        images = rng.integers(0, 60, (n, 28, 28))
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(label, 5)
            image[10 * row : 10 * row + 5, 5 * column : 5 * column + 5] = 255
        return images.astype(np.uint8), labels.astype(np.uint8)

    folder = write_mnist(train=draw(400), t10k=draw(100))
    output = tmp_path / "output"
    done = run_demo("--mnist", folder, "--steps", 30, "--output", output)
    assert done.returncode == 0, done.stderr
    assert folder.name in done.stdout
    assert accuracies(done.stdout)["AGN"] > 50
    assert (output / "digits.png").exists()


@pytest.mark.parametrize("option", ["--workers", "--period", "--steps", "--batch"])
def test_refuses_zero(option, tmp_path):
    done = run_demo(option, 0, "--output", tmp_path)
    assert done.returncode == 2
    assert f"{option} must be at least 1, got 0" in done.stderr


def test_refuses_a_folder_without_the_files(tmp_path):
    done = run_demo("--mnist", tmp_path, "--output", tmp_path / "output")
    assert done.returncode != 0
    assert "train-images-idx3-ubyte" in done.stderr
    assert not (tmp_path / "output").exists()
