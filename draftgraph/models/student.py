"""A draft cut from its target: a few of its layers, its embedding, and some rows of its output matrix."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph.errors import UsageError


def text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def layer_stack(model: Any) -> tuple[str, nn.ModuleList]:
    """The name and the list of a model's decoder layers."""
    count = text_config(model.config).num_hidden_layers
    stacks = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    for name, part in stacks:
        if len(part) == count:
            return name, part
    raise UsageError(f"{type(model).__name__} has no list of {count} layers to cut a student from")


def output_rows(target: Any) -> tuple[Tensor, Tensor | None]:
    """The output matrix [vocabulary, width] of a target and its bias."""
    head = target.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise UsageError(f"the output matrix of {type(target).__name__} is quantised: load the target without that")
    return weight, getattr(head, "bias", None)


def spread(layers: int, of: int) -> list[int]:
    """Layers evenly from the first to the last.

    >>> spread(4, 30)
    [0, 10, 19, 29]
    """
    if layers == 1:
        return [0]
    return [round(index * (of - 1) / (layers - 1)) for index in range(layers)]


def picked_layers(choice: str, layers: int, of: int) -> list[int]:
    """The places of a student's layers in its target: `spread`, `first`, `last`, or numbers with commas."""
    if choice not in ("spread", "first", "last"):
        try:
            picked = [int(part) for part in choice.split(",")]
        except ValueError:
            raise UsageError(f"start_from must be spread, first, last or numbers: 0,9,18; not {choice!r}") from None
        if len(picked) != layers:
            raise UsageError(f"start_from names {len(picked)} layers for a student of {layers}: they must be as many")
        return picked
    if layers > of:
        raise UsageError(f"the target has {of} layers: a student cannot have {layers}")
    return {"spread": spread(layers, of), "first": list(range(layers)), "last": list(range(of - layers, of))}[choice]


def student_config(config: Any, picked: list[int]) -> Any:
    """The target's configuration for these layers alone; lists with an entry per layer are cut alike."""
    cut = copy.deepcopy(config)
    inner = text_config(cut)
    count = inner.num_hidden_layers
    for name, value in list(vars(inner).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(inner, name, [value[layer] for layer in picked])
    inner.num_hidden_layers = len(picked)
    inner.tie_word_embeddings = cut.tie_word_embeddings = False
    if getattr(inner, "max_window_layers", None) is not None:
        inner.max_window_layers = min(inner.max_window_layers, len(picked))
    return cut


def bare_student(target: Any, config: Any, token_map: Tensor | None) -> Any:
    """A student with weights yet to be set, around the target's embedding and output rows, which it does not own."""
    attention = getattr(config, "_attn_implementation", None)
    student = type(target)._from_config(config, attn_implementation=attention)
    student.to(dtype=target.dtype)
    student.set_input_embeddings(target.get_input_embeddings())
    weight, bias = output_rows(target)
    kept = slice(None) if token_map is None else token_map.to(weight.device)
    head = nn.Linear(weight.shape[1], weight[kept].shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight.detach()[kept], requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias.detach()[kept], requires_grad=False)
    student.set_output_embeddings(head)
    if token_map is not None:
        student.register_buffer("token_map", token_map.to(torch.long), persistent=False)
    return student.to(target.get_input_embeddings().weight.device).eval()


def cut_student(target: Any, picked: list[int], token_map: Tensor | None = None) -> Any:
    """A student that starts from copies of the target's layers at these places."""
    name, stack = layer_stack(target)
    wrong = [layer for layer in picked if not 0 <= layer < len(stack)]
    if wrong:
        raise UsageError(f"the target has {len(stack)} layers, 0 to {len(stack) - 1}: there is no layer {wrong[0]}")
    student = bare_student(target, student_config(target.config, picked), token_map)
    given = target.state_dict()
    with torch.no_grad():
        for key, value in student.state_dict().items():
            source = key
            if key.startswith(f"{name}."):
                number, rest = key.removeprefix(f"{name}.").split(".", 1)
                source = f"{name}.{picked[int(number)]}.{rest}"
            if key in own_names(student):
                value.copy_(given[source])
    return student


def own_names(student: Any) -> list[str]:
    """The names of the weights that a student does not borrow from its target."""
    borrowed = {
        id(parameter)
        for part in (student.get_input_embeddings(), student.get_output_embeddings())
        for parameter in part.parameters()
    }
    return [name for name, parameter in student.named_parameters() if id(parameter) not in borrowed]
