"""The engine: runs a model over the nodes of N sequences in one pass, all of them in one pool of pages.

On CUDA a pass has one of a few fixed shapes, each captured once as a CUDA graph: which sequences are there, their
lengths, pages, nodes and ancestors are data of a pass and never its shape. On a CPU nothing is captured, and a pass is
as wide as its nodes. One sequence is N = 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftgraph.engine.adapters import Adapters
from draftgraph.engine.attention import NAME
from draftgraph.engine.borrowing import (
    Fusions,
    Linears,
    borrowed_attention,
    configs_of,
    fingerprint,
    pass_lock,
)
from draftgraph.engine.cache import PagedCache, SlotCache, bytes_per_slot
from draftgraph.engine.capture import Captured, graph_memory, host_memory
from draftgraph.engine.experts import implementation_for
from draftgraph.engine.pages import PAGE, OutOfPages, Pages, pages_for
from draftgraph.engine.passes import Moves, PassData, PassShape, Piece, lay_out, next_pass, slots_of
from draftgraph.engine.program import Program, program_of
from draftgraph.engine.protocol import (
    KEPT,
    PREFILL_CHUNK,
    PassResult,
    Ranking,
    Sampling,
    Segment,
    Wanted,
    possible,
    proposals,
    ranked,
)
from draftgraph.engine.ranks import on_every_rank, rank_count
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.states import Taps, memory_for, own_states
from draftgraph.errors import DraftGraphError, UnsupportedModelError
from draftgraph.graph import WORD, Floats, Ints
from draftgraph.kernels.attention import DEEPEST, PagedPass
from draftgraph.kernels.fused import MOVED_TOGETHER
from draftgraph.kernels.rows import rows_apart
from draftgraph.kernels.sampling import MOST_KEPT, sample
from draftgraph.notices import notice

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of a captured pass; between them, nodes that nobody reads fill it up
SEQUENCES = (1, 4, 16, 64)
FEWEST = 8  # nodes of a pass over several sequences: fewer would hardly be quicker, and more shapes
STEP_WORDS, READING_WORDS = 1, NODES[-1] // WORD  # of ancestors
LEAST_READ = 128  # nodes of a pass in which text is read
FEW_SCORED = 64  # nodes, of those with logits among others without: as many cost hardly more than none
SHAPES = 64  # of passes that are kept; those not used for the longest time go
FIRST_TABLE = 128  # pages of a sequence; four times as many when one outgrows them, which costs new captures
SMALLEST = 1024  # slots of a pool that grows


class Found(NamedTuple):
    """What a pass leaves on the device."""

    logits: Tensor
    states: Tensor | None
    ranked: Tensor | None = None  # see `protocol.ranked`
    proposed: Tensor | None = None  # tokens and log-probabilities [scored, 2, k]


class Arrival:
    """What one run of a pass brings to the host."""

    def __init__(self, device: torch.device, scored: int, ranked: int = 0, proposed: int = 0) -> None:
        """`ranked`, `proposed`: tokens of every node; 0: none are brought."""
        sizes = {"ranked": (scored, 2, ranked), "proposed": (scored, 2, proposed)}
        self._memory = {name: host_memory(size, torch.float64, device) for name, size in sizes.items() if size[2]}
        if ranked:
            self._memory["sampled"] = host_memory((scored,), torch.long, device)
        self.host = {name: memory.numpy() for name, memory in self._memory.items()}
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def bring(self, **found: Tensor | None) -> None:
        for name, memory in self._memory.items():
            if (there := found[name]) is not None:
                memory.copy_(there, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


@dataclass
class Recorded:
    """The passes of one shape. Two may be under way: the host writes for one while the other is computed."""

    data: PassData
    run: Captured
    arrivals: list[Arrival]
    samplers: dict[bool, Captured] = field(default_factory=dict)  # by whether top-k is asked for

    def turn(self) -> Arrival:
        """Where the next pass arrives, and `data` writes for it: what was there before has been computed then."""
        arrival = self.arrivals[self.data.turn()]
        arrival.wait()
        return arrival


class PagedEngine:
    """A model, its pool and its passes: see `Engine`. A pool without a bound grows when a sequence needs more."""

    branching = True
    most: int | None = None
    left: Tensor | None = None
    ranks = 1

    def __init__(
        self,
        model: Any,
        slots: int | None = None,
        captured: bool | None = None,
        compiled: bool = True,
    ) -> None:
        """`compiled`: on a CPU passes run without the model's modules, if these are of known parts."""
        if RopeSwitch.of(model) is not None:
            raise UnsupportedModelError("its rotary embedding changes with the length of the text")
        self.model, self.adapters, self._taps = model, Adapters(model, {}), Taps(model)
        self._states_width: int = getattr(model, "width", 0)  # of what a head reads beside tokens
        self.captured = self.asynchronous = self.device.type == "cuda" if captured is None else captured
        self.widths = tuple(width for width in NODES if width <= 2 * WORD) if self.captured else ()
        self.widest = NODES[-1] if self.captured else PREFILL_CHUNK  # nodes of one pass; less where memory is short
        self.most_pages = FIRST_TABLE
        self.pool_moves = 0  # how often the pool has moved: recorded computations write into the old one
        self.weights = 0  # how often they have changed: texts of before are to be read again
        self.pages = Pages(pages_for(slots or SMALLEST))
        self._grows = slots is None
        self._configs = configs_of(model)
        self._lent = {"_attn_implementation": NAME}  # in place of those that the user chose
        if (experts := implementation_for(model, self.device, model.dtype)) is not None:
            self._lent["_experts_implementation"] = experts
        self._compiles = compiled and not self.captured
        self._program: Program | None = None
        self._borrow()
        self._shrinks = rank_count(model) == 1  # ranks go on with passes of the same widths, or not at all
        self._samples = True  # unless there was no memory for it
        self._moves: dict[PagedContext, Moves] = {}  # of accepted nodes, left to the next pass
        self._passes: dict[PassShape, Recorded] = {}
        self._last: Arrival | None = None
        self.launched = 0
        self._chosen = torch.zeros(NODES[-1], dtype=torch.long, device=self.device)  # by rows of the last pass
        self._graphs = graph_memory(self.device)
        self._like, self.columns = probed(model)  # columns: tokens that the model tells apart
        self.cache = self._new_cache(self.slots)

    def _borrow(self) -> None:
        """How the model's passes are run: by a compiled program, or by its modules, with what is changed in them."""
        with pass_lock(self.model):  # another engine's pass hooks modules for as long as it takes
            self._program = program_of(self.model, self.adapters) if self._compiles else None
            if self._program is not None:
                self._program.read_states(self._taps.reads)
            self._linears = Linears(self.model)
            self._fusions = Fusions(self.model)
            self._state = fingerprint(self.model)

    def _new_cache(self, slots: int) -> PagedCache:
        """The last page is nobody's."""
        return PagedCache(self._like, slots + PAGE, None if self._program is None else self._program.dtype)

    @property
    def compiled(self) -> bool:
        return self._program is not None

    @property
    def goes_ahead(self) -> bool:
        return self.captured

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @property
    def slots(self) -> int:
        return self.pages.count * PAGE

    @property
    def used(self) -> int:
        return self.pages.held * PAGE

    def open(self, tenant: str = "", adapter: int = 0) -> PagedContext:
        return PagedContext(self, tenant, adapter)

    def adapt(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._borrow()

    def read_states(self, reads: tuple[int, ...]) -> None:
        if tuple(reads) != self._taps.reads:
            self._taps = Taps(self.model, tuple(reads))
            self.left = memory_for(self.model, tuple(reads), NODES[-1]) if self.captured and reads else None
            self._forget_passes()
            self._borrow()

    def has_room(self, tokens: int, without: Sequence[PagedContext] = ()) -> bool:
        freed = self.pages.held_by(context.pages for context in without)
        return self._grows or pages_for(tokens) <= self.pages.available + freed

    def reserve(self, slots: int) -> None:
        if self._grows and pages_for(slots) > self.pages.available:
            self.grow(self.pages.held + pages_for(slots))

    def begin(self) -> None:
        """Before a text: are the weights still where recorded passes read them?"""
        with pass_lock(self.model):
            changed = self._state != fingerprint(self.model)
        if changed:
            self.weights += 1
            self._forget_passes()
            self.pages.forget_texts()
            self._borrow()
            self.cache = self._new_cache(self.slots)

    def wait(self) -> None:
        self.mark()()

    def fits_one_pass(self, segments: Sequence[Segment]) -> bool:
        return sum(map(len, segments)) <= self.widest and len(segments) <= SEQUENCES[-1]

    def fitting(self, nodes: int, wanted: int) -> int:
        last = nodes % self.widest  # of the last pass
        if not self.captured or not last or not wanted:
            return wanted
        return max(min(LEAST_READ, self.widest), at_least(NODES, min(self.widest, last + wanted))) - last

    def mark(self) -> Callable[[], None]:
        return nothing if self._last is None else self._last.wait

    def run(self, segments: Sequence[Segment]) -> list[PassResult]:
        """Segments that no pass can hold together go into several; then logits are copied, and nothing comes along."""
        for segment in segments:
            segment.context.reserve(len(segment.context.text) + segment.ahead + segment.visible.shape[1])
        self._reserve_table(max(len(segment.context.pages) for segment in segments))
        found: dict[int, list[PassResult]] = {id(segment): [] for segment in segments}
        in_order = sorted(segments, key=lambda segment: segment.scored)  # so that the last pass has all logits
        waiting = deque(Piece(segment, 0, len(segment.tokens)) for segment in in_order)
        while waiting:
            most = SEQUENCES[-1] if self.captured else len(waiting)
            pieces = sorted(next_pass(waiting, self.widest, most), key=lambda piece: not piece.segment.scored)
            wanted = wanted_of(pieces)
            shape = self._shape_of(pieces, wanted)
            if self.adapters.layers and any(piece.context.adapter for piece in pieces):
                shape = shape._replace(adapted=True)
            recorded = self._recorded(shape, wanted)
            if recorded is None:
                if any(segment.follows is not None for segment in segments):
                    raise torch.OutOfMemoryError("no memory to record a pass that follows another")
                waiting.extendleft(reversed(pieces))
                continue
            results = self._launch(recorded, pieces)
            for piece, result in zip(pieces, results, strict=True):
                found[id(piece.segment)].append(copied(result) if waiting else result)
        for segment in segments:
            if not segment.ahead:
                segment.context.note_scratch(segment.depths)
        return [joined(found[id(segment)]) for segment in segments]

    def _launch(self, recorded: Recorded, pieces: list[Piece]) -> list[PassResult]:
        """Sets the pass off; those pieces that are scored come first."""
        arrival = recorded.turn()
        recorded.data.fill(pieces)
        recorded.data.fill_states(pieces)
        for moves in recorded.data.hand_over(self._moves.values()):
            self._move_now(moves)
        samplings = [self._sampling_of(piece) for piece in pieces]
        noisy = [sampling for sampling in samplings if sampling is not None]
        if noisy or recorded.data.shape.noisy:
            scored = zip(pieces, samplings, strict=True)
            recorded.data.sample([(len(piece), one) for piece, one in scored if piece.segment.scored])
        recorded.data.arrive()
        found: Found = recorded.run()
        if not self.captured:
            recorded.run.output = None  # its memory is the result's alone
        self._moves.clear()
        sampled = None
        if noisy and not recorded.data.shape.proposals:
            sampled = self._sample(recorded, any(sampling.warping.top_k > 0 for sampling in noisy))
        arrival.bring(ranked=found.ranked, proposed=found.proposed, sampled=sampled)
        self._last = arrival
        self.launched += 1
        results, start, node = [], 0, 0
        for piece, sampling in zip(pieces, samplings, strict=True):
            rows = slice(start, start + (len(piece) if piece.segment.scored else 0))
            row = partial(self._row, self.launched, start) if found.ranked is not None else None
            result = result_of(arrival, found.logits, rows, sampled is not None and sampling is not None, row)
            result.states = None if found.states is None else found.states[node : node + len(piece)]
            results.append(result)
            start, node = rows.stop, node + len(piece)
        return results

    def _row(self, launched: int, row: int) -> int | None:
        return row if self.launched == launched else None

    def _sampling_of(self, piece: Piece) -> Sampling | None:
        """Whose noise is added at the nodes of a piece, if the device can do that."""
        segment = piece.segment
        if not self.captured or segment.wanted is not None:
            return segment.wanted.sampling if self.captured and segment.wanted is not None else None
        able = self._samples and len(piece) == len(segment.tokens) and segment.scored
        sampling = segment.sampling if able else None
        return sampling if sampling is not None and sampling.warping.top_k <= MOST_KEPT else None

    def _sample(self, recorded: Recorded, with_top_k: bool) -> Tensor | None:
        """Chooses at the nodes of the pass that was just set off; None: there is no memory for it."""
        try:
            sampler = recorded.samplers.get(with_top_k) or self._sampler(recorded, with_top_k)
        except torch.OutOfMemoryError:
            self._samples = False
            notice("no GPU memory for sampling: going on with one token at a time")
            return None
        return sampler()  # type: ignore[no-any-return]

    def _shape_of(self, pieces: list[Piece], wanted: Wanted | None) -> PassShape:
        """Of a step, or of a pass in which text is read."""
        nodes, scored = sum(map(len, pieces)), sum(len(piece) for piece in pieces if piece.segment.scored)
        words, proposing = words_for(max(piece.scratch for piece in pieces)), (0, False)
        if not self.captured:
            return PassShape(nodes, len(pieces), words, scored)
        if wanted is not None:
            proposing = wanted.k, any(piece.segment.wanted and piece.segment.wanted.sampling for piece in pieces)
        width, sequences = at_least(NODES, nodes), at_least(SEQUENCES, len(pieces))
        if (scored == nodes and words <= STEP_WORDS) or wanted is not None:
            width = width if sequences == 1 else max(width, FEWEST)
            return PassShape(width, sequences, words, width, *proposing)
        width = min(max(width, LEAST_READ), self.widest)
        few = min(width, FEW_SCORED) if scored <= FEW_SCORED else width
        return PassShape(width, max(sequences, SEQUENCES[1]), max(words, READING_WORDS), few)

    def _recorded(self, shape: PassShape, wanted: Wanted | None = None) -> Recorded | None:
        """The pass; None: there is no memory for it, and from now on passes are smaller."""
        try:
            recorded = self._passes.pop(shape, None) or self._record(shape, wanted)
        except torch.OutOfMemoryError:
            if not self._shrinks:
                raise
            self._shrink(shape)
            return None
        self._passes[shape] = recorded
        if len(self._passes) > (2 * SHAPES if self.adapters.layers else SHAPES):
            del self._passes[next(iter(self._passes))]
        return recorded

    def _record(self, shape: PassShape, wanted: Wanted | None) -> Recorded:
        sides = 2 if self.captured else 1
        data = PassData(shape, self.most_pages, self.slots, self.device, sides)
        if self._states_width:
            data.states = torch.zeros((shape.nodes, self._states_width), dtype=self.model.dtype, device=self.device)
        kept = None if shape.scored == shape.nodes else torch.arange(max(1, shape.scored), device=self.device)
        k = 0 if wanted is None else min(wanted.k, len(wanted.tokens), self.columns)

        def compute() -> Found:
            if self._program is not None:
                host = data.host
                given = host["tokens"], host["positions"], host["slots"], data.paged
                return Found(*self._program(self.cache, *given, shape.scored, host.get("adapters")))
            tokens = data.tokens
            if self.captured:
                self.cache.move(*data.moves)
                tokens = torch.where(data.follows < 0, tokens, self._chosen[data.follows])
            told = tokens, data.positions, data.slots, data.paged
            logits, states = self.compute(*told, kept, data.adapters, data.states)
            if self.left is not None and states is not None:
                states = self.left[: shape.nodes].copy_(states)
            if not self.captured or not shape.scored:
                return Found(logits, states)
            if wanted is None:
                ranking = ranked(logits)
                self._chosen[: shape.scored] = ranking[:, 0, 0]
                return Found(logits, states, ranking)
            following, noise = data.positions[0] + 1 + wanted.shift, data.noise if shape.noisy else None
            best = proposals(logits, wanted.tokens, k, following, noise)
            return Found(logits, states, None, torch.stack([part.double() for part in best], dim=1))

        chosen = self._chosen.clone()
        run = Captured(compute, self.device, self._graphs, self.captured)
        self._chosen.copy_(chosen)  # the next pass may go on with it
        brought = {"ranked": min(KEPT, self.columns) if wanted is None else 0, "proposed": k} if self.captured else {}
        return Recorded(data, run, [Arrival(self.device, shape.scored, **brought) for _ in range(sides)])

    def _sampler(self, recorded: Recorded, with_top_k: bool) -> Captured:
        """Chooses at the nodes of a pass, right behind it."""
        data, scored = recorded.data, recorded.data.shape.scored
        key, temperature, top_p, min_p, top_k = data.sampling

        def choose() -> Tensor:
            following = data.positions[0, :scored] + 1
            told = (key, following, temperature, top_p, min_p, top_k if with_top_k else 0)
            sampled = sample(recorded.run.output.logits, *told)
            self._chosen[:scored] = torch.where(data.is_sampled > 0, sampled, self._chosen[:scored])
            return sampled

        recorded.samplers[with_top_k] = Captured(choose, self.device, self._graphs)
        return recorded.samplers[with_top_k]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        data: PagedPass,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What `compute` gives for all nodes, without adapters."""
        return self.compute(tokens, positions, slots, data, None, None, given)

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        data: PagedPass,
        kept: Tensor | None,
        adapters: Tensor | None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [nodes, vocabulary] of nodes that write into these slots, and their hidden states where those are
        read, all of it data; may be captured. `kept`: logits of these nodes alone; `adapters`: numbers of the nodes'
        adapters, if any has one; `given`: what a head reads."""
        if self._program is not None and kept is None:
            told = tokens[0].numpy(), positions[0].numpy(), slots.numpy()
            numbers = None if adapters is None else adapters.numpy()
            return self._program(self.cache, *told, data, tokens.shape[1], numbers)
        self.cache.slots = slots
        attention = borrowed_attention(self.model, self._configs, self._lent)
        linears, added = self._linears.borrowed(), self.adapters.added(adapters)
        read = {} if given is None else {"states": given[None]}
        apart = rows_apart(self.device, self._linears.counters)
        with apart, self._fusions.borrowed(), attention, linears, added, self._taps.reading():
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                paged_pass=data,
                logits_to_keep=0 if kept is None else kept,
                **read,
            )
        logits: Tensor = out.logits[0]
        if kept is not None:
            logits = logits[: len(kept)]  # some models pass over what is to be kept
        return logits, own_states(out, self._taps)

    def move(self, context: PagedContext, sources: Ints, targets: Ints) -> None:
        """Accepted nodes to their places; a captured engine leaves it to the next pass, which is launched anyway."""
        if self._program is not None:
            return self._program.move(self.cache, sources, targets)
        if self.captured and len(sources) <= MOVED_TOGETHER and context not in self._moves:
            self._moves[context] = sources, targets
            return
        self.settle()
        for first in range(0, len(sources), MOVED_TOGETHER):  # a path goes on: what is read later is not written before
            here = slice(first, first + MOVED_TOGETHER)
            self._move_now((sources[here], targets[here]))

    def settle(self, context: PagedContext | None = None) -> None:
        """Moves now, of one context or all, where no pass follows that could."""
        for one in [context] if context is not None else list(self._moves):
            if one in self._moves:
                self._move_now(self._moves.pop(one))

    def drop_moves(self, context: PagedContext) -> None:
        self._moves.pop(context, None)

    def _move_now(self, moves: Moves) -> None:
        both = np.full((2, MOVED_TOGETHER), self.slots)
        lay_out([moves], *both)
        self.cache.move(*torch.from_numpy(both).to(self.device))

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Slots to slots that are none of them."""
        read, written = (torch.from_numpy(places).to(self.device) for places in (sources, targets))
        for block in self.cache.blocks.values():
            block.index_copy_(2, written, block.index_select(2, read))

    def grow(self, pages: int) -> None:
        """A larger pool, at least so many pages: everything recorded is recorded again."""
        if not self._grows:
            raise OutOfPages(f"{pages} pages are needed, {self.pages.count} are there")
        self.settle()
        self._forget_passes()
        slots, larger = self.slots, PAGE * max(pages, 2 * self.pages.count)
        try:
            cache = self._new_cache(larger)
        except RuntimeError as error:
            raise DraftGraphError(
                f"{self.device} has no memory for the keys and values of {larger} tokens: ask for fewer, or load the "
                "model in a smaller dtype"
            ) from error
        if not self.pages.empty:
            cache.take_over(self.cache, slots)
        self.cache = cache
        self.pages.grow(larger // PAGE)
        self.pool_moves += 1

    def _reserve_table(self, pages: int) -> None:
        if pages > self.most_pages:
            self._forget_passes()
            while pages > self.most_pages:
                self.most_pages *= 4

    def prepare(self, sequences: int, reading_only: bool = False) -> None:
        if not self.captured:
            return
        shapes = reading_shapes(sequences)
        if reading_only:
            shapes = [shape for shape in shapes if shape.scored == FEW_SCORED]
        shapes = [*([] if reading_only else step_shapes(sequences)), *shapes]
        if self.adapters.layers:
            shapes += [shape._replace(adapted=True) for shape in shapes]
        for shape in shapes:
            if shape.nodes <= self.widest:
                self._recorded(shape)

    def _forget_passes(self) -> None:
        self.wait()  # one may be under way
        self._last = None
        self._passes.clear()
        self._graphs = graph_memory(self.device)

    def _shrink(self, shape: PassShape) -> None:
        """A pass of this shape cannot be recorded: more nodes are computed in several."""
        self._forget_passes()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if shape.nodes == NODES[0]:
            raise torch.OutOfMemoryError(
                f"{self.device} has no memory left for a pass: load the model in a smaller dtype"
            )
        self.widest = max(nodes for nodes in NODES if nodes < shape.nodes)
        notice(f"no GPU memory for passes of {shape.nodes} nodes: going on with {self.widest} at most")


class PagedContext:
    """One sequence's pages: see `Context`."""

    reuses = True

    def __init__(self, engine: PagedEngine, tenant: str = "", adapter: int = 0) -> None:
        self.engine, self.tenant, self.adapter = engine, tenant, adapter
        self.text: list[int] = []
        self.pages: list[int] = []
        self.scratch = 0
        self.expected = 0
        self.on_states: Callable[[Tensor], None] | None = None
        self._depths = np.zeros(0, dtype=np.int64)  # of the scratch nodes
        self._weights = engine.weights  # that the text was read with
        self._shared = 0  # pages that others may read too: nobody writes into them
        self._table: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    @property
    def table(self) -> NDArray[np.int32]:
        """The pages as a pass is told of them."""
        if len(self._table) != len(self.pages):
            self._table = np.array(self.pages, dtype=np.int32)
        return self._table

    @property
    def scratch_depths(self) -> Ints:
        return self._depths[: self.scratch]

    def note_scratch(self, depths: Ints) -> None:
        self._depths = np.concatenate([self.scratch_depths, depths]) if self.scratch else depths
        self.scratch = len(self._depths)

    def begin(self, length: int, reuse: bool) -> None:
        self.engine.begin()
        if not reuse or self._weights != self.engine.weights:
            self.rewind(0)
        self._weights = self.engine.weights

    def reserve(self, capacity: int) -> None:
        missing = pages_for(capacity) - len(self.pages)
        if missing <= 0:
            return
        pages = self.engine.pages
        expected = pages_for(max(self.expected, capacity)) - len(self.pages)
        if missing > pages.available:
            self.engine.grow(pages.held + max(missing, expected))
        self._take(pages.take(missing, self.pages[-1] if self.pages else None, expected))

    def _take(self, pages: list[int]) -> None:
        self.pages = self.pages + pages
        self._table = np.zeros(0, dtype=np.int32)

    def begin_with(self, tokens: list[int], following: int) -> int:
        pages = self.engine.pages
        self.rewind(0)
        found = pages.known(self.tenant, tokens)
        if not found:
            return 0
        self._leave(0)
        pages.hold(found)
        self._take(found)
        self._shared = len(found)
        self.text = tokens[: len(found) * PAGE]
        if not self.engine.captured:
            self._copy_shared()
        return len(self.text)

    def _copy_shared(self) -> None:
        """Into pages of its own, in a row with what follows: a CPU reads a text in one piece much faster."""
        shared, pages = self.pages, self.engine.pages
        try:
            own = pages.take(len(shared), None, pages_for(self.expected))
        except OutOfPages:
            return
        places = np.arange(len(self.text))
        self.engine.copy(slots_of(shared, places), slots_of(own, places))
        self._leave(0)
        self._take(own)

    def publish(self) -> None:
        self.engine.settle(self)
        self.engine.pages.note(self.tenant, self.text, self.pages)
        self._shared = max(self._shared, len(self.text) // PAGE)

    def close(self) -> None:
        self.publish()
        self._leave(0)
        self.text, self.scratch = [], 0

    def _leave(self, kept: int) -> None:
        """All pages but the first."""
        self.engine.pages.leave(self.pages[kept:])
        self.pages, self._shared = self.pages[:kept], min(self._shared, kept)
        self._table = np.zeros(0, dtype=np.int32)

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        chunk = chunk or PREFILL_CHUNK
        for start in range(0, len(tokens), chunk):
            segment = Segment.of_text(self, tokens[start : start + chunk])
            (result,) = self.engine.run([segment])
            segment.commit()
            if self.on_states is not None and result.states is not None:
                self.on_states(result.states)

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        start = len(self.text)
        moved = [(start + slot, start + place) for place, slot in enumerate(slots) if slot != place]
        if moved:
            self.engine.move(self, *slots_of(self.pages, np.array(moved).T))
        self.text.extend(tokens)
        self.scratch = 0

    def forget(self, scratch: int) -> None:
        self.scratch = scratch

    def rewind(self, length: int) -> None:
        """To this length, or to less where others read the rest."""
        self.scratch = 0
        if length:
            self.engine.settle(self)
        else:
            self.engine.drop_moves(self)
        if length < self._shared * PAGE:
            self._leave(length // PAGE)
            length = len(self.pages) * PAGE
        del self.text[length:]

    def depth_limit(self, root: int) -> int | None:
        return DEEPEST - 1 if self.engine.captured else None


def nothing() -> None: ...


def result_of(
    arrival: Arrival, logits: Tensor, rows: slice, is_sampled: bool, row: Callable[[], int | None] | None
) -> PassResult:
    """The rows of one sequence. What lies on the host is read when asked for: one more pass of that shape may have set
    off by then, not two."""

    def found(name: str) -> Any:
        arrival.wait()
        return arrival.host[name][rows]

    def ranking() -> Ranking:
        return Ranking.read(found("ranked"))

    def sampled() -> list[int]:
        return found("sampled").tolist()  # type: ignore[no-any-return]

    def proposed() -> tuple[Ints, Floats]:
        tokens, chances = found("proposed").swapaxes(0, 1)
        return possible(tokens.astype(np.int64), np.exp(chances))

    brought = arrival.host
    return PassResult(
        logits,
        rows,
        ranking if "ranked" in brought else None,
        sampled if is_sampled else None,
        proposed if "proposed" in brought else None,
        row=row,
    )


def copied(result: PassResult) -> PassResult:
    """What outlasts the next pass."""
    return PassResult(result.logits.clone(), states=None if result.states is None else result.states.clone())


def joined(results: list[PassResult]) -> PassResult:
    if len(results) == 1:
        return results[0]
    states = [result.states for result in results if result.states is not None]
    logits = torch.cat([result.logits for result in results])
    return PassResult(logits, states=torch.cat(states) if states else None)


def wanted_of(pieces: list[Piece]) -> Wanted | None:
    """What is asked for at the nodes of a draft's pass: the most of any sequence."""
    return max((one for piece in pieces if (one := piece.segment.wanted)), key=lambda one: one.k, default=None)


@on_every_rank
@torch.no_grad()
def probed(model: Any) -> tuple[SlotCache, int]:
    """What the layers keep of one token, and how many tokens the model tells apart."""
    cache, token = SlotCache(), torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with pass_lock(model):
        out = model(input_ids=token, position_ids=token, past_key_values=cache, use_cache=True, return_dict=True)
    return cache, out.logits.shape[-1]


def slot_bytes(model: Any) -> int:
    """What the keys and values of one token take."""
    return bytes_per_slot(probed(model)[0])


def words_for(nodes: int) -> int:
    """Numbers of WORD bits that hold a bit for every node: a power of two, so that few passes are recorded."""
    return 1 << (-(-nodes // WORD) - 1).bit_length()


def step_shapes(most: int) -> list[PassShape]:
    """All that steps of at most so many sequences may need."""
    return [
        PassShape(nodes, size, STEP_WORDS, nodes)
        for less, size in zip((0, *SEQUENCES), SEQUENCES, strict=False)
        if less < most
        for nodes in NODES
        if less < nodes and (size == 1 or nodes >= FEWEST)
    ]


def reading_shapes(most: int) -> list[PassShape]:
    """All that reading may need, beside the steps of others or not."""
    return [
        PassShape(nodes, sequences, READING_WORDS, scored)
        for nodes in NODES
        if nodes >= LEAST_READ
        for sequences in up_to(SEQUENCES[1:], most)
        for scored in (FEW_SCORED, nodes)
    ]


def at_least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if needed <= size)


def up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes that anything of at most so many may need."""
    return [size for before, size in zip((0, *sizes), sizes, strict=False) if before < most]
