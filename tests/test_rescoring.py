"""In half precision texts may differ, but one is as good as the other: scored again in float32, with a wrong mask as
the proof that the check finds what is wrong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_tools import pair_in, write_tasks
from cli_tools import Runner
from families import FAMILIES, MORE_FAMILIES, VOCAB, perturbed, target_of
from scipy.stats import binom

from draftgraph import GraphConfig
from draftgraph.bench import bench_run, speed
from draftgraph.bench.rescoring import can_rescore, exact_products, float32_logits, rescored
from draftgraph.bench.runs import FILE, Place, Record, of_kind, read_records
from draftgraph.bench.sameness import Gaps, Rescored, as_good_as, luck, within
from draftgraph.bench.speed import Deadline
from draftgraph.bench.speed_report import FLOAT32, SpeedReport
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.cost import FlatCost
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import Segment
from draftgraph.graph import TokenTree
from draftgraph.pair import Pair

PROMPTS = ["abcdefgh", "mixed words here"]
TASKS = {"cats": ["the cat sat", "a cat"], "mats": ["on the mat", "the mat and the cat"]}
STYLES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 4}}
MODES = {
    "chain": GraphConfig(mode="chain"),
    "tree": GraphConfig(mode="tree"),
    "auto": GraphConfig(cost=FlatCost()),
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    loaded = pair_in(folder)
    return Pair(loaded.target.bfloat16(), loaded.draft.bfloat16(), loaded.tokenizer)


def letters(family: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Pair:
    """Of gemma3 the tiny model looks closely at its context: other masks give other tokens."""
    target = target_of(family).to(dtype)
    draft = perturbed(target, 0.1)
    return Pair(target.to(device), draft.to(device), lambda text: {"input_ids": [ord(one) % VOCAB for one in text]})


def gaps_of(pair: Pair, config: GraphConfig, style: dict[str, Any]) -> Gaps:
    texts = []
    for prompt in PROMPTS:
        decoding = pair.start(prompt, max_new_tokens=48, config=config, **style)
        for _ in decoding:
            pass
        texts.append(rescored(decoding))
    return Gaps.of_all(texts)


def verdicts(pair: Pair, style: dict[str, Any]) -> dict[str, bool]:
    plain = gaps_of(pair, GraphConfig(mode="off"), style)  # of roots alone, which no mask can harm
    return {mode: as_good_as(gaps_of(pair, config, style), plain) for mode, config in MODES.items()}


# The promise, and that the check would find a broken one

Parents = list[int]


def with_siblings(parents: Parents) -> Parents:
    """A node sees the one beside it as well."""
    return [
        max([parent, *(one for one in range(node) if parents[one] == parent)]) for node, parent in enumerate(parents)
    ]


def without_parents(parents: Parents) -> Parents:
    """A node sees its grandparent, but not its parent."""
    return [parents[parent] if parent > 0 else parent for parent in parents]


def plant(wrong: Callable[[Parents], Parents], monkeypatch: pytest.MonkeyPatch) -> None:
    """The target checks trees with these ancestors, and nobody else knows."""
    of_tree = Segment.of_tree

    def misled(context: Any, tree: TokenTree, *given: Any) -> Segment:
        parents = np.array(wrong(tree.parents.tolist()), dtype=tree.parents.dtype)
        return of_tree(context, replace(tree, parents=parents), *given)

    monkeypatch.setattr(Segment, "of_tree", misled)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("engine", ["eager", "static", None])
def test_every_mode_writes_as_well_as_plain_decoding(
    engine: str | None, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine is not None:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    pair = letters("gemma3")
    assert isinstance(pair.decoder.engines.target, PagedEngine) == (engine != "eager")
    assert all(verdicts(pair, STYLES[style]).values())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wrong", [with_siblings, without_parents])
def test_a_wrong_mask_is_found(
    wrong: Callable[[Parents], Parents], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(wrong, monkeypatch)
    found = verdicts(letters("gemma3"), STYLES[style])
    assert not found["tree"] and not found["auto"]
    assert found["chain"] == (wrong is with_siblings), "a chain has no siblings"


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_captured_passes_write_as_well_and_a_wrong_mask_is_found(
    dtype: torch.dtype, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = letters("gemma3", dtype, "cuda")
    assert isinstance(pair.decoder.engines.target, PagedEngine)
    assert all(verdicts(pair, STYLES[style]).values())
    for wrong in (with_siblings, without_parents):
        with monkeypatch.context() as planted:
            plant(wrong, planted)
            found = verdicts(pair, STYLES[style])
        assert not found["tree"] and not found["auto"], wrong.__name__


# Scores in float32


def check_float32_logits(family: str, dtype: torch.dtype, device: str) -> None:
    model = target_of(family).to(device, dtype)
    ids = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1)).to(device)
    kept = {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}
    found = float32_logits(model, ids[:, :10], ids[0, 10:].tolist())
    assert kept == {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}
    with torch.no_grad(), exact_products():
        expected = copy.deepcopy(model).float()(input_ids=ids, use_cache=False).logits[0, 9:-1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_scores_are_those_of_a_copy_in_float32(family: str) -> None:
    check_float32_logits(family, torch.bfloat16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_on_cuda_are_those_of_a_copy_in_float32(family: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        torch.set_float32_matmul_precision("high")  # TF32, if it were let in
        try:
            check_float32_logits(family, dtype, "cuda")
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision("highest")


def test_only_whole_weights_in_half_precision_are_scored_again() -> None:
    assert can_rescore(target_of("llama", dtype=torch.float16))
    assert not can_rescore(target_of("llama")) and not can_rescore(target_of("llama").bfloat16().to("meta"))


def test_what_float32_itself_chose_has_no_gap() -> None:
    pair = letters("llama", torch.float32)
    for style in STYLES.values():
        decoding = pair.start("abcdef", max_new_tokens=20, repetition_penalty=1.3, **style)
        for _ in decoding:
            pass
        tokens, found = decoding.new_tokens, rescored(decoding)
        assert (found.tokens, found.not_best, found.largest) == (20, 0, 0.0) and found.step > 0
        wrong = rescored(decoding, [*tokens[:-1], (tokens[-1] + 1) % VOCAB])
        assert wrong.not_best == 1 and 0.0 < wrong.largest == wrong.total


def certain(logits: list[float], token: int, monkeypatch: pytest.MonkeyPatch, **style: Any) -> Gaps:
    """The gap of one token, behind a text of which these are the logits."""
    pair = letters("llama")
    given = torch.full((1, VOCAB), -30.0)
    given[0, : len(logits)] = torch.tensor(logits)
    monkeypatch.setattr("draftgraph.bench.rescoring.float32_logits", lambda *_: given)
    return rescored(pair.start("abc", max_new_tokens=1, config=GraphConfig(mode="off"), **style), [token])


def test_a_gap_is_the_way_to_the_best_score(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certain([2.0, 5.0, 4.5], 2, monkeypatch).largest == pytest.approx(0.5)
    assert certain([5.0, 5.0], 1, monkeypatch).not_best == 0, "as good as the best"
    assert certain([2.0, 5.0], 1, monkeypatch).step == pytest.approx(5.0 * 2**-7)


def test_a_limit_that_rounding_moves_makes_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three tokens are kept: the third is as likely as the second, but for rounding."""
    monkeypatch.setattr("draftgraph.noise.KeyedNoise.gumbel", lambda *_: noise)
    noise = torch.zeros(VOCAB, dtype=torch.float64)
    style = {"temperature": 0.5, "do_sample": True, "seed": 1, "top_k": 2}
    noise[2] = 9.0
    removed = certain([4.0, 3.0, 2.96], 2, monkeypatch, **style)
    assert removed.not_best == 1 and removed.largest == 0.0, "it would have been the best"
    noise[2] = -9.0
    assert certain([4.0, 3.0, 2.96], 2, monkeypatch, **style).largest == pytest.approx(8.0 - 5.92 + 9.0)
    noise[2], noise[1] = 0.0, 9.0
    passed_over = certain([4.0, 3.0, 2.96], 0, monkeypatch, **style)
    assert passed_over.not_best == 1 and passed_over.largest == 0.0, "the better one may have been removed"
    clear = certain([4.0, 3.0, 1.0], 0, monkeypatch, **style)
    assert clear.largest == pytest.approx(15.0 - 8.0), "the better one is far from the limit"


