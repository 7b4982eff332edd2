"""
Layer norm without a lock
=========================

In the backward pass of layer norm, every row of a batch adds to the gradient of the same weight.
*How do thousands of programs add to one array without a race, and without waiting for each other?*

You will learn

- how the gradient of layer norm comes down to two means per row, ``c1`` and ``c2``, and where
  epsilon enters it;
- what a lock has to order besides its own variable, and what it costs in time and in
  reproducibility;
- how partial sums, one per program, make the gradient faster and the same in every run.

The chapter runs on any NVIDIA GPU. Without one, its checks run in Triton's interpreter, and its
speeds are those of a recorded run.
"""

# sphinx_gallery_thumbnail_number = 1
import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.ops.layer_norm import layer_norm
from kernelbook.ops.layer_norm.backward import (
    _backward,
    _sums,
    row_bwd_kernel,
    split_bwd_kernel,
)
from kernelbook.ops.layer_norm.forward import (
    _forward,
    far_rstd,
    loop_fwd_kernel,
    merge_moments,
    moments,
    packed_row_fwd_kernel,
    row_fwd_kernel,
    split_fwd_kernel,
    square,
)
from kernelbook.ops.layer_norm.operator import gradient
from kernelbook.ops.layer_norm.sums import _add_buffers, hand_over, sum_of_buffers

lab.start("layer_norm", "kernelbook.ops.layer_norm")

# %%
# The problem in PyTorch
# ----------------------
#
# Layer norm shifts and scales each row so that its mean is 0 and its variance 1. It then multiplies
# by a weight and adds a bias, one of each per column, which all rows share.


def simple_layer_norm(x, w, b, eps=1e-5):
    mean = x.mean(dim=-1, keepdim=True)
    deviation = x - mean
    variance = (deviation * deviation).mean(dim=-1, keepdim=True)
    rstd = (variance + eps).rsqrt()
    return deviation * rstd * w + b


# %%
# What does this cost? PyTorch runs each operation as a :term:`kernel` of its own, which reads its
# input from the GPU's main memory (:term:`HBM`) and writes its output back. For a row of :math:`N`
# elements, and ignoring the small tensors:
#
# - the mean reads :math:`N`;
# - the subtraction reads :math:`N` and writes :math:`N`, and so does the square;
# - the mean of the squares reads :math:`N`;
# - the two multiplications and the addition of the bias read and write :math:`N` each.
#
# That makes 7 reads and 5 writes, where one read and one write would do. Layer norm does little
# arithmetic per element, so this traffic decides how long it takes. A single kernel that keeps the
# row on the chip saves most of it.
#
# The backward pass has to read ``x`` and ``dy`` and to write ``dx``: at least three times :math:`N`
# per row. It also needs the mean and ``rstd``, the reciprocal of the standard deviation. We save
# both in the forward pass, because they are only 8 bytes per row, while computing them again would
# take two sums over the row before any other work could start.
#
# The idea
# --------
#
# Layer norm sums in two directions, and the second one is hard to parallelise. The mean and the
# variance are sums *along a row*, so the :term:`program` that owns the row computes them alone. The
# gradient of the weight is a sum *down the columns*: every row contributes to it, and the rows
# belong to different programs, which run at the same time and in no fixed order.
#
# .. image:: /figures/layer-norm-partials.svg
#    :alt: Six rows of x and dy and three programs. Program 0 takes rows 0 and 3, program 1 rows 1
#          and 4, program 2 rows 2 and 5. Each keeps its sums in registers and leaves one row of
#          sums. A second kernel adds up the three rows to dw and db.
#
# There are two ways out. Programs can add to one shared buffer, one program at a time, under a
# *lock*. Or each program sums its own rows and stores a *partial sum*, and a second kernel adds the
# partial sums. We build both and time them against each other.
#
# The mathematics
# ---------------
#
# **Forward.** For a row :math:`x` of :math:`N` elements
#
# .. math::
#
#    \begin{aligned}
#    m &= \frac{1}{N} \sum_j x_j \\
#    v &= \frac{1}{N} \sum_j (x_j - m)^2 \\
#    r &= \frac{1}{\sqrt{v + \epsilon}} \\
#    \hat{x}_j &= (x_j - m)\, r \\
#    y_j &= \hat{x}_j\, w_j + b_j
#    \end{aligned}
#
# The code calls :math:`r` ``rstd`` and :math:`\hat{x}` ``xhat``. This formula for the variance
# needs the mean first. Another formula does not: the mean of the squares minus the square of the
# mean. It would save a step, but it loses precision when the mean of a row is large:

rows = []
for mean in (0, 100, 1000, 10_000):
    x = (torch.randn(4096, dtype=torch.float64) + mean).float()
    truth = x.double().var(correction=0)
    two_steps = (x - x.mean()).square().mean()
    one_step = x.square().mean() - x.mean().square()
    rows.append(
        {
            "mean": mean,
            "variance": f"{truth:.4f}",
            "of deviations": f"{two_steps:.4f}",
            "difference of means": f"{one_step:.4f}",
        }
    )
lab.table(rows, "The variance of 4,096 numbers in float32, two ways")

