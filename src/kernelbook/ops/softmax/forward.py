"""The forward pass of softmax: the same mathematics in four ways.

    y[j] = exp(x[j] - m) / d,   m = max over k of x[k],   d = sum over k of exp(x[k] - m)

Subtracting m does not change y, and keeps every exponential at or below 1. The kernels see a matrix
with one row for each softmax, and differ in how often they read it:

    row         once: the row stays on chip, in one program or, when it is wide, in several
    three_pass  three times: for the maximum, for the sum, for the result
    online      twice: maximum and sum in one loop, then the result
    online_2d   twice: the same for a block of rows at a time

Statistics are float32 whatever the input. exp is computed as 2 to the power of x log2(e), the one
exponential that the hardware has.

Source of the online recurrence: Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv:1805.02867, 2018.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.launch import planned
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.exchange import collect, publish, to_slot, wait
from kernelbook.ops.rows.packed import come_in_pairs, minus_infinities, narrow, widen
from kernelbook.ops.rows.pieces import afresh, in_pieces, where_piece
from kernelbook.ops.rows.units import in_units, unit_of
from kernelbook.ops.softmax import tuned
from kernelbook.ops.visible import VisibleLaunch

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def finite(m):
    """Zero in the place of -inf: exp(x - m) of a row without finite elements is then 0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x_ptrs = x_ptr + rows * stride_row + cols
    x = tl.load(x_ptrs, mask=inside, other=float("-inf"), eviction_policy="evict_last")
    x = x.to(tl.float32)
    numerator = exp(x - tl.max(x, axis=1, keep_dims=True))
    y = numerator * (1 / tl.sum(numerator, axis=1, keep_dims=True))
    tl.store(y_ptr + rows * n_cols + cols, y, mask=inside)


