"""Estimates of acceptance: several sources are weighed against each other, and corrected by what was accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from hypothesis import given
from hypothesis import strategies as st

from draftgraph import GraphConfig, GraphDecoder, TokenGraph
from draftgraph.cost import FlatCost
from draftgraph.graph import NO_TOKEN, ROOT, Source
from draftgraph.proposers.pooling import VOICES, Calibration, Pool, Proposal, Voice, pool, say_once

GRID = np.linspace(0.0, 1.0, 201)
PROMPT = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
FREE = GraphConfig(cost=FlatCost())


def outcomes(rng: np.random.Generator, chance: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates all over the range, and outcomes that come true with another chance."""
    estimates = rng.uniform(0.0, 1.0, count)
    return estimates, rng.uniform(0.0, 1.0, count) < chance(estimates)


def test_a_source_without_outcomes_is_believed() -> None:
    calibration = Calibration()
    calibration.observe("draft", np.array([0.9] * 50), np.zeros(50, dtype=bool))
    calibration.learn()
    assert calibration.corrected("recycled", GRID).tolist() == GRID.tolist()
    assert calibration.corrected("draft", np.array([0.9]))[0] < 0.5


@pytest.mark.parametrize("chance", [lambda p: p**2, lambda p: 0.5 * p, lambda p: np.sqrt(p), lambda p: 0 * p + 0.3])
def test_the_correction_finds_the_true_rate(chance: Any) -> None:
    calibration, rng = Calibration(), np.random.default_rng(1)
    for _ in range(2000):
        calibration.observe("copied", *outcomes(rng, chance, 8))
        calibration.learn()
    at = np.array([0.1, 0.3, 0.5, 0.7, 0.85])
    assert calibration.corrected("copied", at) == pytest.approx(chance(at), abs=0.07)


def test_estimates_that_are_right_stay() -> None:
    calibration, rng = Calibration(), np.random.default_rng(2)
    for _ in range(2000):
        calibration.observe("draft", *outcomes(rng, lambda p: p, 8))
        calibration.learn()
    assert calibration.corrected("draft", GRID) == pytest.approx(GRID, abs=0.06)


def test_what_changes_is_followed() -> None:
    calibration, rng = Calibration(), np.random.default_rng(3)
    for chance in (0.9, 0.2):
        for _ in range(1500):
            calibration.observe("draft", *outcomes(rng, lambda p, chance=chance: 0 * p + chance, 8))
            calibration.learn()
        assert calibration.corrected("draft", np.array([0.5]))[0] == pytest.approx(chance, abs=0.1)


seen = st.lists(st.tuples(st.floats(0.0, 1.0, exclude_min=True), st.booleans()), min_size=1, max_size=80)


@given(seen)
def test_the_order_of_siblings_is_kept(observed: list[tuple[float, bool]]) -> None:
    calibration = Calibration()
    calibration.observe("draft", np.array([p for p, _ in observed]), np.array([hit for _, hit in observed]))
    calibration.learn()
    corrected = calibration.corrected("draft", GRID)
    assert (np.diff(corrected) >= -1e-12).all()
    assert corrected[0] == 0.0 and corrected.max() <= 1.0
    assert (corrected[1:] > 0.0).all()


def children(source: Source, *tokens: int, chances: list[float]) -> Proposal:
    return Proposal(source, [0], np.array([tokens]), np.array([chances]))


def weighed(*proposals: Proposal, k: int = 4) -> dict[int, tuple[str, float]]:
    """Token -> who proposed it, and its chance."""
    found = Pool(k, Calibration()).weigh(TokenGraph(1, FREE), [ROOT], list(proposals))
    return {
        int(token): (one.source, float(chance))
        for one in found
        for token, chance in zip(one.tokens[0], one.chances[0], strict=True)
        if token != NO_TOKEN
    }


DRAFT = children("draft", 10, 11, 12, chances=[0.5, 0.2, 0.1])


def test_a_draft_alone_keeps_its_estimates() -> None:
    found = weighed(DRAFT)
    assert {token: chance for token, (_, chance) in found.items()} == pytest.approx({10: 0.5, 11: 0.2, 12: 0.1})


def test_of_sources_without_a_draft_the_surer_one_counts() -> None:
    found = weighed(children("copied", 10, 11, chances=[0.3, 0.1]), children("recycled", 10, 13, chances=[0.4, 0.2]))
    assert found == {10: ("copied", 0.4), 11: ("copied", 0.1), 13: ("recycled", 0.2)}


