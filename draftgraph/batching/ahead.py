"""Drafts that set off together as soon as a step is committed, so that the device is at work while the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftgraph.config import GraphConfig
from draftgraph.drafting.batch_program import GraphSeats
from draftgraph.drafting.device_batch import BatchDraft, SeatDraft
from draftgraph.drafting.model import DraftVocabulary

if TYPE_CHECKING:
    from draftgraph.batching.text import Text


class Ahead:
    """The drafts of a batch on an engine whose passes can be captured."""

    def __init__(self, engine: GraphSeats, vocabulary: DraftVocabulary) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._drafts: dict[tuple[int, int], BatchDraft] = {}  # by k and levels: most texts have the same

    def draft_for(self, config: GraphConfig) -> BatchDraft | None:
        """Who drafts for texts with this configuration; None: each is asked level by level."""
        if config.mode != "auto":
            return None
        shape = config.k, config.levels
        if shape not in self._drafts:
            self._drafts[shape] = BatchDraft(self._engine, self._vocabulary, *shape)
        return self._drafts[shape]

    def start(self, texts: list[Text]) -> None:
        """Everybody has said how far he is to go."""
        mine = [text.draft for text in texts if isinstance(text.draft, SeatDraft)]
        for draft in self._drafts.values():
            draft.start([one for one in mine if one.batch is draft])

    @property
    def seconds(self) -> float:
        """That the last runs took of the host's time, waiting for them included."""
        return sum(draft.seconds for draft in self._drafts.values())

    @property
    def fed(self) -> list[int]:
        """Nodes, pass by pass."""
        return [nodes for draft in self._drafts.values() for nodes in draft.fed]
