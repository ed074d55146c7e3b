"""A sequence being continued, and the engines that it is computed in. The order in which its methods are called is that
of `step.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftgraph.choose import FinishReason, KeyedChooser, Outputs, Prefix, RejectionChooser, Walk, walk
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.budget import HitRate
from draftgraph.cost.prices import Pricing
from draftgraph.cost.reading import ALL
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.protocol import Engine, PassResult, Segment, common_prefix
from draftgraph.errors import DraftGraphError, UnsupportedModelError
from draftgraph.generation import Request
from draftgraph.kernels.threads import torch_alone
from draftgraph.noise import KeyedNoise
from draftgraph.proposers.copying import Past, SuffixProposer
from draftgraph.proposers.device_draft import DeviceDrafts
from draftgraph.proposers.device_heads import kind_for
from draftgraph.proposers.draft_model import DraftVocabulary, ModelProposer
from draftgraph.proposers.growth import Growing
from draftgraph.proposers.heads import head_proposer, reads_of
from draftgraph.proposers.policies import Guide, Hypotheses, Limits, Policy, Sources, policy_for, root_alone
from draftgraph.proposers.pooling import Calibration
from draftgraph.proposers.recycling import RecycleProposer
from draftgraph.proposers.text_draft import TextProposer
from draftgraph.proposers.translation import Translation
from draftgraph.stats import Observer, Stats, Step

MOST_DRAFTS = 8  # kinds of drafts on a device that are kept; those not asked for the longest time go


class Engines:
    """The engines of a target and its draft, and the drafts that grow on the device."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None = None,
        vocabulary: DraftVocabulary | None = None,
        inexact: str | None = None,  # why tokens of modes and batches may part: see `selfcheck.inexactness`
        translation: Translation | None = None,  # between target and draft, if their tokenizers differ
    ) -> None:
        self.target, self.draft, self.vocabulary, self.inexact = target, draft, vocabulary, inexact
        self.translation = translation
        self._device_drafts: dict[tuple[int, int, int], DeviceDrafts] = {}  # by what they were made for
        self.reads = () if draft is None else reads_of(draft.model)
        self.following: Any = None  # the pass that has set off ahead: see `ahead`
        if self.reads:
            target.read_states(self.reads)

    @property
    def all(self) -> list[Engine]:
        return [self.target, *([] if self.draft is None else [self.draft])]

    def refuse_inexact(self, config: GraphConfig) -> None:
        if config.exact and self.inexact is not None:
            name = type(unwrapped(self.target.model)).__name__
            raise UnsupportedModelError(f"{name} is not exact here, and exact=True asks for it: {self.inexact}")

    @property
    def goes_ahead(self) -> bool:
        """Whether a pass may set off before the one before it was read; states are, of every pass."""
        return self.target.goes_ahead and not self.reads

    @property
    def can_branch(self) -> bool:
        return all(engine.branching for engine in self.all)

    def threads(self) -> AbstractContextManager[None]:
        """In which a step runs: PyTorch's threads keep still beside our own."""
        return torch_alone() if all(engine.compiled for engine in self.all) else nullcontext()

    def device_drafts(self, config: GraphConfig) -> DeviceDrafts | None:
        """Who drafts for sequences of this configuration on the device; None: the draft is asked level by level."""
        on_device = config.mode in ("auto", "chain") and config.verification == "keyed"
        reads_tokens = self.translation is None  # of the target
        if self.draft is None or self.vocabulary is None or not reads_tokens or not on_device:
            return None
        kind: Any = DeviceDrafts if self.draft.captured or self.draft.compiled else None
        if self.reads:
            kind = kind_for(self.draft.model) if self.draft.captured and self.target.captured else None
        if kind is None or self.draft.ranks > 1:
            return None
        shape, left = kind.shape_for(config, self.draft.captured), [self.target.left] if self.reads else []
        drafts = self._device_drafts.pop(shape, None) or kind(self.draft, self.vocabulary, *shape, *left)
        self._device_drafts[shape] = drafts  # kept: recorded programs belong to them
        if len(self._device_drafts) > MOST_DRAFTS:
            del self._device_drafts[next(iter(self._device_drafts))]
        return drafts

    def proposer(self, config: GraphConfig, context: Any, ends: frozenset[int]) -> Any:
        """The draft model as a source of edges for one sequence."""
        if context is None or self.vocabulary is None:
            return None
        if self.translation is not None:
            return TextProposer(context, self.vocabulary, config, self.translation, ends)
        if (drafts := self.device_drafts(config)) is not None:
            return drafts.open(context, ends)
        proposer = head_proposer if self.reads else ModelProposer
        return proposer(context, self.vocabulary, config.k)

    def launch_drafts(self, sequences: Several[Sequence], room: int = ALL) -> None:
        """Drafts on the device set off together, as far as each of them is to go; each kind of them may read `room`
        tokens of what it has missed."""
        for drafts in self._device_drafts.values():
            drafts.launch([one.draft for one in sequences if one.draft is not None and one.draft.group is drafts], room)

    @property
    def draft_seconds(self) -> float:
        """That the last runs on the device took of the host's time, waiting for them included."""
        return sum(drafts.seconds for drafts in self._device_drafts.values())

    @property
    def draft_passes(self) -> list[int]:
        """Nodes of the last runs on the device, pass by pass."""
        return [nodes for drafts in self._device_drafts.values() for nodes in drafts.fed]


