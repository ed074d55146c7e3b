"""Every limit and switch of the server, and the API keys that it lets in."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftgraph.errors import UsageError

MEBIBYTE = 1 << 20
TENANT_LENGTH = 32
KEYS = "DRAFTGRAPH_API_KEYS"  # of the environment


@dataclass(frozen=True)
class ServerSettings:
    """What a server allows and how it behaves; the defaults suit one machine and a few clients."""

    model_name: str = "draftgraph"
    aliases: tuple[str, ...] = ()  # further names of the model
    adapters: tuple[str, ...] = ()  # names of those that requests may choose in place of the model

    # where it listens, and who is let in
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody who can connect is let in
    key_file: str | None = None  # where some of them stand; read again on SIGHUP
    tls_cert: str | None = None  # PEM files; read again on SIGHUP
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names it answers under besides its own, where no key is asked for
    log_prompts: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None  # of a collector of traces; None: as OpenTelemetry's variables say
    vllm_metrics: bool = False  # figures also under vLLM's names

    # defaults of a request
    temperature: float = 1.0  # as OpenAI has it
    max_tokens: int | None = None  # of a chat; None: as many as the context window has room for

    # how the model writes what is no content: a name, "auto" or "none"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    # what a request may ask for
    max_model_len: int | None = None  # None: the model's context window
    max_body: int = 4 * MEBIBYTE
    max_choices: int = 16
    max_prompts: int = 128
    max_stops: int = 16
    max_stop_length: int = 512
    max_request_nodes: int = 64  # of a graph
    max_request_depth: int = 16
    allow_trace: bool = True

    # how many requests, and for how long
    max_texts: int = 64  # answered together
    max_waiting: int = 256  # besides those; both are counted in answers
    max_per_key: int | None = None  # of both together; None: all of them, but for others' shares
    chunked_prefill_size: int = 512  # tokens of prompts that a step reads beside the answers of others
    max_connections: int = 1000  # fewer where fewer files may be open
    deadline: float = 600.0  # seconds for one request
    header_seconds: float = 10.0  # for a client to send the headers of a request
    body_seconds: float = 30.0  # for a client to send its body
    idle_seconds: float = 15.0  # for a client to begin its next request: longer than clients keep a connection
    grace: float = 30.0  # for requests under way when the server is told to stop

    # the engine process
    restart_wait: float = 0.5  # before it is started again; doubled with every failure in a row
    restart_wait_most: float = 30.0
    heartbeat: float = 60.0  # seconds without a message of it after which the server is not ready: passes may be long
    silence: float = 300.0  # and after which it is taken to be stuck, killed and started again

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return tuple(dict.fromkeys((self.model_name, *self.aliases, *self.adapters)))


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Keys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    @property
    def let_all_in(self) -> bool:
        return not self._digests

    def tenant(self, authorization: bytes | None) -> str | None:
        """A name for the bearer of a key that tells nothing of the key; None for a wrong key.

        Takes as long for a wrong key as for a right one.
        """
        if self.let_all_in:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given[:TENANT_LENGTH] if any(matches) and scheme.lower() == b"bearer" else None


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_keys(file: str | None) -> tuple[str, ...]:
    """Keys of the environment, with commas between them, and of a file, one a line."""
    found = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if file is not None:
        found += keys_of_file(Path(file))
    return tuple(dict.fromkeys(key for key in found if key))


def keys_of_file(file: Path) -> list[str]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"the keys in {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: give a file with one key a line") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"{file} has no keys: give a file with one key a line")
    return keys
