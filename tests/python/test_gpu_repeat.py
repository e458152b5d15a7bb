"""The same bits whatever happens around: repeats, allocator churn, other streams, threads, graphs, torch.compile; and
gradients that torch accumulates.
"""

import threading

import pytest
import torch
from gpu_device import DEVICE, MARKS, by_ids, check, cuda_only, draw, generator, normal, oracle, random_ids, run

import intarsia
from intarsia import losses
from intarsia.errors import Error

pytestmark = MARKS

LAYERS = [  # T, H, I, E, K, dtype
    (2048, 256, 128, 16, 4, torch.bfloat16),
    (300, 72, 40, 5, 2, torch.float16),
    (4000, 512, 264, 8, 1, torch.bfloat16),
    (700, 33, 17, 6, 2, torch.bfloat16),
    (1000, 128, 64, 300, 8, torch.bfloat16),
]


def layers() -> list:
    """(routing, tensors) of every size."""
    made = []
    for seed, (T, H, I, E, K, dtype) in enumerate(LAYERS):
        routing = by_ids(random_ids(generator(seed), T, E, K))
        made.append((routing, draw(routing, H, I, E, dtype, seed=seed)))
    return made


def once(routing, layer: dict, **options) -> list:
    """y and the gradients, on whatever memory the allocator gives and on the current stream."""
    leaves = {n: t.detach().requires_grad_() for n, t in layer.items() if n != "dy"}
    y = routing.call(**leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), layer["dy"])]


def same(a: list, b: list) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# ---- repeats


@pytest.mark.parametrize("which", range(len(LAYERS)))
def test_a_hundred_repeats(which):
    """Random allocations full of NaN come and go between them, and another stream multiplies matrices all the while."""
    routing, layer = layers()[which]
    first = list(run(routing, layer).values())
    luck, held, busy = torch.Generator().manual_seed(which), [], torch.randn(2048, 2048, device=DEVICE)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    side = torch.cuda.Stream() if DEVICE == "cuda" else None
    for _ in range(100 if DEVICE == "cuda" else 3):
        if side is not None:
            with torch.cuda.stream(side):
                busy @ busy
        for size in torch.randint(1, 1 << 22, (4,), generator=luck).tolist():
            held.append(torch.full((size,), torch.nan, device=DEVICE))
        while len(held) > 12:
            held.pop(int(torch.randint(len(held), (), generator=luck)))
        for a, b in zip(once(routing, layer), first, strict=True):
            differ += (a != b).any()  # NaN differs from itself
    assert differ == 0


