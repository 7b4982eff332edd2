"""
Low-memory dropout
==================

Dropout tosses a coin for every element, and needs the same coins again in the backward pass.
*Does it have to remember them?*

You will learn

- what a stored mask costs in memory and in time, and how a single seed replaces it;
- how a counter-based generator gives every element its own random number, in any order;
- why one number a call keeps the GPU busy with arithmetic, and four a call let it run at the speed
  of a copy.

The chapter runs on any NVIDIA GPU. Without one, its checks run in Triton's interpreter, and its
speeds are those of a recorded run.
"""

# sphinx_gallery_thumbnail_number = 5
import torch
import torch.nn.functional as F

from kernelbook import dropout, lab, masked_dropout, reference, runtime, seeded_dropout
from kernelbook.ops.dropout import (
    _plan,
    _rand_dropout,
    _run,
    _seeded_dropout,
    masked_dropout_kernel,
    rand_dropout_kernel,
    seeded_dropout_kernel,
    seeded_gradient,
)

lab.start("dropout", "kernelbook.ops.dropout")

# %%
# The problem in PyTorch
# ----------------------
#
# What does dropout do? In training it sets each element to zero with probability :math:`p` and
# divides the others by :math:`1 - p`. The division keeps the mean where it was, so that nothing
# has to change when training is over.


def simple_dropout(x, p):
    keep = torch.rand_like(x) >= p
    return x * keep / (1 - p)


# %%
# How fast could this be? A kernel must read ``x`` once and write ``y`` once. In 16 bits that is
# 4 bytes an element, and no version can move fewer. The function above has four operations.
# Each reads its inputs from memory and writes its output back:
#
# - ``rand_like`` writes 2 bytes;
# - the comparison reads 2 and writes a mask of 1;
# - the product reads 2 and 1 and writes 2;
# - the division reads 2 and writes 2.
#
# That is 14 bytes instead of 4. One kernel that does all of it at once needs only the 4. But what
# about the backward pass? It multiplies the gradient with the *same* mask, so autograd keeps the
# mask: one byte for every element, from the forward pass to the backward pass.
#
# .. image:: /figures/dropout-bytes.svg
#    :alt: Bars of the bytes moved for each element in 16 bits. With a stored mask, forward and
#          backward move 5 bytes each, and the mask of 1 byte stays in memory between them. With a
#          seed, both move 4 bytes, and 8 bytes in all stay in memory.
#
# How much memory is that in practice? Let us run both versions on a large input and ask the
# allocator what is still held after the forward pass, beside ``x`` and ``y``. Of this book's two
# operators, ``masked_dropout`` is given a mask. ``dropout`` draws a seed, and calls
# ``seeded_dropout`` with it.


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
# Wherever the mask is stored, it costs a byte for every element, half as much again as the float16
# activation itself. The seed costs 8 bytes for any input, rounded up to the smallest piece of
# memory that the allocator hands out.
#
# The idea
# --------
#
# How can a seed replace the mask? An ordinary generator will not do. It has a state, and each
# number comes from the one before. Thousands of threads cannot share such a state, and the
# backward pass could not start in the middle.
#
# A *counter-based* generator has no state. It is a function: give it a seed and a counter, and it
# returns random bits. The same two always give the same bits. So let the counter be the element's
# own index. Any thread can then draw the number of any element, in any order, now or later. The
# backward pass draws the same numbers again, and there is nothing to store.
#
# .. image:: /figures/dropout-philox.svg
#    :alt: Eight elements in two groups of four. The seed and the counter i // 4 enter one call of
#          Philox for each group. Each call gives four numbers, one for each element. An element is
#          kept and scaled where its number is at least p times two to the power of 32, and is
#          zero elsewhere.
#
# The generator here is called Philox. One call takes a counter of 128 bits and returns 128 random
# bits: four numbers of 32 bits. So one call serves four elements. Element ``i`` uses the call with
# counter ``i // 4`` and takes number ``i % 4`` of the four.
#
# The mathematics
# ---------------
#
# **Forward.** Let :math:`r_i` be the number of element :math:`i`, uniform in
# :math:`\{0, \dots, 2^{32} - 1\}`. Keep the element where :math:`r_i` reaches a threshold:
#
# .. math::
#
#    y_i = \begin{cases}
#      \dfrac{x_i}{1 - p} & \text{if } r_i \ge p \cdot 2^{32} \\
#      0 & \text{otherwise}
#    \end{cases}
#
# The condition holds with probability :math:`1 - p`, so the mean of :math:`y_i` is
# :math:`(1 - p) \cdot x_i / (1 - p) = x_i`. The threshold is rounded to an integer, which changes
# :math:`p` by at most :math:`2^{-33}`. Then the comparison is one of integers, and there is no need
# to turn random bits into a float first.
#
# **Backward.** Each output depends on one input, by a factor that is :math:`1 / (1 - p)` or zero.
# So the gradient is multiplied with the same factor:
#
# .. math::
#
#    dx_i = \begin{cases}
#      \dfrac{dy_i}{1 - p} & \text{if } r_i \ge p \cdot 2^{32} \\
#      0 & \text{otherwise}
#    \end{cases}
#
# That is dropout again, with ``dy`` in the place of ``x``. One kernel serves both passes.
#
# **Philox.** How does a function of a counter look random? By mixing, again and again. Philox
# splits the counter into four words of 32 bits, :math:`(c_0, c_1, c_2, c_3)`, and the seed into
# two, :math:`(k_0, k_1)`. One round multiplies :math:`c_0` by a constant :math:`A` and :math:`c_2`
# by a constant :math:`B`. Each product has 64 bits: a high half, written hi, and a low half, lo.
# The exclusive or, written :math:`\oplus`, mixes in the seed.
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
# Then the two words of the seed are raised by constants of their own, and the next round begins. A
# high half depends on the whole word. So a change of one bit of the counter spreads, from round to
# round, until it reaches all 128.
#
# Could two counters give the same numbers? No: a round can be undone. :math:`A` and :math:`B` are
# odd, and multiplying by an odd number modulo :math:`2^{32}` loses nothing. So :math:`c_2` can be
# found from :math:`c_1'`, then :math:`c_1` from :math:`c_0'`, and the others in the same way. A
# step that can be undone never sends two counters to one place.
#
# The kernels
# -----------
#
# How does a kernel look in Triton? It is a Python function with the decorator ``@triton.jit``.
# Many *programs* run it at once, and each works on a block of elements. Arguments marked
# ``tl.constexpr`` are known when the kernel is compiled. ``tl.arange`` makes a block of numbers,
# ``tl.load`` and ``tl.store`` read and write memory at a block of addresses, and arithmetic works
# on whole blocks.
#
# We climb in three steps. The first kernel is the baseline: it reads a mask that somebody stored.

