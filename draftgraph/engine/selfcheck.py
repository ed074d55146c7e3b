"""Before a model is trusted with a graph: one small tree against plain forward passes, and whether a node's logits
have the same bits in every pass."""

from __future__ import annotations

import gc
import inspect
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor

from draftgraph import private
from draftgraph.compiled import folder as compiled_folder
from draftgraph.engine.adapters import Adapter, Adapters
from draftgraph.engine.borrowing import Loan, adapters, configs_of, evaluating, has_hooks, pass_lock, unwrapped
from draftgraph.engine.eager import EagerContext, EagerEngine
from draftgraph.engine.leading import LeadEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Engine, Segment
from draftgraph.engine.ranks import agreed, on_every_rank, rank_count, ranks_of, together
from draftgraph.engine.sharding import group_of, leaves_sums_to_library, sums_change
from draftgraph.errors import RankError, UnsupportedModelError, UsageError, one_line
from draftgraph.files import PACKED, cache_dir, replacing
from draftgraph.graph import Bools, Ints
from draftgraph.hardware import device_name, digest, processor
from draftgraph.kernels.packed import is_packed, still_torch
from draftgraph.notices import notice

TEXT_LENGTH = 5
LONGEST_WINDOW = 512  # a smaller window is crossed by the check's text
SHORT_WINDOW = 8  # stands in for a longer one while a model is checked
PARENTS = np.array([-1, 0, 0, 1, 2, 1])  # branches that part at the root and at a child
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 4e-2, torch.bfloat16: 1e-1}
ATTEMPTS = 3  # texts that are tried in half precision
NOISE = 3.0  # times as far as the model's own cached passes are off: rounding
WIDTHS = (2, 3, 8, 17, 33, 64)  # nodes of passes that are compared bit by bit with passes over one
PATH = 6  # of their nodes, one behind the other
PIECE = 7  # tokens of a text that is read in pieces for that comparison
RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid", "moe_mamba", "ssm")

CHECKED = 4096  # slots of a pool that only a check uses
MORE = 2 * PAGE  # tokens that a check reads, so that it turns some pages
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}

