"""
Attention, tile by tile
=======================

Attention compares every query with every key. The table of scores grows with the square of the
length. *Must that table ever exist?*

You will learn

- how a softmax can carry a weighted sum along, so that a tile of scores lives for one step only;
- which tiles a causal mask leaves whole, which it cuts, and which are never computed;
- what brings a correct kernel close to the speed of a matrix product, and how little memory it
  needs.

The chapter runs on any NVIDIA GPU. Without one, its checks run in Triton's interpreter, and its
speeds are those of a recorded run.
"""

# sphinx_gallery_thumbnail_number = 2
import heapq
import importlib.util
import inspect
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.ops.attention import attention, forward, tuned
from kernelbook.ops.attention.tiled import key_tiles, tiled_attention, tiled_forward
from kernelbook.ops.attention.tiles import describe, fit, head_of, load_tile, visible

lab.start("attention_forward", "kernelbook.ops.attention")

# %%
# The problem in PyTorch
# ----------------------
#
# Each query is a vector, and so is each key. Their product says how well the two go together: it
# is a *score*. Softmax turns the scores of a query into weights. The result is the sum of the
# *values*, one a key, by these weights.


def standard_attention(q, k, v, is_causal=False):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if is_causal:  # a query sees the keys up to its own place, and no later ones
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill_(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


# %%
# All tensors are (batch, heads, length, head_dim). The heads are independent of each other, so let
# us count for one head, with :math:`N` queries, :math:`N` keys and head_dim :math:`D`.
#
# **Operations.** A score is a product of two vectors: :math:`D` multiplications and :math:`D`
# additions. There are :math:`N^2` scores. The second product costs the same. So
#
# .. math::
#
#    \text{FLOPs} = 4\, N^2 D
#
# **Bytes.** The first product writes the scores. Softmax reads them and writes the weights. The
# second product reads the weights. That is four trips of :math:`N^2` numbers. Queries, keys, values
# and the result are four trips of :math:`N D` numbers, and no version can do with less.

rows = []
for length in (1024, 4096, 16384, 65536):
    flops = 4 * length**2 * 128
    least = 4 * length * 128 * 2  # bytes
    table = 4 * length**2 * 2
    rows.append(
        {
            "length": length,
            "GFLOP": round(flops / 1e9, 2),
            "scores, GiB": round(table / 2**30, 3),
            "others, GiB": round(least / 2**30, 4),
            "FLOP / byte": round(flops / (table + least)),
            "at best": round(flops / least),
        }
    )
lab.table(rows, "Bytes moved and operations of one head with head_dim 128, in 16 bits")

# %%
# How many operations must a byte be good for? So many as the machine can do while it moves one. We
# measure both speeds.

MATMUL = 8192


def matmul_operands():
    size = (2, MATMUL, MATMUL)
    return torch.randn(size, device=runtime.DEVICE, dtype=torch.bfloat16)


def balance():
    from triton.testing import do_bench

    a, b = matmul_operands()
    x = torch.empty(2**30, device=runtime.DEVICE, dtype=torch.int8)
    y = torch.empty_like(x)
    flops = 2 * MATMUL**3 / do_bench(lambda: a @ b) * 1e3
    moved = 2 * x.numel() / do_bench(lambda: y.copy_(x)) * 1e3
    row = {"matmul, TFLOP/s": round(flops / 1e12), "copy, GB/s": round(moved / 1e9)}
    return [row | {"FLOP a byte": round(flops / moved)}]


machine = lab.measure("What the machine can do, bfloat16", balance)
machine

# %%

# Reading
nan = float("nan")
needed = machine.rows[0]["FLOP a byte"] if machine.rows else nan
lab.read(
    f"This machine needs {needed:.0f} operations for each byte. Standard attention has "
    f"{rows[-1]['FLOP / byte']} at the longest length, about half of head_dim, and "
    f"that grows no further. So it waits for memory at any length. Without the table of scores "
    f"there would be {rows[1]['at best']:,} at length 4,096, and it could be as fast "
    f"as a matrix product."
)

# %%
# **Memory.** Scores and weights exist at the same time. How much is that, and when does it no
# longer fit? We measure the peak beyond inputs and output, for 16 heads.


def peak_memory(run, *inputs):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        out = run(*inputs)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    extra = torch.cuda.max_memory_allocated() - before
    return round((extra - out.numel() * out.itemsize) / 2**20, 2)


def memory_experiment():
    table = []
    for length in (2**power for power in range(10, 18)):
        size = (3, 1, 16, length, 128)
        inputs = torch.randn(size, device=runtime.DEVICE).bfloat16()
        row = {"length": length}
        row["PyTorch, MiB"] = peak_memory(standard_attention, *inputs)
        row["Kernel Book, MiB"] = peak_memory(attention, *inputs)
        table.append(row)
    return table


memory = lab.measure("Peak memory beyond q, k, v and out", memory_experiment)
memory

# %%


# Drawing
def ends(rows):
    return f"Two lines over the length. At the last, {rows[-1]}."


def two_lines(axes, rows):
    for name, marker in (("PyTorch", "o"), ("Kernel Book", "s")):
        found = [(r["length"], r[f"{name}, MiB"]) for r in rows]
        found = [(x, y) for x, y in found if not isinstance(y, str)]
        axes.plot(
            *zip(*found, strict=True), color=lab.colour(name), marker=marker, label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="length", ylabel="MiB")


lab.draw(memory, "Memory beyond inputs and output", ends, two_lines)

# %%

# Reading
fits = [r for r in memory.rows if not isinstance(r["PyTorch, MiB"], str)]
fails = [r["length"] for r in memory.rows if isinstance(r["PyTorch, MiB"], str)]
last = fits[-1] if fits else {}
lab.read(
    f"At length {last.get('length', nan):,} standard attention needs "
    f"{last.get('PyTorch, MiB', nan) / 1024:,.1f} GiB more than its inputs and its output. The "
    f"kernel of this chapter needs {last.get('Kernel Book, MiB', nan):,.1f} MiB: one number for "
    f"each query. "
    + (
        f"At {fails[0]:,} the standard version no longer fits."
        if fails
        else "On this GPU the standard version fitted at every length."
    )
)

# %%
# The idea
# --------
#
# What does one query need? All keys and all values, but not at the same time. A softmax can be
# computed block by block, as the chapter on online softmax shows. So take a *tile* of queries, and
# let tiles of keys and values come past. Each time, compute a small tile of scores, use it, and
# forget it.
#
# .. image:: /figures/attention-memory.svg
#    :alt: Above, standard attention: q, k, v and out are narrow, the scores and the weights are two
#          large squares in memory that grow as the length squared. Below, tile by tile: q, k, v,
#          out and one column lse in memory; on chip a tile each of q, k, v, scores and acc.
#
# What must be carried from tile to tile? The two numbers of online softmax, and the weighted sum so
# far.
#
# .. image:: /figures/attention-stream.svg
#    :alt: A tile of q stays. Tiles of k and v stream past, one at a time. Each gives scores, from
#          these m, alpha and p, and with them l = l alpha + sum of p and acc = acc alpha + p v.
#          m, l and acc are carried to the next tile. After the last: out = acc / l and
#          lse = m + log l, written once.
#
# The mathematics
# ---------------
#
# **Three things to carry.** Let :math:`s_j` be the scores of one query, and :math:`v_j` the values.
# For the keys seen so far, a set :math:`A`, keep
#
# .. math::
#
#    \begin{aligned}
#    m_A &= \max_{j \in A} s_j \\
#    l_A &= \sum_{j \in A} e^{s_j - m_A} \\
#    acc_A &= \sum_{j \in A} e^{s_j - m_A}\, v_j
#    \end{aligned}
#
# The last is a vector of :math:`D` numbers. If :math:`A` holds all keys, the result is
# :math:`acc_A / l_A`: numerator and denominator have the same factor :math:`e^{-m_A}`, and it
# cancels.
#
# **Two sets become one.** For disjoint sets :math:`A` and :math:`B`, let :math:`m` be the larger
# maximum. Every term of :math:`A` was written relative to :math:`m_A`. To write it relative to
# :math:`m`, multiply by :math:`e^{m_A - m}`:
#
# .. math::
#
#    \begin{aligned}
#    m &= \max(m_A,\, m_B) \\
#    l &= l_A\, e^{m_A - m} + l_B\, e^{m_B - m} \\
#    acc &= acc_A\, e^{m_A - m} + acc_B\, e^{m_B - m}
#    \end{aligned}
#
# because :math:`e^{s_j - m_A}\, e^{m_A - m} = e^{s_j - m}`. The result is again of the form above,
# for the set :math:`A \cup B`. How the sets were cut does not matter.
#
# **The loop.** Now let :math:`A` be the tiles so far and :math:`B` the next tile. Choose the new
# maximum :math:`m` first and compute the terms of the tile relative to it at once. Then its own
# factor is 1, and one factor is left:
#
# .. math::
#
#    \begin{aligned}
#    m &= \max(m_A,\, \max_{j \in B} s_j) \\
#    \alpha &= e^{m_A - m} \\
#    p_j &= e^{s_j - m} \\
#    l &= l_A\, \alpha + \sum_{j \in B} p_j \\
#    acc &= acc_A\, \alpha + \sum_{j \in B} p_j\, v_j
#    \end{aligned}
#
# By induction this is right after every tile. It holds for the empty set, where :math:`m = -\infty`
# and both sums are 0. If it holds before a tile, the merge makes it hold after.
#
# Why ``alpha``, then? It takes the old sums to the new scale. If the maximum did not change, it is
# 1.
#
# Let us try the merge on pieces, in a random order.


def triple(s, v):
    m = s.amax(-1, keepdim=True)
    p = (s - m).exp()
    return m, p.sum(-1, keepdim=True), p @ v


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    x, y = (a[0] - m).exp(), (b[0] - m).exp()
    return m, a[1] * x + b[1] * y, a[2] * x + b[2] * y


s, v = 10 * torch.randn(4, 300, dtype=torch.float64), torch.randn(300, 8).double()
truth = torch.softmax(s, -1) @ v
rows = []
for pieces in (2, 7, 100):
    parts = zip(s.tensor_split(pieces, 1), v.tensor_split(pieces), strict=True)
    triples = [triple(*part) for part in parts]
    while len(triples) > 1:
        i, j = sorted(torch.randperm(len(triples))[:2].tolist())
        triples.append(merge(triples.pop(j), triples.pop(i)))
    m, l_i, acc = triples[0]
    off = (acc / l_i - truth).abs().max().item()
    rows.append({"pieces": pieces, "off by": f"{off:.0e}", "right": off < 1e-13})
assert all(row["right"] for row in rows)
lab.table(rows, "4 queries, 300 keys, merged in a random order, float64")

# %%
# **Why divide once, at the end?** One could keep the average :math:`acc / l` after every tile
# instead. But the next step would first have to undo it:
#
# .. math::
#
#    \frac{acc}{l} = \frac{acc_A}{l_A} \cdot \frac{l_A\, \alpha}{l}
#    + \sum_{j \in B} \frac{p_j}{l}\, v_j
#
# Each tile would then scale its :math:`p_j` as well, one more product for every score. The
# result is the same, so it is work for nothing. The first FlashAttention did this, the second
# stopped.
#
# **Does l start at 0 or at 1?** You find both. The first factor ``alpha`` is
# :math:`e^{-\infty - m} = 0`, so whatever ``l`` started with is multiplied by zero. It can matter
# for one kind of query only: one that meets no tile at all. Here is the loop over two tiles, with
# three starts.


def sum_after(tiles, l_i):
    m = torch.tensor(-torch.inf)
    for s in tiles:
        m_new = torch.maximum(m, s.max())
        shift = 0 if m_new == -torch.inf else m_new  # exp(-inf - -inf) would be NaN
        l_i = l_i * (m - shift).exp() + (s - shift).exp().sum()
        m = m_new
    return f"{l_i:.4f}" if tiles else f"{l_i:.0f}"


two_tiles = torch.randn(2, 4)
masked = torch.full((2, 4), -torch.inf)
rows = [
    {
        "l starts at": start,
        "sees keys": sum_after(list(two_tiles), torch.tensor(start)),
        "all keys masked": sum_after(list(masked), torch.tensor(start)),
        "meets no tile": sum_after([], torch.tensor(start)),
    }
    for start in (0.0, 1.0, 5.0)
]
lab.table(rows, "l in the end")

# %%
# A start of 1 saves a division by zero for a query without tiles, and for no other. A query whose
# keys are all masked still ends at zero. So the division has to be guarded anyway, and the kernel
# starts at 0, which is what the sum of nothing is.
#
# **One number is enough for backward.** The gradient needs the weights again. A weight is
#
# .. math::
#
#    \begin{aligned}
#    P_{ij} &= \frac{e^{s_{ij} - m_i}}{l_i} \\
#    &= e^{s_{ij} - (m_i + \log l_i)}
#    \end{aligned}
#
# so maximum and sum are never needed apart. Forward stores :math:`lse_i = m_i + \log l_i` for each
# query: the logarithm of the sum of exponentials, 4 bytes. The weights need not be stored.

q, k, v = torch.randn(3, 1, 2, 100, 64, device=runtime.DEVICE)
_, lse = attention(q, k, v, return_lse=True)
scores = q.double() @ k.double().mT / 8
again = torch.exp(scores - lse.double().unsqueeze(-1))
off = (again - torch.softmax(scores, -1)).abs().max().item()
assert off < 1e-5
lab.table([{"largest difference of a weight": f"{off:.1e}"}], "Weights from lse alone")

# %%
# **May lse be uninitialised memory?** It is made by ``torch.empty``, and holds anything. That is
# harmless if every entry is written before one is read. Each query belongs to one program, and each
# program writes all of its queries. So fill it with NaN first, at lengths that no tile divides, and
# look for what is left.

empty = torch.empty


def poisoned(*args, **options):
    x = empty(*args, **options)
    return x.fill_(float("nan")) if x.is_floating_point() else x


rows = []
for seqlen_q, seqlen_k in ((1, 1), (33, 127), (100, 3)):
    q = torch.randn(1, 2, seqlen_q, 16, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 2, seqlen_k, 16, device=runtime.DEVICE)
    with mock.patch.object(torch, "empty", poisoned):
        out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    left = (out.isnan().sum() + lse.isnan().sum()).item()
    rows.append(
        {"queries": seqlen_q, "keys": seqlen_k, "NaN left in out and lse": left}
    )
    assert left == 0
lab.table(rows, "Outputs that were NaN before the kernel ran")

# %%
# Tiles in plain PyTorch
# ----------------------
#
# Before any kernel, here is the whole algorithm in PyTorch. A tile of queries begins with the
# triple of the empty set.

lab.source(tiled_forward, "begin")

# %%
# It meets one tile of keys after the other. ``q_i`` stays, ``k_j`` and ``v_j`` change.

lab.source(tiled_forward, "meet")

# %%
# Then come the lines of the loop, with the names of the mathematics. ``_finite`` puts a zero
# in the place of :math:`-\infty`: as long as a query has seen nothing, :math:`-\infty - (-\infty)`
# would not be a number.

lab.source(tiled_forward, "rescale")

# %%
# After the last tile, one division, and one logarithm.

lab.source(tiled_forward, "end")

# %%
# Which tiles of keys does a tile of queries meet? Without a mask, all. With a causal mask, the
# function below decides. We come back to it.

lab.source(key_tiles)

# %%
# Is it right? In float32 it may err by four times as much as PyTorch: each ``alpha`` is one more
# rounding.


def tiled_cases():
    for seqlen_q, seqlen_k, is_causal in (
        (100, 100, False),
        (100, 100, True),
        (40, 90, True),
    ):
        q = torch.randn(2, 3, seqlen_q, 32, device=runtime.DEVICE)
        k, v = torch.randn(2, 2, 3, seqlen_k, 32, device=runtime.DEVICE)
        ours = tiled_attention(q, k, v, is_causal=is_causal, block_m=32, block_n=16)
        theirs = standard_attention(q, k, v, is_causal)
        truth, _ = reference.attention(q, k, v, is_causal)
        what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * is_causal}"
        yield lab.Case(what, "forward", ours, theirs, truth, factor=4)