lab.source(masked_dropout_kernel)

# %%
# A program finds its place with ``tl.program_id``. The last block may stick out over the end, so
# every load and store is masked with ``inside``.
#
# Why ``.to(tl.int64)``? A program's number has 32 bits, and so would its product with the block
# size. Past element :math:`2^{31}` it would wrap around to a negative address.
#
# Who starts the programs? In Triton ``kernel[grid](...)`` does, once for each number of the grid.
# With a grid of two numbers, ``tl.program_id(1)`` counts along the second. The book's operators
# hand the kernel, the grid and all but the tensors to a ``Launch``, which does the same. It
# remembers which compiled kernel that was, so that Triton need not look at every argument again.

lab.source(_plan)

# %%

lab.source(_run)

# %%
# ``num_warps`` says how many *warps* of 32 threads run a program. Four warps for 1,024 elements
# leave eight to a thread.
#
# The second kernel draws a number for each element. This is how dropout is usually written.

lab.source(rand_dropout_kernel)

# %%
# The mask is gone, and with it a byte an element. But look at what ``tl.rand`` does: it calls
# Philox with the element's index, gets four numbers, and throws three of them away.
#
# The third kernel uses all four. It has three pieces. The first finds the place, as before, and
# loads ``x`` early, so that the load is under way while the random numbers are computed.

lab.source(seeded_dropout_kernel, "place")

# %%
# The second piece makes the random numbers. A block of ``BLOCK_SIZE`` elements needs a quarter as
# many counters. Four blocks of numbers come back, ``r0`` to ``r3``, and must be laid out so that
# number 0 meets element 0, number 1 element 1, and so on. ``tl.interleave(a, b)`` takes turns
# between two blocks. First it makes r0 r2 r0 r2 ... and r1 r3 r1 r3 ..., and then it takes turns
# between these: r0 r1 r2 r3 ...