_verdicts: weakref.WeakKeyDictionary[Any, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def engine_for(model: Any, slots: int | None = None) -> Engine:
    """An engine for a model that passed the check: paged where that can be, else plain passes; a model that cannot
    branch is given chains only. `slots`: the bound of the pool; None: it grows."""
    abilities, kind, ranks = abilities_of(model), asked_engine(), ranks_of(model)
    if abilities["paged"]:
        told = slots, captured_on(model, kind), abilities["compiled"]
        if ranks is not None:
            return LeadEngine(ranks, model, "paged", *told)
        return PagedEngine(model, *told)
    if slots is not None:
        notice(f"{type(unwrapped(model)).__name__} reads one text at a time, and slower: {abilities['problem']}")
    able = abilities["branching"], abilities["offsets"]
    return EagerEngine(model, *able) if ranks is None else LeadEngine(ranks, model, "eager", *able)


def inexactness(model: Any) -> str | None:
    """Why modes and batches may give other tokens than plain decoding, where two are almost equally likely; None: a
    node's logits have the same bits whatever else is in its pass."""
    abilities = abilities_of(model)
    if "inexact" not in abilities:
        found = _inexact(model, abilities)
        if isinstance(found, ShortOfMemory):
            return found
        abilities["inexact"] = found
        keep_verdict(model, *_verdicts.get(model, (_key_of(model), abilities)))
    return abilities["inexact"]  # type: ignore[no-any-return]


@on_every_rank
def _inexact(model: Any, abilities: dict[str, Any]) -> str | None:
    with short_windows(model):
        return problem_of(partial(bit_difference, model, abilities))


def abilities_of(model: Any) -> dict[str, Any]:
    """What checks have found; they are made when a model is first met."""
    refuse_unrewindable(model)
    refuse_on_followers(model)
    key, known = _key_of(model), _verdicts.get(model)
    if known is None or known[0] != key:
        known = key, kept_verdict(model, key) or _checked(model, asked_engine())
        if known[1]["lasting"]:
            _verdicts[model] = known
            keep_verdict(model, *known)
    return known[1]


def _key_of(model: Any) -> str:
    ranks = rank_count(model)
    weight = next(unwrapped(model).parameters())
    where = weight.device, weight.dtype
    found = private.attention_of(unwrapped(model).config), adapters(model), asked_engine(), *map(str, where)
    return repr(found if ranks == 1 else (*found, ranks))


@on_every_rank
def _checked(model: Any, kind: str | None) -> dict[str, Any]:
    with short_windows(model):
        return _abilities(model, kind)


def adapt(engine: Engine, given: Mapping[str, Adapter]) -> None:
    """Lets sequences of an engine have these adapters, if they can be computed beside each other."""
    engine.adapt(Adapters(engine.model, given))
    if problem := problem_of(partial(_adapted_difference, engine)):
        raise UnsupportedModelError(f"{type(unwrapped(engine.model)).__name__} cannot have these adapters: {problem}")


@on_every_rank
def _adapted_difference(engine: Engine) -> str | None:
    """What goes wrong in one pass with all adapters, beside passes with one each, or None."""
    model, names = engine.model, ["none", *engine.adapters.names]
    tokens = _sample_tokens(model, len(PARENTS))[0]
    contexts = [engine.open(adapter=number) for number in range(len(names))]
    with Loan(model):
        found = engine.run([Segment.of_text(context, tokens.tolist(), scored=True) for context in contexts])
        engine.wait()
    for number, (name, context, result) in enumerate(zip(names, contexts, found, strict=True)):
        context.close()
        numbers = torch.full(tokens.shape, number, device=engine.device)
        with pass_lock(model), evaluating(model), torch.no_grad(), engine.adapters.added(numbers):
            plain = _plain_pass(model, tokens.tolist()).logits[0]
        if problem := _difference(result.logits, plain, precision(model), f"a pass with the adapter {name}"):
            return problem
    return None


def verdict_file(model: Any, key: str) -> Path | None:
    """Of a model in a folder that we made of a file. What a check finds depends on its configuration and on this
    software, not on its weights."""
    folder = Path(str(getattr(unwrapped(model).config, "name_or_path", "") or "."))
    if not (folder / PACKED).is_file() or has_hooks(model):
        return None
    software = [torch.__version__, transformers.__version__, compiled_folder().name, processor()]
    return folder / f"checked-{digest([key, *software])}.json"


def kept_verdict(model: Any, key: str) -> dict[str, Any] | None:
    file = verdict_file(model, key)
    with suppress(OSError, ValueError):
        return json.loads(file.read_text()) if file is not None else None
    return None


def keep_verdict(model: Any, key: str, abilities: dict[str, Any]) -> None:
    if (file := verdict_file(model, key)) is not None:
        with suppress(OSError), replacing(file) as partial_file:  # only time is lost
            partial_file.write_text(json.dumps(abilities))


def asked_engine() -> str | None:
    """`DRAFTGRAPH_ENGINE`: `static` passes, of fixed shapes, on any device, or `eager` ones everywhere."""
    asked = os.environ.get("DRAFTGRAPH_ENGINE")
    if asked not in (None, "static", "eager"):
        raise UsageError(f"DRAFTGRAPH_ENGINE must be static or eager, not {asked!r}")
    return asked


def captured_on(model: Any, kind: str | None) -> bool:
    """Recorded, on a GPU, unless its parts are brought together by way of the host."""
    group = group_of(unwrapped(model))
    recordable = group is None or torch.distributed.get_backend(group) == "nccl"
    return kind == "static" or (bool(model.get_input_embeddings().weight.is_cuda) and recordable)


def _paged_problem(model: Any, kind: str | None, compiled: bool = True) -> str | None:
    """What keeps a model from paged passes, or None. `compiled`: on a CPU without its modules, where that can be."""
    if kind == "eager":
        return "plain passes were asked for"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "it lies on several devices"
    device, captured = model.get_input_embeddings().weight.device, captured_on(model, kind)
    if device.type == "cuda" and is_new(device):
        notice("compiling kernels for this GPU, once (up to a minute)")
    problem = problem_of(partial(tree_difference, model, PARENTS, partial(Crowd, captured, compiled), MORE))
    if device.type == "cuda":
        gc.collect()  # recorded passes and who recorded them hold each other
        torch.cuda.empty_cache()
    if problem is not None and captured:
        notice(f"{type(unwrapped(model)).__name__} runs without CUDA graphs, and slower: {problem}")
    return problem


def is_new(device: torch.device) -> bool:
    """Whether kernels have not been compiled for this kind of device before; noted, so that it is said once."""
    file = cache_dir() / "kernels" / digest([device_name(device), torch.__version__])
    if file.exists():
        return False
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return True


class Crowd:
    """For the check: a sequence whose pages do not lie in a row, and in every pass another one goes before it."""

    def __init__(self, captured: bool, compiled: bool, model: Any) -> None:
        self.engine = PagedEngine(model, CHECKED, captured, compiled)
        self.other, self.context = self.engine.open(), self.engine.open()
        for length in range(PAGE, MORE + 2 * PAGE, PAGE):
            self.other.reserve(length)
            self.context.reserve(length)

    def prefill(self, tokens: list[int]) -> None:
        self.context.prefill(tokens)
        self.other.prefill(tokens[::-1])

    def forward(self, tokens: Ints, depths: Ints, visible: Bools) -> Tensor:
        self.other.forget(0)
        others = Segment(self.other, tokens, np.arange(len(tokens)), np.tri(len(tokens), dtype=bool))
        return self.engine.run([others, Segment(self.context, tokens, depths, visible)])[1].logits


def refuse_on_followers(model: Any) -> None:
    """Rank 0 alone has engines that one can ask."""
    ranks = ranks_of(model)
    if ranks is not None and not ranks.leads:
        raise UsageError(
            f"this is rank {ranks.rank} of {ranks.size}: on other ranks than 0 only generate and stream of "
            "draftgraph.load's pair can be called, as on rank 0"
        )


def refuse_unrewindable(model: Any) -> None:
    """Refuses what cannot work by its nature, with its class and the reason."""
    inner = unwrapped(model)
    name = type(inner).__name__
    is_head = hasattr(inner, "reads")  # a draft that reads states of its target does not generate by itself
    if not hasattr(inner, "config") or not (is_head or hasattr(inner, "generate")):
        raise UnsupportedModelError(
            f"{name} is not a transformers model that can generate: load one with a language head"
        )
    if inner.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder: draftgraph decodes decoder-only models")
    peft = getattr(model, "active_peft_config", None)
    if getattr(peft, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts learned prompts before the text: merge or remove them"
        )
    config = inner.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or [])
    recurrent = {kind for kind in layers if any(word in kind for word in RECURRENT)}
    stateful = private.is_stateful(inner)
    odd = recurrent or (layers - ATTENTION if stateful else set())
    if odd or (stateful and not layers):
        state = "a recurrent state" if recurrent or not layers else "a state beside keys and values"
        named = f" ({', '.join(sorted(odd))} layers)" if odd else ""
        raise UnsupportedModelError(f"{name} keeps {state}{named} that cannot be rewound to an accepted path")


