"""Runs a model over the nodes of many texts in one pass, all of them in one pool of pages.

A seat is one text's place: an engine of its own for whoever decodes that text, which may be asked alone. The scheduler
asks for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.borrowing import NarrowLinears, borrowed_attention, configs_of, pass_lock
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.packed_attention import NAME, PackedPass, TextPart, slots_of
from draftgraph.engine.packed_cache import PackedCache, bytes_per_slot
from draftgraph.engine.pages import PAGE, Pages, pages_for
from draftgraph.engine.proposals import Wanted
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.runner import PREFILL_CHUNK
from draftgraph.engine.sampler import Sampling
from draftgraph.errors import DraftGraphError, UnsupportedModelError
from draftgraph.graph import Bools, Floats, Ints, TokenTree
from draftgraph.ranking import Ranking


@dataclass
class Part:
    """What a pass computes for one text: nodes behind it, which see all of it and of each other what `visible` says."""

    seat: Seat
    tokens: Ints
    depths: Ints  # behind the text
    visible: Bools  # [nodes, scratch slots after this pass]
    scored: bool = True  # False: nobody asks for logits
    chain: bool = False  # each sees all before it, and there is no other scratch
    sampling: Sampling | None = None  # how tokens are chosen at the nodes, where the device can do that

    @classmethod
    def of_text(cls, seat: Seat, tokens: list[int], scored: bool = False) -> Part:
        """The text goes on with these: commit them after the pass."""
        count = len(tokens)
        return cls(seat, np.array(tokens), np.arange(count), np.tri(count, dtype=bool), scored, chain=True)

    def commit(self) -> None:
        """The nodes are text now."""
        self.seat.commit(list(range(len(self.tokens))), self.tokens.tolist())

    @classmethod
    def of_tree(cls, seat: Seat, tree: TokenTree, sampling: Sampling | None = None) -> Part:
        return cls(seat, tree.tokens, tree.depths, tree.mask, sampling=sampling)


class PackedEngine:
    """A model and its pool."""

    most: int | None = None

    def __init__(self, model: Any, slots: int) -> None:
        if RopeSwitch.of(model) is not None:
            raise UnsupportedModelError("its rotary embedding changes with the length of the text")
        self.model = model
        self._configs = configs_of(model)
        self._lent: dict[str, str] = {"_attn_implementation": NAME}  # what configurations say in a pass
        self._linears = NarrowLinears(model)
        self.pages = Pages(pages_for(slots))
        like, self.columns = probed(model)  # tokens that the model tells apart
        self._make_pool(like)

    def _make_pool(self, like: SlotCache) -> None:
        self.cache: Any = PackedCache(like, self.slots)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @classmethod
    @torch.no_grad()
    def bytes_per_slot(cls, model: Any) -> int:
        return bytes_per_slot(probed(model)[0])

    def open(self, tenant: str = "") -> Seat:
        return Seat(self, tenant)

    def has_room(self, tokens: int) -> bool:
        return pages_for(tokens) <= self.pages.available

    @property
    def slots(self) -> int:
        return self.pages.count * PAGE

    @property
    def used(self) -> int:
        return self.pages.held * PAGE

    def wait(self) -> None:
        """Until the last pass is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def move(self, seat: Seat, sources: Ints, targets: Ints) -> None:
        """Accepted nodes of a text to their places: slots, in the order of the path."""
        self.cache.move(sources, targets)

    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        """Logits [nodes, vocabulary] of every part, none of one that is not scored; all nodes are scratch after it."""
        for part in parts:
            part.seat.reserve(len(part.seat.text) + part.visible.shape[1])
        packed, start, slots, scored = PackedPass([]), 0, [], []
        for part in parts:
            seat, end = part.seat, start + len(part.tokens)
            seat.note_scratch(part.depths)
            about = TextPart(
                slice(start, end), seat.pages, len(seat.text), seat.scratch_positions, part.visible, self.device
            )
            packed.parts.append(about)
            slots.append(slots_of(seat.pages, np.arange(about.end - len(part.tokens), about.end)))
            scored.append(np.arange(start, end if part.scored else start))
            start = end
        positions = [about.positions[-len(part.tokens) :] for about, part in zip(packed.parts, parts, strict=True)]
        wanted = np.concatenate(scored)
        arrays = (np.concatenate([part.tokens for part in parts]), *map(np.concatenate, (positions, slots)), wanted)
        logits = self._pass(packed, *(torch.from_numpy(array).to(self.device) for array in arrays))
        return list(logits.split([len(rows) for rows in scored]))

    def _pass(self, packed: PackedPass, tokens: Tensor, positions: Tensor, slots: Tensor, wanted: Tensor) -> Tensor:
        self.cache.slots = slots
        kept = wanted if len(wanted) else wanted.new_zeros(1)  # some models fail on none
        with self._attention(), self._linears.borrowed(len(tokens)):
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                packed_pass=packed,
                logits_to_keep=kept,
            )
        logits: Tensor = out.logits[0]
        return logits[: len(wanted)] if len(logits) == len(kept) else logits[wanted]

    def _attention(self) -> AbstractContextManager[None]:
        return borrowed_attention(self.model, self._configs, self._lent)


