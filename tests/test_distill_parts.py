"""The parts of a distillation: losses, batches, scores, stored answers and the checkpoint."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, target_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import one_line_of
from torch.nn.functional import log_softmax

from draftgraph import DraftGraphError, UsageError
from draftgraph.distillation import answers as answering
from draftgraph.distillation.answers import (
    AnswerStore,
    Text,
    batch_of,
    digest_of,
    epoch_of,
    frequent_tokens,
    learnt_positions,
    mark_of_weights,
    split_held_out,
)
from draftgraph.distillation.recipe import LOSSES, Recipe, loss_terms
from draftgraph.distillation.training import (
    Checkpoint,
    Training,
    distance_and_slope,
    distillation_loss,
    hits_of,
    passes,
    score,
    uninterrupted,
)
from draftgraph.models.draft import cut_student, layer_stack, lend_output_rows, spread

# Losses


def by_autograd(student: torch.Tensor, target: torch.Tensor, terms: dict[str, float]) -> Any:
    log_q, log_p = log_softmax(student, dim=-1), log_softmax(target, dim=-1)
    q, p = log_q.exp(), log_p.exp()
    values = {
        "kl": (p * (log_p - log_q)).sum(dim=-1),
        "reverse": (q * (log_q - log_p)).sum(dim=-1),
        "tv": (p - q).abs().sum(dim=-1) / 2,
        "top": -log_q.gather(1, target.argmax(dim=-1, keepdim=True))[:, 0],
    }
    return sum(weight * values[name].sum() for name, weight in terms.items())


def logits_of(seed: int, rows: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(rows, 11, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("loss", [*LOSSES, "kl+0.5*tv+0.2*top+2*reverse"])
def test_losses_and_their_slopes_are_those_of_autograd(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    student, target = logits_of(0)
    terms = loss_terms(loss)
    expected = student.clone().requires_grad_()
    value = by_autograd(expected, target, terms)
    value.backward()
    _, slope = distance_and_slope(log_softmax(student, dim=-1), log_softmax(target, dim=-1), terms)
    torch.testing.assert_close(slope, expected.grad, rtol=1e-10, atol=1e-12)

    monkeypatch.setattr("draftgraph.distillation.training.LOSS_ROWS", 3)
    single = student.float().requires_grad_()
    found, agree = distillation_loss(single, target.float(), terms)
    (2 * found).backward()
    torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.grad.double(), 2 * expected.grad, rtol=1e-4, atol=1e-5)
    assert agree.tolist() == (student.argmax(dim=-1) == target.argmax(dim=-1)).tolist()


@pytest.mark.parametrize("loss", ["kl", "reverse", "tv"])
def test_equal_distributions_are_at_no_distance(loss: str) -> None:
    student, _ = logits_of(2)
    other = (student + 5).float().requires_grad_()  # the same probabilities
    distance, agree = distillation_loss(other, student.float(), {loss: 1.0})
    distance.backward()
    assert abs(distance.item()) < 1e-5 and agree.all()
    assert loss == "tv" or other.grad.abs().max() < 1e-5  # total variation has an edge there


def test_a_loss_is_a_sum_of_known_terms() -> None:
    assert loss_terms("kl + 0.5*tv") == {"kl": 1.0, "tv": 0.5} and loss_terms("kl+kl") == {"kl": 2.0}
    for wrong in ("", "mse", "kl+", "x*kl", "-1*kl", "0*kl", "nan*kl", "inf*tv"):
        with pytest.raises(UsageError):
            loss_terms(wrong)


# Texts


def text_of(*tokens: int, prompt: int = 1, temperature: float = 0.0) -> Text:
    return Text(np.array(tokens, dtype=np.int32), prompt, "test", temperature)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(16, 100), st.integers(0, 3))
def test_an_epoch_has_every_text_once_in_batches_that_fit(lengths: list[int], most: int, seed: int) -> None:
    batches = list(epoch_of(np.array(lengths), most, seed))
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert rows and (len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= most)
    assert batches == list(epoch_of(np.array(lengths), most, seed))


def test_every_token_of_an_answer_is_learnt_and_a_share_of_the_prompt() -> None:
    texts = [text_of(5, 6, 7, 8, prompt=2), text_of(9, 4)]
    tokens, before = batch_of(texts, [learnt_positions(text, 0.0) for text in texts])
    assert tokens.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert before.tolist() == [1, 2, 4], "positions in front of 7, 8 and 4"
    long = text_of(*range(2000), prompt=1001)
    assert learnt_positions(long, 1.0).tolist() == list(range(1999))
    positions = learnt_positions(long, 0.1)
    assert positions[-999:].tolist() == list(range(1000, 1999)) and 60 < len(positions) - 999 < 140
    assert positions.tolist() == learnt_positions(long, 0.1).tolist()


@pytest.mark.parametrize(("family", "plain"), [("llama", True), ("gemma2", False)])
def test_what_the_target_said_is_remembered_only_where_nothing_follows_its_head(
    family: str, plain: bool, tmp_path: Path
) -> None:
    target = target_of(family)
    student = cut_student(target, [0, 1])
    texts = [text_of(*np.random.default_rng(seed).integers(1, 24, 12 + seed).tolist(), prompt=4) for seed in range(6)]
    recipe = Recipe(layers=2, steps=6, batch_tokens=40, learning_rate=0.0)
    training = Training(target, student, texts, texts, recipe, Checkpoint(tmp_path / "c.safetensors", {}))
    asked: list[int] = []
    hook = target.register_forward_pre_hook(lambda *_: asked.append(training.step))
    training.run()
    hook.remove()
    batches = len(list(epoch_of(training.lengths, 40, 0)))
    assert batches < 6 and len(asked) == (batches if plain else 6)
    rows = [0, 1]
    batch = batch_of([texts[row] for row in rows], [training.lesson.positions[row] for row in rows])
    known = training.lesson.recalled(rows)
    with training.lesson.head, torch.no_grad():
        again = training.lesson.head.logits(target, *batch)
        assert (known is not None) == plain
        if known is not None:
            torch.testing.assert_close(training.lesson.head.of_states(known), again, rtol=1e-4, atol=1e-5)


def test_the_reduced_vocabulary_has_frequent_tokens_and_always_the_stops() -> None:
    texts = [text_of(1, 1, 1, 2, 2, 3, prompt=3), text_of(4, 4, 4, 2, 3, 3, prompt=3)]
    assert frequent_tokens(texts, 3, 10, frozenset({9})).tolist() == [2, 3, 9]
    assert frequent_tokens(texts, 4, 10, frozenset({9})).tolist() == [1, 2, 3, 9], "then those of prompts"
    assert frequent_tokens(texts, 1, 10, frozenset({8, 9})).tolist() == [8, 9]
    assert frequent_tokens(texts, 3, 10, frozenset()).tolist() == [1, 2, 3]
    assert all(frequent_tokens(texts, size, 10, frozenset()) is None for size in (0, 10, 11))


def test_no_answer_to_a_held_out_prompt_is_learnt_from() -> None:
    texts = [text_of(row, 7, prompt=1, temperature=heat) for row in range(40) for heat in (1.0, 0.0)]
    learnt, held_out = split_held_out(texts)
    assert len(held_out) == 4 and all(text.temperature == 0 for text in held_out) and len(learnt) == 72
    assert not {text.tokens[0] for text in learnt} & {text.tokens[0] for text in held_out}
    with pytest.raises(UsageError, match="give more prompts"):
        split_held_out(texts[:2])
    assert digest_of(texts) != digest_of(texts[1:]) != digest_of([text_of(1, 7, prompt=2), *texts[2:]])


# Scores


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_passes_are_those_of_a_chain_that_is_checked_token_by_token(hits: list[bool], chain: int) -> None:
    count = at = 0
    while at < len(hits):
        drafted = 0
        while drafted < chain and at + drafted < len(hits) and hits[at + drafted]:
            drafted += 1
        at += drafted + 1
        count += 1
    table = np.broadcast_to(np.array(hits, dtype=bool), (chain, len(hits)))
    assert passes(table) == count


def test_hits_are_the_students_best_tokens_over_the_full_vocabulary() -> None:
    target = target_of("llama")
    student = cut_student(target, [0, 1])
    lend_output_rows(student, target, torch.arange(0, VOCAB, 2))
    random = np.random.default_rng(0)
    texts = [Text(random.integers(0, VOCAB, 6 + 3 * row).astype(np.int32), 2 + row) for row in range(5)]
    for text, hits in zip(texts, hits_of(student, texts, 40), strict=True):
        with torch.no_grad():
            said = 2 * student(torch.tensor(text.tokens[None].astype(np.int64))).logits[0].argmax(dim=-1)
        assert hits.tolist() == (said[text.prompt_length - 1 : -1].numpy() == text.answer).tolist()
    whole = score(cut_student(target, [0, 1, 2]), texts)
    assert score(student, texts).texts == 5 and 0 <= whole.agreement <= 1


# Answers


class Echo:
    """In place of a sampler: answers with the prompt, backwards; fails after so many calls."""

    stop_ids = frozenset({0})

    def __init__(self, calls: int = 1 << 30) -> None:
        self.calls, self.asked = calls, 0

    def continue_texts(
        self, prompts: list[list[int]], most: int, heat: list[float], seed: int, *, report: Any = None
    ) -> list[list[int]]:
        if self.calls == 0:
            raise DraftGraphError("stopped here: on purpose")
        self.calls -= 1
        self.asked += len(prompts)
        if report is not None:
            report(0.5)
        return [prompt[::-1][:most] for prompt in prompts]


def test_answers_before_a_failure_are_kept_and_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "SHARD_ROWS", 4)
    questions = [text_of(*range(1, 3 + row % 5), prompt=2 + row % 5) for row in range(10)]
    store = AnswerStore(tmp_path, "mark")
    with pytest.raises(DraftGraphError, match="on purpose"):
        store.answer(Echo(2), questions, 3, 0)  # type: ignore[arg-type]
    rest = Echo()
    told: list[Any] = []
    texts = store.answer(rest, questions, 3, 0, lambda *moment: told.append(moment[:2]))  # type: ignore[arg-type]
    assert rest.asked == 2 and len(texts) == 10
    assert told == [(4, 10), (8, 10), (9, 10), (10, 10)], "a shard is told of before it is whole"
    assert all(text.answer.tolist() == text.tokens[: text.prompt_length][::-1][:3].tolist() for text in texts)
    nothing = Echo(0)
    assert digest_of(store.answer(nothing, questions, 3, 0)) == digest_of(texts)  # type: ignore[arg-type]
    for change in ({"seed": 1}, {"max_new_tokens": 2}):
        with pytest.raises(DraftGraphError, match="on purpose"):
            store.answer(nothing, questions, **{"max_new_tokens": 3, "seed": 0} | change)  # type: ignore[arg-type]


def test_a_damaged_file_of_answers_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, questions = AnswerStore(tmp_path, "mark"), [text_of(1, 2, 3, prompt=3)] * 2
    texts = store.answer(Echo(), questions, 3, 0)  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert digest_of(store.answer(Echo(), questions, 3, 0)) == digest_of(texts)  # type: ignore[arg-type]
    assert "making it again" in capsys.readouterr().err


def test_answers_of_a_tuned_target_are_not_those_of_its_base() -> None:
    base, tuned = target_of("llama"), target_of("llama")
    assert mark_of_weights(base) == mark_of_weights(tuned)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight += 0.01
    assert mark_of_weights(base) != mark_of_weights(tuned)


# The recipe and the checkpoint


def test_a_fingerprint_knows_what_matters() -> None:
    usual = {"loss": "kl+0.5*top", "optimizer": "adamw", "steps": 9}
    first = Recipe(**usual).fingerprint()
    for same in ({"prompts": "other.jsonl"}, {"max_length": 999}, {"own_prompts": 5}, {"loss": "1*kl + 0.50*top"}):
        assert Recipe(**usual | same).fingerprint() == first, same
    for_minutes = {"steps": None, "minutes": 1}
    for other in ({"layers": 3}, {"seed": 1}, {"steps": 5}, {"loss": "tv"}, for_minutes, {"optimizer": "muon"}):
        assert Recipe(**usual | other).fingerprint() != first, other
    assert Recipe(steps=4000).fingerprint() == Recipe().fingerprint() != Recipe(minutes=1).fingerprint()


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.safetensors"
    Checkpoint(file, {"target": "a", "recipe": "b"}).write({"x": torch.ones(3)}, {"step": 4})
    tensors, state = Checkpoint(file, {"target": "a"}).read() or ({}, {})
    assert tensors["x"].tolist() == [1, 1, 1] and state == {"step": 4}
    for read in (Checkpoint(file, {"target": "a", "recipe": "c"}).check, Checkpoint(file, {"target": "d"}).read):
        with pytest.raises(UsageError, match="holds a training with another") as error:
            read()
        one_line_of(error)
    made = {"target": "a", "recipe": "b", "set of answers": "c"}
    recipe = Recipe(layers=2, max_prompts=9)
    Checkpoint(file, made, recipe.shown()).write({}, {})
    for name, change, words in (
        ("recipe", {"layers": 3, "max_prompts": 8}, r"another recipe \(layers 2 there, 3 here\): choose"),
        ("recipe", {"minutes": 1.5}, r"\(minutes none there, 1.5 here; steps 4000 there, none here\)"),
        ("set of answers", {"layers": 3, "temperatures": 0}, r"answers \(temperatures 0.0,0.7 there, 0 here\)"),
        ("set of answers", {}, "another set of answers: choose"),
        ("target", {"layers": 3}, "another target: choose"),
    ):
        with pytest.raises(UsageError, match=words):
            Checkpoint(file, made | {name: "other"}, replace(recipe, **change).shown()).check()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UsageError, match="cannot be read") as error:
        Checkpoint(file, {"target": "a"}).read()
    one_line_of(error)
    assert Checkpoint(tmp_path / "none.safetensors", {}).read() is None


def test_ctrl_c_waits_for_a_step_to_be_whole() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("whole")
    assert done == ["whole"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def training_of(target: Any, folder: Path, **settings: Any) -> Training:
    random = np.random.default_rng(0)
    texts = [Text(random.integers(0, VOCAB, 20).astype(np.int32), 5) for _ in range(12)]
    recipe = Recipe(**{"layers": 2, "steps": 12, "batch_tokens": 100} | settings)
    checkpoint = Checkpoint(folder / "checkpoint.safetensors", {})
    student = cut_student(target, spread(2, len(layer_stack(target)[1])))
    return Training(target, student, texts, texts[:2], recipe, checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_target_in_any_number_format_is_learnt_from(dtype: torch.dtype, tmp_path: Path) -> None:
    training = training_of(target_of("llama").to(dtype), tmp_path, learning_rate=1e-2)
    before = {name: value.detach().clone() for name, value in training.parameters.items()}
    moments: list[Any] = []
    training.show = moments.append
    training.run()
    assert moments[-1].step == 12 and moments[-1].loss < moments[0].loss
    assert all(value.dtype != torch.bfloat16 for value in training.parameters.values())
    assert not any(torch.equal(value, before[name]) for name, value in training.parameters.items())


def test_a_loss_that_is_no_number_stops_a_training(tmp_path: Path) -> None:
    target = target_of("llama")
    with torch.no_grad():
        target.lm_head.weight[3] = torch.nan
    with pytest.raises(DraftGraphError, match="--learning-rate") as error:
        training_of(target, tmp_path).run()
    one_line_of(error)
    assert not (tmp_path / "checkpoint.safetensors").exists()
