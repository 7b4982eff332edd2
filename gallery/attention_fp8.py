"""
Attention in eight bits
=======================

A matrix unit multiplies 8-bit numbers up to twice as fast as 16-bit ones. The price is precision:
eight bits can distinguish at most 256 numbers. *What do we lose, and how must a kernel change to
lose no more than necessary?*

You will learn

- what the 8-bit formats can represent, and how one scale per head fits numbers into them;
- where the error comes from: the operands, the weights and the accumulators;
- why attention is not twice as fast in eight bits, and at which length quantising pays.

On a GPU, the chapter needs 8-bit matmuls (compute capability 8.9 or above), and one of its kernels
needs Hopper.
"""

# sphinx_gallery_thumbnail_number = 10
import math
import re
import statistics
import subprocess
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from kernelbook import lab, reference, runtime
from kernelbook.lab.chapter import checked
from kernelbook.ops.attention import Quantized, attention, fp8, quantize, tuned
from kernelbook.ops.hopper import fp8 as hopper_fp8
from kernelbook.ops.hopper import fp8_choice

lab.start("attention_fp8", "kernelbook.ops.attention", "kernelbook.ops.hopper.fp8")

# %%
# What eight bits can gain
# ------------------------
#
# Attention can gain no more than its matmuls do, because the rest of its arithmetic gets no faster.
# In each step, Hopper's :term:`matrix unit` takes 32 bytes from each row of the left matrix. In 8
# bits these are twice as many numbers as in 16, so on paper the speed doubles.

MATMUL = 8192
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def matmul_operands():
    size = (2, MATMUL, MATMUL)
    return torch.randn(size, device=runtime.DEVICE, dtype=torch.bfloat16)


def matmuls(size):
    a, b = matmul_operands()
    a8, b8 = a.to(E4M3), b.to(E4M3)
    one = torch.ones((), device=runtime.DEVICE)
    scales = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    return {
        "matmul": lambda: a @ b,
        "8-bit matmul": lambda: torch._scaled_mm(a8, b8.t(), **scales),
    }


LIMIT_WORK = f"2 * {MATMUL} * {MATMUL} * {MATMUL}"
products = lab.bench(
    "matmuls",
    [{"size": MATMUL}],
    matmuls,
    limit="matmul",
    work="2 * size * size * size",
    limit_work=LIMIT_WORK,
    unit="TFLOP/s",
)

# %%

# Reading
nan = float("nan")
slow, fast = products.rate("matmul"), products.rate("8-bit matmul")
lab.read(
    f"**With cuBLAS, a large matmul is {fast / slow:.2f} times as fast in 8 bits as in bfloat16.**"
)

# %%
# **To use eight bits, we make four changes to the kernel** (orange). Blue boxes hold 8 bits, grey
# ones 32.


# Drawing
def four_places(axes):
    places = {  # the left edge, the middle, the width
        "q, k": (0, 2, 1.5),
        "scores": (2.6, 2, 1.6),
        "weights p": (5.2, 2, 1.9),
        "p": (8.6, 2, 1.5),
        "v": (0, 0, 1.5),
        "sum": (8.6, 0, 1.5),
    }
    for name, (left_edge, middle, width) in places.items():
        ink = lab.colour("Kernel Book" if name in ("q, k", "p", "v") else "matmul")
        box = {"facecolor": (*to_rgb(ink), 0.2), "edgecolor": ink}
        axes.add_patch(Rectangle((left_edge, middle - 0.4), width, 0.8, **box))
        axes.text(left_edge + width / 2, middle, name, ha="center", va="center")
    arrows = (
        ((1.5, 2), (2.6, 2), "matmul"),
        ((4.2, 2), (5.2, 2), "exp"),
        ((7.1, 2), (8.6, 2), "round"),
        ((9.35, 1.6), (9.35, 0.4), None),
        ((1.5, 0), (8.6, 0), "matmul with p"),
    )
    for begin_at, end_at, label in arrows:
        style = {"arrowstyle": "->", "color": lab.colour("matmul")}
        axes.annotate("", end_at, begin_at, arrowprops=style)
        if label:
            middle = (begin_at[0] + end_at[0]) / 2
            axes.text(middle, end_at[1] + 0.12, label, ha="center", fontsize=8.5)
    for x_place, y_place, label in (
        (0.75, 1.2, "1: a scale\nfor each head"),
        (0.75, -0.8, "1: a scale\n2: transposed"),
        (7.3, 1.2, "3: times 256,\nthen rounded"),
        (9.35, -0.8, "4: one tile\nat a time"),
    ):
        axes.text(
            x_place, y_place, label, ha="center", va="center", fontsize=9,
            color=lab.colour("PyTorch"),
        )  # fmt: skip
    axes.set(xlim=(-0.6, 10.6), ylim=(-1.2, 2.5))
    axes.set_axis_off()


lab.sketch(
    "Where attention uses 8 bits",
    "Boxes and arrows. q and k, in 8 bits with a scale for each head (1), lead to the scores and "
    "the weights p, both in 32 bits. Times 256 and rounded (3), p has 8 bits. p and v, in 8 bits "
    "with a scale (1) and transposed (2), lead to the sum in 32 bits, one tile at a time (4).",
    four_places,
    height=2.7,
)

# %%
# Two 8-bit formats
# -----------------
#
# An 8-bit floating-point number, or :term:`FP8`, has a sign, an exponent and a *mantissa*: the few
# bits that follow the leading 1. *e4m3* has 4 bits of exponent and 3 of mantissa, so from 1 to 2 it
# counts in eighths, and 1.15 becomes 1.125. *e5m2* has 5 and 2: it counts in quarters, so 1.15
# becomes 1.25, but it reaches much larger numbers.
#
# .. image:: /figures/attention-fp8-formats.svg
#    :alt: Above, the bits: e4m3 is a sign, four bits of exponent and three after the leading one;
#          e5m2 is a sign, five and two. Middle, all positive numbers on an axis of powers of two:
#          e4m3 reaches from 2 to the -9 to 448, e5m2 from 2 to the -16 to 57,344. Below, from 1 to
#          4: e4m3 has eight numbers in each power of two, e5m2 four.

# %%
# **We choose e4m3**: a scale can move the operands of a head into the range of the format, so we
# need precision more than range. Its rounding error is at most about 6 %, half that of e5m2, except
# near the lower end of the range.

# %%


# Measuring
def patterns_counted():
    rows = []
    for dtype in (E4M3, E5M2):
        x = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        finite = x[x.isfinite()]
        positive = finite[finite > 0].sort().values
        rows.append(
            {
                "format": str(dtype).removeprefix("torch."),
                "numbers": finite.unique().numel(),
                "largest": int(positive[-1].item()),
                "smallest, 2^": int(positive[0].log2().item()),
                "from 1 to 2": int(((positive >= 1) & (positive < 2)).sum()),
                "in [0, 1]": int((positive <= 1).sum()) + 1,
                "infinities": int(x.isinf().sum()),
                "NaN": int(x.isnan().sum()),
            }
        )
    return rows


def relative_error(x, dtype):
    return ((x.to(dtype).double() - x).abs() / x).max().item()


def rounding_errors(axes):
    for name, dtype, last, ink in (
        ("e4m3", E4M3, 8, "Kernel Book"),
        ("e5m2", E5M2, 15, "PyTorch"),
    ):
        powers = range(-19, last + 1)
        mantissas = torch.linspace(1, 1.7, 4001, dtype=torch.float64)
        errors = [100 * relative_error(2.0**n * mantissas, dtype) for n in powers]
        axes.plot(powers, errors, "-o", ms=3.5, color=lab.colour(ink), label=name)
    axes.set_yscale("log", base=2)
    axes.set_yticks((6.25, 12.5, 25, 50, 100), ("6.25", "12.5", "25", "50", "100"))
    axes.set_xticks((-16, -9, -6, 0, 8, 15))
    axes.set_xticklabels(["2⁻¹⁶", "2⁻⁹", "2⁻⁶", "1", "2⁸", "2¹⁵"])
    axes.set(xlabel="size of the number", ylabel="largest error, %")
    axes.legend(loc="upper right")


# %%

# Folded: All 256 patterns, the error of every size of number, and numbers that are too large
lab.sketch(
    "Rounding error, by the size of the number",
    "Two curves, flat on the right and rising to the left. e4m3 stays near 6 % from 2 to the -6 to "
    "448, and loses everything below 2 to the -10. e5m2 stays near 11 % from 2 to the -14 to "
    "57,344, and loses everything below 2 to the -17.",
    rounding_errors,
    height=2.9,
)
in_e4m3 = torch.tensor(500.0).to(E4M3).float()
stored_as = "NaN" if in_e4m3.isnan() else f"{in_e4m3:.0f}"  # by versions of PyTorch
assert stored_as in ("NaN", "448")
lab.together(
    lab.table(patterns_counted(), "All patterns of eight bits"),
    lab.read(
        f"A number that is too large raises no error: PyTorch converts 500 to {stored_as} in e4m3. "
        "The scale must therefore be right before anything is converted."
    ),
)

# %%
# Change 1: a scale per head
# --------------------------
#
# With a scale, numbers of any size fit into a format that ends at 448. The kernel receives *stored*
# numbers and one factor, the :term:`descale`; a value is its stored number times the descale. If
# the largest element is 4.48, the descale is 0.01, and 4.48 is stored as 448. An element of 1.01
# would become 101, but near 100 e4m3 has only 96 and 104, so we store 104, which stands for 1.04.
#
# This function maps the largest element to the largest number of the format:


def round_to_8_bits(x, dtype, dims):
    largest = x.new_tensor(torch.finfo(dtype).max)
    descale = x.abs().amax(dims, keepdim=True) / largest
    return (x / descale).to(dtype), descale


# %%
# **Each head gets its own descale**, because heads can differ in size. In the figure, each head is
# a thousand times smaller than the one before; the bottom row shows the numbers of e4m3. What lies
# left of the dashed line becomes 0, because it is less than half of the smallest number,
# :math:`2^{-9}`.


# Measuring
def errors_of_heads(x):
    """By one descale for all heads, or one for each: the error of what is stored, and it."""
    rows = []
    for name, dims in {"tensor": (0, 1, 2, 3), "head": (2, 3)}.items():
        stored, descale = round_to_8_bits(x, E4M3, dims)
        off = (stored.double() * descale - x).square().mean((0, 2, 3)).sqrt()
        off /= x.square().mean((0, 2, 3)).sqrt()
        row = {"one descale per": name, "descales": descale.numel()}
        off = [f"{100 * e:.{0 if e > 0.995 else 1}f} %" for e in off.tolist()]
        rows.append(row | {f"head {i}": error for i, error in enumerate(off)})
    return rows, stored


sizes = torch.tensor([1.0, 1e-3, 1e-6], device=runtime.DEVICE).view(1, 3, 1, 1)
x = torch.randn(1, 3, 200, 64, device=runtime.DEVICE) * sizes
of_heads, stored = errors_of_heads(x)
assert torch.equal(quantize(x).stored.float(), stored.float())

# %%


# Drawing
def draw_numbers(axes, low, high):
    """The numbers of e4m3, as ticks on an axis of powers of two, and where it rounds to 0."""
    ticks = torch.arange(1, 127, dtype=torch.uint8).view(E4M3).double().log2()
    axes.vlines(ticks, low, high, color="#1f2328", linewidth=0.8)
    axes.axvline(-10, color=lab.colour("matmul"), linestyle="--")


def placed(*panels):
    for axes, dims in zip(panels, ((0, 1, 2, 3), (2, 3)), strict=True):
        _, its_descale = round_to_8_bits(x, E4M3, dims)
        for i, ink in enumerate(("Kernel Book", "Liger", "quack")):
            scaled = (x / its_descale)[0, i].abs().double().log2().flatten().cpu()
            heights = 2.4 * torch.histc(scaled.clamp(-24, 9), 33, -24, 9) / len(scaled)
            axes.bar(
                range(-24, 9), heights, 1, 2.0 - i, color=lab.colour(ink), alpha=0.6, align="edge"
            )  # fmt: skip
            axes.axhline(2 - i, color=lab.colour("matmul"), linewidth=0.6)
        draw_numbers(axes, -0.75, -0.35)
        axes.set(ylim=(-0.85, 2.9), xlim=(-24, 9.5), xticks=(-20, -10, 0, 8))
        axes.set_xticklabels(["2⁻²⁰", "2⁻¹⁰", "1", "2⁸"])
        axes.set_yticks(
            (2, 1, 0, -0.55),
            ["head 0", "head 1", "head 2", "e4m3"] if len(dims) == 4 else [],
        )
        axes.grid(axis="y", visible=False)
        kind = "one descale" if len(dims) == 4 else "one for each head"
        axes.set_title(kind, loc="left", fontsize=11)
        axes.set_xlabel("size of the stored number")


lab.sketch(
    "Three heads and the numbers of e4m3",
    "Two panels of three histograms over powers of two, above the numbers of e4m3 as ticks. Left, "
    "with one descale, head 0 lies at the upper end of the ticks, head 1 ten powers of two lower, "
    "and head 2 left of the dashed line, where there are no ticks. Right, with a descale for each "
    "head, all three lie at the upper end.",
    placed,
    panels=2,
    height=2.9,
)

# %%

# Reading
shared, own = (row["head 2"] for row in of_heads)
lab.read(
    "**With one descale for the whole tensor, the smallest head "
    + ("is lost" if shared == "100 %" else f"has an error of {shared}")
    + f". With its own, its error is only {own}.** By error we mean the root mean square of the "
    "differences, divided by that of the true values."
)

# %%
# The package's ``quantize`` returns both parts together, as ``Quantized(stored, descale)``.
#
# **Descales add no work to the kernel's loop**, because they merge with factors that are there
# anyway: the scale of the scores, and the division by the sum of the weights. Write :math:`q = a
# \hat q`, :math:`k = b \hat k` and :math:`v = c \hat v`, where the hat marks stored numbers. With
# scores :math:`s`, weights :math:`p` and their sum :math:`l`,
#
# .. math::
#
#    \begin{aligned}
#    s_{ij} &= (\text{scale} \cdot a\, b)\; \hat q_i \cdot \hat k_j \\
#    o_i &= \frac{c}{l_i} \sum_j p_{ij}\, \hat v_j
#    \end{aligned}

# %%


# Measuring
def values(x):
    """Return what an operand stands for, in float64."""
    if not isinstance(x, Quantized):
        return x.double()
    shape = (*x.descale.shape, *[1] * (4 - x.descale.ndim))
    return x.stored.double() * x.descale.double().view(shape)


def prepare(q, k, v, q_dtype=E4M3, v_dtype=E4M3, per="head"):
    """Return operands for attention, and the values that they stand for."""
    v = quantize(v, v_dtype, per=per, contiguous="seqlen")
    if q_dtype in (E4M3, E5M2):
        q, k = quantize(q, q_dtype, per=per), quantize(k, q_dtype, per=per)
    else:
        q, k = q.to(q_dtype), k.to(q_dtype)
    return (q, k, v), [values(x) for x in (q, k, v)]


plain = partial(attention, backend="triton")  # which this chapter explains first
HOPPER = runtime.capability(runtime.DEVICE) == (9, 0)
NEEDS_HOPPER = lab.Absent("it needs a GPU of compute capability 9.0, which is Hopper")


def in_gluon(q, k, v, is_causal=False):
    """Return (out, lse) of the kernel with roles, for what ``quantize`` returns."""
    stored, descales = zip(q, k, v, strict=True)
    scale = stored[0].shape[3] ** -0.5
    options = (is_causal, scale, torch.bfloat16)
    return hopper_fp8.attention_fp8_forward(*stored, descales, *options)