def _abilities(model: Any, kind: str | None) -> dict[str, Any]:
    """What an engine may do with the model: paged passes, trees, or only chains. None of it: refused. It lasts unless
    memory was short meanwhile: then the next check may find more."""
    name = type(unwrapped(model)).__name__
    if problem := problem_of(partial(_cached_difference, model)):
        raise UnsupportedModelError(f"{name} cannot be decoded token by token: {problem}")
    for compiled in (True, False):
        problem = _paged_problem(model, kind, compiled)
        lasting = not isinstance(problem, ShortOfMemory)
        if problem is None:
            return {"paged": True, "compiled": compiled, "lasting": True}
        if kind == "eager" or captured_on(model, kind):
            break
    plain = {"paged": False, "problem": problem}
    for offsets in (True, False):
        tree_problem = problem_of(partial(tree_difference, model, PARENTS, partial(plain_context, offsets=offsets)))
        if tree_problem is None:
            return plain | {"branching": True, "offsets": offsets, "lasting": lasting}
        lasting &= not isinstance(tree_problem, ShortOfMemory)
    if problem := problem_of(partial(tree_difference, model, np.arange(-1, 3), partial(plain_context, offsets=False))):
        raise UnsupportedModelError(f"{name} cannot be decoded with a rewindable cache: {problem}")
    if not lasting:
        notice(f"{name} is given chains only, and slower: {tree_problem}")
    return plain | {"branching": False, "offsets": False, "lasting": lasting}


