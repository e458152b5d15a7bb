"""Mixture-of-Experts layers for training: forward and backward at the machine's speed, with the least memory.

y = intarsia.moe_mlp(x, ids, scores, w_up, w_down)      # functions: intarsia.functional, intarsia.losses
layer = intarsia.MoE(512, 1024, experts=8, experts_per_token=2)
"""

from .errors import CoreNotFound, Error, InvalidArgument, Unsupported

try:
    from . import losses, presets, reference
    from ._c import explain, version
    from ._core import binding
    from .functional import (
        IndexLists,
        Routing,
        build_index,
        grouped_gemm,
        grouped_mlp,
        moe,
        moe_mlp,
        round_tokens,
        route,
        router_logits,
    )
    from .layer import MoE, SharedExpert

    __version__ = version()
except CoreNotFound as error:  # `intarsia doctor` must still be able to say so; any other use raises this error
    _core_error = error

    def __getattr__(name: str):
        raise CoreNotFound(str(_core_error)) from _core_error


__all__ = [
    "Error", "IndexLists", "InvalidArgument", "MoE", "Routing", "SharedExpert", "Unsupported", "binding",
    "build_index", "explain", "grouped_gemm", "grouped_mlp", "losses", "moe", "moe_mlp", "presets",
    "reference", "round_tokens", "route", "router_logits",
]  # fmt: skip
