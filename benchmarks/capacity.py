"""How many GPUs do so many users need? A simulation of replicas from measured times.

    python benchmarks/capacity.py --out docs/results/capacity      # the plan, from times of an H200
    python benchmarks/poisson_load.py --out docs/results/capacity  # the simulation beside a real load on this machine

Users ask, read for a while and ask again, in conversations of a few turns. A replica answers as the scheduler does: in
every step each running text gets its tokens, and pieces of prompts are read beside them; what it has of a conversation
is not read again. What steps take and give by the number of their texts was measured. How ranks of a tensor parallel
target change that is assumed: see `Link`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from math import exp, inf, log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from draftgraph.cost.reading import ALONE, LEAST, SLOWER, share
from draftgraph.serve.conversations import preferred

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
TEXTS, CHUNK = 64, 256  # of a replica together; tokens of prompts in a step: the server's defaults
SLACK = TEXTS // 4  # requests that a conversation's own replica may have more than another, as doors have it
SIMULATED = 8  # replicas: those beyond them, with as many users each, do the same
WARM, MEASURED = 90.0, 60.0  # seconds
LAYERS, HIDDEN = 32, 4096  # of the 7B shape


@dataclass(frozen=True)
class Costs:
    """What one replica's steps take and give, by the number of texts in them."""

    texts: tuple[int, ...]
    plain_ms: tuple[float, ...]  # of a step that gives every text one token
    drafted_ms: tuple[float, ...]  # of a step with drafts
    drafted_tokens: tuple[float, ...]  # that it gives a text
    begin_ms: float  # of a prompt, whatever its length
    token_ms: float  # of each of its tokens
    draft_begin_ms: float = 0.0  # more of both, where a draft reads it too
    draft_token_ms: float = 0.0
    pass_ms: tuple[float, ...] = ()  # of the target's pass in a plain step
    slots: int = 120_000  # tokens of running and of known texts

    def reading_ms(self, drafts: bool) -> tuple[float, float]:
        """Of a prompt, and of each of its tokens."""
        more = (self.draft_begin_ms, self.draft_token_ms) if drafts else (0.0, 0.0)
        return self.begin_ms + more[0], self.token_ms + more[1]

    def step(self, texts: int, drafts: bool) -> tuple[float, float]:
        """Seconds, and tokens for a text. Drafts only where they pay, as the scheduler decides by the clock."""
        plain = float(np.interp(texts, self.texts, self.plain_ms))
        if not drafts:
            return plain / 1e3, 1.0
        places, place = [log2(one) for one in self.texts], log2(texts)
        rates = [tokens / ms for tokens, ms in zip(self.drafted_tokens, self.drafted_ms, strict=True)]
        drafted, rate = (float(np.interp(place, places, values)) for values in (self.drafted_ms, rates))
        return (drafted / 1e3, rate * drafted) if rate > 1 / plain else (plain / 1e3, 1.0)


@dataclass(eq=False)
class Request:
    asked: float
    prompt: int  # tokens
    answer: int
    conversation: str = ""
    unread: int = 0
    began: bool = False
    first: float = 0.0
    ended: float = 0.0

    @property
    def wait(self) -> float:
        return self.first - self.asked

    @property
    def per_token(self) -> float:
        return (self.ended - self.first) / max(1, self.answer - 1)


