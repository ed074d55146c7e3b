"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from draftgraph.serve import logprobs
from draftgraph.serve.answer import Piece
from draftgraph.serve.errors import refusal
from draftgraph.serve.generation import Generation, Server
from draftgraph.serve.jobs import JobMaker, check_grammar, grammar_of
from draftgraph.serve.schemas import ChatRequest
from draftgraph.serve.schemas.answers import ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatLogprobs, Delta


async def chat_generation(body: ChatRequest, server: Server, maker: JobMaker) -> Generation:
    maker.check(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs needs logprobs: true", "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise refusal("max_tokens must be at least 1", "max_tokens")
    grammar = grammar_of(body.response_format)
    if grammar is not None:
        await server.prompts.aside(lambda: check_grammar(grammar))
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    tokens = await server.prompts.of_chat(body)
    jobs = maker.jobs(body, tokens, max_tokens, logprobs=alternatives, grammar=grammar)
    return Generation(server, "chatcmpl", jobs, body.stops)


class ChatForm:
    """Answers in a chat's form."""

    def __init__(self, generation: Generation, body: ChatRequest, server: Server, model: str) -> None:
        self._generation, self._body, self._names = generation, body, server.names
        self._model = model

    def opening(self) -> list[ChatChunk]:
        """Says who speaks, once for each answer."""
        return [
            self._chunk([{"index": index, "delta": self._role(), "logprobs": None, "finish_reason": None}])
            for index in range(len(self._generation.answers))
        ]

    def chunk(self, piece: Piece) -> ChatChunk:
        delta: Delta = {"content": piece.text} if piece.text else {}
        choice: ChatChunkChoice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs([piece]),
            "finish_reason": piece.finish_reason,
        }
        chunk = self._chunk([choice])
        if piece.trace is not None:
            chunk["draftgraph"] = piece.trace
        return chunk

    def last(self) -> ChatChunk | dict[str, Any]:
        return self._chunk([]) | {"usage": self._generation.usage()} if self._body.wants_usage else {}

    def whole(self, pieces: list[Piece]) -> ChatAnswer:
        answers = self._generation.answers.values()
        return {
            "id": self._generation.id,
            "object": "chat.completion",
            "created": self._generation.created,
            "model": self._model,
            "choices": [self._choice([one for one in pieces if one.index == answer.index]) for answer in answers],
            "usage": self._generation.usage(),
        }

    def _choice(self, pieces: list[Piece]) -> ChatChoice:
        text = "".join(piece.text for piece in pieces)
        return {
            "index": pieces[-1].index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(pieces),
            "finish_reason": pieces[-1].finish_reason or "stop",
        }

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._generation.id,
            "object": "chat.completion.chunk",
            "created": self._generation.created,
            "model": self._model,
            "choices": choices,
        }
        if self._body.wants_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return logprobs.of_chat([one for piece in pieces for one in piece.scored], self._names)

    def _role(self) -> Delta:
        return {"role": "assistant", "content": ""}
