"""
Layer norm in one read
======================

Layer norm needs the mean of a row to compute its variance, and both to compute the output, so the
formulas pass over every row three times. *How can a kernel read the row from memory only once,
without losing precision?*

You will learn

- how a kernel passes over a row three times but reads it only once;
- how a variance goes silently wrong, and how to keep it accurate;
- how rows fit on the chip: packed in pairs, shared by several programs, or cut into pieces.
"""

# sphinx_gallery_thumbnail_number = 6
import dataclasses
import statistics
from decimal import Decimal, localcontext
from functools import partial
from math import gcd
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.lab import results
from kernelbook.ops.layer_norm import layer_norm, tuned
from kernelbook.ops.layer_norm.forward import (
    _forward,
    divide,
    far_rstd,
    loop_fwd_kernel,
    mean_of,
    merge_moments,
    moments,
    packed_row_fwd_kernel,
    pieces_fwd_kernel,
    row_fwd_kernel,
    split_fwd_kernel,
    square,
    without,
)
from kernelbook.ops.rows.packed import widen
from kernelbook.ops.rows.pieces import afresh, in_pieces
from kernelbook.ops.rows.sums import two_sums
from kernelbook.ops.rows.units import unit_of
from kernelbook.small.layer_norm import norm, norm_kernel

lab.start("layer_norm", "kernelbook.ops.layer_norm")

# %%
# The problem in PyTorch
# ----------------------
#
# Layer norm shifts each row to a mean of 0 and scales it to a variance of 1:

# Drawing
row_of_eight = torch.tensor([1.0, 3, 2, 6, 5, 5, 0, 2])
deviation_of_eight = row_of_eight - row_of_eight.mean()
square_of_eight = deviation_of_eight.square()
xhat_of_eight = deviation_of_eight * square_of_eight.mean().rsqrt()


def shift_and_scale(*panels):
    ours, grey = lab.colour("Kernel Book"), lab.colour("copy")
    for axes, numbers, name in zip(
        panels,
        (row_of_eight, deviation_of_eight, xhat_of_eight),
        ("the row", "shifted", "and scaled"),
        strict=True,
    ):
        mean, variance = numbers.mean().item(), numbers.var(correction=0).item()
        axes.axhline(mean, color=grey, linewidth=1.2, linestyle="--")
        axes.vlines(range(8), mean, numbers, color=ours, linewidth=1.8)
        axes.plot(range(8), numbers, "o", color=ours, markersize=5)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel(f"mean {mean:g}\nvariance {variance:g}")
        axes.set(ylim=(-3.6, 6.6), xlim=(-0.7, 7.7), xticks=[], yticks=range(-3, 7, 3))
        if axes is not panels[0]:
            axes.set_yticklabels([])


lab.sketch(
    "Layer norm of a row of eight",
    "Three panels with the eight numbers of a row as dots, each joined to the dashed line of the "
    "mean. First the row itself, of mean 3 and variance 4. Then the same dots, shifted to mean 0. "
    "Then the distances from the mean are halved, so the variance is 1.",
    shift_and_scale,
    panels=3,
    height=2.7,
)

# %%
# It then multiplies each element by a weight and adds a bias, one of each per column. In PyTorch:


def simple_layer_norm(x, w, b, eps=1e-5):
    mean = x.mean(dim=-1, keepdim=True)
    deviation = x - mean
    variance = (deviation * deviation).mean(dim=-1, keepdim=True)
    rstd = (variance + eps).rsqrt()
    return deviation * rstd * w + b


# %%
# *How fast can this be?* PyTorch runs each operation as a separate :term:`kernel`, which reads its
# input from the GPU's main memory (:term:`HBM`) and writes its output back. The seven operations on
# whole rows read 7 times and write 5 times, which makes 12 trips to memory. A copy takes 2, so they
# can reach at most a sixth of its speed. The arithmetic, one addition or multiplication per element
# in each operation, takes less time (:term:`roofline`).
#
# The idea
# --------
#
# Each pass needs the same numbers again. *Must it also load them again?*
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    A kernel that keeps the whole row on the chip has to load it only once, because further passes
#    cause no memory traffic.
#
# .. image:: /figures/layer-norm-passes.svg
#    :alt: Three ways to compute layer norm. PyTorch, operation by operation, reads a row 7 times
#          and writes 5 times. A loop over blocks reads it for the mean, for the variance and for
#          the result, and writes once. A row that stays on chip is read once and written once.
#
# .. raw:: html
#
#    <span id="the-backward-kernel"></span><span id="the-price-of-the-lock"></span>
#    <span id="partial-sums-stay-in-l2"></span>
#
# The mathematics
# ---------------
#
# All our kernels follow these formulas for a row :math:`x` of :math:`N` elements:
#
# .. math::
#
#    \begin{aligned}
#    m &= \frac{1}{N} \sum_j x_j \\
#    v &= \frac{1}{N} \sum_j (x_j - m)^2 \\
#    r &= \frac{1}{\sqrt{v + \epsilon}} \\[6pt]
#    y_j &= (x_j - m)\, r\, w_j + b_j
#    \end{aligned}
#
# In the code, :math:`r` is ``rstd``, the reciprocal of the standard deviation, and :math:`\epsilon`
# is ``eps``, a small number that prevents division by zero in a row of equal numbers.

# Folded: A row of eight, taken through the formulas
y_of_eight = 2 * xhat_of_eight + 1
lab.table(
    [
        {"column": name}
        | {str(j): f"{n:g}".replace("-", "−") for j, n in enumerate(numbers.tolist())}
        | {"of the row": of_row.replace(" ", "\N{NO-BREAK SPACE}")}
        for name, numbers, of_row in (
            ("x", row_of_eight, f"m = {row_of_eight.mean():g}"),
            ("x − m", deviation_of_eight, f"sum {deviation_of_eight.sum():g}"),
            ("(x − m)²", square_of_eight, f"v = {square_of_eight.mean():g}"),
            (
                "(x − m) r",
                xhat_of_eight,
                f"r = {square_of_eight.mean().rsqrt():g}",
            ),
            ("y", y_of_eight, ""),
        )
    ],
    "A row of eight, normalised with weights of 2, biases of 1 and no eps",
)

# %%
# The variance needs the mean, and therefore a pass of its own. The other common formula, the mean
# of the squares minus the square of the mean, would save this pass but loses digits if the mean is
# large:

rows = []
for mean in (0, 100, 1000, 10_000):
    x = (torch.randn(4096, dtype=torch.float64) + mean).float()
    truth = x.double().var(correction=0)
    two_steps = (x - x.mean()).square().mean()
    one_step = x.square().mean() - x.mean().square()
    rows.append(
        {
            "mean": f"{mean:,}",
            "true variance": f"{truth:.4f}",
            "from deviations": f"{two_steps:.4f}",
            "from squares": f"{one_step:.4f}".replace("-", "−"),
        }
    )
lab.table(rows, "The variance of 4,096 numbers in float32, two ways")

# %%

# Reading
lab.read(
    "In the last line, both the mean of the squares and the square of the mean are near 100 "
    "million. Neighbouring float32 numbers lie 8 apart there, so the difference of the two is a "
    "multiple of 8"
    + (", and here even negative" if one_step < 0 else "")
    + ". We therefore compute the mean first."
)

# %%
# Three reads: a loop
# -------------------
#
# The simplest kernel for rows of any length loops over the row three times, once for each sum and
# once for the output, and loads ``BLOCK`` columns per iteration. Here is the second loop. It uses
# the ``mean`` from the loop before; ``first`` is the offset of the row:
#
# .. code-block:: python
#
#    m2 = tl.zeros((BLOCK,), tl.float32)
#    for start in range(0, n_cols, BLOCK):
#        cols = start + tl.arange(0, BLOCK)
#        x = tl.load(x_ptr + first + cols, mask=cols < n_cols, other=0.0)
#        deviation = tl.where(cols < n_cols, x - mean, 0.0)
#        m2 += deviation * deviation
#    rstd = tl.rsqrt(tl.sum(m2, axis=0) / n_cols + eps)
#
# The last block may extend past the end of the row. Its load fills this *padding* with zeros
# (``other=0.0``), which leave the first sum unchanged. Their deviations, however, would be minus
# the mean, so ``tl.where`` sets them to zero. ``m2`` collects the squared deviations, whose
# sum is :math:`N` times the variance.
#
# *Could two reads do?* Yes: Welford's method updates the mean and the variance together, in one
# loop, and PyTorch's own ``layer_norm`` works that way.

# Whole: three_reads_kernel, with all three loops
import triton
import triton.language as tl


@triton.jit
def three_reads_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * n_cols  # of my row

    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):  # the first read, for the mean
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + first + cols, mask=cols < n_cols, other=0.0)
    mean = tl.sum(total, axis=0) / n_cols

    m2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):  # the second, for the variance
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + first + cols, mask=cols < n_cols, other=0.0)
        deviation = tl.where(cols < n_cols, x - mean, 0.0)
        m2 += deviation * deviation
    rstd = tl.rsqrt(tl.sum(m2, axis=0) / n_cols + eps)

    for start in range(0, n_cols, BLOCK):  # the third, for the output
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        x = tl.load(x_ptr + first + cols, mask=inside, other=0.0)
        w = tl.load(w_ptr + cols, mask=inside)
        b = tl.load(b_ptr + cols, mask=inside)
        tl.store(y_ptr + first + cols, (x - mean) * rstd * w + b, mask=inside)


# %%
# One read: whole rows
# --------------------
#
# A :term:`program` can hold its row in :term:`registers <register>`, the fastest storage on the
# chip. It then loads the row as a single block, and the loops disappear along with half of the
# bytes:


@triton.jit
def one_read_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * n_cols  # of my row
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + first + cols, mask=inside, other=0.0).to(tl.float32)

    mean = tl.sum(x, axis=0) / n_cols
    deviation = tl.where(inside, x - mean, 0.0)
    m2 = tl.sum(deviation * deviation, axis=0)
    rstd = tl.rsqrt(m2 / n_cols + eps)

    w = tl.load(w_ptr + cols, mask=inside)
    b = tl.load(b_ptr + cols, mask=inside)
    tl.store(y_ptr + first + cols, (x - mean) * rstd * w + b, mask=inside)


# %%
# Since ``BLOCK`` must be a power of two, the row is padded again. The kernel converts ``x`` to
# float32 because sums of 16-bit numbers lose digits.
#
# We launch one program per row. On rows with a mean of 3, the output agrees with PyTorch's:

x = torch.randn(33, 1000, device=runtime.DEVICE) + 3
w, b = torch.randn(2, 1000, device=runtime.DEVICE)
y = torch.empty_like(x)
one_read_kernel[(33,)](x, w, b, y, 1000, 1e-5, BLOCK=1024)
torch.testing.assert_close(y, F.layer_norm(x, (1000,), w, b))

# %%

# Measuring
three_reads_kernel[(33,)](x, w, b, y.zero_(), 1000, 1e-5, BLOCK=256)
torch.testing.assert_close(y, F.layer_norm(x, (1000,), w, b))
x_of_eight = row_of_eight.to(runtime.DEVICE)
w_of_eight, b_of_eight = torch.tensor([[2.0] * 8, [1.0] * 8], device=runtime.DEVICE)
found = torch.empty_like(x_of_eight)
one_read_kernel[(1,)](x_of_eight, w_of_eight, b_of_eight, found, 8, 0.0, BLOCK=8)
torch.testing.assert_close(found.cpu(), y_of_eight)

# %%
# We time the kernels of the finished operator, ``kernelbook.layer_norm``, which follow the same
# steps but guard more against rounding. The yardstick is a copy of the same tensor. A whole row
# gets one :term:`warp` per 2,048 columns (``num_warps``), so that a thread keeps 64 numbers. With
# the default of 4 warps, a row of 32,768 would need 256 registers per thread, and 255 is the most.


