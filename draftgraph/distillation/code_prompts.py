"""Prompts about real Python functions: read from source that may be used, without importing it."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from draftgraph.engine.capture import without_garbage_collection

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
WORDINGS: dict[str, list[str]] = WORDS["code"]
WEIGHTS: dict[str, float] = WORDS["weights"]  # the kinds of requests
VERBS = re.compile(f"({'|'.join(WORDS['functions']['verbs'])})(e?s)?")
SLIPS: list[tuple[str, str]] = [(right, wrong) for right, wrong in WORDS["functions"]["slips"]]
PERMISSIVE = re.compile(r"MIT|BSD-[1-4]-Clause|0BSD|Apache-2\.0|PSF-2\.0|Python-2\.0|ISC|Unlicense|CC0-1\.0")
PERMISSIVE_CLASSIFIERS = set(WORDS["functions"]["classifiers"])
SHORTEST_DOCSTRING, LONGEST_DOCSTRING = 60, 1200  # characters
LONGEST_BODY = 40  # lines
REQUESTS_PER_FUNCTION = 3
# What a package carries along from others may have another licence.
CARRIED_ALONG = {"extern", "external", "externals", "third_party", "thirdparty", "vendor", "vendored"}
TESTS = {"test", "tests", "idle_test", "conftest.py"}
NOT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "lib-dynload"}


def python_prompts(limit: int | None, seed: int) -> list[str]:
    """Requests of every kind about functions of the standard library and of installed packages.

    Every function gets one request before any gets a second, of another kind.
    """
    draw = random.Random(seed)
    files = source_files()
    draw.shuffle(files)
    seen: set[tuple[str, str]] = set()
    asked: list[tuple[Function, list[str]]] = []
    with without_garbage_collection():  # syntax trees hold no cycles, and looking for some takes half of the time
        for file in files:
            if limit is not None and len(asked) >= limit:
                break
            for function in functions_in(file):
                key = function.name, function.documentation.split("\n", 1)[0]
                if key not in seen:
                    seen.add(key)
                    # A greater weight comes earlier more often (Efraimidis and Spirakis, 2006).
                    order = sorted(WEIGHTS, key=lambda request: -(draw.random() ** (1 / WEIGHTS[request])))
                    asked.append((function, order))
    turns = ((function, order[turn]) for turn in range(REQUESTS_PER_FUNCTION) for function, order in asked)
    different: dict[str, None] = {}
    for function, request in turns:
        if len(different) == limit:
            break
        different[ask(request, function, draw)] = None
    texts = list(different)
    draw.shuffle(texts)
    return texts


def functions_in(file: Path) -> Iterator[Function]:
    """Documented functions of a module and methods of its classes, short enough to ask about."""
    try:
        source = file.read_text(encoding="utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in strings
            module = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    lines, imports = source.split("\n"), _imports(module)
    for node in module.body:
        for member in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in member.decorator_list)
                owner = node.name if isinstance(node, ast.ClassDef) and not static else None
                if function := _function(member, owner, lines, imports):
                    yield function


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str | None, lines: list[str], imports: dict[str, str]
) -> Function | None:
    documentation = ast.get_docstring(node)
    if documentation is None or not SHORTEST_DOCSTRING <= len(documentation) <= LONGEST_DOCSTRING:
        return None
    start, inside, end = node.body[0].lineno, node.body[0].end_lineno or 0, node.end_lineno or 0
    if end - inside > LONGEST_BODY or start == node.lineno or all(_is_stub(statement) for statement in node.body[1:]):
        return None
    node.decorator_list = []
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    used = tuple(dict.fromkeys(line for name, line in imports.items() if name in names))

    def at_the_margin(first: int, last: int) -> str:
        margin = node.col_offset
        return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines[first:last])

    signature, docstring = at_the_margin(node.lineno - 1, start - 1), at_the_margin(start - 1, inside)
    return Function(node.name, owner, signature, docstring, at_the_margin(inside, end), documentation, used)


def _is_stub(statement: ast.stmt) -> bool:
    """Nothing to explain or to complete: `pass`, `...`, `raise NotImplementedError`."""
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.dump(statement)
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Pass) or isinstance(value, ast.Constant)


def _imports(module: ast.Module) -> dict[str, str]:
    """For each name that the module imports, the line that does; relative imports mean nothing elsewhere."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.level == 0):
            start = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
            for name in node.names:
                bound = name.asname or name.name.split(".")[0]
                found[bound] = start + name.name + (f" as {name.asname}" if name.asname else "")
    return found


