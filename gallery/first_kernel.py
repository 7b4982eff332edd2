"""
Your first kernel
=================

PyTorch computes the weighted sum of the rows of a matrix, ``(x * w).sum(-1)``, in two operations
that move three times as many bytes as they must. *How do you write a GPU kernel that reads each
number once, and another for its gradient?*

You will learn

- how a kernel divides work among its programs: blocks, offsets, masks, strides;
- how to write its backward pass, and turn the two into a PyTorch operation;
- what sets its speed, and what a finished operator adds to a first kernel.

You need no GPU: small examples run in Triton's :term:`interpreter`, and what only a GPU can show
is replayed from a recorded run.
"""

# sphinx_gallery_thumbnail_number = 2
import re
import statistics
import warnings
from unittest import mock

from kernelbook import lab, reference, weighted_sum
from kernelbook.ops import launch
from kernelbook.ops.weighted_sum import (
    _backward,
    _forward,
    _gradient,
    _run,
    _run_backward,
    _setup_context,
    part_sum_kernel,
    weighted_sum_bwd_kernel,
    weighted_sum_fwd_kernel,
)
from kernelbook.small.first_kernel import row_sums

warnings.filterwarnings(
    "ignore", message=r"Input #\d requires gradient and is not a double"
)
lab.start("first_kernel", "kernelbook.ops.weighted_sum")

# %%
# The problem in PyTorch
# ----------------------
#
# Each row of ``x`` is multiplied by the same weights ``w`` and added up, as in a linear layer with
# one output: :math:`y_i = \sum_j x_{ij} w_j`.

import torch

from kernelbook import runtime  # runtime.DEVICE is the GPU, if there is one


def simple_weighted_sum(x, w):
    return (x * w).sum(-1)


# %%
# PyTorch runs one :term:`kernel`, a function on the GPU, for each operation. The multiplication
# reads ``x`` and writes a product as large as ``x``, and the sum reads that product again. All of
# this goes through :term:`HBM`, the main memory of the GPU: with 16-bit numbers, 6 bytes per
# element. Only the 2 bytes of reading ``x`` are necessary, so one kernel could be three times as
# fast. For a large matrix the bars above promise even more.
#
# Ten numbers in blocks of four
# -----------------------------
#
# We begin with ten numbers, each to be doubled. A Triton kernel is a Python function with the
# decorator ``@triton.jit``. The GPU runs many instances of it at once, called
# :term:`programs <program>`, and each works on a :term:`block` of elements.

import triton  # after kernelbook, which chooses the interpreter where there is no GPU
import triton.language as tl


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, 2 * x, mask=inside)


x = torch.arange(10.0, device=runtime.DEVICE)
y = torch.empty_like(x)
double_kernel[(3,)](x, y, 10, BLOCK_SIZE=4)
print(y.tolist())

# %%
# The :term:`grid` ``(3,)`` asks for three programs, because three blocks of four cover ten
# elements. They differ only in ``tl.program_id(0)``, the number of the program.
#
# .. image:: /figures/first-kernel-blocks.svg
#    :alt: Ten squares named x[0] to x[9] in three frames, program 0 to program 2, of four squares
#          each. The offsets 0 to 11 stand below. Offsets 10 and 11 in program 2 are marked as
#          masked, because they are past the end.
#
# A tensor arrives in the kernel as a :term:`pointer`, the address of its first element, without its
# length, so we pass ``n``. ``tl.arange(0, 4)`` is the block ``0 1 2 3``. A pointer plus a block of
# offsets is a block of addresses, from which ``tl.load`` reads and to which ``tl.store`` writes.
# (``tl.constexpr`` is explained two sections below.)


# Measuring
@triton.jit
def address_kernel(x_ptr, addresses_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(addresses_ptr + offsets, (x_ptr + offsets).to(tl.int64))


addresses = torch.empty(12, dtype=torch.int64, device=runtime.DEVICE)
address_kernel[(3,)](x, addresses, BLOCK_SIZE=4)

# %%

# Folded: The addresses, stored by a kernel in place of the numbers
begins = x.data_ptr()
lab.table(
    [
        {
            "program": program,
            "offsets": " ".join(str(4 * program + i) for i in range(4)),
            "bytes after the first element": " ".join(
                str(address - begins)
                for address in addresses[4 * program :][:4].tolist()
            ),
            "offsets < 10": " ".join(
                "yes" if 4 * program + i < 10 else "no" for i in range(4)
            ),
        }
        for program in range(3)
    ],
    "Three programs, their offsets, and the addresses that these mean",
)

# %%
# What the mask prevents
# ----------------------
#
# The :term:`mask` ``offsets < n`` leaves offsets 10 and 11 out of the load and of the store. What
# if we forget it? We put two more numbers behind ``x``, 10 and 11, and behind ``y`` two that belong
# to something else, both ``-1``.


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets))


for kernel in (double_kernel, unmasked_kernel):
    numbers = torch.arange(12.0, device=runtime.DEVICE)  # x, 10 and 11
    memory = torch.full((12,), -1.0, device=runtime.DEVICE)  # y, and its neighbours
    kernel[(3,)](numbers, memory, 10, BLOCK_SIZE=4)
    print(memory[8:].tolist())

# %%


# Measuring
def neighbours():
    rows = []
    numbers = torch.arange(12.0, device=runtime.DEVICE)
    for name, kernel in {
        "with mask": double_kernel,
        "without": unmasked_kernel,
    }.items():
        memory = torch.full((12,), -1.0, device=runtime.DEVICE)
        kernel[(3,)](numbers, memory, 10, BLOCK_SIZE=4)
        rows.append({"kernel": name, "neighbours of y": str(memory[10:].tolist())})
    return rows


# %%

# Folded: The same two launches on a GPU
lab.measure("What became of the two numbers after y, on a GPU", neighbours)

# %%
# The kernel without a mask has written over the neighbours of ``y``, and nothing reports it: a GPU
# usually notices only addresses outside all memory of the process. Where a mask is false, a load
# gives an undefined value, unless ``other=0.0`` names one.
#
# What the compiler must know
# ---------------------------
#
# Four is a toy size for the picture; real blocks have hundreds or thousands of elements. But why
# not one block of ten? Triton refuses that.

# %%

# Folded: What Triton says of a block of ten
try:
    double_kernel[(1,)](x, y, 10, BLOCK_SIZE=10)
except Exception as error:
    print(error.__cause__ or error)

# %%
# A program is run by 128 threads, among which the compiler divides a block by halving it again and
# again, so its size must be a power of two. Each thread keeps its elements in
# :term:`registers <register>`, the fastest memory. Registers have no addresses: each instruction
# contains the numbers of its registers, so the compiler must also know how many a block needs.
# ``tl.constexpr`` declares such a constant.


# Measuring
def variants():
    launches = {
        "n = 1000, blocks of 256, float32": (1000, 256, torch.float32),
        "n = 1001": (1001, 256, torch.float32),
        "n = 1008, which 16 divides": (1008, 256, torch.float32),
        "n = 1": (1, 256, torch.float32),
        "blocks of 512": (1000, 512, torch.float32),
        "float16": (1000, 256, torch.float16),
    }
    rows, hashes = [], []
    for name, (n, block, dtype) in launches.items():
        x = torch.ones(2048, device=runtime.DEVICE, dtype=dtype)
        grid = (triton.cdiv(n, block),)
        [(_, compiled)] = lab.compiled_by(
            lambda x=x, n=n, block=block, grid=grid: double_kernel[grid](x, x, n, block)
        )
        if compiled.hash not in hashes:
            hashes.append(compiled.hash)
        kernel = f"number {1 + hashes.index(compiled.hash)}"
        rows.append({"launch": name, "compiled kernel": kernel})
    return rows


# %%

# Folded: What else makes another compiled kernel
compiled_kernels = lab.measure("Which launches share a compiled kernel", variants)
WHY = {
    "n = 1001": "nothing of n has changed that Triton looks at",
    "n = 1008, which 16 divides": "neighbours are inside or outside together, so one wide load can "
    "serve them",
    "n = 1": "a multiplication by it can be left out",
    "blocks of 512": "the size is a constant",
    "float16": "the dtype of a pointer is part of its type",
}
lab.table(
    [row | {"because": WHY.get(row["launch"], "")} for row in compiled_kernels.rows],
    "Which launches share a compiled kernel, and why",
)

