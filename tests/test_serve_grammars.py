"""Guided answers: under every name that clients ask for them, and no grammar takes more than its share."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serve_tools import LiveServer, tokenizer

from draftgraph.serve.errors import ApiError
from draftgraph.serve.grammars import LONGEST, Grammars, grammar_of
from draftgraph.serve.schemas import ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
JSON_OBJECT = {"type": "json_object"}
GBNF = 'root ::= answer "."\nanswer ::= "yes" | "no"'
LARK = 'start: ANSWER "."\nANSWER: "yes" | "no"'
HEALTHY_SECONDS = 5.0  # far less on an idle machine


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer())


def complete(server, **fields) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={"prompt": "a"} | fields, timeout=60)


def refused(grammars, grammar, answers=1) -> str:
    with pytest.raises(ApiError) as found:
        asyncio.run(grammars.check(grammar, "guided_json", answers))
    assert found.value.status == 400 and found.value.body["error"]["param"] == "guided_json"
    return found.value.body["error"]["message"]


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def lark(grammar: str) -> dict[str, Any]:
    return {"type": "lark", "grammar": grammar}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": fields}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "grammar": "", "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, JSON_SCHEMA | {"schema": True}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, JSON_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, JSON_SCHEMA),
        ({"guided_json_object": True}, JSON_OBJECT),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a+"}, regex("a+")),
        ({"guided_choice": ["yes", "no"]}, {"type": "choice", "choices": ["yes", "no"]}),
        ({"guided_grammar": GBNF}, lark(GBNF)),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, JSON_SCHEMA),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, JSON_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, regex("a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"type": "choice", "choices": ["yes", "no"]}),
        ({"structured_outputs": {"grammar": LARK}}, lark(LARK)),
        ({"grammar": GBNF}, lark(GBNF)),
        ({"json_schema": SCHEMA}, JSON_SCHEMA),
    ],
)
def test_a_grammar_is_asked_for_under_the_names_of_openai_vllm_and_llama_cpp(fields, grammar):
    for request in (CompletionRequest(prompt="a", **fields), ChatRequest(messages=[{"role": "user"}], **fields)):
        found = grammar_of(request)
        assert (found and found[1]) == grammar


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice cannot"),
        ({"response_format": JSON_OBJECT, "grammar": GBNF}, "grammar", "response_format and grammar cannot"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "needs one of json, regex"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of json, regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format", "false"),
        ({"guided_json": "{"}, "guided_json", "guided_json is not JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be a JSON schema"),
        ({"guided_json": [1]}, "guided_json", "cannot be of this type"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text conforms to it"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "the grammar cannot be followed"),
        ({"guided_regex": "(a"}, "guided_regex", "invalid regex"),
        ({"guided_regex": r"(a)\1"}, "guided_regex", "the grammar cannot be followed"),
        ({"guided_choice": []}, "guided_choice", "choices of a grammar of type choice cannot be []"),
        ({"guided_choice": [1]}, "guided_choice", "valid string"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "at most 4096"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar", "Rule 'missing' not found"),
        ({"grammar": "start: missing"}, "grammar", "the grammar cannot be followed"),
        ({"grammar": "no grammar"}, "grammar", "the grammar cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(server, fields, param, message):
    answer = complete(server, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "refuse"}}}},
        {"guided_regex": "refuse"},
        {"guided_choice": ["refuse"]},
        {"guided_grammar": 'root ::= "refuse"'},
        {"structured_outputs": {"grammar": 'start: "refuse"'}},
    ],
)
def test_a_grammar_reaches_the_engine(server, fields):
    answer = complete(server, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "this grammar is refused"


@pytest.mark.parametrize(
    "grammar",
    [
        JSON_OBJECT,
        JSON_SCHEMA,
        {"type": "json_schema", "schema": True},
        regex(r"\d{3}-\d{4}/x"),
        {"type": "choice", "choices": ['"', "\\", "\n", "é", "😀", "\x7f", ""]},
        {"type": "choice", "choices": [str(place**3) for place in range(4000)]},
        lark(LARK),
        lark(GBNF),
        lark('start: "<" @answer ">"') | {"answer": JSON_SCHEMA},
    ],
)
def test_what_can_be_followed_is_taken(grammars, grammar):
    asyncio.run(grammars.check(grammar, "guided_json", 1))


def chain(count: int, levels: int) -> dict[str, Any]:
    """A schema of references, each so many levels inside the one before it."""
    links = {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(count)}
    for _ in range(levels):
        links = {name: {"items": link} for name, link in links.items()}
    return schema(**{"$defs": links | {str(count): {"type": "integer"}}, "$ref": "#/$defs/0"})


@pytest.mark.parametrize(
    "grammar",
    [
        schema(type="integer", multipleOf=999_983),  # 3 seconds and 400 MB
        schema(
            allOf=[{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]
        ),  # over a minute
        schema(patternProperties={f"^p{place}[a-z]*$": {} for place in range(2000)}),  # over a minute
        regex(r"\p{L}*\P{Lu}?" * 4000),  # half a minute and 6 GB
        lark("start: r0\n" + "".join(f"r{place}: r{place + 1}\n" for place in range(3000)) + 'r3000: "a"'),  # stack
        chain(80, 30),  # the same
    ],
)
def test_a_grammar_that_takes_too_much_is_refused_and_the_next_is_tried(grammars, grammar):
    message = refused(grammars, grammar)
    assert "too much time or memory" in message or "cannot be followed" in message
    asyncio.run(grammars.check(JSON_SCHEMA, "guided_json", 1))


def test_a_grammar_that_is_too_long_is_refused(grammars):
    assert "too long" in refused(grammars, regex("a" * LONGEST))


def test_a_grammar_that_takes_long_is_not_compiled_for_many_answers(grammars):
    wide = schema(type="object", properties={f"p{place}": {"type": "string"} for place in range(300)})
    asyncio.run(grammars.check(wide, "guided_json", 1))
    assert "too much time" in refused(grammars, wide, answers=1000)


def test_grammars_that_take_long_delay_nobody(server):
    costly = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(complete, server, guided_json=costly) for _ in range(3)]
        while not all(answer.done() for answer in answers):
            start = time.monotonic()
            assert complete(server, max_tokens=2).status_code == 200
            assert time.monotonic() - start < HEALTHY_SECONDS
    assert {answer.result().status_code for answer in answers} == {400}
