"""The study as one report: every item with its question, its answer in a sentence, and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper import findings
from draftgraph.bench.paper.findings import Finding, Measured, measured
from draftgraph.bench.paper.items import ITEMS
from draftgraph.bench.paper.probes import probed
from draftgraph.bench.reporting import write_files
from draftgraph.bench.runs import Record
from draftgraph.bench.speed_report import labelled, settings_of, title_of

if TYPE_CHECKING:
    from draftgraph.bench.page import Part


def findings_in(folder: Path) -> Iterator[Finding]:
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
    ("main", "main", findings.main_table),
    ("claims", "main", findings.claims),
    ("experiment-1", "k", findings.experiment_1),
    ("experiment-2", "tau", findings.experiment_2),
    ("experiment-3", "pruning", findings.experiment_3),
    ("check-1", "unlike", findings.check_1),
    ("check-3", "grid", findings.grid),
    ("foreign", "foreign", findings.foreign),
)
COMPARED: tuple[tuple[str, Callable[[str, Path], Finding | None]], ...] = (
    ("draft-sizes", findings.draft_sizes),
    ("question-2", findings.temperatures),
    ("question-3", findings.best_setting),
)
PROBED: tuple[tuple[str, str, Callable[[str, Sequence[Record]], Finding | None]], ...] = (
    ("experiment-2-borrowed", "borrowing", findings.borrowed),
    ("question-1", "overlap", findings.shared),
    ("check-2", "masks", findings.wrong_masks),
    ("check-2-accuracy", "accuracy", findings.accuracy),
)


VERDICTS = {True: "as the paper has it", False: "not as the paper has it", None: ""}


@dataclass(frozen=True)
class PaperReport:
    title: str
    settings: str
    findings: list[Finding]

    @classmethod
    def of(cls, folder: Path) -> PaperReport | None:
        """None while no item is finished."""
        known = next((one for item in ITEMS if (one := measured(folder / item.name)) is not None), None)
        if known is None:
            return None
        found = [
            replace(one, answer=labelled(one.answer, known.report)) if one.timed else one for one in findings_in(folder)
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
        from draftgraph.bench.page import paper_part

        return paper_part(self)

    def save(self, folder: Path) -> None:
        """Writes paper.json, paper.md and paper.html."""
        from draftgraph.bench.page import page

        page_of_one = page([self.to_part()])
        write_files(folder, {"paper.json": self.to_dict(), "paper.md": self.to_markdown(), "paper.html": page_of_one})
