"""Methods of other libraries in `bench run`: timed in the same turns, and where they fail a row that says why."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from bench_tools import pair_in, write_tasks
from cli_tools import Runner

from draftgraph.bench import bench_run, methods
from draftgraph.bench.methods import Answer, Exports, Generate
from draftgraph.bench.runs import Place, Record, read_records
from draftgraph.bench.speed_report import SpeedReport, diagnoses
from draftgraph.bench.structures import HF_METHODS, LLAMA_METHODS
from draftgraph.models.draft import cut_student, lend_output_rows
from draftgraph.pair import Pair

TASKS = {"cats": ["the cat sat", "a cat"]}
QUICK = ["hf", "hf-assisted", "hf-assisted-constant", "hf-lookup"]
STAND_IN = """
import os, sys, threading, time
__version__ = "9.9"
print("a log line on stdout")
if os.environ.get("VLLM_STAND_IN") == "broken":
    print("ValueError: no such quantisation", file=sys.stderr)
    raise RuntimeError("Engine core initialization failed. See root cause above.")

class SamplingParams:
    def __init__(self, **given):
        self.given = given
        assert given["temperature"] == 0.0 and given["ignore_eos"]

class LLM:
    def __init__(self, **options):
        assert os.path.exists(os.path.join(options["model"], "model.safetensors")), options
        draft = options.get("speculative_config", {}).get("model")
        assert draft is None or os.path.exists(os.path.join(draft, "config.json"))
        assert options["enable_prefix_caching"] is False and options["dtype"] == "float32"
        assert options["disable_log_stats"] is False
        if os.environ.get("VLLM_STAND_IN") == "busy":
            threading.Thread(target=self.count, daemon=True).start()

    def count(self):
        while True:
            time.sleep(0.001)
            with open(os.environ["VLLM_COUNT"], "a") as stream:
                stream.write(".")

    def generate(self, prompt, sampling, use_tqdm):
        if os.environ.get("VLLM_STAND_IN") == "dying":
            os._exit(3)
        tokens = list(range(sampling.given["max_tokens"]))
        time.sleep(0.002)
        told = type("", (), {"first_token_ts": time.monotonic()})
        time.sleep(0.002 * (len(tokens) - 1))
        return [type("", (), {"outputs": [type("", (), {"token_ids": tokens})], "metrics": told})]
"""

LLAMA_STAND_IN = """
import enum, os, sys
from types import SimpleNamespace as Some
__version__ = "8.8"
print("a log line on stdout")
KINDS = ("SIMPLE", "MAP_K", "MAP_K4V", "MOD", "CACHE")
common_speculative_type = enum.Enum("", [f"COMMON_SPECULATIVE_TYPE_NGRAM_{kind}" for kind in KINDS])

def CommonParams():
    return Some(model=Some(), cpuparams=Some(), cpuparams_batch=Some(), speculative=Some(types=[]))

class Server:
    def __init__(self, params):
        self.params, self.asked = params, 0
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads > 0 and params.n_ctx >= 6
        if open(params.model.path).read() != "GGUF":
            print("0.00 E load: error loading model: unknown model architecture: 'x'", file=sys.stderr, flush=True)
            raise RuntimeError("Failed to init server, please check the input params.")

    def handle_completions(self, asked):
        self.asked += 1
        if asked["temperature"]:
            return {"error": {"message": f"sampled at {asked['temperature']}"}}
        assert not asked["cache_prompt"] and asked["repeat_last_n"] >= 0
        if len(asked["prompt"]) + asked["max_tokens"] > self.params.n_ctx:
            return {"error": {"message": "too long"}}
        assert all(isinstance(token, int) for token in asked["prompt"])
        drafts = [kind.name for kind in self.params.speculative.types]
        if drafts == ["COMMON_SPECULATIVE_TYPE_NGRAM_MOD"] and self.asked > 1:
            return {"error": {"message": "it remembers what it answered"}}
        tokens = list(range(asked["max_tokens"]))
        timings = {"prompt_ms": 4.0, "predicted_ms": 2.0 * (len(tokens) - 1)}
        drafted = {"draft_n_accepted": 3} if drafts else {}
        return {"timings": timings | drafted, "__verbose": {"tokens": tokens}}
