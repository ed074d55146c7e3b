"""/v1/responses through OpenAI's own client, whole and streamed, against a model that repeats what the user said."""

import json
import os
import signal

import httpx
import openai
import pytest
from pydantic import BaseModel
from serve_tools import SLOW, LiveServer, tokenizer

from draftgraph.serve.responses import ResponsesRequest, chat_of

SAID = "the cat sat on the mat, 日本語 and 🐈"


@pytest.fixture(scope="module")
def server():
    with LiveServer(aliases=("gpt-4o",)) as server:
        yield server


@pytest.fixture(scope="module")
def calling():
    with LiveServer(tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def ask(server, input=SAID, **options):
    return server.client().responses.create(input=input, **{"model": "fake", "temperature": 0} | options)


def checked(response):
    """As strictly as its type says: the client itself lets everything pass."""
    return openai.types.responses.Response.model_validate(response.model_dump(mode="json", by_alias=True))


def refused(server, param, *words, **fields) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and all(word in error["message"] for word in words), error


class TestWhole:
    def test_a_text_is_answered(self, server):
        found = checked(ask(server, model="gpt-4o", metadata={"a": "b"}))
        assert found.output_text == SAID and found.status == "completed" and found.model == "gpt-4o"
        assert found.id.startswith("resp_") and found.object == "response" and found.store is False
        (message,) = found.output
        assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        assert found.usage.input_tokens_details.cached_tokens == 2 and found.usage.draftgraph["steps"] > 0
        assert found.metadata == {"a": "b"} and found.system_fingerprint.startswith("fp_")

    def test_it_is_what_a_chat_would_be_answered(self, server):
        sampled = {"temperature": 1, "extra_body": {"seed": 5, "top_k": 7}}
        chat = server.client().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": SAID}], max_tokens=9, **sampled
        )
        found = checked(ask(server, max_output_tokens=9, **sampled))
        assert found.output_text == chat.choices[0].message.content
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert found.output[0].status == "incomplete" and found.usage.output_tokens == 9

    def test_items_become_messages(self, server):
        items = [
            {"role": "developer", "content": "be kind"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "id": 1}]},
            {"role": "user", "content": "again"},
        ]
        found = ask(server, items, instructions="short")
        assert found.output_text == "again" and found.instructions == "short"
        messages = [
            {"role": "system", "content": "short"},
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "again"},
        ]
        prompt = tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert found.usage.input_tokens == len(prompt)

    def test_an_answer_can_be_sent_back(self, server):
        first = ask(server, "one")
        found = ask(server, [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}])
        assert found.output_text == "two" and found.usage.input_tokens > first.usage.input_tokens

    def test_log_probabilities(self, server):
        found = checked(ask(server, "cat", include=["message.output_text.logprobs"], top_logprobs=2))
        logprobs = found.output[0].content[0].logprobs
        assert "".join(one.token for one in logprobs).startswith("cat")
        assert all(len(one.top_logprobs) == 2 and one.logprob == -0.5 for one in logprobs)
        assert checked(ask(server, "cat")).output[0].content[0].logprobs == []

    def test_an_answer_without_text_is_a_message(self, server):
        (end,) = tokenizer()("c")["input_ids"]
        found = checked(ask(server, "c", extra_body={"stop_token_ids": [end]}))
        assert found.output_text == "" and found.output[0].content[0].text == ""


class TestStreams:
    ORDER = ("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta")
    ENDING = ("output_text.done", "content_part.done", "output_item.done", "completed")

    def kinds(self, events) -> list[str]:
        return [event.type.removeprefix("response.") for event in events]

    def test_events_come_in_openais_order(self, server):
        events = list(ask(server, stream=True))
        kinds = self.kinds(events)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert kinds == [*self.ORDER, *["output_text.delta"] * (len(deltas) - 1), *self.ENDING] and len(deltas) > 2
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in deltas) == SAID
        for event in events:
            type(event).model_validate(event.model_dump(mode="json", by_alias=True))
        final = checked(events[-1].response)
        assert final.output_text == SAID and final.status == "completed" and final.usage.output_tokens > 2
        assert events[0].response.status == events[1].response.status == "in_progress"
        assert events[2].item.content == [] and events[3].part.text == ""
        assert {event.item_id for event in deltas} == {events[2].item.id} == {final.output[0].id}

    def test_the_clients_own_accumulation_agrees(self, server):
        with server.client().responses.stream(model="fake", input=SAID, temperature=0) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert snapshots[-1] == SAID == final.output_text

    def test_an_answer_that_is_cut_is_incomplete(self, server):
        events = list(ask(server, stream=True, max_output_tokens=3))
        assert self.kinds(events)[-1] == "incomplete" and self.kinds(events)[-2] == "output_item.done"
        assert events[-2].item.status == checked(events[-1].response).status == "incomplete"

    def test_a_failure_is_the_last_event(self, server):
        events = []
        for event in ask(server, f"{SLOW} and so on", stream=True, extra_body={"ignore_eos": True}):
            events.append(event)
            if len(events) == 6:
                os.kill(server.engine.process_id, signal.SIGKILL)
        assert events[-1].type == "response.failed"
        failed = checked(events[-1].response)
        assert (failed.status, failed.error.code) == ("failed", "server_error") and "signal 9" in failed.error.message
        server.wait_until_ready()

    def test_a_stream_ends_as_openais_do(self, server):
        body = {"input": "a", "stream": True, "temperature": 0}
        text = httpx.post(f"{server.url}/v1/responses", json=body).text
        assert text.startswith("event: response.created\ndata: {") and "[DONE]" not in text and text.endswith("}\n\n")
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["type"] == "response.completed"


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


class Cat(BaseModel):
    name: str


