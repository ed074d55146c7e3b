"""From prompts to token ids, and from token ids to text as it comes."""

from __future__ import annotations

from typing import Any

from draftgraph.errors import UsageError

Messages = list[dict[str, Any]]
HALF_A_CHARACTER = "\ufffd"


def encode(tokenizer: Any, prompt: str | Messages, raw: bool = False) -> list[int]:
    """Token ids of a prompt: through the chat template if there is one, unless `raw`."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise UsageError("the prompt is empty: give some text")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(prompt, str) and (raw or not template):
        ids = tokenizer(prompt)["input_ids"]
    elif not template:
        raise UsageError("a list of messages needs a chat template, and this tokenizer has none: pass a string")
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise UsageError("the prompt is empty: give some text")
    return list(ids)


def decode(tokenizer: Any, ids: list[int], dropped: frozenset[int] | None = None) -> str:
    """Without these tokens, or without any special token."""
    if dropped is not None:
        ids = [id for id in ids if id not in dropped]
    return str(tokenizer.decode(ids, skip_special_tokens=dropped is None, clean_up_tokenization_spaces=False))


class TextStream:
    """Text of tokens as they come. A character that needs several tokens comes whole, or with the last of them."""

    def __init__(self, tokenizer: Any, dropped: frozenset[int] | None = None) -> None:
        self._tokenizer, self._dropped = tokenizer, dropped
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that spaces between words are right
        self._shown = 0

    def push(self, tokens: list[int], last: bool = False) -> str:
        """The text that these tokens complete."""
        self._ids.extend(tokens)
        before = decode(self._tokenizer, self._ids[self._context : self._shown], self._dropped)
        now = decode(self._tokenizer, self._ids[self._context :], self._dropped)
        if now == before or (now.endswith(HALF_A_CHARACTER) and not last):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]
