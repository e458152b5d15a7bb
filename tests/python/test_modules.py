"""intarsia.MoE as a torch module, against the specification and against other people's blocks."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intarsia
from intarsia import reference


def specification(layer, x, mask=None):
    """The layer in eager torch, in x's dtype."""
    p = {n: v.to(x.dtype) for n, v in layer.named_parameters()}
    logits = reference.router_logits(x, p["w_router"], p.get("b_router"))
    ids, scores = reference.route(
        logits, layer.experts_per_token, scores=layer.scores, expert_bias=layer.expert_bias, groups=layer.groups,
        top_groups=layer.top_groups, renormalise=layer.renormalise, scale=layer.scale, token_mask=mask,
    )  # fmt: skip
    y = reference.moe_mlp(
        x, ids, scores, p["w_up"], p["w_down"], b_up=p.get("b_up"), b_down=p.get("b_down"),
        activation=layer.activation, layout=layer.layout, transposed=layer.transposed, score_on=layer.score_on,
    )  # fmt: skip
    if layer.shared is not None:
        shared = reference.activate(x @ p["shared.w_up"].T, layer.activation) @ p["shared.w_down"].T
        gate = torch.sigmoid(x @ p["shared.w_gate"].T) if layer.shared.w_gate is not None else 1
        y = y + gate * shared
    return y


CONFIGURATIONS = [
    {},
    {"scores": "softmax", "router_bias": True, "bias": True},
    {"scores": "sigmoid_group", "groups": 4, "top_groups": 2, "scale": 2.5, "shared_width": 10},
    {"scores": "sigmoid", "score_on": "input", "experts_per_token": 1, "shared_width": 7},
    {"activation": "clamped_swiglu", "layout": "interleaved", "bias": True, "router_bias": True},
    {"activation": "relu2", "shared_width": 6, "shared_gated": True, "transposed": True},
    {"layout": ("blocks", 4), "score_on": "inside", "save": "input"},
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=[str(i) for i in range(len(CONFIGURATIONS))])
def test_module_is_the_specification(options):
    """Output and all gradients in float64, then float32 with the leading axes of a transformer."""
    layer = intarsia.MoE(**({"hidden": 12, "width": 8, "experts": 8, "experts_per_token": 3} | options)).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    leaves = dict(layer.named_parameters()) | {"x": x}
    y = layer(x)
    want = specification(layer, x.flatten(0, 1)).unflatten(0, (2, 11))
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    for name, a, b in zip(leaves, *(torch.autograd.grad(v, list(leaves.values()), dy) for v in (y, want)), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(layer.float()(x.float()).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounding", ["up", "down", "nearest", "stochastic", "balanced"])
def test_token_rounding_trains_and_evaluates_with_top_k(rounding):
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="softmax", rounding=rounding, tile=16)
    plain = intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="softmax")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(64, 16)
    layer(x).sum().backward()
    assert (layer.last_counts % 16 == 0).all()
    assert layer.w_router.grad.norm() > 0
    assert torch.equal(layer.eval()(x), plain(x))


def test_addend_is_the_residual():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, shared_width=8)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(layer(x, addend=x), x + layer(x))


def test_routing_is_returned():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2)
    y, routing = layer(torch.randn(3, 5, 16), return_routing=True)
    assert y.shape == (3, 5, 16)
    assert routing.logits.shape == (15, 4)
    assert routing.logits.requires_grad
    assert routing.ids.shape == routing.scores.shape == (15, 2)
    assert torch.equal(routing.lists.counts(), layer.last_counts)


# ---- torch's own habits


def test_deepcopy_state_dict_and_pickle():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="sigmoid_group", bias=True, shared_width=8)
    layer(torch.randn(50, 16))
    layer.update_expert_bias(0.1)
    x = torch.randn(9, 16)
    other = intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="sigmoid_group", bias=True, shared_width=8)
    assert not torch.equal(layer(x), other(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(layer(x), other(x))
    twin = copy.deepcopy(layer)
    assert torch.equal(layer(x), twin(x))
    assert twin.w_up.data_ptr() != layer.w_up.data_ptr()
    assert "last_counts" not in layer.state_dict()
    assert "expert_bias" in layer.state_dict()


def test_meta_device_then_materialised():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, device="meta", dtype=torch.bfloat16)
    y = layer(torch.randn(5, 16, device="meta", dtype=torch.bfloat16))
    assert y.device.type == "meta"
    assert y.shape == (5, 16)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(5, 16, dtype=torch.bfloat16)).isfinite().all()
    with torch.device("meta"):
        assert intarsia.MoE(16, 12, experts=4, experts_per_token=2).w_up.is_meta


