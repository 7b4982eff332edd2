"""
Attention at full speed
=======================

The kernel of the last chapter computes only the tiles that a mask leaves, and still the tensor
cores, the GPU's matmul units, wait for much of its time. *Which changes bring it close to the
speed of a matmul, and what is each of them worth?*

You will learn

- what six changes to the kernel gain or lose, each measured against the kernel before it;
- why two programs on an SM can beat one, and how a loop hides its loads behind exponentials;
- how to test the finished kernel, and how far it stays behind the fastest library, FlashAttention.

The chapter runs on any NVIDIA GPU. Without one, the checks run in Triton's interpreter, and the
speeds are those of a recorded run.
"""

# sphinx_gallery_thumbnail_number = 1
import heapq
import importlib.util
import inspect
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.ops.attention import attention, forward, tuned
from kernelbook.ops.attention.forward import attend, row_max, weigh
from kernelbook.ops.attention.tiles import (
    LOWEST,
    PRECISION,
    describe,
    fit,
    head_of,
    load_tile,
    place,
    visible,
)

lab.start("attention_fast", "kernelbook.ops.attention")

# %%
# Where we start
# --------------
#
# Attention gives each query the average of the values, weighted by the softmax of its scores, which
# are its dot products with the keys. One :term:`program` of the kernel from :doc:`the chapter
# before </chapters/attention_forward>` keeps a :term:`tile` of queries. Its loop loads one tile of
# keys and values after the other, computes their scores, and updates for each query the largest
# score ``m_i``, the sum of weights ``l_i``, and the weighted sum of values ``acc``. With a causal
# mask it runs in two stages, first over the tiles that need no mask, then over those on the
# diagonal.
#
# We start from that kernel.

# Whole
import triton
import triton.language as tl


@triton.jit
def _begin(q_ptr, tile, head, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = head.to(tl.int64) * seqlen_q + queries
    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    exist = queries[:, None] < seqlen_q
    q = tl.load(q_ptr + offsets, mask=exist, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    return offsets, exist, q, m_i, l_i, acc


@triton.jit
def _update(acc, l_i, m_i, qk, v):
    m_new = tl.maximum(m_i, tl.max(qk, axis=1))
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_exp)
    p = tl.exp2(qk - m_exp[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_new


@triton.jit
def _meet(
    acc, l_i, m_i, q, k_ptr, v_ptr, start, end, n_visible, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
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
    return acc, l_i, m_i


@triton.jit
def _staged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, head = place(tl.cdiv(seqlen_q, BLOCK_M), heads, 1)
    offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, tile, head, seqlen_q, HEAD_DIM, BLOCK_M
    )
    first = head.to(tl.int64) * seqlen_k * HEAD_DIM
    n_visible, by_all, by_some = visible(
        tile * BLOCK_M, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M
    )
    whole = by_all // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _meet(
        acc, l_i, m_i, q, k_ptr + first, v_ptr + first, 0, whole,
        n_visible, seqlen_k, scale_log2, HEAD_DIM, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, l_i, m_i = _meet(
        acc, l_i, m_i, q, k_ptr + first, v_ptr + first, whole, by_some,
        n_visible, seqlen_k, scale_log2, HEAD_DIM, BLOCK_N, MASKED=True,
    )  # fmt: skip
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%
# ``place`` and ``visible`` are two helpers of the package: the first turns the number of a program
# into a tile of queries and a head, here simply one after the other, and the second says how many
# keys each query of the tile sees, all of them see, and some of them see. The rungs change
# this loop:
#
# .. literalinclude:: attention_fast.py
#    :pyobject: _meet
#
# We check the kernel against float64, as every rung after it.

BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 32}  # small, so that small inputs have many tiles


def run(kernel, q, k, v, is_causal, described=True, **options):
    options = BLOCKS | options
    batch, n_heads, seqlen_q, head_dim = q.shape
    heads, seqlen_k = batch * n_heads, k.shape[2]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    if described:
        flat = (x.view(1, heads, seqlen_k, head_dim) for x in (k, v))
        k, v = (describe(x, options["BLOCK_N"]) for x in flat)
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]) * heads,)
    sizes = (heads, seqlen_q, seqlen_k, scale_log2)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal}
    kernel[grid](q, k, v, out, *sizes, **constants, **options)
    return out


def cases(rung):
    for seqlen_q, seqlen_k, is_causal in (
        (100, 100, False),
        (100, 100, True),
        (40, 90, True),
    ):
        for dtype in (torch.float32, torch.float16):
            q = torch.randn(1, 2, seqlen_q, 32, device=runtime.DEVICE).to(dtype)
            k, v = torch.randn(2, 1, 2, seqlen_k, 32, device=runtime.DEVICE).to(dtype)
            ours = rung(q, k, v, is_causal)
            mask = torch.ones(
                seqlen_q, seqlen_k, dtype=torch.bool, device=runtime.DEVICE
            )
            mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
            theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            truth, _ = reference.attention(q, k, v, is_causal)
            what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor=8)


