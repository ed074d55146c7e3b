"""A model on a CPU as one compiled function runs it: what its layers consist of, found in its modules.

Nothing is taken from a list of families: modules are recognised by their parts, norms, activations and rotary
embeddings by what they compute, and every weight must have found its place. What is overlooked all the same changes the
logits, and the check of a model compares them with those of its own passes. Weights are read where the modules have
them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftgraph.engine import borrowing
from draftgraph.engine.adapters import Adapters
from draftgraph.engine.attention import SLIDING, layer_kinds
from draftgraph.engine.borrowing import (
    Proofs,
    epsilon,
    gate_activation,
    has_hooks,
    is_plain_rotary,
    is_untouched,
    norm_style,
    rotary_namespaces,
)
from draftgraph.engine.cache import PagedCache
from draftgraph.graph import WORD
from draftgraph.kernels import cpu_pass
from draftgraph.kernels.attention import PAGE_SIZE, PagedPass
from draftgraph.kernels.cpu_attention import TOGETHER
from draftgraph.kernels.fused import ACTIVATIONS
from draftgraph.kernels.packed import PackedTensor
from draftgraph.kernels.products import code_bytes
from draftgraph.kernels.threads import team_of, thread_count

KINDS = {torch.float32: 32, torch.bfloat16: 16}
PER_THREAD = 1 << 20  # numbers of all weights that make another thread worth waking
MORE_POSITIONS = 1024


class UnknownStructure(Exception):
    """The model is not made of parts that are known here."""


class Program:
    """A model's layers in tables, and the memory that its passes compute in."""

    dtype = torch.float32  # of keys and values

    def __init__(self, model: Any, adapters: Adapters | None = None) -> None:
        self._adapters, self._highest = adapters or Adapters(model, {}), 0  # rank
        self._rotary: Any = None
        self._weights: list[list[int]] = []
        self._norms: list[tuple[int, int, float, float]] = []
        self._used: set[int] = set()  # weights that have found their place
        self._proofs = Proofs()
        self._packed = False
        self._read(model)
        self._turns: dict[str | None, list[Tensor]] = {}  # cosines and sines, by kinds of layers that have their own
        self._turned = 0  # positions of which they are known
        self._memory: dict[str, Tensor] = {}
        self._cache: PagedCache | None = None
        self._reads: tuple[int, ...] = ()
        numbers = sum(weight.numel() for weight in model.parameters())
        self._team = team_of(max(1, min(thread_count(), numbers // PER_THREAD)))

    @torch.no_grad()
    def _read(self, model: Any) -> None:
        parts, config = dict(model.named_children()), model.config
        base: Any = parts.get("model")
        if set(parts) != {"model", "lm_head"} or config.get_text_config(decoder=True) is not config:
            raise UnknownStructure
        inner = dict(base.named_children())
        if set(inner) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise UnknownStructure
        self._model, self._rotary = model, inner["rotary_emb"]
        rotary = [
            getattr(own, "replaces", own) for own in (names[borrowing.ROTARY] for names in rotary_namespaces(model))
        ]
        if len(rotary) != 1 or not is_plain_rotary(rotary[0], torch.zeros(1)):
            raise UnknownStructure
        embedding, head = inner["embed_tokens"], parts["lm_head"]
        attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
        heads = attention.config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        size = attention.head_dim
        kinds = kinds_of(config)
        own = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds = kinds if own else [None] * len(kinds)
        cos, _ = self._turns_of(self._kinds[0], 1)
        table = [self._layer(layer, kind, heads, groups, size) for layer, kind in zip(base.layers, kinds, strict=True)]
        self.layers = np.array(table, dtype=np.int64)
        self.groups, self.size, self.vocabulary = groups, size, head.weight.shape[0]
        self.hidden, self.heads = embedding.weight.shape[1], heads
        activation = self._activation(mlp)
        self.inner = int(self._weights[table[0][cpu_pass.GATE]][2])
        final = self._norm(inner["norm"])
        self.model = np.array(
            [self.hidden, heads, groups, size, cos.shape[-1], self.inner, self.vocabulary, activation, final,
             self._weight(embedding.weight), self._linear(head), -1],
            dtype=np.int64,
        )  # fmt: skip
        scale = {float(layer.self_attn.scaling) for layer in base.layers}
        caps = {getattr(layer.self_attn, "attn_logit_softcapping", None) for layer in base.layers}
        if len(scale) != 1 or len(caps) != 1:
            raise UnknownStructure
        self.factors = np.array(
            [scale.pop(), caps.pop() or 0.0, embedding_factor(embedding, config),
             getattr(config, "residual_multiplier", 1.0), 1 / getattr(config, "logits_scaling", 1.0),
             getattr(config, "final_logit_softcapping", None) or 0.0],
            dtype=np.float32,
        )  # fmt: skip
        self.weights = np.array(self._weights, dtype=np.int64)
        self.norms = np.array([norm[:2] for norm in self._norms], dtype=np.int64)
        self.norm_factors = np.array([norm[2:] for norm in self._norms], dtype=np.float32)
        if any(id(weight) not in self._used for weight in model.parameters()):
            raise UnknownStructure
        if self._packed and (self.hidden % 32 or heads * size % 32 or self.inner % 32 or size % 16):
            raise UnknownStructure

    def _layer(self, layer: Any, kind: str, heads: int, groups: int, size: int) -> list[int]:
        attention, mlp = layer.self_attn, layer.mlp
        parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        norms = [name for name in parts if name not in ("self_attn", "mlp")]
        places = NORM_PLACES.get(frozenset(norms))
        if places is None or kind not in ("full_attention", *SLIDING):
            raise UnknownStructure
        row = [-1] * (cpu_pass.TAP + 1)
        for name, place in places.items():
            row[place] = self._norm(parts[name])
        inside = dict(attention.named_children())
        if "qkv_proj" in inside:
            whole = inside.pop("qkv_proj")
            rows = (0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
            for place in (cpu_pass.QUERY, cpu_pass.KEY, cpu_pass.VALUE):
                row[place] = self._linear(whole, place, rows[place], rows[place + 1])
        else:
            for place, name in ((cpu_pass.QUERY, "q_proj"), (cpu_pass.KEY, "k_proj"), (cpu_pass.VALUE, "v_proj")):
                row[place] = self._linear(inside.pop(name, None), place)
        row[cpu_pass.ATTENDED] = self._linear(inside.pop("o_proj", None))
        for place, name in ((cpu_pass.QUERY_NORM, "q_norm"), (cpu_pass.KEY_NORM, "k_norm")):
            if name in inside:
                norm = inside.pop(name)
                if norm.weight.numel() != size:
                    raise UnknownStructure
                row[place] = self._norm(norm)
        if inside or self._activation(mlp) is None:
            raise UnknownStructure
        if hasattr(mlp, "gate_up_proj"):
            half = mlp.gate_up_proj.weight.shape[0] // 2
            row[cpu_pass.GATE] = self._linear(mlp.gate_up_proj, 0, 0, half)
            row[cpu_pass.UP] = self._linear(mlp.gate_up_proj, 1, half, 2 * half)
        else:
            row[cpu_pass.GATE], row[cpu_pass.UP] = self._linear(mlp.gate_proj), self._linear(mlp.up_proj, 1)
        row[cpu_pass.DOWN] = self._linear(mlp.down_proj)
        row[cpu_pass.WINDOW] = int(attention.config.sliding_window) if kind in SLIDING else 0
        return row

    def _activation(self, mlp: Any) -> int:
        found = self._proofs.of(gate_activation, mlp, torch.zeros(1)) if is_untouched(mlp) else None
        if found is None:
            raise UnknownStructure
        return list(ACTIVATIONS).index(found)

    def _norm(self, norm: Any) -> int:
        style = self._proofs.of(norm_style, norm) if is_untouched(norm) else None
        if style is None:
            raise UnknownStructure
        weight = norm.weight
        self._used.add(id(weight))
        self._norms.append((weight.data_ptr(), kind_of(weight), epsilon(norm) or 0.0, style.offset))
        return len(self._norms) - 1

    def _linear(self, linear: Any, place: int = 0, first: int = 0, last: int | None = None) -> int:
        """A layer's row in the table of weights; `place`: among products with the same rows."""
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            raise UnknownStructure
        number = self._weight(linear.weight, linear.bias, first, last)
        if (layer := self._adapters.layers.get(linear)) is not None:
            self._weights[number][cpu_pass.ADAPTED :] = [len(self._weights), place]
            for adapter, _ in enumerate(self._adapters.names, start=1):
                for weight, skipped in zip(layer.of(adapter), (0, first), strict=True):
                    self._weights.append([32, weight.data_ptr() + 4 * skipped, *weight.shape, 0, 0, 0, 0])
                    self._highest = max(self._highest, len(weight))
        return number

    def _weight(self, weight: Any, bias: Any = None, first: int = 0, last: int | None = None) -> int:
        """A weight's row in the table, of these outputs."""
        outputs, inputs = weight.shape
        last = outputs if last is None else last
        if isinstance(weight.data, PackedTensor):
            held = weight.data
            if first % PackedTensor.TILE:
                raise UnknownStructure
            kind, place = held.bits, held.blocks.data_ptr() + first // PackedTensor.TILE * held.tile_bytes
            self._packed = True
        else:
            kind = kind_of(weight)
            place = weight.data_ptr() + first * inputs * kind // 8
        row = [kind, place, last - first, inputs, 0, 0, 0, 0]
        self._used.add(id(weight))
        if bias is not None:
            row[4:6] = [bias.data_ptr() + first * kind_of(bias) // 8, kind_of(bias)]
            self._used.add(id(bias))
        self._weights.append(row)
        return len(self._weights) - 1

    def read_states(self, reads: tuple[int, ...]) -> None:
        """Keeps these hidden states of passes from now on: see `Taps`."""
        self._reads, kept = reads, sorted(set(reads))
        for number in range(len(self.layers) + 1):
            place = 4 * self.hidden * kept.index(number) if number in kept else -1
            if number < len(self.layers):
                self.layers[number, cpu_pass.TAP] = place
            else:
                self.model[cpu_pass.LAST_TAP] = place

    def _kept(self, rows: int) -> Tensor | None:
        return torch.empty((rows, len(set(self._reads)) * self.hidden)) if self._reads else None

    def _in_order(self, kept: Tensor | None) -> Tensor | None:
        """States as they were asked for, of those that were kept, each once."""
        numbers = sorted(set(self._reads))
        if kept is None or list(self._reads) == numbers:
            return kept
        parts = kept.chunk(len(numbers), dim=-1)
        return torch.cat([parts[numbers.index(number)] for number in self._reads], dim=-1)

    def _place(self, cache: PagedCache) -> None:
        """Where keys and values go."""
        if self._cache is cache:
            return
        self._cache = cache
        layers: list[Any] = cache.layers
        for row, layer in zip(self.layers, layers, strict=True):
            row[cpu_pass.KEYS], row[cpu_pass.VALUES] = layer.keys.data_ptr(), layer.values.data_ptr()
            row[cpu_pass.CAPACITY] = layer.keys.shape[2]

    def move(self, cache: PagedCache, sources: Any, targets: Any) -> None:
        """Keys and values of slots to other slots."""
        self._place(cache)
        buffer = self._room("moved", 2 * len(sources) * self.size)
        cpu_pass.move_slots(self.layers, self.groups, self.size, sources, targets, buffer)

    def __call__(
        self,
        cache: PagedCache,
        tokens: Any,
        positions: Any,
        slots: Any,
        data: PagedPass,
        scored: int,
        adapters: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the first so many nodes of a pass, which have adapters of these numbers, and the hidden states of
        all, where they are read. # [scored, vocabulary], [nodes, states]"""
        self._place(cache)
        rows, threads, words = len(tokens), self._team.threads, data.ancestors.shape[1]
        self._turn(int(positions.max()) + 1)
        most, wide = max(rows, threads * cpu_pass.FEW_ROWS), max(tiles(self.inner), tiles(self.hidden))
        logits = torch.empty((scored, tiles(self.vocabulary)))
        codes_row = code_bytes(max(self.hidden, self.heads * self.size, self.inner)) if self._packed else 0
        seen, path = int(data.lengths.max()) + words * WORD + 2 * PAGE_SIZE, words * WORD + 8
        room, low = self._room, 0 if adapters is None else tiles(self._highest)
        kept = self._kept(rows)
        told = np.array(
            [rows, scored, logits.data_ptr(), 4 * logits.shape[1],
             room("states", rows * self.hidden), room("normed", most * self.hidden),
             room("codes", most * codes_row // 4) if self._packed else 0, codes_row,
             room("queries", rows * self.heads * self.size), room("mixed", 2 * rows * self.groups * self.size),
             room("inners", rows * self.inner), room("wide", 2 * rows * wide),
             room("scores", threads * TOGETHER * seen), 4 * seen, room("paths", 2 * rows * path), 8 * path,
             room("sums", threads * cpu_pass.SUMS_BYTES // 4), 0 if adapters is None else adapters.ctypes.data,
             room("lows", cpu_pass.PLACES * most * low), 4 * low, 4 * most * low,
             0 if kept is None else kept.data_ptr(), 0 if kept is None else 4 * kept.shape[1]],
            dtype=np.int64,
        )  # fmt: skip
        self._team.run(
            cpu_pass.run_pass, self.model, self.factors, self.layers, self.weights, self.norms, self.norm_factors, told,
            tokens, positions, slots, data.starts.numpy(), data.lengths.numpy(), data.pages.numpy(),
            data.ancestors.numpy(),
        )  # fmt: skip
        return logits[:, : self.vocabulary], self._in_order(kept)

    def _room(self, name: str, numbers: int) -> int:
        """The address of memory for so many numbers, kept from pass to pass."""
        held = self._memory.get(name)
        if held is None or len(held) < numbers:
            held = self._memory[name] = torch.zeros(numbers)
        return held.data_ptr()

    def _turn(self, positions: int) -> None:
        """The model's own cosines and sines of so many positions, or more."""
        if positions <= self._turned:
            return
        self._turned = -(-positions // MORE_POSITIONS) * MORE_POSITIONS
        self._turns = {kind: self._turns_of(kind, self._turned) for kind in set(self._kinds)}
        for row, kind in zip(self.layers, self._kinds, strict=True):
            row[cpu_pass.COSINES], row[cpu_pass.SINES] = (table.data_ptr() for table in self._turns[kind])

    @torch.no_grad()
    def _turns_of(self, kind: str | None, positions: int) -> list[Tensor]:
        given = torch.zeros(1, 1, 1), torch.arange(positions)[None]
        turns = self._rotary(*given) if kind is None else self._rotary(*given, kind)
        return [part[0].float().contiguous() for part in turns]


NORM_PLACES = {
    frozenset(places): places
    for places in (
        {"input_layernorm": cpu_pass.BEFORE_ATTENTION, "post_attention_layernorm": cpu_pass.BEFORE_MLP},
        {
            "input_layernorm": cpu_pass.BEFORE_ATTENTION,
            "post_attention_layernorm": cpu_pass.AFTER_ATTENTION,
            "pre_feedforward_layernorm": cpu_pass.BEFORE_MLP,
            "post_feedforward_layernorm": cpu_pass.AFTER_MLP,
        },
        {
            "post_attention_layernorm": cpu_pass.AFTER_ATTENTION,
            "post_feedforward_layernorm": cpu_pass.AFTER_MLP,
        },
    )
}


def program_of(model: Any, adapters: Adapters | None = None) -> Program | None:
    """None: its passes are those of its modules."""
    if model.get_input_embeddings().weight.device.type != "cpu" or has_hooks(model):
        return None
    try:
        return Program(model, adapters)
    except (UnknownStructure, AttributeError, KeyError, TypeError, ValueError):
        return None


def kind_of(weight: Tensor) -> int:
    """In how many bits a plain weight's numbers are."""
    plain = type(weight.detach()) is Tensor and weight.is_contiguous() and weight.device.type == "cpu"
    if not plain or weight.dtype not in KINDS:
        raise UnknownStructure
    return KINDS[weight.dtype]


def kinds_of(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else layer_kinds(config)[:1] * config.num_hidden_layers


def embedding_factor(embedding: Any, config: Any) -> float:
    """What a model multiplies its embeddings with."""
    scale = getattr(embedding, "embed_scale", None)
    if scale is not None:
        return float(scale)
    return float(getattr(config, "embedding_multiplier", 1.0))


def tiles(columns: int) -> int:
    """Columns, filled up to whole tiles."""
    return -(-columns // PackedTensor.TILE) * PackedTensor.TILE
