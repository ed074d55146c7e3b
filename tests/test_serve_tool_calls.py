"""Tools through OpenAI's client: calls, choices and reasoning, with a model that repeats what the user said."""

import copy
import json
import random

import httpx
import jsonschema_rs
import numpy as np
import openai
import pytest
from serve_tools import LiveServer, fake_command, tokenizer
from tokenizers import AddedToken
from tool_templates import HERMES, QWEN3, SPECIAL, TEMPLATES, tokenizer_with

from draftgraph.batching.grammar import matcher_of, vocabulary_of
from draftgraph.cli.options import TEXTS
from draftgraph.errors import UsageError
from draftgraph.serve.errors import ApiError
from draftgraph.serve.formats import REASONING, AnswerFormats, ToolUse
from draftgraph.serve.jobs import render, template_message
from draftgraph.serve.schemas import ChatRequest, Message
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.tool_calls import NAMES

CITY = {"type": "string", "enum": ["Paris", "Rome"]}
WEATHER = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 0, "maximum": 9}, "hot": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def function(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


TOOLS = [function("weather", WEATHER, description="Of a city"), function("now")]
CALLS = {
    "hermes": 'See:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "pythonic": '[weather(city="Paris", days=3), now()]',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": 'See:[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral with [ARGS]": 'See:[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
    "deepseek_v3": "See:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": 'See:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder": "See:\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v32": 'See:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
}
CALLS["deepseek_v4"] = CALLS["deepseek_v32"].replace("function_calls", "tool_calls")
CALLED = [("weather", {"city": "Paris", "days": 3}), ("now", {})]


EVERY_KIND = {
    "type": "object",
    "$defs": {"Side": {"enum": ["left", "right"], "type": "string"}, "Text": {"type": "string", "description": "Any"}},
    "properties": {
        "name": {"$ref": "#/$defs/Text"},
        "side": {"anyOf": [{"$ref": "#/$defs/Side"}, {"type": "integer", "minimum": 0, "maximum": 5}]},
        "note": {"type": ["string", "null"], "title": "A note"},
        "code": {"type": "string", "pattern": "^[0-9]{2}$"},
        "short": {"type": "string", "maxLength": 3},
        "fixed": {"const": "it is"},
        "count": {"type": "integer", "minimum": 1, "maximum": 12},
        "shares": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "mixed": {"enum": ["a", 1, None]},
    },
    "required": ["name", "code", "mixed", "extra"],
    "additionalProperties": True,
}


@pytest.fixture(scope="module")
def server():
    with LiveServer(fake_command(window=4096), words=tokenizer_with(QWEN3)) as server:
        yield server


def ask(server, text, **options):
    options = {"temperature": 0, "messages": [{"role": "user", "content": text}], "tools": TOOLS} | options
    return server.client().chat.completions.create(model="fake", max_tokens=400, **options)


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def put_together(chunks):
    """What a client makes of a stream."""
    content = reasoning = ""
    calls = []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for piece in choice.delta.tool_calls or []:
                if piece.id is not None:
                    assert piece.index == len(calls) and piece.type == "function"
                    calls.append([piece.id, piece.function.name, ""])
                calls[piece.index][2] += piece.function.arguments or ""
    return content, reasoning, calls


class TestFamilies:
    @pytest.mark.parametrize("family", TEMPLATES)
    def test_calls_of_every_family_whole_and_streamed(self, family):
        words = tokenizer_with(TEMPLATES[family])
        with LiveServer(fake_command(window=4096), words=words) as server:
            answer = ask(server, CALLS[family]).choices[0]
            assert calls_of(answer.message) == CALLED and answer.finish_reason == "tool_calls"
            assert answer.message.content == ("See:" if "See" in CALLS[family] else None)
            ids = [call.id for call in answer.message.tool_calls]
            lengths = {9} if family.startswith("mistral") else {29}
            assert len(set(ids)) == 2 and {len(one) for one in ids} == lengths
            chunks = list(ask(server, CALLS[family], stream=True))
            content, _, calls = put_together(chunks)
            assert content == (answer.message.content or "")
            assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLED
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            told = [chunk.choices[0] for chunk in chunks[1:]]
            assert all(one.delta.model_dump(exclude_none=True) or one.finish_reason for one in told)  # none is empty
            if family != "pythonic":
                pieces = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
                assert len(pieces) > 4  # arguments come as they are written

    @pytest.mark.parametrize("family", TEMPLATES)
    def test_a_template_gets_its_own_calls_and_results_back(self, family):
        words = tokenizer_with(TEMPLATES[family])
        formats = AnswerFormats(ServerSettings(), words)
        parser = formats.parser([], ToolUse.of(request()), whole=True)
        parsed = parser.push(CALLS[family] if family != "llama3_json" else CALLS[family].partition(";")[0], last=True)
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in parsed.calls
        ]
        turns = [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": parsed.content or None, "tool_calls": calls, "refusal": None},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"},
        ]
        messages = [template_message(Message(**turn), place) for place, turn in enumerate(turns)]
        text = render(words, messages, {"tools": TOOLS, "add_generation_prompt": True})
        written = "".join(CALLS[family].removeprefix("<|python_tag|>").partition("; {")[0].split())
        if family == "mistral":
            assert (
                f'"id": "{calls[0]["id"]}"' in text and '[TOOL_CALLS] [{"name": "weather", "arguments": {"city"' in text
            )
        else:
            assert written in "".join(text.split())
        assert "sunny" in text and text.endswith("<|assistant|>")


