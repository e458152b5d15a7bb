"""The whole layer for the tests of intarsia.moe: as one node and through its parts, what is drawn, and how the two are
compared.
"""

import torch
from layers import UNIT, Spec, draw_inputs

import intarsia
from intarsia import _core, ops, reference

FAMILIES = ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid")
CHOICE = ("scores", "expert_bias", "groups", "top_groups", "renormalise", "scale", "token_mask")
ROUTER = ("w_router", "b_router", "logits_dtype", "nan_tokens", *CHOICE)


def parts(x, w_router, k, w_up, w_down, *, reference_=False, **a):
    """The same through its parts: (y, logits, ids, scores)."""
    package = reference if reference_ else intarsia
    router = {name: a.pop(name) for name in ROUTER if name in a}
    dtype = {} if reference_ else {"logits_dtype": router.pop("logits_dtype", "float32")}
    router.pop("logits_dtype", None)
    logits = package.router_logits(x, w_router, router.pop("b_router", None), **dtype)
    ids, scores = package.route(logits, k, **router)
    return package.moe_mlp(x, ids, scores, w_up, w_down, **a), logits, ids, scores


def whole(*arguments, **a):
    y, routing = intarsia.moe(*arguments, return_routing=True, **a)
    return y, *routing[:3]


def problem(
    tokens=20, hidden=12, width=8, experts=6, k=2, dtype=torch.float32, family="softmax", router=None, **changes
):
    """(positional arguments, keywords, leaves by name); every option that the family has."""
    spec = Spec(tokens=tokens, hidden=hidden, width=width, experts=experts, k=k, dtype=dtype, b_up=True, b_down=True,
                addend=True, seed=int(torch.randint(2**31, ())), **changes)  # fmt: skip
    return arguments_of(spec, family, draw_inputs(spec), router)


def arguments_of(spec, family, inputs, router=None):
    """`router`: the dtype of its parameters, that of x when None."""
    e, g = spec.experts, torch.Generator().manual_seed(spec.seed + 1)
    w_router = (torch.randn(e, spec.hidden, generator=g) / spec.hidden**0.5).to(router or spec.dtype).requires_grad_()
    b_router = torch.randn(e, generator=g).to(router or spec.dtype).requires_grad_()
    keywords = spec.keywords | {name: inputs[name] for name in ("b_up", "b_down", "addend", "token_mask")}
    keywords |= {"b_router": b_router, "scores": family}
    if family == "sigmoid_group":
        keywords |= {"expert_bias": torch.randn(e, generator=g) * 0.1, "scale": 2.5}
        keywords |= {"groups": 2, "top_groups": 1} if e % 2 == 0 and spec.k <= e // 2 else {}
    pair = isinstance(inputs["w_up"], tuple)
    leaves = {"x": inputs["x"], "w_router": w_router, "b_router": b_router, "w_down": inputs["w_down"]}
    leaves |= {"w_up": inputs["w_up"][0], "w_up[1]": inputs["w_up"][1]} if pair else {"w_up": inputs["w_up"]}
    leaves |= {name: inputs[name] for name in ("b_up", "b_down", "addend") if inputs[name] is not None}
    return (inputs["x"], w_router, spec.k, inputs["w_up"], inputs["w_down"]), keywords, leaves


def gradients(y, leaves, dy=None, **options):
    dy = torch.ones_like(y) if dy is None else dy
    leaves = leaves.values() if isinstance(leaves, dict) else leaves
    return torch.autograd.grad(y, list(leaves), dy, allow_unused=True, materialize_grads=True, **options)


def assert_same(got, want, leaves, dtype, sizes=None):
    """The same bits, but for x, whose gradient the whole layer rounds once and the parts three times, and for what
    `sizes` names: N of the router's part of a gradient that comes from rounded dlogits, or that cancels another part.
    """
    sizes = {"x": torch.zeros(())} | (sizes or {})
    for name, a, b in zip(leaves, got, want, strict=True):
        if name not in sizes:
            assert torch.equal(a, b), name
            continue
        error, size = (a.double() - b.double()).norm(), sizes[name].norm() + 2 * b.double().norm()
        assert error <= UNIT[dtype] * size + 1e-30, f"{name}: error {error}, size {size}"


def router_sizes(x, w_router, family, logits, dlogits, ids, dscores):
    """N of the router's part of its gradients, by name, for assert_same: of all where w_router has 16 bits, so that
    dlogits are rounded to them, and softmax's logits before: a unit of a logit l moves its probability p by l p, and
    dlogits = p (g - <g, p>) by as much.
    """
    x_size, w, l, p = (t.detach().double().abs() for t in (x, w_router, logits, logits.softmax(1)))
    size = dlogits.double().abs() + torch.finfo(w_router.dtype).tiny
    if family == "softmax":
        chosen = dscores.double().abs() * (ids >= 0)
        g = torch.zeros_like(p).scatter_add(1, ids.clamp(min=0).long(), chosen)
        size += l.amax(1, keepdim=True) * p * (g + (g * p).sum(1, keepdim=True))
    rounded = {"w_router": size.T @ x_size, "b_router": size.sum(0)} if w_router.dtype.itemsize == 2 else {}
    return {"x": size @ w} | rounded


# What operators of the shim take in one text.
VALUES = (*ops.moe.MoeOptions._fields, "logits_dtype", "dlogits_dtype", "overwrites_z", "asked")


class Calls:
    """Records the operators of the core that a block runs, with their arguments."""

    def __enter__(self):
        self.original, self.seen = _core.call, []

        def spy(operator, *arguments):
            schema = operator._schema
            names = [argument.name for argument in schema.arguments]
            fields = dict(zip(names, arguments, strict=True))
            self.seen.append((schema.name.removeprefix("intarsia::"), fields))
            if words := fields.pop("words", None):
                fields |= zip(VALUES, words.splitlines(), strict=False)
            fields["returned"] = self.original(operator, *arguments)
            return fields["returned"]

        _core.call = spy
        return self

    def __exit__(self, *_):
        _core.call = self.original

    def names(self):
        return [name for name, _ in self.seen]


OUTPUTS = ("y", "scores", "logits", "lists", "nan_tokens", "expert_counts", "z", "raw_scores", "kept_logits")
GRADIENTS = ("dx", "dw_router", "db_router", "dw_up", "dw_up_second", "dw_down", "db_up", "db_down")


def outputs_of(fields):
    """What a call of moe_forward makes, by name: what the shim returns, or what Python gives the core to write."""
    return dict(zip(OUTPUTS, fields["returned"], strict=True)) if fields["returned"] else fields


def gradients_of(fields):
    """What a call of moe_backward computes, by name: what the shim returns, or what Python gives the core to write."""
    returned = fields["returned"] or tuple(map(fields.get, GRADIENTS))
    return {name: g for name, g in zip(GRADIENTS, returned, strict=True) if g is not None}
