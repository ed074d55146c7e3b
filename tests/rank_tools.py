"""What the tests of tensor parallelism run in processes of their own: ranks are for the whole life of a process.

`python rank_tools.py NAME FOLDER` runs one of the functions below and prints what it found as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
from families import VOCAB, perturbed, target_of

import draftgraph
from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching.batch import continue_all
from draftgraph.decoder import GraphOutput
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.protocol import Segment
from draftgraph.engine.ranks import current, on_every_rank
from draftgraph.engine.selfcheck import adapt, engine_for, plain_logits, problem_of
from draftgraph.engine.sharding import local_part
from draftgraph.errors import LoadError, RankError
from draftgraph.generation import prepare
from draftgraph.models import load, load_model, ranks
from draftgraph.models.adapter import read_adapter
from draftgraph.sequence import Sequence

TESTS = Path(__file__).resolve().parent
RANKS = 2
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")
PADDED = "qwen3"
MODES = ("off", "chain", "tree", "graph", "auto")
STYLES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 1.4, "top_p": 0.95}}
NEW_TOKENS = 12
SEED = 7
TEXT = "the cat sat on the mat"


def start(what: str, folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """A function of this file in a process of its own, of which others read the output."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    settings = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTGRAPH_")}
    return subprocess.Popen(
        [sys.executable, *command, str(TESTS / "rank_tools.py"), what, str(folder)],
        env=settings | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], seconds: float = 300) -> list[Any]:
    """What it printed."""
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()  # if it has not ended
    assert process.returncode == 0, errors[-4000:]
    return [json.loads(line) for line in out.splitlines()]


def save_families(folder: Path) -> None:
    """One pads with a token whose row of the embedding lies behind those of the first rank."""
    for family in FAMILIES:
        model = target_of(family)
        model.config.pad_token_id = VOCAB - 2 if family == PADDED else None
        model.save_pretrained(folder / family)


def promise(folder: Path) -> None:
    """Tokens of every family, mode, style and batch on two ranks; of `off` also on one, in float64. Then what two ranks
    make of adapters, and of memory that is short."""
    for family in FAMILIES:
        whole, _ = load_model(folder / family, dtype="float32", device="cpu")
        split = draftgraph.load(folder / family, dtype="float32", device="cpu", tensor_parallel=RANKS).target
        decoder = GraphDecoder(split, perturbed(whole, 0.2))
        with torch.no_grad():
            ids = torch.arange(1, 20)[None]
            said = plain_logits(split, ids)
            off_by = float((said - whole(input_ids=ids).logits[0]).abs().max() / said.std())
        engine = decoder.engines.target
        found: dict[str, Any] = {
            "family": family,
            "engine": [type(engine).__name__, type(engine.inner).__name__, engine.ranks],  # type: ignore[attr-defined]
            "shares": [share_of(split, "q_proj"), share_of(split, "lm_head")],
            "off_by": off_by,
            "alone": {},
            "accepted": 0,
            "together": {style: together(decoder, MODES, style) for style in STYLES},
        }
        for mode, style in product(MODES, STYLES):
            result = alone(decoder, mode, style)
            found["alone"][f"{mode} {style}"] = result.new_token_ids[0]
            found["accepted"] += result.stats.accepted
        for kind in ("static", "eager") if family == "llama" else ():
            os.environ["DRAFTGRAPH_ENGINE"] = kind
            found[kind] = together(GraphDecoder(split, perturbed(whole, 0.2)), MODES, "sampled")
            del os.environ["DRAFTGRAPH_ENGINE"]
        # torch has no float64 products of several experts at once
        options = {"dtype": "float64", "device": "cpu", "experts_implementation": "eager"}
        double = draftgraph.load(folder / family, tensor_parallel=RANKS, **options).target
        one, _ = load_model(folder / family, **options)
        for name, model in (("two", double), ("one", one)):
            plain = GraphDecoder(model)
            found[name] = [alone(plain, "off", style).new_token_ids for style in STYLES]
        print(json.dumps(found), flush=True)
    adapters(folder)
    exhaust(split)


def asked(style: str) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = torch.randint(0, VOCAB, (1, 21), generator=torch.Generator().manual_seed(5))
    return ids, STYLES[style] | {"max_new_tokens": NEW_TOKENS}


def alone(decoder: GraphDecoder, mode: Any, style: str) -> GraphOutput:
    ids, given = asked(style)
    config = GraphConfig(mode=mode, cost="flat")
    return decoder.generate(ids, config=config, seed=SEED, **given)


