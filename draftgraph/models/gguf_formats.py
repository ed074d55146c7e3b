"""The number formats of GGUF files, as groups of 32 whole numbers with a scale and an offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftgraph.kernels.packed import PackedTensor, compressed
from draftgraph.models.gguf_file import PLAIN

Bytes = NDArray[np.uint8]
Groups = tuple[Bytes, Any, Any]  # numbers [blocks, ..., 32], scales and offsets [blocks, ...]
ROWS = 4096  # of a weight that are converted at a time


def half(blocks: Bytes, start: int) -> Any:
    """A number in float16 of every block, as float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0].astype(np.float32)


def nibbles(held: Bytes) -> Bytes:
    """The lower halves of 16 bytes, then the upper ones."""
    return np.concatenate([held & 15, held >> 4], axis=-1)


def fifth_bits(held: Bytes) -> Bytes:
    """Of 32 numbers, from four bytes."""
    return np.unpackbits(np.ascontiguousarray(held), axis=-1, bitorder="little") << np.uint8(4)


def q4_0(blocks: Bytes) -> Groups:
    scale = half(blocks, 0)
    return nibbles(blocks[:, 2:18]), scale, -8 * scale


def q4_1(blocks: Bytes) -> Groups:
    return nibbles(blocks[:, 4:20]), half(blocks, 0), half(blocks, 2)


def q5_0(blocks: Bytes) -> Groups:
    scale = half(blocks, 0)
    return nibbles(blocks[:, 6:22]) | fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def q5_1(blocks: Bytes) -> Groups:
    return nibbles(blocks[:, 8:24]) | fifth_bits(blocks[:, 4:8]), half(blocks, 0), half(blocks, 2)


def q8_0(blocks: Bytes) -> Groups:
    scale = half(blocks, 0)
    return blocks[:, 2:34] ^ np.uint8(128), scale, -128 * scale


def q4_k(blocks: Bytes) -> Groups:
    held = blocks[:, 16:144].reshape(-1, 4, 32)
    return np.stack([held & 15, held >> 4], axis=2).reshape(-1, 8, 32), *scales_of_eight(blocks)


def q5_k(blocks: Bytes) -> Groups:
    held, fifth = blocks[:, 48:176].reshape(-1, 4, 32), blocks[:, 16:48]
    low = np.stack([held & 15, held >> 4], axis=2).reshape(-1, 8, 32)
    bits = (fifth[:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1) << 4
    return low | bits, *scales_of_eight(blocks)


def scales_of_eight(blocks: Bytes) -> tuple[Any, Any]:
    """Of the eight groups of a block: 6 bits each, times what the block has in float16."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    offsets = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=1)
    return half(blocks, 0)[:, None] * scales, -half(blocks, 2)[:, None] * offsets


# By name: how to read it, in how many bits, how many numbers a block has.
FORMATS: dict[str, tuple[Callable[[Bytes], Groups], int, int]] = {
    "Q4_0": (q4_0, 4, 32),
    "Q4_1": (q4_1, 4, 32),
    "Q5_0": (q5_0, 8, 32),
    "Q5_1": (q5_1, 8, 32),
    "Q8_0": (q8_0, 8, 32),
    "Q4_K": (q4_k, 4, 256),
    "Q5_K": (q5_k, 8, 256),
}


def packed_tensor(tensor: Any, order: Any = None) -> PackedTensor | None:
    """A weight of a GGUF file in its own 4 bits, or in 8: exactly where the file has at most 5 bits or just 8, and
    rounded to 8 otherwise. None: it is not one of few bits. `order`: of its rows."""
    from gguf import dequantize

    name, inputs = tensor.tensor_type.name, int(tensor.shape[0])
    if name in PLAIN or len(tensor.shape) != 2 or inputs % 32:
        return None
    rows = tensor.data.reshape(int(tensor.shape[1]), -1)
    rows = rows if order is None else rows[order]
    parts = []
    for start in range(0, len(rows), ROWS):
        here = rows[start : start + ROWS]
        if name in FORMATS:
            read, bits, size = FORMATS[name]
            codes, *more = read(here.reshape(len(here) * (inputs // size), -1))
            scales, offsets = (part.reshape(len(here), -1).astype(np.float16) for part in more)
            parts.append(PackedTensor.of(codes.reshape(len(here), inputs), scales, offsets, bits).blocks)
        else:
            parts.append(compressed(torch.from_numpy(dequantize(here, tensor.tensor_type)), 8).blocks)
    return PackedTensor(torch.cat(parts) if len(parts) > 1 else parts[0], len(rows))