lab.source(seeded_dropout_kernel, "draw")

# %%
# Does this cost anything? A thread that loads 16 bytes at once holds consecutive elements. If it
# also computes the four numbers of these very elements, nothing has to move between threads. A
# table further down shows what the compiler made of it.
#
# The seed may be an integer or a pointer to one. ``dropout`` draws its seed on the GPU, and the
# kernel reads it there. So the host never waits for the GPU to tell it a number.

lab.source(seeded_dropout_kernel, "decide")

# %%
# The last piece compares, scales in float32 and stores. It selects with ``tl.where`` instead of
# multiplying with the mask: zero times infinity would be NaN, and a dropped element must be zero.
#
# Autograd is told about the kernel once. The backward pass calls the same operator with the same
# seed, so gradients of gradients work too. It is an operator of PyTorch's dispatcher, so that
# ``torch.compile`` finds one node here and does not look inside.

lab.source(seeded_gradient)

# %%
# Is it right?
# ------------
#
# Before we ask how fast it is, we check it. The truth is computed in float64, with a Philox
# written in plain PyTorch that shares no code with the kernel. The table also shows the error that
# PyTorch makes in the same dtype with the same mask. Ours may be off by twice PyTorch's error, or
# twice half a unit in the last place, whichever is larger: no result that is rounded to this dtype
# can promise less.


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
# The mask must depend on the seed and the index alone. If the block size or the shape changed it,
# a tuned kernel would train another network.


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
lab.table(rows, "One seed, one mask")

# %%
# Is it random enough?
# --------------------
#
# A mask that is right may still be a bad coin. What would a bad coin look like? It would keep too
# many elements or too few. Or one toss would tell us something about another: the neighbour, the
# toss some places on, the same element under the next seed.
#
# Each suspicion becomes a number. Subtract from every coin its mean :math:`q = 1 - p`. Then sum the
# coins, or sum the products of pairs of coins. For a fair coin each sum has mean zero and a known
# standard deviation. Divide by it, and call the result :math:`z`. A fair coin gives
# :math:`|z| > 5` less than once in a million tests.


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
lab.table(rows, f"The mask as a coin, {n:,} tosses, run now")

# %%
# How many rounds does that take? Triton's ``tl.rand`` runs 10 unless it is told otherwise. Philox's
# authors found that 7 pass every test of the hardest published suite, and recommend 10 for a margin
# (Salmon et al., 2011). Rounds cost time, so the kernel uses 7. That choice deserves evidence, so
# here are the same tests with every number of rounds.


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
rounds

# %%


# Drawing
def worst_by_rounds(rows):
    return {
        row["rounds"]: max(z for k, z in row.items() if k != "rounds") for row in rows
    }


def in_words(rows):
    found = (f"{r}: {z:.3g}" for r, z in worst_by_rounds(rows).items())
    return f"Worst |z| by rounds: {', '.join(found)}."


def curve(axes, rows):
    worst = worst_by_rounds(rows)
    axes.semilogy(worst.keys(), worst.values(), "o-", color=lab.colour("Kernel Book"))
    axes.axhline(5, linestyle="--", color=lab.colour("copy"))
    axes.annotate(
        "a fair coin stays below 5", (10, 5.6), ha="right", color=lab.colour("copy")
    )
    axes.set(xlabel="rounds of Philox", ylabel="worst |z|", xticks=list(worst))


lab.draw(rounds, "How many rounds make a fair coin?", in_words, curve)

# %%

# Reading
worst = worst_by_rounds(rounds.rows)
fewest = min(
    (r for r in worst if all(worst[s] < 5 for s in worst if s >= r)), default=None
)
nan = float("nan")
lab.read(
    f"With one round the coin is broken: |z| reaches {worst.get(1, nan):,.0f}. With 5 it is "
    f"{worst.get(5, nan):.0f}. That flaw is small: z grows with the root of the number of tosses, "
    f"and 100,000 of them would show {worst.get(5, nan) * (1e5 / 2**28) ** 0.5:.1f}. "
    f"From {fewest} rounds on, none of these tests can tell the mask from fair "
    f"coins; with 7 the worst |z| is {worst.get(7, nan):.1f}. Still, our tests are few. The "
    f"kernel runs 7 rounds and not {fewest}, because 7 is where its authors' far harder tests "
    "begin to pass."
)

