"""What does a level of a draft cost? Times it against a one-token pass of its target.

    python benchmarks/draft_cost.py --layers 1,2,4,6 --device cuda --json > cost.json
    python benchmarks/draft_cost.py --device cuda --compile --nodes 1,8,64
    python benchmarks/draft_cost.py --draft FOLDER --device cpu

A level is one pass of the draft over some nodes: embedding, layers, its output rows, softmax, the 8 best of each node.
Drafts are folders that `draftgraph distill` wrote, or are cut from the target here: what they say costs the same.

On CUDA the passes of the transformers modules are captured as CUDA graphs, over preallocated keys and values; with
--compile they are also compiled and captured, which can take a minute for each width of a deep target: name few. On a
CPU they are the eager passes that draftgraph makes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from static_passes import BEST, Captured, StaticText, draft_level, many_recompiles, masked_kernels, static_forward

from draftgraph.engine.borrowing import Loan
from draftgraph.engine.eager import EagerContext, EagerEngine
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.graph import Bools, Ints
from draftgraph.models import load_model
from draftgraph.models.draft import (
    cut_student,
    is_draft_folder,
    layer_stack,
    lend_output_rows,
    load_draft,
    name_of,
    own_weights,
    spread,
    text_config,
)
from draftgraph.proposers.draft_model import DraftVocabulary

NODES = {"cuda": [1, 2, 4, 8, 16, 32, 64], "cpu": [1, 2, 4, 8]}
LAYERS = [1, 2, 4, 6]
GOAL_LAYERS = 2
GOALS = {"cuda": (8, 0.16), "cpu": (1, 0.20)}  # nodes of a level, its cost at most, in one-token target passes
BURST = 8  # levels back to back, as in use

Steps = dict[tuple[str, int], Callable[[], Any]]  # model, nodes -> one pass
Times = dict[tuple[str, int], list[float]]  # in milliseconds


@dataclass(frozen=True)
class Cost:
    """Of a model's passes over so many nodes."""

    name: str
    layers: int
    weights: int  # of a draft: its own, without what it borrows from the target
    vocab_size: int
    ms: dict[int, float]
    of_target: dict[int, float]  # in one-token passes of the target


@dataclass(frozen=True)
class Comparison:
    way: str  # how passes were run
    target: Cost
    drafts: list[Cost]


def tree_of(nodes: int) -> tuple[Ints, Bools]:
    """Depths and ancestors of a binary tree."""
    visible = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        visible[node] |= visible[(node - 1) // 2]
    return visible.sum(axis=1) - 1, visible


def level_of(nodes: int) -> tuple[Ints, Bools]:
    """Depths and ancestors of nodes that stand side by side."""
    return np.zeros(nodes, dtype=np.int64), np.eye(nodes, dtype=bool)


def sample_tokens(model: Any, count: int) -> list[int]:
    rows = len(model.get_input_embeddings().weight)
    return np.random.default_rng(count).integers(0, rows, count).tolist()


def static_steps(target: Any, drafts: dict[str, Any], nodes: list[int], context: int, compiled: bool) -> Steps:
    """All passes over preallocated keys and values."""
    verify, level = static_forward, draft_level
    if compiled:
        verify, level = (
            torch.compile(step, mode="default", fullgraph=False, dynamic=False) for step in (verify, level)
        )
    steps: Steps = {}
    for name, model in {"target": target, **drafts}.items():
        text = StaticText(model, sample_tokens(model, context), max(nodes))
        for count in nodes:
            step, shape = (verify, tree_of) if name == "target" else (level, level_of)
            steps[name, count] = partial(step, model, **text.behind(sample_tokens(model, count), *shape(count)))
    return steps


def eager_steps(target: Any, drafts: dict[str, Any], nodes: list[int], context: int) -> Steps:
    """All passes as draftgraph makes them without CUDA graphs."""
    steps: Steps = {}
    for name, model in {"target": target, **drafts}.items():
        text = EagerEngine(model).open()
        text.reserve(context + max(nodes))
        text.prefill(sample_tokens(model, context))
        vocabulary = None if name == "target" else DraftVocabulary(model, written_tokens(target))
        for count in nodes:
            tokens = np.array(sample_tokens(model, count))
            shape = tree_of(count) if vocabulary is None else level_of(count)
            steps[name, count] = partial(eager_pass, text, tokens, *shape, vocabulary)
    return steps


def eager_pass(text: EagerContext, tokens: Ints, depths: Ints, visible: Bools, draft: DraftVocabulary | None) -> Any:
    logits = text.forward(tokens, depths, visible)
    text.forget(0)
    return logits if draft is None else draft.best(logits, BEST)


def replay_times(graphs: dict[tuple[str, int], Captured], repeats: int) -> Times:
    """In turns. A pass of the target comes before every burst: it clears the GPU's cache of a draft's weights, and
    while it runs the burst is queued, so that launches are not timed."""
    times: Times = {key: [] for key in graphs}
    first = next(iter(graphs.values()))
    for _ in range(repeats):
        for key, graph in graphs.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(BURST + 1)]
            first.replay()
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            times[key] += [start.elapsed_time(end) for start, end in pairwise(marks)]
    return times


