"""What fields of requests do, and that none is passed over in silence: against a model that repeats what it is told."""

import asyncio
import copy
import json
from itertools import chain

import httpx
import pytest
from conftest import REPOSITORY
from serve_tools import END, USER, WINDOW, LiveServer, tokenizer
from tokenizers.processors import TemplateProcessing

from draftgraph.serve.fields import IGNORED, REFUSED
from draftgraph.serve.grammars import Grammars
from draftgraph.serve.jobs import Prompts
from draftgraph.serve.schemas import ChatRequest, CompletionRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = "the cat sat on the mat"
ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
SYSTEM = 3  # a special token


def with_beginning():
    """A tokenizer that adds a token before every text."""
    words = copy.deepcopy(tokenizer())
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", SYSTEM)]
    )
    return words


@pytest.fixture(scope="module")
def server():
    with LiveServer(words=with_beginning(), aliases=("gpt-4o", "org/other")) as server:
        yield server


def post(server, path=CHAT, text=SAID, **fields) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return httpx.post(server.url + path, json={"temperature": 0, "max_tokens": 60} | asked | fields)


def ask(server, path=CHAT, text=SAID, **fields) -> dict:
    answer = post(server, path, text, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server, path=CHAT, text=SAID, **fields) -> list[dict]:
    answer = post(server, path, text, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines[:-1]]


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")


def said(answer: dict) -> str:
    return text_of(answer["choices"][0])


def streamed(found: list[dict]) -> str:
    return "".join(text_of(choice) for event in found for choice in event["choices"])


def refused(answer: httpx.Response, param: str, *words: str) -> dict:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and all(word in error["message"] for word in words), error
    return error


class TestNothingIsPassedOverInSilence:
    @ROUTES
    @pytest.mark.parametrize(
        ("name", "value", "near"),
        [
            ("temprature", 0.5, "temperature"),
            ("max_new_tokens", 5, "max_tokens"),
            ("stop_sequences", ["a"], ""),
            ("mirostat", 2, ""),
            ("ignore_eoss", False, "ignore_eos"),
            ("x" * 100_000, 1, ""),
        ],
    )
    def test_an_unknown_field_is_refused_by_name(self, server, path, name, value, near):
        error = refused(post(server, path, **{name: value}), name[:64], "no such field", near)
        assert error["code"] == "unknown_parameter" and len(error["message"]) < 200

    @ROUTES
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("use_beam_search", True),
            ("watermarking", True),
            ("include_reasoning", False),
            ("length_penalty", 1.5),
            ("prompt_logprobs", 0),
            ("logits_processors", ["a"]),
            ("chat_template", "{{ messages }}"),
            ("audio", {"voice": "x"}),
            ("functions", [{"name": "f"}]),
            ("modalities", ["text", "audio"]),
            ("documents", [{"text": "a"}]),
            ("truncation_side", "right"),
        ],
    )
    def test_what_cannot_be_done_is_refused_with_the_reason(self, server, path, name, value):
        error = refused(post(server, path, **{name: value}), name, "not supported", REFUSED[name])
        assert error["code"] == "unsupported_parameter"

    @ROUTES
    def test_values_that_ask_for_nothing_are_accepted(self, server, path):
        nothing = {"n": 1, "use_beam_search": False, "length_penalty": 1.0, "functions": [], "modalities": ["text"]}
        nothing |= dict.fromkeys(["anything", "prompt_logprobs", "logits_processors", "audio", "background"])
        nothing |= {"truncation_side": "left", "best_of": 1, "function_call": "none", "verbosity": "medium"}
        nothing |= {"vllm_xargs": {}, "include_reasoning": True}
        assert said(ask(server, path, **nothing)) == SAID

    @ROUTES
    def test_what_changes_no_answer_is_ignored(self, server, path):
        assert said(ask(server, path, **dict.fromkeys(IGNORED, "anything"))) == SAID

    @pytest.mark.parametrize(
        ("more", "param", "near"),
        [
            ({"draftgraph": {"max_node": 3}}, "draftgraph.max_node", "max_nodes"),
            ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage"),
            ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "", "not supported"),
            ({"response_format": {"type": "text", "schemas": {}}}, "response_format.schemas", "schema"),
        ],
    )
    def test_fields_of_fields_are_held_to_the_same(self, server, more, param, near):
        assert refused(post(server, **more), param or "stream_options.continuous_usage_stats", near)

    def test_the_guide_names_what_is_ignored(self):
        guide = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
        assert all(f"`{name}`" in guide for name in IGNORED)

    def test_no_field_is_both_known_and_not(self):
        for known in (ChatRequest.model_fields, CompletionRequest.model_fields):
            assert not IGNORED & known.keys()
        assert not IGNORED & REFUSED.keys()
        assert REFUSED.keys() & (ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()) == set()


