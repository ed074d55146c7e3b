"""A graph that is chosen at once: from what a draft has grown, what the text says and what the target said before."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from graph_tools import assert_acyclic
from hypothesis import given
from hypothesis import strategies as st

from draftgraph import GraphConfig, TokenGraph, TokenTree
from draftgraph.engine.protocol import Ranking
from draftgraph.graph import Floats, Ints
from draftgraph.graph.merge import merge_leaves
from draftgraph.graph.nodes import DRAFT, NONE, OPEN, ROOT, append, nodes_for
from draftgraph.proposers.candidates import NO_ROW, Candidates
from draftgraph.proposers.copying import Past, SuffixProposer
from draftgraph.proposers.pooling import Calibration
from draftgraph.proposers.recycling import RecycleProposer


class DraftedNodes(NamedTuple):
    """What a draft has grown."""

    tokens: Ints  # [expansions, k], the root's children first
    probs: Floats
    nodes: list[int]  # that were expanded: k times the expansion that named it, plus its rank there; -1 for the root


def candidates_for(
    text: list[int], config: GraphConfig | None = None, by_depth: bool = False, **limits: Any
) -> Candidates:
    config = config or GraphConfig(k=4)
    copied, recycled = SuffixProposer(config.k), RecycleProposer(config.k)
    candidates = Candidates(copied, recycled, Calibration(), config, expansions=64, by_depth=by_depth)
    begin(candidates, text, **limits)
    return candidates


def tree_of(candidates: Candidates, floor: float = 0.0) -> TokenTree:
    return candidates.graph(floor).graph.unroll()


def begin(candidates: Candidates, text: list[int], max_depth: int = 8, ends: frozenset[int] = frozenset()) -> None:
    candidates.copied.begin(text)
    candidates.recycled.begin(text)
    candidates.begin(text, max_depth, ends)


def add(candidates: Candidates, drafted: DraftedNodes) -> None:
    """As a draft reports it, a row at a time."""
    with np.errstate(divide="ignore"):
        report = np.concatenate([drafted.tokens, np.log(drafted.probs), np.array(drafted.nodes)[:, None]], axis=1)
    for row in range(len(report)):
        candidates.add(report[row : row + 1])


def grown(levels: int, width: int, k: int, seed: int = 0, tokens: int = 1000) -> DraftedNodes:
    """What a draft might hand over: best first under a width, with random chances."""
    rng = np.random.default_rng(seed)
    names: list[list[int]] = []
    probs: list[list[float]] = []
    nodes, waiting = [-1], {}

    def expand(score: float) -> None:
        chances = np.sort(rng.dirichlet(np.full(k + 1, 0.4))[:k])[::-1]
        names.append(rng.choice(tokens, k, replace=False).tolist())
        probs.append(chances.tolist())
        waiting.update({(len(names) - 1) * k + rank: score * chance for rank, chance in enumerate(chances)})

    expand(1.0)
    for _ in range(levels - 1):
        best = sorted(waiting, key=lambda node: -waiting[node])[:width]
        for node in best:
            nodes.append(node)
        for score in [waiting.pop(node) for node in best]:
            expand(score)
    return DraftedNodes(np.array(names), np.array(probs), nodes)


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return dict(zip(paths, tree.scores.tolist(), strict=True))


def all_paths(drafted: DraftedNodes) -> dict[tuple[int, ...], float]:
    """Every path that the draft named, with the product of its chances."""
    k = drafted.tokens.shape[1]
    paths: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 1.0)}
    found: dict[tuple[int, ...], float] = {}
    for row, node in enumerate(drafted.nodes):
        path, score = paths[node]
        for rank in range(k):
            child = (*path, int(drafted.tokens[row, rank]))
            paths[row * k + rank] = child, score * float(drafted.probs[row, rank])
            found[child] = paths[row * k + rank][1]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_best_paths_of_a_draft_are_chosen(seed: int) -> None:
    candidates, drafted = candidates_for([7, 8, 9], GraphConfig(k=4, max_nodes=32)), grown(5, 4, 4, seed)
    add(candidates, drafted)
    tree = tree_of(candidates)
    possible = all_paths(drafted)
    found = paths_of(tree)
    assert len(tree) == len(found) == 32 and tree.sources[0] == "root" and set(tree.sources[1:]) == {"draft"}
    assert (tree.parents[1:] < np.arange(1, 32)).all() and (np.diff(tree.scores) <= 1e-12).all()
    # pooled with silent memories, a draft's opinion is the same but for the share that nobody names
    expected = sorted(possible, key=lambda path: -possible[path])[:31]
    assert len(set(expected) & set(found)) >= 29
    assert tree.depths.tolist() == [len(path) for path in found]
    assert tree.nodes.tolist() == list(range(32))  # nothing is merged: each is its own


def test_limits_hold() -> None:
    drafted = grown(6, 4, 4)
    candidates = candidates_for([7, 8, 9], GraphConfig(k=2, max_nodes=64), max_depth=3)
    add(candidates, DraftedNodes(drafted.tokens[:1, :2], drafted.probs[:1, :2], [-1]))
    tree = tree_of(candidates)
    assert np.bincount(tree.parents[1:]).max() <= 2
    candidates = candidates_for([7, 8, 9], max_depth=3)
    add(candidates, drafted)
    assert tree_of(candidates).depths.max() == 3
    floor = 0.05
    assert tree_of(candidates, floor).scores.min() > floor and len(tree_of(candidates, floor)) < len(
        tree_of(candidates)
    )


def test_a_node_that_became_impossible_lends_its_children_to_no_other() -> None:
    candidates = candidates_for([7, 8, 9])
    tokens, probs = np.array([[4, 5], [20, 21], [30, 31]]), np.array([[0.6, 0.0], [0.5, 0.3], [0.9, 0.1]])
    add(candidates, DraftedNodes(tokens, probs, [-1, 0, 1]))  # the node with token 5 was expanded, and has no chance
    assert set(paths_of(tree_of(candidates))) == {(), (4,), (4, 20), (4, 21)}


def test_the_text_is_copied_past_what_was_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    candidates = candidates_for(text)
    tree = tree_of(candidates)
    assert (4, 5, 6, 7, 8, 9) in paths_of(tree) and set(tree.sources[1:]) == {"copied"}
    begin(candidates, text, ends=frozenset({6}))
    assert (4, 5, 6) in paths_of(tree_of(candidates)) and (4, 5, 6, 7) not in paths_of(tree_of(candidates))


def test_answers_of_the_past_are_copied_where_they_match_longer() -> None:
    """As far as they go, also below what the draft names; the newer half is preferred to the older."""
    past = Past(20)
    past.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    past.add([1, 2, 30, 31])  # begins another half
    assert len(past.halves) == 2
    candidates = candidates_for([3, 40, 90, 1, 2, 3])
    assert set(paths_of(tree_of(candidates))) >= {(40,), (40, 90)}
    candidates.copied.past = past
    begin(candidates, [3, 40, 90, 1, 2, 3])
    tree = tree_of(candidates)
    assert (4, 5, 6, 7, 8) in paths_of(tree) and set(tree.sources[1:]) == {"copied"}
    begin(candidates, [77, 1, 2])
    assert max(paths_of(tree_of(candidates)).items(), key=lambda one: one[1] * (len(one[0]) == 1))[0] == (30,)
    add(candidates, DraftedNodes(np.array([[3, 70], [80, 81]]), np.array([[0.6, 0.2], [0.2, 0.1]]), [-1, 0]))
    assert (3, 4) in paths_of(tree_of(candidates))


@given(st.data())
def test_the_past_says_the_same_at_once_and_level_by_level(data: Any) -> None:
    answers = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=4))
    text = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    past = Past(16)
    for answer in answers:
        past.add(answer)
    candidates = candidates_for(text, GraphConfig(k=4), max_depth=1)
    candidates.copied.past = past
    begin(candidates, text, max_depth=1)
    found = {path: score for path, score in paths_of(tree_of(candidates)).items() if path}
    tokens, probs = candidates.copied.propose(TokenGraph(text[-1], GraphConfig(k=4)), [0])
    assert {path[0] for path in found} == {token for token, chance in zip(tokens[0], probs[0], strict=True) if chance}


@pytest.mark.parametrize("by_depth", [False, True])
def test_a_draft_that_speaks_of_depths_speaks_of_copied_nodes_too(by_depth: bool) -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    candidates = candidates_for(text, by_depth=by_depth)
    chances = np.array([[0.6, 0.2], [0.5, 0.4], [0.5, 0.4]])
    add(candidates, DraftedNodes(np.array([[80, 70], [5, 60], [90, 91]]), chances, [-1, 0, 2]))
    graph = candidates.graph(0.0).graph
    tree = graph.unroll()
    paths = paths_of(tree)
    assert (4, 5) in paths and ((4, 60) in paths) == ((4, 5, 90) in paths) == by_depth
    sources = dict(zip(paths, tree.sources, strict=True))
    assert sources[4,] == "copied" and sources[4, 5] == ("draft" if by_depth else "copied")
    assert graph.is_drafted(int(tree.nodes[list(paths).index((4,))])) == by_depth


def test_what_the_target_said_before_is_proposed_under_drafted_nodes() -> None:
    candidates = candidates_for([1, 2, 3])
    tree = TokenTree(
        np.array([3, 50]), np.array([-1, 0]), np.array([0, 1]), np.arange(2), np.ones(2), ["root", "draft"]
    )
    ranking = Ranking(np.array([[50, 51], [60, 61]]), np.array([[3.0, 1.0], [5.0, 0.0]]))
    candidates.recycled.learn([1, 2, 3], 2, tree, [], ranking)
    begin(candidates, [1, 2, 3])
    add(candidates, DraftedNodes(np.array([[50, 70], [80, 81]]), np.array([[0.6, 0.2], [0.2, 0.1]]), [-1, 0]))
    found = tree_of(candidates)
    paths = paths_of(found)
    assert (50, 60) in paths and paths[50,] > paths[70,]
    assert found.sources[list(paths).index((50, 60))] == "recycled"


def test_opinions_that_agree_are_one_node_and_likelier() -> None:
    candidates = candidates_for([1, 2, 3, 4, 9, 1, 2, 3], max_depth=2)
    add(candidates, DraftedNodes(np.array([[4, 70]]), np.array([[0.4, 0.4]]), [-1]))
    tree = tree_of(candidates)
    paths = paths_of(tree)
    assert tree.tokens.tolist().count(4) == 1 and paths[4,] > 0.4 > paths[70,]
    assert dict(zip(tree.tokens.tolist(), tree.sources, strict=True)) == {
        3: "root",
        4: "draft",
        70: "draft",
        9: "copied",
    }


def test_outcomes_are_learnt_from() -> None:
    candidates, drafted = candidates_for([7, 8, 9]), grown(3, 4, 4)
    add(candidates, drafted)
    selection = candidates.graph(0.0)
    tree = selection.graph.unroll()
    best = int(tree.tokens[1])
    before = candidates.calibration.corrected("draft", np.array([0.5]))
    for _ in range(60):  # never what was said
        selection.settle(candidates.calibration, selection.graph, tree, [0], [best + 1])
    assert candidates.calibration.corrected("draft", np.array([0.5]))[0] == 0.5
    candidates.calibration.learn()
    assert before[0] == 0.5 and candidates.calibration.corrected("draft", np.array([0.5]))[0] < 0.4


def test_nodes_of_the_graph_are_what_was_said_in_their_parents_rows() -> None:
    candidates, drafted = candidates_for([7, 8, 9]), grown(5, 4, 4)
    add(candidates, drafted)
    graph, rows, table = candidates.graph(0.0)
    assert len(rows) == len(graph) and rows[ROOT] == 0 and ROOT in graph.drafted
    for node in range(1, len(graph)):
        above = rows[graph.parents[node]]
        column = table.named[above].tolist().index(graph.tokens[node])
        assert table.chances[above, column] == graph.probs[node] > 0
        assert rows[node] == NO_ROW or table.rows["token"][rows[node]] == graph.tokens[node]
        assert graph.is_drafted(node) == (rows[node] != NO_ROW and table.rows["drafted"][rows[node]] == 1)


def graph_of(tokens: list[int], parents: list[int], probs: list[float], tau: int = 2, **limits: Any) -> TokenGraph:
    """A tree with its leaves merged, as candidates are."""
    nodes = nodes_for(len(tokens))
    append(nodes, NONE, tokens[0], 1.0, 0, OPEN)
    for node in range(1, len(tokens)):
        append(nodes, parents[node], tokens[node], probs[node], DRAFT, OPEN)
    merge_leaves(nodes, tau)
    config = GraphConfig(mode="graph", k=16, tau=tau, max_nodes=limits.get("max_nodes", 64), max_depth=16)
    return TokenGraph.of_nodes(nodes, config, limits.get("max_depth", 8), frozenset())


def test_a_leaf_borrows_what_follows_the_same_tokens() -> None:
    #   1 - 2 - 3 - 4    and    1 - 5 - 2 - 3: behind the second "2 3" stands "4" too
    told = [1, 2, 3, 5, 2, 3, 4], [-1, 0, 1, 0, 3, 4, 2], [1.0, 0.5, 0.8, 0.4, 0.875, 0.9, 0.75]
    graph = graph_of(*told)
    assert graph.canonical.tolist() == [0, 1, 2, 3, 4, 2, 6]
    tree = graph.unroll()
    assert paths_of(tree)[5, 2, 3, 4] == pytest.approx(0.4 * 0.875 * 0.9 * 0.75)
    assert tree.sources[-1] == "merged" and tree.nodes[-1] == 6
    unmerged = graph_of(*told, tau=8).unroll()
    assert list(paths_of(tree))[:7] == list(paths_of(unmerged))
    for limits in ({"max_depth": 3}, {"max_nodes": 7}):  # too deep, no room
        assert paths_of(graph_of(*told, **limits).unroll()) == paths_of(unmerged)


def test_nothing_is_merged_that_would_close_a_cycle() -> None:
    assert graph_of([1, 2, 1, 2], [-1, 0, 1, 2], [1.0] * 4).canonical.tolist() == [0, 1, 2, 3]


def test_branches_that_lead_into_each_other_make_no_cycle() -> None:
    """`a b c d` and `c d a b`: each ends where the other begins, so only one of them may go on as the other."""
    a, b, c, d, unlikely = 11, 12, 13, 14, 15
    candidates = candidates_for([7, 8, 9], GraphConfig(k=2, tau=2))
    tokens = np.array([[a, c], *([follower, unlikely] for follower in (b, d, c, a, d, b))])
    probs = np.array([[0.5, 0.45], *[[0.95, 0.0]] * 6])
    add(candidates, DraftedNodes(tokens, probs, [-1, 0, 1, 2, 4, 6, 8]))
    graph = candidates.graph(0.0).graph
    assert {(a, b, c, d), (c, d, a, b)} <= set(paths_of(graph.unroll()))
    assert_acyclic(graph)
    assert len(graph.aliases) == 1, "one of them is merged"


@given(st.data())
def test_graphs_are_acyclic_and_unroll_into_trees_of_their_paths(data: Any) -> None:
    """Whatever a draft reports, and whatever the text, the past and the target's last choices say."""
    token = st.integers(0, 3)
    text = data.draw(st.lists(token, min_size=1, max_size=12))
    config = GraphConfig(k=data.draw(st.integers(1, 3)), tau=data.draw(st.integers(1, 3)), max_nodes=24)
    candidates = candidates_for(text, config)
    candidates.copied.past = Past(16)
    for answer in data.draw(st.lists(st.lists(token, min_size=1, max_size=8), max_size=3)):
        candidates.copied.past.add(answer)
    for known in data.draw(st.lists(st.lists(token, min_size=1, max_size=6), max_size=4)):
        root = TokenTree(np.array(known[-1:]), np.array([-1]), np.zeros(1, int), np.zeros(1, int), np.ones(1), ["root"])
        best = np.array([data.draw(st.permutations(range(4)))])
        candidates.recycled.learn(
            [*known, 0], len(known) - 1, root, [], Ranking(best, np.array([[4.0, 3.0, 2.0, 0.0]]))
        )
    limits = {"max_depth": data.draw(st.integers(0, 8)), "ends": frozenset(data.draw(st.lists(token, max_size=1)))}
    begin(candidates, text, **limits)
    add(candidates, data.draw(reports(config.k)))
    graph = candidates.graph(data.draw(st.sampled_from([0.0, 0.05]))).graph
    assert_acyclic(graph)
    for node in range(len(graph)):
        assert len(set(graph.children_of(node))) == len(graph.children_of(node)) <= config.k
    tree = graph.unroll()
    assert len(paths_of(tree)) == len(tree) <= config.nodes, "every path stands there once"
    assert tree.depths.max() <= limits["max_depth"] and tree.parents[0] == -1
    for place in range(1, len(tree)):
        parent, node = int(tree.parents[place]), int(tree.nodes[place])
        assert parent < place and tree.depths[place] == tree.depths[parent] + 1
        assert graph.children_of(int(tree.nodes[parent]))[int(tree.tokens[place])] == node
        assert tree.scores[place] == pytest.approx(tree.scores[parent] * graph.probs[node])


