"""
Your first kernel
=================

PyTorch computes a weighted sum of each row of a matrix, ``(x * w).sum(-1)``, in two operations that
together move three times as many bytes as necessary. *How do you write a GPU kernel that reads the
matrix once, and another for its gradient?*

You will learn

- how a kernel divides its work among programs: blocks, offsets, masks, strides;
- how to write the backward pass, and turn both passes into a PyTorch operation;
- how memory limits the speed, and what a finished operator adds to a first kernel.

You need no GPU: small examples run in Triton's :term:`interpreter`, and results from a GPU are
replayed.
"""

# sphinx_gallery_thumbnail_number = 4
import re
import statistics
import time
import warnings
from functools import partial

from kernelbook import lab, reference, weighted_sum
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
warnings.filterwarnings("ignore", message=r"tl\.make_block_ptr is deprecated")
lab.start("first_kernel", "kernelbook.ops.weighted_sum")

# %%
# Write it
# --------
#
# The problem in PyTorch
# ~~~~~~~~~~~~~~~~~~~~~~
#
# We multiply each row of ``x`` by the weights ``w`` and add up the products, as in a linear layer
# with one output: :math:`y_i = \sum_j x_{ij} w_j`.

import torch

from kernelbook import runtime  # runtime.DEVICE is the GPU, if there is one


def simple_weighted_sum(x, w):
    return (x * w).sum(-1)


# %%
# For each operation, PyTorch launches one :term:`kernel`, a function that runs on the GPU. The
# multiplication reads ``x`` and writes a product as large as ``x``, which the sum then reads again.
# All of this passes through :term:`HBM`, the GPU's main memory:

# %%


# Drawing
FILLS = "#eaf2fb", "#fff4e5"  # what belongs to one program, and to another


def traffic(axes):
    size = torch.bfloat16.itemsize
    look = {"ha": "center", "va": "center", "fontsize": 10}
    lines = {
        "two operations": (
            ("multiply", "reads x"),
            ("multiply", "writes x * w"),
            ("sum", "reads x * w"),
        ),
        "one kernel": (("multiply, sum", "reads x"),),
    }
    for line, (name, steps_of) in enumerate(lines.items()):
        ink = lab.colour(("PyTorch", "Kernel Book")[line])
        axes.text(-0.08, line, name, va="center", ha="right", fontsize=10)
        for step, (operation, does) in enumerate(steps_of):
            axes.barh(
                line,
                0.94,
                0.66,
                step + 0.03,
                color=FILLS[1 - line],
                edgecolor=ink,
                linewidth=0.8,
            )
            axes.text(step + 0.5, line - 0.14, operation, color=ink, **look)
            axes.text(step + 0.5, line + 0.15, does, **look)
        total = f"{size * len(steps_of)} bytes"
        look_of_total = {"va": "center", "fontsize": 10, "fontweight": "bold"}
        axes.text(len(steps_of) + 0.08, line, total, **look_of_total)
    axes.set(xlim=(-0.85, 3.5), ylim=(1.45, -0.45), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "What passes through HBM for each 16-bit number of x",
    "Two operations take three steps of 2 bytes: the multiplication reads x and writes x * w, and "
    "the sum reads x * w. That makes 6 bytes. One kernel that does both only reads x, 2 bytes.",
    traffic,
    height=1.75,
)

# %%
# One kernel could therefore be three times as fast. The bars above show a wider gap, because
# PyTorch's multiplication is also slower than a copy.
#
# For this sum, PyTorch also has a single operation, ``x @ w``, because somebody has written its
# kernel. For most formulas nobody has, so we practise on one whose results we can compare.
#
# Ten numbers in blocks of four
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A Triton kernel is a Python function decorated with ``@triton.jit``. The GPU runs many instances
# of it at once, called :term:`programs <program>`, each working on a :term:`block` of elements.
# This kernel doubles ten numbers:

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
# The :term:`grid` ``(3,)`` asks for three programs, since three blocks of four cover ten elements.
# The programs differ only in their number, ``tl.program_id(0)``.
#
# .. image:: /figures/first-kernel-blocks.svg
#    :alt: Ten squares named x[0] to x[9] in three frames, program 0 to program 2, of four squares
#          each. The offsets 0 to 11 stand below. Offsets 10 and 11 in program 2 are marked as
#          masked, because they are past the end.
#
# A tensor arrives in the kernel as a :term:`pointer`, the address of its first element, without its
# length, which is why we pass ``n``. A pointer plus a block of offsets is a block of addresses,
# which ``tl.load`` reads from and ``tl.store`` writes to.


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
    "Three programs, their offsets, and the addresses to which these lead",
)

# %%
# The :term:`mask` ``offsets < n`` leaves out offsets 10 and 11. To see what it prevents, we make
# both tensors two numbers too long. In the second, the last two, both ``-1``, stand for somebody
# else's data:


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

# Measuring
on_gpu = {
    row["kernel"]: row["neighbours of y"]
    for row in lab.measure(
        "What became of the two numbers after y, on a GPU", neighbours
    ).rows
}

# %%

# Reading
kept, lost = (on_gpu.get(name, float("nan")) for name in ("with mask", "without"))
same = (kept, lost) == ("[-1.0, -1.0]", "[20.0, 22.0]")
lab.read(
    "**Without its mask, the kernel has overwritten the neighbours of `y`, and nothing reports "
    "it.** "
    + (
        "The same happened on a GPU"
        if same
        else f"On a GPU they became {lost}, and {kept} with the mask"
    )
    + ": the hardware usually reports only addresses outside all of the process's memory."
)

# %%
# Where the mask is false, a load returns an undefined value, unless ``other=0.0`` supplies one. A
# block of ten would need no mask, but Triton refuses it: **the size of a block must be a power of
# two, known when the kernel is compiled** (``tl.constexpr``). `Programs, warps, threads`_ explains
# why.

# %%


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

# Folded: What Triton says of a block of ten, and what makes another compiled kernel
try:
    double_kernel[(1,)](x, y, 10, BLOCK_SIZE=10)
except Exception as error:
    print(error.__cause__ or error)

compiled_kernels = lab.measure("Which launches share a compiled kernel", variants)
WHY = {
    "n = 1001": "nothing that Triton checks about n has changed",
    "n = 1008, which 16 divides": "neighbours are inside or outside together, so one wide load can "
    "fetch them",
    "n = 1": "Triton compiles a 1 as a constant, since strides are often 1",
    "blocks of 512": "the size is a constant in the compiled kernel",
    "float16": "the dtype of a pointer is part of its type",
}
lab.table(
    [row | {"because": WHY.get(row["launch"], "")} for row in compiled_kernels.rows],
    "Which launches share a compiled kernel, and why",
)

# %%
# You can now solve `puzzles 1 to 3 <Puzzles_>`__.
#
# Two dimensions
# ~~~~~~~~~~~~~~
#
# ``x`` is a matrix, but memory is one long line. A matrix of 5 rows and 6 columns is stored row by
# row, so element :math:`(i, j)` is at offset :math:`6 i + j`. The step from one row to the next,
# here 6, is the :term:`stride` of the rows.
#
# As in PyTorch, ``[:, None]`` turns a block into a column and ``[None, :]`` into a row, and their
# sum holds every combination. The block has eight columns, since six is not a power of two:
#
# .. image:: /figures/first-kernel-broadcast.svg
#    :alt: A column with 0 and 6, which is rows times the stride, plus a row with 0 to 7, the
#          columns, gives two rows of eight offsets: 0 to 7 and 6 to 13. Columns 6 and 7 are marked
#          as masked, because they are past the end.
#
# Without the mask, the first row would also load 6 and 7, the first two numbers of the second. With
# it, two zeros take their place:


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
# ``tl.sum(..., axis=1)`` is a :term:`reduction`: it adds up the columns of each row, in float32,
# because a sum in 16 bits soon loses digits.
#
# **Strides.** A transposed matrix is the same memory with its strides exchanged, so a kernel that
# takes both strides can read it without a copy. If we pass the usual strides instead, 6 and 1, the
# sums are wrong and no error is raised:

tall = torch.arange(30.0, device=runtime.DEVICE).view(6, 5)  # strides (5, 1)
turned = tall.t()  # strides (1, 5)
assumed = torch.empty(5, device=runtime.DEVICE)
rows_kernel[(3,)](turned, w, assumed, 6, 1, 5, 6, BLOCK_ROWS=2, BLOCK_COLS=8)

print("its own strides:", sum_rows(turned, w).tolist())
print("wrong strides:  ", assumed.tolist())

# %%
# The wrong sums are those of the earlier matrix, because strides of 6 and 1 take six neighbours in
# memory for a row:

# %%


# Drawing
def two_readings(axes):
    for line, (name, strides) in enumerate(
        {"its own": turned.stride(), "wrong": (6, 1)}.items()
    ):
        for offset in range(30):
            # the row and the column whose element lies at this offset
            [row] = [
                i
                for i in range(5)
                for j in range(6)
                if i * strides[0] + j * strides[1] == offset
            ]
            known = row < 2  # two rows in colour are enough
            axes.barh(
                line,
                0.86,
                0.36,
                offset + 0.07,
                color=FILLS[row] if known else "#f6f8fa",
                edgecolor=lab.colour(("Kernel Book", "PyTorch")[row])
                if known
                else lab.colour("copy"),
                linewidth=1.1 if known else 0.5,
            )
        text = f"{name} strides, {strides[0]} and {strides[1]}"
        axes.text(0, line - 0.36, text, va="center", fontsize=10)
    look = {"va": "center", "ha": "right", "fontsize": 10}
    axes.text(25.6, -0.36, "row 0", color=lab.colour("Kernel Book"), **look)
    axes.text(30, -0.36, "row 1", color=lab.colour("PyTorch"), **look)
    for offset in range(0, 30, 5):
        look = {"ha": "center", "va": "center", "fontsize": 9}
        axes.text(offset + 0.5, 1.4, str(offset), **look)
    axes.set(xlim=(-0.2, 30.2), ylim=(1.6, -0.6), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "The same 30 numbers in memory, read in two ways",
    "Two strips of 30 squares. With its own strides, 1 and 5, row 0 is every fifth square from 0 "
    "on, and row 1 every fifth from 1 on. With the wrong strides, 6 and 1, row 0 is squares 0 to "
    "5, and row 1 squares 6 to 11.",
    two_readings,
    height=1.75,
)

# %%
# You can now solve `puzzles 4 to 7 <Puzzles_>`__.
#
# What programs must not share
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# For training, PyTorch also needs gradients. Let :math:`L` be the loss and :math:`dy_i` its
# derivative with respect to :math:`y_i`. Each :math:`x_{ij}` contributes to one sum, but each
# :math:`w_j` to the sums of all rows:
#
# .. math::
#
#    dx_{ij} &= \frac{\partial L}{\partial y_i} \frac{\partial y_i}{\partial x_{ij}}
#          = dy_i \, w_j \\
#    dw_j &= \sum_i \frac{\partial L}{\partial y_i} \frac{\partial y_i}{\partial w_j}
#          = \sum_i dy_i \, x_{ij}
#
# Every program therefore contributes to the same :math:`dw`. Here are three attempts, each the last
# line of a kernel in which ``sums`` holds the sums over the program's own rows:
#
# .. code-block:: python
#
#    tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + sums)  # load, add, store
#    tl.atomic_add(dw_ptr + cols, sums)  # atomic addition
#    tl.store(parts_ptr + program * n_cols + cols, sums)  # partial sums
#
# Since programs run in no fixed order, and many at once, the first attempt can lose an addition:

# %%


