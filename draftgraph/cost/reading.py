"""How much of prompts one step reads, and of which: a long prompt must hold up neither the answers of others nor their
short prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftgraph.config import CostModel
from draftgraph.cost.sharing import STALL, mean
from draftgraph.graph import Floats, Ints

ALL = 1 << 62  # tokens: no bound
LEAST = 16  # tokens, however long they take: a prompt must come to its end
SLOWER = 3.0  # times as long as a step that reads nothing
ALONE = 1024  # tokens at most, where nobody waits for the next token of an answer
SECONDS = 0.5  # for those: somebody may come


class Pace:
    """How many tokens of prompts a step reads beside the answers of others: so many that it takes SLOWER times as long
    as one that reads none. Prices tell how that changes with the nodes of a pass and the length of a text; the clock
    tells what a price is worth, with all that stands around a pass and whoever else uses the machine."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._plain: float | None = None  # seconds of a step that reads nothing, for the price of its pass
        self._pass: float | None = None  # of that pass alone
        self._reading: float | None = None  # seconds that reading takes, for its price

    def room(self, others: float, reading: CostModel) -> int:
        """`others`: the price of a pass over their nodes, 0 if there are none; `reading`: prices behind the text that
        is being read."""
        most, seconds = self.most, (SLOWER - 1.0) * others * (self._plain or 1.0)
        if not others:
            most, seconds = ALONE, SECONDS
        prices = price_of_reading(reading, np.arange(LEAST, most + 1, LEAST))
        enough = int(((self._reading or self._pass or 1.0) * prices <= seconds).sum())
        return min(most, LEAST * max(1, enough))

    def learn(self, seconds: float, verifying: float, others: float, read: float) -> None:
        """A step took so long, and its pass; `others` and `read` are the prices of what that checked and read."""
        if others and not read:
            self._plain = followed(self._plain, seconds / others)
            self._pass = followed(self._pass, verifying / others)
        elif read and (self._pass is not None or not others):
            self._reading = followed(self._reading, max(0.0, verifying - others * (self._pass or 0.0)) / read)


def price_of_reading(prices: CostModel, tokens: Ints) -> Floats:
    """What a pass costs more for so many tokens: it reads the model's weights anyway."""
    return prices.of_pass(tokens + 1) - prices.of_pass(np.ones_like(tokens))


def followed(known: float | None, newest: float) -> float:
    """The mean of late; a step that was held up counts as a slow one."""
    return mean(known, newest if known is None else min(newest, STALL * known))


def share(unread: Sequence[int], room: int) -> list[int]:
    """How many tokens of each text are read: half of the room is the first's, the rest goes to the shortest first."""
    found = [0] * len(unread)
    shortest_first = sorted(range(len(unread)), key=unread.__getitem__)
    for place, most in [(0, (room + 1) // 2), *((place, room) for place in shortest_first)] if unread else []:
        more = min(unread[place] - found[place], most, room)
        found[place] += more
        room -= more
    return found
