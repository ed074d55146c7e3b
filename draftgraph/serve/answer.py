"""One answer as its tokens come: its text, the log-probabilities of its tokens, and its figures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftgraph.serve.schemas.answers import Finish
from draftgraph.serve.text import AnswerText
from draftgraph.serve.tokens import TokenNames
from draftgraph.serve.wire import Job, Progress

LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes


@dataclass(frozen=True)
class Scored:
    """A token, how likely the model thought it, and where its text begins and ends in the answer."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    start: int
    end: int

    @classmethod
    def of(cls, token: int, told: dict[str, Any] | None, start: int, end: int) -> Scored:
        if told is None:  # nothing comes before the first token of a prompt
            return cls(token, None, [], start, end)
        top = [(int(other), finite(logprob)) for other, logprob in told["top"]]
        return cls(token, finite(told["logprob"]), top, start, end)


@dataclass
class Piece:
    """What one step adds to an answer."""

    index: int
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish_reason: Finish | None = None
    trace: dict[str, Any] | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.scored or self.finish_reason or self.trace)


class Answer:
    """Follows one job."""

    def __init__(self, index: int, job: Job, names: TokenNames, tokenizer: Any, stops: Sequence[str]) -> None:
        self.index, self.job = index, job
        self._names = names
        self._text = AnswerText(tokenizer, stops)
        self._scored: list[Scored] = []  # not told yet
        self._started = time.monotonic()
        self.first_token_seconds: float | None = None
        self.tokens = 0
        self.steps = 0
        self.sources: Counter[str] = Counter()
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None
        self.stats: dict[str, Any] = {}
        self.finish_reason: Finish | None = None

    def take(self, progress: Progress) -> Piece:
        piece = Piece(self.index)
        self.prompt_logprobs = progress.prompt_logprobs or self.prompt_logprobs
        self.stats = progress.stats or self.stats
        if progress.tokens:
            self.steps += 1
            if self.first_token_seconds is None:
                self.first_token_seconds = time.monotonic() - self._started
        texts = self._take_tokens(progress)
        piece.text = "".join(texts)
        if progress.finish_reason is not None and not self._text.stopped:
            piece.text += self._text.finish()
            self.finish_reason = "length" if progress.finish_reason == "length" else "stop"
        if self._text.stopped:
            self.finish_reason = "stop"
        piece.finish_reason = self.finish_reason
        piece.scored = self._told_scores()
        if self.job["trace"]:
            piece.trace = self._trace(progress, texts)
        return piece

    def _take_tokens(self, progress: Progress) -> list[str]:
        """The text that can be shown after each of them; none after a stop string."""
        texts = []
        for place, token in enumerate(progress.tokens):
            is_the_end = progress.finish_reason == "stop" and place == len(progress.tokens) - 1
            start = self._text.length
            texts.append("" if is_the_end else self._text.push(token))
            self.tokens += 1
            self.sources[progress.sources[place]] += 1
            if progress.logprobs is not None:
                self._scored.append(Scored.of(token, progress.logprobs[place], start, self._text.length))
            if self._text.stopped:
                break
        return texts

    def _told_scores(self) -> list[Scored]:
        """Of tokens whose text is told; those of a stop string are not."""
        if self._text.stopped:
            told, self._scored = [one for one in self._scored if one.start < self._text.length], []
        elif self.finish_reason is not None:
            told, self._scored = self._scored, []
        else:
            ready = sum(one.end <= self._text.released for one in self._scored)
            told, self._scored = self._scored[:ready], self._scored[ready:]
        return told

    def _trace(self, progress: Progress, texts: list[str]) -> dict[str, Any]:
        tokens = [
            {"id": token, "text": text, "source": source}
            for token, text, source in zip(progress.tokens, texts, progress.sources, strict=False)
        ]
        step = progress.step
        if step is not None:
            step = step | {"nodes": [node | {"text": self._names.text(node["token"])} for node in step["nodes"]]}
        return {"index": self.index, "tokens": tokens, "step": step}


def finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)