# Drawing
def lost_addition(axes):
    orders = (
        ((0, "loads 5"), (0, "stores 6"), (1, "loads 6"), (1, "stores 7")),
        ((0, "loads 5"), (1, "loads 5"), (0, "stores 6"), (1, "stores 6")),
    )
    ends = ("7: right", "6: one lost")
    for line, (steps_of, end) in enumerate(zip(orders, ends, strict=True)):
        for step, (program, does) in enumerate(steps_of):
            ink = lab.colour(("Kernel Book", "PyTorch")[program])
            axes.barh(
                line,
                0.9,
                0.66,
                step + 0.05,
                color=FILLS[program],
                edgecolor=ink,
                linewidth=0.8,
            )
            look = {"ha": "center", "va": "center", "fontsize": 10}
            name = f"program {program}"
            axes.text(step + 0.5, line - 0.14, name, color=ink, **look)
            axes.text(step + 0.5, line + 0.15, does, **look)
        axes.text(4.1, line, end, va="center", fontsize=10, fontweight="bold")
    look = {"arrowstyle": "->", "color": lab.colour("copy")}
    axes.annotate("", (4, 1.55), (0.05, 1.55), arrowprops=look)
    axes.text(4.1, 1.55, "time", va="center", fontsize=10)
    axes.set(xlim=(0, 5.1), ylim=(1.75, -0.5), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Two programs each add 1 to the same number, initially 5",
    "Two orders in time. If program 0 loads 5 and stores 6 before program 1 loads 6 and stores 7, "
    "the result is 7, which is right. If both load 5 before either stores, both store 6, and one "
    "addition is lost.",
    lost_addition,
    height=2.1,
)

# %%
# An :term:`atomic` addition performs all three steps without interruption. With :term:`partial
# sums`, each program writes to its own row, and a second launch, which begins once the first has
# ended, adds up the rows.

# %%


# Measuring
@triton.jit
def in_place_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    before = tl.load(x_ptr + offsets - 1, mask=inside & (offsets > 0), other=0.0)
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, x + before, mask=inside)


