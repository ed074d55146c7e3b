"""A model with weights of 4 or 8 bits: made from one with plain weights, or in a folder, where one file of safetensors
is mapped into memory and not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftgraph.files import PACKED as WEIGHTS
from draftgraph.kernels.packed import PackedTensor, aligned, compressed
from draftgraph.kernels.products import GROUP
from draftgraph.models.faults import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINE = 64  # bytes that the processor reads at a time: packed weights begin at such a place


def is_packed_folder(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def bare_model(config: Any) -> PreTrainedModel:
    """A model without any weights."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
    return model


def set_weight(model: nn.Module, name: str, weight: Tensor) -> None:
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, nn.Parameter(weight, requires_grad=False))


def finish(model: Any) -> None:
    """What is computed and not loaded: shared weights, and buffers of a model that was made without memory."""
    model.tie_weights()
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh = type(module)(config=model.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)


@torch.no_grad()
def compress(model: Any, bits: int) -> float:
    """Puts the matrices of a model into 4 or 8 bits, those that are used as an embedding too; returns what is lost: the
    root mean square of the differences, as a part of that of the weights."""
    lost = size = 0.0
    done: dict[int, nn.Parameter] = {}  # some modules share theirs
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if type(module) not in (nn.Linear, nn.Embedding) or not fits(weight):
            continue
        if id(weight) not in done:
            packed = compressed(weight, bits)
            lost += float((packed.numbers() - weight).square().sum())
            size += float(weight.float().square().sum())
            done[id(weight)] = nn.Parameter(packed, requires_grad=False)
        module.weight = done[id(weight)]
    for weight in model.parameters():
        weight.data = weight.data if isinstance(weight, PackedTensor) else weight.data.float()
    return (lost / size) ** 0.5 if size else 0.0


def fits(weight: Any) -> bool:
    plain = isinstance(weight, Tensor) and type(weight.detach()) is Tensor and weight.is_floating_point()
    return plain and weight.dim() == 2 and weight.shape[1] % GROUP == 0


def save_packed(model: Any, folder: Path) -> None:
    """Weights of few bits first, each at the beginning of a line."""
    from safetensors.torch import save_file

    named = dict(model.named_parameters())  # shared ones once
    outputs = {name: weight.shape[0] for name, weight in named.items() if isinstance(weight.data, PackedTensor)}
    tensors = {
        name: weight.data.blocks if name in outputs else filled_up(weight.detach()) for name, weight in named.items()
    }
    shapes = {name: list(weight.shape) for name, weight in named.items() if name not in outputs}
    told = {"format": "pt", "outputs": json.dumps(outputs), "shapes": json.dumps(shapes), "fill": ""}
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    file = folder / WEIGHTS
    save_file(tensors, file, metadata=told)
    if missing := -data_start(file) % LINE:  # a longer header puts the weights where lines begin
        save_file(tensors, file, metadata=told | {"fill": " " * missing})


def filled_up(weight: Tensor) -> Tensor:
    """As a row of numbers that ends where a line does."""
    flat = weight.reshape(-1)
    missing = -flat.numel() * flat.element_size() % LINE // flat.element_size()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def data_start(file: Path) -> int:
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def load_packed(folder: Path, config: Any) -> PreTrainedModel:
    from safetensors import safe_open
    from transformers import GenerationConfig

    model = bare_model(config)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        told = file.metadata()
        outputs, shapes = json.loads(told["outputs"]), json.loads(told["shapes"])
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            held = file.get_tensor(name)
            if name in outputs:
                lined_up = held if held.data_ptr() % LINE == 0 else aligned(held.numpy())
                set_weight(model, name, PackedTensor(lined_up, outputs[name]))
            else:
                shape = shapes[name]
                set_weight(model, name, held[: torch.Size(shape).numel()].reshape(shape))
    finish(model)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = str(folder)
    return model