def together(decoder: GraphDecoder, modes: Any, style: str) -> dict[str, list[int]]:
    """The same text in several modes, which share every pass."""
    ids, given = asked(style)
    configs = [GraphConfig(mode=mode, cost="flat") for mode in modes]
    sequences = [Sequence(prepare(decoder.target_model, ids, None, **given), SEED, config) for config in configs]
    continue_all(decoder, sequences)
    return {sequence.config.mode: sequence.new_tokens for sequence in sequences}


def share_of(model: Any, name: str) -> float:
    """Of a layer's weight, how much this process holds."""
    weight = next(weight for key, weight in model.named_parameters() if f"{name}.weight" in key)
    return local_part(weight).numel() / weight.numel()


def adapters(folder: Path) -> None:
    """How far apart a rank and two of them are with an adapter for layers of every kind, and how far it takes both."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=layers)
    torch.manual_seed(3)
    get_peft_model(target_of("llama"), config).save_pretrained(folder / "adapter", save_embedding_layers=False)
    given = {"mine": read_adapter("mine", folder / "adapter")}
    found = []
    for size in (1, RANKS):
        target = draftgraph.load(folder / "llama", dtype="float32", device="cpu", tensor_parallel=size).target
        engine = engine_for(target)
        adapt(engine, given)
        contexts = [engine.open(adapter=number) for number in (0, 1)]
        with Loan(target):
            segments = [Segment.of_text(context, [3, 1, 4, 1, 5], scored=True) for context in contexts]
            found.append([result.logits.clone() for result in engine.run(segments)])
    (plain, adapted), (plain_too, adapted_too) = found
    pairs = {"plain": (plain, plain_too), "adapted": (adapted, adapted_too), "apart": (plain, adapted)}
    print(json.dumps({"adapters": {name: far(*pair) for name, pair in pairs.items()}}), flush=True)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@on_every_rank
def take_memory(model: Any) -> None:
    """Of which the follower alone has too little."""
    group = current()
    if group is not None and not group.leads:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def exhaust(model: Any) -> None:
    begun = time.monotonic()
    try:
        take_memory(model)
        plain_logits(model, torch.ones((1, 1), dtype=torch.long))
    except RankError as error:
        print(json.dumps({"short": [str(error), time.monotonic() - begun]}), flush=True)


def failing(folder: Path) -> None:
    """Faults that a process with ranks outlives, and one that it does not."""
    tell(early=dies_early(folder))
    pair = load_tiny(folder)
    tell(failed_loads=failed_loads(folder, pair))
    tell(threads=threads(folder, pair))
    tell(short=short_of_memory(pair))


def dies_early(folder: Path) -> str:
    """What a load says whose follower ends when it is about to be met."""
    met, meeting = ranks.await_here, ranks.MEETING

    def met_and_ended(one: ranks.Started, size: int) -> None:
        met(one, size)
        one.process.kill()

    ranks.await_here, ranks.MEETING = met_and_ended, timedelta(seconds=2)
    try:
        return refusal(folder, "tiny")
    finally:
        ranks.await_here, ranks.MEETING = met, meeting


def failed_loads(folder: Path, pair: draftgraph.Pair) -> list[Any]:
    """What loads say that fail on all ranks, on the follower and on rank 0 alone, and what two models give then."""
    said = [refusal(folder, "broken")]
    for rank in (1, 0):
        fail_to_load(pair.target, rank)
        said.append(refusal(folder, "tiny"))
    return [said, [tokens_of(pair), tokens_of(load_tiny(folder))]]


@on_every_rank
def fail_to_load(model: Any, rank: int) -> None:
    """The next time, on one rank alone."""
    group, read = current(), load.read_model

    def fail(*given: Any) -> Any:
        load.read_model = read
        raise LoadError("no memory")

    if group is not None and group.rank == rank:
        load.read_model = fail


def refusal(folder: Path, model: str) -> str:
    """Of a load, in its class's name and its message."""
    try:
        load_tiny(folder, model)
    except draftgraph.DraftGraphError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left(folder: Path) -> None:
    """A follower ends, and then rank 0 as the engine of a server does."""
    load_tiny(folder)
    (follower,) = children(os.getpid())
    os.kill(follower, signal.SIGABRT)
    group = current()
    while group is not None and group.lost is None:
        time.sleep(0.05)
    tell(lost=None if group is None else group.lost)
    over = time.monotonic() + 20
    while meeting_places(Path(tempfile.gettempdir())) and time.monotonic() < over:
        time.sleep(0.05)
    os._exit(0)


