"""Runs a model in passes of a few fixed widths over preallocated slots, each captured once as a CUDA graph.

The length of the text, the nodes' tokens, places and ancestors are data of a pass and never its shape. On a CPU, where
nothing is captured, the same passes are run as they are: slower, but the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled import passes
from draftgraph.compiled.passes import WORD
from draftgraph.engine.borrowing import Fusions, NarrowLinears, borrowed_attention, configs_of, fingerprint
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.capture import Captured, graph_memory, host_memory
from draftgraph.engine.graph_attention import NAME, GraphPass
from draftgraph.engine.proposals import Proposals, Wanted
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.runner import PREFILL_CHUNK
from draftgraph.engine.sampler import NodeSampler, Sampling
from draftgraph.engine.static_cache import StaticCache
from draftgraph.errors import DraftGraphError, UnsupportedModelError
from draftgraph.graph import Bools, Floats, Ints, TokenTree
from draftgraph.models.cache import notice
from draftgraph.ranking import KEPT, Ranking, packed

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # nodes of a pass; between them, nodes that nobody looks at fill it up
MOVES = 16  # accepted nodes that a pass can put in their places
SHORT = 512  # tokens of text that are read in recorded passes: of more, a pass is arithmetic, not launches
SMALLEST_CAPACITY = 1024  # slots; doubled when a text outgrows them, which costs new captures


class PassData:
    """What a pass of one width is told, in one buffer on the device that is filled by one copy, part of the pass."""

    def __init__(self, width: int, words: int, device: torch.device) -> None:
        self.width, self.words = width, words
        sizes = {
            "tokens": width,
            "positions": width,
            "slots": width,
            "length": 1,
            "last": 1,
            "moved_from": MOVES,
            "moved_to": MOVES,
            "ancestors": width * words,
            "scratch_positions": WORD * words,
        }
        self._host = host_memory((sum(sizes.values()),), torch.long, device)
        self._device = torch.zeros_like(self._host, device=device)
        ends = np.cumsum(list(sizes.values())).tolist()
        places = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        numbers = self._host.numpy()
        self.host = {name: numbers[place] for name, place in places.items()}
        parts = {name: self._device[place] for name, place in places.items()}
        self.tokens, self.positions, self.slots = parts["tokens"][None], parts["positions"][None], parts["slots"]
        self.last = parts["last"]  # the place of the last token, where the nodes are text
        self.moves = parts["moved_from"], parts["moved_to"]  # slots of accepted nodes, before anything else
        self.graph = GraphPass(
            parts["length"],
            parts["ancestors"].view(1, width, words),
            self.positions,
            parts["scratch_positions"][None],
        )

    def arrive(self) -> None:
        """The device takes over what the host has written; the host may write again when the pass is done."""
        self._device.copy_(self._host, non_blocking=True)


@dataclass
class Pass:
    """One width of passes, recorded; of its last run the host reads the best tokens, or what a draft proposes."""

    data: PassData
    run: Captured
    ranked: Floats | None  # see `ranking.packed`
    proposals: Proposals | None
    samplers: dict[int, NodeSampler] = field(default_factory=dict)  # by top-k


class StaticEngine:
    """An `Engine`: committed text, nodes scored over it, commits; see `EagerEngine` for what each method means."""

    branching = ranks = works_alone = True
    widths = WIDTHS

    def __init__(self, model: Any) -> None:
        self.model = model
        self._moves: list[tuple[int, int]] = []  # of accepted nodes, left to the next pass
        self.text: list[int] = []
        self.scratch = 0
        self.capacity = 0
        self.widest = WIDTHS[-1]  # nodes of one pass; less where memory is short
        self._scratch_positions = np.zeros(0, dtype=np.int64)
        self._configs = configs_of(model)
        grouped = self.device.type != "cuda" or model.dtype == torch.bfloat16  # else torch asks the host for sizes
        experts = {} if grouped else {"_experts_implementation": "batched_mm"}  # such as can be captured
        self._implementations = {"_attn_implementation": NAME} | experts
        self._passes: dict[tuple[int, int, tuple[int, bool] | None], Pass] = {}  # by width, words and proposals
        self._graphs = graph_memory(self.device)
        self._linears, self._fusions = NarrowLinears(model), Fusions(model)
        self._state = fingerprint(self.model)
        if RopeSwitch.of(model) is not None:
            raise UnsupportedModelError("its rotary embedding changes with the length of the text")
        self._like, self._columns = self._probe()
        self.slots: StaticCache
        self.reserve(0)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def begin(self, length: int, reuse: bool) -> None:
        self._linears.begin()
        known, self._state = self._state, fingerprint(self.model)
        if known != self._state:  # captured passes would read weights that are no longer the model's
            self._forget_passes()
            self._linears, self._fusions = NarrowLinears(self.model), Fusions(self.model)
        if not reuse or known != self._state:
            self.rewind(0)

    def reserve(self, capacity: int) -> None:
        needed = capacity + WIDTHS[-1]  # behind the text: nodes, and where those write that nobody looks at
        if needed <= self.capacity:
            return
        self._settle()
        self._forget_passes()
        larger = max(SMALLEST_CAPACITY, 1 << (needed - 1).bit_length())
        try:
            cache = StaticCache(self._like, larger)
        except torch.OutOfMemoryError as error:
            raise DraftGraphError(
                f"{self.device} has no memory for the keys and values of {larger} tokens: ask for fewer, or load the "
                "model in a smaller dtype"
            ) from error
        if self.text:
            cache.take_over(self.slots, len(self.text))
        self.slots, self.capacity = cache, larger

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        self.reserve(len(self.text) + len(tokens))
        chunk = chunk or PREFILL_CHUNK
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            if len(piece) <= SHORT:
                self._read_recorded(piece)
            else:
                self._read(piece)
                self.text.extend(piece)

    def forward(self, tokens: Ints, depths: Ints, visible: Bools, wanted: Wanted | None = None) -> Tensor:
        """Logits [nodes, vocabulary], to be used before the next pass of as many nodes."""
        if len(tokens) > self.widest:
            first = self.widest
            seen = self.scratch + first
            scored = self.forward(tokens[:first], depths[:first], visible[:first, :seen]).clone()
            return torch.cat([scored, self.forward(tokens[first:], depths[first:], visible[first:])])
        bits = np.zeros((len(tokens), WORD * words_for(visible.shape[1])), dtype=bool)
        bits[:, : visible.shape[1]] = visible
        return self._score(tokens, depths, np.packbits(bits, axis=1, bitorder="little").view("<i8"), wanted)

    def check(self, tree: TokenTree) -> Tensor:
        if len(tree) > self.widest:
            return self.forward(tree.tokens, tree.depths, tree.mask)
        return self._score(tree.tokens, tree.depths, tree.ancestors(words_for(len(tree))))

    def _score(self, tokens: Ints, depths: Ints, ancestors: Ints, wanted: Wanted | None = None) -> Tensor:
        """Of nodes that one pass can hold; which scratch nodes each sees are bits. # [nodes, words]"""
        length, before = len(self.text), self.scratch
        self.reserve(length + before + len(tokens))
        positions = np.concatenate([self._scratch_positions[:before], length + depths])
        width = next(width for width in WIDTHS if len(tokens) <= width)
        words = ancestors.shape[1]
        try:
            recorded = self._last = self._recorded(width, words, wanted)
        except torch.OutOfMemoryError:
            self._shrink(width)
            bits = np.unpackbits(ancestors.view(np.uint8), axis=1, bitorder="little")
            return self.forward(tokens, depths, bits[:, : before + len(tokens)].astype(bool), wanted)
        recorded.run.wait()
        fill(recorded.data, tokens, positions, ancestors, length, before, self.capacity)
        if len(self._moves) > MOVES:
            self._settle()
        hand_over(recorded.data, self._moves, self.capacity)
        if recorded.proposals is not None and wanted is not None:
            recorded.proposals.tell(wanted.sampling)
        logits = recorded.run()
        self._moves = []
        self._scratch_positions = positions
        self.scratch = len(positions)
        return logits[: len(tokens)]  # type: ignore[no-any-return]

    def rank(self, logits: Tensor) -> Ranking:
        if len(logits) > self.widest or self._last.ranked is None:
            return Ranking.of(logits)
        self._last.run.wait()
        return Ranking.read(self._last.ranked[: len(logits)])

    def sample(self, logits: Tensor, sampling: Sampling) -> list[int] | None:
        """The sampled tokens of the last pass, whose logits are these; None where it was made in parts."""
        if len(logits) > self.widest:
            return None
        recorded, top_k = self._last, sampling.warping.top_k
        if top_k not in recorded.samplers:
            recorded.samplers[top_k] = NodeSampler(recorded.run, recorded.data.positions[0], top_k)
        return recorded.samplers[top_k].tokens(sampling)[: len(logits)]

    def proposed(self, logits: Tensor) -> tuple[Ints, Floats] | None:
        """What was wanted of the last pass, whose logits are these; None where it was made in parts."""
        if len(logits) > self.widest or self._last.proposals is None:
            return None
        self._last.run.wait()
        return self._last.proposals.read(len(logits))

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        """Accepted nodes are put in their places by the next pass: it is launched anyway."""
        self._settle()
        start = len(self.text)
        self._moves = [(start + slot, start + place) for place, slot in enumerate(slots) if slot != place]
        self.text.extend(tokens)
        self.scratch = 0

    def forget(self, scratch: int) -> None:
        self.scratch = scratch

    def rewind(self, length: int) -> None:
        if length:
            self._settle()
        self._moves = []
        del self.text[length:]
        self.scratch = 0

    def depth_limit(self, root: int) -> int | None:
        return None

    def _forget_passes(self) -> None:
        self._passes.clear()
        self._graphs = graph_memory(self.device)

    def _shrink(self, width: int) -> None:
        """A pass of this width cannot be recorded: wider trees are checked in several."""
        self._forget_passes()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if width == 1:
            raise DraftGraphError(f"{self.device} has no memory left for a pass: load the model in a smaller dtype")
        self.widest = width // 2
        notice(f"no GPU memory for passes of {width} nodes: going on with {self.widest} at most")

    def _settle(self) -> None:
        """Moves now, where no pass follows that could."""
        if self._moves:
            places = torch.tensor(self._moves, device=self.device)
            self.slots.move(places[:, 0], places[:, 1])
            self._moves = []

    def _read(self, tokens: list[int]) -> None:
        """A pass over text, as `transformers` makes it."""
        self._settle()
        start, end = len(self.text), len(self.text) + len(tokens)
        positions = torch.arange(start, end, device=self.device)
        self.slots.slots, self.slots.length, self.slots.shown = positions, start, end
        self._model_pass(torch.tensor([tokens], device=self.device), positions[None], self.slots, logits_to_keep=1)

    def _read_recorded(self, tokens: list[int]) -> None:
        """The same with the passes for nodes, which spare the host most of its work."""
        for start in range(0, len(tokens), self.widest):
            piece = tokens[start : start + self.widest]
            count = len(piece)
            self.forward(np.array(piece), np.arange(count), np.tri(count, dtype=bool))
            self.commit(list(range(count)), piece)

    def _recorded(self, width: int, words: int, wanted: Wanted | None) -> Pass:
        key = width, words, None if wanted is None else wanted.kind
        if key not in self._passes:
            self._passes[key] = self._captured(width, words, wanted)
        return self._passes[key]

    def _captured(self, width: int, words: int, wanted: Wanted | None) -> Pass:
        data = PassData(width, words, self.device)
        data.host["ancestors"][:] = 1
        data.host["slots"][:] = np.arange(
            self.capacity - width, self.capacity
        )  # recording must not write over the text
        hand_over(data, [], self.capacity)
        ranked, proposals = None, None
        if wanted is None:
            ranked = host_memory((width, 2, min(KEPT, self._columns)), torch.float64, self.device)
        else:
            proposals = Proposals(width, self._columns, wanted, self.device)

        def compute() -> Tensor:
            data.arrive()
            self.slots.move(*data.moves)
            logits = self.graph_pass(data.tokens, data.positions, data.slots, data.graph)
            if ranked is not None:
                ranked.copy_(packed(logits), non_blocking=True)
            if proposals is not None:
                proposals.compute(logits, data.positions[0])
            return logits

        run = Captured(compute, self.device, self._graphs)
        return Pass(data, run, None if ranked is None else ranked.numpy(), proposals)

    def graph_pass(self, tokens: Tensor, positions: Tensor, slots: Tensor, graph: GraphPass) -> Tensor:
        """Logits [nodes, vocabulary] of nodes that write into these slots, all of it data; may be captured."""
        self.slots.slots, self.slots.shown = slots, None
        with self._fusions.borrowed():
            return self._model_pass(tokens, positions, self.slots, graph_pass=graph)

    def _model_pass(self, tokens: Tensor, positions: Tensor, cache: Any, **more: Any) -> Tensor:
        attention = borrowed_attention(self.model, self._configs, self._implementations)
        with attention, self._linears.borrowed(tokens.shape[1]):
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **more,
            )
        return out.logits[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def _probe(self) -> tuple[SlotCache, int]:
        """What the layers keep of one token, and how many tokens the model tells apart."""
        cache = SlotCache()
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        logits = self._model_pass(token, token, cache)
        return cache, logits.shape[-1]


def words_for(nodes: int) -> int:
    """Numbers of WORD bits that hold a bit for every node: a power of two, so that few passes are recorded."""
    return 1 << (-(-nodes // WORD) - 1).bit_length()


def fill(
    data: PassData, tokens: Ints, positions: Ints, ancestors: Ints, length: int, before: int, capacity: int
) -> None:
    host = data.host
    parts = host["tokens"], host["positions"], host["slots"], host["ancestors"], host["scratch_positions"]
    passes.fill(*parts, tokens, positions, ancestors, length, before, capacity)
    host["length"][0] = length


def hand_over(data: PassData, moves: list[tuple[int, int]], capacity: int) -> None:
    """Moves of accepted nodes; places that nothing is moved to copy the last slot onto itself."""
    for name, column in (("moved_from", 0), ("moved_to", 1)):
        data.host[name][:] = capacity - 1
        data.host[name][: len(moves)] = [move[column] for move in moves]
