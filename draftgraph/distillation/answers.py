"""The target's answers: generated in large batches, stored, split into learnt and held-out texts, and batched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftgraph.distillation.prompts import Prompt
from draftgraph.distillation.recipe import digest
from draftgraph.distillation.sampler import Sampler
from draftgraph.errors import UsageError, one_line
from draftgraph.files import replacing, writing
from draftgraph.graph import Ints
from draftgraph.notices import Report, notice, silent

SHARD_ROWS = 4096
MARKED_NUMBERS = 16  # of each weight of the target
ANOTHER_ANSWERS = "give --answers a folder"
Progress = Callable[[int, int, float | None], None]  # answers so far, of how many, new tokens per second if known
BATCHES_TO_SORT = 64  # a batch holds similar lengths, but an epoch stays shuffled
LONG_EVERY = 24  # texts, of which one is made long: with usual ones, about half of the tokens
HELD_OUT = 512  # prompts that are not learnt from, at most; and at most one in ten


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer as token ids."""

    tokens: Any  # int32 [length], prompt and answer
    prompt_length: int
    kind: str = ""
    temperature: float = 0.0

    @property
    def answer(self) -> Any:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class AnswerStore:
    """A folder of answers, each shard named after everything that its content depends on."""

    folder: Path
    target_mark: str  # of the model that answers

    def answer(
        self, sampler: Sampler, questions: list[Text], max_new_tokens: int, seed: int, progress: Progress = silent
    ) -> list[Text]:
        """Each question (a text that is all prompt) followed by the target's answer; empty answers are left out."""
        order = sorted(range(len(questions)), key=lambda index: (len(questions[index].tokens), index))
        texts: list[Text] = []
        speed = None
        for start in range(0, len(order), SHARD_ROWS):
            shard = [questions[index] for index in order[start : start + SHARD_ROWS]]
            prompts = [question.tokens.tolist() for question in shard]
            temperatures = [question.temperature for question in shard]
            report = within_shard(progress, start, len(shard), len(order), speed)
            began = time.monotonic()
            answers = self.continued("answers", sampler, prompts, max_new_tokens, temperatures, seed + start, report)
            speed = sum(map(len, answers)) / max(time.monotonic() - began, 1e-9)
            for question, answer in zip(shard, answers, strict=True):
                if answer:
                    tokens = np.concatenate([question.tokens, np.array(answer, dtype=np.int32)])
                    texts.append(Text(tokens, len(question.tokens), question.kind, question.temperature))
            progress(min(start + SHARD_ROWS, len(order)), len(order), speed)
        return texts

    def continued(
        self,
        what: str,
        sampler: Sampler,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperatures: list[float],
        seed: int,
        report: Report = silent,
    ) -> list[list[int]]:
        """The target's continuation of each text: from the store, or generated now and stored."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        key = digest(self.target_mark, repr((prompts, temperatures, max_new_tokens, seed, sorted(sampler.stop_ids))))
        file = self.folder / f"{what}-{key}.safetensors"
        if file.exists():
            try:
                stored = load_file(file)
                return [row.tolist() for row in stored["tokens"].split(stored["lengths"].tolist())]
            except (OSError, SafetensorError, KeyError) as error:
                notice(f"{file} cannot be read ({one_line(error)}): making it again")
        rows = sampler.continue_texts(prompts, max_new_tokens, temperatures, seed, report=report)
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        with writing(f"the target's {what}", self.folder, ANOTHER_ANSWERS):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                save_file({"tokens": flat, "lengths": lengths}, partial)
        return rows


def within_shard(progress: Progress, start: int, rows: int, total: int, speed: float | None) -> Report:
    """Progress of one shard as that of all answers."""
    return lambda done: progress(start + round(done * rows), total, speed)


def mark_of_weights(model: Any) -> str:
    """A few numbers of every weight: two targets with one embedding, before and after tuning, answer differently."""
    sample = []
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        places = torch.arange(MARKED_NUMBERS) * max(len(flat) - 1, 0) // (MARKED_NUMBERS - 1)
        sample += [name, flat[places.to(flat.device)].float().cpu().numpy().tobytes()]
    return digest(*sample)


def questions_of(prompts: list[Prompt], tokenizer: Any, temperatures: tuple[float, ...], longest: int) -> list[Text]:
    """Every prompt as token ids, through the chat template if there is one, once for each temperature."""
    texts = [prompt.text for prompt in prompts]
    if getattr(tokenizer, "chat_template", None):
        turns = [[{"role": "user", "content": text}] for text in texts]
        try:
            texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            raise UsageError(f"the target's chat template fails ({one_line(error)}): correct it") from error
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        rows = tokenizer(texts)["input_ids"]
    questions = []
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            continue
        if len(row) > longest:  # the middle goes: a request stands before a text or behind it
            row = row[: longest // 2] + row[len(row) - (longest - longest // 2) :]
        tokens = np.array(row, dtype=np.int32)
        questions += [Text(tokens, len(tokens), prompt.kind, one) for one in temperatures]
    return questions


def padded(texts: list[Text]) -> Tensor:
    """Tokens side by side, with zeros behind. # [rows, length]"""
    return pad_sequence([torch.from_numpy(text.tokens).long() for text in texts], batch_first=True)


