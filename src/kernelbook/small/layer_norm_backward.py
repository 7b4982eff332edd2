"""Layer norm backward, small: the sums over rows under a lock, and as partial sums without one.

Float32, contiguous, rows of up to 4,096 columns. ``mean`` and ``rstd`` are what the forward pass
has stored.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def sum_my_rows(x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, n_rows, n_cols, cols):
    inside = cols < n_cols
    w = tl.load(w_ptr + cols, mask=inside, other=0.0)
    dw = tl.zeros(w.shape, tl.float32)
    db = tl.zeros(w.shape, tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + row * n_cols + cols, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        xhat = (x - tl.load(mean_ptr + row)) * rstd
        dw += dy * xhat
        db += dy
        wdy = w * dy
        c1 = tl.sum(xhat * wdy, axis=0) / n_cols
        c2 = tl.sum(wdy, axis=0) / n_cols
        dx = (wdy - (xhat * c1 + c2)) * rstd
        tl.store(dx_ptr + row * n_cols + cols, dx, mask=inside)
    return dw, db


@triton.jit
def lock_kernel(
    x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, sums_ptr, lock_ptr, n_rows, n_cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    dw, db = sum_my_rows(x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, n_rows, n_cols, cols)

    # -- lock: add to what the holders before me have stored
    while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") != 0:  # 1
        pass
    tl.debug_barrier()  # 2
    dw += tl.load(sums_ptr + cols, mask=cols < n_cols, other=0.0)
    db += tl.load(sums_ptr + n_cols + cols, mask=cols < n_cols, other=0.0)
    tl.store(sums_ptr + cols, dw, mask=cols < n_cols)
    tl.store(sums_ptr + n_cols + cols, db, mask=cols < n_cols)
    tl.debug_barrier()  # 3
    tl.atomic_xchg(lock_ptr, 0, sem="release")  # 4


def with_lock(x, w, mean, rstd, dy, n_programs):
    n_rows, n_cols = x.shape
    dx, sums = torch.empty_like(x), x.new_zeros(2, n_cols)
    lock = torch.zeros(1, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(n_cols)
    lock_kernel[(n_programs,)](x, w, mean, rstd, dy, dx, sums, lock, n_rows, n_cols, block)
    return dx, *sums


@triton.jit
def partial_kernel(
    x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, sums_ptr, n_rows, n_cols, BLOCK: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    dw, db = sum_my_rows(x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, n_rows, n_cols, cols)

    # -- no lock: my own buffer
    sums_ptr += tl.program_id(0) * 2 * n_cols
    tl.store(sums_ptr + cols, dw, mask=cols < n_cols)
    tl.store(sums_ptr + n_cols + cols, db, mask=cols < n_cols)


@triton.jit
def add_kernel(sums_ptr, total_ptr, n_buffers, n_cols, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for buffer in range(n_buffers):
        total += tl.load(sums_ptr + buffer * n_cols + cols, mask=cols < n_cols, other=0.0)
    tl.store(total_ptr + cols, total, mask=cols < n_cols)


def without_lock(x, w, mean, rstd, dy, n_programs):
    n_rows, n_cols = x.shape
    dx, sums = torch.empty_like(x), x.new_empty(n_programs, 2, n_cols)
    total = x.new_empty(2, n_cols)
    block = triton.next_power_of_2(n_cols)
    partial_kernel[(n_programs,)](x, w, mean, rstd, dy, dx, sums, n_rows, n_cols, block)
    add_kernel[(triton.cdiv(2 * n_cols, 128),)](sums, total, n_programs, 2 * n_cols, 128)
    return dx, *total
