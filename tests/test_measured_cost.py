"""Measured prices: what passes take here, kept on disk, and what `auto` does with them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cost_tools import FakeClock, at, latencies
from families import perturbed, target_of
from graph_tools import grow
from test_batch import check_left_behind, run, sequence_of

from draftgraph import CostModel, GraphConfig, GraphDecoder, hardware
from draftgraph.batching import Batch
from draftgraph.bench.tune import SureProposer
from draftgraph.cost import Curve, Latencies, MeasuredCost, prices
from draftgraph.cost.budget import HIT, DraftBudget, HitRate, nodes_worth_checking
from draftgraph.cost.latency import CONTEXT_STEP, MOST_CONTEXTS
from draftgraph.cost.measure import BOUND, SECONDS
from draftgraph.cost.prices import OFF, PAUSE, STEPS, Watch
from draftgraph.engine.eager import EagerEngine
from draftgraph.graph import Source, TokenGraph, TokenTree
from draftgraph.sequence import Engines
from draftgraph.stats import Step


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and tiny models measured as if they were large."""
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr("draftgraph.cost.prices.SMALLEST", 0)
    monkeypatch.setattr(prices, "_shared", {})
    yield tmp_path / "costs"


# Keeping


def key_for(model: Any, draft: Any = None) -> prices.Key:
    return prices.key_of((model, EagerEngine(model)), None if draft is None else (draft, EagerEngine(draft)))


def quantised(model: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def test_retrained_weights_cost_the_same_and_other_sizes_or_formats_do_not() -> None:
    model, retrained = target_of("llama"), target_of("llama", seed=5)
    assert key_for(model) == key_for(retrained) == json.loads(json.dumps(key_for(model)))
    others = [
        key_for(target_of("qwen2")),
        key_for(target_of("llama", dtype=torch.float64)),
        key_for(model, retrained),
        key_for(quantised(target_of("llama"))),
    ]
    fewer_heads = target_of("llama")
    fewer_heads.config.num_attention_heads = 2
    others.append(key_for(fewer_heads))
    assert all(other != key_for(model) for other in others)
    assert len({prices.file_of(other) for other in others}) == len(others)


def test_another_processor_or_thread_count_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("llama")
    here = key_for(model)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert key_for(model) != here
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "processor", lambda: "Another 9000")
    assert key_for(model) != here and "Another 9000" in key_for(model)["device"]


def test_the_processor_has_a_name() -> None:
    assert hardware.processor() and hardware.available_cores() >= 1


class Measurements:
    """Stands in for `GraphDecoder.measure`: counts, and takes no time."""

    def __init__(self, found: Latencies) -> None:
        self.found = found
        self.count = 0

    def __call__(self, config: GraphConfig, engines: Engines) -> Latencies:
        self.count += 1
        return replace(self.found, bound=max(config.nodes, BOUND))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    found = Measurements(latencies(0.1))
    monkeypatch.setattr(GraphDecoder, "measure", staticmethod(found))
    return found


def tokens_of(decoder: GraphDecoder, **arguments: Any) -> list[int]:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    return decoder.generate(ids, max_new_tokens=arguments.pop("max_new_tokens", 24), **arguments).new_token_ids[0]


def new_decoder(config: GraphConfig | None = None) -> GraphDecoder:
    target = target_of("llama")
    return GraphDecoder(target, perturbed(target, 0.02), config=config or GraphConfig())


def test_passes_are_measured_at_the_first_request_and_read_later(
    measured: Measurements, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = new_decoder()
    assert measured.count == 0, "not before it is needed"
    tokens_of(decoder)
    assert measured.count == 1 and len(list(cache.iterdir())) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "measuring" in said and f"{2 * SECONDS:.0f} seconds" in said
    tokens_of(decoder)
    tokens_of(new_decoder())
    monkeypatch.setattr(prices, "_shared", {})  # as in another process
    tokens_of(new_decoder())
    assert measured.count == 1 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "config",
    [GraphConfig(mode=mode) for mode in ("graph", "tree", "chain", "off")]
    + [
        GraphConfig(cost="flat"),
        GraphConfig(cost=MeasuredCost(latencies(0.1))),
    ],
)
def test_nothing_is_measured_for_those_who_do_not_decide_by_it(measured: Measurements, config: GraphConfig) -> None:
    tokens_of(new_decoder(config))
    assert measured.count == 0


