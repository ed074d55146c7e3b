"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from draftgraph.serve import logprobs
from draftgraph.serve.answer import Answer, Piece, Scored
from draftgraph.serve.errors import refusal
from draftgraph.serve.generation import Generation, Server
from draftgraph.serve.jobs import JobMaker, check_grammar, grammar_of
from draftgraph.serve.schemas import CompletionRequest
from draftgraph.serve.schemas.answers import Completion, CompletionChoice, CompletionLogprobs
from draftgraph.serve.text import AnswerText
from draftgraph.serve.wire import Job
from draftgraph.text import decode

NEW_TOKENS = 16  # OpenAI's default


async def completion_generation(body: CompletionRequest, server: Server, maker: JobMaker) -> Generation:
    maker.check(body)
    maker.check_prompts(len(body.prompts))
    if body.suffix:
        raise refusal("suffix is not supported: text is only continued", "suffix")
    if body.best_of is not None and body.best_of != body.choices:
        raise refusal("best_of is not supported: ask for n answers", "best_of")
    max_tokens = NEW_TOKENS if body.max_tokens is None else body.max_tokens
    if not max_tokens and not body.echo:
        raise refusal("max_tokens must be at least 1, or 0 with echo", "max_tokens")
    grammar = grammar_of(body.response_format)
    if grammar is not None:
        await server.prompts.aside(lambda: check_grammar(grammar))
    scores_prompt = body.echo and (body.logprobs is not None or not max_tokens)
    more = {"logprobs": body.logprobs, "prompt_logprobs": (body.logprobs or 0) if scores_prompt else None}
    jobs: list[Job] = []
    for prompt in body.prompts:
        tokens = await server.prompts.of_text(prompt) if isinstance(prompt, str) else prompt
        jobs += maker.jobs(body, tokens, max_tokens, **more, grammar=grammar)
    return Generation(server, "cmpl", jobs, body.stops)


class CompletionForm:
    """Answers in a completion's form, behind their prompts with `echo`."""

    def __init__(self, generation: Generation, body: CompletionRequest, server: Server, model: str) -> None:
        self._generation, self._body, self._server = generation, body, server
        self._answers = list(generation.answers.values())
        self._model = model
        self._prompt_texts: dict[int, str] = {}
        self._echoed: set[int] = set()

    def opening(self) -> list[Completion]:
        return []

    def chunk(self, piece: Piece) -> Completion:
        chunk = self._completion([self._choice([piece], with_prompt=self._first_of(piece))])
        if self._body.wants_usage:
            chunk["usage"] = None
        if piece.trace is not None:
            chunk["draftgraph"] = piece.trace
        return chunk

    def last(self) -> Completion | dict[str, Any]:
        return self._completion([]) | {"usage": self._generation.usage()} if self._body.wants_usage else {}

    def whole(self, pieces: list[Piece]) -> Completion:
        own = [[piece for piece in pieces if piece.index == answer.index] for answer in self._answers]
        answer = self._completion([self._choice(pieces, with_prompt=bool(self._body.echo)) for pieces in own])
        answer["usage"] = self._generation.usage()
        return answer

    def _first_of(self, piece: Piece) -> bool:
        is_first = piece.index not in self._echoed
        self._echoed.add(piece.index)
        return is_first and bool(self._body.echo)

    def _choice(self, pieces: list[Piece], with_prompt: bool) -> CompletionChoice:
        answer = self._answers[pieces[-1].index]
        prompt = self._prompt_text(answer)
        return {
            "index": answer.index,
            "text": (prompt if with_prompt else "") + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(answer, pieces, with_prompt),
            "finish_reason": pieces[-1].finish_reason,
        }

    def _logprobs(self, answer: Answer, pieces: list[Piece], with_prompt: bool) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        names, before = self._server.names, len(self._prompt_text(answer))
        found = logprobs.of_completion([one for piece in pieces for one in piece.scored], names, before)
        if not with_prompt:
            return found
        prompt = logprobs.of_completion(self._scored_prompt(answer), names)
        return {name: prompt[name] + found[name] for name in found}  # type: ignore[literal-required,return-value]

    def _prompt_text(self, answer: Answer) -> str:
        """As it was given, or as its tokens read; nothing without `echo`."""
        if not self._body.echo:
            return ""
        place = answer.index // self._body.choices
        if place not in self._prompt_texts:
            prompt = self._body.prompts[place]
            text = prompt if isinstance(prompt, str) else decode(self._server.prompts.tokenizer, prompt)
            self._prompt_texts[place] = text
        return self._prompt_texts[place]

    def _scored_prompt(self, answer: Answer) -> list[Scored]:
        text = AnswerText(self._server.prompts.tokenizer)
        scored = []
        for token, told in zip(answer.job["tokens"], answer.prompt_logprobs or [], strict=False):
            start = text.length
            text.push(token)
            scored.append(Scored.of(token, told, start, text.length))
        return scored

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self._generation.id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._model,
            "choices": choices,
        }
