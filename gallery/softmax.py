"""
Online softmax
==============

Softmax needs the largest element of a row before it can compute the first exponential, and the sum
of all exponentials before it can write the first result. *Must a kernel therefore read every row
three times?*

You will learn

- which two numbers to carry from block to block of a row, so that a sum can be repaired;
- how two partial results are merged in any order, which is what makes softmax parallel;
- what each further read of a row costs, and how to keep even a very wide row on chip.
"""

# sphinx_gallery_thumbnail_number = 6
from dataclasses import replace

import torch

from kernelbook import lab, reference, runtime, softmax
from kernelbook.lab import results
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.packed import narrow, widen
from kernelbook.ops.softmax import tuned
from kernelbook.ops.softmax.backward import row_bwd_kernel
from kernelbook.ops.softmax.forward import (
    online_fwd_kernel,
    packed_row_fwd_kernel,
    row_fwd_kernel,
    row_statistics,
    split_row_fwd_kernel,
    three_pass_fwd_kernel,
)
from kernelbook.small.softmax import (
    online_kernel,
    pair_of,
    shared_row_kernel,
    shared_softmax,
)

lab.start("softmax", "kernelbook.ops.softmax")

# %%
# The problem in PyTorch
# ----------------------
#
# Softmax turns a row of numbers into weights that are positive and sum to 1. The row 1, 2, 3
# becomes about 0.09, 0.24, 0.67. In PyTorch it takes five operations.


def simple_softmax(x):
    m = x.max(dim=-1, keepdim=True).values
    shifted = x - m
    numerator = shifted.exp()
    denominator = numerator.sum(dim=-1, keepdim=True)
    return numerator / denominator


# %%
# We subtract the maximum because exponentials overflow: in float16, even :math:`e^{12}` is too
# large to store. The result stays the same, because numerator and denominator are scaled by the
# same factor, :math:`e^{-m}`.
#
# Each operation reads its input from memory and writes its output back: 5 reads and 3 writes of the
# row, where one read and one write would do.
#
# .. image:: /figures/softmax-passes.svg
#    :alt: Passes over memory. simple_softmax, five operations: five reads and three writes.
#          three_pass: three reads and one write. online and online_2d: two reads and one write.
#          row, packed and split: one read and one write.
#
# A single :term:`kernel` can do all five steps. The figure names the six that this page builds.
#
# Blocks, done wrong
# ------------------
#
# It is wrong to normalise each block of a row by the maximum and the sum of that block. This kernel
# does it, and each :term:`program` takes one row.

import triton
import triton.language as tl


@triton.jit
def blockwise_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(
            x_ptr + row * n_cols + cols,
            mask=cols < n_cols,
            other=float("-inf"),
        )
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


# %%

x = torch.randn(3, 1000, device=runtime.DEVICE)
rows = []
for block in (1024, 512, 256):
    wrong = torch.empty_like(x)
    blockwise_kernel[(3,)](x, wrong, 1000, block)
    sums = ", ".join(f"{value:.3f}" for value in wrong.sum(-1))
    rows.append({"block": f"{block:,}", "sums of its three rows": sums})
right = ", ".join(f"{value:.3f}" for value in softmax(x).sum(-1))
lab.table(
    [*rows, {"block": "softmax", "sums of its three rows": right}],
    "Blocks normalised one by one",
)

# %%
# Every block sums to 1, so a row sums to its number of blocks. A test with short rows, of one
# block, would pass.
#
# The idea
# --------
#
# The loop must carry two numbers from block to block: the maximum so far and the sum so far. Take
# the row 1, 2, 4. After 1 and 2 the maximum is 2 and the sum is :math:`e^{1-2} + e^{2-2} = 1.37`.
# Then 4 arrives, and both terms should have been relative to 4. We need not compute them again:
# times :math:`e^{2-4}` the sum is 0.19, and with the 1 that the new element adds, 1.19.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    When a larger element arrives, all terms of the old sum are too large, but all by the same
#    factor, so one multiplication repairs the sum.
#
# The method is called :term:`online softmax`.
#
# The mathematics
# ---------------
#
# **The recurrence.** Let :math:`m_j` be the maximum of the first
# :math:`j` elements, and :math:`d_j` the sum of their exponentials relative to that maximum:
#
# .. math::
#
#    \begin{aligned}
#    m_j &= \max(m_{j-1},\, x_j) \\
#    d_j &= d_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j}
#    \end{aligned}
#
# with :math:`m_0 = -\infty` and :math:`d_0 = 0`. This is exact,
# :math:`d_j = \sum_{i \le j} e^{x_i - m_j}` for every :math:`j`, because exponents add: an old term
# :math:`e^{x_i - m_{j-1}}`, multiplied by :math:`e^{m_{j-1} - m_j}`, is :math:`e^{x_i - m_j}`. So a
# single pass over the row finds both its maximum and its sum.
#
# .. dropdown:: The proof, by induction
#
#    For :math:`j = 0` both sides of :math:`d_j = \sum_{i \le j} e^{x_i - m_j}` are 0. If it holds
#    for :math:`j - 1`, then
#
#    .. math::
#
#       \begin{aligned}
#       d_j &= d_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} \\
#       &= \sum_{i < j} e^{x_i - m_{j-1}}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} \\
#       &= \sum_{i \le j} e^{x_i - m_j}
#       \end{aligned}
#
# **The merge.** The recurrence adds one element at a time, but a GPU has thousands of threads. So
# cut the row into two pieces, with the pairs :math:`(m_a, d_a)` and :math:`(m_b, d_b)`. By the same
# cancellation, their union has the pair
#
# .. math::
#
#    \begin{aligned}
#    m &= \max(m_a,\, m_b) \\
#    d &= d_a\, e^{m_a - m} + d_b\, e^{m_b - m}
#    \end{aligned}
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The pair of a union does not depend on how the union was cut, so the merge is *associative*:
#    any grouping gives the same result.
#
# .. image:: /figures/softmax-merge.svg
#    :alt: A row in four pieces. Each piece has a pair of maximum and sum. Pairs are merged two by
#          two: (4, 1.19) and (3, 1.05) give (4, 1.57); (6, 1.74) and (1, 1.00) give (6, 1.74);
#          these two give (6, 1.96) for the whole row.


# Measuring
def pair(x):
    m = x.max()
    return m, (x - m).exp().sum()


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    return m, a[1] * (a[0] - m).exp() + b[1] * (b[0] - m).exp()


row = 10 * torch.randn(1000, dtype=torch.float64)
rows = []
for pieces in (2, 7, 100):
    pairs = [pair(piece) for piece in row.tensor_split(pieces)]
    while len(pairs) > 1:
        i, j = sorted(torch.randperm(len(pairs))[:2].tolist())
        pairs.append(merge(pairs.pop(j), pairs.pop(i)))
    m, d = pairs[0]
    off = abs(d / pair(row)[1] - 1).item()
    rows.append(
        {
            "pieces": f"{pieces}",
            "same maximum": bool(m == row.max()),
            "sum off by": f"{off:.0e}",
        }
    )
    assert m == row.max()
    assert off < 1e-13

