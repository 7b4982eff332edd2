"""Launches that cost the host little where a call is like one before.

``kernel[grid](*args)`` asks of each argument what the kernel is compiled for: its type, whether it
is 1, whether 16 divides it. That takes the host ten microseconds, as long as a whole operator of
PyTorch takes, and most calls of a model ask what the call before asked. So two things are
remembered: how a kernel is launched for tensors of such shapes (:func:`planned`), and which
compiled kernel that means (:class:`Launch`).
"""

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch

from kernelbook import runtime

LIMIT = 1024
"""How many answers a plan remembers, the latest ones."""

_PLANS = []


def planned(plan: Callable) -> Callable:
    """Remember what a function answers. Its arguments say all that the answer depends on."""
    remembering = lru_cache(LIMIT)(plan)
    _PLANS.append(remembering)
    return remembering


def forget() -> None:
    """Ask all plans again, because a table of configurations has changed."""
    for plan in _PLANS:
        plan.cache_clear()


class Launch:
    """A launch of which everything is known but the tensors, with which it is called.

    Args:
        kernel: its first parameters are tensors, descriptors or None, or an integer that it does
            not specialise.
        grid: how many programs, in each dimension.
        rest: its other parameters, in their order.
        options: the last of them by name, and what the compiler is told, such as num_warps.
    """

    def __init__(self, kernel, grid: tuple[int, ...], *rest: object, **options: object):
        named = [options.pop(name) for name in kernel.arg_names if name in options]
        self.kernel, self.grid = kernel, grid
        self.rest, self.options = (*rest, *named), options
        self.compiled = {}

    def __call__(self, *tensors: object) -> None:
        if runtime.INTERPRETED:
            self.kernel[self.grid](*tensors, *self.rest, **self.options)
            return
        seen = [  # a call of _seen for each tensor would take as long again
            (x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else _seen(x)
            for x in tensors
        ]
        key = (torch.cuda.current_device(), *seen)
        if run := self.compiled.get(key):
            run(*tensors, *self.rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.rest, **self.options)
        if hasattr(compiled, "__getitem__"):  # a public door of Triton's, in 3.6 to 3.9
            self.compiled[key] = compiled[(*self.grid, 1, 1)[:3]]


def _seen(x: object) -> Hashable:
    """Return what a kernel is compiled for, of one of the arguments that a plan does not know."""
    if isinstance(x, tuple):  # a tensor, two sizes, which the plan knows, and strides
        return x[0].dtype, x[0].data_ptr() % 16, x[3:]
    if isinstance(x, int):  # of 32 bits, or of 64
        return (x if x >= 0 else ~x).bit_length() > 31
    return None if x is None else x.base.dtype
