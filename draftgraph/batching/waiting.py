"""Sequences that wait, and the order in which they are let in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice, zip_longest

from draftgraph.sequence import Sequence

OVERTAKEN = 32  # times at most that others are let in before one that does not fit yet
LOOKED_AT = 64  # sequences at a time, for one that fits


class Waiting:
    """Tenants take turns, those first that have nothing running, and the sequences of one tenant come in the order of
    their arrival. One that does not fit may be overtaken by others that do, but only so often: from then on all wait
    until it is in, also those of tenants that have nothing running."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Sequence]] = {}  # by tenant, in turn

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In turn: the first of every tenant, then the second of each."""
        return (one for one in chain.from_iterable(zip_longest(*self._queues.values())) if one is not None)

    def add(self, sequence: Sequence) -> None:
        self._queues.setdefault(sequence.tenant, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Before all others of its tenant."""
        self._queues.setdefault(sequence.tenant, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]

    def order(self, running: Collection[str] = ()) -> list[Sequence]:
        """The next, while texts of these tenants are running."""
        return sorted(islice(self, LOOKED_AT), key=lambda one: one.tenant in running and one.overtaken < OVERTAKEN)

    def take(self, fits: Callable[[Sequence], bool], running: Collection[str] = ()) -> Sequence | None:
        """The next that fits, if it may be let in before those that do not."""
        order, in_turn = self.order(running), list(islice(self, LOOKED_AT))
        for place, sequence in enumerate(order):
            if fits(sequence):
                for other in {*order[:place], *in_turn[: in_turn.index(sequence)]}:
                    other.overtaken += not fits(other)
                self._end_turn(sequence)
                return sequence
            if sequence.overtaken >= OVERTAKEN:
                return None
        return None

    def _end_turn(self, sequence: Sequence) -> None:
        queue = self._queues.pop(sequence.tenant)
        queue.remove(sequence)
        if queue:
            self._queues[sequence.tenant] = queue
