"""The target's answers, generated in large batches and stored: a second run, or one that was killed, repeats none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftgraph.distillation.prompts import Prompt
from draftgraph.distillation.recipe import digest
from draftgraph.distillation.sampler import Report, Sampler
from draftgraph.distillation.texts import Text
from draftgraph.errors import UsageError, one_line
from draftgraph.files import replacing, writing
from draftgraph.notices import notice

SHARD_ROWS = 4096
MARKED_NUMBERS = 16  # of each weight of the target
ELSEWHERE = "give --answers a folder"
Progress = Callable[[int, int, float | None], None]  # answers so far, of how many, new tokens per second if known


@dataclass(frozen=True)
class AnswerStore:
    """A folder of answers, each shard named after everything that its content depends on."""

    folder: Path
    target_mark: str  # of the model that answers

    def answer(
        self, sampler: Sampler, questions: list[Text], max_new_tokens: int, seed: int, progress: Progress | None = None
    ) -> list[Text]:
        """Each question (a text that is all prompt) with the target's answer behind it."""
        order = sorted(range(len(questions)), key=lambda index: (len(questions[index].tokens), index))
        texts: list[Text] = []
        speed = None
        for start in range(0, len(order), SHARD_ROWS):
            shard = [questions[index] for index in order[start : start + SHARD_ROWS]]
            prompts, heat = [question.tokens.tolist() for question in shard], [one.temperature for one in shard]
            report = within_shard(progress, start, len(shard), len(order), speed)
            began = time.monotonic()
            answers = self.continued("answers", sampler, prompts, max_new_tokens, heat, seed + start, report)
            speed = sum(map(len, answers)) / max(time.monotonic() - began, 1e-9)
            for question, answer in zip(shard, answers, strict=True):
                if len(answer):
                    tokens = np.concatenate([question.tokens, answer])
                    texts.append(Text(tokens, len(question.tokens), question.kind, question.temperature))
            if progress is not None:
                progress(min(start + SHARD_ROWS, len(order)), len(order), speed)
        return texts

    def continued(
        self,
        what: str,
        sampler: Sampler,
        prompts: list[list[int]],
        max_new_tokens: int,
        heat: list[float],
        seed: int,
        report: Report | None = None,
    ) -> list[Any]:
        """What the target says behind each of these texts, asked once."""
        from safetensors.torch import save_file

        key = digest(self.target_mark, repr((prompts, heat, max_new_tokens, seed, sorted(sampler.stop_ids))))
        file = self.folder / f"{what}-{key}.safetensors"
        rows = read_rows(file)
        if rows is None:
            made = sampler.continue_texts(prompts, max_new_tokens, heat, seed, report=report)
            flat = torch.tensor([token for row in made for token in row], dtype=torch.int32)
            lengths = torch.tensor([len(row) for row in made], dtype=torch.int32)
            with writing(f"the target's {what}", self.folder, ELSEWHERE):
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as partial:
                    save_file({"tokens": flat, "lengths": lengths}, partial)
            rows = split(flat, lengths)
        return rows


def within_shard(progress: Progress | None, start: int, rows: int, total: int, speed: float | None) -> Report | None:
    """Progress of one shard as that of all answers."""
    if progress is None:
        return None
    return lambda done: progress(start + round(done * rows), total, speed)


def mark_of_weights(model: Any) -> str:
    """A few numbers of every weight: two targets with one embedding, before and after tuning, answer differently."""
    sample = []
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        places = torch.arange(MARKED_NUMBERS) * max(len(flat) - 1, 0) // (MARKED_NUMBERS - 1)
        sample += [name, flat[places.to(flat.device)].float().cpu().numpy().tobytes()]
    return digest(*sample)


def read_rows(file: Path) -> list[Any] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.exists():
        return None
    try:
        stored = load_file(file)
        return split(stored["tokens"], stored["lengths"])
    except (OSError, SafetensorError, KeyError) as error:
        notice(f"{file} cannot be read ({one_line(error)}): making it again")
        return None


def split(tokens: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
    return np.split(tokens.numpy(), np.cumsum(lengths.numpy())[:-1])


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
        questions += [Text(tokens, len(tokens), prompt.kind, heat) for heat in temperatures]
    return questions
