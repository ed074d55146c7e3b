"""The report of `bench load`: what came of every number of clients, kind of arrivals and mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from draftgraph.bench import reporting
from draftgraph.bench.reporting import TEXTS, Table, number
from draftgraph.bench.runs import PLAIN, Record, of_kind
from draftgraph.bench.structures import VLLM_METHODS

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

PERCENTILES = (50, 90, 99)
HIDDEN = ("kind", "measures", "modes", "prompts", "target_weights", "draft_weights", "target", "draft")
Key = tuple[int, str, str]  # clients, arrivals, mode


@dataclass(frozen=True)
class Cell:
    """Medians over repeats. Percentiles are those of PERCENTILES."""

    tokens_per_second: float
    good_per_second: float  # tokens of answers that came in time
    requests_per_second: float
    first_ms: list[float]
    between_ms: list[float]
    token_ms: list[float]
    same: int  # answers that are those of plain decoding
    answers: int
    repeats: int
    ratio: float | None = None  # to plain decoding under the same load, repeat by repeat

    @classmethod
    def of(cls, records: Sequence[Record], plain: Sequence[Record], known: dict[int, str]) -> Cell:
        def middle(name: str) -> list[float]:
            return [median(values) for values in zip(*(record[name] for record in records), strict=True)]

        answers = [(prompt, answer) for record in records for prompt, answer in record["answers"]]
        by_repeat = {record["repeat"]: speed_of(record) for record in plain}
        ratios = [speed_of(one) / by_repeat[one["repeat"]] for one in records if one["repeat"] in by_repeat]
        return cls(
            median(map(speed_of, records)),
            median(record["good_tokens"] / record["seconds"] for record in records),
            median(record["requests"] / record["seconds"] for record in records),
            middle("first_ms"),
            middle("between_ms"),
            middle("token_ms"),
            sum(known.get(prompt) == answer for prompt, answer in answers),
            len(answers),
            len(records),
            median(ratios) if ratios else None,
        )


CHARTS: dict[str, Callable[[Cell], float]] = {
    "Tokens per second of all clients": lambda cell: cell.tokens_per_second,
    f"First token, ms, p{PERCENTILES[-1]}": lambda cell: cell.first_ms[-1],
    f"Gap between deliveries, ms, p{PERCENTILES[-1]}": lambda cell: cell.between_ms[-1],
}


def speed_of(record: Record) -> float:
    return float(record["tokens"] / record["seconds"])


@dataclass(frozen=True)
class LoadReport:
    configuration: Record
    cells: dict[Key, Cell]
    failed: dict[str, str]  # reasons, by mode
    measured: int
    planned: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> LoadReport:
        found = of_kind(records, "load")
        by_key: dict[Key, list[Record]] = {}
        for record in sorted(found, key=lambda one: one["clients"]):
            by_key.setdefault((record["clients"], record["arrivals"], record["mode"]), []).append(record)
        known: dict[int, str] = {}
        for record in found:
            if record["mode"] == PLAIN:
                known = dict(map(tuple, record["answers"])) | known
        cells = {key: Cell.of(of_key, by_key.get((*key[:2], PLAIN), []), known) for key, of_key in by_key.items()}
        failed = {record["mode"]: record["reason"] for record in of_kind(records, "failed")}
        failed = {mode: reason for mode, reason in failed.items() if not any(key[2] == mode for key in cells)}
        planned = of_kind(records, "session")[-1]["planned"]
        return cls(records[0], cells, failed, len(found), planned)

    @property
    def title(self) -> str:
        target, draft = self.configuration["target"], self.configuration["draft"]
        return f"Under load: {target}, draft {draft or 'none'}"

    @property
    def explanation(self) -> str:
        said = self.configuration
        columns: str = TEXTS["load"]["columns"]
        return columns.format(first=f"{said['first_ms']:g}", token=f"{said['token_ms']:g}")

    @property
    def settings(self) -> str:
        return reporting.described(self.configuration, HIDDEN)

    def best_of_vllm(self, clients: int, arrivals: str) -> float | None:
        """Tokens per second."""
        keys = [(clients, arrivals, mode) for mode in VLLM_METHODS]
        return max((self.cells[key].tokens_per_second for key in keys if key in self.cells), default=None)

    @property
    def arrivals(self) -> list[str]:
        return list(dict.fromkeys(key[1] for key in self.cells))

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(key[2] for key in self.cells))

    @property
    def headline(self) -> str:
        """Of the most clients."""
        clients, arrivals = max(key[0] for key in self.cells), self.arrivals[0]
        found = {mode: cell for mode in self.modes if (cell := self.cells.get((clients, arrivals, mode)))}
        speeds = ", ".join(f"{mode} {number(cell.tokens_per_second)}" for mode, cell in found.items())
        return f"Tokens per second of {clients} clients: {speeds}."

    def tables(self) -> list[Table]:
        tables = [self.table(one) for one in self.arrivals]
        if self.failed:
            tables.append(
                Table("Not measured", ["mode", reporting.REASON], [list(pair) for pair in self.failed.items()])
            )
        return tables

    def table(self, arrivals: str) -> Table:
        header = ["clients", "mode", "tokens/s", "off", "vLLM's best", "good tokens/s"]
        header += [f"{what} ms p{one}" for what in ("first", "gap") for one in PERCENTILES]
        header += ["ms per token", "same"]
        lines = []
        for (clients, arriving, mode), cell in self.cells.items():
            if arriving != arrivals:
                continue
            best = self.best_of_vllm(clients, arrivals)
            lines.append(
                [
                    str(clients),
                    mode,
                    number(cell.tokens_per_second),
                    "" if cell.ratio is None else f"{cell.ratio:.2f}x",
                    "" if best is None else f"{cell.tokens_per_second / best:.2f}x",
                    number(cell.good_per_second),
                    *map(number, (*cell.first_ms, *cell.between_ms)),
                    number(cell.token_ms[0]),
                    f"{cell.same} of {cell.answers}",
                ]
            )
        how = {"closed": "Clients who ask again once they are answered"}
        share = f"Requests that arrive at random: {arrivals} of what the mode answers in a closed load"
        rate = f"Requests that arrive at random: {arrivals} per second"
        return Table(how.get(arrivals, share if arrivals.endswith("%") else rate), header, lines)

    def to_dict(self) -> dict[str, Any]:
        names = ("clients", "arrivals", "mode")
        cells = [dict(zip(names, key, strict=True)) | asdict(cell) for key, cell in self.cells.items()]
        counts = {"measured": self.measured, "planned": self.planned, "percentiles": list(PERCENTILES)}
        return {"configuration": self.configuration, **counts, "cells": cells, "failed": self.failed}

    def to_markdown(self) -> str:
        return reporting.document((self.title, self.settings, self.explanation), self.tables())

    def to_part(self) -> Part:
        from draftgraph.bench.page import load_part

        return load_part(self)

    def save(self, folder: Path) -> None:
        """Writes report.json, report.md and report.html."""
        from draftgraph.bench.page import page

        pages = {"report.md": self.to_markdown(), "report.html": page([self.to_part()])}
        reporting.write_files(folder, pages | {"report.json": self.to_dict()})
