"""Chats through OpenAI's own client, against a live server whose model repeats what the user said."""

import asyncio
import math

import httpx
import openai
import pytest
from serve_tools import WINDOW, LiveServer, tokenizer

SAID = "the cat sat on the mat, 日本語 and 🐈‍⬛"


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def ask(server, text=SAID, **options):
    options = {"temperature": 0, "messages": [{"role": "user", "content": text}]} | options
    return server.client().chat.completions.create(model="fake", **options)


def said(answer) -> str:
    return answer.choices[0].message.content


def streamed(chunks, index=0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat_is_answered(server):
    answer = ask(server)
    assert said(answer) == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", "fake") and answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same_piece_by_piece(server):
    chunks = list(ask(server, stream=True))
    assert streamed(chunks) == SAID
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert len(chunks) > 5 and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_wire_format_of_a_stream(server):
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1]) and events[-1] == ""
    assert events[-2] == "data: [DONE]"


def test_usage_counts_tokens_and_tells_of_drafting(server):
    tokens = len(tokenizer()(SAID)["input_ids"])
    usage = ask(server).usage
    assert usage.completion_tokens == tokens + 1  # and the end
    assert usage.prompt_tokens == tokens + 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 2
    figures = usage.draftgraph
    assert sum(figures["tokens_by_source"].values()) == usage.completion_tokens
    assert figures["tokens_per_pass"] == usage.completion_tokens / figures["steps"] > 1
    assert all(
        figures["drafted_by_source"].get(source, 0) >= count > 0
        for source, count in figures["tokens_by_source"].items()
        if source != "target"
    )
    assert 0 < figures["first_token_seconds"] <= figures["seconds"]


