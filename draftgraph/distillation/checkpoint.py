"""A training's state in one file, replaced as a whole: whoever is killed leaves the last good one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftgraph.distillation.recipe import OF_TEXTS
from draftgraph.errors import UsageError, one_line
from draftgraph.files import replacing, writing
from draftgraph.models.draft import ELSEWHERE

TARGET, RECIPE, ANSWERS = "target", "recipe", "set of answers"
MadeOf = dict[str, str]  # what must be the same for a training to go on, under these names
SETTINGS_NAMED = 3


@dataclass(frozen=True)
class Checkpoint:
    file: Path
    made_of: MadeOf
    recipe: Mapping[str, Any] = field(default_factory=dict)  # as people read it

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        metadata = {"state": state, "made_of": self.made_of, "recipe": self.recipe}
        with writing("the checkpoint", self.file.parent, ELSEWHERE):
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
            f"{setting} {shown(recipe[setting])} there, {shown(here)} here"
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
        """Leaves nothing of a training, nor the halves of files that killed runs began to write."""
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


def shown(value: Any) -> str:
    if value in (None, []):
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