@cuda_only
def test_layers_on_streams_of_their_own():
    """Layers of different sizes at once give the bits that each gives alone."""
    made = layers()
    alone = [list(run(*one).values()) for one in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    for _ in range(10):
        together = []
        for stream, one in zip(streams, made, strict=True):
            with torch.cuda.stream(stream):
                together.append(once(*one))
        torch.cuda.synchronize()
        assert all(map(same, together, alone))


@cuda_only
def test_layers_in_threads_of_their_own():
    made = layers()
    alone = [list(run(*one).values()) for one in made]
    torch.cuda.synchronize()
    agreed = [0] * len(made)

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                agreed[i] += same(once(*made[i]), alone[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [10] * len(made)


@cuda_only
def test_work_stays_on_the_current_stream():
    """Inputs that arrive late on a stream: kernels that ran on another would miss them."""
    routing, layer = layers()[0]
    want = list(run(routing, layer).values())
    late = {n: torch.zeros_like(t) for n, t in layer.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles
        for name, t in layer.items():
            late[name].copy_(t)
        got = once(routing, late)
    side.synchronize()
    assert same(got, want)


@cuda_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    ids = torch.randint(0, 5, (200, 2))
    layer = {n: t.cpu() for n, t in draw(by_ids(ids.to(DEVICE)), 72, 40, 5).items()}

    def on(device):
        moved = {n: t.to(device) for n, t in layer.items()}
        here = ids.to(device)
        routing = by_ids(ids.to(DEVICE))._replace(
            call=lambda x, scores, w_up, w_down: intarsia.moe_mlp(x, here, scores, w_up, w_down)
        )
        return [t.cpu() for t in once(routing, moved)]

    assert same(on("cuda:0"), on("cuda:1"))
    assert torch.cuda.current_device() == 0


# ---- CUDA graphs


def whole_layer(statics: dict, rounding: bool) -> list:
    """Router, lists, experts, losses and every gradient, from tensors that stay in place."""
    leaves = [statics[n].detach().requires_grad_() for n in ("x", "w_router", "w_up", "w_down")]
    x, w_router, w_up, w_down = leaves
    logits = intarsia.router_logits(x, w_router)
    ids, scores = intarsia.route(logits, 2)
    lists, weights = (intarsia.round_tokens(logits, 2, tile=64), None) if rounding else (ids, scores)
    y = intarsia.moe_mlp(x, lists, weights, w_up, w_down)
    aux = losses.load_balance_loss(logits, ids) + losses.z_loss(logits)
    return [y.detach(), *torch.autograd.grad((y, aux), leaves, (statics["dy"], torch.ones_like(aux)))]


def statics_of(seed: int) -> dict:
    g = generator(seed)
    return {
        "x": normal(g, 512, 128),
        "w_router": normal(g, 8, 128, scale=0.1 * (1 + seed)),
        "w_up": normal(g, 8, 128, 128, scale=0.1),
        "w_down": normal(g, 8, 128, 64, scale=0.1),
        "dy": normal(g, 512, 128),
    }


@cuda_only
@pytest.mark.parametrize("rounding", [False, True], ids=["top k", "rounded"])
def test_a_graph_of_forward_and_backward(rounding):
    """Captured once, which a host sync would make impossible; replayed on other inputs with other routings."""
    statics = statics_of(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole_layer(statics, rounding)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole_layer(statics, rounding)
    for seed in (3, 1, 7, 1):
        for name, value in statics_of(seed).items():
            statics[name].copy_(value)
        graph.replay()
        assert same(captured, whole_layer(statics, rounding))


@cuda_only
def test_a_graph_replays_routings_of_every_kind():
    """Empty experts, one expert for all, ids that are not here, in the place of the captured ids."""
    routing, layer = layers()[0]
    ids = random_ids(generator(), 2048, 16, 4)
    routing = by_ids(ids)
    once(routing, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once(routing, layer)
    for new in (torch.full_like(ids, 15), torch.full_like(ids, -1), ids % 3, ids - 8, ids.flip(0)):
        ids.copy_(new)
        graph.replay()
        assert same(captured, once(routing, layer))


# ---- torch.compile


def trained(function, module, x, dy) -> list:
    """y and the gradients of x and of every parameter."""
    leaves = (x, *module.parameters())
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


OPTIONS = {
    "top k": {},
    "rounded": {"scores": "softmax", "rounding": "nearest", "tile": 64},
    "recomputed": {"scores": "sigmoid_group", "groups": 2, "top_groups": 1, "save": "input"},
    "biases": {"bias": True, "router_bias": True, "activation": "clamped_swiglu", "layout": "interleaved"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_layers(options):
    """One graph, any number of tokens, the bits of eager."""
    torch._dynamo.reset()
    module = intarsia.MoE(64, 32, 8, 2, device=DEVICE, dtype=torch.bfloat16, **OPTIONS[options])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (300, 77):
        x, dy = normal(generator(tokens), tokens, 64).requires_grad_(), normal(generator(), tokens, 64)
        assert same(trained(compiled, module, x, dy), trained(module, module, x, dy))


@cuda_only
@pytest.mark.slow
@pytest.mark.timeout(150, method="thread")
def test_inductor():
    """With its own kernels around the layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)  # no two logits so close that another order of sums chooses another expert
    module = torch.nn.Sequential(torch.nn.RMSNorm(64), intarsia.MoE(64, 32, 8, 2), torch.nn.SiLU()).to(DEVICE)
    compiled = torch.compile(module, fullgraph=True)
    x, dy = torch.randn(300, 64, device=DEVICE, requires_grad=True), torch.randn(300, 64, device=DEVICE)
    for a, b in zip(trained(compiled, module, x, dy), trained(module, module, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# ---- several backward calls


def test_gradients_accumulate_over_two_backward_calls():
    """.grad after two is the sum of both, rounded by torch."""
    module = intarsia.MoE(64, 32, 8, 2, device=DEVICE, dtype=torch.bfloat16)
    batches = [normal(generator(seed), 300, 64) for seed in (1, 2)]
    apart = []
    for x in batches:
        apart.append(torch.autograd.grad(module(x).float().square().sum(), list(module.parameters())))
    for x in batches:
        module(x).float().square().sum().backward()
    for parameter, first, second in zip(module.parameters(), *apart, strict=True):
        assert torch.equal(parameter.grad, first + second)


def test_two_backward_calls_through_one_forward():
    """retain_graph leaves z alone; without it the second call is refused in a sentence."""
    routing, layer = layers()[1]
    want = list(run(routing, layer).values())[1:]
    leaves = {n: t.detach().requires_grad_() for n, t in layer.items() if n != "dy"}
    y = routing.call(**leaves)
    for _ in range(2):
        assert same(torch.autograd.grad(y, list(leaves.values()), layer["dy"], retain_graph=True), want)
    torch.autograd.grad(y, list(leaves.values()), layer["dy"])
    with pytest.raises((Error, RuntimeError), match="second"):
        torch.autograd.grad(y, list(leaves.values()), layer["dy"])


@pytest.mark.parametrize("wanted", [("x",), ("scores",), ("w_up",), ("w_down",), ("x", "w_down")])
def test_some_gradients_have_the_bits_of_all(wanted):
    """Frozen weights, or gradients that nobody asks for."""
    routing, layer = layers()[0]
    everything = run(routing, layer)
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in layer.items() if n != "dy"}
    y = routing.call(**leaves)
    gradients = torch.autograd.grad(y, [leaves[n] for n in wanted], layer["dy"])
    assert same(list(gradients), [everything[f"d{n}"] for n in wanted])


def test_autocast():
    """float32 parameters under torch.autocast: the layer of their bfloat16 values, gradients in float32."""
    routing = by_ids(random_ids(generator(), 300, 5, 2))
    layer = draw(routing, 72, 40, 5, torch.float32)
    leaves = {n: t.detach().requires_grad_() for n, t in layer.items() if n != "dy"}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = routing.call(**leaves)
    gradients = torch.autograd.grad(y, list(leaves.values()), layer["dy"].to(y.dtype))
    half = {n: t if n == "scores" else t.to(torch.bfloat16) for n, t in layer.items()}
    check(routing, half)
    want = oracle(routing, half)
    for name, value in zip(leaves, gradients, strict=True):
        assert value.dtype == torch.float32
        expected = want[f"d{name}"]
        assert (value.double() - expected).norm() <= 1e-2 * expected.norm()
