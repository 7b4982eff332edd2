"""What a compiler is told of rows whose length 16 does not divide.

Triton asks of a length or a stride only whether 16 divides it. Where it does not, it takes 1, and
loads one number at a time; but of rows of 100 numbers in bfloat16 a thread can load four at once.
On an H200 33,554 rows of 1,000 numbers took layer norm 35 microseconds instead of 87, 8,184 rows of
4,100 took it 55 instead of 136, and softmax 40 instead of 64.
"""

import math

import triton

KNOWN = 16
"""What Triton asks for."""


def unit_of(*lengths: int) -> int:
    """Return the greatest power of two that divides some lengths; 1 where Triton knows it."""
    unit = math.gcd(*lengths, KNOWN)
    return unit if unit < KNOWN else 1


@triton.jit
def in_units(length, UNIT):
    """The same length, of which the compiler then knows that UNIT divides it."""
    return length // UNIT * UNIT
