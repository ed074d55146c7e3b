"""Text as it comes, many rows at once, the way in through `generate`; and the user's modules as they were."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import perturbed, target_of
from interop import LENGTH, MODES, PROMPT, decode, decoder, first_after, generate, letters, pair, pieces_of, plain_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from draftgraph import DraftGraphError, GraphConfig, Pair, UsageError
from draftgraph.engine import selfcheck
from draftgraph.engine.paged import PagedEngine
from draftgraph.text import HALF_A_CHARACTER, TextStream

START = PROMPT[0].tolist()


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


class Dictates(LogitsProcessor):
    """Makes the target say this."""

    def __init__(self, ids: list[int], prompt_length: int) -> None:
        self.ids, self.prompt_length = ids, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids.shape[1] - self.prompt_length
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([self.ids[said]]), 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_streamer_gets_what_generate_gives_it(mode):
    theirs, ours = Recorder(), Recorder()
    eos = plain_text()[first_after(plain_text(), 9)]
    generate(streamer=theirs, eos_token_id=eos)
    decode(mode, streamer=ours, eos_token_id=eos)
    assert ours.events == theirs.events
    assert ours.events[0] == [START]
    assert ours.events[-2:] == [[eos], "end"]


def test_streamers_of_transformers_work(capsys):
    generate(streamer=TextStreamer(letters()))
    expected = capsys.readouterr().out
    decode("graph", streamer=TextStreamer(letters()))
    assert capsys.readouterr().out == expected != ""
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=lambda: decode("auto", streamer=streamer))
    thread.start()
    assert "".join(streamer) == letters().decode(plain_text())
    thread.join()


@pytest.mark.parametrize(
    "several", [{"input_ids": PROMPT.repeat(2, 1)}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_a_streamer_of_several_texts_at_once_is_refused(several):
    with pytest.raises(UsageError, match="streamer"):
        decode("graph", streamer=Recorder(), **several)


CHARACTERS = "a漢😀é "
SCRIPT = "é漢漢a 😀😀 é漢漢a 😀😀 漢"


def speaking(mode: str = "auto") -> Pair:
    """A pair whose tokens are single bytes of these characters."""
    return Pair(*pair(), pieces_of(CHARACTERS), GraphConfig(mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_a_stream_never_hold_half_a_character(mode):
    speaker = speaking(mode)
    prompt, ids = speaker.tokenizer("a漢a")["input_ids"], speaker.tokenizer(SCRIPT)["input_ids"]
    assert len(ids) == len(SCRIPT.encode()) > 2 * len(SCRIPT)
    arguments = {"max_new_tokens": len(ids), "logits_processor": LogitsProcessorList([Dictates(ids, len(prompt))])}
    pieces = list(speaker.stream("a漢a", **arguments))
    assert len(pieces) > 4
    assert "".join(pieces) == SCRIPT == speaker.generate("a漢a", **arguments).text
    assert not any(HALF_A_CHARACTER in piece or not piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_text_cut_inside_a_character_streams_what_it_returns(cut):
    speaker = speaking()
    ids = speaker.tokenizer("a😀")["input_ids"]
    arguments = {"max_new_tokens": 1 + cut, "logits_processor": LogitsProcessorList([Dictates(ids, 1)])}
    pieces = list(speaker.stream("a", **arguments))
    assert "".join(pieces) == speaker.generate("a", **arguments).text
    assert pieces[0] == "a"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
def test_pieces_join_to_the_text_whatever_the_bytes(sampling):
    for mode in ("off", "graph", "auto"):
        for prompt in ("a", "é a😀"):
            text = speaking(mode).generate(prompt, max_new_tokens=30, **sampling).text
            assert "".join(speaking(mode).stream(prompt, max_new_tokens=30, **sampling)) == text


def test_a_space_behind_a_special_token_is_not_lost():
    vocabulary = {"<pause>": 0, "▁one": 1, "▁two": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pause>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pause>")
    stream = TextStream(fast)
    pieces = [stream.push([token]) for token in (1, 0, 2, 0, 0, 1)] + [stream.push([], last=True)]
    assert "".join(pieces) == "one two one" == fast.decode([1, 0, 2, 0, 0, 1], skip_special_tokens=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_may_be_left_early_and_the_next_text_is_right(mode):
    speaker = Pair(*pair(), letters(), GraphConfig(mode=mode))
    expected = letters().decode(plain_text(), skip_special_tokens=True)
    prompt = letters().decode(START)
    stream = speaker.stream("bad", max_new_tokens=40)
    next(stream)
    stream.close()
    assert speaker.generate(prompt, max_new_tokens=LENGTH).text == expected
    left = speaker.stream("bad", max_new_tokens=40)
    next(left)
    assert "".join(speaker.stream(prompt, max_new_tokens=LENGTH)) == expected
    with pytest.raises(DraftGraphError, match="another text was started"):
        list(left)


def test_a_text_whose_step_was_interrupted_does_not_go_on(monkeypatch):
    """As in a notebook: its keys and values are gone. The next text is right."""
    speaker, prompt = Pair(*pair(), letters(), GraphConfig(mode="graph")), letters().decode(START)
    decoding = speaker.start(prompt, max_new_tokens=LENGTH)
    decoding.step()
    with monkeypatch.context() as patched:
        patched.setattr(speaker.decoder.engines.target, "run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decoding.step()
    with pytest.raises(DraftGraphError, match="interrupted: start it again"):
        decoding.step()
    expected = letters().decode(plain_text(), skip_special_tokens=True)
    assert speaker.generate(prompt, max_new_tokens=LENGTH).text == expected


def test_a_list_of_prompts_gives_each_what_it_gets_alone():
    prompts = ["a", "é漢", "😀 a漢a"]
    for sampling in ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 8}):
        alone = [speaking("off").generate(prompt, max_new_tokens=20, **sampling).token_ids for prompt in prompts]
        together = speaking("auto").generate(prompts, max_new_tokens=20, **sampling)
        assert [output.token_ids for output in together] == alone


def test_a_list_of_prompts_in_recorded_passes(monkeypatch):
    prompts, given = ["a", "é漢", "😀 a漢a"], {"max_new_tokens": 20, "temperature": 0.9, "seed": 8}
    alone = [speaking("off").generate(prompt, **given).token_ids for prompt in prompts]
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    speaker, recorded = speaking("auto"), []
    record = PagedEngine._record
    monkeypatch.setattr(PagedEngine, "_record", lambda self, *told: recorded.append(told) or record(self, *told))
    engines = speaker.decoder.engines.all
    assert [type(engine) for engine in engines] == [PagedEngine] * len(engines)
    assert [output.token_ids for output in speaker.generate(prompts, **given)] == alone
    used, count = [engine.used for engine in engines], len(recorded)
    assert [output.token_ids for output in speaker.generate(prompts, **given)] == alone
    assert speaker.decoder.engines.all == engines and len(recorded) == count > 0, "nothing is recorded again"
    with pytest.raises(ValueError, match="broken on purpose"):
        speaker.generate(prompts, **given, logits_processor=[broken])
    assert [engine.used for engine in engines] == used, "it was left in the middle"
    assert [output.token_ids for output in speaker.generate(prompts, **given)] == alone
    assert [output.token_ids for output in speaker.generate(prompts[:1], **given)] == alone[:1]
    longer = speaker.generate(prompts, **given | {"max_new_tokens": 300})
    assert [output.token_ids[:20] for output in longer] == alone
    assert [engine.used for engine in engines] == used


@pytest.mark.parametrize("engine", ["exact", "static"])
def test_a_list_of_prompts_does_not_check_the_models_again(monkeypatch, engine):
    if engine == "static":
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    target = target_of("gpt2", seed=8)
    checks, difference = [], selfcheck.tree_difference
    monkeypatch.setattr(selfcheck, "tree_difference", lambda *told: checks.append(told) or difference(*told))
    speaker = Pair(target, perturbed(target), letters())
    assert speaker.decoder is speaker.decoder
    first = len(checks)
    assert first > 0
    for _ in range(2):
        assert len(speaker.generate(["bad", "a cab", "dad"], max_new_tokens=4)) == 3
    assert len(checks) == first


def broken(ids, scores):
    raise ValueError("broken on purpose")


ROWS = [[3, 7, 1, 9, 4], [12, 5], [8, 8, 2, 6]]
PAD = 23


def padded(rows: list[list[int]] = ROWS, width: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 6}], ids=str)
def test_rows_of_a_padded_batch_get_what_they_get_alone(mode, sampling):
    together = decode(mode, **padded(), pad_token_id=PAD, **sampling)
    alone = [decode("off", torch.tensor([row]), **sampling).new_token_ids[0] for row in ROWS]
    assert together.new_token_ids == alone
    assert together.sequences[:, :6].tolist() == padded()["input_ids"].tolist()
    if not sampling:
        assert together.sequences.tolist() == generate(**padded(), pad_token_id=PAD).tolist()


def test_padding_and_shape_are_those_of_generate():
    ends = [decode("off", torch.tensor([row])).new_token_ids[0] for row in ROWS]
    arguments = {"eos_token_id": [ends[0][2], ends[2][5]], "pad_token_id": PAD}
    expected = generate(**padded(), **arguments)
    assert (expected == PAD).sum() > (padded()["input_ids"] == PAD).sum(), "a row should end early"
    for mode in MODES:
        output = decode(mode, **padded(), **arguments)
        assert output.sequences.dtype == expected.dtype
        assert output.sequences.tolist() == expected.tolist()
        assert output.stats.new_tokens == sum(map(len, output.new_token_ids))


@pytest.mark.parametrize("place", ["keyword", "given", "the model's"])
def test_padding_is_inferred_from_the_pad_token_as_generate_does(place, monkeypatch):
    arguments: dict[str, Any] = {"pad_token_id": PAD}
    if place != "keyword":
        config = copy.deepcopy(pair()[0].generation_config)
        config.update(pad_token_id=PAD, max_new_tokens=LENGTH, do_sample=False)
        monkeypatch.setattr(pair()[0], "generation_config", config)
        arguments = {}
    if place == "given":
        arguments = {"generation_config": copy.deepcopy(config)}
        config.pad_token_id = 8  # must not be looked at: the given configuration has one
    ids = padded()["input_ids"]
    common = {} if place != "keyword" else {"max_new_tokens": LENGTH, "do_sample": False}
    expected = pair()[0].generate(ids, **arguments, **common).tolist()
    for mode in ("off", "graph"):
        assert decoder(mode).generate(ids, **arguments, **common).sequences.tolist() == expected
    alone = [decode("off", torch.tensor([row]), attention_mask=torch.ones(1, len(row))) for row in ROWS]
    assert [row[6:] for row in expected] == [output.new_token_ids[0] for output in alone]


def test_a_pad_token_that_is_also_an_eos_hides_nothing():
    ids = torch.tensor([[PAD, *START]])
    arguments = {"pad_token_id": PAD, "eos_token_id": PAD}
    assert (
        decode("graph", ids, **arguments).sequences.tolist()
        == pair()[0].generate(ids, max_new_tokens=LENGTH, do_sample=False, **arguments).tolist()
    )


def test_max_length_counts_the_padding_as_in_generate():
    arguments = {"max_new_tokens": None, "max_length": 14, "pad_token_id": PAD}
    assert decode("graph", **padded(), **arguments).sequences.tolist() == generate(**padded(), **arguments).tolist()


class Alternates(LogitsProcessor):
    """Forbids the best token at every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.scatter(1, scores.argmax(dim=-1, keepdim=True), -torch.inf) if self.calls % 2 else scores


