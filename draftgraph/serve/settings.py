"""Every limit and switch of the server, in one place."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """What a server allows and how it behaves; the defaults suit one machine and a few clients."""

    model_name: str = "draftgraph"

    # where it listens, and to whom
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody who can connect is let in
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names it answers under besides its own, where no key is asked for
    log_prompts: bool = False
    vllm_metrics: bool = False  # figures of drafting also under vLLM's names

    # what a request gets that does not say
    temperature: float = 1.0  # as OpenAI has it
    max_tokens: int | None = None  # of a chat; None: as many as the context window has room for

    # what a request may ask for
    max_model_len: int | None = None  # None: the model's context window
    max_body: int = 4 * MEBIBYTE
    max_choices: int = 16
    max_prompts: int = 128
    max_stops: int = 16
    max_stop_length: int = 512

    # how many requests, and for how long
    max_texts: int = 64  # answered together
    max_waiting: int = 256  # besides those
    deadline: float = 600.0  # seconds for one request
    body_seconds: float = 30.0  # for a client to send its request
    grace: float = 30.0  # for requests under way when the server is told to stop

    # the engine process
    restart_wait: float = 0.5  # before it is started again; doubled with every failure in a row
    restart_wait_most: float = 30.0
    silence: float = 300.0  # seconds without a word from it, after which it is taken to be stuck


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
