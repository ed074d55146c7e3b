"""The report of a speed benchmark, on made-up measurements with known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgraph.bench.runs import Record
from draftgraph.bench.speed_report import (
    PEERS,
    TIES,
    SpeedReport,
    geometric_mean,
    label_of,
    save_plot,
    speed_table,
    tables,
)

TASKS = {"cats": ["the cat sat", "a cat"], "mats": ["on the mat", "the mat and the cat"]}


def made_up(mode: str, task: str, prompt: int, ms: float, **changes: Any) -> Record:
    row = {
        "kind": "run",
        "task": task,
        "prompt": prompt,
        "mode": mode,
        "repeat": 0,
        "ms_per_token": ms,
        "first_token_seconds": 0.1,
        "new_tokens": 10,
        "steps": 10 if mode == "off" else 5,
        "nodes": 10 if mode == "off" else 40,
        "draft_passes": 0 if mode == "off" else 15,
        "accepted_by_source": dict.fromkeys(("draft", "merged", "copied", "recycled"), 0),
        "same": True,
        "tie": False,
        "loops": False,
    }
    return row | changes


def of_a_peer(mode: str, task: str, prompt: int, ms: float, **changes: Any) -> Record:
    untold = ("steps", "nodes", "draft_passes", "accepted_by_source")
    row = made_up(mode, task, prompt, ms, **changes)
    return {name: value for name, value in row.items() if name not in untold}


def report_of(*records: Record, **configuration: Any) -> SpeedReport:
    head = {"kind": "configuration", "target": "large", "draft": "small", "inflated": None, "modes": ["off", "auto"]}
    return SpeedReport.of([head | configuration, *records])


def test_speed_is_the_geometric_mean_of_ratios_of_medians() -> None:
    rows = [made_up("off", "cats", prompt, 20.0, repeat=repeat) for prompt in (0, 1) for repeat in (0, 1, 2)]
    rows += [made_up("off", "mats", 0, 30.0)]
    for prompt, times in ((0, (10.0, 900.0, 9.0)), (1, (2.0, 2.5, 40.0))):  # medians 10 and 2.5: 2 and 8 times as fast
        rows += [made_up("auto", "cats", prompt, time, repeat=repeat) for repeat, time in enumerate(times)]
    rows += [made_up("auto", "mats", 0, 30.0)]
    off, auto = report_of(*rows).modes
    cats, mats = auto.tasks
    assert cats.ms_per_token == 6.25 and cats.prompts == 2 and off.overall.ms_per_token == 25.0
    assert cats.speed.ratio == pytest.approx(4.0) and mats.speed.ratio == pytest.approx(1.0)
    assert auto.overall.speed.ratio == pytest.approx(2.0), "every task counts the same"
    assert (cats.speed.low, cats.speed.high) == (pytest.approx(2.0), pytest.approx(8.0))
    assert mats.speed.low is None and auto.overall.speed.low is None
    assert off.overall.speed.ratio == 1.0
    assert (auto.overall.tokens_per_pass, auto.overall.nodes_per_pass, auto.overall.draft_passes) == (2.0, 8.0, 3.0)
    assert auto.overall.first_token_ms == pytest.approx(100.0)


def test_the_interval_is_that_of_the_mean_over_prompts() -> None:
    draw = np.random.default_rng(5)
    logs = draw.normal(0.7, 0.3, 400)
    speed = geometric_mean({"task": np.exp(logs).tolist()})
    spread = 1.96 * logs.std() / math.sqrt(len(logs))
    assert speed.low is not None and speed.high is not None
    assert math.log(speed.ratio) == pytest.approx(logs.mean())
    assert math.log(speed.low) == pytest.approx(logs.mean() - spread, abs=0.002)
    assert math.log(speed.high) == pytest.approx(logs.mean() + spread, abs=0.002)
    assert geometric_mean({"task": [2.0, 2.0]}) == geometric_mean({"task": [2.0] * 9})


def test_sources_are_shared_out_with_and_without_loops() -> None:
    steady = {"draft": 6, "merged": 1, "copied": 2, "recycled": 1}
    looping = {"draft": 0, "merged": 0, "copied": 10, "recycled": 0}
    rows = [made_up("off", "cats", prompt, 20.0) for prompt in (0, 1)]
    rows += [made_up("auto", "cats", 0, 10.0, accepted_by_source=steady)]
    rows += [made_up("auto", "cats", 1, 10.0, accepted_by_source=looping, loops=True, same=False, tie=True)]
    off, auto = report_of(*rows).modes
    assert auto.sources.shares == {"draft": 0.3, "merged": 0.05, "copied": 0.6, "recycled": 0.05}
    assert auto.sources.undrafted == pytest.approx(0.7)
    assert auto.sources_without_loops.undrafted == pytest.approx(0.4)
    assert (auto.answers, auto.same, auto.ties, auto.sources_without_loops.answers) == (2, 1, 1, 1)
    assert off.sources.shares == {} and off.sources.undrafted is None
    shown = report_of(*rows).to_markdown()
    assert (
        "| auto | 1 that do not loop | 60.0% |" in shown
        and "A looping answer" in shown
        and "1 of 2 (1 ties)" in shown
        and TIES in shown
    )


def test_a_peer_leaves_empty_what_it_does_not_tell() -> None:
    rows = [made_up("off", "cats", 0, 20.0), of_a_peer("hf", "cats", 0, 25.0, same=None)]
    warm = {"kind": "warm-up", "mode": "hf", "prices": None, "seconds": 1.0, "library": "transformers 5"}
    report = report_of(warm, *rows, modes=["off", "hf"])
    hf = report.mode("hf")
    assert hf.overall.speed.ratio == pytest.approx(0.8) and hf.library == "transformers 5"
    assert hf.overall.tokens_per_pass is hf.overall.nodes_per_pass is hf.same is hf.acceptance is None
    shown = report.to_markdown()
    assert "| hf | 0.80x |  |  |  |" in shown and "| hf | 100 |  |  | 1.00 |" in shown and PEERS in shown
    assert PEERS not in report_of(made_up("off", "cats", 0, 20.0)).to_markdown()


def test_a_method_that_failed_is_a_row_with_the_reason() -> None:
    session = {"kind": "session", "planned": 4}
    failed = {"kind": "failed", "mode": "vllm", "reason": "no environment", "left_out": 2}
    rows = [made_up("off", "cats", prompt, 20.0) for prompt in (0, 1)]
    report = report_of(session, failed, *rows, modes=["off", "vllm"])
    assert report.failed == {"vllm": "no environment"} and report.measured == report.planned == 2
    shown = report.to_markdown()
    assert "| vllm |  |  |  | failed |" in shown and "| vllm | no environment |" in shown
    peer = [of_a_peer("vllm", "cats", prompt, 10.0) for prompt in (0, 1)]
    later = report_of(session, failed, *rows, session, *peer, modes=["off", "vllm"])
    assert not later.failed and later.planned == 4 and later.mode("vllm").overall.speed.ratio == pytest.approx(2.0)


def test_acceptance_is_told_by_depth_and_by_source() -> None:
    none = dict.fromkeys(("draft", "merged", "copied", "recycled"), 0)
    told = {
        "accepted_by_source": none | {"draft": 4, "copied": 1},
        "checked_by_source": none | {"draft": 16, "copied": 4},
    }
    rows = [made_up("off", "cats", prompt, 20.0) for prompt in (0, 1)]
    rows += [made_up("auto", "cats", 0, 10.0, accepted_by_depth=[4, 1], **told)]
    rows += [made_up("auto", "cats", 1, 10.0, accepted_by_depth=[3, 1, 1], **told)]
    off, auto = report_of(*rows).modes
    assert off.acceptance is None and auto.acceptance is not None
    assert auto.acceptance.by_depth == [0.7, 0.2, 0.1] and auto.acceptance.by_source == {"draft": 0.25, "copied": 0.25}
    assert auto.acceptance.proposed_per_accepted == 4.0
    assert "| auto | 4.00 | 70.0% | 20.0% | 10.0% | 25.0% |  | 25.0% |  |" in report_of(*rows).to_markdown()


def test_more_modes_than_a_picture_can_show_have_none(tmp_path: Path) -> None:
    names = ["off", *(f"chain-{length}" for length in range(1, 17))]
    rows = [made_up(mode, "cats", 0, 20.0) for mode in names]
    assert save_plot(report_of(*rows, modes=names), tmp_path / "plot.png") is None and not list(tmp_path.iterdir())
    assert save_plot(report_of(*rows[:-1], modes=names[:-1]), tmp_path / "plot.png") == tmp_path / "plot.png"


def test_energy_is_told_where_it_is_counted() -> None:
    rows = [made_up("off", "cats", 0, 20.0, joules=50.0), made_up("auto", "cats", 0, 10.0)]
    report = report_of(*rows)
    assert report.modes[0].joules_per_token == 5.0 and report.modes[1].joules_per_token is None
    uncounted = report_of(rows[1] | {"mode": "off"})
    assert "joules per token" in report.to_markdown() and "joules" not in uncounted.to_markdown()


def test_warm_up_and_memory_are_those_of_the_worst_start() -> None:
    warm = [{"kind": "warm-up", "mode": "auto", "prices": "measured", "seconds": took} for took in (9.0, 2.0)]
    rows = [made_up("off", "cats", 0, 20.0), made_up("auto", "cats", 0, 10.0, extra_bytes=3_000_000_000)]
    report = report_of(*warm, *rows)
    assert report.modes[1].warm_up_seconds == 9.0 and report.modes[1].prices == "measured"
    assert report.modes[0].extra_bytes is None and "| 9.00 | 3.00 |" in report.to_markdown()


def test_every_figure_of_an_inflated_target_says_so() -> None:
    label = label_of("llama-2-70b")
    assert label == "70B-cost, inflated" and label_of("llama-33b") == "33B-cost, inflated" and label_of(None) is None
    rows = [made_up("off", "cats", 0, 20.0), made_up("auto", "cats", 0, 10.0)]
    rows += [of_a_peer("hf", "cats", 0, 40.0)]
    report = report_of(*rows, inflated=label, modes=["off", "auto", "hf"])
    ratios = ("1.00x", "2.00x", "0.50x")
    assert [line[1] for line in speed_table(report).lines] == [f"{ratio} ({label})" for ratio in ratios]
    times = [
        cell for table in tables(report) for line in table.lines for cell in line if cell[:5] in ("20.00", "40.00")
    ]
    assert len(times) == 2 and all(label in cell for cell in times)
