"""Splits the text of an answer, as it comes, into reasoning, content and tool calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import regex

from draftgraph.serve.lark import Rules

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields where more text is needed
Match = Any  # regex brings no types; unlike re it knows when a match needs more text
Pattern = Any


@dataclass(frozen=True)
class Syntax:
    """How values are written."""

    quotes: str
    foreign: str  # what no value has outside of quotes: backslashes, and a sign of every mark that begins a call


JSON, PYTHON = Syntax('"', "\\<_"), Syntax("\"'", "\\<")


@dataclass
class CallDelta:
    """A piece of a tool call: the first has its id and name, all have some of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class Parsed:
    """What one piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Tags:
    """What encloses the reasoning of a model."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end


class CallFormat(Protocol):
    """How the models of a family write tool calls."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def sign(self) -> Pattern:
        """Found in the chat templates of the family."""

    @property
    def opening(self) -> Pattern:
        """What comes before a call, anywhere in an answer."""

    @property
    def bare(self) -> Pattern | None:
        """What comes before a call at the very beginning of an answer."""

    @property
    def following(self) -> Pattern | None:
        """What comes before a call that directly follows another."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""

    def read(self, scan: Scan, opening: Match) -> Wait[bool]:
        """Reads a call behind its opening; takes nothing and returns False where there is none."""

    @property
    def new_id(self) -> Callable[[], str]: ...

    @property
    def trigger(self) -> str:
        """A text in every call but bare ones: what has it not is none."""

    @property
    def beginning(self) -> str:
        """A regular expression for text that begins with no bare call."""

    def rules(self, schemas: Mapping[str, Any], several: bool, rules: Rules, begun: bool = False) -> list[str]:
        """Of a Lark grammar: `calls` is one or more calls of the functions whose arguments have these schemas.

        `begun`: behind the trigger of the first.
        """


class Brackets:
    """Finds where a value in brackets ends, as its text comes."""

    def __init__(self, quotes: str, foreign: str = "") -> None:
        self._quotes, self._foreign, self._quote = quotes, foreign, ""
        self._depth, self._escaped = 0, False
        self.broken = False  # by a foreign sign: it has no end

    def end(self, text: Iterable[str]) -> int | None:
        """The place behind the last bracket in the next piece of text."""
        for place, sign in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = sign == "\\"
                self._quote = "" if sign == self._quote else self._quote
            elif sign in self._quotes:
                self._quote = sign
            elif sign in "{[(":
                self._depth += 1
            elif sign in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
            elif sign in self._foreign:
                self.broken = True
                break
        return None


class Scan:
    """Text that is not decided yet, and what was found before it."""

    def __init__(
        self,
        whole: bool,
        most_calls: int | None,
        hidden: Pattern | None,
        new_id: Callable[[], str],
        schemas: Mapping[str, Any],
    ) -> None:
        self.whole = whole  # all of the answer is there: a call may be looked at before it is told
        self.schemas = schemas  # of the arguments of functions
        self.text, self.ended = "", False
        self.found = Parsed()
        self.calls = 0
        self.left_at_failure = math.inf  # characters behind the place at which reading a call has failed
        self._most_calls, self._hidden, self._new_id = most_calls, hidden, new_id

    def take(self, pattern: Pattern) -> Wait[Match | None]:
        """The pattern, where the text begins with it."""
        while (match := pattern.match(self.text, partial=not self.ended)) and match.partial:
            yield
        if match:
            self.cut(match.end())
        return match

    def pass_until(self, pattern: Pattern, say: Callable[[str], None]) -> Wait[Match | None]:
        """Says the text up to the pattern; None at its end."""
        while True:
            match = pattern.search(self.text, partial=not self.ended)
            if before := self.cut(match.start() if match else None):
                say(before)
            if match and not match.partial:
                self.cut(match.end() - match.start())
                return match
            if self.ended:
                return None
            yield

    def skip_space(self) -> Wait[None]:
        while not (stripped := self.text.lstrip()) and not self.ended:
            yield
        self.text = stripped

    def end_of_value(self, syntax: Syntax = JSON) -> Wait[int | None]:
        """Where the value ends that the text begins with; None if it does not.

        However many calls an answer begins, no part of it is read more often than a value has states: out of quotes,
        or in those of one kind. Over the mark of another call it goes on in quotes alone, while that call begins out
        of them; and different states stay different, for a quote exchanges two of them, and a backslash ends what is
        out of quotes.
        """
        brackets, read = Brackets(syntax.quotes, syntax.foreign), 0
        while (end := brackets.end(self.text[read:])) is None:
            if self.ended or brackets.broken:
                return None
            read = len(self.text)
            yield
        return read + end

    def pass_arguments(self) -> Wait[None]:
        """Of a call, as they come: a JSON object."""
        brackets = Brackets(JSON.quotes)
        while True:
            end = brackets.end(self.text)
            self.argue(self.cut(end))
            if end is not None or self.ended:
                return
            yield

    def cut(self, end: int | None) -> str:
        """Takes the text up to there, or all of it."""
        taken = self.text if end is None else self.text[:end]
        self.text = self.text[len(taken) :]
        return taken

    def say(self, text: str) -> None:
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        if not (self.calls and text.isspace()):
            self.found.content += text

    def think(self, text: str) -> None:
        self.found.reasoning += text

    def call(self, name: str) -> None:
        if self._most_calls is None or self.calls < self._most_calls:
            self.found.calls.append(CallDelta(self.calls, id=self._new_id(), name=name))
        self.calls += 1

    def argue(self, text: str) -> None:
        index = self.calls - 1
        if not text or (self._most_calls is not None and index >= self._most_calls):
            return
        if not self.found.calls or self.found.calls[-1].index != index:
            self.found.calls.append(CallDelta(index))
        self.found.calls[-1].arguments += text


