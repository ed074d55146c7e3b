"""A request under way: its jobs go to the engine, its answers' pieces come back."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from draftgraph.serve.answer import Answer, Piece
from draftgraph.serve.engine import Engine
from draftgraph.serve.errors import from_failure
from draftgraph.serve.metrics import Metrics
from draftgraph.serve.prompts import Prompts
from draftgraph.serve.schemas.answers import Usage
from draftgraph.serve.tokens import TokenNames
from draftgraph.serve.wire import Job, Progress


class Server:
    """What routes need: made once."""

    def __init__(self, engine: Engine, tokenizer: Any, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.prompts, self.names = Prompts(tokenizer), TokenNames(tokenizer)


class Generation:
    """The answers to one request, in the order of its prompts."""

    def __init__(self, server: Server, kind: str, jobs: Sequence[Job], stops: Sequence[str]) -> None:
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self._server = server
        self._jobs = jobs
        self._started = time.monotonic()
        self.answers = {
            job["id"]: Answer(index, job, server.names, server.prompts.tokenizer, stops)
            for index, job in enumerate(jobs)
        }

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Raises an ApiError if any of the jobs fails; closing it cancels what is left."""
        async with self._server.engine.submit(self._jobs) as submission:
            async for progress in submission:
                refuse_failed(progress)
                answer = self.answers[progress.id]
                piece = answer.take(progress)
                if answer.finish_reason is not None:
                    if progress.finish_reason is None:
                        submission.cancel(progress.id)
                    self._server.metrics.count_answer(answer, time.monotonic() - self._started)
                if piece.says_something:
                    yield piece

    def usage(self) -> Usage:
        answers = list(self.answers.values())
        prompt = sum(len(job["tokens"]) for job in self._jobs if job["sample"] == 0)
        completion = sum(answer.tokens for answer in answers)
        reused = sum(int(one.stats.get("reused_tokens") or 0) for one in answers if one.job["sample"] == 0)
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
            "seed": self._jobs[0]["seed"] if self._jobs else None,
        }


def refuse_failed(progress: Progress) -> None:
    if progress.error is not None:
        raise from_failure(progress.error["kind"], progress.error["message"])
    if progress.finish_reason == "deadline":
        raise from_failure("deadline", "the answer took too long: ask for fewer tokens")
    if progress.finish_reason == "cancelled":
        raise from_failure("stopping", "the request was cancelled")