# %%
# Two dimensions
# --------------
#
# ``x`` is a matrix, but memory is one long line. A matrix of 5 rows and 6 columns lies in it row by
# row, so element :math:`(i, j)` is at offset :math:`6 i + j`. The step from one row to the next,
# here 6, is the :term:`stride` of the rows.
#
# As in PyTorch, ``[:, None]`` makes a block a column and ``[None, :]`` makes one a row, and the sum
# of both holds every combination. For rows 0 and 1 the block has eight columns, because six are no
# power of two:
#
# .. image:: /figures/first-kernel-broadcast.svg
#    :alt: A column with 0 and 6, which is rows times the stride, plus a row with 0 to 7, the
#          columns, gives two rows of eight offsets: 0 to 7 and 6 to 13. Columns 6 and 7 are marked
#          as masked, because they are past the end.
#
# With this, a program can sum whole rows. Columns past the end are loaded as 0, which changes no
# sum.


@triton.jit
def rows_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols)
    y_ptr,  # output, (n_rows)
    stride_row,  # elements from one row of x to the next
    stride_col,  # elements from one column of x to the next
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0)
    y = tl.sum(x.to(tl.float32) * w.to(tl.float32)[None, :], axis=1)
    tl.store(y_ptr + rows, y, mask=rows < n_rows)


def sum_rows(x, w, block_rows=2):
    n_rows, n_cols = x.shape
    y = torch.empty(n_rows, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(n_rows, block_rows),)
    block = (block_rows, triton.next_power_of_2(n_cols))
    rows_kernel[grid](x, w, y, *x.stride(), n_rows, n_cols, *block)
    return y


x = torch.arange(30.0, device=runtime.DEVICE).view(5, 6)
w = torch.tensor([1.0, 0, 0, 0, 0, 10], device=runtime.DEVICE)
print(sum_rows(x, w).tolist())
print(simple_weighted_sum(x, w).tolist())

# %%
# ``tl.sum(..., axis=1)`` is a :term:`reduction`: it adds the columns of each row. Products and sums
# are float32 whatever the input is, because a sum in 16 bits loses digits early.
#
# Strides
# -------
#
# Why does the kernel take both strides of ``x``? A transposed matrix is the same memory with its
# strides exchanged, so that it can be read without a copy. If we pass the strides that a matrix of
# 5 rows and 6 columns usually has, 6 and 1, the sums are wrong, and no error is raised:

tall = torch.arange(30.0, device=runtime.DEVICE).view(6, 5)  # strides (5, 1)
turned = tall.t()  # strides (1, 5)
assumed = torch.empty(5, device=runtime.DEVICE)
rows_kernel[(3,)](turned, w, assumed, 6, 1, 5, 6, BLOCK_ROWS=2, BLOCK_COLS=8)

print("its own strides:", sum_rows(turned, w).tolist())
print("wrong strides:  ", assumed.tolist())

# %%
# What programs must not share
# ----------------------------
#
# In the forward pass each program writes sums of its own. The gradient of ``w`` is harder, because
# every row adds to it, so that all programs change the same few numbers. May they?
#
# A smaller kernel adds to each number the one before it, in place. Program 1 loads element 3, which
# program 0 overwrites, and programs run in no fixed order:
#
# .. image:: /figures/first-kernel-race.svg
#    :alt: Two orders in time. If program 1 loads x[3] first, it finds 1, and x[4] becomes 2, as it
#          should be. If program 0 first stores 2 in x[3], program 1 finds 2, and x[4] becomes 3,
#          which is wrong.


@triton.jit
def in_place_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    before = tl.load(x_ptr + offsets - 1, mask=inside & (offsets > 0), other=0.0)
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, x + before, mask=inside)


x = torch.ones(10, device=runtime.DEVICE)
in_place_kernel[(3,)](x, x, 10, BLOCK_SIZE=4)
print(x.tolist())

# %%
# The interpreter runs programs in order, so there the first number of each later block is 3 and not
# 2. On a GPU chance decides: this is a *race*.

# %%


