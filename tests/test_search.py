"""`tune --search`: it goes on where it was, begins with the paper's setting, gives up bad ones and finds a good one; a
profile changes no token. Time is counted work, so that every run is the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_tools import pair_in, write_tasks
from cli_tools import PROMPT, Runner, refused

from draftgraph import GraphConfig, UsageError
from draftgraph.bench import runs, searching
from draftgraph.bench.runs import Deadline, Record
from draftgraph.bench.searching import ROUNDS, Outcome, SearchReport, search
from draftgraph.bench.speed import pair_key
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.extras import install_command
from draftgraph.pair import Pair, load
from draftgraph.profile import FIELDS, Profile, read_profile

TASKS = {"cats": ["the cat sat", "a cat"], "mats": ["on the mat", "the mat and the cat"]}
DRAWN = {"search.svg", "search.png"}
WRITTEN = {"search.json", "search.md", "profile.toml", searching.TRIALS}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "data", TASKS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


@pytest.fixture(autouse=True)
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers take the time of what was computed for them; their modes, one by one."""
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    decode, modes = Stopwatch.run, []

    def counted(watch: Stopwatch, mode: str, prompt: str, plain: Any) -> Record:
        modes.append(mode)
        run = decode(watch, mode, prompt, plain)
        work = run["steps"] + 0.1 * run["nodes"] + 0.2 * run["draft_passes"]
        return run | {"ms_per_token": work / run["new_tokens"]}

    monkeypatch.setattr(Stopwatch, "run", counted)
    return modes


def small(pair: Pair, out: Path, **changes: Any) -> SearchReport:
    return search(pair, TASKS, out, **{"trials": 4, "max_new_tokens": 6} | changes)


def settings(report: SearchReport) -> list[dict[str, Any]]:
    return [one.setting for one in report.trials]


def profile_of(pair: Pair, file: Path, **setting: Any) -> Path:
    Profile({"mode": "graph"} | setting, pair_key(pair), {"ratio": 1.5}).save(file)
    return file


def test_the_modules_are_found_without_importing_them_by_name():
    import draftgraph

    assert draftgraph.bench.search is search and draftgraph.profile.read_profile is read_profile


def test_the_papers_setting_is_tried_first_and_compared_with_the_best_and_auto(pair, tmp_path):
    report = small(pair, tmp_path / "out")
    paper = GraphConfig(mode="graph")
    assert report.trials[0].paper and report.trials[0].setting == {
        name: getattr(paper, name) for name in ("mode", *searching.space())
    }
    assert [one.name for one in report.compared] == ["trial 1", *(one.name for one in report.compared[1:-1]), "auto"]
    assert len(report.compared) == 2 + searching.FINALISTS and report.rounds == ROUNDS
    assert report.best.outcome.speed.ratio == max(one.outcome.speed.ratio for one in report.compared[:-1])
    assert all(one.outcome.same == one.outcome.answers == ROUNDS * 4 for one in report.compared)


def test_speed_is_tokens_per_pass_over_the_cost_of_a_step(pair, tmp_path):
    one = small(pair, tmp_path / "out", trials=1).trials[0].outcome
    assert one.tokens_per_pass > 1.5 and one.draft_passes > 0.5
    step = 1 + 0.1 * one.nodes_per_pass + 0.2 * one.draft_passes
    assert one.step_cost == pytest.approx(step / 1.1, rel=0.05)  # means over tasks of two kinds


def test_a_search_goes_on_where_it_was(pair, tmp_path, answered):
    first = small(pair, tmp_path / "out", trials=3)
    done = len(answered)
    assert small(pair, tmp_path / "out", trials=3).to_dict() == first.to_dict() and len(answered) == done
    more = small(pair, tmp_path / "out", trials=6)
    assert more.trials[:3] == first.trials and len(more.trials) == 6
    assert len({json.dumps(one) for one in settings(more)}) == 6, "a later call must not draw the same again"
    assert answered[done:].count("trial") <= 3 * 4
    assert read_profile(tmp_path / "out" / "profile.toml").setting == more.best.setting


