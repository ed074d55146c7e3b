"""What `inspect` shows: data, terminal, DOT, pictures and the page, built from steps made by hand."""

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from draftgraph.config import GraphConfig
from draftgraph.cost import FlatCost
from draftgraph.errors import UsageError
from draftgraph.graph import ROOT, Source, TokenGraph
from draftgraph.inspect import GraphReport, Panel, side_by_side_svg
from draftgraph.inspect.svg import HEIGHT, layered
from draftgraph.inspect.text import label, piece, pieces, visible
from draftgraph.stats import Step

NASTY = ["<b>&amp;", '"', "'", "\x00\x1b[31m", "\x85", "\u202e", "\ud800", "\ufffe", "😀", "\ufffd", "\n", "\t ", "]]>"]
NASTY += ["a" * 90, "\xa0"]

Growth = tuple[list[str], dict[str, float], Source]  # the path to a node, the children that it gets, from whom


class Words:
    """A tokenizer whose tokens are whole words, known when first used."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def __getitem__(self, word: str) -> int:
        if word not in self.known:
            self.known.append(word)
        return self.known.index(word)

    def decode(self, ids: list[int]) -> str:
        return "".join(self.known[token] for token in ids)

    def step(
        self, root: str, growth: list[Growth], accepted: list[str], bonus: str | None, config: GraphConfig
    ) -> Step:
        graph = TokenGraph(self[root], config)
        for path, children, source in growth:
            node = ROOT
            for word in path:
                node = graph.children_of(node)[self[word]]
            node = graph.canonical[node]
            tokens, probs = np.array([[self[word] for word in children]]), np.array([list(children.values())])
            graph.extend([node], np.ones(1), tokens, probs, source)
            graph.close([node])
        tree = graph.unroll()
        path = [ROOT]
        for word in accepted:
            child = tree.child(path[-1], self[word])
            assert child is not None
            path.append(child)
        chosen = [self[word] for word in accepted] + ([] if bonus is None else [self[bonus]])
        return Step(7, graph, tree, path[1:], chosen, finish_reason="stop" if bonus is None else None)


MERGED: list[Growth] = [
    ([], {" the": 0.6, " a": 0.3}, "draft"),
    ([" the"], {" cat": 0.5, " dog": 0.3}, "draft"),
    ([" a"], {" big": 0.5, " cat": 0.35}, "draft"),
    ([" the", " cat"], {" sat": 0.7, " slept": 0.25}, "draft"),
    ([" a", " big"], {" cat": 0.8}, "draft"),
    ([" the", " cat", " sat"], {" on": 0.8}, "draft"),
    ([" the", " cat", " sat", " on"], {" my": 0.6}, "draft"),
    ([" a", " big", " cat"], {" sat": 0.8}, "draft"),
]
COPIED: list[Growth] = [
    ([], {" the": 0.8}, "copied"),
    ([" the"], {" old": 0.7}, "copied"),
    ([" the", " old"], {" mat": 0.7}, "copied"),
    ([], {" my": 0.4}, "draft"),
    ([" my"], {" old": 0.5}, "draft"),
    ([" my", " old"], {" mat": 0.5}, "draft"),
]


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def report(words: Words) -> GraphReport:
    """Two steps: an accepted path through an in-draft merge, then one of copied tokens that a stop condition ends."""
    steps = [
        words.step("saw", MERGED, [" a", " big", " cat", " sat", " on"], " top", GraphConfig()),
        words.step(" of", COPIED, [" the", " old"], None, GraphConfig()),
    ]
    return GraphReport.of(steps, words.decode, "What I saw", GraphConfig(), {"target": "a <large> one"})


@pytest.fixture
def nasty_report(words: Words) -> GraphReport:
    config = GraphConfig(k=len(NASTY))
    growth: list[Growth] = [([], dict.fromkeys(NASTY, 0.05), "draft"), ([NASTY[0]], {NASTY[1]: 0.5}, "copied")]
    step = words.step(NASTY[3], growth, NASTY[:2], NASTY[4], config)
    return GraphReport.of([step], words.decode, "".join(NASTY), config, {"<i>": "&"})


def test_records_tell_merged_copied_and_drafted_apart(report: GraphReport) -> None:
    merged, copied = report.steps
    aliases = {node.id: node.alias_of for node in merged.nodes if node.alias_of is not None}
    assert [merged.nodes[node].text for node in aliases] == [" sat"]
    assert {(edge.parent, edge.child, edge.accepted) for edge in merged.edges if edge.kind == "merged"} == {
        (alias, child.id, True) for alias, first in aliases.items() for child in merged.nodes if child.parent == first
    }
    assert {node.text for node in copied.nodes if node.source == "copied"} == {" the", " old", " mat"}
    assert {edge.kind for edge in copied.edges} == {"draft", "copied"}


def test_records_follow_the_step(report: GraphReport) -> None:
    step = report.steps[0]
    assert [token.text for token in step.tokens] == [" a", " big", " cat", " sat", " on", " top"]
    assert [token.source for token in step.tokens] == ["draft"] * 4 + ["merged", "bonus"]
    assert [step.tree[index].text for index in step.path] == [" a", " big", " cat", " sat", " on"]
    assert [node.index for node in step.path_to(step.path[-1])] == [ROOT, *step.path]
    for node, row in zip(step.tree, step.mask, strict=True):
        assert [place for place, bit in enumerate(row) if bit == "1"] == [n.index for n in step.path_to(node.index)]
    assert (step.rejection, step.stopped) == ("k", False)
    assert report.steps[1].bonus is None and report.steps[1].stopped
    assert report.text == " a big cat sat on top the old"


def test_explanation_says_why_no_more_was_accepted(report: GraphReport) -> None:
    assert "not among the draft's 8 best (k)" in report.explanation(0)
    assert "stop condition" in report.explanation(1)


def test_json_comes_back_the_same(report: GraphReport, nasty_report: GraphReport) -> None:
    for one in (report, nasty_report):
        document = one.to_json()
        document.encode("utf-8")
        assert GraphReport.from_json(document) == one
    data = json.loads(report.to_json())
    assert (data["schema"], data["version"], data["text"]) == ("draftgraph.inspect", 1, report.text)
    assert data["config"]["mode"] == "auto" and data["facts"] == {"target": "a <large> one"}
    assert set(data["steps"][0]) == {
        *("position", "nodes", "edges", "tree", "mask", "path", "tokens", "rejection", "stopped"),
    }


def test_json_of_another_version_is_refused(report: GraphReport) -> None:
    with pytest.raises(UsageError, match="version 1"):
        GraphReport.from_json(report.to_json().replace('"version": 1', '"version": 99'))


def test_a_cost_model_of_ones_own_is_named() -> None:
    class Dear(FlatCost):
        pass

    assert GraphReport.of([], str, "", GraphConfig(cost=Dear())).config["cost"] == "Dear"


def test_dot_names_each_node_before_its_edges(report: GraphReport, nasty_report: GraphReport) -> None:
    for document in (report.to_dot(), report.to_dot(0), nasty_report.to_dot()):
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', document)
        assert bare.startswith("digraph") and bare.count("{") == bare.count("}") and '"' not in bare.replace('""', "")
        named = set(re.findall(r"^\s+(s\d+\w+) \[", bare, re.MULTILINE))
        ends = re.findall(r"^\s+(\w+) -> (\w+) \[", bare, re.MULTILINE)
        assert ends and {name for pair in ends for name in pair} <= named
    assert "same" in report.to_dot(0) and "style=dotted" in report.to_dot(1)
    assert report.to_dot().count("subgraph") == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["graph", "tree", "mask"])
def test_svg_is_xml_whatever_the_tokens(nasty_report: GraphReport, view: Any, theme: str) -> None:
    svg = nasty_report.to_svg(0, view, theme)
    picture = ElementTree.fromstring(svg.encode("utf-8"))
    nodes = [one for one in picture.iter() if "node" in one.get("class", "").split()]
    step = nasty_report.steps[0]
    assert len(nodes) == len(step.nodes if view == "graph" else step.tree)
    assert {node.get("data-token") for node in nodes} == {visible(node.text) for node in step.nodes}


def test_svg_nodes_carry_what_they_are(report: GraphReport) -> None:
    picture = ElementTree.fromstring(report.to_svg(0))
    nodes = {one.get("data-id"): one for one in picture.iter() if "node" in one.get("class", "").split()}
    step = report.steps[0]
    alias = next(node for node in step.nodes if node.alias_of is not None)
    assert nodes[str(alias.id)].get("data-source") == "merged"
    assert nodes[str(alias.id)].get("data-alias-of") == str(alias.alias_of)
    accepted = {int(key or 0) for key, one in nodes.items() if one.get("data-accepted") == "true"}
    assert accepted == {ROOT, *(step.tree[index].node for index in step.path)}
    kinds = [one.get("class", "") for one in picture.iter() if "edge" in one.get("class", "").split()]
    assert {"edge merged accepted", "edge draft rejected", "edge bonus accepted"} <= set(kinds)


def test_pictures_leave_out_what_was_not_checked(words: Words) -> None:
    config = GraphConfig(mode="tree", max_nodes=4)
    graph = TokenGraph(words["root"], config)
    for word in ("a", "b", "c", "d", "e"):
        graph.add(ROOT, words[word], 0.3, "draft")
    step = Step(0, graph, graph.unroll(), [], [words["x"]], False)
    report = GraphReport.of([step], words.decode, "", config)
    assert report.to_svg().count('data-accepted="') == 4 < len(report.steps[0].nodes)
    assert "more node" in report.explanation(0)


def test_side_by_side_shows_every_panel_with_one_legend(report: GraphReport) -> None:
    step = report.steps[0]
    panels = [
        Panel(step, "tree", "The <tree>", outcome=False, focus=3),
        Panel(step, "mask", "The mask", "rows", focus=3),
    ]
    for stacked in (False, True):
        svg = side_by_side_svg(panels, "dark", stacked)
        lit = [one for one in ElementTree.fromstring(svg).iter() if "lit" in one.get("class", "").split()]
        assert len(lit) == 2 * len(step.path_to(3))
        assert svg.count(">drafted</text>") == 1
        assert "The &lt;tree&gt;" in svg


def test_wrong_requests_are_named(report: GraphReport) -> None:
    with pytest.raises(UsageError, match="step must be between 0 and 1, not 2"):
        report.to_svg(2)
    with pytest.raises(UsageError, match="view must be one of"):
        report.to_svg(0, "list")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="theme must be one of"):
        report.to_svg(0, theme="pink")
    with pytest.raises(UsageError, match="focus must be"):
        side_by_side_svg([Panel(report.steps[0], focus=99)])
    with pytest.raises(UsageError, match="no steps"):
        GraphReport.of([], str, "", GraphConfig()).to_svg()


@pytest.mark.parametrize("width", [60, 140])
def test_terminal_shows_tokens_sources_and_mask_without_colour(report: GraphReport, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    report.print(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(visible(node.text) in printed for step in report.steps for node in step.nodes)
    alias = next(node for node in report.steps[0].nodes if node.alias_of is not None)
    assert f"↪ same as #{alias.alias_of}" in printed
    assert re.search(r"D ␣big \.50 #\d+ ✓", printed) and re.search(r"C ␣old \.70 #\d+ ✓", printed)
    assert "★ ␣top" in printed and re.search(r"M ✓ ␣on .*██", printed)
    assert max(map(len, printed.splitlines())) <= width


def test_terminal_never_gets_a_control_character(nasty_report: GraphReport) -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    nasty_report.print(console)
    assert not set(console.file.getvalue()) & {"\x00", "\x1b", "\u202e"}  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 5), max_size=40).map(lambda backs: [max(0, n - back) for n, back in enumerate(backs)]))
def test_layout_keeps_nodes_apart_and_edges_uncrossed(parents: list[int]) -> None:
    boxes = layered([None, *parents], [50.0 + len(parents) % 7] * (len(parents) + 1))
    places = [(box.left, box.middle) for box in boxes]
    assert len(set(places)) == len(places)
    edges = [(boxes[parent], boxes[child]) for child, parent in enumerate(parents, start=1)]
    for start, end in edges:
        assert end.left > start.column_right and end.middle >= start.middle
        for other, goal in edges:
            if start.left == other.left and start.middle < other.middle:
                assert end.middle < goal.middle
    middles = sorted({box.middle for box in boxes})
    assert all(low + HEIGHT < high for low, high in pairwise(middles))


@given(st.text(min_size=1))
def test_any_text_can_stand_in_xml(text: str) -> None:
    assert visible(text).isprintable()
    assert cell_len(label(text, 0)) <= 16


@given(st.text())
def test_pieces_join_to_the_text_and_never_split_a_character(text: str) -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    data = text.encode("utf-8", "replace")
    parts = list(pieces(decode, ord("x"), list(data)))
    assert len(parts) == len(data) and "".join(parts) == data.decode()


def test_piece_keeps_a_leading_space_that_a_tokenizer_drops_at_the_start(words: Words) -> None:
    ids = [words[" one"], words[" two"]]
    assert piece(lambda tokens: words.decode(tokens).lstrip(), *ids) == " two"


def test_page_needs_nothing_from_outside(report: GraphReport, nasty_report: GraphReport) -> None:
    for one in (report, nasty_report, GraphReport.of([], str, "", GraphConfig())):
        page = one.to_html()
        page.encode("utf-8")
        assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert "<b>&amp;amp;" not in nasty_report.to_html() and "a &lt;large&gt; one" in report.to_html()


def shown(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", f".step:not([hidden]) {selector}")


def open_page(browser: Any, folder: Path, html: str) -> None:
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    browser.get(file.as_uri())


def no_errors(browser: Any) -> bool:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.browser
def test_page_steps_through_the_answer(chromium: Any, tmp_path: Path, report: GraphReport) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(chromium, tmp_path, report.to_html())
    first, second = report.steps
    nodes = shown(chromium, ".graph .node")
    assert [node.get_attribute("data-token") for node in nodes] == [visible(node.text) for node in first.nodes]
    assert all(node.is_displayed() for node in nodes)
    assert len(shown(chromium, ".mask .node")) == len(first.tree)
    chromium.find_element("id", "slider").send_keys(Keys.ARROW_RIGHT)
    assert len(shown(chromium, ".graph .node")) == len(second.nodes)
    assert shown(chromium, ".graph .node[data-source=copied][data-accepted=true]")
    chromium.find_element("css selector", "body").send_keys(Keys.ARROW_LEFT)
    assert len(shown(chromium, ".graph .node")) == len(first.nodes)
    chromium.find_element("css selector", ".token[data-step='1']").click()
    assert chromium.find_element("id", "number").text == "2 / 2"
    chromium.find_element("id", "previous").click()
    assert chromium.find_element("id", "number").text == "1 / 2"
    assert no_errors(chromium)


@pytest.mark.browser
def test_page_lights_up_the_path_of_a_row(chromium: Any, tmp_path: Path, report: GraphReport) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def lit(view: str, name: str = "data-id") -> set[int]:
        return {int(node.get_attribute(name)) for node in shown(chromium, f".{view} .node.lit")}

    open_page(chromium, tmp_path, report.to_html())
    step = report.steps[0]
    for index in (step.path[-1], 3):
        ActionChains(chromium).move_to_element(shown(chromium, f".mask .row[data-id='{index}'] .own")[0]).perform()
        assert lit("mask") == {node.index for node in step.path_to(index)}
        assert lit("graph") == {node.node for node in step.path_to(index)}
    repeated = next(node for node in step.tree if node.source == "merged").node
    target = shown(chromium, f".graph .node[data-id='{repeated}'] .token")[0]
    ActionChains(chromium).move_to_element(target).perform()
    assert lit("mask") == {node.index for node in step.tree if node.node == repeated} and len(lit("mask")) == 2
    shown(chromium, ".mask .row")[0].send_keys(Keys.ARROW_DOWN)
    assert lit("mask") == {0, 1}
    assert no_errors(chromium)


@pytest.mark.browser
def test_page_fits_a_phone_in_the_dark(chromium: Any, tmp_path: Path, nasty_report: GraphReport) -> None:
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    open_page(chromium, tmp_path, nasty_report.to_html())
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= 390
    assert chromium.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert len(shown(chromium, ".graph .node")) == len(nasty_report.steps[0].nodes)
    assert no_errors(chromium)


@pytest.mark.browser
def test_notebook_shows_the_page_in_a_frame(chromium: Any, tmp_path: Path, report: GraphReport) -> None:
    open_page(chromium, tmp_path, f"<!doctype html><title>notebook</title>{report._repr_html_()}")
    chromium.switch_to.frame(chromium.find_element("css selector", "iframe"))
    chromium.find_element("id", "next").click()
    assert len(shown(chromium, ".graph .node")) == len(report.steps[1].nodes)