class TestEnds:
    def test_no_stop_string_ends_an_answer_before_min_tokens(self, server):
        least = len(tokenizer()("the cat sat")["input_ids"])
        for fields, expected in (({}, "the c"), ({"min_tokens": least}, "the cat sat on the m")):
            assert said(ask(server, stop=["at"], **fields)) == expected
            assert streamed(events(server, stop=["at"], **fields)) == expected

    @ROUTES
    def test_a_stop_string_is_part_of_the_answer_if_asked_for(self, server, path):
        fields = {"stop": ["sat on"], "include_stop_str_in_output": True}
        assert said(ask(server, path, **fields)) == "the cat sat on"
        assert streamed(events(server, path, **fields)) == "the cat sat on"

    def test_a_stop_token_is_part_of_the_answer_if_asked_for(self, server):
        (token,) = tokenizer()("!")["input_ids"]
        fields = {"text": "ab!cd", "path": COMPLETIONS, "stop_token_ids": [token], "add_special_tokens": False}
        assert said(ask(server, **fields)) == "ab"
        assert said(ask(server, **fields, include_stop_str_in_output=True)) == "ab!"

    @ROUTES
    def test_more_tokens_than_there_may_be_are_refused(self, server, path):
        refused(post(server, path, max_tokens=5, min_tokens=6), "min_tokens", "at most 5")


class TestTokens:
    def test_the_tokens_of_a_chat_are_told(self, server):
        found = ask(server, return_token_ids=True, n=2)
        prompt = found["prompt_token_ids"]
        assert prompt[0] == USER and tokenizer().decode(prompt).count(SAID) == 1
        for choice in found["choices"]:
            assert choice["token_ids"] == [*tokenizer()(SAID)["input_ids"], END]
        chunks = events(server, return_token_ids=True)
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
        pieces = [choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]]
        assert list(chain(*pieces)) == found["choices"][0]["token_ids"]
        assert "token_ids" not in ask(server)["choices"][0] and "prompt_token_ids" not in ask(server)

    def test_the_tokens_of_a_completion_are_told(self, server):
        texts = ["the cat", "a mat"]
        prompts = [[SYSTEM, *tokenizer()(text)["input_ids"]] for text in texts]
        found = ask(server, COMPLETIONS, texts, return_token_ids=True)["choices"]
        assert [choice["prompt_token_ids"] for choice in found] == prompts
        assert [choice["token_ids"] for choice in found] == [[*prompt, END] for prompt in prompts]
        chunks = [chunk["choices"][0] for chunk in events(server, COMPLETIONS, texts, return_token_ids=True)]
        for index, prompt in enumerate(prompts):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert [chunk.get("prompt_token_ids") for chunk in own] == [prompt] + [None] * (len(own) - 1)
            assert list(chain(*(chunk["token_ids"] for chunk in own))) == [*prompt, END]

    def test_tokens_of_a_stop_string_are_told(self, server):
        found = ask(server, return_token_ids=True, stop=["sat"])["choices"][0]
        assert tokenizer().decode(found["token_ids"]).startswith("the cat sat") and text_of(found) == "the cat "

    def test_special_tokens_are_shown_if_asked_for(self, server):
        prompt = [40, SYSTEM, 41]
        assert said(ask(server, COMPLETIONS, prompt)) == tokenizer().decode([40, 41])
        assert said(ask(server, COMPLETIONS, prompt, skip_special_tokens=False)) == tokenizer().decode(prompt)

    def test_words_are_forbidden_with_and_without_a_space(self, server):
        found = asyncio.run(Prompts(tokenizer(), Grammars(tokenizer()), 1 << 20).of_words(["cat", " mat", " "]))
        assert {tokenizer().decode(tokens) for tokens in found} == {"cat", " cat", "mat", " mat", " ", "  "}
        assert said(ask(server, bad_words=["dog"], allowed_token_ids=[5, 6], cache_salt="salt")) == SAID
        refused(post(server, bad_words=[""]), "bad_words", "1 to 512 characters")
        refused(post(server, allowed_token_ids=[]), "allowed_token_ids")
        refused(post(server, allowed_token_ids=[320]), "allowed_token_ids", "vocabulary")
        refused(post(server, cache_salt=""), "cache_salt")