lab.check("Tiled PyTorch", tiled_cases())

# %%
# A first kernel
# --------------
#
# Now the same loop in Triton, as simply as it goes: addresses for every element, and a mask for
# every tile. The triple comes first.
#
# Why ``exp2``? The hardware has an instruction for :math:`2^x`, and none for :math:`e^x`. With
#
# .. math::
#
#    \begin{aligned}
#    e^{s - m} &= 2^{(s - m) \log_2 e} \\
#    &= 2^{s' - m'}
#    \end{aligned}
#
# all scores can be kept times :math:`\log_2 e = 1 / \ln 2`, and so can the maximum. That factor
# joins the scale, which multiplies every score anyway. So it costs nothing.

import triton
import triton.language as tl


@triton.jit
def _update(acc, l_i, m_i, qk, v):
    m_new = tl.maximum(m_i, tl.max(qk, axis=1))
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_exp)
    p = tl.exp2(qk - m_exp[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_new


# %%
# A range of keys is met tile by tile. ``n_visible`` says how many keys each query sees. With
# ``visits_ptr`` the kernel leaves a trace of each tile that it computes; we shall count them.


@triton.jit
def _meet(
    acc, l_i, m_i, q, k_ptr, v_ptr, visits_ptr, start, end, n_visible, seqlen_k,
    scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start_n in range(start, end, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        offsets = keys[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        if MASKED:
            inside = keys[:, None] < seqlen_k
            k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
        else:
            k, v = tl.load(k_ptr + offsets), tl.load(v_ptr + offsets)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
        if visits_ptr is not None:
            tl.atomic_add(visits_ptr + start_n // BLOCK_N, 2 if MASKED else 1)
    return acc, l_i, m_i


# %%
# The program around it reads a tile of queries once, and begins with nothing seen.


@triton.jit
def _begin(q_ptr, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1).to(tl.int64) * seqlen_q + queries
    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    exist = queries[:, None] < seqlen_q
    q = tl.load(q_ptr + offsets, mask=exist, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    return queries, offsets, exist, q, m_i, l_i, acc


# %%
# All keys are one range, and every tile is masked.


@triton.jit
def _first_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, visits_ptr, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    queries, offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, seqlen_q, HEAD_DIM, BLOCK_M
    )
    first = tl.program_id(1).to(tl.int64) * seqlen_k * HEAD_DIM
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    if IS_CAUSAL:
        n_visible = tl.minimum(queries + 1 + seqlen_k - seqlen_q, seqlen_k)
    acc, l_i, m_i = _meet(
        acc, l_i, m_i, q, k_ptr + first, v_ptr + first, visits_ptr, 0, seqlen_k,
        n_visible, seqlen_k, scale_log2, HEAD_DIM, BLOCK_N, MASKED=True,
    )  # fmt: skip
    out = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(out_ptr + offsets, out, mask=exist)


# %%
# One program for each tile of queries and each head. Is it right?

BLOCKS = {"BLOCK_M": 32, "BLOCK_N": 16}  # small, so that small inputs have many tiles


def run(kernel, q, k, v, is_causal, visits=None, **options):
    seqlen_q, head_dim = q.shape[-2:]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    options = BLOCKS | options
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]), q.shape[0] * q.shape[1])
    sizes = (seqlen_q, k.shape[-2], scale_log2)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal}
    kernel[grid](q, k, v, out, visits, *sizes, **constants, **options)
    return out


def first_cases(kernel, run=run):
    for seqlen_q, seqlen_k, is_causal in (
        (100, 100, False),
        (100, 100, True),
        (40, 90, True),
    ):
        for dtype in (torch.float32, torch.float16):
            q = torch.randn(1, 2, seqlen_q, 32, device=runtime.DEVICE).to(dtype)
            k, v = torch.randn(2, 1, 2, seqlen_k, 32, device=runtime.DEVICE).to(dtype)
            ours = run(kernel, q, k, v, is_causal)
            theirs = standard_attention(q, k, v, is_causal)
            truth, _ = reference.attention(q, k, v, is_causal)
            what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor=4)


lab.check("The first kernel", first_cases(_first_kernel))

# %%
# Causal stages
# -------------
#
# With a causal mask a query sees only keys up to its own place. The first kernel computes all tiles
# all the same, and then throws half of the scores away. What could it skip?
#
# .. image:: /figures/attention-stages.svg
#    :alt: Six tiles of queries and twelve tiles of keys, half as long. The diagonal runs from the
#          upper left to the lower right. In row r the first 2 r tiles are whole, the next two are
#          cut by the diagonal, and the rest is never computed.
#
# There are three kinds of tiles:
#
# - *whole*: every query of the tile sees every key. No mask is needed.
# - *cut*: the diagonal passes through. Some scores become :math:`-\infty`.
# - *beyond*: no query sees any key. There is nothing to compute.
#
# The whole ones come first, the cut ones next, and the loop ends there. So the loop is split into
# two *stages*. In most of the work there is then no mask at all. If the last query of a tile sees
# :math:`n` keys and the first :math:`f` of them, then :math:`\lfloor f / B \rfloor` tiles of
# :math:`B` keys are whole, and :math:`\lceil n / B \rceil` are computed.


@triton.jit
def _staged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, visits_ptr, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    queries, offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, seqlen_q, HEAD_DIM, BLOCK_M
    )
    first = tl.program_id(1).to(tl.int64) * seqlen_k * HEAD_DIM
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    seen_by_all, seen_by_some = seqlen_k, seqlen_k
    if IS_CAUSAL:
        n_visible = tl.minimum(queries + 1 + seqlen_k - seqlen_q, seqlen_k)
        seen_by_all = tl.maximum(tl.min(n_visible, axis=0), 0)
        seen_by_some = tl.max(n_visible, axis=0)
    whole = seen_by_all // BLOCK_N * BLOCK_N
    if visits_ptr is not None:
        visits_ptr += tl.program_id(0) * tl.cdiv(seqlen_k, BLOCK_N)
    acc, l_i, m_i = _meet(
        acc, l_i, m_i, q, k_ptr + first, v_ptr + first, visits_ptr, 0, whole,
        n_visible, seqlen_k, scale_log2, HEAD_DIM, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, l_i, m_i = _meet(
        acc, l_i, m_i, q, k_ptr + first, v_ptr + first, visits_ptr, whole, seen_by_some,
        n_visible, seqlen_k, scale_log2, HEAD_DIM, BLOCK_N, MASKED=True,
    )  # fmt: skip
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %% An animation
# The animation follows one program through both stages, with 4 queries and 4 keys in a tile and
# head_dim 2. In each iteration the loop loads a tile of ``k`` and of ``v`` and computes a tile of
# scores; where ``m_i`` rises, ``alpha`` is less than 1, and ``l_i`` and ``acc`` are rescaled before
# the new terms are added. Only the last tile, on the diagonal, is masked. The animation computes
# ``exp`` where the kernel computes ``exp2``.
#
# .. animation:: attention_loop

# %%

lab.check("With stages", first_cases(_staged_kernel))

# %%
# **Are the tiles beyond the diagonal really never computed?** Let us look at the trace. Each
# computed tile added 1 in the first stage, or 2 in the second.


def trace(seqlen_q, seqlen_k, is_causal):
    q = torch.randn(1, 1, seqlen_q, 16, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 1, seqlen_k, 16, device=runtime.DEVICE)
    tiles = triton.cdiv(seqlen_q, 32), triton.cdiv(seqlen_k, 16)
    visits = torch.zeros(tiles, dtype=torch.int32, device=runtime.DEVICE)
    run(_staged_kernel, q, k, v, is_causal, visits)
    return visits


marks = {0: "·", 1: "whole", 2: "cut"}
rows = []
for number, line in enumerate(trace(128, 128, True).tolist()):
    row = {"queries": f"tile {number}"}
    rows.append(row | {f"k {n}": marks[visits] for n, visits in enumerate(line)})
lab.table(rows, "Tiles that the kernel computed: 128 queries, 128 keys")

# %%
# And does the count agree with the formula, at other lengths, too? ``key_tiles`` from above lists
# what should be computed.

rows = []
for seqlen_q, seqlen_k, is_causal in (
    (128, 128, False), (128, 128, True), (100, 127, True), (40, 200, True), (200, 40, True)
):  # fmt: skip
    visits = trace(seqlen_q, seqlen_k, is_causal)
    expected = torch.zeros_like(visits)
    for number in range(len(visits)):
        sizes = (number * 32, seqlen_q, seqlen_k, 32, 16, is_causal)
        for start, _, is_cut in key_tiles(*sizes):
            expected[number, start // 16] = 2 if is_cut else 1
    row = {"queries, keys": f"{seqlen_q}, {seqlen_k}{', causal' * is_causal}"}
    row |= {"tiles": visits.numel()}
    row |= {name: (visits == n).sum().item() for n, name in ((1, "whole"), (2, "cut"))}
    rows.append(row | {"as the formula": bool((visits == expected).all())})
    assert rows[-1]["as the formula"]
lab.table(rows, "Tiles computed, counted by the kernel")

# %%
# **What do STAGE & 2 and 4 - STAGE mean?** In Triton's own tutorial on fused attention the same
# thing goes by numbers. The kernel gets ``STAGE = 3`` for causal and 1 for full attention. Read it
# as two bits. The first says that there is a loop over *whole* tiles, the second that there is one
# over *cut* tiles. So ``STAGE & 2`` asks for the second loop. The inner function is told which keys
# to take, by another number: 1 means up to the diagonal, 2 on the diagonal, 3 all keys. And ``4 -
# STAGE`` is a trick that turns 3 into 1 and 1 into 3: in causal attention the first loop ends at
# the diagonal, in full attention it takes all keys. Here are the three names in place of the
# numbers.

KEYS = {
    1: "before the diagonal, no mask",
    2: "on the diagonal, masked",
    3: "all, no mask",
}
rows = []
for mask, STAGE in (("full", 1), ("causal", 3)):
    row = {"mask": mask, "STAGE": STAGE}
    row["first loop takes keys"] = KEYS[4 - STAGE] if STAGE & 1 else "none"
    row["second loop takes keys"] = KEYS[2] if STAGE & 2 else "none"
    rows.append(row)
lab.table(rows, "The numbers, read aloud")

# %%
# **Queries and keys of different length.** Where is the diagonal then? A model that has read 1,000
# words and asks about the last 3 has 3 queries and 1,000 keys. The last query should see all keys.
# So this book aligns the diagonal to the *bottom right*: query :math:`i` sees key :math:`j` if
#
# .. math::
#
#    j \le i + \text{seqlen}_k - \text{seqlen}_q
#
# PyTorch's ``is_causal`` aligns it to the top left. With equal lengths they agree. To see who sees
# what, let all scores be equal and let the values be unit vectors: the result shows the weights.


def who_sees(operator, seqlen_q, seqlen_k):
    q = torch.zeros(1, 1, seqlen_q, 16, device=runtime.DEVICE)
    k = torch.zeros(1, 1, seqlen_k, 16, device=runtime.DEVICE)
    weights = operator(
        q, k, torch.eye(seqlen_k, 16, device=runtime.DEVICE).view_as(k), is_causal=True
    )
    seen = weights[0, 0] > 0
    return ["".join("■" if x else "·" for x in row[:seqlen_k]) for row in seen.tolist()]


rows = []
for seqlen_q, seqlen_k in ((3, 5), (5, 3)):
    ours = who_sees(attention, seqlen_q, seqlen_k)
    theirs = who_sees(F.scaled_dot_product_attention, seqlen_q, seqlen_k)
    rows += [
        {
            "queries, keys": f"{seqlen_q}, {seqlen_k}",
            "query": i,
            "Kernel Book": ours[i],
            "PyTorch": theirs[i],
        }
        for i in range(seqlen_q)
    ]
assert rows[2]["Kernel Book"] == "■■■■■"  # the last of three queries sees all five keys
lab.table(rows, "Which keys a query sees with is_causal")

# %%
# With 5 queries and 3 keys the first two queries see nothing in our rule. We come back to them.
#
# The kernel
# ----------
#
# **Who stays, and who streams?** A program could also keep a tile of keys and let queries come
# past. The first FlashAttention had its loops in that order. What does it cost? Let us count the
# bytes of one head.
#
# If queries stay, they are read once, and the result is written once. Each tile of queries reads
# all keys and values. If keys stay, keys and values are read once. But for each tile of keys,
# every query is read again, and its ``acc`` too, in float32, and written back.

rows = []
for length in (4096, 16384):
    tensor = length * 128 * 2  # bytes of q, of k, of v, of out
    tiles = length // 128
    queries_stay = tensor + tiles * 2 * tensor + tensor
    keys_stay = 2 * tensor + tiles * (tensor + 2 * tensor + 2 * tensor)
    rows.append(
        {
            "length": length,
            "queries stay, MiB": queries_stay / 2**20,
            "keys stay, MiB": keys_stay / 2**20,
            "times": round(keys_stay / queries_stay, 2),
        }
    )
lab.table(
    rows, "Bytes of one head, tiles of 128 queries or 128 keys, head_dim 128, 16 bits"
)

# %%
# The smaller the tiles of queries, the less there is to gain. But there is a worse trouble. Two
# programs with different keys add to the same ``acc``, so they would have to take turns. If queries
# stay, no two programs write to one place, and there are as many independent programs as tiles of
# queries. Most of the reads of keys and values come from the L2 cache, for the programs of a head
# run at the same time.
#
# **Place.** Now the kernel of the package, piece by piece. Which tile does a program take? In
# causal attention the last queries see the most keys. If they came last, a few heavy programs
# would run on at the end while the rest of the GPU has nothing to do. So they come first.

lab.source(forward.attention_fwd_kernel, "place")

# %% An animation
# A small example shows the difference: 16 programs run on three SMs, two at a time on each. Light
# first, a program of 8 tiles starts when most of the work is done, and the other slots idle until
# it ends. Heavy first, the light programs fill the gaps.
#
# .. animation:: light_or_heavy_first

# %%
# How much does that gain? Let us play it through with 264 places: an H200 has 132 multiprocessors,
# and two programs will run on each. A place takes the next program when it is free, and a program
# takes as long as it has tiles.


def finish_time(weights, places=264):
    free = [0] * places
    for weight in weights:
        heapq.heappush(free, heapq.heappop(free) + weight)
    return max(free)


rows = []
for tiles, heads in ((32, 64), (32, 16), (128, 16)):
    light_first = [t + 1 for _ in range(heads) for t in range(tiles)]
    heavy_first = [t + 1 for t in reversed(range(tiles)) for _ in range(heads)]
    ideal = sum(light_first) / 264
    row = {"tiles of queries": tiles, "heads": heads}
    for name, weights in {
        "light first": light_first,
        "heavy first": light_first[::-1],
        "heavy first, in turn": heavy_first,
    }.items():
        row[name] = f"{100 * ideal / finish_time(weights):.0f} %"
    rows.append(row)
lab.table(rows, "How much of 264 places is at work, causal")

# %%
# The first two columns go head by head. "In turn" means that the heaviest tiles of *all* heads
# start first. But all heads at once have more keys and values than the L2 cache holds. So only as
# many heads take turns as fit in half of it: that is ``HEADS_AT_ONCE``. Without a mask all tiles
# weigh the same, and it is 1.
#
# **Load.** The queries are read once.

lab.source(forward.attention_fwd_kernel, "load")

# %%
# What is ``q_desc``? A *tensor descriptor*. It says once what a tensor looks like: its address, its
# sizes, its strides, and the size of a tile.

lab.source(describe)

# %%
# What does it change? The first kernel computes an address and a mask for each element, in
# registers, and every thread asks for its part. With a descriptor, one thread names a tile by its
# coordinates. The copy engine of the GPU computes the addresses, watches the bounds, fills with
# zeros what is outside, and puts the tile in shared memory, where the matrix instructions read it.

lab.source(load_tile)

# %%
# And on other GPUs? Those before Hopper have no copy engine, and the matrix instructions of a
# GeForce read registers, so that a tile in shared memory is not yet where it is needed. Triton
# would turn a descriptor into addresses and masks again, but into bad ones: it has to know that
# neighbours in a row are neighbours in memory before a thread may load 16 bytes at once, and a
# descriptor that comes from the host does not say so while the kernel is compiled. It would load 2
# bytes at a time. So there the kernel gets the address of a head, and the last stride is a plain 1.

lab.source(head_of)

# %%
# **Why four dimensions?** All heads lie one after the other. So why not describe a matrix of
# (batch · heads · length) rows, and ask for the rows of a head? Because the engine then knows only
# where the whole matrix ends, and not where a head ends. Let us see: two heads of 20 rows, and a
# tile of 16. A program copies the last tile of the *first* head, times ten.

from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _last_tile_kernel(x_desc, y_desc, FLAT: tl.constexpr):
    if FLAT:  # (heads * length, head_dim): the tile starts at row 16 of the matrix
        y_desc.store([16, 0], x_desc.load([16, 0]) * 10)
    else:  # (heads, length, head_dim): it starts at row 16 of head 0
        y_desc.store([0, 16, 0], x_desc.load([0, 16, 0]) * 10)


x = torch.ones(2, 20, 16, device=runtime.DEVICE)
x[1] = 2
rows = []
for flat in (False, True):
    y = torch.zeros_like(x)
    shape, block = ([40, 16], [16, 16]) if flat else ([2, 20, 16], [1, 16, 16])
    views = (t.view(shape) for t in (x, y))
    descs = [TensorDescriptor(t, shape, list(t.stride()), block) for t in views]
    _last_tile_kernel[(1,)](*descs, flat)
    rows.append(
        {
            "descriptor": "flattened" if flat else "heads apart",
            "rows written in head 0": (y[0, :, 0] != 0).sum().item(),
            "rows written in head 1": (y[1, :, 0] != 0).sum().item(),
        }
    )
assert [row["rows written in head 1"] for row in rows] == [0, 12]
lab.table(rows, "What the program of head 0 wrote")

# %%
# The flattened program wrote 12 rows of the wrong head. Head 1 has a program that writes the same
# rows, and who comes last wins. Where the length is a multiple of the tile, nothing goes wrong,
# and so such a kernel passes many tests. Reading is not harmless either: what was read too much
# gets weight zero, and zero times infinity is not a number.

v = torch.zeros(32, 16)
v[20:] = torch.inf  # the first rows of the next head
weights = torch.zeros(1, 32)
weights[:, :20] = 1 / 20
found = (weights @ v)[0, 0].item()
lab.table(
    [{"read": "20 values and 12 of the next head", "sum": str(found)}], "Weight zero"
)

# %%
# **What was tl.multiple_of for?** Older kernels compute ``start_n`` in a loop and add it to an
# address. The compiler has to prove that the address is aligned before it may load 16 bytes at
# once. ``tl.multiple_of`` is a promise that helps. A descriptor needs no such promise: its
# addresses come from the engine. Here is the promise at work, in a kernel that reads from a start
# that the compiler does not know.


@triton.jit(do_not_specialize=["tile", "rows"])
def _offset_kernel(x_ptr, y_ptr, tile, rows, PROMISE: tl.constexpr):
    start = tile * rows
    if PROMISE:
        start = tl.multiple_of(start, 8)
    at = tl.arange(0, 1024)
    tl.store(y_ptr + at, tl.load(x_ptr + start + at))


def widths():
    x = torch.ones(4096, device=runtime.DEVICE, dtype=torch.float16)
    rows = []
    for promise in (False, True):
        compiled = _offset_kernel[(1,)](x, torch.empty_like(x), 4, 64, promise)
        words = [w for w in compiled.asm["ptx"].split() if w.startswith("ld.global")]
        kind = "with" if promise else "without"
        rows.append(
            {"tl.multiple_of": kind, "loads of a thread": len(words), "kind": words[0]}
        )
    return rows


lab.measure("8 numbers of 16 bits for each thread", widths)

# %%
# **A turn ahead.** How can a program avoid waiting for keys? One way is to order them early.
# *Pipeline stages*, ``num_stages``, say how many tiles of keys and of values are on their way, or
# in use, at a time. With three, copies start two turns before they are needed. At head_dim 128 that
# takes 128 KiB of shared memory, and one program fills a multiprocessor. With two stages it takes
# 96 KiB, and two programs fit. But then copies start only when the turn before ends. A turn that
# begins with a product has to wait for its keys.
#
# What else could be done in the meantime? The exponentials need no new data. So let each turn
# compute the scores of the *next* tile, as its last act. The next turn then begins with
# exponentials, and keys and values arrive while it takes them.
#
# .. image:: /figures/attention-ahead.svg
#    :alt: Two timelines of one turn. Above, it begins with a product: keys and values are copied
#          and the program waits. Then come q k, exponentials, and p v. Below, it begins with
#          exponentials, and values and the next keys are copied meanwhile. Then come p v, and
#          q k of the next tile. The turn is shorter by the wait.
#
# The first scores are computed before the loop. ``tf32x3`` matters in float32 only. There each
# number is split into a coarse part and a rest, both in the 19 bits of tf32, and three products
# take the place of one.

lab.source(forward.attention_fwd_kernel, "begin")

# %%
# **Stages.** Here they are again, in the package: what a tile of queries sees,

lab.source(visible)

# %%
# and the two loops. The last tile is left out, for after it there is none to score. ``last`` is its
# first key, and ``cut`` is the first key of the first cut tile. If all tiles are whole, ``cut``
# would lie beyond ``last``: hence the minimum. Queries that see nothing still get one tile, all of
# it masked: hence the maximum. ``ALL_WHOLE`` is known at compile time: without a mask, and with a
# length that the tile divides, there is no second loop.

lab.source(forward.attention_fwd_kernel, "stages")

# %%
# How large is a tile? With more queries in it, keys and values are read less often. But a larger
# tile needs more registers and more shared memory. Which is the fastest was measured once, and
# stands in a table of the package:

rows = []
for (kernel, head_dim, itemsize), config in tuned.HOPPER.items():
    if kernel != "forward":
        continue
    row = {"head_dim up to": head_dim, "bits of a number": 8 * itemsize}
    row |= {"queries": config.block_m, "keys": config.block_n}
    row |= {"warps": config.num_warps, "pipeline stages": config.num_stages}
    row |= {"registers at most": config.maxnreg or 255}
    rows.append(row | {"shared memory, bytes": f"{config.shared:,}"})
lab.table(rows, "How the kernel is cut on Hopper")

# %%
# Why a limit of registers? The hardware's own is 255 for a thread, and a multiprocessor has 65,536.
# A program of 8 warps has 256 threads, and 256 · 128 is half of them. So with 128 two programs fit,
# and while one waits for a product, the other takes exponentials. At head_dim 256 a thread needs
# more, and a program is alone.
#
# **The loop.** The same for both stages. ``qk`` holds what the turn before has computed, the
# products of queries and keys. First they become weights.

lab.source(forward.attend, "weigh")

# %%
# How? What a query does not see becomes :math:`-\infty`: its exponential is exactly 0.

lab.source(forward.weigh, "mask")

# %%
# Then the lines of the mathematics. ``P_LOG2`` is 0 here. It belongs to the chapter on eight bits.

lab.source(forward.weigh, "rescale")

# %%
# ``qk`` is not scaled before the maximum is taken. The scale is positive, so the largest product
# belongs to the largest score, and one multiplication for each row is enough. The others
# disappear in ``qk * scale_log2 - m_exp``, which is one instruction, a fused multiply and add.
#
# Is that worth a thought? For each score, the matrix units do :math:`4 D` operations. On Hopper a
# multiprocessor does 4,096 of these in a cycle, and 16 exponentials. For head_dim 128 a score
# keeps the matrix units busy for an eighth of a cycle, and its exponential takes a sixteenth. For
# head_dim 64 both take a sixteenth. So the exponential, the cheapest line of the mathematics, can
# cost as much as both products, and every further instruction is felt. Here is what the compiler
# makes of one exponential, both ways.


@triton.jit
def _exponent_kernel(x_ptr, y_ptr, m, scale, FOLDED: tl.constexpr):
    at = tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    y = tl.exp2(x * scale - m) if FOLDED else tl.exp((x - m) * scale)
    tl.store(y_ptr + at, y)


def instructions():
    x = torch.ones(128, device=runtime.DEVICE)
    rows = []
    for name, folded in {
        "exp((x - m) * scale)": False,
        "exp2(x * scale - m)": True,
    }.items():
        compiled = _exponent_kernel[(1,)](x, torch.empty_like(x), 3.7, 0.3, folded)
        words = compiled.asm["sass"].split()
        row = {"written as": name}
        for kind in ("FADD", "FMUL", "FFMA", "MUFU.EX2"):
            row[kind] = sum(
                word == kind or word.startswith(kind + ".") for word in words
            )
        rows.append(row)
    return rows


lab.measure("Instructions for one exponential", instructions)

# %%
# Now the sum of values. The weights of 16-bit inputs are rounded to 16 bits, as the matrix units
# want it. Their sum ``l_i`` was taken before, in float32.

lab.source(forward.attend, "accumulate")

# %%
# Last, the scores of the next tile.

lab.source(forward.attend, "score")

# %%
# After the loops one tile is left to weigh. It is masked, unless ``ALL_WHOLE``. With 128 queries
# and 64 keys in a tile the diagonal cuts two tiles: the second loop takes one, and this is the
# other.

lab.source(forward.attention_fwd_kernel, "end")

# %%
# **Why does the maximum take two steps?** It could be one line, ``tl.max(x, axis=1)``. The package
# has this instead:

lab.source(forward.row_max)

# %%
# A *layout* says which thread holds which number of a tile. Each product has a layout for its
# result: the scores have one, and ``acc`` may have another. ``alpha`` is computed from the scores.
# With one step it comes in their layout, and to bring the two together the compiler carries ``acc``
# through the loop twice. Then the assembler, which turns its output into instructions, finds
# registers of ``acc`` in use while a product is under way. It plays safe, and waits after every
# single instruction of every product. A reshape gives the maximum a layout of its own, and ``acc``
# is carried once.
#
# Let us see. Here is the same module with that one line changed.


# Measuring
folder = tempfile.TemporaryDirectory()  # Triton reads the source again when it compiles


def changed(module, old, new):
    source = inspect.getsource(module)
    assert source.count(old) == 1
    path = Path(folder.name) / "changed.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


TWO_STEPS = "return tl.max(tl.max(halves, axis=1), axis=1)"
in_one_step = changed(forward, TWO_STEPS, "return tl.max(x, axis=1)")

q, k, v = torch.randn(3, 1, 2, 100, 64, device=runtime.DEVICE)
outs = [
    module.attention_forward(q, k, v, True, 0.125)[0]
    for module in (forward, in_one_step)
]
assert torch.allclose(*outs, atol=1e-6)

# %%
# How many instructions do the products have, and how often does the program wait? ``HGMMA`` is an
# instruction of a product, and ``WARPGROUP.DEPBAR`` is a wait. The code holds six products: one
# before the loops, two in each of the two loops, and one after them.


def maxima():
    from triton.testing import do_bench

    rows = []
    q, k, v = torch.randn(3, 1, 32, 16384, 64, device=runtime.DEVICE).bfloat16()
    for name, module in {"two steps": forward, "one step": in_one_step}.items():

        def launch(run=module.attention_forward):
            return run(q, k, v, True, 0.125)

        ((_, compiled),) = lab.compiled_by(launch)
        words = compiled.asm["sass"].split()
        row = {"maximum in": name, "registers": compiled.n_regs}
        row["instructions of products"] = sum(w.startswith("HGMMA") for w in words)
        row["waits for them"] = sum(w.startswith("WARPGROUP.DEPBAR") for w in words)
        flops = 4 * 16384**2 * 64 * 32 / 2
        rows.append(row | {"TFLOP/s": round(flops / do_bench(launch) / 1e9)})
    return rows


steps_of_max = lab.measure("head_dim 64, length 16,384, causal", maxima)
steps_of_max

# %%

# Reading
two, one = steps_of_max.rows or ({}, {})
lab.read(
    f"Both give the same result. But one step waits {one.get('waits for them', nan)} times for "
    f"{one.get('instructions of products', nan)} instructions, two steps wait "
    f"{two.get('waits for them', nan)} times, and run at {two.get('TFLOP/s', nan)} TFLOP/s "
    f"instead of {one.get('TFLOP/s', nan)}. No error and no warning says so: the assembler's "
    f"message is not shown. When a loop with products is slower than it should be, count the waits."
)

# %%
# **Write.** One division, and the logarithm. ``m_i`` is in base 2, so the sum is turned back to a
# natural logarithm by a factor :math:`\ln 2`. The row number is 64 bits wide: out may have more
# than :math:`2^{31}` elements.

lab.source(forward.attention_fwd_kernel, "write")

# %%
# **Grouped heads.** Several query heads may share one head of keys. Then head :math:`h` reads keys
# of head :math:`h / g`, rounded down: that is ``head // group`` in the kernel. Nothing is copied.
#
# **Strides.** A model often has its tensors as (batch, length, heads, head_dim), and transposes
# them. A descriptor takes any strides, as long as the last dimension is contiguous and the others
# are multiples of 16 bytes. What is not like that is copied first.

x = torch.zeros(2, 10, 4, 96, device=runtime.DEVICE)
views = {
    "contiguous": x,
    "heads and length transposed": x.transpose(1, 2),
    "part of head_dim: [..., 16:80]": x[..., 16:80],
    "part of head_dim: [..., 3:67]": x[..., 3:67],
    "head_dim and length transposed": x.transpose(1, 3),
    "expanded over the batch": x[:1].expand(2, -1, -1, -1),
}
rows = []
for name, view in views.items():
    same = fit(view).data_ptr() == view.data_ptr()
    rows.append(
        {"view of float32": name, "read": "where it lies" if same else "from a copy"}
    )
lab.table(rows, "Which views are copied")

# %%
# Is it right?
# ------------
#
# Against float64: lengths of 1, 127 and 1,000, queries and keys of different length, head_dim 80
# and 96, shared heads, transposed views. In float32 the error may be eight times PyTorch's: each
# product is a sum of three products in a shorter format, and ``exp2`` errs by two units. The same
# holds for lse, which is float32 whatever the input.


# Measuring
def attention_case(shape, dtype, is_causal, transposed=False):
    batch, heads, heads_k, seqlen_q, seqlen_k, head_dim = shape
    tensors = []
    for n_heads, length in (
        (heads, seqlen_q),
        (heads_k, seqlen_k),
        (heads_k, seqlen_k),
    ):
        size = (batch, length, n_heads) if transposed else (batch, n_heads, length)
        x = torch.randn(*size, head_dim, device=runtime.DEVICE).to(dtype)
        tensors.append(x.transpose(1, 2) if transposed else x)
    q, k, v = tensors
    ours, lse = attention(
        q, k, v, is_causal=is_causal, enable_gqa=True, return_lse=True
    )
    truth, true_lse = reference.attention(q, k, v, is_causal)
    k, v = (x.repeat_interleave(heads // heads_k, dim=1) for x in (k, v))
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q.float() @ k.float().mT * head_dim**-0.5).masked_fill(~mask, -torch.inf)
    what = f"{shape}{', causal' * is_causal}{', transposed' * transposed}"
    factor = 8 if dtype == torch.float32 else 2
    yield lab.Case(what, "forward", ours, theirs, truth, factor)
    yield lab.Case(what, "lse", lse, scores.logsumexp(-1), true_lse, 8)


# %%

shapes = [  # batch, heads, heads of keys, queries, keys, head_dim
    (2, 2, 2, 1, 127, 64),
    (1, 2, 2, 127, 127, 80),
    (2, 4, 2, 33, 100, 96),
    (1, 3, 1, 1, 1000, 128),
]
if not runtime.INTERPRETED:
    shapes += [
        (2, 8, 2, 1000, 1000, 64),
        (1, 4, 4, 1000, 4096, 128),
        (1, 2, 2, 500, 500, 256),
    ]


def every_case():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for number, shape in enumerate(shapes):
            for is_causal in (False, True) if dtype == torch.float32 else (True,):
                transposed = number % 2 == 0
                yield from attention_case(shape, dtype, is_causal, transposed)


lab.check("attention", every_case())

# %%
# **Queries that see nothing.** With more queries than keys, the first queries see no key. A
# softmax over nothing has no answer, so a rule is needed. Here the result is 0, and lse is the
# logarithm of an empty sum, :math:`-\infty`. Beside it PyTorch with the same mask, and the first
# function of this page, which divides zero by zero.

q = torch.randn(1, 1, 5, 16, device=runtime.DEVICE)
k, v = torch.randn(2, 1, 1, 3, 16, device=runtime.DEVICE)
out, lse = attention(q, k, v, is_causal=True, return_lse=True)
mask = torch.ones(5, 3, dtype=torch.bool, device=runtime.DEVICE).tril(-2)
theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
plain = standard_attention(q, k, v, is_causal=True)
rows = [
    {
        "query": i,
        "Kernel Book": f"{out[0, 0, i, 0]:.3f}",
        "lse": f"{lse[0, 0, i]:.3f}",
        "PyTorch": f"{theirs[0, 0, i, 0]:.3f}",
        "standard_attention": f"{plain[0, 0, i, 0]:.3f}",
    }
    for i in range(5)
]
assert not out[0, 0, :2].any()
lab.table(rows, "5 queries, 3 keys, causal: the first number of each result")

# %%
# **Properties.** Some things must hold whatever the numbers are. They catch mistakes that a
# comparison of random inputs may miss.

q, k, v = torch.randn(3, 2, 3, 70, 32, device=runtime.DEVICE)
k_later, v_later = k.clone(), v.clone()
k_later[:, :, 50:], v_later[:, :, 50:] = 7.0, 1e30
order = torch.randperm(70, device=runtime.DEVICE)
out, lse = attention(q, k, v, return_lse=True)
causal = attention(q, k, v, is_causal=True)
changed = attention(q, k_later, v_later, is_causal=True)
moved, moved_lse = attention(q, k[:, :, order], v[:, :, order], return_lse=True)
shifted, shifted_lse = attention(q, k + k[:, :, :1], v, return_lse=True)
step = (q * k[:, :, :1]).sum(-1) * 32**-0.5
properties = {
    "changing the keys after a query changes no bit": torch.equal(
        causal[:, :, :50], changed[:, :, :50]
    ),
    "all values 1 give 1": torch.allclose(attention(q, k, v * 0 + 1), v * 0 + 1),
    "the order of the keys does not matter": torch.allclose(out, moved, atol=1e-4),
    "nor does it for lse": torch.allclose(lse, moved_lse, atol=1e-4),
    "one vector added to all keys does not matter": torch.allclose(
        out, shifted, atol=1e-4
    ),
    "and moves lse by its score": torch.allclose(lse + step, shifted_lse, atol=1e-4),
    "the last query sees what it sees without a mask": torch.allclose(
        causal[:, :, -1], out[:, :, -1], atol=1e-4
    ),
}
assert all(properties.values())
lab.table(
    [{"property": name, "holds": holds} for name, holds in properties.items()],
    "Properties",
)

# %%
# How fast is it?
# ---------------
#
# The limit is a matrix product by cuBLAS, of two square matrices of 8,192 in bfloat16. The number
# of operations is the one from the beginning; a causal mask halves it. First the ladder, at
# head_dim 128. ``torch.compile`` gets the standard version. Does it see what it is, and put a
# ready-made kernel in its place?


def recognised():
    from torch._dynamo.utils import counters

    rows = []
    for is_causal in (False, True):
        torch.compiler.reset()
        counters.clear()
        q, k, v = torch.randn(3, 1, 2, 256, 128, device=runtime.DEVICE).bfloat16()
        with torch.no_grad():
            torch.compile(standard_attention)(q, k, v, is_causal)
        found = counters["inductor"]["fuse_attention"]
        rows.append(
            {"mask": "causal" if is_causal else "full", "patterns recognised": found}
        )
    return rows


lab.measure("Attention recognised by torch.compile", recognised)

# %%
# Zero means that it does not, and the table of scores stays.
#
# One rung is missing. What do descriptors do alone? Here is the kernel in stages once more, with
# descriptors for keys and values, and nothing else changed.


@triton.jit
def _described_kernel(
    q_ptr, k_desc, v_desc, out_ptr, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    queries, offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, seqlen_q, HEAD_DIM, BLOCK_M
    )
    head, start_m = tl.program_id(1), tl.program_id(0) * BLOCK_M
    n_visible, by_all, by_some = visible(
        start_m, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M
    )
    k_head = head_of(k_desc, 0, head, BLOCK_N, HEAD_DIM)
    v_head = head_of(v_desc, 0, head, BLOCK_N, HEAD_DIM)
    whole = by_all // BLOCK_N * BLOCK_N
    for start_n in range(0, whole, BLOCK_N):
        k = load_tile(k_head, start_n)
        qk = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        v = load_tile(v_head, start_n)
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
    for start_n in range(whole, by_some, BLOCK_N):
        k = load_tile(k_head, start_n)
        qk = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        seen = start_n + tl.arange(0, BLOCK_N)[None, :] < n_visible[:, None]
        v = load_tile(v_head, start_n)
        acc, l_i, m_i = _update(acc, l_i, m_i, tl.where(seen, qk, float("-inf")), v)
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%


def run_described(kernel, q, k, v, is_causal, **options):
    options = BLOCKS | options
    seqlen_q, head_dim = q.shape[-2:]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    heads = q.shape[0] * q.shape[1]
    flat = (x.view(1, heads, *x.shape[2:]) for x in (k, v))
    descs = [describe(x, options["BLOCK_N"]) for x in flat]
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]), heads)
    sizes = (seqlen_q, k.shape[-2], scale_log2)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal}
    kernel[grid](q, *descs, out, *sizes, **constants, **options)
    return out


