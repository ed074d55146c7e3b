"""Whether texts that share their passes draft at all: what gives more tokens per second, by the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

SPELL = 6  # steps that the other way is tried for
TRYING = 0.01  # of the time may be lost by that, and less if it was in vain
RAREST = 8  # times as rarely, after several times in vain
KEPT = 0.98  # of what was seen, with every step that is seen after it
STALL = 4.0  # times as long as usual: more has other reasons
WORSE = 0.97  # of the other way's rate: less is no luck


@dataclass
class Rate:
    """Tokens per second, of late."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.steps:
            seconds = min(seconds, STALL * self.seconds / self.steps)
        self.tokens, self.seconds = KEPT * self.tokens + tokens, KEPT * self.seconds + seconds
        self.steps = KEPT * self.steps + 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Custom:
    """All of so many texts draft, or none: as it has paid. Now and then the other way is tried for a few steps, the
    more rarely the more that costs."""

    drafts: bool
    _rates: dict[bool, Rate] = field(default_factory=lambda: {True: Rate(), False: Rate()})
    _tried: list[tuple[int, float]] | None = field(default_factory=list)  # steps; None: this is the custom
    _pause: float = 0.0  # seconds until the other way is tried
    _in_vain: int = 0  # how often it was tried, since the custom was changed

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of theirs."""
        if self._tried is not None:
            self._tried.append((tokens, seconds))
            if len(self._tried) == SPELL:
                self._judge(self._tried)
            return
        here, other = self._rates[self.drafts], self._rates[not self.drafts]
        here.add(tokens, seconds)
        self._pause -= seconds
        if here.value < WORSE * other.value:
            self.drafts, self._pause = not self.drafts, SPELL * seconds / TRYING
        elif self._pause <= 0:
            self._try_other()

    def _try_other(self) -> None:
        self.drafts, self._tried = not self.drafts, []

    def _judge(self, tried: list[tuple[int, float]]) -> None:
        """The first step of a spell has to begin things, and is no measure."""
        usual = median(seconds for _, seconds in tried)
        tried = [(tokens, min(seconds, STALL * usual)) for tokens, seconds in tried]
        here, other = self._rates[self.drafts], self._rates[not self.drafts]
        for tokens, seconds in tried[1:]:
            here.add(tokens, seconds)
        if not other.steps:
            return self._try_other()
        spent, gained = sum(seconds for _, seconds in tried), sum(tokens for tokens, _ in tried)
        self._tried = None
        if here.value >= other.value:
            self._pause, self._in_vain = spent / TRYING, 0
            return
        self.drafts = not self.drafts
        self._pause = max(0.0, spent - gained / other.value) / TRYING * min(RAREST, 2**self._in_vain)
        self._in_vain += 1
