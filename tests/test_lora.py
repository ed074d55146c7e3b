"""Adapters beside one model: whatever shares the batch, an answer is that of its adapter alone, as PEFT computes it."""

from __future__ import annotations

import copy
import json
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from cli_tools import Runner, refused, save_tiny_model
from families import VOCAB, perturbed, target_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from serve_tools import LiveServer
from test_program import model_of
from tiny_models import one_line_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Job, Limits, Scheduler
from draftgraph.engine.adapters import Adapters
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Segment
from draftgraph.errors import DraftGraphError, UnsupportedModelError, UsageError
from draftgraph.kernels.threads import team_of
from draftgraph.models.adapter import read_adapter
from draftgraph.pair import Pair
from draftgraph.serve.engine_process import FAULT, reporting_faults, serve_pair

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
TARGETS = {
    "llama": EVERYWHERE,  # a compiled pass
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],  # the same, with layers that hold several
    "gpt2": ["c_attn", "c_proj"],  # modules, and layers that are not torch's
    "falcon": ["query_key_value", "dense"],  # one text after the other
}
MODES = ("off", "chain", "tree", "graph", "auto")
LENGTH = 12
PROMPTS = [tuple(np.random.default_rng(seed).integers(0, VOCAB, 3 + 9 * seed).tolist()) for seed in range(3)]


def adapted(base: Any, folder: Path, seed: int = 0, **config: Any) -> Any:
    """A PEFT model with an adapter of random weights, saved there."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]} | config
    fans = {"fan_in_fan_out": True} if base.config.model_type == "gpt2" else {}
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**given, **fans)).eval()
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


class Setting:
    """A model with two adapters, and PEFT's models of the same."""

    def __init__(self, family: str, place: Path, **limits: Any) -> None:
        self.base, wide = target_of(family), TARGETS[family]
        ranks = {"rank_pattern": {wide[0]: 3}, "alpha_pattern": {wide[0]: 5}}
        self.peft = {
            "": self.base,
            "a": adapted(self.base, place / "a", 1, target_modules=wide, **ranks),
            "b": adapted(self.base, place / "b", 2, target_modules=wide[:2], r=6, use_rslora=True),
        }
        adapters = {name: read_adapter(name, place / name) for name in ("a", "b")}
        pair = Pair(self.base, perturbed(self.base), None, GraphConfig(cost="flat"))
        self.scheduler = Scheduler(pair, Limits(slots=4096, **limits), None, adapters)

    def answers(self, *jobs: Job) -> dict[str, list[int]]:
        return {id: [token for one in told for token in one.tokens] for id, told in self.told(*jobs).items()}

    def told(self, *jobs: Job) -> dict[str, list[Any]]:
        for job in jobs:
            self.scheduler.submit(job)
        told: dict[str, list[Any]] = {job.id: [] for job in jobs}
        while self.scheduler.busy:
            for one in self.scheduler.step():
                assert one.error is None, one.error
                told[one.id].append(one)
        return told


def jobs_of(mode: str, **more: Any) -> list[Job]:
    """One of every adapter for every prompt, adapters in turns."""
    given = {"max_tokens": LENGTH, "config": {"mode": mode}} | more
    return [Job(f"{name}{at}", one, adapter=name, **given) for at, one in enumerate(PROMPTS) for name in ("", "a", "b")]


@pytest.fixture(scope="module", params=[*TARGETS, "llama, static"])
def setting(request: Any, tmp_path_factory: Any) -> Any:
    family, *static = request.param.split(", ")
    with pytest.MonkeyPatch.context() as patch:
        if static:
            patch.setenv("DRAFTGRAPH_ENGINE", "static")  # shapes of a GPU's passes
        yield Setting(family, tmp_path_factory.mktemp(family))