class TestAnswers:
    def test_without_tools_or_with_none_chosen_calls_are_text(self, server):
        text = CALLS["hermes"]
        for options in ({"tools": openai.omit}, {"tool_choice": "none"}):
            answer = ask(server, text, **options).choices[0]
            assert answer.message.content == text and answer.message.tool_calls is None
            assert answer.finish_reason == "stop"

    def test_malformed_calls_are_text(self, server):
        for text in ("<tool_call>what</tool_call>", '<tool_call>{"name": "now", "arguments": {]}</tool_call>'):
            answer = ask(server, text).choices[0]
            assert answer.message.content == text and answer.finish_reason == "stop"

    def test_special_tokens_do_not_leak_into_content(self):
        with LiveServer(fake_command(window=4096), words=tokenizer_with(TEMPLATES["mistral"])) as server:
            text = f"a{SPECIAL[0]} b{SPECIAL[1]}{SPECIAL[2]}"
            assert ask(server, text).choices[0].message.content == "a b"
            assert put_together(ask(server, text, stream=True))[0] == "a b"

    def test_one_call_where_calls_may_not_be_parallel(self, server):
        answer = ask(server, CALLS["hermes"], parallel_tool_calls=False).choices[0]
        assert calls_of(answer.message) == CALLED[:1]
        assert len(put_together(ask(server, CALLS["hermes"], parallel_tool_calls=False, stream=True))[2]) == 1

    def test_an_answer_cut_off_in_a_call_ends_for_its_length(self, server):
        answer = ask(server, CALLS["hermes"], max_completion_tokens=30).choices[0]
        assert answer.finish_reason == "length" and answer.message.content.startswith("See:")

    def test_logprobs_are_those_of_all_tokens(self, server):
        answer = ask(server, CALLS["hermes"], logprobs=True).choices[0]
        assert "".join(one.token for one in answer.logprobs.content) == CALLS["hermes"] + "<|end|>"
        chunks = ask(server, CALLS["hermes"], logprobs=True, stream=True)
        streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
        assert streamed == answer.logprobs.content

    def test_reasoning_is_told_apart(self, server):
        text = f"<think>\nhm\n</think>\n\n{CALLS['hermes']}"
        answer = ask(server, text).choices[0]
        assert answer.message.reasoning_content == "hm" and answer.message.content == "See:"
        assert calls_of(answer.message) == CALLED
        content, reasoning, calls = put_together(ask(server, text, stream=True))
        assert (content, reasoning, len(calls)) == ("See:", "hm", 2)
        plain = ask(server, "Yes.", tools=openai.omit).choices[0].message
        assert plain.content == "Yes." and not hasattr(plain, "reasoning_content")

    def test_a_template_may_begin_the_reasoning(self, server):
        options = {"tools": openai.omit, "extra_body": {"chat_template_kwargs": {"thinks": True}}}
        answer = ask(server, "hm\n</think>\nYes.", **options).choices[0].message
        assert (answer.reasoning_content, answer.content) == ("hm", "Yes.")
        assert put_together(ask(server, "hm\n</think>\nYes.", stream=True, **options))[:2] == ("Yes.", "hm")

    def test_parsers_can_be_turned_off(self):
        with LiveServer(
            fake_command(window=4096), words=tokenizer_with(QWEN3), tool_call_parser="none", reasoning_parser="none"
        ) as server:
            text = "<think>a</think><tool_call>{}</tool_call>"
            assert ask(server, text, tools=TOOLS[1:]).choices[0].message.content == text

    def test_usage_counts_every_token(self, server):
        counted = len(tokenizer_with(QWEN3)(CALLS["hermes"])["input_ids"])
        assert ask(server, CALLS["hermes"]).usage.completion_tokens == counted + 1


