"""
Layer norm backward, without a lock
===================================

In the backward pass of layer norm, every row of a batch adds to the gradient of the same weight.
Done carelessly, these additions get lost or cost most of the kernel's speed. *How can hundreds of
programs add to one array without a race, and without waiting for each other?*

You will learn

- how the gradient of layer norm reduces to two means per row, ``c1`` and ``c2``;
- why a program should sum many rows before it hands over anything;
- what an atomic add, a lock and partial sums cost, and which gives the same bits in every run;
- which memory accesses a lock has to order.
"""

# sphinx_gallery_thumbnail_number = 3
import statistics
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.ops.launch import forget
from kernelbook.ops.layer_norm import layer_norm, tuned
from kernelbook.ops.layer_norm.backward import (
    _backward,
    _packed_row_backward,
    _row_backward,
    _split_backward,
    _sums,
    means_of,
    pieces_bwd_kernel,
    row_bwd_kernel,
    split_bwd_kernel,
)
from kernelbook.ops.layer_norm.forward import _forward
from kernelbook.ops.layer_norm.operator import gradient
from kernelbook.ops.layer_norm.sums import _add_buffers, hand_over, sum_of_buffers
from kernelbook.ops.rows.pieces import in_pieces
from kernelbook.small.layer_norm_backward import (
    lock_kernel,
    partial_kernel,
    sum_my_rows,
    with_lock,
)

lab.start("layer_norm_backward", "kernelbook.ops.layer_norm")

# %%
# The problem in PyTorch
# ----------------------
#
# Layer norm computes :math:`y_j = \hat{x}_j w_j + b_j`, where :math:`\hat{x}` is the row shifted to
# mean 0 and scaled to variance 1. Its backward pass receives ``dy``, the gradient of the loss with
# respect to ``y``, and computes the gradients of ``x``, the weight and the bias. The forward pass
# has already stored two numbers per row, ``mean`` and ``rstd``, the reciprocal of the standard
# deviation, so the backward pass need not compute them again.


def simple_backward(x, w, mean, rstd, dy):
    xhat = (x - mean) * rstd  # reads 2N, writes 2N
    wdy = w * dy  # reads 1N, writes 1N
    c1 = (xhat * wdy).mean(-1, keepdim=True)  # reads 3N, writes 1N
    c2 = wdy.mean(-1, keepdim=True)  # reads 1N
    dx = (wdy - (xhat * c1 + c2)) * rstd  # reads 5N, writes 4N
    return dx, (dy * xhat).sum(0), dy.sum(0)  # reads 4N, writes 1N


# %%
# PyTorch runs each operation as a separate :term:`kernel`. For each row of :math:`N` elements,
# these kernels read :math:`16 N` numbers and write :math:`9 N`. A single kernel that reads ``x``
# and ``dy`` once and writes ``dx`` moves only :math:`3 N`, about an eighth. We time PyTorch's own
# ``F.layer_norm`` at the end.
#
# The idea
# --------
#
# A single kernel is difficult because the backward pass sums in two directions. ``c1`` and ``c2``
# are means *along a row*, which the :term:`program` that owns the row can compute alone. The
# gradients of weight and bias, ``dw`` and ``db``, are sums *down the columns*, to which every
# program contributes:


# Drawing
def two_directions(axes):
    inks = [lab.colour(name) for name in ("Kernel Book", "PyTorch", "copy")]
    programs = list(zip(inks, ("#eaf2fb", "#fff4e5", "#f6f8fa"), strict=True))
    grey, look = inks[2], {"va": "center", "fontsize": 11}
    for row, (ink, fill) in enumerate(programs):
        axes.text(-0.25, row, f"program {row}", ha="right", color=ink, **look)
        axes.barh([row] * 5, 0.88, 0.62, range(5), color=fill, edgecolor=ink, lw=0.9)
        arrow = {"arrowstyle": "->", "color": ink}
        axes.annotate("", (5.65, row), (5.0, row), arrowprops=arrow)
        axes.text(5.8, row, "c1, c2", color=ink, **look)
    for column in range(5):
        for part, (ink, fill) in enumerate(programs):  # a part from each program
            left = column + 0.3 * part
            axes.barh(3.45, 0.28, 0.62, left, color=fill, edgecolor=ink, lw=0.9)
        arrow = {"arrowstyle": "->", "color": grey}
        axes.annotate("", (column + 0.44, 3.1), (column + 0.44, 2.35), arrowprops=arrow)
    axes.text(-0.25, 3.45, "all programs", ha="right", **look)
    axes.text(5.8, 3.45, "dw, db", **look)
    axes.text(2.4, -0.65, "x and dy, a row for each program", ha="center", fontsize=11)
    axes.set(xlim=(-1.9, 7.0), ylim=(3.85, -0.95), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Sums along the rows, and down the columns",
    "Three rows of five numbers, one row for each program. An arrow to the right leads from each "
    "row to its c1 and c2, of the same colour. An arrow down leads from each column, which all "
    "three programs have a part of, to dw and db.",
    two_directions,
    height=2.5,
)

# %%
# Programs run at the same time. In the :doc:`first chapter </chapters/first_kernel>`, two of them
# that added to the same number lost an addition. An *atomic add* prevents this, as do
# :term:`partial sums`, and so does a *lock*, which lets programs add only one at a time.
#
# Each hand-over has its price, and a program that adds every row separately pays it for every row.
# With atomic adds and locks, the rounding also differs from run to run, because whoever comes first
# adds first. We can avoid both:
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Each program sums *many rows* in registers before it hands over anything. It then stores this
#    *partial sum* where no other program writes, so that no program waits. A second kernel adds the
#    partial sums in an order that never changes.
#
# .. image:: /figures/layer-norm-partials.svg
#    :alt: Six rows of x and dy and three programs. Program 0 takes rows 0 and 3, program 1 rows 1
#          and 4, program 2 rows 2 and 5. Each keeps its sums in registers and leaves one row of
#          sums. A second kernel reads all three and adds them up to dw and db.
#
# In the bars at the top, *every tile* means that a program takes only two rows and hands over their
# sums, and *once* that it takes many and hands over at its end. With *64 locks*, programs add to 64
# shared buffers, each with its own lock. PyTorch's operations move :math:`25 N` numbers where a
# single kernel moves :math:`3 N`, so they can reach at most about 12 if all of these go through
# main memory.
#
# The mathematics
# ---------------
#
# The gradient that arrives at :math:`\hat{x}` is ``wdy = w * dy``. On its way to ``x``, it loses
# two parts, because layer norm ignores two changes to a row:
#
# - *A shift.* If we add one small number to every element, :math:`\hat{x}` stays the same, and so
#   does the loss. To first order, the loss changes by that number times the sum of ``dx``, so this
#   sum is 0.
# - *A stretch.* If we scale the deviations from the mean, :math:`\hat{x}` again stays the same,
#   apart from epsilon, so the dot product of ``dx`` with :math:`\hat{x}` is nearly 0.
#
# The backward pass therefore removes from ``wdy`` its mean, ``c2``, and its component along
# :math:`\hat{x}`, which is :math:`\hat{x}` times ``c1``, the mean of ``xhat * wdy``.
#
# Let us take the forward chapter's row of eight, with its mean :math:`m` and ``rstd`` :math:`r`,
# weights of 2 and no epsilon. Only its first output has a gradient, 4, so ``wdy`` is 8 there:


# Measuring
eight = torch.tensor([[1.0, 3, 2, 6, 5, 5, 0, 2]], dtype=torch.float64)
two = torch.full((8,), 2.0, dtype=torch.float64)
dy_of_eight = torch.tensor([[4.0] + [0.0] * 7], dtype=torch.float64)
hat = (eight - 3) / 2
arrives = two * dy_of_eight
c1_of_eight, c2_of_eight = (hat * arrives).mean(), arrives.mean()
dx_of_eight, _, _ = simple_backward(eight, two, 3, 0.5, dy_of_eight)
remains = arrives - c2_of_eight - hat * c1_of_eight
torch.testing.assert_close(dx_of_eight, remains / 2)
assert remains.sum() == 0
assert (remains * hat).sum() == 0

# %%


# Drawing
def two_parts_removed(*panels):
    ours, grey, other = (
        lab.colour(name) for name in ("Kernel Book", "copy", "PyTorch")
    )
    parts = (
        ("wdy", arrives, ours),
        ("minus c2", c2_of_eight, other),
        ("minus xhat * c1", hat * c1_of_eight, other),
        ("is left", remains, ours),
    )
    for axes, (name, numbers, ink) in zip(panels, parts, strict=True):
        numbers = numbers.expand(1, 8)[0]
        axes.axhline(0, color=grey, linewidth=1.2)
        axes.vlines(range(8), 0, numbers, color=ink, linewidth=1.8)
        axes.plot(range(8), numbers, "o", color=ink, markersize=4.5)
        axes.text(0, numbers[0] + 0.4, f"{numbers[0]:g}", ha="center", fontsize=10.5)
        axes.set_title(name, fontsize=11)
        axes.set(ylim=(-3.4, 9.4), xlim=(-0.8, 7.8), xticks=[], yticks=range(-2, 9, 2))
        if axes is not panels[0]:
            axes.set_yticklabels([])


lab.sketch(
    "What layer norm takes from the gradient of a row",
    "Four panels of eight numbers. wdy is 8 in the first column and 0 elsewhere. Its mean, c2, is "
    "1 in all columns. Its part along xhat is 1, 0, 0.5, −1.5, −1, −1, 1.5 and 0.5. Without both, "
    "6, −1, −1.5, 0.5, 0, 0, −2.5 and −1.5 are left.",
    two_parts_removed,
    panels=4,
    height=2.5,
)

# %%