def plain_context(model: Any, offsets: bool) -> EagerContext:
    return EagerEngine(model, offsets=offsets).open()


def bit_difference(model: Any, abilities: dict[str, Any]) -> str | None:
    """Where the logits of a path are other bits than those of passes over one node, or None: in wider passes, beside
    another sequence, and behind a text that was read in pieces."""
    if abilities["paged"]:  # captured passes compute as those of the same width that are not
        compiled = abilities["compiled"] and not captured_on(model, asked_engine())
        engine: Engine = PagedEngine(model, CHECKED, False, compiled)
    else:
        engine = EagerEngine(model, abilities["branching"], abilities["offsets"])
    tokens, text = _sample_tokens(model, WIDTHS[-1], MORE)
    with Loan(model), torch.no_grad():
        context, other, pieces = (engine.open() for _ in range(3))
        for one, read, chunk in ((context, text, None), (other, text[::-1], None), (pieces, text, PIECE)):
            one.begin(len(read), False)
            one.prefill(read, chunk)
        plain = []
        for token in tokens[:PATH].tolist():
            plain.append(engine.run([Segment.of_text(context, [token], scored=True)])[0].logits.clone())
            context.commit([0], [token])
        context.rewind(len(text))
        expected = torch.cat(plain)
        for width in WIDTHS:
            chain = np.arange(-1, width - 1)
            parents = np.where(chain < PATH - 1, chain, 0) if engine.branching else chain
            depths, visible = _ancestry(parents)
            for behind in (context, pieces):
                crowd = [Segment.of_text(other, tokens[:width].tolist(), scored=True)]  # before it in the pass
                segment = Segment(behind, tokens[:width], depths, visible)
                logits = engine.run([*crowd, segment])[1].logits[:PATH]
                if not agreed(torch.equal(logits, expected[: len(logits)])):
                    found = f"logits in a pass over {width} nodes have other bits than in a pass over one"
                    return f"{found}{because_of_sums(model)}"
                other.forget(0)
                behind.forget(0)
    return None


def because_of_sums(model: Any) -> str:
    """Whether sums over ranks are to blame, as far as they are the library's own."""
    if (group := group_of(unwrapped(model))) is None or not leaves_sums_to_library(unwrapped(model)):
        return ""
    backend, ranks = torch.distributed.get_backend(group), torch.distributed.get_world_size(group)
    changes = agreed(sums_change(group, model.get_input_embeddings().weight.device, model.dtype))
    return f": the all-reduce of {backend} adds {ranks} ranks up in an order that changes with its size" * changes


