"""The text of tokens: of an answer while they come, and of a single token for log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from draftgraph.text import TextStream

MOST_HELD = 64  # tokens that do not make a character: no real text needs this many
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte
SPACE = "\u2581"  # and a space


@dataclass(frozen=True)
class TextRules:
    """What of an answer's tokens is shown."""

    stops: Sequence[str] = ()
    least: int = 0  # tokens in which no stop string ends
    with_stop: bool = False  # an answer ends behind a stop, not before it
    dropped: frozenset[int] | None = None  # tokens; None: the special ones


class AnswerText:
    """Never half a character, nor what may be the beginning of a stop string; ends at the first of those.

    Which stop string is the first does not depend on how many tokens come at once.
    """

    def __init__(self, tokenizer: Any, rules: TextRules | None = None) -> None:
        self.rules = rules or TextRules()
        self._stream, self._stops = TextStream(tokenizer, self.rules.dropped), self.rules.stops
        self._silent = 0  # tokens in a row that gave no text
        self._tokens = 0
        self._free = 0  # characters in which no stop string ends
        self._held = ""  # may yet be the beginning of a stop string
        self.length = 0  # characters so far, those held back included
        self.stopped = False

    @property
    def released(self) -> int:
        return self.length - len(self._held)

    def push(self, token: int) -> str:
        """The text that can be shown now."""
        self._tokens += 1
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
        if self._tokens <= self.rules.least:
            self._free = self.length
        if found := first_to_end(self._held, self._stops, self._free - self.released):
            self.stopped = True
            shown = self._held[: found[1] if self.rules.with_stop else found[0]]
            self.length -= len(self._held) - len(shown)
            self._held = ""
            return shown
        kept = longest_beginning(self._held, self._stops)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown


def first_to_end(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first, reading from the left; the longest of such.

    Those that end in the first `after` characters do not count.
    """
    starts = ((stop, text.find(stop, max(0, after - len(stop) + 1))) for stop in stops)
    found = [(start, start + len(stop)) for stop, start in starts if start >= 0]
    return min(found, key=lambda place: (place[1], place[0]), default=None)


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string."""
    beginnings = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(beginnings, default=0)


class TokenNames:
    """What the tokens of one tokenizer are called: their bytes, and a text for those."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # as GPT-2 and its successors write bytes

        self._tokenizer = tokenizer
        self._byte_of = {sign: bytes([byte]) for byte, sign in bytes_to_unicode().items()}
        self._added = {int(id): str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._is_byte_level = "Ġ" in tokenizer.get_vocab()
        self.bytes = lru_cache(maxsize=65536)(self._bytes)
        self.entry = lru_cache(maxsize=65536)(self._entry)

    def text(self, token: int) -> str:
        """Half a character shows as a replacement character."""
        return self.bytes(token).decode("utf-8", "replace")

    def _entry(self, token: int) -> dict[str, Any]:
        """As chats have it; not to be changed."""
        return {"token": self.text(token), "logprob": 0.0, "bytes": list(self.bytes(token))}

    def key(self, token: int) -> str:
        """Tells apart tokens that are no text of their own, in the way that OpenAI does."""
        found = self.bytes(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # vocabularies are padded
            return b""
        if self._is_byte_level:
            return b"".join(self._byte_of.get(sign) or sign.encode() for sign in name)
        if byte := BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return str(name).replace(SPACE, " ").encode()
