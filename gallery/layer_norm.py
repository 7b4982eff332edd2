"""
Layer norm without a lock
=========================

Every row of a batch adds its share to the gradient of the same weight. *How do thousands of
programs add to one place without a race, and without waiting for each other?*

You will learn

- how the gradient of layer norm comes down to two means per row, ``c1`` and ``c2``, and where
  epsilon goes;
- what a lock must order besides itself, and what it costs in time and in reproducibility;
- how partial sums per program make the gradient faster, and the same in every run.

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
# Layer norm shifts and scales each row so that its mean is 0 and its variance 1. Then it applies a
# weight and a bias, which all rows share.


def simple_layer_norm(x, w, b, eps=1e-5):
    mean = x.mean(dim=-1, keepdim=True)
    deviation = x - mean
    variance = (deviation * deviation).mean(dim=-1, keepdim=True)
    rstd = (variance + eps).rsqrt()
    return deviation * rstd * w + b


# %%
# What does it cost? Each operation reads its input from memory and writes its output back. For a
# row of :math:`N` elements, leaving out what is small:
#
# - the mean reads :math:`N`;
# - the difference reads :math:`N` and writes :math:`N`, and so does the square;
# - the mean of the squares reads :math:`N`;
# - the two products and the sum read and write :math:`N` each.
#
# That is 7 reads and 5 writes, where one read and one write would do. So one kernel should do it
# all.
#
# Backward reads ``x`` and ``dy`` and writes ``dx``: three times :math:`N` for each row at the
# least. It also needs the mean and ``rstd``, the reciprocal of the standard deviation. Why keep
# them from the forward pass? They are 8 bytes a row, and to compute them again takes two sums over
# the row before anything else can start.
#
# The idea
# --------
#
# Where is the difficulty? The sums of layer norm go in two directions. The mean and the variance
# are sums *along a row*. A program that owns the row does them alone. But the gradient of the
# weight is a sum *down the columns*: every row adds to it, and the rows belong to different
# programs.
#
# .. image:: /figures/layer-norm-partials.svg
#    :alt: Six rows of x and dy and three programs. Program 0 takes rows 0 and 3, program 1 rows 1
#          and 4, program 2 rows 2 and 5. Each keeps its sums in registers and leaves one row of
#          sums. A second kernel adds up the three rows to dw and db.
#
# There are two ways out. Programs can take turns to add to a shared buffer, under a *lock*. Or each
# program adds up its own rows and leaves a *partial sum*, and a second kernel adds those up. We
# build both and let them race.
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
# In the code :math:`r` is ``rstd`` and :math:`\hat{x}` is ``xhat``. The variance needs the mean
# first. There is a formula that does not: the mean of the squares minus the square of the mean.
# Why not use that? Let us try it on rows whose mean is large.

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
# The squares of large numbers have no digits left for a small variance. Their difference may even
# be negative, and then its root is not a number. So the kernels always take the mean first.
#
# **Backward, step by step.** Let :math:`dy` be the gradient that arrives. We want what each input
# adds to the loss. We go from :math:`y` back to :math:`x`, and check each step against numbers:
# PyTorch computes every Jacobian in float64 by automatic differentiation.
#
# *Step 1.* Weight and bias act on each element alone. So
#
# .. math::
#
#    \begin{aligned}
#    db_j &= dy_j \\
#    dw_j &= dy_j\, \hat{x}_j \\
#    d\hat{x}_j &= w_j\, dy_j
#    \end{aligned}
#
# where the first two are summed over all rows. The last is called ``wdy`` in the code.
#
# *Step 2.* The deviation :math:`d = x - m \mathbf{1}` is linear in :math:`x`. As a matrix, with
# :math:`\mathbf{1}` the column of ones:
#
# .. math::
#
#    d = P x, \qquad P = I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#
# *Step 3.* Now :math:`r = (d^\top d / N + \epsilon)^{-1/2}`. By the chain rule
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
# This is the place where epsilon enters the derivative. It is inside :math:`r`, and the power
# :math:`-3/2` is just :math:`r^3`. Nothing is dropped.
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
# because :math:`r\, d` is :math:`\hat{x}`, and it appears twice.
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
# In the last step :math:`\hat{x}^\top P = \hat{x}^\top`: the elements of :math:`\hat{x}` sum to
# zero, so taking their mean away changes nothing.
#
# *Step 6.* The matrix :math:`J` is symmetric, so :math:`dx = J^\top d\hat{x} = J\, d\hat{x}`. We
# never build it. A product with :math:`\mathbf{1} \mathbf{1}^\top / N` is a mean, and so is one
# with :math:`\hat{x} \hat{x}^\top / N`:
#
# .. math::
#
#    \begin{aligned}
#    c_1 &= \tfrac{1}{N} \sum_j \hat{x}_j\, w_j\, dy_j \\
#    c_2 &= \tfrac{1}{N} \sum_j w_j\, dy_j \\
#    dx_j &= \big( w_j\, dy_j - (\hat{x}_j\, c_1 + c_2) \big)\, r
#    \end{aligned}
#
# Two means over the row, and then each element by itself. Here are the steps in numbers. Epsilon is
# as large as the variance, so that a step that lost it would show.

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
# Does epsilon matter, then? It does if it is dropped. One way to drop it is to divide by the plain
# standard deviation in backward only. Another is to say that :math:`\hat{x}` has variance 1: with
# epsilon it has a little less. Here is how far ``dx`` is off then, for rows of small variance.

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
# One more check, of everything at once. ``gradcheck`` compares a gradient with finite differences:
# it moves each input a little and watches the output.


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
# **Whole rows on chip.** A program loads some rows, whole.

lab.source(row_fwd_kernel, "load")

# %%
# Then come the statistics. How often is ``x`` read? The mean needs it, the variance needs it, and
# the result needs it: three passes. But a pass over registers is no pass over memory. The row was
# read once. Written as a loop over blocks, each of the three loops would run exactly once.

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
# Most of it is in a function of its own, because wide rows will need it as well.

lab.source(moments)

# %%
# What is the correction for? Floating-point addition rounds, so the mean that is made of a sum is
# off in its last digits. That is harmless while the numbers lie around zero, because the error is
# small beside their spread. It is not harmless for numbers that are nearly equal and far from zero:
# then the error of the mean is as large as the deviations, and dividing by their small spread
# enlarges it. The cure costs one more sum. Deviations from the true mean add up to zero; if ours
# add up to something else, the mean was off by that sum over N. The variance loses the square of
# the correction, because the deviations were measured from the uncorrected mean.
#
# A row of 1,000 equal numbers has no deviation at all, so its result has to be 0.

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
# Short rows need one more precaution. In a row that is no longer than a warp has lanes, a lane
# holds one number, and its square would go straight into the sum of two lanes: the compiler makes
# one instruction of both, a fused multiply-add that does not round the product. One lane fuses its
# own square, the other fuses *its* own, and their sums differ in the last bit. Which of the two is
# then stored as ``rstd`` is a race. ``square`` rounds before anything is added.

lab.source(square)

# %%
# Why ``tl.where`` in ``moments``? The block is a power of two, and the row may be shorter. The
# places past the end hold zeros, which is fine for the mean. But their *deviation* is not zero: it
# is minus the mean, and its square would be added for every such place. Leave it out, and see.


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
# With 1,024 columns nothing is wrong, and that is how the mistake survives a careless test. It also
# hides when the mean is zero, as it is in most random tests.
#
# The next piece writes the result. Weight and bias may be absent; the compiler then leaves their
# lines out.

lab.source(row_fwd_kernel, "write")

# %%
# Is that all? Not for *far rows*. Squares of numbers above :math:`10^{19}` overflow float32; the
# variance is then infinite, ``rstd`` is 0, and so is the whole row, without a word. So a row whose
# sum of squares is infinite is read once more, and its deviations are multiplied by a small power
# of two before they are squared.

lab.source(far_rstd)

# %%
# Why does the kernel ask so late, when it has already written a wrong result? The rows of a program
# may lie in different warps, and an ``if`` is for the whole program, so the warps meet at a barrier
# to agree on the answer. In the middle of the kernel every row would pay for that. At its end
# nothing is left that could have been done meanwhile.

lab.source(row_fwd_kernel, "far")

# %%
# **In a loop.** A row of any length can be read in blocks, three times. This is the kernel that
# needs the three passes.

lab.source(loop_fwd_kernel)

# %%
# **Packed.** A row of 16,384 columns, widened to float32, takes a quarter of a multiprocessor's
# registers. Few programs fit then, and while they compute nobody loads. But 16-bit numbers come in
# pairs, and a pair is one register. So a longer row stays packed, in four pieces, and is widened
# for one step at a time.

lab.source(packed_row_fwd_kernel, "load")

# %%
# What about weight and bias? Together they would take twice as many registers as the row. So the
# last step goes piece by piece. A barrier keeps the compiler from loading all pieces first.

lab.source(packed_row_fwd_kernel, "write")

# %%
# **Split.** A longer row still, or one of float32, would fill a multiprocessor's registers, or
# nearly so. So several programs share it. Each computes the mean and the
# sum of squared deviations of its part. How are two such pairs merged? Let part :math:`i` have
# :math:`n_i` elements, mean :math:`m_i` and :math:`M_i = \sum (x - m_i)^2`. The mean of the row is
# :math:`m = \sum_i n_i m_i / N`. For the elements of one part
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
# the formula of Chan, Golub and LeVeque. No large squares are subtracted.

lab.source(merge_moments)

# %%
# Why does the kernel add up how far the means are from a *pivot*, the mean of the first part, and
# not the means themselves? Because a sum of large means would lose the digits in which they differ.
#
# The programs of a row tell each other their pairs by the exchange that the chapter on
# :doc:`softmax </chapters/softmax>` explains: publish, wait, collect. If the neighbours do not
# come, a program computes their pairs itself, which is slow, and right as well.

lab.source(split_fwd_kernel, "collect")

# %%
# Weight and bias, read again for every row, are as many bytes as ``x`` and ``y``. They come from a
# cache, but even a cache has a limit. A part of a row needs a part of them only, and so a program
# can take its part of *two* rows and read them once for both.

lab.source(split_fwd_kernel, "write")

# %%
# The backward kernel
# -------------------
#
# How many programs should there be? One for each row would leave as many partial sums as there are
# rows: as much memory as ``x`` itself. So few programs, as many as run at once, loop over the rows.
# Their sums for ``dw`` and ``db`` live in registers all the time, in float32.

lab.source(row_bwd_kernel, "begin")

# %%
# Where is the mask for the sums? It is not needed. Outside, ``dy`` is loaded as zero, so both terms
# are zero. What is ``num_stages``? While the program works on one row, the loads of the next ones
# are under way into shared memory. Most kernels leave that to other programs on the same
# multiprocessor. Here one or two programs fill it with their sums.

lab.source(row_bwd_kernel, "add")

# %%
# The gradient of ``x`` is the formula of step 6, with its names.

lab.source(row_bwd_kernel, "row")

# %%
# At the end, a program has one row of sums to hand over.

lab.source(row_bwd_kernel, "end")

# %%
# **Partial sums.** Each program stores its row in a buffer of its own. The second kernel adds up
# the buffers: a program takes some columns, and goes down the rows in a fixed order. Nobody waits.

lab.source(sum_of_buffers)

# %%
# **The lock.** Here programs share a few buffers, and add to them in turn. The lock is an integer:
# 0 is free, 1 is taken. An atomic compare-and-swap looks at it and takes it in one step, so only
# one program can succeed.

lab.source(hand_over, "acquire")

# %%
# Is that enough? The lock says whose turn it is. It says nothing yet about *memory*. A store is
# not seen by others at once: it may linger in a queue, and a load may be answered by an old line of
# a cache. And a program is many threads. One of them takes the lock. What holds back the others?
#
# .. image:: /figures/layer-norm-lock.svg
#    :alt: Program A takes the lock with acquire, passes a barrier, its threads load and store, it
#          passes a second barrier and gives the lock back with release. Program B tries in vain
#          until then. It takes the lock, passes a barrier, and its threads load what A stored.
#
# Four things have to be ordered, and each has its own tool:
#
# 1. *My loads come after I have the lock.* The swap has ``acquire`` semantics: what its thread
#    does later is not done earlier, and does not see caches from before.
# 2. *The loads of my other threads, too.* They meet the first thread at a barrier.
# 3. *All my stores come before I give the lock back.* A second barrier: no thread passes it before
#    all have stored.
# 4. *Others see those stores when they see the lock free.* The exchange has ``release`` semantics,
#    and it speaks for all that its thread has seen at the barrier, not only for its own stores.
#
# A release that is read by an acquire makes everything before the one visible to everything after
# the other. Leave out a barrier, and it holds for one thread of each program.

lab.source(hand_over, "add")

# %%

lab.source(hand_over, "release")

# %%
# What is *not* ordered is who comes first. Floating-point addition depends on the order, so the
# last bits differ from run to run.
#
# **Wide rows.** The sums of a row of 16,384 columns fill half of a multiprocessor's registers. In
# 16 bits the row fits beside them if it stays packed, and there is one program to a multiprocessor.
#
# Any wider, and programs share a row, as in forward. A group of them exchanges what each part adds
# to ``c1`` and ``c2``: two float32 numbers, again one slot of 64 bits.

lab.source(split_bwd_kernel, "publish")

# %%
# Now it would have to wait for its neighbours, whose numbers come by way of L2. A program does
# something else meanwhile. It asks for its part of the next row.

lab.source(split_bwd_kernel, "ahead")

# %%
# And then it does not collect the numbers of this row at all, but those of the row *before*. All
# parts had a whole turn of the loop to publish those, so they are there already. Three rows are
# under way at any time: one is being loaded, one is published, and one is finished. The price is
# registers, in which ``x`` and ``dy`` of a row stay a turn longer.

lab.source(split_bwd_kernel, "collect")

# %%
# Autograd sees one function. It computes those gradients only that somebody needs. If gradients of
# gradients are wanted, which is rare, PyTorch's own operations compute them. The kernels stand
# behind an operator of PyTorch's dispatcher, so that ``torch.compile`` finds one node here and does
# not look inside.

lab.source(gradient)

# %%
# Is it right?
# ------------
#
# Output and gradients are checked against float64, with weight and bias of the dtype of ``x``. In
# float32, ``y`` and ``dx`` may err four times as much as PyTorch's, because the hardware's
# reciprocal root errs by two units. ``dw`` and ``db`` may err eight times as much: a sum over many
# rows errs by a few units that depend on its order.


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
# And the lock? It is no public function, so we call what lies below.


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
# Now the race. Three versions compute the same gradients. "One tile a program" takes the lock after
# each tile, as it is usually taught: a row or, when rows are short, two. "Lock, looping" adds up
# its rows first, and takes the lock once. "Partial sums" has no lock.


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
    f"With one tile a program the lock reaches {share['one tile a program', 1024]:.0f} % of a "
    f"copy at 1,024 columns and {share['one tile a program', 4096]:.0f} % at 4,096. There it takes "
    f"{slower:.1f} times as long as partial sums. Looping first gives "
    f"{share['lock, looping', 1024]:.0f} % and {share['lock, looping', 4096]:.0f} %, partial sums "
    f"{share['partial sums', 1024]:.0f} % and {share['partial sums', 4096]:.0f} %."
)

# %%
# So most of the price is paid for *how often* the lock is taken. Each time, a program reads and
# writes a row of the buffers, and the next one waits for it. The second question is whether two
# runs agree. Each version runs a hundred times on the same input.


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
# A lock that works is still not reproducible. Partial sums are, because each addition has its
# place. That is why ``layer_norm`` uses them.
#
# Do the partial sums stay in L2?
# -------------------------------
#
# The partial sums are written by one kernel and read by the next. If they stay in the L2 cache, the
# memory never feels them. How large are they? Each program leaves one row for ``dw`` and one for
# ``db``, 4 bytes a number. What goes through the cache meanwhile is ``x``, ``dy`` and ``dx``, but
# the sums are written last.


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
# By size they should stay. Let us measure. We write buffers of growing size and add them up, once
# at once, and once after other data has gone through the cache. A pause keeps the GPU waiting
# while the host queues everything, so that launches are not measured.


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
    f"The largest sums of the table take {largest:.1f} MiB. At 8 MiB, adding up runs at "
    f"{rate(8, 'just written'):,.0f} GB/s right after writing, and at "
    f"{rate(8, 'after other data'):,.0f} GB/s when other data has pushed the buffers out. "
    f"At 256 MiB, more than any L2 holds, the two are {rate(256, 'just written'):,.0f} and "
    f"{rate(256, 'after other data'):,.0f} GB/s."
)

# %%
# Where the two columns differ, the buffers were still in the cache. Where they meet, the buffers
# did not fit.
#
# How fast is it?
# ---------------
#
# The limit is a copy. First the ladder of forward: the loop that reads three times, one program a
# row whatever its length, and the public function.


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
# Now against the libraries.


# Measuring
def liger(x, w, b):
    return lab.peer(
        "liger_kernel.ops.layer_norm",
        lambda ops: lambda: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
    )


def quack(x, w, b):
    w, b = w.float(), b.float()  # it takes parameters in float32 alone
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
# Backward moves three arrays instead of two.


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
# What did the compiler make of the kernels? A number that finds no register *spills*: it makes a
# trip to memory, and here one for every row.


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
# Small inputs
# ------------
#
# Why is a kernel with such figures no faster than PyTorch in a small network? Because the host has
# to *start* it. A forward and a backward pass here are three launches, called from Python, and
# each costs microseconds on the host whatever the kernel does. A CUDA graph records launches once
# and replays them without the host. So the difference is the cost of launching.


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
    f"With 16 rows both passes take {few.get(called, nan):.0f} µs when they are called, and "
    f"{few.get(alone, nan):.0f} µs in a graph: the rest is the host. PyTorch, called from C++, "
    f"takes {few.get('PyTorch, µs', nan):.0f} µs. With 32,768 rows the GPU has enough to do, and "
    f"the two ways take {many.get(called, nan):.0f} and {many.get(alone, nan):.0f} µs."
)

# %%
# A benchmark of large inputs says what the kernel can do. End to end, small inputs wait for the
# host. A graph helps, and so does doing more in one launch. How long is the host busy with a call?
# :doc:`/hardware` says what with.

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
# ``tl.where`` and the difference of two means were two mistakes that do not crash. Here are three
# more.
#
# **The lock is released too early.** This kernel adds rows to one buffer. It can leave out the
# barriers and the ``release``. The rows hold small integers, so their sum is exact in any order:
# whatever is off was lost.


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
# What makes the difference, in the machine's own words? These are the instructions that touch
# memory or wait, from the one that takes the lock to the one that gives it back.


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
# **The partial sums are kept in 16 bits.** A sum of many rows outgrows its digits: the next term is
# too small to change it.

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
# **The variance is divided by N - 1.** That is what ``torch.var`` does unless it is told otherwise.
# For long rows nobody notices. For short ones the result is another.

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
# \epsilon}`. Which of ``c1`` and ``c2`` is left in its gradient? Write forward, and ``dx``.

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
# **2. A fused residual.** Networks add the input of a block to its output, and normalise the sum.
# Write one kernel that reads both, writes the sum, which is needed again, and writes its layer
# norm. How many bytes does it save?

# %%

# Solution: a fused residual
#
# Apart: the addition reads 2 and writes 1, layer norm reads 1 and writes 1, in all 5. Fused: reads
# 2 and writes 2, in all 4. A fifth of the bytes, and a launch, are saved.


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
# squared deviations. Write mean and variance of a row as *one* ``tl.reduce`` over such triples.
# Every element enters as :math:`(1, x_j, 0)`, and a place past the end as :math:`(0, 0, 0)`. Each
# merge rounds a few times, and the interpreter merges one element after the other: allow 16 times
# PyTorch's error.

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