# What counts as good


def test_the_rule() -> None:
    plain = Gaps(2000, 20, largest=0.4, step=0.1)
    assert as_good_as(Gaps(2000, 30, 0.6), plain) and as_good_as(Gaps(2000, 32, 0.1), plain)
    assert not as_good_as(Gaps(2000, 50, 0.1), plain) and not as_good_as(Gaps(2000, 20, 0.61), plain)
    assert within(Gaps(2000, 30, 0.6), plain) and not within(Gaps(2000, 32, 0.1), plain)
    none = Gaps(2000, 0, 0.0, step=0.1)
    assert as_good_as(none, none) and as_good_as(Gaps(2000, 3, 0.19), none)
    assert not as_good_as(Gaps(2000, 3, 0.21), none) and not as_good_as(Gaps(2000, 7, 0.1), none)
    many = Gaps(100_000, 1000, 0.4)
    assert as_good_as(Gaps(100_000, 1500, 0.4), many) and not as_good_as(Gaps(100_000, 1501, 0.4), many)


def test_luck_is_that_of_a_coin() -> None:
    for found, plain, tokens in ((7, 0, 500), (12, 9, 500), (900, 800, 250)):
        expected = binom.sf(found - 1, found + plain, tokens / (tokens + 500))
        assert luck(Gaps(tokens, found), Gaps(500, plain)) == pytest.approx(expected)


