"""OpenAI's /v1/responses, of which nothing is kept: a request becomes a chat, its answer the items of a response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from draftgraph.batching.job import Job
from draftgraph.serve.answer_schemas import Usage
from draftgraph.serve.answers import Body, ChatForm
from draftgraph.serve.errors import ApiError, json_bytes, refusal
from draftgraph.serve.fields import OWN_TOOLS
from draftgraph.serve.generation import Delta, Server
from draftgraph.serve.parsing import CallDelta
from draftgraph.serve.schemas import (
    BY_TYPE,
    LIST,
    OBJECT,
    WHOLE,
    Alternatives,
    ChatRequest,
    Decoding,
    Few,
    Given,
    JSONObject,
    Message,
    Part,
    ResponseFormat,
    Schema,
    Text,
)

LOGPROBS = "message.output_text.logprobs"  # as `include` names them
FUNCTION = ("name", "description", "parameters", "strict")  # of a tool
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
Content = Annotated[Text | Annotated[Few[Part], LIST], BY_TYPE]
Messages = list[dict[str, Any]]


class Item(BaseModel):
    """What was said, called or returned; which fields it needs depends on its type."""

    model_config = ConfigDict(extra="ignore")  # those that came with an answer are sent back as they are

    type: str = "message"
    role: str | None = Field(None, examples=["user"])
    content: Content | None = Field(None, examples=["Why is the sky blue?"])
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Given):
    format: TextFormat | None = None


class StreamOptions(Given):
    """None of them changes anything here."""


class ResponsesRequest(Decoding):
    input: Annotated[Text | Annotated[Few[Item], LIST], BY_TYPE] = Field(examples=["Why is the sky blue?"])
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=WHOLE)] | None = None
    tools: Few[JSONObject] | None = None
    tool_choice: Annotated[Text | Annotated[JSONObject, OBJECT], BY_TYPE] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: Few[str] | None = Field(None, description=f"{LOGPROBS}; others are ignored")
    top_logprobs: Alternatives | None = None
    reasoning: JSONObject | None = Field(None, description="Ignored")
    metadata: JSONObject | None = Field(None, description="Ignored")
    stream_options: StreamOptions | None = None

    @property
    def scored(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or [])


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    draftgraph: dict[str, Any]


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    system_fingerprint: NotRequired[str]


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat. All in it has been checked with the body that it comes from."""
    if body.traced:
        raise refusal("a trace is sent with chats and completions only", "draftgraph")
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in Decoding.model_fields},
        messages=messages_of(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[chat_tool(tool, place) for place, tool in enumerate(body.tools or [])] or None,
        tool_choice=chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=chat_format(body.text.format if body.text is not None else None),
        logprobs=body.scored,
        top_logprobs=body.top_logprobs if body.scored else None,
    )


def messages_of(body: ResponsesRequest) -> list[Message]:
    found: Messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        found.append({"role": "user", "content": body.input})
    else:
        for place, item in enumerate(body.input):
            if item.type not in ADDING:
                raise refusal(f"items of type {item.type!r} are not supported: {OWN_TOOLS}", f"input.{place}")
            ADDING[item.type](found, item, f"input.{place}")
    if not found:
        raise refusal("the input is empty: give some text", "input")
    return [Message(**message) for message in found]


def add_message(messages: Messages, item: Item, place: str) -> None:
    if item.role is None:
        raise refusal(f"{place}: a message needs a role", place)
    if item.role == "assistant" and is_reasoning(messages):
        messages[-1]["content"] = item.content
    else:
        messages.append({"role": item.role, "content": item.content})


def add_reasoning(messages: Messages, item: Item, place: str) -> None:
    """Belongs to what the assistant says or calls next; whether models are shown it their templates decide."""
    texts = [part.get("text") or "" for part in item.content] if isinstance(item.content, list) else []
    messages.append({"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)})


def add_call(messages: Messages, item: Item, place: str) -> None:
    """Calls are a part of what the assistant said before them."""
    if item.call_id is None or item.name is None or item.arguments is None:
        raise refusal(f"{place}: a function_call needs call_id, name and arguments", place)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def add_result(messages: Messages, item: Item, place: str) -> None:
    if item.call_id is None or item.output is None:
        raise refusal(f"{place}: a function_call_output needs call_id and output", place)
    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})


def is_reasoning(messages: Messages) -> bool:
    return bool(messages) and "reasoning_content" in messages[-1] and messages[-1].keys().isdisjoint({"tool_calls"})


ADDING: dict[str, Callable[[Messages, Item, str], None]] = {
    "message": add_message,
    "reasoning": add_reasoning,
    "function_call": add_call,
    "function_call_output": add_result,
}


def chat_tool(tool: JSONObject, place: int) -> JSONObject:
    if tool.get("type") != "function":
        raise refusal(f"a tool of type {tool.get('type')!r} is not supported: {OWN_TOOLS}", f"tools.{place}")
    return {"type": "function", "function": {name: tool[name] for name in FUNCTION if tool.get(name) is not None}}


