"""The gradients of a weighted sum of rows, with a row of partial sums for each program."""

import torch
import triton
import triton.language as tl


@triton.jit
def rows_bwd_kernel(
    dy_ptr,  # gradient of y, (n_rows)
    x_ptr,  # input, (n_rows, n_cols), contiguous
    w_ptr,  # weight, (n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    parts_ptr,  # partial sums, (number of programs, n_cols), float32
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    program = tl.program_id(0)
    rows = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    offsets = rows[:, None] * n_cols + cols[None, :]
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(dy_ptr + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, dy[:, None] * w[None, :], mask=inside)
    part = tl.sum(dy[:, None] * x, axis=0)
    tl.store(parts_ptr + program * n_cols + cols, part, mask=cols < n_cols)


def rows_backward(dy, x, w, block_rows=2):
    """The gradients of x and w, of a matrix of a few thousand columns."""
    n_rows, n_cols = x.shape
    dx = torch.empty_like(x)
    programs = triton.cdiv(n_rows, block_rows)
    parts = torch.empty(programs, n_cols, device=x.device)
    block = (block_rows, triton.next_power_of_2(n_cols))
    rows_bwd_kernel[(programs,)](dy, x, w, dx, parts, n_rows, n_cols, *block)
    return dx, parts.sum(0).to(w.dtype)  # the second launch is PyTorch's
