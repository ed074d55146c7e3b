"""What users give `draftgraph distill`, and what machines lack: refused in one line, early, and nothing is lost."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import Done, Runner, refused
from distill_tools import bpe_tokenizer, tiny_target, write_prompts_file
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

import draftgraph
from draftgraph import UsageError
from draftgraph.distillation import Recipe

VOCAB = len(bpe_tokenizer(["the cat sat on the mat"] * 4, 280))
PROMPTS = [f"the cat sat on mat {number}" for number in range(20)]
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
QUICK = ("--layers", 1, "--max-new-tokens", 8, "--max-length", 64, "--steps", 4, "--batch-tokens", 128)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("targets") / "llama", LlamaConfig(**SHAPE))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts_file(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`draftgraph distill` in this process, with a short recipe and all of its files in one place."""
    runner = Runner(capsys, monkeypatch)

    def call(target: Path, *arguments: object, out: str = "out") -> Done:
        files = ("--target", target, "--out", tmp_path / out, "--answers", tmp_path / "answers")
        return runner("distill", *files, *QUICK, *arguments)

    return call


def failed(done: Done, *words: str) -> None:
    """Exit status 1, and one line about it behind those that tell how far the run was."""
    assert (done.status, done.out) == (1, "") and "Traceback" not in done.err, done
    *before, last = done.err.splitlines()
    assert last.startswith("draftgraph: ") and not any(line.startswith("draftgraph: ") for line in before), done.err
    for word in words:
        assert word in last


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", 0), ("layers", "0")),
        (("--layers", 99), ("the target has 3 layers", "99")),
        (("--layers", 2, "--start-from", "0,99"), ("no layer 99",)),
        (("--start-from", "0,1"), ("start_from names 2 layers",)),
        (("--start-from", "top"), ("start_from", "'top'")),
        (("--vocab-size", -1), ("vocab_size", "-1")),
        (("--own-prompts", -5), ("own_prompts", "-5")),
        (("--max-prompts", 0), ("max_prompts", "0")),
        (("--max-new-tokens", 64), ("max_length must be over max_new_tokens (64)",)),
        (("--loss", "nonsense"), ("loss must be a sum", "'nonsense'")),
        (("--temperatures", "x"), ("temperatures must be numbers", "'x'")),
        (("--temperatures", "0,-1"), ("temperatures", "-1")),
        (("--temperatures", "nan"), ("temperatures", "nan")),
        (("--bits", 7), ("bits must be 8, 16 or 32, not 7",)),
        (("--export", "xx"), ("export", "'xx'")),
        (("--steps", 0), ("steps", "0")),
        (("--minutes", 0), ("minutes", "0")),
        (("--batch-tokens", 1), ("batch_tokens", "1")),
        (("--batch-size", 0), ("batch_size must be at least 1",)),
        (("--learning-rate", 2), ("learning_rate", "2")),
        (("--optimizer", "sgd"), ("optimizer must be adamw or muon", "'sgd'")),
        (("--checkpoint-seconds", -1), ("checkpoint_seconds",)),
        (("--seed", -1), ("seed", "-1")),
        (("--layers", "many"), ("--layers", "integer")),
        (("--prompts", "none.jsonl"), ("none.jsonl", "no such file")),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else None,
)
def test_wrong_settings_are_refused(run: Any, target: Path, arguments: Any, words: Any, tmp_path: Path) -> None:
    refused(run(target, *arguments), *words)
    assert not any((tmp_path / "answers").glob("*")), "work was done before"


