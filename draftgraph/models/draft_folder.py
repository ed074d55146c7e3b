"""A draft on disk: its own layers in eight bits or as they are, the map of its tokens, and a mark of its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import LoadError, UsageError
from draftgraph.models.cache import replacing
from draftgraph.models.faults import one_line, writing
from draftgraph.models.student import bare_student, own_weights, text_config

FORMAT = 1
SECTION = "draftgraph"  # of config.json
WEIGHTS = "model.safetensors"
SCALE = ".scale"
MARKED_ROWS, MARKED_COLUMNS = 64, 16
TOLERANCE = 0.2  # of its numbers: a target in four bits is still itself
UNKEPT = ("_name_or_path", "quantization_config")  # where the target was, and how it was packed there
ELSEWHERE = "give --out a folder"


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
            tensors[name], tensors[name + SCALE] = rounded_rows(weight.float())
        else:
            tensors[name] = weight.to(torch.bfloat16 if bits <= 16 else torch.float32, copy=True)
    token_map = getattr(student, "token_map", None)
    if token_map is not None:
        tensors["token_map"] = token_map.cpu().to(torch.int32)
    tensors["target_mark"] = mark_of(target)
    config = {name: value for name, value in student.config.to_dict().items() if name not in UNKEPT}
    config[SECTION] = {"format": FORMAT, "bits": bits, "target": name_of(target)}
    with writing("the draft", folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as file:
            save_file(tensors, file, metadata={"format": "pt"})
        with replacing(folder / "config.json") as file:
            file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_draft(folder: Path, target: Any) -> Any:
    """The draft in a folder, around the embedding and output rows of its target, in the target's dtype and place."""
    folder, target = folder.expanduser(), unwrapped(target)
    content, tensors = read_draft(folder)
    section = content.pop(SECTION, {})
    if section.get("format") != FORMAT:
        raise LoadError(f"the draft in {folder} has format {section.get('format')}: this version reads {FORMAT}")
    made_for = f"the draft in {folder} was trained for {section.get('target')}"
    check_mark(tensors.pop("target_mark", None), target, made_for)
    try:
        draft = filled_student(target, content, tensors)
    except UsageError:
        raise
    except Exception as error:  # a configuration checks itself in its own ways
        raise LoadError(f"the draft in {folder} is damaged ({one_line(error)}): copy or train it again") from error
    draft.config.name_or_path = str(folder)
    return draft


def read_draft(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"the draft in {folder} cannot be read ({one_line(error)}): copy or train it again") from error


def filled_student(target: Any, content: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    config = type(target.config).from_dict(content)
    private.set_attention(config, private.attention_of(target.config))
    student = bare_student(target, config, tensors.pop("token_map", None))
    with torch.no_grad():
        for name, own in own_weights(student).items():
            weight, scale = tensors[name], tensors.get(name + SCALE)
            weight = weight if scale is None else weight.float() * scale[:, None]
            if weight.shape != own.shape:
                raise ValueError(f"{name} is {list(weight.shape)}, not {list(own.shape)}")
            own.copy_(weight)
            own.requires_grad_(False)
    return student


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in eight bits and a scale for each of its rows."""
    scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def mark_of(target: Any) -> Tensor:
    """A few numbers of the target's embedding, by which it is known again in any dtype."""
    weight: Tensor = target.get_input_embeddings().weight.detach()
    rows = torch.linspace(0, weight.shape[0] - 1, min(MARKED_ROWS, weight.shape[0])).long().to(weight.device)
    return weight[rows, :MARKED_COLUMNS].float().cpu().contiguous()


def check_mark(mark: Tensor | None, target: Any, made_for: str) -> None:
    """Refuses what was made for another target."""
    here = mark_of(target)
    same_shape = mark is not None and mark.shape == here.shape
    if mark is None or not same_shape or (mark - here).abs().mean() > TOLERANCE * mark.abs().mean():
        raise UsageError(f"{made_for}, and {name_of(target)} is another model: give the target that it was made for")


def name_of(target: Any) -> str:
    name = Path(str(getattr(target.config, "name_or_path", "") or type(target).__name__)).name
    return f"{name} ({text_config(target.config).num_hidden_layers} layers)"
