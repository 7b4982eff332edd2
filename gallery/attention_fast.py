"""
Attention, rung by rung
=======================

The kernel of the last chapter keeps its scores on the chip and skips every tile that the mask
empties. It is still far slower than a matmul. *Which changes narrow the gap, and how much is each
of them worth?*

You will learn

- how to measure what each of six changes is worth, when it is made and when it is taken back;
- how to count the waits in machine code, and ask the assembler for their reason;
- how to test whether exponentials cost time or hide behind matmuls.

The kernel is the package's, in plain Triton: ``attention(..., backend="triton")``.
"""

# sphinx_gallery_thumbnail_number = 1
import heapq
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import attention as public_attention
from kernelbook import lab, reference, runtime
from kernelbook.lab import results
from kernelbook.lab.attention_bench import (
    FORWARD,
    LIBRARIES,
    balance,
    draw,
    libraries,
    matmul,
    points,
)
from kernelbook.lab.display import Shown, show
from kernelbook.ops.attention import tuned
from kernelbook.ops.attention.forward import row_max
from kernelbook.ops.attention.tiles import (
    LOWEST,
    PRECISION,
    describe,
    head_of,
    load_tile,
    place,
)

# By default the package may take another kernel on a Hopper GPU. This page never does.
attention = partial(public_attention, backend="triton")

lab.start("attention_fast", "kernelbook.ops.attention")

# %%
# What could hold attention back
# ------------------------------
#
# Attention is two matmuls with exponentials in between. It could run at the speed of a matmul if
# the :term:`tensor cores <matrix unit>`, the GPU's matmul units, paused as rarely. Four things can
# make them pause.


# Measuring
def moved_by(length):
    """MiB of one head in tiles of 128, and those if a program kept a tile of keys instead."""
    tensor, tiles = length * 128 * 2 / 2**20, length // 128
    queries_stay = tensor + tiles * 2 * tensor + tensor
    keys_stay = 2 * tensor + tiles * (tensor + 2 * tensor + 2 * tensor)
    return queries_stay, keys_stay


machine = lab.measure("What the GPU can do, bfloat16", balance)

# %%

# Reading
nan = float("nan")
best = machine.rows[0] if machine.rows else {}
matmul_speed, copy_speed = (best.get(x, nan) for x in ("matmul, TFLOP/s", "copy, GB/s"))
needed = 1e3 * matmul_speed / copy_speed
per_byte = 4 * 4096**2 * 128 / (moved_by(4096)[0] * 2**20)
from_hbm = per_byte * copy_speed / 1e3


def finished_without_a_mask():
    """The TFLOP/s of the last rung without a mask, as the book's record of this page has it."""
    sweep = (results.find("attention_fast") or {}).get("sweeps", {}).get("ladder", {})
    times = sweep.get("milliseconds", {}).get("heavy first")
    if not times:
        return nan
    at = [point["mask"] for point in sweep["points"]].index("full")
    point = sweep["points"][at]
    scores = point["batch"] * point["heads"] * point["seqlen"] ** 2
    return 4 * scores * point["head_dim"] / times[at][1] / 1e9


will_reach = finished_without_a_mask()
lab.read(
    "**Memory.** The tiles may arrive too late. "
    + (
        f"If every byte came from HBM, the memory outside the chip, at the speed of a copy, "
        f"attention could not exceed {from_hbm:.0f} TFLOP/s, {100 * from_hbm / matmul_speed:.0f} % "
        f"of the speed of a matmul. "
        + (
            f"Without a mask, the finished kernel will reach {will_reach:.0f}, so the L2 cache "
            f"must serve some of the loads."
            if will_reach > from_hbm
            else "But the L2 cache can serve some of the loads."
        )
        if per_byte < needed
        else f"But even if every byte comes from HBM, the memory outside the chip, memory allows "
        f"{from_hbm:.0f} TFLOP/s, more than a matmul reaches."
    )
)

# %%

# Folded: The bytes counted, and why a program keeps its queries and loads the keys
queries_stay, keys_stay = moved_by(4096)
bytes_counted = lab.read(
    f"At length 4,096 and head_dim 128, a head does {4 * 4096**2 * 128 / 1e9:.2f} GFLOP on "
    f"{queries_stay:.0f} MiB, because each tile of 128 queries loads all keys and values again. "
    f"This is {per_byte:.0f} operations per byte."
)
from_l2 = lab.read(
    f"In this run, a matmul reaches {matmul_speed:.0f} TFLOP/s and a copy {copy_speed:,.0f} GB/s, "
    f"so the GPU can do {needed:.0f} operations in the time of a byte. L2 can help because the "
    f"programs of a head load the same keys and values at the same time."
)
why_queries = lab.read(
    f"**Why a program keeps queries.** If it kept a tile of keys instead, it would have to read "
    f"all queries, and to read and write back their `acc` in float32. This is {keys_stay:,.0f} MiB "
    f"per head instead of {queries_stay:,.0f}. Worse, programs with different keys would add to "
    f"the same `acc`, and would have to wait for each other. The first FlashAttention avoided this "
    f"with one program per head, which leaves most SMs idle if the heads are few. If each program "
    f"keeps its queries, no two programs write to the same address."
)
lab.together(bytes_counted, from_l2, why_queries)

# %%
# **Exponentials.** For head_dim :math:`D`, each score costs :math:`4 D` operations in the two
# matmuls and one exponential. Per cycle, an :term:`SM` of a Hopper GPU executes 4,096 such
# operations, but only 16 exponentials. At head_dim 128, the matmuls of a score therefore take 512 /
# 4,096 = 1/8 of a cycle, and its exponential takes 1/16, half as long.
#
# If all :term:`warps <warp>` of an SM alternate between the two in step, the tensor cores work for
# at most two thirds of the time. A second program can fill the rest:


# Drawing
def bound_of_turns(head_dim):
    """For how much of the time tensor cores work, in percent, if a kernel never does both."""
    matmuls, exponential = 4 * head_dim / 4096, 1 / 16  # cycles of an SM for a score
    return 100 * matmuls / (matmuls + exponential)


def turns(axes):
    """The tensor cores and the exponentials of an SM over time, with one program and with two."""
    shades = {"A": lab.colour("Kernel Book"), "B": lab.colour("PyTorch")}

    def block(y, start, length, name):
        length = min(length, 9 - start)
        if length > 0:
            axes.barh(y, length - 0.06, 0.7, start, color=shades[name], alpha=0.3)
            axes.text(start + length / 2, y, name, ha="center", va="center")

    for top, programs, every in ((0.0, "A", 3), (3.3, "AB", 2)):
        title = "Two programs" if "B" in programs else "All warps in step"
        said = "up to 100" if "B" in programs else f"{bound_of_turns(128):.0f}"
        axes.text(-3.3, top - 0.2, title, va="center", fontweight="bold")
        axes.text(
            9, top - 0.2, f"matmuls {said} % of the time", va="center", ha="right"
        )
        axes.text(-0.25, top + 0.7, "matmuls", va="center", ha="right")
        axes.text(-0.25, top + 1.6, "exponentials", va="center", ha="right")
        for step, at in enumerate(range(0, 9, every)):
            block(top + 0.7, at, 2, programs[step % len(programs)])
            block(top + 1.6, at + 2, 1, programs[step % len(programs)])
            if programs == "A":
                look = {"fill": False, "edgecolor": lab.colour("matmul")}
                axes.barh(top + 0.7, 0.94, 0.7, at + 2, linestyle=":", **look)
                axes.text(at + 2.5, top + 0.7, "idle", ha="center", va="center")
    axes.set(xlim=(-3.3, 9.05), ylim=(5.5, -0.6), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "A second program can fill the idle time",
    "Two timelines of an SM. All warps in step: matmuls for two units of time, then exponentials "
    "for one, in which the tensor cores are idle. Two programs: one computes exponentials during "
    "the matmuls of the other, and the tensor cores are never idle.",
    turns,
    height=2.9,
)

# %%
# **Waits.** If a program waits after each matmul instruction, the tensor cores are idle until it
# issues the next.
#
# **The end.** If the programs that start last are long ones, other SMs are idle while these finish.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    A second program on an SM can use the tensor cores while the first computes exponentials or
#    waits. The first of our six changes makes room for it, and the next three make it pay, because
#    they save registers or remove waits.

# %%
# The loop
# --------
#
# Where can a program wait? The loop that we change loads a tile of keys, computes the scores
# ``qk``, turns them into weights ``p``, and adds the weighted values to ``acc``. It may have to
# wait at either ``tl.dot``:
#
# .. code-block:: python
#
#    for start_n in range(start, end, BLOCK_N):
#        k = _tile(k_head, start_n)
#        qk = tl.dot(q, k.T)
#        p, alpha, l_i, m_i = _weigh(qk, l_i, m_i)
#        v = _tile(v_head, start_n)
#        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
#
# ``_tile`` loads a tile of a head's rows, starting at ``start_n``. ``_weigh`` computes the weights,
# updates each query's largest score ``m_i`` and sum of weights ``l_i``, and returns ``alpha``,
# which rescales the old sums to the new maximum.
#
# Each ``tl.dot`` becomes several matmul instructions. On Hopper, a program can hand all of them
# over to the tensor cores, do other work, and **wait** once, where it needs the result. At worst,
# it waits after each instruction:
#
# .. image:: /figures/attention-waits.svg
#    :alt: Two timelines of the eight instructions of a tl.dot. At best, the program hands over all
#          of them, works, and waits once, and the tensor cores work without a gap. At worst, it
#          waits after each, and the tensor cores are idle in between.
#
# Until a matmul is complete, nothing else may use the registers that it reads and writes. Where the
# assembler, the last stage of the compiler, cannot guarantee this, it makes the program wait after
# each instruction.
#
# We can count the waits. In :term:`SASS`, the machine code, a matmul instruction is called
# ``HGMMA`` and a wait ``WARPGROUP.DEPBAR``:
#
# .. code-block:: python
#
#    compiled = kernel[grid](*arguments)  # a launch returns the compiled kernel
#    code = compiled.asm["sass"]          # its machine code, as text
#    code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
#
# How many should there be? An instruction covers 16 steps of the inner dimension. So ``q kᵀ`` takes
# 8, because head_dim is 128, and ``p v`` takes 4, because a tile has 64 keys. The kernel contains
# the loop twice, for whole tiles and for tiles that the mask cuts. This makes 2 · (8 + 4) = 24
# instructions and, at best, 2 · 2 = 4 waits.

# %%
# The ladder
# ----------
#
# What does each change gain? The *rungs* of our ladder are the six changes, made one after the
# other to the staged kernel of the last chapter. Speeds are percentages of a :term:`cuBLAS`
# matmul's in the same run, with a causal mask unless the text says otherwise.


# Whole: one for all rungs, with a flag for each change
#
# DESCRIBED is the flag of rung 2, AHEAD of rung 3, TWO_STEPS of rung 4, FOLDED of rung 5 and
# HEAVY_FIRST of rung 6; rung 1 is two options of the launch. MASKED is set for tiles that the
# causal mask cuts; there each query keeps its first n_visible keys. Without a descriptor, of_head
# is the address of a head, and rows past its end are masked. With one, it is the descriptor and
# where the head lies in it.
import triton
import triton.language as tl


