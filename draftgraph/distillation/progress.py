"""What a long run shows: one live line at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

if TYPE_CHECKING:
    from draftgraph.distillation.score import Scores

QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class Moment:
    """Where a training stands."""

    step: int
    done: float  # share of the training
    seconds: float
    loss: float
    agreement: float  # with the target's best token, on what is being learnt
    scores: Scores | None  # on texts that are not learnt from

    @property
    def seconds_left(self) -> float:
        return self.seconds * (1 - self.done) / self.done if self.done else 0.0


class Reporter(AbstractContextManager["Reporter"]):
    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._status: Status | None = Status("", console=self.console) if self.console.is_terminal else None
        self._last = time.monotonic()

    def __enter__(self) -> Reporter:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, soft_wrap=True)

    def begin(self, line: str) -> None:
        """What may take long is named at once, everywhere."""
        if self._status:
            self._status.update(line)
        else:
            self._last = time.monotonic()
            self.say(line)

    def live(self, line: str) -> None:
        """A line that the next one replaces, where that is possible."""
        if self._status or time.monotonic() - self._last > QUIET_SECONDS:
            self.begin(line)

    def answers(self, done: int, total: int, tokens_per_second: float | None, left: float) -> None:
        speed = "" if tokens_per_second is None else f" · {tokens_per_second:,.0f} tokens/s"
        self.live(f"answers: {done:,} of {total:,}{speed} · {clock(left)} left")

    def training(self, moment: Moment) -> None:
        parts = [
            f"step {moment.step:,}",
            f"{moment.done:.0%}",
            f"loss {moment.loss:.3f}",
            f"agreement {moment.agreement:.3f}",
        ]
        if moment.scores is not None:
            parts.append(f"held out {moment.scores.agreement:.3f}, {moment.scores.tokens_per_pass:.2f} tokens per pass")
        parts.append(f"{clock(moment.seconds_left)} left")
        self.live("training: " + " · ".join(parts))


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