@torch.no_grad()
def probed(model: Any) -> tuple[SlotCache, int]:
    """What the layers keep of one token, and how many tokens the model tells apart."""
    cache, token = SlotCache(), torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with pass_lock(model):
        out = model(input_ids=token, position_ids=token, past_key_values=cache, use_cache=True, return_dict=True)
    return cache, out.logits.shape[-1]


class Seat:
    """One text's place: an `Engine`; see `EagerEngine` for what each method means."""

    branching = True
    ranks = works_alone = False

    def __init__(self, engine: PackedEngine, tenant: str = "") -> None:
        self.engine, self.tenant = engine, tenant
        self.text: list[int] = []
        self.pages: list[int] = []
        self.scratch = 0
        self.expected = 0  # tokens that the text is going to have
        self._depths = np.zeros(0, dtype=np.int64)  # of the scratch nodes
        self._settled = 0  # pages that others may read too: nobody writes into them

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def scratch_positions(self) -> Ints:
        return len(self.text) + self._depths

    @property
    def scratch_depths(self) -> Ints:
        return self._depths[: self.scratch]

    def note_scratch(self, depths: Ints) -> None:
        self._depths = np.concatenate([self.scratch_depths, depths]) if self.scratch else depths
        self.scratch = len(self._depths)

    def begin(self, length: int, reuse: bool) -> None:
        if not reuse:
            self.rewind(0)

    def reserve(self, capacity: int) -> None:
        missing = pages_for(capacity) - len(self.pages)
        if missing > 0:
            expected = pages_for(max(self.expected, capacity)) - len(self.pages)
            self.pages += self.engine.pages.take(missing, self.pages[-1] if self.pages else None, expected)

    def begin_with(self, tokens: list[int], following: int) -> int:
        """Takes over what the pool knows of a text; returns how many tokens that are."""
        pages = self.engine.pages
        self.rewind(0)
        found = pages.known(self.tenant, tokens)
        if not found:
            return 0
        pages.hold(found)
        self.pages, self._settled = list(found), len(found)
        self.text = tokens[: len(found) * PAGE]
        if self.device.type == "cpu":
            self._copy_known()
        return len(self.text)

    def _copy_known(self) -> None:
        """Into pages of its own, in a row with what follows: a CPU reads a text in one piece much faster."""
        shared, pages = self.pages, self.engine.pages
        try:
            self.pages = pages.take(len(shared), None, pages_for(self.expected))
        except DraftGraphError:
            return
        places = np.arange(len(self.text))
        self.engine.cache.move(slots_of(shared, places), slots_of(self.pages, places))
        pages.leave(shared)
        self._settled = 0

    def settle(self) -> None:
        """Other texts may begin with what this one has so far."""
        self.engine.pages.note(self.tenant, self.text, self.pages)
        self._settled = max(self._settled, len(self.text) // PAGE)

    def close(self) -> None:
        self.settle()
        self.engine.pages.leave(self.pages)
        self.pages, self.text, self.scratch, self._settled = [], [], 0, 0

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        chunk = chunk or PREFILL_CHUNK
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self.engine.run([Part.of_text(self, piece)])
            self.commit(list(range(len(piece))), piece)

    def forward(self, tokens: Ints, depths: Ints, visible: Bools, wanted: Wanted | None = None) -> Tensor:
        return self.engine.run([Part(self, tokens, depths, visible)])[0]

    def check(self, tree: TokenTree) -> Tensor:
        return self.engine.run([Part.of_tree(self, tree)])[0]

    def rank(self, logits: Tensor) -> Ranking:
        return Ranking.of(logits)

    def sample(self, logits: Tensor, sampling: Sampling) -> list[int] | None:
        return None

    def proposed(self, logits: Tensor) -> tuple[Ints, Floats] | None:
        return None

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
        if length < self._settled * PAGE:
            kept = length // PAGE
            self.engine.pages.leave(self.pages[kept:])
            self.pages, self._settled, length = self.pages[:kept], kept, kept * PAGE
        del self.text[length:]

    def depth_limit(self, root: int) -> int | None:
        return None
