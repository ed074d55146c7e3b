"""Messages between the ranks of one model: nested lists and dictionaries with arrays in them, as bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARRAY = "\0array"  # the key of what stands for an array: nothing else has it
WORD = 8  # bytes; arrays begin at a multiple


def packed(value: Any) -> bytes:
    """What `unpacked` makes the same value of; tuples become lists."""
    arrays: list[bytes] = []

    def standing_for(part: Any) -> Any:
        if isinstance(part, np.generic):
            return part.item()
        if not isinstance(part, np.ndarray | Tensor):
            raise TypeError(f"a {type(part).__name__} cannot be told to another rank")
        is_tensor = isinstance(part, Tensor)
        tensor = (part.detach().cpu() if isinstance(part, Tensor) else torch.from_numpy(part)).contiguous()
        arrays.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {ARRAY: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), is_tensor]}

    text = json.dumps(value, default=standing_for).encode()
    parts = [len(text).to_bytes(WORD, "little"), filled_up(text), *map(filled_up, arrays)]
    return b"".join(parts)


def unpacked(content: bytes) -> Any:
    size = int.from_bytes(content[:WORD], "little")
    place = WORD + -(-size // WORD) * WORD

    def array(found: dict[str, Any]) -> Any:
        nonlocal place
        if ARRAY not in found:
            return found
        name, shape, is_tensor = found[ARRAY]
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        length = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8, length, place)
        place += -(-length // WORD) * WORD
        return tensor if is_tensor else tensor.numpy()

    return json.loads(content[WORD : WORD + size], object_hook=array)


def filled_up(content: bytes) -> bytes:
    return content + bytes(-len(content) % WORD)
