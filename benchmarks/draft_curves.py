"""How a draft learnt: what it said on answers that it did not learn from, over the minutes of its training.

python benchmarks/draft_curves.py DRAFT [DRAFT ...] --out docs/images/draft-training.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PANELS = {"agreement": "agreement, held out", "tokens_per_pass": "tokens per pass, chain of 8", "loss": "loss"}


def read_training(folder: Path) -> dict[str, Any]:
    training: dict[str, Any] = json.loads((folder / "training.json").read_text())
    if not training["curve"]:
        raise SystemExit(f"{folder} was trained too briefly to have a curve")
    return training


def label_of(training: dict[str, Any]) -> str:
    layers = training["recipe"]["layers"]
    return f"{layers} layer{'s' if layers > 1 else ''}, {training['seconds'] / 60:.0f} min"


def plot(trainings: list[dict[str, Any]]) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4"}):
        figure = Figure(figsize=(12, 3.6), layout="constrained", facecolor="white")
        for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            for training in trainings:
                curve = training["curve"]
                minutes = [point["seconds"] / 60 for point in curve]
                axes.plot(minutes, [point[name] for point in curve], label=label_of(training), linewidth=1.6)
            axes.set_title(title, fontsize="medium", loc="left")
            axes.set_xlabel("minutes of training")
            axes.set_xlim(left=0)
        axes.set_ylim(0, 6)
        axes.legend(fontsize="small")
    return figure


def main(arguments: list[str] | None = None) -> None:
    from matplotlib import rc_context

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=Path, nargs="+", help="folders that `draftgraph distill` wrote")
    parser.add_argument("--out", type=Path, default=Path("draft-training.svg"))
    options = parser.parse_args(arguments)
    with rc_context({"svg.hashsalt": "draft_curves"}):
        plot([read_training(folder) for folder in options.drafts]).savefig(options.out, metadata={"Date": None})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
