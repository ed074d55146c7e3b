"""Tool calls as families of models write them: how they are recognised, read and forced."""

from __future__ import annotations

import ast
import json
import secrets
import string
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import regex
from pydantic_core import from_json

from draftgraph.serve.errors import refusal
from draftgraph.serve.lark import ANY_TEXT, Rules, json_rule
from draftgraph.serve.parsing import PYTHON, CallFormat, Match, Pattern, Scan, Wait

SPACE = r"(?<!\s)\s*"  # all that there is: a search must not begin again in the middle of it
HEAD = regex.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
REST = regex.compile(r'(?:\s*,\s*"\w+"\s*:\s*"[^"]*")*\s*\}')  # of a call behind its arguments
PYTHON_NAMES = {"true": True, "false": False, "null": None}
JSON_NAMES = {"True": "true", "False": "false", "None": "null"}
Schemas = Mapping[str, Any]  # of arguments, by the names of functions
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = {"title", "description", "default", "example", "examples", "deprecated", "$comment", "$schema", "$id"}
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", "strict", *DEFINITIONS, *ANNOTATIONS}


DEEPEST = 8  # references and unions in one another
MOST_KINDS = 64  # of values that an argument may have
LINE_END = "\n"
LINE_BREAK = regex.compile(r"\n?+(?=.)", regex.DOTALL)  # of a value, which comes behind its tag


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
    trigger: str
    written: tuple[str, str, str]  # before the name, between it and the arguments, and behind those
    beginning: str = ANY_TEXT
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
            call = None if end is None else json_call(scan.text[:end])
            if call is None:
                return False
            scan.cut(end)
            scan.call(call[0])
            scan.argue(call[1])
        while self.closing is not None and (yield from scan.take(self.closing)):
            pass
        return True

    def rules(self, schemas: Schemas, several: bool, rules: Rules, begun: bool = False) -> list[str]:
        _, middle, after = self.written
        arguments = [f"arguments_{place}: {json_rule(schema)}" for place, schema in enumerate(schemas.values())]
        ends = [f"{rules.text(middle)} arguments_{place} {rules.text(after)}" for place in range(len(schemas))]
        return [*listed_calls(self, [*schemas], ends, several, rules, begun), *arguments]


def listed_calls(
    format: JSONCalls | TaggedCalls, names: list[str], ends: list[str], several: bool, rules: Rules, begun: bool
) -> list[str]:
    """Calls in a row: `ends` are parts of rules for what comes behind the name of each function."""
    before, (first, last) = format.written[0], format.around

    def call(name: str, before: str) -> str:
        variants = [f"{rules.text(before + one)} {end}" for one, end in zip(names, ends, strict=True)]
        return f"{name}: {' | '.join(variants)}"

    more = "" if format.between is None or not several else f"({rules.text(format.between)} call)*"
    _, found, rest = (first + before).partition(format.trigger)
    if not (begun and found):
        return [f"calls: {rules.text(first)} call {more} {rules.text(last)}", call("call", before)]
    others = [call("call", before)] if more else []
    return [f"calls: first_call {more} {rules.text(last)}", call("first_call", rest), *others]


@dataclass(frozen=True)
class PythonicCalls:
    """Calls as Python writes them, in a list; their arguments are told when all of them are known."""

    names: tuple[str, ...]
    sign: Pattern
    markers: tuple[str, ...]
    opening: Pattern
    trigger: str
    end: str  # that a section which began with the trigger may have
    bare: Pattern
    beginning: str
    closing: Pattern
    following: Pattern | None = None
    new_id: Callable[[], str] = long_id

    def read(self, scan: Scan, opening: Match) -> Wait[bool]:
        end = yield from scan.end_of_value(PYTHON)
        calls = [] if end is None else python_calls(scan.text[:end])
        if not calls:
            return False
        scan.cut(end)
        for name, arguments in calls:
            scan.call(name)
            scan.argue(json.dumps(arguments, ensure_ascii=False))
        yield from scan.take(self.closing)
        return True

    def rules(self, schemas: Schemas, several: bool, rules: Rules, begun: bool = False) -> list[str]:
        more, end = '(", " call)*' if several else "", f"({rules.text(self.end)})?" if begun else ""
        call = f"call: {' | '.join(f'call_{place}' for place in range(len(schemas)))}"
        lines = [f'calls: "[" call {more} "]" {end}', call]
        for place, (name, schema) in enumerate(schemas.items()):
            values, required = arguments_of(schema, name)
            lines.append(f'call_{place}: {json.dumps(name + "(")} {keywords([*values], required, place)} ")"')
            lines += [
                f"value_{place}_{number}: {json_rule(value, definitions_of(schema))}"
                for number, value in enumerate(values.values())
            ]
        return lines


