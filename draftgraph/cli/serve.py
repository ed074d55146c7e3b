"""`draftgraph serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftgraph.cli.options import MODELS, SPLIT, Settings
from draftgraph.cli.terminal import busy, complain
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.extras import install_command
from draftgraph.serve.settings import ServerSettings, is_loopback, read_keys

SERVE_OPTIONS = (
    *MODELS,
    SPLIT,
    *("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length", "growth", "cost"),
    *("exact", "profile", "config", "debug"),
)
DEFAULT_NAME = "SmolLM2-135M-Instruct"


def serve(
    settings: Settings,
    model: str | None = None,
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
) -> None:
    """Answer OpenAI's clients: chats and completions, many at once, with metrics and a playground."""
    settings = replace(settings, target=model or settings.target)
    graph = asdict(settings.graph_config())
    refuse_missing_packages()
    name = name or name_of(settings.target)
    adapters = adapter_folders(lora or [], [name, *(alias or [])])
    keys = read_keys(key_file)
    served = ServerSettings(
        model_name=name,
        aliases=tuple(alias or ()),
        adapters=tuple(adapters),
        api_keys=keys,
        key_file=key_file,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        max_tokens=max_new_tokens,
        **more,
    )
    if not keys and not is_loopback(served.host):
        complain(f"everybody who can reach {served.host} may use this server: --api-keys lets in only some")
    with busy("starting"):
        from draftgraph.serve.run import run, served_tokenizer
    tokenizer = served_tokenizer(settings.target)
    limits = {
        "texts": served.max_texts,
        "slots": slots,
        "past_tokens": past_tokens,
        "chunk": served.chunked_prefill_size,
        "nodes": max(served.max_request_nodes, served.max_request_depth + 1),
    }
    options = {"name": name, "load": settings.model_arguments(), "graph": graph, "limits": limits, "adapters": adapters}
    run(served, tokenizer, options)


def adapter_folders(given: list[str], taken: list[str]) -> dict[str, str]:
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


def refuse_missing_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DraftGraphError(f"serve needs {error.name}: {install_command('serve')}") from error


def name_of(target: str | None) -> str:
    """A hub name as it is; of a folder or file, nothing of where it lies."""
    if target is None:
        return DEFAULT_NAME
    path = Path(target).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else target
