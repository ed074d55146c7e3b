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
from draftgraph.batching.grammar import matcher_of
from draftgraph.batching.guide import Guide
from draftgraph.config import Mode
from draftgraph.graph import TokenTree
from draftgraph.pair import Pair

CASES = int(os.environ.get("DRAFTGRAPH_GUIDED_CASES", "24"))
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
            matcher = matcher_of(grammar, tokenizer, scheduler.vocabulary)
            assert matcher.validate_tokens(tokens[0]) == len(tokens[0]), grammar


def test_what_the_grammar_forbids_is_not_checked(pair: Pair) -> None:
    """A tree of digits and letters behind `1`: of a number only digits stay, with what is behind them, and an end."""
    tokenizer = pair.tokenizer
    one, two, letter, end = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "a", "<|end|>"))
    tokens, parents = np.array([one, two, letter, two, letter, end, two]), np.array([-1, 0, 0, 1, 1, 3, 2])
    depths = np.array([0, 1, 1, 2, 2, 3, 2])
    tree = TokenTree(tokens, parents, depths, np.arange(7), np.ones(7), ["root", *["draft"] * 6])
    guide = Guide(matcher_of({"type": "regex", "pattern": "[0-9]{3,4}"}, tokenizer, 320), 1, frozenset([end]))
    kept = guide.possible([letter, one], tree)
    assert kept.tolist() == [True, True, False, True, False, True, False]
    cut = tree.only(kept)
    assert cut.tokens.tolist() == [one, two, two, end] and cut.parents.tolist() == [-1, 0, 1, 2]
    assert cut.nodes.tolist() == [0, 1, 3, 5] and cut.mask.sum() == 1 + 2 + 3 + 4


def test_the_cut_saves_checking(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked() -> int:
        scheduler = Scheduler(pair, Limits(texts=1, slots=4096))
        prompt = tuple(pair.tokenizer("the cat sat on the mat and")["input_ids"])
        grammar = {"type": "regex", "pattern": "[0-9]{40}"}
        job = Job("a", prompt, max_tokens=40, grammar=grammar, config={"mode": "tree"})
        stats = answered(scheduler, [job])["a"][-1].stats
        assert stats is not None
        return int(stats["verified_tokens"])

    cut = checked()
    monkeypatch.setattr(Guide, "possible", lambda self, text, tree: np.ones(len(tree), dtype=bool))
    assert cut < checked()
