"""What users give `draftgraph distill`, and what machines lack: refused in one line, early, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import Done, Runner, refused
from distill_tools import bpe_tokenizer, tiny_target, write_prompts_file
from tiny_models import REPOSITORY, one_line_of
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

import draftgraph
from draftgraph import UsageError
from draftgraph.distillation import Recipe
from draftgraph.distillation.kinds import KINDS
from draftgraph.distillation.progress import amount
from draftgraph.distillation.recipe import OF_HEADS
from draftgraph.files import LOCK, held_alone

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


def in_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Python code in a process of its own."""
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=pipe, stderr=pipe, text=True
    )


def failed(done: Done, *words: str, status: int = 1) -> None:
    """One line about it behind those that tell how far the run was."""
    assert (done.status, done.out) == (status, "") and "Traceback" not in done.err, done
    *before, last = done.err.splitlines()
    assert last.startswith("draftgraph: ") and not any(line.startswith("draftgraph: ") for line in before), done.err
    for word in words:
        assert word in last


def refused_late(done: Done, *words: str) -> None:
    """Wrong use that only the target, or the prompts, can tell."""
    failed(done, *words, status=2)
    assert done.err.startswith("loading the target ")


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", 0), ("layers", "0")),
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
        (("--minutes", 5), ("steps and minutes exclude each other: give one of them",)),
        (("--batch-tokens", 1), ("batch_tokens", "1")),
        (("--batch-size", 0), ("batch_size must be at least 1",)),
        (("--learning-rate", 2), ("learning_rate", "2")),
        (("--optimizer", "sgd"), ("optimizer must be adamw or muon", "'sgd'")),
        (("--checkpoint-seconds", -1), ("checkpoint_seconds",)),
        (("--seed", -1), ("seed", "-1")),
        (("--layers", "many"), ("--layers", "integer")),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else None,
)
def test_wrong_settings_are_refused(run: Any, target: Path, arguments: Any, words: Any, tmp_path: Path) -> None:
    refused(run(target, *arguments), *words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "answers").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", 99), ("the target has 3 layers", "99")),
        (("--layers", 2, "--start-from", "0,99"), ("no layer 99",)),
        (("--start-from", "0,1"), ("start_from names 2 layers",)),
        (("--start-from", "top"), ("start_from", "'top'")),
        (("--prompts", "none.jsonl"), ("none.jsonl", "no such file")),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else None,
)
def test_a_refused_run_leaves_no_folder_behind(
    run: Any, target: Path, arguments: Any, words: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    for out in ("out/below", "mine"):
        refused_late(run(target, *arguments, out=out), *words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "answers").exists()
    assert not list((tmp_path / "mine").iterdir())


def test_what_a_recipe_leaves_out() -> None:
    recipe = Recipe()
    assert (recipe.prompts_to_write, recipe.done(1000, 99)) == (20000, 0.25)
    assert recipe.shown()["steps"] == 4000 and recipe.shown()["own_prompts"] == 20000
    given = Recipe(prompts="p.jsonl", minutes=2)
    assert (given.prompts_to_write, given.done(1000, 60)) == (0, 0.5) and given.shown()["steps"] is None
    assert Recipe(prompts="p.jsonl", own_prompts=7).prompts_to_write == 7
    with pytest.raises(UsageError, match="steps and minutes exclude each other") as error:
        Recipe(minutes=1, steps=4000)
    one_line_of(error)


def test_the_line_of_a_prompt_that_cannot_be_read_is_named(run: Any, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    refused_late(run(target, "--prompts", file), f"{file}, line 2", "not valid JSON")


def test_a_target_without_chat_template_needs_prompts(run: Any, prompts: Path, tmp_path: Path) -> None:
    plain = tiny_target(tmp_path / "plain", LlamaConfig(**SHAPE), template=None)
    refused_late(run(plain), "need a chat template", "--prompts FILE")
    assert "need a chat template" in run(plain, "--prompts", prompts, "--own-prompts", 10).err
    assert run(plain, "--prompts", prompts).status == 0


def test_a_target_without_tokenizer_or_end_token(run: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    refused_late(run(bare, "--prompts", prompts), "no tokenizer")
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
    refused_late(run(shorter, "--prompts", long, "--max-new-tokens", 50), "holds 40 tokens", "--max-new-tokens 20")
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
    failing = replace(KINDS["layers"], save=lambda *_: (_ for _ in ()).throw(OSError))
    monkeypatch.setitem(KINDS, "layers", failing)
    assert run(target, *more, out="half").status == 1 and (tmp_path / "half" / "checkpoint.safetensors").exists()

    monkeypatch.setattr("draftgraph.distillation.making.target_answers", None)  # not reached
    for out, file in (("out", "training.json"), ("half", "checkpoint.safetensors")):
        refused_late(run(other, *more, out=out), "another target: choose", f"remove {file}")
        changed = ("--steps", 5, "--loss", "kl", "--max-prompts", 3)
        differing = "another recipe (steps 4 there, 5 here; loss kl+0.5*top there, kl here): choose"
        refused_late(run(target, *more, *changed, out=out), differing, f"remove {file}")
    refused_late(run(target, *more, "--bits", 8), "in 16 bits", "another --out")


def test_other_answers_are_another_training(run: Any, target: Path, prompts: Path) -> None:
    assert run(target, "--prompts", prompts, "--own-prompts", 0).status == 0
    done = run(target, "--prompts", prompts, "--own-prompts", 0, "--max-new-tokens", 7)
    refused_late(done, "another set of answers (max_new_tokens 8 there, 7 here): choose")
    write_prompts_file(prompts, PROMPTS[:-4])
    done = run(target, "--prompts", prompts, "--own-prompts", 0)
    refused_late(done, "another set of answers: choose")


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
    assert len(kept) == 1 and not (tmp_path / "out").exists(), "half a file was left"
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
    understood = {"layers": 2, "prompts": ["prompts.jsonl"], "temperatures": [0]}
    given = {name: value for name, value in recipe.to_dict().items() if name not in OF_HEADS}
    assert figures["recipe"] == given | understood
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


# One run at a time


HOLDER = """
import sys, time
from pathlib import Path
from draftgraph.files import held_alone
with held_alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_run_works_in_is_refused(run: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with held_alone(out):
        refused(run(target, "--prompts", prompts), f"another run of distill works in --out {out}:")
        refused(run(target, "--prompts", prompts), "another run")
    assert not list(out.iterdir())


def test_a_killed_run_holds_no_folder(run: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    holder = in_process(HOLDER, out)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refused(run(target, "--prompts", prompts), "another run of distill")
    holder.kill()
    holder.communicate()
    assert [file.name for file in out.iterdir()] == [LOCK]
    assert run(target, "--prompts", prompts).status == 0
    assert not (out / LOCK).exists()


# What is shown


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from draftgraph.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_first_line_comes_before_anything_heavy(target: Path, tmp_path: Path) -> None:
    files = ("--target", target, "--out", tmp_path / "out", "--answers", tmp_path / "answers")
    told = in_process(WITHOUT_TORCH, "distill", *files).communicate()[1]
    first, second = told.splitlines()
    assert first == f"loading the target {target}" and "torch" in second
    told = in_process(WITHOUT_TORCH, "distill", *files, "--layers", 0).communicate()[1]
    assert told.startswith("draftgraph: layers must be") and told.count("\n") == 1


def test_a_run_tells_what_it_does_in_plain_numbers(run: Any, target: Path, prompts: Path) -> None:
    done = run(target, "--prompts", prompts, "--temperatures", 0)
    assert done.status == 0 and "written by the target" not in done.err
    lines = done.err.splitlines()
    assert lines[0] == f"loading the target {target}" and lines[1] == f"reading prompts: {prompts}"
    (answers,) = (re.fullmatch(r"20 answers, (\d+) tokens", line) for line in lines if "answers, " in line)
    assert answers and 20 <= int(answers[1]) <= 160
    assert re.search(r"out: \d\d?,\d{3} weights of its own", lines[-1])
    assert [amount(number) for number in (0, 999_999, 1_000_000)] == ["0", "999,999", "1.0M"]


def test_help_shows_what_every_option_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = Runner(capsys, monkeypatch)("distill", "--help").out
    shown = dict(re.findall(r"--(\S+) .*\[default: \(?(.*?)\)?\]", text))
    own = [field.name for field in fields(Recipe) if field.name not in ("warmup", "minutes")]
    for name in (*own, "out", "answers", "batch_size", "checkpoint_seconds", "bits", "export"):
        assert name.replace("_", "-") in shown, name
    expected = {"own-prompts": "20000, or 0 with --prompts", "steps": "4000", "temperatures": "0,0.7"}
    expected |= {"start-from": "spread", "optimizer": "muon", "learning-rate": "0.01", "loss": "kl+0.5*top"}
    assert shown | expected | {"prompt-share": "0.1", "seed": "0"} == shown