def problem_of(check: Callable[[], str | None]) -> str | None:
    """What a check says, or in one line why it could not be made. A rank that is short of memory leaves the others in
    the middle of it, so none can go on."""
    try:
        found = check()
    except RankError:
        raise
    except Exception as error:
        causes = (error, error.__cause__, error.__context__)  # an engine says in its own words what it lacks
        short = next((one for one in causes if isinstance(one, torch.OutOfMemoryError)), None)
        if short is not None and together():
            raise short from None
        kind = str if short is None else ShortOfMemory
        found = kind(f"{type(error).__name__}: {one_line(error)}")
    return type(found)(agreed(found)) if isinstance(found, ShortOfMemory) else agreed(found)


class ShortOfMemory(str):
    """A problem that is not the model's, and may be gone when it is checked again."""


class Scorer(Protocol):
    """What a check needs of an engine."""

    def prefill(self, tokens: list[int]) -> None: ...

    def forward(self, tokens: Ints, depths: Ints, visible: Bools) -> Tensor: ...


def tree_difference(model: Any, parents: Any, engine_of: Callable[[Any], Scorer], more: int = 0) -> str | None:
    """What goes wrong with a tree of these parents behind a short text, or one of so many tokens more, or None. In half
    precision a text may be on edge: what goes wrong does so with any."""
    problem = None
    for attempt in range(1 if precise(precision(model)) else ATTEMPTS):
        if (problem := _tree_difference(model, parents, engine_of, more, attempt)) is None:
            break
    return problem


def _tree_difference(
    model: Any, parents: Any, engine_of: Callable[[Any], Scorer], more: int, attempt: int
) -> str | None:
    tokens, text = _sample_tokens(model, len(parents), more, attempt)
    with Loan(model):
        engine = engine_of(model)
        engine.prefill(text)
        depths, visible = _ancestry(parents)
        first = len(parents) // 2  # two passes, so that scratch nodes of an earlier one are seen as well
        scored = [
            engine.forward(tokens[:first], depths[:first], visible[:first, :first]).clone(),
            engine.forward(tokens[first:], depths[first:], visible[first:]),
        ]
    plain = _plain_logits(model, text, tokens, visible)
    noise, dtype = 0.0, precision(model)
    if not precise(dtype):
        noise = off_by(_plain_logits(model, text, tokens, visible, cached=True), plain, dtype)
    return _difference(torch.cat(scored), plain, dtype, "a token tree", noise)


def _cached_difference(model: Any) -> str | None:
    """What goes wrong with the model's own cache, fed as `generate` does it, or None."""
    tokens, text = _sample_tokens(model, 3)
    chain = np.tri(len(tokens), dtype=bool)
    with evaluating(model), torch.no_grad():
        cache = _plain_pass(model, text, use_cache=True).get("past_key_values")
        if cache is None:
            return "it keeps no keys and values (use_cache=True returns no past_key_values)"
        steps = []
        for start, token in enumerate(tokens.tolist(), start=len(text)):
            steps.append(_plain_pass(model, [token], start, use_cache=True, past_key_values=cache).logits[0, -1])
    return _difference(
        torch.stack(steps), _plain_logits(model, text, tokens, chain), precision(model), "its own cached passes"
    )


def _difference(scored: Tensor, plain: Tensor, dtype: torch.dtype, what: str, noise: float = 0.0) -> str | None:
    if not torch.isfinite(plain).all():
        return agreed("its logits are not finite")
    if scored.shape != plain.shape:
        return f"{len(plain)} tokens give {len(scored)} rows of logits"
    off, tolerance = off_by(scored, plain, dtype), max(TOLERANCE.get(dtype, 1e-1), NOISE * noise)
    return agreed(None if off <= tolerance else f"logits of {what} are {off:.1e} off those of plain passes")


def precision(model: Any) -> torch.dtype:
    """In which numbers its products are rounded: rows are in 8 bits where weights are packed, about as bfloat16 is."""
    return torch.bfloat16 if is_packed(model) else model.dtype


