"""Agents against the real engine: a tiny random model calls tools because a grammar makes it."""

import asyncio
import json
import sys
from typing import Annotated, Literal

import agents
import pytest
import torch
from openai import AsyncOpenAI
from pydantic import Field
from serve_tools import LiveServer
from tool_templates import HERMES, MISTRAL_ARGS, tokenizer_with
from transformers import LlamaConfig, LlamaForCausalLM

CITIES = ("Paris", "Rome")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "In a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "description": "The time"}},
]
SUNNY = {"type": "json_schema", "json_schema": {"name": "sky", "schema": {"enum": ["sunny", "rainy"]}}}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Of an engine with a model that knows nothing; its vocabulary has the special tokens of all families."""
    folder, words = tmp_path_factory.mktemp("model"), tokenizer_with(HERMES)
    torch.manual_seed(0)
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=4096, **ends, **SHAPE)).save_pretrained(
        folder
    )
    words.save_pretrained(folder)
    load = {"target": str(folder), "draft": "self", "dtype": "float32"}
    limits = {"texts": 8, "slots": 16384, "past_tokens": 0}
    options = {"name": "tiny", "load": load, "graph": {"cost": "flat"}, "limits": limits}
    return [sys.executable, "-m", "draftgraph.serve.engine_process", json.dumps(options)]


@pytest.fixture(scope="module")
def server(command):
    with LiveServer(command, words=tokenizer_with(HERMES), model_name="tiny") as server:
        yield server


def ask(server, messages, **more):
    """The answer's message, whole or put together by OpenAI's own client, and why it ended."""
    options = {"model": "tiny", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200} | more
    if more.pop("stream", False):
        options.pop("stream")
        with server.client().chat.completions.stream(**options) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = server.client().chat.completions.create(**options).choices[0]
    return choice.message, choice.finish_reason


def check_arguments(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in CITIES and arguments["days"] in range(1, 8) and len(arguments) == 2
    else:
        assert call.function.name == "clock" and arguments == {}


def three_turns(server, stream):
    """Asks, calls, asks again with the results, and so on; the last turn is text."""
    messages, calls = [{"role": "user", "content": "How is the weather?"}], []
    for more in (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "none", "response_format": SUNNY},
    ):
        message, reason = ask(server, messages, stream=stream, **more)
        messages.append(message.to_dict())
        for call in message.tool_calls or []:
            check_arguments(call)
            calls.append((call.function.name, call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"})
        assert reason == ("tool_calls" if message.tool_calls else "stop")
    assert messages[-1]["content"] in ('"sunny"', '"rainy"') and len(messages) == 6
    return calls


class TestOpenAIsClient:
    def test_a_loop_of_three_turns_whole_and_streamed(self, server):
        whole, streamed = (three_turns(server, stream) for stream in (False, True))
        assert len(whole) == 2 and whole[1][0] == "weather" and whole == streamed

    def test_several_calls_where_some_are_required(self, server):
        counts = set()
        for seed in range(6):
            options = {"tool_choice": "required", "temperature": 1, "seed": seed}
            message, reason = ask(server, [{"role": "user", "content": "All of them"}], **options)
            if reason == "tool_calls":
                for call in message.tool_calls:
                    check_arguments(call)
                counts.add(len(message.tool_calls))
        assert max(counts) > 1

    @pytest.mark.parametrize("mode", ["off", "graph", "tree", "chain"])
    def test_every_mode_forces_the_same_call(self, server, mode):
        messages = [{"role": "user", "content": "How is the weather?"}]
        one = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.8, "seed": 4}
        calls = [
            ask(server, messages, extra_body={"draftgraph": {"mode": name}}, **one)[0].tool_calls[0].function
            for name in ("auto", mode)
        ]
        assert calls[0] == calls[1]

    def test_calls_that_special_tokens_mark(self, command):
        with LiveServer(command, words=tokenizer_with(MISTRAL_ARGS), model_name="tiny") as server:
            whole, streamed = (three_turns(server, stream) for stream in (False, True))
            assert len(whole) == 2 and whole == streamed


class TestAgents:
    """openai-agents, as its users run it."""

    def agent(self, server, api):
        asked = []

        @agents.function_tool
        def weather(city: Literal["Paris", "Rome"], days: Annotated[int, Field(ge=1, le=7)]) -> str:
            """The weather of a city."""
            asked.append((city, days))
            return f"{days} days of sun in {city}"

        end = {"min_tokens": 8, "logit_bias": {tokenizer_with(HERMES).eos_token_id: 100}}  # its text would never end
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = agents.Agent(
            name="Forecaster",
            instructions="Look at the weather first.",
            tools=[weather],
            model=api("tiny", client),
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100, extra_body=end
            ),
        )
        return made, asked

    @pytest.mark.parametrize("api", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_an_agent_completes_its_run(self, server, streamed, api):
        agents.set_tracing_disabled(True)
        agent, asked = self.agent(server, api)

        async def run():
            if not streamed:
                return await agents.Runner.run(agent, "Will it rain?")
            result = agents.Runner.run_streamed(agent, "Will it rain?")
            kinds = [event.type async for event in result.stream_events()]
            assert kinds.count("run_item_stream_event") >= 3  # the call, its result and the answer
            return result

        result = asyncio.run(run())
        ((city, days),) = asked
        assert city in CITIES and days in range(1, 8)
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert result.new_items[1].output == f"{days} days of sun in {city}"
        assert result.final_output and isinstance(result.final_output, str)
