"""The playground: a page at `/` that chats with the server and shows the graph of every step.

Its files are plain HTML, CSS and ES modules beside this one. Two more are made here from the package itself, so that
the page cannot fall behind it: `theme.css`, the colours of all our pictures, and `modes.json`, each mode's settings.
"""

from __future__ import annotations

import json
from importlib.resources import files
from string import Template
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from draftgraph.config import RANGES, GraphConfig
from draftgraph.inspect.report import SETTINGS
from draftgraph.inspect.theme import DARK, LIGHT, PROPOSERS, Theme

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SWITCHES = ("k", "tau", "theta_prob", "theta_sib", "max_nodes")

PAGE_COLORS = Template("""
:root {
  --background: $background; --ink: $ink; --muted: $muted; --line: $line; --surface: $surface; --raised: $raised;
  --focus: $draft; --good: $accepted; --good-tint: $accepted_tint; --wrong: $wrong; --wrong-tint: $wrong_tint;
}
""")
TOKEN_COLORS = Template(".is-$source { --color: $color; --tint: $tint; }\n")


def mount(app: Starlette) -> None:
    """Serves the page at `/` and its files, and nothing else, under `/playground/`.

    >>> app = Starlette()
    >>> mount(app)
    >>> [route.path for route in app.routes]
    ['/', '/playground/{name}']
    """
    contents = playground_files()

    async def page(request: Request) -> Response:
        return _response("index.html", contents)

    async def part(request: Request) -> Response:
        return _response(request.path_params["name"], contents)

    app.router.routes.append(Route("/", page, include_in_schema=False))
    app.router.routes.append(Route("/playground/{name}", part, include_in_schema=False))


def _response(name: str, contents: dict[str, bytes]) -> Response:
    if name not in contents:
        raise HTTPException(404)
    return Response(contents[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


def playground_files() -> dict[str, bytes]:
    """All that the page consists of, by name."""
    written = {
        file.name: file.read_bytes()
        for file in files(__package__).iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in TYPES
    }
    return written | {"theme.css": theme().encode(), "modes.json": json.dumps(modes()).encode()}


def modes() -> dict[str, dict[str, dict[str, Any]]]:
    """The switches that each mode uses, with their defaults and bounds.

    >>> modes()["graph"]["theta_prob"], modes()["chain"]
    ({'default': 0.2, 'least': 0, 'most': 1}, {})
    """
    return {
        mode: {name: _switch(GraphConfig(mode=mode), name) for name in SWITCHES if name in used}  # type: ignore[arg-type]
        for mode, used in SETTINGS.items()
    }


def _switch(config: GraphConfig, name: str) -> dict[str, Any]:
    least, most = RANGES[name]
    return {"default": getattr(config, name), "least": least, "most": most}


def theme() -> str:
    """The style sheet of `inspect`'s pictures and, in the same colours, of the page around them."""
    light, dark = _colors(LIGHT, "#cf222e"), _colors(DARK, "#ff7b72")
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _colors(colors: Theme, wrong: str) -> str:
    sources = {source: getattr(colors, source) for source in PROPOSERS} | {"target": colors.accepted}
    page = PAGE_COLORS.substitute(
        vars(colors),
        surface=colors.mix(colors.muted, 0.06),
        raised=colors.mix(colors.muted, 0.14),
        accepted_tint=colors.mix(colors.accepted, 0.13),
        wrong=wrong,
        wrong_tint=colors.mix(wrong, 0.13),
    )
    tokens = [
        TOKEN_COLORS.substitute(source=source, color=color, tint=colors.mix(color, 0.16))
        for source, color in sources.items()
    ]
    return "".join([page, *tokens, colors.style_sheet()])
