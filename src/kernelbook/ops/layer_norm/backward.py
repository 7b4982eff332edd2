"""The backward pass of layer norm.

    wdy[j] = w[j] * dy[j],   c1 = sum of xhat[j] * wdy[j] / N,   c2 = sum of wdy[j] / N

    dx[j] = (wdy[j] - (xhat[j] * c1 + c2)) * rstd

A program loops over rows, because it also accumulates what they contribute to the gradients of
weight and bias; sums.py holds how programs share these partial sums.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.launch import planned
from kernelbook.ops.layer_norm import tuned
from kernelbook.ops.layer_norm.forward import (
    divide,
    load_pairs,
    load_parameter,
)
from kernelbook.ops.layer_norm.sums import _add_buffers, _buffers, buffers_of, hand_over
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.exchange import collect, publish, to_slot, wait
from kernelbook.ops.rows.packed import come_in_pairs, narrow, widen
from kernelbook.ops.rows.pieces import EIGHTHS, afresh, in_pieces, where_piece
from kernelbook.ops.rows.sums import two_sums
from kernelbook.ops.rows.units import in_units, unit_of
from kernelbook.ops.visible import VisibleLaunch


@triton.jit
def load_weight(w_ptr, cols, inside):
    """The weight or, where there is none, a one for each column."""
    if w_ptr is None:
        return tl.full(cols.shape, 1.0, tl.float32)
    else:
        return tl.load(w_ptr + cols, mask=inside, other=0.0)


@triton.jit
def means_of(c1, c2, n_cols):
    """c1 and c2 from their sums, of rows that are padded with zeros.

    xhat of a padding zero is -mean * rstd. Where that overflows, its product with a dy of 0 is NaN;
    but only rows of equal numbers have so large an rstd beside their mean, and their c1 is 0. A NaN
    or an infinity of x or dy is in xhat or c2 as well, so that it still shows in dx.
    """
    c1 = tl.where(c1 == c1, c1, 0.0)
    return divide(c1, n_cols), divide(c2, n_cols)


@triton.jit
def row_bwd_kernel(
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
    NUM_STAGES: tl.constexpr,  # iterations of the loop whose loads are in flight
    UNIT: tl.constexpr = 1,  # what divides n_cols and both strides
):
    # -- begin: partial sums that stay in registers for all my rows
    n_cols = in_units(n_cols, UNIT)
    stride_x, stride_dy = in_units(stride_x, UNIT), in_units(stride_dy, UNIT)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    w = load_weight(w_ptr, cols, cols < n_cols)
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

        # -- add: these rows to the partial sums (dy is 0 outside, and so are both terms)
        xhat = (x - mean) * rstd
        dw += dy * xhat
        db += dy

        # -- row: the gradient of x
        if dx_ptr is not None:
            wdy = dy * w.to(tl.float32)
            c1, c2 = two_sums(xhat * wdy, wdy, 1, True)
            c1, c2 = means_of(c1, c2, n_cols)
            dx = (wdy - (xhat * c1 + c2)) * rstd
            tl.store(dx_ptr + rows * n_cols + cols, dx, mask=inside)

    # -- end: one row of partial sums for the whole program
    cols = tl.arange(0, BLOCK_COLS)
    dw, db = tl.sum(dw, axis=0), tl.sum(db, axis=0)
    buffer = tl.program_id(0) % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, buffer, offsets, cols < n_cols)


@triton.jit
def terms(x, dy, mean, rstd, w):
    """xhat and wdy, of which c1 and c2 are made."""
    return (x.to(tl.float32) - mean) * rstd, dy.to(tl.float32) * w.to(tl.float32)


@triton.jit
def pieces_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, N_PIECES), int32, zero; or None: a buffer for each program
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    N_PIECES: tl.constexpr,  # of a row; of which all but the last are whole
    PIECE_COLS: tl.constexpr,  # a power of two
    FULL: tl.constexpr,  # whether the last is whole as well
    NUM_STAGES: tl.constexpr,  # iterations of the loop whose loads are in flight
    UNIT: tl.constexpr = 1,  # what divides n_cols and both strides
):
    # -- begin: the weight and the partial sums stay in registers for all my rows
    n_cols = in_units(n_cols, UNIT)
    stride_x, stride_dy = in_units(stride_x, UNIT), in_units(stride_dy, UNIT)
    LAST: tl.constexpr = N_PIECES - 1
    w, dw, db = (), (), ()
    for piece in tl.static_range(N_PIECES):
        cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
        w = w + (load_weight(w_ptr, cols, inside),)
        dw = dw + (tl.zeros((PIECE_COLS,), tl.float32),)
        db = db + (tl.zeros((PIECE_COLS,), tl.float32),)
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, n_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        x, dy = (), ()
        for piece in tl.static_range(N_PIECES):
            cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
            x = x + (tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0),)
            dy = dy + (tl.load(dy_ptr + row * stride_dy + cols, mask=inside, other=0.0),)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)

        # -- add: this row to the partial sums, and its pieces to c1 and c2
        c1 = tl.zeros((PIECE_COLS,), tl.float32)
        c2 = tl.zeros((PIECE_COLS,), tl.float32)
        dw_before, db_before, dw, db = dw, db, (), ()
        for piece in tl.static_range(N_PIECES):
            xhat, wdy = terms(x[piece], dy[piece], mean, rstd, w[piece])
            dw = dw + (dw_before[piece] + dy[piece].to(tl.float32) * xhat,)
            db = db + (db_before[piece] + dy[piece].to(tl.float32),)
            c1 += xhat * wdy
            c2 += wdy

        # -- row: the gradient of x
        if dx_ptr is not None:
            c1, c2 = two_sums(c1, c2, 0)
            c1, c2 = means_of(c1, c2, n_cols)
            for piece in tl.static_range(N_PIECES):
                cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
                xhat, wdy = terms(x[piece], dy[piece], mean, rstd, w[piece])
                dx = (wdy - (xhat * c1 + c2)) * rstd
                tl.store(dx_ptr + row * n_cols + cols, dx, mask=inside)

    # -- end: one row of partial sums for the whole program
    buffer = tl.program_id(0) % n_buffers
    for piece in tl.static_range(N_PIECES):
        cols, inside = where_piece(piece, n_cols, PIECE_COLS, FULL or piece < LAST)
        offsets = buffer.to(tl.int64) * n_cols + cols
        lock = buffer * N_PIECES + piece
        hand_over(dw[piece], db[piece], dw_ptr, db_ptr, locks_ptr, lock, offsets, inside)


@triton.jit
def packed_row_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols), 16 bits
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols), 16 bits
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, N_PIECES), int32, zero; or None: a buffer for each program
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    zero,  # 0, which the compiler must not know
    N_PIECES: tl.constexpr,  # of a row
    PAIRS: tl.constexpr,  # pairs of numbers in a piece; the pieces are the row, without a mask
):
    # -- begin: the partial sums of all columns take half of the registers
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    dy_dtype: tl.constexpr = dy_ptr.dtype.element_ty
    INT32: tl.constexpr = tl.pointer_type(tl.int32)
    dw, db = (), ()
    for _ in tl.static_range(N_PIECES):
        dw = dw + (tl.zeros((2 * PAIRS,), tl.float32),)
        db = db + (tl.zeros((2 * PAIRS,), tl.float32),)
    for turn in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(turn, tl.int64)
        x_ptrs = (x_ptr + row * stride_x).to(INT32)
        dy_ptrs = (dy_ptr + row * stride_dy).to(INT32)
        x, dy = (), ()
        for piece in tl.static_range(N_PIECES):
            x = x + (load_pairs(x_ptrs, piece, n_cols, PAIRS, True),)
            dy = dy + (load_pairs(dy_ptrs, piece, n_cols, PAIRS, True),)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)

        # -- add: this row to the partial sums, and its pieces to c1 and c2
        c1 = tl.zeros((2 * PAIRS,), tl.float32)
        c2 = tl.zeros((2 * PAIRS,), tl.float32)
        dw_before, db_before, dw, db = dw, db, (), ()
        for piece in tl.static_range(N_PIECES):
            xhat = (widen(x[piece], dtype) - mean) * rstd
            dy_wide = widen(dy[piece], dy_dtype)
            dw = dw + (dw_before[piece] + dy_wide * xhat,)
            db = db + (db_before[piece] + dy_wide,)
            wdy = load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, True) * dy_wide
            c1 += xhat * wdy
            c2 += wdy

        # -- row: the gradient of x, widened and weighted once more
        if dx_ptr is not None:
            c1, c2 = two_sums(c1, c2, 0)
            c1, c2 = divide(c1, n_cols), divide(c2, n_cols)
            x, dy = afresh(x, zero, N_PIECES), afresh(dy, zero, N_PIECES)
            dx_ptrs = (dx_ptr + row * n_cols).to(INT32)
            for piece in tl.static_range(N_PIECES):
                pairs = piece * PAIRS + tl.arange(0, PAIRS)
                xhat = (widen(x[piece], dtype) - mean) * rstd
                w = load_parameter(w_ptr, piece, n_cols, 1.0, PAIRS, True)
                dx = (w * widen(dy[piece], dy_dtype) - (xhat * c1 + c2)) * rstd
                tl.store(dx_ptrs + pairs, narrow(dx, dtype))

    # -- end: one row of partial sums for the whole program
    buffer = tl.program_id(0) % n_buffers
    for piece in tl.static_range(N_PIECES):
        cols, inside = where_piece(piece, n_cols, 2 * PAIRS, True)
        offsets = buffer.to(tl.int64) * n_cols + cols
        lock = buffer * N_PIECES + piece
        hand_over(dw[piece], db[piece], dw_ptr, db_ptr, locks_ptr, lock, offsets, inside)


@triton.jit
def load_part(row_of, row, n_rows, cols, n_cols):
    """Columns of x and dy as they are stored, and mean and rstd; zeros past the last row."""
    x_ptr, stride_x, dy_ptr, stride_dy, mean_ptr, rstd_ptr = row_of
    there = row < n_rows
    inside = (cols < n_cols) & there
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + row, mask=there, other=0.0)
    return x, dy, mean, tl.load(rstd_ptr + row, mask=there, other=0.0)


@triton.jit
def split_bwd_kernel(
    x_ptr,  # input of forward, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols), or None
    mean_ptr,  # (n_rows), float32
    rstd_ptr,  # (n_rows), float32
    dy_ptr,  # gradient of y, (n_rows, n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous, or None
    dw_ptr,  # sums of dy * xhat, (n_buffers, n_cols), float32, or None
    db_ptr,  # sums of dy, (n_buffers, n_cols), float32, or None
    locks_ptr,  # (n_buffers, N_PARTS), int32, zero; or None: a buffer for each group
    slots_ptr,  # (n_rows and one for each group, N_PARTS), int64, zero at first
    stride_x,
    stride_dy,
    n_rows,
    n_cols,
    n_buffers,
    max_polls,  # how often to look whether the other parts are there
    N_PARTS: tl.constexpr,  # programs a row; so many programs are a group
    LOOKS: tl.constexpr,  # at the slots of a row: exchange.looks
    THREADS: tl.constexpr,  # of a program
    BLOCK_COLS: tl.constexpr,  # a power of two; N_PARTS blocks cover a row
    UNIT: tl.constexpr = 1,  # what divides n_cols and both strides
):
    n_cols = in_units(n_cols, UNIT)
    stride_x, stride_dy = in_units(stride_x, UNIT), in_units(stride_dy, UNIT)
    group, part = tl.program_id(0) // N_PARTS, tl.program_id(0) % N_PARTS
    parts, of_part = tl.arange(0, LOOKS), tl.arange(0, BLOCK_COLS)
    cols = part * BLOCK_COLS + of_part
    w = load_weight(w_ptr, cols, cols < n_cols)
    dw = tl.zeros((BLOCK_COLS,), tl.float32)
    db = tl.zeros((BLOCK_COLS,), tl.float32)
    first = group.to(tl.int64)
    step = (tl.num_programs(0) // N_PARTS).to(tl.int64)
    row_of = (x_ptr, stride_x, dy_ptr, stride_dy, mean_ptr, rstd_ptr)
    x, dy, mean, rstd = load_part(row_of, first, n_rows, cols, n_cols)
    # Not x: Triton 3.6 and 3.7 take a name that begins as x, and becomes x again, for unchanged.
    x_before, dy_before = tl.zeros_like(x), tl.zeros_like(dy)
    mean_before, rstd_before = tl.zeros_like(mean), tl.zeros_like(rstd)
    for row in range(first, n_rows + step, step):  # and an iteration that only collects
        # -- publish: what my part adds to c1 and c2
        xhat, wdy = terms(x, dy, mean, rstd, w)
        dw += dy.to(tl.float32) * xhat
        db += dy.to(tl.float32)
        if dx_ptr is not None:
            c1, c2 = two_sums(xhat * wdy, wdy, 0)
            publish(slots_ptr + row * N_PARTS + part, to_slot(c1, c2))

        # -- ahead: the loads of the next row are in flight during the rest of this iteration
        x_next, dy_next, mean_next, rstd_next = load_part(row_of, row + step, n_rows, cols, n_cols)

        # -- collect: the previous row, whose slots all parts had an iteration to fill
        if (dx_ptr is not None) and (row > first):
            before = row - step
            slots_ptrs = slots_ptr + before * N_PARTS + parts % N_PARTS
            slots, ready = wait(slots_ptrs, max_polls, THREADS)

            # -- late: some parts have not published in time; compute the shares of all here
            if ready == 0:
                for other in range(N_PARTS):
                    others = other * BLOCK_COLS + of_part
                    loaded = load_part(row_of, before, n_rows, others, n_cols)
                    xhat, wdy = terms(*loaded, load_weight(w_ptr, others, others < n_cols))
                    c1, c2 = two_sums(xhat * wdy, wdy, 0)
                    slots = tl.where(parts == other, to_slot(c1, c2), slots)

            # -- finish: c1 and c2 of the whole row, and the gradient of my part of it
            c1s, c2s = collect(slots, parts < N_PARTS, 0.0, 0.0)
            c1, c2 = two_sums(c1s, c2s, 0)
            c1, c2 = means_of(c1, c2, n_cols)
            xhat, wdy = terms(x_before, dy_before, mean_before, rstd_before, w)
            dx = (wdy - (xhat * c1 + c2)) * rstd_before
            tl.store(dx_ptr + before * n_cols + cols, dx, mask=cols < n_cols)

        # -- shift: the next row becomes this one, and this one the previous
        x_before, dy_before, mean_before, rstd_before = x, dy, mean, rstd
        x, dy, mean, rstd = x_next, dy_next, mean_next, rstd_next

    # -- end: one row of partial sums for the whole group
    buffer = group % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    lock = buffer * N_PARTS + part
    hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, cols < n_cols)


@triton.jit
def loop_bwd_kernel(
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
        wdy = dy * load_weight(w_ptr, cols, cols < n_cols).to(tl.float32)
        c1 += (x - mean) * rstd * wdy
        c2 += wdy
    c1, c2 = two_sums(c1, c2, 0)
    c1, c2 = means_of(c1, c2, n_cols)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        wdy = dy * load_weight(w_ptr, cols, cols < n_cols).to(tl.float32)
        dx = (wdy - ((x - mean) * rstd * c1 + c2)) * rstd
        tl.store(dx_ptr + cols, dx, mask=cols < n_cols)


@triton.jit
def column_bwd_kernel(
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
        xhat = (x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row)
        dw += dy * xhat
        db += dy
    buffer = tl.program_id(1) % n_buffers
    offsets = buffer.to(tl.int64) * n_cols + cols
    lock = buffer * tl.num_programs(0) + tl.program_id(0)
    hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, cols < n_cols)


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
    dx: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dw and db; a gradient that is not needed has no dtype here, and is None.

    ``reduction`` says how programs share the sums over rows: "partial" or "lock". ``n_programs``
    is how many loop over the rows, where a program has whole rows: as many as fit, unless given.
    ``dx`` is where the gradient of x goes, of any shape and contiguous, allocated unless given.
    """
    if needs_dx and dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wanted = (dw_dtype, db_dtype)
    sums = _sums(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs)
    return dx, *_add_buffers(sums, wanted)


