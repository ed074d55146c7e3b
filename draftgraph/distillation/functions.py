"""Prompts about real Python functions, read from source without importing it."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

from draftgraph.distillation.coding import Function, ask, requests_in_drawn_order
from draftgraph.distillation.licences import source_files
from draftgraph.distillation.prompt import Prompt
from draftgraph.garbage import without_garbage_collection

CODE = "code"
SHORTEST_DOCSTRING, LONGEST_DOCSTRING = 60, 1200  # characters
LONGEST_BODY = 40  # lines
REQUESTS_PER_FUNCTION = 3


def python_prompts(limit: int | None, seed: int) -> list[Prompt]:
    """Requests to complete, explain, test or repair functions of the standard library and of installed packages.

    Every function is asked about once before any is asked about again, in another way.
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
                if function.key not in seen:
                    seen.add(function.key)
                    asked.append((function, requests_in_drawn_order(draw)))
    turns = ((function, order[turn]) for turn in range(REQUESTS_PER_FUNCTION) for function, order in asked)
    texts: dict[str, None] = {}
    for function, request in turns:
        if len(texts) == limit:
            break
        texts[ask(request, function, draw)] = None
    prompts = [Prompt(text, CODE) for text in texts]
    draw.shuffle(prompts)
    return prompts


def functions_in(file: Path) -> Iterator[Function]:
    """Documented functions of a module and methods of its classes, short enough to ask about."""
    try:
        source = file.read_text(encoding="utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in other people's strings
            module = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    lines = source.split("\n")
    imports = _imports(module)
    for node in module.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                owner = node.name if isinstance(node, ast.ClassDef) and not _is_static(member) else None
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
    return Function(
        name=node.name,
        owner=owner,
        signature=_dedented(lines[node.lineno - 1 : start - 1], node.col_offset),
        docstring=_dedented(lines[start - 1 : inside], node.col_offset),
        body=_dedented(lines[inside:end], node.col_offset),
        documentation=documentation,
        imports=tuple(dict.fromkeys(line for name, line in imports.items() if name in names)),
    )


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)


def _is_stub(statement: ast.stmt) -> bool:
    """Nothing to explain or to complete: `pass`, `...`, `raise NotImplementedError`."""
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.dump(statement)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


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


def _dedented(lines: list[str], columns: int) -> str:
    return "\n".join(line[columns:] if not line[:columns].strip() else line for line in lines)
