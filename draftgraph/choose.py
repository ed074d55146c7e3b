"""The target's token at a node, and the walk along the tokens that it chooses.

One rule for every mode: the argmax of the processed scores, with keyed Gumbel noise where tokens are sampled.
What was drafted cannot change what is chosen, so drafting more or less never changes the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from draftgraph.engine.protocol import PassResult, Sampling, Warping
from draftgraph.graph import ROOT, Ints, TokenTree
from draftgraph.kernels.sampling import sample_one
from draftgraph.noise import ACCEPTANCE, CHOICE, DRAFT, RESIDUAL, KeyedNoise

FinishReason = Literal["stop", "length"]


@dataclass
class Prefix:
    """The text that processors and stop conditions see, growing token by token. May start with padding."""

    ids: Tensor  # [1, capacity]
    length: int
    padding: int = 0
    unwritten: list[int] = field(default_factory=list)  # tokens that nobody has looked at yet

    @classmethod
    def of(cls, input_ids: Tensor, capacity: int, padding: int = 0) -> Prefix:
        ids = input_ids.new_zeros((1, capacity))
        ids[:, : input_ids.shape[1]] = input_ids
        return cls(ids, input_ids.shape[1], padding)

    @property
    def view(self) -> Tensor:
        if self.unwritten:
            written = self.length - len(self.unwritten)
            self.ids[0, written : self.length] = torch.tensor(self.unwritten, device=self.ids.device)
            self.unwritten = []
        return self.ids[:, : self.length]

    @property
    def position(self) -> int:
        """Of the next token, padding not counted."""
        return self.length - self.padding

    def append(self, token: int) -> None:
        self.unwritten.append(token)
        self.length += 1


@dataclass
class Outputs:
    """What the user asked to see of every emitted token."""

    keep_scores: bool = False
    keep_logits: bool = False
    keep_logprobs: bool = False
    alternatives: int = 0  # beside each token's own log-probability, those of the best so many
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[list[tuple[int, float]]] = field(default_factory=list)  # tokens and their log-probabilities

    def record(self, raw: Tensor, processed: Tensor, token: int) -> None:
        if self.keep_scores:
            self.scores.append(processed.clone())
        if self.keep_logits:
            self.logits.append(raw.clone())
        if self.keep_logprobs:
            chances = torch.log_softmax(raw[0], dim=-1)
            self.logprobs.append(float(chances[token]))
            best = chances.topk(min(self.alternatives, len(chances)))
            self.best.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

    @property
    def wanted(self) -> bool:
        return self.keep_scores or self.keep_logits or self.keep_logprobs

    @property
    def scores_so_far(self) -> tuple[Tensor, ...] | None:
        """What `generate` shows to stop conditions."""
        return tuple(self.scores) if self.keep_scores else None


class Chooser(Protocol):
    """Walks a verified tree token by token."""

    outputs: Outputs

    def tokens(self, tree: TokenTree, scored: PassResult, prefix: Prefix) -> Iterator[int]:
        """The target's token at the root, then at the child of that token, for as long as there is one."""

    def reads_logits(self, scored: PassResult) -> bool:
        """Whether tokens are chosen from the logits of this pass, and not from what came along with them."""


@dataclass
class KeyedChooser:
    """Greedy, or sampled with noise keyed by position."""

    processors: LogitsProcessorList
    noise: KeyedNoise | None  # None: greedy
    outputs: Outputs = field(default_factory=Outputs)

    def tokens(self, tree: TokenTree, scored: PassResult, prefix: Prefix) -> Iterator[int]:
        node: int | None = ROOT
        while node is not None:
            if self.is_plain:
                token = scored.best(node)
            elif scored.sampled is not None:
                token = scored.sampled[node]
            else:
                token = self.choose(scored.logits[node], prefix)
            yield token
            node = tree.child(node, token)

    def reads_logits(self, scored: PassResult) -> bool:
        return not self.is_plain and not scored.is_sampled

    @property
    def is_plain(self) -> bool:
        """Greedy, and nothing else."""
        return self.noise is None and not self.processors and not self.outputs.wanted

    @cached_property
    def sampling(self) -> Sampling | None:
        """What a device or a compiled function needs to choose by itself, if it can."""
        warping = None if self.noise is None or self.outputs.wanted else Warping.of(self.processors)
        if self.noise is None or warping is None:
            return None
        return Sampling(self.noise.stream_key(CHOICE), warping)

    def choose(self, logits: Tensor, prefix: Prefix) -> int:
        if self.sampling is not None and logits.device.type == "cpu" and not logits.dtype.itemsize > 4:
            return sample_one(logits.float(), self.sampling.key, prefix.position, **vars(self.sampling.warping))
        raw, processed = process(self.processors, logits, prefix)
        scores = processed[0]
        if self.noise is not None:
            scores = scores.double() + self.noise.gumbel(prefix.position, len(scores), scores.device, CHOICE)
        token = int(scores.argmax())
        self.outputs.record(raw, processed, token)
        return token

    def perturb(self, temperature: float) -> DraftNoise | None:
        """What a draft adds to its logits to guess a sampled token as well as a greedy one."""
        return None if self.noise is None else DraftNoise(self.noise, temperature, CHOICE)


