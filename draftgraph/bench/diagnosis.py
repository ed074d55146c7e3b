"""What may be wrong where drafting disappoints: one line for each of its failure signatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from draftgraph.bench.runs import PLAIN
from draftgraph.bench.speed_report import ModeFigures, SpeedReport

LOW = 0.5  # of passes that accept nothing: more is a draft that seldom helps
PRUNED = 0.5  # of missed tokens that pruning has taken: more is too much of it
Verdict = Literal["good", "look", "wrong"]
REMEDIES = {
    "k": "the draft did not have the token among its best: a better draft helps (draftgraph distill)",
    "theta_prob": "pruning by probability ended the path: lower theta_prob",
    "theta_sib": "pruning of siblings took the token: lower theta_sib",
    "budget": "the budget of nodes or levels ended before the token: raise max_nodes or max_depth",
    "not drafted": "nothing had been proposed there: a draft model helps",
}
SIZED = "the token was not worth its place at the measured prices: a cheaper pass or a better draft helps"


@dataclass(frozen=True)
class Diagnosis:
    signature: str
    verdict: Verdict
    line: str


def diagnoses(report: SpeedReport) -> list[Diagnosis]:
    """Of the modes of this library that draft."""
    modes = [mode for mode in report.modes if mode.library is None and mode.mode != PLAIN]
    return [low_acceptance(modes), high_computation(modes), generation_errors(report)]


def low_acceptance(modes: Sequence[ModeFigures]) -> Diagnosis:
    name, told = "Low acceptance", [mode for mode in modes if mode.acceptance is not None]
    if not told and any(mode.sources.shares for mode in modes):
        return Diagnosis(name, "good", "Proposals were accepted; how many were made is not told in these measurements.")
    if not told:
        return Diagnosis(name, "good" if not modes else "look", "No drafted token was accepted, or none was drafted.")
    worst = min(told, key=lambda mode: first_accepted(mode))
    share = first_accepted(worst)
    found = f"{worst.mode} accepts something in {share:.0%} of its passes"
    found += f", the least of {', '.join(mode.mode for mode in told)}" if len(told) > 1 else ""
    missed = "".join(f"; {why}" for why in most_missed(worst))
    return Diagnosis(name, "look" if share < LOW or prunes(worst) else "good", f"{found}{missed}.")


def first_accepted(mode: ModeFigures) -> float:
    assert mode.acceptance is not None
    return mode.acceptance.by_depth[0] if mode.acceptance.by_depth else 0.0


def most_missed(mode: ModeFigures) -> Iterator[str]:
    """The reason behind most of the tokens that were not foreseen, and what helps."""
    if mode.missed:
        reason, share = max(mode.missed.items(), key=lambda pair: pair[1])
        chooses_budget = reason == "budget" and mode.mode == "auto"
        yield f"in {share:.0%} of its misses {SIZED if chooses_budget else REMEDIES[reason]}"


def prunes(mode: ModeFigures) -> bool:
    return sum((mode.missed or {}).get(reason, 0.0) for reason in ("theta_prob", "theta_sib")) > PRUNED


def high_computation(modes: Sequence[ModeFigures]) -> Diagnosis:
    name = "High computation"
    slow = [mode for mode in modes if (mode.overall.speed.high or mode.overall.speed.ratio) < 1.0]
    told = [mode for mode in modes if mode.acceptance is not None]
    found = ""
    if told:
        dearest = max(told, key=lambda mode: proposed(mode))
        merged = dearest.sources.shares.get("merged", 0.0)
        found = f"{dearest.mode} has {proposed(dearest):.1f} nodes checked for every one accepted, and {merged:.1%} of "
        found += "its accepted tokens from merged nodes. "
    if not slow:
        return Diagnosis(name, "good", f"{found}No mode is slower than plain decoding.")
    told_slow = ", ".join(f"{mode.mode} {mode.overall.speed.ratio:.2f}x" for mode in slow)
    return Diagnosis(
        name, "look", f"{found}Slower than plain decoding: {told_slow}. Prune more, merge more, or let auto decide."
    )


def proposed(mode: ModeFigures) -> float:
    assert mode.acceptance is not None
    return mode.acceptance.proposed_per_accepted


def generation_errors(report: SpeedReport) -> Diagnosis:
    name = "Generation errors"
    ours = [mode for mode in report.modes if mode.library is None and mode.same is not None]
    answers, same, ties = (sum(getattr(mode, what) or 0 for mode in ours) for what in ("answers", "same", "ties"))
    if same == answers:
        return Diagnosis(name, "good", f"None: all {answers} answers have the tokens of plain decoding.")
    parted = f"{answers - same} of {answers} answers part from plain decoding's, {ties} of them at a tie"
    verdicts = [mode.rescored.as_good for mode in ours if mode.rescored is not None and mode.mode != PLAIN]
    if verdicts and all(verdicts):
        rule = "scored in float32 they are as good as plain decoding's, which is what half precision can promise"
        return Diagnosis(name, "good", f"None: {parted}; {rule}.")
    if same + ties == answers and not verdicts:
        return Diagnosis(name, "good", f"None known: {parted}, where rounding decides.")
    wrong: Verdict = "wrong" if verdicts or report.configuration.get("dtype") == "float32" else "look"
    return Diagnosis(
        name, wrong, f"{parted}: the masks of tree attention may be wrong; check them with draftgraph doctor."
    )