# %%
# The mean of the squares and the square of the mean are large and agree in almost all of their
# digits, so float32 has few digits left for the small difference between them. This difference may
# even come out negative, and its square root is then NaN. The kernels therefore always compute the
# mean first.
#
# **Backward, step by step.** Let :math:`dy` be the gradient of the loss with respect to :math:`y`,
# which autograd passes in; we want the gradient with respect to :math:`x`. We go from :math:`y`
# back to :math:`x`, and check each step numerically against the Jacobian that PyTorch computes in
# float64 by automatic differentiation.
#
# *Step 1.* Weight and bias act on each element separately. So
#
# .. math::
#
#    \begin{aligned}
#    db_j &= dy_j \\
#    dw_j &= dy_j\, \hat{x}_j \\
#    d\hat{x}_j &= w_j\, dy_j
#    \end{aligned}
#
# where the first two are summed over all rows. The code calls the last one ``wdy``.
#
# *Step 2.* The deviation :math:`d = x - m \mathbf{1}` is linear in :math:`x`. As a matrix, with
# :math:`\mathbf{1}` the column of ones:
#
# .. math::
#
#    d = P x, \qquad P = I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#
# *Step 3.* In terms of :math:`d`, :math:`r = (d^\top d / N + \epsilon)^{-1/2}`. By the chain rule
#
# .. math::
#
#    \begin{aligned}
#    \frac{\partial r}{\partial d}
#    &= -\tfrac{1}{2} \big( \tfrac{1}{N} d^\top d + \epsilon \big)^{-3/2}
#       \cdot \tfrac{2}{N} d^\top \\
#    &= -\tfrac{1}{N}\, r^3\, d^\top
#    \end{aligned}
#
# Epsilon enters the derivative here. It stays inside :math:`r`, because the sum in brackets to the
# power :math:`-3/2` is just :math:`r^3`. Nothing is dropped.
#
# *Step 4.* By the product rule, :math:`\hat{x} = r\, d` has the Jacobian
#
# .. math::
#
#    \begin{aligned}
#    \frac{\partial \hat{x}}{\partial d} &= r I + d\, \frac{\partial r}{\partial d} \\
#    &= r I - \tfrac{1}{N}\, r^3\, d\, d^\top \\
#    &= r \big( I - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#    \end{aligned}
#
# The last line follows because :math:`r\, d` is :math:`\hat{x}`, and it appears twice.
#
# *Step 5.* Put steps 2 and 4 together:
#
# .. math::
#
#    \begin{aligned}
#    J &= \frac{\partial \hat{x}}{\partial x}
#    = r \big( I - \tfrac{1}{N} \hat{x} \hat{x}^\top \big) P \\
#    &= r \big( I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#                - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#    \end{aligned}
#
# The last line uses :math:`\hat{x}^\top P = \hat{x}^\top`, which holds because the elements of
# :math:`\hat{x}` sum to zero, so subtracting their mean changes nothing.
#
# *Step 6.* The matrix :math:`J` is symmetric, so :math:`dx = J^\top d\hat{x} = J\, d\hat{x}`. We
# never build this matrix of :math:`N` by :math:`N`. Multiplying a vector by :math:`\mathbf{1}
# \mathbf{1}^\top / N` replaces each element by the mean, and multiplying it by :math:`\hat{x}
# \hat{x}^\top / N` gives :math:`\hat{x}` times another mean:
#
# .. math::
#
#    \begin{aligned}
#    c_1 &= \tfrac{1}{N} \sum_j \hat{x}_j\, w_j\, dy_j \\
#    c_2 &= \tfrac{1}{N} \sum_j w_j\, dy_j \\
#    dx_j &= \big( w_j\, dy_j - (\hat{x}_j\, c_1 + c_2) \big)\, r
#    \end{aligned}
#
# The gradient of a row thus takes two means over the row, ``c1`` and ``c2``, and then one formula
# per element. Here are the six steps in numbers. Epsilon is set as large as the variance, so that a
# step that dropped it would stand out.

from torch.autograd.functional import jacobian

N, eps = 7, 1.0
x, w, dy = torch.randn(3, N, dtype=torch.float64)
one, eye = torch.ones(N, 1, dtype=torch.float64), torch.eye(N, dtype=torch.float64)


def rstd_of(d):
    return (d @ d / N + eps).rsqrt()


P = eye - one @ one.T / N
d = x - x.mean()
r = rstd_of(d)
xhat = (r * d)[:, None]
J = r * (eye - one @ one.T / N - xhat @ xhat.T / N)
c1, c2 = (xhat[:, 0] * w * dy).mean(), (w * dy).mean()
dx = (w * dy - (xhat[:, 0] * c1 + c2)) * r

# %%


def xhat_of(x):
    return (x - x.mean()) * rstd_of(x - x.mean())


def loss(x):
    return F.layer_norm(x, (N,), w, None, eps) @ dy


steps = {
    "2: P": (P, jacobian(lambda x: x - x.mean(), x)),
    "3: of rstd": (-(r**3) * d / N, jacobian(rstd_of, d)),
    "4: of xhat by d": (
        r * (eye - xhat @ xhat.T / N),
        jacobian(lambda d: d * rstd_of(d), d),
    ),
    "5: J": (J, jacobian(xhat_of, x)),
    "6: J times wdy": (J @ (w * dy), jacobian(loss, x)),
    "6: with c1 and c2": (dx, jacobian(loss, x)),
}
rows = []
for step, (ours, true) in steps.items():
    off = (ours - true).abs().max().item()
    rows.append({"step": step, "off by": f"{off:.0e}", "right": off < 1e-14})
assert all(row["right"] for row in rows)
lab.table(rows, "Each step against automatic differentiation, float64")

# %%
# Epsilon is easy to lose in the backward pass. One way is to divide by the plain standard deviation
# there. Another is to assume that :math:`\hat{x}` has variance 1, while epsilon makes it a little
# smaller. The table shows how wrong ``dx`` becomes in rows of small variance, where epsilon is a
# large part of the sum under the root.

rows = []
for deviation in (1.0, 0.01, 0.001):
    x = deviation * torch.randn(N, dtype=torch.float64)
    d = x - x.mean()
    variance = d @ d / N
    true = F.layer_norm(x.requires_grad_(), (N,), w, None, 1e-5)
    (true,) = torch.autograd.grad(true, x, dy)
    row = {"deviation of x": deviation}
    for name, r in {
        "epsilon kept": (variance + 1e-5).rsqrt(),
        "dropped": variance.rsqrt(),
    }.items():
        xhat, wdy = d * r, w * dy
        dx = (wdy - (xhat * (xhat * wdy).mean() + wdy.mean())) * r
        row[name] = f"{((dx - true).abs().max() / true.abs().max()).item():.1e}"
    rows.append(row)
lab.table(rows, "Relative error of dx, with epsilon = 1e-5")

# %%
# One more check covers all steps at once. ``gradcheck`` compares a gradient with finite
# differences: it changes each input slightly and observes how the output changes.


class LayerNormOfSix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        d = x - x.mean(-1, keepdim=True)
        r = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(d * r, r, w)
        return d * r * w + b

    @staticmethod
    def backward(ctx, dy):
        xhat, r, w = ctx.saved_tensors
        wdy = w * dy
        c1, c2 = (xhat * wdy).mean(-1, keepdim=True), wdy.mean(-1, keepdim=True)
        dx = (wdy - (xhat * c1 + c2)) * r
        return dx, (dy * xhat).sum(0), dy.sum(0), None