@dataclass(frozen=True)
class Function:
    """A documented function as it stands in its source, without decorators, at the left margin."""

    name: str
    owner: str | None  # the class, for a method
    signature: str
    docstring: str
    body: str
    documentation: str  # the docstring's text
    imports: tuple[str, ...]  # those that it uses

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, on one line."""
        paragraph = " ".join(self.documentation.split("\n\n", 1)[0].split())
        sentence = re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0].replace("``", "`")
        return sentence if sentence.endswith((".", "!", "?")) else sentence.rstrip(":;,") + "."

    @property
    def does(self) -> str:
        """What follows "a function that": `returns the sum` for `Return the sum.`; nothing where no verb leads."""
        first, _, rest = self.summary.rstrip(".").partition(" ")
        verb = VERBS.fullmatch(first.lower())
        if verb is None or not 25 <= len(self.summary) <= 300:
            return ""
        if verb[2]:
            return f"{verb[0]} {rest}"
        if re.search("[^aeiou]y$", verb[1]):
            return f"{verb[1][:-1]}ies {rest}"
        return f"{verb[1]}{'es' if verb[1].endswith(('ch', 'sh', 'ss', 'x')) else 's'} {rest}"


def ask(request: str, function: Function, draw: random.Random) -> str:
    """One prompt of this kind about this function."""
    if request == "describe" and not function.does:
        request = "complete"
    sort = "method" if function.owner else "function"
    wording = draw.choice(WORDINGS[request]).format(
        name=function.name,
        function=f"method for a class `{function.owner}`" if function.owner and request == "describe" else sort,
        header=" ".join(function.signature.split()).rstrip(":"),
        summary=function.summary,
        does=function.does,
    )
    if request == "describe":
        return wording
    code = _code(request, function, draw)
    if not wording:
        return code
    shown = draw.choice(("```python\n{}\n```", "```python\n{}\n```", "```\n{}\n```", "{}")).replace("{}", code)
    return "\n\n".join((shown, wording) if draw.random() < 0.25 and wording[-1] != ":" else (wording, shown))


def _code(request: str, function: Function, draw: random.Random) -> str:
    docstring = function.docstring if draw.random() < 0.5 else _without_examples(function.docstring)
    if request == "complete":
        parts = [function.signature, docstring]
    elif request == "document" or (request != "repair" and draw.random() < 0.5):
        parts = [function.signature, function.body]
    else:
        body = _with_a_slip(function.body, draw) if request == "repair" else function.body
        parts = [function.signature, docstring, body]
    code = "\n".join(part.strip("\n") for part in parts)
    if function.owner:
        code = f"class {function.owner}:\n" + textwrap.indent(code, "    ")
    if function.imports and draw.random() < 0.4:
        code = "\n".join(function.imports) + "\n\n\n" + code
    return code


def _without_examples(docstring: str) -> str:
    """The docstring without its doctests, nor the heading that announced them."""
    kept: list[str] = []
    in_example = False
    *lines, last = docstring.split("\n")
    for line in lines:
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if in_example:
            while kept and re.fullmatch(r"\s*(?:(?:for )?examples?:{0,2}|[-=~]*)", kept[-1], re.IGNORECASE):
                kept.pop()
        else:
            kept.append(line)
    if last.lstrip().startswith(">>>") or in_example:
        last = last[: len(last) - len(last.lstrip())] + docstring[-3:]
    return "\n".join([*kept, last])


def _with_a_slip(body: str, draw: random.Random) -> str:
    """The body with one operator or constant replaced by a wrong one, where it has any."""
    slips = [(place.start(), right, wrong) for right, wrong in SLIPS for place in re.finditer(re.escape(right), body)]
    if not slips:
        return body
    start, right, wrong = draw.choice(slips)
    return body[:start] + wrong + body[start + len(right) :]


def source_files() -> list[Path]:
    """Public modules of the standard library and of permissively licensed packages, in an order of their own."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[tuple[str, str], Path] = {}
    for file in library.rglob("*.py"):
        parts = file.relative_to(library).parts
        if parts[0] not in NOT_OF_THE_LIBRARY and is_public(parts):
            found["", "/".join(parts)] = file
    for package in metadata.distributions():
        described = package.metadata  # parsed anew at each access
        if is_permissive(described):
            for path in package.files or []:
                if path.suffix == ".py" and is_public(path.parts):
                    found.setdefault((described["Name"], "/".join(path.parts)), Path(str(package.locate_file(path))))
    return [found[name] for name in sorted(found)]


def is_permissive(described: metadata.PackageMetadata) -> bool:
    """Whether every licence that the package names is a permissive one; what names none is not."""
    if expressions := described.get_all("License-Expression"):
        named = re.sub(r"\b(?:AND|OR)\b|[()]", " ", " ".join(expressions)).split()
        return bool(named) and all(PERMISSIVE.fullmatch(licence) for licence in named)
    classifiers = {line for line in described.get_all("Classifier") or [] if line.startswith("License ::")}
    return bool(classifiers) and classifiers <= PERMISSIVE_CLASSIFIERS


def is_public(parts: tuple[str, ...]) -> bool:
    private = any(part.startswith(("_", ".")) and part != "__init__.py" for part in parts)
    test = parts[-1].startswith("test_") or parts[-1].endswith(("_test.py", "_tests.py")) or not TESTS.isdisjoint(parts)
    return not private and not test and CARRIED_ALONG.isdisjoint(parts)