def test_usage_ends_a_stream_that_asks_for_it(server):
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == ask(server).usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "rest"),
    [("mat", "the cat sat on the "), (["🐈", "sat"], "the cat "), ("never", SAID), ("on the", "the cat sat ")],
)
def test_nothing_from_a_stop_string_on_is_sent(server, stop, rest, stream):
    answer = ask(server, stop=stop, stream=stream)
    assert (streamed(answer) if stream else said(answer)) == rest


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ended_by_a_stop_string_tells_as_much_of_drafting_as_any_other(server, stream):
    asked = {"stop": "mat", "extra_body": {"ignore_eos": True}}
    answer = ask(server, **asked, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    usage = (list(answer)[-1] if stream else answer).usage
    assert usage.prompt_tokens_details.cached_tokens == 2
    figures = usage.draftgraph
    assert sum(figures["drafted_by_source"].values()) >= usage.completion_tokens - figures["steps"] > 0
    assert figures["queue_seconds"] > 0


def test_a_stop_string_frees_the_engine_and_is_counted_to(server):
    answer = ask(server, stop="sat", extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "stop"
    tokens = tokenizer()(SAID)["input_ids"]
    needed = next(n for n in range(len(tokens)) if "sat" in tokenizer().decode(tokens[:n]))
    assert answer.usage.completion_tokens == needed


def test_max_tokens_by_either_name(server):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(server, **{name: 3})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
        assert SAID.startswith(said(answer)) and said(answer)


def test_without_a_limit_an_answer_fills_the_window(server):
    answer = ask(server, "ab", extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == WINDOW and answer.choices[0].finish_reason == "length"


def test_ignore_eos_goes_on_past_the_end(server):
    answer = ask(server, "ab ", max_tokens=12, extra_body={"ignore_eos": True})
    assert said(answer).startswith("ab ab ") and answer.usage.completion_tokens == 12


def test_stop_token_ids_end_an_answer_without_their_text(server):
    (token,) = tokenizer()("c")["input_ids"]
    assert said(ask(server, "abcde", extra_body={"stop_token_ids": [token]})) == "ab"


def test_a_seed_gives_the_same_answer_and_another_another(server):
    first, again, other = (ask(server, temperature=1, seed=seed, max_tokens=8) for seed in (5, 5, 6))
    assert said(first) == said(again) != said(other)
    assert first.usage.draftgraph["seed"] == 5


def test_without_a_seed_answers_differ_and_can_be_had_again(server):
    first, other = (ask(server, temperature=1, max_tokens=8) for _ in range(2))
    assert said(first) != said(other)
    assert said(ask(server, temperature=1, max_tokens=8, seed=first.usage.draftgraph["seed"])) == said(first)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_any_seed_of_64_bits_is_taken(server, seed):
    assert said(ask(server, temperature=1, seed=seed, max_tokens=4)) == said(
        ask(server, temperature=1, seed=seed, max_tokens=4)
    )


def test_n_answers_differ_and_the_first_is_the_single_one(server):
    several = ask(server, temperature=1, seed=3, n=3, max_tokens=8)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len(set(texts)) == 3
    single = ask(server, temperature=1, seed=3, max_tokens=8)
    assert texts[0] == said(single)
    assert several.usage.completion_tokens == 24 and several.usage.prompt_tokens == single.usage.prompt_tokens
    chunks = list(ask(server, temperature=1, seed=3, n=3, max_tokens=8, stream=True))
    assert [streamed(chunks, index) for index in range(3)] == texts


def test_logprobs_are_those_of_the_tokens(server):
    content = ask(server, "the cat", logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert "".join(one.token for one in content) == "the cat<|end|>"
    assert [bytes(one.bytes).decode() for one in content] == [one.token for one in content]
    assert all(one.logprob == -0.5 and len(one.top_logprobs) == 3 for one in content)
    assert [one.logprob for one in content[0].top_logprobs] == [-0.5, -1.5, -2.5]
    assert content[0].top_logprobs[0].token == content[0].token
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(server).choices[0].logprobs is None


def test_streamed_logprobs_are_the_same_and_stop_with_the_text(server):
    options = {"logprobs": True, "top_logprobs": 1, "stop": " mat"}
    whole = ask(server, **options).choices[0].logprobs.content
    chunks = list(ask(server, stream=True, **options))
    parts = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert parts == whole
    assert "".join(one.token for one in whole) == "the cat sat on the"


def test_logit_bias_reaches_the_engine(server):
    (token,) = tokenizer()("x")["input_ids"]
    assert said(ask(server, "abc", logit_bias={str(token): 100})) == "xxx"


def test_tools_and_template_arguments_reach_the_template(server):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    plain, shouted = ask(server), ask(server, extra_body={"chat_template_kwargs": {"shout": True}})
    with_tools, without = ask(server, tools=[tool]), ask(server, tools=[tool], tool_choice="none")
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens == without.usage.prompt_tokens
    assert shouted.usage.prompt_tokens == plain.usage.prompt_tokens + 2 + len(tokenizer()("shout")["input_ids"])


def test_content_in_parts_is_one_text(server):
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    assert said(ask(server, messages=[{"role": "user", "content": parts}])) == "the cat\nsat"


def test_a_conversation_with_tool_calls_is_taken(server):
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "cats"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "cats?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "furry"},
        {"role": "user", "content": "so?"},
    ]
    assert said(ask(server, messages=messages)) == "so?"


@pytest.mark.parametrize(
    "wanted",
    [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}],
)
def test_response_formats_are_taken(server, wanted):
    assert said(ask(server, response_format=wanted)) == SAID


def test_the_trace_tells_where_tokens_came_from(server):
    chunks = list(ask(server, stream=True, extra_body={"draftgraph": {"trace": True, "mode": "graph", "k": 3}}))
    traces = [chunk.draftgraph for chunk in chunks if hasattr(chunk, "draftgraph")]
    tokens = [token for trace in traces for token in trace["tokens"]]
    assert "".join(token["text"] for token in tokens) == SAID
    assert {"target", "draft", "merged"} <= {token["source"] for token in tokens}
    node = traces[1]["step"]["nodes"][1]
    assert node["text"] == tokenizer().decode([node["token"]]) and traces[0]["step"]["position"] == 0


def test_many_clients_at_once_each_get_their_own_answer(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def one(number: int) -> bool:
        text = f"number {number} " * (1 + number % 7)
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": text}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(one(number) for number in range(48)))

    assert all(asyncio.run(all_of_them()))


def test_models_are_listed(server):
    (model,) = server.client().models.list().data
    assert (model.id, model.max_model_len) == ("fake", WINDOW)
    assert server.client().models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other/model")


def test_the_server_says_that_it_lives_and_is_ready(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    ready = httpx.get(f"{server.url}/ready").json()
    assert ready["status"] == "ready" and ready["context_window"] == WINDOW
    page = httpx.get(f"{server.url}/docs").text
    assert "POST /v1/chat/completions" in page and "max_completion_tokens" in page and "http" not in page
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)
    assert not any("422" in operation["responses"] for path in paths.values() for operation in path.values())


def test_very_low_temperatures_are_greedy(server):
    assert said(ask(server, temperature=math.ulp(0.0))) == SAID
