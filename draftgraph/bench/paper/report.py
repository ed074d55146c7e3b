"""The study as one report: every item with its question, its answer in a sentence, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper import probe_findings, timed_findings
from draftgraph.bench.paper.items import ITEMS
from draftgraph.bench.paper.probes import probed
from draftgraph.bench.paper.timed_findings import Finding, Measured, measured
from draftgraph.bench.reporting import write_files
from draftgraph.bench.runs import Record
from draftgraph.bench.speed_tables import labelled, settings_of, title_of

if TYPE_CHECKING:
    from draftgraph.bench.page import Part


def findings(folder: Path) -> Iterator[Finding]:
    """Of all that has been measured so far."""
    for name, item, of_item in TIMED:
        if (known := measured(folder / item)) is not None:
            yield of_item(name, known)
    for name, of_several in COMPARED:
        if (finding := of_several(name, folder)) is not None:
            yield finding
    for name, kind, of_answers in PROBED:
        if (found := probed(folder, kind)) and (finding := of_answers(name, found)) is not None:
            yield finding


TIMED: tuple[tuple[str, str, Callable[[str, Measured], Finding]], ...] = (
    ("main", "main", timed_findings.main_table),
    ("claims", "main", timed_findings.claims),
    ("experiment-1", "k", timed_findings.experiment_1),
    ("experiment-2", "tau", timed_findings.experiment_2),
    ("experiment-3", "pruning", timed_findings.experiment_3),
    ("check-1", "unlike", timed_findings.check_1),
    ("check-3", "grid", timed_findings.grid),
    ("foreign", "foreign", timed_findings.foreign),
)
COMPARED: tuple[tuple[str, Callable[[str, Path], Finding | None]], ...] = (
    ("draft-sizes", timed_findings.draft_sizes),
    ("question-2", timed_findings.temperatures),
    ("question-3", timed_findings.best_setting),
)
PROBED: tuple[tuple[str, str, Callable[[str, Sequence[Record]], Finding | None]], ...] = (
    ("experiment-2-borrowed", "borrowing", probe_findings.borrowed),
    ("question-1", "overlap", probe_findings.shared),
    ("check-2", "masks", probe_findings.wrong_masks),
    ("check-2-accuracy", "accuracy", probe_findings.accuracy),
)


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
            parts += [one.table.cells] if one.table is not None else []
        return "\n\n".join(parts) + "\n"

    def to_part(self) -> Part:
        """Of a page."""
        from draftgraph.bench.page import paper_part

        return paper_part(self)

    def save(self, folder: Path) -> None:
        """Writes paper.json, paper.md and paper.html."""
        from draftgraph.bench.page import page

        contents = {
            "paper.json": json.dumps(self.to_dict(), indent=2) + "\n",
            "paper.md": self.to_markdown(),
            "paper.html": page([self.to_part()]),
        }
        write_files(folder, contents)
