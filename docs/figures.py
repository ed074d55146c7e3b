"""Writes the figures of README.md and of pages in docs from docs/results: python docs/figures.py

Whatever stands between `<!-- figures: NAME -->` and `<!-- end -->` is made here; a test compares.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import truediv
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

DOCS = Path(__file__).parent
DOCUMENTS = (DOCS.parent / "README.md", DOCS / "speed.md", DOCS / "draft.md", DOCS / "scaling.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TASKS = {
    "gsm8k": "gsm8k",
    "humaneval": "humaneval",
    "wmt14_deen": "wmt14 de-en",
    "writing_prompts": "stories",
    "alpaca": "alpaca",
    "mt_bench": "mt_bench",
    "xsum": "xsum",
}
HEADER = [*TASKS.values(), "all (95% interval)"]
# Rows of the GPU table: the folder, the mode, what it is called, and whether it is what the table is about.
GPU_ROWS = (
    ("h200-135m", "auto", "**the default model itself**, `auto`", True),
    ("h200-135m", "chain-4", "`chain` of 4, the best chain", False),
    ("h200-135m", "graph", "`graph`, the paper's setting", False),
    ("h200-7b", "auto", "**7B-cost, inflated**, `auto`", True),
    ("h200-7b", "chain-6", "7B-cost, inflated, `chain` of 6, the best chain", False),
    ("h200-7b", "graph", "7B-cost, inflated, `graph`, the paper's setting", False),
    ("h200-7b", "tree", "7B-cost, inflated, `tree`, the paper's setting", False),
    ("h200-7b-sampled", "auto", "7B-cost, inflated, `auto`, temperature 0.7, top-p 0.95", True),
    ("h200-7b-sampled", "graph", "the same, `graph`, the paper's setting", False),
    ("h200-13b", "auto", "**13B-cost, inflated**, `auto`", True),
    ("h200-70b", "auto", "**70B-cost, inflated**, `auto`", True),
)


def report(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / folder / "report.json").read_text(encoding="utf-8"))
    return found


def mode_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    mode: dict[str, Any] = next(one for one in found["modes"] if one["mode"] == name)
    return mode


def speeds(mode: dict[str, Any], leads: bool) -> list[str]:
    by_task = {one["task"]: one["speed"]["ratio"] for one in mode["tasks"]}
    speed = mode["overall"]["speed"]
    whole = f"{speed['ratio']:.2f}x"
    interval = f"**{whole}** ({speed['low']:.2f} to {speed['high']:.2f})" if leads else whole
    return [*(f"{by_task[task]:.2f}x" for task in TASKS), interval]


def table(header: list[str], lines: list[list[str]]) -> Iterator[str]:
    yield f"| | {' | '.join(header)} |"
    yield "|" + "---|" * (len(header) + 1)
    yield from (f"| {' | '.join(cells)} |" for cells in lines)


def prose(*sentences: str) -> list[str]:
    return wrap(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def shares_of(sources: dict[str, Any]) -> tuple[str, str]:
    """How much came without drafting, and from where."""
    parts = sorted(((share, name) for name, share in sources["shares"].items() if name != "draft"), reverse=True)
    return f"{sources['undrafted']:.0%}", ", ".join(f"{share:.0%} {name}" for share, name in parts)


# README's one table: runs, each with its methods in turns, and for each row the methods of which the fastest counts.
RUNS = {
    "cpu": "135M model, 4 bits, two CPU cores",
    "cpu-qwen": "1.5B model, 4 bits, no draft model, two CPU cores",
    "cpu-peers": "135M model, float32, two CPU cores ¹",
    "h200-7b-peers": "7B-cost, inflated ², bfloat16, one H200 GPU ¹",
}
ENGINES = {
    "`transformers`": ("hf",),
    "`transformers`, speculative": ("hf-lookup", "hf-assisted", "hf-assisted-constant"),
    "llama.cpp": ("llama",),
    "llama.cpp, speculative": ("llama-ngram-simple",),
    "vLLM": ("vllm",),
    "vLLM, speculative": ("vllm-ngram", "vllm-draft"),
    "draftgraph, `off`": ("off",),
    "**draftgraph, `auto`**": ("auto",),
}


def gain() -> Iterator[str]:
    """What `auto` gains over `off`, by task, on a CPU with the engine as it is, and on a GPU."""
    gpu_runs = sorted({folder for folder, *_ in GPU_ROWS})
    (low, high), (gpu_low, gpu_high) = map(range_of_auto, (("cpu", "cpu-qwen"), gpu_runs))
    yield from prose(
        f"How much faster depends on the text: {low:.1f} to {high:.1f} times plain decoding on two CPU cores, and",
        f"{gpu_low:.1f} to {gpu_high:.1f} times on a GPU (averages over tasks: single prompts can be slower; on the",
        "GPU older runs, most of them with a [stand-in for a large model](#how-fast-is-it)).",
    )


def range_of_auto(runs: Iterable[str]) -> tuple[float, float]:
    found = [one["speed"]["ratio"] for run in runs for one in mode_of(report(run), "auto")["tasks"]]
    return min(found), max(found)


def overview() -> Iterator[str]:
    """Tokens per second of every library, by run."""
    found = {run: {one["mode"]: one["overall"]["ms_per_token"] for one in report(run)["modes"]} for run in RUNS}
    lines = []
    found["h200-7b-peers"] = {name: ms for name, ms in found["h200-7b-peers"].items() if not name.startswith("hf")}
    for words, methods in ENGINES.items():
        times = ([ms[one] for one in methods if one in ms] for ms in found.values())
        lines.append([words, *(f"{1e3 / min(ms):.0f}" if ms else "–" for ms in times)])
    lines[-1][1:] = (f"**{cell}**" for cell in lines[-1][1:])
    yield from table(list(RUNS.values()), lines)
    gpu = [one["ms_per_token"] for one in mode_of(report("h200-7b-peers"), "hf")["tasks"]]
    yield ""
    yield from prose(
        f"On the GPU {len(gpu)} prompts were answered once. `transformers` is left out: that machine's slow Python",
        f"bound it ({min(gpu):.0f} to {max(gpu):.0f} ms per token).",
    )


CPU_ROWS = {
    "llama": "llama.cpp, plain",
    "llama-ngram-simple": "llama.cpp, drafts from the text",
    "off": "draftgraph, `off`",
    "chain": "draftgraph, `chain`",
    "graph": "draftgraph, `graph`",
    "auto": "**draftgraph, `auto`**",
}


def cpu() -> Iterator[str]:
    """Beside llama.cpp on the same file, in turns."""
    found = {mode["mode"]: mode for mode in report("cpu")["modes"]}
    plain = by_task(found["llama"])
    lines = []
    for name, words in CPU_ROWS.items():
        ratios = by_task(found[name])
        times = [f"{ratios[task] / plain[task]:.2f}x" for task in (*TASKS, "all")]
        lines.append([words, *times, f"{1e3 / overall_ms(found[name]):.0f}"])
    yield from table([*TASKS.values(), "all", "tokens per second"], lines)
    auto, llama, off = (found[name] for name in ("auto", "llama", "off"))
    yield ""
    yield from prose(
        f"All {auto['answers']} answers of every mode of ours are those of `off`. `auto` gets",
        f"{auto['overall']['tokens_per_pass']:.2f} tokens per pass. Prompts: {off['prompt_tokens_per_second']:,.0f}",
        f"tokens per second, llama.cpp {llama['prompt_tokens_per_second']:,.0f}.",
    )


QWEN_TASKS = {"alpaca": "alpaca", "writing_prompts": "stories", "code_edit": "code to print again"}


def qwen() -> Iterator[str]:
    """A larger model without a draft, beside llama.cpp on the same file."""
    found = {mode["mode"]: mode for mode in report("cpu-qwen")["modes"]}
    lines = []
    for name in (one for one in CPU_ROWS if one in found):
        by_name = {one["task"]: one["ms_per_token"] for one in found[name]["tasks"]}
        times = [*(by_name[task] for task in QWEN_TASKS), overall_ms(found[name])]
        lines.append([CPU_ROWS[name], *(f"{time:.1f}" for time in times)])
    yield from table([*QWEN_TASKS.values(), "all, ms per token"], lines)


def overall_ms(mode: dict[str, Any]) -> float:
    return float(mode["overall"]["ms_per_token"])


def by_task(mode: dict[str, Any]) -> dict[str, float]:
    """Times as fast as `off`."""
    return {one["task"]: one["speed"]["ratio"] for one in mode["tasks"]} | {"all": mode["overall"]["speed"]["ratio"]}


def gpu() -> Iterator[str]:
    lines = []
    for folder, name, words, leads in GPU_ROWS:
        found = report(folder)
        mode, plain = mode_of(found, name), mode_of(found, "off")
        time = f"{mode['overall']['ms_per_token']:.2f}"
        before = f"{plain['overall']['ms_per_token']:.2f} → " if leads else ""
        lines.append([words, *speeds(mode, leads), before + time])
    yield from table([*HEADER, "ms per token"], lines)


def same() -> Iterator[str]:
    """How many answers are those of plain decoding in half precision on a GPU."""
    lines = (DOCS / "results" / "h200-same" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["target"]] += row["of"]
    yield from prose(
        f"On an H200 {sum(row['same'] for row in rows):,} of {counts.total():,} answers in half precision were those",
        "of `off`, token for token:",
        "; ".join(f"{target} {count:,}" for target, count in counts.items()) + ".",
        "[Runs](docs/results/README.md).",
    )


def large() -> Iterator[str]:
    """What else is known of the 7B-cost run."""
    auto, plain = (mode_of(report("h200-7b"), name) for name in ("auto", "off"))
    free, parts = shares_of(auto["sources"])
    first, plain_first = (mode["overall"]["first_token_ms"] for mode in (auto, plain))
    off, found = (mode["rescored"]["not_best"] for mode in (plain, auto))
    yield from prose(
        f"At 7B-cost, inflated, `auto` gets {auto['overall']['tokens_per_pass']:.1f} tokens per pass, {free} of the",
        f"accepted ones without drafting ({parts}); the first token comes after {first:.0f} ms ({plain_first:.0f} ms",
        f"in `off`). The run is from before [rows had an order of their own](same.md): {auto['same']} of",
        f"{auto['answers']} answers are token for token those of `off`, {auto['ties']} part from them at a tie of",
        f"rounding; scored again in float32 they are as good: {found:.2%} of tokens are not the best there,",
        f"{off:.2%} in `off`.",
    )


def load() -> Iterator[str]:
    """Requests at once, through the scheduler."""
    lines = (DOCS / "results" / "h200-7b-load" / "load.jsonl").read_text(encoding="utf-8").splitlines()
    speeds: dict[int, dict[str, list[float]]] = {}
    for one in map(json.loads, lines):
        speeds.setdefault(one["texts"], {}).setdefault(one["mode"], []).append(one["tokens"] / one["seconds"])
    levels = sorted(speeds)
    rows = [
        [f"tokens per second, `{mode}`", *(f"{median(speeds[texts][mode]):,.0f}" for texts in levels)]
        for mode in ("off", "auto")
    ]
    ratios = [median(map(truediv, speeds[texts]["auto"], speeds[texts]["off"])) for texts in levels]
    rows.append(["times as fast (7B-cost, inflated)", *(f"{ratio:.2f}x" for ratio in ratios)])
    yield from table([f"{texts} client{'s' * (texts > 1)}" for texts in levels], rows)


LIBRARIES = {
    "hf": "`transformers`, plain",
    "hf-lookup": "`transformers`, prompt lookup",
    "hf-assisted": "`transformers`, assisted by the same draft",
    "hf-assisted-constant": "the same, always five drafted tokens",
    "vllm": "vLLM, plain",
    "vllm-ngram": "vLLM, n-gram drafts",
    "vllm-draft": "vLLM, the same draft",
    "off": "draftgraph, plain",
    "auto": "**draftgraph, `auto`**",
}


def libraries() -> Iterator[str]:
    """Other libraries on the same prompts, in turns."""
    found = {mode["mode"]: mode["overall"] for mode in report("cpu-peers")["modes"]}
    lines = [[words, f"{found[name]['ms_per_token']:.1f}", ratio(found[name])] for name, words in LIBRARIES.items()]
    yield from table(["ms per token", "times plain decoding here (95% interval)"], lines)


def ratio(overall: dict[str, Any]) -> str:
    speed = overall["speed"]
    return f"{speed['ratio']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})"


DRAFT_COLUMNS = {
    "chain-8": "chain of 8",
    "paper-graph": "paper's graph",
    "tree-16": "best-first tree of 16",
    "tree-64": "best-first tree of 64",
}


def draft() -> Iterator[str]:
    """How good the default draft is, on all tasks, and in brackets without answers that loop."""
    found = json.loads((DOCS / "results" / "draft" / "results.json").read_text(encoding="utf-8"))
    rows = {(row["task"], row["selection"]): row for row in found["rows"] if not row["temperature"]}
    lines = []
    for task, words in (TASKS | {"mean": "**mean**"}).items():
        both = [rows[task, selection] for selection in ("all", "without loops")]
        pairs = [[f"{row['agreement']:.3f}" for row in both]]
        pairs += [[f"{row['structures'][name]['tokens_per_pass']:.2f}" for row in both] for name in DRAFT_COLUMNS]
        lines.append([words, *(f"{whole} ({rest})" for whole, rest in pairs)])
    yield from table(["agreement", *DRAFT_COLUMNS.values()], lines)


def capacity(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / "capacity" / file).read_text(encoding="utf-8"))
    return found


def kinds() -> dict[tuple[int, bool], str]:
    """Of replicas: how many GPUs, and whether they draft."""
    names = {ranks: f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in (1, 2, 4)}
    return {
        (ranks, drafts): f"{name}, `{('off', 'auto')[drafts]}`" for ranks, name in names.items() for drafts in (0, 1)
    }


def shown(gpus: Any) -> str:
    """None: no number of them is enough."""
    return "none" if gpus is None else f"{gpus:,}" if isinstance(gpus, int) else str(gpus)


def plan() -> Iterator[str]:
    """GPUs for so many users."""
    found: dict[tuple[str, int], dict[tuple[int, bool], int | None]] = {}
    for one in capacity("plan.json")["plan"]:
        key = f"{one['target']['per_token'] * 1e3:g} ms a token", one["users"]
        found.setdefault(key, {})[one["ranks"], one["drafts"]] = one["gpus"]
    lines = [
        [target, f"{users:,}", *map(shown, map(gpus.get, kinds(), repeat("not run")))]
        for (target, users), gpus in found.items()
    ]
    yield from table(["users", *kinds().values()], lines)


def routing() -> Iterator[str]:
    lines = []
    for one in capacity("plan.json")["routing"]:
        got = one["outcome"]
        times = [f"{got[name] * 1e3:.{digits}f}" for name, digits in (("wait", 0), ("per_token", 1))]
        where = "to its pages" if one["by_conversation"] else "to the less busy of two"
        lines.append([f"{where}, {one['slots']:,} slots", f"{got['hits']:.0%}", *times])
    yield from table(["of prompts known", "first token, 99%, ms", "per token, 99%, ms"], lines)


def foreseen() -> Iterator[str]:
    found = capacity("plan.json")["check"]
    rows = [[name, *(f"{one[name]:,.0f}" for one in found)] for name in ("measured", "predicted")]
    off = [f"{one['predicted'] / one['measured'] - 1:+.0%}" + " (fitted)" * one["fitted"] for one in found]
    header = [f"{one['texts']} client{'s' * (one['texts'] > 1)}" for one in found]
    yield from table(header, [[f"tokens per second, {name}", *rest] for name, *rest in rows] + [["", *off]])


def checked() -> Iterator[str]:
    lines = []
    for load in capacity("check.json")["loads"]:
        for world in ("measured", "predicted"):
            got = load[world]
            times = [f"{got[name] * 1e3:.{digits}f}" for name, digits in CHECKED.items()]
            name = f"{load['rate']:g} requests a second, `{load['mode']}`, {world}"
            lines.append([name, f"{got['tokens per second']:.0f}", *times])
    yield from table(["tokens per second", *(f"{name}, ms" for name in CHECKED)], lines)


CHECKED = {"first token, mean": 0, "first token, 90%": 0, "per token, mean": 1, "per token, 90%": 1}
BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    "gain": gain,
    "overview": overview,
    "cpu": cpu,
    "qwen": qwen,
    "libraries": libraries,
    "same": same,
    "gpu": gpu,
    "large": large,
    "load": load,
    "draft": draft,
    "plan": plan,
    "routing": routing,
    "foreseen": foreseen,
    "checked": checked,
}


def filled(text: str) -> str:
    """A document with its figures as they were measured."""
    return BLOCK.sub(lambda found: found[1] + "\n".join(BLOCKS[found[2]]()) + "\n" + found[3], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
