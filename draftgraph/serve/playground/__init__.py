"""The playground: a page at `/` that chats with the server and shows the graph of every step.

Its files are plain HTML, CSS and ES modules beside this one. Two are made from the package itself, so that the page
cannot fall behind it: `theme.css`, a template, gets the colours of all pictures, `modes.json` each mode's settings.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from draftgraph.config import RANGES, GraphConfig
from draftgraph.inspect.report import SETTINGS
from draftgraph.inspect.theme import DARK, LIGHT, PROPOSERS, template

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


def mount(app: Starlette) -> None:
    """Serves the page at `/` and its files, and nothing else, under `/playground/`.

    >>> app = Starlette()
    >>> mount(app)
    >>> [route.path for route in app.routes]
    ['/', '/playground/{name}']
    """
    contents = playground_files()

    async def part(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in contents:
            raise HTTPException(404)
        return Response(contents[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)

    for path in ("/", "/playground/{name}"):
        app.router.routes.append(Route(path, part, include_in_schema=False))


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
        mode: {
            name: {"default": getattr(GraphConfig(mode=mode), name), "least": least, "most": most}  # type: ignore[arg-type]
            for name, (least, most) in RANGES.items()
            if name in SWITCHES and name in used
        }
        for mode, used in SETTINGS.items()
    }


def theme() -> str:
    """The style sheet of `inspect`'s pictures and, in the same colours, of the page around them."""
    return template("theme.css", __package__).render(light=LIGHT, dark=DARK, proposers=PROPOSERS)
