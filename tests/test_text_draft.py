"""A draft with another tokenizer: whatever goes through text, the tokens are the target's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import Runner
from text_tools import ENDS, KNOWN, model_of, taught, tokenizer
from tiny_models import one_line_of
from transformers import PreTrainedTokenizerFast

import draftgraph
from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch, Job, Limits, Scheduler
from draftgraph.config import Mode
from draftgraph.engine.protocol import Segment
from draftgraph.errors import UsageError
from draftgraph.generation import prepare
from draftgraph.pair import Pair
from draftgraph.proposers.translation import WINDOW, Reading, Translation
from draftgraph.sequence import Sequence

MODES: tuple[Mode, ...] = ("chain", "tree", "graph", "auto")
BEGIN = KNOWN[:30]


class Prices:
    """A pass of the draft costs so much; one of the target costs one."""

    def __init__(self, draft: float) -> None:
        self.draft = draft

    def of_pass(self, nodes: Any) -> Any:
        return 1 + 0.01 * nodes

    def of_level(self, nodes: Any) -> Any:
        return self.draft * np.ones(nodes.shape)

    def floor(self) -> float:
        return 0.01


def config_of(mode: Mode) -> GraphConfig:
    return GraphConfig(mode=mode, cost=Prices(0.05))


@pytest.fixture(scope="module")
def words() -> dict[str, PreTrainedTokenizerFast]:
    return {kind: tokenizer(kind, {"bytes": 300, "phrases": 400}.get(kind, 180)) for kind in ENDS}


@pytest.fixture(scope="module")
def target() -> tuple[Any, PreTrainedTokenizerFast]:
    """Its characters outside of ASCII have several tokens each."""
    its = tokenizer("bytes", 400, tuple(KNOWN.encode("ascii", "ignore").decode().split("\n")))
    assert len(its.tokenize("😀")) == 4 and len(its.tokenize("ü")) == 2
    return taught(its, 0), its


@pytest.fixture(scope="module")
def pair_with(target: Any, words: Any) -> Callable[[str], Pair]:
    """A target and a draft with this tokenizer, which both know the text."""

    @cache
    def pair(kind: str) -> Pair:
        return Pair(target[0], taught(words[kind], 1), target[1], draft_tokenizer=words[kind])

    return pair


@pytest.fixture(scope="module")
def good(pair_with: Callable[[str], Pair]) -> Pair:
    return pair_with("pieces")


def answers(pair: Pair, prompts: list[str], mode: Mode, **arguments: Any) -> list[Any]:
    arguments = {"raw": True, "max_new_tokens": 60} | arguments
    outputs: list[Any] = pair.generate(prompts, config=config_of(mode), **arguments)
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 1.3, "seed": 3}
KINDS = [("pieces", GREEDY), ("bytes", SAMPLED), ("lower", GREEDY), ("legacy", SAMPLED)]


@pytest.mark.parametrize("kind, sampling", KINDS)
def test_every_mode_gives_the_tokens_of_off_alone_and_together(
    pair_with: Callable[[str], Pair], kind: str, sampling: dict[str, Any]
) -> None:
    pair, prompts = pair_with(kind), [KNOWN[: 4 * length] for length in (1, 3, 7, 15, 24)]
    sampling = sampling | {"max_new_tokens": 32}
    plain = answers(pair, prompts, "off", **sampling)
    for mode in MODES:
        together = answers(pair, prompts, mode, **sampling)
        assert tokens_of(together) == tokens_of(plain)
        assert tokens_of(answers(pair, prompts[:1], mode, **sampling)) == tokens_of(plain[:1])
        assert sum(output.stats.accepted_by_source["draft"] for output in together)


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_other_engines_give_the_same_tokens(good: Pair, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answers(good, [BEGIN], "off")
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    other = Pair(good.target, good.draft, good.tokenizer, draft_tokenizer=good.draft_tokenizer)
    for mode in ("tree", "auto"):
        found = answers(other, [BEGIN, KNOWN[:60]], mode)
        assert found[0].token_ids == plain[0].token_ids and found[0].stats.mean_accepted_length > 2


def test_a_draft_that_knows_the_text_is_accepted_through_it(good: Pair) -> None:
    least = {"chain": 5, "tree": 7, "graph": 7, "auto": 4}
    for mode in MODES:
        output = good.generate(BEGIN, raw=True, max_new_tokens=45, config=config_of(mode))
        assert KNOWN[30:100] in output.text
        stats = output.stats
        assert stats.mean_accepted_length > least[mode]
        assert stats.accepted_by_source["draft"] > 0.9 * sum(stats.accepted_by_source.values())
        assert stats.draft_tokens < 2 * stats.draft_passes  # what it drafted and came true is not read again


def test_the_end_of_an_answer_is_drafted_whatever_its_token_is_called(good: Pair) -> None:
    assert good.tokenizer.eos_token != good.draft_tokenizer.eos_token
    end = {"eos_token_id": good.tokenizer.eos_token_id}
    decoding = good.start(KNOWN[:-12], raw=True, max_new_tokens=30, config=config_of("tree"), **end)
    last = list(decoding.steps())[-1]
    assert decoding.finish_reason == "stop" and last.tokens[-1] == good.tokenizer.eos_token_id
    assert last.tree.sources[last.path[-1]] == "draft" and len(last.path) == len(last.tokens)


def test_characters_of_several_tokens_are_continued_in_their_middle(good: Pair) -> None:
    ids = good.tokenizer(KNOWN)["input_ids"]
    moon = len(good.tokenizer(KNOWN[: KNOWN.index("🌕")])["input_ids"])
    plain = GraphConfig(mode="off")
    for inside in (moon + 1, moon + 2, moon + 3):
        prompt = torch.tensor([ids[:inside]])
        assert good.tokenizer.decode(ids[:inside]).endswith("\ufffd")
        tokens = good.decoder.generate(prompt, max_new_tokens=9, do_sample=False, config=plain).new_token_ids
        steps: list[Any] = []
        good.decoder.observer = steps.append
        result = good.decoder.generate(prompt, max_new_tokens=9, do_sample=False, config=config_of("tree"))
        good.decoder.observer = None
        assert result.new_token_ids == tokens == [ids[inside : inside + 9]]
        assert len(steps[0].tokens) > moon + 4 - inside  # the rest of the character, and more


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_drafts_keys_are_those_of_the_text(pair_with: Callable[[str], Pair], kind: str) -> None:
    """However its last tokens have changed on the way."""
    pair = pair_with(kind)
    decoding = pair.start(BEGIN, raw=True, max_new_tokens=60, config=config_of("graph"), temperature=1.0, seed=5)
    for _ in decoding:
        pass
    kept, text = decoding.draft.context, decoding.draft.tokens_of(decoding.text)
    fresh = kept.engine.open()
    assert text == Reading(pair.decoder.translation).of(decoding.text)
    assert len(kept.text) > 40 and kept.text == text[: len(kept.text)]
    with torch.no_grad():
        fresh.prefill(kept.text)
        said = [kept.engine.run([Segment.of_text(one, [5], scored=True)])[0].logits.clone() for one in (kept, fresh)]
    assert torch.allclose(*said, atol=1e-4)


@pytest.mark.parametrize("kind", list(ENDS))
def test_a_growing_text_is_read_as_if_it_were_read_at_once(target: Any, words: Any, kind: str) -> None:
    """Piece by piece, only its end is encoded again; halves of characters wait."""
    translation = Translation(target[1], words[kind], len(target[1]))
    ids, reading, draw, encoded = target[1](KNOWN * 12)["input_ids"], Reading(translation), random.Random(0), []
    read, longest = translation.read, 0

    def counted(tokens: list[int]) -> list[int]:
        encoded.append(len(tokens))
        return read(tokens)

    length = 20
    while length < len(ids):
        whole = Reading(translation).of(ids[:length])
        translation.read = counted  # type: ignore[method-assign]
        found = reading.of(ids[:length])
        assert words[kind].decode(found) == words[kind].decode(whole)
        assert found == whole or kind == "phrases"  # whose tokens depend on what is far from them
        translation.read = read  # type: ignore[method-assign]
        longest, length = max(longest, max(encoded)), length + draw.randrange(1, 9)
        encoded.clear()
    assert kind == "phrases" or longest < 4 * WINDOW < len(ids) / 2
    assert reading.of(ids[:30]) == Reading(translation).of(ids[:30])  # another text


def test_special_tokens_that_both_have_are_read_and_others_say_nothing(target: Any, words: Any) -> None:
    translation = Translation(target[1], words["pieces"], len(target[1]))
    ids = target[1]("<|user|>The dog<|end|>")["input_ids"]
    assert ids[-1] == target[1].eos_token_id and translation.draft_ends == {words["pieces"].eos_token_id}
    its = words["pieces"]
    assert translation.read(ids) == [
        its.convert_tokens_to_ids("<|user|>"),
        *its("The dog", add_special_tokens=False).input_ids,
    ]


def test_tokens_that_the_target_does_not_have_are_not_proposed(good: Pair) -> None:
    """Its tokenizer may know more than its embedding has rows for."""
    size = good.tokenizer.convert_tokens_to_ids(good.tokenizer.tokenize(" wizards")[0])
    decoder = GraphDecoder(good.target, good.draft, tokenizers=(good.tokenizer, good.draft_tokenizer))
    assert decoder.translation is not None
    decoder.translation.size = size
    ids = torch.tensor([good.tokenizer(BEGIN)["input_ids"]])
    steps: list[Any] = []
    decoder.observer = steps.append
    decoder.generate(ids, max_new_tokens=40, do_sample=False, config=config_of("tree"))
    assert all((step.tree.tokens[1:] < size).all() for step in steps)
    assert any(len(step.path) for step in steps)


def test_auto_drafts_where_that_pays_and_not_where_it_costs(good: Pair) -> None:
    passes = {}
    for draft in (0.05, 3.0):
        config = GraphConfig(cost=Prices(draft))
        passes[draft] = good.generate(BEGIN, raw=True, max_new_tokens=60, config=config).stats.draft_passes
    assert passes[0.05] > 20 and passes[3.0] == 0


def test_a_text_longer_than_the_drafts_window_goes_on_without_it(target: Any, words: Any) -> None:
    draft = model_of(words["pieces"], window=64)
    pair = Pair(target[0], draft, target[1], draft_tokenizer=words["pieces"])
    for prompt in (BEGIN, KNOWN * 2):
        plain, drafted = (answers(pair, [prompt], mode)[0] for mode in ("off", "tree"))
        assert drafted.token_ids == plain.token_ids
        assert bool(drafted.stats.draft_passes) == (prompt == BEGIN)


@pytest.mark.parametrize("prompt", ["<|end|>", " "])
def test_a_prompt_that_the_draft_cannot_read_is_continued(pair_with: Callable[[str], Pair], prompt: str) -> None:
    """A special token that it lacks, or a space, alone and beside others; it drafts when there is more."""
    pair = pair_with("lower")
    ids = pair.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert pair.decoder.translation is not None and not Reading(pair.decoder.translation).of(ids)
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = pair.decoder.generate(torch.tensor([ids]), config=GraphConfig(mode="off"), **asked).new_token_ids[0]
    for mode in MODES:
        found = pair.decoder.generate(torch.tensor([ids]), config=config_of(mode), **asked)
        assert found.new_token_ids == [plain]
    batch = Batch(pair.decoder, slots=2048)
    requests = [pair.request(BEGIN, raw=True, **asked), prepare(pair.target, torch.tensor([ids]), None, **asked)]
    texts = [Sequence(request, 0, config_of("tree")) for request in requests]
    for text in texts:
        batch.add(text)
    while batch.busy:
        batch.step()
    assert [text.failure for text in texts] == [None, None] and texts[1].new_tokens == plain


def test_a_pool_with_no_room_for_the_drafts_tokens_holds_up_no_answer(target: Any) -> None:
    """It has one for every byte: several times as many as the target."""
    its = tokenizer("bytes", 1, ())
    pair = Pair(target[0], model_of(its), target[1], draft_tokenizer=its)
    prompts = [KNOWN, KNOWN * 2]
    plain = tokens_of(answers(pair, prompts, "off"))
    batch = Batch(pair.decoder, slots=320)
    sequences = [
        Sequence(pair.request(prompt, raw=True, max_new_tokens=60), 0, config_of("tree")) for prompt in prompts
    ]
    for sequence in sequences:
        batch.add(sequence)
    while batch.busy:
        batch.step()
    assert [sequence.failure for sequence in sequences] == [None, None]
    assert [sequence.new_tokens for sequence in sequences] == plain


def test_a_server_answers_with_such_a_pair(good: Pair) -> None:
    plain = answers(good, [BEGIN], "off")[0].token_ids
    scheduler = Scheduler(good, Limits(texts=4, slots=4096), config_of("auto"))
    prompt = tuple(good.tokenizer(BEGIN)["input_ids"])
    for name in "abc":
        scheduler.submit(Job(name, prompt, max_tokens=60))
    told = [one for _ in _until_done(scheduler) for one in scheduler.step()]
    for name in "abc":
        assert [token for one in told if one.id == name for token in one.tokens] == plain
    assert sum("draft" in one.sources for one in told)


def _until_done(scheduler: Scheduler) -> Iterator[None]:
    while scheduler.busy:
        yield


def test_rejection_takes_a_draft_through_text_as_certain(good: Pair) -> None:
    """A token that could have been no other is kept as often as the target would have chosen it."""
    config = GraphConfig(mode="chain", verification="rejection")
    ids = torch.tensor([good.tokenizer(KNOWN[:43])["input_ids"]])
    logits = good.target(ids).logits[0, -1].detach() / 4
    first = [
        good.decoder.generate(
            ids, max_new_tokens=2, do_sample=True, temperature=4.0, top_k=0, seed=seed, config=config
        ).new_token_ids[0][0]
        for seed in range(60)
    ]
    best = int(logits.argmax())
    share, chance = first.count(best) / len(first), float(torch.softmax(logits, dim=-1)[best])
    assert 0.05 < chance < 0.95 and abs(share - chance) < 4 * (chance * (1 - chance) / len(first)) ** 0.5


@pytest.fixture(scope="module")
def folders(good: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = []
    models = (good.target, good.tokenizer), (good.draft, good.draft_tokenizer)
    for name, (model, its) in zip(("target", "draft"), models, strict=True):
        folder = tmp_path_factory.mktemp("pair") / name
        model.save_pretrained(folder)
        its.save_pretrained(folder)
        made.append(str(folder))
    return made


def test_one_line_says_what_another_tokenizer_costs(folders: list[str], capsys: Any) -> None:
    pair = draftgraph.load(*folders, device="cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "token 0 is '<|end|>' for the target and '</s>' for the draft" in said
    assert "go through text" in said and "millisecond" in said
    output = pair.generate(BEGIN, raw=True, max_new_tokens=40, config=config_of("tree"))
    assert output.stats.mean_accepted_length > 3


def test_the_command_line_takes_such_a_pair(folders: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draftgraph_command = Runner(capsys, monkeypatch)
    models = ("--target", folders[0], "--draft", folders[1], "--device", "cpu")
    done = draftgraph_command("generate", BEGIN, "--raw", *models, "--mode", "tree", "--max-new-tokens", 40)
    assert done.status == 0 and KNOWN[30:80] in done.out and "go through text" in done.err


def test_a_tokenizer_that_cannot_say_where_tokens_end_is_refused(good: Pair) -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UsageError, match="Slow is no fast tokenizer") as error:
        GraphDecoder(good.target, good.draft, tokenizers=(good.tokenizer, Slow()))
    one_line_of(error)
