"""
Layer norm backward, without a lock
===================================

In the backward pass of layer norm, every row of a batch adds to the gradient of the same weight.
*How do hundreds of programs add to one array without a race, and without waiting for each other?*

You will learn

- how the gradient of layer norm comes down to two means per row, ``c1`` and ``c2``;
- what a lock has to order besides its own variable, and what it costs;
- how partial sums, one per program, make the gradient faster, and the same in every run on one GPU.
"""

# sphinx_gallery_thumbnail_number = 1
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
    row_bwd_kernel,
    split_bwd_kernel,
)
from kernelbook.ops.layer_norm.forward import _forward
from kernelbook.ops.layer_norm.operator import gradient
from kernelbook.ops.layer_norm.sums import hand_over, sum_of_buffers
from kernelbook.small.layer_norm_backward import (
    add_kernel,
    lock_kernel,
    partial_kernel,
    sum_my_rows,
    with_lock,
    without_lock,
)

lab.start("layer_norm_backward", "kernelbook.ops.layer_norm")

# %%
# The problem in PyTorch
# ----------------------
#
# Layer norm computes :math:`y_j = \hat{x}_j w_j + b_j`, where :math:`\hat{x}` is the row shifted to
# mean 0 and scaled to variance 1. Its backward pass is given ``dy``, the gradient of ``y``, and
# computes those of ``x``, the weight and the bias. The forward pass has stored ``mean`` and
# ``rstd``, the reciprocal of the standard deviation.


def simple_backward(x, w, mean, rstd, dy):
    xhat = (x - mean) * rstd
    wdy = w * dy
    c1 = (xhat * wdy).mean(-1, keepdim=True)
    c2 = wdy.mean(-1, keepdim=True)
    dx = (wdy - (xhat * c1 + c2)) * rstd
    return dx, (dy * xhat).sum(0), dy.sum(0)


# %%
# Each operation is a :term:`kernel` of its own. For a row of :math:`N` elements they read
# :math:`16 N` and write :math:`9 N`, where reading ``x`` and ``dy`` and writing ``dx``, :math:`3 N`
# in all, would be enough: 8.3 times fewer bytes.
#
# The idea
# --------
#
# The difficulty is that the backward pass sums in two directions. ``c1`` and ``c2`` are means
# *along a row*, so the :term:`program` that owns the row computes them alone. The gradients of
# weight and bias are sums *down the columns*, to which every row contributes, and the rows belong
# to different programs, which run at the same time and in no fixed order.
#
# A sum stands at 3, and two programs have 3 and 4 to add. If both read it before either stores,
# the one that finishes last wins. This is a *race*:
#
# .. image:: /figures/layer-norm-race.svg
#    :alt: Program A reads 3 from memory, and then program B reads 3. A stores 3 + 3, so that memory
#          holds 6. B stores 3 + 4, and memory holds 7, where it should hold 10.
#
# The obvious remedy is a *lock*, under which programs add one at a time. There is a better one:
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Each program sums its own rows and stores a *partial sum*, and a second kernel adds the
#    partial sums. To add, no program waits for another, and the order of additions never changes.
#
# .. image:: /figures/layer-norm-partials.svg
#    :alt: Six rows of x and dy and three programs. Program 0 takes rows 0 and 3, program 1 rows 1
#          and 4, program 2 rows 2 and 5. Each keeps its sums in registers and leaves one row of
#          sums. A second kernel reads all three and adds them up to dw and db.
#
# The mathematics
# ---------------
#
# Not all of the gradient that arrives at :math:`\hat{x}` reaches :math:`x`. Adding a number to the
# whole row leaves :math:`\hat{x}` as it is, so ``dx`` sums to 0. Scaling the row leaves it as it
# is, too, but for epsilon, so the product of ``dx`` with :math:`\hat{x}` is nearly 0. Two parts are
# therefore taken away: the mean of what arrives, ``c2``, and its part along :math:`\hat{x}`, which
# is :math:`\hat{x}` times a number, ``c1``.
#
# Here is the forward chapter's row of eight, with its mean m and ``rstd`` r, weights of 2 and no
# epsilon. Only its first output has a gradient, 4:


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

