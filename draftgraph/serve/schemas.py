"""Requests in OpenAI's form. Fields that a request may not have are refused by name: see `fields`."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import TypedDict

from draftgraph.config import Mode
from draftgraph.serve.fields import IGNORED, refuse_unknown

MOST_ALTERNATIVES = 20
MOST_BIASES = 1024
MOST_WORDS = 256
LONGEST_SALT = 1024
MOST_ELEMENTS = 4096  # of messages, of tools, of the parts of a message
MOST_NODES, MOST_LEVELS = 512, 64  # of a graph: what one client asks for is computed for all
WHOLE = 2**31 - 1  # more than any model's tokens
SEEDS = 2**63

T = TypeVar("T")
JSONObject = dict[str, Any]
Many = Annotated[list[T], Field(fail_fast=True)]  # one error, not one for each element
Few = Annotated[list[T], Field(fail_fast=True, max_length=MOST_ELEMENTS)]
Count = Annotated[int, Field(ge=0, le=WHOLE)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Small = Annotated[int, Field(ge=1, le=MOST_LEVELS)]
Share = Annotated[float, Field(ge=0, le=1)]
Tokens = Many[Count]

# Of a union one arm is tried, which the value's type decides. Tags are in brackets: errors leave them out of names.
Text = Annotated[str, Tag("<text>")]
LIST, OBJECT, SWITCH = Tag("<list>"), Tag("<object>"), Tag("<switch>")
ARMS = {list: LIST.tag, dict: OBJECT.tag, bool: SWITCH.tag}
WRONG_TYPE: dict[str, Any] = {"custom_error_type": "type", "custom_error_message": "Input cannot be of this type"}
BY_TYPE = Discriminator(lambda value: ARMS.get(type(value), "<text>"), **WRONG_TYPE)


def prompt_arm(prompt: Any) -> str:
    """A list is of what its first element is."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else None
    return "<texts>" if isinstance(first, str) else "<token lists>" if isinstance(first, list) else "<tokens>"


def few_biases(biases: Any) -> Any:
    """Counted before they are looked at: every wrong one is an error of its own."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} tokens, not {len(biases)}")
    return biases


JSONSchema = Annotated[Text | Annotated[JSONObject, OBJECT] | Annotated[bool, SWITCH], BY_TYPE]


class Given(BaseModel):
    model_config = ConfigDict(
        extra="ignore", allow_inf_nan=False, json_schema_extra=lambda schema: schema.update(additionalProperties=False)
    )

    @model_validator(mode="before")
    @classmethod
    def no_unknown_fields(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unknown(given, names_of(cls))
        return given


@cache
def names_of(kind: type[Given]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def with_ignored(schema: dict[str, Any]) -> None:
    """Names what may be sent and changes nothing."""
    ignored = {name: {"description": "Ignored"} for name in sorted(IGNORED)}
    schema.update(additionalProperties=False, properties=ignored | schema["properties"])


class StreamOptions(Given):
    include_usage: bool = False


class Extension(Given):
    """How draftgraph is to draft for this request; what is left out is as the server was started with."""

    mode: Mode | None = None
    k: Small | None = None
    tau: Small | None = None
    theta_prob: Share | None = None
    theta_sib: Share | None = None
    max_nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] | None = None
    max_depth: Annotated[int, Field(ge=0, le=MOST_LEVELS)] | None = None
    chain_length: Small | None = None
    trace: bool = Field(False, description="Send every token's source and every step's graph")

    def config(self) -> dict[str, Any]:
        return self.model_dump(exclude={"trace"}, exclude_none=True)


class Schema(Given):
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="It always is")
    given: Annotated[Annotated[JSONObject, OBJECT] | Annotated[bool, SWITCH], BY_TYPE] = Field(True, alias="schema")


class ResponseFormat(Given):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    given: JSONSchema | None = Field(None, alias="schema", description="Of a json_object, as llama.cpp has it")


class StructuredOutputs(Given):
    """As vLLM has it: one of these."""

    given: JSONSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Few[str] | None = None
    grammar: str | None = Field(None, description="In Lark or GBNF")
    json_object: bool | None = None


class Decoding(Given):
    """How an answer is decoded and sent: fields of every request for one."""

    model_config = ConfigDict(json_schema_extra=with_ignored)

    model: str | None = Field(None, description="May be left out: there is one")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=WHOLE)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[Count, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=MOST_BIASES),
        BeforeValidator(few_biases),
    ] = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stop: Annotated[Text | Annotated[Few[str], LIST], BY_TYPE] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    min_tokens: Count | None = Field(None, description="Nothing ends the answer before")
    bad_words: Annotated[Many[str], Field(max_length=MOST_WORDS)] | None = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="true, if left out")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=WHOLE)] | None = Field(
        None, description="Keep the last so many tokens of a prompt; -1: as many as the context window has room for"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = Field(
        None, description="Prompts and answers of other salts are not reused"
    )
    stream: bool | None = None
    draftgraph: Extension | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def traced(self) -> bool:
        return self.draftgraph is not None and self.draftgraph.trace


class GenerationRequest(Decoding):
    """The fields that chats and completions share besides."""

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JSONSchema | None = None
    guided_regex: str | None = None
    guided_choice: Few[str] | None = None
    guided_grammar: str | None = Field(None, description="In Lark or GBNF")
    guided_json_object: bool | None = None
    grammar: str | None = Field(None, description="In GBNF or Lark, as llama.cpp has it")
    json_schema: JSONSchema | None = Field(None, description="As llama.cpp has it")

    @model_validator(mode="after")
    def usage_is_of_streams(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for requests with stream: true")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def answers(self) -> int:
        """To all prompts."""
        return self.choices

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Part(TypedDict):
    type: str
    text: NotRequired[str | None]


class Message(BaseModel):
    """Further fields, tool_calls and tool_call_id for two, are for the chat template."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    role: str = Field(examples=["user"])
    content: Annotated[Text | Annotated[Few[Part], LIST], BY_TYPE] | None = Field(
        None, examples=["Why is the sky blue?"]
    )


class Conversation(Given):
    """What a chat template is given."""

    messages: Annotated[Few[Message], Field(min_length=1)]
    tools: Few[JSONObject] | None = None
    tool_choice: Annotated[Text | Annotated[JSONObject, OBJECT], BY_TYPE] | None = None
    add_generation_prompt: bool | None = Field(None, description="true, unless continue_final_message is")
    continue_final_message: bool | None = None
    reasoning_effort: str | None = Field(None, description="For chat templates that read it")
    chat_template_kwargs: JSONObject | None = None


class ChatRequest(GenerationRequest, Conversation):
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = Field(None, description="Repeat the last message, if it is the assistant's")


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        Annotated[Text, Field(examples=["Once upon a time"])]
        | Annotated[Tokens, Tag("<tokens>")]
        | Annotated[Many[str], Tag("<texts>")]
        | Annotated[Many[Tokens], Tag("<token lists>")],
        Discriminator(prompt_arm),
    ] = Field(description="A text or its token ids, or a list of such")
    logprobs: Alternatives | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description="true, if left out")
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.choices

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """As a list, whatever was given."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]


class TokenizeText(Given):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    model: str | None = None
    return_token_strs: bool | None = None


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("<text>")] | Annotated[TokenizeChat, Tag("<chat>")],
    Discriminator(lambda given: "<chat>" if isinstance(given, dict) and "messages" in given else "<text>"),
]


class DetokenizeRequest(Given):
    model: str | None = None
    tokens: Tokens
