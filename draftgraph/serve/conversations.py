"""Which of several servers a conversation goes to: the one that has the pages of its beginning, unless it is busy.

Nothing is kept: the order of servers follows from how the conversation begins (rendezvous hashing), so everybody who
asks finds the same one, and a server that comes or goes moves only the conversations that it gets or had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from draftgraph.serve.guard import MOST_CONTAINERS

CHARACTERS, TOKENS = 256, 64  # of a prompt without messages, which tell where it begins


@dataclass(frozen=True)
class Asked:
    """A request that was let in, on its way to a server."""

    scope: dict[str, Any]  # of ASGI
    body: bytes
    tenant: str
    conversation: bytes | None
    avoid: frozenset[str] = frozenset()  # servers that could not answer it
    is_last_try: bool = False


@dataclass(frozen=True)
class Taken:
    """The first word of a server about a request: its name, and whether it cannot answer now."""

    server: str
    is_away: bool


def conversation_of(body: bytes, tenant: str) -> bytes | None:
    """A name for the conversation that all its turns have; None for what is none."""
    beginning = beginning_of(body)
    if not beginning:
        return None
    return hashlib.blake2b(tenant.encode() + b"\0" + to_json(beginning), digest_size=16).digest()


def beginning_of(body: bytes) -> Any:
    """A chat's messages up to the first of its user, which no turn changes; the first part of any other prompt."""
    if not body.startswith(b"{") or body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:
        return None
    try:
        asked = from_json(body)
    except ValueError:
        return None  # which the server that gets it will tell
    if isinstance(messages := asked.get("messages"), list):
        return until_user(messages)
    if isinstance(items := asked.get("input"), list):
        return [asked.get("instructions"), *until_user(items)]
    prompt = asked.get("prompt", asked.get("input"))
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # of several
    if isinstance(prompt, str):
        return prompt[:CHARACTERS]
    return prompt[:TOKENS] if isinstance(prompt, list) else None


def until_user(messages: list[Any]) -> list[Any]:
    found = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)
        found.append([role, content])
        if role == "user":
            break
    return found


def preferred(conversation: bytes, loads: Mapping[str, int], slack: int) -> str:
    """The first server in the conversation's order that has at most so many requests more than the least busy one."""
    most = min(loads.values()) + slack
    return max((server for server in loads if loads[server] <= most), key=lambda server: rank(conversation, server))


def rank(conversation: bytes, server: str) -> bytes:
    return hashlib.blake2b(server.encode(), key=conversation, digest_size=8).digest()
