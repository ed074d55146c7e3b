"""Jobs of many people: what each is told, who is refused, and who sees whose."""

import json
import time
from itertools import count

import pytest
import torch
from cli_tools import save_tiny_model
from families import VOCAB, perturbed, target_of
from transformers import AutoTokenizer, LlamaForCausalLM

from draftgraph import GraphConfig
from draftgraph.batching import Job, Limits, Progress, Scheduler
from draftgraph.batching.job import Scores
from draftgraph.engine.pages import PAGE, OutOfPages
from draftgraph.errors import UsageError
from draftgraph.pair import Pair
from draftgraph.proposers.copying import Past

LIMITS = Limits(texts=4, slots=4096)


@pytest.fixture(scope="module")
def pair():
    target = target_of("llama", dtype=torch.float64)
    return Pair(target, perturbed(target), None, GraphConfig(cost="flat"))


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A pair with a tokenizer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return Pair(LlamaForCausalLM.from_pretrained(folder).eval(), None, AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def scheduler(pair):
    return Scheduler(pair, LIMITS)


def answers(scheduler, *jobs, steps=2000):
    """All progress, by job."""
    for job in jobs:
        scheduler.submit(job)
    told: dict[str, list[Progress]] = {job.id: [] for job in jobs}
    for _ in range(steps):
        if not scheduler.busy:
            break
        for one in scheduler.step():
            told.setdefault(one.id, []).append(one)
            json.dumps(one.to_dict())
    assert not scheduler.busy
    assert scheduler.figures()["slots_used"] == 0
    return told


def entries(scores):
    """As they come out of a message: each token's own log-probability and the best in its place."""
    found = Scores.from_dict(json.loads(json.dumps(scores.to_dict())))
    return [(found.own[place], found.top(place)) for place in range(len(found))]


def tokens(progress):
    return [token for one in progress for token in one.tokens]


def test_progress_tells_tokens_sources_and_the_end(scheduler):
    told = answers(scheduler, Job("a", tuple(range(9)) * 4, max_tokens=20))["a"]
    assert len(tokens(told)) == 20
    for one in told:
        assert len(one.sources) == len(one.tokens)
        assert set(one.sources) <= {"target", "draft", "merged", "copied", "recycled"}
    assert [one.finish_reason for one in told] == [None] * (len(told) - 1) + ["length"]
    assert told[-1].stats["new_tokens"] == 20 and told[-1].stats["prompt_tokens"] == 36
    assert told[-1].stats["first_token_seconds"] > 0


def test_samples_of_one_seed_differ_and_repeat(scheduler):
    jobs = [Job(f"{sample}", (1, 2, 3), max_tokens=12, temperature=1.0, seed=5, sample=sample) for sample in range(3)]
    first = {id: tokens(told) for id, told in answers(scheduler, *jobs).items()}
    again = {id: tokens(told) for id, told in answers(scheduler, *jobs).items()}
    assert first == again
    assert len({tuple(found) for found in first.values()}) == 3


def test_logprobs_are_those_of_the_target(pair, scheduler):
    job = Job("a", (1, 2, 3, 4), max_tokens=6, logprobs=3)
    told = answers(scheduler, job)["a"]
    found = [entry for one in told for entry in entries(one.logprobs)]
    text = [*job.tokens, *tokens(told)]
    with torch.no_grad():
        expected = torch.log_softmax(pair.target(torch.tensor([text])).logits[0].float(), -1)
    for place, entry in enumerate(found, start=len(job.tokens) - 1):
        assert entry[0] == pytest.approx(expected[place, text[place + 1]].item(), abs=1e-5)
        best = expected[place].topk(3)
        assert [pair[0] for pair in entry[1]] == best.indices.tolist()
        assert [pair[1] for pair in entry[1]] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_can_be_scored(pair, scheduler, max_tokens):
    prompt = tuple(number * 5 % VOCAB for number in range(3 * PAGE))
    answers(scheduler, Job("before", prompt, max_tokens=1))  # known tokens must be scored all the same
    [first, *rest] = answers(scheduler, Job("a", prompt, max_tokens=max_tokens, prompt_logprobs=1))["a"]
    assert len(tokens([first, *rest])) == max_tokens
    with torch.no_grad():
        expected = torch.log_softmax(pair.target(torch.tensor([prompt])).logits[0].float(), -1)
    assert len(first.prompt_logprobs) == len(prompt) - 1
    for place, (logprob, [best]) in enumerate(entries(first.prompt_logprobs)):
        assert logprob == pytest.approx(expected[place, prompt[place + 1]].item(), abs=1e-5)
        assert best[0] == int(expected[place].argmax())


@pytest.mark.parametrize("short", [0, 1, 3, 5, 6, 12])
def test_a_prompt_that_is_read_again_is_scored_once(pair, monkeypatch, short):
    """Pages run out in some pass: before the prompt has been read, in the middle of it, and behind it."""
    scheduler = Scheduler(pair, Limits(texts=4, slots=4096, chunk=16))
    plain = {"config": {"mode": "off"}}
    other = Job("other", (1, 2), max_tokens=60, **plain)
    job = Job("a", tuple(number * 5 % VOCAB for number in range(5 * PAGE)), max_tokens=20, prompt_logprobs=1, **plain)
    [expected, *_] = answers(scheduler, job)["a"]
    run_pass, passes = scheduler.batch.engines.target.run, count()

    def run(segments):
        if len(segments) > 1 and next(passes) == short:
            raise OutOfPages("planted")
        return run_pass(segments)

    monkeypatch.setattr(scheduler.batch.engines.target, "run", run)
    [first, *rest] = answers(scheduler, other, job)["a"]
    assert next(passes) > short and rest[-1].finish_reason == "length"
    assert len(tokens([first, *rest])) == 20 and rest[-1].stats["reused_tokens"] == 0
    assert len(first.prompt_logprobs) == len(job.tokens) - 1
    assert first.prompt_logprobs.own.tolist() == pytest.approx(expected.prompt_logprobs.own.tolist(), abs=1e-6)


def test_penalties_and_bias_do_what_openai_says(pair, scheduler):
    plain = tokens(answers(scheduler, Job("a", (1, 2, 3), max_tokens=30))["a"])
    penalised = Job("b", (1, 2, 3), max_tokens=30, presence_penalty=2.0, frequency_penalty=1.0)
    text = [1, 2, 3]
    with torch.no_grad():
        for _ in range(30):
            logits = pair.target(torch.tensor([text])).logits[0, -1].float()
            for token in set(text[3:]):
                logits[token] -= 2.0 + 1.0 * text[3:].count(token)
            text.append(int(logits.argmax()))
    assert tokens(answers(scheduler, penalised)["b"]) == text[3:] != plain
    forced = answers(scheduler, Job("c", (1, 2, 3), max_tokens=5, logit_bias={7: 100.0}))["c"]
    assert tokens(forced) == [7] * 5


def test_stop_tokens_and_ignored_ones(pair, scheduler):
    plain = tokens(answers(scheduler, Job("a", (1, 2, 3), max_tokens=30))["a"])
    stop = plain[4]
    told = answers(scheduler, Job("b", (1, 2, 3), max_tokens=30, stop_token_ids=(stop,)))["b"]
    assert told[-1].finish_reason == "stop"
    assert tokens(told) == plain[: plain.index(stop) + 1]
    pair.target.generation_config.eos_token_id = stop
    try:
        ended = answers(scheduler, Job("c", (1, 2, 3), max_tokens=30))["c"]
        assert tokens(ended) == tokens(told)
        assert tokens(answers(scheduler, Job("d", (1, 2, 3), max_tokens=30, ignore_eos=True))["d"]) == plain
    finally:
        pair.target.generation_config.eos_token_id = None


def test_a_job_may_ask_for_a_mode_and_its_trace(scheduler):
    config = {"mode": "graph", "k": 2, "theta_prob": 0.0, "theta_sib": 0.0}
    told = answers(scheduler, Job("a", (1, 2, 3) * 5, max_tokens=12, config=config, trace=True))["a"]
    steps = [one.step for one in told]
    assert any(len(step["nodes"]) > 3 for step in steps)
    for one, step in zip(told, steps, strict=True):
        assert step["nodes"][0]["parent"] == -1 and step["nodes"][0]["accepted"]
        accepted = [node["token"] for node in step["nodes"][1:] if node["accepted"]]
        assert accepted == one.tokens[: len(accepted)] and len(one.tokens) - len(accepted) <= 1
        assert all(0 <= node["parent"] < place for place, node in enumerate(step["nodes"][1:], start=1))
        for first, second in step["merges"]:
            assert step["nodes"][first]["token"] == step["nodes"][second]["token"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": (VOCAB,)}, f"token {VOCAB}, which is not in the vocabulary of {VOCAB}"),
        ({"tokens": (-1,)}, "token -1"),
        ({"max_tokens": 5000}, "context window"),
        ({"temperature": 1.0, "top_p": 7.0}, "top_p"),
        ({"config": {"mode": "fast"}}, "mode must be one of"),
        ({"config": {"cost": "flat"}}, "cost is not among"),
        ({"config": {"k": "two"}}, "k must be"),
        ({"logit_bias": {99: 1.0}}, "logit_bias has token 99"),
        ({"grammar": {"type": "regex", "pattern": "a"}}, "that needs a fast tokenizer"),
    ],
)
def test_wrong_jobs_are_refused_in_one_line(scheduler, wrong, message):
    with pytest.raises(UsageError, match=message) as found:
        scheduler.submit(Job(**{"id": "a", "tokens": (1, 2, 3)} | wrong))
    assert "\n" not in str(found.value)
    assert not scheduler.busy


