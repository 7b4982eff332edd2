"""The smallest online softmax: one row per program, a maximum and a sum carried between blocks."""

import torch
import triton
import triton.language as tl

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
