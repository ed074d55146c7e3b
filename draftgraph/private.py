"""The names of torch and transformers that are not public, each in one function, with what happens when it is gone.

`tests/test_private.py` uses every one on the installed versions; pyproject.toml says which are supported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph.errors import DraftGraphError

SUPPORTED = "torch 2.11 to 2.13 and transformers 5.17 or newer, before 6"
USUAL = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0}  # values of GenerationConfig that do nothing


class MissingNameError(DraftGraphError):
    """A release of torch or transformers has lost a name that cannot be done without."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the installed release has no {name}: draftgraph needs {SUPPORTED}")


# transformers: configurations of models


def attention_of(config: Any) -> str | None:
    """The name of its attention; None where it has none, or no longer tells."""
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str | None) -> None:
    """That a model is made with, its sub-configurations' too."""
    config._attn_implementation = name


def set_implementation(config: Any, name: str, value: Any) -> None:
    """`_attn_implementation` or `_experts_implementation` of this configuration alone.

    The property itself, which is taken where the name behind it is gone, also sets those of its sub-configurations:
    so set them from the outermost on.
    """
    inner = f"{name}_internal"
    setattr(config, inner if hasattr(config, inner) else name, value)


def register_experts(name: str, compute: Callable[..., Tensor]) -> bool:
    """Under this name for `_experts_implementation`. False: there is no registry, and models keep their own."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return False
    ExpertsInterface.register(name, compute)
    return True


def registered_experts(name: str) -> Callable[..., Tensor]:
    """What transformers has under a name; it can only be asked for where `register_experts` has found the registry."""
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface()[name]  # type: ignore[no-any-return]


def gate_of_experts(module: Any) -> Callable[[Tensor], Tensor] | None:
    """What experts make of their gates and what these let through, side by side; None where nothing says so."""
    return getattr(module, "_apply_gate", None)


def supports_sdpa(model: Any) -> bool:
    """Where nothing says so: no, and the slower eager attention is used."""
    return bool(getattr(model, "_supports_sdpa", False))


def allow_any_attention(kind: type[Any]) -> None:
    """For a class of models that looks its attention up in the registry. A release without these names either asks
    for nothing or refuses any attention but eager when a model is made."""
    kind._supports_sdpa = kind._supports_attention_backend = True


def is_stateful(model: Any) -> bool:
    """Where nothing says so: no; the check of a model finds a state that cannot be rewound, if later."""
    return bool(getattr(model, "_is_stateful", False))


def new_model(kind: Any, config: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A model of this class with new weights; by its constructor where the name is gone."""
    if attention is not None:
        set_attention(config, attention)
    make = getattr(kind, "_from_config", None)
    return kind(config).to(dtype) if make is None else make(config, dtype=dtype)


# transformers: generation


def eos_ids(config: Any) -> frozenset[int]:
    """Of a configuration that `generate` has prepared; its public field where the tensor is gone."""
    ids = getattr(config, "_eos_token_tensor", config.eos_token_id)
    return frozenset() if ids is None else frozenset(torch.as_tensor(ids).flatten().tolist())


def pad_id(config: Any) -> int:
    """The same; 0 where there is none."""
    ids = getattr(config, "_pad_token_tensor", config.pad_token_id)
    return 0 if ids is None else int(ids)


def without_eos(config: Any) -> Any:
    """A copy of such a configuration that names no last token."""
    changed = copy.copy(config)
    name = "_eos_token_tensor" if hasattr(config, "_eos_token_tensor") else "eos_token_id"
    setattr(changed, name, None)
    return changed


def generation_defaults() -> dict[str, Any]:
    """What `generate` takes for fields that nobody set; without it, of those that we refuse."""
    from transformers import GenerationConfig

    defaults = getattr(GenerationConfig, "_get_default_generation_params", None)
    return dict(USUAL) if defaults is None else defaults()


def allowed_tokens_function(processor: Any) -> Callable[[int, Tensor], list[int]]:
    """That a PrefixConstrainedLogitsProcessor was made with."""
    found = getattr(processor, "_prefix_allowed_tokens_fn", None)
    if found is None:
        raise MissingNameError("PrefixConstrainedLogitsProcessor._prefix_allowed_tokens_fn")
    return found  # type: ignore[no-any-return]


def compile_everywhere(config: Any) -> None:
    """Lets `generate` compile on a CPU too. Where the name is gone it compiles on GPUs alone."""
    config._compile_all_devices = True


# torch


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Of everything in nested containers; without the name, in tuples, lists and dictionaries."""
    try:
        from torch.utils import _pytree
    except ImportError:
        return plain_tree_map(function, tree)
    return _pytree.tree_map(function, tree)


def plain_tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain_tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(plain_tree_map(function, value) for value in tree)
    return function(tree)


def plain_results() -> AbstractContextManager[Any]:
    """While entered, what is computed from a subclass of Tensor is no longer of that class. Documented by torch under
    this name; without it the results remember a class whose numbers they do not have, so it cannot be done without."""
    found = getattr(torch._C, "DisableTorchFunctionSubclass", None)
    if found is None:
        raise MissingNameError("torch._C.DisableTorchFunctionSubclass")
    return found()  # type: ignore[no-any-return]


def set_group_timeout(group: Any, seconds: float) -> None:
    """For collectives of a process group from now on; without the name they may take as long as torch lets them."""
    from torch.distributed import distributed_c10d

    change = getattr(distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(timedelta(seconds=seconds), group)


def forget_failed_group() -> None:
    """After processes that were to form the first group have not found each other. torch names groups by counting them,
    failed ones too; without the name this process finds no others, which count from the beginning."""
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    if world is not None and hasattr(world, "group_count"):
        world.group_count = 0


def gather_on_host() -> None:
    """From now on tensors of a GPU that layers of `transformers` gather over ranks go by way of the host: gloo ends the
    process where it is given them (pytorch/pytorch#152645). Without the name, whatever torch does with them."""
    if not _gathering and hasattr(torch.ops, "_c10d_functional"):
        _gathering.append(torch.library.Library("_c10d_functional", "IMPL"))
        _gathering[0].impl("all_gather_into_tensor", gathered_on_host, "CUDA")


def gathered_on_host(part: Tensor, ranks: int, group: str) -> Tensor:
    functions = torch.ops._c10d_functional
    found: Tensor = functions.wait_tensor(functions.all_gather_into_tensor(part.cpu(), ranks, group))
    return found.to(part.device)


_gathering: list[torch.library.Library] = []  # what is registered holds for as long as its library is there


def is_hooked(module: nn.Module) -> bool:
    """Where nothing says so: yes, and the module is left alone."""
    hooks = [getattr(module, name, True) for name in ("_forward_hooks", "_forward_pre_hooks")]
    return any(hooks)


def set_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """All of a module's own at once, in place of those that it shares with the module it was copied from."""
    if not hasattr(module, "_parameters"):
        raise MissingNameError("torch.nn.Module._parameters")
    module._parameters = dict(parameters)
