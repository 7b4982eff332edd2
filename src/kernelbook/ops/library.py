"""Operators: what autograd, compilers, fake tensors and ``torch.func`` see of kernels.

Whoever looks at a call cannot follow what a kernel does: ``torch.compile``, ``torch.export``, a
fake tensor, ``vmap``. They meet an operator of PyTorch's dispatcher, which says what its results
look like, what its gradient is, and how a batch of calls is one call. The dispatcher costs some
microseconds. So in eager mode, where nobody looks, the kernels run at once.
"""

from collections.abc import Callable

import torch
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernelbook.ops import checks


class Operator:
    """``torch.ops.kernelbook.<name>``, in eager mode without the dispatcher.

    Args:
        name: the operator's name.
        run: runs the kernels; its annotations are the operator's schema.
        fake: returns results of the same shapes, strides and dtypes, without their numbers.
        batch: ``batch(info, in_dims, *args)`` returns (results, out_dims) for a batch of calls, as
            :func:`torch.library.register_vmap` asks.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what backward needs.
        backward: ``backward(ctx, *gradients)`` returns a gradient, or None, for each argument.

    Where the first arguments are its tensors, eager mode looks at these alone, and passes autograd
    the others as one.
    """

    def __init__(
        self,
        name: str,
        run: Callable,
        *,
        fake: Callable,
        batch: Callable,
        setup_context: Callable,
        backward: Callable,
    ):
        def eager(ctx, *args):
            args = *args[:-1], *args[-1]
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        def gradients(ctx, *of_outputs):
            return *backward(ctx, *of_outputs)[:passed], None

        self.run = run
        self.op = _registered(name, run, fake, batch, setup_context, backward)
        kinds = ["Tensor" in str(argument.type) for argument in self.op._schema.arguments]
        first = sum(kinds)
        self.passed = passed = first if all(kinds[:first]) else len(kinds)
        self.eager = _function(name, forward=eager, backward=gradients)
        # The autograd of torch.library does not know torch.func, and this one does.
        parts = {"forward": self.op, "setup_context": setup_context, "backward": backward}
        self.transformed = _function(name, **parts, vmap_is_generated=True)

    def __call__(self, *args):
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.op(*args)
        if torch._C._are_functorch_transforms_active():
            if _functionalizes():  # which knows operators, and no Function
                return self.op(*args)
            return self.transformed.apply(*args)
        passed = args[: self.passed]
        differentiable = False
        for x in passed:
            if isinstance(x, torch.Tensor):
                if checks.holds_no_numbers(x) or not torch._C._has_storage(x):
                    return self.op(*args)  # without storage: a batch of the vmap of autograd
                differentiable = differentiable or x.requires_grad
        if is_in_torch_dispatch_mode():
            return self.op(*args)
        if (differentiable and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            # which says that it has no forward mode
            return self.eager.apply(*passed, args[self.passed :])
        return self.run(*args)


def _registered(
    name: str,
    run: Callable,
    fake: Callable,
    batch: Callable,
    setup_context: Callable,
    backward: Callable,
) -> torch._ops.OpOverload:
    """Register an operator, and return it.

    :func:`torch.library.custom_op` would do, but compiled code that calls what it registers enters
    Python twice, and goes through a dozen functions before it comes to ``run``. Here it enters
    once, and where no gradient is recorded, as in compiled code, what it enters calls ``run``.
    """
    library = get_library_allowing_overwrite("kernelbook", name)  # by who imports the book anew
    schema = name + torch.library.infer_schema(run, mutates_args=())
    library.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    op = getattr(torch.ops.kernelbook, name).default

    def below_autograd(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward(ctx, *args):
        output = below_autograd(*args)
        setup_context(ctx, args, output)
        return output

    differentiable = _function(name, forward=forward, backward=backward)

    def autograd(keyset, *args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return differentiable.apply(*args)
        if _runs_next(keyset):
            return run(*args)
        return below_autograd(*args)

    library.impl(name, run, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(op, fake, lib=library)

    def batch_of_any(info, in_dims, *args):
        return (batch if info.batch_size else batch_of_none)(info, in_dims, *args)

    def batch_of_none(info, in_dims, *args):
        """No calls have results of the shapes of one, none of each."""
        dims = dict(enumerate(in_dims))
        one = (
            x.new_empty(x.shape[:d] + x.shape[d + 1 :])
            if isinstance(x, torch.Tensor) and (d := dims[i]) is not None
            else x
            for i, x in enumerate(args)
        )
        results = fake(*one)
        if isinstance(results, torch.Tensor):
            return results.new_empty(0, *results.shape), 0
        return tuple(r.new_empty(0, *r.shape) for r in results), (0,) * len(results)

    torch.library.register_vmap(op, batch_of_any, lib=library)
    return op


def _functionalizes() -> bool:
    """Whether the innermost transform is :func:`torch.func.functionalize`."""
    innermost = torch._C._functorch.peek_interpreter_stack().key()
    return innermost == torch._C._functorch.TransformType.Functionalize


def _runs_next(keyset: torch._C.DispatchKeySet) -> bool:
    """Whether nothing but the kernels of a device is left to the dispatcher after autograd.

    Then an operator may run them itself, which spares the host some microseconds.
    """
    kind = keyset.raw_repr()
    if kind not in _RUN_NEXT:
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        devices = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
        _RUN_NEXT[kind] = below.highestPriorityTypeId() in devices
    return _RUN_NEXT[kind]


_RUN_NEXT = {}


def _function(name: str, *, vmap_is_generated: bool = False, **parts: Callable) -> type:
    members = {part: staticmethod(function) for part, function in parts.items()}
    members["generate_vmap_rule"] = vmap_is_generated
    return type(name, (torch.autograd.Function,), members)


def batched(info, in_dim: int | None, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the batch of calls first, expanded where all calls share it."""
    return x.expand(info.batch_size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)


def no_gradient(message: str) -> dict[str, Callable]:
    """Return the autograd of an operator that refuses to be differentiated."""

    def backward(ctx, *_):
        raise RuntimeError(message)

    return {"setup_context": lambda ctx, inputs, output: None, "backward": backward}


def autocast(x: torch.Tensor, like: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return x in the dtype to which autocast takes the input of PyTorch's own function.

    ``like`` calls that function on an empty tensor: its rules differ from device to device.
    """
    return x.to(like(x.new_empty(0)).dtype) if autocasts(x) else x


def autocasts(x: torch.Tensor) -> bool:
    """Tell whether autocast is on where a tensor lies."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
