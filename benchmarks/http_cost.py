"""What does the server cost beside the engine? python benchmarks/http_cost.py

A tiny model behind `draftgraph serve`, streams from one client and from many: processor time of the API's process for
every token, and how many tokens come per second, beside those of the scheduler alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

import draftgraph
from draftgraph import GraphConfig
from draftgraph.batching import Job, Limits, Scheduler

SOAK = runpy.run_path(str(Path(__file__).with_name("soak.py")))
PROMPT = "the cat sat on a mat and saw that dog"
BODY = {"model": "soak", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def streams(url: str, count: int, tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one() -> None:
            async with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": tokens}) as answer:
                async for _ in answer.aiter_lines():
                    pass

        await asyncio.gather(*(one() for _ in range(count)))


def through_http(url: str, process: int, count: int, tokens: int) -> dict[str, Any]:
    asyncio.run(streams(url, count, 8))
    start, used = time.perf_counter(), processor_seconds(process)
    asyncio.run(streams(url, count, tokens))
    seconds, used = time.perf_counter() - start, processor_seconds(process) - used
    return {"tokens per second": count * tokens / seconds, "API microseconds per token": 1e6 * used / (count * tokens)}


def without(pair: Any, count: int, tokens: int) -> dict[str, Any]:
    scheduler = Scheduler(pair, Limits(texts=64), GraphConfig(mode="off"))
    prompt = tuple(pair.tokenizer(PROMPT)["input_ids"])
    for number in range(count):
        scheduler.submit(Job(str(number), prompt, max_tokens=tokens, ignore_eos=True))
    start = time.perf_counter()
    while scheduler.busy:
        scheduler.step()
    return {"tokens per second": count * tokens / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        target, _ = SOAK["save_tiny_pair"](Path(place))
        pair = draftgraph.load(str(target), draft="none")
        with SOAK["server"]([str(target), "--draft", "none", "--mode", "off"]) as (url, process):
            for count in map(int, given.streams.split(",")):
                found = {
                    "http": through_http(url, process, count, given.tokens),
                    "alone": without(pair, count, given.tokens),
                }
                print(json.dumps({"streams": count} | found), flush=True)


if __name__ == "__main__":
    main()