def batch_of(texts: list[Text], positions: list[Ints]) -> tuple[Tensor, Tensor]:
    """Padded tokens, and the positions in the flattened ones whose next token is learnt, text by text."""
    tokens = padded(texts)
    flat = np.concatenate([row * tokens.shape[1] + one for row, one in enumerate(positions)])
    return tokens, torch.from_numpy(flat)


def learnt_positions(text: Text, prompt_share: float) -> Ints:
    """The positions before every token of the answer, and before this share of the prompt's, always the same ones."""
    prompt = np.arange(text.prompt_length - 1)
    drawn = (prompt * 2654435761 + 40503 * len(text.tokens)) % (1 << 32) < prompt_share * (1 << 32)
    return np.concatenate([prompt[drawn], np.arange(text.prompt_length - 1, len(text.tokens) - 1)])


def epoch_of(lengths: Ints, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """All texts once, in batches of at most so many tokens, padding counted."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    window = max(1, int(BATCHES_TO_SORT * batch_tokens / max(float(lengths.mean()), 1.0)))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        rows: list[int] = []
        for index in part[np.argsort(-lengths[part], kind="stable")].tolist():
            if rows and (len(rows) + 1) * int(lengths[rows[0]]) > batch_tokens:
                batches.append(rows)
                rows = []
            rows.append(index)
        batches.append(rows)
    for place in random.permutation(len(batches)).tolist():
        yield batches[place]


def frequent_tokens(texts: list[Text], size: int, vocabulary: int, always: frozenset[int]) -> Tensor | None:
    """The tokens most frequent in answers, then in prompts, in ascending order; None where that is all of them."""
    if not 0 < size < vocabulary:
        return None
    answers = np.concatenate([text.answer for text in texts])
    prompts = np.concatenate([text.tokens[: text.prompt_length] for text in texts])
    in_answers, in_prompts = (np.bincount(tokens, minlength=vocabulary).astype(float) for tokens in (answers, prompts))
    in_answers[list(always)] = np.inf
    order = np.lexsort((np.arange(vocabulary), -in_prompts, -in_answers))
    return torch.from_numpy(np.sort(order[: max(size, len(always))]))


def split_held_out(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and one answer, at the lowest temperature, to each prompt that is held out."""
    names = [digest(text.tokens[: text.prompt_length].tobytes()) for text in texts]
    prompts = sorted(set(names))
    apart = set(prompts[: max(1, min(HELD_OUT, len(prompts) // 10))])
    learnt = [text for text, name in zip(texts, names, strict=True) if name not in apart]
    kept: dict[str, Text] = {}
    for text, name in sorted(zip(texts, names, strict=True), key=lambda pair: pair[0].temperature):
        if name in apart:
            kept.setdefault(name, text)
    if not learnt:
        raise UsageError("one prompt is too little to learn from: give more prompts")
    return learnt, list(kept.values())


def with_long_texts(texts: list[Text], length: int, seed: int) -> list[Text]:
    """Of the texts one in LONG_EVERY behind others, up to so many tokens: most answers are short, and a head that has
    only seen those fades in a long context."""
    if not length:
        return texts
    random = np.random.default_rng(seed)
    found = list(texts)
    for place in range(0, len(texts), LONG_EVERY):
        text = texts[place]
        before: list[Any] = []
        room = length - len(text.tokens)
        while room > 0:
            other = texts[int(random.integers(len(texts)))].tokens[-room:]
            before.insert(0, other)
            room -= len(other)
        tokens = np.concatenate([*before, text.tokens])
        found[place] = Text(tokens, len(tokens) - len(text.answer), text.kind, text.temperature)
    return found


def digest_of(texts: list[Text]) -> str:
    return digest(*(text.tokens.tobytes() + text.prompt_length.to_bytes(4, "little") for text in texts))
