"""
Attention, rung by rung
=======================

The kernel of the last chapter keeps its scores on the chip and skips the tiles that a mask empties,
and still it is far slower than a matmul with as many operations. *Which changes bring it closer,
and what is each of them worth?*

You will learn

- what each of six changes gains when it is made, and what the finished kernel loses without it;
- how to read from machine code where a program waits, and what two programs on an :term:`SM` do
  about it;
- how far a kernel comes that takes turns between matmuls and exponentials, and how far this one.

The kernel is the package's in plain Triton, ``attention(..., backend="triton")``, timed here on one
generation of GPUs.
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
# What could stop it
# ------------------
#
# Attention is two matmuls with exponentials in between, so two things could leave the tensor
# cores, the GPU's matmul units, idle: memory that delivers the tiles too slowly, and the
# exponentials.
#
# **Memory.** Each tile of 128 queries loads all keys and values of its head again.


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
lab.read(
    f"Attention does {per_byte:.0f} operations per byte that it loads or stores, and in this run "
    f"the GPU needed {needed:.0f} to keep its arithmetic busy. "
    + (
        f"So if every byte came from HBM, the memory outside the chip, attention would stop at "
        f"{from_hbm:.0f} TFLOP/s. But the programs of a head load the same keys and values at the "
        f"same time, so the L2 cache can serve many of the loads."
        if per_byte < needed
        else f"So memory allows {from_hbm:.0f} TFLOP/s, more than a matmul reaches, even if every "
        f"byte comes from HBM, the memory outside the chip."
    )
)

# %%

# Folded: The operations and the bytes, counted
lab.read(
    f"At length 4,096 and head_dim 128, a head does {4 * 4096**2 * 128 / 1e9:.2f} GFLOP on "
    f"{moved_by(4096)[0]:.0f} MiB. A matmul runs at {matmul_speed:.0f} TFLOP/s and a copy at "
    f"{copy_speed:,.0f} GB/s."
)

# %%

# Folded: Why not keep the keys and load the queries?
both_orders = {length: moved_by(length) for length in (4096, 16384)}
lab.read(
    f"A program that keeps a tile of keys has to read all queries, and to read and write back "
    f"their `acc` in float32. At length 4,096 this is {both_orders[4096][1]:,.0f} MiB for a head, "
    f"instead of {both_orders[4096][0]:,.0f}, and at 16,384 it is {both_orders[16384][1]:,.0f} "
    f"instead of {both_orders[16384][0]:,.0f}. It also meets a worse problem: programs with "
    f"different keys add to the same `acc`, so they would have to wait for each other. The first "
    f"FlashAttention avoided that by running one program per head, but a GPU with more than a "
    f"hundred SMs then stands idle for the most part if there are few heads. If queries stay, no "
    f"two programs write to the same address, and there are as many programs as tiles of queries."
)

# %%
# **Exponentials.** Each score costs :math:`4 D` operations in the two matmuls, for head_dim
# :math:`D`, and one exponential. A Hopper SM does 4,096 such operations in a cycle, but only 16
# exponentials. At head_dim 128 the matmuls of a score therefore take an eighth of a cycle, and its
# exponential a sixteenth. A kernel that takes turns between the two leaves the tensor cores idle
# for a third of its time.


# Drawing
def bound_of_turns(head_dim):
    """The most that a kernel reaches, in percent of a matmul, if it never does both at once."""
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
        title = "Two programs" if "B" in programs else "One program takes turns"
        said = "at best 100" if "B" in programs else f"{bound_of_turns(128):.0f}"
        axes.text(-3.3, top - 0.2, title, va="center", fontweight="bold")
        axes.text(9, top - 0.2, f"{said} % of a matmul", va="center", ha="right")
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
    "Exponentials leave the tensor cores idle, or not",
    "Two timelines of an SM. One program takes turns: a matmul for two units of time, then "
    "exponentials for one, during which the tensor cores are idle. Of two programs, one computes "
    "its exponentials while the tensor cores work for the other, and they are never idle.",
    turns,
    height=2.9,
)

# %%

# Reading
lab.read(
    f"So by this count a kernel that takes turns ends at {bound_of_turns(128):.0f} % of a matmul. "
    f"At head_dim 64, where half as many operations stand beside the same exponential, it ends at "
    f"{bound_of_turns(64):.0f} %."
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    The way up is to do less besides the matmuls, and to do it while a matmul runs.

# %%
# The loop
# --------
#
# All rungs of this chapter are one kernel, whose loop loads a tile of keys, computes the scores
# ``qk``, turns them into weights ``p``, and adds the weighted values to ``acc``:
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
# - ``_tile`` loads the rows of a head from ``start_n`` on.
# - ``_weigh`` makes the weights. It also updates ``m_i`` and ``l_i``, the largest score and the sum
#   of weights of each query, and returns ``alpha``, which converts old sums to the new maximum.
#
# A ``tl.dot`` becomes several matmul instructions, each 16 deep: 8 of them for ``q kᵀ``,
# because head_dim is 128, and 4 for ``p v``, because a tile has 64 keys. On Hopper the tensor cores
# work through them on their own, until the program **waits** for the result:
#
# .. image:: /figures/attention-waits.svg
#    :alt: Two timelines of the eight instructions of a tl.dot. Above, the program hands over all of
#          them, and waits once while the tensor cores work without a gap. Below, it waits after
#          each instruction, and the tensor cores are idle until the next one comes.
#
# At best there is one wait for a ``tl.dot``. But the registers that a matmul reads and writes are
# its own until it is complete. Where the assembler, the last stage of the compiler, cannot keep
# everything else off them, it makes the program wait after each instruction. So we count the waits
# in the machine code of every rung. The kernel has this loop twice, for whole tiles and for tiles
# that the mask cuts: 2 · (8 + 4) = 24 matmul instructions and, at best, 4 waits.
#
# .. dropdown:: The loop with its flags
#
#    .. literalinclude:: attention_fast.py
#       :language: python
#       :pyobject: _loop
#       :start-at: for start_n
#       :end-before: return acc
#       :dedent:
#
#    ``DESCRIBED`` is the flag of rung 2, ``AHEAD`` of rung 3, ``TWO_STEPS`` of rung 4 and
#    ``FOLDED`` of rung 5. ``MASKED`` is set for tiles that the causal mask cuts; there each query
#    keeps its first ``n_visible`` keys.
#
# .. dropdown:: Three details: ``LOWEST``, ``PRECISION``, and the checks
#
#    ``m_i`` starts at ``LOWEST``, the lowest finite number of float32, and not at :math:`-\infty`.
#    This saves the guard against :math:`-\infty - (-\infty)`, which is NaN, because :math:`-\infty`
#    minus a finite number is :math:`-\infty`, whose exponential is 0.
#
#    ``PRECISION`` is ``"tf32x3"`` on NVIDIA GPUs and matters in float32 only: it splits each number
#    into a coarse part and a remainder, both in :term:`TF32`, and replaces one matmul by three on
#    the tensor cores.
#
#    The rungs are checked in float32 and float16, with small tiles and to eight times PyTorch's
#    error; the package's kernel, below, also in bfloat16.

# %%
# The ladder
# ----------
#
# To the loop we make six changes, one after the other: the *rungs* of a ladder. A step to the
# right is a faster kernel, in percent of a :term:`cuBLAS` matmul timed in the same run. Under the
# name of each rung stands its aim.


# Whole
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
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32}  # small: even small inputs have many tiles
    sizes = ((100, 100, False), (100, 100, True), (40, 90, True))
    for seqlen_q, seqlen_k, is_causal in sizes:
        for dtype in (torch.float32, torch.float16):
            q = torch.randn(1, 2, seqlen_q, 32, device=runtime.DEVICE).to(dtype)
            k, v = torch.randn(2, 1, 2, seqlen_k, 32, device=runtime.DEVICE).to(dtype)
            mask = torch.ones(
                seqlen_q, seqlen_k, dtype=torch.bool, device=runtime.DEVICE
            )
            mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
            theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            truth, _ = reference.attention(q, k, v, is_causal)
            for name, options in RUNGS.items():
                ours = run(q, k, v, is_causal, **blocks, **options)
                what = f"{name}, {seqlen_q} × {seqlen_k}{', causal' * is_causal}"
                yield lab.Case(what, "forward", ours, theirs, truth, factor=8)


# %%


# Measuring
def without(name):
    """The options of the last rung with one change taken back."""
    kept = {key: value for key, value in so_far.items() if key not in LADDER[name]}
    start = RUNGS["in stages"]
    return kept | {key: start[key] for key in LADDER[name] if key in start}


TAKEN_BACK = {f"without {name}": without(name) for name in list(LADDER)[1:-1]}
HALVES = {  # the rung "two programs" is two changes; the last rung with one of them taken back
    "without register limit": {k: v for k, v in so_far.items() if k != "maxnreg"},
    "without two stages": so_far | {"num_stages": 3},
}


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    inputs = (*draw(batch, heads, seqlen, head_dim, dtype), mask == "causal")
    timed = {
        name: partial(run, *inputs, **WIDE, **options)
        for name, options in (RUNGS | TAKEN_BACK | HALVES).items()
    }
    timed["Kernel Book"] = lambda: attention(*inputs[:3], is_causal=inputs[3])
    return {"matmul": matmul()} | timed


steps = lab.bench("ladder", points([4096], [128]), ladder_providers, **FORWARD)

# %%


# Drawing
CHANCE = 0.015  # a smaller difference is none that we can tell

CAUSES = {
    "in stages": "one program per SM",
    "two programs": "one works while one waits",
    "descriptors": "no addresses in registers",
    "one iteration ahead": "exponentials during copies",
    "two-step maximum": "one wait for a matmul",
    "scale folded": "one multiplication less",
    "heavy first": "no late long programs",
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
    axes.stairs(full, edges, orientation="horizontal", color=other, label="no mask")
    for step, (name, cause) in enumerate(CAUSES.items()):
        number = f"{step} " if step else ""
        axes.text(1, step + 0.33, f"{number}{name}", va="center", fontweight="bold")
        axes.text(1, step + 0.7, cause, va="center")
        for values, put in ((causal, "right"), (full, "left")):
            said = f"{values[step]:.0f} %"
            if step:
                change = values[step] / values[step - 1] - 1
                said = f"{100 * change:+.0f} %" if abs(change) >= CHANCE else "same"
            at = values[step] + (1 if put == "left" else -1)
            weight = "bold" if put == "right" else "normal"
            said = said.replace("-", "−")
            axes.text(at, step + 0.33, said, ha=put, va="center", fontweight=weight)
    axes.axvline(100, color=other, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 104), ylim=(7, 0), yticks=[], xlabel="% of the speed of matmul")


lab.draw(steps, "Each rung, and by how much it is faster", steps_in_words, staircase)


def you_are_here(name):
    """Show the staircase small, with the step of one rung lit: in the colours of the page."""
    causal, _ = shares(steps.rows)
    lit = list(LADDER).index(name)
    parts = []
    for number, value in enumerate(causal):
        x, y = 44 * number, 74 - 2.4 * (value - 50)
        shade = 0.85 if number == lit else 0.2
        colour = "#bc4c00" if number == lit else "currentColor"
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="43" height="{74 - y:.1f}" fill="{colour}" '
            f'opacity="{shade}"/><text x="{x + 22}" y="90" text-anchor="middle" '
            f'font-weight="{"bold" if number == lit else "normal"}">{number or "start"}</text>'
        )
    said = f"You are here: step {lit} of the staircase, {name}."
    svg = (
        f'<svg viewBox="0 0 308 96" width="308" height="96" role="img" aria-label="{said}" '
        f'font-size="13" fill="currentColor">{"".join(parts)}</svg>'
    )
    return (
        show(
            Shown(f'<div class="kb-here" style="margin-bottom: 1rem">{svg}</div>', said)
        )
        if causal
        else None
    )


# %%

# Reading


def spread(name):
    """By how much the middle three fifths of a rung's timings lie off their median, at most."""
    return max(
        max(1 - low / median, high / median - 1)
        for low, median, high in steps.milliseconds[name]
    )


