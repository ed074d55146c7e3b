"""The server with a real model behind it: OpenAI's client, faults in the middle of streams, and who sees whose."""

import asyncio
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import httpx
import openai
import pytest
import serve_tools
from conftest import REPOSITORY
from serve_tools import LiveServer

import draftgraph
from draftgraph import GraphConfig

SOAK = runpy.run_path(str(REPOSITORY / "benchmarks" / "soak.py"))
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }} {% endfor %}"
)
PROMPT = "the cat sat on a mat and saw that dog " * 4
KEYS = ("key-of-anna", "key-of-bob")


class RealServer(LiveServer):
    def __init__(self, folder: Path, orders: Path, **settings) -> None:
        self.orders = orders
        load = {"target": str(folder / "target"), "draft": str(folder / "draft"), "dtype": "float64"}
        limits = {"texts": 16, "slots": 32768, "past_tokens": 4000}
        options = {"name": "tiny", "load": load, "graph": {"cost": "flat"}, "limits": limits}
        engine = [sys.executable, str(Path(__file__).with_name("faulty_engine.py")), json.dumps(options)]
        super().__init__(engine, model_name="tiny", **settings)

    def order(self, fault: str) -> None:
        if fault == "kill":
            os.kill(self.engine.process_id, signal.SIGKILL)
            return self.orders.unlink()
        whole = self.orders.with_suffix(".new")
        whole.write_text(fault)
        whole.replace(self.orders)  # never read half written

    def wait_until_ready(self) -> None:
        serve_tools.wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == 200, 120)

    def asks(self, prompt=PROMPT, key="none", **more):
        extra = more.pop("extra_body", {}) | {"ignore_eos": True}
        given = {"model": "tiny", "max_tokens": 24, "temperature": 0} | more
        return self.client(api_key=key).completions.create(prompt=prompt, extra_body=extra, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pair")
    SOAK["save_tiny_pair"](place)
    return place


@pytest.fixture(scope="module")
def pair(folder):
    return draftgraph.load(str(folder / "target"), draft="none", dtype="float64")


@pytest.fixture(scope="module")
def started(folder, pair, tmp_path_factory):
    """A server, and one with keys: loading takes its time."""
    orders = tmp_path_factory.mktemp("orders") / "orders"
    pair.tokenizer.chat_template = TEMPLATE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_tools, "tokenizer", lambda: pair.tokenizer)
        patch.setenv("FAULTY_ENGINE", str(orders))
        with RealServer(folder, orders) as open_one, RealServer(folder, orders, api_keys=KEYS) as guarded:
            yield open_one, guarded


@pytest.fixture
def server(started):
    return started[0]


@pytest.fixture
def guarded(started):
    return started[1]


def plain(pair, prompt, max_new_tokens=24, **more):
    """By plain decoding, alone."""
    ids = pair.tokenizer(prompt)["input_ids"]
    import torch

    request = {"max_new_tokens": max_new_tokens, "eos_token_id": -1, "top_k": 0} | more
    found = pair.decoder.generate(torch.tensor([ids]), config=GraphConfig(mode="off"), **request)
    return pair.tokenizer.decode(found.new_token_ids[0], skip_special_tokens=True)


class TestOpenAIsClient:
    def test_a_completion_is_that_of_plain_decoding(self, server, pair):
        answer = server.asks()
        assert answer.choices[0].text == plain(pair, PROMPT, do_sample=False)
        assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"
        figures = answer.usage.draftgraph
        assert figures["steps"] < 24 and sum(figures["tokens_by_source"].values()) == 24

    def test_a_stream_is_the_same_text(self, server, pair):
        pieces = [chunk.choices[0].text for chunk in server.asks(stream=True)]
        assert "".join(pieces) == plain(pair, PROMPT, do_sample=False) and len(pieces) > 2

    def test_sampled_answers_depend_on_seed_and_number_alone(self, server, pair):
        sampled = {"temperature": 0.9, "seed": 7, "n": 3}
        first, second = ([choice.text for choice in server.asks(**sampled).choices] for _ in range(2))
        assert first == second and len(set(first)) == 3
        assert first[0] == plain(pair, PROMPT, do_sample=True, temperature=0.9, seed=7)

    def test_a_chat_with_tools_in_its_template(self, server, pair):
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        messages = [{"role": "user", "content": "is it cold"}]
        answer = server.client().chat.completions.create(
            model="tiny", messages=messages, tools=[tool], temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].message.content == plain(pair, "weather user: is it cold ", 12, do_sample=False)

    def test_a_stop_string_is_not_told(self, server):
        whole = server.asks().choices[0].text
        stop = whole[6:9]
        answer = server.asks(stop=[stop])
        assert answer.choices[0].text == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"
        pieces = [chunk.choices[0].text for chunk in server.asks(stop=[stop], stream=True)]
        assert "".join(pieces) == answer.choices[0].text

    def test_logprobs_of_prompt_and_answer(self, server):
        found = server.asks(prompt="the cat", max_tokens=3, logprobs=2, echo=True).choices[0].logprobs
        assert found.token_logprobs[0] is None and all(value < 0 for value in found.token_logprobs[1:])
        best = [max(top.values()) for top in found.top_logprobs[-3:]]
        assert best == pytest.approx(found.token_logprobs[-3:])

    def test_an_answer_that_conforms_to_a_schema(self, server):
        schema = {"type": "object", "properties": {"old": {"type": "boolean"}}, "required": ["old"]}
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
        }
        answer = server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=wanted, max_tokens=200, seed=1
        )
        assert answer.choices[0].finish_reason == "stop"
        assert set(json.loads(answer.choices[0].message.content)) == {"old"}

    @pytest.mark.parametrize("mode", ["auto", "graph", "tree", "chain", "off"])
    def test_every_mode_gives_the_same_text(self, server, pair, mode):
        answer = server.asks(extra_body={"draftgraph": {"mode": mode}})
        assert answer.choices[0].text == plain(pair, PROMPT, do_sample=False)

    def test_answers_keep_to_what_tokens_and_words_are_allowed(self, server, pair):
        plain = server.asks(extra_body={"return_token_ids": True}).choices[0]
        words = plain.text.split()
        for mode in ("off", "auto", "graph"):
            more = {"draftgraph": {"mode": mode}, "return_token_ids": True}
            found = server.asks(extra_body=more | {"bad_words": [words[1]]}).choices[0]
            assert words[1] not in found.text.split()
            allowed = sorted(set(plain.token_ids[2:]))
            found = server.asks(extra_body=more | {"allowed_token_ids": allowed}).choices[0]
            assert set(found.token_ids) <= set(allowed)
            ends = {"stop_token_ids": plain.token_ids[:1], "min_tokens": 5}
            assert len(server.asks(extra_body=more | ends).choices[0].token_ids) > 5

    def test_what_the_engine_refuses_is_the_clients_fault(self, server):
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            server.asks(prompt=[5, 100000])
        with pytest.raises(openai.BadRequestError, match="context"):
            server.asks(max_tokens=100000)


