"""What Python can know about arguments before the core sees them: types, ranks, dtypes, devices, declared layouts,
autocast.

Sizes that must agree are checked by the core, which names both tensors. Messages: argument, expected, got, what to do.
"""

import functools
from collections.abc import Callable
from typing import NoReturn

import torch

from .errors import InvalidArgument

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fail(function: str, argument: str, text: str) -> NoReturn:
    """Raises InvalidArgument `function: argument: text`."""
    raise InvalidArgument(f"{function}: {argument}: {text}")


def contiguous(*tensors) -> tuple:
    """Small tensors (lists, scores, masks) as the core reads them: a copy only of those that are not contiguous
    already.
    """
    return tuple(None if t is None else t.contiguous() for t in tensors)


def tensor(function: str, name: str, value, shape: str, optional: bool = False) -> None:
    """`value` must be a tensor with as many axes as `shape`, for instance "(T, H)"; None passes when optional."""
    if optional and value is None:
        return
    rank = shape.count(",") + 1
    if not isinstance(value, torch.Tensor):
        fail(function, name, f"expected a tensor {shape}, got {type(value).__name__}")
    if value.dim() != rank:
        fail(function, name, f"expected {shape}, got shape {tuple(value.shape)}; reshape it")


def choice(function: str, name: str, value, allowed: tuple[str, ...]) -> None:
    """`value` must be one of the spellings."""
    if value not in allowed:
        fail(function, name, f"expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def same_device(function: str, x: torch.Tensor, **others) -> None:
    """All tensors must be where x is."""
    device = x.device
    for name, value in others.items():
        if value is not None and value.device != device:
            text = f"expected device {device} like x, got {value.device}; move it with .to({str(device)!r})"
            fail(function, name, text)


def counts(function: str, value: torch.Tensor, x: torch.Tensor, experts: int) -> None:
    """A tensor that takes the rows of each expert."""
    if value.shape != (experts,) or value.dtype != torch.int32:
        fail(function, "counts", f"expected ({experts},) int32, got {tuple(value.shape)} {value.dtype}")
    same_device(function, x, counts=value)


def gate_block(function: str, layout) -> int:
    """Weights::gate_block of a declared layout of w_up's rows."""
    named = {"concatenated": 0, "interleaved": 1}
    if isinstance(layout, str) and layout in named:
        return named[layout]
    blocks = isinstance(layout, tuple) and len(layout) == 2 and layout[0] == "blocks"
    if not (blocks and isinstance(layout[1], int) and layout[1] > 0):
        fail(function, "layout", f'expected "concatenated", "interleaved" or ("blocks", n), got {layout!r}')
    return layout[1]


def pair(function: str, w_up, gated: bool, layout) -> tuple:
    """w_up as (tensor, second tensor or None)."""
    if not isinstance(w_up, tuple | list):
        return w_up, None
    if len(w_up) != 2:
        fail(function, "w_up", f"expected a tensor or the two tensors (gate, up), got {len(w_up)} of them")
    if not gated:
        fail(function, "w_up", "expected one tensor, since the activation is not gated; got (gate, up)")
    if layout != "concatenated":
        fail(function, "layout", f'expected "concatenated" when gate and up are two tensors, got {layout!r}')
    return tuple(w_up)


def autocast_is_on(x: torch.Tensor) -> bool:
    """Whether torch.autocast covers x's device; the meta device has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def must_look() -> bool:
    """Whether tensors may need a cast, or are those of torch.compile: else the core's own checks of a call suffice."""
    return torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()


def autocast(x: torch.Tensor, *tensors) -> tuple:
    """x and the tensors in the dtype of torch.autocast where it is on; as they are where it is off, and float64
    always.
    """
    if x.dtype == torch.float64 or not autocast_is_on(x):
        return (x, *tensors)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if t is None else t.to(dtype) for t in (x, *tensors))


def activations(function: str, name: str, x: torch.Tensor) -> None:
    """x must be floating point."""
    if x.dtype not in _FLOATS:
        fail(
            function, name, f"expected float32, bfloat16, float16 or float64, got {x.dtype}; convert it with .to(dtype)"
        )


def same_dtype(function: str, x: torch.Tensor, or_float32: bool = False, **others) -> None:
    """Weights must have x's dtype; biases and the router's weight may be float32 too."""
    dtype = x.dtype
    for name, value in others.items():
        if value is None or value.dtype == dtype or (or_float32 and value.dtype == torch.float32):
            continue
        expected = f"{dtype} like x" + (" (or torch.float32)" if or_float32 else "")
        fail(
            function, name, f"expected {expected}, got {value.dtype}; convert one of them, or run under torch.autocast"
        )


def requires_gradient(*tensors) -> bool:
    """Whether autograd will record a function of these tensors (or None)."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def once(function: Callable) -> Callable:
    """`function` of plain values, called once for the same ones. torch.compile looks at the function itself."""
    kept = functools.lru_cache(maxsize=1024, typed=True)(function)

    def call(*values):
        if torch.compiler.is_compiling():
            return function(*values)
        try:
            return kept(*values)
        except TypeError:  # a list, say, which no cache takes: the function has words for it
            return function(*values)

    return call