inputs = [
    torch.randn(size, dtype=torch.float64, requires_grad=True)
    for size in ((5, N), N, N)
]
passed = torch.autograd.gradcheck(LayerNormOfSix.apply, (*inputs, 1e-3))
assert passed
lab.table([{"gradient of": "x, w and b", "gradcheck": passed}], "The six steps")

# %%
# The forward kernels
# -------------------
#
# **Whole rows on chip.** The first kernel gives each program a few rows, and the program loads them
# whole. The mask keeps the load from reading past the end of a row, and ``other=0.0`` fills the
# masked elements with zeros; without ``other`` their value would be undefined. ``.cg`` is a cache
# hint: it keeps ``x``, which is read once, out of L1 and leaves that cache to the weight and the
# bias, which every row needs. L1 is the small cache in each :term:`SM` (streaming multiprocessor),
# the part of the GPU that runs programs.

lab.source(row_fwd_kernel, "load")

# %%
# Next come the statistics. The formulas read ``x`` three times: for the mean, for the variance and
# for the output. A kernel that looped over blocks of the row would therefore read memory three
# times. Here the whole row sits in :term:`registers <register>`, the fastest storage on the chip,
# so it comes from memory once, and reading it again costs no traffic.

lab.source(row_fwd_kernel, "statistics")

# %%

import triton
import triton.language as tl


