"""What a decoder did, step by step: as data, in the terminal, as pictures and as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from draftgraph.config import GraphConfig
from draftgraph.errors import UsageError
from draftgraph.inspect import terminal
from draftgraph.inspect.dot import dot_document
from draftgraph.inspect.html import notebook_frame, page
from draftgraph.inspect.record import SCHEMA, VERSION, Setting, StepRecord, settings
from draftgraph.inspect.svg import Panel, View, side_by_side_svg
from draftgraph.inspect.text import Decode, pieces, visible, without_surrogates
from draftgraph.trace import Step

REASONS = {
    "k": "it was not among the draft's {k} best (k)",
    "theta_prob": "the draft was too unsure of the token before it to go on (theta_prob)",
    "theta_sib": "it was drafted, but dropped beside a much better sibling (theta_sib)",
    "budget": "the budget of nodes or levels ended before it",
    "not drafted": "nothing had proposed it",
}


@dataclass(frozen=True)
class GraphReport:
    """The graphs of one answer. Steps count from 0 in every method.

    >>> report = GraphReport.of(steps, tokenizer.decode, prompt, config)  # doctest: +SKIP
    >>> Path("answer.html").write_text(report.to_html(), encoding="utf-8")  # doctest: +SKIP
    """

    prompt: str
    config: dict[str, Setting]
    facts: dict[str, Setting]  # whatever else should stand in the head of the page, by name
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
        return "".join(token.text for step in self.steps for token in step.tokens)

    @property
    def tokens_by_source(self) -> Counter[str]:
        return Counter(token.source for step in self.steps for token in step.tokens)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens_by_source.total() / max(1, len(self.steps))

    def to_json(self, indent: int | None = None) -> str:
        """The whole report as one JSON object; `draftgraph.inspect.record` documents every field."""
        head = {"schema": SCHEMA, "version": VERSION, "text": self.text}
        return json.dumps(head | asdict(self), ensure_ascii=False, indent=indent)

    @classmethod
    def from_json(cls, document: str) -> GraphReport:
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
        return page(self)

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html())

    def print(self, console: Console | None = None, step: int | None = None) -> None:
        """Prints a step, or all of them, with Rich."""
        console = console or Console()
        chosen = range(len(self.steps)) if step is None else [step]
        for number in chosen:
            terminal.print_step(console, self.step(number), self.heading(number), self.explanation(number))
        terminal.print_legend(console)

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
