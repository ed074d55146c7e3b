"""The recipe of a draft's training."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
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
    "steps": (1, 1 << 30),
    "batch_tokens": (16, 1 << 24),
    "learning_rate": (0, 1),
    "warmup": (0, 0.99),
    "prompt_share": (0, 1),
    "seed": (0, 1 << 31),
}
LOSSES = ("kl", "reverse", "tv", "top")
OWN_PROMPTS = 20000
STEPS = 4000
OF_TEXTS = ("prompts", "own_prompts", "max_prompts", "temperatures", "max_new_tokens", "max_length")


@dataclass(frozen=True)
class Recipe:
    """How a draft is trained.

    Attributes:
        layers: Of the draft.
        start_from: Layers of the target to start from: `spread`, `first`, `last`, or numbers such as `0,9,18,29`.
        vocab_size: Tokens that the draft can write, the most frequent in the target's answers; 0: all.
        prompts: JSONL files, `datasets:NAME`, `python[:COUNT]`.
        own_prompts: Prompts that the target writes itself; left out: 20000, or 0 beside `prompts`.
        max_prompts: Of each source.
        temperatures: Every prompt is answered once at each; 0: greedy.
        max_new_tokens: Of an answer.
        max_length: Of a prompt with its answer; longer prompts are cut in the middle.
        minutes: Of training; left out: `steps`.
        steps: Left out: 4000, where no minutes are given.
        batch_tokens: In one step of training.
        optimizer: `muon` for matrices, or `adamw` for all.
        learning_rate: The largest.
        warmup: Share of the training.
        loss: Terms and weights, such as `kl` or `kl+0.5*tv+0.2*top`.
        prompt_share: Share of a prompt's tokens that are learnt as well.
        seed: Of everything random.

    Examples:
        >>> Recipe(layers=4).vocab_size
        12288
    """

    layers: int = 2
    start_from: str = "spread"
    vocab_size: int = 12288
    prompts: tuple[str, ...] = ()
    own_prompts: int | None = None
    max_prompts: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 192
    max_length: int = 1536
    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 32768
    optimizer: str = "muon"
    learning_rate: float = 0.01
    warmup: float = 0.03
    loss: str = "kl+0.5*top"
    prompt_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        prompts = [self.prompts] if isinstance(self.prompts, str | os.PathLike) else self.prompts
        temperatures = [self.temperatures] if isinstance(self.temperatures, int | float) else self.temperatures
        object.__setattr__(self, "prompts", tuple(map(str, prompts)))
        object.__setattr__(self, "temperatures", tuple(temperatures))
        for setting in fields(self):
            value, kind = getattr(self, setting.name), str(setting.type)
            if setting.name not in RANGES or (value is None and kind.endswith("None")):
                continue
            (low, high), whole = RANGES[setting.name], kind.startswith("int")
            if not isinstance(value, int if whole else int | float) or not low <= value <= high:
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{setting.name} must be {what} between {low:g} and {high:g}, not {value!r}")
        if self.steps is not None and self.minutes is not None:
            raise UsageError("steps and minutes exclude each other: give one of them")
        if self.max_new_tokens >= self.max_length:
            raise UsageError(f"max_length must be over max_new_tokens ({self.max_new_tokens}), not {self.max_length}")
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer must be adamw or muon, not {self.optimizer!r}")
        if not self.temperatures or not all(0 <= one < math.inf for one in self.temperatures):
            raise UsageError(f"temperatures must be one or more numbers of at least 0, not {self.temperatures}")
        loss_terms(self.loss)

    @property
    def prompts_to_write(self) -> int:
        """How many prompts the target writes itself."""
        usual = 0 if self.prompts else OWN_PROMPTS
        return usual if self.own_prompts is None else self.own_prompts

    @property
    def steps_to_take(self) -> int | None:
        """None where minutes limit the training."""
        return self.steps or (STEPS if self.minutes is None else None)

    def done(self, step: int, seconds: float) -> float:
        """The share of the training that is done."""
        return step / (self.steps or STEPS) if self.minutes is None else seconds / (60 * self.minutes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def shown(self) -> dict[str, Any]:
        """For people: defaults filled in, and of a file of prompts only its name."""
        prompts = [path.name if (path := Path(source).expanduser()).exists() else source for source in self.prompts]
        understood = {"own_prompts": self.prompts_to_write, "steps": self.steps_to_take}
        return self.to_dict() | understood | {"prompts": prompts, "temperatures": list(self.temperatures)}

    def fingerprint(self) -> str:
        """A digest of every setting that training depends on beside its texts."""
        given = {name: value for name, value in self.to_dict().items() if name not in OF_TEXTS}
        given |= {"loss": loss_terms(self.loss), "steps": self.steps_to_take}
        return digest(json.dumps(given, sort_keys=True))


def loss_terms(text: str) -> dict[str, float]:
    """Weights of a loss.

    >>> loss_terms("kl+0.5*tv")
    {'kl': 1.0, 'tv': 0.5}
    """
    terms: dict[str, float] = {}
    for part in str(text).replace(" ", "").split("+"):
        weight, _, name = part.rpartition("*")
        try:
            value = float(weight or 1)
        except ValueError:
            value = math.nan
        if name not in LOSSES or not 0 < value < math.inf:
            raise UsageError(f'loss must be a sum such as "kl+0.5*tv" of {", ".join(LOSSES)}, not {text!r}')
        terms[name] = terms.get(name, 0.0) + value
    return terms


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:16]