def test_the_same_seed_tries_the_same(pair, tmp_path):
    tried = [settings(small(pair, tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert tried[0] == tried[1] != tried[2]


def test_ctrl_c_leaves_what_was_found(pair, tmp_path, monkeypatch, capsys, answered):
    decode = Stopwatch.run

    def interrupted(watch, mode, prompt, plain):
        if answered.count("trial") == 10:
            raise KeyboardInterrupt
        return decode(watch, mode, prompt, plain)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(Stopwatch, "run", interrupted)
        small(pair, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} - DRAWN == WRITTEN
    assert "goes on" in capsys.readouterr().err
    known = json.loads((tmp_path / "out" / "search.json").read_text())
    assert len(known["trials"]) == 2 and known["rounds"] == 0 and "no time" in (tmp_path / "out/search.md").read_text()
    report = small(pair, tmp_path / "out")
    assert len(report.trials) == 4 and [one.setting for one in report.trials[:2]] == [
        one["setting"] for one in known["trials"]
    ]


def test_a_killed_search_leaves_nothing_that_hinders(pair, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as context, pytest.raises(SystemExit):
        context.setattr(Stopwatch, "run", lambda *_: sys.exit(1))
        context.setattr("optuna.Study.tell", lambda *_, **__: None)  # as if there had been no time to say so
        small(pair, out)
    assert not (out / "search.md").exists()
    (out / f"{searching.TRIALS}.lock").write_text("")
    with (out / searching.TRIALS).open("a") as file:
        file.write('{"op_code": 5, "wor')
    report = small(pair, out, trials=2)
    assert [one.paper for one in report.trials] == [True, False] and report.trials[0].name == "trial 2"


def test_bad_settings_are_given_up_early(pair, tmp_path, answered):
    report = small(pair, tmp_path / "out", trials=14)
    pruned = [one for one in report.trials if one.pruned]
    assert pruned and not any(one.pruned for one in report.trials[: searching.UNPRUNED])
    assert all(list(one.outcome.tasks) == ["cats"] for one in pruned)
    assert answered.count("trial") == 4 * 14 - 2 * len(pruned)
    assert not {one.name for one in pruned} & {one.name for one in report.compared}
    assert report.best.outcome.speed.ratio >= report.paper.outcome.speed.ratio
    assert set(report.importance) == set(searching.space()) and sum(report.importance.values()) == pytest.approx(1)
    assert f"{len(pruned)} given up early" in (tmp_path / "out" / "search.md").read_text()


def test_measurements_of_other_prompts_lengths_or_models_are_never_mixed(pair, tmp_path):
    small(pair, tmp_path / "out", trials=1)
    with pytest.raises(UsageError, match="max new tokens 6, not 11"):
        small(pair, tmp_path / "out", max_new_tokens=11)
    with pytest.raises(UsageError, match="digest"):
        search(pair, TASKS | {"cats": ["another", "cat"]}, tmp_path / "out", max_new_tokens=6)
    with pytest.raises(UsageError, match="draft"):
        small(Pair(pair.target, None, pair.tokenizer), tmp_path / "out")


def test_a_damaged_file_of_trials_is_refused(pair, tmp_path):
    small(pair, tmp_path / "out", trials=1)
    file = tmp_path / "out" / searching.TRIALS
    file.write_text("no JSON\n" + file.read_text())
    with pytest.raises(UsageError, match="damaged"):
        small(pair, tmp_path / "out")


def test_a_target_alone_is_searched_too(pair, tmp_path):
    report = small(Pair(pair.target, None, pair.tokenizer), tmp_path / "out", trials=2)
    assert len(report.trials) == 2 and report.configuration["draft"] is None
    assert "draft =" not in (tmp_path / "out" / "profile.toml").read_text()


def test_nothing_is_begun_that_would_not_be_done_in_time(pair, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    limit = Deadline(100.0)
    assert limit.allows(1000) and Deadline(None).allows(1000)
    with limit.watch(4):
        now[0] += 20.0
    assert limit.allows(10) and not limit.allows(11)  # half as long again
    decode = Stopwatch.run

    def slow(watch, mode, prompt, plain):
        now[0] += 1.0
        return decode(watch, mode, prompt, plain)

    monkeypatch.setattr(Stopwatch, "run", slow)
    report = small(pair, tmp_path / "out", trials=20, seconds=60)  # 8 a trial, 24 a round at most
    assert len(report.trials) == 2 and report.rounds == 2
    assert small(pair, tmp_path / "out", trials=2).rounds == ROUNDS


def test_a_stall_spoils_no_trial():
    def answer(mode: str, prompt: int, taken: float) -> Record:
        counts = dict.fromkeys(("first_token_seconds", "steps", "new_tokens", "nodes", "draft_passes"), 1)
        told = {"accepted_by_source": {}, "loops": False, "same": True, "tie": False}
        return {"task": "cats", "prompt": prompt, "mode": mode, "repeat": 0, "ms_per_token": taken} | counts | told

    runs = [answer("off", prompt, 4.0) for prompt in range(3)]
    runs += [answer("trial", prompt, taken) for prompt, taken in enumerate((2.0, 400.0, 2.5))]
    outcome = Outcome.of(runs, "trial")
    assert outcome.speed.ratio == outcome.tasks["cats"] == pytest.approx(1.6)


def test_without_matplotlib_there_is_no_picture(pair, tmp_path, monkeypatch):
    small(pair, tmp_path / "drawn", trials=1)
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == WRITTEN | DRAWN
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    small(pair, tmp_path / "out", trials=1)
    assert {file.name for file in (tmp_path / "out").iterdir()} == WRITTEN
    assert "![" not in (tmp_path / "out" / "search.md").read_text()


def test_the_command_shows_tables_and_its_profile_is_used(run, folder, data, tmp_path, monkeypatch):
    options = ["tune", "--search", "--data", data, "--target", folder, "--draft", "self", "--new-tokens", 6]
    options += ["--out", tmp_path / "out", "--save-profile", tmp_path / "new" / "best.toml"]
    options += ["--prompts", 1, "--trials", 2]
    done = run(*options)
    assert done.status == 0 and done.err.count("\n") == 1 and "best.toml" in done.err
    for words in ("paper", "best", "auto", "theta_prob", "cats", "mats", "2 trials"):
        assert words in " ".join(done.out.split())
    report = json.loads(run(*options, "--json").out)
    assert {"best", "compared", "trials", "importance", "configuration", "rounds"} == set(report)
    best, model = report["best"]["setting"], ["--target", folder, "--draft", "self", "--max-new-tokens", 6]
    typed = [word for name, value in best.items() for word in (f"--{name.replace('_', '-')}", value)]
    answers = [
        json.loads(run("generate", PROMPT, *model, *words, "--json").out)
        for words in (["--profile", tmp_path / "new" / "best.toml"], typed)
    ]
    assert answers[0]["stats"]["verified_tokens"] == answers[1]["stats"]["verified_tokens"]
    monkeypatch.setattr(Deadline, "allows", lambda *_: False)
    done = run(*options[:-2], "--trials", 3, "--seconds", 1)
    assert done.status == 0 and "2 of 3 trials" in done.err


def test_wrong_use_is_refused_before_any_work(run, folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.pair.load", None)
    search_options = ["tune", "--search", "--target", folder, "--data", data]
    refused(run("tune", "--search", "--target", folder), "--data")
    refused(run("tune", "--target", folder, "--data", data), "--search")
    refused(run(*search_options, "--max-nodes", 8), "max_nodes", "searched")
    refused(run(*search_options, "--trials", 0), "trials")
    refused(run(*search_options, "--tasks", "dogs"), "dogs")
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(run(*search_options), install_command("tune"))


@pytest.mark.parametrize("seed", range(6))
def test_any_profile_gives_the_same_tokens(pair, tmp_path, seed):
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    setting = searching.setting_of(study.ask(searching.space()))
    config = read_profile(profile_of(pair, tmp_path / "profile.toml", **setting)).config
    for sampling in ({}, {"temperature": 0.8, "seed": seed}):
        answers = [
            pair.generate(PROMPT, config=one, max_new_tokens=16, **sampling).token_ids
            for one in (config, GraphConfig(mode="off"))
        ]
        assert answers[0] == answers[1]


def test_options_that_are_given_win_over_the_profile(run, folder, pair, tmp_path, monkeypatch):
    from draftgraph.cli.options import Settings

    profile = profile_of(pair, tmp_path / "profile.toml", k=3, theta_prob=0.5, growth="best-first", max_nodes=7)
    found = Settings(profile=str(profile), k=2).graph_config()
    assert (found.mode, found.k, found.theta_prob, found.growth, found.max_nodes) == ("graph", 2, 0.5, "best-first", 7)
    assert (found.tau, found.theta_sib) == (2, 0.3), "what the profile leaves out is the mode's"
    assert Settings(profile=str(profile), mode="graph").graph_config().k == 3
    assert Settings(profile=str(profile), mode="auto").graph_config() == GraphConfig()
    assert Settings().graph_config() == GraphConfig()
    done = run("generate", PROMPT, "--target", folder, "--max-new-tokens", 4, "--profile", profile, "--mode", "tree")
    assert done.status == 0 and "mode tree does without" in done.err
    monkeypatch.setenv("DRAFTGRAPH_PROFILE", str(profile))
    done = run("compare", PROMPT, "--target", folder, "--max-new-tokens", 4, "--repeat", 1, "--json")
    assert json.loads(done.out)["mode"] == "graph"


def test_a_profile_of_another_machine_or_pair_is_told_and_used(run, folder, tmp_path):
    here = load(str(folder), "self")
    command = ["generate", PROMPT, "--target", folder, "--draft", "self", "--max-new-tokens", 4, "--profile"]
    assert run(*command, profile_of(here, tmp_path / "here.toml")).err == ""
    for name, value in (("device", "abacus"), ("dtype", "bfloat16"), ("threads", 99), ("draft_weights", "other")):
        file = tmp_path / f"{name}.toml"
        Profile({"mode": "graph"}, pair_key(here) | {name: value}, {}).save(file)
        done = run(*command, file)
        assert done.status == 0 and done.err.count("\n") == 1 and done.err.startswith("draftgraph: "), done.err
        assert f"another {name.removesuffix('_weights')} (" in done.err
        assert name == "draft_weights" or str(value) in done.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff", "not TOML"),
        (b"k = ", "not TOML"),
        (b"k = 4\n", "no profile"),
        (b"format = 1\n[setting]\nmode='graph'\n", "no profile"),
        (b"format = 9\n[setting]\nmode='graph'\n[found_for]\n[measured]\n", "format 9"),
        (b"format = 1\n[setting]\nmode='graph'\nsize=3\n[found_for]\n[measured]\n", "size"),
        (b"format = 1\n[setting]\nk=3\n[found_for]\n[measured]\n", "names no mode"),
        (b"format = 1\n[setting]\nmode='graph'\nk=0\n[found_for]\n[measured]\n", "k must be"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_reason(run, folder, tmp_path, content, reason):
    file = tmp_path / "profile.toml"
    if content is not None:
        file.write_bytes(content)
    refused(run("generate", PROMPT, "--target", folder, "--profile", file), "profile", reason)


def test_bench_run_times_a_profile_beside_the_modes(run, folder, data, tmp_path):
    profile = profile_of(load(str(folder), "self"), tmp_path / "profile.toml", k=2, max_nodes=6)
    options = ["bench", "run", "--data", data, "--target", folder, "--draft", "self", "--prompts", 1, "--repeats", 1]
    options += ["--new-tokens", 6, "--modes", "chain-2", "--out", tmp_path / "out", "--json"]
    report = json.loads(run(*options, "--profile", profile).out)
    assert [mode["mode"] for mode in report["modes"]] == ["off", "chain-2", "profile"]
    assert set(report["configuration"]["profile"]) == set(FIELDS) and report["configuration"]["profile"]["k"] == 2
    profile_of(load(str(folder), "self"), profile, k=3)
    refused(run(*options, "--profile", profile), "holds measurements with profile")
