"""What was looked for in answers, without timing them: borrowed distributions, shared sequences, wrong masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from draftgraph.bench.paper.items import TAUS, TEMPERATURES
from draftgraph.bench.paper.probes import SETTINGS
from draftgraph.bench.paper.timed_findings import Finding
from draftgraph.bench.reporting import Table
from draftgraph.bench.runs import Record

AT_TARGET, AT_DRAFT = "target", "draft"  # where masks are wrong: their settings begin so
CHANGES = "CHANGE answers, which must never be"
SURENESS = ("sure", "between", "unsure")


def borrowed(name: str, found: Sequence[Record]) -> Finding:
    rows, told = [], []
    for tau in TAUS:
        here = [record for record in found if record["setting"] == str(tau)]
        merges = [merge for record in here for merge in record["merges"]]
        if not merges:
            rows.append([str(tau), "0", "", ""])
            continue
        own, scale = (median(merge[what] for merge in merges) for what in ("divergence", "unrelated"))
        nodes = sum(record["nodes"] for record in here)
        rows.append([str(tau), f"{len(merges)} of {nodes}", f"{own:.2f}", f"{scale:.2f}"])
        told.append(f"{own:.2f} nats at tau={tau}")
    answer = (
        "The median divergence of what a merged node borrows from what the draft would say there is "
        f"{', '.join(told)}; between unrelated nodes of the same graph it is in the last column."
        if told
        else "No merged node borrowed anything."
    )
    header = ["tau", "merged nodes", "median KL, own from borrowed", "for scale: from another node's"]
    question = "Experiment 2: how far is a borrowed distribution from a merged node's own?"
    return Finding(name, question, answer, Table("Borrowed distributions", header, rows), timed=False)


def shared(name: str, found: Sequence[Record]) -> Finding:
    greedy = [pair for record in found if float(record["setting"]) == 0.0 for pair in record["pairs"]]
    related, unrelated = ([pair for pair in greedy if pair["related"] is known] for known in (True, False))
    ordered = sorted(related, key=lambda pair: float(pair["entropy"]))
    third = max(1, len(ordered) // 3)
    sure, between, unsure = ordered[:third], ordered[third:-third], ordered[-third:]
    groups = {"one step, greedy": related, "another prompt": unrelated}
    groups |= {f"draft {how} at the root": some for how, some in zip(SURENESS, (sure, between, unsure), strict=True)}
    for kind in sorted({pair["kind"] for pair in related}):
        groups[f"behind: {kind}"] = [pair for pair in related if pair["kind"] == kind]
    for heat in TEMPERATURES:
        sampled = (pair for one in found if float(one["setting"]) == heat for pair in one["pairs"])
        groups[f"temperature {heat}"] = [pair for pair in sampled if pair["related"]]
    rows = [overlap_row(words, pairs) for words, pairs in groups.items()]
    of_related, of_unrelated, of_sure, of_unsure = map(bigrams_of, (related, unrelated, sure, unsure))
    answer = (
        f"Behind the place where they part, two hypotheses of one step share {of_related:.0%} of their bigrams, "
        f"hypotheses of unrelated contexts {of_unrelated:.0%}: they part in a token and then say the same again, "
        f"because the draft conditions on the same text. Where it is sure they share {of_sure:.0%}, where it is "
        f"not {of_unsure:.0%}."
    )
    header = ["pairs", "number", "tokens shared", "bigrams shared", "edits per token"]
    question = "Open question 1: why do hypotheses share sequences?"
    table = Table("What hypotheses share", header, rows)
    return Finding(name, question, answer, table, of_related > of_unrelated, timed=False)


def bigrams_of(pairs: Sequence[Record]) -> float:
    return fmean(pair["bigrams"] for pair in pairs) if pairs else 0.0


def overlap_row(words: str, pairs: Sequence[Record]) -> list[str]:
    if not pairs:
        return [words, "0", "", "", ""]
    tokens, bigrams, edits = (fmean(pair[name] for pair in pairs) for name in ("tokens", "bigrams", "edits"))
    return [words, str(len(pairs)), f"{tokens:.1%}", f"{bigrams:.1%}", f"{edits:.2f}"]


def wrong_masks(name: str, found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    settings, rows = by_setting(answered_at_every_setting(found)), []
    if not settings:
        return None
    for setting, here in settings.items():
        places = [record["first_difference"] for record in here if record["first_difference"] is not None]
        worse = fmean(record["surprise"] - record["plain_surprise"] for record in here)
        first = f"{median(places):.0f} ({len(places)} of {len(here)})" if places else f"none ({len(here)} answers)"
        rows.append([setting, first, f"{worse:+.3f}", f"{per_pass_of(here):.2f}"])
    kept, right = draft_changes_nothing(settings), settings[SETTINGS[0]]
    told = ", ".join(f"{words} {changed_in(settings[setting])}" for setting, words in wrong_at_target(settings))
    answer = (
        f"Wrong masks at the target change answers: {told} (table: the place of the first other token, and the "
        "target's surprise at the text, in nats per token more than plain decoding's); at the draft they "
        f"{done_by_the_draft(settings)}, with {per_pass_of(settings[SETTINGS[-1]]):.2f} tokens per pass where right "
        f"masks have {per_pass_of(right):.2f}."
    )
    header = ["nodes that see a stranger", "first other token", "surprise, more", "tokens per pass"]
    question = "Check 2: what do wrong attention masks do over 1,000 tokens?"
    return Finding(name, question, answer, Table("Wrong masks", header, rows), kept, timed=False)


def accuracy(name: str, found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    settings = by_setting(answered_at_every_setting(found))
    if not settings:
        return None
    first = next(iter(settings.values()))
    plain = fmean(record["plain_right"] for record in first)
    right = {setting: fmean(record["right"] for record in here) for setting, here in settings.items()}
    rows = [["plain decoding", f"{plain:.0%}", "", ""]]
    told: dict[str, list[str]] = {AT_TARGET: [], AT_DRAFT: []}
    for setting, here in settings.items():
        same, ties = fmean(map(is_same, here)), sum(record["tie"] for record in here)
        unchanged = f"{same:.0%}" + (f" ({ties} part at a tie)" if ties else "")
        rows.append([setting, f"{right[setting]:.0%}", unchanged, f"{per_pass_of(here):.2f}"])
        where, share = setting.split()
        told[where].append(f"{float(share):.0%} of nodes: {right[setting]:.0%} right, {same:.0%} unchanged")
    kept = draft_changes_nothing(settings)
    answer = (
        f"Plain decoding solves {plain:.0%} of {len(first)} problems. Wrong masks at the target: "
        f"{'; '.join(told[AT_TARGET])}. At the draft: {'; '.join(told[AT_DRAFT])}; so there they "
        f"{done_by_the_draft(settings)}."
    )
    header = ["nodes that see a stranger", "accuracy", "answers unchanged", "tokens per pass"]
    question = "Check 2: what do wrong attention masks do to accuracy?"
    table = Table("Accuracy under wrong masks", header, rows)
    return Finding(name, question, answer, table, kept, {"plain": plain} | right, timed=False)


def by_setting(found: Sequence[Record]) -> dict[str, list[Record]]:
    settings: dict[str, list[Record]] = {}
    for record in found:
        settings.setdefault(record["setting"], []).append(record)
    return settings


def answered_at_every_setting(found: Sequence[Record]) -> list[Record]:
    """A study that was stopped has answered its last prompt at some settings only: that one is left out."""
    answers = Counter((record["task"], record["prompt"]) for record in found)
    return [record for record in found if answers[record["task"], record["prompt"]] == len(SETTINGS)]


def per_pass_of(records: Sequence[Record]) -> float:
    return fmean(record["tokens_per_pass"] for record in records)


def is_same(record: Record) -> bool:
    return record["first_difference"] is None


def is_changed(record: Record) -> bool:
    """Ties apart: in half precision passes of other shapes round differently."""
    return not is_same(record) and not record.get("tie")


def changed_in(records: Sequence[Record]) -> str:
    ties = sum(bool(record.get("tie")) for record in records)
    return f"{sum(map(is_changed, records))} of {len(records)}" + (f" and {ties} at a tie" if ties else "")


def wrong_at_target(settings: Mapping[str, Sequence[Record]]) -> list[tuple[str, str]]:
    """These settings, and for which nodes the masks are wrong."""
    there = [setting for setting in settings if setting.startswith(AT_TARGET) and setting != SETTINGS[0]]
    return [(setting, f"for {float(setting.split()[1]):.0%} of nodes") for setting in there]


def draft_changes_nothing(settings: Mapping[str, Sequence[Record]]) -> bool:
    here = [record for setting, some in settings.items() if setting.startswith(AT_DRAFT) for record in some]
    return not any(map(is_changed, here))


def done_by_the_draft(settings: Mapping[str, Sequence[Record]]) -> str:
    if not draft_changes_nothing(settings):
        return CHANGES
    ties, right = (sum(bool(one.get("tie")) for one in settings[SETTINGS[place]]) for place in (-1, 0))
    if not ties:
        return "change no answer"
    return f"change none but at ties ({ties} of {len(settings[SETTINGS[-1]])}; right masks, which also round: {right})"
