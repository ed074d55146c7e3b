"""A training's state in one file, replaced as a whole: whoever is killed leaves the last good one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftgraph.errors import UsageError
from draftgraph.models.faults import one_line, writing


@dataclass(frozen=True)
class Checkpoint:
    file: Path
    made_of: dict[str, str]  # what must be the same for a training to go on: the target, the recipe, the texts

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        partial = self.file.with_suffix(".partial")
        with writing("the checkpoint", self.file.parent):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            save_file(kept, partial, metadata={"state": json.dumps(state), "made_of": json.dumps(self.made_of)})
            os.replace(partial, self.file)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The state that was written last; None where a training starts anew."""
        from safetensors import SafetensorError, safe_open

        if not self.file.exists():
            return None
        try:
            with safe_open(self.file, framework="pt") as stored:
                metadata = stored.metadata()
                self._check(json.loads(metadata["made_of"]))
                return {name: stored.get_tensor(name) for name in stored.keys()}, json.loads(metadata["state"])  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"the checkpoint {self.file} cannot be read ({one_line(error)}): remove it") from error

    def _check(self, made_of: dict[str, str]) -> None:
        for name, value in self.made_of.items():
            if made_of.get(name) != value:
                raise UsageError(
                    f"{self.file.parent} holds a training with another {name}: choose another --out, "
                    f"or remove {self.file.name} there to start anew"
                )
