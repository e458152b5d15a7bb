"""How a functional operator is made: schema, body, fake kernel, autograd. Its raw counterpart of the same name has
overload .out.
"""

from collections.abc import Callable

import torch

from .. import _core
from ..errors import Unsupported


def define(
    schema: str, kernel: Callable, fake: Callable, setup: Callable | None = None, backward: Callable | None = None
):
    """Registers intarsia::<name> and returns the operator.

    `kernel` allocates the outputs and calls the raw operator; `fake` gives their shapes alone. Without `backward` a
    gradient through the operator is refused in a sentence (or there is none to give, for integer outputs).
    """
    name = schema.partition("(")[0]
    library, qualified = _core.library, f"intarsia::{name}"
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=library)
    if backward is None:
        backward = _refuse(name)
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=library)
    return getattr(torch.ops.intarsia, name).default


def _refuse(name: str):
    if name.endswith("_backward"):
        text = f"{name}: second derivatives are not implemented; call backward() or grad() without create_graph=True"
    else:
        text = f"{name}: its outputs have no gradient; detach them"

    def backward(ctx, *_):
        raise Unsupported(text)

    return backward


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, statistics and losses beside activations of `dtype`: float32, or float64 with float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns for an output that nobody asked for."""
    return like.new_empty((0,))


def wanted(flag: bool, tensor: torch.Tensor) -> torch.Tensor | None:
    """An output as a gradient: None when nobody asked for it."""
    return tensor if flag else None