# %%
# Checkpointing
# -------------
#
# Activation checkpointing saves memory by running the forward pass twice: once to get the output,
# and again in the backward pass to rebuild what was thrown away. Dropout must drop the same
# elements both times, or the gradient belongs to another network.
#
# PyTorch takes care of this. ``torch.utils.checkpoint`` saves the state of the generators, that of
# the CPU and that of the GPU, before the first run and restores it for the second. ``dropout``
# draws its seed from the generator, so it draws the same seed twice. This can be switched off,
# with ``preserve_rng_state=False``. What happens then?

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
        masks_of_both_runs(operator, preserve_rng_state=state)
        for state in (True, False)
    )
    rows.append(
        {"operator": name, "state restored": str(kept), "not restored": str(lost)}
    )
lab.table(rows, "Is the mask of the second run that of the first?")

# %%
# With the state restored, all agree. Without it, the two that draw from the generator get another
# mask, and the gradient is silently wrong. A seed that is passed by hand is the same in both runs.
# But draw it anew for every step, outside the checkpointed function: a constant seed drops the same
# elements for the whole training.
#
# How fast is it?
# ---------------
#
# The limit is a copy: it reads ``x``, writes ``y`` and does nothing else. We time it beside
# everything else, in the same process and in turns. "Kernel Book" is the public ``dropout``, which
# also draws its seed. One warning about "stored mask": its time does not include drawing the mask.
# It is given one for nothing.


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


# Drawing
rungs = ["simple_dropout", "stored mask", "one a call", "four a call", "seven rounds"]
lab.ladder(
    forward,
    "The ladder, forward, 2²⁸ elements",
    [*rungs, "Kernel Book", "PyTorch", "torch.compile"],
    by="dtype",
    where={"elements": 2**28},
)

# %%

# Reading
shown = [*rungs, "Kernel Book", "PyTorch", "torch.compile"]
half = {name: 100 * forward.share(name, dtype="float16") for name in shown}
single = 100 * forward.share("Kernel Book", dtype="float32")
lab.read(
    f"Take float16. The four operations in PyTorch reach {half['simple_dropout']:.0f} % of a copy; "
    f"their bytes alone would allow {100 * 4 / 14:.0f} %, and drawing the numbers takes the rest. "
    f"PyTorch's own kernel, which also writes a mask, reaches {half['PyTorch']:.0f} %. Reading a "
    f"stored mask in one kernel gives {half['stored mask']:.0f} %: the mask is a fifth byte beside "
    f"four. Drawing one number a call moves the fewest bytes, and yet stops at "
    f"{half['one a call']:.0f} %, because arithmetic is now the limit. The kernel that "
    f"`torch.compile` writes draws one a call too, and reaches {half['torch.compile']:.0f} %."
)

# %%

# Reading
lab.read(
    f"Four a call reach {half['four a call']:.0f} %, and with seven rounds instead of ten "
    f"{half['seven rounds']:.0f} %. With the seed drawn as well, the public function reaches "
    f"{half['Kernel Book']:.0f} %. In float32 there are twice as many bytes to hide the same "
    f"arithmetic behind, and it reaches {single:.0f} %."
)

# %%
# Is backward as fast? It should be: it is the same kernel.


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
lab.ladder(
    backward,
    "Backward, 2²⁸ elements",
    ["PyTorch", "torch.compile", "stored mask", "Kernel Book"],
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
    f"In float16 PyTorch's backward reaches {back['PyTorch']:.0f} % of a copy: it reads the mask "
    f"that forward stored, so that 5 bytes move in the place of 4. Ours draws the mask again and "
    f"reaches {back['Kernel Book']:.0f} %."
)

# %%
# What does Philox cost?
# ----------------------
#
# The ladder says that arithmetic can be the limit. How much arithmetic is it? One round has two
# wide multiplications, a few exclusive ors and two additions to the seed. To see the cost, vary the
# number of rounds and nothing else. As long as memory is the limit, more rounds are free. From the
# point where arithmetic takes longer, every round shows.


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
lab.plot(cost, "More rounds: free, until they are not", share=True, log=False)

