"""`draftgraph serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from draftgraph.cli.chat import Target
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option, refuse_outside
from draftgraph.cli.terminal import busy
from draftgraph.errors import DraftGraphError

SERVE_OPTIONS = (
    *("target", "draft", "device", "dtype"),
    *("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length", "growth", "cost"),
    *("profile", "config", "debug"),
)
DEFAULT_NAME = "SmolLM2-135M-Instruct"
KEYS = "DRAFTGRAPH_API_KEYS"


def server(help: str, metavar: str | None = None, **more: Any) -> Any:
    return option("Server", help, metavar, **more)


def limit(help: str, metavar: str = "N>=1") -> Any:
    return option("Limits", help, metavar)


Host = Annotated[str, server("Address to listen on; 0.0.0.0: all of this machine's", "ADDRESS")]
Port = Annotated[int, server("Port to listen on; 0: any that is free", "0..65535")]
Name = Annotated[str | None, server("What clients call the model; left out: its name or folder")]
KeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-keys",
        help=f"Keys that are let in, one a line; further ones, with commas between them, from {KEYS}",
        rich_help_panel="Server",
        metavar="FILE",
        show_envvar=False,
    ),
]
CorsOrigin = Annotated[list[str] | None, server("Let pages from there ask; may be given again", "ORIGIN")]
AllowHost = Annotated[list[str] | None, server("Answer under this name too; may be given again", "NAME")]
VLLMMetrics = Annotated[bool, server("Figures of drafting also under vLLM's names")]
LogPrompts = Annotated[bool, server("Write what is asked into the log")]
MaxTexts = Annotated[int, limit("Requests answered together")]
MaxWaiting = Annotated[int, limit("Requests that may wait besides; further ones get status 429", "N>=0")]
MaxModelLen = Annotated[
    int | None, limit("Tokens of a prompt and its answer; left out: all that the model takes", "N>=2")
]
MaxNewTokens = Annotated[
    int | None, option("Sampling", "Of a chat that names no number; left out: as many as there is room for", "N>=1")
]
Temperature = Annotated[float, option("Sampling", "Of requests that name none; 0: greedy", "N>=0")]
Slots = Annotated[
    int | None, limit("Tokens that keys and values are kept of; left out: as half of the free memory allows", "N>=64")
]
PastTokens = Annotated[int, limit("Of earlier answers under the same key that new ones may copy from; 0: none", "N>=0")]
Deadline = Annotated[float, limit("Seconds for one request", "SECONDS")]
Grace = Annotated[float, limit("Seconds for requests under way when told to stop", "SECONDS")]


def serve(
    settings: Settings,
    model: Target = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    key_file: KeyFile = None,
    cors_origin: CorsOrigin = None,
    allow_host: AllowHost = None,
    vllm_metrics: VLLMMetrics = False,
    log_prompts: LogPrompts = False,
    max_texts: MaxTexts = 64,
    max_waiting: MaxWaiting = 256,
    max_model_len: MaxModelLen = None,
    slots: Slots = None,
    past_tokens: PastTokens = 0,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 1.0,
    deadline: Deadline = 600.0,
    grace: Grace = 30.0,
) -> None:
    """Answer OpenAI's clients: chats and completions, many at once, with metrics and a playground."""
    for given, value, least, most in (
        ("port", port, 0, 65535),
        ("max_texts", max_texts, 1, None),
        ("max_waiting", max_waiting, 0, None),
        ("max_model_len", max_model_len or 2, 2, None),
        ("slots", slots or 64, 64, None),
        ("past_tokens", past_tokens, 0, None),
        ("max_new_tokens", max_new_tokens or 1, 1, None),
        ("temperature", temperature, 0, 100),
        ("deadline", deadline, 0.001, None),
        ("grace", grace, 0, None),
    ):
        refuse_outside(given, value, least, most)
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
