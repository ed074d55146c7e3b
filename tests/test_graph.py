"""Properties of the token graph: acyclic, faithful, bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graph_tools import assert_acyclic, grow, successors
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph import GraphConfig, TokenGraph, TokenTree, UsageError
from draftgraph.graph import NO_TOKEN, ROOT, State

configs = st.builds(
    GraphConfig,
    mode=st.sampled_from(["graph", "tree", "auto"]),
    k=st.integers(1, 5),
    tau=st.integers(1, 4),
    theta_prob=st.sampled_from([0.0, 0.1, 0.3]),
    theta_sib=st.sampled_from([0.0, 0.3, 1.0]),
    growth=st.sampled_from(["level", "best-first"]),
    sibling_pruning=st.sampled_from(["drop", "leaf"]),
    max_nodes=st.integers(1, 40),
    max_depth=st.integers(0, 7),
)


class RandomProposer:
    """Proposes random children from a small vocabulary, so that n-grams repeat; as a draft does, but without passes."""

    source: Any = "draft"
    free = False

    def __init__(self, seed: int, k: int, vocabulary: int = 4) -> None:
        self.rng = np.random.default_rng(seed)
        self.k, self.vocabulary = k, vocabulary

    def begin(self, text: list[int]) -> None: ...

    def commit(self, tree: TokenTree, path: list[int], graph: TokenGraph) -> None: ...

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any:
        width = min(self.k, self.vocabulary)
        tokens = np.array([self.rng.permutation(self.vocabulary)[:width] for _ in frontier])
        probs = -np.sort(-self.rng.dirichlet(np.ones(width), len(frontier)), axis=1)
        return tokens, probs
        yield


def grown(config: GraphConfig, seed: int) -> tuple[TokenGraph, TokenTree]:
    graph = TokenGraph(0, config)
    tree = grow(graph, [RandomProposer(seed, config.k)])
    return graph, tree


def paths(graph: TokenGraph, depth: int) -> set[tuple[int, ...]]:
    """All token sequences of up to this length that the graph holds."""
    found: set[tuple[int, ...]] = set()

    def visit(node: int, tokens: tuple[int, ...]) -> None:
        found.add(tokens)
        if len(tokens) < depth:
            for child in successors(graph, node):
                visit(child, (*tokens, graph.tokens[child]))

    visit(ROOT, ())
    return found


@given(configs, st.integers(0, 10_000))
def test_growth_never_closes_a_cycle(config: GraphConfig, seed: int) -> None:
    assert_acyclic(grown(config, seed)[0])


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=60))
def test_no_sequence_of_additions_closes_a_cycle(tau: int, additions: list[tuple[int, int]]) -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph", tau=tau, k=3, max_nodes=999, max_depth=99))
    for parent, token in additions:
        graph.add(parent % len(graph), token, 0.5, "draft")
        assert_acyclic(graph)


@given(configs, st.integers(0, 10_000))
def test_every_unrolled_path_is_a_path_of_the_graph(config: GraphConfig, seed: int) -> None:
    graph, tree = grown(config, seed)
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        assert int(tree.nodes[node]) in successors(graph, int(tree.nodes[parent]))
        assert tree.tokens[node] == graph.tokens[tree.nodes[node]]
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.mask[node].sum() == tree.depths[node] + 1
        assert tree.scores[node] <= tree.scores[parent]


@given(configs, st.integers(0, 10_000))
def test_no_parent_has_two_children_with_one_token(config: GraphConfig, seed: int) -> None:
    _, tree = grown(config, seed)
    keys = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(keys) == len(set(keys))


@given(configs, st.integers(0, 10_000))
def test_bounds_hold(config: GraphConfig, seed: int) -> None:
    graph, tree = grown(config, seed)
    assert len(tree) <= config.max_nodes
    assert tree.depths.max() <= config.max_depth
    assert max(len(children) for children in graph.children) <= config.k
    if config.growth == "level":
        assert len(graph) <= max(config.max_nodes, 1)


@given(configs, st.integers(0, 10_000))
def test_the_bound_keeps_the_best_continuations(config: GraphConfig, seed: int) -> None:
    graph, tree = grown(config, seed)
    everything = graph.unroll(max_nodes=4000)
    assert np.allclose(tree.scores, everything.scores[: len(tree)])
    assert (np.diff(tree.scores) <= 1e-12).all()


@given(st.integers(1, 3), st.integers(0, 10_000))
@settings(max_examples=50)
def test_merging_only_adds_paths(tau: int, seed: int) -> None:
    shape: dict[str, Any] = {"k": 3, "max_nodes": 200, "max_depth": 9}
    merging = TokenGraph(0, GraphConfig(mode="graph", tau=tau, **shape))
    plain = TokenGraph(0, GraphConfig(mode="tree", **shape))
    rng = np.random.default_rng(seed)
    for _ in range(25):
        parent, token = int(rng.integers(0, len(plain))), int(rng.integers(0, 3))
        if not merging.is_alias(parent) and plain.add(parent, token, 0.5, "draft"):
            assert merging.add(parent, token, 0.5, "draft")
    assert paths(plain, 6) <= paths(merging, 6)


def test_a_merged_node_shares_children_also_those_drafted_later() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph", tau=2, k=4))
    for parent, token in [(0, 1), (0, 2), (1, 7), (2, 1), (3, 8)]:  # 0-1-7-8 and 0-2-1
        graph.add(parent, token, 0.5, "draft")
    graph.add(4, 7, 0.5, "draft")  # 0-2-1-7 completes the bigram 1-7
    assert graph.canonical[6] == 3
    graph.add(5, 9, 0.5, "draft")
    graph.add(3, 6, 0.4, "draft")
    tree = graph.unroll()
    written = {tuple(tree.tokens[row].tolist()) for row in tree.mask}
    assert {(0, 2, 1, 7, 8, 9), (0, 2, 1, 7, 6), (0, 1, 7, 8, 9)} <= written
    borrowed = [tuple(tree.tokens[tree.mask[node]].tolist()) for node, s in enumerate(tree.sources) if s == "merged"]
    assert set(borrowed) == {(0, 2, 1, 7, 8), (0, 2, 1, 7, 8, 9), (0, 2, 1, 7, 6)}


def test_one_node_may_have_several_aliases() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph", tau=1, k=4))
    for token in (1, 2, 3):
        graph.add(0, token, 0.3, "draft")
    for parent in (1, 2, 3):
        graph.add(parent, 9, 0.5, "draft")
    assert graph.aliases == {4: [5, 6]}


def test_a_merge_that_would_close_a_cycle_through_an_alias_is_not_made() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph", tau=1, k=4))
    graph.add(0, 1, 0.5, "draft")  # node 1: a
    graph.add(0, 2, 0.5, "draft")  # node 2: b
    graph.add(1, 2, 0.5, "draft")  # a-b becomes an alias of b
    graph.add(2, 1, 0.5, "draft")  # b-a: a is no tree ancestor, yet a leads to b
    assert graph.canonical[3] == 2
    assert graph.canonical[4] == 4


def test_probability_pruning_keeps_leaves_and_sibling_pruning_drops() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph"))
    tokens, probs = np.array([[5, 6, 7, NO_TOKEN]]), np.array([[0.5, 0.18, 0.1, 0.0]])
    graph.extend([ROOT], np.ones(1), tokens, probs, "draft")
    assert graph.children[ROOT].keys() == {5, 6}
    assert [graph.states[node] for node in graph.children[ROOT].values()] == [State.OPEN, State.LEAF]
    assert graph.dropped == {(ROOT, 7)}


def test_siblings_may_be_kept_as_leaves_instead() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph", sibling_pruning="leaf"))
    graph.extend([ROOT], np.ones(1), np.array([[5, 6, 7]]), np.array([[0.9, 0.22, 0.1]]), "draft")
    assert [graph.states[node] for node in graph.children[ROOT].values()] == [State.OPEN, State.LEAF, State.LEAF]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("k", 0, "k must be a whole number of at least 1"),
        ("tau", 0, "tau must be a whole number of at least 1"),
        ("k", 2.5, "k must be a whole number"),
        ("theta_prob", 1.5, "theta_prob must be between 0 and 1"),
        ("theta_sib", -0.1, "theta_sib must be between 0 and 1"),
        ("theta_prob", float("nan"), "theta_prob must be between 0 and 1"),
        ("max_nodes", 0, "max_nodes must be"),
        ("mode", "fast", "mode must be one of"),
        ("growth", "wild", "growth must be one of level, best-first"),
        ("cost", "cheap", "cost must be"),
    ],
)
def test_hyperparameters_out_of_range_are_named_with_the_range(field: str, value: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        GraphConfig(**{field: value})


def test_paper_defaults() -> None:
    paper = GraphConfig(mode="graph")
    assert (paper.k, paper.tau, paper.theta_prob, paper.theta_sib, paper.growth) == (4, 2, 0.2, 0.3, "level")
    assert (GraphConfig().mode, GraphConfig().max_nodes, GraphConfig().max_depth) == ("auto", 64, 16)
    assert GraphConfig(mode="graph").max_depth == 8


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    graph = TokenGraph(0, GraphConfig(mode="graph"), ends=frozenset([7]))
    graph.extend([ROOT], np.ones(1), np.array([[7, 5]]), np.array([[0.6, 0.3]]), "draft")
    frontier, _ = graph.frontier(graph.unroll())
    assert [graph.tokens[node] for node in [*frontier, ROOT] if node != ROOT] == [5]