REFUSED = [
    ({"tool_choice": "required", "tools": openai.omit}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [function("now", [])], "tool_choice": "required"}, "tools"),
    ({"tools": [function("now", {"type": "string"})]}, "tools"),
    ({"tools": [function("now", {"properties": ["a"]})]}, "tools"),
    ({"tools": [function("now", {"properties": {"a": {"type": "what"}}})], "tool_choice": "required"}, "tools"),
    ({"tools": [function("now", {"enum": ["a" * 70_000]})], "tool_choice": "required"}, "messages"),  # tells of them
]


class TestRefusals:
    @pytest.mark.parametrize("options, param", REFUSED)
    def test_what_cannot_be_is_refused_by_name(self, server, options, param):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(server, "hello", **options)
        assert refused.value.param == param

    def test_tools_that_the_template_drops_are_refused(self):
        template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        with LiveServer(fake_command(window=4096), words=tokenizer_with(template), tool_call_parser="hermes") as server:
            with pytest.raises(openai.BadRequestError, match="no place for tools") as refused:
                ask(server, "hello")
            assert refused.value.param == "tools"
            assert ask(server, "hello", tool_choice="none").choices[0].message.content == "hello"

    def test_a_call_cannot_be_forced_in_an_unknown_form(self):
        words = tokenizer_with("{{ tools | tojson }}<|user|>{{ messages[0].content }}<|end|>")
        with LiveServer(fake_command(window=4096), words=words) as server:
            assert ask(server, "hello").choices[0].message.content == "hello"
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
                ask(server, "hello", tool_choice="required")

    @pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
    def test_an_unknown_parser_is_refused_with_those_that_are_known(self, option):
        with pytest.raises(UsageError, match="mistral, "):
            AnswerFormats(ServerSettings(**{option: "other"}), tokenizer_with(HERMES))

    def test_the_command_names_all_parsers(self):
        texts = TEXTS["serve"]
        assert set(texts["tool_call_parser"]["choices"]) == {"auto", "none", *NAMES}
        assert set(texts["reasoning_parser"]["choices"]) == {"auto", "none", *REASONING}

    def test_the_openapi_schema_has_calls(self, server):
        schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
        assert {"tool_calls", "reasoning_content"} <= schemas["ChatMessage"]["properties"].keys()


def request(**more):
    return ChatRequest(messages=[{"role": "user", "content": "hello"}], **{"tools": TOOLS} | more)


