"""Guided answers: whatever the grammar, every mode gives the tokens of plain decoding, and they conform.

DRAFTGRAPH_GUIDED_CASES says how many random grammars are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any, get_args

import jsonschema_rs
import numpy as np
import pytest
from cli_tools import save_tiny_model
from families import perturbed
from transformers import AutoTokenizer, LlamaForCausalLM

from draftgraph import GraphConfig
from draftgraph.batching import Job, Limits, Progress, Scheduler
from draftgraph.batching.grammar import matcher_of, vocabulary_of
from draftgraph.batching.guide import GrammarGuide
from draftgraph.config import Mode
from draftgraph.graph import TokenGraph, TokenTree
from draftgraph.pair import Pair

CASES = int(os.environ.get("DRAFTGRAPH_GUIDED_CASES", "40"))
MODES = get_args(Mode)
LETTERS = "abcdefghij019 -"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    target = LlamaForCausalLM.from_pretrained(folder).eval()
    return Pair(target, perturbed(target), AutoTokenizer.from_pretrained(folder), GraphConfig(cost="flat"))


@pytest.fixture(scope="module")
def scheduler(pair: Pair) -> Scheduler:
    return Scheduler(pair, Limits(texts=2 * len(MODES), slots=8192))


def some_regex(source: random.Random, depth: int = 0) -> str:
    """Of bounded length, so that every answer ends."""
    kind = (
        source.choice(["text", "class", "repeat", "either", "both"]) if depth < 3 else source.choice(["text", "class"])
    )
    if kind == "text":
        return re.escape("".join(source.choices(LETTERS, k=source.randint(1, 5))))
    if kind == "class":
        return source.choice(["[a-f]", "[0-9]", "[^a-z0-9\\n]", "\\d", "(?:é|ß|日)", "[A-Z]"])
    inner = [some_regex(source, depth + 1) for _ in range(2)]
    if kind == "repeat":
        low = source.randint(0, 2)
        return f"(?:{inner[0]}){{{low},{low + source.randint(0, 3)}}}"
    return f"(?:{inner[0]}|{inner[1]})" if kind == "either" else inner[0] + inner[1]


def some_schema(source: random.Random, depth: int = 0) -> Any:
    kinds = ["text", "integer", "flag", "choice", "pattern", *(["object", "list", "any"] if depth < 2 else [])]
    kind = "object" if depth == 0 and source.random() < 0.7 else source.choice(kinds)
    if kind == "object":
        names = source.sample(["name", "age", "städte", "a b", "x"], source.randint(1, 3))
        fields = {name: some_schema(source, depth + 1) for name in names}
        required = [name for name in names if source.random() < 0.8]
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    if kind == "list":
        return {"type": "array", "items": some_schema(source, depth + 1), "maxItems": source.randint(0, 3)}
    if kind == "any":
        return {"anyOf": [some_schema(source, depth + 1), {"type": "null"}]}
    low = source.randint(-50, 50)
    return {
        "text": {"type": "string", "maxLength": source.randint(0, 6)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 500)},
        "flag": {"type": "boolean"},
        "choice": {"enum": source.sample(["red", "green", 7, None, "ünï"], 2)},
        "pattern": {"type": "string", "pattern": f"^{source.choice(['[a-c]{1,4}', '[0-9]{2}-[0-9]{2}'])}$"},
    }[kind]


def some_grammar(seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    if seed % 2:
        return {"type": "json_schema", "schema": some_schema(source)}
    if seed % 10 == 0:
        return {"type": "choice", "choices": ["yes", "no", 'per"haps\\', "näh"][: source.randint(1, 4)]}
    return {"type": "regex", "pattern": some_regex(source)}


def conforms(text: str, grammar: dict[str, Any]) -> bool:
    if grammar["type"] == "choice":
        return text in grammar["choices"]
    if grammar["type"] == "regex":
        return re.fullmatch(grammar["pattern"], text) is not None
    return bool(jsonschema_rs.is_valid(grammar["schema"], json.loads(text)))


def answered(scheduler: Scheduler, jobs: list[Job]) -> dict[str, list[Progress]]:
    told: dict[str, list[Progress]] = {job.id: [] for job in jobs}
    for job in jobs:
        scheduler.submit(job)
    while scheduler.busy:
        for one in scheduler.step():
            told[one.id].append(one)
    return told


@pytest.mark.parametrize("seed", range(CASES))
def test_answers_conform_and_are_those_of_plain_decoding(pair: Pair, scheduler: Scheduler, seed: int) -> None:
    grammar, tokenizer = some_grammar(seed), pair.tokenizer
    given: dict[str, Any] = {"max_tokens": 160, "grammar": grammar, "seed": seed}
    given |= {"tokens": tuple(tokenizer("the cat sat on the mat and")["input_ids"])}
    given |= {"stop_token_ids": tuple(tokenizer.convert_tokens_to_ids(["<|end|>"]))}
    jobs = [
        Job(f"{mode} {temperature}", temperature=temperature, config={"mode": mode}, **given)
        for mode in MODES
        for temperature in (0.0, 1.0)
    ]
    told = answered(scheduler, jobs)
    for temperature in (0.0, 1.0):
        tokens = [[token for one in told[f"{mode} {temperature}"] for token in one.tokens] for mode in MODES]
        assert all(one == tokens[MODES.index("off")] for one in tokens), (grammar, temperature)
        end = told[f"off {temperature}"][-1]
        if end.finish_reason == "stop":
            assert conforms(tokenizer.decode(tokens[0], skip_special_tokens=True), grammar), grammar
        else:
            assert end.finish_reason == "length", end
            matcher = matcher_of(grammar, vocabulary_of(tokenizer, scheduler.vocabulary))
            assert matcher.validate_tokens(tokens[0]) == len(tokens[0]), grammar


def guide_for(pair: Pair, pattern: str) -> GrammarGuide:
    words, end = vocabulary_of(pair.tokenizer, 320), pair.tokenizer.convert_tokens_to_ids("<|end|>")
    return GrammarGuide(matcher_of({"type": "regex", "pattern": pattern}, words), words.eos_token, 1, frozenset([end]))


def grown(tokenizer: Any, *paths: str, k: int = 4) -> TokenGraph:
    """A graph behind "1", with these paths of one-character tokens; "." is the end."""
    one, end = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "<|end|>"))
    graph = TokenGraph(one, GraphConfig(mode="tree", k=k), ends=frozenset([end]))
    for path in paths:
        node = 0
        for letter in path:
            token = end if letter == "." else tokenizer.convert_tokens_to_ids(letter)
            graph.add(node, token, 0.8, "draft")
            node = graph.children_of(node)[token]
    return graph


def texts(tokenizer: Any, tree: TokenTree) -> set[str]:
    """Of all paths from the root."""
    paths = [tree.tokens[np.flatnonzero(row)[1:]].tolist() for row in tree.mask]
    return {tokenizer.decode(path).replace("<|end|>", ".") for path in paths if path}


def test_what_the_grammar_forbids_is_not_checked(pair: Pair) -> None:
    """Of a number only digits stay, with what is behind them, and an end."""
    graph = grown(pair.tokenizer, "22.", "2a", "a2", "2.")
    cut = guide_for(pair, "[0-9]{3,4}").shape(graph, graph.unroll(), [5, int(graph.tokens[0])])
    assert texts(pair.tokenizer, cut) == {"2", "22", "22."}
    assert cut.parents.tolist() == [-1, 0, 1, 2] and cut.sources == ["root", "draft", "draft", "draft"]
    assert cut.tokens.tolist() == graph.tokens[cut.nodes].tolist()


def test_what_the_grammar_forces_is_drafted_behind_every_draft_that_stays(pair: Pair) -> None:
    graph = grown(pair.tokenizer, "a", "2")
    tree = guide_for(pair, "1(2xyz|3)").shape(graph, graph.unroll(), [5, int(graph.tokens[0])])
    assert texts(pair.tokenizer, tree) == {"2", "2x", "2xy", "2xyz"}
    assert tree.sources == ["root", "draft", "forced", "forced", "forced"]


def test_what_the_grammar_forces_has_room_beside_what_it_forbids(pair: Pair) -> None:
    graph = grown(pair.tokenizer, "a", k=1)
    tree = guide_for(pair, "123").shape(graph, graph.unroll(), [5, int(graph.tokens[0])])
    assert texts(pair.tokenizer, tree) == {"2", "23"}


def test_a_grammar_that_drafts_exhaust_still_leads_the_answer(pair: Pair) -> None:
    graph = grown(pair.tokenizer, "a", "2")
    guide = guide_for(pair, "1(2xyz|3)")
    guide.matcher.consume_tokens([5, 5])
    assert guide.matcher.is_error()
    tree = graph.unroll()
    assert guide.shape(graph, tree, [5, int(graph.tokens[0])]) is tree


def test_cuts_and_forced_tokens_save_passes_and_checks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = {"type": "regex", "pattern": "([0-9]{4} is the number; ){4}"}

    def figures() -> tuple[int, int]:
        scheduler = Scheduler(pair, Limits(texts=1, slots=4096))
        prompt = tuple(pair.tokenizer("the cat sat on the mat and")["input_ids"])
        stats = answered(scheduler, [Job("a", prompt, grammar=grammar, config={"mode": "tree"})])["a"][-1].stats
        assert stats is not None
        return stats["steps"], stats["verified_tokens"]

    steps, checked = figures()
    monkeypatch.setattr(GrammarGuide, "shape", lambda self, graph, tree, text: tree)
    steps_before, checked_before = figures()
    assert steps < steps_before and checked < checked_before


def test_what_is_learnt_from_guided_drafts_is_not_for_others(pair: Pair) -> None:
    learnt = pair.decoder.learnt
    curves = [one.curves.copy() for one in learnt.calibrations.values()]
    scheduler = Scheduler(pair, Limits(texts=1, slots=4096))
    answered(scheduler, [Job("a", (9, 10, 11), grammar={"type": "regex", "pattern": "[0-9]{40}"})])
    assert all((one.curves == curve).all() for one, curve in zip(learnt.calibrations.values(), curves, strict=True))


class TestEnds:
    def answer(self, pair: Pair, pattern: str, **fields: Any) -> tuple[str, str | None]:
        scheduler = Scheduler(pair, Limits(texts=1, slots=4096))
        job = Job("a", (9, 10, 11), max_tokens=30, grammar={"type": "regex", "pattern": pattern}, **fields)
        told = answered(scheduler, [job])["a"]
        return pair.tokenizer.decode([token for one in told for token in one.tokens]), told[-1].finish_reason

    def test_a_model_without_an_end_uses_its_tokenizers(self, pair: Pair) -> None:
        assert pair.target.config.eos_token_id is None
        assert self.answer(pair, "abc") == ("abc<|end|>", "stop")

    def test_a_token_to_stop_at_stops_inside_a_grammar_and_ends_it(self, pair: Pair) -> None:
        stops = tuple(pair.tokenizer.convert_tokens_to_ids(["b", "x"]))
        assert self.answer(pair, "abc", stop_token_ids=stops) == ("ab", "stop")
        assert self.answer(pair, "acc", stop_token_ids=stops)[0] in ("accb", "accx")

    def test_an_answer_that_ignores_ends_goes_on_as_long_as_the_grammar_does(self, pair: Pair) -> None:
        assert self.answer(pair, "a{3,7}", ignore_eos=True) == ("a" * 7 + "<|end|>", "stop")
        assert self.answer(pair, "a+", ignore_eos=True) == ("a" * 30, "length")