@triton.jit
def sum_kernel(x_ptr, sum_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    tl.store(sum_ptr, tl.sum(x, axis=0))


# %%
# This small kernel only sums a row; an experiment below uses it. Most of the statistics are in a
# function of their own, because the kernel for wide rows needs it as well.

lab.source(moments)

# %%
# The function corrects the mean, because floating-point addition rounds and a mean computed from a
# rounded sum is wrong in its last digits. Usually that is harmless: in numbers that lie around
# zero, the error is small compared with their spread. In numbers that are nearly equal and far from
# zero, the error is as large as the deviations themselves, and dividing by their small spread
# magnifies it.
#
# The correction costs one more sum. Deviations from the true mean sum to zero; if ours do not, the
# mean was wrong by their sum divided by :math:`N`. The variance is then reduced by the square of
# the correction, because the deviations were measured from the uncorrected mean.
#
# The most extreme case is a row of 1,000 equal numbers. It has no deviation at all, so its result
# has to be 0.

row = torch.full((1, 1000), 1000.1, device=runtime.DEVICE)
total = torch.empty(1, device=runtime.DEVICE)
sum_kernel[(1,)](row, total, 1000, 1024)
deviation = row - total / 1000
plain = deviation * torch.rsqrt((deviation**2).mean() + 1e-5)
lab.table(
    [
        {"the mean is": name, "largest |y|": f"{y.abs().max().item():.4f}"}
        for name, y in {
            "the sum over N": plain,
            "corrected": layer_norm(row, 1000),
            "PyTorch's": F.layer_norm(row, (1000,)),
        }.items()
    ],
    "A row of 1,000 times 1000.1, normalised",
)

# %%
# Short rows need one more precaution. A :term:`warp` is a group of 32 threads, its *lanes*, which
# execute together. In a row with no more elements than a warp has lanes, each lane holds one
# number, and the first addition combines the squares of two lanes. The compiler fuses that
# multiplication and addition into one instruction, a fused multiply-add, which does not round the
# product. Each lane fuses its own square and takes the other lane's rounded square, so the sums of
# the two lanes may differ in the last bit. Which of the two sums ends up in ``rstd`` is then a
# race. ``square`` prevents it by rounding before anything is added.

lab.source(square)

# %%
# ``moments`` also needs ``tl.where``, because a block is a power of two wide and the row may be
# shorter. The elements past the end were loaded as zeros, which does not disturb the sum for the
# mean. Their *deviation*, however, is not zero but minus the mean, and without ``tl.where`` its
# square is added to the variance once for every such element. Let's leave it out and see.


@triton.jit
def variance_kernel(
    x_ptr, v_ptr, n_cols, BLOCK_COLS: tl.constexpr, WHERE: tl.constexpr
):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    deviation = x - tl.sum(x, axis=0) / n_cols
    if WHERE:
        deviation = tl.where(cols < n_cols, deviation, 0.0)
    tl.store(v_ptr, tl.sum(deviation * deviation, axis=0) / n_cols)


# %%

v = torch.empty(1, device=runtime.DEVICE)
rows = []
for n_cols in (1024, 1000, 520):
    x = torch.randn(n_cols, device=runtime.DEVICE) + 3
    row = {
        "columns, in a block of 1,024": n_cols,
        "true": f"{x.double().var(correction=0):.3f}",
    }
    for name, where in {"with tl.where": True, "without": False}.items():
        variance_kernel[(1,)](x, v, n_cols, 1024, where)
        row[name] = f"{v.item():.3f}"
    rows.append(row)
lab.table(rows, "The variance of a row with mean 3")

# %%
# With 1,024 columns both versions are right, because no element is past the end; this is how the
# mistake survives a careless test. It also hides when the mean is zero, as it is in most random
# tests.
#
# The next piece writes the result. Weight and bias may be absent. In that case their pointer is
# ``None``, which is a constant for the compiler, so it leaves their lines out.

lab.source(row_fwd_kernel, "write")

# %%
# Rows of very large numbers, which we call *far rows*, need more. The squares of numbers above
# :math:`10^{19}` overflow float32. The variance is then infinite and ``rstd`` is 0, so the whole
# output row is 0, and no error is raised. A row whose sum of squares is infinite is therefore read
# once more, and its deviations are multiplied by a small power of two before they are squared.

lab.source(far_rstd)

# %%
# The kernel checks for far rows only at its end, after it has already written a wrong result for
# them. The reason is that an ``if`` applies to the whole program, while the program's rows may
# belong to different warps. To agree on the answer, the warps have to meet at a *barrier*, a point
# that no thread passes before all have reached it. In the middle of the kernel every row would pay
# for that wait; at the end the program has nothing left to do that the wait could delay.

lab.source(row_fwd_kernel, "far")

# %%
# **In a loop.** A row of any length can be read in blocks. This kernel cannot keep the row on the
# chip, so it really reads memory three times.

lab.source(loop_fwd_kernel)

# %%
# **Packed.** Each SM runs several programs at once, which share its fixed number of registers. A
# row of 16,384 columns, widened to float32, takes a quarter of an SM's registers. Few programs then
# fit on the SM, and while they compute, none of them loads. Two 16-bit numbers, however, fit in one
# 32-bit register. A longer row therefore stays packed in pairs, in four pieces, and is widened only
# for one step at a time.

lab.source(packed_row_fwd_kernel, "load")

# %%
# Weight and bias together would take twice as many registers as the packed row. The last step
# therefore goes piece by piece, and a barrier keeps the compiler from loading all pieces first.

lab.source(packed_row_fwd_kernel, "write")

# %%
# **Split.** A row that is longer still would fill an SM's registers, and a long row of float32
# cannot be packed in pairs. Several programs therefore share such a row, and each computes the mean
# and the sum of squared deviations of its own part. The parts then have to be merged. Let part
# :math:`i` have :math:`n_i` elements, mean :math:`m_i` and :math:`M_i = \sum (x - m_i)^2`. The mean
# of the row is :math:`m = \sum_i n_i m_i / N`. For the elements of one part
#
# .. math::
#
#    \begin{aligned}
#    &\sum (x - m)^2 \\
#    &= \sum \big( (x - m_i) + (m_i - m) \big)^2 \\
#    &= M_i + n_i\, (m_i - m)^2
#    \end{aligned}
#
# because the mixed term is :math:`2 (m_i - m) \sum (x - m_i) = 0`. Summed over the parts, this is
# the formula of Chan, Golub and LeVeque. Unlike the difference of two means above, it never
# subtracts large squares.

lab.source(merge_moments)

# %%
# The kernel does not sum the means themselves, because a sum of large means would lose the digits
# in which they differ. It sums their distances from a *pivot*, the mean of the first part.
#
# The programs of a row share their means and sums through the :term:`exchange` that the chapter on
# :doc:`softmax </chapters/softmax>` explains: publish, wait, collect. A program that waits in vain
# for its neighbours computes their numbers itself, which is slow but just as correct.

lab.source(split_fwd_kernel, "collect")

# %%
# Weight and bias, loaded again for every row, are as many bytes as ``x`` and ``y``. They come from
# a cache, but the bandwidth of a cache is limited, too. A program that holds only a part of a row
# needs only the same part of the weight and bias, so it can process its part of *two* rows and load
# them once for both.

lab.source(split_fwd_kernel, "write")

# %%
# The backward kernel
# -------------------
#
# How many programs should there be? One program per row would leave two rows of float32 partial
# sums for each row of ``x``, which is four times the bytes of an ``x`` of 16 bits. We therefore
# launch only as many programs as can
# run at once, and each loops over many rows. Its partial sums for ``dw`` and ``db`` stay in
# registers, in float32, for the whole loop.

lab.source(row_bwd_kernel, "begin")

# %%
# The partial sums need no mask, because ``dy`` is loaded as zero outside the matrix and both terms
# contain it.
#
# ``num_stages`` tells the compiler how many iterations of the loop may be in flight: while the
# program works on one row, the next rows are already being copied into :term:`shared memory`, the
# fast storage of the SM. Most kernels get the same effect by letting several programs share an SM,
# so that one loads while another computes. Here the partial sums take so many registers that only
# few programs fit on an SM.

lab.source(row_bwd_kernel, "add")

# %%
# The gradient of ``x`` is the formula of step 6, in the same names.

lab.source(row_bwd_kernel, "row")

# %%
# At the end, the program has one row of partial sums to hand over.

lab.source(row_bwd_kernel, "end")

# %%
# **Partial sums.** Each program stores its row in a buffer of its own, so no program waits for
# another. A second kernel then adds the buffers: each of its programs takes some columns and goes
# down the rows in a fixed order.

lab.source(sum_of_buffers)

# %%
# **The lock.** Here programs share a few buffers and take turns adding to them. The lock is an
# integer: 0 means free and 1 means taken. A compare-and-swap is an :term:`atomic` operation, so it
# reads the lock, and writes 1 only if it read 0, in one indivisible step. Only one program can
# succeed.

lab.source(hand_over, "acquire")

# %%
# The swap alone is not enough, because it orders the programs but not their *memory accesses*.
# Other programs do not see a store at once: it may wait in a queue, and a load may be served from
# an outdated line of a cache. A program also consists of many threads, and only one of them takes
# the lock, so something has to hold back the others.
#
# .. image:: /figures/layer-norm-lock.svg
#    :alt: Program A takes the lock with acquire, passes a barrier, its threads load and store, it
#          passes a second barrier and gives the lock back with release. Program B tries in vain
#          until then. It takes the lock, passes a barrier, and its threads load what A stored.
#
# Four things have to be ordered, and each has its own tool:
#
# 1. *My loads come after I have the lock.* The swap has ``acquire`` semantics: the later loads of
#    its thread are not moved before it, and do not see data that a cache held from before.
# 2. *So do the loads of my other threads.* They wait for the first thread at a barrier.
# 3. *All my stores come before I release the lock.* At a second barrier no thread continues before
#    all have stored.
# 4. *Whoever sees the lock free also sees those stores.* The exchange that frees the lock has
#    ``release`` semantics. Because of the barrier before it, it covers the stores of all threads,
#    not only those of its own.
#
# When an acquire reads what a release wrote, everything before the release is visible to everything
# after the acquire. Without the barriers, this holds for only one thread of each program.

lab.source(hand_over, "add")

# %%

lab.source(hand_over, "release")

# %%
# The lock does *not* decide in which order the programs add. Floating-point addition depends on the
# order, so the last bits of the result differ from run to run.
#
# **Wide rows.** The partial sums of a row of 16,384 columns fill half of an SM's registers. A row
# of 16-bit numbers fits beside them if it stays packed, with one program per SM.
#
# For wider rows, several programs share a row, as in the forward pass. A group of programs
# exchanges what each part adds to ``c1`` and ``c2``. These are two float32 numbers, so they again
# fit in one slot of 64 bits.

lab.source(split_bwd_kernel, "publish")

# %%
# The program would now have to wait for its neighbours' numbers, which travel through the
# :term:`L2` cache that all SMs share. It uses this time to request its part of the next row.

lab.source(split_bwd_kernel, "ahead")

# %%
# After that it still does not collect the numbers of this row, but those of the row *before*. All
# parts had a whole iteration to publish those, so they have usually arrived. Three rows are in
# progress at any time: one being loaded, one published and one finished. The price is registers,
# because ``x`` and ``dy`` of a row stay there for one iteration longer.

lab.source(split_bwd_kernel, "collect")

# %%
# Autograd sees a single function, which computes only the gradients that are requested. If
# gradients of gradients are wanted, which is rare, PyTorch's own operations compute them. The
# kernels are registered as an operator with PyTorch's dispatcher, so ``torch.compile`` treats them
# as one node of its graph and does not trace into them.

lab.source(gradient)

# %%
# Is it right?
# ------------
#
# Output and gradients are checked against float64, with weight and bias of the same dtype as ``x``.
# In float32 we allow ``y`` and ``dx`` four times PyTorch's error, because the hardware's reciprocal
# square root may be wrong by two units in the last place. We allow ``dw`` and ``db`` eight times,
# because a sum over many rows may be wrong by a few such units, depending on its order.


# Measuring
def cases(n_rows, n_cols, dtype):
    x, w, b = (
        torch.randn(size, device=runtime.DEVICE).to(dtype).requires_grad_()
        for size in ((n_rows, n_cols), n_cols, n_cols)
    )
    dy = torch.randn_like(x)
    results = []
    for operator in (layer_norm, F.layer_norm):
        y = operator(x, (n_cols,), w, b)
        results.append([y, *torch.autograd.grad(y, (x, w, b), dy)])
    truth = reference.layer_norm(x, 1, w, b)
    truths = [truth, *reference.layer_norm_backward(x, dy, 1, w)]
    factors = (4, 4, 8, 8) if dtype == torch.float32 else (2, 2, 2, 2)
    names = ("forward", "dx", "dw", "db")
    for row in zip(names, *results, truths, factors, strict=True):
        yield lab.Case(f"({n_rows}, {n_cols})", *row)


# %%

shapes = [(1, 127), (9, 129), (33, 1000), (4, 4096)]
if runtime.INTERPRETED:  # a row in parts, the smallest there is
    shapes += [(3, 8200)]
else:
    shapes += [(513, 8192), (300, 16384), (300, 32768), (100, 70001), (20, 262144)]
lab.check(
    "layer_norm",
    [
        case
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shape in shapes
        for case in cases(*shape, dtype)
    ],
)

# %%
# The lock is not part of the public function, so its check calls the layer below.


def gradients(x, w, dy, reduction, n_programs=None):
    wanted = (torch.float32, torch.float32)
    with runtime.launching_on(x):
        _, mean, rstd = _forward(x, w, None, 1e-5)
        return _backward(x, w, mean, rstd, dy, *wanted, True, reduction, n_programs)


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


lab.check("Both reductions", lock_cases())

# %%
# The price of the lock
# ---------------------
#
# We can now time the lock against partial sums. Three versions compute the same gradients. "One
# tile a program" takes the lock after each tile, which is how it is usually taught; a tile is one
# row or, if rows are short, two. "Lock, looping" first sums its rows in registers and takes the
# lock once. "Partial sums" has no lock.


# Measuring
def race_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, dy, dx = x[0].clone(), torch.randn_like(x), torch.empty_like(x)
    _, mean, rstd = _forward(x, w, None, 1e-5)
    arguments = (x, w, mean, rstd, dy, dtype, dtype, True)
    return {
        "copy": lambda: dx.copy_(dy),
        "one tile a program": lambda: _backward(*arguments, "lock", rows),
        "lock, looping": lambda: _backward(*arguments, "lock"),
        "partial sums": lambda: _backward(*arguments, "partial"),
    }


def points(dtype, columns):
    return [
        {"columns": n, "rows": min(32768, 2**27 // n), "dtype": dtype} for n in columns
    ]


# %%

FORWARD, BACKWARD = "2 * rows * columns * itemsize", "3 * rows * columns * itemsize"
race = lab.bench(
    "race",
    points(torch.bfloat16, [1024, 2048, 4096, 8192]),
    race_providers,
    limit="copy",
    work=BACKWARD,
    limit_work=FORWARD,
)
lab.plot(race, "Backward, with a lock and without, bfloat16", share=True)

# %%

# Reading
share = {
    (name, n): 100 * race.share(name, columns=n)
    for name in ("one tile a program", "lock, looping", "partial sums")
    for n in (1024, 4096)
}
slower = race.milliseconds_at("one tile a program", columns=4096)
slower /= race.milliseconds_at("partial sums", columns=4096)
lab.read(
    f"Taking the lock after every tile reaches {share['one tile a program', 1024]:.0f} % of the "
    f"speed of a copy at 1,024 columns and {share['one tile a program', 4096]:.0f} % at 4,096, "
    f"where it takes {slower:.1f} times as long as partial sums. Taking it once per program "
    f"reaches {share['lock, looping', 1024]:.0f} % and {share['lock, looping', 4096]:.0f} %, and "
    f"partial sums {share['partial sums', 1024]:.0f} % and {share['partial sums', 4096]:.0f} %."
)

# %%
# Most of the cost therefore comes from *how often* the lock is taken, because each time a program
# reads and writes a row of the buffers while the next one waits.
#
# The second criterion is whether two runs agree. Each version runs a hundred times on the same
# input.


def runs_differ():
    x = torch.randn(8192, 2048, device=runtime.DEVICE, dtype=torch.bfloat16)
    w, dy = x[0].clone(), torch.randn_like(x)
    rows = []
    for name, way in {
        "one tile a program": ("lock", 8192),
        "lock, looping": ("lock", None),
        "partial sums": ("partial", None),
    }.items():
        first = gradients(x, w, dy, *way)[1]
        others = [gradients(x, w, dy, *way)[1] for _ in range(99)]
        different = sum(not torch.equal(dw, first) for dw in others)
        largest = max((dw - first).abs().max().item() for dw in others)
        rows.append({"way": name, "runs unlike the first": different})
        rows[-1]["largest difference of dw"] = f"{largest:.1e}"
    return rows


lab.measure("A hundred runs on one input, 8,192 × 2,048", runs_differ)

# %%
# Even a correct lock does not give reproducible results, because the programs add in whatever order
# they arrive. Partial sums are always added in the same order. ``layer_norm`` uses them because
# they are faster *and* reproducible.
#
# Partial sums stay in L2
# -----------------------
#
# One kernel writes the partial sums and the next one reads them. If they stay in the L2 cache in
# between, they cause no traffic to main memory. Each program leaves one row for ``dw`` and one for
# ``db``, at 4 bytes per number. ``x``, ``dy`` and ``dx`` pass through the same cache, but the
# partial sums are written last. The table compares the size of the buffers with that of L2.


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


sizes = lab.measure("The size of the partial sums, bfloat16", buffer_sizes)
sizes

# %%
# By their size, the partial sums should stay in L2. To see when a buffer that was just written is
# still there, we write buffers of growing
# size and add them, once right after writing and once after other data has passed through the
# cache. Each measurement first pauses the GPU while the host queues all the work, so that the cost
# of launching is not measured.


# Measuring
def milliseconds(prepare, run, repeats=20):
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(1_000_000)
        prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


# %%


def cache_experiment():
    other = torch.empty(2**28, device=runtime.DEVICE)
    wanted, table = (torch.float32, torch.float32), []
    for mib in (2, 4, 8, 16, 32, 64, 128, 256):
        sums = torch.empty(2, mib * 2**17 // 8192, 8192, device=runtime.DEVICE)
        row = {"MiB": mib}
        for name, prepare in {
            "GB/s, just written": lambda s=sums: s.fill_(1.0),
            "GB/s, after other data": lambda s=sums: (s.fill_(1.0), other.fill_(1.0)),
        }.items():
            took = milliseconds(prepare, lambda s=sums: _add_buffers(tuple(s), wanted))
            row[name] = round(mib * 2**20 / took / 1e6)
        table.append(row)
    return table


cache = lab.measure("Adding up buffers of growing size", cache_experiment)
cache

# %%

# Reading
nan = float("nan")
rates = {row["MiB"]: row for row in cache.rows}
largest = max((row["MiB"] for row in sizes.rows), default=nan)


def rate(mib, name):
    return rates.get(mib, {}).get(f"GB/s, {name}", nan)


lab.read(
    f"The largest buffers of the first table take {largest:.1f} MiB. At 8 MiB, the kernel that "
    f"adds them reads {rate(8, 'just written'):,.0f} GB/s right after writing, and "
    f"{rate(8, 'after other data'):,.0f} GB/s after other data has pushed the buffers out. "
    f"At 256 MiB, more than any L2 holds, the two rates are {rate(256, 'just written'):,.0f} and "
    f"{rate(256, 'after other data'):,.0f} GB/s."
)

# %%
# Where the two columns differ, at least a part of the buffers was still in the cache. Where they
# agree, the buffers were too large for it. At small sizes both rates are low, because the kernel is
# too short to reach full speed: right after writing, it takes hardly longer for 8 MiB than for 2.
#
# How fast is it?
# ---------------
#
# The yardstick is a copy, because no kernel can move the bytes faster than that. We begin with the
# ladder of forward kernels: the loop that reads three times, one program per row whatever its
# length, and the public function, which chooses among the kernels above. The baseline is PyTorch's
# single operations.


# Measuring
def one_program(x, w, b):
    n_rows, n_cols = x.shape
    if n_cols > 32768:
        return lab.Absent("a row of 65,536 leaves one program no registers")
    y, warps = torch.empty_like(x), max(1, n_cols // 2048)
    mean, rstd = torch.empty(2, n_rows, device=x.device)
    kernel = row_fwd_kernel[(n_rows,)]
    tensors, numbers = (x, w, b, y, mean, rstd), (n_cols, n_rows, n_cols, 1e-5)
    return lambda: kernel(*tensors, *numbers, 1, n_cols, num_warps=warps)


def ladder_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w, b, y = x[0].clone(), x[1].clone(), torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "simple_layer_norm": lambda: simple_layer_norm(x, w, b),
        "loop": lambda: _forward(x, w, b, 1e-5, looping=True),
        "one program": one_program(x, w, b),
        "Kernel Book": lambda: layer_norm(x, columns, w, b),
    }


# %%

COLUMNS = [1024, 4096, 8192, 16384, 32768, 65536]
ladder = lab.bench(
    "ladder",
    points(torch.bfloat16, COLUMNS),
    ladder_providers,
    limit="copy",
    work=FORWARD,
)
lab.plot(ladder, "Every version, forward, bfloat16", share=True)

# %%

# Reading
share = {
    (name, n): 100 * ladder.share(name, columns=n)
    for name in ("simple_layer_norm", "loop", "one program", "Kernel Book")
    for n in COLUMNS
}
lab.read(
    f"At 4,096 columns PyTorch's single operations reach {share['simple_layer_norm', 4096]:.0f} % "
    f"of a copy, the loop {share['loop', 4096]:.0f} % and whole rows "
    f"{share['Kernel Book', 4096]:.0f} %. At 32,768 the loop reaches {share['loop', 32768]:.0f} %, "
    f"a widened row {share['one program', 32768]:.0f} %, and a packed one "
    f"{share['Kernel Book', 32768]:.0f} %. At 65,536 the packed row reaches "
    f"{share['Kernel Book', 65536]:.0f} %, and the loop {share['loop', 65536]:.0f} %."
)

# %%
# The loop is slow at both ends of the plot, probably for different reasons. It always uses eight
# warps, so at 1,024 columns a thread has only four elements of a row and little to do between the
# sums across warps. The longest rows are too large to stay in a cache between the passes. We did
# not measure either cause by itself.
#
# At 65,536 columns the packed kernel is well below its own speed on shorter rows. It uses 1,024
# threads of 64 registers, which is every register of an SM. Only one program then fits, and nothing
# loads while it computes. The chapter on :doc:`softmax </chapters/softmax>` splits such a row and
# stays closer to a copy. Layer norm was slower when split at this length, as the comments beside
# its configurations record. One difference is known: every program here also loads a weight and a
# bias. How much of the gap that explains, we did not measure.
#
# Next come the libraries.


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

lab.plot(forward, "Forward, float32", share=True, where={"dtype": "float32"})

# %%

# Reading
PEERS = ("PyTorch", "torch.compile", "Liger", "quack")


def best_peer(sweep, **where):
    found = {name: sweep.share(name, **where) for name in PEERS}
    found = {name: value for name, value in found.items() if value == value}
    return max(found.items(), key=lambda item: item[1], default=("none", nan))


def summary(sweep):
    for dtype in ("bfloat16", "float32"):
        ours = [sweep.share("Kernel Book", dtype=dtype, columns=n) for n in COLUMNS]
        worst = min(ours)
        at = COLUMNS[ours.index(worst)]
        name, peer = best_peer(sweep, dtype=dtype, columns=at)
        yield (
            f"In {dtype} the kernel reaches {100 * worst:.0f} % to {100 * max(ours):.0f} % of a "
            f"copy. It is slowest at {at:,} columns, where the fastest library, {name}, reaches "
            f"{100 * peer:.0f} %."
        )


lab.read(" ".join(summary(forward)))

# %%
# One point stands out in the plots: quack at 16,384 columns in bfloat16, far below its neighbours
# on either side. This is what the installed version of that library did on the recorded machine; we
# did not look for the cause.
#
# The backward pass moves three arrays instead of two.


# Measuring
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

lab.plot(backward, "Backward, float32", share=True, where={"dtype": "float32"})

# %%

# Reading
lab.read(" ".join(summary(backward)))

# %%
# The compiler's report helps to read these plots. A value that finds no register :term:`spills
# <spill>`: it is written to memory and read back, in these kernels once per row.


def launch(columns, dtype):
    x = torch.randn(
        512, columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True
    )
    w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    return lambda: layer_norm(x, columns, w, w).sum().backward()


lab.facts(
    "What the compiler made of the kernels",
    {
        f"{columns:,} columns, {str(dtype).removeprefix('torch.')}": (
            lambda columns=columns, dtype=dtype: launch(columns, dtype)()
        )
        for columns in (1024, 8192, 16384, 65536)
        for dtype in DTYPES
    },
)

# %%
# The table explains part of the backward plots, too. At 32,768 columns and above, and in float32
# from 16,384, several programs share a row. A thread of their kernel holds parts of three rows and
# takes up to 255 registers, which is the most a thread can have. Few warps then fit on an SM, so
# few loads are in flight at a time. How much of the gap to a copy is due to this, to the exchange
# or to the spills, we did not measure.
#
# Small inputs
# ------------
#
# In a small network, this kernel is slower than PyTorch's although its plots above are better,
# because the host has to *start* every kernel. A forward and a backward pass here are three
# :term:`launches <launch>` from Python. Around them the host checks the arguments, allocates the
# results and runs autograd, and all of this takes the same time whatever the size of the input. A
# CUDA graph records the launches once and replays them without that work. For small inputs, where
# the GPU waits for the host, the difference between the two measurements is nearly all host time;
# for large ones host and GPU work at the same time, and the difference understates it.


# Measuring
def passes(operator, x, w, b, dy):
    y = operator(x, (x.shape[1],), w, b)
    return torch.autograd.grad(y, (x, w, b), dy)


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


def launch_experiment():
    rows = []
    for n_rows in (16, 128, 1024, 8192, 32768):
        x, w, b = (
            torch.randn(size, device=runtime.DEVICE, requires_grad=True)
            for size in ((n_rows, 1024), 1024, 1024)
        )
        dy = torch.randn_like(x)
        row = {"rows": n_rows}
        for name, operator in (("PyTorch", F.layer_norm), ("Kernel Book", layer_norm)):

            def run(operator=operator, x=x, w=w, b=b, dy=dy):
                return passes(operator, x, w, b, dy)

            row[f"{name}, µs"] = round(microseconds(run), 1)
            row[f"{name} in a graph, µs"] = round(microseconds(recorded_graph(run)), 1)
        rows.append(row)
    return rows


small = lab.measure("Forward and backward of 1,024 columns, float32", launch_experiment)
small

# %%

# Reading
few, many = (small.rows[0], small.rows[-1]) if small.rows else ({}, {})
called, alone = "Kernel Book, µs", "Kernel Book in a graph, µs"
lab.read(
    f"With 16 rows both passes together take {few.get(called, nan):.0f} µs when called, and "
    f"{few.get(alone, nan):.0f} µs in a graph: the rest is the host. PyTorch, called from C++, "
    f"takes {few.get('PyTorch, µs', nan):.0f} µs. With 32,768 rows the two ways still take "
    f"{many.get(called, nan):.0f} and {many.get(alone, nan):.0f} µs."
)

# %%
# Even 32,768 rows do not hide the host: a call still takes longer than the graph, because the GPU
# finishes before the host has prepared the next launches. PyTorch's two columns meet there, because
# its kernels take longer and its host code is faster.
#
# Benchmarks on large inputs show what a kernel can do. End to end, small inputs wait for the host.
# A CUDA graph helps, and so does doing more work per launch. The last table shows how long the host
# is busy with one call. That time covers checks, allocations and autograd as well as the launches,
# as :doc:`/hardware` explains.

x = torch.randn(64, 1024, device=runtime.DEVICE)
lab.host_times(
    {
        "Kernel Book": lambda x, w, b: layer_norm(x, 1024, w, b),
        "PyTorch": lambda x, w, b: F.layer_norm(x, (1024,), w, b),
    },
    x,
    *torch.randn(2, 1024, device=runtime.DEVICE),
)

# %%
# What breaks it
# --------------
#
# We have already seen two mistakes that do not crash: leaving out ``tl.where``, and computing the
# variance as a difference of two means. Here are three more.
#
# **The lock orders nothing.** This kernel adds rows to one buffer. With ``ORDERED`` off, it
# leaves out the barriers and replaces ``acquire`` and ``release`` by ``relaxed``, which orders
# nothing. The rows hold small integers, so their sum is exact in any order, and any difference
# means that an addition was lost.


@triton.jit
def locked_sum_kernel(
    x_ptr, sum_ptr, lock_ptr, BLOCK_COLS: tl.constexpr, ORDERED: tl.constexpr
):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_COLS + cols)
    if ORDERED:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") != 0:
            pass
        tl.debug_barrier()
    else:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="relaxed") != 0:
            pass
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    if ORDERED:
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0, sem="release")
    else:
        tl.atomic_xchg(lock_ptr, 0, sem="relaxed")


# %%


def locked_sum(x, ordered):
    total, lock = torch.zeros_like(x[0]), torch.zeros(1, dtype=torch.int32).to(x.device)
    grid = (len(x),)
    compiled = locked_sum_kernel[grid](x, total, lock, x.shape[1], ordered, num_warps=8)
    return total, compiled


x = torch.randint(-8, 9, (10, 256), device=runtime.DEVICE).float()
assert torch.equal(locked_sum(x, ordered=True)[0], x.sum(0))


def lost_additions():
    x = torch.randint(-8, 9, (500, 4096), device=runtime.DEVICE).float()
    rows = []
    for name, ordered in {"ordered": True, "not ordered": False}.items():
        totals = [locked_sum(x, ordered)[0] for _ in range(100)]
        wrong = sum(not torch.equal(total, x.sum(0)) for total in totals)
        rows.append({"lock": name, "wrong runs of 100": wrong})
    return rows


lab.measure("A sum of 500 rows under one lock", lost_additions)

# %%
# The compiled code shows what has changed. These are the instructions of PTX, NVIDIA's assembly
# language, that access memory or wait, from the one that takes the lock to the one that frees it.


def instructions():
    x = torch.ones(1, 4096, device=runtime.DEVICE)
    rows = []
    for name, ordered in {"ordered": True, "not ordered": False}.items():
        lines = locked_sum(x, ordered)[1].asm["ptx"].splitlines()
        found = [word for line in lines for word in line.split() if "." in word]
        kinds = ("atom.", "bar.sync", "ld.global", "st.global")
        found = [word for word in found if word.startswith(kinds)]
        while found and not found[0].startswith("atom."):
            found.pop(0)
        kept = [
            w for w, before in zip(found, ["", *found], strict=False) if w != before
        ]
        rows += [{"lock": name, "instruction": word} for word in kept]
    return rows


lab.measure("The lock in PTX", instructions)

# %%
# The kernel without order has lost both kinds of protection at once: the barrier before the
# exchange is gone, and the two atomics no longer order memory. (The barrier that remains is the
# compiler's own.) The experiment therefore shows that the protection is needed, and not which half
# of it lost the additions.
#
# **The partial sums are kept in 16 bits.** A growing sum runs out of digits: once it is large
# enough, adding the next term no longer changes it.

ones = torch.ones(5000, 4, device=runtime.DEVICE)
rows = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    total = torch.zeros(4, device=runtime.DEVICE, dtype=dtype)
    for row in ones.to(dtype):
        total += row
    rows.append(
        {
            "sums kept in": str(dtype).removeprefix("torch."),
            "db": f"{total[0].item():,.0f}",
        }
    )
lab.table(rows, "db of 5,000 rows with dy = 1")

# %%
# **The variance is divided by N - 1.** This is what ``torch.var`` does by default. In long rows the
# difference is too small to notice; in short rows it changes the result.

x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=runtime.DEVICE)
deviation = x - x.mean()


