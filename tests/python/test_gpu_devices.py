"""Devices and streams: what is current in a thread stays as it was, no context appears on a GPU that is not used, and a
device, stream or amount of memory that cannot be had is refused in a sentence.

Calls go through the C interface, which takes the stream as it is given and workspaces from the device's memory pool.
"""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch
from gpu_device import MARKS, by_ids, cuda_only, draw, forward_fields, generator, random_ids

import intarsia
from intarsia import _c, _core

pytestmark = [*MARKS, cuda_only]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

T, H, I, E, K = 300, 64, 48, 8, 2


def fields(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, sizes: tuple = (T, H, I, E, K)) -> dict:
    """Arguments of a layer_forward, y full of NaN."""
    tokens, hidden, width, experts, k = sizes
    routing = by_ids(random_ids(generator(), tokens, experts, k))
    layer = draw(routing, hidden, width, experts, dtype)
    values = forward_fields(routing.lists(experts), layer, y=torch.full_like(layer["x"], torch.nan))
    values = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return values


def expected(values: dict) -> torch.Tensor:
    """The same call where nothing is unusual."""
    with torch.cuda.device(values["y"].device):
        y = torch.full_like(values["y"], torch.nan)
        _c.run("layer_forward", values | {"y": y}, stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    assert y.isfinite().all()
    return y


def current_context() -> int | None:
    """The driver's context of this thread, None without one."""
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def in_a_new_thread(function):
    """What function returns in a thread that has not used CUDA."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_thread_without_a_context_has_none_afterwards(dtype):
    values = fields(dtype=dtype)
    want, stream = expected(values), torch.cuda.current_stream().cuda_stream

    def call():
        before = current_context()
        _c.run("layer_forward", values, stream=stream)
        return before, current_context()

    assert in_a_new_thread(call) == (None, None)
    torch.cuda.synchronize()
    assert torch.equal(values["y"], want)


@pytest.mark.parametrize("index", [-1, 63, 64, 1 << 20])
def test_a_device_that_is_not_there(index):
    array, keep = _c._arguments("layer_forward", fields())
    for tensor in keep:
        tensor.device_id = index
    assert _c.library.intarsia_run(b"layer_forward", array, len(array), b"automatic", None) == 2  # unsupported
    count = torch.cuda.device_count()
    sentence = f"layer_forward: there is no CUDA device {index}, only {count}"
    assert _c.library.intarsia_last_error().decode() == sentence


def test_no_memory_for_a_workspace():
    """MemoryError, and the next call is right."""
    values = fields(sizes=(16384, 512, 4096, 4, 4))
    _core.memory_reset()
    live, _ = _core.memory()
    want = expected(values)
    workspace = _core.memory()[1] - live
    assert workspace > 256 << 20  # far more than what pools round up to
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - workspace // 2, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    with pytest.raises(MemoryError):
        _c.run("layer_forward", values, stream=stream)
    del hog
    torch.cuda.empty_cache()
    _c.run("layer_forward", values, stream=stream)
    torch.cuda.synchronize()
    assert torch.equal(values["y"], want)


def test_explain_refuses_what_run_refuses():
    values = fields()
    values["y"] = values["y"][:-1]
    with pytest.raises(intarsia.InvalidArgument) as of_run:
        _c.run("layer_forward", values)
    with pytest.raises(intarsia.InvalidArgument) as of_explain:
        _c.explain("layer_forward", values)
    assert str(of_explain.value) == str(of_run.value)


@two_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_on_another_device_than_the_current_one(dtype):
    """On its default stream, many times: freed in another stream's order, a workspace would be used again too early."""
    values = fields("cuda:1", dtype)
    want, ys = expected(values), [torch.full_like(values["y"], torch.nan) for _ in range(50)]
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        context = current_context()
        for y in ys:
            _c.run("layer_forward", values | {"y": y})
        assert current_context() == context
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert all(torch.equal(y, want) for y in ys)


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["null", "legacy", "per thread"])
def test_default_streams(stream):
    """By the handles that CUDA has for them."""
    values = fields()
    want = expected(values)
    _c.run("layer_forward", values, stream=stream)
    torch.cuda.synchronize()
    assert torch.equal(values["y"], want)


@two_devices
@pytest.mark.parametrize("operation", ["layer_forward", "moe_forward", "moe_backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stream_of_another_device_is_refused(operation, dtype):
    """Before anything is launched: the driver would run the kernels on the stream's device."""
    values = fields("cuda:1", dtype)
    want, foreign = expected(values), torch.cuda.Stream("cuda:0")
    given = values if operation == "layer_forward" else {"x": values["x"]}
    with pytest.raises(
        intarsia.InvalidArgument, match=f"{operation}: stream: expected a stream of cuda:1, where the tensors are"
    ):
        _c.run(operation, given, stream=foreign.cuda_stream)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert torch.equal(expected(values), want)
    assert values["y"].isnan().all()


@two_devices
def test_no_context_on_a_gpu_that_is_not_used():
    """All tensors on cuda:1; forward here and in a thread, backward in torch's thread for that device."""
    script = """
import ctypes, threading
import torch, intarsia
from intarsia import _c

def active():
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(state)) == 0
    return bool(state.value)

x, w_up, w_down, scores, ids = torch.randn(64, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32), torch.rand(64, 2), \
    torch.randint(4, (64, 2))
x, w_up, w_down, scores, ids = (t.to("cuda:1") for t in (x, w_up, w_down, scores, ids))
stream = torch.cuda.current_stream("cuda:1").cuda_stream
logits = torch.empty(64, 4, device="cuda:1")
torch.cuda.synchronize(1)
print(active())
call = {"x": x, "w_router": w_up[:, 0].contiguous(), "logits": logits}
thread = threading.Thread(target=_c.run, args=("router_logits", call), kwargs={"stream": stream})
thread.start()
thread.join()
print(active())
x.requires_grad_()
intarsia.moe_mlp(x, ids, scores, w_up, w_down).backward(torch.ones_like(x))
torch.cuda.synchronize(1)
print(active())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True, timeout=50
    )
    assert result.returncode == 0, result.stderr
    before, *after = result.stdout.split()
    if before == "True":
        pytest.skip("torch made a context on GPU 0 by itself")
    assert after == ["False", "False"]
