"""The front door: a target, a draft, and one text after another; what a step does stands in `decoding`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.cost import FlatCost, HitRate
from draftgraph.decoding import Decoding
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import WIDTH, DeviceDraft
from draftgraph.drafting.device_batch import BatchDraft, SeatDraft
from draftgraph.drafting.model import DraftVocabulary, ModelProposer
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.runner import Engine
from draftgraph.engine.selfcheck import checked_engine
from draftgraph.engine.static import StaticEngine
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.fields import setting
from draftgraph.generation import Request, prepare, unpadded_rows
from draftgraph.output import GraphOutput, gathered
from draftgraph.rows import apart, row_arguments
from draftgraph.trace import Observer


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
        self.kept_batch: Any = None  # of recorded passes over many texts, for the next ones
        self._running: Decoding | None = None
        self._device_drafts: dict[tuple[int, int], DeviceDraft] = {}
        self._batch_draft: BatchDraft | None = None
        for model, engine in zip(models, (self.target_engine, self.draft_engine), strict=False):
            if engine is not None and not engine.branching:
                name = type(unwrapped(model)).__name__
                warnings.warn(f"{name} cannot take a token tree: it is decoded with chains", stacklevel=3)

    @property
    def can_branch(self) -> bool:
        return self.target_engine.branching and (self.draft_engine is None or self.draft_engine.branching)

    def draft_proposer(
        self, config: GraphConfig, ends: frozenset[int]
    ) -> ModelProposer | DeviceDraft | SeatDraft | None:
        """The draft model as a source of edges, if there is one."""
        engine = self.draft_engine
        if engine is None:
            return None
        if self._batch_draft is not None:
            return self._batch_draft.open(engine, ends)
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
        decoding = self.begun(request, row, seed, outputs, config or self.config)
        decoding.prefill(reuse_cache)
        self._running = decoding
        return decoding

    def begun(
        self, request: Request, row: int, seed: int, outputs: Outputs, config: GraphConfig, sample: int | None = None
    ) -> Decoding:
        """The same of a text that nobody has read yet; `sample`: which of several with one seed."""
        return Decoding(self, apart(request, row, unwrapped(self.target_model)), row, seed, outputs, config, sample)

    def seated(self, target: Engine, draft: Engine | None, together: BatchDraft | None = None) -> GraphDecoder:
        """The same pair, with the engines of one text among many, and who drafts for all of them; what is learnt is
        learnt for all."""
        other = copy.copy(self)
        other.target_engine, other.draft_engine, other._batch_draft = target, draft, together
        other._running, other._device_drafts = None, {}
        return other

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
