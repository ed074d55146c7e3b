"""Many clients for a long time: python benchmarks/soak.py --minutes 30 --clients 64

Starts `draftgraph serve` and asks it for greedy and sampled texts of mixed lengths, streamed and whole, from many
clients at once, some of which go away in the middle. Every answer that came to its end must be that of plain decoding,
computed here beforehand one text at a time; in the end no slot may be taken, and memory must not have grown since
minute five.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SETTLED = 5 * 60.0  # seconds after which memory should not grow any more
GROWTH = 0.02  # of memory since then
SENTENCE = "the cat sat on a mat and saw that dog run far from its red house near some old tree by water"
WORDS = SENTENCE.split()
PORT = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Question:
    """What a client asks, and what it must be told."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    expected: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "expected"}


@dataclass
class Outcome:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, str]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    slots_left: float = 0.0

    @property
    def growth(self) -> float | None:
        """Of memory, from the first minutes to the last: medians of a few samples."""
        settled = [size for at, size in self.memory if at >= SETTLED]
        if len(settled) < 20:
            return None
        early, late = (sorted(part)[5] for part in (settled[:10], settled[-10:]))
        return late / early - 1

    @property
    def problems(self) -> list[str]:
        found = [f"{len(self.wrong)} wrong answers, the first: {self.wrong[0]}"] if self.wrong else []
        found += [f"{count} {name}" for name, count in self.counts.items() if name not in ("same", "left")]
        if self.slots_left:
            found.append(f"{self.slots_left:.0f} slots are still taken")
        if (growth := self.growth) is not None and growth > GROWTH:
            found.append(f"memory grew by {growth:.1%}")
        return found


def questions(pair: Any, count: int, longest: int, seed: int = 0) -> list[Question]:
    """With the answers of plain decoding, one text at a time."""
    from draftgraph import GraphConfig

    draw, found = random.Random(seed), []
    beginnings = [" ".join(draw.choices(WORDS, k=60)) for _ in range(4)]  # that several prompts share
    for number in range(count):
        words = " ".join(draw.choices(WORDS, k=draw.choice([1, 5, 20, 80])))
        prompt = draw.choice(beginnings) + " " + words if draw.random() < 0.4 else words
        asked = Question(prompt, draw.randint(1, longest), draw.choice([0.0, 0.0, 0.7, 1.0]), number)
        plain = pair.generate(
            prompt,
            raw=True,
            config=GraphConfig(mode="off"),
            max_new_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            top_k=0,
        )
        found.append(Question(**asked.body, expected=plain.text))
    return found