def descales_changed():
    """The largest change of the output if what is stored of q, k or v is halved, by its descale."""
    operands, _ = prepare(*torch.randn(3, 1, 2, 60, 32, device=runtime.DEVICE))
    before = plain(*operands)
    changes = {"doubled": [], "forgotten": []}
    for x in operands:
        half = (x.stored.float() / 2).to(E4M3)
        for name, descale in (("doubled", 2 * x.descale), ("forgotten", x.descale)):
            changed = [Quantized(half, descale) if y is x else y for y in operands]
            changes[name].append((plain(*changed) - before).abs().max().item())
    return max(changes["doubled"]), min(changes["forgotten"])


# %%

# Folded: The error of each head, and a test of the formula
with_doubled, with_forgotten = descales_changed()
assert with_doubled < 0.05 < with_forgotten
lab.together(
    lab.table(of_heads, "Error of what is stored, e4m3"),
    lab.read(
        "To test the formula, we halve the stored numbers of q, k and v in turn. If we also double "
        "the descale, the output "
        + (
            f"changes by at most {with_doubled:.1g}"
            if with_doubled
            else "does not change"
        )
        + ". If we leave the descale as it was, some element changes by "
        f"{with_forgotten:.1g} or more."
    ),
)

# %%
# Change 2: V transposed
# ----------------------
#
# We have to store V transposed, because an 8-bit matmul accepts only one layout. A matmul sums over
# a dimension that both operands share, the *contracted* dimension: head_dim in :math:`QK^\top`,
# the keys in :math:`PV`. Hopper reads the second operand from :term:`shared memory`, where one
# dimension is *contiguous*: its elements are neighbours.
#
# With 16 bits, either dimension may be contiguous. With 8 bits it has to be the contracted one,
# because the instruction can transpose 16-bit types only. Q and K already lie this way, V does not.
#
# .. image:: /figures/attention-fp8-layout.svg
#    :alt: Three matrices in shared memory, with an arrow along the dimension that is contiguous and
#          bars along the one that is contracted. K: both are head_dim, it fits. V as it usually
#          lies: contiguous is head_dim, contracted are the keys, it does not fit. V transposed:
#          both are keys, it fits.
#
# With the wrong layout, the compiler rearranges every tile before the instruction can read it.

# Measuring
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _product_kernel(
    a_desc, b_desc, c_ptr, length, columns, CONTRACTED_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start_m, start_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, length, BLOCK_K):
        a = a_desc.load([start_m, start])
        if CONTRACTED_FIRST:  # b is (length, columns)
            b = b_desc.load([start, start_n])
        else:  # b is (columns, length): the contracted dimension is contiguous
            b = b_desc.load([start_n, start])
            b = b.T
        acc = tl.dot(a, b, acc, input_precision="ieee")
    rows = start_m + tl.arange(0, BLOCK_M)
    cols = start_n + tl.arange(0, BLOCK_N)
    tl.store(c_ptr + rows[:, None] * columns + cols[None, :], acc)


# %%