lab.check("In stages", cases(partial(run, _staged_kernel, described=False)))

# %%
# In float32 the error may be up to eight times PyTorch's, because each multiplication by ``alpha``
# adds a rounding and the later rungs split float32 into parts. No tolerance is less than this
# factor times half a unit in the last place of the dtype, because even the exact result, once
# rounded to the dtype, may be off by that half.
#
# **What could stop it: memory.** We set the operations that the machine does per byte, measured
# with a :term:`cuBLAS` matmul and a copy, beside those of attention.

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
# Programs load the keys and values again for each tile of queries. The table counts the bytes that
# the programs of one head load and store, and sets beside them the opposite order of the loops, in
# which a program keeps a tile of keys, reads all queries, and reads and writes back their ``acc``
# in float32.

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
# .. dropdown:: Why not keep the keys?
#
#    The smaller the tiles of queries, the less it saves to keep them. But keeping the keys has a
#    worse problem: programs with different keys add to the same ``acc``, so they would have to wait
#    for each other. The first FlashAttention avoided that by running one program per head, which
#    looped over the keys outside and over the queries inside. Then no two programs ever write the
#    same ``acc``, but a GPU with more than a hundred :term:`SMs <SM>` gets only as many programs as
#    there are heads, and with few heads most of it stands idle. If queries stay, no two programs
#    write to the same address, and there are as many programs as tiles of queries.

# %%

# Reading
nan = float("nan")
needed = machine.rows[0]["FLOP a byte"] if machine.rows else nan
per_byte = 4 * 4096**2 * 128 / (rows[0]["queries stay, MiB"] * 2**20)
from_hbm = per_byte * (machine.rows[0]["copy, GB/s"] if machine.rows else nan) / 1e3
lab.read(
    f"At length 4,096 a head does {4 * 4096**2 * 128 / 1e9:.2f} GFLOP on the "
    f"{rows[0]['queries stay, MiB']:.0f} MiB of its programs, which is {per_byte:.0f} operations "
    f"per byte, because a key that is loaded serves only the 128 queries of one tile. This machine "
    f"needs {needed:.0f} to keep its arithmetic busy. If every one of these bytes came from HBM, "
    f"the memory of the chip, attention could therefore reach "
    f"{per_byte:.0f} / {needed:.0f} = {100 * per_byte / needed:.0f} % of the speed of this matmul, "
    f"which is {from_hbm:.0f} TFLOP/s, and no more. It can exceed this, because the programs of a "
    f"head run at the same time and load the same keys and values, so the L2 cache, which the "
    f"whole chip shares, serves some of the loads. How many, no run on this page measures."
)

# %%
# **What could stop it: exponentials.** For each score the tensor cores do :math:`4 D` operations
# in two matmuls, and one exponential is computed. A Hopper SM does 4,096 of these operations per
# cycle, and 16 exponentials. At head_dim 128 the matmuls of a score take an eighth of a cycle, and
# its exponential a sixteenth; at head_dim 64 both take a sixteenth.
#
# So the exponentials take half as long as the matmuls at head_dim 128, and as long at head_dim 64.
# A kernel that never did both at once would spend :math:`1 / (1 + 1/2)`, two thirds, of its time
# on matmuls at head_dim 128, and half at head_dim 64, even if each of its matmuls ran at the full
# rate of the tensor cores. Maxima and sums come on top. The way up is therefore to do less besides
# the matmuls, and to do it at the same time.
#
# **The ladder.** Six changes follow. Each is measured in one run with the kernel before it, at
# length 4,096 and head_dim 128, with 128 queries and 64 keys in a tile. Some rungs prepare a later
# one, and may cost speed until it comes. We call a change of less than 1 % next to nothing.

# Measuring
A, B = (None, None) if runtime.INTERPRETED else matmul_operands()
WIDE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
LIMIT_WORK = f"2 * {MATMUL} * {MATMUL} * {MATMUL}"
units = {"limit": "matmul", "limit_work": LIMIT_WORK, "unit": "TFLOP/s"}
units["work"] = "4 * batch * heads * seqlen * seqlen * head_dim * causal"


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


RUNGS = {"in stages": partial(run, _staged_kernel, described=False, **WIDE)}


def providers_of(rungs):
    def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
        inputs = (*draw(seqlen, batch, heads, head_dim, dtype), mask == "causal")
        timed = {name: partial(rung, *inputs) for name, rung in rungs.items()}
        return {"matmul": lambda: A @ B} | timed

    return providers


def climb(name, rung):
    """Time a new rung in one run with the rung before it."""
    last = list(RUNGS)[-1]
    RUNGS[name] = rung
    two = {rung: RUNGS[rung] for rung in (last, name)}
    return lab.bench(name, points([4096], [128]), providers_of(two), **units)


def gains(step):
    """By how much the last rung is faster, without and with the causal mask."""
    before, after = list(RUNGS)[-2:]
    return [
        step.rate(after, mask=mask) / step.rate(before, mask=mask) - 1
        for mask in ("full", "causal")
    ]


