"""The ranks that hold one model together: processes with a part of its weights each.

Rank 0 leads: it alone schedules, drafts and chooses. Before it computes anything with the model it tells the others
what, in one broadcast on a CPU group, and they compute the same with their parts; collectives inside bring the parts
together. After a pass every rank has the same logits, so each would choose the same tokens: it is enough that rank 0
does, and nothing is sent back.
"""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from draftgraph import errors
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.messages import packed, unpacked
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.sharding import group_of
from draftgraph.errors import DraftGraphError, LoadError, RankError, UnsupportedModelError, UsageError, one_line

FIRST = 1 << 14  # bytes of the first broadcast of a message; most have no second
NEVER = timedelta(days=365)  # a rank may wait for its next message as long as nobody asks anything
REASON_SECONDS = 2.0  # for the news that a rank has ended, behind the error of a collective that it left
ALIKE = (LoadError, OutOfPages, UnsupportedModelError, UsageError)  # what one rank raises, all raise

Given = ParamSpec("Given")
Found = TypeVar("Found")
Message = list[Any]  # its kind and what that is told

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # that rank 0 may have called, by module and name
_current: Ranks | None = None


class Ranks:
    """This process among the ranks, and the way to the others."""

    def __init__(self, rank: int, size: int, scripted: bool = False) -> None:
        """`scripted`: every rank runs the user's script, as torchrun starts it; else only rank 0 does."""
        self.rank, self.size, self.scripted = rank, size, scripted
        self.lost: str | None = None  # why the ranks are no longer complete
        self.follower: Any = None  # what rank 0 tells this one is done by it
        self.waits_since: float | None = None  # rank 0, for a pass on a device
        self._group = dist.new_group(backend="gloo", timeout=NEVER)
        self.lock = threading.RLock()  # rank 0's, while it tells the others something that they do together
        self._told: deque[Message] = deque()  # what the others are told before the next pass
        self.computes: int | None = None  # the thread in which this process computes what all ranks do
        self._models: dict[int, weakref.ref[Any]] = {}
        self._numbers = count(1)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether this thread computes what all ranks do at this moment."""
        return self.computes == threading.get_ident()

    def number(self) -> int:
        """For something that messages are about."""
        return next(self._numbers)

    def adopt(self, model: Any) -> None:
        """A model that is split over these ranks. They do it in the same order, so its number is the same on all."""
        number = -1 - len(self._models)
        self._models[number] = weakref.ref(unwrapped(model))
        if self.leads and not self.scripted:
            weakref.finalize(unwrapped(model), self.tell_later, "drop", number)

    def holds(self, model: Any) -> bool:
        return any(held() is unwrapped(model) for held in self._models.values())

    def number_of(self, model: Any) -> int:
        return next(number for number, held in self._models.items() if held() is unwrapped(model))

    def model(self, number: int) -> Any:
        return self._models[number]()

    # Rank 0

    def tell_later(self, *message: Any) -> None:
        """With the next message that cannot wait."""
        self._told.append(list(message))

    def tell(self, *message: Any) -> None:
        with self.lock:
            self.refuse_lost()
            self.tell_later(*message)
            self._send()

    @contextmanager
    def telling(self, *message: Any, now: bool = True) -> Iterator[None]:
        """What happens inside happens on every rank. `now`: the ranks meet in it; else it can wait until they do."""
        with self.lock:
            if self.together:  # part of what they were told
                yield
                return
            self.refuse_lost()
            self.tell_later(*message)
            with uninterrupted() if now else as_ever():
                try:
                    if now:
                        self._send()
                    with self.computing():
                        yield
                except ALIKE:
                    raise
                except Exception as error:
                    raise self.broken(error) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What all ranks do alike."""
        self.computes = threading.get_ident()
        try:
            yield
        finally:
            self.computes = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a device, whose passes are short: whoever watches the ranks sees that one does not end."""
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None

    def refuse_lost(self) -> None:
        if self.lost is not None:
            raise RankError(self.lost)

    def broken(self, error: Exception) -> RankError:
        """The ranks may stand at different places now: none of them can go on."""
        deadline = time.monotonic() + REASON_SECONDS
        while self.lost is None and not isinstance(error, torch.OutOfMemoryError) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.lost = self.lost or f"rank {self.rank} of {self.size} failed: {one_line(error)} ({type(error).__name__})"
        return RankError(self.lost)

    def _send(self) -> None:
        messages = [self._told.popleft() for _ in range(len(self._told))]
        self._broadcast(packed(messages))

    # Every rank

    def hear(self) -> list[Message]:
        """What rank 0 says next."""
        return unpacked(self._broadcast(None))  # type: ignore[no-any-return]

    def agreed(self, value: Any) -> Any:
        """Rank 0's value: ranks that branch on it do the same."""
        if self.leads:
            self._broadcast(packed(value))
            return value
        return unpacked(self._broadcast(None))

    def all_or_none(self, work: Callable[[], Found]) -> Found:
        """What this rank's work gives. All ranks meet behind it; if one of them fails, all raise the same error."""
        try:
            found = work()
        except Exception as error:
            self._refuse_failed(described(error))
            raise
        self._refuse_failed(None)
        return found

    def _refuse_failed(self, own: list[str] | None) -> None:
        """Raises the first failure of all ranks, of which this is this one's."""
        try:
            told = [self._broadcast(packed(own) if rank == self.rank else None, rank) for rank in range(self.size)]
        except RuntimeError as error:
            raise self.broken(error) from error
        failures = [(rank, failure) for rank, failure in enumerate(map(unpacked, told)) if failure is not None]
        if failures:
            rank, (kind, message) = failures[0]
            where = "" if len(failures) == self.size else f"rank {rank} of {self.size}: "
            raise as_described([kind, where + message])

    def _broadcast(self, content: bytes | None, source: int = 0) -> bytes:
        """From one rank, which alone has it before."""
        first = torch.zeros(FIRST, dtype=torch.uint8)
        room = FIRST - 8
        if content is not None:
            first[:8] = torch.frombuffer(bytearray(len(content).to_bytes(8, "little")), dtype=torch.uint8)
            first[8 : 8 + min(room, len(content))] = torch.frombuffer(bytearray(content[:room]), dtype=torch.uint8)
        dist.broadcast(first, source, group=self._group)
        size = int.from_bytes(first[:8].numpy().tobytes(), "little")
        found = first[8 : 8 + min(room, size)].numpy().tobytes()
        if size > room:
            rest = torch.empty(size - room, dtype=torch.uint8)
            if content is not None:
                rest = torch.frombuffer(bytearray(content[room:]), dtype=torch.uint8)
            dist.broadcast(rest, source, group=self._group)
            found += rest.numpy().tobytes()
        return found