# %%

lab.check("With descriptors", first_cases(_described_kernel, run_described))

# %%
# The tiled PyTorch version has tiles of 1,024, so that it does not drown in launches. The three
# kernels of this page have 128 queries and 64 keys in a tile, as the package's kernel has, but
# three pipeline stages and no limit of registers.

# Measuring
A, B = (None, None) if runtime.INTERPRETED else matmul_operands()
WIDE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}


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


def draw(seqlen, batch, heads, head_dim, dtype):
    size = (3, batch, heads, seqlen, head_dim)
    return torch.randn(size, device=runtime.DEVICE, dtype=dtype)


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    q, k, v = draw(seqlen, batch, heads, head_dim, dtype)
    is_causal = mask == "causal"
    compiled = torch.compile(standard_attention)
    blocks = {"block_m": 1024, "block_n": 1024}
    return {
        "matmul": lambda: A @ B,
        "PyTorch": lambda: standard_attention(q, k, v, is_causal),
        "torch.compile": lambda: compiled(q, k, v, is_causal),
        "tiled PyTorch": lambda: tiled_forward(q, k, v, is_causal=is_causal, **blocks),
        "first kernel": lambda: run(_first_kernel, q, k, v, is_causal, **WIDE),
        "in stages": lambda: run(_staged_kernel, q, k, v, is_causal, **WIDE),
        "descriptors": lambda: run_described(
            _described_kernel, q, k, v, is_causal, **WIDE
        ),
        "Kernel Book": lambda: attention(q, k, v, is_causal=is_causal),
    }


