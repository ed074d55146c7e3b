"""A draft cut from its target: a few of its layers, its embedding, and some rows of its output matrix."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.engine.borrowing import adapters, unwrapped
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
        if wrong := [layer for layer in picked if not 0 <= layer < of]:
            raise UsageError(f"the target has {of} layers, 0 to {of - 1}: there is no layer {wrong[0]}")
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
        if isinstance(value, list) and len(value) == count and not name.endswith("_token_id"):
            setattr(inner, name, [value[layer] for layer in picked])
    inner.num_hidden_layers = len(picked)
    inner.tie_word_embeddings = cut.tie_word_embeddings = False
    if getattr(inner, "max_window_layers", None) is not None:
        inner.max_window_layers = min(inner.max_window_layers, len(picked))
    return cut


def bare_student(target: Any, config: Any, token_map: Tensor | None = None) -> Any:
    """A student with weights yet to be set, around the target's embedding and output rows, which it does not own."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        student = private.new_model(type(target), config, target.dtype, private.attention_of(config))
    student.set_input_embeddings(view_of(target.get_input_embeddings()))
    lend_output_rows(student, target, token_map)
    return student.to(target.get_input_embeddings().weight.device).eval()


def view_of(module: nn.Module) -> nn.Module:
    """The same weights in a module of their own, not to be trained: whoever freezes it leaves the original alone."""
    view = copy.copy(module)
    parameters = module.named_parameters(recurse=False)
    unshared = {name: nn.Parameter(value.detach(), requires_grad=False) for name, value in parameters}
    private.set_parameters(view, unshared)
    return view


def lend_output_rows(student: Any, target: Any, token_map: Tensor | None) -> None:
    """Lets a student write the tokens of the map, or all, with the target's rows for them."""
    original = target.get_output_embeddings()
    weight, bias = getattr(original, "weight", None), getattr(original, "bias", None)
    if weight is None or weight.dim() != 2 or not is_plain(weight):
        raise UsageError(f"the output matrix of {type(target).__name__} is quantised: load the target without that")
    kept = slice(None) if token_map is None else token_map.to(weight.device)
    rows = weight.detach()[kept]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias.detach()[kept], requires_grad=False)
    student.set_output_embeddings(head)
    if token_map is not None:
        student.register_buffer("token_map", token_map.to(weight.device, torch.long), persistent=False)


def cut_student(target: Any, picked: list[int]) -> Any:
    """A student that starts from copies of the target's layers at these places."""
    if unwrapped(target) is not target or adapters(target):
        raise UsageError("the target has adapters: merge them into it (merge_and_unload) and give what that returns")
    name, _ = layer_stack(target)
    student = bare_student(target, student_config(target.config, picked))
    given = target.state_dict()
    with torch.no_grad():
        for key, value in own_weights(student).items():
            place, _, rest = key.removeprefix(f"{name}.").partition(".")
            source = f"{name}.{picked[int(place)]}.{rest}" if key.startswith(f"{name}.") else key
            found = given.get(source)
            if found is not None and value.is_floating_point() and not is_plain(found):
                raise UsageError(f"{source} of the target is quantised: load the target without that")
            if found is None or found.shape != value.shape:
                raise UsageError(
                    f"{type(target).__name__} builds a layer after its number, and {source} does not fit into the "
                    "student: choose layers with start_from so that each stands where one of its kind stood, or first"
                )
            value.copy_(found)
    return student


def is_plain(weight: Tensor) -> bool:
    """Whether the numbers of a weight stand there themselves, neither packed nor quantised."""
    return weight.is_floating_point() and type(weight.detach()) is Tensor


def own_weights(student: Any) -> dict[str, Tensor]:
    """The parameters, and buffers that are stored, which a student does not borrow from its target."""
    lent = (student.get_input_embeddings(), student.get_output_embeddings())
    places = tuple(f"{name}." for name, part in student.named_modules() if any(part is one for one in lent))
    return {name: value for name, value in student.state_dict(keep_vars=True).items() if not name.startswith(places)}
