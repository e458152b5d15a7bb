"""The functional operators, torch.ops.intarsia.<name>: fake kernels, autograd, backward an operator too."""

from .grouped import grouped_gemm, grouped_gemm_backward
from .layer import layer_backward, layer_forward
from .lists import build_index, round_tokens
from .losses import load_balance_loss, load_balance_loss_backward, z_loss, z_loss_backward
from .moe import moe_forward
from .router import route, route_backward, router_logits, router_logits_backward

__all__ = [
    "build_index", "grouped_gemm", "grouped_gemm_backward", "layer_backward", "layer_forward", "load_balance_loss",
    "load_balance_loss_backward", "moe_forward", "round_tokens", "route", "route_backward", "router_logits",
    "router_logits_backward", "z_loss", "z_loss_backward",
]  # fmt: skip
