"""The smallest online softmax: one row per program, a maximum and a sum carried between blocks.

And the smallest softmax that several programs share, where each tells the others its pair.
"""

import torch
import triton
import triton.language as tl

from kernelbook.ops.rows.exchange import MAX_POLLS

INF = tl.constexpr(float("inf"))


@triton.jit
def online_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    x_ptr += tl.program_id(0).to(tl.int64) * n_cols
    y_ptr += tl.program_id(0).to(tl.int64) * n_cols
    m = -INF
    d = 0.0
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-INF)
        m_new = tl.maximum(m, tl.max(x, axis=0))  # of all blocks so far
        alpha = tl.exp(m - m_new)
        d = d * alpha + tl.sum(tl.exp(x - m_new), axis=0)  # the old sum, repaired
        m = m_new
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-INF)
        y = tl.exp(x - m) / d
        tl.store(y_ptr + cols, y, mask=cols < n_cols)


def online_softmax(x: torch.Tensor, block_cols: int = 256) -> torch.Tensor:
    """Return the softmax of each row of x, a contiguous float32 matrix.

    ``block_cols``, a power of two, may be less than a row. The first block of a row needs an
    element above minus infinity.
    """
    n_rows, n_cols = x.shape
    y = torch.empty_like(x)
    online_kernel[(n_rows,)](x, y, n_cols, BLOCK_COLS=block_cols)
    return y


@triton.jit
def pair_of(x_ptr, part, n_cols, BLOCK: tl.constexpr):
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-INF)
    m = tl.max(x, axis=0)
    numerator = tl.exp(x - m)
    return m, tl.sum(numerator, axis=0), numerator, cols


@triton.jit
def shared_row_kernel(
    x_ptr, y_ptr, slots_ptr, n_cols, max_polls, N_PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # -- publish: my pair, as one number of 64 bits, into my slot
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    m, d, numerator, cols = pair_of(x_ptr + row * n_cols, part, n_cols, BLOCK)
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = d.to(tl.int32, bitcast=True).to(tl.int64)  # d is at least 1, so no slot stays 0
    slots_ptr += row * N_PARTS
    tl.atomic_or(slots_ptr + part, high | low)

    # -- collect: the pair of every part, and merge it
    m_row = m
    d_row = 0.0
    for other in range(N_PARTS):
        slot = tl.atomic_or(slots_ptr + other, 0)  # changes nothing, and returns the slot
        polls = 0
        while (slot == 0) & (polls < max_polls):
            slot = tl.atomic_or(slots_ptr + other, 0)
            polls += 1
        m_other = (slot >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        d_other = slot.to(tl.int32).to(tl.float32, bitcast=True)
        if slot == 0:  # too late: compute that pair here
            m_other, d_other, _, _ = pair_of(x_ptr + row * n_cols, other, n_cols, BLOCK)
        m_new = tl.maximum(m_row, m_other)
        d_row = d_row * tl.exp(m_row - m_new) + d_other * tl.exp(m_other - m_new)
        m_row = m_new

    # -- write: rescale my part to the maximum of the row
    y = numerator * (tl.exp(m - m_row) / d_row)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


def shared_softmax(x, block=256, max_polls=MAX_POLLS):
    n_rows, n_cols = x.shape
    n_parts = triton.cdiv(n_cols, block)
    y = torch.empty_like(x)
    slots = torch.zeros(n_rows, n_parts, dtype=torch.int64, device=x.device)
    shared_row_kernel[(n_rows * n_parts,)](x, y, slots, n_cols, max_polls, n_parts, block)
    return y