def listed(row):
    return ", ".join(f"{value:.3f}" for value in row)


lab.table(
    [
        {"version": "layer_norm", "result": listed(layer_norm(x, 4)[0])},
        {
            "version": "with x.var()",
            "result": listed((deviation / (x.var() + 1e-5).sqrt())[0]),
        },
    ],
    "The row (1, 2, 3, 4)",
)

# %%
# Exercises
# ---------
#
# **1. RMS norm.** Leave out the mean: :math:`y_j = x_j\, w_j / \sqrt{\tfrac{1}{N} \sum x_k^2 +
# \epsilon}`. Which of ``c1`` and ``c2`` is left in its gradient? Write the forward kernel, and the
# one for ``dx``.

# %%

# Solution: RMS norm


@triton.jit
def rms_fwd_kernel(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n_cols)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)  # no tl.where: 0 * 0 is 0
    tl.store(y_ptr + row * n_cols + cols, x * rstd * w, mask=cols < n_cols)


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


# %%

# Solution: RMS norm, checked
x, dy = torch.randn(2, 6, 300, device=runtime.DEVICE)
w = torch.randn(300, device=runtime.DEVICE)
y, dx = torch.empty_like(x), torch.empty_like(x)
rms_fwd_kernel[(6,)](x, w, y, 300, 1e-5, 512)
rms_bwd_kernel[(6,)](x, w, dy, dx, 300, 1e-5, 512)


