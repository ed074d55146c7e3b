"""Answers in OpenAI's two forms, of chats and of completions: whole, or as server-sent events while they come."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import cache, cached_property
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftgraph.batching.job import Job
from draftgraph.serve.errors import SERVER_FAULT, ApiError, ClientGone, Rows, gone, json_bytes
from draftgraph.serve.formats import ToolUse
from draftgraph.serve.generation import Answer, Delta, Generation, Server, TokenScore
from draftgraph.serve.jobs import message_text
from draftgraph.serve.parsing import AnswerParser, CallDelta
from draftgraph.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from draftgraph.serve.text import AnswerText, TokenNames
from draftgraph.text import decode

logger = logging.getLogger("draftgraph.serve")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is for nginx
SLOW_READER_SECONDS = 60.0  # for the rest of a stream when the request's own time is over
T = TypeVar("T")
Body = dict[str, Any]


class Form(ABC):
    """What both have in common: all but their choices."""

    prefix: str  # of an answer's id
    whole_object: str
    event_object: str
    scores_prompts = False  # which takes tens of microseconds for each of their tokens
    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(self, server: Server, body: GenerationRequest, jobs: Sequence[Job]) -> None:
        self._server, self._body = server, body
        self._model = body.model or server.settings.model_name
        self._fingerprint = server.engine.require_ready().fingerprint
        self.generation = Generation(server, self.prefix, jobs, body, self._parser)
        self._answers = list(self.generation.answers.values())

    def _parser(self, job: Job) -> AnswerParser | None:
        """Of an answer that is not all content."""
        return None

    @abstractmethod
    def _choice(self, deltas: list[Delta]) -> Body: ...

    @abstractmethod
    def _event_choice(self, delta: Delta) -> Body: ...

    def whole(self, deltas: list[Delta]) -> bytes:
        own = [[delta for delta in deltas if delta.index == answer.index] for answer in self._answers]
        return json_bytes(self._whole(Rows(self._choice, own)))

    def _whole(self, choices: Iterable[Body]) -> Body:
        return self._with_head(self.whole_object, choices) | {"usage": self.generation.usage()}

    def opening(self) -> list[Body]:
        """Events before the first delta."""
        return []

    def events(self, delta: Delta) -> list[Body]:
        event = self._event(self._event_choice(delta))
        return [event if delta.trace is None else event | {"draftgraph": delta.trace}]

    def closing(self) -> list[Body]:
        """Events after the last delta."""
        return [self._event() | {"usage": self.generation.usage()}] if self._body.wants_usage else []

    def failure(self, error: ApiError) -> list[Body]:
        """Events that take the place of all further ones."""
        return [dict(error.body)]

    def written(self, events: Iterable[Body]) -> bytes:
        return b"".join(map(self._written, events))

    def _written(self, event: Body) -> bytes:
        return b"data: " + json_bytes(event) + b"\n\n"

    def _event(self, *choices: Body) -> Body:
        event = self._with_head(self.event_object, list(choices))
        return event | {"usage": None} if self._body.wants_usage else event

    def _with_head(self, kind: str, choices: Iterable[Body]) -> Body:
        return {
            "id": self.generation.id,
            "object": kind,
            "created": self.generation.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _token_ids(self, deltas: list[Delta]) -> Body:
        return {"token_ids": [token for delta in deltas for token in delta.tokens]} if self._tells_tokens else {}

    @property
    def _tells_tokens(self) -> bool:
        return bool(self._body.return_token_ids)


class ChatForm(Form):
    prefix, whole_object, event_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def _whole(self, choices: Iterable[Body]) -> Body:
        return super()._whole(choices) | self._prompt_ids()

    def opening(self) -> list[Body]:
        """Names the speaker, once for each answer, and repeats what it has said already with `echo`."""
        role = {"role": "assistant", "content": self._echoed()}
        [first, *rest] = [
            self._event({"index": answer.index, "delta": role, "logprobs": None, "finish_reason": None})
            for answer in self._answers
        ]
        return [first | self._prompt_ids(), *rest]

    def _echoed(self) -> str:
        last = self._body.messages[-1]
        return message_text(last, "messages") if self._body.echo and last.role == "assistant" else ""

    def _prompt_ids(self) -> Body:
        return {"prompt_token_ids": self._answers[0].job.tokens} if self._tells_tokens else {}

    def _parser(self, job: Job) -> AnswerParser | None:
        return self._server.formats.parser(job.tokens, self._use, whole=not self._body.stream)

    @cached_property
    def _use(self) -> ToolUse | None:
        return ToolUse.of(self._body)

    def _choice(self, deltas: list[Delta]) -> Body:
        calls = [call for delta in deltas for call in delta.calls]
        text = self._echoed() + "".join(delta.text for delta in deltas)
        said = spoken(text, "".join(delta.reasoning for delta in deltas))
        message: Body = {"role": "assistant", "content": None if calls else "", "refusal": None} | said
        if calls:
            message["tool_calls"] = whole_calls(calls)
        return {
            "index": deltas[-1].index,
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": deltas[-1].finish_reason or "stop",
        } | self._token_ids(deltas)

    def _event_choice(self, delta: Delta) -> Body:
        calls = {"tool_calls": list(map(call_event, delta.calls))} if delta.calls else {}
        return {
            "index": delta.index,
            "delta": spoken(delta.text, delta.reasoning) | calls,
            "logprobs": self._logprobs([delta]),
            "finish_reason": delta.finish_reason,
        } | self._token_ids([delta])

    def _logprobs(self, deltas: list[Delta]) -> Body | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs([one for delta in deltas for one in delta.scores], self._server.names)


class CompletionForm(Form):
    """Answers stand behind their prompts with `echo`."""

    prefix, whole_object, event_object = "cmpl-", "text_completion", "text_completion"
    _body: CompletionRequest

    def __init__(self, server: Server, body: CompletionRequest, jobs: Sequence[Job]) -> None:
        super().__init__(server, body, jobs)
        self.scores_prompts = bool(body.echo and body.logprobs is not None)
        self._tokenizer = server.prompts.tokenizer
        self._prompt_text = cache(self._echoed)
        self._begun: set[int] = set()

    def _echoed(self, place: int) -> str:
        """The prompt as it was given, or as its tokens read; nothing without `echo`."""
        body = self._body
        if not body.echo:
            return ""
        prompt = body.prompts[place]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        tokens = list(self._answers[place * body.choices].job.tokens)
        return decode(self._tokenizer, tokens, frozenset() if body.skip_special_tokens is False else None)

    def _event_choice(self, delta: Delta) -> Body:
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        return self._choice([delta], with_prompt=is_first)

    def _choice(self, deltas: list[Delta], with_prompt: bool = True) -> Body:
        answer = self._answers[deltas[-1].index]
        prompt = self._prompt_text(answer.index // self._body.choices)
        return {
            "index": answer.index,
            "text": (prompt if with_prompt else "") + "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(answer, deltas, len(prompt), with_prompt),
            "finish_reason": deltas[-1].finish_reason,
        } | self._ids(answer, deltas, with_prompt)

    def _ids(self, answer: Answer, deltas: list[Delta], with_prompt: bool) -> Body:
        prompt = {"prompt_token_ids": answer.job.tokens} if with_prompt and self._tells_tokens else {}
        return prompt | self._token_ids(deltas)

    def _logprobs(self, answer: Answer, deltas: list[Delta], before: int, with_prompt: bool) -> Body | None:
        """`before`: where the answer begins in the text of its choice."""
        if self._body.logprobs is None:
            return None
        prompt = self._prompt_scores(answer) if with_prompt and self._body.echo else []
        own = [one for delta in deltas for one in delta.scores]
        starts = [*(one.start for one in prompt), *(one.start + before for one in own)]
        return completion_logprobs([*prompt, *own], self._server.names) | {"text_offset": starts}

    def _prompt_scores(self, answer: Answer) -> list[TokenScore]:
        if answer.prompt_logprobs is None:
            return []
        text, scores = AnswerText(self._tokenizer), []
        for place, token in enumerate(answer.job.tokens):
            start = text.length
            text.push(token)
            known = answer.prompt_logprobs if place else None
            scores.append(TokenScore(token, known, place - 1, start, text.length))
        return scores


def spoken(content: str, reasoning: str) -> Body:
    said = {"reasoning_content": reasoning, "content": content}
    return {name: text for name, text in said.items() if text}


def call_event(call: CallDelta) -> Body:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def whole_calls(pieces: Sequence[CallDelta]) -> list[Body]:
    calls: list[Body] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.arguments
    return calls


def chat_logprobs(scores: Sequence[TokenScore], names: TokenNames) -> Body:
    def entry(token: int, logprob: float | None) -> Body:
        return names.entry(token) | {"logprob": logprob}

    def scored(one: TokenScore) -> Body:
        return entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}

    return {"content": Rows(scored, scores), "refusal": None}


def completion_logprobs(scores: Sequence[TokenScore], names: TokenNames) -> Body:
    def best(one: TokenScore) -> Body | None:
        """By name, the token itself among them."""
        named = {names.key(token): logprob for token, logprob in one.top}
        return None if one.logprob is None else named | {names.key(one.token): one.logprob}

    return {
        "tokens": [names.key(one.token) for one in scores],
        "token_logprobs": [one.logprob for one in scores],
        "top_logprobs": Rows(best, scores),
    }


async def respond(request: Request, form: Form, stream: bool, seconds: float) -> Response:
    """The answer whole, or as a stream; a failure before its first delta is still a plain error."""
    generation = request.state.generation = form.generation
    if not stream:
        async with aclosing(generation):
            found = await while_present(request.receive, gathered(generation.deltas))
            return Response(await asyncio.to_thread(form.whole, found), media_type="application/json")
    try:
        first = await while_present(request.receive, anext(generation.deltas, None))
    except BaseException:
        await generation.aclose()
        raise
    sent = events(form, first, generation.deltas, request.state)
    return EventStream(sent, generation, seconds + SLOW_READER_SECONDS)


async def gathered(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def events(
    form: Form, first: Delta | None, rest: AsyncIterator[Delta], state: State
) -> AsyncGenerator[bytes, None]:
    """Leaves in the state of the request the error that ended it."""
    try:
        yield form.written(form.opening())
        if first is not None:
            yield await events_of(form, first)
        async for delta in rest:
            yield await events_of(form, delta)
        yield form.written(form.closing())
    except ApiError as error:
        state.error = error
        yield form.written(form.failure(error))
    except Exception:
        logger.exception("a stream failed")
        state.error = ApiError(500, SERVER_FAULT, type="server_error")
        yield form.written(form.failure(state.error))
    yield form.end


async def events_of(form: Form, delta: Delta) -> bytes:
    if form.scores_prompts:
        return await asyncio.to_thread(lambda: form.written(form.events(delta)))
    return form.written(form.events(delta))


class EventStream(Response):
    """Sends events until the client goes away; the request behind them is closed in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: Generation, seconds: float) -> None:
        self.status_code, self.background = 200, None
        self._events, self._source, self._seconds = events, source, seconds
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await while_present(receive, self._send(send))
        except (ClientGone, TimeoutError):
            scope["state"]["error"] = gone()
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is dropped when the client goes away."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnection(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
