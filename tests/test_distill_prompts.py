"""Where the prompts of a distillation come from: files, datasets, passages, Python source."""

import ast
import email.message
import json
import random
import shutil
import statistics
import sys
import textwrap
import types
from pathlib import Path

import pytest
from distill_tools import byte_level_tokenizer
from tiny_models import one_line_of

from draftgraph.distillation import code_prompts
from draftgraph.distillation.code_prompts import (
    SLIPS,
    WEIGHTS,
    ask,
    functions_in,
    is_permissive,
    is_public,
    python_prompts,
)
from draftgraph.distillation.prompts import REQUESTS, Prompt, read_prompts, requests_about
from draftgraph.errors import UsageError
from draftgraph.extras import install_command


@pytest.fixture
def tokenizer():
    return byte_level_tokenizer()


def write_lines(folder, *rows):
    file = folder / "prompts.jsonl"
    file.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return str(file)


# Files


def test_every_documented_shape_of_a_row_is_read(tmp_path):
    source = write_lines(
        tmp_path,
        {"prompt": "2 + 2?", "task": "math"},
        {"prompt": "Who?", "category": "qa"},
        {"prompt": "Why?"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}, {"role": "user"}]},
    )
    found = {(prompt.text, prompt.kind) for prompt in read_prompts(source, None, None, 0)}
    assert found == {("2 + 2?", "math"), ("Who?", "qa"), ("Why?", "prompt"), ("Hello", "chat")}


@pytest.mark.parametrize("row", [{"text": "It rained all day."}, {"prompt": "It rained all day.", "task": "text"}])
def test_a_passage_becomes_requests_about_it(tmp_path, tokenizer, row):
    found = read_prompts(write_lines(tmp_path, row), tokenizer, None, 0)
    assert found and all("It rained all" in prompt.text and prompt.kind in REQUESTS for prompt in found)


def test_blank_lines_and_exact_duplicates_are_dropped(tmp_path):
    source = write_lines(tmp_path, {"prompt": "a"}, b"", b"  \r", {"prompt": "a", "task": "again"}, {"prompt": "b"})
    found = read_prompts(source, None, None, 0)
    assert {(prompt.text, prompt.kind) for prompt in found} == {("a", "prompt"), ("b", "prompt")} and len(found) == 2


