"""What the study looks into without timing it, answer by answer: each is kept as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgraph.bench.paper.items import MAIN, TAUS, TEMPERATURES, UNLIKE, Size, first_prompts
from draftgraph.bench.runs import FILE, Deadline, Record, Runs, of_kind, records_in
from draftgraph.bench.sameness import difference
from draftgraph.bench.speed import pair_key
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import accuracy, known_of, last_number, scorer_of
from draftgraph.decoder import Decoding
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.protocol import PassResult, Segment
from draftgraph.graph import Bools, TokenGraph, TokenTree
from draftgraph.notices import progress_bar
from draftgraph.pair import Pair
from draftgraph.stats import Step
from draftgraph.text import decode, encode

# Where masks are wrong, and for which share of nodes: each of these sees one node too many. Right ones come first.
SETTINGS = ("target 0.0", "target 0.02", "target 0.1", "target 0.5", "draft 0.5")
PAIRS = 6  # of hypotheses, of one step
UNRELATED = 2  # pairs with hypotheses of another prompt, for each step
SHORTEST = 2  # tokens of a hypothesis behind the place where it parts from another
PROBES, ACCURACY = "probes", "accuracy"  # folders: answers of the timed lengths and long ones; answers to be right
PROBED_PROMPTS = 2  # of a task


class Probe(NamedTuple):
    """One answer to look into: what is looked for, at which setting, on which prompt."""

    kind: str  # borrowing, overlap, masks or accuracy
    setting: str
    task: str
    prompt: int

    @classmethod
    def of(cls, record: Record) -> Probe:
        return cls(*(record[name] for name in cls._fields))


def look_into_answers(
    pair: Pair, tasks: Mapping[str, Sequence[str]], folder: Path, size: Size, seed: int, deadline: Deadline
) -> bool:
    """Returns whether all are done. Nothing is timed, so the pair is not inflated."""
    looks, key = Looks(pair, tasks, size, seed), pair_key(pair) | {"seed": seed}
    lengths = {"new_tokens": size.new_tokens, "long_tokens": size.long_tokens}
    return look_into(folder / PROBES, key | lengths, wanted_probes(tasks, size), looks, deadline) and look_into(
        folder / ACCURACY, key | {"new_tokens": size.scored_tokens}, scored_probes(tasks, size), looks, deadline
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
                    prompt = looks.tasks[probe.task][probe.prompt]
                    found = getattr(looks, probe.kind)(prompt, probe.setting)
                runs.append(probe.kind, probe._asdict() | found)
                report((done + 1) / len(missing))
    return True


def wanted_probes(tasks: Mapping[str, Sequence[str]], size: Size) -> Iterator[Probe]:
    main = first_prompts(tasks, MAIN, min(PROBED_PROMPTS, size.prompts))
    for task, number in ((task, number) for task, prompts in main.items() for number in range(len(prompts))):
        yield from (Probe("borrowing", str(tau), task, number) for tau in TAUS)
        yield from (Probe("overlap", str(heat), task, number) for heat in (0.0, *TEMPERATURES))
    long = [name for name in (*UNLIKE, *main) if name in tasks][: size.long_answers]
    yield from (Probe("masks", setting, task, 0) for task in long for setting in SETTINGS)


def scored_probes(tasks: Mapping[str, Sequence[str]], size: Size) -> Iterator[Probe]:
    """Prompts that have one right result, as those of GSM8K."""
    places = [
        (task, number)
        for task in MAIN
        for number, prompt in enumerate(tasks.get(task, ()))
        if scorer_of({"task": task} | known_of(prompt)) is accuracy
    ]
    for task, number in places[: size.scored_answers]:
        yield from (Probe("accuracy", setting, task, number) for setting in SETTINGS)


@dataclass
class Looks:
    """What is looked for in the answers of a pair."""

    pair: Pair
    tasks: Mapping[str, Sequence[str]]
    size: Size
    seed: int
    _plain: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by prompt and length, without drafting

    def borrowing(self, prompt: str, tau: str) -> Record:
        text, steps = self._steps(prompt, f"graph:tau={tau}")
        random = Random(self.seed)
        found = [record for one in seen(self.pair, text, steps) for record in borrowing(one, random)]
        return {"steps": len(steps), "nodes": sum(len(step.graph) for step in steps), "merges": found}

    def overlap(self, prompt: str, temperature: str) -> Record:
        """Beside hypotheses of the next prompt, which has nothing to do with this one."""
        sampling = {"temperature": float(temperature)} if float(temperature) else {}
        main = first_prompts(self.tasks, MAIN, self.size.prompts)
        prompts = [one for of_task in main.values() for one in of_task]
        other = prompts[(prompts.index(prompt) + 1) % len(prompts)]
        text, steps = self._steps(prompt, "tree", **sampling)
        _, unrelated = self._steps(other, "tree", **sampling) if other != prompt else ([], [])
        others = [path for step in unrelated for path in hypotheses(step.graph)]
        random, read = Random(self.seed), seen(self.pair, text, steps)

        def kind_of(token: int) -> str:
            return kind_of_token(self.pair.tokenizer.decode([token]))

        pairs = [found for one in read for found in overlap(one, others, kind_of, random)]
        return {"steps": len(steps), "pairs": pairs}

    def masks(self, prompt: str, setting: str) -> Record:
        """With how much surprise the target reads a long answer."""
        length = {"max_new_tokens": self.size.long_tokens, "min_new_tokens": self.size.long_tokens}
        tokens, plain, found = self._with_wrong_masks(prompt, setting, length)
        ids = encode(self.pair.tokenizer, prompt)
        said, plainly = (surprise(self.pair, ids, answer) for answer in (tokens, plain))
        return found | {"surprise": said, "plain_surprise": plainly}

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
        decoding = answer_with_wrong_masks(self.pair, prompt, arguments, **{where: float(share)})
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
            self._plain[key] = answered(self.pair, prompt, "off", arguments).new_tokens
        return self._plain[key]

    def _steps(self, prompt: str, mode: str, **sampling: Any) -> tuple[list[int], list[Step]]:
        arguments = {"max_new_tokens": self.size.new_tokens, "seed": self.seed} | sampling
        return steps_of(self.pair, prompt, mode, arguments)

    def _text(self, tokens: list[int]) -> str:
        return decode(self.pair.tokenizer, tokens)


def probed(folder: Path, kind: str) -> list[Record]:
    """The records of one kind that were found so far."""
    files = [folder / place / FILE for place in (PROBES, ACCURACY)]
    return [record for file in files if file.exists() for record in of_kind(records_in(file), kind)]


def answered(pair: Pair, prompt: str, mode: str, arguments: dict[str, Any]) -> Decoding:
    """A finished decoding."""
    decoding = pair.start(prompt, config=mode_named(mode), **arguments)
    for _ in decoding:
        pass
    return decoding


@contextmanager
def wrong_masks(engine: Any, share: float, seed: int = 0) -> Iterator[None]:
    """While entered, this share of the nodes of a pass also see a node that is no ancestor of theirs."""
    random, run = np.random.default_rng(seed), engine.run

    def wrong_run(segments: Sequence[Segment]) -> list[PassResult]:
        """Prompts are read as they are."""
        trees = [one for one in segments if not one.chain]
        wrong = {one: replace(one, visible=with_strangers(one.visible, share, random)) for one in trees}
        return run([wrong.get(one, one) for one in segments])  # type: ignore[no-any-return]

    engine.run = wrong_run
    try:
        yield
    finally:
        del engine.run


def with_strangers(visible: Bools, share: float, random: np.random.Generator) -> Bools:
    """A copy of the mask [nodes, slots] in which some rows see one more earlier slot."""
    changed, before = visible.copy(), visible.shape[1] - visible.shape[0]
    for row in np.flatnonzero(random.random(len(visible)) < share):
        strangers = np.flatnonzero(~visible[row, : before + row])
        if len(strangers):
            changed[row, random.choice(strangers)] = True
    return changed


def answer_with_wrong_masks(
    pair: Pair, prompt: str, arguments: dict[str, Any], target: float = 0.0, draft: float = 0.0
) -> Decoding:
    """With these shares of wrong rows at the target and at the draft."""
    engines = pair.decoder.engines
    with wrong_masks(engines.target, target), wrong_masks(engines.draft, draft):
        return answered(pair, prompt, "graph", arguments)


@torch.no_grad()
def surprise(pair: Pair, prompt: list[int], tokens: list[int]) -> float:
    """The target's own mean surprise at an answer, in nats per token: the logarithm of its perplexity."""
    device = pair.target.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with Loan(pair.target):
        logits = pair.target(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return float(-logprobs.gather(1, ids[0, len(prompt) :, None]).mean())


@dataclass(frozen=True)
class Seen:
    """A step, and what the draft says at every node of its graph."""

    step: Step
    text: list[int]
    logprobs: Tensor  # [nodes, vocabulary of the draft]

    @property
    def entropy(self) -> float:
        """Of the draft at the root, in nats."""
        row = self.logprobs[0]
        return float(-(row.exp() * row.clamp_min(-1e4)).sum())


def steps_of(pair: Pair, prompt: str, mode: str, arguments: dict[str, Any]) -> tuple[list[int], list[Step]]:
    """The text of an answer, prompt included, and its steps."""
    steps: list[Step] = []
    decoder = pair.decoder
    before, decoder.observer = decoder.observer, steps.append
    try:
        return answered(pair, prompt, mode, arguments).text, steps
    finally:
        decoder.observer = before


def seen(pair: Pair, text: list[int], steps: Sequence[Step]) -> Iterator[Seen]:
    """The draft reads the text once, and the graph of each step as a tree, merged nodes at their own places."""
    decoder = pair.decoder
    engine, vocabulary = decoder.engines.draft, decoder.engines.vocabulary
    assert engine is not None and vocabulary is not None
    context = engine.open()
    with Loan(*decoder.models):
        context.begin(len(text), False)
        for step in steps:
            context.prefill(vocabulary.as_read(text[len(context.text) : step.position]))
            tree = own_tree(step.graph)
            nodes = Segment(context, vocabulary.to_draft(tree.tokens), tree.depths, tree.mask)
            logits = engine.run([nodes])[0].logits
            context.forget(0)
            yield Seen(step, text, torch.log_softmax(logits.float(), dim=-1))
        context.rewind(0)
        context.close()


def own_tree(graph: TokenGraph) -> TokenTree:
    """Every node of a graph where it was proposed first: nothing is repeated, nothing left out."""
    tokens, parents, depths = (np.array(column) for column in (graph.tokens, graph.parents, graph.depths))
    return TokenTree(tokens, parents, depths, np.arange(len(graph)), np.ones(len(graph)), list(graph.sources))


def borrowing(one: Seen, random: Random) -> Iterator[Record]:
    """Of each merged node: KL divergence of what it borrows from what the draft would say there itself; and, for
    scale, that of another node's."""
    graph = one.step.graph
    for node, lender in enumerate(graph.canonical):
        if lender != node and graph.children[lender]:
            other = random.randrange(len(graph))
            own = one.logprobs[node]
            terms = (own.exp() * (own - one.logprobs[place]) for place in (lender, other))
            divergence, unrelated = (float(each.nan_to_num(0.0, 0.0, 0.0).sum()) for each in terms)
            yield {"divergence": divergence, "unrelated": unrelated, "children": len(graph.children[lender])}


def overlap(one: Seen, others: Sequence[list[int]], kind_of: Callable[[int], str], random: Random) -> Iterator[Record]:
    """What pairs of hypotheses of a step share behind the place where they part, and what they share with hypotheses
    of other prompts."""
    paths = hypotheses(one.step.graph)
    parted = [rest for pair in combinations(paths, 2) if (rest := behind_parting(*pair)) is not None]
    about = {"entropy": one.entropy, "kind": kind_of(one.text[one.step.position])}
    for first, second in random.sample(parted, min(PAIRS, len(parted))):
        yield about | {"related": True} | compared(first, second)
    for _ in range(min(UNRELATED, len(others) and len(paths))):
        rest = behind_parting(random.choice(paths), random.choice(others))
        if rest is not None:
            yield about | {"related": False} | compared(*rest)


def hypotheses(graph: TokenGraph) -> list[list[int]]:
    """The paths from the root to the leaves, the root left out."""
    paths: list[list[int]] = []
    for node in range(1, len(graph)):
        if not graph.children[node]:
            path = []
            at = node
            while at > 0:
                path.append(graph.tokens[at])
                at = graph.parents[at]
            paths.append(path[::-1])
    return paths


def behind_parting(one: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """What follows the first tokens that differ; None if that is too short to tell."""
    place = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    if place is None:
        return None
    rests = list(one[place + 1 :]), list(other[place + 1 :])
    return rests if min(map(len, rests)) >= SHORTEST else None


def compared(one: Sequence[int], other: Sequence[int]) -> Record:
    """Shares of tokens and of pairs of tokens that both have (of those of the shorter), and edits per token."""
    found = {}
    for name, size in (("tokens", 1), ("bigrams", 2)):
        grams = [{tuple(text[at : at + size]) for at in range(len(text) - size + 1)} for text in (one, other)]
        found[name] = len(grams[0] & grams[1]) / min(map(len, grams))
    return found | {"edits": edits(one, other) / max(len(one), len(other))}


def edits(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein's distance.

    >>> edits([1, 2, 3], [1, 3, 4])
    2
    """
    row = list(range(len(other) + 1))
    for place, token in enumerate(one, start=1):
        before, row = row, [place]
        for at, known in enumerate(other, start=1):
            row.append(min(row[-1] + 1, before[at] + 1, before[at - 1] + (token != known)))
    return row[-1]


def kind_of_token(text: str) -> str:
    """
    >>> [kind_of_token(text) for text in (" the", "ing", "7", ".", "\\n")]
    ['start of a word', 'rest of a word', 'number', 'punctuation', 'space']
    """
    bare = text.strip()
    if not bare:
        return "space"
    if any(character.isdigit() for character in bare):
        return "number"
    if not any(character.isalpha() for character in bare):
        return "punctuation"
    return "start of a word" if text[0].isspace() else "rest of a word"
