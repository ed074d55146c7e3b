"""`draftgraph distill --kind states|block`: heads that learn from the target's states, killed and gone on, and tested
against heads that draft one token after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distill_tools import start_distill, tiny_target, write_prompts_file
from safetensors import safe_open
from safetensors.torch import load_file
from test_distill import FAMILIES, PROMPTS
from tiny_models import REPOSITORY
from transformers import AutoModelForCausalLM, DynamicCache

from draftgraph.distillation import Distilled, Recipe, distill, heads
from draftgraph.distillation.answers import Text
from draftgraph.distillation.heads import block_mask, drafted_blocks, pass_of, score_head, unrolled
from draftgraph.distillation.kinds import KINDS
from draftgraph.distillation.training import Checkpoint, Training
from draftgraph.errors import UsageError
from draftgraph.models.heads.formats import is_head_folder, load_head

KIND_SETTINGS: dict[str, dict[str, Any]] = {
    "states": {"kind": "states", "layers": 1},
    "two layers": {"kind": "states", "layers": 2},
    "block": {"kind": "block", "layers": 2, "block_size": 4},
    "both ways": {"kind": "block", "layers": 2, "block_size": 4, "causal": False},
}
QUICK = {
    "vocab_size": 200,
    "own_prompts": 0,
    "temperatures": (0.0, 1.0),
    "max_new_tokens": 16,
    "max_length": 96,
    "steps": 24,
    "batch_tokens": 256,
    "learning_rate": 4e-3,
}
# What is remembered of the target was rounded in other batches than what a new run reads again.
FORGETFUL = """
import sys
import draftgraph.distillation.training as training
from draftgraph.cli import main
training.CPU_BYTES = 0
sys.exit(main())
"""


def recipe_of(name: str, **settings: Any) -> Recipe:
    return Recipe(**QUICK | KIND_SETTINGS[name] | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("targets") / "llama", FAMILIES["llama"]())


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target: Any) -> list[Text]:
    """What the target says by itself, greedily, behind a few random tokens."""
    begun = torch.randint(1, target.config.vocab_size, (48, 6), generator=torch.Generator().manual_seed(0))
    written = target.generate(begun, max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return [Text(row.numpy().astype(np.int32), 6, "random", 0.0) for row in written]


@pytest.fixture
def quick(tmp_path: Path, folder: Path) -> Any:
    prompts = write_prompts_file(tmp_path / "prompts.jsonl", PROMPTS)

    def run(name: str, out: str = "draft", **settings: Any) -> Distilled:
        arguments = {part: settings.pop(part) for part in ("bits", "export") if part in settings}
        recipe = recipe_of(name, prompts=(str(prompts),), **settings)
        return distill(folder, tmp_path / out, recipe=recipe, answers=tmp_path / "answers", **arguments)

    return run


def trained(name: str, target: Any, texts: list[Text], file: Path, **settings: Any) -> tuple[Any, list[float]]:
    """A head, and its loss at every look during training."""
    recipe = recipe_of(name, **settings)
    kind, losses = KINDS[recipe.kind], []
    student = kind.student(recipe, target)
    show = lambda state: losses.append(state.loss)  # noqa: E731
    Training(target, student, texts, texts[:2], recipe, Checkpoint(file, {}), show, lesson_of=kind.lesson).run()
    return student, losses


def states_at(target: Any, head: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([hidden[index] for index in head.reads], dim=-1)


@pytest.mark.parametrize("name", ["states", "two layers"])
def test_levels_are_trained_as_they_are_drafted(name: str, target: Any, texts: list[Text]) -> None:
    head = KINDS["states"].student(recipe_of(name), target)
    tokens = torch.from_numpy(np.stack([text.tokens for text in texts[:2]])).long()
    with torch.no_grad():
        states = states_at(target, head, tokens)
        levels = [output.logits for output in unrolled(partial(pass_of, head), head.project, tokens, states, 4)]
        for row, known in ((0, 9), (1, 14)):  # rows of the text before the draft begins
            cache = DynamicCache()
            rows = head.project(states[row : row + 1, :known])
            output = head(input_ids=tokens[row : row + 1, 1 : known + 1], states=rows, past_key_values=cache)
            for level, logits in enumerate(levels):
                at = known - 1 + level
                torch.testing.assert_close(logits[row, at], output.logits[0, -1])
                node = tokens[row : row + 1, at + 2 : at + 3]
                output = head(input_ids=node, states=output.states[:, -1:], past_key_values=cache)


@pytest.mark.parametrize("name", ["block", "both ways"])
def test_many_blocks_in_a_pass_are_those_drafted_one_by_one(name: str, target: Any, texts: list[Text]) -> None:
    head = KINDS["block"].student(recipe_of(name), target)
    tokens = torch.from_numpy(np.stack([text.tokens for text in texts[:2]])).long()
    length, size, anchors = tokens.shape[1], head.block_size, torch.tensor([[3, 4, 11], [0, 20, -1]])
    with torch.no_grad():
        states = states_at(target, head, tokens)
        found = drafted_blocks(partial(pass_of, head), head, tokens, states, anchors).logits[:, length:]
        for row, place in ((0, 0), (0, 1), (0, 2), (1, 1)):
            anchor, cache = int(anchors[row, place]), DynamicCache()
            head(
                input_ids=tokens[row : row + 1, :anchor],
                states=head.project(states[row : row + 1, :anchor]),
                past_key_values=cache,
            )
            block = torch.full((1, size), head.mask_token_id)
            block[0, 0] = tokens[row, anchor]
            mask = torch.ones(1, 1, size, anchor + size, dtype=torch.bool)
            mask = mask.tril(anchor) if head.causal else mask
            alone = head(input_ids=block, past_key_values=cache, attention_mask=mask).logits[0]
            torch.testing.assert_close(found[row, place * size : (place + 1) * size], alone)


def test_a_block_sees_no_token_that_it_drafts_and_no_other_block() -> None:
    for causal in (True, False):
        mask = block_mask(torch.tensor([[2, 5]]), 8, 3, causal)[0, 0]
        blocks = mask[8:]
        assert blocks[:3, :8].sum(dim=1).tolist() == [2] * 3 and blocks[3:, :8].sum(dim=1).tolist() == [5] * 3
        assert not blocks[:3, 11:].any() and not blocks[3:, 8:11].any()
        assert blocks[:3, 8:11].int().tolist() == ([[1, 0, 0], [1, 1, 0], [1, 1, 1]] if causal else [[1, 1, 1]] * 3)


@pytest.mark.parametrize("name", list(KIND_SETTINGS))
def test_training_lowers_the_loss_and_raises_agreement_unless_targets_are_shifted(
    name: str, target: Any, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 150, "long_length": 0, "batch_tokens": 512, "prompt_share": 0.0, "learning_rate": 0.02}
    head, losses = trained(name, target, texts, tmp_path / "checkpoint.safetensors", **settings)
    scores = score_head(head, target, texts)
    assert losses[-1] < 0.6 * losses[0], losses
    assert scores.agreement > 0.75 and scores.tokens_per_pass > 2, scores
    assert scores.by_depth[0] == pytest.approx(scores.agreement) and min(scores.by_depth[:3]) > 0.65, scores

    right = heads.HeadLesson.taught

    def shifted(self: Any, rows: list[int], tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        return right(self, rows, tokens, (positions - 1).clamp(min=0))

    monkeypatch.setattr(heads.HeadLesson, "taught", shifted)
    wrong, _ = trained(name, target, texts, tmp_path / "wrong.safetensors", **settings)
    assert score_head(wrong, target, texts).agreement < 0.6, "this target often repeats a token, hence not near 0"


def start_forgetful(*arguments: object) -> subprocess.Popen[str]:
    """`start_distill` of a run that reads the target's states anew at every step."""
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORGETFUL, "distill", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdout=pipe, stderr=pipe, text=True)


