"""Kernels that ``torch.compile`` may launch itself.

To a compiler an operator is a black box: its code calls the dispatcher, the dispatcher calls
Python, and that allocates, chooses and launches, which keeps the host busy for longer than many
kernels keep the GPU. A kernel that the compiler sees it launches as it launches its own.
"""

from collections.abc import Callable

import torch
from torch._library.custom_ops import get_library_allowing_overwrite
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from kernelbook import runtime
from kernelbook.ops.launch import Launch
from kernelbook.ops.library import Operator


class VisibleLaunch(Launch):
    """A launch that a compiler, where one traces it, sees and makes later."""

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if not isinstance(tensors[0], FunctionalTensor):
            super().__call__(*tensors)
            return
        # The compiler may give its own tensors other strides, of which it keeps only the order. So
        # it gets what has one dimension, which it cannot pad.
        flat = (x if x is None else x.view(-1) for x in tensors)
        torch.library.wrap_triton(self.kernel)[self.grid](*flat, *self.rest, **self.options)


def show(
    operator: Operator, *kernels: Callable, where: Callable[..., bool] = lambda *_: True
) -> None:
    """Let ``torch.compile`` trace what an operator runs, as :func:`torch.library.triton_op` does.

    With shapes that are symbols it does not, because launches are chosen by numbers. Nor does
    ``torch.export``, because a file can hold the name of an operator and no kernel.

    Args:
        operator: its ``run`` consists of PyTorch's operators and of launches of these kernels by
            :class:`VisibleLaunch`.
        kernels: those of forward, and where there are any those of backward.
        where: ``where(*args)`` tells for which arguments that is so.
    """

    def traced(mode, op, types, args, kwargs):
        decomposes = getattr(torch._functorch.config, "decompose_custom_triton_ops", True)
        exporting = torch.compiler.is_exporting() or not decomposes
        if kwargs or exporting or not _can_be_traced(args) or not where(*args):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return operator.run(*args)

    if runtime.INTERPRETED:
        return
    name = operator.op._name
    triton_ops_to_kernels[name] = list(kernels)  # PyTorch's cache on disk asks for their source
    library = get_library_allowing_overwrite("kernelbook", f"{name}, shown")
    torch.library.register_torch_dispatch(operator.op, FunctionalTensorMode, traced, lib=library)


def _can_be_traced(args: tuple) -> bool:
    """Whether tensors are a compiler's and contiguous, and no shape or number is a symbol."""
    for x in args:
        if isinstance(x, torch.Tensor):
            if not isinstance(x, FunctionalTensor):
                return False
            if any(isinstance(n, torch.SymInt) for n in x.shape) or not x.is_contiguous():
                return False
        elif isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
    return True
