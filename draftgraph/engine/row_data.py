"""What a run over many texts is told, in one buffer on the device that is filled by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftgraph.compiled.passes import WORD, pack
from draftgraph.engine.capture import host_memory
from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE
from draftgraph.graph import Ints
from draftgraph.kernels.growth import ENDS, EVEN

NODE_PARTS = ("tokens", "positions", "slots", "ancestors")


@dataclass(frozen=True)
class Row:
    """One text: what it has not read yet goes behind the rest of it."""

    text: int  # tokens that have been read
    new: list[int]
    pages: list[int]
    levels: int
    ends: Ints  # [ENDS]
    key: int = 0  # of its noise, signed: see `KeyedNoise.stream_key`
    temperature: float = 0.0  # 0: greedy
    odds: tuple[float, float] = EVEN  # see `Growth`


class RowData:
    """For so many texts, with so many pages each. What is about nodes comes last: a pass of fewer copies less."""

    def __init__(self, texts: int, most_pages: int, widest: int, trash: int, device: torch.device) -> None:
        self.texts, self.trash, self.most_pages = texts, trash, most_pages
        sizes = {name: texts for name in ("levels", "keys", "temperatures", "last")}
        sizes |= {"ends": texts * ENDS, "lengths": half(texts), "starts": half(texts + 1)}
        sizes |= {"odds": 2 * texts, "pages": half(texts * most_pages)}
        self._nodes_at = sum(sizes.values())
        self._host = host_memory((self._nodes_at + len(NODE_PARTS) * widest,), torch.long, device)
        self._device = torch.zeros_like(self._host, device=device)
        ends = np.cumsum(list(sizes.values())).tolist()
        places = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._numbers = self._host.numpy()
        self.host = self._shaped({name: self._numbers[place] for name, place in places.items()}, np.int32, np.float64)
        parts = {name: self._device[place] for name, place in places.items()}
        self.device = self._shaped(parts, torch.int32, torch.float64)
        self._known: list[list[int]] = [[] for _ in range(texts)]  # pages, by row
        self.host["ends"][:], self.host["odds"][:] = -1, 1.0
        self._numbered = torch.arange(WORD, device=device)

    def _shaped(self, parts: dict[str, Any], short: Any, floating: Any) -> dict[str, Any]:
        for name, size in (
            ("lengths", self.texts),
            ("starts", self.texts + 1),
            ("pages", self.texts * self.most_pages),
        ):
            parts[name] = parts[name].view(short)[:size]
        parts["pages"] = parts["pages"].reshape(self.texts, self.most_pages)
        parts["ends"] = parts["ends"].reshape(self.texts, ENDS)
        parts["temperatures"] = parts["temperatures"].view(floating)
        parts["odds"] = parts["odds"].view(floating).reshape(self.texts, 2)
        return parts

    def tell(self, rows: Sequence[Row], width: int) -> None:
        """For a pass of this width."""
        host = self.host
        for row, one in enumerate(rows):
            if self._known[row] != one.pages:
                host["pages"][row, : len(one.pages)] = one.pages
                self._known[row] = one.pages.copy()
        for absent in range(len(rows), self.texts):
            self._known[absent] = []
        count = len(rows)
        host["levels"][:count], host["levels"][count:] = [row.levels for row in rows], 0
        host["keys"][:count] = [row.key for row in rows]
        host["temperatures"][:count] = [row.temperature for row in rows]
        for row, one in enumerate(rows):
            host["ends"][row], host["odds"][row] = one.ends, one.odds
        new = np.array([token for row in rows for token in row.new], dtype=np.int64)
        counts, before = np.array([(len(row.new), row.text) for row in rows], dtype=np.int64).reshape(-1, 2).T.copy()
        tokens, positions, slots, ancestors = self._places(self._numbers, width)
        told = host["last"], host["starts"], host["lengths"], host["pages"]
        pack(tokens, positions, slots, ancestors, *told, new, counts, before, self.trash, PAGE)

    def arrive(self, width: int) -> None:
        """The device takes over what the host has written; the host may write again when the pass is done."""
        size = self._nodes_at + len(NODE_PARTS) * width
        self._device[:size].copy_(self._host[:size], non_blocking=True)

    def nodes(self, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: see NODE_PARTS. # [width] each"""
        tokens, positions, slots, ancestors = self._places(self._device, width)
        return tokens, positions, slots, ancestors

    def reading(self, width: int, most_nodes: int) -> PackedData:
        """What new tokens see; part of the pass."""
        _, positions, _, ancestors = self.nodes(width)
        lengths, starts = self.device["lengths"], self.device["starts"]
        scratch = lengths[:, None] + self._numbered
        return PackedData(
            starts, lengths, self.device["pages"], ancestors[:, None], positions[None], scratch, most_nodes
        )

    def _places(self, numbers: Any, width: int) -> tuple[Any, ...]:
        first = self._nodes_at
        return tuple(numbers[first + part * width : first + (part + 1) * width] for part in range(len(NODE_PARTS)))


def half(size: int) -> int:
    """Long numbers that hold so many short ones."""
    return -(-size // 2)


def ends_of(tokens: frozenset[int]) -> NDArray[np.int64]:
    """The first of them. # [ENDS]"""
    found = np.full(ENDS, -1, dtype=np.int64)
    known = sorted(tokens)[:ENDS]
    found[: len(known)] = known
    return found
