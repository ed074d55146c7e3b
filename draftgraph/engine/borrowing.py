"""What a pass changes in the user's modules, and how it is put back.

- `Loan`: no gradients, evaluation mode, an attention that takes masks.
- `Linears`: batch-invariant linear layers on a GPU.
- `Fusions`: norms, rotary embeddings and gated MLPs with one kernel each, wherever that was proved to be the same.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from threading import Lock, RLock
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.engine.sharding import embedding_parts, linear_parts, local_part
from draftgraph.kernels import fused, linear
from draftgraph.kernels.fused import ACTIVATIONS, NORM_STYLES, NormStyle
from draftgraph.kernels.triton_or_stub import compiles_for

MASKABLE = ("sdpa", "eager")  # attention implementations that take any mask
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILONS = ("variance_epsilon", "eps")
PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of a module that read the same states
ROTARY = "apply_rotary_pos_emb"
SCALES = (1e-3, 1e-2, 1.0, 30.0)  # of rows; under the smallest an epsilon counts

Way = TypeVar("Way")


def unwrapped(model: Any) -> Any:
    """The `transformers` module inside an adapter's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters(model: Any) -> list[tuple[tuple[str, ...], bool]]:
    """Which adapters take part in a pass, and whether they are switched off: a PEFT layer knows both."""
    layers = (module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool))
    return sorted({(tuple(layer.active_adapters), layer.disable_adapters) for layer in layers})


def fingerprint(model: Any) -> list[Any]:
    """Where its weights lie: a recorded pass reads them there. And whether modules are hooked: a compiled pass would
    not call them."""
    return [adapters(model), has_hooks(model), *(local_part(weight).data_ptr() for weight in model.parameters())]


def has_hooks(model: Any) -> bool:
    return any(map(private.is_hooked, model.modules()))


class Borrowed:
    """What all users of one model share, whatever their thread: a lock, and what loans have changed in it.

    Whoever changes the model's modules or configurations for a pass holds the lock until they are put back. Loans of
    several users may overlap: the first changes the model, the last puts it back.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._loans = 0
        self._before: list[tuple[Change, Any]] = []  # what was changed, and what it was

    def changes_of(self, find: Callable[[], list[Change]]) -> list[Change]:
        """Those that are found in the model as it is when nobody borrows it."""
        with self.lock:
            return [*(change for change, _ in self._before), *find()]

    def lend(self, changes: list[Change]) -> None:
        with self.lock:
            self._loans += 1
            for change in changes:
                if (before := change.get()) != change.value:
                    self._before.append((change, before))
                    change.set(change.value)

    def take_back(self) -> None:
        with self.lock:
            self._loans -= 1
            if not self._loans:
                for change, before in self._before:
                    change.set(before)
                self._before.clear()


class Change(NamedTuple):
    """Of a module's training mode, or of a configuration's attention."""

    holder: Any
    value: Any  # meanwhile

    def get(self) -> Any:
        return self.holder.training if isinstance(self.holder, nn.Module) else private.attention_of(self.holder)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, nn.Module):
            self.holder.training = value
        else:
            private.set_implementation(self.holder, "_attn_implementation", value)


_borrowed: WeakKeyDictionary[Any, Borrowed] = WeakKeyDictionary()
_guard = Lock()  # of the table above and of modeling files; whoever holds it waits for nothing


def borrowed_of(model: Any) -> Borrowed:
    with _guard:
        return _borrowed.setdefault(unwrapped(model), Borrowed())


def pass_lock(model: Any) -> RLock:
    """Held by a pass of this model: its modules and configurations are then those of one thread."""
    return borrowed_of(model).lock


class Loan:
    """While entered: no gradients, evaluation mode, attention that takes masks. May be entered again and again."""

    def __init__(self, *models: Any) -> None:
        found = ((borrowed_of(model), partial(changes_for_graphs, model)) for model in models)
        self._changes = [(borrowed, borrowed.changes_of(find)) for borrowed, find in found]
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()
        for borrowed, changes in self._changes:
            borrowed.lend(changes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for borrowed, _ in self._changes:
            borrowed.take_back()
        self._no_grad.__exit__(kind, error, trace)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, and the training flags of every module as they were after it."""
    borrowed = borrowed_of(model)
    borrowed.lend(borrowed.changes_of(partial(changes_to_evaluate, model)))
    try:
        yield
    finally:
        borrowed.take_back()


def changes_to_evaluate(model: Any) -> list[Change]:
    return [Change(module, False) for module in model.modules() if module.training]


def changes_for_graphs(model: Any) -> list[Change]:
    """The same, and another attention where a configuration's cannot take a graph's mask."""
    replacement = "sdpa" if private.supports_sdpa(unwrapped(model)) else "eager"
    implementations = ((config, private.attention_of(config)) for config in configs_of(model))
    switched = [config for config, name in implementations if name is not None and name not in MASKABLE]
    return [*changes_to_evaluate(model), *(Change(config, replacement) for config in switched)]


