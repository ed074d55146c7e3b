"""What an answer's text is made of: reasoning, content and tool calls, whole and in pieces of any size."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgraph.serve.parsing import JSON, PYTHON, AnswerParser, Brackets, Scan, Tags
from draftgraph.serve.tool_calls import FORMATS, NAMES, PythonicCalls, Value, call_format

HERMES = (
    "{% if tools %}<tool_call>\\n{'name': <function-name>, 'arguments': <args-json-object>}\\n</tool_call>{% endif %}"
)
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
PYTHONIC = "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]"
MISTRAL = "{{ '[TOOL_CALLS] [' }}"
MISTRAL_ARGS = "{{ '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"
DEEPSEEK = "{{ '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' }}"
DEEPSEEK_31 = "{{ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}"
QWEN3_CODER = "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n"
DEEPSEEK_32 = (
    '{%- set dsml_token = "｜DSML｜" -%} <{{ dsml_token }}function_calls> {%- for call in message.tool_calls -%}'
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
    "qwen3_coder": QWEN3_CODER,
    "deepseek_v32": DEEPSEEK_32,
    "deepseek_v4": DEEPSEEK_32.replace("function_calls", "tool_calls"),
}
PARIS, ADD = ("weather", {"city": 'Par"is {}', "days": [1, 2]}), ("add", {})
PARIS_TEXT = json.dumps(PARIS[1])
THINK = Tags("<think>", "</think>")

# family, answer, its content, its calls
ANSWERS = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS_TEXT}}}\n</tool_call>', "", [PARIS]),
    ("hermes", f'<tool_call>{{"arguments": {PARIS_TEXT}, "name": "weather"}}</tool_call>', "", [PARIS]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name":"weather","arguments":{PARIS_TEXT}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [PARIS, ADD],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", [ADD]),
    ("hermes", 'a <tool_call> {"name": "add", "arguments": {}} </tool_call> b < c', "a b < c", [ADD]),
    ("llama3_json", f'{{"name": "weather", "parameters": {PARIS_TEXT}}}', "", [PARIS]),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS_TEXT}}}', "", [PARIS]),
    (
        "llama3_json",
        f'\n{{"type": "function", "function": "weather", "parameters": {PARIS_TEXT}}}; '
        '{"name": "add", "parameters": {}}',
        "",
        [PARIS, ADD],
    ),
    ("llama3_json", 'Here: {"name": "add", "parameters": {}}', 'Here: {"name": "add", "parameters": {}}', []),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", '["name"]', '["name"]', []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS_TEXT}, "id": "abcdefghi"}}, '
        '{"name": "add", "arguments": {}}]',
        "",
        [PARIS, ADD],
    ),
    ("mistral", 'So: [TOOL_CALLS][{"arguments": {}, "name": "add"}]', "So:", [ADD]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS_TEXT}[TOOL_CALLS]add[ARGS]{{}}", "", [PARIS, ADD]),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]" + PARIS_TEXT, "", [PARIS]),
    (
        "deepseek_v3",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{PARIS_TEXT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [PARIS, ADD],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS_TEXT}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, ADD],
    ),
    (
        "qwen3_coder",
        'Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nPar"is {}\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "Let me see.",
        [PARIS, ADD],
    ),
    ("qwen3_coder", "<function=add><parameter=a>[1, 2]</parameter></function>", "", [("add", {"a": "[1, 2]"})]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n a </parameter> b\n\n</parameter>\n</function>"
        "\n</tool_call>",
        "",
        [("weather", {"city": "\n a </parameter> b\n"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=set><parameter=on>True</parameter><parameter=at>None</parameter><parameter=name>7</parameter>"
        "<parameter=kind>3</parameter><parameter=maybe>null</parameter><parameter=other>{1</parameter></function></tool_call>",
        "",
        [("set", {"on": True, "at": None, "name": "7", "kind": 3, "maybe": None, "other": "{1"})],
    ),
    ("qwen3_coder", "a <tool_call> <function=x", "a <tool_call> <function=x", []),
    (
        "deepseek_v32",
        'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Par"is {}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Well.",
        [PARIS, ADD],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="set"><｜DSML｜parameter name="name" string="true">\n7 <b></b>\n</｜DSML｜parameter>'
        '<｜DSML｜parameter name="on" string="false">yes</｜DSML｜parameter></｜DSML｜invoke>',
        "",
        [("set", {"name": "\n7 <b></b>\n", "on": "yes"})],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [ADD],
    ),
    ("pythonic", "[weather(city='Par\"is {}', days=[1, 2]), add()]", "", [PARIS, ADD]),
    ("pythonic", "<|python_start|>[add(a=true, b=None, c=-1.5, d={'e': [null]})]<|python_end|>", "",
     [("add", {"a": True, "b": None, "c": -1.5, "d": {"e": [None]}})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[Note] that (this) is text", "[Note] that (this) is text", []),
    ("pythonic", "[open('/etc/passwd').read()]", "[open('/etc/passwd').read()]", []),
]  # fmt: skip

MALFORMED = [
    ("hermes", "<tool_call>what?</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "argum'),
    ("hermes", "a <tool_ca"),
    ("llama3_json", '{"name": "add", "parameters": [1]}'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>what?"),
    ("qwen3_coder", "<tool_call>what?</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add"),
    ("deepseek_v32", "<｜DSML｜function_calls>\nwhat?"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add'),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[add(**{})]"),
    ("pythonic", "[add("),
]


SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "set": {
        "$defs": {"Kind": {"enum": [1, 2, 3]}},
        "properties": {
            "on": {"type": "boolean"},
            "at": {"type": ["integer", "null"]},
            "name": {"type": "string"},
            "kind": {"anyOf": [{"$ref": "#/$defs/Kind"}, {"const": "x"}]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "other": {"type": "object"},
        },
    },
}


def parsed(parser, pieces):
    """Content, reasoning and calls, put together as a client would."""
    content = reasoning = ""
    calls = []
    for found in [*map(parser.push, pieces), parser.push("", last=True)]:
        content, reasoning = content + found.content, reasoning + found.reasoning
        for one in found.calls:
            if one.name is not None:
                assert one.index == len(calls)
                calls.append([one.name, "", one.id])
            else:
                assert one.id is None and one.index == len(calls) - 1
            calls[one.index][1] += one.arguments
    return content, reasoning, calls


def read(family, answer, pieces=None, **more):
    content, _, calls = parsed(AnswerParser(call_format(family, ""), schemas=SCHEMAS, **more), pieces or [answer])
    return content, [(name, json.loads(arguments)) for name, arguments, _ in calls]


def cut(text, places):
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family, answer, content, calls", ANSWERS)
def test_calls_are_read_in_the_form_of_each_family(family, answer, content, calls, whole):
    assert read(family, answer, whole=whole) == (content, calls)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 200), max_size=8))
def test_pieces_of_any_size_give_the_same(case, places):
    family, answer, content, calls = case
    assert read(family, answer, cut(answer, places)) == (content, calls)


@pytest.mark.parametrize("family, answer, content, calls", ANSWERS)
def test_single_characters_give_the_same(family, answer, content, calls):
    assert read(family, answer, list(answer)) == (content, calls)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family, answer", MALFORMED)
def test_malformed_calls_are_content(family, answer, whole):
    assert read(family, answer, whole=whole) == (answer, [])
    assert read(family, answer, list(answer), whole=whole) == (answer, [])


BROKEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "1'),
    ("deepseek_v31", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1<｜tool▁call▁end｜>'),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</param"),
    ("deepseek_v32", '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">1</｜DSML｜invoke>'),
]


@pytest.mark.parametrize("family, answer", BROKEN)
def test_broken_arguments_are_content_of_a_whole_answer_and_told_as_they_are_in_a_stream(family, answer):
    assert read(family, answer, whole=True) == (answer, [])
    content, _, calls = parsed(AnswerParser(call_format(family, "")), list(answer))
    assert content == "" and calls[0][0] == "add" and calls[0][1].startswith('{"a": ')


UNFINISHED = [  # family, what is said again and again, and behind it
    ("hermes", "<tool_call>{", ""),
    ("hermes", "<tool_call>{", "}" * 500),
    ("hermes", '<tool_call>{"', ""),
    ("hermes", '<tool_call>{\\"', ""),
    ("hermes", '<tool_call>{"a":"', ""),
    ("hermes", '<tool_call>{",":[":"', ""),
    ("mistral", "[TOOL_CALLS]f{", ""),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", ""),
    ("pythonic", "<|python_start|>[", ""),
    ("pythonic", "<|python_start|>[\"'", ""),
    ("qwen3_coder", "<function=a><parameter=b>", ""),
    ("qwen3_coder", "<function=a><parameter=b>", "</parameter><parameter=<"),
    ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">', ""),
]


def test_the_mark_of_a_call_has_a_sign_that_no_value_has_outside_of_quotes():
    for one in FORMATS:
        syntax = PYTHON if isinstance(one, PythonicCalls) else JSON
        assert set(syntax.foreign) & set(one.trigger) and "\\" in syntax.foreign


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family, begun, rest", UNFINISHED)
def test_calls_that_are_begun_again_and_again_are_read_a_few_times_at_most(monkeypatch, family, begun, rest, whole):
    """However many there are: time to read an answer is in proportion to its length."""
    end, cut, looked_at = Brackets.end, Scan.cut, []

    def counted_end(self, text):
        return end(self, (looked_at.append(1) or sign for sign in text))

    def counted_cut(self, end):
        taken = cut(self, end)
        looked_at.append(len(taken))
        return taken

    monkeypatch.setattr(Brackets, "end", counted_end)
    monkeypatch.setattr(Scan, "cut", counted_cut)
    text = begun * 500 + rest
    content, _, calls = parsed(AnswerParser(call_format(family, ""), whole=whole), [text])
    assert sum(looked_at) < 5 * len(text)
    if whole:
        assert (content, calls) == (text, [])


@pytest.mark.parametrize(
    ("family", "before", "call"),
    [
        ("hermes", '<tool_call>{"a":', '<tool_call>{"name": "add", "arguments": {}}'),
        ("hermes", '<tool_call>{"a": "', '<tool_call>{"name": "add", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}', '<tool_call>{"arguments": {}, "name": "add"}'),
        ("mistral", "[TOOL_CALLS]f{", "[TOOL_CALLS]add{}"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}"),
        ("pythonic", "<|python_start|>[f('", "<|python_start|>[add()]"),
        ("qwen3_coder", "<function=f><parameter=a>1", "<function=add></function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=<", "<function=add></function>"),
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">',
         '<｜DSML｜invoke name="add"></｜DSML｜invoke>'),
    ],
)  # fmt: skip
def test_a_call_behind_one_that_has_no_end_is_read(family, before, call):
    assert read(family, before * 3 + call, whole=True) == (before * 3, [ADD])


def test_arguments_behind_a_call_that_has_failed_are_read():
    failed = "<function=f><parameter=a>1</parameter><parameter=<"
    call = "<function=set><parameter=name>x</parameter></function>"
    assert read("qwen3_coder", failed + call, whole=True) == (failed, [("set", {"name": "x"})])


@pytest.mark.parametrize("whole", [True, False])
def test_no_schema_is_resolved_but_those_of_arguments_that_are_read(monkeypatch, whole):
    resolved, of = [], Value.of
    monkeypatch.setattr(Value, "of", lambda schema, definitions: resolved.append(schema) or of(schema, definitions))
    call = "<function=set><parameter=name>7</parameter></function>"
    assert read("qwen3_coder", call, whole=whole) == ("", [("set", {"name": "7"})])
    assert resolved == [SCHEMAS["set"]["properties"]["name"]]


def test_the_name_comes_first_and_arguments_as_they_are_written():
    parser = AnswerParser(call_format("hermes", ""))
    assert parser.push('<tool_call>\n{"name": "ad').calls == []
    (first,) = parser.push('d", "arguments": {"a"').calls
    assert (first.name, first.index, first.arguments) == ("add", 0, '{"a"') and first.id.startswith("call_")
    (second,) = parser.push(": 1").calls
    assert (second.name, second.id, second.index, second.arguments) == (None, None, 0, ": 1")
    assert [one.arguments for one in parser.push("}}").calls] == ["}"]
    assert parser.push("</tool_call>").calls == [] and parser.push("", last=True).content == ""


def test_text_that_cannot_be_a_call_is_not_held_back():
    parser = AnswerParser(call_format("hermes", ""), THINK)
    assert [parser.push(piece).content for piece in ("One ", "and", " two < th", "ree")] == [
        "One",
        " and",
        " two < th",
        "ree",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_ids_differ_and_are_as_long_as_templates_want_them(name):
    ids = {call_format(name, "").new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() if name == "mistral" else one.startswith("call_") for one in ids)


def test_calls_beyond_the_most_are_left_out():
    two = '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    assert read("hermes", two, list(two), most_calls=1) == ("", [("a", {})])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_family_is_found_in_the_template(name):
    assert name in call_format("auto", TEMPLATES[name]).names


def test_other_templates_have_no_family():
    assert call_format("auto", "{{ messages }}") is None
    assert call_format("auto", "<tool_call>{{ name }}\n<arg_key>") is None
    assert call_format("none", HERMES) is None


def test_of_mistrals_two_forms_the_template_decides():
    assert call_format("mistral", MISTRAL_ARGS) is not call_format("mistral", MISTRAL)
    assert call_format("auto", MISTRAL_ARGS) is call_format("mistral", MISTRAL_ARGS)
    assert call_format("mistral", "") in FORMATS


REASONED = [
    ("<think>\nhm, so\n</think>\n\nYes.", False, "hm, so", "Yes."),
    ("hm, so\n</think>\n\nYes.", True, "hm, so", "Yes."),
    ("<think>hm</think>Yes.", True, "hm", "Yes."),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("<think>hm, s", False, "hm, s", ""),
    ("hm, s", True, "hm, s", ""),
    ("Yes, <think>no</think>", False, "", "Yes, <think>no</think>"),
    ("Yes.", False, "", "Yes."),
    ("<thin", False, "", "<thin"),
]


@pytest.mark.parametrize("answer, opened, reasoning, content", REASONED)
def test_reasoning_is_split_off(answer, opened, reasoning, content):
    for pieces in ([answer], list(answer)):
        assert parsed(AnswerParser(tags=THINK, thinking=opened), pieces) == (content, reasoning, [])


def test_calls_are_not_looked_for_in_reasoning():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parser = AnswerParser(call_format("hermes", ""), THINK)
    content, reasoning, calls = parsed(parser, list(f"<think>{call}</think>\n{call}"))
    assert (content, reasoning) == ("", call) and [name for name, _, _ in calls] == ["add"]
    assert parser.has_calls


def test_special_tokens_stay_out_of_content():
    pieces = ["a ", "[TOOL_CALLS]", " b", "[TOOL_CALLS]", "add", "[ARGS]", "{}"]
    parser = AnswerParser(call_format("mistral", MISTRAL_ARGS), hidden=frozenset({"[TOOL_CALLS]", "[ARGS]"}))
    content, _, calls = parsed(parser, pieces)
    assert content == "a  b" and [name for name, _, _ in calls] == ["add"]
