"""From what clients send to token ids, in a thread of its own: a long text must not hold up the streams of others."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from draftgraph.serve.errors import refusal
from draftgraph.serve.schemas import ChatRequest, Message

TEMPLATE_ARGUMENTS = ("add_generation_prompt", "continue_final_message", "documents")
ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
T = TypeVar("T")


class Prompts:
    """A tokenizer that answers one question at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def of_text(self, text: str) -> list[int]:
        return await self.aside(lambda: list(self.tokenizer(text)["input_ids"]))

    async def of_chat(self, request: ChatRequest) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise refusal("this model has no chat template: use /v1/completions", "messages")
        arguments = template_arguments(self.tokenizer, request)
        messages = [template_message(message, place) for place, message in enumerate(request.messages)]
        try:
            return await self.aside(lambda: render(self.tokenizer, messages, arguments))
        except Exception as error:  # a template may fail in any way over what it is given
            said = " ".join(str(error).split())[:500]
            raise refusal(f"the model's chat template refuses these messages: {said}", "messages") from error

    async def aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def render(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, **arguments, return_dict=True)["input_ids"])


def template_arguments(tokenizer: Any, request: ChatRequest) -> dict[str, Any]:
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - set(TEMPLATE_ARGUMENTS)
    given = request.chat_template_kwargs or {}
    if taken := own & given.keys():
        raise refusal(f"chat_template_kwargs may not set {sorted(taken)[0]}", "chat_template_kwargs")
    tools = None if request.tool_choice == "none" else request.tools
    if request.tool_choice not in (None, "none", "auto"):
        raise refusal("tool_choice can be auto or none: a call cannot be forced", "tool_choice")
    defaults = {"add_generation_prompt": not given.get("continue_final_message")}
    return {"tools": tools or None} | defaults | given


def template_message(message: Message, place: int) -> dict[str, Any]:
    """A message as chat templates know it: its content one text, arguments of calls as objects."""
    found = message.model_dump()
    found["role"] = ROLES.get(message.role, message.role)
    found["content"] = message_text(message, f"messages.{place}.content")
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [template_call(call) for call in calls]
    return found


def message_text(message: Message, param: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise refusal(f"this model reads text only, not {part.type!r}", param)
    return "\n".join(part.text or "" for part in message.content)


def template_call(call: Any) -> Any:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        function = call["function"]
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    return call