@triton.jit
def _loop(
    acc, l_i, m_i, qk, q, k_head, v_head, start, end, n_visible, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr, AHEAD: tl.constexpr,
    TWO_STEPS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    for start_n in range(start, end, BLOCK_N):
        if not AHEAD:
            k = _tile(k_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N, MASKED, DESCRIBED)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
        p, alpha, l_i, m_i = _weigh(
            qk, l_i, m_i, start_n, n_visible, scale_log2, MASKED, TWO_STEPS, FOLDED
        )
        v = _tile(v_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N, MASKED, DESCRIBED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if AHEAD:
            after = start_n + BLOCK_N
            k = _tile(k_head, after, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
    return acc, l_i, m_i, qk


@triton.jit
def _tile(
    of_head, start, length, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    if DESCRIBED:
        return load_tile(of_head, start)
    else:
        rows = start + tl.arange(0, ROWS)[:, None]
        ptrs = of_head + rows * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        if MASKED:
            return tl.load(ptrs, mask=rows < length, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def _weigh(
    qk, l_i, m_i, start_n, n_visible, scale_log2,
    MASKED: tl.constexpr, TWO_STEPS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    if not FOLDED:
        qk = qk * scale_log2
    if MASKED:
        keys = start_n + tl.arange(0, qk.shape[1])
        qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
    # -- maximum
    largest = row_max(qk) if TWO_STEPS else tl.max(qk, axis=1)
    # -- exponential
    if FOLDED:
        m_new = tl.maximum(m_i, largest * scale_log2)
        p = tl.exp2(qk * scale_log2 - m_new[:, None])
    else:
        m_new = tl.maximum(m_i, largest)
        p = tl.exp2(qk - m_new[:, None])
    # -- rescale
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    return p, alpha, l_i, m_new


@triton.jit
def _rung_kernel(
    q, k, v, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, AHEAD: tl.constexpr, TWO_STEPS: tl.constexpr,
    FOLDED: tl.constexpr, HEAVY_FIRST: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = place(n_tiles, heads, HEADS_AT_ONCE)
    if HEAVY_FIRST:
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M
    queries = start_m + tl.arange(0, BLOCK_M)

    # -- load the queries, which stay
    head_64 = head.to(tl.int64)
    if DESCRIBED:
        q_head = head_of(q, 0, head, BLOCK_M, HEAD_DIM)
        k_head = head_of(k, 0, head, BLOCK_N, HEAD_DIM)
        v_head = head_of(v, 0, head, BLOCK_N, HEAD_DIM)
    else:
        q_head = q + head_64 * seqlen_q * HEAD_DIM
        k_head = k + head_64 * seqlen_k * HEAD_DIM
        v_head = v + head_64 * seqlen_k * HEAD_DIM
    q_i = _tile(q_head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, True, DESCRIBED)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    qk = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    # -- divide the keys between the two stages
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    seen_by_all, end = seqlen_k, seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        n_visible = tl.minimum(queries + 1 + shift, seqlen_k)
        seen_by_all = tl.maximum(tl.minimum(start_m + 1 + shift, seqlen_k), 0)
        end = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, seqlen_k), 0)
    if AHEAD:  # the last tile has no next one, so it comes after the loops
        k_0 = _tile(k_head, 0, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
        qk = tl.dot(q_i, k_0.T, input_precision=PRECISION)
        end = tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0) * BLOCK_N
    whole = tl.minimum(seen_by_all // BLOCK_N * BLOCK_N, end)
    acc, l_i, m_i, qk = _loop(
        acc, l_i, m_i, qk, q_i, k_head, v_head, 0, whole, n_visible, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_N, False, DESCRIBED, AHEAD, TWO_STEPS, FOLDED,
    )  # fmt: skip
    acc, l_i, m_i, qk = _loop(
        acc, l_i, m_i, qk, q_i, k_head, v_head, whole, end, n_visible, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_N, True, DESCRIBED, AHEAD, TWO_STEPS, FOLDED,
    )  # fmt: skip
    if AHEAD:
        p, alpha, l_i, m_i = _weigh(
            qk, l_i, m_i, end, n_visible, scale_log2, True, TWO_STEPS, FOLDED
        )
        v_i = _tile(v_head, end, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
        acc = tl.dot(
            p.to(v_i.dtype), v_i, acc * alpha[:, None], input_precision=PRECISION
        )

    # -- write
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    rows = head_64 * seqlen_q + queries
    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, out, mask=queries[:, None] < seqlen_q)


# %%


# Measuring
LADDER = {
    "in stages": {
        "num_stages": 3, "DESCRIBED": False, "AHEAD": False,
        "TWO_STEPS": False, "FOLDED": False, "HEAVY_FIRST": False,
    },
    "two programs": {"num_stages": 2} | runtime.register_limit(128),
    "descriptors": {"DESCRIBED": True},
    "one iteration ahead": {"AHEAD": True},
    "two-step maximum": {"TWO_STEPS": True},
    "scale folded": {"FOLDED": True},
    "heavy first": {"HEAVY_FIRST": True},
}  # fmt: skip
WIDE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
RUNGS, so_far = {}, {}
for name, change in LADDER.items():
    RUNGS[name] = so_far = so_far | change


def run(q, k, v, is_causal, **options):
    batch, n_heads, seqlen_q, head_dim = q.shape
    heads, seqlen_k = batch * n_heads, k.shape[2]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    sizes = (heads, seqlen_q, seqlen_k, scale_log2)
    at_once = 1
    if options["HEAVY_FIRST"]:
        at_once = tuned.forward_heads_at_once(k, 1, is_causal)
    if options["DESCRIBED"]:
        rows = (options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_N"])
        flat = (x.view(1, heads, -1, head_dim) for x in (q, k, v))
        q, k, v = (describe(x, n) for x, n in zip(flat, rows, strict=True))
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]) * heads,)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal, "HEADS_AT_ONCE": at_once}
    _rung_kernel[grid](q, k, v, out, *sizes, **constants, **options)
    return out


def cases():
    small = {"BLOCK_M": 64, "BLOCK_N": 32}  # even small inputs have many such tiles
    sizes = ((100, 100, False), (100, 100, True), (40, 90, True))
    inputs = [(*size, 2, 32, torch.float32, small) for size in sizes]
    if not runtime.INTERPRETED:  # as they are timed, with fewer queries
        timed = (16, 128, torch.bfloat16, WIDE)
        inputs += [(1024, 1024, is_causal, *timed) for is_causal in (False, True)]
    for seqlen_q, seqlen_k, is_causal, heads, head_dim, dtype, blocks in inputs:
        q = torch.randn(1, heads, seqlen_q, head_dim, device=runtime.DEVICE).to(dtype)
        of_keys = (2, 1, heads, seqlen_k, head_dim)
        k, v = torch.randn(of_keys, device=runtime.DEVICE).to(dtype)
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=runtime.DEVICE)
        mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        truth, _ = reference.attention(q, k, v, is_causal)
        factor = 8 if dtype == torch.float32 else 2
        for name, options in RUNGS.items():
            ours = run(q, k, v, is_causal, **blocks, **options)
            what = f"{name}, {seqlen_q} × {seqlen_k}{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor)


# %%


# Measuring
def without(name):
    """The options of the last rung with one change taken back."""
    kept = {key: value for key, value in so_far.items() if key not in LADDER[name]}
    start = RUNGS["in stages"]
    return kept | {key: start[key] for key in LADDER[name] if key in start}


def with_one_program(name):
    """The options of a rung without rung 1: three pipeline stages, and no register limit."""
    kept = {key: value for key, value in RUNGS[name].items() if key != "maxnreg"}
    return kept | {"num_stages": 3}


START = RUNGS["in stages"]
TAKEN_BACK = {f"without {name}": without(name) for name in list(LADDER)[1:-1]}
HALVES = {  # the rung "two programs" is two changes; the last rung with one of them taken back
    "without register limit": {k: v for k, v in so_far.items() if k != "maxnreg"},
    "without two stages": so_far | {"num_stages": 3},
}
ALONE = {  # each of the two by itself, at the start
    "two stages alone": START | {"num_stages": 2},
    "register limit alone": START | runtime.register_limit(128),
}
ONE_PROGRAM = {  # the first rung is the start, and the last one is "without two programs"
    f"{name}, one program": with_one_program(name) for name in list(LADDER)[2:-1]
}


# the intermediate code of a kernel, changed by hand
def one_wait(code):
    """Where code waits twice for one matmul, delete the second wait and take the first's result."""
    twice = r"([^ ]+):2 = (ttng.warp_group_dot_wait .*)\n *([^ ]+):2 = .*"
    for first, of, second in re.findall(twice, code):
        line = re.search(re.escape(f"{second}:2 = {of}") + ".*", code)
        if line:
            code = code.replace(line[0], "").replace(f"{second}#", f"{first}#")
    return code


def no_exponentials(code):
    """Take the exponents themselves for weights: delete every exponential of a whole tile."""
    for p, exponent in re.findall(r"(%\w+) = math.exp2 (%\w+) : tensor<\d+x\d+x", code):
        code = re.sub(rf" *{p} = math.exp2 .*\n", "", code)
        code = re.sub(rf"{p}(?!\w)", exponent, code)
    return code


def edited(change, launch):
    """Launch a kernel from Triton's intermediate code (ttgir) as a function changes it.

    ptxas gets its own default as an option, so that Triton's caches keep the kernels apart.
    """
    from triton import knobs
    from triton._C.libtriton import ir

    def hook(backend=None, stages=None, options=None, language=None, capability=None):
        if stages is None:  # Triton 3.7: what to add to a cached name
            return change.__name__, repr(change.__name__)
        made = stages["ttgir"]

        def ttgir(source, metadata):
            module = made(source, metadata)
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "edited.ttgir")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(change(str(module)))
                changed = ir.parse_mlir_module(path, module.context)
            changed.context = module.context
            return changed

        stages["ttgir"] = ttgir

    knobs.runtime.add_stages_inspection_hook = hook
    default = {one_wait: "-O3", no_exponentials: "--opt-level=3"}
    try:
        return launch(ptx_options=default[change])
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    inputs = (*draw(batch, heads, seqlen, head_dim, dtype), mask == "causal")
    timed = {
        name: partial(run, *inputs, **WIDE, **options)
        for name, options in (RUNGS | TAKEN_BACK | HALVES | ALONE | ONE_PROGRAM).items()
    }
    third = timed["one iteration ahead"]
    timed["one wait"] = lab.tried(partial(edited, one_wait, third), "an edited rung 3")
    timed["Kernel Book"] = lambda: attention(*inputs[:3], is_causal=inputs[3])
    return {"matmul": matmul()} | timed


steps = lab.bench("ladder", points([4096], [128]), ladder_providers, **FORWARD)

# %%


# Drawing
CHANCE = 0.015  # a smaller difference is none that we can tell

CAUSES = {
    "in stages": "one program per SM",
    "two programs": "two stages, 128 registers",
    "descriptors": "no addresses in registers",
    "one iteration ahead": "p v ends before q kᵀ starts",
    "two-step maximum": "one wait per tl.dot",
    "scale folded": "one multiplication fewer",
    "heavy first": "long programs start first",
}


def shares(rows):
    """Percent of the matmul of each rung, with a causal mask and without."""
    found = {(r["provider"], r["mask"]): 100 * r["share"] for r in rows}
    complete = all((name, "causal") in found for name in LADDER)
    return [
        [found[name, mask] for name in LADDER] if complete else []
        for mask in ("causal", "full")
    ]


def steps_in_words(rows):
    causal, full = shares(rows)
    said = (
        f"{name} {a:.0f} and {b:.0f}"
        for name, a, b in zip(LADDER, causal, full, strict=bool(causal))
    )
    return f"A staircase, percent of a matmul, causal and without a mask: {', '.join(said)}."


def staircase(axes, rows):
    causal, full = shares(rows)
    axes.figure.set_figheight(5.3)
    axes.grid(visible=False)
    if not causal:
        axes.text(0.5, 0.5, "This GPU's record has an older ladder.", ha="center")
        return
    edges, ours, other = range(8), lab.colour("Kernel Book"), lab.colour("matmul")
    look = {"orientation": "horizontal", "fill": True, "alpha": 0.22, "color": ours}
    axes.stairs(causal, edges, label="causal mask", **look)
    line = {"orientation": "horizontal", "baseline": None, "color": other}
    axes.stairs(full, edges, label="no mask", **line)
    for step, (name, cause) in enumerate(CAUSES.items()):
        number = f"{step} " if step else ""
        axes.text(
            1,
            step + 0.33,
            number + name if step else "start",
            va="center",
            weight="bold",
        )
        axes.text(1, step + 0.7, cause, va="center")
        for values, put in ((causal, "right"), (full, "left")):
            said = f"{values[step]:.0f} %"
            if step:
                change = values[step] / values[step - 1] - 1
                by = f"{100 * change:+.0f} %" if abs(change) >= CHANCE else "same"
                said = f"{values[step]:.0f} ({by})"
            at = values[step] + (1 if put == "left" else -1)
            weight = "bold" if put == "right" else "normal"
            said = said.replace("-", "−")
            axes.text(at, step + 0.33, said, ha=put, va="center", fontweight=weight)
    axes.axvline(100, color=other, linestyle="--", linewidth=1)
    axes.text(99, 0.33, "matmul", ha="right", va="center")
    axes.set(xlim=(0, 104), ylim=(7, 0), yticks=[])
    axes.set_xlabel(
        f"% of the speed of a cuBLAS matmul (same: within {100 * CHANCE} %)"
    )


with_these_rungs = [other for other in steps.elsewhere if shares(other.rows)[0]]
lab.draw(
    replace(steps, elsewhere=with_these_rungs),
    "The speed of each rung, and its gain",
    steps_in_words,
    staircase,
)


def measured(name, *sentences, both=False):
    """Show what a rung gains in words, beside the staircase, small, with its step lit."""
    causal, _ = shares(steps.rows)
    lit = list(LADDER).index(name)
    parts = [
        '<line x1="0" x2="308" y1="14" y2="14" stroke="currentColor" stroke-dasharray="4 3" '
        'opacity="0.6"/><text x="0" y="30">a matmul: 100 %</text>'
    ]
    for number, value in enumerate(causal):
        x, y = 44 * number, 104 - 0.9 * value
        here = number == lit
        colour, shade = ("#bc4c00", 0.85) if here else ("currentColor", 0.2)
        text = f'text-anchor="middle" font-weight="{"bold" if here else "normal"}"'
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="43" height="{104 - y:.1f}" fill="{colour}" '
            f'opacity="{shade}"/><text x="{x + 22}" y="121" {text}>{number or "start"}</text>'
        )
        if here:
            parts.append(
                f'<text x="{x + 22}" y="{y - 5:.1f}" {text}>{value:.0f} %</text>'
            )
    said = (
        f"You are here: step {lit} of the staircase, {name}. Percent of a matmul, causal: "
        f"{', '.join(f'{value:.0f}' for value in causal)}."
    )
    svg = (
        f'<svg viewBox="0 0 308 126" width="240" height="98" role="img" aria-label="{said}" '
        f'font-size="16" fill="currentColor">{"".join(parts)}</svg>'
    )
    words = lab.read("".join((told(name, both), *sentences)))
    if not causal:
        return words
    look = "display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem 1.4rem"
    return Shown(
        f'<div class="kb-here" style="{look}; margin-bottom: 1rem; max-width: 41rem">'
        f'<div style="flex: none">{svg}</div><div style="flex: 1 1 15rem">{words.html}</div></div>',
        f"{said}\n{words.plain}",
    )


# %%


# Measuring
def spread(name):
    """By how much the middle three fifths of a rung's timings lie off their median, at most."""
    return max(
        max(1 - low / median, high / median - 1)
        for low, median, high in steps.milliseconds[name]
    )


scatter = max(map(spread, LADDER)) if steps.rows else nan

# %%


# Measuring
def known(name):
    """Whether the ladder that is shown has timed a version."""
    return any(steps.milliseconds.get(name, ()))


def change(name, before, mask="causal"):
    """By how much a version is faster than another; NaN where it was not timed."""
    if not (known(name) and known(before)):
        steps.rate(name, mask=mask)  # it says why the number is missing
        return nan
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def of_matmul(name, mask="causal"):
    """The speed of a version, in percent of the matmul, as a table shows it."""
    return f"{100 * steps.share(name, mask=mask):.0f} %" if known(name) else "—"


