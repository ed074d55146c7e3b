"""Replays known answers with the draft alone: how much of its graphs the target would have accepted, pass by pass.

The target's choice at every place is the next token of its answer, so the target need not run. Answers and structures
are replayed side by side. The draft reads each answer once, as a trunk of scratch nodes; the graphs of all walks grow
on the trunks, a level of all of them in one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import Tensor

from draftgraph.bench.answers import Answer
from draftgraph.bench.walker import Trunk, Walker
from draftgraph.choose import DraftNoise
from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder
from draftgraph.drafting.model import Perturb, mark_visible
from draftgraph.engine.borrowing import Loan, unwrapped
from draftgraph.engine.selfcheck import checked_engine
from draftgraph.errors import UnsupportedModelError, UsageError
from draftgraph.graph import Bools, Floats, Ints
from draftgraph.models.progress import Report
from draftgraph.noise import CHOICE, KeyedNoise
from draftgraph.stats import Stats

SEVERAL = 4  # best tokens of the draft, in the second figure of agreement
# Tokens of the answers that are replayed side by side, prompts included: few passes for a GPU, small masks for a CPU.
TRUNK_SLOTS = {"cpu": 1024, "cuda": 4096}
CHUNK = 512


@dataclass(frozen=True)
class Replayed:
    """The figures of one answer."""

    answer: Answer
    agreed: int  # places where the target's token is the draft's best
    agreed_among_several: int
    stats: dict[str, Stats]  # by structure; times and tokens that the draft read are not counted


class Replay:
    """Structures to replay with the draft of a decoder."""

    def __init__(
        self, decoder: GraphDecoder, structures: dict[str, GraphConfig], max_new_tokens: int, ends: frozenset[int]
    ) -> None:
        if decoder.draft_model is None:
            raise UsageError("there is no draft to measure: load the pair with one")
        for name, config in structures.items():
            if config.copies or not config.drafts or config.verification != "keyed":
                raise UsageError(f"structure {name} cannot be replayed: only keyed graph, tree and chain can")
        if not decoder.can_branch:
            names = " and ".join(type(unwrapped(model)).__name__ for model in decoder.models)
            raise UnsupportedModelError(f"{names} cannot both take a token tree: their graphs cannot be measured")
        self.decoder = decoder
        self.structures = structures
        self.max_new_tokens = max_new_tokens
        self.ends = ends
        self.engine = checked_engine(decoder.draft_model)
        self.k = max([SEVERAL, *(config.k for config in structures.values())])

    def along(self, answers: list[Answer], report: Report | None = None) -> list[Replayed]:
        """The figures of every structure on every answer."""
        replayed: list[Replayed] = []
        tokens, done = sum(len(answer.tokens) for answer in answers), 0
        with Loan(self.decoder.draft_model):
            for group in side_by_side(answers, TRUNK_SLOTS.get(self.engine.device.type, 1024)):
                self.engine.begin(0, reuse=False)
                trunks = [self.read(answer) for answer in group]
                for walked in self.walk(walkers := self.walkers_on(trunks)):
                    if report is not None:
                        report((done + walked / len(self.structures)) / tokens)
                for trunk in trunks:
                    stats = {name: walkers[trunk, name].stats for name in self.structures}
                    replayed.append(Replayed(trunk.answer, trunk.agreed(1), trunk.agreed(SEVERAL), stats))
                    done += len(trunk.answer.tokens)
        return replayed

    def walkers_on(self, trunks: list[Trunk]) -> dict[tuple[Trunk, str], Walker]:
        structures = self.structures.items()
        return {(trunk, name): Walker(trunk, config, self.ends) for trunk in trunks for name, config in structures}

    def walk(self, walkers: dict[tuple[Trunk, str], Walker]) -> Iterator[int]:
        """All walkers to the ends of their answers, step by step; the tokens behind them after every step."""
        slots = self.engine.scratch
        while active := [walker for walker in walkers.values() if not walker.arrived]:
            self.grow(active)
            self.engine.forget(slots)
            for walker in active:
                walker.accept()
            yield sum(walker.walked for walker in walkers.values())

    def read(self, answer: Answer) -> Trunk:
        """The draft reads an answer, and says at each place what it would have drafted."""
        perturb = None
        if answer.temperature > 0:
            perturb = DraftNoise(KeyedNoise(answer.seed), answer.temperature, CHOICE)
        text = np.array((answer.prompt + answer.tokens)[:-1])
        limit = self.engine.depth_limit(0)
        if limit is not None and limit < len(text):
            raise UnsupportedModelError("the draft's rotary embedding changes within an answer: ask for fewer tokens")
        first_slot, first_place = self.engine.scratch, len(answer.prompt) - 1
        said: list[tuple[Ints, Floats]] = []
        for start in range(0, len(text), CHUNK):
            places = np.arange(start, min(start + CHUNK, len(text)))
            slots = np.arange(self.engine.scratch + len(places))
            visible = (slots >= first_slot) & (slots <= first_slot + places[:, None])
            logits = self._forward(text[places], places, visible)
            of_prompt = max(0, first_place - start)  # rows whose next token is the prompt's
            if of_prompt < len(places):
                said.append(self._children(logits[of_prompt:], [(perturb, places[of_prompt:])]))
        return Trunk(answer, perturb, first_slot, *joined(said))

    def grow(self, walkers: list[Walker]) -> None:
        """As `drafting.grow`, all graphs together."""
        for walker in walkers:
            walker.begin(self._depth_limit(walker))
        while walkers := [walker for walker in walkers if walker.frontier]:
            tokens, probs = self.propose(walkers)
            start = 0
            for walker in walkers:
                end = start + len(walker.frontier)
                walker.extend(tokens[start:end], probs[start:end])
                start = end

    def propose(self, walkers: list[Walker]) -> tuple[Ints, Floats]:
        """Children for the frontiers of all graphs, one behind the other, from one pass."""
        nodes = [(walker, node) for walker in walkers for node in walker.frontier]
        tokens = np.array([walker.graph.tokens[node] for walker, node in nodes])
        places = np.array([walker.root + walker.graph.depths[node] for walker, node in nodes])
        first_slot = self.engine.scratch
        visible = np.zeros((len(nodes), first_slot + len(nodes)), dtype=bool)
        noises: list[tuple[Perturb | None, Ints]] = []
        start = 0
        for trunk, group in groupby(walkers, lambda walker: walker.trunk):
            first = start
            for walker in group:
                end = start + len(walker.frontier)
                mark_visible(visible[start:end], first_slot + start, walker.graph, walker.frontier, walker.seen)
                start = end
            noises.append((trunk.perturb, places[first:start]))
        return self._children(self._forward(tokens, places, visible), noises)

    def _forward(self, tokens: Ints, places: Ints, visible: Bools) -> Tensor:
        return self.engine.forward(self.decoder.draft_vocabulary.to_draft(tokens), places, visible)

    def _children(self, logits: Tensor, noises: list[tuple[Perturb | None, Ints]]) -> tuple[Ints, Floats]:
        """The best children of rows that stand at these places, answer by answer: noise needs much memory."""
        said = []
        parts = logits.split([len(places) for _, places in noises])
        for part, (perturb, places) in zip(parts, noises, strict=True):
            said.append(self.decoder.draft_vocabulary.best(part, self.k, perturb, places + 1))
        return joined(said)

    def _depth_limit(self, walker: Walker) -> int:
        """As in decoding: no deeper than the text may still grow, nor across a change of the rotary embedding."""
        limits = [engine.depth_limit(walker.root) for engine in (self.decoder.target_engine, self.engine)]
        remaining = self.max_new_tokens - walker.walked - 1
        return max(0, min([remaining, *(limit for limit in limits if limit is not None)]))


def side_by_side(answers: list[Answer], most: int) -> Iterator[list[Answer]]:
    """Groups of neighbours that together have so many tokens at most."""
    group: list[Answer] = []
    slots = 0
    for answer in answers:
        length = len(answer.prompt) + len(answer.tokens)
        if group and slots + length > most:
            yield group
            group, slots = [], 0
        group.append(answer)
        slots += length
    if group:
        yield group


def joined(parts: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    tokens, probs = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(probs)
