"""Layer norm of whole rows: the formulas as they stand, or with a mean that is corrected.

Rows are contiguous and of at most 8,192 columns, and every row is one program's.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr, CORRECTED: tl.constexpr
):
    # -- load: a whole row, and zeros past its end
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    offsets = row * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)

    # -- moments: the mean, and m2, the sum of squared deviations from it
    mean = tl.sum(x, axis=0) / n_cols
    deviation = tl.where(inside, x - mean, 0.0)
    m2 = tl.sum(deviation * deviation, axis=0)

    # -- correct: the mean, by what the deviations from it leave over, and m2
    if CORRECTED:
        correction = tl.sum(deviation, axis=0) / n_cols
        mean += correction
        m2 -= n_cols * correction * correction

    # -- write: normalise, scale and shift
    rstd = tl.rsqrt(m2 / n_cols + eps)
    w = tl.load(w_ptr + cols, mask=inside)
    b = tl.load(b_ptr + cols, mask=inside)
    y = (x - mean) * rstd * w + b
    tl.store(y_ptr + offsets, y, mask=inside)


def norm(x, w, b, eps=1e-5, corrected=False):
    n_rows, n_cols = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(n_cols)
    norm_kernel[(n_rows,)](x, w, b, y, n_cols, eps, block, corrected, num_warps=4)
    return y
