"""
Low-memory dropout
==================

Dropout tosses a coin for every element in the forward pass, and the backward pass needs the same
tosses again. PyTorch stores them, one byte per element. *Can we throw them away and still get them
back?*

You will learn

- what a stored mask costs in memory and time, and how a single seed replaces it;
- how a counter-based generator gives every element its own random number, in any order;
- why drawing one number per call is slow, and how four per call, in fewer rounds, reach the speed
  of a copy.
"""

# sphinx_gallery_thumbnail_number = 10
import re
import statistics

import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap

from kernelbook import dropout, lab, masked_dropout, reference, runtime, seeded_dropout
from kernelbook.lab import results
from kernelbook.ops.dropout import (
    _dropped,
    _plan,
    _rand_dropout,
    _run,
    _seeded_dropout,
    masked_dropout_kernel,
    rand_dropout_kernel,
    seeded_dropout_kernel,
)

lab.start("dropout", "kernelbook.ops.dropout")

# %%
# The problem in PyTorch
# ----------------------
#
# During training, dropout sets each element to zero with probability :math:`p` and divides the rest
# by :math:`1 - p`, which leaves the expected value of every element unchanged.


def simple_dropout(x, p):
    keep = torch.rand_like(x) >= p
    return x * keep / (1 - p)


# %%
# Input ``x`` and output ``y`` live in the GPU's main memory, :term:`HBM`, so every implementation
# must read ``x`` once and write ``y`` once: 4 bytes per 16-bit element. Our function moves 14,
# because each of its four operations is a separate :term:`kernel` that reads from memory and writes
# back.
#
# .. dropdown:: How the 14 bytes are counted
#
#    ``rand_like`` writes 2 bytes. The comparison reads 2 and writes a mask of 1. The multiplication
#    reads ``x`` and the mask and writes a product, 5 in all. The division reads 2 and writes 2.
#
# The backward pass multiplies the gradient by the *same* mask, so autograd holds on to the mask
# between the two passes, at one byte per element.
#
# .. image:: /figures/dropout-bytes.svg
#    :alt: Bars of the bytes moved for each element in 16 bits. With a stored mask, forward and
#          backward move 5 bytes each, and the mask of 1 byte stays in memory between them. With a
#          seed, both move 4 bytes, and 8 bytes in all stay in memory.
#
# PyTorch's allocator tells us what each version holds after the forward pass, not counting ``x``
# and ``y``. This book's operators are ``masked_dropout`` and ``dropout``.


def held_for_backward():
    n = 2**28
    x = torch.randn(n, device=runtime.DEVICE, dtype=torch.float16, requires_grad=True)
    keep = torch.rand(n, device=runtime.DEVICE) >= 0.5
    ways = {
        "simple_dropout": lambda: simple_dropout(x, 0.5),
        "F.dropout": lambda: F.dropout(x, 0.5),
        "masked_dropout": lambda: masked_dropout(x, keep.clone(), 0.5),
        "dropout (a seed)": lambda: dropout(x, 0.5),
    }
    rows = []
    for name, way in ways.items():
        before = torch.cuda.memory_allocated()
        y = way()
        held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        rows.append(
            {
                "operator": name,
                "MiB held": round(held / 2**20, 2),
                "bytes an element": round(held / n, 2),
            }
        )
        del y
    return rows


lab.measure("Memory held between the passes, 2²⁸ elements", held_for_backward)

# %%
# The mask is half the size of the float16 activation, while the seed's 8 bytes round to zero.
#
# The idea
# --------
#
# How can 8 bytes replace a whole mask? The backward pass can draw the same random numbers again,
# but not from an ordinary generator. That computes each number from the one before, so a thread
# would have to compute all the numbers before its own.
#
# A :term:`counter-based generator` has no state. Think of a library full of books of random
# numbers, where anyone can open any book at any page. The *seed* names the book and the *counter*
# the page, and the same pair always gives the same numbers.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    If the counter follows from the element's index, any thread can compute the random number of
#    any element. The backward pass recomputes the same numbers, so there is nothing to store.
#
# Our generator is :term:`Philox`. PyTorch uses it on a GPU, too, but stores the mask all the same.
# One call takes a 128-bit counter and returns four 32-bit numbers, enough for four elements:
# element ``i`` takes number ``i % 4`` from the call with counter ``i // 4``.
#
# .. image:: /figures/dropout-philox.svg
#    :alt: Eight elements in two groups of four. The seed and the counter i // 4 enter one call of
#          Philox for each group. Each call gives four numbers, one for each element. An element is
#          kept and scaled where its number is at least p times two to the power of 32, and is
#          zero elsewhere.
#
# The mathematics
# ---------------
#
# **Forward.** If random numbers had 4 bits, from 0 to 15, and :math:`p` were a quarter, we would
# drop every element whose number is below 4. Ours have 32 bits. Let :math:`r_i` be the number of
# element :math:`i`, uniform in :math:`\{0, \dots, 2^{32} - 1\}`. Then
#
# .. math::
#
#    y_i = \begin{cases}
#      \dfrac{x_i}{1 - p} & \text{if } r_i \ge p \cdot 2^{32} \\
#      0 & \text{otherwise}
#    \end{cases}
#
# The condition holds with probability :math:`1 - p`, so the mean of :math:`y_i` is :math:`x_i`. We
# round the threshold, so that the kernel can compare two integers.
#
# **Backward.** Each output is its input times either :math:`1 / (1 - p)` or zero, so we multiply
# the gradient by the same factor.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The gradient is dropout again, applied to ``dy`` instead of ``x``, so one kernel serves both
#    passes.
#
# **Philox.** A function of a counter can look random because multiplication scrambles digits. The
# product 37 · 83 = 3071 has the halves 30 and 71; with 36 instead of 37, the halves are 29 and 88,
# so a small step in the input changes both. Philox does the same with 32-bit words, in *rounds*.
#
# It splits the counter into four such words, :math:`(c_0, c_1, c_2, c_3)`, and the seed into two,
# :math:`(k_0, k_1)`. Our counter, ``i // 4``, fits in :math:`c_0` and :math:`c_1`, so the other two
# begin as zero. With two constants, :math:`A` and :math:`B`, one round computes
#
# .. math::
#
#    \begin{aligned}
#    c_0' &= \mathrm{hi}(B c_2) \oplus c_1 \oplus k_0 \\
#    c_1' &= \mathrm{lo}(B c_2) \\
#    c_2' &= \mathrm{hi}(A c_0) \oplus c_3 \oplus k_1 \\
#    c_3' &= \mathrm{lo}(A c_0)
#    \end{aligned}
#
# where hi and lo are the upper and lower 32 bits of a product, and the exclusive or,
# :math:`\oplus`, mixes in the seed.

# Reading
four, (small_a, small_b), (small_k0, small_k1) = (3, 6, 7, 2), (13, 11), (5, 9)
(high_b, low_b), (high_a, low_a) = (
    divmod(small_b * four[2], 16),
    divmod(small_a * four[0], 16),
)
after_round = (high_b ^ four[1] ^ small_k0, low_b, high_a ^ four[3] ^ small_k1, low_a)
lab.read(
    f"With 4-bit words, A = {small_a}, B = {small_b} and the seed ({small_k0}, {small_k1}), one "
    f"round turns the counter {four} into {after_round}. Since {small_b} · {four[2]} is "
    f"{high_b} · 16 + {low_b}, the first word is {high_b} ⊕ {four[1]} ⊕ {small_k0} = "
    f"{after_round[0]} and the second is {low_b}; the other two come from {small_a} · {four[0]}."
)

