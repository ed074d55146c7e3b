"""Many texts continued at once: large batches, a preallocated cache, the decoding step captured as a CUDA graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftgraph import private
from draftgraph.distillation.progress import out_of_memory_means
from draftgraph.engine.attention import graph_masks, layer_kinds
from draftgraph.engine.borrowing import Loan, borrowed_attention, configs_of
from draftgraph.engine.cache import SlotLayer
from draftgraph.engine.capture import Captured
from draftgraph.engine.ranks import refuse_split
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.selfcheck import engine_for
from draftgraph.errors import UnsupportedModelError
from draftgraph.kernels.triton_or_stub import available, tl, triton
from draftgraph.notices import Report, notice

Noise = Callable[[int, int], Tensor]  # row, position of the token being chosen -> Gumbel noise [vocabulary]

MOST_ROWS = 4096
PREFILL_TOKENS = 1 << 15
MEMORY_SHARE = 0.35  # of what is free on a GPU, for keys and values
CPU_BYTES = 1 << 30
LOOK_EVERY = 16  # steps between two looks at what has finished: each waits for the device
ROUND = 64
ATTENTION = "draftgraph_rows"  # of the attention
NOT_IN_KERNEL = ("softcap", "s_aux", "sliding_window", "position_bias")  # the kernel has none of these
QUERIES, SLOTS = 16, 64  # of the kernel: the fewest that tensor cores take; read at a time


@dataclass
class RowBatch:
    """Rows being continued, and where each stands."""

    cache: RowCache
    tokens: Tensor  # [rows] the last token of each, not yet read
    positions: Tensor  # [rows] its place
    temperatures: Tensor  # [rows, 1], 0: greedy
    index: list[int]  # which prompt each row continues

    def narrow(self, kept: Tensor) -> None:
        """To the rows at these indices."""
        self.cache.narrow(kept)
        self.tokens, self.positions, self.temperatures = (
            part[kept] for part in (self.tokens, self.positions, self.temperatures)
        )
        self.index = [self.index[row] for row in kept.tolist()]


class Sampler:
    """Continues texts until a stop token; greedy or sampled, row by row.

    >>> Sampler(model, frozenset({tokenizer.eos_token_id})).continue_texts([[1, 2, 3]], 32)    # doctest: +SKIP
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], batch_size: int | None = None) -> None:
        refuse_split(model, "generating many texts")
        self.model = model
        self.stop_ids = stop_ids
        self.batch_size = batch_size
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._config = model.config.get_text_config(decoder=True)
        self._loan = Loan(model)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # A model that counts positions itself, or builds its own mask, is given texts of one length at a time.
        self._ragged = self._takes_positions and engine_for(model).branching
        takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._passes_places = takes_more and layer_kinds(self._config) == ["full_attention"]
        self._captures = self.device.type == "cuda" and self._ragged and RopeSwitch.of(model) is None

    def continue_texts(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float | list[float] = 0.0,
        seed: int = 0,
        *,
        noise: Noise | None = None,
        report: Report | None = None,
    ) -> list[list[int]]:
        """New tokens for each prompt, in the order given, a final stop token included."""
        temperatures = temperature if isinstance(temperature, list) else [temperature] * len(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        generator = torch.Generator(self.device).manual_seed(seed)
        done = 0
        for rows in self.batches([len(prompt) for prompt in prompts], max_new_tokens):
            advice = f"try --batch-size {len(rows) // 2}" if len(rows) > 1 else "one text at a time does not fit"
            shortage = out_of_memory_means(f"{len(rows)} texts at once: {advice}; what was done is kept")
            with self._loan, shortage:
                batch = self._prefilled(prompts, temperatures, rows, max_new_tokens)
                with by_rows(self.model):
                    self._decode(batch, answers, max_new_tokens, generator, noise)
            done += len(rows)
            if report is not None:
                report(done / len(prompts))
        return answers

    def batches(self, lengths: list[int], new_tokens: int) -> Iterator[list[int]]:
        """Prompts of similar length together, longest first, as many as memory holds."""
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while order:
            most = self.rows_for(lengths[order[0]] + new_tokens)
            taken = order[:most]
            if not self._ragged:
                taken = [row for row in taken if lengths[row] == lengths[order[0]]]
            yield taken
            order = order[len(taken) :]

    def rows_for(self, length: int) -> int:
        """How many texts of this length are continued at once."""
        if self.batch_size is not None:
            return self.batch_size
        heads = getattr(self._config, "num_key_value_heads", None) or self._config.num_attention_heads
        size = getattr(self._config, "head_dim", None) or self._config.hidden_size // self._config.num_attention_heads
        row = 2 * self._config.num_hidden_layers * heads * size * self.model.dtype.itemsize * rounded(length)
        return max(1, min(MOST_ROWS, int(memory_for(self.device, MEMORY_SHARE, CPU_BYTES) // row)))

    def _prefilled(
        self, texts: list[list[int]], temperatures: list[float], index: list[int], new_tokens: int
    ) -> RowBatch:
        """Reads all but the last token of the prompts at `index`. Padding stands behind them, unseen."""
        prompts = [texts[row] for row in index]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = max(len(prompt) for prompt in prompts) - 1
        cache = RowCache(Rows(len(prompts), rounded(longest + 1 + new_tokens), self._ragged))
        padded = torch.tensor([prompt[:-1] + [0] * (longest + 1 - len(prompt)) for prompt in prompts])
        together = max(1, PREFILL_TOKENS // max(longest, 1))
        for start in range(0, len(prompts), together):
            ids = padded[start : start + together].to(self.device)
            cache.rows.reading = slice(start, start + len(ids))
            if longest:
                positions = torch.arange(longest, device=self.device).expand(len(ids), -1)
                self._forward(ids, positions, cache)
        last = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        heat = torch.tensor([temperatures[row] for row in index], device=self.device, dtype=torch.float32)
        return RowBatch(cache, last, lengths - 1, heat[:, None], index)

    def _forward(self, ids: Tensor, positions: Tensor, cache: RowCache, mask: Any = None, **more: Any) -> Tensor:
        more |= {"position_ids": positions} if self._takes_positions else {}
        more |= {"attention_mask": mask} if mask is not None else {}
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **more, **self._keep)
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _step(self, batch: RowBatch) -> Tensor:
        """Logits [rows, vocabulary] behind the last token of every row."""
        if not self._ragged:
            batch.cache.rows.length = int(batch.positions.max())
            return self._forward(batch.tokens[:, None], batch.positions[:, None], batch.cache)
        slots = torch.arange(batch.cache.rows.capacity, device=self.device)
        visible = slots <= batch.positions[:, None]
        masks = graph_masks(self._config, visible, batch.positions, slots, self.model.dtype)
        mask = private.tree_map(lambda one: one.transpose(0, 2), masks)  # [rows, 1, 1, slots]
        places = {"row_places": batch.positions} if self._passes_places else {}
        return self._forward(batch.tokens[:, None], batch.positions[:, None], batch.cache, mask, **places)

    def _decode(
        self, batch: RowBatch, answers: list[list[int]], most: int, generator: torch.Generator, noise: Noise | None
    ) -> None:
        stops = torch.tensor(sorted(self.stop_ids), device=self.device)
        ended = torch.zeros(len(batch.tokens), dtype=torch.bool, device=self.device)
        sampled = bool((batch.temperatures > 0).any())
        step, chosen = self._captured(batch), []
        for number in range(1, most + 1):
            logits = step().float()
            if sampled:
                logits = logits + batch.temperatures * self._noise(logits, batch, generator, noise)
            tokens = logits.argmax(dim=-1)
            chosen.append(torch.where(ended, -1, tokens))
            ended = ended | torch.isin(tokens, stops)
            batch.tokens.copy_(tokens)
            batch.positions.add_(~ended if self._ragged else 1)  # a row that has ended writes over its last slot
            if number % LOOK_EVERY and number < most:
                continue
            for row, new in zip(batch.index, torch.stack(chosen, dim=1).tolist(), strict=True):
                answers[row].extend(token for token in new if token >= 0)
            chosen.clear()
            going = torch.nonzero(~ended)[:, 0]
            if number == most or not len(going):
                return
            if len(going) <= len(ended) // 2:
                batch.narrow(going)
                step, ended = self._captured(batch), ended[going]

    def _noise(self, logits: Tensor, batch: RowBatch, generator: torch.Generator, noise: Noise | None) -> Tensor:
        if noise is None:
            return -torch.empty_like(logits).exponential_(generator=generator).log_()
        places = zip(batch.index, (batch.positions + 1).tolist(), strict=True)
        return torch.stack([noise(row, position).to(logits) for row, position in places])

    def _captured(self, batch: RowBatch) -> Callable[[], Tensor]:
        """The step as one CUDA graph where the model allows it: launching its kernels one by one takes far longer."""
        rows = batch.cache.rows
        rows.places, rows.index = batch.positions, torch.arange(rows.count, device=self.device)
        step = partial(self._step, batch)
        if not self._captures:
            return step
        try:
            return Captured(step, self.device)  # its warm-up writes what the first replay writes again
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            notice("this model's step cannot be captured as a CUDA graph: generating without")
            self._captures = False
            torch.cuda.synchronize()
            return step


def memory_for(device: torch.device, share: float, on_cpu: int) -> float:
    """Bytes that may be allocated: this share of what is free on a GPU."""
    if device.type != "cuda":
        return on_cpu
    torch.cuda.empty_cache()  # what other shapes needed
    return share * torch.cuda.mem_get_info(device)[0]


def rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND


def by_rows(model: Any) -> AbstractContextManager[None]:
    """Inside, a model with `sdpa` attention uses `row_attention`."""
    switched = [config for config in configs_of(model) if private.attention_of(config) == "sdpa"]
    return borrowed_attention(model, switched, {"_attn_implementation": ATTENTION})


@dataclass
class Rows:
    """What all layers of a cache share. It does not refer to the cache: a cycle would delay the freeing of memory."""

    count: int
    capacity: int
    ragged: bool  # rows of different lengths: all slots are shown, and a mask tells them apart
    length: int = 0  # of the text in every row, where they share one
    reading: slice | None = None  # the rows whose prompts are being read
    places: Tensor | None = None  # [rows] where decoding writes, moved on in place; None while prompts are read
    index: Tensor | None = None  # [rows] 0, 1, 2, ...


class RowLayer(SlotLayer):
    """One layer. Reading a prompt fills rows from their start; decoding writes one slot of every row."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.capacity)
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = self.rows
        if not self.is_initialized:  # a prompt is read with some of the rows
            shaped = (states[:1].expand(rows.count, -1, -1, -1) for states in (key_states, value_states))
            self.lazy_initialization(*shaped)
        keys, values = self.slots
        if rows.places is None:
            keys[rows.reading, :, : key_states.shape[2]] = key_states
            values[rows.reading, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        keys[rows.index, :, rows.places] = key_states[:, :, 0]
        values[rows.index, :, rows.places] = value_states[:, :, 0]
        end = rows.capacity if rows.ragged else rows.length + 1
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        raise UnsupportedModelError(
            "many texts at once cannot be continued with sparse attention: choose another model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows.length


class RowCache(Cache):
    """Keys and values of many texts, a row each; a token's slot is its position."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        super().__init__(layer_class_to_replicate=lambda: RowLayer(rows))  # type: ignore[arg-type]

    def narrow(self, kept: Tensor) -> None:
        """To the rows at these indices, layer by layer: two copies of all may not fit."""
        self.rows.count = len(kept)
        for layer in cast(list[RowLayer], self.layers):
            if layer.is_initialized:
                layer.keys, layer.values = (states[kept] for states in layer.slots)


def row_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` while many texts are continued at once. `row_places` [rows]: where each text ends.

    One new token per row attends to that row's text: heads that share keys are taken together, and no key is copied.
    """
    rows, heads, length, size = query.shape
    places, scale = kwargs.pop("row_places", None), kwargs.get("scaling")
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(rows, key.shape[1], -1, size)
    plain = not any(kwargs.get(name) for name in NOT_IN_KERNEL) and size in (32, 64, 128) and value.shape == key.shape
    if places is not None and plain and available and query.is_cuda:
        mixed = attend(grouped, key, value, places, size**-0.5 if scale is None else scale)
    else:
        mixed = reference(grouped, key, value, attention_mask, scale)
    return mixed.reshape(rows, 1, heads, -1), None


def reference(grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention with the heads of a group as queries of one head: [rows, groups, heads of a group, size]."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN would plan anew for every shape
    with sdpa_kernel(kernels) if grouped.is_cuda else nullcontext():
        return scaled_dot_product_attention(grouped, key, value, mask, scale=scale)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, places, out, scale, capacity, groups, heads: tl.constexpr, size: tl.constexpr,
    queries: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head, column, slot = tl.arange(0, queries), tl.arange(0, size), tl.arange(0, slots)
    place = (row * groups + group) * heads * size + head[:, None] * size + column[None, :]
    q = tl.load(query + place, mask=head[:, None] < heads, other=0.0)
    text = (row * groups + group) * capacity * size
    length = tl.load(places + row) + 1
    best = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, size], tl.float32)
    for start in range(0, length, slots):
        there = start + slot < length
        where = text + (start + slot)[:, None] * size + column[None, :]
        k = tl.load(key + where, mask=there[:, None], other=0.0)
        v = tl.load(value + where, mask=there[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(there[None, :], score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        best = higher
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=head[:, None] < heads)


def attend(grouped: Tensor, key: Tensor, value: Tensor, places: Tensor, scale: Any) -> Tensor:
    """Reads of every row only what is written there: queries [rows, groups, heads of a group, size] over
    slots 0 to `places` of keys [rows, groups, slots, size]."""
    rows, groups, heads, size = grouped.shape
    grouped, key, value = grouped.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(grouped)
    queries = max(QUERIES, triton.next_power_of_2(heads))
    arguments = (grouped, key, value, places, out, float(scale), key.shape[2], groups)
    _attend[(rows, groups)](*arguments, heads=heads, size=size, queries=queries, slots=SLOTS, num_warps=4)
    return out


AttentionInterface.register(ATTENTION, row_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
