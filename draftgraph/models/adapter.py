"""From the folder of a PEFT adapter to its weights. What is more than LoRA is refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftgraph.engine.adapters import Adapter, LowRank
from draftgraph.errors import LoadError, one_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields that are read here, or that say how an adapter came about and nothing of what it computes.
KNOWN = {
    *("peft_type", "bias", "lora_alpha", "alpha_pattern", "use_rslora", "r", "rank_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "fan_in_fan_out"),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "lora_dropout"),
    *("peft_version", "megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying"),
}
STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the model's own weights
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def read_adapter(name: str, folder: Path) -> Adapter:
    """The weights of a LoRA adapter that requests know by this name."""
    try:
        if not (folder / WEIGHTS).is_file():
            pickled = " (adapter_model.bin is a pickle, which can run code)" if list(folder.glob("*.bin")) else ""
            raise ValueError(f"there is no {WEIGHTS}{pickled}: give the folder that PEFT's save_pretrained wrote")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        refuse_more_than_lora(config)
        return low_ranks(config, load_file(folder / WEIGHTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"the adapter {name} in {folder} cannot be served: {one_line(error)}") from error


def refuse_more_than_lora(config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG} is not that of a LoRA adapter")
    if config.get("bias", "none") != "none":
        raise ValueError("it has biases of its own: train it with bias='none'")
    if (start := config.get("init_lora_weights")) not in STARTS:
        raise ValueError(f"its start, {start}, changes the model's own weights: convert it to a plain LoRA adapter")
    if unknown := sorted(name for name, value in config.items() if value and name not in KNOWN):
        raise ValueError(f"it uses {', '.join(unknown)}: merge it into its model, or train it without")


def low_ranks(config: dict[str, Any], tensors: dict[str, Tensor]) -> Adapter:
    """By the names of modules."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (named := NAME.fullmatch(key)) is None or tensor.dim() != 2:
            raise ValueError(f"{key} is no weight of a linear layer's LoRA: merge it into its model")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{key} has numbers that are not finite: train or fetch it again")
        pairs.setdefault(named[1], {})[named[2]] = tensor.float()
    found = {}
    for place, pair in pairs.items():
        if len(pair) != 2 or len(pair["A"]) != pair["B"].shape[1]:
            raise ValueError(f"lora_A and lora_B of {place} do not fit each other: copy or fetch it again")
        found[place] = LowRank(pair["A"], (pair["B"].t() * factor(config, place, len(pair["A"]))).contiguous())
    return found


def factor(config: dict[str, Any], place: str, rank: int) -> float:
    """Of the adapter's part in the outputs of this module."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[one] for one in patterns if re.match(rf"(.*\.)?({one})$", place)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
