"""Whether texts that share their passes draft at all: what gives more tokens per second, by the clock."""

from __future__ import annotations

from dataclasses import dataclass, field

SPELL = 6  # steps that the other way is tried for
TRYING = 0.01  # of the time may be lost by that, and less if it was in vain
RAREST = 8  # times as rarely, after several times in vain
KEPT = 0.98  # of what was seen, with every step that is seen after it


@dataclass
class Rate:
    """Tokens per second, of late."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = KEPT * self.tokens + tokens, KEPT * self.seconds + seconds

    @property
    def value(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@dataclass
class Custom:
    """All of so many texts draft, or none: as it has paid. Now and then the other way is tried for a few steps, the
    more rarely the more that costs."""

    drafts: bool
    _rates: dict[bool, Rate] = field(default_factory=lambda: {True: Rate(), False: Rate()})
    _trying: bool = True
    _steps: int = 0  # of this spell
    _spell: Rate = field(default_factory=Rate)
    _pause: float = 0.0  # seconds until the other way is tried
    _in_vain: int = 0  # how often it was tried, since the custom was changed

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of theirs; the first of a spell has to begin things, and is no measure."""
        self._steps += 1
        self._pause -= seconds
        self._spell.tokens += tokens
        self._spell.seconds += seconds
        if self._steps > 1:
            self._rates[self.drafts].add(tokens, seconds)
        here, other = self._rates[self.drafts].value, self._rates[not self.drafts].value
        if self._trying and self._steps < SPELL:
            return
        if other is None or here is None:
            self._turn(trying=True)
        elif self._trying and here < other:
            self._turn(trying=False, lost=self._spell.seconds - self._spell.tokens / other)
        elif self._trying:
            self._trying, self._in_vain = False, 0  # it is the custom from now on
            self._pause = self._spell.seconds / TRYING
        elif here < other or self._pause <= 0:
            self._turn(trying=here >= other)

    def _turn(self, trying: bool, lost: float = 0.0) -> None:
        self.drafts, self._trying = not self.drafts, trying
        self._steps, self._spell = 0, Rate()
        if not trying:
            self._pause = max(0.0, lost) / TRYING * min(RAREST, 2**self._in_vain)
            self._in_vain += 1