def of_chapter_before(mask):
    """By how much longer the staged kernel of the chapter before takes than the start."""
    record = results.find("attention_forward") or {}
    sweep = record.get("sweeps", {}).get("ladder", {})
    if not steps.rows or "in stages" not in sweep.get("milliseconds", {}):
        return nan
    step = [point["mask"] for point in sweep["points"]].index(mask)
    kernel = sweep["milliseconds"]["in stages"][step][1]
    return kernel / steps.milliseconds_at("in stages", mask=mask) - 1


steps_up = {
    name: change(name, before)
    for before, name in zip(list(LADDER)[:-1], list(LADDER)[1:], strict=True)
}

# %%

# Reading
lab.read(
    (
        "Rungs 1 and 2 gain nothing, although one makes room for a second program and the other "
        "saves registers. "
        if max(abs(steps_up[name]) for name in ("two programs", "descriptors")) < CHANCE
        else "Rung 1 gains nothing, although it makes room for a second program. "
    )
    + "Rung 4, the largest step, only takes the same maximum in another way. Waits will explain "
    "rung 4, and may be why the first rungs gain nothing."
    if steps_up["two programs"] < CHANCE
    and max(steps_up, key=steps_up.get) == "two-step maximum"
    else "We take the six changes one by one."
)

# %%

# Folded: The start, the steps in TFLOP/s, and the check of every rung
before = lab.read(
    f"**The start** is the staged kernel of the last chapter, but `m_i` begins at `LOWEST`, the "
    f"lowest finite number of float32. If it began at −∞, it would need a guard, because −∞ − (−∞) "
    f"is NaN. Now no guard is needed: −∞ minus a finite number is −∞, whose exponential is 0. With "
    f"a causal mask, the old kernel takes {100 * of_chapter_before('causal'):.0f} % longer, in a "
    f"separate run."
)
in_float32 = lab.read(
    "**`PRECISION`** matters only in float32. On NVIDIA GPUs it is `tf32x3`, which splits each "
    "number into a coarse part and a remainder, both in TF32, and replaces one matmul by three."
)
timings = lab.read(
    f"**Each speed** is the median of many timings, of which the middle 60 % lie within "
    f"{100 * scatter:.1f} % of it. We call two speeds the same if they differ by less than "
    f"{100 * CHANCE} %. Gains are computed before rounding."
)
tflops = lab.table(
    [
        {"version": "the package's kernel" if name == "Kernel Book" else name}
        | {
            f"{words}, TFLOP/s": f"{steps.rate(name, mask=mask):.0f}"
            for words, mask in (("causal mask", "causal"), ("no mask", "full"))
        }
        for name in ("matmul", *LADDER, "Kernel Book")
    ]
    if steps.rows
    else [],
    "The ladder, length 4,096, head_dim 128",
)
checked = lab.read(
    "We check every rung against float64: in float32 at lengths that no tile divides, and on a "
    "GPU also in bfloat16, with the same tiles and options as in the timings."
)
lab.together(
    before, in_float32, timings, tflops, checked, lab.check("The rungs", cases())
)

# %%


# Measuring
def made_by_the_compiler(versions):
    inputs = (*draw(4, 16, 4096, 128), True)  # as timed, so that few are compiled anew
    rows = []
    for name, options in versions.items():
        launch = partial(run, *inputs, **WIDE, **options)
        ((_, compiled),) = lab.compiled_by(launch)
        words = compiled.asm["sass"].split()
        row = {"version": name, "registers": compiled.n_regs}
        row["spills"] = compiled.n_spills
        row["shared memory, KiB"] = round(compiled.metadata.shared / 1024)
        row["matmul instructions"] = sum(w.startswith("HGMMA") for w in words)
        row["waits for them"] = sum(w.startswith("WARPGROUP.DEPBAR") for w in words)
        rows.append(row)
    return rows


FREE = {  # two rungs without the limit of rung 1, compiled only
    f"{name}, no limit": {k: v for k, v in RUNGS[name].items() if k != "maxnreg"}
    for name in ("descriptors", "one iteration ahead")
}
compiled_rungs = lab.measure(
    "The rungs as compiled, causal",
    partial(made_by_the_compiler, RUNGS | TAKEN_BACK | HALVES | ALONE | FREE),
)
made = {row["version"]: row for row in compiled_rungs.rows}


def compiled_to(name, what):
    return made.get(name, {}).get(what, nan)


def gain(name, mask):
    names = list(LADDER)
    return change(name, names[names.index(name) - 1], mask)


def in_percent(share):
    """What a change of the speed is called."""
    if share != share:
        return "nan"  # so that the paragraph says that it is not recorded
    if abs(share) < CHANCE:
        return "no difference"
    return f"{100 * share:+.0f} %".replace("-", "−")


def told(name, both=False):
    """What a rung gains, in words, with a causal mask; where asked, also without one."""
    causal, full = (in_percent(gain(name, mask)) for mask in ("causal", "full"))
    if not both:
        return f"**Measured: {causal}.** "
    if causal == full:
        return f"**Measured: {causal}**, with or without a causal mask. "
    return f"**Measured: {causal}** with a causal mask, and {full} without one. "


def waits_of(name):
    """How often the code of a rung waits for its matmuls, in words."""
    waits, matmuls = (
        compiled_to(name, what) for what in ("waits for them", "matmul instructions")
    )
    if waits == matmuls:
        return f"after each of its {matmuls} matmul instructions"
    return f"{waits} times in {matmuls} matmul instructions"


# %%
# Rung 1: two programs on an SM
# -----------------------------
#
# How can a second program fit on an SM? Only if each takes at most half of the SM's registers and
# :term:`shared memory`:


