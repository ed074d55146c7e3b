"""`bench draft`: a replay without the target gives the figures of real decoding; reports and errors are clear."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import Runner, refused, with_window
from families import VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder, UsageError
from draftgraph.bench import answers as answers_module
from draftgraph.bench import bench_draft, replay
from draftgraph.bench.answers import Answer, TargetAnswers, loops
from draftgraph.bench.replay import Replay
from draftgraph.bench.structures import BEST_FIRST, STRUCTURES
from draftgraph.bench.tasks import read_tasks
from draftgraph.extras import install_command
from draftgraph.models.draft import cut_student, save_draft
from draftgraph.models.heads.states import new_states_head
from draftgraph.pair import Pair, load

NEW_TOKENS = 32
PROMPTS = [[1 + (7 * row + 3 * place) % (VOCAB - 1) for place in range(3 + 4 * row)] for row in range(4)]
STRUCTURES_TO_CHECK = STRUCTURES | {
    "loose graph": GraphConfig(mode="graph", tau=1, theta_prob=0.02, theta_sib=0.0),
    "leaf pruning": GraphConfig(mode="graph", sibling_pruning="leaf"),
    "small budget": GraphConfig(mode="tree", max_nodes=6, max_depth=4, growth="best-first"),
}


pytestmark = pytest.mark.usefixtures("own_cache")


def counted(stats: Any) -> dict[str, Any]:
    """What a replay counts as well: neither times, nor what the draft was fed, nor how passes are computed."""
    skipped = ("exact", "seconds", "tokens_per_second", "draft_tokens", "prompt_tokens")
    return {name: value for name, value in stats.to_dict().items() if name not in skipped}


def with_reduced_vocabulary(draft: Any) -> Any:
    kept = torch.tensor([token for token in range(VOCAB) if token % 5])
    draft.lm_head.weight.data = draft.lm_head.weight.data[kept].clone()
    draft.register_buffer("token_map", kept)
    return draft


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "reduced"])
def test_a_replay_equals_real_decoding(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.TRUNK_SLOTS, "cpu", 120)  # several groups of several answers
    monkeypatch.setattr(replay, "CHUNK", 16)
    target = target_of("llama" if family == "reduced" else family)
    draft = perturbed(target, 0.15)
    if family == "reduced":
        draft = with_reduced_vocabulary(draft)
    target.generation_config.eos_token_id = [2, 3]
    decoder = GraphDecoder(target, draft)
    source = TargetAnswers(decoder, NEW_TOKENS, seed=7)
    given = source.to(PROMPTS, temperature)
    assert len({len(answer.tokens) for answer in given}) > 1, "some answer should stop early"
    replayed = Replay(decoder, STRUCTURES_TO_CHECK, NEW_TOKENS, source.stop_ids).along(given)
    sampling: dict[str, Any] = {"do_sample": False}
    for row, one in enumerate(replayed):
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 7 + row}
        for name, config in STRUCTURES_TO_CHECK.items():
            prompt = torch.tensor([one.answer.prompt])
            real = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, config=config, **sampling)
            assert real.new_token_ids == [one.answer.tokens]
            found, expected = counted(one.stats[name]), counted(real.stats)
            if config.mode == "chain":  # written to its end before anybody looks
                assert found.pop("draft_passes") <= expected.pop("draft_passes")
            assert found == expected, (row, name)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_agreement_is_that_of_the_drafts_own_choice(temperature: float) -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.3)
    decoder = GraphDecoder(target, draft)
    given = TargetAnswers(decoder, NEW_TOKENS, seed=1).to(PROMPTS, temperature)
    for one in Replay(decoder, {"chain-4": STRUCTURES["chain-4"]}, NEW_TOKENS, frozenset()).along(given):
        length, text = len(one.answer.prompt), one.answer.prompt + one.answer.tokens
        with torch.no_grad():
            scores = draft(torch.tensor([text])).logits[0, length - 1 : -1].double()
        if temperature:
            noise = answers_module.KeyedNoise(one.answer.seed)
            places = range(length, len(text))
            scores += temperature * torch.stack([noise.gumbel(at, VOCAB, scores.device) for at in places])
        best = scores.topk(4).indices == torch.tensor(one.answer.tokens)[:, None]
        assert (one.agreed, one.agreed_among_several) == (int(best[:, 0].sum()), int(best.sum()))


def test_a_target_that_drafts_for_itself_agrees_everywhere() -> None:
    target = target_of("llama")
    decoder = GraphDecoder(target, target)
    given = [Answer([1, 2, 3], decoder.generate([[1, 2, 3]], max_new_tokens=NEW_TOKENS).new_token_ids[0], 0.0, 0)]
    structures = {"chain-4": STRUCTURES["chain-4"], "chain-8": STRUCTURES["chain-8"]}
    (one,) = Replay(decoder, structures, NEW_TOKENS, frozenset()).along(given)
    assert one.agreed == one.agreed_among_several == NEW_TOKENS
    assert [stats.mean_accepted_length for stats in one.stats.values()] == [32 / 7, 8.0]


@pytest.mark.parametrize(
    "config", [GraphConfig(), GraphConfig(mode="off"), GraphConfig(mode="chain", verification="rejection")]
)
def test_what_needs_the_target_is_not_replayed(config: GraphConfig) -> None:
    target = target_of("llama")
    with pytest.raises(UsageError, match="mine cannot be replayed"):
        Replay(GraphDecoder(target, target), {"mine": config}, 8, frozenset())


def test_a_pair_without_a_draft_is_refused() -> None:
    with pytest.raises(UsageError, match="no draft"):
        Replay(GraphDecoder(target_of("llama")), STRUCTURES, 8, frozenset())


def test_a_head_is_refused() -> None:
    target = target_of("llama")
    head = new_states_head(target, reads=[1]).eval()
    with pytest.raises(UsageError, match="reads the target's states"):
        Replay(GraphDecoder(target, head), STRUCTURES, 8, frozenset())


def test_best_first_structures_are_those_of_the_study() -> None:
    expected = GraphConfig(mode="tree", growth="best-first", k=8, theta_prob=0, theta_sib=0, max_nodes=64, max_depth=8)
    assert STRUCTURES["tree-64"] == expected
    assert all(config.max_nodes == int(name.rpartition("-")[2]) for name, config in list(STRUCTURES.items())[4:])
    assert BEST_FIRST["k"] == GraphConfig(mode="auto").k


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7] * 24, True),
        ([7] * 23, False),
        ([9, *[1, 2, 3] * 8], True),
        ([9, *[1, 2, 3] * 7], False),
        (list(range(20)) * 3, True),
        (list(range(20)) * 2, False),
        ([*range(30), *list(range(24)) * 3], True),
        (list(range(25)) * 3, False),
        ([*[1, 2] * 20, 5], False),
        ([], False),
    ],
)
def test_a_loop_is_a_short_period_at_the_end(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) is expected


# Answers are kept


def test_answers_are_generated_once_per_target_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    honest = answers_module.Sampler.continue_texts

    def counting(self: Any, *arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        return honest(self, *arguments, **more)

    monkeypatch.setattr(answers_module.Sampler, "continue_texts", counting)
    target = target_of("llama")
    first = TargetAnswers(GraphDecoder(target, perturbed(target)), 8).to(PROMPTS, 0.7)
    again = TargetAnswers(GraphDecoder(target, perturbed(target, 0.5)), 8).to(PROMPTS, 0.7)
    assert first == again and len(asked) == 1
    TargetAnswers(GraphDecoder(target), 8).to(PROMPTS, 0.0)
    TargetAnswers(GraphDecoder(target), 8, seed=1).to(PROMPTS, 0.7)
    TargetAnswers(GraphDecoder(target), 9).to(PROMPTS, 0.7)
    TargetAnswers(GraphDecoder(target), 8).to(PROMPTS[:-1], 0.7)
    TargetAnswers(GraphDecoder(target_of("llama", seed=1)), 8).to(PROMPTS, 0.7)
    assert len(asked) == 6


def test_a_damaged_file_of_answers_is_made_again(tmp_path: Path) -> None:
    source = TargetAnswers(GraphDecoder(target_of("llama")), 8)
    first = source.to(PROMPTS, 0.0)
    (file,) = (tmp_path / "cache" / "answers").iterdir()
    file.write_text('[["half')
    assert source.to(PROMPTS, 0.0) == first
    assert len(json.loads(file.read_text())) == len(PROMPTS)


# Reports


@pytest.fixture(scope="module")
def draft_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = load(str(folder))
    place = tmp_path_factory.mktemp("drafts") / "mine"
    perturbed(pair.target, 0.1).save_pretrained(place)
    pair.tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for task in ("cats", "mats"):
        rows = [{"prompt": f"the {task} sat on {row}", "task": "animals"} for row in range(3)]
        (place / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return place


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def test_the_mean_counts_every_task_the_same(folder: Path, draft_folder: Path) -> None:
    pair = load(str(folder), draft=str(draft_folder))
    tasks = {"one": ["the cat"], "three": ["the mat", "a cat sat", "on the mat"]}
    report = bench_draft(pair, tasks, structures={"chain-4": STRUCTURES["chain-4"]}, max_new_tokens=16)
    assert report.temperatures == [0.0, 0.7]
    one, three, mean = report.selected(0.7, "all")
    assert (one.answers, three.answers, mean.answers) == (1, 3, 4)
    assert mean.agreement == pytest.approx((one.agreement + three.agreement) / 2)
    lengths = [row.structures["chain-4"].tokens_per_pass for row in (one, three, mean)]
    assert lengths[2] == pytest.approx((lengths[0] + lengths[1]) / 2)
    assert 1.0 <= min(lengths) <= max(lengths) <= 5.0
    json.dumps(report.to_dict())


def test_looping_answers_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    pair = Pair(
        target, perturbed(target), tokenizer=lambda text: {"input_ids": [ord(letter) % VOCAB for letter in text]}
    )
    monkeypatch.setattr(answers_module, "loops", lambda tokens: tokens[0] == first)
    prompts = ["abcd", "efg", "hi", "jklm"]
    given = TargetAnswers(pair.decoder, 16).to([pair.tokenizer(prompt)["input_ids"] for prompt in prompts], 0.0)
    first = given[0].tokens[0]
    looping = sum(answer.tokens[0] == first for answer in given)
    report = bench_draft(pair, {"letters": prompts}, temperatures=[0.0], max_new_tokens=16)
    everything, without = (report.selected(0.0, selection)[0] for selection in ("all", "without loops"))  # type: ignore[arg-type]
    assert (everything.answers, everything.looping) == (4, looping)
    assert (without.answers, without.looping) == (4 - looping, 0)


def test_the_command_shows_a_table_and_writes_a_report(
    run: Runner, folder: Path, draft_folder: Path, data: Path
) -> None:
    out = data.parent / "new" / "report"
    common = ("bench", "draft", draft_folder, "--data", data, "--target", folder, "--max-new-tokens", 12)
    done = run(*common, "--prompts", 2, "--out", out)
    assert done.status == 0, done
    assert all(word in done.out for word in ("cats", "mats", "mean", "paper", "64", "Greedy", "Temperature 0.7"))
    assert "…" not in done.out
    assert {file.name for file in out.iterdir()} == {"results.json", "results.md", "plot.svg", "plot.png"}
    results = json.loads((out / "results.json").read_text())
    assert results["draft"] == "mine" and results["target"] == "tiny" and results["settings"]["prompts"] == 4
    assert set(results["structures"]) == set(STRUCTURES)
    text = (out / "results.md").read_text()
    assert "| cats |" in text and "| mean |" in text and "](plot.svg)" in text
    assert all("A looping answer ends in" in " ".join(shown.split()) for shown in (text, done.out))
    assert (out / "plot.svg").read_text().lstrip().startswith("<?xml")

    done = run(*common, "--tasks", "mats", "--structures", "chain-4,tree-16", "--temperatures", "0", "--json")
    assert done.status == 0 and done.err == "", done
    rows = json.loads(done.out)["rows"]
    assert {row["task"] for row in rows} == {"mats", "mean"} and {row["temperature"] for row in rows} == {0.0}
    assert all(set(row["structures"]) == {"chain-4", "tree-16"} for row in rows)


def test_a_single_task_has_no_mean_beside_it(run: Runner, folder: Path, draft_folder: Path, data: Path) -> None:
    common = ("bench", "draft", draft_folder, "--data", data / "cats.jsonl", "--target", folder)
    done = run(*common, "--max-new-tokens", 4, "--structures", "chain-4", "--out", data / "out")
    assert done.status == 0 and "cats" in done.out and "all 3 answers (none looping)" in done.out
    for shown in (done.out, *((data / "out" / name).read_text() for name in ("results.md", "plot.svg"))):
        assert "mean" not in shown.lower(), shown


def test_a_trained_draft_is_called_by_its_folder(
    run: Runner, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(folder)).target
    save_draft(cut_student(target, [0]), target, tmp_path / "trained")
    common = ("--data", data, "--target", folder, "--max-new-tokens", 4, "--structures", "chain-4", "--json")
    monkeypatch.chdir(tmp_path / "trained")
    for place in (tmp_path / "trained", "../trained", "."):
        assert json.loads(run("bench", "draft", place, *common).out)["draft"] == "trained"


def test_options_are_read_from_a_file(run: Runner, folder: Path, draft_folder: Path, data: Path) -> None:
    file = data / "bench.toml"
    models = f'target = "{folder}"\ndata = ["{data}"]\n'
    file.write_text(models + 'structures = "chain-4"\nprompts = 2\nmax-new-tokens = 5\ntemperatures = "0"\n')
    done = run("bench", "draft", draft_folder, "--config", file, "--prompts", 1, "--json")
    assert done.status == 0, done
    report = json.loads(done.out)
    assert set(report["structures"]) == {"chain-4"}
    assert report["target"] == "tiny" and {row["temperature"] for row in report["rows"]} == {0.0}
    assert (report["settings"]["prompts"], report["settings"]["max_new_tokens"]) == (2, 5), "one of each task"


def test_wrong_use_is_one_line(run: Runner, folder: Path, data: Path, tmp_path: Path) -> None:
    bench = ("bench", "draft", folder, "--target", folder)
    refused(run(*bench), "--data")
    refused(run(*bench, "--data", tmp_path / "nowhere"), "there is no file or folder")
    refused(run(*bench, "--data", data, "--tasks", "cats,dogs"), "no task dogs", "cats, mats")
    refused(run(*bench, "--data", data, "--data", data / "cats.jsonl"), "two tasks are named cats")
    refused(run(*bench, "--data", data, "--structures", "bush"), "no structure bush", "paper-tree")
    refused(run(*bench, "--data", data, "--temperatures", "0,warm"), "temperatures must be numbers")
    refused(run(*bench, "--data", data, "--temperatures", "-1"), "temperatures must be")
    refused(run(*bench, "--data", data, "--prompts", 0), "prompts must be")
    refused(run(*bench, "--data", data, "--out", data / "cats.jsonl"), "cannot be written")
    refused(run("bench", "draft", tmp_path / "nowhere", "--data", data, "--target", folder), "nowhere", status=1)
    refused(run("bench"), "Missing command")


def test_a_prompt_past_the_window_is_named(run: Runner, folder: Path, data: Path, tmp_path: Path) -> None:
    short = with_window(folder, tmp_path / "short", 64)
    long = json.dumps({"prompt": "the cat sat " * 40})
    (data / "mats.jsonl").write_text(f'{{"prompt": "hi"}}\n{long}')
    done = run("bench", "draft", short, "--data", data, "--target", short, "--max-new-tokens", 8)
    refused(done, "prompt 2 of mats", "context window of 64")


def test_a_missing_matplotlib_is_named_before_any_work(
    run: Runner, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("draftgraph.cli.bench.load_pair", lambda settings: pytest.fail("loaded"))
    done = run("bench", "draft", folder, "--data", data, "--out", tmp_path / "out")
    refused(done, install_command("bench"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "task.jsonl has no rows"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: no prompt"),
        ('\n{"prompt": ""}', "line 2: no prompt"),
        ('{"prompt": "a"}\n["b"]', "line 2: no prompt"),
        ('{"prompt": "a"}\n\n{"prompt": "b"', "line 3: not JSON"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_broken_task_is_named_with_its_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words):
        read_tasks([file])


def test_only_the_first_prompts_are_read(data: Path) -> None:
    (data / "cats.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\nnonsense')
    assert read_tasks([data], ["cats"], 2) == {"cats": ["a", "b"]}
    assert list(read_tasks([data / "mats.jsonl", data / "cats.jsonl"], prompts=1)) == ["mats", "cats"]


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no"):
        read_tasks([tmp_path])
