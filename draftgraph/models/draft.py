"""A draft made of its target: some of its layers, its embedding and rows of its output matrix; and its folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.engine.borrowing import adapters, unwrapped
from draftgraph.engine.ranks import on_every_rank, rank_count
from draftgraph.engine.sharding import whole
from draftgraph.errors import LoadError, UsageError, one_line
from draftgraph.files import ANOTHER_OUT, replacing, writing
from draftgraph.kernels.packed import PackedTensor, compressed
from draftgraph.kernels.products import GROUP
from draftgraph.models.faults import quiet_transformers
from draftgraph.models.packed_model import set_weight

FORMAT = 1
SECTION = "draftgraph"  # of config.json
WEIGHTS = "model.safetensors"
SCALE = ".scale"
MARKED_ROWS, MARKED_COLUMNS = 64, 16
TOLERANCE = 0.2  # of its numbers: a target in four bits is still itself
_whole_ends: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
UNKEPT = ("_name_or_path", "quantization_config")  # where the target was, and how it was packed there


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
    return [round(index * (of - 1) / max(layers - 1, 1)) for index in range(layers)]


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
        student = private.new_model(type(target), config, target.dtype, private.attention_of(target.config))
    student.set_input_embeddings(lent_embedding(target))
    lend_output_rows(student, target, token_map)
    return student.to(target.get_input_embeddings().weight.device).eval()


def lent_embedding(target: Any) -> nn.Module:
    """A module of its own around the target's embedding matrix: freezing it leaves the target's as it is."""
    embedding: nn.Module = copy.copy(ends_of(target)[0])
    frozen = {name: nn.Parameter(value.detach(), False) for name, value in embedding.named_parameters(recurse=False)}
    private.set_parameters(embedding, frozen)
    return embedding


def ends_of(target: Any) -> tuple[Any, Any]:
    """The embedding and the output layer of a target; of one that is split over ranks, copies of the whole."""
    if rank_count(target) == 1:
        return target.get_input_embeddings(), target.get_output_embeddings()
    if target not in _whole_ends:
        _whole_ends[target] = whole_ends(target)
    return _whole_ends[target]


@on_every_rank
def whole_ends(target: Any) -> tuple[Any, Any]:
    return whole(target.get_input_embeddings()), whole(target.get_output_embeddings())


def lend_output_rows(student: Any, target: Any, token_map: Tensor | None) -> None:
    """Lets a student write the tokens of the map, or all, with the target's rows for them."""
    original = ends_of(target)[1]
    weight, bias = getattr(original, "weight", None), getattr(original, "bias", None)
    if weight is None or weight.dim() != 2 or not (is_plain(weight) or is_packed(weight)):
        raise UsageError(f"the output matrix of {type(target).__name__} is quantised: load the target without that")
    kept = slice(None) if token_map is None else token_map.to(weight.device)
    rows = weight.detach()
    if token_map is not None:
        rows = rows.only(token_map) if is_packed(weight) else rows[kept]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias.detach()[kept], requires_grad=False)
    student.set_output_embeddings(head)
    if token_map is not None:
        student.register_buffer("token_map", token_map.to(weight.device, torch.long), persistent=False)


def refuse_adapters(target: Any) -> None:
    if unwrapped(target) is not target or adapters(target):
        raise UsageError("the target has adapters: merge them into it (merge_and_unload) and give what that returns")


def cut_student(target: Any, picked: list[int]) -> Any:
    """A student that starts from copies of the target's layers at these places."""
    refuse_adapters(target)
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


def is_packed(weight: Tensor) -> bool:
    return isinstance(weight.detach(), PackedTensor)


def own_weights(student: Any) -> dict[str, Tensor]:
    """The parameters, and buffers that are stored, which a student does not borrow from its target."""
    lent = (student.get_input_embeddings(), student.get_output_embeddings())
    places = tuple(f"{name}." for name, part in student.named_modules() if any(part is one for one in lent))
    return {name: value for name, value in student.state_dict(keep_vars=True).items() if not name.startswith(places)}


