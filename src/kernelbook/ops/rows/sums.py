"""Several sums of a block in one reduction.

Warps that share a row add up its sums through shared memory and wait for each other. In one
reduction they wait once for all of the sums.
"""

import triton
import triton.language as tl

from kernelbook import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@triton.jit
def add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The sums of two blocks of one shape. The interpreter would add one by one: it adds apart."""
    if INTERPRETED:
        return tl.sum(a, axis, keep_dims), tl.sum(b, axis, keep_dims)
    else:
        return tl.reduce((a, b), axis, add_two, keep_dims)


@triton.jit
def three_sums(a, b, c, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The sums of three blocks of one shape."""
    if INTERPRETED:
        return (
            tl.sum(a, axis, keep_dims),
            tl.sum(b, axis, keep_dims),
            tl.sum(c, axis, keep_dims),
        )
    else:
        return tl.reduce((a, b, c), axis, add_three, keep_dims)