def test_a_job_under_way_is_not_taken_twice(scheduler):
    scheduler.submit(Job("0", (1, 2), max_tokens=2))
    with pytest.raises(UsageError, match="under way"):
        scheduler.submit(Job("0", (1, 2)))
    answers(scheduler)


def test_how_many_jobs_wait_is_for_the_server_to_bound(scheduler):
    for number in range(300):
        scheduler.submit(Job(str(number), (1, 2), max_tokens=1))
    assert scheduler.figures()["waiting"] == 300
    assert all(scheduler.cancel(str(number)) for number in range(300))
    assert not scheduler.busy


@pytest.mark.parametrize(("nodes", "window"), [(0, 512 - 64), (100, 512 - 100)])
def test_the_window_is_what_the_pool_has_room_for_beside_the_nodes_that_are_checked(pair, nodes, window):
    scheduler = Scheduler(pair, Limits(texts=2, slots=512, nodes=nodes))
    assert scheduler.window == window
    with pytest.raises(UsageError, match=f"{window + 1} tokens are more than the {window}"):
        scheduler.submit(Job("a", (1, 2), max_tokens=window - 1))
    config = {"mode": "tree", "theta_prob": 0.0, "theta_sib": 0.0, "max_nodes": max(64, nodes), "max_depth": 16}
    told = answers(scheduler, Job("a", (1, 2), max_tokens=window - 2, config=config))["a"]
    assert told[-1].finish_reason == "length" and len(tokens(told)) == window - 2


