"""How fast modes are on this machine: answers to the prompts of tasks, timed in turns, kept one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers as transformers_library

from draftgraph import __version__
from draftgraph.bench.inflation import inflate as inflated
from draftgraph.bench.methods import Exports, Method, MethodFailed, method_named
from draftgraph.bench.rescoring import can_rescore
from draftgraph.bench.runs import PLAIN, Deadline, Place, Record, Runs, all_places, can_be_rescored, digest, of_kind
from draftgraph.bench.speed_report import SpeedReport, label_of
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.bench.structures import HF_METHODS, LLAMA_METHODS, MODES, PEERS, mode_named
from draftgraph.bench.tasks import to_score
from draftgraph.config import GraphConfig
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.ranks import refuse_split
from draftgraph.engine.sharding import local_part
from draftgraph.errors import UsageError
from draftgraph.files import claimed, held_alone
from draftgraph.generation import context_window
from draftgraph.hardware import device_name
from draftgraph.kernels.packed import number_format
from draftgraph.models.draft import is_plain
from draftgraph.notices import notice, progress_bar
from draftgraph.pair import Pair
from draftgraph.profile import FIELDS
from draftgraph.text import encode

MARKED = 64  # numbers of every weight by which a model is known again


def bench_run(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    modes: Sequence[str] = MODES,
    inflate: str | None = None,
    large: Pair | None = None,
    max_new_tokens: int = 128,
    repeats: int = 3,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
    transformers: bool = False,
    vllm: str | None = None,
    llama: str | None = None,
    gguf: Path | None = None,
    seconds: float | None = None,
    names: Mapping[str, str | None] | None = None,
    profile: GraphConfig | None = None,
) -> SpeedReport:
    """Times every mode on every prompt, `off` always among them, and keeps each measurement in `out`/runs.jsonl.

    Called again with the same arguments it goes on where it was; `seconds` stops it in time. Prompts that are
    `TaskPrompt`s may have references to score answers by. `inflate` puts the target into a large shape, or has
    done so before (`large`); `names` are those to show for the target and the draft; a `profile` is timed under that
    name. Methods of other libraries are named among the modes, as in hf-assisted; `transformers` adds all of that
    library. Those of vLLM need the python of an environment that has it, `vllm`; those of llama.cpp the target's own
    `gguf` file and, if xllamacpp is not in this environment, the python of one, `llama`, which adds all of them where
    the modes name none.

    Examples:
        >>> report = bench_run(pair, {"sky": ["Why is the sky blue?"]}, "speed", modes=["auto"])  # doctest: +SKIP
        >>> report.mode("auto").overall.speed.ratio  # doctest: +SKIP
    """
    deadline, folder = Deadline(seconds), Path(out).expanduser()
    words = [PLAIN, *modes, *(HF_METHODS if transformers else ())]
    if llama is not None and not {*modes} & {*LLAMA_METHODS}:
        words += LLAMA_METHODS
    words = list(dict.fromkeys(words))
    own = {word: mode_named(word) for word in words if word not in PEERS} | ({"profile": profile} if profile else {})
    wanted = [*own, *(word for word in words if word in PEERS)]
    names = {"target": name_of(pair.target), "draft": pair.draft and name_of(pair.draft)} | dict(names or {})
    refuse_unreadable(pair, tasks, max_new_tokens)
    arguments = {"temperature": temperature or None, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
    with claimed(folder, "--out"), held_alone(folder, "bench run"), ExitStack() as stack:
        lender = pair.target
        pair = large or inflated_pair(pair, inflate)
        watch = Stopwatch(pair, own, arguments)
        own_file = gguf if pair.target is lender else None
        exports = stack.enter_context(closing(Exports(pair, lender, folder, own_file)))
        pythons = {"vllm": vllm, "llama": llama}
        methods = [stack.enter_context(closing(method_named(word, watch, exports, pythons))) for word in wanted]
        label = label_of(inflate)
        configuration = names | {"inflated": label, "modes": wanted} | arguments | surroundings(pair)
        if profile is not None:
            configuration["profile"] = {name: getattr(profile, name) for name in FIELDS}
        with Runs(folder, configuration) as runs:
            runs.refuse_other_prompts(tasks)
            places = all_places(tasks, wanted, repeats)
            counts = {task: len(prompts) for task, prompts in tasks.items()}
            asked = {"prompts": counts, "repeats": repeats, "seconds": seconds}
            now = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "engine_seconds": watch.engines_took}
            rescores = can_rescore(pair.target)
            runs.append("session", now | asked | {"planned": len(places), "rescores": rescores})
            longest = longest_of(pair, tasks)
            measure_all(methods, runs, tasks, places, longest, pair.tokenizer, label, deadline)
            if rescores:
                rescore_all(watch, runs, tasks, places, deadline)
            report = SpeedReport.of(runs.records)
        if report.modes:
            report.save(folder)
    return report


def inflated_pair(pair: Pair, shape: str | None) -> Pair:
    if shape is None:
        return pair
    refuse_split(pair.target, "inflating")
    return replace(pair, target=inflated(pair.target, shape))


def measure_all(
    methods: Sequence[Method],
    runs: Runs,
    tasks: Mapping[str, Sequence[str]],
    places: Sequence[Place],
    longest: str,
    tokenizer: Any,
    label: str | None,
    deadline: Deadline,
) -> None:
    """In turns, each warmed up before its first. A method of another library that fails is not tried again in this
    call, and the others go on."""
    measured, plain = runs.measured, runs.plain
    missing = [place for place in places if place not in measured]
    working = {method.name: method for method in methods if any(place.mode == method.name for place in missing)}

    warm: set[str] = set()
    with progress_bar(f"{len(missing)} of {len(places)} measurements") as report:
        for done, place in enumerate(missing):
            if deadline.is_near:
                return
            if place.mode not in working:
                continue
            prompt, number = tasks[place.task][place.prompt], (place.task, place.prompt)
            method = working[place.mode]
            try:
                if place.mode not in warm:
                    runs.append("warm-up", method.warm_up(longest))
                    warm.add(place.mode)
                with deadline.watch():
                    run = method.run(prompt, plain.get(number))
            except MethodFailed as error:
                working.pop(place.mode).close()
                left = sum(one.mode == place.mode for one in missing[done:])
                runs.append("failed", {"mode": place.mode, "reason": str(error), "left_out": left})
                continue
            if place.mode == PLAIN:
                plain.setdefault(number, run["tokens"])
            if place.repeat:  # the first answer is the one to compare, and to score again
                del run["tokens"]
            else:
                run |= to_score(tokenizer, prompt, run["tokens"])
            labelled = {"inflated": label} if label else {}
            runs.append("run", place._asdict() | labelled | {"prompt_digest": digest(prompt)} | run)
            report((done + 1) / len(missing))


def longest_of(pair: Pair, tasks: Mapping[str, Sequence[str]]) -> str:
    """The longest prompt: after a warm-up with it no cache has to grow."""
    prompts = (prompt for of_task in tasks.values() for prompt in of_task)
    return max(prompts, key=lambda prompt: len(encode(pair.tokenizer, prompt)))


def rescore_all(
    watch: Stopwatch, runs: Runs, tasks: Mapping[str, Sequence[str]], places: Sequence[Place], deadline: Deadline
) -> None:
    """The first answer of every mode to every prompt, with the same weights in float32."""
    measured, known = runs.measured, {Place.of(record) for record in of_kind(runs.records, "rescored")}
    answered = [place for place in places if place in measured and can_be_rescored(measured[place])]
    missing = [place for place in answered if place not in known]
    with progress_bar(f"{len(missing)} answers in float32") as report:
        for done, place in enumerate(missing):
            if deadline.is_near:
                return
            try:
                with deadline.watch():
                    gaps = watch.rescore(tasks[place.task][place.prompt], measured[place]["tokens"])
            except torch.OutOfMemoryError:
                return notice("no memory left to score answers in float32: the same command, called again, has more")
            runs.append("rescored", place._asdict() | {"gaps": asdict(gaps)})
            report((done + 1) / len(missing))


def refuse_unreadable(pair: Pair, tasks: Mapping[str, Sequence[str]], max_new_tokens: int) -> None:
    if pair.tokenizer is None:
        raise UsageError("this pair has no tokenizer: prompts cannot be read")
    if not tasks or not all(tasks.values()):
        raise UsageError("every task needs prompts: give at least one task with one prompt")
    window = context_window(pair.target)
    for task, prompts in tasks.items():
        for row, prompt in enumerate(prompts, start=1):
            length = len(encode(pair.tokenizer, prompt))
            if window is not None and length + max_new_tokens > window:
                raise UsageError(
                    f"prompt {row} of {task} has {length} tokens, too many for {max_new_tokens} new ones "
                    f"in the target's context window of {window}: shorten it, or ask for fewer new ones"
                )


def surroundings(pair: Pair) -> Record:
    """What must be the same for measurements to be comparable."""
    engine = pair.decoder.engines.target
    return {
        "device": device_name(engine.device),
        "dtype": number_format(pair.target),
        "threads": torch.get_num_threads(),
        "engine": type(engine).__name__ + (f" on {engine.ranks} ranks" if engine.ranks > 1 else ""),
        "draftgraph": __version__,
        "torch": torch.__version__,
        "transformers": transformers_library.__version__,
        "target_weights": mark_of(pair.target),
        "draft_weights": None if pair.draft is None else mark_of(pair.draft),
    }


def pair_key(pair: Pair) -> Record:
    """What a setting was found for: the pair and the machine."""
    return {"target": name_of(pair.target), "draft": pair.draft and name_of(pair.draft)} | surroundings(pair)


def name_of(model: Any) -> str:
    inner = unwrapped(model)
    return Path(getattr(inner, "name_or_path", "")).name or type(inner).__name__


def mark_of(model: Any) -> str:
    """A digest of some numbers of every weight: a name says little about a draft that was trained again."""
    mark = sha256()
    for name, whole in model.named_parameters():
        weight = local_part(whole)
        mark.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        if is_plain(weight):
            mark.update(weight.detach().flatten()[:MARKED].double().cpu().numpy().tobytes())
    return mark.hexdigest()[:16]
