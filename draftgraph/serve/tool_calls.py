"""Tool calls as families of models write them: how they are recognised, read and forced."""

from __future__ import annotations

import ast
import json
import secrets
import string
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex
from pydantic_core import from_json

from draftgraph.serve.parsing import CallFormat, Match, Pattern, Scan, Wait

SPACE = r"(?<!\s)\s*"  # all that there is: a search must not begin again in the middle of it
HEAD = regex.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
REST = regex.compile(r'(?:\s*,\s*"\w+"\s*:\s*"[^"]*")*\s*\}')  # of a call behind its arguments
# Where any space is allowed, a small model may go on with it forever.
AS_PYTHON_WRITES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PYTHON_NAMES = {"true": True, "false": False, "null": None}
Schemas = Mapping[str, Any]  # of arguments, by the names of functions
Write = Callable[[str], str]  # a text, some of which may be special tokens, as a part of a Lark rule


def long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Mistral's templates refuse any other length when they get the call back."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class JSONCalls:
    """Calls as JSON objects, with the name inside or, as a group of the opening, before the arguments alone."""

    names: tuple[str, ...]
    sign: Pattern
    markers: tuple[str, ...]
    opening: Pattern
    written: tuple[str, str, str]  # before the name, between it and the arguments, and behind those
    closing: Pattern | None = None  # what may come behind a call
    bare: Pattern | None = None
    following: Pattern | None = None
    around: tuple[str, str] = ("", "")  # all calls of an answer
    between: str | None = None  # two calls; None: templates take one call of an answer
    new_id: Callable[[], str] = long_id

    def read(self, scan: Scan, opening: Match) -> Wait[bool]:
        if scan.whole:
            end = yield from scan.end_of_value()
            if end is None or json_object(scan.text[:end]) is None:
                return False
        if name := opening.groupdict().get("name"):
            scan.call(name)
            yield from scan.pass_arguments()
        elif head := (yield from scan.take(HEAD)):
            scan.call(head["name"])
            yield from scan.pass_arguments()
            yield from scan.take(REST)
        else:
            end = yield from scan.end_of_value()
            call = json_call(scan.text[:end])
            if call is None:
                return False
            scan.cut(end)
            scan.call(call[0])
            scan.argue(call[1])
        while self.closing is not None and (yield from scan.take(self.closing)):
            pass
        return True

    def rules(self, schemas: Schemas, several: bool, write: Write) -> list[str]:
        before, middle, after = self.written
        calls = [
            f"{write(before + json.dumps(name)[1:-1] + middle)} arguments_{place} {write(after)}"
            for place, name in enumerate(schemas)
        ]
        more = "" if self.between is None or not several else f"({write(self.between)} call)*"
        return [
            f"calls: {write(self.around[0])} call {more} {write(self.around[1])}",
            f"call: {' | '.join(calls)}",
            *(f"arguments_{place}: {json_rule(schema)}" for place, schema in enumerate(schemas.values())),
        ]


@dataclass(frozen=True)
class PythonicCalls:
    """Calls as Python writes them, in a list; their arguments are told when all of them are known."""

    names: tuple[str, ...]
    sign: Pattern
    markers: tuple[str, ...]
    opening: Pattern
    bare: Pattern
    closing: Pattern
    following: Pattern | None = None
    new_id: Callable[[], str] = long_id

    def read(self, scan: Scan, opening: Match) -> Wait[bool]:
        end = yield from scan.end_of_value(quotes="\"'")
        calls = python_calls(scan.text[:end])
        if end is None or not calls:
            return False
        scan.cut(end)
        for name, arguments in calls:
            scan.call(name)
            scan.argue(json.dumps(arguments, ensure_ascii=False))
        yield from scan.take(self.closing)
        return True

    def rules(self, schemas: Schemas, several: bool, write: Write) -> list[str]:
        more = '(", " call)*' if several else ""
        lines = [f'calls: "[" call {more} "]"', f"call: {' | '.join(f'call_{place}' for place in range(len(schemas)))}"]
        for place, (name, schema) in enumerate(schemas.items()):
            lines.append(f'call_{place}: {json.dumps(name + "(")} {self._keywords(schema, place)} ")"')
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            lines += [
                f"value_{place}_{number}: {json_rule(value, definitions)}"
                for number, value in enumerate(schema.get("properties", {}).values())
            ]
        return lines

    def _keywords(self, schema: Any, place: int) -> str:
        """Those that are required, then any of the others in their order."""
        required: list[str] = []
        optional: list[str] = []
        for number, name in enumerate(schema.get("properties", {})):
            keyword = f"{json.dumps(name + '=')} value_{place}_{number}"
            (required if name in schema.get("required", ()) else optional).append(keyword)
        tails = [" ".join(f'(", " {one})?' for one in optional[first:]) for first in range(len(optional) + 1)]
        if required:
            return ' ", " '.join(required) + " " + tails[0]
        firsts = [f"{one} {tail}" for one, tail in zip(optional, tails[1:], strict=True)]
        return f"({' | '.join(firsts)})?" if firsts else ""


