"""Standalone SVG documents: one view of a step, or several side by side, with the legend that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from draftgraph.errors import UsageError
from draftgraph.inspect.markup import Picture, element, move, text
from draftgraph.inspect.mask import mask_picture
from draftgraph.inspect.nodes import CORNERS, graph_picture, tree_picture
from draftgraph.inspect.record import StepRecord
from draftgraph.inspect.theme import LETTERS, THEMES

View = Literal["graph", "tree", "mask"]
VIEWS = {"graph": graph_picture, "tree": tree_picture, "mask": mask_picture}

MARGIN = 22.0
BETWEEN = 44.0  # panels
TITLE, CAPTION = 32.0, 22.0  # heights
KEYS = {
    "root": "end of the text",
    "draft": "drafted",
    "merged": "merged",
    "copied": "copied from the text",
    "recycled": "recycled",
    "accepted": "accepted",
    "rejected": "rejected",
    "unverified": "not checked",
    "bonus": "the target's own token",
}
SAMPLE_WIDTH, SAMPLE_HEIGHT = 32.0, 18.0
KEY_LINE = 28.0
SHRINK = 0.75


@dataclass(frozen=True)
class Panel:
    """One picture of several.

    `outcome=False` shows the step before the target's check; `focus` lights up the path to a tree node.
    """

    step: StepRecord
    view: View = "graph"
    title: str = ""
    caption: str = ""
    outcome: bool = True
    focus: int | None = None


def draw(panel: Panel) -> Picture:
    if panel.view not in VIEWS:
        raise UsageError(f"view must be one of {', '.join(VIEWS)}, not {panel.view!r}")
    if panel.focus is not None and not 0 <= panel.focus < len(panel.step.tree):
        raise UsageError(f"focus must be between 0 and {len(panel.step.tree) - 1}, not {panel.focus}")
    return VIEWS[panel.view](panel.step, panel.outcome, panel.focus)


def side_by_side_svg(panels: Sequence[Panel], theme: str = "light", stacked: bool = False) -> str:
    """One picture of several panels with a common legend, for documents; `stacked` puts one under the other.

    >>> svg = side_by_side_svg([Panel(tree_step, title="A tree"), Panel(graph_step, title="A graph")])  # doctest: +SKIP
    """
    x = y = MARGIN
    width = height = 0.0
    parts = []
    for panel in panels:
        picture = draw(panel)
        body = y
        if panel.title:
            parts.append(text(x, y + 8, panel.title, "title"))
            body += TITLE
        if panel.caption:
            parts.append(text(x, body, panel.caption, "caption"))
            body += CAPTION
        parts.append(move(picture, x, body))
        across = max(picture.width, 8.4 * len(panel.title), 6.2 * len(panel.caption))
        width, height = max(width, x + across), max(height, body + picture.height)
        x, y = (x, height + BETWEEN) if stacked else (x + across + BETWEEN, y)
    key = legend(keys(panels), width - MARGIN)
    parts.append(move(key, MARGIN, height + MARGIN))
    whole = Picture(width + MARGIN, height + MARGIN + key.height + MARGIN / 2, "".join(parts))
    return document(whole, theme, "; ".join(panel.title or panel.view for panel in panels))


def document(picture: Picture, theme: str, title: str) -> str:
    """A picture as an SVG file of its own, on the theme's background."""
    if theme not in THEMES:
        raise UsageError(f"theme must be one of {', '.join(THEMES)}, not {theme!r}")
    colors = THEMES[theme]
    ground = element("rect", width="100%", height="100%", rx=10.0, fill=colors.background)
    return element(
        "svg",
        element("title", escape(title)),
        element("style", colors.style_sheet()),
        ground,
        picture.body,
        xmlns="http://www.w3.org/2000/svg",
        class_="dg",
        role="img",
        **_size(picture),
    )


def inline(picture: Picture, kind: str, title: str, role: str = "group") -> str:
    """A picture for a page that brings the style sheet and lets it shrink, as far as it can still be read."""
    narrowest = f"min-width:{round(SHRINK * picture.width)}px"
    attributes = {"class_": f"dg {kind}", "role": role, "aria_label": title, "style": narrowest}
    return element("svg", picture.body, **attributes, **_size(picture))


def _size(picture: Picture) -> dict[str, object]:
    width, height = round(picture.width + 2), round(picture.height + 2)
    return {"width": width, "height": height, "viewBox": f"-1 -1 {width} {height}"}


def keys(panels: Sequence[Panel]) -> list[str]:
    """What a legend must explain: all that stands in the panels."""
    found: set[str] = set()
    for panel in panels:
        step = panel.step
        shown = step.shown if panel.view == "graph" else step.tree
        found |= {node.source for node in shown}
        if panel.view == "graph" and any(node.alias_of is not None for node in step.shown):
            found.add("merged")
        if panel.outcome:
            found |= {"accepted" if node.accepted else "rejected" for node in shown if node.parent is not None}
            found |= {"unverified" for node in step.shown if panel.view == "graph" and not node.verified}
            found |= {"bonus"} if panel.view != "mask" and step.bonus is not None else set()
    return [key for key in KEYS if key in found]


def legend(found: list[str], width: float) -> Picture:
    """Samples with their names, in as many lines as the width asks for."""
    parts = []
    x, y, right = 0.0, SAMPLE_HEIGHT / 2, 0.0
    for key in found:
        across = SAMPLE_WIDTH + 8 + 7.2 * len(KEYS[key]) + 20
        if x and x + across > width:
            x, y = 0.0, y + KEY_LINE
        corner = CORNERS.get(key, SAMPLE_HEIGHT / 2)
        outline = element(
            "rect",
            class_="pill",
            x=x,
            y=y - SAMPLE_HEIGHT / 2,
            width=SAMPLE_WIDTH,
            height=SAMPLE_HEIGHT,
            rx=corner,
        )
        letter = text(x + SAMPLE_WIDTH / 2, y, LETTERS.get(key, ""), "badge token")
        parts.append(element("g", outline, letter, class_=f"draft {key}" if key == "rejected" else key))
        parts.append(text(x + SAMPLE_WIDTH + 8, y, KEYS[key], "key"))
        x += across
        right = max(right, x)
    return Picture(right, y + SAMPLE_HEIGHT / 2, "".join(parts))
