"""Everything that decides what a student becomes: kept with it, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from draftgraph.errors import UsageError

RANGES: dict[str, tuple[float, float]] = {
    "layers": (1, 1000),
    "vocab_size": (0, 1 << 24),
    "own_prompts": (0, 1 << 24),
    "max_prompts": (1, 1 << 30),
    "max_new_tokens": (1, 1 << 16),
    "max_length": (8, 1 << 20),
    "minutes": (0.01, 1e5),
    "batch_tokens": (16, 1 << 24),
    "learning_rate": (0, 1),
    "prompt_weight": (0, 1),
}


@dataclass(frozen=True)
class Recipe:
    """How a student is made.

    >>> Recipe(layers=2).vocab_size
    16384
    """

    layers: int = 4
    start_from: str = "spread"  # which of the target's layers: spread, first, last, or numbers such as 0,9,18,29
    vocab_size: int = 16384  # tokens that the draft can write, the most frequent in the target's answers; 0: all
    prompts: tuple[str, ...] = ()  # JSONL files, datasets:NAME, python
    own_prompts: int = 20000  # prompts that the target writes itself
    max_prompts: int | None = None  # of each source
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # every prompt is answered once at each; 0: greedy
    max_new_tokens: int = 256
    max_length: int = 1536  # of a prompt with its answer; longer prompts are cut in the middle
    minutes: float | None = None  # of training; left out: `steps`
    steps: int = 4000
    batch_tokens: int = 32768  # in one step of training
    optimizer: str = "adamw"  # or muon, for matrices
    learning_rate: float = 4e-3
    warmup: float = 0.03  # share of the training
    loss: str = "kl"  # terms and weights, such as "kl" or "kl+0.5*tv+0.2*top"
    prompt_weight: float = 0.1  # of a token of the prompt against one of the answer
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must be between {low:g} and {high:g}, not {value}")
        if self.max_new_tokens >= self.max_length:
            raise UsageError(f"max_length must be over max_new_tokens ({self.max_new_tokens}), not {self.max_length}")
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer must be adamw or muon, not {self.optimizer!r}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UsageError("temperatures must be one or more numbers of at least 0")
        loss_terms(self.loss)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self, *more: str) -> str:
        """Of what training depends on."""
        return digest(json.dumps(self.to_dict(), sort_keys=True), *more)


LOSSES = ("kl", "reverse", "tv", "top")


def loss_terms(text: str) -> dict[str, float]:
    """Weights of a loss.

    >>> loss_terms("kl+0.5*tv")
    {'kl': 1.0, 'tv': 0.5}
    """
    terms: dict[str, float] = {}
    for part in text.replace(" ", "").split("+"):
        weight, _, name = part.rpartition("*")
        try:
            terms[name] = float(weight or 1)
        except ValueError:
            terms[""] = 0.0
        if name not in LOSSES:
            raise UsageError(f'loss must be a sum such as "kl+0.5*tv" of {", ".join(LOSSES)}, not {text!r}')
    return terms


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:16]
