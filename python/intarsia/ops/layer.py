"""layer_forward and layer_backward: the experts, from lists to y, and every gradient in one call."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .. import _core
from ..errors import Error
from .define import define, nothing, wanted

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")

_LISTS = (
    "Tensor expert_offsets, Tensor? row_token, Tensor? row_slot, Tensor? slot_row, Tensor? token_offsets, "
    "Tensor? token_rows"
)
_WEIGHTS = (
    "Tensor w_up, Tensor? w_up_second, int w_up_gate_block, bool w_up_transposed, Tensor w_down, bool "
    "w_down_transposed, "
    "Tensor? b_up, Tensor? b_down"
)
FORWARD_NAMES = (
    "x", "expert_offsets", "row_token", "row_slot", "slot_row", "token_offsets", "token_rows", "scores", "w_up",
    "w_up_second", "w_up_gate_block", "w_up_transposed", "w_down", "w_down_transposed", "b_up", "b_down", "addend",
    "activation", "score_on", "save_z", "overwrite_z", "backend",
)  # fmt: skip
_SHARED_NAMES = tuple(n for n in FORWARD_NAMES if n not in ("addend", "save_z", "overwrite_z"))  # with layer_backward
_DIFFERENTIABLE = (
    "x",
    "scores",
    "w_up",
    "w_up_second",
    "w_down",
    "b_up",
    "b_down",
)  # layer_backward's outputs, in order
_GRADIENT_NAMES = ("dx", "dscores", "dw_up", "dw_up_second", "dw_down", "db_up", "db_down")


def z_width(activation: str, w_down: torch.Tensor, transposed: bool) -> int:
    """Columns of z: G*I."""
    return w_down.shape[1 if transposed else 2] * (2 if activation in GATED else 1)


# ---- forward. z has no rows unless save_z; overwrite_z promises that the caller has no use for it, so that backward
# may put dz there.


def _forward(*arguments):
    values = dict(zip(FORWARD_NAMES, arguments, strict=True))
    y, z = _forward_fake(*arguments)
    save_z, _ = values.pop("save_z"), values.pop("overwrite_z")
    _core.run("layer_forward", **values, z=wanted(save_z, z), y=y)
    return y, z


def _forward_fake(*arguments):
    v = dict(zip(FORWARD_NAMES, arguments, strict=True))
    x, row_token = v["x"], v["row_token"]
    rows = (x if row_token is None else row_token).shape[0]
    z = x.new_empty((rows if v["save_z"] else 0, z_width(v["activation"], v["w_down"], v["w_down_transposed"])))
    return torch.empty_like(x, memory_format=torch.contiguous_format), z


# ---- backward


def _backward(dy, z, *rest):
    *arguments, need = rest
    return _run_backward(dy, z, dict(zip(_SHARED_NAMES, arguments, strict=True)), need, overwrite_z=False)


def _backward_fake(dy, z, *rest):
    *arguments, need = rest
    return _gradient_buffers(dict(zip(_SHARED_NAMES, arguments, strict=True)), need)


def _gradient_buffers(values: dict, need) -> tuple:
    def buffer(name):
        # Gradients of parameters take their strides, so that autograd keeps them without a copy.
        rows = name in ("x", "scores")
        return torch.empty_like(values[name], memory_format=torch.contiguous_format if rows else torch.preserve_format)

    return tuple(buffer(n) if flag else nothing(values["x"]) for n, flag in zip(_DIFFERENTIABLE, need, strict=True))


def _run_backward(dy, z, values: dict, need, overwrite_z: bool) -> tuple:
    buffers = _gradient_buffers(values, need)
    gradients = {name: wanted(flag, g) for name, flag, g in zip(_GRADIENT_NAMES, need, buffers, strict=True)}
    gate_block, up_transposed = values["w_up_gate_block"], values["w_up_transposed"]
    _core.run(
        "layer_backward", dy=dy, z=z, **values, overwrite_z=overwrite_z, accumulate=False, grad_scale=1.0,
        dw_up_gate_block=gate_block, dw_up_transposed=up_transposed, dw_down_transposed=values["w_down_transposed"],
        **gradients,
    )  # fmt: skip
    return buffers


layer_backward = define(
    f"layer_backward(Tensor dy, Tensor? z, Tensor x, {_LISTS}, Tensor? scores, {_WEIGHTS}, str activation, str "
    "score_on, "
    "str backend, bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)

# ---- autograd


def _setup(ctx, inputs, output):
    values = dict(zip(FORWARD_NAMES, inputs, strict=True))
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.edges = [n for n, v in values.items() if isinstance(v, torch.Tensor)]  # in the order of ctx.next_functions
    values.pop("addend")
    ctx.save_z, ctx.overwrite_z = values.pop("save_z"), values.pop("overwrite_z")
    ctx.z_spent = False
    ctx.tensor_names = [n for n, v in values.items() if isinstance(v, torch.Tensor)]
    ctx.others = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor)}
    ctx.save_for_backward(*(values[n] for n in ctx.tensor_names), z if ctx.save_z else None)


def _gradient(ctx, dy, _dz):
    if dy is None:
        return (None,) * len(FORWARD_NAMES)
    if ctx.z_spent:
        raise Error(
            "moe_mlp: a second backward through the same forward, but the first one overwrote the "
            "pre-activations z with their "
            "gradient. Pass retain_graph=True to the first backward (it then leaves z alone), or use save='input'."
        )
    *tensors, z = ctx.saved_tensors
    found = ctx.others | dict(zip(ctx.tensor_names, tensors, strict=True))
    values = {name: found[name] for name in _SHARED_NAMES}
    eager = _eager()
    needs = dict(zip(FORWARD_NAMES, ctx.needs_input_grad, strict=True))
    if eager:
        needs |= {
            name: needs[name] and _asked_for(edge)
            for name, (edge, _) in zip(ctx.edges, ctx.next_functions, strict=True)
        }
    need = [needs[name] for name in _DIFFERENTIABLE]
    if values["w_up_second"] is not None:
        need[2] = need[3] = need[2] or need[3]
    result = {"addend": dy} if needs["addend"] else {}
    if any(need):
        # dz takes z's place unless somebody asked to keep the graph.
        if eager and ctx.overwrite_z and z is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.z_spent = True
            gradients = _run_backward(dy, z, values, need, overwrite_z=True)
            torch.autograd.graph.increment_version(z)
        else:
            gradients = layer_backward(dy, z, *values.values(), need)
        result |= {
            name: g for name, flag, g in zip(_DIFFERENTIABLE, need, gradients, strict=True) if flag and needs[name]
        }
    return tuple(result.get(name) for name in FORWARD_NAMES)


def _eager() -> bool:
    """Nothing traces or records this backward: no compiler, no dispatch mode, no create_graph."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _get_current_dispatch_mode() is None


def _asked_for(edge) -> bool:
    """Whether this call of the engine wants that input's gradient: autograd.grad(y, [x]) has no use for those of the
    weights.
    """
    if edge is None:
        return False
    try:
        return torch._C._will_engine_execute_node(edge)
    except RuntimeError:  # a leaf whose gradient autograd.grad returns
        return True


layer_forward = define(
    f"layer_forward(Tensor x, {_LISTS}, Tensor? scores, {_WEIGHTS}, Tensor? addend, str activation, str score_on, "
    "bool save_z, "
    "bool overwrite_z, str backend) -> (Tensor y, Tensor z)",
    _forward,
    _forward_fake,
    _setup,
    _gradient,
)
