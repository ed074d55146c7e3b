"""What the API process knows of a model: its name and its tokenizer, not its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftgraph.errors import UsageError
from draftgraph.models.load import find_source
from draftgraph.models.tokens import load_tokenizer


def served_tokenizer(target: str | None) -> Any:
    """The tokenizer that `draftgraph.load` would find for this target."""
    source = find_source(target, "target", None, {"use_safetensors": True, "trust_remote_code": False})
    tokenizer = load_tokenizer(source, trust_remote_code=False) or load_tokenizer(base_of(source))
    if tokenizer is None:
        raise UsageError(f"{target} has no tokenizer: a server needs one")
    return tokenizer


def base_of(source: str) -> str:
    """The model under an adapter; any other is its own."""
    file = Path(source) / "adapter_config.json"
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else source
