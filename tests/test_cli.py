"""The commands: clean output, the same tokens, exit statuses."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_tools import PROMPT, Done, Runner, with_window

import draftgraph
from draftgraph.cli.chat import Conversation
from draftgraph.cli.generate import Timed
from draftgraph.cli.options import FIELDS
from draftgraph.errors import DraftGraphError

COMMANDS = ("generate", "chat", "compare", "inspect", "doctor")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


@pytest.fixture
def short_window(folder: Path, tmp_path: Path) -> Path:
    return with_window(folder, tmp_path / "short", 64)


# Quick and quiet


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys; from draftgraph.cli import main\n"
        "statuses = [main(['--version']), *(main([*words, '--help']) for words in %r)]\n"
        "assert not any(statuses), statuses\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    ) % [[], *([name] for name in COMMANDS)]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"draftgraph {draftgraph.__version__}\n")
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    assert all("--" + name.replace("_", "-") in done.stdout for name in FIELDS)


def test_shell_completion_offers_modes():
    words = {"_DRAFTGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": "draftgraph generate hi --mode ", "COMP_CWORD": "4"}
    done = subprocess.run([sys.executable, "-m", "draftgraph"], env=os.environ | words, capture_output=True, text=True)
    assert {"auto", "graph", "tree", "chain", "off"} <= set(done.stdout.split())


# generate


def test_generate_streams_text_and_nothing_else(run, folder):
    done = run("generate", PROMPT, "--target", folder, "--max-new-tokens", 12)
    expected = draftgraph.load(str(folder)).generate(PROMPT, max_new_tokens=12)
    assert (done.status, done.out, done.err) == (0, expected.text + "\n", "")


@pytest.mark.parametrize("mode", ["off", "chain", "tree", "graph", "auto"])
def test_json_is_one_object_and_the_same_in_every_mode(run, folder, mode):
    options = ["--draft", "self", "--temperature", 0.7, "--seed", 3, "--max-new-tokens", 16, "--json"]
    done = run("generate", PROMPT, "--target", folder, "--mode", mode, *options)
    answer = json.loads(done.out)
    assert (done.status, done.err, done.out.count("\n")) == (0, "", 1)
    assert set(answer) == {"text", "token_ids", "finish_reason", "stats"}
    assert answer["finish_reason"] == "length" and answer["stats"]["new_tokens"] == 16
    pair = draftgraph.load(str(folder))
    expected = pair.generate(
        PROMPT, config=draftgraph.GraphConfig(mode="off"), temperature=0.7, seed=3, max_new_tokens=16
    )
    assert answer["token_ids"] == expected.token_ids


def test_prompt_from_stdin_and_raw(run, folder):
    done = run("generate", "-", "--raw", "--json", "--max-new-tokens", 3, "--target", folder, stdin=b"the cat\n")
    stats = json.loads(done.out)["stats"]
    assert stats["prompt_tokens"] == len(draftgraph.load(str(folder)).tokenizer("the cat")["input_ids"])


def test_stop_ends_the_answer(run, folder):
    options = ["generate", PROMPT, "--target", folder, "--max-new-tokens", 12, "--json"]
    text = json.loads(run(*options).out)["text"]
    wanted = next(character for character in text if character.isascii())
    answer = json.loads(run(*options, "--stop", wanted).out)
    assert answer["finish_reason"] == "stop" and answer["text"].endswith(wanted)


def test_stats_explain_themselves_on_stderr(run, folder):
    options = ["--draft", "self", "--mode", "graph", "--max-new-tokens", 12, "--stats"]
    done = run("generate", PROMPT, "--target", folder, *options)
    for words in ("tokens per pass", "drafted by the model", "depth 1", "draft too unsure", "drafting", "checking"):
        assert words in done.err
    assert "tokens per pass" not in done.out


def test_a_terminal_on_stderr_shows_figures_and_leaves_stdout_clean(run, folder, monkeypatch):
    options = ["generate", PROMPT, "--target", folder, "--max-new-tokens", 12]
    plain = run(*options)
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes stderr for a terminal
    done = run(*options)
    assert done.out == plain.out
    assert "12 tokens" in done.err and "tok/s" in done.err and "tokens per pass" in done.err


def test_without_temperature_a_sampling_option_is_said_to_do_nothing(run, folder):
    done = run("generate", "hi", "--target", folder, "--top-p", 0.9, "--max-new-tokens", 2)
    assert done.status == 0 and "top_p" in done.err and "temperature" in done.err


@pytest.mark.model
def test_default_model_answers(run, default_model_file):
    done = run("generate", "hi", "--max-new-tokens", 8, "--json")
    answer = json.loads(done.out)
    assert done.status == 0 and answer["text"] and len(answer["token_ids"]) <= 8


def test_ctrl_c_ends_generate_with_130(run, folder, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftgraph.pair.Pair.pieces", interrupted)
    assert run("generate", "hi", "--target", folder) == Done(130, "", "")


def test_a_reader_that_leaves_is_no_error(folder):
    command = [sys.executable, "-m", "draftgraph", "generate", "hi", "--target", str(folder)]
    process = subprocess.Popen([*command, "--max-new-tokens", "9000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


# chat


def test_chat_takes_turns_from_a_pipe(run, folder):
    lines = b"the cat\n\nthe dog\n/stats\n/nonsense\n/clear\nthe cat\n/exit\nnever asked\n"
    done = run("chat", folder, "--max-new-tokens", 6, "--json", stdin=lines)
    first, second, third = map(json.loads, done.out.splitlines())
    pair = draftgraph.load(str(folder))
    turns = [{"role": "user", "content": "the cat"}]
    assert first["token_ids"] == third["token_ids"] == pair.generate(turns, max_new_tokens=6).token_ids
    turns += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "the dog"}]
    assert second["token_ids"] == pair.generate(turns, max_new_tokens=6).token_ids
    assert done.status == 0 and "target passes" in done.err and "no /nonsense" in done.err


def test_chat_without_a_template_continues_a_text(run, folder, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    done = run("chat", "--target", base, "--max-new-tokens", 4, stdin=b"the cat\nthe dog\n")
    assert done.status == 0 and done.out.count("\n") >= 2
    assert "no chat template" in done.err and done.err.count("\n") == 1


def test_chat_keeps_its_cache_and_what_was_said_before_an_interruption(folder):
    pair = draftgraph.load(str(folder))
    conversation = Conversation(pair, {"raw": False, "max_new_tokens": 64})
    decoding = conversation.ask("the cat")
    for _ in range(3):  # then Ctrl-C
        decoding.step()
    conversation.keep(decoding)
    assert conversation.turns[-1] == {"role": "assistant", "content": pair.output(decoding).text}
    context, fed = decoding.context, []
    original = context.prefill
    context.prefill = lambda tokens, *rest: original(fed.extend(tokens) or tokens, *rest)
    following = conversation.ask("the dog")
    assert following.prompt_length - len(fed) > decoding.prompt_length  # the first turn was not read again


def test_a_conversation_that_outgrows_the_window_is_told(run, short_window):
    done = run("chat", short_window, "--max-new-tokens", 20, stdin=b"the cat sat on the mat\n" * 5)
    assert done.status == 1 and done.err.count("\n") == 1
    assert "64" in done.err and "/clear" in done.err


def read_until(terminal: int, words: bytes, seconds: float = 60) -> bytes:
    text, end = b"", time.monotonic() + seconds
    while words not in text:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"waited for {words!r}, got {text[-500:]!r}"
        text += os.read(terminal, 4096)
    return text


def test_ctrl_c_stops_the_answer_and_not_the_chat(folder):
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "draftgraph", "chat", str(folder), "--max-new-tokens", "20000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment)
    os.close(its_end)
    try:
        read_until(terminal, b"> ")
        os.write(terminal, b"the cat\n")
        read_until(terminal, b"the cat\r\n")
        os.read(terminal, 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        assert b"tok/s" in read_until(terminal, b"> ")
        for _ in range(60):  # at the prompt it stops nothing; one that comes before input() waits is seen with the next
            process.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 1)[0]:
                break
        read_until(terminal, b"leaves")
        os.write(terminal, b"/stats\n")
        read_until(terminal, b"tokens per pass")
        os.write(terminal, b"/exit\n")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(terminal)


# compare, inspect, doctor


def test_compare_finds_the_same_tokens(run, folder):
    options = ["--target", folder, "--draft", "self", "--mode", "graph", "--max-new-tokens", 16, "--repeat", 2]
    done = run("compare", PROMPT, *options, "--temperature", 0.8, "--json")
    figures = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    assert figures["same_tokens"] is True and figures["mode"] == "graph"
    assert set(figures["tokens_per_second"]) == {"off", "graph"} and figures["ratio"] > 0
    assert figures["tokens_per_pass"]["off"] == 1.0 < figures["tokens_per_pass"]["graph"]
    shown = run("compare", PROMPT, *options, "--mode", "graph").out
    assert "times as fast" in shown and "16 tokens are the same" in shown


def test_compare_fails_when_tokens_differ(run, folder, monkeypatch):
    original = Timed.run

    def wrong(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if self.config.mode != "off":
            self.outputs[-1].token_ids[4] += 1

    monkeypatch.setattr(Timed, "run", wrong)
    done = run("compare", PROMPT, "--target", folder, "--max-new-tokens", 8, "--repeat", 1)
    assert done.status == 1 and "DIFFER" in done.out and "from token 5 on" in done.err


def test_inspect_prints_the_steps(run, folder):
    options = ["--target", folder, "--theta-prob", 0, "--max-depth", 3, "--steps", 2]
    done = run("inspect", PROMPT, *options)
    assert done.status == 0 and "Step 2 of 2" in done.out
    assert "drafted by the target itself" in done.err
    one = run("inspect", PROMPT, *options, "--step", 2).out
    assert "Step 2 of 2" in one and "Step 1 of 2" not in one
    refused_step = run("inspect", PROMPT, "--target", folder, "--max-new-tokens", 2, "--step", 9)
    assert refused_step.status == 2 and "step must be between 1 and" in refused_step.err


@pytest.mark.parametrize("suffix", ["html", "svg", "dot", "json"])
def test_inspect_writes_a_file_and_nothing_else(run, folder, tmp_path, suffix):
    options = ["--target", folder, "--theta-prob", 0, "--max-depth", 3, "--max-new-tokens", 8]
    file = tmp_path / f"graph.{suffix}"
    done = run("inspect", PROMPT, *options, "--out", file)
    assert (done.status, done.out) == (0, "") and str(file.name) in done.err.replace("\n", "")
    document = file.read_text()
    start = {"html": "<!doctype html>", "svg": "<svg", "dot": "digraph", "json": "{"}[suffix]
    assert document.startswith(start) and [file] == list(tmp_path.iterdir())
    assert run("inspect", PROMPT, *options, "--format", suffix).out.strip()[:5] == document.strip()[:5]


def test_inspect_json_is_a_report_and_an_answer(run, folder):
    from draftgraph.inspect import GraphReport

    done = run("inspect", PROMPT, "--target", folder, "--draft", "none", "--max-new-tokens", 8, "--json")
    answer = json.loads(done.out)
    assert {"text", "token_ids", "finish_reason", "stats", "steps"} <= set(answer)
    assert len(GraphReport.from_json(done.out).steps) == answer["stats"]["steps"]
    assert "copies from the text only" in done.err


def test_a_file_that_cannot_be_written_leaves_the_old_one(run, folder, tmp_path, monkeypatch):
    file = tmp_path / "graph.dot"
    file.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftgraph.files.os.replace", full)
    done = run("inspect", PROMPT, "--target", folder, "--max-new-tokens", 4, "--out", file)
    assert done.status == 1 and "No space left" in done.err
    assert file.read_text() == "old" and [file] == list(tmp_path.iterdir())


def test_doctor_is_content_and_tells_no_secret(run, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = run("doctor", "--target", folder, "--json")
    diagnosis = json.loads(done.out)
    assert done.status == 0 and diagnosis["ok"] and "hf_secret" not in done.out
    assert diagnosis["versions"]["draftgraph"] == draftgraph.__version__ and diagnosis["hub"]["HF_TOKEN"] == "set"
    assert {check["name"] for check in diagnosis["checks"]} >= {"modes", str(folder)}


def test_doctor_fails_when_something_is_wrong(run, tmp_path, monkeypatch):
    def broken() -> str:
        raise DraftGraphError("mode graph gives other tokens than off")

    monkeypatch.setattr("draftgraph.cli.doctor.every_mode_equals_off", broken)
    done = run("doctor")
    assert done.status == 1 and "WRONG" in done.out and "other tokens than off" in done.out.replace("\n", " ")