# Measuring
def one_program(x, w, b):
    n_rows, n_cols = x.shape
    if n_cols > 32768:
        return lab.Absent("rows beyond 32,768 leave one program no registers")
    y, warps = torch.empty_like(x), max(1, n_cols // 2048)
    kernel = row_fwd_kernel[(n_rows,)]
    tensors, numbers = (x, w, b, y, None, None), (n_cols, n_rows, n_cols, 1e-5)
    return lambda: kernel(*tensors, *numbers, 1, n_cols, num_warps=warps)


def ladder_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "PyTorch": lambda: F.layer_norm(x, (columns,), w, b),
        "simple_layer_norm": lambda: simple_layer_norm(x, w, b),
        "loop": lambda: _forward(x, w, b, 1e-5, looping=True, keep_statistics=False),
        "one program": one_program(x, w, b),
        "Kernel Book": lambda: layer_norm(x, columns, w, b),
    }


# %%


# Measuring
def milliseconds(run, **options):
    return statistics.median(lab.event_times(run, **options))


def single_operations():
    x = torch.randn(32768, 4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    mean, rstd = (x[:, i : i + 1].contiguous() for i in range(2))
    copy = milliseconds(lambda: y.copy_(x))
    rows = []
    for name, moved, run in (
        ("x.mean()", 1, lambda: x.mean(dim=-1, keepdim=True)),
        ("x - mean", 2, lambda: x - mean),
        ("deviation * deviation", 2, lambda: x * x),
        ("(…).mean()", 1, lambda: x.mean(dim=-1, keepdim=True)),
        ("deviation * rstd", 2, lambda: x * rstd),
        ("… * w", 2, lambda: x * w),
        ("… + b", 2, lambda: x + b),
    ):
        took = milliseconds(run)
        row = {"operation": name, "N moved": moved, "ms": round(took, 3)}
        rows.append(row | {"% of a copy": round(100 * moved / 2 * copy / took)})
    return rows


# %%


# Measuring
def mean_in_every_column():
    x = torch.randn(32768, 4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    mean = x[:, :1].contiguous()
    everywhere = mean.expand_as(x).contiguous()
    return [
        {
            "the mean is stored": where,
            "N moved": moved,
            "ms": round(milliseconds(run), 3),
        }
        for where, moved, run in (
            ("once per row", 2, lambda: x - mean),
            ("in every column", 3, lambda: x - everywhere),
        )
    ]


# %%

# Measuring
single = lab.measure("The operations of simple_layer_norm", single_operations)
stored = lab.measure("x - mean, two ways", mean_in_every_column)

# %%

FORWARD = "2 * rows * columns * itemsize"
COLUMNS = [1024, 4096, 8192, 16384, 32768, 65536]
LADDER = [1024, 4096, 16384, 32768, 65536, 262144]


def points(dtype, columns):
    return [
        {"columns": n, "rows": min(32768, 2**27 // n), "dtype": dtype} for n in columns
    ]


ladder = lab.bench(
    "ladder",
    points(torch.bfloat16, LADDER),
    ladder_providers,
    limit="copy",
    work=FORWARD,
)

# %%

# Drawing
RUNGS = {
    "simple_layer_norm": "seven operations",
    "PyTorch": "PyTorch's layer_norm",
    "loop": "loop: three reads",
    "one program": "whole row: one read",
    "Kernel Book": "packed row: one read",
}


def complete(sweep):
    """Return a sweep that says of no version that it was absent at some length."""
    elsewhere = [complete(other) for other in sweep.elsewhere]
    return dataclasses.replace(sweep, skipped={}, elsewhere=elsewhere)


def climb(title, newest, *lengths):
    """Draw a bar for each version up to the newest, which is lit, at some lengths of rows."""
    rungs = list(RUNGS)[: list(RUNGS).index(newest) + 1]
    missing = any(
        (ladder.at(provider=name, columns=n)).empty for n in lengths for name in rungs
    )
    lab.ladder(
        ladder if missing else complete(ladder),
        title,
        rungs,
        by="columns",
        where={"columns": lengths},
        names=RUNGS,
        lit=newest,
    )


climb("Three reads and one read, bfloat16", "one program", 4096, 32768)

# %%

# Reading
nan = float("nan")
share = {
    (name, n): 100 * ladder.share(name, columns=n) for name in RUNGS for n in LADDER
}
gpu = ladder.provenance["gpu"] if ladder.provenance else "this GPU"
nearly = "nearly " if share["one program", 4096] < 99 else ""
seven = share["simple_layer_norm", 4096]
in_copies = {  # a copy moves N twice
    line["operation"]: line["N moved"] / 2 / (line["% of a copy"] / 100)
    for line in single.rows or []
}
four = ("x - mean", "deviation * rstd", "… * w", "… + b")
by_four = sum(in_copies.get(of, nan) for of in four)
copies = sum(in_copies.values()) or nan
cached = max(share["loop", n] for n in (4096, 32768)) > 51
slower_with_two = (
    share["loop", 4096] > 1.03 * share["PyTorch", 4096]
    and 0.97 * share["PyTorch", 32768] < share["loop", 32768] < share["PyTorch", 32768]
)
lab.together(
    lab.read(
        "**At 4,096 columns, reading once "
        + (
            f"makes layer norm {nearly}as fast as a copy"
            if share["one program", 4096] > 90
            else f"brings layer norm to {share['one program', 4096]:.0f} % of the speed of a copy"
        )
        + f"** on {gpu}."
    ),
    lab.read(
        f"The seven operations reach {seven:.0f} %"
        + ", less than the sixth that their bytes allow" * (seven < 15)
        + "."
        + (
            f" Timed alone, four of them take {by_four / copies:.0%} of the time. They are those "
            "that broadcast a smaller tensor, such as the mean or the weight."
        ).replace("%", " %")
        * (by_four > 0.7 * copies)
    ),
    lab.read(
        "Three reads and a write move twice the bytes of a copy, which allows half its speed. "
        f"The loop reaches {share['loop', 32768]:.0f} % at 32,768 columns and "
        f"{share['loop', 4096]:.0f} % at 4,096"
        + ", probably because caches serve some of its reads" * cached
        + "."
        + " PyTorch's `layer_norm` reads only twice, but is slower at 4,096 columns and hardly "
        "faster at 32,768. We do not know why." * slower_with_two
    ),
    lab.read(
        f"At 32,768 columns even the whole row reaches only {share['one program', 32768]:.0f} %. "
        "We come back to long rows once the digits are right, because at any length the one-read "
        "kernel still loses some."
    ),
)

# %%

# Folded: Why the seven operations take longer than their bytes, and the timed kernels in full
once, everywhere = [line["ms"] for line in stored.rows or [{"ms": nan}] * 2]
lab.together(
    lab.read(
        "Timed one by one, the seven operations move the bytes of six copies but take as long as "
        f"{copies:.0f}:"
    ),
    single,
    stored,
    lab.read(
        "If the mean is first stored in every column, the subtraction moves 1.5 times the bytes, "
        + (
            f"yet takes {everywhere:.2f} ms instead of {once:.2f}. In this operation, broadcasting "
            "costs more than the extra bytes. We did not test the other three."
            if not once <= everywhere
            else f"and takes {everywhere:.2f} ms instead of {once:.2f}. In this operation, "
            "broadcasting is not what takes the time."
        )
    ),
    lab.read(
        "PyTorch's own `layer_norm` is a single kernel whose two reads and one write allow two "
        f"thirds of the speed of a copy. It reaches {share['PyTorch', 4096]:.0f} % at 4,096 "
        f"columns and {share['PyTorch', 32768]:.0f} % at 32,768."
    ),
    lab.listing(
        {
            "The loop": loop_fwd_kernel,
            "The whole row. The kernel gives each program several rows if they are short, and can "
            "store mean and rstd for the backward pass. Its load of x asks L2 to keep it "
            "(evict_last), a hint that the chapter on softmax measures. The next section explains "
            "moments, which returns the mean and m2": row_fwd_kernel,
        }
    ),
)

# %%
# .. raw:: html
#
#    <span id="the-last-digits"></span>
#
# Lost digits: a corrected mean
# -----------------------------
#
# Every sum is rounded, so the mean of a row is slightly wrong. This matters where the numbers of a
# row are nearly equal, because layer norm divides by the size of the deviations and so magnifies
# any error in the mean. Suppose that a machine keeps three digits and that a row holds 3.33 five
# times:

with localcontext(prec=3):
    fives = [Decimal("3.33")] * 5
    so_far = [fives[0]]
    for number in fives[1:]:
        so_far.append(so_far[-1] + number)
    rough_mean = so_far[-1] / 5
    off = [number - rough_mean for number in fives]
    rough_m2 = sum(one * one for one in off)
    missing = sum(off) / 5
    rough_r = (rough_m2 / 5 + Decimal("1e-5")) ** Decimal("-0.5")  # rounded once
    rough_y = rough_r * off[0]
    assert rough_mean + missing == fives[0]
    assert rough_m2 - 5 * missing * missing == 0
four_of_five, all_five = sum(fives[:4]), sum(fives)  # exact
lab.table(
    [
        {"step": name, "exact": f"{exact}", "with three digits": f"{rough}"}
        for name, exact, rough in (
            ("sum of the five", all_five, so_far[-1]),
            ("mean m", all_five / 5, rough_mean),
            ("each x − m", f"{fives[0] - all_five / 5:.0f}", off[0]),
            ("m2, the sum of their squares", 0, rough_m2),
            ("each output, with eps 1e-5", 0, rough_y),
        )
    ],
    "The number 3.33, five times",
)

# %%

# Reading
lab.read(
    f"After four numbers the sum is {four_of_five}, which the machine keeps as {so_far[3]}. In the "
    f"end it has {so_far[-1]}, and the mean is too small by {missing}. **So every number seems to "
    f"lie {off[0]} above the mean, and layer norm blows this up to an output of {rough_y}.**"
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Deviations from the true mean sum to zero. If ours do not, their sum divided by :math:`N` is
#    what our mean is missing, so we add it.

# Reading
lab.read(
    f"In the example the five sum to {sum(off)}, a fifth of which is {missing}, and {rough_mean} + "
    f"{missing} is the right mean. This second sum is rounded too, but its numbers are small, and "
    "so are its errors. In the kernel for whole rows, the correction takes three lines between "
    "`m2` and `rstd`:"
)

# %%
# .. code-block:: python
#
#    correction = tl.sum(deviation, axis=0) / n_cols
#    mean += correction
#    m2 -= n_cols * correction * correction

# Reading
lab.read(
    "The last line removes what the wrong mean added to `m2`: in the example "
    + f"5 · {missing}² = {5 * missing * missing}".replace(" ", "\N{NO-BREAK SPACE}")
    + ", which is all of it. In float32, which keeps about "
    "seven digits, the three lines have this effect:"
)

# %%


# Measuring
def equal_numbers():
    """The largest output of rows of 1,000 equal numbers, from 1,000 to 1,100 by row."""
    x = torch.linspace(1000, 1100, 200, device=runtime.DEVICE)
    x = x[:, None].expand(200, 1000).contiguous()
    w, b = torch.ones_like(x[0]), torch.zeros_like(x[0])
    outputs = {
        "the small kernel": norm(x, w, b),
        "with the correction": norm(x, w, b, corrected=True),
        "PyTorch": F.layer_norm(x, (1000,), w, b),
    }
    return [
        {"computed by": name, "largest output": y.abs().max().item()}
        for name, y in outputs.items()
    ]


equal = lab.measure("The largest output of 200 rows of equal numbers", equal_numbers)

# %%


# Drawing
def two_neighbours(axes):
    ours, true = lab.colour("Kernel Book"), lab.colour("PyTorch")
    grey = lab.colour("copy")
    axes.plot([-0.4, 2.4], [0, 0], color=grey, linewidth=1)
    for place, name in ((0, "16,777,216"), (2, "16,777,218")):
        axes.plot(place, 0, "o", color=grey, markersize=9)
        axes.text(place, -0.17, name, ha="center", va="top")
    axes.text(0, -0.42, "the rounded mean", ha="center", va="top", color=ours)
    axes.plot(1, 0, "|", color=true, markersize=16, markeredgewidth=2.5)
    axes.text(1, -0.17, "the true mean", ha="center", va="top", color=true)
    for height, mean, ink, deviations, said in (
        (0.75, 0, ours, {0: "0", 2: "2"}, "from the rounded mean:\nsquares sum to 4"),
        (0.28, 1, true, {0: "−1", 2: "1"}, "from the true mean:\nsquares sum to 2"),
    ):
        axes.plot(mean, height, "|", color=ink, markersize=11, markeredgewidth=2)
        for place, deviation in deviations.items():
            axes.text(
                place, height + 0.07, deviation, ha="center", va="bottom", color=ink
            )
            if place != mean:
                arrow = {"arrowstyle": "->", "color": ink, "linewidth": 1.8}
                axes.annotate("", (place, height), (mean, height), arrowprops=arrow)
        axes.text(2.4, height, said, va="center", color=ink)
    axes.set(xlim=(-0.5, 4.0), ylim=(-0.68, 1.05))
    axes.axis("off")


# %%


# Measuring
def price():
    rows = []
    for columns in (1024, 4096, 8192):
        n_rows = min(32768, 2**27 // columns)
        x = torch.randn(n_rows, columns, device=runtime.DEVICE)
        w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
        copy = milliseconds(partial(y.copy_, x), repeats=50)
        row = {"columns": columns}
        for name, corrected in (("without", False), ("with it", True)):
            took = milliseconds(partial(norm, x, w, b, corrected=corrected), repeats=50)
            row[f"{name}, % of a copy"] = round(100 * copy / took, 1)
        rows.append(row)
    return rows


def errors():
    """The largest error of rows of 1,000 random numbers, in units of the largest output."""
    rows = []
    for mean in (0, 1000):
        x = torch.randn(2000, 1000, device=runtime.DEVICE) + mean
        w, b = torch.ones_like(x[0]), torch.zeros_like(x[0])
        truth = reference.layer_norm(x, 1, w, b)
        outputs = {
            "without the correction": norm(x, w, b),
            "with it": norm(x, w, b, corrected=True),
            "PyTorch": F.layer_norm(x, (1000,), w, b),
        }
        row = {"mean": mean}
        for name, y in outputs.items():
            error = (y.double() - truth).abs().max() / truth.abs().max()
            row[name] = float(f"{error.item():.1e}")
        rows.append(row)
    return rows


# %%

# Measuring
paid = lab.measure("The small kernel and the correction, float32", price)
gained = lab.measure(
    "The largest error of 2,000 random rows, as a share of the largest output", errors
)

# %%

# Measuring
without_it, with_it, by_pytorch = (
    line["largest output"] for line in equal.rows or equal_numbers()
)
lab.table(
    [
        {
            "rows": name,
            "without the correction": plain,
            "with it": corrected,
            "PyTorch": theirs,
        }
        for name, plain, corrected, theirs in (
            (
                "equal numbers, whose output is 0",
                *(
                    f"{one:.3f}" if one else "0"
                    for one in (without_it, with_it, by_pytorch)
                ),
            ),
            *(
                (
                    f"random, mean {row['mean']:,}",
                    *(
                        f"{row[name]:.1e}"
                        for name in ("without the correction", "with it", "PyTorch")
                    ),
                )
                for row in reversed(gained.rows or [])
            ),
        )
    ],
    "Largest error in rows of 1,000 float32 numbers (in random rows, as a share of the largest "
    "output), " + (f"on {gpu}" if equal.rows else "in Triton's interpreter"),
)

# %%

# Reading
near_0, near_1000 = gained.rows or [{}, {}]
costs = {
    row["columns"]: round(row["without, % of a copy"] - row["with it, % of a copy"], 1)
    for row in paid.rows or []
}
dearest = max(costs, key=costs.get, default=0)
said = (
    "**The correction turns rows of equal numbers into zeros.** "
    if with_it == 0 < without_it
    else ""
)
if gained.rows:
    plain, corrected, theirs = (
        near_1000[name] for name in ("without the correction", "with it", "PyTorch")
    )
    said += (
        (
            "In random rows with a mean of 1,000 it makes the largest error "
            f"about {plain / corrected:.{0 if plain > 2.5 * corrected else 1}f} times smaller"
            if plain > 1.3 * corrected
            else "In random rows with a mean of 1,000 it changes the largest error little"
        )
        + (", though PyTorch's is smaller" if theirs < 0.9 * corrected else "")
        + ". "
        + (
            "At a mean of 0 it does not help, and our error is slightly larger than PyTorch's. "
            if near_0["with it"] > 0.9 * near_0["without the correction"]
            and near_0["with it"] > 1.1 * near_0["PyTorch"]
            else "At a mean of 0 our error is slightly larger than PyTorch's. "
            if near_0["with it"] > 1.1 * near_0["PyTorch"]
            else ""
        )
    )
cost = (
    "The three lines cost "
    + (
        "no measurable time"
        if costs[dearest] <= 0
        else "less than one percentage point of the speed of a copy"
        if costs[dearest] < 0.95
        else f"at most {costs[dearest]} percentage points of the speed of a copy"
    )
    + ", so we use them in every float32 kernel" * (costs[dearest] < 0.95)
    + ". Most 16-bit rows do without, because float32 has room for the exact sum of equal 16-bit "
    "numbers."
    if costs
    else ""
)
lab.together(
    *(lab.read(text.strip()) for text in (said, cost) if text)
) if said else None

# %%

# Folded: Why the third line is right, which errors remain, and the kernels with all their guards
row = torch.tensor([[2.0**24, 2.0**24 + 2]], device=runtime.DEVICE)
ones, zeros = (
    torch.ones(2, device=runtime.DEVICE),
    torch.zeros(2, device=runtime.DEVICE),
)
found = [norm(row, ones, zeros, eps=0.0, corrected=repair) for repair in (False, True)]
plain, corrected = (y.var(correction=0).item() for y in found)
assert abs(corrected - 1) < 1e-6
half_apart = np.spacing(np.float32(1000)).item() / 2
largest = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0)).abs()
largest = largest.max().item()
bound = half_apart / largest  # what rounding the mean may cost
lab.sketch(
    "Two numbers whose mean is not a float32 number",
    "A line with 16,777,216 and 16,777,218 and their true mean between them. From the true mean "
    "they deviate by −1 and 1, whose squares sum to 2. The rounded mean is 16,777,216 itself. From "
    "it they deviate by 0 and 2, whose squares sum to 4.",
    two_neighbours,
    height=2.4,
)
edges = torch.tensor([[3e38, 3e38], [-2e19, 2e19]], device=runtime.DEVICE)
with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns
    of_small, of_operator = (
        [
            " and ".join("NaN" if one != one else f"{one:.0f}" for one in row)
            .replace("NaN and NaN", "two NaN")
            .replace("-", "−")
            for row in y.tolist()
        ]
        for y in (norm(edges, ones, zeros, corrected=True), layer_norm(edges, 2))
    )
count = torch.tensor(41.0)
quotient = count * (1 / count)
left_over = count.double() - quotient.double() * count


def one_by_one(numbers):
    total = torch.tensor(0.0)
    for number in numbers:
        total = total + number
    return total


thousand = torch.full((1000,), 1000.1)
off_mean = thousand - one_by_one(thousand) / 1000
off_m2, lacks = one_by_one(off_mean**2), one_by_one(off_mean) / 1000
of_the_operator = lab.listing(
    {
        "No sum overflows: in float32, 3e38 + 3e38 is infinite although the mean of the two is "
        f"not. The small kernel turns the row into {of_small[0]}, the operator into "
        f"{of_operator[0]}. The operator first multiplies each number by SMALL, 2 to the power of "
        "−16, which costs no digit, and finally divides the mean by SMALL": mean_of,
        "The mean of equal numbers is that number: 1/41 is rounded, and 41 times the result is "
        f"{quotient:.8f}. The inner fma, which multiplies and adds with a single rounding, finds "
        f"that {left_over:.1e} of the 41 is left over; the outer one adds a 41st of that and "
        f"arrives at {float(quotient + left_over / 41):.1f}": divide,
        "The warps wait only once: since they wait for each other in every reduction, a single one "
        "finds both the sum of the squares and the sum of the deviations": two_sums,
        "Equal numbers have no variance: if 1000.1 is added up a thousand times, one by one, m2 is "
        f"{off_m2:.4f}, and subtracting N times the square of the correction leaves "
        f"−{1000 * lacks * lacks - off_m2:.1e}, a negative sum of squares. Anything below "
        "ROUNDING, a millionth, of m2 therefore counts as 0. An infinite m2 stays so": without,
        "Threads agree: in a row of at most 64 numbers the first addition may combine the squares "
        "of two threads. The compiler would fuse it with the multiplication, so that each thread "
        "would use its own square unrounded and their sums could differ in the last bit": square,
        "All steps in order. Rows of 16-bit numbers skip the correction where the sum of equal "
        "numbers is exact: of the 24 significant bits of float32, a bfloat16 uses 8 and a float16 "
        "11, which leaves room for a sum of 65,536 or 8,192 of them. Beyond 8,192 columns, 16-bit "
        "rows are corrected in the loop, and odd float16 rows also where they stay whole": moments,
        "No square overflows: deviations above 1.8e19 have infinite squares, which makes rstd 0. "
        f"The small kernel turns −2e19 and 2e19 into {of_small[1]}, the operator into "
        f"{of_operator[1]}. The operator reads such a far row again and multiplies the deviations "
        "by TINY, 2 to the power of −84, before it squares them. The kernel for whole rows looks "
        "for far rows only at its end, because looking may make the warps wait": far_rstd,
    }
)
lab.together(
    lab.read(
        "If the wrong mean is m − c, where c is the correction, every deviation is too large by c: "
        "Σ ((x − m) + c)² = Σ (x − m)² + N c², because the cross term, 2c Σ (x − m), is 0. The "
        "third line subtracts the excess, N c². In the figure, the deviations from the rounded "
        "mean, 0 and 2, yield a correction of 1, and "
        + "4 − 2·1² = 2".replace(" ", "\N{NO-BREAK SPACE}")
        + " is the right `m2`. The kernel confirms this: the variance of its output is "
        f"{plain:.1f} without the correction and {corrected:.0f} with it. The outputs are still "
        f"{' and '.join(f'{y:.0f}' for y in found[1][0].tolist())} instead of −1 and 1, because "
        "the corrected mean is itself rounded to float32. Storing the mean as two numbers would "
        "help, but the backward pass takes only one."
    ),
    lab.read(
        "Rounding a mean near 1,000 to float32 can change it by half the distance between two "
        f"neighbouring numbers, which is {bound:.1e} of the largest output, {largest:.0f}. "
        + (
            f"{'Most' if near_1000['with it'] > bound else 'All'} of the error that remains in "
            "random rows of mean 1,000 can come from this."
            if gained.rows and near_1000["with it"] < 1.25 * bound
            else ""
        )
    ),
    lab.listing(
        {
            "The small kernel of the package, with the three lines behind a switch": norm_kernel,
            "Its launch": norm,
        }
    ),
    paid,
    gained,
    equal,
    lab.read(
        "Each of these 200 rows holds a thousand copies of one number between 1,000 and 1,100. "
        "Such rows have variance 0, so layer norm divides by the root of `eps`, 1e-5, which "
        f"magnifies any error in the mean {1e-5**-0.5:.0f} times."
    ),
    of_the_operator,
)

# %%
# Longer rows: packed
# -------------------
#
# Why does the whole row fall short of a copy at 32,768 columns? Its program loads the row, then
# computes, then stores, and while it computes, it loads nothing. A second program on the same
# :term:`SM` could load its row meanwhile, if two rows fit there. The lengths of the steps are only
# sketched:


# Drawing
def take_turns(axes):
    ours, orange = lab.colour("Kernel Book"), lab.colour("PyTorch")
    steps = (
        ("load", "#eaf2fb", ours),
        ("compute", "#ffffff", orange),
        ("store", "#eaf2fb", ours),
    )
    for line, starts in ((0, (0, 6)), (1.75, (0, 6)), (2.6, (2, 8))):
        for start in starts:
            for number, (step, fill, ink) in enumerate(steps):
                at = start + 2 * number
                axes.barh(
                    line, 1.92, 0.66, at, color=fill, edgecolor=ink, linewidth=1.2
                )
                axes.text(at + 0.96, line, step, ha="center", va="center", fontsize=10)
    for line, said in ((-0.62, "one program"), (1.13, "two programs")):
        axes.text(0, line, said, va="center", fontweight="bold")
    axes.set(xlim=(-0.1, 14), ylim=(3.05, -0.95), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "While one program computes, another can load",
    "Two timelines. With one program, an SM loads, computes and stores in turn, and no memory "
    "traffic happens while it computes. With two programs, the second loads its row while the "
    "first computes. The lengths of the steps are not measured.",
    take_turns,
    height=2.5,
)

# %%


# Measuring
def programs_per_sm(compiled):
    """How many programs of a compiled kernel the registers and threads of an SM suffice for."""
    sm, threads = torch.cuda.get_device_properties(0), 32 * compiled.metadata.num_warps
    registers = threads * (-(-compiled.n_regs // 8) * 8)  # a thread gets them in eights
    return min(
        sm.regs_per_multiprocessor // registers,
        sm.max_threads_per_multi_processor // threads,
    )


def held_back():
    rows = []
    for name, columns, changed in (
        ("one read", 32768, {}),
        ("packed", 32768, {"PACKED": tuned.PACKED}),
        ("packed", 32768, {"PACKED": tuned.PACKED | {32768: (16, 128)}}),
        ("packed", 65536, {"PACKED": tuned.PACKED}),
    ):
        x = torch.randn(2**27 // columns, columns, device=runtime.DEVICE)
        x = x.to(torch.bfloat16)
        w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)

        def run(w, b, x=x, y=y, name=name):
            if name == "one read":
                return one_program(x, w, b)()
            return _forward(x, w, b, 1e-5, keep_statistics=False, y=y)

        copy = milliseconds(lambda x=x, y=y: y.copy_(x))
        with mock.patch.multiple(tuned, **{"TILE": tuned.TILE} | changed):
            [(_, compiled)] = lab.compiled_by(partial(run, w, b))
            whole = milliseconds(partial(run, w, b), repeats=50)
            bare = milliseconds(partial(run, None, None), repeats=50)
        rows.append(
            {
                "kernel, columns": f"{name}, {columns:,}",
                "warps": compiled.metadata.num_warps,
                "registers per thread": compiled.n_regs,
                "programs": programs_per_sm(compiled),
                "% of a copy": round(100 * copy / whole),
                "without w, b": round(100 * copy / bare),
            }
        )
    return rows


# %%

# Measuring
lines = lab.measure("Programs per SM and the speed, bfloat16", held_back)


def line_of(kernel, programs=None):
    """The speeds of a kernel in the table, with weight and bias and without."""
    for row in lines.rows:
        if row["kernel, columns"] == kernel and programs in (None, row["programs"]):
            return row["% of a copy"], row["without w, b"]
    return nan, nan


# %%

# Reading
found = {
    (row["kernel, columns"], row["programs"]): row
    | {"of a program": 32 * row["warps"] * row["registers per thread"]}
    for row in lines.rows or []
}
alone = found.get(("one read, 32,768", 1), {})
lab.read(
    "**Two rows of 32,768 numbers, widened to float32, do not fit**: they alone would take all "
    "65,536 registers of the SM."
)

# %%
# The remedy is the one from :doc:`softmax </chapters/softmax>`:
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Two 16-bit numbers fit in one 32-bit register. We keep a long row packed in pairs, cut it into
#    pieces, and widen one piece at a time.
#
# .. image:: /figures/layer-norm-packed.svg
#    :alt: Widened, x0 and x1 take a register of 32 bits each. Packed, both share one register, with
#          16 bits each. A row stays packed in four pieces, and one piece at a time is widened.
#
# We need the pieces because widening the whole row at once would, for that step, take back the
# registers that packing saved. A row whose length is a power of two has four. A piece has ``PAIRS``
# pairs, whose halves ``widen`` turns into float32. Simplified, the kernel begins so:
#
# .. code-block:: python
#
#    pairs_ptr = (x_ptr + first).to(tl.pointer_type(tl.int32))
#    x = ()
#    for piece in tl.static_range(4):  # the only read: PAIRS integers of 32 bits
#        pairs = piece * PAIRS + tl.arange(0, PAIRS)
#        x = x + (tl.load(pairs_ptr + pairs, mask=pairs < n_cols // 2, other=0),)
#
#    total = tl.zeros((2 * PAIRS,), tl.float32)
#    for piece in tl.static_range(4):  # each is widened for this step alone
#        total += widen(x[piece], tl.bfloat16)
#    mean = tl.sum(total, axis=0) / n_cols
#
# The variance and the output each take another loop over the pieces, which widens them anew.

# Reading
two, lone, long, held = (
    line_of("packed, 32,768", 2),
    line_of("packed, 32,768", 1),
    line_of("packed, 65,536"),
    line_of("one read, 32,768"),
)
packed_gain = two[0] - held[0]
two_matter = lone[0] < two[0] - 5
lab.read(
    (
        f"**On {gpu}, packing raises the speed from {held[0]:.0f} to {two[0]:.0f} % of a copy"
        + ", because a second program fits" * two_matter
        + ".**"
        if packed_gain > 0
        else "At 32,768 columns packing does not help."
    )
    + (
        f" For this, the launch limits a thread to {tuned.PACKED[32768][1]} registers "
        f"(`maxnreg={tuned.PACKED[32768][1]}`). If the limit is 128, a thread takes "
        f"{found['packed, 32,768', 1]['registers per thread']}, so only one program of the same "
        f"kernel fits, and it reaches {lone[0]:.0f} %:"
        if ("packed, 32,768", 1) in found
        else ""
    )
)

# %%

# Measuring
lab.table(
    [
        {
            "kernel": what,
            "registers per thread": row["registers per thread"],
            "per program": f"{row['of a program']:,}",
            "programs per SM": row["programs"],
            "% of a copy": row["% of a copy"],
            "without w, b": row["without w, b"],
        }
        for what, row in (
            ("whole", alone),
            ("packed", found["packed, 32,768", 2]),
            ("packed, alone", found["packed, 32,768", 1]),
        )
    ],
    f"Registers, programs and speed at 32,768 columns, bfloat16, on {gpu}",
) if {("packed, 32,768", 1), ("packed, 32,768", 2)} <= found.keys() else lines

# %%

# Reading
without_gain = [  # on other GPUs: the GPU, its share of a copy, and TB/s there and here
    (
        other.provenance["gpu"].split()[1],
        there,
        *(
            sweep.at(provider="one program", columns=32768)["rate"].item() / 1e3
            for sweep in (other, ladder)
        ),
        " (measured with older kernels)" * bool(other.mark),
    )
    for other in ladder.elsewhere
    if not ladder.at(provider="one program", columns=32768).empty
    and not other.at(provider="one program", columns=32768).empty
    for there in [100 * other.share("one program", columns=32768)]
    if 100 * other.share("Kernel Book", columns=32768) - there < 1
]
lab.together(
    lab.read(
        f"Alone on its SM, the packed kernel reaches {lone[0]:.0f} %, so the second "
        "program makes no difference."
    )
    if not two_matter
    else None,
    lab.read(
        "**Most of what is missing is the price of weight and bias**, which every program loads "
        f"for its row alone. Without them, packed rows reach {two[1]:.0f} %."
    )
    if two[1] - two[0] > 0.5 * (100 - two[0])
    else None,
    lab.read(
        " ".join(
            f"**On an {there}, packing gains nothing at 32,768 columns**{older}: one whole row per "
            f"SM already reaches {reached:.0f} % of a copy."
            + (
                f" A copy is slower there, so this is {moved:.1f} TB/s, against {here:.1f} for "
                f"the {share['one program', 32768]:.0f} % above."
                if moved < 0.98 * here and reached > share["one program", 32768]
                else ""
            )
            for there, reached, moved, here, older in without_gain
        )
        + " So time both versions on your GPU."
    )
    if without_gain
    else None,
)

# %%

# Folded: The packed kernel in full, and what weight and bias cost
said = ""
for other in ladder.elsewhere:
    if other.at(provider="one program", columns=32768).empty:
        continue
    there, theirs = (
        100 * other.share(name, columns=32768)
        for name in ("one program", "Kernel Book")
    )
    if theirs - there < 1:
        continue  # the text has it
    said += (
        f"On an {other.provenance['gpu'].split()[1]}, whole rows of 32,768 columns already reach "
        f"{there:.0f} %, and packing adds {theirs - there:.0f} points"
        + (" (measured with an older kernel). " if other.mark else ". ")
    )
lab.together(
    lab.read(
        "**Why the mean needs no correction.** A bfloat16 uses only 8 of the 24 significant bits "
        "of float32. The sum of 65,536 equal ones is therefore exact. Other sums may be rounded, "
        "but two different bfloat16 numbers are at least a 256th of the larger apart, and a sum "
        "with 24 bits loses far less. A float16 has 11 significant bits, so `mean_of_pairs` sums "
        "the leading bits and the others separately. `SMALL`, 2 to the power of −16, keeps the sum "
        "from overflowing."
    ),
    lab.read(
        "**Before each further loop, `afresh` adds `zero` to every piece.** `zero` is always 0, "
        "but the compiler cannot know that. This is meant to keep it from holding the widened "
        "numbers of one loop for the next. We did not time the kernel without `afresh`, or with a "
        "different number of pieces."
    ),
    lab.read(
        "**The last step, too, proceeds piece by piece**, because weight and bias together would "
        "take twice as many registers as the packed row. A barrier, a point that no thread passes "
        "before all have reached it, keeps the compiler from loading all pieces first."
    ),
    lab.read(
        "`x_ptrs` is the `pairs_ptr` of the text. `where_piece` says which columns of a piece are "
        "inside the row: all of them, if `FULL` says that the pieces fit it exactly. "
        "`load_parameter` loads a piece of the weight or bias, and `narrow` turns float32 back "
        "into pairs."
    ),
    lab.source(packed_row_fwd_kernel),
    lab.source(afresh),
    lab.source(widen),
    lab.read(
        "The registers of an SM suffice for two programs of your own kernel if its registers per "
        "thread times its threads are at most half of 65,536."
    ),
    lab.read(
        "A packed row of 65,536 columns needs an SM to itself. "
        + (
            "Weight and bias, loaded again for every row, account for much of its gap to a copy: "
            if long[1] - long[0] >= 0.4 * (100 - long[0])
            else "Weight and bias are loaded again for every row: "
        )
        + f"without them the kernel reaches {long[1]:.0f} % instead of {long[0]:.0f}."
        + (
            f" Whole rows of 32,768 columns are slower without weight and bias: {held[1]:.0f} % "
            f"instead of {held[0]:.0f}. We do not know why."
            if held[1] < held[0] - 2
            else ""
        )
    ),
    lines,
    lab.read(said.strip()) if said else None,
)

# %%
# Longest rows: split
# -------------------
#
# A row of 262,144 columns fits on no SM, so several programs share it, each of which keeps a part.
# All that they need from each other is the *moments* of the parts: the mean :math:`m` and the sum
# of squared deviations :math:`M` (``m2`` in the code). They :term:`exchange` them through *slots*
# in memory, as in :doc:`softmax </chapters/softmax>`. Here, four programs share a row of eight:
#
# .. image:: /figures/layer-norm-parts.svg
#    :alt: A row of eight numbers in four parts: 1 and 3, 2 and 6, 5 and 5, 0 and 2. Each of four
#          programs publishes the mean m and the sum of squared deviations M of its part in a slot.
#          Each reads all four slots, merges them to mean 3 and M 32, and writes its part of y.

# Reading
eight = row_of_eight.reshape(4, 2)
of_parts = eight.mean(1, keepdim=True)
squares = (eight - of_parts).square().sum(1)
around = (eight - eight.mean()).square().sum(1)
distance = (of_parts[0] - eight.mean()).abs().item()
within, in_all = squares.sum(), around.sum()
between = 2 * (of_parts - eight.mean()).square().sum()
assert within + between == in_all
assert squares[0] + 2 * distance**2 == around[0]
lab.read(
    f"Why do the four values of M add up to {within:.0f}, when the row's M is {in_all:.0f}? "
    "**Each part measures its deviations from its own mean, not from the row's.** The first part, "
    f"1 and 3, has an M of {squares[0]:.0f} around its mean, {of_parts[0].item():.0f}. Around the "
    f"row's mean, {eight.mean():.0f}, it would be {around[0]:.0f}. The difference is "
    f"2 · {distance:.0f}²: two numbers, whose mean lies {distance:.0f} from the row's. Over all "
    f"parts, such differences add the missing {between:.0f}."
)

# %%
# In general, part :math:`i` with :math:`n_i` elements contributes :math:`M_i + n_i\, (m_i - m)^2`
# to the row's sum (Chan, Golub and LeVeque, 1982). Simplified, the merge takes two lines. ``means``
# and ``m2s`` come from the slots, and ``counts`` has the number of columns of each part:
#
# .. code-block:: python
#
#    mean = tl.sum(counts * means) / n_cols
#    m2 = tl.sum(m2s + counts * (means - mean) * (means - mean))
#
# If a slot stays empty for too long, the program computes the moments of all parts itself, so the
# result is right even if the programs of a row never run at the same time.

# %%


# Measuring
def at_the_limits():
    rows = []
    for dtype, columns, kernel in (
        (torch.bfloat16, 65536, "packed"),
        (torch.bfloat16, 65536, "split"),
        (torch.float32, 16384, "whole"),
        (torch.float32, 16384, "split"),
    ):
        x = torch.randn(2**27 // columns, columns, device=runtime.DEVICE).to(dtype)
        w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
        if kernel == "whole":
            run = one_program(x, w, b)
        else:
            run = partial(_forward, x, w, b, 1e-5, keep_statistics=False, y=y)
        copy = milliseconds(partial(y.copy_, x), repeats=50)
        packed_cols = tuned.PACKED_COLS if kernel == "packed" else 32768
        with mock.patch.object(tuned, "PACKED_COLS", packed_cols):
            took = milliseconds(run, repeats=50)
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "columns": columns,
                "kernel": kernel,
                "% of a copy": round(100 * copy / took),
            }
        )
    return rows


limits = lab.measure("Two kernels at one length", at_the_limits)

# %%

# Reading
parted = share["Kernel Book", 262144]
rivals = {name: share[name, 262144] for name in ("loop", "PyTorch")}
best = max(rivals, key=rivals.get)
lab.read(
    f"**In bfloat16, at {2**27 // 262144} rows of 262,144 columns, the split kernel reaches "
    f"{parted:.0f} % of the speed of a copy**, "
    + (
        f"against {rivals['loop']:.0f} % for our loop and {rivals['PyTorch']:.0f} % for PyTorch."
        if parted > 1.02 * rivals[best]
        else f"no more than {'our loop' if best == 'loop' else best}, which reaches "
        f"{rivals[best]:.0f} %."
    )
) if parted == parted else None

# %%

# Reading
longest = f"{tuned.MAX_PARTS * tuned.MAX_PART_COLS:,}"
at_limit = {
    (row["dtype"], row["kernel"]): row["% of a copy"] for row in limits.rows or []
}
sooner = {  # at 16,384 columns: the kernel that the operator uses there, and the whole row
    "bfloat16": (share["Kernel Book", 16384], share["one program", 16384]),
    "float32": tuple(
        at_limit.get(("float32", name), nan) for name in ("split", "whole")
    ),
}
lab.read(
    "**The length of a row decides which kernel it gets.** In 16 bits, a row of even length stays "
    f"whole up to {tuned.TILE_COLS:,} columns, is packed up to {tuned.PACKED_COLS:,} and split up "
    f"to {longest}. Only then does the operator loop. In float32 nothing can be packed, and rows "
    f"of more than {tuned.TILE_BYTES // 4:,} columns are split"
    + (
        ": at 16,384 columns this reaches {:.0f} % of a copy, against {:.0f} for a whole row"
    ).format(*sooner["float32"])
    * (sooner["float32"][0] > sooner["float32"][1])
    + "."
)

# %%

# Folded: Why a row gets its kernel, every version at every length, and the split kernel in full
said = (
    "In bfloat16 at 65,536 columns, packed rows reach "
    f"{at_limit['bfloat16', 'packed']} % of a copy and split rows "
    f"{at_limit['bfloat16', 'split']}. "
    if at_limit
    else ""
)
said += (
    f"At 262,144 columns the loop reaches {share['loop', 262144]:.0f} %, less than the half that "
    "its reads allow. We do not know why."
    if share["loop", 262144] < 47
    else ""
)
lab.plot(
    ladder,
    "Every version, forward, bfloat16",
    share=True,
    names={
        "simple_layer_norm": "seven operations",
        "PyTorch": "PyTorch's layer_norm",
        "one program": "whole",
    },
)
choices = lab.table(
    [
        {
            "kernel": kernel,
            "16 bits, even": even,
            "16 bits, odd": odd,
            "float32": wide,
        }
        for kernel, even, odd, wide in (
            (
                "whole",
                f"{tuned.TILE_COLS:,}",
                f"{tuned.TILE_BYTES // 2:,}",
                f"{tuned.TILE_BYTES // 4:,}",
            ),
            ("packed", f"{tuned.PACKED_COLS:,}", "never", "never"),
            ("split", longest, longest, longest),
            ("loop", "any", "any", "any"),
        )
    ],
    "Up to how many columns the operator uses each kernel",
)
means = of_parts.flatten()
apart = means - means[0]
shift = apart.mean()
assert means[0] + shift == eight.mean()
as_read, as_apart = (
    ", ".join(f"{one:.0f}".replace("-", "−") for one in distances.tolist())
    for distances in (apart, apart - shift)
)
lab.together(
    choices,
    lab.read(
        "A row gets the first kernel whose limit it does not exceed. An odd number of columns "
        "cannot be packed in pairs. "
        + (
            "In bfloat16, too, a whole row of 16,384 columns would still fit, but packing is "
            "faster ({:.0f} against {:.0f} %).".format(*sooner["bfloat16"])
            if sooner["bfloat16"][0] > sooner["bfloat16"][1]
            else ""
        )
    ),
    lab.read(
        "Packed rows end where one fills the registers of an SM, and split rows at "
        f"{tuned.MAX_PARTS} parts of {tuned.MAX_PART_COLS:,} columns."
    ),
    limits,
    lab.read(said.strip()) if said else None,
    lab.source(merge_moments),
    lab.read(
        "The parts of a row lie along axis 1, numbered from 0 in `parts`, with `counts` columns in "
        "each. Averaging large means would lose digits, so `merge_moments` averages only how far "
        "they are `apart` from the first, the `pivot`. In the picture the pivot is "
        f"{means[0]:.0f} and `apart` is ({as_read}). The average of these, `shift`, is "
        f"{shift:.0f}, and {means[0]:.0f} + {shift:.0f} is the row's mean."
    ),
    lab.read(
        "The kernel calls `moments_of_part`, which keeps `x` in registers, then `publish`, `wait`, "
        "`collect` and `merge_moments`, and writes its part of the output. "
        "Every slot is zero at first. `publish` stores its 64 bits, mean and M, at once. `wait` "
        "rereads the slots until none is zero, but at most `max_polls` times; if some still are, "
        "`ready` is 0. A program that has waited in vain reads the parts of the others itself, "
        "which is slow but just as correct."
    ),
    lab.read(
        "A program reads `LOOKS` slots of a row at once, one per thread of a warp. If the row has "
        "fewer parts, it reads them several times over, hence `% N_PARTS`, and the merge counts "
        "only the first `N_PARTS`. "
        "`collect` unpacks the two numbers of each slot. Where the row (`there`) or the part does "
        "not exist, it returns zeros, which leave every sum unchanged. In the merge, `counts` is "
        "0 for a part that does not exist. Subtracting `shift` from `apart` gives the distances of "
        f"the means from the row's, here ({as_apart})."
    ),
    lab.read(
        "Loading weight and bias again for every row moves as many bytes as `x` and `y` do. In "
        "most cases, a program therefore takes its part of two rows and loads the same part of "
        "weight and bias once for both. "
        + (
            "In 16 bits beyond 65,536 columns it takes a longer part, of "
            f"{tuned.forward_part(262144, 2).cols:,} columns, of one row."
        )
        * (tuned.forward_part(262144, 2).rows == 1)
    ),
    lab.source(split_fwd_kernel),
)

# %%
# Hidden sizes: rows in pieces
# ----------------------------
#
# The hidden sizes of many models, such as 1,280 or 5,120, are not powers of two. A block must be a
# power of two, so it pads such a row, up to nearly twice its length. The padding loads nothing, but
# takes up threads and registers.
#
# **The operator cuts such a row into pieces whose length is a power of two.** Packed rows have
# pieces to save registers; here they save padding. Only the last piece may need any, less than an
# eighth of the single block:
#
# .. image:: /figures/layer-norm-pieces.svg
#    :alt: A row of 1,280 numbers. In one block of 2,048, 768 numbers are padding. In five pieces of
#          256, none is.
#
# One program still has the whole row. It adds the pieces to each other before it sums over the
# threads, so the mean still takes a single reduction:
#
# .. code-block:: python
#
#    total = tl.zeros((PIECE_COLS,), tl.float32)
#    for piece in tl.static_range(N_PIECES):
#        total += x[piece]
#    mean = tl.sum(total, axis=0) / n_cols
#
# The squared deviations are added up in the same way.


# Measuring
def told(x, w, b, unit, cut=True):
    """The kernel for whole rows, which is told that ``unit`` divides their length."""
    n_rows, n_cols = x.shape
    tensors = x, w, b, torch.empty_like(x), None, None
    pieces, piece = in_pieces(n_cols)
    if cut and pieces > 1:
        kernel, numbers = pieces_fwd_kernel[(n_rows,)], (n_cols, n_cols, 1e-5)
        sizes = pieces, piece, pieces * piece == n_cols
        warps = max(1, piece * x.itemsize // tuned.PIECE_WARP)
    else:
        block = runtime.next_power_of_2(n_cols)
        rows = max(1, tuned.TILE // (block * x.itemsize))
        kernel = row_fwd_kernel[(runtime.cdiv(n_rows, rows),)]
        numbers, sizes = (n_cols, n_rows, n_cols, 1e-5), (rows, block)
        warps = tuned.row_warps(block, x.itemsize)
    return lambda: kernel(*tensors, *numbers, *sizes, unit, num_warps=warps)


def hidden_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    compiled = torch.compile(lambda x, w, b: F.layer_norm(x, (columns,), w, b))
    return {
        "copy": lambda: y.copy_(x),
        "PyTorch": lambda: F.layer_norm(x, (columns,), w, b),
        "torch.compile": lambda: compiled(x, w, b),
        "one block": told(x, w, b, unit_of(columns), cut=False),
        "Kernel Book": lambda: layer_norm(x, columns, w, b),
    }


HIDDEN = [768, 1280, 1600, 2560, 5120, 12288]
hidden = lab.bench(
    "hidden sizes",
    points(torch.bfloat16, HIDDEN),
    hidden_providers,
    limit="copy",
    work=FORWARD,
)

# %%

# Reading
of_hidden = {
    n: {
        name: 100 * hidden.share(name, columns=n)
        for name in ("one block", "Kernel Book", "PyTorch", "torch.compile")
    }
    for n in HIDDEN
    if not hidden.at(columns=n).empty
}
gained = {n: of["Kernel Book"] - of["one block"] for n, of in of_hidden.items()}
packed_too = HIDDEN[-1]  # in pieces: no fair comparison with the block
gained.pop(packed_too, None)
most = max(gained, key=gained.get) if gained else HIDDEN[0]
faster = [
    f"`{name}` at {n:,} columns"
    for n, of in of_hidden.items()
    for name in ("PyTorch", "torch.compile")
    if of[name] > 1.01 * of["Kernel Book"]
]
fallen_at = min(
    of_hidden, key=lambda n: of_hidden[n]["torch.compile"], default=HIDDEN[0]
)
compiled_least = of_hidden[fallen_at]["torch.compile"] if of_hidden else nan
lab.together(
    lab.table(
        [
            {
                "columns": f"{n:,}",
                "pieces": f"{in_pieces(n, 1 + 2 * (n > tuned.TILE_COLS))[0]}",
                "one block": f"{of['one block']:.0f}",
                "in pieces": f"{of['Kernel Book']:.0f}",
                "PyTorch": f"{of['PyTorch']:.0f}",
                "compiled": f"{of['torch.compile']:.0f}",
            }
            for n, of in of_hidden.items()
        ],
        f"Hidden sizes, forward, bfloat16, in % of a copy, on {gpu}",
    ),
    lab.read(
        f"**At {most:,} columns pieces reach {of_hidden[most]['Kernel Book']:.0f} % of a copy, and "
        f"one block {of_hidden[most]['one block']:.0f} %.** At {packed_too:,} the pieces are also "
        "packed, so not all of that gain is theirs. "
        + (
            f"Only {' and '.join(faster)} {'is' if len(faster) == 1 else 'are'} faster than ours."
            if faster
            else "Neither library is faster."
        )
    ),
) if of_hidden else None

# %%

# Folded: The kernel for rows in pieces
lab.together(
    lab.read(
        "The pieces are a tuple of blocks, all in registers. Their number is known when the kernel "
        "is compiled, so `tl.static_range` unrolls the loops over them. `where_piece` says which "
        "columns of a piece lie inside the row. Only the last piece may extend past its end, so "
        "only its loads and stores are masked."
    ),
    lab.read(
        f"A row stays in one block if its pieces would be shorter than {tuned.PIECE_COLS} columns. "
        f"Even rows of more than {tuned.TILE_COLS:,} columns in 16 bits are packed in pieces."
    ),
    lab.read(
        f"In the table, one block of {packed_too:,} columns has only "
        f"{tuned.row_warps(16384, 2)} warps. With {16384 // 2048}, a full block of 16,384 columns "
        f"reached {share['one program', 16384]:.0f} % in an earlier figure, so the number of warps "
        "may explain a part of that gain."
    ),
    lab.read(
        f"`torch.compile` falls to {compiled_least:.0f} % at {fallen_at:,} columns, although it "
        "compiles anew for each length. We do not know why."
    )
    if compiled_least < 50
    else None,
    lab.source(pieces_fwd_kernel),
)

# %%
# Is it right?
# ------------
#
# We compare whole rows, rows in pieces, packed and split rows with a float64 reference. The rows
# are random, in three dtypes, with a mean of 0 and, at some lengths, of 1,000. In 16 bits we allow
# twice PyTorch's error, and in float32 four times.


# Measuring
def cases(n_rows, n_cols, dtype, mean=0):
    x, w, b = (
        (torch.randn(size, device=runtime.DEVICE) + shift).to(dtype)
        for size, shift in (((n_rows, n_cols), mean), (n_cols, 0), (n_cols, 0))
    )
    ours, theirs = (f(x, (n_cols,), w, b) for f in (layer_norm, F.layer_norm))
    truth = reference.layer_norm(x, 1, w, b)
    factor = 4 if dtype == torch.float32 else 2
    what = f"({n_rows}, {n_cols})" + (f", mean {mean:,}" if mean else "")
    yield lab.Case(what, "forward", ours, theirs, truth, factor)


# %%

# Measuring
shapes = [(1, 127), (9, 129), (33, 1000), (4, 4096)]
if runtime.INTERPRETED:  # a row in parts, the smallest there is
    shapes += [(7, 1100), (3, 8200)]
    far = [(33, 1000), (16, 8200)]
else:
    shapes += [(33, 1280), (40, 1100), (20, 3072), (60, 12288)]  # in pieces
    shapes += [(513, 8192), (300, 16384), (300, 32768), (100, 70001), (20, 262144)]
    far = [(33, 1000), (33, 1280), (300, 32768), (20, 262144)]
checks = lab.check(
    "layer_norm",
    [
        case
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shape in [*shapes, *((*shape, 1000) for shape in far)]
        for case in cases(*shape[:2], dtype, *shape[2:])
    ],
)

# %%


# Measuring
def equal_at_every_length():
    rows = []
    for kernel, n_rows, n_cols, dtypes in (
        ("whole", 200, 1000, (torch.float32, torch.float16, torch.bfloat16)),
        ("pieces", 200, 5000, (torch.float32, torch.float16, torch.bfloat16)),
        ("packed", 200, 33000, (torch.float16, torch.bfloat16)),
        ("split", 200, 33000, (torch.float32,)),
        ("split", 20, 200_000, (torch.float32, torch.float16, torch.bfloat16)),
    ):
        for dtype in dtypes:
            x = torch.linspace(1000, 1100, n_rows, device=runtime.DEVICE).to(dtype)
            x = x[:, None].expand(n_rows, n_cols).contiguous()
            w, b = torch.ones_like(x[0]), torch.zeros_like(x[0])
            ours, theirs = (
                f(x, (n_cols,), w, b).abs().max().item()
                for f in (layer_norm, F.layer_norm)
            )
            rows.append(
                {
                    "kernel": kernel,
                    "columns": n_cols,
                    "dtype": str(dtype).removeprefix("torch."),
                    "largest output": ours,
                    "PyTorch's": theirs,
                }
            )
    return rows


left = lab.measure(
    "Rows of equal numbers, at lengths that are no powers of two", equal_at_every_length
)

# %%

# Reading
passed = (
    str(checks).split("\n")[0].removeprefix("layer_norm: ").split(";")[0].rstrip(".")
)
times = {True: [], False: []}  # PyTorch's error: in float32, and in 16 bits
for row in (results.find("layer_norm") or {"checks": {}})["checks"].get(
    "layer_norm", []
):
    times[row["dtype"] == "float32"].append(row["error"] / row["torch_error"])
ours, theirs = (
    [row[name] for row in left.rows or [{name: nan}]]
    for name in ("largest output", "PyTorch's")
)
if all(times.values()):
    passed = passed.split(", the worst")[0] + (
        f". In none of them was our error more than {max(times[True]):.1f} times PyTorch's in "
        "float32"
        + (
            f", or {max(times[False]):.1f} times in 16 bits"
            if max(times[False]) > 1
            else ", and in 16 bits it was never larger"
        )
    )
said = f"{passed[0].upper()}{passed[1:]}. "
if left.rows:
    mine, pytorch = (
        "all" if max(of) == 0 else "none" if min(of) > 0 else f"{of.count(0)}"
        for of in (ours, theirs)
    )
    mine += " of" * (mine != "all")
    said += (
        f"**Rows of equal numbers become zeros in {mine} {len(ours)} tests of these kernels, and "
        f"with PyTorch in {pytorch}.** Test such rows too, because their right output is known: "
        "the bias, here 0."
    )
lab.read(said)

# %%

# Folded: All checks, how an error is judged, and the dtype of the output
lab.together(
    lab.read(
        "**What we allow.** Two rounded results may differ by twice the error of one. In float32 "
        "the GPU's reciprocal square root may also be off by two units in the last place (ulp). "
        "One ulp is always allowed, since rounding the result can cost half of that by itself; in "
        "float32 we allow two."
    ),
    lab.read(
        "**How we judge.** We judge the output in parts of at most 64 rows and 1,024 columns. The "
        "error of a part is its largest difference from the truth, divided by its largest true "
        "number. Weight and bias have the dtype of `x`. We test rows of mean 1,000 at least 16 at "
        "a time, so that a few luckily rounded means do not make PyTorch's own error small. The "
        "loop is not among these checks; the package's tests run it, on shorter rows."
    ),
    checks,
    lab.read(
        "We test rows of equal numbers at lengths that are not powers of two, because dividing by "
        "a power of two is exact."
    ),
    left,
    lab.read(
        "The output has the dtype of `x`. Under autocast, though, PyTorch's layer norm returns "
        "float32, and so does ours unless it is called with `out_dtype=torch.bfloat16`, which "
        "avoids writing and reading float32 when a bfloat16 matmul follows. The chapter on the "
        "transformer measures what a training step gains from this."
    ),
)

# %%
# .. raw:: html
#
#    <span id="figure-6"></span><span id="figure-7"></span><span id="figure-8"></span>
#
# How fast is it?
# ---------------
#
# We compare the operator, timed anew, with PyTorch, ``torch.compile``, `Liger
# <https://github.com/linkedin/Liger-Kernel>`_ (in Triton) and `quack
# <https://github.com/Dao-AILab/quack>`_ (in NVIDIA's CuTe DSL). In the figure, 16Ki stands for
# 16,384 columns, and pale bands show how far the timings scatter:


# Measuring
def liger(x, w, b):
    return lab.peer(
        "liger_kernel.ops.layer_norm",
        lambda ops: lambda: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
    )


def quack(x, w, b):
    w, b = w.float(), b.float()  # it takes parameters in float32 only
    return lab.peer(
        "quack.rmsnorm", lambda ops: lambda: ops.layernorm_fwd(x, w, b, 1e-5)
    )


def providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    compiled = torch.compile(lambda x, w, b: F.layer_norm(x, (columns,), w, b))
    return {
        "copy": lambda: y.copy_(x),
        "PyTorch": lambda: F.layer_norm(x, (columns,), w, b),
        "torch.compile": lambda: compiled(x, w, b),
        "Liger": liger(x, w, b),
        "quack": quack(x, w, b),
        "Kernel Book": lambda: layer_norm(x, columns, w, b),
    }


# %%

DTYPES = (torch.bfloat16, torch.float32)
forward = lab.bench(
    "forward",
    [point for dtype in DTYPES for point in points(dtype, COLUMNS)],
    providers,
    limit="copy",
    work=FORWARD,
)
lab.plot(forward, "Forward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Reading
in_dtypes = [{"dtype": "bfloat16"}, {"dtype": "float32"}]
losses = forward.losses(*in_dtypes)


def fallen(sweep):
    """The libraries that fall far behind themselves: to how much of a copy, and where."""
    found = {}
    for library in ("torch.compile", "Liger", "quack"):
        shares = {
            n: 100 * sweep.share(library, dtype="bfloat16", columns=n)
            for n in COLUMNS
            if not sweep.at(provider=library, dtype="bfloat16", columns=n).empty
        }
        at = min(shares, key=shares.get, default=None)
        if at and shares[at] < 0.5 * statistics.median(shares.values()):
            found[library] = f"{library} to {shares[at]:.0f} % at {at:,} columns"
    return " and ".join(found.values())


unexplained = fallen(forward)


def in_short(dtype):
    """The slowest length in a dtype, and the operator's share of a copy there and elsewhere."""
    ours = {
        n: 100 * forward.share("Kernel Book", dtype=dtype, columns=n) for n in COLUMNS
    }
    slowest = min(ours, key=ours.get)
    others = min(share for n, share in ours.items() if n != slowest)
    return slowest, ours[slowest], others // 5 * 5  # below what timings differ by


def beaten():
    """In how many cases a library is ahead of the operator by more than 1 %, and by how much."""
    if not losses:
        return "No library is more than 1 % faster."
    leads = []
    for row in losses:
        where = {"dtype": row["dtype"], "columns": row["columns"]}
        ours = forward.share("Kernel Book", **where)
        leads.append(100 * (forward.best_peer(**where)[1] / ours - 1))
    cases = len(in_dtypes) * len(COLUMNS)
    names = " or ".join(sorted({row["library"] for row in losses}))
    return (
        f"**A library is more than 1 % faster in {'only ' * (3 * len(losses) < cases)}"
        f"{len(losses)} of {cases} cases** ({len(COLUMNS)} lengths in {len(in_dtypes)} dtypes)"
        + (
            f". The fastest there is {names}, by at most {max(leads):.0f} %."
            if len(losses) > 1
            else f": {names} at {losses[0]['columns']:,} columns in {losses[0]['dtype']}, by "
            f"{max(leads):.0f} %."
        )
        + (
            f" Among the hidden sizes above, {' and '.join(faster)} "
            f"{'is' if len(faster) == 1 else 'are'} ahead too."
            if faster
            else ""
        )
    )


slowest, least, others = in_short("bfloat16")
name, peer = forward.best_peer(dtype="bfloat16", columns=slowest)
in_float32 = in_short("float32")[1] // 1
lowest = [  # of each library, at the lengths at which the operator is fast
    min(reached)
    for library in ("PyTorch", "torch.compile", "Liger", "quack")
    for reached in [
        [
            100 * forward.share(library, dtype="bfloat16", columns=n)
            for n in COLUMNS
            if n != slowest
            and not forward.at(provider=library, dtype="bfloat16", columns=n).empty
        ]
    ]
    if reached
]
below = 10 * (max(lowest, default=100) // 10 + 1)
said = (
    f"**In the figure the operator stays above {others:.0f} % of the speed of a copy "
    + (
        f"up to {COLUMNS[-2]:,} columns"
        if slowest == COLUMNS[-1]
        else f"except at {slowest:,} columns"
    )
    + f", while every library falls below {below:.0f} % at some of these lengths"
    * (below < others)
    + f".** At {slowest:,} columns"
    + ", where only one program fits an SM," * (slowest == tuned.PACKED_COLS)
    + f" it reaches {least:.0f} %, "
    + (
        "still more than any library."
        if least > 100 * peer
        else f"against {100 * peer:.0f} for the fastest library, {name}."
    )
)
lab.together(
    lab.read(said),
    lab.read(beaten()),
    lab.read(f"We cannot explain why some libraries fall so far: {unexplained}.")
    if unexplained
    else None,
)

# %%


# Measuring
def microseconds(run, repeats=200):
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


# %%


# Measuring
def recorded_graph(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# %%


# Measuring
def launch_experiment():
    rows = []
    for n_rows in (16, 1024, 32768):
        x = torch.randn(n_rows, 1024, device=runtime.DEVICE)
        w, b = torch.randn(2, 1024, device=runtime.DEVICE)
        row = {"rows": n_rows}
        for name, operator in (("PyTorch", F.layer_norm), ("Kernel Book", layer_norm)):
            run = partial(operator, x, (1024,), w, b)
            row[f"{name}, µs"] = round(microseconds(run), 1)
            row[f"{name} in a graph, µs"] = round(microseconds(recorded_graph(run)), 1)
        rows.append(row)
    return rows


# %%

# Measuring
small = lab.measure("Forward of 1,024 columns, float32", launch_experiment)
x = torch.randn(64, 1024, device=runtime.DEVICE)
on_the_host = lab.host_times(
    {
        "Kernel Book": lambda x, w, b: layer_norm(x, 1024, w, b),
        "PyTorch": lambda x, w, b: F.layer_norm(x, (1024,), w, b),
    },
    x,
    *torch.randn(2, 1024, device=runtime.DEVICE),
)

# %%

# Reading
called, alone, theirs, theirs_alone = (
    [row[name] for row in small.rows or [{name: nan}] * 3]
    for name in (
        "Kernel Book, µs",
        "Kernel Book in a graph, µs",
        "PyTorch, µs",
        "PyTorch in a graph, µs",
    )
)
slow_call = called[0] > theirs[0]
fewest = small.rows[0]["rows"] if small.rows else 16
lab.read(
    (
        "Two kinds of call are slower than the figure suggests. **The first is a call with few "
        "rows**, because the figure times the GPU alone. With the host included, ours takes "
        f"{called[0]:.0f} µs for {fewest} rows of 1,024 columns, and PyTorch's {theirs[0]:.0f}. "
        if slow_call
        else "The figures time the GPU alone. With the host included, ours takes "
        f"{called[0]:.0f} µs for {fewest} rows of 1,024 columns, and PyTorch's {theirs[0]:.0f}. "
    )
    + (
        "The host prepares our call in Python, PyTorch's in C++. In a CUDA graph, which replays "
        f"prepared launches, ours takes {alone[0]:.1f} µs and PyTorch's {theirs_alone[0]:.1f}, so "
        "record such calls in a graph."
        if slow_call and alone[0] <= 1.02 * theirs_alone[0]
        else "In a CUDA graph, which replays prepared launches, the two take "
        f"{alone[0]:.1f} and {theirs_alone[0]:.1f} µs."
    )
)


# %%


# Measuring
def launch(columns, dtype):
    x = torch.randn(
        512, columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True
    )
    w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    layer_norm(x, columns, w, w)


# %%


# Measuring
compiled = lab.facts(
    "What the compiler made of the kernels",
    {
        f"{columns:,} columns, {str(dtype).removeprefix('torch.')}": (
            lambda columns=columns, dtype=dtype: launch(columns, dtype)
        )
        for columns in (1024, 16384, 65536)
        for dtype in DTYPES
    },
)

# %%
# .. raw:: html
#
#    <span id="rows-that-16-does-not-divide"></span>


# Measuring
def uneven_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    compiled = torch.compile(lambda x, w, b: F.layer_norm(x, (columns,), w, b))
    return {
        "copy": lambda: y.copy_(x),
        "PyTorch": lambda: F.layer_norm(x, (columns,), w, b),
        "torch.compile": lambda: compiled(x, w, b),
        "told nothing": told(x, w, b, 1),
        "Kernel Book": lambda: layer_norm(x, columns, w, b),
    }


# %%

UNEVEN = [1000, 8188, 4100, 4098, 4101]
uneven = lab.bench(
    "uneven",
    points(torch.bfloat16, UNEVEN),
    uneven_providers,
    limit="copy",
    work=FORWARD,
)
shares = {
    n: {
        name: 100 * uneven.share(name, columns=n)
        for name in ("PyTorch", "torch.compile", "told nothing", "Kernel Book")
    }
    for n in UNEVEN
    if not uneven.at(columns=n).empty
}
even = {
    name: 100 * forward.share(name, dtype="bfloat16", columns=4096)
    for name in ("PyTorch", "torch.compile", "Kernel Book")
}
ours = {n: of["Kernel Book"] for n, of in shares.items()}
ahead_at = {  # by how many points, where it is more than 1 %
    name: {
        f"{n:,}": round(of[name]) - round(ours[n])
        for n, of in shares.items()
        if of[name] > 1.01 * ours[n]
    }
    for name in ("PyTorch", "torch.compile")
}
padded = in_pieces(4096)[0] == 1 < min(in_pieces(n)[0] for n in (4100, 4098, 4101))

# %%

# Reading
lab.together(
    lab.read(
        (
            "**The second is a call whose length is no multiple of 8.** "
            if slow_call
            else "**Rows whose length is no multiple of 8 are slower.** "
        )
        + "A thread can load eight bfloat16 numbers at once, but only if every row begins at a "
        "multiple of 16 bytes. The smaller the power of two that divides the length, the fewer "
        "numbers a load can take:"
    ),
    lab.table(
        [
            {
                "columns": f"{n:,}",
                "numbers per load": gcd(n, 8),
                "ours, % of a copy": f"{reached:.0f}",
            }
            for n, reached in (
                (4096, even["Kernel Book"]),
                *((n, ours[n]) for n in (4100, 4098, 4101)),
            )
        ],
        f"Forward, bfloat16, on {gpu}",
    ),
    lab.read(
        "The last three lengths also need padding, which 4,096 does not. " * padded
        + "So choose a multiple of 8 if you can."
        + "".join(
            f" At 4,101 columns, `{name}` is {leads['4,101']} points ahead of ours."
            for name, leads in ahead_at.items()
            if "4,101" in leads
        )
    ),
) if ours else None

# %%

# Folded: Where libraries lead, and what happens in float32, in short calls and at uneven lengths
timed_again = {  # our kernels in bfloat16, in both sweeps
    n: [
        100 * forward.share("Kernel Book", dtype="bfloat16", columns=n),
        share["Kernel Book", n],
    ]
    for n in LADDER
    if n in COLUMNS
}
timed_again[32768].append(two[0])  # and in the table of the programs per SM
timed_again[65536].append(long[0])
scatter = max(max(shares) - min(shares) for shares in timed_again.values())
apart = max(
    abs(
        row["with it, % of a copy"]
        - 100 * forward.share("Kernel Book", dtype="float32", columns=row["columns"])
    )
    for row in paid.rows or [{"columns": 1024, "with it, % of a copy": nan}]
)
for row in losses:  # every library that is ahead there, not the fastest alone
    where = {"dtype": row["dtype"], "columns": row["columns"]}
    others = forward.at(**where)
    others = others[~others["provider"].isin(["copy", "Kernel Book"])]
    others = others[others["share"] > 1.01 * forward.share("Kernel Book", **where)]
    row["ahead"] = ", ".join(
        f"{one.provider} {100 * one.share:.0f}"
        for one in others.sort_values("share", ascending=False).itertuples()
    )
ahead = [
    {key: row[key] for key in ("dtype", "columns", "ahead", "our %")} for row in losses
]
gain = {
    n: round(of["Kernel Book"]) / round(of["told nothing"]) for n, of in shares.items()
}
more = [gain[n] for n in shares if unit_of(n) > 1]
untold = [shares[n]["told nothing"] for n in (4098, 4100, 4101) if n in shares] or [nan]
aligned = [  # where a library is ahead although 8 divides the length
    f"At {n:,} columns, which 8 divides, `{name}` is {leads[f'{n:,}']} points ahead. "
    for name, leads in ahead_at.items()
    for n in UNEVEN
    if n % 8 == 0 and leads.get(f"{n:,}", 0) > 0
]
rows = [
    {
        "columns": f"{n:,}",
        "UNIT": unit_of(n),
        "ours without UNIT": f"{of['told nothing']:.0f}",
        "ours": f"{of['Kernel Book']:.0f}",
        "PyTorch": f"{of['PyTorch']:.0f}",
        "torch.compile": f"{of['torch.compile']:.0f}",
    }
    for n, of in shares.items()
]
lab.plot(forward, "Forward, float32", share=True, where={"dtype": "float32"})
about_uneven = (
    (
        lab.read(
            "A thread loads several numbers at once only if the compiler can prove that they "
            "are aligned, and Triton tells it only whether 16 divides a length. The operator "
            "therefore passes `UNIT`, the greatest power of two that divides the length and "
            "the stride of the rows. The chapter on the first kernel shows how to use it."
        ),
        lab.table(rows, f"Forward, bfloat16, in % of a copy, on {gpu}"),
        lab.read(
            f"At even lengths, `UNIT` makes the kernel {min(more):.1f} to {max(more):.1f} times as "
            "fast. At odd lengths it does not help. "
            + (
                "Without it, the three lengths near 4,100 reach the same speed, so what tells them "
                "apart is how many numbers a thread loads at once. "
                if max(untold) - min(untold) < 1.5
                else ""
            )
            + "".join(aligned)
            + "We do not know why. " * bool(aligned)
        ),
        lab.read(
            "Packing needs aligned pairs, also from row to row: an odd stride rules it out as an "
            "odd number of columns does."
        ),
    )
    if ours
    else ()
)
lab.together(
    lab.table(
        ahead, f"Where libraries are ahead by more than 1 %, in % of a copy, on {gpu}"
    )
    if ahead
    else None,
    lab.read(
        f"**In float32 the operator stays above {in_float32:.0f} % of the speed of a copy.** A "
        "value above 100 % means faster than PyTorch's copy, our yardstick. The small kernel with "
        f"the correction stays within {apart:.1f} points of the operator up to 8,192 columns."
    ),
    lab.read(
        "**How we compare.** Each call gets as many rows as make 134 million numbers, but at most "
        "32,768. `torch.compile` receives the call of PyTorch's layer norm and compiles it anew "
        "for each shape, in its default mode. Liger and quack choose their own settings. quack "
        "accepts weight and bias in float32 only; the others get them in the dtype of `x`. Two "
        "timings of our kernels in bfloat16, taken from this chapter's figures and tables, differ "
        f"by up to {scatter:.1f} points."
        + "".join(
            f" On an {other.provenance['gpu'].split()[1]} libraries fall as well: {there}."
            for other in forward.elsewhere
            if (there := fallen(other))
        )
    ),
    small,
    on_the_host,
    *about_uneven,
    compiled,
)

# %%
# What breaks it
# --------------
#
# Two silent mistakes appeared above: computing the variance from squares and, in float32, leaving
# the mean uncorrected. The third is omitting ``tl.where``. Each zero of the padding, which here
# fills up a block of 1,024, then adds the square of the mean:
#
# .. code-block:: python
#
#    deviation = x - mean  # wrong: -mean, squared, in the padding
#    deviation = tl.where(cols < n_cols, x - mean, 0.0)  # right


# Measuring
@triton.jit
def padded_variance_kernel(x_ptr, v_ptr, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    deviation = x - tl.sum(x, axis=0) / n_cols
    tl.store(v_ptr, tl.sum(deviation * deviation, axis=0) / n_cols)


@triton.jit
def variance_kernel(x_ptr, v_ptr, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    deviation = tl.where(cols < n_cols, x - tl.sum(x, axis=0) / n_cols, 0.0)
    tl.store(v_ptr, tl.sum(deviation * deviation, axis=0) / n_cols)


# %%

# Measuring
v = torch.empty(1, device=runtime.DEVICE)
rows = []
for mean, n_cols in ((3, 1024), (3, 1000), (3, 520), (0, 1000)):
    x = torch.randn(n_cols, device=runtime.DEVICE) + mean
    row = {
        "columns": f"{n_cols:,}",
        "zeros of padding": 1024 - n_cols,
        "mean": mean,
        "true variance": f"{x.double().var(correction=0):.3f}",
    }
    variance_kernel[(1,)](x, v, n_cols, 1024)
    assert row["true variance"] == f"{v.item():.3f}"
    padded_variance_kernel[(1,)](x, v, n_cols, 1024)
    rows.append(row | {"without tl.where": f"{v.item():.3f}"})
    if n_cols == 520:
        half_padded = x.cpu()
lab.table(rows, "The variance without tl.where, next to the true one")

# %%


# Drawing
def with_padding(axes):
    ours, orange = lab.colour("Kernel Book"), lab.colour("PyTorch")
    mean = half_padded.mean().item()
    axes.plot(
        range(0, 520, 8), half_padded[::8] - mean, "o", color=ours, markersize=3.5
    )
    padding = range(520, 1024, 8)
    axes.plot(padding, [-mean] * len(padding), "o", color=orange, markersize=3.5)
    axes.axhline(0, color=lab.colour("copy"), linewidth=1)
    axes.text(260, 3.1, "520 numbers", ha="center", color=ours)
    axes.text(772, -mean + 0.35, "504 zeros of padding", ha="center", color=orange)
    axes.set(xlim=(-15, 1039), ylim=(-4, 4), xticks=[0, 520, 1024], xlabel="column")
    axes.set_ylabel("x − mean")
    axes.grid(axis="x", visible=False)


lab.sketch(
    "Every eighth deviation, without tl.where",
    "A scatter plot of deviations from the mean in a row of 520, by column. Up to column 520 they "
    "scatter around 0. From there to column 1,024, all of them lie on a line at minus the mean, "
    "near −3.",
    with_padding,
    height=2.9,
)

# %%

# Reading
x = torch.randn(33, 1000, dtype=torch.float64)
mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
y, wrong = (
    (x - mean) * (variance + padding * mean**2 + 1e-5).rsqrt() for padding in (0, 0.024)
)
missed, by_default = (  # at a tolerance of 0.001, and at assert_close's in float32
    ((wrong - y).abs() > most + share_of * y.abs()).double().mean().item()
    for most, share_of in ((1e-3, 1e-3), (1e-5, 1.3e-6))
)
lab.read(
    "**Rows without padding hide the third mistake**, and rows from `torch.randn` nearly do, "
    "because their means are close to 0. With a tolerance of 0.001, a test of 33 such rows finds "
    + ("nothing" if missed == 0 else f"{100 * missed:.1f} % of the elements wrong")
    + (
        ". Only a stricter one, such as the default of `assert_close`, notices"
        if missed == 0 < by_default
        else ""
    )
    + ". Test with padding and a mean that is not 0."
)

# %%
# What we do not know
# -------------------
#
# - Why a packed row alone on its SM is slower than a whole row, but without weight and bias faster.
# - Whether one whole row per SM suffices on an H100 because its memory is slower.
# - Why split rows in bfloat16 stay far below a copy.
#
# In short
# --------
#
# A kernel that holds a row on the chip passes over it three times for the price of one read. The
# variance stays accurate because we compute the mean first and, in float32, correct it. Longer
# rows stay on the chip packed in pairs or shared by several programs. Rows whose length is not a
# power of two are cut into pieces, which need less padding.
#
# In training, the operator also stores the mean and ``rstd`` of each row, so that the backward pass
# need not compute them again. That pass has a new problem, because the gradient of the weight sums
# over all rows. It is the subject of :doc:`/chapters/layer_norm_backward`.
#
# Exercises
# ---------
#
# **1. RMS norm.** This variant leaves out the mean: :math:`y_j = x_j\, w_j / \sqrt{\tfrac{1}{N}
# \sum x_k^2 + \epsilon}`. Write its kernel. Does it need ``tl.where``?

# %%

# Solution: RMS norm


@triton.jit
def rms_fwd_kernel(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n_cols)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)  # no tl.where: 0 * 0 is 0
    tl.store(y_ptr + row * n_cols + cols, x * rstd * w, mask=cols < n_cols)


x = torch.randn(6, 300, device=runtime.DEVICE)
w = torch.randn(300, device=runtime.DEVICE)
y = torch.empty_like(x)
rms_fwd_kernel[(6,)](x, w, y, 300, 1e-5, 512)
theirs = F.rms_norm(x, (300,), w, 1e-5)
truth = F.rms_norm(x.double(), (300,), w.double(), 1e-5)
lab.check("RMS norm", [lab.Case("(6, 300)", "forward", y, theirs, truth, factor=4)])

# %%
# **2. A fused residual.** Networks add the input of a block to its output and normalise the sum.
# Write one kernel that stores both the sum, which is needed again, and its layer norm. How many
# bytes does it save?

# %%

# Solution: a fused residual
#
# As two kernels, the addition reads 2 and writes 1, and layer norm reads 1 and writes 1: 5 in all.
# The fused kernel reads 2 and writes 2: 4 in all. This saves a fifth of the bytes and one launch.


@triton.jit
def add_norm_kernel(
    x_ptr, residual_ptr, sum_ptr, y_ptr, n_cols, eps, BLOCK_COLS: tl.constexpr
):
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    offsets = tl.program_id(0).to(tl.int64) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    x += tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    tl.store(sum_ptr + offsets, x, mask=inside)
    deviation = tl.where(inside, x - tl.sum(x, axis=0) / n_cols, 0.0)
    rstd = tl.rsqrt(tl.sum(deviation * deviation, axis=0) / n_cols + eps)
    tl.store(y_ptr + offsets, deviation * rstd, mask=inside)


x, residual = torch.randn(2, 6, 300, device=runtime.DEVICE)
total, y = torch.empty_like(x), torch.empty_like(x)
add_norm_kernel[(6,)](x, residual, total, y, 300, 1e-5, 512)
assert torch.equal(total, x + residual)
theirs, truth = F.layer_norm(total, (300,)), reference.layer_norm(total, 1)
lab.check(
    "A fused residual", [lab.Case("(6, 300)", "forward", y, theirs, truth, factor=4)]
)

# %%
# **3. One reduction.** The formula of Chan, Golub and LeVeque merges two triples of count, mean and
# sum of squared deviations. Compute the mean and the variance of a row with *one* ``tl.reduce``, in
# which an element enters as :math:`(1, x_j, 0)` and padding as :math:`(0, 0, 0)`.

# %%

# Solution: one reduction
#
# Since each merge rounds, we allow 16 times PyTorch's error.


@triton.jit
def _merge(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n = n_a + n_b
    share = n_b / tl.maximum(n, 1.0)  # two empty places have no share
    delta = mean_b - mean_a
    return n, mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share


@triton.jit
def welford_kernel(x_ptr, out_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    count = tl.where(cols < n_cols, 1.0, 0.0)
    _, mean, m2 = tl.reduce((count, x, tl.zeros_like(x)), 0, _merge)
    tl.store(out_ptr, mean)
    tl.store(out_ptr + 1, m2 / n_cols)


x = torch.randn(100, device=runtime.DEVICE) + 1
out = torch.empty(2, device=runtime.DEVICE)
welford_kernel[(1,)](x, out, 100, 128)
theirs, truth = (torch.stack((x.mean(), x.var(correction=0))) for x in (x, x.double()))
lab.check("One reduction", [lab.Case("100", "forward", out, theirs, truth, factor=16)])

# %%
# References
# ----------
#
# - Ba, Kiros, Hinton. *Layer normalization.* arXiv:1607.06450, 2016.
# - Chan, Golub, LeVeque. *Updating formulae and a pairwise algorithm for computing sample
#   variances.* COMPSTAT, 1982.
# - PyTorch. `layer_norm_kernel.cu
#   <https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/layer_norm_kernel.cu>`_.
# - Welford. *Note on a method for calculating corrected sums of squares and products.*
#   Technometrics 4, 1962.
# - Zhang, Sennrich. *Root mean square layer normalization.* NeurIPS 2019.

# Closing
reached = [forward.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS]
lab.finish(
    f"at least {100 * min(reached) - 0.5:.0f} % of the speed of a copy, up to {COLUMNS[-1]:,} "
    "columns"
)