def reached(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    with safe_open(checkpoint, framework="pt") as stored:
        return int(json.loads(stored.metadata()["state"])["step"])


@pytest.mark.parametrize("name", ["states", "block"])
def test_a_killed_run_goes_on_to_the_weights_of_a_whole_one(name: str, folder: Path, tmp_path: Path) -> None:
    settings = QUICK | KIND_SETTINGS[name] | {"temperatures": "0,1", "steps": 60}
    options = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    prompts = write_prompts_file(tmp_path / "prompts.jsonl", PROMPTS)
    files = ["--target", folder, "--prompts", prompts, "--answers", tmp_path / "answers", "--bits", 32]
    command = [*files, *options, "--checkpoint-seconds", 0, "--json"]

    whole = start_forgetful(*command, "--out", tmp_path / "whole")
    said, told = whole.communicate(timeout=200)
    assert whole.returncode == 0, told
    assert "by depth" in told and len(json.loads(said)["scores"]["by_depth"]) > 1

    checkpoint = tmp_path / "parts" / "checkpoint.safetensors"
    killed = start_forgetful(*command, "--out", tmp_path / "parts")
    end = time.monotonic() + 120
    while reached(checkpoint) == 0:
        assert killed.poll() is None and time.monotonic() < end, killed.communicate()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    step = reached(checkpoint)
    assert 0 < step < 60 and not (tmp_path / "parts" / "model.safetensors").exists()

    again = start_forgetful(*command, "--out", tmp_path / "parts")
    _, told = again.communicate(timeout=200)
    assert again.returncode == 0 and f"going on from step {step}" in told, told
    first, second = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", list(KIND_SETTINGS))
def test_the_folder_is_a_head_that_loads_and_the_run_is_finished(name: str, target: Any, quick: Any) -> None:
    done = quick(name)
    names = {file.name for file in done.folder.iterdir()}
    assert is_head_folder(done.folder) and "checkpoint.safetensors" not in names
    assert {"config.json", "model.safetensors", "README.md", "training.json"} <= names
    written_as = json.loads((done.folder / "config.json").read_text()).get("speculators_model_type")
    assert ("in the speculators format" in (done.folder / "README.md").read_text()) == (written_as is not None)
    head = load_head(done.folder, target)
    assert head.kind == KIND_SETTINGS[name]["kind"] and head.config.num_hidden_layers == KIND_SETTINGS[name]["layers"]
    if head.kind == "states":
        assert len(head.token_map) == head.get_output_embeddings().weight.shape[0] == 200
    else:
        assert (head.block_size, head.causal) == (4, name == "block")
    assert quick(name) == done and len(done.scores.by_depth) > 1
    with pytest.raises(UsageError, match="another recipe"):
        quick("block" if name == "states" else "states")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "medusa"}, "kind must be layers, states, block"),
        ({"block_size": 8}, "block_size is for kind block"),
        ({"kind": "states", "causal": True}, "causal is for kind block"),
        ({"long_length": 64}, "long_length is for kind states and block"),
        ({"kind": "states", "layers": 3}, "at most 2 layers"),
        ({"kind": "block", "start_from": "first"}, "start_from is for kind layers"),
        ({"kind": "block", "block_size": 1}, "block_size must be"),
        ({"kind": "block", "long_length": 9999, "batch_tokens": 1024}, "at most batch_tokens"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        Recipe(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"), [({"bits": 8}, "16 or 32 bits"), ({"export": "hf"}, "kind block is in a format")]
)
def test_what_only_layers_have_is_refused_for_heads(arguments: dict[str, Any], said: str, quick: Any) -> None:
    with pytest.raises(UsageError, match=said):
        quick("block", **arguments)


def test_the_command_says_in_one_line_what_makes_no_sense(folder: Path, tmp_path: Path) -> None:
    run = start_distill("--target", folder, "--out", tmp_path / "out", "--block-size", 8)
    said, told = run.communicate(timeout=60)
    assert run.returncode == 2 and said == "" and "block_size is for kind block" in told.splitlines()[-1]
