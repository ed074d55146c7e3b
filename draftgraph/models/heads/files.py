"""Tensors in folders of safetensors files: which file holds each, and only those that are wanted read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from draftgraph.errors import LoadError, UsageError, one_line
from draftgraph.models.draft import WEIGHTS

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor of a model, and not of what lies beside it, such as a checkpoint of its training."""
    index, whole = folder / (WEIGHTS + ".index.json"), folder / WEIGHTS
    if index.exists():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise LoadError(f"{index} cannot be read ({one_line(error)}): copy it again") from error
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickle = next((file.name for kind in PICKLES for file in sorted(folder.glob(kind))), None)
        raise UsageError(
            f"{folder} holds no safetensors file"
            + (f" but a pickle, {pickle}, which can run code" if pickle else "")
            + ": convert it where you trust it, with safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'model.safetensors')"
        )
    found: dict[str, Path] = {}
    for file in files:
        with opened(file) as content:
            found |= dict.fromkeys(content.keys(), file)
    return found


def read_tensors(files: dict[str, Path]) -> dict[str, Tensor]:
    """These tensors, each of its file."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with opened(file) as content:
            tensors |= {name: content.get_tensor(name) for name, place in files.items() if place == file}
    return tensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, of which a tensor is read when it is asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{file} cannot be read ({one_line(error)}): copy it again") from error