# %%

# Folded: A check: pairs merged in a random order
lab.table(rows, "Pairs merged in a random order, float64")

# %%
# Three reads: three_pass
# -----------------------
#
# The straightforward kernel, ``three_pass``, has three loops where ``blockwise_kernel`` has one:
# for the maximum of the row, for its sum, and for the result. This is the second:

lab.source(three_pass_fwd_kernel, "sum")

# %%

# Folded: The three_pass kernel whole
lab.source(three_pass_fwd_kernel)

# %%
# Softmax is :term:`memory-bound`, because it does about five operations on a number and moves four
# bytes for it, if it has 16 bits. So the yardstick is PyTorch's copy, which reads and writes every
# row once. In the figures, in bfloat16, 100 % is as fast as a copy, and the new kernel is blue;
# from the second on the axis begins at 40 %.


# Measuring
def one_program(x):
    n_rows, n_cols = x.shape
    if n_cols > 65536:
        return lab.Absent(
            "a row of 131,072 does not fit in the registers of one program"
        )
    y, warps = torch.empty_like(x), max(1, n_cols // 2048)
    kernel = row_fwd_kernel[(n_rows,)]
    return lambda: kernel(x, y, n_cols, n_rows, n_cols, 1, n_cols, num_warps=warps)


def ladder_providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "simple_softmax": lambda: simple_softmax(x),
        "three_pass": lambda: softmax(x, algorithm="three_pass"),
        "online": lambda: softmax(x, algorithm="online"),
        "online_2d": lambda: softmax(x, algorithm="online_2d"),
        "one program": one_program(x),
        "Kernel Book": lambda: softmax(x),
    }


COLUMNS = [2**power for power in range(10, 18)]


