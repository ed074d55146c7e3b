"""What is timed: a mode of this library, or a method of another one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from draftgraph.bench.runs import Record
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.errors import DraftGraphError, one_line
from draftgraph.text import encode


class MethodFailed(Exception):
    """A method of another library that cannot answer: the reason, in one line."""


class Method(Protocol):
    name: str

    def warm_up(self, prompt: str) -> Record:
        """Whatever happens only once, on the longest prompt."""

    def run(self, prompt: str, plain: Sequence[int] | None) -> Record:
        """An answer and its figures, compared with the tokens of plain decoding where they are known."""

    def close(self) -> None:
        """Gives back what is held."""


@dataclass
class Mode:
    """One of ours: whatever it raises is an error of ours."""

    name: str
    watch: Stopwatch

    def warm_up(self, prompt: str) -> Record:
        return self.watch.warm_up(self.name, prompt)

    def run(self, prompt: str, plain: Sequence[int] | None) -> Record:
        return self.watch.run(self.name, prompt, plain)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    first: int  # tokens that came first, at once
    first_seconds: float  # from the prompt to those
    seconds: float  # from there to the end

    @property
    def ms_per_token(self) -> float:
        """Prefill apart; an answer that came at once is timed whole."""
        if len(self.tokens) > self.first:
            return 1000 * self.seconds / (len(self.tokens) - self.first)
        return 1000 * self.first_seconds / max(len(self.tokens), 1)


class Peer(ABC):
    """A method of another library, timed as ours are. It may refuse a pair: what it says is a result as well."""

    def __init__(self, name: str, watch: Stopwatch) -> None:
        self.name, self.watch = name, watch
        self.pair, self.arguments = watch.pair, watch.arguments

    @abstractmethod
    def prepare(self, prompt: str) -> Record:
        """Loads and starts what it needs for prompts up to this one; tells what that is."""

    @abstractmethod
    def answer(self, prompt: str) -> Answer: ...

    def warm_up(self, prompt: str) -> Record:
        self.watch.meters.begin()
        start = time.perf_counter()
        with failing():
            about = self.prepare(prompt)
            self.answer(prompt)
        seconds = time.perf_counter() - start
        return {"mode": self.name, "prices": None, "seconds": seconds} | about | self.taken()

    def run(self, prompt: str, plain: Sequence[int] | None) -> Record:
        self.watch.meters.begin()
        with failing():
            answer = self.answer(prompt)
        taken = self.taken()
        return {
            "prompt_tokens": len(self.ids(prompt)),
            "new_tokens": len(answer.tokens),
            "seconds": answer.seconds,
            "ms_per_token": answer.ms_per_token,
            "first_token_seconds": answer.first_seconds,
            **self.watch.compare(prompt, answer.tokens, plain),
            **taken,
            "tokens": answer.tokens,
        }

    def taken(self) -> Record:
        """Memory and energy."""
        return self.watch.meters.read()

    def ids(self, prompt: str) -> list[int]:
        return encode(self.pair.tokenizer, prompt)

    def close(self) -> None:
        """Most hold nothing that is not ours."""
        return


@contextmanager
def failing() -> Iterator[None]:
    """Other libraries have errors of every kind."""
    try:
        yield
    except MethodFailed:
        raise
    except DraftGraphError as error:
        raise MethodFailed(one_line(error)) from error
    except Exception as error:
        raise MethodFailed(f"{type(error).__name__}: {one_line(error)}") from error
