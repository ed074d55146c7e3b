"""From a job to the request that `generate` would make of it, with processors for what `generate` does not know."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from draftgraph import private
from draftgraph.batching.grammar import matcher_of, vocabulary_of
from draftgraph.batching.guide import GrammarGuide, GrammarMask
from draftgraph.batching.job import Job
from draftgraph.config import GraphConfig
from draftgraph.errors import UsageError
from draftgraph.generation import Request, prepare, stop_ids_of

CONFIG_FIELDS = ("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length")

RANGES = {
    "max_tokens": (0, 2**31),
    "min_tokens": (0, 2**31),
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


class CountPenalties(LogitsProcessor):
    """OpenAI's: what the answer has said before is less likely, once for being there and once for every time."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, counts = input_ids[0, self.prompt_length :].unique(return_counts=True)
        penalties = self.presence + self.frequency * counts.to(scores.dtype)
        return scores.index_add(1, tokens, -penalties[None])


class Bias(LogitsProcessor):
    """Added to the scores of some tokens."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.tokens, self.values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.tokens.to(scores.device), self.values.to(scores)[None])


class Restrictions(LogitsProcessor):
    """Makes tokens impossible: those that are not allowed, the last of a bad word, an end before `min_tokens`.

    It comes after a grammar: where nothing but an end is left, an answer ends before `min_tokens`.
    """

    def __init__(self, job: Job, ends: frozenset[int]) -> None:
        self.prompt_length, self.least = len(job.tokens), job.min_tokens
        self.ends = torch.tensor(sorted(ends), dtype=torch.long)
        self.allowed = None if job.allowed_token_ids is None else torch.tensor(sorted(set(job.allowed_token_ids)))
        self.words: dict[tuple[int, ...], list[int]] = {}  # their last tokens, by what comes before
        for *before, last in job.bad_words:
            self.words.setdefault(tuple(before), []).append(last)
        self.lengths = sorted(set(map(len, self.words)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length, device = input_ids.shape[1], scores.device
        found = scores
        if self.allowed is not None:
            allowed = self.allowed.to(device)
            found = torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
        if forbidden := self._forbidden(input_ids[0, self.prompt_length :]):
            found = found.index_fill(1, torch.tensor(forbidden, device=device), -torch.inf)
        if not is_possible(found):
            raise UsageError("allowed_token_ids and bad_words leave no token to go on with: allow more")
        if length - self.prompt_length >= self.least:
            return found
        held_back = found.index_fill(1, self.ends.to(device), -torch.inf)
        return held_back if is_possible(held_back) else found

    def _forbidden(self, answer: Tensor) -> list[int]:
        """The last tokens of the bad words whose other tokens are the last of the answer."""
        if not self.words:
            return []
        text = answer[-max(1, self.lengths[-1]) :].tolist()
        ends = [tuple(text[len(text) - length :]) for length in self.lengths if length <= len(text)]
        return [token for end in ends for token in self.words.get(end, ())]


def is_possible(scores: Tensor) -> bool:
    return bool((scores > -torch.inf).any())


def request_of(job: Job, target: Any, tokenizer: Any, vocabulary: int) -> Request:
    """Raises a UsageError where the job asks for what cannot be."""
    ids = check_tokens(job.tokens, vocabulary)
    check_numbers(job)
    check_tokens(tuple(job.logit_bias), vocabulary, "logit_bias")
    check_tokens(job.allowed_token_ids or (), vocabulary, "allowed_token_ids")
    processors = LogitsProcessorList()
    if job.presence_penalty or job.frequency_penalty:
        processors.append(CountPenalties(len(ids), job.presence_penalty, job.frequency_penalty))
    if job.logit_bias:
        processors.append(Bias(job.logit_bias))
    ends = ends_of(job, target, tokenizer)
    if job.grammar is not None:
        words = vocabulary_of(tokenizer, vocabulary)
        stops = ends if not job.ignore_eos else frozenset(job.stop_token_ids)
        processors.append(GrammarMask(matcher_of(job.grammar, words), words.eos_tokens, len(ids), stops, ends))
    if job.min_tokens or job.bad_words or job.allowed_token_ids is not None:
        processors.append(Restrictions(job, ends | stop_ids_of(target)))
    given: dict[str, Any] = {"max_new_tokens": max(1, job.max_tokens), "do_sample": job.temperature > 0}
    if job.temperature > 0:
        given |= {"temperature": job.temperature, "top_k": job.top_k, "top_p": job.top_p}
        given |= {"min_p": job.min_p} if job.min_p else {}
    given |= {"repetition_penalty": job.repetition_penalty, "logits_processor": processors}
    if job.stop_token_ids or job.grammar is not None:
        given["eos_token_id"] = sorted(ends)
    request = prepare(target, torch.tensor([ids], device=target.device), tokenizer, **given)
    return request if ends or not job.ignore_eos else endless(request)


def ends_of(job: Job, target: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end the answer: with a grammar also if `ignore_eos`, where nothing else is allowed any more."""
    given = frozenset(job.stop_token_ids)
    if job.grammar is None:
        return given if job.ignore_eos else given | stop_ids_of(target)
    end = getattr(tokenizer, "eos_token_id", None)
    return given | stop_ids_of(target) or frozenset([] if end is None else [end])


def guide_of(job: Job, target: Any, tokenizer: Any, vocabulary: int) -> GrammarGuide | None:
    """For the drafts of a job."""
    if job.grammar is None:
        return None
    words = vocabulary_of(tokenizer, vocabulary)
    ends = ends_of(job, target, tokenizer)
    return GrammarGuide(matcher_of(job.grammar, words), words.eos_token, len(job.tokens), ends)


def endless(request: Request) -> Request:
    """No token ends it."""
    criteria = StoppingCriteriaList(one for one in request.criteria if not isinstance(one, EosTokenCriteria))
    return replace(request, criteria=criteria, config=private.without_eos(request.config))


def config_of(job: Job, default: GraphConfig) -> GraphConfig:
    """What the server was started with, unless the job says otherwise."""
    if not job.config:
        return default
    if unknown := job.config.keys() - set(CONFIG_FIELDS):
        raise UsageError(f"{sorted(unknown)[0]} is not among {', '.join(CONFIG_FIELDS)}")
    try:
        return GraphConfig(**{"mode": default.mode, "cost": default.cost, "exact": default.exact} | job.config)
    except TypeError as error:
        raise UsageError(f"not a configuration: {json.dumps(job.config)[:200]}") from error


def check_numbers(job: Job) -> None:
    """What `generate` would pass over in silence."""
    for name, (low, high) in RANGES.items():
        if not low <= getattr(job, name) <= high:
            raise UsageError(f"{name} must be between {low:g} and {high:g}, not {getattr(job, name)}")
    if job.seed is not None and not 0 <= job.seed < 2**63:
        raise UsageError(f"seed must be between 0 and 2^63 - 1, not {job.seed}")


def check_tokens(tokens: tuple[int, ...], vocabulary: int, what: str = "the prompt") -> list[int]:
    if not tokens and what == "the prompt":
        raise UsageError("the prompt is empty: give at least one token")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise UsageError(f"{what} has token {token}, which is not in the vocabulary of {vocabulary}")
    return list(tokens)