def test_agreement_counts_for_more_than_either_and_silence_for_less() -> None:
    found = weighed(children("recycled", 11, chances=[0.6]), DRAFT)
    assert found[11][1] > 0.6 > 0.2
    assert found[10][1] < 0.5 and found[12][1] < 0.1
    assert found[10][1] / found[12][1] == pytest.approx(5.0)


def test_a_token_that_the_draft_does_not_name_is_doubted() -> None:
    found = weighed(children("recycled", 20, chances=[0.6]), DRAFT)
    assert 0.01 < found[20][1] < 0.2


def test_every_token_is_named_once_and_a_node_has_k_children() -> None:
    found = weighed(
        children("copied", 10, 14, 15, chances=[0.3, 0.02, 0.01]),
        children("recycled", 10, 16, chances=[0.4, 0.02]),
        DRAFT,
    )
    assert len(found) == 4 and {10, 11} < found.keys()
    assert found[10][0] == "draft"


def test_the_likelier_source_has_the_only_child() -> None:
    assert weighed(children("copied", 20, chances=[0.2]), DRAFT, k=3).keys() >= {10}
    assert list(weighed(children("copied", 20, chances=[0.2]), children("draft", 10, chances=[0.9]), k=1)) == [10]


columns = st.lists(st.tuples(st.integers(0, 6), st.floats(0.01, 0.3)), unique_by=lambda one: one[0], max_size=3)


@given(columns, columns, columns)
def test_chances_are_chances(copied: Any, recycled: Any, draft: Any) -> None:
    tokens, said, found = np.full(9, NO_TOKEN), np.zeros(9), np.zeros(9)
    for place, source in enumerate((draft, copied, recycled)):
        for rank, (token, chance) in enumerate(source):
            tokens[place * 3 + rank], said[place * 3 + rank] = token, chance
    say_once(tokens, said, 3)
    pool(tokens, said, 3, found)
    named = {token for source in (copied, recycled, draft) for token, _ in source}
    assert (found > 0).sum() == len(named)
    assert set(tokens[found > 0].tolist()) == named
    assert (found >= 0).all() and found.sum() <= 1.0 + 1e-9


def test_a_draft_that_is_asked_late_revises_what_stands() -> None:
    graph, pool = TokenGraph(1, FREE), Pool(4, Calibration())
    for one in pool.weigh(graph, [ROOT], [children("recycled", 10, 20, chances=[0.3, 0.6])]):
        graph.extend([ROOT], np.ones(1), one.tokens, one.chances, one.source)
    before = {graph.tokens[node]: graph.probs[node] for node in (1, 2)}
    for one in pool.weigh(graph, [ROOT], [DRAFT]):
        graph.extend([ROOT], np.ones(1), one.tokens, one.chances, one.source)
    after = {graph.tokens[node]: graph.probs[node] for node in range(1, len(graph))}
    assert before == pytest.approx({10: 0.3, 20: 0.6})
    assert after == pytest.approx(
        {
            token: chance
            for token, (_, chance) in weighed(children("recycled", 10, 20, chances=[0.3, 0.6]), DRAFT).items()
        }
    )
    assert after[20] < 0.6 and after[10] > 0.3


def test_a_child_that_is_no_longer_among_the_best_keeps_what_is_left_of_its_chance() -> None:
    graph, pool = TokenGraph(1, FREE), Pool(2, Calibration())
    for proposal in (children("recycled", 21, 20, chances=[0.9, 0.02]), children("draft", 10, 20, chances=[0.9, 1e-4])):
        for one in pool.weigh(graph, [ROOT], [proposal]):
            graph.extend([ROOT], np.ones(1), one.tokens, one.chances, one.source)
    after = {int(graph.tokens[node]): float(graph.probs[node]) for node in range(1, len(graph))}
    assert after.keys() >= {20, 21} and 0.0 < after[20] < 0.01 < after[21] < 0.9


class Notes(Calibration):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[tuple[str, list[float], list[bool]]] = []

    def observe(self, voice: Voice, estimates: np.ndarray, accepted: np.ndarray) -> None:
        self.outcomes.append((voice, estimates.tolist(), accepted.tolist()))