@st.composite
def reports(draw: Any, k: int) -> DraftedNodes:
    """Of a draft that expands any of the nodes that it has named, each once; some of them are impossible."""
    nodes = [-1]
    for expansion in range(1, draw(st.integers(1, 14))):
        nodes.append(draw(st.sampled_from([node for node in range(expansion * k) if node not in nodes])))
    tokens = [draw(st.permutations(range(4)))[:k] for _ in nodes]
    chances = [sorted(draw(st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.33]), min_size=k, max_size=k))) for _ in nodes]
    return DraftedNodes(np.array(tokens), np.array(chances)[:, ::-1], nodes)


@given(st.data())
def test_borrowed_nodes_are_the_best_of_all_that_could_be_borrowed(data: Any) -> None:
    """Against a search that unrolls everything first."""
    count = data.draw(st.integers(2, 14))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    tokens, taken = [data.draw(st.integers(0, 3))], set()
    for parent in parents[1:]:
        tokens.append(data.draw(st.integers(0, 15).filter(lambda token, parent=parent: (parent, token) not in taken)))
        taken.add((parent, tokens[-1]))
    probs = [1.0, *(data.draw(st.floats(0.1, 0.95)) for _ in parents[1:])]
    limits = {"max_depth": data.draw(st.integers(1, 12)), "max_nodes": data.draw(st.integers(1, 30))}
    graph = graph_of(tokens, parents, probs, **limits)
    assert_acyclic(graph)
    unrolled: list[tuple[float, bool]] = []

    def walk(node: int, depth: int, score: float, borrowed: bool) -> None:
        unrolled.append((score, borrowed))
        if depth < limits["max_depth"]:
            for child in graph.children_of(node).values():
                walk(child, depth + 1, score * float(graph.probs[child]), borrowed or graph.is_alias(node))

    walk(ROOT, 0, 1.0, False)
    best = sorted((score for score, _ in unrolled), reverse=True)[: limits["max_nodes"]]
    tree = graph.unroll()
    assert tree.scores.tolist() == pytest.approx(best)
    assert (tree.parents[1:] < np.arange(1, len(tree))).all() and tree.depths.max() <= limits["max_depth"]
    if len(tree) == len(unrolled):
        assert tree.sources.count("merged") == sum(borrowed for _, borrowed in unrolled)