def points(dtype):
    return [
        {"columns": columns, "rows": min(32768, 2**28 // columns), "dtype": dtype}
        for columns in COLUMNS
    ]


WORK = "2 * rows * columns * itemsize"
ladder = lab.bench(
    "ladder", points(torch.bfloat16), ladder_providers, limit="copy", work=WORK
)

# %%


# Drawing
PACKED, SPLIT = (
    tuned.TILE_COLS,
    tuned.WIDE_BYTES // 2,
)  # in bfloat16, longer rows than these
STEPS = {  # a name in the figures: the provider, and at how many columns it runs this kernel
    "simple_softmax": ("simple_softmax", range(2**20)),
    "three_pass": ("three_pass", range(2**20)),
    "online": ("online", range(2**20)),
    "row": ("one program", range(2**20)),
    "packed": ("Kernel Book", range(PACKED + 1, SPLIT + 1)),
    "split": ("Kernel Book", range(SPLIT + 1, 2**20)),
}
BESIDE = {
    "row": (-6, -11),
    "packed": (-24, 13),
}  # their names end inside the axes, in points
plain = [replace(sweep, skipped={}) for sweep in (ladder, *ladder.elsewhere)]


def step(new, title, until=0):
    """Draw the line of a kernel above those of the sections before, and shade what it gains.

    ``until`` is the longest row that is read again from L2, where the text speaks of that.
    """
    earlier = list(STEPS)[: list(STEPS).index(new)]

    def lines(rows):
        """The columns and heights of each kernel, the new one last; zoomed in from the second."""
        found = {}
        for name in [*earlier[new != "three_pass" :], new]:
            provider, at = STEPS[name]
            found[name] = {
                row["columns"]: 100 * row["share"]
                for row in rows
                if row["provider"] == provider and row["columns"] in at
            }
        return {name: line for name, line in found.items() if line}

    def told(rows):
        drawn = lines(rows)
        points = ", ".join(f"{n:,} columns {y:.0f}" for n, y in drawn[new].items())
        before = ", ".join(name for name in drawn if name != new)
        again = f" Read again from L2 up to {until:,} columns." if until else ""
        return f"{new} in % of a copy's speed: {points}. In grey: {before}.{again}"

    def draw(axes, rows):
        axes.figure.set_size_inches(5.4, 2.7)
        grey, blue = lab.colour("copy"), lab.colour("Kernel Book")
        drawn = lines(rows)
        for name, line in drawn.items():
            columns, height = list(line), list(line.values())
            look = {"color": grey, "linewidth": 1}
            if name == new:
                look = {
                    "color": blue,
                    "linewidth": 2.6,
                    "marker": "o",
                    "markersize": 4.5,
                }
            axes.plot(columns, height, **look)
            axes.annotate(
                name,
                (columns[-1], height[-1]),
                (6, 0) if columns[-1] == COLUMNS[-1] else BESIDE.get(name, (6, 0)),
                textcoords="offset points",
                va="center",
                color=look["color"],
                fontweight="bold" if name == new else "normal",
                annotation_clip=False,
            )
        best = [
            max(drawn[name].get(n, 0) for name in drawn if name != new) for n in columns
        ]
        gained = [ours > theirs for ours, theirs in zip(height, best, strict=True)]
        shade = {"color": blue, "alpha": 0.15, "linewidth": 0}
        axes.fill_between(
            columns, best, height, where=gained, interpolate=True, **shade
        )
        axes.axhline(100, color=grey, linestyle="--", linewidth=1)
        if until:
            axes.axvline(1.41 * until, color=grey, linestyle=":", linewidth=1)
            axes.text(1.3 * until, 44, "second read from L2", ha="right", color=grey)
            axes.text(1.55 * until, 110, "from memory", va="top", color=grey)
        axes.set_xscale("log", base=2)
        axes.set_xticks(COLUMNS[::2], [f"{n:,}" for n in COLUMNS[::2]])
        axes.minorticks_off()
        low = 0 if "simple_softmax" in drawn else 40
        axes.set(xlabel="columns", ylabel="% of a copy", ylim=(low, 114))

    return lab.draw(replace(plain[0], elsewhere=plain[1:]), title, told, draw)


step("three_pass", "From five operations to one kernel")

# %%

# Reading
short, cached, long = 4096, 16384, 131072
share = {
    (name, n): 100 * ladder.share(name, columns=n)
    for name in (
        "simple_softmax",
        "three_pass",
        "online",
        "online_2d",
        "one program",
        "Kernel Book",
    )
    for n in COLUMNS
    if (name, n) != ("one program", long)
}
on_gpu = f"On {ladder.provenance['gpu']}, at" if ladder.provenance else "At"
lowest = min(share["three_pass", n] for n in COLUMNS if n <= cached)
dips = [
    f"{n:,}" for n in COLUMNS if n <= cached and share["three_pass", n] < 1.01 * lowest
]
lab.read(
    f"{on_gpu} {long:,} columns `three_pass` reaches {share['three_pass', long]:.0f} %, where its "
    f"bytes, three reads and one write, would allow {100 * 2 / 4:.0f}. Shorter rows are faster, "
    "presumably because the second and the third read find them in a cache. Why the line dips at "
    f"{' and '.join(dips)} columns, and why `simple_softmax` reaches only "
    f"{share['simple_softmax', long]:.0f} % where its eight passes would allow {100 * 2 / 8:.0f}, "
    "we have not measured."
)

# %%
# Two reads: online
# -----------------
#
# One loop finds both the maximum and the sum, by the recurrence, a whole block at a time. When a
# block raises the maximum, ``alpha`` is less than 1 and shrinks the old sum before the block adds
# its own share.
#
# .. animation:: online_softmax

# %%
# The two lines with a comment repair what ``blockwise_kernel`` did wrong. Results need the final
# maximum and sum, so a second loop reads the row again.

lab.source(online_kernel)

# %%

# Reading
y = torch.empty_like(x)
online_kernel[(3,)](x, y, 1000, BLOCK_COLS=256)
torch.testing.assert_close(y, torch.softmax(x, dim=-1), rtol=1e-5, atol=0)
online_sums = ", ".join(f"{value:.3f}" for value in y.sum(-1))
lab.read(
    f"With blocks of 256, the three rows of “Blocks, done wrong” now sum to {online_sums}."
)

# %%

# Folded: The online kernel whole
lab.source(online_fwd_kernel)

# %%
# .. dropdown:: More: what the timed kernel does besides
#
#    If a row begins with a block of nothing but minus infinity, so is ``m_new``, and
#    :math:`-\infty - (-\infty)` is not a number. ``online``, the kernel that we time, puts zero in
#    its place, by ``finite``. It also asks the cache to keep the row for the second loop, and has a
#    variant of four rows per program, ``online_2d``.
#
# The second read is cheap where it finds the row in the :term:`L2` cache. It can if all rows *in
# flight*, those that programs are working on, fit there together.


# Measuring
def prediction():
    gpu = torch.cuda.get_device_properties(0)
    table = []
    for columns in COLUMNS:
        programs = min(32, 64 // max(1, min(columns, 8192) // 1024))
        mib = gpu.multi_processor_count * programs * columns * 2 / 2**20
        row = {"columns": columns, "MiB in flight": round(mib)}
        row["again from"] = "L2" if mib < gpu.L2_cache_size / 2**20 else "memory"
        row["online"] = f"{100 * ladder.share('online', columns=columns):.0f} %"
        table.append(row)
    return table


flight = lab.measure("Rows in flight of the online kernel, bfloat16", prediction)


def length_in_l2():
    """The longest row that is read again from L2, or 0 if that differs between GPUs."""
    longest = {
        max(
            (row["columns"] for row in table.rows if row["again from"] == "L2"),
            default=0,
        )
        for table in (flight, *flight.elsewhere)
        if table.rows
    }
    return longest.pop() if len(longest) == 1 else 0


# %%

# Folded: The rows in flight as a table
counted = (results.find("measuring") or {"tables": {}})["tables"].get(
    "Counters of two softmaxes, 16,384 × 8,192", {"columns": [], "rows": []}
)
counters = {
    (row[0], name): value
    for row in counted["rows"]
    for name, value in zip(counted["columns"], row, strict=True)
    if name in ("row", "online")
}
# eight warps; a thread is given registers by the eight
held = -(-counters.get(("registers per thread", "online"), float("nan")) // 8) * 8
at_once = min(8, 65536 // (256 * held))
in_flight = {
    n: (flight.provenance or {}).get("sm_count", 0) * at_once * n * 2 / 2**20
    for n in COLUMNS
    if n >= 8192
}
lab.table(
    [
        {
            "columns": f"{n:,}",
            "MiB of rows": f"{mib:.0f}",
            "with results": f"{2 * mib:.0f}",
            "online": f"{100 * ladder.share('online', columns=n):.0f} %",
        }
        for n, mib in in_flight.items()
    ],
    f"In flight with {at_once:.0f} programs of online per SM, and its speed, {on_gpu[3:-4]}",
)

# %%

# Drawing
step("online", "From three reads to two", until=length_in_l2())

# %%

# Reading
until = length_in_l2()
lab.read(
    (
        "By our estimate, to the right of the dotted line the rows in flight no longer fit, with "
        f"their results, into an L2 of {flight.provenance['l2_mib']:.0f} MiB. "
        if until
        else ""
    )
    + f"At {long:,} columns `online` reaches {share['online', long]:.0f} %, where its bytes, two "
    f"reads and one write, would allow {100 * 2 / 3:.0f}. Those of a single read would allow 100."
)

# %%

# Folded: More: four rows per program, online_2d
in_l2 = flight.provenance["l2_mib"] if flight.provenance else float("nan")
# four times as many rows in flight, where both kernels have eight warps
leaves = next((n for n, mib in in_flight.items() if 4 * 2 * mib > in_l2), 0)
first = next(
    (n for n in COLUMNS if share["online_2d", n] < 0.95 * share["online", n]), 0
)
lab.read(
    "From 8,192 columns on `online_2d` has four times as many rows in flight as `online`"
    + (
        f", if as many of its programs fit, and they leave L2 at {leaves:,} columns already."
        if leaves
        else "."
    )
    + (
        f" It falls behind at {first:,} columns, where its rows still fit and it reaches "
        f"{share['online_2d', first]:.0f} % to {share['online', first]:.0f}: for that we have no "
        "reason."
        if 0 < first < leaves
        else ""
    )
)

# %%

# Folded: How the rows in flight are counted
lab.read(
    "A row is in flight while a program works on it, so we count programs. From 8,192 columns on "
    f"`online` has 8 warps, and an SM runs at most 64. It takes {held:.0f} registers per thread "
    f"(counters in the chapter on measuring), so {at_once:.0f} programs fit. The cache also holds "
    "what is being written. Without that, rows of 32,768 columns would fit too, which the figure "
    "contradicts: the count is no more than an estimate."
)

# %%
# One read: row
# -------------
#
# A program that keeps its row needs no second read, and no loop: ``row`` is ``blockwise_kernel``
# with a single block that covers the row. It does everything in its :term:`registers <register>`,
# the fastest storage of a streaming multiprocessor (:term:`SM`). A block has a power of two of
# elements, and ``other`` fills what is left with minus infinity, whose exponential is 0.

# Folded: The row kernel whole, which takes one or more rows per program
lab.listing(
    {
        "UNIT is the greatest power of two, up to 16, that divides the length and the stride of "
        "rows. n_cols // UNIT * UNIT is n_cols, but now the compiler knows that UNIT divides it, "
        "and a thread may load several numbers at once": row_fwd_kernel
    }
)

# %%

# Reading
one, two = share["one program", 32768], share["online", 32768]
ahead = share["online", short] > 1.01 * share["one program", short]
written = {  # MB to memory, before the kernel ends
    name: value / 1e6
    for (what, name), value in counters.items()
    if what == "written to HBM"
}
fetched = [value for (what, _), value in counters.items() if what == "read from HBM"]
alike = bool(fetched) and max(fetched) < 1.01 * min(fetched)
left = written["row"] - written["online"] if written else 0  # that online leaves in L2
level = [
    sweep.provenance["gpu"] + ", with an older kernel," * bool(sweep.mark)
    for sweep in ladder.elsewhere
    if sweep.share("online", columns=short)
    < 1.01 * sweep.share("one program", columns=short)
]
gains = [n for n in COLUMNS[:-1] if share["one program", n] > 1.01 * share["online", n]]
lab.read(
    "The read that is saved gains nothing. "
    + (
        "At 8,192 columns both kernels read the same bytes from memory (chapter on measuring), "
        "because the second read of `online` finds them in a cache. "
        if alike
        else ""
    )
    + (
        "`row` is even slower there, by "
        f"{share['online', 8192] - share['one program', 8192]:.0f} points, and we did not "
        "find out why."
        if ahead
        else ""
    )
    if not gains
    else f"`row` gains on `online` at {' and '.join(f'{n:,}' for n in gains)} columns."
)

# %%

# Reading
lab.read(
    f"Nor does it help long rows: at 32,768 columns `row` falls to {one:.0f} % and `online` to "
    f"{two:.0f} (next figure), and a row of {long:,} does not fit into registers at all."
)

# %%
# Packed: two programs on an SM
# -----------------------------
#
# An SM has 65,536 registers of 4 bytes. A row of 32,768 numbers, widened to float32, takes half of
# them, and the program needs some for other values too, so no second program fits beside it. A lone
# program asks memory for nothing while it computes, and we suspect that this slows ``row``.
#
# .. animation:: registers_of_an_sm
#
# The kernel ``packed`` keeps a 16-bit row as it is in memory. In ``raw`` each int32 holds two
# numbers; ``widen`` turns such pairs into float32, and ``narrow`` turns the results back. So that
# the compiler cannot widen once and keep the float32 row in registers, we add ``zero`` between the
# steps: an argument that is always 0, which the compiler does not know.

lab.source(packed_row_fwd_kernel, "widen")

# %%

# Folded: The packed kernel whole, with widen and narrow
lab.listing(
    {
        "The kernel": packed_row_fwd_kernel,
        "From pairs to float32": widen,
        "And back": narrow,
    }
)

# %%


# Measuring
def launch(columns, dtype):
    x = torch.randn(64, columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    return lambda: softmax(x).sum().backward()


facts = lab.facts(
    "What the compiler made of the kernels",
    {
        f"{columns:,} columns, bfloat16": launch(columns, torch.bfloat16)
        for columns in (4096, 16384, 32768, 65536)
    },
)

# %%

# Folded: What the compiler made of the kernels
facts

# %%

# Drawing
step("packed", "From one program on an SM to two")

# %%

# Reading
kernels = {(r["case"], r["kernel"]): r for r in facts.rows}
made = kernels.get(("32,768 columns, bfloat16", "packed_row_fwd_kernel"), {})
nan = float("nan")
registers, threads = made.get("registers", nan), 32 * made.get("warps", 0)
# a thread is given registers by the eight
fitting = int(65536 // (threads * -(-registers // 8) * 8)) if threads else nan
unhurt = [
    (
        sweep.provenance["gpu"] + ", with an older kernel," * bool(sweep.mark),
        100 * sweep.share("one program", columns=32768),
    )
    for sweep in ladder.elsewhere
    if sweep.share("one program", columns=32768) > 0.98
]
lab.read(
    f"`packed` takes {registers:.0f} registers per thread, so {'two' if fitting == 2 else fitting} "
    f"programs of {threads} threads fit on an SM. At 32,768 columns it reaches "
    f"{share['Kernel Book', 32768]:.0f} %, and `row` {one:.0f}."
    + "".join(
        f" But on {gpu} `row` reaches {speed:.0f} % too, and no experiment here separates the "
        "number of programs from what else differs."
        for gpu, speed in unhurt[:1]
    )
)

# %%
# Split: programs share a row
# ---------------------------
#
# A row of 65,536 columns would take half of an SM's registers even when it is packed, so in the
# kernel ``split`` several programs share it. This :term:`exchange` has two steps: each program
# *publishes* the pair of its part in a *slot* of memory, zero at first, and *collects* the pairs of
# all from their slots.
#
# .. animation:: publish_and_collect

# %%
# The smallest kernel that does this calls ``pair_of`` for the pair of a part, with its numerators.

# Folded: The pair of one part
lab.source(pair_of)

# %%
# **Publish.** With four parts per row, programs 0 to 3 share row 0, and programs 4 to 7 row 1. A
# slot has 64 bits: those of the maximum above, those of the sum below. An :term:`atomic` stores all
# of them at once, so a reader finds either an empty slot or a whole pair, and no lock is needed.

lab.source(shared_row_kernel, "def", "publish")

# %%
# **Collect.** The program asks for one slot after the other, again and again while it is empty. An
# atomic *or* with 0 changes nothing and returns what the slot holds. The address is one number, so
# Triton asks once and hands the answer to all threads. Last comes the merge.

lab.source(shared_row_kernel, "collect", "write")

# %%
# GPUs start programs in the order of their numbers, so the parts of a row run at about the same
# time. Nothing promises that, so after ``max_polls`` looks a program computes the late pair itself.

# Folded: What the host does
lab.source(shared_softmax)

# %%

# Reading
y = shared_softmax(x)
torch.testing.assert_close(y, torch.softmax(x, dim=-1), rtol=1e-5, atol=0)
off = ((y - torch.softmax(x, dim=-1)) / torch.softmax(x, dim=-1)).abs().max()
lab.read(
    "With four programs per row, run now, no result differs from PyTorch's by more than "
    f"{off:.0e} of it. The timed kernel, `split`, looks at all slots at once."
)

# %%

# Folded: The split kernel whole, and its functions
lab.listing(
    {
        "The kernel": split_row_fwd_kernel,
        "Look until no slot is empty": exchange.wait,
        "Two float32 as the 64 bits of a slot": exchange.to_slot,
        "Fill a slot": exchange.publish,
        "Slots as maxima and sums": exchange.collect,
        "How many slots a program looks at, LOOKS, and its THREADS": exchange.looks,
        "The whole row, if a part did not come": row_statistics,
    }
)

# %%
# .. dropdown:: More: why at least 32 looks, and why no pair looks like an empty slot
#
#    A program takes at least 32 ``LOOKS``, one for each thread of a :term:`warp`. With fewer parts
#    a slot is read more than once (``parts % N_PARTS``), and ``collect`` drops the surplus. With 16
#    looks, threads 0 and 16 of a warp would both read slot 0, each by a load of its own. Thread 0
#    may read it just before it is filled and thread 16 just after. Then half of the warp leaves the
#    loop and the other half goes on, although the ``tl.min`` in the loop needs all 32 threads. The
#    ``tl.min`` over ``THREADS`` comes only after the loop, which is too late for that. With 32
#    looks each thread of a warp reads one slot, and all get the same minimum. ``volatile`` makes
#    each look a new read of memory.
#
#    The pairs of softmax are never 0, because the largest element of a part adds 1 to its sum. But
#    a part of nothing but minus infinity has no such element, and other chapters publish other
#    numbers. So ``to_slot`` stores a pair XOR a constant, the bits of two NaN that no arithmetic
#    produces, and every pair is stored as something other than zero. The atomic can be ``relaxed``,
#    which means that it does not order any other memory access, because the reader needs no other
#    memory of this part. If a pair is late, ``row_statistics`` reads the whole row.

# %%

# Drawing
step("split", "From one program per row to several")

# %%

# Reading
lab.read(
    f"`split` reaches {share['Kernel Book', 65536]:.0f} % at 65,536 columns, where `row`, with one "
    f"read as well, reaches {share['one program', 65536]:.0f}, and "
    f"{share['Kernel Book', long]:.0f} % at {long:,}. What the rest costs, we have not measured."
)

# %%
# Is it right?
# ------------
#
# We check all six kernels against float64, ``packed`` and ``split`` by way of the public
# ``softmax``. An error may be at most twice PyTorch's own, or one unit in the last place
# (:term:`ulp`), and twice as much in float32.
#
# .. dropdown:: Why twice as much in float32
#
#    Multiplying by the reciprocal rounds once more than a division, and the hardware's ``exp2``
#    errs in its last two bits.


def kernel_of(n_cols, dtype):
    """The kernel that the public softmax runs forward."""
    if n_cols * dtype.itemsize > tuned.WIDE_BYTES:
        return "split"
    pairs = dtype.itemsize == 2 and n_cols % 2 == 0
    return "packed" if n_cols > tuned.TILE_COLS and pairs else "row"


def cases():
    shapes = (
        ((7, 129), (2, 16401))
        if runtime.INTERPRETED
        else ((7, 129), (64, 4096), (5, 32768), (9, 70001))
    )
    for algorithm in ("row", "three_pass", "online", "online_2d"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in shapes:
                x = torch.randn(shape, device=runtime.DEVICE).mul(4).to(dtype)
                x.requires_grad_()
                dy = torch.randn_like(x)
                ours, theirs = softmax(x, algorithm=algorithm), torch.softmax(x, -1)
                ran = kernel_of(shape[1], dtype) if algorithm == "row" else algorithm
                what = f"{ran} {shape}"
                factor = 4 if dtype == torch.float32 else 2
                yield lab.Case(
                    what, "forward", ours, theirs, reference.softmax(x, -1), factor
                )
                truth = reference.softmax_backward(x, dy, -1)
                dx, their_dx = (
                    torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs)
                )
                yield lab.Case(what, "backward", dx, their_dx, truth, factor)


lab.check("softmax", cases())

# %%

# Folded: Rows that break things
inf = float("inf")
special = {
    "all -inf": torch.full((600,), -inf),
    "-inf, then numbers": torch.cat((torch.full((512,), -inf), torch.ones(88))),
    "one +inf": torch.cat((torch.tensor([inf]), torch.ones(599))),
    "one element": torch.tensor([3.0]),
    "large numbers": torch.tensor([3e38, 3e38, 1.0]),
}
rows = []
for name, x in special.items():
    x = x.to(runtime.DEVICE)
    for algorithm in ("row", "online"):
        y, expected = softmax(x, algorithm=algorithm), torch.softmax(x, -1)
        same = torch.allclose(y, expected, equal_nan=True)
        first = f"{y[0]:.3g}, {y[-1]:.3g}"
        rows.append(
            {"row": name, "algorithm": algorithm, "ends": first, "as PyTorch": same}
        )
        assert same
lab.table(rows, "Rows that break things: first and last element of the result")

# %%
# How fast is it?
# ---------------
#
# We compare with PyTorch, ``torch.compile``, Liger (LinkedIn's library of Triton kernels) and
# quack, which an author of FlashAttention has written in NVIDIA's CuTe DSL.

# Folded: Which kernel the public softmax runs
tried = {
    one["case"]
    for one in (results.find("softmax") or {"checks": {}})["checks"].get("softmax", [])
}
lab.read(
    f"In 16 bits the public `softmax` runs `row` up to {PACKED:,} columns, `packed` up to "
    f"{SPLIT:,} and `split` beyond. Float32 cannot be packed: it runs `row` up to {SPLIT // 2:,}."
    + (
        f" It does not run `online`, which is faster than `row` at {short:,} columns here, because "
        f"on {level[0]} that gains less than 1 %."
        if ahead and level
        else ""
    )
    + (
        " The checks on the GPU call all three `row`."
        if tried and not any(name.startswith(("packed", "split")) for name in tried)
        else ""
    )
)

# %%

# Folded: All kernels of this page in one figure, forward, bfloat16
for crossing in ("online", "three_pass", "simple_softmax"):
    lab.colour(crossing)  # in this order lines that cross differ most
lab.plot(
    ladder,
    "All kernels of this page, forward, bfloat16",
    share=True,
    names={"one program": "row"},
)

# %%


# Measuring
def liger(x):
    return lab.peer(
        "liger_kernel.ops.softmax",
        lambda ops: lambda: ops.LigerSoftmaxFunction.apply(x),
    )


def quack(x):
    return lab.peer("quack.softmax", lambda ops: lambda: ops.softmax(x))


def providers(columns, rows, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    y = torch.empty_like(x)
    compiled = torch.compile(lambda x: torch.softmax(x, -1))
    return {
        "copy": lambda: y.copy_(x),
        "PyTorch": lambda: torch.softmax(x, -1),
        "torch.compile": lambda: compiled(x),
        "Liger": liger(x),
        "quack": quack(x),
        "Kernel Book": lambda: softmax(x),
    }


forward = lab.bench(
    "forward",
    [point for dtype in (torch.bfloat16, torch.float32) for point in points(dtype)],
    providers,
    limit="copy",
    work=WORK,
)

# %%

# Reading
in_dtypes = [{"dtype": "bfloat16"}, {"dtype": "float32"}]
lab.read(forward.summary(**in_dtypes[0]))

# %%

# Drawing
lab.plot(forward, "Forward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Folded: Where PyTorch and torch.compile fall, and what float32 shows of it
eager = {n: 100 * forward.share("PyTorch", **in_dtypes[0], columns=n) for n in COLUMNS}
lowest = min(eager, key=eager.get)
compiled = [
    100 * forward.share("torch.compile", dtype="bfloat16", columns=n) for n in COLUMNS
]
drop = min(range(1, len(COLUMNS)), key=lambda at: compiled[at] - compiled[at - 1])
double = forward.milliseconds_at(
    "torch.compile", dtype="float32", columns=4096
) / forward.milliseconds_at("torch.compile", dtype="bfloat16", columns=4096)
reason = (
    "Bytes do not set its time there, because float32 takes only "
    f"{double:.2f} times as long at 4,096 columns. PyTorch's source shows what can: beyond 1,024 "
    "columns its kernel corrects the sum for every number, not for every block, which makes three "
    "exponentials per number, where `row` computes one."
    if double < 1.4
    else "Bytes set much of its time there."
)
doubled = forward.milliseconds_at(
    "PyTorch", dtype="float32", columns=lowest
) / forward.milliseconds_at("PyTorch", dtype="bfloat16", columns=lowest)
pytorch = (
    f"At {lowest:,} columns, PyTorch's time is not set by bytes: float32 takes only {doubled:.2f} "
    "times as long as bfloat16. "
    if doubled < 1.4
    else f"At {lowest:,} columns, float32 takes PyTorch {doubled:.2f} times as long as bfloat16. "
)
lab.read(
    f"{pytorch}Its source has a kernel that keeps up to nine "
    "numbers of a row in the registers of each of 1,024 threads, and so ends at 9,216 columns; "
    "another one, through shared memory, takes over there. "
    f"In bfloat16 `torch.compile` falls from {compiled[drop - 1]:.0f} to {compiled[drop]:.0f} % "
    f"between {COLUMNS[drop - 1]:,} and {COLUMNS[drop]:,} columns. {reason}"
)

# %%
# Backward
# --------
#
# The gradient needs no exponentials. Let :math:`y` be the output and :math:`dy` the gradient that
# arrives. Differentiating :math:`y_j = e^{x_j - m} / d` gives
# :math:`\partial y_j / \partial x_i = y_j (\delta_{ij} - y_i)`, where :math:`\delta_{ij}` is 1 if
# :math:`i = j` and 0 otherwise. The chain rule sums :math:`dy_j\, y_j (\delta_{ij} - y_i)` over
# :math:`j`:
#
# .. math::
#
#    dx_i = y_i \Big( dy_i - \sum_j y_j\, dy_j \Big)
#
# So it needs :math:`y` and :math:`dy` alone, one :term:`reduction`, two reads and one write.

lab.source(row_bwd_kernel, "gradient")

# %%
# The gradient moves three arrays and a copy two, so 100 % now means a copy's bytes per second.

# %%

# Folded: The backward kernel whole
lab.source(row_bwd_kernel)

# %%


# Measuring
def backward_providers(columns, rows, dtype):
    x = torch.randn(
        rows, columns, device=runtime.DEVICE, dtype=dtype, requires_grad=True
    )
    dy = torch.randn_like(x)
    dx = torch.empty_like(x)

    def backward_of(run):
        if isinstance(run, lab.Absent):
            return run
        y = run()
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    compiled = torch.compile(lambda x: torch.softmax(x, -1))
    return {
        "copy": lambda: dx.copy_(dy),
        "PyTorch": backward_of(lambda: torch.softmax(x, -1)),
        "torch.compile": backward_of(lambda: compiled(x)),
        "Liger": backward_of(liger(x)),
        "quack": backward_of(quack(x)),
        "Kernel Book": backward_of(lambda: softmax(x)),
    }


backward = lab.bench(
    "backward",
    [point for dtype in (torch.bfloat16, torch.float32) for point in points(dtype)],
    backward_providers,
    limit="copy",
    work="3 * rows * columns * itemsize",
    limit_work="2 * rows * columns * itemsize",
)
lab.plot(backward, "Backward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Reading
ours = [
    100 * backward.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS
]
lab.read(
    f"Backward reaches {min(ours):.0f} to {max(ours):.0f} %, the least at "
    f"{COLUMNS[ours.index(min(ours))]:,} columns. It can exceed 100 %, presumably because it reads "
    "twice what it writes, and memory can be read faster than copied (“The roofline” in the "
    "chapter on measuring)."
)

# %%

# Reading
lost = {
    name: sweep.losses(*in_dtypes)
    for name, sweep in {"forward": forward, "backward": backward}.items()
}


def in_words(name, rows):
    most = max(row["its %"] - row["our %"] for row in rows)
    return f"{name} at {len(rows)}, by up to {most}"


def elsewhere_in_words():
    said = ""
    for other, other_backward in zip(
        forward.elsewhere, backward.elsewhere, strict=True
    ):
        found = other.losses(*in_dtypes), other_backward.losses(*in_dtypes)
        gaps = [row["its %"] - row["our %"] for rows in found for row in rows]
        older = ", with an older kernel," if other.mark or other_backward.mark else ""
        said += f" On {other.provenance['gpu']}{older} a library is ahead forward at "
        said += f"{len(found[0])} points and backward at {len(found[1])}" + (
            f", by up to {max(gaps)}." if gaps else "."
        )
    return said


better = [
    n
    for n in COLUMNS
    if share["online", n] > 1.01 * share["one program", min(n, 65536)]
    and any(
        row["columns"] == n and row["dtype"] == "bfloat16" for row in lost["forward"]
    )
    and n <= 8192  # longer rows are packed
]
unused = "".join(
    f" At {n:,} columns `online` would close the gap to the libraries: it reached "
    f"{share['online', n]:.0f} %."
    for n in better[-1:]
)
apart = max(
    abs(
        share["Kernel Book", n]
        - 100 * forward.share("Kernel Book", **in_dtypes[0], columns=n)
    )
    for n in COLUMNS
)
lab.read(
    f"Of the {2 * len(COLUMNS)} pairs of width and dtype, a library is ahead of ours "
    + (
        f"{', and '.join(in_words(*one) for one in lost.items() if one[1])} percentage points."
        if any(lost.values())
        else "nowhere."
    )
)

# %%

# Folded: Every point at which a library is ahead
rows = [{"pass": name} | row for name, found in lost.items() for row in found]
lab.table(
    rows or [{"pass": "none"}],
    "Where a library is ahead of ours by more than 1 %, in % of a copy",
)

# %%

# Folded: Forward in float32
lab.plot(forward, "Forward, float32", share=True, where={"dtype": "float32"})
lab.read(forward.summary(**in_dtypes[1]))

# %%

# Folded: Backward in float32
lab.plot(backward, "Backward, float32", share=True, where={"dtype": "float32"})

# %%


# Measuring
HEIGHTS = (2**15, 2**17)


def with_numbers(kernel, numbers, x, y):
    n_rows, n_cols = x.shape
    block, warps = (1, n_cols), n_cols // (32 * numbers)
    return lambda: kernel[(n_rows,)](
        x, y, n_cols, n_rows, n_cols, *block, num_warps=warps
    )


def reads_providers(rows, columns, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "one read, 64 per thread": with_numbers(row_fwd_kernel, 64, x, y),
        "one read, 32 per thread": with_numbers(row_fwd_kernel, 32, x, y),
        "two reads, 64 per thread": with_numbers(online_fwd_kernel, 64, x, y),
        "two reads, 32 per thread": with_numbers(online_fwd_kernel, 32, x, y),
    }


def gradient_providers(rows, columns, dtype):
    x, dy = (
        torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype) for _ in range(2)
    )
    dx = torch.empty_like(x)

    def backward_of(operator):
        y = operator(x.requires_grad_())
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    return {
        "copy": lambda: dx.copy_(dy),
        "torch.compile": backward_of(torch.compile(lambda x: torch.softmax(x, -1))),
        "Kernel Book": backward_of(softmax),
    }


TALL = [{"rows": rows, "columns": 8192, "dtype": torch.bfloat16} for rows in HEIGHTS]
reads = lab.bench("reads", TALL, reads_providers, limit="copy", work=WORK)
gradients = lab.bench(
    "gradients",
    TALL,
    gradient_providers,
    limit="copy",
    work="3 * rows * columns * itemsize",
    limit_work="2 * rows * columns * itemsize",
)


def times_of(sweep, provider):
    return [1e3 * sweep.milliseconds_at(provider, rows=rows) for rows in HEIGHTS]


def further(sweep, provider):
    """The speed, in TB/s, at which the rows pass that the greater height has more."""
    arrays = 2 if sweep is reads or provider == "copy" else 3
    less, more = times_of(sweep, provider)
    moved = arrays * (HEIGHTS[1] - HEIGHTS[0]) * 8192 * 2
    return moved / (more - less) / 1e6


def lead(sweep, ahead, behind):
    """By how many µs one is ahead at both heights, and in words what that means."""
    less, more = (
        theirs - ours
        for theirs, ours in zip(
            times_of(sweep, behind), times_of(sweep, ahead), strict=True
        )
    )
    if less < 0.005 * times_of(sweep, behind)[0]:
        return less, "too little in this run to need a reason."
    once = less - (more - less) / (
        HEIGHTS[1] / HEIGHTS[0] - 1
    )  # µs that do not grow with rows
    if once > 0.75 * less:
        why = "so it is a saving per launch"
    elif once < 0.25 * less:
        why = "so it is a higher speed"
    else:
        why = (
            f"so {once:.1f} µs are saved once per launch and the rest is a higher speed"
        )
    return (
        less,
        f"{less:.1f} µs on 32,768 rows and {more:.1f} on four times as many, {why}.",
    )


one_read, two_reads = "one read, 64 per thread", "two reads, 32 per thread"
saved, meaning = lead(reads, two_reads, one_read)
fewer = {
    kind: times_of(reads, f"{kind}, 32 per thread")[0]
    / times_of(reads, f"{kind}, 64 per thread")[0]
    for kind in ("one read", "two reads")
}
few = max(abs(ratio - 1) for ratio in fewer.values())
faster = f"`online` leads `row` by {meaning} " + (
    "The numbers per thread are not the reason, because 32 instead of 64 change a time by at "
    f"most {100 * few:.1f} %."
    if few < 0.25 * saved / times_of(reads, one_read)[0]
    else "With 32 numbers per thread instead of 64, the time of one read changes by "
    f"{100 * (fewer['one read'] - 1):+.1f} % and that of two reads by "
    f"{100 * (fewer['two reads'] - 1):+.1f} %."
)

text = "The counters of the chapter on measuring, which would tell, are not recorded."
if written:
    at = further(reads, two_reads)
    text = (
        f"By the hardware's counters in the chapter on measuring, `row` has written "
        f"{written['row']:.0f} of {16384 * 8192 * 2 / 1e6:.0f} MB to memory when it ends, and "
        f"`online` {written['online']:.0f}. The rest is still in L2, and is written later. At "
        f"{at:.1f} TB/s these {left:.0f} MB take {left / at:.1f} µs, beside a lead of "
        f"{saved:.1f}. The second load of `online` says `evict_first`, so the cache gives up what "
        "was read and keeps what was written. Whether a model would gain by that, we have not "
        "measured."
        if left > 2
        else "Nor does `online` leave more of its result in L2, to be written later, by the "
        "counters in the chapter on measuring. We did not find the reason."
    )

_, meaning = lead(gradients, "torch.compile", "Kernel Book")
same = (
    " PyTorch's source shows that its kernel says `evict_first` as well, where it reads a number "
    "for the last time, and ours does not."
)
explains = "saving" in meaning and "evict_first" in text

# %%

# Folded: More: a lead of a few per cent, online over row
lab.read(f"At 8,192 columns {faster} {text}{unused}")

# %%

# Folded: More: the other leads
lab.read(
    f"`torch.compile` leads our backward kernel by {meaning}{same if explains else ''} Two sweeps "
    f"of our own forward kernel differ by up to {apart:.1f} points, and less than 1 % is no "
    f"difference.{elsewhere_in_words()} At the widest rows quack exchanges through the shared "
    "memory of a cluster of SMs, which none of our kernels does."
)

# %%

# Measuring
x = torch.ones(64, 1024, device=runtime.DEVICE, dtype=torch.bfloat16)
host = lab.host_times(
    {"Kernel Book": softmax, "PyTorch": lambda x: torch.softmax(x, dim=-1)}, x
)

# %%

# Reading
nan = float("nan")
calls = {row["pass"]: row for row in host.rows}
ours, theirs = (
    [
        calls.get(name, {}).get(f"{whose} (µs)", nan)
        for name in ("forward", "forward and backward")
    ]
    for whose in ("Kernel Book", "PyTorch")
)
lab.read(
    "On inputs so small that the host sets the time, PyTorch is ahead: on 64 rows of 1,024 columns "
    f"our forward call costs the host {ours[0]:.0f} µs and PyTorch's {theirs[0]:.0f}."
)

# %%

# Folded: What a call costs the host
host

# %%
# What breaks it
# --------------
#
# **Zeros past the end of the row.** Padding with zeros gives every row extra elements of weight
# :math:`e^{0 - m}`.


@triton.jit
def padded_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr, OTHER: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=OTHER)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + cols, y, mask=cols < n_cols)


# %%

# Reading
x = torch.randn(100, device=runtime.DEVICE) - 5
rows = []
for other in (float("-inf"), 0.0):
    y = torch.empty_like(x)
    padded_kernel[(1,)](x, y, 100, 128, other)
    rows.append(f"{y.sum():.4f}")
lab.read(
    f"Of 100 elements near -5 in a block of 128, the results sum to {rows[0]} with minus infinity "
    f"past the end and to {rows[1]} with zeros."
)

# %%
# **The old sum is not rescaled.** Without ``alpha`` the recurrence adds terms of different scales.
# We sort a row, because with its maximum in the first block the mistake would not show.

pieces = 10 * torch.randn(512, dtype=torch.float64).sort().values.view(8, 64)
m, right, wrong = torch.tensor(-inf), torch.tensor(0.0), torch.tensor(0.0)
for piece in pieces:
    m_new = torch.maximum(m, piece.max())
    term = (piece - m_new).exp().sum()
    right = right * (m - m_new).exp() + term
    wrong = wrong + term
    m = m_new

# %%

# Reading
truth = (pieces - pieces.max()).exp().sum()
assert wrong > 2 * truth
lab.read(
    f"The sum is {truth:.6f} in truth, {right:.6f} rescaled, and {wrong:.6f} without that."
)

# %%
# The bridge to attention
# -----------------------
#
# Attention is :math:`\mathrm{softmax}(q k^\top)\, v`: a sum of the rows of :math:`v`, weighted by
# the softmax of scores that are far too many for a chip. So a program walks over the keys in
# blocks. For each query it carries the pair and the weighted sum so far, ``acc``, which the same
# ``alpha`` rescales: ``acc = acc * alpha + p @ v`` stands beside ``d = d * alpha + sum(p)``, where
# ``p`` are the exponentials of a block. :doc:`/chapters/attention_forward` builds FlashAttention
# from that.
#
# **Try it:** write the kernel for one block of queries. ``tl.dot(a, b, input_precision="ieee")`` is
# a matmul of two blocks in full float32.

# %%

# Solution: attention for one block of queries


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, n_keys, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    queries, dims = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + queries * HEAD_DIM + dims)
    m_i = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
    d_i = tl.zeros((BLOCK_M, 1), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, n_keys, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys[:, None] < n_keys
        k = tl.load(k_ptr + keys[:, None] * HEAD_DIM + dims, mask=inside, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * HEAD_DIM + dims, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(keys[None, :] < n_keys, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1, keep_dims=True))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(scores - m_new)
        d_i = d_i * alpha + tl.sum(p, axis=1, keep_dims=True)
        acc = acc * alpha + tl.dot(p, v, input_precision="ieee")
        m_i = m_new
    tl.store(o_ptr + queries * HEAD_DIM + dims, acc / d_i)


q = torch.randn(16, 64, device=runtime.DEVICE)
k, v = torch.randn(2, 500, 64, device=runtime.DEVICE)
o = torch.empty_like(q)
attend_kernel[(1,)](q, k, v, o, 500, 64**-0.5, BLOCK_M=16, BLOCK_N=32, HEAD_DIM=64)


def attend(q, k, v):
    return torch.softmax(q @ k.T * 64**-0.5, -1) @ v


truth = attend(q.double(), k.double(), v.double())
factor = 64**0.5  # 64 products are added one by one: so many roundings, on average
lab.check(
    "One block of queries",
    [
        lab.Case(
            "16 queries, 500 keys", "forward", o, attend(q, k, v), truth, factor=factor
        )
    ],
)

# %%
# In short
# --------
#
# A pair of maximum and sum, corrected by one factor, tells all about the blocks before, so
# ``online`` reads a row twice and not three times. A row that stays on chip is read once, even when
# programs share it, because they need only exchange their pairs.
#
# Exercises
# ---------
#
# **1. Log-softmax.** The logarithm of softmax is :math:`x - m - \log d`. Why is that better than
# taking the logarithm of the result? Write the kernel for rows that fit on chip.

# %%

# Solution: log-softmax
#
# Where an element of the result underflows to 0, its logarithm is minus infinity, although the true
# one is a number, about -200 for an element that is 200 below the maximum. The difference
# x - m - log d contains no number that small, so it stays exact.


@triton.jit
def log_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    m = tl.max(x, axis=0)
    y = x - m - tl.log(tl.sum(tl.exp(x - m), axis=0))
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


x = 50 * torch.randn(5, 300, device=runtime.DEVICE)
y = torch.empty_like(x)
log_softmax_kernel[(5,)](x, y, 300, 512)
truth = torch.log_softmax(x.double(), -1)
lab.check(
    "Log-softmax",
    [lab.Case("(5, 300)", "forward", y, torch.log_softmax(x, -1), truth, factor=4)],
)
assert torch.softmax(x, -1).log().isinf().any()
assert y.isfinite().all()

# %%
# **2. Cross-entropy without probabilities.** For a row with target :math:`t`, the loss is
# :math:`m + \log d - x_t`, and its gradient with respect to :math:`x_i` is
# :math:`y_i - \delta_{it}`. Write one kernel that reads each row once and computes both.

# %%

# Solution: cross-entropy without probabilities


@triton.jit
def cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, dx_ptr, n_cols, BLOCK_COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    target = tl.load(target_ptr + row)
    m = tl.max(x, axis=0)
    numerator = tl.exp(x - m)
    d = tl.sum(numerator, axis=0)
    x_target = tl.sum(tl.where(cols == target, x, 0.0), axis=0)
    tl.store(loss_ptr + row, m + tl.log(d) - x_target)
    dx = numerator / d - tl.where(cols == target, 1.0, 0.0)
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=cols < n_cols)


x = torch.randn(6, 1000, device=runtime.DEVICE)
target = torch.randint(1000, (6,), device=runtime.DEVICE)
loss, dx = torch.empty(6, device=x.device), torch.empty_like(x)
cross_entropy_kernel[(6,)](x, target, loss, dx, 1000, 1024)


def in_torch(x):
    x = x.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


(torch_loss, torch_dx), (true_loss, true_dx) = in_torch(x), in_torch(x.double())
lab.check(
    "Cross-entropy",
    [
        lab.Case("(6, 1000)", "forward", loss, torch_loss, true_loss, factor=4),
        lab.Case("(6, 1000)", "backward", dx, torch_dx, true_dx, factor=4),
    ],
)

# %%
# References
# ----------
#
# - Milakov, Gimelshein. *Online normalizer calculation for softmax.* arXiv:1805.02867, 2018.
# - Rabe, Staats. *Self-attention does not need O(n²) memory.* arXiv:2112.05682, 2021.
# - Dao, Fu, Ermon, Rudra, Ré. *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness.* NeurIPS 2022.

# %%

# Closing
ours = [
    forward.share("Kernel Book", dtype=dtype, columns=n)
    for dtype in ("bfloat16", "float32")
    for n in COLUMNS
]
lab.finish(
    f"{min(ours):.0%} to {max(ours):.0%} of the speed of a copy, from {COLUMNS[0]:,} to "
    f"{COLUMNS[-1]:,} columns"
)