def told(step):
    """The measurement of the last rung in words."""
    before, after = list(RUNGS)[-2:]

    def one(mask):
        return (
            f"{step.rate(before, mask=mask):.0f} → {step.rate(after, mask=mask):.0f} TFLOP/s, "
            f"{100 * step.share(after, mask=mask):.0f} % of the matmul"
        )

    return f"**Without a mask:** {one('full')}. **Causal:** {one('causal')}. "


def verdict(gain):
    if gain != gain:
        return "is not recorded"
    if abs(gain) < 0.01:
        return "changes next to nothing"
    return f"{'gains' if gain > 0 else 'loses'} {100 * abs(gain):.0f} %"


def outcome(*gains):
    """The verdicts without and with the causal mask, merged if they are the same."""
    one, other = (verdict(gain) for gain in gains)
    if one == other:
        return f"{one}, with or without a mask"
    return f"{one} without a mask and {other} with one"


# %%
# Rung 1: descriptors name tiles
# ------------------------------
#
# A :term:`tensor descriptor <descriptor>` states once what a tensor looks like: its address, its
# sizes, its strides, and the size of a tile. It takes work from the threads.
#
# .. image:: /figures/attention-descriptor.svg
#    :alt: Above, without a descriptor: 256 threads each compute addresses and a mask in registers,
#          and load their own part of a tile. Below, with a descriptor: one thread names the tile by
#          its coordinates, and the copy engine TMA computes addresses, checks the bounds, and puts
#          the tile into shared memory.
#
# In the staged kernel every thread computes an address and a mask for each of its elements, in
# :term:`registers <register>`, the storage private to a thread. With a descriptor, one thread names
# a tile by its coordinates. The Tensor Memory Accelerator (TMA), the copy engine of an SM since
# Hopper, then computes the addresses, checks the bounds, fills with zeros what lies outside, and
# puts the tile into :term:`shared memory`, storage on the SM from which Hopper's matmul
# instructions read it.

lab.source(load_tile)

# %%
# The loop now loads its tiles by ``load_tile``; the rest of the kernel stays.