# %%


# Reading
def picoseconds(name, rounds):
    return cost.milliseconds_at(name, rounds=rounds) / 2**28 * 1e9


copy = picoseconds("copy", 7)
slope = {
    name: (picoseconds(name, 28) - picoseconds(name, 20)) / 8
    for name in ("one a call", "four a call")
}
lab.read(
    f"The copy takes {copy:.2f} picoseconds of the GPU's time for each element. With ten rounds, "
    f"one number a call takes {picoseconds('one a call', 10):.2f}, and four a call "
    f"{picoseconds('four a call', 10):.2f}. With seven, four a call takes "
    f"{picoseconds('four a call', 7):.2f}: the arithmetic hides behind the bytes. Where the lines "
    f"fall, each further round costs {slope['one a call']:.2f} picoseconds an element with one "
    f"number a call and {slope['four a call']:.2f} with four. A call costs its rounds however many "
    f"of its numbers are used, and four elements share it."
)

# %%
# What did the compiler make of the kernels? A *register* holds 4 bytes for one thread; a *spill*
# is a value that found no register. *Shared memory* is the store on chip through which the threads
# of a program exchange values, and a *shuffle* exchanges them within a warp.


def launches(dtype):
    x = torch.ones(2**20, device=runtime.DEVICE, dtype=dtype)
    keep = x > 0
    return lambda: (
        masked_dropout(x, keep, 0.5),
        _rand_dropout(x, 0.5, 7),
        seeded_dropout(x, 0.5, 7),
    )


lab.facts(
    "What the compiler made of the kernels",
    {
        "float16": lambda: launches(torch.float16)(),
        "float32": lambda: launches(torch.float32)(),
    },
)

# %%
# Nothing spills. The seeded kernel uses neither shared memory nor shuffles, so the four numbers of
# a call are indeed computed where they are needed.
#
# Small inputs tell another story. A launch takes some microseconds, however little it does.

sizes = lab.bench(
    "sizes",
    [{"elements": 2**power, "dtype": torch.float16} for power in range(14, 29, 2)],
    providers,
    limit="copy",
    work="2 * elements * itemsize",
)
lab.plot(sizes, "From small to large, forward, float16")

# %%

# Reading
small = 1e3 * sizes.milliseconds_at("Kernel Book", elements=2**14)
bytes_time = 1e3 * sizes.milliseconds_at("copy", elements=2**28) / 2**14
lab.read(
    f"At 16Ki elements a call takes {small:.1f} µs. Moving its bytes at full speed would take "
    f"{bytes_time:.2f} µs. The rest is the fixed cost of two launches, one that draws the seed "
    "and one of the kernel. A faster kernel cannot help: only doing more in one launch can, by "
    "fusing dropout with its neighbours."
)

# %%
# That was the GPU. The host, too, needs its time for a call: it checks the input, allocates the
# output and queues the kernels. :doc:`/hardware` says where that time goes.

x = torch.randn(64, 1024, device=runtime.DEVICE, dtype=torch.float16)
lab.host_times(
    {"Kernel Book": lambda x: dropout(x, 0.5), "PyTorch": lambda x: F.dropout(x, 0.5)},
    x,
)

# %%
# What breaks it
# --------------
#
# Four mistakes are easy to make, and most give no error. Here is what each does.
#
# **The program's number is forgotten.** If the counter starts at zero in every program, every block
# gets the same mask. The keep rate looks harmless, and the coins are copies.

block = 2048
right = seeded_dropout(torch.ones(256 * block, device=runtime.DEVICE), 0.5, seed=3) != 0
wrong = (
    seeded_dropout(torch.ones(block, device=runtime.DEVICE), 0.5, seed=3) != 0
).repeat(64)
rows = [
    {
        "mask": name,
        "keep rate": f"{mask.float().mean():.3f}",
        "z, one block on": f"{z_pairs(mask[:-block], mask[block:], 0.5):.1f}",
    }
    for name, mask in {"right": right, "the same in every block": wrong}.items()
]
lab.table(rows, "Copies of one block")

# %%
# **Two layers share a seed.** Where their shapes agree, so do their masks. The second layer drops
# nothing that the first has left. Draw a new seed for every call, as ``dropout`` does.

