"""Figures of an answer in words: one line, or a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from draftgraph.stats import Stats

SOURCES = {
    "draft": "drafted by the model",
    "merged": "merged: drafted once, used on several paths",
    "copied": "copied from the text",
    "recycled": "recycled from earlier checks",
}
REASONS = {
    "k": "not among the draft's k best",
    "theta_prob": "draft too unsure to go on (theta-prob)",
    "theta_sib": "dropped beside a better sibling (theta-sib)",
    "budget": "past the budget, or not worth a place in it",
    "not drafted": "proposed by nobody",
}
PHASES = {
    "prefill": "reading the prompt",
    "draft": "drafting",
    "verify": "checking (target passes)",
    "other": "choosing and keeping tokens",
}


def summary(stats: Stats) -> str:
    """The speed of an answer.

    >>> summary(pair.generate("Why is the sky blue?").stats)    # doctest: +SKIP
    '96 tokens · 41.2 tok/s · 2.31 tokens per pass · 38% of accepted from text'
    """
    parts = [
        f"{stats.new_tokens} token{'s' * (stats.new_tokens != 1)}",
        f"{stats.tokens_per_second:.1f} tok/s",
        f"{stats.mean_accepted_length:.2f} tokens per pass",
    ]
    if stats.accepted:
        parts.append(f"{stats.accepted_by_source['copied'] / stats.accepted:.0%} of accepted from text")
    return " · ".join(parts)


def table(stats: Stats) -> Table:
    """Where the tokens and the time of an answer came from, and why not more came at once."""
    figures = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    figures.add_column("Answer")
    figures.add_column("", justify="right")
    figures.add_column("", justify="right", style="dim")

    def section(title: str, rows: list[tuple[str, str, str]]) -> None:
        if rows:
            figures.add_section()
            figures.add_row(title, style="bold")
            for row in rows:
                figures.add_row(f"  {row[0]}", *row[1:])

    for name, value in (
        ("tokens", f"{stats.new_tokens}"),
        ("tokens per second", f"{stats.tokens_per_second:.1f}"),
        ("tokens per pass", f"{stats.mean_accepted_length:.2f}"),
        ("target passes", f"{stats.steps}"),
        ("nodes that the target checked", f"{stats.verified_tokens}"),
        ("tokens that the draft model read", f"{stats.draft_tokens}"),
        ("tokens of the prompt", f"{stats.prompt_tokens}"),
    ):
        figures.add_row(name, value, "")
    section("Accepted, by source", counted(stats.accepted_by_source, SOURCES))
    depths = {str(depth): count for depth, count in sorted(stats.accepted_by_depth.items())}
    names = {depth: f"at depth {depth} or deeper" for depth in depths}
    section("Accepted, by depth (share of passes)", counted(depths, names, stats.steps))
    section("Why no more was accepted: the target's token was", counted(stats.rejected_by, REASONS))
    total = sum(stats.seconds.values()) or 1.0
    times = [(PHASES[phase], f"{value:.2f} s", f"{value / total:.0%}") for phase, value in stats.seconds.items()]
    section("Time", times)
    return figures


def counted(counts: dict[str, int], names: dict[str, str], total: int = 0) -> list[tuple[str, str, str]]:
    total = total or sum(counts.values())
    return [(names.get(key, key), str(count), f"{count / total:.0%}") for key, count in counts.items() if count]
