"""The operators as torch sees them: opcheck, gradients by finite differences, bindings, errors, ownership."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import intarsia
from intarsia import _c, _core, losses, ops

AUTO = "automatic"
T, H, I, E, K = 9, 6, 8, 4, 2


def rand(*shape, grad=True, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def lists():
    return intarsia.build_index(torch.rand(T, E).argsort(1)[:, :K], E)[:6]


def csr():
    return intarsia.round_tokens(
        torch.randn(T, E), K, tile=1
    )  # as many rows as the lists hold: opcheck compares all of z


OFFSETS = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32)


def layer_arguments(grad=True, save_z=True, biases=False, rounded=False, second=False):
    some = csr() if rounded else None
    scores = (some.row_score if rounded else torch.rand(T, K)).requires_grad_(grad)
    w_up, w_second = (
        (rand(E, I, H, grad=grad), rand(E, I, H, grad=grad)) if second else (rand(E, 2 * I, H, grad=grad), None)
    )
    b_up, b_down = (rand(E, 2 * I, grad=grad), rand(E, H, grad=grad)) if biases else (None, None)
    return (
        rand(T, H, grad=grad), *(some[:6] if rounded else lists()), scores, w_up, w_second, 0, False,
        rand(E, H, I, grad=grad), False, b_up, b_down, rand(T, H, grad=grad) if biases else None, "swiglu", "output",
        save_z, False, AUTO,
    )  # fmt: skip


def moe_arguments(options, grad=True, save_z=True, biases=False, returned=3):
    """`options`: k to scale."""
    w_up, second, gate_block, transposed, w_down, _, *rest = layer_arguments(grad, save_z, biases)[8:]
    b_up, b_down, addend, *others = rest
    router = (rand(T, H, grad=grad), rand(E, H, grad=grad), rand(E, grad=grad) if biases else None, None, None)
    flags = (False, False, biases, returned, gate_block, transposed)  # counts of rows beside biases
    return (*router, w_up, second, w_down, b_up, b_down, addend, *options, *flags, *others)


def layer_backward_arguments():
    x, *middle = layer_arguments(grad=False)
    scores_to_biases, activation = middle[:-6], middle[-5:-3]
    return (rand(T, H, grad=False), rand(T * K, 2 * I, grad=False), x, *scores_to_biases, *activation, AUTO,
            [True, True, True, False, True, False, False])  # fmt: skip


def cases():
    ids, scores = intarsia.route(torch.randn(T, E), K)
    yield "router_logits", lambda: (rand(T, H), rand(E, H), rand(E), False, AUTO)
    yield "router_logits", lambda: (rand(T, H), rand(E, H), None, True, AUTO)
    yield (
        "router_logits_backward",
        lambda: (
            rand(T, E, grad=False), rand(T, H, grad=False), rand(E, H, grad=False), None, rand(T, H, grad=False),
            True, True, False, AUTO,
        ),
    )  # fmt: skip
    for kind in ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid"):
        options = (K, kind, 2, 1, True, 1.0)
        yield "route", lambda o=options: (rand(T, E), None, None, *o, True, AUTO)
        yield "moe_forward", lambda o=options: moe_arguments(o, biases=True)
    yield "moe_forward", lambda: moe_arguments(options, save_z=False)
    yield "moe_forward", lambda: moe_arguments(options, returned=2)
    yield "moe_forward", lambda: moe_arguments(options, returned=1)
    yield "moe_forward", lambda: moe_arguments(options, grad=False, save_z=False)
    yield "route_backward", lambda: (
        rand(T, K, grad=False), scores, ids, None, rand(T, E, grad=False), None, None, None, "softmax", True, 1.0, T,
        E, torch.float32, AUTO
    )  # fmt: skip
    yield "build_index", lambda: (ids, None, E, AUTO)
    yield "round_tokens", lambda: (rand(T, E), None, K, 4, "nearest", 0, AUTO)
    yield "layer_forward", layer_arguments
    yield "layer_forward", lambda: layer_arguments(biases=True, save_z=False)
    yield "layer_forward", lambda: layer_arguments(rounded=True, second=True)
    yield "layer_forward", lambda: layer_arguments(grad=False, save_z=False)
    yield "layer_backward", layer_backward_arguments
    yield "grouped_gemm", lambda: (rand(T + 1, H), OFFSETS, rand(E, 5, H), False, AUTO)
    yield "grouped_gemm_backward", lambda: (
        rand(T + 1, 5, grad=False), rand(T + 1, H, grad=False), OFFSETS, rand(E, H, 5, grad=False), True, True, True,
        AUTO
    )  # fmt: skip
    yield "load_balance_loss", lambda: (rand(T, E), ids, None, "softmax", "megatron", AUTO)
    yield "load_balance_loss_backward", lambda: (
        rand(1, grad=False), rand(T, E, grad=False), None, torch.rand(E), torch.full((1,), float(T)), K, "sigmoid",
        "huggingface", AUTO
    )  # fmt: skip
    yield "z_loss", lambda: (rand(T, E), None, AUTO)
    yield (
        "z_loss_backward",
        lambda: (rand(1, grad=False), rand(T, E, grad=False), None, torch.full((1,), float(T)), AUTO),
    )


CASES = list(cases())


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_opcheck(name, arguments):
    """Schema, fake kernel, autograd registration, tracing with symbolic sizes. reports.md 97"""
    opcheck(getattr(ops, name).overload, arguments())


def test_every_operator_is_opchecked():
    assert {name for name, _ in CASES} == set(ops.__all__)


def test_every_operation_of_the_core_is_a_raw_operator():
    assert set(_core.raw_operators) == set(_c.operations())
    for name, raw in _core.raw_operators.items():
        assert raw.schema.name == f"{name}" or raw.schema.name.endswith(f"::{name}")
        assert raw.names[-1] == "backend"


# ---- finite differences, float64


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
@pytest.mark.parametrize(
    "activation", ["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "silu", "gelu", "gelu_tanh", "relu2"]
)
def test_gradcheck_of_the_layer(activation, score_on):
    g = 2 if activation in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu") else 1
    ids = torch.rand(5, 3).argsort(1)[:, :2]
    b_up = None if score_on == "input" else double(3, g * 4)

    def f(x, scores, w_up, w_down, b_down, addend, *b):
        return intarsia.moe_mlp(x, ids, scores, w_up, w_down, b_up=b[0] if b else None, b_down=b_down, addend=addend,
                                activation=activation, score_on=score_on)  # fmt: skip

    inputs = (double(5, 3), double(5, 2), double(3, g * 4, 3), double(3, 3, 4), double(3, 3), double(5, 3))
    assert torch.autograd.gradcheck(f, (*inputs, *(() if b_up is None else (b_up,))))


@pytest.mark.parametrize("scores", ["softmax", "softmax_renorm", "sigmoid_group", "sigmoid"])
def test_gradcheck_of_the_router(scores):
    options = {"groups": 2, "top_groups": 1, "scale": 2.5} if scores == "sigmoid_group" else {}
    assert torch.autograd.gradcheck(lambda v: intarsia.route(v, 2, scores=scores, **options)[1], double(6, 4))
    assert torch.autograd.gradcheck(intarsia.router_logits, (double(4, 5), double(3, 5), double(3)))
    ids = torch.randint(0, 4, (6, 2))
    assert torch.autograd.gradcheck(lambda v: losses.load_balance_loss(v, ids, scores=scores), double(6, 4))


def test_gradcheck_of_the_rest():
    assert torch.autograd.gradcheck(losses.z_loss, double(6, 4))
    assert torch.autograd.gradcheck(lambda v: intarsia.round_tokens(v, 2, tile=4).row_score, double(9, 4))
    assert torch.autograd.gradcheck(lambda r, w: intarsia.grouped_gemm(r, OFFSETS, w), (double(10, 3), double(4, 5, 3)))
    offsets = torch.tensor([0, 2, 2, 5])
    inputs = (double(6, 3), double(6), double(3, 8, 3), double(3, 3, 4))
    assert torch.autograd.gradcheck(lambda r, s, u, d: intarsia.grouped_mlp(r, offsets, u, d, row_scores=s), inputs)


# ---- second derivatives


@pytest.mark.parametrize("function", ["layer", "router", "loss", "gemm", "route"])
def test_double_backward_is_a_clear_error(function):
    """reports.md 100"""
    x, logits, w = rand(T, H), rand(T, E), rand(E, 5, H)
    ids = torch.randint(0, E, (T, K))
    w_up, w_down = rand(E, 2 * I, H), rand(E, H, I)
    functions = {
        "layer": lambda: intarsia.moe_mlp(x, ids, torch.rand(T, K), w_up, w_down),
        "router": lambda: intarsia.router_logits(x, rand(E, H)),
        "loss": lambda: losses.load_balance_loss(logits, ids),
        "gemm": lambda: intarsia.grouped_gemm(x, OFFSETS, w),
        "route": lambda: intarsia.route(logits, K)[1].square(),
    }
    leaf = logits if function in ("loss", "route") else x
    (first,) = torch.autograd.grad(functions[function]().sum(), leaf, create_graph=True)
    with pytest.raises(intarsia.Unsupported, match="second derivatives are not implemented"):
        first.square().sum().backward()


# ---- errors


def moe(**changes):
    a = {
        "x": torch.randn(T, H), "ids": torch.zeros(T, K, dtype=torch.int32), "scores": torch.rand(T, K),
        "w_up": torch.randn(E, 2 * I, H), "w_down": torch.randn(E, H, I),
    } | changes  # fmt: skip
    return intarsia.moe_mlp(a.pop("x"), a.pop("ids"), a.pop("scores"), a.pop("w_up"), a.pop("w_down"), **a)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.randn(T, H, 1)}, ("x", "(T, H)", f"({T}, {H}, 1)")),
        ({"x": [1.0]}, ("x", "tensor", "list")),
        ({"x": torch.zeros(T, H, dtype=torch.int64)}, ("x", "float32", "int64")),
        ({"x": torch.randn(T + 1, H)}, (str(T), str(T + 1))),
        ({"x": torch.randn(T, H + 1)}, ("w_up", str(H), str(H + 1))),
        ({"ids": torch.zeros(T, K)}, ("ids", "int32", "float32")),
        ({"ids": torch.zeros(T, K + 1, dtype=torch.int32)}, ("scores", f"({T}, {K + 1})", f"({T}, {K})")),
        ({"w_up": torch.randn(E, 2 * I, H).bfloat16()}, ("w_up", "float32", "bfloat16", "autocast")),
        ({"w_up": torch.randn(E, 2 * I + 2, H)}, ("w_up", str(I + 1), f"({E}, {H}, {I})")),
        ({"w_down": torch.randn(E + 1, H, I)}, ("w_down", str(E), str(E + 1))),
        ({"w_up": (torch.randn(E, I, H),)}, ("w_up", "(gate, up)", "1")),
        ({"w_up": (torch.randn(E, I, H), torch.randn(E, I, H)), "activation": "gelu"}, ("w_up", "not gated")),
        ({"activation": "swish"}, ("activation", "swiglu", "swish")),
        ({"layout": "rows"}, ("layout", "interleaved", "rows")),
        ({"layout": ("blocks", 3)}, ("3", str(I))),
        ({"score_on": "outside"}, ("score_on", "inside", "outside")),
        ({"save": "nothing"}, ("save", "preactivation", "nothing")),
        ({"score_on": "input", "b_up": torch.randn(E, 2 * I)}, ("b_up", "input")),
        ({"b_down": torch.randn(E, H + 1)}, ("b_down", str(H), str(H + 1))),
        ({"addend": torch.randn(T + 1, H)}, ("addend", str(T), str(T + 1))),
        ({"token_mask": torch.ones(T)}, ("token_mask", "bool", "float32")),
        ({"backend": "cuda"}, ("CUDA", "CPU")),
        ({"backend": "gpu"}, ("backend", "automatic", "gpu")),
        ({"x": torch.randn(T, H, device="meta")}, ("device", "meta", "cpu")),
    ],
)
def test_wrong_arguments_are_named(changes, words):
    """Argument, expected, got: each a ValueError or NotImplementedError of our own."""
    with pytest.raises(intarsia.Error) as info:
        moe(**changes)
    assert isinstance(info.value, ValueError | NotImplementedError)
    for word in words:
        assert word in str(info.value), f"{word!r} is not in: {info.value}"


def test_offsets_of_wrong_length_name_both_numbers():
    """reports.md 48"""
    with pytest.raises(ValueError, match=r"(?s)4.*3|3.*4") as info:
        intarsia.grouped_mlp(
            torch.randn(6, H), torch.tensor([0, 2, 4, 5, 6]), torch.randn(3, 2 * I, H), torch.randn(3, H, I)
        )
    assert "expert_offsets" in str(info.value)


def test_raw_operator_says_what_it_got():
    with pytest.raises(intarsia.InvalidArgument, match="router_logits: x: expected 1 to 3 dimensions, got 4"):
        _core.run("router_logits", x=torch.zeros(1, 1, 1, 1), w_router=torch.zeros(1, 1), logits=torch.zeros(1, 1))
    with pytest.raises(intarsia.InvalidArgument, match="no argument is called wrouter"):
        _core.run("router_logits", wrouter=torch.zeros(1, 1))


def test_a_failed_call_writes_nothing():
    logits = torch.full((T, E), 7.0)
    with pytest.raises(intarsia.InvalidArgument):
        _core.run("router_logits", x=torch.randn(T, H), w_router=torch.randn(E, H + 1), logits=logits)
    assert (logits == 7).all()


# ---- the core's own promises, through its torch operators


def test_weight_gradient_of_an_empty_expert():
    """Overwrite gives zeros, accumulate leaves what is there. reports.md 9"""
    offsets = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    dy, a = torch.randn(7, 5), torch.randn(7, 6)
    for accumulate, empty in ((False, 0.0), (True, 7.0)):
        dw = torch.full((3, 5, 6), 7.0)
        _core.run(
            "down_weight_backward", dy=dy, a_scaled=a, expert_offsets=offsets, accumulate=accumulate, grad_scale=1.0,
            dw_down=dw, dw_down_transposed=False,
        )  # fmt: skip
        assert (dw[1] == empty).all()
        torch.testing.assert_close(dw[0], dy[:4].T @ a[:4] + empty, rtol=1e-5, atol=1e-5)


def test_outputs_are_written_whole():
    """Poisoned outputs: nothing of what was in fresh memory is left."""
    layer = intarsia.MoE(H, I, experts=E, experts_per_token=K, bias=True, router_bias=True)
    x = torch.randn(T, H, requires_grad=True)
    want = [layer(x), *torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))]
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        got = [layer(x), *torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_explain_speaks():
    text = intarsia.explain(
        "router_logits", {"x": torch.randn(3, 4), "w_router": torch.randn(2, 4), "logits": torch.empty(3, 2)}
    )
    assert "cpu" in text.lower()


# ---- bindings


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_calls_leak_nothing():
    """Tensors, optional tensors and strings, in calls that succeed and in calls that fail."""
    x, w, b, logits = torch.randn(50, 8), torch.randn(4, 8), torch.randn(4), torch.empty(50, 4)

    def calls(n):
        for _ in range(n):
            _core.run("router_logits", x=torch.randn(50, 8), w_router=w, bias=torch.randn(4), logits=torch.empty(50, 4))
            for bad in ({"logits": torch.empty(3, 4)}, {"backend": "nonsense" * 50}, {"bias": torch.zeros(1, 1, 1, 1)}):
                with pytest.raises(intarsia.Error):
                    _core.run("router_logits", **({"x": x, "w_router": w, "bias": b, "logits": logits} | bad))

    calls(300)
    before, references = resident_kib(), [sys.getrefcount(t) for t in (x, w, b, logits)]
    calls(3000)
    assert resident_kib() - before < 1024
    assert references == [sys.getrefcount(t) for t in (x, w, b, logits)]


def test_moe_leaks_nothing():
    """What the shim makes for torch, in steps that succeed and in steps that are refused after it was made."""
    leaves = x, w_router, w_up, w_down = rand(T, H), rand(E, H), rand(E, 2 * I, H), rand(E, H, I)

    def steps(n):
        for _ in range(n):
            torch.autograd.grad(intarsia.moe(x, w_router, K, w_up, w_down).sum(), leaves)
            with pytest.raises(intarsia.InvalidArgument, match="w_down"):
                intarsia.moe(x, w_router, K, w_up, w_down[:, :, :-1])

    steps(200)
    before, references = resident_kib(), [sys.getrefcount(t) for t in leaves]
    steps(2000)
    assert resident_kib() - before < 1024
    assert references == [sys.getrefcount(t) for t in leaves]


def test_no_memory_is_torchs_error():
    x = rand(1, H).expand(2**44, H)  # y would be 384 TiB
    kind = torch.OutOfMemoryError if intarsia.binding()[0] == "shim" else RuntimeError  # as torch.empty on the CPU
    with pytest.raises(kind, match="memory"):
        intarsia.moe(x, rand(E, H), K, rand(E, 2 * I, H), rand(E, H, I))


def test_a_binding_is_live():
    kind, why = intarsia.binding()
    assert kind == ("c" if os.environ.get("INTARSIA_BINDING") == "c" else kind)
    assert kind in ("shim", "c")
    assert why


@pytest.mark.skipif(os.environ.get("INTARSIA_BINDING") == "c", reason="this is the run that the test below starts")
def test_the_c_interface_serves_the_same_operators():
    """The same tests, in a process that calls the C interface instead of the shim."""
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_ops.py", "test_layer.py", "test_router.py", "test_lists.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *files],
        env=os.environ | {"INTARSIA_BINDING": "c", "HYPOTHESIS_PROFILE": "smoke"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_both_bindings_give_the_same_bits():
    """The kernel that ctypes would run, beside the one that torch runs."""
    arguments = layer_arguments(grad=False)
    y, z = ops.layer_forward(*arguments)
    values = dict(zip(ops.layer.FORWARD_NAMES, arguments, strict=True))
    y2, z2 = torch.full_like(y, float("nan")), torch.full_like(z, float("nan"))
    for name in ("save_z", "overwrite_z", "backend"):
        values.pop(name)
    _c.run("layer_forward", values | {"y": y2, "z": z2})
    assert torch.equal(y, y2)
    assert torch.equal(z, z2)


@pytest.mark.parametrize("kind", ["softmax", "softmax_renorm", "sigmoid_group", "sigmoid"])
@pytest.mark.parametrize("input_dtype", [False, True])
@pytest.mark.parametrize("flags", [(False, 2), (True, 3), (False, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_moe_forward_are_made_alike(kind, input_dtype, flags, dtype):
    """By the shim, and by Python for the C interface: the same tensors with the same bits."""
    arguments = moe_arguments((K, kind, 2, 1, True, 1.5), grad=False, biases=True)
    tensors, o = arguments[:11], ops.moe.MoeOptions(*arguments[11:])
    tensors = [t if t is None else t.to(dtype) for t in tensors]
    count, returned = flags
    o = o._replace(input_dtype=input_dtype, count_nan_tokens=count, count_rows=count, returned=returned, save_z=True)
    want = ops.moe._forward(*tensors, o)
    for got in (ops.moe_forward.overload(*tensors, *o), ops.moe_forward(*tensors, o)):
        for a, b in zip(got, want, strict=True):
            if b is None:
                assert a is None or a.numel() == 0
                continue
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_follow_torch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        moe()
        assert _c.library.intarsia_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_threads_never_change_a_result():
    layer = intarsia.MoE(64, 48, experts=8, experts_per_token=2, bias=True)
    x = torch.randn(300, 64, requires_grad=True)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = layer(x)
            runs.append([y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))])
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.skipif(_core.binding()[0] != "shim", reason="needs the shim")
def test_the_shim_asks_for_libtorch():
    """Through libtorch.so a shim that was built with a CPU torch finds the stream functions of a torch with CUDA."""
    section = subprocess.run(["readelf", "-d", _core.binding()[1]], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in section.splitlines() if "(NEEDED)" in line]
    assert {"libtorch.so", "libtorch_cpu.so", "libintarsia.so.0"} <= set(needed)
    assert not any("cuda" in name for name in needed)