class TestPrompts:
    def test_the_last_tokens_of_a_prompt_are_kept(self, server):
        whole = tokenizer()(SAID)["input_ids"]
        found = ask(server, COMPLETIONS, truncate_prompt_tokens=3, return_token_ids=True, echo=True)
        assert found["choices"][0]["prompt_token_ids"] == whole[-3:] and found["usage"]["prompt_tokens"] == 3
        assert said(found) == 2 * tokenizer().decode(whole[-3:])
        assert ask(server, truncate_prompt_tokens=4)["usage"]["prompt_tokens"] == 4
        assert said(ask(server, COMPLETIONS, truncate_prompt_tokens=1000)) == SAID
        refused(post(server, truncate_prompt_tokens=0), "truncate_prompt_tokens")

    @ROUTES
    def test_as_many_tokens_are_kept_as_there_is_room_for(self, server, path):
        long = "!" * (WINDOW + 50)
        refused(post(server, path, long), "messages" if path == CHAT else "prompt", "context window")
        found = ask(server, path, long, truncate_prompt_tokens=-1)
        assert found["usage"]["prompt_tokens"] == WINDOW - 60

    def test_special_tokens_are_added_unless_told_otherwise(self, server):
        count = len(tokenizer()(SAID)["input_ids"])
        assert ask(server, COMPLETIONS)["usage"]["prompt_tokens"] == count + 1
        assert ask(server, COMPLETIONS, add_special_tokens=False)["usage"]["prompt_tokens"] == count
        refused(post(server, add_special_tokens=True), "add_special_tokens")

    def test_a_final_message_can_be_continued_and_repeated(self, server):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
        asked = {"messages": messages, "return_token_ids": True}
        open_ended = ask(server, **asked, continue_final_message=True)
        assert tokenizer().decode(open_ended["prompt_token_ids"]).endswith("<|assistant|>so")
        closed = ask(server, **asked, add_generation_prompt=False)
        assert tokenizer().decode(closed["prompt_token_ids"]).endswith("<|assistant|>so<|end|>")
        assert said(ask(server, **asked, continue_final_message=True, echo=True)) == "sohi"
        assert streamed(events(server, **asked, echo=True)) == "sohi"
        both = {"continue_final_message": True, "add_generation_prompt": True}
        refused(post(server, **asked, **both), "add_generation_prompt")

    def test_an_effort_that_the_template_does_not_read_is_refused(self, server):
        refused(post(server, reasoning_effort="high"), "reasoning_effort", "chat template")


class TestNames:
    @ROUTES
    def test_an_answer_and_its_events_have_one_fingerprint(self, server, path):
        first = ask(server, path)["system_fingerprint"]
        assert first.startswith("fp_") and first == ask(server, path)["system_fingerprint"]
        usage = {"stream_options": {"include_usage": True}}
        assert {event["system_fingerprint"] for event in events(server, path, **usage)} == {first}

    @ROUTES
    @pytest.mark.parametrize("name", ["fake", "gpt-4o", "org/other"])
    def test_an_alias_is_answered_under_its_name(self, server, path, name):
        assert ask(server, path, model=name)["model"] == name
        assert {event["model"] for event in events(server, path, model=name)} == {name}

    def test_aliases_are_listed(self, server):
        models = server.client().models.list().data
        assert [model.id for model in models] == ["fake", "gpt-4o", "org/other"]
        assert {(model.root, model.parent, model.max_model_len) for model in models} == {("fake", None, WINDOW)}
        assert server.client().models.retrieve("org/other") == models[2]
        assert post(server, model="gpt-4").json()["error"]["code"] == "model_not_found"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class TestTokenizer:
    def tokenize(self, server, **body) -> dict:
        answer = httpx.post(f"{server.url}/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def test_a_text(self, server):
        own = tokenizer()(SAID)["input_ids"]
        found = self.tokenize(server, prompt=SAID, model="gpt-4o", return_token_strs=True)
        assert found == {
            "count": len(own) + 1,
            "max_model_len": WINDOW,
            "tokens": [SYSTEM, *own],
            "token_strs": tokenizer().convert_ids_to_tokens([SYSTEM, *own]),
        }
        found = self.tokenize(server, prompt=SAID, add_special_tokens=False)
        assert (found["tokens"], found["token_strs"]) == (own, None)

    @pytest.mark.parametrize(
        "more", [{}, {"continue_final_message": True}, {"chat_template_kwargs": {"shout": True}}, {"tools": [TOOL]}]
    )
    def test_a_chat_is_what_a_model_is_given(self, server, more):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
        tokens = self.tokenize(server, messages=messages, **more)["tokens"]
        assert tokens == ask(server, messages=messages, return_token_ids=True, **more)["prompt_token_ids"]

    def test_tokens_become_text_again(self, server):
        tokens = self.tokenize(server, prompt=SAID)["tokens"]
        found = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens})
        assert found.json() == {"prompt": f"<|system|>{SAID}"}

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": ["a"]}, 400),
            ("/tokenize", {"prompt": "a", "messages": []}, 400),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400),
            ("/tokenize", {"prompt": "a", "model": "other"}, 404),
            ("/tokenize", {"prompt": "a" * 100_000}, 400),
            ("/tokenize", {"messages": [{"role": "forbidden", "content": ""}]}, 400),
            ("/detokenize", {"tokens": [320]}, 400),
            ("/detokenize", {"tokens": [-1]}, 400),
            ("/detokenize", {"tokens": "a"}, 400),
            ("/detokenize", {"tokens": [1], "model": "other"}, 404),
        ],
    )
    def test_what_cannot_be_is_refused(self, server, path, body, status):
        answer = httpx.post(server.url + path, json=body)
        assert answer.status_code == status and answer.json()["error"]["param"], answer.text

    def test_keys_guard_it(self):
        with LiveServer(api_keys=("secret",)) as server:
            for path in ("/tokenize", "/detokenize"):
                assert httpx.post(server.url + path, json={"prompt": "a", "tokens": [1]}).status_code == 401
