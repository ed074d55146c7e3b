"""A server with the playground and an engine that only pretends: the same question always gets the same steps."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draftgraph.serve.playground import mount

SKY = (
    "The sky is blue because of Rayleigh scattering. Sunlight holds every colour, and the gas in the air scatters "
    "short wavelengths, such as blue, far more than long wavelengths, such as red.\n\nSo wherever you look, some "
    "scattered blue light reaches your eye. At sunset 🌅 the light takes a longer way through the air: most of the "
    "blue is scattered out of it, and what is left is red. In Japanese the sky is 空 (sora), and a café with a view "
    "of it is worth a visit."
)
ANSWERS = {
    "Why is the sky blue?": SKY,
    "break": "This answer breaks off in the middle of it, sadly.",
    "markup": "A <b>bold</b> <script>document.title='owned'</script> &amp; claim.",
    "slow": " ".join(["slowly"] * 200),
    "half": "Chopped 👩‍🚀 characters\tand\u00a0marks\n",
}
GAINS = (3, 6, 1, 4, 2, 5, 8)  # tokens of each step, the last of them the model's own
SOURCES = ("draft", "draft", "copied", "draft", "recycled", "merged", "draft", "copied")
VERIFIED = 30  # nodes of a step, the root counted


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*[^\s\w]+|\s*\w+|\s+", text)


@dataclass
class Node:
    text: str
    parent: int
    depth: int
    source: str
    score: float
    accepted: bool

    def as_sent(self) -> dict[str, Any]:
        return {"token": number(self.text), **vars(self)}


def number(text: str) -> int:
    return sum(text.encode()) % 49152


def token(text: str, source: str) -> dict[str, Any]:
    return {"id": number(text), "text": text, "source": source}


def plain_steps(text: str) -> Iterator[dict[str, Any]]:
    before = "\n"
    for position, piece in enumerate(pieces(text)):
        root = Node(before, -1, 0, "root", 1.0, True).as_sent()
        step = {"position": position, "nodes": [root], "merges": [], "tokens": [number(piece)], "seconds": 0.02}
        yield {"tokens": [token(piece, "target")], "step": step}
        before = piece


def drafted_steps(text: str, nodes: int = VERIFIED) -> Iterator[dict[str, Any]]:
    """Steps that gain `GAINS` tokens each, with an accepted path, side branches and a merge in every other step."""
    left, before, position = pieces(text), "\n", 0
    for turn, gain in enumerate(itertools.cycle(GAINS)):
        if not left:
            return
        gained, left = left[:gain], left[gain:]
        ended = not left and len(gained) > 1  # the last token was drafted too
        drafted = gained if ended else gained[:-1]
        sources = [SOURCES[(position + place) % len(SOURCES)] for place in range(len(drafted))]
        tree, merges = grown(random.Random(turn), before, drafted, sources, 1 if gain == 1 and turn > 9 else nodes)
        tokens = [token(*each) for each in zip(drafted, sources, strict=True)]
        tokens += [] if ended else [token(gained[-1], "target")]
        step = {
            "position": position,
            "nodes": [node.as_sent() for node in tree],
            "merges": merges,
            "tokens": [each["id"] for each in tokens],
            "seconds": 0.0231,
        }
        yield {"tokens": tokens, "step": step}
        position, before = position + len(gained), gained[-1]


def grown(
    dice: random.Random, before: str, path: list[str], sources: list[str], size: int
) -> tuple[list[Node], list[list[int]]]:
    words = [" a", " the", " of", ",", " light", " blue", " scattering", " air", " in", " which", "\n", " 色", " our"]
    tree, merges = [Node(before, -1, 0, "root", 1.0, True)], []
    for depth, (text, source) in enumerate(zip(path, sources, strict=True)):
        tree.append(Node(text, depth, depth + 1, source, tree[-1].score * dice.uniform(0.75, 0.98), True))
    if len(path) > 2 and size > len(path) + 4:  # another way to the path's second token, which goes on as it does
        tree.append(Node(dice.choice(words), 0, 1, "draft", 0.11, False))
        for again in (2, 3):
            merges.append([again, len(tree)])
            last = len(tree) - 1
            source = "merged" if again == 2 else tree[again].source
            tree.append(Node(tree[again].text, last, tree[last].depth + 1, source, tree[last].score * 0.8, False))
    while len(tree) < size:
        parent = dice.randrange(min(len(tree), 14))
        taken = {node.text for node in tree if node.parent == parent}
        text = dice.choice([word for word in words if word not in taken])
        score = tree[parent].score * dice.uniform(0.05, 0.5)
        source = dice.choice(("draft", "draft", "copied", "recycled"))
        tree.append(Node(text, parent, tree[parent].depth + 1, source, score, False))
    return tree, merges


@dataclass
class Pretender:
    """The endpoint, and what it was asked."""

    key: str | None = None
    pause: float = 0.004  # a pass
    requests: list[dict[str, Any]] = field(default_factory=list)
    disconnected: list[str] = field(default_factory=list)  # prompts whose reader went away

    def app(self) -> Starlette:
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        app = Starlette(routes=[Route("/v1/models", self.models), Route("/ready", self.ready), chat])
        mount(app)
        return app

    def refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "Wrong or missing API key.", "type": "invalid_request_error"}}, 401)

    async def models(self, request: Request) -> Response:
        listed = [{"id": "SmolLM2-135M-Instruct", "object": "model"}]
        return self.refusal(request) or JSONResponse({"object": "list", "data": listed})

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "device": "cpu", "dtype": "float32", "mode": "auto"})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if (refusal := self.refusal(request)) is not None:
            return refusal
        if body["messages"][-1]["content"] == "refuse":
            error = {"error": {"message": "The queue is full.\nSo it is.", "type": "overloaded"}}
            return JSONResponse(error, 429, {"Retry-After": "3"})
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt, mode = body["messages"][-1]["content"], body["draftgraph"]["mode"]
        text = ANSWERS.get(prompt, f"You said: {prompt}")
        if prompt == "differ":
            text = "The same beginning, " + ("another end." if mode == "off" else "this end.")
        steps = list(plain_steps(text) if mode == "off" else drafted_steps(text))
        limit, sent = body["max_tokens"], 0
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        try:
            for place, step in enumerate(steps):
                await asyncio.sleep(0.15 if prompt == "slow" else self.pause)
                if prompt == "break" and place == 2 and mode != "off":
                    yield event({"error": {"message": "The engine stopped; it starts again.", "type": "server_error"}})
                    return
                step["tokens"] = step["tokens"][: limit - sent]
                sent += len(step["tokens"])
                content = "".join(each["text"] for each in step["tokens"])
                if prompt == "half" and step is steps[-1]:  # the text of the last token is told later
                    step["tokens"][-1] |= {"text": ""}
                yield event({"choices": [{"index": 0, "delta": {"content": content}}], "draftgraph": step})
                if sent == limit:
                    break
        except asyncio.CancelledError:
            self.disconnected.append(prompt)
            raise
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if sent == limit else "stop"}]})
        stats = {"steps": len(steps), "new_tokens": sent, "mean_accepted_length": sent / len(steps)}
        yield event({"choices": [], "usage": {"completion_tokens": sent, "draftgraph": stats}})
        yield "data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps({'object': 'chat.completion.chunk', **chunk}, ensure_ascii=False)}\n\n"


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """The app on a port of its own; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)