@dataclass
class RejectionChooser:
    """Leviathan et al. (2023), Chen et al. (2023): accept a drafted token with chance p/q, else sample the rest.

    Only for chains, and only for comparison: the text depends on what was drafted.
    """

    processors: LogitsProcessorList
    noise: KeyedNoise
    temperature: float
    drafted: dict[int, Tensor]  # graph node -> the draft's logits there
    outputs: Outputs = field(default_factory=Outputs)

    sampling = None  # what a device needs to choose by itself: it cannot

    def reads_logits(self, scored: PassResult) -> bool:
        return True

    def tokens(self, tree: TokenTree, scored: PassResult, prefix: Prefix) -> Iterator[int]:
        for node in range(len(tree)):
            raw, processed = process(self.processors, scored.logits[node], prefix)
            p = torch.softmax(processed[0].double(), dim=-1)
            drafted = int(tree.tokens[node + 1]) if node + 1 < len(tree) else None
            token = self.choose(p, int(tree.nodes[node]), drafted, prefix.position)
            self.outputs.record(raw, processed, token)
            yield token
            if token != drafted:
                return

    def choose(self, p: Tensor, node: int, drafted: int | None, position: int) -> int:
        rest = p
        if drafted is not None:
            q = self.draft_probabilities(node, drafted, p)
            chance = self.noise.uniform(position, 1, p.device, ACCEPTANCE)
            if bool(chance * q[drafted] < p[drafted]):
                return drafted
            rest = (p - q).clamp_min(0.0)
            rest = rest if float(rest.sum()) > 0 else p
        return int((rest.log() + self.noise.gumbel(position, len(rest), rest.device, RESIDUAL)).argmax())

    def draft_probabilities(self, node: int, drafted: int, p: Tensor) -> Tensor:
        """With what chances the token was drafted; one that was copied from the text could be no other."""
        if node not in self.drafted:
            return torch.zeros_like(p).index_fill_(0, torch.tensor(drafted, device=p.device), 1.0)
        return torch.softmax(self.drafted[node].to(p.device, torch.float64) / self.temperature, dim=-1)

    def perturb(self, temperature: float) -> DraftNoise:
        return DraftNoise(self.noise, temperature, DRAFT)


@dataclass
class DraftNoise:
    """Adds the noise of each node's next position, at the temperature of the choice."""

    noise: KeyedNoise
    temperature: float
    stream: int

    def __call__(self, logits: Tensor, positions: Ints, tokens: Tensor | None = None, size: int = 0) -> Tensor:
        """Of all tokens, or of some of so many."""
        rows = [self.noise.gumbel(int(at), size or logits.shape[1], logits.device, self.stream) for at in positions]
        noise = torch.stack(rows if tokens is None else [row[tokens] for row in rows])
        return (logits.double() + self.temperature * noise).float()

    @property
    def sampling(self) -> Sampling:
        """What a device needs to add it by itself."""
        return Sampling(self.noise.stream_key(self.stream), Warping(self.temperature))


def process(processors: LogitsProcessorList, logits: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
    """Scores of one node, raw and as the processors leave them on the true prefix. # [1, vocabulary] each"""
    raw = logits[None].to(device=prefix.ids.device, dtype=torch.float32)
    return raw, processors(prefix.view, raw.clone()) if processors else raw  # type: ignore[arg-type]


@dataclass
class Walk:
    """What the target chose in one step."""

    path: list[int]  # accepted tree nodes, the root left out
    tokens: list[int]
    finish_reason: FinishReason | None  # None: the text goes on

    @property
    def visited(self) -> list[int]:
        """The nodes at which a token was chosen."""
        return [ROOT, *self.path][: len(self.tokens)]


def walk(tree: TokenTree, scored: PassResult, chooser: Chooser, prefix: Prefix, criteria: StoppingCriteriaList) -> Walk:
    """Follows the target's choices from the root; the first one that is no child is the bonus token."""
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    for token in chooser.tokens(tree, scored, prefix):
        tokens.append(token)
        prefix.append(token)
        child = tree.child(node, token)
        if child is not None:
            path.append(child)
            node = child
        if reason := finish_reason(criteria, prefix, token, chooser.outputs.scores_so_far):
            return Walk(path, tokens, reason)
    return Walk(path, tokens, None)


def finish_reason(criteria: StoppingCriteriaList, prefix: Prefix, token: int, scores: Any) -> FinishReason | None:
    """Asks every stop condition once, as `generate` does; "length" if only length or time ran out."""
    held = [criterion for criterion in criteria if holds(criterion, prefix, token, scores)]
    if not held:
        return None
    return "length" if all(isinstance(one, MaxLengthCriteria | MaxTimeCriteria) for one in held) else "stop"


def holds(criterion: Any, prefix: Prefix, token: int, scores: Any) -> bool:
    """The two that are always there are decided here: asking them costs a wait for the device."""
    if type(criterion) is MaxLengthCriteria:
        return prefix.length >= criterion.max_length
    if type(criterion) is EosTokenCriteria:
        return token in ends_of(criterion)
    return bool(torch.as_tensor(criterion(prefix.view, scores)).all())


_ends: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def ends_of(criterion: EosTokenCriteria) -> frozenset[int]:
    if criterion not in _ends:
        _ends[criterion] = frozenset(criterion.eos_token_id.tolist())
    return _ends[criterion]
