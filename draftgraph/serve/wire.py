"""The messages between the API and the engine process: JSON objects, one a line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from draftgraph import __version__

LONGEST_LINE = 256 * 1024 * 1024  # the log-probabilities of a long prompt are long


@dataclass(frozen=True)
class Ready:
    """The first message of an engine: it can answer."""

    model: str
    context_window: int | None  # of a text that the model takes and the pool has room for
    vocabulary: int
    draft: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    mode: str = "auto"
    exact: bool = False  # a request's tokens are those of plain decoding to the bit, whatever shares its passes

    @property
    def fingerprint(self) -> str:
        """Differs where the same request with the same seed may be answered otherwise."""
        facts = json.dumps([self.model, self.dtype, self.device, __version__])
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:10]}"


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def message(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a message must be an object, not {type(found).__name__}")
    return found