class AnswerParser:
    """Takes pieces of an answer's text and returns what they add to its content, reasoning and tool calls.

    What does not read as a call is content. A stream has to tell of a call before all of it is known, so arguments
    that turn out not to be JSON are told as they are; an answer that is `whole` has such a call in its content.
    """

    def __init__(
        self,
        calls: CallFormat | None = None,
        tags: Tags | None = None,
        *,
        thinking: bool = False,  # the prompt has opened the tag
        whole: bool = False,
        most_calls: int | None = None,
        hidden: frozenset[str] = frozenset(),  # special tokens that the text has for their meaning
        dropped: frozenset[int] | None = None,  # special tokens that it does not have; None: all of them
        schemas: Mapping[str, Any] | None = None,  # of the arguments of functions
    ) -> None:
        self.dropped = dropped
        self._calls, self._tags, self._thinking = calls, tags, thinking
        pattern = regex.compile("|".join(map(regex.escape, sorted(hidden)))) if hidden else None
        self._scan = Scan(whole, most_calls, pattern, calls.new_id if calls else str, schemas or {})
        self._reading = self._read()

    @property
    def has_calls(self) -> bool:
        return self._scan.calls > 0

    def push(self, text: str, last: bool = False) -> Parsed:
        self._scan.text += text
        if self._scan.whole and not last:
            return Parsed()
        self._scan.ended = last
        next(self._reading, None)
        found, self._scan.found = self._scan.found, Parsed()
        return found

    def _read(self) -> Wait[None]:
        scan = self._scan
        if self._tags is not None:
            yield from self._read_reasoning(self._tags)
        if self._calls is not None:
            yield from self._read_calls(self._calls)
        while not scan.ended:
            scan.say(scan.cut(None))
            yield
        scan.say(scan.cut(None))

    def _read_reasoning(self, tags: Tags) -> Wait[None]:
        scan = self._scan
        opened = yield from scan.take(regex.compile(r"\s*" + regex.escape(tags.start)))
        if not (opened or self._thinking):
            return
        yield from scan.skip_space()
        yield from scan.pass_until(regex.compile(r"(?<!\s)\s*" + regex.escape(tags.end)), scan.think)
        yield from scan.skip_space()

    def _read_calls(self, calls: CallFormat) -> Wait[None]:
        scan = self._scan
        opening = (yield from scan.take(calls.bare)) if calls.bare else None
        while True:
            if opening is None:
                opening = yield from scan.pass_until(calls.opening, scan.say)
            if opening is None:
                return
            if (yield from calls.read(scan, opening)):
                opening = (yield from scan.take(calls.following)) if calls.following else None
            else:
                scan.say(opening[0])
                opening = None
