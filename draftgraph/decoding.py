"""One text: grow, prune and merge, flatten, verify, commit, step by step; one code path for every mode."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from draftgraph.choose import FinishReason, KeyedChooser, Outputs, Prefix, RejectionChooser, Scored, Walk, walk
from draftgraph.config import GraphConfig
from draftgraph.cost import CostModel
from draftgraph.drafting.growers import Grown, LevelGrower, Limits, Sources, Ungrown, grower_for
from draftgraph.drafting.model import Asked, ModelProposer, Told
from draftgraph.drafting.recycle import RecycleProposer
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.runner import Engine, common_prefix
from draftgraph.errors import DraftGraphError
from draftgraph.generation import Request
from draftgraph.graph import TokenTree
from draftgraph.noise import KeyedNoise
from draftgraph.ranking import Ranking
from draftgraph.stats import Stats
from draftgraph.trace import Step
from draftgraph.tuning import pricing_of

if TYPE_CHECKING:
    from draftgraph.decoder import GraphDecoder


@dataclass(frozen=True)
class News:
    """A step that nothing has been learnt from yet."""

    step: Step
    grown: Grown
    visited: list[int]
    ranking: Ranking | None


class Decoding:
    """One text being continued, step by step."""

    def __init__(
        self,
        decoder: GraphDecoder,
        request: Request,
        row: int,
        seed: int,
        outputs: Outputs,
        config: GraphConfig,
        sample: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.request = request
        self._stats = Stats()
        self._news: News | None = None
        self.outputs = outputs
        self.target = decoder.target_engine
        padding = 0 if request.attention_mask is None else int((request.attention_mask[row] == 0).sum())
        ids = request.input_ids[row : row + 1]
        self.prefix = Prefix.of(ids, request.max_length, padding)
        self.text: list[int] = ids[0, padding:].tolist()
        self.prompt_length = self._stats.prompt_tokens = len(self.text)
        self.finish_reason: FinishReason | None = None
        self.config = config if decoder.can_branch else replace(config, k=1)
        self.pricing = pricing_of(decoder, self.config)
        self.cost = self.pricing.at(len(self.text), self._stats)

        if sample is None:
            sample = row % (request.config.num_return_sequences or 1)
        self.noise = KeyedNoise(seed, sample) if request.samples else None
        self.draft = decoder.draft_proposer(self.config, request.eos_ids) if config.drafts else None
        self._engines: list[Engine] = [self.target, *([self.draft.engine] if self.draft else [])]
        self.chooser = self._chooser()
        self.sampling = self.chooser.sampling
        self.sources = self._sources()
        self.calibration = decoder.calibrations[request.samples]
        self.grower = grower_for(self.sources, Limits(self.config, request.eos_ids, decoder.hits, self.calibration))

    @cached_property
    def loan(self) -> Loan:
        return Loan(*self.decoder.models)

    def _chooser(self) -> KeyedChooser | RejectionChooser:
        processors, temperature = self.request.processors, self.request.temperature
        if self.config.verification == "rejection" and self.noise is not None:
            drafted = {}
            if isinstance(self.draft, ModelProposer):
                self.draft.keep_logits, drafted = True, self.draft.logits
            return RejectionChooser(processors, self.noise, temperature, drafted, self.outputs)
        return KeyedChooser(processors, self.noise, self.outputs)

    def _sources(self) -> Sources:
        """The draft guesses with the noise of the choice; a text without a draft copies in every mode."""
        config, noise = self.config, self.chooser.perturb(self.request.temperature)
        if self.draft is not None:
            self.draft.perturb = noise
        copies = config.copies or (config.drafts and self.draft is None)
        return Sources(
            draft=self.draft,
            copied=SuffixProposer(config.k) if copies else None,
            recycled=RecycleProposer(config.k, noise) if config.mode == "auto" else None,
        )

    def prefill(self, reuse_cache: bool = False) -> None:
        """Both models read the text but for its last token, which is the first root."""
        chunk = self.request.config.prefill_chunk_size
        with self.loan, self._stats.clock("prefill"):
            for engine in self._engines:
                engine.begin(len(self.text), reuse_cache)
                engine.reserve(self.request.max_length + self.config.nodes)
            self.target.rewind(common_prefix(self.target.text, self.text[:-1]))
            self.target.prefill(self.text[len(self.target.text) : -1], chunk, self.text[-1])
            if self.draft is not None:
                self.draft.catch_up(self.text, chunk)
            self.begin()

    def begin(self) -> None:
        """The text has been read: the first step may be drafted."""
        self.draft_ahead(self.cost)
        self.grower.remember(self.text, self._depth_limit())

    def draft_ahead(self, cost: CostModel | None) -> None:
        """For the next step, under these prices; None: nothing."""
        if cost is not None:
            self.grower.plan(cost)
        self.grower.draft_ahead(self.text, 0 if cost is None else self._depth_limit())

    def __iter__(self) -> Iterator[list[int]]:
        """The tokens of every step, until a stop condition holds."""
        return (step.tokens for step in self.steps())

    def steps(self) -> Iterator[Step]:
        while self.finish_reason is None:
            yield self.step()

    def step(self) -> Step:
        """Draft a graph, check it in one pass, keep the longest path that the target agrees with."""
        self.decoder.claim(self)
        with self.loan, self.decoder.nothing_half_done():
            with self._stats.clock("draft"):
                grown = self.grow()
            with self._stats.clock("verify"):
                scored = self.verify(grown.tree)
            with self._stats.clock("other"):
                chosen = self.walk(grown.tree, scored)
                return self.commit(grown, scored, chosen)

    def grow(self) -> Grown:
        """Grow, prune, merge and flatten: the unrolled view of the graph behind the last token."""
        self.cost = self.pricing.at(len(self.text), self._stats)
        return self.grower.grow(self.text, self._depth_limit(), self.cost)

    def ungrown(self) -> Grown:
        """The last token alone."""
        return Ungrown.behind(self.text, self.grower.limits)

    def growing(self, cost: CostModel) -> Generator[Asked, Told, Grown]:
        """The same under these prices, asking for each pass of the draft: among many texts."""
        if isinstance(self.grower, LevelGrower):
            return (yield from self.grower.growing(self.text, self._depth_limit(), cost))
        return self.grower.grow(self.text, self._depth_limit(), cost)

    def verify(self, tree: TokenTree) -> Scored:
        """What the target says at every node, in one pass."""
        logits = self.target.check(tree)
        self.learn()  # from the step before, while the target is at work
        tree.index()
        sampled = self.target.sample(logits, self.sampling) if self.sampling else None
        ranked = self.target.ranks or self.sources.recycled is not None
        return Scored(logits, self.target.rank(logits) if ranked else None, sampled)

    def walk(self, tree: TokenTree, scored: Scored) -> Walk:
        """The path that the target agrees with, and the token that it adds."""
        chosen = walk(tree, scored, self.chooser, self.prefix, self.request.criteria)
        if not self.request.may_be_invalid and not scored.finite(chosen.visited):
            raise DraftGraphError("the target's logits are not finite: load it in another dtype, or check its weights")
        return chosen

    def commit(self, grown: Grown, scored: Scored, chosen: Walk) -> Step:
        """The accepted path becomes text, the next step is drafted, and what this one says is remembered."""
        step = self.accept(grown, scored, chosen)
        if self.finish_reason is None:
            self.grower.draft_ahead(self.text, self._depth_limit())
        self.remember()
        if self.finish_reason is not None or self.decoder.observer is not None or not self.target.works_alone:
            self.learn()
        return step

    def accept(self, grown: Grown, scored: Scored, chosen: Walk) -> Step:
        """The accepted path becomes text in both caches; the rest is forgotten."""
        tree, accepted = grown.tree, [0, *chosen.path]
        step = Step(len(self.text) - 1, grown.graph, tree, chosen.path, chosen.tokens, chosen.finish_reason)
        self.target.commit(accepted, tree.tokens[accepted].tolist())
        self.grower.commit(grown, chosen.path)
        self.text.extend(chosen.tokens)
        self.finish_reason = chosen.finish_reason
        self._news = News(step, grown, chosen.visited, scored.ranking)
        return step

    def remember(self, begin: bool = True) -> None:
        """What the target said at the nodes of the last step; then the memories may begin the next."""
        if self.finish_reason is not None or self._news is None:
            return
        step, ranking = self._news.step, self._news.ranking
        if self.sources.recycled is not None and ranking is not None:
            self.sources.recycled.learn(self.text, step.position, step.tree, step.path, ranking)
        if begin:
            self.grower.remember(self.text, self._depth_limit())

    def learn(self) -> None:
        """What the last step was, and how well it had been foretold: can wait until the target works on the next."""
        if self._news is None:
            return
        news, self._news = self._news, None
        step = news.step
        if self.config.mode == "auto":
            news.grown.settle(news.visited, step.tokens)
            self.calibration.learn()
        if self.noise is not None:
            self.noise.forget_before(len(self.text))
        self._stats.count(step)
        if self.draft is not None:
            self._stats.draft_passes, self._stats.draft_tokens = self.draft.passes, self.draft.tokens_fed
            self.decoder.hits.count(step)
            self.grower.plan(self.cost)
        if self.decoder.observer is not None:
            self.decoder.observer(step)

    @property
    def stats(self) -> Stats:
        """The figures of all steps so far."""
        self.learn()
        return self._stats

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of all steps went."""
        return self._stats.seconds

    def _depth_limit(self) -> int:
        """No deeper than the text may still grow, nor across a change of the rotary embedding."""
        deepest = self.request.max_length - self.prefix.length - 1
        for engine in self._engines:
            limit = engine.depth_limit(len(self.text) - 1)
            deepest = deepest if limit is None else min(deepest, limit)
        return max(0, deepest)

    @property
    def prices(self) -> str | None:
        """The prices that mode `auto` decides by: measured, flat, or the class of one's own."""
        return self.pricing.name if self.config.mode == "auto" else None

    @property
    def new_tokens(self) -> list[int]:
        return self.text[self.prompt_length :]