class Replica:
    """Steps over running texts. All get as many tokens in a step, so one count says who is done."""

    def __init__(self, costs: Costs, drafts: bool, texts: int = TEXTS) -> None:
        self.costs, self.drafts, self.texts = costs, drafts, texts
        self.waiting: list[Request] = []
        self.reading: list[Request] = []
        self.fresh: list[Request] = []  # read in the last step
        self.running: list[tuple[float, int, Request]] = []  # a heap, by the count at which they end
        self.known: OrderedDict[str, int] = OrderedDict()  # tokens of conversations, the latest last
        self.read = self.skipped = 0  # tokens of prompts
        self._count, self._order, self._taken = 0.0, itertools.count(), 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.reading) + len(self.running)

    def add(self, request: Request) -> None:
        known = min(self.known.get(request.conversation, 0), request.prompt - 1)
        request.unread = request.prompt - known
        self.skipped += known
        self.read += request.unread
        self.waiting.append(request)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """When it is over, and who is answered then."""
        while self.waiting and len(self.reading) + len(self.running) < self.texts:
            self.reading.append(self.waiting.pop(0))
        seconds, tokens = self.costs.step(max(1, len(self.running)), self.drafts)
        begin_ms, token_ms = self.costs.reading_ms(tokens > 1)
        pieces = share([one.unread for one in self.reading], self._room(seconds, token_ms))
        begun = sum(piece > 0 and not one.began for one, piece in zip(self.reading, pieces, strict=True))
        now += seconds + (begin_ms * begun + token_ms * sum(pieces)) / 1e3
        self._count += tokens if self.running else 0.0
        for one in self.fresh:
            one.first = now
        ended = self._ended(now)
        self.fresh = []
        for one, piece in zip(list(self.reading), pieces, strict=True):
            one.unread, one.began = one.unread - piece, one.began or piece > 0
            if not one.unread:
                self.reading.remove(one)
                self.fresh.append(one)
                self._taken += one.prompt + one.answer
                heapq.heappush(self.running, (self._count + one.answer, next(self._order), one))
        return now, ended

    def _room(self, seconds: float, token_ms: float) -> int:
        """Tokens of prompts that a step reads."""
        if not self.running:
            return ALONE
        return int(min(CHUNK, max(LEAST, (SLOWER - 1) * 1e3 * seconds / token_ms)))

    def _ended(self, now: float) -> list[Request]:
        found = []
        while self.running and self.running[0][0] <= self._count + 1e-9:
            one = heapq.heappop(self.running)[2]
            one.ended = now
            self._taken -= one.prompt + one.answer
            self.learn(one.conversation, one.prompt + one.answer)
            found.append(one)
        return found

    def learn(self, conversation: str, tokens: int) -> None:
        """Its pages are kept, in the place of those of earlier turns, as long as there is room."""
        self._taken += tokens - self.known.pop(conversation, 0)
        self.known[conversation] = tokens
        while self._taken > self.costs.slots and self.known:
            self._taken -= self.known.popitem(last=False)[1]


def replayed(replica: Replica, requests: Iterable[Request]) -> list[Request]:
    """Requests at known times, answered by one replica."""
    coming, now, found = sorted(requests, key=lambda one: one.asked)[::-1], 0.0, []
    while coming or replica.load:
        while coming and (coming[-1].asked <= now or not replica.load):
            now = max(now, coming[-1].asked)
            replica.add(coming.pop())
        now, ended = replica.step(now)
        found += ended
    return found