def test_the_window_of_a_large_pool_is_the_models(pair):
    assert Scheduler(pair, Limits(texts=2, slots=8192)).window == pair.target.config.max_position_embeddings


def test_a_pool_without_room_for_a_text_is_refused(pair):
    with pytest.raises(UsageError, match="64 slots hold no text beside 64 nodes"):
        Scheduler(pair, Limits(texts=2, slots=64))


def test_cancelled_jobs_are_forgotten_at_once(scheduler):
    for number in range(6):
        scheduler.submit(Job(str(number), (1, 2, 3), max_tokens=50))
    for _ in range(3):
        scheduler.step()
    running, waiting = scheduler.cancel("1"), scheduler.cancel("5")
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert running.stats["new_tokens"] >= 1 and "new_tokens" not in waiting.stats
    assert scheduler.cancel("1") is scheduler.cancel("unknown") is None
    ends = {id: progress[-1].finish_reason for id, progress in answers(scheduler).items()}
    assert ends == dict.fromkeys("0234", "length")


def test_a_deadline_ends_a_job(scheduler):
    scheduler.submit(Job("late", (1, 2, 3), max_tokens=2000, deadline=0.05))
    scheduler.step()
    time.sleep(0.06)
    [*_, last] = answers(scheduler, Job("other", (1, 2, 3), max_tokens=3))["late"]
    assert last.finish_reason == "deadline" and last.stats is not None


def test_jobs_travel_as_json():
    job = Job(
        "a", (1, 2), logit_bias={3: 1.5}, stop_token_ids=(4,), config={"mode": "off"}, grammar={"type": "json_object"}
    )
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    job = Job("b", (1, 2), allowed_token_ids=(3, 5), bad_words=((3, 5), (5,)), min_tokens=2, cache_salt="s")
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    with pytest.raises(UsageError, match="no field 'colour'"):
        Job.from_dict({"id": "a", "tokens": [1], "colour": "red"})


