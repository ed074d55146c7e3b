"""The model of lm-evaluation-harness: the numbers and texts of the harness's own model, in every mode."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from string import printable
from typing import Any

import pytest
import torch
from cli_tools import PROMPT, Runner, refused, save_tiny_model, with_window
from families import perturbed
from tiny_models import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftgraph.errors import UsageError
from draftgraph.extras import install_command

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'draftgraph[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from draftgraph.evaluation import DraftGraphLM

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
same_answers = import_module("same_answers")

WINDOW = 64
MODES = ("off", "chain", "tree", "graph", "auto")
LONG = " ".join([PROMPT] * 12)  # more tokens than the window has
CHAT = "<|user|>the cat<|end|><|user|>the mat<|end|><|assistant|>"  # with the token that the harness pads with
CONTEXTS = [PROMPT, "the mat", "the dog ran", "a cat sat on the the the", "trailing space ", CHAT, LONG]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose tokens are all of readable characters, so that stop strings can be cut out of its answers."""
    place = tmp_path_factory.mktemp("evaluated")
    return str(with_window(save_tiny_model(place / "model", list("Ġ" + printable[:94])), place / "target", WINDOW))


@pytest.fixture(scope="module")
def draft(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that is often wrong."""
    place = tmp_path_factory.mktemp("evaluated") / "draft"
    perturbed(AutoModelForCausalLM.from_pretrained(target), 0.3).save_pretrained(place)
    AutoTokenizer.from_pretrained(target).save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def harness(target: str) -> Any:
    return HFLM(target, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def ours(target: str, draft: str) -> Any:
    return lambda mode="auto", **more: DraftGraphLM(target=target, draft=draft, mode=mode, device="cpu", **more)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def answers(lm: Any, contexts: list[str], **wanted: Any) -> list[str]:
    return lm.generate_until(requests("generate_until", *((context, wanted) for context in contexts)))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_are_those_of_the_harness(harness: Any, ours: Any, batch_size: int) -> None:
    likeliest = zip(CONTEXTS, answers(harness, CONTEXTS, max_gen_toks=1), strict=True)
    others = [
        (context, continuation) for context in ["", *CONTEXTS] for continuation in (" sat on", " the mat and cat")
    ]
    asked = requests("loglikelihood", *likeliest, *others)
    found, expected = (lm.loglikelihood(asked) for lm in (ours(batch_size=batch_size), harness))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rolling_log_likelihoods_are_those_of_the_harness(harness: Any, ours: Any, batch_size: int) -> None:
    asked = requests("loglikelihood_rolling", *((text,) for text in CONTEXTS))
    found, expected = (lm.loglikelihood_rolling(asked) for lm in (ours(batch_size=batch_size), harness))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def expected(harness: Any) -> list[tuple[dict[str, Any], list[str]]]:
    """What the harness's own model answers, with stop strings from the middle of an answer, perhaps of a token."""
    whole = answers(harness, CONTEXTS, max_gen_toks=24)
    stops = [text[len(text) // 2 :][:2] for text in whole]
    more: dict[str, Any] = {"max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    wanted = [{"until": until} | more for until in (stops[0], [stops[2], stops[1]], [], "never said")]
    return [({"max_gen_toks": 24}, whole), *((one, answers(harness, CONTEXTS, **one)) for one in wanted)]


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_the_harness(ours: Any, mode: str, expected: list[Any]) -> None:
    lm = ours(mode)
    for wanted, texts in expected:
        assert answers(lm, CONTEXTS, **wanted) == texts
    assert lm.get_model_info()["draftgraph_mode"] == mode
    assert (lm.get_model_info()["tokens_per_pass"] > 1) == (mode != "off")


def test_answers_are_cut_before_the_first_stop_string(ours: Any) -> None:
    lm, context = ours(), "the dog ran"
    (whole,) = answers(lm, [context], max_gen_toks=24)
    late, early = whole[9:11], whole[4:6]
    assert 0 < whole.index(early) < whole.index(late)
    assert answers(lm, [context], until=[late, early], max_gen_toks=24) == [whole[: whole.index(early)]]


def test_a_batch_changes_no_answer(ours: Any) -> None:
    assert answers(ours(batch_size=3), CONTEXTS, max_gen_toks=12) == answers(ours(), CONTEXTS, max_gen_toks=12)


def test_answers_leave_room_in_the_window(harness: Any, ours: Any) -> None:
    for tokens in (1, WINDOW - 1):
        wanted = {"max_gen_toks": tokens}
        assert answers(ours(), [LONG, "the"], **wanted) == answers(harness, [LONG, "the"], **wanted)


def test_sampled_answers_depend_on_the_seed_and_not_on_the_mode(ours: Any) -> None:
    def sampled(seed: int, mode: str) -> list[str]:
        torch.manual_seed(seed)  # as the harness does before it makes a model
        return answers(ours(mode), [PROMPT] * 3, do_sample=True, temperature=0.8, top_p=0.9, max_gen_toks=12)

    expected = sampled(1, "off")
    assert len(set(expected)) > 1  # repeats of one request are answers of their own
    assert all(sampled(1, mode) == expected for mode in MODES[1:])
    assert sampled(2, "auto") != expected


def test_chats_are_written_as_the_harness_writes_them(harness: Any, ours: Any) -> None:
    lm, chat = ours(), [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    assert lm.tokenizer_name == harness.tokenizer_name
    assert lm.chat_template(True) == harness.chat_template(True)
    for turns, prompted in ((chat[:1], True), (chat, False)):
        assert lm.apply_chat_template(turns, prompted) == harness.apply_chat_template(turns, prompted)


def test_arguments_win_over_options_and_unknown_ones_are_refused(target: str) -> None:
    options = {"batch_size": 2, "device": "cuda:0" if not torch.cuda.is_available() else "cpu", "max_batch_size": None}
    lm = DraftGraphLM.create_from_arg_string(f"target={target},mode=graph,k=2,batch_size=3", options)
    assert (lm.decoder.config.mode, lm.decoder.config.k, lm.batch_size, lm.device.type) == ("graph", 2, 3, "cpu")
    with pytest.raises(UsageError, match=r"pretrained is no argument of the model draftgraph: it takes .*target"):
        DraftGraphLM(pretrained=target)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # the harness's own command line reads it
    return Runner(capsys, monkeypatch)


def test_a_local_file_is_evaluated(
    run: Runner, target: str, draft: str, harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"the cat has {n} mats", "reference": f"It has {n}.\n#### {n}"} for n in (3, 1200)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = REPOSITORY / "benchmarks" / "lm_eval" / "gsm8k_local.yaml"
    arguments = f"target={target},draft={draft},mode=auto,dtype=float32,device=cpu"
    options = ("--gen_kwargs", "max_gen_toks=16", "--log_samples", "--output_path", "out")
    done = run("eval", "--model_args", arguments, "--tasks", task, *options)
    assert done.status == 0 and "exact_match" in done.out
    (samples,) = (tmp_path / "out").rglob("samples_gsm8k_local_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["target"] for row in logged] == ["3", "1200"]
    found = [row["resps"][0][0] for row in logged]
    assert found == answers(harness, [row["prompt"] for row in rows], max_gen_toks=16)
    assert same_answers.main("out", "out") == 0


def test_other_answers_and_other_questions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, said in (("one", ["yes", "no"]), ("other", ["yes", "yes"]), ("less", ["yes"])):
        lines = [json.dumps({"doc_id": index, "resps": [[text]]}) for index, text in enumerate(said)]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "samples_sky_2026-01-01T00-00-00.jsonl").write_text("\n".join(lines))
    one, other, less = (str(tmp_path / folder) for folder in ("one", "other", "less"))
    assert same_answers.main(one, other) == 1
    assert capsys.readouterr().out == "sky, question 1: the answers differ\n1 of 2 answers are the same\n"
    assert same_answers.main(one, less) == 2


def test_a_wrong_argument_is_one_line(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: DraftGraphLM(mode="fast", target="none"))
    refused(run("eval"), "mode must be one of")


def test_a_missing_harness_is_named(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "draftgraph.evaluation")
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    refused(run("eval", "--tasks", "gsm8k"), install_command("eval"))
