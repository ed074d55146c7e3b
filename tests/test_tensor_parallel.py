"""Models that are split over processes: the same promise, on any rank, and what becomes of them when one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from cli_tools import Runner, refused, save_tiny_model
from rank_tools import (
    FAMILIES,
    MODES,
    NEW_TOKENS,
    RANKS,
    STYLES,
    children,
    ended,
    is_running,
    meeting_places,
    mentioning,
    save_families,
    start,
)
from serve_tools import wait_until
from transformers import LlamaConfig

from draftgraph.engine.messages import packed, unpacked
from draftgraph.engine.sharding import attention_is_whole, plan_for
from draftgraph.serve.service import DEFAULT_NAME

WITHIN = 30.0  # seconds, in which all ranks end when one has ended or hangs
ALONE = """
import json, sys, torch
from torch import distributed as dist
from draftgraph.engine.sharding import gathered, summed, sums_change
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder, 3), rank=rank, world_size=3)
group, rows = dist.group.WORLD, torch.randn((64, 96), generator=torch.Generator().manual_seed(rank))
together = summed(rows.clone(), group)
alone = torch.stack([summed(row.clone(), group) for row in rows])
first, second, third = gathered(rows, group)
found = [torch.equal(together, alone), torch.equal(together, first + second + third)]
found.append(sums_change(group, torch.device("cpu"), torch.float32))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_families(folder)
    save_tiny_model(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    """What two ranks gave, by family and beyond: they are started once."""
    lines = ended(start("promise", place))
    return {one.get("family", next(iter(one))): one for one in lines}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_and_batch_on_two_ranks_gives_the_tokens_of_off_on_them(found: Any, family: str) -> None:
    for style in STYLES:
        plain = found[family]["alone"][f"off {style}"]
        assert len(plain) == NEW_TOKENS
        for mode in MODES:
            assert found[family]["alone"][f"{mode} {style}"] == plain, (mode, style)
            assert found[family]["together"][style][mode] == plain, (mode, style)
    assert len(set(plain)) > 2 and found[family]["accepted"] > NEW_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_off_on_two_ranks_is_off_on_one_in_float64(found: Any, family: str) -> None:
    assert found[family]["two"] == found[family]["one"]
    assert found[family]["off_by"] < 1e-4, "in float32 the ranks' sums round otherwise, and no more than that"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_passes_are_split(found: Any, family: str) -> None:
    assert found[family]["engine"] == ["LeadEngine", "PagedEngine", RANKS]
    assert found[family]["shares"] == [1 / RANKS, 1 / RANKS]


@pytest.mark.parametrize("kind", ["static", "eager"])
def test_passes_of_fixed_shapes_and_plain_ones_are_split_as_well(found: Any, kind: str) -> None:
    """As a GPU records them; and those of models that paged passes cannot serve."""
    assert list(found["llama"][kind].values()) == [found["llama"]["alone"]["off sampled"]] * len(MODES)


def test_adapters_are_split_with_the_layers_that_they_are_for(found: Any) -> None:
    off = found["adapters"]["adapters"]
    assert off["plain"] < 1e-5 and off["adapted"] < 1e-5 and off["apart"] > 0.05


def test_a_follower_without_memory_ends_all_ranks(found: Any) -> None:
    said, seconds = found["short"]["short"]
    assert "rank 1 of 2 failed: OutOfMemoryError: CUDA out of memory" in said and seconds < WITHIN


def test_heads_that_cannot_be_shared_out_stay_whole() -> None:
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    assert attention_is_whole(config, 2) and not attention_is_whole(config, 3)
    plan = plan_for(config, 2)
    assert "layers.*.mlp.up_proj" in plan and not any("attn" in name for name in plan)
    assert plan_for(config, 3) == LlamaConfig.base_model_tp_plan


def test_sums_of_three_ranks_have_one_order_whatever_their_size(tmp_path: Path) -> None:
    """The library's own depends on the size, and the check of a model says so."""
    command = [sys.executable, "-c", ALONE]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=-1, text=True) for rank in range(3)
    ]
    for rank in ranks:
        assert json.loads(rank.communicate(timeout=120)[0]) == [True, True, True]


