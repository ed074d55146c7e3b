"""SVG elements as strings, escaped in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

BASELINE = "0.34em"  # puts the middle of a text on its y


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    body: str


def element(name: str, *children: str, **attributes: object) -> str:
    """One element; `class_` and `data_id` become class and data-id, None leaves an attribute out."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{listed}>{''.join(children)}</{name}>" if children else f"<{name}{listed}/>"


def _attribute(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, kind: str) -> str:
    return element("text", escape(content), x=x, y=y, dy=BASELINE, class_=kind)


def move(picture: Picture, x: float, y: float) -> str:
    return element("g", picture.body, transform=f"translate({x:g} {y:g})")