# Reading
def output_of_eight(first):
    moved = eight.clone()
    moved[0, 0] = first
    return (2 * F.layer_norm(moved, (8,), eps=0.0) + 1)[0, 0].item()


grown = 4 * (output_of_eight(1.001) - output_of_eight(1.0))
assert abs(grown / 0.001 - dx_of_eight[0, 0]) < 0.01
lab.read(
    f"What is left sums to {remains.sum():.0f}, and its dot product with `xhat` is "
    f"{(remains * hat).sum():.0f}, as both must be. Times `rstd`, here 0.5, it is `dx`."
)

# %%

# Folded: The same in numbers
lab.together(
    lab.table(
        [
            {"column": name}
            | {
                str(j): f"{number + 0.0:g}".replace("-", "−")
                for j, number in enumerate(line.expand(1, 8)[0].tolist())
            }
            | {"note": of_row.replace(" ", "\N{NO-BREAK SPACE}")}
            for name, line, of_row in (
                ("x", eight, "m = 3"),
                ("xhat", hat, "r = 0.5"),
                ("wdy", arrives, "arrives"),
                ("c2", c2_of_eight, f"c2 = {c2_of_eight:g}"),
                ("xhat * c1", hat * c1_of_eight, f"c1 = −{-c1_of_eight:g}"),
                ("left", remains, "wdy − both"),
                ("dx", dx_of_eight, "left * r"),
            )
        ],
        "The gradient of a row of eight, step by step",
    ),
    lab.read(
        f"This row adds `dy * xhat` = {(dy_of_eight * hat)[0, 0]:.0f} to the first column of "
        f"`dw`, and `dy` = {dy_of_eight[0, 0]:.0f} to that of `db`.".replace("-", "−")
    ),
    lab.read(
        "A nudge confirms `dx`. Because `dy` is 4, the loss is four times the first output. "
        f"Moving the first element from 1 to 1.001 raises the loss by {grown:.4f}, "
        f"{dx_of_eight[0, 0]:.0f} times the nudge."
    ),
)

# %%
# In general, the weight and the bias act on each element separately:
#
# .. math::
#
#    \begin{aligned}
#    db_j &= dy_j \\
#    dw_j &= dy_j\, \hat{x}_j \\
#    d\hat{x}_j &= w_j\, dy_j
#    \end{aligned}
#
# The first two are summed over all rows. The third is ``wdy``. Without its two parts, and scaled by
# :math:`r`, it becomes the gradient of :math:`x`:
#
# .. math::
#
#    \begin{aligned}
#    c_1 &= \tfrac{1}{N} \sum_j \hat{x}_j\, w_j\, dy_j \\
#    c_2 &= \tfrac{1}{N} \sum_j w_j\, dy_j \\
#    dx_j &= \big( w_j\, dy_j - (\hat{x}_j\, c_1 + c_2) \big)\, r
#    \end{aligned}
#
# .. dropdown:: The derivation in six steps, for a second reading
#
#    The row :math:`x` has mean :math:`m` and variance :math:`v`, and
#    :math:`r = 1 / \sqrt{v + \epsilon}`.
#
#    *Step 1* is the action of the weight and the bias, above.
#
#    *Step 2.* The deviation :math:`u = x - m \mathbf{1}`, with :math:`\mathbf{1}` the column of
#    ones, is a matrix :math:`P` times :math:`x`:
#
#    .. math::
#
#       P = I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#
#    *Step 3.* The derivative of :math:`r = (u^\top u / N + \epsilon)^{-1/2}` with respect to
#    :math:`u` follows from the chain rule:
#
#    .. math::
#
#       \begin{aligned}
#       \frac{\partial r}{\partial u}
#       &= -\tfrac{1}{2} \big( \tfrac{1}{N} u^\top u + \epsilon \big)^{-3/2}
#          \cdot \tfrac{2}{N} u^\top \\
#       &= -\tfrac{1}{N}\, r^3\, u^\top
#       \end{aligned}
#
#    This drops no epsilon: the sum in brackets, raised to the power :math:`-3/2`, is exactly
#    :math:`r^3`.
#
#    *Step 4.* By the product rule, the derivative of :math:`\hat{x} = r\, u` has two terms, and
#    :math:`r\, u` is :math:`\hat{x}` again:
#
#    .. math::
#
#       \frac{\partial \hat{x}}{\partial u} = r I - \tfrac{1}{N}\, r^3\, u\, u^\top
#       = r \big( I - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#
#    *Step 5.* Multiplied by :math:`P`, this is the Jacobian of :math:`\hat{x}` with respect to
#    :math:`x`. The mean of :math:`\hat{x}` is already 0, so :math:`\hat{x}^\top P = \hat{x}^\top`,
#    and
#
#    .. math::
#
#       J = r \big( I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#                   - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#
#    *Step 6.* :math:`J` is symmetric, so :math:`dx = J\, d\hat{x}`. We need not build any matrix:
#    :math:`\mathbf{1} \mathbf{1}^\top / N` times a vector gives its mean, and
#    :math:`\hat{x} \hat{x}^\top / N` times the vector gives :math:`\hat{x}` times another mean.
#    These are the formulas above.


# Measuring
import triton
import triton.language as tl
from torch.autograd.functional import jacobian