scatter = max(map(spread, LADDER)) if steps.rows else nan
of_ladder = steps.rate("matmul", mask="full")
lab.read(
    f"Every step is a median, and the middle three fifths of its timings lie within "
    f"{100 * scatter:.1f} % of it. We call steps of less than {100 * CHANCE} % the same."
    + (
        f" (The matmul reaches {of_ladder:.0f} TFLOP/s here. In the first section it was "
        f"{matmul_speed:.0f}, because it ran call after call, and the chip lowers its clocks then.)"
        if matmul_speed < 0.98 * of_ladder
        else ""
    )
)

# %%


# Measuring
def of_chapter_before(mask):
    """The staged kernel's share of a matmul in the chapter before, and ours' time over its time."""
    record = results.find("attention_forward") or {}
    sweep = record.get("sweeps", {}).get("ladder", {})
    if not steps.rows or "in stages" not in sweep.get("milliseconds", {}):
        return nan, nan
    step = [point["mask"] for point in sweep["points"]].index(mask)
    kernel, limit = (sweep["milliseconds"][x][step][1] for x in ("in stages", "matmul"))
    ours = steps.milliseconds_at("in stages", mask=mask)
    flops = 4 * 64 * 4096**2 * 128 * (0.5 if mask == "causal" else 1)
    return flops / (2 * 8192**3) * limit / kernel, kernel / ours - 1


# %%

