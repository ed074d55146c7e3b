"""Drafts of several sizes for one target: none, the pair's own, the target itself, and others that are given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper.counts import Measured, measured
from draftgraph.bench.paper.finding import COUNTS, Finding, counts_row
from draftgraph.bench.paper.items import CHAINS, DRAFTS, NO_DRAFT, PAIRS_DRAFT, TARGET_ITSELF, draft_item
from draftgraph.bench.report import Table
from draftgraph.decoder import weights_read
from draftgraph.files import replacing
from draftgraph.pair import Pair

if TYPE_CHECKING:
    from draftgraph.bench.paper.study import Study

SIZES = "sizes.json"  # how many weights a pass of each draft reads
TITLES = {NO_DRAFT: "no draft model", PAIRS_DRAFT: "the pair's draft", TARGET_ITSELF: "the target itself"}
INFLATED_TITLES = TITLES | {TARGET_ITSELF: "the target before it was inflated"}


def compare_drafts(study: Study, others: Mapping[str, Any]) -> bool:
    """Whether all are measured."""
    pair = study.pair
    drafts = {NO_DRAFT: None, PAIRS_DRAFT: pair.draft, TARGET_ITSELF: pair.target} | dict(others)
    if pair.draft is pair.target:
        del drafts[TARGET_ITSELF]
    remember_sizes(study.folder, {name: 0 if draft is None else weights_read(draft) for name, draft in drafts.items()})
    done = [
        study.times(
            draft_item(name),
            Pair(pair.target, draft, pair.tokenizer),
            {} if name == PAIRS_DRAFT else {"draft": None if draft is None else name},
        )
        for name, draft in drafts.items()
    ]
    return all(done)


def remember_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Beside those of earlier calls."""
    (folder / DRAFTS).mkdir(exist_ok=True)
    with replacing(folder / DRAFTS / SIZES) as partial:
        partial.write_text(json.dumps(known_sizes(folder) | dict(sizes), indent=2) + "\n", encoding="utf-8")


def known_sizes(folder: Path) -> dict[str, int]:
    file = folder / DRAFTS / SIZES
    sizes: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return sizes


def finding(name: str, folder: Path) -> Finding | None:
    sizes = known_sizes(folder)
    found = {draft: known for draft in sizes if (known := measured(folder / DRAFTS / draft)) is not None}
    if len(found) < 2:
        return None
    ordered = sorted(found, key=lambda draft: sizes[draft])
    speeds = {draft: found[draft].speed(fastest_of(found[draft])) for draft in ordered}
    told = "; ".join(told_of(draft, found[draft], sizes[draft]) for draft in ordered)
    best = max(ordered, key=lambda draft: speeds[draft])
    rows = [row for draft in ordered for row in rows_of(draft, found[draft], sizes[draft])]
    return Finding(
        name,
        "Claim: how does the size of the draft matter?",
        f"By the weights that a pass of the draft reads: {told}. The fastest is {title_of(best, found[best])}.",
        Table("By draft", ["draft", "weights read", "mode", *COUNTS[1:]], rows),
        figures=speeds,
    )


def fastest_of(known: Measured) -> str:
    return known.fastest((*CHAINS, "graph", "auto"))


def told_of(draft: str, known: Measured, size: int) -> str:
    mode = fastest_of(known)
    one, title = known.modes[mode], title_of(draft, known) + (f" ({millions(size)})" if size else "")
    figures = f"{one.per_pass:.2f} tokens per pass, {one.acceptance:.1%} accepted"
    return f"{title} {known.shown(mode)} with {mode}, {figures}"


def rows_of(draft: str, known: Measured, size: int) -> list[list[str]]:
    """Its best chain, the graph and auto, as far as it has them."""
    chains = [mode for mode in CHAINS if mode in known.modes]
    modes = [*([known.fastest(chains)] if chains else []), *(mode for mode in ("graph", "auto") if mode in known.modes)]
    return [[title_of(draft, known), millions(size), *counts_row(mode, known, mode)] for mode in modes]


def title_of(draft: str, known: Measured) -> str:
    return (TITLES if known.report.label is None else INFLATED_TITLES).get(draft, draft)


def millions(weights: int) -> str:
    """
    >>> millions(134515008)
    '134.5M'
    """
    return f"{weights / 1e6:.1f}M"
