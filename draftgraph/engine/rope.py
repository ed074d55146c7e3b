"""Rotary embeddings that change with the length of the text: a graph must not stand on both sides of the change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeSwitch:
    """`transformers` picks the frequencies of longrope and dynamic RoPE by the largest position of a pass."""

    boundary: int  # the first position of the other side
    changes_always: bool  # dynamic: past the boundary every length has frequencies of its own
    recompute: bool  # whether `generate` computes the text again when it crosses, as Phi-3 does

    @classmethod
    def of(cls, model: Any) -> RopeSwitch | None:
        config = model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
        for rope in nested:
            kind = rope.get("rope_type", "default")
            if kind == "longrope":
                boundary = rope.get("original_max_position_embeddings") or config.max_position_embeddings
                recompute = hasattr(config, "original_max_position_embeddings")
                return cls(int(boundary), False, recompute)
            if "dynamic" in kind:
                return cls(int(config.max_position_embeddings), True, False)
        return None

    def depth_limit(self, root: int) -> int | None:
        """How far behind a root at this position a pass may reach."""
        if root < self.boundary:
            return self.boundary - 1 - root
        return 0 if self.changes_always else None

    def crossed_by(self, length: int, last_position: int) -> bool:
        """Whether a pass is the first past the boundary, over a text computed before it."""
        return self.recompute and 0 < length <= self.boundary <= last_position