# %%
# Between rounds, Philox adds a constant to each word of the seed, which makes every round
# different. Since the product of :math:`c_2` goes to the first two words and that of :math:`c_0` to
# the last two, a change in a single bit of the counter soon reaches all four:
#
# .. animation:: one_flipped_bit
#
# After four rounds, half of the bits differ. That is necessary but not sufficient, as “Is it random
# enough?” will show.
#
# .. dropdown:: Why two counters never give the same numbers
#
#    Every round is invertible. Since :math:`A` and :math:`B` are odd, and multiplication by an odd
#    number modulo :math:`2^{32}` can be undone, :math:`c_1'` determines :math:`c_2`. Then
#    :math:`c_0'` determines :math:`c_1`, and the other two words follow in the same way. An
#    invertible step cannot map two counters to the same output.

# %%
# A stored mask
# -------------
#
# What does a stored mask cost in time? Our yardstick is a copy, PyTorch's ``y.copy_(x)``, which
# moves only the bytes that no implementation can avoid. It is a kernel like any other, so one that
# moves the same bytes may come out slightly above 100 %.
#
# We start from PyTorch's four operations, then write three kernels.


# Measuring
def providers(elements, dtype):
    x = torch.randn(elements, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    y = torch.empty_like(x)
    keep = torch.rand(elements, device=runtime.DEVICE) >= 0.5
    compiled = torch.compile(lambda x: F.dropout(x, 0.5))
    return {
        "copy": lambda: y.copy_(x.detach()),
        "simple_dropout": lambda: simple_dropout(x, 0.5),
        "PyTorch": lambda: F.dropout(x, 0.5),
        "torch.compile": lambda: compiled(x),
        "stored mask": lambda: masked_dropout(x, keep, 0.5),
        "one a call": lambda: _rand_dropout(x, 0.5, 7),
        "four a call": lambda: _seeded_dropout(x, 0.5, 7, n_rounds=10),
        "seven rounds": lambda: _seeded_dropout(x, 0.5, 7),
        "Kernel Book": lambda: dropout(x, 0.5),
    }


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
forward = lab.bench(
    "forward",
    [{"elements": 2**28, "dtype": dtype} for dtype in DTYPES],
    providers,
    limit="copy",
    work="2 * elements * itemsize",
)

# %%

# Reading
rungs = ["simple_dropout", "stored mask", "one a call", "four a call", "seven rounds"]
shown = [*rungs, "Kernel Book", "PyTorch", "torch.compile"]
in_half = {"elements": 2**28, "dtype": "float16"}
half = {name: 100 * forward.share(name, dtype="float16") for name in shown}
ten = 100 * forward.share("four a call", dtype="float32")
brain = {
    name: 100 * forward.share(name, dtype="bfloat16")
    for name in ("seven rounds", "Kernel Book")
}
on_gpu = f" on {forward.provenance['gpu']}" if forward.provenance else ""
allowed = 100 * 4 / 14
lab.read(
    f"In float16{on_gpu}, `simple_dropout` reaches {half['simple_dropout']:.0f} % of the speed of "
    "a copy, "
    + ("about half of" if 0.43 < half["simple_dropout"] / allowed < 0.57 else "against")
    + f" the {allowed:.0f} % that 14 bytes instead of 4 would allow. Where does the rest go? We "
    "time its four operations one by one, beside the time of their bytes at the speed of a copy."
)

# %%


# Measuring
def four_operations():
    n = 2**28
    x = torch.randn(n, device=runtime.DEVICE, dtype=torch.float16)
    number = torch.rand_like(x)
    keep, y = number >= 0.5, torch.empty_like(x)
    steps = {
        "torch.rand_like(x)": (2, lambda: torch.rand_like(x)),
        "… >= p": (3, lambda: number >= 0.5),
        "x * keep": (5, lambda: x * keep),
        "… / (1 - p)": (4, lambda: x / 0.5),
        "a copy": (4, lambda: y.copy_(x)),
    }
    rows = []
    for name, (moved, step) in steps.items():
        ms = statistics.median(lab.event_times(step))
        row = {"operation": name, "bytes an element": moved, "µs": round(1e3 * ms)}
        rows.append(row | {"GB/s": round(moved * n / ms / 1e6)})
    return rows


# %%

# Folded: The four operations, one by one
steps = lab.attempt(
    "The operations of simple_dropout, 2²⁸ elements, float16", four_operations
)
steps

# %%


# Drawing
def beside_their_bytes(rows):
    """The operations, the µs that each took, and the µs of its bytes at the speed of a copy."""
    *four, copied = rows
    per_byte = copied["µs"] / copied["bytes an element"]
    return [
        (row["operation"], row["µs"], per_byte * row["bytes an element"])
        for row in four
    ]


def operations_in_words(rows):
    found = ", ".join(
        f"{name} {took} of {bound:.0f}"
        for name, took, bound in beside_their_bytes(rows)
    )
    return f"Bars of the µs taken, beside the µs that the bytes need: {found}."


def bars_of_operations(axes, rows):
    for place, (_, took, bound) in enumerate(beside_their_bytes(rows)):
        what = [f"{'_' if place else ''}{words}" for words in ("its bytes", "measured")]
        axes.barh(place - 0.19, bound, 0.36, color=lab.colour("copy"), label=what[0])
        axes.barh(place + 0.19, took, 0.36, color=lab.colour("PyTorch"), label=what[1])
    axes.set_yticks(range(place + 1), [name for name, *_ in beside_their_bytes(rows)])
    axes.invert_yaxis()
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="µs of the GPU's time")


lab.draw(
    steps,
    "The four operations beside their bytes, float16",
    operations_in_words,
    bars_of_operations,
)

# %%

# Reading
nan = float("nan")
took = {row["operation"]: row["µs"] for row in steps.rows}
drawing, copying = took.get("torch.rand_like(x)", nan), took.get("a copy", nan)
multiplying, in_all = took.get("x * keep", nan), sum(took.values()) - copying
lab.read(
    (
        "Two of them take longer than their bytes explain. The product of float16 and bool takes "
        + (
            "about half"
            if 0.45 < multiplying / in_all < 0.55
            else f"{100 * multiplying / in_all:.0f} %"
        )
        + " of the whole time, and we do not know why. "
        if multiplying > 1.3 * copying * 5 / 4 and drawing > 1.3 * copying * 2 / 4
        else ""
    )
    + "`torch.rand_like` moves half the bytes of a copy "
    + ("but" if drawing > copying else "and")
    + f" takes {drawing / copying:.1f} times as long"
    + (
        ". That is our first warning: drawing random numbers can cost more than moving bytes."
        if drawing > copying
        else "."
    )
)

# %%
# .. dropdown:: A reminder: what a Triton kernel is
#
#    A Triton kernel is a Python function with the decorator ``@triton.jit``. The GPU runs many
#    instances of it in parallel, called :term:`programs <program>`, and each program works on one
#    :term:`block` of elements. A tensor arrives in the kernel as a pointer to its first element, so
#    ``x_ptr + offsets`` is a block of addresses. ``tl.arange`` makes a block of consecutive
#    integers, ``tl.load`` and ``tl.store`` read and write memory at a block of addresses, and
#    arithmetic works on whole blocks. Arguments marked ``tl.constexpr`` are fixed when the kernel
#    is compiled.
#
#    .. image:: /figures/dropout-blocks.svg
#       :alt: An array of 2,500 elements cut into three blocks of 1,024. Programs 0 and 1 have whole
#             blocks. The block of program 2 begins at element 2,048 and extends past the end of the
#             array: 452 of its elements are inside, the other 572 are masked.
#
# Our first kernel, the baseline, loads a mask that we draw before the timing begins:

lab.source(masked_dropout_kernel)

