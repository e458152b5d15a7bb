"""Random expert layers for the tests: what is drawn, how it is run, and how results are judged.

Judged per tensor: |got - ref| <= u * N in the Frobenius norm, ref in float64 from the very same inputs, u = 2^-7 for
bf16, 2^-10 for fp16, 1e-6 for fp32, and N the norm of the same products over absolute values.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import intarsia
from intarsia import reference

UNIT = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
ROUTINGS = ("uniform", "one expert", "few experts", "sentinels", "duplicates", "nobody")


@dataclass(frozen=True)
class Spec:
    """One expert layer and one routing."""

    tokens: int = 12
    hidden: int = 16
    width: int = 8
    experts: int = 4
    k: int = 2
    dtype: torch.dtype = torch.float32
    activation: str = "swiglu"
    layout: object = "concatenated"  # or "pair"
    transposed: bool = False
    b_up: bool = False
    b_down: bool = False
    score_on: str = "output"
    save: str = "preactivation"
    addend: bool = False
    mask: bool = False
    routing: str = "uniform"
    ids_dtype: torch.dtype = torch.int32
    seed: int = 0

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def keywords(self) -> dict:
        """Arguments that the function and the specification share."""
        layout = "concatenated" if self.layout == "pair" else self.layout
        return {
            "activation": self.activation, "layout": layout, "transposed": self.transposed, "score_on": self.score_on
        }  # fmt: skip


@st.composite
def specs(draw, max_tokens=300, max_size=130, max_experts=40, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """Every shape, routing, dtype, layout, activation, bias and mode that the layer takes."""
    small = st.integers(1, 9)
    size = st.one_of(small, st.integers(1, max_size))
    experts = draw(st.one_of(small, st.integers(1, max_experts)))
    width = draw(size)
    activation = draw(st.sampled_from(GATED + PLAIN))
    layouts = ["concatenated"]
    if activation in GATED:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        layouts += ["interleaved", "pair", ("blocks", draw(st.sampled_from(divisors)))]
    score_on = draw(st.sampled_from(["output", "output", "inside", "input"]))
    return Spec(
        tokens=draw(st.one_of(small, st.integers(0, max_tokens))),
        hidden=draw(size),
        width=width,
        experts=experts,
        k=draw(st.integers(1, min(experts, 8)) | st.integers(1, experts)),
        dtype=draw(st.sampled_from(dtypes)),
        activation=activation,
        layout=draw(st.sampled_from(layouts)),
        transposed=draw(st.booleans()),
        b_up=draw(st.booleans()) and score_on != "input",
        b_down=draw(st.booleans()),
        score_on=score_on,
        save=draw(st.sampled_from(["preactivation", "input"])),
        addend=draw(st.booleans()),
        mask=draw(st.booleans()),
        routing=draw(st.sampled_from(ROUTINGS)),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def draw_ids(spec: Spec, g: torch.Generator) -> torch.Tensor:
    """(T, K) ids of the spec's routing."""
    shape, e = (spec.tokens, spec.k), spec.experts
    distinct = torch.rand(spec.tokens, e, generator=g).argsort(1)[:, : spec.k]
    kinds = {
        "uniform": lambda: distinct,
        "one expert": lambda: torch.full(shape, e - 1),
        "few experts": lambda: torch.randint(0, max(1, e // 4), shape, generator=g),
        "sentinels": lambda: torch.randint(-2, e + 2, shape, generator=g),
        "duplicates": lambda: torch.randint(0, e, (spec.tokens, 1), generator=g).expand(shape),
        "nobody": lambda: torch.full(shape, -1),
    }
    return kinds[spec.routing]().to(spec.ids_dtype).contiguous()


def draw_inputs(spec: Spec) -> dict:
    """Tensors by argument name, requiring gradients; w_up is a pair when the layout says so."""
    g = torch.Generator().manual_seed(spec.seed)
    t, h, i, e = spec.tokens, spec.hidden, spec.width, spec.experts
    up = i * (2 if spec.gated else 1)

    # Where the activation has a kink, z must have the same sign in every precision: x w_up^T of such eighths is exact.
    grid = 8 if spec.activation in ("relu", "reglu") else None

    def normal(*shape, scale=1.0):
        values = torch.randn(shape, generator=g) * scale
        values = values if grid is None else (values * grid).round() / grid
        return values.to(spec.dtype).requires_grad_()

    def weight(out, into):
        return normal(e, *((into, out) if spec.transposed else (out, into)), scale=into**-0.5 if grid is None else 0.25)

    inputs = {
        "x": normal(t, h),
        "scores": torch.rand(t, spec.k, generator=g).requires_grad_(),
        "w_up": (weight(i, h), weight(i, h)) if spec.layout == "pair" else weight(up, h),
        "w_down": weight(h, i),
        "b_up": normal(e, up, scale=0.5) if spec.b_up else None,
        "b_down": normal(e, h, scale=0.5) if spec.b_down else None,
        "addend": normal(t, h) if spec.addend else None,
    }
    inputs["ids"] = draw_ids(spec, g)
    inputs["token_mask"] = torch.rand(t, generator=g) < 0.8 if spec.mask else None
    inputs["dy"] = torch.randn(t, h, generator=g).to(spec.dtype)
    return inputs


def _map(inputs: dict, f) -> dict:
    def one(v):
        if isinstance(v, tuple):
            return tuple(map(one, v))
        return f(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    return {n: one(v) for n, v in inputs.items()}


def results(function, inputs: dict, **keywords) -> dict:
    """y and every gradient, by name, of function(x, ids, scores, w_up, w_down, ...)."""
    v = dict(inputs)
    dy = v.pop("dy")
    y = function(v["x"], v["ids"], v["scores"], v["w_up"], v["w_down"], b_up=v["b_up"], b_down=v["b_down"],
                 addend=v["addend"], token_mask=v["token_mask"], **keywords)  # fmt: skip
    leaves = {}
    for name, value in v.items():
        for suffix, t in zip(("", "[1]"), value if isinstance(value, tuple) else (value,), strict=False):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                leaves[f"d{name}{suffix}"] = t
    if not y.requires_grad:
        return {"y": y.detach()} | {n: torch.zeros_like(t) for n, t in leaves.items()}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True, materialize_grads=True)
    return {"y": y.detach()} | dict(zip(leaves, gradients, strict=True))


def expected(spec: Spec, inputs: dict) -> dict:
    """The specification's results in float64."""
    double = _map(inputs, lambda t: t.detach().double().requires_grad_(t.requires_grad))
    return results(reference.moe_mlp, double, **spec.keywords)


def magnitudes(spec: Spec, inputs: dict) -> dict:
    """N of every result: its products over absolute values, expert by expert in float64."""
    v = _map(inputs, lambda t: t.detach().double())
    layout = spec.keywords["layout"]
    w_up, w_down, b_up = reference.expert_weights(
        v["w_up"], v["w_down"], v["b_up"], spec.activation, layout, spec.transposed
    )
    size = {name: torch.zeros_like(v[name[1:]]) for name in ("dx", "dscores")}
    size |= {"y": size["dx"].clone(), "dw_up": torch.zeros_like(w_up), "dw_down": torch.zeros_like(w_down)}
    size |= {"db_up": torch.zeros_like(w_up[..., 0]), "db_down": torch.zeros_like(w_down[..., 0])}
    f32 = UNIT[torch.float32] / UNIT[spec.dtype]
    here = torch.ones(spec.tokens, 1, dtype=torch.bool) if v["token_mask"] is None else v["token_mask"].unsqueeze(1)
    for e in range(spec.experts):
        token, slot = torch.where((v["ids"] == e) & here)
        x, s, dy = v["x"][token], v["scores"][token, slot].unsqueeze(1), v["dy"][token]
        s_in, s_out = (s, 1) if spec.score_on == "input" else (1, s)
        z = (s_in * (x @ w_up[e].T + (0 if b_up is None else b_up[e]))).requires_grad_()
        a = reference.activate(z, spec.activation)
        slope = torch.autograd.grad(a.sum(), z)[0].abs()
        # Sums are formed in float32 and z is rounded once: both move a, and the slope of gate with up and back.
        z = z.detach().abs() + f32 * s_in * (x.abs() @ w_up[e].abs().T + (0 if b_up is None else b_up[e].abs()))
        a = a.detach().abs() + sum((slope * z).split(spec.width, 1))
        da = (dy @ w_down[e]).abs() + f32 * (dy.abs() @ w_down[e].abs())
        dz = s_in * s_out * torch.cat([da] * (2 if spec.gated else 1), 1) * (slope + z.roll(spec.width, 1))
        bias = torch.zeros_like(dy) if v["b_down"] is None else v["b_down"][e].abs()
        size["y"].index_add_(0, token, s_out * (a @ w_down[e].abs().T + bias))
        size["dx"].index_add_(0, token, dz @ w_up[e].abs())
        ds = dz / s * z / s if spec.score_on == "input" else da * a
        size["dscores"][token, slot] = ds.sum(1) + (dy.abs() * bias).sum(1)
        size["dw_up"][e], size["db_up"][e] = dz.T @ x.abs(), dz.sum(0)
        size["dw_down"][e] = dy.abs().T @ (s_out * a)
        size["db_down"][e] = (s_out * dy).abs().sum(0)
    if spec.layout == "pair":
        size["dw_up"], size["dw_up[1]"] = size["dw_up"].chunk(2, 1)
    if v["addend"] is not None:
        size["daddend"], size["y"] = v["dy"], size["y"] + v["addend"].abs()
    return size


def assert_close(got: dict, ref: dict, size: dict, dtype: torch.dtype, note: object = "") -> None:
    """Every result on its own, by the rule at the top."""
    for name, expected_value in ref.items():
        value = got[name]
        assert value.isfinite().all(), f"{name} is not finite; {note}"
        error = (value.double() - expected_value).norm().item()
        allowed = UNIT[dtype] * size[name].norm().item()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}; {note}"


def check_layer(spec: Spec) -> None:
    """Draws the layer, runs it and judges y and all gradients."""
    inputs = draw_inputs(spec)
    got = results(intarsia.moe_mlp, inputs, save=spec.save, **spec.keywords)
    assert_close(got, expected(spec, inputs), magnitudes(spec, inputs), spec.dtype, spec)
    assert all(got[n].dtype == spec.dtype for n in got if n != "dscores")
    assert got["dscores"].dtype == torch.float32
