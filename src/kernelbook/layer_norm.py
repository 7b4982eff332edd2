"""Layer normalisation over the last dimensions.

    xhat[j] = (x[j] - mean) * rstd,   y[j] = xhat[j] * w[j] + b[j]

    mean = sum of x[j] / N,   rstd = 1 / sqrt(sum of (x[j] - mean)**2 / N + eps)

The kernels see a matrix with one row for each normalisation. Forward keeps a row on chip, in one
program or, when it is wide, in several, and leaves mean and rstd for the backward pass:

    wdy[j] = w[j] * dy[j],   c1 = sum of xhat[j] * wdy[j] / N,   c2 = sum of wdy[j] / N

    dx[j] = (wdy[j] - (xhat[j] * c1 + c2)) * rstd
    dw[j] = sum over rows of dy[j] * xhat[j],   db[j] = sum over rows of dy[j]

The sums over rows are shared between programs, in one of two ways. "partial": each program keeps
the sums of its own rows, and a second kernel adds them up, always in the same order. "lock":
programs take turns to add to a few buffers, in whatever order they come.

Statistics and sums are float32 whatever the input. The variance is always the mean of squared
deviations, never the difference of two large means.

Sources: Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, 2016. Chan, Golub, LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", COMPSTAT 1982 (the
merge of parts).
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from numbers import Real

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.softmax import MAX_POLLS, _narrow, _wait_for_parts, _widen

PIECES = tl.constexpr(4)


@triton.jit
def _per(total, count):
    """total / count, and the last bit as well: the mean of equal numbers is that number.

    ``/`` on a GPU may be off by an ulp, and the exact division costs dozens of registers.
    """
    count = 1.0 * count
    quotient = total / count
    return tl.fma(tl.fma(-quotient, count, total), 1 / count, quotient)


@triton.jit
def _scale_and_shift(xhat, w_ptr, b_ptr, cols, inside):
    """xhat * w + b, where either may be absent."""
    y = xhat
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    stride_row,  # of x
    n_rows,
    n_cols,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    # -- load: some whole rows
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * stride_row + cols, mask=inside, other=0.0, cache_modifier=".cg")
    x = x.to(tl.float32)

    # -- statistics: the mean, then the squares of what deviates from it
    mean = _per(tl.sum(x, axis=1, keep_dims=True), n_cols)
    deviation = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(deviation * deviation, axis=1, keep_dims=True) / n_cols
    rstd = tl.rsqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)

    # -- write: normalise, scale and shift
    y = _scale_and_shift(deviation * rstd, w_ptr, b_ptr, cols, cols < n_cols)
    tl.store(y_ptr + rows * n_cols + cols, y, mask=inside)


@triton.jit
def _piece(piece, n_numbers, LENGTH: tl.constexpr, FULL: tl.constexpr):
    """Where a piece of a row lies, and which of it is there: all, without asking, if FULL."""
    offsets = piece * LENGTH + tl.arange(0, LENGTH)
    return offsets, FULL | (offsets < n_numbers)


@triton.jit
def _load_pairs(ptrs, piece, n_cols, PAIRS: tl.constexpr, FULL: tl.constexpr):
    """A piece of a row of 16-bit numbers, two in an int32; the row passes by L1."""
    pairs, inside = _piece(piece, n_cols // 2, PAIRS, FULL)
    return tl.load(ptrs + pairs, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def _load_parameter(ptr, piece, n_cols, default, PAIRS: tl.constexpr, FULL: tl.constexpr):
    """A piece of the weight or bias as float32, or the default where there is none."""
    if ptr is None:
        return tl.full((2 * PAIRS,), default, tl.float32)
    elif ptr.dtype.element_ty.primitive_bitwidth == 16:
        pairs, inside = _piece(piece, n_cols // 2, PAIRS, FULL)
        ptrs = ptr.to(tl.pointer_type(tl.int32)) + pairs
        return _widen(tl.load(ptrs, mask=inside, other=0), ptr.dtype.element_ty)
    else:
        cols, inside = _piece(piece, n_cols, 2 * PAIRS, FULL)
        return tl.load(ptr + cols, mask=inside, other=0.0)


@triton.jit
def _afresh(pieces, zero):
    """The same numbers, which the compiler takes for others: it will not keep them widened."""
    same = ()
    for piece in tl.static_range(PIECES):
        same = same + (pieces[piece] + zero,)
    return same


@triton.jit
def _packed_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols), 16 bits
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    stride_row,  # of x
    n_cols,
    eps,
    zero,  # 0, which the compiler must not know
    PAIRS: tl.constexpr,  # pairs of numbers in a piece; the pieces cover the row
    FULL: tl.constexpr,  # whether they do exactly: masks would cost registers
):
    # -- load: a row in four pieces, two numbers in each register
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs = (x_ptr + row * stride_row).to(tl.pointer_type(tl.int32))
    y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
    x = ()
    for piece in tl.static_range(PIECES):
        x = x + (_load_pairs(x_ptrs, piece, n_cols, PAIRS, FULL),)

    # -- statistics: widened for one step at a time
    total = tl.zeros((2 * PAIRS,), tl.float32)
    for piece in tl.static_range(PIECES):
        total += _widen(x[piece], dtype)
    mean = _per(tl.sum(total, axis=0), n_cols)
    x = _afresh(x, zero)
    m2 = tl.zeros((2 * PAIRS,), tl.float32)
    for piece in tl.static_range(PIECES):
        _, inside = _piece(piece, n_cols, 2 * PAIRS, FULL)
        deviation = tl.where(inside, _widen(x[piece], dtype) - mean, 0.0)
        m2 += deviation * deviation
    rstd = tl.rsqrt(tl.sum(m2, axis=0) / n_cols + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)

    # -- write: a piece at a time, so that only a piece of weight and bias is in registers
    x = _afresh(x, zero)
    for piece in tl.static_range(PIECES):
        pairs, inside = _piece(piece, n_cols // 2, PAIRS, FULL)
        w = _load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, FULL)
        b = _load_parameter(b_ptr, piece, n_cols, 0.0, PAIRS, FULL)
        y = (_widen(x[piece], dtype) - mean) * rstd * w + b
        tl.store(y_ptrs + pairs, _narrow(y, dtype), mask=inside)
        tl.debug_barrier()  # or all pieces of both are loaded first


@triton.jit
def _moments_of_part(x_ptrs, there, part, n_cols, BLOCK_COLS: tl.constexpr):
    """A part of some rows, and its mean and sum of squared deviations as the 64 bits of a slot.

    That sum is never negative, so its sign bit is free: it says that the slot is filled.
    """
    start = part * BLOCK_COLS
    cols = start + tl.arange(0, BLOCK_COLS)[None, :]
    inside = there & (cols < n_cols)
    x = tl.load(x_ptrs + cols, mask=inside, other=0.0).to(tl.float32)
    mean = _per(tl.sum(x, axis=1, keep_dims=True), tl.minimum(n_cols - start, BLOCK_COLS))
    deviation = tl.where(inside, x - mean, 0.0)
    m2 = tl.sum(deviation * deviation, axis=1, keep_dims=True)
    high = mean.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = m2.to(tl.int32, bitcast=True).to(tl.int64) & 0x7FFFFFFF
    return x, high | low | 0x80000000


@triton.jit
def _merge_moments(slots, parts, n_cols, BLOCK_COLS: tl.constexpr):
    """Mean and variance of rows from the slots of their parts."""
    counts = tl.maximum(tl.minimum(n_cols - parts * BLOCK_COLS, BLOCK_COLS), 0)
    means = (slots >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    m2s = (slots & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    mean = _per(tl.sum(means * counts, axis=1, keep_dims=True), n_cols)
    m2s += counts * (means - mean) * (means - mean)
    m2s = tl.where(counts > 0, m2s, 0.0)
    return mean, tl.sum(m2s, axis=1, keep_dims=True) / n_cols


@triton.jit
def _split_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_row,  # of x
    n_rows,
    n_cols,
    eps,
    max_polls,  # how often to look whether the other parts are there
    BLOCK_ROWS: tl.constexpr,
    N_PARTS: tl.constexpr,  # programs for BLOCK_ROWS rows
    PARTS: tl.constexpr,  # a power of two, at least N_PARTS
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
):
    # -- publish: the moments of my part, which stays in registers
    group, part = tl.program_id(0) // N_PARTS, tl.program_id(0) % N_PARTS
    rows = group.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    there = rows < n_rows
    x_ptrs, slots_ptrs = x_ptr + rows * stride_row, slots_ptr + rows * N_PARTS
    x, slot = _moments_of_part(x_ptrs, there, part, n_cols, BLOCK_COLS)
    tl.atomic_xchg(slots_ptrs + part, slot, mask=there, sem="relaxed")

    # -- collect: those of all parts; if they do not come, compute each of them, mine last
    parts = tl.arange(0, PARTS)[None, :]
    slots, ready = _wait_for_parts(slots_ptrs + parts, there & (parts < N_PARTS), max_polls)
    if ready == 0:
        for turn in range(N_PARTS):
            other = (part + 1 + turn) % N_PARTS
            x, slot = _moments_of_part(x_ptrs, there, other, n_cols, BLOCK_COLS)
            slots = tl.where(parts == other, slot, slots)
    mean, variance = _merge_moments(slots, parts, n_cols, BLOCK_COLS)
    rstd = tl.rsqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=there & (part == 0))
        tl.store(rstd_ptr + rows, rstd, mask=there & (part == 0))

    # -- write: normalise, scale and shift; both rows share what is loaded of w and b
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    y = _scale_and_shift((x - mean) * rstd, w_ptr, b_ptr, cols, cols < n_cols)
    tl.store(y_ptr + rows * n_cols + cols, y, mask=there & (cols < n_cols))


@triton.jit
def _loop_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    stride_row,  # of x
    n_cols,
    eps,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    y_ptr += row * n_cols
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        total += tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    mean = _per(tl.sum(total, axis=0), n_cols)
    m2 = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        deviation = tl.where(cols < n_cols, x - mean, 0.0)
        m2 += deviation * deviation
    rstd = tl.rsqrt(tl.sum(m2, axis=0) / n_cols + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = _scale_and_shift((x - mean) * rstd, w_ptr, b_ptr, cols, cols < n_cols)
        tl.store(y_ptr + cols, y, mask=cols < n_cols)


@triton.jit
def _load_weight(w_ptr, cols, inside):
    """The weight or, where there is none, a one for each column."""
    if w_ptr is None:
        return tl.full(cols.shape, 1.0, tl.float32)
    else:
        return tl.load(w_ptr + cols, mask=inside, other=0.0)


@triton.jit
def _hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, inside):
    """Store the sums of a program in its own buffer or, under a lock, add them to a shared one."""
    # -- acquire: one thread takes the lock; the barrier holds back the loads of the others
    if locks_ptr is not None:
        while tl.atomic_cas(locks_ptr + lock, 0, 1, sem="acquire") != 0:
            pass
        tl.debug_barrier()

    # -- add: to what the holders before me have stored
    if dw_ptr is not None:
        if locks_ptr is not None:
            dw += tl.load(dw_ptr + offsets, mask=inside, other=0.0)
        tl.store(dw_ptr + offsets, dw, mask=inside)
    if db_ptr is not None:
        if locks_ptr is not None:
            db += tl.load(db_ptr + offsets, mask=inside, other=0.0)
        tl.store(db_ptr + offsets, db, mask=inside)

    # -- release: the barrier waits for the stores of all threads, and then one gives the lock back
    if locks_ptr is not None:
        tl.debug_barrier()
        tl.atomic_xchg(locks_ptr + lock, 0, sem="release")


@triton.jit
def _row_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers), int32, zero; or None: a buffer for each program
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
    NUM_STAGES: tl.constexpr,  # loads of so many turns of the loop are under way at once
):
    # -- begin: sums that live in registers through all my rows
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    w = _load_weight(w_ptr, cols, cols < n_cols)
    w = tl.where(n_cols > 1, w, 0.0)  # y does not depend on the one element of a row: dx is 0
    dw = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    db = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, n_rows, step, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = (rows < n_rows) & (cols < n_cols)
        x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)

        # -- add: these rows to the sums (dy is 0 outside, and so are both terms)
        xhat = (x - mean) * rstd
        dw += dy * xhat
        db += dy

        # -- row: the gradient of x
        if dx_ptr is not None:
            wdy = dy * w.to(tl.float32)
            c1 = _per(tl.sum(xhat * wdy, axis=1, keep_dims=True), n_cols)
            c2 = _per(tl.sum(wdy, axis=1, keep_dims=True), n_cols)
            dx = (wdy - (xhat * c1 + c2)) * rstd
            tl.store(dx_ptr + rows * n_cols + cols, dx, mask=inside)

    # -- end: one row of sums for the whole program
    cols = tl.arange(0, BLOCK_COLS)
    dw, db = tl.sum(dw, axis=0), tl.sum(db, axis=0)
    buffer = tl.program_id(0) % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    _hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, buffer, offsets, cols < n_cols)


@triton.jit
def _sum_pairs(c1, c2, other_c1, other_c2):
    return c1 + other_c1, c2 + other_c2


@triton.jit
def _packed_row_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols), 16 bits
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols), 16 bits
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, PIECES), int32, zero; or None: a buffer for each program
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    zero,  # 0, which the compiler must not know
    PAIRS: tl.constexpr,  # pairs of numbers in a piece; the pieces are the row, without a mask
):
    # -- begin: the sums of all columns take half of the registers
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    dy_dtype: tl.constexpr = dy_ptr.dtype.element_ty
    INT32: tl.constexpr = tl.pointer_type(tl.int32)
    dw, db = (), ()
    for _ in tl.static_range(PIECES):
        dw = dw + (tl.zeros((2 * PAIRS,), tl.float32),)
        db = db + (tl.zeros((2 * PAIRS,), tl.float32),)
    for turn in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(turn, tl.int64)
        x_ptrs = (x_ptr + row * stride_x).to(INT32)
        dy_ptrs = (dy_ptr + row * stride_dy).to(INT32)
        x, dy = (), ()
        for piece in tl.static_range(PIECES):
            x = x + (_load_pairs(x_ptrs, piece, n_cols, PAIRS, True),)
            dy = dy + (_load_pairs(dy_ptrs, piece, n_cols, PAIRS, True),)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)

        # -- add: this row to the sums, and its pieces to c1 and c2
        c1 = tl.zeros((2 * PAIRS,), tl.float32)
        c2 = tl.zeros((2 * PAIRS,), tl.float32)
        dw_before, db_before, dw, db = dw, db, (), ()
        for piece in tl.static_range(PIECES):
            xhat = (_widen(x[piece], dtype) - mean) * rstd
            dy_wide = _widen(dy[piece], dy_dtype)
            dw = dw + (dw_before[piece] + dy_wide * xhat,)
            db = db + (db_before[piece] + dy_wide,)
            wdy = _load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, True) * dy_wide
            c1 += xhat * wdy
            c2 += wdy

        # -- row: the gradient of x, widened and weighted once more
        if dx_ptr is not None:
            c1, c2 = tl.reduce((c1, c2), 0, _sum_pairs)
            c1, c2 = _per(c1, n_cols), _per(c2, n_cols)
            x, dy = _afresh(x, zero), _afresh(dy, zero)
            dx_ptrs = (dx_ptr + row * n_cols).to(INT32)
            for piece in tl.static_range(PIECES):
                pairs = piece * PAIRS + tl.arange(0, PAIRS)
                xhat = (_widen(x[piece], dtype) - mean) * rstd
                w = _load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, True)
                dx = (w * _widen(dy[piece], dy_dtype) - (xhat * c1 + c2)) * rstd
                tl.store(dx_ptrs + pairs, _narrow(dx, dtype))

    # -- end: one row of sums for the whole program
    buffer = tl.program_id(0) % n_buffers
    for piece in tl.static_range(PIECES):
        cols, inside = _piece(piece, n_cols, 2 * PAIRS, True)
        offsets = buffer.to(tl.int64) * n_cols + cols
        lock = buffer * PIECES + piece
        _hand_over(dw[piece], db[piece], dw_ptr, db_ptr, locks_ptr, lock, offsets, inside)


@triton.jit
def _load_part(x_ptr, dy_ptr, part, n_cols, there, BLOCK_COLS: tl.constexpr):
    """x and dy of a part of a row, as they are stored, if the row is there at all."""
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (cols < n_cols) & there
    x = tl.load(x_ptr + cols, mask=inside, other=0.0)
    return x, tl.load(dy_ptr + cols, mask=inside, other=0.0)


@triton.jit
def _sums_of_part(x, dy, w_ptr, mean, rstd, part, n_cols, BLOCK_COLS: tl.constexpr):
    """xhat and wdy of a part of a row, and its sums for c1 and c2 as the 64 bits of a slot.

    The last bit says that the slot is filled: the sum for c2 gives it up.
    """
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    w = _load_weight(w_ptr, cols, cols < n_cols)
    xhat = (x.to(tl.float32) - mean) * rstd
    wdy = dy.to(tl.float32) * w.to(tl.float32)
    high = tl.sum(xhat * wdy, axis=0).to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = tl.sum(wdy, axis=0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return xhat, wdy, high | low | 1


@triton.jit
def _split_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, N_PARTS), int32, zero; or None: a buffer for each group
    slots_ptr,  # (n_rows, N_PARTS), int64, zero at first
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row; so many programs are a group
    PARTS: tl.constexpr,  # a power of two, at least N_PARTS
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
):
    group, part = tl.program_id(0) // N_PARTS, tl.program_id(0) % N_PARTS
    parts = tl.arange(0, PARTS)
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dw = tl.zeros((BLOCK_COLS,), tl.float32)
    db = tl.zeros((BLOCK_COLS,), tl.float32)
    first = group.to(tl.int64)
    step = (tl.num_programs(0) // N_PARTS).to(tl.int64)
    x, dy = _load_part(
        x_ptr + first * stride_x, dy_ptr + first * stride_dy, part, n_cols, True, BLOCK_COLS
    )
    for row in range(first, n_rows, step):
        # -- publish: what my part adds to c1 and c2
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        xhat, wdy, slot = _sums_of_part(x, dy, w_ptr, mean, rstd, part, n_cols, BLOCK_COLS)
        dw += dy.to(tl.float32) * xhat
        db += dy.to(tl.float32)
        if dx_ptr is not None:
            tl.atomic_xchg(slots_ptr + row * N_PARTS + part, slot, sem="relaxed")

        # -- ahead: the loads of the next row are under way while this one waits
        x_row, dy_row = x_ptr + row * stride_x, dy_ptr + row * stride_dy
        x, dy = _load_part(
            x_row + step * stride_x, dy_row + step * stride_dy, part, n_cols, row + step < n_rows,
            BLOCK_COLS,
        )  # fmt: skip

        # -- collect: what all parts add; if they do not come, compute each of them, mine last
        if dx_ptr is not None:
            slots, ready = _wait_for_parts(
                slots_ptr + row * N_PARTS + parts, parts < N_PARTS, max_polls
            )
            if ready == 0:
                for turn in range(N_PARTS):
                    other = (part + 1 + turn) % N_PARTS
                    x_other, dy_other = _load_part(x_row, dy_row, other, n_cols, True, BLOCK_COLS)
                    xhat, wdy, slot = _sums_of_part(
                        x_other, dy_other, w_ptr, mean, rstd, other, n_cols, BLOCK_COLS
                    )
                    slots = tl.where(parts == other, slot, slots)
            slots = tl.where(parts < N_PARTS, slots, 0)
            c1 = tl.sum((slots >> 32).to(tl.int32).to(tl.float32, bitcast=True), axis=0)
            c2 = tl.sum(slots.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
            c1, c2 = _per(c1, n_cols), _per(c2, n_cols)
            dx = (wdy - (xhat * c1 + c2)) * rstd
            tl.store(dx_ptr + row * n_cols + cols, dx, mask=cols < n_cols)

    buffer = group % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    lock = buffer * N_PARTS + part
    _hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, cols < n_cols)


@triton.jit
def _loop_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    stride_x,
    stride_dy,
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    dy_ptr += row * stride_dy
    dx_ptr += row * n_cols
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    c1 = tl.zeros((BLOCK_COLS,), tl.float32)
    c2 = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        wdy = dy * _load_weight(w_ptr, cols, cols < n_cols).to(tl.float32)
        c1 += (x - mean) * rstd * wdy
        c2 += wdy
    c1, c2 = _per(tl.sum(c1, axis=0), n_cols), _per(tl.sum(c2, axis=0), n_cols)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        wdy = dy * _load_weight(w_ptr, cols, cols < n_cols).to(tl.float32)
        dx = (wdy - ((x - mean) * rstd * c1 + c2)) * rstd
        tl.store(dx_ptr + cols, dx, mask=cols < n_cols)


@triton.jit
def _column_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, number of column blocks), int32, zero; or None
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    BLOCK_COLS: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dw = tl.zeros((BLOCK_COLS,), tl.float32)
    db = tl.zeros((BLOCK_COLS,), tl.float32)
    for row in range(tl.program_id(1).to(tl.int64), n_rows, tl.num_programs(1)):
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < n_cols, other=0.0)
        dy = dy.to(tl.float32)
        dw += dy * (x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row)
        db += dy
    buffer = tl.program_id(1) % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    lock = buffer * tl.num_programs(0) + tl.program_id(0)
    _hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, cols < n_cols)


@triton.jit
def _sum_of_buffers(
    sums_ptr, out_ptr, n_buffers, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, n_buffers, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        inside = (rows < n_buffers) & (cols[None, :] < n_cols)
        total += tl.load(sums_ptr + rows * n_cols + cols[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


@triton.jit
def _buffer_sum_kernel(
    first_sums_ptr,  # (n_buffers, n_cols), float32
    second_sums_ptr,  # likewise
    first_ptr,  # a gradient, (n_cols)
    second_ptr,  # another
    n_buffers,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _sum_of_buffers(first_sums_ptr, first_ptr, n_buffers, n_cols, BLOCK_ROWS, BLOCK_COLS)
    else:
        _sum_of_buffers(second_sums_ptr, second_ptr, n_buffers, n_cols, BLOCK_ROWS, BLOCK_COLS)


REDUCTIONS = ("partial", "lock")

TILE, TILE_BYTES = 4096, 32768
"""Least bytes of a forward tile of whole rows, and most. With four warps a thread then has 32 bytes
of x: 0.97 of a copy at 1,024 columns of float32 on an H200, against 0.96 with two warps. The loads
of x pass by L1 (``.cg``), so that the weight and the bias, which every row needs, stay there."""

TILE_COLS, PACKED_COLS = 8192, 65536
"""Longer rows of 16-bit numbers are packed two to a register. On an H200 at 16,384 columns of
bfloat16 that gave 0.95 of a copy against 0.91 for a tile, at 32,768 0.93 against 0.69 for parts,
and at 65,536 0.70 against 0.50."""

PACKED = {16384: (16, 40), 32768: (16, 64), 65536: (32, 64)}
"""Warps of a packed row and registers a thread, so that three programs, two, or one fit on a
multiprocessor. 64 registers gave 0.84 at 16,384 columns, and no limit 0.66 at 32,768."""

PART_COLS, PART_ROWS, MAX_PARTS, MAX_PART_COLS = 2048, 2, 64, 8192
"""Rows that neither rule takes are split in parts of 2,048 columns. A program takes its part of two
rows, so that it loads weight and bias half as often: read again for each row, they are as many
bytes as x and y. Rows too long for 64 such parts get larger ones."""

LOOP_COLS = 4096
"""Columns in each turn of a loop over a row that is too long even for that: 16 elements a thread
with 8 warps, one or two loads of 16 bytes."""

BWD_TILE, BWD_WARP = 2048, 512
"""Backward works on tiles of at least 2,048 elements, with a warp for every 512. A thread has 16
of each array: 32 registers hold its sums, and x, dy and w with what is made of them stay below
128 registers from 1,024 columns on."""

BWD_ROW_COLS = 8192
"""Longest row for one program in backward: its tile and its sums fill a multiprocessor."""

BWD_STAGES = 3
"""Turns of the loop whose loads are under way at once, where the shared memory holds them. A
multiprocessor with one program needs them: nobody else would load while it computes. On an H200 at
8,192 columns of bfloat16 three gave 0.92 of a copy, one 0.69 and two 0.60."""

BWD_PACKED_COLS = 16384
"""Rows of 16-bit numbers of this one length are packed, a program to a multiprocessor: the sums of
all columns take half of its registers, and what masks need would spill."""

BWD_THREADS = 512
"""Threads of looping programs on a multiprocessor: 128 of its 65,536 registers for each. All
programs run from the beginning to the end, and each leaves one row of sums."""

BWD_PART_COLS, BWD_MAX_PART_COLS = 2048, 4096
"""A longer row is split in parts, for programs that exchange their share of c1 and c2. Rows too
long for 64 such parts get larger ones."""

BWD_PART_WARP = {2: 1024, 4: 512}
"""Columns a warp of a part, by the bytes of an element. In bfloat16 at 16,384 columns, before those
were packed, 1,024 gave 0.67 of a copy against 0.57 with 512, though some registers spill, and in
float32 0.69 against 0.72."""

BWD_PART_THREADS = 256
"""Threads on a multiprocessor then. The next part of x and dy waits in registers, so that a thread
needs up to 255 of them. A program that does not run yet cannot answer, so no more are started than
run at once."""

COLUMN_COLS, COLUMN_PROGRAMS = 1024, 8
"""Rows too long for parts: a program adds up a block of 1,024 columns over its share of the rows,
8 elements a thread with 4 warps, and 8 such programs fit on a multiprocessor."""

SUM_ROWS, SUM_COLS = 128, 32
"""Tile of the kernel that adds up the buffers. 32 columns are 128 bytes, one line of the cache, and
so narrow a tile gives it 32 programs even for 1,024 columns; 128 rows put 32 loads of a number a
thread in flight."""

LOCK_BUFFERS = 64
"""Buffers that programs share under "lock". More of them make a lock less contended, and are more
to add up at the end."""


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    looping: bool = False,
    keep_statistics: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalise each row of a matrix whose columns are contiguous. Return y, mean and rstd.

    ``looping`` asks for the kernel that reads a row three times, whatever its length. Without
    ``keep_statistics``, mean and rstd are None: small as they are, at 1,024 columns of bfloat16
    storing them took an H200 two per cent of the time.
    """
    # I/O: read x + write y (weight, bias, mean and rstd are small)
    n_rows, n_cols = x.shape
    y = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    mean, rstd = None, None
    if keep_statistics:
        mean, rstd = torch.empty((2, n_rows), dtype=torch.float32, device=x.device).unbind()
    tensors = (x, weight, bias, y, mean, rstd)
    stride = x.stride(0)
    block = triton.next_power_of_2(n_cols)
    if looping or n_cols > MAX_PARTS * MAX_PART_COLS:
        block = min(block, LOOP_COLS)
        _loop_fwd_kernel[(n_rows,)](*tensors, stride, n_cols, eps, block, num_warps=8)
    elif TILE_COLS < n_cols <= PACKED_COLS and _come_in_pairs((x,), (weight, bias)):
        num_warps, registers = PACKED[max(block, min(PACKED))]
        _packed_row_fwd_kernel[(n_rows,)](
            *tensors, stride, n_cols, eps, 0, block // (2 * PIECES.value), block == n_cols,
            num_warps=num_warps, maxnreg=registers,
        )  # fmt: skip
    elif n_cols * x.itemsize > TILE_BYTES:
        parts, block = _split(n_cols, PART_COLS)
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=x.device)
        _split_fwd_kernel[(triton.cdiv(n_rows, PART_ROWS) * parts,)](
            *tensors, slots, stride, n_rows, n_cols, eps, MAX_POLLS, PART_ROWS, parts,
            triton.next_power_of_2(parts), block, num_warps=max(1, PART_ROWS * block // 2048),
        )  # fmt: skip
    else:
        rows = max(1, TILE // (block * x.itemsize))
        grid = (triton.cdiv(n_rows, rows),)
        num_warps = max(4, block // 2048)
        _row_fwd_kernel[grid](
            *tensors, stride, n_rows, n_cols, eps, rows, block, num_warps=num_warps
        )
    return y, mean, rstd


def _come_in_pairs(rows: tuple, parameters: tuple) -> bool:
    """Whether rows hold 16-bit numbers of which two can be loaded as an int32.

    Where parameters have 16 bits, they must start at a multiple of four bytes as well.
    """
    even = all(x.itemsize == 2 and x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 for x in rows)
    return even and all(
        tensor.data_ptr() % 4 == 0
        for tensor in (*rows, *parameters)
        if tensor is not None and tensor.itemsize == 2
    )


def _split(n_cols: int, part_cols: int) -> tuple[int, int]:
    """Return into how many parts a row is split, and the columns of a part."""
    block = max(part_cols, triton.next_power_of_2(triton.cdiv(n_cols, MAX_PARTS)))
    return triton.cdiv(n_cols, block), block


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    needs_dx: bool = True,
    reduction: str = "partial",
    n_programs: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dw and db; a gradient that is not needed has no dtype here, and is None.

    ``reduction`` says how programs share the sums over rows: "partial" or "lock". ``n_programs``
    is how many loop over the rows, where a program has whole rows: as many as fit, unless given.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dx else None
    tensors = (x, weight, mean, rstd, dy, dx)
    wanted = (dw_dtype, db_dtype)
    return dx, *_add_buffers(_sums(*tensors, wanted, reduction, n_programs), wanted)


def _sums(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    """Fill dx, if there is one. Return the buffers of sums for dw and db, or None."""
    arguments = (x, weight, mean, rstd, dy, dx, wanted, reduction)
    n_cols = x.shape[1]
    if n_cols <= BWD_ROW_COLS:
        return _row_backward(*arguments, n_programs)
    if n_cols == BWD_PACKED_COLS and _come_in_pairs((x, dy), (weight,)):
        return _packed_row_backward(*arguments, n_programs)
    if n_cols <= MAX_PARTS * BWD_MAX_PART_COLS:
        return _split_backward(*arguments)
    return _column_backward(*arguments)


def _row_backward(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    # I/O: read x + read dy + write dx
    n_rows, n_cols = x.shape
    block = 1 << (n_cols - 1).bit_length()
    rows = max(1, BWD_TILE // block)
    num_warps = rows * block // BWD_WARP
    multiprocessors, shared_memory = _capacity(x.device)
    programs = n_programs or multiprocessors * max(1, BWD_THREADS // (32 * num_warps))
    programs = min(programs, -(-n_rows // rows))
    waiting = (BWD_STAGES - 1) * rows * block * (x.itemsize + dy.itemsize)
    stages = BWD_STAGES if waiting <= shared_memory else 1
    sums, locks, n_buffers = _buffers(x, wanted, reduction, programs, 1)
    _row_bwd_kernel[(programs,)](
        x, weight, mean, rstd, dy, dx, *sums, locks, x.stride(0), dy.stride(0), n_rows, n_cols,
        n_buffers, rows, block, stages, num_warps=num_warps,
    )  # fmt: skip
    return sums


def _packed_row_backward(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    # I/O: read x + read dy + write dx
    n_rows, n_cols = x.shape
    programs = min(n_programs or _capacity(x.device)[0], n_rows)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, programs, PIECES.value)
    _packed_row_bwd_kernel[(programs,)](
        x, weight, mean, rstd, dy, dx, *sums, locks, x.stride(0), dy.stride(0), n_rows, n_cols,
        n_buffers, 0, n_cols // (2 * PIECES.value), num_warps=16,
    )  # fmt: skip
    return sums


def _split_backward(x, weight, mean, rstd, dy, dx, wanted, reduction):
    # I/O: read x + read dy + write dx
    n_rows, n_cols = x.shape
    parts, block = _split(n_cols, BWD_PART_COLS)
    num_warps = max(1, block // BWD_PART_WARP[x.itemsize])
    programs = _capacity(x.device)[0] * max(1, BWD_PART_THREADS // (32 * num_warps))
    groups = min(max(1, programs // parts), n_rows)
    slots = None
    if dx is not None:
        slots = torch.zeros((n_rows, parts), dtype=torch.int64, device=x.device)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, groups, parts)
    _split_bwd_kernel[(groups * parts,)](
        x, weight, mean, rstd, dy, dx, *sums, locks, slots, x.stride(0), dy.stride(0), n_rows,
        n_cols, n_buffers, MAX_POLLS, parts, triton.next_power_of_2(parts), block,
        num_warps=num_warps,
    )  # fmt: skip
    return sums


def _column_backward(x, weight, mean, rstd, dy, dx, wanted, reduction):
    # I/O for dx: read x twice + read dy twice + write dx; for dw and db: read x + read dy
    n_rows, n_cols = x.shape
    strides = (x.stride(0), dy.stride(0))
    if dx is not None:
        _loop_bwd_kernel[(n_rows,)](
            x, weight, mean, rstd, dy, dx, *strides, n_cols, LOOP_COLS, num_warps=8
        )
    blocks = triton.cdiv(n_cols, COLUMN_COLS)
    programs = min(max(1, COLUMN_PROGRAMS * _capacity(x.device)[0] // blocks), n_rows)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, programs, blocks)
    if sums != (None, None):
        _column_bwd_kernel[(blocks, programs)](
            x, mean, rstd, dy, *sums, locks, *strides, n_rows, n_cols, n_buffers, COLUMN_COLS,
            num_warps=4,
        )  # fmt: skip
    return sums


def _buffers(x, wanted, reduction, programs, locks_a_buffer):
    """Return the buffers for the sums of dw and of db, their locks, and how many there are.

    A buffer is a row. Under "partial" each program has its own and nothing is locked.
    """
    n_buffers, locks, allocate = programs, None, torch.empty
    if reduction == "lock":
        n_buffers, allocate = min(programs, LOCK_BUFFERS), torch.zeros
        locks = torch.zeros(n_buffers * locks_a_buffer, dtype=torch.int32, device=x.device)
    shape = (sum(dtype is not None for dtype in wanted), n_buffers, x.shape[1])
    of_each = iter(allocate(shape, dtype=torch.float32, device=x.device))
    sums = (None if dtype is None else next(of_each) for dtype in wanted)
    return tuple(sums), locks, n_buffers


def _add_buffers(sums, wanted):
    """Add up the rows of the buffers. Return dw and db, each None where it is not wanted."""
    gradients = [
        None if dtype is None else torch.empty(of.shape[1], dtype=dtype, device=of.device)
        for of, dtype in zip(sums, wanted, strict=True)
    ]
    there = [pair for pair in zip(sums, gradients, strict=True) if pair[0] is not None]
    if there:
        (first, first_to), (second, second_to) = there[0], there[-1]
        n_buffers, n_cols = first.shape
        _buffer_sum_kernel[(-(-n_cols // SUM_COLS), len(there))](
            first, second, first_to, second_to, n_buffers, n_cols, SUM_ROWS, SUM_COLS, num_warps=4
        )
    return gradients


@cache
def _capacity(device: torch.device) -> tuple[int, int]:
    """How many multiprocessors there are, and the bytes of shared memory a program may have.

    In the interpreter there is neither; two multiprocessors are enough to test.
    """
    if runtime.INTERPRETED:
        return 2, 0
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


def _as_rows(x: torch.Tensor, n_cols: int) -> torch.Tensor:
    """View, or where it must be copy, a tensor as a matrix with contiguous rows of n_cols."""
    if x.ndim != 2 or x.shape[1] != n_cols:
        x = x.reshape(-1, n_cols)
    if runtime.INTERPRETED:
        x = x.to(runtime.kernel_dtype(x.dtype))
    return x if x.stride(1) == 1 else x.contiguous()


def _as_parameter(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Flatten a weight or bias."""
    if parameter is None:
        return None
    if runtime.INTERPRETED:
        parameter = parameter.to(runtime.kernel_dtype(parameter.dtype))
    if parameter.ndim != 1:
        parameter = parameter.reshape(-1)
    return parameter.contiguous()


def _like(result: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor | None:
    """Give a result the shape and dtype of an input again."""
    if result is None:
        return None
    if runtime.INTERPRETED:
        result = result.to(of.dtype)
    return result if result.shape == of.shape else result.view(of.shape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        rows = _as_rows(x, prod(shape))
        if x.numel():
            with runtime.launching_on(x):
                y, mean, rstd = _forward(
                    rows, _as_parameter(weight), _as_parameter(bias), eps,
                    keep_statistics=any(ctx.needs_input_grad),
                )  # fmt: skip
        else:
            y, mean, rstd = torch.empty_like(rows), None, None
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return _like(y, x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not x.numel():
            return *_backward_in_torch(ctx, x, weight, bias, dy), None, None
        n_cols = prod(ctx.shape)
        with runtime.launching_on(x):
            dx, dw, db = _backward(
                _as_rows(x, n_cols),
                _as_parameter(weight),
                mean,
                rstd,
                _as_rows(dy, n_cols),
                runtime.kernel_dtype(weight.dtype) if needs_dw else None,
                runtime.kernel_dtype(bias.dtype) if needs_db else None,
                needs_dx,
            )
        return _like(dx, x), _like(dw, weight), _like(db, bias), None, None


def _backward_in_torch(ctx, x, weight, bias, dy):
    """The gradients by PyTorch: of no rows, or when their own gradients are wanted as well."""
    with torch.enable_grad():
        inputs = [None if tensor is None else tensor.float() for tensor in (x, weight, bias)]
        y = torch.nn.functional.layer_norm(inputs[0], ctx.shape, *inputs[1:], ctx.eps)
        needs = ctx.needs_input_grad[:3]
        needed = [t for t, need in zip((x, weight, bias), needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, needed, dy.float(), create_graph=True))
    return [next(found) if need else None for need in needs]


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check_parameter(name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a weight or bias is a tensor that the kernels take."""
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(parameter).__name__}.")
    if parameter.dtype not in _DTYPES:
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16, got {parameter.dtype}: "
            f"pass {name}.float(), for example."
        )
    if tuple(parameter.shape) != shape:
        raise ValueError(
            f"{name} must have the normalized shape, {shape}, got {tuple(parameter.shape)}."
        )


def _check_shape(x: torch.Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the normalized shape as a tuple, or raise unless x ends with it."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise TypeError(
            f"normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}."
        )
    shape = tuple(shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"normalized_shape must hold sizes of at least 1, got {shape}.")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"x must end with the dimensions of normalized_shape, {shape}, but has shape "
            f"{tuple(x.shape)}: pass normalized_shape=x.shape[{-len(shape)}:], for example."
        )
    return shape


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation, as :func:`torch.nn.functional.layer_norm` computes it.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions of x, those of
    ``normalized_shape``; var is the mean of squared deviations (divided by N, not N - 1).

    Mean, variance and every sum are computed in float32. The gradients of two runs are equal bit
    by bit, and one that is not needed is not computed.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16. A copy is made unless
            the last dimensions are contiguous and the others can be viewed as one.
        normalized_shape: the sizes of the last dimensions of ``x``, at least 1 each; an int stands
            for one dimension.
        weight: the scale of each normalised element, of shape ``normalized_shape`` and float32,
            float16 or bfloat16, whatever the dtype of ``x``; or None for 1.
        bias: what is added in the end, likewise; or None for 0.
        eps: a number of at least 0, added to the variance.

    Returns:
        y, contiguous, of the shape and dtype of ``x``. Gradients of any order flow to ``x``,
        ``weight`` and ``bias``, each in its own dtype.

    Raises:
        TypeError: ``x`` or a parameter is no tensor or of another dtype, ``normalized_shape`` is
            neither an int nor a sequence of ints, or ``eps`` is no number.
        ValueError: a size is below 1, ``x`` does not end with ``normalized_shape``, a parameter has
            another shape, ``eps`` is negative, or a tensor is not where kernels run.

    Source: Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, 2016, section 3.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}.")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"x must be float32, float16 or bfloat16, got {x.dtype}: pass x.float(), for example."
        )
    shape = _check_shape(x, normalized_shape)
    if not isinstance(eps, Real):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}.")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}.")
    parameters = {"weight": weight, "bias": bias}
    given = {name: tensor for name, tensor in parameters.items() if tensor is not None}
    for name, parameter in given.items():
        _check_parameter(name, parameter, shape)
    runtime.require_device(x=x, **given)
    return _LayerNorm.apply(x, weight, bias, shape, float(eps))