# %%
# Each program derives its offsets from its number within the :term:`launch`. The bounds mask,
# ``inside``, excludes those past the end. We convert the number to ``int64``, because large tensors
# need offsets of more than 32 bits.
#
# .. dropdown:: How a kernel is launched, and how the book's operators do it
#
#    ``masked_dropout_kernel[grid](x, y, keep, n, 1 / (1 - p), BLOCK_SIZE=1024, num_warps=4)``
#    launches the kernel. The :term:`grid` says how many programs run, here one for every 1,024
#    elements, and ``num_warps`` says how many :term:`warps <warp>` of 32 threads execute each of
#    them. Four warps are 128 threads, so each thread handles eight elements.
#
#    The operators pack the kernel, the grid and every argument except the tensors and the seed
#    into one object, which makes the call ``kernel[grid](...)``. It also remembers the compiled
#    kernel, so that Triton need not inspect every argument again on the next call.

# Folded: The host's functions _plan and _run
lab.listing(
    {
        "_plan prepares a launch": _plan,
        "_run allocates the output and makes the call": _run,
    }
)

# %%

# Reading
stored = half["stored mask"]
lab.read(
    (
        "Even without the drawing, a stored mask costs time: it"
        if stored < 95
        else "A stored mask"
    )
    + f" adds a fifth byte to the four of a copy, and the kernel reaches {stored:.0f} %"
    + (", close to four fifths." if 76 < stored < 84 else ".")
    + " PyTorch's own kernel also moves five bytes, because it writes the mask, but it draws the "
    f"numbers as well and reaches {half['PyTorch']:.0f} %."
)

# %%
# One number per call
# -------------------
#
# Is drawing a number faster than loading a mask? Our second kernel replaces the load of the mask by
# ``keep = tl.rand(seed, offsets, N_ROUNDS) >= p``. As in Triton's tutorial, it draws one number per
# element, in ten rounds.

# Folded: The whole kernel with one number per call
lab.source(rand_dropout_kernel)

# %%

# Drawing
spelled = {"one a call": "one per call", "four a call": "four per call"}
lab.ladder(
    forward,
    "The ladder so far, forward, 2²⁸ elements",
    ["simple_dropout", "PyTorch", "stored mask", "one a call"],
    by="dtype",
    where=in_half,
    names=spelled,
    lit="one a call",
)

# %%

# Reading
lab.read(
    ("No: this" if half["one a call"] < stored else "This")
    + " kernel moves no more bytes than a copy, yet reaches only "
    f"{half['one a call']:.0f} %. The limit must now be arithmetic: with one round instead of ten, "
    "the same kernel is about as fast as a copy (see “The cost of Philox”). "
    "For every element, `tl.rand` calls Philox, gets four numbers, and throws three away."
)

# %%
# Four numbers, seven rounds
# --------------------------
#
# Can we use the three numbers that ``tl.rand`` throws away? Yes: ``tl.randint4x`` returns all four,
# so a block of ``BLOCK_SIZE`` elements needs only a quarter as many counters.
#
# The numbers come as four blocks, ``r0`` to ``r3``, but we want the four of counter 0 first, then
# those of counter 1, and so on. ``tl.interleave(a, b)`` alternates between the elements of two
# blocks. Even elements take ``r0`` and ``r2`` in turn and odd ones ``r1`` and ``r3``, so two inner
# calls make these two blocks, and an outer call alternates between them. Below, ``start`` is the
# index of the block's first element:

lab.source(_dropped, "draw")

# %%
# .. image:: /figures/dropout-interleave.svg
#    :alt: Four counters, two for each of two threads. The blocks r0 to r3 hold one number per
#          counter. The inner interleave makes r0 r2 r0 r2 and r1 r3 r1 r3, the outer one r0 r1 r2
#          r3 for each counter in order. The first eight numbers belong to thread 0 at every step,
#          the other eight to thread 1.
#
# Follow the colours: no number moves from one thread to another. In 16 bits, a thread that loads 16
# bytes at once holds eight consecutive elements, and it computes the numbers of their two counters
# itself.
#
# Next, we decide. ``threshold`` is the rounded :math:`p \cdot 2^{32}`, and the cast makes the
# comparison unsigned. ``tl.where`` drops even infinite elements, which a multiplication by zero
# would turn into NaN:

lab.source(_dropped, "decide")

# %%
# These two steps make up ``_dropped``. Our third kernel loads ``x``, calls it, and stores the
# result. Only the last block can extend past the end, so it alone gets a bounds mask. What a mask
# on every block would cost, we measure in “An odd number of elements”.

lab.source(seeded_dropout_kernel, "load, drop, store")

# %%

# Folded: The whole kernel
lab.listing({"What the kernel calls": _dropped, "The kernel": seeded_dropout_kernel})

# %%
# Here is the whole ladder. ``one per call`` and ``four per call`` run ten rounds; ``seven rounds``
# is the latter with seven. ``Kernel Book``, the public ``dropout``, also draws its seed, on the
# GPU, so that the :term:`host` never waits for it. The last two bars show ``F.dropout``, eager and
# compiled.

# Drawing
lab.ladder(
    forward,
    "The ladder, forward, 2²⁸ elements",
    shown,
    by="dtype",
    where=in_half,
    names=spelled,
)

# %%

# Folded: The ladder in float32 and bfloat16
lab.ladder(
    forward,
    "The ladder in every dtype, forward, 2²⁸ elements",
    shown,
    by="dtype",
    where={"elements": 2**28},
    names=spelled,
)

# %%


# Reading
ladder_read = (
    (
        "With ten rounds, `four per call` is only about as fast as `stored mask`, whose mask was "
        "drawn before the timing began."
        if abs(half["four a call"] - half["stored mask"]) < 4
        else f"With ten rounds, `four per call` reaches {half['four a call']:.0f} %, against "
        f"{half['stored mask']:.0f} % for `stored mask`."
    )
    + " With seven, the same kernel "
    + (
        "keeps up with a copy."
        if min(half["seven rounds"], brain["seven rounds"]) > 98
        else f"reaches {half['seven rounds']:.0f} % in float16 and "
        f"{brain['seven rounds']:.0f} % in bfloat16."
    )
)
peers_read = (
    "Drawing the seed costs little at this size, as `Kernel Book` shows."
    if half["Kernel Book"] > 0.97 * half["seven rounds"]
    else f"`Kernel Book`, which also draws the seed, reaches {half['Kernel Book']:.0f} %."
) + (
    " `torch.compile` makes `F.dropout` slower; we do not know why."
    if half["torch.compile"] < 0.9 * half["PyTorch"]
    else ""
)
lab.together(lab.read(ladder_read), lab.read(peers_read))

# %%
# The cost of Philox
# ------------------
#
# Why are three fewer rounds worth so much? As long as memory is the limit, another round costs next
# to nothing, because some :term:`warps <warp>` compute while others wait for their bytes. Once the
# arithmetic takes longer than the bytes, every round adds time. We should see a flat line that
# bends into a straight slope:


# Measuring
def rounds_providers(rounds, elements, dtype):
    x = torch.randn(elements, device=runtime.DEVICE, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "copy": lambda: y.copy_(x),
        "one a call": lambda: _rand_dropout(x, 0.5, 7, n_rounds=rounds),
        "four a call": lambda: _seeded_dropout(x, 0.5, 7, n_rounds=rounds),
    }


cost = lab.bench(
    "rounds",
    [
        {"rounds": r, "elements": 2**28, "dtype": torch.float16}
        for r in (1, 2, 4, 7, 10, 14, 20, 28)
    ],
    rounds_providers,
    limit="copy",
    work="2 * elements * itemsize",
)

# %%


# Drawing
def microseconds(rows, provider, axis="elements"):
    return {row[axis]: 1e3 * row["ms"] for row in rows if row["provider"] == provider}


