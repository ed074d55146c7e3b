"""Between the tokens of a target and those of a draft with another tokenizer: through text."""

from __future__ import annotations

import copy
from itertools import takewhile
from typing import Any

from draftgraph.engine.protocol import common_prefix
from draftgraph.errors import UsageError
from draftgraph.text import HALF_A_CHARACTER

STEM = 16  # tokens of the target before a continuation, which are encoded with it
PARTS = 4  # tokens of one character, at most
WINDOW = 32  # tokens of the target that are encoded again in every step, up to three times as many
AGREED = 8  # tokens of the draft: two encodings with so many equal ones at their ends do not differ any more


def refuse_slow(*tokenizers: Any) -> None:
    """Those that cannot say where in a text their tokens end."""
    for tokenizer in tokenizers:
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(
                f"drafts cannot go through text, because {type(tokenizer).__name__} is no fast tokenizer: "
                "choose a draft with the target's tokenizer"
            )


def apart(tokenizer: Any) -> Any:
    """What is below the user's tokenizer, apart from it: whatever that is set to, nothing is truncated or padded."""
    found = copy.deepcopy(tokenizer.backend_tokenizer)
    found.no_truncation()
    found.no_padding()
    return found


class Translation:
    """Decodes with one tokenizer and encodes with the other; special tokens that only one of them has say nothing."""

    def __init__(self, target_tokenizer: Any, draft_tokenizer: Any, size: int) -> None:
        """`size`: tokens that the target knows; its tokenizer may have more."""
        refuse_slow(target_tokenizer, draft_tokenizer)
        self._target, self._draft, self.size = apart(target_tokenizer), apart(draft_tokenizer), size
        special = [
            {id: token.content for id, token in one.get_added_tokens_decoder().items() if token.special}
            for one in (self._target, self._draft)
        ]
        shared = {*special[0].values()} & {*special[1].values()}
        self._unshared = [{id for id, name in one.items() if name not in shared} for one in special]
        self.start = list(takewhile(special[1].__contains__, draft_tokenizer("a")["input_ids"]))
        self.end, self.end_text = target_tokenizer.eos_token_id, target_tokenizer.eos_token
        self.draft_ends = frozenset({draft_tokenizer.eos_token_id} - {None})

    def read(self, tokens: list[int]) -> list[int]:
        """Tokens of the target as those of the draft, up to the last word: the draft may have the spaces before a word
        and the word in one token, and so drafts them again."""
        known = [token for token in tokens if token not in self._unshared[0]]
        return list(self._draft.encode(decoded(self._target, known).rstrip(" "), add_special_tokens=False).ids)

    def text_of(self, tokens: list[int]) -> str:
        """Of the draft's tokens, whole characters alone."""
        return decoded(self._draft, [token for token in tokens if token not in self._unshared[1]])

    def written(self, text: str) -> tuple[list[int], list[int]]:
        """A text as tokens of the target, and where in it each of them ends."""
        encoded = self._target.encode(text, add_special_tokens=False)
        return encoded.ids, [end for _, end in encoded.offsets]

    def stem(self, tokens: list[int]) -> tuple[str, list[int]]:
        """How a text of the target ends: as a string, up to where the draft has read it, and as the tokens that this is
        encoded to with what is behind it: spaces, and tokens that do not make a character yet."""
        last = tokens[-STEM:]
        for whole in range(len(last), max(0, len(last) - PARTS), -1):
            string = self._target.decode(last[:whole], skip_special_tokens=False)
            if not string.endswith(HALF_A_CHARACTER):
                return string.rstrip(" "), [*self.written(string)[0], *last[whole:]]
        string = self._target.decode(last, skip_special_tokens=False)
        return string.rstrip(" "), self.written(string)[0]


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False)).rstrip(HALF_A_CHARACTER)


class Reading:
    """A growing text of the target in the draft's tokens: of a long one the end alone is encoded again."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._begin()

    def _begin(self) -> None:
        self._settled: list[int] = []  # tokens of the draft that do not change any more
        self._from = self._skipped = 0  # of what is encoded from this token of the target on, the first are among them

    def of(self, text: list[int]) -> list[int]:
        if len(text) < self._from + WINDOW // 2:  # it begins anew
            self._begin()
        found = [*self._settled, *self._translation.read(text[self._from :])[self._skipped :]]
        start = self._translation.start
        found = found if found[: len(start)] == start else [*start, *found]
        if len(text) - self._from > 3 * WINDOW:
            again = self._translation.read(text[-WINDOW:])
            agreed = common_prefix(found[::-1], again[::-1])
            if agreed >= AGREED:
                self._from = len(text) - WINDOW
                self._settled, self._skipped = found[: len(found) - agreed], len(again) - agreed
        return found
