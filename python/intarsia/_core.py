"""The operations of the core as raw torch operators, intarsia::<name>.out, and the one place that calls them.

Two bindings serve the same schemas: the shim (libintarsia_torch.so, LibTorch's stable ABI), or ctypes over the C
interface where the shim was not built or does not load. INTARSIA_BINDING=c chooses the second.
"""

import os

import torch

from . import _c
from .errors import InvalidArgument, Unsupported

library = torch.library.Library("intarsia", "DEF")

DTYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
}  # fmt: skip
_TYPED = {
    "intarsia.InvalidArgument: ": InvalidArgument, "intarsia.Unsupported: ": Unsupported,
    "intarsia.OutOfMemory: ": torch.OutOfMemoryError,
}  # fmt: skip


def refuse_a_mix(name: str, arguments: tuple) -> None:
    """For fake kernels: torch calls them with tensors that are there, too, when another one is on the meta device."""
    first = next(t for t in arguments if isinstance(t, torch.Tensor))
    if not first.is_meta and type(first) in (torch.Tensor, torch.nn.Parameter):
        raise InvalidArgument(f"{name}: expected all tensors on {first.device} like the first, got one on meta")


class _Raw:
    """One raw operator: the names of its arguments, in order."""

    def __init__(self, name: str):
        self.name = name
        schema = _c.schema(name)
        library.define(schema)
        self.schema = torch._C.parse_schema(schema)
        self.names = [argument.name for argument in self.schema.arguments]
        self.known = frozenset(self.names)
        torch.library.register_fake(f"intarsia::{name}.out", lambda *a: refuse_a_mix(name, a), lib=library)
        self.call = getattr(torch.ops.intarsia, name).out


def _through_c(raw: _Raw):
    def kernel(*arguments):
        values = dict(zip(raw.names, arguments, strict=True))
        backend = values.pop("backend")
        stream = None
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                stream = torch.cuda.current_stream(value.device).cuda_stream
        _c.set_num_threads(torch.get_num_threads())
        _c.run(raw.name, values, backend, stream)

    return kernel


def _bind() -> tuple[str, str]:
    """Gives every raw operator its implementation; which binding is live and why."""
    shim = _c.library_directory() / "libintarsia_torch.so"
    if os.environ.get("INTARSIA_BINDING") == "c":
        reason = "INTARSIA_BINDING=c"
    elif not shim.exists():
        reason = f"{shim} does not exist: the package was built without torch"
    else:
        try:
            torch.ops.load_library(shim)
        except OSError as error:
            reason = f"{shim} does not load with torch {torch.__version__}: {error}"
        else:
            return "shim", str(shim)
    for raw in raw_operators.values():
        for key in ("CPU", "CUDA"):
            library.impl(f"{raw.name}.out", _through_c(raw), key)
    return "c", reason


raw_operators = {name: _Raw(name) for name in _c.operations()}
_binding = _bind()


def binding() -> tuple[str, str]:
    """How torch reaches the core: ("shim", path) or ("c", why not the shim)."""
    return _binding


def num_threads() -> int:
    """Threads that the CPU backend uses in this process: torch's, in both bindings."""
    return torch.get_num_threads()


plan, doctor, memory, memory_reset = _c.plan, _c.doctor, _c.memory, _c.memory_reset


def native(schema: str):
    """The operator of that schema which the shim has beside the raw ones, or None without it."""
    if _binding[0] != "shim":
        return None
    library.define(schema)
    name, _, overload = schema.partition("(")[0].partition(".")
    return getattr(getattr(torch.ops.intarsia, name), overload or "default")


def run(operation: str, **fields) -> None:
    """Runs one operation of ops.h or moe.h on torch tensors, writing its outputs. Tensors left out are absent; values
    must be given.

    Raises InvalidArgument (a ValueError) or Unsupported (a NotImplementedError), before anything is written; where a
    step of moe_forward or moe_backward refuses, after what the steps before it wrote.
    """
    raw = raw_operators[operation]
    if not raw.known.issuperset(fields):
        unknown = [name for name in fields if name not in raw.known]
        raise InvalidArgument(f"{operation}: no argument is called {', '.join(unknown)}")
    fields.setdefault("backend", "automatic")
    call(raw.call, *map(fields.get, raw.names))


def call(operator, *arguments):
    """operator(*arguments), one of torch.ops.intarsia, with errors of our own classes and torch's OutOfMemoryError."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        for prefix, kind in _TYPED.items():
            if str(error).startswith(prefix):
                raise kind(str(error).removeprefix(prefix)) from None
        raise