MARKS = {"copy": "--", "one a call": "s-", "four a call": "D-"}


def rounds_in_words(rows):
    ends = (
        f"{spelled.get(name, name)} {min(times):.0f} to {max(times):.0f}"
        for name in MARKS
        for times in [microseconds(rows, name, "rounds").values()]
    )
    return f"Lines over rounds, µs of the GPU's time: {', '.join(ends)}."


def lines_of_rounds(axes, rows):
    for name, mark in MARKS.items():
        n, times = zip(*microseconds(rows, name, "rounds").items(), strict=True)
        axes.plot(n, times, mark, color=lab.colour(name), markersize=4.5)
        look = {"color": lab.colour(name), "va": "center", "fontsize": 10}
        axes.text(n[-1] + 0.8, times[-1], spelled.get(name, name), **look)
    axes.axvline(7, color=lab.colour("copy"), linestyle=":", linewidth=1)
    axes.set(xlabel="rounds", ylabel="µs of the GPU's time", ylim=(0, None))
    axes.set(xticks=[1, *n[2:]])  # a 2 beside the 1 would read as 12


title = "Time by rounds of Philox, forward, float16"
lab.draw(cost, title, rounds_in_words, lines_of_rounds)

# %%


# Reading
def picoseconds(name, rounds):
    return cost.milliseconds_at(name, rounds=rounds) / 2**28 * 1e9


assert not cost.share("one a call", rounds=1) < 0.97  # as was said of it above
longer = 100 * (picoseconds("four a call", 7) / picoseconds("four a call", 4) - 1)
slope = {
    name: (picoseconds(name, 28) - picoseconds(name, 10)) / 18
    for name in ("one a call", "four a call")
}
slower = [
    sweep.provenance["gpu"]
    + ", whose memory is slower"
    + "; an earlier version of the kernel ran there" * bool(sweep.mark)
    for sweep in forward.elsewhere
    if sweep.share("four a call", dtype="float16") > 0.99 > half["four a call"] / 100
]
seven = lab.read(
    "With four numbers per call, nearly all the arithmetic of seven rounds (dotted) hides behind "
    f"the bytes: the kernel takes only {max(longer, 0):.1f} % longer than with four rounds."
    if longer < 5
    else "With four numbers per call, seven rounds reach "
    f"{100 * cost.share('four a call', rounds=7):.0f} % of the speed of a copy."
)
every_further = lab.read(
    (
        "From 10 rounds on, arithmetic is the limit, and each further round costs "
        if cost.share("four a call", rounds=10) < 0.95
        else "From 10 to 28 rounds, each further round costs "
    )
    + (
        "about four"
        if 3.5 < slope["one a call"] / slope["four a call"] < 4.5
        else f"{slope['one a call'] / slope['four a call']:.1f}"
    )
    + " times as much with one number per call as with four, because four need a quarter of the "
    "calls."
)
in_float32 = lab.read(
    "The longer the bytes take, the more rounds are free. Even ten rounds keep up with a copy in "
    "float32, which moves twice as many bytes for the same arithmetic"
    + (f". In float16, they do so on {slower[0]}." if slower else ".")
    if ten > 99
    else f"In float32, which moves twice as many bytes, ten rounds reach {ten:.0f} %."
)
lab.together(seven, every_further, in_float32)

# %%
# .. dropdown:: More: what the compiler made of the kernels
#
#    In the table, a :term:`register` holds 4 bytes for one thread, and a :term:`spill` is a value
#    for which no register was left. The threads of a program exchange values through :term:`shared
#    memory`; those of one warp can also use :term:`shuffles <shuffle>`. The seeded kernel uses
#    neither, so each thread does compute the numbers where they are needed.
#
#    In float32 the masked kernel uses shared memory. A thread may load four elements of ``x`` at
#    once but eight of the mask, so that one of the two has to move between threads.


# Measuring
def launches(dtype):
    x = torch.ones(2**20, device=runtime.DEVICE, dtype=dtype)
    keep = x > 0
    return lambda: (
        masked_dropout(x, keep, 0.5),
        _rand_dropout(x, 0.5, 7),
        seeded_dropout(x, 0.5, 7),
    )


# %%

# Folded: Registers, shared memory and shuffles
lab.facts(
    "What the compiler made of the kernels",
    {
        "float16": lambda: launches(torch.float16)(),
        "float32": lambda: launches(torch.float32)(),
    },
)

# %%
# Is it random enough?
# --------------------
#
# Three fewer rounds are worth having only if the coin stays fair. Philox's authors report that
# seven rounds pass all of BigCrush, the hardest suite of the test library TestU01. For a safety
# margin they recommend ten (Salmon et al., 2011), as in ``tl.rand``. With even fewer, the eye sees
# what can go wrong:

# %%

# Drawing
ROUNDS_SHOWN = (1, 2, 3, 4)


def masks(*panels):
    index = torch.arange(96 * 96).view(96, 96)
    ink = ListedColormap(["none", lab.colour("Kernel Book")])
    for axes, n_rounds in zip(panels, ROUNDS_SHOWN, strict=True):
        keep = reference.keep_mask(index, 0.5, 77, n_rounds)
        axes.imshow(keep, cmap=ink, interpolation="nearest")
        axes.set(xticks=[], yticks=[], xlabel=f"{n_rounds} round{'s'[: n_rounds > 1]}")


lab.sketch(
    "96 rows of 96 tosses each: blue is kept",
    "Four squares of dots, one for each element that is kept. With one round nearly all are alike, "
    "with two they form a woven pattern, with three a striped one, and with four no pattern is "
    "seen.",
    masks,
    panels=len(ROUNDS_SHOWN),
    height=1.9,
)

# %%