class TestFormats:
    def test_a_format_is_the_grammar_of_a_chat(self, server):
        bad = {"type": "json_schema", "name": "x", "schema": {"const": "refuse"}}
        refused(server, None, "this grammar is refused", text={"format": bad})
        refused(server, "response_format", text={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}})
        given = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
        found = checked(ask(server, text={"format": given}))
        assert found.text.format.type == "json_schema" and found.text.format.schema_ == SCHEMA
        assert ask(server, text={"format": {"type": "text"}}).output_text == SAID

    def test_the_client_parses_what_it_asked_for(self, server):
        found = server.client().responses.parse(model="fake", input='{"name": "Tom"}', temperature=0, text_format=Cat)
        assert found.output_parsed == Cat(name="Tom")


WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TOOLS = [WEATHER | {"type": "function"}]
CALLS = """So.<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>"""


class TestCalls:
    def test_functions_are_called(self, calling):
        found = checked(ask(calling, CALLS, tools=TOOLS))
        text, *calls = found.output
        assert text.content[0].text == found.output_text == "So." and found.status == "completed"
        assert [(call.type, call.name, call.status) for call in calls] == [
            ("function_call", "weather", "completed")
        ] * 2
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
        assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
        assert found.tools[0].name == "weather" and found.tool_choice == "auto"

    def test_calls_are_streamed(self, calling):
        with calling.client().responses.stream(model="fake", input=CALLS, temperature=0, tools=TOOLS) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = ask(calling, CALLS, tools=TOOLS)
        shown = [[(one.type, getattr(one, "arguments", "")) for one in answer.output] for answer in (final, whole)]
        assert shown[0] == shown[1]
        for call in final.output[1:]:
            own = [event for event in events if getattr(event, "item_id", None) == call.id]
            pieces = [event.delta for event in own if event.type.endswith("delta")]
            assert "".join(pieces) == call.arguments == own[-1].arguments
            assert own[-1].type == "response.function_call_arguments.done"
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert added == ["message", "function_call", "function_call"]

    def test_results_go_back_in_a_loop(self, calling):
        items = [{"role": "user", "content": CALLS}]
        answer = ask(calling, items, tools=TOOLS)
        items += answer.output
        for call in answer.output[1:]:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        items.append({"role": "user", "content": "thanks"})
        found = ask(calling, items, tools=TOOLS)
        assert found.output_text == "thanks" and found.usage.input_tokens > answer.usage.input_tokens

    def test_what_was_called_is_what_a_chat_would_tell(self):
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call", "call_id": "c3", "name": "h", "arguments": "{}"},
        ]
        chat = chat_of(ResponsesRequest(input=items, tools=TOOLS, tool_choice={"type": "function", "name": "f"}))
        user, said, result, called = (message.model_dump() for message in chat.messages)
        assert user == {"role": "user", "content": "hi"}
        assert said["content"] == [{"type": "output_text", "text": "so"}] and said["reasoning_content"] == "hm"
        assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
        assert result == {"role": "tool", "tool_call_id": "c1", "content": "1"}
        assert (called["content"], called["tool_calls"][0]["function"]) == (None, {"name": "h", "arguments": "{}"})
        assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
        assert chat.tools == [
            {"type": "function", "function": {n: WEATHER[n] for n in ("name", "parameters", "strict")}}
        ]

    def test_a_call_that_must_be_made_is_the_grammar_of_a_chat(self, calling):
        refused(calling, "tool_choice", "'g'", tools=TOOLS, tool_choice={"type": "function", "name": "g"})
        assert ask(calling, tools=TOOLS, tool_choice="required").tool_choice == "required"

    def test_reasoning_is_an_item_of_its_own(self, calling):
        found = checked(ask(calling, "<think>hm</think>yes"))
        reasoning, _ = found.output
        assert (reasoning.type, reasoning.content[0].text, found.output_text) == ("reasoning", "hm", "yes")
        events = list(ask(calling, "<think>hm</think>yes", stream=True))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert "reasoning_text.delta" in kinds and "reasoning_text.done" in kinds
        for event in events:
            type(event).model_validate(event.model_dump(mode="json", by_alias=True))


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id", "no answers are kept"),
            ({"background": True}, "background", "no answers are kept"),
            ({"conversation": "conv_1"}, "conversation", "no answers are kept"),
            ({"prompt": {"id": "p"}}, "prompt", "no prompts are kept"),
            ({"truncation": "auto"}, "truncation", "shorten"),
            ({"text": {"verbosity": "high"}}, "text.verbosity", "not supported"),
            ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
            ({"max_output_tokens": 0}, "max_output_tokens", ""),
            ({"n": 2}, "n", "no such field"),
            ({"input": []}, "input", "empty"),
            ({"input": 5}, "input", ""),
            ({"input": [{"content": "a"}]}, "input.0", "role"),
            ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "item_reference"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input.0", "call_id, name and arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0", "call_id and output"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages.0.content", "text only"),
            ({"tools": [{"type": "web_search"}]}, "tools.0", "web_search"),
            ({"draftgraph": {"trace": True}}, "draftgraph", "trace"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, server, fields, param, words):
        refused(server, param, words, **fields)

    def test_values_that_ask_for_nothing_are_accepted(self, server):
        nothing = {"store": True, "background": False, "truncation": "disabled", "max_tool_calls": 3}
        nothing |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}, "user": "u"}
        nothing |= {"text": {"verbosity": "medium"}, "parallel_tool_calls": True, "prompt_cache_key": "k"}
        assert ask(server, **nothing).output_text == SAID

    def test_answers_are_not_kept(self, server):
        with pytest.raises(openai.NotFoundError):
            server.client().responses.retrieve(ask(server).id)
