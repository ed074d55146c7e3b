"""What a run reports: scores, the state of a training, the finished draft, a live line, out of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from draftgraph.errors import DraftGraphError

QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class Scores:
    """Of the target's greedy answers to prompts that were not learnt from, over the full vocabulary."""

    agreement: float  # share of tokens that are the student's best
    tokens_per_pass: float  # of a chain of eight, the target's own token included
    texts: int
    by_depth: tuple[float, ...] = ()  # of a head: agreement of each drafted token, those before it being the target's

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Scores:
        return cls(**stored | {"by_depth": tuple(stored.get("by_depth", ()))})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"by_depth": list(self.by_depth)}


@dataclass(frozen=True)
class TrainingState:
    """How far a training is, and how good."""

    step: int
    done: float  # share of the training
    seconds: float
    loss: float
    agreement: float  # with the target's best token, on what is being learnt
    scores: Scores | None  # on texts that are not learnt from

    def __str__(self) -> str:
        parts = [f"step {self.step:,}", f"{self.done:.0%}", f"loss {self.loss:.3f}", f"agreement {self.agreement:.3f}"]
        if self.scores is not None:
            parts.append(f"held out {self.scores.agreement:.3f}, {self.scores.tokens_per_pass:.2f} tokens per pass")
        seconds_left = self.seconds * (1 - self.done) / self.done if self.done else 0.0
        return " · ".join([*parts, f"{clock(seconds_left)} left"])


@dataclass(frozen=True)
class Distilled:
    """A finished draft: where it is, and how good on answers that it did not learn from.

    Attributes:
        folder: For `draftgraph.load(target, draft=folder)`.
        scores: `agreement` with the target's tokens, and `tokens_per_pass` of a chain of eight, as it was stored; of a
            head, also the agreement `by_depth`.
        before: The same before training.
        steps: Of training.
        seconds: Of training.
        weights: That it does not borrow from its target.
    """

    folder: Path
    scores: Scores
    before: Scores
    steps: int
    seconds: float
    weights: int

    def __str__(self) -> str:
        depths = ", ".join(f"{share:.3f}" for share in self.scores.by_depth)
        return (
            f"{self.folder}: {amount(self.weights)} weights of its own, agreement {self.scores.agreement:.3f} "
            f"(before training {self.before.agreement:.3f}), {f'by depth {depths}, ' if depths else ''}"
            f"chain of 8: {self.scores.tokens_per_pass:.2f} tokens per pass; trained for {clock(self.seconds)}"
        )


class Reporter:
    """One live line at a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._status: Status | None = Status("", console=self.console) if self.console.is_terminal else None
        self._last = time.monotonic()

    def live_line(self) -> AbstractContextManager[Any]:
        """While entered, the live line is shown where there is a terminal."""
        return self._status or nullcontext()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, soft_wrap=True)

    def begin(self, line: str) -> None:
        """Names what begins now and may take long, at a terminal or not."""
        if self._status:
            self._status.update(line)
        else:
            self._last = time.monotonic()
            self.say(line)

    def live(self, line: str) -> None:
        """A line that the next one replaces at a terminal; elsewhere only one every few seconds."""
        if self._status or time.monotonic() - self._last > QUIET_SECONDS:
            self.begin(line)

    def training(self, state: TrainingState) -> None:
        self.live(f"training: {state}")


def amount(number: int) -> str:
    """
    >>> amount(4321), amount(12_345_678)
    ('4,321', '12.3M')
    """
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f}M"


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def out_of_memory_means(line: str) -> Iterator[None]:
    """Running out of memory inside becomes an error with this line, which says what to try."""
    from torch import OutOfMemoryError

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError | MemoryError) or "not enough memory" in str(error):
            raise DraftGraphError(f"out of memory with {line}") from error
        raise
