"""Drafts that read the target's hidden states: engines hand them out, and heads are fed what they were trained on.

That tokens are those of plain decoding says nothing about a head: a wrong shift only makes it guess badly. So what is
drafted is compared with the head's own passes over the whole text, without any cache.
"""

from __future__ import annotations

import copy
from functools import cache
from threading import Event, Thread
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from families import target_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching.batch import Batch
from draftgraph.cost import FlatCost
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Segment
from draftgraph.engine.states import place_in
from draftgraph.generation import prepare
from draftgraph.models.heads.block import new_block_head
from draftgraph.models.heads.mtp import filled_mtp, layouts_behind
from draftgraph.models.heads.states import new_states_head
from draftgraph.sequence import Sequence
from draftgraph.stats import Step

VOCABULARY, NEW_TOKENS = 97, 24
HEADS = ("states", "states, two layers and a map", "mtp", "block", "causal block")
ENGINES = ("paged", "modules", "static", "eager")
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 4}


@cache
def target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, initializer_range=0.08,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@cache
def head(kind: str) -> Any:
    torch.manual_seed(1)
    model, odd = target(), torch.arange(1, VOCABULARY, 2)
    made = {
        "states": lambda: new_states_head(model, reads=[1, 2, 3], initializer_range=0.2),
        "states, two layers and a map": lambda: new_states_head(
            model, odd, layers=2, reads=[4, 0], initializer_range=0.2
        ),
        "mtp": lambda: new_mtp_head(model),
        "block": lambda: new_block_head(model, 5, 3, reads=[1, 4], initializer_range=0.2),
        "causal block": lambda: new_block_head(model, 5, 3, 2, causal=True, reads=[2], initializer_range=0.2),
    }
    return made[kind]().eval()


