"""A training's state in one file, replaced as a whole: whoever is killed leaves the last good one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftgraph.errors import UsageError
from draftgraph.models.cache import replacing
from draftgraph.models.draft_folder import ELSEWHERE
from draftgraph.models.faults import one_line, writing

MadeOf = dict[str, str]  # what must be the same for a training to go on: the target, the recipe, the texts


@dataclass(frozen=True)
class Checkpoint:
    file: Path
    made_of: MadeOf

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        metadata = {"state": json.dumps(state), "made_of": json.dumps(self.made_of)}
        with writing("the checkpoint", self.file.parent, ELSEWHERE):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as partial:
                save_file(kept, partial, metadata=metadata)

    def check(self) -> None:
        """Refuses, before any work, to go on with a training that was made of something else."""
        if self.file.exists():
            with self._opened():
                pass

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
                refuse_other(json.loads(stored.metadata()["made_of"]), self.made_of, self.file)
                yield stored
        except UsageError:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the checkpoint {self.file} cannot be read ({one_line(error)}): remove it") from error


def refuse_other(kept: MadeOf, made_of: MadeOf, file: Path) -> None:
    for name, value in made_of.items():
        if kept.get(name) != value:
            raise UsageError(
                f"{file.parent} holds a training with another {name}: choose another --out, "
                f"or remove {file.name} there to start anew"
            )