def test_outcomes_are_known_on_the_walk_alone() -> None:
    notes = Notes()
    graph, pool = TokenGraph(1, GraphConfig(tau=8)), Pool(4, notes)
    levels = [([ROOT], [[10, 11]], [[0.5, 0.25]]), ([1, 2], [[12, 13], [14, 15]], [[0.4, 0.3], [0.6, 0.1]])]
    for frontier, tokens, chances in levels:
        said = Proposal("draft", list(range(len(frontier))), np.array(tokens), np.array(chances))
        for one in pool.weigh(graph, frontier, [said]):
            graph.extend(frontier, np.ones(len(frontier)), one.tokens, one.chances, one.source)
    tree = graph.unroll()
    first = tree.child(ROOT, 10)
    assert first is not None
    pool.weighed.settle(notes, graph, tree, [ROOT, first], [10, 13])
    assert notes.outcomes == [
        ("draft", pytest.approx([0.25, 0.3]), [False, True]),
        ("draft's best", pytest.approx([0.5, 0.4]), [True, False]),
    ]


def test_a_best_child_that_is_always_right_is_soon_believed_whatever_it_says() -> None:
    calibration, rng = Calibration(), np.random.default_rng(5)
    for _ in range(5):
        best, other = rng.uniform(0.3, 0.9, 8), rng.uniform(0.05, 0.3, 8)
        calibration.observe("draft's best", best, np.ones(8, dtype=bool))
        calibration.observe("draft", other, np.zeros(8, dtype=bool))
    assert calibration.odds == (1.0, 1.0), "nothing counts before it is learnt"
    calibration.learn()
    less, more = calibration.odds
    assert less < 0.7 and more > 4
    unseen = np.array([0.2])  # in no bin that was observed
    assert calibration.corrected("draft's best", unseen)[0] > 0.4 > 0.2 > calibration.corrected("draft", unseen)[0]


@pytest.mark.parametrize("style", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 2}])
def test_the_text_never_depends_on_what_was_learnt(style: dict[str, Any]) -> None:
    target = target_of("llama", dtype=torch.float64)
    plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=50, **style)
    decoder = GraphDecoder(target, perturbed(target, 0.3), config=FREE)
    first = decoder.generate(PROMPT, max_new_tokens=50, **style)
    for calibration in decoder.learnt.calibrations.values():
        for voice in VOICES:
            calibration.observe(voice, GRID[1:], GRID[1:] < 0.5)  # the surer, the less true
            calibration.learn()
    second = decoder.generate(PROMPT, max_new_tokens=50, **style)
    assert plain.sequences.tolist() == first.sequences.tolist() == second.sequences.tolist()


def test_requests_of_one_decoder_learn_together_and_greedy_apart_from_sampled() -> None:
    target = target_of("llama")
    decoder = GraphDecoder(target, perturbed(target, 0.3), config=FREE)
    decoder.generate(PROMPT, max_new_tokens=50, do_sample=False)
    greedy = decoder.learnt.calibrations[False].corrected("draft", GRID)
    assert greedy.tolist() != GRID.tolist()
    assert decoder.learnt.calibrations[True].corrected("draft", GRID).tolist() == GRID.tolist()
    decoder.generate(PROMPT, max_new_tokens=50, do_sample=True, seed=1)
    assert decoder.learnt.calibrations[False].corrected("draft", GRID).tolist() == greedy.tolist()
    assert decoder.learnt.calibrations[True].corrected("draft", GRID).tolist() != GRID.tolist()


@pytest.mark.parametrize("mode", ["graph", "tree", "chain"])
def test_the_papers_modes_see_raw_probabilities(mode: Any) -> None:
    target = target_of("llama")
    decoder = GraphDecoder(target, perturbed(target, 0.3), config=GraphConfig(mode=mode))
    decoder.generate(PROMPT, max_new_tokens=30, do_sample=False)
    assert decoder.learnt.calibrations[False].corrected("draft", GRID).tolist() == GRID.tolist()


def test_the_same_request_is_drafted_the_same_way() -> None:
    target = target_of("llama")
    runs = []
    for _ in range(2):
        decoder = GraphDecoder(target, perturbed(target, 0.3), config=FREE)
        trees: list[list[int]] = []
        decoder.observer = lambda step, trees=trees: trees.append(step.tree.tokens.tolist())  # type: ignore[misc]
        decoder.generate(PROMPT, max_new_tokens=40, do_sample=True, seed=9)
        runs.append(trees)
    assert runs[0] == runs[1]
