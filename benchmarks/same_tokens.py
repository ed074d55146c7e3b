"""Are the tokens really the same? Compares modes with plain decoding on prompt sets, row by row.

    python benchmarks/same_tokens.py --data FOLDER --tasks gsm8k xsum writing_prompts --rows 20 --new-tokens 48

FOLDER holds JSON lines with a field `prompt`, one file per task. Speed is a by-product: rows are decoded once.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import track

import draftgraph
from draftgraph import GraphConfig, Pair, Stats


@dataclass
class Tally:
    rows: int = 0
    same: int = 0
    stats: Stats = field(default_factory=Stats)
    plain: Stats = field(default_factory=Stats)

    def row(self) -> str:
        speed = self.stats.tokens_per_second / self.plain.tokens_per_second
        accepted = {name: count for name, count in self.stats.accepted_by_source.items() if count}
        length = self.stats.mean_accepted_length
        return f"{self.same}/{self.rows} same  {length:.2f} tokens per pass  {speed:.2f}x  {accepted}"


def prompts(data: Path, task: str, rows: int) -> list[str]:
    with (data / f"{task}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(rows), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "xsum", "writing_prompts"])
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="self", help="for the modes that draft; auto runs without one")
    parser.add_argument("--modes", nargs="+", default=["graph", "auto"])
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()

    alone = draftgraph.load(arguments.target, dtype=arguments.dtype)
    drafted = (
        Pair(alone.target, alone.target, alone.tokenizer)
        if arguments.draft == "self"
        else draftgraph.load(alone.target, arguments.draft, dtype=arguments.dtype)
    )
    total = {mode: Tally() for mode in arguments.modes}
    for task in arguments.tasks:
        tallies = {mode: Tally() for mode in arguments.modes}
        for prompt in track(prompts(arguments.data, task, arguments.rows), description=task):
            plain = alone.generate(prompt, max_new_tokens=arguments.new_tokens, config=GraphConfig(mode="off"))
            for mode in arguments.modes:
                pair = alone if mode == "auto" else drafted
                out = pair.generate(prompt, max_new_tokens=arguments.new_tokens, config=GraphConfig(mode=mode))
                for tally in (tallies[mode], total[mode]):
                    tally.rows += 1
                    tally.same += out.token_ids == plain.token_ids
                    tally.stats += out.stats
                    tally.plain += plain.stats
        for mode, tally in tallies.items():
            print(f"{task:16} {mode:6} {tally.row()}", flush=True)
    for mode, tally in total.items():
        print(f"{'all':16} {mode:6} {tally.row()}")


if __name__ == "__main__":
    main()