# %%

WORK = "4 * batch * heads * seqlen * seqlen * head_dim * causal"
LIMIT_WORK = f"2 * {MATMUL} * {MATMUL} * {MATMUL}"
units = {"limit": "matmul", "work": WORK, "limit_work": LIMIT_WORK, "unit": "TFLOP/s"}
steps = lab.bench("ladder", points([4096], [128]), ladder_providers, **units)
RUNGS = [
    "PyTorch",
    "torch.compile",
    "tiled PyTorch",
    "first kernel",
    "in stages",
    "descriptors",
    "Kernel Book",
]
where = {"seqlen": 4096}
lab.ladder(
    steps, "From standard attention to the kernel", RUNGS, by="mask", where=where
)

# %%

# Reading


def at(name, mask):
    return steps.rate(name, mask=mask)


lab.read(
    f"Without a mask standard attention runs at {at('PyTorch', 'full'):.0f} TFLOP/s: it waits for "
    f"the table of scores. In tiles of plain PyTorch it runs at "
    f"{at('tiled PyTorch', 'full'):.0f}, for there every tile goes through memory, too. The first "
    f"kernel reaches {at('first kernel', 'full'):.0f}. With the causal mask it computes twice what "
    f"is needed and reaches {at('first kernel', 'causal'):.0f}. Stages bring that to "
    f"{at('in stages', 'causal'):.0f}, and the full case, which needs no mask, to "
    f"{at('in stages', 'full'):.0f}. Descriptors change little by themselves: "
    f"{at('descriptors', 'full'):.0f} full and {at('descriptors', 'causal'):.0f} causal. The "
    f"package's kernel reaches {at('Kernel Book', 'full'):.0f} and "
    f"{at('Kernel Book', 'causal'):.0f}. It computes scores a turn ahead, so two pipeline stages "
    f"are enough, and two programs fit on a multiprocessor. The scale costs it nothing, and with a "
    f"mask its heavy tiles come first."
)