def is_draft_folder(spec: Any) -> bool:
    """Whether this is a folder that `save_draft` wrote."""
    try:
        return isinstance(json.loads((Path(spec).expanduser() / "config.json").read_text())[SECTION], dict)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def save_draft(student: Any, target: Any, folder: Path, bits: int = 16) -> None:
    """Writes what `load_draft` needs beside the target; with 8 bits, matrices are rounded row by row."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, value in own_weights(student).items():
        weight = value.detach().cpu()
        if not weight.is_floating_point():
            tensors[name] = weight.clone()
        elif bits == 8 and weight.dim() == 2:
            scale = tensors[name + SCALE] = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127  # of each row
            tensors[name] = (weight.float() / scale[:, None]).round().to(torch.int8)
        else:
            tensors[name] = weight.to(torch.bfloat16 if bits <= 16 else torch.float32, copy=True)
    token_map = getattr(student, "token_map", None)
    if token_map is not None:
        tensors["token_map"] = token_map.cpu().to(torch.int32)
    tensors["target_mark"] = mark_of(target)
    config = {name: value for name, value in student.config.to_dict().items() if name not in UNKEPT}
    config[SECTION] = {"format": FORMAT, "bits": bits, "target": name_of(target)}
    with writing("the draft", folder, ANOTHER_OUT):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as file:
            save_file(tensors, file, metadata={"format": "pt"})
        with replacing(folder / "config.json") as file:
            file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_draft(folder: Path, target: Any) -> Any:
    """The draft in a folder, around the embedding and output rows of its target, in the target's dtype and place."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder, target = folder.expanduser(), unwrapped(target)
    try:
        content, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"the draft in {folder} cannot be read ({one_line(error)}): copy or train it again") from error
    section = content.pop(SECTION, {})
    if section.get("format") != FORMAT:
        raise LoadError(f"the draft in {folder} has format {section.get('format')}: this version reads {FORMAT}")
    mark, here = tensors.pop("target_mark", None), mark_of(target)
    if mark is None or mark.shape != here.shape or (mark - here).abs().mean() > TOLERANCE * mark.abs().mean():
        raise UsageError(
            f"the draft in {folder} was trained for {section.get('target')}, and {name_of(target)} is another model: "
            "give the target that it was made for"
        )
    try:
        draft = filled_student(target, content, tensors)
    except UsageError:
        raise
    except Exception as error:  # a configuration checks itself in its own ways
        raise LoadError(f"the draft in {folder} is damaged ({one_line(error)}): copy or train it again") from error
    draft.config.name_or_path = str(folder)
    return draft


def filled_student(target: Any, content: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    config = type(target.config).from_dict(content)
    student = bare_student(target, config, tensors.pop("token_map", None))
    packed = is_packed(target.get_input_embeddings().weight)
    with torch.no_grad():
        for name, own in own_weights(student).items():
            weight, scale = tensors[name], tensors.get(name + SCALE)
            weight = weight if scale is None else weight.float() * scale[:, None]
            if weight.shape != own.shape:
                raise ValueError(f"{name} is {list(weight.shape)}, not {list(own.shape)}")
            if packed and weight.dim() == 2 and weight.shape[1] % GROUP == 0:
                set_weight(student, name, compressed(weight, 8))
                continue
            own.copy_(weight)
            own.requires_grad_(False)
    return student


def mark_of(target: Any) -> Tensor:
    """A few numbers of the target's embedding, by which it is known again in any dtype."""
    weight: Tensor = ends_of(target)[0].weight.detach()
    rows = torch.linspace(0, weight.shape[0] - 1, min(MARKED_ROWS, weight.shape[0])).long().to(weight.device)
    return weight[rows][:, :MARKED_COLUMNS].float().cpu().contiguous()  # rows alone: a packed weight stays packed


def name_of(target: Any) -> str:
    name = Path(str(getattr(target.config, "name_or_path", "") or type(target).__name__)).name
    return f"{name} ({text_config(target.config).num_hidden_layers} layers)"


def save_plain(student: Any, target: Any, tokenizer: Any, folder: Path) -> None:
    """A model of its own: the student's layers, the target's whole embedding and output matrix."""
    config = student_config(student.config, list(range(text_config(student.config).num_hidden_layers)))
    config.tie_word_embeddings = target.config.tie_word_embeddings
    text_config(config).tie_word_embeddings = text_config(target.config).tie_word_embeddings
    plain = private.new_model(type(target), config, target.dtype)
    own, given = own_weights(student), target.state_dict()
    plain.load_state_dict({name: own[name] if name in own else given[name] for name in plain.state_dict()})
    plain.generation_config = target.generation_config
    with writing("the exported draft", folder, ANOTHER_OUT), quiet_transformers():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
