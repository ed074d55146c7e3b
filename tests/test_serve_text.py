"""Text while it comes, and names of tokens: whatever the stop strings, and however the tokens are cut."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from serve_tools import tokenizer

from draftgraph.batching.job import Job, Progress, Scores
from draftgraph.serve.generation import Answer
from draftgraph.serve.text import MOST_HELD, AnswerText, TextRules, TokenNames
from draftgraph.text import decode

LETTERS = st.text("ab c日🐈", max_size=24)
STOPS = st.lists(st.text("ab c日🐈", min_size=1, max_size=5), max_size=3)

RULES = st.builds(TextRules, STOPS, st.integers(0, 20), st.booleans(), st.sampled_from([None, frozenset()]))


def before_the_first_stop(text: str, stops: list[str], after: int = 0, with_stop: bool = False) -> str:
    """Reads character by character, as a person would, from one place on."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if with_stop else end - max(map(len, ending))]
    return text


@given(LETTERS, STOPS)
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stops):
    shown = AnswerText(tokenizer(), TextRules(stops))
    pieces = [shown.push(token) for token in tokenizer()(text)["input_ids"]]
    whole = "".join([*pieces, shown.finish()])
    assert whole == before_the_first_stop(text, stops)
    assert shown.stopped == any(stop in text for stop in stops)
    assert shown.length == shown.released == len(whole)


@given(LETTERS, STOPS, st.integers(0, 12), st.booleans())
def test_no_stop_string_ends_in_the_least_number_of_tokens(text, stops, least, with_stop):
    tokens = tokenizer()(text)["input_ids"]
    free = decode(tokenizer(), tokens[:least]).rstrip("\ufffd")  # half a character is shown with its other half
    shown, so_far = AnswerText(tokenizer(), TextRules(stops, least, with_stop)), ""
    final = before_the_first_stop(text, stops, len(free), with_stop)
    for token in tokens:
        so_far += shown.push(token)
        assert final.startswith(so_far)
    assert so_far + shown.finish() == final


@given(LETTERS, STOPS)
def test_what_is_shown_is_never_taken_back(text, stops):
    final = before_the_first_stop(text, stops)
    shown, so_far = AnswerText(tokenizer(), TextRules(stops)), ""
    for token in tokenizer()(text)["input_ids"]:
        so_far += shown.push(token)
        assert final.startswith(so_far) and "\ufffd" not in so_far


@given(LETTERS)
def test_nothing_is_held_back_that_no_stop_string_begins_with(text):
    shown = AnswerText(tokenizer(), TextRules(["x"]))
    pieces = [shown.push(token) for token in tokenizer()(text)["input_ids"]]
    assert "".join(pieces) == text


def test_a_stop_string_may_come_in_many_tokens():
    shown = AnswerText(tokenizer(), TextRules(["END OF"]))
    pieces = [shown.push(token) for token in tokenizer()("say EEND OF it")["input_ids"]]
    assert "".join(pieces) == "say E" and shown.stopped
    assert "".join(pieces[:6]) == "say E"


def test_endless_halves_of_characters_are_shown_in_the_end():
    (half, *_) = tokenizer()("🐈")["input_ids"]
    shown = AnswerText(tokenizer())
    pieces = [shown.push(half) for _ in range(3 * MOST_HELD)]
    assert sum(map(len, pieces)) >= 2 * MOST_HELD


@given(st.lists(st.integers(0, 319), max_size=40), st.lists(st.integers(1, 5), min_size=40, max_size=40), RULES)
def test_an_answer_does_not_depend_on_how_many_tokens_come_in_a_step(tokens, sizes, rules):
    def answer(sizes):
        found = Answer(0, Job("0", (1,)), TokenNames(tokenizer()), AnswerText(tokenizer(), rules))
        text, scored, rest = "", [], list(tokens)
        while found.finish_reason is None:
            size = sizes.pop(0)
            now, rest = rest[:size], rest[size:]
            told = Scores(0, array("f", [-1.0] * len(now)))
            piece = found.take(Progress("0", now, ["target"] * len(now), told, None, None if rest else "length"))
            text, scored = text + piece.text, scored + [(one.token, one.start) for one in piece.scores]
        return text, scored, found.tokens, found.finish_reason

    assert answer([1] * 41) == answer([*sizes, 1])


@given(st.text(max_size=20))
def test_bytes_of_tokens_are_the_bytes_of_the_text(text):
    names = TokenNames(tokenizer())
    tokens = tokenizer()(text)["input_ids"]
    assert b"".join(names.bytes(token) for token in tokens) == text.encode()


def test_tokens_without_a_text_of_their_own_are_told_apart():
    names = TokenNames(tokenizer())
    halves = tokenizer()("🐈")["input_ids"]
    assert len({names.key(token) for token in halves}) == len(set(halves)) > 1
    assert names.key(halves[0]) == "bytes:\\xf0" and names.text(halves[0]) == "\ufffd"
    assert names.text(0) == "<|end|>" and decode(tokenizer(), [0]) == ""
    assert names.bytes(10**6) == b""
