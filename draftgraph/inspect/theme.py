"""Colours of the pictures, light and dark, and the style sheet made from them.

Colours are written out, not left to CSS variables: many SVG viewers do not know those.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from string import Template

LETTERS = {"root": "●", "draft": "D", "merged": "M", "copied": "C", "recycled": "R", "bonus": "★"}
PROPOSERS = ("draft", "merged", "copied", "recycled")

PICTURE = Template("""
.dg text { font: 13px $monospace; fill: $ink; }
.dg .title { font: 600 16px $sans; }
.dg .caption, .dg .key { font: 12.5px $sans; fill: $muted; }
.dg .small { font-size: 10.5px; fill: $muted; }
.dg .index, .dg .score { text-anchor: end; }
.dg .mid { text-anchor: middle; }
.dg .badge { font-size: 11px; font-weight: 700; text-anchor: middle; }
.dg .past { fill: $muted; }
.dg .pill { fill: $background; stroke: $muted; stroke-width: 1.5; }
.dg .edge { fill: none; stroke: $muted; stroke-width: 1.5; stroke-linecap: round; }
.dg .arrow { stroke: none; }
.dg .grid { fill: none; stroke: $line; }
.dg .stripe { fill: $background; }
.dg .cells { fill: $faint; }
.dg .self { fill: $muted; }
""")

SOURCE = Template("""
.dg .$source > .pill { stroke: $color; fill: $tint; }
.dg .edge.$source { stroke: $color; }
.dg .arrow.$source { fill: $color; }
.dg .$source > .badge, .dg .$source .own { fill: $color; }
.dg .$source > .cells { fill: $soft; }
.dg .$source > .self { fill: $color; }
.dg .$source.rejected > .pill, .dg .edge.$source.rejected { stroke: $soft; }
.dg .arrow.$source.rejected { fill: $soft; }
""")

OUTCOME = Template("""
.dg .edge.copied { stroke-width: 2.4; stroke-dasharray: 0.5 5; }
.dg .edge.merged, .dg .merged > .pill { stroke-dasharray: 5 3.5; }
.dg .edge.recycled, .dg .recycled > .pill { stroke-dasharray: 9 3 2 3; }
.dg .root > .pill { fill: $ink; stroke: $ink; }
.dg .rejected > .pill { fill: $background; }
.dg .rejected > .token, .dg .unverified > text { fill: $muted; }
.dg .edge.merged.rejected { stroke: $merged_soft; }
.dg .arrow.merged.rejected { fill: $merged_soft; }
.dg .unverified > .pill { fill: $background; stroke: $line; }
.dg .edge.unverified { stroke: $line; }
.dg .arrow.unverified { fill: $line; }
.dg .accepted > .pill, .dg .edge.accepted { stroke: $accepted; stroke-width: 3; }
.dg .arrow.accepted { fill: $accepted; }
.dg .accepted > .token, .dg .accepted .own { font-weight: 700; }
.dg .accepted > .cells { fill: $accepted_soft; }
.dg .accepted > .self { fill: $accepted; }
.dg .bonus > .pill { fill: $accepted; stroke: $accepted; stroke-width: 3; }
.dg .bonus > .token { fill: $background; font-weight: 700; }
.dg .lit > .pill { stroke: $ink; stroke-width: 3.5; }
.dg .lit > .stripe { fill: $highlight; }
.dg .lit .past, .dg .lit > .small { fill: $ink; }
.dg .root > .pill ~ text { fill: $background; }
""")


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
        pairs = zip(_channels(color), _channels(self.background), strict=True)
        return "#" + "".join(f"{round(share * over + (1 - share) * under):02x}" for over, under in pairs)

    def style_sheet(self) -> str:
        names = asdict(self) | {
            "monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
            "sans": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif",
            "faint": self.mix(self.muted, 0.45),
            "merged_soft": self.mix(self.merged, 0.65),
            "accepted_soft": self.mix(self.accepted, 0.45),
            "highlight": self.mix(self.draft, 0.2),
        }
        sources = [
            SOURCE.substitute(source=source, color=color, tint=self.mix(color, 0.13), soft=self.mix(color, 0.45))
            for source, color in ((source, names[source]) for source in PROPOSERS)
        ]
        return "".join([PICTURE.substitute(names), *sources, OUTCOME.substitute(names)])


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2328",
    muted="#656d76",
    line="#d0d7de",
    accepted="#1a7f37",
    draft="#0969da",
    merged="#8250df",
    copied="#bc4c00",
    recycled="#1b7c83",
)
DARK = Theme(
    background="#0d1117",
    ink="#e6edf3",
    muted="#8b949e",
    line="#30363d",
    accepted="#3fb950",
    draft="#58a6ff",
    merged="#bc8cff",
    copied="#f0883e",
    recycled="#39c5cf",
)
THEMES = {"light": LIGHT, "dark": DARK}
