"""Stop conditions and processors see the accepted text only, once per token and in order; nothing follows a stop."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
from interop import LENGTH, MODES, PROMPT, decode, decoder, first_after, generate, letters, pair, plain_text, words
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from draftgraph import GraphConfig, GraphDecoder, UsageError
from draftgraph.cost import FlatCost
from draftgraph.stats import Step

START = PROMPT[0].tolist()
VOCAB = 24


@cache
def foreseeing(mode: str = "chain", verification: str = "keyed") -> GraphDecoder:
    """A decoder whose draft is its target: whole paths are accepted, so stops fall inside them."""
    config = GraphConfig(mode=mode, verification=verification, chain_length=6, theta_prob=0.0, cost=FlatCost(0.0))
    return GraphDecoder(pair()[0], pair()[0], config=config)


def true_prefixes(text: list[int], first: int) -> list[list[int]]:
    """The prompt with `first`, `first + 1`, ... new tokens."""
    return [START + text[:length] for length in range(first, first + len(text))]


class StopsAt(StoppingCriteria):
    """Stops at a length, and remembers what it was shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.calls: list[list[int]] = []
        self.scores: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        self.scores.append(scores)
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class EveryThirdCall(LogitsProcessor):
    """Forbids, at every third call, the token that was best: one call more or less changes all that follows."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        if len(self.calls) % 3 == 0:
            scores[:, scores.argmax(dim=-1)] = -torch.inf
        return scores


def observed(decoder: GraphDecoder, **arguments: Any) -> tuple[Any, list[Step]]:
    steps: list[Step] = []
    decoder.observer = steps.append
    try:
        return decoder.generate(PROMPT, **{"max_new_tokens": LENGTH, "do_sample": False} | arguments), steps
    finally:
        decoder.observer = None


def assert_stats_agree(output: Any, steps: list[Step]) -> None:
    stats, (tokens,) = output.stats, output.new_token_ids
    assert [token for step in steps for token in step.tokens] == tokens
    assert (stats.steps, stats.new_tokens, stats.prompt_tokens) == (len(steps), len(tokens), len(START))
    assert stats.accepted == sum(len(step.path) for step in steps)
    assert stats.mean_accepted_length == len(tokens) / len(steps)


@pytest.mark.parametrize("mode", MODES)
def test_any_of_several_eos_ids_ends_the_text(mode):
    text = plain_text()
    end = first_after(text, 6)
    unseen = next(token for token in range(VOCAB) if token not in text)
    for ids in ([unseen, text[end]], [text[end], unseen], [text[end], text[first_after(text, end + 1)]]):
        output = decode(mode, eos_token_id=ids)
        assert output.sequences.tolist() == generate(eos_token_id=ids).tolist()
        assert output.new_token_ids == [text[: end + 1]]
        assert output.finish_reasons == ["stop"]


@pytest.mark.parametrize("mode", ["chain", "tree", "graph", "auto"])
def test_an_eos_ends_the_tree_and_the_text(mode):
    text = plain_text()
    end = first_after(text, 2)
    output, steps = observed(foreseeing(mode), eos_token_id=text[end])
    last = steps[-1]
    assert last.stopped
    assert last.path, "the eos should be a node of the tree, not the bonus token"
    assert last.path[-1] not in last.tree.parents, "nothing follows an eos"
    assert output.new_token_ids == [text[: end + 1]]
    assert output.finish_reasons == ["stop"]
    assert_stats_agree(output, steps)


@pytest.mark.parametrize("mode", ["chain", "tree", "graph", "auto"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_max_new_tokens_is_met_exactly(mode, length):
    output, steps = observed(foreseeing(mode), max_new_tokens=length)
    assert output.new_token_ids == [plain_text()[:length]]
    assert output.finish_reasons == ["length"]
    assert_stats_agree(output, steps)


def test_an_eos_that_is_also_the_last_token_allowed_is_a_stop():
    end = first_after(plain_text(), 4)
    for mode in MODES:
        output = decode(mode, eos_token_id=plain_text()[end], max_new_tokens=end + 1)
        assert output.finish_reasons == ["stop"]


@pytest.mark.parametrize("mode", MODES)
def test_no_eos_comes_before_min_new_tokens(mode):
    eos = plain_text()[first_after(plain_text(), 3)]
    for least in (1, 6, 15):
        output = decode(mode, eos_token_id=eos, min_new_tokens=least)
        assert output.sequences.tolist() == generate(eos_token_id=eos, min_new_tokens=least).tolist()
        assert eos not in output.new_token_ids[0][:least]


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_the_text_also_across_token_borders(mode):
    text = "".join(letters().convert_ids_to_tokens(plain_text()))
    prompt = "".join(letters().convert_ids_to_tokens(START))
    for stop in (text[7], text[6:9], text[4:11], prompt[-1] + text[:2]):
        arguments = {"stop_strings": [stop, "never this"], "tokenizer": letters()}
        output = decode(mode, **arguments)
        assert output.sequences.tolist() == generate(**arguments).tolist()
        assert (prompt + letters().decode(output.new_token_ids[0])).endswith(stop)
        assert output.finish_reasons == ["stop"]


def test_stop_strings_may_begin_and_end_inside_tokens():
    inside = f"{plain_text()[6]} w{plain_text()[7]}"  # of "w3 w14", the text "3 w14"
    arguments = {"stop_strings": inside, "tokenizer": words()}
    for mode in MODES:
        output = decode(mode, **arguments)
        assert output.sequences.tolist() == generate(**arguments).tolist()
        assert len(output.new_token_ids[0]) < LENGTH


def test_stop_strings_need_a_tokenizer_and_leave_no_trace(monkeypatch):
    with pytest.raises(UsageError, match="stop_strings need the tokenizer"):
        decode("graph", stop_strings=["a"])
    config = pair()[0].generation_config
    monkeypatch.setattr(config, "stop_strings", ["w5"])
    with pytest.raises(UsageError, match="stop_strings need the tokenizer"):
        decode("graph")
    decode("graph", tokenizer=words())
    with pytest.raises(UsageError, match="max_length"):
        decode("graph", tokenizer=words(), max_new_tokens=None, max_length=1)
    assert config.stop_strings == ["w5"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 3, 4, 11])
def test_criteria_are_called_once_per_token_and_stop_inside_a_path(mode, length):
    text = plain_text()[:length]
    criterion = StopsAt(len(START) + length)
    output, steps = observed(foreseeing(mode), stopping_criteria=StoppingCriteriaList([criterion]))
    assert output.new_token_ids == [text]
    assert output.finish_reasons == ["stop"]
    assert criterion.calls == true_prefixes(text, 1)
    assert_stats_agree(output, steps)


def test_criteria_see_the_scores_that_generate_shows_them():
    asked = {"return_dict_in_generate": True, "output_scores": True}
    theirs, ours, blind = StopsAt(12), StopsAt(12), StopsAt(12)
    generate(stopping_criteria=StoppingCriteriaList([theirs]), **asked)
    foreseeing("graph").generate(PROMPT, stopping_criteria=StoppingCriteriaList([ours]), do_sample=False, **asked)
    assert [len(scores) for scores in ours.scores] == [1, 2, 3, 4, 5, 6, 7]
    torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=1e-4)
    decode("graph", stopping_criteria=StoppingCriteriaList([blind]))
    assert blind.scores == [None] * 7


def test_max_time_ends_the_text():
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return scores

    for mode in ("off", "graph", "auto"):
        output = decode(mode, max_time=0.12, logits_processor=LogitsProcessorList([Slow()]))
        (tokens,) = output.new_token_ids
        assert 1 <= len(tokens) <= 3
        assert tokens == plain_text()[: len(tokens)]
        assert output.finish_reasons == ["length"]


@pytest.mark.parametrize("mode", MODES)
def test_a_stateful_processor_is_called_once_per_token_on_the_true_text(mode):
    theirs, ours = EveryThirdCall(), EveryThirdCall()
    expected = generate(logits_processor=LogitsProcessorList([theirs]))[0].tolist()
    output = decode(mode, logits_processor=LogitsProcessorList([ours]))
    assert output.sequences[0].tolist() == expected != START + plain_text()
    assert ours.calls == theirs.calls == true_prefixes(output.new_token_ids[0], 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_stateful_processor_samples_the_same_text_in_every_mode(mode):
    expected, ours = EveryThirdCall(), EveryThirdCall()
    sampling = {"do_sample": True, "temperature": 0.8, "seed": 3}
    text = decode("off", logits_processor=LogitsProcessorList([expected]), **sampling).new_token_ids[0]
    arguments = {"logits_processor": LogitsProcessorList([ours]), "max_new_tokens": LENGTH}
    assert foreseeing(mode).generate(PROMPT, **arguments, **sampling).new_token_ids == [text]
    assert ours.calls == expected.calls == true_prefixes(text, 0)


def test_rejection_sampling_calls_processors_and_criteria_once_per_token():
    processor, criterion = EveryThirdCall(), StopsAt(len(START) + 15)
    output, steps = observed(
        foreseeing("chain", "rejection"),
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([criterion]),
        do_sample=True,
        seed=2,
    )
    (text,) = output.new_token_ids
    assert len(text) == 15 > len(steps)
    assert processor.calls == true_prefixes(text, 0)
    assert criterion.calls == true_prefixes(text, 1)
    assert_stats_agree(output, steps)


@pytest.mark.parametrize("mode", MODES)
def test_prefix_allowed_tokens_fn_constrains_as_in_generate(mode):
    calls: list[tuple[int, list[int]]] = []

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        calls.append((batch_id, ids.tolist()))
        return [(int(ids[-1]) * factor + 1) % VOCAB for factor in (1, 5, 7, 11)]

    expected = generate(prefix_allowed_tokens_fn=allowed)[0].tolist()
    assert expected != START + plain_text()
    theirs = calls.copy()
    calls.clear()
    assert decode(mode, prefix_allowed_tokens_fn=allowed).sequences[0].tolist() == expected
    assert calls == theirs


@pytest.mark.parametrize("mode", MODES)
def test_scores_and_logits_are_those_of_generate(mode):
    arguments = {"repetition_penalty": 1.3, "eos_token_id": plain_text()[first_after(plain_text(), 8)]}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, output = generate(**arguments), decode(mode, **arguments)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        theirs, ours = getattr(expected, name), getattr(output, name)
        assert isinstance(ours, tuple)
        assert len(ours) == len(theirs) == len(output.new_token_ids[0])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(torch.cat(output.scores), torch.cat(output.logits))


def test_scores_and_logits_are_kept_only_when_asked_for_as_generate_asks():
    assert decode("graph", output_scores=True).scores is None
    assert decode("graph", return_dict_in_generate=True).scores is None
    output = decode("graph", return_dict_in_generate=True, output_logits=True)
    assert output.scores is None
    assert len(output.logits) == LENGTH


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 1}], ids=str)
def test_logprobs_are_those_of_the_models_own_distribution(mode, sampling):
    output = decode(mode, logprobs=True, repetition_penalty=1.2, **sampling)
    with torch.no_grad():
        logits = pair()[0](output.sequences).logits[0, len(START) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(output.new_token_ids).T)[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs[0]), expected, atol=1e-4, rtol=1e-4)
    assert decode(mode, **sampling).logprobs is None


def test_a_decoder_is_ready_again_after_every_kind_of_stop():
    eos = plain_text()[first_after(plain_text(), 3)]
    for mode in MODES:
        for stop in ({"eos_token_id": eos}, {"max_new_tokens": 2}, {"stop_strings": "w7", "tokenizer": words()}):
            decoder(mode).generate(PROMPT.flip(1), do_sample=False, **stop)
            assert decode(mode).new_token_ids == [plain_text()]
