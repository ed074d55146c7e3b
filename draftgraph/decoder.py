"""The front door: a target, a draft, and one text after another; what a step does stands in `step`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.cost.budget import FlatCost, HitRate
from draftgraph.cost.latency import Latencies
from draftgraph.cost.measure import SECONDS, Levels, Passes, measure
from draftgraph.cost.prices import Key, Pricing, key_of, pricing_for
from draftgraph.cost.sharing import Experience
from draftgraph.engine.borrowing import Loan, unwrapped
from draftgraph.engine.selfcheck import engine_for, inexactness, precise, precision
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.generation import Request, apart, context_window, prepare, row_arguments, setting, unpadded_rows
from draftgraph.proposers.draft_model import DraftVocabulary
from draftgraph.proposers.pooling import Calibration
from draftgraph.proposers.translation import Translation
from draftgraph.sequence import Engines, Learnt, Sequence, forget_all
from draftgraph.stats import Observer, Stats, Step
from draftgraph.step import step


@dataclass
class Alone:
    """The contexts for one text at a time, and the decoding that has them."""

    contexts: list[Any]
    holder: Decoding | None = None


class Decoding(Sequence):
    """A text that is continued alone: iterate over it for the tokens of each step."""

    def __init__(self, request: Request, seed: int, config: GraphConfig, **options: Any) -> None:
        super().__init__(request, seed, config, **options)
        self.loan: Loan
        self.alone: Alone
        self.experience: Experience

    def __iter__(self) -> Iterator[list[int]]:
        """The tokens of every step, until a stop condition holds."""
        return (one.tokens for one in self.steps())

    def steps(self) -> Iterator[Step]:
        while self.finish_reason is None:
            yield self.step()

    def step(self) -> Step:
        """Draft a graph, check it in one pass, keep the longest path that the target agrees with."""
        if self.alone.holder is not self:  # two texts cannot share one cache: the one started last has it
            raise DraftGraphError(
                "another text was started with this decoder, or a step of this one was interrupted: start it again, "
                "and finish one before the next"
            )
        try:
            with self.loan:
                self.pricing.follow(self._stats, self.cost())
                taken = step([self], [], self.engines, self.experience)
            if self.failure is not None:
                raise self.failure
        except BaseException:  # interrupted between draft and commit: what is left of the step is not known
            forget_all([self])
            self.alone.holder = None
            raise
        found = taken.steps[0][1]
        assert found is not None
        return found


class GraphDecoder:
    """Decodes a `transformers` model with a token graph; the tokens are those of plain decoding.

    Args:
        target_model: A decoder-only model; it is left as it was after every call.
        draft_model: A smaller model, best with the same tokenizer; None: the text alone proposes.
        config: What to draft; mode `auto` if left out.
        observer: Is called with every step.
        tokenizers: Those of target and draft, if they are not the same: drafts go through text then.

    Examples:
        >>> decoder = GraphDecoder(pair.target, pair.draft, config=GraphConfig(mode="graph"))
        >>> prompt = pair.tokenizer("The days of the week are Monday,", return_tensors="pt").input_ids
        >>> result = decoder.generate(prompt, max_new_tokens=16, do_sample=False)
        >>> result.sequences.shape[1] - prompt.shape[1], result.stats.new_tokens
        (16, 16)
    """

    def __init__(
        self,
        target_model: Any,
        draft_model: Any = None,
        config: GraphConfig | None = None,
        observer: Observer | None = None,
        tokenizers: tuple[Any, Any] | None = None,
    ) -> None:
        self.target_model, self.draft_model = target_model, draft_model
        self.translation = None if tokenizers is None else Translation(*tokenizers, self.vocabulary_size)
        self.config = GraphConfig() if config is None else config
        self.models = [target_model, *([] if draft_model is None else [draft_model])]
        self.engines = self.make_engines()
        self.learnt = Learnt(HitRate(), {samples: Calibration() for samples in (False, True)}, observer)
        self.experience = Experience()
        self.target_weights = weights_read(target_model)
        share = 0.0 if draft_model is None else weights_read(draft_model) / self.target_weights
        self.flat_cost = FlatCost.for_device(self.engines.target.device, share)
        self._alone = Alone([engine.open() for engine in self.engines.all])
        for engine in self.engines.all:
            if not engine.branching:
                name = type(unwrapped(engine.model)).__name__
                warnings.warn(f"{name} cannot take a token tree: it is decoded with chains", stacklevel=2)
        self.engines.refuse_inexact(self.config)
        if self.engines.inexact is not None and not precise(precision(target_model)):
            name = type(unwrapped(target_model)).__name__
            reason = f"answers of {name} may part from those of plain decoding at ties: {self.engines.inexact}"
            warnings.warn(reason, stacklevel=2)

    @property
    def observer(self) -> Observer | None:
        return self.learnt.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.learnt.observer = observer

    def make_engines(self, slots: int | None = None) -> Engines:
        """Engines for this pair; `slots`: the bound of each pool; None: it grows."""
        draft, vocabulary = None, None
        if self.draft_model is not None:
            draft = engine_for(self.draft_model, slots)
            size = self.vocabulary_size if self.translation is None else tokens_written(self.draft_model)
            vocabulary = DraftVocabulary(self.draft_model, size)
        target = engine_for(self.target_model, slots)
        return Engines(target, draft, vocabulary, inexactness(self.target_model), self.translation)

    @property
    def vocabulary_size(self) -> int:
        return tokens_written(self.target_model)

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

        Args:
            input_ids: Token ids, one row or several.
            attention_mask: As in `generate`: 0 where a row is padded.
            seed: Sampled text depends on it, the prompt and the arguments, and on nothing else.
            streamer: A streamer of `transformers`, for one row.
            tokenizer: Needed for `stop_strings`.
            logprobs: Whether to return the log-probabilities of the new tokens.
            config: For this call, instead of the decoder's own.
            **arguments: Those of `generate`: `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`,
                `repetition_penalty`, `logits_processor`, `stopping_criteria`, ...
        """
        model = unwrapped(self.target_model)
        names = ("pad_token_id", "eos_token_id", "num_return_sequences")
        pad, eos, samples = (setting(name, model, arguments) for name in names)
        rows = unpadded_rows(input_ids, attention_mask, pad, eos)
        width = torch.as_tensor(input_ids).shape[-1]
        if streamer is not None and len(rows) * (samples or 1) > 1:
            raise UsageError("streamer works with one text at a time: pass one row, and ask for one sequence")
        seed = fresh_seed() if seed is None else seed
        decodings: list[Decoding] = []
        for index, ids in enumerate(rows):
            given = row_arguments(model, arguments, index, len(rows), width - ids.shape[1])
            request = prepare(self.target_model, self._checked(ids), tokenizer, **given)
            for row in range(len(request.input_ids)):
                decoding = self.start(request, row, seed, logprobs=logprobs, config=config)
                stream(decoding, streamer)
                decodings.append(decoding)
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
        wanted, config = request.config, config or self.config
        detailed = bool(wanted.return_dict_in_generate)
        outputs = Outputs(bool(wanted.output_scores) and detailed, bool(wanted.output_logits) and detailed, logprobs)
        request = apart(request, row, unwrapped(self.target_model))
        self._alone.holder = None
        pricing = self.pricing(config, self.engines)
        decoding = Decoding(request, seed, config, row=row, outputs=outputs)
        decoding.loan, decoding.alone, decoding.experience = Loan(*self.models), self._alone, self.experience
        with decoding.loan, decoding._stats.clock("prefill"):
            decoding.open(self.engines, self.learnt, pricing, self._alone.contexts)
            decoding.read_prompt(reuse_cache)
            for engine in self.engines.all:  # else the first step would seem to have taken that
                engine.wait()
        self._alone.holder = decoding
        return decoding

    def pricing(self, config: GraphConfig, engines: Engines) -> Pricing:
        """What requests of this configuration decide by, measured if it has to be."""
        key, measured = (lambda: self.cost_key(engines)), (lambda: self.measure(config, engines))
        return pricing_for(config, self.flat_cost, self.target_weights, key, measured)

    def cost_key(self, engines: Engines) -> Key:
        pairs = list(zip(self.models, engines.all, strict=True))
        key = key_of(pairs[0], pairs[1] if len(pairs) > 1 else None)
        return key if self.translation is None else key | {"through_text": True}

    def measure(self, config: GraphConfig, engines: Engines, seconds: float = SECONDS) -> Latencies:
        """Times passes of both models in their engines."""
        windows = [window for model in self.models if (window := context_window(model)) is not None]
        contexts = [engine.open() for engine in engines.all]
        rows = len(self.target_model.get_input_embeddings().weight)
        subjects = [Passes(engines.target, contexts[0], rows)]
        if engines.draft is not None and engines.vocabulary is not None:
            told = engines.draft, contexts[1], engines.vocabulary.readable
            if engines.device_drafts(config) is None:
                subjects.append(Passes(*told, engines.vocabulary, config.k))
            else:
                subjects.append(Levels(*told, draft=engines.proposer(config, contexts[1], frozenset())))
        try:
            with Loan(*self.models):
                return measure(subjects, min(windows, default=None), config.nodes, seconds)
        finally:
            for context in contexts:
                context.rewind(0)
                context.close()

    def _checked(self, ids: Tensor) -> Tensor:
        rows = self.target_model.get_input_embeddings().weight.shape[0]
        worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        if not 0 <= worst < rows:
            raise UsageError(f"token id {worst} is not in the target's vocabulary of {rows}: check the tokenizer")
        return ids.to(self.engines.target.device)


