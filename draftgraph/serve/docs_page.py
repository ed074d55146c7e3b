"""The page at `/docs`: every route and field, from the server's own schema, with nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-top: 1px solid #8884; }
code { font-family: ui-monospace, monospace; }
"""


def install(app: FastAPI) -> None:
    """Serves the page, and a schema that says nothing of statuses which are never sent."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # sent as 400, as OpenAI does
        return schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))


def page(schema: dict[str, Any]) -> str:
    title = f"{schema['info']['title']} {schema['info']['version']}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    sections = [
        section
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        for section in route(method, path, operation, schema)
    ]
    also = "<p>The same for programs: <a href=/openapi.json>/openapi.json</a></p>"
    return "".join([head, f"<h1>{title}</h1>", also, *sections])


def route(method: str, path: str, operation: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    if body := operation.get("requestBody"):
        yield from fields(body["content"]["application/json"]["schema"], schema)
    statuses = [f"<tr><td>{status}<td>{escape(one['description'])}" for status, one in operation["responses"].items()]
    yield f"<table><tr><th>Status<th>{''.join(statuses)}</table>"


def fields(reference: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    model = schema["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
    needed = model.get("required", [])
    yield "<table><tr><th>Field<th>Type<th>"
    for name, field in model["properties"].items():
        notes = ", ".join(
            filter(None, ["required" if name in needed else "", field.get("description", ""), bounds(field)])
        )
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(kind(field))}<td>{escape(notes)}"
    yield "</table>"


def kind(field: dict[str, Any]) -> str:
    if choices := field.get("anyOf"):
        return " or ".join(dict.fromkeys(kind(one) for one in choices if one.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def bounds(field: dict[str, Any]) -> str:
    for one in (field, *field.get("anyOf", [])):
        least = one.get("minimum", one.get("exclusiveMinimum"))
        most = one.get("maximum", one.get("exclusiveMaximum"))
        if least is not None and most is not None:
            return f"{least:g} to {most:g}"
    return ""
