"""What reports have in common: tables, figures as text, pictures, and files that take the place of older ones."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftgraph.extras import needed
from draftgraph.files import replacing

MEAN = "mean"  # the last row of a table, drawn apart
REASON = "reason"  # a column of whole sentences
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
LINES = ("solid", "dashed", "dotted")
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}  # a legend


def read_data(name: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads(files("draftgraph.bench").joinpath(name).read_text(encoding="utf-8"))


TEXTS = read_data("texts.toml")


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    lines: list[list[str]]

    def to_markdown(self) -> str:
        return f"## {self.title}\n\n{self.cells}\n"

    @property
    def cells(self) -> str:
        """In Markdown, without the title."""
        marks = ["---", *["---:"] * (len(self.header) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.header, marks, *self.lines))


def document(lead: Sequence[str], tables: Iterable[Table], picture: str | None = None, alt: str = "") -> str:
    """Markdown: a title, paragraphs, a link to the picture where there is one, and tables."""
    paragraphs = [f"# {lead[0]}", *lead[1:], *([f"![{alt}]({picture})"] if picture else [])]
    return "\n\n".join([*paragraphs, "\n".join(table.to_markdown() for table in tables)])


def shown_settings(settings: Mapping[str, Any], hidden: Sequence[str] = ()) -> dict[str, str]:
    known = {name: value for name, value in settings.items() if name not in hidden and value is not None}
    return {name.replace("_", " "): str(value) for name, value in known.items()}


def described(settings: Mapping[str, Any], hidden: Sequence[str] = ()) -> str:
    return "; ".join(f"{name}: {value}" for name, value in shown_settings(settings, hidden).items())


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def same_of(same: int | None, answers: int, ties: int) -> str:
    """How many answers have the tokens of plain decoding; None: not compared."""
    return ("" if same is None else f"{same} of {answers}") + (f" ({ties} ties)" if ties else "")


def write_files(folder: Path, contents: Mapping[str, str | dict[str, Any]]) -> None:
    """Text as it is, data as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def need_matplotlib() -> None:
    """Called before any work, so that a missing package is found at the start."""
    needed("matplotlib", "plots need matplotlib", "bench")


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def new_figure(title: str, width: float, height: float, **style: Any) -> Any:
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, **style)
    return figure


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def by_powers_of_two(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def save_figure(figure: Any, folder: Path, name: str, kinds: Sequence[str] = ("svg", "png")) -> None:
    for kind in kinds:
        figure.savefig(folder / f"{name}.{kind}", dpi=150)