lab.table(
    [
        {"column": name}
        | {
            str(j): f"{number + 0.0:g}".replace("-", "−")
            for j, number in enumerate(line.expand(1, 8)[0].tolist())
        }
        | {"of the row": of_row.replace(" ", "\N{NO-BREAK SPACE}")}
        for name, line, of_row in (
            ("x", eight, "m = 3"),
            ("xhat", hat, "r = 0.5"),
            ("wdy", arrives, "arrives"),
            ("less c2", c2_of_eight, f"c2 = {c2_of_eight:g}"),
            ("less xhat * c1", hat * c1_of_eight, f"c1 = −{-c1_of_eight:g}"),
            ("left", remains, f"sum {remains.sum():g}"),
            ("dx", dx_of_eight, "left * r"),
        )
    ],
    "A gradient arrives at the row of eight",
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
    "A nudge confirms the first number of `dx`: with 1.001 in place of the 1 the loss, four times "
    f"the first output because `dy` is 4, grows by {grown:.4f}, {dx_of_eight[0, 0]:.0f} times the "
    "nudge. To the first column of `dw` this row adds `dy * xhat`, "
    f"{(dy_of_eight * hat)[0, 0]:.0f}, and to that of `db` {dy_of_eight[0, 0]:.0f}."
    "".replace("-", "−")
)

# %%
# Now the derivation, for a row :math:`x` with mean :math:`m`, variance :math:`v` and
# :math:`r = 1 / \sqrt{v + \epsilon}`.
#
# *Step 1.* Weight and bias act on each element separately:
#
# .. math::
#
#    \begin{aligned}
#    db_j &= dy_j \\
#    dw_j &= dy_j\, \hat{x}_j \\
#    d\hat{x}_j &= w_j\, dy_j
#    \end{aligned}
#
# The first two are summed over all rows. The code calls the last one ``wdy``.
#
# *Step 2.* The deviation :math:`d = x - m \mathbf{1}`, with :math:`\mathbf{1}` the column of ones,
# is a matrix :math:`P` times :math:`x`:
#
# .. math::
#
#    P = I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#
# *Step 3.* By the chain rule, the derivative of :math:`r = (d^\top d / N + \epsilon)^{-1/2}` with
# respect to :math:`d` is :math:`-r^3 d^\top / N`, in which epsilon stays inside :math:`r`.
#
# .. dropdown:: Step 3: the derivative of ``rstd``
#
#    .. math::
#
#       \begin{aligned}
#       \frac{\partial r}{\partial d}
#       &= -\tfrac{1}{2} \big( \tfrac{1}{N} d^\top d + \epsilon \big)^{-3/2}
#          \cdot \tfrac{2}{N} d^\top \\
#       &= -\tfrac{1}{N}\, r^3\, d^\top
#       \end{aligned}
#
#    Nothing is dropped, because the sum in brackets to the power :math:`-3/2` is just :math:`r^3`.
#
# *Step 4.* By the product rule, the derivative of :math:`\hat{x} = r\, d` has two terms, and
# :math:`r\, d` is :math:`\hat{x}` again:
#
# .. math::
#
#    \frac{\partial \hat{x}}{\partial d} = r I - \tfrac{1}{N}\, r^3\, d\, d^\top
#    = r \big( I - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#
# *Step 5.* Times :math:`P`, this is the Jacobian of :math:`\hat{x}` with respect to :math:`x`. The
# mean of :math:`\hat{x}` is 0 already, so that :math:`\hat{x}^\top P = \hat{x}^\top`, and
#
# .. math::
#
#    J = r \big( I - \tfrac{1}{N} \mathbf{1} \mathbf{1}^\top
#                - \tfrac{1}{N} \hat{x} \hat{x}^\top \big)
#
# *Step 6.* :math:`J` is symmetric, so :math:`dx = J\, d\hat{x}`, and no matrix need be built:
# :math:`\mathbf{1} \mathbf{1}^\top / N` times a vector is its mean, and
# :math:`\hat{x} \hat{x}^\top / N` times it is :math:`\hat{x}` times another mean.
#
# .. math::
#
#    \begin{aligned}
#    c_1 &= \tfrac{1}{N} \sum_j \hat{x}_j\, w_j\, dy_j \\
#    c_2 &= \tfrac{1}{N} \sum_j w_j\, dy_j \\
#    dx_j &= \big( w_j\, dy_j - (\hat{x}_j\, c_1 + c_2) \big)\, r
#    \end{aligned}


