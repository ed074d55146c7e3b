"""What is looked into without timing it, answer by answer: each is kept as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper import masks, probes
from draftgraph.bench.paper.items import MAIN, TAUS, TEMPERATURES, UNLIKE, Size, first_prompts
from draftgraph.bench.runs import FILE, Record, Runs, of_kind, records_in
from draftgraph.bench.sameness import difference
from draftgraph.bench.scores import accuracy, known_of, last_number, scorer_of
from draftgraph.bench.speed import Deadline, pair_key
from draftgraph.notices import progress_bar
from draftgraph.text import decode, encode
from draftgraph.trace import Step

if TYPE_CHECKING:
    from draftgraph.pair import Pair

PROBES, ACCURACY = "probes", "accuracy"  # folders: answers of the timed lengths and long ones; answers to be right
PROBED_PROMPTS = 2  # of a task


@dataclass(frozen=True)
class Probe:
    """One answer to look into: what is looked for, at which setting, on which prompt."""

    kind: str  # borrowing, overlap, masks or accuracy
    setting: str
    task: str
    prompt: int

    @classmethod
    def of(cls, record: Record) -> Probe:
        return cls(*(record[name] for name in ("kind", "setting", "task", "prompt")))


def look_into_answers(
    pair: Pair, tasks: Mapping[str, Sequence[str]], folder: Path, size: Size, seed: int, deadline: Deadline
) -> bool:
    """Whether all are done. Nothing is timed, so a pair needs no inflation."""
    looks, key = Looks(pair, tasks, size, seed), pair_key(pair) | {"seed": seed}
    lengths = {"new_tokens": size.new_tokens, "long_tokens": size.long_tokens}
    return look_into(folder / PROBES, key | lengths, wanted(tasks, size), looks, deadline) and look_into(
        folder / ACCURACY, key | {"new_tokens": size.scored_tokens}, scored(tasks, size), looks, deadline
    )


def look_into(folder: Path, configuration: Record, probes: Iterable[Probe], looks: Looks, deadline: Deadline) -> bool:
    folder.mkdir(exist_ok=True)
    with Runs(folder, configuration) as runs:
        known = {Probe.of(record) for record in runs.records if "setting" in record}
        missing = [probe for probe in probes if probe not in known]
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
    main = first_prompts(tasks, MAIN, min(PROBED_PROMPTS, size.prompts))
    for task, number in ((task, number) for task, prompts in main.items() for number in range(len(prompts))):
        yield from (Probe("borrowing", str(tau), task, number) for tau in TAUS)
        yield from (Probe("overlap", str(heat), task, number) for heat in (0.0, *TEMPERATURES))
    long = [name for name in (*UNLIKE, *main) if name in tasks][: size.long_answers]
    yield from (Probe("masks", setting, task, 0) for task in long for setting in masks.SETTINGS)


def scored(tasks: Mapping[str, Sequence[str]], size: Size) -> Iterator[Probe]:
    """Prompts that have one right result, as those of GSM8K."""
    places = [
        (task, number)
        for task in MAIN
        for number, prompt in enumerate(tasks.get(task, ()))
        if scorer_of({"task": task} | known_of(prompt)) is accuracy
    ]
    for task, number in places[: size.scored_answers]:
        yield from (Probe("accuracy", setting, task, number) for setting in masks.SETTINGS)


@dataclass
class Looks:
    """What is looked for in the answers of a pair."""

    pair: Pair
    tasks: Mapping[str, Sequence[str]]
    size: Size
    seed: int
    _plain: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by prompt and length, without drafting

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
        main = first_prompts(self.tasks, MAIN, self.size.prompts)
        prompts = [one for of_task in main.values() for one in of_task]
        other = prompts[(prompts.index(prompt) + 1) % len(prompts)]
        text, steps = self._steps(prompt, "tree", **sampling)
        _, unrelated = self._steps(other, "tree", **sampling) if other != prompt else ([], [])
        others = [path for step in unrelated for path in probes.hypotheses(step.graph)]
        random, read = Random(self.seed), probes.seen(self.pair, text, steps)
        pairs = [found for one in read for found in probes.overlap(one, others, self._kind_of, random)]
        return {"steps": len(steps), "pairs": pairs}

    def masks(self, prompt: str, setting: str) -> Record:
        """With how much surprise the target reads a long answer."""
        length = {"max_new_tokens": self.size.long_tokens, "min_new_tokens": self.size.long_tokens}
        tokens, plain, found = self._with_wrong_masks(prompt, setting, length)
        ids = encode(self.pair.tokenizer, prompt)
        said = {"surprise": masks.surprise(self.pair, ids, tokens)}
        return found | said | {"plain_surprise": masks.surprise(self.pair, ids, plain)}

    def accuracy(self, prompt: str, setting: str) -> Record:
        """Whether the result is right, as GSM8K counts it."""
        tokens, plain, found = self._with_wrong_masks(prompt, setting, {"max_new_tokens": self.size.scored_tokens})
        result = last_number(known_of(prompt)["reference"])
        right, plain_right = (last_number(self._text(answer)) == result for answer in (tokens, plain))
        return found | {"right": right, "plain_right": plain_right}

    def _with_wrong_masks(
        self, prompt: str, setting: str, length: dict[str, Any]
    ) -> tuple[list[int], list[int], Record]:
        """The tokens, those of plain decoding, and where they part."""
        (where, share), arguments = setting.split(), length | {"seed": self.seed}
        plain = self._plain_answer(prompt, arguments)
        decoding = masks.answer(self.pair, prompt, arguments, **{where: float(share)})
        tokens, parted = decoding.new_tokens, difference(decoding, plain)
        found = {
            "tokens_per_pass": decoding.stats.mean_accepted_length,
            "first_difference": None if parted is None else parted.place,
            "tie": parted is not None and parted.is_tie,
            "text": self._text(tokens),
        }
        return tokens, plain, found

    def _plain_answer(self, prompt: str, arguments: dict[str, Any]) -> list[int]:
        key = prompt, arguments["max_new_tokens"]
        if key not in self._plain:
            decoding = self.pair.start(prompt, config=masks.PLAIN, **arguments)
            for _ in decoding:
                pass
            self._plain[key] = decoding.new_tokens
        return self._plain[key]

    def _steps(self, prompt: str, mode: str, **sampling: Any) -> tuple[list[int], list[Step]]:
        arguments = {"max_new_tokens": self.size.new_tokens, "seed": self.seed} | sampling
        return probes.steps_of(self.pair, prompt, mode, arguments)

    def _text(self, tokens: list[int]) -> str:
        return decode(self.pair.tokenizer, tokens)

    def _kind_of(self, token: int) -> str:
        return probes.kind_of_token(self.pair.tokenizer.decode([token]))


def probed(folder: Path, kind: str) -> list[Record]:
    """What was found, if anything was looked for."""
    files = [folder / place / FILE for place in (PROBES, ACCURACY)]
    return [record for file in files if file.exists() for record in of_kind(records_in(file), kind)]
