"""intarsia.MoE: router, experts and shared expert as one torch module."""

import math

import torch
from torch import Tensor, nn

from . import _arguments as check
from . import functional as F
from . import routing
from .errors import InvalidArgument
from .functional import GATED, Routing
from .losses import update_expert_bias
from .presets import Preset, get_preset

__all__ = ["MoE", "SharedExpert"]


class SharedExpert(nn.Module):
    """An MLP that every token takes: act(x w_up^T) w_down^T, times sigmoid(x w_gate^T) when `gated` (Qwen2-MoE,
    Qwen3-Next).
    """

    def __init__(
        self, hidden: int, width: int, *, activation: str = "swiglu", gated: bool = False, device=None, dtype=None
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        factor = 2 if activation in GATED else 1
        self.activation = activation
        self.w_up = nn.Parameter(torch.empty(factor * width, hidden, **factory))
        self.w_down = nn.Parameter(torch.empty(hidden, width, **factory))
        self.w_gate = nn.Parameter(torch.empty(1, hidden, **factory)) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every weight uniform in +-1/sqrt(its input width), as torch.nn.Linear."""
        for weight in self.parameters():
            _uniform(weight, weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H): one expert that all rows go to."""
        offsets = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]  # made on the device: no host sync
        y = F.grouped_mlp(x, offsets, self.w_up.unsqueeze(0), self.w_down.unsqueeze(0), activation=self.activation)
        return y if self.w_gate is None else torch.sigmoid(nn.functional.linear(x, self.w_gate)).to(y.dtype) * y

    def extra_repr(self) -> str:
        hidden, width = self.w_down.shape
        return f"hidden={hidden}, width={width}, activation={self.activation}, gated={self.w_gate is not None}"


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer: x (..., H) -> y (..., H), in x's dtype (or autocast's).

    Parameters: w_router (E, H), b_router (E); w_up (E, G*I, H) with rows in `layout`, w_down (E, H, I), or both (E,
    in, out) when `transposed`; b_up (E, G*I), b_down (E, H) with `bias`. Buffer expert_bias (E) float32 with
    scores="sigmoid_group": it moves the choice only; call `update_expert_bias()` after each optimizer step.
    `rounding` trains with token rounding (scores="softmax" only); in eval mode tokens always take their top-k.
    `last_counts` (E) int32: rows per expert in the last call, on the device. Arguments are those of moe_mlp, route
    and round_tokens.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        experts: int,
        experts_per_token: int,
        *,
        scores: str = "softmax_renorm",
        activation: str = "swiglu",
        layout: F.Layout = "concatenated",
        transposed: bool = False,
        bias: bool = False,
        router_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        renormalise: bool = True,
        scale: float = 1.0,
        score_on: str = "output",
        save: str = "preactivation",
        logits_dtype: str = "float32",
        rounding: str | None = None,
        tile: int = 128,
        shared_width: int = 0,
        shared_gated: bool = False,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self._check(locals())
        self.hidden, self.width, self.experts, self.experts_per_token = hidden, width, experts, experts_per_token
        self.scores, self.groups, self.top_groups = scores, groups, top_groups
        self.renormalise, self.scale, self.logits_dtype = renormalise, scale, logits_dtype
        self.activation, self.layout, self.transposed, self.score_on = activation, layout, transposed, score_on
        self.save, self.rounding, self.tile, self.backend = save, rounding, tile, backend
        factory = {"device": device, "dtype": dtype}
        rows = width * (2 if activation in GATED else 1)

        def weight(out: int, into: int) -> nn.Parameter:
            return nn.Parameter(torch.empty((experts, into, out) if transposed else (experts, out, into), **factory))

        def vector(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **factory)) if wanted else None

        self.w_router = nn.Parameter(torch.empty(experts, hidden, **factory))
        self.b_router = vector(router_bias, experts)
        self.w_up, self.w_down = weight(rows, hidden), weight(hidden, width)
        self.b_up, self.b_down = vector(bias, experts, rows), vector(bias, experts, hidden)
        self.shared = (
            SharedExpert(hidden, shared_width, activation=activation, gated=shared_gated, **factory)
            if shared_width
            else None
        )
        grouped = scores == "sigmoid_group"
        self.register_buffer(
            "expert_bias", torch.zeros(experts, device=device, dtype=torch.float32) if grouped else None
        )
        self.register_buffer("last_counts", torch.zeros(experts, device=device, dtype=torch.int32), persistent=False)
        self.reset_parameters()

    @staticmethod
    def _check(a: dict) -> None:
        for name in ("hidden", "width", "experts", "experts_per_token"):
            if a[name] < 1:
                check.fail("MoE", name, f"expected at least 1, got {a[name]}")
        routing.check_k("MoE", a["experts_per_token"], a["experts"], "experts_per_token")
        check.choice("MoE", "scores", a["scores"], routing.ROUTER_SCORES)
        check.choice("MoE", "activation", a["activation"], F.ACTIVATIONS)
        check.choice("MoE", "score_on", a["score_on"], F.SCORE_PLACEMENTS)
        check.choice("MoE", "save", a["save"], F.SAVE_MODES)
        check.choice("MoE", "logits_dtype", a["logits_dtype"], routing.LOGITS_DTYPES)
        check.gate_block("MoE", a["layout"])
        if a["rounding"] is not None:
            check.choice("MoE", "rounding", a["rounding"], routing.ROUNDINGS)
            if a["scores"] != "softmax":
                check.fail("MoE", "rounding", f'expected scores="softmax" with token rounding, got {a["scores"]!r}')

    @classmethod
    def from_preset(cls, name: str, **changes) -> "MoE":
        """The layer of a public model, for instance "qwen3-30b-a3b" (intarsia.presets); `changes` override its
        fields.
        """
        preset: Preset = get_preset(name)
        fields = {n: v for n, v in vars(preset).items() if n not in ("name", "tokens", "source")}
        return cls(**(fields | changes))

    def reset_parameters(self) -> None:
        """Weights uniform in +-1/sqrt(their input width) as torch.nn.Linear (w_router and w_up: H, w_down: I); biases
        zero.
        """
        _uniform(self.w_router, self.hidden)
        _uniform(self.w_up, self.hidden)
        _uniform(self.w_down, self.width)
        with torch.no_grad():
            for vector in (self.b_router, self.b_up, self.b_down, self.expert_bias, self.last_counts):
                if vector is not None:
                    vector.zero_()
        if self.shared is not None:
            self.shared.reset_parameters()

    def forward(
        self, x: Tensor, *, token_mask: Tensor | None = None, addend: Tensor | None = None, return_routing: bool = False
    ):
        """y (..., H) = addend + shared expert + routed experts; (y, Routing) when `return_routing`.

        token_mask (...) bool: False tokens reach no routed expert and are not counted. addend (..., H): for instance
        the residual.
        """
        shape = x.shape
        if len(shape) < 1 or shape[-1] != self.hidden:
            check.fail("MoE", "x", f"expected (..., {self.hidden}), got {tuple(shape)}")
        flat = len(shape) == 2
        x_TH = x if flat else x.reshape(-1, self.hidden)
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        addend_TH = None if addend is None else addend.reshape(-1, self.hidden)
        found = self._forward(x_TH, mask_T, addend_TH, return_routing)
        if flat:
            return found
        return (found[0].reshape(shape), found[1]) if return_routing else found.reshape(shape)

    def _forward(
        self, x: Tensor, token_mask: Tensor | None, addend: Tensor | None, return_routing: bool
    ) -> Tensor | tuple[Tensor, Routing]:
        """On tokens (T, H). Sets last_counts."""
        shared = self.shared
        if shared is not None or addend is not None:
            (x,) = check.autocast(x)
            addend = None if addend is None else addend.to(x.dtype)
        if shared is not None:
            shared_TH = shared(x)
            addend = shared_TH if addend is None else addend + shared_TH
        if self._rounds():
            found = self.route(x, token_mask)
            y = F.moe_mlp(
                x, found.lists, None, self.w_up, self.w_down, b_up=self.b_up, b_down=self.b_down,
                activation=self.activation, layout=self.layout, transposed=self.transposed, score_on=self.score_on,
                save=self.save, addend=addend, backend=self.backend,
            )  # fmt: skip
            torch.diff(found.lists.expert_offsets, out=self.last_counts)
            return (y, found) if return_routing else y
        return F.moe(
            x, self.w_router, self.experts_per_token, self.w_up, self.w_down, b_router=self.b_router,
            scores=self.scores, expert_bias=self.expert_bias, groups=self.groups, top_groups=self.top_groups,
            renormalise=self.renormalise, scale=self.scale, logits_dtype=self.logits_dtype, token_mask=token_mask,
            counts=self.last_counts, b_up=self.b_up, b_down=self.b_down, activation=self.activation, layout=self.layout,
            transposed=self.transposed, score_on=self.score_on, save=self.save, addend=addend, backend=self.backend,
            return_routing=return_routing,
        )  # fmt: skip

    def _rounds(self) -> bool:
        return self.rounding is not None and self.training

    def route(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        """The router alone: x (T, H) -> Routing. With token rounding in training mode the lists carry their own
        scores.
        """
        options = {"token_mask": token_mask, "backend": self.backend}
        logits = F.router_logits(x, self.w_router, self.b_router, logits_dtype=self.logits_dtype, backend=self.backend)
        ids, scores = F.route(
            logits, self.experts_per_token, scores=self.scores, expert_bias=self.expert_bias, groups=self.groups,
            top_groups=self.top_groups, renormalise=self.renormalise, scale=self.scale, **options,
        )  # fmt: skip
        if self._rounds():
            lists = F.round_tokens(logits, self.experts_per_token, tile=self.tile, rounding=self.rounding, **options)
        else:
            lists = F.build_index(ids, self.experts, backend=self.backend)
        return Routing(logits, ids, scores, lists)

    def update_expert_bias(self, rate: float = 1e-3, counts: Tensor | None = None) -> None:
        """Moves expert_bias towards balance by the last call's counts, or by `counts` (E), for instance summed over
        ranks.
        """
        if self.expert_bias is None:
            raise InvalidArgument('MoE: update_expert_bias: expected scores="sigmoid_group", got ' + repr(self.scores))
        update_expert_bias(self.expert_bias, self.last_counts if counts is None else counts, rate)

    def _apply(self, fn, recurse=True):
        """.to(bfloat16) is meant for weights: in bfloat16 the steps of expert_bias would vanish, so it stays in
        float32.
        """
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, width={self.width}, experts={self.experts}, "
            f"experts_per_token={self.experts_per_token}, "
            f"scores={self.scores}, activation={self.activation}, save={self.save}"
        )


def _uniform(weight: Tensor, inputs: int) -> None:
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(weight, -bound, bound)