@triton.jit
def _meet_described(
    acc, l_i, m_i, q, k_head, v_head, start, end, n_visible, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start_n in range(start, end, BLOCK_N):
        k = load_tile(k_head, start_n)
        qk = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        if MASKED:
            seen = start_n + tl.arange(0, BLOCK_N)[None, :] < n_visible[:, None]
            qk = tl.where(seen, qk, float("-inf"))
        v = load_tile(v_head, start_n)
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
    return acc, l_i, m_i


# %%


# Whole
@triton.jit
def _described_kernel(
    q_ptr, k_desc, v_desc, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, head = place(tl.cdiv(seqlen_q, BLOCK_M), heads, 1)
    offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, tile, head, seqlen_q, HEAD_DIM, BLOCK_M
    )
    n_visible, by_all, by_some = visible(
        tile * BLOCK_M, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M
    )
    k_head = head_of(k_desc, 0, head, BLOCK_N, HEAD_DIM)
    v_head = head_of(v_desc, 0, head, BLOCK_N, HEAD_DIM)
    whole = by_all // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _meet_described(
        acc, l_i, m_i, q, k_head, v_head, 0, whole,
        n_visible, scale_log2, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, l_i, m_i = _meet_described(
        acc, l_i, m_i, q, k_head, v_head, whole, by_some,
        n_visible, scale_log2, BLOCK_N, MASKED=True,
    )  # fmt: skip
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%

# Folded: Rung 1, checked
lab.check("With descriptors", cases(partial(run, _described_kernel)))

# %%

# Measuring
step = climb("descriptors", partial(run, _described_kernel, **WIDE))

# %%

# Reading
full, causal = gains(step)
lab.read(
    told(step)
    + f"By itself this rung {outcome(full, causal)}. With three pipeline stages the threads "
    f"compute "
    f"addresses while earlier tiles are under way, so there is little time to save."
)

# %%
# .. dropdown:: How a descriptor is made, and GPUs without a copy engine
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: describe
#
#    GPUs before Hopper have no TMA. The GeForce RTX 50 series has one, but its matmul instructions
#    read registers and not shared memory, so a tile in shared memory is not yet where it is needed.
#
#    On both, the kernel gets the address of a head instead. Where there is no TMA, Triton would
#    turn a descriptor into addresses and masks again, and into slow ones: before a thread may load
#    16 bytes at once, the compiler has to know that neighbours in a row are neighbours in memory,
#    and a descriptor that comes from the host does not tell it so at compile time. ``head_of``
#    gives it an address whose last stride is the constant 1.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: head_of

# %%
# Rung 2: the scale inside the exponential
# ----------------------------------------
#
# The exponential competes with the matmuls for time, so each instruction beside it counts. The
# staged kernel multiplies every score by the scale and later subtracts the maximum. But the scale
# is positive, so the largest dot product belongs to the largest score. We can take the maximum
# before we scale, and scale it once per row. With :math:`x` for a dot product, :math:`c` for the
# scale times :math:`\log_2 e`, and :math:`m = c \max x`:
#
# .. math::
#
#    \begin{aligned}
#    p &= 2^{c x - m} \\
#    &= \text{ex2}(\text{fma}(x,\, c,\, -m))
#    \end{aligned}
#
# Multiplication and subtraction are now one instruction, a fused multiply-add. It is in the line of
# ``p``; the flag ``TWO_STEPS`` belongs to the next rung.


@triton.jit
def _update_folded(acc, l_i, m_i, qk, v, scale_log2, TWO_STEPS: tl.constexpr):
    largest = row_max(qk) if TWO_STEPS else tl.max(qk, axis=1)
    m_new = tl.maximum(m_i, largest * scale_log2)
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(qk * scale_log2 - m_new[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_new


# %%


# Whole
@triton.jit
def _meet_folded(
    acc, l_i, m_i, q, k_head, v_head, start, end, n_visible, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TWO_STEPS: tl.constexpr,
):  # fmt: skip
    for start_n in range(start, end, BLOCK_N):
        k = load_tile(k_head, start_n)
        qk = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            seen = start_n + tl.arange(0, BLOCK_N)[None, :] < n_visible[:, None]
            qk = tl.where(seen, qk, float("-inf"))
        v = load_tile(v_head, start_n)
        acc, l_i, m_i = _update_folded(acc, l_i, m_i, qk, v, scale_log2, TWO_STEPS)
    return acc, l_i, m_i


@triton.jit
def _folded_kernel(
    q_ptr, k_desc, v_desc, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TWO_STEPS: tl.constexpr,
):  # fmt: skip
    tile, head = place(tl.cdiv(seqlen_q, BLOCK_M), heads, 1)
    offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, tile, head, seqlen_q, HEAD_DIM, BLOCK_M
    )
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    n_visible, by_all, by_some = visible(
        tile * BLOCK_M, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M
    )
    k_head = head_of(k_desc, 0, head, BLOCK_N, HEAD_DIM)
    v_head = head_of(v_desc, 0, head, BLOCK_N, HEAD_DIM)
    whole = by_all // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _meet_folded(
        acc, l_i, m_i, q, k_head, v_head, 0, whole,
        n_visible, scale_log2, BLOCK_N, MASKED=False, TWO_STEPS=TWO_STEPS,
    )  # fmt: skip
    acc, l_i, m_i = _meet_folded(
        acc, l_i, m_i, q, k_head, v_head, whole, by_some,
        n_visible, scale_log2, BLOCK_N, MASKED=True, TWO_STEPS=TWO_STEPS,
    )  # fmt: skip
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%
# The same function saves one operation per row. A maximum that starts at :math:`-\infty` needs a
# guard, because :math:`-\infty - (-\infty)` is NaN for a query that has seen no key. This one
# starts at ``LOWEST``, the lowest finite number of float32, which needs none: :math:`-\infty` minus
# a finite number is :math:`-\infty`, whose exponential is 0, and no true score is below ``LOWEST``.
#
# The table counts what the compiler makes of one exponential, written in three ways: additions
# (``FADD``), multiplications (``FMUL``), fused multiply-adds (``FFMA``), and the exponential itself
# (``MUFU.EX2``). From the first row to the second only the base changes, from the second to the
# third only the place of the scale.


# Measuring
@triton.jit
def _exponent_kernel(x_ptr, y_ptr, m, scale, WAY: tl.constexpr):
    at = tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    if WAY == 0:
        y = tl.exp((x - m) * scale)
    elif WAY == 1:
        y = tl.exp2((x - m) * scale)
    else:
        y = tl.exp2(x * scale - m)
    tl.store(y_ptr + at, y)


def instructions():
    x = torch.ones(128, device=runtime.DEVICE)
    ways = ("exp((x - m) * scale)", "exp2((x - m) * scale)", "exp2(x * scale - m)")
    rows = []
    for number, name in enumerate(ways):
        compiled = _exponent_kernel[(1,)](x, torch.empty_like(x), 3.7, 0.3, number)
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

# Folded: Rung 2, checked
ONE_STEP = {"TWO_STEPS": False}
lab.check("With the scale folded", cases(partial(run, _folded_kernel, **ONE_STEP)))

# %%

# Measuring
step = climb("scale folded", partial(run, _folded_kernel, **ONE_STEP, **WIDE))

# %%

# Reading
full, causal = gains(step)
lab.read(
    told(step)
    + f"One multiplication less per score {outcome(full, causal)}. So in this kernel these "
    f"instructions "
    f"are not what limits the speed; what else changed with them, this run does not show."
)

# %%
# Rung 3: the maximum in two steps
# --------------------------------
#
# The maximum of a row could be one line, ``tl.max(x, axis=1)``. The package has this instead:

lab.source(forward.row_max)

# %%
# The reason is the *layout*, which says which thread holds which element of a tile. Each matmul has
# a layout for its result: the scores have one, and ``acc`` may have another. ``alpha`` is computed
# from the scores, and a one-step reduction inherits their layout. To multiply ``acc`` by it, the
# compiler carries ``acc`` through the loop twice, once in each of the two layouts.
#
# Then the assembler, which turns the compiler's output into machine instructions, finds registers
# of ``acc`` in use while a matmul is under way. It plays safe and waits after every single
# instruction of every matmul. The reshape gives the maximum a layout of its own, so ``acc`` is
# carried once.
#
# In our kernel the flag ``TWO_STEPS`` selects ``row_max``.

# %%

# Folded: Rung 3, checked
TWO_STEPS = {"TWO_STEPS": True}
lab.check("Two-step maximum", cases(partial(run, _folded_kernel, **TWO_STEPS)))

# %%

# Measuring
step = climb("two-step maximum", partial(run, _folded_kernel, **TWO_STEPS, **WIDE))

# %%

# Reading
full, causal = gains(step)
lab.read(
    told(step)
    + f"In this kernel the rung {outcome(full, causal)}. Whether the assembler waits depends on "
    f"the loop around the maximum, so we look at the finished loop, too."
)

# %%
# We run the package's module with that one line changed, and count the instructions of the matmuls
# (``HGMMA``) and the waits for them (``WARPGROUP.DEPBAR``). We do it at head_dim 64, where the
# exponentials take as long as the matmuls, and at length 16,384, where nearly all of the time
# passes in the loop. The code holds six
# matmuls: one before the loops, two in each of the two loops, and one after them.

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


# Measuring
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
        row["matmul instructions"] = sum(w.startswith("HGMMA") for w in words)
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
    f"{one.get('waits for them', nan)} times for {one.get('matmul instructions', nan)} "
    f"instructions; with two steps it waits {two.get('waits for them', nan)} times, and runs at "
    f"{two.get('TFLOP/s', nan)} TFLOP/s instead of {one.get('TFLOP/s', nan)}. (Both are timed by "
    f"Triton's `do_bench`, call after call; the figures at the end of the page are timed with "
    f"pauses, and show more for the same kernel.) No error and no "
    f"warning reports this, because the assembler's message is not shown. When a loop with matmuls "
    f"is slower than it should be, count the waits."
)

