"""A trained small model inside a large shape: it costs what a large model costs and says what the small one says."""

from __future__ import annotations

import copy
import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.engine.borrowing import adapters, unwrapped
from draftgraph.errors import UsageError
from draftgraph.models.draft import is_packed, is_plain, spread
from draftgraph.notices import progress_bar

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

FAMILIES = ("llama", "mistral")  # the same maths, as long as there is neither a window nor a bias
STRETCHABLE_ROPE = ("default", "linear", "llama3")  # pair r*j of r*n turns exactly as fast as pair j of n
WRITERS = ("embed_tokens", "o_proj", "down_proj")  # all that writes into the residual stream
SIGMA = 0.02  # of random weights, as in a new Llama: nothing overflows, not even in float16


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, named as in `LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.default is MISSING else 0
            if type(value) is not int or value < least:
                raise UsageError(f"a shape's {field.name} must be a whole number from {least}: not {value!r}")
        heads = self.num_attention_heads
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)
        if self.hidden_size % heads or heads % self.num_key_value_heads:
            raise UsageError(
                f"no Llama has hidden_size {self.hidden_size}, {heads} heads and {self.num_key_value_heads} key-value "
                "heads: make the first a multiple of the second, and that of the third"
            )


SHAPES = {  # with the 49,152 tokens of SmolLM2, in bfloat16:
    "llama-2-7b": Shape(4096, 11008, 32, 32),  # 6.88 billion parameters, 13.8 GB
    "llama-2-13b": Shape(5120, 13824, 40, 40),  # 13.19 billion, 26.4 GB
    "llama-33b": Shape(6656, 17920, 60, 52),  # 32.76 billion, 65.5 GB
    "llama-2-70b": Shape(8192, 28672, 80, 64, 8),  # 69.26 billion, 138.5 GB
}


def inflate(model: Any, shape: str | Shape = "llama-2-7b", *, seed: int = 0) -> LlamaForCausalLM:
    """Embed a Llama-type model into a larger Llama shape without changing its function.

    All weights of the large model are read and multiplied. Those that the small model has no use for are random
    (`seed`), and what they compute is multiplied by zeros before it would reach the residual stream, so the logits are
    those of `model` up to rounding. Vocabulary, longest position, generation config and end tokens are those of
    `model`, and its tokenizer fits. Input and output matrix are two, as in Llama 2, with a row for each token of
    `model`: 49,152 of SmolLM2 where Llama 2 has 32,000.

    The large model stands on the device of `model`, in its dtype; each weight is allocated once and filled in place.
    `shape` is "llama-2-7b", "llama-2-13b", "llama-33b", "llama-2-70b" or a `Shape`. A figure measured with such a model
    must say so: "7B-cost, inflated".

    >>> pair = draftgraph.load()                                                # doctest: +SKIP
    >>> large = draftgraph.bench.inflate(pair.target, "llama-2-7b")             # doctest: +SKIP
    >>> decoder = draftgraph.GraphDecoder(large, pair.draft)                    # doctest: +SKIP
    """
    name, shape = named(shape)
    fit = fitted(model, shape)
    large = on_meta(model, shape)
    device = model.get_input_embeddings().weight.device
    draw = torch.Generator(device).manual_seed(seed)
    small_layers, large_layers = model.model.layers, large.model.layers
    real = dict(zip(spread(len(small_layers), len(large_layers)), small_layers, strict=True))
    try:
        with torch.no_grad(), progress_bar(f"building {name}") as report:
            for index, layer in enumerate(large_layers):
                materialise(layer, draw, fit)
                if index in real:
                    embed_layer(layer, real[index], fit)
                report((index + 1) / len(large_layers))
            materialise(large, draw, fit)
            put(large.model.embed_tokens, model.model.embed_tokens.weight)
            put(large.model.norm, model.model.norm.weight * fit.shrink)
            put(large.lm_head, model.lm_head.weight)
    except torch.OutOfMemoryError:
        size = sum(weight.numel() * weight.itemsize for weight in large.parameters()) / 1e9
        raise UsageError(f"{name} takes {size:.1f} GB, more than is free on {device}: choose a smaller shape") from None
    return large


def named(shape: str | Shape) -> tuple[str, Shape]:
    if isinstance(shape, Shape):
        return f"a Llama of {shape.num_hidden_layers} layers", shape
    if shape not in SHAPES:
        raise UsageError(f"there is no shape {shape!r}: choose of {', '.join(SHAPES)}, or give a Shape")
    return shape, SHAPES[shape]


@dataclass(frozen=True)
class Fit:
    """Where a small model stands in a large one."""

    width: int  # of the small model's residual stream: the first channels of the large one, the others are zero
    shrink: float  # of norm weights: the mean square is over more channels
    stretch: int  # channel c of a head stands at stretch * c: there a rotary pair meets its old frequency
    heads: list[int]  # place of each query head
    copies: int  # of each key-value head, one after the other


def fitted(model: Any, shape: Shape) -> Fit:
    """How the model goes into the shape; raises UsageError where it does not."""
    check_family(model)
    config = model.config
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
        if getattr(shape, name) < getattr(config, name):
            raise UsageError(
                f"the shape's {name} of {getattr(shape, name)} is less than the model's {getattr(config, name)}: "
                "choose a larger shape"
            )
    stretch, rest = divmod(shape.head_dim, config.head_dim)
    if rest:
        raise UsageError(
            f"the shape's head_dim of {shape.head_dim} is no multiple of the model's {config.head_dim}, so their "
            "rotary frequencies differ: choose a multiple"
        )
    rope = config.rope_parameters["rope_type"]
    if stretch > 1 and rope not in STRETCHABLE_ROPE:
        raise UsageError(
            f"rotary frequencies of type {rope} change with the size of a head: "
            f"choose a shape with the model's head_dim of {config.head_dim}"
        )
    group = config.num_attention_heads // config.num_key_value_heads
    large_group = shape.num_attention_heads // shape.num_key_value_heads
    copies = math.ceil(group / large_group)
    if copies * config.num_key_value_heads > shape.num_key_value_heads:
        raise UsageError(
            f"{config.num_key_value_heads} groups of {group} heads take {copies * config.num_key_value_heads} "
            f"key-value heads with {large_group} heads each, and the shape has {shape.num_key_value_heads}: "
            "choose a larger shape"
        )
    return Fit(
        width=config.hidden_size,
        shrink=math.sqrt(config.hidden_size / shape.hidden_size),
        stretch=stretch,
        heads=[
            head // group * copies * large_group + head % group  # a group fills its copies from the first on
            for head in range(config.num_attention_heads)
        ],
        copies=copies,
    )


def check_family(model: Any) -> None:
    """Refuse a model whose function a Llama cannot have, or whose weights cannot be read."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    if family not in FAMILIES or not hasattr(model, "lm_head"):
        raise UsageError(f"a {family} cannot be inflated: give a causal language model of type {' or '.join(FAMILIES)}")
    if unwrapped(model) is not model or adapters(model):
        raise UsageError("the model has adapters: merge them into it (merge_and_unload) and give what that returns")
    if getattr(config, "sliding_window", None) is not None:
        raise UsageError("the model attends through a window, which a Llama does not: give one without sliding_window")
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise UsageError("the model has biases, which Llama 2 has not: give one without")
    weights = list(model.parameters())
    readable = all((is_plain(weight) or is_packed(weight)) and not weight.is_meta for weight in weights)
    if not readable or len({weight.device for weight in weights}) > 1:
        raise UsageError("the model's weights are quantised, offloaded or on several devices: load it without that")
    if model.lm_head.weight.shape[0] != model.config.vocab_size:
        raise UsageError("the model writes only some of its tokens: give one with a full output matrix")


def on_meta(model: Any, shape: Shape) -> LlamaForCausalLM:
    """A model of the shape whose weights are yet to be allocated; only its rotary frequencies are there."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = model.config
    kept = ("vocab_size", "hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = LlamaConfig(
        **asdict(shape),
        **{name: getattr(source, name) for name in kept},
        rms_norm_eps=source.rms_norm_eps * source.hidden_size / shape.hidden_size,
        rope_parameters=copy.deepcopy(source.rope_parameters),
        tie_word_embeddings=False,
    )
    config.name_or_path = source.name_or_path  # where the tokenizer is found
    weight = model.get_input_embeddings().weight
    with torch.device("meta"), no_init_weights():
        attention = private.attention_of(source)
        large: LlamaForCausalLM = private.new_model(LlamaForCausalLM, config, weight.dtype, attention)
    large.model.rotary_emb = LlamaRotaryEmbedding(config).to(weight.device)
    large.generation_config = copy.deepcopy(model.generation_config)
    large.eval()
    return large


def materialise(module: nn.Module, draw: torch.Generator, fit: Fit) -> None:
    """Allocate the weights that are still on the meta device: zeros in what writes into the stream, noise elsewhere."""
    for name, bare in list(module.named_parameters()):
        if not bare.is_meta:
            continue
        owner = module.get_submodule(name.rpartition(".")[0])
        weight = torch.empty_like(bare, device=draw.device, requires_grad=False)
        if name.removesuffix(".weight").endswith(WRITERS):
            weight.zero_()  # not torch.zeros: its pages may not be there, and then reading them costs nothing
        else:
            weight.normal_(fit.shrink if weight.dim() == 1 else 0.0, SIGMA, generator=draw)
        owner.weight = nn.Parameter(weight, requires_grad=False)


def embed_layer(large: Any, small: Any, fit: Fit) -> None:
    """Put a layer's weights into a large one's; noise stays where it meets zeros in the stream or in a writer."""
    ours, theirs = large.self_attn, small.self_attn
    channels, width = slice(None, None, fit.stretch), slice(fit.width)
    queries = heads_of(ours, "q_proj")
    queries[fit.heads, :, width] = 0.0  # in the channels between as well: the keys have noise there
    # A Llama divides scores by the root of its heads' size.
    queries[fit.heads, channels, width] = heads_of(theirs, "q_proj") * math.sqrt(fit.stretch)
    for name in ("k_proj", "v_proj"):
        copies = heads_of(theirs, name).repeat_interleave(fit.copies, dim=0)
        heads_of(ours, name)[: len(copies), channels, width] = copies
    heads_of(ours, "o_proj")[fit.heads, channels, width] = heads_of(theirs, "o_proj")
    for name in ("gate_proj", "up_proj", "down_proj"):
        put(getattr(large.mlp, name), getattr(small.mlp, name).weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        put(getattr(large, name), getattr(small, name).weight * fit.shrink)


def heads_of(attention: Any, name: str) -> Tensor:
    """A view of a projection, [heads, channels of a head, channels of the stream]."""
    weight: Tensor = getattr(attention, name).weight
    by_channel = weight.T if name == "o_proj" else weight
    return by_channel.view(-1, attention.head_dim, by_channel.shape[1])


def put(module: Any, weight: Tensor) -> None:
    """Write into the first rows and columns."""
    module.weight[tuple(map(slice, weight.shape))] = weight
