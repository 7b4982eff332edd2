"""Softmax over one dimension.

    y[j] = exp(x[j] - m) / d,   m = max over k of x[k],   d = sum over k of exp(x[k] - m)

Subtracting m changes nothing but keeps every exponential at or below 1. The kernels see a matrix
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

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _finite(m):
    """Zero in the place of -inf: exp(x - m) of a row without finite elements is then 0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * stride_row + cols, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    numerator = _exp(x - tl.max(x, axis=1, keep_dims=True))
    y = numerator * (1 / tl.sum(numerator, axis=1, keep_dims=True))
    tl.store(y_ptr + rows * n_cols + cols, y, mask=inside)


@triton.jit
def _widen(pairs, dtype: tl.constexpr):
    """Turn pairs of 16-bit numbers, each pair in an int32, into float32."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.interleave(low, high).to(tl.float32)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """Turn float32 into pairs of 16-bit numbers, each pair in an int32."""
    low, high = tl.split(tl.reshape(x.to(dtype), (x.shape[0] // 2, 2)))
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _packed_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_cols,
    zero,  # 0, which the compiler must not know
    MINUS_INF: tl.constexpr,  # two of them in an int32
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    # -- load: two 16-bit numbers in each register
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs = (x_ptr + row * stride_row).to(tl.pointer_type(tl.int32))
    y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
    cols = tl.arange(0, BLOCK_COLS // 2)
    inside = cols < n_cols // 2
    raw = tl.load(x_ptrs + cols, mask=inside, other=MINUS_INF)

    # -- widen: once for each step, never for long
    m = tl.max(_widen(raw, dtype), axis=0)
    raw += zero
    d = tl.sum(_exp(_widen(raw, dtype) - m), axis=0)
    raw += zero
    y = _exp(_widen(raw, dtype) - m) * (1 / d)
    tl.store(y_ptrs + cols, _narrow(y, dtype), mask=inside)


@triton.jit
def _row_statistics(x_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """The maximum m of a row and the sum of exp(x - m), in one loop over it."""
    m_i = tl.full((BLOCK_COLS,), float("-inf"), tl.float32)
    d_i = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_i, x)
        d_i = d_i * _exp(m_i - _finite(m_new)) + _exp(x - _finite(m_new))
        m_i = m_new
    m = _finite(tl.max(m_i, axis=0))
    return m, tl.sum(d_i * _exp(m_i - m), axis=0)


@triton.jit
def _wait_for_parts(slots_ptrs, exist, max_polls):
    """Look at slots until none that exists is zero, or max_polls times. Return (slots, ready)."""
    found = tl.zeros(slots_ptrs.shape, tl.int64)
    ready = tl.min(found)
    polls = 0
    while (ready == 0) & (polls < max_polls):
        found = tl.load(slots_ptrs, mask=exist, other=1, volatile=True)
        ready = tl.min((found != 0).to(tl.int64))
        polls += 1
    return found, ready


@triton.jit
def _split_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_row,
    n_cols,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row
    PARTS: tl.constexpr,  # a power of two, at least N_PARTS
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    LOOP_COLS: tl.constexpr,  # a block of the row when it is read whole
):
    # -- load: my part of the row stays in registers
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    x_ptr += row * stride_row
    slots_ptr += row * N_PARTS
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
    m = _finite(tl.max(x, axis=0))
    numerator = _exp(x - m)
    d = tl.sum(numerator, axis=0)

    # -- publish: my maximum and my sum, in one store of 64 bits that are never all zero
    low = d.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.atomic_xchg(slots_ptr + part, high | low | (d == 0), sem="relaxed")

    # -- collect: those of all parts; if they do not come, read the whole row instead
    parts = tl.arange(0, PARTS)
    found, ready = _wait_for_parts(slots_ptr + parts, parts < N_PARTS, max_polls)
    m_parts = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    d_parts = found.to(tl.int32).to(tl.float32, bitcast=True)
    m_row = tl.max(m_parts, axis=0)
    d_row = tl.sum(d_parts * _exp(m_parts - m_row), axis=0)
    if ready == 0:
        m_row, d_row = _row_statistics(x_ptr, n_cols, LOOP_COLS)

    # -- write: from my maximum to that of the row
    y = numerator * (_exp(m - m_row) / d_row)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


@triton.jit
def _three_pass_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    y_ptr,  # output, (n_rows, n_cols), contiguous
    stride_row,
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    y_ptr += row * n_cols
    m_i = tl.full((BLOCK_COLS,), float("-inf"), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        m_i = tl.maximum(m_i, x.to(tl.float32))
    m = _finite(tl.max(m_i, axis=0))
    d_i = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        d_i += _exp(x.to(tl.float32) - m)
    scale = 1 / tl.sum(d_i, axis=0)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))
        tl.store(y_ptr + cols, _exp(x.to(tl.float32) - m) * scale, mask=cols < n_cols)


@triton.jit
def _online_fwd_kernel(
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
        alpha = _exp(m_i - _finite(m_new))
        d_i = d_i * alpha + tl.sum(_exp(x - _finite(m_new)), axis=1, keep_dims=True)
        m_i = m_new

    # -- write: the second and last read of the row
    m, scale = _finite(m_i), 1 / d_i
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        x = tl.load(
            x_ptrs + cols, mask=inside, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        tl.store(y_ptrs + cols, _exp(x - m) * scale, mask=inside)


@triton.jit
def _row_bwd_kernel(
    y_ptr,  # output of forward, (n_rows, n_cols), contiguous
    dy_ptr,  # its gradient, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    stride_row,  # of dy
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    y = tl.load(y_ptr + rows * n_cols + cols, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows * stride_row + cols, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
    tl.store(dx_ptr + rows * n_cols + cols, dx, mask=inside)


@triton.jit
def _row_product(y_ptr, dy_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """The sum of y * dy over a row."""
    delta = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        delta += y * dy
    return tl.sum(delta, axis=0)


@triton.jit
def _split_row_bwd_kernel(
    y_ptr,  # output of forward, (n_rows, n_cols), contiguous
    dy_ptr,  # its gradient, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_row,  # of dy
    n_cols,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row
    PARTS: tl.constexpr,  # a power of two, at least N_PARTS
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    LOOP_COLS: tl.constexpr,  # a block of the row when it is read whole
):
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    y_ptr += row * n_cols
    dy_ptr += row * stride_row
    slots_ptr += row * N_PARTS
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    low = tl.sum(y * dy, axis=0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    FILLED: tl.constexpr = 1 << 32  # so that a sum of zero differs from none
    tl.atomic_xchg(slots_ptr + part, low | FILLED, sem="relaxed")
    parts = tl.arange(0, PARTS)
    found, ready = _wait_for_parts(slots_ptr + parts, parts < N_PARTS, max_polls)
    sums = found.to(tl.int32).to(tl.float32, bitcast=True)
    delta = tl.sum(tl.where(parts < N_PARTS, sums, 0.0), axis=0)
    if ready == 0:
        delta = _row_product(y_ptr, dy_ptr, n_cols, LOOP_COLS)
    tl.store(dx_ptr + row * n_cols + cols, y * (dy - delta), mask=cols < n_cols)


@triton.jit
def _loop_bwd_kernel(
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
    delta = _row_product(y_ptr, dy_ptr, n_cols, BLOCK_COLS)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        y = tl.load(y_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + cols, y * (dy - delta), mask=cols < n_cols)


ALGORITHMS = ("auto", "row", "three_pass", "online", "online_2d")

TILE_COLS = 8192
"""Longest row for a tile of whole rows, widened to float32. Longer rows of 16-bit numbers are
packed: at 32,768 columns on an H200 that gave 0.98 of a copy's speed against 0.79, because two
programs fit on a multiprocessor and one computes while the other loads."""

WIDE_BYTES = 65536
"""Longest row for one program, in bytes, so that the registers hold a second one. On an H200
at 65,536 columns of bfloat16 one program a row gave 0.62 of a copy, and 16 parts gave 0.94."""

PART_COLS = 4096, 8192
"""Columns a part of a longer row, with a warp for every 2,048. Small parts wait with few registers
in hand, and many parts wait longer for the slowest. At 65,536 columns 4,096 gave 0.94 of a copy and
8,192 gave 0.93, at 131,072 columns 0.88 and 0.90. Backward holds two arrays: there 4,096 gave 0.92
at 131,072."""

ROW_COLS = 2**20
"""Longest row that ``row`` takes, in 128 parts."""

MAX_POLLS = 1 if runtime.INTERPRETED else 2**14
"""How often a part looks for the others. The hardware starts programs in the order of their
numbers, so that the wait is short; should it not, the parts give up and the result is still right.
The interpreter runs programs one after the other: there, waiting is in vain."""

LOOP_COLS = 1024 if runtime.INTERPRETED else 128
"""Columns a warp and block when a part does read the row: few, because the registers of this path
count even if it is never taken. With 1,024 a program had 239 registers, and 0.55 of a copy."""


def _forward(x: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Compute the softmax of each row of a matrix whose columns are contiguous."""
    n_rows, n_cols = x.shape
    y = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    if algorithm == "row":
        _row_forward(x, y)
    elif algorithm == "three_pass":
        block = min(triton.next_power_of_2(n_cols), 8192)
        num_warps = max(1, block // 1024)
        _three_pass_fwd_kernel[(n_rows,)](x, y, x.stride(0), n_cols, block, num_warps=num_warps)
    else:
        # One row and long blocks, or four rows and short ones: up to 8,192 numbers either way.
        rows = 1 if algorithm == "online" else 4
        block = min(triton.next_power_of_2(n_cols), 8192 // rows)
        grid = (triton.cdiv(n_rows, rows),)
        _online_fwd_kernel[grid](
            x, y, x.stride(0), n_rows, n_cols, rows, block,
            num_warps=max(1, rows * block // 1024),
        )  # fmt: skip
    return y


def _row_forward(x: torch.Tensor, y: torch.Tensor) -> None:
    # I/O: read x + write y
    n_rows, n_cols = x.shape
    block = triton.next_power_of_2(n_cols)
    stride = x.stride(0)
    even = n_cols % 2 == 0 and stride % 2 == 0 and x.data_ptr() % 4 == 0
    if n_cols * x.itemsize > WIDE_BYTES:
        parts, block, num_warps = _split(n_cols, small_up_to=65536)
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=x.device)
        _split_row_fwd_kernel[(n_rows * parts,)](
            x, y, slots, stride, n_cols, MAX_POLLS, parts, triton.next_power_of_2(parts), block,
            LOOP_COLS * num_warps, num_warps=num_warps,
        )  # fmt: skip
    elif n_cols > TILE_COLS and x.itemsize == 2 and even:
        minus_inf = {torch.bfloat16: 0xFF80FF80, torch.float16: 0xFC00FC00}[x.dtype] - 2**32
        _packed_row_fwd_kernel[(n_rows,)](
            x, y, stride, n_cols, 0, minus_inf, block, num_warps=max(1, block // 2048)
        )
    else:
        rows = max(1, 2048 // block)
        num_warps = max(1, rows * block // 2048)
        grid = (triton.cdiv(n_rows, rows),)
        _row_fwd_kernel[grid](x, y, stride, n_rows, n_cols, rows, block, num_warps=num_warps)


def _split(n_cols: int, small_up_to: int) -> tuple[int, int, int]:
    """Return into how many parts a row is split, the columns of a part, and its warps."""
    block = PART_COLS[n_cols > small_up_to]
    return triton.cdiv(n_cols, block), block, max(1, block // 2048)


def _backward(y: torch.Tensor, dy: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Compute dx = y * (dy - sum of y * dy) for each row."""
    # I/O: read y + read dy + write dx
    n_rows, n_cols = y.shape
    dx = torch.empty_like(y)
    block = triton.next_power_of_2(n_cols)
    stride = dy.stride(0)
    if algorithm != "row":
        block = min(block, 8192)
        num_warps = max(1, block // 1024)
        _loop_bwd_kernel[(n_rows,)](y, dy, dx, stride, n_cols, block, num_warps=num_warps)
    elif n_cols * y.itemsize > WIDE_BYTES:
        parts, block, num_warps = _split(n_cols, small_up_to=131072)
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=y.device)
        _split_row_bwd_kernel[(n_rows * parts,)](
            y, dy, dx, slots, stride, n_cols, MAX_POLLS, parts, triton.next_power_of_2(parts),
            block, LOOP_COLS * num_warps, num_warps=num_warps,
        )  # fmt: skip
    else:
        rows = max(1, 1024 // block)
        num_warps = min(16, rows * block // 1024)
        grid = (triton.cdiv(n_rows, rows),)
        _row_bwd_kernel[grid](y, dy, dx, stride, n_rows, n_cols, rows, block, num_warps=num_warps)
    return dx


def _as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """View, or where it must be copy, a tensor as a matrix with ``dim`` along its columns."""
    if dim not in (-1, x.ndim - 1):
        x = x.movedim(dim, -1)
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    if runtime.INTERPRETED:
        x = x.to(runtime.kernel_dtype(x.dtype))
    return x if x.stride(1) == 1 else x.contiguous()


def _like(rows: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Give rows the shape and dtype of x again, the reverse of :func:`_as_rows`."""
    if runtime.INTERPRETED:
        rows = rows.to(x.dtype)
    if dim in (-1, x.ndim - 1):
        return rows if rows.shape == x.shape else rows.view(x.shape)
    return rows.view(x.movedim(dim, -1).shape).movedim(-1, dim)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, algorithm):
        rows = _as_rows(x, dim)
        with runtime.launching_on(x):
            y = _forward(rows, algorithm) if x.numel() else torch.empty_like(rows)
        y = _like(y, x, dim)
        ctx.save_for_backward(y)
        ctx.dim, ctx.algorithm = dim, algorithm
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: PyTorch can have it
            return y * (dy - (y * dy).sum(ctx.dim, keepdim=True)), None, None
        rows = _as_rows(y, ctx.dim)
        with runtime.launching_on(y):
            dx = _backward(rows, _as_rows(dy, ctx.dim), ctx.algorithm) if y.numel() else rows
        return _like(dx, y, ctx.dim), None, None


def softmax(x: torch.Tensor, dim: int = -1, *, algorithm: str = "auto") -> torch.Tensor:
    """Softmax over one dimension, as :func:`torch.softmax` computes it.

    y = exp(x - max(x)) / sum(exp(x - max(x))) along ``dim``. A row that is -inf throughout gives
    NaN, as in PyTorch, and so does one that holds NaN or +inf.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16. A copy is made unless
            ``dim`` is contiguous and the other dimensions can be viewed as one.
        dim: the dimension that sums to 1, from -x.ndim to x.ndim - 1.
        algorithm: how a row is read. ``"row"`` once, up to 1,048,576 columns; ``"three_pass"``
            three times; ``"online"`` twice, a row a program; ``"online_2d"`` twice, four rows a
            program. ``"auto"`` takes ``"row"``, which was measured fastest wherever it applies,
            and else ``"online"``.

    Returns:
        y, of the shape and dtype of ``x``; contiguous when ``dim`` is the last, else a view in
        which ``dim`` is the contiguous dimension. Gradients of any order flow to ``x``.

    Raises:
        TypeError: ``x`` is no tensor or of another dtype, or ``dim`` is no integer.
        ValueError: ``dim`` is out of range, ``algorithm`` is unknown or cannot take so many
            columns, or ``x`` is not where kernels run.

    Source: Milakov and Gimelshein, arXiv:1805.02867, 2018, for the online algorithms.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}.")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"x must be float32, float16 or bfloat16, got {x.dtype}: pass x.float(), for example."
        )
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}.")
    ndim = max(x.ndim, 1)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must lie in [{-ndim}, {ndim - 1}] for this x, got {dim}.")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}.")
    n_cols = x.shape[dim] if x.ndim else 1
    if algorithm == "row" and n_cols > ROW_COLS:
        raise ValueError(
            f"algorithm 'row' takes at most {ROW_COLS:,} columns, got {n_cols:,}: pass 'online', "
            "'online_2d', 'three_pass' or 'auto'."
        )
    runtime.require_device(x=x)
    if algorithm == "auto":
        algorithm = "row" if n_cols <= ROW_COLS else "online"
    return _Softmax.apply(x, dim, algorithm)