class Clients:
    """Ask until the time is over."""

    def __init__(self, url: str, asked: list[Question], outcome: Outcome, leaving: float) -> None:
        self.url, self.asked, self.outcome, self.leaving = url, asked, outcome, leaving

    async def run(self, clients: int, requests: int, until: float) -> None:
        """At least so many requests in all, and on until then."""
        left = iter(range(requests))
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:

            async def one(number: int) -> None:
                draw = random.Random(number)
                while next(left, None) is not None or time.monotonic() < until:
                    try:
                        await self._ask(client, draw)
                    except (httpx.HTTPError, ValueError) as error:
                        self.outcome.counts[f"{type(error).__name__}: {str(error)[:80]}"] += 1

            await asyncio.gather(*(one(number) for number in range(clients)))

    async def _ask(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        question, leaves = draw.choice(self.asked), draw.random() < self.leaving
        body = question.body | {"model": "soak", "stream": draw.random() < 0.5}
        if leaves and not body["stream"]:
            try:
                await asyncio.wait_for(client.post("/v1/completions", json=body), draw.uniform(0.0, 0.5))
            except TimeoutError:
                self.outcome.counts["left"] += 1
            return
        if body["stream"]:
            await self._stream(client, question, body, draw.randint(0, 5) if leaves else None)
            return
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            self._check(question, answer.json()["choices"][0]["text"])
        else:
            self.outcome.counts[f"status {answer.status_code}: {answer.text[:80]}"] += 1

    async def _stream(self, client: httpx.AsyncClient, question: Question, body: Any, chunks: int | None) -> None:
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if chunks == 0:
                    self.outcome.counts["left"] += 1
                    return
                chunks = None if chunks is None else chunks - bool(line)
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ValueError(chunk["error"]["message"])
                    text += "".join(choice["text"] for choice in chunk["choices"])
        self._check(question, text)

    def _check(self, question: Question, text: str) -> None:
        if text == question.expected:
            self.outcome.counts["same"] += 1
        else:
            self.outcome.wrong.append({"prompt": question.prompt, "expected": question.expected, "told": text})


@contextmanager
def server(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """A running one: its address, and its process."""
    command = [sys.executable, "-m", "draftgraph", "serve", *arguments, "--port", "0", "--name", "soak"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield address(process, log), process.pid
        finally:
            process.terminate()
            process.wait(60)


def address(process: subprocess.Popen[bytes], log: Any) -> str:
    for _ in range(600):
        time.sleep(0.5)
        log.seek(0)
        said = log.read()
        if process.poll() is not None:
            raise SystemExit(f"the server did not start: {said[-2000:]}")
        if (found := PORT.search(said)) and httpx.get(f"{found[0]}/ready").status_code == 200:
            return found[0]
    raise SystemExit(f"the server is not ready: {said[-2000:]}")


def resident(root: int) -> int:
    """Bytes of a process and all below it."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = (int(fields[1]), int(fields[21]) * 4096)
        except OSError:
            continue
    family = {root}
    while more := {process for process, (parent, _) in parents.items() if parent in family} - family:
        family |= more
    return sum(parents[process][1] for process in family if process in parents)


async def watch(outcome: Outcome, process: int, every: float = 5.0) -> None:
    start = time.monotonic()
    while True:
        outcome.memory.append((time.monotonic() - start, resident(process)))
        await asyncio.sleep(every)


def slots_taken(url: str) -> float:
    """When everything has come to rest."""
    for _ in range(40):
        found = re.search(r"^draftgraph_slots_used ([0-9.e+]+)", httpx.get(f"{url}/metrics").text, re.M)
        taken = float(found[1]) if found else float("nan")
        if not taken:
            return taken
        time.sleep(0.25)
    return taken


def soak(url: str, process: int, asked: list[Question], clients: int, requests: int, minutes: float) -> Outcome:
    outcome = Outcome()

    async def main() -> None:
        watching = asyncio.create_task(watch(outcome, process))
        await Clients(url, asked, outcome, leaving=0.2).run(clients, requests, time.monotonic() + 60 * minutes)
        watching.cancel()

    asyncio.run(main())
    outcome.slots_left = slots_taken(url)
    return outcome


def save_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """A random Llama with a byte-level tokenizer, and a draft that mostly agrees with it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([SENTENCE] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **settings, **sizes))
    places = folder / "target", folder / "draft"
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)
        for place, noise in zip(places, (0.0, 0.1), strict=True):
            for weight in model.parameters():
                weight.add_(noise * weight.std(unbiased=False) * torch.randn_like(weight))
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
    return places


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--questions", type=int, default=128, help="different ones")
    parser.add_argument("--longest", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny", help="a random one in float64, or ours")
    given = parser.parse_args()
    import draftgraph

    with tempfile.TemporaryDirectory() as place:
        arguments = []
        if given.model == "tiny":
            target, draft = save_tiny_pair(Path(place))
            arguments = [str(target), "--draft", str(draft), "--dtype", "float64"]
            pair = draftgraph.load(str(target), draft="none", dtype="float64")
        else:
            pair = draftgraph.load(draft="none")
        asked = questions(pair, given.questions, given.longest)
        with server(arguments) as (url, process):
            outcome = soak(url, process, asked, given.clients, given.requests, given.minutes)
    first, last = (f"{size / 2**20:.0f} MiB" for _, size in (outcome.memory[0], outcome.memory[-1]))
    print(json.dumps({"counts": outcome.counts, "memory": [first, last], "growth": outcome.growth}, indent=2))
    if outcome.problems:
        raise SystemExit("\n".join(outcome.problems))