def precise(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


def off_by(scored: Tensor, plain: Tensor, dtype: torch.dtype) -> float:
    """How far the worst node's logits are off, as a part of how much they vary. In half precision the second worst: one
    may be on edge, where rounding changes everything; a wrong mask or position changes several."""
    worst = 1 if precise(dtype) or len(plain) < 3 else 2
    scored, plain = (rows.double() - rows.double().mean(dim=-1, keepdim=True) for rows in (scored, plain))
    off = (scored - plain).norm(dim=-1) / plain.norm(dim=-1).clamp_min(1e-6)
    return float(off.sort().values[-worst])


def _plain_logits(model: Any, text: list[int], tokens: Any, visible: Any, cached: bool = False) -> Tensor:
    """Of every node, from plain passes over the paths to the leaves; `cached`: of the text and then of the path."""
    rows: dict[int, Tensor] = {}
    leaves = [node for node in range(len(tokens)) if visible[:, node].sum() == 1]
    with evaluating(model), torch.no_grad():
        for leaf in leaves:
            path = np.flatnonzero(visible[leaf])
            past = _plain_pass(model, text, use_cache=True).past_key_values if cached else None
            read, unread = (len(text), []) if cached else (0, text)
            passed = _plain_pass(model, [*unread, *tokens[path].tolist()], read, use_cache=cached, past_key_values=past)
            logits = passed.logits[0, -len(path) :]
            rows.update(zip(path.tolist(), logits, strict=True))
    return torch.stack([rows[node] for node in range(len(tokens))])


def _plain_pass(model: Any, tokens: list[int], start: int = 0, **arguments: Any) -> Any:
    """With the positions that `generate` would give: some models have a default of their own."""
    device = model.get_input_embeddings().weight.device
    if "position_ids" in inspect.signature(unwrapped(model).forward).parameters:
        arguments["position_ids"] = torch.arange(start, start + len(tokens), device=device)[None]
    with still_torch(is_packed(model)):
        return model(input_ids=torch.tensor([tokens], device=device), return_dict=True, **arguments)


@on_every_rank
def plain_logits(model: Any, ids: Tensor) -> Tensor:
    """What one plain pass says of a text. # [1, tokens] -> [tokens, vocabulary]"""
    with Loan(model), still_torch(is_packed(model)):
        return model(input_ids=ids.to(model.device), use_cache=False).logits[0]  # type: ignore[no-any-return]


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Windows too long for the check's text are short for a while; models read them from their configuration, so passes
    of other threads wait."""
    with pass_lock(model):
        text_config = unwrapped(model).config.get_text_config(decoder=True)
        long = {key for key, value in _windows(text_config).items() if value > LONGEST_WINDOW}
        changes = [
            (config, key, getattr(config, key))
            for config in {id(config): config for config in (text_config, *configs_of(model))}.values()
            for key in long
            if getattr(config, key, None) is not None
        ]
        try:
            for config, key, _ in changes:
                setattr(config, key, SHORT_WINDOW)
            yield
        finally:
            for config, key, value in changes:
                setattr(config, key, value)


def _windows(config: Any) -> dict[str, int]:
    values = config.to_dict().items()
    return {key: value for key, value in values if isinstance(value, int) and ("window" in key or "chunk" in key)}


def _sample_tokens(model: Any, nodes: int, more: int = 0, attempt: int = 0) -> tuple[Any, list[int]]:
    """Distinct-looking tokens for the tree and its text; the text outgrows any small window of the model."""
    config = unwrapped(model).config.get_text_config(decoder=True)
    rows = model.get_input_embeddings().weight.shape[0]
    length = (
        max((window for window in _windows(config).values() if window <= LONGEST_WINDOW), default=0)
        + TEXT_LENGTH
        + more
    )
    room = getattr(config, "max_position_embeddings", None)
    if isinstance(room, int):
        length = max(1, min(length, room - nodes - 1))
    picks = np.random.default_rng(attempt).integers(0, rows, length + nodes)
    return picks[length:], picks[:length].tolist()


def _ancestry(parents: Any) -> tuple[Any, Any]:
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    return visible.sum(axis=1) - 1, visible
