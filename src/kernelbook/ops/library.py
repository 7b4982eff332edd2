"""Operators: what autograd, compilers, fake tensors and ``torch.func`` see of kernels.

Whoever looks at a call cannot follow what a kernel does: ``torch.compile``, ``torch.export``, a
fake tensor, ``vmap``. They meet an operator of PyTorch's dispatcher, which says what its results
look like, what its gradient is, and how a batch of calls is one call. The dispatcher costs some ten
microseconds. So in eager mode, where nobody looks, the kernels run at once.
"""

from collections.abc import Callable

import torch
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
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        self.run = run
        self.op = torch.library.custom_op(f"kernelbook::{name}", run, mutates_args=())
        self.op.register_fake(fake)
        self.op.register_vmap(batch)
        self.op.register_autograd(backward, setup_context=setup_context)
        self.eager = _function(name, forward=eager, backward=backward)
        # The autograd of torch.library does not know torch.func, and this one does.
        parts = {"forward": self.op, "setup_context": setup_context, "backward": backward}
        self.transformed = _function(name, **parts, vmap_is_generated=True)

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self.op(*args)
        if torch._C._are_functorch_transforms_active():
            return self.transformed.apply(*args)
        differentiable = False
        for x in args:
            if isinstance(x, torch.Tensor):
                if checks.holds_no_numbers(x):
                    return self.op(*args)
                differentiable |= x.requires_grad
        if is_in_torch_dispatch_mode():
            return self.op(*args)
        if (differentiable and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            return self.eager.apply(*args)  # which says that it has no forward mode
        return self.run(*args)


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
