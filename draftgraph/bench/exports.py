"""A pair as other libraries take it: plain folders of safetensors, in the dtype of the run, gone after it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftgraph.bench.methods import MethodFailed
from draftgraph.distillation.export import save_plain
from draftgraph.engine.borrowing import unwrapped
from draftgraph.models.faults import writing
from draftgraph.models.progress import quiet_transformers
from draftgraph.pair import Pair

ELSEWHERE = "give --out a folder"


class Exports:
    """Written on first use, under `place`. A draft that borrows from its target gets an embedding and output matrix of
    its own: those of the `lender`, which is the target before it was inflated."""

    def __init__(self, pair: Pair, lender: Any, place: Path) -> None:
        self._pair, self._lender, self._place = pair, lender, place
        self._folder: TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        if self._folder is None:
            with writing("models for other libraries", self._place, ELSEWHERE):
                self._folder = TemporaryDirectory(prefix=".models-", dir=self._place)
        return Path(self._folder.name)

    @cached_property
    def target(self) -> Path:
        return self._saved(self._pair.target, self.folder / "target")

    @cached_property
    def draft(self) -> Path:
        draft, folder = self._draft(), self.folder / "draft"
        if not self._borrows:
            return self._saved(draft, folder)
        save_plain(draft, self._lender, self._pair.tokenizer, folder)
        return folder

    @cached_property
    def assistant(self) -> Any:
        """The draft as `generate` takes it: itself, where it writes every token."""
        draft = self._draft()
        if not self._borrows:
            return draft
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            loaded = AutoModelForCausalLM.from_pretrained(self.draft, dtype=draft.dtype)
        return loaded.to(draft.device)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _borrows(self) -> bool:
        lent = unwrapped(self._lender).get_input_embeddings().weight
        return bool(self._draft().get_input_embeddings().weight.data_ptr() == lent.data_ptr())

    def _draft(self) -> Any:
        draft = self._pair.draft
        if draft is None or draft is self._lender:
            raise MethodFailed("this pair has no draft model" if draft is None else "the target drafts for itself")
        return draft

    def _saved(self, model: Any, folder: Path) -> Path:
        with writing("a model for other libraries", folder, ELSEWHERE), quiet_transformers():
            model.save_pretrained(folder)
            self._pair.tokenizer.save_pretrained(folder)
        return folder