def test_gaps_of_texts_are_those_of_one_long_text() -> None:
    both = Gaps(10, 1, 0.5, 0.5, 0.1) + Gaps(30, 3, 0.2, 0.5, 0.2)
    assert both == Gaps(40, 4, 0.5, 1.0, 0.2) == Gaps.of_all([both, Gaps()])
    assert both.share == 0.1 and both.mean == 0.025


# In a benchmark


def small(pair: Pair, out: Path, **changes: Any) -> SpeedReport:
    settings: dict[str, Any] = {"modes": ["chain-2", "auto"], "max_new_tokens": 12, "repeats": 2}
    return bench_run(pair, TASKS, out, **settings | changes)


def done(out: Path) -> list[Place]:
    return [Place.of(record) for record in of_kind(read_records(out), "rescored")]


def first_answers() -> list[Place]:
    prompts = [("cats", 0), ("mats", 0), ("cats", 1), ("mats", 1)]
    return [Place(*prompt, mode, 0) for prompt in prompts for mode in ("off", "chain-2", "auto")]


@pytest.mark.parametrize("style", STYLES)
def test_first_answers_in_half_precision_are_scored_after_all_is_timed(pair: Pair, tmp_path: Path, style: str) -> None:
    report = small(pair, tmp_path, **STYLES[style])
    records = read_records(tmp_path)
    assert done(tmp_path) == first_answers() and report.unscored == 0
    assert [record["kind"] for record in records[-12:]] == ["rescored"] * 12
    for mode in report.modes:
        assert mode.rescored is not None and (mode.rescored.answers, mode.rescored.tokens) == (4, 48)
        assert mode.rescored.as_good is (None if mode.mode == "off" else True)
    assert "## Scored again in float32" in report.to_markdown() and FLOAT32 in report.to_markdown()
    assert json.loads((tmp_path / "report.json").read_text())["modes"][1]["rescored"]["as_good"] is True


def test_float32_needs_no_second_look(folder: Path, tmp_path: Path) -> None:
    report = small(pair_in(folder), tmp_path, repeats=1)
    assert not done(tmp_path) and report.unscored == 0 and all(mode.rescored is None for mode in report.modes)
    assert "float32" not in report.to_markdown().partition("## ")[2]


def test_scoring_goes_on_where_it_was(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, asked = Stopwatch.rescore, 0

    def short_of_memory(self: Stopwatch, *arguments: Any) -> Gaps:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise torch.OutOfMemoryError
        return honest(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Stopwatch, "rescore", short_of_memory)
        report = small(pair, tmp_path, repeats=1)
    assert done(tmp_path) == first_answers()[:5] and report.unscored == 7
    assert report.mode("auto").rescored is not None and report.mode("auto").rescored.answers == 1
    kept = (tmp_path / FILE).read_bytes()
    assert small(pair, tmp_path, repeats=1).unscored == 0 and done(tmp_path) == first_answers()
    assert (tmp_path / FILE).read_bytes().startswith(kept)


def test_a_time_limit_stops_scoring_as_well(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_tasks(tmp_path / "data", TASKS), Runner(capsys, monkeypatch)
    common = ("bench", "run", "--data", data, "--target", folder, "--dtype", "bfloat16", "--out", tmp_path / "out")
    common += ("--new-tokens", 4, "--modes", "off", "--repeats", 1, "--seconds", 60)
    near, scored = Deadline.is_near, speed.rescore_all

    def in_haste(*arguments: Any) -> None:
        monkeypatch.setattr(Deadline, "is_near", True)
        scored(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(speed, "rescore_all", in_haste)
        found = run(*common)
    assert found.status == 0 and "4 answers are not scored in float32 yet: the same command goes on" in found.err
    assert "Scored again" not in found.out
    monkeypatch.setattr(Deadline, "is_near", near)
    found = run(*common)
    assert found.status == 0 and found.err == "" and "Scored again in float32" in found.out


def test_a_mode_is_compared_on_the_prompts_that_it_answered() -> None:
    def record(mode: str, prompt: int, not_best: int) -> Record:
        gaps = {"tokens": 100, "not_best": not_best, "largest": 0.1, "total": 0.1 * not_best, "step": 0.1}
        return {"task": "cats", "prompt": prompt, "mode": mode, "gaps": gaps}

    records = [record("off", 0, 1), record("off", 1, 90), record("auto", 0, 30)]
    auto, off = (Rescored.of(mode, records, "off") for mode in ("auto", "off"))
    assert auto is not None and off is not None and Rescored.of("tree", records, "off") is None
    assert auto.answers == 1 and auto.as_good is False and math.isclose(off.not_best, 0.455)
    assert auto.within is False and off.within is off.as_good is None
