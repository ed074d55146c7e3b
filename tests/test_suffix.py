"""Copying from the text: the longest suffix that stood there before, found without a rescan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import target_of
from graph_tools import grow
from hypothesis import given
from hypothesis import strategies as st

from draftgraph import GraphConfig, GraphDecoder, TokenGraph
from draftgraph.cost import FlatCost
from draftgraph.graph import NO_TOKEN, ROOT
from draftgraph.proposers.copying import EMPTY, SuffixAutomaton, SuffixProposer, continuations

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend([token])
    return automaton


def longest_earlier_suffix(text: list[int]) -> int:
    """By rescanning: the length of the longest suffix that also ends before the end."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


@given(texts)
def test_the_longest_earlier_suffix_is_found(text: list[int]) -> None:
    automaton = automaton_of(text)
    assert automaton.earlier[1] == longest_earlier_suffix(text)


@given(texts, texts)
def test_a_path_is_followed_by_its_longest_suffix_in_the_text(text: list[int], path: list[int]) -> None:
    automaton = automaton_of(text)
    match = EMPTY, 0
    for end, token in enumerate(path, start=1):
        match = automaton.follow(match, token)
        suffixes = (path[end - length : end] for length in range(end, 0, -1))
        known = (len(s) for s in suffixes if any(text[i : i + len(s)] == s for i in range(len(text) - len(s) + 1)))
        assert match[1] == next(known, 0)


@given(texts)
def test_continuations_are_what_followed_in_the_text(text: list[int]) -> None:
    automaton = automaton_of(text)
    tokens, lengths = np.empty((2, 4), dtype=np.int64)
    count = continuations(automaton.known, *automaton.earlier, tokens, lengths)
    assert len(set(tokens[:count].tolist())) == count and (np.diff(lengths[:count]) <= 0).all()
    for token, matched in zip(tokens[:count].tolist(), lengths[:count].tolist(), strict=True):
        suffix = [*text[len(text) - matched :], token]
        assert any(text[i : i + len(suffix)] == suffix for i in range(len(text)))


@pytest.mark.parametrize("tokens", [3, 50_000])
def test_the_index_grows_by_a_constant_number_of_states_per_token(tokens: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, tokens, 20_000).tolist()
    automaton = automaton_of(text)
    counts = automaton.known.counts[0]
    assert counts["states"] <= 2 * len(text) and counts["edges"] <= 3 * len(text)
    whole = SuffixAutomaton()
    whole.extend(text)
    for known, same in zip(automaton.known[:2], whole.known[:2], strict=True):
        assert known[: counts["states"]].tolist() == same[: counts["states"]].tolist()


def test_the_index_reads_only_what_is_new() -> None:
    proposer = SuffixProposer(k=2)
    proposer.begin([1, 2, 3])
    proposer.begin([9, 9, 9, 4, 5])  # what is known is not looked at again
    assert proposer.automaton.tokens == 5
    assert proposer.automaton.follow(proposer.automaton.follow((EMPTY, 0), 3), 4)[1] == 2


def test_the_newest_continuation_comes_first() -> None:
    proposer = SuffixProposer(k=3)
    proposer.begin([7, 8, 1, 7, 8, 2, 7, 8])
    tokens, probs = proposer.propose(TokenGraph(8, GraphConfig()), [ROOT])
    assert tokens[0].tolist() == [2, 1, NO_TOKEN]
    assert probs[0, 0] > probs[0, 1] > probs[0, 2] == 0


def test_a_copy_that_reaches_the_end_of_the_text_goes_on_into_its_own_path() -> None:
    graph = TokenGraph(3, GraphConfig(mode="auto", k=1, max_depth=8))
    proposer = SuffixProposer(k=1)
    proposer.begin([1, 2, 3, 1, 2, 3])
    tree = grow(graph, [proposer])
    assert tree.tokens.tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2]
    assert tree.sources == ["root"] + ["copied"] * 8


def test_copied_nodes_alone_make_a_valid_graph() -> None:
    from families import target_of

    target = target_of("llama")
    ids = [[1, 2, 3, 4, 5, 6] * 4]
    for mode in ("graph", "tree", "chain", "auto"):
        plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(ids, max_new_tokens=40)
        config = GraphConfig(mode=mode, cost=FlatCost(0.0))
        copied = GraphDecoder(target, config=config).generate(ids, max_new_tokens=40)
        assert copied.sequences.tolist() == plain.sequences.tolist()
        assert copied.stats.accepted_by_source["copied"] > 0
        assert copied.stats.draft_tokens == 0


def test_without_a_draft_a_token_that_stood_nowhere_was_proposed_by_nobody() -> None:
    decoder = GraphDecoder(target_of("llama"), config=GraphConfig(cost=FlatCost(0.0)))
    stats = decoder.generate(torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]]), max_new_tokens=20, do_sample=False).stats
    assert stats.rejected_by.get("not drafted", 0) > 0