@dataclass
class Learnt:
    """What all sequences of a decoder learn about its draft."""

    hits: HitRate
    calibrations: dict[bool, Calibration]  # by whether text is sampled: noise makes other estimates
    observer: Observer | None = None


@dataclass(frozen=True)
class Unlearnt:
    """A step that nothing has been learnt from yet."""

    step: Step
    hypotheses: Hypotheses
    visited: list[int]
    result: PassResult | None  # whose ranking is remembered


class Sequence:
    """One text being continued."""

    def __init__(
        self,
        request: Request,
        seed: int,
        config: GraphConfig,
        *,
        row: int = 0,
        sample: int | None = None,  # which of several with one seed
        outputs: Outputs | None = None,
        tenant: str = "",  # whose it is
        reuse_key: str | None = None,  # it may begin with what others of this key left behind; None: the tenant's
        adapter: int = 0,  # of the target; see `Adapters`
        past: Past | None = None,  # answers that it may copy from
        guide: Guide | None = None,  # what its processors are going to do
        on_prompt: Callable[[Tensor], None] | None = None,  # is given the logits of the prompt, in pieces, once
    ) -> None:
        self.request, self.config, self.outputs = request, config, outputs or Outputs()
        self.tenant, self.reuse_key = tenant, tenant if reuse_key is None else reuse_key
        self.adapter, self.past, self.on_prompt = adapter, past, on_prompt
        self.guide = guide if config.verification == "keyed" else None  # a rejected draft changes what is chosen
        padding = 0 if request.attention_mask is None else int((request.attention_mask[row] == 0).sum())
        ids = request.input_ids[row : row + 1]
        self.max_length = request.max_length
        self.prefix = Prefix.of(ids, self.max_length, padding)
        self.text: list[int] = ids[0, padding:].tolist()
        self._stats = Stats()
        self.prompt_length = self._stats.prompt_tokens = len(self.text)
        sample = row % (request.config.num_return_sequences or 1) if sample is None else sample
        self.noise = KeyedNoise(seed, sample) if request.samples else None
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.admitted: float | None = None  # when it first had contexts
        self.overtaken = 0  # times that others were let in before it
        self.put_back = 0  # times that it gave up its place after it had been let in
        self.reused = 0  # tokens of the prompt that did not have to be read
        self._scored = 0  # tokens of the prompt whose logits `on_prompt` was given
        self.under_way = 0  # tokens that passes compute which have set off, and that are not text yet
        self.began = False  # its prompt has been read: it takes steps
        self.drafts_next = True  # it is to have a graph in the next step
        self.context: Any = None
        self.draft: Any = None
        self._unlearnt: Unlearnt | None = None

    def open(self, engines: Engines, learnt: Learnt, pricing: Pricing, contexts: list[Any]) -> None:
        """Takes contexts in the target's engine and in the draft's, where there is one."""
        engines.refuse_inexact(self.config)
        self.admitted = self.admitted or time.monotonic()
        self._stats.exact = engines.inexact is None
        if self.guide is not None:  # what it learns is of no use to others
            learnt = Learnt(HitRate(), {self.request.samples: Calibration()}, learnt.observer)
        self.engines, self.learnt, self.pricing = engines, learnt, pricing
        if not engines.can_branch:
            self.config = replace(self.config, k=1)
        self.context, *drafting = contexts
        ends = self.request.eos_ids
        self.draft = engines.proposer(self.config, drafting[0], ends) if drafting and self.config.drafts else None
        self.contexts: list[Any] = [self.context, *([] if self.draft is None else [self.draft.context])]
        self._share_states()
        self.chooser = self._chooser()
        self.sampling = self.chooser.sampling
        self.sources = self._sources()
        self.calibration = learnt.calibrations[self.request.samples]
        limits = Limits(self.config, ends, learnt.hits, self.calibration, self.guide)
        self.policy: Policy = policy_for(self.sources, limits)

    def _share_states(self) -> None:
        """A draft that reads the target's states is told of those of the prompt as it is read."""
        self.context.on_states = None
        if self.draft is not None and self.engines.reads:
            self.context.on_states = lambda states: self._note_states(len(self.context.text) - len(states), states)
            self.draft.context.tenant = json.dumps([self.reuse_key, self.text[: self.draft.shift]])  # it reads the rest

    def _note_states(self, position: int, states: Tensor | None, path: list[int] | None = None) -> None:
        if self.draft is not None and self.engines.reads and states is not None:
            self.draft.note(position, states, path)

    def _chooser(self) -> KeyedChooser | RejectionChooser:
        processors, temperature = self.request.processors, self.request.temperature
        if self.config.verification == "rejection" and self.noise is not None:
            drafted = {}
            if self.draft is not None:
                self.draft.keep_logits, drafted = True, self.draft.logits
            return RejectionChooser(processors, self.noise, temperature, drafted, self.outputs)
        return KeyedChooser(processors, self.noise, self.outputs)

    def _sources(self) -> Sources:
        """The draft guesses with the noise of the choice; a sequence without a draft copies in every mode."""
        config, perturb = self.config, self.chooser.perturb(self.request.temperature)
        if self.draft is not None:
            self.draft.perturb = perturb
        copied = SuffixProposer(config.k) if config.copies or (config.drafts and self.draft is None) else None
        if copied is not None:
            copied.past = self.past
        recycled = RecycleProposer(config.k, perturb) if config.mode == "auto" else None
        return Sources(self.draft, copied, recycled)

    # The prompt

    def read_prompt(self, reuse: bool = False) -> None:
        """All models read the text but for its last token, which is the first root; alone, without others."""
        self.under_way = 0
        chunk = self.request.config.prefill_chunk_size
        for context, text in zip(self.contexts, self._texts_read(), strict=True):
            context.begin(len(text), reuse)
            context.expected = self.max_length + self.config.nodes
            context.reserve(self.max_length + self.config.nodes)
            context.rewind(common_prefix(context.text, text[:-1]))
        if self.engines.reads and self.draft is not None:
            true = max(0, len(self.context.text) - self.draft.shift)
            self.draft.context.rewind(min(len(self.draft.context.text), true))
        self._read_states_again()
        self.context.prefill(self.text[len(self.context.text) : -1], chunk, self.text[-1])
        if self.draft is not None:
            self.draft.prefill(self.text, chunk)
        self.begin()
        self.plan_draft(self.cost())
        self.engines.launch_drafts([self])
        self.recall()

    def begin_with_known(self) -> None:
        """Begins with what the engines have of the text; the rest is read piece by piece."""
        reused = 0
        for context, text in zip(self.contexts, self._texts_read(), strict=True):
            context.expected = self.max_length + self.config.nodes
            context.begin(len(text), False)
            waits_for_states = context is not self.context and bool(self.engines.reads)
            if not self.scores_prompt and (context.reuses or not waits_for_states):
                known = context.begin_with(text[:-1], (text or self.text)[-1])
                reused = known if context is self.context else reused
        self._read_states_again()
        if not self.put_back:  # else it finds what it has read itself
            self.reused = min(reused, len(self.context.text))

    def _read_states_again(self) -> None:
        """Nobody keeps states: the target reads again what a draft that needs them has not read."""
        if self.draft is not None and self.engines.reads and not self.draft.has_states(len(self.context.text)):
            self.context.rewind(len(self.draft.context.text))

    def _texts_read(self) -> list[list[int]]:
        """What each model reads of the text, its first root included."""
        return [self.text, *([] if self.draft is None else [self.draft.text_read(self.text)])]

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target has not read, nor is about to."""
        return len(self.text) - 1 - len(self.context.text) - self.under_way

    @property
    def is_read(self) -> bool:
        return len(self.context.text) == len(self.text) - 1

    @property
    def draft_unread(self) -> int:
        """The same of the draft, which may also have missed some of the answer."""
        return 0 if self.draft is None else self.draft.unread(self.text)

    @property
    def scores_prompt(self) -> bool:
        return self.on_prompt is not None and self._scored < self.prompt_length - 1

    def piece(self, count: int) -> Segment:
        """The next tokens of the prompt, for the target."""
        start = len(self.context.text) + self.under_way
        return Segment.of_text(self.context, self.text[start : start + count], self.scores_prompt, ahead=self.under_way)

    def draft_piece(self, count: int) -> Segment:
        return self.draft.piece(self.text, count)  # type: ignore[no-any-return]

    def read(self, segment: Segment, result: PassResult) -> None:
        """A piece of the prompt is text now."""
        start = len(self.context.text)
        segment.commit()
        self.under_way -= len(segment.tokens)
        self._note_states(start, result.states)
        if self.scores_prompt and self.on_prompt is not None:  # some of it was scored already if it is read again
            unscored = result.logits[self._scored - start : self.prompt_length - 1 - start]
            self._scored += len(unscored)
            self.on_prompt(unscored)

    def begin(self) -> None:
        """The prompt has been read: it takes steps from now on."""
        self.began = True

    def close(self) -> None:
        """Gives its contexts back; what they hold may serve other sequences."""
        self.began, self.under_way = False, 0
        for context in self.contexts:
            context.close()

    # A step

    def cost(self) -> CostModel:
        """What passes cost behind a text of this length, for a sequence alone."""
        return self.pricing.at(len(self.text))

    def plan_draft(self, cost: CostModel | None) -> None:
        """Notes how far the draft goes in the next step under these prices; None: not at all."""
        if cost is not None:
            self.policy.plan(cost)
        self.policy.begin(self.text, 0 if cost is None else self._depth_limit())

    @property
    def is_ending(self) -> bool:
        """What is under way has its last token, at the latest."""
        return self.prefix.length + self.under_way >= self.max_length

    def proposes(self, drafts: bool) -> bool:
        """Whether its next step has more than the last token alone, if those who decide by the clock draft, or not."""
        return self.policy.proposes and (drafts or not self.decides_by_the_clock)

    def grow(self, cost: CostModel) -> Growing[Hypotheses]:
        """Grow, prune, merge and flatten: the unrolled view of the graph behind the last token."""
        return self.policy.grow(self.text, self._depth_limit(), cost)

    def root_alone(self) -> Hypotheses:
        return root_alone(self.text, self.policy.limits)

    def choose(self, hypotheses: Hypotheses, result: PassResult) -> Walk:
        """The path that the target agrees with, and the token that it adds."""
        chosen = walk(hypotheses.tree, result, self.chooser, self.prefix, self.request.criteria)
        if not self.request.may_be_invalid and not result.ranking.finite(chosen.visited):
            raise DraftGraphError("the target's logits are not finite: load it in another dtype, or check its weights")
        return chosen

    def commit(self, hypotheses: Hypotheses, result: PassResult, chosen: Walk) -> Step:
        """The accepted path becomes text in both caches; the rest is forgotten."""
        tree, accepted = hypotheses.tree, [0, *chosen.path]
        step = Step(len(self.text) - 1, hypotheses.graph, tree, chosen.path, chosen.tokens, chosen.finish_reason)
        self.context.commit(accepted, tree.tokens[accepted].tolist())
        self.under_way -= 1
        self.policy.commit(hypotheses, chosen.path)
        self._note_states(step.position, result.states, accepted)
        self.text.extend(chosen.tokens)
        self.finish_reason = chosen.finish_reason
        recycles = self.sources.recycled is not None and self.drafts_next
        if recycles:
            _ = result.ranking  # read before the next pass overwrites it
        self._unlearnt = Unlearnt(step, hypotheses, chosen.visited, result if recycles else None)
        return step

    def remember(self) -> None:
        """What the target said at the nodes of the last step; then the memories begin the next, if it is drafted."""
        if self.finish_reason is not None or self._unlearnt is None:
            return
        step, result = self._unlearnt.step, self._unlearnt.result
        if self.sources.recycled is not None and result is not None:
            self.sources.recycled.learn(self.text, step.position, step.tree, step.path, result.ranking)
        if self.drafts_next:
            self.recall()

    def recall(self) -> None:
        """The memories begin the next step."""
        self.policy.recall(self.text, self._depth_limit())

    def learn(self) -> None:
        """What the last step was, and how well it had been foretold: can wait until the target works on the next."""
        if self._unlearnt is None:
            return
        unlearnt, self._unlearnt = self._unlearnt, None
        step, hypotheses = unlearnt.step, unlearnt.hypotheses
        if hypotheses.proposed is not None:
            told = hypotheses.graph, hypotheses.tree, unlearnt.visited, step.tokens
            hypotheses.proposed.settle(self.calibration, *told)
            self.calibration.learn()
        if self.noise is not None:
            self.noise.forget_before(len(self.text))
        self._stats.count(step)
        if self.draft is not None:
            self._stats.draft_passes, self._stats.draft_tokens = self.draft.passes, self.draft.tokens_fed
            self.learnt.hits.count(step)
        if self.learnt.observer is not None:
            self.learnt.observer(step)

    def restart(self) -> None:
        """The step that was begun is not taken: it is begun anew."""
        self.under_way = 0
        for context in self.contexts:
            context.forget(0)
        if self.began:
            self.learn()
            self.plan_draft(self.cost() if self.drafts_next else None)
            self.recall()

    def _depth_limit(self) -> int:
        """No deeper than the text may still grow, nor across a change of the rotary embedding."""
        deepest = self.max_length - self.prefix.length - 1
        limits = [self.context.depth_limit(len(self.text) - 1)]
        limits += [] if self.draft is None else [self.draft.depth_limit(self.text)]
        for limit in limits:
            deepest = deepest if limit is None else min(deepest, limit)
        return max(0, deepest)

    # What there is to see

    @property
    def stats(self) -> Stats:
        """The figures of all steps so far."""
        self.learn()
        return self._stats

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of all steps went."""
        return self._stats.seconds

    @property
    def new_tokens(self) -> list[int]:
        return self.text[self.prompt_length :]

    @property
    def done(self) -> bool:
        return self.failure is not None or self.finish_reason is not None

    @property
    def decides_by_the_clock(self) -> bool:
        """Whether it drafts only where that has paid, beside others."""
        return self.config.mode == "auto" and self.pricing.in_seconds

    @property
    def prices(self) -> str | None:
        """The prices that mode `auto` decides by: measured, flat, or the class of one's own."""
        return self.pricing.name if self.config.mode == "auto" else None


@torch.no_grad()
def forget_all(sequences: Several[Sequence]) -> None:
    """What engines hold of these sequences cannot be trusted: a step was interrupted."""
    for sequence in sequences:
        sequence.under_way = 0
        for context in sequence.contexts:
            context.rewind(0)