def test_to_moves_parameters_and_keeps_the_choice_in_float32():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="sigmoid_group").to(torch.bfloat16)
    assert layer.w_up.dtype == torch.bfloat16
    assert layer.expert_bias.dtype == layer.double().expert_bias.dtype == torch.float32
    layer.to(torch.bfloat16)
    y = layer(torch.randn(7, 16, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16


def test_initialisation_is_that_of_linear():
    layer = intarsia.MoE(64, 100, experts=8, experts_per_token=2, bias=True, router_bias=True)
    for weight, inputs in ((layer.w_router, 64), (layer.w_up, 64), (layer.w_down, 100)):
        bound = inputs**-0.5
        assert weight.abs().max() <= bound
        assert abs(weight.std() / (bound / 3**0.5) - 1) < 0.1
    for bias in (layer.b_router, layer.b_up, layer.b_down):
        assert (bias == 0).all()


def test_repr_and_errors():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2)
    assert "experts=4" in repr(layer)
    for words, call in (
        ("experts_per_token", lambda: intarsia.MoE(16, 12, experts=4, experts_per_token=5)),
        ("scores", lambda: intarsia.MoE(16, 12, experts=4, experts_per_token=2, scores="top")),
        ("rounding", lambda: intarsia.MoE(16, 12, experts=4, experts_per_token=2, rounding="up")),
        ("width", lambda: intarsia.MoE(16, 0, experts=4, experts_per_token=2)),
        (r"\(\.\.\., 16\)", lambda: layer(torch.randn(3, 15))),
        ("sigmoid_group", layer.update_expert_bias),
    ):
        with pytest.raises(intarsia.InvalidArgument, match=words):
            call()


def test_it_learns():
    """Loss of a fixed regression falls to a quarter."""
    layer = intarsia.MoE(16, 32, experts=4, experts_per_token=2)
    x, target = torch.randn(200, 16), torch.randn(200, 16)
    opt = torch.optim.AdamW(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        loss = (layer(x) - target).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]


# ---- other people's conventions, written as their models write them


def hugging_face_block(x, gate, gate_up_proj, down_proj, k, renormalise):
    """Loop of transformers' Mixtral (renormalise), Qwen3-MoE (norm_topk_prob) and OLMoE (without) blocks."""
    weights = F.softmax(F.linear(x, gate), dim=1, dtype=torch.float)
    weights, selected = torch.topk(weights, k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(gate.shape[0]):
        token, slot = torch.where(selected == e)
        g, u = F.linear(x[token], gate_up_proj[e]).chunk(2, dim=-1)
        out.index_add_(0, token, F.linear(F.silu(g) * u, down_proj[e]) * weights[token, slot, None])
    return out


@pytest.mark.parametrize(("scores", "renormalise"), [("softmax_renorm", True), ("softmax", False)])
def test_mixtral_qwen_and_olmoe_conventions(scores, renormalise):
    """reports.md 58"""
    layer = intarsia.MoE(24, 16, experts=6, experts_per_token=2, scores=scores)
    x = torch.randn(40, 24)
    torch.testing.assert_close(
        layer(x), hugging_face_block(x, layer.w_router, layer.w_up, layer.w_down, 2, renormalise), rtol=1e-4, atol=1e-5
    )


def test_gpt_oss_convention():
    """Interleaved gate and up columns, [in, out] weights, biases, clamp, top-k then softmax. reports.md 58"""
    e, h, i, k = 4, 12, 8, 2
    layer = intarsia.MoE(
        h, i, e, k, activation="clamped_swiglu", layout="interleaved", transposed=True, bias=True, router_bias=True
    )
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(20, h)
    logits = F.linear(x, layer.w_router, layer.b_router)
    top, ids = logits.topk(k, dim=-1)
    weights = top.softmax(-1)
    gate_up = torch.einsum("th,ehf->tef", x, layer.w_up) + layer.b_up
    gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
    out = torch.einsum("tei,eih->teh", (up + 1) * gate * torch.sigmoid(gate * 1.702), layer.w_down) + layer.b_down
    want = (out.gather(1, ids.unsqueeze(-1).expand(-1, -1, h)) * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)


def test_llama4_convention():
    """The sigmoid of the chosen logit scales the expert's input; gate_up_proj is [in, out]. reports.md 58"""
    layer = intarsia.MoE(12, 8, 4, 1, scores="sigmoid", score_on="input", transposed=True, shared_width=8)
    x = torch.randn(20, 12)
    score, ids = F.linear(x, layer.w_router).max(1)
    gate, up = torch.einsum("th,thf->tf", x * score.sigmoid().unsqueeze(1), layer.w_up[ids]).chunk(2, -1)
    want = torch.einsum("ti,tih->th", F.silu(gate) * up, layer.w_down[ids])
    g, u = F.linear(x, layer.shared.w_up).chunk(2, -1)
    torch.testing.assert_close(layer(x), want + F.linear(F.silu(g) * u, layer.shared.w_down), rtol=1e-4, atol=1e-5)


def test_deepseek_convention():
    """Group-limited sigmoid routing with the correction bias, as in DeepSeek-V3's gate. reports.md 58"""
    e, k, groups, top_groups = 16, 4, 4, 2
    layer = intarsia.MoE(12, 8, e, k, scores="sigmoid_group", groups=groups, top_groups=top_groups, scale=2.5)
    layer.expert_bias.normal_(std=0.2)
    x = torch.randn(50, 12)
    scores = F.linear(x, layer.w_router).sigmoid()
    choice = scores + layer.expert_bias
    group_scores = choice.view(-1, groups, e // groups).topk(2, dim=-1)[0].sum(-1)
    group_mask = torch.zeros_like(group_scores).scatter_(1, group_scores.topk(top_groups, dim=-1)[1], 1)
    masked = choice.masked_fill(~group_mask.bool().repeat_interleave(e // groups, 1), float("-inf"))
    ids = masked.topk(k, dim=-1)[1]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * 2.5
    routing = layer.route(x)
    assert torch.equal(routing.ids.long(), ids)
    torch.testing.assert_close(routing.scores, weights)