def rms_in_torch(x, w, dy):
    x = x.clone().requires_grad_()
    y = F.rms_norm(x, (300,), w, 1e-5)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


theirs = rms_in_torch(x, w, dy)
truths = rms_in_torch(x.double(), w.double(), dy.double())
lab.check(
    "RMS norm",
    [
        lab.Case("(6, 300)", name, ours, their, truth, factor=4)
        for name, ours, their, truth in zip(
            ("forward", "dx"), (y, dx), theirs, truths, strict=True
        )
    ],
)

# %%
# **2. A fused residual.** Networks add the input of a block to its output and normalise the sum.
# Write one kernel that reads both, writes the sum, because it is needed again, and writes the layer
# norm of the sum. How many bytes does it save?

# %%

# Solution: a fused residual
#
# Separately, the addition reads 2 and writes 1, and layer norm reads 1 and writes 1: 5 in all.
# Fused, the kernel reads 2 and writes 2: 4 in all. This saves a fifth of the bytes, and a launch.


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


# %%

# Solution: a fused residual, checked
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
# sum of squared deviations. Compute the mean and the variance of a row with *one* ``tl.reduce``
# over such triples. Every element enters as :math:`(1, x_j, 0)`, and an element past the end as
# :math:`(0, 0, 0)`. Each merge rounds a few times, and the interpreter merges one element after
# another, so allow 16 times PyTorch's error.

# %%

# Solution: one reduction


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
# - Welford. *Note on a method for calculating corrected sums of squares and products.*
#   Technometrics 4, 1962.
# - Zhang, Sennrich. *Root mean square layer normalization.* NeurIPS 2019.
# - Lustig, Sahasrabuddhe, Giroux. *A formal analysis of the NVIDIA PTX memory consistency model.*
#   ASPLOS 2019.

reached = {
    name: [sweep.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS]
    for name, sweep in {"forward": forward, "backward": backward}.items()
}
lab.finish(
    f"{min(reached['forward']):.0%} to {max(reached['forward']):.0%} of the speed of a copy "
    f"forward, {min(reached['backward']):.0%} to {max(reached['backward']):.0%} backward"
)
