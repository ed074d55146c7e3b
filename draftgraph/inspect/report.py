"""What a decoder did, step by step: as data, in the terminal, as pictures, in Graphviz's language and as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from draftgraph.config import GraphConfig
from draftgraph.errors import UsageError
from draftgraph.inspect.record import SCHEMA, VERSION, NodeRecord, Setting, StepRecord, TreeRecord, settings
from draftgraph.inspect.svg import (
    KEYS,
    Panel,
    View,
    graph_picture,
    inline,
    keys,
    legend,
    mask_picture,
    side_by_side_svg,
)
from draftgraph.inspect.text import Decode, label, pieces, probability, visible, without_surrogates
from draftgraph.inspect.theme import DARK, LETTERS, LIGHT, PROPOSERS, template
from draftgraph.stats import Step

REASONS = {
    "k": "it was not among the draft's {k} best (k)",
    "theta_prob": "the draft was too unsure of the token before it to go on (theta_prob)",
    "theta_sib": "it was drafted, but dropped beside a much better sibling (theta_sib)",
    "budget": "the budget of nodes or levels ended before it",
    "not drafted": "nothing had proposed it",
}
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

# in the terminal
COLORS = {
    "root": "bold",
    "draft": "blue",
    "merged": "magenta",
    "copied": "yellow",
    "recycled": "cyan",
    "bonus": "bold green",
}
LARGEST_MASK = 64

# in Graphviz's language
STYLES = {"draft": "solid", "copied": "dotted", "merged": "dashed", "recycled": "dashed"}


@dataclass(frozen=True)
class GraphReport:
    """The graphs of one answer, made by `Pair.inspect`. Steps count from 0 in every method.

    Attributes:
        prompt: As it was given.
        config: The settings of drafting.
        facts: Whatever else should stand in the head of the page, by name.
        steps: One record for each pass of the target.

    Examples:
        >>> report = pair.inspect("Name a colour.", max_new_tokens=8)
        >>> page = report.to_html()
        >>> GraphReport.from_json(report.to_json()).text == report.text
        True
    """

    prompt: str
    config: dict[str, Setting]
    facts: dict[str, Setting]
    steps: list[StepRecord]

    @classmethod
    def of(
        cls,
        steps: list[Step],
        decode: Decode,
        prompt: str,
        config: GraphConfig,
        facts: Mapping[str, Setting] | None = None,
    ) -> GraphReport:
        """A report of a decoder's steps; `decode` should keep special tokens, so that they can be seen."""
        before = int(steps[0].tree.tokens[0]) if steps else 0
        texts = pieces(decode, before, [token for step in steps for token in step.tokens])
        records = [StepRecord.of(step, decode, [next(texts) for _ in step.tokens]) for step in steps]
        return cls(without_surrogates(prompt), settings(config), dict(facts or {}), records)

    @property
    def text(self) -> str:
        """The answer, special tokens included."""
        return "".join(token.text for step in self.steps for token in step.tokens)

    @property
    def tokens_by_source(self) -> Counter[str]:
        """How many tokens were drafted, merged, copied, recycled, or the target's own."""
        return Counter(token.source for step in self.steps for token in step.tokens)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per pass of the target."""
        return self.tokens_by_source.total() / max(1, len(self.steps))

    def to_json(self, indent: int | None = None) -> str:
        """The whole report as one JSON object; `draftgraph.inspect.record` documents every field."""
        head = {"schema": SCHEMA, "version": VERSION, "text": self.text}
        return json.dumps(head | asdict(self), ensure_ascii=False, indent=indent)

    @classmethod
    def from_json(cls, document: str) -> GraphReport:
        """A report that `to_json` wrote."""
        data: dict[str, Any] = json.loads(document)
        if data.get("schema") != SCHEMA or data.get("version") != VERSION:
            raise UsageError(f"this is not a report of {SCHEMA} version {VERSION}: write it again with `inspect`")
        steps = [StepRecord.from_dict(step) for step in data["steps"]]
        return cls(data["prompt"], data["config"], data["facts"], steps)

    def step(self, number: int) -> StepRecord:
        if not self.steps:
            raise UsageError("this report has no steps: nothing was generated")
        if not -len(self.steps) <= number < len(self.steps):
            raise UsageError(f"step must be between 0 and {len(self.steps) - 1}, not {number}")
        return self.steps[number]

    def to_dot(self, step: int | None = None) -> str:
        """The graph of a step, or of all of them, for Graphviz."""
        if step is None:
            return dot_document(dict(enumerate(self.steps)))
        return dot_document({step % len(self.steps): self.step(step)})

    def to_svg(self, step: int = 0, view: View = "graph", theme: str = "light") -> str:
        """A picture of a step: its graph, the tree that it unrolls into, or the ancestor mask of that tree."""
        return side_by_side_svg([Panel(self.step(step), view)], theme)

    def to_html(self) -> str:
        """One page with everything in it, no other file and no network needed."""
        counts = self.tokens_by_source
        return template("page.html").render(
            light=LIGHT,
            dark=DARK,
            light_style=Markup(LIGHT.style_sheet()),
            dark_style=Markup(DARK.style_sheet()),
            prompt=visible(self.prompt, keep=" \n\t"),
            settings={name: self.config[name] for name in SETTINGS[str(self.config["mode"])]},
            facts=self.facts,
            token_count=counts.total(),
            tokens_per_pass=f"{self.tokens_per_pass:.2f}",
            sources=[(source, KEYS[source], LETTERS[source], counts[source]) for source in LETTERS if counts[source]],
            steps=[_step(self, number, step) for number, step in enumerate(self.steps)],
            legend=_legend(self),
        )

    def _repr_html_(self) -> str:
        """The page in a frame, so that its styles and scripts and the notebook's do not meet."""
        style = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:1px solid #8886;border-radius:8px"
        frame = f'<iframe title="draftgraph" sandbox="allow-scripts" style="{style}"'
        return f'{frame} srcdoc="{escape(self.to_html())}"></iframe>'

    def print(self, console: Console | None = None, step: int | None = None) -> None:
        """Prints a step, or all of them, with Rich."""
        console = console or Console()
        chosen = range(len(self.steps)) if step is None else [step]
        for number in chosen:
            print_step(console, self.step(number), self.heading(number), self.explanation(number))
        shown = [(LETTERS[source], KEYS[source], source) for source in (*PROPOSERS, "bonus")]
        marks = [*shown, ("✓", KEYS["accepted"], "bonus")]
        console.print(Text("   ").join(Text(f"{sign} {name}", style=COLORS[source]) for sign, name, source in marks))

    def heading(self, number: int) -> str:
        step = self.step(number)
        count = len(self.steps)
        return f"Step {number % count + 1} of {count} · position {step.position}"

    def explanation(self, number: int) -> str:
        """What a step checked, what it accepted and why no more, in a sentence or two."""
        step = self.step(number)
        checked, accepted = len(step.tree) - 1, len(step.path)
        said = f"{checked} drafted node{'s' * (checked != 1)} checked in one pass, {accepted} accepted"
        if accepted:
            said += f" “{visible(''.join(token.text for token in step.tokens[:accepted]))}”"
        if step.bonus is not None:
            said += f", then the target's own token “{visible(step.bonus.text)}”"
            if checked and step.rejection is not None:
                said += ": " + REASONS[step.rejection].format_map(self.config)
        unchecked = sum(not node.verified for node in step.nodes)
        left = f" {unchecked} more node{'s' * (unchecked != 1)} drafted but not checked." if unchecked else ""
        end = " A stop condition ended the text here." if step.stopped else ""
        return f"{said}.{left}{end}"


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