# Measuring
import triton
import triton.language as tl
from torch.autograd.functional import jacobian

N, eps = 7, 1.0
x, w, dy = torch.randn(3, N, dtype=torch.float64)
one, eye = torch.ones(N, 1, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
P = eye - one @ one.T / N
d = x - x.mean()
r = (d @ d / N + eps).rsqrt()
xhat = (r * d)[:, None]
J = r * (eye - one @ one.T / N - xhat @ xhat.T / N)
dx, _, _ = simple_backward(x[None], w, x.mean(), r, dy[None])

# %%


# Measuring
def rstd_of(d):
    return (d @ d / N + eps).rsqrt()


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
    "6: with c1 and c2": (dx[0], jacobian(loss, x)),
}
rows = []
for step, (ours, true) in steps.items():
    off = (ours - true).abs().max().item()
    rows.append({"step": step, "off by": f"{off:.0e}", "right": off < 1e-14})
assert all(row["right"] for row in rows)

# %%

# Folded: The six steps, one by one
lab.table(rows, "Each step against automatic differentiation, float64")

# %%

# Reading
worst = max((ours - true).abs().max().item() for ours, true in steps.values())
lab.read(
    "Steps 2 to 6 agree with automatic differentiation: the largest difference is "
    f"{worst:.0e}. Step 1 is checked with the gradients below."
)

# %%
# The backward kernel
# -------------------
#
# One program per row would leave two rows of float32 sums for each row of ``x``, four times the
# bytes of an ``x`` of 16 bits. So we launch only as many programs as fit on the GPU's :term:`SMs
# <SM>` (streaming multiprocessors) at once. Each loops over many rows and keeps its sums ``dw`` and
# ``db`` in :term:`registers <register>`.
#
# ``cols`` are the columns of a row, filled up to a power of two, and ``inside`` masks the filling
# with zeros, which add nothing.

lab.source(sum_my_rows)

# %%
# Program 0 of three takes rows 0, 3, 6 and so on. From ``c1`` to ``dx`` the loop is step 6, in the
# same names.
#
# The obvious way: a lock
# -----------------------
#
# With a lock, the programs add ``dw`` and ``db`` to one *buffer* in main memory, two rows of zeros
# at first, one program at a time. The lock is an integer, 0 if free and 1 if taken. A
# compare-and-swap, an :term:`atomic` operation, reads it, and writes 1 only if it read 0, in one
# indivisible step. So one program succeeds, and the others try again. This cannot hang, because the
# program that holds the lock is running and waits for nothing.

lab.source(lock_kernel)

# %%
# The swap orders the programs, but not their *memory accesses*: a store may wait in a queue, and a
# load may find an outdated line in a cache. And only one of a program's many threads takes the
# lock. So four things have to be ordered, with the numbers of the listing:
#
# 1. *My loads come after I have the lock.* The swap has ``acquire`` semantics: later loads of its
#    thread are not moved before it, nor answered with what a cache held from before.
# 2. *So do the loads of my other threads.* They wait at a *barrier*, ``tl.debug_barrier``, which no
#    thread of the program passes before all have reached it.
# 3. *All my stores come before I free the lock*, because of a second barrier.
# 4. *Whoever sees the lock free also sees those stores.* The exchange that frees it has ``release``
#    semantics, which because of that barrier cover the stores of all threads.
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
# No lock: partial sums
# ---------------------
#
# Nobody has to wait if each program gets a buffer of its own: all lines from the swap to the
# exchange become two stores, to rows that nobody else writes.

lab.source(partial_kernel)

# %%
# A second kernel adds the buffers. Each of its programs takes some columns, and adds them in the
# order of the buffers, which is always the same.

lab.source(add_kernel)

# %%
# To ``add_kernel``, a buffer is one row: ``dw`` and then ``db``.

# Folded: What the host does, for either way
lab.listing(
    {
        "One buffer of zeros, and a lock that is free": with_lock,
        "A buffer for each program, and a second launch": without_lock,
    }
)

# %%

