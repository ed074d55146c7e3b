"""What is served, from the options of `draftgraph serve`: on a command line, or as arguments of a Ray application."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftgraph.config import GraphConfig
from draftgraph.errors import UsageError
from draftgraph.serve.settings import ServerSettings, read_keys

DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Service:
    """What an API allows, and what its engine process is started with."""

    settings: ServerSettings
    target: str | None
    engine_options: dict[str, Any]


def service_of(
    load: dict[str, Any],
    graph: GraphConfig,
    *,
    name: str | None = None,
    alias: list[str] | None = None,
    lora: list[str] | None = None,
    key_file: str | None = None,
    cors_origin: list[str] | None = None,
    allow_host: list[str] | None = None,
    slots: int | None = None,
    past_tokens: int = 0,
    max_new_tokens: int | None = None,
    **more: Any,
) -> Service:
    """`load` are arguments of `draftgraph.load`, `more` fields of the settings under the same names."""
    target = load.get("target")
    name = name or name_of(target)
    adapters = adapter_folders(lora or [], [name, *(alias or [])])
    settings = ServerSettings(
        model_name=name,
        aliases=tuple(alias or ()),
        adapters=tuple(adapters),
        api_keys=read_keys(key_file),
        key_file=key_file,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        max_tokens=max_new_tokens,
        **more,
    )
    limits = {
        "texts": settings.max_texts,
        "slots": slots,
        "past_tokens": past_tokens,
        "chunk": settings.chunked_prefill_size,
        "nodes": max(settings.max_request_nodes, settings.max_request_depth + 1),
    }
    options = {"name": name, "load": load, "graph": asdict(graph), "limits": limits, "adapters": adapters}
    return Service(settings, target, options)


def adapter_folders(given: Iterable[str], taken: list[str]) -> dict[str, str]:
    """Folders of adapters by the names that requests give them."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise UsageError(f"--lora {one} is not NAME=FOLDER: give a name for requests and the adapter's folder")
        if name in (*taken, *found):
            raise UsageError(f"--lora {one}: the name {name} is taken; give each adapter a name of its own")
        found[name] = str(Path(folder).expanduser())
    return found


def name_of(target: str | None) -> str:
    """A hub name as it is; of a folder or file, nothing of where it lies."""
    if target is None:
        return DEFAULT_NAME
    path = Path(target).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else target
