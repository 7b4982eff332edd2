"""The weighted sum without its weights, to time how long reading a matrix takes by itself."""

import torch
import triton
import triton.language as tl

from kernelbook import runtime


@triton.jit
def row_sums_kernel(
    x_ptr,  # input, (n_rows, n_cols), contiguous
    y_ptr,  # output, (n_rows), float32
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x_ptrs = x_ptr + rows[:, None] * n_cols + cols[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    tl.store(y_ptr + rows, tl.sum(x.to(tl.float32), axis=1), mask=rows < n_rows)


def row_sums(x: torch.Tensor, y: torch.Tensor, block_rows: int = 1) -> None:
    """Write the sum of each row of x, a contiguous matrix, to y, a float32 vector."""
    n_rows, n_cols = x.shape
    row_sums_kernel[(runtime.cdiv(n_rows, block_rows),)](
        x, y, n_rows, n_cols, block_rows, runtime.next_power_of_2(n_cols), num_warps=4
    )