# %%
# Rung 4: scores one iteration ahead
# ----------------------------------
#
# A program avoids waiting for keys by requesting them early. The number of *pipeline stages*,
# ``num_stages`` (not the causal stages), says how many tiles of keys and of values are on their
# way, or in use, at a time. With three, copies start two iterations before they are needed. With
# two, copies start only when the previous iteration ends, so an iteration that begins with a matmul
# has to wait for its keys.
#
# The kernel can fill that wait with exponentials, because they need no new data. Each iteration
# computes the scores of the *next* tile as its last step. The next iteration then begins with
# exponentials, and its keys and values arrive meanwhile.
#
# .. image:: /figures/attention-ahead.svg
#    :alt: Two timelines of one iteration. Above, it begins with a matmul: keys and values are
#          copied and the program waits. Then come q k, exponentials, and p v. Below, it begins with
#          exponentials, and values and the next keys are copied meanwhile. Then come p v, and
#          q k of the next tile. The iteration is shorter by the wait.
#
# This is the loop of the package. ``weigh`` does what ``_update_folded`` did, except the second
# matmul, and ``qk`` passes from one iteration to the next.

lab.source(forward.attend, "weigh")

# %%

lab.source(forward.attend, "accumulate")

# %%

lab.source(forward.attend, "score")

# %%
# ``PRECISION`` is ``"tf32x3"`` on NVIDIA GPUs, which matters in float32 only: it splits each number
# into a coarse part and a remainder, both in TF32, and replaces one matmul by three on the tensor
# cores.
#
# Around the loop, the kernel scores the first tile before it and weighs the last tile after it, so
# both stages leave out the last tile. ``HEAVY_FIRST`` and
# ``HEADS_AT_ONCE``, the last arguments in the folded code, belong to rung 6.
#
# .. dropdown:: Where the two stages end
#
#    ``last`` is the first key of the last tile, and ``cut`` that of the first masked tile. If all
#    tiles are whole, ``cut`` would lie beyond ``last``, hence the minimum. Queries that see nothing
#    still get one tile, all of it masked, hence the maximum.