def test_a_small_model_is_not_measured(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftgraph.cost.prices.SMALLEST", 1 << 22)
    tokens_of(new_decoder())
    assert measured.count == 0


def test_a_wider_bound_is_measured_again(measured: Measurements) -> None:
    tokens_of(new_decoder())
    for _ in range(2):
        tokens_of(new_decoder(GraphConfig(max_nodes=200)))
    tokens_of(new_decoder())
    assert measured.count == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "other machine", "hole"])
def test_a_file_that_is_damaged_or_of_another_machine_is_measured_again_with_one_line(
    measured: Measurements,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    tokens_of(new_decoder())
    (file,) = cache.iterdir()
    content = json.loads(file.read_text())
    if damage == "other machine":
        content["key"]["device"] = "another"
        damage = json.dumps(content)
    elif damage == "hole":
        content["latencies"]["target"]["seconds"][0][1] = -1.0
        damage = json.dumps(content)
    file.write_text(damage)
    monkeypatch.setattr(prices, "_shared", {})
    capsys.readouterr()
    tokens_of(new_decoder())
    lines = capsys.readouterr().err.splitlines()
    assert measured.count == 2 and sum(str(file) in line for line in lines) == 1 and len(lines) == 2
    assert json.loads(file.read_text())["key"]["device"] != "another"


def test_without_a_folder_to_write_to_a_process_measures_once(measured: Measurements, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    for _ in range(3):
        tokens_of(new_decoder())
    assert measured.count == 1


def test_a_model_that_cannot_be_measured_is_decoded_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Latencies:
        raise RuntimeError("no memory")

    monkeypatch.setattr(GraphDecoder, "measure", broken)
    decoder = new_decoder()
    expected = tokens_of(new_decoder(GraphConfig(mode="off")))
    assert tokens_of(decoder) == expected == tokens_of(decoder)
    assert capsys.readouterr().err.count("no memory") == 1


# Holding


def new_watch() -> Watch:
    """One that has been watching for long."""
    clock = FakeClock()
    watch = Watch(clock)
    clock.now += PAUSE
    return watch


def fed(watch: Watch, ratio: float, steps: int = STEPS) -> None:
    for _ in range(steps):
        watch.add(0.01, 0.01 * ratio)


def test_prices_that_are_off_for_fifty_steps_are_measured_again() -> None:
    for ratio in (1 + 1.2 * OFF, 1 - 1.2 * OFF):
        watch = new_watch()
        fed(watch, ratio, STEPS - 1)
        assert not watch.due
        fed(watch, ratio, 1)
        assert watch.due and watch.ratio == pytest.approx(ratio)
    watch = new_watch()
    fed(watch, 1 + 0.8 * OFF, 4 * STEPS)
    assert not watch.due
    fed(watch, 3.0, STEPS)
    fed(watch, 1.0, STEPS)
    assert not watch.due, "it was busy for a while"


def test_measuring_again_has_to_wait_some_minutes() -> None:
    clock = FakeClock()
    watch = Watch(clock)
    watch.measured()
    fed(watch, 2.0)
    assert not watch.due
    clock.now += PAUSE
    assert watch.due


def test_a_ratio_that_measuring_does_not_mend_is_the_usual_one() -> None:
    clock = FakeClock()
    watch = Watch(clock)
    clock.now += PAUSE
    fed(watch, 1.6)
    assert watch.due
    watch.measured()
    clock.now += 10 * PAUSE
    fed(watch, 1.6)
    assert not watch.due and watch.usual == pytest.approx(1.6)
    fed(watch, 2.4)
    assert watch.due


def test_the_next_request_measures_again_when_steps_take_longer(
    measured: Measurements, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    measured.found = latencies(0.1, target=(1e-6, 1e-6, 1e-6))  # any real step takes longer than that
    decoder = new_decoder(GraphConfig(max_depth=4))
    prices.measured_pricing(decoder.cost_key(decoder.engines)).watch = Watch(clock)
    tokens_of(decoder, max_new_tokens=600)
    tokens_of(decoder)
    assert measured.count == 1, "a moment ago"
    clock.now += PAUSE
    capsys.readouterr()
    tokens_of(decoder)
    said = capsys.readouterr().err
    assert measured.count == 2 and said.count("\n") == 1 and "measuring again" in said


def test_a_process_that_may_not_measure_again_leaves_it_to_the_next(
    measured: Measurements, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prices of a busy machine are not those of a quiet one, and most processes are short."""
    now = 1e9
    monkeypatch.setattr(prices.time, "time", lambda: now)
    monkeypatch.setattr(prices, "OFF", 9.0)  # steps take what they take here: a machine may be busier from then on
    measured.found = latencies(0.1, target=(1e-6, 1e-6, 1e-6))

    def process(new_tokens: int = 1) -> None:
        monkeypatch.setattr(prices, "_shared", {})
        tokens_of(new_decoder(GraphConfig(max_depth=4)), max_new_tokens=new_tokens)

    process(600)
    now += PAUSE / 2
    process()
    assert measured.count == 1, "a moment ago"
    now += PAUSE
    capsys.readouterr()
    process(600)
    assert measured.count == 2 and "measuring again" in capsys.readouterr().err
    now += 2 * PAUSE
    (file,) = cache.iterdir()
    ratio = json.loads(file.read_text())["usual"]
    assert ratio > 1 + prices.OFF, "measuring does not mend it"
    process()
    assert measured.count == 2


@pytest.mark.parametrize("engine", ["exact", "static"])
def test_a_batch_that_was_prepared_measures_nothing_while_somebody_waits(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if engine == "static":
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    monkeypatch.setattr("draftgraph.cost.measure.ROUNDS", 1)
    batch = Batch(new_decoder(), 4096, sequences=2)
    batch.prepare(GraphConfig())
    assert "measuring" in capsys.readouterr().err
    check_left_behind(batch)
    sequence = sequence_of(batch.decoder, [3, 1, 4, 1, 5], {"max_new_tokens": 8}, GraphConfig(), 0)
    run(batch, [sequence])
    assert sequence.reused == 0 and sequence.pricing.name == "measured" and not capsys.readouterr().err


def test_steps_are_charged_for_what_they_did(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[tuple[float, float]] = []
    monkeypatch.setattr(Watch, "add", lambda self, predicted, observed: charged.append((predicted, observed)))
    decoder = new_decoder()
    sizes: list[int] = []
    decoder.observer = lambda step: sizes.append(len(step.tree))
    decoding = decoder.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=30)
    cost = MeasuredCost(measured.found)
    assert len(charged) == decoding.stats.steps - 1 and all(observed > 0 for _, observed in charged)
    levels = decoding.stats.draft_passes * 0.001
    total = sum(at(cost, size) for size in sizes) + levels
    assert sum(predicted for predicted, _ in charged) == pytest.approx(
        total, abs=0.012 + 0.017
    )  # the last step is not charged


def test_prices_for_other_lengths_are_kept_once_and_bounded() -> None:
    """Those that were reached from each other as well: a text asks the prices of its last step for the next."""
    found = latencies(0.1)
    cost = MeasuredCost(found)
    assert cost.at(5000).at(640) is cost.at(640) is cost.at(640 + CONTEXT_STEP // 2)
    here = cost
    for context in range(0, 4 * MOST_CONTEXTS * CONTEXT_STEP, CONTEXT_STEP):
        here = here.at(context).at(context + CONTEXT_STEP)
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is MeasuredCost and one.latencies is found]
    assert len(alive) <= MOST_CONTEXTS + 2  # the first, and the one in hand


# Deciding


@pytest.mark.parametrize("samples", [{}, {"do_sample": True, "seed": 3, "top_k": 0}])
def test_measured_prices_give_the_tokens_of_plain_decoding(samples: dict[str, Any], cache: Path) -> None:
    plain = tokens_of(new_decoder(GraphConfig(mode="off")), **samples)
    decoder = new_decoder(GraphConfig(cost="measured"))
    assert tokens_of(decoder, **samples) == plain
    assert tokens_of(decoder, **samples) == plain and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("price", "drafts"), [(0.05, True), (2.0, False)])
def test_a_cheap_draft_is_asked_and_a_dear_one_is_not(price: float, drafts: bool) -> None:
    decoder = new_decoder(GraphConfig(cost=MeasuredCost(latencies(price))))
    result = decoder.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=24)
    assert (result.stats.draft_passes > 0) is drafts
    cost, config = MeasuredCost(latencies(price)), GraphConfig()
    budget = DraftBudget(cost, config.levels, HIT, config.nodes)
    assert (levels_grown(cost, budget, HIT, config)[1] > 0) is drafts


def test_copies_go_on_when_drafting_does_not_pay() -> None:
    decoder = new_decoder(GraphConfig(cost=MeasuredCost(latencies(5.0))))
    stats = decoder.generate(torch.tensor([[1, 2, 3, 4, 5, 6] * 4]), max_new_tokens=40).stats
    assert stats.draft_passes == 0 and stats.verified_tokens > stats.steps


def test_a_draft_that_does_not_pay_makes_no_pass_behind_the_prompt() -> None:
    decoder, passes = new_decoder(GraphConfig(cost=MeasuredCost(latencies(5.0)))), []
    decoder.draft_model.register_forward_pre_hook(lambda *_: passes.append(1))
    tokens_of(decoder, max_new_tokens=100)
    assert len(passes) == 1


STEPPED = Latencies(  # of an engine that pads: nodes cost nothing up to the next width
    Curve.of([128], [1, 2, 4, 8, 16, 64], [[1.0, 1.5, 1.5, 1.55, 2.5, 2.6]], padded=True),
    Curve.of([128], [1, 8, 64], [[0.12, 0.13, 0.3]], padded=True),
    64,
    1.0,
)
CPU = latencies(0.15, (1, 2, 4, 8, 16, 32), (117, 150, 207, 278, 360, 512))
GPU = latencies(0.05, (1, 8, 64), (6.0, 6.4, 6.73))


def levels_grown(cost: CostModel, budget: DraftBudget, hit: float, config: GraphConfig) -> tuple[TokenTree, int]:
    """A step with nothing to copy, and how often the draft was asked in it."""
    proposer = SureProposer(hit, config.k)
    return grow(TokenGraph(0, config), [proposer], cost.floor(), budget), proposer.levels


def speed_up(cost: CostModel, budget: DraftBudget, hit: float, config: GraphConfig) -> float:
    """Expected tokens per second against plain decoding."""
    tree, _ = levels_grown(cost, budget, hit, config)
    nodes = nodes_worth_checking(tree, cost, budget.spent)
    return float(tree.scores[:nodes].sum()) / (budget.spent + at(cost, nodes)) * at(cost, 1)


class Forced(DraftBudget):
    """Always so many levels of such a width."""

    def __init__(self, cost: CostModel, levels: int, width: int) -> None:
        super().__init__(cost, levels)
        self.width = width

    def worth_drafting(self, tree: TokenTree, scores: Any) -> int:
        if not self.levels or not len(scores):
            return 0
        drafted = min(self.width, len(scores))
        self.levels -= 1
        self.spent += float(self.cost.of_level(np.array([drafted]))[0])
        return drafted


@pytest.mark.parametrize("curves", [STEPPED, CPU, GPU], ids=["padded", "CPU", "GPU"])
@pytest.mark.parametrize("hit", [0.3, 0.5, 0.7, 0.9])
def test_the_decision_is_nearly_the_best_of_all(curves: Latencies, hit: float) -> None:
    cost, config, best = MeasuredCost(curves), GraphConfig(), 0.0
    for levels in range(9):
        for width in (1, 2, 4, 8, 16, 64):
            best = max(best, speed_up(cost, Forced(cost, levels, width), hit, config))
    assert speed_up(cost, DraftBudget(cost, config.levels, hit, config.nodes), hit, config) > 0.95 * best


def outcome(hit: bool, drafted: bool = True) -> Step:
    graph = TokenGraph(0, GraphConfig())
    source: Source = "draft" if drafted else "copied"
    graph.extend([0], np.ones(1), np.array([[7, 5]]), np.array([[0.7, 0.6]]), source)
    assert graph.is_drafted(0) is drafted and len(graph) == 3
    return Step(0, graph, graph.unroll(), [], [7 if hit else 5])


def test_a_poor_draft_is_left_alone_and_tried_again_some_day() -> None:
    hits = HitRate()
    assert hits.rate == HIT
    for _ in range(20):
        hits.count(outcome(False))
    assert hits.rate < 0.25
    for _ in range(300):
        hits.count(outcome(False, drafted=False))
    assert hits.rate > 0.95 * HIT
    for _ in range(200):
        hits.count(outcome(True))
    assert hits.rate > 0.97