def eager_times(steps: Steps, repeats: int) -> Times:
    """In turns with one-token passes of the target: on a busy machine all suffer alike."""
    times: Times = {key: [] for key in steps}
    first = next(iter(steps))
    for key in steps:
        steps[key]()
    for _ in range(repeats):
        for key in steps:
            for timed in dict.fromkeys((first, key)):
                start = time.perf_counter()
                steps[timed]()
                times[timed].append((time.perf_counter() - start) * 1e3)
    return times


def compare(
    target: Any, drafts: dict[str, Any], nodes: list[int], context: int, repeats: int, compiled: bool = False
) -> Comparison:
    """Times all passes in one way, that of the models' device."""
    on_gpu = target.get_input_embeddings().weight.is_cuda
    with Loan(target, *drafts.values()):
        if on_gpu:
            with masked_kernels(), many_recompiles():
                steps = static_steps(target, drafts, nodes, context, compiled)
                graphs = {key: Captured(step) for key, step in steps.items()}
            times = replay_times(graphs, repeats)
        else:
            times = eager_times(eager_steps(target, drafts, nodes, context), repeats)
    way = ("compiled and captured" if compiled else "captured") if on_gpu else "eager"
    ms = {key: median(found) for key, found in times.items()}
    one_token = ms["target", nodes[0]]

    def cost(key: str, name: str, model: Any, weights: int) -> Cost:
        layers = text_config(model.config).num_hidden_layers
        own = {count: ms[key, count] for count in nodes}
        ratios = {count: own[count] / one_token for count in nodes}
        return Cost(name, layers, weights, written_tokens(model), own, ratios)

    whole = cost("target", name_of(target), target, target.num_parameters())
    return Comparison(way, whole, [cost(name, name, model, own_size(model)) for name, model in drafts.items()])


def own_size(draft: Any) -> int:
    return sum(weight.numel() for weight in own_weights(draft).values())


def written_tokens(model: Any) -> int:
    return len(model.get_output_embeddings().weight)


def cut_drafts(target: Any, layers: list[int], vocab_size: int) -> dict[str, Any]:
    """Students with these numbers of layers, and as many tokens that they can write; 0: all."""
    depth = len(layer_stack(target)[1])
    if deeper := [count for count in layers if not 1 <= count <= depth]:
        raise UsageError(f"the target has {depth} layers: a draft of {deeper[0]} cannot be cut from it")
    drafts: dict[str, Any] = {}
    for count in layers:
        drafts[f"{count} layer{'s' if count > 1 else ''}"] = draft = cut_student(target, spread(count, depth))
        if 0 < vocab_size < written_tokens(target):
            lend_output_rows(draft, target, torch.arange(vocab_size))
    return drafts


