"""Many clients at once, some of which go away: every answer that is complete is the one a single client gets.

DRAFTGRAPH_LOAD_REQUESTS sets how many requests; `make soak` asks for more.
"""

import asyncio
import os
import random

import openai
import pytest
from serve_tools import FakeJob, LiveServer, answer_of, tokenizer, wait_until

from draftgraph.text import decode

CLIENTS, REQUESTS = 64, int(os.environ.get("DRAFTGRAPH_LOAD_REQUESTS", "256"))


@pytest.fixture(scope="module")
def server():
    with LiveServer(max_waiting=512) as server:
        yield server


def made_up(dice: random.Random) -> dict:
    words = dice.choices(["the", "cat", "sat", "日本", "🐈", "on"], k=dice.randint(1, 40))
    sampled = dice.random() < 0.5
    return {
        "prompt": " ".join(words),
        "max_tokens": dice.randint(1, 60),
        "temperature": 0.8 if sampled else 0.0,
        "seed": dice.randrange(1000),
        "stop": dice.choice([None, "cat", ["sat", "🐈"]]),
    }


def expected(asked: dict) -> str:
    job = {"tokens": tokenizer()(asked["prompt"])["input_ids"], "sample": 0} | asked
    tokens = answer_of(FakeJob(job), 320)[: asked["max_tokens"]]
    tokens = tokens[: tokens.index(0)] if 0 in tokens else tokens
    text = decode(tokenizer(), tokens)
    stops = [asked["stop"]] if isinstance(asked["stop"], str) else asked["stop"] or []
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


async def ask(client, asked: dict, leaves: bool, streams: bool) -> str | None:
    """The answer, or None if the client left before it was complete."""
    asked = {name: value for name, value in asked.items() if value is not None}
    if leaves and not streams:
        try:
            return (await client.with_options(timeout=0.005).completions.create(model="fake", **asked)).choices[0].text
        except openai.APITimeoutError:
            return None
    if not streams:
        return (await client.completions.create(model="fake", **asked)).choices[0].text
    text = ""
    async with await client.completions.create(model="fake", stream=True, **asked) as stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves:
                return None
    return text


async def storm(server) -> list[tuple[dict, str | None]]:
    dice, places = random.Random(7), asyncio.Semaphore(CLIENTS)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    async def one(asked: dict, leaves: bool, streams: bool) -> tuple[dict, str | None]:
        async with places:
            return asked, await ask(client, asked, leaves, streams)

    requests = [one(made_up(dice), dice.random() < 0.2, dice.random() < 0.5) for _ in range(REQUESTS)]
    return await asyncio.gather(*requests)


def test_every_complete_answer_is_that_of_a_single_client_and_nothing_is_left_behind(server):
    answers = asyncio.run(storm(server))
    complete = [(asked, text) for asked, text in answers if text is not None]
    assert len(complete) > 0.7 * REQUESTS
    for asked, text in complete:
        assert text == expected(asked), asked
    wait_until(lambda: server.engine.under_way == 0)
    wait_until(lambda: server.engine.figures["running"] == server.engine.figures["slots_used"] == 0)