class TestRestrictions:
    """`min_tokens`, `bad_words` and `allowed_token_ids`, over all modes."""

    PROMPT = (1, 2, 3, 4) * 5
    SAMPLING = pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])

    def told(self, scheduler, mode="off", **given):
        job = Job("a", self.PROMPT, **{"max_tokens": 40, "config": {"mode": mode}} | given)
        return answers(scheduler, job)["a"]

    def in_all_modes(self, scheduler, **given):
        """The tokens of mode off, which all modes have given."""
        modes = ("off", "auto", "graph", "tree", "chain")
        found = {mode: tokens(self.told(scheduler, mode, **given)) for mode in modes}
        assert all(one == found["off"] for one in found.values()), found
        return found["off"]

    @SAMPLING
    def test_no_token_ends_an_answer_before_min_tokens(self, scheduler, sampling):
        plain = tokens(self.told(scheduler, **sampling))
        ends = tuple(set(plain[:6]))
        assert len(tokens(self.told(scheduler, stop_token_ids=ends, **sampling))) == 1
        found = self.in_all_modes(scheduler, stop_token_ids=ends, min_tokens=9, max_tokens=200, **sampling)
        assert len(found) >= 10 and not set(found[:-1]) & set(ends)
        assert found[-1] in ends or not sampling  # greedy, what follows another beginning may have none

    def test_the_models_own_end_is_held_back_too(self, pair, scheduler):
        pair.target.generation_config.eos_token_id = tokens(self.told(scheduler))[0]
        try:
            assert len(tokens(self.told(scheduler))) == 1
            assert len(self.in_all_modes(scheduler, min_tokens=7)) >= 8
        finally:
            pair.target.generation_config.eos_token_id = None

    @SAMPLING
    def test_bad_words_never_occur(self, scheduler, sampling):
        plain = tokens(self.told(scheduler, **sampling))
        words = ((plain[2],), (plain[0], plain[1]), tuple(plain[5:8]))
        found = self.in_all_modes(scheduler, bad_words=words, **sampling)
        assert plain[2] not in found and len(found) == 40
        for word in words:
            assert all(tuple(found[place : place + len(word)]) != word for place in range(len(found)))

    def test_a_bad_word_begins_in_the_answer_and_is_forbidden_at_its_last_token_only(self, scheduler):
        plain = tokens(self.told(scheduler))
        across = ((self.PROMPT[-1], plain[0]),)
        assert self.in_all_modes(scheduler, bad_words=across)[0] == plain[0]
        assert self.in_all_modes(scheduler, bad_words=((plain[0], plain[1]),))[0] == plain[0]

    @SAMPLING
    def test_other_tokens_than_the_allowed_never_occur(self, scheduler, sampling):
        allowed = tuple(sorted({*range(VOCAB)} - set(tokens(self.told(scheduler, **sampling))[:4])))
        found = self.in_all_modes(scheduler, allowed_token_ids=allowed, **sampling)
        assert set(found) <= set(allowed) and len(found) == 40

    def test_an_answer_with_no_token_left_is_refused(self, scheduler):
        told = self.told(scheduler, allowed_token_ids=(5,), bad_words=((5, 5),))
        assert tokens(told) == [5] and told[-1].error["kind"] == "usage"
        assert "leave no token" in told[-1].error["message"]

    def test_a_grammar_that_ends_ends_the_answer(self, speaking):
        scheduler = Scheduler(speaking, Limits(texts=2, slots=4096), GraphConfig(cost="flat"))
        grammar = {"type": "json_schema", "schema": {"const": True}}
        ends = tuple(speaking.tokenizer.convert_tokens_to_ids(["<|end|>"]))
        job = Job("a", (1, 2), max_tokens=50, min_tokens=40, stop_token_ids=ends, grammar=grammar)
        told = answers(scheduler, job)["a"]
        assert told[-1].finish_reason == "stop"
        assert json.loads(speaking.tokenizer.decode(tokens(told), skip_special_tokens=True)) is True


