"""Two sums in one reduction.

Warps that share a row reduce its sums through shared memory and wait for each other. In one
reduction of both sums they wait once instead of twice.
"""

import triton
import triton.language as tl

from kernelbook import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@triton.jit
def add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The sums of two blocks of one shape. The interpreter, slow at such reductions, does two."""
    if INTERPRETED:
        return tl.sum(a, axis, keep_dims), tl.sum(b, axis, keep_dims)
    else:
        return tl.reduce((a, b), axis, add_two, keep_dims)
