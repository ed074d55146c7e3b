"""Inflated models: a large shape with the function of the small model inside, and refusals of what does not fit."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import transformers as tf
from families import perturbed
from tiny_models import one_line_of

import draftgraph
from draftgraph import GraphConfig, GraphDecoder, UsageError
from draftgraph.bench import Shape, inflate
from draftgraph.bench import inflation as inflation_module
from draftgraph.models import load_model
from draftgraph.models.draft import spread

VOCAB = 96
EPSILON = 0.01  # large, so that one which is not scaled shows
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPSILON,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 2,
}
SHAPES = {
    "same heads, only wider": Shape(64, 80, 3, 4, 4, head_dim=16),
    "nothing added": Shape(48, 80, 3, 3, 1),
    "all heads their own keys": Shape(96, 128, 5, 6, 6, head_dim=16),
    "doubled heads": Shape(128, 112, 4, 4, head_dim=32),
    "doubled heads in groups of four": Shape(256, 112, 7, 8, 2),
    "two copies of the keys": Shape(192, 80, 3, 8, 4, head_dim=32),
    "heads four times as large": Shape(200, 90, 4, 4, 1, head_dim=64),
    "heads three times as large": Shape(144, 81, 3, 3, 1, head_dim=48),
}


def small_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Random, with weights as large as trained ones: attention is far from even, logits are far apart."""
    torch.manual_seed(0)
    kind = {"llama": tf.LlamaConfig, "mistral": tf.MistralConfig}[family]
    model = tf.AutoModelForCausalLM.from_config(kind(**SMALL | changes))
    for weight in model.parameters():
        weight.data = torch.rand_like(weight) * 1.5 + 0.2 if weight.dim() == 1 else torch.randn_like(weight) * 0.25
    return model.to(dtype).eval()


def padded_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(4, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :7] = mask[2, :21] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    positions[0] += 300
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


@torch.no_grad()
def distance(large: Any, small: Any) -> float:
    """Of the logits at real tokens, relative to the largest."""
    batch = {name: value.to(small.device) for name, value in padded_batch().items()}
    real = batch["attention_mask"].bool()
    expected, found = (model(**batch).logits[real].double() for model in (small, large))
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_logits_are_those_of_the_small_model(name: str, dtype: torch.dtype) -> None:
    small = small_model(dtype=dtype)
    large = inflate(small, SHAPES[name])
    assert large.dtype == dtype and not large.training
    assert distance(large, small) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_cached_decoding_gives_the_tokens_of_the_small_model(name: str) -> None:
    small = small_model()
    large = inflate(small, SHAPES[name])
    batch = padded_batch()
    del batch["position_ids"]
    expected, found = (model.generate(**batch, max_new_tokens=48, do_sample=False) for model in (small, large))
    assert found.tolist() == expected.tolist()
    assert len(set(expected[0, 40:].tolist())) > 5  # a text, not one token for ever


