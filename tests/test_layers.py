"""Imports point one way: the contract of pyproject.toml holds, and an import that points upwards breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {"PATH": "", "PYTHONPATH": str(folder), "HOME": str(folder), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        (None, ""),
        ("graph/merge.py", "from draftgraph.engine.paged import PagedEngine\n"),
        ("engine/paged.py", "from draftgraph.proposers.policies import Policy\n"),
        ("step.py", "from draftgraph.batching.batch import Batch\n"),
        ("cost/prices.py", "def later() -> None:\n    from draftgraph.bench import runs\n"),
    ],
)
def test_an_import_that_points_upwards_breaks_the_contract(tmp_path: Path, file: str | None, planted: str) -> None:
    shutil.copytree(REPOSITORY / "draftgraph", tmp_path / "draftgraph", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    if file is not None:
        place = tmp_path / "draftgraph" / file
        place.write_text(place.read_text(encoding="utf-8") + "\n\n" + planted, encoding="utf-8")
    found = lint(tmp_path)
    assert (found.returncode == 0) == (file is None), found.stdout + found.stderr
    if file is not None:
        assert f"draftgraph.{file.removesuffix('.py').replace('/', '.')}" in found.stdout