def json_rule(schema: Any, definitions: Mapping[str, Any] | None = None) -> str:
    if isinstance(schema, dict):
        schema = {**(definitions or {}), **schema, "x-guidance": AS_PYTHON_WRITES}
    return f"%json {json.dumps(schema)}"


def json_object(text: str) -> dict[str, Any] | None:
    try:
        found = from_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def json_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose parts come in some other order."""
    call = json_object(text) or {}
    name = call.get("name", call.get("function"))
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # JSON in JSON
        arguments = json_object(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            calls = ast.parse(text, mode="eval").body
        return [python_call(call) for call in calls.elts] if isinstance(calls, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def python_call(call: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call with named arguments")
    name = ast.unparse(call.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("no name of a function")
    return name, {str(keyword.arg): python_value(keyword.value) for keyword in call.keywords}


def python_value(value: ast.expr) -> Any:
    """A literal, whose constants may be JSON's."""
    if isinstance(value, ast.Name) and value.id in PYTHON_NAMES:
        return PYTHON_NAMES[value.id]
    if isinstance(value, ast.List | ast.Tuple):
        return [python_value(one) for one in value.elts]
    if isinstance(value, ast.Dict):
        keys = [ast.literal_eval(key) if key else "" for key in value.keys]
        return dict(zip(map(str, keys), map(python_value, value.values), strict=True))
    found = ast.literal_eval(value)
    if not isinstance(found, str | int | float | None):
        raise ValueError("JSON has no such value")
    return found


def deepseek(name: str, sign: str, written: tuple[str, str, str], between: str) -> JSONCalls:
    return JSONCalls(
        names=(name,),
        sign=regex.compile(sign, regex.DOTALL),
        markers=(*DEEPSEEK_SECTION, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        opening=regex.compile(
            SPACE + r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\s<]{1,128}+)\s*+(?:<｜tool▁sep｜>)?\s*+(?:```json)?\s*+(?=\{)"  # a long space is tried once
        ),
        closing=regex.compile(r"\s*(?:```|<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>)"),
        written=written,
        around=DEEPSEEK_SECTION,
        between=between,
    )


def mistral(sign: str, written: tuple[str, str, str], around: tuple[str, str], between: str) -> JSONCalls:
    return JSONCalls(
        names=("mistral",),
        sign=regex.compile(sign),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        opening=regex.compile(
            SPACE + r"\[TOOL_CALLS\]\s*(?:\[\s*|(?P<name>[^\s\[\]{]{1,128}+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*)?(?=\{)"
        ),
        closing=regex.compile(r"\s*\]"),
        following=regex.compile(r"\s*,\s*(?=\{)"),
        written=written,
        around=around,
        between=between,
        new_id=short_id,
    )


DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FORMATS: tuple[CallFormat, ...] = (  # names are vLLM's; of formats whose sign is in a template, the first is its
    JSONCalls(
        names=("hermes",),
        sign=regex.compile(r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>", regex.DOTALL),
        markers=("<tool_call>", "</tool_call>"),
        opening=regex.compile(SPACE + r"<tool_call>\s*(?=\{)"),
        closing=regex.compile(r"\s*</tool_call>"),
        written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n",
    ),
    PythonicCalls(
        names=("pythonic", "llama4_pythonic"),
        sign=regex.compile(r"\[func_name1\("),
        markers=("<|python_start|>", "<|python_end|>"),
        opening=regex.compile(SPACE + r"<\|python_start\|>\s*(?=\[)"),
        bare=regex.compile(r"\s*(?=\[[^\W\d])"),
        closing=regex.compile(r"\s*<\|python_end\|>"),
    ),
    JSONCalls(
        names=("llama3_json", "llama4_json"),
        sign=regex.compile(r'<\|python_tag\|>|"name": function name, "parameters"'),
        markers=("<|python_tag|>",),
        opening=regex.compile(SPACE + r"<\|python_tag\|>\s*(?=\{)"),
        bare=regex.compile(r"\s*(?=\{)"),
        following=regex.compile(r"\s*;\s*(?=\{)"),
        written=('{"name": "', '", "parameters": ', "}"),
    ),
    mistral(r"\[ARGS\]", ("[TOOL_CALLS]", "[ARGS]", ""), around=("", ""), between=""),
    mistral(r"\[TOOL_CALLS\]", ('{"name": "', '", "arguments": ', "}"), around=("[TOOL_CALLS] [", "]"), between=", "),
    deepseek(
        "deepseek_v3",
        "tool▁sep.*```json",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        between="\n",
    ),
    deepseek(
        "deepseek_v31",
        "tool▁sep",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        between="",
    ),
)
NAMES = tuple(dict.fromkeys(name for one in FORMATS for name in one.names))


def call_format(name: str, template: str) -> CallFormat | None:
    """The one of this name, which of several its template decides; "auto": the one that the template has signs of."""
    named = [one for one in FORMATS if name == "auto" or name in one.names]
    fitting = [one for one in named if one.sign.search(template)]
    return next(iter(fitting or (named[-1:] if name != "auto" else [])), None)