# Reading
_, slower = of_chapter_before("causal")
steps_up = {
    name: steps.rate(name, mask="causal") / steps.rate(before, mask="causal") - 1
    for before, name in zip(list(LADDER)[:-1], list(LADDER)[1:], strict=True)
}
lab.read(
    f"The start is the staged kernel of the chapter before in other code, and that is a step, too: "
    f"the old kernel takes {100 * slower:.0f} % longer. "
    + (
        "Of the six that follow, two are odd. Rung 1 seems to be worth nothing. And the largest, "
        "rung 4, rewrites a single line, which returns the same numbers as before. Waits will "
        "explain both."
        if abs(steps_up["two programs"]) < CHANCE
        and max(steps_up, key=steps_up.get) == "two-step maximum"
        else "We take the six that follow one by one."
    )
)

# %%

# Folded: The steps in TFLOP/s
lab.table(
    [
        {"rung": name}
        | {
            f"{mask}, TFLOP/s": f"{steps.rate(name, mask=mask):.0f}"
            for mask in ("causal", "full")
        }
        for name in ("matmul", *LADDER, "Kernel Book")
    ]
    if steps.rows
    else [],
    "The ladder, length 4,096, head_dim 128",
)

# %%

# Folded: Every rung, checked against float64
lab.check("The rungs", cases())

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


compiled_rungs = lab.measure(
    "The rungs as compiled, causal", partial(made_by_the_compiler, RUNGS | TAKEN_BACK)
)
made = {row["version"]: row for row in compiled_rungs.rows}


def compiled_to(name, what):
    return made.get(name, {}).get(what, nan)


def gain(name, mask):
    names = list(LADDER)
    before = names[names.index(name) - 1]
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def in_percent(share):
    """What a change of the speed is called."""
    if share != share:
        return "nan"  # so that the paragraph says that it is not recorded
    if abs(share) < CHANCE:
        return "no difference"
    return f"{100 * share:+.0f} %".replace("-", "−")


def told(name):
    """What a rung gains, in words."""
    causal, full = (in_percent(gain(name, mask)) for mask in ("causal", "full"))
    if causal == full:
        return f"**Measured: {causal}**, with a causal mask and without one. "
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
# Who could use the tensor cores while a program computes exponentials? A second program on the same
# SM. But it fits only if each takes at most half of the SM's storage, of which there are two kinds.
#
# .. image:: /figures/attention-two-programs.svg
#    :alt: Two SMs, each a box of registers and a box of shared memory. On the left one program with
#          three stages fills 128 of 227 KiB of shared memory and three quarters of the registers,
#          and a second one does not fit. On the right two programs with two stages take 96 KiB and
#          half of the registers each.
#
# **Shared memory** holds the tiles. ``num_stages``, the number of *pipeline stages*, says how many
# tiles of keys, and of values, are on their way or in use at a time. The 128 queries of a program
# take 32 KiB, and so does each stage with its 64 keys and 64 values. Two programs with two stages
# fit into the 227 KiB of an SM; with three, they do not.
#
# **Registers**, private to a thread, hold ``acc`` and the scores. Two programs of 8 :term:`warps
# <warp>` are 512 threads, so of the SM's 65,536 registers each thread gets 128. The option
# ``maxnreg`` of the launch sets this limit. Values that do not fit :term:`spill <spill>` to memory.


# Measuring
START = RUNGS["in stages"]
compiled_halves = lab.measure(
    "Two programs in halves, as compiled, causal",
    partial(
        made_by_the_compiler,
        {
            "start": START,
            "start, two stages alone": START | {"num_stages": 2},
            "start, register limit alone": START | runtime.register_limit(128),
            "finished": so_far,
            "finished, two stages alone": HALVES["without register limit"],
            "finished, register limit alone": HALVES["without two stages"],
            "finished, neither": TAKEN_BACK["without two programs"],
        },
    ),
)
half = {row["version"]: row for row in compiled_halves.rows}


