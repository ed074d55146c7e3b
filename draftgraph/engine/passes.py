"""What a paged pass is told: how segments are laid into passes, and the buffer that one copy hands to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftgraph.compiled import compiled
from draftgraph.engine.capture import Buffer, Parts
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Sampling, Segment, Warping
from draftgraph.graph import WORD, Bools, Ints
from draftgraph.kernels.attention import PagedPass
from draftgraph.kernels.fused import MOVED_TOGETHER
from draftgraph.noise import signed

Moves = tuple[Ints, Ints]  # from these slots to those

NOTHING, NOBODY, NO_TABLE = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int32)
GREEDY, NOISELESS = Warping(), Warping(temperature=0.0)
ITSELF = -1  # a node's token is the one that the host has written


class PassShape(NamedTuple):
    """What is fixed when a pass is recorded; everything else is data."""

    nodes: int
    sequences: int
    words: int  # of ancestors
    scored: int  # the first so many nodes are asked for logits
    proposals: int = 0  # tokens that a draft proposes at every node; 0: none are wanted
    noisy: bool = False  # whether it adds noise to its logits
    adapted: bool = False  # whether nodes have adapters

    @property
    def moves(self) -> int:
        """Accepted nodes that the pass can put in their places."""
        return MOVED_TOGETHER * max(1, self.sequences // 4)


@dataclass(frozen=True)
class Piece:
    """Nodes of a segment that go into one pass."""

    segment: Segment
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def context(self) -> Any:
        return self.segment.context

    @property
    def earlier(self) -> Ints:
        """The depths of scratch nodes before it. What was computed of a chain is as good as text."""
        if self.segment.chain:
            return NOTHING
        before: Ints = self.context.scratch_depths
        return np.concatenate([before, self.segment.depths[: self.start]]) if self.start else before

    @property
    def length(self) -> int:
        """Of the text before it."""
        return len(self.context.text) + self.segment.ahead + (self.start if self.segment.chain else 0)

    @property
    def scratch(self) -> int:
        """Slots behind the text after it."""
        return len(self) if self.segment.chain else int(self.context.scratch) + self.end

    @property
    def depths(self) -> Ints:
        return self.segment.depths[: len(self)] if self.segment.chain else self.segment.depths[self.start : self.end]

    @property
    def visible(self) -> Bools:
        first = self.start if self.segment.chain else 0
        return self.segment.visible[self.start : self.end, first : first + self.scratch]


def next_pass(waiting: deque[Piece], nodes: int, sequences: int) -> list[Piece]:
    """Takes as many as a pass can hold; one that is scored is not cut unless no pass could hold it."""
    taken: list[Piece] = []
    room = nodes
    while waiting and room and len(taken) < sequences:
        piece = waiting.popleft()
        if len(piece) > room:
            if taken and piece.segment.scored and len(piece) <= nodes:
                waiting.appendleft(piece)
                break
            waiting.appendleft(Piece(piece.segment, piece.start + room, piece.end))
            piece = Piece(piece.segment, piece.start, piece.start + room)
        taken.append(piece)
        room -= len(piece)
    return taken


class PassData:
    """The buffer of passes of one shape; `host` is what to write into."""

    def __init__(self, shape: PassShape, most_pages: int, idle: int, device: torch.device, sides: int = 1) -> None:
        """`idle`: the first slot of a page that nobody reads."""
        nodes, sequences, words, scored, *_ = shape
        self.shape, self._idle = shape, idle
        whole: Parts = {name: ((nodes,), torch.int64) for name in ("tokens", "positions", "slots")}
        whole |= {name: ((shape.moves,), torch.int64) for name in ("moved_from", "moved_to")}
        whole |= {"ancestors": ((nodes, words), torch.int64)}
        whole |= {name: ((scored,), torch.int64) for name in ("key", "top_k", "is_sampled")}
        whole |= {"follows": ((nodes,), torch.int64)}
        whole |= {name: ((scored,), torch.float64) for name in ("temperature", "top_p", "min_p")}
        whole |= {"starts": ((sequences + 1,), torch.int32), "lengths": ((sequences,), torch.int32)}
        whole |= {"pages": ((sequences, most_pages), torch.int32)}
        whole |= {"scratch_positions": ((sequences, words * WORD), torch.int32)}
        whole |= {"adapters": ((nodes,), torch.int64)} if shape.adapted else {}
        self._buffer = Buffer(whole, device, sides)
        on_device = self._buffer.device
        self.tokens, self.positions = on_device["tokens"][None], on_device["positions"][None]
        self.slots, self.adapters = on_device["slots"], on_device.get("adapters")  # None: nobody has one
        self.follows, self.is_sampled = on_device["follows"], on_device["is_sampled"]
        self.moves = on_device["moved_from"], on_device["moved_to"]
        self.noise = on_device["key"], on_device["temperature"]
        self.sampling = (*self.noise, on_device["top_p"], on_device["min_p"], on_device["top_k"])
        seen = (on_device["ancestors"], self.positions, on_device["scratch_positions"])
        told = on_device["starts"], on_device["lengths"], on_device["pages"], *seen
        self.paged = PagedPass(*told, most_nodes=nodes)
        self.states: Tensor | None = None  # [nodes, width], for a head
        for _ in range(sides):
            self.host["temperature"][:] = self.host["top_p"][:] = 1.0
            self.host["follows"][:] = ITSELF
            self.fill([])
            self.hand_over([])
            self.turn()
        self.arrive()

    @property
    def host(self) -> dict[str, Any]:
        return self._buffer.host

    def turn(self) -> int:
        return self._buffer.turn()

    def arrive(self) -> None:
        self._buffer.arrive()

    def fill(self, pieces: Sequence[Piece]) -> None:
        """The nodes of sequences, one after the other."""
        host = self.host
        self.paged.views.clear()
        earlier = [piece.earlier for piece in pieces]
        tables = [piece.context.table for piece in pieces]
        told = [
            (len(piece), len(before), piece.length, len(table))
            for piece, before, table in zip(pieces, earlier, tables, strict=True)
        ]
        fill_nodes(
            host["tokens"],
            host["positions"],
            host["slots"],
            host["ancestors"],
            host["starts"],
            host["lengths"],
            host["pages"],
            host["scratch_positions"],
            np.array(told, dtype=np.int64).reshape(-1, 4),
            in_a_row([piece.segment.tokens[piece.start : piece.end] for piece in pieces], NOTHING),
            in_a_row([piece.depths for piece in pieces], NOTHING),
            in_a_row([piece.visible.ravel() for piece in pieces], NOBODY),
            in_a_row(earlier, NOTHING),
            in_a_row(tables, NO_TABLE),
            PAGE,
            self._idle,
        )
        host["follows"][:] = ITSELF
        for piece, start in zip(pieces, host["starts"], strict=False):
            if piece.segment.follows is not None:
                host["follows"][start] = piece.segment.follows
        if self.shape.adapted:
            adapters = np.repeat([piece.context.adapter for piece in pieces], [len(piece) for piece in pieces])
            host["adapters"][: len(adapters)], host["adapters"][len(adapters) :] = adapters, 0

    def fill_states(self, pieces: Sequence[Piece]) -> None:
        """What a head reads beside the tokens."""
        if self.states is None:
            return
        node = 0
        for piece in pieces:
            rows, given = self.states[node : node + len(piece)], piece.segment.states
            node += len(piece)
            if given is None:
                rows.zero_()
            else:
                rows.copy_(given[piece.start : piece.end])

    def hand_over(self, moves: Iterable[Moves]) -> list[Moves]:
        """Moves of accepted nodes, for as many sequences as there is room for; returns the others."""
        for name in ("moved_from", "moved_to"):
            self.host[name][:] = self._idle
        return lay_out(moves, self.host["moved_from"], self.host["moved_to"])

    def sample(self, wishes: Sequence[tuple[int, Sampling | None]]) -> None:
        """Of the first so many nodes, the next so many, ...; a node without sampling gets no noise."""
        counts, without = [count for count, _ in wishes], NOISELESS if self.shape.proposals else GREEDY
        told = [(signed(one.key), one.warping) if one else (0, without) for _, one in wishes]
        self.host["key"][: sum(counts)] = np.repeat(np.array([key for key, _ in told], dtype=np.int64), counts)
        self.host["is_sampled"][: sum(counts)] = np.repeat([one is not None for _, one in wishes], counts)
        for name in ("temperature", "top_p", "min_p", "top_k"):
            values = np.array([getattr(warping, name) for _, warping in told], dtype=self.host[name].dtype)
            self.host[name][: sum(counts)] = np.repeat(values, counts)


def in_a_row(parts: list[Any], nothing: Any) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate([nothing, *parts])


def lay_out(moves: Iterable[Moves], sources: Ints, targets: Ints) -> list[Moves]:
    """Each sequence's moves among the same MOVED_TOGETHER places; returns those that find no room."""
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