# %%
# Now against the libraries. SDPA is PyTorch's ``scaled_dot_product_attention``; two of its kernels
# are called by name. FlexAttention is compiled for each size. FlashAttention 4 is written in CuTe,
# close to the machine.

# Measuring
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(backend, q, k, v, is_causal):
    def forced():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return lab.peer("torch.nn.attention", lambda _: forced)


def flex(q, k, v, is_causal):
    def use(library):
        mask, length = None, q.shape[2]
        if is_causal:
            sizes = (None, None, length, length)
            mask = library.create_block_mask(
                lambda b, h, i, j: i >= j, *sizes, device=q.device
            )
        compiled = torch.compile(library.flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask)

    return lab.peer("torch.nn.attention.flex_attention", use)


def flash(q, k, v, is_causal):
    # It wants (batch, seqlen, heads, head_dim).
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lab.peer(
        "flash_attn.cute.interface",
        lambda library: lambda: library.flash_attn_func(q, k, v, causal=is_causal),
    )


# %%


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    q, k, v = draw(seqlen, batch, heads, head_dim, dtype)
    inputs = (q, k, v, mask == "causal")
    return {
        "matmul": lambda: A @ B,
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION, *inputs),
        "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, *inputs),
        "FlexAttention": flex(*inputs),
        "FlashAttention": flash(*inputs),
        "Kernel Book": lambda: attention(q, k, v, is_causal=mask == "causal"),
    }