# Reading
seed = torch.Generator(runtime.DEVICE).manual_seed(0)
few, few_dy, few_w = torch.randn(3, 7, 100, generator=seed, device=runtime.DEVICE)
few_rstd = (few.var(-1, correction=0) + 1e-5).rsqrt()
few_off = 0
for add_up in (with_lock, without_lock):
    found = add_up(few, few_w[0], few.mean(-1), few_rstd, few_dy, 3)
    expected = reference.layer_norm_backward(few, few_dy, 1, few_w[0])
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
        few_off = max(few_off, ((mine - true).abs().max() / true.abs().max()).item())
lab.read(
    "Both ways, run now with three programs for seven rows, give the gradients of float64, to "
    f"within {few_off:.0e} of the largest element."
)

# %%
# The operator's kernel also takes several short rows at once, and numbers of 16 bits. And it loads
# *ahead*: its next rows are copied into :term:`shared memory`, the fast storage of the SM, while it
# works on a row.

# Folded: The operator's kernels whole
lab.listing(
    {
        "The kernel for whole rows": row_bwd_kernel,
        "How it hands over its sums: without a lock, locks_ptr is None": hand_over,
        "How its second kernel adds some columns of the buffers": sum_of_buffers,
        "The means from both sums of a row, which two_sums computes in one reduction": means_of,
    }
)

# %%
# .. dropdown:: What ``means_of`` does besides
#
#    A row that is shorter than its block is padded with zeros. If all numbers of the row are equal
#    and huge, the distance of such a zero from their mean, times ``rstd``, overflows to infinity.
#    Its product with a ``dy`` of 0 is NaN, and so is the sum of the row. Only rows of equal numbers
#    can do this, and their ``c1`` is 0, so ``means_of`` puts a 0 where ``c1`` is NaN. A NaN in the
#    input still reaches ``dx``, through ``xhat`` or ``c2``.
#
# .. dropdown:: How autograd calls the kernels
#
#    Autograd sees a single function, which computes only the gradients that are requested. If
#    gradients of gradients are wanted, which is rare, PyTorch's own operations compute them. The
#    kernels are registered as an operator with PyTorch's dispatcher, so ``torch.compile`` treats
#    them as one node of its graph and does not trace into them.

# Folded: The function gradient
lab.source(gradient)

# %%
# What each way costs
# -------------------
#
# Is it the lock that costs time, or that each program sums so few rows? The figure varies both in
# the operator's kernel. *Per tile*, there is a program for every tile, which is two rows of 1,024
# columns or one longer row. *Per program*, each program takes many rows before it hands over its
# sums. Triton's own tutorial takes its lock for every row.
#
# With a lock, the operator has up to 64 buffers, each with a lock of its own, and its second kernel
# adds these. So fewer programs wait for one lock than in ``lock_kernel``, which is not timed here.


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


