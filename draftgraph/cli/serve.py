"""`draftgraph serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftgraph.cli.chat import Target
from draftgraph.cli.errors import complain
from draftgraph.cli.options import MODELS, Settings, option
from draftgraph.cli.terminal import busy
from draftgraph.errors import DraftGraphError

SERVE_OPTIONS = (
    *MODELS,
    *("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length", "growth", "cost"),
    *("profile", "config", "debug"),
)
DEFAULT_NAME = "SmolLM2-135M-Instruct"
KEYS = "DRAFTGRAPH_API_KEYS"


server, limit, sampling = (partial(option, panel) for panel in ("Server", "Limits", "Sampling"))


def serve(
    settings: Settings,
    model: Target = None,
    host: Annotated[str, server("Address to listen on; 0.0.0.0: all of this machine's", "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, server("Port to listen on; 0: any that is free", least=0, most=65535)] = 8000,
    name: Annotated[str | None, server("What clients call the model; left out: its name or folder")] = None,
    key_file: Annotated[
        str | None,
        typer.Option(
            "--api-keys",
            help=f"Keys that are let in, one a line; further ones, with commas between them, from {KEYS}",
            rich_help_panel="Server",
            metavar="FILE",
            show_envvar=False,
        ),
    ] = None,
    cors_origin: Annotated[list[str] | None, server("Let pages from there ask; may be given again", "ORIGIN")] = None,
    allow_host: Annotated[list[str] | None, server("Answer under this name too; may be given again", "NAME")] = None,
    vllm_metrics: Annotated[bool, server("Figures of drafting also under vLLM's names")] = False,
    log_prompts: Annotated[bool, server("Write what is asked into the log")] = False,
    max_texts: Annotated[int, limit("Requests answered together", least=1)] = 64,
    max_waiting: Annotated[int, limit("Requests that may wait besides; further ones get status 429", least=0)] = 256,
    max_model_len: Annotated[
        int | None, limit("Tokens of a prompt and its answer; left out: all that the model takes", least=2)
    ] = None,
    slots: Annotated[
        int | None,
        limit("Tokens that keys and values are kept of; left out: as half of the free memory allows", least=64),
    ] = None,
    past_tokens: Annotated[
        int, limit("Of earlier answers under the same key that new ones may copy from; 0: none", least=0)
    ] = 0,
    max_new_tokens: Annotated[
        int | None, sampling("Of a chat that names no number; left out: as many as there is room for", least=1)
    ] = None,
    temperature: Annotated[float, sampling("Of requests that name none; 0: greedy", "N>=0", least=0, most=100)] = 1.0,
    deadline: Annotated[float, limit("Seconds for one request", "SECONDS", least=0.001)] = 600.0,
    grace: Annotated[float, limit("Seconds for requests under way when told to stop", "SECONDS", least=0)] = 30.0,
) -> None:
    """Answer OpenAI's clients: chats and completions, many at once, with metrics and a playground."""
    settings = replace(settings, target=model or settings.target)
    graph = asdict(settings.graph_config())
    refuse_missing_packages()
    from draftgraph.serve.settings import ServerSettings, is_loopback, read_keys

    keys = read_keys(Path(key_file) if key_file else None, os.environ.get(KEYS))
    if not keys and not is_loopback(host):
        complain(f"everybody who can reach {host} may use this server: --api-keys lets in only some")
    served = ServerSettings(
        model_name=name or name_of(settings.target),
        host=host,
        port=port,
        api_keys=keys,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        vllm_metrics=vllm_metrics,
        log_prompts=log_prompts,
        max_texts=max_texts,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        deadline=deadline,
        grace=grace,
        temperature=temperature,
        max_tokens=max_new_tokens,
    )
    with busy("starting"):
        from draftgraph.serve.run import run, served_tokenizer
    tokenizer = served_tokenizer(settings.target)
    limits = {"texts": max_texts, "waiting": max_waiting, "slots": slots, "past_tokens": past_tokens}
    options = {"name": served.model_name, "load": settings.model_arguments(), "graph": graph, "limits": limits}
    run(served, tokenizer, options)


def refuse_missing_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DraftGraphError(f"serve needs {error.name}: pip install 'draftgraph[serve]'") from error


def name_of(target: str | None) -> str:
    """A hub name as it is; of a folder or file, nothing of where it lies."""
    if target is None:
        return DEFAULT_NAME
    path = Path(target).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else target
