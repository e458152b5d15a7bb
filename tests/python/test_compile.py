"""torch.compile: one graph, dynamic numbers of tokens, no recompilation over routings."""

import pytest
import torch
import torch._dynamo.testing

import intarsia
from intarsia import losses


@pytest.fixture
def compiled():
    """compile(function, backend) -> (compiled function, counter)."""
    torch._dynamo.reset()

    def compile_with(function, backend="aot_eager", dynamic=None):
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter

    return compile_with


def gradients(function, leaves, *inputs):
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


OPTIONS = [
    {"bias": True, "router_bias": True, "shared_width": 12, "shared_gated": True},
    {"scores": "softmax", "rounding": "nearest", "tile": 8},
    {"scores": "sigmoid_group", "save": "input", "groups": 2, "top_groups": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["biases", "rounded", "recomputed"])
def test_module_compiles_once_for_every_number_of_tokens(compiled, options):
    """fullgraph, dynamic T; the same bits as eager. reports.md 96, 97, 98"""
    layer = intarsia.MoE(16, 8, experts=6, experts_per_token=2, **options)
    function, counter = compiled(layer, dynamic=True)
    frames = None
    for tokens in (5, 9, 33, 64, 7):
        x = torch.randn(tokens, 16, requires_grad=True)
        leaves = (x, *layer.parameters())
        got, want = gradients(function, leaves, x), gradients(layer, leaves, x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


def test_routings_never_recompile(compiled):
    """Empty experts, all to one, sentinels: one graph. reports.md 96"""
    w_up, w_down = torch.randn(5, 12, 8, requires_grad=True), torch.randn(5, 8, 6, requires_grad=True)
    function, counter = compiled(lambda x, ids, s: intarsia.moe_mlp(x, ids, s, w_up, w_down))
    routings = (
        torch.zeros(20, 2), torch.full((20, 2), -1), torch.randint(0, 5, (20, 2)), torch.randint(-2, 7, (20, 2)),
        torch.full((20, 2), 4)
    )  # fmt: skip
    frames = None
    for ids in routings:
        x, s = torch.randn(20, 8, requires_grad=True), torch.rand(20, 2, requires_grad=True)
        gradients(function, (x, s, w_up, w_down), x, ids.int(), s)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


def test_functions_and_losses_compile(compiled):
    def f(x, logits, w_up, w_down):
        ids, scores = intarsia.route(logits, 2, scores="softmax")
        lists = intarsia.round_tokens(logits, 2, tile=4, rounding="stochastic", seed=7)
        aux = losses.load_balance_loss(logits, ids) + losses.z_loss(logits)
        return (
            intarsia.moe_mlp(x, lists, None, w_up, w_down)
            + intarsia.moe_mlp(x, ids, scores, w_up, w_down, save="input")
            + aux
        )

    function, _ = compiled(f, dynamic=True)
    for tokens in (6, 19):
        inputs = [torch.randn(*s, requires_grad=True) for s in ((tokens, 16), (tokens, 6), (6, 16, 16), (6, 16, 8))]
        got, want = gradients(function, inputs, *inputs), gradients(f, inputs, *inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_grouped_functions_compile(compiled):
    def f(rows, offsets, w_up, w_down):
        return intarsia.grouped_mlp(rows, offsets, w_up, w_down) + intarsia.grouped_gemm(rows, offsets, w_up)[:, :1]

    function, _ = compiled(f, dynamic=True)
    for n in (7, 12):
        offsets = torch.tensor([0, 2, 2, n - 1])
        inputs = [torch.randn(*s, requires_grad=True) for s in ((n, 6), (3, 8, 6), (3, 6, 4))]
        args = (inputs[0], offsets, *inputs[1:])
        for a, b in zip(gradients(function, inputs, *args), gradients(f, inputs, *args), strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_inductor(compiled):
    """With its own code around ours, in bf16 under autocast too."""
    layer = torch.nn.Sequential(
        torch.nn.RMSNorm(16), intarsia.MoE(16, 8, experts=6, experts_per_token=2), torch.nn.Linear(16, 16)
    )
    function, _ = compiled(layer, "inductor", dynamic=True)
    for tokens in (5, 40):
        x = torch.randn(tokens, 16, requires_grad=True)
        leaves = (x, *layer.parameters())
        for a, b in zip(gradients(function, leaves, x), gradients(layer, leaves, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_inside_a_compiled_function(compiled):
    layer = intarsia.MoE(16, 8, experts=4, experts_per_token=2)
    x = torch.randn(12, 16)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    function, _ = compiled(f)
    got, want = function(x), f(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


def test_checkpoint_inside_a_compiled_function(compiled):
    layer = intarsia.MoE(16, 8, experts=4, experts_per_token=2)
    x = torch.randn(12, 16, requires_grad=True)
    function, _ = compiled(lambda v: torch.utils.checkpoint.checkpoint(layer, v, use_reentrant=False))
    leaves = (x, *layer.parameters())
    for a, b in zip(gradients(function, leaves, x), gradients(layer, leaves, x), strict=True):
        assert torch.equal(a, b)


def test_export():
    """torch.export gives a graph of our operators."""
    layer = intarsia.MoE(16, 8, experts=4, experts_per_token=2).eval()
    x = torch.randn(12, 16)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
    assert any("intarsia.moe_forward" in str(node.target) for node in program.graph.nodes)
    other = torch.randn(31, 16)
    torch.testing.assert_close(program.module()(other), layer(other))