LENGTHS = [1024, 4096, 16384]
speed = lab.bench("forward", points(LENGTHS, [64, 128]), providers, **units)
lab.plot(speed, "head_dim 128, full", where={"head_dim": 128, "mask": "full"})

# %%

lab.plot(speed, "head_dim 128, causal", where={"head_dim": 128, "mask": "causal"})

# %%

lab.plot(speed, "head_dim 64, full", where={"head_dim": 64, "mask": "full"})

# %%

lab.plot(speed, "head_dim 64, causal", where={"head_dim": 64, "mask": "causal"})

# %%

# Reading
PEERS = ("SDPA flash", "SDPA cuDNN", "FlexAttention", "FlashAttention")


def best_peer(**where):
    found = {name: speed.rate(name, **where) for name in PEERS}
    found = {name: value for name, value in found.items() if value == value}
    return max(found.items(), key=lambda item: item[1], default=("none", nan))


sentences = []
for head_dim in (128, 64):
    for mask in ("full", "causal"):
        where = {"head_dim": head_dim, "mask": mask, "seqlen": 16384}
        name, peer = best_peer(**where)
        sentences.append(
            f"At head_dim {head_dim}, {mask}, length 16,384, the kernel runs at "
            f"{speed.rate('Kernel Book', **where):.0f} TFLOP/s, "
            f"{100 * speed.share('Kernel Book', **where):.0f} % of a matrix product. The fastest "
            f"library, {name}, runs at {peer:.0f}, and SDPA's flash kernel at "
            f"{speed.rate('SDPA flash', **where):.0f}."
        )
