"""Many texts continued at once: large batches, a preallocated cache, the decoding step captured as a CUDA graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftgraph import private
from draftgraph.distillation.faults import naming_batch_size
from draftgraph.distillation.rowattention import NAME
from draftgraph.distillation.rowcache import RowCache, Rows
from draftgraph.engine.attention import graph_masks, layer_kinds
from draftgraph.engine.borrowing import Loan, borrowed_attention, configs_of
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.selfcheck import checked_engine
from draftgraph.models.cache import notice

Report = Callable[[float], None]
Noise = Callable[[int, int], Tensor]  # row, position of the token being chosen -> Gumbel noise [vocabulary]

MOST_ROWS = 4096
PREFILL_TOKENS = 1 << 15
MEMORY_SHARE = 0.35  # of what is free on a GPU, for keys and values
CPU_MEMORY = 1 << 30
LOOK_EVERY = 16  # steps between two looks at what has finished: each waits for the device
ROUND = 64


@dataclass
class Batch:
    """Rows being continued, and where each stands."""

    cache: RowCache
    tokens: Tensor  # [rows] the last token of each, not yet read
    positions: Tensor  # [rows] its place
    heat: Tensor  # [rows, 1] temperatures, 0: greedy
    index: list[int]  # which prompt each row continues

    def narrowed(self, kept: Tensor) -> Batch:
        index = [self.index[row] for row in kept.tolist()]
        return Batch(self.cache.narrowed(kept), self.tokens[kept], self.positions[kept], self.heat[kept], index)


class Sampler:
    """Continues texts until a stop token; greedy or sampled, row by row.

    >>> Sampler(model, frozenset({tokenizer.eos_token_id})).continue_texts([[1, 2, 3]], 32)    # doctest: +SKIP
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], batch_size: int | None = None) -> None:
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
        self._ragged = self._takes_positions and checked_engine(model).branching
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
        heat = temperature if isinstance(temperature, list) else [temperature] * len(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        generator = torch.Generator(self.device).manual_seed(seed)
        done = 0
        for rows in self.batches([len(prompt) for prompt in prompts], max_new_tokens):
            with self._loan, naming_batch_size(len(rows)):
                batch = self._prefilled([prompts[row] for row in rows], [heat[row] for row in rows], max_new_tokens)
                batch.index = rows
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
        return max(1, min(MOST_ROWS, int(self._memory() // row)))

    def _memory(self) -> float:
        """Bytes for keys and values."""
        if self.device.type != "cuda":
            return CPU_MEMORY
        torch.cuda.empty_cache()  # what other shapes needed
        return MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0]

    def _prefilled(self, prompts: list[list[int]], heat: list[float], new_tokens: int) -> Batch:
        """Reads all but the last token of every prompt. Padding stands behind a text, where nothing sees it."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = max(len(prompt) for prompt in prompts) - 1
        cache = RowCache(Rows(len(prompts), rounded(longest + 1 + new_tokens), self._ragged))
        padded = torch.tensor([prompt[:-1] + [0] * (longest + 1 - len(prompt)) for prompt in prompts])
        together = max(1, PREFILL_TOKENS // max(longest, 1))
        for start in range(0, len(prompts), together):
            ids = padded[start : start + together].to(self.device)
            cache.read_into(slice(start, start + len(ids)))
            if longest:
                positions = torch.arange(longest, device=self.device).expand(len(ids), -1)
                self._forward(ids, positions, cache)
        last = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        heats = torch.tensor(heat, device=self.device, dtype=torch.float32)[:, None]
        return Batch(cache, last, lengths - 1, heats, [])

    def _forward(self, ids: Tensor, positions: Tensor, cache: RowCache, mask: Any = None, **more: Any) -> Tensor:
        more |= {"position_ids": positions} if self._takes_positions else {}
        more |= {"attention_mask": mask} if mask is not None else {}
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **more, **self._keep)
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _step(self, batch: Batch) -> Tensor:
        """Logits [rows, vocabulary] behind the last token of every row."""
        if not self._ragged:
            batch.cache.rows.length = int(batch.positions.max())
            return self._forward(batch.tokens[:, None], batch.positions[:, None], batch.cache)
        slots = torch.arange(batch.cache.rows.capacity, device=self.device)
        visible = slots <= batch.positions[:, None]
        masks = graph_masks(self._config, visible, batch.positions, slots, self.model.dtype)
        if isinstance(masks, dict):
            mask: Any = {kind: one.transpose(0, 2) for kind, one in masks.items()}
        else:
            mask = masks.transpose(0, 2)  # [rows, 1, 1, slots]
        places = {"row_places": batch.positions} if self._passes_places else {}
        return self._forward(batch.tokens[:, None], batch.positions[:, None], batch.cache, mask, **places)

    def _decode(
        self, batch: Batch, answers: list[list[int]], most: int, generator: torch.Generator, noise: Noise | None
    ) -> None:
        stops = torch.tensor(sorted(self.stop_ids), device=self.device)
        ended = torch.zeros(len(batch.tokens), dtype=torch.bool, device=self.device)
        sampled = bool((batch.heat > 0).any())
        step, chosen = self._captured(batch), []
        for number in range(1, most + 1):
            logits = step().float()
            if sampled:
                logits = logits + batch.heat * self._noise(logits, batch, generator, noise)
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
                batch, ended = batch.narrowed(going), ended[going]
                step = self._captured(batch)

    def _noise(self, logits: Tensor, batch: Batch, generator: torch.Generator, noise: Noise | None) -> Tensor:
        if noise is None:
            return -torch.empty_like(logits).exponential_(generator=generator).log_()
        places = zip(batch.index, (batch.positions + 1).tolist(), strict=True)
        return torch.stack([noise(row, position).to(logits) for row, position in places])

    def _captured(self, batch: Batch) -> Callable[[], Tensor]:
        """The step as one CUDA graph where the model allows it: launching its kernels one by one takes far longer."""
        batch.cache.write_at(batch.positions)
        if not self._captures:
            return lambda: self._step(batch)
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(batch)  # writes what the first replay writes again
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._step(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            notice("this model's step cannot be captured as a CUDA graph: generating without")
            self._captures = False
            torch.cuda.synchronize()
            return lambda: self._step(batch)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND


def by_rows(model: Any) -> AbstractContextManager[None]:
    """Inside, a model with `sdpa` attention uses `row_attention`."""
    switched = [config for config in configs_of(model) if private.attention_of(config) == "sdpa"]
    return borrowed_attention(model, switched, {"_attn_implementation": NAME})
