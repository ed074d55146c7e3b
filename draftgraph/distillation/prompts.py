"""Prompts: from a JSONL file, a dataset or Python source, and user turns that the target writes itself."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.distillation.code_prompts import WORDS, python_prompts
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.sampler import Sampler
from draftgraph.errors import UsageError, one_line
from draftgraph.extras import needed
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.notices import Report, silent
from draftgraph.text import HALF_A_CHARACTER

if TYPE_CHECKING:
    from draftgraph.distillation.answers import AnswerStore

PASSAGE, CODE, SELF = "text", "code", "self"  # kinds
COLUMNS = ("prompt", "instruction", "question", "text")
PYTHON = re.compile(r"python(:(?P<count>[1-9]\d*))?")
# A split may hold a colon of its own: train[:1%]
DATASET = re.compile(r"datasets:(?P<name>[^:]+)(:(?P<split>[^:\[]+(\[[^\]]*\])?)(:(?P<column>[^:]+))?)?")
CHARACTERS_PER_TOKEN = 4.3  # English, with the vocabularies of today
SHORTEST, MEDIAN, LONGEST = 100, 450, 1300  # tokens of text in a request
SPREAD = 0.65  # of the logarithm of the length
PIECE = 1500  # characters: a book is taken apart, so that all of it is used

STORY = "story"
REQUESTS: dict[str, list[str]] = WORDS["passages"]
PASSAGE_WORDS: dict[str, list[str]] = WORDS["passage_words"]
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)|[。！？]")

OPENINGS: list[str] = WORDS["openings"]  # words with which half of the turns of a target begin
MARKER = "draftgraph-marker"
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)  # above 1, small targets write nonsense, and half of the turns do not end
SAME = 40  # characters, lower-cased, that make two prompts alike
LEAST_YIELD = 0.05  # of a round; less means that the target repeats itself
EXPECTED_YIELD = 0.8  # of the first round
TURN_TOKENS = 384  # of a prompt that the target writes, at most
SMALLEST_ROUND, LARGEST_ROUND = 16, 2048  # turns: what is repeated at most where a run was killed


@dataclass(frozen=True)
class Prompt:
    """One request to the target, as a user would type it."""

    text: str
    kind: str  # the row's task, the sort of request about a passage, "code" or "self"


def read_prompts(source: str, tokenizer: Any, limit: int | None, seed: int) -> list[Prompt]:
    """Prompts in an order drawn by `seed`, no two alike, at most `limit` of them.

    `source` is the path of a JSONL file, `python[:COUNT]` (functions of the standard library and of installed packages
    with a permissive licence) or `datasets:NAME[:SPLIT[:COLUMN]]`. Passages of text become requests about them.
    """
    if python := PYTHON.fullmatch(source):
        return [Prompt(text, CODE) for text in python_prompts(int(python["count"] or 0) or limit, seed)]
    rows = list(_rows_of_dataset(source) if source.startswith("datasets:") else _rows_of_file(source))
    passages = list(dict.fromkeys(row.text for row in rows if row.kind == PASSAGE))
    prompts = [row for row in rows if row.kind != PASSAGE]
    prompts += requests_about(passages, seed, characters_per_token=characters_per_token(passages, tokenizer))
    if not prompts:
        raise UsageError(f"{source} holds no prompts: give a source that has some")
    return shuffled_unique(prompts, seed)[:limit]


def shuffled_unique(prompts: list[Prompt], seed: int) -> list[Prompt]:
    """No two alike, in an order drawn by the seed."""
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())
    random.Random(seed).shuffle(different)
    return different


def _rows_of_file(source: str) -> Iterator[Prompt]:
    try:
        lines = Path(source).expanduser().read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UsageError(
            f"{source}: no such file; prompts come from a JSONL file, from python[:COUNT] or from datasets:NAME"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{source}: cannot be read ({one_line(error)}): name a JSONL file") from error
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield _row(line)
        except UsageError as error:
            raise UsageError(f"{source}, line {number}: {error}") from error.__cause__


def _row(line: bytes) -> Prompt:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 (byte {error.start + 1}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise UsageError("not valid JSON (nested too deeply)") from error
    if not isinstance(row, dict):
        raise UsageError('not a JSON object: write {"prompt": "..."}')
    kind = row.get("task") or row.get("category")
    if text := _text(row.get("prompt")):
        return Prompt(text, str(kind or "prompt"))
    if text := _first_user_turn(row.get("messages")):
        return Prompt(text, str(kind or "chat"))
    if text := _text(row.get("text")):
        return Prompt(text, PASSAGE)
    raise UsageError('no text to use: a row needs "prompt", "messages" with a user turn, or "text"')


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"half a character, a lone surrogate, at character {error.start + 1}") from error
    return value


def _first_user_turn(messages: Any) -> str | None:
    turns = messages if isinstance(messages, list) else []
    said = (turn.get("content") for turn in turns if isinstance(turn, dict) and turn.get("role") == "user")
    return _text(next(said, None))


def _rows_of_dataset(source: str) -> Iterator[Prompt]:
    parts = DATASET.fullmatch(source)
    if parts is None:
        raise UsageError(f"{source}: write datasets:NAME, datasets:NAME:SPLIT or datasets:NAME:SPLIT:COLUMN")
    name, split, column = parts["name"], parts["split"] or "train", parts["column"]
    load_dataset = needed("datasets", f"{source} needs the datasets package", "distill", "load_dataset")
    try:
        dataset = load_dataset(name, split=split)
        there: list[str] = list(dataset.column_names)
    except Exception as error:  # the hub, the disk and pyarrow each have errors of their own
        raise UsageError(f"cannot read split {split} of the dataset {name}: {one_line(error)}") from error
    chosen = column or next((known for known in COLUMNS if known in there), None)
    if chosen not in there:
        which = f"no column {column}" if column else f"none of the columns {', '.join(COLUMNS)}"
        raise UsageError(f"the dataset {name} has {which}: choose of {', '.join(there)}, as in {name}:{split}:COLUMN")
    for value in dataset[chosen]:
        if text := _first_user_turn(value) or _text(value):
            yield Prompt(text, PASSAGE if chosen == PASSAGE else name)


def characters_per_token(passages: Sequence[str], tokenizer: Any) -> float:
    """How much text a token of this tokenizer holds, measured on some of the passages."""
    sample = " ".join(passages[:: max(1, len(passages) // 20)])[:50_000]
    tokens = len(tokenizer(sample, add_special_tokens=False)["input_ids"]) if sample and tokenizer else 0
    return len(sample) / tokens if tokens else CHARACTERS_PER_TOKEN


def requests_about(
    passages: Sequence[str], seed: int, uses: int = 4, characters_per_token: float = CHARACTERS_PER_TOKEN
) -> list[Prompt]:
    """Consecutive passages joined to texts of many lengths, each with a request; `uses` different ones per passage."""
    draw = random.Random(seed)
    pieces = [piece for passage in passages for piece in _pieces(passage.strip())]
    requests = [(kind, wording) for kind, wordings in REQUESTS.items() for wording in wordings]
    draw.shuffle(requests)
    prompts: list[Prompt] = []
    for use in range(min(uses, len(requests))):
        start = 0
        while start < len(pieces):
            kind, wording = draw.choice(requests[use::uses])
            if kind == STORY:
                text, used = _opening(pieces[start], draw), 1
            else:
                while not SHORTEST <= (length := MEDIAN * draw.lognormvariate(0, SPREAD)) <= LONGEST:
                    pass
                text, used = _joined(pieces, start, round(length * characters_per_token), draw)
            prompts.append(Prompt(_asked(wording, text, "story_frames" if kind == STORY else "frames", draw), kind))
            start += used
    return prompts


def _pieces(passage: str) -> list[str]:
    pieces = []
    while len(passage) > PIECE:
        piece = _cut_at_sentence(passage, PIECE)
        pieces.append(piece)
        passage = passage[len(piece) :].lstrip()
    return [*pieces, passage] if passage else pieces


def _joined(pieces: list[str], start: int, length: int, draw: random.Random) -> tuple[str, int]:
    end, characters = start, 0
    while end < len(pieces) and characters < length:
        characters += len(pieces[end]) + 1
        end += 1
    text = draw.choice((" ", "\n", "\n\n")).join(pieces[start:end])
    cut = _cut_at_sentence if draw.random() < 0.7 else _cut_at_word
    return cut(text, length), end - start


def _opening(passage: str, draw: random.Random) -> str:
    text = _cut_at_word(passage, draw.randint(200, 500))
    return text.rsplit(None, 1)[0] if " " in text and text[-1] in '.!?"”' else text


def _cut_at_word(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return text[:length].rsplit(None, 1)[0] if text[length // 2 : length].strip().count(" ") else text[:length]


def _cut_at_sentence(text: str, length: int) -> str:
    ends = [end.end() for end in SENTENCE_END.finditer(text, 0, length + 1) if end.end() <= length]
    return text[: ends[-1]] if ends and ends[-1] >= length // 2 else _cut_at_word(text, length)


def _asked(wording: str, text: str, frames: str, draw: random.Random) -> str:
    if not wording:
        return text
    place = draw.choice(("before", "after"))
    it = draw.choice(PASSAGE_WORDS[place]).format(noun=draw.choice(PASSAGE_WORDS["nouns"]))
    framed = draw.choice(PASSAGE_WORDS[frames]).replace("{text}", text)
    parts = [wording.format(it=it), framed]
    return "\n\n".join(parts if place == "before" else reversed(parts))


@dataclass
class WrittenPrompts:
    """Prompts that a target wrote, and why its other turns were dropped."""

    wanted: int
    prompts: list[Prompt] = field(default_factory=list)
    turns: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def why_not_more(self) -> str:
        return f"of {self.turns:,} turns, " + ", ".join(f"{many:,} {why}" for why, many in self.dropped.most_common())

    def __str__(self) -> str:
        said = f"{len(self.prompts):,} prompts written by the target"
        return said if len(self.prompts) == self.wanted else f"{said}, not {self.wanted:,}: {self.why_not_more}"


def own_prompts(
    count: int, seed: int, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> WrittenPrompts:
    """User turns that the target writes; finished rounds are stored."""
    opening, end = around_user_text(tokenizer)
    window, longest = context_window(model), TURN_TOKENS
    if window is not None:
        words = max(len(row) for row in tokenizer(OPENINGS, add_special_tokens=False)["input_ids"])
        longest = min(longest, window - len(opening) - words)
        if longest < 1:
            raise UsageError(
                f"the target's context window of {window} is too short to write prompts in: give --prompts"
            )
    report.begin("the target writes prompts")
    rounds = partial(store.continued, "prompts", Sampler(model, stop_ids_of(model) | {end}, batch_size))

    def progress(done: float) -> None:
        report.live(f"the target writes prompts: {done:.0%}")

    return write_prompts(rounds, tokenizer, count, seed, longest, progress)


def write_prompts(
    continue_texts: Callable[..., list[list[int]]],
    tokenizer: Any,
    count: int,
    seed: int,
    max_tokens: int = TURN_TOKENS,
    report: Report = silent,
) -> WrittenPrompts:
    """User turns sampled from the target, no two alike; half of them begin with given words, for variety.

    Only turns that ended by themselves within `max_tokens` are kept. There may be fewer than `count`, from a target
    that repeats itself. `continue_texts`, of a sampler that stops at the end of a user's turn, is called in rounds;
    while they are the largest, a greater `count` has the rounds of a smaller one.
    """
    draw = random.Random(seed)
    opening, end = around_user_text(tokenizer)
    special = {token for token, made in tokenizer.added_tokens_decoder.items() if made.special}
    special |= set(tokenizer.all_special_ids)
    kept: dict[str, Prompt] = {}
    written, share = WrittenPrompts(count), EXPECTED_YIELD

    def decoded(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)).strip()

    while len(kept) < count and share >= LEAST_YIELD:
        before = len(kept)
        size = min(LARGEST_ROUND, max(SMALLEST_ROUND, int((count - before) / share)))
        words = [draw.choice(OPENINGS) if row % 2 else "" for row in range(size)]
        begun = {word: _tokens(tokenizer, word) if word else [] for word in set(words)}
        turns = continue_texts(
            [opening + begun[word] for word in words],
            max_tokens,
            [draw.choice(TEMPERATURES) for _ in words],
            draw.getrandbits(31),
            report=_within(report, before, size * share, count),
        )
        for word, turn in zip(words, turns, strict=True):
            text = decoded(begun[word] + turn[:-1])
            beginning = text[: len(word) + SAME].lower()
            if turn[-1:] != [end] and len(turn) < max_tokens:
                fault = "ended unlike a user's"
            elif turn[-1:] != [end]:
                fault = f"did not end within {max_tokens} tokens"
            elif not special.isdisjoint(turn[:-1]):
                fault = "held special tokens"
            elif not decoded(turn[:-1]):
                fault = "were empty"
            elif HALF_A_CHARACTER in text:
                fault = "held half a character"
            elif beginning in kept:
                fault = "began like another"
            else:
                kept[beginning] = Prompt(text, SELF)
                continue
            written.dropped[fault] += 1
        written.turns += size
        share = (len(kept) - before) / size
    written.prompts = list(kept.values())[:count]
    return written


def around_user_text(tokenizer: Any) -> tuple[list[int], int]:
    """The chat template's tokens before the user's text, a default system prompt included, and the one behind it."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("self-written prompts need a chat template, and this target has none: give --prompts FILE")
    chat = [{"role": "user", "content": MARKER}]
    try:
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template may raise anything
        raise UsageError(f"the target's chat template fails ({one_line(error)}): give --prompts FILE") from error
    before, found, after = rendered.partition(MARKER)
    if not (found and before and after):
        raise UsageError("the target's chat template does not mark where a user's turn ends: give --prompts FILE")
    return _tokens(tokenizer, before), _tokens(tokenizer, after)[0]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _within(report: Report, before: int, expected: float, count: int) -> Report:
    """Progress of one round as a share of the whole, estimated from the last round."""
    return lambda done: report(min(1.0, (before + done * expected) / count))