# Drawing
def two_boxes(axes):
    """What one program of the start takes of an SM, and two of rung 1."""
    shades = {"A": lab.colour("Kernel Book"), "B": lab.colour("PyTorch")}
    of_start = made.get("in stages", {}).get("registers", 198)
    of_start = -(-of_start // 8) * 8  # the SM hands them out by eights, 4 bytes each
    axes.set(xlim=(-0.05, 5.05), ylim=(1.32, -0.42), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    cases = (
        (
            0,
            "start: three stages,\nno register limit",
            ["A"],
            of_start / 256,
            (32 + 3 * 32) / 227,
        ),
        (
            2.8,
            "rung 1: two stages, at\nmost 128 registers",
            ["A", "B"],
            0.5,
            (32 + 2 * 32) / 227,
        ),
    )
    for left, title, programs, registers, shared in cases:
        for line, words in enumerate(title.split("\n")):
            at = -0.34 + 0.13 * line
            axes.text(left + 1.1, at, words, ha="center", va="center", weight="bold")
        for x, what, part in (
            (left, "registers", registers),
            (left + 1.2, "shared mem.", shared),
        ):
            axes.text(x + 0.5, -0.05, what, ha="center", va="center")
            axes.bar(
                x + 0.5, 1, 1, fill=False, edgecolor=lab.colour("matmul"), linewidth=0.8
            )
            for number, name in enumerate(programs):
                axes.bar(
                    x + 0.5,
                    part - 0.01,
                    0.97,
                    number * part,
                    color=shades[name],
                    alpha=0.3,
                )
                words = "one program" if len(programs) == 1 else f"program {name}"
                axes.text(
                    x + 0.5, (number + 0.5) * part, words, ha="center", va="center"
                )
        if len(programs) == 1:
            free = 1 - registers
            said = f"{256 * free:.0f} KiB free"
            axes.text(left + 0.5, 1 - free / 2, said, ha="center", va="center")
        free = 1 - len(programs) * shared
        said = f"{227 * free:.0f} KiB free"
        axes.text(left + 1.7, 1 - free / 2, said, ha="center", va="center")
        fits = (
            "A second program does not fit."
            if len(programs) == 1
            else "Two programs fit."
        )
        axes.text(left + 1.1, 1.14, fits, ha="center", va="center")


lab.sketch(
    "Room for a second program",
    "Two SMs, each a box of registers and a box of shared memory. Left: one program of the start "
    "takes 128 of 227 KiB and more than three quarters of the registers, and a second one does not "
    "fit. Right: two programs of rung 1 take 96 KiB and half of the registers each.",
    two_boxes,
    height=3.2,
)

# %%
# **Shared memory** holds the tiles. ``num_stages``, the number of *pipeline stages*, says how many
# tiles of keys, and how many of values, are loaded or used at a time. A program's 128 queries take
# 32 KiB, and so do the 64 keys and 64 values of a stage. With two stages, a program takes 96 KiB,
# and two programs fit into the 227 KiB of an SM.
#
# **Registers** hold ``acc`` and the scores. Two programs of 8 warps have 512 threads, which leaves
# each thread 128 of the SM's 65,536 registers (256 KiB). Values that do not fit :term:`spill
# <spill>` to memory.
#
# Rung 1 is therefore only two options of the launch, where the start has ``num_stages=3`` and no
# limit:
#
# .. code-block:: python
#
#    kernel[grid](*arguments, num_warps=8, num_stages=2, maxnreg=128)


# Measuring
def programs_on_an_sm(row):
    """How many fit by registers, of 8 warps, and by shared memory, of which 227 KiB are free."""
    by_registers = 65536 // (8 * 32 * -(-row["registers"] // 8) * 8)
    return min(by_registers, 227 // (row["shared memory, KiB"] + 1))


def by_half(versions):
    """A row for each of some versions: what the compiler made of it, and how fast it is."""
    return [
        {
            "change": name,
            "registers": made[of]["registers"],
            "spills": made[of]["spills"],
            "waits": made[of]["waits for them"],
            "programs that fit": programs_on_an_sm(made[of]),
        }
        | {"of a matmul": of_matmul(of)}
        for name, of in versions.items()
        if of in made
    ]


# %%

# Drawing
limit_alone = change("register limit alone", "in stages")
stages_alone = change("two stages alone", "in stages")
room_costs = limit_alone < -CHANCE and stages_alone < -CHANCE
measured(
    "two programs",
    "Making room costs speed:"
    if room_costs
    else f"Each thread used {compiled_to('in stages', 'registers')} registers and now has 128.",
    both=True,
)

# %%

# Reading
lab.table(
    by_half(
        {
            "none (the start)": "in stages",
            "two pipeline stages alone": "two stages alone",
            "register limit alone": "register limit alone",
            "both (rung 1)": "two programs",
        }
    ),
    f"Making room for a second program, causal; waits for "
    f"{compiled_to('in stages', 'matmul instructions')} matmul instructions",
)

# %%

# Reading
second = min(
    change("two programs", name)
    for name in ("register limit alone", "two stages alone")
)
early = max(gain("two programs", mask) for mask in ("causal", "full")) < 0.05
halves_alone = ("register limit alone", "two stages alone")
faster_half = max(halves_alone, key=lambda name: change(name, "in stages"))
lab.read(
    "Neither half alone makes room, so the two middle rows show only what each costs: fewer tiles "
    "loaded ahead, or "
    + (
        "spills and a wait after each matmul instruction."
        if compiled_to("register limit alone", "spills") > 0
        and compiled_to("register limit alone", "waits for them")
        == compiled_to("register limit alone", "matmul instructions")
        else "less freedom for the compiler."
    )
    if room_costs and second > CHANCE
    else f"Compared with the start, the register limit alone changes the speed by "
    f"{100 * limit_alone:+.0f} %, two stages alone by {100 * stages_alone:+.0f} %, and both "
    f"together by {100 * gain('two programs', 'causal'):+.0f} %."
)

# %%

# Reading
lab.read(
    (
        "Unlike the third row, the last has a second program, and one stage less, which by itself "
        "costs speed. "
        if faster_half == "register limit alone"
        else "Unlike the second row, the last has a second program, and a register limit, which by "
        "itself costs speed. "
    )
    + f"So **the second program is worth at least the step from {of_matmul(faster_half)} to "
    f"{of_matmul('two programs')}**. "
    + (
        "But it only wins back what making room costs. The next three rungs lower that cost."
        if early
        else "The next three rungs lower the cost of making room."
    )
    if room_costs and second > CHANCE
    else "The next three rungs save registers or remove waits."
)

# %%
# Rung 2: descriptors instead of addresses
# ----------------------------------------
#
# Registers are now scarce. Which ones can a thread do without? It spends some on an address and a
# mask for each piece of a tile that it loads. A :term:`tensor descriptor <descriptor>` makes these
# unnecessary. The :term:`host` creates it from the address, sizes and strides of a tensor, and the
# size of a tile.
#
# .. image:: /figures/attention-descriptor.svg
#    :alt: Without a descriptor, 256 threads each hold addresses and a mask in registers, and copy
#          their own part of a tile. With one, a single thread names the tile by its coordinates,
#          and the copy engine, TMA, brings it into shared memory.
#
# One thread then names a tile by its coordinates. The copy engine of an SM, the Tensor Memory
# Accelerator (:term:`TMA`), computes the addresses, fills whatever lies outside with zeros, and
# puts the tile into shared memory:
#
# .. code-block:: python
#
#    # without: addresses and a mask, in registers
#    k = tl.load(ptrs, mask=rows < length, other=0.0)
#
#    # with, on the host: k has the shape (batch, heads, length, head_dim)
#    desc = TensorDescriptor(k, k.shape, k.stride(), [1, 1, BLOCK_N, HEAD_DIM])
#    # and in the kernel
#    k = desc.load([batch, head, start_n, 0]).reshape(BLOCK_N, HEAD_DIM)

# %%


# Measuring
LISTING = """
import contextlib, io, json, os, re, sys
import torch
torch.cuda.is_available = lambda: True  # or kernels would be interpreted
import kernelbook
torch.cuda.is_available = lambda: False
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from kernelbook.ops.attention.forward import row_max
from kernelbook.ops.attention.tiles import LOWEST, PRECISION, describe, head_of, load_tile, place
"""

ASKED = """
HOPPER = GPUTarget("cuda", 90, 32)
TILE = "tensor<128x128xf32, #mma[0-9]*>"
CONVERSION = f"ttg.convert_layout [^ ]+ : {TILE} -> {TILE}"  # of acc


class Nobody:  # what Triton asks of a driver before it compiles
    get_current_target = lambda self: HOPPER
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_active_torch_device = lambda self: torch.device("cpu")
    map_python_to_cpp_type = lambda self, kind: kind
    is_active = staticmethod(lambda: True)


def compile_only(self, *args, grid, warmup, **options):
    kept.append(launch(self, *args, grid=grid, warmup=True, **options))


driver.set_active(Nobody())
kept, launch, jit.JITFunction.run = [], jit.JITFunction.run, compile_only


def facts(make):
    with contextlib.redirect_stdout(io.StringIO()) as log:
        made = make()
    words, log = made.asm["sass"].split(), log.getvalue()
    runs = re.findall(r"wgmma.commit_group.*?wgmma.wait_group", made.asm["ptx"], re.DOTALL)
    remark = re.search(r".*[(]C75[0-9]+[)].*? due to (.*?) (?:for|in) the function.*", log)
    return made, {
        "registers": int(re.search(r"Used ([0-9]+) registers", log)[1]),
        "waits": sum(word.startswith("WARPGROUP.DEPBAR") for word in words),
        "matmuls": sum(word.startswith("HGMMA") for word in words),
        "copies": max(len(re.findall(r"\\bmov[.]", part)) for part in runs),
        "conversions": len(re.findall(CONVERSION, made.asm.get("ttgir", ""))),
        "reason": re.sub(" +", " ", remark[1]) if remark else "",
        "remark": re.sub(" +", " ", remark[0]) if remark else "",
        "code": [word for word in words if word.startswith(("HGMMA", "WARPGROUP.DEPBAR"))],
    }


def launched(options):
    q, k, v = torch.empty(3, 4, 16, 4096, 128, dtype=torch.bfloat16)
    run(q, k, v, True, BLOCK_M=128, BLOCK_N=64, num_warps=8, **options)
    return kept[-1]


found = {}
for name, options in json.loads(sys.argv[1]).items():
    made, found[name] = facts(lambda: launched(options))
    if name == "one iteration ahead":
        path = sys.argv[0] + ".ttgir"
        open(path, "w").write(one_wait(made.asm["ttgir"]))
        limit = {"num_warps": 8, "maxnreg": 128}
        edited = lambda: triton.compile(path, target=HOPPER, options=limit)
        found["one wait"] = facts(edited)[1]
print(json.dumps(found))
"""


def compiled_here(kernels, versions):
    """Compile versions of the kernel for an H200, which needs no GPU, and return what came of each.

    It happens in a process of its own, because this one may interpret kernels. Empty where this
    Triton cannot do it.
    """
    sources = [textwrap.dedent(inspect.getsource(getattr(x, "fn", x))) for x in kernels]
    text = "\n\n".join([LISTING, *sources, ASKED])
    hidden = ("TRITON_INTERPRET",)
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "rungs.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(text)
        command = [sys.executable, script, json.dumps(versions)]
        said = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=600
        )
    if said.returncode:
        print(said.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(said.stdout.splitlines()[-1])


to_compile = {}
for name in list(LADDER)[1:5]:
    to_compile[name] = RUNGS[name] | {"maxnreg": 128}
to_compile["without one iteration ahead"] = (
    TAKEN_BACK["without one iteration ahead"]
    | {
        "maxnreg": 128,
        "HEAVY_FIRST": False,  # which asks the GPU for its L2 cache, and does not touch the loop
    }
)
seen = compiled_here([_loop, _tile, _weigh, _rung_kernel, run, one_wait], to_compile)

# %%

# Drawing
stays = (
    compiled_to("two stages alone", "waits for them")
    == compiled_to("descriptors, no limit", "waits for them")
    and compiled_to("descriptors, no limit", "registers") > 128
    and compiled_to("descriptors", "waits for them")
    == compiled_to("descriptors", "matmul instructions")
)
measured(
    "descriptors",
    f"Nothing spills any more, but 128 registers are still too few: without the limit, a thread "
    f"uses {compiled_to('descriptors, no limit', 'registers')} "
    f"({compiled_to('two stages alone', 'registers')} before), and "
    f"{compiled_to('descriptors, no limit', 'waits for them')} waits replace the "
    f"{compiled_to('descriptors', 'waits for them')}. Was the change useless? We take it back at "
    f"the end to see."
    if stays and compiled_to("descriptors", "spills") == 0
    else f"Spills go from {compiled_to('two programs', 'spills')} to "
    f"{compiled_to('descriptors', 'spills')}. The code waits {waits_of('descriptors')}. ",
)

# %%
# .. dropdown:: Descriptors in the package, and GPUs without a copy engine
#
#    The host makes a descriptor with ``describe``. In the kernel, ``head_of`` combines it with the
#    indices of batch and head, and ``load_tile`` reads the tile at a row and column.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: load_tile
#
#    GPUs before Hopper have no TMA. The GeForce RTX 50 series has one, but its matmul instructions
#    read registers rather than shared memory, so a tile in shared memory is not yet where it is
#    needed. On both, the package's kernel receives the address of a head instead.
#
#    Triton could turn a descriptor back into addresses and masks, but into slow ones. Before a
#    thread may load 16 bytes at once, the compiler has to know that neighbours in a row are
#    neighbours in memory, and a descriptor from the host does not tell it this at compile time.
#    ``head_of`` gives it an address whose last stride is the constant 1, and ``inside`` computes
#    the addresses of a tile from that. The factor ``UNIT`` shows the compiler that rows begin at
#    multiples of 16 bytes. :doc:`/chapters/first_kernel` explains this, and ``tl.multiple_of``,
#    which promises the same.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: head_of
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: inside

# %%
# Rung 3: scores one iteration ahead
# ----------------------------------

# Reading
of_first = {seen[name]["reason"] for name in ("two programs", "descriptors") if seen}
lab.read(
    "Why does rung 2 still wait? "
    + (
        f"The assembler, asked as in rung 4, answers “{next(iter(of_first))}”. "
        if len(of_first) == 1
        else "Its registers are too few. "
    )
    + "What fills the registers?"
)

# %%
# Triton's intermediate code, the *TTGIR* (``compiled.asm["ttgir"]``), shows the order that Triton
# asks for in an iteration of rung 2, and the one that we want:
#
# .. code-block:: text
#
#    rung 2            rung 3
#
#    tl.dot(q, k.T)    exponentials
#    wait for both     tl.dot(p, v)
#    exponentials      wait
#    tl.dot(p, v)      tl.dot(q, k_next.T)
#                      wait
#
# In rung 2, ``p v`` runs on into the next iteration, and one wait serves both matmuls (the second
# wait of a loop is for the last ``p v``, after the loop). So three tiles need registers at once:
# ``acc``, the weights ``p``, and the new scores. In rung 3, ``p v`` ends first, so the scores can
# take the registers of the weights:


# Drawing
def registers_held(axes):
    """The registers per thread for the tiles of the matmuls that run, in the old order and new."""
    acc, scores = (128 * columns // 256 for columns in (128, 64))
    weights = scores // 2  # two of 16 bits in each
    ours, other = lab.colour("Kernel Book"), lab.colour("matmul")
    rows = (
        (0, "q kᵀ and p v together", ("acc", "weights", "scores")),
        (1.9, "p v", ("acc", "weights")),
        (2.8, "then q kᵀ", ("acc", "scores")),
    )
    sizes = {"acc": (acc, ours, 0.3), "weights": (weights, other, 0.3)}
    sizes["scores"] = (scores, ours, 0.12)
    for top, words in ((-0.72, "Rungs 1 and 2"), (1.18, "Rung 3")):
        axes.text(-66, top, words, va="center", weight="bold")
    for y, words, tiles in rows:
        axes.text(-2, y, words, va="center", ha="right")
        at = 0
        for tile in tiles:
            size, colour, alpha = sizes[tile]
            axes.barh(y, size - 0.6, 0.75, at, color=colour, alpha=alpha)
            said = "p" if tile == "weights" else tile
            axes.text(at + size / 2, y, f"{said} {size}", ha="center", va="center")
            at += size
        axes.text(at + 1.5, y, f"{at}", va="center")
    axes.plot([128, 128], [-0.45, 3.25], color=other, linestyle="--", linewidth=1)
    axes.text(128, -0.72, "limit: 128", ha="right", va="center")
    axes.set(xlim=(-66, 130), ylim=(3.3, -1), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Registers that the matmuls need at once, per thread",
    "Bars up to the limit of 128 registers. Rungs 1 and 2, q k and p v together: acc 64, weights "
    "16 and scores 32, in all 112. Rung 3: p v needs 80, and then q k needs 96.",
    registers_held,
    height=2.5,
)

# %%
# The rest of the 128 must hold everything else, such as maxima and sums.
#
# To get this order, we let each iteration end with the scores of the *next* tile, and finish the
# last tile after the loops:
#
# .. code-block:: python
#
#    for start_n in range(start, end, BLOCK_N):
#        p, alpha, l_i, m_i = _weigh(qk, l_i, m_i)
#        v = _tile(v_head, start_n)
#        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
#        k = _tile(k_head, start_n + BLOCK_N)
#        qk = tl.dot(q, k.T)
#
# FlashAttention-3 also computes scores ahead, but in order to run exponentials during its own
# matmuls. Here, the second program does that.


# Drawing
still_waits = all(
    compiled_to(name, "waits for them") == compiled_to(name, "matmul instructions")
    for name in ("descriptors", "one iteration ahead")
)
measured(
    "one iteration ahead",
    "The code still waits after each matmul instruction, so why it is faster is open. But the "
    "waits now have another cause, which rung 4 removes."
    if still_waits
    else "We did not isolate what gains speed here.",
)

# %%
# Rung 4: the maximum in two steps
# --------------------------------
#
# Why does rung 3 still wait? One loop carries two versions of ``acc``, and Triton copies one to the
# other while ``p v`` is still writing it. The assembler makes this safe with a wait after each
# instruction:
#
# .. image:: /figures/attention-acc-twice.svg
#    :alt: Three timelines of the four instructions of p v. Rung 3, as Triton writes it, copies acc
#          while they still write it. The assembler adds a wait after each instruction, and copies
#          acc after the last. Rung 4 has one acc and no copy, and waits once.
#
# The assembler, *ptxas*, says so itself if we compile rung 3 with two environment variables:
#
# .. code-block:: bash
#
#    TRITON_ALWAYS_COMPILE=1 TRITON_DUMP_PTXAS_LOG=1 python your_script.py

# Drawing


def as_printed(caption, text):
    """Show lines of a tool's output."""
    listing = f'<div class="highlight no-copy"><pre>{text}</pre></div>'
    return show(
        Shown(
            f'<div class="kb-source"><div class="kb-caption">{caption}</div>{listing}</div>',
            f"{caption}\n{text}",
        )
    )


GIVEN = {
    "two programs": "1, two programs",
    "descriptors": "2, descriptors",
    "one iteration ahead": "3, one iteration ahead",
    "two-step maximum": "4, two-step maximum",
}
same_waits = seen and all(
    seen[name]["waits"] == compiled_to(name, "waits for them") for name in GIVEN
)
timed_with = (compiled_rungs.provenance or {}).get("triton", triton.__version__)
third = seen.get("one iteration ahead", {})
as_printed(
    f"ptxas of triton {triton.__version__}"
    + (
        f"; the timed code, by triton {timed_with}, waits as often"
        if same_waits and timed_with != triton.__version__
        else ", when this page was built"
    ),
    "\n".join(textwrap.wrap(third.get("remark", ""), 64)) or "It says nothing here.",
)

# %%

# Reading
free = "one iteration ahead, no limit"
lab.read(
    "In plain words: something reads the accumulator, `acc`, while a matmul (`wgmma`) may still be "
    "writing it, so every matmul of the kernel has to wait. "
    + (
        "Registers are no longer the reason: with more of them, rung 3 would wait just as often."
        if compiled_to(free, "waits for them")
        == compiled_to(free, "matmul instructions")
        else ""
    )
)

# %%
# Where does the second ``acc`` come from? A *layout* says which thread holds which elements.
# ``alpha`` has the layout of the scores, from whose maximum it comes, but ``acc * alpha`` needs
# both in one layout. So the compiler must convert one of the two. Up to rung 2, it converts
# ``alpha``, one number per query. In rung 3, it converts ``acc`` for the tiles that the mask cuts,
# and the loop over whole tiles carries a second version. We did not trace how one leads to the
# other, but both go if the layout changes.
#
# So we take the maximum in two steps, because the reshape in ``row_max`` gives it another layout:
#
# .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#    :language: python
#    :pyobject: row_max
#    :start-at: halves
#    :dedent:

# Drawing
outside = compiled_to("one iteration ahead", "waits for them") - compiled_to(
    "descriptors", "waits for them"
)
measured(
    "two-step maximum",
    f"Of {compiled_to('one iteration ahead', 'waits for them')} waits"
    + (
        f" ({compiled_to('descriptors', 'waits for them')} in the loops, {outside} for the two "
        f"`tl.dot` outside)"
        if outside == 128 // 16 + 64 // 16
        else ""
    )
    + f", {compiled_to('two-step maximum', 'waits for them')} remain"
    + (
        ", one for each `tl.dot`."
        if compiled_to("two-step maximum", "waits for them") == 6
        else "."
    ),
)

# %%
# Is it really the copy that costs so much? To test this, we keep the maximum of rung 3 and delete
# only the second ``acc``, by hand, from the TTGIR:

# Reading
TESTED = {
    "one iteration ahead": "rung 3",
    "one wait": "rung 3, edited by hand",
    "two-step maximum": "rung 4",
}
lab.table(
    [
        {
            "code": words,
            "copies acc before the wait": "yes" if seen[name]["copies"] >= 64 else "no",
            "waits": f"{seen[name]['waits']} of {seen[name]['matmuls']}".replace(
                " ", "\N{NO-BREAK SPACE}"
            ),
        }
        | {"of a matmul": of_matmul(name)}
        for name, words in TESTED.items()
        if name in seen
    ],
    "Rung 3 without the copy, causal"
    + (
        f"; compiled with triton {triton.__version__}, timed with {steps.provenance['triton']}"
        if steps.provenance
        and steps.provenance["triton"] != triton.__version__
        and not same_waits
        else ""
    ),
)

# %%


# Measuring
def edited_beside_rung():
    rows = []
    for mask in ("causal", "full"):
        inputs = (*draw(1, 16, 4096, 128), mask == "causal")
        third = partial(run, *inputs, **WIDE, **RUNGS["one iteration ahead"])
        differ = (third() != edited(one_wait, third)).sum().item()
        rows.append({"mask": mask, "elements that differ": differ})
    return rows


# %%

# Measuring
differing = lab.attempt("Rung 3 with and without its second wait", edited_beside_rung)
same_bits = not any(row["elements that differ"] for row in differing.rows)
by_hand = change("two-step maximum", "one wait")

# %%

# Reading
lab.read(
    "Without the copy, and the waits that it forces, rung 3 is as fast as rung 4. So the two "
    "together explain the whole gain. If ptxas names the accumulator in your kernel, look in the "
    "TTGIR for what copies or converts it."
    if abs(by_hand) < CHANCE
    else f"The speed of rung 4 differs by {100 * by_hand:+.0f} % from that of rung 3 without the "
    f"copy, so the copy is not the whole difference."
)

# %%


# Drawing
def code_of_p_v(name):
    """The machine code of the first p v of a rung: its matmul instructions and their waits."""
    code = seen[name]["code"]
    first = next(i for i, word in enumerate(code) if "64x128x16" in word)
    after = [i for i, word in enumerate(code) if i > first and "64x64x16" in word]
    return code[first : after[0]]


OPCODES = {"HGMMA": "HGMMA", "WARPGROUP": "DEPBAR"}
RUNGS_3_AND_4 = {"rung 3": "one iteration ahead", "rung 4": "two-step maximum"}

# %%

# Folded: The second acc, and the assembler's reason for each rung
layouts = lab.read(
    "**Layouts.** The scores have the layout of a matmul with 64 columns, and `acc` that of one "
    "with 128. The maximum, `tl.max(qk, axis=1)`, inherits the layout of the scores, and so does "
    "`alpha`. Converting `alpha` moves one number per row, and converting `acc` 128. The reshape "
    "of `row_max` gives the maximum a layout that belongs to no matmul."
)
two_versions = lab.read(
    "**Two versions.** In rung 3, `acc` is converted for the tiles that the mask cuts and after "
    "the loops. The loop over whole tiles converts only `alpha`, but in TTGIR it yields two "
    "tensors of 128 × 128, one for its next iteration and one for the code after it. Two waits, "
    "`warp_group_dot_wait`, follow `p v` there, one for each version. The second version is a copy "
    "of `acc`, 64 registers per thread, which the code makes before both waits. We did not trace "
    "how the conversions lead to it."
)
in_sass = lab.read("**Waits.** The machine code of `p v` shows them:")
both_codes = as_printed(
    "SASS of one p v, abridged to its matmuls and waits",
    "\n".join(
        f"{words}:  {' '.join(OPCODES[word.split('.')[0]] for word in code_of_p_v(name))}"
        for words, name in RUNGS_3_AND_4.items()
    )
    if seen
    else "It could not be compiled here.",
)
registers_of_two = (2 * 128 * 128 + 128 * 64) // 256
reasons = lab.table(
    [
        {
            "rung": words,
            "the assembler's reason for a wait after each instruction": seen[name][
                "reason"
            ]
            or "none",
            "conversions of acc": seen[name]["conversions"],
            "waits": f"{seen[name]['waits']} of {seen[name]['matmuls']}".replace(
                " ", "\N{NO-BREAK SPACE}"
            ),
        }
        for name, words in GIVEN.items()
    ]
    if seen
    else [],
    f"Compiled with triton {triton.__version__}, causal, at most 128 registers",
)
same_code = lab.read(
    f"The timed run used triton {compiled_rungs.provenance['triton']}, whose code waits as often."
    if same_waits
    and compiled_rungs.provenance
    and compiled_rungs.provenance["triton"] != triton.__version__
    else "The code of the timed run waits equally often."
    if same_waits
    else "The code of the timed run may wait differently."
)
without_limit = lab.read(
    f"Without a limit, rung 3 waits {waits_of(free)}, and rung 2, with "
    f"{compiled_to('descriptors, no limit', 'registers')} registers, waits "
    f"{waits_of('descriptors, no limit')}."
)
in_rung_3 = lab.read(
    f"**Registers of rung 3.** Two versions of `acc` and the scores would take {registers_of_two} "
    f"registers, so the machine code can hardly keep both: without a limit, it uses "
    f"{compiled_to(free, 'registers')} in all. Within 128 registers, "
    f"{compiled_to('one iteration ahead', 'spills')} values spill."
)
of_edited = lab.read(
    f"The kernel edited by hand returns "
    f"{'the same bits as' if same_bits else 'different bits from'} rung 3."
)
copies = lab.read(
    "**Why rung 3 gains, perhaps.** In rungs 2 and 3, Triton starts copying the next tiles at the "
    "end of an iteration. In rung 2, the tile of keys is needed first, as soon as `p v` is done; "
    "in rung 3, that of values, after the exponentials. So the copies have more time. We have not "
    "timed this."
)
no_gpu = lab.read(
    "**How to see all this without a GPU.** The assembler's reasons, TTGIR, the machine code, and "
    "the copies and waits in the table with the edited kernel come from code compiled for an H200 "
    "when this page was built. All other counts come from the recorded run. TTGIR shows each "
    "conversion of a layout as `ttg.convert_layout`. ptxas numbers its remarks: C7512 is about too "
    "few registers, and C7514 about the accumulator."
)
lab.together(
    layouts,
    two_versions,
    in_sass,
    both_codes,
    reasons,
    same_code,
    without_limit,
    in_rung_3,
    of_edited,
    differing,
    copies,
    no_gpu,
)

# %%
# Rung 5: the scale inside the exponential
# ----------------------------------------
#
# The needless waits are gone. What work can the loop still save? It scales every score before it
# subtracts the maximum, and this costs a multiplication per score.
#
# Because the scale is positive, the maximum may be taken first. Let :math:`x` be a dot product,
# :math:`c` the scale times :math:`\log_2 e` (``scale_log2``), and :math:`m = c \max x`. A weight is
# then :math:`2^{c x - m}`, and its exponent takes one instruction, a fused multiply-add:
#
# .. code-block:: python
#
#    # before: every score is scaled first
#    qk = qk * scale_log2
#    m_new = tl.maximum(m_i, row_max(qk))
#    p = tl.exp2(qk - m_new[:, None])
#
#    # now
#    m_new = tl.maximum(m_i, row_max(qk) * scale_log2)
#    p = tl.exp2(qk * scale_log2 - m_new[:, None])

# Drawing
little = max(abs(gain("scale folded", mask)) for mask in ("full", "causal")) < 0.02
measured(
    "scale folded",
    "Saving one multiplication per score is worth little, so these instructions are not what "
    "limits the loop."
    if little
    else "A multiplication per score costs time, so fold a scale into the exponent.",
)

# %%


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


# %%

# Folded: The instructions of one exponential, written in three ways
lab.measure(
    "Instructions for one exponential: additions (FADD), multiplications (FMUL), fused "
    "multiply-adds (FFMA), and the exponential itself (MUFU.EX2)",
    instructions,
)

# %%
# Rung 6: heavy tiles first
# -------------------------
#
# Why are SMs idle at the end? In causal attention, the last queries see the most keys, so their
# tiles are *heavy*. If these start last, a few programs keep running while the rest of the GPU is
# idle.

# %% An animation
# Here the programs of two heads run on three SMs, each with room for two programs (its slots). The
# heaviest are orange. If the heavy ones of both heads start first, all are done earlier:
#
# .. animation:: light_or_heavy_first

# %%
# ``HEAVY_FIRST`` therefore reverses the order of the tiles of a head. This alone is not enough: if
# one head follows the other, the heavy tiles of the last head still start late. So ``place``, which
# turns the number of a program into a tile and a head, alternates between ``HEADS_AT_ONCE`` heads:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _rung_kernel
#    :start-at: n_tiles = tl.cdiv
#    :end-before: start_m = tile
#    :dedent:

# %%


# Measuring
def finish_time(weights, slots=264):
    free = [0] * slots
    for weight in weights:
        heapq.heappush(free, heapq.heappop(free) + weight)
    return max(free)


def heavy_first(tiles, heads, at_once):
    """The tiles of keys of each program, in the order of `place` with its tiles reversed."""
    return [
        tiles - tile
        for first in range(0, heads, at_once)
        for tile in range(tiles)
        for _ in range(min(at_once, heads - first))
    ]


simulated, promised = [], {}
for tiles, heads in ((32, 64), (32, 16), (128, 16)):
    fitting = 30 * 2**20 // (2 * tiles * 128 * 128 * 2)  # into half of an H200's L2
    at_once = 2 ** (fitting.bit_length() - 1)
    light_first = [t + 1 for _ in range(heads) for t in range(tiles)]
    ideal = sum(light_first) / 264
    row = {"tiles of queries": tiles, "heads": heads}
    busy = [
        round(100 * ideal / finish_time(weights))
        for weights in (
            light_first,
            *(heavy_first(tiles, heads, n) for n in (1, at_once, heads)),
        )
    ]
    row["light first"], row["heavy first, head by head"] = (f"{x} %" for x in busy[:2])
    row["heavy first, heads in half of L2"] = f"{at_once} heads: {busy[2]} %"
    row["heavy first, all heads"] = f"{busy[3]} %"
    if not simulated:
        promised = {
            "heads": heads,
            "at once": at_once,
            "reversal": busy[1] / busy[0] - 1,
            "rung": busy[2] / busy[0] - 1,
            "all": busy[3] / busy[0] - 1,
        }
    simulated.append(row)

# %%

# Reading
lab.read(
    f"More heads at once need more of the L2 cache for their keys and values. We take the largest "
    f"power of two that fits into half of it, here {promised['at once']}. In the rungs before, it "
    f"was 1."
)

# %%

# Drawing
reversal = promised["reversal"]
measured(
    "heavy first",
    "We timed the new orders of tiles and of heads only together"
    + (
        ", but in a simulation, the order of the tiles alone gains nothing."
        if abs(reversal) < 0.01
        else "."
    ),
    " If programs do not take equally long, start the longest of several heads first."
    if abs(gain("heavy first", "full")) < CHANCE
    else "",
    both=True,
)

# %%

# Folded: The simulation of all programs on an H200
occupied = lab.table(
    simulated,
    "Simulated share of the slots at work, causal",
)
how_simulated = lab.read(
    "In the simulation, 132 SMs have two slots each. A free slot takes the next program, whose "
    "time is its number of tiles of keys. The first row is the input of the ladder."
)
other_orders = lab.read(
    (
        "There, reversing the tiles alone, head by head, gains nothing, because the heavy tiles of "
        "the last head still start late"
        if abs(reversal) < 0.01
        else f"There, reversing the tiles alone, head by head, gains {100 * reversal:.0f} %"
    )
    + (
        f". All {promised['heads']} heads at once would gain a little more."
        if promised["all"] > promised["rung"] + 0.005
        else f". All {promised['heads']} heads at once gain no more than {promised['at once']}."
    )
)
alone_in_full, both_in_full = (
    steps.share(name, mask="full") if known(name) else nan
    for name in ("without two programs", list(LADDER)[-1])
)
why_less = lab.read(
    f"For this rung the simulation promises a gain of {100 * promised['rung']:.0f} %"
    + (
        f", more than the {100 * gain('heavy first', 'causal'):.0f} % that we measure. Perhaps "
        f"this is because a simulated program is no faster when the other slot of its SM is empty. "
        f"On the GPU it probably is: without a mask, one program per SM, though with three stages, "
        f"reaches {100 * alone_in_full:.0f} % of a matmul, more than half of the "
        f"{100 * both_in_full:.0f} % of two."
        if gain("heavy first", "causal") < promised["rung"]
        and alone_in_full > both_in_full / 2
        else "."
    )
)
lab.together(occupied, how_simulated, other_orders, why_less)

# %%
# Each change taken back
# ----------------------

# Reading
last = list(LADDER)[-1]
raised = {
    mask: steps.rate(last, mask=mask) / steps.rate("in stages", mask=mask) - 1
    for mask in ("causal", "full")
}
lab.read(
    f"The last rung, the **finished kernel**, is {100 * raised['causal']:.0f} % faster than the "
    f"start ({100 * raised['full']:.0f} % without a mask). Does it need all six changes? The "
    f"ladder cannot tell, because each gain depends on the rungs before it. So we take each change "
    f"back by itself:"
)

# %%


# Measuring
rows = []
for name in list(LADDER)[1:]:
    version = f"without {name}" if name != last else list(LADDER)[-2]
    changes = {"when made": gain(name, "causal")}
    changes["taken back"] = change(version, last)
    row = {"change": name} | {
        what: "same" if abs(x) < CHANCE else f"{100 * x:+.0f} %".replace("-", "−")
        for what, x in changes.items()
    }
    row["spills without it"] = compiled_to(version, "spills")
    waits, matmuls = (
        compiled_to(version, what) for what in ("waits for them", "matmul instructions")
    )
    row["waits without it"] = f"{waits} of {matmuls}".replace(" ", "\N{NO-BREAK SPACE}")
    rows.append(row)
both_ways = rows if steps.provenance is not None and made else []

# %%


# Drawing
def made_and_taken_back(rows):
    """Of each change, by how much it raises the speed when made, and lowers it when taken back."""
    found = {r["provider"]: r["share"] for r in rows if r["mask"] == "causal"}
    names = list(LADDER)
    versions = [f"without {name}" for name in names[1:-1]] + [names[-2]]
    if not {*names, *versions} <= found.keys():
        return {}
    return {
        name: (found[name] / found[before] - 1, found[version] / found[names[-1]] - 1)
        for before, name, version in zip(names, names[1:], versions, strict=False)
    }


def both_ways_in_words(rows):
    said = (
        f"{name} {100 * up:+.0f} and {100 * down:+.0f}"
        for name, (up, down) in made_and_taken_back(rows).items()
    )
    return f"Two bars for each change, percent, when made and taken back: {', '.join(said)}."


def both_bars(axes, rows):
    changes = made_and_taken_back(rows)
    axes.figure.set_figheight(4.2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for number, (name, values) in enumerate(changes.items()):
        top = 2.6 * number
        axes.text(-0.7, top - 0.1, f"{number + 1} {name}", ha="right", weight="bold")
        for row, (value, what, whose) in enumerate(
            zip(
                values,
                ("gain when made", "loss when taken back"),
                ("Kernel Book", "PyTorch"),
                strict=True,
            )
        ):
            size = 100 * abs(value) if abs(value) >= CHANCE else 0
            axes.barh(
                top - 0.5 + row,
                size,
                0.9,
                color=lab.colour(whose),
                alpha=0.3,
                label=None if number else what,
            )
            said = f"{100 * value:+.0f} %".replace("-", "−") if size else "same"
            axes.text(size + 0.5, top - 0.5 + row, said, va="center")
    axes.axvline(0, color=lab.colour("matmul"), linewidth=1)
    axes.set(xlim=(-15, 34), ylim=(2.6 * len(changes) - 1, -1.3), xticks=[], yticks=[])


lab.draw(
    replace(
        steps, elsewhere=[x for x in with_these_rungs if made_and_taken_back(x.rows)]
    ),
    "Each change, made and taken back, causal mask",
    both_ways_in_words,
    both_bars,
)

# %%

# Measuring
worth = {
    name: 1
    - steps.rate(f"without {name}", mask="causal") / steps.rate(last, mask="causal")
    for name in list(LADDER)[1:-1]
}
most = max(worth, key=worth.get)
alone = "two programs"

# %%


# Measuring
names = list(LADDER)
with_one = ["in stages", *ONE_PROGRAM, "without two programs"]
alone_up = {
    f"rung {number}": change(one, before)
    for number, (before, one) in enumerate(zip(with_one, with_one[1:], strict=False), 2)
}
losing = [name for name, up in alone_up.items() if up < -CHANCE]
never_back = change("without two programs", "in stages")


def do(found, one, several):
    """Who does what: a list of rungs and a verb."""
    return (
        f"{' and '.join(found)} {one if len(found) == 1 else several}" if found else ""
    )


# %%

# Reading
lab.read(
    f"**The finished kernel loses most without “{most}”**"
    + (
        ", which gained nothing when made. "
        if most == alone and gain(alone, "causal") < CHANCE
        else ". "
    )
    + (
        f"It is then {-100 * never_back:.0f} % slower than the start, so without a second "
        f"program, the other five changes together lose speed."
        if most == alone and never_back < -CHANCE and losing
        else f"With one program per SM, the other changes together alter the speed of the start by "
        f"{100 * never_back:+.0f} %."
    )
)

# %%

# Reading
scarce = "insufficient register resources"
reason = seen["without one iteration ahead"]["reason"] if seen else ""
spilled = compiled_to("without descriptors", "spills")
grown = all(
    worth[name] > 2 * gain(name, "causal") > 0
    for name in ("descriptors", "one iteration ahead")
)
lab.read(
    "**Rungs 2 and 3 are worth far more than they gained.** The second program makes registers "
    "scarce, and these two save them"
    + (
        ": without rung 2, values spill again, and without rung 3, the waits are back. "
        if reason == scarce and spilled > 0
        else ". "
    )
    + "So judge a change that saves registers at the end."
    if grown
    else "The second program makes registers scarce, and rungs 2 and 3 save them."
)

# %%

# Folded: Spills and waits without each change, one program throughout, and the halves of rung 1
one_and_two = lab.table(
    [
        {
            "up to rung": "none, and 1" if number == 1 else f"{number}, {two}",
            "one program": of_matmul(one),
            "two programs": of_matmul(two),
        }
        for number, (one, two) in enumerate(zip(with_one, names[1:], strict=True), 1)
    ]
    if steps.rows
    else [],
    "The ladder with one program per SM (three stages, no register limit) and with two, causal",
)
why = lab.read(
    (
        "With one program, rung 2 loses speed, and we do not know why. "
        if alone_up["rung 2"] < -CHANCE
        else f"With one program, rung 2 changes the speed by {100 * alone_up['rung 2']:+.0f} %. "
    )
    + (
        "Rung 3 loses the most: even without the register limit, it waits after each instruction. "
        "Rung 4 removes those waits, yet stays slower than rung 2. The new order may be the "
        "reason: a program now waits for `p v` before it hands over the next `q kᵀ`, and no other "
        "program uses the tensor cores meanwhile."
        if min(alone_up, key=alone_up.get) == "rung 3"
        else ""
    )
)
scarcity = lab.read(
    (
        "Without the order of rung 3, ptxas again reports too few registers, and the code waits "
        "after each matmul instruction. "
        if reason == scarce
        else ""
    )
    + f"Without descriptors, {spilled} values spill"
    + (
        f". This need not be the whole loss of {100 * worth['descriptors']:.0f} %, because "
        f"descriptors also copy the tiles in another way."
        if spilled > 0
        else "."
    )
)
halves = lab.table(
    by_half(
        {
            "both": last,
            "two pipeline stages alone": "without register limit",
            "register limit alone": "without two stages",
            "none": "without two programs",
        }
    ),
    "The finished kernel, causal, with both halves of rung 1, one, or none",
)
by_itself = lab.read(
    f"Without the limit, the finished kernel uses "
    f"{compiled_to('without register limit', 'registers')} registers"
    + (
        ", so two programs fit all the same."
        if compiled_to("without register limit", "registers") <= 128
        else "."
    )
)
taken_table = lab.table(both_ways, "Each change, made and taken back (causal)")
lab.together(taken_table, scarcity, one_and_two, why, halves, by_itself)

# %%
# What the exponentials still cost
# --------------------------------
#
# Even the finished kernel is slower than a matmul. Do its exponentials still hold it back? To find
# out, we delete them from the TTGIR and count the cycles of a run without a mask. The results are
# then wrong, but the kernel does everything else.


# Measuring
@triton.jit
def _stamp_kernel(log_ptr, SLOTS: tl.constexpr):
    """Write down the cycles that this SM has counted, and the time in nanoseconds."""
    unused = tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "{ .reg .u32 unused; mov.u32 unused, $1; mov.u32 $0, %smid; }",
        "=r,r", [unused], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    cycles = tl.inline_asm_elementwise(
        "{ .reg .u32 unused; mov.u32 unused, $1; mov.u64 $0, %clock64; }",
        "=l,r", [unused], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    nanoseconds = tl.inline_asm_elementwise(
        "{ .reg .u32 unused; mov.u32 unused, $1; mov.u64 $0, %globaltimer; }",
        "=l,r", [unused], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(log_ptr + sm, cycles)
    tl.store(log_ptr + SLOTS + sm, nanoseconds)


def cycles_of(launch, flush, log):
    """Thousands of cycles and microseconds from before a launch to after it, on the median SM."""
    slots = log.shape[-1]
    log.zero_()
    flush.zero_()  # L2 holds none of the inputs
    torch.cuda._sleep(2 * 10**6)  # until the host has queued the rest
    for moment in (0, 1):
        if moment:
            launch()
        _stamp_kernel[(2 * slots,)](log[moment], slots)
    torch.cuda.synchronize()
    passed = (log[1] - log[0])[:, (log != 0).all(0).all(0)].double().median(1)
    return [value / 1e3 for value in passed.values.tolist()]


def counted_cycles():
    shape = (4, 16, 4096, 128)
    inputs = (*draw(*shape), False)
    versions = {
        "start": START,
        "finished, one program": TAKEN_BACK["without two programs"],
        "finished": so_far,
    }
    runs = {"matmul": matmul()}
    for name, options in versions.items():
        launch = partial(run, *inputs, **WIDE, **options)
        runs[name] = launch
        runs[f"{name}, no exponentials"] = partial(edited, no_exponentials, launch)
    sms = runtime.multiprocessors(runtime.DEVICE)
    flush = torch.empty(2**28, device=runtime.DEVICE, dtype=torch.int8)
    log = torch.zeros(2, 2, 256, device=runtime.DEVICE, dtype=torch.int64)
    found = {name: [] for name in runs}
    facts = {}
    for name, launch in runs.items():
        if name == "matmul":
            launch()
            continue
        ((_, compiled),) = lab.compiled_by(launch)
        words = compiled.asm["sass"].split()
        facts[name] = {
            "registers": compiled.n_regs,
            "waits": sum(w.startswith("WARPGROUP.DEPBAR") for w in words),
            "exponential instructions": sum(w.startswith("MUFU.EX2") for w in words),
        }
    order = list(runs)
    for turn in range(40):  # every kernel in turn, each time beginning with another
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            found[name].append(cycles_of(runs[name], flush, log))
    rows = []
    scores = shape[0] * shape[1] * shape[2] ** 2
    for name, pairs in found.items():
        cycles, microseconds = (
            sorted(x)[len(x) // 2] for x in zip(*pairs, strict=True)
        )
        flops = 2 * 8192**3 if name == "matmul" else 4 * scores * shape[3]
        rows.append(
            {
                "kernel": name,
                "µs": round(microseconds, 1),
                "cycles, thousands": round(cycles, 1),
                "clock, MHz": round(1e3 * cycles / microseconds),
                "matmuls, at least": round(flops / sms / 4096 / 1e3, 1),
                "exponentials, at least": 0
                if name == "matmul"
                else round(scores / sms / 16 / 1e3, 1),
            }
            | facts.get(name, dict.fromkeys(next(iter(facts.values())), "—"))
        )
    return rows


# %%

# Measuring
in_cycles = lab.attempt("Cycles of an SM, length 4,096, no mask", counted_cycles)
counted = {row["kernel"]: row for row in in_cycles.rows}
COUNTED = {
    "start": "the start",
    "finished, one program": "finished, but one program per SM",
    "finished": "finished",
    "matmul": "cuBLAS matmul, twice the operations",
}


def at_work(name):
    """For how much of a run the tensor cores work, in percent, by the count."""
    row = counted.get(name, {})
    return 100 * row.get("matmuls, at least", nan) / row.get("cycles, thousands", nan)


def cycles(name):
    """Thousands of cycles as a table shows them."""
    return f"{counted[name]['cycles, thousands']:,.0f}" if name in counted else "—"


def saved(name):
    """Thousands of cycles that a kernel takes less without its exponentials, as a table shows."""
    with_them, without_them = (
        round(counted.get(x, {}).get("cycles, thousands", nan), 0)
        for x in (name, f"{name}, no exponentials")
    )
    return with_them - without_them


clocks = {name: row.get("clock, MHz", nan) for name, row in counted.items()}
needs = counted.get("finished", {}).get("exponentials, at least", nan)
hidden = {
    name: 100 * min(1, max(0, 1 - saved(name) / needs)) for name in list(COUNTED)[:-1]
}
of_one_program, of_two_programs = (
    counted.get(name, {}).get("cycles, thousands", nan)
    for name in ("finished, one program", "finished")
)
their_share = 100 * saved("finished, one program") / of_one_program
one_without, two_without = (
    counted.get(f"{name}, no exponentials", {}).get("cycles, thousands", nan)
    for name in ("finished, one program", "finished")
)
second_saves = 100 * (1 - two_without / one_without)  # where there are no exponentials

# %%

# Reading
lab.read(
    "They do not: without them, the finished kernel takes no fewer cycles"
    + (
        f". It takes {-100 * saved('finished') / of_two_programs:.0f} % more, and why is open:"
        if saved("finished") < -20
        else ", to within a few percent:"
    )
    if hidden["finished"] > 97
    else f"They do: without them, the finished kernel takes {saved('finished'):,.0f} thousand "
    f"fewer cycles, and {hidden['finished']:.0f} % of their time is hidden:"
)

# %%


# Drawing
DELETED = {
    "finished, one program": "one program per SM",
    "finished": "two programs per SM",
}


def with_and_without(axes, rows):
    """The cycles of the finished kernel, with one program or two, with exponentials or not."""
    taken = {row["kernel"]: row["cycles, thousands"] for row in rows}
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    most_cycles = max(taken[name] for name in DELETED)
    for number, (name, words) in enumerate(DELETED.items()):
        top = 3.2 * number
        axes.text(0, top - 0.85, words, va="center", weight="bold")
        for row, (version, said, colour) in enumerate(
            (
                (name, "as it is", lab.colour("Kernel Book")),
                (
                    f"{name}, no exponentials",
                    "exponentials deleted",
                    lab.colour("matmul"),
                ),
            )
        ):
            length = taken[version]
            axes.barh(top + row, length, 0.9, alpha=0.3, color=colour)
            axes.text(25, top + row, said, va="center")
            axes.text(length - 25, top + row, f"{length:,.0f}", va="center", ha="right")
    axes.set(
        xlim=(-0.005 * most_cycles, 1.01 * most_cycles),
        ylim=(4.8, -1.5),
        xticks=[],
        yticks=[],
    )
    axes.figure.set_figheight(2.6)


def with_and_without_in_words(rows):
    taken = {row["kernel"]: row["cycles, thousands"] for row in rows}
    return "Thousands of cycles of an SM at length 4,096 without a mask. " + "; ".join(
        f"{COUNTED[name]}: {taken[name]:,.0f} with its exponentials and "
        f"{taken[f'{name}, no exponentials']:,.0f} without"
        for name in DELETED
    )


lab.draw(
    in_cycles,
    "Thousands of cycles of the finished kernel",
    with_and_without_in_words,
    with_and_without,
)

# %%

# Reading
lab.read(
    (
        "**The second program hides them.** With one program per SM, they cost "
        if hidden["finished"] > hidden["finished, one program"] + 10
        else "With one program per SM, they cost "
    )
    + f"{their_share:.0f} % of the cycles. "
    + (
        f"And it does more: even where there are no exponentials, it saves {second_saves:.0f} %."
        if second_saves > 5
        else ""
    )
)

# %%

# Reading
slower_clock = clocks.get("matmul", nan) < clocks.get("finished", nan)
two_thirds = (
    abs(at_work("finished") - bound_of_turns(128)) < 3 and hidden["finished"] > 97
)
lab.read(
    f"**By their number of operations, the matmuls need {at_work('finished'):.0f} % of the "
    f"cycles.** In a matmul of cuBLAS, they need {at_work('matmul'):.0f} %. What fills the rest is "
    f"open"
    + (
        ". But a cheaper exponential would hardly help here, while one multiplication fewer did, "
        "in rung 5."
        if hidden["finished"] > 97 and gain("scale folded", "full") > CHANCE
        else "."
    )
)

# %%

# Folded: All counts and clocks, and how we counted
count_table = lab.table(
    [
        {
            "kernel": words,
            "clock, MHz": f"{clocks[name]:,}",
            "cycles": cycles(name),
            "without exponentials": cycles(f"{name}, no exponentials"),
            "tensor cores at work": f"{at_work(name):.0f} %",
        }
        for name, words in COUNTED.items()
        if name in counted
    ],
    "Cycles of an SM, in thousands; length 4,096, no mask",
)
in_time = lab.read(
    f"In time, the finished kernel reaches {of_matmul(last, 'full')} of the speed of cuBLAS, more "
    f"than in cycles, because cuBLAS ran at a lower clock."
    if slower_clock
    else f"In time, the finished kernel reaches {of_matmul(last, 'full')} of the speed of cuBLAS."
)
open_questions = lab.read(
    "**What is open.** The rest of the cycles may go to late copies, moments in which both "
    "programs wait, or other instructions"
    + (
        ", such as the one that rung 5 removed."
        if gain("scale folded", "full") > CHANCE
        else "."
    )
    + (
        f" {bound_of_turns(128):.0f} % is also the bound for warps in step, but exponentials are "
        f"not the reason, because deleting them saves nothing."
        if two_thirds
        else ""
    )
)
more_counts = lab.read(
    f"**One program is not quite in step.** The start also runs one program per SM. Its "
    f"exponentials need {needs:.0f} thousand cycles, but deleting them saves only "
    f"{saved('start'):,.0f}, so even the warps of one program overlap them in part."
)
at_least = lab.read(
    "**Tensor cores at work.** Matmuls need at least their number of operations divided by 4,096 "
    "per SM and cycle, and exponentials their number divided by 16. The share is the cycles that "
    "the matmuls need, divided by those counted."
)
counting = lab.read(
    "**Counting.** We count cycles because a GPU lowers its clock under load. Each SM counts them "
    "in the register `%clock64`, and `%smid` is its number. A tiny kernel records both before and "
    "after each run. We take the median over all SMs, and then over 40 runs. It includes a few "
    "microseconds in which the kernels start."
)
lab.together(
    count_table,
    in_time,
    open_questions,
    more_counts,
    at_least,
    counting,
    lab.listing(
        {
            "The kernel that writes down the counters": _stamp_kernel,
            "What deletes the exponentials from the intermediate code": no_exponentials,
        }
    ),
    in_cycles,
)

# %%


# Measuring
def with_roles():
    """The shares of a matmul of plain Triton and of warps with roles, in the chapter on Hopper."""
    record = results.find("attention_hopper") or {}
    sweep = record.get("sweeps", {}).get("ladder", {})
    times = sweep.get("milliseconds", {})
    if not {"matmul", "plain Triton", "Kernel Book"} <= times.keys():
        return None
    at = [point["mask"] for point in sweep["points"]].index("full")
    point = sweep["points"][at]
    rows = point["batch"] * point["heads"] * point["seqlen"]
    of_matmul = 4 * rows * point["seqlen"] * point["head_dim"] / (2 * 8192**3)
    of_matmul *= times["matmul"][at][1]
    return tuple(
        of_matmul / times[name][at][1] for name in ("plain Triton", "Kernel Book")
    )


# %%

# Reading
roles = with_roles()
lab.read(
    "Part of the gap to a matmul closes in Gluon, the language below Triton, in which warps can "
    "have roles. "
    + (
        f"In the chapter on Hopper, roles and other changes raise attention without a mask from "
        f"{100 * roles[0]:.0f} to {100 * roles[1]:.0f} % of a matmul, in a separate run."
        if roles and roles[1] > roles[0]
        else "The chapter on Hopper measures the speed."
    )
)

# %%
# The package's kernel and its checks
# -----------------------------------
#
# What does the finished kernel still lack? The package's kernel adds any head_dim up to 256,
# windows, grouped heads, strides, and :term:`lse <logsumexp>` for the backward pass.
#
# .. dropdown:: The package's kernel, and what it adds to the last rung
#
#    **Grouped heads.** If :math:`g` query heads share one head of keys and values, query head
#    :math:`h` reads head :math:`h / g`, rounded down, which is ``head // group`` in the kernel.
#    Nothing is copied.
#
#    **Strides.** A descriptor accepts any strides, as long as the last dimension is contiguous and
#    the other strides are multiples of 16 bytes. Any other view is copied first.
#
#    **lse.** ``m_i`` is in base 2, so a factor :math:`\ln 2` converts it to a natural logarithm.
#    ``P_LOG2`` is 0 here; it belongs to :doc:`the chapter on FP8 </chapters/attention_fp8>`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: weigh
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attend
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attention_fwd_kernel
#
#    ``place`` says which tile of which head a program computes. The programs alternate between
#    heads as in rung 6. Without a mask, they do not alternate.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: place
#
# A kernel like this fails first at sizes that no tile divides, such as a length of 127 or head_dim
# 80. So we check these against float64:


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


# Measuring
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


# %%

# Measuring
every_check = lab.check("attention", every_case())

# %%


# Measuring
q, k, v = torch.randn(3, 2, 3, 70, 32, device=runtime.DEVICE)
k_later, v_later = k.clone(), v.clone()
k_later[:, :, 50:], v_later[:, :, 50:] = 7.0, 1e30
order = torch.randperm(70, device=runtime.DEVICE)
out, lse = attention(q, k, v, return_lse=True)
causal = attention(q, k, v, is_causal=True)
changed = attention(q, k_later, v_later, is_causal=True)
moved, moved_lse = attention(q, k[:, :, order], v[:, :, order], return_lse=True)
shifted, shifted_lse = attention(q, k + k[:, :, :1], v, return_lse=True)
added = (q * k[:, :, :1]).sum(-1) * 32**-0.5
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
    "and moves lse by its score": torch.allclose(lse + added, shifted_lse, atol=1e-4),
    "the last query sees what it sees without a mask": torch.allclose(
        causal[:, :, -1], out[:, :, -1], atol=1e-4
    ),
}
assert all(properties.values())

# %%

# Reading
verdict = re.split("[;\n]", every_check.plain.removeprefix("attention: "))[0].rstrip(
    "."
)
lab.read(f"{verdict[0].upper()}{verdict[1:]}.")

# %%

# Folded: The checks, by batch, heads, heads of keys, queries, keys and head_dim
relations = lab.table(
    [{"property": name, "holds": holds} for name, holds in properties.items()],
    "Relations that must be true for any input",
)
allowed = lab.read(
    "The lengths include 1, 127 and 1,000, and head_dim 80 and 96. We allow twice PyTorch's own "
    "error in 16 bits (or one unit in the last place), and eight times in float32, where each "
    "multiplication by `alpha` adds a rounding error."
)
lab.together(allowed, every_check, relations)

# %%
# How fast is it?
# ---------------
#
# How close does plain Triton come to the best libraries? FlexAttention, *SDPA flash*
# (FlashAttention-2) and *SDPA cuDNN* (NVIDIA's) come with PyTorch. *FlashAttention* here is version
# 4. Version 3 must be built from source and is not timed. Every point has 16,384 tokens.

# Measuring
LENGTHS = [1024, 4096, 16384]


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    q, k, v = draw(batch, heads, seqlen, head_dim, dtype)
    is_causal = mask == "causal"
    ours = {"Kernel Book": lambda: attention(q, k, v, is_causal=is_causal)}
    return {"matmul": matmul()} | libraries((q, k, v), is_causal) | ours


speed = lab.bench("forward", points(LENGTHS), providers, **FORWARD)

# %%


# Drawing
def lines_of(head_dim):
    """Two panels for one head_dim, causal and without a mask, with a line for each provider."""

    def in_words(rows):
        last = [
            r for r in rows if r["head_dim"] == head_dim and r["seqlen"] == LENGTHS[-1]
        ]
        found = (f"{r['provider']}, {r['mask']}, {r['rate']:.0f}" for r in last)
        return (
            f"Lines over the length, TFLOP/s; at {LENGTHS[-1]:,}: {'; '.join(found)}."
        )

    def panels(axes, rows):
        figure = axes.figure
        left, right = figure.add_gridspec(1, 2)
        axes.set_subplotspec(left)
        both = (axes, figure.add_subplot(right, sharey=axes))
        figure.set_size_inches(6.8, 3.4)
        for panel, mask in zip(both, ("causal", "full"), strict=True):
            here = [r for r in rows if r["head_dim"] == head_dim and r["mask"] == mask]
            for name in dict.fromkeys(r["provider"] for r in here):
                line = [r for r in here if r["provider"] == name]
                look = {
                    "marker": "o",
                    "linewidth": 2.6 if name == "Kernel Book" else 1.4,
                }
                if name == speed.limit:
                    look = {"linestyle": "--"}
                panel.plot(
                    [r["seqlen"] for r in line],
                    [r["rate"] for r in line],
                    color=lab.colour(name),
                    markersize=4,
                    **look,
                )
            panel.set_xscale("log", base=2)
            panel.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
            panel.get_xticklabels()[0].set_ha("left")
            panel.get_xticklabels()[-1].set_ha("right")
            panel.minorticks_off()
            panel.set_title(
                {"causal": "causal mask", "full": "no mask"}[mask], fontsize=11
            )
            panel.set_xlabel("length")
        both[1].tick_params(labelleft=False)
        both[1].grid(axis="x", visible=False)
        axes.set(ylim=(0, None), ylabel="TFLOP/s")
        ends = {r["provider"]: r["rate"] for r in here if r["seqlen"] == LENGTHS[-1]}
        height, below = 0.07 * max(ends.values()), -1.0  # of a label; the label below
        for name, rate in sorted(ends.items(), key=lambda end: end[1]):
            below = max(rate, below + height)
            words, weight = name, "normal"
            if name == "Kernel Book":
                words, weight = "this kernel", "bold"
            look = {"color": lab.colour(name), "weight": weight, "fontsize": 10}
            beside = both[1].get_yaxis_transform()
            both[1].text(1.03, below, words, va="center", transform=beside, **look)

    lab.draw(speed, f"Attention, head_dim {head_dim}", in_words, panels)


lines_of(128)

# %%


# Measuring
def ahead_of_ours(**where):
    """The libraries that are faster at a point by more than 1 %, with their TFLOP/s."""
    ours = speed.rate("Kernel Book", **where)
    ahead = speed.ahead_of("Kernel Book", *LIBRARIES, **where)
    return [(name, rate) for name, rate in ahead if rate > 1.01 * ours]


at_points = []
for point in points(LENGTHS, (128, 64)):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    faster = ahead_of_ours(**where)
    at_points.append(
        {
            "head_dim": point["head_dim"],
            "mask": point["mask"],
            "length": point["seqlen"],
            "TFLOP/s": f"{speed.rate('Kernel Book', **where):.0f}",
            "of the matmul": f"{100 * speed.share('Kernel Book', **where):.0f} %",
            "faster libraries": ", ".join(f"{name} {rate:.0f}" for name, rate in faster)
            or "none",
        }
    )


# %%


# Reading
def gaps(name, head_dims):
    """By how many percent a library is ahead, at the points where it is."""
    found = []
    for point in points(LENGTHS, head_dims):
        where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
        ahead = dict(ahead_of_ours(**where))
        if name in ahead:
            share = ahead[name] / speed.rate("Kernel Book", **where) - 1
            found.append(100 * share)
    return found


def told_of(names):
    """At how many points some libraries are ahead, and by how much, in words."""
    timed = [name for name in names if name not in speed.skipped]
    keys = ("head_dim", "mask", "seqlen")
    drawn = len(points(LENGTHS, (128,)))
    said = []
    for name in timed:
        if found := gaps(name, (128,)):
            many = f"all {drawn}" if len(found) == drawn else f"{len(found)}"
            if not said:
                many += " points" if len(found) == drawn else f" of the {drawn} points"
            at = "at" if said else "is ahead at"
            said.append(f"{name} {at} {many}, by up to {max(found):.0f} %")
    narrow = [name for name in timed if gaps(name, (64,)) and not gaps(name, (128,))]
    nowhere = [name for name in timed if not gaps(name, (128, 64))]
    close = any(
        speed.ahead_of("Kernel Book", *nowhere, **{key: point[key] for key in keys})
        for point in points(LENGTHS, (128, 64))
    )
    behind = "nowhere more than 1 % ahead" if close else "slower everywhere"
    return (
        (f"{', and '.join(said)}. " if said else "no library is ahead. ")
        + (f"{do(narrow, 'is', 'are')} ahead only at head_dim 64. " if narrow else "")
        + (f"{do(nowhere, 'is', 'are')} {behind}. " if nowhere else "")
        + "".join(
            f"{name} is absent from this run; the notes under the figures say why. "
            for name in names
            if name in speed.skipped
        )
    )


lab.read(
    {
        1: "**One library is still faster.** ",
        2: "**Two libraries are still faster.** ",
    }.get(
        sum(
            bool(gaps(name, (128,))) for name in LIBRARIES if name not in speed.skipped
        ),
        "",
    )
    + f"In this figure, on the {speed.provenance['gpu'].removeprefix('NVIDIA ')}, "
    + told_of(("FlashAttention", "SDPA cuDNN", "SDPA flash", "FlexAttention"))
    if speed.rows
    else f"{speed.rate('Kernel Book')}"
)

# %%

# Folded: The same at head_dim 64, and all points with the libraries that are faster
lines_of(64)
lab.table(
    at_points if speed.rows else [],
    "The plain Triton kernel, and the libraries that are faster by more than 1 %",
)

# %%


# Measuring
def constants_of(name):
    """What happens once per program, in tiles of 64 keys, by two pairs of lengths."""
    where = {"head_dim": 128, "mask": "full"}
    found = []
    for far in (16384, 4096):
        short, long = (
            speed.milliseconds_at(name, seqlen=length, **where)
            for length in (1024, far)
        )
        per_tile = (long - short) / ((far - 1024) / 64)
        found.append(short / per_tile - 1024 / 64)
    return found


own = constants_of("Kernel Book")
best, _ = speed.best_peer(*LIBRARIES, head_dim=128, mask="full", seqlen=1024)
beside = constants_of(best) if best != "none" else [nan, nan]
once = [100 * tiles / (16 + tiles) for tiles in own]

# %%


# Measuring
def launch(head_dim, dtype):
    q, k, v = draw(1, 4, 1024, head_dim, dtype)
    return lambda: attention(q, k, v, is_causal=True)


# %%

# Measuring
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

# %%


# Measuring
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
        inputs = draw(1, 16, length, 128)
        row = {"length": length}
        row["SDPA, µs"] = microseconds(F.scaled_dot_product_attention, *inputs)
        row["Kernel Book, µs"] = microseconds(attention, *inputs)
        rows.append(row)
    return rows


# %%

# Measuring
small = lab.measure("Time per call, back to back, 16 heads, head_dim 128", small_inputs)

# %%

# Reading
first, second, last_one = (
    (small.rows[0], small.rows[1], small.rows[-1]) if small.rows else ({}, {}, {})
)


def beside_sdpa(row):
    """How long a call takes beside PyTorch's, in words."""
    ratio = row.get("Kernel Book, µs", nan) / row.get("SDPA, µs", nan)
    if abs(ratio - 1) < 0.05:
        return "about as long as PyTorch's SDPA"
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % less than PyTorch's SDPA"
    if ratio < 2:
        return f"{100 * (ratio - 1):.0f} % longer than PyTorch's SDPA"
    return f"{ratio:.1f} times as long as PyTorch's SDPA"


outlasts = last_one.get("Kernel Book, µs", nan) > 1.3 * first.get(
    "Kernel Book, µs", nan
)
lab.read(
    f"**On small inputs, the host code sets the pace.** At length {first.get('length', nan):,}, a "
    f"call takes {first.get('Kernel Book, µs', nan):.0f} µs, which is {beside_sdpa(first)}. At "
    f"{second.get('length', nan):,}, with "
    f"{(second.get('length', nan) / first.get('length', nan)) ** 2:.0f} times the work, it takes "
    f"{second.get('Kernel Book, µs', nan):.0f} µs."
)

# %%

# Folded: Short lengths, dtypes and small inputs
short_lengths = lab.read(
    f"**Short lengths** are further from the matmul, because whatever happens once per program, "
    f"such as loading the queries, carries more weight: {min(once):.0f} to {max(once):.0f} % of "
    f"our kernel's time at length 1,024 without a mask. With a causal mask, the kernel also "
    f"discards half of each tile on the diagonal, which at length 1,024 is an eighth more work."
)
estimates = lab.table(
    [
        {
            "kernel": name,
            "from 1,024 and 4,096": f"{constants[1]:.1f}",
            "from 1,024 and 16,384": f"{constants[0]:.1f}",
        }
        for name, constants in (("Kernel Book", own), (best, beside))
        if speed.rows
    ],
    "What happens once per program, in tiles of 64 keys; head_dim 128, no mask",
)
how_estimated = lab.read(
    f"These estimates take the time of a program for a constant plus a time per tile of keys. All "
    f"lengths have the same number of programs, so the times at two of them give both parts. Since "
    f"the columns differ, this holds only roughly. {best} is the fastest library at 1,024."
)
per_call = lab.read(
    "**Time per call** is for one sequence with 16 heads and no mask. SDPA chooses its own "
    "backend; we did not record which."
    + (
        f" At length {last_one.get('length', nan):,}, the kernel takes longer than the host code, "
        f"and the call takes {beside_sdpa(last_one)}. The figure above has four sequences of this "
        f"length, so its ratios may differ."
        if outlasts
        else ""
    )
)
lab.together(short_lengths, estimates, how_estimated, per_call, small, facts)

# %%
# What breaks it
# --------------
#
# **A descriptor that flattens the heads.** What if a descriptor presents all heads as one matrix of
# (heads · length) rows? The copy engine then does not know where a head ends. Take two heads of 20
# rows, and tiles of 16. The program for the last tile of the *first* head multiplies it by ten:
#
# .. code-block:: python
#
#    y_desc.store([0, 16, 0], x_desc.load([0, 16, 0]) * 10)  # heads apart
#    y_desc.store([16, 0], x_desc.load([16, 0]) * 10)  # flattened

# %%


# Measuring
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _last_tile_kernel(x_desc, y_desc, FLAT: tl.constexpr):
    if FLAT:  # (heads * length, head_dim): the tile starts at row 16 of the matrix
        y_desc.store([16, 0], x_desc.load([16, 0]) * 10)
    else:  # (heads, length, head_dim): it starts at row 16 of head 0
        y_desc.store([0, 16, 0], x_desc.load([0, 16, 0]) * 10)


# %%

# Measuring
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
            "in head 0": (y[0, :, 0] != 0).sum().item(),
            "in head 1": (y[1, :, 0] != 0).sum().item(),
        }
    )
assert [row["in head 1"] for row in rows] == [0, 12]
wrote = {row["descriptor"]: (row["in head 0"], row["in head 1"]) for row in rows}
wrote_table = lab.table(rows, "Rows that the program of head 0 wrote")

# %%


# Drawing
def overhang(axes):
    """The rows of two heads, those that one program wrote, and the tile that it named."""
    own, other, grey = (lab.colour(x) for x in ("Kernel Book", "PyTorch", "matmul"))

    def rows_of(y, first, count, colour, alpha):
        if count:
            axes.barh(y, count - 0.2, 0.8, first + 0.1, color=colour, alpha=alpha)
            axes.text(first + count / 2, y, f"{count}", ha="center", va="center")

    for top, name, words in (
        (0, "heads apart", "cut off"),
        (5.2, "flattened", "rows of another head"),
    ):
        inside, outside = wrote[name]
        flat = name == "flattened"
        left, y = (20, top) if flat else (0, top + 2)  # of head 1
        axes.text(0, top - 1.6, name.capitalize(), weight="bold", va="center")
        axes.text(0, top - 0.8, "head 0", va="center")
        axes.text(
            left + 20 * flat,
            y - 0.8,
            "head 1",
            va="center",
            ha="right" if flat else "left",
        )
        rows_of(top, 0, 16, grey, 0.15)
        rows_of(top, 16, inside, own, 0.3)
        rows_of(y, left, outside, other, 0.5)
        rows_of(y, left + outside, 20 - outside, grey, 0.15)
        axes.barh(top, 16, 1.0, 16, fill=False, edgecolor=grey, linestyle="--")
        axes.text(26, top + 0.95 * flat, words, ha="center", va="center")
    axes.text(0, 6.15, "dashed: the tile", va="center")
    axes.set(xlim=(-0.1, 40.1), ylim=(6.6, -2.1), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "The rows that the program of head 0 wrote, in colour",
    f"The rows of two heads, 20 each, and a tile of 16 from row 16 on. Heads apart: the program "
    f"writes {wrote['heads apart'][0]} rows of head 0 and none of head 1. Flattened: it writes "
    f"{wrote['flattened'][0]} rows of head 0 and {wrote['flattened'][1]} of head 1.",
    overhang,
    height=3.0,
)

# %%
# The 12 rows belong to another head. In attention, the program would write wrong numbers there, and
# that head's own program the right ones: whichever finishes last wins. Only lengths that no tile
# divides show this, so test those.


# Measuring
v = torch.zeros(32, 16)
v[20:] = torch.inf  # the first rows of the next head
weights = torch.zeros(1, 32)
weights[:, :20] = 1 / 20
found = (weights @ v)[0, 0].item()


def greedy():
    q, _, _ = draw(1, 4, 1024, 128)
    config = tuned.by_descriptor(128, 128, num_warps=8, num_stages=5, shared=0)
    try:
        with mock.patch.object(tuned, "forward_config", return_value=config):
            attention(q, q, q)
        said = "Nothing: this GPU has enough."
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return [{"what the launch says": line} for line in textwrap.wrap(said, 56)]


refused = lab.measure("128 queries and 128 keys in a tile, 5 stages", greedy)

# %%

# Folded: The rows counted, reading past the end of a head, and too much shared memory
past_the_end = lab.read(
    f"**Reading** past the end of a head does harm too, although the weights there are zero. If "
    f"the 12 values that belong to the next head are infinite, the weighted sum is "
    f"{str(found).replace('nan', 'NaN')}, because zero times infinity is."
)
said = " ".join(row["what the launch says"] for row in refused.rows) or f"{nan}"
sizes = re.search(r"Required: (\d+), Hardware limit: (\d+)", said)
too_much = lab.read(
    f"**Too much shared memory.** Every pipeline stage has its own tile of keys and of values. "
    f"With 5 stages of 128 keys, the kernel would need {int(sizes[1]):,} bytes, but a program may "
    f"have only {int(sizes[2]):,}. The launch raises `{said.split(':')[0]}`, so the "
    f"package takes the first configuration that fits."
    if sizes
    else said
)
lab.together(wrote_table, past_the_end, too_much)

# %%
# In short
# --------
#
# - **A second program** on an SM uses the tensor cores while the first computes exponentials or
#   waits. Making room for it costs speed, so the kernel became faster only after changes that
#   save registers or remove waits.
# - **Count the waits** in the machine code, and ask the assembler for its reason.
# - **Take each change back** at the end, because its worth depends on the others.
#
# :doc:`/chapters/attention_hopper` gives warps roles, :doc:`/chapters/attention_backward` computes
# the gradient, and :doc:`/chapters/attention_in_models` handles a single query.
#
# Exercises
# ---------
#
# **1. How many programs fit?** For tiles of 64, 128 and 256 keys, how many stages leave enough
# shared memory for two programs of 128 queries, at head_dim 128 in 16 bits?

# %%

# Solution: how many programs fit
rows = []
for keys in (64, 128, 256):
    row = {"keys per tile": keys}
    for stages in (1, 2, 3):
        kib = (128 + stages * 2 * keys) * 128 * 2 / 1024
        what = "1 stage" if stages == 1 else f"{stages} stages"
        row[what] = f"{kib:.0f} KiB: {int(227 // kib)}"
    rows.append(row)
assert rows[0]["2 stages"] == "96 KiB: 2"
lab.table(rows, "Shared memory per program, and how many programs fit on an SM")

# %%
# **2. Too many waits?** A kernel contains the loop of rung 4 once, with head_dim 64 and tiles of
# 128 keys. In the code of the loop you find 12 ``HGMMA`` and 12 ``WARPGROUP.DEPBAR``. How many
# should there be, and what do you do next?

# %%

# Solution: too many waits
#
# An instruction covers 16 steps of the inner dimension, which is head_dim for q kᵀ and the keys of
# a tile for p v. The 4 + 8 instructions are therefore right, but at best each tl.dot waits once,
# which makes 2 waits. Ask ptxas with TRITON_DUMP_PTXAS_LOG=1. If it says "insufficient register
# resources", save registers or raise the limit; if something reads accumulator registers, look in
# the TTGIR for what copies or converts acc while p v runs. We check the rule with the rungs of this
# page:


def by_the_rule(head_dim, keys, loops):
    """Matmul instructions, and waits at best, of some loops with two tl.dot each."""
    return {
        "matmul instructions": loops * (head_dim // 16 + keys // 16),
        "waits": loops * 2,
    }


rows = [{"kernel": "yours"} | by_the_rule(64, 128, 1)]
for words, name, loops in (
    ("start", "in stages", 2),
    ("rung 4", "two-step maximum", 3),
):
    rows.append({"kernel": words} | by_the_rule(128, 64, loops))
    if name in made:  # rung 4 has a third pair of tl.dot outside its loops
        assert made[name]["matmul instructions"] == rows[-1]["matmul instructions"]
        assert made[name]["waits for them"] == rows[-1]["waits"]
lab.table(rows, "What there should be")

# %%
# **3. A soft cap.** Some models bound their scores: a score :math:`s` becomes
# :math:`b \tanh(s / b)` before the mask. Write the lines of ``_weigh`` that do this. How much of
# rung 5 is left?

# %%

# Solution: a soft cap
#
# tanh is increasing, so the maximum may still be taken over the raw dot products. Their scale is
# now inside tanh and costs a multiplication again, but the factor b log2(e) outside combines with
# the subtraction of the maximum into one fused multiply-add, as the scale did.
x, scale, bound = 30 * torch.randn(4, 64, dtype=torch.float64), 128**-0.5, 5.0
inside, outside = scale / bound, bound * 1.4426950408889634
m_new = outside * torch.tanh(x.amax(-1) * inside)
p = torch.exp2(torch.tanh(x * inside) * outside - m_new[:, None])
truth = torch.softmax(bound * torch.tanh(x * scale / bound), -1)
off = (p / p.sum(-1, keepdim=True) - truth).abs().max().item()
assert off < 1e-14
lab.table(
    [{"bound": bound, "off by": f"{off:.0e}"}], "Weights under a soft cap, float64"
)

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
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
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
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of a matmul at length 16,384"
)
