"""The page of a benchmark: everything in it, nothing from outside, readable on a phone."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from bench_tools import pair_in, write_tasks
from cli_tools import Runner, refused
from markupsafe import Markup
from rich.console import Console
from test_bench_report import TASKS, made_up, of_a_peer, report_of
from test_inspect import no_errors

from draftgraph.bench.page import Bar, Part, Section, bars, lines, nice, page, paper_part, stacks
from draftgraph.bench.paper.findings import COUNTS, Finding, PaperReport
from draftgraph.bench.paper.items import grid_modes
from draftgraph.bench.reporting import Table
from draftgraph.bench.runs import Record
from draftgraph.bench.speed import bench_run
from draftgraph.bench.speed_report import SpeedReport, diagnoses
from draftgraph.cli.bench import drawn, narrowed
from draftgraph.cost.latency import Curve, Latencies

CURVE = Curve.of([32, 512], [1, 2, 4], [[0.01, 0.011, 0.012], [0.012, 0.013, 0.014]])
WARM_UP = {"kind": "warm-up", "prices": "measured", "seconds": 1.0}
NONE = dict.fromkeys(("draft", "merged", "copied", "recycled"), 0)

pytestmark = pytest.mark.usefixtures("own_cache")


def drafting(mode: str, ms: float, accepted: int = 8, **changes: Any) -> Record:
    told = {
        "accepted_by_source": NONE | {"draft": accepted},
        "checked_by_source": NONE | {"draft": 20},
        "accepted_by_depth": [accepted // 2, accepted // 4],
        "missed": {"k": 3, "theta_prob": 1},
    }
    return made_up(mode, "cats", 0, ms, **(told | changes))


def speed_report(*rows: Record, **configuration: Any) -> SpeedReport:
    modes = list(dict.fromkeys(["off", *(row["mode"] for row in rows if row["kind"] == "run")]))
    return report_of(made_up("off", "cats", 0, 20.0), *rows, modes=modes, **configuration)


def outside(document: str) -> list[str]:
    """What a page would fetch."""
    return re.findall(r"https?:|src=|@import|url\((?!data:)", document)


# Charts


def test_bars_are_as_long_as_their_values_and_names_are_escaped() -> None:
    chart = bars("A & B", [Bar("<one>", 1.0, "1.00x"), Bar("two", 2.0, "2.00x", 1.5, 2.5)], reference=1.0)
    assert "<one>" not in chart and "&lt;one&gt;" in chart and "A &amp; B" in chart
    first, second = (float(width) for width in re.findall(r'<rect [^>]*?width="([\d.]+)"', chart))
    assert second == pytest.approx(2 * first, rel=0.01)
    assert chart.count('class="interval"') == 1 and chart.count('class="reference"') == 1


def test_long_names_stand_above_their_bars() -> None:
    short, long = (bars("", [Bar(name, 1.0, "1")]) for name in ("auto", "both, siblings kept as leaves"))
    assert 'class="name"' in short and 'class="above"' in long and 'class="name"' not in long


def test_lines_and_stacks_have_a_legend() -> None:
    drawn = lines("speed", {"a": [(1, 0.5), (4, 3.0)], "b": [(1, 1.0)]}, "nodes", logarithmic=True)
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == 3 and drawn.count('"key c') == 2
    assert ">4</text>" in drawn, "the axis ends at a round number"
    stacked = stacks("shares", {"auto": {"draft": 0.75, "copied": 0.25}, "graph": {"draft": 1.0}})
    assert stacked.count("<rect") == 3 and "auto, copied: 25.0%" in stacked
    assert [nice(value) for value in (0.11, 1.0, 5.0, 62.0, 1e-30)] == [0.2, 1.0, 6.0, 80.0, 1e-9]


# Diagnosis


def test_what_works_is_called_good() -> None:
    found = diagnoses(speed_report(drafting("auto", 10.0)))
    assert [one.verdict for one in found] == ["good"] * 3
    low, high, errors = (one.line for one in found)
    assert "80% of its passes" in low and "75% of its misses the draft did not have the token" in low
    assert "2.5 nodes checked for every one accepted" in high and "all 2 answers" in errors


def test_low_acceptance_names_its_reason() -> None:
    low, *_ = diagnoses(speed_report(drafting("auto", 10.0, 4, missed={"theta_sib": 3, "theta_prob": 1})))
    assert low.verdict == "look" and "lower theta_sib" in low.line
    pruned, *_ = diagnoses(speed_report(drafting("auto", 10.0, missed={"theta_sib": 3, "theta_prob": 1})))
    assert pruned.verdict == "look", "pruning took most of what was missed"
    fixed, *_ = diagnoses(speed_report(drafting("graph", 10.0, missed={"budget": 3})))
    sized, *_ = diagnoses(speed_report(drafting("auto", 10.0, missed={"budget": 3})))
    assert "raise max_nodes" in fixed.line and "max_nodes" not in sized.line, "auto chooses its budget itself"
    nothing, *_ = diagnoses(speed_report(drafting("auto", 10.0, 0)))
    assert nothing.verdict == "look" and "No drafted token was accepted" in nothing.line


def test_older_measurements_tell_less() -> None:
    older = drafting("auto", 10.0)
    del older["checked_by_source"], older["accepted_by_depth"], older["missed"]
    report = speed_report(older)
    low, high, _ = diagnoses(report)
    assert low.verdict == high.verdict == "good" and "not told" in low.line
    document = page([report.to_part()])
    assert "Accepted tokens by who proposed them" in document and "at a depth" not in document


def test_high_computation_names_the_slow_modes() -> None:
    _, high, _ = diagnoses(speed_report(drafting("auto", 10.0), drafting("tree", 40.0)))
    assert high.verdict == "look" and "tree 0.50x" in high.line and "auto 2.00x" not in high.line


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "wrong"), ("bfloat16", "look")])
def test_another_text_is_an_error_unless_it_is_a_tie(dtype: str, verdict: str) -> None:
    *_, errors = diagnoses(speed_report(drafting("auto", 10.0, same=False), dtype=dtype))
    assert errors.verdict == verdict and "1 of 2 answers part" in errors.line and "doctor" in errors.line
    *_, tied = diagnoses(speed_report(drafting("auto", 10.0, same=False, tie=True), dtype=dtype))
    assert tied.verdict == "good"


def test_half_precision_is_judged_in_float32() -> None:
    place = {"task": "cats", "prompt": 0, "repeat": 0}
    gaps = [
        {"kind": "rescored", **place, "mode": mode, "gaps": {"tokens": 100, "not_best": 1}} for mode in ("off", "auto")
    ]
    *_, errors = diagnoses(speed_report(drafting("auto", 10.0, same=False), *gaps, dtype="bfloat16"))
    assert errors.verdict == "good" and "float32" in errors.line
    gaps[1]["gaps"] = {"tokens": 100, "not_best": 60}  # type: ignore[dict-item]
    *_, errors = diagnoses(speed_report(drafting("auto", 10.0, same=False), *gaps, dtype="bfloat16"))
    assert errors.verdict == "wrong"


def test_other_libraries_are_not_diagnosed() -> None:
    warm = WARM_UP | {"mode": "hf", "library": "transformers 5"}
    report = speed_report(warm, drafting("auto", 10.0), of_a_peer("hf", "cats", 0, 90.0, same=False))
    assert [one.verdict for one in diagnoses(report)] == ["good"] * 3


# The page


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "speed"
    bench_run(pair_in(folder), TASKS, out, modes=["chain-4", "graph", "auto", "vllm"], max_new_tokens=12, repeats=2)
    return out


def test_a_run_writes_a_page_with_everything(measured: Path) -> None:
    document = (measured / "report.html").read_text()
    assert not outside(document)
    for title in ("Is the output the same?", "Acceptance", "Why tokens were missed", "Example graphs", "Not measured"):
        assert f">{title}" in document, title
    assert document.count('<svg class="dg graph"') == 3, "chain, graph and auto each show a step"
    assert "all 32 answers have the tokens of plain decoding" in document
    assert "vllm" in document and "give its python" in document


def test_cost_curves_are_drawn_where_they_were_measured() -> None:
    latencies = Latencies(CURVE, None, 4, 1.0).to_dict()
    report = speed_report(WARM_UP | {"mode": "auto", "latencies": latencies}, drafting("auto", 10.0))
    document = page([report.to_part()])
    assert "A pass of the target, ms" in document and "A pass of the draft" not in document
    assert "behind 512 tokens" in document and "Cost curves" not in page([speed_report().to_part()])
    assert report.to_dict()["latencies"] == latencies and "examples" not in report.to_dict()


def test_an_example_of_another_version_is_left_out() -> None:
    warm = WARM_UP | {"mode": "auto", "example": '{"schema": "draftgraph.inspect", "version": 0}'}
    assert "<figure><figcaption><b>" not in page([speed_report(warm, drafting("auto", 10.0)).to_part()])


def test_figures_of_an_inflated_target_say_so() -> None:
    document = page([speed_report(drafting("auto", 10.0), inflated="7B-cost, inflated").to_part()])
    assert "<td>2.00x<small>7B-cost, inflated</small></td>" in document
    assert "auto is 2.00x as fast as plain decoding (7B-cost, inflated)" in document


def study() -> PaperReport:
    rows = [
        [f"theta_prob={prob}, theta_sib={sib}, tau={tau}", "1.20x", *["2.00"] * 3, "50.0%", "9.0%"]
        for prob, sib, tau in grid_modes()
    ]
    found = [
        Finding("main", "How fast?", "Fast & good.", Table("", ["mode", "all"], [["tree", "1.50x"]]), agrees=True),
        Finding("check-3", "The best?", "No.", Table("By setting", COUNTS, rows), agrees=False),
        Finding("other", "Why?", "Because."),
    ]
    return PaperReport("The study", "device: cpu; seed: 0", found)


def test_a_study_is_a_part_with_charts_and_verdicts() -> None:
    part = paper_part(study())
    assert part.headline.startswith("1 of 2 items") and part.facts == {"device": "cpu", "seed": "0"}
    main, grid, other = part.sections
    assert len(main.charts) == 1 and main.badge == ("good", "as the paper has it")
    assert [chart.count("<polyline") for chart in grid.charts] == [3, 3, 3], "a line for every theta_sib"
    assert not other.charts and not other.tables and other.badge is None
    document = page([part])
    assert document.count("<details>") == 1 and f"By setting, {len(grid_modes())} rows" in document, (
        "long tables are folded"
    )
    assert "Fast &amp; good." in document and "not as the paper has it" in document and not outside(document)


def test_several_folders_make_one_page(run: Runner, measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "all.html"
    refused(run("bench", "report", measured, measured), "name it, as in --out report.html")
    refused(run("bench", "report", measured, "--out", tmp_path / "all.txt"), "must end in .html")
    done = run("bench", "report", measured, measured, "--out", out, "--json")
    document = out.read_text()
    assert done.status == 0 and document.count("<article") == 2
    assert f'<a href="#part-2">{measured.name}</a> ' in document, "folders are told apart by their names"
    assert out.with_suffix(".md").read_text().count("# Speed of") == 2


# In a browser


@pytest.mark.browser
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 3)])
def test_the_page_fits_a_phone_and_a_desk(
    chromium: Any, measured: Path, tmp_path: Path, width: int, columns: int
) -> None:
    nothing = Part("Nothing", {}, "Nothing was measured.", [Section("Empty", wide=[Markup("<b>bold</b>")])])
    file = tmp_path / "page.html"
    latencies = Latencies(CURVE, CURVE, 4, 1.0).to_dict()
    costs = speed_report(WARM_UP | {"mode": "auto", "latencies": latencies}, drafting("auto", 10.0))
    parts = [SpeedReport.of(records(measured)).to_part(), costs.to_part(), paper_part(study()), nothing]
    file.write_text(page(parts), encoding="utf-8")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.get(file.as_uri())
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width, "nothing sticks out"
    charts = chromium.find_elements("css selector", ".charts figure")
    assert len(charts) > 10 and all(chart.is_displayed() and chart.size["height"] > 40 for chart in charts)
    first = chromium.find_elements("css selector", ".charts")[0]
    assert len({chart.location["x"] for chart in first.find_elements("css selector", "figure")}) == columns
    texts = chromium.execute_script(
        "return [...document.querySelectorAll('.chart text')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(texts) > 10, "every word of a chart can be read"
    chromium.find_element("css selector", 'a[href="#part-3"]').click()
    assert chromium.find_element("css selector", "#part-3 h1").text == "The study"
    assert no_errors(chromium)


def records(folder: Path) -> list[Record]:
    from draftgraph.bench.runs import read_records

    return read_records(folder)


def test_a_page_of_prompts_in_files(run: Runner, folder: Path, tmp_path: Path) -> None:
    data = write_tasks(tmp_path / "tasks", TASKS)
    out = tmp_path / "out"
    common = ("bench", "run", "--data", data, "--target", folder, "--draft", "self", "--out", out, "--new-tokens", 4)
    assert run(*common, "--modes", "chain-4", "--repeats", 1).status == 0
    assert "Times as fast as plain decoding" in (out / "report.html").read_text()


@pytest.mark.parametrize("no_wrap", [True, False])
def test_a_table_is_cut_into_pieces_that_fit(no_wrap: bool) -> None:
    header = ["mode", *(f"task {number}" for number in range(9)), "reason"]
    cell = "1.00x" if no_wrap else "1.00x (7B-cost, inflated)"
    table = Table("Speed", header, [["auto", *[cell] * 9, "a sentence that is wrapped where it must be"]])
    pieces = list(narrowed(table, 40, no_wrap))
    assert [name for piece in pieces for name in piece.header[1:]] == header[1:] and len(pieces) > 1
    assert all(piece.header[0] == "mode" and piece.lines[0][0] == "auto" for piece in pieces)
    shown = Console(width=40, file=io.StringIO())
    for piece in pieces:
        shown.print(drawn(piece, no_wrap))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("1.00x") == 9 and "…" not in text and max(map(len, text.splitlines())) <= 40
    assert list(narrowed(table, 400, no_wrap)) == [table]
