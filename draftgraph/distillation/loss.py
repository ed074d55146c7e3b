"""How far a student is from its target at every position, with hand-written gradients: no second copy of the logits.

With p the target's distribution over the student's vocabulary and q the student's:
kl       sum p log p/q       the usual distillation: be likely
reverse  sum q log q/p       be where the target is
tv       1 - sum min(p, q)   the share that rejection sampling would refuse: be accepted
top      -log q(argmax p)    greedy decoding accepts the target's best token only
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, target: Tensor, terms: dict[str, float]) -> Any:
        gradient = torch.empty_like(student)
        losses, agrees = [], []
        pieces = (tensor.split(ROWS_AT_ONCE) for tensor in (student, target, gradient))
        for ours, theirs, into in zip(*pieces, strict=True):
            log_q, log_p = (torch.log_softmax(logits.float(), dim=-1) for logits in (ours, theirs))
            loss, slope = distance_and_slope(log_q, log_p, terms)
            into.copy_(slope)
            losses.append(loss.sum())
            agrees.append(log_q.argmax(dim=-1) == log_p.argmax(dim=-1))
        ctx.save_for_backward(gradient)
        agree = torch.cat(agrees)
        ctx.mark_non_differentiable(agree)
        return torch.stack(losses).sum(), agree

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, _: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(of_loss), None, None


def distance_and_slope(log_q: Tensor, log_p: Tensor, terms: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The distance of each row and its gradient in the student's logits."""
    q, p = log_q.exp(), log_p.exp()
    loss, slope = torch.zeros_like(log_q[:, 0]), torch.zeros_like(q)
    for name, weight in terms.items():
        if name == "kl":
            loss += weight * (p * (log_p - log_q)).sum(dim=-1)
            slope += weight * (q - p)
        elif name == "reverse":
            gap = log_q - log_p
            divergence = (q * gap).sum(dim=-1, keepdim=True)
            loss += weight * divergence[:, 0]
            slope += weight * q * (gap - divergence)
        elif name == "tv":
            short = q * (q < p)
            loss += weight * (1 - torch.minimum(p, q).sum(dim=-1))
            slope += weight * (q * short.sum(dim=-1, keepdim=True) - short)
        elif name == "top":
            best = log_p.argmax(dim=-1, keepdim=True)
            loss -= weight * log_q.gather(1, best)[:, 0]
            slope += weight * q.scatter_add(1, best, -torch.ones_like(best, dtype=q.dtype))
    return loss, slope


def distillation_loss(student: Tensor, target: Tensor, terms: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The sum over positions of logits [n, vocabulary], and where both have the same best token [n]."""
    loss, agree = _Distance.apply(student, target, terms)  # type: ignore[no-untyped-call]
    return loss, agree