def _sums(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    """Fill dx, if there is one. Return the buffers of sums for dw and db, or None."""
    arguments = (x, weight, mean, rstd, dy, dx, wanted, reduction)
    n_cols = x.shape[1]
    if n_cols <= tuned.BWD_ROW_COLS:
        return _row_backward(*arguments, n_programs)
    if tuned.is_packed_backward(n_cols) and come_in_pairs((x, dy), (weight,)):
        return _packed_row_backward(*arguments, n_programs)
    if n_cols <= tuned.MAX_PARTS * tuned.BWD_MAX_PART_COLS:
        return _split_backward(*arguments)
    return _column_backward(*arguments)


def _row_backward(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    # I/O: read x + read dy + write dx
    strides, itemsizes = (x.stride(0), dy.stride(0)), (x.itemsize, dy.itemsize)
    programs, launch = _row_launch(*x.shape, strides, itemsizes, x.device, reduction, n_programs)
    sums, locks, _ = _buffers(x, wanted, reduction, programs, EIGHTHS)  # a lock a piece, at most
    launch(x, weight, mean, rstd, dy, dx, *sums, locks)
    return sums


@planned
def _row_launch(n_rows, n_cols, strides, itemsizes, device, reduction, n_programs):
    """Return how many programs loop over the rows, and their launch."""
    cut = tuned.backward_pieces(n_cols, itemsizes)
    if cut:
        pieces, piece, num_warps, threads = cut
        kernel, rows, block = pieces_bwd_kernel, 1, pieces * piece
        sizes = pieces, piece, block == n_cols
    else:
        block, threads = runtime.next_power_of_2(n_cols), tuned.BWD_THREADS
        kernel, rows = row_bwd_kernel, max(1, tuned.BWD_TILE // block)
        num_warps, sizes = rows * block // tuned.BWD_WARP, (rows, block)
    at_once = runtime.multiprocessors(device) * max(1, threads // (32 * num_warps))
    programs = min(n_programs or at_once, runtime.cdiv(n_rows, rows))
    waiting = (tuned.BWD_STAGES - 1) * rows * block * sum(itemsizes)
    if itemsizes[0] != itemsizes[1]:  # each thread loads other elements of x than of dy
        waiting += rows * block * min(itemsizes)  # exchanged in shared memory
    stages = tuned.BWD_STAGES if waiting <= runtime.shared_memory(device) else 1
    return programs, VisibleLaunch(
        kernel, (programs,), *strides, n_rows, n_cols,
        buffers_of(reduction, programs), *sizes, stages, unit_of(n_cols, *strides),
        num_warps=num_warps,
    )  # fmt: skip


def _packed_row_backward(x, weight, mean, rstd, dy, dx, wanted, reduction, n_programs):
    # I/O: read x + read dy + write dx
    n_rows, n_cols = x.shape
    programs = min(n_programs or runtime.multiprocessors(x.device), n_rows)
    pieces, piece = in_pieces(n_cols, least=3)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, programs, pieces)
    packed_row_bwd_kernel[(programs,)](
        x, weight, mean, rstd, dy, dx, *sums, locks, x.stride(0), dy.stride(0), n_rows, n_cols,
        n_buffers, 0, pieces, piece // 2, num_warps=16,
    )  # fmt: skip
    return sums


def _split_backward(x, weight, mean, rstd, dy, dx, wanted, reduction):
    # I/O: read x + read dy + write dx
    n_rows, n_cols = x.shape
    itemsize = max(x.itemsize, dy.itemsize)
    parts, block = tuned.split(n_cols, tuned.BWD_PART_COLS[itemsize])
    num_warps = max(1, block // tuned.BWD_PART_WARP[itemsize])
    at_once = max(1, tuned.BWD_PART_THREADS // (32 * num_warps))
    programs = runtime.multiprocessors(x.device) * at_once
    groups = min(max(1, programs // parts), n_rows)
    slots = None
    if dx is not None:
        slots = torch.zeros((n_rows + groups, parts), dtype=torch.int64, device=x.device)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, groups, parts)
    split_bwd_kernel[(groups * parts,)](
        x, weight, mean, rstd, dy, dx, *sums, locks, slots, x.stride(0), dy.stride(0), n_rows,
        n_cols, n_buffers, exchange.MAX_POLLS, parts,
        *exchange.looks(parts, num_warps, x.device), block,
        unit_of(n_cols, x.stride(0), dy.stride(0)), num_warps=num_warps,
    )  # fmt: skip
    return sums


def _column_backward(x, weight, mean, rstd, dy, dx, wanted, reduction):
    # I/O for dx: read x twice + read dy twice + write dx; for dw and db: read x + read dy
    n_rows, n_cols = x.shape
    strides = (x.stride(0), dy.stride(0))
    if dx is not None:
        loop_bwd_kernel[(n_rows,)](
            x, weight, mean, rstd, dy, dx, *strides, n_cols, tuned.LOOP_COLS, num_warps=8
        )
    blocks = runtime.cdiv(n_cols, tuned.COLUMN_COLS)
    at_once = tuned.COLUMN_PROGRAMS * runtime.multiprocessors(x.device)
    programs = min(max(1, at_once // blocks), n_rows)
    sums, locks, n_buffers = _buffers(x, wanted, reduction, programs, blocks)
    if sums != (None, None):
        column_bwd_kernel[(blocks, programs)](
            x, mean, rstd, dy, *sums, locks, *strides, n_rows, n_cols, n_buffers, tuned.COLUMN_COLS,
            num_warps=4,
        )  # fmt: skip
    return sums