class TestPast:
    def test_prompts_and_answers_of_another_salt_are_not_reused(self, pair):
        scheduler = Scheduler(pair, Limits(texts=2, slots=4096, past_tokens=1000), GraphConfig(cost="flat"))
        job = {"tokens": tuple(range(20)) * 4, "max_tokens": 40, "temperature": 1.0, "seed": 1, "tenant": "anna"}
        salts = {"first": "x", "again": "x", "other": "y", "none": ""}
        told = {id: answers(scheduler, Job(id, cache_salt=salt, **job))[id] for id, salt in salts.items()}
        assert len({tuple(tokens(one)) for one in told.values()}) == 1
        reused = {id: one[-1].stats["reused_tokens"] for id, one in told.items()}
        assert reused["again"] > 50 and reused["first"] == reused["other"] == reused["none"] == 0
        assert len(told["again"]) < min(len(told["first"]), len(told["other"]), len(told["none"]))

    def test_past_answers_are_copied_by_their_own_tenant_alone(self, pair):
        scheduler = Scheduler(pair, Limits(texts=2, slots=4096, past_tokens=1000), GraphConfig(cost="flat"))
        job = {"tokens": (1, 2, 3), "max_tokens": 40, "temperature": 1.0, "seed": 1}
        first = answers(scheduler, Job("first", tenant="anna", **job))["first"]
        again = answers(scheduler, Job("again", tenant="anna", **job))["again"]
        other = answers(scheduler, Job("other", tenant="bob", **job))["other"]
        assert tokens(first) == tokens(again) == tokens(other)
        assert len(again) < min(len(first), len(other)) - 5
        assert {tenant: past.tokens for tenant, past in scheduler._pasts.items()} == {"anna": 80, "bob": 40}

    def test_it_is_bounded(self):
        past = Past(100)
        for start in range(50):
            past.add(range(start, start + 7))
            assert past.tokens <= 100
        past.add(range(1000))
        assert past.tokens <= 100

    def test_old_answers_are_forgotten_last_ones_found(self):
        past = Past(40)
        past.add([1, 2, 3, 4])
        past.add(range(100, 130))
        past.add(range(200, 215))
        assert max(length for _, (_, length) in past.matches([1, 2, 3])) == 0
        assert max(length for _, (_, length) in past.matches([9, 200, 201])) == 2

    def test_tenants_are_bounded(self, pair):
        scheduler = Scheduler(pair, Limits(texts=2, slots=4096, past_tokens=100, tenants=3))
        for number in range(10):
            answers(scheduler, Job(str(number), (1, 2), tenant=str(number), max_tokens=2))
        assert len(scheduler._pasts) == 3


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class TestGrammar:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_answers_conform_to_a_schema(self, speaking, temperature):
        scheduler = Scheduler(speaking, Limits(texts=2, slots=4096), GraphConfig(cost="flat"))
        prompt = tuple(speaking.tokenizer("the cat sat")["input_ids"])
        jobs = [Job(str(seed), prompt, max_tokens=200, temperature=temperature, seed=seed) for seed in range(3)]
        schema = {"type": "json_schema", "schema": SCHEMA}
        ends = tuple(speaking.tokenizer.convert_tokens_to_ids(["<|end|>"]))
        jobs = [Job(**vars(job) | {"grammar": schema, "stop_token_ids": ends}) for job in jobs]
        for told in answers(scheduler, *jobs).values():
            assert told[-1].finish_reason == "stop", told[-1]
            found = json.loads(speaking.tokenizer.decode(tokens(told), skip_special_tokens=True))
            assert set(found) == {"name", "age"} and isinstance(found["age"], int) and len(found["name"]) <= 5

    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            ({"type": "xml"}, "'xml' is not known"),
            ({"type": "json_schema", "schema": {"type": "nonsense"}}, "cannot be followed"),
            ({"type": "json_schema", "schema": [1, 2]}, r"cannot be \[1, 2\]"),
            ({"type": "choice", "choices": []}, r"cannot be \[\]"),
            ({"type": "regex", "pattern": "(a"}, "invalid regex"),
            ({"type": "lark", "grammar": "root ::= a"}, "Rule 'a' not found"),
        ],
    )
    def test_a_grammar_that_cannot_be_used_is_refused(self, speaking, grammar, message):
        scheduler = Scheduler(speaking, Limits(texts=2, slots=4096))
        with pytest.raises(UsageError, match=message) as found:
            scheduler.submit(Job("a", (1, 2), grammar=grammar))
        assert "\n" not in str(found.value)

    def test_a_grammar_that_fails_in_an_answer_is_the_fault_of_that_request_alone(self, speaking):
        scheduler = Scheduler(speaking, Limits(texts=2, slots=4096))
        endless = Job("a", (9, 10), grammar={"type": "json_schema", "schema": {"$ref": "#"}})
        found = answers(scheduler, endless, Job("b", (9, 10), max_tokens=3))
        assert found["a"][-1].error == {
            "kind": "usage",
            "message": "the grammar cannot be followed: no text conforms to it",
        }
        assert len(tokens(found["b"])) == 3
