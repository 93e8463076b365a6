"""docs/results.md: written from the files of the programs, none missing or in small."""

import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/reproduce"))
import results
from report import Claim, Report, arguments, spread

PAGE = results.PAGE.read_text()


def test_page_is_what_the_files_say():
    assert results.page(PAGE) == PAGE, "run: make results ARGS=--write"


def test_every_program_has_a_label_and_a_section():
    assert re.findall(r"<!-- begin (\w+) -->", PAGE)[0] == "claims"
    sections = re.findall(r"<!-- begin (\w+) -->", PAGE)[1:]
    assert sorted(sections) == results.programs()
    for name in sections:
        assert f"\n({name})=\n## " in PAGE


def test_every_file_belongs_to_a_program():
    files = {path.name for path in results.FOLDER.iterdir()}
    names = results.programs()
    assert files == {f"{name}.{kind}" for name in names for kind in ("json", "svg")}


@pytest.mark.parametrize("name", results.programs())
def test_results_are_of_a_full_run_with_spread(name):
    found = results.found(name)
    assert not found["quick"]
    assert found["seeds"] == 0 or found["seeds"] >= 3  # 0: nothing is random
    assert found["claims"]
    for claim in found["claims"]:
        assert claim["verdict"] == "reproduced" or claim["reason"]


def test_summary_has_a_row_for_each_claim():
    summary = PAGE.partition("<!-- begin claims -->")[2].partition("<!-- end")[0]
    rows = [line for line in summary.splitlines() if line.startswith("| [")]
    claims = [c for name in results.programs() for c in results.found(name)["claims"]]
    assert len(rows) == len(claims)
    for row, claim in zip(rows, claims, strict=True):
        assert claim["says"] in row
        assert f"**{claim['verdict']}**" in row


def test_report_writes_what_the_page_needs(tmp_path, capsys):
    options = arguments("A program.", [f"--folder={tmp_path}", "--rate=2"], rate=0.5)
    assert (options.rate, options.seeds, options.quick) == (2.0, 3, False)
    report = Report("small", "Small", "Nobody, 2026", options)
    with pytest.raises(ValueError, match="is in part: give the reason"):
        report.claim("water is dry", "yes", "no", "in part")
    report.claim("water is wet", "1", spread([2.0, 1.0, 4.0], 1), "reproduced")
    report.table("Numbers", ["a", "bc"], [[1, "x"], [22, "y"]])
    report.figure.subplots().plot([1, 2])
    assert report.finish() == 0
    assert report.claims == [
        Claim("water is wet", "1", "2.0 (1.0 to 4.0)", "reproduced")
    ]
    assert "Numbers\na   bc\n1   x\n22  y\n" in capsys.readouterr().out
    assert (tmp_path / "small.svg").stat().st_size > 1000
    assert '"verdict": "reproduced"' in (tmp_path / "small.json").read_text()


def test_quick_runs_have_one_seed():
    assert arguments("A program.", ["--quick"]).seeds == 1
    with pytest.raises(SystemExit):
        arguments("A program.", ["--seeds=0"])
