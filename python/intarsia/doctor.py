"""Is this installation sound? Versions, processor, GPU, what was loaded, and one layer computed and compared.

Every check is a line: what was found, whether it is in order, and if not the sentence that fixes it.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

LEAST_TORCH = (2, 10)
#: Largest relative error of the self-test: float32 against the float64 reference.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` is empty when `ok`."""

    name: str
    found: str
    ok: bool = True
    fix: str = ""


def examine() -> list[Check]:
    """All checks, in order. Never raises: a part that fails is a red line."""
    checks: list[Check] = []
    for name, part in (("torch", _torch), ("core", _core), ("GPU", _gpu), ("self-test", _self_test)):
        try:
            checks.extend(part())
        except Exception as error:
            fix = "Reinstall the package (pip install --force-reinstall .); if that does not help, report this line."
            checks.append(Check(name, f"{type(error).__name__}: {error}", False, fix))
    return checks


def _torch() -> Iterator[Check]:
    yield Check("Python", platform.python_version())
    new_enough = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= LEAST_TORCH
    fix = "" if new_enough else "Install torch 2.10 or later: pip install 'torch>=2.10'."
    yield Check("torch", torch.__version__, new_enough, fix)


def _core() -> Iterator[Check]:
    from . import __version__, _c

    library = _c.library_directory() / "libintarsia.so"
    core = _c.doctor()
    same = __version__ == core["version"]
    fix = (
        ""
        if same
        else "Package and core are of different versions: reinstall, or point INTARSIA_LIBRARY_DIR at a matching build."
    )
    yield Check("package", __version__)
    yield Check("core", f"{core['version']}, {library}", same, fix)

    from . import _core as bindings

    kind, detail = bindings.binding()
    yield Check("torch binding", f"stable ABI, {detail}" if kind == "shim" else f"C interface: {detail}")
    yield Check(
        "processor", f"{', '.join(core['cpu_features']) or 'no vector extensions known'}; {core['threads']} threads"
    )
    for dtype, how in core["products"].items():
        plain = how.startswith("plain")
        fix = (
            "Products run several times slower than they could: install oneDNN (apt install libdnnl-dev) and reinstall."
            if plain
            else ""
        )
        yield Check(f"{dtype} products", how, not plain, fix)
    test = core["self_test"]
    fix = "" if test["passed"] else "The CPU backend computes wrong numbers here: please report this output."
    yield Check(
        "core self-test", f"relative error {test['relative_error']}, at most {test['tolerance']}", test["passed"], fix
    )


def _gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield Check("GPU", "none that torch can use; layers run on the CPU")
        return
    from . import _c

    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    kernels = (
        ""
        if _c.doctor()["cuda_kernels"]
        else "; this build has no CUDA kernels (no nvcc when it was built), layers run on the CPU"
    )
    yield Check("GPU", f"{names}, CUDA {torch.version.cuda}{kernels}")


def _self_test() -> Iterator[Check]:
    """y and every gradient of a small layer in float32 against the eager specification in float64."""
    from . import moe_mlp, reference

    T, H, I, E, K = 65, 48, 40, 6, 2
    generator = torch.Generator().manual_seed(0)
    x, w_up, w_down, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        for shape in ((T, H), (E, 2 * I, H), (E, H, I), (T, H))
    )
    scores, ids = torch.rand(T, E, generator=generator, dtype=torch.float64).topk(K)

    def results(function, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, scores, w_up, w_down)]
        y = function(leaves[0], ids, *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    got, expected = results(moe_mlp, torch.float32), results(reference.moe_mlp, torch.float64)
    names = ("y", "dx", "dscores", "dw_up", "dw_down")
    errors = {n: ((g.double() - e).norm() / e.norm()).item() for n, g, e in zip(names, got, expected, strict=True)}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    passed = errors[worst] <= TOLERANCE
    fix = "" if passed else "The layer computes wrong numbers here: please report this output."
    yield Check(
        "layer self-test", f"largest relative error {errors[worst]:.1e} ({worst}), at most {TOLERANCE:.0e}", passed, fix
    )