# Measuring
def multiply(a, b, contracted_first, block=(128, 128, 64), **options):
    """Return a @ b, or a @ b.T where the contracted dimension of b is contiguous."""
    (rows, length), columns = a.shape, b.shape[1 if contracted_first else 0]
    m, n, k = block
    c = torch.empty(rows, columns, device=a.device)
    b_block = [k, n] if contracted_first else [n, k]
    a_desc = TensorDescriptor(a, list(a.shape), list(a.stride()), [m, k])
    b_desc = TensorDescriptor(b, list(b.shape), list(b.stride()), b_block)
    launched = _product_kernel[(rows // m, columns // n)](
        a_desc, b_desc, c, length, columns, contracted_first, *block, **options
    )
    return c, launched


# %%


# Measuring
def instructions():
    rows = []
    for dtype in (torch.float16, E4M3):
        a, b = (
            torch.randn(4096, 4096, device=runtime.DEVICE).to(dtype) for _ in range(2)
        )
        for contracted_first in (False, True):
            options = {"num_warps": 4, "num_stages": 3}
            run = partial(multiply, a, b, contracted_first, **options)
            (_, made), took = run(), triton.testing.do_bench(run)
            ptx = made.asm["ptx"]
            products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
            bits = (
                re.findall(r"\d+", products[0].rpartition("%p")[2])[1:]
                if products
                else []
            )
            row = {"dtype": str(dtype).removeprefix("torch.")}
            row["contiguous in b"] = "columns" if contracted_first else "contracted"
            row["transpose bits"] = " ".join(bits[2:]) or "none"
            row["1-byte stores"] = ptx.count("st.shared.b8")
            row |= {"prmt": len(re.findall(r"\bprmt\.", ptx)), "ms": round(took, 3)}
            rows.append(row)
    return rows


# %%

# Measuring
emitted = lab.measure("Instructions per tile, and a matmul of size 4,096", instructions)

# %%

# Reading
ms_of = {(r["dtype"], r["contiguous in b"]): r["ms"] for r in emitted.rows}
straight, turned, straight_16, turned_16 = (
    ms_of.get((dtype, layout), nan)
    for dtype in ("float8_e4m3fn", "float16")
    for layout in ("contracted", "columns")
)
lab.read(
    f"**A matmul of size 4,096 then takes {turned / straight:.1f} times as long in 8 bits.** "
    + (
        "In 16 bits, the layout hardly matters."
        if 0.9 < turned_16 / straight_16 < 1.1
        else f"In 16 bits, it takes {turned_16 / straight_16:.2f} times as long."
    )
)

# %%
# The package's ``quantize`` therefore transposes V once, as it rounds, if we pass
# ``contiguous="seqlen"``.

# %%

# Folded: The four matmuls, their instructions and their check
a, b = torch.randn(2, 64, 64, device=runtime.DEVICE)
cases = []
for contracted_first, factor in ((False, b.T), (True, b)):
    ours, _ = multiply(a, b, contracted_first, (32, 32, 32), num_warps=4)
    lies = "contracted first" if contracted_first else "contracted contiguous"
    exactly = a.double() @ factor.double()
    cases.append(lab.Case(lies, "forward", ours, a @ factor, exactly, factor=8))
lab.together(
    emitted,
    lab.read(
        "The instruction has a transpose bit for each operand with 16 bits, and none with 8. With "
        "8 bits and the wrong layout, a thread permutes bytes within its registers (`prmt`) and "
        "stores its part of a tile byte by byte before the instruction reads it. We did not time "
        "these steps separately."
    ),
    lab.check("The matmul, either way", cases),
)
# %%
# Change 3: weights times 256
# ---------------------------
#
# The matmul with V needs *both* operands in 8 bits, so the kernel rounds the weights :math:`p` as
# well. It computes them relative to the largest score so far and divides by their sum only at the
# end, so the largest weight is 1. The others can be far smaller, and e4m3 rounds anything below
# :math:`2^{-10}`, about 0.001, to 0.
#
# Suppose that one key has a weight of 1 and a thousand others have 0.0005 each. The thousand make
# up a third of the sum, yet all become 0.
#
# **The kernel therefore multiplies its weights by 256 before it rounds them.** Now 0.0005 becomes
# 0.128, which is stored as 0.125. The factor :math:`2^8` cancels, because the denominator also sums
# :math:`2^8 p_j`. But :math:`2^9` would be too much: the largest weight would become 512 and be
# stored as 448.
#
# In language models, one key often scores far above the rest (Xiao et al., 2023). In the figure,
# one of 4,096 scores (the arrow) exceeds the next largest by 6, so its weight is :math:`e^6`, about
# 400, times that of the next. Again, what lies left of the dashed line becomes 0.


# Measuring
def with_rounded_weights(s, v, power):
    p = torch.exp(s - s.amax(-1, keepdim=True)) * 2.0**power
    rounded = p.clamp(max=448).to(E4M3).double()  # as the GPU's instruction does
    lost = (rounded == 0).double().mean().item()
    return rounded @ v / p.sum(-1, keepdim=True), lost


def off_by(out, truth):
    return ((out - truth).square().mean() / truth.square().mean()).sqrt().item()


def scores_with(deviation, ahead):
    s = deviation * torch.randn(64, 4096, dtype=torch.float64)
    s[:, 0] = s.amax(-1) + ahead
    return s


def by_powers_of_two():
    """The errors for several scores and powers, the last scores, and what 2^0 loses of the sums."""
    v = torch.randn(4096, 32, dtype=torch.float64)
    rows, shares_lost = [], []
    for deviation, ahead in ((0.5, 0), (2, 0), (4, 0), (0.5, 4), (0.5, 6)):
        s = scores_with(deviation, ahead)
        row = {"scores": f"deviation {deviation}"}
        row["scores"] += f", one key ahead by {ahead}" if ahead else ""
        exactly, zeros = torch.softmax(s, -1) @ v, {}
        for power in (0, 8, 9):
            out, zeros[power] = with_rounded_weights(s, v, power)
            row[f"error with 2^{power}"] = f"{100 * off_by(out, exactly):.1f} %"
        row |= {f"lost with 2^{n}": f"{100 * zeros[n]:.0f} %" for n in (0, 8)}
        rows.append(row)
        weights = torch.exp(s - s.amax(-1, keepdim=True))
        of_lost = weights[weights <= 2.0**-10].sum() / weights.sum()
        shares_lost.append(100 * of_lost.item())
    around_1 = row | {"scores": row["scores"] + ", values around 1"}
    exactly = torch.softmax(s, -1) @ (v + 1)
    for power in (0, 8, 9):
        out, _ = with_rounded_weights(s, v + 1, power)
        around_1[f"error with 2^{power}"] = f"{100 * off_by(out, exactly):.1f} %"
    return [*rows, around_1], s, shares_lost


by_power, s, shares_lost = by_powers_of_two()

# %%


# Drawing
def moved(*panels):
    p = torch.exp(s - s.amax(-1, keepdim=True))
    for axes, power in zip(panels, (0, 8), strict=True):
        axes.hist(
            (p * 2.0**power).log2().flatten(),
            bins=range(-16, 10),
            weights=[100 / p.numel()] * p.numel(),
            color=lab.colour("Kernel Book"),
            alpha=0.5,
        )
        top = axes.get_ylim()[1]
        draw_numbers(axes, -0.12 * top, 0)
        axes.text(-10.5, -0.06 * top, "e4m3", ha="right", va="center", fontsize=9)
        arrow = {"arrowstyle": "->", "color": lab.colour("Kernel Book")}
        ahead = {"ha": "center", "fontsize": 9, "color": lab.colour("Kernel Book")}
        axes.annotate(
            "the key\nahead", (power, 0), (power, 0.3 * top), arrowprops=arrow, **ahead
        )  # fmt: skip
        axes.set(ylim=(-0.12 * top, top))
        axes.set(xlim=(-16, 10.5), xticks=(-16, -10, 0, 8))
        axes.set_xticklabels(["2⁻¹⁶", "2⁻¹⁰", "1", "2⁸"])
        axes.set_title(f"p{' times 2⁸' * (power > 0)}", loc="left", fontsize=11)
        axes.set_xlabel("size of the number rounded")
        axes.grid(axis="y", visible=False)
    panels[0].set_ylabel("% of the weights")


lost = (torch.exp(s - s.amax(-1, keepdim=True)) < 2.0**-10).double().mean().item()
lab.sketch(
    "The weights and the numbers of e4m3",
    f"Two histograms of the weights over powers of two, above the numbers of e4m3 as ticks. Left, "
    f"the weights as they are: {lost:.0%} lie below 2 to the -10, left of the dashed line, where "
    f"there are no ticks. Right, times 2 to the 8: they lie among the ticks. An arrow marks the "
    f"key ahead, at 1 on the left and at 2 to the 8 on the right.",
    moved,
    panels=2,
    height=2.9,
)

# %%

# Reading
around_0, around_1 = by_power[-2:]
lab.read(
    f"**Unscaled, {around_0['lost with 2^0']} of the weights become 0, and the output is off by "
    f"{around_1['error with 2^0']}. Times 2⁸, it is off by only {around_1['error with 2^8']}.** "
    "Here the values lie around 1. Around 0, those of the lost keys nearly cancel, and unscaled "
    f"the output is off by only {around_0['error with 2^0']}."
)

# %%

# Folded: Other scores and powers of two, and why the sum is of weights that are not rounded
assert by_power[0]["lost with 2^0"] == "0 %"
lab.together(
    lab.table(
        by_power, "Error of the output with weights times a power of two, 4,096 keys"
    ),
    lab.read(
        "The scores are normally distributed, and all is computed in float64. Where no key is "
        "ahead and the values lie around 0, the factor changes little. With "
        "deviation 0.5 no weight is lost. With deviations 2 and 4 most are, but they make up only "
        f"{shares_lost[1]:.1f} and {shares_lost[2]:.1f} % of the sum."
    ),
    lab.read(
        "The denominator sums weights that are not rounded, because lse, the logarithm of the sum, "
        "has to be right too. We need it to merge this output with those of other keys."
    ),
)

# %%
# Change 4: one tile at a time
# ----------------------------
#
# Rounding is not the only loss: in 8-bit matmuls, Hopper's matrix unit drops small terms of a long
# sum. Imagine a calculator that keeps four digits and cuts off the rest. Once its sum has reached
# 1,000, adding 0.9 changes nothing, however often we do it. The matrix unit behaves the same way:
# its accumulators are float32 registers with 23 places below the leading bit, but it keeps only 13.
#
# The remedy is *promotion*: the matrix unit sums only one tile of 128 keys at a time, and the
# kernel adds these sums in ordinary float32. The scores need none, because each of them is a short
# sum anyway, of head_dim terms.
#
# In the figure, the next term is a product of two e4m3 numbers, between 1 and 2, so it has seven
# bits. As a single sum grows, the bits that it can keep (grey) move left, and after 4,096 terms it
# keeps only two of the seven. On the right, each tile has a new sum, which stays so small that all
# seven fit.


# Drawing
PLACES = 13  # that a sum keeps below its leading bit
TERM = 7  # bits of the product of two numbers of e4m3, if it is below 2


def windows(growing, promoted):
    tile = tuned.HOPPER["fp8", 128, 1].block_n
    counts = (1, 16, 128, 1024, 4096, 16384)
    for axes, most in ((growing, counts[-1]), (promoted, tile)):
        for place, count in enumerate(counts):
            leading = math.floor(math.log2(min(count, most)))
            lowest = leading - PLACES
            axes.barh(
                place,
                PLACES + 1,
                0.8,
                lowest - 0.5,
                color=lab.colour("matmul"),
                alpha=0.25,
            )
            for bit in range(0, -TERM, -1):
                ink = lab.colour("Kernel Book" if bit >= lowest else "PyTorch")
                axes.barh(place, 0.8, 0.45, bit - 0.4, color=ink)
    for label, ink, alpha in (
        ("bits of the sum", "matmul", 0.25),
        ("bits of the term, kept", "Kernel Book", 1),
        ("bits of the term, lost", "PyTorch", 1),
    ):
        growing.barh(0, 0, color=lab.colour(ink), alpha=alpha, label=label)
    for axes in (growing, promoted):
        axes.set_yticks(range(len(counts)), [f"{count:,}" for count in counts])
        axes.set(ylim=(len(counts) - 0.4, -0.6), xlim=(15.5, -14))
        axes.grid(visible=False)
        axes.set_xlabel("bit, as a power of two")
    growing.figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    growing.set_ylabel("terms so far")
    growing.set_title("one sum", loc="left", fontsize=11)
    promoted.set_title(f"a new sum every {tile} terms", loc="left", fontsize=11)
    promoted.set_yticklabels([])


lab.sketch(
    "The bits of a term that reach the sum",
    f"Two panels, a row for each number of terms so far. A grey window shows the {PLACES + 1} bits "
    f"that the sum keeps. Of the {TERM} bits of the next term, those outside it are lost. Left, "
    f"one sum: the window moves left, and after 16,384 terms no bit of a term is inside. Right, a "
    f"new sum for each tile: no bit is lost.",
    windows,
    panels=2,
    height=3.4,
)

# %%
# To test the 13 places, we let a float64 model of the matrix unit, with 12, 13 or 14, predict the
# error of attention. The values of V lie around 1, so that sums grow.


# Measuring
def beside_one(term_exponent, mantissa=1.0):
    """Return 1 + mantissa * 2^-term_exponent as an 8-bit matmul computes it."""
    a, b = torch.zeros(2, 128, 64, device=runtime.DEVICE)
    a[:, 0] = b[:, 0] = 1
    half = term_exponent // 2
    a[:, 1], b[:, 1] = mantissa * 2.0**-half, 2.0 ** (half - term_exponent)
    options = {"num_warps": 4, "num_stages": 3}
    found, _ = multiply(a.to(E4M3), b.to(E4M3), False, **options)
    return found[0, 0].item()


def what_is_kept():
    return [
        {
            "n": n,
            "left of 2^-n, in units of 2^-n": 2**n * (beside_one(n) - 1),
            "left of 1.75 · 2^-n": 2**n * (beside_one(n, 1.75) - 1),
        }
        for n in range(9, 17)
    ]


kept = lab.measure("What an 8-bit matmul keeps beside 1", what_is_kept)

# %%


# Measuring
left = {
    row["n"]: (row["left of 2^-n, in units of 2^-n"], row["left of 1.75 · 2^-n"])
    for row in kept.rows
}
last = max((n for n, (whole, _) in left.items() if whole == 1), default=nan)
beyond = left.get(last + 1, (nan, nan))[1]


def two_to_the(n):
    """2 to the -n, in words that a page can show."""
    return (
        "2⁻" + str(n).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        if n == n
        else "nan"
    )


# %%


# Measuring
def on_matrix_unit(p, v, places, at_once=32):
    """p @ v, where a step adds 32 products, all cut some places below the largest's leading bit."""
    acc = torch.zeros(len(p), v.shape[1], dtype=torch.float64)
    for start in range(0, p.shape[1], at_once):
        keys = slice(start, start + at_once)
        products = p[:, keys, None] * v[None, keys]
        terms = torch.cat((acc[:, None], products), dim=1)
        leading = terms.abs().amax(1, keepdim=True).clamp_min(2.0**-100).log2().floor()
        unit = 2.0 ** (leading - places)
        acc = ((terms / unit).trunc() * unit).sum(1)
    return acc


# %%


# Measuring
def worst_head(out, truth):
    """Root mean square error over that of the truth, of the head where it is largest."""
    off = (out.double() - truth).square().mean((2, 3))
    return (off / truth.square().mean((2, 3))).sqrt().max().item()


def percent(x):
    return round(100 * x, 3)


# %%


# Measuring
def long_sums():
    rows = []
    for mean in (0, 1):
        for length in (1024, 4096, 16384, 65536):
            q = torch.randn(1, 16, 128, 128, device=runtime.DEVICE)
            k, v = torch.randn(2, 1, 16, length, 128, device=runtime.DEVICE)
            operands, meant = prepare(q, k, v + mean)
            stored, descales = zip(*operands, strict=True)
            block_n = tuned.fp8_config(stored[0]).block_n
            truth, _ = reference.attention(*meant)
            rounded, _ = reference.attention_fp8(*meant, block_n=block_n)
            row = {"mean of v": mean, "length": length}
            row["rounding alone, %"] = percent(worst_head(rounded, truth))
            options = (descales, False, 128**-0.5, torch.float32)
            for name, promoted in (("promoted, %", True), ("not promoted, %", False)):
                out, _ = fp8.attention_fp8_forward(*stored, *options, promoted)
                row[name] = percent(worst_head(out, truth))
            shorter = [x.bfloat16() for x in (q, k, v + mean)]
            truth, _ = reference.attention(*shorter)
            row["bf16, %"] = percent(worst_head(attention(*shorter), truth))
            rows.append(row)
    return rows


sums = lab.measure("Error of the worst of 16 heads, head_dim 128", long_sums)

# %%


# Measuring
def attention_to_sum(length):
    """Weights in e4m3 and stored values around 1, as the second matmul of attention has them."""
    q = torch.randn(8, 128, dtype=torch.float64)
    k, v = (torch.randn(length, n, dtype=torch.float64) for n in (128, 16))
    s = q @ k.T / math.sqrt(128)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    stored, _ = round_to_8_bits(v + 1, E4M3, (0, 1))
    return p, (256 * p).to(E4M3).double(), stored.double()


def predicted(weights, rounded, stored, places, at_once=32):
    """The error in percent of a sum that is not promoted, by the model."""
    out = on_matrix_unit(rounded, stored, places, at_once) / 256
    return 100 * off_by(out, weights @ stored)


def sum_error(mean, length, name):
    rows = [r for r in sums.rows if (r["mean of v"], r["length"]) == (mean, length)]
    return rows[0][f"{name}, %"] if rows else nan


def cost_of_promotion():
    """Time attention with promotion and without, in turn."""
    q, k, v = torch.randn(3, 1, 16, 16384, 128, device=runtime.DEVICE)
    operands, _ = prepare(q, k, v)
    stored, descales = zip(*operands, strict=True)
    options = (descales, False, 128**-0.5, torch.bfloat16)
    times = {True: [], False: []}
    for promoted in (True, False) * 5:
        run = partial(fp8.attention_fp8_forward, *stored, *options, promoted)
        took = triton.testing.do_bench(run, return_mode="median")
        times[promoted].append(took)
    return [
        {
            "promoted": "yes" if promoted else "no",
            "ms": round(statistics.median(each), 3),
            "fastest of 5": round(min(each), 3),
            "slowest of 5": round(max(each), 3),
        }
        for promoted, each in times.items()
    ]


def shown(x, digits=1):
    """A number of a table, or a dash where none was measured."""
    return "—" if x != x else f"{x:.{max(digits, 2) if x < 1 else digits}f}"


# %%


# Drawing
KEYS = (1024, 4096, 16384, 65536)
to_sum = {n: attention_to_sum(n) for n in KEYS}
models = {
    places: {n: predicted(*to_sum[n], places) for n in KEYS}
    for places in (PLACES - 1, PLACES, PLACES + 1)
}


def draw_sums(axes, rows):
    for places, found in models.items():
        axes.plot(KEYS, [found[n] for n in KEYS], "--", color=lab.colour("matmul"))
        axes.text(KEYS[-1] * 1.12, found[KEYS[-1]], f"{places} places", va="center")
    around_one = [row for row in rows if row["mean of v"] == 1]
    for column, label, ink in (
        ("not promoted, %", "one sum, measured", "PyTorch"),
        ("promoted, %", "promoted, measured", "Kernel Book"),
    ):
        keys = [row["length"] for row in around_one]
        errors = [row[column] for row in around_one]
        axes.plot(keys, errors, "-o", color=lab.colour(ink), label=label)
    axes.plot([], [], "--", color=lab.colour("matmul"), label="model")
    axes.set_xscale("log", base=2)
    axes.set_xticks(KEYS, [f"{n:,}" for n in KEYS])
    axes.set(
        xlim=(None, KEYS[-1] * 2.6), xlabel="keys", ylabel="error of the output, %"
    )
    axes.legend(loc="upper left", fontsize=9)


def describe_sums(rows):
    ends = "; ".join(
        f"{row['length']:,} keys: {row['not promoted, %']:.1f} % and {row['promoted, %']:.2f} %"
        for row in rows
        if row["mean of v"] == 1
    )
    return (
        "Error over the number of keys, measured with one sum and promoted, and three dashed lines "
        f"of the model, with 12, 13 and 14 places. Measured, {ends}. The model with 13 places lies "
        "on the line of one sum."
    )


lab.draw(sums, "Error of the output, values around 1", describe_sums, draw_sums)

# %%


# Measuring
def with_equal_terms(length):
    """The error in percent of a sum whose products are all 1.125 * 1.25, by the model."""
    some = torch.full((1, length), 1.125, dtype=torch.float64)
    others = torch.full((length, 1), 1.25, dtype=torch.float64)
    return 100 * off_by(on_matrix_unit(some, others, PLACES), some @ others)


promotion = lab.measure(
    "Attention of 16 heads of 16,384 keys, head_dim 128, by promotion",
    cost_of_promotion,
)

# %%

# Reading
apart = {
    places: [abs(found[n] / sum_error(1, n, "not promoted") - 1) for n in KEYS[1:]]
    for places, found in models.items()
}
of_others = min(min(found) for places, found in apart.items() if places != PLACES)
by_groups = max(
    abs(predicted(*to_sum[n], PLACES, at_once) / models[PLACES][n] - 1)
    for n in KEYS[1:]
    for at_once in (16, 64)
)
ms_by_promotion = {row["promoted"]: row["ms"] for row in promotion.rows}
slower = ms_by_promotion.get("yes", nan) / ms_by_promotion.get("no", nan) - 1
spans = [(row["fastest of 5"], row["slowest of 5"]) for row in promotion.rows]
lows, highs = zip(*spans, strict=True) if spans else ((nan,), (nan,))
around_zero = [sum_error(0, KEYS[-1], name) for name in ("not promoted", "promoted")]
around_one = [sum_error(1, KEYS[-1], name) for name in ("not promoted", "promoted")]
lab.read(
    (
        "**Promotion removes nearly all of the error**: "
        if around_one[1] < 0.05 * around_one[0]
        else "**Promotion changes the error**: "
    )
    + f"at {KEYS[-1]:,} keys it falls from {around_one[0]:.1f} % to {around_one[1]:.2f} %"
    + (
        ", at no cost in time that rises above the scatter of our runs. "
        if max(lows) <= min(highs)
        else f", for {100 * slower:.1f} % more time. "
        if slower > 0
        else ". "
    )
    + (
        f"Without it, only the model with {PLACES} places agrees with the measurement. "
        if max(apart[PLACES]) < 0.05 < 0.15 < of_others
        else f"Without it, the model with {PLACES} places is within "
        f"{100 * max(apart[PLACES]):.0f} % of the measured error. "
    )
    + "With values around 0, where sums hardly grow, "
    + (
        "promotion makes little difference."
        if around_zero[1] > 0.9 * around_zero[0]
        else f"it reduces the error from {around_zero[0]:.2f} % to {around_zero[1]:.2f} %."
    )
)

# %%

# Folded: The figures in numbers, a second test, and the time of attention with promotion
lab.together(
    lab.read(
        "In the figure of the bits every term is between 1 and 2. It is the product of two numbers "
        "of e4m3, each with a leading bit and 3 bits of mantissa, so it has bits from 2⁰ to 2⁻⁶. A "
        "sum of 4,096 such terms has grown to 2¹² and keeps bits down to 2⁻¹. A sum of 128 has "
        "grown to 2⁷ and keeps bits down to 2⁻⁶."
    ),
    lab.read(
        f"In the second test, a single matmul adds 2⁻ⁿ to 1. The smallest power of two that "
        f"survives is {two_to_the(last)}. "
        + (
            f"Nothing remains of 1.75 times {two_to_the(last + 1)}, so the unit truncates instead "
            "of rounding."
            if beyond == 0
            else f"Of 1.75 times {two_to_the(last + 1)}, {beyond:g} times that power remains."
        )
    ),
    kept,
    lab.read(
        f"From {KEYS[1]:,} keys on, the model with {PLACES} places is within "
        f"{math.ceil(100 * max(apart[PLACES]))} % of the measured error. With one place more or "
        f"less, it misses it by more than {100 * of_others // 1:.0f} %."
    ),
    sums,
    lab.read("In bfloat16 the error does not grow with the length.")
    if sum_error(1, KEYS[-1], "bf16") < 1.2 * sum_error(1, KEYS[0], "bf16")
    else None,
    lab.table(
        [
            {"keys": n}
            | {
                f"model, {places} places": shown(found[n])
                for places, found in models.items()
            }
            | {f"{PLACES} places, equal terms": shown(with_equal_terms(n))}
            for n in KEYS
        ],
        "Error in percent that a model predicts for one sum, values around 1",
    ),
    lab.read(
        "The model adds 32 products at a time, because a step takes 32 bytes of each row. With 16 "
        f"or 64 its prediction would change by less than {max(1, math.ceil(100 * by_groups))} %."
    ),
    lab.read(
        f"With {KEYS[-1]:,} equal terms, the model loses {with_equal_terms(KEYS[-1]):.0f} % of the "
        f"sum, and with the terms of an attention {models[PLACES][KEYS[-1]]:.0f} %. They differ in "
        "size, and the larger ones reach the sum for longer."
    ),
    promotion,
)
# %%
# The kernel
# ----------
#
# We now make all four changes to the kernel of :doc:`/chapters/attention_fast`. Here it is in
# PyTorch, for one head, with each change numbered (except 2, the layout):


def attend(q, k, v, scale_log2, block_n):
    """Return the output for stored q, k, v, without the descale of v."""
    m_i, l_i, acc = torch.tensor(-torch.inf), 0, 0
    tiles = (x.float().split(block_n) for x in (k, v))
    for k_tile, v_tile in zip(*tiles, strict=True):
        qk = q.float() @ k_tile.T
        # 1: scale_log2 holds the descales of q and k
        m_new = torch.maximum(m_i, qk.amax(1) * scale_log2)
        alpha = torch.exp2(m_i - m_new)
        # 3: + 8 in the exponent multiplies by 256
        p = torch.exp2(qk * scale_log2 - m_new[:, None] + 8)
        l_i = l_i * alpha + p.sum(1)
        # 4: the matmul sums one tile only
        tile_sum = p.to(E4M3).float() @ v_tile
        acc = acc * alpha[:, None] + tile_sum
        m_i = m_new
    return acc / l_i[:, None]


# %%

# Reading
dice = torch.Generator().manual_seed(0)
pairs, _ = prepare(*torch.randn(3, 1, 1, 300, 32, generator=dice).to(runtime.DEVICE))
one_head = [pair.stored[0, 0].cpu() for pair in pairs]
a_b_c = [pair.descale.flatten()[0].item() for pair in pairs]
log2_scale = a_b_c[0] * a_b_c[1] * 32**-0.5 * math.log2(math.e)
in_steps = attend(*one_head, log2_scale, tuned.fp8_config(pairs[0].stored).block_n)
by_kernel = plain(*pairs)[0, 0].cpu().double()
between_both = off_by(a_b_c[2] * in_steps.double(), by_kernel)
assert between_both < 0.005
lab.read(
    "On 300 keys, this code and the kernel, whose output is rounded to 16 bits, differ by "
    f"{100 * between_both:.1f} %."
)

# %%
# In Triton, the loop loads a tile of the stored V, of shape (head_dim, keys). ``.T`` gives the
# matmul the shape that it expects (change 2).
#
# .. literalinclude:: /../src/kernelbook/ops/attention/fp8.py
#    :language: python
#    :pyobject: attend_fp8
#    :start-at: v = load_tile
#    :end-at: acc = add_values
#    :dedent:
#
# This function rounds the weights, already multiplied by 256 (change 3). If ``PROMOTED``, the
# matmul sums this tile only (change 4).

lab.source(fp8.add_values)

# %%
# After the loop, the descale of V merges with the division, which completes change 1. The sum
# ``l_i`` is 0 only where a mask hides every key.
#
# .. literalinclude:: /../src/kernelbook/ops/attention/fp8.py
#    :language: python
#    :pyobject: attention_fp8_fwd_kernel
#    :start-at: out = acc
#    :end-at: out = acc
#    :dedent:
#
# We call the kernel from PyTorch:

q, k, v = torch.randn(3, 1, 2, 100, 64, device=runtime.DEVICE)
q_8, k_8 = quantize(q), quantize(k)
v_8 = quantize(v, contiguous="seqlen")
out = attention(q_8, k_8, v_8)

# %%
# .. dropdown:: The kernel whole
#
#    Up to head_dim 128, a program on Hopper has 4 warps and 64 queries.
#
#    The kernel, from finding a program's tile to writing its output. The stride of a descale is 0
#    where all heads share one.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/fp8.py
#       :language: python
#       :pyobject: attention_fp8_fwd_kernel
#
#    Its loop. As in :doc:`/chapters/attention_fast`, an iteration ends with the scores of the
#    *next* tile of keys. ``n_visible``, ``MASKED``, ``first_visible`` and ``LEFT`` say which keys a
#    mask hides.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/fp8.py
#       :language: python
#       :pyobject: attend_fp8
#
#    And the function that computes the weights, where ``P_LOG2`` is the 8 of :math:`2^8`:
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :language: python
#       :pyobject: weigh

# %%
# Is it right?
# ------------
#
# The truth alone cannot judge a kernel that is meant to round, because even a correct one differs
# from it. So we compute attention of the *stored* values twice in float64: the *truth* rounds
# nothing, and the *yardstick* rounds weights and output as the kernel does. We allow the kernel at
# most twice the yardstick's error.


# Measuring
def draw_heads(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim):
    sizes = (heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k)
    q, k, v = (
        torch.randn(batch, *size, head_dim, device=runtime.DEVICE) for size in sizes
    )
    size = torch.arange(1, batch * heads_k + 1, device=runtime.DEVICE)
    size = size.view(batch, heads_k, 1, 1)
    return q, k * (1 + size / 8), v * size + size / 4


# %%


# Measuring
def heads_apart(what, operands, out, lse, meant, is_causal, rounding=None):
    """Return the cases of the worst head: for out, and for lse."""
    outs, lses = [], []
    group = out.shape[1] // meant[1].shape[1]
    q = operands[0].stored if isinstance(operands[0], Quantized) else operands[0]
    rounding = rounding or partial(
        reference.attention_fp8, block_n=tuned.fp8_config(q).block_n
    )
    for b, h in ((b, h) for b in range(out.shape[0]) for h in range(out.shape[1])):
        one = [
            x[b, i][None, None]
            for x, i in zip(meant, (h, h // group, h // group), strict=True)
        ]
        truth, true_lse = reference.attention(*one, is_causal)
        rounded, _ = rounding(*one, is_causal)
        rounded = rounded.to(out.dtype)
        outs.append(lab.Case(what, "forward", out[b, h][None, None], rounded, truth))
        single = true_lse.float()
        in_8_bits = q.dtype in fp8.DTYPES and not runtime.INTERPRETED
        factor = 4096 if in_8_bits else 8
        found = lse[b, h][None, None]
        lses.append(lab.Case(what, "lse", found, single, true_lse, factor))

    def badness(case):
        row = case.row()
        return row["error"] / row["tolerance"]

    return [max(outs, key=badness), max(lses, key=badness)]


# %%

# Measuring
shapes = [  # batch, heads, heads of keys, queries, keys, head_dim
    (2, 2, 2, 1, 127, 64),
    (1, 2, 2, 33, 70, 80),
]
if runtime.INTERPRETED:
    shapes += [(2, 4, 2, 40, 50, 32)]
else:
    shapes += [
        (2, 8, 2, 300, 777, 128),
        (2, 4, 4, 1000, 1000, 64),
        (1, 2, 2, 300, 500, 256),
    ]
kinds = {
    "all e4m3": (E4M3, E4M3),
    "all e5m2": (E5M2, E5M2),
    "v e4m3": (torch.bfloat16, E4M3),
    "v e5m2": (torch.float16, E5M2),
}


# %%


# Measuring
def every_case():
    for shape in shapes:
        for name, (q_dtype, v_dtype) in kinds.items():
            for is_causal in (False, True) if name == "all e4m3" else (True,):
                operands, meant = prepare(*draw_heads(*shape), q_dtype, v_dtype)
                options = {
                    "is_causal": is_causal,
                    "enable_gqa": True,
                    "return_lse": True,
                }
                found = plain(*operands, **options)
                what = f"{shape}, {name}{', causal' * is_causal}"
                yield from heads_apart(what, operands, *found, meant, is_causal)


cases = list(every_case())
all_checks = lab.check("The worst head", cases, theirs="yardstick")

# %%
where_checked, checks = next(
    iter(checked("The worst head", [case.row() for case in cases]).items())
)
of_output = [row for row in checks if row["direction"] == "forward"]
rows = []
for name, part in {
    "q, k and V in e4m3": ", all e4m3",
    "q, k and V in e5m2": ", all e5m2",
    "V alone": ", v e",
}.items():
    found = [row for row in of_output if part in row["case"]]
    near = max(found, key=lambda row: row["error"] / row["tolerance"])
    rows.append(
        {"8 bits": name, "checks": len(found)}
        | {
            column: f"{100 * near[key]:.2f} %"
            for column, key in (
                ("error", "error"),
                ("yardstick", "torch_error"),
                ("allowed", "tolerance"),
            )
        }
    )
assert sum(row["checks"] for row in rows) == len(of_output)
closest = max(row["error"] / row["tolerance"] for row in of_output)
nearest = lab.table(
    rows, f"The output, {where_checked}: of each kind, the check nearest to its limit"
)

# %%

# Reading
operands, meant = prepare(*draw_heads(1, 2, 2, 33, 70, 32))
out, lse = plain(*operands, return_lse=True)
judged = {
    name: heads_apart(name, operands, result, lse, meant, False)[0].row()
    for name, result in {"ours": out, "zeros": out * 0, "swapped": out.flip(1)}.items()
}
assert [row["ok"] for row in judged.values()] == [True, False, False]
with_nan = draw_heads(1, 3, 3, 20, 40, 32)
with_nan[2][0, 1, 7, 3] = float("nan")
spoilt = plain(*prepare(*with_nan)[0]).isnan()[0].any(-1).any(-1)
assert spoilt.tolist() == [False, True, False]
lab.read(
    f"**All {len(of_output)} checks of the output pass {where_checked}.** The check can also fail: "
    "it rejects zeros and two swapped heads."
)

# %%

# Folded: All checks, and how far the logarithm lse may be off
lab.together(
    nearest,
    all_checks,
    lab.read(
        "An error is the largest difference within 64 queries of one head, as a share of their "
        "largest true value. Because the truth starts from the stored values, the rounding of q, k "
        f"and v does not count. The closest call reaches {100 * closest:.0f} % of what is allowed."
    ),
    lab.read(
        "We allow twice the yardstick's error because the kernel computes scores in fewer bits, so "
        "that a weight about halfway between two numbers of e4m3 may round to the other one. "
        "The factor is our choice. Each head is compared on its own, because a wrong head could "
        "hide behind a larger one."
    ),
    lab.read(
        "An input's name lists batch, heads, heads of keys, queries, keys and head_dim, and the "
        "dtype is that of the output."
    ),
    lab.read(
        "lse, the logarithm of the sum of a query's weights, contains no rounded weights. Where V "
        "alone has 8 bits, it may be off by eight times one rounding to float32. Where q and k "
        "also have 8 bits, it may be off by 2⁻¹² of itself, because the matrix unit cuts the terms "
        "of a score 13 places below the largest (change 4)."
    ),
)

# %%
# How large is the error?
# -----------------------
#
# The checks left out the rounding of q, k and v, so we now compare with attention of the *original*
# values. The error is again a root mean square, as in change 1. In data with *outliers*, one number
# in a thousand is on average about ten times as large as the rest.


# Measuring
def with_outliers(x):
    return x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3)


CHOICES = {
    "bf16": (torch.bfloat16, None),
    "V in e4m3": (torch.bfloat16, E4M3),
    "V in e5m2": (torch.bfloat16, E5M2),
    "all in e4m3": (E4M3, E4M3),
    "all in e5m2": (E5M2, E5M2),
    "V in e4m3, q and k in e5m2": (E5M2, E4M3),
}


def in_format(q, k, v, q_dtype, v_dtype):
    """Return operands of one of the choices, and the values that they stand for."""
    if v_dtype is None:
        shorter = [x.to(q_dtype) for x in (q, k, v)]
        return shorter, [x.double() for x in shorter]
    return prepare(q, k, v, q_dtype, v_dtype)


# %%


# Measuring
def error_of_choices(heads, seqlen, head_dim):
    rows = {name: {"operands": name} for name in CHOICES}
    for data in ("normal", "outliers"):
        q, k, v = torch.randn(3, 1, heads, seqlen, head_dim, device=runtime.DEVICE)
        if data == "outliers":
            q, k, v = (with_outliers(x) for x in (q, k, v))
        original, _ = reference.attention(q, k, v)
        for name, choice in CHOICES.items():
            operands, meant = in_format(q, k, v, *choice)
            out = attention(*operands)
            stored, _ = reference.attention(*meant)
            rows[name][f"{data}: kernel, %"] = percent(worst_head(out, stored))
            rows[name][f"{data}: in all, %"] = percent(worst_head(out, original))
    return list(rows.values())


whole_error = lab.measure(
    "Root mean square error, worst of 32 heads, 4,096 keys, head_dim 128",
    lambda: error_of_choices(32, 4096, 128),
)

# %%


# Drawing
DATA = {"normal": "Kernel Book", "outliers": "PyTorch"}
NAMES = {  # of the choices that the figure shows; the last one is in the fold alone
    "bf16": "all in bfloat16",
    "V in e4m3": "V alone in e4m3",
    "V in e5m2": "V alone in e5m2",
    "all in e4m3": "q, k and V in e4m3",
    "all in e5m2": "q, k and V in e5m2",
}


def bars_of_error(axes, rows):
    rows = [row for row in rows if row["operands"] in NAMES]
    for half, (data, ink) in enumerate(DATA.items()):
        for place, row in enumerate(rows):
            error = row[f"{data}: in all, %"]
            line = place + 0.4 * half - 0.2
            label = {"normal": "normal data", "outliers": "with outliers"}[data]
            label = label if place == 0 else None
            axes.barh(line, error, 0.36, color=lab.colour(ink), label=label)
            axes.text(error + 0.25, line, f"{error:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [NAMES[row["operands"]] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("error of the output, %")


def describe_errors(rows):
    found = "; ".join(
        NAMES[row["operands"]]
        + "".join(f", {data} {row[f'{data}: in all, %']:.1f} %" for data in DATA)
        for row in rows
        if row["operands"] in NAMES
    )
    return f"Two bars for each choice of formats: {found}."


lab.draw(
    whole_error,
    "Error of the output, by what has 8 bits",
    describe_errors,
    bars_of_error,
)

# %%

# Reading


def in_all(operands, data):
    rows = [row for row in whole_error.rows if row["operands"] == operands]
    return rows[0][f"{data}: in all, %"] if rows else nan


of_v_alone = [in_all("V in e4m3", data) for data in DATA]
lab.read(
    "**With q, k and V in e4m3, outliers more than double the error.** With V alone (the "
    "weights are rounded too), they "
    + ("lower it." if of_v_alone[1] < of_v_alone[0] else "raise it.")
    if in_all("all in e4m3", "outliers") > 2 * in_all("all in e4m3", "normal")
    else f"Outliers raise the error in e4m3 to {in_all('all in e4m3', 'outliers'):.1f} %."
)

# %%
# The output averages thousands of values, so **why do the errors not average out?** We round n
# values to e4m3 and compare their average with the true one.


# Drawing
COUNTS = [4**power for power in range(2, 9)]


def averages(mean):
    """For each n: the size of an average of n values, that of its error, and the mean error."""
    dice, found = torch.Generator().manual_seed(0), []
    for n in COUNTS:
        x = mean + torch.randn(n, 64, generator=dice, dtype=torch.float64)
        rounded, descale = round_to_8_bits(x, E4M3, (0, 1))
        off = (rounded.double() * descale - x).mean(0)
        size, error = (y.square().mean().sqrt().item() for y in (x.mean(0), off))
        found.append((size, error, off.mean().item()))
    return tuple(zip(*found, strict=True))


of_averages = {mean: averages(mean) for mean in (0, 1)}


def draw_averages(*panels):
    for axes, (mean, (sizes, errors, _)) in zip(
        panels, of_averages.items(), strict=True
    ):
        for y, label, ink in (
            (sizes, "the average", "Kernel Book"),
            (errors, "its error", "PyTorch"),
        ):
            axes.plot(COUNTS, y, "-o", ms=3.5, color=lab.colour(ink), label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([16, 1024, 65536], ["16", "1,024", "65,536"])
        axes.set_yticks([1, 0.1, 0.01, 0.001, 0.0001])
        axes.set_yticklabels(
            ["1", "0.1", "0.01", "0.001", "0.0001"] if mean == 0 else []
        )
        axes.minorticks_off()
        axes.set(ylim=(5e-5, 2.5), xlabel="values, n")
        axes.set_title(f"values around {mean}", loc="left", fontsize=11)
    panels[0].set_ylabel("root mean square")
    panels[0].figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=10,
    )


lab.sketch(
    "An average of n values, and its error in e4m3",
    "Two panels with logarithmic axes, each with a line for the size of the average and one for "
    "its error. Around 0 both fall side by side as n grows. Around 1 the average stays at 1 and "
    "the error falls.",
    draw_averages,
    panels=2,
    height=2.9,
)

# %%

# Reading
shares_of_size = {
    mean: [100 * off / size for size, off, _ in zip(*found, strict=True)]
    for mean, found in of_averages.items()
}
assert max(shares_of_size[0]) < 1.5 * min(shares_of_size[0])
mean_error = 100 * of_averages[1][2][-1]
assert abs(mean_error) > 0.9 * shares_of_size[1][-1]
assert shares_of_size[1][-1] < shares_of_size[1][0] / 10
lab.read(
    "**They do, but around 0 the average shrinks as fast as its error**, which stays at "
    f"{min(shares_of_size[0]):.1f} to {max(shares_of_size[0]):.1f} % of it, however many values "
    "there are."
)

# %%
# **To see which operand causes the error**, we round one thing at a time. The figure shows squared
# errors, because the squares of independent errors add. The thick line is the error of all
# roundings at once.


# Measuring
def parts_of_error(data, heads=8, queries=64):
    """The errors of the output in percent, in float64, and the least of all heads.

    They are those of the worst head if one thing is rounded, or all are.
    """
    dice, size = torch.Generator().manual_seed(0), (3, 1, heads, 4096, 128)
    inputs = torch.randn(size, generator=dice, dtype=torch.float64)
    if data == "outliers":
        rare = torch.rand(size, generator=dice) < 1e-3
        inputs += 10 * torch.randn(size, generator=dice) * rare
    q, k, v = inputs
    pairs = (round_to_8_bits(x, E4M3, (2, 3)) for x in inputs)
    q_8, k_8, v_8 = (stored.double() * descale for stored, descale in pairs)
    q, q_8 = q[:, :, :queries], q_8[:, :, :queries]
    in_full, _ = reference.attention(q, k, v)
    outputs = {
        "q and k": reference.attention(q_8, k_8, v),
        "V": reference.attention(q, k, v_8),
        "the weights": reference.attention_fp8(q, k, v, block_n=128),
        "all": reference.attention_fp8(q_8, k_8, v_8, block_n=128),
    }
    size = in_full.square().mean((0, 2, 3))
    errors = {
        what: 100 * ((out - in_full).square().mean((0, 2, 3)) / size).sqrt()
        for what, (out, _) in outputs.items()
    }
    worst = errors["all"].argmax()
    parts = {what: of_heads[worst].item() for what, of_heads in errors.items()}
    return parts, errors["all"].min().item()


# %%


# Drawing
both_parts = {data: parts_of_error(data) for data in DATA}
of_parts = {data: parts for data, (parts, _) in both_parts.items()}
from_parts = {
    data: math.hypot(*(error for what, error in found.items() if what != "all"))
    for data, found in of_parts.items()
}
UNIT = of_parts["normal"]["all"] ** 2 / 100  # of the figure, so that this is 100 in it


def draw_parts(axes):
    inks = {"q and k": "PyTorch", "V": "Kernel Book", "the weights": "matmul"}
    for place, found in enumerate(of_parts.values()):
        begin_at = 0
        for what, ink in inks.items():
            width = found[what] ** 2 / UNIT
            look = {"color": lab.colour(ink), "alpha": 0.6}
            label = what if place == 0 else None
            axes.barh(place, width, 0.5, begin_at, label=label, **look)
            if width > 10:
                middle = begin_at + width / 2
                axes.text(
                    middle, place, f"{width:.0f}", ha="center", va="center", fontsize=10
                )  # fmt: skip
            begin_at += width
        at = found["all"] ** 2 / UNIT
        axes.plot([at, at], [place - 0.33, place + 0.33], color="#1f2328", lw=2.5)
        end = max(at, begin_at)
        axes.text(end + 4, place, f"{at:.0f}", va="center", weight="bold", fontsize=10)
    axes.set_yticks(range(len(of_parts)), ["normal data", "with outliers"])
    axes.set(ylim=(1.5, -0.5), xlabel="squared error (all at once, normal data: 100)")
    axes.set_xlim(0, 1.1 * axes.dataLim.x1)
    axes.grid(visible=False)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=10)


lab.sketch(
    "Parts of the squared error, q, k and V in e4m3",
    "Two bars of stacked parts, and a line for all roundings at once. "
    + " ".join(
        f"{data}: "
        + ", ".join(f"{what} {error**2 / UNIT:.0f}" for what, error in found.items())
        + "."
        for data, found in of_parts.items()
    ),
    draw_parts,
    height=2.6,
)

# %%


# Measuring
def led_by_one_key(heads=8, queries=64):
    """How many queries give most weight to one key, with outliers, and their part of two squares.

    These are the squared output, and the squared error that comes from rounding the weights.
    """
    dice, size = torch.Generator().manual_seed(0), (3, 1, heads, 4096, 128)
    inputs = torch.randn(size, generator=dice, dtype=torch.float64)
    rare = torch.rand(size, generator=dice) < 1e-3
    q, k, v = inputs + 10 * torch.randn(size, generator=dice) * rare
    q = q[:, :, :queries]
    in_full, _ = reference.attention(q, k, v)
    rounded, _ = reference.attention_fp8(q, k, v, block_n=128)
    led = torch.softmax(q @ k.mT / math.sqrt(128), -1).amax(-1) > 0.5
    squares = (in_full.square().sum(-1), (rounded - in_full).square().sum(-1))
    parts = [(x * led).sum() / x.sum() for x in squares]
    return [100 * x.item() for x in (led.double().mean(), *parts)]


led_queries, led_output, led_error = led_by_one_key()
assert led_queries < 10 < 80 < led_output
assert led_error < 5

# %%

# Reading
gap = max(abs((from_parts[data] / of_parts[data]["all"]) ** 2 - 1) for data in DATA)
assert gap < 0.1
larger = {
    what: of_parts["outliers"][what] / error
    for what, error in of_parts["normal"].items()
}
assert 0.9 < larger["V"] < 1.1
assert larger["the weights"] < 0.25
assert (of_parts["outliers"]["q and k"] / from_parts["outliers"]) ** 2 > 0.85
best_head = both_parts["outliers"][1]
lab.read(
    "**With outliers, the part of q and k makes up most of the squared error.** The part of the "
    "weights nearly vanishes, because the large outputs come from queries that follow a single "
    "key, whose weight, 256, e4m3 stores exactly."
    + (
        " So V alone does better with outliers than without."
        if of_v_alone[1] < of_v_alone[0]
        else ""
    )
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    With values around 0, a relative error in V causes about the same relative error in the output.
#    The error from q and k grows with the scores, because the exponential turns a shift of a score
#    into a factor on its weight: if a score of 20 is 2 % too large, its weight is multiplied by
#    :math:`e^{0.4}`, about 1.5.


# Measuring
def larger_scores(one_key=0.9):
    """Errors of the kernel, and of roundings on their own, for scores times 1, 4 and 16."""
    q, k, v = torch.randn(3, 1, 2, 100, 32, device=runtime.DEVICE)
    rows = []
    for factor in (1, 4, 16):
        exact = [x.double() for x in (factor * q, k, v)]
        in_full, _ = reference.attention(*exact)
        row = {"scores times": factor}
        for name in ("V in e4m3", "all in e4m3"):
            operands, back = prepare(factor * q, k, v, *CHOICES[name])
            row[f"{name}, %"] = percent(worst_head(attention(*operands), in_full))
        of_scores, _ = reference.attention(*back[:2], exact[2])
        row["rounding q and k alone, %"] = percent(worst_head(of_scores, in_full))
        largest = torch.softmax(exact[0] @ exact[1].mT / math.sqrt(32), -1).amax(-1)
        squares = (of_scores - in_full).square().sum(-1)
        follows = largest > one_key
        row["queries of one key, %"] = round(100 * follows.double().mean().item())
        of_these = (squares * follows).sum() / squares.sum()
        rows.append(row | {"their part, %": round(100 * of_these.item())})
    return rows


# %%


# Measuring
by_scores = larger_scores()
assert by_scores[-1]["their part, %"] < 20 < 50 < by_scores[-1]["queries of one key, %"]
first, last_row = by_scores[0], by_scores[-1]

# %%
# **Rotating q and k helps against outliers**, as exercise 1 shows, because it spreads each large
# element over all columns and keeps the scores (FlashAttention-3; QuaRot by Ashkboos et al., 2024).

# %%

# Folded: The errors in numbers, the weights with outliers, and larger scores
lab.together(
    lab.read(
        "The outliers are those of the paper on FlashAttention-3. The parts are computed in "
        "float64, in a smaller sample of 8 heads of 64 queries. They add up to the thick line "
        f"within {math.ceil(100 * gap)} %. With outliers, the part of q and k is "
        f"{larger['q and k'] ** 2:.1f} times as large as without."
    ),
    lab.read(
        f"With outliers, the worst head is off by {of_parts['outliers']['all']:.1f} % in this "
        f"sample and by {in_all('all in e4m3', 'outliers'):.1f} % in the first figure, which has "
        f"more heads. Heads differ much: the best one of the sample is off by {best_head:.1f} %."
    ),
    whole_error,
    lab.table(
        [
            {"data": data}
            | {what: f"{error:.1f} %" for what, error in found.items()}
            | {"predicted from the parts": f"{from_parts[data]:.1f} %"}
            | {"all, best head": f"{both_parts[data][1]:.1f} %"}
            for data, found in of_parts.items()
        ],
        "Error of the output if one thing is rounded, or all, in float64, worst of 8 heads of 64 "
        "queries",
    ),
    lab.read(
        f"With outliers, {led_queries:.0f} % of the queries give more than half of their weight to "
        "one key. Their outputs are large, because hardly anything cancels: they make up "
        f"{led_output:.0f} % of the squared output. But they hold only {led_error:.0f} % of the "
        "squared error of the weights."
    ),
    lab.table(
        by_scores,
        "Error for larger scores, two heads of 100 keys; queries of which one key has more than "
        "0.9 of the weight, and their part of the squared error that comes from q and k",
    ),
    lab.read(
        "With scores 16 times as large, the error is "
        f"{last_row['all in e4m3, %']:.1f} % instead of {first['all in e4m3, %']:.1f} % with q, k "
        f"and V in 8 bits, and {last_row['V in e4m3, %']:.1f} % instead of "
        f"{first['V in e4m3, %']:.1f} % with V alone."
    ),
    lab.read(
        "The error grows less than the scores, because a query that gives nearly all of its weight "
        f"to one key has hardly any error. At 16 times, {last_row['queries of one key, %']} % of "
        f"the queries are of this kind, and they contribute only {last_row['their part, %']} % of "
        "the squared error that comes from q and k."
    ),
    lab.read(
        "In the figure of averages, the error around 1 falls to "
        f"{shares_of_size[1][-1]:.2f} % of the average. Its own mean is not 0 but "
        f"{'−' if mean_error < 0 else ''}{abs(mean_error):.2f} %. No averaging "
        "removes it, so the error falls no further than that."
    ),
    lab.read(
        "What holds for V also holds for the weights, so the error with promotion was small in "
        "change 4, where values lay around 1. With 4,096 keys, rounding the weights alone costs "
        f"{sum_error(0, 4096, 'rounding alone'):.1f} % if the values lie around 0, and "
        f"{sum_error(1, 4096, 'rounding alone'):.1f} % around 1."
    ),
)
# %%
# How fast is it?
# ---------------
#
# We time the kernel on operands already in 8 bits, and add the cost of quantising later. We compare
# it with two 16-bit kernels: our fastest, for Hopper alone (:doc:`/chapters/attention_hopper`), and
# cuDNN's, called through PyTorch. A matmul in bfloat16 is the :term:`limit` for 16 bits.


# Measuring
from torch.nn.attention import SDPBackend, sdpa_kernel

A, B = (None, None) if runtime.INTERPRETED else matmul_operands()


def points(lengths, head_dims):
    return [
        {
            "seqlen": length, "batch": 16384 // length, "heads": 2048 // head_dim,
            "head_dim": head_dim, "mask": mask, "causal": part, "dtype": torch.bfloat16,
        }
        for head_dim in head_dims
        for mask, part in (("full", 1), ("causal", 0.5))
        for length in lengths
    ]  # fmt: skip


def cudnn(q, k, v, is_causal):
    def forced():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return lab.peer("torch.nn.attention", lambda _: forced)


# %%


# Measuring
def launch(head_dim, q_dtype):
    operands, _ = prepare(
        *torch.randn(3, 1, 4, 1024, head_dim, device=runtime.DEVICE), q_dtype
    )
    return lambda: plain(*operands)


# %%


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    size, is_causal = (3, batch, heads, seqlen, head_dim), mask == "causal"
    q, k, v = torch.randn(size, device=runtime.DEVICE, dtype=dtype)
    every, _ = prepare(q, k, v)
    return {
        "matmul": lambda: A @ B,
        "SDPA cuDNN": cudnn(q, k, v, is_causal),
        "Kernel Book bf16": lambda: attention(q, k, v, is_causal=is_causal),
        "plain Triton bf16": lambda: plain(q, k, v, is_causal=is_causal),
        "V in FP8": lambda: attention(q, k, every[2], is_causal=is_causal),
        "all in FP8": lambda: plain(*every, is_causal=is_causal),
        "all in FP8, Gluon": lab.tried(lambda: in_gluon(*every, is_causal))
        if HOPPER
        else NEEDS_HOPPER,
    }


WORK = "4 * batch * heads * seqlen * seqlen * head_dim * causal"
units = {"limit": "matmul", "work": WORK, "limit_work": LIMIT_WORK, "unit": "TFLOP/s"}
for name in ("quantize + FP8", "Kernel Book bf16"):
    lab.colour(name)  # in this order, so that each line of 8 bits is blue
speed = lab.bench("fp8", points([1024, 4096, 16384], [64, 128]), providers, **units)

# %%


# Drawing
LINES = {  # what the figure shows of the providers, and how wide its line is
    "all in FP8": ("all in 8 bits", 2.6),
    "Kernel Book bf16": ("16 bits, for Hopper", 2.6),
    "SDPA cuDNN": ("16 bits, cuDNN", 1.4),
    "matmul": ("matmul, 16 bits", 1.4),
}


def lines_of_speed(rows):
    """The rows of each line of the figure, by provider."""
    lines = {}
    for row in rows:
        if (row["head_dim"], row["mask"]) == (128, "full") and row["provider"] in LINES:
            lines.setdefault(row["provider"], []).append(row)
    return lines


def draw_speed(axes, rows):
    lines = lines_of_speed(rows)
    for provider, line in lines.items():
        lengths, rates = (
            [row[column] for row in line] for column in ("seqlen", "rate")
        )
        ink = lab.colour(provider)
        style, mark = ("--", "") if provider == "matmul" else ("-", "o")
        wide = LINES[provider][1]
        axes.plot(lengths, rates, style, marker=mark, ms=4.5, color=ink, lw=wide)
        band = [
            [row["rate"] * row["ms"] / row[p] for row in line] for p in ("p80", "p20")
        ]
        axes.fill_between(lengths, *band, color=ink, alpha=0.15, linewidth=0)
    step = 58  # TFLOP/s between two names
    ends = sorted(
        ((line[-1]["rate"], name) for name, line in lines.items()), reverse=True
    )
    at = ends[0][0] + step
    for end, name in ends:
        at = min(at - step, end)
        weight = "bold" if LINES[name][1] > 2 else "normal"
        axes.text(
            16384 * 1.22, at, LINES[name][0], color=lab.colour(name), fontsize=10,
            va="center", weight=weight,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks((1024, 4096, 16384), ["1,024", "4,096", "16,384"])
    axes.set(ylim=(0, 950), xlabel="length", ylabel="TFLOP/s")


def describe_speed(rows):
    found = (
        f"{LINES[name][0]} {line[-1]['rate']:,.0f}"
        for name, line in lines_of_speed(rows).items()
    )
    return f"Lines over the length, in TFLOP/s; at 16,384: {', '.join(found)}."


lab.draw(speed, "Speed, head_dim 128, no mask", describe_speed, draw_speed)

# %%

# Reading
at_end = {"head_dim": 128, "mask": "full", "seqlen": 16384}
rate = {name: speed.rate(name, **at_end) for name in speed.providers}
of_fp8, of_default, of_cudnn, of_plain = (
    rate.get(name, nan)
    for name in ("all in FP8", "Kernel Book bf16", "SDPA cuDNN", "plain Triton bf16")
)


def at_its_best(sweep):
    """The fastest point of our kernel in 8 bits on one GPU, in words."""
    rows = sweep.at(provider="all in FP8")
    best = rows.loc[rows["rate"].idxmax()]
    gpu = sweep.provenance["gpu"].split()[1]
    mask = "a causal mask" if best["mask"] == "causal" else "no mask"
    how = f"with head_dim {best['head_dim']} and {mask}"
    whose = "an older version of ours reached" if sweep.mark else "ours reaches"
    return f"{best['rate']:,.0f}", gpu, how, whose


beside_theirs = [s for s in speed.elsewhere if "H100" in s.provenance["gpu"]]
our_best = [at_its_best(s) for s in beside_theirs[:1] or [speed] if s.provenance]
of_v = rate.get("V in FP8", nan)
ratios = {
    (head_dim, mask, length): speed.rate("all in FP8, Gluon", **where)
    / speed.rate("all in FP8", **where)
    for head_dim in (128, 64)
    for mask in ("full", "causal")
    for length in (1024, 4096, 16384)
    for where in [{"head_dim": head_dim, "mask": mask, "seqlen": length}]
}
lost = sum(ratio < 0.995 for ratio in ratios.values())
lab.together(
    lab.read(
        f"**At length 16,384, attention in 8 bits is {of_fp8 / of_default:.2f} times as fast as "
        f"our fastest 16-bit kernel.** It reaches {100 * of_fp8 / fast:.0f} % of the speed of an "
        "8-bit matmul, while the 16-bit kernel reaches "
        f"{100 * of_default / rate.get('matmul', nan):.0f} % of a 16-bit one. With V alone in 8 "
        f"bits, attention is {'only ' if of_v / of_default < 1.02 else ''}{of_v / of_default:.2f} "
        "times as fast as in 16, because one of its two matmuls still has 16 bits."
    ),
    lab.read(
        "Others report faster 8-bit kernels. The FlashAttention-3 paper gives close to 1,200 "
        "TFLOP/s at best on an H100"
        + "".join(
            f", where {whose} at most {best}"
            if gpu == "H100"
            else f"; {whose} at most {best} on the {gpu}"
            for best, gpu, _, whose in our_best
        )
        + ". We also built a kernel with roles, where one warp loads and the others compute (next "
        f"chapter), but in 8 bits it is slower in {lost} of {len(ratios)} cases."
    ),
)

# %%

# Folded: The same with each mask and head_dim, and what the compiler made of the kernel
rows = []
for head_dim in (128, 64):
    for mask in ("full", "causal"):
        where = {"head_dim": head_dim, "mask": mask}
        row = where | {"mask": "none" if mask == "full" else mask}
        for length in (1024, 4096, 16384):
            at = where | {"seqlen": length}
            fp8_rate, bf16_rate, plain_rate = (
                speed.rate(name, **at)
                for name in ("all in FP8", "Kernel Book bf16", "plain Triton bf16")
            )
            row[f"{length:,}"] = shown(fp8_rate / bf16_rate, 2)
        row["over what we changed"] = shown(fp8_rate / plain_rate, 2)
        rows.append(
            row | {"8 bits": shown(fp8_rate, 0), "16 bits": shown(bf16_rate, 0)}
        )
resources = lab.facts(
    "What the compiler made of the kernel",
    {
        f"head_dim {head_dim}, {name}": (
            lambda head_dim=head_dim, q_dtype=q_dtype: launch(head_dim, q_dtype)()
        )
        for head_dim in (64, 128)
        for name, q_dtype in (("all in FP8", E4M3), ("V only", torch.bfloat16))
    },
)
lab.together(
    lab.table(
        rows,
        "Speed of 8 bits over 16 bits for Hopper, by length; at 16,384 also over the 16-bit "
        "kernel that we changed, and TFLOP/s",
    ),
    lab.read(
        f"In the figure 8 bits are {of_fp8 / of_cudnn:.2f} times as fast as cuDNN at length "
        f"16,384. V alone in 8 bits is {of_v / of_plain:.2f} times as fast as the 16-bit kernel "
        "that we changed."
        + "".join(
            f" The {best} TFLOP/s on the {gpu} are the most of all measured points, {how}."
            for best, gpu, how, _ in our_best
        )
    ),
    resources,
)

# %%


# Measuring
TILE = hopper_fp8.CONFIGS[128].block_n


def thread_of_result(column):
    return column % 8 // 2


def thread_of_operand(column):
    return column % 16 // 4


def keys_of_columns(tile):
    """Which key is in each column of a tile's scores, as the kernel loads them."""
    four = hopper_fp8.in_quadruples(torch.arange(tile).view(1, 1, tile, 1))
    return torch.cat([four[0, 0, :, 2 * h : 2 * h + 2].flatten() for h in range(2)])


INKS = ("Kernel Book", "PyTorch", "Liger", "quack")  # a colour for each thread


def draw_cells(axes, place, columns, keys, threads):
    for x, (key, thread) in enumerate(zip(keys, threads, strict=True)):
        ink = lab.colour(INKS[thread])
        x += 0.6 * (x >= 8)
        axes.barh(place, 0.92, 0.66, x, color=ink, alpha=0.3, edgecolor=ink)
        axes.text(x + 0.46, place, key, ha="center", va="center", fontsize=9)
    if columns:
        for half in range(2):
            first, last = columns[8 * half], columns[8 * half + 7]
            axes.text(
                4 + 8.6 * half, place - 0.6, f"columns {first} to {last}",
                ha="center", fontsize=8.5, color=lab.colour("matmul"),
            )  # fmt: skip


def draw_orders(axes):
    ours = keys_of_columns(TILE).tolist()
    lines = (
        ("scores, keys in the order of memory", [*range(16)], range(16)),
        ("what the second matmul reads", None, range(16)),
        (
            "scores, keys in our order",
            [*range(8), *range(TILE // 2, TILE // 2 + 8)],
            None,
        ),
    )
    for line, (title, columns, keys) in enumerate(lines):
        place = 2 * line
        if keys is None:
            keys = [ours[column] for column in columns]
        threads = [
            thread_of_operand(key) if columns is None else thread_of_result(column)
            for key, column in zip(keys, columns or keys, strict=True)
        ]
        axes.text(0, place - 1.05, title, fontsize=10)
        draw_cells(axes, place, columns, keys, threads)
    for thread, ink in enumerate(INKS):
        axes.barh(0, 0, color=lab.colour(ink), alpha=0.5, label=f"thread {thread}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=9)
    axes.set(xlim=(-0.1, 16.7), ylim=(4.6, -1.6), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=False)


def rounded_from_the_right(q, k, v, is_causal):
    """As reference.attention_fp8, of a kernel whose first tile of keys is the last."""
    n_q, n_k, tile = q.shape[2], k.shape[2], TILE
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if is_causal:
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(n_k - n_q), -torch.inf)
    largest = torch.stack([part.amax(-1) for part in scores.split(tile, dim=-1)], -1)
    largest = largest.flip(-1).cummax(-1).values.flip(-1).clamp(min=-1e300)
    largest = largest.repeat_interleave(tile, dim=-1)[..., :n_k]
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (256 * (scores - largest).exp()).to(E4M3).double() / 256
    return weights * (largest - lse).exp() @ v, lse


# %%


# Measuring
def cases_in_gluon():
    for head_dim in (64, 128):
        for is_causal in (False, True):
            shape = (1, 4, 2, 300, 500, head_dim)
            operands, meant = prepare(*draw_heads(*shape))
            found = in_gluon(*operands, is_causal)
            what = f"{shape}{', causal' * is_causal}"
            yield from heads_apart(
                what, operands, *found, meant, is_causal, rounded_from_the_right
            )


# %%

# Folded: The kernel with roles: its speed, its order of keys, its check and its code
lab.sketch(
    "Which thread has the weight of which key",
    "Three rows of 16 cells, numbered by key and coloured by thread. Scores in the order of "
    "memory: two keys per thread, then the next thread. What the second matmul reads: four keys "
    "per thread. Scores in our order: columns 0 to 7 are keys 0, 1, 4, 5, 8, 9, 12, 13, and "
    "columns 64 to 71 the keys between them, so each key has the thread of the middle row.",
    draw_orders,
    height=3.6,
)
columns, keys = torch.arange(TILE), keys_of_columns(TILE)
stay = (thread_of_result(columns) == thread_of_operand(columns)).sum().item()
assert torch.equal(keys.sort().values, columns)
assert torch.equal(thread_of_result(columns), thread_of_operand(keys))
# packed() joins them by fours: (halves, eights, threads, neighbours)
words = keys.view(2, TILE // 16, 4, 2).permute(1, 2, 0, 3).reshape(-1, 4)
assert torch.equal(words, columns.view(-1, 4))
runs = [
    f"with head_dim {head_dim} and {'a causal' if mask == 'causal' else 'no'} mask, up to "
    f"{most:,} keys"
    for (head_dim, mask), steps in fp8_choice.CHOICES.items()
    for most, config in steps
    if config
]
assert runs == ["with head_dim 128 and a causal mask, up to 2,048 keys"]
leads, trails = (ratios[128, "causal", length] for length in (1024, 4096))
lab.together(
    lab.read(
        "In the figure, the number in a cell is a key, and its colour the thread that holds its "
        "weight. Four threads share a row. Each holds two neighbours of every 8 columns of a "
        "result, and four neighbours of every 16 columns of an 8-bit operand. So in the order of "
        f"memory, only {stay} of the {TILE} weights of a tile are where the second matmul reads "
        "them. The others would have to move to another thread."
    ),
    lab.read(
        "A softmax does not depend on the order of its keys. So we load the first two of every "
        "four keys into the first half of a tile, and the last two into the second half. Now each "
        "thread gets the scores of just those keys whose weights it must hold. We check the whole "
        f"tile: the order holds each key once, and all {TILE} weights are where they are read."
    ),
    lab.read(
        "The copy engine can load in this order. We describe the keys to it as groups of four, so "
        "one copy fetches the first two keys of all groups of a tile, and a second the last two."
    ),
    lab.table(
        [
            {"head_dim": head_dim, "mask": "none" if mask == "full" else mask}
            | {
                f"{length:,}": shown(ratios[head_dim, mask, length], 2)
                for length in (1024, 4096, 16384)
            }
            for head_dim in (128, 64)
            for mask in ("full", "causal")
        ],
        "Speed of the kernel with roles over the plain one, both in 8 bits, by length",
    ),
    lab.read(
        f"The package runs it {runs[0]}. This limit is our choice between two measured lengths: at "
        f"1,024 keys the kernel with roles has {leads:.2f} times the speed of the plain one, and "
        f"at 4,096 keys {trails:.2f} times."
    ),
    lab.check(
        "The kernel in Gluon",
        cases_in_gluon(),
        here=HOPPER,
        theirs="yardstick",
        title="The kernel with roles",
    ),
    lab.read(
        "**A register that nobody wrote.** With a single key, an early version gave rows of NaN, "
        "at random. Triton makes a constant of an integer argument that is 1, here the number of "
        "keys, so the compiler knew that all weights but one are equal. In the machine code, the "
        "conversion of equal operands then read a register that nothing had written. So the kernel "
        "keeps Triton from making the number of keys a constant."
    ),
    lab.listing(
        {
            "The keys in our order": hopper_fp8.fetch_keys,
            "Weights, four to a register": hopper_fp8.packed,
            "The weights as an operand. The loop and the roles are those of the chapter on Hopper, "
            "and the package has the kernel whole, in ops/hopper/fp8.py": hopper_fp8.as_operand,
        }
    ),
)

# %%
# Why is it not twice as fast?
# ----------------------------
#
# Eight bits halve the cycles of the matmuls, but not those of the rest. Every score also needs an
# exponential, a maximum, a sum, a scaling and a conversion, which other units of an :term:`SM`
# compute no faster than before.
#
# The figure shows one tile with head_dim 128, with matmuls at full speed. The rest is what we
# counted in the machine code of our 8-bit kernel with roles, and we assume the same for 16 bits.


# Measuring
RATES = {  # per SM and cycle, and the instruction
    "exponential": (16, "MUFU.EX2"), "maximum": (64, "FMNMX"),
    "multiply-add": (128, "FFMA"), "sum": (128, "FADD"),
    "conversion of two": (64, "F2FP.SATFINITE.E4M3"),
}  # fmt: skip


def machine_code(compiled):
    """All of a kernel's SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(tool, capture_output=True, text=True, check=True).stdout


def counted(sass):
    """The instructions of a thread in an iteration, from the wait for the scores on."""
    loop = re.search(
        r"gsb0, 0x1\s*;(.*?gsb0, 0x0\s*;.*?\bBRA\b)(.*?)gsb0", sass, re.DOTALL
    )
    if loop is None:
        raise LookupError("the machine code has no loop that waits as expected")
    rows = []
    for what, (rate, name) in RATES.items():
        # weights are converted behind the branch that writes the output
        code = loop[2] if name.startswith("F2FP") else loop[1]
        count = len(re.findall(rf"\b{re.escape(name)}", code))
        row = {"instruction": what, "SASS": name, "per thread": count}
        rows.append(
            row | {"per SM and cycle": rate, "cycles": round(128 * count / rate)}
        )
    return rows


def instructions_in_gluon():
    size = (3, 4, 16, 4096, 128)
    operands, _ = prepare(*torch.randn(size, device=runtime.DEVICE))
    ((_, compiled),) = lab.compiled_by(lambda: in_gluon(*operands))
    return counted(machine_code(compiled))


work = lab.attempt(
    "One consumer, one tile of 64 queries and 128 keys, head_dim 128, no mask",
    instructions_in_gluon if HOPPER else NEEDS_HOPPER,
)

# %%


# Drawing
cycles = {row["instruction"]: row["cycles"] for row in work.rows}
of_weights = 64 * 128 // 16  # cycles of an SM for an exponential for each score
exponentials = cycles.get("exponential", of_weights)
all_else = sum(cycles.values()) if work.rows else nan
of_two_matmuls = 2 * 2 * 64 * 128 * 128 / 8192
MATMULS = {"16 bits": 2 * of_two_matmuls, "8 bits": of_two_matmuls}


def units_drawn(axes):
    others = all_else if all_else == all_else else exponentials
    rest = (
        ("exponentials", exponentials, "PyTorch"),
        ("others", others - exponentials, "matmul"),
    )
    for place, (name, matmul) in enumerate(MATMULS.items()):
        for line, pieces in enumerate(((("matmuls", matmul, "Kernel Book"),), rest)):
            at, left_edge = 2.6 * place + line, 0
            for what, width, ink in pieces:
                if width:
                    look = {"color": lab.colour(ink), "alpha": 0.5}
                    axes.barh(at, width, 0.85, left_edge, **look)
                    middle = left_edge + width / 2
                    label = f"{what} {width:,.0f}" if line else what
                    axes.text(middle, at, label, ha="center", va="center", fontsize=9.5)
                left_edge += width
            axes.text(
                left_edge + 12, at, f"{left_edge:,.0f}", va="center", weight="bold"
            )
        axes.text(-15, at - 0.5, name, ha="right", va="center", weight="bold")
    axes.set(ylim=(4.2, -0.6), xlim=(0, 1.15 * max(MATMULS["16 bits"], others)))
    axes.set(yticks=[], xlabel="cycles of an SM")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False)


lab.sketch(
    "Cycles for one tile, in the matrix unit and in the other units",
    "For 16 and for 8 bits, a bar for the matrix unit and one for the other units. "
    + " ".join(
        f"With {name}: {matmul:,.0f} cycles of matmuls, and {exponentials:,.0f} of exponentials "
        f"and {max(all_else - exponentials, 0) if work.rows else 0:,.0f} of others."
        for name, matmul in MATMULS.items()
    ),
    units_drawn,
    height=2.5,
)

# %%


# Reading
def gain_if(combine):
    """What 8 bits gain by the count, if the units work together in this way."""
    long, short = (combine(matmul, all_else) for matmul in MATMULS.values())
    return long / short


in_turns, side_by_side = gain_if(lambda x, y: x + y), gain_if(max)
lab.read(
    "**By this count, the rest takes longer than the matmuls in 8 bits.** If so, a faster kernel "
    "has to do less work around its matmuls, or overlap more of it with them."
    if all_else > of_two_matmuls
    else "**In 8 bits, the matmuls need half as many cycles, and the rest as many as before.**"
)

# %%

# Reading
at_64 = at_end | {"head_dim": 64}
gains_of = {
    head_dim: [
        speed.rate("all in FP8", **at) / speed.rate(name, **at)
        for name in ("plain Triton bf16", "Kernel Book bf16")
    ]
    for head_dim, at in ((128, at_end), (64, at_64))
}
shorter = gains_of[64][0] < gains_of[128][0]
too_low = gains_of[128][0] > max(in_turns, side_by_side)
of_16, of_8 = MATMULS.values()
low, high = sorted((in_turns, side_by_side))
lab.read(
    "The count shows what does not get faster, but at least one of its assumptions (in the fold) "
    f"is wrong, because it predicts a gain of {low:.2f} to {high:.2f}, and over the kernel that we "
    f"changed we measured {gains_of[128][0]:.2f}."
    if too_low
    else "The gain over the kernel that we changed, "
    f"{gains_of[128][0]:.2f}, is not above what the count predicts."
) if work.rows else None

# %%

# Folded: The instructions counted, and the shares of the matrix unit's speed
made = speed.provenance or {}
megahertz = made.get("clocks", {}).get("max_sm_mhz", nan)
unit_rate = {  # TFLOP/s, by the operations of a Hopper SM's matrix unit in a cycle
    bits: made.get("sm_count", nan) * megahertz * operations / 1e6
    for bits, operations in {"16 bits": 4096, "8 bits": 8192}.items()
}
shares = {
    "counted: the units take turns": [m / (m + all_else) for m in MATMULS.values()],
    "counted: the units work side by side": [
        m / max(m, all_else) for m in MATMULS.values()
    ],
    "measured: this kernel, and the one that we changed": [
        of_plain / unit_rate["16 bits"],
        of_fp8 / unit_rate["8 bits"],
    ],
    "measured: this kernel, and our fastest in 16 bits": [
        of_default / unit_rate["16 bits"],
        of_fp8 / unit_rate["8 bits"],
    ],
}
lab.together(
    work,
    lab.read(
        f"In turns, the units would need {of_16:,.0f} + {all_else:,.0f} cycles with 16 bits and "
        f"{of_8:,.0f} + {all_else:,.0f} with 8. Side by side, they would need "
        f"{max(of_16, all_else):,.0f} and {max(of_8, all_else):,.0f}. The quotients are the gains."
    )
    if work.rows
    else None,
    lab.table(
        [
            {
                "how": how,
                "16 bits": f"{100 * of_16:.0f} %",
                "8 bits": f"{100 * of_8:.0f} %",
            }
            | {"gain": f"{2 * of_8 / of_16:.2f} ×"}
            for how, (of_16, of_8) in shares.items()
        ]
        if work.rows and megahertz == megahertz
        else [],
        "Share of the matrix unit's speed, and gain from 16 to 8 bits",
    ),
    lab.read(
        "In a cycle an SM does 4,096 operations of a matmul with 16 bits and 8,192 with 8 bits, "
        "but 16 exponentials with either. We assume that the kernel of this chapter needs the same "
        "instructions as the one with roles, in 8 and in 16 bits, that they run one at a time, "
        "that matmuls run at full speed, and that 8 and 16 bits overlap the two equally. But this "
        "kernel also has other tiles than the one that we changed: "
        + " and ".join(
            f"{tile.block_m} queries by {tile.block_n} keys with {bits} bits"
            for bits, tile in (
                (16, tuned.HOPPER["forward", 128, 2]),
                (8, tuned.HOPPER["fp8", 128, 1]),
            )
        )
        + "."
    ),
    lab.read(
        "With head_dim 64, where the matmuls take half as many cycles and the exponentials as "
        "many, the measured gain is "
        + ("smaller, as the count predicts: " if shorter else "")
        + f"{gains_of[64][0]:.2f} instead of {gains_of[128][0]:.2f}."
    ),
    lab.read(
        f"Of the cycles for exponentials, {of_weights} are for the weights and "
        f"{exponentials - of_weights} for the factors alpha, each of which four threads compute."
    ),
    lab.read(
        "In the second table 100 % is the rate of the matrix unit at the GPU's highest clock, "
        f"{megahertz:,.0f} MHz, of which cuBLAS in bfloat16 reaches "
        f"{100 * slow / unit_rate['16 bits']:.0f} % ({slow:,.0f} TFLOP/s in a matmul of size "
        f"{MATMUL:,}; in 8 bits, {fast:,.0f}). So these shares are lower "
        "than those at the top of the page."
    ),
    lab.read(
        "If the other units overlap among themselves, more is possible than the counts allow: the "
        "exponentials alone would let 8 bits gain "
        f"{MATMULS['16 bits'] / max(exponentials, of_two_matmuls):.2f}. A gain "
        "can also exceed both counts if the 8-bit kernel overlaps more of its work than the 16-bit "
        "one, or needs fewer of the other instructions."
    ),
)

# %%
# When does quantising pay?
# -------------------------
#
# In a model, q, k and v arrive in bfloat16, so FP8 must first earn back the time that quantising
# takes. ``quantize`` reads each element twice and writes it once, because no element can be rounded
# before the largest of its head, the :term:`amax`, is known.


# Measuring
def in_pytorch(x, contiguous="head_dim"):
    """Quantise by PyTorch operations, each of which reads and writes memory."""
    x = x.float()
    descale = x.abs().amax((2, 3), keepdim=True) / 448
    descale = descale.masked_fill(descale == 0, 1.0)
    stored = (x / descale).clamp_(-448, 448)
    stored = (
        stored.mT.contiguous().to(E4M3).mT
        if contiguous == "seqlen"
        else stored.to(E4M3)
    )
    return Quantized(stored, descale[..., 0, 0])


def quantisers(seqlen, batch, heads, head_dim, contiguous, dtype):
    size = (batch, heads, seqlen, head_dim)
    x = torch.randn(size, device=runtime.DEVICE, dtype=dtype)
    source = torch.empty(5 * x.numel() // 2, dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    return {
        "copy": lambda: target.copy_(source),
        "PyTorch": lambda: in_pytorch(x, contiguous),
        "Kernel Book": lambda: quantize(x, contiguous=contiguous),
    }


# %%

# Measuring
layouts = [
    {
        "seqlen": 4096, "batch": 4, "heads": 16, "head_dim": 128, "contiguous": contiguous,
        "dtype": torch.bfloat16,
    }
    for contiguous in ("head_dim", "seqlen")
]  # fmt: skip
rounding = lab.bench(
    "quantise",
    layouts,
    quantisers,
    limit="copy",
    work="5 * batch * heads * seqlen * head_dim",
)


# %%


# Measuring
def compiled_quantisers(seqlen, batch, heads, head_dim, contiguous, dtype):
    size = (batch, heads, seqlen, head_dim)
    x = torch.randn(size, device=runtime.DEVICE, dtype=dtype)
    compiled = torch.compile(in_pytorch)
    of_others = quantisers(seqlen, batch, heads, head_dim, contiguous, dtype)
    return {
        "copy": of_others["copy"],
        "torch.compile": lab.tried(lambda: compiled(x, contiguous)),
        "Kernel Book": of_others["Kernel Book"],
    }


by_compiler = lab.bench(
    "quantise, compiled",
    layouts,
    compiled_quantisers,
    limit="copy",
    work="5 * batch * heads * seqlen * head_dim",
)

# %%
where = {"head_dim": 128, "mask": "full", "seqlen": 4096}
saved = speed.milliseconds_at("Kernel Book bf16", **where)
saved -= speed.milliseconds_at("all in FP8", **where)


def all_three(provider, sweep=rounding):
    q_or_k = sweep.milliseconds_at(provider, contiguous="head_dim")
    return 2 * q_or_k + sweep.milliseconds_at(provider, contiguous="seqlen")


cost = all_three("Kernel Book")
with_compiler = all_three("torch.compile", by_compiler) if by_compiler.rows else nan
begin = 4096 * cost / saved if saved > 0 else math.inf if saved <= 0 else nan
expected = {"full": begin, "causal": 2 * begin}
lab.table(
    [
        {"at length 4,096": what, "ms": f"{ms:.3f}"}
        for what, ms in (
            ("quantize, for q, k and v", cost),
            ("a copy that moves as many bytes", all_three("copy")),
            (
                "quantising in PyTorch, not compiled",
                all_three("PyTorch"),
            ),
            ("quantising in PyTorch, compiled", with_compiler),
            ("time that FP8 saves in attention, no mask", saved),
        )
        if ms == ms
    ]
    if rounding.rows
    else [],
    "Cost of quantising, and time saved by FP8, 4 texts of 16 heads",
)

# %%

# Reading
lab.read(
    "At every length we time 16,384 tokens in all, so quantising costs the same. But the saving "
    "grows with the length, because each token attends to more keys. **We predict that FP8 pays "
    f"from about {round(begin, -2):,.0f} keys on** (4,096 · {cost:.3f} / {saved:.3f}), and from "
    "twice as many with a causal mask, which halves the saving."
    if not saved <= 0
    else "At length 4,096, FP8 saves no time in attention that could pay for this."
)

# %%
# Now we time the whole path from bfloat16. FP8 pays where its line is above 1.


# Measuring
def whole_way(seqlen, batch, heads, head_dim, mask, causal, dtype):
    size, is_causal = (3, batch, heads, seqlen, head_dim), mask == "causal"
    q, k, v = torch.randn(size, device=runtime.DEVICE, dtype=dtype)
    every, _ = prepare(q, k, v)

    def both(quantizing):
        v8 = quantizing(v, contiguous="seqlen")
        return attention(quantizing(q), quantizing(k), v8, is_causal=is_causal)

    return {
        "matmul": lambda: A @ B,
        "bf16 attention": lambda: attention(q, k, v, is_causal=is_causal),
        "FP8 alone": lambda: attention(*every, is_causal=is_causal),
        "quantize + FP8": lambda: both(quantize),
        "PyTorch + FP8": lambda: both(in_pytorch),
    }


LENGTHS = [1024, 2048, 4096, 8192, 16384]
whole = lab.bench("whole way", points(LENGTHS, [128]), whole_way, **units)


# %%


# Drawing
def relative(rows):
    """Return, by mask and provider, the lengths and the speeds relative to bf16."""
    bf16 = {
        (row["mask"], row["seqlen"]): row["ms"]
        for row in rows
        if row["provider"] == "bf16 attention"
    }
    found = {}
    for row in rows:
        if row["provider"] not in ("matmul", "bf16 attention"):
            line = found.setdefault((row["mask"], row["provider"]), ([], []))
            line[0].append(row["seqlen"])
            line[1].append(bf16[row["mask"], row["seqlen"]] / row["ms"])
    return found


WAYS = {  # how a line is called, and its colour
    "FP8 alone": ("already in 8 bits", "all in FP8"),
    "quantize + FP8": ("quantize, then FP8", "quantize + FP8"),
    "PyTorch + FP8": ("PyTorch,\nnot compiled", "matmul"),
}


def draw_relative(axes, rows):
    lines = relative(rows)
    for (mask, provider), (x, y) in lines.items():
        name, ink = WAYS[provider]
        style = "-o" if mask == "full" else ":s"
        axes.plot(x, y, style, ms=4.5, color=lab.colour(ink))
        if mask == "full":
            at = (y[-1] + lines["causal", provider][1][-1]) / 2
            look = {"color": lab.colour(ink), "fontsize": 10, "va": "center"}
            axes.text(LENGTHS[-1] * 1.12, at, name, **look)
    for style, label in (("-o", "no mask"), (":s", "causal mask")):
        axes.plot([], [], style, ms=4.5, color=lab.colour("matmul"), label=label)
    axes.axhline(1, color=lab.colour("matmul"), linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes.set(
        ylim=(0, None), xlabel="length", ylabel="speed (our fastest in 16 bits: 1)"
    )


def describe_relative(rows):
    ends = "; ".join(
        f"{' '.join(WAYS[provider][0].split())}, {'no' if mask == 'full' else mask} mask: "
        f"{y[0]:.2f} to {y[-1]:.2f}"
        for (mask, provider), (_, y) in relative(rows).items()
    )
    return (
        f"Speed relative to attention in bfloat16, which is a dashed line at 1, over lengths from "
        f"1,024 to 16,384, solid for no mask and dotted for a causal one. {ends}."
    )


lab.draw(
    whole,
    "Speed relative to attention in 16 bits, head_dim 128",
    describe_relative,
    draw_relative,
)


# %%

# Reading


def gain(mask, seqlen):
    """Return how many times as fast FP8 is where quantising counts."""
    where = {"mask": mask, "seqlen": seqlen}
    before = whole.milliseconds_at("bf16 attention", **where)
    return before / whole.milliseconds_at("quantize + FP8", **where)


def begins(mask):
    """Return the lengths between which FP8 begins to pay, as far as they were measured."""
    pays = [n for n in LENGTHS if gain(mask, n) > 1]
    return max(set(LENGTHS) - set(pays), default=0), min(pays, default=math.inf)


def in_words(mask):
    before, after = begins(mask)
    below = f"above {before:,}" if after == math.inf else f"below {after:,}"
    between = before > 0 and after < math.inf
    return f"between {before:,} and {after:,}" if between else below


def crossing(mask):
    """Return the length at which the line of FP8 with quantize crosses 1, between two points."""
    before, after = begins(mask)
    if before == 0 or after == math.inf:
        return nan
    low, high = gain(mask, before), gain(mask, after)
    return before * (after / before) ** ((1 - low) / (high - low))


crossings = {mask: crossing(mask) for mask in ("full", "causal")}
earlier = all(0.8 < crossings[mask] / expected[mask] < 1 for mask in expected)
added = {
    (mask, n): whole.milliseconds_at("quantize + FP8", mask=mask, seqlen=n)
    - whole.milliseconds_at("FP8 alone", mask=mask, seqlen=n)
    for mask in ("full", "causal")
    for n in LENGTHS
}
usual = statistics.median(added.values())
in_operations = max(
    whole.milliseconds_at("bf16 attention", mask=mask, seqlen=n)
    / whole.milliseconds_at("PyTorch + FP8", mask=mask, seqlen=n)
    for mask in ("full", "causal")
    for n in LENGTHS
)
now = {
    first: whole.milliseconds_at(second, mask="full", seqlen=16384)
    for first, second in (
        ("Kernel Book bf16", "bf16 attention"),
        ("all in FP8", "FP8 alone"),
    )
}
alone_now = now["Kernel Book bf16"] / now["all in FP8"]
crossed = all(
    x == x and x < math.inf for x in (*crossings.values(), *expected.values())
)
lab.read(
    (
        "**FP8 with `quantize` pays from about "
        f"{round(crossings['full'], -2):,.0f} keys on without a mask, and from "
        f"{round(crossings['causal'], -2):,.0f} with a causal one**"
        + (", a little sooner than predicted. " if earlier else ". ")
        if crossed
        else f"**FP8 with `quantize` begins to pay {in_words('full')} keys without a mask, and "
        f"{in_words('causal')} with a causal one.** "
    )
    + "With PyTorch's operations, not compiled, it "
    + (
        "never pays at these lengths"
        if in_operations < 1
        else f"reaches {in_operations:.2f} times the speed of bfloat16 at best"
    )
    + "."
)

# %%

# Folded: What quantising adds, and what avoids the cost
of_copy = [rounding.share("Kernel Book", contiguous=x) for x in ("head_dim", "seqlen")]
lab.together(
    lab.read(
        "16,384 tokens are 4 texts of 4,096, or 1 of 16,384. "
        + (
            "With PyTorch's compiled operations, we would have predicted "
            f"{round(begin * with_compiler / cost, -2):,.0f} keys without a mask. "
            if with_compiler == with_compiler and saved > 0
            else ""
        )
        + "The measured lengths are those at which the lines cross 1, read between two points."
    ),
    lab.read(
        f"`quantize` runs at {100 * min(of_copy):.0f} to {100 * max(of_copy):.0f} % of the speed "
        f"of the copy. In the figure it adds {min(added.values()):.2f} to "
        f"{max(added.values()):.2f} ms, by length and mask. With the usual {usual:.2f} ms, we "
        f"would have predicted {round(expected['full'] * usual / cost, -2):,.0f} and "
        f"{round(expected['causal'] * usual / cost, -2):,.0f} keys."
    ),
    lab.read(
        (
            ""
            if by_compiler.rows
            else "We did not time what torch.compile makes of PyTorch's operations. "
        )
        + f"Without quantising, 8 bits are {alone_now:.2f} times as fast as 16 at length 16,384 "
        f"here, and {of_fp8 / of_default:.2f} times in the figure of TFLOP/s, which is another "
        "run."
    )
    if alone_now == alone_now
    else None,
    lab.read(
        "A cache that keeps keys and values in 8 bits quantises each of them only once. But it has "
        "to choose their scale before it knows the largest element."
    ),
)

# %%
# .. dropdown:: Both kernels whole, and in which order they take the tiles
#
#    The first kernel takes the maximum of each tile, and an :term:`atomic` maximum combines the
#    tiles of a head; the second scales and rounds. The maximum is one of integers, because the bits
#    of a float32 without its sign have the order of the numbers, with infinity and NaN above them
#    all. So it also finds a NaN, and it does not depend on the order in which programs finish.
#    ``divide`` multiplies by the reciprocal and corrects the quotient, which gives every bit of a
#    division.
#
#    The second kernel takes the tiles in the opposite order. An operand (64 MiB here) is larger
#    than the L2 cache. If the cache evicts what was used least recently, then in the same order
#    every tile would be gone just before it is needed again. In the opposite order, the tiles read
#    last are still there. We did not time the two orders here.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/quantize.py
#       :language: python
#       :pyobject: amax_kernel
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/quantize.py
#       :language: python
#       :pyobject: round_kernel
#
#    What they call: which tile a program takes, and the division.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/quantize.py
#       :language: python
#       :pyobject: place_of_tile
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/quantize.py
#       :language: python
#       :pyobject: divide

# %%
# What breaks it
# --------------
#
# Three mistakes raise no exception. The first is a descale that does not match what is stored. The
# second is a factor of :math:`2^9` for the weights, with which the largest weight does not fit.
#
# .. code-block:: python
#
#    half = (stored.float() / 2).to(stored.dtype)
#    Quantized(half, descale)  # wrong: every value is halved
#    Quantized(half, 2 * descale)  # right


# Measuring
def halved(pair, factor):  # the factor has to be 2
    half = (pair.stored.float() / 2).to(E4M3)
    return Quantized(half, pair.descale * factor)


dice = torch.Generator().manual_seed(1)
drawn = torch.randn(3, 1, 2, 60, 32, generator=dice).to(runtime.DEVICE)
(q_8, k_8, v_8), stands_for = prepare(*drawn)
exactly, _ = reference.attention(*stands_for)
one_ahead = 0.5 * torch.randn(64, 4096, generator=dice, dtype=torch.float64)
one_ahead[:, 0] = one_ahead.amax(-1) + 6
averaged = torch.randn(4096, 32, generator=dice, dtype=torch.float64)
average_of_all = torch.softmax(one_ahead, -1) @ averaged
descale_kept, descale_lost = (
    100 * worst_head(plain(q_8, k_8, halved(v_8, by)), exactly) for by in (2, 1)
)
with_8, with_9 = (
    100 * off_by(with_rounded_weights(one_ahead, averaged, by)[0], average_of_all)
    for by in (8, 9)
)
assert descale_lost > 4 * descale_kept
assert with_9 > 4 * with_8
lab.table(
    [
        {"mistake": what, "error": f"{wrong:.0f} %", "without it": f"{right:.1f} %"}
        for what, wrong, right in (
            (
                "stored V halved, its descale not doubled",
                descale_lost,
                descale_kept,
            ),
            ("weights times 2⁹, one key ahead by 6", with_9, with_8),
        )
    ],
    "Error of the output, not counting the rounding of q, k and v",
)

# %%
# The third, **a flattened descriptor of the transposed V**, occurs in `Triton's tutorial on fused
# attention
# <https://github.com/triton-lang/triton/blob/main/python/tutorials/06-fused-attention.py>`__. Its
# :term:`descriptor` treats V, of shape (heads, head_dim, length), as *one* matrix with head_dim
# rows and heads · length columns, and the kernel looks for each head at the column that equals its
# offset in memory. With two heads, head_dim 2 and 3 keys, head 1 begins 6 numbers into memory, but
# the matrix has only columns 0 to 5:
#
# .. image:: /figures/attention-fp8-flat.svg
#    :alt: Above, 12 numbers in memory, 0 to 5 of head 0 and 6 to 11 of head 1. Below, two rows of
#          nine columns: row 0 holds numbers 0 to 8, row 1 numbers 3 to 11. A dashed line after
#          column 5 marks where the matrix ends. The tile of head 0 has columns 0 to 2, inside. The
#          tile of head 1 has columns 6 to 8, behind the line, and reads as 0.
#
# The address is right, but the hardware that copies tiles returns zeros for whatever lies outside.


# Measuring
@triton.jit
def _average_kernel(
    p_ptr, v_desc, out_ptr, length, FLAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for start in range(0, length, BLOCK_N):
        if FLAT:  # (head_dim, heads * length)
            v = v_desc.load([0, head * HEAD_DIM * length + start])
        else:  # (heads, head_dim, length)
            v = tl.reshape(v_desc.load([head, 0, start]), (HEAD_DIM, BLOCK_N))
        p = tl.load(p_ptr + head * length + start + tl.arange(0, BLOCK_N))
        acc += tl.sum(v * p[None, :], axis=1)
    tl.store(out_ptr + head * HEAD_DIM + tl.arange(0, HEAD_DIM), acc)


def average(p, v_t, flat):
    heads, head_dim, length = v_t.shape
    out = torch.empty(heads, head_dim, device=p.device)
    if flat:
        shape, strides = [head_dim, heads * length], [length, 1]
        block = [head_dim, 32]
    else:
        shape, strides = list(v_t.shape), list(v_t.stride())
        block = [1, head_dim, 32]
    desc = TensorDescriptor(v_t, shape, strides, block)
    _average_kernel[(heads,)](p, desc, out, length, flat, head_dim, 32)
    return out


p = torch.softmax(torch.randn(32, 64, device=runtime.DEVICE), -1)
v_t = torch.randn(32, 16, 64, device=runtime.DEVICE)
truth = torch.einsum("hn,hdn->hd", p.double(), v_t.double())
results = {
    "flattened": average(p, v_t, True),
    "zeros": torch.zeros_like(truth),
    "heads apart": average(p, v_t, False),
}
rows = []
NAMED = {"flattened": "one matrix", "heads apart": "a matrix for each head (right)"}
for name, out in results.items():
    off = (out - truth).abs().amax(1) / truth.abs().amax(1)
    accepted = torch.allclose(out.double(), truth, rtol=0, atol=3)
    worst = 100 * off.max().item()
    rows.append(
        {
            "V": NAMED.get(name, name),
            "heads of zeros": int((out == 0).all(1).sum()),
            "accepted with tolerance 3": "yes" if accepted else "no",
            "error of the worst head": f"{worst:{'.0f' if worst > 50 else '.2g'}} %",
            "every head right": "yes" if (off < 1e-5).all() else "no",
        }
    )
assert [row["accepted with tolerance 3"] for row in rows] == ["yes"] * 3
assert [row["every head right"] for row in rows] == ["no", "no", "yes"]
assert rows[0]["heads of zeros"] == len(v_t) - len(v_t) // v_t.shape[1]

# %%

# Reading
lab.read(
    f"**In a small kernel with this mistake, {rows[0]['heads of zeros']} of {len(v_t)} heads "
    "become zeros, and the tutorial's test accepts them.** It would accept zeros alone, because "
    "its `atol` is 3 and averages of normal numbers are smaller. A good test compares each head "
    "with its own truth and rejects zeros."
)

# %%

# Folded: The mistake planted in a small kernel
lab.together(
    lab.listing({"The kernel whole": _average_kernel, "How it is called": average}),
    lab.table(rows, "32 heads, head_dim 16, 64 keys"),
    lab.read(
        "Head h begins at column h · head_dim · length, and there are heads · length columns, so "
        f"only the first heads / head_dim, here {len(v_t)} / {v_t.shape[1]} = "
        f"{len(v_t) // v_t.shape[1]}, begin inside."
    ),
)

# %%
# In short
# --------
#
# To lose no more than necessary, attention in 8 bits needs four changes: a descale for each head, V
# stored transposed, weights times :math:`2^8`, and a matrix unit that sums one tile at a time.

# %%

# Reading
lab.read(
    f"Attention is then {of_fp8 / of_default:.2f} times as fast as our fastest 16-bit kernel, not "
    "twice, because only the matmuls need fewer cycles. "
    + (
        "Outliers more than double its error, mainly by way of q and k. "
        if in_all("all in e4m3", "outliers") > 2 * in_all("all in e4m3", "normal")
        else ""
    )
    + ("Where quantising counts, it pays only for long inputs. " if crossed else "")
    + "We did not test whether a language model notices the errors, time other libraries in 8 "
    "bits, or find out which assumption of the cycle count is wrong."
)

# %%
# Exercises
# ---------
#
# **1. A rotation against outliers.** For any orthogonal matrix :math:`R`, :math:`(qR)(kR)^\top =
# qk^\top`. Before ``quantize``, apply one that spreads a large element over all columns. Does the
# error shrink?

# %%

# Solution: a rotation against outliers
#
# The rows of a Hadamard matrix are orthogonal, and its entries are plus or minus one. The rotation
# helps most where a whole column is large, less where a few large elements lie anywhere, and not at
# all on normal data.


def hadamard(n, device):
    x = torch.ones(1, 1, device=device)
    while len(x) < n:
        x = torch.cat((torch.cat((x, x), 1), torch.cat((x, -x), 1)))
    return x / math.sqrt(n)


rows = []
for data in ("normal", "outliers anywhere", "one large column"):
    q, k, v = torch.randn(3, 1, 4, 128, 64, device=runtime.DEVICE)
    if data == "outliers anywhere":
        q, k = with_outliers(q), with_outliers(k)
    if data == "one large column":
        q[..., 5], k[..., 5] = q[..., 5] * 6, k[..., 5] * 6
    original, _ = reference.attention(q, k, v)
    row = {"q and k": data}
    signs = torch.sign(torch.randn(64, device=q.device))
    rotation = signs[:, None] * hadamard(64, q.device)
    for name, matrix in (("as they are", None), ("rotated", rotation)):
        turned = (q, k) if matrix is None else (q @ matrix, k @ matrix)
        operands, _ = prepare(*turned, v)
        out = attention(*operands)
        row[f"{name}, %"] = percent(worst_head(out, original))
    rows.append(row)
assert rows[2]["rotated, %"] < rows[2]["as they are, %"]
lab.table(rows, "Error with all operands in e4m3, against the original")

# %%
# **2. One descale for each column of K.** Before rounding, divide a large column of k by a number
# and multiply the same column of q by it. Does the error shrink?

# %%

# Solution: one descale for each column of K
#
# Not in e4m3, because a floating-point number carries its own exponent: a factor does not change
# the bound of its relative error, unless the number was below the range. With int8, which has no
# exponent, it does.

q, k, v = torch.randn(3, 1, 4, 128, 64, device=runtime.DEVICE)
k[..., 5] *= 6
original, _ = reference.attention(q, k, v)
column = k.abs().amax((0, 1, 2))
rows = []
for name, factor in (("per head", torch.ones_like(column)), ("per column", column)):
    row = {"K": name}
    in_int8 = (k / factor).abs().amax((2, 3), keepdim=True) / 127
    in_e4m3 = (k / factor).abs().amax((2, 3), keepdim=True) / 448
    for kind, back in {
        "e4m3": (k / factor / in_e4m3).to(E4M3).float() * in_e4m3 * factor,
        "int8": (k / factor / in_int8).round() * in_int8 * factor,
    }.items():
        out, _ = reference.attention(q, back, v)
        row[f"{kind}, %"] = percent(worst_head(out, original))
    rows.append(row)
lab.table(rows, "Error of the result when K alone is rounded")

# %%
# **3. One descale for each block of V.** If the later values of a text are much larger, a single
# descale per head rounds the early ones to zero. Can each block of keys have its own, without a new
# kernel?


# %%

# Solution: one descale for each block of V
#
# Treat each block of keys as a separate head, with its own descale, and merge the parts by lse.
# We test it where the first half of the queries looks at the first half of the keys only, whose
# values are tiny.


def by_blocks(q, k, v, blocks):
    k, v = (x.unflatten(2, (blocks, -1)).flatten(1, 2) for x in (k, v))
    operands, _ = prepare(q.repeat_interleave(blocks, dim=1), k, v)
    out, lse = attention(*operands, return_lse=True)
    out, lse = (x.float().unflatten(1, (-1, blocks)) for x in (out, lse))
    return (torch.softmax(lse, dim=2).unsqueeze(-1) * out).sum(2)


q, k, v = torch.randn(3, 1, 2, 128, 32, device=runtime.DEVICE)
q[:, :, :64, 0], k[:, :, 64:, 0] = 12.0, -16.0
v[:, :, :64] *= 1e-6
original, _ = reference.attention(q, k, v)
rows = []
for blocks in (1, 2, 4):
    out = by_blocks(q, k, v, blocks)
    row = {"blocks": blocks}
    for name, part in (("early", slice(0, 64)), ("late", slice(64, 128))):
        row[f"{name} queries, %"] = percent(
            worst_head(out[:, :, part], original[:, :, part])
        )
    rows.append(row)
lab.table(rows, "Values that grow a million times")

# %%
# References
# ----------
#
# - Micikevicius et al. *FP8 formats for deep learning.* arXiv:2209.05433, 2022.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* arXiv:2407.08608, 2024.
# - Xiao, Tian, Chen, Han, Lewis. *Efficient streaming language models with attention sinks.*
#   arXiv:2309.17453, 2023.
# - Ashkboos et al. *QuaRot: outlier-free 4-bit inference in rotated LLMs.* arXiv:2404.00456,
#   2024.
# - NVIDIA. *Parallel thread execution ISA*, warpgroup-level matrix instructions: which operands may
#   be transposed.

# %%

# Closing
gains = [
    speed.rate("all in FP8", head_dim=head_dim, mask=mask, seqlen=16384)
    / speed.rate("Kernel Book bf16", head_dim=head_dim, mask=mask, seqlen=16384)
    for head_dim in (64, 128)
    for mask in ("full", "causal")
]
lab.finish(
    f"{min(gains):.2f} to {max(gains):.2f} times as fast as in bf16 at length 16,384; where "
    f"quantising counts as well, {gain('full', 16384):.2f} times without a mask and "
    f"{gain('causal', 16384):.2f} times with a causal one"
)