def print_step(console: Console, step: StepRecord, heading: str, explanation: str) -> None:
    console.rule(Text(heading, style="bold"), align="left")
    graph = graph_tree(step)
    if 1 < len(step.tree) <= LARGEST_MASK:
        mask = mask_table(step)
        needed = sum(Measurement.get(console, console.options, part).maximum for part in (graph, mask)) + 4
        beside = Table.grid(padding=(0, 4, 0, 0))
        beside.add_row(graph, mask)
        console.print(*[beside] if needed <= console.width else [graph, mask])
    else:
        console.print(graph)
    console.print(Text(explanation, style="dim"))
    console.print()


def graph_tree(step: StepRecord) -> Tree:
    """The graph: an alias ends with the node that it is the same as."""
    branches: dict[int, Tree] = {}
    for node in step.shown:
        line = _node_line(node)
        branches[node.id] = Tree(line) if node.parent is None else branches[node.parent].add(line)
    if step.bonus is not None:
        name = label(step.bonus.text, step.bonus.token)
        branches[step.last_accepted.node].add(Text(f"{LETTERS['bonus']} {name}", style=COLORS["bonus"]))
    return branches[0]


def _node_line(node: NodeRecord) -> Text:
    color = COLORS[node.source] if node.verified else "dim"
    name = Text.assemble(
        (f"{LETTERS[node.source]} ", color),
        (label(node.text, node.token), f"bold {color}" if node.accepted else color),
    )
    if node.parent is not None:
        name.append(f" {probability(node.prob)}", style="dim")
    name.append(f" #{node.id}", style="dim")
    if node.alias_of is not None:
        name.append(f" ↪ same as #{node.alias_of}", style=COLORS["merged"])
    if node.accepted and node.parent is not None:
        name.append(" ✓", style=COLORS["bonus"])
    elif not node.verified:
        name.append(" not checked", style="dim")
    return name


def mask_table(step: StepRecord) -> Table:
    """Each tree node, in the order in which the target checks them, with the row of its mask."""
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for node, row in zip(step.tree, step.mask, strict=True):
        table.add_row(Text(str(node.index), style="dim"), _tree_line(node), _mask_row(row, node.accepted))
    return table


def _tree_line(node: TreeRecord) -> Text:
    color = COLORS[node.source]
    mark = ("✓" if node.accepted and node.parent is not None else " ", COLORS["bonus"])
    name = (label(node.text, node.token), f"bold {color}" if node.accepted else color)
    return Text.assemble((f"{LETTERS[node.source]} ", color), mark, " ", name)


def _mask_row(row: str, accepted: bool) -> Text:
    wide = 2 if len(row) <= 24 else 1
    line = Text()
    for bit in row:
        line.append(("█" if bit == "1" else "·") * wide, style=("green" if accepted else "") if bit == "1" else "dim")
    return line


def dot_document(steps: dict[int, StepRecord]) -> str:
    """One digraph with a cluster for each step; nodes that were drafted but not checked are left out."""
    words = {"label": label, "probability": probability, "quoted": quoted, "color": _color, "styles": STYLES}
    return template("graph.dot").render(steps=steps, **words) + "\n"


def _color(source: str, accepted: bool) -> str:
    if accepted:
        return f'color="{LIGHT.accepted}", penwidth=2.5'
    return f'color="{getattr(LIGHT, source, LIGHT.ink)}"'


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
