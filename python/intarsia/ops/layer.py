"""layer_forward and layer_backward: the experts, from lists to y, and every gradient in one call."""

import torch

from .. import _core
from ..errors import Error
from .define import asked_for, define, eager, keep, kept, wanted

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")

_LISTS = (
    "Tensor expert_offsets, Tensor? row_token, Tensor? row_slot, Tensor? slot_row, Tensor? token_offsets, "
    "Tensor? token_rows"
)
WEIGHTS = (
    "Tensor w_up, Tensor? w_up_second, int w_up_gate_block, bool w_up_transposed, Tensor w_down, "
    "bool w_down_transposed, Tensor? b_up, Tensor? b_down"
)
FORWARD_NAMES = (
    "x", "expert_offsets", "row_token", "row_slot", "slot_row", "token_offsets", "token_rows", "scores", "w_up",
    "w_up_second", "w_up_gate_block", "w_up_transposed", "w_down", "w_down_transposed", "b_up", "b_down", "addend",
    "activation", "score_on", "save_z", "overwrite_z", "backend",
)  # fmt: skip
_TENSORS = (*FORWARD_NAMES[:10], "w_down", "b_up", "b_down", "addend")
_SHARED_NAMES = tuple(n for n in FORWARD_NAMES if n not in ("addend", "save_z", "overwrite_z"))  # with layer_backward
_DIFFERENTIABLE = ("x", "scores", "w_up", "w_up_second", "w_down", "b_up", "b_down")  # layer_backward's outputs
_GRADIENT_NAMES = ("dx", "dscores", "dw_up", "dw_up_second", "dw_down", "db_up", "db_down")


# What backward needs: tensors, and values that are none.
KEPT = (*_TENSORS[:-1], "z")
OPTIONS = ("w_up_gate_block", "w_up_transposed", "w_down_transposed", "activation", "score_on", "backend")


def z_width(activation: str, w_down: torch.Tensor, transposed: bool) -> int:
    """Columns of z: G*I."""
    return w_down.shape[1 if transposed else 2] * (2 if activation in GATED else 1)


# ---- forward. z has no rows unless save_z; overwrite_z promises that the caller has no use for it, so that backward
# may put dz there.


def run_layer(*arguments):
    values = dict(zip(FORWARD_NAMES, arguments, strict=True))
    y, z = _outputs(values)
    save_z, _ = values.pop("save_z"), values.pop("overwrite_z")
    _core.run("layer_forward", **values, z=wanted(save_z, z), y=y)
    return y, z


def fake_layer(*arguments):
    return _outputs(dict(zip(FORWARD_NAMES, arguments, strict=True)))


def _outputs(v: dict):
    x, row_token = v["x"], v["row_token"]
    rows = (x if row_token is None else row_token).shape[0]
    z = x.new_empty((rows if v["save_z"] else 0, z_width(v["activation"], v["w_down"], v["w_down_transposed"])))
    return torch.empty_like(x, memory_format=torch.contiguous_format), z


# ---- backward


def _backward(dy, z, *rest):
    *arguments, need = rest
    values = dict(zip(_SHARED_NAMES, arguments, strict=True))
    return tuple(_run_backward(dy, z, values, need, overwrite_z=False))


def _backward_fake(dy, z, *rest):
    *arguments, need = rest
    return tuple(_gradient_buffers(dict(zip(_SHARED_NAMES, arguments, strict=True)), need))


def _gradient_buffers(values: dict, need) -> list:
    """None for a gradient that is not needed."""

    def buffer(name):
        # Gradients of parameters take their strides, so that autograd keeps them without a copy.
        rows = name in ("x", "scores")
        return torch.empty_like(values[name], memory_format=torch.contiguous_format if rows else torch.preserve_format)

    return [buffer(name) if flag else None for name, flag in zip(_DIFFERENTIABLE, need, strict=True)]


def _run_backward(dy, z, values: dict, need, overwrite_z: bool) -> list:
    gradients = _gradient_buffers(values, need)
    gate_block, up_transposed = values["w_up_gate_block"], values["w_up_transposed"]
    _core.run(
        "layer_backward", dy=dy, z=z, **values, overwrite_z=overwrite_z, accumulate=False, grad_scale=1.0,
        dw_up_gate_block=gate_block, dw_up_transposed=up_transposed, dw_down_transposed=values["w_down_transposed"],
        **dict(zip(_GRADIENT_NAMES, gradients, strict=True)),
    )  # fmt: skip
    return gradients


layer_backward = define(
    f"layer_backward(Tensor dy, Tensor? z, Tensor x, {_LISTS}, Tensor? scores, {WEIGHTS}, str activation, "
    "str score_on, str backend, bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)

# ---- autograd


class Preactivations:
    """z between forward and backward. dz takes its place once, unless somebody asked to keep the graph."""

    def __init__(self, function: str, overwrite: bool):
        self.function, self.overwrite, self.spent = function, overwrite, False

    def check(self) -> None:
        """Raises Error when an earlier backward has overwritten z."""
        if self.spent:
            raise Error(
                f"{self.function}: a second backward through the same forward, but the first one overwrote the "
                "pre-activations z with their gradient. Pass retain_graph=True to the first backward (it then leaves "
                "z alone), or use save='input'."
            )

    def spend(self, z) -> bool:
        """Whether this backward, which is eager, is to overwrite z."""
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
        self.spent = self.overwrite and z is not None and not keep_graph()
        return self.spent


def expert_gradients(dy, values: dict, asked: frozenset[str], z_state: Preactivations) -> dict:
    """Those of the experts' inputs that are asked for, by name. `values`: inputs of layer_forward by name, and z."""
    need = [name in asked for name in _DIFFERENTIABLE]
    if values["w_up_second"] is not None:
        need[2] = need[3] = need[2] or need[3]
    if not any(need):
        return {}
    z, shared = values["z"], {name: values[name] for name in _SHARED_NAMES}
    if eager() and z_state.spend(z):
        gradients = _run_backward(dy, z, shared, need, overwrite_z=True)
        torch.autograd.graph.increment_version(z)
    else:
        gradients = layer_backward(dy, z, *shared.values(), need)
    return {name: g for name, g in zip(_DIFFERENTIABLE, gradients, strict=True) if name in asked}


def _setup(ctx, inputs, output):
    values = dict(zip(FORWARD_NAMES, inputs, strict=True))
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.z_state = Preactivations("moe_mlp", values["overwrite_z"])
    values["z"] = wanted(values["save_z"], z)
    keep(ctx, values, KEPT, OPTIONS)


def _gradient(ctx, dy, _dz):
    if dy is None:
        return (None,) * len(FORWARD_NAMES)
    ctx.z_state.check()
    asked = asked_for(ctx, FORWARD_NAMES, eager())
    gradients = expert_gradients(dy, kept(ctx, KEPT), asked, ctx.z_state)
    if "addend" in asked:
        gradients["addend"] = dy
    return tuple(map(gradients.get, FORWARD_NAMES))


layer_forward = define(
    f"layer_forward(Tensor x, {_LISTS}, Tensor? scores, {WEIGHTS}, Tensor? addend, str activation, str score_on, "
    "bool save_z, bool overwrite_z, str backend) -> (Tensor y, Tensor z)",
    run_layer,
    fake_layer,
    _setup,
    _gradient,
)
