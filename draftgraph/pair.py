"""A target, its draft and their tokenizer: prompts in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from draftgraph.batching.batch import continue_all
from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.decoder import Decoding, GraphDecoder, fresh_seed, stream
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.following import shared, shared_pieces
from draftgraph.errors import UsageError
from draftgraph.generation import Request, context_window, prepare, row_arguments
from draftgraph.models import load_model, other_tokens
from draftgraph.models.draft import is_draft_folder, load_draft
from draftgraph.models.fetch import DEFAULT_DRAFT
from draftgraph.notices import notice
from draftgraph.proposers.translation import refuse_slow
from draftgraph.sequence import Sequence
from draftgraph.stats import Stats
from draftgraph.text import Messages, TextStream, decode, encode

if TYPE_CHECKING:
    from draftgraph.inspect import GraphReport

NEW_TOKENS = 256


@dataclass
class Output:
    """An answer.

    Attributes:
        text: Without special tokens.
        token_ids: New tokens only, a final end token included.
        finish_reason: `stop` or `length`.
        stats: What was drafted, checked and accepted, and where the time went.
        logprobs: Of the new tokens, where `logprobs=True` was given.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        shown = {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        return shown | {"stats": self.stats.to_dict()}


@dataclass
class Pair:
    """A target, its draft and their tokenizer, made by `draftgraph.load`.

    Attributes:
        target: The model whose tokens are the answer.
        draft: The model that proposes, or None.
        tokenizer: Of both, or of the target.
        config: What to draft, where a call does not say.
        draft_tokenizer: Of a draft with another tokenizer, whose drafts go through text.
    """

    target: Any
    draft: Any
    tokenizer: Any
    config: GraphConfig = field(default_factory=GraphConfig)
    draft_tokenizer: Any = None

    @cached_property
    def decoder(self) -> GraphDecoder:
        tokenizers = None if self.draft_tokenizer is None else (self.tokenizer, self.draft_tokenizer)
        return GraphDecoder(self.target, self.draft, config=self.config, tokenizers=tokenizers)

    @overload
    def generate(self, prompt: str | Messages, **arguments: Any) -> Output: ...

    @overload
    def generate(self, prompt: list[str], **arguments: Any) -> list[Output]: ...

    def generate(self, prompt: str | Messages | list[str], **arguments: Any) -> Output | list[Output]:
        """Answers a prompt, a chat (a list of messages) or a list of prompts, which are decoded together.

        Args:
            prompt: A string goes through the chat template, if there is one.
            **arguments: `raw=True` skips the chat template. Greedy unless `temperature` is given; 256 tokens unless
                `max_new_tokens` is. Takes `config=GraphConfig(...)` and the arguments of `GraphDecoder.generate`:
                `top_k`, `top_p`, `min_p`, `repetition_penalty`, `seed`, `stop_strings`, `streamer`, ...

        Examples:
            >>> out = pair.generate("Why is the sky blue?", max_new_tokens=16)
            >>> len(out.token_ids), out.finish_reason
            (16, 'length')
            >>> chat = [{"role": "user", "content": "Name a colour."}]
            >>> out = pair.generate(chat, max_new_tokens=8, temperature=0.7, seed=1)
            >>> [len(one.token_ids) for one in pair.generate(["Tell a story.", "Count to ten."], max_new_tokens=4)]
            [4, 4]
        """
        return shared(self.target, lambda: self._generate(prompt, **arguments), told, heard)

    def _generate(self, prompt: str | Messages | list[str], **arguments: Any) -> Output | list[Output]:
        prompts = [one for one in prompt if isinstance(one, str)] if isinstance(prompt, list) else []
        if prompts and len(prompts) < len(prompt):
            raise UsageError("a list is either of prompts or of messages: this one has both")
        if prompts:
            return self._generate_all(prompts, **arguments)
        streamer = arguments.pop("streamer", None)
        decoding = self.start(prompt, **arguments)  # type: ignore[arg-type]
        stream(decoding, streamer)
        return self.output(decoding)

    def _generate_all(
        self,
        prompts: list[str],
        *,
        seed: int | None = None,
        config: GraphConfig | None = None,
        logprobs: bool = False,
        streamer: Any = None,
        **arguments: Any,
    ) -> list[Output]:
        """The outputs in the order of the prompts, each as it would be alone."""
        if streamer is not None:
            raise UsageError("streamer works with one text at a time: pass one prompt")
        seed, config = fresh_seed() if seed is None else seed, config or self.decoder.config
        model, rows = unwrapped(self.target), len(prompts)
        given = [row_arguments(model, arguments, row, rows) for row in range(rows)]
        sequences = [
            Sequence(self.request(prompt, **one), seed, config, outputs=Outputs(keep_logprobs=logprobs))
            for prompt, one in zip(prompts, given, strict=True)
        ]
        continue_all(self.decoder, sequences)
        return [self.output(sequence) for sequence in sequences]

    def stream(self, prompt: str | Messages, **arguments: Any) -> Iterator[str]:
        """The text as it comes, never half a character; takes what `generate` takes.

        Examples:
            >>> pieces = list(pair.stream("Tell me a story.", max_new_tokens=16))
            >>> "".join(pieces) == pair.generate("Tell me a story.", max_new_tokens=16).text
            True
        """
        yield from shared_pieces(self.target, lambda: self.pieces(self.start(prompt, **arguments)))

    def inspect(self, prompt: str | Messages, **arguments: Any) -> GraphReport:
        """The graphs behind an answer, to look at: it shows itself in a notebook, and as HTML, SVG, DOT or JSON.

        Examples:
            >>> report = pair.inspect("Name a colour.", max_new_tokens=8, config=GraphConfig(mode="graph"))
            >>> picture = report.to_svg(step=0)
        """
        from draftgraph.inspect import GraphReport

        decoding = self.start(prompt, **arguments)
        shown = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
        return GraphReport.of(list(decoding.steps()), self.tokenizer.decode, shown, decoding.config)

    def pieces(self, decoding: Decoding) -> Iterator[str]:
        text = TextStream(self.tokenizer)
        for tokens in decoding:
            if piece := text.push(tokens):
                yield piece
        if piece := text.push([], last=True):
            yield piece

    def start(
        self,
        prompt: str | Messages,
        *,
        config: GraphConfig | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        reuse_cache: bool = False,
        **arguments: Any,
    ) -> Decoding:
        """A decoding to iterate over, for callers that want every step."""
        request = self.request(prompt, **arguments)
        seed = fresh_seed() if seed is None else seed
        return self.decoder.start(request, 0, seed, logprobs=logprobs, config=config, reuse_cache=reuse_cache)

    def request(
        self,
        prompt: str | Messages,
        *,
        raw: bool = False,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        do_sample: bool | None = None,
        **arguments: Any,
    ) -> Request:
        """A prompt, ready to be decoded."""
        if temperature is not None and temperature < 0:
            raise UsageError(f"temperature must be 0 (greedy) or more, not {temperature}")
        if (arguments.get("num_return_sequences") or 1) > 1:
            raise UsageError("num_return_sequences gives one text here: call generate again with another seed")
        if self.tokenizer is None:
            raise UsageError("this pair has no tokenizer: use GraphDecoder with token ids")
        if do_sample is None:
            do_sample = bool(temperature)
        if do_sample and temperature:
            arguments["temperature"] = float(temperature)
        ids = torch.tensor([encode(self.tokenizer, prompt, raw)], device=self.target.device)
        if max_new_tokens is None:
            room = (context_window(self.target) or ids.shape[1] + NEW_TOKENS) - ids.shape[1]
            max_new_tokens = max(1, min(NEW_TOKENS, room))
        given = {name: value for name, value in arguments.items() if value is not None}
        given |= {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
        return prepare(self.target, ids, self.tokenizer, **given)

    def output(self, decoding: Sequence) -> Output:
        """What a decoding has produced so far."""
        ids = decoding.new_tokens
        logprobs = decoding.outputs.logprobs if decoding.outputs.keep_logprobs else None
        reason = decoding.finish_reason or "length"
        return Output(decode(self.tokenizer, ids), ids, reason, decoding.stats, logprobs)


def told(found: Output | list[Output]) -> Any:
    """Outputs as a message between ranks holds them."""
    return [asdict(one) for one in found] if isinstance(found, list) else asdict(found)


def heard(said: Any) -> Output | list[Output]:
    if isinstance(said, list):
        return [Output(**one | {"stats": Stats.read(one["stats"])}) for one in said]
    return Output(**said | {"stats": Stats.read(said["stats"])})


def load(
    target: Any = None,
    draft: Any = None,
    *,
    device: Any = None,
    dtype: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    device_map: Any = None,
    quantize: str | None = None,
    tensor_parallel: int | None = None,
    **model_kwargs: Any,
) -> Pair:
    """Loads a target and its draft: hub names, folders, GGUF files or modules; without arguments, the default model.

    Args:
        target: Left out: the default model, SmolLM2-135M-Instruct.
        draft: A smaller model, best with the target's tokenizer: else its drafts go through text. Or a folder that
            `draftgraph.distill` wrote, or that of a trained head (EAGLE-3, DFlash, JetSpec, MTP). `"mtp"`: the layer
            for multi-token prediction in the target's own checkpoint. The default model comes with a draft; `"none"`
            leaves it out, and `"self"` lets the target draft for itself: slow, but good for looking at graphs.
        device: Left out: a GPU if there is one.
        dtype: Left out: on a CPU as the file has the weights, on CUDA bfloat16.
        revision: Of the target on the hub.
        trust_remote_code: Whether code that comes with a model may run.
        quantization_config: Of `transformers`, for the target.
        device_map: Of `transformers`.
        quantize: `int8` or `int4`: fewer bits on a CPU.
        tensor_parallel: Split the target over so many processes, which are started on this machine, each on a GPU of
            its own. Scripts that torchrun starts give `tp_plan="auto"` instead.
        **model_kwargs: Go to `from_pretrained` of the target.

    Examples:
        >>> pair = draftgraph.load()
        >>> pair = draftgraph.load("Qwen/Qwen2.5-7B-Instruct", draft="Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
        >>> pair = draftgraph.load("model.gguf", draft="none")  # doctest: +SKIP
    """
    options = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "device_map": device_map}
    options["quantize"] = quantize
    target_model, tokenizer = load_model(
        target,
        role="target",
        revision=revision,
        quantization_config=quantization_config,
        tensor_parallel=tensor_parallel,
        **options,
        **model_kwargs,
    )
    if draft is None and target is None:
        draft = DEFAULT_DRAFT
    if draft is None or (isinstance(draft, str) and draft == "none"):
        return Pair(target_model, None, tokenizer)
    if draft is target_model or (isinstance(draft, str) and draft in ("self", target)):
        return Pair(target_model, target_model, tokenizer)

    def drafting() -> tuple[Any, Any]:
        """A draft, and its tokenizer if that is another one."""
        if is_draft_folder(draft):
            return load_draft(Path(draft), target_model), None
        if (head := trained_head(draft, target_model, revision, **model_kwargs)) is not None:
            return head, None
        draft_model, own = load_model(draft, role="draft", **options)
        if tokenizer is None or own is None or (reason := other_tokens(tokenizer, own)) is None:
            return draft_model, None
        refuse_slow(tokenizer, own)
        notice(
            f"the draft {own.name_or_path or type(own).__name__} does not share the target's tokenizer ({reason}): its "
            "drafts go through text, which costs some of their tokens and about a millisecond of every step"
        )
        return draft_model, own

    # Of ranks the first alone drafts: what another drafted would be the same, and nobody would look at it.
    found = shared(target_model, drafting, lambda _: None, lambda _: (None, None))
    return Pair(target_model, found[0], tokenizer, draft_tokenizer=found[1])


def trained_head(draft: Any, target: Any, revision: str | None, **options: Any) -> Any:
    """The head in a folder, or in the target's own checkpoint; None where no head is named."""
    from draftgraph.models.heads.formats import is_head_folder, load_head
    from draftgraph.models.heads.mtp import load_mtp

    if isinstance(draft, str) and draft == "mtp":
        return load_mtp(target, revision, **options)
    return load_head(draft, target) if is_head_folder(draft) else None