@dataclass
class GraphOutput:
    """What `GraphDecoder.generate` returns.

    Attributes:
        sequences: As `transformers` returns them, the prompt included: [rows, length], right-padded.
        stats: Figures of all rows together.
        finish_reasons: `stop` or `length`, by row.
        new_token_ids: Without the prompt and padding, by row.
        logprobs: Of the new tokens, under the target's raw logits, where asked for.
        scores: As in `generate`, where asked for by `output_scores`.
        logits: As in `generate`, where asked for by `output_logits`.
    """

    sequences: Tensor  # [rows, length]
    stats: Stats
    finish_reasons: list[str]
    new_token_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


def gathered(decodings: list[Any], prompts: Tensor) -> GraphOutput:
    """Rows as `generate` returns them: prompts as given, then the new tokens, padded to one length."""
    prompts = prompts[None] if prompts.dim() == 1 else prompts
    prompts = prompts.repeat_interleave(len(decodings) // len(prompts), dim=0)
    longest = max(len(decoding.new_tokens) for decoding in decodings)
    sequences = prompts.new_full((len(decodings), prompts.shape[1] + longest), decodings[0].request.pad_id)
    sequences[:, : prompts.shape[1]] = prompts
    for row, decoding in enumerate(decodings):
        new = torch.tensor(decoding.new_tokens)
        sequences[row, prompts.shape[1] : prompts.shape[1] + len(new)] = new
    outputs = [decoding.outputs for decoding in decodings]
    stats = decodings[0].stats
    for decoding in decodings[1:]:
        stats = stats + decoding.stats
    return GraphOutput(
        sequences,
        stats,
        [decoding.finish_reason or "length" for decoding in decodings],
        [decoding.new_tokens for decoding in decodings],
        [kept.logprobs for kept in outputs] if outputs[0].keep_logprobs else None,
        by_step([kept.scores for kept in outputs]) if outputs[0].keep_scores else None,
        by_step([kept.logits for kept in outputs]) if outputs[0].keep_logits else None,
    )


def by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor [rows, vocabulary] per step, as `generate` has them; rows that ended early repeat their last."""
    longest = max(len(row) for row in rows)
    return tuple(torch.cat([row[min(step, len(row) - 1)] for row in rows]) for step in range(longest))


def stream(decoding: Decoding, streamer: Any = None) -> None:
    """Decodes to the end, and hands the prompt and every token to a streamer, if there is one."""
    if streamer is not None:
        streamer.put(decoding.prefix.view.cpu())
    for tokens in decoding:
        for token in tokens if streamer is not None else ():
            streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()


def tokens_written(model: Any) -> int:
    """How many tokens a model tells apart."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    size = model.config.get_text_config(decoder=True).vocab_size
    return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else int(size)


def weights_read(model: Any) -> int:
    """How many weights a pass over one token reads: all but the embedding, unless it is the output matrix too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = {id(part.weight) for part in (embedding, head) if hasattr(part, "weight")}
    layers = sum(int(weight.numel()) for weight in model.parameters() if id(weight) not in apart)
    return layers + int((head if hasattr(head, "weight") else embedding).weight.numel())


def fresh_seed() -> int:
    """From torch's generator, so that `torch.manual_seed` makes a run repeatable."""
    return int(torch.randint(0, 2**62, ()).item())
