"""Losses that keep experts balanced and logits small, and the bias update that needs no loss."""

import torch
from torch import Tensor

from . import _arguments as check
from . import _core, ops
from .routing import ROUTER_SCORES

__all__ = ["load_balance_loss", "update_expert_bias", "z_loss"]

NORMALISATIONS = ("huggingface", "megatron")


def load_balance_loss(
    logits: Tensor,
    ids: Tensor,
    *,
    normalisation: str = "huggingface",
    scores: str = "softmax",
    token_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """c * sum_e f_e P_e over the valid tokens; f_e = slots that chose e / tokens, P_e = mean probability of e. A
    scalar.

    normalisation "huggingface": c = E, K at perfect balance; "megatron": c = E/K, 1 at perfect balance. Valid tokens
    are neither masked (False in token_mask (T)) nor NaN; capacity and padding have no say. scores: a sigmoid family's
    probability is the sigmoid over its sum. logits (T, E), ids (T, K). Differentiable in logits; f_e is a constant.
    (Switch Transformer, section 2.2)
    """
    name = "load_balance_loss"
    check.tensor(name, "logits", logits, "(T, E)")
    check.tensor(name, "ids", ids, "(T, K)")
    check.activations(name, "logits", logits)
    check.choice(name, "normalisation", normalisation, NORMALISATIONS)
    check.choice(name, "scores", scores, ROUTER_SCORES)
    ids, token_mask = check.contiguous(ids, token_mask)
    loss, _, _ = ops.load_balance_loss(logits, ids, token_mask, scores, normalisation, backend or "automatic")
    return loss.squeeze(0)


def z_loss(logits: Tensor, *, token_mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Mean over the valid tokens of logsumexp(logits)^2: (T, E) -> a scalar. Differentiable in logits. (ST-MoE,
    section 3.2)
    """
    check.tensor("z_loss", "logits", logits, "(T, E)")
    check.activations("z_loss", "logits", logits)
    (token_mask,) = check.contiguous(token_mask)
    loss, _ = ops.z_loss(logits, token_mask, backend or "automatic")
    return loss.squeeze(0)


@torch.no_grad()
def update_expert_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3, *, backend: str | None = None) -> None:
    """bias[e] += rate * sign(mean(counts) - counts[e]), in place: bias (E) float32, counts (E). (DeepSeek-V3, section
    2.1.2)

    counts are the slots that chose each expert since the last update (over all ranks, summed by the caller).
    """
    check.tensor("update_expert_bias", "bias", bias, "(E)")
    check.tensor("update_expert_bias", "counts", counts, "(E)")
    _core.run(
        "update_expert_bias", counts=counts.contiguous(), rate=float(rate), bias=bias, backend=backend or "automatic"
    )
    torch.autograd.graph.increment_version(bias)
