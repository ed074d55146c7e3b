"""From a request to the grammar that its answers must conform to, in the form in which a job carries it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic_core import from_json

from draftgraph.batching.grammar import described
from draftgraph.errors import UsageError
from draftgraph.serve import wire
from draftgraph.serve.errors import refusal
from draftgraph.serve.schemas import GenerationRequest, JSONObject, ResponseFormat, StructuredOutputs

LONGEST = 64 * 1024  # characters
MOST_SECONDS = 0.25  # to compile the grammars of all answers to a request: others' steps wait for that, twice
TOO_MUCH = "the grammar takes too much time or memory to compile: make it simpler"
COMMAND = [sys.executable, "-m", "draftgraph.serve.grammar_process"]


class Grammars:
    """Finds the grammars of requests and tries them, one by one, in a process of their own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def of(self, request: GenerationRequest, answers: int) -> JSONObject | None:
        """What so many answers must conform to; None where any text will do."""
        if (found := grammar_of(request)) is None:
            return None
        name, grammar = found
        await self.check(grammar, name, answers)
        return grammar

    async def check(self, grammar: JSONObject, param: str, answers: int) -> None:
        """Refuses one that the engine could not follow, or not soon."""
        line = wire.line(grammar)
        if len(line) > LONGEST:
            raise refusal(f"the grammar is too long: {LONGEST} characters are the most", param)
        told = await asyncio.get_running_loop().run_in_executor(self._thread, self._tried, line)
        if told.get("seconds", 0.0) * answers > MOST_SECONDS:
            raise refusal(TOO_MUCH, param)
        if "error" in told:
            raise refusal(told["error"], param)

    def _tried(self, grammar: bytes) -> dict[str, Any]:
        """Runs in a thread of its own. A process that ends over a grammar is followed by another."""
        try:
            process = self._process = self._process or started(described(self._tokenizer))
        except UsageError as error:
            return {"error": str(error)}
        if told := exchange(process, grammar):
            return told
        self._process = None
        return {"error": TOO_MUCH}


def started(tokenizer: dict[str, Any]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, start_new_session=True)
    if exchange(process, wire.line(tokenizer)) is None:
        raise RuntimeError("the process that tries grammars does not start")
    return process


def exchange(process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any] | None:
    """None where the process ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        if told := process.stdout.readline():
            return wire.message(told)
    except BrokenPipeError:
        pass
    process.wait()
    return None


def grammar_of(request: GenerationRequest) -> tuple[str, JSONObject] | None:
    """By the name of the field that asks for it."""
    given = [(name, value) for name in FIELDS if (value := getattr(request, name)) not in (None, "")]
    asked = [(name, grammar) for name, value in given if (grammar := FIELDS[name](value, name)) is not None]
    if len(asked) > 1:
        names = [name for name, _ in asked]
        raise refusal(f"{' and '.join(names)} cannot be followed at once: send one of them", names[1])
    return asked[0] if asked else None


def from_response_format(wanted: ResponseFormat, name: str) -> JSONObject | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"} if wanted.given is None else from_schema(wanted.given, name)
    if wanted.json_schema is None:
        raise refusal(f"{name} of type json_schema needs a json_schema", name)
    return from_schema(wanted.json_schema.given, name)


def from_structured_outputs(wanted: StructuredOutputs, name: str) -> JSONObject | None:
    kinds = wanted.model_dump(exclude_none=True, by_alias=True)
    found = [FIELDS[f"guided_{kind}"](value, f"{name}.{kind}") for kind, value in kinds.items() if kind in KINDS]
    if len(found) != 1:
        raise refusal(f"{name} needs one of {', '.join(KINDS)}, not {len(found)}", name)
    return found[0]


def from_schema(schema: Any, name: str) -> JSONObject:
    """An object, true or false, or a text of that."""
    if isinstance(schema, str):
        try:
            schema = from_json(schema)
        except ValueError as error:
            raise refusal(f"{name} is not JSON: {error}", name) from error
    if not isinstance(schema, dict | bool):
        raise refusal(f"{name} must be a JSON schema: an object", name)
    return {"type": "json_schema", "schema": schema}


def from_json_object(wanted: bool, name: str) -> JSONObject | None:
    return {"type": "json_object"} if wanted else None


def carrying(kind: str, field: str) -> Callable[[Any, str], JSONObject]:
    return lambda value, name: {"type": kind, field: value}


KINDS = ("json", "regex", "choice", "grammar", "json_object")
FIELDS: dict[str, Callable[[Any, str], JSONObject | None]] = {
    "response_format": from_response_format,
    "structured_outputs": from_structured_outputs,
    "guided_json": from_schema,
    "guided_json_object": from_json_object,
    "guided_regex": carrying("regex", "pattern"),
    "guided_choice": carrying("choice", "choices"),
    "guided_grammar": carrying("lark", "grammar"),
    "grammar": carrying("lark", "grammar"),
    "json_schema": from_schema,
}
