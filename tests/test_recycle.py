"""Recycling: what the target ranked best at any checked node is proposed where the same tokens stand again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from graph_tools import grow
from hypothesis import given
from hypothesis import strategies as st

from draftgraph import GraphConfig, GraphDecoder, TokenGraph, TokenTree
from draftgraph.choose import DraftNoise
from draftgraph.cost import FlatCost
from draftgraph.engine.protocol import Ranking
from draftgraph.graph import NO_TOKEN, ROOT
from draftgraph.noise import CHOICE, KeyedNoise
from draftgraph.proposers.recycling import ALTERNATIVES, LONGEST, RankingMemory, RecycleProposer, context_of, gumbel

FREE = GraphConfig(cost=FlatCost())
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 5},
    "penalised": {"do_sample": True, "temperature": 1.2, "repetition_penalty": 1.2, "top_p": 0.9, "seed": 6},
}
PROMPT = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))


def ranking_of(*rows: list[int]) -> Ranking:
    """Each row best first, each token half as likely as the one before."""
    tokens = np.array(rows)
    return Ranking(tokens, np.tile(-np.log(2.0) * np.arange(tokens.shape[1]), (len(rows), 1)))


def keep(memory: RankingMemory, contexts: list[tuple[int, ...]], ranking: Ranking) -> None:
    numbers = np.array([context_of(np.array(context)) for context in contexts])
    memory.keep(numbers, np.array([len(context) for context in contexts]), ranking, range(len(contexts)))


def best_behind(memory: RankingMemory, *context: int) -> int | None:
    found = memory.find(context)
    return None if found is None else int(memory.known.tokens[found[0], 0])


def test_the_longest_context_wins() -> None:
    memory = RankingMemory()
    keep(memory, [(1, 2, 3), (9, 2, 3), (9, 9, 3)], ranking_of([10, 0], [20, 0], [30, 0]))
    assert memory.find((1, 2, 3)) is not None
    assert best_behind(memory, 1, 2, 3) == 10
    assert best_behind(memory, 7, 2, 3) == 20
    assert best_behind(memory, 7, 7, 3) == 30
    assert best_behind(memory, 3) == 30
    assert best_behind(memory, 3, 1) is None


def test_the_newest_wins() -> None:
    memory = RankingMemory()
    keep(memory, [(1, 2, 3)], ranking_of([10, 0]))
    keep(memory, [(1, 2, 3)], ranking_of([11, 0]))
    assert best_behind(memory, 1, 2, 3) == 11


def test_the_oldest_is_forgotten_when_the_memory_is_full() -> None:
    memory = RankingMemory(rows=4)
    for token in range(50):
        keep(memory, [(100 + token, 200 + token, 300 + token)], ranking_of([token, 0]))
    assert len(memory) == 4 * LONGEST
    assert best_behind(memory, 345) is None
    assert [best_behind(memory, 300 + token) for token in range(46, 50)] == [46, 47, 48, 49]


def test_a_context_that_was_renewed_outlives_its_first_row() -> None:
    memory = RankingMemory(rows=2)
    keep(memory, [(1, 1, 7), (2, 2, 7)], ranking_of([10, 0], [20, 0]))
    keep(memory, [(3, 3, 8)], ranking_of([30, 0]))  # over the first row: its one-token context is another's now
    assert best_behind(memory, 1, 1, 7) == 20
    assert best_behind(memory, 7) == 20


contexts = st.tuples(*[st.integers(0, 2)] * 3)


@given(st.lists(st.tuples(contexts, st.integers(3, 99)), max_size=60), contexts)
def test_the_memory_is_a_search_through_what_was_kept(kept: list[tuple[Any, int]], wanted: Any) -> None:
    rows = 8
    memory = RankingMemory(rows)
    for context, token in kept:
        keep(memory, [context], ranking_of([token, 0]))
    expected = None
    for length in range(1, LONGEST + 1):
        for context, token in kept[-rows:]:
            if context[-length:] == wanted[-length:]:
                expected = token
    assert best_behind(memory, *wanted) == expected


def checked(proposer: RecycleProposer, text: list[int], tree: TokenTree, path: list[int], ranking: Ranking) -> None:
    proposer.begin(text)
    proposer.learn(text, len(text) - 1, tree, path, ranking)


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    count = len(tokens)
    sources: Any = ["root"] + ["draft"] * (count - 1)
    return TokenTree(np.array(tokens), np.array(parents), np.array(depths), np.arange(count), np.ones(count), sources)


def test_rejected_nodes_are_kept_and_accepted_ones_win() -> None:
    proposer = RecycleProposer(k=2)
    tree = tree_of([5, 6, 7, 6], [-1, ROOT, ROOT, 2])  # 5 -> 6 and 5 -> 7 -> 6
    checked(proposer, [1, 5], tree, [1], ranking_of([50, 0], [60, 0], [70, 0], [61, 0]))
    assert best_behind(proposer.memory, 5, 7) == 70
    assert best_behind(proposer.memory, 7, 6) == 61
    assert best_behind(proposer.memory, 8, 6) == 60  # behind 6 alone: on the accepted path, though it was checked first


def test_tokens_are_proposed_only_behind_the_right_context() -> None:
    proposer = RecycleProposer(k=3)
    checked(proposer, [1, 2, 3], tree_of([3], [-1]), [], ranking_of([10, 11, 12, 13]))
    proposer.begin([4, 2, 3])
    graph = TokenGraph(3, GraphConfig())
    graph.add(ROOT, 9, 0.5, "draft")
    tokens, chances = proposer.propose(graph, [ROOT, 1])
    assert tokens.tolist() == [[10, 11, 12], [NO_TOKEN] * 3]
    assert chances[0, 0] == pytest.approx(2 * chances[0, 1]) and chances[0].sum() < 1.0
    assert (chances[1] == 0.0).all()


def test_a_longer_match_is_trusted_more() -> None:
    chances = []
    for text in ([1, 2, 3], [7, 2, 3], [7, 7, 3]):
        proposer = RecycleProposer(k=1)
        checked(proposer, [1, 2, 3], tree_of([3], [-1]), [], ranking_of([10, 11]))
        proposer.begin(text)
        chances.append(float(proposer.propose(TokenGraph(3, GraphConfig()), [ROOT])[1][0, 0]))
    assert chances[0] > chances[1] > chances[2] > 0


def test_a_whole_path_grows_from_what_was_said_before() -> None:
    proposer = RecycleProposer(k=4)
    tree = tree_of([1, 2, 3, 4], [-1, 0, 1, 2])
    checked(proposer, [1], tree, [], ranking_of([2, 9], [3, 9], [4, 9], [1, 9]))
    proposer.begin([1])
    grown = grow(TokenGraph(1, GraphConfig(tau=8, max_depth=4)), [proposer])
    path = [ROOT]
    for token in (2, 3, 4, 1):
        child = grown.child(path[-1], token)
        assert child is not None
        path.append(child)
    assert {grown.sources[node] for node in path[1:]} == {"recycled"}


def test_sampled_text_is_ranked_with_the_noise_of_the_new_position() -> None:
    noise = KeyedNoise(seed=3)
    seen = set()
    for length in range(3, 40):
        text = [7] * (length - 1) + [5]
        proposer = RecycleProposer(k=4, perturb=DraftNoise(noise, 0.8, CHOICE))
        checked(proposer, text, tree_of([5], [-1]), [], ranking_of([10, 11, 12, 13, 14, 15]))
        proposer.begin(text)
        tokens, _ = proposer.propose(TokenGraph(5, GraphConfig()), [ROOT])
        row = noise.gumbel(length, 20, torch.device("cpu"), CHOICE).numpy()
        scores = {10 + rank: -np.log(2.0) * rank + 0.8 * row[10 + rank] for rank in range(6)}
        assert tokens[0].tolist() == sorted(scores, key=lambda token: -scores[token])[:4]
        seen.add(int(tokens[0, 0]))
    assert len(seen) > 2


def test_the_compiled_noise_of_a_token_is_that_of_its_row() -> None:
    noise = KeyedNoise(seed=8, sample=2)
    tokens = {6: [3, 999, 0], 70: [17, 4, 500]}
    for position, here in tokens.items():
        whole = noise.gumbel(position, 1000, torch.device("cpu"), CHOICE).numpy()
        compiled = [gumbel(np.uint64(noise.stream_key(CHOICE)), position, token) for token in here]
        assert compiled == pytest.approx(whole[here].tolist(), rel=1e-12)


def test_a_ranking_is_the_best_of_the_logits() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    ranking = Ranking.of(logits, kept=5)
    assert ranking.tokens.tolist() == logits.argsort(dim=1, descending=True)[:, :5].tolist()
    assert np.allclose(ranking.logits, np.take_along_axis(logits.numpy(), ranking.tokens, axis=1))
    assert Ranking.of(logits[:, :4], kept=5).tokens.shape == (3, 4)


def test_what_is_impossible_or_no_number_is_not_proposed() -> None:
    proposer = RecycleProposer(k=4)
    logits = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf], [torch.nan] * 4])
    checked(proposer, [1, 2], tree_of([2, 3], [-1, 0]), [], Ranking.of(logits))
    proposer.begin([1, 2])
    graph = TokenGraph(2, GraphConfig())
    graph.add(ROOT, 3, 0.5, "draft")
    tokens, chances = proposer.propose(graph, [ROOT, 1])
    assert sorted(tokens[0].tolist()) == [NO_TOKEN, NO_TOKEN, 0, 2]
    assert np.isfinite(chances).all() and (chances[0] > 0).sum() == 2


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_recycling_never_changes_the_text(style: str, with_draft: bool) -> None:
    recycled = 0
    for family in ("llama", "gpt2"):
        target = target_of(family, dtype=torch.float64)
        draft = perturbed(target, 0.4) if with_draft else None
        arguments = {"max_new_tokens": 60} | STYLES[style]
        plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(PROMPT, **arguments)
        for config in (FREE, replace(FREE, max_nodes=12, k=3), replace(FREE, k=1)):
            result = GraphDecoder(target, draft, config=config).generate(PROMPT, **arguments)
            assert result.sequences.tolist() == plain.sequences.tolist(), (family, config)
            recycled += result.stats.accepted_by_source["recycled"]
    assert with_draft or recycled > 10  # a draft of these few tokens names them all itself


def test_recycled_tokens_are_counted_and_seen() -> None:
    decoder = GraphDecoder(target_of("llama"), config=FREE)
    sources: list[str] = []
    decoder.observer = lambda step: sources.extend(step.tree.sources[node] for node in step.path)
    stats = decoder.generate(PROMPT, max_new_tokens=80, do_sample=False).stats
    assert stats.accepted_by_source["recycled"] == sources.count("recycled") > 0
    assert stats.accepted == len(sources)
    assert stats.merged_share == 1.0


@pytest.mark.parametrize("mode", ["graph", "tree", "chain"])
def test_only_auto_recycles(mode: Any) -> None:
    target = target_of("llama")
    for draft in (None, perturbed(target, 0.3)):
        decoder = GraphDecoder(target, draft, config=GraphConfig(mode=mode, cost=FlatCost()))
        sources: set[str] = set()
        decoder.observer = lambda step, seen=sources: seen.update(step.graph.sources)  # type: ignore[misc]
        decoder.generate(PROMPT, max_new_tokens=40, do_sample=False)
        assert len(sources) > 1 and "recycled" not in sources


def test_a_node_is_not_filled_with_alternatives() -> None:
    proposer = RecycleProposer(k=8)
    checked(proposer, [1, 2, 3], tree_of([3], [-1]), [], ranking_of(list(range(10, 26))))
    proposer.begin([1, 2, 3])
    tokens, _ = proposer.propose(TokenGraph(3, GraphConfig()), [ROOT])
    assert (tokens != NO_TOKEN).sum() == ALTERNATIVES
