"""The page at `/docs`: every route and field, from the server's own schema, with nothing fetched from elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from draftgraph.inspect.theme import template


def install(app: FastAPI) -> None:
    """Serves the page, and a schema without statuses that are never sent."""
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
    models = schema["components"]["schemas"]

    def body_of(operation: dict[str, Any]) -> Any:
        if "requestBody" not in operation:
            return None
        return models[kind(operation["requestBody"]["content"]["application/json"]["schema"])]

    routes = [
        (method, path, operation, body_of(operation))
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    title = f"{schema['info']['title']} {schema['info']['version']}"
    return template("docs.html", "draftgraph.serve").render(title=title, routes=routes, kind=kind, bounds=bounds)


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