lab.read(" ".join(sentences))

# %%
# Why not the speed of a matrix product? One reason is the exponential, as we counted: at head_dim
# 64 it takes as long as the products. The maximum and the sum over each row come on top. Two
# programs share a multiprocessor here, and while one waits for a product the other may take
# exponentials, but nothing keeps them in step. FlashAttention-3 keeps them in step by hand: one
# group of warps multiplies while another one takes exponentials. With a causal mask and a short
# length there is another reason. Half of the scores on the diagonal are thrown away. With 8 tiles
# of queries that is an eighth more work, and with 128 less than a hundredth.
#
# What did the compiler make of the kernels? A register that *spills* goes to memory, and ``acc`` is
# large: 128 queries by 128 numbers are 64 registers for each of 256 threads. A tile of scores, of
# 64 keys, takes half as many. That makes 96 of the 128 that a thread may have. In float32 operands
# are split into parts, and registers run short.


def launch(head_dim, dtype):
    q, k, v = draw(1024, 1, 4, head_dim, dtype)
    return lambda: attention(q, k, v, is_causal=True)


facts = lab.facts(
    "What the compiler made of the kernel, causal",
    {
        f"head_dim {head_dim}, {str(dtype).removeprefix('torch.')}": (
            lambda head_dim=head_dim, dtype=dtype: launch(head_dim, dtype)()
        )
        for head_dim in (64, 128, 256)
        for dtype in (torch.bfloat16, torch.float32)
    },
)
facts

# %%
# **Small inputs.** A kernel has to be started, and that takes the host some time, whatever the
# kernel does. So at small sizes a call costs what its host code takes, and hardly depends on
# the length.


def microseconds(run, *inputs, repeats=200):
    for _ in range(20):
        run(*inputs)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run(*inputs)
    end.record()
    torch.cuda.synchronize()
    return round(1e3 * start.elapsed_time(end) / repeats, 1)


def small_inputs():
    rows = []
    for length in (128, 512, 2048, 4096):
        inputs = draw(length, 1, 16, 128, torch.bfloat16)
        row = {"length": length}
        row["SDPA, µs"] = microseconds(F.scaled_dot_product_attention, *inputs)
        row["Kernel Book, µs"] = microseconds(attention, *inputs)
        rows.append(row)
    return rows


small = lab.measure("One call after the other, 16 heads, head_dim 128", small_inputs)
small

# %%

# Reading
first, last = (small.rows[0], small.rows[-1]) if small.rows else ({}, {})
lab.read(
    f"At length 128 a call costs {first.get('Kernel Book, µs', nan):.0f} µs here and "
    f"{first.get('SDPA, µs', nan):.0f} µs in PyTorch, whose host code is C++. At 4,096 the kernel "
    f"has something to do, and they take {last.get('Kernel Book, µs', nan):.0f} and "
    f"{last.get('SDPA, µs', nan):.0f} µs."
)

# %%
# What breaks it
# --------------
#
# Here is a kernel for 64 queries of one head that can make five mistakes. Each is run beside the
# right version.


@triton.jit
def _fragile_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, MISTAKE: tl.constexpr, MASK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr = 64, BLOCK_N: tl.constexpr = 16, HEAD_DIM: tl.constexpr = 16,
):  # fmt: skip
    i, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + i * HEAD_DIM + d)
    m_i = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
    l_i, acc = (
        tl.zeros((BLOCK_M, 1), tl.float32),
        tl.zeros((BLOCK_M, HEAD_DIM), tl.float32),
    )
    for start_n in range(0, BLOCK_M, BLOCK_N):
        j = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + j[:, None] * HEAD_DIM + d)
        v = tl.load(v_ptr + j[:, None] * HEAD_DIM + d)
        seen = i > j[None, :] if MISTAKE == "> for >=" else i >= j[None, :]
        s = tl.where(
            seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, MASK_VALUE
        )
        m_new = tl.maximum(m_i, tl.max(s, axis=1, keep_dims=True))
        m_exp = m_new * 0 if MISTAKE == "no maximum" else m_new
        alpha, p = tl.exp(m_i - m_exp), tl.exp(s - m_exp)
        if MISTAKE == "no maximum":
            alpha = tl.full((BLOCK_M, 1), 1.0, tl.float32)
        l_i = l_i * alpha + tl.sum(p, axis=1, keep_dims=True)
        acc = acc if MISTAKE == "acc not rescaled" else acc * alpha
        acc = tl.dot(p, v, acc, input_precision="ieee")
        m_i = m_i if MISTAKE == "statistics not updated" else m_new
    tl.store(out_ptr + i * HEAD_DIM + d, acc / l_i)


# %%


def listed(row):
    return ", ".join(f"{value:.3f}" for value in row[:3].tolist())


def compare(mistake, row, q, k, v, scale=0.25, mask_value=float("-inf")):
    heads = (x[None, None] for x in (q, k, v))
    truth = reference.attention(*heads, True, scale)[0][0, 0, row]
    rows = []
    for version, value in (("right", float("-inf")), (mistake, mask_value)):
        out = torch.empty_like(v)
        with runtime.launching_on(q):
            _fragile_kernel[(1,)](q, k, v, out, scale, version, value)
        off = (out[row] - truth).abs().max().item()
        rows.append({"version": version, f"query {row}": listed(out[row])})
        rows[-1]["largest error"] = f"{off:.1g}"
        assert (off < 1e-3) == (version == "right")
    return lab.table(rows, f"{mistake}: the first numbers of a result")


q, k, v = torch.randn(3, 64, 16, device=runtime.DEVICE)

# %%
# **No maximum subtracted.** On paper it cancels. In float32, :math:`e^{89}` is infinite. Scores
# around a hundred are enough, and the result is infinity divided by infinity.

compare("no maximum", 40, 20 * q, k, v, scale=2.0)

# %%
# **The mask is** ``>`` **and not** ``>=``. Every query misses itself. The first query sees nothing
# at all, and becomes NaN. The second should average two values, and takes one.