N, eps = 7, 1.0
x, w, dy = torch.randn(3, N, dtype=torch.float64)
one, eye = torch.ones(N, 1, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
P = eye - one @ one.T / N
u = x - x.mean()
r = (u @ u / N + eps).rsqrt()
xhat = (r * u)[:, None]
J = r * (eye - one @ one.T / N - xhat @ xhat.T / N)
dx, _, _ = simple_backward(x[None], w, x.mean(), r, dy[None])

# %%


# Measuring
def rstd_of(u):
    return (u @ u / N + eps).rsqrt()


def xhat_of(x):
    return (x - x.mean()) * rstd_of(x - x.mean())


def loss(x):
    return F.layer_norm(x, (N,), w, None, eps) @ dy


steps = {
    "2: P": (P, jacobian(lambda x: x - x.mean(), x)),
    "3: of rstd": (-(r**3) * u / N, jacobian(rstd_of, u)),
    "4: of xhat by u": (
        r * (eye - xhat @ xhat.T / N),
        jacobian(lambda u: u * rstd_of(u), u),
    ),
    "5: J": (J, jacobian(xhat_of, x)),
    "6: J times wdy": (J @ (w * dy), jacobian(loss, x)),
    "6: with c1 and c2": (dx[0], jacobian(loss, x)),
}
worst = max((ours - true).abs().max().item() for ours, true in steps.values())
assert worst < 1e-14

# %%

# Reading
lab.read(
    "The formulas, and steps 2 to 6 in the fold, agree with automatic differentiation in float64; "
    f"the largest difference is {worst:.0e}."
)

# %%
# The backward kernel
# -------------------
#
# How many rows should a program take? Its sums are two rows of float32, written once and read once:
# 16 bytes per column, however many rows it sums. Each row of 16-bit numbers costs 6 bytes per
# column, for ``x``, ``dy`` and ``dx``.


# Drawing
def bytes_by_rows(axes):
    for place, rows_each in enumerate((1, 2, 8, 64)):
        sums = 16 / rows_each
        ink = lab.colour("Kernel Book"), lab.colour("PyTorch")
        axes.barh(place, 6, color=ink[0], height=0.6)
        axes.barh(place, sums, left=6, color=ink[1], height=0.6)
        axes.text(6.3 + sums, place, f"{6 + sums:g}", va="center", fontsize=11)
    names = ["1 row", "2 rows", "8 rows", "64 rows"]
    axes.set_yticks(range(4), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 25)
    axes.set_xlabel("bytes read and written per element of x")
    axes.text(3, -0.55, "x, dy, dx", ha="center", color=ink[0], fontsize=11)
    axes.text(14, -0.55, "sums", ha="center", color=ink[1], fontsize=11)


lab.sketch(
    "Memory traffic, by the rows that a program sums",
    "Bars of bytes per element. x, dy and dx are 6 bytes in each. The sums add 16 with one row per "
    "program, 8 with two, 2 with eight and 0.25 with 64.",
    bytes_by_rows,
    height=2.4,
)

# %%
# With 64 rows, the sums hardly count. To give each program many rows, we launch only about as many
# programs as fit on the GPU's :term:`SMs <SM>` (streaming multiprocessors) at once. Each loops over
# its rows and keeps its sums, ``dw`` and ``db``, in :term:`registers <register>`.

lab.source(sum_my_rows)

# %%
# With three programs, program 0 takes rows 0, 3, 6 and so on. ``cols`` holds the columns of a row,
# padded to a power of two. The padding adds nothing to any sum, because ``dy`` is 0 there. This
# small kernel expects float32; the book's package converts 16-bit numbers to float32 first.

# %%

# Measuring
ones, counted = torch.ones(5000, 4, device=runtime.DEVICE), {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    total = torch.zeros(4, device=runtime.DEVICE, dtype=dtype)
    for row in ones.to(dtype):
        total += row
    counted[dtype] = total[0].item()

# %%

# Reading
exact, half, brain = counted.values()
assert exact == 5000
after_half = half * (1 + torch.finfo(torch.float16).eps)
lab.read(
    "Both keep their sums in `tl.float32`, because a long sum in 16 bits stops growing. A `db` of "
    f"{exact:,.0f} ones ends at {half:,.0f} in float16, where the next number is {after_half:,.0f} "
    f"and adding 1 rounds back down, and at {brain:,.0f} in bfloat16."
)

# %%
# The three ways of handing over these sums differ only in the lines after ``sum_my_rows``.
#
# First way: an atomic add
# ------------------------
#
# All programs share one *buffer* in main memory, initially two rows of zeros. An :term:`atomic` add
# adds each number to it in one indivisible step:
#
# .. code-block:: python
#
#    tl.atomic_add(sums_ptr + cols, dw, mask=cols < n_cols, sem="relaxed")
#    tl.atomic_add(sums_ptr + n_cols + cols, db, mask=cols < n_cols, sem="relaxed")
#
# ``sem`` says how the add must be ordered with respect to other memory accesses. Nobody reads the
# sums before the kernel has ended, so ``"relaxed"``, which orders nothing, is enough.


# Measuring
@triton.jit
def atomic_kernel(
    x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, sums_ptr, n_rows, n_cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    dw, db = sum_my_rows(
        x_ptr, w_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, n_rows, n_cols, cols
    )
    inside = cols < n_cols
    tl.atomic_add(sums_ptr + cols, dw, mask=inside, sem="relaxed")
    tl.atomic_add(sums_ptr + n_cols + cols, db, mask=inside, sem="relaxed")


def with_atomics(x, w, mean, rstd, dy, n_programs):
    n_rows, n_cols = x.shape
    dx, sums = torch.empty_like(x), x.new_zeros(2, n_cols)
    block = triton.next_power_of_2(n_cols)
    atomic_kernel[(n_programs,)](x, w, mean, rstd, dy, dx, sums, n_rows, n_cols, block)
    return dx, *sums


# -- what is timed and compared under "What each way costs"
def with_partial_sums(x, w, mean, rstd, dy, n_programs):
    n_rows, n_cols = x.shape
    dx, sums = torch.empty_like(x), x.new_empty(n_programs, 2 * n_cols)
    block = triton.next_power_of_2(n_cols)
    partial_kernel[(n_programs,)](x, w, mean, rstd, dy, dx, sums, n_rows, n_cols, block)
    total, _ = _add_buffers((sums, None), (torch.float32, None))
    return dx, *total.view(2, n_cols)


def ways_providers(programs, rows, columns, dtype):
    x, dy = torch.randn(2, rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, dx = x[0].clone(), torch.empty_like(x)
    _, mean, rstd = _forward(x, w, None, 1e-5)
    arguments = (x, w, mean, rstd, dy, programs)
    return {
        "copy": lambda: dx.copy_(dy),
        "one lock": lambda: with_lock(*arguments),
        "atomic add": lambda: with_atomics(*arguments),
        "partial sums": lambda: with_partial_sums(*arguments),
    }


def gradients(x, w, dy, reduction, n_programs=None):
    wanted = (torch.float32, torch.float32)
    with runtime.launching_on(x):
        _, mean, rstd = _forward(x, w, None, 1e-5)
        return _backward(x, w, mean, rstd, dy, *wanted, True, reduction, n_programs)


def runs_differ():
    x = torch.randn(8192, 2048, device=runtime.DEVICE, dtype=torch.bfloat16)
    w, dy = x[0].clone(), torch.randn_like(x)
    rows = []
    mean, rstd = x.float().mean(1), (x.float().var(1, correction=0) + 1e-5).rsqrt()
    wide = (x.float(), w.float(), mean, rstd, dy.float(), 512)
    runs = [with_atomics(*wide)[1] for _ in range(100)]
    different = sum(not torch.equal(dw, runs[0]) for dw in runs)
    largest = max((dw - runs[0]).abs().max().item() for dw in runs)
    rows.append({"version": "atomic add", "runs unlike the first": different})
    rows[-1]["largest difference"] = f"{largest:.1e}"
    for name, way in {
        "lock per tile": ("lock", 8192),
        "lock per program": ("lock", None),
        "partial sums": ("partial", None),
    }.items():
        first = gradients(x, w, dy, *way)[1]
        others = [gradients(x, w, dy, *way)[1] for _ in range(99)]
        different = sum(not torch.equal(dw, first) for dw in others)
        largest = max((dw - first).abs().max().item() for dw in others)
        rows.append({"version": name, "runs unlike the first": different})
        rows[-1]["largest difference"] = f"{largest:.1e}"
    return rows


# %%
# Second way: a lock
# ------------------
#
# Why a lock, if two lines are enough? An atomic add works on single numbers. A lock can also merge
# values that belong together, such as the maximum and the sum of an online softmax.
#
# A program that holds the lock loads the buffer, adds to it and stores it, while all others stay
# out. The lock is an integer, 0 if free and 1 if taken.
#
# A *compare-and-swap*, another atomic operation, reads the lock and writes 1 only if it read 0, all
# in one step. One program succeeds, and the others try again. The loop cannot hang, because the
# program that holds the lock is running and waits for nothing.

lab.source(lock_kernel)

# %%
# The swap decides whose turn it is, but not when *memory accesses* take effect: a store may still
# wait in a queue, and a load may return an outdated line from a cache. Moreover, only one of a
# program's many threads takes the lock. The kernel therefore has to guarantee four things, seen
# here from one program and numbered as in the listing:
#
# 1. *My loads come after I have the lock.* The swap has ``acquire`` semantics: later loads of its
#    thread neither move ahead of it nor return what a cache held before.
# 2. *So do the loads of my other threads.* They wait at a *barrier*, ``tl.debug_barrier``, which no
#    thread of the program passes before all have reached it.
# 3. *All my stores come before I give the lock back.* A second barrier ensures this.
# 4. *Whoever sees the lock free also sees those stores.* The exchange that gives it back has
#    ``release`` semantics. Because of the second barrier, these cover the stores of all threads.
#
# .. image:: /figures/layer-norm-lock.svg
#    :alt: Program A takes the lock with acquire, passes a barrier, its threads load and store, it
#          passes a second barrier and gives the lock back with release. Program B tries in vain
#          until then. It takes the lock, passes a barrier, and its threads load what A stored.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    When an acquire reads what a release wrote, everything before the release is visible to
#    everything after the acquire.
#
# Atomics without ``sem``, as in Triton's own tutorial, are ``acq_rel``, which means both.
#
# What breaks it: a lock without its protections
# ----------------------------------------------
#
# We remove one protection at a time, except that the two barriers go together. These are the lines
# that change:
#
# .. code-block:: python
#
#    while tl.atomic_cas(lock_ptr, 0, 1, sem="relaxed") != 0:  # 1, without acquire
#        pass
#    # tl.debug_barrier()  # 2 and 3, without the barriers
#    tl.atomic_xchg(lock_ptr, 0, sem="relaxed")  # 4, without release
#
# Each of 500 programs adds one row to a buffer under the lock. The rows hold small integers, which
# float32 adds exactly in any order, so a wrong sum must have lost an addition. A second
# experiment adds ones, so that the sum counts the additions that arrived.


# Measuring
@triton.jit
def locked_sum_kernel(
    x_ptr,
    sum_ptr,
    lock_ptr,
    BLOCK_COLS: tl.constexpr,
    BARRIERS: tl.constexpr,
    ACQUIRE: tl.constexpr,  # "acquire" or "relaxed"
    RELEASE: tl.constexpr,  # "release" or "relaxed"
):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_COLS + cols)
    while tl.atomic_cas(lock_ptr, 0, 1, sem=ACQUIRE) != 0:
        pass
    if BARRIERS:
        tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    if BARRIERS:
        tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0, sem=RELEASE)


# %%

# Measuring
LOCKS = {  # of each: whether there are barriers, and what the swap and the exchange order
    "both": (True, "acquire", "release"),
    "all but acquire": (True, "relaxed", "release"),
    "all but release": (True, "acquire", "relaxed"),
    "barriers alone": (True, "relaxed", "relaxed"),
    "acquire and release alone": (False, "acquire", "release"),
    "neither": (False, "relaxed", "relaxed"),
}

# %%


# Measuring
def locked_sum(x, protections):
    total, lock = torch.zeros_like(x[0]), torch.zeros(1, dtype=torch.int32).to(x.device)
    grid = (len(x),)
    compiled = locked_sum_kernel[grid](
        x, total, lock, x.shape[1], *protections, num_warps=8
    )
    return total, compiled


# %%

# Measuring
x = torch.randint(-8, 9, (10, 256), device=runtime.DEVICE).float()
assert torch.equal(locked_sum(x, LOCKS["both"])[0], x.sum(0))


def in_short(word):
    parts = word.split(".")
    kept = {"atom", "cas", "exch", "acquire", "release", "relaxed"} | set(parts[:2])
    return ".".join(part for part in parts if part in kept)


def instructions(compiled):
    """What accesses memory or waits, from the swap that takes the lock; repetitions once."""
    words = [word for line in compiled.asm["ptx"].splitlines() for word in line.split()]
    kinds = ("atom.", "bar.sync", "ld.global", "st.global")
    found = [in_short(word) for word in words if word.startswith(kinds)]
    while found and not found[0].startswith("atom."):
        found.pop(0)
    pairs = zip(found, ["", *found], strict=False)
    return ", ".join(word for word, before in pairs if word != before)


def in_ptx():
    x = torch.zeros(1, 4096, device=runtime.DEVICE)
    return [
        {"protected by": name, "PTX": instructions(locked_sum(x, protections)[1])}
        for name, protections in LOCKS.items()
    ]


def lost_additions():
    x = torch.randint(-8, 9, (500, 4096), device=runtime.DEVICE).float()
    truth, rows = x.sum(0), []
    for name, protections in LOCKS.items():
        runs = [locked_sum(x, protections) for _ in range(100)]
        wrong = sum(not torch.equal(total, truth) for total, _ in runs)
        rows.append({"protected by": name, "wrong runs of 100": wrong})
    assert rows[0]["wrong runs of 100"] == 0
    return rows


# %%

# Measuring
PLAINLY = {
    "both": "all four",
    "all but acquire": "without acquire",
    "all but release": "without release",
    "acquire and release alone": "without the barriers",
    "barriers alone": "the barriers alone",
    "neither": "none",
}
lost = lab.measure("A sum of 500 rows, with and without protection", lost_additions)
wrong = {row["protected by"]: row["wrong runs of 100"] for row in lost.rows}
arrived = lab.measure(
    "How many of 500 additions of 1 arrive in a column, in 100 runs",
    lambda: [
        {"protected by": name, "fewest": int(totals.min()), "most": int(totals.max())}
        for name, protections in LOCKS.items()
        for totals in [
            torch.stack(
                [
                    locked_sum(
                        torch.ones(500, 4096, device=runtime.DEVICE), protections
                    )[0]
                    for _ in range(100)
                ]
            )
        ]
    ],
)
arriving = {
    row["protected by"]: " to ".join(
        str(count) for count in sorted({row["fewest"], row["most"]})
    )
    for row in arrived.rows
}
lab.table(
    [
        {"protections": PLAINLY[name], "wrong runs of 100": wrong.get(name, "—")}
        | ({"sum of 500 ones": arriving[name]} if arriving else {})
        for name in list(PLAINLY)[:4]
    ],
    f"A sum of 500 rows under one lock, on {lost.provenance['gpu']}",
) if lost.rows else lost

# %%

# Measuring
ptx = lab.measure("From taking the lock to giving it back", in_ptx)

# %%

# Reading
nan = float("nan")
wrong = {name: wrong.get(name, nan) for name in LOCKS}
listed = {row["protected by"]: row["PTX"].split(", ") for row in ptx.rows}
barriers_left = listed.get("acquire and release alone", []).count("bar.sync")
unharmed = [
    word
    for word, name in (
        ("`acquire`", "all but acquire"),
        ("`release`", "all but release"),
        ("the barriers", "acquire and release alone"),
    )
    if not wrong[name]
]
others = " or without ".join(unharmed)
acquire = wrong["all but acquire"]
most_arrived = {row["protected by"]: row["most"] for row in arrived.rows}.get(
    "all but acquire", 500
)
lab.together(
    lab.read(
        f"**Without `acquire`, {'every run is' if acquire == 100 else f'{acquire:.0f} runs are'} "
        f"wrong{', and most additions are lost' if most_arrived < 250 else ''}.** A program may "
        "load what its SM's cache has kept from an earlier program, and store its own result over "
        "all that was added since."
    )
    if acquire
    else None,
    lab.read(
        f"Without {others}, no run is wrong. We keep them, because without "
        + (
            "`release` or the second barrier"
            if barriers_left == 1 and "the barriers" in unharmed
            else "them"
        )
        + " the GPU's memory model guarantees no order, and the next GPU or compiler may lose "
        "additions."
    )
    if unharmed
    else None,
)

# %%

# Folded: The kernel of this experiment, all its versions, and their PTX
lab.together(
    lab.source(locked_sum_kernel),
    lab.read(
        "As the PTX shows, this compiler adds the first barrier by itself where the kernel asks "
        "for none."
    )
    if barriers_left == 1
    else None,
    lab.table(
        [
            {
                "protections": PLAINLY[name],
                "wrong runs of 100": wrong[name],
                "from the swap to the exchange": ", ".join(listed.get(name, ["—"])),
            }
            for name in PLAINLY
        ],
        f"All versions, and their PTX, NVIDIA's assembly language, on {lost.provenance['gpu']}",
    )
    if lost.rows
    else lost,
)

# %%
# Third way: partial sums
# -----------------------
#
# A lock needs all this ordering because its programs load what others have stored. If each has its
# own buffer, two stores replace all lines from the swap to the exchange.

lab.source(partial_kernel, "no lock")

# %%
# A second kernel adds the buffers. It begins once the first has ended, so it needs no acquire to
# see all stores. It treats each buffer as one row, ``dw`` followed by ``db``, so its ``n_cols`` is
# twice the first kernel's. Each program takes some of the columns and adds ``BLOCK_ROWS`` buffers
# at a time, always in the same order.

lab.source(sum_of_buffers)

# %%

# Folded: The kernels whole, and what the host does
lab.listing(
    {
        "With an atomic add": atomic_kernel,
        "With partial sums": partial_kernel,
        "What the host does for the lock: one buffer of zeros, and a lock that is free": with_lock,
        "What the host does for partial sums: a buffer for each program": with_partial_sums,
    }
)

# %%

# Reading
seed = torch.Generator(runtime.DEVICE).manual_seed(0)
few, few_dy, few_w = torch.randn(3, 7, 100, generator=seed, device=runtime.DEVICE)
few_rstd = (few.var(-1, correction=0) + 1e-5).rsqrt()
few_off = 0
for add_up in (with_atomics, with_lock, with_partial_sums):
    found = add_up(few, few_w[0], few.mean(-1), few_rstd, few_dy, 3)
    expected = reference.layer_norm_backward(few, few_dy, 1, few_w[0])
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
        few_off = max(few_off, ((mine - true).abs().max() / true.abs().max()).item())
lab.read(
    "With three programs for seven rows, all three ways agree with the gradients in float64 to "
    f"within {few_off:.0e} of the largest element."
)

# %%
# What each way costs
# -------------------
#
# How often should programs hand over? The figure times the three ways on 32,768 rows of 1,024
# columns of float32. The more programs share the rows, the fewer each sums, and the more there is
# to hand over. The time of partial sums includes the second kernel.

# %%

FORWARD, BACKWARD = "2 * rows * columns * itemsize", "3 * rows * columns * itemsize"
PROGRAMS = [128, 256, 512, 1024, 2048, 4096, 16384]
SUMMED = {"rows": 32768, "columns": 1024, "dtype": torch.float32}
ways = lab.bench(
    "ways",
    [{"programs": n} | SUMMED for n in PROGRAMS],
    ways_providers,
    limit="copy",
    work=BACKWARD,
    limit_work=FORWARD,
)

# %%


# Drawing
def draw_ways(axes, rows):
    steps = [lab.colour(f"way {number}") for number in range(5)]
    looks = {
        "atomic add": {
            "color": steps[4],
            "marker": "o",
            "linestyle": "--",
            "zorder": 3,  # where it meets partial sums, both lines can be seen
        },
        "partial sums": {
            "color": lab.colour("Kernel Book"),
            "marker": "^",
            "linewidth": 2.6,
        },
        "one lock": {"color": lab.colour("copy"), "marker": "s", "linewidth": 1.5},
    }
    for name, look in looks.items():
        line = [row for row in rows if row["provider"] == name]
        at, reached = (
            [row["programs"] for row in line],
            [100 * row["share"] for row in line],
        )
        axes.plot(at, reached, label=name, markersize=5, clip_on=False, **look)
    axes.axhline(100, color=lab.colour("copy"), linestyle=":", linewidth=1.2)
    axes.text(PROGRAMS[-1], 102, "a copy", ha="right", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PROGRAMS, [f"{n:,}" for n in PROGRAMS])
    axes.minorticks_off()
    axes.set(xlabel="programs", ylabel="% of the speed of a copy", ylim=(0, 112))


def ways_in_words(rows):
    lines = {}
    for row in rows:
        if row["provider"] != "copy":
            lines.setdefault(row["provider"], []).append(row)
    found = [
        f"{name} at its best {100 * top['share']:.0f} with {top['programs']:,}, at the end "
        f"{100 * line[-1]['share']:.0f} with {line[-1]['programs']:,}"
        for name, line in lines.items()
        for top in [max(line, key=lambda row: row["share"])]
    ]
    return f"Lines over the number of programs, % of the speed of a copy: {'; '.join(found)}."


lab.draw(ways, "Three ways to hand over, float32", ways_in_words, draw_ways)

# %%

# Reading
of_ways = {
    (name, n): 100 * ways.share(name, programs=n)
    for name in ("one lock", "atomic add", "partial sums")
    for n in PROGRAMS
}
best, best_of_atomics = (
    max(PROGRAMS, key=lambda n: of_ways[name, n])
    for name in ("partial sums", "atomic add")
)
most = PROGRAMS[-1]
atomics = of_ways["atomic add", best] - of_ways["partial sums", best]
lead = of_ways["atomic add", 4096] - of_ways["partial sums", 4096]
of_x = 12 * 32768 // most
many_of = of_ways["partial sums", most]
allowed = 100 * of_x / (of_x + 16)  # x, dy, dx of float32, without the sums
per_sm = best / ways.provenance["sm_count"] if ways.provenance else nan
of_one_lock = [of_ways["one lock", n] for n in PROGRAMS]
ms_of = {(row["provider"], row["programs"]): row["ms"] for row in ways.rows}
in_queue = [
    1e3 * ms_of.get(("one lock", n), nan) / n for n in PROGRAMS if n >= 512
]  # µs for each program
lab.together(
    lab.read(
        (
            f"**Partial sums and the atomic add are both fastest with {best:,} programs,** about "
            f"{per_sm:.0f} per SM. "
            if best == best_of_atomics
            else f"**Partial sums are fastest with {best:,} programs.** "
        )
        + "With fewer, there may be too few loads to keep the memory busy."
    ),
    lab.read(
        "One lock is a queue. From 512 programs on, it takes "
        f"{min(in_queue):.1f} to {max(in_queue):.1f} µs per program, as if each waited until the "
        "one before had handed over:"
    ),
)

# %%


# Drawing
def four_programs(axes):
    ours, grey, other = (
        lab.colour(name) for name in ("Kernel Book", "copy", "PyTorch")
    )
    light, words = "#eaf2fb", {"ha": "center", "va": "center", "fontsize": 10}

    def bar(line, start, end, fill, ink, word="", height=0.72, **look):
        look |= {"color": fill, "edgecolor": ink, "linewidth": 0.9}
        axes.barh(line, end - start, height, start, **look)
        axes.text((start + end) / 2, line, word, **words)

    free = 0
    for program in range(4):
        summed = 5
        start = max(summed, free)
        bar(program, 0, summed, light, ours, "sums its rows")
        if start > summed:
            bar(program, summed, start, "#ffffff", grey, "waits", linestyle=":")
        bar(program, start, start + 2, "#fff4e5", other, "adds")
        free = start + 2
        bar(program + 5.3, 0, summed, light, ours, "sums its rows")
        bar(program + 5.3, summed, summed + 1.4, "#fff4e5", other, "stores")
    bar(6.8, 6.6, 9.2, light, ours, "second\nkernel", height=1.72)
    axes.text(0, -0.8, "one lock", fontsize=11, fontweight="bold")
    axes.text(0, 4.5, "partial sums", fontsize=11, fontweight="bold")
    axes.set(xlim=(-0.1, 13.4), ylim=(9.0, -1.2), xticks=[])
    axes.set_yticks(
        [0, 1, 2, 3, 5.3, 6.3, 7.3, 8.3], [f"program {n}" for n in (0, 1, 2, 3) * 2]
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("time, not to scale")


lab.sketch(
    "Waiting for a lock, or storing side by side",
    "Bars in time of four programs, which all sum their rows for equally long. With one lock, they "
    "then add to the buffer one after the other, and the last waits longest. With partial sums, "
    "all store at once, and a second kernel adds what they have stored, which ends earlier.",
    four_programs,
    height=3.6,
)

# %%

# %%

# Measuring
differ = lab.measure("dw in a hundred runs on one input, 8,192 × 2,048", runs_differ)

unlike = {row["version"]: row["runs unlike the first"] for row in differ.rows}


def same_bits(version):
    return {0: "yes"}.get(unlike[version], "no") if version in unlike else "—"


# %%


# Reading
def runs_said(name):
    count = unlike.get(name, nan)
    return {0: "none", 99: "all 99 others"}.get(count, f"{count:.0f} of 99")


together = ["atomic add"] * ("atomic add" in unlike) + ["lock per program"]
said = {
    "lock per program": "with 64 locks",
    "atomic add": "with atomic adds",
}
alike = len({runs_said(name) for name in together}) == 1
lab.read(
    (
        "**Partial sums give the same bits in every run,** because rows and sums are added in a "
        "fixed order. "
        if unlike.get("partial sums") == 0
        else f"With partial sums, the bits differ in {runs_said('partial sums')}. "
    )
    + "In a hundred runs on one input, the last bits of `dw` differ from the first run's "
    + (
        f"in {runs_said(together[0])} {' and '.join(said[name] for name in together)}."
        if alike
        else " and ".join(f"in {runs_said(name)} {said[name]}" for name in together)
        + "."
    )
)

# %%

lab.table(
    [
        {
            "way": name,
            "at its best": f"{max(of_ways[name, n] for n in PROGRAMS):.0f} %",
            "same bits in every run": same_bits(version),
            "memory for sums": memory,
            "can merge": merges,
        }
        for name, version, memory, merges in (
            ("atomic add", "atomic add", "one buffer", "single numbers"),
            ("one lock", "lock per program", "one buffer", "anything"),
            ("partial sums", "partial sums", "one per program", "anything"),
        )
    ],
    f"Which way to choose, with speeds in % of a copy from the figure above, on "
    f"{ways.provenance['gpu']}. The bits of the lock are those of 64 locks",
) if ways.rows else None

# %%
# .. raw:: html
#
#    <span id="partial-sums-stay-in-l2"></span>


# Measuring
def buffer_sizes():
    l2 = torch.cuda.get_device_properties(0).L2_cache_size / 2**20
    table = []
    for point in points(torch.bfloat16, [1024, 4096, 8192, 16384, 32768]):
        n_rows, n_cols = point["rows"], point["columns"]
        x = torch.randn(n_rows, n_cols, device=runtime.DEVICE, dtype=torch.bfloat16)
        mean, rstd = torch.ones(2, n_rows, device=runtime.DEVICE)
        wanted = (torch.float32, torch.float32)
        sums, _ = _sums(x, None, mean, rstd, x, None, wanted, "partial", None)
        mib = 2 * sums.numel() * 4 / 2**20
        row = {"columns": n_cols, "rows of sums": len(sums), "MiB": round(mib, 1)}
        row["% of x, dy, dx"] = round(100 * mib * 2**20 / (3 * x.numel() * 2), 1)
        row["fit in L2"] = "yes" if mib < l2 else "no"
        table.append(row)
    return table


def points(dtype, columns):
    return [
        {"columns": n, "rows": min(32768, 2**27 // n), "dtype": dtype} for n in columns
    ]


sizes = lab.measure("The size of the partial sums, bfloat16", buffer_sizes)

# %%

# Reading
of_sums = {row["columns"]: row for row in sizes.rows}
rows_of = {n: min(32768, 2**27 // n) for n in of_sums}
share_of_sums = [  # two float32, written and read: 16 bytes; x, dy, dx: 6
    100 * 16 * row["rows of sums"] / (6 * rows_of[row["columns"]]) for row in sizes.rows
] or [nan]
narrow = of_sums.get(1024, {"rows of sums": nan})["rows of sums"]
lab.read(
    (
        "**Where the last bits do not matter, take the atomic add,** which is as fast here, in "
        "less code. "
        if atomics > -2
        else ""
    )
    + "The book's `layer_norm` uses partial sums, which in bfloat16 add at most "
    f"{max(share_of_sums):.1f} % to the bytes of `x`, `dy` and `dx`."
)

# %%

# Folded: Evidence: the bytes of many programs, a hundred runs, and the size of the buffers
lab.together(
    lab.read(
        "A row of float32 costs 12 bytes per column. "
        f"With {most:,} programs in the figure, 16 of every {of_x + 16} bytes belong to the sums, "
        f"so that {allowed:.0f} % are left for `x`, `dy` and `dx`."
        + (
            f" Partial sums reach only {many_of:.0f} %. The rest of the loss remains open."
            if many_of < allowed - 2
            else ""
        )
        + (
            f" With 4,096 programs, the atomic add is {lead:.0f} points ahead of partial sums."
            if lead > 2
            else ""
        )
    ),
    lab.read(
        "The hundred runs with 64 locks and those with partial sums used the kernel of the next "
        "section; those with atomic adds used the small kernel. A single lock was not run a "
        "hundred times, but its programs also add in the order in which they come. Another GPU "
        "may use another number of programs and give other bits."
    ),
    differ,
    lab.read(
        f"At 1,024 columns, `layer_norm` launches {narrow:.0f} programs, each of which takes two "
        "rows at a time."
    ),
    lab.table(
        [
            {
                "columns": f"{columns:,}",
                "rows": f"{rows_of[columns]:,}",
                "programs and buffers": row["rows of sums"],
                "MiB": row["MiB"],
                "written and read, % of x, dy, dx": f"{added:.1f}",
                "fit in L2": row["fit in L2"],
            }
            for (columns, row), added in zip(
                of_sums.items(), share_of_sums, strict=False
            )
        ],
        "The size of the partial sums, bfloat16",
    ),
)

# %%
# What each half of the idea is worth
# -----------------------------------
#
# The key idea has two halves: summing many rows, and storing without a lock. The kernel of
# ``layer_norm`` can do one without the other, because its programs can also share 64 buffers, each
# with a lock. A *tile* is two rows of 1,024 columns, or one longer row.


# Measuring
def race_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, dy, dx = x[0].clone(), torch.randn_like(x), torch.empty_like(x)
    _, mean, rstd = _forward(x, w, None, 1e-5)
    arguments = (x, w, mean, rstd, dy, dtype, dtype, True)
    rounded = [one[:, None].to(dtype) for one in (mean, rstd)]  # all in 16 bits
    return {
        "copy": lambda: dx.copy_(dy),
        "simple_backward": lambda: simple_backward(x, w, *rounded, dy),
        "lock per tile": lambda: _backward(*arguments, "lock", rows),
        "partial sums per tile": lambda: _backward(*arguments, "partial", rows),
        "lock per program": lambda: _backward(*arguments, "lock"),
        "partial sums": lambda: _backward(*arguments, "partial"),
    }


# %%

race = lab.bench(
    "race",
    points(torch.bfloat16, [1024, 4096, 8192]),
    race_providers,
    limit="copy",
    work=BACKWARD,
    limit_work=FORWARD,
)
RENAMED = {"one tile a program": "lock per tile", "lock, looping": "lock per program"}
for other in race.elsewhere:  # a record may be older than these names
    other.frame["provider"] = other.frame["provider"].replace(RENAMED)
for sweep in (race, *race.elsewhere):  # what the operator does has the book's colour
    sweep.frame["provider"] = sweep.frame["provider"].replace(
        {"partial sums": "Kernel Book"}
    )

# %%

# Drawing
WAYS = {
    "simple_backward": "PyTorch's operations",
    "lock per tile": "64 locks, every tile",
    "partial sums per tile": "partial sums, every tile",
    "lock per program": "64 locks, once",
    "Kernel Book": "partial sums, once",
}
WIDTHS = (1024, 8192)
lab.ladder(
    race,
    "Handing over every tile or once, bfloat16",
    list(WAYS),
    by="columns",
    where={"columns": WIDTHS},
    names=WAYS,
)

# %%


# Measuring
def one_change_at_a_time():
    x = torch.randn(32768, 1024, device=runtime.DEVICE).to(torch.bfloat16)
    dy, dx, w = torch.randn_like(x), torch.empty_like(x), x[0].clone()
    _, mean, rstd = _forward(x, w, None, 1e-5)
    arguments = (x, w, mean, rstd, dy, torch.bfloat16, torch.bfloat16, True)
    copy = statistics.median(lab.event_times(lambda: dx.copy_(x), repeats=50))
    measured = []
    for way, reduction, locks in (
        ("one lock", "lock", 1),
        ("64 locks", "lock", 64),
        ("partial sums", "partial", 64),
    ):
        row = {"way": way}
        for when, programs, stages in (
            ("every tile", 32768, 1),
            ("once, nothing loaded ahead", None, 1),
            ("once", None, 3),
        ):
            changed = {"BWD_STAGES": stages, "LOCK_BUFFERS": locks}
            with mock.patch.multiple(tuned, **changed):
                forget()  # a launch that is planned does not look at the changed table
                run = partial(_backward, *arguments, reduction, programs)
                took = statistics.median(lab.event_times(run, repeats=50))
            forget()
            row[when] = round(150 * copy / took, 1)
        measured.append(row)
    return measured


changes = lab.measure("One change at a time, % of a copy", one_change_at_a_time)

# %%

# Reading
race_share = {
    (name, n): 100 * race.share(name, columns=n)
    for name in (
        "lock per tile",
        "lock per program",
        "partial sums per tile",
        "Kernel Book",
    )
    for n in (1024, 4096, 8192)
}
gpu = race.provenance["gpu"] if race.provenance else "this GPU"
of_lock, of_sums_alone = (
    race_share[often, 1024] / race_share[each, 1024]
    for often, each in (
        ("lock per program", "lock per tile"),
        ("Kernel Book", "partial sums per tile"),
    )
)
change = {row["way"]: row for row in changes.rows}
apart = ""
gains, alone = [nan], nan
if change:
    gains = [
        100 * (change[way]["once"] / change[way]["once, nothing loaded ahead"] - 1)
        for way in ("64 locks", "partial sums")
    ]
    apart = (
        " Programs with many tiles can also load ahead, that is, copy the next tile into shared "
        "memory while they work on the current one. This makes the kernel at most "
        f"{max(gains):.0f} % faster."
    )
    alone = change["one lock"]["once"]
lock_buffers, tile_buffers = (  # two rows of float32 in each
    buffers * 2 * 8192 * 4 for buffers in (64, 2**27 // 8192)
)
tile_lock, tile_sums = (
    race_share[name, 8192] for name in ("lock per tile", "partial sums per tile")
)
no_lock_alone = (
    race_share["partial sums per tile", 1024] / race_share["lock per tile", 1024]
)
lab.together(
    lab.read(
        f"**{'Summing many rows' if of_lock > no_lock_alone else 'Storing without a lock'} is "
        "worth more.** At 1,024 columns, summing many rows alone makes the kernel "
        f"{of_lock:.1f} times as fast, storing without a lock alone {no_lock_alone:.1f} times."
        + apart
    ),
    lab.read(
        "64 locks are not always slower. With one tile per program, they win at 8,192 columns."
    )
    if tile_lock > tile_sums + 1
    else None,
)

# %%

# Folded: The operator's kernels whole, and one change at a time
lab.together(
    lab.read(
        "When programs hand over once, loading ahead makes the kernel "
        f"{min(gains):.0f} to {max(gains):.0f} % faster with 64 locks and with partial sums."
    )
    if change
    else None,
    lab.read(
        f"One lock for all {narrow:.0f} programs is far too few. It reaches only {alone:.0f} % at "
        "1,024 columns."
    )
    if alone < race_share["lock per program", 1024] / 2
    else None,
    lab.table(
        changes.rows,
        "bfloat16, 1,024 columns, % of a copy; timed apart from the figure, so that numbers can "
        f"differ by a few points, on {gpu}",
    )
    if changes.rows
    else None,
    lab.read(
        "That 64 locks win at 8,192 columns with one tile per program may be due to main memory: "
        "with a buffer for each tile, here one row, the partial sums take "
        f"{tile_buffers / 2**30:g} GiB. The 64 shared buffers take "
        f"{lock_buffers / 2**20:g} MiB and fit in the L2 cache."
    )
    if tile_lock > tile_sums + 1
    else None,
    lab.listing(
        {
            "The kernel for whole rows. UNIT, which divides the length of a row, tells the "
            "compiler how many numbers a thread may load at once": row_bwd_kernel,
            "How it hands over its sums: without a lock, locks_ptr is None": hand_over,
            "The means from both sums of a row, which two_sums computes in one reduction. In a row "
            "of equal and huge numbers, the padding would make c1 NaN, where it is 0": (
                means_of
            ),
            "The function that autograd calls, which computes only the gradients requested. "
            "PyTorch's dispatcher knows the kernels as one operator, so torch.compile treats them "
            "as one node of its graph. PyTorch's own operations compute gradients of gradients": (
                gradient
            ),
        }
    ),
)

# %%
# Is it right?
# ------------
#
# We compare all gradients with float64. Their error may be at most twice PyTorch's own or one unit
# in the last place (:term:`ulp`), whichever is larger. In float32, we allow up to four times as
# much; the fold says why.


# Measuring
def cases(n_rows, n_cols, dtype, along_x=False):
    x, w, b, dy = (
        torch.randn(size, device=runtime.DEVICE)
        for size in ((n_rows, n_cols), n_cols, n_cols, (n_rows, n_cols))
    )
    if (
        along_x
    ):  # of a random dy, c1 is next to nothing, and 16 bits would hide an error of it
        w, dy = 1 + w / 8, x + dy / 16
    x, w, b = (t.to(dtype).requires_grad_() for t in (x, w, b))
    dy = dy.to(dtype)
    ours, theirs = (
        torch.autograd.grad(operator(x, (n_cols,), w, b), (x, w, b), dy)
        for operator in (layer_norm, F.layer_norm)
    )
    truths = reference.layer_norm_backward(x, dy, 1, w)
    factors = (4, 8, 8) if dtype == torch.float32 else (2, 2, 2)
    for row in zip(("dx", "dw", "db"), ours, theirs, truths, factors, strict=True):
        what = f"({n_rows}, {n_cols})" + ", dy along x" * along_x
        yield lab.Case(what, *row)


def lock_cases():
    x, dy = torch.randn(2, 70, 500, device=runtime.DEVICE)
    w = torch.randn(500, device=runtime.DEVICE)
    truths = reference.layer_norm_backward(x, dy, 1, w)
    inputs = [t.clone().requires_grad_() for t in (x, w, torch.zeros_like(w))]
    y = F.layer_norm(inputs[0], (500,), *inputs[1:])
    theirs = torch.autograd.grad(y, inputs, dy)
    for reduction in ("partial", "lock"):
        ours = gradients(x, w, dy, reduction)
        for row in zip(("dx", "dw", "db"), ours, theirs, truths, strict=True):
            yield lab.Case(f"{reduction} (70, 500)", *row, factor=8)


# %%

# Measuring
shapes = [(1, 127), (9, 129), (33, 1000), (4, 4096)]
if runtime.INTERPRETED:  # a row in parts, the smallest there is
    shapes += [(7, 1100), (3, 8200)]
else:
    shapes += [(33, 1280), (40, 1100), (20, 3072), (60, 12288)]  # in pieces
    shapes += [(513, 8192), (300, 16384), (300, 32768), (100, 70001), (20, 262144)]
right = lab.check(
    "layer_norm",
    [
        case
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shape in shapes
        for along_x in (False, True)[: 1 + (shape[1] >= 1000)]
        for case in cases(*shape, dtype, along_x)
    ],
)
both_right = lab.check("Both reductions", lock_cases())

# %%

# Reading
first = repr(right).splitlines()[0].removeprefix("layer_norm").partition(";")[0]
first = first.removeprefix(": ").replace(
    " checks passed", " checks of `layer_norm` passed"
)
lab.read(f"{first[:1].upper()}{first[1:].rstrip('.')}.")

# %%

# Folded: All checks, and those with a lock
lab.together(
    lab.read(
        "In float32, the limit for `dx` is doubled, because the hardware's reciprocal square root "
        "may be off by two ulps. That for `dw` and `db` is four times as wide, since the error of "
        "a sum over many rows depends on its order."
    ),
    lab.read(
        "The public function does not offer the lock, so its check calls the function below it. "
        "This check allows `dx` the same error as `dw` and `db`."
    ),
    right,
    both_right,
)

# %%
# How fast is it?
# ---------------
#
# We time the whole backward pass against ``F.layer_norm``, eager and compiled, and against Liger
# and quack, two libraries of open-source kernels. There are 32,768 rows, or fewer where these would
# hold more than :math:`2^{27}` numbers. Host time is excluded throughout.


# Measuring
def liger(x, w, b):
    return lab.peer(
        "liger_kernel.ops.layer_norm",
        lambda ops: lambda: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
    )


def quack_gradients(x, w, b, dy):
    w, b = w.detach().float(), b.detach().float()

    def use(ops):
        x_ = x.detach()
        _, rstd, mean = ops.layernorm_fwd(x_, w, b, 1e-5, True, True)
        return lambda: ops.layernorm_bwd(x_, w, dy, rstd, mean)

    return lab.peer("quack.rmsnorm", use)


# %%


# Measuring
def backward_providers(columns, rows, dtype):
    x, w, b = (
        torch.randn(size, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
        for size in ((rows, columns), columns, columns)
    )
    dy, dx = torch.randn_like(x), torch.empty_like(x)

    def backward_of(run):
        if isinstance(run, lab.Absent):
            return run
        y = run()
        return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    compiled = torch.compile(lambda x, w, b: F.layer_norm(x, (columns,), w, b))
    return {
        "copy": lambda: dx.copy_(dy),
        "PyTorch": backward_of(lambda: F.layer_norm(x, (columns,), w, b)),
        "torch.compile": backward_of(lambda: compiled(x, w, b)),
        "Liger": backward_of(liger(x, w, b)),
        "quack": quack_gradients(x, w, b, dy),
        "Kernel Book": backward_of(lambda: layer_norm(x, columns, w, b)),
    }


# %%

COLUMNS = [1024, 4096, 8192, 16384, 32768, 65536]
DTYPES = (torch.bfloat16, torch.float32)
backward = lab.bench(
    "backward",
    [point for dtype in DTYPES for point in points(dtype, COLUMNS)],
    backward_providers,
    limit="copy",
    work=BACKWARD,
    limit_work=FORWARD,
)
lab.plot(backward, "Backward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Reading
in_dtypes = [{"dtype": "bfloat16"}, {"dtype": "float32"}]
losses = backward.losses(*in_dtypes)
in_float32 = [
    100 * backward.share("Kernel Book", dtype="float32", columns=n) for n in COLUMNS
]
by_library = {(row["library"], row["dtype"]): [] for row in losses}
for row in losses:
    by_library[row["library"], row["dtype"]].append(
        f"{row['its %'] - row['our %']} points at {row['columns']:,}"
    )
each = [
    f"In {dtype}, {library} is ahead by {' and '.join(found)} columns"
    for (library, dtype), found in by_library.items()
]
in_bfloat16 = {
    n: backward.share("Kernel Book", **in_dtypes[0], columns=n) for n in COLUMNS
}
leads = all(
    ours > backward.best_peer(**in_dtypes[0], columns=n)[1]
    for n, ours in in_bfloat16.items()
)
lab.together(
    lab.read(
        f"**On {gpu}, in bfloat16, `layer_norm` is the fastest at every width,** at "
        f"{100 * min(in_bfloat16.values()):.0f} % to {100 * max(in_bfloat16.values()):.0f} % of a "
        "copy."
        if leads
        else backward.summary(**in_dtypes[0])
    ),
    lab.read(
        f"{'. '.join(each)}. Elsewhere, no library is ahead by more than 1 %."
        if losses
        else "In neither bfloat16 nor float32 is a library ahead by more than 1 %."
    ),
)

# %%

# Folded: Backward in float32, and how all were called
lab.together(
    lab.plot(backward, "Backward, float32", share=True, where={"dtype": "float32"}),
    lab.read(
        f"In float32, `layer_norm` reaches {min(in_float32):.0f} % to {max(in_float32):.0f} % of "
        "a copy. We call all of them through autograd, except quack, whose backward kernels we "
        "call directly, with a float32 weight. A copy moves two numbers per element, the backward "
        "pass three."
    ),
)

# %%


# Measuring
def hidden_sizes():
    rows = []
    whole = {"BWD_PIECES": {}, "BWD_PACKED_COLS": tuned.BWD_ROW_COLS}
    for columns in (1280, 2560, 5120, 12288):
        x = torch.randn(2**27 // columns, columns, device=runtime.DEVICE)
        x = x.to(torch.bfloat16)
        w, dy, dx = x[0].clone(), torch.randn_like(x), torch.empty_like(x)
        _, mean, rstd = _forward(x, w, w, 1e-5)
        run = partial(_backward, x, w, mean, rstd, dy, x.dtype, x.dtype, dx=dx)
        copy = statistics.median(lab.event_times(partial(dx.copy_, dy)))
        row = {"columns": columns, "pieces": in_pieces(columns, least=3)[0]}
        for name, changed in (("without", whole), ("with", {"BWD_STAGES": 3})):
            forget()
            with mock.patch.multiple(tuned, **changed):
                took = statistics.median(lab.event_times(run, repeats=50))
            row[f"{name} pieces, % of a copy"] = round(100 * 1.5 * copy / took)
        rows.append(row)
    forget()
    return rows


cut = lab.measure("Hidden sizes in pieces", hidden_sizes)

# %%

# Folded: Hidden sizes that are no powers of two
blocks, packs = (
    [row for row in cut.rows if (row["columns"] > tuned.BWD_ROW_COLS) == wide]
    for wide in (False, True)
)


def from_to(rows, name):
    reached = [row[f"{name} pieces, % of a copy"] for row in rows]
    return f"{min(reached)} to {max(reached)} %" if len(rows) > 1 else f"{reached[0]} %"


lab.together(
    lab.read(
        "A block must be a power of two, so a row of 1,280 columns would take one of 2,048. A row "
        "of 16-bit numbers is therefore cut into pieces, as in the forward pass, if it makes "
        f"{' or '.join(map(str, tuned.BWD_PIECES))} of at least {2 * tuned.PIECE_COLS} columns. "
        "The sums of a program are cut in the same way."
    ),
    lab.read(
        f"Rows of {blocks[0]['columns']:,} to {blocks[-1]['columns']:,} columns reach "
        f"{from_to(blocks, 'without')} of a copy in one block, and {from_to(blocks, 'with')} in "
        "pieces."
    )
    if blocks
    else None,
    lab.read(
        f"A row of {packs[0]['columns']:,} columns is too wide for one block. Without pieces, "
        f"several programs share it ({from_to(packs, 'without')}). In pieces, one program holds "
        f"it, with two numbers to a register ({from_to(packs, 'with')})."
    )
    if packs
    else None,
    lab.table(
        [
            {
                "columns": f"{row['columns']:,}",
                "pieces": row["pieces"],
                "without pieces": row["without pieces, % of a copy"],
                "with pieces": row["with pieces, % of a copy"],
            }
            for row in cut.rows
        ],
        f"Backward, bfloat16, in % of a copy, on {gpu}",
    )
    if cut.rows
    else None,
    lab.read(
        "In the kernel, `terms` computes `xhat` and `wdy` of a piece. `where_piece` says which of "
        "its columns lie inside the row."
    ),
    lab.source(pieces_bwd_kernel),
)

# %%
# Wide rows
# ---------


# Measuring
def loads_ahead():
    rows, kib = [], 2048 * 2 * 2 // 2**10  # of x and dy, in a part
    for name, columns, backward, changed, programs, ahead in (
        ("whole rows", 8192, _row_backward, {"BWD_STAGES": 3}, 1, 2 * 4 * kib),
        ("none ahead", 8192, _row_backward, {"BWD_STAGES": 1}, 1, 0),
        ("packed", 16384, _packed_row_backward, {"BWD_STAGES": 3}, 1, 0),
        ("shared", 32768, _split_backward, {"BWD_PART_THREADS": 64}, 1, kib),
        ("shared", 32768, _split_backward, {"BWD_PART_THREADS": 128}, 2, 2 * kib),
        ("shared", 32768, _split_backward, {"BWD_PART_THREADS": 256}, 4, 4 * kib),
        ("not shared", 2048, _split_backward, {"BWD_PART_THREADS": 256}, 4, 4 * kib),
    ):
        x = torch.randn(2**27 // columns, columns, device=runtime.DEVICE)
        x = x.to(torch.bfloat16)
        dy, dx, w = torch.randn_like(x), torch.empty_like(x), x[0].clone()
        mean, rstd = torch.ones(2, len(x), device=runtime.DEVICE)
        arguments = [x, w, mean, rstd, dy, dx, (torch.float32,) * 2, "partial"]
        arguments += [] if backward is _split_backward else [None]
        copy = statistics.median(lab.event_times(lambda x=x, dx=dx: dx.copy_(x)))
        with mock.patch.multiple(tuned, **changed):
            forget()  # a launch that is planned does not look at the changed table
            run = partial(backward, *arguments)
            took = statistics.median(lab.event_times(run, repeats=50))
        forget()
        row = {"rows": name, "columns": columns, "programs per SM": programs}
        rows.append(row | {"KiB ahead": ahead, "% of a copy": round(150 * copy / took)})
    return rows


ahead = lab.measure("What an SM has requested ahead, bfloat16", loads_ahead)

# %%

# Reading
speeds = [row["% of a copy"] for row in ahead.rows] or [nan] * 7
three, none, packed, single, _, four, alone = speeds
waiting = alone - four >= 5
drop = [
    100 * backward.share("Kernel Book", dtype="bfloat16", columns=n)
    for n in (8192, 16384, 32768)
]
lab.read(
    f"In bfloat16, `layer_norm` falls from {drop[0]:.0f} % of a copy at 8,192 columns to "
    f"{drop[2]:.0f} % at 32,768."
) if not drop[2] >= drop[1] - 5 else None

# %%
# *What changes beyond 8,192 columns?* Registers run out. A program's sums take 8 bytes of registers
# per column, and the row takes as many again, because ``xhat`` and ``wdy`` have to wait in float32
# until ``c1`` and ``c2`` are known:


# Drawing
def registers_of_a_row(axes):
    ours, grey, other = (
        lab.colour(name) for name in ("Kernel Book", "copy", "PyTorch")
    )
    kinds = (
        ("8,192 columns", 8192, 8),
        ("16,384 columns", 16384, 8),
        ("16,384, packed", 16384, 4),
    )
    for place, (_, columns, of_row) in enumerate(kinds):
        sums, row = (columns * size / 2**10 for size in (8, of_row))
        axes.barh(place, sums, color=other, height=0.6)
        axes.barh(place, row, left=sums, color=ours, height=0.6)
        look = {"va": "center", "fontsize": 11}
        axes.text(sums + row + 6, place, f"{sums + row:.0f} KiB", **look)
        if not place:
            axes.text(sums / 2, -0.55, "sums", ha="center", color=other, fontsize=11)
            axes.text(
                sums + row / 2, -0.55, "row", ha="center", color=ours, fontsize=11
            )
    axes.plot([256, 256], [-0.35, 2.5], color=grey, linestyle="--", linewidth=1.4)
    axes.text(256, -0.55, "all of an SM", ha="center", fontsize=11)
    axes.set_yticks(range(3), [name for name, _, _ in kinds])
    axes.set(xlim=(0, 320), ylim=(2.5, -0.9), xlabel="KiB of registers")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


lab.sketch(
    "Registers for a row and the sums of its columns",
    "Bars of KiB. At 8,192 columns, the sums take 64 and the row another 64. At 16,384 columns, "
    "they take 128 each, which is all that an SM has, 256. Packed in 16 bits, the row takes 64 "
    "beside 128 for the sums.",
    registers_of_a_row,
    height=2.4,
)

# %%
# At 16,384 columns, nothing would be left for the weight or for addresses. A row is therefore
#
# - *whole* up to 8,192 columns: one program holds it beside its sums;
# - *packed* in 16 bits at 12,288 and 16,384 columns: the same, with two numbers to a register;
# - *shared* otherwise, up to 262,144 columns: it is split over a *group* of programs, which
#   exchange their shares of ``c1`` and ``c2`` in memory, as in :doc:`/chapters/softmax`.
#
# Two suspects for the lost speed can be tested: packed rows load nothing ahead, and the programs of
# shared rows wait for each other.

# %%

# Measuring
CHANGES = [
    ("whole, 8,192 columns", "unchanged"),
    ("whole, 8,192 columns", "no loads ahead"),
    ("packed, 16,384 columns", "unchanged"),
    ("shared, 32,768 columns", "one program per SM"),
    ("shared, 32,768 columns", "two programs per SM"),
    ("shared, 32,768 columns", "unchanged"),
    ("parts as rows, 2,048 columns", "unchanged"),
]
kept = ("programs per SM", "KiB ahead", "% of a copy")
changed_rows = [
    {"rows": rows, "kernel": changed} | {name: row[name] for name in kept}
    for (rows, changed), row in zip(CHANGES, ahead.rows, strict=bool(ahead.rows))
]
lab.table(
    [
        {
            "rows": "parts of 2,048 columns" if place == 6 else row["rows"],
            "loads ahead": "yes" if row["KiB ahead"] else "no",
            "waiting": {5: "yes", 6: "no, each part is a row"}.get(place, "no"),
            "% of a copy": row["% of a copy"],
        }
        for place, row in enumerate(changed_rows)
        if place in (0, 1, 2, 5, 6)
    ],
    f"Loads ahead, waiting, and the speed without the second kernel, bfloat16, on {gpu}",
) if ahead.rows else ahead

# %%


# Reading
def ahead_said():
    said = (
        f"**Loads ahead may be what packed rows lack.** Without them, whole rows lose "
        f"{three - none:.0f} points"
    )
    yield (
        f"{said} and are no faster than packed ones, which have none."
        if none <= packed
        else f"{said}; packed rows, which load nothing ahead either, are {three - packed:.0f} "
        "points behind."
    )
    if none > four:
        yield (
            "In the last line, the kernel of shared rows takes each part for a whole row, so that "
            "no program waits. "
            + (
                f"That gains {alone - four:.0f} points, the most that waiting can cost."
                if waiting
                else f"It is {'no' if alone <= four else 'hardly'} faster, so we do not know what "
                "slows shared rows."
            )
        )


def more_said():
    if four > single + 10:
        yield (
            f"The shared rows' kernel needs several programs per SM: with one it reaches "
            f"{single:.0f} %, with four {four:.0f} %. More programs bring more loads ahead and "
            "more active threads. The table does not separate these two effects. Four programs use "
            "up the registers."
        )
    yield (
        "`KiB ahead` is what an SM requests of `x` and `dy` before it needs them, counted from the "
        "code."
    )
    quack, ours = (
        100 * backward.share(name, dtype="float32", columns=16384)
        for name in ("quack", "Kernel Book")
    )
    if quack > ours + 1:
        yield (
            f"The GPU allows more: at 16,384 columns in float32, quack reaches {quack:.0f} %, "
            f"our shared rows {ours:.0f} %."
        )


lab.together(*map(lab.read, ahead_said())) if ahead.rows else None

# %%
# .. dropdown:: How the programs of a group exchange their sums
#
#    Each column belongs to one program of the group, so ``dw`` and ``db`` need no exchange. In each
#    iteration, a program *publishes* the sums of its part of a row in a *slot*, *loads* its part of
#    the next row, and *finishes* the previous row, whose slots all programs have had an
#    iteration to fill:
#
#    .. image:: /figures/layer-norm-ahead.svg
#       :alt: Four rows over four iterations of the loop. A row is loaded in one iteration,
#             published in the next and finished in the one after. In iteration 1, row 1 is
#             published, row 2 is loaded and row 0 is finished.
#
#    A row of 32,768 columns of bfloat16 is shared by 16 programs. In the code, ``terms`` computes
#    ``xhat`` and ``wdy``, and ``two_sums`` computes both sums in one reduction. ``to_slot`` packs
#    them into 64 bits, which ``publish`` stores at once, so that nobody reads one number without
#    the other. ``collect`` unpacks the slots of all parts, and ``means_of`` divides by the length
#    of a row. ``before`` is the previous row.
#
#    ``parts`` runs from 0 to 31, one number for each thread of a :term:`warp`. In a row of 16
#    parts, each slot is therefore read twice (``% N_PARTS``) but counted once. With more parts than
#    a warp has threads, ``LOOKS`` is at least the number of parts and at least ``THREADS``, so that
#    each thread has its own slots.
#
#    If a slot stays empty for ``max_polls`` looks, the program computes all parts itself. All its
#    ``THREADS`` have to agree on that.


# Measuring
def launch(columns, dtype):
    x = torch.randn(512, columns, device=runtime.DEVICE, dtype=dtype)
    mean, rstd = torch.ones(2, 512, device=runtime.DEVICE)
    _backward(x, x[0].clone(), mean, rstd, torch.ones_like(x), dtype, dtype)


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

# Folded: The split kernel whole, more programs per SM, and what the compiler made of it
lab.together(
    lab.source(split_bwd_kernel),
    *(map(lab.read, more_said()) if ahead.rows else ()),
    lab.table(changed_rows, f"All measurements, on {gpu}") if ahead.rows else None,
    compiled,
)

# %%
# In short
# --------
#
# A gradient that sums over rows needs no lock. It is fast when each program sums many rows in
# registers and stores its partial sums where no other program writes. A second kernel adds these in
# a fixed order, which gives the same bits in every run on one GPU.
#
# Exercises
# ---------
#
# **1. RMS norm.** Leave out the mean: :math:`y_j = x_j\, w_j / \sqrt{\tfrac{1}{N} \sum x_k^2 +
# \epsilon}`. Which of ``c1`` and ``c2`` remains in its gradient? Write the kernel for ``dx``.

# %%

# Solution: RMS norm


@triton.jit
def rms_bwd_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, n_cols, eps, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    dy = tl.load(dy_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    wdy = dy * tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    c1 = tl.sum(x * rstd * wdy, axis=0) / n_cols  # without a mean, no c2
    dx = (wdy - x * rstd * c1) * rstd
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=cols < n_cols)


x, dy = torch.randn(2, 6, 300, device=runtime.DEVICE)
w = torch.randn(300, device=runtime.DEVICE)
dx = torch.empty_like(x)
rms_bwd_kernel[(6,)](x, w, dy, dx, 300, 1e-5, 512)


def rms_in_torch(x, w, dy):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.rms_norm(x, (300,), w, 1e-5), x, dy)[0]


theirs, truth = (
    rms_in_torch(x, w, dy),
    rms_in_torch(x.double(), w.double(), dy.double()),
)
lab.check("RMS norm", [lab.Case("(6, 300)", "dx", dx, theirs, truth, factor=4)])

# %%
# **2. Two invariants.** ``dx`` sums to 0 and is nearly orthogonal to :math:`\hat{x}`. How nearly?
# Derive :math:`\hat{x}^\top dx` from the Jacobian
# :math:`J = r\, (I - \mathbf{1} \mathbf{1}^\top / N - \hat{x} \hat{x}^\top / N)`.

# %%

# Solution: two invariants
#
# Because xhat sums to 0, xhat' J = r (1 - xhat' xhat / N) xhat'. The bracket is the amount by which
# epsilon lowers the variance of xhat: if x has variance v, it is 1 - v r^2 = epsilon r^2. The dot
# product of xhat and dx is therefore epsilon r^3 times that of xhat and wdy, and 0 without epsilon.

x, w, dy = torch.randn(3, 300, dtype=torch.float64)
eps = 0.1
r = (x.var(correction=0) + eps).rsqrt()
dx, _, _ = simple_backward(x[None], w, x.mean(), r, dy[None])
xhat = (x - x.mean()) * r
torch.testing.assert_close(dx.sum(), torch.zeros_like(r))
torch.testing.assert_close(xhat @ dx[0], eps * r**3 * (xhat @ (w * dy)))

# %%
# References
# ----------
#
# - Ba, Kiros, Hinton. *Layer normalization.* arXiv:1607.06450, 2016.
# - Zhang, Sennrich. *Root mean square layer normalization.* NeurIPS 2019.
# - Lustig, Sahasrabuddhe, Giroux. *A formal analysis of the NVIDIA PTX memory consistency model.*
#   ASPLOS 2019.
# - Triton. `Layer normalization
#   <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`__, a tutorial. Its
#   programs share several locks and take one for every row. We did not time it.

# Closing
reached = [backward.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS]
lab.finish(
    f"at least {100 * min(reached) - 0.5:.0f} % of the speed of a copy, up to {COLUMNS[-1]:,} "
    "columns"
)