# Whole
@triton.jit
def _ahead_kernel(
    q_ptr, k_desc, v_desc, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAVY_FIRST: tl.constexpr = False, HEADS_AT_ONCE: tl.constexpr = 1,
):  # fmt: skip
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = place(n_tiles, heads, HEADS_AT_ONCE)
    if HEAVY_FIRST:
        tile = n_tiles - 1 - tile
    offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, tile, head, seqlen_q, HEAD_DIM, BLOCK_M
    )
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    k_head = head_of(k_desc, 0, head, BLOCK_N, HEAD_DIM)
    v_head = head_of(v_desc, 0, head, BLOCK_N, HEAD_DIM)
    k = load_tile(k_head, 0)
    qk = tl.dot(q, k.T, input_precision=PRECISION)
    n_visible, by_all, by_some = visible(
        tile * BLOCK_M, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M
    )
    last = tl.maximum(tl.cdiv(by_some, BLOCK_N) - 1, 0) * BLOCK_N
    cut = tl.minimum(by_all // BLOCK_N * BLOCK_N, last)
    acc, l_i, m_i, qk = attend(
        acc, l_i, m_i, qk, q, k_head, v_head, 0, cut,
        n_visible, scale_log2, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, l_i, m_i, qk = attend(
        acc, l_i, m_i, qk, q, k_head, v_head, cut, last,
        n_visible, scale_log2, BLOCK_N, MASKED=True,
    )  # fmt: skip
    p, alpha, l_i, m_i = weigh(qk, l_i, m_i, last, n_visible, scale_log2, True)
    v = load_tile(v_head, last)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%

# Folded: Rung 4, checked
lab.check("One iteration ahead", cases(partial(run, _ahead_kernel)))

# %%

# Measuring
step = climb("one iteration ahead", partial(run, _ahead_kernel, **WIDE))

# %%

# Reading
full, causal = gains(step)
lab.read(
    told(step)
    + f"With three pipeline stages the tiles arrive early in either loop. There, the new order by "
    f"itself {outcome(full, causal)}. It is designed for two stages, which the next rung "
    f"uses; this run, with three, does not show what it is worth there."
)

# %%
# Rung 5: two programs on an SM
# -----------------------------
#
# At head_dim 128, the queries take 32 KiB of shared memory and each tile of 64 keys or values takes
# 16 KiB. Three pipeline stages add up to 128 KiB, and only one program fits on an SM. Two stages
# take 96 KiB, and two programs fit: while one waits for a matmul, the other computes exponentials.
#
# .. image:: /figures/attention-two-programs.svg
#    :alt: Two SMs, each a box of registers and a box of shared memory. On the left one program with
#          three stages fills 128 of 227 KiB of shared memory, and a second one does not fit. On the
#          right two programs with two stages take 96 KiB and half of the registers each.
#
# Registers limit this, too. An SM has 65,536. A :term:`warp` is a group of 32 threads that execute
# the same instruction together, and a program of 8 warps has 256 threads; 256 · 128 is half of
# 65,536. So ``maxnreg`` limits a thread to 128 registers, of the 255 that the hardware allows.
# ``acc``, with 128 queries by 128 numbers, takes 64 of them in each thread, and a tile of scores,
# with 64 keys, takes 32. What does not fit :term:`spills <spill>` to memory. The change is two
# options of the launch:

TWO = WIDE | {"num_stages": 2} | runtime.register_limit(128)

# %%

# Measuring
step = climb("two programs", partial(run, _ahead_kernel, **TWO))


def launched(rung):
    return lambda: rung(*draw(1024, 1, 4, 128, torch.bfloat16), True)


compiled_rungs = lab.facts(
    "What the compiler made of the rungs, causal",
    {name: launched(rung) for name, rung in RUNGS.items()},
)
compiled_rungs

# %%
# Registers are per thread, ``shared_bytes`` is the shared memory of a program, shuffles are
# instructions that pass values between the threads of a warp, and spills are registers that went
# to memory.

# Reading
full, causal = gains(step)
made = {row["case"]: row for row in compiled_rungs.rows}


def registers(rung):
    return made.get(rung, {}).get("registers", nan)


lab.read(
    told(step)
    + f"The change from three stages to two, and from one program on an SM to two, "
    f"{outcome(full, causal)}. Before it, a thread has {registers('in stages')} registers in the "
    f"staged kernel, {registers('descriptors')} with descriptors, {registers('scale folded')} with "
    f"the "
    f"scale folded and {registers('one iteration ahead')} one iteration ahead, all of them more "
    f"than the 128 of two programs. What each of the first four rungs is worth with two programs "
    f"on an SM, no run here shows."
)

# %%
# Rung 6: heavy tiles first
# -------------------------
#
# In causal attention the last queries see the most keys. If they start last, a few heavy programs
# run on at the end while the rest of the GPU has nothing to do.

# %% An animation
# A small example shows the difference: 16 programs run on three SMs, two at a time on each. Light
# first, a program of 8 tiles starts when most of the work is done, and the other slots idle until
# it ends. Heavy first, the light programs fill the gaps.
#
# .. animation:: light_or_heavy_first

# %%
# How much does that gain? Let's simulate it with 264 slots, because an H200 has 132 SMs and two
# programs of our kernel fit on each. A slot takes the next program when it is free, and a program
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
    if not rows:
        promised = finish_time(light_first) / finish_time(heavy_first) - 1
    rows.append(row)
lab.table(rows, "Share of 264 slots at work, causal")

# %%
# The first row is the case that we measure: length 4,096 in tiles of 128 queries, and 64 heads in
# all. The order within a head changes little there, because the heavy tiles of the last of many
# heads still start late; the animation has only two heads, so it shows a larger gain.
# "In turn" starts the heaviest tiles of *all* heads first and keeps nearly every slot at work. But
# all heads at once may have more keys and values than L2 holds, so the kernel interleaves only
# ``HEADS_AT_ONCE``, as many as fit into half of the cache. Without a mask all tiles weigh the same,
# so there ``HEADS_AT_ONCE`` is 1. ``place`` takes these heads in turn, and ``HEAVY_FIRST`` reverses
# the tiles.

lab.source(place)

# %%


def heavy_first(q, k, v, is_causal, **options):
    at_once = tuned.forward_heads_at_once(k, 1, is_causal)
    order = {"HEAVY_FIRST": True, "HEADS_AT_ONCE": at_once}
    return run(_ahead_kernel, q, k, v, is_causal, **order, **options)


lab.check("Heavy tiles first", cases(heavy_first))

# %%

# Measuring
step = climb("heavy first", partial(heavy_first, **TWO))

# %%

# Reading
full, causal = gains(step)
lab.read(
    told(step)
    + f"With the causal mask the order {verdict(causal)}, where the simulation of all heads in "
    f"turn promises {100 * promised:.0f} %; without a mask, where all programs weigh the same, it "
    f"{verdict(full)}."
)

# %%
# The kernel of the package
# -------------------------
#
# The package's kernel has these six rungs, and handles more inputs. It also writes :term:`lse
# <logsumexp>`, the logarithm of each query's sum of exponentials, from which the backward pass
# computes the weights again. ``ALL_WHOLE`` tells it at compile time that no tile needs a mask;
# then its second loop does not exist.
#
# ``sum_of_weights`` returns ``l_i``, or NaN where a query sees keys and all their scores are
# :math:`-\infty`. ``m_i`` is in base 2, so a factor :math:`\ln 2` turns lse back into a natural
# logarithm. Row numbers are 64 bits wide, because ``out`` may have more than :math:`2^{31}`
# elements.

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
# **Sizes of tiles.** With more queries in a tile, keys and values are read less often, but a larger
# tile needs more registers and more shared memory. We tuned this once; the package keeps the
# winners in a table.

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
# .. dropdown:: The kernel whole
#
#    ``P_LOG2`` is 0 here; it belongs to :doc:`the chapter on FP8 </chapters/attention_fp8>`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: row_max
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: weigh
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attend
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attention_fwd_kernel

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
# Some relations must hold for any input, and they catch mistakes that a comparison on random inputs
# may miss.

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
# First all rungs once more, now in one run, beside a cuBLAS matmul of two square matrices of size
# 8,192 in bfloat16. The last bar is the package's kernel.

# Measuring
RUNGS["Kernel Book"] = lambda q, k, v, is_causal: attention(
    q, k, v, is_causal=is_causal
)
steps = lab.bench("ladder", points([4096], [128]), providers_of(RUNGS), **units)
lab.ladder(
    steps,
    "From the staged kernel to the package's",
    list(RUNGS),
    by="mask",
    where={"seqlen": 4096},
)

# %%

# Reading


def at(name, mask):
    return steps.rate(name, mask=mask)


both = [
    f"from {at('in stages', mask):.0f} to {at('Kernel Book', mask):.0f} TFLOP/s "
    f"({100 * steps.share('Kernel Book', mask=mask):.0f} % of the matmul) {how}"
    for mask, how in (("full", "without a mask"), ("causal", "with the causal mask"))
]
more = [
    f"{100 * (at('Kernel Book', mask) / at('heavy first', mask) - 1):+.1f} %".replace(
        "-", "−"
    )
    for mask in ("full", "causal")
]
lab.read(
    f"The six rungs and the rest of the package's kernel lead {both[0]} and {both[1]}. Between the "
    f"last rung and the package's kernel lie {more[0]} without a mask and {more[1]} with one, "
    f"although that kernel also writes lse. Without a mask it has no second loop, which may be the "
    f"reason; for the gain with a mask this page measures none."
)

# %%

# Reading
above = [name for name in RUNGS if at(name, "full") > from_hbm]
lab.read(
    f"Without a mask, {len(above)} of these kernels exceed the {from_hbm:.0f} TFLOP/s that HBM "
    f"alone would allow: {', '.join(above) or 'none'}. The matmul runs at "
    f"{at('matmul', 'full'):.0f} TFLOP/s here, and at "
    f"{machine.rows[0]['matmul, TFLOP/s'] if machine.rows else nan} in the first table of the "
    f"page. There it is timed by Triton's `do_bench`, call after call; here all kernels take "
    f"turns, with a pause before each, so the chip may hold higher clocks. Shares of the matmul in "
    f"all figures refer to the latter way of timing."
)

# %%
# Now we compare the kernel with the libraries. SDPA is PyTorch's ``scaled_dot_product_attention``,
# of which we call two kernels by name. FlexAttention is compiled for each size. FlashAttention
# is version 4 of that library, written in CuTe, which is closer to the machine than Triton.

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

PEERS = ("SDPA flash", "SDPA cuDNN", "FlexAttention", "FlashAttention")


def ahead(**where):
    """The libraries that are faster at one point, the fastest first."""
    own = speed.rate("Kernel Book", **where)
    found = {name: speed.rate(name, **where) for name in PEERS}
    found = {name: rate for name, rate in found.items() if rate > own}
    return sorted(found.items(), key=lambda item: -item[1])


at_points = []
for point in points(LENGTHS, [128, 64]):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    faster = [f"{name} {rate:.0f}" for name, rate in ahead(**where)]
    own = speed.rate("Kernel Book", **where)
    share = speed.share("Kernel Book", **where)
    at_points.append(
        {
            "head_dim": point["head_dim"],
            "mask": point["mask"],
            "length": point["seqlen"],
            "TFLOP/s": f"{own:.0f}",
            "of the matmul": f"{100 * share:.0f} %",
            "faster libraries": ", ".join(faster) or "none",
        }
    )
lab.table(at_points, "The package's kernel, and the libraries that are faster")

# %%


# Reading
def leads(name, lengths):
    found = [row for row in at_points if row["length"] in lengths]
    return f"{sum(name in row['faster libraries'] for row in found)} of {len(found)}"


lab.read(
    f"FlashAttention is faster at {leads('FlashAttention', LENGTHS[-1:])} points of the longest "
    f"length and at {leads('FlashAttention', LENGTHS[:1])} of the shortest, cuDNN at "
    f"{leads('SDPA cuDNN', LENGTHS[-1:])} and {leads('SDPA cuDNN', LENGTHS[:1])}. The package's "
    f"kernel is the fastest at {leads('none', LENGTHS)} points."
)

# %%
# What keeps it below the speed of a matmul? One cost is the exponentials, which by the count of the
# first section take half as long as the matmuls at head_dim 128 and as long at head_dim 64. Two
# programs share an SM, and while one waits for a matmul, the other may compute exponentials, but
# nothing keeps them in step. FlashAttention-3 does so by hand: one group of warps does matmuls
# while another computes exponentials. How much time our kernel loses to each cause, no run on this
# page tells.
#
# Under a causal mask, short lengths lose more, because the kernel computes the tiles on the
# diagonal whole and discards half of their scores: an eighth more work with 8 tiles of queries, and
# less than a hundredth with 128.
#
# **Registers.** In float32 the operands are split into parts, and registers run short. The table
# shows what the compiler made of the kernel.


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
    f"{first.get('SDPA, µs', nan):.0f} µs in PyTorch, which chooses the backend of SDPA itself, "
    f"because the host code is Python here and C++ there. "
    f"At 4,096 the kernels themselves take longer than the host code, which hides it, and "
    f"the calls take {last.get('Kernel Book, µs', nan):.0f} and "
    f"{last.get('SDPA, µs', nan):.0f} µs."
)

# %%
# What breaks it
# --------------
#
# **A descriptor that flattens the heads.** All heads lie one after the other in memory, so a
# descriptor could present them as one matrix of (batch · heads · length) rows. But then the copy
# engine knows only where the whole matrix ends, and not where a head ends. The experiment takes two
# heads of 20 rows and tiles of 16: one program copies the last tile of the *first* head, times ten.

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
# it says so, and names what needs less. Here it meets a made-up device that has only 8 KiB; the
# advice is the same for every dtype, so here, where the dtype has 16 bits already, only a smaller
# head_dim would help.

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
# **An address that the compiler cannot prove aligned.** Kernels without descriptors compute
# ``start_n`` in a loop and add it to an address, and the compiler has to prove that the address is
# aligned before it may load 16 bytes at once. ``tl.multiple_of`` promises what the compiler cannot
# prove. A descriptor makes the promise unnecessary, because the copy engine computes its addresses.
# We load from a start that is unknown at compile time, with and without the promise.


# Measuring
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
# Exercises
# ---------
#
# **1. How many programs fit?** An SM of a Hopper GPU has 227 KiB of shared memory and 65,536
# registers. Which tiles of 64, 128 or 256 keys, and how many pipeline stages, leave room for two
# programs of 128 queries at head_dim 128 in 16 bits, by shared memory alone?

# %%

# Solution: how many programs fit
rows = []
for keys in (64, 128, 256):
    row = {"keys in a tile": keys}
    for stages in (1, 2, 3):
        kib = (128 + stages * 2 * keys) * 128 * 2 / 1024
        row[f"{stages} stages"] = f"{kib:.0f} KiB: {int(227 // kib)}"
    rows.append(row)
assert rows[0]["2 stages"] == "96 KiB: 2"
lab.table(rows, "Shared memory of a program, and the programs that fit on an SM")

# %%
# A second one has grown into a chapter: with one query and many keys, as when a model generates
# text, this kernel has one program per head and leaves most of the GPU idle.
# :doc:`/chapters/attention_in_models` splits the keys.

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
# - Ainslie and others. *GQA: training generalized multi-query transformer models from multi-head
#   checkpoints.* EMNLP 2023.
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