def load_drafts(target: Any, folders: list[Path], **options: Any) -> dict[str, Any]:
    return {
        folder.resolve().name: load_draft(folder, target)
        if is_draft_folder(folder)
        else load_model(folder, role="draft", **options)[0]
        for folder in folders
    }


def report_of(comparisons: list[Comparison], target: Any, context: int, repeats: int) -> dict[str, Any]:
    device = target.get_input_embeddings().weight.device
    on_gpu = device.type == "cuda"
    nodes, most = GOALS[device.type]
    return {
        "settings": {
            "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
            "threads": None if on_gpu else torch.get_num_threads(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "context": context,
            "repeats": repeats,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
        "comparisons": [asdict(one) for one in comparisons],
        "goals": [
            {
                "way": one.way,
                "draft": draft.name,
                "nodes": nodes,
                "of_target": draft.of_target[nodes],
                "at_most": most,
                "met": draft.of_target[nodes] <= most,
            }
            for one in comparisons
            for draft in one.drafts
            if draft.layers == GOAL_LAYERS and nodes in draft.of_target
        ],
    }


def show(report: dict[str, Any]) -> None:
    settings = report["settings"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    first = report["comparisons"][0]["target"]
    print(f"{first['name']}, {settings['dtype']} on {settings['device']}{threads}, context {settings['context']}")
    for comparison in report["comparisons"]:
        nodes = list(comparison["target"]["ms"])
        print(f"\n{comparison['way']:44}" + "".join(f"{count:>8}" for count in nodes) + "  nodes")
        rows = [("target, ms", comparison["target"]["ms"]), ("target", comparison["target"]["of_target"])]
        for draft in comparison["drafts"]:
            own = f"{draft['name']} ({draft['weights'] / 1e6:.1f}M weights)"
            rows += [(f"{own}, ms", draft["ms"]), (f"{own}, of the target's 1", draft["of_target"])]
        for label, figures in rows:
            print(f"{label:44}" + "".join(f"{figures[count]:8.3f}" for count in nodes))
    for goal in report["goals"]:
        print(
            f"\n{goal['draft']}, {goal['way']}: a level of {goal['nodes']} costs {goal['of_target']:.3f} of a target "
            f"pass over one token; at most {goal['at_most']:.2f} is wanted: {'met' if goal['met'] else 'missed'}"
        )


def integers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="left out: the default model")
    parser.add_argument("--draft", type=Path, nargs="+", default=[], help="folders; left out: drafts are cut")
    parser.add_argument("--layers", type=integers, help="of drafts that are cut from the target; default 1,2,4,6")
    parser.add_argument("--vocab-size", type=int, default=12288, help="tokens that a cut draft can write; 0: all")
    parser.add_argument("--context", type=int, default=512, help="tokens of the text")
    parser.add_argument("--nodes", type=integers, help="widths of a pass, 1 among them")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device")
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="on CUDA: compiled passes as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if min(options.context, options.repeats) < 1:
        parser.error("--context and --repeats must be at least 1")
    place = {"device": options.device, "dtype": options.dtype}
    try:
        target, _ = load_model(options.target, **place)
        drafts = load_drafts(target, options.draft, **place)
        layers = options.layers or ([] if options.draft else LAYERS)
        drafts |= cut_drafts(target, layers, options.vocab_size)
    except DraftGraphError as error:
        parser.error(str(error))
    kind = target.get_input_embeddings().weight.device.type
    nodes = options.nodes or NODES.get(kind)
    if nodes is None or (options.compile and kind != "cuda"):
        parser.error(f"this cannot be timed on {kind}: use --device cuda, or --device cpu without --compile")
    if nodes[0] != 1:
        parser.error("--nodes must name 1 and larger widths, as in 1,8,64")
    ways = [False, True] if options.compile else [False]
    comparisons = [compare(target, drafts, nodes, options.context, options.repeats, compiled) for compiled in ways]
    report = report_of(comparisons, target, options.context, options.repeats)
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(report)


if __name__ == "__main__":
    main()