def chat_choice(choice: str | JSONObject | None) -> str | JSONObject | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def chat_format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return ResponseFormat.model_construct(type=wanted.type, json_schema=wanted)


@dataclass(frozen=True)
class TextItem:
    """An item with one text."""

    prefix: str  # of its id
    item: Body
    part: Body


MESSAGE = TextItem(
    "msg",
    {"type": "message", "role": "assistant"},
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
)
REASONING = TextItem("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text", "text": ""})


class Output:
    """The items of a response. What is added to them is told in events, as yet without numbers."""

    def __init__(self) -> None:
        self.items: list[Body] = []
        self._is_open = False  # the last of them may yet grow

    def take(self, delta: Delta, logprobs: list[Body]) -> Iterator[Body]:
        if delta.reasoning:
            yield from self._write(REASONING, delta.reasoning)
        if delta.text:
            yield from self._write(MESSAGE, delta.text, logprobs=logprobs)
        for call in delta.calls:
            yield from self._call(call)

    def close(self, status: str) -> Iterator[Body]:
        """There is an item at least."""
        if not self.items:
            yield from self._write(MESSAGE, "", logprobs=[])
        yield from self._close(status)

    def _write(self, kind: TextItem, text: str, **more: list[Body]) -> Iterator[Body]:
        if not self._is_open or self.items[-1]["type"] != kind.item["type"]:
            yield from self._open(kind.prefix, kind.item | {"content": []})
            yield self._told("content_part.added", content_index=0, part=deepcopy(kind.part))
            self.items[-1]["content"].append(deepcopy(kind.part))
        [part] = self.items[-1]["content"]
        part["text"] += text
        for name, values in more.items():
            part[name] += values
        if text:
            yield self._told(f"{part['type']}.delta", content_index=0, delta=text, **more)

    def _call(self, call: CallDelta) -> Iterator[Body]:
        if call.name is not None:
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._open("fc", item)
        self.items[-1]["arguments"] += call.arguments
        if call.arguments:
            yield self._told("function_call_arguments.delta", delta=call.arguments)

    def _open(self, prefix: str, item: Body) -> Iterator[Body]:
        yield from self._close("completed")
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"} | item
        self.items.append(item)
        self._is_open = True
        yield self._told("output_item.added", item=deepcopy(item))

    def _close(self, status: str) -> Iterator[Body]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        for part in item.get("content", []):
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._told(f"{part['type']}.done", content_index=0, **said)
            yield self._told("content_part.done", content_index=0, part=part)
        if "arguments" in item:
            yield self._told("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield self._told("output_item.done", item=item)

    def _told(self, kind: str, **more: Any) -> Body:
        about = {} if "item" in more else {"item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1} | about | more


class ResponseForm(ChatForm):
    """Of one answer to a chat."""

    prefix = "resp_"
    end = b""

    def __init__(self, server: Server, body: ResponsesRequest, chat: ChatRequest, jobs: Sequence[Job]) -> None:
        super().__init__(server, chat, jobs)
        self._asked, self._output, self._numbers = body, Output(), count()

    def whole(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self.events(delta)
        return json_bytes(self.closing()[-1]["response"])

    def opening(self) -> list[Body]:
        response = self._response("in_progress")
        return self._numbered({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))

    def events(self, delta: Delta) -> list[Body]:
        logprobs = self._logprobs([delta])
        return self._numbered(self._output.take(delta, list(logprobs["content"]) if logprobs else []))

    def closing(self) -> list[Body]:
        is_cut = self._answers[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = [*self._output.close(status)]
        response = self._response(
            status,
            usage=response_usage(self.generation.usage()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
        )
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def failure(self, error: ApiError) -> list[Body]:
        said = {"code": ERROR_CODES.get(error.status, "server_error"), "message": str(error)}
        response = self._response("failed", error=said)
        return self._numbered([{"type": "response.failed", "response": response}])

    def _written(self, event: Body) -> bytes:
        return f"event: {event['type']}\n".encode() + super()._written(event)

    def _numbered(self, events: Iterable[Body]) -> list[Body]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]

    def _response(self, status: str, **more: Any) -> Body:
        asked = self._asked
        format = asked.text.format if asked.text is not None else None
        return {
            "id": self.generation.id,
            "object": "response",
            "created_at": self.generation.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": list(self._output.items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": asked.reasoning,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self._fingerprint,
            "temperature": self._answers[0].job.temperature,
            "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self._answers[0].job.top_p,
            "truncation": "disabled",
            "usage": None,
        } | more


def response_usage(usage: Usage) -> ResponseUsage:
    details = usage["prompt_tokens_details"] | {"cache_write_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": details,  # type: ignore[typeddict-item]
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "draftgraph": usage["draftgraph"],
    }