@triton.jit
def packed_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_cols,
    zero,  # 0, which the compiler must not know
    MINUS_INF: tl.constexpr,  # two of them in an int32
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: two 16-bit numbers in each register
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs = (x_ptr + row * stride_row).to(tl.pointer_type(tl.int32))
    y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
    cols = tl.arange(0, BLOCK_COLS // 2)
    inside = cols < n_cols // 2
    raw = tl.load(x_ptrs + cols, mask=inside, other=MINUS_INF, eviction_policy="evict_last")

    # -- widen: anew for each step, so that the float32 row does not stay in registers
    m = tl.max(widen(raw, dtype), axis=0)
    raw += zero
    d = tl.sum(exp(widen(raw, dtype) - m), axis=0)
    raw += zero
    y = exp(widen(raw, dtype) - m) * (1 / d)
    tl.store(y_ptrs + cols, narrow(y, dtype), mask=inside)


@triton.jit
def pieces_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_cols,
    zero,  # 0, which the compiler must not know
    MINUS_INF: tl.constexpr,  # two of them in an int32
    N_PIECES: tl.constexpr,  # of a row
    PAIRS: tl.constexpr,  # pairs of numbers in a piece, a power of two; the pieces cover the row
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: as packed_row_fwd_kernel does, in pieces that pad a row less than one block would
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs = (x_ptr + row * stride_row).to(tl.pointer_type(tl.int32))
    y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
    raw = ()
    for piece in tl.static_range(N_PIECES):
        pairs, inside = where_piece(piece, n_cols // 2, PAIRS, False)
        ptrs = x_ptrs + pairs
        raw = raw + (tl.load(ptrs, mask=inside, other=MINUS_INF, eviction_policy="evict_last"),)

    # -- widen: anew for each step, so that the float32 row does not stay in registers
    highest = widen(raw[0], dtype)
    for piece in tl.static_range(1, N_PIECES):
        highest = tl.maximum(highest, widen(raw[piece], dtype))
    m = tl.max(highest, axis=0)
    raw = afresh(raw, zero, N_PIECES)
    total = exp(widen(raw[0], dtype) - m)
    for piece in tl.static_range(1, N_PIECES):
        total += exp(widen(raw[piece], dtype) - m)
    d = tl.sum(total, axis=0)
    raw = afresh(raw, zero, N_PIECES)
    for piece in tl.static_range(N_PIECES):
        pairs, inside = where_piece(piece, n_cols // 2, PAIRS, False)
        y = exp(widen(raw[piece], dtype) - m) * (1 / d)
        tl.store(y_ptrs + pairs, narrow(y, dtype), mask=inside)


@triton.jit
def row_statistics(x_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """The maximum m of a row and the sum of exp(x - m), in one loop over it."""
    m_i = tl.full((BLOCK_COLS,), float("-inf"), tl.float32)
    d_i = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_i, x)
        d_i = d_i * exp(m_i - finite(m_new)) + exp(x - finite(m_new))
        m_i = m_new
    m = finite(tl.max(m_i, axis=0))
    return m, tl.sum(d_i * exp(m_i - m), axis=0)


@triton.jit
def split_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_row,
    n_cols,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row
    LOOKS: tl.constexpr,  # at the slots of a row: exchange.looks
    THREADS: tl.constexpr,  # of a program
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    LOOP_COLS: tl.constexpr,  # a block of the row when it is read whole
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: my part of the row stays in registers
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    x_ptr += row * stride_row
    slots_ptr += row * N_PARTS
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    x_ptrs, inside = x_ptr + cols, cols < n_cols
    x = tl.load(x_ptrs, mask=inside, other=float("-inf"), eviction_policy="evict_last")
    x = x.to(tl.float32)
    m = tl.max(x, axis=0)
    numerator = exp(x - finite(m))

    # -- publish: my maximum and my sum
    publish(slots_ptr + part, to_slot(m, tl.sum(numerator, axis=0)))

    # -- collect: those of all parts; if some are late, read the whole row instead
    parts = tl.arange(0, LOOKS)
    slots, ready = wait(slots_ptr + parts % N_PARTS, max_polls, THREADS)
    m_parts, d_parts = collect(slots, parts < N_PARTS, float("-inf"), 0.0)
    m_row = finite(tl.max(m_parts, axis=0))
    d_row = tl.sum(d_parts * exp(m_parts - m_row), axis=0)
    if ready == 0:
        m_row, d_row = row_statistics(x_ptr, n_cols, LOOP_COLS)

    # -- write: from my maximum to that of the row; a part of nothing but -inf becomes 0
    y = numerator * (exp(m - m_row) / d_row)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


@triton.jit
def three_pass_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    y_ptr += row * n_cols

    # -- maximum: the first read of the row
    m_i = tl.full((BLOCK_COLS,), float("-inf"), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        m_i = tl.maximum(m_i, x.to(tl.float32))
    m = finite(tl.max(m_i, axis=0))

    # -- sum: the second read
    d_i = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        d_i += exp(x.to(tl.float32) - m)
    scale = 1 / tl.sum(d_i, axis=0)

    # -- write: the third and last read
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        tl.store(y_ptr + cols, exp(x.to(tl.float32) - m) * scale, mask=cols < n_cols)


@triton.jit
def online_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x_ptrs = x_ptr + rows * stride_row
    y_ptrs = y_ptr + rows * n_cols

    # -- recur: the maximum so far, and the sum so far relative to it
    m_i = tl.full((BLOCK_ROWS, 1), float("-inf"), tl.float32)
    d_i = tl.zeros((BLOCK_ROWS, 1), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        x = tl.load(
            x_ptrs + cols, mask=inside, other=float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(x, axis=1, keep_dims=True))
        alpha = exp(m_i - finite(m_new))
        d_i = d_i * alpha + tl.sum(exp(x - finite(m_new)), axis=1, keep_dims=True)
        m_i = m_new

    # -- write: the second and last read of the row
    m, scale = finite(m_i), 1 / d_i
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        x = tl.load(
            x_ptrs + cols, mask=inside, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        tl.store(y_ptrs + cols, exp(x - m) * scale, mask=inside)


def _forward(x: torch.Tensor, y: torch.Tensor, algorithm: str) -> None:
    """Write the softmax of each row of x to y: matrices with contiguous rows, neither empty."""
    n_rows, n_cols = x.shape
    if algorithm == "row":
        _row_forward(x, y)
    elif algorithm == "three_pass":
        block = min(runtime.next_power_of_2(n_cols), tuned.BLOCK_COLS)
        num_warps = max(1, block // 1024)
        three_pass_fwd_kernel[(n_rows,)](x, y, x.stride(0), n_cols, block, num_warps=num_warps)
    else:
        # One row and long blocks, or four rows and short ones: as many numbers either way.
        rows = 1 if algorithm == "online" else 4
        block = min(runtime.next_power_of_2(n_cols), tuned.BLOCK_COLS // rows)
        grid = (runtime.cdiv(n_rows, rows),)
        online_fwd_kernel[grid](
            x, y, x.stride(0), n_rows, n_cols, rows, block,
            num_warps=max(1, rows * block // 1024),
        )  # fmt: skip


def _row_forward(x: torch.Tensor, y: torch.Tensor) -> None:
    # I/O: read x + write y
    n_rows, n_cols = x.shape
    stride = x.stride(0)
    unit = unit_of(n_cols, stride)
    if n_cols * x.itemsize > tuned.WIDE_BYTES:
        parts, block, num_warps = tuned.split(n_cols, x.itemsize, "forward")
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=x.device)
        split_row_fwd_kernel[(n_rows * parts,)](
            x, y, slots, stride, n_cols, exchange.MAX_POLLS, parts,
            *exchange.looks(parts, num_warps, x.device), block, tuned.LOOP_COLS * num_warps, unit,
            num_warps=num_warps,
        )  # fmt: skip
    elif n_cols > tuned.TILE_COLS and come_in_pairs((x,)):
        block = runtime.next_power_of_2(n_cols)
        warps = max(1, block // tuned.PACKED_WARP)
        pieces, piece = in_pieces(n_cols)
        zero, pad = 0, minus_infinities(x.dtype)
        if pieces > 1:
            pieces_fwd_kernel[(n_rows,)](
                x, y, stride, n_cols, zero, pad, pieces, piece // 2, unit, num_warps=warps
            )
        else:
            packed_row_fwd_kernel[(n_rows,)](
                x, y, stride, n_cols, zero, pad, block, unit, num_warps=warps
            )
    else:
        _row_launch(n_rows, n_cols, stride)(x, y)


@planned
def _row_launch(n_rows: int, n_cols: int, stride: int) -> VisibleLaunch:
    block = runtime.next_power_of_2(n_cols)
    rows = max(1, 2048 // block)
    return VisibleLaunch(
        row_fwd_kernel, (runtime.cdiv(n_rows, rows),), stride, n_rows, n_cols, rows, block,
        unit_of(n_cols, stride), num_warps=max(1, rows * block // 2048),
    )  # fmt: skip
