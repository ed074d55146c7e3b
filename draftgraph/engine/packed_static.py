"""Runs a model over the nodes of many texts in passes of a few fixed shapes, each captured once as a CUDA graph.

Which texts are there, their lengths, pages, nodes and ancestors are data of a pass and never its shape. On a CPU, where
nothing is captured, the same passes are run as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftgraph.compiled.passes import WORD
from draftgraph.engine.borrowing import Fusions
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.capture import Captured, graph_memory, host_memory
from draftgraph.engine.packed import PackedEngine, Part, Seat
from draftgraph.engine.packed_graph import NAME, PackedData
from draftgraph.engine.packed_pass import Kind, Moves, PackedPassData, Piece, Recorded, Rows, lay_out, next_pass
from draftgraph.engine.pages import PAGE
from draftgraph.engine.sampler import Sampling
from draftgraph.engine.static import words_for
from draftgraph.engine.static_cache import StaticCache
from draftgraph.graph import Ints
from draftgraph.kernels.fused import MOVED_TOGETHER, move_slots
from draftgraph.kernels.sampling import MOST_KEPT, sample
from draftgraph.models.cache import notice
from draftgraph.ranking import KEPT, Ranking, packed

NODES = (8, 16, 32, 64, 128, 256, 512)  # of a pass; between them, nodes that nobody looks at fill it up
TEXTS = (1, 4, 16, 64)
STEP_WORDS, READING_WORDS = 1, NODES[-1] // WORD  # of ancestors
LEAST_READ = 128  # nodes of a pass in which something is read: fewer would hardly be quicker, and more kinds
FEW_SCORED = 64  # nodes, of those with logits among others without: as many cost hardly more than none
KINDS = 64  # of passes that are kept; those not used for the longest time go
FIRST_TABLE = 128  # pages that a text may have; four times as many when one outgrows them, which costs new captures


class PackedStaticEngine(PackedEngine):
    """A model, its pool, and its passes."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        grouped = self.device.type != "cuda" or model.dtype == torch.bfloat16  # else torch asks the host for sizes
        self._lent = {"_attn_implementation": NAME} | ({} if grouped else {"_experts_implementation": "batched_mm"})
        self._fusions = Fusions(model)
        self.widest = NODES[-1]  # nodes of one pass; less where memory is short
        self.most_pages = FIRST_TABLE  # of a text
        self._samples = True  # unless there was no memory for it
        self._moves: dict[Seat, Moves] = {}  # of accepted nodes, left to the next pass
        self._passes: dict[Kind, Recorded] = {}
        self._last: Recorded | None = None
        self._graphs = graph_memory(self.device)

    def _make_pool(self, like: SlotCache) -> None:
        self.cache = StaticCache(like, self.slots + PAGE)  # the last page is nobody's

    def open(self, tenant: str = "") -> StaticSeat:
        return StaticSeat(self, tenant)

    def wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        """As ever; the logits are good until the next pass, and their ranking is on its way to the host."""
        for part in parts:
            part.seat.reserve(len(part.seat.text) + part.visible.shape[1])
        self._reserve_table(max(len(part.seat.pages) for part in parts))
        found: dict[int, list[Tensor]] = {id(part): [] for part in parts}
        in_order = sorted(parts, key=lambda part: part.scored)  # so that the last pass has all logits, if one can
        waiting = deque(Piece(part, 0, len(part.tokens)) for part in in_order)
        while waiting:
            pieces = sorted(next_pass(waiting, self.widest, TEXTS[-1]), key=lambda piece: not piece.part.scored)
            recorded = self._recorded(kind_of(pieces, self.widest))
            if recorded is None:
                waiting.extendleft(reversed(pieces))
                continue
            start, logits = 0, self._launch(recorded, pieces, last=not waiting)
            for piece in pieces:
                if piece.part.scored:
                    rows = logits[start : start + len(piece)]
                    found[id(piece.part)].append(rows.clone() if waiting else rows)
                start += len(piece)
        for part in parts:
            part.seat.note_scratch(part.depths)
        return [joined(found[id(part)], logits) for part in parts]

    def _launch(self, recorded: Recorded, pieces: list[Piece], last: bool) -> Tensor:
        """The logits of these pieces, those that are scored first; what the last pass found can be read on the host."""
        recorded.wait()
        recorded.data.fill(pieces)
        for moves in recorded.data.hand_over(self._moves.values()):
            self._move_now(moves)
        rows, start = [], 0
        for piece in pieces:
            count, part = len(piece), piece.part
            readable = last and part.scored and count == len(part.tokens)
            sampling = part.sampling if readable and self._can_sample(part.sampling) else None
            piece.seat.rows = Rows(recorded, start, count, sampling) if readable else None
            if part.scored:
                rows.append((count, sampling))
            start += count
        sampled = [sampling for _, sampling in rows if sampling is not None]
        if sampled:
            recorded.data.sample(rows)
        logits: Tensor = recorded.run()
        self._moves.clear()
        self._last, recorded.last = recorded, None
        if sampled:
            self._choose(recorded, any(sampling.warping.top_k > 0 for sampling in sampled))
        return logits

    def _can_sample(self, sampling: Sampling | None) -> bool:
        return self._samples and sampling is not None and sampling.warping.top_k <= MOST_KEPT

    def _choose(self, recorded: Recorded, with_top_k: bool) -> None:
        """The tokens at the nodes of the pass that was just set off."""
        try:
            chooser = recorded.samplers.get(with_top_k) or self._sampler(recorded, with_top_k)
        except torch.OutOfMemoryError:
            self._samples = False
            notice("no GPU memory for sampling: going on with one token at a time")
            return
        chooser()
        recorded.last = chooser

    def move(self, seat: Seat, sources: Ints, targets: Ints) -> None:
        """By the next pass: it is launched anyway."""
        if len(sources) <= MOVED_TOGETHER and seat not in self._moves:
            self._moves[seat] = sources, targets
            return
        self.settle()
        for first in range(0, len(sources), MOVED_TOGETHER):  # a path goes on: what is read later is not written before
            here = slice(first, first + MOVED_TOGETHER)
            self._move_now((sources[here], targets[here]))

    def settle(self) -> None:
        """Moves now, where no pass follows that could."""
        for moves in self._moves.values():
            self._move_now(moves)
        self._moves.clear()

    def _move_now(self, moves: Moves) -> None:
        both = np.full((2, MOVED_TOGETHER), self.slots)
        lay_out([moves], *both)
        self._move_slots(*torch.from_numpy(both).to(self.device))

    def _move_slots(self, sources: Tensor, targets: Tensor) -> None:
        for block in self.cache.blocks.values():
            move_slots(block, sources, targets)

    def _reserve_table(self, pages: int) -> None:
        if pages > self.most_pages:
            self.wait()
            self._forget_passes()
            while pages > self.most_pages:
                self.most_pages *= 4

    def prepare(self, texts: int) -> None:
        """Records what so many texts usually need: else the first of them wait for it."""
        for kind in (*step_kinds(texts), *reading_kinds(texts)):
            if kind.nodes <= self.widest:
                self._recorded(kind)

    def prepare_reading(self, texts: int) -> None:
        """The same for passes that nobody asks for logits."""
        for kind in reading_kinds(texts):
            if kind.nodes <= self.widest and kind.scored == FEW_SCORED:
                self._recorded(kind)

    def _recorded(self, kind: Kind) -> Recorded | None:
        """The pass; None: there is no memory for it, and from now on passes are smaller."""
        try:
            recorded = self._passes.pop(kind, None) or self._record(kind)
        except torch.OutOfMemoryError:
            self._shrink(kind)
            return None
        self._passes[kind] = recorded
        if len(self._passes) > KINDS:
            del self._passes[next(iter(self._passes))]
        return recorded

    def _record(self, kind: Kind) -> Recorded:
        data = PackedPassData(kind, self.most_pages, self.slots, self.device)
        kept = None if kind.scored == kind.nodes else torch.arange(max(1, kind.scored), device=self.device)
        ranked = host_memory((kind.scored, 2, min(KEPT, self.columns)), torch.float64, self.device)
        sampled = host_memory((kind.scored,), torch.long, self.device)

        def compute() -> Tensor:
            data.arrive()
            self._move_slots(*data.moves)
            logits = self.graph_pass(data.tokens, data.positions, data.slots, data.packed, kept)
            if kind.scored:
                ranked.copy_(packed(logits), non_blocking=True)
            return logits

        return Recorded(data, Captured(compute, self.device, self._graphs), ranked.numpy(), sampled)

    def _sampler(self, recorded: Recorded, with_top_k: bool) -> Captured:
        """Chooses at the nodes of a pass, right behind it."""
        data, scored = recorded.data, recorded.data.kind.scored
        key, temperature, top_p, min_p, top_k = data.sampling

        def choose() -> None:
            following = data.positions[0, :scored] + 1
            told = (key, following, temperature, top_p, min_p, top_k if with_top_k else 0)
            recorded.sampled.copy_(sample(recorded.run.output, *told), non_blocking=True)

        recorded.samplers[with_top_k] = Captured(choose, self.device, self._graphs)
        return recorded.samplers[with_top_k]

    def graph_pass(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, data: PackedData, kept: Tensor | None = None
    ) -> Tensor:
        """Logits [nodes, vocabulary] of nodes that write into these slots, all of it data; may be captured. `kept`:
        of these nodes alone."""
        self.cache.slots, self.cache.shown = slots, None
        with self._fusions.borrowed(), self._attention(), self._linears.borrowed(tokens.shape[1]):
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                packed_data=data,
                logits_to_keep=0 if kept is None else kept,
            )
        logits: Tensor = out.logits[0]
        return logits if kept is None else logits[: len(kept)]  # some models pass over what is to be kept

    def _forget_passes(self) -> None:
        self._last = None
        self._passes.clear()
        self._graphs = graph_memory(self.device)

    def _shrink(self, kind: Kind) -> None:
        """A pass of this kind cannot be recorded: more nodes are computed in several."""
        self._forget_passes()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if kind.nodes == NODES[0]:
            raise torch.OutOfMemoryError(f"{self.device} has no memory left for a pass over texts")
        self.widest = max(nodes for nodes in NODES if nodes < kind.nodes)
        notice(f"no GPU memory for passes of {kind.nodes} nodes: going on with {self.widest} at most")


