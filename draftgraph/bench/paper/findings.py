"""Every item of the study, answered in a sentence with its figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from draftgraph.bench.paper import best_setting, draft_sizes, probe_findings, timed_findings
from draftgraph.bench.paper.counts import Measured, measured
from draftgraph.bench.paper.finding import Finding
from draftgraph.bench.paper.looking import probed
from draftgraph.bench.runs import Record


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
    ("draft-sizes", draft_sizes.finding),
    ("question-2", timed_findings.temperatures),
    ("question-3", best_setting.finding),
)
PROBED: tuple[tuple[str, str, Callable[[str, Sequence[Record]], Finding | None]], ...] = (
    ("experiment-2-borrowed", "borrowing", probe_findings.borrowed),
    ("question-1", "overlap", probe_findings.shared),
    ("check-2", "masks", probe_findings.wrong_masks),
    ("check-2-accuracy", "accuracy", probe_findings.accuracy),
)
