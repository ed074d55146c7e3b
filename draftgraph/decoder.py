"""The loop: grow, prune and merge, flatten, verify, commit; one code path for every mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.choose import FinishReason, KeyedChooser, Outputs, Prefix, RejectionChooser, Scored, Walk, walk
from draftgraph.config import GraphConfig
from draftgraph.cost import DraftBudget, FlatCost, HitRate, levels_ahead, nodes_worth_checking
from draftgraph.drafting import Proposer, grow
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import WIDTH, DeviceDraft
from draftgraph.drafting.model import DraftVocabulary, ModelProposer
from draftgraph.drafting.pool import Pool
from draftgraph.drafting.recycle import RecycleProposer
from draftgraph.drafting.sheet import Sheet
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.engine.loan import Loan, unwrapped
from draftgraph.engine.runner import Engine, common_prefix
from draftgraph.engine.selfcheck import checked_engine
from draftgraph.engine.static import StaticEngine
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.fields import setting
from draftgraph.generation import Request, prepare, unpadded_rows
from draftgraph.graph import TokenGraph, TokenTree
from draftgraph.noise import KeyedNoise
from draftgraph.output import GraphOutput, gathered
from draftgraph.rows import apart, row_arguments
from draftgraph.stats import Stats
from draftgraph.trace import Observer, Step
from draftgraph.tuning import pricing_of


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
        reuse_cache: bool = False,
    ) -> None:
        self.decoder = decoder
        self.loan = Loan(*decoder.models)
        self.request = request
        self.stats = Stats()
        self.outputs = outputs
        self.target = decoder.target_engine
        padding = 0 if request.attention_mask is None else int((request.attention_mask[row] == 0).sum())
        ids = request.input_ids[row : row + 1]
        self.prefix = Prefix.of(ids, request.max_length, padding)
        self.text: list[int] = ids[0, padding:].tolist()
        self.prompt_length = self.stats.prompt_tokens = len(self.text)
        self.finish_reason: FinishReason | None = None
        self.graph = TokenGraph(self.text[-1], config)
        self.config = config if decoder.can_branch else replace(config, k=1)
        self.pricing = pricing_of(decoder, self.config)

        sample = row % (request.config.num_return_sequences or 1)
        self.noise = KeyedNoise(seed, sample) if request.samples else None
        self.draft = decoder.draft_proposer(self.config, request.eos_ids) if config.drafts else None
        self.chooser = self._chooser()
        self.memories: list[Proposer] = []
        if config.copies or (config.drafts and self.draft is None):
            self.copied = SuffixProposer(self.config.k)
            self.memories.append(self.copied)
        self.recycled = None
        if config.mode == "auto":
            self.recycled = RecycleProposer(self.config.k, self.chooser.perturb(request.temperature))
            self.memories.append(self.recycled)
        if self.draft is not None:
            self.draft.perturb = self.chooser.perturb(request.temperature)
        self.proposers = [*self.memories, *([self.draft] if self.draft else [])]
        self.pool = Pool(self.config.k, decoder.calibrations[request.samples])
        self.sheet = self._sheet()
        self.cost = self.pricing.at(len(self.text), self.stats)
        self._prefill(reuse_cache)

    def _chooser(self) -> KeyedChooser | RejectionChooser:
        processors, temperature = self.request.processors, self.request.temperature
        if self.config.verification == "rejection" and self.noise is not None:
            drafted = {}
            if isinstance(self.draft, ModelProposer):
                self.draft.keep_logits, drafted = True, self.draft.logits
            return RejectionChooser(processors, self.noise, temperature, drafted, self.outputs)
        return KeyedChooser(processors, self.noise, self.outputs)

    def _sheet(self) -> Sheet | None:
        """Where a draft hands over all its levels at once."""
        if self.recycled is None or not isinstance(self.draft, DeviceDraft):
            return None
        return Sheet(self.copied, self.recycled, self.pool.calibration, self.config)

    def _prefill(self, reuse_cache: bool) -> None:
        """Both models read the text but for its last token, which is the first root."""
        chunk = self.request.config.prefill_chunk_size
        engines = [self.target, *([self.draft.engine] if self.draft else [])]
        with self.loan, self.stats.clock("prefill"):
            for engine in engines:
                engine.begin(len(self.text), reuse_cache)
                engine.reserve(self.request.max_length + self.config.nodes)
            self.target.rewind(common_prefix(self.target.text, self.text[:-1]))
            self.target.prefill(self.text[len(self.target.text) : -1], chunk, self.text[-1])
            if self.draft is not None:
                self.draft.catch_up(self.text, chunk)
            self.begin(self.proposers)

    def begin(self, proposers: Sequence[Proposer]) -> None:
        """The next step starts at the end of the text. A draft on a device of its own sets off at once."""
        if isinstance(self.draft, DeviceDraft) and self.draft in proposers:
            self.draft.levels = self._levels_ahead(self.draft.width)
        for proposer in proposers:
            proposer.begin(self.text)
        if self.sheet is not None and self.copied in proposers:
            self.sheet.begin(self.text, self._depth_limit(), self.request.eos_ids)

    def _levels_ahead(self, width: int) -> int:
        depth = min(self.config.levels, self._depth_limit())
        if self.config.mode != "auto":
            return depth
        return levels_ahead(self.cost, depth, width, self.decoder.hits.rate, self.config.nodes)

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
            with self.stats.clock("draft"):
                tree = self.grow()
            with self.stats.clock("verify"):
                scored = self.verify(tree)
            with self.stats.clock("other"):
                chosen = self.walk(tree, scored)
                return self.commit(tree, scored, chosen)

    def grow(self) -> TokenTree:
        """Grow, prune, merge and flatten: the unrolled view of the graph behind the last token."""
        if self.sheet is not None:
            return self._grow_at_once(self.sheet)
        graph = self.graph = TokenGraph(self.text[-1], self.config, self._depth_limit(), self.request.eos_ids)
        if self.config.mode != "auto":
            return grow(graph, self.proposers)
        cost = self.cost = self.pricing.at(len(self.text), self.stats)
        budget = DraftBudget(cost, graph.max_depth, self.decoder.hits.rate, graph.max_nodes) if self.draft else None
        self.pool.begin()
        tree = grow(graph, self.proposers, cost.floor(), budget, self.pool)
        return tree.first(nodes_worth_checking(tree, cost, budget.spent if budget else 0.0))

    def _grow_at_once(self, sheet: Sheet) -> TokenTree:
        assert isinstance(self.draft, DeviceDraft)
        cost = self.cost = self.pricing.at(len(self.text), self.stats)
        spent = self.draft.levels * float(cost.of_level(np.array([self.draft.width]))[0])
        if (drafted := self.draft.drafted()) is not None:
            sheet.add(drafted)
        tree = sheet.tree(cost.floor())
        return tree.first(nodes_worth_checking(tree, cost, spent))

    def verify(self, tree: TokenTree) -> Scored:
        """What the target says at every node, in one pass."""
        logits = self.target.forward(tree.tokens, tree.depths, tree.mask)
        ranked = self.target.ranks or self.recycled is not None
        return Scored(logits, self.target.rank(logits) if ranked else None)

    def walk(self, tree: TokenTree, scored: Scored) -> Walk:
        """The path that the target agrees with, and the token that it adds."""
        chosen = walk(tree, scored, self.chooser, self.prefix, self.request.criteria)
        if not self.request.may_be_invalid and not scored.finite(chosen.visited):
            raise DraftGraphError("the target's logits are not finite: load it in another dtype, or check its weights")
        return chosen

    def commit(self, tree: TokenTree, scored: Scored, chosen: Walk) -> Step:
        """The accepted path becomes text in both caches; the rest is forgotten."""
        accepted = [0, *chosen.path]
        position = len(self.text) - 1
        self.target.commit(accepted, tree.tokens[accepted].tolist())
        if self.draft is not None:
            self.draft.commit(tree, chosen.path, self.graph)
        self.text.extend(chosen.tokens)
        self.finish_reason = chosen.finish_reason
        if self.draft is not None and self.finish_reason is None:
            self.begin([self.draft])
        graph = self.graph if self.sheet is None else self.sheet.graph()
        step = Step(position, graph, tree, chosen.path, chosen.tokens, chosen.finish_reason)
        self.learn(step, scored, chosen)
        self.begin(self.memories)
        return step

    def learn(self, step: Step, scored: Scored, chosen: Walk) -> None:
        """Keeps what the target said, also at rejected nodes, and how well it had been foretold."""
        if self.recycled is not None and scored.ranking is not None:
            self.recycled.learn(step.tree, chosen.path, scored.ranking)
            if self.sheet is not None:
                self.sheet.settle(chosen.visited, chosen.tokens)
            else:
                self.pool.settle(step.graph, step.tree, chosen.visited, chosen.tokens)
        for memory in self.memories:
            memory.commit(step.tree, chosen.path, step.graph)
        if self.noise is not None:
            self.noise.forget_before(len(self.text))
        self.stats.count(step)
        if self.draft is not None:
            self.stats.draft_passes, self.stats.draft_tokens = self.draft.passes, self.draft.tokens_fed
            self.decoder.hits.count(step)
        if self.decoder.observer is not None:
            self.decoder.observer(step)

    def _depth_limit(self) -> int:
        """No deeper than the text may still grow, nor across a change of the rotary embedding."""
        engines: list[Engine] = [self.target, *([self.draft.engine] if self.draft else [])]
        limits = [engine.depth_limit(len(self.text) - 1) for engine in engines]
        remaining = self.request.max_length - self.prefix.length - 1
        return max(0, min([remaining, *(limit for limit in limits if limit is not None)]))

    @property
    def prices(self) -> str | None:
        """The prices that mode `auto` decides by: measured, flat, or the class of one's own."""
        return self.pricing.name if self.config.mode == "auto" else None

    @property
    def new_tokens(self) -> list[int]:
        return self.text[self.prompt_length :]


