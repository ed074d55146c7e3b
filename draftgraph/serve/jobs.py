"""From a request and its prompt's tokens to the engine's jobs."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Sequence
from typing import Any

from draftgraph.serve.errors import ApiError, refusal
from draftgraph.serve.schemas import GenerationRequest
from draftgraph.serve.schemas.chat import ResponseFormat
from draftgraph.serve.schemas.common import SEEDS
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.submission import Failure
from draftgraph.serve.wire import Job, Ready

GREEDY_UNDER = 1e-5  # a temperature so low divides logits past what floats hold
NO_WINDOW = 1 << 20  # of a model that names none
AS_GIVEN = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class JobMaker:
    """Checks what depends on the server's settings and on the model."""

    def __init__(self, settings: ServerSettings, ready: Ready | None, tenant: str, prompt_field: str) -> None:
        if ready is None:
            raise Failure("engine", "the model is not ready: try again later")
        self._settings, self._ready, self._tenant = settings, ready, tenant
        self._prompt_field = prompt_field
        self.seed = secrets.randbelow(SEEDS)

    @property
    def window(self) -> int:
        return window_of(self._ready, self._settings)

    def check(self, request: GenerationRequest) -> None:
        settings = self._settings
        if request.model not in (None, settings.model_name):
            raise unknown_model(str(request.model), settings)
        if request.choices > settings.max_choices:
            raise refusal(f"n must be at most {settings.max_choices}, not {request.n}", "n")
        if len(request.stops) > settings.max_stops:
            raise refusal(f"stop may have at most {settings.max_stops} texts, not {len(request.stops)}", "stop")
        if any(not 0 < len(stop) <= settings.max_stop_length for stop in request.stops):
            raise refusal(f"every stop must have 1 to {settings.max_stop_length} characters", "stop")
        for name, tokens in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
            self._check_tokens(tokens or (), name)

    def check_prompts(self, count: int) -> None:
        if not 1 <= count <= self._settings.max_prompts:
            raise refusal(f"prompt must be 1 to {self._settings.max_prompts} texts, not {count}", "prompt")

    def jobs(self, request: GenerationRequest, tokens: Sequence[int], max_tokens: int | None, **more: Any) -> list[Job]:
        """One for each of `n` answers to a prompt."""
        self._check_tokens(tokens, self._prompt_field)
        if request.seed is not None:
            self.seed = request.seed % SEEDS
        common = self._sampling(request) | {
            "tokens": list(tokens),
            "tenant": self._tenant,
            "max_tokens": self._checked_length(len(tokens), max_tokens),
            "deadline": self._settings.deadline,
            "trace": request.traced,
            "config": request.draftgraph.config() if request.draftgraph else {},
        }
        return [common | more | {"id": uuid.uuid4().hex, "sample": sample} for sample in range(request.choices)]

    def _sampling(self, request: GenerationRequest) -> dict[str, Any]:
        temperature = self._settings.temperature if request.temperature is None else request.temperature
        given = {name: value for name in AS_GIVEN if (value := getattr(request, name)) is not None}
        return given | {
            "temperature": temperature if temperature >= GREEDY_UNDER else 0.0,
            "top_k": max(0, request.top_k or 0),
            "seed": self.seed,
            "logit_bias": request.logit_bias or {},
            "stop_token_ids": request.stop_token_ids or [],
            "ignore_eos": request.ignore_eos,
        }

    def _checked_length(self, prompt: int, wanted: int | None) -> int:
        """How many tokens to answer with: as many as wanted, or as there is room for."""
        window = self.window
        if not prompt:
            raise refusal("the prompt is empty: give some text", self._prompt_field)
        if prompt + (wanted if wanted is not None else 1) > window:
            asked = "" if wanted is None else f" and {wanted} are asked for"
            raise refusal(
                f"the prompt has {prompt} tokens{asked}, and the context window holds {window}: use fewer",
                self._prompt_field,
                "context_length_exceeded",
            )
        room = window - prompt
        return min(room, self._settings.max_tokens or room) if wanted is None else wanted

    def _check_tokens(self, tokens: Any, param: str) -> None:
        if (highest := max(tokens, default=0)) >= self._ready.vocabulary:
            raise refusal(f"token {highest} is not in the vocabulary of {self._ready.vocabulary}", param)


def window_of(ready: Ready, settings: ServerSettings) -> int:
    """Tokens of a prompt and its answer together."""
    limits = (ready.context_window, settings.max_model_len, NO_WINDOW)
    return min(limit for limit in limits if limit is not None)


def unknown_model(name: str, settings: ServerSettings) -> ApiError:
    message = f"there is no model {name!r} here: there is {settings.model_name!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def grammar_of(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """What the answer must conform to, in the engine's terms."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.json_schema is None:
        raise refusal("response_format of type json_schema needs a json_schema", "response_format")
    return {"type": "json_schema", "schema": wanted.json_schema.given}


def check_grammar(grammar: dict[str, Any]) -> None:
    """Refuses a schema that cannot be followed, before it takes a place in the queue."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise refusal("this server cannot follow a grammar: llguidance is not installed", "response_format") from error
    schema = grammar.get("schema", {"type": "object"})
    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise refusal(f"the JSON schema cannot be used: {problem.strip().splitlines()[0]}", "response_format")