class StaticSeat(Seat):
    """One text's place; what a pass found for it comes to the host with that of the others."""

    ranks = works_alone = True
    engine: PackedStaticEngine

    def __init__(self, engine: PackedStaticEngine, tenant: str = "") -> None:
        self.rows: Rows | None = None  # of the last pass
        super().__init__(engine, tenant)

    @property
    def pages(self) -> list[int]:
        return self._pages

    @pages.setter
    def pages(self, pages: list[int]) -> None:
        self._pages: list[int] = pages
        self._table: NDArray[np.int32] | None = None

    @property
    def table(self) -> NDArray[np.int32]:
        """The pages as a pass is told of them."""
        if self._table is None:
            self._table = np.array(self._pages, dtype=np.int32)
        return self._table

    def rank(self, logits: Tensor) -> Ranking:
        rows = self.rows
        if rows is None or rows.count != len(logits):
            return super().rank(logits)
        rows.recorded.wait()
        return Ranking.read(rows.recorded.ranked[rows.start : rows.start + rows.count])

    def sample(self, logits: Tensor, sampling: Sampling) -> list[int] | None:
        rows = self.rows
        if rows is None or rows.count != len(logits) or rows.sampling != sampling or rows.recorded.last is None:
            return None
        rows.recorded.wait()
        found: list[int] = rows.recorded.sampled[rows.start : rows.start + rows.count].tolist()
        return found

    def _copy_known(self) -> None:
        """Pages are read where they lie, in any order."""