@dataclass(eq=False, repr=False)
class GraphDecoder:
    """Decodes a `transformers` model with a token graph; the tokens are those of plain decoding.

    >>> decoder = GraphDecoder(target_model, draft_model)          # doctest: +SKIP
    >>> decoder.generate(input_ids, max_new_tokens=64).sequences   # doctest: +SKIP
    """

    target_model: Any
    draft_model: Any = None
    config: GraphConfig = field(default_factory=GraphConfig)
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self.target_engine: Engine = checked_engine(self.target_model)
        self.draft_engine: Engine | None = None
        models = [self.target_model]
        if self.draft_model is not None:
            self.draft_engine = checked_engine(self.draft_model)
            self.draft_vocabulary = DraftVocabulary(self.draft_model, self.vocabulary_size)
            models.append(self.draft_model)
        self.target_weights = weights_read(self.target_model)
        share = weights_read(self.draft_model) / self.target_weights if self.draft_model is not None else 0
        self.flat_cost = FlatCost.for_device(self.target_engine.device, share)
        self.hits = HitRate()
        self.models = models
        self.calibrations = {samples: Calibration() for samples in (False, True)}  # noise makes other estimates
        self._running: Decoding | None = None
        self._device_drafts: dict[tuple[int, int], DeviceDraft] = {}
        for model, engine in zip(models, (self.target_engine, self.draft_engine), strict=False):
            if engine is not None and not engine.branching:
                name = type(unwrapped(model)).__name__
                warnings.warn(f"{name} cannot take a token tree: it is decoded with chains", stacklevel=3)

    @property
    def can_branch(self) -> bool:
        return self.target_engine.branching and (self.draft_engine is None or self.draft_engine.branching)

    def draft_proposer(self, config: GraphConfig, ends: frozenset[int]) -> ModelProposer | DeviceDraft | None:
        """The draft model as a source of edges, if there is one."""
        engine = self.draft_engine
        if engine is None:
            return None
        on_device = config.mode in ("auto", "chain") and config.verification == "keyed"
        if not on_device or not isinstance(engine, StaticEngine):
            return ModelProposer(engine, self.draft_vocabulary, config.k)
        shape = (config.k, 1 if config.mode == "chain" else WIDTH)
        if shape not in self._device_drafts:  # kept: recorded programs belong to them
            self._device_drafts[shape] = DeviceDraft(engine, self.draft_vocabulary, *shape)
        draft = self._device_drafts[shape]
        draft.begin_text(ends)
        return draft

    @property
    def vocabulary_size(self) -> int:
        head = self.target_model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        size = self.target_model.config.get_text_config(decoder=True).vocab_size
        return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else int(size)

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        logprobs: bool = False,
        config: GraphConfig | None = None,
        **arguments: Any,
    ) -> GraphOutput:
        """Continues every row as `target.generate(input_ids, **arguments)` would, in fewer target passes.

        Takes `generate`'s arguments (`max_new_tokens`, `do_sample`, `temperature`, `logits_processor`, ...), and a
        `seed`: sampled text depends on it, the prompt and the arguments, and on nothing else.
        """
        model = unwrapped(self.target_model)
        names = ("pad_token_id", "eos_token_id", "num_return_sequences")
        pad, eos, samples = (setting(name, model, arguments) for name in names)
        rows = unpadded_rows(input_ids, attention_mask, pad, eos)
        width = torch.as_tensor(input_ids).shape[-1]
        if streamer is not None and len(rows) * (samples or 1) > 1:
            raise UsageError("streamer works with one text at a time: pass one row, and ask for one sequence")
        if streamer is not None:
            streamer.put(rows[0].cpu())
        seed = fresh_seed() if seed is None else seed
        decodings: list[Decoding] = []
        for index, ids in enumerate(rows):
            given = row_arguments(model, arguments, index, len(rows), width - ids.shape[1])
            request = prepare(self.target_model, self._checked(ids), tokenizer, **given)
            for row in range(len(request.input_ids)):
                decoding = self.start(request, row, seed, logprobs=logprobs, config=config)
                for tokens in decoding:
                    if streamer is not None:
                        for token in tokens:
                            streamer.put(torch.tensor([token]))
                decodings.append(decoding)
        if streamer is not None:
            streamer.end()
        return gathered(decodings, torch.as_tensor(input_ids))

    def start(
        self,
        request: Request,
        row: int = 0,
        seed: int = 0,
        *,
        logprobs: bool = False,
        config: GraphConfig | None = None,
        reuse_cache: bool = False,
    ) -> Decoding:
        """A decoding of one row of a prepared request: iterate over it for the tokens of each step."""
        wanted = request.config
        detailed = bool(wanted.return_dict_in_generate)
        outputs = Outputs(bool(wanted.output_scores) and detailed, bool(wanted.output_logits) and detailed, logprobs)
        self._running = None
        request = apart(request, row, unwrapped(self.target_model))
        decoding = Decoding(self, request, row, seed, outputs, config or self.config, reuse_cache)
        self._running = decoding
        return decoding

    @contextmanager
    def nothing_half_done(self) -> Iterator[None]:
        """Interrupted between draft and commit, the engines forget the text: what they hold cannot be trusted."""
        try:
            yield
        except BaseException:
            for engine in (self.target_engine, self.draft_engine):
                if engine is not None:
                    engine.rewind(0)
            raise

    def claim(self, decoding: Decoding) -> None:
        """Two texts cannot share one cache: the one started last has it."""
        if self._running is not decoding:
            raise DraftGraphError("another text was started with this decoder: finish one before the next")

    def _checked(self, ids: Tensor) -> Tensor:
        rows = self.target_model.get_input_embeddings().weight.shape[0]
        worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        if not 0 <= worst < rows:
            raise UsageError(f"token id {worst} is not in the target's vocabulary of {rows}: check the tokenizer")
        return ids.to(self.target_engine.device)


def weights_read(model: Any) -> int:
    """How many weights a pass over one token reads: all but the embedding, unless it is the output matrix too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = {id(part.weight) for part in (embedding, head) if hasattr(part, "weight")}
    layers = sum(int(weight.numel()) for weight in model.parameters() if id(weight) not in apart)
    return layers + int((head if hasattr(head, "weight") else embedding).weight.numel())


def fresh_seed() -> int:
    """From torch's generator, so that `torch.manual_seed` makes a run repeatable."""
    return int(torch.randint(0, 2**62, ()).item())