def test_the_line_of_a_prompt_that_cannot_be_read_is_named(run: Any, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    refused(run(target, "--prompts", file), f"{file}, line 2", "not valid JSON")


def test_a_target_without_chat_template_needs_prompts(run: Any, prompts: Path, tmp_path: Path) -> None:
    plain = tiny_target(tmp_path / "plain", LlamaConfig(**SHAPE), template=None)
    refused(run(plain), "need a chat template", "--prompts FILE")
    assert "need a chat template" in run(plain, "--prompts", prompts, "--own-prompts", 10).err
    done = run(plain, "--prompts", prompts)
    assert done.status == 0 and "the target has no chat template: it writes no prompts itself" in done.err


def test_a_target_without_tokenizer_or_end_token(run: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    refused(run(bare, "--prompts", prompts), "no tokenizer")
    endless = tiny_target(tmp_path / "endless", LlamaConfig(**SHAPE | {"eos_token_id": None}))
    assert run(endless, "--prompts", prompts, "--own-prompts", 0).status == 0


def test_texts_stay_within_the_context_window(run: Any, tmp_path: Path) -> None:
    short, shorter = (
        tiny_target(
            tmp_path / f"{window}",
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=window, bos_token_id=None, eos_token_id=0
            ),
        )
        for window in (120, 40)
    )
    long = write_prompts_file(
        tmp_path / "long.jsonl", [f"{number} the cat sat on the mat " * 40 for number in range(9)]
    )
    done = run(short, "--prompts", long, "--own-prompts", 4, "--max-length", 500)
    assert done.status == 0 and "max_length is 120, the target's context window" in done.err
    refused(run(shorter, "--prompts", long, "--max-new-tokens", 50), "holds 40 tokens", "--max-new-tokens 20")
    assert "window of 40 is too short to write prompts" in run(shorter, out="shorter").err


def test_folders_that_cannot_be_written_are_refused_before_any_work(
    run: Any, target: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    more = ("--prompts", prompts, "--own-prompts", 0)
    for out in ("file", "file/below"):
        refused(run(target, *more, out=out), "--out", "cannot be written")
    refused(run(target, *more, "--answers", tmp_path / "file"), "--answers", "cannot be written")
    held = (target / "config.json").read_bytes()
    refused(run(target, *more, "--out", target), "holds a model that is no draft")
    assert (target / "config.json").read_bytes() == held


def test_a_folder_with_another_training_is_refused_early(
    run: Any, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    model = LlamaForCausalLM.from_pretrained(shutil.copytree(target, other))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.1  # tuned, with the embedding as it was
    model.save_pretrained(other)
    more = ("--prompts", prompts, "--own-prompts", 0)
    assert run(target, *more).status == 0
    shutil.copytree(tmp_path / "out", tmp_path / "half")
    (tmp_path / "half" / "training.json").unlink()
    monkeypatch.setattr("draftgraph.distillation.distilling.save_draft", lambda *_: (_ for _ in ()).throw(OSError))
    assert run(target, *more, out="half").status == 1 and (tmp_path / "half" / "checkpoint.safetensors").exists()

    monkeypatch.setattr("draftgraph.distillation.distilling.target_answers", None)  # not reached
    for out, file in (("out", "training.json"), ("half", "checkpoint.safetensors")):
        refused(run(other, *more, out=out), "another target", f"remove {file}")
        refused(run(target, *more, "--steps", 5, out=out), "another recipe", f"remove {file}")
    refused(run(target, *more, "--bits", 8), "in 16 bits", "another --out")


def test_other_answers_are_another_training(run: Any, target: Path, prompts: Path) -> None:
    assert run(target, "--prompts", prompts, "--own-prompts", 0).status == 0
    write_prompts_file(prompts, PROMPTS[:-4])
    done = run(target, "--prompts", prompts, "--own-prompts", 0)
    assert done.status == 2 and "another set of answers" in done.err.splitlines()[-1]


# What a machine lacks


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_grows_too_large_loses_nothing_before(
    run: Any, target: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--prompts", prompts, "--own-prompts", 0)
    with files_of_at_most(8192):
        failed(run(target, *more), "the checkpoint", "too large", "--out")
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "answers").iterdir()}
    assert len(kept) == 1 and not list((tmp_path / "out").iterdir()), "half a file was left"
    assert run(target, *more).status == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "answers").iterdir()} == kept


@pytest.mark.parametrize(("place", "what"), [("answers", "the target's answers"), ("out", "the checkpoint")])
def test_a_full_disk_is_called_that(
    place: str, what: str, run: Any, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    original = safetensors.torch.save_file

    def save(tensors: Any, file: Path, metadata: Any = None) -> None:
        if file.parent.name == place:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, file, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    option = {"answers": "--answers", "out": "--out"}[place]
    failed(run(target, "--prompts", prompts, "--own-prompts", 0), "the disk is full", what, option)


@pytest.mark.parametrize(
    ("learning", "words"), [(False, ("20 texts at once", "--batch-size 10")), (True, ("128", "--batch-tokens 64"))]
)
def test_out_of_memory_names_what_to_try(
    learning: bool, words: Any, run: Any, target: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaForCausalLM.forward

    @wraps(original)  # what a model takes is read from its signature
    def forward(self: Any, input_ids: Any, **arguments: Any) -> Any:
        if torch.is_grad_enabled() if learning else len(input_ids) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more")
        return original(self, input_ids=input_ids, **arguments)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    more = ("--prompts", prompts, "--own-prompts", 0, "--temperatures", 0)
    failed(run(target, *more), "out of memory", *words)
    if not learning:
        assert run(target, *more, "--batch-size", 10).status == 0


# From Python


def test_the_function_takes_fields_of_the_recipe_as_keywords(target: Path, prompts: Path, tmp_path: Path) -> None:
    recipe = Recipe(steps=2, layers=1, max_new_tokens=8, own_prompts=0)
    files = {"out": tmp_path / "draft", "answers": tmp_path / "answers"}
    done = draftgraph.distill(target, **files, recipe=recipe, layers=2, prompts=prompts, temperatures=0)
    assert done.folder == tmp_path / "draft" and done.steps == 2
    figures = json.loads((done.folder / "training.json").read_text())
    assert figures["recipe"] == recipe.to_dict() | {"layers": 2, "prompts": ["prompts.jsonl"], "temperatures": [0]}
    assert figures["scores"] == done.scores.to_dict() and str(tmp_path) not in (done.folder / "README.md").read_text()
    for wrong, word in (({"layer": 2}, "'layer'"), ({"layers": 2.5}, "whole number"), ({"steps": "9"}, "'9'")):
        with pytest.raises(UsageError, match=word) as error:
            draftgraph.distill(target, **files, **wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="'bitz'"):
        draftgraph.distill(target, **files, bitz=8)


def test_arguments_for_the_loader_have_their_own_place(target: Path, tmp_path: Path) -> None:
    with pytest.raises(draftgraph.DraftGraphError, match="nonsense"):
        draftgraph.distill(target, tmp_path / "draft", model_kwargs={"nonsense": 1})


def test_a_folder_with_files_of_somebody_else_is_left_alone(run: Any, target: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("mine")
    refused(run(target, out="project"), "--out", "holds other files (README.md)")
    assert (project / "README.md").read_text() == "mine"
