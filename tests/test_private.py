"""Names of torch and transformers that are not public: there in the installed versions, and what happens without."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import target_of
from torch import distributed, nn
from transformers import GenerationConfig
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

import draftgraph
from draftgraph import private
from draftgraph.engine.borrowing import Loan, borrowed_attention, configs_of
from draftgraph.generation import prepare, refuse_fields

PROMPT = torch.tensor([[3, 1, 4]])
NAMES = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_apply_gate",
    "integrations.moe",
    "_supports_sdpa",
    "_supports_attention_backend",
    "_is_stateful",
    "_from_config",
    "_eos_token_tensor",
    "_pad_token_tensor",
    "_get_default_generation_params",
    "_prefix_allowed_tokens_fn",
    "_compile_all_devices",
    "_forward_hooks",
    "_forward_pre_hooks",
    "._parameters",
    "_set_pg_timeout",
    "_c10d_functional",
    "._version",
    "._name_or_path",
    "._attn_implementation",
    "_pytree",
    "mkldnn._",
)


def test_they_are_used_in_one_file() -> None:
    package = Path(draftgraph.__path__[0])
    for file in package.rglob("*.py"):
        found = [name for name in NAMES if name in file.read_text(encoding="utf-8")]
        assert not found or file == package / "private.py", f"{file}: {found}"


def implementations(configs: list[Any]) -> list[Any]:
    return [(private.attention_of(config), config._experts_implementation) for config in configs]


def test_implementations_are_switched() -> None:
    model, names = target_of("mixtral"), {"_attn_implementation": "ours", "_experts_implementation": "batched_mm"}
    configs = configs_of(model)
    assert all(f"{name}_internal" in vars(config) for config in configs for name in names)
    before = implementations(configs)
    with borrowed_attention(model, configs, names):
        assert set(implementations(configs)) == {("ours", "batched_mm")}
    assert implementations(configs) == before
    private.set_implementation(model.config, "_attn_implementation", "flex_attention")
    with Loan(model):
        assert private.attention_of(model.config) == "sdpa"
    assert private.attention_of(model.config) == "flex_attention"


class Renamed:
    """A configuration whose property keeps its value elsewhere, and sets that of its sub-configurations too."""

    def __init__(self, value: str, *parts: Renamed) -> None:
        self.value, self.parts = value, parts

    @property
    def _attn_implementation(self) -> str:
        return self.value

    @_attn_implementation.setter
    def _attn_implementation(self, value: str) -> None:
        self.value = value
        for part in self.parts:
            part._attn_implementation = value


def test_implementations_are_switched_without_the_names_behind_them() -> None:
    part = Renamed("eager")
    whole = Renamed("sdpa", part)
    with borrowed_attention(nn.Module(), [whole, part], {"_attn_implementation": "ours"}):
        assert (whole.value, part.value) == ("ours", "ours")
    assert (whole.value, part.value) == ("sdpa", "eager")


def test_a_configuration_without_attention_has_none() -> None:
    assert private.attention_of(object()) is None


def test_what_models_say_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recurrent = target_of("llama"), transformers.MambaForCausalLM
    assert private.supports_sdpa(model) and private.is_stateful(recurrent) and not private.is_stateful(model)
    monkeypatch.delattr(transformers.PreTrainedModel, "_supports_sdpa")
    monkeypatch.delattr(type(model).__mro__[1], "_supports_sdpa")
    assert not private.supports_sdpa(model)
    assert not private.supports_sdpa(object()) and not private.is_stateful(object())


def test_a_class_of_models_may_take_any_attention() -> None:
    class Plain(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

    for name in ("sdpa", "ours"):
        with pytest.raises(ValueError):
            private.new_model(Plain, transformers.LlamaConfig(), torch.float32, name)
    private.allow_any_attention(Plain)
    assert private.supports_sdpa(Plain)
    assert private.attention_of(private.new_model(Plain, transformers.LlamaConfig(), torch.float32, "sdpa").config)


@pytest.mark.parametrize("gone", [False, True])
def test_models_are_made_of_configurations(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("llama")
    if gone:
        monkeypatch.delattr(transformers.PreTrainedModel, "_from_config")
    made = private.new_model(type(model), type(model.config)(**model.config.to_dict()), torch.bfloat16, "eager")
    assert type(made) is type(model) and made.dtype == torch.bfloat16
    assert private.attention_of(made.config) == "eager"


@pytest.mark.parametrize("ends", [None, 7, [7, 9]], ids=str)
def test_ends_and_padding_of_a_prepared_request(ends: Any) -> None:
    request = prepare(target_of("llama"), PROMPT, eos_token_id=ends, pad_token_id=2, max_new_tokens=3)
    expected = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    assert isinstance(request.config._pad_token_tensor, torch.Tensor)
    for _ in ("prepared", "without the tensors"):
        assert request.eos_ids == expected and request.pad_id == 2
        endless = private.without_eos(request.config)
        assert private.eos_ids(endless) == set() and request.eos_ids == expected
        for name in ("_eos_token_tensor", "_pad_token_tensor"):
            vars(request.config).pop(name, None)
    assert private.pad_id(GenerationConfig()) == 0


@pytest.mark.parametrize("gone", [False, True])
def test_fields_that_nobody_set_are_not_refused(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("llama")
    if gone:
        monkeypatch.delattr(GenerationConfig, "_get_default_generation_params")
    usual = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0}
    assert usual.items() <= private.generation_defaults().items()
    refuse_fields(model, usual)


def test_the_function_of_a_prefix_processor() -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [1]

    processor = PrefixConstrainedLogitsProcessor(allowed, 1)
    assert private.allowed_tokens_function(processor) is allowed
    del processor._prefix_allowed_tokens_fn
    with pytest.raises(private.MissingNameError, match=r"_prefix_allowed_tokens_fn: draftgraph needs torch 2\.11 to"):
        private.allowed_tokens_function(processor)


def test_generate_compiles_everywhere_if_asked() -> None:
    config = transformers.CompileConfig()
    assert not config._compile_all_devices
    private.compile_everywhere(config)
    assert config._compile_all_devices is True


def test_hooks_of_modules() -> None:
    plain, before, after, gone = (nn.Linear(2, 2) for _ in range(4))
    before.register_forward_pre_hook(lambda *_: None)
    after.register_forward_hook(lambda *_: None)
    del gone._forward_hooks
    assert [private.is_hooked(module) for module in (plain, before, after, gone)] == [False, True, True, True]


def test_results_of_a_subclass_are_plain_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marked(torch.Tensor): ...

    marked = torch.ones(2).as_subclass(Marked)
    assert type(marked + 1) is Marked
    with private.plain_results():
        assert type(marked + 1) is torch.Tensor
    monkeypatch.delattr(torch._C, "DisableTorchFunctionSubclass")
    with pytest.raises(private.MissingNameError, match="DisableTorchFunctionSubclass"):
        private.plain_results()


def test_parameters_of_a_copied_module() -> None:
    module = nn.Linear(2, 2)
    private.set_parameters(module, {"weight": nn.Parameter(torch.ones(2, 2))})
    assert list(dict(module.named_parameters())) == ["weight"]
    with pytest.raises(private.MissingNameError, match=r"torch\.nn\.Module\._parameters"):
        private.set_parameters(object(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("gone", [False, True])
def test_a_process_group_waits_no_longer_than_it_is_told(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gone:
        monkeypatch.delattr(distributed.distributed_c10d, "_set_pg_timeout")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=99))
    try:
        group: Any = distributed.group.WORLD
        private.set_group_timeout(group, 7.0)
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        assert seconds == (99 if gone else 7)
    finally:
        distributed.destroy_process_group()


def test_tensors_of_a_gpu_are_gathered_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    name, libraries = "_c10d_functional::all_gather_into_tensor", list[Any]()
    monkeypatch.setattr(private, "_gathering", libraries)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    private.gather_on_host()
    private.gather_on_host()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") and len(libraries) == 1
    libraries.clear()
    store, part = distributed.HashStore(), torch.arange(6.0).view(2, 3)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group: Any = distributed.group.WORLD
        assert torch.equal(private.gathered_on_host(part, 1, group.group_name), part)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("gone", [False, True])
def test_a_group_that_was_never_met_is_not_counted(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wait = distributed.HashStore(), timedelta(milliseconds=50)  # type: ignore[attr-defined]
    before = distributed.distributed_c10d._world.group_count
    try:
        with pytest.raises(RuntimeError, match="imeout"):
            distributed.init_process_group("gloo", store=place, rank=0, world_size=2, timeout=wait)
        with monkeypatch.context() as patched:
            if gone:
                patched.delattr(distributed.distributed_c10d, "_world")
            private.forget_failed_group()
        assert (distributed.distributed_c10d._world.group_count == 0) is not gone
    finally:
        distributed.distributed_c10d._world.group_count = before


def test_nested_values() -> None:
    tree = ([1, (2, {"three": 3})],)
    for mapped in (private.tree_map, private.plain_tree_map):
        assert mapped(lambda number: number + 1, tree) == ([2, (3, {"three": 4})],)