@pytest.mark.parametrize(
    "shape", [Shape(96, 160, 4, 8, 4, head_dim=32), Shape(144, 81, 4, 9), Shape(64, 80, 3, 8, 2, 16)]
)
@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (4, 4), (2, 1)])
def test_any_grouping_of_heads_goes_into_any_other_with_room(heads: tuple[int, int], shape: Shape) -> None:
    small = small_model(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=16)
    group, large_group = heads[0] // heads[1], shape.num_attention_heads // shape.num_key_value_heads
    if heads[1] * -(-group // large_group) > shape.num_key_value_heads:
        with pytest.raises(UsageError, match="choose a larger shape") as error:
            inflate(small, shape)
        one_line_of(error)
    else:
        assert distance(inflate(small, shape), small) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_frequencies_are_kept(rope: dict[str, Any]) -> None:
    small = small_model(rope_parameters=rope)
    large = inflate(small, SHAPES["doubled heads"])
    assert large.model.rotary_emb.inv_freq[::2].equal(small.model.rotary_emb.inv_freq)
    assert distance(large, small) < 1e-5


def test_a_mistral_without_a_window_becomes_a_llama() -> None:
    small = small_model("mistral", sliding_window=None, tie_word_embeddings=False)
    large = inflate(small, SHAPES["doubled heads"])
    assert type(large) is tf.LlamaForCausalLM
    assert distance(large, small) < 1e-5


def test_half_precision_stays_close_and_keeps_rotary_frequencies_exact() -> None:
    small = small_model(dtype=torch.bfloat16)
    large = inflate(small, SHAPES["doubled heads in groups of four"])
    assert {weight.dtype for weight in large.parameters()} == {torch.bfloat16}
    assert large.model.rotary_emb.inv_freq.dtype == torch.float32
    exact = small_model()
    exact.load_state_dict(small.state_dict())
    assert distance(large, exact) < 3 * distance(small, exact)


def test_the_large_model_has_the_weights_of_its_shape_and_all_are_read() -> None:
    shape = Shape(256, 112, 7, 8, 2)
    small = small_model()
    large = inflate(small, shape)
    normal = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=VOCAB, **asdict(shape)))
    assert {name: weight.shape for name, weight in large.named_parameters()} == {
        name: weight.shape for name, weight in normal.named_parameters()
    }
    assert large.lm_head.weight.data_ptr() != large.model.embed_tokens.weight.data_ptr()
    assert not any(tensor.is_meta for tensor in [*large.parameters(), *large.buffers()])
    used_layers = spread(3, 7)
    for index, layer in enumerate(large.model.layers):
        real = index in used_layers
        attention, ffn = layer.self_attn, layer.mlp
        queries = attention.q_proj.weight.view(8, 32, 256)
        if real:  # three heads, between whose channels there are none
            assert not queries[:3, 1::2, :48].any()
            queries = torch.cat([queries[3:].flatten(), queries[:3, ::2].flatten(), queries[:3, 1::2, 48:].flatten()])
        for weight in (queries, attention.k_proj.weight, attention.v_proj.weight, ffn.gate_proj.weight):
            assert is_noise(weight)
        assert is_noise(ffn.up_proj.weight) and is_noise(layer.input_layernorm.weight)
        outputs, down = attention.o_proj.weight.view(256, 8, 32), ffn.down_proj.weight
        assert bool(outputs[:48, :3, ::2].all()) == bool(down[:48, :80].all()) == real
        assert outputs.count_nonzero() == 48 * 48 * real and down.count_nonzero() == 48 * 80 * real
    assert is_noise(large.lm_head.weight) and is_noise(large.model.norm.weight)
    assert large.model.embed_tokens.weight[:, :48].equal(small.model.embed_tokens.weight)
    assert not large.model.embed_tokens.weight[:, 48:].any()


def is_noise(weight: torch.Tensor) -> bool:
    """Whether no number stands there often enough to be skipped."""
    _, counts = weight.unique(return_counts=True)
    return bool(weight.all()) and int(counts.max()) < 8 and bool(weight.abs().max() < 3)