compare("> for >=", 1, q, k, v)

# %%
# **The statistics are not updated.** Without ``m_i = m_new`` the old maximum stays
# :math:`-\infty`. Then ``alpha`` is always 0, and every tile erases those before it. A single tile
# would be right: so test with more than one.

compare("statistics not updated", 60, q, k, v)

# %%
# **The accumulator is not rescaled.** The sum ``l`` is, so numerator and denominator are on
# different scales. As long as the largest score comes in the first tile, nobody notices. Here the
# scores rise.

rising = 3 * torch.linspace(0, 1, 64, device=runtime.DEVICE).unsqueeze(1)
compare("acc not rescaled", 40, q.abs(), k + rising, v)

# %%
# **-1e6 in the place of minus infinity.** Why would anyone write that? Because :math:`-\infty -
# (-\infty)` is NaN when a whole row of a tile is masked, and with a finite number it is 0. It
# works as long as every true score is above it. Scores below are rare, but nothing forbids them.
# Then the *masked* keys win, and a query sees nothing but the future.

compare("-1e6 as the mask", 40, q - 3000, k + 3000, v, scale=0.25, mask_value=-1e6)

# %%
# With minus infinity a masked key can never win. The package avoids :math:`-\infty - (-\infty)` in
# another way: its running maximum does not start at minus infinity but at ``LOWEST``, the lowest
# finite number of float32, because :math:`-\infty` minus a finite number is :math:`-\infty`, whose
# exponential is 0.
#
# **Too much shared memory.** A tile of 128 keys and head_dim 128 takes 32 KiB in 16 bits, once for
# keys and once for values, and every stage of the pipeline has its own pair. Nothing warns when the
# kernel is written. The launch fails.


def greedy():
    q = draw(1024, 1, 4, 128, torch.bfloat16)[0]
    config = tuned.by_descriptor(128, 128, num_warps=8, num_stages=5, shared=0)
    try:
        with mock.patch.object(tuned, "forward_config", return_value=config):
            attention(q, q, q)
        said = "Nothing: this GPU has enough."
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return [{"what the launch says": line} for line in textwrap.wrap(said, 56)]


lab.measure("128 queries and 128 keys in a tile, 5 stages", greedy)

# %%
# So the package knows what each configuration needs, and takes the first that fits. If none does,
# it says what to change. Here a device is made up that has only 8 KiB.

made_up = {"INTERPRETED": False, "capability": lambda device: (8, 6)}
made_up["shared_memory"] = lambda device: 8192
name = mock.patch.object(
    torch.cuda, "get_device_name", return_value="a GPU that is made up"
)
with mock.patch.multiple(runtime, **made_up), name:
    try:
        tuned.forward_config(torch.empty(1, 1, 1, 128, dtype=torch.float16))
    except ValueError as error:
        message = str(error)
lines = textwrap.wrap(f"ValueError: {message}", 56)
lab.table([{"what the package says": line} for line in lines], "Too little memory")

# %%
# Exercises
# ---------
#
# **1. A sliding window.** Let query :math:`i` see only the last :math:`W` keys up to its own.
# Which tiles are left? Write the kernel so that it computes no others. ``_begin`` and ``_update``
# from above will do most of the work.

# %%

# Solution: a sliding window


@triton.jit
def _window_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, length, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    queries, offsets, exist, q, m_i, l_i, acc = _begin(q_ptr, length, HEAD_DIM, BLOCK_M)
    start_m = tl.program_id(0) * BLOCK_M
    first = tl.maximum(start_m - window + 1, 0) // BLOCK_N * BLOCK_N
    for start_n in range(first, tl.minimum(start_m + BLOCK_M, length), BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        rows = tl.program_id(1).to(tl.int64) * length + keys
        at = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_ptr + at, mask=keys[:, None] < length, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        behind = queries[:, None] - keys[None, :]
        qk = tl.where((behind >= 0) & (behind < window), qk, float("-inf"))
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
    tl.store(out_ptr + offsets, acc / l_i[:, None], mask=exist)


# %%

# Solution: a sliding window, checked
q, k, v = torch.randn(3, 1, 2, 150, 32, device=runtime.DEVICE)
out, scale_log2 = torch.empty_like(q), 32**-0.5 * 1.4426950408889634
_window_kernel[(triton.cdiv(150, 32), 2)](q, k, v, out, 150, 20, scale_log2, 32, 32, 16)
behind = torch.arange(150, device=q.device).view(-1, 1) - torch.arange(
    150, device=q.device
)
mask = (behind >= 0) & (behind < 20)
theirs, truth = (
    F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), attn_mask=mask)
    for dtype in (torch.float32, torch.float64)
)
lab.check(
    "A window of 20", [lab.Case("150 keys", "forward", out, theirs, truth, factor=4)]
)

# %%
# **2. ALiBi, without a new kernel.** ALiBi subtracts a penalty that grows with the distance: the
# score becomes :math:`s_{ij} - c\,(i - j)`, with its own :math:`c` for each head. Can you get it
# from ``attention`` as it is, by adding columns to q, k and v?

# %%

# Solution: ALiBi, without a new kernel
#
# The part c i is the same for all keys of a query, and softmax does not see it. What is left is
# c j: a product of two numbers, one of the query and one of the key. So it is one more column.


def alibi_attention(q, k, v, slopes):
    scale, length = q.shape[-1] ** -0.5, k.shape[2]
    places = torch.arange(length, device=q.device, dtype=q.dtype).view(1, 1, -1, 1)
    q_more = (slopes.view(1, -1, 1, 1) / scale).expand(*q.shape[:3], 1)
    k_more = places.expand(*k.shape[:3], 1)
    q, k = torch.cat((q, q_more), -1), torch.cat((k, k_more), -1)
    return attention(q, k, F.pad(v, (0, 1)), is_causal=True, scale=scale)[..., :-1]


q, k, v = torch.randn(3, 1, 2, 60, 64, device=runtime.DEVICE)
slopes = torch.tensor([0.125, 0.0625], device=q.device)
i, j = torch.arange(60, device=q.device).view(-1, 1), torch.arange(60, device=q.device)
bias = -slopes.view(1, 2, 1, 1) * (i - j)
bias = bias.masked_fill(i < j, -torch.inf)
theirs, truth = (
    F.scaled_dot_product_attention(
        *(x.to(dtype) for x in (q, k, v)), attn_mask=bias.to(dtype)
    )
    for dtype in (torch.float32, torch.float64)
)
ours = alibi_attention(q, k, v, slopes)
lab.check(
    "ALiBi", [lab.Case("60 keys, 2 heads", "forward", ours, theirs, truth, factor=8)]
)

# %%
# **3. One query, many keys.** When a model writes a text, there is one query and a long past. One
# tile of queries means one program for each head, and most of the GPU stands idle. Split the keys
# into parts that are computed as if they were heads of their own, and merge. What do you need of
# each part?

# %%

# Solution: one query, many keys
#
# The result and lse of each part. The part's sum of exponentials, exp(lse), is its weight in the
# whole. So the weights are a softmax over lse, and the parts are views: nothing is copied.


def split_attention(q, k, v, parts):
    k, v = (x.unflatten(2, (parts, -1)).flatten(1, 2) for x in (k, v))
    q = q.repeat_interleave(parts, dim=1)
    out, lse = attention(q, k, v, return_lse=True)
    out, lse = (x.unflatten(1, (-1, parts)) for x in (out, lse))
    return (torch.softmax(lse, dim=2).unsqueeze(-1) * out).sum(2)


q = torch.randn(2, 3, 1, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 2, 3, 240, 32, device=runtime.DEVICE)
theirs, (truth, _) = standard_attention(q, k, v), reference.attention(q, k, v)
ours = split_attention(q, k, v, 8)
lab.check(
    "8 parts", [lab.Case("1 query, 240 keys", "forward", ours, theirs, truth, factor=8)]
)

# %%

# Solution: one query, many keys, measured


def decoding():
    q = torch.randn(1, 16, 1, 128, device=runtime.DEVICE).bfloat16()
    k, v = torch.randn(2, 1, 16, 2**17, 128, device=runtime.DEVICE).bfloat16()
    rows = []
    for parts in (1, 4, 16, 64):
        took = microseconds(split_attention, q, k, v, parts, repeats=20)
        moved = round(2 * k.numel() * 2 / took / 1e3)
        rows.append({"parts": parts, "µs": took, "GB/s of keys and values": moved})
    return rows


lab.measure("One query, 131,072 keys, 16 heads", decoding)

# %%
# References
# ----------
#
# - Dao, Fu, Ermon, Rudra, Ré. *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness.* NeurIPS 2022.
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.
# - Milakov, Gimelshein. *Online normalizer calculation for softmax.* arXiv:1805.02867, 2018.
# - Rabe, Staats. *Self-attention does not need O(n²) memory.* arXiv:2112.05682, 2021.
# - Ainslie and others. *GQA: training generalized multi-query transformer models from multi-head
#   checkpoints.* EMNLP 2023.
# - Press, Smith, Lewis. *Train short, test long: attention with linear biases enables input length
#   extrapolation.* ICLR 2022.
# - NVIDIA. *CUDA C++ programming guide*, throughput of native arithmetic instructions: exponentials
#   for each multiprocessor and cycle.

# %%

# Closing
reached = [
    speed.share("Kernel Book", head_dim=head_dim, mask=mask, seqlen=16384)
    for head_dim in (64, 128)
    for mask in ("full", "causal")
]
lab.finish(
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of a matrix product at length 16,384"
)
