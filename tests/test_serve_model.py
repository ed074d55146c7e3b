"""A server with a real, if tiny, model in its engine process: it says what `draftgraph.load(...).generate` says."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from cli_tools import PROMPT
from serve_tools import LiveServer

import draftgraph
from draftgraph.serve.model import served_tokenizer

TEXTS = 4


@pytest.fixture(scope="module")
def server(folder):
    options = {"name": "tiny", "load": {"target": str(folder), "draft": "self", "dtype": "float64"}}
    options |= {"graph": {"mode": "graph"}, "limits": {"texts": TEXTS, "waiting": 64}}
    command = [sys.executable, "-m", "draftgraph.serve.engine_process", json.dumps(options)]
    with LiveServer(command, served_tokenizer(str(folder)), model_name="tiny", max_texts=TEXTS) as server:
        yield server


@pytest.fixture(scope="module")
def pair(folder):
    return draftgraph.load(str(folder), dtype="float64")


def chat(server, text=PROMPT, **options):
    options = {"temperature": 0, "max_tokens": 24, "messages": [{"role": "user", "content": text}]} | options
    return server.client().chat.completions.create(model="tiny", **options)


def complete(server, prompt=PROMPT, **options):
    options = {"temperature": 0, "max_tokens": 24} | options
    return server.client().completions.create(model="tiny", prompt=prompt, **options)


def test_a_chat_is_answered_as_by_the_library(server, pair):
    assert chat(server).choices[0].message.content == pair.generate(PROMPT, max_new_tokens=24).text


@pytest.mark.parametrize("mode", ["off", "chain", "tree", "graph", "auto"])
def test_every_mode_says_the_same_greedy_and_sampled(server, pair, mode):
    more = {"extra_body": {"draftgraph": {"mode": mode}, "top_k": 40}}
    plain = pair.generate(PROMPT, raw=True, max_new_tokens=24).text
    sampled = pair.generate(PROMPT, raw=True, max_new_tokens=24, temperature=0.9, top_p=0.9, top_k=40, seed=11).text
    assert complete(server, **more).choices[0].text == plain
    assert complete(server, temperature=0.9, top_p=0.9, seed=11, **more).choices[0].text == sampled


def test_answers_do_not_depend_on_who_else_asks(server):
    asked = [{"prompt": f"{PROMPT} {number}", "temperature": number % 2, "seed": number} for number in range(12)]
    alone = [complete(server, **one).choices[0].text for one in asked]
    with ThreadPoolExecutor(12) as clients:
        together = list(clients.map(lambda one: complete(server, **one).choices[0].text, asked))
    assert together == alone


def test_log_probabilities_of_a_prompt_are_the_models(server, pair):
    import torch

    tokens = pair.tokenizer(PROMPT)["input_ids"]
    found = complete(server, tokens, max_tokens=0, echo=True, logprobs=1).choices[0].logprobs.token_logprobs
    with torch.no_grad():
        logits = pair.target(torch.tensor([tokens])).logits[0].log_softmax(-1)
    true = [float(logits[place, token]) for place, token in enumerate(tokens[1:])]
    assert found[0] is None and found[1:] == pytest.approx(true, abs=1e-4)


def test_a_schema_is_followed(server, pair):
    kind = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": kind}}
    spaces = {
        str(token): -100 for token in pair.tokenizer(" \t\n\r")["input_ids"]
    }  # a random model never tires of them
    end = {"stop_token_ids": [pair.tokenizer.eos_token_id]}  # which this model does not know of
    answer = chat(
        server, max_tokens=200, response_format=wanted, temperature=1, seed=2, logit_bias=spaces, extra_body=end
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)
    assert answer.choices[0].finish_reason == "stop"


def test_penalties_change_what_is_said(server):
    plain = complete(server).choices[0].text
    assert complete(server, presence_penalty=2, frequency_penalty=2).choices[0].text != plain
    assert complete(server, extra_body={"repetition_penalty": 3.0}).choices[0].text != plain


def test_a_killed_engine_comes_back_with_the_same_answers(server):
    before = complete(server).choices[0].text
    os.kill(server.engine.process_id, signal.SIGKILL)
    server.wait_until_away()
    server.wait_until_ready()
    assert complete(server).choices[0].text == before
