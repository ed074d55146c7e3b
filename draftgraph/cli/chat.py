"""`draftgraph chat`: a conversation, at a terminal or line by line from a pipe."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from draftgraph.cli.generate import figures_table, show_figures, summary
from draftgraph.cli.options import Settings
from draftgraph.cli.terminal import busy, complain, decoded, load_pair, stderr_console, write, write_json
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.text import TextStream, encode

if TYPE_CHECKING:
    from draftgraph.decoder import Decoding
    from draftgraph.pair import Pair
    from draftgraph.stats import Stats

HELP = """\
/clear  forget the conversation
/stats  figures of all answers
/exit   leave, as does Ctrl-D
Ctrl-C  stop an answer"""


class ContextFullError(DraftGraphError):
    """The conversation has outgrown the model."""


@dataclass
class Conversation:
    """What was said. The decoder's cache holds as much of it as is still true."""

    pair: Pair
    arguments: dict[str, Any]
    turns: list[dict[str, str]] = field(default_factory=list)
    stats: Stats | None = None
    cache_is_sound: bool = True

    @property
    def is_plain(self) -> bool:
        """Without a template the conversation is one text that is continued."""
        return bool(self.arguments["raw"]) or not getattr(self.pair.tokenizer, "chat_template", None)

    @property
    def prompt(self) -> Any:
        return "\n".join(turn["content"] for turn in self.turns) if self.is_plain else self.turns

    def ask(self, line: str) -> Decoding:
        self.turns.append({"role": "user", "content": line})
        try:
            arguments = self.arguments | {"raw": self.is_plain, "max_new_tokens": self.longest_answer()}
            decoding = self.pair.start(self.prompt, reuse_cache=self.cache_is_sound, **arguments)
        except BaseException:
            self.turns.pop()
            self.cache_is_sound = False
            raise
        self.cache_is_sound = True
        return decoding

    def keep(self, decoding: Decoding) -> None:
        """The answer, whole or as far as it came, becomes part of the conversation."""
        self.turns.append({"role": "assistant", "content": self.pair.output(decoding).text})
        self.stats = decoding.stats if self.stats is None else self.stats + decoding.stats

    def longest_answer(self) -> int:
        from draftgraph.generation import context_window
        from draftgraph.pair import NEW_TOKENS

        wanted: int = self.arguments.get("max_new_tokens", NEW_TOKENS)
        window = context_window(self.pair.target)
        if window is None:
            return wanted
        length = len(encode(self.pair.tokenizer, self.prompt, self.is_plain))
        if length >= window:
            raise ContextFullError(
                f"the conversation has {length} tokens, the model's context window holds {window}: "
                "/clear starts a new one"
            )
        return min(wanted, window - length)


def chat(settings: Settings, model: str | None = None) -> None:
    """Talk with a model; its cache is kept between turns. From a pipe, every line is a turn."""
    config, sampling = settings.graph_config(), settings.sampling_arguments()
    pair = load_pair(replace(settings, target=model or settings.target))
    at_terminal = sys.stdin.isatty()
    conversation = Conversation(pair, sampling | {"config": config})
    if at_terminal:
        stderr_console().print("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    if conversation.is_plain and not settings.raw:
        complain("this model has no chat template: your lines are continued as plain text")
    for line in typed_lines() if at_terminal else piped_lines():
        if re.fullmatch(r"/[a-z]+", line):
            if line in ("/exit", "/quit"):
                break
            obey(line, conversation)
            continue
        try:
            answer(conversation, line, settings, at_terminal)
        except (ContextFullError, UsageError) as error:
            if not at_terminal:
                raise
            complain(str(error))


def obey(line: str, conversation: Conversation) -> None:
    if line == "/clear":
        conversation.turns.clear()
    elif line == "/help":
        stderr_console().print(HELP)
    elif line == "/stats" and conversation.stats is not None:
        stderr_console().print(figures_table(conversation.stats))
    elif line == "/stats":
        complain("nothing was answered yet")
    else:
        complain(f"there is no {line}: /help lists commands")


def answer(conversation: Conversation, line: str, settings: Settings, at_terminal: bool) -> None:
    """One turn. At a terminal Ctrl-C ends it between two passes; pressed again, in the middle of one."""
    decoding = None
    text = TextStream(conversation.pair.tokenizer)
    with ctrl_c_ends_answer() if at_terminal else contextlib.nullcontext(lambda: False) as is_over:
        try:
            decoding = conversation.ask(line)
            with busy("reading", wanted=settings.json) as show:
                for tokens in decoding:
                    if not settings.json:
                        write(text.push(tokens))
                    show(summary(decoding.stats))
                    if is_over():
                        break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            conversation.cache_is_sound = False
    if decoding is None:
        return
    conversation.keep(decoding)
    if settings.json:
        write_json(conversation.pair.output(decoding).to_dict())
    else:
        write(text.push([], last=True) + "\n")
    show_figures(decoding.stats, settings.stats)


@contextmanager
def ctrl_c_ends_answer() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is only remembered, so that no pass is cut in half; the second interrupts."""
    presses = 0

    def pressed(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


def typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then has history and editing
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            write("\n")
            complain("Ctrl-D or /exit leaves")
            continue
        except UnicodeDecodeError:
            complain("that line is not UTF-8 text: it was not sent")
            continue
        except EOFError:
            write("\n")
            return
        if line:
            yield line


def piped_lines() -> Iterator[str]:
    for content in sys.stdin.buffer:
        if line := decoded(content).strip():
            yield line