"""

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A python that finds packages which answer like vllm and xllamacpp."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(STAND_IN)
    (tmp_path / "site" / "xllamacpp.py").write_text(LLAMA_STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return sys.executable


def small(pair: Pair, out: Path, modes: list[str], **changes: Any) -> SpeedReport:
    return bench_run(pair, TASKS, out, modes=modes, **{"max_new_tokens": 6, "repeats": 2} | changes)


def runs_of(out: Path, mode: str) -> list[Record]:
    return [record for record in read_records(out) if record["kind"] == "run" and record["mode"] == mode]


# transformers


def test_peers_are_timed_in_the_turns_of_our_modes_and_give_the_same_tokens(pair: Pair, tmp_path: Path) -> None:
    report = small(pair, tmp_path, ["chain-2", *QUICK])
    places = [Place.of(record) for record in read_records(tmp_path) if record["kind"] == "run"]
    assert [place.mode for place in places[:6]] == ["off", "chain-2", *QUICK]
    assert not report.failed and report.measured == report.planned == 2 * 2 * 6
    for mode in QUICK:
        figures = report.mode(mode)
        assert figures.same == figures.answers == 4 and figures.library is not None
        assert figures.overall.ms_per_token > 0 and figures.overall.first_token_ms > 0
        assert figures.overall.tokens_per_pass is None and figures.acceptance is None
        assert all(run["new_tokens"] == 6 and "steps" not in run for run in runs_of(tmp_path, mode))
    assert not list(tmp_path.glob(".models-*"))
    count = len(read_records(tmp_path))
    small(pair, tmp_path, ["chain-2", *QUICK])
    assert len(read_records(tmp_path)) == count + 1, "only that it was called again"


def test_a_draft_of_fewer_tokens_assists_as_a_plain_model(folder: Path, tmp_path: Path) -> None:
    whole = pair_in(folder)
    draft = cut_student(whole.target, [0])
    lend_output_rows(draft, whole.target, torch.arange(0, whole.target.config.vocab_size, 2))
    pair = Pair(whole.target, draft, whole.tokenizer)
    report = small(pair, tmp_path, ["hf-assisted"], repeats=1)
    assert not report.failed and report.mode("hf-assisted").same == 2


def test_nothing_is_claimed_of_what_a_peer_samples(pair: Pair, tmp_path: Path) -> None:
    report = small(pair, tmp_path, ["hf"], temperature=0.9, top_p=0.9, seed=3)
    assert report.mode("hf").same is None and report.mode("off").same == 4
    first, again = (run["tokens_digest"] for run in runs_of(tmp_path, "hf") if run["prompt"] == 0)
    assert first == again, "the same seed every time"


def test_transformers_is_short_for_its_methods(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generate, "answer", lambda self, prompt: Answer([1, 2], 1, 0.1, 0.1))
    report = small(pair, tmp_path, ["off"], transformers=True, repeats=1)
    assert [mode.mode for mode in report.modes] == ["off", *HF_METHODS] and not report.mode("hf").same


# Failing


def test_a_method_that_fails_is_given_up_and_the_others_go_on(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = Generate.answer, []

    def failing(self: Generate, prompt: str) -> Answer:
        if self.name == "hf-lookup":
            asked.append(prompt)
            if len(asked) == 3:  # a warm-up, an answer, and no more
                raise RuntimeError("out of luck\nand more")
        return honest(self, prompt)

    with monkeypatch.context() as patched:
        patched.setattr(Generate, "answer", failing)
        report = small(pair, tmp_path, ["hf-lookup", "hf"])
    assert len(asked) == 3 and report.failed == {"hf-lookup": "RuntimeError: out of luck"}
    assert report.measured == report.planned == 9 and report.mode("hf").answers == 4
    report = small(pair, tmp_path, ["hf-lookup", "hf"])
    assert not report.failed and report.measured == report.planned == 12, "the next call tries again"


def test_without_a_draft_there_is_no_assistant(pair: Pair, tmp_path: Path) -> None:
    alone = Pair(pair.target, None, pair.tokenizer)
    report = small(alone, tmp_path, ["hf-assisted"])
    assert report.failed == {"hf-assisted": "this pair has no draft model"}
    themselves = Exports(Pair(pair.target, pair.target, pair.tokenizer), pair.target, tmp_path)
    with pytest.raises(Exception, match="the target drafts for itself"):
        _ = themselves.assistant


# vLLM


def test_vllm_answers_from_an_environment_of_its_own(pair: Pair, tmp_path: Path, stand_in: str) -> None:
    modes = ["vllm", "vllm-ngram", "vllm-draft"]
    report = small(pair, tmp_path / "out", modes, vllm=stand_in, repeats=1)
    assert not report.failed and [mode.mode for mode in report.modes] == ["off", *modes]
    for run in (run for mode in modes for run in runs_of(tmp_path / "out", mode)):
        assert run["tokens"] == [0, 1, 2, 3, 4, 5] and not run["same"] and run["seconds"] >= 0
        assert "resident_bytes" not in run, "it is another process"
        assert 1.9 < run["ms_per_token"] < 100 and run["first_token_seconds"] > 0.0019
    assert report.mode("vllm").library == "vllm 9.9"
    assert not list((tmp_path / "out").glob(".models-*"))


def test_a_vllm_that_is_not_asked_is_stopped(
    pair: Pair, tmp_path: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    count.touch()
    monkeypatch.setenv("VLLM_STAND_IN", "busy")
    monkeypatch.setenv("VLLM_COUNT", str(count))
    worker = methods.Worker("vllm", stand_in, tmp_path / "log", torch.device("cpu"))
    pair.target.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "enable_prefix_caching": False, "dtype": "float32"}
    assert worker.ask(options | {"library": "vllm", "disable_log_stats": False}) == {"library": "vllm 9.9"}
    sizes = []
    for _ in range(3):
        time.sleep(0.1)
        sizes.append(count.stat().st_size)
        time.sleep(0.2)
        assert count.stat().st_size == sizes[-1], "it does nothing while others are timed"
        question = {"prompt": [1], "sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}}
        assert len(worker.ask(question)["tokens"]) == 40
    assert sizes[2] > sizes[1] > sizes[0], "it goes on when it is asked"
    worker.close()


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("broken", "ValueError: no such quantisation"), ("dying", "the worker of vllm ended")]
)
def test_a_vllm_that_fails_says_why(
    pair: Pair, tmp_path: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch, behaviour: str, reason: str
) -> None:
    monkeypatch.setenv("VLLM_STAND_IN", behaviour)
    report = small(pair, tmp_path / "out", ["vllm"], vllm=stand_in, repeats=1)
    assert report.failed == {"vllm": reason} and report.measured == report.planned == 2


def test_a_silent_vllm_is_ended(pair: Pair, tmp_path: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "PATIENCE", 0.2)
    (tmp_path / "site" / "vllm.py").write_text("import time; time.sleep(60)")
    report = small(pair, tmp_path / "out", ["vllm"], vllm=stand_in, repeats=1)
    assert report.failed == {"vllm": "vllm gave no answer in 0.2 seconds"}


# llama.cpp


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """All that the stand-in looks at."""
    (tmp_path / "tiny.gguf").write_text("GGUF")
    return tmp_path / "tiny.gguf"


def test_llama_answers_from_an_environment_of_its_own(pair: Pair, tmp_path: Path, stand_in: str, gguf: Path) -> None:
    out = tmp_path / "out"
    report = small(pair, out, ["auto"], llama=stand_in, gguf=gguf)
    assert not report.failed and [mode.mode for mode in report.modes] == ["off", "auto", *LLAMA_METHODS]
    assert {mode.library for mode in report.modes[2:]} == {"llama.cpp (xllamacpp 8.8)"}
    for run in (run for mode in LLAMA_METHODS for run in runs_of(out, mode)):
        assert run["ms_per_token"] == pytest.approx(2.0) and run["first_token_seconds"] == 0.004
        assert 0 < run["resident_bytes"] < runs_of(out, "off")[0]["resident_bytes"] and run["steps"] == (
            6 if run["mode"] == "llama" else 3
        )
    plain = report.mode("llama")
    assert plain.load_seconds is not None and plain.tokens_per_second == pytest.approx(500.0)
    read = fmean(run["prompt_tokens"] for run in runs_of(out, "llama"))
    assert plain.prompt_tokens_per_second == pytest.approx(read / 0.004)
    assert not list(out.glob(".models-*"))


def test_tokens_of_llama_are_not_expected_to_be_the_same(pair: Pair, tmp_path: Path, stand_in: str, gguf: Path) -> None:
    report = small(pair, tmp_path / "out", ["llama"], llama=stand_in, gguf=gguf)
    figures = report.mode("llama")
    assert figures.same is None and figures.equal == 0 and figures.rescored is None
    assert report.mode("off").equal is None, "its sameness is a promise"
    assert "(0 of 4) |" in report.to_markdown()
    assert [one.verdict for one in diagnoses(report)][-1] == "good"
    sampled = small(pair, tmp_path / "two", ["llama"], llama=stand_in, gguf=gguf, temperature=0.5)
    assert sampled.failed == {"llama": "RuntimeError: sampled at 0.5"}


def test_auto_is_shown_beside_the_fastest_method_of_llama(
    pair: Pair, tmp_path: Path, stand_in: str, gguf: Path
) -> None:
    report = small(pair, tmp_path / "out", ["auto", "hf", "llama"], llama=stand_in, gguf=gguf)
    beside = {one.method: one for one in report.beside}
    assert beside.keys() == {"hf", "llama"} and {one.mode for one in report.beside} == {"auto"}
    expected = report.mode("auto").overall.speed.ratio / report.mode("llama").overall.speed.ratio
    assert beside["llama"].speed.ratio == pytest.approx(expected)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{beside['llama'].speed} as fast as llama, the fastest of llama.cpp (xllamacpp 8.8)." in page
    assert "| llama.cpp (xllamacpp 8.8) | llama | auto |" in report.to_markdown()


def test_a_llama_that_cannot_run_says_why(pair: Pair, tmp_path: Path, stand_in: str, gguf: Path) -> None:
    report = small(pair, tmp_path / "none", ["llama"], llama=stand_in, repeats=1)
    assert report.failed == {"llama": "llama.cpp takes a GGUF file as the target, on a CPU and not inflated"}
    gguf.write_text("another")
    report = small(pair, tmp_path / "other", ["llama"], llama=stand_in, gguf=gguf, repeats=1)
    assert report.failed == {"llama": "error loading model: unknown model architecture: 'x'"}
    (tmp_path / "site" / "xllamacpp.py").write_text("raise ModuleNotFoundError('No module named xllamacpp')")
    report = small(pair, tmp_path / "without", ["llama"], gguf=gguf, repeats=1)
    assert report.failed == {"llama": "ModuleNotFoundError: No module named xllamacpp"}, "this python, if none is named"


# The command


def test_the_command_shows_the_rows_and_the_reasons(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = Runner(capsys, monkeypatch), write_tasks(tmp_path / "data", TASKS)
    common = ("bench", "run", "--data", data, "--target", folder, "--new-tokens", 4, "--repeats", 1)
    done = run(*common, "--modes", "off,hf,vllm,vllm-ngram", "--out", tmp_path / "out")
    assert done.status == 0 and "Not measured" in done.out and "give its python, --vllm PYTHON" in done.out
    assert "goes on" not in done.err, "nothing is left to be measured"
    done = run(*common, "--modes", "vllm", "--out", tmp_path / "two", "--vllm", tmp_path / "nowhere", "--json")
    assert "cannot be run: No such file" in json.loads(done.out)["failed"]["vllm"]


def test_the_command_gives_llama_the_file_of_the_target(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data, asked = Runner(capsys, monkeypatch), write_tasks(tmp_path / "data", TASKS), []
    monkeypatch.setattr("draftgraph.bench.speed.bench_run", lambda *_, **given: asked.append(given))
    monkeypatch.setattr("draftgraph.cli.bench.load_pair", lambda settings: None)
    (tmp_path / "tiny.gguf").write_text("GGUF")
    for target in (tmp_path / "tiny.gguf", folder):
        run("bench", "run", "--data", data, "--target", target, "--llama", "python3", "--out", tmp_path / "out")
    assert [(one["llama"], one["gguf"]) for one in asked] == [("python3", tmp_path / "tiny.gguf"), ("python3", None)]


def test_compare_shows_llama_beside_our_modes(
    folder: Path,
    tmp_path: Path,
    stand_in: str,
    gguf: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Runner(capsys, monkeypatch)
    options = ("compare", "the cat sat", "--target", folder, "--mode", "chain", "--max-new-tokens", 6, "--repeat", 2)
    left_out = run(*options, "--llama")
    assert left_out.status == 0 and "llama.cpp is left out: llama.cpp takes a GGUF file" in left_out.err
    assert json.loads(run(*options, "--json").out)["llama"] is None, "the target is no GGUF file"
    monkeypatch.setattr("draftgraph.models.fetch.own_file", lambda target: gguf)
    figures = json.loads(run(*options, "--llama", "--json").out)["llama"]
    assert figures["seconds"] == [pytest.approx(0.014)] * 2 and figures["tokens"] == 6
    assert figures["tokens_per_second"] == pytest.approx(6 / 0.014)
    assert "times as fast as llama.cpp; the 6 tokens are the same" in run(*options, "--llama").out
