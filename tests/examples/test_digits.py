"""The main example in small: real data, real processes, one killed, and a plot."""

import pathlib
import re
import sys
import tempfile

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import digits
import digits_launch
import digits_results as results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # real processes, on a busy machine


def run_demo(*arguments):
    """Run the demo; return for each method its runs, one per seed."""
    quick = ("--mbit", 2000)
    return results.by_method(digits_launch.main([str(x) for x in (*quick, *arguments)]))


def check_exchanges(run, wanted, extra=2):
    """Check the exchanges: as many as wanted, or up to one more from each process."""
    made = {name: len(reports) for name, reports in run.exchanges.items()}
    assert set(made) == {"fast", "slow"}
    assert wanted <= sum(made.values()) <= wanted + extra
    # Messages and centers of about 139,000 parameters, in float32.
    size = 2 * 4 * sum(x.size for x in jax.tree.leaves(run.center)) / 1e6
    assert run.megabytes[-1] == pytest.approx(size * sum(made.values()))
    assert size > 1.1
    for points in (run.samples, run.megabytes, run.seconds):
        assert points == sorted(points)
    assert len(run.staleness) == sum(made.values())
    assert 0 < run.waiting < 1


def check_rounds(run, wanted):
    """Check asynchronous exchanges, one after every 10 steps of 32 samples.

    The staleness of a message is the number of other messages applied meanwhile.
    """
    check_exchanges(run, wanted, extra=3 if run.method.kills else 2)
    assert run.samples[-1] == len(run.staleness) * 10 * 32
    assert min(run.staleness) >= 0
    assert max(run.staleness) >= 1


def test_demo_trains_on_digits_and_survives_a_killed_worker(tmp_path, capsys):
    names = ["averaging", "one worker", "AGN, one killed"]
    options = ["--steps", 60, "--seeds", 1, "--output", tmp_path, "--methods", *names]
    runs = {name: run for name, (run,) in run_demo(*options).items()}
    assert list(runs) == names
    for name in names:
        assert runs[name].accuracy[-1] > 0.8  # 94 % and more in the large
    assert runs["one worker"].samples[-1] == 2 * 60 * 32

    # Every worker sends a gradient at every step, and none is stale.
    every_step = runs["averaging"]
    check_exchanges(every_step, wanted=2 * 60, extra=0)
    assert {len(reports) for reports in every_step.exchanges.values()} == {60}
    assert set(every_step.staleness) == {0}
    assert every_step.samples[-1] == 2 * 60 * 32

    killed = runs["AGN, one killed"]
    check_rounds(killed, wanted=36)
    died, back = killed.death_and_return
    assert 9 <= died <= back
    assert {name: len(starts) for name, starts in killed.starts.items()} == {
        "fast": 2,
        "slow": 1,
    }
    assert [report.restarts for report in killed.exchanges["fast"]][-1] == 1

    output = capsys.readouterr().out
    news = [line for line in output.splitlines() if "agn-optax:" in line]
    assert news == [
        "fast: agn-optax: killed by SIGKILL",
        "fast: agn-optax: restarted (1 of 1) after SIGKILL",
    ]
    for name in names:
        assert f"│{name}" in output  # in the table
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    saved = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"agn-one-killed", "averaging", "one-worker"}


def test_demo_trains_on_idx_files_with_two_seeds(tmp_path, squares, capsys):
    output = tmp_path / "output"
    small = ("--steps", 40, "--seeds", 2, "--methods", "EASGD")
    runs = run_demo("--mnist", squares, *small, "--output", output)["EASGD"]
    assert [run.seed for run in runs] == [0, 1]
    for run in runs:
        check_rounds(run, wanted=8)
        assert run.death_and_return is None
        assert run.accuracy[-1] > 0.5
    assert runs[0].accuracy != runs[1].accuracy
    assert f"{squares.name}: 2 workers" in capsys.readouterr().out
    assert (output / "digits.png").exists()


def test_shares_of_workers_are_disjoint_and_complete():
    shares = [digits.share(10, rank, 3) for rank in range(3)]
    assert sorted(np.concatenate(shares)) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    drawn = digits.batches(shares[0], 3, 0)
    epochs = [next(drawn) for _ in range(4 * len(shares[0]))]
    assert np.unique(epochs, return_counts=True)[1].tolist() == [12] * len(shares[0])


@pytest.mark.parametrize(
    ("costs", "title"),
    [
        ({"AGN": 1.0, "EASGD": 3.0}, "95 % with 1/12 to 1/4 of the bytes of"),
        ({"AGN": 10.0}, "95 % with 0.83 of the bytes of averaging at every step"),
        ({"AGN": 1.0, "EASGD": 13.0}, "1/12 of the bytes .* every step, except EASGD$"),
        ({"AGN": 13.0}, "95 %: averaging at every step is cheapest in bytes"),
    ],
)
def test_title_compares_the_methods_with_averaging_at_every_step(costs, title):
    assert re.search(
        title, results.conclusion(95.0, {"averaging": 12.0, **costs}, "bytes")
    )


def test_common_level_is_reached_by_all_and_costs_its_first_time():
    method = digits.METHODS["AGN"]
    runs = [
        results.Run(method, seed, 1, accuracy=accuracy, seconds=[0.0, 1.0, 2.0])
        for seed, accuracy in enumerate([[0.1, 0.957, 0.94], [0.1, 0.9, 0.98]])
    ]
    level = results.common_level(runs)
    assert level == 0.955
    assert [run.cost(level, run.seconds) for run in runs] == [1.0, 2.0]
    assert runs[0].cost(0.96, runs[0].seconds) == np.inf


@pytest.mark.parametrize(
    "option", ["--workers", "--period", "--steps", "--batch", "--seeds"]
)
def test_options_of_zero_are_rejected(option, capsys):
    with pytest.raises(SystemExit) as rejected:
        digits_launch.main([option, "0"])
    assert rejected.value.code == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_folder_without_the_files_is_rejected(tmp_path):
    output = tmp_path / "output"
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        digits_launch.main(["--mnist", str(tmp_path), "--output", str(output)])
    assert not output.exists()


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """A function that runs the demo with another program as its workers."""

    def run(program):
        worker = tmp_path / "worker.py"
        worker.write_text(program)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(digits_launch, "WORKER", worker)
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        try:
            small = ["--methods", "DOWNPOUR", "--seeds", "1"]
            digits_launch.main([*small, "--output", str(tmp_path / "output")])
        finally:
            assert not list(scratch.iterdir())

    return run


def test_failed_worker_fails_the_demo(run_with, capsys):
    with pytest.raises(
        SystemExit, match=r"worker '(fast|slow)' has failed with exit status 1"
    ):
        run_with("raise ValueError('this went wrong')")
    assert "ValueError: this went wrong" in capsys.readouterr().out


def test_interrupt_ends_the_demo(run_with):
    with pytest.raises(KeyboardInterrupt):
        run_with(
            "import json, os, signal, sys\n"
            "if json.loads(sys.argv[1])['worker'] == 'slow':\n"  # the last to start
            "    os.kill(os.getppid(), signal.SIGINT)\n"
            "signal.pause()\n"
        )


def test_checkpoint_equals_the_center(tmp_path):
    center = {"w": jax.numpy.arange(3.0)}
    result = results.Run(digits.METHODS["AGN"], seed=0, center=center)
    read = results.save_and_read_back(result, tmp_path)
    np.testing.assert_array_equal(read["w"], center["w"])
