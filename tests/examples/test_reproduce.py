"""Results of papers: the programs of examples/reproduce/, in small."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import asyncdiloco
import easgd_stability
import error_feedback

pytestmark = pytest.mark.slow


def table(out):
    """Return the words of each row after the first."""
    return [row.split() for row in out.splitlines()[1:]]


def test_easgd_is_stable_up_to_its_bound(capsys):
    assert easgd_stability.main(["--etas=1.0"]) == 0
    rows = table(capsys.readouterr().out)
    assert [row[:3] for row in rows] == [["1.0", "1", "0.667"], ["1.0", "3", "0.667"]]
    for below, above, step_first in (map(float, row[3:]) for row in rows):
        assert below < 1e-3
        assert above > 1e2
        assert step_first < 1e-3


def test_signs_do_not_converge_without_error_feedback(capsys):
    assert error_feedback.main(["--steps=300"]) == 0
    rows = table(capsys.readouterr().out)
    assert [" ".join(row[:2]) for row in rows] == [*error_feedback.PROBLEMS]
    for at_first, exact, signs, fed_back in (map(float, row[2:]) for row in rows):
        assert signs >= at_first  # it never falls below
        assert exact < 0.01 * at_first
        assert fed_back < 0.01 * at_first


def test_signs_keep_the_sum_of_the_parameters():
    """Without error feedback the sum stays at its first value, 2."""
    for problem in error_feedback.PROBLEMS:
        x = error_feedback.trained(problem, error_feedback.CODECS["signs"], steps=50)
        assert float(x.sum()) == pytest.approx(2.0, abs=1e-4)


@pytest.mark.timeout(900)
def test_asyncdiloco_reproduces_its_comparisons(capsys):
    assert asyncdiloco.main(["--points=12800", "--phases=12", "--every=1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split() == ["phases", *map(str, range(13))]
    found = {row[:35].strip(): row[35:].split() for row in rows}
    assert list(found) == list(asyncdiloco.METHODS)
    # The notebook's check: equal in every printed digit.
    assert found["rounds, SGD"] == found["buffered by 4, SGD, infinite grace"]
    last = {name: float(losses[-1]) for name, losses in found.items()}
    delayed, plain = "one by one, delayed Nesterov", "one by one, Nesterov"
    assert last[delayed] < last[plain] - 0.02
    # One by one, the loss is as good as in rounds.
    assert last[delayed] == pytest.approx(last["rounds, Nesterov"], abs=0.02)
    assert float(found[delayed][0]) - last[delayed] > 0.05
