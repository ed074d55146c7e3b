"""Prompts that the target writes itself: which of its turns are kept, and what a killed run repeats of them."""

import random
from types import SimpleNamespace

import pytest
from distill_tools import byte_level_tokenizer
from tiny_models import one_line_of

from draftgraph.distillation import making, prompts
from draftgraph.distillation.answers import AnswerStore
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.prompts import OPENINGS, around_user_text, own_prompts, write_prompts
from draftgraph.distillation.recipe import Recipe
from draftgraph.errors import UsageError


@pytest.fixture
def tokenizer():
    return byte_level_tokenizer()


class FakeSampler:
    """Writes what `speak(row)` says for each row; the rows and settings that it was given are kept."""

    def __init__(self, tokenizer, speak):
        self.tokenizer, self.speak = tokenizer, speak
        self.begun, self.temperatures, self.row = [], [], 0

    def continue_texts(self, prompts, max_new_tokens, temperature, seed, *, report=None):
        self.begun += prompts
        self.temperatures += temperature
        turns = []
        for _ in prompts:
            self.row += 1
            turns.append(self.tokenizer(self.speak(self.row))["input_ids"][:max_new_tokens])
            if report:
                report(len(turns) / len(prompts))
        return turns


def test_the_opening_of_a_user_turn_is_the_template_up_to_the_users_text(tokenizer):
    opening, end = around_user_text(tokenizer)
    assert tokenizer.decode(opening) == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode([end]) == "<|im_end|>"


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}", "{{ raise_exception('no\nusers') }}"])
def test_a_target_that_cannot_write_prompts_is_told_of_the_alternative(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UsageError) as error:
        around_user_text(tokenizer)
    assert "--prompts FILE" in one_line_of(error)


def test_only_turns_that_ended_by_themselves_with_plain_text_are_kept(tokenizer):
    bad = ["", "<|im_end|>", "<|im_start|>assistant\nno<|im_end|>", "not finished", " \n<|im_end|>"]
    sampler = FakeSampler(tokenizer, lambda row: bad[row % 7] if row % 7 < 5 else f"{row} reasons?<|im_end|>")
    written = write_prompts(sampler.continue_texts, tokenizer, 60, seed=1)
    assert len(written.prompts) == 60 and {prompt.kind for prompt in written.prompts} == {"self"}
    assert all(prompt.text.endswith(" reasons?") for prompt in written.prompts)
    assert str(written) == "60 prompts written by the target"


def test_prompts_that_begin_alike_are_kept_once_and_a_target_that_repeats_itself_ends(tokenizer):
    begin = "The Same Forty Characters At The Beginning"
    sampler = FakeSampler(tokenizer, lambda row: f"{begin if row % 4 else begin.lower()} {row}<|im_end|>")
    written = write_prompts(sampler.continue_texts, tokenizer, 500, seed=1)
    assert 1 < len(written.prompts) <= 1 + len(OPENINGS)  # one without an opening, one for each
    assert written.dropped == {"began like another": written.turns - len(written.prompts)}


def test_half_of_the_turns_are_begun_with_opening_words(tokenizer):
    sampler = FakeSampler(tokenizer, lambda row: f"{row}<|im_end|>")
    write_prompts(sampler.continue_texts, tokenizer, 300, seed=1)
    opening, _ = around_user_text(tokenizer)
    begun = [tokenizer.decode(tokens[len(opening) :]) for tokens in sampler.begun]
    assert abs(sum(not words for words in begun) - len(begun) / 2) <= 1
    assert set(begun) <= {"", *OPENINGS} and len(set(begun)) > 50
    assert set(sampler.temperatures) == set(prompts.TEMPERATURES)


def test_self_written_prompts_depend_on_the_seed_and_report_progress(tokenizer):
    shares = []
    first, again = (
        write_prompts(sampler.continue_texts, tokenizer, 50, 4, report=shares.append)
        for sampler in (FakeSampler(tokenizer, lambda row: f"{row}<|im_end|>") for _ in range(2))
    )
    assert first == again and min(shares) > 0 and max(shares) <= 1


# What is said of turns that are no prompts