def programs_on_an_sm(row):
    """How many fit by registers, of 8 warps, and by shared memory, of which 227 KiB are free."""
    by_registers = 65536 // (8 * 32 * -(-row["registers"] // 8) * 8)
    return min(by_registers, 227 // (row["shared memory, KiB"] + 1))


def by_half(rows):
    return [
        {
            "change": name,
            "registers": row["registers"],
            "spills": row["spills"],
            "shared, KiB": row["shared memory, KiB"],
            "waits": f"{row['waits for them']} of {row['matmul instructions']}",
            "programs": programs_on_an_sm(row),
        }
        for name, row in rows.items()
        if row
    ]


# %%

# Folded: What each of the two changes does alone
lab.table(
    by_half(
        {
            "none": half.get("start"),
            "two pipeline stages alone": half.get("start, two stages alone"),
            "register limit alone": half.get("start, register limit alone"),
            "both": made.get("two programs"),
        }
    ),
    "What it takes for a second program, causal",
)

# %%

# Reading
early = max(gain("two programs", mask) for mask in ("causal", "full")) < 0.05
you_are_here("two programs")

# %%

# Reading
lab.read(
    told("two programs")
    + (
        f"Each thread had {compiled_to('in stages', 'registers')} registers and is left with 128. "
        f"So {compiled_to('two programs', 'spills')} values spill, and the code, which waited "
        f"{compiled_to('in stages', 'waits for them')} times, now waits "
        f"{waits_of('two programs')}. The second program can fill gaps, but the limit has "
        f"opened new ones, and we suspect that the two cancel. Where can registers be saved?"
        if early
        else f"A thread, which had {compiled_to('in stages', 'registers')} registers, is left with "
        f"128, and the code waits {waits_of('two programs')}."
    )
)

# %%
# Rung 2: descriptors name tiles
# ------------------------------
#
# A thread spends registers on addresses: it computes and keeps one for each piece of a tile that it
# loads, and a mask. A :term:`tensor descriptor <descriptor>` makes them unnecessary. It states once
# what a tensor looks like: its address, its sizes, its strides, and the size of a tile.
#
# .. image:: /figures/attention-descriptor.svg
#    :alt: Above, without a descriptor: 256 threads each compute addresses and a mask in registers,
#          and load their own part of a tile. Below, with a descriptor: one thread names the tile by
#          its coordinates, and the copy engine TMA computes addresses, checks the bounds, and puts
#          the tile into shared memory.
#
# One thread then names a tile by its coordinates. The Tensor Memory Accelerator (TMA), the copy
# engine of an SM since Hopper, computes the addresses, fills with zeros what lies outside, and puts
# the tile into shared memory. In essence, ``_tile`` loads in one of two ways:
#
# .. code-block:: python
#
#    k = tl.load(ptrs, mask=rows < length, other=0.0)  # an address for each element
#    k = desc.load([batch, head, start_n, 0])  # the tile by its name

# Reading
# Reading
you_are_here("descriptors")

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
    reason = re.search(r"[(]C75[0-9]+[)].*? due to (.*?) (?:for|in) the function", log)
    return made, {
        "registers": int(re.search(r"Used ([0-9]+) registers", log)[1]),
        "waits": sum(word.startswith("WARPGROUP.DEPBAR") for word in words),
        "matmuls": sum(word.startswith("HGMMA") for word in words),
        "copies": max(len(re.findall(r"\\bmov[.]", part)) for part in runs),
        "reason": re.sub(" +", " ", reason[1]) if reason else "",
    }


def launched(options):
    q, k, v = torch.empty(3, 4, 16, 4096, 128, dtype=torch.bfloat16)
    run(q, k, v, True, BLOCK_M=128, BLOCK_N=64, num_warps=8, **options)
    return kept[-1]


found = {}
for name, options in json.loads(sys.argv[1]).items():
    made, found[name] = facts(lambda: launched(options))
    if name == "one iteration ahead":
        code = made.asm["ttgir"]
        twice = r"([^ ]+):2 = (ttng.warp_group_dot_wait .*)\\n *([^ ]+):2 = .*"
        for first, of, second in re.findall(twice, code):
            line = re.search(re.escape(f"{second}:2 = {of}") + ".*", code)
            if line:  # a second wait for the same matmul: we take the first one's result
                code = code.replace(line[0], "").replace(f"{second}#", f"{first}#")
        path = sys.argv[0] + ".ttgir"
        open(path, "w").write(code)
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
    free = {key: value for key, value in RUNGS[name].items() if key != "maxnreg"}
    to_compile |= {name: free | {"maxnreg": 128}, f"{name}, no limit": free}
seen = compiled_here([_loop, _tile, _weigh, _rung_kernel, run], to_compile)

# %%

# Reading
wanted = {name: seen.get(f"{name}, no limit", {}).get("registers") for name in LADDER}
lab.read(
    told("descriptors")
    + f"The number of spills goes from {compiled_to('two programs', 'spills')} to "
    f"{compiled_to('descriptors', 'spills')}. "
    + (
        f"Without a limit the compiler would give a thread {wanted['two programs']} registers "
        f"before this change and {wanted['descriptors']} after it. These are still more than 128, "
        f"so the waits stay."
        if seen
        and wanted["two programs"] > wanted["descriptors"] > 128
        and compiled_to("descriptors", "waits for them")
        >= compiled_to("two programs", "waits for them")
        else f"The code waits {waits_of('descriptors')}."
    )
)

# %%
# .. dropdown:: ``_tile``, how a descriptor is made, and GPUs without a copy engine
#
#    .. literalinclude:: attention_fast.py
#       :language: python
#       :pyobject: _tile
#       :start-at: if DESCRIBED
#       :dedent:
#
#    Without a descriptor, ``of_head`` is the address of the head, and rows past its end are masked.
#    With one, ``of_head`` is the descriptor and where the head lies in it. The host describes a
#    tensor with ``describe``. In the kernel, ``head_of`` joins the descriptor with the numbers of
#    batch and head, ``coordinates`` adds the row and column of a tile, and ``load_tile`` reads the
#    tile.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: describe
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: coordinates
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: load_tile
#
#    GPUs before Hopper have no TMA. The GeForce RTX 50 series has one, but its matmul instructions
#    read registers and not shared memory, so a tile in shared memory is not yet where it is needed.
#    On both, the package's kernel gets the address of a head instead, because Triton would turn a
#    descriptor into addresses and masks again, and into slow ones: before a thread may load 16
#    bytes at once, the compiler has to know that neighbours in a row are neighbours in memory, and
#    a descriptor that comes from the host does not tell it so at compile time. ``head_of`` gives it
#    an address whose last stride is the constant 1, and ``inside`` computes the addresses of a tile
#    from it.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: head_of
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: inside

# %%
# Rung 3: scores one iteration ahead
# ----------------------------------
#
# What else leaves the tensor cores idle? Look at how an iteration begins: with ``q kᵀ``,
# which needs a new tile of keys. With two stages there is room for the tile in use and for the next
# one, and Triton starts the copy of the next one at the end of an iteration, just before it is
# needed. So the program has to wait for nearly the whole copy. Exponentials need no new tile: if an
# iteration begins with them, they run while the copy is on its way.
#
# .. image:: /figures/attention-ahead.svg
#    :alt: Two sketched timelines of one iteration, during whose first part keys and values are
#          copied. Above, it begins with a matmul, so the program waits for the copies. Then come
#          q k, exponentials, and p v. Below, it begins with exponentials, during which values and
#          the next keys arrive. Then come p v, and q k of the next tile. The iteration is shorter
#          by the wait.
#
# So each iteration ends with the scores of the *next* tile. The same lines, in another order:
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
# The first scores are computed before the loops, and the last tile is finished after them.

# Drawing
you_are_here("one iteration ahead")

# %%

# Reading

outside = compiled_to("one iteration ahead", "matmul instructions") - compiled_to(
    "descriptors", "matmul instructions"
)
lab.read(
    told("one iteration ahead")
    + f"The code has {outside} matmul instructions more, those outside the loops, and still waits "
    f"{waits_of('one iteration ahead')}."
)

# %%
# Rung 4: the maximum in two steps
# --------------------------------
#
# Why does it still wait after each instruction? The assembler gives its reason, if it is asked:

# Reading
GIVEN = {
    "two programs": "1, two programs",
    "descriptors": "2, descriptors",
    "one iteration ahead": "3, one iteration ahead",
    "two-step maximum": "4, two-step maximum",
}
lab.table(
    [
        {
            "rung": words,
            "it waits after each instruction due to": seen[name]["reason"]
            or "(it does not)",
            "waits": f"{seen[name]['waits']} of {seen[name]['matmuls']}".replace(
                " ", "\N{NO-BREAK SPACE}"
            ),
        }
        for name, words in GIVEN.items()
    ]
    if seen
    else [],
    f"Compiled for this page with triton {triton.__version__}, causal, at most 128 registers",
)

# %%

# Reading
freed = seen.get("one iteration ahead, no limit", {})
lab.read(
    (
        f"In rung 3 it is no longer a lack of registers. With as many as it likes, "
        f"{freed['registers']}, it also waits {freed['waits']} of {freed['matmuls']} times. "
        if freed and freed["waits"] == freed["matmuls"]
        else ""
    )
    + "Something reads the accumulator, the registers of `acc`, while a matmul (`wgmma`) still "
    "writes them. Then the assembler makes all matmuls of the kernel wait."
)

# %%
# What reads it? The culprit is an innocent line, the maximum of a row, ``tl.max(qk, axis=1)``. Rung
# 4 replaces it by ``row_max``, which returns the same numbers:
#
# .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#    :language: python
#    :pyobject: row_max
#    :start-at: halves
#    :dedent:
#
# The link between the two is the *layout*, by which the compiler knows which thread holds which
# element of a tile. It leads from the maximum to ``acc`` in three steps:
#
# 1. The scores have the layout of a matmul with 64 columns, and ``acc`` that of one with 128. The
#    maximum of a row inherits the layout of the scores, and so does ``alpha``.
# 2. ``acc * alpha`` needs both in one layout. Up to rung 2 the compiler converts ``alpha``, one
#    number per row. With the new order of rung 3 it converts ``acc``. To spare the conversion in
#    each iteration, it then carries ``acc`` through the loop twice, once for each layout.
# 3. Each of the two gets the result of ``p v`` from a wait of its own. So that both can, the code
#    copies ``acc``, 64 registers in each thread, and it does so while ``p v`` still runs:
#
# .. image:: /figures/attention-acc-twice.svg
#    :alt: Three timelines of the four instructions of p v. In rung 3, as Triton writes it, the
#          program copies acc while they still write it, and then waits. The assembler makes that
#          safe with a wait after each instruction, and copies acc after the last. In rung 4 there
#          is one acc and no copy, and the program waits once.
#
# ``row_max`` breaks the chain at its first step. The reshape gives the maximum a layout that is no
# matmul's, and the compiler converts ``alpha`` again. To see whether the copy is to blame, we also
# take the intermediate code of rung 3 and delete by hand the second of the two waits:

# Reading
TESTED = {
    "one iteration ahead": "rung 3",
    "one wait": "rung 3, second wait deleted by hand",
    "two-step maximum": "rung 4",
}
lab.table(
    [
        {
            "code": words,
            "registers moved while a matmul runs, at most": seen[name]["copies"],
            "waits": f"{seen[name]['waits']} of {seen[name]['matmuls']}".replace(
                " ", "\N{NO-BREAK SPACE}"
            ),
        }
        for name, words in TESTED.items()
        if name in seen
    ],
    "The copy and the waits, compiled as above",
)

# %%

# Drawing
you_are_here("two-step maximum")

# %%

# Reading
lab.read(
    told("two-step maximum")
    + (
        "Without the copy the waits are gone, even with the old maximum. "
        if seen and seen["one wait"]["waits"] == seen["two-step maximum"]["waits"]
        else ""
    )
    + f"Of {compiled_to('one iteration ahead', 'waits for them')} waits "
    f"{compiled_to('two-step maximum', 'waits for them')} are left"
    + (
        ", one for each `tl.dot`: two in each loop and two outside."
        if compiled_to("two-step maximum", "waits for them") == 6
        else "."
    )
)

# %%
# .. dropdown:: How to see waits, reasons and layouts in a kernel of your own
#
#    ``compiled.asm["sass"]`` is the machine code. A matmul instruction is an ``HGMMA``, and a wait
#    for matmuls a ``WARPGROUP.DEPBAR``. With ``TRITON_DUMP_PTXAS_LOG=1`` in the environment, Triton
#    prints what the assembler, ptxas, says: C7512 is its remark about too few registers, and C7514
#    the one about the accumulator.
#
#    ``compiled.asm["ttgir"]`` is Triton's intermediate code. It names each conversion of a layout,
#    ``ttg.convert_layout``, and each copy by the engine, at the end of the body of a loop. The loop
#    over whole tiles, ``scf.for``, yields two tensors of 128 × 128 in rung 3, and one in the
#    others.
#
#    None of this needs a GPU: the two tables, and the registers without a limit under rung 2, come
#    from code compiled for an H200 when this page was built. The counts at the rungs, of waits,
#    matmul instructions and spills, are those of the recorded run.

# %%
# Rung 5: the scale inside the exponential
# ----------------------------------------
#
# Waits are gone. What else can go? A multiplication per score: so far the kernel multiplies every
# score by the scale, and then subtracts the maximum.
#
# .. code-block:: python
#
#    qk = qk * scale_log2
#    m_new = tl.maximum(m_i, row_max(qk))
#    p = tl.exp2(qk - m_new[:, None])
#
# The scale is positive, so the maximum may be taken before scaling. With :math:`x` for a dot
# product, :math:`c` for the scale times :math:`\log_2 e` (``scale_log2``), and
# :math:`m = c \max x`, a weight is :math:`2^{c x - m}`, whose exponent is one instruction, a fused
# multiply-add:
#
# .. code-block:: python
#
#    m_new = tl.maximum(m_i, row_max(qk) * scale_log2)
#    p = tl.exp2(qk * scale_log2 - m_new[:, None])
#
# .. dropdown:: ``_weigh`` with its flags
#
#    .. literalinclude:: attention_fast.py
#       :language: python
#       :pyobject: _weigh
#       :start-at: if not FOLDED
#       :dedent:

# Drawing
you_are_here("scale folded")

# %%


# Reading
little = max(abs(gain("scale folded", mask)) for mask in ("full", "causal")) < 0.02
lab.read(
    told("scale folded")
    + (
        "One multiplication less per score is worth little, so these instructions are not what "
        "limits the loop."
        if little
        else "So the instructions beside the exponential do slow the loop."
    )
)

# %%
# .. dropdown:: The instructions of one exponential
#
#    The table counts what the compiler makes of one exponential, written in three ways: additions
#    (``FADD``), multiplications (``FMUL``), fused multiply-adds (``FFMA``), and the exponential
#    itself (``MUFU.EX2``). From the first row to the second only the base changes, from the second
#    to the third only the place of the scale.


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

# Folded: The instructions, counted
lab.measure("Instructions for one exponential", instructions)

# %%
# Rung 6: heavy tiles of all heads first
# --------------------------------------
#
# So far we looked at one SM. The last change is the order in which all programs start. In causal
# attention the last queries see the most keys. If they start last, a few heavy programs run on at
# the end while the rest of the GPU has nothing to do.

# %% An animation
# Here the 16 programs of two heads run on three SMs, two at a time on each. Light first and head by
# head, a program of 8 tiles starts when most of the work is done. Heavy first, across both heads,
# the light programs fill the gaps.
#
# .. animation:: light_or_heavy_first

# %%
# So the rung changes two things. ``HEAVY_FIRST`` reverses the order of the ``n_tiles`` tiles of a
# head. And ``place``, which turns the number of a program into a tile of queries and a head, lets
# programs alternate between ``HEADS_AT_ONCE`` heads, because otherwise the heavy tiles of the last
# heads still start late:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _rung_kernel
#    :start-at: n_tiles = tl.cdiv
#    :end-before: start_m = tile
#    :dedent:

# %%

# Folded: A simulation of all programs on an H200


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


rows = []
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
    row["as many heads as run at once"] = f"{at_once} heads: {busy[2]} %"
    row["all heads"] = f"{busy[3]} %"
    if not rows:
        reversal_alone, promised = (x / busy[0] - 1 for x in busy[1:3])
    rows.append(row)

lab.table(
    rows,
    "Share of the slots at work, causal. 132 SMs with two slots each; a slot that is free takes "
    "the next program, whose time is its tiles of keys. The ladder measures the first row",
)

# %%
# .. dropdown:: Which tile of which head a program computes
#
#    All heads at once may have more keys and values than L2 holds, so the programs alternate
#    between only as many heads as fit into half of the cache, a power of two, and without a mask
#    not at all.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: place

# %%

# Reading
short = gain("heavy first", "causal") < promised
you_are_here("heavy first")

# %%

# Reading
lab.read(
    told("heavy first")
    + f"A simulation of this order, with the 64 heads of the ladder, promises "
    f"{100 * promised:.0f} %, and of the reversal alone "
    + ("nothing" if abs(reversal_alone) < 0.01 else f"{100 * reversal_alone:.0f} %")
    + ". "
    + (
        "We measure less, and suspect that a program beside an idle slot runs faster, which the "
        "simulation leaves out."
        if short
        else ""
    )
)

# %%
# Each change taken back
# ----------------------

# Reading
last = list(LADDER)[-1]
raised = {
    mask: steps.rate(last, mask=mask) / steps.rate("in stages", mask=mask) - 1
    for mask in ("causal", "full")
}
above = steps.rate(last, mask="full") > from_hbm
lab.read(
    f"Together, the six changes raise the speed by {100 * raised['causal']:.0f} % with the causal "
    f"mask, and by {100 * raised['full']:.0f} % without. We call the last rung the **finished "
    f"kernel**. "
    + (
        f"Without a mask it reaches {steps.rate(last, mask='full'):.0f} TFLOP/s. This is more than "
        f"the {from_hbm:.0f} that HBM alone would allow, so L2 does serve some of the loads."
        if above
        else ""
    )
)

# %%
# But was rung 1 really worth nothing?
# So we also take each change back by itself, from the finished kernel. The last two columns count
# what its code then spills, and in how many of its matmul instructions it waits (causal):


# Measuring
rows = []
for name in list(LADDER)[1:]:
    version = f"without {name}" if name != last else list(LADDER)[-2]
    changes = {"when made, causal": gain(name, "causal")}
    for mask in ("causal", "full"):
        changes[f"taken back, {mask}"] = (
            steps.rate(version, mask=mask) / steps.rate(last, mask=mask) - 1
        )
    row = {"change": name} | {
        what: "—" if abs(x) < CHANCE else f"{100 * x:+.0f} %".replace("-", "−")
        for what, x in changes.items()
    }
    row["spills then"] = compiled_to(version, "spills")
    waits, matmuls = (
        compiled_to(version, what) for what in ("waits for them", "matmul instructions")
    )
    row["waits then"] = f"{waits} of {matmuls}"
    rows.append(row)
if steps.provenance is None or not made:
    rows = []
lab.table(
    rows, "Each change when made, and taken back from the finished kernel (—: same)"
)

# %%

# Reading
worth = {
    name: 1
    - steps.rate(f"without {name}", mask="causal") / steps.rate(last, mask="causal")
    for name in list(LADDER)[1:-1]
}
most = max(worth, key=worth.get)
alone = "two programs"


lab.read(
    f"The finished kernel loses most, {100 * worth[most]:.0f} % with a causal mask, without "
    f"“{most}”"
    + (
        ", the change that seemed worth nothing. "
        if most == alone and abs(gain(alone, "causal")) < CHANCE
        else ". "
    )
    + (
        "At its rung the second program had to fill gaps that its own register limit had opened. "
        "Now each `tl.dot` runs without gaps, but a program still waits for the end of its own "
        "before it computes exponentials. So only the other program can use the tensor cores "
        "meanwhile. "
        if most == alone and compiled_to(last, "waits for them") == 6
        else ""
    )
)

# %%

# Reading
crowded = compiled_to("without descriptors", "spills") > compiled_to(
    "two programs", "spills"
)
scarce = compiled_to("without one iteration ahead", "waits for them") == compiled_to(
    "without one iteration ahead", "matmul instructions"
)
lab.read(
    f"Two more changes are worth more than the ladder showed. Without descriptors, addresses "
    f"take registers again, and {compiled_to('without descriptors', 'spills')} values spill. "
    f"Without scores ahead, `p v` of one tile still runs when `q kᵀ` of the next begins, so "
    f"weights and scores need registers at the same time, and the code waits "
    f"{waits_of('without one iteration ahead')}."
    if crowded
    and scarce
    and all(
        worth[name] > gain(name, "causal")
        for name in ("descriptors", "one iteration ahead")
    )
    else f"Without descriptors the code has {compiled_to('without descriptors', 'spills')} "
    f"spills, and without scores ahead it waits {waits_of('without one iteration ahead')}."
)

# %%

# Folded: The two changes of rung 1 in the finished kernel
TIMED = {
    "both": ("finished", list(LADDER)[-1]),
    "two pipeline stages alone": (
        "finished, two stages alone",
        "without register limit",
    ),
    "register limit alone": ("finished, register limit alone", "without two stages"),
    "none": ("finished, neither", "without two programs"),
}
lab.table(
    [
        row
        | {
            f"{mask}, TFLOP/s": f"{steps.rate(TIMED[row['change']][1], mask=mask):.0f}"
            for mask in ("causal", "full")
        }
        for row in by_half({name: half.get(of) for name, (of, _) in TIMED.items()})
    ],
    "The finished kernel with one or both halves of rung 1, causal",
)

# %%

# Reading
by_stages, by_limit, by_both, by_none = (
    steps.rate(TIMED[x][1], mask="causal")
    for x in ("two pipeline stages alone", "register limit alone", "both", "none")
)
unasked = half.get("finished, two stages alone", {}).get("registers", nan)
lab.read(
    f"Of the two halves of rung 1, the finished kernel needs the two stages alone. The limit has "
    f"become idle: left to itself, the compiler takes {unasked} registers, where the start took "
    f"{compiled_to('in stages', 'registers')}."
    if abs(by_stages / by_both - 1) < CHANCE
    and abs(by_limit / by_none - 1) < CHANCE
    and unasked <= 128
    else f"With a causal mask the finished kernel reaches {by_stages:.0f} TFLOP/s with two stages "
    f"alone, {by_both:.0f} with both, and {by_limit:.0f} with the limit alone."
)

# %%
# The kernel of the package
# -------------------------
#
# The package's kernel has this loop with every flag on. It also takes any head_dim up to 256,
# windows, grouped heads and strides, and writes :term:`lse <logsumexp>` for the backward pass.
#
# .. dropdown:: Grouped heads, strides, sizes of tiles, and how it writes ``out`` and ``lse``
#
#    Several query heads may share one head of keys and values. If :math:`g` of them share one,
#    query head :math:`h` reads head :math:`h / g` of the keys, rounded down, which is
#    ``head // group`` in the kernel. Nothing is copied.
#
#    A model often keeps its tensors as (batch, length, heads, head_dim) and passes a transposed
#    view. A descriptor takes any strides, as long as the last dimension is contiguous and the
#    others are multiples of 16 bytes. Any other view is copied first.
#
#    With more queries in a tile, keys and values are read less often, but a larger tile needs more
#    registers and more shared memory. We tuned this once, and the package keeps the winners in a
#    table.
#
#    ``m_i`` is in base 2, so a factor :math:`\ln 2` turns it into a natural logarithm. Row numbers
#    are 64 bits wide, because ``out`` may have more than :math:`2^{31}` elements.
#    ``sum_of_weights`` returns ``l_i``, or NaN where a query sees keys and all their scores are
#    :math:`-\infty`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attention_fwd_kernel
#       :start-at: # -- write
#       :dedent:

# %%

# Folded: Tile sizes on Hopper
rows = []
for (kernel, head_dim, itemsize), config in tuned.HOPPER.items():
    if kernel != "forward":
        continue
    row = {"head_dim up to": head_dim, "bits per element": 8 * itemsize}
    row |= {"queries per tile": config.block_m, "keys per tile": config.block_n}
    row |= {"warps": config.num_warps, "pipeline stages": config.num_stages}
    row |= {"register limit": config.maxnreg or 255}
    rows.append(row | {"shared memory, bytes": f"{config.shared:,}"})
lab.table(rows, "Tile sizes, warps and pipeline stages on Hopper")

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
# A kernel like this goes wrong first at sizes that no tile divides, such as lengths of 1, 127 and
# 1,000, or head_dim 80. So the check compares these with float64.
#
# .. dropdown:: How much error is allowed, and what the name of an input lists
#
#    In 16 bits the error may be twice PyTorch's, or one unit in the last place, and in float32
#    eight times, because each multiplication by ``alpha`` adds a rounding. The name of an input
#    lists batch, heads, heads of keys, queries, keys and head_dim. A *transposed* input is a view
#    of tensors with the length before the heads.


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

# Folded: Relations that must be true for any input, all of which hold
lab.table(
    [{"property": name, "holds": holds} for name, holds in properties.items()],
    "Properties",
)

# %%
# How fast is it?
# ---------------
#
# The best libraries are still faster than the kernel in plain Triton. FlexAttention, *SDPA flash*
# (FlashAttention-2) and *SDPA cuDNN* (NVIDIA's) come with PyTorch; *FlashAttention* is
# FlashAttention 4, which also runs on Hopper. Every point has 16,384 tokens in all.

# Measuring
LENGTHS = [1024, 4096, 16384]


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    q, k, v = draw(batch, heads, seqlen, head_dim, dtype)
    is_causal = mask == "causal"
    ours = {"Kernel Book": lambda: attention(q, k, v, is_causal=is_causal)}
    return {"matmul": matmul()} | libraries((q, k, v), is_causal) | ours


speed = lab.bench("forward", points(LENGTHS), providers, **FORWARD)
lab.plot(speed, "head_dim 128, full", where={"head_dim": 128, "mask": "full"})

# %%

lab.plot(speed, "head_dim 128, causal", where={"head_dim": 128, "mask": "causal"})

# %%

# Folded: The same at head_dim 64
lab.plot(speed, "head_dim 64, full", where={"head_dim": 64, "mask": "full"})
lab.plot(speed, "head_dim 64, causal", where={"head_dim": 64, "mask": "causal"})

# %%

# Folded: All points, and the libraries that are faster


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

lab.table(
    at_points if speed.rows else [],
    "The plain Triton kernel, and the libraries that are faster by more than 1 %",
)

# %%


# Reading
def gaps(name):
    """By how many percent a library is ahead, at the points where it is."""
    found = []
    for point in points(LENGTHS, (128, 64)):
        where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
        ahead = dict(ahead_of_ours(**where))
        if name in ahead:
            share = ahead[name] / speed.rate("Kernel Book", **where) - 1
            found.append(100 * share)
    return found


def told_of(name):
    """Where a library is ahead, in words."""
    if name in speed.skipped:
        return f"{name} is absent from this run; the notes under the figures say why. "
    found = gaps(name)
    if not found:
        return f"{name} is faster at none. "
    return f"{name} is faster at {len(found)}, by up to {max(found):.0f} %. "


beaten = sum(row["faster libraries"] != "none" for row in at_points)

lab.read(
    f"Of all {len(at_points)} points a library is faster by more than "
    f"1 % at {beaten}. "
    + "".join(told_of(name) for name in ("FlashAttention", "SDPA cuDNN"))
    if speed.rows
    else f"{speed.rate('Kernel Book')}"
)

# %%

# Folded: Why short lengths are further from the matmul


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
lab.read(
    f"What happens once per program, such as loading the queries, weighs more there: two estimates "
    f"put it at {once[0]:.0f} and {once[1]:.0f} % of our kernel's time at length 1,024 without a "
    f"mask. For them we assume that the time of a program is a constant plus a time for each tile "
    f"of keys. All three lengths have the same number of programs, so any two of their times, at "
    f"head_dim 128 without a mask, give both parts. From 1,024 and 16,384 the constant is as long "
    f"as {own[0]:.1f} tiles of 64 keys, and from 1,024 and 4,096 as {own[1]:.1f}. The two differ, "
    f"so the assumption holds only roughly. For {best}, the fastest library at 1,024, they are "
    f"{beside[0]:.1f} and {beside[1]:.1f}. With a causal mask the kernel also discards half of "
    f"each tile on the diagonal, at length 1,024 an eighth more work."
)

# %%


# Measuring
def launch(head_dim, dtype):
    q, k, v = draw(1, 4, 1024, head_dim, dtype)
    return lambda: attention(q, k, v, is_causal=True)


# %%

# Folded: What the compiler made of the kernel in each dtype
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

# Folded: Time per call
small = lab.measure("Time per call, back to back, 16 heads, head_dim 128", small_inputs)
small

# %%

# Reading
first, second, last_one = (
    (small.rows[0], small.rows[1], small.rows[-1]) if small.rows else ({}, {}, {})
)


def beside_sdpa(row):
    """How long a call takes beside PyTorch's, in words."""
    ratio = row.get("Kernel Book, µs", nan) / row.get("SDPA, µs", nan)
    if abs(ratio - 1) < 0.05:
        return "about as long as PyTorch's"
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % less than PyTorch's"
    if ratio < 2:
        return f"{100 * (ratio - 1):.0f} % longer than PyTorch's"
    return f"{ratio:.1f} times as long as PyTorch's"


outlasts = last_one.get("Kernel Book, µs", nan) > 1.3 * first.get(
    "Kernel Book, µs", nan
)
lab.read(
    f"**Small inputs.** At length {first.get('length', nan):,} with 16 heads a call takes "
    f"{first.get('Kernel Book, µs', nan):.0f} µs, {beside_sdpa(first)}"
    + (
        f". At {second.get('length', nan):,} it takes about as long as at "
        f"{first.get('length', nan):,}, so the host code sets the time."
        if abs(
            second.get("Kernel Book, µs", nan) / first.get("Kernel Book, µs", nan) - 1
        )
        < 0.05
        else "."
    )
    + (
        f" At {last_one.get('length', nan):,} the kernel outlasts the host code, and a call takes "
        f"{last_one.get('Kernel Book, µs', nan):.0f} µs, {beside_sdpa(last_one)}."
        if outlasts
        else ""
    )
)

# %%
# What keeps it below a matmul
# ----------------------------
#
# We began with a count of how far a kernel comes that takes turns. Where do ours stand?

# Reading
four = {"mask": "full", "seqlen": 4096}
finished = steps.share(last, mask="full")
stand = {
    "the start": (128, steps.share("in stages", mask="full")),
    "finished, without two programs": (
        128,
        steps.share("without two programs", mask="full"),
    ),
    "finished": (128, finished),
    "the package's": (64, speed.share("Kernel Book", head_dim=64, **four)),
}
lab.table(
    [
        {
            "kernel": name,
            "head_dim": head_dim,
            "programs on an SM": 1 if name in list(stand)[:2] else 2,
            "taking turns, at most": f"{bound_of_turns(head_dim):.0f} %",
            "measured": f"{100 * share:.0f} %",
        }
        for name, (head_dim, share) in stand.items()
    ]
    if steps.rows and speed.rows
    else [],
    "Percent of a matmul at length 4,096 without a mask, counted and measured",
)

# %%

# Reading


def hidden(head_dim, share):
    """How much of the time of the exponentials at least passes while a matmul runs, in percent."""
    exponentials = (
        100 / bound_of_turns(head_dim) - 1
    )  # in units of the time of the matmuls
    return 100 * (1 + exponentials - 1 / share) / exponentials


both = [hidden(*stand[name]) for name in ("finished", "the package's")]
below = all(100 * stand[x][1] < bound_of_turns(128) for x in list(stand)[:2])
lab.read(
    (
        "With one program on an SM a kernel stays below the count, as it must. With two it goes "
        "beyond, so exponentials do run while matmuls do: "
        if below and min(both) > 0
        else "By the same count, of the exponentials' time there is hidden behind matmuls: "
    )
    + f"at least {both[0]:.0f} % of their time at head_dim 128, and {both[1]:.0f} % at 64. (The "
    f"count takes a matmul as tensor cores that never idle, and all kernels at one clock.)"
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
    "What is left? Nothing keeps the two programs in step: whenever both compute exponentials, the "
    "tensor cores idle."
    + (
        f" There is a kernel that overlaps them by design: its warps have roles, so that one half "
        f"computes exponentials while the other half's matmul runs. With that and other changes, "
        f"and in a run of its own, it takes this attention from {100 * roles[0]:.0f} to "
        f"{100 * roles[1]:.0f} % of a matmul."
        if roles and roles[1] > roles[0]
        else ""
    )
)

# %%
# It cannot be written in plain Triton. :doc:`/chapters/attention_hopper` builds it.

# %%
# What breaks it
# --------------
#
# **A descriptor that flattens the heads.** All heads lie one after the other in memory. If a
# descriptor presents them as one matrix of (batch · heads · length) rows, the copy engine does not
# know where a head ends. In this example with two heads of 20 rows, and tiles of 16, one program
# copies the last tile of the *first* head, times ten:

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
lab.table(rows, "Rows that the program of head 0 wrote")

# %%
# The program wrote 12 rows of the wrong head. The program of that head writes them, too, and
# whichever finishes last wins. Where the length is a multiple of the tile, nothing goes wrong,
# which is why such a kernel passes many tests.

# %%

# Folded: Why reading past the end of a head is not harmless either
v = torch.zeros(32, 16)
v[20:] = torch.inf  # the first rows of the next head
weights = torch.zeros(1, 32)
weights[:, :20] = 1 / 20
found = (weights @ v)[0, 0].item()
lab.read(
    f"With 20 values of 0, and 12 infinite ones of the next head at weight zero, the sum is "
    f"{str(found).replace('nan', 'NaN')}, because zero times infinity is."
)

# %%


# Measuring
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

# Folded: Too much shared memory
said = " ".join(row["what the launch says"] for row in refused.rows) or f"{nan}"
sizes = re.search(r"Required: (\d+), Hardware limit: (\d+)", said)
lab.read(
    f"Every pipeline stage has its own tile of keys and of values. With 5 of 128 keys, the kernel "
    f"would need {int(sizes[1]):,} bytes, and a program may have {int(sizes[2]):,}. The launch "
    f"raises `{said.split(':')[0]}`, so the package takes the first configuration that fits."
    if sizes
    else said
)

# %%

# Folded: What the package says on a made-up device that has only 8 KiB
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
# .. dropdown:: A third trap: an address that the compiler cannot prove aligned
#
#    A thread may load 16 bytes at once only if the compiler knows that their address is aligned.
#    Here it starts at a number unknown at compile time: ``tl.multiple_of`` promises what the
#    compiler cannot prove. With a descriptor no promise is needed.


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
            {"tl.multiple_of": kind, "loads per thread": len(words), "kind": words[0]}
        )
    return rows


