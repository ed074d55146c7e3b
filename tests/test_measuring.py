"""Measuring what passes take, and the curves that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cost_tools import FakeClock, at, latencies
from families import FAMILIES, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.cost import Curve, MeasuredCost
from draftgraph.cost.budget import nodes_worth_checking
from draftgraph.cost.measure import SECONDS, Passes, branches, measure, widths_up_to
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import PassResult
from draftgraph.proposers.device_heads import HeadDraft
from draftgraph.proposers.draft_model import DraftVocabulary

VOCABULARY = 50


# Curves


def test_prices_between_widths_and_contexts_are_linear() -> None:
    curve = Curve.of([100, 200], [1, 2, 4], [[1.0, 2.0, 6.0], [2.0, 4.0, 8.0]])
    for context, expected in ((100, [1.0, 2.0, 4.0, 6.0]), (150, [1.5, 3.0, 5.0, 7.0]), (400, [4.0, 8.0, 10.0, 12.0])):
        assert curve.prices(context)[1:].tolist() == pytest.approx(expected)
    assert curve.prices(3).tolist() == curve.prices(100).tolist()


def test_an_engine_that_pads_is_charged_for_the_width_that_it_computes() -> None:
    seconds = [[1.0, 3.0, 2.0]]
    plain, padded = (Curve.of([100], [1, 4, 8], seconds, padded=way).prices(100) for way in (False, True))
    assert padded[1:].tolist() == [1.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert plain[4] == 3.0 and plain[8] == 2.0, "what was measured is kept, also where wider is cheaper"


def test_a_longer_text_never_makes_a_pass_cheaper() -> None:
    curve = Curve.of([100, 200], [1, 2], [[1.0, 2.0], [0.9, 2.5]])
    assert curve.at(5000)[0] == 1.0 and curve.at(200)[1] == 2.5


def test_past_the_widest_pass_prices_go_on_growing() -> None:
    cost = MeasuredCost(latencies(0.1, (1, 2, 4, 8), (10, 14, 18, 26)))
    assert at(cost, 8) < at(cost, 9) < at(cost, 64) and at(cost, 64) == pytest.approx(0.026 + 56 * 0.002)
    flat = MeasuredCost(latencies(0.1, (1, 2, 4, 8), (10, 14, 14, 14)))
    assert at(flat, 64) > at(flat, 8), "a few widths with no growth may be luck"


def test_the_floor_is_the_price_of_a_node_at_its_cheapest() -> None:
    assert MeasuredCost(latencies(0.1, (1, 2, 4, 8), (10, 14, 18, 26))).floor() == pytest.approx(16 / 7 / 10)
    assert MeasuredCost(latencies(0.1, (1, 8), (10, 9))).floor() == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": [[1.0, float("nan"), 2.0]]},
        {"seconds": [[1.0, 0.0, 2.0]]},
        {"seconds": [[1.0, 2.0]]},
        {"nodes": [1, 4, 2]},
        {"nodes": [2, 4, 8]},
        {"contexts": []},
    ],
)
def test_a_curve_with_holes_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Curve.of(**{"contexts": [100], "nodes": [1, 2, 4], "seconds": [[1.0, 2.0, 3.0]]} | wrong)


# Measuring


class FakeEngine:
    """Passes that take as long as one says; an engine with one context, which is itself."""

    branching = True
    widths: tuple[int, ...] = ()

    def __init__(self, clock: FakeClock, first: float, node: float, token: float = 0.0, reading: float = 1e-5) -> None:
        self.clock, self.first, self.node, self.token, self.reading = clock, first, node, token, reading
        self.text: list[int] = []
        self.scratch = 0
        self.passes = 0
        self.busy: list[float] = []  # how much longer passes take, in turn
        self.device = torch.device("cpu")

    def begin(self, length: int, reuse: bool) -> None:
        self.rewind(0)

    def reserve(self, capacity: int) -> None:
        self.capacity = capacity

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        self.clock.now += self.reading * len(tokens)
        self.text.extend(tokens)

    def seconds(self, nodes: int, context: int) -> float:
        return self.first + self.node * (nodes - 1) + self.token * context

    def run(self, segments: Any) -> list[PassResult]:
        (segment,) = segments
        assert segment.context is self
        tokens = segment.tokens
        assert len(self.text) + self.scratch + len(tokens) <= self.capacity
        slow = self.busy[self.passes % len(self.busy)] if self.busy else 1.0
        self.clock.now += slow * self.seconds(len(tokens), len(self.text))
        self.passes += 1
        self.scratch += len(tokens)
        return [PassResult(torch.zeros(len(tokens), VOCABULARY))]

    def forget(self, scratch: int) -> None:
        self.scratch = scratch

    def rewind(self, length: int) -> None:
        del self.text[length:]
        self.scratch = 0

    def depth_limit(self, root: int) -> int | None:
        return None


class FakeDraft:
    config = None
    token_map = None

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(VOCABULARY, 2)


def subjects(clock: FakeClock, *engines: FakeEngine) -> list[Passes]:
    vocabulary = DraftVocabulary(FakeDraft(), VOCABULARY)
    return [
        Passes(engine, engine, VOCABULARY, vocabulary if place else None, clock=clock)  # type: ignore[arg-type]
        for place, engine in enumerate(engines)
    ]


def test_measuring_finds_what_passes_take() -> None:
    clock = FakeClock()
    target, draft = FakeEngine(clock, 0.02, 0.0003, token=1e-6), FakeEngine(clock, 0.004, 0.0001, token=1e-7)
    found = measure(subjects(clock, target, draft), window=4096)
    assert found.draft is not None
    assert found.target.nodes == found.draft.nodes == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
    assert found.target.contexts == (128, 1024)
    for engine, curve in ((target, found.target), (draft, found.draft)):
        for context in (128, 500, 1024, 4000):
            expected = [engine.seconds(nodes, context) for nodes in range(1, 65)]
            assert curve.prices(context)[1:].tolist() == pytest.approx(expected)
    assert found.took <= 2 * SECONDS
    assert (target.text, target.scratch, draft.text, draft.scratch) == ([], 0, [], 0)


def test_a_busy_machine_hardly_changes_what_is_found() -> None:
    """Passes that are held up now and then, and all of them by a third, make no width dearer than another."""
    clock = FakeClock()
    target, draft = FakeEngine(clock, 0.01, 0.0003), FakeEngine(clock, 0.002, 0.0001)
    for seed, engine in enumerate((target, draft)):
        engine.busy = np.random.default_rng(seed).choice([1.2, 1.4, 9.0], 997, p=[0.45, 0.5, 0.05]).tolist()
    found = measure(subjects(clock, target, draft), window=None)
    for engine, curve in ((target, found.target), (draft, found.draft)):
        assert curve is not None and len(curve.nodes) == 12
        slower = curve.prices(0)[1:] / [engine.seconds(nodes, 0) for nodes in range(1, 65)]
        assert slower.min() > 1.15 and slower.max() < 1.7


def test_passes_that_never_pay_are_not_timed() -> None:
    clock = FakeClock()
    target = FakeEngine(clock, 0.02, 0.01)  # a CPU: nodes are dear
    found = measure(subjects(clock, target), window=4096)
    assert found.target.nodes == (1, 2, 3, 4, 5, 6, 7, 8) and found.draft is None and found.took <= 2 * SECONDS


def test_a_slow_model_is_measured_once_behind_a_short_text() -> None:
    clock = FakeClock()
    target = FakeEngine(clock, 2.0, 0.2, reading=0.1)
    found = measure(subjects(clock, target), window=4096)
    assert found.target.nodes == (1, 2, 4, 8) and found.target.contexts == (32,)
    assert target.passes <= 8 and found.took < 30
    assert found.target.seconds[0] == pytest.approx((2.0, 2.2, 2.6, 3.4))


class Preparing(FakeEngine):
    """The first pass of every width takes long."""

    known: tuple[int, ...] = ()

    def seconds(self, nodes: int, context: int) -> float:
        first_time, self.known = nodes not in self.known, (*self.known, nodes)
        return super().seconds(nodes, context) + (3.0 if first_time else 0.0)


def test_a_first_pass_that_prepares_the_engine_is_not_counted() -> None:
    clock = FakeClock()
    found = measure(subjects(clock, Preparing(clock, 0.1, 0.01)), window=4096)
    assert found.target.seconds[0] == pytest.approx([0.1 + 0.01 * (nodes - 1) for nodes in found.target.nodes])


def test_odd_numbers_of_nodes_that_cost_more_are_known() -> None:
    class Odd(FakeEngine):
        def seconds(self, nodes: int, context: int) -> float:
            return super().seconds(nodes, context) * (1.5 if nodes in (3, 5, 6, 7) else 1.0)

    clock = FakeClock()
    cost = MeasuredCost(measure(subjects(clock, Odd(clock, 0.05, 0.005)), window=4096))
    assert at(cost, 3) > at(cost, 4) and at(cost, 5) > at(cost, 8) > at(cost, 4)
    tree = branches(np.arange(8))
    assert nodes_worth_checking(replace(tree, scores=np.array([1, 0.6, 0.3, 0.05, 0.04, 0.03, 0, 0])), cost) in (2, 4)


def test_an_engine_that_pads_is_measured_at_its_own_widths() -> None:
    class Padding(FakeEngine):
        widths = (1, 8, 64, 128)

    clock = FakeClock()
    found = measure(subjects(clock, Padding(clock, 0.01, 0.0001)), window=4096)
    assert found.target.nodes == (1, 8, 64) and found.target.padded


def test_recording_takes_nothing_of_the_time_for_measuring() -> None:
    class Recording(Preparing):
        widths = (1, 2, 4, 8, 16, 32, 64, 128)

    clock = FakeClock()
    found = measure(subjects(clock, Recording(clock, 0.005, 0.00001)), window=4096)
    assert found.target.nodes == (1, 2, 4, 8, 16, 32, 64) and len(found.target.contexts) == 2
    assert found.target.seconds[0] == pytest.approx([0.005 + 0.00001 * (nodes - 1) for nodes in found.target.nodes])


def test_a_text_fits_the_window_and_stays_on_one_side_of_a_rope_switch() -> None:
    class Switching(FakeEngine):
        def depth_limit(self, root: int) -> int | None:
            return 99 - root if root < 100 else 0

    clock = FakeClock()
    assert measure(subjects(clock, FakeEngine(clock, 0.01, 0.0)), window=75).target.contexts == (68,)
    assert measure(subjects(clock, Switching(clock, 0.01, 0.0)), window=4096).target.contexts == (64,)


def test_widths_reach_the_bound() -> None:
    assert list(widths_up_to(64)) == [1, 2, 4, 8, 16, 32, 64] and list(widths_up_to(100))[-2:] == [64, 100]
    assert list(widths_up_to(64, (1, 4, 32, 128, 256))) == [1, 4, 32, 128]


@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(family: str) -> None:
    target = target_of(family)
    decoder = GraphDecoder(target, perturbed(target))
    found = decoder.measure(GraphConfig(), decoder.engines, seconds=0.05)
    assert found.draft is not None and found.target.nodes[-1] >= 8
    assert [engine.used for engine in decoder.engines.all] == [0, 0]


@pytest.mark.parametrize("engine_of", [EagerEngine, PagedEngine, lambda model: PagedEngine(model, captured=True)])
def test_every_engine_can_be_measured(engine_of: Any) -> None:
    target = target_of("llama")
    engine = engine_of(target)
    context = engine.open()
    with Loan(target):
        found = measure([Passes(engine, context, 24)], window=4096, seconds=0.05)
    assert found.target.nodes[-1] >= 8 and context.text == [] and context.scratch == 0
    assert found.target.padded == engine.captured


@pytest.mark.parametrize(("kind", "nodes"), [("states", (1, 8)), ("block", (1, 5))])
def test_a_head_on_a_device_can_be_measured(kind: str, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from test_head_proposers import head, target

    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder, deepest = GraphDecoder(target(), head(kind)), []
    launched = HeadDraft.launched
    monkeypatch.setattr(HeadDraft, "launched", lambda *given: deepest.append(given[3].deepest) or launched(*given))
    found = decoder.measure(GraphConfig(), decoder.engines, seconds=0.05)
    assert found.draft is not None and found.draft.nodes == nodes
    assert set(deepest) == {4 if kind == "block" else 16}
    assert [engine.used for engine in decoder.engines.all] == [0, 0]


def test_a_draft_on_a_device_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    target = target_of("llama")
    decoder = GraphDecoder(target, perturbed(target))
    assert decoder.engines.device_drafts(GraphConfig()) is not None
    found = decoder.measure(GraphConfig(), decoder.engines, seconds=0.05)
    assert found.draft is not None and found.draft.nodes == (1, 8)
    assert [engine.used for engine in decoder.engines.all] == [0, 0]