def kind_of(pieces: list[Piece], widest: int) -> Kind:
    """Of a step, or of a pass in which something is read."""
    nodes, scored = sum(map(len, pieces)), sum(len(piece) for piece in pieces if piece.part.scored)
    width, words = at_least(NODES, nodes), words_for(max(piece.scratch for piece in pieces))
    if scored == nodes and words <= STEP_WORDS:
        return Kind(width, at_least(TEXTS, len(pieces)), STEP_WORDS, width)
    width = min(max(width, LEAST_READ), widest)
    few = min(width, FEW_SCORED) if scored <= FEW_SCORED else width
    return Kind(width, at_least(TEXTS[1:], len(pieces)), max(words, READING_WORDS), few)


def step_kinds(most: int) -> list[Kind]:
    """All that steps of at most so many texts may need."""
    sizes = zip((0, *TEXTS), TEXTS, strict=False)
    return [
        Kind(nodes, size, STEP_WORDS, nodes) for less, size in sizes if less < most for nodes in NODES if less < nodes
    ]


def reading_kinds(most: int) -> list[Kind]:
    """All that reading may need, beside the steps of others or not."""
    widths = [nodes for nodes in NODES if nodes >= LEAST_READ]
    return [
        Kind(nodes, texts, READING_WORDS, scored)
        for nodes in widths
        for texts in up_to(TEXTS[1:], most)
        for scored in (FEW_SCORED, nodes)
    ]


def joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else like[:0]


def at_least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if needed <= size)


def up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes that anything of at most so many may need."""
    return [size for before, size in zip((0, *sizes), sizes, strict=False) if before < most]