def test_a_stateful_processor_does_not_carry_its_state_from_row_to_row():
    length = {"max_new_tokens": 9}  # odd, so that a state carried on would be the other one
    alone = [
        decode("off", torch.tensor([row]), logits_processor=LogitsProcessorList([Alternates()]), **length)
        for row in ROWS
    ]
    together = decode("graph", **padded(), logits_processor=LogitsProcessorList([Alternates()]), **length)
    assert together.new_token_ids == [output.new_token_ids[0] for output in alone]


def test_prefix_allowed_tokens_fn_is_told_which_row_it_is():
    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return [batch_id, batch_id + 7]

    expected = generate(**padded(), pad_token_id=PAD, prefix_allowed_tokens_fn=allowed).tolist()
    output = decode("graph", **padded(), pad_token_id=PAD, prefix_allowed_tokens_fn=allowed)
    assert output.sequences.tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"input_ids": [[1, 2], [3]]}, "one length"),
        ({"input_ids": [[]]}, "empty"),
        ({"input_ids": torch.rand(1, 4)}, "whole numbers"),
        ({"input_ids": torch.ones(1, 2, 3, dtype=torch.long)}, "shape"),
        ({"input_ids": PROMPT, "attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"input_ids": PROMPT, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padded on the right"),
        ({"input_ids": torch.tensor([[4, PAD], [4, 4]]), "pad_token_id": PAD}, "padded on the right"),
        ({"input_ids": [[3, 99]]}, "99"),
        ({"input_ids": [[-1, 3]]}, "-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_that_cannot_be_are_refused_in_one_line(arguments, says):
    with pytest.raises(UsageError, match=says) as refusal:
        decode("graph", **arguments)
    assert "\n" not in str(refusal.value)


def test_lists_and_single_rows_of_token_ids_are_prompts():
    for ids in (START, [START], torch.tensor(START), PROMPT.int()):
        output = decode("graph", ids)
        assert output.new_token_ids == [plain_text()]
        assert output.sequences.tolist() == [START + plain_text()]


@pytest.mark.parametrize("mode", MODES)
def test_num_return_sequences_differ_from_each_other_and_not_from_mode_to_mode(mode):
    arguments = {"do_sample": True, "num_return_sequences": 3, "seed": 2, "pad_token_id": PAD, "max_new_tokens": 12}
    expected = decode("off", **padded(), **arguments)
    output = decode(mode, **padded(), **arguments)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.sequences.shape == (9, 18)
    for first in (0, 3, 6):
        assert len({tuple(row) for row in output.new_token_ids[first : first + 3]}) == 3
