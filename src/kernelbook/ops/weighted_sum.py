"""The weighted sum of the rows of a matrix, the operator of the first chapter.

    y[i] = sum over j of x[i, j] * w[j]

    dx[i, j] = dy[i] * w[j],   dw[j] = sum over i of dy[i] * x[i, j]

A program works on a block of rows and columns. Where programs share a sum, each writes the part
that it has into a row of its own, and a second kernel adds these rows up, always in the same order,
so that results are equal bit by bit from run to run. Products and sums are float32.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops import checks, library
from kernelbook.ops.launch import Launch, planned

FWD_TILE, WARPS = 8192, 4
"""Numbers in a block of x in forward, and the warps of any block. A thread has eight loads of 16
bytes under way, so that a program waits for memory once: on an H200, 4,096 rows of 4,096 numbers in
bfloat16 took 16.6 microseconds in blocks of two whole rows, and 22.5 in four blocks for each four
rows. Of numbers of four bytes it has as many loads, and half of the numbers."""

FWD_ROWS, FWD_LONG, MOST_ROWS = 2, 4096, 512
"""Forward takes blocks of two long rows, whose weights it reads once. Rows of more than 4,096
numbers of two bytes need several blocks, and these are half as large and have half of the warps: on
an H200, 13,107 rows of 5,120 then took 41 microseconds instead of 47. No block has more than 512
short rows: 2**25 rows of two such numbers took 53 microseconds with them, and 56 with 2,048."""

SQUARE = 64
"""Rows and columns of a block where x is transposed, so that what is contiguous in x and what is
contiguous in dx both have lines of 128 bytes."""

FLAT_COLS, SHORT_BYTES = 64, 4096
"""Forward reads rows of up to 64 numbers as one line, if they are contiguous and their length is a
power of two, in blocks of 4,096 bytes: on an H200, 2**26 numbers in bfloat16 took 37 microseconds
instead of 45 in rows of 64, and 41 instead of 129 in rows of 8. Backward has blocks of as many
bytes of short rows: 2**25 numbers in float32 took 76 microseconds instead of 84 in rows of 32."""

UNIT = 16
"""What else a kernel is told of rows: the greatest power of two up to 16 that divides their length
and stride. Triton asks only whether 16 does, and otherwise loads one number at a time, but of rows
of 100 numbers in bfloat16 a thread can load four: 2**26 took 46 microseconds instead of 114."""

EVICT = "evict_first"
"""What forward says of x, so that L2 gives up first what is not read again, and writes less of what
others left there to memory: on an H200, 16,384 rows of 4,096 numbers in bfloat16 took 37
microseconds instead of 43."""

FWD_PROGRAMS = 4
"""Programs for each multiprocessor. Where there are fewer, forward splits the rows."""

BWD_TILE, BWD_ROWS, BWD_PROGRAMS = 4096, (2, 4), (8, 4)
"""Backward: numbers in a block of long rows, rows of a block if they are long, and programs for
each multiprocessor, about as many as run at once, because each leaves a row of partial sums. The
second of each pair is for aligned rows from BWD_LONG columns on. There, half as many programs, with
twice as many loads under way in each, leave half as many sums: on an H200, 4,096 rows of 4,096
numbers in bfloat16 took 25.1 microseconds instead of 26.3."""

BWD_LONG, ALIGNED = 1024, 16
"""Columns of such a row, and the multiple that its length and its stride have to be."""

SUM_TILE, SUM_ROWS, SUM_COLS = 4096, 256, 256
"""Numbers in a block of the kernel that adds partial sums, and its rows and columns at most. Where
it may be started early, the backward pass of 4,096 rows of 4,096 numbers takes one to two
microseconds less: the launch of a kernel that waits is over when the kernel before it ends."""


# -- kernels --------------------------------------------------------------------------------------


@triton.jit
def weighted_sum_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), contiguous
    y_ptr,  # output, (n_rows); or partial sums, (n_parts, n_rows), float32
    stride_row,  # of x
    stride_col,
    n_rows,
    n_cols,
    part_cols,  # columns of a part
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EVICT: tl.constexpr = "",  # what L2 gives up first: x, by "evict_first", or what is oldest
    UNIT: tl.constexpr = 1,  # what n_cols and stride_row are multiples of
    FLAT: tl.constexpr = False,  # whether x is contiguous, with rows of BLOCK_COLS numbers
):
    # -- place: my rows, and my part of their columns
    n_cols, stride_row = n_cols // UNIT * UNIT, stride_row // UNIT * UNIT
    part_cols = part_cols // UNIT * UNIT  # whole blocks, so whole units
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1).to(tl.int64)
    first = part * part_cols
    last = tl.minimum(first + part_cols, n_cols)

    if FLAT:
        # -- once: my rows are one line of numbers, cut into rows when they have arrived
        line = tl.arange(0, BLOCK_ROWS * BLOCK_COLS)
        inside = line < tl.minimum(n_rows - first_row, BLOCK_ROWS) * BLOCK_COLS
        x_line = x_ptr + first_row * BLOCK_COLS + line
        x = tl.load(x_line, mask=inside, other=0.0, eviction_policy=EVICT)
        w = tl.load(w_ptr + tl.arange(0, BLOCK_COLS)).to(tl.float32)
        total = tl.reshape(x, (BLOCK_ROWS, BLOCK_COLS)).to(tl.float32) * w[None, :]
    else:
        # -- loop: products stay where they were computed until the last block
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        x_ptrs = x_ptr + rows[:, None] * stride_row
        for start in range(first, last, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            inside = (rows < n_rows)[:, None] & (cols < last)[None, :]
            x_cols = x_ptrs + cols[None, :] * stride_col
            x = tl.load(x_cols, mask=inside, other=0.0, eviction_policy=EVICT)
            w = tl.load(w_ptr + cols, mask=cols < last, other=0.0)
            total += x.to(tl.float32) * w.to(tl.float32)[None, :]

    # -- end: one reduction
    tl.store(y_ptr + part * n_rows + rows, tl.sum(total, axis=1), mask=rows < n_rows)


@triton.jit
def weighted_sum_bwd_kernel(
    dy_ptr,  # gradient of y, (n_rows)
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), contiguous
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # gradient of w, (n_cols); or partial sums, (n_parts, n_cols), float32; or None
    stride_dy,
    stride_row,  # of x
    stride_col,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EARLY: tl.constexpr = False,  # whether the kernel that adds the sums may be started meanwhile
    UNIT: tl.constexpr = 1,  # what n_cols and stride_row are multiples of
):
    # -- place: my columns; my rows come in the loop
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n_cols, stride_row = n_cols // UNIT * UNIT, stride_row // UNIT * UNIT
    cols = tl.program_id(0).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    part = tl.program_id(1).to(tl.int64)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    step = tl.num_programs(1) * BLOCK_ROWS

    # -- loop: x is read once, for dw; dx needs dy and w alone
    for start in range(part * BLOCK_ROWS, n_rows, step):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows * stride_dy, mask=rows < n_rows, other=0.0).to(tl.float32)
        if dw_ptr is not None:
            x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col
            x = tl.load(x_ptrs, mask=inside, other=0.0)
        if dx_ptr is not None:  # stored while x is on its way
            dx_ptrs = dx_ptr + rows[:, None] * n_cols + cols[None, :]
            tl.store(dx_ptrs, dy[:, None] * w[None, :], mask=inside)
        if dw_ptr is not None:
            dw += dy[:, None] * x.to(tl.float32)

    # -- end: one row of sums for the whole program
    if dw_ptr is not None:
        tl.store(dw_ptr + part * n_cols + cols, tl.sum(dw, axis=0), mask=cols < n_cols)


@triton.jit
def part_sum_kernel(
    parts_ptr,  # partial sums, (n_parts, n), float32
    sums_ptr,  # their sums, (n)
    n_parts,
    n,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EARLY: tl.constexpr = False,  # whether this kernel may be started before the parts are there
):
    # -- wait: until the kernel before this one has ended and what it wrote can be read
    if EARLY:
        tl.extra.cuda.gdc_wait()

    # -- add: the rows of partial sums, of my columns
    cols = tl.program_id(0).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, n_parts, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (rows < n_parts)[:, None] & (cols < n)[None, :]
        total += tl.load(parts_ptr + rows[:, None] * n + cols[None, :], mask=inside, other=0.0)
    tl.store(sums_ptr + cols, tl.sum(total, axis=0), mask=cols < n)


# -- launches -------------------------------------------------------------------------------------


def _unit(n_cols: int, stride_row: int) -> int:
    """Return the greatest power of two, up to 16, that divides a row's length and their stride."""
    return math.gcd(n_cols, stride_row, UNIT)


