"""From a request to the engine's jobs: what it asks for is checked, its prompts become token ids."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import from_json

from draftgraph.batching.job import Job
from draftgraph.config import GraphConfig
from draftgraph.serve.errors import ApiError, refusal
from draftgraph.serve.formats import AnswerFormats, ToolUse
from draftgraph.serve.grammars import Grammars, grammar_of
from draftgraph.serve.quota import Quota
from draftgraph.serve.schemas import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
    Message,
)
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.wire import Ready

NEW_TOKENS = 16  # of a completion, as OpenAI has it
GREEDY_UNDER = 1e-5  # a temperature so low divides logits past what floats hold
MOST_SCORES = 1 << 19  # log-probabilities of prompts in one answer
LONG_TOKEN = 16  # characters: text whose tokens are longer than that on average is no language
FAR = 2  # times the window: what has more tokens in its beginning has too many in all, wherever that was cut
BODIES = 4  # of the largest size, whose texts may wait for a tokenizer: it takes about two seconds for each
NO_WINDOW = 1 << 20  # of a model that names none
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
AS_GIVEN = {"top_p", "min_p", *PENALTIES, "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos"}
AS_GIVEN |= {"min_tokens", "cache_salt"}
OF_TEMPLATES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
TEMPLATE_ARGUMENTS = (*OF_TEMPLATES, "documents")
ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
TEXTS = ("text", "input_text", "output_text")  # parts of messages, of chats and of responses
T = TypeVar("T")


async def chat_jobs(body: ChatRequest, prompts: Prompts, maker: JobMaker, formats: AnswerFormats) -> list[Job]:
    maker.check(body)
    use = ToolUse.of(body)
    formats.check(use)
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs needs logprobs: true", "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise refusal("max_tokens must be at least 1", "max_tokens")
    words = await prompts.of_words(body.bad_words or [])
    name, wanted = grammar_of(body) or ("tools", None)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    tokens = await prompts.of_chat(body, maker.window)
    grammar = await prompts.aside(lambda: formats.grammar(tokens, use, wanted))
    if grammar is not None:
        await prompts.grammars.check(grammar, "tools" if use is not None and use.forced else name, body.choices)
    return maker.jobs(body, tokens, max_tokens, logprobs=alternatives, grammar=grammar, bad_words=words)


async def completion_jobs(body: CompletionRequest, prompts: Prompts, maker: JobMaker) -> list[Job]:
    maker.check(body)
    maker.check_prompts(len(body.prompts))
    if body.suffix:
        raise refusal("suffix is not supported: text is only continued", "suffix")
    if body.best_of is not None and body.best_of != body.choices:
        raise refusal("best_of is not supported: ask for n answers", "best_of")
    max_tokens = NEW_TOKENS if body.max_tokens is None else body.max_tokens
    if not max_tokens and not body.echo:
        raise refusal("max_tokens must be at least 1, or 0 with echo", "max_tokens")
    grammar = await prompts.grammars.of(body, body.choices * len(body.prompts))
    words = await prompts.of_words(body.bad_words or [])
    scores_prompt = body.echo and (body.logprobs is not None or not max_tokens)
    more = {"logprobs": body.logprobs, "prompt_logprobs": (body.logprobs or 0) if scores_prompt else None}
    special = body.add_special_tokens is not False
    jobs: list[Job] = []
    for prompt in body.prompts:
        tokens = await prompts.of_text(prompt, maker.window, special) if isinstance(prompt, str) else prompt
        jobs += maker.jobs(body, tokens, max_tokens, **more, grammar=grammar, bad_words=words)
    scores = sum(len(job.tokens) for job in jobs) * (1 + (body.logprobs or 0)) if scores_prompt else 0
    if scores > MOST_SCORES:
        raise refusal(f"this asks for {scores} log-probabilities of prompts: ask for {MOST_SCORES} at most", "logprobs")
    return jobs


class JobMaker:
    """Checks what depends on the server's settings and on the model."""

    def __init__(self, settings: ServerSettings, ready: Ready, tenant: str, prompt_field: str) -> None:
        self._settings, self._ready, self._tenant = settings, ready, tenant
        self._prompt_field, self.window = prompt_field, window_of(ready, settings)
        self.seed = secrets.randbelow(SEEDS)

    def check(self, request: GenerationRequest) -> None:
        settings = self._settings
        check_model(request.model, settings)
        if request.choices > settings.max_choices:
            raise refusal(f"n must be at most {settings.max_choices}, not {request.n}", "n")
        if len(request.stops) > settings.max_stops:
            raise refusal(f"stop may have at most {settings.max_stops} texts, not {len(request.stops)}", "stop")
        if any(not 0 < len(stop) <= settings.max_stop_length for stop in request.stops):
            raise refusal(f"every stop must have 1 to {settings.max_stop_length} characters", "stop")
        if any(not 0 < len(word) <= settings.max_stop_length for word in request.bad_words or []):
            raise refusal(f"every bad word must have 1 to {settings.max_stop_length} characters", "bad_words")
        if request.truncate_prompt_tokens == 0:
            raise refusal("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            check_tokens(getattr(request, name) or (), self._ready, name)
        if request.traced and not settings.allow_trace:
            raise refusal("draftgraph.trace is not allowed here", "draftgraph")

    def check_prompts(self, count: int) -> None:
        if not 1 <= count <= self._settings.max_prompts:
            raise refusal(f"prompt must be 1 to {self._settings.max_prompts} texts, not {count}", "prompt")

    def jobs(self, request: GenerationRequest, tokens: Sequence[int], max_tokens: int | None, **more: Any) -> list[Job]:
        """One for each of `n` answers to a prompt."""
        check_tokens(tokens, self._ready, self._prompt_field)
        tokens = self._truncated(tokens, request.truncate_prompt_tokens, max_tokens)
        length = self._checked_length(len(tokens), max_tokens)
        if (request.min_tokens or 0) > length:
            raise refusal(f"min_tokens must be at most {length}, as many as there may be", "min_tokens")
        if request.seed is not None:
            self.seed = request.seed % SEEDS
        temperature = self._settings.temperature if request.temperature is None else request.temperature
        job = Job(
            id="",
            tokens=tuple(tokens),
            tenant=self._tenant,
            adapter=request.model if request.model in self._settings.adapters else "",
            max_tokens=length,
            temperature=temperature if temperature >= GREEDY_UNDER else 0.0,
            top_k=max(0, request.top_k or 0),
            seed=self.seed,
            config=self._config(request.draftgraph.config() if request.draftgraph else {}),
            trace=request.traced,
            deadline=self._settings.deadline,
            **request.model_dump(include=AS_GIVEN, exclude_none=True),
            **more,
        )
        return [replace(job, id=uuid.uuid4().hex, sample=sample) for sample in range(request.choices)]

    def _truncated(self, tokens: Sequence[int], most: int | None, wanted: int | None) -> Sequence[int]:
        """The last of them: so many, or with -1 as many as leave room for the answer."""
        if most is None:
            return tokens
        if most == -1:
            most = self.window - ((self._settings.max_tokens or 1) if wanted is None else wanted)
        return tokens[max(0, len(tokens) - max(1, most)) :]

    def _config(self, given: dict[str, Any]) -> dict[str, Any]:
        """How to draft, within the server's limits, also where the request leaves something out."""
        if not given:
            return {}
        nodes, depth = self._settings.max_request_nodes, self._settings.max_request_depth
        usual = GraphConfig(mode=given.get("mode", self._ready.mode))
        for name, most in (("max_nodes", nodes), ("max_depth", depth), ("chain_length", max(1, depth))):
            if given.setdefault(name, min(most, getattr(usual, name))) > most:
                raise refusal(f"draftgraph.{name} may be {most} at most here, not {given[name]}", "draftgraph")
        return given

    def _checked_length(self, prompt: int, wanted: int | None) -> int:
        """How many tokens to answer with: as many as wanted, or as there is room for."""
        if not prompt:
            raise refusal("the prompt is empty: give some text", self._prompt_field)
        if prompt + (wanted if wanted is not None else 1) > self.window:
            asked = "" if wanted is None else f" and {wanted} are asked for"
            raise too_long(f"{prompt} tokens{asked}", self.window, self._prompt_field)
        room = self.window - prompt
        return min(room, self._settings.max_tokens or room) if wanted is None else wanted


def check_tokens(tokens: Iterable[int], ready: Ready, param: str) -> None:
    if (highest := max(tokens, default=0)) >= ready.vocabulary:
        raise refusal(f"token {highest} is not in the vocabulary of {ready.vocabulary}", param)


def window_of(ready: Ready, settings: ServerSettings) -> int:
    """Tokens of a prompt and its answer together."""
    limits = (ready.context_window, settings.max_model_len, NO_WINDOW)
    return min(limit for limit in limits if limit is not None)


def too_long(prompt: str, window: int, param: str) -> ApiError:
    message = f"the prompt has {prompt}, and the context window holds {window} tokens: use fewer"
    return refusal(message, param, "context_length_exceeded")


def check_model(name: str | None, settings: ServerSettings) -> None:
    if name not in (None, *settings.names):
        message = f"there is no model {name!r} here: there is {settings.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class Prompts:
    """A tokenizer with a thread of its own: a long text must not hold up the streams of others. What nobody waits for
    any more is not begun."""

    def __init__(self, tokenizer: Any, grammars: Grammars, max_body: int) -> None:
        self.tokenizer, self.grammars = tokenizer, grammars
        self.unread = Quota("bytes of prompts", BODIES * max_body)
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    async def of_text(self, text: str, window: int, special: bool = True) -> list[int]:
        return await self._tokens(text, window, "prompt", special)

    async def of_words(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each, where it begins a text and where a space comes before it."""
        if not words:
            return []
        spelled = [prefix + (word.lstrip() or word) for word in words for prefix in ("", " ")]
        found = await self.aside(lambda: [encoded(self.tokenizer, word, False) for word in spelled])
        return [tokens for tokens in found if tokens]

    async def of_chat(self, request: Conversation, window: int) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise refusal("this model has no chat template: use /v1/completions", "messages")
        arguments = template_arguments(self.tokenizer, request)
        given = list(enumerate(request.messages))
        messages = await self.aside(lambda: [template_message(message, place) for place, message in given])
        try:
            text = await self.aside(lambda: render(self.tokenizer, messages, arguments))
        except Exception as error:  # a template may fail in any way over what it is given
            said = " ".join(str(error).split())[:500]
            raise refusal(f"the model's chat template refuses these messages: {said}", "messages") from error
        return await self._tokens(text, window, "messages", special=False)

    async def _tokens(self, text: str, window: int, param: str, special: bool) -> list[int]:
        """What cannot fit even in the longest tokens is not tokenized, and what does not fit by far only in part."""
        if len(text) > window * self._longest_token:
            raise too_long(f"{len(text)} characters", window, param)

        def all_tokens() -> list[int]:
            beginning = text[: LONG_TOKEN * window]
            if len(beginning) < len(text) and len(found := encoded(self.tokenizer, beginning, special)) > FAR * window:
                raise too_long(f"more than {len(found)} tokens", window, param)
            return encoded(self.tokenizer, text, special)

        return await self.aside(all_tokens)

    async def aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def render(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, **arguments, tokenize=False))
    except TypeError:  # templates such as DeepSeek's add the arguments of calls to text
        as_text = [message | called(message, textual) for message in messages]
        return str(tokenizer.apply_chat_template(as_text, **arguments, tokenize=False))


def template_arguments(tokenizer: Any, request: Conversation) -> dict[str, Any]:
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - set(TEMPLATE_ARGUMENTS)
    given = request.model_dump(include=set(OF_TEMPLATES), exclude_none=True) | (request.chat_template_kwargs or {})
    if request.reasoning_effort is not None and "reasoning_effort" not in str(tokenizer.chat_template):
        raise refusal("the model's chat template does not read reasoning_effort", "reasoning_effort")
    if given.get("continue_final_message") and given.get("add_generation_prompt"):
        raise refusal("continue_final_message leaves no room for add_generation_prompt", "add_generation_prompt")
    if taken := own & given.keys():
        raise refusal(f"chat_template_kwargs may not set {sorted(taken)[0]}", "chat_template_kwargs")
    tools = None if request.tool_choice == "none" else request.tools
    defaults = {"add_generation_prompt": not given.get("continue_final_message")}
    return {"tools": tools or None} | defaults | given


def template_message(message: Message, place: int) -> dict[str, Any]:
    """A message as chat templates know it: its content one text, arguments of calls as objects."""
    found = message.model_dump(exclude_none=True)
    found["role"] = ROLES.get(message.role, message.role)
    found["content"] = message_text(message, f"messages.{place}.content")
    return found | called(found, from_json)


def message_text(message: Message, param: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part["type"] not in TEXTS or part.get("text") is None:
            raise refusal(f"this model reads text only, not {part['type']!r}", param)
    return "\n".join(part.get("text") or "" for part in message.content)


def called(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message's tool calls, with their arguments changed where they can be."""
    calls = message.get("tool_calls")
    return {"tool_calls": [changed_call(call, change) for call in calls]} if isinstance(calls, list) else {}


def changed_call(call: Any, change: Callable[[Any], Any]) -> Any:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        function = call["function"]
        return call | {"function": function | {"arguments": change(function["arguments"])}}
    return call


def textual(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