# Reading
first = reference.philox(77, torch.arange(96 * 96 // 4), 1)
assert (first[:, 0] == 77).all()
assert (first[:, 1] == 0).all()
lab.read(
    "You can read the first square off the formulas. The counter is small, so c₁, c₂ and c₃ "
    "begin as zero. After one round, c₀ is therefore k₀ for every element, here the seed, "
    f"{first[0, 0]}. Also, c₁ is zero and c₂ is at most {first[:, 2].max():,}. All three are far "
    "below the threshold, 2³¹, so only every fourth element, which takes c₃, has a chance."
)

# %%
# After four rounds, the eye finds no pattern, so we need tests. The mask may keep too many
# elements, or too many of those that use, say, ``r2``. A toss may also reveal something about a
# later one, or about the same element under a neighbouring seed.
#
# We turn each suspicion into a score :math:`z`, the number of standard deviations from a fair
# coin's average. For a fair coin, :math:`|z|` exceeds 5 in fewer than one test in a million.
#
# .. dropdown:: How a score is computed
#
#    A toss is 1 if the element is kept and 0 if it is dropped. We subtract the mean, :math:`1 - p`,
#    sum the tosses or the products of pairs, and divide by the standard deviation that this sum has
#    for a fair coin.


# Measuring
def z_rate(mask, p):
    n = mask.numel()
    return (mask.sum().item() - n * (1 - p)) / (n * p * (1 - p)) ** 0.5


def z_pairs(mask, other, p):
    a, b = mask.float() - (1 - p), other.float() - (1 - p)
    return (a * b).sum(dtype=torch.float64).item() / (mask.numel() ** 0.5 * p * (1 - p))


def z_scores(draw, p, seed):
    """``draw(seed)`` gives a mask. Return the worst |z| of each kind of test."""
    mask = draw(seed)
    lags = [1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 256, 1024, 4096]
    seeds = [
        seed + 1,
        seed - 1,
        *(seed ^ 2**bit for bit in (8, 16, 24, 32, 40, 48, 62)),
    ]
    return {
        "keep rate": abs(z_rate(mask, p)),
        "each of the 4 numbers": max(abs(z_rate(mask[k::4], p)) for k in range(4)),
        "lags 1 to 4096": max(abs(z_pairs(mask[:-k], mask[k:], p)) for k in lags),
        "neighbouring seeds": max(
            abs(z_pairs(mask, draw(other), p)) for other in seeds
        ),
    }


n = 2**13 if runtime.INTERPRETED else 2**28
ones = torch.ones(n, device=runtime.DEVICE, dtype=torch.float16)
rows = []
for p in (0.5, 0.1):
    worst = z_scores(lambda seed, p=p: seeded_dropout(ones, p, seed) != 0, p, seed=77)
    rows += [
        {"p": str(p), "test": k, "worst |z|": f"{z:.1f}", "fair": z < 5}
        for k, z in worst.items()
    ]
assert all(row["fair"] for row in rows)

# %%

# Folded: The mask as a coin, test by test
lab.table(rows, f"The mask as a coin, {n:,} tosses, run now")

# %%
# We run these tests with one to ten rounds and draw the worst score of each:


def rounds_experiment():
    ones = torch.ones(2**28, device=runtime.DEVICE, dtype=torch.float16)
    rows = []
    for n_rounds in range(1, 11):
        worst = z_scores(
            lambda s, r=n_rounds: _seeded_dropout(ones, 0.5, s, r) != 0, 0.5, seed=77
        )
        rows.append(
            {"rounds": n_rounds} | {test: round(z, 2) for test, z in worst.items()}
        )
    return rows


rounds = lab.measure(
    "Worst |z| for each number of rounds, 2²⁸ tosses", rounds_experiment
)

# %%

# Folded: The score of each test, by rounds
rounds

# %%


# Drawing
def worst_by_rounds(rows):
    return {
        row["rounds"]: max(z for k, z in row.items() if k != "rounds") for row in rows
    }


def in_words(rows):
    found = (f"{r}: {z:,.1f}" for r, z in worst_by_rounds(rows).items())
    return f"Worst |z| by rounds: {', '.join(found)}."


def curve(axes, rows):
    worst = worst_by_rounds(rows)
    axes.semilogy(worst.keys(), worst.values(), "o-", color=lab.colour("Kernel Book"))
    axes.axhline(5, linestyle="--", color=lab.colour("copy"))
    axes.annotate(
        "a fair coin stays below 5", (10, 6.6), ha="right", color=lab.colour("copy")
    )
    tens = [10**power for power in range(5)]
    axes.set_yticks(tens, [f"{ten:,}" for ten in tens])
    axes.minorticks_off()
    axes.set(xlabel="rounds of Philox", ylabel="worst |z|", xticks=list(worst))


lab.draw(rounds, "Rounds that make a fair coin, 2²⁸ tosses", in_words, curve)

# %%

# Reading
worst = worst_by_rounds(rounds.rows)
fewest = min(
    (r for r in worst if all(worst[s] < 5 for s in worst if s >= r)), default=None
)
four_rounds = next((row for row in rounds.rows if row["rounds"] == 4), {})
counted = max(
    four_rounds.get(test, nan) for test in ("keep rate", "each of the 4 numbers")
)
at_a_lag = four_rounds.get("lags 1 to 4096", nan)
paired = [
    row["rounds"]
    for row in rounds.rows
    if row["rounds"] in (4, 5)
    and min(row["lags 1 to 4096"], row["neighbouring seeds"]) > 5
]
lab.together(
    lab.read(
        "Four rounds satisfy "
        + ("the tests that only count kept elements." if counted < 5 else "the eye.")
        + (
            " But "
            + ("even after five, " if 5 in paired else "")
            + "pairs of tosses in one mask are still related, and so are the masks of neighbouring "
            "seeds."
            if 4 in paired
            else ""
        )
    ),
    lab.read(
        f"After four rounds, pairs in one mask score up to {at_a_lag:,.0f}. How can that escape "
        "the eye? With 2²⁸ tosses, a small bias suffices: the two tosses of a pair agree in "
        f"{50 * (1 + at_a_lag / 2**14):.0f} % of the cases, or in "
        f"{50 * (1 - at_a_lag / 2**14):.0f} %, instead of half."
    ),
    lab.read(
        f"From {fewest} rounds on, none of our tests can tell the mask from a fair coin. Because "
        "our tests are few, we rely on BigCrush and run seven, without the authors' safety margin."
    ),
)

# %%
# The backward pass
# -----------------
#
# Autograd now remembers a seed instead of a mask, and ``backward`` runs the same kernel on ``dy``:


def launch(x, p, seed):
    x = x.contiguous()  # the gradient of y.sum() is one number, with strides of 0
    y, n = torch.empty_like(x), x.numel()
    grid = (runtime.cdiv(n, 1024),)
    threshold, scale = min(round(p * 2**32), 2**32 - 1), 1 / (1 - p)
    seeded_dropout_kernel[grid](
        x, y, seed, n, threshold, scale, BLOCK_SIZE=1024, N_ROUNDS=7
    )
    return y


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed  # with a mask: ctx.save_for_backward(keep)
        return launch(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        return launch(dy, ctx.p, ctx.seed), None, None


# %%

# Measuring
leaf = torch.ones(1000, device=runtime.DEVICE, requires_grad=True)
dropped = Dropout.apply(leaf, 0.25, 2024)
dropped.sum().backward()
assert torch.equal(leaf.grad, dropped)  # of ones, the output is the mask over 1 - p
assert 0 < (dropped == 0).sum() < 1000

# %%


# Measuring
def backward_providers(elements, dtype):
    x = torch.randn(elements, device=runtime.DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    dx = torch.empty_like(x)
    keep = torch.rand(elements, device=runtime.DEVICE) >= 0.5

    def backward_of(operator):
        y = operator(x)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    return {
        "copy": lambda: dx.copy_(dy),
        "PyTorch": backward_of(lambda x: F.dropout(x, 0.5)),
        "torch.compile": backward_of(torch.compile(lambda x: F.dropout(x, 0.5))),
        "stored mask": backward_of(lambda x: masked_dropout(x, keep, 0.5)),
        "Kernel Book": backward_of(lambda x: dropout(x, 0.5)),
    }


backward = lab.bench(
    "backward",
    [{"elements": 2**28, "dtype": dtype} for dtype in DTYPES],
    backward_providers,
    limit="copy",
    work="2 * elements * itemsize",
)
back_shown = ["PyTorch", "torch.compile", "stored mask", "Kernel Book"]

# %%

# Folded: Backward as a figure, in float16
lab.ladder(backward, "Backward, 2²⁸ elements", back_shown, by="dtype", where=in_half)

# %%

# Folded: Backward in float32 and bfloat16
lab.ladder(
    backward,
    "Backward in every dtype, 2²⁸ elements",
    back_shown,
    by="dtype",
    where={"elements": 2**28},
)

# %%

# Reading
back = {
    name: 100 * backward.share(name, dtype="float16")
    for name in ("PyTorch", "Kernel Book")
}
lab.read(
    "Our operator works the same way"
    + (
        ", and the seed saves time in this pass, too"
        if back["Kernel Book"] > 1.05 * back["PyTorch"]
        else ""
    )
    + f". In float16, our backward pass reaches {back['Kernel Book']:.0f} % of the speed of a "
    f"copy; PyTorch's, which must also read the mask, reaches {back['PyTorch']:.0f} %."
)

# %%
# Checkpointing
# -------------
#
# Activation :term:`checkpointing` saves memory by throwing activations away and computing them
# again in the backward pass. Dropout must then drop the same elements both times, or the gradient
# belongs to a different network.
#
# Before the second run, ``torch.utils.checkpoint`` therefore restores the state of PyTorch's random
# number generators. Our ``dropout`` draws its seed from them, so it gets the same seed again. We
# also run it with ``preserve_rng_state=False``, which leaves the state as it is.

from torch.utils.checkpoint import checkpoint


def masks_of_both_runs(operator, **options):
    masks = []

    def layer(x):
        y = operator(x)
        masks.append(y.detach() != 0)
        return y**2

    x = torch.ones(4096, device=runtime.DEVICE, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False, **options).sum().backward()
    return torch.equal(*masks)


rows = []
for name, operator in {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "dropout": lambda x: dropout(x, 0.5),
    "seeded_dropout, seed=5": lambda x: seeded_dropout(x, 0.5, seed=5),
}.items():
    kept, lost = (
        "yes" if masks_of_both_runs(operator, preserve_rng_state=state) else "no"
        for state in (True, False)
    )
    rows.append({"operator": name, "state restored": kept, "not restored": lost})
lab.table(rows, "Do both runs use the same mask?")

# %%
# If the state is not restored, ``F.dropout`` and ``dropout`` use a different mask in the second
# run. The gradient is then wrong, and no error is raised. A seed passed by hand is the same in both
# runs, but you must draw a new one for every step.

# %%
# An odd number of elements
# -------------------------
#
# Why does our kernel mask the last block alone? All that the compiler knows about ``n_elements`` is
# whether 16 divides it. If not, it cannot prove that the mask is the same for every element of a
# 16-byte load, and makes its loads narrower.

# Measuring
import triton  # after kernelbook, which decides how kernels run
import triton.language as tl


@triton.jit(do_not_specialize=["seed"])
def mask_on_every_block_kernel(
    x_ptr,
    y_ptr,
    seed,
    n_elements,
    threshold: tl.uint32,
    scale,
    BLOCK_SIZE: tl.constexpr,
    N_ROUNDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = start + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=inside)
    counter = start // 4 + tl.arange(0, BLOCK_SIZE // 4)
    r0, r1, r2, r3 = tl.randint4x(seed, counter, N_ROUNDS)
    random = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    y = tl.where(random >= threshold.to(tl.uint32), x.to(tl.float32) * scale, 0.0)
    tl.store(y_ptr + offsets, y, mask=inside)


def run_masked(kernel, x, y):
    grid = (runtime.cdiv(x.numel(), 1024),)
    numbers = 7, x.numel(), 2**31, 2.0  # seed, size, threshold and scale, with p = 0.5
    return kernel[grid](x, y, *numbers, BLOCK_SIZE=1024, N_ROUNDS=7, num_warps=4)


x = torch.ones(3000, device=runtime.DEVICE)
y = torch.empty_like(x)
run_masked(mask_on_every_block_kernel, x, y)
assert torch.equal(y, seeded_dropout(x, 0.5, seed=7))


def masks_on_blocks():
    everything = torch.randn(2**28, device=runtime.DEVICE, dtype=torch.bfloat16)
    result = torch.empty_like(everything)
    kernels = {
        "every block": mask_on_every_block_kernel,
        "the last block": seeded_dropout_kernel,
    }
    rows = []
    for size, n in {"2²⁸": 2**28, "2²⁸ - 3": 2**28 - 3}.items():
        x, y = everything[:n], result[:n]
        copy = statistics.median(lab.event_times(lambda x=x, y=y: y.copy_(x)))
        for masked, kernel in kernels.items():
            ptx = run_masked(kernel, x, y).asm["ptx"]
            wide = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+) ", ptx)
            times = lab.event_times(lambda k=kernel, x=x, y=y: run_masked(k, x, y))
            rows.append(
                {
                    "elements": size,
                    "masked": masked,
                    "widest load (bytes)": max(
                        int(many or 1) * int(bits) // 8 for many, bits in wide
                    ),
                    "% of a copy": round(100 * copy / statistics.median(times), 1),
                }
            )
    return rows


masking = lab.attempt(
    "A mask on every block, and on the last alone, bfloat16", masks_on_blocks
)
masking

# %%

# Reading
masked = {(row["elements"], row["masked"]): row for row in masking.rows}
(odd_every, narrow), (odd_last, wide), (even_every, _), _ = (
    (row.get("% of a copy", nan), row.get("widest load (bytes)", nan))
    for size in ("2²⁸ - 3", "2²⁸")
    for which in ("every block", "the last block")
    for row in [masked.get((size, which), {})]
)
lab.read(
    f"With 2²⁸ − 3 elements, masking every block leaves loads of {narrow} bytes and "
    f"{odd_every:.0f} % of the speed of a copy, while our kernel keeps {odd_last:.0f} %."
    + (
        " A benchmark of powers of two hides this: there, masking every block "
        f"reaches {even_every:.0f} %."
        if narrow < wide and odd_every < 0.9 * even_every
        else ""
    )
)

# %%
# Is it right?
# ------------
#
# We compute the truth in float64, with a Philox in plain PyTorch that shares no code with the
# kernel. Our error may be at most twice PyTorch's, or one :term:`ulp` if that is larger.


def cases():
    p, seed = 0.3, 2024
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((1001,), (17, 333), (2, 3, 4096)):
            x = torch.randn(shape, device=runtime.DEVICE).to(dtype).requires_grad_()
            dy = torch.randn_like(x)
            y = seeded_dropout(x, p, seed)
            y.backward(dy)
            index = torch.arange(x.numel(), device=x.device).view(shape)
            keep = reference.keep_mask(index, p, seed, rounds=7)
            for name, ours, source in (("forward", y, x), ("backward", x.grad, dy)):
                truth = reference.seeded_dropout(source, p, seed)
                in_torch = source * keep / (1 - p)
                yield lab.Case(str(shape), name, ours=ours, torch=in_torch, truth=truth)


lab.check("seeded_dropout", cases())

# %%
# The mask must depend on the seed and the index alone; otherwise, tuning the block size would
# change the network that we train.

# %%


# Measuring
def in_blocks_of_256(x):
    y = torch.empty_like(x)
    kernel = seeded_dropout_kernel[(x.numel() // 256,)]
    kernel(x, y, 9, x.numel(), 2**31, 2.0, BLOCK_SIZE=256, N_ROUNDS=7)
    return y


x = torch.ones(6, 1024, device=runtime.DEVICE)
mask = seeded_dropout(x, 0.5, seed=9) != 0
same = {
    "flattened": seeded_dropout(x.view(-1), 0.5, seed=9).view(6, 1024) != 0,
    "in float16": seeded_dropout(x.half(), 0.5, seed=9) != 0,
    "from a transposed view": seeded_dropout(x.t().contiguous().t(), 0.5, seed=9) != 0,
    "in blocks of 256": in_blocks_of_256(x) != 0,
}
rows = [
    {"the same input": name, "same mask": torch.equal(m, mask)}
    for name, m in same.items()
]
assert all(row["same mask"] for row in rows)

# %%

# Folded: One seed, one mask, as a table
lab.table(rows, "One seed, one mask")

# %%

# Reading
*others, _ = same
lab.read(
    f"A matrix keeps its mask when we pass it {', '.join(others[:-1])} or {others[-1]}, and when "
    "the kernel processes it in smaller blocks."
)

# %%
# Small inputs
# ------------
#
# Does the seed pay off for small inputs, too? Neither bytes nor arithmetic sets their time. A
# kernel and the two events that time it take a few microseconds, however little the kernel does, so
# the lines are nearly flat on the left.

sizes = lab.bench(
    "sizes",
    [{"elements": 2**power, "dtype": torch.float16} for power in range(14, 29, 2)],
    providers,
    limit="copy",
    work="2 * elements * itemsize",
)

# %%


# Drawing
def in_units(n):
    return f"{n >> 20}Mi" if n >= 2**20 else f"{n >> 10}Ki"


drawn = {
    "Kernel Book": "Kernel Book",
    "PyTorch": "PyTorch",
    "seven rounds": "seven rounds",
    "copy": "copy",
}


def times_in_words(rows):
    ends = ", ".join(
        f"{label} {min(times.values()):.1f} to {max(times.values()):.0f}"
        for provider, label in drawn.items()
        for times in [microseconds(rows, provider)]
    )
    return f"Lines over elements, µs of the GPU's time, fastest to slowest: {ends}."


def lines_of_times(axes, rows):
    for provider, label in drawn.items():
        times = microseconds(rows, provider)
        style = "-" if provider == "copy" else "o-"  # a band, seen under a line as fast
        colour = lab.colour(provider)
        x, y = list(times), list(times.values())
        band = {"lw": 8, "alpha": 0.35, "zorder": 1} if provider == "copy" else {}
        name = f"_{label}" if band else label  # a legend omits names with "_"
        axes.plot(x, y, style, label=name, color=colour, markersize=4.5, **band)
        if band:
            axes.text(x[-2] * 1.3, y[-2] / 1.6, label, color=colour, va="center")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    n = list(microseconds(rows, "copy"))
    axes.set_xticks(n, [in_units(each) for each in n])
    axes.set_yticks([5, 10, 20, 50, 100, 200, 500], [5, 10, 20, 50, 100, 200, 500])
    axes.minorticks_off()
    axes.set(xlabel="elements", ylabel="µs of the GPU's time")


lab.draw(sizes, "From small to large, forward, float16", times_in_words, lines_of_times)

# %%

# Reading
small = 1e3 * sizes.milliseconds_at("Kernel Book", elements=2**14)
ours = microseconds(sizes.rows, "Kernel Book")


def ahead(name):
    """Where another is faster than ours by 1 % or more: elements, and microseconds."""
    theirs = microseconds(sizes.rows, name)
    return {n: t - theirs[n] for n, t in ours.items() if t > 1.01 * theirs[n]}


def at_most(behind):
    """The largest of these differences."""
    return f"by at most {max(behind.values()):.1f} µs"


alone, copies = (microseconds(sizes.rows, name) for name in ("seven rounds", "copy"))
margin = max([100 * (alone[n] / copies[n] - 1) for n in alone] or [nan])
two_launches = "ours launches two kernels, one of them to draw the seed."
if behind := ahead("PyTorch"):
    its_cause = all(alone[n] < ours[n] - more for n, more in behind.items())
    two_launches = (
        f"No: up to {in_units(max(behind))} elements, PyTorch's operator is faster, "
        + at_most(behind)
        + (", because " if its_cause else ", and ")
        + two_launches
    )
else:
    two_launches = two_launches.replace("ours", "Our operator", 1)
if behind := ahead("torch.compile"):
    two_launches += (
        f" `torch.compile`, not drawn, is faster up to {in_units(max(behind))}."
    )
with_a_seed = (
    "With a seed of your own, you save that launch: at every size, `seven rounds` takes at most "
    f"{max(margin, 0):.0f} % longer than a copy."
)
lab.together(lab.read(two_launches), lab.read(with_a_seed))

# %%

# Folded: What a call costs the host
x = torch.randn(64, 1024, device=runtime.DEVICE, dtype=torch.float16)
host = lab.host_times(
    {"Kernel Book": lambda x: dropout(x, 0.5), "PyTorch": lambda x: F.dropout(x, 0.5)},
    x,
)
host

# %%

# Reading
call = {row["pass"]: row for row in host.rows}
one_way = [
    call.get("forward", {}).get(f"{whose} (µs)", nan)
    for whose in ("Kernel Book", "PyTorch")
]
timed_there = (results.find("measuring") or {"tables": {}})["tables"].get(
    "What one call of dropout costs the host", {"rows": []}
)
elsewhere_took = dict(timed_there["rows"]).get("dropout, drawing a seed", nan)
in_another_run = (
    f"The chapter on measuring found {elsewhere_took:.0f} µs for the same forward call, also "
    "without gradients. Compare host times only within one run."
    if elsewhere_took > 1.1 * one_way[0]
    else ""
)
of_the_host = (
    "The host takes even longer than the GPU: a forward call on 64Ki elements keeps it busy for "
    f"{one_way[0]:.0f} µs with our operator, whose host code is Python, and for "
    f"{one_way[1]:.0f} µs with PyTorch's, written in C++. For small inputs, PyTorch is therefore "
    "the better choice."
    if one_way[0] > max(one_way[1], small)
    else f"A forward call on 64Ki elements keeps the host busy for {one_way[0]:.0f} µs with our "
    f"operator and for {one_way[1]:.0f} µs with PyTorch's."
)
lab.together(
    lab.read(of_the_host), lab.read(in_another_run) if in_another_run else None
)

# %%
# What breaks it
# --------------
#
# **The program's number is forgotten.** If the counter starts at zero in every program, every block
# gets the same mask. We imitate this by repeating the mask of one block, of 2,048 elements here.

block = 2048
right = seeded_dropout(torch.ones(256 * block, device=runtime.DEVICE), 0.5, seed=3) != 0
wrong = (
    seeded_dropout(torch.ones(block, device=runtime.DEVICE), 0.5, seed=3) != 0
).repeat(256)

# %%

# Reading
keeps, deviation = wrong.float().mean(), 0.5 / block**0.5
apart_by_one = {
    name: z_pairs(m[:-block], m[block:], 0.5)
    for name, m in {"right": right, "wrong": wrong}.items()
}
assert abs(keeps - 0.5) < 2 * deviation
lab.read(
    "The wrong mask passes the simplest test, since it keeps about half of the elements. But a "
    "test of pairs one block apart exposes it, with |z| = "
    f"{abs(apart_by_one['wrong']):.0f} instead of {abs(apart_by_one['right']):.1f}. So does a look "
    "at the blocks, one below the other:"
)

# %%


# Drawing
def blocks_below_each_other(*panels):
    ink = ListedColormap(["none", lab.colour("Kernel Book")])
    for axes, (name, m) in zip(
        panels, {"right": right, "wrong": wrong}.items(), strict=True
    ):
        axes.imshow(
            m.view(-1, block)[:48, :96].cpu(), cmap=ink, interpolation="nearest"
        )
        axes.set(xticks=[], yticks=[], xlabel=name)


lab.sketch(
    "The first 96 tosses of 48 blocks, a row each",
    "Two panels of dots. The right mask has no pattern; the wrong one consists of vertical lines, "
    "because all rows are the same.",
    blocks_below_each_other,
    panels=2,
    height=2.0,
)

# %%
# **Two layers share a seed.** If their shapes agree, the second layer keeps every element that the
# first one kept, and does nothing but scale. With :math:`p = 0.5`, half of the elements survive
# instead of a quarter.

x = torch.ones(2**16, device=runtime.DEVICE)
once = seeded_dropout(x, 0.5, seed=1)
assert torch.equal(seeded_dropout(once, 0.5, seed=1), 2 * once)
apart = seeded_dropout(once, 0.5, seed=2)  # as it should be
assert abs((apart != 0).float().mean() - 0.25) < 0.01

# %%
# **The offset has 32 bits.** In int32, a program's number times the block size turns negative from
# element :math:`2^{31}` on, and the bounds mask lets negative offsets pass. On a GPU the kernel
# then crashes at best; at worst, it overwrites another tensor.

program = torch.tensor(2**31 // block, dtype=torch.int32)
starts = {"int32": program * block, "int64": program.long() * block}

# %%

# Reading
assert starts["int64"] == 2**31
assert starts["int32"] == -(2**31)
lab.read(
    f"With blocks of {block:,} elements, program {program.item():,} should begin at element 2³¹, "
    "but in int32 it begins at −2³¹."
)

# %%
# In short
# --------
#
# Dropout need not store its tosses: if the mask is a function of seed and index, any thread can
# recompute any part of it. The seed saves the memory. Four numbers per call and seven rounds save
# the time, because the arithmetic then hides behind the bytes.
#
# Here no element needs another. In :doc:`/chapters/softmax`, each output depends on the whole row.
#
# Exercises
# ---------
#
# **1. One seed per row.** Give each row of a matrix its own seed, so that it keeps its mask
# wherever it stands in the batch. Use a grid of rows and blocks of columns; ``tl.program_id(1)``
# numbers the blocks. Test the kernel by moving a row.

# %%

# Solution: one seed per row


@triton.jit
def row_seeded_kernel(
    x_ptr, seeds_ptr, y_ptr, n_cols, threshold, scale, BLOCK_SIZE: tl.constexpr
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_SIZE
    columns = start + tl.arange(0, BLOCK_SIZE)
    inside = columns < n_cols
    x = tl.load(x_ptr + row * n_cols + columns, mask=inside)
    counter = start // 4 + tl.arange(
        0, BLOCK_SIZE // 4
    )  # the column alone, not the row
    r0, r1, r2, r3 = tl.randint4x(tl.load(seeds_ptr + row), counter, 7)
    random = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    y = tl.where(random >= threshold.to(tl.uint32), x * scale, 0.0)
    tl.store(y_ptr + row * n_cols + columns, y, mask=inside)


def threshold(p):
    return min(round(p * 2**32), 2**32 - 1)


def row_seeded_dropout(x, p, seeds, block=512):
    y = torch.empty_like(x)
    grid = (x.shape[0], triton.cdiv(x.shape[1], block))
    row_seeded_kernel[grid](x, seeds, y, x.shape[1], threshold(p), 1 / (1 - p), block)
    return y


x = torch.randn(5, 1000, device=runtime.DEVICE)
seeds = torch.tensor([11, 12, 13, 12, 15], device=runtime.DEVICE)
order = torch.tensor([4, 2, 0, 1, 3], device=runtime.DEVICE)
y = row_seeded_dropout(x, 0.5, seeds)
assert torch.equal(row_seeded_dropout(x[order], 0.5, seeds[order]), y[order])
truth = torch.stack(
    [reference.seeded_dropout(x[i], 0.5, int(seeds[i])) for i in range(5)]
)
lab.check("A seed a row", [lab.Case("(5, 1000)", "forward", y, truth.float(), truth)])

# %%
# **2. Any stride, no copy.** ``seeded_dropout`` copies an input that is not contiguous. Write a
# kernel that takes the two :term:`strides <stride>` of a matrix instead and draws the same mask.
# Since a row may begin in the middle of a group of four, call Philox once per element.

# %%

# Solution: any stride, no copy


@triton.jit
def strided_kernel(
    x_ptr,
    y_ptr,
    stride_row,
    stride_col,
    n_cols,
    seed,
    threshold,
    scale,
    BLOCK_SIZE: tl.constexpr,
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_SIZE
    columns = start + tl.arange(0, BLOCK_SIZE)
    inside = columns < n_cols
    x = tl.load(x_ptr + row * stride_row + columns * stride_col, mask=inside)
    index = row * n_cols + columns  # a row may begin in the middle of a group of four
    r0, r1, r2, r3 = tl.randint4x(seed, index // 4, 7)
    lane = index % 4
    random = tl.where(
        lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3)
    )
    y = tl.where(random >= threshold.to(tl.uint32), x * scale, 0.0)
    tl.store(y_ptr + index, y, mask=inside)


def strided_dropout(x, p, seed, block=512):
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    grid = (x.shape[0], triton.cdiv(x.shape[1], block))
    scalars = (x.shape[1], seed, threshold(p), 1 / (1 - p), block)
    strided_kernel[grid](x, y, *x.stride(), *scalars)
    return y


x = torch.randn(301, 70, device=runtime.DEVICE).t()
y, truth = strided_dropout(x, 0.5, seed=21), reference.seeded_dropout(x, 0.5, seed=21)
lab.check(
    "Any stride",
    [lab.Case("(70, 301), transposed", "forward", y, truth.float(), truth)],
)

# %%
# **3. A random projection that is never stored.** A random matrix :math:`R` of shape
# :math:`(d, k)` maps points from :math:`d` dimensions to :math:`k` and nearly preserves their
# distances (Johnson–Lindenstrauss). For :math:`s = 3`, say, its entries are :math:`\pm\sqrt{s / k}`
# with probability :math:`1 / (2s)` each, and zero otherwise. Write a kernel for :math:`x R` that
# draws each entry of :math:`R` where it is used, with ``tl.randint``.

# %%

# Solution: a random projection that is never stored


@triton.jit
def project_kernel(
    x_ptr,
    y_ptr,
    n_dims,
    k,
    seed,
    one_in,
    size,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, n_dims, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * n_dims + dims, mask=dims < n_dims, other=0.0)
        index = dims[:, None].to(tl.int64) * k + columns[None, :]
        number = tl.randint(seed, index, 7).to(tl.uint32, bitcast=True)
        sign = tl.where(number < one_in, 1.0, tl.where(number < 2 * one_in, -1.0, 0.0))
        total += tl.sum(x[:, None] * sign, axis=0)
    tl.store(y_ptr + row * k + columns, total * size, mask=columns < k)


def project(x, k, s=3, seed=0):
    y = torch.empty(x.shape[0], k, device=x.device)
    grid = (x.shape[0], triton.cdiv(k, 64))
    project_kernel[grid](
        x, y, x.shape[1], k, seed, 2**32 // (2 * s), (s / k) ** 0.5, 32, 64
    )
    return y


points, k, s = torch.randn(4, 1000, device=runtime.DEVICE), 256, 3
number = reference.philox(0, torch.arange(1000 * k, device=runtime.DEVICE), 7)[
    :, 0
].view(1000, k)
one_in = 2**32 // (2 * s)
R = (
    torch.where(number < one_in, 1.0, torch.where(number < 2 * one_in, -1.0, 0.0))
    * (s / k) ** 0.5
)
y, truth = project(points, k), points.double() @ R.double()
lab.check(
    "A projection", [lab.Case("(4, 1000) to 256", "forward", y, points @ R, truth)]
)

# %%

# Folded: Are the distances between four points preserved?
kept = torch.pdist(y) / torch.pdist(points)
lab.table(
    [{"distances": "smallest", "after / before": f"{kept.min():.3f}"}]
    + [{"distances": "largest", "after / before": f"{kept.max():.3f}"}]
    + [
        {
            "distances": "typical, 1 ± 1/√(2k)",
            "after / before": f"1 ± {(2 * k) ** -0.5:.3f}",
        }
    ],
    "Distances between four points, after the projection divided by before",
)

# %%
# References
# ----------
#
# - Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov. *Dropout: a simple way to prevent
#   neural networks from overfitting.* JMLR 15, 2014.
# - Salmon, Moraes, Dror, Shaw. *Parallel random numbers: as easy as 1, 2, 3.* SC 2011.
# - Chen, Xu, Zhang, Guestrin. *Training deep nets with sublinear memory cost.* 2016.
# - Achlioptas. *Database-friendly random projections.* Journal of Computer and System Sciences 66,
#   2003.

# %%

# Closing
reached = {
    str(d).removeprefix("torch."): forward.share("Kernel Book", dtype=d) for d in DTYPES
}
lab.finish(
    f"{min(reached.values()):.0%} to {max(reached.values()):.0%} of the speed of a copy at "
    f"{forward.points[0]['elements']:,} elements, and no mask in memory"
)
