"""A weight of 4 or 8 bits as a tensor: products and rows are computed from its bits, all else sees plain numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from draftgraph import private
from draftgraph.compiled import compiled
from draftgraph.kernels.products import (
    GROUP,
    Bytes,
    block_bytes,
    code_bytes,
    packed,
    product,
    read_row,
    round_row,
    unpacked,
)
from draftgraph.kernels.threads import team_of, thread_count, torch_alone
from draftgraph.kernels.vectors import LANES, meet

PER_THREAD = 1 << 16  # numbers of a weight that make another thread worth waking


class PackedTensor(Tensor):
    """Looks like a weight in float32 of this shape. # [outputs, inputs]"""

    TILE: ClassVar[int] = LANES

    blocks: Tensor  # uint8 [tiles, groups, bytes]: see `products.packed`
    bits: int

    @staticmethod
    def __new__(cls, blocks: Tensor, outputs: int) -> PackedTensor:
        shape = outputs, blocks.shape[1] * GROUP
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, blocks: Tensor, outputs: int) -> None:
        self.blocks = blocks
        self.bits = next(bits for bits in (4, 8) if block_bytes(bits) == blocks.shape[2])

    @classmethod
    def of(cls, codes: Any, scales: Any, offsets: Any, bits: int) -> PackedTensor:
        return cls(aligned(packed(codes, scales, offsets, bits)), len(codes))

    @property
    def tile_bytes(self) -> int:
        return self.blocks.shape[1] * self.blocks.shape[2]

    @property
    def told(self) -> Any:
        """The weight as compiled functions are told of it."""
        return np.array([self.bits, self.blocks.data_ptr(), *self.shape, 0, 0], dtype=np.int64)

    def data_ptr(self) -> int:
        return self.blocks.data_ptr()

    def numbers(self) -> Tensor:
        """All of it in float32."""
        codes, scales, offsets = unpacked(self.blocks.numpy(), self.shape[0], self.bits)
        whole = codes.reshape(*scales.shape, GROUP).astype(np.float32)
        whole = whole * scales[..., None].astype(np.float32) + offsets[..., None].astype(np.float32)
        return torch.from_numpy(whole.reshape(tuple(self.shape)))

    def rows(self, which: Tensor) -> Tensor:
        """Some of its rows in float32. # [...] -> [..., inputs]"""
        flat = which.reshape(-1).to(torch.long).contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(f"there is no row {int(flat.max())} or {int(flat.min())} among {self.shape[0]}")
        found = torch.empty((len(flat), self.shape[1]))
        read_rows(self.told, flat.numpy(), found.data_ptr())
        return found.reshape(*which.shape, self.shape[1])

    def only(self, which: Tensor) -> PackedTensor:
        """A packed weight of some of its rows."""
        codes, scales, offsets = (
            part[which.numpy()] for part in unpacked(self.blocks.numpy(), self.shape[0], self.bits)
        )
        return PackedTensor.of(codes, scales, offsets, self.bits)

    def times(self, rows: Tensor) -> Tensor:
        """The product of rows with it. # [..., inputs] -> [..., outputs]"""
        flat = rows.reshape(-1, self.shape[1]).float().contiguous()
        count, columns = len(flat), self.blocks.shape[0] * LANES
        out = torch.empty((count, columns))
        codes = torch.empty((max(1, count), code_bytes(self.shape[1])), dtype=torch.uint8)
        team = team_of(max(1, min(thread_count(), self.numel() // PER_THREAD)))
        team.run(
            multiply_rows, self.told, flat.data_ptr(), codes.data_ptr(), codes.shape[1], out.data_ptr(), columns, count
        )
        return out[:, : self.shape[0]].reshape(*rows.shape[:-1], self.shape[0])

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function is linear and isinstance(given[1], PackedTensor):
            bias = given[2] if len(given) > 2 else named.get("bias")
            found = given[1].times(given[0])
            return found if bias is None else found + bias
        if function is embedding and isinstance(given[1], PackedTensor):
            return given[1].rows(given[0])
        with private.plain_results():
            return function(*given, **named)

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        aten, named = torch.ops.aten, named or {}
        if function in (aten.detach.default, aten.alias.default):
            return cls(given[0].blocks, given[0].shape[0])
        if function is aten.clone.default:
            return cls(given[0].blocks.clone(), given[0].shape[0])
        if function is aten.index.Tensor and isinstance(given[0], PackedTensor) and len(given[1]) == 1:
            return given[0].rows(given[1][0])
        plain = [one.numbers() if isinstance(one, PackedTensor) else one for one in given]
        return function(*plain, **named)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.bits} bits)"


def is_packed(model: torch.nn.Module) -> bool:
    return any(isinstance(weight.detach(), PackedTensor) for weight in model.parameters())


def number_format(model: Any) -> str:
    """Of a model's weights, as users name it: the fewest bits of packed ones, else the dtype."""
    bits = [weight.detach().bits for weight in model.parameters() if isinstance(weight.detach(), PackedTensor)]
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


def still_torch(packed: bool) -> AbstractContextManager[None]:
    """In which modules with packed weights run: PyTorch's threads keep still beside those of the products."""
    return torch_alone() if packed else nullcontext()


@compiled
def read_rows(weight: Any, rows: Any, out: int) -> None:
    for number in range(len(rows)):
        read_row(weight, rows[number], out + number * weight[3] * 4)


@compiled
def multiply_rows(
    thread: int, threads: int, shared: int, weight: Any, given: int, codes: int, codes_row: int, out: int, columns: int,
    rows: int,
) -> None:  # fmt: skip
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        round_row(given + row * weight[3] * 4, weight[3], codes + row * codes_row)
    meet(shared, threads)
    tiles = columns // LANES
    first, last = tiles * thread // threads * LANES, tiles * (thread + 1) // threads * LANES
    product(weight, first, last, codes, codes_row, out, columns * 4, rows)
    meet(shared, threads)


def aligned(blocks: Bytes) -> Tensor:
    """The same where a cache line begins."""
    room = torch.empty(blocks.size + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    found = room[start : start + blocks.size].view(blocks.shape)
    found.numpy()[:] = blocks
    return found


def compressed(weight: Tensor, bits: int) -> PackedTensor:
    """A plain weight in 4 or 8 bits: the smallest number of each group of 32 is 0, the largest 15 or 255."""
    whole = weight.detach().float().numpy().reshape(weight.shape[0], -1, GROUP)
    low, high = whole.min(axis=2), whole.max(axis=2)
    scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
    offsets = low.astype(np.float16)
    step = np.where(scales > 0, scales, 1).astype(np.float32)
    codes = np.rint((whole - offsets[..., None].astype(np.float32)) / step[..., None])
    codes = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
    return PackedTensor.of(codes.reshape(tuple(weight.shape)), scales, offsets, bits)