def interrupted(folder: Path) -> None:
    """Ctrl-C while a second model is loaded."""
    pair = load_tiny(folder)

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    load.read_model = interrupt
    try:
        load_tiny(folder)
    except KeyboardInterrupt:
        try:
            tokens_of(pair)
        except RankError as error:
            tell(said=str(error))


def threads(folder: Path, pair: draftgraph.Pair) -> list[Any]:
    """What two ranks give before and after another model was checked in one thread while they were led in another."""
    before, begun, checked = tokens_of(pair), threading.Event(), threading.Event()
    whole, _ = load_model(folder / "tiny", dtype="float32", device="cpu")

    def lead() -> None:
        with pair.decoder.engines.target.group.telling("drop", 0):  # type: ignore[attr-defined]
            begun.set()
            checked.wait(60)

    leader = threading.Thread(target=lead)
    leader.start()
    begun.wait()
    kind = type(engine_for(whole)).__name__
    checked.set()
    leader.join()
    return [kind, before, tokens_of(pair)]


def short_of_memory(pair: draftgraph.Pair) -> list[str | None]:
    """What a check says in which the follower has too little memory, in an error and of the ranks."""
    group = current()
    try:
        said = check_with_little(pair.target)
    except RankError as error:
        said = f"RankError: {error}"
    return [said, None if group is None else group.lost]


@on_every_rank
def check_with_little(model: Any) -> str | None:
    """In an engine, which says in words of its own what it lacks."""

    def check() -> None:
        group = current()
        if group is not None and not group.leads:
            raise OutOfPages("no room") from torch.OutOfMemoryError("CUDA out of memory")
        plain_logits(model, torch.ones((1, 1), dtype=torch.long))

    return problem_of(check)


def load_tiny(folder: Path, name: str = "tiny") -> draftgraph.Pair:
    return draftgraph.load(folder / name, dtype="float32", device="cpu", tensor_parallel=RANKS, draft="none")


def tokens_of(pair: draftgraph.Pair) -> list[int]:
    return pair.generate(TEXT, raw=True, max_new_tokens=4, config=GraphConfig(cost="flat")).token_ids


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def script(folder: Path) -> None:
    """What a user writes for torchrun: every rank runs it."""
    pair = draftgraph.load(folder / "tiny", draft=folder / "tiny", tp_plan="auto", device="cpu", dtype="float32")
    given = {"raw": True, "max_new_tokens": 10, "config": draftgraph.GraphConfig(cost="flat")}
    out = pair.generate(TEXT, **given)
    sampled = [one.token_ids for one in pair.generate([TEXT, "on"], temperature=1.0, **given)]
    begun = next(pair.stream(TEXT, **given))  # left before its end
    pieces = list(pair.stream(TEXT, **given))
    refused = ""
    try:
        pair.generate("", **given)
    except draftgraph.UsageError as error:
        refused = str(error)
    found = [out.text, out.token_ids, out.stats.accepted_by_depth, sampled, begun, pieces, refused]
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def guarded(folder: Path) -> None:
    """Rank 0 of a server, which is stopped from outside: see `test_a_rank_0_that_hangs_is_ended`."""
    load_tiny(folder)
    ranks.guard()
    print(json.dumps(children(os.getpid())), flush=True)
    time.sleep(120)


def children(process: int) -> list[int]:
    lines = [(int(stat.parent.name), fields(stat)) for stat in Path("/proc").glob("[0-9]*/stat")]
    return [number for number, found in lines if found and int(found[1]) == process and found[0] != "Z"]


def meeting_places(folder: Path) -> list[Path]:
    """Folders that ranks have left behind."""
    return list(folder.glob("draftgraph-ranks-*"))


def mentioning(folder: Path) -> list[str]:
    """Commands of processes, such as followers, that name a folder for temporary files."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in found if str(folder) in command]


def is_running(process: int) -> bool:
    found = fields(Path(f"/proc/{process}/stat"))
    return bool(found) and found[0] != "Z"


def fields(stat: Path) -> list[str]:
    """State, parent and so on."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    import rank_tools

    getattr(rank_tools, sys.argv[1])(Path(sys.argv[2]))
