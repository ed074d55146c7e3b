"""Colours of the pictures, light and dark, and the style sheet made from them.

Colours are written out, not left to CSS variables: many SVG viewers do not know those.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

LETTERS = {"root": "●", "draft": "D", "merged": "M", "copied": "C", "recycled": "R", "bonus": "★"}
PROPOSERS = ("draft", "merged", "copied", "recycled")


@dataclass(frozen=True)
class Theme:
    background: str
    ink: str
    muted: str
    line: str
    accepted: str
    draft: str
    merged: str
    copied: str
    recycled: str

    def mix(self, color: str, share: float) -> str:
        """The colour at this share on the background."""
        pairs = zip(bytes.fromhex(color[1:]), bytes.fromhex(self.background[1:]), strict=True)
        return "#" + "".join(f"{round(share * over + (1 - share) * under):02x}" for over, under in pairs)

    def style_sheet(self) -> str:
        sources = {source: getattr(self, source) for source in PROPOSERS}
        return template("picture.css").render(
            asdict(self),
            faint=self.mix(self.muted, 0.45),
            merged_soft=self.mix(self.merged, 0.65),
            accepted_soft=self.mix(self.accepted, 0.45),
            highlight=self.mix(self.draft, 0.2),
            sources=[(name, color, self.mix(color, 0.13), self.mix(color, 0.45)) for name, color in sources.items()],
        )


@cache
def template(name: str, package: str = "draftgraph.inspect") -> Template:
    """A Jinja template among the files of a package; values are escaped in pages."""
    page = name.endswith(".html")
    environment = Environment(autoescape=page, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


COLORS = {  # on a light background, and on a dark one
    "background": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#656d76", "#8b949e"),
    "line": ("#d0d7de", "#30363d"),
    "accepted": ("#1a7f37", "#3fb950"),
    "draft": ("#0969da", "#58a6ff"),
    "merged": ("#8250df", "#bc8cff"),
    "copied": ("#bc4c00", "#f0883e"),
    "recycled": ("#1b7c83", "#39c5cf"),
}
LIGHT, DARK = (Theme(*colors) for colors in zip(*COLORS.values(), strict=True))
THEMES = {"light": LIGHT, "dark": DARK}
