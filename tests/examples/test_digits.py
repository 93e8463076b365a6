"""The main job, small: real data, real processes, a real death, and a real picture."""

import pathlib
import sys
import tempfile

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import digits

pytestmark = pytest.mark.timeout(900)  # real processes, on a busy machine


def run_demo(*arguments):
    """The runs by their names, and the accuracies."""
    runs = {run.method.name: run for run in digits.main([str(x) for x in arguments])}
    return runs, {name: run.accuracy[-1] for name, run in runs.items()}


def check_exchanges(run, wanted, lives=2):
    """As many as wanted, and those under way when the last wanted one was made."""
    made = {name: len(reports) for name, reports in run.exchanges.items()}
    assert set(made) == {"fast", "slow"}
    assert wanted <= sum(made.values()) <= wanted + lives
    assert run.samples == sorted(run.samples)
    assert run.samples[-1] == sum(made.values()) * 10 * 32
    # A message is as stale as there were others in its round.
    assert len(run.staleness) == sum(made.values())
    assert min(run.staleness) >= 0
    assert max(run.staleness) >= 1


def test_trains_on_the_digits_and_survives_a_death(tmp_path, capsys):
    names = ["AGN, one killed", "one worker"]
    runs, accuracy = run_demo("--steps", 300, "--output", tmp_path, "--methods", *names)
    assert list(runs) == names
    assert accuracy["AGN, one killed"] > 0.9  # 96 % and more in the large
    assert accuracy["one worker"] > 0.9
    assert runs["one worker"].samples[-1] == 2 * 300 * 32

    killed = runs["AGN, one killed"]
    check_exchanges(killed, wanted=60, lives=3)
    died, back = killed.death_and_return
    assert 30 <= died <= back
    assert {name: len(lives) for name, lives in killed.starts.items()} == {
        "fast": 2,
        "slow": 1,
    }
    assert [report.life for report in killed.exchanges["fast"]][-1] == 1

    output = capsys.readouterr().out
    news = [line for line in output.splitlines() if "agn-optax:" in line]
    assert news == [
        "fast: agn-optax: killed by SIGKILL",
        "fast: agn-optax: restarted (1 of 1) after SIGKILL",
    ]
    for name in names:
        assert f"│ {name} " in output  # in the table
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    saved = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"agn-one-killed", "one-worker"}


def test_trains_on_idx_files(tmp_path, write_mnist, capsys):
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
    runs, accuracy = run_demo(
        "--mnist", folder, "--steps", 60, "--methods", "EASGD", "--output", output
    )
    check_exchanges(runs["EASGD"], wanted=12)
    assert runs["EASGD"].death_and_return is None
    assert accuracy["EASGD"] > 0.5
    assert f"{folder.name}: 2 workers" in capsys.readouterr().out
    assert (output / "digits.png").exists()


@pytest.mark.parametrize("option", ["--workers", "--period", "--steps", "--batch"])
def test_refuses_zero(option, capsys):
    with pytest.raises(SystemExit) as refused:
        digits.main([option, "0"])
    assert refused.value.code == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_refuses_a_folder_without_the_files(tmp_path):
    output = tmp_path / "output"
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        digits.main(["--mnist", str(tmp_path), "--output", str(output)])
    assert not output.exists()


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Runs the demo with another program in place of its workers."""

    def run(program):
        worker = tmp_path / "worker.py"
        worker.write_text(program)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(digits, "WORKER", worker)
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        try:
            digits.main(["--output", str(tmp_path / "output")])
        finally:
            assert not list(scratch.iterdir())

    return run


def test_a_failure_of_a_worker_is_one_of_the_demo(run_with, capsys):
    with pytest.raises(SystemExit, match=r"AGN: worker '(fast|slow)' has failed with"):
        run_with("raise ValueError('this went wrong')")
    assert "ValueError: this went wrong" in capsys.readouterr().out


def test_an_interrupt_ends_all(run_with):
    with pytest.raises(KeyboardInterrupt):
        run_with(
            "import json, os, signal, sys\n"
            "if json.loads(sys.argv[1])['worker'] == 'slow':\n"  # the last to start
            "    os.kill(os.getppid(), signal.SIGINT)\n"
            "signal.pause()\n"
        )


def test_a_checkpoint_is_the_center(tmp_path):
    center = {"w": jax.numpy.arange(3.0)}
    result = digits.Run(digits.METHODS["AGN"], center=center)
    read = digits.save_and_read_back(result, tmp_path)
    np.testing.assert_array_equal(read["w"], center["w"])
