"""`draftgraph distill` from a target to a draft that is used: killed and gone on, other families, the same twice."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_tools import (
    LEARNT_CHATS,
    bpe_tokenizer,
    docstring_chats,
    start_distill,
    talking_target,
    tiny_target,
    write_prompts_file,
)
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

import draftgraph
from draftgraph import GraphConfig
from draftgraph.bench.answers import loops
from draftgraph.distillation import Distilled, Recipe, distill
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.sampler import Sampler
from draftgraph.files import LOCK

VOCAB = len(bpe_tokenizer(["the cat sat on the mat"] * 4, 280))
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=0
    ),
}
PROMPTS = [f"the cat sat on mat {number} and the mat sat on cat {number % 3}" for number in range(24)]
QUICK = Recipe(
    layers=2,
    vocab_size=200,
    own_prompts=0,
    temperatures=(0.0, 1.0),
    max_new_tokens=16,
    max_length=96,
    steps=24,
    batch_tokens=256,
    learning_rate=2e-3,
)


def wait_for(file: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{file.name} did not come"
        time.sleep(0.02)


def reached(checkpoint: Path) -> int:
    with safe_open(checkpoint, framework="pt") as stored:
        return int(json.loads(stored.metadata()["state"])["step"])


def times(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def greedy_answers(target: Path, prompts: list[str]) -> list[list[int]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return Sampler(model, frozenset({0})).continue_texts(tokenizer(texts)["input_ids"], 48)


def test_a_killed_run_goes_on_and_its_draft_makes_the_target_faster(tmp_path: Path) -> None:
    chats = docstring_chats()
    target = talking_target(tmp_path / "target", chats[:LEARNT_CHATS])
    prompts = [first for first, _ in chats[LEARNT_CHATS:]]
    answers = greedy_answers(target, prompts[:60])
    assert sum(map(loops, answers)) <= 6 and len({tuple(answer) for answer in answers}) > 40, "the target raves"

    out, store = tmp_path / "draft", tmp_path / "answers"
    settings = {"layers": 2, "start_from": "last", "vocab_size": 512, "own_prompts": 20, "max_new_tokens": 48}
    settings |= {"max_length": 128, "temperatures": "0,1", "steps": 150, "batch_tokens": 1024, "learning_rate": 4e-3}
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    files = ["--target", target, "--out", out, "--answers", store]
    files += ["--prompts", write_prompts_file(tmp_path / "prompts.jsonl", prompts)]
    command = [*files, *options, "--checkpoint-seconds", "0.3", "--json"]

    killed = start_distill(*command)
    wait_for(out / "checkpoint.safetensors", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (out / LOCK).exists(), "of a run that is no more"
    step, kept = reached(out / "checkpoint.safetensors"), times(store)
    assert 0 < step < 150 and not (out / "model.safetensors").exists()

    again = start_distill(*command)
    said, told = again.communicate(timeout=300)
    assert again.returncode == 0, told
    assert f"going on from step {step}" in told and times(store) == kept
    figures = json.loads(said)
    before, after = figures["before"]["agreement"], figures["scores"]["agreement"]
    assert figures["steps"] == 150 and after >= 3 * before and after > 0.2, figures
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", "README.md", "training.json"}

    recipe = Recipe(**settings | {"temperatures": (0.0, 1.0), "prompts": (str(tmp_path / "prompts.jsonl"),)})
    finished = distill(target, out, recipe=recipe, answers=store)
    assert finished.scores.to_dict() == figures["scores"] and finished.seconds == figures["seconds"]

    pair = draftgraph.load(target, draft=out)
    lengths = []
    for prompt in prompts[:6]:
        plain, drafted = (
            pair.generate(prompt, max_new_tokens=48, config=GraphConfig(mode=mode)) for mode in ("off", "graph")
        )
        assert plain.token_ids == drafted.token_ids
        lengths.append(drafted.stats.mean_accepted_length)
    assert sum(lengths) / len(lengths) > 1.3, lengths


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def target(family: str) -> Path:
        if family not in made:
            made[family] = tiny_target(tmp_path_factory.mktemp("targets") / family, FAMILIES[family]())
        return made[family]

    return target


@pytest.fixture
def quick(tmp_path: Path) -> Any:
    """A short run with all of its files in one place."""
    prompts = write_prompts_file(tmp_path / "prompts.jsonl", PROMPTS)

    def run(target: Any, out: str = "draft", **settings: Any) -> Distilled:
        return distill(target, tmp_path / out, recipe=QUICK, answers=tmp_path / "answers", prompts=prompts, **settings)

    return run


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_exported_folder_is_an_assistant_for_transformers(family: str, folder_of: Any, quick: Any) -> None:
    folder = folder_of(family)
    done = quick(folder, steps=8)
    assert quick(folder, steps=8, export="hf") == done
    target, assistant = (AutoModelForCausalLM.from_pretrained(one) for one in (folder, done.folder / "hf"))
    assert assistant.config.num_hidden_layers == 2
    assert assistant.get_output_embeddings().weight.shape == target.get_output_embeddings().weight.shape
    tied = assistant.get_output_embeddings().weight is assistant.get_input_embeddings().weight
    assert tied == (target.get_output_embeddings().weight is target.get_input_embeddings().weight)
    pair, small = draftgraph.load(folder, draft=done.folder / "hf"), draftgraph.load(folder, draft=done.folder)
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([pair.tokenizer(prompt)["input_ids"]])
        plain = target.generate(ids, max_new_tokens=24, do_sample=False)
        assisted = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=assistant)
        assert assisted.tolist() == plain.tolist()
        new = plain[0, ids.shape[1] :].tolist()
        for one in (pair, small):
            graph = one.generate(prompt, raw=True, max_new_tokens=24, config=GraphConfig(mode="graph"))
            assert graph.token_ids == new


def weights_of(done: Distilled) -> dict[str, torch.Tensor]:
    return load_file(done.folder / "model.safetensors")


def same(first: Distilled, second: Distilled) -> bool:
    ours, theirs = weights_of(first), weights_of(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ctrl-C when a training shows this step, once."""

    def at(step: int) -> None:
        shown, waiting = Reporter.training, [step]

        def interrupt(self: Reporter, moment: Any) -> None:
            shown(self, moment)
            if waiting and moment.step >= waiting[0]:
                waiting.clear()
                raise KeyboardInterrupt

        monkeypatch.setattr(Reporter, "training", interrupt)

    yield at


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_same_seed_gives_the_same_weights_interrupted_or_not(
    optimizer: str,
    folder_of: Any,
    quick: Any,
    interrupted_at: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, arguments = folder_of("llama"), {"optimizer": optimizer, "bits": 32}
    first = quick(folder, "first", **arguments)
    assert same(first, quick(folder, "again", **arguments))
    assert not same(first, quick(folder, "other", **arguments, seed=1))

    # What is remembered of the target was rounded in other batches than what a new run reads again.
    monkeypatch.setattr("draftgraph.distillation.training.CPU_BYTES", 0)
    whole = quick(folder, "whole", **arguments)
    interrupted_at(10)
    with pytest.raises(KeyboardInterrupt):
        quick(folder, "parts", **arguments)
    assert "the same command goes on" in capsys.readouterr().err
    assert reached(whole.folder.with_name("parts") / "checkpoint.safetensors") == 10
    parts = quick(folder, "parts", **arguments)
    assert "going on from step 10" in capsys.readouterr().err
    assert same(whole, parts) and parts.steps == 24 and whole.scores == parts.scores


def test_minutes_are_those_of_all_runs_together(folder_of: Any, quick: Any, interrupted_at: Any) -> None:
    interrupted_at(10)
    with pytest.raises(KeyboardInterrupt):
        quick(folder_of("llama"), steps=None, minutes=0.03)
    began = time.monotonic()
    done = quick(folder_of("llama"), steps=None, minutes=0.03)
    assert done.steps > 10 and done.seconds >= 0.03 * 60 - 0.1
    assert time.monotonic() - began < 60


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(folder_of: Any, tmp_path: Path) -> None:
    prompts = write_prompts_file(tmp_path / "prompts.jsonl", PROMPTS)
    files = ["--out", tmp_path / "out", "--answers", tmp_path / "answers", "--prompts", prompts]
    settings = ["--own-prompts", 0, "--layers", 1, "--max-new-tokens", 16, "--batch-tokens", 256]
    run = start_distill("--target", folder_of("llama"), *files, *settings, "--checkpoint-seconds", 1)
    wait_for(tmp_path / "out" / "checkpoint.safetensors", run)
    run.send_signal(signal.SIGINT)
    said, told = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "") and "Traceback" not in told
    assert told.splitlines()[-1] == "interrupted: what was done is kept, and the same command goes on from there"
    assert reached(tmp_path / "out" / "checkpoint.safetensors") > 0


def test_a_module_is_left_as_it_was(folder_of: Any, quick: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder_of("llama")).train()
    head, weights = target.get_output_embeddings(), {name: value.clone() for name, value in target.state_dict().items()}
    quick(target, steps=2)
    assert target.training and target.get_output_embeddings() is head
    assert all(parameter.requires_grad and parameter.grad is None for parameter in target.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in target.state_dict().items())
