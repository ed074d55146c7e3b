"""One request to the target, as a user would type it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    text: str
    kind: str  # the row's task, the sort of request about a passage, "code" or "self"
