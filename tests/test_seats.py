"""Whether a model can be trusted with many texts: its check tells rounding from errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftgraph.batching.seats import Crowd, crowd_problem
from draftgraph.engine.packed import PackedEngine
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.models import load_model

WRONG = {
    "a sibling is seen": lambda depths, seen: (depths, np.tri(*seen.shape, seen.shape[1] - seen.shape[0], dtype=bool)),
    "positions are one off": lambda depths, seen: (depths + 1, seen),
    "the root is not seen": lambda depths, seen: (depths, seen & (np.arange(seen.shape[1]) > 0)),
}


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.bfloat16])  # the coarsest
def test_rounding_is_told_from_errors_in_half_precision(
    default_model_file: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model(default_model_file, dtype=dtype)[0]
    assert crowd_problem(target, PackedEngine) is None and crowd_problem(target, PackedStaticEngine) is None
    sound = Crowd.forward
    for wrong in WRONG.values():
        monkeypatch.setattr(
            Crowd, "forward", lambda self, tokens, *given, wrong=wrong: sound(self, tokens, *wrong(*given))
        )
        assert "off those of plain passes" in str(crowd_problem(target, PackedEngine))
