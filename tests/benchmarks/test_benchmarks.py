"""Benchmarks give numbers, a page of results and plots; CI runs all of them."""

import json
import pathlib
import sys

import exchange
import measuring
import plots
import pytest
import run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # real processes, on a busy machine


def check(found, benchmark):
    """Check that the results of a benchmark are complete."""
    assert found["command"].startswith(f"python benchmarks/{benchmark}.py --quick")
    assert found["machine"]["jax"]
    assert found["tables"]
    for table in found["tables"]:
        assert table["rows"]
        for row in table["rows"]:
            for ratio in {"ratio", "speed"} & row.keys():
                assert 0 < row["quartiles"][0] <= row[ratio] <= row["quartiles"][1]


def test_quick_run_writes_results_and_plots_them(tmp_path, monkeypatch):
    """The benchmark runs in this process, to save the imports."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", [exchange.__file__, "--quick", "--json", str(file)]
    )
    exchange.Exchange.main()
    found = json.loads(file.read_text())
    check(found, "exchange")
    (picture,) = plots.draw([{"benchmark": "exchange", **found}], tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_run_all_writes_results_and_their_page(tmp_path, monkeypatch):
    quick = ["--quick", "--only", "startup", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [run_all.__file__, *quick])
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    run_all.main()
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}
    (results,) = json.loads((tmp_path / "results.json").read_text())
    check(results, "startup")
    page = (tmp_path / "results.md").read_text()
    assert "## startup\n\n`python benchmarks/startup.py --quick`" in page
    for table in results["tables"]:
        assert measuring.markdown(table) in page


def test_failed_benchmark_is_reported(tmp_path, monkeypatch, capfd):
    """The results of the others are written."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import measuring\n"
        "measuring.Benchmark().add('key', 'title', [{'ratio': float('nan')}])\n"
    )
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "RUNS", ("broken",))
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(measuring.__file__).parent))
    output = tmp_path / "output"
    monkeypatch.setattr(
        sys, "argv", [run_all.__file__, "--only", "broken", "--output", str(output)]
    )
    with pytest.raises(SystemExit, match="failed: broken"):
        run_all.main()
    assert "title: a number is not finite: {'ratio': nan}" in capfd.readouterr().err
    assert json.loads((output / "results.json").read_text()) == []
