"""The gradients of weight and bias: sums over rows that lie in different programs.

    dw[j] = sum over rows of dy[j] * xhat[j],   db[j] = sum over rows of dy[j]

Programs share the sums in one of two ways. "partial": each program keeps the sums of its own rows
in a buffer of its own, and a second kernel reduces the buffers, always in the same order. "lock":
programs add to a few shared buffers, one at a time, in whatever order they arrive.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.launch import planned
from kernelbook.ops.layer_norm import tuned
from kernelbook.ops.visible import VisibleLaunch


@triton.jit
def hand_over(dw, db, dw_ptr, db_ptr, locks_ptr, lock, offsets, inside):
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
def sum_of_buffers(
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
def buffer_sum_kernel(
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
        sum_of_buffers(first_sums_ptr, first_ptr, n_buffers, n_cols, BLOCK_ROWS, BLOCK_COLS)
    else:
        sum_of_buffers(second_sums_ptr, second_ptr, n_buffers, n_cols, BLOCK_ROWS, BLOCK_COLS)


def buffers_of(reduction, programs):
    """Return how many buffers programs have for their sums."""
    return programs if reduction == "partial" else min(programs, tuned.LOCK_BUFFERS)


def _buffers(x, wanted, reduction, programs, locks_a_buffer):
    """Return the buffers for the sums of dw and of db, their locks, and how many there are.

    A buffer is a row. Under "partial" each program has its own and nothing is locked.
    """
    n_buffers, locks, allocate = buffers_of(reduction, programs), None, torch.empty
    if reduction == "lock":
        allocate = torch.zeros
        locks = torch.zeros(n_buffers * locks_a_buffer, dtype=torch.int32, device=x.device)
    shape = (n_buffers, x.shape[1])
    sums = tuple(
        None if dtype is None else allocate(shape, dtype=torch.float32, device=x.device)
        for dtype in wanted
    )
    return sums, locks, n_buffers


def _add_buffers(sums, wanted):
    """Add up the rows of the buffers. Return dw and db, each None where it is not wanted."""
    gradients = [
        None if dtype is None else torch.empty(of.shape[1], dtype=dtype, device=of.device)
        for of, dtype in zip(sums, wanted, strict=True)
    ]
    there = [pair for pair in zip(sums, gradients, strict=True) if pair[0] is not None]
    if there:
        (first, first_to), (second, second_to) = there[0], there[-1]
        _sum_launch(*first.shape, len(there))(first, second, first_to, second_to)
    return gradients


@planned
def _sum_launch(n_buffers: int, n_cols: int, gradients: int) -> VisibleLaunch:
    grid = (runtime.cdiv(n_cols, tuned.SUM_COLS), gradients)
    return VisibleLaunch(
        buffer_sum_kernel, grid, n_buffers, n_cols, tuned.SUM_ROWS, tuned.SUM_COLS, num_warps=4
    )