def keywords(names: list[str], required: set[str], place: int) -> str:
    """Those that are required, then any of the others in their order."""
    first: list[str] = []
    others: list[str] = []
    for number, name in enumerate(names):
        keyword = f"{json.dumps(name + '=')} value_{place}_{number}"
        (first if name in required else others).append(keyword)
    tails = [" ".join(f'(", " {one})?' for one in others[start:]) for start in range(len(others) + 1)]
    if first:
        return ' ", " '.join(first) + " " + tails[0]
    starts = [f"{one} {tail}" for one, tail in zip(others, tails[1:], strict=True)]
    return f"({' | '.join(starts)})?" if starts else ""


@dataclass(frozen=True)
class TaggedCalls:
    """Calls whose arguments have tags, one for each: texts as they are, anything else as JSON. Which of the two it is
    stands in the tag, or the function's schema tells."""

    names: tuple[str, ...]
    sign: Pattern
    markers: tuple[str, ...]
    opening: Pattern
    trigger: str
    argument: Pattern  # before a value: groups `key`, and `string` where the tag tells; or group `end` of the call
    ending: Pattern  # of a value
    closing: Pattern  # what may come behind a call
    written: tuple[str, str, str]  # before the name, between it and the arguments, and behind those
    tags: tuple[str, str, str]  # before the name of an argument, and behind it where a text follows, or anything else
    ends: tuple[str, str]  # of any text; of anything else
    around: tuple[str, str] = ("", "")  # all calls of an answer
    between: str = "\n"  # two calls
    bare: Pattern | None = None
    beginning: str = ANY_TEXT
    following: Pattern | None = None
    new_id: Callable[[], str] = long_id

    def read(self, scan: Scan, opening: Match) -> Wait[bool]:
        schema = scan.schemas.get(opening["name"])
        if scan.whole:
            told: list[str] = []
            before = scan.text
            if not (yield from self._read_arguments(scan, schema, told.append)):
                scan.left_at_failure = min(scan.left_at_failure, len(scan.text))
                scan.text = before
                return False
            scan.call(opening["name"])
            scan.argue("".join(told))
        else:
            scan.call(opening["name"])
            yield from self._read_arguments(scan, schema, scan.argue)
        while (yield from scan.take(self.closing)):
            pass
        return True

    def _read_arguments(self, scan: Scan, schema: Any, tell: Callable[[str], None]) -> Wait[bool]:
        """Tells them as an object of JSON; whether they came to their end."""
        separator = "{"
        while tag := (yield from scan.take(self.argument)):
            if tag["end"] is not None:
                tell("{}" if separator == "{" else "}")
                return True
            tell(f"{separator}{json.dumps(tag['key'], ensure_ascii=False)}: ")
            separator = ", "
            if len(scan.text) > scan.left_at_failure:  # its value ends where that of a call which failed has ended
                return False
            value, is_text = value_of(schema, tag["key"]), tag.groupdict().get("string")
            if not (yield from self._read_value(scan, value.told(is_text), tell)):
                return False
        return False

    def _read_value(self, scan: Scan, value: Value, tell: Callable[[str], None]) -> Wait[bool]:
        """As it comes, if it can be nothing but text."""
        if self.tags[1].endswith("\n"):
            yield from scan.take(LINE_BREAK)
        if value.is_text:
            tell('"')
            ending = yield from scan.pass_until(
                self.ending, lambda text: tell(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            tell('"' if ending else "")
        else:
            pieces: list[str] = []
            ending = yield from scan.pass_until(self.ending, pieces.append)
            tell(value.read("".join(pieces)))
        return ending is not None

    def rules(self, schemas: Schemas, several: bool, rules: Rules, begun: bool = False) -> list[str]:
        lines, ends = rules.until("text", self.ends[0]), []
        for place, (name, schema) in enumerate(schemas.items()):
            arguments, required = arguments_of(schema, name)
            parts = [rules.text(self.written[1])]
            definitions = definitions_of(schema)
            for number, (key, one) in enumerate(arguments.items()):
                argument = f"argument_{place}_{number}"
                parts.append(argument if key in required else f"{argument}?")
                forms = self._forms(key, Value.of(one, definitions), rules, definitions)
                lines.append(f"{argument}: {' | '.join(forms)}")
            ends.append(" ".join([*parts, rules.text(self.written[2])]))
        return [*listed_calls(self, [*schemas], ends, several, rules, begun), *lines]

    def _forms(self, key: str, value: Value, rules: Rules, definitions: Mapping[str, Any]) -> Iterator[str]:
        """Of an argument with its tags."""
        before, as_text, as_json = self.tags
        if not regex.fullmatch(r'[^<>"\n]+', key):
            raise refusal(f"an argument cannot be called {key!r}: this model writes its name into a tag", "tools")
        if value.any_text:
            yield f"{rules.text(before + key + as_text)} text {rules.text(LINE_END)}"
        for text in value.texts:
            yield rules.text(before + key + as_text + text + self.ends[1])
        for schema in value.schemas if as_text != as_json or not value.any_text else ():
            yield f"{rules.text(before + key + as_json)} {json_rule(schema, definitions)} {rules.text(self.ends[1])}"


@dataclass(frozen=True)
class Value:
    """What an argument may be: any text, some texts, or JSON that follows one of some schemas."""

    any_text: bool = False
    texts: tuple[str, ...] = ()
    schemas: tuple[Any, ...] = ()

    @classmethod
    def of(cls, schema: Any, definitions: Mapping[str, Any]) -> Value:
        any_text = False
        texts: list[str] = []
        schemas: list[Any] = []
        for one in islice(alternatives(schema, definitions), MOST_KINDS):
            limits, choices = one.keys() - ANNOTATIONS, one.get("enum")
            if not limits:
                any_text = True
                schemas.append({})
            elif limits == {"type"} and one["type"] == "string":
                any_text = True
            elif limits <= {"type", "enum"} and is_of_texts(choices):
                texts += choices
            else:
                schemas.append(one)
        return cls(any_text, tuple(texts), tuple(schemas))

    @property
    def is_text(self) -> bool:
        return self.any_text and not self.schemas

    def told(self, is_text: str | None) -> Value:
        """As a tag says that it is a text, or not; None: it does not say."""
        return self if is_text is None else Value(any_text=True) if is_text == "true" else Value(schemas=({},))

    def read(self, written: str) -> str:
        """As JSON."""
        as_json = JSON_NAMES.get(written.strip(), written.strip())
        kinds = [one.get("type") for one in self.schemas]
        is_null = as_json == "null" and ("null" in kinds or not self.any_text)
        if not is_null and (written in self.texts or self.any_text):
            return json.dumps(written, ensure_ascii=False)
        try:
            found = from_json(as_json, allow_inf_nan=False)
        except ValueError:
            return json.dumps(written, ensure_ascii=False)
        is_text = all(kind == "string" for kind in kinds) and not isinstance(found, str)
        return json.dumps(written, ensure_ascii=False) if is_text else as_json


ANY_VALUE = Value(any_text=True)


def value_of(schema: Any, key: str) -> Value:
    """What an argument may be in a function's schema, which need not know it."""
    properties = (schema or {}).get("properties", {})
    return Value.of(properties[key], definitions_of(schema)) if key in properties else ANY_VALUE


def is_of_texts(choices: Any) -> TypeGuard[list[str]]:
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)


def definitions_of(schema: Any) -> dict[str, Any]:
    return {key: schema[key] for key in DEFINITIONS if key in schema} if isinstance(schema, dict) else {}


def alternatives(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The schemas that a value may follow, at least one, with references and unions resolved that stand alone."""
    if not isinstance(schema, dict):
        yield {"not": {}} if schema is False else {}
        return
    found, is_resolved = resolved(schema, definitions) if depth < DEEPEST else (), False
    for one in found:
        is_resolved = True
        yield from alternatives(one, definitions, depth + 1)
    if not is_resolved:
        yield schema


def resolved(schema: dict[str, Any], definitions: Mapping[str, Any]) -> Iterable[Any]:
    """What a reference or a union stands for; nothing, where it is neither."""
    limits, kinds, choices = schema.keys() - ANNOTATIONS, schema.get("type"), schema.get("enum")
    if limits == {"$ref"}:
        kind, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
        known = definitions.get(kind)
        return [known[name]] if isinstance(known, dict) and name in known else ()
    if len(limits) == 1 and limits <= {"anyOf", "oneOf"}:
        [union] = (schema[key] for key in limits)
        return union if isinstance(union, list) else ()
    if isinstance(kinds, list):
        return (schema | {"type": kind} for kind in kinds)
    if "const" in limits and choices is None:
        return [{key: value for key, value in schema.items() if key != "const"} | {"enum": [schema["const"]]}]
    if kinds is None and isinstance(choices, list):
        texts = [choice for choice in choices if isinstance(choice, str)]
        others = [choice for choice in choices if not isinstance(choice, str)]
        return [schema | {"enum": texts}, schema | {"enum": others}] if texts and others else ()
    return ()


def arguments_of(schema: Any, function: str) -> tuple[dict[str, Any], set[str]]:
    """The schemas of a function's arguments by name, and which are required, for a form that writes them one by one."""
    if unknown := sorted(schema.keys() - OF_ARGUMENTS):
        message = f"{unknown[0]!r} beside the arguments of {function} cannot be followed in this model's form of calls"
        raise refusal(message, "tools")
    required = {name for name in schema.get("required", ()) if isinstance(name, str)}
    properties = schema.get("properties", {})
    return properties | {name: {} for name in sorted(required - properties.keys())}, required


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
        trigger="<｜tool▁call▁begin｜>",
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
        trigger="[TOOL_CALLS]",
        closing=regex.compile(r"\s*\]"),
        following=regex.compile(r"\s*,\s*(?=\{)"),
        written=written,
        around=around,
        between=between,
        new_id=short_id,
    )


def dsml(name: str, section: str) -> TaggedCalls:
    """As `encoding_dsv32.py` in DeepSeek's repositories writes and reads them; V4 has another name for the section."""
    return TaggedCalls(
        names=(name,),
        sign=regex.compile(rf"DSML.*{section}>", regex.DOTALL),
        markers=("｜DSML｜",),
        opening=regex.compile(
            SPACE + rf'(?:<｜DSML｜{section}>\s*)?<｜DSML｜invoke\s+name="(?P<name>[^"\n]{{1,128}}+)"\s*+>'
        ),
        trigger="<｜DSML｜",
        argument=regex.compile(
            r'\s*+(?:<｜DSML｜parameter\s+name="(?P<key>[^"\n]{1,256}+)"\s+string="(?P<string>true|false)"\s*+>'
            r"|(?P<end></｜DSML｜invoke>))"
        ),
        ending=regex.compile(r"</｜DSML｜parameter>(?=\s*</?｜DSML｜)"),
        closing=regex.compile(rf"\s*</｜DSML｜{section}>"),
        written=('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n"),
        tags=('<｜DSML｜parameter name="', '" string="true">', '" string="false">'),
        ends=("</｜DSML｜parameter>", "</｜DSML｜parameter>\n"),
        around=(f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"),
        between="",
    )


DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FORMATS: tuple[CallFormat, ...] = (  # names are vLLM's; of formats whose sign is in a template, the first is its
    JSONCalls(
        names=("hermes",),
        sign=regex.compile(r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>", regex.DOTALL),
        markers=("<tool_call>", "</tool_call>"),
        opening=regex.compile(SPACE + r"<tool_call>\s*(?=\{)"),
        trigger="<tool_call>",
        closing=regex.compile(r"\s*</tool_call>"),
        written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n",
    ),
    TaggedCalls(
        names=("qwen3_coder", "qwen3_xml"),
        sign=regex.compile(r"<tool_call>.*<function=.*<parameter=", regex.DOTALL),
        markers=("<tool_call>", "</tool_call>"),
        opening=regex.compile(SPACE + r"(?:<tool_call>\s*)?<function=(?P<name>[^\s<>]{1,128}+)>"),
        trigger="<function=",
        argument=regex.compile(r"\s*+(?:<parameter=(?P<key>[^<>\n]{1,256}+)>|(?P<end></function>|(?=</tool_call>)))"),
        ending=regex.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))"),
        closing=regex.compile(r"\s*</tool_call>"),
        written=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        tags=("<parameter=", ">\n", ">\n"),
        ends=("</parameter>", "\n</parameter>\n"),
    ),
    PythonicCalls(
        names=("pythonic", "llama4_pythonic"),
        sign=regex.compile(r"\[func_name1\("),
        markers=("<|python_start|>", "<|python_end|>"),
        opening=regex.compile(SPACE + r"<\|python_start\|>\s*(?=\[)"),
        trigger="<|python_start|>",
        end="<|python_end|>",
        bare=regex.compile(r"\s*(?=\[[^\W\d])"),
        beginning=r"\s*([^\s\[](?s:.*)|\[([\W\d](?s:.*))?)?",
        closing=regex.compile(r"\s*<\|python_end\|>"),
    ),
    JSONCalls(
        names=("llama3_json", "llama4_json"),
        sign=regex.compile(r'<\|python_tag\|>|"name": function name, "parameters"'),
        markers=("<|python_tag|>",),
        opening=regex.compile(SPACE + r"<\|python_tag\|>\s*(?=\{)"),
        trigger="<|python_tag|>",
        bare=regex.compile(r"\s*(?=\{)"),
        beginning=r"\s*([^\s{](?s:.*))?",
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
    dsml("deepseek_v32", "function_calls"),
    dsml("deepseek_v4", "tool_calls"),
)
NAMES = tuple(dict.fromkeys(name for one in FORMATS for name in one.names))


def call_format(name: str, template: str) -> CallFormat | None:
    """The one of this name, which of several its template decides; "auto": the one that the template has signs of."""
    named = [one for one in FORMATS if name == "auto" or name in one.names]
    fitting = [one for one in named if one.sign.search(template)]
    return next(iter(fitting or (named[-1:] if name != "auto" else [])), None)