def configs_of(model: Any) -> list[Any]:
    """The configurations of all modules."""
    return list({id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values())


@contextmanager
def borrowed_attention(model: Any, configs: list[Any], names: dict[str, str]) -> Iterator[None]:
    """For one pass of a model: implementations by the names that its configurations have for them, such as
    `_attn_implementation`, in place of those that the user chose."""
    with pass_lock(model):
        before = [(config, name, getattr(config, name, None)) for config in configs for name in names]
        try:
            for config, name, _ in before:
                private.set_implementation(config, name, names[name])
            yield
        finally:
            for config, name, value in before:
                private.set_implementation(config, name, value)


Forwards = list[tuple[dict[str, Any], Callable[..., Tensor]]]  # attributes of modules, and what they compute in a pass


@contextmanager
def other_forwards(lock: RLock, forwards: Forwards) -> Iterator[None]:
    with lock:
        before = [attributes.get("forward") for attributes, _ in forwards]  # of a layer that is split over ranks
        for attributes, forward in forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for (attributes, _), own in zip(forwards, before, strict=True):
                if own is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = own


class Linears:
    """The linear layers of a model while `borrowed`: batch invariant on a GPU in half precision, with one launch for
    layers of a module that read the same states. Of layers that are split over ranks it is the part that lies here.
    `parts_only`: other layers are left as they are."""

    def __init__(self, model: nn.Module, parts_only: bool = False) -> None:
        self._lock = pass_lock(model)
        with self._lock:
            parts, embeddings = linear_parts(unwrapped(model)), embedding_parts(unwrapped(model))
            groups = [] if parts_only else groups_of(model)
            like = local_part(next(model.parameters()))
            invariant = not parts_only and like.dtype in linear.DTYPES and compiles_for(like.device)
            self.counters = linear.new_counters(like.device) if invariant else None  # used by `rows_apart` too
        self._forwards: Forwards = [(vars(one.module), one.compute) for one in embeddings]
        for one in parts:
            own = not parts_only and is_invariant(one.part)
            product = partial(LinearGroup([one.part], self.counters), one.part) if own else one.plain
            self._forwards.append((vars(one.module), partial(one.compute, product)))
        for modules in groups:
            group = LinearGroup(modules, self.counters)
            self._forwards += [(vars(module), partial(group, module)) for module in modules]

    def borrowed(self) -> AbstractContextManager[None]:
        """For one pass."""
        return other_forwards(self._lock, self._forwards)


class LinearGroup:
    """Linear layers that read the same states: the first that is called computes all of them."""

    def __init__(self, modules: list[nn.Linear], counters: Tensor | None) -> None:
        self._modules, self._counters = modules, counters
        self._given: Tensor | None = None
        self._found: dict[nn.Linear, Tensor] = {}

    def __call__(self, module: nn.Linear, given: Tensor) -> Tensor:
        if given is not self._given or module not in self._found:
            rows = given.reshape(-1, given.shape[-1])
            weights, biases = [one.weight for one in self._modules], [one.bias for one in self._modules]
            found = linear.linears(rows, weights, biases, self._counters)
            self._given, self._found = given, dict(zip(self._modules, found, strict=True))
        own = self._found.pop(module)
        if not self._found:
            self._given = None
        return own.reshape(*given.shape[:-1], own.shape[-1])

    def computes(self, modules: list[nn.Module]) -> bool:
        return len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))

    def gated(self, given: Tensor, activation: str) -> Tensor:
        """What these layers, a gated MLP's first ones, give to its last."""
        weights, biases = ([getattr(one, name) for one in self._modules] for name in ("weight", "bias"))
        if len(weights) == 1:  # both in one
            weights = [*weights[0].chunk(2)]
            biases = [None, None] if biases[0] is None else [*biases[0].chunk(2)]
        rows = given.reshape(-1, given.shape[-1])
        (found,) = linear.linears(rows, weights, biases, self._counters, activation=activation)
        return found.reshape(*given.shape[:-1], found.shape[-1])


