"""No telemetry: generating from what is on disk opens no connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.model
def test_generation_with_the_default_model_uses_no_network(run_without_network: Any, default_model_file: Path) -> None:
    done = run_without_network(
        "import draftgraph; print(draftgraph.load().generate('hi', max_new_tokens=4).finish_reason)",
        HF_HUB_OFFLINE="0",
    )
    assert done.stdout.strip() in ("stop", "length"), done.stderr
    assert "network:" not in done.stderr