# %%

# Folded: The loads with and without the promise
lab.measure("Loads of eight 16-bit elements per thread", widths)

# %%
# In short
# --------
#
# Between its matmuls attention needs time for exponentials, in which the tensor cores should not
# idle. One program takes turns; a second one on the same SM fills its pauses. For that to pay, a
# program has to hand its matmuls over whole, and wait once for each. This takes registers: tiles
# that the copy engine brings, scores computed one iteration ahead, and a maximum in two steps all
# keep other things off the registers of a matmul. Without these four changes the finished kernel
# loses most.
#
# :doc:`/chapters/attention_backward` turns to the gradient, and
# :doc:`/chapters/attention_in_models` to a single query, whose keys it splits among programs.
#
# Exercises
# ---------
#
# **1. How many programs fit?** Which tiles of 64, 128 or 256 keys, and how many pipeline stages,
# leave room on an SM for two programs of 128 queries at head_dim 128 in 16 bits, by shared memory
# alone?

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
# **2. A soft cap.** Some models bound their scores: a score :math:`s` becomes
# :math:`b \tanh(s / b)` before the mask. Write the lines of ``_weigh`` for it, in PyTorch if you
# like. How much of rung 5 is left?

# %%

# Solution: a soft cap
#
# tanh rises with its argument, so the maximum may still be taken of the raw dot products. Their
# scale is now inside tanh and takes a multiplication again. But the factor b log2(e) outside is
# joined with the subtraction of the maximum in one fused multiply-add, as the scale was.
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
