"""`draftgraph tune`: what passes take, in a table, as JSON and as a picture."""

import json
from pathlib import Path

import pytest
from cli_tools import PROMPT, Runner, refused

from draftgraph import GraphDecoder
from draftgraph.bench.tune import HITS
from draftgraph.cost import Curve, Latencies, MeasuredCost, prices

FOUND = Latencies(
    Curve.of([128, 1024], [1, 2, 8, 64], [[0.010, 0.011, 0.0125, 0.02], [0.012, 0.013, 0.016, 0.03]]),
    Curve.of([128, 1024], [1, 2, 8], [[0.001, 0.001, 0.002], [0.0011, 0.0012, 0.0021]]),
    64,
    3.21,
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prices, "_shared", {})
    return Runner(capsys, monkeypatch)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take what we say."""

    def known(decoder, config, engines, seconds=0.0):
        return FOUND if engines.draft else Latencies(FOUND.target, None, 64, 3.21)

    monkeypatch.setattr(GraphDecoder, "measure", known)


def test_the_table_shows_milliseconds_passes_and_what_auto_would_do(run, folder, found):
    done = run("tune", "--target", folder, "--draft", "self")
    assert (done.status, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()]
    assert ["8", "12.50", "1.25", "16.00", "1.33", "2.00", "0.20", "2.10", "0.17"] in rows
    assert any(row[:3] == ["64", "20.00", "2.00"] for row in rows)
    shares = [row for row in rows if row and row[0].endswith("%")]
    assert [row[0] for row in shares] == [f"{hit:.0%}" for hit in HITS]
    levels, nodes, ratios = ([float(row[place]) for row in shares] for place in (1, 2, 4))
    assert levels == sorted(levels) and nodes[0] > 1 and ratios == sorted(ratios) and ratios[-1] > 2
    assert "measured in 3.2 s" in done.out and "too small" in done.out
    assert len(list((Path(done.out.split("kept in ")[1].split(";")[0])).parent.iterdir())) == 1


def test_json_is_one_object(run, folder, found):
    done = run("tune", "--target", folder, "--draft", "self", "--json")
    report = json.loads(done.out)
    assert done.out.count("\n") == 1 and report["draft"] == "self" and report["seconds"] == 3.21
    assert {"device", "dtype", "threads", "engine", "file", "used"} <= set(report)
    assert len(report["passes"]) == 2 * 4 + 2 * 3
    wide = next(one for one in report["passes"] if (one["model"], one["context"], one["nodes"]) == ("target", 1024, 64))
    assert wide["ms"] == pytest.approx(30.0) and wide["one_token_passes"] == pytest.approx(2.5)
    assert [one["hit"] for one in report["choices"]] == list(HITS)
    assert set(report["choices"][0]) == {"hit", "levels", "nodes", "tokens", "ratio"}


def test_a_target_alone_is_measured_too(run, folder, found):
    report = json.loads(run("tune", "--target", folder, "--json").out)
    assert report["draft"] is None and report["choices"] == []
    assert {one["model"] for one in report["passes"]} == {"target"}


def test_tuning_measures_now_and_auto_goes_by_it(run, folder, monkeypatch):
    monkeypatch.setattr(prices, "SMALLEST", 0)
    monkeypatch.setattr("draftgraph.cost.measure.ROUNDS", 1)
    files = [json.loads(run("tune", "--target", folder, "--draft", "self", "--json").out)["file"] for _ in range(2)]
    assert files[0] == files[1]
    monkeypatch.setattr(GraphDecoder, "measure", None)  # nothing may be measured any more
    options = ["--target", folder, "--draft", "self", "--max-new-tokens", 8]
    done = run("generate", PROMPT, *options, "--stats")
    assert done.status == 0 and "measured prices" in done.err and "measuring" not in done.err
    flat = run("generate", PROMPT, *options, "--cost", "flat", "--stats")
    assert flat.out == done.out and "flat prices" in flat.err
    assert "prices" not in run("generate", PROMPT, *options, "--mode", "graph", "--stats").err


def test_compare_says_what_it_decided_by(run, folder, found, monkeypatch):
    monkeypatch.setattr(prices, "SMALLEST", 0)
    options = ["compare", PROMPT, "--target", folder, "--draft", "self", "--max-new-tokens", 8, "--repeat", 1]
    assert json.loads(run(*options, "--json").out)["prices"] == "measured"
    assert "(flat prices)" in run(*options, "--cost", "flat").out
    assert json.loads(run(*options, "--mode", "graph", "--json").out)["prices"] is None


def test_prices_stay_while_runs_are_compared(run, folder, found, monkeypatch):
    used = []
    monkeypatch.setattr(prices, "SMALLEST", 0)
    monkeypatch.setattr(MeasuredCost, "at", lambda self, context: used.append(self.latencies) or self)
    monkeypatch.setattr(prices.Watch, "due", True)
    options = ["--target", folder, "--draft", "self", "--max-new-tokens", 8, "--repeat", 3, "--json"]
    done = run("compare", PROMPT, *options)
    assert done.status == 0 and used and done.err.count("measuring") == 1


def test_the_picture_is_written(run, folder, found, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    done = run("tune", "--target", folder, "--draft", "self", "--out", out)
    assert done.status == 0 and "latency.svg" in done.err.replace("\n", "")
    assert {file.name for file in out.iterdir()} == {"latency.json", "latency.svg", "latency.png"}
    drawn = (out / "latency.svg").read_text()
    assert drawn.startswith("<?xml") and json.loads((out / "latency.json").read_text())["passes"]
    assert run("tune", "--target", folder, "--out", tmp_path / "alone").status == 0


def test_wrong_use_is_refused_before_any_work(run, folder, tmp_path):
    (tmp_path / "file").write_text("")
    refused(run("tune", "--target", folder, "--out", tmp_path / "file"), "cannot be written")
    refused(run("tune", "--target", folder, "--max-nodes", 0), "max_nodes")
    refused(run("generate", PROMPT, "--target", folder, "--cost", "cheap"), "measured, flat")
    refused(run("tune", "--target", folder, "--mode", "auto"), "--mode")


def test_a_cache_that_cannot_be_written_is_told(run, folder, found, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    done = run("tune", "--target", folder, "--draft", "self")
    assert done.status == 0 and "not kept" in done.out
