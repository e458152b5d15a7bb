"""The systems that bench/gpu.py times: each makes layer(x, w_router, w_up, w_down) -> y.

x (T, H), w_router (E, H), w_up (E, G*I, H), w_down (E, H, I), y (T, H), bfloat16. Router: softmax, then top-k, not
renormalised, logits rounded to bfloat16 in all but Intarsia, which keeps float32.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import intarsia
from intarsia.presets import PRESETS

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10 on


@dataclass(frozen=True)
class Sizes:
    """One layer's."""

    T: int
    H: int
    I: int
    E: int
    K: int

    @classmethod
    def of(cls, shape: str) -> "Sizes":
        p = PRESETS[shape]
        return cls(p.tokens, p.hidden, p.width, p.experts, p.experts_per_token)


def inputs(s: Sizes, activation: str = "swiglu", seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """[x, w_router, w_up, w_down], which require gradients, and dy."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(scale)

    up = s.I * (2 if activation == "swiglu" else 1)
    leaves = [
        normal(s.T, s.H),
        normal(s.E, s.H, scale=s.H**-0.5),
        normal(s.E, up, s.H, scale=s.H**-0.5),
        normal(s.E, s.H, s.I, scale=s.I**-0.5),
    ]
    return [leaf.requires_grad_() for leaf in leaves], normal(s.T, s.H)


def passes(layer: Layer, leaves: list[Tensor], dy: Tensor) -> tuple[Callable, Callable]:
    """forward() -> y and backward(y) -> every gradient."""
    return lambda: layer(*leaves), lambda y: torch.autograd.grad(y, leaves, dy)


# ---- the bound


class Bound:
    """The layer's six products as balanced batched products and nothing else."""

    def __init__(self, s: Sizes, activation: str):
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        rows, up = s.T * s.K // s.E, s.I * (2 if activation == "swiglu" else 1)
        self.x, self.z, self.a, self.y = (normal(s.E, rows, n) for n in (s.H, up, s.I, s.H))
        self.w_up, self.w_down = normal(s.E, up, s.H), normal(s.E, s.H, s.I)
        self.dx, self.da, self.dw_up, self.dw_down = map(torch.empty_like, (self.x, self.a, self.w_up, self.w_down))

    def forward(self) -> None:
        torch.bmm(self.x, self.w_up.transpose(1, 2), out=self.z)
        torch.bmm(self.a, self.w_down.transpose(1, 2), out=self.y)

    def backward(self, _) -> None:
        torch.bmm(self.y, self.w_down, out=self.da)
        torch.bmm(self.y.transpose(1, 2), self.a, out=self.dw_down)
        torch.bmm(self.z, self.w_up, out=self.dx)
        torch.bmm(self.z.transpose(1, 2), self.x, out=self.dw_up)


# ---- the layers


def choose(x: Tensor, w_router: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """scores (T, K) float32 and ids (T, K) int64, by torch."""
    scores, ids = F.linear(x, w_router).float().softmax(-1).topk(K, -1)
    return scores, ids


def activate(z: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(z)
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def intarsia_layer(K: int, activation: str, save: str = "preactivation") -> Layer:
    def layer(x, w_router, w_up, w_down):
        return intarsia.moe(x, w_router, K, w_up, w_down, scores="softmax", activation=activation, save=save)

    return layer


def intarsia_functions(K: int, activation: str) -> Layer:
    """The same in three calls."""

    def layer(x, w_router, w_up, w_down):
        ids, scores = intarsia.route(intarsia.router_logits(x, w_router), K, scores="softmax")
        return intarsia.moe_mlp(x, ids, scores, w_up, w_down, activation=activation)

    return layer


def combined(rows: Tensor, scores: Tensor, order: Tensor, x: Tensor) -> Tensor:
    """Sorted rows times their scores, summed into their tokens."""
    weighted = rows * scores.flatten()[order].to(rows.dtype).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // scores.shape[1], weighted)


def grouped_mm_layer(K: int, activation: str) -> Layer:
    """Sort, permuted copy, torch's grouped products, index_add."""

    def layer(x, w_router, w_up, w_down):
        scores, ids = choose(x, w_router, K)
        order = torch.argsort(ids.flatten(), stable=True)
        offsets = torch.bincount(ids.flatten(), minlength=w_up.shape[0]).cumsum(0).to(torch.int32)
        z = grouped_mm(x[order // K], w_up.transpose(1, 2), offs=offsets)
        rows = grouped_mm(activate(z, activation), w_down.transpose(1, 2), offs=offsets)
        return combined(rows, scores, order, x)

    return layer


class ExpertLoop(torch.autograd.Function):
    """rows (R, k) sorted by expert, weight (E, n, k), sizes (rows of each expert, on the host) -> (R, n)."""

    @staticmethod
    def forward(ctx, rows, weight, sizes):
        ctx.save_for_backward(rows, weight)
        ctx.sizes = sizes
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for e, (mine, target) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
            torch.mm(mine, weight[e].T, out=target)
        return out

    @staticmethod
    def backward(ctx, dout):
        rows, weight = ctx.saved_tensors
        drows, dweight = torch.empty_like(rows), torch.empty_like(weight)
        parts = (t.split(ctx.sizes) for t in (dout.contiguous(), rows, drows))
        for e, (d, mine, target) in enumerate(zip(*parts, strict=True)):
            torch.mm(d, weight[e], out=target)
            torch.mm(d.T, mine, out=dweight[e])
        return drows, dweight, None


def mb_like_layer(K: int, activation: str) -> Layer:
    """MegaBlocks' grouped mode in torch: sort, permuted copy, counts to the host, one cuBLAS product an expert."""

    def layer(x, w_router, w_up, w_down):
        scores, ids = choose(x, w_router, K)
        order = torch.sort(ids.flatten()).indices
        sizes = torch.bincount(ids.flatten(), minlength=w_up.shape[0]).tolist()
        z = ExpertLoop.apply(x[order // K], w_up, sizes)
        return combined(ExpertLoop.apply(activate(z, activation), w_down, sizes), scores, order, x)

    return layer


def megablocks_layer(K: int, activation: str) -> Layer:
    from grouped_gemm.ops import gmm
    from megablocks import ops

    def layer(x, w_router, w_up, w_down):
        scores, ids = choose(x, w_router, K)
        bin_ids, indices = (t.int() for t in torch.sort(ids.flatten()))
        counts = ops.histogram(ids.flatten().int(), w_up.shape[0])
        bins, sizes = ops.inclusive_cumsum(counts, 0), counts.cpu().long()
        z = gmm(ops.gather(x, indices, bin_ids, bins, K), w_up, sizes, trans_b=True)
        rows = gmm(activate(z, activation), w_down, sizes, trans_b=True)
        return ops.scatter(rows, indices, bin_ids, scores.flatten().to(x.dtype), bins, K)

    return layer


def scattermoe_layer(K: int, activation: str) -> Layer:
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def layer(x, w_router, w_up, w_down):
        scores, ids = choose(x, w_router, K)
        lists = flatten_sort_count(ids, num_experts=w_up.shape[0])
        z = parallel_linear(x, w_up.transpose(1, 2), K, *lists, grouped_out=True)
        gates = scores.to(x.dtype)
        a = activate(z, activation)
        return parallel_linear(a, w_down.transpose(1, 2), 1, *lists, gates=gates, grouped_in=True)

    return layer


def liger_layer(K: int, _: str) -> Layer:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def layer(x, w_router, w_up, w_down):
        scores, ids = choose(x, w_router, K)
        return LigerFusedMoEFunction.apply(x, w_up, w_down, ids.int(), scores.to(x.dtype))

    return layer


def sonicmoe_layer(K: int, _: str) -> Layer:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    stream = torch.cuda.current_stream().cuda_stream

    def layer(x, w_router, w_up, w_down):
        experts_last = (1, 2, 0)
        return moe_TC_softmax_topk_layer(
            x, w_router, w_up.permute(experts_last), None, w_down.permute(experts_last), None, K, stream,
            ActivationType.SWIGLU, False, is_softmax_over_topk=False, norm_topk_probs=False,
        )[0]  # fmt: skip

    return layer


@dataclass(frozen=True)
class System:
    """How a layer is made, of (K, activation), and what it needs."""

    make: Callable[[int, str], Layer]
    modules: tuple[str, ...] = ()
    gated_only: bool = False
    alternating: bool = False  # w_up's rows are gate, up, gate, up, ...

    def missing(self) -> list[str]:
        """Modules that cannot be imported here."""
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


SYSTEMS = {
    "intarsia": System(intarsia_layer),
    "torch_grouped_mm": System(grouped_mm_layer),
    "mb_like": System(mb_like_layer),
    "megablocks": System(megablocks_layer, ("megablocks", "grouped_gemm")),
    "scattermoe": System(scattermoe_layer, ("scattermoe",)),
    "liger": System(liger_layer, ("liger_kernel",), gated_only=True),
    "sonicmoe": System(sonicmoe_layer, ("sonicmoe",), gated_only=True, alternating=True),
}