def new_mtp_head(model: Any) -> Any:
    hidden = model.config.hidden_size
    config = LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": 1, "initializer_range": 0.2})
    layer = {name: weight for name, weight in LlamaModel(config).state_dict().items() if "embed" not in name}
    tensors = {f"decoder.{name}": weight for name, weight in layer.items()}
    tensors |= {"token_norm.weight": torch.ones(hidden), "state_norm.weight": torch.ones(hidden)}
    tensors["fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    return filled_mtp(LlamaModel, model.config, tensors, layouts_behind(4)[1], model, "this")


@pytest.fixture(params=HEADS)
def draft(request: Any) -> Any:
    return head(request.param)


@torch.no_grad()
def states_of(text: list[int], reads: tuple[int, ...]) -> Tensor:
    """By transformers' own hooks, which stay in a model."""
    told = copy.deepcopy(target())(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([told[number][0] for number in reads], dim=-1)


@torch.no_grad()
def drafted(draft: Any, text: list[int], count: int) -> list[int]:
    """What a head writes behind a text, computed from nothing."""
    rows = draft.project(states_of(text, draft.reads))[:-1]
    columns = getattr(draft, "token_map", torch.arange(VOCABULARY))
    if draft.kind == "block":
        known, size = len(rows), draft.block_size
        seen = torch.ones(known + size, known + size).tril().bool()
        if not draft.causal:
            seen[known:] = True
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        tokens = torch.tensor([[*text, *[draft.mask_token_id] * (size - 1)]])
        states = torch.cat([rows, rows.new_zeros(size, rows.shape[1])])[None]
        logits = draft(tokens, states=states, attention_mask={"full_attention": mask}, use_cache=False).logits[0]
        return columns[logits[known + 1 :].argmax(-1)].tolist()[:count]
    tokens = text[1:]
    written: list[int] = []
    for _ in range(count):
        out = draft(torch.tensor([tokens + written]), states=rows[None], use_cache=False)
        written.append(int(columns[out.logits[0, -1].argmax()]))
        rows = torch.cat([rows, out.states[0, -1:]])
    return written


def check(steps: list[Step], texts: list[list[int]], draft: Any, fewest: int) -> None:
    """Every chain that was checked is what the head writes behind one of the texts."""
    chains = [(step, step.tree.tokens[1:].tolist()) for step in steps if len(step.tree) > 1]
    assert len(chains) >= fewest
    for step, chain in chains:
        before = [text[: step.position + 1] for text in texts]
        before = [text for text in before if len(text) > step.position and text[-1] == step.tree.tokens[0]]
        assert chain in [drafted(draft, text, len(chain)) for text in before]


def engine_of(kind: str, model: Any) -> Any:
    if kind == "eager":
        return EagerEngine(model)
    return PagedEngine(model, captured=kind == "static", compiled=kind == "paged")


class TestStates:
    @pytest.mark.parametrize("kind", ENGINES)
    @pytest.mark.parametrize("reads", [(2, 2, 1), (0, 4), (3,)])
    @torch.no_grad()
    def test_are_those_that_transformers_returns(self, kind, reads):
        engine, text, found = engine_of(kind, target()), list(range(5, 25)), []
        engine.read_states(reads)
        context, other = engine.open(), engine.open()
        context.on_states = lambda states: found.append(states.clone())
        context.begin(20, False)
        context.prefill(text[:9], 4)
        neighbour = Segment.of_text(other, text[:3], scored=True)
        _, result = engine.run([neighbour, Segment.of_text(context, text[9:])])
        found.append(result.states)
        torch.testing.assert_close(torch.cat(found), states_of(text, reads), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "phi3"])
    def test_of_other_families(self, family):
        model = copy.deepcopy(target_of(family)).eval()
        layers = model.config.get_text_config().num_hidden_layers
        engine = EagerEngine(model)
        engine.read_states((0, 1, layers))
        with torch.no_grad():
            (result,) = engine.run([Segment.of_text(engine.open(), list(range(5, 15)))])
            told = model(torch.arange(5, 15)[None], output_hidden_states=True).hidden_states
        expected = torch.cat([told[number][0] for number in (0, 1, layers)], dim=-1)
        torch.testing.assert_close(result.states, expected)

    @torch.no_grad()
    def test_a_recorded_pass_leaves_them_in_one_place(self):
        engine, text, reads = engine_of("static", target()), list(range(5, 25)), (2, 4)
        engine.read_states(reads)
        for count in (3, 20):  # passes of two shapes
            segments = [Segment.of_text(engine.open(), text[:count], scored) for scored in (True, False)]
            results = engine.run(segments)
            assert [place_in(engine.left, result.states) for result in results] == [0, count]
            for result in results:
                torch.testing.assert_close(result.states, states_of(text[:count], reads), rtol=1e-4, atol=1e-5)
        assert place_in(engine.left, results[0].states.clone()) is None

    def test_hooks_of_a_pass_in_another_thread_change_nothing(self):
        """A text that begins meanwhile takes them for no change of the model, which would empty the cache of others."""
        model = copy.deepcopy(target())
        engine, other, hooked = PagedEngine(model), PagedEngine(model, compiled=False), Event()
        other.read_states((1, 4))
        cache = engine.cache

        def read() -> None:
            with other._taps.reading():
                hooked.set()
                sleep(0.2)  # the text begins

        thread = Thread(target=read)
        thread.start()
        assert hooked.wait(60)
        engine.begin()
        made_meanwhile = PagedEngine(model)
        thread.join()
        assert engine.cache is cache and engine.weights == 0 and made_meanwhile.compiled

    @torch.no_grad()
    def test_a_pass_is_the_same_with_and_without(self):
        model, text = target(), list(range(5, 25))
        found = []
        for reads in ((), (1, 4)):
            engine = PagedEngine(model)
            engine.read_states(reads)
            (result,) = engine.run([Segment.of_text(engine.open(), text, scored=True)])
            found.append(result.logits)
        assert engine.compiled and torch.equal(*found)


class TestDrafts:
    @pytest.mark.parametrize("engine", ENGINES)
    def test_chains_are_those_of_the_head_alone(self, draft, engine, monkeypatch):
        if engine in ("static", "eager"):
            monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
        steps: list[Step] = []
        decoder = GraphDecoder(target(), draft, config=GraphConfig(mode="chain"), observer=steps.append)
        prompt = torch.arange(3, 20)[None]
        text = decoder.generate(prompt, max_new_tokens=NEW_TOKENS).sequences[0].tolist()
        check(steps, [text], draft, NEW_TOKENS // 3)

    def test_trees_hold_what_the_head_likes_best(self, draft):
        """Deeper levels too: every best child of a node is what the head writes there."""
        steps: list[Step] = []
        config = GraphConfig(mode="tree", k=3, theta_prob=0.0, theta_sib=0.0)
        decoder = GraphDecoder(target(), draft, config=config, observer=steps.append)
        text = decoder.generate(torch.arange(3, 12)[None], max_new_tokens=6).sequences[0].tolist()
        deep = 0
        for step in steps:
            tokens, parents = step.tree.tokens.tolist(), step.tree.parents.tolist()
            chain, node = [], 0
            while node in parents:  # the first child is the best
                node = parents.index(node)
                chain.append(tokens[node])
            deep += len(chain) > 1
            assert chain == drafted(draft, text[: step.position + 1], len(chain))
        assert deep

    def test_a_text_of_one_token_is_continued(self, draft):
        """Nothing has been read before the first step: a head of levels waits for a state, and a block needs none."""
        decoder = GraphDecoder(target(), draft, config=GraphConfig(mode="chain"))
        out = decoder.generate(torch.tensor([[7]]), max_new_tokens=4)
        plain = GraphDecoder(target(), config=GraphConfig(mode="off")).generate(torch.tensor([[7]]), max_new_tokens=4)
        assert torch.equal(out.sequences, plain.sequences) and out.stats.draft_passes > 0


class TestBatches:
    def batch(self, draft: Any, mode: str = "chain") -> tuple[Batch, list[Step]]:
        steps: list[Step] = []
        decoder = GraphDecoder(target(), draft, config=GraphConfig(mode=mode), observer=steps.append)
        return Batch(decoder, slots=4096), steps

    def sequence(self, batch: Batch, prompt: list[int], **arguments: Any) -> Sequence:
        seed = arguments.pop("seed", 0)
        request = prepare(target(), torch.tensor([prompt]), None, max_new_tokens=NEW_TOKENS, **arguments)
        made = Sequence(request, seed, batch.decoder.config)
        batch.add(made)
        return made

    def finish(self, batch: Batch) -> None:
        while batch.busy:
            batch.step()

    def test_texts_side_by_side(self, draft):
        batch, steps = self.batch(draft)
        texts = [self.sequence(batch, list(range(first, first + 9 + first % 3))) for first in (3, 20, 41, 60)]
        self.finish(batch)
        assert not any(one.failure for one in texts)
        check(steps, [one.text for one in texts], draft, NEW_TOKENS)

    def test_a_known_prompt_is_not_read_again(self, draft):
        batch, steps = self.batch(draft)
        prompt = [3 + place % 80 for place in range(3 * PAGE + 5)]
        first = self.sequence(batch, prompt)
        self.finish(batch)
        texts = [first, self.sequence(batch, prompt), self.sequence(batch, [*prompt[: 2 * PAGE + 3], 9, 11])]
        texts.append(self.sequence(batch, [9, *prompt[1:]]))  # a head with a shift does not read its first token
        self.finish(batch)
        assert [one.reused > PAGE for one in texts] == [False, True, True, False]
        check(steps, [one.text for one in texts], draft, NEW_TOKENS)

    def test_a_prompt_that_is_known_but_for_its_last_token(self, draft):
        """No state of it has been noted when the first step begins."""
        batch, steps = self.batch(draft)
        prompt = [3 + place % 80 for place in range(2 * PAGE + 1)]
        texts = []
        for _ in range(2):
            texts.append(self.sequence(batch, prompt))
            self.finish(batch)
        assert texts[1].failure is None and texts[1].reused == (2 * PAGE if draft.kind == "block" else PAGE)
        check(steps, [one.text for one in texts], draft, NEW_TOKENS)

    def test_a_text_whose_step_was_interrupted_goes_on(self, draft):
        batch, steps = self.batch(draft)
        one = self.sequence(batch, list(range(3, 30)))
        while len(one.new_tokens) < NEW_TOKENS // 2:
            batch.step()
        one.restart()
        self.finish(batch)
        check(steps, [one.text], draft, NEW_TOKENS // 3)

    @pytest.mark.parametrize("engine", ["paged", "eager"])
    def test_auto_expands_copies_with_their_children(self, draft, engine, monkeypatch):
        """Of a text that repeats itself, a whole path that was copied may wait to be fed, its nodes all at once."""
        if engine == "eager":
            monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
        prompt, told = torch.tensor([[3 + place % 20 for place in range(100)]]), {"max_new_tokens": NEW_TOKENS}
        plain = GraphDecoder(target(), config=GraphConfig(mode="off")).generate(prompt, **told)
        found = GraphDecoder(target(), draft, config=GraphConfig(cost=FlatCost())).generate(prompt, **told)
        assert torch.equal(found.sequences, plain.sequences) and found.stats.draft_passes

    @pytest.mark.parametrize("mode", ["chain", "tree", "graph", "auto"])
    @pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
    def test_tokens_are_those_of_plain_decoding(self, draft, mode, arguments):
        batch, _ = self.batch(draft, mode)
        prompts = [list(range(first, first + 9)) for first in (3, 20, 41)]
        texts = [self.sequence(batch, prompt, **arguments) for prompt in prompts]
        self.finish(batch)
        plain = GraphDecoder(target(), config=GraphConfig(mode="off"))
        for prompt, one in zip(prompts, texts, strict=True):
            expected = plain.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **arguments)
            assert one.text == expected.sequences[0].tolist()


def test_rejection_sampling_keeps_to_what_the_target_allows(draft):
    config = GraphConfig(mode="chain", verification="rejection")
    out = GraphDecoder(target(), draft, config=config).generate(
        torch.arange(3, 20)[None], max_new_tokens=NEW_TOKENS, do_sample=True, top_k=5, seed=3
    )
    text = out.sequences[0].tolist()
    with torch.no_grad():
        ranks = target()(torch.tensor([text])).logits[0].argsort(descending=True).argsort()
    chosen = np.array([int(ranks[place - 1, text[place]]) for place in range(17, len(text))])
    assert (chosen < 5).all()


def test_a_head_that_reads_states_that_are_not_there_is_refused():
    from draftgraph.errors import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="reads state 9 of a target that has 4 layers"):
        PagedEngine(target()).read_states((9,))
