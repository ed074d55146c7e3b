"""Replays known answers with the draft alone: how much of its graphs the target would have accepted, pass by pass.

The target's choice at every place is the next token of its answer, so the target need not run. Answers and structures
are replayed side by side. The draft reads each answer once, as a trunk of scratch nodes; the graphs of all walks grow
on the trunks, a level of all of them in one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import numpy as np
from torch import Tensor

from draftgraph.bench.answers import Answer
from draftgraph.choose import DraftNoise
from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder
from draftgraph.engine.borrowing import Loan, unwrapped
from draftgraph.engine.protocol import Engine, Segment
from draftgraph.errors import UnsupportedModelError, UsageError
from draftgraph.graph import ROOT, Bools, Floats, Ints, Source, TokenGraph
from draftgraph.noise import CHOICE, KeyedNoise
from draftgraph.notices import Report
from draftgraph.proposers.draft_model import Ancestors, DraftVocabulary, Perturb, mark_visible
from draftgraph.proposers.growth import grow_together, growing
from draftgraph.stats import Stats, Step


@dataclass(frozen=True, eq=False)
class Trunk:
    """An answer that the draft has read, and what it would have said at each of its places."""

    answer: Answer
    perturb: Perturb | None
    first_slot: int
    children: Ints  # [tokens of the answer, k], best first
    probs: Floats

    @cached_property
    def text(self) -> list[int]:
        return self.answer.prompt + self.answer.tokens

    def seen_at(self, place: int) -> Bools:
        """The slots that the token at this place of the text sees, its own last."""
        return np.arange(self.first_slot + place + 1) >= self.first_slot

    def agreed(self, among: int) -> int:
        """At how many places the target's token is among the draft's best."""
        return int((self.children[:, :among] == np.array(self.answer.tokens)[:, None]).any(axis=1).sum())


@dataclass
class Level:
    """What a walker asks the draft for: the children of these nodes of its graph."""

    walker: Walker
    nodes: list[int]


@dataclass
class Walker:
    """One structure on its way along one answer. As a proposer it is the draft behind the place where it stands."""

    trunk: Trunk
    config: GraphConfig
    ends: frozenset[int]
    walked: int = 0
    stats: Stats = field(default_factory=Stats)

    source: Source = "draft"
    free: bool = False

    @property
    def arrived(self) -> bool:
        return self.walked == len(self.trunk.answer.tokens)

    @property
    def root(self) -> int:
        return len(self.trunk.answer.prompt) - 1 + self.walked

    def grow(self, max_depth: int) -> Any:
        """A graph behind the token where the walker stands, by the rule of decoding."""
        self.graph = TokenGraph(self.trunk.text[self.root], self.config, max_depth, self.ends)
        self.seen: Ancestors = {ROOT: self.trunk.seen_at(self.root)}
        self.levels = 0
        self.tree = yield from growing(self.graph, [self])

    def begin(self, text: list[int]) -> None: ...

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any:
        """The root's children are known from the trunk."""
        self.levels += 1
        if frontier == [ROOT]:
            here = slice(self.walked, self.walked + 1)
            tokens, probs = self.trunk.children[here], self.trunk.probs[here]
        else:
            tokens, probs = yield Level(self, frontier)
        return tokens[:, : self.config.k], probs[:, : self.config.k]

    def accept(self) -> None:
        """Goes on to behind the longest path that the answer takes, and its bonus token."""
        path: list[int] = []
        tokens: list[int] = []
        for token in self.trunk.answer.tokens[self.walked :]:
            tokens.append(token)
            child = self.tree.child(path[-1] if path else ROOT, token)
            if child is None:
                break
            path.append(child)
        root = self.root
        self.walked += len(tokens)
        self.stats.count(Step(root, self.graph, self.tree, path, tokens, "stop" if self.arrived else None))
        self.stats.draft_passes += self.levels


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
        if decoder.translation is not None:
            raise UsageError("only a draft with the target's tokenizer can be measured token by token: time it instead")
        if decoder.engines.reads:
            raise UsageError("a head reads the target's states, and a replay goes without the target: time it instead")
        for name, config in structures.items():
            if config.copies or not config.drafts or config.verification != "keyed":
                raise UsageError(f"structure {name} cannot be replayed: only keyed graph, tree and chain can")
        if not decoder.engines.can_branch:
            names = " and ".join(type(unwrapped(model)).__name__ for model in decoder.models)
            raise UnsupportedModelError(f"{names} cannot both take a token tree: their graphs cannot be measured")
        self.decoder = decoder
        self.structures = structures
        self.max_new_tokens = max_new_tokens
        self.ends = ends
        self.engine = cast(Engine, decoder.engines.draft)
        self.vocabulary = cast(DraftVocabulary, decoder.engines.vocabulary)
        self.context, self.target_context = self.engine.open(), decoder.engines.target.open()
        self.k = max([SEVERAL, *(config.k for config in structures.values())])

    def along(self, answers: list[Answer], report: Report | None = None) -> list[Replayed]:
        """The figures of every structure on every answer."""
        replayed: list[Replayed] = []
        tokens, done = sum(len(answer.tokens) for answer in answers), 0
        with Loan(self.decoder.draft_model):
            for group in side_by_side(answers, TRUNK_SLOTS.get(self.engine.device.type, 1024)):
                self.context.begin(0, reuse=False)
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
        slots = self.context.scratch
        while active := [walker for walker in walkers.values() if not walker.arrived]:
            grow_together([walker.grow(self._depth_limit(walker)) for walker in active], self.propose)
            self.context.forget(slots)
            for walker in active:
                walker.accept()
            yield sum(walker.walked for walker in walkers.values())

    def read(self, answer: Answer) -> Trunk:
        """The draft reads an answer, and says at each place what it would have drafted."""
        perturb = None
        if answer.temperature > 0:
            perturb = DraftNoise(KeyedNoise(answer.seed), answer.temperature, CHOICE)
        text = np.array((answer.prompt + answer.tokens)[:-1])
        limit = self.context.depth_limit(0)
        if limit is not None and limit < len(text):
            raise UnsupportedModelError("the draft's rotary embedding changes within an answer: ask for fewer tokens")
        first_slot, first_place = self.context.scratch, len(answer.prompt) - 1
        said: list[tuple[Ints, Floats]] = []
        for start in range(0, len(text), CHUNK):
            places = np.arange(start, min(start + CHUNK, len(text)))
            slots = np.arange(self.context.scratch + len(places))
            visible = (slots >= first_slot) & (slots <= first_slot + places[:, None])
            logits = self._forward(text[places], places, visible)
            of_prompt = max(0, first_place - start)  # rows whose next token is the prompt's
            if of_prompt < len(places):
                said.append(self._children(logits[of_prompt:], [(perturb, places[of_prompt:])]))
        return Trunk(answer, perturb, first_slot, *joined(said))

    def propose(self, levels: list[Level]) -> list[tuple[Ints, Floats]]:
        """Children for the levels of all graphs, from one pass."""
        nodes = [(level.walker, node) for level in levels for node in level.nodes]
        tokens = np.array([walker.graph.tokens[node] for walker, node in nodes])
        places = np.array([walker.root + walker.graph.depths[node] for walker, node in nodes])
        first_slot = self.context.scratch
        visible = np.zeros((len(nodes), first_slot + len(nodes)), dtype=bool)
        noises: list[tuple[Perturb | None, Ints]] = []
        start = 0
        for trunk, group in groupby(levels, lambda level: level.walker.trunk):
            first = start
            for level in group:
                end, walker = start + len(level.nodes), level.walker
                mark_visible(visible[start:end], first_slot + start, walker.graph, level.nodes, walker.seen)
                start = end
            noises.append((trunk.perturb, places[first:start]))
        children = self._children(self._forward(tokens, places, visible), noises)
        ends = np.cumsum([len(level.nodes) for level in levels])[:-1]
        return list(zip(*(np.split(column, ends) for column in children), strict=True))

    def _forward(self, tokens: Ints, places: Ints, visible: Bools) -> Tensor:
        nodes = Segment(self.context, self.vocabulary.to_draft(tokens), places, visible)
        logits: Tensor = self.engine.run([nodes])[0].logits
        return logits

    def _children(self, logits: Tensor, noises: list[tuple[Perturb | None, Ints]]) -> tuple[Ints, Floats]:
        """The best children of rows that stand at these places, answer by answer: noise needs much memory."""
        said = []
        parts = logits.split([len(places) for _, places in noises])
        for part, (perturb, places) in zip(parts, noises, strict=True):
            said.append(self.vocabulary.best(part, self.k, perturb, places + 1))
        return joined(said)

    def _depth_limit(self, walker: Walker) -> int:
        """As in decoding: no deeper than the text may still grow, nor across a change of the rotary embedding."""
        limits = [context.depth_limit(walker.root) for context in (self.target_context, self.context)]
        remaining = self.max_new_tokens - walker.walked - 1
        return max(0, min([remaining, *(limit for limit in limits if limit is not None)]))  # type: ignore[no-any-return]


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
