"""A report as one self-contained page, and that page inside a notebook."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from draftgraph.inspect.mask import mask_picture
from draftgraph.inspect.nodes import graph_picture
from draftgraph.inspect.record import StepRecord
from draftgraph.inspect.svg import KEYS, Panel, inline, keys, legend
from draftgraph.inspect.text import visible
from draftgraph.inspect.theme import DARK, LETTERS, LIGHT

if TYPE_CHECKING:
    from draftgraph.inspect.report import GraphReport

NOTEBOOK_HEIGHT = 760
LEGEND_WIDTH = 330.0  # of a phone
TREE_SETTINGS = ("mode", "k", "theta_prob", "theta_sib", "max_nodes", "max_depth", "growth", "sibling_pruning", "cost")
SETTINGS = {  # that the mode uses
    "off": ("mode",),
    "chain": ("mode", "chain_length", "verification"),
    "tree": TREE_SETTINGS,
    "graph": (*TREE_SETTINGS, "tau"),
    "auto": (*TREE_SETTINGS, "tau"),
}


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def page(report: GraphReport) -> str:
    return _template().render(
        light=LIGHT,
        dark=DARK,
        light_style=Markup(LIGHT.style_sheet()),
        dark_style=Markup(DARK.style_sheet()),
        prompt=visible(report.prompt, keep=" \n\t"),
        settings={name: report.config[name] for name in SETTINGS[str(report.config["mode"])]},
        facts=report.facts,
        token_count=report.tokens_by_source.total(),
        tokens_per_pass=f"{report.tokens_per_pass:.2f}",
        sources=[(source, KEYS[source], LETTERS[source], count) for source, count in _counted(report)],
        steps=[_step(report, number, step) for number, step in enumerate(report.steps)],
        legend=_legend(report),
    )


def _counted(report: GraphReport) -> list[tuple[str, int]]:
    counts = report.tokens_by_source
    return [(source, counts[source]) for source in LETTERS if counts[source]]


def _step(report: GraphReport, number: int, step: StepRecord) -> dict[str, Any]:
    return {
        "heading": report.heading(number),
        "explanation": report.explanation(number),
        "tokens": [(visible(token.text, keep=" \n\t"), token.source) for token in step.tokens],
        "graph": Markup(inline(graph_picture(step), "graph", f"Graph of step {number + 1}")),
        "mask": Markup(inline(mask_picture(step), "mask", f"Ancestor mask of step {number + 1}", role="list")),
        "size": len(step.tree),
    }


def _legend(report: GraphReport) -> list[tuple[str, Markup]]:
    panels = [Panel(step, view) for step in report.steps for view in ("graph", "mask")]
    return [(key, Markup(inline(legend([key], 0), "key", KEYS[key], role="img"))) for key in keys(panels)]


def pictured(report: GraphReport, name: str) -> Markup:
    """The graph of a report's first step with its legend, for a page that brings the style sheet."""
    picture = inline(graph_picture(report.step(0)), "graph", f"Graph of a step, {name}", role="img")
    known = legend(keys([Panel(report.step(0), "graph")]), LEGEND_WIDTH)
    caption = Markup("<b>{}</b>: {}").format(name, report.explanation(0))
    parts = (caption, Markup(picture), Markup(inline(known, "key", "What the marks mean", role="img")))
    return Markup('<figure><figcaption>{}</figcaption><div class="scroll">{}</div>{}</figure>').format(*parts)


def notebook_frame(document: str) -> str:
    """The page in a frame, so that its styles and scripts and the notebook's do not meet."""
    frame = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:1px solid #8886;border-radius:8px"
    return f'<iframe title="draftgraph" sandbox="allow-scripts" style="{frame}" srcdoc="{escape(document)}"></iframe>'