class Led:
    """Something of rank 0 that every rank has under one number."""

    def __init__(self, group: Ranks, inner: Any, number: int) -> None:
        self.group, self.inner, self.number = group, inner, number
        weakref.finalize(self, group.tell_later, "drop", number)


def described(error: BaseException) -> list[str]:
    """Its class, if it is one of ours, and its message: for another rank."""
    return [type(error).__name__, str(error)] if isinstance(error, DraftGraphError) else ["", one_line(error)]


def as_described(said: list[str]) -> DraftGraphError:
    """What `described` was given, as far as it tells."""
    kind, message = said
    return getattr(errors, kind, DraftGraphError)(message)


def current() -> Ranks | None:
    return _current


def join(ranks: Ranks) -> None:
    """This process is one of these ranks from now on."""
    global _current
    _current = ranks


def ranks_of(model: Any) -> Ranks | None:
    """The ranks that hold a model; None: it is all here."""
    if _current is not None and _current.holds(model):
        return _current
    if group_of(unwrapped(model)) is not None:
        name = type(unwrapped(model)).__name__
        raise UsageError(f"{name} is split over several processes: give it to draftgraph.load in each of them")
    return None


def rank_count(model: Any) -> int:
    ranks = ranks_of(model)
    return 1 if ranks is None else ranks.size


def refuse_split(model: Any, what: str) -> None:
    if rank_count(model) > 1:
        raise UsageError(f"{what} needs all of a target in one process: load it without tensor_parallel")


def on_every_rank(
    function: Callable[Concatenate[Any, Given], Found],
) -> Callable[Concatenate[Any, Given], Found]:
    """A function of a model, or of an engine, which rank 0 has all ranks call with their own. It must do the same on
    each of them: what it branches on is `agreed`."""
    name = f"{function.__module__}:{function.__qualname__}"
    FUNCTIONS[name] = function

    @wraps(function)
    def call(subject: Any, /, *given: Given.args, **named: Given.kwargs) -> Found:
        if isinstance(subject, Led):
            with subject.group.telling("call", name, subject.number, given, named):
                return function(subject.inner, *given, **named)
        ranks = ranks_of(subject) if isinstance(subject, nn.Module) else None
        if ranks is None or not ranks.leads:
            return function(subject, *given, **named)
        with ranks.telling("call", name, ranks.number_of(subject), given, named):
            return function(subject, *given, **named)

    return call


def together() -> bool:
    """Whether this thread computes what all ranks do at this moment."""
    return _current is not None and _current.together


def agreed(value: Found) -> Found:
    """In what all ranks compute: rank 0's value. Elsewhere the value itself."""
    return _current.agreed(value) if _current is not None and together() else value


@contextmanager
def as_ever() -> Iterator[None]:
    yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect afterwards: a rank that leaves a pass leaves the others in it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *told: came.append(told))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
