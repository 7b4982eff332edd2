"""The backward pass of softmax.

    dx[j] = y[j] * (dy[j] - delta),   delta = sum over k of y[k] * dy[k]

The elements of a row depend on each other only through one number, delta.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.launch import planned
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.exchange import collect, publish, to_slot, wait
from kernelbook.ops.rows.units import in_units, unit_of
from kernelbook.ops.softmax import tuned
from kernelbook.ops.visible import VisibleLaunch


@triton.jit
def row_bwd_kernel(
    y_ptr,  # output of forward, (n_rows, n_cols), contiguous
    dy_ptr,  # its gradient, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    stride_row,  # of dy
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)

    # -- gradient: of whole rows
    y = tl.load(y_ptr + rows * n_cols + cols, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows * stride_row + cols, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
    tl.store(dx_ptr + rows * n_cols + cols, dx, mask=inside)


@triton.jit
def row_product(y_ptr, dy_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """The sum of y * dy over a row."""
    delta = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        delta += y * dy
    return tl.sum(delta, axis=0)


@triton.jit
def split_row_bwd_kernel(
    y_ptr,  # output of forward, (n_rows, n_cols), contiguous
    dy_ptr,  # its gradient, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_row,  # of dy
    n_cols,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row
    LOOKS: tl.constexpr,  # at the slots of a row: exchange.looks
    THREADS: tl.constexpr,  # of a program
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    LOOP_COLS: tl.constexpr,  # a block of the row when it is read whole
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- publish: my share of delta, in both numbers of the slot
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    y_ptr += row * n_cols
    dy_ptr += row * stride_row
    slots_ptr += row * N_PARTS
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    share = tl.sum(y * dy, axis=0)
    publish(slots_ptr + part, to_slot(share, share))

    # -- collect: those of all parts; if some are late, read the whole row instead
    parts = tl.arange(0, LOOKS)
    slots, ready = wait(slots_ptr + parts % N_PARTS, max_polls, THREADS)
    shares, _ = collect(slots, parts < N_PARTS, 0.0, 0.0)
    delta = tl.sum(shares, axis=0)
    if ready == 0:
        delta = row_product(y_ptr, dy_ptr, n_cols, LOOP_COLS)
    tl.store(dx_ptr + row * n_cols + cols, y * (dy - delta), mask=cols < n_cols)


@triton.jit
def loop_bwd_kernel(
    y_ptr,  # output of forward, (n_rows, n_cols), contiguous
    dy_ptr,  # its gradient, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    stride_row,  # of dy
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * n_cols
    dy_ptr += row * stride_row
    dx_ptr += row * n_cols
    delta = row_product(y_ptr, dy_ptr, n_cols, BLOCK_COLS)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + cols, y * (dy - delta), mask=cols < n_cols)


def _backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, algorithm: str) -> None:
    """Write the gradient of each row to dx: matrices with contiguous rows, none empty."""
    # I/O: read y + read dy + write dx
    n_rows, n_cols = y.shape
    stride = dy.stride(0)
    if algorithm != "row":
        block = min(runtime.next_power_of_2(n_cols), tuned.BLOCK_COLS)
        num_warps = max(1, block // 1024)
        loop_bwd_kernel[(n_rows,)](y, dy, dx, stride, n_cols, block, num_warps=num_warps)
    elif n_cols * y.itemsize > tuned.WIDE_BYTES:
        parts, block, num_warps = tuned.split(n_cols, y.itemsize, "backward")
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=y.device)
        split_row_bwd_kernel[(n_rows * parts,)](
            y, dy, dx, slots, stride, n_cols, exchange.MAX_POLLS, parts,
            *exchange.looks(parts, num_warps, y.device), block, tuned.LOOP_COLS * num_warps,
            unit_of(n_cols, stride), num_warps=num_warps,
        )  # fmt: skip
    else:
        _row_launch(n_rows, n_cols, stride)(y, dy, dx)


@planned
def _row_launch(n_rows: int, n_cols: int, stride: int) -> VisibleLaunch:
    block = runtime.next_power_of_2(n_cols)
    rows = max(1, 1024 // block)
    return VisibleLaunch(
        row_bwd_kernel, (runtime.cdiv(n_rows, rows),), stride, n_rows, n_cols, rows, block,
        unit_of(n_cols, stride), num_warps=min(16, max(1, rows * block // 1024)),
    )  # fmt: skip
