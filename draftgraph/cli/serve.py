"""`draftgraph serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftgraph.cli.options import MODELS, SPLIT, Settings
from draftgraph.cli.terminal import busy, complain
from draftgraph.errors import DraftGraphError
from draftgraph.extras import install_command
from draftgraph.serve.service import service_of
from draftgraph.serve.settings import is_loopback

SERVE_OPTIONS = (
    *MODELS,
    SPLIT,
    *("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length", "growth", "cost"),
    *("exact", "profile", "config", "debug"),
)


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
    service = service_of(
        settings.model_arguments(),
        settings.graph_config(),
        name=name,
        alias=alias,
        lora=lora,
        key_file=key_file,
        cors_origin=cors_origin,
        allow_host=allow_host,
        slots=slots,
        past_tokens=past_tokens,
        max_new_tokens=max_new_tokens,
        **more,
    )
    refuse_missing_packages()
    if not service.settings.api_keys and not is_loopback(service.settings.host):
        complain(f"everybody who can reach {service.settings.host} may use this server: --api-keys lets in only some")
    with busy("starting"):
        from draftgraph.serve.run import run, served_tokenizer
    run(service.settings, served_tokenizer(service.target), service.engine_options)


def refuse_missing_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DraftGraphError(f"serve needs {error.name}: {install_command('serve')}") from error
