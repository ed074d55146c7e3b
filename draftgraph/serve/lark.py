"""Rules of grammars in Lark, as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

import regex

ANY_TEXT = "(?s:.*)"
# Where any space is allowed, a small model may go on with it forever.
AS_PYTHON_WRITES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Rules:
    """Writes rules for one tokenizer, some of whose tokens are opaque: known by their numbers, never read as text."""

    def __init__(self, opaque: Mapping[str, int]) -> None:
        self._opaque = opaque
        longest_first = sorted(opaque, key=len, reverse=True)
        self._any = regex.compile("|".join(map(regex.escape, longest_first))) if opaque else None

    def text(self, text: str) -> str:
        """This text, as a part of a rule."""
        before, token, after = self._split(text)
        if token is None:
            return json.dumps(text) if text else ""
        return " ".join(filter(None, [self.text(before), self._numbers(token), self.text(after)]))

    def until(self, name: str, end: str) -> list[str]:
        """A rule for any text up to this end, and the end."""
        before, token, after = self._split(end)
        if token is None:
            return [f"{name}[suffix={json.dumps(end)}]: /{ANY_TEXT}/"]
        if not before:
            return [f"{name}: /{ANY_TEXT}/ {self._numbers(token)} {self.text(after)}"]
        parts = [f"{name}_part[suffix={json.dumps(before)}]: /{ANY_TEXT}/"]
        return [f"{name}: {name}_part+ {self._numbers(token)} {self.text(after)}", *parts]

    def around(self, trigger: str, beginning: str, apart: Collection[str] = ()) -> list[str]:
        """Rules for what is said without a trigger, `said`, or up to the first and with it, `lead`, whether its tokens
        are opaque or spell it out. Text at the very beginning matches `beginning`; the tokens `apart` do not occur."""
        _, token, after = self._split(trigger)
        others = self._numbers(*(self._opaque.keys() - {token, *apart}))
        spelled = f"[suffix={json.dumps(trigger)}]"
        leads = (
            ["spelled_first"] if token is None else [f"said {self._numbers(token)} {self.text(after)}", "spelled_first"]
        )
        rules = [f"FIRST: /{beginning}/", f"spelled_first{spelled}: /{beginning}/"]
        if not others:
            return ["said: FIRST?", f"lead: {' | '.join(leads)}", *rules]
        leads.append(f"FIRST? {others} (TEXT? {others})* spelled")
        rules += [f"TEXT: /{ANY_TEXT}/", f"spelled{spelled}: /{ANY_TEXT}/"]
        return [f"said: FIRST? ({others} TEXT?)*", f"lead: {' | '.join(leads)}", *rules]

    def _numbers(self, *tokens: str) -> str:
        """Any one of these, none of which is text."""
        return f"<[{','.join(ranges(self._opaque[token] for token in tokens))}]>" if tokens else ""

    def _split(self, text: str) -> tuple[str, str | None, str]:
        """Around the first opaque token."""
        found = None if self._any is None else self._any.search(text)
        return (text, None, "") if found is None else (text[: found.start()], found[0], text[found.end() :])


def ranges(numbers: Iterable[int]) -> list[str]:
    """Such as 3 and 7-9."""
    runs = groupby(enumerate(sorted(numbers)), lambda placed: placed[1] - placed[0])
    found = [[number for _, number in run] for _, run in runs]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found]


def json_rule(schema: Any, definitions: Mapping[str, Any] | None = None) -> str:
    if isinstance(schema, dict):
        schema = {**(definitions or {}), **schema, "x-guidance": AS_PYTHON_WRITES}
    return f"%json {json.dumps(schema)}"