x = torch.ones(2**16, device=runtime.DEVICE)
shared = seeded_dropout(seeded_dropout(x, 0.5, seed=1), 0.5, seed=1)
apart = seeded_dropout(seeded_dropout(x, 0.5, seed=1), 0.5, seed=2)
lab.table(
    [
        {
            "seeds of two layers": "1 and 1",
            "kept": f"{(shared != 0).float().mean():.3f}",
        },
        {
            "seeds of two layers": "1 and 2",
            "kept": f"{(apart != 0).float().mean():.3f}",
        },
        {"seeds of two layers": "what independence gives", "kept": f"{0.5 * 0.5:.3f}"},
    ],
    "The share of elements that survive two layers with p = 0.5",
)

# %%
# **The scale is forgotten.** Then the mean of the output shrinks with every layer, and a network
# that was trained so behaves differently once dropout is switched off.

unscaled = x * (seeded_dropout(x, 0.5, seed=1) != 0)
lab.table(
    [
        {"output": "scaled", "mean": f"{seeded_dropout(x, 0.5, seed=1).mean():.3f}"},
        {"output": "not scaled", "mean": f"{unscaled.mean():.3f}"},
    ],
    "The mean of the output, for an input of ones",
)

# %%
# **The offset has 32 bits.** Multiply a program's number by the block size in int32, and past
# element :math:`2^{31}` the address is negative. On a GPU that is a crash at best, and somebody
# else's memory at worst.

program = torch.tensor(2**31 // block, dtype=torch.int32)
lab.table(
    [
        {"arithmetic": "int32", "first element": f"{(program * block).item():,}"},
        {
            "arithmetic": "int64",
            "first element": f"{(program.long() * block).item():,}",
        },
    ],
    f"Where program {program.item():,} of a large launch begins",
)

# %%
# Exercises
# ---------
#
# **1. A seed a row.** Give each row of a matrix a seed of its own, so that a row keeps its mask
# wherever it stands in the batch. A grid of two numbers helps: rows, and blocks of columns. Test
# it: move a row, and its mask must move along.

# %%

# Solution: a seed a row
import triton
import triton.language as tl


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
# kernel for a matrix that takes the two strides of ``x`` instead. The mask must not change: it
# belongs to the element's number in row-major order, not to its address. A row may begin in the
# middle of a group of four, so one call an element is the simple way.

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
# **3. A random projection that is never stored.** By the lemma of Johnson and Lindenstrauss, a
# random matrix :math:`R` of shape (d, k) maps points of d dimensions to k and nearly keeps their
# distances. Its entries may be sparse: :math:`\pm\sqrt{s / k}` with probability :math:`1 / (2s)`
# each, and zero otherwise. With d = 1,000,000 the matrix would be large. Write :math:`x R` so that
# each entry of :math:`R` is drawn where it is used. ``tl.randint`` gives one number an index, and
# ``tl.sum`` adds up a block along an axis.

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
# Are the distances nearly kept? The typical error is one part in :math:`\sqrt{2k}`, and the worst
# of six pairs may be a few times that.

kept = torch.pdist(y) / torch.pdist(points)
lab.table(
    [{"distances": "smallest", "after / before": f"{kept.min():.3f}"}]
    + [{"distances": "largest", "after / before": f"{kept.max():.3f}"}]
    + [{"distances": "typical error", "after / before": f"{(2 * k) ** -0.5:.3f}"}],
    "Distances between four points, after the projection over before",
)

# %%
# References
# ----------
#
# - Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov. *Dropout: a simple way to prevent
#   neural networks from overfitting.* JMLR 15, 2014.
# - Salmon, Moraes, Dror, Shaw. *Parallel random numbers: as easy as 1, 2, 3.* SC 2011.
# - Chen, Xu, Zhang, Guestrin. *Training deep nets with sublinear memory cost.* 2016.
# - Achlioptas. *Database-friendly random projections.* Journal of Computer and System Sciences
#   66, 2003.

reached = {
    str(d).removeprefix("torch."): forward.share("Kernel Book", dtype=d) for d in DTYPES
}
lab.finish(
    f"{min(reached.values()):.0%} to {max(reached.values()):.0%} of the speed of a copy, and no "
    "mask in memory"
)