def groups_of(model: nn.Module) -> list[list[nn.Linear]]:
    """The layers that are batch invariant; those that are named as siblings are one group."""
    groups: list[list[nn.Linear]] = []
    for module in model.modules():
        own: dict[str, Any] = {name: child for name, child in module.named_children() if is_invariant(child)}
        for names in SIBLINGS:
            together = [own[name] for name in names if name in own]
            if len({(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in together}) == 1:
                groups.append([own.pop(name) for name in names if name in own])
        groups += [[one] for one in own.values()]
    return list({id(group[0]): group for group in groups}.values())


def is_invariant(module: Any) -> bool:
    """A plain layer with weights of 16 bits on a GPU that our kernels are made for."""
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    return module.weight.dtype in linear.DTYPES and compiles_for(module.weight.device)


class Proofs:
    """What was found out about modules by trying them: it holds for all modules of a class that have the same settings,
    weights and parts."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, proof: Callable[..., Any], module: nn.Module, *more: Tensor) -> Any:
        settings = [(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]
        weights = [(name, weight.shape, weight.dtype) for name, weight in module.named_parameters(recurse=False)]
        parts = [(name, type(part), is_untouched(part)) for name, part in module.named_children()]
        key = (proof, type(module), *settings, *weights, *parts)
        if key not in self._known:
            self._known[key] = proof(module, *more)
        return self._known[key]


class Fusions:
    """What one kernel can do for a model, and does while `borrowed`: passes over few tokens mostly start kernels."""

    def __init__(self, model: nn.Module, kinds: tuple[str, ...] = ("cuda",)) -> None:
        self._lock = pass_lock(model)
        self._forwards: Forwards = []
        self._rotary: list[RotaryNamespace] = []
        self._proofs = Proofs()
        like = local_part(next(model.parameters()))
        needless = like.is_cuda and not compiles_for(like.device)
        if like.device.type in kinds and like.dtype in FUSED_DTYPES and not needless:
            with self._lock:
                self._find(model, like)

    @torch.no_grad()
    def _find(self, model: nn.Module, like: Tensor) -> None:
        for module in filter(is_untouched, model.modules()):
            forward: Callable[..., Tensor] | None = None
            if (style := self._proofs.of(norm_style, module)) is not None:
                forward = partial(normed, module, module.forward, style)
            elif (activation := self._proofs.of(gate_activation, module, like)) is not None:
                forward = partial(gated, module, activation)
            if forward is not None:
                self._forwards.append((vars(module), forward))
        found = [RotaryNamespace.of(names) for names in rotary_namespaces(model)]
        self._rotary = [names for names in found if is_plain_rotary(names.own, like)]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """For one pass."""
        with other_forwards(self._lock, self._forwards), ExitStack() as files:
            for names in self._rotary:
                files.enter_context(names.borrowed())
            yield


class RotaryNamespace:
    """A modeling file with a rotary function. Models of one family share it, and their passes may overlap: it has its
    own function back when the last of them is over."""

    _known: ClassVar[dict[int, RotaryNamespace]] = {}

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._users = names, 0

    @classmethod
    def of(cls, names: dict[str, Any]) -> RotaryNamespace:
        with _guard:
            return cls._known.setdefault(id(names), cls(names))

    @property
    def own(self) -> Callable[..., Any]:
        function = self._names[ROTARY]
        return getattr(function, "replaces", function)  # type: ignore[no-any-return]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        with _guard:
            self._users += 1
            self._names[ROTARY] = rotary(self.own)
        try:
            yield
        finally:
            with _guard:
                self._users -= 1
                if not self._users:
                    self._names[ROTARY] = self.own


def normed(module: Any, own: Callable[[Tensor], Tensor], style: NormStyle, *given: Tensor, **named: Tensor) -> Tensor:
    (states,) = *given, *named.values()
    eps = epsilon(module)
    if eps is None or states.dtype != module.weight.dtype or states.dim() > 4:
        return own(states)
    return fused.rms_norm(states, module.weight, eps, style)


def gated(module: Any, activation: str, *given: Tensor, **named: Tensor) -> Tensor:
    (states,) = *given, *named.values()
    first = [child for name in ("gate_proj", "up_proj", "gate_up_proj") if (child := getattr(module, name, None))]
    if (group := borrowed_group(first)) is not None:
        return module.down_proj(group.gated(states, activation))  # type: ignore[no-any-return]
    if hasattr(module, "gate_up_proj"):
        gate, up = module.gate_up_proj(states).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(states), module.up_proj(states)
    return module.down_proj(fused.gated(gate, up, activation))  # type: ignore[no-any-return]


def borrowed_group(modules: list[nn.Module]) -> LinearGroup | None:
    """The group that computes these layers in the pass that is under way, if they are all of it."""
    forwards = [vars(module).get("forward") for module in modules]
    found = {id(one.func): one.func for one in forwards if isinstance(one, partial)}
    if len(found) != 1 or None in forwards or any(map(private.is_hooked, modules)):
        return None
    (group,) = found.values()
    return group if isinstance(group, LinearGroup) and group.computes(modules) else None


@cache
def rotary(own: Callable[..., Any]) -> Callable[..., Any]:
    """In a modeling file others may call it too, with whatever its own takes."""

    def apply_rotary_pos_emb(*given: Any, **named: Any) -> Any:
        if named or len(given) != 4 or torch.is_grad_enabled() or not turns_whole_heads(*given):
            return own(*given, **named)
        return fused.rotate(*given)

    apply_rotary_pos_emb.replaces = own  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def turns_whole_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    given = (query, key, cos, sin)
    alike, dims = {(part.shape[-1], part.shape[-2], part.dtype) for part in given}, [part.dim() for part in given]
    return len(alike) == 1 and dims == [4, 4, 3, 3] and query.dtype in FUSED_DTYPES and query.shape[-1] % 2 == 0


def is_untouched(module: nn.Module) -> bool:
    """Whether it does what its class says, with one tensor."""
    forward = plain_forward(module)
    takes_one = forward is not None and len(inspect.signature(forward).parameters) == len(("self", "states"))
    return takes_one and not private.is_hooked(module) and "forward" not in vars(module)


def plain_forward(module: nn.Module) -> Any:
    forward = inspect.unwrap(type(module).forward)
    return forward if inspect.isfunction(forward) else None


def epsilon(module: nn.Module) -> float | None:
    return next((vars(module)[name] for name in EPSILONS if isinstance(vars(module).get(name), float)), None)


def norm_style(module: nn.Module) -> NormStyle | None:
    """What kind of RMSNorm this is, if it is one."""
    weight, eps = getattr(module, "weight", None), epsilon(module)
    if "RMSNorm" not in type(module).__name__ or type(weight) is not nn.Parameter or weight.dim() != 1 or eps is None:
        return None
    states = numbers(weight, len(SCALES), *weight.shape) * torch.tensor(SCALES).to(weight)[:, None]
    other = numbers(weight, *weight.shape, seed=1)  # a new module's weights are alike, and hide what is done with them

    def own() -> Tensor:
        trial: Any = deepcopy(module)
        trial.weight.copy_(other)
        return trial.forward(states)  # type: ignore[no-any-return]

    return nearest(own, NORM_STYLES, lambda style: fused.rms_norm(states, other, eps, style))


def gate_activation(module: nn.Module, like: Tensor) -> str | None:
    """The activation of a gated MLP, if this is one. Its linear layers may be of any kind: they are called as ever."""
    children = dict(module.named_children())
    names = next((names for names in PROJECTIONS if names <= children.keys()), set())
    others = [child for name, child in children.items() if name not in names]
    if not names or len(others) != 1 or not is_untouched(others[0]) or list(others[0].parameters()):
        return None
    gate, up = 4 * numbers(like, 4, 512), numbers(like, 4, 512, seed=1)
    said = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up], dim=-1), "down_proj": None}

    def own() -> Tensor:
        trial = deepcopy(module, {id(children[name]): StandIn(said[name]) for name in names})
        return trial.forward(gate)  # type: ignore[no-any-return]

    return nearest(own, tuple(ACTIVATIONS), lambda activation: fused.gated(gate, up, activation))


class StandIn(nn.Module):
    """Says always the same, or what it hears."""

    def __init__(self, said: Tensor | None) -> None:
        super().__init__()
        self.said = said

    def forward(self, heard: Tensor) -> Tensor:
        return heard if self.said is None else self.said


def rotary_namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Of the modeling files whose `apply_rotary_pos_emb` a pass calls."""
    codes = [(forward.__globals__, forward.__code__) for forward in map(plain_forward, model.modules()) if forward]
    return list({id(names): names for names, code in codes if ROTARY in code.co_names and ROTARY in names}.values())


def is_plain_rotary(own: Callable[..., Any], like: Tensor) -> bool:
    """Whether it turns halves of whole heads."""
    query, key = (numbers(like, 1, 5, heads, 16).transpose(1, 2) for heads in (3, 2))
    cos, sin = numbers(like, 1, 5, 16, seed=1), numbers(like, 1, 5, 16, seed=2)

    def turned(rotate: Callable[..., Any]) -> Tensor:
        return torch.cat(rotate(query, key, cos, sin), dim=1)

    return nearest(lambda: turned(own), (fused.rotate,), turned) is not None


def nearest(own: Callable[[], Tensor], ways: tuple[Way, ...], compute: Callable[[Way], Tensor]) -> Way | None:
    """The way that gives the model's own numbers, but for rounding."""
    try:
        expected = own()
        found = [compute(way) for way in ways]
    except Exception:  # it wants something else, so it is something else
        return None
    if not isinstance(expected, Tensor) or expected.dtype != found[0].dtype or expected.shape != found[0].shape:
        return None
    exact = expected.double()
    rounding = 2 * torch.finfo(expected.dtype).eps * exact.abs()
    rounding += 4 * torch.finfo(torch.float32).eps * exact.abs().amax(-1, keepdim=True)  # where large numbers cancel
    errors = [(one.double() - exact).abs() for one in found]
    best = min(range(len(ways)), key=lambda place: float(errors[place].sum()))
    return ways[best] if bool((errors[best] <= rounding).all()) else None


def numbers(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Random ones that leave the user's random state alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)
