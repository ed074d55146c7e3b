"""`bench paper`: every item is measured once, resumes, and is answered in a sentence."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from bench_tools import pair_in

from draftgraph import UsageError
from draftgraph.bench.paper import masks, probes
from draftgraph.bench.paper.counts import measured
from draftgraph.bench.paper.items import ITEMS, grid_modes
from draftgraph.bench.paper.report import PaperReport
from draftgraph.bench.paper.study import Size, bench_paper, probed
from draftgraph.bench.runs import FILE
from draftgraph.bench.structures import mode_named
from draftgraph.pair import Pair

TASKS = {"gsm8k": ["the cat sat", "a cat"], "poetry": ["on the mat"], "wmt14_ende": ["the mat and the cat"]}
SIZE = Size(prompts=1, new_tokens=8, repeats=1, long_answers=1, long_tokens=24)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture(scope="module")
def study(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "paper"
    bench_paper(pair, TASKS, out, size=SIZE)
    return out


def lines(folder: Path) -> int:
    kinds = ('"kind": "run"', '"kind": "borrowing"', '"kind": "overlap"', '"kind": "masks"')
    return sum(line.startswith(f"{{{kind}") for file in folder.rglob(FILE) for line in file.open() for kind in kinds)


def test_every_item_is_answered(pair: Pair, study: Path) -> None:
    report = PaperReport.of(study)
    assert report is not None and PaperReport.of(study / "none") is None
    assert [one.name for one in report.findings] == [
        "main",
        "claims",
        "experiment-1",
        "experiment-2",
        "experiment-3",
        "check-1",
        "check-3",
        "foreign",
        "question-2",
        "experiment-2-borrowed",
        "question-1",
        "check-2",
    ]
    assert all(measured(study / item.name) for item in ITEMS)
    report.save(study)
    text = (study / "paper.md").read_text()
    assert all(one.question in text and one.answer in text for one in report.findings)


def test_nothing_is_measured_twice(pair: Pair, study: Path) -> None:
    before = lines(study)
    assert bench_paper(pair, TASKS, study, size=SIZE)
    assert lines(study) == before > 100


def test_a_wrong_mask_at_the_draft_changes_nothing_and_at_the_target_it_may(pair: Pair, study: Path) -> None:
    found = {record["setting"]: record["first_difference"] for record in probed(study, "masks")}
    assert found["draft 0.5"] is None and found["target 0.0"] is None
    arguments = {"max_new_tokens": 40, "min_new_tokens": 40}
    right = masks.answer(pair, "the cat sat on", arguments)["tokens"]
    assert masks.answer(pair, "the cat sat on", arguments, draft=1.0)["tokens"] == right
    engines = pair.decoder.target_engine, pair.decoder.draft_engine
    assert not any(name in vars(engine) for engine in engines for name in ("forward", "check")), "put back"


def test_strangers_are_no_ancestors_and_nobody_sees_the_future() -> None:
    visible = np.array([[True, True, False, False], [True, False, True, False], [True, True, False, True]])
    changed = masks.with_strangers(visible, 1.0, np.random.default_rng(0))
    assert (changed | visible == changed).all()
    assert changed.sum(axis=1).tolist() == [2, 3, 4]  # the first sees all that is before it anyway


def test_what_a_merged_node_borrows_is_compared_with_its_own(pair: Pair) -> None:
    mode = "graph:tau=1:theta_prob=0:theta_sib=0"
    text, steps = probes.steps_of(pair, "the cat sat on the mat", mode, {"max_new_tokens": 12})
    found = [merge for one in probes.seen(pair, text, steps) for merge in probes.borrowing(one, Random(0))]
    merged = sum(step.graph.is_alias(node) for step in steps for node in range(len(step.graph)))
    assert 0 < len(found) <= merged and all(merge["divergence"] >= -1e-6 for merge in found)


def test_hypotheses_are_compared_behind_the_place_where_they_part() -> None:
    assert probes.behind_parting([1, 2, 3, 4], [1, 9, 3, 4]) == ([3, 4], [3, 4])
    assert probes.behind_parting([1, 2, 3], [1, 2, 3, 4]) is None and probes.behind_parting([1, 2], [3, 4]) is None
    assert probes.compared([3, 4], [3, 4]) == {"tokens": 1.0, "bigrams": 1.0, "edits": 0.0}
    assert probes.compared([3, 4, 5], [4, 5]) == {"tokens": 1.0, "bigrams": 1.0, "edits": pytest.approx(1 / 3)}


def test_settings_are_named_in_a_mode() -> None:
    config = mode_named("graph:theta_prob=0.1:sibling_pruning=leaf")
    assert (config.theta_prob, config.sibling_pruning, config.k) == (0.1, "leaf", 4)
    assert all(mode_named(mode).mode == "graph" for mode in grid_modes().values())
    for wrong in ("graph:kk=2", "graph:k=two", "graph:mode=tree", "graph:k=0"):
        with pytest.raises(UsageError):
            mode_named(wrong)


def test_a_study_needs_a_draft_and_its_tasks(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a draft"):
        bench_paper(Pair(pair.target, None, pair.tokenizer), TASKS, tmp_path)
    with pytest.raises(UsageError, match="none of the paper's tasks"):
        bench_paper(pair, {"cats": ["a cat"]}, tmp_path)
