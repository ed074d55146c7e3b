"""What users give the command line: settings from three places, and wrong ones refused in one line."""

import shutil
from typing import Any

import pytest
from cli_tools import PROMPT, Runner, refused, with_window

from draftgraph.errors import DraftGraphError


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


@pytest.fixture
def settings_of(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that `generate` would load its models with."""

    def call(*arguments: object) -> Any:
        seen = []

        def record(settings: Any) -> None:
            seen.append(settings)
            raise DraftGraphError("far enough")

        monkeypatch.setattr("draftgraph.cli.generate.load_pair", record)
        done = run("generate", "hi", *arguments)
        assert seen, done.err
        return seen[0]

    return call


def test_command_line_beats_environment_beats_file(settings_of, tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.write_text('mode = "chain"\nmax-nodes = 9\ntheta_prob = 0\nstop = ["a", "b"]\nraw = true\nrepeat = 5\n')
    settings = settings_of("--config", file)
    assert (settings.mode, settings.max_nodes, settings.theta_prob, settings.raw) == ("chain", 9, 0.0, True)
    assert settings.stop == ["a", "b"]
    monkeypatch.setenv("DRAFTGRAPH_MODE", "tree")
    monkeypatch.setenv("DRAFTGRAPH_CONFIG", str(file))
    assert (settings_of().mode, settings_of().max_nodes) == ("tree", 9)
    settings = settings_of("--mode", "graph", "--no-raw")
    assert (settings.mode, settings.raw) == ("graph", False)


def test_every_setting_has_its_variable(settings_of, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_TARGET", "some/model")
    monkeypatch.setenv("DRAFTGRAPH_TEMPERATURE", "0.5")
    monkeypatch.setenv("DRAFTGRAPH_JSON", "1")
    settings = settings_of()
    assert (settings.target, settings.temperature, settings.json) == ("some/model", 0.5, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"tua = 3", ["'tua'", "did you mean tau?"]),
        (b"k = 4\nmode = graph", ["line 2", "column"]),
        (b"k = 4\n# \xff", ["UTF-8", "line 2"]),
        (b'k = "many"', ["--k", "from the file"]),
        (b"k = true", ["--k", "from the file"]),
        (b"k = 0", ["k must be", "at least 1"]),
        (b"[graph]\nk = 1", ["graph"]),
        (None, ["cannot read", "No such file"]),
    ],
)
def test_a_bad_config_file_is_explained(run, tmp_path, content, words):
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)
    refused(run("generate", "hi", "--config", file), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["prompt is empty"]),
        (["generate", "  \n"], ["prompt is empty"]),
        (["generate", "-"], ["prompt is empty", "stdin"]),
        (["generate", "caf\udce9"], ["UTF-8"]),
        (["generate"], ["PROMPT", "draftgraph generate --help"]),
        (["generate", "hi", "--nonsense"], ["--nonsense"]),
        (["nonsense"], ["nonsense"]),
        (["generate", "hi", "--mode", "magic"], ["mode", "auto", "'magic'"]),
        (["generate", "hi", "--growth", "wild"], ["growth", "best-first"]),
        (["generate", "hi", "--k", "0"], ["k must be", "at least 1"]),
        (["generate", "hi", "--k", "two"], ["--k"]),
        (["generate", "hi", "--tau", "0"], ["tau", "at least 1"]),
        (["generate", "hi", "--theta-prob", "1.5"], ["theta_prob", "between 0 and 1"]),
        (["generate", "hi", "--theta-sib", "nan"], ["theta_sib", "between 0 and 1"]),
        (["generate", "hi", "--max-nodes", "0"], ["max_nodes", "at least 1"]),
        (["generate", "hi", "--max-new-tokens", "0"], ["max_new_tokens", "at least 1"]),
        (["generate", "hi", "--max-new-tokens", "-4"], ["max_new_tokens", "at least 1"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature", "at least 0"]),
        (["generate", "hi", "--temperature", "nan"], ["temperature"]),
        (["generate", "hi", "--top-p", "2"], ["top_p", "between 0 and 1"]),
        (["generate", "hi", "--seed", "-1"], ["seed"]),
        (["generate", "hi", "--stop", ""], ["--stop"]),
        (["chat", "--k", "0"], ["k must be"]),
        (["compare", "hi", "--repeat", "0"], ["repeat", "at least 1"]),
        (["compare", "hi", "--mode", "off"], ["off", "auto"]),
        (["inspect", "hi", "--mode", "off"], ["off", "graph"]),
        (["inspect", "hi", "--out", "graph.png"], ["graph.png", ".svg"]),
        (["inspect", "hi", "--out", "missing/graph.svg"], ["no folder missing"]),
        (["inspect", "hi", "--format", "png"], ["--format"]),
        (["inspect", "hi", "--step", "0"], ["step", "at least 1"]),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(run, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr("draftgraph.pair.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    refused(run(*arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_stdin_that_is_no_text_is_refused(run, folder):
    refused(run("generate", "-", stdin=b"caf\xe9"), "UTF-8", "byte 3")
    refused(run("chat", folder, stdin=b"\xff\n"), "UTF-8")


def test_a_wrong_variable_is_named(run, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_K", "many")
    refused(run("generate", "hi"), "--k", "DRAFTGRAPH_K")


def test_the_context_window_is_respected(run, folder, tmp_path):
    short_window = with_window(folder, tmp_path / "short", 64)
    options = ["--target", short_window, "--raw"]
    refused(run("generate", "the cat " * 80, *options), "context window", "64", "shorten")
    refused(run("generate", PROMPT, *options, "--max-new-tokens", 80), "context window", "at most")
    assert run("generate", PROMPT, *options).status == 0


def test_models_that_cannot_be_used_are_failures(run, folder, tmp_path):
    refused(run("generate", "hi", "--target", tmp_path / "nowhere"), "nowhere", status=1)
    refused(run("generate", "hi", "--target", folder, "--dtype", "int3"), "int3", "float32")
    refused(run("generate", "hi", "--target", folder, "--device", "abacus"), "abacus", "cpu")


def test_nan_weights_are_a_failure(run, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refused(run("generate", "hi", "--target", broken), "not finite", status=1)


def test_the_unexpected_is_one_line_unless_debug(run, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("three\nlines\nlong")

    monkeypatch.setattr("draftgraph.pair.load_model", fail)
    refused(run("generate", "hi"), "ZeroDivisionError: three (run with --debug", status=1)
    done = run("generate", "hi", "--debug")
    assert done.status == 1 and "Traceback" in done.err
