"""Small charts as inline SVG: narrow enough to be read on a phone, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import shorten

from markupsafe import Markup

from draftgraph.inspect.svg import element, text

WIDTH = 360.0
NAMES, VALUES = 112.0, 52.0  # room for the names of bars, and for their values
LINE = 24.0
MOST_BESIDE, MOST_ABOVE = 14, 56  # characters of a name
PLOT_HEIGHT = 170.0
LEFT, BOTTOM = 40.0, 38.0
COLOURS = (0, 2, 4, 5, 3, 6, 1, 7)  # of series: classes of the style sheet, the first ones unlike each other
TICKS = 4
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    colour: int = 0


@dataclass(frozen=True)
class Rail:
    """Where bars begin and what stands beside them: their names, or above them where those are long."""

    left: float
    line: float  # from bar to bar

    @classmethod
    def of(cls, names: Sequence[str]) -> Rail:
        longest = max(map(len, names), default=0)
        return cls(NAMES, LINE) if longest <= MOST_BESIDE else cls(4.0, 1.75 * LINE)

    def middle(self, place: int) -> float:
        return (place + 1) * self.line - LINE / 2

    def name(self, place: int, name: str) -> str:
        if self.left == NAMES:
            return text(NAMES - 8, self.middle(place), name, "name")
        return text(self.left, self.middle(place) - 0.75 * LINE, shorten(name, MOST_ABOVE, placeholder="…"), "above")


def bars(title: str, rows: Sequence[Bar], reference: float | None = None) -> Markup:
    """One under the other, with intervals where there are some, and a line at a `reference`."""
    rail = Rail.of([row.name for row in rows])
    scale = (WIDTH - rail.left - VALUES) / max([row.high or row.value for row in rows] + [reference or 0.0, 1e-9])
    parts = []
    for place, row in enumerate(rows):
        middle = rail.middle(place)
        parts.append(rail.name(place, row.name))
        width = max(scale * row.value, 0.5)
        parts.append(rectangle(rail.left, middle - 8, width, 16, row.colour, f"{row.name}: {row.shown}"))
        end = scale * (row.high or row.value)
        if row.low is not None and row.high is not None:
            low, high = rail.left + scale * row.low, rail.left + scale * row.high
            parts.append(segment(low, middle, high, middle, "interval"))
        parts.append(text(rail.left + end + 6, middle, row.shown, "value"))
    if reference is not None:
        x = rail.left + scale * reference
        parts.append(segment(x, 0, x, rail.line * len(rows), "reference"))
    return figure(title, "".join(parts), rail.line * len(rows))


def stacks(title: str, rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """Shares of one, side by side in every row; the keys of the first row are the legend."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    rail = Rail.of(list(rows))
    scale = WIDTH - rail.left - 4
    parts = []
    for place, (row_name, row) in enumerate(rows.items()):
        middle, x = rail.middle(place), rail.left
        parts.append(rail.name(place, row_name))
        for colour, name in enumerate(names):
            width = scale * row.get(name, 0.0)
            if width > 0:
                parts.append(
                    rectangle(x, middle - 8, width, 16, of_series(colour), f"{row_name}, {name}: {row[name]:.1%}")
                )
            x += width
    return figure(title, "".join(parts), rail.line * len(rows), names)


def lines(title: str, series: Mapping[str, Points], across: str, logarithmic: bool = False) -> Markup:
    """Points of every series joined, from zero up; `across` says what goes from left to right."""
    xs = sorted({x for points in series.values() for x, _ in points})
    highest = nice(max((y for points in series.values() for _, y in points), default=1.0))
    left, right = (math.log(xs[0]), math.log(xs[-1])) if logarithmic else (xs[0], xs[-1])
    room = WIDTH - LEFT - 12

    def at(x: float, y: float) -> tuple[float, float]:
        share = ((math.log(x) if logarithmic else x) - left) / ((right - left) or 1.0)
        return LEFT + room * share, 8 + PLOT_HEIGHT * (1 - y / highest)

    parts = []
    for tick in range(TICKS + 1):
        value = highest * tick / TICKS
        _, y = at(xs[0], value)
        parts += [segment(LEFT, y, WIDTH - 12, y, "grid"), text(LEFT - 6, y, f"{value:g}", "name")]
    shown = xs if len(xs) <= 8 else xs[:: math.ceil(len(xs) / 8)]
    parts += [text(at(x, 0)[0], PLOT_HEIGHT + 20, f"{x:g}", "tick") for x in shown]
    parts.append(text(LEFT + room / 2, PLOT_HEIGHT + BOTTOM, across, "tick"))
    for colour, (name, points) in enumerate(series.items()):
        places = [at(x, y) for x, y in sorted(points)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(element("polyline", points=joined, class_=f"line c{of_series(colour)}"))
        for (x, y), (value_x, value_y) in zip(places, sorted(points), strict=True):
            said = element("title", escape(f"{name}: {value_y:.3g} at {value_x:g}"))
            parts.append(element("circle", said, cx=x, cy=y, r=3.0, class_=f"dot c{of_series(colour)}"))
    return figure(title, "".join(parts), PLOT_HEIGHT + BOTTOM + 10, list(series))


def figure(title: str, body: str, height: float, names: Sequence[str] = ()) -> Markup:
    picture = element(
        "svg", body, viewBox=f"0 0 {WIDTH:g} {height:g}", class_="chart", role="img", aria_label=title, width="100%"
    )
    keys = "".join(f'<span class="key c{of_series(place)}">{escape(name)}</span>' for place, name in enumerate(names))
    legend = f'<p class="keys">{keys}</p>' if names else ""
    return Markup(f"<figure><figcaption>{escape(title)}</figcaption>{picture}{legend}</figure>")


def of_series(place: int) -> int:
    return COLOURS[place % len(COLOURS)]


def rectangle(x: float, y: float, width: float, height: float, colour: int, said: str) -> str:
    where = {"x": float(x), "y": float(y), "width": float(width), "height": float(height), "rx": 2.0}
    return element("rect", element("title", escape(said)), **where, class_=f"bar c{colour}")


def segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)


def nice(value: float) -> float:
    """The next number up that divides into four well.

    >>> nice(3.1), nice(0.9), nice(17)
    (4.0, 1.0, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return float(next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.999))
