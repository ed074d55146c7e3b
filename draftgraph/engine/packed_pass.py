"""What a pass over many texts is told, in one buffer that is filled by one copy; and how parts are laid into passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled import passes
from draftgraph.compiled.passes import WORD
from draftgraph.engine.capture import Captured, host_memory
from draftgraph.engine.packed import Part
from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE
from draftgraph.engine.sampler import Sampling, Warping
from draftgraph.graph import Bools, Floats, Ints
from draftgraph.kernels.fused import MOVED_TOGETHER
from draftgraph.noise import signed

Moves = tuple[Ints, Ints]  # from these slots to those

NOTHING, NOBODY, NO_TABLE = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int32)
PLAIN = Warping()


class Kind(NamedTuple):
    """The shape of a pass."""

    nodes: int
    texts: int
    words: int  # of ancestors
    scored: int  # the first so many nodes are asked for logits

    @property
    def moves(self) -> int:
        """Accepted nodes that it can put in their places."""
        return MOVED_TOGETHER * max(1, self.texts // 4)


@dataclass(frozen=True)
class Piece:
    """Nodes of a part that go into one pass."""

    part: Part
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def seat(self) -> Any:
        return self.part.seat

    @property
    def earlier(self) -> Ints:
        """The depths of scratch nodes before it. What was computed of a chain is as good as text."""
        if self.part.chain:
            return NOTHING
        before = self.seat.scratch_depths
        return np.concatenate([before, self.part.depths[: self.start]]) if self.start else before

    @property
    def length(self) -> int:
        """Of the text before it."""
        return len(self.seat.text) + (self.start if self.part.chain else 0)

    @property
    def scratch(self) -> int:
        """Slots behind the text after it."""
        return len(self) if self.part.chain else self.seat.scratch + self.end

    @property
    def depths(self) -> Ints:
        return self.part.depths[: len(self)] if self.part.chain else self.part.depths[self.start : self.end]

    @property
    def visible(self) -> Bools:
        first = self.start if self.part.chain else 0
        return self.part.visible[self.start : self.end, first : first + self.scratch]


def next_pass(waiting: deque[Piece], nodes: int, texts: int) -> list[Piece]:
    """Takes as many as a pass can hold; one that is scored is not cut unless no pass could hold it."""
    taken: list[Piece] = []
    room = nodes
    while waiting and room and len(taken) < texts:
        piece = waiting.popleft()
        if len(piece) > room:
            if taken and piece.part.scored and len(piece) <= nodes:
                waiting.appendleft(piece)
                break
            waiting.appendleft(Piece(piece.part, piece.start + room, piece.end))
            piece = Piece(piece.part, piece.start, piece.start + room)
        taken.append(piece)
        room -= len(piece)
    return taken


class PackedPassData:
    """What passes of one kind are told; `host` is what to write into."""

    def __init__(self, kind: Kind, most_pages: int, idle: int, device: torch.device) -> None:
        """`idle`: the first slot of a page that nobody reads."""
        nodes, texts, words, scored = kind
        self.kind, self._idle = kind, idle
        kinds: dict[Any, dict[str, tuple[int, ...]]] = {
            torch.int64: {
                **dict.fromkeys(("tokens", "positions", "slots"), (nodes,)),
                **dict.fromkeys(("moved_from", "moved_to"), (kind.moves,)),
                "ancestors": (nodes, words),
                **dict.fromkeys(("key", "top_k"), (scored,)),
            },
            torch.float64: dict.fromkeys(("temperature", "top_p", "min_p"), (scored,)),
            torch.int32: {
                "starts": (texts + 1,),
                "lengths": (texts,),
                "pages": (texts, most_pages),
                "scratch_positions": (texts, words * WORD),
            },
        }
        shapes = [(name, shape, dtype) for dtype, parts in kinds.items() for name, shape in parts.items()]
        ends = np.cumsum([-(-int(np.prod(shape)) * dtype.itemsize // 8) for _, shape, dtype in shapes]).tolist()
        self._host = host_memory((ends[-1],), torch.int64, device)
        self._device = torch.zeros_like(self._host, device=device)
        self.host: dict[str, Any] = {}
        parts: dict[str, Tensor] = {}
        for (name, shape, dtype), start, end in zip(shapes, [0, *ends], ends, strict=False):
            both = (
                buffer[start:end].view(dtype)[: int(np.prod(shape))].view(shape)
                for buffer in (self._host, self._device)
            )
            written, parts[name] = both
            self.host[name] = written.numpy()
        self.tokens, self.positions, self.slots = parts["tokens"][None], parts["positions"][None], parts["slots"]
        self.moves = parts["moved_from"], parts["moved_to"]
        self.sampling = parts["key"], parts["temperature"], parts["top_p"], parts["min_p"], parts["top_k"]
        seen = (parts["ancestors"], self.positions, parts["scratch_positions"])
        self.packed = PackedData(parts["starts"], parts["lengths"], parts["pages"], *seen, most_nodes=nodes)
        self.host["temperature"][:] = self.host["top_p"][:] = 1.0
        self.fill([])
        self.hand_over([])

    def arrive(self) -> None:
        """The device takes over what the host has written; the host may write again when the pass is done."""
        self._device.copy_(self._host, non_blocking=True)

    def fill(self, pieces: Sequence[Piece]) -> None:
        """The nodes of texts, one after the other."""
        host = self.host
        earlier = [piece.earlier for piece in pieces]
        tables = [piece.seat.table for piece in pieces]
        told = [
            (len(piece), len(before), piece.length, len(table))
            for piece, before, table in zip(pieces, earlier, tables, strict=True)
        ]
        passes.fill_texts(
            host["tokens"],
            host["positions"],
            host["slots"],
            host["ancestors"],
            host["starts"],
            host["lengths"],
            host["pages"],
            host["scratch_positions"],
            np.array(told, dtype=np.int64).reshape(-1, 4),
            np.concatenate([NOTHING, *(piece.part.tokens[piece.start : piece.end] for piece in pieces)]),
            np.concatenate([NOTHING, *(piece.depths for piece in pieces)]),
            np.concatenate([NOBODY, *(piece.visible.ravel() for piece in pieces)]),
            np.concatenate([NOTHING, *earlier]),
            np.concatenate([NO_TABLE, *tables]),
            PAGE,
            self._idle,
        )

    def hand_over(self, moves: Iterable[Moves]) -> list[Moves]:
        """Moves of accepted nodes, for as many texts as there is room for; returns the others."""
        for name in ("moved_from", "moved_to"):
            self.host[name][:] = self._idle
        return lay_out(moves, self.host["moved_from"], self.host["moved_to"])

    def sample(self, wishes: Sequence[tuple[int, Sampling | None]]) -> None:
        """Of the first so many nodes, the next so many, ...; who is not sampled is left out of it later."""
        counts = [count for count, _ in wishes]
        told = [(signed(one.key), one.warping) if one else (0, PLAIN) for _, one in wishes]
        self.host["key"][: sum(counts)] = np.repeat(np.array([key for key, _ in told], dtype=np.int64), counts)
        for name in ("temperature", "top_p", "min_p", "top_k"):
            values = np.array([getattr(warping, name) for _, warping in told], dtype=self.host[name].dtype)
            self.host[name][: sum(counts)] = np.repeat(values, counts)


def lay_out(moves: Iterable[Moves], sources: Ints, targets: Ints) -> list[Moves]:
    """Each text's moves among the same MOVED_TOGETHER places; returns those that find no room."""
    place, left = 0, []
    for one in moves:
        count = len(one[0])
        split = place % MOVED_TOGETHER + count > MOVED_TOGETHER
        start = place + (-place % MOVED_TOGETHER if split else 0)
        if start + count > len(sources):
            left.append(one)
            continue
        place = start + count
        sources[start:place], targets[start:place] = one
    return left


@dataclass
class Recorded:
    """One kind of passes, recorded."""

    data: PackedPassData
    run: Captured
    ranked: Floats  # of its last run, on the host: see `ranking.packed`
    sampled: Tensor  # tokens, on the host too
    samplers: dict[bool, Captured] = field(default_factory=dict)  # by whether top-k is asked for
    last: Captured | None = None  # what the host must wait for

    def wait(self) -> None:
        (self.last or self.run).wait()


@dataclass(frozen=True)
class Rows:
    """Where the last pass has a text's results."""

    recorded: Recorded
    start: int
    count: int
    sampling: Sampling | None  # as the tokens were chosen