def points(dtype, columns):
    return [
        {"columns": n, "rows": min(32768, 2**27 // n), "dtype": dtype} for n in columns
    ]


# %%

FORWARD, BACKWARD = "2 * rows * columns * itemsize", "3 * rows * columns * itemsize"
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
    "lock per tile": "lock per tile",
    "partial sums per tile": "partial sums per tile",
    "lock per program": "lock per program",
    "Kernel Book": "partial sums per program",
}
WIDTHS = (1024, 8192)
lab.ladder(
    race,
    "With a lock and without, bfloat16",
    list(WAYS),
    by="columns",
    where={"columns": WIDTHS},
    names=WAYS,
)

# %%

# Reading
nan = float("nan")
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
ahead_by = [
    race_share["Kernel Book", n] - race_share["lock per program", n] for n in WIDTHS
]
lab.read(
    "The lock is not what costs most. Per tile, partial sums are slow as well"
    + (
        ", and in rows of 8,192 columns slower than the lock, because their sums alone are 16 "
        "bytes an element, written and read, beside 6 of `x`, `dy` and `dx`"
        if race_share["partial sums per tile", 8192] < race_share["lock per tile", 8192]
        else ""
    )
    + f". How many rows a program sums counts more: on {gpu} at 1,024 columns, many rows make the "
    f"lock {of_lock:.0f} times as fast, and partial sums {of_sums_alone:.0f} times. Partial sums "
    f"are then {ahead_by[0]:.0f} points ahead of the lock, and in rows of 8,192 "
    f"less than {max(ahead_by[1], 0) // 1 + 1:.0f}."
)

# %%

# Reading
allowed = 100 * 3 / 25  # N read and written: three at least, and 25 by the operations
in_torch = (
    nan
    if race.at(provider="simple_backward").empty
    else 100 * race.share("simple_backward", columns=1024)
)
lab.read(
    f"By their bytes, PyTorch's operations could reach {allowed:.0f} %, but they reach "
    f"{in_torch:.0f} %; we have not timed them one by one."
    + (
        " Even a lock per tile is faster."
        if race_share["lock per tile", 1024] > in_torch
        else ""
    )
) if in_torch == in_torch else None

# %%

# Folded: More: how much of a lock's time is waiting
lock_times = [
    [
        race.milliseconds_at(name, columns=columns)
        for name in ("lock per tile", "partial sums per tile")
    ]
    for columns in (1024, 8192)
]
(narrow_lock, narrow_stored), (wide_lock, wide_stored) = lock_times
lab.read(
    "How much of a lock's time is waiting, we do not know. "
    + (
        "Partial sums per tile wait for nobody, and take "
        f"{100 * (1 - narrow_stored / narrow_lock):.0f} % less time than a lock per tile at 1,024 "
        "columns. But at 8,192 columns they are slower, so they also pay for something that the "
        "lock does not."
        if wide_stored > 1.01 * wide_lock
        else "Partial sums per tile wait for nobody, but they also store more."
    )
)

# %%


# Reading
def gradients(x, w, dy, reduction, n_programs=None):
    wanted = (torch.float32, torch.float32)
    with runtime.launching_on(x):
        _, mean, rstd = _forward(x, w, None, 1e-5)
        return _backward(x, w, mean, rstd, dy, *wanted, True, reduction, n_programs)


def runs_differ():
    x = torch.randn(8192, 2048, device=runtime.DEVICE, dtype=torch.bfloat16)
    w, dy = x[0].clone(), torch.randn_like(x)
    rows = []
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


differ = lab.measure("dw in a hundred runs on one input, 8,192 × 2,048", runs_differ)

unlike = {row["version"]: row["runs unlike the first"] for row in differ.rows}
lab.read(
    "Partial sums are also the same in every run, because they are added in one order. Under a "
    "lock, programs add in the order in which they get it. Of a hundred runs on one input, "
    f"{unlike.get('lock per program', nan):.0f} with a lock per program differ from the first in "
    f"the last bits of `dw`, and {unlike.get('partial sums', nan) or 'none'} with partial sums. So "
    "`layer_norm` uses them."
)

# %%

# Folded: A hundred runs on one input
differ

# %%
# .. raw:: html
#
#    <span id="partial-sums-stay-in-l2"></span>


# Reading
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
of_sums = {row["columns"]: row for row in sizes.rows}
share_of_sums = [  # two float32, written and read: 16 bytes; x, dy, dx: 6
    100 * 16 * row["rows of sums"] / (6 * min(32768, 2**27 // row["columns"]))
    for row in sizes.rows
] or [nan]
lab.read(
    "Their price is small: writing the buffers and reading them again adds at most "
    f"{max(share_of_sums):.1f} % to the bytes of `x`, `dy` and `dx` in bfloat16, with the rows of "
    f"the figures and up to {max(of_sums, default=0):,} columns, and more with fewer rows."
)

# %%

# Folded: The size of the partial sums
lab.table(
    [
        {
            "columns": f"{columns:,}",
            "buffers": row["rows of sums"],
            "MiB": row["MiB"],
            "written and read, % of x, dy, dx": f"{added:.1f}",
            "fit in L2": row["fit in L2"],
        }
        for (columns, row), added in zip(of_sums.items(), share_of_sums, strict=False)
    ],
    f"The size of the partial sums, bfloat16, on {gpu}",
)

# %%
# Wide rows
# ---------
#
# This section may be skipped. Above 8,192 columns a row and its sums no longer fit in the registers
# of an SM, except rows of 16,384 numbers of 16 bits (last fold). So programs share rows: a *group*
# of them takes a row, each program one part of it, and then the group's next row. ``dw`` and
# ``db`` need no exchange, because each column belongs to one program. But ``c1`` and ``c2`` are
# sums over all parts, which the programs tell each other through *slots* of memory, as in
# :doc:`/chapters/softmax`.
#
# To wait less, they collect the slots of a row one iteration after they have filled them. In
# iteration 1, for example, a program
#
# 1. *publishes* in a slot what its part of row 1 adds to ``c1`` and ``c2``;
# 2. *loads* its part of row 2 ahead;
# 3. collects the slots of row 0, and *finishes* row 0.
#
# .. image:: /figures/layer-norm-ahead.svg
#    :alt: Four rows over four iterations of the loop. A row is loaded in one iteration, published
#          in the next and finished in the one after. In iteration 1, row 0 is finished, row 1 is
#          published and row 2 is loaded.

# Folded: Steps 1 and 3 in the kernel
lab.source(split_bwd_kernel, "publish", "finish")

# %%

# Folded: The split kernel whole
lab.source(split_bwd_kernel)

# %%
# .. dropdown:: More: the names in the code, and at which slots a program looks
#
#    ``terms`` gives ``xhat`` and ``wdy``, and ``two_sums`` both sums in one reduction. ``to_slot``
#    makes 64 bits of them, and ``publish`` stores these at once, so that nobody reads one number
#    without the other. ``collect`` takes the slots of all parts apart again, and ``means_of``
#    divides by the length of a row. ``before`` is the row before.
#
#    ``parts`` are 0 to 31, one for each thread of a :term:`warp`, so that in a row of 16 parts each
#    slot is read twice (``% N_PARTS``), and counted once. With more parts than a warp has threads,
#    ``LOOKS`` is at least the number of parts and at least ``THREADS``, so that each thread has
#    slots of its own. If a slot stays empty for ``max_polls`` looks, the program computes all parts
#    itself, and all its ``THREADS`` have to agree on that.
#
#    One width has a kernel of its own: a row of 16,384 numbers of 16 bits fits in one program
#    beside its sums, if it stays *packed* in pairs, as in the forward pass.

# %%
# Is it right?
# ------------
#
# All gradients are compared with float64. Their error may be at most twice PyTorch's own, or one
# unit in the last place (:term:`ulp`); in float32 two to four times as much.
#
# .. dropdown:: Why more in float32, and what the second check is
#
#    For ``dx`` twice as much, because the hardware's reciprocal square root may be wrong by two
#    units in the last place. For ``dw`` and ``db`` four times, because the error of a sum over many
#    rows depends on its order. The lock is not part of the public function, so its check calls the
#    layer below; it allows ``dx`` as much as ``dw`` and ``db``.


# Measuring
def cases(n_rows, n_cols, dtype):
    x, w, b = (
        torch.randn(size, device=runtime.DEVICE).to(dtype).requires_grad_()
        for size in ((n_rows, n_cols), n_cols, n_cols)
    )
    dy = torch.randn_like(x)
    ours, theirs = (
        torch.autograd.grad(operator(x, (n_cols,), w, b), (x, w, b), dy)
        for operator in (layer_norm, F.layer_norm)
    )
    truths = reference.layer_norm_backward(x, dy, 1, w)
    factors = (4, 8, 8) if dtype == torch.float32 else (2, 2, 2)
    for row in zip(("dx", "dw", "db"), ours, theirs, truths, factors, strict=True):
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


# Measuring
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

# Folded: The check of both reductions
lab.check("Both reductions", lock_cases())

# %%
# How fast is it?
# ---------------
#
# The yardstick is again a copy, though not a limit, because the backward pass reads twice as much
# as it writes.
#
# .. dropdown:: How the libraries are called
#
#    Through autograd, except quack, whose backward kernels are called directly, with a float32
#    weight.


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
lab.read(backward.summary(**in_dtypes[0]))

# %%

# Folded: Backward in float32
lab.plot(backward, "Backward, float32", share=True, where={"dtype": "float32"})

# %%

# Reading
losses = backward.losses(*in_dtypes)
lab.read(f"{backward.summary(**in_dtypes[1])} {backward.losses_in_words(*in_dtypes)}")

# %%

lab.table(
    losses, f"Where a library is ahead, in % of a copy, on {gpu}"
) if losses else None

# %%

# Reading
wide = [row for row in losses if row["dtype"] == "float32" and row["columns"] > 8192]
lab.read(
    f"Why {' and '.join(dict.fromkeys(row['library'] for row in wide))} is faster with such wide "
    "rows of float32, we have not measured."
) if wide else None

# %%


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


# %%

# Measuring
ahead = lab.measure("What an SM has requested ahead, bfloat16", loads_ahead)

# %%


# Folded: More: what wide rows lack
def ahead_said():
    speeds = [row["% of a copy"] for row in ahead.rows] or [nan] * 7
    three, none, packed, one, two, four, alone = speeds
    asked = (
        "While a program computes, memory is busy only with bytes requested ahead, for later rows, "
        "or by other programs. Whole rows have the next ones on the way. A packed row takes all "
        "registers of an SM, so nothing is loaded while its program computes. Shared rows have one "
        "part per program on the way, and "
        "registers leave room for few programs. The table in the next fold changes these bytes. "
    )
    if three - none >= 10 and packed < three:
        said = (
            f"Without its loads ahead, the kernel for whole rows falls from {three:.0f} to "
            f"{none:.0f} %. "
        )
    else:
        said = f"Loads ahead are not why packed rows reach only {packed:.0f} %. "
    said += (
        "Shared rows get faster with every program, but four use up the registers. "
        if four > 1.15 * two
        else "More programs do not make shared rows faster. "
    )
    if min(none, packed) > four:
        said += (
            "Even four are slower than a program of whole or packed rows that has nothing ahead, "
            "so bytes ahead are not all that shared rows lack. "
        )
    said += (
        "Do they lose time by waiting for each other? In the last line each program does the same "
        "work as in the line above, but its part is a row of its own, so none waits, "
    )
    return f"{asked}{said}" + (
        f"and they reach {alone:.0f} %, {alone - four:.0f} points more."
        if alone - four >= 5
        else "and it is no faster. What else they lack, we do not know."
    )


lab.read(ahead_said())

# %%

# Folded: What an SM has requested ahead, as a table
CHANGES = [
    ("whole, 8,192 columns", "as it is"),
    ("whole, 8,192 columns", "no loads ahead"),
    ("packed, 16,384 columns", "as it is"),
    ("shared, 32,768 columns", "one program per SM"),
    ("shared, 32,768 columns", "two programs per SM"),
    ("shared, 32,768 columns", "as it is, four per SM"),
    ("parts as rows, 2,048 columns", "as it is, four per SM"),
]
kept = ("KiB ahead", "% of a copy")
lab.table(
    [
        {"rows": rows, "kernel": changed} | {name: row[name] for name in kept}
        for (rows, changed), row in zip(CHANGES, ahead.rows, strict=True)
    ],
    "KiB of x and dy, bfloat16, requested ahead on an SM, and the speed without the kernel that "
    f"adds partial sums, on {gpu}",
) if ahead.rows else ahead

# %%


# Measuring
def launch(columns, dtype):
    x = torch.randn(512, columns, device=runtime.DEVICE, dtype=dtype)
    mean, rstd = torch.ones(2, 512, device=runtime.DEVICE)
    _backward(x, x[0].clone(), mean, rstd, torch.ones_like(x), dtype, dtype)


# %%

# Folded: What the compiler made of the kernels
lab.facts(
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
# What breaks it
# --------------
#
# **The lock orders nothing.** This kernel adds rows to one buffer, as ``lock_kernel`` does, without
# barriers, or without ``acquire`` and ``release`` (``relaxed`` orders nothing), or without both.
# The rows hold small integers, so any difference means a lost addition.


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

LOCKS = {  # of each: whether there are barriers, and what the swap and the exchange order
    "both": (True, "acquire", "release"),
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
lost = lab.measure("A sum of 500 rows, with and without protection", lost_additions)
lost

# %%

# Measuring
ptx = lab.measure("From taking the lock to giving it back", in_ptx)

# %%

# Reading
wrong = {row["protected by"]: row["wrong runs of 100"] for row in lost.rows}
wrong = {name: wrong.get(name, nan) for name in LOCKS}
listed = {row["protected by"]: row["PTX"].split(", ") for row in ptx.rows}
barriers_left = listed.get("acquire and release alone", []).count("bar.sync")
why = "A protection that is missing without an error here is not superfluous."
if wrong["acquire and release alone"]:
    why = "So the lock needs both of them."
elif wrong["barriers alone"]:
    why = "Without the barriers no run is wrong, but that does not show that a lock can do without"
    why += (
        ": the compiler puts the first one back. The second is gone from the code, and these runs "
        "do not show its absence."
        if barriers_left == 1
        else "."
    )
lab.read(
    "Without `acquire` and `release` "
    + (
        "every run is wrong, with barriers and without"
        if wrong["barriers alone"] == wrong["neither"] == 100
        else "runs are wrong even with barriers"
    )
    + ", because barriers order the threads of one program and not what another program sees. "
    f"Which of the two is missed, we did not separate. {why}"
)

# %%

# Folded: From taking the lock to giving it back, in PTX, NVIDIA's assembly language
ptx

# %%
# **The sums are kept in 16 bits.** float16 has 11 significant bits and bfloat16 8, so a sum of ones
# stops at :math:`2^{11}` and :math:`2^8`.

ones, counted = torch.ones(5000, 4, device=runtime.DEVICE), {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    total = torch.zeros(4, device=runtime.DEVICE, dtype=dtype)
    for row in ones.to(dtype):
        total += row
    counted[dtype] = total[0].item()

# %%

# Reading
exact, half, brain = counted.values()
lab.read(
    f"Of 5,000 rows with `dy` = 1, one sum `db` is {exact:,.0f} in float32, {half:,.0f} in float16 "
    f"and {brain:,.0f} in bfloat16."
)

# %%
# **Epsilon is dropped.** The error grows where the variance is small beside epsilon.

ways_of_rstd = {
    "epsilon kept": lambda variance: (variance + 1e-5).rsqrt(),
    "dropped": lambda variance: variance.rsqrt(),
}

# %%

# Measuring
rows = []
for deviation in (1.0, 0.01, 0.001):
    x = deviation * torch.randn(N, dtype=torch.float64)
    true = F.layer_norm(x.requires_grad_(), (N,), w, None, 1e-5)
    (true,) = torch.autograd.grad(true, x, dy)
    x = x.detach()
    row = {"deviation of x": f"{deviation:g}"}
    for name, rstd_from in ways_of_rstd.items():
        r = rstd_from(x.var(correction=0))
        dx = simple_backward(x[None], w, x.mean(), r, dy[None])[0][0]
        row[name] = f"{((dx - true).abs().max() / true.abs().max()).item():.1e}"
    rows.append(row)
lab.table(rows, "Relative error of dx, with epsilon = 1e-5")

# %%
# In short
# --------
#
# A gradient that sums over rows needs no lock. What makes it fast is few programs with many rows
# each. Their partial sums, which a second kernel adds, give the same bits in every run on one GPU.
# They are clearly faster than a lock in rows of 1,024 columns, and hardly in rows of 8,192.
#
# Exercises
# ---------
#
# **1. RMS norm.** Leave out the mean: :math:`y_j = x_j\, w_j / \sqrt{\tfrac{1}{N} \sum x_k^2 +
# \epsilon}`. Which of ``c1`` and ``c2`` is left in its gradient? Write the kernel for ``dx``.

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


# %%

# Solution: RMS norm, checked
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
# **2. Two invariants.** ``dx`` sums to 0, and is nearly orthogonal to :math:`\hat{x}`. How nearly?
# Derive :math:`\hat{x}^\top dx` from :math:`J`.

# %%

# Solution: two invariants
#
# Because xhat sums to 0, xhat' J = r (1 - xhat' xhat / N) xhat'. The bracket is what epsilon takes
# from the variance of xhat: with v = d' d / N it is 1 - v r^2 = epsilon r^2. So the product of xhat
# and dx is epsilon r^3 times the product of xhat and wdy, and 0 without epsilon.

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
#   <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`__, a tutorial.

# Closing
reached = [backward.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS]
lab.finish(
    f"at least {100 * min(reached) - 0.5:.0f} % of the speed of a copy, up to {COLUMNS[-1]:,} "
    "columns"
)
