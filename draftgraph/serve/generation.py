"""A request under way: its jobs go to the engine; of each answer come text, log-probabilities and figures."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric
from starlette.requests import Request

from draftgraph.batching.job import Job, Progress, Scores
from draftgraph.serve.answer_schemas import Finish, Usage
from draftgraph.serve.engine import Engine
from draftgraph.serve.errors import ApiError, failure
from draftgraph.serve.formats import AnswerFormats
from draftgraph.serve.grammars import Grammars
from draftgraph.serve.jobs import Prompts
from draftgraph.serve.metrics import Metrics
from draftgraph.serve.parsing import AnswerParser, CallDelta
from draftgraph.serve.schemas import GenerationRequest
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.text import AnswerText, TextRules, TokenNames

LONG_BODY = 32 * 1024  # bytes, of which a tokenizer reads one or two in a microsecond
LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, how likely the model thought it, and where its text begins and ends in the answer."""

    token: int
    scores: Scores | None  # None: nothing comes before the first token of a prompt
    place: int
    start: int
    end: int

    @property
    def logprob(self) -> float | None:
        return None if self.scores is None else finite(self.scores.own[self.place])

    @property
    def top(self) -> list[tuple[int, float]]:
        found = [] if self.scores is None else self.scores.top(self.place)
        return [(token, finite(logprob)) for token, logprob in found]


@dataclass(slots=True)
class Delta:
    """What one step adds to an answer."""

    index: int
    text: str = ""  # content
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # if they are to be told
    finish_reason: Finish | None = None
    trace: dict[str, Any] | None = None

    @property
    def is_worth_sending(self) -> bool:
        said = self.text or self.reasoning or self.calls
        return bool(said or self.scores or self.tokens or self.finish_reason or self.trace)


class Answer:
    """Follows one job."""

    def __init__(
        self,
        index: int,
        job: Job,
        names: TokenNames,
        text: AnswerText,
        parser: AnswerParser | None = None,
        tells_tokens: bool = False,
    ) -> None:
        self.index, self.job = index, job
        self._names, self._text, self._parser, self._tells_tokens = names, text, parser, tells_tokens
        self._scores: list[TokenScore] = []  # not sent yet
        self._started = time.monotonic()
        self.first_token_seconds: float | None = None
        self.tokens = 0
        self.steps = 0
        self.sources: Counter[str] = Counter()
        self.prompt_logprobs: Scores | None = None
        self.stats: dict[str, Any] = {}
        self.finish_reason: Finish | None = None

    def take(self, progress: Progress) -> Delta:
        delta = Delta(self.index)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        self.stats = progress.stats or self.stats
        if progress.tokens:
            self.steps += 1
            if self.first_token_seconds is None:
                self.first_token_seconds = time.monotonic() - self._started
        texts = self._take_tokens(progress)
        if self._tells_tokens:
            delta.tokens = progress.tokens[: len(texts)]
        delta.text = "".join(texts)
        if progress.finish_reason is not None and not self._text.stopped:
            delta.text += self._text.finish()
            self.finish_reason = "length" if progress.finish_reason == "length" else "stop"
        if self._text.stopped:
            self.finish_reason = "stop"
        if self._parser is not None:
            self._parse(delta, self._parser)
        delta.finish_reason = self.finish_reason
        delta.scores = self._ready_scores()
        if self.job.trace:
            delta.trace = self._trace(progress, texts)
        return delta

    def _parse(self, delta: Delta, parser: AnswerParser) -> None:
        found = parser.push(delta.text, last=self.finish_reason is not None)
        delta.text, delta.reasoning, delta.calls = found.content, found.reasoning, found.calls
        if self.finish_reason == "stop" and parser.has_calls:
            self.finish_reason = "tool_calls"

    def _take_tokens(self, progress: Progress) -> list[str]:
        """The text that can be shown after each of them; none after a stop string."""
        texts = []
        for place, token in enumerate(progress.tokens):
            is_the_end = progress.finish_reason == "stop" and place == len(progress.tokens) - 1
            is_shown = not is_the_end or self._text.rules.with_stop
            start = self._text.length
            texts.append(self._text.push(token) if is_shown else "")
            self.tokens += 1
            self.sources[progress.sources[place]] += 1
            if progress.logprobs is not None:
                self._scores.append(TokenScore(token, progress.logprobs, place, start, self._text.length))
            if self._text.stopped:
                break
        return texts

    def _ready_scores(self) -> list[TokenScore]:
        """Of tokens whose text can be sent; those of a stop string cannot."""
        if self._text.stopped:
            sent, self._scores = [one for one in self._scores if one.start < self._text.length], []
        elif self.finish_reason is not None:
            sent, self._scores = self._scores, []
        else:
            ready = sum(one.end <= self._text.released for one in self._scores)
            sent, self._scores = self._scores[:ready], self._scores[ready:]
        return sent

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
    return max(logprob, LEAST_LOGPROB)


