"""The text of an answer while its tokens come: never half a character, and nothing that may be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftgraph.text import TextStream

MOST_HELD = 64  # tokens that do not make a character: no real text needs this many


class AnswerText:
    """Ends before the first stop string. Which one that is does not depend on how many tokens come at once."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = TextStream(tokenizer), stops
        self._silent = 0  # tokens in a row that gave no text
        self._held = ""  # may yet be the beginning of a stop string
        self.length = 0  # characters so far, those held back included
        self.stopped = False

    @property
    def released(self) -> int:
        return self.length - len(self._held)

    def push(self, token: int) -> str:
        """The text that can be shown now."""
        self._silent += 1
        text = self._stream.push([token], last=self._silent >= MOST_HELD)
        if text:
            self._silent = 0
        return self._release(text)

    def finish(self) -> str:
        """The rest: no more tokens will come."""
        shown = self._release(self._stream.push([], last=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _release(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        self.length += len(text)
        self._held += text
        if found := first_to_end(self._held, self._stops):
            self.stopped = True
            shown = self._held[: found[0]]
            self.length -= len(self._held) - len(shown)
            self._held = ""
            return shown
        kept = longest_beginning(self._held, self._stops)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown


def first_to_end(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first, reading from the left; the longest of such."""
    found = [(start, start + len(stop)) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found, key=lambda place: (place[1], place[0]), default=None)


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