# Measuring
def in_place_runs():
    n, rows = 2**20, []
    for run in range(5):
        x = torch.ones(n, device=runtime.DEVICE)
        in_place_kernel[(n // 256,)](x, x, n, BLOCK_SIZE=256)
        rows.append({"run": 1 + run, "wrong numbers": int((x[1:] != 2).sum())})
    return rows


# %%

# Folded: The five runs
in_place = lab.measure("In place on a GPU, 1,048,576 ones", in_place_runs)
in_place

# %%

# Reading
nan = float("nan")


def listed(items):
    *others, last = [f"{item:,}" for item in items]
    return f"{', '.join(others)} and {last}" if others else last


wrong = [row["wrong numbers"] for row in in_place.rows]
lab.read(
    f"Of {2**20:,} ones in blocks of 256, {2**20 // 256 - 1:,} are loaded by one program and "
    "overwritten by another. In five launches "
    f"{min(wrong, default=nan)} to {max(wrong, default=nan)} of them spoiled a sum, and nothing "
    "reported an error. **A test of a few numbers, or of the mean, would miss the race.**"
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Within one launch, what one program writes no other program may read or write, unless both use
#    :term:`atomic` operations, which no other atomic
#    operation can interrupt.
#
# So write to another tensor, or launch a second kernel, which by default begins when the first has
# ended. Programs can then add to one sum in three ways. *Load, add, store* loses an addition where
# two programs load the same sum. *Atomic addition*, ``tl.atomic_add``, does all three in one step.
# For :term:`partial sums`, each program stores its own, and a second kernel adds these up.

# %%


# Measuring
@triton.jit
def shared_sum_kernel(
    dy_ptr, x_ptr, dw_ptr, n_cols, ATOMIC: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :])
    sums = tl.sum(tl.load(dy_ptr + rows)[:, None] * x, axis=0)
    if ATOMIC:
        tl.atomic_add(dw_ptr + cols, sums)
    else:
        tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + sums)


def sharing():
    n_rows, n_cols = 2**16, 1024
    x = torch.randn(n_rows, n_cols, device=runtime.DEVICE) + 1
    dy = torch.randn(n_rows, device=runtime.DEVICE) + 1
    w = torch.ones(n_cols, device=runtime.DEVICE)
    truth = dy.double() @ x.double()

    def shared(atomic):
        dw = torch.zeros(n_cols, device=runtime.DEVICE)
        shared_sum_kernel[(n_rows // 64, n_cols // 64)](dy, x, dw, n_cols, atomic, 64)
        return dw

    def in_parts():
        dw = torch.empty(n_cols, device=runtime.DEVICE)
        _backward(
            dy, x, w, None, dw
        )  # the kernels of the next section, without autograd
        return dw

    ways = {
        "load, add, store": lambda: shared(False),
        "atomic addition": lambda: shared(True),
        "partial sums": in_parts,
    }
    rows = []
    for name, way in ways.items():
        runs = [way() for _ in range(20)]
        worst = max(((dw - truth).abs() / truth.abs()).max().item() for dw in runs)
        same = sum(torch.equal(dw, runs[0]) for dw in runs[1:])
        rows.append(
            {
                "sum of 65,536 rows": name,
                "worst error": f"{worst:.1e}",
                "of 19 runs, equal to the first": same,
                "µs": round(1e3 * statistics.median(lab.event_times(way)), 1),
            }
        )
    return rows


shared_sums = lab.measure("A sum that programs share, in three ways", sharing)

# %%

lab.table(
    [
        {
            "a sum of 65,536 rows": row["sum of 65,536 rows"],
            "error": f"up to {100 * float(row['worst error']):.0f} %"
            if float(row["worst error"]) > 1e-5
            else "rounding only",
            "runs with the bits of the first": (
                f"{row['of 19 runs, equal to the first']} of 19"
            ),
        }
        for row in shared_sums.rows
    ],
    "How programs add to one sum, on a GPU",
)

# %%

# Reading
way = {row["sum of 65,536 rows"]: row for row in shared_sums.rows}


def of_way(name, column):
    return float(way[name][column]) if way else nan


_, *rounded = (of_way(name, "worst error") for name in way or [None] * 3)
assert not way or max(rounded) < 1e-5
assert not way or of_way("partial sums", "of 19 runs, equal to the first") == 19
lab.read(
    "Atomics add in the order in which programs arrive, and rounding depends on that order; "
    "partial sums have a fixed order. **We take partial sums.**"
)

# %%
# The gradient
# ------------
#
# Let :math:`L` be the loss and :math:`dy_i` its derivative with respect to :math:`y_i`. Each
# :math:`x_{ij}` enters one sum, each :math:`w_j` the sums of all rows:
#
# .. math::
#
#    dx_{ij} &= \frac{\partial L}{\partial y_i} \frac{\partial y_i}{\partial x_{ij}}
#          = dy_i \, w_j \\
#    dw_j &= \sum_i \frac{\partial L}{\partial y_i} \frac{\partial y_i}{\partial w_j}
#          = \sum_i dy_i \, x_{ij}
#
# Any program can compute :math:`dx` for its own block, but :math:`dw` needs the partial sums. With
# three programs of two rows, and ones for ``dy``:
#
# .. image:: /figures/first-kernel-parts.svg
#    :alt: The matrix x of 5 rows and 6 columns, which holds 0 to 29. Program 0 has rows 0 and 1,
#          program 1 rows 2 and 3, program 2 row 4. Each adds its rows, column by column, into its
#          own row of parts: 6 8 10 12 14 16, 30 32 34 36 38 40 and 24 25 26 27 28 29. The second
#          launch adds these three rows to dw: 60 65 70 75 80 85.
#
# The kernel divides ``x`` into the same blocks as ``rows_kernel``. It stores a block of ``dx``, and
# sums along ``axis=0``, over its rows:


@triton.jit
def rows_bwd_kernel(
    dy_ptr,  # gradient of y, (n_rows)
    x_ptr,  # input, (n_rows, n_cols), contiguous
    w_ptr,  # weight, (n_cols)
    dx_ptr,  # gradient of x, (n_rows, n_cols), contiguous
    parts_ptr,  # partial sums, (number of programs, n_cols), float32
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # a power of two, at least n_cols
):
    program = tl.program_id(0)
    rows = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    offsets = rows[:, None] * n_cols + cols[None, :]
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(dy_ptr + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, dy[:, None] * w[None, :], mask=inside)
    part = tl.sum(dy[:, None] * x, axis=0)
    tl.store(parts_ptr + program * n_cols + cols, part, mask=cols < n_cols)


def rows_backward(dy, x, w, block_rows=2):
    n_rows, n_cols = x.shape
    dx = torch.empty_like(x)
    programs = triton.cdiv(n_rows, block_rows)
    parts = torch.empty(programs, n_cols, device=x.device)
    block = (block_rows, triton.next_power_of_2(n_cols))
    rows_bwd_kernel[(programs,)](dy, x, w, dx, parts, n_rows, n_cols, *block)
    dw = sum_rows(parts.t(), torch.ones(programs, device=x.device))
    return dx, dw.to(w.dtype)


x = torch.arange(30.0, device=runtime.DEVICE).view(5, 6)
dx, dw = rows_backward(torch.ones(5, device=runtime.DEVICE), x, w)
print(dw.tolist())

# %%
# The second launch needs no new kernel: ``parts.t()`` has a row for each column of ``x``, and
# ``rows_kernel`` sums that row with weights of 1.
#
# Into PyTorch
# ------------
#
# A ``torch.autograd.Function`` tells autograd how to compute a result and its gradients:


class WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return sum_rows(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return rows_backward(dy.contiguous(), x.contiguous(), w)


# %%
# Our backward kernel takes no strides, so ``contiguous()`` copies a tensor whose strides differ.
# ``gradcheck`` compares the gradients with the change that a step ``eps`` in each element makes:

x = torch.randn(5, 6, device=runtime.DEVICE, requires_grad=True)
w = torch.randn(6, device=runtime.DEVICE, requires_grad=True)
# Large steps, because in float32 (of which gradcheck warns) small ones drown.
steps = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4}
print(torch.autograd.gradcheck(WeightedSum.apply, (x, w), **steps))

# %%
# **You have written a differentiable PyTorch operation.**

# %%


# Folded: How to find a mistake in the interpreter
@triton.jit
def talking_kernel(x_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    print("program", tl.program_id(0), "offsets", offsets, "x", x)


print("Set TRITON_INTERPRET=1. Then breakpoint() stops inside a kernel,")
print('and print("x", x) shows a block; each of three programs prints its own:')
numbers = torch.arange(10.0, device=runtime.DEVICE) / 2
if runtime.INTERPRETED:
    talking_kernel[(3,)](numbers, 10, BLOCK_SIZE=4)

# %%
# Programs, warps, threads
# ------------------------
#
# Is it fast? That depends on how the GPU runs a program. A GPU consists of SMs
# (:term:`streaming multiprocessors <SM>`), each of which runs several programs at a time. A program
# has four :term:`warps <warp>` by default, and the 32 threads of a warp execute the same
# instruction together. Here is a block of 1,024 16-bit numbers:
#
# .. image:: /figures/first-kernel-threads.svg
#    :alt: Four levels. A grid of programs 0, 1, 2 and so on. Program 2 runs on one SM and has four
#          warps, of which warp 1 has the elements 256 to 511. Warp 1 has 32 threads of eight
#          elements each. Thread 1 holds the elements 264 to 271, which are 16 bytes.
#
# A thread holds eight neighbours, because they make 16 bytes, the most that it can load at once.
# The threads of a warp then read 512 consecutive bytes, which the memory serves with few
# transactions (:term:`coalescing`).

# %%


# Measuring
@triton.jit
def owner_kernel(x_ptr, owners_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets).to(tl.int32)
    owners = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(owners_ptr + offsets, owners)


def runs_of(numbers):
    """0 1 2 3 8 9 as "0 to 3, 8 to 9"."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first} to {last}" for first, last in runs)


def owners():
    rows = []
    for dtype in (torch.int32, torch.int16):
        x = torch.zeros(1024, device=runtime.DEVICE, dtype=dtype)
        found = torch.empty_like(x)
        owner_kernel[(1,)](x, found, 1024, num_warps=4)
        for thread in (0, 1, 31, 32, 127):
            held = [i for i, owner in enumerate(found.tolist()) if owner == thread]
            rows.append(
                {
                    "bits of an element": 8 * dtype.itemsize,
                    "warp": thread // 32,
                    "thread of the warp": thread % 32,
                    "holds elements": runs_of(held),
                }
            )
    return rows


# %%

# Folded: Which thread holds which element, asked of the hardware
lab.measure("Which thread holds which elements of a block of 1,024", owners)

# %%
# How far away memory is
# ----------------------
#
# On their way to a thread numbers pass several memories: HBM, the :term:`L2` cache that all SMs
# share, the :term:`L1` cache of an SM, and the registers. The bars show how fast each delivers, the
# labels also its :term:`latency`, the wait for the first number.

# %%


# Measuring
# One kernel reads a window of memory again and again, and its size decides which memory answers.
# One follows a chain of addresses in random order. One multiplies and adds in registers alone.
@triton.jit
def read_kernel(
    x_ptr, sums_ptr, own, step, window, loads, BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(loads):
        start = program * step + i * BLOCK
        start = start & (window - 1)  # the remainder, because a window is a power of 2
        start = tl.multiple_of(start, BLOCK)
        x_ptrs = x_ptr + program * own + start + tl.arange(0, BLOCK)
        total += tl.load(x_ptrs, cache_modifier=CACHE)
    tl.store(sums_ptr + program, tl.sum(total, axis=0))


@triton.jit
def chase_kernel(next_ptr, place_ptr, steps, CACHE: tl.constexpr):
    place = tl.load(place_ptr)
    for _ in range(steps):
        place = tl.load(next_ptr + place, cache_modifier=CACHE)
    tl.store(place_ptr, place)


@triton.jit
def register_kernel(x_ptr, y_ptr, turns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, shift = tl.load(x_ptr), tl.load(x_ptr + 1)
    value = offsets.to(tl.float32)
    for _ in range(turns):
        for _ in tl.static_range(16):
            value = value * scale + shift
    tl.store(y_ptr + offsets, value)


def fastest(run):
    """Milliseconds of the fastest of five runs, with whatever the run before left in caches."""
    return min(lab.event_times(run, repeats=5))


def levels():
    properties = torch.cuda.get_device_properties(runtime.DEVICE)
    sms = properties.multi_processor_count
    x = torch.zeros(2**30, device=runtime.DEVICE)  # 4 GiB
    sums = torch.empty(2**16, device=runtime.DEVICE)

    def terabytes(programs, own, step, window, loads, cache):
        args = (x, sums, own, step, window, loads, 4096, cache)
        took = fastest(lambda: read_kernel[(programs,)](*args, num_warps=8))
        return programs * loads * 4096 * 4 / took / 1e9

    def nanoseconds(lines, steps, cache):
        """A walk over so many lines of 128 bytes, each of which holds 16 numbers."""
        order = 16 * torch.randperm(lines, device=runtime.DEVICE)
        following = torch.zeros(16 * lines, dtype=torch.int64, device=runtime.DEVICE)
        following[order] = order.roll(-1)
        place = order[:1].clone()
        run = chase_kernel[(1,)]
        return (
            fastest(lambda: run(following, place, steps, cache, num_warps=1))
            / steps
            * 1e6
        )

    def multiply_adds(programs, block, warps):
        """TB/s of three reads and a write each, and the nanoseconds from one to the next."""
        y = torch.empty(programs * block, device=runtime.DEVICE)
        run = register_kernel[(programs,)]
        took = fastest(lambda: run(x, y, 4096, block, num_warps=warps))
        return 16 * 4096 * programs * block * 16 / took / 1e9, took / (16 * 4096) * 1e6

    found = {
        "registers": (
            4 * properties.regs_per_multiprocessor * sms,
            multiply_adds(8 * sms, 1024, 4)[0],
            multiply_adds(1, 32, 1)[1],
        ),
        "L1 cache and shared memory": (
            properties.shared_memory_per_multiprocessor * sms,
            terabytes(2 * sms, 2**14, 0, 2**14, 2**12, ".ca"),
            nanoseconds(2**8, 2**15, ".ca"),
        ),
        "L2 cache": (
            properties.L2_cache_size,
            terabytes(8 * sms, 0, 5 * 2**12, 2**22, 2**8, ".cg"),
            nanoseconds(2**15, 2**15, ".cg"),
        ),
        "HBM": (
            properties.total_memory,
            terabytes(2**14, 0, 2**16, 2**30, 2**4, ".cg"),
            nanoseconds(2**23, 2**13, ".cg"),
        ),
    }
    return [
        {
            "memory": name,
            "MiB": round(size / 2**20, 1),
            "TB/s": round(speed, 2),
            "nanoseconds": round(latency, 1),
        }
        for name, (size, speed, latency) in found.items()
    ]


hierarchy = lab.measure("The levels of memory: size, speed, latency", levels)

# %%


# Drawing
def in_short(row):
    mib = row["MiB"]
    size = f"{mib:,.0f} MiB" if mib < 2**13 else f"{mib / 2**10:,.0f} GiB"
    shared = row["memory"] in ("L2 cache", "HBM")
    return (
        f"{row['TB/s']:.3g} TB/s, latency {row['nanoseconds']:,.3g} ns, "
        f"{size}{'' if shared else ' in all SMs'}"
    )


def in_words(rows):
    return "; ".join(f"{row['memory']}: {in_short(row)}" for row in rows)


def steps(axes, rows):
    most = max(row["TB/s"] for row in rows)
    for place, row in enumerate(rows):
        axes.barh(place, row["TB/s"], 0.3, color=lab.colour("Kernel Book"))
        for label, height, weight in (
            (row["memory"], 18, "bold"),
            (in_short(row), 4, "normal"),
        ):
            axes.annotate(
                label,
                (0, place - 0.15),
                (4, height),
                textcoords="offset points",
                va="bottom",
                fontsize=10,
                fontweight=weight,
            )
    axes.set(xlabel="TB/s", xlim=(0, 1.02 * most))
    axes.set_ylim(len(rows) - 0.7, -0.85)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")


lab.draw(hierarchy, "What each memory delivers", in_words, steps)

# %%

# Reading
level = {row["memory"]: row for row in hierarchy.rows}


def at(memory, column):
    return level.get(memory, {}).get(column, nan)


hbm, in_registers = (at(name, "TB/s") for name in ("HBM", "registers"))
wait = at("HBM", "nanoseconds")
in_flight = hbm * wait / 1e3  # TB/s times ns is kB, and 1,000 of them a MB
# A multiply-add reads three registers of 4 bytes and writes one.
lab.read(
    "While HBM delivers one bfloat16 number, there is time for "
    f"{in_registers / 16 / (hbm / 2):.0f} multiply-adds in registers."
)

# %%
# The weighted sum needs one, so it is :term:`memory-bound`: all that counts is to read ``x`` once,
# and to keep HBM busy.

# %%

# Reading
lab.read(
    f"A number from HBM takes {wait:,.0f} ns to arrive, so at full speed {in_flight:.1f} MB must "
    "be on their way at any moment. That is why a GPU runs so many threads."
)

# %%
# How fast is it?
# ---------------
#
# The yardstick is a copy, which does nothing but move bytes: copying half of ``x`` moves as many
# bytes as reading all of it. The *first kernel* is ``rows_kernel`` with one row per program. The
# bands show the scatter of the runs (:doc:`/reading-figures`).


def providers(rows, columns, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype)
    half = x.view(-1)[: x.numel() // 2]
    target = torch.empty_like(half)
    torch.compiler.reset()  # so that each shape is compiled for itself
    compiled = torch.compile(simple_weighted_sum, dynamic=False)
    return {
        "copy": lambda: target.copy_(half),
        "PyTorch": lambda: simple_weighted_sum(x, w),
        "x @ w": lambda: x @ w,
        "torch.compile": lambda: compiled(x, w),
        "one row a program": lambda: sum_rows(x, w, block_rows=1),
        "Kernel Book": lambda: weighted_sum(x, w),
    }


forward = lab.bench(
    "forward",
    [
        {"rows": 2**power, "columns": 4096, "dtype": torch.bfloat16}
        for power in (4, 8, 10, 12, 14, 16)
    ],
    providers,
    limit="copy",
    work="rows * columns * itemsize",
)
lab.plot(
    forward,
    "Forward, rows of 4,096 in bfloat16",
    share=True,
    where={
        "provider": ("copy", "PyTorch", "x @ w", "torch.compile", "one row a program")
    },
    names={"one row a program": "first kernel"},
)

# %%

# Folded: The numbers of this figure
MARKS = [2**power for power in (4, 8, 10, 12, 14, 16)]
NAMED = {
    "Kernel Book": "the operator",
    "one row a program": "our first kernel",
    "torch.compile": "torch.compile",
    "x @ w": "x @ w",
    "PyTorch": "PyTorch's two operations",
}


def in_percent(sweep, providers):
    """Each provider's share of the speed of a copy, at each number of rows."""
    return [
        {
            "rows of x": name,
            **{
                f"{rows:,}": f"{100 * sweep.share(provider, rows=rows):.0f}"
                for rows in MARKS
            },
        }
        for provider, name in NAMED.items()
        if provider in providers
    ]


lab.table(
    in_percent(forward, set(forward.providers) - {"Kernel Book"}),
    "The forward pass, in % of the speed of a copy",
)

# %%


# Measuring
def two_operations():
    x = torch.randn(2**16, 4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    product = x * w
    half = x.view(-1)[: x.numel() // 2]
    target, half_target = torch.empty_like(x), torch.empty_like(half)

    def microseconds(run):
        return round(1e3 * statistics.median(lab.event_times(run)), 1)

    return [
        {
            "operation": "product = x * w",
            "µs": microseconds(lambda: x * w),
            "a copy of as many bytes (µs)": microseconds(lambda: target.copy_(x)),
        },
        {
            "operation": "product.sum(-1)",
            "µs": microseconds(lambda: product.sum(-1)),
            "a copy of as many bytes (µs)": microseconds(
                lambda: half_target.copy_(half)
            ),
        },
    ]


apart = lab.measure("PyTorch's two operations, 65,536 rows", two_operations)


def reading_alone(rows=4096, columns=4096):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    sums = torch.empty(rows, device=runtime.DEVICE)
    half = x.view(-1)[: x.numel() // 2]
    target = torch.empty_like(half)
    others = torch.zeros(2**26, device=runtime.DEVICE, dtype=torch.int32)
    runs = {
        "copy half of x": lambda: target.copy_(half),
        "read x and add it up, without weights": lambda: row_sums(x, sums),
        "the operator": lambda: weighted_sum(x, w),
    }
    times = {name: [] for name in runs}
    for _ in range(5):  # in turn, because they differ by little
        for name, run in runs.items():
            times[name] += lab.event_times(run, before=others.zero_)
    return [
        {"4,096 rows": name, "µs": round(1e3 * statistics.median(found), 2)}
        for name, found in times.items()
    ]


alone = lab.measure("Reading alone, 4,096 rows of 4,096 in bfloat16", reading_alone)

# %%


# Reading
def listed_medians(sweep, provider, own="Kernel Book"):
    """Where the median of a provider is over 1 % below ours, and by how many percent at most."""
    one, two = (
        sweep.at(provider=name).set_index(sweep.axis)["ms"] for name in (provider, own)
    )
    points = [int(point) for point in one.index[1.01 * one < two]]
    return points, max((100 * (two[at] / one[at] - 1) for at in points), default=0)


def beyond_scatter(sweep, provider, own="Kernel Book"):
    """Where the bands of a provider and of ours do not meet: where it is faster, and slower."""
    one, two = (
        sweep.at(provider=name).set_index(sweep.axis) for name in (provider, own)
    )
    return (
        [int(at) for at in one.index if one["p80"][at] < two["p20"][at]],
        [int(at) for at in one.index if one["p20"][at] > two["p80"][at]],
    )


def gap(points, slower, faster):
    """By up to how many percent one provider takes longer than another."""
    most = max(
        forward.milliseconds_at(slower, rows=rows)
        / forward.milliseconds_at(faster, rows=rows)
        for rows in points
    )
    return f"{'up to ' if len(points) > 1 else ''}{100 * (most - 1):.0f} %"


of_first, of_two, of_matmul = (
    [forward.share(name, rows=rows) for rows in MARKS]
    for name in ("one row a program", "PyTorch", "x @ w")
)
compared = "torch.compile", "one row a program"
sooner, later = beyond_scatter(forward, *compared)
found = [
    f"faster with {listed(sooner)} rows (by {gap(sooner, *compared[::-1])})"
    if sooner
    else "nowhere faster",
    f"slower with {listed(later)} (it takes {gap(later, *compared)} longer)"
    if later
    else "nowhere slower",
]
lab.read(
    f"**The first kernel runs at {100 * min(of_first):.0f} to {100 * max(of_first):.0f} % of the "
    f"speed of a copy,** and PyTorch's two operations at {100 * min(of_two):.0f} to "
    f"{100 * max(of_two):.0f} %. `x @ w`, one operation that computes the same, reaches "
    f"{100 * min(of_matmul):.0f} to {100 * max(of_matmul):.0f} %; we compare with two first, "
    "because most formulas have no operation of their own. Beyond the scatter, `torch.compile`, "
    f"which writes such a kernel for you, is {' and '.join(found)}. Why the first kernel reaches "
    f"{100 * forward.share('one row a program', rows=2**14):.0f} % with 16,384 rows is asked in "
    "“What another kernel left behind”."
)

# %%

# Reading
slowly, copied = (
    forward.milliseconds_at(name, rows=2**16) for name in ("PyTorch", "copy")
)
of_copying = 2**16 * 4096 * 2 / copied / 1e9  # TB/s, and HBM was measured above
of_product, of_sum = [
    100 * row["a copy of as many bytes (µs)"] / row["µs"] for row in apart.rows
] or [nan] * 2
lab.read(
    (
        "More than 100 % is possible, because a copy also writes: with 65,536 rows it moved "
        f"{of_copying:.1f} TB/s, and reading alone {hbm:.1f} (figure 1). "
        if max(of_first) > 1 and hbm > of_copying
        else ""
    )
    + f"With 65,536 rows PyTorch's two operations take {slowly / copied:.1f} times as long as a "
    "copy. Three times the bytes explain a factor of 3, the multiplication the rest: it reaches "
    f"only {of_product:.0f} % of the speed of a copy of its own bytes."
)

# %%

# Folded: PyTorch's two kernels, each beside a copy of as many bytes
lab.table(
    [
        {
            "kernel": row["operation"],
            "time (µs)": f"{row['µs']:.4g}",
            "copy (µs)": f"{row['a copy of as many bytes (µs)']:.4g}",
        }
        for row in apart.rows
    ],
    "PyTorch's two kernels with 65,536 rows, each beside a copy of as many bytes",
)

# %%
# The finished operator
# ---------------------
#
# What does a finished operator add? ``kernelbook.weighted_sum``, below *the operator*, is the same
# pair of kernels, made ready for other matrices, too:

import kernelbook

y = kernelbook.weighted_sum(x.t(), torch.ones(5, device=runtime.DEVICE))
print(torch.allclose(y, x.sum(0), atol=1e-6))

# %%
# It takes any shape and strides, and ``torch.compile`` knows it. Its kernels differ from yours in
# four points.

# %%

# Folded: The whole operator, from the kernels outwards
lab.listing(
    {
        "1. Forward, on the GPU: a program has some rows and one part of their columns": (
            weighted_sum_fwd_kernel
        ),
        "2. Backward, on the GPU: a program has some columns and its share of the rows, and reads "
        "x once for both gradients": weighted_sum_bwd_kernel,
        "3. The second launch of either, if sums are in parts": part_sum_kernel,
        "4. Forward, on the host: choose the blocks, launch, add the parts": _forward,
        "5. Backward, on the host: the same; a gradient that nobody needs is None": (
            _backward
        ),
        "6. What PyTorch calls for the result: allocate it, and view x as a matrix": _run,
        "7. What PyTorch calls for the gradients: allocate those that are needed": (
            _run_backward
        ),
        "8. What autograd keeps from forward, as save_for_backward above": _setup_context,
        "9. What autograd runs backward, as the second method of the class above": _gradient,
        "10. The public function: refuse what is wrong, and call the operator": weighted_sum,
    }
)

# %%
# Is it right?
# ------------
#
# We compare its results and gradients with float64. A case passes if its error is at most twice
# that of PyTorch, or one :term:`ulp`, the gap to the next number (four times as much in float32,
# because there the order of additions decides).


def cases():
    dtypes = [
        (dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    for dtype, of_weight in [*dtypes, (torch.bfloat16, torch.float32)]:
        for shape in ((1, 1001), (70, 64), (33, 1040)):
            x = (
                (torch.randn(shape, device=runtime.DEVICE) + 1)
                .to(dtype)
                .requires_grad_()
            )
            w = (torch.randn(shape[1], device=runtime.DEVICE) + 1).to(of_weight)
            w.requires_grad_()
            dy = torch.randn(shape[0], device=runtime.DEVICE).to(of_weight)
            found = []
            for operator in (weighted_sum, simple_weighted_sum):
                y = operator(x, w)
                found.append((y, *torch.autograd.grad(y, (x, w), dy)))
            truth = (
                reference.weighted_sum(x, w),
                *reference.weighted_sum_backward(x, w, dy),
            )
            label = str(shape) if dtype == of_weight else f"{shape}, bfloat16 × float32"
            for what, ours, *rest in zip(
                ("forward", "dx", "dw"), *found, truth, strict=True
            ):
                factor = 8 if ours.dtype == torch.float32 else 2
                yield lab.Case(label, what, ours, *rest, factor=factor)


lab.check("weighted_sum", cases())

# %%
# Rows of any length
# ------------------
#
# ``rows_kernel`` keeps a whole row in registers. A row of a million float32 numbers is 4 MB, while
# an SM has 256 KB of registers. So the first point is a loop over blocks of columns:

lab.source(weighted_sum_fwd_kernel, "loop")

# %%
# The program's columns begin at ``first`` and end before ``last``; ``EVICT`` is the third point,
# below. Each iteration adds a block of products to ``total``, in registers, and after the loop one
# ``tl.sum(total, axis=1)`` adds up the columns.
#
# .. dropdown:: More: from first to last
#
#    The loop runs over a whole row, unless rows are so few that most of the GPU would be idle. Then
#    each row is divided into parts, and a second kernel adds their sums. ``tl.program_id(0)``
#    counts blocks of rows, and ``tl.program_id(1)`` the parts of a row. Row numbers are int64,
#    because past :math:`2^{31}` elements an offset does not fit into 32 bits.
#
# Here are about 2²⁶ elements in rows of 2 to 4,194,304:


def shape_providers(columns, rows, dtype):
    found = providers(rows, columns, dtype)
    del found["one row a program"]  # its block would be the whole row
    return found


shapes = lab.bench(
    "shapes",
    [
        {"columns": columns, "rows": 2**26 // columns, "dtype": torch.bfloat16}
        for columns in (2, 8, 64, 100, 256, 1024, 2**14, 2**18, 2**22)
    ],
    shape_providers,
    limit="copy",
    work="rows * columns * itemsize",
)

lab.plot(
    shapes,
    "Forward, 2²⁶ elements in rows of any length",
    share=True,
    names={"Kernel Book": "the operator"},
)

# %%

# Reading
of_shapes = {
    int(columns): 100 * shapes.share("Kernel Book", columns=columns)
    for columns in shapes.frame["columns"].unique()
} or dict.fromkeys((2, 64), nan)
of_longer = {columns: share for columns, share in of_shapes.items() if columns >= 64}
compiled_ahead, _ = listed_medians(shapes, "torch.compile")
programs_at_once = 4 * (shapes.provenance or {}).get("sm_count", 0)
divided = [  # two rows a program
    columns
    for columns in of_longer
    if columns > 4096 and 2**26 // columns // 2 < programs_at_once
]
lab.read(
    "**The loop is worth rows of any length:** from 64 columns on the operator reaches "
    f"{min(of_longer.values()):.0f} to {max(of_longer.values()):.0f} % of the speed of a copy. "
    + (
        f"`torch.compile` is faster with {listed(compiled_ahead)} columns. "
        if compiled_ahead
        else ""
    )
    + (
        f"The slowest are rows of {listed(divided)}, which are divided among programs and take a "
        "second launch. "
        if divided
        and sorted(of_longer, key=of_longer.get)[: len(divided)]
        == sorted(divided, key=of_longer.get)
        else ""
    )
    + f"Rows of 2 reach {of_shapes[2]:.0f} %, because their sums, which the share does not count, "
    "are half as many bytes as `x`."
)

# %%
# What the compiler can prove
# ---------------------------
#
# Rows of 100, the dip in figure 3, would be far slower without the second point. A thread can load
# 16 bytes at once only where the compiler can prove that the address is a multiple of 16. But of an
# integer argument, such as the stride of rows, Triton finds out only whether it is 1 and whether 16
# divides it. Neither is true of 100, so it would load one number at a time.
#
# The operator therefore passes a ``constexpr`` named ``UNIT``, the greatest power of two, up to 16,
# that divides the length of rows and their stride, here 4. The kernel begins with
# ``n_cols = n_cols // UNIT * UNIT``: the same number, but as a product with 4 the compiler knows it
# to be a multiple of 4.


# Measuring
def loads(columns, block_rows, told):
    rows = 2**26 // columns
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    y = torch.empty(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
    others = torch.zeros(2**26, device=runtime.DEVICE, dtype=torch.int32)
    block = runtime.next_power_of_2(columns)
    grid = runtime.cdiv(rows, block_rows), 1
    sizes = columns, 1, rows, columns, block, block_rows, block

    def run(options):
        return weighted_sum_fwd_kernel[grid](
            x, w, y, *sizes, "evict_first", **options, num_warps=4
        )

    found = []
    for name, options in told.items():
        ptx = run(options).asm["ptx"]
        wide = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+) ", ptx)
        times = lab.event_times(lambda of=options: run(of), before=others.zero_)
        found.append(
            {
                "columns": columns,
                "the compiler is told": name,
                "widest load (bytes)": max(
                    int(n or 1) * int(bits) // 8 for n, bits in wide
                ),
                "µs": round(1e3 * statistics.median(times), 1),
            }
        )
    return found


def all_loads():
    of_100 = {"nothing": {}, "that 4 divides both": {"UNIT": 4}}
    of_8 = {
        "nothing": {},
        "that 8 divides both": {"UNIT": 8},
        "that x is one line": {"UNIT": 8, "FLAT": True},
    }
    return loads(100, 64, of_100) + loads(8, 256, of_8)


# %%

loaded = lab.measure(
    "What a thread may load at once, 2²⁶ numbers in bfloat16", all_loads
)

# %%

# Reading
blind, known, eight, eighth, in_line = [row["µs"] for row in loaded.rows] or [nan] * 5
narrow, wide, *_ = [row["widest load (bytes)"] for row in loaded.rows] or [nan] * 2
lab.read(
    f"**One proven divisor makes the kernel {blind / known:.1f} times as fast for rows of 100,** "
    f"because a thread then loads {wide} bytes at once instead of {narrow}."
)

# %%

# Folded: The loads of four kernels
lab.table(
    [
        {
            "rows of": row["columns"],
            "the compiler is told": row["the compiler is told"],
            "widest load (bytes)": row["widest load (bytes)"],
            "time (µs)": f"{row['µs']:.3g}",
        }
        for row in loaded.rows[:4]
    ],
    "What a thread may load at once, 2²⁶ numbers in bfloat16, read from each kernel's PTX",
)

# %%

# Folded: More: short rows as one line
copied_100, copied_256 = (
    1e3 * shapes.milliseconds_at("copy", columns=columns) for columns in (100, 256)
)
lab.read(
    "Short contiguous rows whose length is a power of two are also loaded as one line (`FLAT`), so "
    "that a load may reach past the end of a row, and `tl.reshape` cuts the line into rows. For "
    f"rows of 8 that takes {in_line:.1f} µs instead of {eighth:.1f}. In figure 3 rows of 100 stand "
    "nearer to the copy than their time alone would say, because the copy of that matrix takes "
    f"{copied_100:.1f} µs, and that of rows of 256 {copied_256:.1f}."
)

# %%
# What another kernel left behind
# -------------------------------
#
# What does the operator gain with rows of 4,096?

# %%


# Reading
compiled_first, by_most = listed_medians(forward, "torch.compile")
apart_at = [
    rows
    for name in ("torch.compile", "one row a program")
    for points in beyond_scatter(forward, name)
    for rows in points
]
overlapping = all(rows > 1024 for rows in apart_at)
most = max(
    MARKS,
    key=lambda rows: (
        forward.share("Kernel Book", rows=rows)
        - forward.share("one row a program", rows=rows)
    ),
)
lab.read(
    f"It wins most with {most:,} rows, where it reaches "
    f"{100 * forward.share('Kernel Book', rows=most):.0f} % of the speed of a copy, and the first "
    f"kernel {100 * forward.share('one row a program', rows=most):.0f} %. "
    + (
        "Up to 1,024 rows it wins nothing beyond the scatter"
        + (
            f", within which `torch.compile` is ahead by up to {by_most:.0f} %."
            if compiled_first and max(compiled_first) <= 1024
            else "."
        )
        if overlapping
        else ""
    )
)

# %%

# Folded: The forward pass, with the operator
lab.table(
    in_percent(forward, ("Kernel Book", "one row a program", "torch.compile")),
    "The forward pass, with the operator, in % of the speed of a copy",
)

# %%

# Folded: Where the operator loses time with 4,096 rows
lab.table(
    [
        {"kernel": row["4,096 rows"], "time (µs)": f"{row['µs']:.4g}"}
        for row in alone.rows
    ],
    "4,096 rows, timed in turn. To read x and add it up, without weights, is slower than the copy, "
    "too.",
)

# %%
# The operator's lead with 16,384 rows is due to the third point, one argument of ``tl.load``:
# ``eviction_policy="evict_first"``. When L2 needs room, it then gives up ``x`` first, which nobody
# reads again. Otherwise it may give up numbers that another kernel wrote, and these must be copied
# to HBM before ``x`` gets their room.


# Measuring
def evictions():
    rows, columns = 2**14, 4096
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    y = torch.empty(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
    some, others = torch.zeros(2, 2**26, device=runtime.DEVICE, dtype=torch.int32)

    def run(evict):
        weighted_sum_fwd_kernel[(rows // 2, 1)](
            x, w, y, *x.stride(), rows, columns, columns, 2, columns, evict, num_warps=4
        )

    def microseconds(before, evict):
        times = lab.event_times(lambda: run(evict), before=before)
        return round(1e3 * statistics.median(times), 1)

    caches = {
        "that were written": some.zero_,
        "that were written, then others that were read": lambda: (
            some.zero_(),
            others.max(),
        ),
    }
    return [
        {
            "before the kernel, L2 fills with numbers": name,
            "as usual (µs)": microseconds(before, ""),
            "evict_first (µs)": microseconds(before, "evict_first"),
        }
        for name, before in caches.items()
    ]


# %%

evicted = lab.measure("What L2 holds, and 16,384 rows", evictions)

# %%

# Reading
(dirty, dirty_first), (clean, clean_first) = [
    (row["as usual (µs)"], row["evict_first (µs)"]) for row in evicted.rows
] or [(nan, nan)] * 2
saved = 100 * (1 - dirty_first / dirty)
lab.read(
    f"**The hint is worth {saved:.0f} %, or nothing.** "
    + (
        "Most of that lead exists only because our benchmark fills L2 by writing before every run. "
        "After a kernel that only read, the hint saves nothing."
        if clean < 0.5 * (dirty + dirty_first) and abs(clean / clean_first - 1) < 0.02
        else f"Where L2 was filled by reading, it takes {clean_first:.1f} µs with it and "
        f"{clean:.1f} without, so the writing is not all that it waited for."
    )
)

# %%

# Folded: The times with and without the hint
lab.table(
    [
        {
            "L2 holds numbers that were": "written" if number == 0 else "only read",
            "without (µs)": f"{row['as usual (µs)']:.1f}",
            "with evict_first (µs)": f"{row['evict_first (µs)']:.1f}",
        }
        for number, row in enumerate(evicted.rows)
    ],
    "16,384 rows of 4,096 in bfloat16, after another kernel",
)

# %%
# Fewer partial sums
# ------------------
#
# The fourth point is in the backward pass. ``rows_backward`` starts a program for every two rows,
# and each leaves a row of sums in float32: as many bytes as ``x`` has in bfloat16. Writing and
# reading them doubles the bytes to move. The operator therefore starts only as many programs as the
# GPU runs at once, and each loops on to further rows before it stores its sums. The yardstick is
# now a copy of all of ``x``:


def backward_providers(rows, columns, dtype):
    x = torch.randn(
        rows, columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True
    )
    w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn(rows, device=runtime.DEVICE, dtype=dtype)
    dx = torch.empty_like(x)
    torch.compiler.reset()
    compiled = torch.compile(simple_weighted_sum, dynamic=False)

    def backward_of(operator):
        y = operator(x, w)
        return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)

    return {
        "copy": lambda: dx.copy_(x.detach()),
        "PyTorch": backward_of(simple_weighted_sum),
        "x @ w": backward_of(lambda x, w: x @ w),
        "torch.compile": backward_of(compiled),
        "Kernel Book": backward_of(weighted_sum),
    }


backward = lab.bench(
    "backward",
    [
        {"rows": 2**power, "columns": 4096, "dtype": torch.bfloat16}
        for power in (4, 8, 10, 12, 14, 16)
    ],
    backward_providers,
    limit="copy",
    work="2 * rows * columns * itemsize",
)
lab.plot(
    backward,
    "Backward, rows of 4,096 in bfloat16",
    share=True,
    names={"Kernel Book": "the operator"},
)

# %%

# Folded: The numbers of this figure
lab.table(
    in_percent(backward, backward.providers),
    "The backward pass, in % of the speed of a copy",
)

# %%

# Reading
theirs, ours = (
    backward.milliseconds_at(name, rows=2**16) for name in ("PyTorch", "Kernel Book")
)
compiled_first, _ = listed_medians(backward, "torch.compile")
of_ours = {rows: 100 * backward.share("Kernel Book", rows=rows) for rows in MARKS}
slowest = min(MARKS, key=of_ours.get)
lab.read(
    "**By count, few partial sums save nearly half of the bytes;** many were not timed. The "
    "operator takes two launches, and a copy one. With 65,536 rows it reaches "
    f"{of_ours[2**16]:.0f} % of the speed of a copy, and least with {slowest:,}, "
    f"{of_ours[slowest]:.0f} %. "
    + (
        f"`torch.compile` is faster with {listed(compiled_first)} rows. "
        if compiled_first
        else ""
    )
    + f"PyTorch's operations take {theirs / ours:.1f} times as long with 65,536. They write `dx`, "
    "read `x`, and write and read its product with `dy`; ours reads `x` and writes `dx`: that is a "
    "factor of 2. These runs leave the rest open."
)

# %%


# Measuring
def second_launches(rows=4096, columns=4096):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    dy = torch.randn(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    others = torch.zeros(2**26, device=runtime.DEVICE, dtype=torch.int32)
    found = {"after the first has ended": False}
    if runtime.early_start(runtime.DEVICE):
        found["early"] = True
    timed = []
    for name, early in found.items():
        with mock.patch.object(runtime, "early_start", lambda _, early=early: early):
            launch.forget()
            times = lab.event_times(
                lambda: _backward(dy, x, w, dx, dw), before=others.zero_
            )
        timed.append(
            {
                "the second kernel starts": name,
                "backward (µs)": round(1e3 * statistics.median(times), 1),
            }
        )
    launch.forget()
    return timed


# %%

# Folded: What an early launch of the second kernel saves
started = lab.measure(
    "Backward of 4,096 rows, by the start of its second kernel", second_launches
)
lab.table(
    started.rows,
    "Backward of 4,096 rows. The kernel that adds the partial sums may be launched while the first "
    "still runs, and then waits until these are in memory (programmatic dependent launch).",
)

# %%
# What the host costs
# -------------------
#
# The figures leave out the host, the CPU, which needs time for each call. Call after call, the
# slower of the two sets the pace.

x = torch.randn(64, 1024, device=runtime.DEVICE, dtype=torch.float16)
w = torch.randn(1024, device=runtime.DEVICE, dtype=torch.float16)
host = lab.host_times(
    {"Kernel Book": weighted_sum, "PyTorch": simple_weighted_sum}, x, w
)

# %%

# Folded: The host's time for a call
lab.table(
    [
        {
            "the host's time for a call": row["pass"],
            "PyTorch (µs)": f"{row['PyTorch (µs)']:.0f}",
            "the operator (µs)": f"{row['Kernel Book (µs)']:.0f}",
        }
        for row in host.rows
    ],
    "What a call costs the host",
)

# %%


# Reading
def on_gpu(name, rows, passes):
    """Microseconds of the kernels of some passes."""
    return 1e3 * sum(sweep.milliseconds_at(name, rows=rows) for sweep in passes)


def behind(number, passes):
    """Up to how many rows PyTorch should be faster, call after call."""
    row = host.rows[number] if host.rows else {}
    ours, theirs = (
        [
            max(row.get(f"{name} (µs)", nan), on_gpu(name, rows, passes))
            for rows in MARKS
        ]
        for name in ("Kernel Book", "PyTorch")
    )
    found = [
        rows
        for rows, one, two in zip(MARKS, ours, theirs, strict=True)
        if one > 1.01 * two
    ]
    return found[-1] if found else 0


behind_forward, behind_both = behind(0, [forward]), behind(1, [forward, backward])
host_of = [
    [row[f"{name} (µs)"] for row in host.rows] or [nan] * 2
    for name in ("Kernel Book", "PyTorch")
]
lab.read(
    f"A forward call takes the operator's host code {host_of[0][0]:.0f} µs, and PyTorch's "
    f"{host_of[1][0]:.0f}. From this we compute that **up to {behind_forward:,} rows of 4,096 "
    f"PyTorch should be faster,** and up to {behind_both:,} where gradients are needed."
)

# %%

# Folded: What the compiler made of the weighted sum


def launches(columns):
    x = torch.ones(4096, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.ones(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    inputs = (x.requires_grad_(), w.requires_grad_())
    return lambda: weighted_sum(*inputs).sum().backward()


lab.facts(
    "What the compiler made of the weighted sum",
    {
        f"{columns:,} columns, bfloat16": lambda n=columns: launches(n)()
        for columns in (4096, 1001)
    },
)

# %%
# What breaks it
# --------------
#
# A forgotten mask, wrong strides, shared numbers: none of them raised an error. Neither does
# **a sum in 16 bits**. From 2,048 on, float16 holds even integers only, so that adding 1 is rounded
# away, and each of this kernel's four sums stops there.


@triton.jit
def sum_of_ones_kernel(y_ptr, n, DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    total = tl.zeros((BLOCK_SIZE,), DTYPE)
    for _ in range(0, n, BLOCK_SIZE):
        total += tl.full((BLOCK_SIZE,), 1.0, DTYPE)
    tl.store(y_ptr, tl.sum(total.to(tl.float32), axis=0))


for dtype in (tl.float16, tl.float32):
    y = torch.empty(1, device=runtime.DEVICE)
    sum_of_ones_kernel[(1,)](y, 10000, dtype, BLOCK_SIZE=4)
    print(f"10,000 ones in {dtype}: {y.item():,.0f}")

# %%
# In short
# --------
#
# How do you write a kernel that reads each number once? Each program finds its block from its own
# number, a mask keeps it from what lies past the end, and all that it stores are its sums. The
# gradient takes one kernel more, and partial sums where programs would share. That keeps up with a
# copy on a large matrix. A finished operator adds a loop for long rows, a proven divisor for odd
# ones, a hint to L2, and fewer partial sums.
#
# How were these times taken, and would yours be the same? :doc:`/chapters/measuring` asks that.
#
# Puzzles
# -------
#
# **1.** Add two vectors of 10 elements, in blocks of 4.

# %%

# Solution: puzzle 1


@triton.jit
def add_kernel(a_ptr, b_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    a = tl.load(a_ptr + offsets, mask=inside)
    b = tl.load(b_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, a + b, mask=inside)


a, b = torch.randn(2, 10, device=runtime.DEVICE)
y = torch.empty_like(a)
add_kernel[(3,)](a, b, y, 10, BLOCK_SIZE=4)
assert torch.equal(y, a + b)

# %%
# **2.** Replace negative numbers by 0, with ``tl.where(condition, a, b)``.

# %%

# Solution: puzzle 2


@triton.jit
def relu_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, tl.where(x > 0, x, 0.0), mask=offsets < n)


x = torch.randn(1000, device=runtime.DEVICE)
y = torch.empty_like(x)
relu_kernel[(4,)](x, y, 1000, BLOCK_SIZE=256)
assert torch.equal(y, torch.relu(x))

# %%
# **3.** Reverse a vector; only the stores change.

# %%

# Solution: puzzle 3


@triton.jit
def reverse_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + n - 1 - offsets, x, mask=inside)


reverse_kernel[(4,)](x, y, 1000, BLOCK_SIZE=256)
assert torch.equal(y, x.flip(0))

# %%
# **4.** Read the diagonal of a square matrix, with one stride.

# %%

# Solution: puzzle 4


@triton.jit
def diagonal_kernel(x_ptr, y_ptr, stride_row, stride_col, n, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + i * (stride_row + stride_col), mask=i < n)
    tl.store(y_ptr + i, x, mask=i < n)


x = torch.randn(7, 7, device=runtime.DEVICE)
y = torch.empty(7, device=runtime.DEVICE)
diagonal_kernel[(1,)](x, y, *x.stride(), 7, BLOCK_SIZE=8)
assert torch.equal(y, x.diagonal())

# %%
# **5.** Make a matrix of 5 × 6 from vectors of 5 and of 6.

# %%

# Solution: puzzle 5


@triton.jit
def outer_kernel(
    a_ptr, b_ptr, y_ptr, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + i, mask=i < m)
    b = tl.load(b_ptr + j, mask=j < n)
    inside = (i < m)[:, None] & (j < n)[None, :]
    tl.store(y_ptr + i[:, None] * n + j[None, :], a[:, None] * b[None, :], mask=inside)


a, b = torch.randn(5, device=runtime.DEVICE), torch.randn(6, device=runtime.DEVICE)
y = torch.empty(5, 6, device=runtime.DEVICE)
outer_kernel[(1,)](a, b, y, 5, 6, 8, 8)
assert torch.equal(y, torch.outer(a, b))

# %%
# **6.** Find the largest number of each row with ``tl.max``, even where
# all are negative.

# %%

# Solution: puzzle 6


@triton.jit
def max_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
    tl.store(y_ptr + row, tl.max(x, axis=0))


x = -torch.rand(5, 100, device=runtime.DEVICE)
y = torch.empty(5, device=runtime.DEVICE)
max_kernel[(5,)](x, y, 100, BLOCK_COLS=128)
assert torch.equal(y, x.max(dim=1).values)

# %%
# **7.** Copy a matrix of 50 × 70 into one of 70 × 50, in blocks of 16 × 16.

# %%

# Solution: puzzle 7


@triton.jit
def transpose_kernel(x_ptr, y_ptr, m, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (i < m) & (j < n)
    tl.store(y_ptr + j * m + i, tl.load(x_ptr + i * n + j, mask=inside), mask=inside)


x = torch.randn(50, 70, device=runtime.DEVICE)
y = torch.empty(70, 50, device=runtime.DEVICE)
transpose_kernel[(4, 5)](x, y, 50, 70, BLOCK=16)
assert torch.equal(y, x.t())

# %%
# **8.** Add up 5,000 integers in blocks of 256, by partial sums.

# %%

# Solution: puzzle 8


@triton.jit
def block_sum_kernel(x_ptr, sums_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x, axis=0))


x = torch.arange(5000, device=runtime.DEVICE)
sums, total = (torch.empty(size, dtype=x.dtype, device=x.device) for size in (20, 1))
block_sum_kernel[(20,)](x, sums, 5000, BLOCK_SIZE=256)
block_sum_kernel[(1,)](sums, total, 20, BLOCK_SIZE=32)
assert total.item() == 5000 * 4999 // 2

# %%
# **9.** Count each of ten digits among 1,000, with ``tl.atomic_add``.

# %%

# Solution: puzzle 9


@triton.jit
def count_kernel(digits_ptr, counts_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    digits = tl.load(digits_ptr + offsets, mask=inside, other=0)
    tl.atomic_add(counts_ptr + digits, 1, mask=inside)


digits = torch.randint(10, (1000,), device=runtime.DEVICE)
counts = torch.zeros(10, dtype=torch.int32, device=runtime.DEVICE)
count_kernel[(4,)](digits, counts, 1000, BLOCK_SIZE=256)
assert torch.equal(counts.long(), digits.bincount(minlength=10))

# %%
# **10.** A tensor :term:`descriptor` replaces offsets and masks. Sum rows with
# ``TensorDescriptor.from_tensor(x, [rows, columns])`` and ``x_desc.load([row, 0])``.

# %%

# Solution: puzzle 10

from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def described_kernel(x_desc, y_ptr, n_rows, BLOCK_ROWS: tl.constexpr):
    first = tl.program_id(0) * BLOCK_ROWS
    rows = first + tl.arange(0, BLOCK_ROWS)
    x = x_desc.load([first, 0])
    tl.store(y_ptr + rows, tl.sum(x, axis=1), mask=rows < n_rows)


x = torch.arange(60.0, device=runtime.DEVICE).view(5, 12)
y = torch.empty(5, device=runtime.DEVICE)
described_kernel[(2,)](TensorDescriptor.from_tensor(x, [4, 16]), y, 5, BLOCK_ROWS=4)
assert torch.equal(y, x.sum(dim=1))

# %%
# References
# ----------
#
# - Tillet, Kung, Cox. *Triton: an intermediate language and compiler for tiled neural network
#   computations.* MAPL 2019.
# - Rush. *GPU puzzles* and *Triton puzzles*, whose form ours follow. 2022 and 2024.
# - Stanford CS336. *Language modeling from scratch*, assignment 2: a weighted sum.
# - NVIDIA. *CUDA C++ programming guide.*

# %%

# Closing
shares = {
    name: sweep.share("Kernel Book", rows=2**16)
    for name, sweep in {"forward": forward, "backward": backward}.items()
}
lab.finish(
    f"{shares['forward']:.0%} of the speed of a copy forward and {shares['backward']:.0%} backward"
)
