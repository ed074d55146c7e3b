"""One output matrix for target and student, and only for positions that count: logits are most of a step's memory."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from torch.nn.functional import linear


class SharedHead:
    """While entered, both models score the student's vocabulary, and only at the selected positions."""

    def __init__(self, target: Any, student: Any) -> None:
        self.target, self.student = target, student
        self.states: Tensor | None = None  # [positions, width] what the head was given last
        self._places: Tensor | None = None

    def __enter__(self) -> SharedHead:
        self._head, self._original = self.student.get_output_embeddings(), self.target.get_output_embeddings()
        self._hook = self._head.register_forward_pre_hook(self._narrow)
        self.target.set_output_embeddings(self._head)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self.target.set_output_embeddings(self._original)
        self.states = None

    def logits(self, model: Any, tokens: Tensor, places: Tensor) -> Tensor:
        """[positions, vocabulary] of one of the two, at places of the flattened batch."""
        self._places = places
        try:
            return model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]  # type: ignore[no-any-return]
        finally:
            self._places = None

    def of_states(self, states: Tensor) -> Tensor:
        """Logits straight from what the head is given: right for models that do nothing behind their head."""
        return linear(states, self._head.weight, self._head.bias)

    def _narrow(self, _: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._places is None:
            return None
        hidden = arguments[0]
        self.states = hidden.reshape(-1, hidden.shape[-1])[self._places]
        return (self.states[None],)