def test_a_byte_order_mark_is_no_error(tmp_path):
    assert read_prompts(write_lines(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r'), None, None, 0)[0].text == "a"


def test_limit_and_seed_choose_the_prompts(tmp_path):
    source = write_lines(tmp_path, *({"prompt": f"number {index}"} for index in range(50)))
    first, again, other = (read_prompts(source, None, 20, seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 20
    assert first == read_prompts(source, None, None, 1)[:20]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": ', "not valid JSON ("),
        (b"[" * 100_000, "not valid JSON ("),
        (b'{"prompt": "caf\xe9"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b'["a"]', "not a JSON object"),
        (b'{"question": "a"}', "no text to use"),
        (b'{"prompt": "  "}', "no text to use"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no text to use"),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path, line, reason):
    source = write_lines(tmp_path, {"prompt": "good"}, b"", line)
    with pytest.raises(UsageError) as error:
        read_prompts(source, None, None, 0)
    assert one_line_of(error).startswith(f"{source}, line 3: {reason}")


def test_a_source_that_cannot_be_read_is_named_in_one_line(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for source in (tmp_path / "nowhere.jsonl", tmp_path, tmp_path / "empty.jsonl", "\0"):
        with pytest.raises(UsageError) as error:
            read_prompts(str(source), None, None, 0)
        assert one_line_of(error).startswith(str(source))


# Datasets


@pytest.fixture
def datasets(monkeypatch):
    """Stands in for the `datasets` package: datasets are dictionaries of columns."""

    class Columns(dict):
        column_names = property(list)

    known = {}
    package = types.ModuleType("datasets")
    package.load_dataset = lambda name, split: Columns(known[name, split])
    monkeypatch.setitem(sys.modules, "datasets", package)
    return known


def test_a_dataset_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError) as error:
        read_prompts("datasets:owner/name", None, None, 0)
    assert install_command("distill") in one_line_of(error)


def test_a_dataset_is_read_from_its_usual_or_chosen_column(datasets):
    chat = [{"role": "user", "content": "from a chat"}]
    datasets["owner/name", "train"] = {"question": ["late"], "instruction": ["early", "", None, "early"]}
    datasets["owner/name", "test[:1%]"] = {"instruction": ["no"], "conversation": [chat]}
    assert read_prompts("datasets:owner/name", None, None, 0) == [Prompt("early", "owner/name")]
    assert read_prompts("datasets:owner/name:train:question", None, None, 0) == [Prompt("late", "owner/name")]
    chosen = read_prompts("datasets:owner/name:test[:1%]:conversation", None, None, 0)
    assert chosen == [Prompt("from a chat", "owner/name")]


def test_a_dataset_of_text_gives_requests_about_passages(datasets, tokenizer):
    datasets["books", "train"] = {"text": ["It rained all day."]}
    assert all(prompt.kind in REQUESTS for prompt in read_prompts("datasets:books", tokenizer, None, 0))


@pytest.mark.parametrize(
    "source", ["datasets:unknown", "datasets:", "datasets:odd", "datasets:odd:train:other", "datasets:a:b:c:d"]
)
def test_a_dataset_that_cannot_be_used_says_why_in_one_line(datasets, source):
    datasets["odd", "train"] = {"label": [1]}
    with pytest.raises(UsageError) as error:
        read_prompts(source, None, None, 0)
    assert source.split(":")[1] in one_line_of(error)


# Passages


def numbered_passages(count=400):
    """Passages of about 900 characters in which every sentence, and the passage that it is of, can be recognised."""
    return [
        " ".join(f"In passage {index} the sentence {n} says hardly more than this." for n in range(16))
        for index in range(count)
    ]


def test_requests_about_passages_cover_short_and_long_prompts():
    prompts = requests_about(numbered_passages(), seed=1)
    tokens = sorted(len(prompt.text) / 4.3 for prompt in prompts if prompt.kind != "story")
    assert tokens[0] > 80 and tokens[-1] < 1400
    assert 350 < statistics.median(tokens) < 550
    assert tokens[len(tokens) // 20] < 220 and tokens[-len(tokens) // 20] > 900


def test_requests_are_varied_and_stand_before_or_after_the_text():
    prompts = requests_about(numbered_passages(), seed=1)
    assert {prompt.kind for prompt in prompts} == set(REQUESTS) and sum(map(len, REQUESTS.values())) >= 24
    before = sum(prompt.text.rstrip('"-”\n').endswith("this.") for prompt in prompts if prompt.kind != "story")
    assert 0.2 < before / len(prompts) < 0.6


@pytest.mark.parametrize("uses", [1, 2, 4])
def test_every_passage_is_used_so_many_times_with_different_requests(uses):
    passages = numbered_passages(60)
    prompts = requests_about(passages, seed=3, uses=uses)
    for index in range(len(passages)):
        about = [prompt for prompt in prompts if f"In passage {index} " in prompt.text]
        wordings = {prompt.text.replace(passages[index], "") for prompt in about}
        assert len(about) >= uses - 1 and len(wordings) == len(about)  # the last of a join may be cut off


def test_stories_are_cut_in_the_middle_of_a_sentence():
    stories = [prompt.text for prompt in requests_about(numbered_passages(), seed=2) if prompt.kind == "story"]
    assert len(stories) > 20
    for story in stories:
        part = max(story.split("\n\n"), key=len).removeprefix("Text: ")
        assert 150 < len(part) <= 500 and part[-1] not in ".!?"


def test_a_book_in_one_row_is_used_to_its_end():
    book = " ".join(numbered_passages(100))
    prompts = requests_about([book], seed=1, uses=1)
    assert len(prompts) > 20 and any("In passage 99 " in prompt.text for prompt in prompts)


def test_text_without_spaces_or_sentences_is_cut_too():
    assert all(len(prompt.text) < 6000 for prompt in requests_about(["x" * 40_000, "字" * 20_000], seed=1))


def test_requests_about_passages_depend_on_the_seed_alone():
    passages = numbered_passages(30)
    assert requests_about(passages, 1) == requests_about(passages, 1) != requests_about(passages, 2)


# Python source

MODULE = '''
import functools
from math import floor
raise RuntimeError("a module is never imported")

@functools.cache
def halve(number):
    """Return half of the number, rounded down, as one would expect of it.

    Examples
    --------
    >>> halve(3)
    1
    """
    if number == 0:
        return 0
    return floor(number / 2)

class Shelf:
    def put(self, book):
        """Put a book on the shelf, to the right of all the others that stand there."""
        self.books.append(book)

    @staticmethod
    def measure(book):
        """Measure how much room a book takes on the shelf, in millimetres and not in inches."""
        return book.pages / 10

def stub():
    """Somebody else has to say what is to be done here, which is why nothing is."""
    raise NotImplementedError

def terse():
    """Too short a docstring."""
    return 1

def endless():
    """This one has a good docstring of the right length, but a body that is too long."""
    BODY
'''.replace("BODY", "\n    ".join(["x = 1"] * 41))


@pytest.fixture
def module(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(MODULE)
    return file


def test_documented_functions_of_fair_size_are_found_without_importing(module):
    found = {function.name: function for function in functions_in(module)}
    assert list(found) == ["halve", "put", "measure"]
    assert found["halve"].imports == ("from math import floor",)
    assert [found[name].owner for name in found] == [None, "Shelf", None]
    assert found["measure"].signature == "def measure(book):"


@pytest.mark.parametrize("source", [b"print 'two'", b"\xff\xfe", b"x = '\0'", b"(" * 5000])
def test_source_that_does_not_parse_is_passed_over(tmp_path, source):
    (tmp_path / "broken.py").write_bytes(source)
    assert list(functions_in(tmp_path / "broken.py")) == []


@pytest.mark.parametrize("request_kind", WEIGHTS)
def test_the_code_of_a_prompt_is_whole_and_without_decorators(request_kind):
    draw = random.Random(0)
    for function in [found for file in (shutil, textwrap, statistics) for found in functions_in(Path(file.__file__))]:
        for text in (ask(request_kind, function, draw) for _ in range(3)):
            assert "@" not in text.split("def ")[0]
            if "```python\n" in text:
                ast.parse(text.split("```python\n")[1].split("\n```")[0])


def test_a_method_is_shown_in_its_class(module):
    method = next(function for function in functions_in(module) if function.owner)
    assert all(
        "class Shelf:\n    def put(self, book):\n" in ask("complete", method, random.Random(seed)) for seed in range(9)
    )
    assert any("puts a book on the shelf" in ask("describe", method, random.Random(seed)) for seed in range(20))


def test_doctests_are_shown_sometimes_and_else_leave_nothing_behind(module):
    halve = next(functions_in(module))
    shown = [ask("complete", halve, random.Random(seed)) for seed in range(40)]
    with_examples = [text for text in shown if ">>>" in text]
    assert 5 < len(with_examples) < 35
    assert all("Examples" not in text and "----" not in text for text in shown if text not in with_examples)


def test_a_doctest_on_the_last_line_leaves_a_closed_docstring(tmp_path):
    (tmp_path / "last.py").write_text(MODULE.replace('    1\n    """', '    1"""'))
    halve = next(functions_in(tmp_path / "last.py"))
    shown = [ask("complete", halve, random.Random(seed)) for seed in range(40)]
    assert any(text.rstrip("`\n").endswith('as one would expect of it.\n    """') for text in shown)


def test_a_function_to_repair_has_one_slip(module):
    halve = next(functions_in(module))
    repaired = {ask("repair", halve, random.Random(seed)) for seed in range(20)}
    assert all("if number != 0:" in text for text in repaired) and (" == ", " != ") in SLIPS


def test_a_function_found_twice_is_asked_about_once_a_turn(module, tmp_path, monkeypatch):
    (tmp_path / "copy.py").write_text(MODULE)
    monkeypatch.setattr(code_prompts, "source_files", lambda: [module, tmp_path / "copy.py"])
    prompts = python_prompts(None, seed=1)
    assert len(prompts) <= 3 * code_prompts.REQUESTS_PER_FUNCTION
    assert len(python_prompts(3, seed=1)) == 3 and len(set(prompts)) == len(prompts)


def test_python_prompts_come_from_what_is_installed_and_depend_on_the_seed():
    first, again = python_prompts(40, seed=1), read_prompts("python", None, 40, 1)
    assert again == read_prompts("python:40", None, 99, 1) and len(first) == 40
    assert again == [Prompt(text, "code") for text in first]


@pytest.mark.parametrize(
    ("headers", "permissive"),
    [
        ([("License-Expression", "MIT")], True),
        ([("License-Expression", "(MIT OR Apache-2.0) AND BSD-3-Clause")], True),
        ([("License-Expression", "BSD-3-Clause AND MPL-2.0")], False),
        ([("License-Expression", "BSD-Protection")], False),
        ([("License-Expression", "LGPL-2.1"), ("Classifier", "License :: OSI Approved :: MIT License")], False),
        ([("Classifier", "License :: OSI Approved :: ISC License (ISCL)")], True),
        ([("Classifier", "License :: OSI Approved :: BSD License"), ("Classifier", "Topic :: Text")], True),
        (
            [("Classifier", "License :: OSI Approved :: MIT License"), ("Classifier", "License :: Free For Home Use")],
            False,
        ),
        ([("License", "MIT"), ("Classifier", "Topic :: Text")], False),
        ([], False),
    ],
)
def test_only_packages_that_name_permissive_licences_are_read(headers, permissive):
    described = email.message.Message()
    for name, value in headers:
        described[name] = value
    assert is_permissive(described) is permissive


def test_tests_private_modules_and_what_packages_carry_along_are_not_read():
    read = ["json/decoder.py", "json/__init__.py", "click/testing.py"]
    left = ["_weakrefset.py", "pip/_vendor/rich/text.py", "a/tests/x.py", "a/test_x.py", "a/vendor/x.py", "a/.x/y.py"]
    assert [path for path in read + left if is_public(tuple(path.split("/")))] == read
