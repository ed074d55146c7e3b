"""One page from parts: a run, a study, or several of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from draftgraph.bench.report import REASON, Table
from draftgraph.inspect.theme import DARK, LIGHT

MOST_LINES = 20  # of a table that is not folded
LABEL = re.compile(r"^(.*) \((\w+-cost, inflated)\)$")


@dataclass(frozen=True)
class Section:
    """A question, its answer in a sentence or two, and what they go by."""

    title: str
    text: str = ""
    charts: Sequence[Markup] = ()
    tables: Sequence[Table] = ()
    badge: tuple[str, str] | None = None  # a verdict: its kind (good, look, wrong) and its words
    wide: Sequence[Markup] = ()  # pictures that may need the whole width


@dataclass(frozen=True)
class Part:
    """What one folder of measurements says."""

    title: str
    facts: dict[str, str]  # the machine, the versions, the settings
    headline: str
    sections: Sequence[Section]
    verdicts: Sequence[tuple[str, str, str]] = field(default=())  # kind, signature, line
    footnote: str = ""
    name: str = ""  # of the folder: what tells it from others of the same models

    def named(self, name: str) -> Part:
        return replace(self, name=name)


def page(parts: Sequence[Part]) -> str:
    """Everything in one file: no other file and no network needed."""
    return template().render(
        parts=parts,
        title="; ".join(part.title for part in parts),
        light=LIGHT,
        dark=DARK,
        light_style=Markup(LIGHT.style_sheet()),
        dark_style=Markup(DARK.style_sheet()),
        cell=cell,
        reason=REASON,
        most_lines=MOST_LINES,
    )


@cache
def template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def cell(content: str) -> Markup:
    """A figure of an inflated target keeps its label, below it and small."""
    if found := LABEL.match(content):
        return Markup("{}<small>{}</small>").format(*found.groups())
    return escape(content)
