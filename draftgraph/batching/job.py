"""What a client asks for, and what it is told step by step: plain data, fit for a wire."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from draftgraph.errors import UsageError

Finish = Literal["stop", "length", "cancelled", "deadline", "error"]
Kind = Literal["usage", "overloaded", "memory", "engine", "stopping"]
LISTS = ("tokens", "stop_token_ids", "allowed_token_ids")
SCORED = ("logprobs", "prompt_logprobs")
OBJECT = 16  # numbers that take as much as an object for one token or node


@dataclass(frozen=True)
class Job:
    """A prompt of token ids, and how to continue it."""

    id: str
    tokens: tuple[int, ...]
    tenant: str = ""  # whose prompts and answers may be reused
    adapter: str = ""  # that answers; empty: the model as it is
    cache_salt: str = ""  # those with the same salt alone
    max_tokens: int = 256  # 0: only the prompt is scored
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: some seed
    sample: int = 0  # which of several answers with one seed
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # no token ends it before
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that may not come in a row
    logprobs: int | None = None  # alternatives told of every new token; 0: its own log-probability alone
    prompt_logprobs: int | None = None  # the same for the prompt
    grammar: dict[str, Any] | None = None  # what the answer must conform to
    config: dict[str, Any] = field(default_factory=dict)  # fields of GraphConfig
    trace: bool = False  # tell the graph of every step
    deadline: float | None = None  # seconds

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Job:
        unknown = given.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise UsageError(f"a job has no field {sorted(unknown)[0]!r}")
        bias = {int(token): float(value) for token, value in given.get("logit_bias", {}).items()}
        lists = {name: tuple(given[name]) for name in LISTS if given.get(name) is not None}
        words = tuple(tuple(word) for word in given.get("bad_words", ()))
        values: dict[str, Any] = {**given, **lists, "logit_bias": bias, "bad_words": words}
        return cls(**values)

    @property
    def token_count(self) -> int:
        """Of all that it carries: what it takes to send."""
        return len(self.tokens) + len(self.allowed_token_ids or ()) + sum(map(len, self.bad_words))

    @property
    def reuse_key(self) -> str:
        """Of prompts and answers that may be reused: those of one tenant with one adapter and one salt."""
        apart = self.adapter or self.cache_salt
        return json.dumps([self.tenant, self.adapter, self.cache_salt]) if apart else self.tenant

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Scores:
    """Log-probabilities of tokens in a row, and of the best ones in the place of each. As plain numbers: there may be
    half a million, and while the API reads them or looks through its objects for garbage, others wait."""

    alternatives: int = 0
    own: array[float] = field(default_factory=lambda: array("f"))
    tokens: array[int] = field(default_factory=lambda: array("i"))  # the best, so many in each place
    best: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.own)

    def top(self, place: int) -> list[tuple[int, float]]:
        here = slice(place * self.alternatives, (place + 1) * self.alternatives)
        return list(zip(self.tokens[here], self.best[here], strict=True))

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: b64encode(getattr(self, name).tobytes()).decode() for name in ("own", "tokens", "best")}
        return {"alternatives": self.alternatives} | numbers

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Scores:
        found = cls(given["alternatives"])
        for name in ("own", "tokens", "best"):
            getattr(found, name).frombytes(b64decode(given[name]))
        return found


@dataclass
class Progress:
    """What happened to a job in one step."""

    id: str
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each token; "target": the one that nobody proposed
    logprobs: Scores | None = None
    prompt_logprobs: Scores | None = None  # of all tokens but the first, before which there is nothing
    finish_reason: Finish | None = None
    error: dict[str, str] | None = None
    step: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None  # with the last

    @property
    def size(self) -> int:
        """What it takes to keep it: so many numbers."""
        objects = 1 + len(self.tokens) + (0 if self.step is None else len(self.step["nodes"]))
        scores = [one for one in (self.logprobs, self.prompt_logprobs) if one is not None]
        return OBJECT * objects + sum(len(one.own) + len(one.best) for one in scores)

    @classmethod
    def failed(cls, id: str, kind: Kind, message: str) -> Progress:
        return cls(id, finish_reason="error", error={"kind": kind, "message": message})

    def to_dict(self) -> dict[str, Any]:
        """Without what is not there."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found | {name: found[name].to_dict() for name in SCORED if name in found}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Progress:
        return cls(**given | {name: Scores.from_dict(given[name]) for name in SCORED if name in given})