def slots_of(pages: list[int], places: Ints) -> Ints:
    """The slots of tokens at these places of a text."""
    slots: Ints = np.array(pages, dtype=np.int64)[places // PAGE] * PAGE + places % PAGE
    return slots


@compiled
def fill_nodes(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    pages: NDArray[np.int32],
    scratch_positions: NDArray[np.int32],
    told: Ints,
    nodes: Ints,
    depths: Ints,
    visible: Bools,
    earlier: Ints,
    tables: NDArray[np.int32],
    page: int,
    idle: int,
) -> None:
    """The nodes of many sequences, one after the other. Of each sequence `told` has the numbers of nodes, of scratch
    nodes before them, of tokens and of pages; the rest has what those are, all sequences' in a row. Nodes that only
    fill the pass up write into a page that nobody reads.

    # [nodes] three times, [nodes, words], by sequences: `PagedPass`
    """
    words, node, seen, before, entry = ancestors.shape[1], 0, 0, 0, 0
    for text in range(len(starts) - 1):
        starts[text], lengths[text] = node, 0
        if text >= len(told):
            continue
        count, drafted, length, held = told[text]
        lengths[text] = length
        for place in range(held):
            pages[text, place] = tables[entry + place]
        for place in range(drafted):
            scratch_positions[text, place] = length + earlier[before + place]
        for own in range(count):
            place = length + drafted + own
            tokens[node], positions[node] = nodes[node], length + depths[node]
            scratch_positions[text, drafted + own] = positions[node]
            slots[node] = np.int64(pages[text, place // page]) * page + place % page
            for word in range(words):
                ancestors[node, word] = 0
            for slot in range(drafted + count):
                if visible[seen + slot]:
                    ancestors[node, slot // WORD] |= np.int64(1) << np.int64(slot % WORD)
            seen += drafted + count
            node += 1
        before += drafted
        entry += held
    starts[-1] = node
    for left in range(node, len(tokens)):
        tokens[left], positions[left], slots[left] = 0, 0, idle + (left - node) % page
        for word in range(words):
            ancestors[left, word] = 0
