"""How a functional operator is made: schema, body, fake kernel, autograd. Its raw counterpart of the same name has
overload .out.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch._C import _len_torch_dispatch_stack

from .. import _core
from ..errors import Unsupported


class Operator:
    """torch.ops.intarsia.<name>, `overload`, and its autograd node entered directly where only autograd looks on.

    torch's way from an overload to a Python autograd function costs over 100 us a call (it reads the schema again each
    time): more than all checks and launches of a layer. Both ways run the same kernel, setup and backward.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable,
        setup: Callable | None,
        backward: Callable,
        options: type | None,
        own: Callable | None,
    ):
        self.overload = getattr(torch.ops.intarsia, name).default
        self._kernel, self._options, self._own = kernel, options, own
        self._plain = _PLAIN | {options}

        def forward(ctx, *arguments):
            output = kernel(*arguments)
            if setup is not None:
                setup(ctx, arguments, output)
            if own is None:
                return output
            count = own(arguments[-1])
            return *output[:count], output[count:]

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._node = type(name, (torch.autograd.Function,), functions)
        # What torch.autograd.Function.apply adds is for function transforms, which are not active where this is called.
        self._apply = super(torch.autograd.Function, self._node).apply

    def __call__(self, *arguments):
        if torch.compiler.is_compiling() or not self._unobserved(arguments):
            return self.overload(*(arguments if self._options is None else (*arguments[:-1], *arguments[-1])))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            output = self._apply(*arguments)
            return output if self._own is None else (*output[:-1], *output[-1])
        return self._kernel(*arguments)

    def _unobserved(self, arguments: tuple) -> bool:
        """No dispatch mode, function transform, subclass or symbolic number: the dispatcher has nothing to add."""
        return (
            _len_torch_dispatch_stack() == 0
            and not torch._C._are_functorch_transforms_active()
            and self._plain.issuperset(map(type, arguments))
        )


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, torch.dtype))


def define(
    schema: str,
    kernel: Callable,
    fake: Callable,
    setup: Callable | None = None,
    backward: Callable | None = None,
    options: type | None = None,
    own: Callable | None = None,
    native: Callable | None = None,
) -> Operator:
    """Registers intarsia::<name> and returns the operator.

    `kernel` allocates the outputs (None for one that nobody asked for: torch gets an empty tensor) and calls the raw
    operator; `fake` gives their shapes alone. Without `backward` a gradient through the operator is refused in a
    sentence (or there is none to give, for integer outputs). `options`, a NamedTuple, is one argument in the place of
    the last ones of the schema: autograd looks at every argument of a node, and what it looks at takes time. So does
    every output: the first `own(options)` have a gradient, and the others go around the node where it is entered
    directly, as one. `native`: what does the same in less time, for calls that enter directly.
    """
    name = schema.partition("(")[0]
    library, qualified = _core.library, f"intarsia::{name}"
    backward = backward or _refuse(name)
    count = 1 if options is None else len(options._fields)

    def packed(arguments: tuple) -> tuple:
        return arguments if options is None else (*arguments[:-count], options(*arguments[-count:]))

    def registered(function: Callable) -> Callable:
        def with_all_outputs(*arguments):
            found = function(*packed(arguments))
            return present(found, arguments[0]) if isinstance(found, tuple) else found

        return with_all_outputs

    def setup_context(ctx, inputs, output):
        arguments = packed(inputs)
        if own is not None:
            ctx.mark_non_differentiable(*output[own(arguments[-1]) :])
        if setup is not None:
            setup(ctx, arguments, output)

    def gradient(ctx, *gradients):
        found = backward(ctx, *gradients)
        return found if count == 1 else (*found, *(None,) * (count - 1))

    def shapes(*arguments):
        _core.refuse_a_mix(name, arguments)
        return fake(*arguments)

    library.define(schema)
    library.impl(name, registered(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, registered(shapes), lib=library)
    torch.library.register_autograd(qualified, gradient, setup_context=setup_context, lib=library)
    return Operator(name, native or kernel, setup, backward, options, own)


def _refuse(name: str):
    if name.endswith("_backward"):
        text = f"{name}: second derivatives are not implemented; call backward() or grad() without create_graph=True"
    else:
        text = f"{name}: its outputs have no gradient; detach them"

    def backward(ctx, *_):
        raise Unsupported(text)

    return backward


@functools.lru_cache(maxsize=1024, typed=True)
def words(*values) -> str:
    """Values as one argument of an operator of the shim: torch takes its time for every argument."""
    return "".join([f"{value}\n" for value in values])


# ---- what a backward needs


def keep(ctx, values: dict, tensors: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Holds these of the named values for backward: tensors (or None) through autograd, whose hooks see them."""
    ctx.save_for_backward(*map(values.get, tensors))
    ctx.options = {name: values[name] for name in options}


def kept(ctx, tensors: tuple[str, ...]) -> dict:
    """The values of `keep`."""
    return ctx.options | dict(zip(tensors, ctx.saved_tensors, strict=True))


def eager() -> bool:
    """Nothing traces or records this backward: no compiler, no dispatch mode, no create_graph."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _len_torch_dispatch_stack() == 0


def asked_for(ctx, names: tuple[str, ...], is_eager: bool) -> frozenset[str]:
    """Those of a node's inputs, called `names` in order, whose gradient this backward is to give.

    Eager calls look at the engine's plan: autograd.grad(y, [x]) has no use for the gradients of the weights.
    """
    learning = itertools.compress(names, ctx.needs_input_grad)
    if not is_eager:
        return frozenset(learning)
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    return frozenset([name for name, node in zip(learning, nodes, strict=True) if _runs(node)])


def _runs(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad returns; an exception costs 10 us, .backward() has none
        return True


# ---- outputs


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, statistics and losses beside activations of `dtype`: float32, or float64 with float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns for an output that nobody asked for."""
    return like.new_empty((0,))


def present(outputs, like: torch.Tensor) -> tuple:
    """Outputs that may be None as an operator returns them."""
    return tuple(nothing(like) if t is None else t for t in outputs)


def wanted(flag: bool, tensor: torch.Tensor) -> torch.Tensor | None:
    """An output as a gradient: None when nobody asked for it."""
    return tensor if flag else None
