"""Runs the study: every item is timed in a folder of its own; what is probed is kept beside them, answer by answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper import masks, probes
from draftgraph.bench.paper.items import ITEMS, MAIN, TAUS, TEMPERATURES, UNLIKE
from draftgraph.bench.runs import FILE, Record, Runs, of_kind, records_in
from draftgraph.bench.sameness import first_difference
from draftgraph.bench.speed import Deadline, bench_run, pair_key
from draftgraph.distillation.folders import claimed, held_alone
from draftgraph.errors import UsageError
from draftgraph.models.progress import progress_bar
from draftgraph.text import encode
from draftgraph.trace import Step

if TYPE_CHECKING:
    from draftgraph.pair import Pair

PROBES = "probes"  # the folder of what is not timed
PROBED_PROMPTS = 2  # of a task
LONG = 1000  # tokens of an answer with wrong masks
DRAFT_SHARES = (0.5,)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prompts: int  # of a task
    new_tokens: int
    repeats: int
    long_answers: int  # with wrong masks
    long_tokens: int = LONG


FULL = Size(prompts=8, new_tokens=128, repeats=3, long_answers=4)
SMALL = Size(prompts=1, new_tokens=32, repeats=1, long_answers=1, long_tokens=1000)
SIZES = {"full": FULL, "small": SMALL}


@dataclass(frozen=True)
class Probe:
    """One answer to look into: what is looked for, at which setting, on which prompt."""

    kind: str  # borrowing, overlap or masks
    setting: str
    task: str
    prompt: int

    @classmethod
    def of(cls, record: Record) -> Probe:
        return cls(*(record[name] for name in ("kind", "setting", "task", "prompt")))


def bench_paper(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    size: Size = FULL,
    inflate: str | None = None,
    seed: int = 0,
    seconds: float | None = None,
    names: Mapping[str, str | None] | None = None,
) -> bool:
    """Measures what is missing in `out`, until it is done or `seconds` are over: whether it is done.

    >>> bench_paper(pair, read_tasks(["prompts/"]), "paper", seconds=540)    # doctest: +SKIP
    """
    if pair.draft is None:
        raise UsageError("the paper's study needs a draft model: load the pair with one")
    if not any(name in tasks for name in MAIN):
        raise UsageError(f"none of the paper's tasks is there: name files after {', '.join(MAIN)}")
    deadline, folder = Deadline(seconds), Path(out).expanduser()
    done = True
    with claimed(folder, "--out"), held_alone(folder, "bench paper"):
        for item in ITEMS:
            prompts = item.prompts_of(tasks, size.prompts)
            if not prompts:
                continue
            left = deadline.left
            if left is not None and left < 1.0:
                return False
            report = bench_run(
                pair,
                prompts,
                folder / item.name,
                inflate=inflate,
                modes=item.modes,
                max_new_tokens=size.new_tokens,
                repeats=size.repeats if item.name == "main" else 1,
                temperature=item.temperature,
                seed=seed,
                seconds=left,
                names=names,
            )
            done = done and report.measured == report.planned and not report.unscored
        return probe_all(pair, tasks, folder, size, seed, deadline) and done


def probe_all(
    pair: Pair, tasks: Mapping[str, Sequence[str]], folder: Path, size: Size, seed: int, deadline: Deadline
) -> bool:
    (folder / PROBES).mkdir(exist_ok=True)
    configuration = pair_key(pair) | {"new_tokens": size.new_tokens, "long_tokens": size.long_tokens, "seed": seed}
    with Runs(folder / PROBES, configuration) as runs:
        known = {Probe.of(record) for record in runs.records if "setting" in record}
        missing, looks = [probe for probe in wanted(tasks, size) if probe not in known], Looks(pair, tasks, size, seed)
        with progress_bar(f"{len(missing)} answers looked into") as report:
            for done, probe in enumerate(missing):
                if deadline.is_near:
                    return False
                with deadline.watch():
                    found = looks.at(probe)
                place = {"setting": probe.setting, "task": probe.task, "prompt": probe.prompt}
                runs.append(probe.kind, place | found)
                report((done + 1) / len(missing))
    return True


def wanted(tasks: Mapping[str, Sequence[str]], size: Size) -> Iterator[Probe]:
    main = [name for name in MAIN if name in tasks]
    places = [(task, number) for task in main for number in range(min(PROBED_PROMPTS, size.prompts, len(tasks[task])))]
    for task, number in places:
        yield from (Probe("borrowing", str(tau), task, number) for tau in TAUS)
        yield from (Probe("overlap", str(heat), task, number) for heat in (0.0, *TEMPERATURES))
    long = [name for name in (*UNLIKE, *main) if name in tasks][: size.long_answers]
    shares = [f"target {share}" for share in masks.SHARES] + [f"draft {share}" for share in DRAFT_SHARES]
    yield from (Probe("masks", share, task, 0) for task in long for share in shares)


@dataclass
class Looks:
    """What is looked for in the answers of a pair."""

    pair: Pair
    tasks: Mapping[str, Sequence[str]]
    size: Size
    seed: int
    _plain: dict[str, list[int]] = field(default_factory=dict)  # long answers without drafting, by prompt

    def at(self, probe: Probe) -> Record:
        prompt = self.tasks[probe.task][probe.prompt]
        found: Record = getattr(self, probe.kind)(prompt, probe.setting)
        return found

    def borrowing(self, prompt: str, tau: str) -> Record:
        text, steps = self._steps(prompt, f"graph:tau={tau}")
        random = Random(self.seed)
        found = [record for one in probes.seen(self.pair, text, steps) for record in probes.borrowing(one, random)]
        return {"steps": len(steps), "nodes": sum(len(step.graph) for step in steps), "merges": found}

    def overlap(self, prompt: str, temperature: str) -> Record:
        """Beside hypotheses of the next prompt, which has nothing to do with this one."""
        sampling = {"temperature": float(temperature)} if float(temperature) else {}
        prompts = [one for task in MAIN if task in self.tasks for one in self.tasks[task][: self.size.prompts]]
        other = prompts[(prompts.index(prompt) + 1) % len(prompts)]
        text, steps = self._steps(prompt, "tree", **sampling)
        _, unrelated = self._steps(other, "tree", **sampling) if other != prompt else ([], [])
        others = [path for step in unrelated for path in probes.hypotheses(step.graph)]
        random, read = Random(self.seed), probes.seen(self.pair, text, steps)
        pairs = [found for one in read for found in probes.overlap(one, others, self._kind_of, random)]
        return {"steps": len(steps), "pairs": pairs}

    def masks(self, prompt: str, setting: str) -> Record:
        where, share = setting.split()
        plain = self._long_answer(prompt)
        found = masks.answer(self.pair, prompt, self._long, **{where: float(share)})
        ids = encode(self.pair.tokenizer, prompt)
        return {
            "tokens_per_pass": found["tokens_per_pass"],
            "first_difference": first_difference([found["tokens"], plain]),
            "surprise": masks.surprise(self.pair, ids, found["tokens"]),
            "plain_surprise": masks.surprise(self.pair, ids, plain),
            "text": self.pair.tokenizer.decode(found["tokens"], skip_special_tokens=True),
        }

    @property
    def _long(self) -> dict[str, Any]:
        tokens = self.size.long_tokens
        return {"max_new_tokens": tokens, "min_new_tokens": tokens, "seed": self.seed}

    def _long_answer(self, prompt: str) -> list[int]:
        if prompt not in self._plain:
            decoding = self.pair.start(prompt, config=masks.PLAIN, **self._long)
            for _ in decoding:
                pass
            self._plain[prompt] = decoding.new_tokens
        return self._plain[prompt]

    def _steps(self, prompt: str, mode: str, **sampling: Any) -> tuple[list[int], list[Step]]:
        arguments = {"max_new_tokens": self.size.new_tokens, "seed": self.seed} | sampling
        return probes.steps_of(self.pair, prompt, mode, arguments)

    def _kind_of(self, token: int) -> str:
        return probes.kind_of_token(self.pair.tokenizer.decode([token]))


def probed(folder: Path, kind: str) -> list[Record]:
    """What was found, if anything was looked for."""
    file = folder / PROBES / FILE
    return of_kind(records_in(file), kind) if file.exists() else []