def _block(
    n_rows: int, n_cols: int, transposed: bool, tile: int, long_rows: int
) -> tuple[int, int]:
    """Return the rows and columns of a block: short rows whole, or part of ``long_rows``."""
    rows, cols = (runtime.next_power_of_2(n) for n in (n_rows, n_cols))
    if transposed:
        return min(rows, SQUARE), min(cols, SQUARE)
    rows = min(rows, max(long_rows, tile // min(cols, tile)), MOST_ROWS)
    return rows, min(cols, tile // rows)


@planned
def _fwd_launch(
    n_rows: int, n_cols: int, itemsize: int, stride: tuple[int, int], device: torch.device
) -> tuple[Launch, int]:
    """Return the launch of forward, and into how many parts it splits a row."""
    tile, warps, transposed = 2 * FWD_TILE // itemsize, WARPS, stride[0] < stride[1]
    if itemsize == 2 and n_cols > FWD_LONG:
        tile, warps = tile // 2, warps // 2
    short = n_cols <= FLAT_COLS and n_cols == runtime.next_power_of_2(n_cols)
    flat = short and stride == (n_cols, 1)
    if flat:
        tile = SHORT_BYTES // itemsize
    rows, cols = _block(n_rows, n_cols, transposed, tile, FWD_ROWS)
    programs, blocks = runtime.cdiv(n_rows, rows), runtime.cdiv(n_cols, cols)
    most = FWD_PROGRAMS * runtime.multiprocessors(device)
    parts = min(blocks, runtime.cdiv(2 * most, programs)) if programs < most else 1
    part_cols = runtime.cdiv(blocks, parts) * cols
    parts = runtime.cdiv(n_cols, part_cols)
    launch = Launch(
        weighted_sum_fwd_kernel, (programs, parts), *stride, n_rows, n_cols, part_cols, rows, cols,
        EVICT=EVICT, UNIT=_unit(n_cols, stride[0]), FLAT=flat, num_warps=warps,
    )  # fmt: skip
    return launch, parts


@planned
def _bwd_launch(
    n_rows: int,
    n_cols: int,
    itemsize: int,
    strides: tuple[int, int, int],
    sums: bool,
    device: torch.device,
) -> tuple[Launch, int]:
    """Return the launch of backward, and how many rows of partial sums it leaves."""
    transposed = sums and strides[1] < strides[2]
    aligned = not transposed and n_cols % ALIGNED == 0 and strides[1] % ALIGNED == 0
    long = aligned and n_cols >= BWD_LONG
    tile = BWD_TILE if long else SHORT_BYTES // itemsize
    rows, cols = _block(n_rows, n_cols, transposed, tile, BWD_ROWS[long])
    blocks = runtime.cdiv(n_cols, cols)
    most = runtime.cdiv(BWD_PROGRAMS[long] * runtime.multiprocessors(device), blocks)
    parts = min(most, runtime.cdiv(n_rows, rows))
    launch = Launch(
        weighted_sum_bwd_kernel, (blocks, parts), *strides, n_rows, n_cols, rows, cols,
        EARLY=runtime.early_start(device), UNIT=_unit(n_cols, strides[1]), num_warps=WARPS,
    )  # fmt: skip
    return launch, parts


@planned
def _sum_launch(n_parts: int, n: int, device: torch.device) -> Launch:
    rows = min(runtime.next_power_of_2(n_parts), SUM_ROWS)
    cols = min(SUM_TILE // rows, SUM_COLS)
    early = runtime.early_start(device)
    options = {"EARLY": early, "num_warps": WARPS} | ({"launch_pdl": True} if early else {})
    return Launch(part_sum_kernel, (runtime.cdiv(n, cols),), n_parts, n, rows, cols, **options)


def _in_parts(n_parts: int, sums: torch.Tensor) -> torch.Tensor:
    """Return where programs write their sums: into the result, if each sum is one program's."""
    if n_parts == 1:
        return sums
    return torch.empty((n_parts, sums.numel()), dtype=torch.float32, device=sums.device)


def _forward(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write the weighted sum of each row of a matrix to y."""
    # I/O: read x + read weight + write y
    launch, n_parts = _fwd_launch(*x.shape, x.itemsize, x.stride(), x.device)
    parts = _in_parts(n_parts, y)
    launch(x, weight, parts)
    if n_parts > 1:
        _sum_launch(n_parts, y.numel(), y.device)(parts, y)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
) -> None:
    """Write the gradients of a matrix and of the weight, those that are not None."""
    # I/O: read dy + read x + read weight + write dx + write dw
    strides = dy.stride(0), *x.stride()
    launch, n_parts = _bwd_launch(*x.shape, x.itemsize, strides, dw is not None, x.device)
    parts = None if dw is None else _in_parts(n_parts, dw)
    launch(dy, x, weight, dx, parts)
    if parts is not dw:
        _sum_launch(n_parts, dw.numel(), dw.device)(parts, dw)


# -- what PyTorch sees ----------------------------------------------------------------------------


def _rows(x: torch.Tensor) -> torch.Tensor:
    """View, or where it must be copy, a tensor as a matrix of any strides."""
    return runtime.readable(x).reshape(-1, x.shape[-1])


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=runtime.kernel_dtype(dtype), device=device)


def _rounded(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a result in its dtype; the interpreter's kernels may have had another."""
    return result.to(dtype) if runtime.INTERPRETED else result


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Return what stands for a gradient that is not needed."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def _run(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weighted sums in a dtype."""
    if not x.numel():
        return torch.zeros(x.shape[:-1], dtype=dtype, device=x.device)
    y = _empty(x.shape[:-1], dtype, x.device)
    with runtime.launching_on(x):
        _forward(_rows(x), runtime.readable(weight).contiguous(), y)
    return _rounded(y, dtype)


def _run_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and weight; what is not needed is empty."""
    if not x.numel():
        return tuple(result.zero_() for result in _fake_backward(dy, x, weight, needed))
    dx, dw = (
        _empty(of.shape, of.dtype, of.device) if need else None
        for of, need in zip((x, weight), needed, strict=True)
    )
    with runtime.launching_on(x):
        dys = runtime.readable(dy).reshape(-1)
        _backward(dys, _rows(x), runtime.readable(weight).contiguous(), dx, dw)
    return tuple(
        _nothing(of) if gradient is None else _rounded(gradient, of.dtype)
        for gradient, of in ((dx, x), (dw, weight))
    )


def _setup_context(ctx, inputs, output):
    """Keep what the wanted gradients are made of: dx needs no x, and dw no weight."""
    x, weight, _ = inputs
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)


def _gradient(ctx, dy):
    """Return the gradients of x and weight."""
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad[:2]
    if x is None:  # a shape is enough, and no number is read
        x = dy.new_empty((), dtype=ctx.dtypes[0]).expand(ctx.shape)
    if weight is None:
        weight = dy.new_empty(ctx.shape[-1], dtype=ctx.dtypes[1])
    gradients = _WEIGHTED_SUM_BACKWARD(dy, x, weight, list(needed))
    return *(g if n else None for g, n in zip(gradients, needed, strict=True)), None


def _setup_second_context(ctx, inputs, output):
    dy, x, weight, ctx.needed = inputs
    ctx.save_for_backward(dy, x, weight)


def _second_gradient(ctx, ddx, ddw):
    """dx is linear in dy and weight, and dw in dy and x: the same two operators again."""
    dy, x, weight = ctx.saved_tensors
    needs_dx, needs_dw = ctx.needed
    of_dy = of_x = of_weight = None
    if needs_dx:
        of_dy = _WEIGHTED_SUM(ddx, weight, torch.float32)
        _, of_weight = _WEIGHTED_SUM_BACKWARD(dy, ddx, weight, [False, True])
    if needs_dw:
        through_dw = _WEIGHTED_SUM(x, ddw, torch.float32)
        of_dy = through_dw if of_dy is None else of_dy + through_dw
        of_x, _ = _WEIGHTED_SUM_BACKWARD(dy, x, ddw, [True, False])
    return None if of_dy is None else of_dy.to(dy.dtype), of_x, of_weight, None


def _fake(x, weight, dtype):
    return torch.empty(x.shape[:-1], dtype=dtype, device=x.device)


def _fake_backward(dy, x, weight, needed):
    return tuple(
        torch.empty(of.shape, dtype=of.dtype, device=of.device) if need else _nothing(of)
        for of, need in zip((x, weight), needed, strict=True)
    )


def _batch(info, in_dims, x, weight, dtype):
    """A batch of rows is more rows. With a weight for each call, PyTorch sums."""
    x = library.batched(info, in_dims[0], x)
    if in_dims[1] is None:
        return _WEIGHTED_SUM.op(x, weight, dtype), 0
    return (x.float() * _beside(info, in_dims[1], x, weight)).sum(-1).to(dtype), 0


def _batch_backward(info, in_dims, dy, x, weight, needed):
    """Each call has sums of its own, so PyTorch computes them."""
    dy, x = (library.batched(info, d, t) for d, t in zip(in_dims, (dy, x), strict=False))
    wide = dy.float().unsqueeze(-1)
    dx = dw = None
    if needed[0]:
        dx = (wide * _beside(info, in_dims[2], x, weight)).to(x.dtype)
    if needed[1]:
        dw = (wide * x.float()).flatten(1, -2).sum(1) if x.ndim > 2 else wide * x.float()
        dw = dw.to(weight.dtype)
    gradients = tuple(_nothing(of) if g is None else g for g, of in ((dx, x), (dw, weight)))
    return gradients, tuple(0 if need else None for need in needed)


def _beside(info, in_dim, x, weight):
    """Return weights in float32, shaped to meet x, whose first dimension is a batch."""
    weight = library.batched(info, in_dim, weight).float()
    return weight.reshape(info.batch_size, *[1] * (x.ndim - 2), weight.shape[-1])


_WEIGHTED_SUM = library.Operator(
    "weighted_sum",
    _run,
    fake=_fake,
    batch=_batch,
    setup_context=_setup_context,
    backward=_gradient,
)
_WEIGHTED_SUM_BACKWARD = library.Operator(
    "weighted_sum_backward",
    _run_backward,
    fake=_fake_backward,
    batch=_batch_backward,
    setup_context=_setup_second_context,
    backward=_second_gradient,
)


def _result_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype that (x * weight).sum(-1) has in PyTorch, where autocast may change it."""
    if library.autocasts(x):
        return (x.new_empty(0) * weight.new_empty(0)).sum(-1).dtype
    return x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)


def weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the last dimension: ``(x * weight).sum(-1)`` in one pass.

    y = sum over j of x[..., j] * weight[j]

    Products and sums are computed in float32. Results and gradients of two runs are equal bit by
    bit, and a gradient that is not needed is not computed.

    Args:
        x: the input, of shape (..., d) and any stride, float32, float16 or bfloat16. A copy is made
            only where its first dimensions cannot be viewed as one.
        weight: one weight for each element of a row, of shape (d), and of the same dtypes, whatever
            that of ``x``.

    Returns:
        y, of shape (...), contiguous, in the dtype that ``(x * weight).sum(-1)`` has in PyTorch,
        also under autocast. Gradients of any order flow to ``x`` and ``weight``, each in its own
        dtype.

    Raises:
        TypeError: ``x`` or ``weight`` is no dense tensor or of another dtype.
        ValueError: ``x`` has no dimension, ``weight`` has another shape than (d), or a tensor is
            not where kernels run.
    """
    checks.tensor("x", x)
    checks.tensor("weight", weight)
    if not x.ndim:
        raise ValueError("x must have a last dimension to sum over, got a scalar: pass x.view(1).")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {tuple(x.shape[-1:])}, that of a row of x, got "
            f"{tuple(weight.shape)}: pass one weight for each element of a row."
        )
    checks.same_device(x=x, weight=weight)
    return _WEIGHTED_SUM(x, weight, _result_dtype(x, weight))
