"""A tree that is chosen at once: from what a draft has grown, what the text says and what the target said before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgraph import GraphConfig, TokenGraph, TokenTree
from draftgraph.compiled.selecting import MERGED, aliases_in, merge
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import DraftedNodes
from draftgraph.drafting.past import Past
from draftgraph.drafting.recycle import RecycleProposer
from draftgraph.drafting.sheet import Sheet, tree_of
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.ranking import Ranking


def sheet_for(text: list[int], config: GraphConfig | None = None, **limits: Any) -> Sheet:
    config = config or GraphConfig(k=4)
    copied, recycled = SuffixProposer(config.k), RecycleProposer(config.k)
    sheet = Sheet(copied, recycled, Calibration(), config)
    begin(sheet, text, **limits)
    return sheet


def begin(sheet: Sheet, text: list[int], max_depth: int = 8, ends: frozenset[int] = frozenset()) -> None:
    sheet.copied.begin(text)
    sheet.recycled.begin(text)
    sheet.begin(text, max_depth, ends)


def add(sheet: Sheet, drafted: DraftedNodes) -> None:
    """As a draft reports it, a row at a time."""
    with np.errstate(divide="ignore"):
        report = np.concatenate([drafted.tokens, np.log(drafted.probs), np.array(drafted.nodes)[:, None]], axis=1)
    for row in range(len(report)):
        sheet.add(report[row : row + 1])


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
    sheet, drafted = sheet_for([7, 8, 9], GraphConfig(k=4, max_nodes=32)), grown(5, 4, 4, seed)
    add(sheet, drafted)
    tree = sheet.select(0.0).tree
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
    sheet = sheet_for([7, 8, 9], GraphConfig(k=2, max_nodes=64), max_depth=3)
    add(sheet, DraftedNodes(drafted.tokens[:1, :2], drafted.probs[:1, :2], [-1]))
    tree = sheet.select(0.0).tree
    assert np.bincount(tree.parents[1:]).max() <= 2
    sheet = sheet_for([7, 8, 9], max_depth=3)
    add(sheet, drafted)
    assert sheet.select(0.0).tree.depths.max() == 3
    floor = 0.05
    assert sheet.select(floor).tree.scores.min() > floor and len(sheet.select(floor).tree) < len(sheet.select(0.0).tree)


def test_a_node_that_became_impossible_lends_its_children_to_no_other() -> None:
    sheet = sheet_for([7, 8, 9])
    tokens, probs = np.array([[4, 5], [20, 21], [30, 31]]), np.array([[0.6, 0.0], [0.5, 0.3], [0.9, 0.1]])
    add(sheet, DraftedNodes(tokens, probs, [-1, 0, 1]))  # the node with token 5 was expanded, and has no chance
    assert set(paths_of(sheet.select(0.0).tree)) == {(), (4,), (4, 20), (4, 21)}


def test_the_text_is_copied_past_what_was_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    sheet = sheet_for(text)
    tree = sheet.select(0.0).tree
    assert (4, 5, 6, 7, 8, 9) in paths_of(tree) and set(tree.sources[1:]) == {"copied"}
    begin(sheet, text, ends=frozenset({6}))
    assert (4, 5, 6) in paths_of(sheet.select(0.0).tree) and (4, 5, 6, 7) not in paths_of(sheet.select(0.0).tree)


def test_answers_of_the_past_are_copied_where_they_match_longer() -> None:
    """As far as they go, also below what the draft names; the newer half is preferred to the older."""
    past = Past(20)
    past.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    past.add([1, 2, 30, 31])  # begins another half
    assert len(past.halves) == 2
    sheet = sheet_for([3, 40, 90, 1, 2, 3])
    assert set(paths_of(sheet.select(0.0).tree)) >= {(40,), (40, 90)}
    sheet.copied.past = past
    begin(sheet, [3, 40, 90, 1, 2, 3])
    tree = sheet.select(0.0).tree
    assert (4, 5, 6, 7, 8) in paths_of(tree) and set(tree.sources[1:]) == {"copied"}
    begin(sheet, [77, 1, 2])
    assert max(paths_of(sheet.select(0.0).tree).items(), key=lambda one: one[1] * (len(one[0]) == 1))[0] == (30,)
    add(sheet, DraftedNodes(np.array([[3, 70], [80, 81]]), np.array([[0.6, 0.2], [0.2, 0.1]]), [-1, 0]))
    assert (3, 4) in paths_of(sheet.select(0.0).tree)


@given(st.data())
def test_the_past_says_the_same_on_a_sheet_and_level_by_level(data: Any) -> None:
    answers = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=4))
    text = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    past = Past(16)
    for answer in answers:
        past.add(answer)
    sheet = sheet_for(text, GraphConfig(k=4), max_depth=1)
    sheet.copied.past = past
    begin(sheet, text, max_depth=1)
    found = {path: score for path, score in paths_of(sheet.select(0.0).tree).items() if path}
    tokens, probs = sheet.copied.propose(TokenGraph(text[-1], GraphConfig(k=4)), [0])
    assert {path[0] for path in found} == {token for token, chance in zip(tokens[0], probs[0], strict=True) if chance}


def test_what_the_target_said_before_is_proposed_under_drafted_nodes() -> None:
    sheet = sheet_for([1, 2, 3])
    tree = TokenTree(
        np.array([3, 50]), np.array([-1, 0]), np.array([0, 1]), np.arange(2), np.ones(2), ["root", "draft"]
    )
    ranking = Ranking(np.array([[50, 51], [60, 61]]), np.array([[3.0, 1.0], [5.0, 0.0]]))
    sheet.recycled.learn([1, 2, 3], 2, tree, [], ranking)
    begin(sheet, [1, 2, 3])
    add(sheet, DraftedNodes(np.array([[50, 70], [80, 81]]), np.array([[0.6, 0.2], [0.2, 0.1]]), [-1, 0]))
    found = sheet.select(0.0).tree
    paths = paths_of(found)
    assert (50, 60) in paths and paths[50,] > paths[70,]
    assert found.sources[list(paths).index((50, 60))] == "recycled"


def test_opinions_that_agree_are_one_node_and_likelier() -> None:
    sheet = sheet_for([1, 2, 3, 4, 9, 1, 2, 3], max_depth=2)
    add(sheet, DraftedNodes(np.array([[4, 70]]), np.array([[0.4, 0.4]]), [-1]))
    tree = sheet.select(0.0).tree
    paths = paths_of(tree)
    assert tree.tokens.tolist().count(4) == 1 and paths[4,] > 0.4 > paths[70,]
    assert dict(zip(tree.tokens.tolist(), tree.sources, strict=True)) == {
        3: "root",
        4: "draft",
        70: "draft",
        9: "copied",
    }


def test_outcomes_are_learnt_from() -> None:
    sheet, drafted = sheet_for([7, 8, 9]), grown(3, 4, 4)
    add(sheet, drafted)
    selection = sheet.select(0.0)
    best = int(selection.tree.tokens[1])
    before = sheet.calibration.corrected("draft", np.array([0.5]))
    for _ in range(60):
        selection.settle([0], [best + 1])  # never what was said
    assert sheet.calibration.corrected("draft", np.array([0.5]))[0] == 0.5
    sheet.calibration.learn()
    assert before[0] == 0.5 and sheet.calibration.corrected("draft", np.array([0.5]))[0] < 0.4


def test_the_graph_says_what_the_tree_says() -> None:
    sheet, drafted = sheet_for([7, 8, 9]), grown(5, 4, 4)
    add(sheet, drafted)
    selection = sheet.select(0.0)
    tree, graph = selection.tree, selection.graph()
    again = graph.unroll(max_nodes=len(tree))
    assert paths_of(again) == pytest.approx(paths_of(tree))
    assert graph.drafted and 0 in graph.drafted


def nodes_of(tokens: list[int], parents: list[int]) -> Any:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return np.array([tokens, parents, depths, range(len(tokens)), [0, *[1] * (len(tokens) - 1)]])


def test_a_leaf_borrows_what_follows_the_same_tokens() -> None:
    #   1 - 2 - 3 - 4    and    1 - 5 - 2 - 3: behind the second "2 3" stands "4" too
    nodes = nodes_of([1, 2, 3, 5, 2, 3, 4], [-1, 0, 1, 0, 3, 4, 2])
    scores = np.array([1.0, 0.5, 0.4, 0.4, 0.35, 0.32, 0.3])
    aliases = aliases_in(nodes[1], nodes[0], 2)
    assert aliases.tolist() == [0, 1, 2, 3, 4, 2, 6]
    tree = tree_of(*merge(nodes, scores, aliases, 8, 64))
    assert paths_of(tree)[5, 2, 3, 4] == pytest.approx(0.32 * 0.3 / 0.4)
    assert (
        tree.sources[-1] == "merged"
        and tree.nodes[-1] == 6
        and list(paths_of(tree))[:7] == list(paths_of(tree_of(nodes, scores)))
    )
    for max_depth, max_nodes in ((3, 64), (8, 7)):  # too deep, no room
        same = merge(nodes, scores, aliases, max_depth, max_nodes)
        assert same[0].tolist() == nodes.tolist() and same[1].tolist() == scores.tolist()


def test_nothing_is_merged_that_would_close_a_cycle() -> None:
    nodes = nodes_of([1, 2, 1, 2], [-1, 0, 1, 2])
    assert aliases_in(nodes[1], nodes[0], 2).tolist() == [0, 1, 2, 3]


@given(st.data())
def test_borrowed_nodes_are_the_best_of_all_that_could_be_borrowed(data: Any) -> None:
    """Against a search that unrolls everything first."""
    count = data.draw(st.integers(2, 14))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    tokens = [data.draw(st.integers(0, 3)) for _ in range(count)]
    scores = [1.0]
    for parent in parents[1:]:
        scores.append(scores[parent] * data.draw(st.floats(0.1, 0.95)))
    order = sorted(range(count), key=lambda node: (-scores[node], node))
    place = {node: here for here, node in enumerate(order)}
    nodes = nodes_of([tokens[node] for node in order], [place.get(parents[node], -1) for node in order])
    best = np.array([scores[node] for node in order])
    aliases = aliases_in(nodes[1], nodes[0], 2)
    max_depth, max_nodes = int(nodes[2].max()) + data.draw(st.integers(0, 3)), data.draw(st.integers(count, 30))
    unrolled: list[tuple[float, tuple[int, ...]]] = []

    def walk(node: int, path: tuple[int, ...], score: float) -> None:
        unrolled.append((score, path))
        if len(path) < max_depth or (node in nodes[1] and aliases[node] == node and len(path) == nodes[2, node]):
            lender = aliases[node]
            for child in np.flatnonzero(nodes[1] == lender).tolist():
                walk(child, (*path, int(nodes[0, child])), score * float(best[child] / best[lender]))

    walk(0, (), 1.0)
    whole, gained = merge(nodes, best, aliases, max_depth, max_nodes)
    expected = sorted((score for score, _ in unrolled), reverse=True)[:max_nodes]
    assert gained.tolist() == pytest.approx(expected)
    assert (whole[1, 1:] < np.arange(1, whole.shape[1])).all()
    borrowed = whole[4] == MERGED
    assert (whole[2, borrowed] <= max_depth).all()
