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
    "block_size": (2, 64),
    "long_length": (0, 1 << 20),
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
LAYERS = {"layers": 2, "states": 1, "block": 5}  # of a draft, by kind, as a rule
MOST_STATES_LAYERS = 2  # it is asked level by level
BLOCK_SIZE = 16
LONG_LENGTH = 8192
OF_HEADS = ("kind", "block_size", "causal", "long_length")
OF_TEXTS = ("prompts", "own_prompts", "max_prompts", "temperatures", "max_new_tokens", "max_length")


@dataclass(frozen=True)
class Recipe:
    """How a draft is trained.

    Attributes:
        kind: `layers` of the target; a head that reads the target's `states`, level by level (EAGLE-3); or one that
            drafts a `block` in one pass (DFlash, JetSpec).
        layers: Of the draft; left out: 2, 1 or 5, by kind.
        start_from: Layers of the target to start from: `spread`, `first`, `last`, or numbers such as `0,9,18,29`.
        block_size: Tokens of a block, the last known one among them; left out: 16.
        causal: Whether a place of a block sees only those before it (JetSpec), or all (DFlash); left out: it does.
        vocab_size: Tokens that the draft can write, the most frequent in the target's answers; 0, or kind block: all.
        prompts: JSONL files, `datasets:NAME`, `python[:COUNT]`.
        own_prompts: Prompts that the target writes itself; left out: 20000, or 0 beside `prompts`.
        max_prompts: Of each source.
        temperatures: Every prompt is answered once at each; 0: greedy.
        max_new_tokens: Of an answer.
        max_length: Of a prompt with its answer; longer prompts are cut in the middle.
        long_length: Some texts are joined to others up to so many tokens, so that a head does not fade in long ones;
            0: none; left out: 8192 for kind block, or `batch_tokens` where that is less.
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

    kind: str = "layers"
    layers: int | None = None
    block_size: int | None = None
    causal: bool | None = None
    start_from: str = "spread"
    vocab_size: int = 12288
    prompts: tuple[str, ...] = ()
    own_prompts: int | None = None
    max_prompts: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 192
    max_length: int = 1536
    long_length: int | None = None
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
        self._check_kind()
        if self.steps is not None and self.minutes is not None:
            raise UsageError("steps and minutes exclude each other: give one of them")
        if self.max_new_tokens >= self.max_length:
            raise UsageError(f"max_length must be over max_new_tokens ({self.max_new_tokens}), not {self.max_length}")
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer must be adamw or muon, not {self.optimizer!r}")
        if not self.temperatures or not all(0 <= one < math.inf for one in self.temperatures):
            raise UsageError(f"temperatures must be one or more numbers of at least 0, not {self.temperatures}")
        loss_terms(self.loss)

    def _check_kind(self) -> None:
        if self.kind not in LAYERS:
            raise UsageError(f"kind must be {', '.join(LAYERS)}, not {self.kind!r}")
        for name, kinds in (("block_size", "block"), ("causal", "block"), ("long_length", "states, block")):
            if getattr(self, name) is not None and self.kind not in kinds:
                raise UsageError(f"{name} is for kind {kinds.replace(',', ' and')}: leave it out with {self.kind}")
        if self.longest > self.batch_tokens:
            raise UsageError(f"long_length must be at most batch_tokens ({self.batch_tokens}), not {self.long_length}")
        if self.kind != "layers" and self.start_from != "spread":
            raise UsageError(f"start_from is for kind layers: leave it out with {self.kind}")
        if self.kind == "states" and self.student_layers > MOST_STATES_LAYERS:
            raise UsageError(f"a head of kind states has at most {MOST_STATES_LAYERS} layers, not {self.layers}")

    @property
    def student_layers(self) -> int:
        return LAYERS[self.kind] if self.layers is None else self.layers

    @property
    def places(self) -> int:
        """Of a block."""
        return self.block_size or BLOCK_SIZE

    @property
    def sees_only_back(self) -> bool:
        """Whether attention inside a block is causal."""
        return self.causal is not False

    @property
    def longest(self) -> int:
        """Tokens of the texts that are joined; 0: none."""
        usual = min(LONG_LENGTH, self.batch_tokens) if self.kind == "block" else 0
        return usual if self.long_length is None else self.long_length

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
        understood = {"own_prompts": self.prompts_to_write, "steps": self.steps_to_take, **self.of_kind()}
        given = {name: value for name, value in self.to_dict().items() if name not in OF_HEADS}
        return given | understood | {"prompts": prompts, "temperatures": list(self.temperatures)}

    def of_kind(self) -> dict[str, Any]:
        """The settings that depend on the kind, defaults filled in."""
        known: dict[str, Any] = {"layers": self.student_layers}
        if self.kind != "layers":
            known |= {"kind": self.kind, "long_length": self.longest}
        if self.kind == "block":
            known |= {"block_size": self.places, "causal": self.sees_only_back}
        return known

    def fingerprint(self) -> str:
        """A digest of every setting that training depends on beside its texts."""
        given = {name: value for name, value in self.to_dict().items() if name not in OF_TEXTS + OF_HEADS}
        given |= self.of_kind() | {"loss": loss_terms(self.loss), "steps": self.steps_to_take}
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