ENDS = [  # of sections, calls, arguments, values
    *("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜invoke>\n", "</function>\n</tool_call>"),
    *("</｜DSML｜parameter>\n", "</parameter>\n", "\n</parameter>\n", '"', "]", "}", ")"),
]


def random_answer(grammar, words, seed, patience=60, start=()):
    """Random tokens that the grammar allows, and ends of what has begun: after some, only those where there is one."""
    matcher, chosen, draw = matcher_of(grammar, vocabulary_of(words, len(words))), [*start], random.Random(seed)
    assert matcher.consume_tokens(chosen)
    ends = [words(end)["input_ids"] for end in ENDS]
    while not (matcher.is_accepting() and (len(chosen) > patience or draw.random() < 0.3)):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits[: len(words)]) if token != words.eos_token_id]
        if not allowed:
            break
        late = len(chosen) > patience
        structural = [token for token in allowed if token > 280] if late else []
        now = [draw.choice(structural or allowed)]
        if late or draw.random() < 0.2:
            now = draw.choice([end for end in ends if matcher.validate_tokens(end) == len(end)] or [now])
        chosen += now
        assert matcher.consume_tokens(now) and len(chosen) < 2000
    assert matcher.is_accepting()
    return chosen


class TestForcedCalls:
    @pytest.mark.parametrize("family", TEMPLATES)
    @pytest.mark.parametrize("choice", ["required", "weather", "one"])
    def test_whatever_a_grammar_allows_is_a_call_that_follows_its_schema(self, family, choice):
        words = tokenizer_with(TEMPLATES[family])
        formats = AnswerFormats(ServerSettings(), words)
        asked = {
            "required": request(tool_choice="required"),
            "weather": request(tool_choice={"type": "function", "function": {"name": "weather"}}),
            "one": request(tool_choice="required", parallel_tool_calls=False),
        }[choice]
        use, names, counts = ToolUse.of(asked), set(), set()
        for seed in range(12):
            tokens = random_answer(formats.grammar([], use, None), words, seed)
            parser = formats.parser([], use, whole=True)
            text = words.decode([token for token in tokens if token not in parser.dropped])
            found = parser.push(text, last=True)
            assert found.content == "" and found.calls, text
            counts.add(len(found.calls))
            for call in found.calls:
                arguments = json.loads(call.arguments)
                names.add(call.name)
                if call.name == "weather":
                    assert {"city", "days"} <= arguments.keys() <= {"city", "days", "hot"}
                    assert arguments["city"] in CITY["enum"] and arguments["days"] in range(10)
                else:
                    assert arguments == {}
        assert names == ({"weather"} if choice == "weather" else {"weather", "now"})
        one = choice != "required" or family == "llama3_json"  # whose templates take no more
        assert counts == {1} if one else max(counts) > 1

    @pytest.mark.parametrize(
        ("family", "special"),
        [("pythonic", False), ("qwen3_coder", False), ("deepseek_v32", False), ("deepseek_v32", True)],
    )
    def test_arguments_of_every_kind_follow_their_schema(self, family, special):
        """With the mark of DSML as a token that grammars read as text, and as a special one, which they do not."""
        words = tokenizer_with(TEMPLATES[family])
        if special:
            words = copy.deepcopy(words)
            words.add_tokens([AddedToken("｜DSML｜", special=True)], special_tokens=True)
        formats = AnswerFormats(ServerSettings(), words)
        use = ToolUse.of(request(tools=[function("book", EVERY_KIND)], tool_choice="required"))
        written = set()
        for seed in range(16):
            tokens = random_answer(formats.grammar([], use, None), words, seed, patience=30)
            parser = formats.parser([], use, whole=True)
            text = words.decode([token for token in tokens if token not in parser.dropped])
            found = parser.push(text, last=True)
            assert found.content == "" and found.calls, text
            for call in found.calls:
                arguments = json.loads(call.arguments)
                jsonschema_rs.validate(EVERY_KIND, arguments)
                written |= arguments.keys()
        assert written >= set(EVERY_KIND["required"])

    @pytest.mark.parametrize("family", TEMPLATES)
    def test_names_of_other_scripts_are_written_as_they_are(self, family):
        words = tokenizer_with(TEMPLATES[family])
        formats = AnswerFormats(ServerSettings(), words)
        call = CALLS[family].removeprefix("See:").lstrip("\n").removeprefix("<|python_tag|>").partition(";")[0]
        for name, is_allowed in (("météo", True), ("m\\u00e9t\\u00e9o", False)):
            tools = [function("météo", WEATHER), function("now")]
            use, text = ToolUse.of(request(tools=tools, tool_choice="required")), call.replace("weather", name)
            matcher = matcher_of(formats.grammar([], use, None), vocabulary_of(words, len(words)))
            tokens = words(text)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is is_allowed
        found = formats.parser([], use, whole=True).push(call.replace("weather", "météo"), last=True)
        assert found.calls[0].name == "météo"

    @pytest.mark.parametrize("family", ["qwen3_coder", "deepseek_v32"])
    @pytest.mark.parametrize(
        "schema",
        [{"type": "string", "enum": None}, {"enum": 5}, {"type": {"a": 1}}, {"type": [{"a": 1}]}, {"enum": {}}],
    )
    def test_a_malformed_schema_of_an_argument_is_refused_or_not_looked_at(self, family, schema):
        formats = AnswerFormats(ServerSettings(), tokenizer_with(TEMPLATES[family]))
        tools = [function("weather", {"properties": {"city": schema}}, strict=True), function("now")]
        for use in (ToolUse.of(request(tools=tools)), ToolUse.of(request(tools=tools, tool_choice="required"))):
            grammar = formats.grammar([], use, None)
            with pytest.raises(UsageError, match="cannot be followed"):
                matcher_of(grammar, vocabulary_of(formats._tokenizer, len(formats._tokenizer)))
        text = CALLS[family].replace("Paris", "5").replace('string="true"', 'string="false"')
        found = formats.parser([], ToolUse.of(request(tools=tools)), whole=True).push(text, last=True)
        assert json.loads(found.calls[0].arguments)["city"] in (5, "5")

    @pytest.mark.parametrize("family", ["pythonic", "qwen3_coder", "deepseek_v4"])
    def test_what_a_form_cannot_follow_beside_the_arguments_is_refused_by_name(self, family):
        formats = AnswerFormats(ServerSettings(), tokenizer_with(TEMPLATES[family]))
        one_of_both = WEATHER | {"anyOf": [{"required": ["hot"]}, {"required": ["days"]}]}
        use = ToolUse.of(request(tools=[function("weather", one_of_both)], tool_choice="required"))
        with pytest.raises(ApiError, match="'anyOf' beside the arguments of weather"):
            formats.grammar([], use, None)

    @pytest.mark.parametrize("has_tokens", [True, False])
    def test_reasoning_comes_before_a_forced_call(self, has_tokens):
        words = tokenizer_with(QWEN3)
        if not has_tokens:  # its tags and markers are plain text
            words = copy.deepcopy(tokenizer())
            words.chat_template = QWEN3
        formats = AnswerFormats(ServerSettings(), words)
        use = ToolUse.of(request(tool_choice="required"))
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        for prompt, said, is_allowed in [
            ("", f"<think>\nhm\n</think>\n\n{call}", True),
            ("", call, True),
            ("", f"hm {call}", False),
            ("<think>\n", f"hm\n</think>\n{call}", True),
            ("", f"<think></think>{call}", True),
            ("<think>\n", "hm\n</think>\nno", False),
        ]:
            grammar = formats.grammar(words(prompt)["input_ids"], use, None)
            matcher = matcher_of(grammar, vocabulary_of(words, len(words)))
            tokens = words(said)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is is_allowed, said

    def test_a_response_format_is_for_content_behind_reasoning_and_instead_of_calls(self):
        words = tokenizer_with(QWEN3)
        formats = AnswerFormats(ServerSettings(), words)
        answer = {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        for use, said, is_allowed in [
            (None, '<think>hm</think>\n{"a": 1}', True),
            (None, '{"a": 1}', True),
            (None, call, False),
            (ToolUse.of(request()), call, True),
            (ToolUse.of(request()), '<think>hm</think>{"a": 1}', True),
            (ToolUse.of(request()), '{"b": 1}', False),
        ]:
            matcher = matcher_of(formats.grammar([], use, answer), vocabulary_of(words, len(words)))
            tokens = words(said)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is is_allowed, said
        for inner in ({"type": "lark", "grammar": 'start: "yes"'}, {"type": "regex", "pattern": "y/?es"}):
            grammar = formats.grammar([], None, inner)
            assert matcher_of(grammar, vocabulary_of(words, len(words))).validate_tokens(words("yes")["input_ids"]) == 3

    def test_a_plain_grammar_stays_as_it_is(self):
        formats = AnswerFormats(ServerSettings(), tokenizer_with(HERMES))
        answer = {"type": "json_object"}
        assert formats.grammar([], None, answer) is answer and formats.grammar([], None, None) is None
        assert formats.grammar([], ToolUse.of(request()), None) is None


def spelled(words, text):
    """In tokens of single characters, none of which is an added one."""
    return [token for sign in text for token in words(sign)["input_ids"]]


class TestStrictFunctions:
    """With tool_choice auto: the model may say anything, but the calls of a strict function follow its schema."""

    TOOLS = (function("weather", WEATHER, strict=True), function("now", {"properties": {"zone": {"enum": ["utc"]}}}))

    def grammar_of(self, words, **more):
        formats, use = AnswerFormats(ServerSettings(), words), ToolUse.of(request(tools=list(self.TOOLS), **more))
        return formats, use, formats.grammar([], use, None)

    def allows(self, words, grammar, tokens):
        matcher = matcher_of(grammar, vocabulary_of(words, len(words)))
        return matcher.validate_tokens(tokens) == len(tokens)

    @pytest.mark.parametrize("family", TEMPLATES)
    def test_calls_follow_the_schema_and_anything_else_may_be_said(self, family):
        words = tokenizer_with(TEMPLATES[family])
        _, _, grammar = self.grammar_of(words)
        call = CALLS[family] if family != "llama3_json" else CALLS[family].partition(";")[0]
        for said in ("", "Hm.", "a < b > {} [1] f(x=2)", "It is <b>hot</b>,</think> I think.", " \n", "ünïcode"):
            assert self.allows(words, grammar, words(said)["input_ids"])
        for wrong in ("Berlin", "Par is"):
            assert self.allows(words, grammar, words(call)["input_ids"])
            assert not self.allows(words, grammar, words(call.replace("Paris", wrong))["input_ids"])
            assert not self.allows(words, grammar, spelled(words, call.replace("Paris", wrong)))

    @pytest.mark.parametrize("family", TEMPLATES)
    @pytest.mark.parametrize(
        "tokens", [lambda words, text: words(text)["input_ids"], spelled], ids=["marks", "spelled"]
    )
    def test_whatever_follows_the_beginning_of_a_call_is_one(self, family, tokens):
        words = tokenizer_with(TEMPLATES[family])
        formats, use, grammar = self.grammar_of(words)
        trigger = formats._calls.trigger
        start = tokens(words, f"Let me see: {trigger}")
        for seed in range(6):
            parser = formats.parser([], use, whole=True)
            answer = random_answer(grammar, words, seed, patience=30, start=start)
            text = words.decode([token for token in answer if token not in parser.dropped])
            found = parser.push(text, last=True)
            assert found.calls and "Let me see:" in found.content and trigger not in found.content, text
            for call in found.calls:
                arguments = json.loads(call.arguments)
                if call.name == "weather":
                    jsonschema_rs.validate(WEATHER, arguments)

    @pytest.mark.parametrize("family", ["pythonic", "llama3_json"])
    def test_an_answer_that_begins_as_a_bare_call_is_one(self, family):
        words = tokenizer_with(TEMPLATES[family])
        _, _, grammar = self.grammar_of(words)
        call = CALLS[family].removeprefix("<|python_tag|>").partition(";")[0]
        for space in ("", "\n "):
            assert self.allows(words, grammar, words(call)["input_ids"])
            assert not self.allows(words, grammar, words(space + call.replace("Paris", "Berlin"))["input_ids"])
        assert self.allows(words, grammar, words(f"So: {call.replace('Paris', 'Berlin')}")["input_ids"])

    @pytest.mark.parametrize("family", TEMPLATES)
    def test_a_function_that_is_not_strict_is_called_as_the_model_likes(self, family):
        words = tokenizer_with(TEMPLATES[family])
        _, _, grammar = self.grammar_of(words)
        zone = {
            "pythonic": '[now(zone="mars")]',
            "llama3_json": '{"name": "now", "parameters": {"zone": "mars"}}',
            "qwen3_coder": "<function=now>\n<parameter=zone>\nmars\n</parameter>\n</function>\n</tool_call>",
        }
        if family in zone:
            assert self.allows(words, grammar, words(zone[family])["input_ids"])
        else:
            start, _, rest = CALLS[family].rpartition("now")
            filled = rest.replace("{}", '{"zone": "mars"}').replace(
                '">\n</｜DSML｜invoke',
                '">\n<｜DSML｜parameter name="zone" string="true">mars</｜DSML｜parameter>\n</｜DSML｜invoke',
            )
            assert "mars" in filled and self.allows(words, grammar, words(f"{start}now{filled}")["input_ids"])

    def test_reasoning_may_speak_of_calls(self):
        words = tokenizer_with(QWEN3)
        _, _, grammar = self.grammar_of(words)
        for said in ("<think>Shall I write a call?</think>No.", f"<think>hm</think>{CALLS['hermes']}"):
            assert self.allows(words, grammar, words(said)["input_ids"])
        wrong = CALLS["hermes"].replace("Paris", "Berlin")
        assert not self.allows(words, grammar, words(f"<think>hm</think>{wrong}")["input_ids"])

    def test_nothing_is_asked_of_calls_where_no_function_is_strict_or_their_form_is_not_known(self):
        for words, tools in (
            (tokenizer_with(HERMES), [function("weather", WEATHER), function("now", strict=False)]),
            (tokenizer_with("{{ tools | tojson }}{{ messages[0].content }}"), list(self.TOOLS)),
        ):
            assert AnswerFormats(ServerSettings(), words).grammar([], ToolUse.of(request(tools=tools)), None) is None

    def test_the_engine_is_told(self, server):
        refused = function("weather", WEATHER | {"description": "refuse"})  # which the fake engine does, in a grammar
        assert ask(server, "hello", tools=[refused]).choices[0].message.content == "hello"
        refused["function"]["strict"] = True
        with pytest.raises(openai.BadRequestError, match="this grammar is refused"):
            ask(server, "hello", tools=[refused])

    def test_schemas_that_cannot_be_followed_are_refused(self, server):
        either = {"oneOf": [{"type": "string", "maxLength": 9}, {"type": "string", "minLength": 5}]}
        unknown = function("weather", {"properties": {"city": either}}, strict=True)
        with pytest.raises(openai.BadRequestError, match="oneOf") as refused:
            ask(server, "hello", tools=[unknown])
        assert refused.value.param == "tools"
