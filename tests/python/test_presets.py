"""The presets are consistent, complete, and every one builds a layer."""

import pytest
import torch

import intarsia
from intarsia.presets import PRESETS, get_preset

MODELS = [
    "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "deepseek-v3",
    "gpt-oss-20b", "gpt-oss-120b", "granite-1b-a400m", "granite-3b-a800m", "llama-4-scout",
    "qwen1.5-moe-a2.7b",
]  # fmt: skip


def test_models_and_benchmark_shapes_are_there():
    assert set(MODELS) <= set(PRESETS)
    assert sum(p.tokens is not None for p in PRESETS.values()) == 17


@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_on_the_meta_device(name):
    p = get_preset(name)
    layer = intarsia.MoE.from_preset(name, device="meta", dtype=torch.bfloat16)
    assert p.name == name
    assert layer.w_up.shape == (p.experts, 2 * p.width, p.hidden)  # every preset is gated
    assert layer.w_down.shape == (p.experts, p.hidden, p.width)
    assert (layer.b_up is not None) == p.bias
    assert (layer.b_router is not None) == p.router_bias
    assert (layer.shared is not None) == (p.shared_width > 0)
    if p.shared_width:
        assert layer.shared.w_down.shape == (p.hidden, p.shared_width)
        assert (layer.shared.w_gate is not None) == p.shared_gated


@pytest.mark.parametrize("name", MODELS)
def test_preset_runs_when_made_small(name):
    """The same routing, activation and layout with small sizes: finite output and gradients."""
    p = get_preset(name)
    small = {"hidden": 24, "width": 8, "experts": 16}
    small |= {"shared_width": 8} if p.shared_width else {}
    layer = intarsia.MoE.from_preset(name, **small, experts_per_token=min(4, p.experts_per_token))
    x = torch.randn(9, 24, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(q.grad is not None and torch.isfinite(q.grad).all() for q in (x, *layer.parameters()))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 1.409),
        ("qwen3-30b-a3b", 0.604),
        ("deepseek-v3", 11.27),
        ("gpt-oss-120b", 3.185),
        ("llama-4-scout", 2.013),
    ],
)
def test_expert_parameters_of_one_layer(name, billions):
    p = get_preset(name)
    assert 3 * p.hidden * p.width * p.experts == pytest.approx(billions * 1e9, rel=1e-3)


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match="qwen3-30b-a3b"):
        get_preset("qwen9")
