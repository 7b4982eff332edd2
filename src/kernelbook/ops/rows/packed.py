"""16-bit numbers in pairs: two of them stay in one 32-bit register until they are needed.

A row of 32,768 numbers is 64 KB in bfloat16 and 128 KB once it is widened to float32, half of the
registers of an SM. Kept in pairs, and widened anew for each step, it takes a quarter.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def widen(pairs, dtype: tl.constexpr):
    """Turn pairs of 16-bit numbers, each pair in an int32, into float32."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.interleave(low, high).to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Turn float32 into pairs of 16-bit numbers, each pair in an int32."""
    low, high = tl.split(tl.reshape(x.to(dtype), (x.shape[0] // 2, 2)))
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


def come_in_pairs(rows: tuple, parameters: tuple = ()) -> bool:
    """Whether rows hold 16-bit numbers of which two can be loaded as an int32.

    Where parameters have 16 bits, they must start at a multiple of four bytes as well.
    """
    even = all(x.itemsize == 2 and x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 for x in rows)
    return even and all(
        tensor.data_ptr() % 4 == 0
        for tensor in (*rows, *parameters)
        if tensor is not None and tensor.itemsize == 2
    )


def minus_infinities(dtype: torch.dtype) -> int:
    """Return a pair of -inf as the int32 that holds it."""
    return {torch.bfloat16: 0xFF80FF80, torch.float16: 0xFC00FC00}[dtype] - 2**32
