"""Tokens as text that can be shown anywhere: whitespace made visible, nothing that XML or a terminal cannot take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.cells import cell_len

Decode = Callable[[list[int]], str]

VISIBLE = {chr(code): chr(0x2400 + code) for code in range(32)} | {" ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}
HALF_CHARACTER = "\ufffd"


def visible(text: str, keep: str = "") -> str:
    """The text with whitespace and controls as symbols, except for the characters to keep.

    >>> visible(" a\\n\\x00")
    '␣a⏎␀'
    """
    return "".join(character if character in keep else _visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def label(text: str, token: int, longest: int = 16) -> str:
    """A token's short visible name; a token without text of its own is named by its id."""
    name = visible(text) or f"‹{token}›"
    if cell_len(name) <= longest:
        return name
    while cell_len(name) > longest - 1:
        name = name[:-1]
    return name + "…"


def probability(value: float) -> str:
    """Two digits, as short as they can be told.

    >>> probability(0.834), probability(1.0), probability(0.001)
    ('.83', '1', '<.01')
    """
    if value >= 0.995:
        return "1"
    return f"{value:.2f}"[1:] if value >= 0.005 else "<.01"


def piece(decode: Decode, before: int, token: int) -> str:
    """What a token adds to the text after another one: some tokenizers drop a leading space at the start."""
    start, both = decode([before]), decode([before, token])
    added = both.removeprefix(start) if both.startswith(start) else decode([token])
    return without_surrogates(added)


def pieces(decode: Decode, before: int, tokens: list[int]) -> Iterator[str]:
    """The text that each token adds; a character split over several tokens belongs to the one that completes it."""
    ids = [before, *tokens]
    start, shown = 0, 1
    for end in range(2, len(ids) + 1):
        known, now = decode(ids[start:shown]), decode(ids[start:end])
        if now.endswith(HALF_CHARACTER) and end < len(ids):
            yield ""
        else:
            yield without_surrogates(now[len(known) :])
            start, shown = shown, end


def without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