def in_place_runs():
    n, rows = 2**20, []
    for run in range(5):
        x = torch.ones(n, device=runtime.DEVICE)
        in_place_kernel[(n // 256,)](x, x, n, BLOCK_SIZE=256)
        rows.append({"run": 1 + run, "wrong numbers": int((x[1:] != 2).sum())})
    return rows


# %%

# Measuring
in_place = lab.measure("In place on a GPU, 1,048,576 ones", in_place_runs)
nan = float("nan")


def listed(items, write="{:,}".format):
    *others, last = [write(item) for item in items]
    return f"{', '.join(others)} and {last}" if others else last


@triton.jit
def shared_sum_kernel(
    dy_ptr, x_ptr, sums_ptr, n_cols, WAY: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    rows = program * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :])
    sums = tl.sum(tl.load(dy_ptr + rows)[:, None] * x, axis=0)
    if WAY == "atomic":
        tl.atomic_add(sums_ptr + cols, sums)
    elif WAY == "parts":
        tl.store(sums_ptr + program * n_cols + cols, sums)
    else:
        tl.store(sums_ptr + cols, tl.load(sums_ptr + cols) + sums)


def sharing(n_rows=2**16, n_cols=1024):
    x = torch.randn(n_rows, n_cols, device=runtime.DEVICE) + 1
    dy = torch.randn(n_rows, device=runtime.DEVICE) + 1
    programs = n_rows // 64
    ones = torch.ones(programs, device=runtime.DEVICE)
    truth = dy.double() @ x.double()

    def in_place(way):
        dw = torch.zeros(n_cols, device=runtime.DEVICE)
        shared_sum_kernel[(programs, n_cols // 64)](dy, x, dw, n_cols, way, 64)
        return dw

    def in_parts():
        parts = torch.empty(programs, n_cols, device=runtime.DEVICE)
        shared_sum_kernel[(programs, n_cols // 64)](dy, x, parts, n_cols, "parts", 64)
        return sum_rows(parts.t(), ones)  # a row of parts.t() is a column of parts

    ways = {
        "load, add, store": lambda: in_place("store"),
        "atomic addition": lambda: in_place("atomic"),
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


if runtime.INTERPRETED:  # which runs one program after the other
    x, dy = torch.randn(256, 64) + 1, torch.randn(256) + 1
    truth = dy @ x
    for way in ("store", "atomic"):
        dw = torch.zeros(64)
        shared_sum_kernel[(4, 1)](dy, x, dw, 64, way, 64)
        assert torch.allclose(dw, truth, rtol=1e-4, atol=1e-3)

# %%

lab.table(
    [
        {
            "attempt": row["sum of 65,536 rows"],
            "error": f"up to {100 * float(row['worst error']):.0f} %"
            if float(row["worst error"]) > 1e-5
            else "rounding only",
            "bit-identical repeats": (f"{row['of 19 runs, equal to the first']} of 19"),
            "time (µs)": f"{row['µs']:.0f}",
        }
        for row in shared_sums.rows
    ],
    "65,536 rows of 1,024 in float32 on a GPU, in blocks of 64 × 64; times include zeroing or "
    "the second launch",
)

# %%

# Reading
way = {row["sum of 65,536 rows"]: row for row in shared_sums.rows}


def of_way(name, column):
    return float(way[name][column]) if way else nan


_, *rounded = (of_way(name, "worst error") for name in way or [None] * 3)
assert not way or max(rounded) < 1e-5
assert not way or of_way("partial sums", "of 19 runs, equal to the first") == 19
price = of_way("partial sums", "µs") / of_way("atomic addition", "µs") - 1
lab.together(
    lab.read(
        "**The first attempt is right in the interpreter,** which runs one program after another, "
        "**but wrong on the GPU.** Atomic additions happen in the order in which programs arrive, "
        "so rounding differs from run to run."
    ),
    lab.read(
        "**We choose partial sums,** because their order is fixed. In these blocks of 64 rows, "
        + (
            f"this costs {100 * price:.0f} % more time than atomic additions. "
            if price > 0.02
            else f"they also take {-100 * price:.0f} % less time than atomic additions. "
            if price < -0.02
            else "they take no more time than atomic additions. "
        )
        + "In blocks of two rows they become expensive, as we will see."
    ),
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Within one launch, no program may read or write what another program writes, unless both use
#    atomic operations.

# %%

# Folded: A race of reading against writing: a few wrong numbers in a million
wrong = [row["wrong numbers"] for row in in_place.rows]
ones = torch.ones(10, device=runtime.DEVICE)
in_place_kernel[(3,)](ones, ones, 10, BLOCK_SIZE=4)
lab.together(
    lab.listing(
        {
            "This kernel adds to each number the one before it. When we launch it with y = x, "
            "program 1 loads element 3, which program 0 overwrites": in_place_kernel
        }
    ),
    lab.read(
        (
            "In the interpreter, programs run in order and ten ones become "
            f"`{[int(one) for one in ones.tolist()]}`: the first number of each later block is 3 "
            "instead of 2. "
            if runtime.INTERPRETED
            else ""
        )
        + f"On a GPU, chance decides: of {2**20:,} ones in blocks of 256, "
        f"{min(wrong, default=nan)} to {max(wrong, default=nan)} came out wrong in each of five "
        "launches, and nothing reported an error. **A check of a few of these numbers would most "
        "likely miss the race.** The threads of one program can race in the same way within a "
        "block, since they do not all run in step."
    ),
)

# %%
# You can now solve `puzzles 8 and 9 <Puzzles_>`__.
#
# The gradient
# ~~~~~~~~~~~~
#
# One kernel computes both gradients and reads ``x`` once. Each program stores a block of :math:`dx`
# and one row of partial sums of :math:`dw`. Here every ``dy`` is 1:
#
# .. image:: /figures/first-kernel-parts.svg
#    :alt: The matrix x of 5 rows and 6 columns, which holds 0 to 29. Program 0 has rows 0 and 1,
#          program 1 rows 2 and 3, program 2 row 4. Each adds its rows, column by column, into its
#          own row of parts: 6 8 10 12 14 16, 30 32 34 36 38 40 and 24 25 26 27 28 29. The second
#          launch adds these three rows to dw: 60 65 70 75 80 85.
#
# The kernel uses the same blocks as ``rows_kernel``, but sums over their rows, along ``axis=0``:


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
# A PyTorch operation
# ~~~~~~~~~~~~~~~~~~~
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
# Our backward kernel takes no strides, so ``contiguous()`` first copies any tensor not stored row
# by row, such as the ``dy`` of stride 0 that ``y.sum().backward()`` passes. ``gradcheck`` moves
# each element by a step ``eps`` and compares the change in the result with our gradients:

x = torch.randn(5, 6, device=runtime.DEVICE, requires_grad=True)
w = torch.randn(6, device=runtime.DEVICE, requires_grad=True)
# y is linear in x and in w, so large steps are exact; small ones drown in rounding.
steps = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4}
print(torch.autograd.gradcheck(WeightedSum.apply, (x, w), **steps))

# %%
# **You have written a differentiable PyTorch operation.**
#
# What breaks it
# ~~~~~~~~~~~~~~
#
# The class silently returns wrong sums when the numbers of ``w`` are not adjacent in memory:

x = torch.arange(30.0, device=runtime.DEVICE).view(5, 6)
v = torch.arange(12.0, device=runtime.DEVICE)
w = v[::2]  # 0, 2, 4, 6, 8, 10, with stride 2
print("right:", simple_weighted_sum(x, w).tolist())
print("wrong:", WeightedSum.apply(x, w).tolist())

# %%
# The kernel took the first six numbers of ``v``, 0 to 5, for the weights. One line at the top of
# ``forward`` fixes this: ``w = w.contiguous()``.

# %%


# Measuring
@triton.jit
def talking_kernel(x_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    print("program", tl.program_id(0), "offsets", offsets, "x", x)


@triton.jit
def sum_of_ones_kernel(y_ptr, n, DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    total = tl.zeros((BLOCK_SIZE,), DTYPE)
    for _ in range(0, n, BLOCK_SIZE):
        total += tl.full((BLOCK_SIZE,), 1.0, DTYPE)
    tl.store(y_ptr, tl.sum(total.to(tl.float32), axis=0))


halves = {}
for dtype in (tl.float16, tl.float32):
    y = torch.empty(1, device=runtime.DEVICE)
    sum_of_ones_kernel[(1,)](y, 10000, dtype, BLOCK_SIZE=4)
    halves[dtype] = f"{y.item():,.0f}"
past_32_bits = torch.tensor(2**31).to(torch.int32).item()

lab.table(
    [
        {
            "mistake": "10,000 ones added up in float16",
            "right": halves[tl.float32],
            "wrong": halves[tl.float16],
        },
        {
            "mistake": "the offset 2³¹ in 32 bits",
            "right": f"{2**31:,}",
            "wrong": f"{past_32_bits:,}",
        },
    ],
    "Two more mistakes that raise no error",
)

# %%
# Your kernels avoid the first mistake, because they add in float32. They make the second when ``x``
# has more than 2³¹ elements. There ``tl.program_id(0).to(tl.int64)`` fixes ``rows``, and ``cols``
# may need the same.

# %%

# Folded: Why 16 and 32 bits are too few, and how to find a mistake in the interpreter
print("With TRITON_INTERPRET=1, breakpoint() stops inside a kernel, so that you can")
print('step through it, and print("x", x) shows a block. Here each of three programs')
print("prints its own:")
numbers = torch.arange(10.0, device=runtime.DEVICE) / 2
if runtime.INTERPRETED:
    talking_kernel[(3,)](numbers, 10, BLOCK_SIZE=4)
lab.together(
    lab.listing(
        {
            "The kernel that printed this": talking_kernel,
            "The kernel that adds ones": sum_of_ones_kernel,
        }
    ),
    lab.read(
        "From 2,048 on, float16 represents only even integers, so an added 1 is rounded away, and "
        "each of the four float16 sums of this kernel stops growing. Offsets of 32 bits end at "
        f"{2**31 - 1:,}. A matrix of 2³² bfloat16 numbers takes 8 GiB and fits on the GPU, but "
        "halfway through it, `rows * stride_row` in 32 bits would become negative, and the kernel "
        "would read other memory. `cols` needs `.to(tl.int64)` too if its stride is large, as in a "
        "transposed matrix."
    ),
)

# %%
# **You can stop here:** the rest is about speed.
#
# Make it fast
# ------------
#
# Programs, warps, threads
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Speed depends on which thread loads what. A GPU consists of SMs (:term:`streaming multiprocessors
# <SM>`), each running several programs. By default a program has four :term:`warps <warp>`, and the
# 32 threads of a warp execute the same instruction together. This is how they divide a block of
# 1,024 16-bit numbers:
#
# .. image:: /figures/first-kernel-threads.svg
#    :alt: Four levels. A grid of programs 0, 1, 2 and so on. Program 2 runs on one SM and has four
#          warps, of which warp 1 has the elements 256 to 511. Warp 1 has 32 threads of eight
#          elements each. Thread 1 holds the elements 264 to 271, which are 16 bytes.
#
# A thread holds eight neighbours because they fill 16 bytes, the most that it can load at once. The
# warp then reads 512 consecutive bytes in few transactions (:term:`coalescing`).
#
# The compiler distributes a block among the threads by halving it again and again, so its size must
# be a power of two. Each thread keeps its numbers in :term:`registers <register>`, which
# instructions refer to by name, so the compiler must know how many a block needs.

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

owned = lab.measure("Which thread holds which elements of a block of 1,024", owners)

# %%
# What memory delivers
# ~~~~~~~~~~~~~~~~~~~~
#
# Numbers come from HBM, the GPU's slowest memory, through :term:`L2`, a cache that all SMs share,
# and :term:`L1`, a cache of each SM.

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
        start = tl.multiple_of(start, BLOCK)  # a promise to the compiler: section 2
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


# Measuring
def in_short(row):
    mib = row["MiB"]
    size = f"{mib:,.0f} MiB" if mib < 2**13 else f"{mib / 2**10:,.0f} GiB"
    return size + ("" if row["memory"] in ("L2 cache", "HBM") else ", in all SMs")


# %%

# Reading
level = {row["memory"]: row for row in hierarchy.rows}


def at(memory, column):
    return level.get(memory, {}).get(column, nan)


hbm, in_registers = (at(name, "TB/s") for name in ("HBM", "registers"))
wait = at("HBM", "nanoseconds")
in_flight = hbm * wait / 1e3  # TB/s times ns is kB, and 1,000 of them a MB
multiply_adds, arrive = in_registers / 16, hbm / 2  # 10¹² per second
lab.read(
    "While HBM delivers one bfloat16 number, the GPU can perform "
    f"**{multiply_adds / arrive:.0f} float32 multiply-adds. The weighted sum needs one,** so it is "
    "memory-bound: what counts is to read `x` once."
)

# %%

# Folded: How fast and large each memory is, and which thread holds which element
lab.together(
    lab.table(
        [
            {
                "memory": row["memory"],
                "TB/s": f"{row['TB/s']:.3g}",
                "latency (ns)": f"{row['nanoseconds']:.3g}",
                "size": in_short(row),
            }
            for row in hierarchy.rows
        ],
        "What each memory delivers to all SMs, and its latency, the wait for the first number",
    ),
    lab.read(
        f"The speed of the registers is computed: we timed {multiply_adds:.0f} trillion "
        "multiply-adds per second, each of which reads three 4-byte numbers and writes one. HBM "
        f"delivers {arrive:.1f} trillion bfloat16 numbers per second. Since a number takes "
        f"{wait:,.0f} ns to arrive, {in_flight:.1f} MB must be in flight at any moment to keep HBM "
        "at full speed. That is why a GPU runs so many threads. Part of L1 can serve as shared "
        "memory, through which the threads of a program exchange numbers."
    ),
    owned,
)

# %%
# How fast is it?
# ~~~~~~~~~~~~~~~

# %%


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
        "two rows a program": lambda: sum_rows(x, w),
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

# %%

# Reading
slowly, first_takes, copied = (
    forward.milliseconds_at(name, rows=2**16)
    for name in ("PyTorch", "one row a program", "copy")
)
copy_speed = 2**16 * 4096 * 2 / copied / 1e9  # TB/s, of what is read and written
lab.together(
    lab.read(
        f"**With 65,536 rows of 4,096, your first kernel takes {1e3 * first_takes:,.0f} µs and "
        f"PyTorch's two operations {1e3 * slowly:,.0f}.** Is that fast? A copy is a good ruler, "
        "because it does nothing but move bytes. One that reads half of `x` and writes as much "
        f"moves as many bytes as we must read, and takes {1e3 * copied:,.0f} µs."
    ),
    *(
        [
            lab.read(
                "A kernel that mostly reads could be faster still: reading alone, HBM delivered "
                f"{hbm:.1f} TB/s, while this copy moves {copy_speed:.1f} and your kernel reads "
                f"{copy_speed * copied / first_takes:.1f}."
            )
        ]
        if hbm > copy_speed * max(1, copied / first_takes) or not forward.rows
        else []
    ),
)

# %%
# In the figure, 100 % is that copy. All times are of the GPU alone, and bands show the scatter of
# the runs (:doc:`/reading-figures`). 1Ki is 1,024. The *first kernel* is ``sum_rows(x, w,
# block_rows=1)``, with one row per program, and *the operator* is what it becomes in the `next
# section <What a finished operator adds_>`__.

lab.plot(
    forward,
    "Forward, rows of 4,096 in bfloat16",
    share=True,
    where={
        "provider": (
            "copy",
            "PyTorch",
            "x @ w",
            "torch.compile",
            "one row a program",
            "Kernel Book",
        )
    },
    names={
        "one row a program": "first kernel",
        "Kernel Book": "the operator",
        "PyTorch": "two operations",
    },
)

# %%

# Measuring
MARKS = [2**power for power in (4, 8, 10, 12, 14, 16)]
NAMED = {
    "Kernel Book": "the operator",
    "one row a program": "the first kernel",
    "two rows a program": "with two rows per program",
    "rows_backward": "your rows_backward",
    "loop": "the loop",
    "torch.compile": "torch.compile",
    "x @ w": "x @ w",
    "PyTorch": "PyTorch's operations",
}


def speed_of_copy(sweep, rows, passes=1):
    """TB/s, of as many passes over x as are counted; NaN where nothing was recorded."""
    return passes * rows * 4096 * 2 / sweep.milliseconds_at("copy", rows=rows) / 1e9


def in_percent(sweep, providers, passes=1):
    """Each provider's share of the speed of a copy, at each number of rows, and that speed."""
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
    ] + [
        {
            "rows of x": "the copy itself (TB/s)",
            **{
                f"{rows:,}": f"{speed_of_copy(sweep, rows, passes):.2g}"
                for rows in MARKS
            },
        }
    ]


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

# %%


# Reading
def beyond_scatter(sweep, provider, own="Kernel Book"):
    """Where the bands of a provider and of ours do not meet: where it is faster, and slower."""
    one, two = (
        sweep.at(provider=name).set_index(sweep.axis) for name in (provider, own)
    )
    both = [at for at in one.index if at in two.index]
    return (
        [int(at) for at in both if one["p80"][at] < two["p20"][at]],
        [int(at) for at in both if one["p20"][at] > two["p80"][at]],
    )


def gap(sweep, points, slower, faster):
    """By up to how many percent one provider takes longer than another."""
    most = max(
        sweep.milliseconds_at(slower, **{sweep.axis: at})
        / sweep.milliseconds_at(faster, **{sweep.axis: at})
        for at in points
    )
    return f"{'up to ' if len(points) > 1 else ''}{100 * (most - 1):.0f} %"


of_first, of_two, of_matmul = (
    [forward.share(name, rows=rows) for rows in MARKS]
    for name in ("one row a program", "PyTorch", "x @ w")
)
compared = "torch.compile", "one row a program"
sooner, later = beyond_scatter(forward, *compared)
apart_in_size = (
    sooner
    and later
    and sooner == MARKS[: len(sooner)]
    and later == MARKS[-len(later) :]
)
found = []
if sooner:
    less = max(
        1
        - forward.milliseconds_at("torch.compile", rows=rows)
        / forward.milliseconds_at("one row a program", rows=rows)
        for rows in sooner
    )
    found.append(
        f"takes {'up to ' if len(sooner) > 1 else ''}{100 * less:.0f} % less time than the first "
        f"kernel with {f'up to {sooner[-1]:,}' if apart_in_size else listed(sooner)} rows"
    )
if later:
    slower_by = gap(forward, later, *compared)
    than = "" if sooner else " time than the first kernel"
    takes = "" if sooner else "takes "
    many = (
        f"from {later[0]:,} rows on" if apart_in_size else f"with {listed(later)} rows"
    )
    found.append(f"{takes}{slower_by} more{than} {many}")
of_product, *_ = [
    row["µs"] / row["a copy of as many bytes (µs)"] for row in apart.rows
] or [nan]
between = all(
    two < one < first
    for two, one, first in zip(of_two, of_matmul, of_first, strict=True)
)
lab.together(
    lab.read(
        f"**With rows of 4,096, the first kernel reaches at least {100 * min(of_first):.0f} % of "
        "the speed of a copy at every size.** PyTorch's two operations reach "
        + (
            "less than half"
            if max(of_two) < 0.5
            else f"at most {100 * max(of_two):.0f} %"
        )
        + (
            ", and `x @ w`, a single operation, lies in between."
            if between
            else f", and `x @ w` {100 * min(of_matmul):.0f} to {100 * max(of_matmul):.0f} %."
        )
    ),
    lab.read(
        "With few rows, these shares say little about memory, because the copy itself is slow: it "
        f"moves {speed_of_copy(forward, MARKS[0]):.2f} TB/s with {MARKS[0]} rows and "
        f"{speed_of_copy(forward, MARKS[2]):.1f} with {MARKS[2]:,}."
    ),
    lab.read(
        "`torch.compile`, which spares you writing a kernel, "
        + (f"{', but '.join(found)}." if found else "is as fast as the first kernel.")
    ),
)

# %%

# Folded: How this was timed, the numbers, and PyTorch's two operations
lab.together(
    lab.read(
        "Before every run, the benchmark writes other numbers so that L2 does not hold `x`. "
        + (
            "The first kernel has one row per program in the figure; with two, it takes "
            f"{gap(forward, MARKS, 'two rows a program', 'one row a program')} more time."
            if all(
                forward.milliseconds_at("two rows a program", rows=rows)
                > 0.99 * forward.milliseconds_at("one row a program", rows=rows)
                for rows in MARKS
            )
            else ""
        )
    ),
    lab.table(
        in_percent(forward, forward.providers),
        "The forward pass, in % of the speed of a copy, and that speed",
    ),
    lab.read(
        "With 65,536 rows, PyTorch's two operations take "
        f"{slowly / copied:.0f} times as long as a copy"
        + (
            ", not the three that their bytes suggest, because the multiplication takes "
            f"{of_product:.1f} times as long as a copy of its bytes; we did not measure why."
            if of_product > 1.2 and slowly / copied > 3.5
            else "."
        )
    ),
    apart,
)

# %%
# What a finished operator adds
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The operator, ``kernelbook.weighted_sum``, accepts any shape and strides, and ``torch.compile``
# can compile a model around it. Three changes keep it fast where your kernels are slow or Triton
# refuses them: with very long rows, with lengths such as 100, and backward.

# %%


# Measuring
def flat_and_early():
    others = torch.zeros(2**26, device=runtime.DEVICE, dtype=torch.int32)

    def microseconds(run):
        times = lab.event_times(run, before=others.zero_)
        return round(1e3 * statistics.median(times), 1)

    def short_rows(flat, columns):
        rows, block_rows = 2**26 // columns, 2048 // columns
        x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
        w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
        y = torch.empty(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
        sizes = columns, 1, rows, columns, columns, block_rows, columns, "evict_first"
        options = {"UNIT": min(columns, 16), "FLAT": flat, "num_warps": 4}

        def run():
            return weighted_sum_fwd_kernel[(rows // block_rows, 1)](
                x, w, y, *sizes, **options
            )

        return microseconds(run), run().asm["ptx"].count(";\n")

    def two_launches(early, n=4096, parts=132):
        x = torch.randn(n, n, device=runtime.DEVICE, dtype=torch.bfloat16)
        w = torch.randn(n, device=runtime.DEVICE, dtype=torch.bfloat16)
        dy, dw = torch.randn_like(w), torch.empty_like(w)
        dx, sums = torch.empty_like(x), torch.empty(parts, n, device=runtime.DEVICE)
        first = weighted_sum_bwd_kernel[(n // 1024, parts)]
        second = part_sum_kernel[(n // 16,)]
        options = {"EARLY": early} | ({"launch_pdl": True} if early else {})

        def run():
            sizes = 1, n, 1, n, n, 4, 1024
            first(dy, x, w, dx, sums, *sizes, EARLY=early, UNIT=16, num_warps=4)
            second(sums, dw, parts, n, 256, 16, num_warps=4, **options)

        return microseconds(run), 0

    found = {
        "FLAT, rows of 64": partial(short_rows, columns=64),
        "FLAT, rows of 8": partial(short_rows, columns=8),
    }
    if runtime.early_start(torch.device(runtime.DEVICE)):
        found["EARLY"] = two_launches
    rows = []
    for name, timed in found.items():
        (off, longer), (on, shorter) = timed(False), timed(True)
        rows.append(
            {
                "flag": name,
                "off (µs)": off,
                "on (µs)": on,
                "instructions, off": longer,
                "instructions, on": shorter,
            }
        )
    return rows


flags = lab.attempt("FLAT and EARLY, off and on", flat_and_early)


def launches(columns):
    x = torch.ones(4096, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.ones(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    inputs = (x.requires_grad_(), w.requires_grad_())
    return lambda: weighted_sum(*inputs).sum().backward()


compiled_facts = lab.facts(
    "What the compiler made of the weighted sum",
    {
        f"{columns:,} columns, bfloat16": lambda n=columns: launches(n)()
        for columns in (4096, 1001)
    },
)


# %%
# 1. A loop over the columns
# ^^^^^^^^^^^^^^^^^^^^^^^^^^
#
# ``rows_kernel`` needs a block as long as the row, and Triton refuses blocks of more than 1,048,576
# elements. A loop takes the row block by block. Long rows are often few, so that programs with
# whole rows would leave most SMs idle. The :term:`grid` therefore gets a second dimension:
# ``tl.program_id(1)`` says which part of its rows a program sums.

# %%


# Drawing
def squares(axes, left, top, rows, columns, program):
    """Draw a block of so many squares."""
    ink = lab.colour(("Kernel Book", "PyTorch")[program])
    for row in range(rows):
        for column in range(columns):
            axes.barh(
                top + row + 0.5,
                0.9,
                0.88,
                left + column + 0.05,
                color=FILLS[program],
                edgecolor=ink,
                linewidth=0.8,
            )


def arrow(axes, start, end):
    look = {"arrowstyle": "->", "color": lab.colour("copy")}
    axes.annotate("", end, start, arrowprops=look)


def two_parts(axes):
    for program in range(2):
        left = 9.4 * program
        ink = lab.colour(("Kernel Book", "PyTorch")[program])
        look = {"ha": "center", "va": "center", "fontsize": 10}
        axes.text(left + 4.2, -1.9, f"program (0, {program})", color=ink, **look)
        for block in range(2):
            at = left + 4.4 * block
            axes.text(at + 2, -0.6, f"iteration {block}", **look)
            squares(axes, at, 0, 2, 4, program)
            arrow(axes, (at + 2, 2.1), (left + 3.5 + 1.4 * block, 3.9))
        squares(axes, left + 2.2, 4, 2, 4, program)
        arrow(axes, (left + 4.2, 6.1), (left + 4.2, 7.9))
        squares(axes, left + 3.7, 8, 2, 1, program)
        arrow(axes, (left + 4.2, 10.1), (8.7 + program * 0.4, 11.9))
    axes.text(-0.3, 1, "x", ha="right", va="center", fontsize=11, fontweight="bold")
    axes.text(1.9, 5, "total", ha="right", va="center", fontsize=11, fontweight="bold")
    axes.text(3.4, 9, "sums", ha="right", va="center", fontsize=11, fontweight="bold")
    axes.text(8.1, 13, "y", ha="right", va="center", fontsize=11, fontweight="bold")
    axes.text(4.7, 7, "tl.sum", ha="left", va="center", fontsize=10)
    axes.text(10.0, 13, "the second launch adds the parts", va="center", fontsize=10)
    for row in range(2):
        axes.barh(
            12.5 + row, 0.9, 0.88, 8.45, color="#f6f8fa", edgecolor=lab.colour("copy")
        )
    axes.set(xlim=(-1, 18.4), ylim=(14.1, -2.5), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Two rows in two parts, each in blocks of four columns",
    "Two rows of 16 columns. Program (0, 0) has the first eight columns, program (0, 1) the "
    "others. Each loads two blocks of four columns, in iterations 0 and 1, and adds both to its "
    "total of 2 by 4. tl.sum makes one sum per row of each total, and the second launch adds the "
    "sums of the two parts to y.",
    two_parts,
    height=3.7,
)

# %%
# .. literalinclude:: first_kernel.py
#    :language: python
#    :pyobject: long_rows_kernel
#    :start-at: part = tl.program_id(1)
#    :end-before: tl.store(sums_ptr
#    :dedent:
#
# Now that we can choose the size of a block, we take two rows of 4,096 columns, or more rows if
# they are shorter.

# %%


# Whole: long_rows_kernel, and the function that launches it
@triton.jit
def long_rows_kernel(
    x_ptr,  # input, (n_rows, n_cols)
    w_ptr,  # weight, (n_cols)
    sums_ptr,  # sums of the parts, (number of parts, n_rows)
    stride_row,
    stride_col,
    n_rows,
    n_cols,
    part_cols,  # columns of a part
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # any power of two
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    first = part * part_cols
    last = tl.minimum(first + part_cols, n_cols)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(first, last, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col
        inside = (rows < n_rows)[:, None] & (cols < last)[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0)
        w = tl.load(w_ptr + cols, mask=cols < last, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    sums = tl.sum(total, axis=1)
    tl.store(sums_ptr + part * n_rows + rows, sums, mask=rows < n_rows)


def sum_long_rows(x, w, parts=1, most_cols=4096):
    n_rows, n_cols = x.shape
    block_cols = min(most_cols, triton.next_power_of_2(n_cols))
    block_rows = max(2, 4096 // block_cols)  # of short rows, many
    part_cols = triton.cdiv(n_cols, parts)
    dtype = x.dtype if parts == 1 else torch.float32
    sums = torch.empty(parts, n_rows, device=x.device, dtype=dtype)
    grid = (triton.cdiv(n_rows, block_rows), parts)
    sizes = (n_rows, n_cols, part_cols, block_rows, block_cols)
    long_rows_kernel[grid](x, w, sums, *x.stride(), *sizes)
    if parts == 1:
        return sums[0]
    return sum_rows(sums.t(), torch.ones(parts, device=x.device)).to(x.dtype)


x = torch.randn(3, 1000, device=runtime.DEVICE)
w = torch.randn(1000, device=runtime.DEVICE)
for parts in (1, 4):
    y = sum_long_rows(x, w, parts, most_cols=64)
    assert torch.allclose(y, simple_weighted_sum(x, w), atol=1e-4)

# %%


# Measuring
@triton.jit
def block_pointer_kernel(
    x_ptr,  # input, (n_rows, n_cols), contiguous
    w_ptr,
    y_ptr,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_ROWS
    x_block = tl.make_block_ptr(
        x_ptr,
        shape=(n_rows, n_cols),
        strides=(n_cols, 1),
        offsets=(first, 0),
        block_shape=(BLOCK_ROWS, BLOCK_COLS),
        order=(1, 0),  # columns are contiguous
    )
    w_block = tl.make_block_ptr(w_ptr, (n_cols,), (1,), (0,), (BLOCK_COLS,), (0,))
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(0, n_cols, BLOCK_COLS):
        x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero")
        w = tl.load(w_block, boundary_check=(0,), padding_option="zero")
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
        x_block = tl.advance(x_block, (0, BLOCK_COLS))
        w_block = tl.advance(w_block, (BLOCK_COLS,))
    rows = first + tl.arange(0, BLOCK_ROWS)
    tl.store(y_ptr + rows, tl.sum(total, axis=1), mask=rows < n_rows)


@triton.jit
def descriptor_kernel(
    x_desc,  # TensorDescriptor.from_tensor(x, [BLOCK_ROWS, BLOCK_COLS])
    w_desc,  # TensorDescriptor.from_tensor(w, [BLOCK_COLS])
    y_ptr,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_ROWS
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        x = x_desc.load([first, start])
        w = w_desc.load([start])
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    rows = first + tl.arange(0, BLOCK_ROWS)
    tl.store(y_ptr + rows, tl.sum(total, axis=1), mask=rows < n_rows)


def ways_to_address(x, w, block_rows, block_cols):
    """The same sum in the same blocks, each time into a float32 vector of its own."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    n_rows, n_cols = x.shape
    grid = (triton.cdiv(n_rows, block_rows), 1)
    block = block_rows, block_cols
    by_offsets, by_pointer, by_descriptor = torch.empty(3, n_rows, device=x.device)
    described = (
        TensorDescriptor.from_tensor(x, list(block)),
        TensorDescriptor.from_tensor(w, [block_cols]),
    )
    strides = x.stride()
    sizes = n_rows, n_cols

    def offsets():
        long_rows_kernel[grid](x, w, by_offsets, *strides, *sizes, n_cols, *block)
        return by_offsets

    def block_pointers():
        block_pointer_kernel[grid](x, w, by_pointer, *sizes, *block)
        return by_pointer

    def descriptors():
        descriptor_kernel[grid](*described, by_descriptor, *sizes, *block)
        return by_descriptor

    return {
        "offsets": offsets,
        "block pointers": block_pointers,
        "descriptors": descriptors,
    }


x = torch.randn(5, 1000, device=runtime.DEVICE)
w = torch.randn(1000, device=runtime.DEVICE)
for name, run in ways_to_address(x, w, 2, 256).items():
    run = lab.tried(run, name)  # a Triton may know no block pointers
    assert isinstance(run, lab.Absent) or torch.allclose(
        run(), simple_weighted_sum(x, w), atol=1e-4
    )


def addressed():
    x = torch.randn(2**14, 4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    found = []
    for block_cols in (1024, 4096):
        ways = ways_to_address(x, w, 2, block_cols)
        truth = ways["offsets"]().clone()
        for name, run in ways.items():
            if isinstance(lab.tried(run, name), lab.Absent):
                continue
            difference = (run() - truth).abs().max() / truth.abs().max()
            took = 1e3 * statistics.median(lab.event_times(run))
            found.append(
                {
                    "columns of a block": block_cols,
                    "addresses by": name,
                    "µs": round(took, 1),
                    "largest difference": difference.item(),
                }
            )
    return found


ways = lab.attempt("Offsets, block pointers and descriptors", addressed)

# %%
# In the figure, the *loop* gives each program whole rows, and the *loop in parts* divides the rows
# until there are 1,024 programs. The loop is drawn where the two differ. 4Mi is 4,194,304:


def shape_providers(columns, rows, dtype):
    found = providers(rows, columns, dtype)
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype)
    block_rows = max(2, 4096 // min(4096, triton.next_power_of_2(columns)))
    parts = max(1, 1024 // triton.cdiv(rows, block_rows))
    first = lab.tried(found["one row a program"], "the first kernel")
    if isinstance(first, lab.Absent) and columns > 2**20:
        first = lab.Absent(
            f"the first kernel with rows of {columns:,}, which Triton refuses"
        )
    return {
        **{name: found[name] for name in ("copy", "PyTorch", "x @ w", "torch.compile")},
        "one row a program": first,
        "loop": lambda: sum_long_rows(x, w),
        "loop in parts": lambda: sum_long_rows(x, w, parts),
        "Kernel Book": found["Kernel Book"],
    }


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

SHAPES = (
    "copy",
    "torch.compile",
    "one row a program",
    "loop",
    "loop in parts",
    "Kernel Book",
)
OF_SHAPES = {
    "Kernel Book": "the operator",
    "torch.compile": "torch.compile",
    "loop in parts": "loop in parts",
    "loop": "loop",
    "one row a program": "first kernel",
}


def by_length(rows):
    said = [
        f"{name} {100 * row['share']:.0f}"
        for row in rows
        for provider, name in OF_SHAPES.items()
        if row["provider"] == provider and row["columns"] == 2**22
    ]
    return (
        "Lines over the length of a row, % of the speed of a copy; at 4,194,304: "
        f"{', '.join(said)}."
    )


def short(count):
    """16384 as 16Ki, as the other figures write it."""
    for size, letter in ((2**20, "Mi"), (2**10, "Ki")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def by_columns(rows):
    """Each provider's percentages of a copy, by the length of a row."""
    found = {}
    for row in rows:
        found.setdefault(row["provider"], {})[row["columns"]] = 100 * row["share"]
    return {name: dict(sorted(shares.items())) for name, shares in found.items()}


def branch(shares):
    """Where the loop without parts leaves the loop in parts, from the last length they share."""
    whole, parts = shares["loop"], shares["loop in parts"]
    apart = [n for n in whole if abs(whole[n] / parts[n] - 1) >= 0.05]
    before = [n for n in whole if n < min(apart, default=0)]
    return {n: whole[n] for n in [*before[-1:], *apart]}


def lines(axes, rows):
    shares = by_columns(rows)
    axes.axhline(100, color=lab.colour("copy"), linestyle="--", linewidth=1.5)
    ends = [(100, "copy", lab.colour("copy"))]
    for provider, name in OF_SHAPES.items():
        line = branch(shares) if provider == "loop" else shares.get(provider, {})
        if not line:
            continue
        ink = lab.colour("loop in parts" if provider == "loop" else provider)
        axes.plot(
            list(line),
            list(line.values()),
            color=ink,
            linestyle=":" if provider == "loop" else "-",
            linewidth=2.6 if provider == "Kernel Book" else 1.5,
            marker={"torch.compile": "^", "one row a program": "v"}.get(provider, "o"),
            markersize=4.5,
        )
        if provider == "one row a program":  # which ends before the others
            place = (420, line.get(256, 0) - 8)
            axes.annotate(name, place, color=ink, fontsize=10, va="center")
        else:
            ends.append((list(line.values())[-1], name, ink))
    height = -10  # of the label below
    for end, name, ink in sorted(ends):
        height = max(end, height + 6.5)
        look = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 10}
        axes.annotate(name, (1.02, height), color=ink, **look)
    axes.set_xscale("log", base=2)
    ticks = [n for n in shares["copy"] if n not in (100, 256)]
    axes.set_xticks(ticks, [short(n) for n in ticks])
    axes.minorticks_off()
    slow = shares.get("loop in parts", {}).get(100)
    if slow:
        look = {"fontsize": 9, "ha": "right", "va": "center"}
        axes.annotate("rows of 100", (125, slow - 6), **look)
    axes.set(xlabel="columns", ylabel="% of the speed of a copy", ylim=(-3, 107))


lab.draw(shapes, "Forward, 2²⁶ numbers in rows of 2 to 4Mi", by_length, lines)


# %%

# Reading
of_shapes = {
    (row["provider"], int(row["columns"])): 100 * row["share"] for row in shapes.rows
}
LENGTHS = [int(point["columns"]) for point in shapes.points]


def of_shape(provider, columns):
    """A provider's percentage of a copy; 0 where it was refused; NaN where nothing is recorded."""
    if (provider, columns) in of_shapes:
        return of_shapes[provider, columns]
    if provider in shapes.skipped:
        return 0.0
    return 100 * shapes.share(provider, columns=columns)


def or_refused(share):
    """A percentage as a table shows it."""
    return "refused" if share == 0 else "—" if share != share else f"{share:.0f}"


one_row = {columns: of_shape("one row a program", columns) for columns in LENGTHS}
refused = [columns for columns, share in one_row.items() if share == 0]
in_loop, in_parts = (of_shape(name, 2**22) for name in ("loop", "loop in parts"))
processors = (shapes.provenance or {}).get("sm_count", 0)
compiled_ahead = [
    columns
    for columns in LENGTHS
    if of_shape("torch.compile", columns) > 1.01 * of_shape("Kernel Book", columns)
]
gains = [
    of_shape("loop in parts", columns) / one_row[columns]
    for columns in LENGTHS
    if columns <= 256 and one_row[columns] != 0
]
lab.read(
    (
        f"**With rows of {short(2**22)}, for which Triton refuses the first kernel, "
        if refused == [2**22]
        else f"Triton refuses the first kernel for rows of {listed(refused)}. **With rows of "
        f"{short(2**22)}, "
        if refused
        else f"**With rows of {short(2**22)}, "
    )
    + f"the loop in parts reaches {in_parts:.0f} % of a copy;** the loop alone reaches "
    f"{in_loop:.0f} %, because its 8 programs "
    + ("leave most SMs idle. " if processors > 16 else "are few. ")
    + (
        f"`torch.compile` is faster than the operator with rows of {listed(compiled_ahead)}. "
        if compiled_ahead
        else ""
    )
)

# %%

# Reading
past_parts = [
    columns
    for columns in LENGTHS
    if of_shape("torch.compile", columns) > 1.02 * of_shape("loop in parts", columns)
]
lab.read(
    "**Short rows gain too,** though the loop makes a single iteration there: up to 256 columns, "
    f"with many rows in a block, this kernel is at least {min(gains):.1f} times as fast as the "
    "first."
    if min(gains, default=nan) > 1.05 or not shapes.rows
    else "Short rows, for which the loop makes a single iteration, do not gain."
)

# %%

# Reading
lab.read(
    f"`torch.compile` is faster than the loop in parts at {len(past_parts)} of the {len(LENGTHS)} "
    "lengths" + ("." if compiled_ahead else ", but at none faster than the operator.")
)

# %%


# Measuring
def long_rows():
    found = []
    for columns in (1024, 2**14, 2**18, 2**22):
        x = torch.randn(
            2**26 // columns, columns, device=runtime.DEVICE, dtype=torch.bfloat16
        )
        w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
        runs = {
            "the first kernel": lambda x=x, w=w: sum_rows(x, w, block_rows=1),
            "the loop": lambda x=x, w=w: sum_long_rows(x, w),
        }
        for name, run in runs.items():
            row = {"columns": columns, "kernel": name}
            usable = lab.tried(run, name)
            if isinstance(usable, lab.Absent):
                row |= {"registers": -1, "spills": -1, "instructions": -1}
            else:
                _, compiled = lab.compiled_by(run)[0]
                row |= {
                    "registers": compiled.n_regs,
                    "spills": compiled.n_spills,
                    "instructions": compiled.asm["ptx"].count(";\n"),
                }
            found.append(row)
    return found


long = lab.measure("The first kernel and the loop, by the length of rows", long_rows)

# %%

# Folded: The numbers of this figure, what Triton refuses, and what the compiler makes of long rows
try:
    longer = torch.ones(1, 2**21, device=runtime.DEVICE)
    sum_rows(longer, longer[0], block_rows=1)
except Exception as error:
    print(f"For a row of 2,097,152, Triton says: {error.__cause__ or error}")

lab.together(
    lab.table(
        [
            {
                "columns": f"{columns:,}",
                **{
                    NAMED.get(name, name): or_refused(of_shape(name, columns))
                    for name in (*SHAPES[1:], "x @ w", "PyTorch")
                },
            }
            for columns in LENGTHS
        ],
        "2²⁶ numbers in rows of 2 to 4Mi, in % of the speed of a copy, without the bytes of the "
        "sums; with rows of 2, these are half as many as those of x",
    ),
    lab.read(
        "With short rows, the kernel with the loop differs from the first in how many rows a block "
        "holds, and in code for the loop. We did not time the first kernel in blocks of as many "
        "rows."
    ),
    lab.read(
        f"With rows of 1,024, the loop reaches {of_shape('loop', 1024):.0f} % and the operator "
        f"{of_shape('Kernel Book', 1024):.0f}. The operator's blocks are larger, and it has a hint "
        "to the L2 cache. We did not measure what each of these gains."
    ),
    lab.table(
        [
            {
                "columns": row["columns"],
                "kernel": row["kernel"],
                "registers per thread": row["registers"]
                if row["registers"] >= 0
                else "—",
                "spilled": row["spills"] if row["spills"] >= 0 else "—",
                "instructions (PTX)": row["instructions"]
                if row["instructions"] >= 0
                else "refused",
            }
            for row in long.rows
        ],
        "The first kernel's code grows with the row; the loop's is the same for all rows longer "
        "than its block. Spilled are values for which no register was left",
    ),
)

# %%
# 2. A divisor for the compiler
# ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
#
# The loop dips at rows of 100 in the figure. A thread loads only one number at a time there,
# because Triton checks only whether a stride is 1 or a multiple of 16. It does not notice that 100
# is a multiple of 4. The operator's kernel says so in a line that seems to do nothing:
#
# .. code-block:: python
#
#    n_cols, stride_row = n_cols // UNIT * UNIT, stride_row // UNIT * UNIT
#
# ``UNIT``, a ``constexpr``, is the largest power of two, up to 16, that divides both the length and
# the stride of the rows, here 4.

# %%


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

    def run(unit):
        return weighted_sum_fwd_kernel[grid](
            x, w, y, *sizes, "evict_first", UNIT=unit, num_warps=4
        )

    found = []
    for name, unit in told.items():
        ptx = run(unit).asm["ptx"]
        wide = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+) ", ptx)
        times = lab.event_times(lambda unit=unit: run(unit), before=others.zero_)
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
    of_100 = {"nothing": 1, "that 4 divides both": 4}
    of_8 = {"nothing": 1, "that 8 divides both": 8}
    return loads(100, 64, of_100) + loads(8, 256, of_8)


# %%

loaded = lab.measure(
    "What a thread may load at once, 2²⁶ numbers in bfloat16", all_loads
)

# %%

# Reading
blind, known, *_ = [row["µs"] for row in loaded.rows] or [nan] * 2
_, wide, *_ = [row["widest load (bytes)"] for row in loaded.rows] or [nan] * 2
lab.read(
    "The line changes neither number, but the compiler now sees that both are multiples of 4, and "
    f"lets a thread load {wide / 2:.0f} numbers at once. **With rows of 100, this makes the "
    f"operator's kernel {blind / known:.1f} times as fast.**"
)

# %%

# Folded: Why the compiler has to know, and the times of rows of 100 and of 8
lab.together(
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
        "What a thread may load at once, and how long 2²⁶ numbers take",
    ),
    lab.read(
        "A thread can load 8 bytes at once only if the compiler can prove that the address is a "
        "multiple of 8. Rows of 100 begin 200 bytes apart, always at a multiple of 8. "
        "`tl.multiple_of(value, 4)` makes the same promise without arithmetic, about an "
        "integer or a block of offsets or addresses. Nothing checks the promise: if it is false, "
        "the results can be silently wrong."
    ),
)

# %%


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

# Folded: A smaller change: a hint to the L2 cache, and what it saves
(dirty, dirty_first), (clean, clean_first) = [
    (row["as usual (µs)"], row["evict_first (µs)"]) for row in evicted.rows
] or [(nan, nan)] * 2
saved, saved_clean = 100 * (1 - dirty_first / dirty), 100 * (1 - clean_first / clean)
l2 = (forward.provenance or {}).get("l2_mib", nan)
lab.together(
    lab.read(
        "What another kernel has left in L2 can slow yours. Each load of `x` evicts other numbers "
        "from a full L2, and those that were written must then be copied to HBM. "
        '`tl.load(…, eviction_policy="evict_first")` asks L2 to evict `x` first, so that the '
        "written numbers can stay."
    ),
    lab.read(
        f"With 16,384 rows, the hint saves {saved:.0f} % of the time after a kernel that wrote, "
        + (
            "but nothing"
            if abs(saved_clean) < 2
            else f"{'but it costs' if saved_clean < 0 else 'and'} {abs(saved_clean):.0f} %"
        )
        + " after one that only read. "
        + (
            "Our benchmark writes before every run. This may be why the first kernel, which has no "
            f"hint, reaches only {100 * of_first[-2]:.0f} % at this size in the forward figure. "
            if dirty > 1.1 * clean and of_first[-2] < 0.95 or not evicted.rows
            else ""
        )
        + "We did not test the hint with other numbers of rows."
    ),
    lab.table(
        [
            {
                "L2 holds numbers that were": "written" if number == 0 else "only read",
                "without the hint (µs)": f"{row['as usual (µs)']:.1f}",
                "with evict_first (µs)": f"{row['evict_first (µs)']:.1f}",
            }
            for number, row in enumerate(evicted.rows)
        ],
        "The operator's kernel after another kernel, 16,384 rows of 4,096 in bfloat16",
    ),
    lab.read(
        "This kernel has two rows per program. In the forward figure, after other numbers were "
        "written, the first kernel takes "
        f"{1e3 * forward.milliseconds_at('one row a program', rows=2**14):.1f} µs at this size, "
        f"and the copy {1e3 * forward.milliseconds_at('copy', rows=2**14):.1f}."
    ),
    lab.read(
        f"With 65,536 rows, `x` is {2**29 / 2**20 / l2:.1f} times as large as L2, and the first "
        f"kernel reaches {100 * of_first[-1]:.0f} % without the hint. We did not measure what the "
        "hint costs a later kernel that reads `x` again, such as the backward pass."
    ),
)

# %%
# 3. A loop over the rows
# ^^^^^^^^^^^^^^^^^^^^^^^
#
# Your backward pass is slowed by its partial sums. Each block of two rows leaves a row of them in
# float32, as many bytes as two rows of 16-bit numbers. So all the sums are as large as ``x``, and
# writing and reading them doubles the bytes.
#
# The second launch also reads them slowly. Its reads cannot coalesce, because neighbours in a row
# of ``parts.t()`` lie a whole row of ``parts`` apart.
#
# **A loop over the rows makes both costs small, because it leaves few sums.** A program no longer
# ends after its first block, but adds further blocks to the same total:

# %%


# Drawing
def blocks_in_turn(axes):
    blocks = 6
    look = {"ha": "center", "va": "center", "fontsize": 10}
    for side, (name, programs) in enumerate(
        {"rows_backward": blocks, "loop_backward": 2}.items()
    ):
        left = 5.0 * side
        axes.text(left + 2.1, -0.55, name, fontweight="bold", **look)
        for block in range(blocks):
            program = block % programs
            ink = lab.colour(("Kernel Book", "PyTorch", "copy")[min(program, 2)])
            fill = (*FILLS, "#f6f8fa")[min(program, 2)]
            style = {"color": fill, "edgecolor": ink, "linewidth": 0.8}
            axes.barh(block + 0.5, 4.2, 0.84, left, **style)
            axes.text(left + 2.1, block + 0.5, f"program {program}", color=ink, **look)
            if block < programs:
                axes.barh(7.45 + 0.5 * program, 4.2, 0.38, left, **style)
        arrow(axes, (left + 2.1, 6.1), (left + 2.1, 7.1))
    look |= {"ha": "right", "fontsize": 11, "fontweight": "bold"}
    axes.text(-0.3, 3, "x", **look)
    axes.text(-0.3, 8.7, "sums", **look)
    axes.set(xlim=(-1.5, 9.4), ylim=(10.3, -1), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Six blocks of rows, and the sums that they leave",
    "On the left, rows_backward: six programs, 0 to 5, with one block each leave six rows of sums. "
    "On the right, loop_backward: programs 0 and 1 take the six blocks in turn, three each, and "
    "leave two rows of sums.",
    blocks_in_turn,
    height=3.2,
)

# %%
# We start at most four programs per SM. From one block of a program to its next are ``step`` rows:
#
# .. literalinclude:: first_kernel.py
#    :language: python
#    :pyobject: loop_bwd_kernel
#    :start-at: total = tl.zeros
#    :end-before: tl.store(parts_ptr
#    :dedent:

# %%


# Whole: loop_bwd_kernel, and the function that launches it
@triton.jit
def loop_bwd_kernel(
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
    cols = tl.arange(0, BLOCK_COLS)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in range(program * BLOCK_ROWS, n_rows, step):
        rows = start + tl.arange(0, BLOCK_ROWS)
        offsets = rows[:, None] * n_cols + cols[None, :]
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dy[:, None] * w[None, :], mask=inside)
        total += dy[:, None] * x
    part = tl.sum(total, axis=0)
    tl.store(parts_ptr + program * n_cols + cols, part, mask=cols < n_cols)


def loop_backward(dy, x, w, block_rows=2):
    n_rows, n_cols = x.shape
    dx = torch.empty_like(x)
    most = 4 * runtime.multiprocessors(x.device)  # four programs for each SM
    programs = min(most, triton.cdiv(n_rows, block_rows))
    parts = torch.empty(programs, n_cols, device=x.device)
    block = (block_rows, triton.next_power_of_2(n_cols))
    loop_bwd_kernel[(programs,)](dy, x, w, dx, parts, n_rows, n_cols, *block)
    dw = sum_rows(parts.t(), torch.ones(programs, device=x.device))
    return dx, dw.to(w.dtype)


dy, x = (torch.randn(shape, device=runtime.DEVICE) for shape in ((50,), (50, 6)))
w = torch.randn(6, device=runtime.DEVICE)
for ours, before in zip(loop_backward(dy, x, w), rows_backward(dy, x, w), strict=True):
    assert torch.allclose(ours, before, atol=1e-5)

# %%


# Measuring
class LoopedWeightedSum(WeightedSum):
    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return loop_backward(dy.contiguous(), x.contiguous(), w)


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

    first = backward_of(WeightedSum.apply)
    return {
        "copy": lambda: dx.copy_(x.detach()),
        "PyTorch": backward_of(simple_weighted_sum),
        "x @ w": backward_of(lambda x, w: x @ w),
        "torch.compile": backward_of(compiled),
        "rows_backward": lab.tried(first, "the first backward"),
        "loop": backward_of(LoopedWeightedSum.apply),
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


# Measuring
def launch_by_launch(rows=2**16, columns=4096):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
    dy = torch.randn(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
    dx = torch.empty_like(x)
    found = []
    for name, kernel, programs in (
        ("rows_backward", rows_bwd_kernel, rows // 2),
        ("loop_backward", loop_bwd_kernel, 4 * runtime.multiprocessors(x.device)),
    ):
        parts = torch.empty(programs, columns, device=runtime.DEVICE)
        ones = torch.ones(programs, device=runtime.DEVICE)
        block = 2, triton.next_power_of_2(columns)
        args = dy, x, w, dx, parts, rows, columns, *block
        first, second = (
            round(1e3 * statistics.median(lab.event_times(run)), 1)
            for run in (
                lambda kernel=kernel, programs=programs, args=args: kernel[(programs,)](
                    *args
                ),
                lambda parts=parts, ones=ones: sum_rows(parts.t(), ones),
            )
        )
        found.append(
            {
                "backward": name,
                "rows of sums": programs,
                "first launch (µs)": first,
                "second launch (µs)": second,
            }
        )
    return found


launched = lab.measure(
    "The two launches of a backward pass, 65,536 rows", launch_by_launch
)
adjacent = lab.measure(
    "The second launch, with the sums of a column side by side",
    lambda: [
        {"µs": round(1e3 * statistics.median(times), 1)}
        for times in [
            lab.event_times(
                partial(
                    sum_rows,
                    torch.ones(4096, 2**15, device=runtime.DEVICE),
                    torch.ones(2**15, device=runtime.DEVICE),
                )
            )
        ]
    ],
)

# %%

# Reading
of_backward = {
    name: 100 * backward.share(name, rows=2**16)
    for name in ("PyTorch", "rows_backward")
}
ours_at = {rows: 100 * backward.share("Kernel Book", rows=rows) for rows in MARKS}
slowest = min(MARKS, key=ours_at.get)
lead = [
    backward.milliseconds_at("loop", rows=rows)
    / backward.milliseconds_at("Kernel Book", rows=rows)
    for rows in MARKS[:3]
]
ahead, _ = beyond_scatter(backward, "torch.compile")
past_loop = [
    rows
    for rows in beyond_scatter(backward, "torch.compile", "loop")[0]
    if backward.share("torch.compile", rows=rows)
    > 1.02 * backward.share("loop", rows=rows)
]
behind_most = max(
    past_loop,
    key=lambda rows: (
        backward.share("torch.compile", rows=rows) / backward.share("loop", rows=rows)
    ),
    default=nan,
)
in_order = past_loop == MARKS[: len(past_loop)]
as_slow = abs(of_backward["rows_backward"] - of_backward["PyTorch"]) < 1
parts_mib, fewer_mib = [
    row["rows of sums"] * 4096 * 4 / 2**20 for row in launched.rows
] or [nan] * 2
side_by_side = adjacent.rows[0]["µs"] if adjacent.rows else nan
first_time, loop_time, compiled_time = (
    1e3 * backward.milliseconds_at(name, rows=2**16)
    for name in ("rows_backward", "loop", "torch.compile")
)
second_one, second_after = [row["second launch (µs)"] for row in launched.rows] or [
    nan
] * 2
lab.read(
    f"**With 65,536 rows, the second launch takes {second_after:,.0f} µs instead of "
    f"{second_one:,.0f}.** "
    + (
        "Most of this was the price of their order: with the sums of a column side by side, the "
        f"same launch takes {side_by_side:,.0f}."
        if side_by_side < 0.5 * second_one or not adjacent.rows
        else "Here are the two launches alone:"
    )
)

# %%

lab.table(
    [
        {
            "backward pass": name,
            "rows of sums": f"{row['rows of sums']:,}",
            "first launch (µs)": of_first_launch.format(row["first launch (µs)"]),
            "second launch (µs)": f"{of_second_launch:.0f}",
        }
        for row, name, of_first_launch, of_second_launch in (
            (launched.rows[0], "rows_backward", "{:.0f}", second_one),
            (launched.rows[0], "its sums side by side", "—", side_by_side),
            (launched.rows[1], "loop_backward", "{:.0f}", second_after),
        )
    ]
    if launched.rows
    else [],
    "The two launches with 65,536 rows, timed alone",
)

# %%
# In the figure, 100 % is a copy of all of ``x``, since ``dx`` is also written. The *first backward*
# is ``rows_backward`` and the *loop* ``loop_backward``, both in blocks of two rows:

lab.plot(
    backward,
    "Backward, rows of 4,096 in bfloat16",
    share=True,
    names={"Kernel Book": "the operator", "rows_backward": "first backward"},
)

# %%

# Reading
leads_both = all(
    beyond_scatter(backward, name)[1] == MARKS for name in ("torch.compile", "loop")
)
lab.read(
    f"**With 65,536 rows, the loop makes your backward pass {first_time / loop_time:.1f} times as "
    "fast.** "
    + ("Before, it took as long as PyTorch's operations. " if as_slow else "")
    + (
        "Now it takes as long as `torch.compile`. "
        if abs(loop_time / compiled_time - 1) < 0.02
        else f"Now it is {100 * compiled_time / loop_time:.0f} % as fast as `torch.compile`. "
    )
    + f"Up to {MARKS[2]:,} rows, the loop gains nothing, since each program has at most one block."
)

# %%

# Reading
lab.read(
    (
        f"`torch.compile` is faster than the loop {'up to' if in_order else 'with'} "
        f"{f'{past_loop[-1]:,}' if in_order else listed(past_loop)} rows. "
        if past_loop
        else ""
    )
    + (
        f"`torch.compile` is faster than the operator with {listed(ahead)} rows."
        if ahead
        else "**The operator, with further changes, is "
        + (
            "faster than the loop and `torch.compile` at every size"
            if leads_both
            else "never behind `torch.compile`"
        )
        + f",** at {min(ours_at.values()):.0f} to {max(ours_at.values()):.0f} % of a copy."
    )
)

# %%

# Folded: The numbers of this figure, what else the operator changes, and the bytes of the sums
lab.together(
    lab.read(
        f"With 65,536 rows, `rows_backward` takes {first_time:,.0f} µs and `loop_backward` "
        f"{loop_time:,.0f}"
        + (
            f". The loop is furthest behind `torch.compile` with {behind_most:,} rows, where it "
            f"takes {gap(backward, [behind_most], 'loop', 'torch.compile')} more time."
            if past_loop
            else "."
        )
    ),
    lab.read(
        f"Up to {MARKS[2]:,} rows, the operator is "
        + (
            "about twice"
            if min(lead) > 1.8 and max(lead) < 2.2
            else f"{min(lead):.1f} to {max(lead):.1f} times"
        )
        + " as fast as the loop. It also divides the columns among programs, and adds up the sums "
        "with a dedicated kernel, which it launches early (`EARLY`, in the next fold); we did not "
        "isolate what each of these gains."
    ),
    lab.table(
        in_percent(backward, backward.providers, passes=2),
        "The backward pass, in % of the speed of a copy, and that speed",
    ),
    lab.read(
        f"HBM could deliver the {parts_mib:.0f} MiB of sums of the first backward in "
        f"{parts_mib * 2**20 / hbm / 1e6:.0f} µs"
        + (
            f"; with neighbours side by side, the second launch takes {side_by_side:.0f}. "
            if adjacent.rows
            else ". "
        )
        + f"The loop leaves only {fewer_mib:.0f} MiB. Per column, two rows of `x` take 4 bytes and "
        "two of `dx` 4 more; one float32 sum takes 4, written and then read again."
    ),
    lab.read(
        "The second launch of `rows_backward` holds two whole rows of `parts.t()` in a block. The "
        f"{2**20:,} elements that Triton allows in a block therefore suffice for {2**20:,} rows of "
        "`x`."
    ),
)

# %%

# Folded: The whole operator, from the kernels outwards, and two smaller changes: FLAT and EARLY
flag = {row["flag"]: row for row in flags.rows}


def with_and_without(name):
    row = flag[name]
    return f"{row['on (µs)']:.1f} µs with the flag and {row['off (µs)']:.1f} without"


lab.together(
    lab.listing(
        {
            "1. Forward, on the GPU: a program has some rows and one part of their columns": (
                weighted_sum_fwd_kernel
            ),
            "2. Backward, on the GPU: a program has some columns and its share of the rows, and "
            "reads x once": weighted_sum_bwd_kernel,
            "3. The second launch of either pass, if its sums are in parts": part_sum_kernel,
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
    ),
    lab.read(
        "**`FLAT`** loads a block of short, contiguous rows as one line of numbers, and cuts the "
        "line into rows with `tl.reshape` once the numbers have arrived. This needs no strides and "
        "no loop"
        + (
            f": for rows of 64, the compiled kernel has "
            f"{flag['FLAT, rows of 64']['instructions, on']} instructions with the flag and "
            f"{flag['FLAT, rows of 64']['instructions, off']} without, and 2²⁶ numbers take "
            f"{with_and_without('FLAT, rows of 64')}. In rows of 8, they take "
            f"{with_and_without('FLAT, rows of 8')}."
            if flag
            else "."
        )
    ),
    lab.read(
        "With **`EARLY`**, the kernel that adds the partial sums is launched while the backward "
        "kernel still runs. It then calls `gdc_wait`, which waits until the backward kernel has "
        "ended and its sums can be read"
        + (
            f": with 4,096 rows of 4,096, the two together take {with_and_without('EARLY')}."
            if "EARLY" in flag
            else "."
        )
    ),
    lab.table(
        [
            {
                "columns of x": row["case"].split()[0],
                "kernel": row["kernel"],
                "registers per thread": row["registers"],
                "spilled": row["spills"],
                "shared memory (bytes)": row["shared_bytes"],
            }
            for row in compiled_facts.rows
        ],
        "What the compiler made of the operator, 4,096 rows in bfloat16",
    ),
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    A memory-bound kernel is fast if it reads each number once, in wide loads of neighbours, from
#    enough programs to occupy all SMs, and leaves little for a second launch to read.
#
# Is it right?
# ~~~~~~~~~~~~


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


checked = lab.check("weighted_sum", cases())

# %%

# Reading
passed = checked.plain.splitlines()[0].removeprefix("weighted_sum: ").split(";")[0]
passed = re.sub(
    r"the worst at (\S+) of its tolerance",
    r"the worst with \1 of the permitted error",
    passed.removesuffix("."),
)
lab.read(
    "We compared the operator's results and gradients with float64. "
    f"{passed[0].upper()}{passed[1:]}."
)

# %%

# Folded: When a case passes, and the errors
lab.together(
    lab.read(
        "An error may be at most twice that of PyTorch, or one ulp, the gap to the next number. "
        "In float32, where the error comes mainly from the order of the additions, both limits are "
        "four times as wide."
    ),
    checked,
)

# %%
# Where the operator falls short
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~

# %%


# Measuring
def reading_alone(rows=4096, columns=4096):
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
        w = torch.randn(columns, device=runtime.DEVICE, dtype=dtype)
        sums = torch.empty(rows, device=runtime.DEVICE)
        half = x.view(-1)[: x.numel() // 2]
        target = torch.empty_like(half)
        others = torch.zeros(2**26, device=runtime.DEVICE, dtype=torch.int32)
        runs = {
            "copy half of x": partial(target.copy_, half),
            "read x and add it up, without weights": partial(row_sums, x, sums),
            "the operator": partial(weighted_sum, x, w),
        }
        times = {name: [] for name in runs}
        for _ in range(5):  # in turn, because they differ by little
            for name, run in runs.items():
                times[name] += lab.event_times(run, before=others.zero_)
        found += [
            {
                "dtype": str(dtype).removeprefix("torch."),
                "kernel": name,
                "µs": round(1e3 * statistics.median(taken), 2),
            }
            for name, taken in times.items()
        ]
    return found


alone = lab.measure("Reading alone, 2²⁴ numbers", reading_alone)


def by_the_clock(columns=4096, turns=20, calls=50):
    found = []
    for rows in (16, 256, 1024, 4096, 16384):
        x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)
        w = torch.randn(columns, device=runtime.DEVICE, dtype=torch.bfloat16)
        dy = torch.randn(rows, device=runtime.DEVICE, dtype=torch.bfloat16)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()

        def both(operator, leaves=leaves, dy=dy):
            return torch.autograd.grad(operator(*leaves), leaves, dy)

        for passes in ("forward", "with gradients"):
            operators = {
                "PyTorch": simple_weighted_sum,
                "WeightedSum": WeightedSum.apply,
                "Kernel Book": weighted_sum,
            }
            runs = {
                name: partial(operator, x, w)
                if passes == "forward"
                else partial(both, operator)
                for name, operator in operators.items()
            }
            fastest_turn = dict.fromkeys(runs, float("inf"))
            for _ in range(turns):
                for name, run in runs.items():
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(calls):
                        run()
                    torch.cuda.synchronize()
                    took = (time.perf_counter() - begin) / calls
                    fastest_turn[name] = min(fastest_turn[name], took)
            found.append(
                {"rows": rows, "pass": passes}
                | {
                    f"{name} (µs)": round(1e6 * took, 1)
                    for name, took in fastest_turn.items()
                }
            )
    return found


clock = lab.measure("A call by the clock, call after call", by_the_clock)

x = torch.randn(64, 1024, device=runtime.DEVICE, dtype=torch.float16)
w = torch.randn(1024, device=runtime.DEVICE, dtype=torch.float16)
host = lab.host_times(
    {"Kernel Book": weighted_sum, "PyTorch": simple_weighted_sum}, x, w
)

# %%

# Reading
apart_at = {
    rows
    for name in ("torch.compile", "one row a program")
    for points in beyond_scatter(forward, name)
    for rows in points
}
little = MARKS[: next((n for n, rows in enumerate(MARKS) if rows in apart_at), 6)]
ahead, _ = beyond_scatter(forward, "torch.compile")
_, leads = beyond_scatter(forward, "one row a program")
all_saved = {
    rows: 1
    - forward.milliseconds_at("Kernel Book", rows=rows)
    / forward.milliseconds_at("one row a program", rows=rows)
    for rows in leads
}
most_at = max(leads, key=all_saved.get, default=nan)
most_saved = all_saved.get(most_at, nan)
sooner_too = [  # where torch.compile is faster, if perhaps within the scatter
    rows
    for rows in MARKS
    if forward.milliseconds_at("torch.compile", rows=rows)
    < 0.98 * forward.milliseconds_at("Kernel Book", rows=rows)
]
less = max(
    (
        1
        - forward.milliseconds_at("torch.compile", rows=rows)
        / forward.milliseconds_at("Kernel Book", rows=rows)
        for rows in sooner_too
    ),
    default=nan,
)
clearly_sooner = set(ahead) & set(sooner_too)
compiled_sooner = (
    (
        f"Up to {sooner_too[-1]:,} rows, "
        if sooner_too == MARKS[: len(sooner_too)]
        else f"With {listed(sooner_too)} rows, "
    )
    + "`torch.compile` takes "
    + ("up to " if len(sooner_too) > 1 else "")
    + f"{100 * less:.0f} % less time than the operator"
    + ("." if clearly_sooner else ", though their scatter overlaps.")
    if sooner_too
    else ""
)
AIM = 0.95
BACKWARD_AIM = 85  # % of the speed of a copy, from 2²⁴ numbers on
missed = [
    rows for rows in MARKS if rows * 4096 >= 2**24 and ours_at[rows] < BACKWARD_AIM
]
of_dtype = {}
for row in alone.rows:
    of_dtype.setdefault(row["dtype"], {})[row["kernel"]] = row["µs"]
NOTHING = dict.fromkeys(
    ("copy half of x", "read x and add it up, without weights", "the operator"), nan
)
reached, bare = (
    {
        dtype: of_dtype.get(dtype, NOTHING)["copy half of x"]
        / of_dtype.get(dtype, NOTHING)[name]
        for dtype in ("bfloat16", "float32")
    }
    for name in ("the operator", "read x and add it up, without weights")
)
below = [dtype for dtype, share in reached.items() if share < AIM]
wide_enough = forward.share("Kernel Book", rows=2**14) >= AIM
met = sorted(
    [
        *(n for n in LENGTHS if of_shape("Kernel Book", n) >= 100 * AIM),
        *([4096] if wide_enough else []),
    ]
)
too_slow = sorted({*LENGTHS, 4096} - {*met})
short_of_aim = [n for n in LENGTHS if of_shape("Kernel Book", n) < 100 * AIM]
shortfall = min(LENGTHS, key=lambda columns: of_shape("Kernel Book", columns))
lab.read(
    (
        "**Forward, with rows of 4,096, the operator gains little over your first kernel:** at "
        f"most {100 * most_saved:.0f} % of the time, with {most_at:,} rows."
        + (
            f" Up to {little[-1]:,} rows, it gains nothing beyond the scatter."
            if little
            else ""
        )
        if leads or not forward.rows
        else "**Nowhere with rows of 4,096 is the operator faster forward than your first "
        "kernel** by more than the scatter."
    )
    + (f" {compiled_sooner}" if clearly_sooner else "")
)

# %%

# Reading
next_worst = min(
    (n for n in LENGTHS if n != shortfall),
    key=lambda columns: of_shape("Kernel Book", columns),
)
lab.read(
    (
        f"**It misses our aim of {100 * AIM:.0f} % of a copy** at {len(short_of_aim)} of the "
        f"{len(LENGTHS)} lengths in the figure of point 1"
        + (", and with 4,096 rows of 4,096. " if below else ". ")
        if short_of_aim or not shapes.rows
        else f"Forward, it meets our aim, {100 * AIM:.0f} % of a copy, with rows of any length. "
    )
    + (
        f"It is lowest with rows of two, at {of_shape('Kernel Book', 2):.0f} %, but there we leave "
        "out the bytes of the sums, half as many as those of `x`. Next is "
        f"{of_shape('Kernel Book', next_worst):.0f} %, with rows of {short(next_worst)}."
        if shortfall == 2
        else f"At worst, it reaches {of_shape('Kernel Book', shortfall):.0f} %, with rows of "
        f"{shortfall:,}."
    )
)

# %%

# Folded: Our aims, and where they are missed
lab.together(
    *(
        [lab.read(f"Forward, {compiled_sooner[0].lower()}{compiled_sooner[1:]}")]
        if compiled_sooner and not clearly_sooner
        else []
    ),
    lab.read(
        f"Forward, we aimed at {100 * AIM:.0f} % of the speed of a copy from 2²⁴ numbers on. With "
        f"4,096 rows of 4,096, timed again, the operator {'misses' if below else 'meets'} this "
        f"aim, reaching {100 * reached['bfloat16']:.1f} % in bfloat16 and "
        f"{100 * reached['float32']:.1f} % in float32. With 2²⁶ numbers, it "
        + (
            f"misses the aim with rows of {listed(too_slow)}."
            if too_slow
            else "meets the aim with rows of any length."
        )
    ),
    *(
        [
            lab.read(
                "With 16,384 rows of 4,096, the operator gains over your kernel about what the "
                "hint to the L2 cache saves alone."
            )
        ]
        if most_at == 2**14 and abs(saved - 100 * most_saved) < 2
        else []
    ),
    lab.read(
        "With the bytes of the sums, the operator would reach "
        f"{1.5 * of_shape('Kernel Book', 2):.0f} % with rows of two."
    ),
    lab.read(
        f"Backward, we aimed at {BACKWARD_AIM} % from 2²⁴ numbers on, which the operator "
        + (f"misses with {listed(missed)} rows." if missed else "reaches.")
        + f" Of all sizes, its worst is {ours_at[slowest]:.0f} %, with {slowest:,} rows of 4,096."
    ),
    lab.table(
        [
            {
                "dtype": row["dtype"],
                "kernel": row["kernel"],
                "time (µs)": f"{row['µs']:.4g}",
                "% of a copy": f"{100 * of_dtype[row['dtype']]['copy half of x'] / row['µs']:.1f}",
            }
            for row in alone.rows
        ],
        "4,096 rows of 4,096, timed in turn",
    ),
    lab.read(
        f"A kernel that adds up `x` without weights reaches {100 * bare['bfloat16']:.1f} % in "
        f"bfloat16 and {100 * bare['float32']:.1f} % in float32."
        + (
            " So the weights are not what costs most."
            if all(1 - bare[dtype] > 0.5 * (1 - reached[dtype]) for dtype in reached)
            else ""
        )
        + (
            " We did not measure why a copy is faster."
            if max(bare.values()) < 1
            else ""
        )
    ),
)

# %%


# Reading
by_clock = {(row["rows"], row["pass"]): row for row in clock.rows}


def theirs_faster(passes):
    """Up to how many rows PyTorch is over 2 % faster by the clock."""
    found = [
        rows
        for (rows, one), row in by_clock.items()
        if one == passes and row["PyTorch (µs)"] < 0.98 * row["Kernel Book (µs)"]
    ]
    return max(found, default=0)


behind, behind_both = theirs_faster("forward"), theirs_faster("with gradients")
lost = [
    row["Kernel Book (µs)"] / row["PyTorch (µs)"]
    for (rows, passes), row in by_clock.items()
    if rows <= (behind if passes == "forward" else behind_both)
]
where = [
    f"{name} up to {rows:,} rows"
    for name, rows in (("forward", behind), ("with gradients", behind_both))
    if rows
]
lab.read(
    (
        f"**With small matrices, PyTorch is faster:** {' and '.join(where)}, a call to the "
        f"operator takes up to {max(lost, default=nan):.1f} times as long. "
        if where or not by_clock
        else "**Small matrices take as long as in PyTorch.** "
    )
    + "Here the host, the CPU that launches the kernels, sets the pace; our figures time the GPU "
    "alone. CUDA graphs help, as the next chapter shows."
)

# %%

# Folded: A call by the clock, and the host's share of it
lab.together(
    lab.table(
        [
            {
                "rows of 4,096": rows,
                **{
                    f"{name}, {passes} (µs)": f"{by_clock[rows, passes][f'{key} (µs)']:.0f}"
                    for passes in ("forward", "with gradients")
                    for key, name in {
                        "PyTorch": "PyTorch",
                        "WeightedSum": "WeightedSum",
                        "Kernel Book": "operator",
                    }.items()
                },
            }
            for rows in sorted({row["rows"] for row in clock.rows})
        ],
        "A call by the clock, fifty calls in a row, in bfloat16",
    ),
    lab.table(
        [
            {
                "until the call returns": row["pass"],
                "PyTorch (µs)": f"{row['PyTorch (µs)']:.0f}",
                "the operator (µs)": f"{row['Kernel Book (µs)']:.0f}",
            }
            for row in host.rows
        ],
        "What a call costs the host, with its kernels only queued: 64 rows of 1,024 in float16",
    ),
)

# %%
# Puzzles
# -------
#
# After `Ten numbers in blocks of four`_:
#
# 1. Add two vectors of 10 elements in blocks of 4.
# 2. Replace every negative number among 1,000 by 0, using ``tl.where(condition, a, b)``.
# 3. Reverse the 1,000 numbers; only the offsets of the store change.

# %%

# Solution: puzzles 1 to 3


# Puzzle 1
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


# Puzzle 2
@triton.jit
def relu_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, tl.where(x > 0, x, 0.0), mask=offsets < n)


x = torch.randn(1000, device=runtime.DEVICE)
y = torch.empty_like(x)
relu_kernel[(4,)](x, y, 1000, BLOCK_SIZE=256)
assert torch.equal(y, torch.relu(x))


# Puzzle 3
@triton.jit
def reverse_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + n - 1 - offsets, x, mask=inside)


reverse_kernel[(4,)](x, y, 1000, BLOCK_SIZE=256)
assert torch.equal(y, x.flip(0))

# %%
# After `Two dimensions`_:
#
# 4. Read the diagonal of a 7 × 7 matrix: each step is one row stride plus one column stride.
# 5. Build the 5 × 6 matrix of all products of two vectors, of 5 and of 6 elements.
# 6. Find the largest number in each row, even if negative, using ``tl.max``.
# 7. Transpose a 50 × 70 matrix in blocks of 16 × 16. The grid is ``(4, 5)``, and
#    ``tl.program_id(1)`` is a program's number in its second dimension.

# %%

# Solution: puzzles 4 to 7


# Puzzle 4
@triton.jit
def diagonal_kernel(x_ptr, y_ptr, stride_row, stride_col, n, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + i * (stride_row + stride_col), mask=i < n)
    tl.store(y_ptr + i, x, mask=i < n)


x = torch.randn(7, 7, device=runtime.DEVICE)
y = torch.empty(7, device=runtime.DEVICE)
diagonal_kernel[(1,)](x, y, *x.stride(), 7, BLOCK_SIZE=8)
assert torch.equal(y, x.diagonal())


# Puzzle 5
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


# Puzzle 6
@triton.jit
def max_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
    tl.store(y_ptr + row, tl.max(x, axis=0))


x = -torch.rand(5, 100, device=runtime.DEVICE)
y = torch.empty(5, device=runtime.DEVICE)
max_kernel[(5,)](x, y, 100, BLOCK_COLS=128)
assert torch.equal(y, x.max(dim=1).values)


# Puzzle 7
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
# After `What programs must not share`_:
#
# 8. Add up 5,000 integers in blocks of 256, using partial sums.
# 9. Count how often each digit occurs among 1,000 digits, using ``tl.atomic_add``.
#
# One step further, a tensor :term:`descriptor` replaces offsets and masks:
#
# 10. Sum rows of 12, using ``TensorDescriptor.from_tensor`` and ``x_desc.load``.

# %%

# Solution: puzzles 8 to 10


# Puzzle 8
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


# Puzzle 9
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


# Puzzle 10
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

# Folded: Offsets beside descriptors, and block pointers, which new versions of Triton deprecate
of_way_at = {(row["addresses by"], row["columns of a block"]): row for row in ways.rows}
differ = max((row["largest difference"] for row in ways.rows), default=nan)
assert not ways.rows or differ < 1e-5


def beside_offsets(name):
    """How much longer this takes than offsets, in blocks of 1,024 and of 4,096 columns."""
    if (name, 1024) not in of_way_at and ways.rows:
        return f"{name} were refused."
    changes = []
    for columns in (1024, 4096):
        one, plain = (of_way_at.get((way, columns), {}) for way in (name, "offsets"))
        more = 100 * (one.get("µs", nan) / plain.get("µs", nan) - 1)
        if one or not ways.rows:
            said = f"{abs(more):.0f} % {'more' if more > 0 else 'less'}"
            changes.append("the same" if abs(more) < 2 else said)
    if len(set(changes)) == 1:
        return f"{name} take {changes[0]} time."
    first, second = changes
    return (
        f"{name} take {first} time in the narrow blocks and {second} in the wide ones."
    )


lab.together(
    lab.listing(
        {
            "A block pointer holds the address, the shape and the strides of a tensor, and where "
            "the block begins. tl.advance returns a pointer to the next block. boundary_check "
            "names the dimensions whose ends are checked, and padding_option says what is loaded "
            "beyond them": block_pointer_kernel,
            "A descriptor, made by the host or by tl.make_tensor_descriptor in a kernel, also "
            "knows the shape of its block. Each load says where its block begins, and what lies "
            "outside the tensor reads as 0. On GPUs with a copy engine, the engine fetches the "
            "block and requires strides that are multiples of 16 bytes": descriptor_kernel,
        }
    ),
    lab.table(
        [
            {
                "addresses by": name,
                **{
                    f"blocks of 2 × {columns:,} (µs)": f"{of_way_at[name, columns]['µs']:.1f}"
                    if (name, columns) in of_way_at
                    else "refused"
                    for columns in (1024, 4096)
                },
            }
            for name in ("offsets", "block pointers", "descriptors")
            if ways.rows
        ],
        "The same sum in the same blocks, 16,384 rows of 4,096 in bfloat16",
    ),
    lab.read(
        (
            "The results are bit-identical. "
            if differ == 0
            else f"The results differ by rounding, by at most {differ:.0e} of the largest. "
        )
        + f"Compared with offsets, {beside_offsets('block pointers')} "
        f"{beside_offsets('descriptors').capitalize()} We did not measure why."
    ),
)

# %%
# References
# ----------
#
# - Tillet, Kung, Cox. `Triton: an intermediate language and compiler for tiled neural network
#   computations <https://doi.org/10.1145/3315508.3329973>`__. MAPL 2019.
# - Rush. `GPU puzzles <https://github.com/srush/GPU-Puzzles>`__ and `Triton puzzles
#   <https://github.com/srush/Triton-Puzzles>`__, whose format our puzzles follow. 2022 and
#   2024.
# - Stanford CS336. `Language modeling from scratch <https://stanford-cs336.github.io>`__,
#   assignment 2: a weighted sum.
# - NVIDIA. `CUDA C++ programming guide
#   <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`__.

# %%

# Closing
shares = {
    name: sweep.share("Kernel Book", rows=2**16)
    for name, sweep in {"forward": forward, "backward": backward}.items()
}
lab.finish(
    f"{shares['forward']:.0%} of the speed of a copy forward and {shares['backward']:.0%} backward"
)