def test_too_few_prompts_to_learn_from_are_refused_with_the_reason(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(making, "own_prompts", lambda *_: write_prompts(silent.continue_texts, tokenizer, 4, 1))
    silent = FakeSampler(tokenizer, lambda row: "<|im_end|>")
    store, report = AnswerStore(tmp_path, "mark"), Reporter()
    with pytest.raises(UsageError, match=r"few prompts itself \(of 16 turns, 16 were empty\): give --prompts") as error:
        making.gather_prompts(Recipe(own_prompts=4), None, tokenizer, store, report)
    one_line_of(error)
    with pytest.raises(UsageError, match="two prompts or more"):
        making.gather_prompts(Recipe(own_prompts=0), None, tokenizer, store, report)
    assert "0 prompts written by the target, not 4: of 16 turns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("on and on", "16 did not end within 6 tokens"),
        ("<|im_end|>", "16 were empty"),
        ("a<|endoftext|>", "16 ended unlike a user's"),
        ("<|im_start|>a<|im_end|>", "16 held special tokens"),
    ],
)
def test_a_target_that_writes_no_prompt_is_said_why(tokenizer, said, reason):
    sampler = FakeSampler(tokenizer, lambda row: said)
    written = write_prompts(sampler.continue_texts, tokenizer, 4, seed=1, max_tokens=6)
    assert str(written) == f"0 prompts written by the target, not 4: of 16 turns, {reason}"


# Rounds


class SeededSampler:
    """What it says depends on the round's seed alone, and much of it was said before; stops after so many rounds."""

    stop_ids = frozenset({1})

    def __init__(self, tokenizer, rounds=1 << 30):
        self.tokenizer, self.rounds, self.asked = tokenizer, rounds, []

    def continue_texts(self, prompts, max_new_tokens, temperature, seed, *, report=None):
        if len(self.asked) == self.rounds:
            raise KeyboardInterrupt
        self.asked.append(len(prompts))
        draw = random.Random(seed)
        return [self.tokenizer(f"{draw.randrange(150)} {row}?<|im_end|>")["input_ids"] for row in range(len(prompts))]


@pytest.fixture
def write(tokenizer, tmp_path, monkeypatch):
    """The prompts of `own_prompts` with this sampler in place of a target's, rounds of 32 turns."""
    monkeypatch.setattr(prompts, "LARGEST_ROUND", 32)
    monkeypatch.setattr(prompts, "SAME", 3)
    target = SimpleNamespace(config=SimpleNamespace(), generation_config=None)
    monkeypatch.setattr(prompts, "stop_ids_of", lambda model: frozenset())
    monkeypatch.setattr(prompts, "context_window", lambda model: None)

    def call(sampler, count, store="answers", seed=3):
        monkeypatch.setattr(prompts, "Sampler", lambda *_: sampler)
        kept = AnswerStore(tmp_path / store, "mark")
        return own_prompts(count, seed, target, tokenizer, kept, Reporter(), None).prompts

    return call


def test_a_killed_run_repeats_one_round_and_writes_the_same_prompts(write, tokenizer):
    whole = SeededSampler(tokenizer)
    expected = write(whole, 120, "other store")
    assert len(whole.asked) > 4 and len(expected) == 120
    with pytest.raises(KeyboardInterrupt):
        write(SeededSampler(tokenizer, rounds=3), 120)
    rest = SeededSampler(tokenizer)
    assert write(rest, 120) == expected
    assert rest.asked == whole.asked[3:]
    nothing = SeededSampler(tokenizer, rounds=0)
    assert write(nothing, 120) == expected


def test_more_prompts_reuse_the_full_rounds_of_fewer(write, tokenizer):
    fewer, more, alone = (SeededSampler(tokenizer) for _ in range(3))
    first = write(fewer, 90)
    full = fewer.asked.count(32)
    both = write(more, 160)
    assert 2 <= full < len(fewer.asked) and both == write(alone, 160, "other store")
    assert more.asked == alone.asked[full:] and both[:40] == first[:40]


def test_no_two_prompts_of_different_rounds_are_alike(write, tokenizer):
    texts = [prompt.text for prompt in write(SeededSampler(tokenizer), 120)]
    begun_freely = [text[:3] for text in texts if text[0].isdigit()]
    assert len(set(texts)) == 120 and len(set(begun_freely)) == len(begun_freely) > 32


def test_another_seed_or_target_writes_anew(write, tokenizer):
    write(SeededSampler(tokenizer), 20)
    with pytest.raises(KeyboardInterrupt):
        write(SeededSampler(tokenizer, rounds=0), 20, seed=4)