async def sixteen_streams(server, fault) -> list[str | BaseException]:
    """How they end if the fault comes when all of them have begun."""
    server.order("slow")  # none ends before the last has begun
    begun = asyncio.Barrier(17)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    async def read(number: int) -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"{PROMPT} {number}",
            max_tokens=400,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = (await anext(stream)).choices[0].text
        await begun.wait()
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    streams = [asyncio.create_task(read(number)) for number in range(16)]
    async with asyncio.timeout(60):
        await begun.wait()
    server.order(fault)
    return await asyncio.gather(*streams, return_exceptions=True)


class TestFaults:
    def right_again(self, server, pair):
        server.wait_until_ready()
        assert server.asks().choices[0].text == plain(pair, PROMPT, do_sample=False)

    @pytest.mark.parametrize("fault", ["kill", "cuda"])
    def test_a_dead_engine_ends_every_stream_with_an_error(self, server, pair, fault):
        before = server.engine.process_id
        ends = asyncio.run(sixteen_streams(server, fault))
        word = "signal 9" if fault == "kill" else "CUDA error"
        assert all(isinstance(end, openai.APIError) and word in str(end) for end in ends), ends
        self.right_again(server, pair)
        assert server.engine.process_id != before

    def test_out_of_memory_ends_one_stream_alone(self, server, pair):
        before = server.engine.process_id
        ends = asyncio.run(sixteen_streams(server, "memory"))
        failed = [end for end in ends if isinstance(end, BaseException)]
        assert len(failed) == 1 and "memory" in str(failed[0])
        whole = plain(pair, f"{PROMPT} 0", 400, do_sample=False)
        assert whole in ends or ends[0] is failed[0]
        self.right_again(server, pair)
        assert server.engine.process_id == before


class TestFigures:
    def test_what_is_counted_agrees_however_jobs_ended(self, server):
        whole = server.asks(max_tokens=60).choices[0].text
        stopped = server.asks(max_tokens=60, stop=[whole[20:24]])
        assert stopped.choices[0].finish_reason == "stop" and stopped.usage.prompt_tokens_details.cached_tokens > 0
        assert sum(stopped.usage.draftgraph["drafted_by_source"].values()) > 0
        with server.asks(max_tokens=400, stream=True) as gone:
            next(iter(gone))
        serve_tools.wait_until(lambda: server.engine.figures["running"] == 0)
        serve_tools.assert_figures_agree(server.figures())


class TestTenants:
    def cached(self, answer):
        return answer.usage.prompt_tokens_details.cached_tokens

    def test_without_the_right_key_there_is_no_answer(self, guarded):
        for key in ("none", "key-of-ann", "KEY-OF-ANNA"):
            with pytest.raises(openai.AuthenticationError):
                guarded.asks(key=key)

    def test_a_beginning_is_known_to_its_own_key_alone(self, guarded):
        prompt = "some old tree by water near its red house " * 8
        assert self.cached(guarded.asks(prompt, KEYS[0])) == 0
        assert self.cached(guarded.asks(prompt, KEYS[0])) > 50
        assert self.cached(guarded.asks(prompt, KEYS[1])) == 0

    def test_a_beginning_is_known_to_its_own_salt_alone(self, guarded):
        prompt = "many small fish swim past one old stone bridge " * 8
        salts = ("first", "first", "second", None)
        found = [self.cached(guarded.asks(prompt, KEYS[0], extra_body={"cache_salt": salt})) for salt in salts]
        assert found[1] > 50 and found[0] == found[2] == found[3] == 0

    def test_past_answers_are_copied_by_their_own_key_alone(self, guarded):
        asked = {"prompt": "run far from that", "max_tokens": 60, "temperature": 1.0, "seed": 3}
        copied = []
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            answer = guarded.asks(key=key, **asked)
            copied.append(answer.usage.draftgraph["tokens_by_source"].get("copied", 0))
        assert copied[1] > copied[0] + 10 and copied[2] < copied[1] - 10
