"""The scripts that measure what drafts cost, and how big a draft should be."""

import json
import sys
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from tiny_models import HEADS, REPOSITORY, SHAPE
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from draftgraph.batching import Limits, Scheduler
from draftgraph.engine.borrowing import Loan
from draftgraph.pair import Pair
from draftgraph.proposers.draft_model import DraftVocabulary, likeliest

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
SCRIPTS = ("draft_cost", "draft_sizes", "static_passes", "long_texts", "host_share")
draft_cost, draft_sizes, static_passes, long_texts, host_share = map(import_module, SCRIPTS)

FOUR_LAYERS = SHAPE | HEADS | {"num_hidden_layers": 4}
CHILD_OF = [-1, 0, 0, 1, 1, 4, 2]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**FOUR_LAYERS)).eval()


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**FOUR_LAYERS, sliding_window=8)).eval()


def ancestry(parents):
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    return visible.sum(axis=1) - 1, visible


@pytest.mark.parametrize("make", [llama, mistral])
def test_static_passes_over_a_tree_give_the_logits_of_plain_passes(make, monkeypatch):
    monkeypatch.setattr(static_passes, "CHUNK", 8)
    model = make()
    text = draft_cost.sample_tokens(model, 20)
    with Loan(model):
        static = static_passes.StaticText(model, text, nodes=len(CHILD_OF))
        for parents in (CHILD_OF, CHILD_OF[:1], CHILD_OF[:4]):  # later ones write over the slots of earlier ones
            tokens, (depths, visible) = draft_cost.sample_tokens(model, len(parents)), ancestry(parents)
            scored = static_passes.static_forward(model, **static.behind(tokens, depths, visible))
            for node in range(len(parents)):
                path = [tokens[other] for other in np.flatnonzero(visible[node])]
                plain = model(torch.tensor([text + path]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(scored[node], plain, atol=1e-5, rtol=1e-4)


def test_a_level_gives_the_best_children_in_the_targets_vocabulary():
    target = llama()
    draft = draft_cost.cut_drafts(target, [2], vocab_size=100)["2 layers"]
    draft.token_map = torch.randperm(300)[:100]
    with Loan(draft):
        static = static_passes.StaticText(draft, draft_cost.sample_tokens(draft, 10), nodes=8)
        buffers = static.behind(draft_cost.sample_tokens(draft, 8), *draft_cost.level_of(8))
        tokens, chances = static_passes.draft_level(draft, **buffers)
        logits = DraftVocabulary(draft, 300).to_target(static_passes.static_forward(draft, **buffers))
    expected_tokens, expected_probs = likeliest(logits, static_passes.BEST)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(chances.exp(), expected_probs, rtol=1e-4)


def test_every_pass_is_compiled_however_many_there_are(monkeypatch):
    from torch._dynamo import config, reset
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = llama()
    drafts = draft_cost.cut_drafts(target, [1], vocab_size=100)
    reset()
    counters.clear()
    with Loan(target, *drafts.values()), config.patch(recompile_limit=1), static_passes.many_recompiles():
        plain, compiled = (draft_cost.static_steps(target, drafts, [1, 2, 3], 10, way) for way in (False, True))
        for key, step in compiled.items():
            torch.testing.assert_close(step(), plain[key]())
    assert counters["stats"]["unique_graphs"] == len(compiled) == 6
    assert not counters["graph_break"]


def test_a_captured_pass_that_says_something_else_is_refused():
    right = torch.randn(3, 5)
    static_passes.refuse_difference(right, right + 1e-3)
    static_passes.refuse_difference((right.argmax(), right), (right.argmax(), right))
    for wrong in (torch.zeros_like(right), right * torch.nan):
        with pytest.raises(RuntimeError, match="captured"):
            static_passes.refuse_difference(right, wrong)


def test_the_cost_of_a_draft_is_told_on_a_cpu(tmp_path, capsys):
    llama().save_pretrained(tmp_path)
    small = ["--layers", "1,2", "--vocab-size", "100", "--context", "16", "--repeats", "3", "--device", "cpu"]
    draft_cost.main(["--target", str(tmp_path), *small, "--json"])
    report = json.loads(capsys.readouterr().out)
    (comparison,) = report["comparisons"]
    assert comparison["way"] == "eager" and comparison["target"]["layers"] == 4
    assert comparison["target"]["of_target"]["1"] == 1.0
    one, two = comparison["drafts"]
    assert (one["layers"], one["vocab_size"], two["layers"]) == (1, 100, 2) and one["weights"] < two["weights"]
    for draft in (one, two):
        assert list(draft["of_target"]) == ["1", "2", "4", "8"] and min(draft["of_target"].values()) > 0
    (goal,) = report["goals"]
    assert (goal["nodes"], goal["of_target"]) == (1, two["of_target"]["1"])

    draft_cost.main(["--target", str(tmp_path), *small, "--nodes", "1,3"])
    shown = capsys.readouterr().out
    assert "2 layers, eager: a level of 1 costs" in shown and "0.20 is wanted" in shown


def test_costs_that_cannot_be_measured_are_refused(tmp_path, capsys):
    llama().save_pretrained(tmp_path)
    for wrong, reason in (
        (["--nodes", "2,4"], "must name 1"),
        (["--layers", "5"], "has 4 layers"),
        (["--compile"], "without --compile"),
        (["--context", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit):
            draft_cost.main(["--target", str(tmp_path), "--layers", "1", "--device", "cpu", *wrong])
        assert reason in capsys.readouterr().err


REACHED = [0.8, 0.5, 0.2, 0.1]  # chains of 1 to 4: 1.8, 2.3, 2.5, 2.6 tokens per pass
TARGET = {"1": 4.0, "8": 4.0, "64": 8.0}
LEVEL = {"1": 1.0, "8": 2.0}


def figures(reached, accepted=None):
    found = {"tokens_per_pass": 1 + sum(reached), "verified_nodes": 5.0, "draft_levels": float(len(reached))}
    return found if accepted is None else found | {"accepted_by_depth": accepted}


def draft(**structures):
    found = {name.replace("_", "-"): draft_sizes.structure_of(one) for name, one in structures.items()}
    return draft_sizes.Draft("draft", 4, 14_000_000, 0.6, found, draft_sizes.widths(LEVEL))


def target(ms=TARGET):
    return draft_sizes.Target("target", draft_sizes.widths(ms))


@pytest.mark.parametrize("accepted", [REACHED, {"1": 80, "2": 50, "4": 10, "3": 20}])
def test_the_best_chain_weighs_tokens_against_levels(accepted):
    # 1.8 / 1.25 = 1.44, 2.3 / 1.5 = 1.533, 2.5 / 1.75 = 1.429, 2.6 / 2 = 1.3
    choice = draft_sizes.best_chain(draft(chain_4=figures(REACHED, accepted)), target())
    assert choice.levels == 2 and choice.speedup == pytest.approx(2.3 / 1.5)


def test_a_free_draft_is_asked_for_the_longest_chain():
    costly = draft(chain_4=figures(REACHED, REACHED))
    free = draft_sizes.Draft("draft", 4, 0, 0.6, costly.structures, {1: 0.0, 8: 0.0})
    assert draft_sizes.best_chain(free, target()) == draft_sizes.Choice(4, pytest.approx(2.6))


def test_without_accepted_depths_only_measured_chains_are_compared():
    choice = draft_sizes.best_chain(draft(chain_4=figures(REACHED), chain_1=figures(REACHED[:1])), target())
    assert choice.levels == 1 and choice.speedup == pytest.approx(1.8 / 1.25)


def test_the_best_tree_is_cut_where_levels_no_longer_pay():
    # 1.8 / (0.5 + 2), 2.3 / (1 + 2) = 0.767, 2.5 / (1.5 + 2), 2.6 / (2 + 2)
    choice = draft_sizes.best_tree(draft(tree_64=figures(REACHED, REACHED)), target())
    assert choice.levels == 2 and choice.speedup == pytest.approx(2.3 / 3)


def test_nothing_is_expected_of_widths_that_were_not_timed():
    assert draft_sizes.best_tree(draft(tree_64=figures(REACHED, REACHED)), target({"1": 4.0, "8": 5.0})) is None


def test_a_draft_that_costs_more_for_less_is_off_the_frontier():
    assert draft_sizes.on_frontier([(1, 0.5), (2, 0.7), (3, 0.6), (4, 0.8)]) == [True, True, False, True]


def test_sizes_are_compared_in_a_table_and_a_picture(tmp_path, capsys):
    costs = [
        {"name": f"{layers} layers", "layers": layers, "weights": layers * 3_500_000, "ms": {"1": 1.0, "8": layers}}
        for layers in (1, 2, 4)
    ]
    captured = {"way": "captured", "target": {"weights": 134_515_008, "ms": TARGET}, "drafts": costs}
    slower = {**captured, "way": "compiled", "target": {"weights": 134_515_008, "ms": dict.fromkeys(TARGET, 9.0)}}
    (tmp_path / "cost.json").write_text(json.dumps({"comparisons": [slower, captured]}))
    for layers in (4, 1):
        folder = tmp_path / str(layers)
        folder.mkdir()
        (folder / "training.json").write_text(json.dumps({"recipe": {"layers": layers}}))
        structures = {"chain-8": figures(REACHED, REACHED), "tree-64": figures(REACHED)}
        row = {"task": "mean", "temperature": 0.0, "selection": "all", "agreement": 0.5, "structures": structures}
        (folder / "results.json").write_text(json.dumps({"rows": [{**row, "task": "one", "agreement": 0.9}, row]}))
    arguments = [str(tmp_path / "4"), str(tmp_path / "1"), "--cost", str(tmp_path / "cost.json")]
    draft_sizes.main([*arguments, "--big-target-ms", "10", "--big-verify-ms", "11", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / "draft_sizes.md").read_text() in printed
    header, _, first, second = printed.splitlines()[:4]
    assert "135M, chain" in header and "7B-cost, tree" in header
    # 2.3 / (2 * 1/4 + 4/4), 2.6 / (4 * 1/4 + 8/4), 2.5 / (3 * 1/10 + 11/10), 2.6 / (4 * 1/10 + 11/10)
    assert first == "| 1 | 3.5M | 0.500 | 2.60 | 2.60 | 0.250 | 0.100 | 1.53 (2) | 0.87 (4) | 1.79 (3) | 1.73 (4) |"
    assert second.startswith("| 4 | 14.0M | 0.500 | 2.60 | 2.60 | 1.000 | 0.400 |")
    assert (tmp_path / "out" / "draft_sizes.png").stat().st_size > 10_000
    assert "</svg>" in (tmp_path / "out" / "draft_sizes.svg").read_text()

    with pytest.raises(SystemExit, match="no answers at temperature"):
        draft_sizes.main([*arguments, "--temperature", "0.7"])
    with pytest.raises(SystemExit, match="captured"):
        draft_sizes.main([*arguments, "--way", "eager"])


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_passes_are_timed(compiled):
    model = llama().to("cuda", torch.bfloat16)
    drafts = draft_cost.cut_drafts(model, [1], vocab_size=104)
    found = draft_cost.compare(model, drafts, [1, 8], context=64, repeats=2, compiled=compiled)
    assert found.way == ("compiled and captured" if compiled else "captured")
    assert 0 < found.drafts[0].of_target[1] < 1


def test_passes_behind_long_texts_are_judged_by_what_reading_them_must_cost():
    times = {500: (2.0, 1.0), 1500: (3.0, 3.0)}
    at_500, at_1500 = long_texts.judged(times, 64, token_bytes=4_300_000)  # a microsecond each
    assert (at_500.share, at_1500.limit_ms, at_1500.share) == (1.0, 3.0, 1.0)
    assert (at_500.attention_share, at_1500.attention_share) == (2.0, 2.0)
    assert long_texts.judged(times, 64, 4_300_000, together=2)[1].limit_ms == 4.0
    assert long_texts.key_value_bytes(llama()) == 2 * 4 * 2 * 16 * 4


def test_what_one_call_set_off_is_one_span_and_gaps_between_spans_are_waiting():
    def kernel(call, begin, taken):
        return {"cat": "kernel", "ts": begin, "dur": taken, "args": {"correlation": call}}

    events = [kernel(1, 0.0, 4.0), kernel(1, 6.0, 4.0), kernel(2, 15.0, 5.0), {"cat": "cpu_op", "ts": 10.0, "dur": 9.0}]
    spans = host_share.spans_of(events)
    assert spans == [(0.0, 10.0), (15.0, 20.0)]
    steps = [(0.0, 100.0), (110.0, 120.0), (119.0, 130.0), (135.0, 230.0), (230.0, 240.0), (245.0, 345.0)]
    assert host_share.waits_of(steps) == [(135.0, 15.0), (110.0, 5.0)]  # lengths of two steps, and the gaps in them


@pytest.mark.parametrize("mode", ["off", "chain"])
def test_steps_of_many_texts_are_counted_from_when_all_have_begun(mode, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = llama()
    scheduler = Scheduler(Pair(model, model, None), Limits(texts=5, slots=4096))
    steps = list(host_share.together(scheduler, [[1, 2, 3], [4] * 40], mode, 20, 5))
    host_share.finish(scheduler)
    assert min(steps) >= 5 and sum(steps) <= 5 * 19 and not scheduler.busy
    assert (max(steps) == 5) == (mode == "off")


def test_two_runs_are_compared_cell_by_cell():
    from test_bench_report import made_up, report_of

    compare_runs = import_module("compare_runs")

    def cells(slower: float) -> dict:
        times = [(mode, task) for mode in ("off", "auto") for task in ("cats", "mats")]
        rows = [
            made_up(
                mode,
                task,
                0,
                10.0 * (slower if (mode, task) == ("auto", "mats") else 1.0) + 0.1 * repeat,
                repeat=repeat,
            )
            for mode, task in times
            for repeat in range(3)
        ]
        return {(mode.mode, one.task): one for mode in report_of(*rows).modes for one in mode.tasks}

    same, other = (compare_runs.compared(cells(1.0), cells(slower)) for slower in (1.0, 1.2))
    assert same["cells"] == 4 and same["close"] == 1.0 and same["largest_difference"] == 0.0
    assert other["close"] == 0.75 and 0.15 < other["largest_difference"] < 0.2 and other["median_difference"] == 0.0
    assert same["close_ratios"] == 1.0 and other["close_ratios"] == 0.75 and other["median_ratio_difference"] == 0.0
    assert 0 < same["median_half_width"] < 0.02


def test_the_scheduler_decides_over_passes_that_only_take_their_time(monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    simulated_load = import_module("simulated_load")
    scheduler = simulated_load.simulated(right=0.9, texts=4)
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    plain, drafted = (simulated_load.answered(scheduler, prompts, 4, mode, 24) for mode in ("off", "auto"))
    assert plain["tokens"] == drafted["tokens"] and [len(tokens) for tokens in plain["tokens"]] == [24] * 16
    assert drafted["steps"] < 0.7 * plain["steps"]
