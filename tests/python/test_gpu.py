"""The layer on a GPU against the float64 specification; and no host sync, graphs, the same bits."""

import pytest
import torch

import intarsia
from intarsia import _core, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not _core.doctor()["cuda_kernels"],
        reason="needs a GPU and CUDA kernels",
    ),
]


def problem(T, H, I, E, K, dtype, seed=0, activation="swiglu"):
    generator = torch.Generator().manual_seed(seed)
    factor = 1 if activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2") else 2

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).cuda()

    x, w_up, w_down = normal(T, H), normal(E, factor * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    logits = normal(T, E).float()
    return x, logits, w_up, w_down, normal(T, H)


def results(layer, x, logits, w_up, w_down, dy, K, scores, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (x, logits, w_up, w_down)]
    ids, weights = layer.route(leaves[1], K, scores=scores)
    y = layer.moe_mlp(leaves[0], ids, weights, leaves[2], leaves[3], **options)
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scores", ["softmax", "softmax_renorm", "sigmoid"])
@pytest.mark.parametrize(
    "sizes", [(1, 64, 32, 4, 2), (333, 96, 72, 7, 3), (1000, 128, 256, 16, 4), (257, 33, 17, 5, 2)]
)
def test_layer(dtype, scores, sizes):
    K = sizes[-1]
    x, logits, w_up, w_down, dy = problem(*sizes, dtype)
    got = results(intarsia, x, logits, w_up, w_down, dy, K, scores)
    wide = [t.double() for t in (x, logits, w_up, w_down, dy)]
    expected = results(reference, *wide, K, scores)
    unit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for name, g, e in zip(("y", "dx", "dlogits", "dw_up", "dw_down"), got, expected, strict=True):
        error = ((g.double() - e).norm() / e.norm().clamp_min(1e-30)).item()
        assert error <= unit, (name, error)


@pytest.mark.parametrize("activation", ["geglu", "clamped_swiglu", "silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_activations_and_save_modes(activation, save):
    x, logits, w_up, w_down, dy = problem(300, 128, 64, 6, 2, torch.bfloat16, activation=activation)
    got = results(intarsia, x, logits, w_up, w_down, dy, 2, "softmax", activation=activation, save=save)
    wide = [t.double() for t in (x, logits, w_up, w_down, dy)]
    expected = results(reference, *wide, 2, "softmax", activation=activation)
    for g, e in zip(got, expected, strict=True):
        assert ((g.double() - e).norm() / e.norm()).item() <= 1e-2


def test_token_rounding_matches_the_cpu():
    logits = torch.randn(1000, 16)
    on_cpu, on_gpu = (intarsia.round_tokens(logits.to(device), 2, tile=64) for device in ("cpu", "cuda"))
    for name in ("expert_offsets", "row_token", "token_offsets", "token_rows"):
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu()), name


def test_the_same_bits_every_time():
    x, logits, w_up, w_down, dy = problem(2000, 256, 128, 16, 4, torch.bfloat16)
    first = results(intarsia, x, logits, w_up, w_down, dy, 4, "softmax")
    for _ in range(20):
        junk = torch.full((7, 1 << 20), float("nan"), device="cuda")
        again = results(intarsia, x, logits, w_up, w_down, dy, 4, "softmax")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        del junk


def test_no_host_sync():
    x, logits, w_up, w_down, dy = problem(512, 128, 64, 8, 2, torch.bfloat16)
    results(intarsia, x, logits, w_up, w_down, dy, 2, "softmax")
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(intarsia, x, logits, w_up, w_down, dy, 2, "softmax")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_other_routings():
    x, logits, w_up, w_down, _ = problem(512, 128, 64, 8, 2, torch.bfloat16)
    static = logits.clone()

    def layer():
        with torch.no_grad():
            ids, scores = intarsia.route(static, 2, scores="softmax")
            return intarsia.moe_mlp(x, ids, scores, w_up, w_down)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for seed in range(3):
        static.copy_(torch.randn(512, 8, generator=torch.Generator().manual_seed(seed)).cuda())
        graph.replay()
        assert torch.equal(y, layer())


def test_module_trains_on_the_gpu():
    moe = intarsia.MoE(64, 32, 8, 2, device="cuda")
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    x = torch.randn(256, 64, device="cuda")
    losses = []
    for _ in range(20):
        loss = (moe(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
