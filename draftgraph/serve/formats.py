"""How the served model writes tool calls and reasoning, and what that makes of a request's grammar and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from draftgraph.batching.grammar import opaque_tokens
from draftgraph.errors import UsageError
from draftgraph.serve.errors import refusal
from draftgraph.serve.lark import Rules
from draftgraph.serve.parsing import AnswerParser, Tags
from draftgraph.serve.schemas import ChatRequest, JSONObject
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.tool_calls import NAMES, call_format

THINK = Tags("<think>", "</think>")
REASONING = {"deepseek_r1": THINK, "qwen3": THINK, "mistral": Tags("[THINK]", "[/THINK]")}  # names are vLLM's
LAST_TOKENS = 16  # of a prompt: more than an open tag has
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TRIED = "a_function_that_a_template_is_tried_with"


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call, or must."""

    schemas: dict[str, Any]  # of arguments, by name
    forced: bool = False
    several: bool = True
    strict: frozenset[str] = frozenset()  # names of those whose arguments must follow their schemas, if they are called

    @classmethod
    def of(cls, request: ChatRequest) -> ToolUse | None:
        """None where the answer is text."""
        choice, tools = request.tool_choice, request.tools
        if choice == "none" or not (tools or choice not in (None, "auto")):
            return None
        if not tools:
            raise refusal("tool_choice needs tools to choose from", "tool_choice")
        schemas = dict(function_of(tool, place) for place, tool in enumerate(tools))
        several = request.parallel_tool_calls is not False
        if choice in (None, "auto", "required"):
            strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)
            return cls(schemas, choice == "required", several, strict)
        if not isinstance(choice, dict) or choice.get("type") != "function":
            raise refusal("tool_choice must be none, auto, required or a function", "tool_choice")
        name = (choice.get("function") or {}).get("name") if isinstance(choice.get("function"), dict) else None
        if name not in schemas:
            raise refusal(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        return cls({name: schemas[name]}, forced=True, several=False)

    @property
    def strict_schemas(self) -> dict[str, Any]:
        return {name: schema if name in self.strict else loose(schema) for name, schema in self.schemas.items()}


def loose(schema: Any) -> JSONObject:
    """Of arguments, only what they are called."""
    return {"type": "object", "properties": {name: {} for name in schema.get("properties", {})}}


def function_of(tool: JSONObject, place: int) -> tuple[str, Any]:
    """Its name and the schema of its arguments."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise refusal(f"tools.{place} is not of type function: functions are what can be called", "tools")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not regex.fullmatch(r"[\w.:-]{1,128}", name):
        raise refusal(f"tools.{place}.function.name must be up to 128 letters, digits, _ . : or -", "tools")
    if schema is None or schema == {}:
        return name, NO_ARGUMENTS
    if not is_of_objects(schema):
        raise refusal(f"tools.{place}.function.parameters must be a JSON schema of objects", "tools")
    return name, {"type": "object"} | schema


def is_of_objects(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    return isinstance(schema.get("properties", {}), dict) and isinstance(schema.get("required", []), list)


class AnswerFormats:
    """Made once, of the server's options and the model's chat template."""

    def __init__(self, settings: ServerSettings, tokenizer: Any) -> None:
        has_template = getattr(tokenizer, "chat_template", None)
        template = str(tokenizer.get_chat_template(tools=[])) if has_template else ""
        refuse_unknown("--tool-call-parser", settings.tool_call_parser, NAMES)
        refuse_unknown("--reasoning-parser", settings.reasoning_parser, REASONING)
        self._tokenizer = tokenizer
        self._calls = call_format(settings.tool_call_parser, template)
        self._tags = tags_of(settings.reasoning_parser, template)
        added = tokenizer.added_tokens_decoder.items()
        self._specials = {str(token): int(id) for id, token in added if token.special}
        self._rules = Rules(opaque_tokens(tokenizer))

    @cached_property
    def _takes_tools(self) -> bool:
        """Whether the chat template tells the model of tools; one that fails over so little will say so itself."""
        tool = {"type": "function", "function": {"name": TRIED, "description": TRIED, "parameters": NO_ARGUMENTS}}
        messages = [{"role": "user", "content": "Hello"}]
        try:
            return TRIED in self._tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
        except Exception:
            return True

    def check(self, use: ToolUse | None) -> None:
        """Refuses tools that the model would not be told of, and calls that cannot be forced."""
        if use is not None and not self._takes_tools:
            raise refusal("this model's chat template has no place for tools: leave them out", "tools")
        if use is not None and use.forced and self._calls is None:
            message = "a call cannot be forced: how this model writes calls is not known; --tool-call-parser names it"
            raise refusal(message, "tool_choice")

    def parser(self, prompt: Sequence[int], use: ToolUse | None, whole: bool) -> AnswerParser | None:
        """Of one answer; None where all of it is content."""
        calls = self._calls if use is not None else None
        if calls is None and self._tags is None:
            return None
        markers = self._markers(with_calls=calls is not None)
        return AnswerParser(
            calls,
            self._tags,
            thinking=self._is_thinking(prompt),
            whole=whole,
            most_calls=None if use is None or use.several else 1,
            hidden=frozenset(self._specials.keys() & markers),
            dropped=frozenset(id for token, id in self._specials.items() if token not in markers),
            schemas=None if use is None else use.schemas,
        )

    def grammar(self, prompt: Sequence[int], use: ToolUse | None, answer: JSONObject | None) -> JSONObject | None:
        """What an answer must conform to with its reasoning and calls, if its content must to `answer`."""
        calls = self._calls if use is not None else None
        if calls is None or use is None:
            if answer is None or self._tags is None:
                return answer
            bodies, rules = ["@answer"], []
        elif use.forced or answer is not None:
            bodies = ["calls"] if use.forced else ["calls", "@answer"]
            rules = calls.rules(use.schemas, use.several, self._rules)
        elif use.strict:
            apart = () if self._tags is None else self._tags.markers
            bodies = ["said", "lead calls", *(["calls"] if calls.bare else [])]
            rules = self._rules.around(calls.trigger, calls.beginning, apart)
            rules += calls.rules(use.strict_schemas, use.several, self._rules, begun=True)
        else:
            return None
        start = f"start: {self._reasoning(prompt)} ({' | '.join(bodies)})"
        grammar = {"type": "lark", "grammar": "\n".join([start, *self._reasoning_rules(), *rules])}
        return grammar | {"answer": answer} if "@answer" in bodies else grammar

    def _reasoning(self, prompt: Sequence[int]) -> str:
        if self._tags is None:
            return ""
        thought = r"thought /\s*/"
        return thought if self._is_thinking(prompt) else f"({self._rules.text(self._tags.start)} {thought})?"

    def _reasoning_rules(self) -> list[str]:
        return [] if self._tags is None else self._rules.until("thought", self._tags.end)

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the template has begun the answer with an open tag."""
        if self._tags is None:
            return False
        return str(self._tokenizer.decode(list(prompt[-LAST_TOKENS:]))).rstrip().endswith(self._tags.start)

    def _markers(self, with_calls: bool) -> set[str]:
        calls = self._calls.markers if with_calls and self._calls is not None else ()
        return {*calls, *(self._tags.markers if self._tags is not None else ())}


def tags_of(name: str, template: str) -> Tags | None:
    """Those of this name; "auto": those that the template knows."""
    known = (tags for tags in REASONING.values() if tags.end in template)
    return next(known, None) if name == "auto" else REASONING.get(name)


def refuse_unknown(option: str, name: str, known: Sequence[str] | dict[str, Tags]) -> None:
    if name not in ("auto", "none", *known):
        raise UsageError(f"{option} must be auto, none, {', '.join(known)}, not {name!r}")
