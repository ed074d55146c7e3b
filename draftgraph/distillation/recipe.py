"""What a draft is made of: the recipe of its training, and a checkpoint that refuses to go on with another."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.errors import UsageError, one_line
from draftgraph.files import ANOTHER_OUT, replacing, writing

if TYPE_CHECKING:
    from torch import Tensor

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
TARGET, RECIPE, ANSWERS = "target", "recipe", "set of answers"
MadeOf = dict[str, str]  # what must be the same for a training to go on, under these names
SETTINGS_NAMED = 3


@dataclass(frozen=True)
class Recipe:
    """How a student is made.

    >>> Recipe(layers=4).vocab_size
    12288
    """

    layers: int = 2
    start_from: str = "spread"  # which of the target's layers: spread, first, last, or numbers such as 0,9,18,29
    vocab_size: int = 12288  # tokens that the draft can write, the most frequent in the target's answers; 0: all
    prompts: tuple[str, ...] = ()  # JSONL files, datasets:NAME, python[:COUNT]
    own_prompts: int | None = None  # prompts that the target writes itself; left out: 20000, or 0 beside `prompts`
    max_prompts: int | None = None  # of each source
    temperatures: tuple[float, ...] = (0.0, 0.7)  # every prompt is answered once at each; 0: greedy
    max_new_tokens: int = 192
    max_length: int = 1536  # of a prompt with its answer; longer prompts are cut in the middle
    minutes: float | None = None  # of training; left out: `steps`
    steps: int | None = None  # left out: 4000, where no minutes are given
    batch_tokens: int = 32768  # in one step of training
    optimizer: str = "muon"  # for matrices; or adamw for all
    learning_rate: float = 0.01
    warmup: float = 0.03  # share of the training
    loss: str = "kl+0.5*top"  # terms and weights, such as "kl" or "kl+0.5*tv+0.2*top"
    prompt_share: float = 0.1  # of a prompt's tokens that are learnt as well
    seed: int = 0

    def __post_init__(self) -> None:
        prompts = [self.prompts] if isinstance(self.prompts, str | os.PathLike) else self.prompts
        temperatures = [self.temperatures] if isinstance(self.temperatures, int | float) else self.temperatures
        object.__setattr__(self, "prompts", tuple(map(str, prompts)))
        object.__setattr__(self, "temperatures", tuple(temperatures))
        for setting in fields(self):
            if setting.name in RANGES:
                refuse_outside(setting.name, str(setting.type), getattr(self, setting.name))
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
        if self.own_prompts is None:
            return 0 if self.prompts else OWN_PROMPTS
        return self.own_prompts

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


def refuse_outside(name: str, kind: str, value: Any) -> None:
    if value is None and kind.endswith("None"):
        return
    (low, high), whole = RANGES[name], kind.startswith("int")
    if not isinstance(value, int if whole else int | float) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise UsageError(f"{name} must be {what} between {low:g} and {high:g}, not {value!r}")


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


@dataclass(frozen=True)
class Checkpoint:
    """A training's state in one file, replaced as a whole: a killed run leaves the last good one."""

    file: Path
    made_of: MadeOf
    recipe: Mapping[str, Any] = field(default_factory=dict)  # as people read it

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        metadata = {"state": state, "made_of": self.made_of, "recipe": self.recipe}
        with writing("the checkpoint", self.file.parent, ANOTHER_OUT):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as partial:
                save_file(kept, partial, metadata={name: json.dumps(value) for name, value in metadata.items()})

    def check(self) -> None:
        """Refuses, before any work, to go on with a training that was made of something else."""
        if self.file.exists():
            with self._opened():
                pass

    def refuse_other(self, made_of: MadeOf, recipe: Mapping[str, Any], file: Path) -> None:
        """Refuses what a file holds if it was made of something else than this training."""
        for name, value in self.made_of.items():
            if made_of.get(name) != value:
                raise UsageError(
                    f"{file.parent} holds a training with another {name}{self.differing(name, recipe)}: choose "
                    f"another --out, or remove {file.name} there to start anew"
                )

    def differing(self, name: str, recipe: Mapping[str, Any]) -> str:
        """The settings that make the difference, as far as they are known."""
        said = [
            f"{setting} {as_text(recipe[setting])} there, {as_text(here)} here"
            for setting, here in self.recipe.items()
            if name == (ANSWERS if setting in OF_TEXTS else RECIPE) and recipe.get(setting, here) != here
        ]
        return f" ({'; '.join(said[:SETTINGS_NAMED])})" if said else ""

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The state that was written last; None where a training starts anew."""
        if not self.file.exists():
            return None
        with self._opened() as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}, json.loads(stored.metadata()["state"])  # noqa: SIM118

    def remove(self) -> None:
        """Deletes the checkpoint, and partial files of killed runs."""
        for file in (self.file, *self.file.parent.glob(".*.partial")):
            file.unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as stored:
                kept = {name: json.loads(text) for name, text in stored.metadata().items()}
                self.refuse_other(kept["made_of"], kept.get("recipe", {}), self.file)
                yield stored
        except UsageError:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"the checkpoint {self.file} cannot be read ({one_line(error)}): remove it") from error


def as_text(value: Any) -> str:
    if value in (None, []):
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