def test_the_seed_decides_what_is_random() -> None:
    small = small_model()
    one, same, other = (inflate(small, SHAPES["doubled heads"], seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(one[name].equal(same[name]) for name in one)
    assert not one["lm_head.weight"].equal(other["lm_head.weight"])


def test_inflating_neither_changes_the_small_model_nor_draws_from_the_global_generator() -> None:
    small = small_model()
    before, state = copy.deepcopy(small.state_dict()), torch.get_rng_state()
    large = inflate(small, SHAPES["nothing added"])
    assert torch.get_rng_state().equal(state)
    for weight in large.parameters():
        weight.zero_()
    assert all(value.equal(before[name]) for name, value in small.state_dict().items())


def test_each_weight_is_allocated_once_and_nothing_as_large_beside_it() -> None:
    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            result = function(*arguments, **options or {})
            is_new = not any(returned.alias_info for returned in function._schema.returns)
            if is_new and isinstance(result, torch.Tensor) and result.device.type == "cpu":
                self.sizes.append(result.numel())
            return result

    small = small_model()
    largest = max(weight.numel() for weight in small.parameters())
    with Allocations() as allocations:
        large = inflate(small, Shape(512, 512, 4, 16))
    expected = sorted(weight.numel() for weight in large.parameters() if weight.numel() > largest)
    assert sorted(size for size in allocations.sizes if size > largest) == expected


def test_generation_settings_are_carried_over() -> None:
    small = small_model(attn_implementation="eager")
    small.config._name_or_path = "here"
    small.generation_config.repetition_penalty = 1.25
    large = inflate(small, SHAPES["doubled heads"])
    assert large.generation_config.to_dict() == small.generation_config.to_dict()
    assert large.generation_config is not small.generation_config
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings", "_name_or_path"):
        assert getattr(large.config, name) == getattr(small.config, name)
    assert large.config._attn_implementation == small.config._attn_implementation


def test_drafts_are_accepted_as_by_the_small_model() -> None:
    small = small_model()
    large, draft = inflate(small, SHAPES["doubled heads"]), perturbed(small, 0.1)
    config = GraphConfig(mode="graph")
    prompt = padded_batch()["input_ids"][:1]
    expected, found = (
        GraphDecoder(target, draft, config=config).generate(prompt, max_new_tokens=40) for target in (small, large)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.stats.mean_accepted_length == expected.stats.mean_accepted_length > 1


def test_named_shapes_have_the_parameters_that_their_papers_give() -> None:
    for name, billions in {"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-33b": 32.53, "llama-2-70b": 68.98}.items():
        with torch.device("meta"):
            model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=32000, **asdict(inflation_module.SHAPES[name])))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden_size of 32 is less than the model's 48"),
        ({"intermediate_size": 64}, "intermediate_size of 64 is less than the model's 80"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of 2 is less than the model's 3"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "1 groups of 3 heads take 3 key-value heads"),
        ({"head_dim": 24}, "head_dim of 24 is no multiple of the model's 16"),
        ({"head_dim": 8}, "head_dim of 8 is no multiple of the model's 16"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        inflate(small_model(), replace(Shape(64, 80, 3, 4, 4, head_dim=16), **changes))
    one_line_of(error)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((64, 80, 0, 4), "num_hidden_layers must be a whole number from 1"),
        ((64, 80.5, 3, 4), "intermediate_size must be a whole number from 1"),
        ((64, 80, 3, 4, -1), "num_key_value_heads must be a whole number from 0"),
        ((64, 80, 3, 5), "no Llama has hidden_size 64, 5 heads"),
        ((64, 80, 3, 4, 3), "4 heads and 3 key-value heads"),
    ],
)
def test_a_shape_that_no_llama_has_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        Shape(*arguments)
    one_line_of(error)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128}
UNFIT = {
    "a gpt2 cannot be inflated": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8)
    ),
    "a llama cannot be inflated": lambda: small_model().model,
    "a str cannot be inflated": lambda: "SmolLM2",
    "through a window": lambda: small_model("mistral", sliding_window=64),
    "has biases": lambda: small_model(attention_bias=True),
    "of type yarn": lambda: small_model(rope_parameters=YARN),
    "offloaded": lambda: small_model().to("meta"),
    "only some of its tokens": lambda: with_fewer_outputs(small_model(tie_word_embeddings=False)),
    "has adapters": lambda: with_adapter(small_model()),
}


def with_fewer_outputs(model: Any) -> Any:
    model.lm_head.weight.data = model.lm_head.weight.data[:50]
    return model


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("said", UNFIT)
def test_a_model_that_no_llama_can_be_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        inflate(UNFIT[said](), SHAPES["doubled heads"])
    one_line_of(error)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="llama-2-13b") as error:
        inflate(small_model(), "llama-3-8b")
    one_line_of(error)


def test_yarn_is_kept_where_heads_keep_their_size() -> None:
    small = small_model(rope_parameters=YARN)
    assert distance(inflate(small, SHAPES["all heads their own keys"]), small) < 1e-5


def test_a_shape_too_large_for_the_device_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(inflation_module, "materialise", no_memory)
    with pytest.raises(UsageError, match=r"llama-2-70b takes 273\.8 GB, more than is free on cpu") as error:
        inflate(small_model(), "llama-2-70b")
    one_line_of(error)


@pytest.mark.gpu
def test_on_cuda_the_large_model_takes_the_memory_of_its_weights_alone() -> None:
    small = small_model(dtype=torch.bfloat16).to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    large = inflate(small, Shape(2048, 4096, 6, 16))
    weights = sum(weight.numel() * weight.itemsize for weight in large.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.01 * weights
    assert distance(large.float(), small.float()) < 0.05  # half precision rounds the scaled weights


@pytest.mark.model
def test_the_default_model_says_the_same_inside_a_larger_shape(default_model_file: Any) -> None:
    small, tokenizer = load_model(None, device="cpu", dtype="float32")
    large = draftgraph.bench.inflate(small, Shape(1024, 1600, 34, 16, 4, head_dim=128))
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        expected, found = (model(**prompt).logits for model in (small, large))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    expected, found = (model.generate(**prompt, max_new_tokens=16, do_sample=False) for model in (small, large))
    assert found.tolist() == expected.tolist()
