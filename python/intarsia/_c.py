"""libintarsia.so by ctypes: the C interface of include/intarsia/c_api.h, which needs no torch at build time."""

import ctypes
import json
import os
from pathlib import Path

from .errors import CoreNotFound, Error, InvalidArgument, Unsupported

ABI_VERSION = 1  # INTARSIA_ABI_VERSION of c_api.h

_TENSOR, _INTEGER, _REAL, _TEXT = range(4)
_STATUS_ERRORS = {1: InvalidArgument, 2: Unsupported, 3: MemoryError}


class DLTensor(ctypes.Structure):
    """A borrowed view of a tensor (DLPack)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Argument(ctypes.Structure):
    """One named argument: intarsia_argument."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("tensor", ctypes.POINTER(DLTensor)),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("text", ctypes.c_char_p),
    ]


def library_directory() -> Path:
    """Where the shared libraries are: beside this file, or INTARSIA_LIBRARY_DIR (for instance a CMake build
    directory).
    """
    return Path(os.environ.get("INTARSIA_LIBRARY_DIR") or Path(__file__).parent)


def _load() -> ctypes.CDLL:
    path = library_directory() / "libintarsia.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CoreNotFound(
            f"intarsia: {path} cannot be loaded ({error}). Install the package with pip, or point INTARSIA_LIBRARY_DIR "
            "at a directory where CMake has built it."
        ) from error
    arguments = ctypes.POINTER(Argument)
    text = ctypes.POINTER(ctypes.c_char_p)
    for name, restype, argtypes in (
        ("abi_version", ctypes.c_int, []),
        ("version", ctypes.c_char_p, []),
        ("last_error", ctypes.c_char_p, []),
        ("run", ctypes.c_int, [ctypes.c_char_p, arguments, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p]),
        ("explain", ctypes.c_int, [ctypes.c_char_p, arguments, ctypes.c_size_t, ctypes.c_char_p, text]),
        ("operation", ctypes.c_char_p, [ctypes.c_size_t]),
        ("schema", ctypes.c_char_p, [ctypes.c_char_p]),
        ("plan", ctypes.c_int, [arguments, ctypes.c_size_t, text]),
        ("doctor", ctypes.c_int, [text]),
        ("num_threads", ctypes.c_int, []),
        ("set_num_threads", ctypes.c_int, [ctypes.c_int]),
        ("memory", None, [ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]),
        ("memory_reset", None, []),
    ):
        function = getattr(library, f"intarsia_{name}")
        function.restype, function.argtypes = restype, argtypes
    found = library.intarsia_abi_version()
    if found != ABI_VERSION:
        raise CoreNotFound(
            f"intarsia: {path} has ABI version {found}, this package needs {ABI_VERSION}; reinstall so that both "
            "come from one version"
        )
    return library


library = _load()


def _check(status: int) -> None:
    if status:
        raise _STATUS_ERRORS.get(status, Error)(library.intarsia_last_error().decode())


def _dl_types() -> dict:
    import torch

    return {
        torch.float64: (2, 64), torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16),
        torch.int64: (0, 64), torch.int32: (0, 32), torch.bool: (6, 8),
    }  # fmt: skip


def _dl_tensor(name: str, tensor) -> DLTensor:
    code = _dl_types().get(tensor.dtype)
    if code is None:
        raise InvalidArgument(
            f"{name}: expected float32, bfloat16, float16, float64, int32, int64 or bool, got {tensor.dtype}; "
            "convert it with .to(dtype)"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name}: expected a CPU or CUDA tensor, got {tensor.device}; move it with .to(device)")
    n = tensor.dim()
    if not 1 <= n <= 3:
        raise InvalidArgument(f"{name}: expected 1 to 3 dimensions, got {n}; reshape it")
    shape, strides = (ctypes.c_int64 * n)(*tensor.shape), (ctypes.c_int64 * n)(*tensor.stride())
    cuda = tensor.device.type == "cuda"
    return DLTensor(
        tensor.data_ptr(), 2 if cuda else 1, tensor.device.index or 0 if cuda else 0, n, *code, 1, shape, strides, 0
    )  # fmt: skip


def _arguments(operation: str, values: dict):
    """An array of named arguments; also returns what must outlive the call."""
    array, keep = (Argument * len(values))(), []
    for argument, (name, value) in zip(array, values.items(), strict=True):
        argument.name = name.encode()
        if value is None or hasattr(value, "data_ptr"):
            argument.kind = _TENSOR
            if value is not None:
                keep.append(_dl_tensor(f"{operation}: {name}", value))
                argument.tensor = ctypes.pointer(keep[-1])
        elif isinstance(value, str):
            argument.kind, argument.text = _TEXT, value.encode()
        elif isinstance(value, float):
            argument.kind, argument.real = _REAL, value
        else:
            argument.kind, argument.integer = _INTEGER, int(value)
    return array, keep


def run(operation: str, values: dict, backend: str = "automatic", stream: int | None = None) -> None:
    """intarsia_run on torch tensors."""
    array, keep = _arguments(operation, values)
    _check(library.intarsia_run(operation.encode(), array, len(values), backend.encode(), stream))
    del keep


def explain(operation: str, values: dict, backend: str = "automatic") -> str:
    """What would run the operation on these arguments, and why not something faster."""
    array, keep = _arguments(operation, values)
    text = ctypes.c_char_p()
    _check(library.intarsia_explain(operation.encode(), array, len(values), backend.encode(), ctypes.byref(text)))
    del keep
    return text.value.decode()


def plan(**values) -> dict:
    """The memory plan of a layer: fields of LayerShape and PlanOptions in plan.h (tokens, hidden, width, ..., save,
    ...).
    """
    array, _ = _arguments("plan", values)
    text = ctypes.c_char_p()
    _check(library.intarsia_plan(array, len(values), ctypes.byref(text)))
    return json.loads(text.value)


def doctor() -> dict:
    """Versions, processor features and loaded libraries as the core sees them."""
    text = ctypes.c_char_p()
    _check(library.intarsia_doctor(ctypes.byref(text)))
    return json.loads(text.value)


def operations() -> list[str]:
    """Names of all operations."""
    names, i = [], 0
    while (name := library.intarsia_operation(i)) is not None:
        names.append(name.decode())
        i += 1
    return names


def schema(operation: str) -> str:
    """The operation as a torch schema."""
    return library.intarsia_schema(operation.encode()).decode()


def set_num_threads(threads: int) -> None:
    """Threads of the CPU backend's own pool."""
    _check(library.intarsia_set_num_threads(threads))


def memory() -> tuple[int, int]:
    """Bytes of the core's host allocator plus workspaces on GPUs: (now, at most since memory_reset)."""
    live, peak = ctypes.c_size_t(), ctypes.c_size_t()
    library.intarsia_memory(ctypes.byref(live), ctypes.byref(peak))
    return live.value, peak.value


def memory_reset() -> None:
    """Forgets the peak."""
    library.intarsia_memory_reset()


def version() -> str:
    """Version of the core."""
    return library.intarsia_version().decode()
