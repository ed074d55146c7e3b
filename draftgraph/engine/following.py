"""The ranks behind rank 0: they do what it tells them; and scripts that torchrun starts on every rank, where each is to
have rank 0's results."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any, NoReturn, TypeVar

import numpy as np

from draftgraph.engine.adapters import Adapters, LowRank
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.leading import ENGINES
from draftgraph.engine.protocol import Segment
from draftgraph.engine.ranks import ALIKE, FUNCTIONS, Ranks, as_described, described, ranks_of

Found = TypeVar("Found")
Load = Callable[[dict[str, Any]], Any]  # a model, by the arguments of `load_model`

_works = count(1)  # pieces of work of a script; each rank has the same


class Follower:
    """Computes with this rank's parts what rank 0 computes with its own."""

    def __init__(self, ranks: Ranks, load: Load | None = None) -> None:
        self.ranks, self._load = ranks, load
        self._held: dict[int, Any] = {}  # models, engines and contexts, by number
        self._loans: dict[int, Loan] = {}  # by the numbers of engines
        self._ended: dict[int, tuple[Any, list[str] | None]] = {}  # works: what came of them, or an error
        self._pieces: dict[int, deque[Any]] = defaultdict(deque)

    def follow(self) -> NoReturn:
        """Until this process is ended."""
        while True:
            self._do_next()

    def result(self, work: int) -> Any:
        """Follows until rank 0 is done with a piece of work."""
        while work not in self._ended:
            self._do_next()
        found, error = self._ended.pop(work)
        if error is not None:
            raise as_described(error)
        return found

    def pieces(self, work: int) -> Iterator[Any]:
        """The same, with what rank 0 says meanwhile."""
        try:
            while work not in self._ended or self._pieces[work]:
                while self._pieces[work]:
                    yield self._pieces[work].popleft()
                if work not in self._ended:
                    self._do_next()
        finally:
            self.result(work)
            self._pieces.pop(work, None)

    def _do_next(self) -> None:
        for kind, *given in self.ranks.hear():
            try:
                with self.ranks.computing():
                    getattr(self, f"_{kind}")(*given)
            except ALIKE:
                pass  # rank 0 has the same, and sees to it

    # What rank 0 tells: see `Ranks.telling`

    def _load_model(self, options: dict[str, Any]) -> None:
        assert self._load is not None
        model = self._load(options)
        self._held[self.ranks.number_of(model)] = model

    def _call(self, name: str, number: int, given: list[Any], named: dict[str, Any]) -> None:
        import_module(name.partition(":")[0])
        FUNCTIONS[name](self._held.get(number) or self.ranks.model(number), *given, **named)

    def _engine(self, number: int, model: int, kind: str, *options: Any) -> None:
        engine = self._held[number] = ENGINES[kind](self.ranks.model(model), *options)
        self._loans[number] = Loan(engine.model)

    def _open(self, number: int, engine: int, tenant: str, adapter: int) -> None:
        self._held[number] = self._held[engine].open(tenant, adapter)
        self._loans[number] = self._loans[engine]

    def _adapt(self, number: int, given: dict[str, dict[str, list[Any]]]) -> None:
        engine = self._held[number]
        adapters = {name: {place: LowRank(*two) for place, two in one.items()} for name, one in given.items()}
        engine.adapt(Adapters(engine.model, adapters))

    def _run(self, number: int, segments: list[list[Any]]) -> None:
        with self._loans[number]:
            self._held[number].run([self._segment(*segment) for segment in segments])

    def _segment(self, context: int, tokens: Any, depths: Any, visible: Any, scored: bool, chain: bool) -> Segment:
        seen = np.tri(len(tokens), dtype=bool) if visible is None else visible
        return Segment(self._held[context], tokens, depths, seen, scored, chain)

    def _ask(self, number: int, what: str, *given: Any) -> None:
        with self._loans[number]:
            getattr(self._held[number], what)(*given)

    def _expect(self, number: int, tokens: int) -> None:
        self._held[number].expected = tokens

    def _drop(self, number: int) -> None:
        self._held.pop(number, None)
        self._loans.pop(number, None)

    def _piece(self, work: int, piece: Any) -> None:
        self._pieces[work].append(piece)

    def _end(self, work: int, found: Any, error: list[str] | None) -> None:
        self._ended[work] = found, error


# Scripts


def shared(model: Any, work: Callable[[], Found], told: Callable[[Found], Any], heard: Callable[[Any], Found]) -> Found:
    """What rank 0 finds, on every rank of a script. `told` makes of it what a message can hold, `heard` undoes that."""
    ranks = ranks_of(model)
    if ranks is None or not ranks.scripted:
        return work()
    number = next(_works)
    if not ranks.leads:
        return heard(ranks.follower.result(number))
    try:
        found = work()
    except BaseException as error:
        ranks.tell("end", number, None, described(error))
        raise
    ranks.tell("end", number, told(found), None)
    return found


def shared_pieces(model: Any, work: Callable[[], Iterator[Found]]) -> Iterator[Found]:
    """The same for what comes piece by piece; a piece can be told as it is."""
    ranks = ranks_of(model)
    if ranks is None or not ranks.scripted:
        yield from work()
        return
    number = next(_works)
    if not ranks.leads:
        yield from ranks.follower.pieces(number)
        return
    error: list[str] | None = None
    try:
        for piece in work():
            ranks.tell("piece", number, piece)
            yield piece
    except Exception as failure:
        error = described(failure)
        raise
    finally:
        ranks.tell("end", number, None, error)
