"""The specification in eager torch: the same functions, dense over experts, in any dtype, differentiated by autograd.

Written to be read. Every product runs over all tokens and the routing is a mask, so nothing here can go wrong in an
index; it costs E/K times too much. It never touches the core. T tokens, H hidden, I width, E experts, K experts per
token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "activate",
    "expert_weights",
    "load_balance_loss",
    "moe_mlp",
    "round_tokens",
    "rounded_counts",
    "route",
    "router_logits",
    "split_gate",
    "update_expert_bias",
    "z_loss",
]  # fmt: skip


# ---- activations


def activate(z: Tensor, activation: str) -> Tensor:
    """a = act(z). Gated: z = [gate, up] halves of the last axis."""
    plain = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda v: torch.relu(v) ** 2,
    }
    if activation in plain:
        return plain[activation](z)
    gate, up = z.chunk(2, dim=-1)
    if activation == "clamped_swiglu":  # gpt-oss
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gates = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
    return plain[gates[activation]](gate) * up


# ---- weight layouts


def split_gate(w: Tensor, layout: str | tuple[str, int]) -> Tensor:
    """Rows of w_up (E, 2I, H) or entries of b_up (E, 2I), declared in `layout`, as [gate, up] halves."""
    if layout == "concatenated":
        return w
    block = 1 if layout == "interleaved" else layout[1]
    blocks = w.unflatten(1, (-1, 2, block))  # (E, I/block, 2, block, ...)
    return torch.cat([blocks[:, :, 0].flatten(1, 2), blocks[:, :, 1].flatten(1, 2)], dim=1)


def expert_weights(w_up, w_down, b_up, activation: str, layout, transposed: bool):
    """w_up (E, G*I, H) with [gate; up] rows, w_down (E, H, I), b_up in w_up's order, from any declared layout."""
    if isinstance(w_up, tuple):
        w_up = torch.cat(w_up, dim=2 if transposed else 1)
    if transposed:
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    if activation not in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        w_up, b_up = split_gate(w_up, layout), None if b_up is None else split_gate(b_up, layout)
    return w_up, w_down, b_up


# ---- the layer


def moe_mlp(
    x,
    ids,
    scores,
    w_up,
    w_down,
    *,
    b_up=None,
    b_down=None,
    activation="swiglu",
    layout="concatenated",
    transposed=False,
    score_on="output",
    addend=None,
    token_mask=None,
):
    """y = addend + sum_k scores[:, k] * expert_{ids[:, k]}(x); `intarsia.moe_mlp` documents the arguments."""
    w_up, w_down, b_up = expert_weights(w_up, w_down, b_up, activation, layout, transposed)
    y = torch.zeros_like(x) if addend is None else addend
    for e in range(w_up.shape[0]):
        for k in range(ids.shape[1]):  # slot by slot: an expert chosen twice by one token counts twice
            chosen = ids[:, k] == e
            if token_mask is not None:
                chosen = chosen & token_mask
            s = torch.where(chosen, scores[:, k], 0).unsqueeze(1).to(x.dtype)  # (T, 1)
            y = y + torch.where(
                chosen.unsqueeze(1), _expert(x, s, e, w_up, w_down, b_up, b_down, activation, score_on), 0
            )
    return y


def _expert(x, s, e, w_up, w_down, b_up, b_down, activation, score_on):
    z = x @ w_up[e].T
    if b_up is not None:
        z = z + b_up[e]
    out_bias = 0 if b_down is None else b_down[e]
    if score_on == "output":
        return s * (activate(z, activation) @ w_down[e].T + out_bias)
    if score_on == "inside":
        return (s * activate(z, activation)) @ w_down[e].T + s * out_bias
    return activate(s * z, activation) @ w_down[e].T + out_bias  # "input", Llama 4


# ---- the router