class Server:
    """What routes need: made once."""

    def __init__(self, settings: ServerSettings, engine: Engine, tokenizer: Any, metrics: Metrics) -> None:
        self.settings, self.engine, self.metrics = settings, engine, metrics
        grammars = Grammars(tokenizer)
        self.prompts, self.names = Prompts(tokenizer, grammars, settings.max_body), TokenNames(tokenizer)
        self._long_prompts = Prompts(tokenizer, grammars, settings.max_body)
        self.formats = AnswerFormats(settings, tokenizer)

    def figures(self) -> list[Metric]:
        """As they are now."""
        engine = self.engine
        self.metrics.show_engine(engine.ready is not None and not engine.is_silent, engine.figures)
        return list(self.metrics.registry.collect())

    def prompts_of(self, request: Request) -> Prompts:
        """Long texts have a thread of their own, so that short ones do not wait for them."""
        return self._long_prompts if request.state.body_length > LONG_BODY else self.prompts

    @contextmanager
    def reading(self, request: Request, answers: int) -> Iterator[Prompts]:
        """Lets a request in, to have its prompts read: it holds places for its answers, as those under way do."""
        prompts, tenant = self.prompts_of(request), request.state.tenant
        with self.engine.places.held(tenant, answers), prompts.unread.held(tenant, request.state.body_length):
            yield prompts


class Generation:
    """The answers to one request, in the order of its prompts."""

    def __init__(
        self,
        server: Server,
        kind: str,
        jobs: Sequence[Job],
        body: GenerationRequest,
        parser: Callable[[Job], AnswerParser | None] = lambda job: None,
    ) -> None:
        self.id, self.created = kind + uuid.uuid4().hex, int(time.time())
        self._server = server
        self._jobs = jobs
        self._started = time.monotonic()
        self.answers = {job.id: answer_to(body, index, job, server, parser(job)) for index, job in enumerate(jobs)}
        self._submission = server.engine.submit(jobs)
        self.deltas = self._deltas()

    async def aclose(self) -> None:
        """Cancels what is left."""
        await self.deltas.aclose()
        self._submission.close()

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        """Raises an ApiError if any of the jobs fails."""
        engine, metrics, outcome = self._server.engine, self._server.metrics, "abort"
        try:
            async for progress in self._submission:
                answer = self.answers[progress.id]
                if answer.finish_reason is not None:  # by a stop string: the engine went on until it was told
                    answer.stats = progress.stats or answer.stats
                    continue
                refuse_failed(progress)
                delta = answer.take(progress)
                if answer.finish_reason is not None:
                    metrics.count_answer(answer, time.monotonic() - self._started)
                    if progress.finish_reason is None:
                        engine.end(progress.id)
                if delta.is_worth_sending:
                    yield delta
        except ApiError:
            outcome = "error"
            raise
        finally:
            metrics.answers.labels(outcome).inc(sum(one.finish_reason is None for one in self.answers.values()))

    def usage(self) -> Usage:
        answers = list(self.answers.values())
        prompt = sum(len(job.tokens) for job in self._jobs if job.sample == 0)
        completion = sum(answer.tokens for answer in answers)
        reused = sum(int(one.stats.get("reused_tokens") or 0) for one in answers if one.job.sample == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": reused},
            "draftgraph": self._figures(answers, completion),
        }

    def _figures(self, answers: list[Answer], completion: int) -> dict[str, Any]:
        steps, seconds = sum(answer.steps for answer in answers), time.monotonic() - self._started
        sources = sum((answer.sources for answer in answers), Counter())
        drafted = sum((Counter(answer.stats.get("checked_by_source", {})) for answer in answers), Counter())
        return {
            "steps": steps,
            "tokens_per_pass": completion / steps if steps else 0.0,
            "tokens_by_source": dict(sources),
            "drafted_by_source": dict(drafted),
            "queue_seconds": max((answer.stats.get("queue_seconds") or 0.0 for answer in answers), default=0.0),
            "first_token_seconds": min((answer.first_token_seconds or seconds for answer in answers), default=seconds),
            "seconds": seconds,
            "seed": self._jobs[0].seed if self._jobs else None,
        }


def answer_to(body: GenerationRequest, index: int, job: Job, server: Server, parser: AnswerParser | None) -> Answer:
    dropped = parser.dropped if parser is not None else None
    if body.skip_special_tokens is False:
        dropped = frozenset()
    rules = TextRules(body.stops, body.min_tokens or 0, bool(body.include_stop_str_in_output), dropped)
    text = AnswerText(server.prompts.tokenizer, rules)
    return Answer(index, job, server.names, text, parser, bool(body.return_token_ids))


def refuse_failed(progress: Progress) -> None:
    if progress.error is not None:
        raise failure(progress.error["kind"], progress.error["message"])
    if progress.finish_reason == "deadline":
        raise failure("deadline", "the answer took too long: ask for fewer tokens")
    if progress.finish_reason == "cancelled":
        raise failure("stopping", "the request was cancelled")