def test_a_script_of_torchrun_has_the_same_results_on_every_rank(place: Path) -> None:
    ended(start("script", place, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"))
    first, second = (json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(RANKS))
    assert first == second
    text, tokens, depths, sampled, begun, pieces, error = first
    assert len(tokens) == 10 and [len(one) for one in sampled] == [10, 10] and all(key.isdigit() for key in depths)
    assert "".join(pieces) == text and pieces[0] == begun and "the prompt is empty" in error


def test_a_rank_0_that_hangs_is_ended(place: Path) -> None:
    process = start("guarded", place)
    assert process.stdout is not None
    (follower,) = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert process.wait(WITHIN) == -signal.SIGKILL and time.monotonic() - begun < WITHIN
    while is_running(follower):
        assert time.monotonic() - begun < WITHIN
        time.sleep(0.1)


def test_a_command_starts_its_ranks_and_leaves_none_behind(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftgraph", "compare", "the cat sat on", "--target", str(place / "tiny")]
    command += ["--draft", "self", "--raw", "--max-new-tokens", "4", "--repeat", "1", "--no-llama", "--json"]
    command += ["--tensor-parallel", str(RANKS), "--device", "cpu", "--dtype", "float32"]
    own = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["same_tokens"], done.stderr
    assert not done.stderr.strip(), done.stderr
    wait_until(lambda: not meeting_places(tmp_path) and not mentioning(tmp_path))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def test_what_cannot_be_split_is_refused_by_name(run: Runner, place: Path) -> None:
    tiny = ("--target", place / "tiny", "--device", "cpu")
    refused(run("generate", "x", *tiny, "--tensor-parallel", 0), "at least 1")
    refused(run("generate", "x", *tiny, "--tensor-parallel", 2, "--quantize", "int8"), "quantize")
    refused(run("generate", "x", "--target", place / "none", "--tensor-parallel", 2), "no folder", status=1)
    refused(run("distill", *tiny, "--tensor-parallel", 2), "--tensor-parallel")
    refused(run("bench", "draft", place, *tiny, "--tensor-parallel", 2), "--tensor-parallel")


def test_messages_hold_arrays_as_they_are() -> None:
    """Texts, numbers, and arrays of every kind that passes are told of."""
    value = ["run", 3, [None, True, 0.5, {"a": [1, 2]}], np.arange(5), np.tri(3, dtype=bool), torch.ones(2, 3)]
    value += [torch.tensor([1.5, -2.0], dtype=torch.bfloat16), np.zeros((0, 4)), np.int64(7)]
    found = unpacked(packed(value))
    assert found[:3] == value[:3] and found[8] == 7
    for one, other in zip(found[3:8], value[3:8], strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        assert (one == other).all()
    with pytest.raises(TypeError, match="a set cannot be told"):
        packed([{1}])


class Served:
    """`draftgraph serve --tensor-parallel` with the default pair, in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "draftgraph", "serve", "--tensor-parallel", str(RANKS), "--port", "0"]
        command += ["--device", "cpu", "--dtype", "float32", "--cost", "flat", "--max-nodes", "8", "--slots", "16384"]
        self.process = subprocess.Popen(
            command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.url is not None or self.process.poll() is not None, 120)
        assert self.url is not None, self.lines

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def url(self) -> str | None:
        said = (re.search(r"(http://\S+) loads", line) for line in list(self.lines))
        return next((one[1] for one in said if one), None)

    @property
    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready").status_code == 200

    @property
    def ranks(self) -> list[int]:
        (engine,) = children(self.process.pid)
        return [engine, *children(engine)]

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300.0)

    def answer(self) -> str:
        asked = {
            "prompt": "Why is the sky blue?",
            "max_tokens": 8,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        said: str = self.client().completions.create(model=DEFAULT_NAME, **asked).choices[0].text
        return said

    def streams(self, count: int) -> list[Stream]:
        """Long answers, each of which has begun."""
        found = [Stream(self.client(), f"Count to {number}.") for number in range(count)]
        wait_until(lambda: all(one.pieces or one.error for one in found), 300)
        assert not any(one.error for one in found)
        return found


class Stream(threading.Thread):
    """An answer that is read as it comes."""

    def __init__(self, client: Any, prompt: str) -> None:
        super().__init__()
        self.client, self.prompt, self.pieces, self.error = client, prompt, 0, ""
        self.start()

    def run(self) -> None:
        asked = {"prompt": self.prompt, "max_tokens": 4000, "temperature": 0, "extra_body": {"ignore_eos": True}}
        try:
            for _ in self.client.completions.create(model=DEFAULT_NAME, stream=True, **asked):
                self.pieces += 1
        except openai.APIError as error:
            self.error = str(error)


@pytest.mark.model
def test_a_server_ends_answers_and_comes_back_when_a_rank_is_killed_or_hangs(default_model_file: Path) -> None:
    server = Served()
    try:
        wait_until(lambda: server.is_ready, 300)
        answer = server.answer()
        for fault, reason, count in ((signal.SIGKILL, "was ended by signal 9", 16), (signal.SIGSTOP, "silent", 1)):
            ranks, streams = server.ranks, server.streams(count)
            os.kill(ranks[1], fault)
            begun = time.monotonic()
            wait_until(lambda: not server.is_ready, WITHIN)
            for one in streams:
                one.join(WITHIN)
                assert f"rank 1 of {RANKS}" in one.error and reason in one.error
            wait_until(lambda old=ranks: not any(map(is_running, old)), WITHIN)
            assert time.monotonic() - begun < WITHIN
            if fault == signal.SIGKILL:
                wait_until(lambda: server.is_ready, 300)
                assert server.answer() == answer and not set(server.ranks) & set(ranks)
    finally:
        left = [one for engine in children(server.process.pid) for one in (engine, *children(engine))]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) in (0, -signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, left)), WITHIN)
