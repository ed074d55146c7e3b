"""A draft on disk: its own layers in eight bits or as they are, the map of its tokens, and a mark of its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgraph.errors import LoadError, UsageError
from draftgraph.models.faults import one_line, writing
from draftgraph.models.student import bare_student, own_names, text_config

FORMAT = 1
SECTION = "draftgraph"  # of config.json
WEIGHTS = "model.safetensors"
SCALE = ".scale"
MARKED_ROWS, MARKED_COLUMNS = 64, 16
TOLERANCE = 0.05


def is_draft_folder(spec: Any) -> bool:
    """Whether this is a folder that `save_draft` wrote."""
    try:
        return SECTION in json.loads((Path(spec).expanduser() / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def save_draft(student: Any, target: Any, folder: Path, bits: int = 16) -> None:
    """Writes what `load_draft` needs beside the target; with 8 bits, matrices are rounded row by row."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    parameters = dict(student.named_parameters())
    for name in own_names(student):
        weight = parameters[name].detach().float().cpu()
        if bits == 8 and weight.dim() == 2:
            tensors[name], tensors[name + SCALE] = rounded_rows(weight)
        else:
            tensors[name] = weight.to(torch.bfloat16 if bits <= 16 else torch.float32)
    token_map = getattr(student, "token_map", None)
    if token_map is not None:
        tensors["token_map"] = token_map.cpu().to(torch.int32)
    tensors["target_mark"] = mark_of(target)
    config = student.config.to_dict()
    config[SECTION] = {"format": FORMAT, "bits": bits, "target": name_of(target)}
    with writing("the draft", folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_draft(folder: Path, target: Any) -> Any:
    """The draft in a folder, around the embedding and output rows of its target, in the target's dtype and place."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = folder.expanduser()
    try:
        content = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"the draft in {folder} cannot be read ({one_line(error)}): copy or train it again") from error
    section = content.pop(SECTION)
    if section.get("format") != FORMAT:
        raise LoadError(f"the draft in {folder} has format {section.get('format')}: this version reads {FORMAT}")
    check_mark(tensors.pop("target_mark", None), target, f"the draft in {folder} was trained for {section['target']}")
    token_map = tensors.pop("token_map", None)
    config = type(target.config).from_dict(content)
    config._attn_implementation = target.config._attn_implementation
    student = bare_student(target, config, token_map)
    parameters = dict(student.named_parameters())
    missing = [name for name in own_names(student) if name not in tensors]
    if missing:
        raise LoadError(f"the draft in {folder} lacks {missing[0]}: train it again")
    with torch.no_grad():
        for name in own_names(student):
            weight, scale = tensors[name], tensors.get(name + SCALE)
            parameters[name].copy_(weight.float() * scale[:, None] if scale is not None else weight)
    student.requires_grad_(False)
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
    name = Path(str(getattr(target.config, "_name_or_path", "") or type(target).__name__)).name
    return f"{name} ({text_config(target.config).num_hidden_layers} layers)"
