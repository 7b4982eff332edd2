"""The forward pass of layer norm, which keeps a row on chip, in one program or in several.

    xhat[j] = (x[j] - mean) * rstd,   y[j] = xhat[j] * w[j] + b[j]

    mean = sum of x[j] / N,   rstd = 1 / sqrt(sum of (x[j] - mean)**2 / N + eps)

Statistics are float32 whatever the input. The variance is the mean of squared deviations, never the
difference of two large means, and three things keep it right far from zero:

    correction  a sum of many numbers is wrong in its last digits, and so is the mean computed from
                it. The deviations from that mean then do not sum to 0, and their sum corrects the
                mean. The corrected mean of equal numbers is exactly that number
    pivot       parts of a row are merged by how far their means are from that of the first part
    far rows    squares of numbers above 1.8e19 overflow float32. Where their sum is infinite, the
                row is read again, and its deviations are squared times a small power of two

Sources: Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, 2016. Chan, Golub, LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", COMPSTAT 1982 (the
correction, and the merge of parts).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.launch import planned
from kernelbook.ops.layer_norm import tuned
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.exchange import collect, publish, to_slot, wait
from kernelbook.ops.rows.packed import come_in_pairs, narrow, widen
from kernelbook.ops.rows.pieces import afresh, in_pieces, where_piece
from kernelbook.ops.rows.sums import INTERPRETED, two_sums
from kernelbook.ops.rows.units import in_units, unit_of
from kernelbook.ops.visible import VisibleLaunch

SMALL = tl.constexpr(2.0**-16)
"""By what numbers are multiplied before up to 65,536 of them are added up, so that no sum can
overflow. To multiply by a power of two costs no digit."""

TINY = tl.constexpr(2.0**-84)
"""The same for deviations that are squared: the square of the largest float32 times this is 2**88,
and the sum of 2**31 of them is still finite."""

ROUNDING = tl.constexpr(2.0**-20)
"""What a sum of squares may be off by, as a share of it."""

EXACT = tl.constexpr(8192)
"""How many equal numbers of float16 have an exact sum: each has 11 bits, and float32 has 24. Those
of bfloat16 have 8 bits, so that the sum of a whole row, of at most 65,536 of them, is exact."""

SHORT = tl.constexpr(64)
"""Lanes of a warp on any GPU, at most: a row that is no longer may be one number a lane."""

FAR_COLS = tl.constexpr(128)
"""Numbers of far rows that are read again at a time: few, because the registers of this path count
even if it is never taken."""


@triton.jit
def divide(total, count):
    """total / count, and the last bit as well: the mean of equal numbers is that number.

    ``/`` on a GPU may be off by an ulp, and the exact division costs dozens of registers. In the
    interpreter ``/`` is exact, and an fma, which rounds twice there, would only spoil it.
    """
    if INTERPRETED:
        return total / count
    count = 1.0 * count
    quotient = total * (1 / count)
    return tl.fma(tl.fma(-quotient, count, total), 1 / count, quotient)


@triton.jit
def mean_of(x, count):
    """The mean of each row."""
    return divide(tl.sum(x * SMALL, axis=1, keep_dims=True), count) / SMALL


@triton.jit
def without(m2, correction, count):
    """The sum of squared deviations from the corrected mean, which an infinite one stays.

    Of a row of equal numbers, all that is left is rounding: that is a deviation of 0.
    """
    left = m2 - count * correction * correction
    return tl.where(m2 < float("inf"), tl.where(left < m2 * ROUNDING, 0.0, left), m2)


@triton.jit
def square(x, inside):
    """x * x, rounded before it is added up where a lane may hold one number of a row.

    Otherwise the compiler would fuse the multiplication with the sum. The lanes of a row, which add
    the same two numbers, would then round different ones and disagree in the last bit of the sum.
    """
    squared = x * x
    return tl.where(inside, squared, 0.0) if x.shape[1] <= SHORT else squared


@triton.jit
def moments(x, inside, count):
    """The mean of each row, and m2, the sum of squared deviations from it; infinite if far."""
    # -- mean: the sum divided by count, and how far each element is from it
    mean = mean_of(x.to(tl.float32), count)
    deviation = tl.where(inside, x.to(tl.float32) - mean, 0.0)
    squared = square(deviation, inside)

    # -- correct: by the sum of the deviations, which is 0 if the mean is right
    if (x.dtype == tl.float32) or ((x.dtype == tl.float16) and (x.shape[1] > EXACT)):
        m2, residue = two_sums(squared, deviation * SMALL, 1, True)
        correction = divide(residue, count) / SMALL
        return mean + correction, without(m2, correction, count)
    else:  # the sum of numbers of about the same size is exact, that of equal ones always
        return mean, tl.sum(squared, axis=1, keep_dims=True)


@triton.jit
def far_rstd(x_ptrs, far, mean, n_cols, eps, COLS: tl.constexpr):
    """1 / sqrt(variance + eps) of far rows, which are read again for it.

    The variance is 0 only if all numbers are equal; beside any other variance, eps is negligible. A
    lane sums thousands of squares, one after the other, and what each addition rounds off is added
    to the next square.
    """
    first = tl.arange(0, COLS)[None, :]
    m2 = tl.zeros((mean + first).shape, tl.float32)
    rounded_off = tl.zeros(m2.shape, tl.float32)
    for start in range(0, n_cols, COLS):
        cols = start + first
        inside = far & (cols < n_cols)
        x = tl.load(x_ptrs + cols, mask=inside, other=0.0).to(tl.float32)
        tiny = tl.where(inside, (x - mean) * TINY, 0.0)
        squared = tiny * tiny + rounded_off
        total = m2 + squared
        rounded_off = squared - (total - m2)
        m2 = total
    variance = tl.sum(m2, axis=1, keep_dims=True) / n_cols
    return tl.where(variance == 0, tl.rsqrt(variance + eps), tl.rsqrt(variance) * TINY)


@triton.jit
def scale_and_shift(xhat, w_ptr, b_ptr, cols, inside):
    """xhat * w + b, where either may be absent."""
    y = xhat
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def row_fwd_kernel(
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
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: some whole rows
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x = tl.load(
        x_ptr + rows * stride_row + cols, mask=inside, other=0.0, eviction_policy="evict_last"
    )

    # -- statistics: mean and reciprocal standard deviation, one of each per row
    mean, m2 = moments(x, inside, n_cols)
    rstd = tl.rsqrt(m2 / n_cols + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)

    # -- write: normalise, scale and shift
    y = scale_and_shift((x.to(tl.float32) - mean) * rstd, w_ptr, b_ptr, cols, cols < n_cols)
    tl.store(y_ptr + rows * n_cols + cols, y, mask=inside)

    # -- far: such rows once more. Tested last, because the test may synchronise the warps
    far = m2 == float("inf")
    if (x.dtype != tl.float16) and tl.max(tl.max(far.to(tl.int32), axis=0), axis=0):
        COLS: tl.constexpr = max(1, min(BLOCK_COLS, FAR_COLS // BLOCK_ROWS))
        x_ptrs, y_ptrs = x_ptr + rows * stride_row, y_ptr + rows * n_cols
        rstd = far_rstd(x_ptrs, far, mean, n_cols, eps, COLS)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + rows, rstd, mask=far)
        for start in range(0, n_cols, COLS):
            far_cols = start + tl.arange(0, COLS)[None, :]
            far_inside = far & (far_cols < n_cols)
            far_x = tl.load(x_ptrs + far_cols, mask=far_inside, other=0.0).to(tl.float32)
            xhat = (far_x - mean) * rstd
            far_y = scale_and_shift(xhat, w_ptr, b_ptr, far_cols, far_cols < n_cols)
            tl.store(y_ptrs + far_cols, far_y, mask=far_inside)


@triton.jit
def pieces_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    stride_row,  # of x
    n_cols,
    eps,
    N_PIECES: tl.constexpr,  # of a row; of which all but the last are whole
    PIECE_COLS: tl.constexpr,  # a power of two
    FULL: tl.constexpr,  # whether the last is whole as well
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: a row, in pieces that pad it less than one block would
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    LAST: tl.constexpr = N_PIECES - 1
    row = tl.program_id(0).to(tl.int64)
    x_ptrs, y_ptrs = x_ptr + row * stride_row, y_ptr + row * n_cols
    x = ()
    for piece in tl.static_range(N_PIECES):
        cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
        x = x + (tl.load(x_ptrs + cols, mask=inside, other=0.0, eviction_policy="evict_last"),)

    # -- mean: the pieces one upon the other, and one reduction
    total = tl.zeros((PIECE_COLS,), tl.float32)
    for piece in tl.static_range(N_PIECES):
        total += x[piece].to(tl.float32) * SMALL
    mean = divide(tl.sum(total, axis=0), n_cols) / SMALL

    # -- variance: likewise, with the correction of the mean
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    INEXACT: tl.constexpr = dtype == tl.float16 and N_PIECES * PIECE_COLS > EXACT
    CORRECTED: tl.constexpr = dtype == tl.float32 or INEXACT
    m2 = tl.zeros((PIECE_COLS,), tl.float32)
    residue = tl.zeros((PIECE_COLS,), tl.float32)
    for piece in tl.static_range(N_PIECES):
        _, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
        deviation = tl.where(inside, x[piece].to(tl.float32) - mean, 0.0)
        m2 += deviation * deviation
        if CORRECTED:
            residue += deviation * SMALL
    if CORRECTED:
        m2, residue = two_sums(m2, residue, 0)
        correction = divide(residue, n_cols) / SMALL
        mean += correction
        m2 = without(m2, correction, n_cols)
    else:
        m2 = tl.sum(m2, axis=0)

    # -- far: such a row once more, and the statistics for backward
    rstd = tl.rsqrt(m2 / n_cols + eps)
    if (dtype != tl.float16) and (m2 == float("inf")):
        rstd = tl.sum(far_rstd(x_ptrs, True, mean, n_cols, eps, FAR_COLS))
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)

    # -- write: normalise, scale and shift
    for piece in tl.static_range(N_PIECES):
        cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
        y = scale_and_shift((x[piece].to(tl.float32) - mean) * rstd, w_ptr, b_ptr, cols, inside)
        tl.store(y_ptrs + cols, y, mask=inside)


@triton.jit
def load_pairs(ptrs, piece, n_cols, PAIRS: tl.constexpr, FULL: tl.constexpr):
    """A piece of a row of 16-bit numbers, two in an int32."""
    pairs, inside = where_piece(piece, n_cols // 2, PAIRS, FULL)
    return tl.load(ptrs + pairs, mask=inside, other=0, eviction_policy="evict_last")


@triton.jit
def load_parameter(ptr, piece, n_cols, default, PAIRS: tl.constexpr, FULL: tl.constexpr):
    """A piece of the weight or bias as float32, or the default where there is none."""
    if ptr is None:
        return tl.full((2 * PAIRS,), default, tl.float32)
    elif ptr.dtype.element_ty.primitive_bitwidth == 16:
        pairs, inside = where_piece(piece, n_cols // 2, PAIRS, FULL)
        ptrs = ptr.to(tl.pointer_type(tl.int32)) + pairs
        return widen(tl.load(ptrs, mask=inside, other=0), ptr.dtype.element_ty)
    else:
        cols, inside = where_piece(piece, n_cols, 2 * PAIRS, FULL)
        return tl.load(ptr + cols, mask=inside, other=0.0)


@triton.jit
def mean_of_pairs(total, n_cols, dtype: tl.constexpr):
    """The mean of a row of 16-bit numbers from sums of four of them, times SMALL.

    Sums of up to 65,536 equal numbers with the eight bits of bfloat16 are exact. float16 has
    eleven: there the leading bits of the sums and the other bits are summed separately.
    """
    if dtype == tl.bfloat16:
        return divide(tl.sum(total, axis=0), n_cols) / SMALL
    else:
        leading = (total.to(tl.int32, bitcast=True) >> 16 << 16).to(tl.float32, bitcast=True)
        rest = tl.sum(total - leading, axis=0)
        return (divide(tl.sum(leading, axis=0), n_cols) + rest / n_cols) / SMALL


@triton.jit
def packed_row_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols), 16 bits
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous, 16 bits
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    stride_row,  # of x
    n_cols,
    eps,
    zero,  # 0, which the compiler must not know
    N_PIECES: tl.constexpr,  # of a row
    PAIRS: tl.constexpr,  # pairs of numbers in a piece; the pieces cover the row
    FULL: tl.constexpr,  # whether they do exactly: masks would cost registers
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- load: a row in pieces, two numbers in each register
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs = (x_ptr + row * stride_row).to(tl.pointer_type(tl.int32))
    y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
    x = ()
    for piece in tl.static_range(N_PIECES):
        x = x + (load_pairs(x_ptrs, piece, n_cols, PAIRS, FULL),)

    # -- mean: each piece widened for this step alone
    total = tl.zeros((2 * PAIRS,), tl.float32)
    for piece in tl.static_range(N_PIECES):
        total += widen(x[piece], dtype) * SMALL
    mean = mean_of_pairs(total, n_cols, dtype)

    # -- variance: each widened anew
    x = afresh(x, zero, N_PIECES)
    m2 = tl.zeros((2 * PAIRS,), tl.float32)
    for piece in tl.static_range(N_PIECES):
        _, inside = where_piece(piece, n_cols, 2 * PAIRS, FULL)
        deviation = tl.where(inside, widen(x[piece], dtype) - mean, 0.0)
        m2 += deviation * deviation
    m2 = tl.sum(m2, axis=0)

    # -- far: such a row once more, and the statistics for backward
    rstd = tl.rsqrt(m2 / n_cols + eps)
    if (dtype != tl.float16) and (m2 == float("inf")):
        rstd = tl.sum(far_rstd(x_ptr + row * stride_row, True, mean, n_cols, eps, FAR_COLS))
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)

    # -- write: a piece at a time, so that only a piece of weight and bias is in registers
    x = afresh(x, zero, N_PIECES)
    for piece in tl.static_range(N_PIECES):
        pairs, inside = where_piece(piece, n_cols // 2, PAIRS, FULL)
        w = load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, FULL)
        b = load_parameter(b_ptr, piece, n_cols, 0.0, PAIRS, FULL)
        y = (widen(x[piece], dtype) - mean) * rstd * w + b
        tl.store(y_ptrs + pairs, narrow(y, y_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # otherwise all pieces of both would be loaded first


@triton.jit
def moments_of_part(x_ptrs, there, part, n_cols, BLOCK_COLS: tl.constexpr):
    """A part of some rows, and its mean and sum of squared deviations as a slot."""
    start = part * BLOCK_COLS
    cols = start + tl.arange(0, BLOCK_COLS)[None, :]
    inside = there & (cols < n_cols)
    x = tl.load(x_ptrs + cols, mask=inside, other=0.0)
    mean, m2 = moments(x, inside, tl.minimum(n_cols - start, BLOCK_COLS))
    return x.to(tl.float32), to_slot(mean, m2)


@triton.jit
def merge_moments(means, m2s, parts, n_cols, BLOCK_COLS: tl.constexpr):
    """Mean of rows and sum of squared deviations from it, from those of their parts."""
    counts = tl.maximum(tl.minimum(n_cols - parts * BLOCK_COLS, BLOCK_COLS), 0)
    pivot = tl.sum(tl.where(parts == 0, means, 0.0), axis=1, keep_dims=True)
    apart = tl.where(counts > 0, means - pivot, 0.0)
    shift = tl.sum(apart * (counts / n_cols), axis=1, keep_dims=True)
    apart -= shift
    m2 = tl.sum(m2s + counts * apart * apart, axis=1, keep_dims=True)
    return pivot + shift, m2


@triton.jit
def split_fwd_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    b_ptr,  # bias, (n_cols), or None
    y_ptr,  # output, (n_rows, n_cols), contiguous
    mean_ptr,  # (n_rows), float32, or None
    rstd_ptr,  # (n_rows), float32, or None
    slots_ptr,  # (n_rows or one more, N_PARTS), int64, zero at first
    stride_row,  # of x
    n_rows,
    n_cols,
    eps,
    max_polls,  # how often to look whether the other parts are there
    BLOCK_ROWS: tl.constexpr,
    N_PARTS: tl.constexpr,  # programs for BLOCK_ROWS rows
    LOOKS: tl.constexpr,  # at the slots of each row: exchange.looks
    THREADS: tl.constexpr,  # of a program
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    UNIT: tl.constexpr = 1,  # what divides n_cols and stride_row
):
    # -- publish: the moments of my part, which stays in registers
    n_cols, stride_row = in_units(n_cols, UNIT), in_units(stride_row, UNIT)
    group, part = tl.program_id(0) // N_PARTS, tl.program_id(0) % N_PARTS
    rows = group.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    there = rows < n_rows
    x_ptrs, slots_ptrs = x_ptr + rows * stride_row, slots_ptr + rows * N_PARTS
    x, slot = moments_of_part(x_ptrs, there, part, n_cols, BLOCK_COLS)
    publish(slots_ptrs + part, slot)

    # -- collect: wait until all parts have published, and read the slots of all
    parts = tl.arange(0, LOOKS)[None, :]
    slots, ready = wait(slots_ptrs + parts % N_PARTS, max_polls, THREADS)

    # -- late: some parts have not published in time; compute each of them here, mine last
    if ready == 0:
        for turn in range(N_PARTS):
            other = (part + 1 + turn) % N_PARTS
            x, slot = moments_of_part(x_ptrs, there, other, n_cols, BLOCK_COLS)
            slots = tl.where(parts == other, slot, slots)

    # -- merge: the moments of the parts to those of the row
    means, m2s = collect(slots, there & (parts < N_PARTS), 0.0, 0.0)
    mean, m2 = merge_moments(means, m2s, parts, n_cols, BLOCK_COLS)
    rstd = tl.rsqrt(m2 / n_cols + eps)

    # -- far: such rows once more, and the statistics for backward
    far = m2 == float("inf")
    if (x_ptr.dtype.element_ty != tl.float16) and (tl.max(far.to(tl.int32)) != 0):
        rstd = tl.where(far, far_rstd(x_ptrs, far, mean, n_cols, eps, FAR_COLS), rstd)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=there & (part == 0))
        tl.store(rstd_ptr + rows, rstd, mask=there & (part == 0))

    # -- write: normalise, scale and shift; two rows share what is loaded of w and b
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    y = scale_and_shift((x - mean) * rstd, w_ptr, b_ptr, cols, cols < n_cols)
    tl.store(y_ptr + rows * n_cols + cols, y, mask=there & (cols < n_cols))


@triton.jit
def loop_fwd_kernel(
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
    FULL: tl.constexpr,  # whether blocks cover a row exactly, so that nothing is masked
    CORRECTED: tl.constexpr,  # whether the mean is
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    y_ptr += row * n_cols

    # -- mean: the first loop over the row
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = FULL | (cols < n_cols)
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        total += x * (SMALL * SMALL)
    mean = divide(tl.sum(total, axis=0), n_cols) / (SMALL * SMALL)

    # -- variance: the second, and the correction of the mean
    residue = tl.zeros((BLOCK_COLS,), tl.float32)
    m2 = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = FULL | (cols < n_cols)
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, x - mean, 0.0)
        m2 += deviation * deviation
        if CORRECTED:
            residue += deviation * (SMALL * SMALL)
    if CORRECTED:
        m2, residue = two_sums(m2, residue, 0)
        correction = divide(residue, n_cols) / (SMALL * SMALL)
        mean += correction
        m2 = without(m2, correction, n_cols)
    else:
        m2 = tl.sum(m2, axis=0)
    rstd = tl.rsqrt(m2 / n_cols + eps)
    if m2 == float("inf"):
        rstd = tl.sum(far_rstd(x_ptr, True, mean, n_cols, eps, FAR_COLS))
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)

    # -- write: the third
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = FULL | (cols < n_cols)
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        y = scale_and_shift((x - mean) * rstd, w_ptr, b_ptr, cols, inside)
        tl.store(y_ptr + cols, y, mask=inside)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    looping: bool = False,
    keep_statistics: bool = True,
    y: torch.Tensor | None = None,
    statistics: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Normalise each row of a matrix whose rows are contiguous. Return y, mean and rstd.

    ``looping`` asks for the kernel that reads a row three times, whatever its length. Without
    ``keep_statistics``, mean and rstd are None: small as they are, at 1,024 columns of bfloat16
    storing them took an H200 two per cent of the time. ``y`` is where the result goes, of
    any shape and dtype and contiguous, and ``statistics``, (n_rows) each, where mean and rstd go;
    all are allocated unless given.
    """
    # I/O: read x + write y (weight, bias, mean and rstd are small)
    n_rows, n_cols = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    mean, rstd = None, None
    if keep_statistics:
        if statistics is None:
            rows = {"dtype": torch.float32, "device": x.device}
            statistics = torch.empty(n_rows, **rows), torch.empty(n_rows, **rows)
        mean, rstd = statistics
    tensors = (x, weight, bias, y, mean, rstd)
    stride = x.stride(0)
    block = runtime.next_power_of_2(n_cols)
    if looping or n_cols > tuned.MAX_PARTS * tuned.MAX_PART_COLS:
        block = min(block, tuned.LOOP_COLS)
        corrected = x.itemsize == 4 or n_cols > tuned.TILE_COLS
        loop_fwd_kernel[(n_rows,)](
            *tensors, stride, n_cols, eps, block, n_cols % block == 0, corrected, num_warps=8
        )
    elif (
        tuned.TILE_COLS < n_cols <= tuned.PACKED_COLS
        and y.itemsize == 2
        and come_in_pairs((x,), (weight, bias))
    ):
        num_warps, registers = tuned.PACKED[max(block, min(tuned.PACKED))]
        pieces, piece = in_pieces(n_cols, least=3)
        packed_row_fwd_kernel[(n_rows,)](
            *tensors, stride, n_cols, eps, 0, pieces, piece // 2, pieces * piece == n_cols,
            unit_of(n_cols, stride), num_warps=num_warps, **runtime.register_limit(registers),
        )  # fmt: skip
    elif n_cols * x.itemsize > tuned.TILE_BYTES:
        part = tuned.forward_part(n_cols, x.itemsize)
        parts, block = tuned.split(n_cols, part.cols)
        groups = runtime.cdiv(n_rows, part.rows)
        slots = torch.zeros((groups * part.rows, parts), dtype=torch.int64, device=x.device)
        num_warps = max(1, part.rows * block // 2048)
        split_fwd_kernel[(groups * parts,)](
            *tensors, slots, stride, n_rows, n_cols, eps, exchange.MAX_POLLS, part.rows, parts,
            *exchange.looks(parts, num_warps, x.device, part.rows), block,
            unit_of(n_cols, stride), num_warps=num_warps, **runtime.register_limit(part.registers),
        )  # fmt: skip
    else:
        _row_launch(n_rows, n_cols, stride, x.itemsize, eps)(*tensors)
    return y, mean, rstd


@planned
def _row_launch(n_rows: int, n_cols: int, stride: int, itemsize: int, eps: float) -> VisibleLaunch:
    unit = unit_of(n_cols, stride)
    pieces, piece = in_pieces(n_cols)
    if pieces > 1 and piece >= tuned.PIECE_COLS:
        return VisibleLaunch(
            pieces_fwd_kernel, (n_rows,), stride, n_cols, eps, pieces, piece,
            pieces * piece == n_cols, unit,
            num_warps=max(1, piece * itemsize // tuned.PIECE_WARP),
        )  # fmt: skip
    block = runtime.next_power_of_2(n_cols)
    rows = max(1, tuned.TILE // (block * itemsize))
    return VisibleLaunch(
        row_fwd_kernel, (runtime.cdiv(n_rows, rows),), stride, n_rows, n_cols, eps, rows, block,
        unit, num_warps=tuned.row_warps(block, itemsize),
    )  # fmt: skip
