"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from draftgraph.serve.schemas.common import Alternatives, Count, GenerationRequest, Given

JSONObject = dict[str, Any]


class Part(Given):
    type: str
    text: str | None = None


class Message(Given):
    """Further fields, tool_calls and tool_call_id for two, are for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(examples=["user"])
    content: str | list[Part] | None = Field(None, examples=["Why is the sky blue?"])


class Schema(Given):
    name: str | None = None
    given: JSONObject | bool = Field(True, alias="schema")


class ResponseFormat(Given):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
    chat_template_kwargs: JSONObject | None = None