def generated(model: Any, prompt: Any, length: int) -> list[int]:
    """By the model's own `generate`, greedy."""
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": length}
    ids = model.generate(**given, do_sample=False, pad_token_id=0, eos_token_id=None)
    return ids[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


@cache
def expected(setting: Setting, sampled: bool) -> dict[str, list[int]]:
    """By PEFT's models alone: of `generate`, and sampled of plain decoding."""
    found = {}
    for job in jobs_of("off"):
        model, prompt = setting.peft[job.adapter], torch.tensor([job.tokens])
        if sampled:
            decoder = GraphDecoder(model, config=GraphConfig(mode="off"))
            out = decoder.generate(prompt, max_new_tokens=LENGTH, do_sample=True, temperature=0.8, top_k=0, seed=5)
            found[job.id] = out.new_token_ids[0]
        else:
            found[job.id] = generated(model, prompt, LENGTH)
    return found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_that_of_its_adapter_alone(setting: Setting, mode: str, sampled: bool) -> None:
    more = {"temperature": 0.8, "seed": 5} if sampled else {}
    alone = expected(setting, sampled)
    assert setting.answers(*jobs_of(mode, **more)) == alone
    assert len({tuple(answer) for answer in alone.values()}) > len(PROMPTS) + 2  # adapters have something to say
    for job in jobs_of("off", **more):
        assert setting.answers(job)[job.id] == alone[job.id]


def test_engines_of_all_kinds_are_tried(setting: Setting) -> None:
    engine, family = setting.scheduler.batch.engines.target, setting.base.config.model_type
    assert isinstance(engine, EagerEngine if family == "falcon" else PagedEngine)
    assert engine.compiled == (family in ("llama", "phi3") and not engine.captured)


def test_the_model_is_shared_and_left_as_it_was(tmp_path: Path) -> None:
    before = target_of("llama").state_dict()
    setting = Setting("llama", tmp_path)
    places = [weight.data_ptr() for weight in setting.base.parameters()]
    setting.answers(*jobs_of("auto"))
    assert setting.scheduler.batch.engines.target.model is setting.base
    assert [weight.data_ptr() for weight in setting.base.parameters()] == places
    assert not any(module._forward_hooks for module in setting.base.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in setting.base.state_dict().items())


def test_the_log_probabilities_of_a_prompt_are_the_adapters(setting: Setting) -> None:
    prompt = PROMPTS[-1]
    for name, model in setting.peft.items():
        (told,) = setting.told(Job("one", prompt, adapter=name, max_tokens=1, prompt_logprobs=0))["one"]
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
        found = torch.tensor(told.prompt_logprobs.own)
        torch.testing.assert_close(found, scores[range(len(prompt) - 1), prompt[1:]], rtol=1e-3, atol=1e-3)


# Bits


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_a_nodes_bits_are_the_same_beside_other_adapters(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", form)
    read = []
    for seed in (1, 2):
        adapted(model_of("llama", "float32"), tmp_path / str(seed), seed, r=3 * seed, target_modules=EVERYWHERE)
        read.append(read_adapter(str(seed), tmp_path / str(seed)))
    engine = PagedEngine(model)
    engine.adapt(Adapters(model, {"a": read[0], "b": read[1]}))
    assert engine._program is not None
    texts = [np.random.default_rng(seed).integers(0, VOCAB, 1 + 7 * seed).tolist() for seed in range(9)]

    def logits(numbers: list[int]) -> list[torch.Tensor]:
        contexts = [engine.open(adapter=number % 3) for number in numbers]
        segments = [
            Segment.of_text(context, texts[number], True) for number, context in zip(numbers, contexts, strict=True)
        ]
        found = [one.logits for one in engine.run(segments)]
        for context in contexts:
            context.close()
        return found

    alone = [logits([number])[0] for number in range(9)]
    for threads in (1, 2, 3):
        monkeypatch.setattr(engine._program, "_team", team_of(threads))
        for numbers in ([0], [1], [4, 0], [2, 1, 0], list(range(9)), [8, 3, 5, 1]):
            found = logits(numbers)
            assert all(torch.equal(one, alone[number]) for one, number in zip(found, numbers, strict=True))
    plain = PagedEngine(model)
    assert torch.equal(alone[3], plain.run([Segment.of_text(plain.open(), texts[3], True)])[0].logits)
    assert not torch.allclose(alone[1], plain.run([Segment.of_text(plain.open(), texts[1], True)])[0].logits, atol=0.1)


# Who sees whose


def test_adapters_never_begin_with_each_others_prefixes(tmp_path: Path) -> None:
    setting, prompt = Setting("llama", tmp_path), tuple(range(20)) * 3
    reused = []
    for turn in range(2):
        for name in ("", "a", "b"):
            told = setting.told(Job(f"{turn}{name}", prompt, tenant="one", adapter=name, max_tokens=2))
            reused.append(told[f"{turn}{name}"][-1].stats["reused_tokens"])
    whole = (len(prompt) - 1) // PAGE * PAGE
    assert reused == [0, 0, 0, whole, whole, whole]


def test_adapters_never_copy_from_each_others_answers(tmp_path: Path) -> None:
    setting = Setting("llama", tmp_path, past_tokens=1000)
    setting.answers(*(Job(name, PROMPTS[0], tenant="one", adapter=name, max_tokens=8) for name in ("", "a", "b")))
    assert [past.tokens for past in setting.scheduler._pasts.values()] == [8, 8, 8]


# What is refused


def test_a_job_with_an_unknown_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no adapter 'c'.*a, b"):
        Setting("llama", tmp_path).scheduler.submit(Job("one", (1, 2), adapter="c"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_more_than_lora_is_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    adapted(target_of("llama"), tmp_path, **config)
    with pytest.raises(DraftGraphError) as error:
        read_adapter("mine", tmp_path)
    assert said in one_line_of(error) and "the adapter mine" in str(error.value)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(DraftGraphError) as error:
            read_adapter("mine", folder)
        assert "the adapter mine" in str(error.value)
        return one_line_of(error)

    assert "save_pretrained" in said(tmp_path / "nowhere")
    whole = tmp_path / "whole"
    adapted(target_of("llama"), whole)
    weights, config = whole / "adapter_model.safetensors", whole / "adapter_config.json"
    bits, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(bits[: len(bits) // 2])
    assert "cannot be served" in said(whole)
    weights.write_bytes(bits)
    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] * torch.nan}, weights)
    assert "not finite" in said(whole)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    assert "do not fit" in said(whole)
    weights.unlink()
    (whole / "adapter_model.bin").write_bytes(b"")
    assert "pickle" in said(whole)
    weights.write_bytes(bits)
    config.write_text(json.dumps(json.loads(text) | {"peft_type": "IA3"}))
    assert "LoRA" in said(whole)
    config.write_text("{")
    assert "cannot be served" in said(whole)
    config.unlink()
    assert "adapter_config.json" in said(whole)


@pytest.mark.parametrize(("family", "said"), [("gpt2", "lacks"), ("qwen3", "to")])
def test_an_adapter_of_another_model_is_refused(family: str, said: str, tmp_path: Path) -> None:
    other = target_of("llama")
    if family == "qwen3":
        other.config.hidden_size = 64
        other = type(other)(other.config)
    adapted(other, tmp_path)
    with pytest.raises(UnsupportedModelError) as error:
        Adapters(target_of(family if family == "gpt2" else "llama"), {"mine": read_adapter("mine", tmp_path)})
    assert said in one_line_of(error) and "the adapter mine was made for another model" in str(error.value)


def test_adapters_that_come_out_wrong_beside_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = np.repeat
    monkeypatch.setattr("draftgraph.engine.passes.np.repeat", lambda values, counts: fill(values[::-1], counts))
    with pytest.raises(UnsupportedModelError, match=r"adapter none are .* off"):
        Setting("llama", tmp_path)


# The server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    place = tmp_path_factory.mktemp("served")
    save_tiny_model(place / "model")
    adapted(AutoModelForCausalLM.from_pretrained(place / "model"), place / "fable", 3, r=8, lora_alpha=64)
    return place


def test_requests_choose_an_adapter_by_its_name(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder / "model")
    load = {"target": str(folder / "model"), "draft": "none", "dtype": "float32", "device": "cpu"}
    options = {"name": "tiny", "load": load, "graph": {"cost": "flat"}, "limits": {"slots": 4096}}
    options["adapters"] = {"fable": str(folder / "fable")}
    command = [sys.executable, "-m", "draftgraph.serve.engine_process", json.dumps(options)]
    base = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    models = {"tiny": base, "fable": adapted(base, folder / "again", 3, r=8, lora_alpha=64)}
    prompt = [5, 9, 11, 4]
    with LiveServer(command, words, model_name="tiny", adapters=("fable",)) as server:
        client = server.client()
        for name, model in models.items():
            answer = client.completions.create(
                model=name, prompt=prompt, max_tokens=8, temperature=0, logprobs=0, extra_body={"ignore_eos": True}
            )
            ids = generated(model, torch.tensor([prompt]), 8)
            assert answer.model == name
            assert answer.choices[0].text == words.decode(ids, skip_special_tokens=True)
            assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_bad_folder_ends_the_start_in_one_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    options = {"load": {"target": "nowhere"}, "adapters": {"fable": str(tmp_path)}}
    with ours, theirs:
        assert reporting_faults(theirs, lambda: serve_pair(theirs, options)) == FAULT
        fault = json.loads(ours.recv(4096))["fault"]
    assert fault.startswith("the adapter fable in ") and "save_pretrained" in fault and "\n" not in fault


def test_models_name_their_parent(folder: Path) -> None:
    with LiveServer(adapters=("fable", "poem")) as server:
        told = httpx.get(f"{server.url}/v1/models").json()["data"]
        names = ("id", "parent", "root")
        assert [[one[name] for name in names] for one in told] == [
            ["fake", None, "fake"],
            ["fable", "fake", "fake"],
            ["poem", "fake", "fake"],
        ]
        client = server.client()
        assert client.models.retrieve("poem").id == "poem"
        assert client.completions.create(model="poem", prompt="hello", temperature=0).model == "poem"
        with pytest.raises(openai.NotFoundError, match="novel"):
            client.completions.create(model="novel", prompt="hello")


@pytest.mark.parametrize("option", ["--lora", "--lora-modules"])
def test_a_command_line_names_adapters(option: str, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("draftgraph.serve.run.run", lambda *given: started.append(given))
    run, model = Runner(capsys, monkeypatch), folder / "model"
    assert run("serve", model, option, f"a={folder / 'fable'}", option, "b=there").status == 0
    ((settings, _, options),) = started
    assert settings.adapters == ("a", "b") and options["adapters"] == {"a": str(folder / "fable"), "b": "there"}
    refused(run("serve", model, option, "there"), "NAME=FOLDER")
    refused(run("serve", model, option, "a=here", option, "a=there"), "taken")
    refused(run("serve", model, "--name", "a", option, "a=there"), "taken")
