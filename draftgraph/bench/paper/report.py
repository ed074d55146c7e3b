"""The study as one report: every item with its question, its answer and its table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper.counts import measured
from draftgraph.bench.paper.finding import Finding
from draftgraph.bench.paper.findings import findings
from draftgraph.bench.paper.items import ITEMS
from draftgraph.bench.speed_tables import labelled, settings_of, title_of
from draftgraph.files import replacing

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

VERDICTS = {True: "as the paper has it", False: "not as the paper has it", None: ""}


@dataclass(frozen=True)
class PaperReport:
    title: str
    settings: str
    findings: list[Finding]

    @classmethod
    def of(cls, folder: Path) -> PaperReport | None:
        """None: no item is finished yet."""
        known = next((one for item in ITEMS if (one := measured(folder / item.name)) is not None), None)
        if known is None:
            return None
        found = [
            replace(one, answer=labelled(one.answer, known.report)) if one.timed else one for one in findings(folder)
        ]
        return cls(title_of(known.report).replace("Speed of", "The paper's study:"), settings_of(known.report), found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        parts = [f"# {self.title}", self.settings]
        for one in self.findings:
            verdict = f" *({VERDICTS[one.agrees]})*" if VERDICTS[one.agrees] else ""
            parts += [f"## {one.question}", f"{one.answer}{verdict}"]
            parts += [table_of(one)] if one.table is not None else []
        return "\n\n".join(parts) + "\n"

    def to_part(self) -> Part:
        """Of a page."""
        from draftgraph.bench.page.paper_part import paper_part

        return paper_part(self)

    def save(self, folder: Path) -> None:
        """Writes paper.json, paper.md and paper.html."""
        from draftgraph.bench.page import page

        contents = {
            "paper.json": json.dumps(self.to_dict(), indent=2) + "\n",
            "paper.md": self.to_markdown(),
            "paper.html": page([self.to_part()]),
        }
        for name, content in contents.items():
            with replacing(folder / name) as partial:
                partial.write_text(content, encoding="utf-8")


def table_of(one: Finding) -> str:
    assert one.table is not None
    lines = [one.table.header, ["---", *["---:"] * (len(one.table.header) - 1)], *one.table.lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
