"""AGN, EASGD and DOWNPOUR on digits, in small."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import agn

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_agn_fails_with_many_workers_and_a_short_period_and_adag_does_not(tmp_path):
    assert agn.main(["--quick", f"--folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "agn.json").read_text())
    cells, seconds = found["tables"]
    # n, λ, E, E at 0.2, then training / validation accuracy in % of each method.
    (n, period, *_), (_, long_period, *_) = cells["rows"]
    assert (n, period, long_period) == ("40", "10", "40")
    short, long = (
        {
            method: float(cell.split(" / ")[0])
            for method, cell in zip(agn.RULES, row[4:9], strict=True)
        }
        for row in cells["rows"]
    )
    assert short[agn.AGN] < 50 < short[agn.EASGD]
    assert short[agn.ADAG] > 60
    assert max(short[agn.DOWNPOUR], long[agn.DOWNPOUR]) < 60
    assert long[agn.AGN] > 70  # four times as many steps for a message: it trains
    assert float(cells["rows"][0][2]) < 0.5 < float(cells["rows"][1][2])
    # The two numbers of the simulated cluster fit the source's times.
    for simulated, source in (
        map(float, cell.split(" / ")) for row in seconds["rows"] for cell in row[1:]
    ):
        assert simulated == pytest.approx(source, rel=0.15)
    verdicts = [claim["verdict"] for claim in found["claims"]]
    assert verdicts[1:] == ["reproduced"] * 3


@pytest.mark.timeout(900)
def test_agn_trains_on_idx_files(tmp_path, squares):
    options = f"--quick --steps=1000 --mnist={squares} --folder={tmp_path}".split()
    assert agn.main(options) == 0
    found = json.loads((tmp_path / "agn.json").read_text())
    for row in found["tables"][0]["rows"]:
        training, validation = map(float, row[5].split(" / "))
        assert training > 90  # EASGD: the square can be found in an image of 28 by 28
        assert validation > 90
