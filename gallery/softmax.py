"""
Online softmax
==============

Softmax needs the largest element of a row before it can compute the first exponential, and the sum
of all exponentials before it can write the first result. *Must a kernel therefore read every row
three times?*

You will learn

- how two numbers, carried from block to block, let us repair a sum;
- how partial results merge in any order, so that several programs can share a row;
- how much each read of a row costs, and how to keep even a very wide row on chip.
"""

# sphinx_gallery_thumbnail_number = 4
import statistics
import warnings
from dataclasses import replace

import torch

from kernelbook import lab, reference, runtime, softmax
from kernelbook.lab import results
from kernelbook.ops.rows import exchange
from kernelbook.ops.rows.packed import minus_infinities, narrow, widen
from kernelbook.ops.rows.pieces import in_pieces
from kernelbook.ops.rows.units import unit_of
from kernelbook.ops.softmax import tuned
from kernelbook.ops.softmax.backward import row_bwd_kernel, split_row_bwd_kernel
from kernelbook.ops.softmax.forward import (
    _forward,
    exp,
    finite,
    online_fwd_kernel,
    packed_row_fwd_kernel,
    pieces_fwd_kernel,
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
# Softmax turns a row of numbers into positive weights that sum to 1: the row 1, 2, 3 becomes about
# 0.09, 0.24, 0.67. In PyTorch this takes five operations.


def simple_softmax(x):
    m = x.max(dim=-1, keepdim=True).values
    shifted = x - m
    numerator = shifted.exp()
    denominator = numerator.sum(dim=-1, keepdim=True)
    return numerator / denominator


# %%
# We subtract the maximum to keep the exponentials from overflowing: in float16 even :math:`e^{12}`
# is too large. The result stays the same, since the factor :math:`e^{-m}` cancels.
#
# Each operation reads its input from memory and writes its output back. Together they make eight
# passes over the row, where one read and one write would do. We will build five :term:`kernels
# <kernel>` that make fewer:
#
# .. image:: /figures/softmax-passes.svg
#    :alt: Passes over memory. simple_softmax, five operations: five reads and three writes.
#          three_pass: three reads and one write. online: two reads and one write. row, packed and
#          split: one read and one write.

# Reading
nan = float("nan")
wide, swept = 65536, (results.find("softmax") or {"sweeps": {}})["sweeps"].get("ladder")
copied, five = nan, nan
if swept:
    at = [point["columns"] for point in swept["points"]].index(wide)
    copied, five = (
        swept["milliseconds"][name][at][1] for name in ("copy", "simple_softmax")
    )
allowed, reached = (
    100 * 2 / 8,
    100 * copied / five,
)  # eight passes, and a copy makes two
lab.read(
    "A copy makes two passes. With eight, the five operations could therefore reach "
    f"{allowed:.0f} in the chart at the top. They reach {reached:.0f}"
    + ", so the passes are only part of what they lose" * (reached < allowed - 2)
    + "."
)

# %%
# Blocks, done wrong
# ------------------
#
# A kernel reads a long row in blocks. Would a single read suffice, if we normalised each block by
# its own maximum and sum? In this attempt, each :term:`program` takes one row.

import triton
import triton.language as tl


@triton.jit
def blockwise_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(
            x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf")
        )
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


# %%


# Reading
x = torch.randn(3, 1000, device=runtime.DEVICE)
sums = {}
for block in (1024, 512, 256):
    wrong = torch.empty_like(x)
    blockwise_kernel[(3,)](x, wrong, 1000, block)
    sums[block] = wrong.sum(-1)


def alike(values):
    """The number that all values round to, or all such numbers."""
    return " or ".join(sorted({f"{value:.3g}" for value in values.tolist()}))


(_, its_sums), *others = sums.items()
assert alike(its_sums) == "1"  # one block covers the row
lab.read(
    "Each block by itself sums to 1. A row of 1,000 columns therefore sums "
    + " and ".join(f"to {alike(found)} with blocks of {n:,}" for n, found in others)
    + ". A test whose rows fit in one block would pass, so test longer rows too."
)

# %%
# The idea
# --------
#
# What must a block know of the earlier ones? Two numbers: the maximum so far and the sum so far.
# Take the row 1, 2, 4. After 1 and 2, the maximum is 2 and the sum is
# :math:`e^{1-2} + e^{2-2} = 1.37`. Then 4 arrives, and both terms should have been relative to 4.
# One factor corrects both: multiplied by :math:`e^{2-4}`, the sum becomes 0.19, and the new element
# adds 1 to make 1.19.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    When a larger element arrives, every term of the old sum is too large by the same factor, so
#    one multiplication repairs the sum.
#
# This method is called :term:`online softmax` (Milakov and Gimelshein, 2018).
#
# The mathematics
# ---------------
#
# **The recurrence.** Let :math:`m_j` be the maximum of the first :math:`j` elements of a row, and
# :math:`d_j` the sum of their exponentials relative to that maximum:
#
# .. math::
#
#    \begin{aligned}
#    m_j &= \max(m_{j-1},\, x_j) \\
#    d_j &= d_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j}
#    \end{aligned}
#
# with :math:`m_0 = -\infty` and :math:`d_0 = 0`. Since exponents add, the factor turns each old
# term :math:`e^{x_i-m_{j-1}}` into :math:`e^{x_i-m_j}`, and the new element contributes the last
# term. By induction, :math:`d_j` is therefore right for every :math:`j`.
#
# **The merge.** A GPU has thousands of threads, so we cut the row into pieces. By the same
# cancellation, the union of two pieces with the pairs :math:`(m_a, d_a)` and :math:`(m_b, d_b)` has
# the pair
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
#    A row has the same pair however we cut it, so pairs can be merged in any grouping and any
#    order (the merge is *associative* and *commutative*).
#
# .. image:: /figures/softmax-merge.svg
#    :alt: A row in four pieces. Each piece has a pair of maximum and sum. Pairs are merged two by
#          two: (4, 1.19) and (3, 1.05) give (4, 1.57); (6, 1.74) and (5, 1.00) give (6, 2.10);
#          these two give (6, 2.32) for the whole row.


# Reading
def ten(x, digits=0):
    """A small number as people write it, without spaces at which a line may break: 8×10⁻⁷."""
    mantissa, power = f"{x:.{digits}e}".split("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}×10{raised}"


def pair(x):
    m = x.max()
    return m, (x - m).exp().sum()


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    return m, a[1] * (a[0] - m).exp() + b[1] * (b[0] - m).exp()


row = 10 * torch.randn(1000, dtype=torch.float64)
for pieces in (2, 7, 100):
    pairs = [pair(piece) for piece in row.tensor_split(pieces)]
    while len(pairs) > 1:
        i, j = sorted(torch.randperm(len(pairs))[:2].tolist())
        pairs.append(merge(pairs.pop(j), pairs.pop(i)))
    m, d = pairs[0]
    off = abs(d / pair(row)[1] - 1).item()
    assert m == row.max()
assert off < 1e-13
lab.read(
    f"A kernel may therefore cut a row anywhere. Even {pieces} pieces, merged in random order, "
    "give its exact maximum, and its sum up to rounding."
)

# %%
# Two reads: online
# -----------------
#
# The recurrence saves one of three reads: without it, ``three_pass`` needs a loop each for the
# maximum, the sum and the result.


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
BESIDE = {"row": (0, -12), "packed": (-40, 13)}  # names inside the axes, in points
plain = [replace(sweep, skipped={}) for sweep in (ladder, *ladder.elsewhere)]


def step(title, *earlier, new, allowed=None):
    """Draw the lines of new kernels above those of earlier ones, and shade what they gain.

    ``allowed`` maps a kernel to the passes over the row that it makes. If memory answers each, they
    allow the speed of a dotted line.
    """
    allowed = {name: 100 * 2 / passes for name, passes in (allowed or {}).items()}

    def lines(rows):
        """The columns and heights of each kernel, the new ones last."""
        found = {}
        for name in (*earlier, *new):
            provider, at = STEPS[name]
            found[name] = {
                row["columns"]: 100 * row["share"]
                for row in rows
                if row["provider"] == provider and row["columns"] in at
            }
        return {name: line for name, line in found.items() if line}

    def told(rows):
        drawn = lines(rows)
        points = "; ".join(
            f"{name}, "
            + ", ".join(f"{n:,} columns {y:.0f}" for n, y in drawn[name].items())
            for name in new
            if name in drawn
        )
        before = ", ".join(name for name in drawn if name not in new)
        dotted = "".join(
            f" Dotted: {height:.0f}, {name} all from memory."
            for name, height in allowed.items()
        )
        return f"In % of a copy's speed: {points}. In grey: {before}.{dotted}"

    def draw(axes, rows):
        axes.figure.set_size_inches(5.4, 2.7)
        grey, blue = lab.colour("copy"), lab.colour("Kernel Book")
        drawn = lines(rows)
        for name, line in drawn.items():
            columns, height = list(line), list(line.values())
            look = {"color": grey, "linewidth": 1}
            if name == "row":
                look |= {"marker": "o", "markersize": 3}
            if name == "online" and "row" in drawn:  # the two lines cross
                look |= {"linestyle": (0, (7, 2, 1.5, 2)), "linewidth": 1.4}
            if name in new:
                look = {
                    "color": blue,
                    "linewidth": 2.6,
                    "marker": "o",
                    "markersize": 4.5,
                }
                best = [
                    max(drawn[old].get(n, 0) for old in drawn if old not in new)
                    for n in columns
                ]
                axes.fill_between(
                    columns,
                    best,
                    height,
                    where=[
                        ours > theirs for ours, theirs in zip(height, best, strict=True)
                    ],
                    interpolate=True,
                    color=blue,
                    alpha=0.15,
                    linewidth=0,
                )
            axes.plot(columns, height, **look)
            axes.annotate(
                name,
                (columns[-1], height[-1]),
                (6, 0) if columns[-1] == COLUMNS[-1] else BESIDE.get(name, (6, 0)),
                textcoords="offset points",
                va="center",
                color=look["color"],
                fontweight="bold" if name in new else "normal",
                annotation_clip=False,
            )
        ends = [COLUMNS[0], COLUMNS[-1]]
        axes.plot(ends, [100, 100], color=grey, linestyle="--", linewidth=1)
        axes.annotate(
            "copy",
            (COLUMNS[-1], 100),
            (0, 9),
            textcoords="offset points",
            ha="right",
            va="center",
            color=grey,
            annotation_clip=False,
        )
        low = 0 if "simple_softmax" in drawn else 40
        for name, height in allowed.items():
            colour = blue if name in new else grey
            axes.plot(
                ends, [height, height], color=colour, linestyle=":", linewidth=1.4
            )
            words = f"{name} all from memory: {height:.0f}"
            above = height + 0.01 * (114 - low)
            axes.text(1100, above, words, color=colour, va="bottom")
        axes.set_xscale("log", base=2)
        axes.set_xticks(COLUMNS, [f"{n // 1024}Ki" for n in COLUMNS])
        axes.minorticks_off()
        scale = f"% of a copy, from {low}" if low else "% of a copy"
        axes.set(xlabel="columns", ylabel=scale, ylim=(low, 114))

    return lab.draw(replace(plain[0], elsewhere=plain[1:]), title, told, draw)


# Measuring
cached, long = 16384, 131072
share = {
    (name, n): 100 * ladder.share(name, columns=n)
    for name in (
        "simple_softmax",
        "three_pass",
        "online",
        "one program",
        "Kernel Book",
    )
    for n in COLUMNS
    if (name, n) != ("one program", long)
}
gpu = ladder.provenance["gpu"] if ladder.provenance else "this GPU"
short = {n: share["three_pass", n] for n in COLUMNS if n <= cached}
dips = [n for n in short if short[n] < min(short[COLUMNS[0]], short[cached]) - 3]

# %%
# In ``online``, a single loop finds both the maximum and the sum, one block at a time. When a block
# raises the maximum, ``alpha`` shrinks the old sum (the dashed outline) to the blue part; then the
# block adds its own share, in orange.
#
# .. animation:: online_softmax

# %%
# The three lines from ``m_new`` to ``d`` are the recurrence with a block in place of one element.
# The second loop reads the row again, because the results need the final maximum and sum.

lab.source(online_kernel)

# %%

# Reading
y = torch.empty_like(x)
online_kernel[(3,)](x, y, 1000, BLOCK_COLS=256)
torch.testing.assert_close(y, torch.softmax(x, dim=-1), rtol=1e-5, atol=0)
off = (y / torch.softmax(x, dim=-1) - 1).abs().max().item()
lab.read(
    "We launch one program per row, `online_kernel[(n_rows,)](x, y, n_cols, BLOCK_COLS=256)`. Now "
    f"the rows sum to {alike(y.sum(-1))}, and no result differs from PyTorch's by more than a "
    f"relative {ten(off)}, in float32."
)

# %%
# What does the second read cost? Softmax is :term:`memory-bound`: in bfloat16 it moves four bytes
# per number but does only about five operations. We therefore compare with PyTorch's copy, which
# reads and writes every row once.

# %%

# Reading
fits = [share["online", n] for n in COLUMNS if n <= cached]
allowed = 100 * 2 / 3  # by the bytes of online
down = [n for n in COLUMNS if n > cached and share["online", n] < allowed + 2]
lab.read(
    f"Speeds on this page are in % of this copy's, for bfloat16 on {gpu} unless we say otherwise. "
    "A kernel can exceed 100, because the copy is a kernel too and not the limit of the GPU."
)

# %%

# Reading
lab.read(
    (
        f"**Up to {cached:,} columns (16Ki), the second read costs next to nothing.**"
        if min(fits) > 97
        else f"Up to {cached:,} columns, `online` reaches {min(fits):.0f} to {max(fits):.0f} %."
    )
    + (
        f" At {down[0]:,}, `online` has fallen to its dotted line, the speed if both reads go to "
        "memory."
        if down
        else " A dotted line shows what the bytes of a kernel allow if all go to memory."
    )
)

# %%

# Drawing
step(
    "From three reads to two",
    "three_pass",
    new=("online",),
    allowed={"three_pass": 4, "online": 3},
)

# %%
# Why can a second read be so cheap? Because the :term:`L2` cache may still hold the row from the
# first time.


# Measuring
def fewer_in_flight():
    """The speed of online in programs of more threads, of which fewer fit on an SM."""
    sm = torch.cuda.get_device_properties(0)
    draw = torch.Generator(runtime.DEVICE).manual_seed(0)
    like = {"device": runtime.DEVICE, "dtype": torch.bfloat16, "generator": draw}
    table = []
    for columns in (8192, 32768):
        n_rows = 2**28 // columns
        x = torch.randn(n_rows, columns, **like)
        y = torch.empty_like(x)
        for warps in (8, 16, 32):

            def run(x=x, y=y, warps=warps):
                n_rows, columns = x.shape
                online_fwd_kernel[(n_rows,)](
                    x, y, columns, n_rows, columns, 1, tuned.BLOCK_COLS, num_warps=warps
                )

            [(_, compiled)] = lab.compiled_by(run)
            torch.testing.assert_close(y[:64], torch.softmax(x[:64], -1))
            copy, ours = (
                statistics.median(lab.event_times(work, repeats=50))
                for work in (lambda x=x, y=y: y.copy_(x), run)
            )
            threads = 32 * warps
            fit = min(
                # a thread is given registers by the eight
                sm.regs_per_multiprocessor
                // (threads * (-(-compiled.n_regs // 8) * 8)),
                sm.max_threads_per_multi_processor // threads,
            )
            mib = 2 * x.itemsize * columns * fit * sm.multi_processor_count / 2**20
            table.append(
                {
                    "columns": columns,
                    "threads per program": threads,
                    "registers per thread": compiled.n_regs,
                    "programs per SM": fit,
                    "in flight, MiB": round(mib),
                    "% of a copy": round(100 * copy / ours),
                }
            )
    return table


fewer = lab.attempt("Fewer rows of online in flight, bfloat16", fewer_in_flight)
fewer_at = {(row["columns"], row["threads per program"]): row for row in fewer.rows}

# %%

# Reading
counted = (results.find("measuring") or {"tables": {}})["tables"].get(
    "Counters of two softmaxes, 16,384 × 8,192", {"columns": [], "rows": []}
)
counters = {
    (row[0], name): value
    for row in counted["rows"]
    for name, value in zip(counted["columns"], row, strict=True)
    if name in ("row", "online")
}
made_by = ladder.provenance or {}
sms, l2 = made_by.get("sm_count", 0), made_by.get("l2_mib", nan)
# eight warps; a thread is given registers by the eight
held = -(-counters.get(("registers per thread", "online"), nan) // 8) * 8
at_once = min(8, 65536 // (256 * held))
in_flight = {n: 2 * sms * at_once * n * 2 / 2**20 for n in COLUMNS if n >= 8192}
fetched = counters.get(("read from HBM", "online"), nan)
given = 2 * 16384 * 8192  # bytes of the input


def tested():
    """Whether the rows in flight explain the fall, in words; and more for the fold."""
    if (32768, 1024) not in fewer_at:
        return "We did not test whether L2 is the reason.", ""
    (near, near_few), (far, far_few) = (
        [fewer_at[columns, threads]["% of a copy"] for threads in (256, 512)]
        for columns in (8192, 32768)
    )
    fit, fit_few = (
        fewer_at[32768, threads]["programs per SM"] for threads in (256, 512)
    )
    mib = fewer_at[32768, 512]["in flight, MiB"]
    told, means = "We could not show that L2 is the reason.", ""
    if fit_few < fit and far_few > far + 4:
        told = (
            "When fewer such rows are in flight, `online` gains (next fold), so L2 may be the "
            "reason."
        )
        means = "This agrees with L2 as the reason, but does not prove it. "
    more = (
        "**Fewer rows in flight.** If L2 is the reason, `online` should gain on long rows when "
        "fewer of them are in flight. Programs of 512 threads instead of 256 see to that, because "
        f"fewer fit on an SM. In this run, `online` then reaches {far_few} % instead of {far} at "
        "32,768 columns"
        + f", while it loses at 8,192 ({near_few} instead of {near})"
        * (near_few < near - 2)
        + ". "
        + f"By our estimate, {mib} MiB are still in flight, more than L2 holds. "
        * (mib > l2)
        + means
    )
    if fewer_at[8192, 1024]["% of a copy"] < near - 4:
        more += (
            "Programs of 1,024 threads are slow even at 8,192 columns, where all rows in flight "
            "fit in L2, so they decide nothing."
        )
    return told, more


of_test, more_of_test = tested()
too_long = min((n for n, mib in in_flight.items() if mib > l2), default=0)
lab.read(
    (
        "At 8,192 columns it does: by the hardware counters of “Measuring a kernel”, `online` "
        "reads each number from memory only once. "
        if min(fits) > 97 and fetched < 1.01 * given
        else "“Measuring a kernel” shows what hardware counters say of this. "
    )
    + (
        f"But {sms * at_once:.0f} rows are in flight at once. By our estimate, they and their "
        "results take this much memory:"
        if sms
        else ""
    )
)

# %%


# Drawing
def in_short(name):
    """H100 for NVIDIA H100 80GB HBM3."""
    return name.removeprefix("NVIDIA ").split()[0]


def beside_l2(axes):
    grey, blue, orange = (
        lab.colour(name) for name in ("copy", "Kernel Book", "PyTorch")
    )
    lengths = [n for n in in_flight if n < long]
    for line, n in enumerate(lengths):
        mib = in_flight[n]
        fill, ink = ("#eaf2fb", blue) if mib <= l2 else ("#fff4e5", orange)
        axes.barh(line, mib, 0.62, color=fill, edgecolor=ink, linewidth=1.2)
        for at, words in ((212, f"{mib:.0f} MiB"), (252, f"{share['online', n]:.0f} %")):
            axes.text(at, line, words, va="center", ha="right", color=ink)
    axes.axvline(l2, color=grey, linestyle="--", linewidth=1.2)
    for at, words, side in (
        (l2 + 3, f"L2, {l2:.0f} MiB", "left"),
        (212, "in flight", "right"),
        (252, "speed", "right"),
    ):
        axes.text(at, -0.8, words, ha=side, va="center", color=grey)
    axes.set(xlim=(0, 254), ylim=(len(lengths) - 0.5, -1.1), xticks=[])
    axes.set_yticks(range(len(lengths)), [f"{n // 1024}Ki" for n in lengths])
    axes.set_ylabel("columns")
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


if sms:
    lab.sketch(
        f"Rows of online in flight, {in_short(gpu)}",
        "Bars beside a dashed line, the size of L2. "
        + "; ".join(
            f"{n:,} columns, {mib:.0f} MiB in flight, {share['online', n]:.0f} % of a copy"
            for n, mib in in_flight.items()
            if n < long
        )
        + f". L2 has {l2:.0f} MiB.",
        beside_l2,
        height=2.3,
    )

# %%

# Reading
lab.read(
    (
        f"**From {too_long:,} columns on, they no longer fit"
        + (
            ", and there `online` falls.** "
            if share["online", too_long] < min(fits) - 5
            else ".** "
        )
    )
    * bool(too_long)
    + of_test
)

# %%

# Folded: Does the second read find its row in L2? With two kernels whole
kernels = lab.listing(
    {
        "three_pass, which reads a row three times, without cache hints": three_pass_fwd_kernel,
        "The hardware computes powers of two, so exp is one of them": exp,
        "If a row begins with a block of nothing but minus infinity, m_new is minus infinity too, "
        "and the difference of two infinities is NaN. finite then replaces m_new by zero": finite,
        "As timed, online also widens 16-bit rows to float32, takes larger blocks, and gives L2 "
        "hints: to keep the row for the second loop (evict_last), and then to drop it "
        "(evict_first). With four rows per program, it is online_2d": online_fwd_kernel,
    }
)
estimate = lab.read(
    "**How the rows in flight are counted.** A row is in flight while a program works on it. From "
    "8,192 columns on, a program of `online` has 256 "
    f"threads with {held:.0f} registers each, so the 65,536 registers of an SM suffice for "
    f"{at_once:.0f} programs"
    + f", and on {sms} SMs {sms * at_once:.0f} rows are in flight"
    * bool(sms)
    + ". A row in flight takes two bytes per number, and its result as much. "
    "This is an estimate, because the cache may also hold other data."
)
unexplained = lab.read(
    "**What we cannot explain.** "
    + f"`three_pass` dips at {' and '.join(f'{n:,}' for n in dips)} columns. "
    * bool(dips)
    + "It gives no cache hints, so its distance from `online` need not come from the third read "
    "alone. "
    + f"`online` reaches up to {max(fits):.0f} %, more than a copy. "
    * (max(fits) > 101)
    + f"At {long:,}, it is below what two reads from memory allow. "
    * (share["online", long] < allowed - 2)
    + "We have not looked for the causes."
)
fewer_table = [
    lab.table(
        fewer.rows,
        f"The timed online kernel with more threads per program, {gpu}: fewer programs fit on an "
        "SM, so fewer rows are in flight",
    )
    for _ in range(bool(fewer_at))
]
test = [lab.read(more_of_test) for _ in range(bool(more_of_test))]
lab.together(estimate, *test, *fewer_table, unexplained, kernels)

# %%
# One read: row
# -------------
#
# Why read a row again at all? A program that keeps it on chip needs neither a second read nor a
# loop. We have already run such a kernel, because ``blockwise_kernel`` is right if one block covers
# the row:
#
# .. code-block:: python
#
#    blockwise_kernel[(n_rows,)](x, y, n_cols, BLOCK_COLS=triton.next_power_of_2(n_cols))
#
# ``row`` does the same, and widens the row to float32. Between the load and the store, the numbers
# stay in :term:`registers <register>`, the fastest storage of a streaming multiprocessor
# (:term:`SM`).

# Folded: The row kernel whole, for one or more rows per program
lab.listing(
    {
        "UNIT is a power of two that divides the length and the stride of rows. in_units tells the "
        "compiler so, and a thread may then load several numbers at once. What evict_last gains, "
        "though each number is read once, stands in a fold of “How fast is it?”": row_fwd_kernel
    }
)

# %%

# Reading
one, with_two = share["one program", 32768], share["online", 32768]
by_one = [share["one program", n] for n in COLUMNS if n <= cached]
lab.read(
    (
        f"Up to {cached:,} columns, `row` is about as fast as a copy. At 32,768, our example from "
        "here on, "
        if min(by_one) > 95
        else "At 32,768 columns, our example from here on, "
    )
    + f"it reaches {one:.0f} %"
    + (
        f", {'less' if one < with_two - 0.5 else 'no more'} than `online` with its two reads "
        f"({with_two:.0f}). **Reading once is not enough.**"
        if one <= with_two + 0.5
        else f", and `online` {with_two:.0f}."
    )
)

# %%
# Two programs per SM: packed
# ---------------------------


# Measuring
@triton.jit
def rows_in_turn_kernel(
    x_ptr,  # the same as packed_row_fwd_kernel, for one row after the other
    y_ptr,
    n_rows,
    n_cols,
    zero,
    MINUS_INF: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_COLS // 2)
    inside = cols < n_cols // 2
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        x_ptrs = (x_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
        y_ptrs = (y_ptr + row * n_cols).to(tl.pointer_type(tl.int32))
        raw = tl.load(
            x_ptrs + cols,
            mask=inside,
            other=MINUS_INF,
            eviction_policy="evict_last",
        )
        m = tl.max(widen(raw, dtype), axis=0)
        raw += zero
        d = tl.sum(exp(widen(raw, dtype) - m), axis=0)
        raw += zero
        y = exp(widen(raw, dtype) - m) * (1 / d)
        tl.store(y_ptrs + cols, narrow(y, dtype), mask=inside)


def one_launch(name, x, y, sms):
    """Return a function that launches a kernel by its name in the table."""
    (n_rows, n_cols), warps = x.shape, x.shape[1] // 2048
    pad = minus_infinities(x.dtype)

    def in_turn(programs):
        kernel = rows_in_turn_kernel[(programs,)]
        return lambda: kernel(
            x, y, n_rows, n_cols, 0, pad, n_cols, num_warps=warps, maxnreg=64
        )

    return {
        "row": lambda: row_fwd_kernel[(n_rows,)](
            x, y, n_cols, n_rows, n_cols, 1, n_cols, num_warps=warps
        ),
        "packed": lambda: packed_row_fwd_kernel[(n_rows,)](
            x, y, n_cols, n_cols, 0, pad, n_cols, num_warps=warps
        ),
        "packed in a loop, one program": in_turn(sms),
        "packed in a loop, two programs": in_turn(2 * sms),
        "split": lambda: _forward(x, y, "row"),
    }[name]


def on_an_sm():
    """What each kernel takes of an SM, and its speed."""
    sm = torch.cuda.get_device_properties(0)
    draw = torch.Generator(runtime.DEVICE).manual_seed(0)
    like = {"device": runtime.DEVICE, "dtype": torch.bfloat16, "generator": draw}
    table = []
    for name, columns, most in (
        ("row", 32768, 99),
        ("packed", 32768, 99),
        ("packed in a loop, one program", 32768, 1),
        ("packed in a loop, two programs", 32768, 2),
        ("row", 65536, 99),
        ("packed", 65536, 99),
        ("split", 65536, 99),
    ):
        x = torch.randn(2**27 // columns, columns, **like)
        y = torch.empty_like(x)
        run = one_launch(name, x, y, sm.multi_processor_count)
        [(_, compiled)] = lab.compiled_by(run)
        torch.testing.assert_close(y, torch.softmax(x, -1))
        copy, ours = (
            statistics.median(lab.event_times(work, repeats=50))
            for work in (lambda x=x, y=y: y.copy_(x), run)
        )
        threads = 32 * compiled.metadata.num_warps
        fit = min(
            # a thread is given registers by the eight
            sm.regs_per_multiprocessor // (threads * (-(-compiled.n_regs // 8) * 8)),
            sm.max_threads_per_multi_processor // threads,
        )
        table.append(
            {
                "kernel": name,
                "columns": columns,
                "registers per thread": compiled.n_regs,
                "spills": compiled.n_spills,
                "programs per SM": min(fit, most),
                "% of a copy": round(100 * copy / ours),
            }
        )
    return table


sm_table = lab.attempt("Programs per SM and the speed, bfloat16", on_an_sm)
on_sm = {(row["kernel"], row["columns"]): row for row in sm_table.rows}


def speed(kernel, columns):
    return on_sm.get((kernel, columns), {}).get("% of a copy", nan)


def registers_of(kernel, columns, threads):
    """(the registers of a thread, those of its program, how many programs fit on an SM)."""
    each = on_sm.get((kernel, columns), {}).get("registers per thread", nan)
    # a thread is given registers by the eight
    whole = threads * -(-each // 8) * 8
    return each, whole, 65536 // whole


def fit(programs):
    """How many programs fit, in words."""
    return "two" if programs == 2 else f"{programs:.0f}"


# %%

# Reading
row_each, row_whole, row_fit = registers_of("row", 32768, 512)
lab.read(
    (
        "What does `row` lack? Perhaps a second program on the SM: while"
        if one < 97
        else "While"
    )
    + " one computes, another can load its row. But both have to fit into the SM's 65,536 "
    "registers, and a program of `row` "
    + (
        "takes them all"
        if row_whole == 65536
        else f"takes {row_whole:,.0f}, so {fit(row_fit)} fit"
    )
    + f" (512 threads with {row_each:.0f} each)."
)

# %%
# .. animation:: registers_of_an_sm
#
# To make room for a second program, ``packed`` leaves a 16-bit row as it is in memory, two numbers
# to a register (``raw``). The maximum, the sum and the result each ``widen`` it anew to float32.
# Adding ``zero`` should keep the compiler from widening once for all three, because it cannot know
# that this argument is always 0. ``narrow`` packs the results again.

lab.source(packed_row_fwd_kernel, "widen")

# %%

# Reading
packed = share["Kernel Book", 32768]
packed_each, packed_whole, packed_fit = registers_of("packed", 32768, 512)
given = packed_whole / 512
alone, both = (
    speed(f"packed in a loop, {n}", 32768) for n in ("one program", "two programs")
)
looped = speed("packed", 32768) - both
far = [
    (
        sweep.provenance["gpu"],
        100 * sweep.share("one program", columns=32768),
        sweep.mark,
    )
    for sweep in ladder.elsewhere
    if sweep.milliseconds_at("copy", columns=32768)
    > ladder.milliseconds_at("copy", columns=32768)
]


lab.read(
    f"**A thread of `packed` takes {given:.0f} registers instead of {row_each:.0f}, so "
    f"{fit(packed_fit)} programs fit, and `packed` reaches {packed:.0f} %.**"
)

# %%

# Reading
lab.read(
    (
        "Does the second program help? In a slower variant of `packed`, it raises the speed from "
        f"{alone:.0f} to {both:.0f} %. So before"
        if both - alone > 2
        else "A test in the next fold does not show that the second one helps. Still, before"
        if both > 0
        else "Before"  # not recorded
    )
    + " you keep a row on chip, count how many programs will still fit on an SM. Then measure"
    + "".join(
        f", because on the {in_short(name)} even `row` reaches {reached:.0f} % here"
        for name, reached, _ in far
        if "H100" in name and reached > 97
    )
    + "."
)

# %%

# Folded: The test of a second program, and the packed kernel whole
kernel = lab.listing(
    {
        "The kernel": packed_row_fwd_kernel,
        "From pairs to float32": widen,
        "And back": narrow,
    }
)
nearby = (
    ("row", 32768, "one program"),
    ("packed", 32768, "Kernel Book"),
    ("row", 65536, "one program"),
    ("split", 65536, "Kernel Book"),
)
gap = max(abs(speed(kernel, n) - share[provider, n]) for kernel, n, provider in nearby)
spilled = on_sm.get(("row", 65536), {}).get("spills", 0)
lone, spilling, several = (speed(name, 65536) for name in ("packed", "row", "split"))
of_second = lab.read(
    "**The test.** A variant of `packed` loops over rows, so that we can "
    "choose how many programs an SM has. "
    + (
        f"The loop itself costs time: with two programs it reaches {both:.0f} %, where `packed` "
        f"reaches {both + looped:.0f} in the same run. We do not know why, nor therefore how much "
        f"of the step from {one:.0f} to {packed:.0f} % in the text the second program explains. "
        if looped > 2
        else ""
    )
    + "This run has half as many rows as the figures, and its results differ from theirs by up to "
    f"{gap:.0f} points."
    + "".join(
        f" On the {in_short(name)}, `row` needs no second program for its {reached:.0f} %. The "
        "copy is slower there"
        + ", and the kernel was an older one" * bool(older)
        + "; we did not test what matters."
        for name, reached, older in far
        if "H100" in name and reached > 97
    )
)
of_longer = lab.read(
    "**Longer rows.** "
    + (
        "At 65,536 columns, where one program of `packed` or `row` fills an SM, `split`, the "
        "kernel of the next section, is faster than both. "
        if several > max(lone, spilling)
        else ""
    )
    + "In the figure of that section, the line of `row` ends there, because "
    f"{long:,} numbers are more than an SM has registers. "
    + (
        "With 1,024 threads in a program of `row`, each thread can have only 64 registers, but it "
        "has to hold 64 numbers and more. Some values therefore go to memory (they spill), which "
        "may be why `row` is slower than `packed`."
        if spilled and lone > spilling
        else ""
    )
)
of_pairs = lab.read(
    "**How a row is packed.** The kernel loads it as int32, half as many as there are columns. "
    "`MINUS_INF`, which pads the row, is two minus infinities in one int32. `widen` reads the two "
    "halves of each int32 as numbers of `dtype` (a `bitcast` changes no bit, only what the bits "
    "stand for) and interleaves them as float32. We did not measure what adding `zero` gains."
    + f" A thread uses {packed_each:.0f} registers, which the GPU rounds up to {given:.0f}."
    * (given > packed_each)
)
measured = lab.table(sm_table.rows, f"Programs per SM and the speed, bfloat16, {gpu}")
lab.together(of_second, measured, of_longer, of_pairs, kernel)

# %%


# Measuring
def uneven_rows():
    """Rows whose length is no power of two, packed in one block and in pieces."""
    rows = []
    for columns in (10_000, 12_288, 20_480, 24_576):
        x = torch.randn(2**27 // columns, columns, device=runtime.DEVICE)
        x = x.to(torch.bfloat16)
        y, block = torch.empty_like(x), runtime.next_power_of_2(columns)
        in_one = packed_row_fwd_kernel[(len(x),)]
        sizes = columns, columns, 0, minus_infinities(x.dtype), block, unit_of(columns)
        times = {
            name: statistics.median(lab.event_times(run, repeats=50))
            for name, run in {
                "copy": lambda x=x, y=y: y.copy_(x),
                "one block": lambda x=x, y=y, sizes=sizes, kernel=in_one: kernel(
                    x, y, *sizes, num_warps=sizes[4] // tuned.PACKED_WARP
                ),
                "in pieces": lambda x=x, y=y: _forward(x, y, "row"),
            }.items()
        }
        rows.append(
            {"columns": columns, "pieces": in_pieces(columns)[0]}
            | {
                f"{name}, % of a copy": round(100 * times["copy"] / times[name])
                for name in ("one block", "in pieces")
            }
        )
    return rows


uneven = lab.measure("Packed rows in pieces, bfloat16", uneven_rows)

# %%

# Folded: What if the length is no power of two?
of_padding = lab.read(
    "The length of a block must be a power of two. At 10,000 columns, "
    f"{100 * (1 - 10_000 / runtime.next_power_of_2(10_000)):.0f} % of a block of "
    f"{runtime.next_power_of_2(10_000):,} would be padding, on which a program spends registers "
    "and exponentials as on numbers. If an eighth of the block or more would be padding, `softmax` "
    "cuts the row into three, five or seven pieces, whose lengths are powers of two, so that at "
    "most the last has padding. One program still takes the whole row, with as many threads as "
    "before. It takes the maximum and the sum first across pieces, within each thread, and then "
    "once across threads."
)
gained = [
    [row[f"{how}, % of a copy"] for row in uneven.rows]
    for how in ("one block", "in pieces")
]
of_pieces = [
    lab.read(
        f"At the {len(uneven.rows)} lengths of the table, pieces raise the speed from "
        + " to ".join(f"{min(found)}–{max(found)} %" for found in gained)
        + " of a copy's."
    )
    for _ in range(bool(uneven.rows))
]
lab.together(
    of_padding,
    *of_pieces,
    lab.table(uneven.rows, f"Packed, bfloat16, on {gpu}") if uneven.rows else None,
    lab.source(pieces_fwd_kernel),
)

# %%
# Several programs per row: split
# -------------------------------

# Reading
_, alone_whole, alone_fit = registers_of("packed", 65536, 1024)
parts, part_cols, part_warps = tuned.split(65536, 2, "forward")
part_threads = 32 * part_warps
part_each, part_whole, part_fit = registers_of("split", 65536, part_threads)
lab.read(
    "And a row that is twice as wide? At 65,536 columns, a program of `packed` "
    + (
        "again has the SM to itself. "
        if alone_fit == 1
        else f"needs {alone_whole:,.0f} registers. "
    )
    + f"`split` therefore cuts such a row into {parts} parts, each with a program of its own, and "
    f"{fit(part_fit)} such programs fit on an SM."
)

# %%
# But how can a program finish its part, if every result depends on the whole row? Since pairs
# merge, it needs only two numbers from each of the others.
#
# In an :term:`exchange`, each program *publishes* the pair of its part in a *slot* of memory, which
# is zero at first, *polls* the slots of the others until they are filled, and *collects* their
# pairs. Here four programs share the row of the first animation.
#
# .. animation:: publish_and_collect

# %%

# Reading
drawn = torch.tensor(
    [[1.0, 2, 0, 1, 3, 1, 2, 3, 2, 3, 1, 2, 4, 2, 3, 1]], device=runtime.DEVICE
)
part = drawn[0, 8:12]
(own_m, own_d), (all_m, all_d) = (
    [number.item() for number in pair(x)] for x in (part, drawn)
)
repair = (torch.softmax(drawn, -1)[0, 8:12] / (part - own_m).exp())[0].item()
y = shared_softmax(drawn, block=4)
torch.testing.assert_close(y, torch.softmax(drawn, -1), rtol=1e-5, atol=0)
lab.read(
    "Follow program 2. Its part is "
    + ", ".join(f"{number:.0f}" for number in part.tolist())
    + f", so it publishes the maximum {own_m:.0f} and the sum {own_d:.2f}. From the slots it "
    f"learns that the whole row has the maximum {all_m:.0f} and the sum {all_d:.2f}. Its "
    f"exponentials are still in registers, relative to {own_m:.0f}. One factor, `exp({own_m:.0f} - "
    f"{all_m:.0f}) / {all_d:.2f}` = {repair:.2f}, turns them into results."
)

# %%
# A slot is one number of 64 bits, with the maximum in its upper half and the sum in its lower. An
# :term:`atomic` stores it at once, so a reader finds either an empty slot or a whole pair. No pair
# is 0, because the largest element of a part adds 1 to its sum.
#
# And if a pair never comes? Nothing guarantees that the programs of a row run at the same time. If
# waiting programs held every SM, a missing part could never start: a deadlock. So a program polls a
# slot at most ``max_polls`` times, and then computes the missing pair itself, with ``pair_of``.
#
# This is the smallest kernel that does so, for float32. ``pair_of`` returns the maximum, the sum,
# the exponentials and the columns of a part.

lab.source(shared_row_kernel)

# %%


# Measuring
def exchanged():
    """The error of rows that programs share, if they wait and if they do not."""
    draw = torch.Generator(runtime.DEVICE).manual_seed(0)
    x = torch.randn(1024, 1000, device=runtime.DEVICE, generator=draw)
    truth = torch.softmax(x.double(), dim=-1)
    table = []
    for polls in (exchange.MAX_POLLS, 0):
        off = (shared_softmax(x, max_polls=polls) / truth - 1).abs().max().item()
        assert off < 1e-5
        table.append({"max_polls": polls, "largest relative error": off})
    return table


tried = lab.attempt("Four programs per row, float32", exchanged)

# %%

# Reading
y = shared_softmax(x)
torch.testing.assert_close(y, torch.softmax(x, dim=-1), rtol=1e-5, atol=0)
errors = [row["largest relative error"] for row in tried.rows]
patience = max((row["max_polls"] for row in tried.rows), default=exchange.MAX_POLLS)
y = torch.full_like(drawn, nan)
slots = torch.zeros(1, 4, dtype=torch.int64, device=drawn.device)
shared_row_kernel[(1,)](drawn, y, slots, 16, exchange.MAX_POLLS, 4, 4)
torch.testing.assert_close(y[:, :4], torch.softmax(drawn, -1)[:, :4], rtol=1e-5, atol=0)
assert y[:, 4:].isnan().all()
assert slots.count_nonzero() == 1
lab.read(
    "Correctness does not depend on waiting: when we launch program 0 of the drawing alone, it "
    "computes the three missing pairs itself, and its four results are right."
)

# %%

# Reading
at_most, undrawn = max(share["one program", 65536], share["online", 65536]), ""
if speed("packed", 65536) > at_most:
    at_most, undrawn = speed("packed", 65536), " (`packed`, not drawn)"
in_figure, twice, apiece = (
    share[name, n]
    for name, n in (("Kernel Book", 65536), ("online", long), ("Kernel Book", long))
)
lab.read(
    "Is the exchange worth its time? "
    + "**Wide rows are better shared.** " * (in_figure > at_most and apiece > twice)
    + "At 65,536 columns, our kernels with one program per row reach at most "
    f"{at_most:.0f} %{undrawn}, and `split` {in_figure:.0f}."
)

# %%

# Drawing
step(
    "From one program per row to several",
    "online",
    "row",
    new=("packed", "split"),
)

# %%

# Folded: How do programs publish and poll, bit by bit? With the timed kernel whole
smallest = lab.listing(
    {
        "A part: its pair, its exponentials and its columns": pair_of,
        "The launch clears the slots, as any nonzero value counts as a pair": shared_softmax,
    }
)
kernel = lab.listing(
    {
        "split, the timed kernel": split_row_fwd_kernel,
        "Poll until no slot is empty": exchange.wait,
        "Two float32 as the 64 bits of a slot": exchange.to_slot,
        "Fill a slot": exchange.publish,
        "Slots as maxima and sums": exchange.collect,
        "How many slots a program reads in a poll, LOOKS, and its THREADS": exchange.looks,
        "The whole row, if a part did not come": row_statistics,
    }
)
bits = lab.read(
    "**How a slot holds a pair.** With four parts per row, programs 0 to 3 share row 0, and "
    "programs 4 to 7 share row 1. In the 64 bits of a slot, `<< 32` puts the maximum above the "
    "sum. Because the sum is positive, its sign bit is 0, so widening it to 64 bits leaves the "
    "upper half zero. `shared_row_kernel` looks at one slot after another; `split`, as in the "
    "drawing, reads all slots of a row at once."
)
why_32 = lab.read(
    "**Why a poll reads at least 32 slots.** If a poll read only 16 slots, threads 0 and 16 of a "
    "warp would both read slot 0, each with its own load. Thread 0 might read it just before it is "
    "filled and thread 16 just after. Half of the warp would then leave the loop, although the "
    "`tl.min` in the loop needs all 32 threads. A poll therefore makes at least 32 reads "
    "(`LOOKS`), one per thread, and takes the minimum of all, which is the same for every thread. "
    "If a row has fewer parts, some slots are read more than once (`parts % N_PARTS`), and "
    "`collect` drops the surplus. `volatile` makes each poll read memory anew."
)
why_not_empty = lab.read(
    "**Why no pair looks like an empty slot.** A part of nothing but minus infinity has no largest "
    "element that adds 1 to its sum, and other chapters publish other numbers. `to_slot` therefore "
    "stores a pair XOR a constant, the bits of two NaN that no arithmetic produces, so that no "
    "pair is stored as zero. The atomic can be `relaxed` (it orders no other memory access), "
    "because the reader needs nothing else that this part has written. If a pair is late, "
    "`row_statistics` reads the whole row."
)
in_numbers = lab.read(
    f"**In numbers.** A part of a row of 65,536 columns has {part_cols:,}, and its program has "
    f"{part_threads} threads with {part_each:.0f} registers each. A thread holds "
    f"{part_cols // part_threads} numbers, as in `row`, and we do not know why it needs fewer "
    "registers. A "
    f"program polls at most {patience:,} times; we did not count how often a program gives up in "
    "the timed runs. "
    + (
        f"On rows of 1,000 columns with four programs each, the largest relative error of "
        f"`shared_softmax` is {ten(max(errors))}, with {patience:,} polls or none. "
        if errors
        else ""
    )
    + "The figure shows `packed` and `split` at the lengths for which the package runs them, and "
    "the time of `split` includes clearing the slots. What longer parts gave stands beside "
    "`PART_COLS` in the package's `ops/softmax/tuned.py`."
)
lab.together(smallest, bits, kernel, why_32, why_not_empty, in_numbers)

# %%
# Is it right?
# ------------
#
# Sums taken in another order round differently, so we check all kernels against float64. In 16
# bits, an error may be twice PyTorch's own, or one unit in the last place (:term:`ulp`) if that is
# larger. In float32, we allow four times PyTorch's, or two units.


# Measuring
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
        else ((7, 129), (64, 4096), (6, 10000), (5, 32768), (9, 70001))
    )
    torch.manual_seed(0)  # the same numbers, whatever was measured before
    for algorithm in ("row", "three_pass", "online", "online_2d"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in shapes:
                x = torch.randn(shape, device=runtime.DEVICE).mul(4).to(dtype)
                ran = kernel_of(shape[1], dtype) if algorithm == "row" else algorithm
                what = f"{ran} {shape}"
                factor = 4 if dtype == torch.float32 else 2
                ours, theirs = softmax(x, algorithm=algorithm), torch.softmax(x, -1)
                yield lab.Case(
                    what, "forward", ours, theirs, reference.softmax(x, -1), factor
                )
                # Where one number dominates a row, its gradient is a small difference of large
                # numbers, and which of two errors is smaller there is luck.
                x = (x / 2).requires_grad_()
                dy = torch.randn_like(x)
                ours, theirs = softmax(x, algorithm=algorithm), torch.softmax(x, -1)
                truth = reference.softmax_backward(x, dy, -1)
                dx, their_dx = (
                    torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs)
                )
                yield lab.Case(what, "backward", dx, their_dx, truth, factor)


all_cases = list(cases())


def of(direction):
    return [case for case in all_cases if case.direction == direction]


# %%

# Reading
found = (results.find("softmax") or {"checks": {}})["checks"]
rows = {name: found.get(f"softmax, {name}", []) for name in ("forward", "backward")}
both = [row for of_one in rows.values() for row in of_one]


def close(row):
    """How much of its tolerance an error takes."""
    return row["error"] / row["tolerance"]


beyond = sum(row["dtype"] == "float32" and close(row) > 0.5 for row in both)
worst = max(
    (row["error"] / row["torch_error"] for row in both if row["dtype"] == "float32"),
    default=nan,
)
lab.read(
    "**Our kernels pass all checks, forward and backward.**"
    + (
        f" In float32, errors reach {worst:.1f} times PyTorch's."
        if worst > 1
        else ""
    )
    + " We leave out gradients of rows that one number dominates, where our error in float32 can "
    "be more than four times PyTorch's."
    if both
    else "The checks of this page were not recorded; the fold shows those made here."
)

# %%

# Measuring
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

# %%

# Folded: Which checks are these, and what comes of infinities and of rows of one element?
forward_check = lab.check("softmax, forward", of("forward"))
backward_check = lab.check("softmax, backward", of("backward"))
odd_rows = lab.table(
    rows, "Rows that break things: the first and the last element of the result"
)
of_errors = lab.read(
    "An error is the largest in a stretch of up to 64 rows and 1,024 columns, relative to the "
    "largest result in it. (In the fold of the previous section, an error was relative to its own "
    "result, however small.) "
    + (
        f"Of the {sum(row['dtype'] == 'float32' for row in both)} checks in float32, {beyond} need "
        "a tolerance of more than twice PyTorch's error. "
        if beyond
        else ""
    )
    + "In float32, errors may exceed PyTorch's because the timed kernels "
    "multiply by 1/d and compute the exponential as `exp2(x * LOG2E)`; we did not test this. Where "
    "one number dominates a row, its gradient is a small difference of large numbers. Of "
    "the rows named `packed`, those of 10,000 columns run in pieces."
)
lab.together(of_errors, forward_check, backward_check, odd_rows)

# %%
# How fast is it?
# ---------------

# Reading
for dtype, at, up_to, beyond_it in (
    (torch.bfloat16, PACKED, "row", "packed"),
    (torch.bfloat16, SPLIT, "packed", "split"),
    (torch.float32, SPLIT // 2, "row", "split"),
):
    assert (kernel_of(at, dtype), kernel_of(at + 2, dtype)) == (up_to, beyond_it)
lab.read(
    f"The package's `softmax` chooses by length: `row` up to {PACKED:,} columns, `packed` up to "
    f"{SPLIT:,} and `split` beyond."
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
# The figure adds ``torch.softmax`` (“PyTorch”), ``torch.compile``, Liger (Triton kernels by
# LinkedIn) and quack (in NVIDIA's CuTe DSL, by an author of FlashAttention).

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
ours, in_float32 = (
    {n: 100 * forward.share("Kernel Book", **dtype, columns=n) for n in COLUMNS}
    for dtype in in_dtypes
)
lost = {"forward": forward.losses(*in_dtypes)}
eager, compiled = (
    {n: 100 * forward.share(name, **in_dtypes[0], columns=n) for n in COLUMNS}
    for name in ("PyTorch", "torch.compile")
)
within = [share_of for n, share_of in ours.items() if n <= SPLIT]


def gap_of(row):
    """By how many points a library is ahead."""
    return row["its %"] - row["our %"]


apart = max(abs(ours[n] - share["Kernel Book", n]) for n in COLUMNS)


def beyond_noise(sweep, rows):
    """The losses that are larger than the difference between our runs."""

    def at(row, name):
        where = {"dtype": row["dtype"], "columns": row["columns"]}
        return 100 * sweep.share(name, **where)

    return [
        row for row in rows if at(row, row["library"]) - at(row, "Kernel Book") > apart
    ]


clear = beyond_noise(forward, lost["forward"])
worst = sorted(clear, key=gap_of, reverse=True)
first = [
    row
    for row in worst
    if all(row[key] == worst[0][key] for key in ("library", "dtype"))
]
rest = [row for row in worst if row not in (first[:2] if len(first) < 4 else first)]
led = sorted(row["columns"] for row in first)
lab.read(
    f"**Up to {SPLIT:,} columns, our kernels reach {min(within):.0f} to {max(within):.0f} %.** "
    f"`torch.softmax` reaches at most {max(eager.values()):.0f} % at any length."
)

# %%


# Drawing
def named(sweep):
    """The sweep, where what a library refuses is named by its columns."""
    reasons = {}
    for name, reason in sweep.skipped.items():
        refused = sorted(
            {
                point["columns"]
                for point, times in zip(
                    sweep.points, sweep.milliseconds[name], strict=True
                )
                if not times
            }
        )
        lengths = " and ".join(f"{n:,}" for n in refused)
        reasons[name] = (
            f"{name} at {lengths} columns, which it refuses"
            if " refuses " in reason and 0 < len(refused) < len(COLUMNS)
            else reason
        )
    return replace(
        sweep, skipped=reasons, elsewhere=[named(other) for other in sweep.elsewhere]
    )


lab.plot(named(forward), "Forward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Reading
ladder_at, here_at = share["Kernel Book", SPLIT], ours[SPLIT]
lab.read(
    f"**We lose most to {first[0]['library']}**, which in {first[0]['dtype']} leads "
    + (
        f"by {gap_of(first[0])} points at {first[0]['columns']:,} columns"
        + "".join(f" and by {gap_of(row)} at {row['columns']:,}" for row in first[1:2])
        if len(first) < 4
        else f"at {len(led)} of the {len(COLUMNS)} lengths, by up to {gap_of(first[0])} points"
    )
    + ". All other leads are within "
    + (
        f"{max(map(gap_of, rest))} points, in whole per cent."
        if rest
        else f"{apart:.1f} points, the spread of our own runs"
        + f" (at {SPLIT:,} columns, we reach {ladder_at:.0f} above and {here_at:.0f} here)"
        * (f"{ladder_at:.0f}" != f"{here_at:.0f}")
        + "."
    )
    if clear
    else f"No library is ahead by more than {apart:.1f} points, by which our own runs differ."
)

# %%

# Measuring
x = torch.ones(64, 1024, device=runtime.DEVICE, dtype=torch.bfloat16)
host = lab.host_times(
    {"Kernel Book": softmax, "PyTorch": lambda x: torch.softmax(x, dim=-1)}, x
)

# %%

# Reading
calls = {row["pass"]: row for row in host.rows}
ours_costs, theirs_costs = (
    calls.get("forward", {}).get(f"{whose} (µs)", nan)
    for whose in ("Kernel Book", "PyTorch")
)
lab.read(
    f"On small inputs, such as {len(x)} × {x.shape[1]:,}, the host's time for a call "
    f"decides instead. Ours is {ours_costs / theirs_costs:.1f} times PyTorch's"
    + ": call `torch.softmax` there" * (ours_costs > 1.2 * theirs_costs)
    + "."
)

# %%


# Measuring
HEIGHTS = (2**15, 2**17)


@triton.jit
def row_hint_kernel(
    x_ptr,  # the same as row_fwd_kernel, with another hint or none
    y_ptr,
    stride_row,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    HINT: tl.constexpr,
):
    rows = (
        tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    )
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x_ptrs = x_ptr + rows * stride_row + cols
    x = tl.load(x_ptrs, mask=inside, other=float("-inf"), eviction_policy=HINT)
    x = x.to(tl.float32)
    numerator = exp(x - tl.max(x, axis=1, keep_dims=True))
    y = numerator * (1 / tl.sum(numerator, axis=1, keep_dims=True))
    tl.store(y_ptr + rows * n_cols + cols, y, mask=inside)


def with_numbers(kernel, numbers, x, y, *hint):
    n_rows, n_cols = x.shape
    block, warps = (1, n_cols), n_cols // (32 * numbers)
    return lambda: kernel[(n_rows,)](
        x, y, n_cols, n_rows, n_cols, *block, *hint, num_warps=warps
    )


def reads_providers(rows, columns, dtype):
    x = torch.randn(rows, columns, device=runtime.DEVICE, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "one read, 64 per thread": with_numbers(row_fwd_kernel, 64, x, y),
        "one read, 32 per thread": with_numbers(row_fwd_kernel, 32, x, y),
        "one read, no hint": with_numbers(row_hint_kernel, 64, x, y, ""),
        "one read, evict_first": with_numbers(row_hint_kernel, 64, x, y, "evict_first"),
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

# %%


# Measuring
def times_of(sweep, provider):
    """The µs of both heights, or nothing where it was not timed."""
    if sweep.at(provider=provider).empty:
        return []
    return [1e3 * sweep.milliseconds_at(provider, rows=rows) for rows in HEIGHTS]


def lead(sweep, ahead, behind):
    """By how many µs one is ahead at both heights, in words, if it is."""
    less, more = (
        theirs - ours
        for theirs, ours in zip(
            times_of(sweep, behind) or [nan, nan],
            times_of(sweep, ahead) or [nan, nan],
            strict=True,
        )
    )
    if not min(less, more) > 0:
        return ""
    much = "about four times that" if 3.6 < more / less < 4.4 else f"{more:.1f}"
    return f"{less:.1f} µs on 32,768 rows of 8,192 columns, and by {much} on four times as many"


def other_numbers(kind):
    """How much 32 numbers per thread instead of 64 change a time at most, in %."""
    few, many = (
        times_of(reads, f"{kind}, {n} per thread") or [nan, nan] for n in (32, 64)
    )
    return max(abs(100 * (a / b - 1)) for a, b in zip(few, many, strict=True))


# %%

# Folded: Why do others lead, and where do they fall? With a cache hint, and what a call costs
few = max(other_numbers("one read"), other_numbers("two reads"))
plain, dropped, kept, of_two_reads = (
    (times_of(reads, name) or [nan, nan])[1]
    for name in (
        "one read, no hint",
        "one read, evict_first",
        "one read, 64 per thread",
        "two reads, 64 per thread",
    )
)
of_hint = lab.read(
    "**A hint for numbers that are read once.** `row` reads each number once, and still asks L2 "
    "to keep what it has read (`evict_last`). On 131,072 rows of 8,192 columns it takes "
    f"{kept:,.0f} µs with this hint, {plain:,.0f} without it, and {dropped:,.0f} with the "
    "opposite, `evict_first`"
    + (
        f". The hint saves {100 * (1 - kept / plain):.0f} %, and we do not know why. "
        if kept < 0.99 * plain
        else ". "
    )
    + "`packed` and `split` give it too, but there we did not measure what it saves."
)
lag = {n: share["online", n] - share["Kernel Book", n] for n in (4096, 8192, 16384)}
of_online = lab.read(
    "**One read or two.** From 4,096 to 16,384 columns, `online` would be "
    + (
        f"up to {max(lag.values()):.0f} points faster than `softmax`"
        if max(lag.values()) > 0.5
        else "no faster than `softmax`"
    )
    + ", and its speed depends on what L2 still holds. With the hint, and as many numbers per "
    "thread, `online` takes "
    f"{of_two_reads:,.0f} µs on the rows of the last paragraph"
    + (
        ", so at this length its second read costs nothing. "
        if of_two_reads < 1.005 * kept
        else ". "
    )
    + "How many numbers a thread holds matters little: 32 instead of 64 change a time by at most "
    f"{few:.1f} %."
)
of_other_rows = lab.read(
    "**Other rows.** In float32, which cannot be packed, `softmax` runs `row` up to "
    f"{SPLIT // 2:,} columns and then `split`; there we did not measure `online`. The package "
    f"resorts to it only above {tuned.ROW_COLS:,} columns. In 16 bits, a row of odd length cannot "
    f"be packed either; up to {SPLIT:,} columns, `row` takes it. The speeds of `softmax` in this "
    f"section and in the earlier ones are from two runs, which differ by at most {apart:.1f} "
    "points."
)
of_quack = [
    lab.read(
        "**The lead of quack on wide rows.** Its programs exchange their results through the "
        "shared memory of neighbouring SMs (a cluster), where ours go through memory. We did not "
        "test whether this is why it leads."
    )
    for _ in range(
        bool(clear and first[0]["library"] == "quack" and first[0]["columns"] > SPLIT)
    )
]
lowest = min(eager, key=eager.get)
falls = {n: compiled[n] - compiled[n // 2] for n in COLUMNS[1:]}
drop = min(falls, key=falls.get)


def twice_the_bytes(provider, columns):
    """How many times as long float32 takes, which has twice the bytes."""
    wide, half = (
        forward.milliseconds_at(provider, dtype=dtype, columns=columns)
        for dtype in ("float32", "bfloat16")
    )
    return wide / half


slower = max(
    twice_the_bytes("PyTorch", lowest), twice_the_bytes("torch.compile", drop)
)
of_others = lab.read(
    "**PyTorch's lines.** "
    + (
        f"Where PyTorch is slowest, at {lowest:,} columns, and where `torch.compile` drops, at "
        f"{drop:,}, "
    )
    + (
        "memory does not limit them: float32, with twice as many bytes, takes at most "
        f"{100 * (slower - 1):.0f} % longer."
        if slower < 1.4
        else f"float32, with twice as many bytes, takes up to {slower:.1f} times as long."
    )
    + " By its source, PyTorch keeps up to nine numbers in the registers of each of 1,024 threads; "
    "above 9,216 columns, another kernel takes over, which goes through shared memory. Beyond "
    "1,024 columns, `torch.compile` generates a kernel that corrects the sum for every number "
    "rather than for every block, with three exponentials per number where `row` has one."
)
lab.together(*of_quack, of_others, of_hint, of_online, of_other_rows, host, facts)

# %%
# Backward
# --------
#
# Training also needs the gradient. With the output :math:`y` and the incoming gradient :math:`dy`,
# it is
#
# .. math::
#
#    dx_i = y_i \Big( dy_i - \sum_j y_j\, dy_j \Big)
#
# A program therefore reads :math:`y` and :math:`dy`, computes one :term:`reduction`, without any
# exponential, and writes :math:`dx`. For rows that fit on chip, this is all of it:

lab.source(row_bwd_kernel, "gradient")

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

# %%

# Reading
back = [
    100 * backward.share("Kernel Book", dtype="bfloat16", columns=n) for n in COLUMNS
]
lost["backward"] = backward.losses(*in_dtypes)
short_rows = back[:-1]
clear = beyond_noise(backward, lost["backward"])
leaders = " or ".join(sorted({row["library"] for row in clear}))
leaders = leaders.replace("torch.compile", "`torch.compile`")
of_speed = lab.read(
    (
        "**Backward is memory-bound too.** It moves its bytes "
        if min(short_rows) > 97
        else "Backward moves its bytes "
    )
    + (
        "at least as fast as a copy"
        if min(short_rows) > 99.5
        else f"at no less than {min(short_rows):.0f} % of a copy's speed"
    )
    + (
        f", except at {long:,} columns, where it reaches {back[-1]:.0f} %. "
        if back[-1] < min(short_rows)
        else ". "
    )
)
of_leads = lab.read(
    f"At some lengths, {leaders} leads, by at most {max(map(gap_of, clear))} points."
    if clear
    else f"No library is ahead by more than {apart:.1f} points."
)
lab.together(of_speed, of_leads)

# %%

# Drawing
lab.plot(named(backward), "Backward, bfloat16", share=True, where={"dtype": "bfloat16"})

# %%

# Folded: Where does the gradient come from, and where do others lead? With both kernels whole
kernels = lab.listing(
    {
        "A program takes whole rows, several if they are short; dy may have its own row stride": (
            row_bwd_kernel
        ),
        "Programs share a wide row, and each publishes its part of the sum; row_product reads"
        " the whole row if a part is late": (split_row_bwd_kernel),
    }
)
lab.plot(named(forward), "Forward, float32", share=True, where={"dtype": "float32"})
lab.plot(named(backward), "Backward, float32", share=True, where={"dtype": "float32"})
for crossing in ("online", "three_pass", "simple_softmax"):
    lab.colour(crossing)  # in this order lines that cross differ most
lab.plot(
    ladder,
    "All kernels of this page, forward, bfloat16",
    share=True,
    names={"one program": "row"},
)
derived = lab.read(
    "**The derivation.** Differentiating `y[j] = exp(x[j] - m) / d` with respect to `x[i]` gives "
    "`-y[j] * y[i]`, and `y[j]` more if i = j. By the chain rule, we multiply this by `dy[j]` and "
    "sum over j. The first term then becomes `-y[i]` times the sum of all `y[j] * dy[j]`, and the "
    "second becomes `y[i] * dy[i]`."
)
compiled_leads = lead(gradients, "torch.compile", "Kernel Book")
again = lab.read(
    "Here 100 % is a copy's bytes per second. In "
    f"float32, our forward kernels reach {min(in_float32.values()):.0f} to "
    f"{max(in_float32.values()):.0f} %. The text does not count leads below {apart:.1f} points, by "
    "which our own runs differ. "
    + (
        f"`torch.compile` leads our backward kernel by {compiled_leads}; we do not know why."
        if compiled_leads
        else "At 8,192 columns, `torch.compile` does not lead our backward kernel."
    )
    + " Backward can exceed 100 %, presumably because it reads twice as much as it writes, and "
    "reading is faster than copying (“Measuring a kernel”)." * (max(back) > 100.5)
)
rows = [{"direction": name} | row for name, found in lost.items() for row in found]
losses = lab.table(
    rows or [{"direction": "none"}],
    "Where a library is ahead of us by more than 1 %, in % of a copy",
)
lab.together(derived, losses, again, kernels)

# %%
# What breaks it
# --------------
#
# Three mistakes raise no error. The first is to pad a row with zeros:
#
# .. code-block:: python
#
#    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)  # wrong
#    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))  # right


# Measuring
@triton.jit
def padded_kernel(x_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr, OTHER: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=OTHER)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + cols, y, mask=cols < n_cols)


# %%

# Reading
x = torch.full((100,), -5.0, device=runtime.DEVICE)
rows = []
for other in (float("-inf"), 0.0):
    y = torch.empty_like(x)
    padded_kernel[(1,)](x, y, 100, 128, other)
    rows.append(f"{y.sum():.2g}")
lab.read(
    "The padding then has the value 0 rather than the weight 0. In a block of 128 with 100 "
    f"elements that equal −5, the results therefore sum to {rows[1]} instead of {rows[0]}."
)

# %%
# The second is to forget to rescale the old sum:
#
# .. code-block:: python
#
#    d = d + tl.sum(tl.exp(x - m_new), axis=0)  # wrong
#    d = d * alpha + tl.sum(tl.exp(x - m_new), axis=0)  # right

# Reading
pieces = drawn.view(4, 4).double().cpu()
m, right, wrong = torch.tensor(-inf), torch.tensor(0.0), torch.tensor(0.0)
for piece in pieces:
    m_new = torch.maximum(m, piece.max())
    term = (piece - m_new).exp().sum()
    right = right * (m - m_new).exp() + term
    wrong = wrong + term
    m = m_new
truth = (pieces - pieces.max()).exp().sum()
assert wrong > 2 * truth
lab.read(
    f"For the row of the first animation, we get a sum of {wrong:.2f} without `alpha` and the "
    f"correct {right:.2f} with it. If the maximum were in the first block, the mistake would not "
    "show."
)

# %%

# %%
# The third is in the ``online_kernel`` above. A row can begin with a block of nothing but minus
# infinity, for example because a mask put it there. Then ``m_new`` is minus infinity too, and the
# difference of two infinities is NaN:
#
# .. code-block:: python
#
#    alpha = tl.exp(m - m_new)  # wrong, and so is tl.exp(x - m_new)
#    m_safe = tl.where(m_new == -INF, 0.0, m_new)
#    alpha = tl.exp(m - m_safe)  # right, and so is tl.exp(x - m_safe)

# Reading
x = special["-inf, then numbers"].to(runtime.DEVICE)
y = torch.empty_like(x)
with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # the interpreter warns of the NaN that we are after
    online_kernel[(1,)](x, y, 600, BLOCK_COLS=256)
    shared = shared_softmax(x[None])
unguarded = y.isnan().sum().item()
guarded = softmax(x, algorithm="online")
assert unguarded == len(x)
torch.testing.assert_close(guarded, torch.softmax(x, dim=-1))
assert shared.isnan().all()
lab.read(
    f"If the first 512 of {len(x)} elements are minus infinity, all {unguarded} results are NaN, "
    "and so are those of `shared_row_kernel`. The timed kernels have this guard where they need "
    "it, as `finite(m_new)`."
)

# %%
# The bridge to attention
# -----------------------
#
# The recurrence matters most in attention, :math:`\mathrm{softmax}(qk^\top)v` (here without a
# scale): a sum of the rows of :math:`v`, weighted by the softmax of scores, which are far too many
# to keep on chip.
#
# A program therefore walks over the keys in blocks and carries, for each of its queries, the pair
# and the weighted sum so far. ``alpha`` rescales that sum too: ``acc = acc * alpha + p @ v``, where
# ``p`` holds the exponentials of a block. After the last block, ``acc / d`` is the result. With
# this, attention needs little memory (Rabe and Staats, 2021) and runs fast (Dao et al., 2022), as
# :doc:`/chapters/attention_forward` shows.
#
# **Try it:** write the kernel for one block of queries. Start from the first loop of
# ``online_kernel``, where a block of ``x`` becomes a block of scores with one maximum and one sum
# per query. ``tl.dot(a, b, input_precision="ieee")`` computes the matmul of two blocks in full
# float32.

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
# A kernel need not read a row three times. Two reads are enough (``online``), because a maximum and
# a sum say all that matters about earlier blocks; the second read costs little unless rows are
# long. One read is enough if the row stays on chip: in one program (``row``), packed so that a
# second program fits (``packed``), or spread over several programs whose pairs merge in any order
# (``split``).

# %%
# Exercises
# ---------
#
# **1. Log-softmax.** The logarithm of softmax is :math:`x - m - \log d`. Why is it better to
# compute this than the logarithm of the result? Write the kernel for rows that fit on chip.

# %%

# Solution: log-softmax
#
# Where an element of the result underflows to 0, its logarithm is minus infinity, although the true
# logarithm is finite: about -200 for an element that is 200 below the maximum. The difference
# x - m - log d contains no number that small, so it stays accurate.


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
assert torch.softmax(x, -1).log().isinf().any()
assert y.isfinite().all()
lab.check(
    "Log-softmax",
    [lab.Case("(5, 300)", "forward", y, torch.log_softmax(x, -1), truth, factor=4)],
)

# %%
# **2. Cross-entropy without probabilities.** For a row with target :math:`t`, the loss is
# :math:`m + \log d - x_t`, and its gradient with respect to :math:`x_i` is
# :math:`y_i - \delta_{it}`, where :math:`\delta_{it}` is 1 if :math:`i = t` and 0 otherwise. Write
# one kernel that reads each row once and computes both.

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