def closed_loop(replica: Replica, clients: int, rounds: int, prompt: int, answer: int) -> float:
    """Tokens per second of clients that ask again as soon as they are answered. Of their prompts all is known but the
    end of a page."""
    names, now, tokens = iter(map(str, range(clients * rounds))), 0.0, 0

    def ask(count: int) -> None:
        for name in itertools.islice(names, count):
            replica.learn(name, prompt - LEAST // 2)
            replica.add(Request(now, prompt, answer, name))

    ask(clients)
    while replica.load:
        now, ended = replica.step(now)
        tokens += sum(one.answer for one in ended)
        ask(len(ended))
    return tokens / now


# Users


@dataclass(frozen=True)
class Habits:
    """Of all users. Lengths are log-normal around these means, times to read exponential, turns geometric."""

    seconds_between: float = 30.0  # an answer and the next message
    turns: float = 5.0
    message: float = 100.0  # tokens
    answer: float = 250.0
    longest_answer: int = 1024
    spread: float = 0.8  # of the logarithms of lengths


class User:
    def __init__(self, name: str, habits: Habits, draw: random.Random) -> None:
        self._name, self._habits, self._draw = name, habits, draw
        self._topics = itertools.count()
        self._leave()

    def asks(self, now: float) -> Request:
        answer = min(self._length(self._habits.answer), self._habits.longest_answer)
        return Request(now, self._history + self._length(self._habits.message), answer, self._topic)

    def reads(self, request: Request) -> float:
        """Until the next question, which may be of another conversation."""
        self._history = request.prompt + request.answer
        if self._draw.random() < 1 / self._habits.turns:
            self._leave()
        return self._draw.expovariate(1 / self._habits.seconds_between)

    def _leave(self) -> None:
        self._history, self._topic = 0, f"{self._name}:{next(self._topics)}"

    def _length(self, mean: float) -> int:
        spread = self._habits.spread
        return max(1, round(mean * exp(self._draw.gauss(-spread * spread / 2, spread))))


@dataclass(frozen=True)
class Outcome:
    wait: float  # seconds until the first token, the 99th percentile
    per_token: float  # and for each further one
    median_per_token: float
    tokens_per_second: float
    hits: float  # share of prompts' tokens that were known


def simulated(replicas: list[Replica], users: int, habits: Habits, by_conversation: bool = True) -> Outcome:
    draw, order = random.Random(0), itertools.count()
    names = {str(number): one for number, one in enumerate(replicas)}
    events: list[tuple[float, int, User | Replica]] = []
    idle, owners, answered = set(replicas), {}, []
    for number in range(users):
        at = draw.uniform(0.0, habits.seconds_between)
        heapq.heappush(events, (at, next(order), User(str(number), habits, draw)))
    while events and events[0][0] < WARM + MEASURED:
        now, _, what = heapq.heappop(events)
        if isinstance(what, User):
            request = what.asks(now)
            owners[request] = what
            if by_conversation:
                loads = {name: one.load for name, one in names.items()}
                chosen = names[preferred(request.conversation.encode(), loads, SLACK)]
            else:
                chosen = min(draw.sample(replicas, min(2, len(replicas))), key=lambda one: one.load)
            chosen.add(request)
            if chosen not in idle:
                continue
            idle.discard(chosen)
            what = chosen
        if not what.load:
            idle.add(what)
            continue
        then, ended = what.step(now)
        for request in ended:
            user = owners.pop(request)
            heapq.heappush(events, (then + user.reads(request), next(order), user))
        answered += [request for request in ended if request.asked > WARM]
        heapq.heappush(events, (then, next(order), what))
    late = [WARM + MEASURED - one.asked for one in owners if one.asked > WARM and not one.first]
    waits, steps = [one.wait for one in answered] + late, [one.per_token for one in answered] or [inf]
    tokens = sum(one.answer for one in answered) / MEASURED
    hits = sum(one.skipped for one in replicas) / max(1, sum(one.skipped + one.read for one in replicas))
    return Outcome(percentile(waits, 0.99), percentile(steps, 0.99), median(steps), tokens, hits)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else inf


# The plan


@dataclass(frozen=True)
class Target:
    name: str
    wait: float  # seconds, of 99 in 100 answers at most
    per_token: float

    def met(self, outcome: Outcome) -> bool:
        return outcome.wait <= self.wait and outcome.per_token <= self.per_token


TARGETS = (Target("50 ms", 2.0, 0.050), Target("15 ms", 2.0, 0.015), Target("5 ms", 2.0, 0.005))
USERS = (10, 1_000, 100_000)


@dataclass(frozen=True)
class Link:
    """What ranks wait for: two sums over all of them in every layer, inside a captured pass."""

    latency_us: float = 10.0  # of a sum of a few rows
    gigabytes: float = 300.0  # a second, of many rows

    def ms(self, rows: float, ranks: int) -> float:
        sent = 2 * (ranks - 1) / ranks * rows * HIDDEN * 2  # bytes: bfloat16, to all and back
        return 1e3 * 2 * LAYERS * (self.latency_us / 1e6 + sent / (self.gigabytes * 1e9))


def over_ranks(costs: Costs, ranks: int, link: Link) -> Costs:
    """The same target on several GPUs, each of which reads its share of the weights. The host's part of a step stays,
    and the draft's."""
    if ranks == 1:
        return costs
    saved = [ms - ms / ranks - link.ms(texts, ranks) for ms, texts in zip(costs.pass_ms, costs.texts, strict=True)]
    plain, drafted = (
        tuple(ms - less for ms, less in zip(steps, saved, strict=True)) for steps in (costs.plain_ms, costs.drafted_ms)
    )
    per_token = costs.token_ms / ranks + (link.ms(ALONE, ranks) - link.ms(0, ranks)) / ALONE
    return replace(costs, plain_ms=plain, drafted_ms=drafted, token_ms=per_token, slots=costs.slots * ranks)


@dataclass(frozen=True)
class Plan:
    """How many replicas of one kind meet a target."""

    costs: Costs
    drafts: bool
    target: Target
    habits: Habits
    by_conversation: bool = True

    def outcome(self, users: int, replicas: int) -> Outcome:
        fewer = min(replicas, SIMULATED)
        made = [Replica(self.costs, self.drafts) for _ in range(fewer)]
        return simulated(made, round(users * fewer / replicas), self.habits, self.by_conversation)

    def replicas(self, users: int) -> int | None:
        """The least number; None if users alone on a replica would have to wait longer."""
        if not self.target.met(self.outcome(SIMULATED, SIMULATED)):
            return None
        tokens = users * self.habits.answer / self.habits.seconds_between
        most = max(1, int(tokens * self.costs.plain_ms[-1] / 1e3 / self.costs.texts[-1] / 2))  # half of what it must be
        while not self.target.met(self.outcome(users, most)):
            most *= 2
            if most > 2 * users:
                return None
        least = most // 2  # is too few
        while most - least > max(1, most // 64):
            middle = (least + most) // 2
            least, most = (least, middle) if self.target.met(self.outcome(users, middle)) else (middle, most)
        return most


def planned(costs: Costs, habits: Habits, link: Link, say: Callable[[str], None]) -> list[dict[str, Any]]:
    found = []
    for target, ranks, drafts in itertools.product(TARGETS, (1, 2, 4), (False, True)):
        plan = Plan(over_ranks(costs, ranks, link), drafts, target, habits)
        for users in USERS:
            replicas = plan.replicas(users)
            line: dict[str, Any] = {"target": asdict(target), "ranks": ranks, "drafts": drafts, "users": users}
            line["gpus"] = None if replicas is None else replicas * ranks
            line["outcome"] = None if replicas is None else asdict(plan.outcome(users, replicas))
            found.append(line)
            say(f"{target.name}, {ranks} ranks, drafts {drafts}, {users} users: {line['gpus']} GPUs")
    return found


def routed(costs: Costs, habits: Habits, users: int = 1_000, replicas: int = 6) -> list[dict[str, Any]]:
    """The same users, sent back to the pages of their conversations or to the less busy of two replicas."""
    found = []
    for slots, by_conversation in itertools.product((costs.slots, 400_000), (False, True)):
        plan = Plan(replace(costs, slots=slots), False, TARGETS[0], habits, by_conversation)
        line = {"slots": slots, "by_conversation": by_conversation, "users": users, "gpus": replicas}
        found.append(line | {"outcome": asdict(plan.outcome(users, replicas))})
    return found


# What an H200 takes, from docs/results


def runs_of(folder: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / folder / file).read_text().splitlines()]


class H200:
    """One GPU with the 7B-cost, inflated target. Steps by texts come from closed loops of one length, whose prompts
    were known but for the end of a page; prompts from single requests."""

    rounds, prompt, answer = 4, 169, 128

    def __init__(self) -> None:
        latencies = json.loads((RESULTS / "h200-7b" / "report.json").read_text())["latencies"]["target"]
        self.passes = 1e3 * np.array(latencies["seconds"][0])  # behind 128 tokens, by nodes
        self.nodes = latencies["nodes"]
        self.begin_ms, self.token_ms = self.reading("off")
        self.loads = runs_of("h200-7b-load", "load.jsonl")

    def reading(self, mode: str) -> tuple[float, float]:
        """Milliseconds of a prompt and of each of its tokens: a pass reads it, a step gives the first token."""
        single = [one for one in runs_of("h200-7b", "runs.jsonl") if one["kind"] == "run" and one["mode"] == mode]
        single = [one for one in single if one["repeat"]]  # the first compiles
        lengths, first = ([one[name] for one in single] for name in ("prompt_tokens", "first_token_seconds"))
        token, once = np.polyfit(lengths, first, 1)
        step = fmean(one["ms_per_token"] * one["tokens_per_pass"] for one in single)
        return 1e3 * float(once) - self.pass_ms(1) - step, 1e3 * float(token)

    def pass_ms(self, texts: int) -> float:
        return float(np.interp(texts, self.nodes, self.passes))

    def measured(self, texts: int, mode: str, what: Callable[[dict[str, Any]], float]) -> float:
        return median(what(one) for one in self.loads if (one["texts"], one["mode"]) == (texts, mode))

    def tokens_per_second(self, texts: int, mode: str) -> float:
        return self.measured(texts, mode, lambda one: one["tokens"] / one["seconds"])

    def rounds_of(self, texts: int) -> int:
        return self.rounds if texts > 1 else 16

    def reading_ms(self, texts: int, alone: float) -> float:
        """Of one round, before its first step."""
        return alone + texts * (self.begin_ms + self.token_ms * LEAST // 2)

    def plain_ms(self, texts: int) -> float:
        whole = 1e3 * self.measured(texts, "off", lambda one: one["seconds"]) / self.rounds_of(texts)
        if texts == 1:
            return (whole - self.reading_ms(1, 0.0)) / (1 + self.answer)
        return (whole - self.reading_ms(texts, self.plain_ms(1))) / self.answer

    def drafted(self, texts: int) -> tuple[float, float]:
        """Milliseconds of a step, and tokens for a text."""
        rounds = self.rounds_of(texts)
        steps = self.measured(texts, "auto", lambda one: one["passes"]) - rounds
        whole = 1e3 * self.measured(texts, "auto", lambda one: one["seconds"])
        return (whole - rounds * self.reading_ms(texts, self.plain_ms(1))) / steps, rounds * self.answer / steps

    def costs(self) -> Costs:
        texts = (1, 4, 16, 64)
        drafted = [self.drafted(one) for one in texts[:-1]] + [(self.plain_ms(64), 1.0)]  # it does not draft there
        ms, tokens = zip(*drafted, strict=True)
        plain, passes = (tuple(map(one, texts)) for one in (self.plain_ms, self.pass_ms))
        more = [max(0.0, drafted - own) for drafted, own in zip(self.reading("auto"), self.reading("off"), strict=True)]
        return Costs(texts, plain, ms, tokens, self.begin_ms, self.token_ms, *more, pass_ms=passes)

    def foreseen(self) -> Costs:
        """From loads of 1 and 4 texts alone: passes as they were priced, the host's part of a step a straight line."""
        host = [self.plain_ms(texts) - self.pass_ms(texts) for texts in (1, 4)]
        more, texts = (host[1] - host[0]) / 3, (1, 4, 16, 64)
        plain = tuple(self.pass_ms(one) + host[0] + more * (one - 1) for one in texts)
        return replace(self.costs(), plain_ms=plain)

    def check(self) -> list[dict[str, Any]]:
        found = []
        for texts in (1, 4, 16, 64):
            predicted = closed_loop(
                Replica(self.foreseen(), False), texts, self.rounds_of(texts), self.prompt, self.answer
            )
            measured = self.tokens_per_second(texts, "off")
            line = {"texts": texts, "predicted": predicted, "measured": measured, "fitted": texts in (1, 4)}
            found.append(line)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for plan.json")
    parser.add_argument("--latency-us", type=float, default=Link.latency_us, help="of a sum over ranks")
    parser.add_argument("--gigabytes", type=float, default=Link.gigabytes, help="a second, between ranks")
    parser.add_argument("--seconds-between", type=float, default=Habits.seconds_between)
    parser.add_argument("--turns", type=float, default=Habits.turns)
    parser.add_argument("--message", type=float, default=Habits.message, help="tokens")
    parser.add_argument("--answer", type=float, default=Habits.answer, help="tokens")
    given = parser.parse_args()
    machine, link = H200(), Link(given.latency_us, given.gigabytes)
    habits = Habits(given.seconds_between, given.turns, given.message, given.answer)
    costs = machine.costs()
    found = {"costs": asdict(costs), "link": asdict(link), "habits": asdict(habits), "check": machine.check()}
    print(json.dumps(found, indent=2), flush=True)
    found["plan"] = planned(costs, habits, link, lambda line: print(line, flush=True))
    found["routing"] = routed(costs, habits)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "plan.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
