"""
Attention, tile by tile
=======================

Attention compares every query with every key, so its table of scores grows with the square of the
length. *Must that table ever exist?*

You will learn

- how a softmax can carry a weighted sum along, so that a tile of scores lives for one iteration of
  a loop;
- which tiles a causal mask leaves whole, which it cuts, and which the kernel never computes;
- what brings a correct kernel close to the speed of a matmul, and how little memory it needs.

The chapter runs on any NVIDIA GPU. Without one, the checks run in Triton's interpreter, and the
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
# Attention takes queries, keys and values. Each query is a vector, and so is each key; their dot
# product measures how well the two match, and is called a *score*. For each query, softmax turns
# the scores into weights that sum to 1. The output is the weighted sum of the *values*, one weight
# per key.


def standard_attention(q, k, v, is_causal=False):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if is_causal:  # a query sees the keys up to its own position, and no later ones
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill_(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


# %%
# All tensors are (batch, heads, length, head_dim). Because the heads are independent of each other,
# we count for a single head, with :math:`N` queries, :math:`N` keys and head_dim :math:`D`.
#
# **Operations.** A score is the dot product of two vectors, which takes :math:`D` multiplications
# and :math:`D` additions, and there are :math:`N^2` scores. The second matmul, weights times
# values, costs the same, so the total is
#
# .. math::
#
#    \text{FLOPs} = 4\, N^2 D
#
# **Bytes.** The first matmul writes the scores, softmax reads them and writes the weights, and the
# second matmul reads the weights. So :math:`N^2` numbers make four trips between the chip and its
# memory, which is :term:`HBM` on a data-center GPU. Queries, keys, values and output are :math:`N
# D` numbers each and make one trip each; no implementation can do with less.
#
# In the table, "FLOP / byte" divides the operations by all of these trips, and "at best" by those
# of queries, keys, values and output alone.

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
# How many operations must we do per byte? As many as the GPU can execute while it moves one. We
# measure both speeds: the first with a matmul, the second with a copy.

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
    f"This machine needs {needed:.0f} operations per byte to be limited by arithmetic. Standard "
    f"attention does {rows[-1]['FLOP / byte']} at the longest length, about half of head_dim, and "
    f"this number stops growing, so it waits for memory at any length. Without the table of scores "
    f"it would do {rows[1]['at best']:,} at length 4,096 and could run as fast as a matmul, if it "
    f"read each input from memory only once. A kernel in tiles reads keys and values more often; "
    f"the section on the kernel returns to that."
)

# %%
# **Memory.** Standard attention holds the scores and the weights at the same time. For 16 heads and
# growing lengths, we measure how much memory it allocates at its peak beyond inputs and output,
# until it no longer fits.


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
    f"{last.get('PyTorch, MiB', nan) / 1024:,.1f} GiB beyond its inputs and its output. The kernel "
    f"of this chapter needs {last.get('Kernel Book, MiB', nan):,.1f} MiB, because it keeps one "
    f"number per query. "
    + (
        f"At {fails[0]:,} the standard version runs out of memory."
        if fails
        else "On this GPU the standard version fitted at every length."
    )
)

# %%
# The idea
# --------
#
# A query needs all keys and all values, but not all at the same time, because a softmax can be
# computed block by block, as :doc:`the chapter on online softmax </chapters/softmax>` shows. So we
# keep a :term:`tile` of queries, which is a block of consecutive rows, on the chip, and loop over
# keys and values one tile at a time. Each iteration computes a small tile of scores, uses it, and
# discards it.
#
# .. image:: /figures/attention-memory.svg
#    :alt: Above, standard attention: q, k, v and out are narrow, the scores and the weights are two
#          large squares in memory that grow as the length squared. Below, tile by tile: q, k, v,
#          out and one column lse in memory; on chip a tile each of q, k, v, scores and acc.
#
# Three things pass from one iteration to the next: the two numbers of online softmax for each
# query, and the weighted sum of the values so far.
#
# .. image:: /figures/attention-stream.svg
#    :alt: A tile of q stays. Tiles of k and v are loaded one after the other. Each gives scores,
#          from these m, alpha and p, and with them l = l alpha + sum of p and
#          acc = acc alpha + p v. m, l and acc are carried to the next tile. After the last:
#          out = acc / l and lse = m + log l, written once.
#
# The mathematics
# ---------------
#
# **The running triple.** Let :math:`s_j` be the scores of one query, and :math:`v_j` the values.
# For the set :math:`A` of the keys seen so far, keep
#
# .. math::
#
#    \begin{aligned}
#    m_A &= \max_{j \in A} s_j \\
#    l_A &= \sum_{j \in A} e^{s_j - m_A} \\
#    acc_A &= \sum_{j \in A} e^{s_j - m_A}\, v_j
#    \end{aligned}
#
# The first two are numbers; the third, the *accumulator*, is a vector of :math:`D` numbers. Once
# :math:`A` holds all keys, the output is :math:`acc_A / l_A`, because numerator and denominator
# share the factor :math:`e^{-m_A}` and it cancels.
#
# **Two sets become one.** For disjoint sets :math:`A` and :math:`B`, let :math:`m` be the larger of
# the two maxima. Every term of :math:`A` was computed relative to :math:`m_A`, and a factor of
# :math:`e^{m_A - m}` makes it relative to :math:`m`:
#
# .. math::
#
#    \begin{aligned}
#    m &= \max(m_A,\, m_B) \\
#    l &= l_A\, e^{m_A - m} + l_B\, e^{m_B - m} \\
#    acc &= acc_A\, e^{m_A - m} + acc_B\, e^{m_B - m}
#    \end{aligned}
#
# because :math:`e^{s_j - m_A}\, e^{m_A - m} = e^{s_j - m}`. The result again has the form above,
# for the set :math:`A \cup B`, so it does not matter how we split the keys.
#
# **The loop.** Now let :math:`A` be the tiles so far and :math:`B` the next tile. If we update the
# maximum :math:`m` first and compute the terms of the new tile relative to it at once, these need
# no correction, and a single factor is left:
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
# The factor ``alpha`` rescales the old sums to the new maximum. If the maximum did not change, it
# is 1.
#
# By induction the triple is right after every tile. It is right for the empty set, where :math:`m =
# -\infty` and both sums are 0; and if it is right before a tile, the merge makes it right after.
#
# To test the merge, we cut 300 keys into pieces and merge their triples in a random order.


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
# **One division, at the end.** We could keep the average :math:`acc / l` after every tile instead,
# but then the next step would first have to undo the division:
#
# .. math::
#
#    \frac{acc}{l} = \frac{acc_A}{l_A} \cdot \frac{l_A\, \alpha}{l}
#    + \sum_{j \in B} \frac{p_j}{l}\, v_j
#
# Each tile would also have to scale its :math:`p_j`, which is one more multiplication per score for
# the same result. The first FlashAttention divided in every step; FlashAttention-2 divides once.
#
# **Does l start at 0 or at 1?** Published kernels do both, and for almost every query it makes no
# difference: the first ``alpha`` is :math:`e^{-\infty - m} = 0`, so whatever ``l`` started with is
# multiplied by zero. The start value can survive only in a query that meets no tile at all. The
# table runs the loop over two tiles from three start values.


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
# A start of 1 avoids a division by zero for a query without tiles, and for no other: a query whose
# keys are all masked still ends at zero, because its first ``alpha`` is zero. The division has to
# be guarded anyway, so the kernel starts at 0, the sum of no terms.
#
# **One number per query is enough for the backward pass.** The gradient needs the weights again. A
# weight is
#
# .. math::
#
#    \begin{aligned}
#    P_{ij} &= \frac{e^{s_{ij} - m_i}}{l_i} \\
#    &= e^{s_{ij} - (m_i + \log l_i)}
#    \end{aligned}
#
# so the maximum and the sum are never needed apart. The forward pass stores :math:`lse_i = m_i +
# \log l_i`, the :term:`logsumexp` of the scores, in 4 bytes per query. The weights need not be
# stored, because the scores and lse give them back, as the table confirms.

q, k, v = torch.randn(3, 1, 2, 100, 64, device=runtime.DEVICE)
_, lse = attention(q, k, v, return_lse=True)
scores = q.double() @ k.double().mT / 8
again = torch.exp(scores - lse.double().unsqueeze(-1))
off = (again - torch.softmax(scores, -1)).abs().max().item()
assert off < 1e-5
lab.table([{"largest difference of a weight": f"{off:.1e}"}], "Weights from lse alone")

# %%
# **lse may start as uninitialised memory.** ``torch.empty`` allocates it without writing anything,
# which is safe as long as the kernel writes every entry before anyone reads it. It does: a kernel
# runs as many :term:`programs <program>` in parallel, each query belongs to exactly one of them,
# and that program writes all of its queries. To verify this, we fill the outputs with NaN before
# the kernel runs, at lengths that are no multiple of a tile, and count the NaN that remain.

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
# The inner loop takes one tile of keys and values after the other: ``q_i`` stays, ``k_j`` and
# ``v_j`` change. ``_scores`` returns their scaled dot products, with :math:`-\infty` wherever a
# query does not see a key.

lab.source(tiled_forward, "meet")

# %%
# The next lines are those of the mathematics, under the same names. ``_finite`` replaces
# :math:`-\infty` by zero: as long as a query has seen no key, its maximum is :math:`-\infty`, and
# :math:`-\infty - (-\infty)` would be NaN.

lab.source(tiled_forward, "rescale")

# %%
# After the last tile, each query takes one division and one logarithm.

lab.source(tiled_forward, "end")

# %%
# Without a mask, a tile of queries needs every tile of keys. With a causal mask, ``key_tiles``
# decides which it needs, and which of them have to be masked; the section on causal stages derives
# the rule.

lab.source(key_tiles)

# %%
# We check the result against float64. In float32 the error may be up to four times PyTorch's,
# because each multiplication by ``alpha`` adds a rounding.


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
# Now we write the same loop in Triton, as simply as possible: with an address for every element and
# a mask for every tile. The update of the triple comes first, and two of its details need a word.
#
# **exp2 instead of exp.** The hardware has an instruction for :math:`2^x` and none for :math:`e^x`.
# With
#
# .. math::
#
#    \begin{aligned}
#    e^{s - m} &= 2^{(s - m) \log_2 e} \\
#    &= 2^{s' - m'}
#    \end{aligned}
#
# we can keep all scores, and the maximum, multiplied by :math:`\log_2 e = 1 / \ln 2`. This costs
# nothing, because the factor joins the scale, which multiplies every score anyway.
#
# **input_precision.** By default, ``tl.dot`` rounds float32 operands to *TF32*, the 19-bit format
# in which the GPU's matmul units, its *tensor cores*, take them. TF32 keeps 10 of the 23 fraction
# bits, as many as float16, so each operand may be off by a thousandth of its value, and a matmul in
# float32 would be about as coarse as one in float16. ``"ieee"`` keeps all bits and does without the
# tensor cores. It changes nothing for 16-bit inputs. A third choice, ``"tf32x3"``, follows with the
# package's kernel.

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
# ``_meet`` loops over a range of keys, one tile per iteration. ``n_visible`` says how many keys
# each query sees. Keys beyond the end are loaded as zeros by ``other=0.0``, because a masked
# ``tl.load`` without ``other`` leaves those elements undefined. If ``visits_ptr`` is given, the
# kernel records each tile that it computes with an :term:`atomic` addition; we count these records
# later.


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
# Each program loads its tile of queries once, and begins with the triple of the empty set.


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
# The first kernel treats all keys as one range and masks every tile.


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
# The launch asks for one program per tile of queries and head. We check the result as before.

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
# With a causal mask, a query sees only the keys up to its own position. The first kernel computes
# every tile all the same and then discards half of the scores. The figure shows which tiles it
# could skip.
#
# .. image:: /figures/attention-stages.svg
#    :alt: Six tiles of queries and twelve tiles of keys, half as long. The diagonal runs from the
#          upper left to the lower right. In row r the first 2 r tiles are whole, the next two are
#          cut by the diagonal, and the rest is never computed.
#
# There are three kinds of tiles:
#
# - *whole*: every query of the tile sees every key, so no mask is needed.
# - *cut*: the diagonal passes through, and the mask sets some scores to :math:`-\infty`.
# - *beyond*: no query sees any key, so there is nothing to compute.
#
# In each row the whole tiles come first and the cut ones next, so the loop can end there. We split
# it into two *stages*: the first, which does most of the work, needs no mask at all, and only the
# second pays for one. If the last query of a tile sees :math:`n` keys and the first :math:`f` of
# them, then :math:`\lfloor f / B \rfloor` tiles of :math:`B` keys are whole, and :math:`\lceil n /
# B \rceil` are computed.


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
# **The tiles beyond the diagonal are never computed.** The trace confirms it: each computed tile
# added 1 to its counter in the first stage, or 2 in the second.


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
# The count should agree with the formula at other lengths, too. ``key_tiles`` from above lists the
# tiles that should be computed.

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
# .. tilemap::

# %%
# **STAGE & 2 and 4 - STAGE.** Triton's own tutorial on fused attention has the same two stages, but
# refers to them by numbers. Its kernel gets ``STAGE = 3`` for causal and 1 for full attention, to
# be read as two bits: the first asks for a loop over *whole* tiles, the second for one over *cut*
# tiles. So ``STAGE & 2`` tests whether there is a second loop.
#
# Another number tells the inner function which keys to take: 1 means up to the diagonal, 2 on the
# diagonal, 3 all keys. ``4 - STAGE`` turns 3 into 1 and 1 into 3, because the first loop ends at
# the diagonal in causal attention and takes all keys in full attention. The table spells the
# numbers out.

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
lab.table(rows, "What the numbers stand for")

# %%
# **Queries and keys of different length.** If the lengths differ, the position of the diagonal is a
# convention. A model that has read 1,000 words and asks about the last 3 has 3 queries and 1,000
# keys, and its last query should see all keys. So this book aligns the diagonal to the *bottom
# right*: query :math:`i` sees key :math:`j` if
#
# .. math::
#
#    j \le i + \text{seqlen}_k - \text{seqlen}_q
#
# PyTorch's ``is_causal`` aligns it to the top left. With equal lengths the two agree. To see which
# keys each query sees, we make all scores equal and the values unit vectors, so that the output
# shows the weights.


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
# With 5 queries and 3 keys, the first two queries see nothing under our rule. The checks below say
# what they return.
#
# The kernel
# ----------
#
# **Queries stay, keys stream.** A program could also keep a tile of keys and loop over the queries;
# the first FlashAttention ordered its loops that way. We compare the two orders by the bytes that
# the programs of one head load and store.
#
# If queries stay, they are read once and the output is written once, but each tile of queries reads
# all keys and values. If keys stay, keys and values are read once, but for each tile of keys every
# query is read again, and its ``acc``, in float32, is read and written back.

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
# The smaller the tiles of queries, the less this order saves. But keeping the keys has a worse
# problem: programs with different keys add to the same ``acc``, so they would have to take turns.
# If queries stay, no two programs write to the same address, and there are as many independent
# programs as tiles of queries.
#
# **The cache closes a gap.** At length 4,096 the programs of a head read and write 66 MiB, while
# the head does 8.59 GFLOP. That is 124 operations per byte, and not the 2,048 of the first table,
# which counted each input once, because a key or value that a program loads serves only the 128
# queries of its tile. And 124 is less than this machine needs, so if all of these bytes came from
# HBM, memory would limit the kernel.
#
# They need not come from HBM. The programs of a head run at the same time and load the same keys
# and values, so most of these loads can be served by :term:`L2`, the cache that the whole chip
# shares.
#
# How many are, no run on this page measures. But from HBM alone the kernel could reach at most 124
# divided by the machine's own ratio, as a share of the speed of a matmul, and at head_dim 128
# without a mask the speeds below exceed that share.
#
# **Place.** Now we build the kernel of the package, piece by piece. In the first piece, ``place``
# decides which head and which tile of queries a program takes. In causal attention the last queries
# see the most keys. If they started last, a few heavy programs would run on at the end while the
# rest of the GPU has nothing to do, so they start first, across several heads at once, because
# reordering within one head gains little.

lab.source(forward.attention_fwd_kernel, "place")

# %% An animation
# A small example shows the difference: 16 programs run on three SMs, two at a time on each. Light
# first, a program of 8 tiles starts when most of the work is done, and the other slots idle until
# it ends. Heavy first, the light programs fill the gaps.
#
# .. animation:: light_or_heavy_first

# %%
# How much does that gain? Let's simulate this with 264 slots, because an H200 has 132 :term:`SMs
# <SM>` (streaming multiprocessors, the parts of a GPU that run programs) and two programs of our
# kernel fit on each. A slot takes the next program when it is free, and a program takes as long as
# it has tiles.


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
lab.table(rows, "Share of 264 slots at work, causal")

# %%
# "Light first" and "heavy first" go head by head. The order within a head changes little, because
# the heavy tiles of the last head still start late. "In turn" starts the heaviest tiles of *all*
# heads first and keeps nearly every slot at work. But all heads at once may have more keys and
# values than the L2 cache holds, so the kernel interleaves only as many heads as fit into half of
# the cache, which is ``HEADS_AT_ONCE``. Without a mask all tiles weigh the same, and it is 1.
#
# **Load.** Each program reads its queries once.

lab.source(forward.attention_fwd_kernel, "load")

# %%
# ``q_desc`` is a :term:`tensor descriptor <descriptor>`, which states once what a tensor looks
# like: its address, its sizes, its strides, and the size of a tile.

lab.source(describe)

# %%
# A descriptor takes work from the threads. In the first kernel every thread computes an address and
# a mask for each of its elements, in :term:`registers <register>`, the storage private to a thread,
# and loads its own part of the tile. With a descriptor, one thread names a tile by its coordinates.
# The Tensor Memory Accelerator (TMA), the SM's copy engine, then computes the addresses, checks the
# bounds, fills with zeros what lies outside, and puts the tile into :term:`shared memory`, storage
# on the SM from which the matmul instructions read it.

lab.source(load_tile)

# %%
# Not every GPU gains from that. GPUs before Hopper, the generation of the H100 and H200, have no
# such copy engine; and the matmul instructions of a GeForce read registers, so a tile in shared
# memory is not yet where it is needed.
#
# There, Triton would turn a descriptor into addresses and masks again, and into slow ones. Before a
# thread may load 16 bytes at once, the compiler has to know that neighbours in a row are neighbours
# in memory, and a descriptor that comes from the host does not tell it so at compile time. It would
# load 2 bytes at a time. So on these GPUs the kernel gets the address of a head instead, and its
# last stride is the constant 1.

lab.source(head_of)

# %%
# **Why four dimensions?** All heads lie one after the other in memory, so a descriptor could
# present them as one matrix of (batch · heads · length) rows. But then the copy engine knows only
# where the whole matrix ends, and not where a head ends. The experiment takes two heads of 20 rows
# and tiles of 16: one program copies the last tile of the *first* head, times ten.

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
# With the flattened descriptor the program wrote 12 rows of the wrong head. Head 1 has a program
# that writes the same rows, and whichever finishes last wins. Where the length is a multiple of the
# tile, nothing goes wrong, which is why such a kernel passes many tests.
#
# Reading past the end of a head is not harmless either. The surplus rows get weight zero, but zero
# times infinity is NaN.

v = torch.zeros(32, 16)
v[20:] = torch.inf  # the first rows of the next head
weights = torch.zeros(1, 32)
weights[:, :20] = 1 / 20
found = (weights @ v)[0, 0].item()
lab.table(
    [{"read": "20 values and 12 of the next head", "sum": str(found)}], "Weight zero"
)

# %%
# **What tl.multiple_of was for.** Older kernels compute ``start_n`` in a loop and add it to an
# address, and the compiler has to prove that the address is aligned before it may load 16 bytes at
# once. ``tl.multiple_of`` promises what the compiler cannot prove. A descriptor makes the promise
# unnecessary, because the copy engine computes its addresses. The next kernel, which reads from a
# start that is unknown at compile time, shows the promise at work.


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
# **One iteration ahead.** A program can avoid waiting for keys by requesting them early. The number
# of *pipeline stages*, ``num_stages`` (not the causal stages above), says how many tiles of keys
# and of values are on their way, or in use, at a time. With three, copies start two iterations
# before they are needed.
#
# At head_dim 128, the queries take 32 KiB of shared memory and each tile of 64 keys or values takes
# 16 KiB. Three pipeline stages add up to 128 KiB, and only one program fits on an SM. Two stages
# take 96 KiB, and two programs fit. But with two, copies start only when the previous iteration
# ends, so an iteration that begins with a matmul has to wait for its keys.
#
# The kernel fills that wait with the exponentials, because they need no new data. Each iteration
# computes the scores of the *next* tile as its last step. The next iteration then begins with
# exponentials, and its keys and values arrive meanwhile.
#
# .. image:: /figures/attention-ahead.svg
#    :alt: Two timelines of one iteration. Above, it begins with a product: keys and values are
#          copied and the program waits. Then come q k, exponentials, and p v. Below, it begins with
#          exponentials, and values and the next keys are copied meanwhile. Then come p v, and
#          q k of the next tile. The iteration is shorter by the wait.
#
# The scores of the first tile are computed before the loop. On NVIDIA GPUs ``PRECISION`` is
# ``"tf32x3"``, which matters in float32 only: it splits each number into a coarse part and a
# remainder, both in TF32, and replaces one matmul by three on the tensor cores.

lab.source(forward.attention_fwd_kernel, "begin")

# %%
# **Stages.** The package has the two causal stages as well. ``visible`` computes what a tile of
# queries sees,

lab.source(visible)

# %%
# and the kernel calls the loop twice. Both calls leave out the last tile, because there is no tile
# after it to score. ``last`` is its first key, and ``cut`` is the first key of the first cut tile.
#
# Two bounds cover the special cases. If all tiles are whole, ``cut`` would lie beyond ``last``,
# hence the minimum. Queries that see nothing still get one tile, all of it masked, hence the
# maximum. ``ALL_WHOLE`` is known at compile time: without a mask, and with a length that is a
# multiple of the tile, the second loop does not exist.

lab.source(forward.attention_fwd_kernel, "stages")

# %%
# The size of a tile is a compromise: with more queries in it, keys and values are read less often,
# but a larger tile needs more registers and more shared memory. We tuned this once; the package
# keeps the winners in a table. A :term:`warp` is a group of 32 threads that execute the same
# instruction together.

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
# Registers, like shared memory, limit how many programs share an SM. The hardware allows 255
# registers per thread, and an SM has 65,536. A program of 8 warps has 256 threads, and 256 · 128 is
# half of 65,536, so with 128 registers two programs fit, and while one waits for a matmul, the
# other computes exponentials. At head_dim 256 a thread needs more registers, and a program has the
# SM to itself.
#
# **The loop.** Both stages run the same loop. ``qk`` holds the products of queries and keys that
# the previous iteration computed. First they become weights.

lab.source(forward.attend, "weigh")

# %%
# ``weigh`` first sets the scores that a query does not see to :math:`-\infty`, because the
# exponential of :math:`-\infty` is exactly 0.

lab.source(forward.weigh, "mask")

# %%
# Then come the lines of the mathematics. ``P_LOG2`` is 0 here; it belongs to :doc:`the chapter on
# FP8 </chapters/attention_fp8>`.

lab.source(forward.weigh, "rescale")

# %%
# ``qk`` is not scaled before the maximum is taken: the scale is positive, so the largest product
# belongs to the largest score, and one multiplication per row is enough. The other multiplications
# disappear in ``qk * scale_log2 - m_new``, which is a single instruction, a fused multiply-add.
#
# A single instruction matters here, because the exponentials compete with the matmuls. Per score,
# the tensor cores do :math:`4 D` operations. A Hopper SM does 4,096 of these per cycle, and 16
# exponentials. At head_dim 128 a score keeps the tensor cores busy for an eighth of a cycle, and
# its exponential takes a sixteenth; at head_dim 64 both take a sixteenth.
#
# So the exponential, the cheapest line of the mathematics, can cost as much as both matmuls, and
# every further instruction is felt. The table counts what the compiler makes of one exponential,
# written both ways: additions (``FADD``), multiplications (``FMUL``), fused multiply-adds
# (``FFMA``), and the exponential itself (``MUFU.EX2``).


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
# Next comes the weighted sum of the values. For 16-bit inputs the weights are rounded to 16 bits,
# because the tensor cores take both operands in one format. Their sum ``l_i`` was taken before, in
# float32.

lab.source(forward.attend, "accumulate")

# %%
# The last step of an iteration computes the scores of the next tile.

lab.source(forward.attend, "score")

# %%
# After the loops one tile is left to weigh. It is masked, unless ``ALL_WHOLE``. With 128 queries
# and 64 keys in a tile, the diagonal cuts two tiles: the second loop takes one, and this piece the
# other.

lab.source(forward.attention_fwd_kernel, "end")

# %%
# **Why does the maximum take two steps?** It could be one line, ``tl.max(x, axis=1)``. The package
# has this instead:

lab.source(forward.row_max)

# %%
# The reason is the *layout*, which says which thread holds which element of a tile. Each matmul has
# a layout for its result: the scores have one, and ``acc`` may have another. ``alpha`` is computed
# from the scores, and a one-step reduction inherits their layout. To multiply ``acc`` by it, the
# compiler carries ``acc`` through the loop twice.
#
# Then the assembler, which turns the compiler's output into machine instructions, finds registers
# of ``acc`` in use while a matmul is under way. It plays safe and waits after every single
# instruction of every matmul. The reshape gives the maximum a layout of its own, so ``acc`` is
# carried once.
#
# To see the effect, we run the same module with that one line changed.


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
# We count the instructions of the matmuls (``HGMMA``) and the waits for them
# (``WARPGROUP.DEPBAR``). The code holds six matmuls: one before the loops, two in each of the two
# loops, and one after them.


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
    f"Both give the same result. But with one step the program waits "
    f"{one.get('waits for them', nan)} times for {one.get('instructions of products', nan)} "
    f"instructions; with two steps it waits {two.get('waits for them', nan)} times, and runs at "
    f"{two.get('TFLOP/s', nan)} TFLOP/s instead of {one.get('TFLOP/s', nan)}. No error and no "
    f"warning reports this, because the assembler's message is not shown. When a loop with matmuls "
    f"is slower than it should be, count the waits."
)

# %%
# **Write.** The program ends with one division and one logarithm per query. ``sum_of_weights``
# returns ``l_i``, or NaN where a query sees keys and all their scores are :math:`-\infty`. ``m_i``
# is in base 2, so a factor :math:`\ln 2` turns lse back into a natural logarithm. Row numbers are
# 64 bits wide, because ``out`` may have more than :math:`2^{31}` elements.

lab.source(forward.attention_fwd_kernel, "write")

# %%
# **Grouped heads.** Several query heads may share one head of keys and values. If :math:`g` of them
# share one, query head :math:`h` reads head :math:`h / g` of the keys, rounded down, which is
# ``head // group`` in the kernel. Nothing is copied.
#
# **Strides.** A model often keeps its tensors as (batch, length, heads, head_dim) and passes a
# transposed view. A descriptor takes any strides, as long as the last dimension is contiguous and
# the others are multiples of 16 bytes. Any other view is copied first.

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
# The check compares with float64 truth over lengths of 1, 127 and 1,000, queries and keys of
# different length, head_dim 80 and 96, shared heads, and transposed views. In float32 the error may
# be up to eight times PyTorch's, because each matmul is a sum of three in a shorter format and
# ``exp2`` errs by two units in the last place. The same bound holds for lse, which is float32 for
# every input dtype.


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
# **Queries that see nothing.** With more queries than keys, the first queries see no key. A softmax
# over nothing is undefined, so we need a convention: the output is 0, and lse is the logarithm of
# an empty sum, :math:`-\infty`. The table sets this beside PyTorch with the same mask, and beside
# the first function of this page, which divides zero by zero.

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
# **Properties.** Some relations must hold for any input, and they catch mistakes that a comparison
# on random inputs may miss.

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
# The limit is a :term:`cuBLAS` matmul of two square matrices of size 8,192 in bfloat16. The number
# of operations is that of the first section, halved for a causal mask. We begin with the ladder
# from standard attention to the kernel, at head_dim 128.
#
# ``torch.compile`` gets the standard version. It has patterns that replace such code by a
# ready-made kernel, so we first ask whether it recognises this one.


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
# Zero means that it does not, so the table of scores stays.
#
# The ladder still lacks a rung, because the package's kernel introduces descriptors together with
# other changes. To see what descriptors do alone, here is the staged kernel with descriptors for
# keys and values, and nothing else changed.


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
# The tiled PyTorch version gets tiles of 1,024, because with small tiles it would spend its time on
# :term:`launches <launch>`. The three kernels of this page have 128 queries and 64 keys in a tile,
# as the package's kernel does, but three pipeline stages and no limit on registers.

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
    f"Standard attention waits for the table of scores ({at('PyTorch', 'full'):.0f} TFLOP/s "
    f"without a mask), and tiles in plain PyTorch do not help "
    f"({at('tiled PyTorch', 'full'):.0f}), because there every tile goes through memory, too. The "
    f"first kernel keeps its tiles on the chip and reaches {at('first kernel', 'full'):.0f}, but "
    f"{at('first kernel', 'causal'):.0f} with the causal mask, where it computes twice what is "
    f"needed. Stages raise the causal case to {at('in stages', 'causal'):.0f}, and lift the full "
    f"case to {at('in stages', 'full'):.0f} because it needs no mask. Descriptors change little by "
    f"themselves ({at('descriptors', 'full'):.0f} full, {at('descriptors', 'causal'):.0f} causal). "
    f"The package's kernel reaches {at('Kernel Book', 'full'):.0f} and "
    f"{at('Kernel Book', 'causal'):.0f} by several changes at once: it computes scores one "
    f"iteration ahead, so two pipeline stages are enough and two programs fit on an SM; the scale "
    f"costs it nothing; its maximum takes two steps; and with a mask its heavy tiles come first. "
    f"The ladder does not separate these."
)

# %%
# Now we compare the kernel with the libraries. SDPA is PyTorch's ``scaled_dot_product_attention``,
# of which we call two kernels by name. FlexAttention is compiled for each size. FlashAttention 4 is
# written in CuTe, which is closer to the machine than Triton.

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
            f"**head_dim {head_dim}, {mask}, length 16,384:** "
            f"{speed.rate('Kernel Book', **where):.0f} TFLOP/s, "
            f"{100 * speed.share('Kernel Book', **where):.0f} % of the matmul; the fastest "
            f"library, {name}, reaches {peer:.0f}, and SDPA's flash kernel "
            f"{speed.rate('SDPA flash', **where):.0f}."
        )
lab.read(" ".join(sentences))

# %%
# At this length the kernel is ahead of SDPA's flash kernel in all four cases, and behind
# FlashAttention 4. What keeps it below the speed of a matmul? One cost is the exponentials. By the
# count above they take half as long as the matmuls at head_dim 128 and as long at head_dim 64, so a
# kernel that never overlapped the two would reach two thirds or half of the speed of a perfect
# matmul. The row maxima and sums come on top.
#
# Two programs share an SM, and while one waits for a matmul, the other may compute exponentials,
# but nothing keeps them in step. FlashAttention-3 does so by hand: one group of warps multiplies
# while another computes exponentials. How much time our kernel loses to each cause, no run on this
# page tells.
#
# Under a causal mask, short lengths lose more, because the kernel computes the tiles on the
# diagonal whole and discards half of their scores. With 8 tiles of queries that is an eighth more
# work, and with 128 less than a hundredth.
#
# **Registers.** A register that :term:`spills <spill>` goes to memory, and ``acc`` is large: 128
# queries by 128 numbers are 64 registers for each of 256 threads. A tile of scores, of 64 keys,
# takes half as many. Together they take 96 of the 128 registers that a thread may have. In float32
# the operands are split into parts, and registers run short. The table shows what the compiler made
# of the kernel.


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
# **Small inputs.** Starting a kernel takes the host some time, whatever the kernel does. So at
# small sizes the time per call is that of its host code, and hardly depends on the length.


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
    f"{first.get('SDPA, µs', nan):.0f} µs in PyTorch, because the host code is Python here and C++ "
    f"there. At 4,096 the kernels themselves take longer than the host code, which hides it, and "
    f"the calls take {last.get('Kernel Book, µs', nan):.0f} and "
    f"{last.get('SDPA, µs', nan):.0f} µs."
)

# %%
# What breaks it
# --------------
#
# Here is a kernel for 64 queries of one head that can make five mistakes. Each mistake runs beside
# the right version.


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
# **No maximum subtracted.** On paper the maximum cancels. In float32 :math:`e^{89}` is infinite, so
# scores around a hundred are enough to make the result infinity divided by infinity.

compare("no maximum", 40, 20 * q, k, v, scale=2.0)

# %%
# **The mask is** ``>`` **and not** ``>=``. Every query misses its own key. The first query then
# sees nothing at all and becomes NaN. The second should average two values, and returns one of
# them.

compare("> for >=", 1, q, k, v)

# %%
# **The statistics are not updated.** Without ``m_i = m_new`` the old maximum stays :math:`-\infty`,
# so ``alpha`` is always 0 and every tile erases those before it. With a single tile the result
# would be right, which is why a test needs more than one.

compare("statistics not updated", 60, q, k, v)

# %%
# **The accumulator is not rescaled.** The sum ``l`` is, so numerator and denominator end on
# different scales. The mistake stays hidden as long as the largest score is in the first tile. Here
# the scores rise along the keys.

rising = 3 * torch.linspace(0, 1, 64, device=runtime.DEVICE).unsqueeze(1)
compare("acc not rescaled", 40, q.abs(), k + rising, v)

# %%
# **-1e6 in place of minus infinity.** The finite number avoids a NaN: when a whole row of a tile is
# masked, :math:`-\infty - (-\infty)` is NaN, and the difference of two finite numbers is 0. It
# works as long as every true score is above it. Lower scores are rare, but nothing forbids them.
# Then the *masked* keys win, and a query sees nothing but the future.

compare("-1e6 as the mask", 40, q - 3000, k + 3000, v, scale=0.25, mask_value=-1e6)

# %%
# With minus infinity a masked key can never win. The package avoids :math:`-\infty - (-\infty)` in
# another way: its running maximum starts not at minus infinity but at ``LOWEST``, the lowest finite
# number of float32. This is safe because :math:`-\infty` minus a finite number is :math:`-\infty`,
# whose exponential is 0.
#
# **Too much shared memory.** A tile of 128 keys at head_dim 128 takes 32 KiB in 16 bits, once for
# keys and once for values, and every pipeline stage has its own pair. Nothing warns when the kernel
# is written; the launch fails.


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
# it says what to change. Here it meets a made-up device that has only 8 KiB.

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
# **1. A sliding window.** Let query :math:`i` see only the last :math:`W` keys up to its own. Which
# tiles remain? Write the kernel so that it computes no others. ``_begin`` and ``_update`` from
# above do most of the work.

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
# score becomes :math:`s_{ij} - c\,(i - j)`, with a constant :math:`c` for each head. Can you get it
# from ``attention`` as it is, by adding columns to q, k and v?

# %%

# Solution: ALiBi, without a new kernel
#
# The term -c i is the same for all keys of a query, so it cancels in the softmax. What is left is
# c j, a product of one number of the query and one of the key, so one more column suffices.


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
# **3. One query, many keys.** When a model generates text, there is one query and a long past. A
# single tile of queries means one program per head, and most of the GPU stands idle. Split the keys
# into parts that are computed as if they were heads of their own, and merge. What do you need from
# each part?

# %%

# Solution: one query, many keys
#
# The merge needs the output and lse of each part. A part weighs in proportion to its sum of
# exponentials, exp(lse), so the weights are a softmax over lse. The parts are views: no copies.


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
#   per SM and cycle.

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