def router_logits(x: Tensor, w_router: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w_router^T + bias."""
    return F.linear(x, w_router, bias)


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, best first, ties to the lowest index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def route(
    logits: Tensor,
    k: int,
    *,
    scores="softmax",
    expert_bias=None,
    groups=1,
    top_groups=1,
    renormalise=True,
    scale=1.0,
    token_mask=None,
):
    """ids (T, k), scores (T, k); `intarsia.route` documents the families. NaN and masked tokens: ids -1, scores 0."""
    good = valid_tokens(logits, token_mask).unsqueeze(1)
    safe = torch.where(good, logits, 0)
    if scores in ("softmax", "softmax_renorm"):
        ids = top_k(safe, k)
        chosen = safe.gather(1, ids).softmax(1) if scores == "softmax_renorm" else safe.softmax(1).gather(1, ids)
    elif scores == "sigmoid":
        ids = top_k(safe, k)
        chosen = safe.gather(1, ids).sigmoid()
    else:
        ids = _group_limited(safe.sigmoid(), expert_bias, groups, top_groups, k)
        chosen = safe.sigmoid().gather(1, ids)
        if renormalise:
            chosen = chosen / chosen.sum(1, keepdim=True)
        chosen = chosen * scale
    return torch.where(good, ids, -1), torch.where(good, chosen, 0)


def _group_limited(probabilities, expert_bias, groups, top_groups, k):
    """DeepSeek-V3: the best top_groups groups by the sum of their best two, then the best k experts of those."""
    rank = probabilities.detach() if expert_bias is None else probabilities.detach() + expert_bias
    grouped = rank.unflatten(1, (groups, -1))  # (T, groups, E / groups)
    worth = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, top_k(worth, top_groups), True)
    return top_k(torch.where(kept.unsqueeze(2), grouped, -torch.inf).flatten(1), k)


def valid_tokens(logits: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """(T) bool: not masked, no NaN, largest logit finite."""
    good = ~logits.isnan().any(1) & logits.amax(1).isfinite()
    return good if token_mask is None else good & token_mask


# ---- token rounding


def rounded_counts(counts: list[int], tile: int, rounding: str, cap: int) -> list[int]:
    """Counts in whole tiles, at most `cap`: "up", "down", "nearest" (tie: down), "balanced" (tie: down)."""
    result, deviation = [], 0
    for count in counts:
        down = count // tile * tile
        up = min(-(-count // tile) * tile, cap)
        if rounding == "balanced":
            take_up = abs(deviation + up - count) < abs(deviation + down - count)
        else:
            take_up = rounding == "up" or (rounding == "nearest" and 2 * (count - down) > tile)
        result.append(up if take_up else down)
        deviation += result[-1] - count
    return result


def round_tokens(logits: Tensor, k: int, *, tile=128, rounding="nearest", token_mask=None) -> Tensor:
    """Token rounding as a mask: (T, E) bool, who goes where; the score of a pair is softmax(logits)[t, e]. (SonicMoE,
    section 5)
    """
    good = valid_tokens(logits, token_mask)
    probability = torch.where(good.unsqueeze(1), logits, 0).softmax(1).detach()
    top = torch.zeros_like(probability, dtype=torch.bool).scatter(
        1, top_k(torch.where(good.unsqueeze(1), logits, 0), k), True
    )
    top &= good.unsqueeze(1)
    counts = rounded_counts(top.sum(0).tolist(), tile, rounding, int(good.sum()))
    mask = torch.zeros_like(top)
    for e, count in enumerate(counts):
        worth = torch.where(top[:, e], probability[:, e] + 2, probability[:, e])  # its own top-k rows come first
        worth = torch.where(good, worth, -1)
        mask[worth.sort(descending=True, stable=True).indices[:count], e] = True
    return mask


# ---- losses


def load_balance_loss(
    logits: Tensor, ids: Tensor, *, normalisation="huggingface", scores="softmax", token_mask=None
) -> Tensor:
    """c * sum_e f_e P_e; c = E ("huggingface") or E / K ("megatron")."""
    experts, k = logits.shape[1], ids.shape[1]
    good = valid_tokens(logits, token_mask)
    tokens = good.sum().clamp(min=1)
    safe = torch.where(good.unsqueeze(1), logits, 0)
    if scores.startswith("sigmoid"):
        probability = safe.sigmoid() / safe.sigmoid().sum(1, keepdim=True)
    else:
        probability = safe.softmax(1)
    probability = torch.where(good.unsqueeze(1), probability, 0)
    chosen = torch.stack([((ids == e) & good.unsqueeze(1)).sum() for e in range(experts)])
    c = experts if normalisation == "huggingface" else experts / k
    return c * (chosen / tokens * probability.sum(0) / tokens).sum()


def z_loss(logits: Tensor, *, token_mask=None) -> Tensor:
    """Mean over the valid tokens of logsumexp(logits)^2."""
    good = valid_tokens(logits, token_mask)
    values = torch.where(good.unsqueeze(1), logits, 0).logsumexp(1) ** 2
    return torch.where(good, values, 0).sum() / good.sum().clamp(min=1)


def update_expert_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> Tensor:
    """bias + rate * sign(mean(counts) - counts)."""
    counts = counts.to(torch.float64)
    return bias + rate * torch.sign(counts.mean() - counts).to(bias.dtype)
