"""Completions through OpenAI's own client, against a live server whose model repeats its prompt."""

import pytest
from serve_tools import LiveServer, tokenizer

PROMPT = "the cat sat, 日本"
TOKENS = tokenizer()(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def complete(server, prompt=PROMPT, **options):
    return server.client().completions.create(model="fake", prompt=prompt, **{"temperature": 0} | options)


def test_a_prompt_is_continued(server):
    answer = complete(server, max_tokens=100)
    assert answer.choices[0].text == PROMPT and answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len(TOKENS) and answer.usage.completion_tokens == len(TOKENS) + 1


def test_sixteen_tokens_unless_told_otherwise(server):
    assert complete(server, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_token_ids_are_the_same_prompt(server):
    assert complete(server, TOKENS, max_tokens=50).choices[0].text == PROMPT


@pytest.mark.parametrize("ids", [False, True])
def test_a_list_of_prompts_is_answered_in_order(server, ids):
    texts = ["one ", "two two ", "three"]
    prompts = [tokenizer()(text)["input_ids"] for text in texts] if ids else texts
    answer = complete(server, prompts, max_tokens=30)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == sum(len(tokenizer()(text)["input_ids"]) for text in texts)


def test_n_answers_for_each_prompt(server):
    several = complete(server, ["a", "b"], n=2, temperature=1, seed=1, max_tokens=6)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == 2 and several.usage.completion_tokens == 24
    alone = complete(server, "b", n=2, temperature=1, seed=1, max_tokens=6)
    assert [choice.text for choice in several.choices][2:] == [choice.text for choice in alone.choices]


def test_a_stream_says_the_same(server):
    chunks = list(complete(server, ["one", "two"], max_tokens=30, stream=True, stream_options={"include_usage": True}))
    for index, text in enumerate(["one", "two"]):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in parts) == text
        assert [choice.finish_reason for choice in parts][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_stop_strings_hold_in_completions_too(server):
    assert complete(server, max_tokens=50, stop=["sat"]).choices[0].text == "the cat "


def test_logprobs_with_offsets_into_the_text(server):
    choice = complete(server, max_tokens=50, logprobs=2).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert found.tokens[-1] == "<|end|>" and found.text_offset[0] == 0
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or token == "<|end|>" or choice.text[offset:].startswith(token)
    assert all(
        len(top) in (2, 3) and top[token] == -0.5 for token, top in zip(found.tokens, found.top_logprobs, strict=True)
    )


def test_logprobs_zero_are_of_the_token_alone(server):
    found = complete(server, max_tokens=3, logprobs=0).choices[0].logprobs
    assert [set(top) for top in found.top_logprobs] == [{token} for token in found.tokens]
    assert complete(server, max_tokens=3).choices[0].logprobs is None


@pytest.mark.parametrize("prompt", [PROMPT, TOKENS])
def test_echo_puts_the_prompt_before_its_answer(server, prompt):
    assert complete(server, prompt, max_tokens=50, echo=True).choices[0].text == PROMPT + PROMPT
    chunks = list(complete(server, prompt, max_tokens=50, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + PROMPT


def test_echo_with_logprobs_scores_the_prompt(server):
    choice = complete(server, TOKENS, max_tokens=1, echo=True, logprobs=1).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(TOKENS) + 1
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == [-0.5] * len(TOKENS)
    assert found.text_offset[len(TOKENS)] == len(PROMPT)
    assert found.text_offset == sorted(found.text_offset)
    chunks = list(complete(server, TOKENS, max_tokens=1, echo=True, logprobs=1, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == found.tokens
    assert [place for chunk in chunks for place in chunk.choices[0].logprobs.text_offset] == found.text_offset


def test_a_prompt_of_one_token_has_its_entry_though_nothing_scores_it(server):
    for max_tokens in (0, 2):
        found = complete(server, TOKENS[:1], max_tokens=max_tokens, echo=True, logprobs=1).choices[0].logprobs
        assert len(found.tokens) == 1 + max_tokens and found.token_logprobs == [None, *[-0.5] * max_tokens]
        assert found.top_logprobs[0] is None


def test_nothing_new_but_the_prompt_scored(server):
    for prompts in (TOKENS, [TOKENS, TOKENS[:2]]):
        answer = complete(server, prompts, max_tokens=0, echo=True, logprobs=1)
        assert answer.choices[0].text == PROMPT and answer.usage.completion_tokens == 0
        assert len(answer.choices[0].logprobs.tokens) == len(TOKENS)
    assert complete(server, max_tokens=0, echo=True).choices[0].text == PROMPT


def test_a_grammar_holds_for_completions_too(server):
    answer = complete(server, "{}", max_tokens=9, extra_body={"response_format": {"type": "json_object"}})
    assert answer.choices[0].text == "{}"
