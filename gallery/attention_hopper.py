"""
Forward at the speed of Hopper
==============================

Attention needs matmuls and exponentials, and a kernel that waits for one kind easily leaves the
units for the other idle. *Which loop keeps the matmul units at work, and what is each change to it
worth?*

Picture two cooks who share one oven. The oven stays in use only if one cook prepares while the
other bakes, or if each prepares his next dish while his last one bakes. The matmul units are our
oven, and the exponentials are the preparation.

We climb a ladder of six versions. The second pays, but not for the reason we expected. Even our
best kernel loses to a library in most of our comparisons.

You will learn

- how to order a loop so that its matmul units wait less;
- how to check, in the machine code (:term:`SASS`) and on a timeline of the :term:`SM`, whether a
  kernel does what you planned;
- how to decide when such a kernel is worth writing.

The kernels are written in :term:`Gluon`, Triton's lower-level language, and need a Hopper GPU
(H100, H200). On any other machine, this page checks the order of the loop in PyTorch and replays a
recorded run.
"""

# sphinx_gallery_thumbnail_number = 1
import inspect
import re
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from types import FunctionType

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from kernelbook import attention, lab, reference, runtime
from kernelbook.lab.attention_bench import (
    FORWARD,
    draw,
    flash,
    matmul,
    points,
    sdpa,
)
from kernelbook.lab.display import Markdown, show
from kernelbook.lab.figures import MUTED
from kernelbook.ops.attention import forward as plain_triton
from kernelbook.ops.attention import tuned
from kernelbook.ops.attention.tiles import LOG2E, LOWEST, place
from kernelbook.ops.hopper import choice
from kernelbook.ops.hopper import forward as hopper
from kernelbook.ops.hopper.forward import (
    ROWS,
    exp2,
    mask_row_ends,
    pass_turn,
    sum_in_thread,
    wait_for_turn,
)
from kernelbook.ops.hopper.parts import tma_load, tma_store

nan = float("nan")
lab.start(
    "attention_hopper",
    "kernelbook.ops.attention",
    "kernelbook.ops.hopper.forward",
    here=runtime.capability(runtime.DEVICE) == (9, 0),
)

# %%
# Two kinds of work
# -----------------

# Reading
MATMUL_RATE, EXPONENTIAL_RATE = 4096, 16  # operations of an SM per cycle


def cycles(head_dim, rows=128, keys=128):
    """Cycles that the matmuls and the exponentials of one tile take at the full rate."""
    scores = rows * keys
    return scores * 4 * head_dim / MATMUL_RATE, scores / EXPONENTIAL_RATE


matmuls, exponentials = cycles(128)
assert 3 * exponentials == matmuls + exponentials  # "a third" below
lab.read(
    "At head_dim 128, a tile of 128 queries and 128 keys takes "
    f"{matmuls:,.0f} cycles of matmuls and {exponentials:,.0f} of exponentials, which other units "
    "of the SM compute. If the two never overlapped, the matmul units would be idle for at least a "
    "third of the time."
)

# %%

# Folded: How these cycles are counted
lab.read(
    "For each score, the two matmuls need 4 operations per element of head_dim, and the softmax "
    f"one exponential. Per cycle, a Hopper SM performs {MATMUL_RATE:,} matmul operations in 16 "
    f"bits, but only {EXPONENTIAL_RATE} exponentials. The 128 × 128 scores of a tile therefore "
    f"take 128 × 128 × 4 × 128 / {MATMUL_RATE:,} = {matmuls:,.0f} cycles of matmuls and 128 × 128 "
    f"/ {EXPONENTIAL_RATE} = {exponentials:,.0f} of exponentials. A softmax needs more than its "
    "exponentials, so a third is the least share of idle time."
)

# %%
# The kernel of :doc:`/chapters/attention_fast`, here called *plain Triton*, puts two
# :term:`programs <program>` on an SM, so that one can use the :term:`matmul units <matrix unit>`
# while the other computes exponentials. Whether they alternate, we cannot decide in plain Triton.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Give each warp a role, and let every consumer issue two matmuls together: the scores of one
#    tile and the weighted sum of the tile before. A consumer then visits the matmul units once per
#    tile instead of twice.
#
# The roles come from :doc:`/chapters/warps_with_roles`. A *loader* :term:`warp` fills two rings,
# one with tiles of keys and one with tiles of values. Two *consumers* do the arithmetic; each is a
# :term:`warpgroup` with 64 queries of its own. Each slot of a ring has a ``full`` and an ``empty``
# :term:`barrier <mbarrier>`.

# %%
# The order of the loop
# ---------------------
#
# On Hopper, a warpgroup *issues* a matmul and *waits* for its result later. The exponentials of a
# tile need its scores, but the weighted sum of the tile *before* needs nothing from this tile. The
# scores can therefore run one tile ahead: iteration :math:`i`
#
# 1. issues the scores :math:`s_i = q k_i^T`, and right behind them the sum, which adds
#    :math:`p_{i-1} v_{i-1}` to ``acc``;
# 2. waits only for the scores, and *weighs* them while the sum runs: it finds the new maximum
#    :math:`m_i` and computes :math:`\alpha = e^{m_{i-1} - m_i}` and :math:`p_i = e^{s_i - m_i}`;
# 3. waits for the sum, and multiplies ``acc`` by :math:`\alpha`.
#
# Is this the only way to keep the oven in use? At full rates, with 64 queries per consumer, there
# are two:


# Drawing
def drawn_loops(axes):
    half, exponentials = cycles(128, rows=64)[0] / 2, cycles(128, rows=64)[1]
    shown = 2.45 * (2 * half + exponentials)
    first, second = "matmul", "PyTorch"
    # (title, period of a tile, [(ink, start of its scores, exponentials and sum, tiles behind)])
    orders = (
        (
            "in order, one consumer alone",
            2 * half + exponentials,
            [(first, 0, half, half + exponentials, 0)],
        ),
        (
            "in order, two consumers (grey, orange) that alternate",
            4 * half,
            [(first, 0, half, 3 * half, 0), (second, 2 * half, 3 * half, 5 * half, 0)],
        ),
        ("scores one tile ahead, one consumer alone", 2 * half, [(first, 0, half, half, 1)]),
    )
    ticks, names, white = [], [], {"ha": "center", "va": "center", "color": "white"}
    for row, (title, period, consumers) in enumerate(orders):
        top = 3.1 * row
        axes.text(30, top - 0.67, title, fontsize=10, color=MUTED, va="center")
        ticks += [top, top + 0.9]
        names += ["matmul units", "exponentials"]
        for ink, of_scores, weighs, of_sum, behind in consumers:
            for i in range(5):
                for lane, start, width, colour, label in (
                    (0, of_scores, half, ink, f"$s_{i}$"),
                    (0, of_sum, half, ink, f"$p_{i - behind}\\,v_{i - behind}$"),
                    (0.9, weighs, exponentials, "Kernel Book", f"$p_{i}$"),
                ):
                    left = max(i * period + start, 0)
                    right = min(i * period + start + width, shown)
                    if right <= left or "-1" in label:
                        continue
                    axes.barh(
                        top + lane, right - left, 0.8, left, color=lab.colour(colour),
                        edgecolor="white",
                    )  # fmt: skip
                    if right - left == width:
                        axes.text((left + right) / 2, top + lane, label, fontsize=11, **white)
    axes.set_yticks(ticks, names, fontsize=10)
    axes.set(xlim=(0, shown), ylim=(7.6, -1.1), xlabel="cycles of an SM")
    axes.grid(False)


lab.sketch(
    "Two ways to keep the matmul units in use",
    "Bars over time. One consumer in order: the scores of a tile, its exponentials and its sum "
    "follow each other, 512 cycles each, so the units are idle for a third of the time. Two "
    "consumers that alternate: the matmuls of one run while the other is at its exponentials, and "
    "the units are idle only at the start. One consumer with its scores one tile ahead: the sum of "
    "the tile before runs during the exponentials of this one, with the same result.",
    drawn_loops,
    height=4.4,
)

# %%
# A second consumer (orange) can fill the gap, or the consumer's own sum of the tile before. The
# kernel has two consumers anyway, so what the second way adds to the first must be measured.
#
# In PyTorch, where ``seen`` is the mask, the loop begins with the last tile of keys, so that the
# tiles that a causal mask cuts come first:
#
# .. literalinclude:: attention_hopper.py
#    :language: python
#    :pyobject: one_tile_ahead
#    :start-at: # finite: starting
#    :dedent:


# Measuring
def one_tile_ahead(q, k, v, scale, is_causal=False, block_n=32):
    """Attention in the order of the kernel's loop, from the last tile of keys to the first."""
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    seen = seen.tril(n_k - n_q) if is_causal else seen
    # finite: starting at -inf, a fully masked tile would give nan
    m_i = torch.full_like(q[..., :1], torch.finfo(q.dtype).min)
    l_i, acc = torch.zeros_like(m_i), torch.zeros_like(q)
    p = v_before = None
    for start in reversed(range(0, n_k, block_n)):
        tile = slice(start, start + block_n)
        # -- issue: the scores of this tile, and the sum of the one before
        s = q @ k[:, :, tile].mT * scale
        s = s.masked_fill(~seen[:, tile], -torch.inf)
        if p is not None:
            acc = acc + p @ v_before
        # -- weigh: while the sum is computed
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        alpha = (m_i - m_new).exp()
        p, v_before = (s - m_new).exp(), v[:, :, tile]
        l_i, m_i = l_i * alpha + p.sum(-1, keepdim=True), m_new
        # -- rescale: the sum, when it is there
        acc = acc * alpha
    acc = acc + p @ v_before
    return acc / l_i.clamp_min(torch.finfo(q.dtype).tiny)


def drawn(sizes, dtype):
    """Random q, k and v of (batch, heads, heads of keys, queries, keys, head_dim)."""
    batch, heads, heads_k, n_q, n_k, head_dim = sizes
    return draw(batch, heads, n_q, head_dim, dtype, heads_k=heads_k, seqlen_k=n_k)


def by_pytorch(q, k, v, is_causal, window=None):
    """PyTorch's attention in the dtype of q, with the mask that the book's truth has."""
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    at = torch.arange(n_q, device=q.device)[:, None] + n_k - n_q
    j = torch.arange(n_k, device=q.device)
    mask = (j <= at) if is_causal else torch.ones_like(j <= at)
    if window is not None:
        mask = mask & (j >= at - window[0]) & (j <= at + window[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)


def cases_in_pytorch():
    for sizes in (
        (1, 2, 2, 100, 100, 64),
        (1, 4, 2, 65, 127, 128),
        (1, 2, 1, 1, 300, 64),
    ):
        for is_causal in (False, True):
            q, k, v = drawn(sizes, torch.float32)
            ours = one_tile_ahead(q, k, v, sizes[-1] ** -0.5, is_causal)
            truth, _ = reference.attention(q, k, v, is_causal)
            theirs = by_pytorch(q, k, v, is_causal)
            what = f"{sizes}{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor=8)


def with_mistake(q, k, v, mistake):
    m_i, l_i, acc, summed = torch.full_like(q[..., :1], -torch.inf), 0, 0, 0
    for k_tile, v_tile in zip(k.split(32, 2), v.split(32, 2), strict=True):
        s = q @ k_tile.mT * 64**-0.5
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        alpha = (m_i - m_new).exp()
        right, early = (acc + summed) * alpha, acc * alpha + summed
        acc = early if mistake == "rescale too early" else right
        p, m_i = (s - m_new).exp(), m_new
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        summed = p @ v_tile  # arrives one tile later
    return (acc if mistake == "forget the end" else acc + summed) / l_i


rows, errors = [], {}
q, k, v = drawn((1, 2, 2, 64, 256, 64), torch.float32)
truth, _ = reference.attention(q, k, v)
WRITTEN = {
    "none": "",
    "rescale too early": "acc = acc * alpha + p @ v_before",
    "forget the end": "return acc / l_i",
}
for mistake, written in WRITTEN.items():
    error = (with_mistake(q, k, v, mistake) - truth).norm() / truth.norm()
    errors[mistake] = error.item()
    rows.append(
        {"mistake": mistake, "as written": written, "error": f"{error.item():.1e}"}
    )
assert [error > 1e-2 for error in errors.values()] == [False, True, True]

# %%

# Reading
of_mistakes = [errors[mistake] for mistake in list(WRITTEN)[1:]]
size = (
    "about half its size"
    if all(0.4 < error < 0.6 for error in of_mistakes)
    else f"{min(of_mistakes):.2f} to {max(of_mistakes):.2f} of its size"
)
lab.read(
    "**What breaks it.** Two mistakes raise no error, and each makes the result wrong by "
    f"{size}. To rescale `acc` as soon as alpha is known, with `acc * alpha + p @ v_before`, looks "
    "natural; but `p` was weighed with the old maximum, so its sum needs alpha, too. And without "
    "the line after the loop, the sum of the last tile is missing."
)

# %%

# Folded: The loop and its mistakes, checked in PyTorch against float64
mistaken = lab.table(rows, "Error of the whole, relative to its size")
in_order_of_kernel = lab.check(
    "The order of the loop, in PyTorch", cases_in_pytorch(), stand_in="on the CPU"
)
lab.together(in_order_of_kernel, mistaken)

# %%
# The loop in Gluon
# -----------------
#
# In Gluon the steps are the same, and ``i`` counts tiles from the last one backwards. First the
# loop issues both matmuls, each once its operand is in shared memory:
#
# .. code-block:: python
#
#    for i in range(first, end):
#        slot, before = i % STAGES, (i - 1) % STAGES
#        mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
#        s = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
#        k = k_s.index(slot).permute([1, 0])
#        s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
#        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
#        acc = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
#
# Then it weighs, and afterwards waits for the sum. The new weights need a name of their own,
# because the sum may still be reading ``p``:
#
# .. code-block:: python
#
#        # -- weigh: as soon as the scores are there, while the sum is computed
#        s = warpgroup_mma_wait(1, deps=[s])
#        mbarrier.arrive(k_empty.index(slot))
#        m_new = gl.maximum(m_i, gl.max(s, 1) * scale_log2)
#        alpha = exp2(m_i - m_new)
#        weights = exp2(s * scale_log2 - m_new[:, None])
#        l_i, m_i = l_i * alpha + gl.sum(weights, 1), m_new
#        # -- rescale: the sum, when it is there
#        acc = warpgroup_mma_wait(0, deps=[acc])
#        mbarrier.arrive(v_empty.index(before))
#        acc = acc * gl.convert_layout(alpha, row)[:, None]
#        p = gl.convert_layout(weights.to(q.dtype), p.type.layout)
#
# Matmuls finish in the order of their issue. When ``warpgroup_mma_wait(1)`` waits until only one is
# under way, it waits for the *older* one, the scores. Because the scores run ahead, the first
# scores and the last sum stand outside the loop, and the loader must request keys one tile ahead of
# values.
#
# .. dropdown:: The loader, the first scores and the last sum, in Gluon
#
#    ``q`` holds the ``ROWS`` = 64 queries of this consumer; ``k_s`` and ``v_s`` are the rings, of
#    ``STAGES`` = 2 slots with ``BLOCK_N`` = 128 keys or values each. All of them are in shared
#    memory. ``.index(slot)`` selects one slot, or its barrier in ``k_full``, and ``permute``
#    transposes a tile. ``mbarrier.wait`` takes a parity, ``(i // STAGES) & 1``, which flips each
#    time the ring has gone round once. ``mbarrier.arrive`` gives a slot back to the loader.
#
#    The scores ``s``, the sum so far ``acc`` and the weights ``p`` are in registers. ``gl.zeros``
#    only declares what ``s`` looks like, because ``use_acc=False`` overwrites it. The weights are
#    powers of 2 instead of :math:`e`, which makes ``scale_log2`` the scale times :math:`\log_2 e`.
#    With a causal mask, the scores of later keys are first set to ``-inf``. A layout says which
#    thread holds which element; ``row`` is the layout of one number per query. ``convert_layout``
#    gives ``alpha`` the layout of the rows of ``acc``, and the weights the layout of a matmul's
#    left operand. ``first`` and ``end`` bound the tiles that the loop visits.
#
#    The loader fills the rings, beginning with the last tile of keys (``of_head`` is the first row
#    of the head):
#
#    .. literalinclude:: attention_hopper.py
#       :language: python
#       :pyobject: _loader
#       :start-at: for i in range(n + 1)
#       :lines: 1-7
#       :dedent:
#
#    In the same iteration it loads the values of tile :math:`i - 1` in the same way. Before and
#    after the loop, a consumer does this:
#
#    .. code-block:: python
#
#       mbarrier.wait(q_full.index(ME), 0)  # this consumer's queries
#       # -- begin: the scores of the tile that has none before it
#       mbarrier.wait(k_full.index(0), 0)
#       k = k_s.index(0).permute([1, 0])
#       s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
#       s = warpgroup_mma_wait(0, deps=[s])
#       mbarrier.arrive(k_empty.index(0))
#       ...  # weigh them, then run the loop for i = 1 to n - 1
#       # -- end: the sum of the last tile
#       slot = (n - 1) % STAGES
#       mbarrier.wait(v_full.index(slot), ((n - 1) // STAGES) & 1)
#       acc = warpgroup_mma(p, v_s.index(slot), acc, is_async=True)
#       acc = warpgroup_mma_wait(0, deps=[acc])
#       # -- write: where the queries were, and from there to the output
#       q.store((acc * gl.convert_layout(1 / l_i, row)[:, None]).to(q.dtype))
#       fence_async_shared()
#       tma_store(out_desc, [of_head + start_m, 0], q)
#       tma.store_wait(0)

# %%
# A ladder of six rungs
# ---------------------
#
# One kernel runs every rung, and each rung after the first turns on one more switch:
#
# 1. *two roles*: a loader, and two consumers that do one thing after the other;
# 2. *scores ahead*: the loop above;
# 3. *order kept*: a branch makes the machine code keep the order of that loop;
# 4. *one loop* for masked tiles and the rest;
# 5. *row sums in threads*: each thread adds up its part of :math:`l_i`;
# 6. *turns*: the consumers take turns at the matmul units.

# Whole: rungs 1 to 6
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

EVENTS = gl.constexpr(6)


@gluon.jit
def _stamp(trace_ptr, role, i, event, n, TRACE: gl.constexpr):
    """Note the cycle of the SM at which a role of program 0 came to an event."""
    if TRACE:
        now = gl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        first = gl.program_id(0) == 0
        gl.store(trace_ptr + (role * n + i) * EVENTS + event, now, mask=first)


@gluon.jit
def _loader(
    loading, n, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TRACE: gl.constexpr
):
    descs, buffers, barriers, of_head, start_m, trace_ptr = loading
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    for g in gl.static_range(2):
        mbarrier.expect(q_full.index(g), q_desc.block_type.nbytes)
        tma_load(
            q_desc, [of_head + start_m + g * ROWS, 0], q_full.index(g), q_s.index(g)
        )
    for i in range(n + 1):  # keys one tile ahead of values
        if i < n:
            slot, parity = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), parity ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            start_n = of_head + (n - 1 - i) * BLOCK_N
            tma_load(k_desc, [start_n, 0], k_full.index(slot), k_s.index(slot))
            _stamp(trace_ptr, 2, i, 0, n, TRACE)
        if i > 0:
            slot, parity = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
            mbarrier.wait(v_empty.index(slot), parity ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            start_n = of_head + (n - i) * BLOCK_N
            tma_load(v_desc, [start_n, 0], v_full.index(slot), v_s.index(slot))
            _stamp(trace_ptr, 2, i - 1, 1, n, TRACE)


@gluon.jit
def _weigh(s, l_i, m_i, scale_log2, IN_THREAD: gl.constexpr):
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale_log2)
    alpha = exp2(m_i - m_new)
    p = exp2(s * scale_log2 - m_new[:, None])
    if IN_THREAD:
        part = sum_in_thread(p)
        of_part: gl.constexpr = gl.SliceLayout(1, part.type.layout)
        l_i = l_i * gl.convert_layout(alpha, of_part)[:, None] + part
    else:
        l_i = l_i * alpha + gl.sum(p, 1)
    return p, alpha, l_i, m_new


@gluon.jit
def _masked(s, start_m, start_n):
    """Make -inf of the scores of the keys after each query."""
    queries = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    return mask_row_ends(s, queries, queries + 1 - start_n, True, False)


@gluon.jit
def _in_order(
    acc, l_i, m_i, q, buffers, barriers, start_m, first, end, n, scale_log2, trace_ptr,
    ME: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    IN_THREAD: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    k_s, v_s = buffers
    k_full, k_empty, v_full, v_empty = barriers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for i in range(first, end):
        slot, parity = i % STAGES, (i // STAGES) & 1
        # -- score: issue, and wait
        _stamp(trace_ptr, ME, i, 0, n, TRACE)
        mbarrier.wait(k_full.index(slot), parity)
        _stamp(trace_ptr, ME, i, 1, n, TRACE)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        k = k_s.index(slot).permute([1, 0])
        s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
        _stamp(trace_ptr, ME, i, 2, n, TRACE)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot))
        _stamp(trace_ptr, ME, i, 3, n, TRACE)
        # -- weigh: this consumer has no matmul under way
        if MASKED:
            s = _masked(s, start_m, (n - 1 - i) * BLOCK_N)
        weights, alpha, l_i, m_i = _weigh(s, l_i, m_i, scale_log2, IN_THREAD)
        acc = acc * gl.convert_layout(alpha, row)[:, None]
        p = gl.convert_layout(weights.to(q.dtype), operand)
        # -- sum: issue, and wait
        mbarrier.wait(v_full.index(slot), parity)
        _stamp(trace_ptr, ME, i, 4, n, TRACE)
        acc = warpgroup_mma(p, v_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot))
        _stamp(trace_ptr, ME, i, 5, n, TRACE)
    return acc, l_i, m_i


@gluon.jit
def _ahead(
    acc, l_i, m_i, p, q, buffers, barriers, start_m, first, end, n, scale_log2, trace_ptr,
    ME: gl.constexpr, MASKED: gl.constexpr, MASK_BY_BRANCH: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BRANCH: gl.constexpr,
    IN_THREAD: gl.constexpr, TURNS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    k_s, v_s = buffers
    k_full, k_empty, v_full, v_empty = barriers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 16]
    )
    row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for i in range(first, end):
        slot, before, after = i % STAGES, (i - 1) % STAGES, (i + 1) % STAGES
        start_n = (n - 1 - i) * BLOCK_N
        # -- issue: the scores of this tile, then the sum of the one before
        if not BRANCH:
            mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
        _stamp(trace_ptr, ME, i, 0, n, TRACE)
        if TURNS:
            wait_for_turn(ME)
        _stamp(trace_ptr, ME, i, 1, n, TRACE)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        k = k_s.index(slot).permute([1, 0])
        s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
        if TURNS:
            pass_turn(ME, 2)
        _stamp(trace_ptr, ME, i, 2, n, TRACE)
        # -- weigh: as soon as the scores are there, while the sum is computed
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(slot))
        _stamp(trace_ptr, ME, i, 3, n, TRACE)
        if MASKED:
            s = _masked(s, start_m, start_n)
        if MASK_BY_BRANCH:  # noqa: SIM102 (only the second is asked on the GPU)
            if start_n + BLOCK_N > start_m + 1:
                s = _masked(s, start_m, start_n)
        weights, alpha, l_i, m_i = _weigh(s, l_i, m_i, scale_log2, IN_THREAD)
        # -- rescale: the sum, when it is there
        if BRANCH:
            mbarrier.wait(k_full.index(after), ((i + 1) // STAGES) & 1, pred=i + 1 < n)
            _stamp(trace_ptr, ME, i, 4, n, TRACE)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        _stamp(trace_ptr, ME, i, 5, n, TRACE)
        acc = acc * gl.convert_layout(alpha, row)[:, None]
        p = gl.convert_layout(weights.to(q.dtype), p.type.layout)
    return acc, l_i, m_i, p


@gluon.jit
def _consumer(
    computing, n, scale_log2,
    ME: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    BRANCH: gl.constexpr, ONE_LOOP: gl.constexpr, IN_THREAD: gl.constexpr,
    TURNS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    out_desc, buffers, barriers, of_head, start_m, trace_ptr = computing
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    rings, bars = (k_s, v_s), (k_full, k_empty, v_full, v_empty)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, HEAD_DIM, 16]
    )
    row: gl.constexpr = gl.SliceLayout(1, score_layout)

    # -- divide: tiles before this one hold a key that some query does not see
    start_m += ME * ROWS
    n_masked = 0
    if IS_CAUSAL:
        n_masked = gl.maximum(n - (start_m + 1) // BLOCK_N, 1)
    q = q_s.index(ME)
    m_i = gl.full([ROWS], LOWEST, gl.float32, row)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    l_i = sum_in_thread(zeros) if IN_THREAD else gl.sum(zeros, 1)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    mbarrier.wait(q_full.index(ME), 0)

    if not AHEAD:
        if IS_CAUSAL:
            acc, l_i, m_i = _in_order(
                acc, l_i, m_i, q, rings, bars, start_m, 0, n_masked, n, scale_log2,
                trace_ptr, ME, True, BLOCK_N, STAGES, IN_THREAD, TRACE,
            )  # fmt: skip
        acc, l_i, m_i = _in_order(
            acc, l_i, m_i, q, rings, bars, start_m, n_masked, n, n, scale_log2,
            trace_ptr, ME, False, BLOCK_N, STAGES, IN_THREAD, TRACE,
        )  # fmt: skip
    else:
        # -- begin: the tile that has none before it
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(
            q, k_s.index(0).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(0))
        if IS_CAUSAL:
            s = _masked(s, start_m, (n - 1) * BLOCK_N)
        weights, _, l_i, m_i = _weigh(s, l_i, m_i, scale_log2, IN_THREAD)
        operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
        p = gl.convert_layout(weights.to(q.dtype), operand)
        if BRANCH:
            mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=n > 1)
        if TURNS and ME == 1:
            pass_turn(ME, 2)
        # -- loop: over all tiles, or over those with a mask and then over the others
        if IS_CAUSAL and not ONE_LOOP:
            acc, l_i, m_i, p = _ahead(
                acc, l_i, m_i, p, q, rings, bars, start_m, 1, n_masked, n, scale_log2,
                trace_ptr, ME, True, False, BLOCK_N, STAGES, BRANCH, IN_THREAD, TURNS,
                TRACE,
            )  # fmt: skip
            acc, l_i, m_i, p = _ahead(
                acc, l_i, m_i, p, q, rings, bars, start_m, n_masked, n, n, scale_log2,
                trace_ptr, ME, False, False, BLOCK_N, STAGES, BRANCH, IN_THREAD, TURNS,
                TRACE,
            )  # fmt: skip
        else:
            acc, l_i, m_i, p = _ahead(
                acc, l_i, m_i, p, q, rings, bars, start_m, 1, n, n, scale_log2,
                trace_ptr, ME, False, IS_CAUSAL, BLOCK_N, STAGES, BRANCH, IN_THREAD,
                TURNS, TRACE,
            )  # fmt: skip
        # -- end: the sum of the last tile
        slot = (n - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((n - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    # -- write: where the queries were
    total = gl.convert_layout(gl.sum(l_i, 1), row) if IN_THREAD else l_i
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, acc_layout))
    q.store((acc * inverse[:, None]).to(q.dtype))
    fence_async_shared()
    tma_store(out_desc, [of_head + start_m, 0], q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads_at_once"])
def _roles_kernel(
    q, k, v, out, trace_ptr, heads, seqlen, scale_log2, heads_at_once,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    BRANCH: gl.constexpr, ONE_LOOP: gl.constexpr, IN_THREAD: gl.constexpr,
    TURNS: gl.constexpr, ON_DEVICE: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    # -- place: the last queries see the most keys and come first
    BLOCK_M: gl.constexpr = 2 * ROWS
    n_tiles = seqlen // BLOCK_M
    tile, head = place(n_tiles, heads, heads_at_once)
    start_m = (n_tiles - 1 - tile) * BLOCK_M
    n = seqlen // BLOCK_N
    if IS_CAUSAL:
        n = gl.cdiv(start_m + BLOCK_M, BLOCK_N)

    # -- describe: on the device, unless the host has done so
    if ON_DEVICE:
        dtype: gl.constexpr = q.dtype.element_ty
        of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [ROWS, HEAD_DIM], dtype
        )
        of_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [BLOCK_N, HEAD_DIM], dtype
        )
        rows = heads * seqlen
        row: gl.constexpr = HEAD_DIM
        q_desc = tma.make_tensor_descriptor(q, [rows, row], [row, 1], [ROWS, row], of_q)
        k_desc = tma.make_tensor_descriptor(
            k, [rows, row], [row, 1], [BLOCK_N, row], of_k
        )
        v_desc = tma.make_tensor_descriptor(
            v, [rows, row], [row, 1], [BLOCK_N, row], of_k
        )
        out_desc = tma.make_tensor_descriptor(
            out, [rows, row], [row, 1], [ROWS, row], of_q
        )
    else:
        dtype: gl.constexpr = q.dtype
        q_desc, k_desc, v_desc, out_desc = q, k, v, out

    # -- share: queries, a ring of keys and one of values, and their barriers
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for g in gl.static_range(2):
        mbarrier.init(q_full.index(g), count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(k_full.index(b), count=1)
        mbarrier.init(v_full.index(b), count=1)
        mbarrier.init(k_empty.index(b), count=2)
        mbarrier.init(v_empty.index(b), count=2)

    # -- roles: two consumers and a loader
    buffers = (q_s, k_s, v_s)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    loading = (
        (q_desc, k_desc, v_desc),
        buffers,
        barriers,
        head * seqlen,
        start_m,
        trace_ptr,
    )
    computing = (out_desc, buffers, barriers, head * seqlen, start_m, trace_ptr)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    computing, n, scale_log2, ME_0, IS_CAUSAL, HEAD_DIM, BLOCK_N, STAGES,
                    AHEAD, BRANCH, ONE_LOOP, IN_THREAD, TURNS, TRACE,
                ),
            ),
            (
                _consumer,
                (
                    computing, n, scale_log2, ME_1, IS_CAUSAL, HEAD_DIM, BLOCK_N, STAGES,
                    AHEAD, BRANCH, ONE_LOOP, IN_THREAD, TURNS, TRACE,
                ),
            ),
            (_loader, (loading, n, BLOCK_N, STAGES, TRACE)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


# %%
# We time every rung at length 4,096 and head_dim 128, with and without a causal mask; a causal
# kernel counts as half the operations. The measure is a :term:`cuBLAS` matmul, which needs no
# exponentials.

# Measuring
LADDER = {
    "two roles": {
        "STAGES": 2, "REGISTERS": 240, "LOADER_REGISTERS": 24, "ON_DEVICE": False,
        "AHEAD": False, "BRANCH": False, "ONE_LOOP": False, "IN_THREAD": False,
        "TURNS": False,
    },
    "scores ahead": {"AHEAD": True},
    "a branch": {"BRANCH": True},
    "one loop": {"ONE_LOOP": True},
    "sums in threads": {"IN_THREAD": True},
    "turns": {"TURNS": True},
}  # fmt: skip
CHANGED = {
    "without the branch": {"BRANCH": False},
    "three stages": {"STAGES": 3},
    "equal registers": {"REGISTERS": 168, "LOADER_REGISTERS": 168},
    "described on the device": {"ON_DEVICE": True},
}

# %%


# Measuring
RUNGS, so_far = {}, {}
for name, change in LADDER.items():
    RUNGS[name] = so_far = so_far | change
VERSIONS = RUNGS | {name: so_far | change for name, change in CHANGED.items()}
HOPPER = runtime.capability(runtime.DEVICE) == (9, 0)
NEEDS_HOPPER = lab.Absent("it needs a GPU of compute capability 9.0, which is Hopper")


def described(x, rows):
    """A descriptor of all heads, one below the other, in tiles of so many rows."""
    shape = [rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), shape, layout)


def scratch(size, alignment, stream):
    """Memory in which programs may write their descriptors."""
    return torch.empty(size, device=runtime.DEVICE, dtype=torch.int8)


def run(q, k, v, is_causal, trace=None, **options):
    batch, n_heads, seqlen, head_dim = q.shape
    heads, out = batch * n_heads, torch.empty_like(q)
    tensors = (q, k, v, out)
    if options["ON_DEVICE"]:
        triton.set_allocator(scratch)
    else:
        tensors = [described(*x) for x in zip(tensors, (64, 128, 128, 64), strict=True)]
    if not is_causal:  # nothing is masked, so there is one loop anyway
        options = options | {"ONE_LOOP": False}
    at_once = tuned.forward_heads_at_once(k, 1, is_causal)
    _roles_kernel[(heads * seqlen // 128,)](
        *tensors, out if trace is None else trace, heads, seqlen,
        head_dim**-0.5 * LOG2E.value, at_once, IS_CAUSAL=is_causal, HEAD_DIM=head_dim,
        BLOCK_N=128, TRACE=trace is not None, num_warps=4, **options,
    )  # fmt: skip
    return out


def configured(head_dim, mask, keys):
    """How the package cuts its Gluon kernel, also where it prefers plain Triton."""
    return choice.choose(head_dim, mask, keys) or choice.CONFIGS[head_dim]


def in_gluon(q, k, v, is_causal, **change):
    """The package's Gluon kernel, with a change of how it is cut into programs."""
    head_dim, mask = q.shape[3], "causal" if is_causal else "full"
    config = replace(configured(head_dim, mask, k.shape[2]), **change)
    scale = head_dim**-0.5
    return hopper.attention_forward(q, k, v, is_causal, scale, None, config)[0]


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    qkv, is_causal = draw(batch, heads, seqlen, head_dim, dtype), mask == "causal"
    package = partial(attention, *qkv, is_causal=is_causal)
    ours = {
        name: partial(run, *qkv, is_causal, **options)
        for name, options in VERSIONS.items()
    }
    ours["a program per tile"] = partial(in_gluon, *qkv, is_causal, persistent=False)
    ours["persistent"] = partial(in_gluon, *qkv, is_causal, paired=False)
    ours["Kernel Book"] = partial(package, backend="gluon")
    ours = {
        name: lab.tried(version) if HOPPER else NEEDS_HOPPER
        for name, version in ours.items()
    }
    plain = {"plain Triton": partial(package, backend="triton")}
    return {"matmul": matmul()} | plain | ours


steps = lab.bench("ladder", points([4096], (128,)), ladder_providers, **FORWARD)
running = [name for name in VERSIONS if name not in steps.skipped]

# %%


# Measuring
def cases_of(name):
    for is_causal in (False, True):
        for length in (128, 384, 1152):
            q, k, v = draw(1, 16, length, 128)
            truth, _ = reference.attention(q, k, v, is_causal)
            theirs = by_pytorch(q, k, v, is_causal)
            ours = run(q, k, v, is_causal, **VERSIONS[name])
            what = f"{name}, {length}{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth)


def worst_of_each():
    """One row for each version, of which all cases have to pass."""
    found = []
    for name in running:
        rows = [case.row() for case in cases_of(name)]
        if failed := [row for row in rows if not row["ok"]]:
            raise lab.CheckFailed(f"{len(failed)} of {len(rows)} failed: {failed[0]}")
        worst = max(rows, key=lambda row: row["error"] / row["tolerance"])
        row = {"version": name, "cases": len(rows), "error": worst["error"]}
        row |= {"PyTorch's": worst["torch_error"], "tolerance": worst["tolerance"]}
        found.append(row)
    return found


def machine_code(compiled):
    """All of a kernel's SASS; what Triton keeps of it ends after 64 KiB of code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(tool, capture_output=True, text=True, check=True).stdout


def between_waits(sass):
    """The code of a loop from its wait for the scores to its end, as (weighing, rescaling)."""
    loop = r"gsb0, 0x1\s*;(.*?)gsb0, 0x0\s*;(.*?)\bBRA\b"
    found = re.search(loop, sass, re.DOTALL)
    return found.groups() if found else ("", "")


def as_compiled():
    rows = []
    inputs = (*draw(1, 16, 1024, 128), True)
    for name in running:
        launch = partial(run, *inputs, **VERSIONS[name])
        ((_, compiled),) = lab.compiled_by(launch)
        sass = machine_code(compiled)
        row = {"version": name, "spills": compiled.n_spills}
        row["shared memory, KiB"] = round(compiled.metadata.shared / 1024)
        row["matmul instructions"] = len(re.findall(r"\bHGMMA\b", sass))
        row["waits for them"] = len(re.findall(r"\bWARPGROUP\.DEPBAR\b", sass))
        row["exponentials before the sum is waited for"] = len(
            re.findall(r"MUFU\.EX2", between_waits(sass)[0])
        )
        row["permutations"] = len(re.findall(r"\bPRMT\b", sass))
        row["shuffles"] = len(re.findall(r"\bSHFL\b", sass))
        rows.append(row)
    return rows


compiled = lab.attempt(
    "The versions as compiled, causal", as_compiled if HOPPER else NEEDS_HOPPER
)
made = {row["version"]: row for row in compiled.rows}

BEFORE, AFTER = "exponentials before the sum is waited for", "exponentials after it"


def without_a_mask():
    """Where the exponentials of rungs 2 and 3 stand, and of rung 2 with the stamps of a trace."""
    rows = []
    inputs = (*draw(1, 16, 1024, 128), False)
    stamped = torch.zeros(3, 8, 6, device=runtime.DEVICE, dtype=torch.int32)
    for name, trace in (
        ("scores ahead", None),
        ("scores ahead", stamped),
        ("a branch", None),
    ):
        launch = partial(run, *inputs, trace, **VERSIONS[name])
        ((_, compiled),) = lab.compiled_by(launch)
        weighing, rest = between_waits(machine_code(compiled))
        before_stamp = rest.partition("SR_CLOCKLO")[0]  # all of it, if there is none
        row = {"version": name, "stamps": "no" if trace is None else "yes"}
        row[BEFORE] = len(re.findall(r"MUFU\.EX2", weighing))
        row[AFTER] = len(re.findall(r"MUFU\.EX2", rest))
        row["of them before the next stamp"] = len(
            re.findall(r"MUFU\.EX2", before_stamp)
        )
        rows.append(row)
    return rows


unmasked = lab.attempt(
    "Rungs 2 and 3 as compiled, without a mask",
    without_a_mask if HOPPER else NEEDS_HOPPER,
)
in_code = {(row["version"], row["stamps"]): row for row in unmasked.rows}


def compiled_to(name, what):
    return made.get(name, {}).get(what, nan)


def rung_before(name):
    names = ["plain Triton", *LADDER]
    return names[names.index(name) - 1]


def gain(name, mask, before=None):
    before = before or rung_before(name)
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


SCATTER = 0.01  # less is no difference: two timings of one kernel are closer than this


def verdict(change):
    """What a change of the speed is called, if it is more than scatter."""
    if change != change:
        return f"{nan}"
    if abs(change) < SCATTER:
        return "no difference"
    return f"{100 * abs(change):.1f} % {'faster' if change > 0 else 'slower'}"


def of_both(after, before):
    """What one version gains over another with each mask, in words."""
    full, causal = (verdict(gain(after, m, before)) for m in ("full", "causal"))
    if full == causal:
        return f"{full}, with or without a causal mask"
    for ending in (" faster", " slower"):
        if full.endswith(ending):
            causal = causal.removesuffix(ending)
    return f"{full} without a mask and {causal} with a causal one"


def told(name):
    """What a rung gains over the one before, in words."""
    return f"**Measured:** {of_both(name, rung_before(name))}. "


def climbed(name):
    """The speed without a mask of every rung up to this one, as bars."""
    if not steps.rows:
        return None
    called = {"a branch": "order kept"}
    reached = list(LADDER)[: list(LADDER).index(name) + 1]
    bars = {"plain Triton": steps.share("plain Triton", mask="full")} | {
        f"{number} {called.get(rung, rung)}": steps.share(rung, mask="full")
        for number, rung in enumerate(reached, 1)
    }
    caption = "Without a mask; 100 is the speed of cuBLAS."
    items = "".join(
        f'<li><span>{bar}</span> <i style="--share:{share:.3f}"></i><b>{100 * share:.1f}</b></li>'
        for bar, share in bars.items()
    )
    html = f"<ul>{items}</ul><figcaption>{caption}</figcaption>"
    text = "\n".join(f"{bar:<16} {100 * share:.1f}" for bar, share in bars.items())
    return show(
        Markdown(
            f'<figure class="kb-bars" style="--limit:1">{html}</figure>',
            f"{text}\n{caption}",
            f"```text\n{text}\n```\n\n{caption}",
        )
    )


def changed_by(name, before):
    row = {"change": name}
    for mask in ("full", "causal"):
        percent = (
            round(100 * gain(name, mask, before), 1) + 0.0
        )  # which has no sign if it is 0
        row[f"{mask}, %"] = f"{percent:+.1f}".replace("-", "−").replace("+0.0", "0.0")
    return row


last = list(LADDER)[-1]
changes = [changed_by(name, last) for name in CHANGED]
for way, before, called in (
    ("a program per tile", last, "the package's kernel, a program per tile"),
    ("persistent", "a program per tile", "the same, persistent, tiles in order"),
    ("Kernel Book", "a program per tile", "the same, persistent, in pairs if causal"),
):
    changes.append(changed_by(way, before) | {"change": called})

TRACED = {
    "two roles": RUNGS["two roles"],
    "scores ahead": RUNGS["scores ahead"],
    "no turns": RUNGS["sums in threads"],
    "turns": RUNGS["turns"],
}
SPAN = range(8, 20)  # iterations, from the middle of 32
POINTS = ("asks", "begins", "issued", "scores", "weighed", "sum")


def stamps():
    inputs = (*draw(4, 16, 4096, 128), False)
    rows, n = [], 4096 // 128
    for version, options in TRACED.items():
        trace = torch.zeros(3, n, len(POINTS), device=runtime.DEVICE, dtype=torch.int32)
        for _ in range(3):
            run(*inputs, trace, **options)
        found = trace.tolist()
        start = found[0][SPAN[0]][0]
        for role in range(3):
            for i in SPAN:
                # the counter has 32 bits, and may have begun anew
                at = [(x - start + 2**31) % 2**32 - 2**31 for x in found[role][i]]
                if role == 2:
                    at = [*at[:2], *[None] * 4]  # keys and values, asked for
                elif options["AHEAD"] and not options["BRANCH"]:
                    at[4] = None  # a stamp there would keep the wait where it is
                who = ("consumer 0", "consumer 1", "loader")[role]
                row = {"version": version, "role": who, "tile": i}
                rows.append(row | dict(zip(POINTS, at, strict=True)))
    return rows


traced = lab.attempt(
    "Stamps of program 0, in cycles of its SM", stamps if HOPPER else NEEDS_HOPPER
)

# %%


# Measuring
CONSUMERS = ("consumer 0", "consumer 1")
UNITS = "matmul units"
INKS = dict(zip(CONSUMERS, ("matmul", "PyTorch"), strict=True))  # of their matmuls


def at_matmuls(version):
    """Between which stamps a consumer stands at its matmuls."""
    if version == "scores ahead":  # no stamp tells when the second ends
        return [("begins", "earliest")]
    return [("begins", "scores"), ("weighed", "sum")]


def away(version):
    """Between which stamps a consumer does all else, weighing first."""
    if version == "scores ahead":
        return [("earliest", "next")]
    return [("scores", "weighed"), ("sum", "next")]


def with_earliest(rows):
    """The stamps, when both matmuls that were issued end at the full rate, and the next issue."""
    both, found = cycles(128, rows=64)[0], []
    begins = {(r["version"], r["role"], r["tile"]): r["begins"] for r in rows}
    for row in rows:
        if row["role"] != "loader":
            after = begins.get((row["version"], row["role"], row["tile"] + 1))
            row = row | {"next": row["sum"] if after is None else after}
            if row["version"] == "scores ahead":
                row |= {"earliest": max(row["begins"] + both, row["scores"])}
        found.append(row)
    return found


def on_units(rows, version):
    """The matmuls, served at the full rate in the order of their issue.

    Yields (begin, end, role, what, when its result was seen) of each.
    """
    half, issued, free = cycles(128, rows=64)[0] / 2, [], -(10**9)
    for row in rows:
        if row["version"] == version and row["role"] in CONSUMERS:
            in_order = version == "two roles"
            begins = row["weighed"] if in_order else row["begins"] + 1
            issued.append((row["begins"], row["role"], "s", row["scores"]))
            issued.append((begins, row["role"], "pv", row["sum"]))
    for begins, role, what, seen in sorted(issued):
        begin = max(begins, free)
        free = begin + half
        yield begin, free, role, what, seen


def cycles_a_tile(rows, version):
    """Cycles from one issue to the next of a consumer, over the span that was traced."""
    own = [r for r in rows if (r["version"], r["role"]) == (version, "consumer 0")]
    return (own[-1]["issued"] - own[0]["issued"]) / (len(own) - 1) if own else nan


def mean_cycles(rows, version, a, b):
    """How many cycles a consumer spends between two points, in the mean."""
    own = [r for r in rows if r["version"] == version and r["role"] in CONSUMERS]
    return sum(r[b] - r[a] for r in own) / len(own) if own else nan


def both_at(rows, version, parts):
    """The share of a consumer's time in some parts of a tile at which the other is there, too."""
    first, second = (
        [
            (row[a], row[b])
            for row in rows
            if (row["version"], row["role"]) == (version, role)
            for a, b in parts
        ]
        for role in CONSUMERS
    )
    both = sum(max(0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
    return 2 * both / sum(b - a for a, b in first + second) if first else nan


def idle_units(rows, version):
    """The share of the time for which the matmul units have nothing to do, at the full rate."""
    return 1 - cycles(128)[0] / cycles_a_tile(rows, version)


def scores_in_line(rows, version):
    """How many cycles the scores of a consumer wait for the units after they were issued."""
    own = [r for r in rows if r["version"] == version and r["role"] in CONSUMERS]
    issued = {(row["role"], row["scores"]): row["begins"] for row in own}
    late = [
        begin - issued[role, seen]
        for begin, _, role, what, seen in on_units(rows, version)
        if what == "s"
    ][4:]
    return sum(late) / len(late) if late else nan


def apart(rows, version, begins):
    """How many cycles after one consumer the other begins to weigh, at least."""
    own = [r for r in rows if r["version"] == version and r["role"] in CONSUMERS]
    at = sorted(row[begins] for row in own)
    return (
        min(late - early for early, late in zip(at, at[1:], strict=False))
        if at
        else nan
    )


def pauses(rows):
    """On rung 1: cycles from the end of a matmul to the next issue, after scores and sums."""
    after = {"s": [], "pv": []}
    issued = {role: [] for role in CONSUMERS}
    for row in rows:
        if row["version"] == "two roles" and row["role"] in CONSUMERS:
            issued[row["role"]] += [row["begins"], row["weighed"]]
    for _, end, role, what, _ in on_units(rows, "two roles"):
        if later := [at for at in issued[role] if at > end]:
            after[what].append(min(later) - end)
    return [
        sum(found[2:]) / len(found[2:]) if found else nan for found in after.values()
    ]


def asked_ahead(rows, version):
    """How many cycles before consumer 0 comes to a tile the loader asks for its keys."""
    asked, needed = (
        [r["asks"] for r in rows if (r["version"], r["role"]) == (version, role)]
        for role in ("loader", "consumer 0")
    )
    ahead = [late - early for early, late in zip(asked, needed, strict=True)]
    return sum(ahead) / len(ahead) if ahead else nan


def in_words(version):
    """What describes the timeline of a version to those who do not see it."""

    def of_one(rows):
        rows = with_earliest(rows)
        spent = {
            what: sum(mean_cycles(rows, version, *ends) for ends in parts(version))
            for what, parts in (("its matmuls", at_matmuls), ("all else", away))
        }
        listed = " and ".join(
            f"{took:,.0f} with {what}" for what, took in spent.items()
        )
        return (
            f"A tile of keys takes {cycles_a_tile(rows, version):,.0f} cycles, of which a consumer "
            f"spends {listed}. The matmul units are idle for "
            f"{100 * idle_units(rows, version):.0f} % of the time."
        )

    return of_one


earliest = with_earliest(traced.rows)
took_2, took_5 = (cycles_a_tile(traced.rows, v) for v in ("scores ahead", "no turns"))
by_version = {version: cycles_a_tile(traced.rows, version) for version in TRACED}
ideal = cycles(128)[0]
# %%


# Measuring
LENGTHS = [1024, 4096, 16384]
PEERS = ("SDPA cuDNN", "FlashAttention")


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    qkv, is_causal = draw(batch, heads, seqlen, head_dim, dtype), mask == "causal"
    ours = partial(attention, *qkv, is_causal=is_causal)
    gluon = lab.tried(partial(ours, backend="gluon")) if HOPPER else NEEDS_HOPPER
    return {
        "matmul": matmul(),
        "SDPA cuDNN": sdpa("CUDNN_ATTENTION", qkv, is_causal=is_causal),
        "FlashAttention": flash(qkv, causal=is_causal),
        "plain Triton": partial(ours, backend="triton"),
        "in Gluon": gluon,
        "Kernel Book": ours,
    }


speed = lab.bench("forward", points(LENGTHS), providers, **FORWARD)
at_points = []
for point in points(LENGTHS, (128, 64)):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    size = (point["head_dim"], point["mask"], point["seqlen"])
    library, _ = speed.best_peer(*PEERS, **where)
    at_points.append(
        {
            "head_dim": point["head_dim"],
            "mask": point["mask"],
            "length": point["seqlen"],
            "plain": speed.rate("plain Triton", **where),
            "in Gluon": speed.rate("in Gluon", **where),
            "by default": speed.rate("Kernel Book", **where),
            "chosen": "in Gluon" if choice.choose(*size) else "plain",
            "library": library,
            "its speed": nan if library == "none" else speed.rate(library, **where),
        }
    )


def of_chosen(row):
    """The speed of the kernel that the package chooses, timed under its own name."""
    return row["plain" if row["chosen"] == "plain" else "in Gluon"]


twice = [abs(row["by default"] / of_chosen(row) - 1) for row in at_points]

# %%

# Folded: Every version against float64, and how far two timings of one kernel are apart
all_right = lab.attempt(
    "The worst of each version, bfloat16, lengths 128 to 1,152, against float64",
    worst_of_each if HOPPER else NEEDS_HOPPER,
)
both_figures = [
    abs(
        steps.rate(here, mask=m) / speed.rate(there, head_dim=128, mask=m, seqlen=4096)
        - 1
    )
    for here, there in (("plain Triton", "plain Triton"), ("Kernel Book", "in Gluon"))
    for m in ("full", "causal")
    if speed.rows and steps.rows
]
close = sum(change < SCATTER for change in twice)
in_two_timings = lab.read(
    "The last section times the package's choice twice, under two names. The two timings are less "
    f"than {100 * SCATTER:.0f} % apart at {close} of {len(twice)} points, and at most "
    f"{100 * max(twice):.1f} %. At the length of the ladder, plain Triton and the package's kernel "
    f"were timed for both figures, at most {100 * max(both_figures):.1f} % apart. Gains are "
    "computed before any rounding."
    if speed.rows and steps.rows
    else f"{nan}"
)
lab.together(all_right, in_two_timings)

# %%

# Reading
none_beats_2 = all(
    gain(name, "full", "scores ahead") < SCATTER
    for name in [*list(LADDER)[2:], "Kernel Book"]
)
if steps.rows:  # as the ladder says
    assert none_beats_2
    assert all(gain(name, "causal", "scores ahead") > SCATTER for name in list(LADDER)[3:])
lab.read(
    f'Below, "no difference" means less than {100 * SCATTER:.0f} %, '
    + ("because" if max(twice) < SCATTER else "and")
    + f" two timings of one kernel are up to {100 * max(twice):.1f} % apart."
    if speed.rows and steps.rows
    else f"{nan}"
)

# %%
# Rung 1: two roles
# -----------------
#
# Do the two cooks alternate by themselves?
#
# **The change:** a loader fetches the tiles, and two consumers share the matmul units. Each works
# *in order*, as in the first figure. **Expected:** a gain, because the consumers need not load, and
# one cook can prepare while the other bakes.

# Reading
measured_1 = lab.read(
    told("two roles").replace("Measured:**", "Measured:** against plain Triton,")
)
lab.together(measured_1, climbed("two roles"))

# %%
# To see where the expected gain went, we let the consumers of one program take *stamps*: they read
# the SM's cycle counter and store it.
#
# .. dropdown:: A stamp in Gluon, and where the stamps stand
#
#    A consumer of rung 1 has six events (``EVENTS``): it asks for keys, has them and issues its
#    scores, has issued them, sees the scores, has weighed them and issues its sum, and sees the
#    sum. ``is_pure=False`` keeps the compiler from merging the reads or leaving them out. Only
#    program 0 stores its stamps. On rung 2 we place no stamp between the two waits, because it
#    could keep the second from moving.
#
#    .. code-block:: python
#
#       @gluon.jit
#       def stamp(trace_ptr, role, i, event, n):
#           now = gl.inline_asm_elementwise(
#               "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)],
#               dtype=gl.int32, is_pure=False, pack=1,
#           )
#           at = trace_ptr + (role * n + i) * EVENTS + event
#           gl.store(at, now, mask=gl.program_id(0) == 0)
#
# In grey or orange, a consumer is at a matmul; in blue it does all else, above all weighing the
# tile of keys with that number. The bottom row is not stamped but computed, with the matmuls in the
# order of their issue, at the full rate of 512 cycles each.


# Drawing
WHITE = {"ha": "center", "va": "center", "color": "white"}


def draw_units(axes, rows, version, place, start, window):
    """Draw the matmuls of a version on the units, and shade where these are idle."""
    last, the_end = 0, (start + window, start + window, "", "", 0)
    for begin, end, role, what, _ in [*on_units(rows, version), the_end]:
        begin, end = min(max(begin - start, 0), window), min(end - start, window)
        if begin > last:
            axes.barh(place, begin - last, 0.7, last, color=MUTED, alpha=0.15)
            if begin - last > 0.05 * window:
                middle = {"ha": "center", "va": "center", "color": MUTED}
                axes.text((last + begin) / 2, place, "idle", fontsize=9, **middle)
            last = begin
        if end <= begin:
            continue
        ink = lab.colour(INKS[role])
        axes.barh(place, end - begin, 0.7, begin, color=ink, edgecolor="white")
        if end - begin > 0.06 * window:
            axes.text((begin + end) / 2, place, f"${what}$", fontsize=10, **WHITE)
        last = end


def draw_consumer(axes, own, version, place, start, window):
    """Draw where a consumer stands at its matmuls, and when it does all else."""
    for row in own:
        parts = [(ends, INKS[row["role"]]) for ends in at_matmuls(version)]
        parts += [(ends, "Kernel Book") for ends in away(version)]
        weighs, *_ = away(version)
        for (a, b), ink in parts:
            begin, end = max(row[a] - start, 0), min(row[b] - start, window)
            if end <= begin:
                continue
            axes.barh(place, end - begin, 0.7, begin, color=lab.colour(ink))
            shown = (end - begin) / axes.get_xlim()[1]
            if b == "earliest" and end == row[b] - start:  # computed, not stamped
                edge = {"color": "white", "linestyle": (0, (2, 1.5)), "linewidth": 1.6}
                axes.plot([end, end], [place - 0.35, place + 0.35], **edge)
            # to the right of the middle where the bar begins with hatches
            middle = begin + (0.66 if version == "no turns" else 0.5) * (end - begin)
            if (a, b) == weighs and shown > 0.05:
                axes.text(middle, place, str(row["tile"]), fontsize=10, **WHITE)
            elif ink != "Kernel Book" and version == "two roles" and shown > 0.06:
                what = "$s$" if a == "begins" else "$pv$"
                axes.text((begin + end) / 2, place, what, fontsize=10, **WHITE)
            elif ink != "Kernel Book" and shown > 0.12:
                middle = (begin + end) / 2
                axes.text(middle, place, "matmuls", fontsize=8.5, **WHITE)


def sums_end(rows, version):
    """When the sum of a consumer ends on the units, by its role and when the sum was seen."""
    return {
        (role, seen): end
        for _, end, role, what, seen in on_units(rows, version)
        if what == "pv"
    }


def mark_overlap(axes, rows, version, start, window):
    """Hatch where a consumer weighs while its own sum is on the units."""
    ends = sums_end(rows, version)
    axes.text(0, -0.5, "hatched: own sum still runs", fontsize=9, color=MUTED)
    for row in rows:
        if row["role"] not in CONSUMERS:
            continue
        begin, end = row["scores"] - start, ends[row["role"], row["sum"]] - start
        if 0 < begin < end < window:
            lane = CONSUMERS.index(row["role"])
            axes.barh(
                lane, end - begin, 0.7, begin, facecolor="none", edgecolor="white",
                hatch="/////", linewidth=0,
            )  # fmt: skip


def timelines(version, lanes, height, tiles=2, marked=""):
    """What draws some lanes of a version for so many tiles, from its second traced tile on."""

    def of_loader(axes, rows, place, start, window):
        for row in rows:
            for at, mark in ((row["asks"], "^"), (row["begins"], "v")):
                if 0 <= at - start <= window:
                    ink = lab.colour("matmul")
                    axes.plot(at - start, place, mark, markersize=5, color=ink)

    def how(axes, rows):
        rows = [row for row in with_earliest(rows) if row["version"] == version]
        own = {
            role: [r for r in rows if r["role"] == role]
            for role in ("loader", *CONSUMERS)
        }
        begins = {row["tile"]: row["asks"] for row in own[CONSUMERS[0]]}
        start = begins[SPAN[1]]
        window = begins[SPAN[1] + tiles] - start
        axes.figure.set_size_inches(5.4, height)
        axes.set(xlim=(0, 3000 * tiles), xlabel="cycles of the SM")
        for y, lane in enumerate(lanes):
            if lane == UNITS:
                draw_units(axes, rows, version, y, start, window)
            elif lane == "loader":
                of_loader(axes, own[lane], y, start, window)
            else:
                draw_consumer(axes, own[lane], version, y, start, window)
        axes.set_yticks(range(len(lanes)), lanes, fontsize=10)
        if marked == "overlap":
            mark_overlap(axes, rows, version, start, window)
            axes.set_ylim(-0.85, len(lanes) - 0.5)
        axes.invert_yaxis()
        axes.grid(visible=False)

    return how


LANES = (*CONSUMERS, UNITS)
lab.draw(
    traced,
    "Rung 1: while both weigh, the matmul units are idle",
    in_words("two roles"),
    timelines("two roles", LANES, 2.8),
)

# %%

# Reading
after_scores, after_sum = (
    round(took) if took == took else nan for took in pauses(traced.rows)
)
half = ideal / 4  # a matmul of one consumer
between = apart(traced.rows, "two roles", "scores")
weighs_1 = mean_cycles(traced.rows, "two roles", "scores", "weighed")
alone = cycles(128, rows=64)[1]
only_apart = (
    "one matmul" if abs(between - half) < 0.05 * half else f"{between:,.0f} cycles"
)
in_step_1 = lab.read(
    "**Roles alone do not make the cooks alternate.** "
    + (
        "On the bottom row of this trace, the scores of one consumer come right behind those of "
        "the other. "
        if after_sum < half
        else ""
    )
    + f"So the two begin to weigh only {only_apart} apart, and while both weigh, the units are "
    f"idle, in all for {100 * idle_units(traced.rows, 'two roles'):.0f} % of the time."
)
weighing_1 = (
    lab.read(
        f"On rung 1, weighing takes {weighs_1:,.0f} cycles, and not the {alone:,.0f} of its "
        "exponentials at the full rate. It also finds maxima, scales, adds up and converts, and "
        "while both consumers weigh, they share the SM's other units."
    )
    if weighs_1 > 1.5 * alone
    else None
)
in_step_1

# %%
# Rung 2: scores ahead
# --------------------
#
# **The change:** the scores run one tile ahead, so a consumer visits the units once per tile.
# **Expected:** a gain, above all because a consumer then weighs while its own sum runs.

# Reading
lab.together(lab.read(told("scores ahead")), climbed("scores ahead"))

# %%
# The SASS shows whether the exponentials really run during the sum. A launch returns the compiled
# kernel, and ``cuobjdump``, which comes with Triton, disassembles its binary:
#
# .. code-block:: python
#
#    compiled = kernel[grid](...)
#    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])  # cuobjdump -sass kernel.cubin


# Drawing
OF_THREAD = 64 * 128 // 128 + 2  # weights of a thread, and the factors of its two rows


def in_its_order(name):
    """The machine code of an iteration, abridged: its matmuls, waits and exponentials."""
    early = in_code.get((name, "no"), {}).get(BEFORE, nan)
    if early != early:
        return lab.read(f"{nan}")
    code = [
        ("HGMMA (8 times)", "issue scores"),
        ("HGMMA (8 times)", "issue sum"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "wait: scores"),
        (f"MUFU.EX2 ({early} times)", "exponentials") if early else None,
        ("SYNCS, BRA", "wait: keys") if VERSIONS[name]["BRANCH"] else None,
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "wait: sum"),
        (f"MUFU.EX2 ({OF_THREAD - early} times)", "exponentials")
        if early < OF_THREAD
        else None,
    ]
    text = "\n".join(f"{line[0]:<30} {line[1]}" for line in code if line)
    number = list(LADDER).index(name) + 1
    caption = f"SASS of rung {number}, one iteration, abridged, without a mask"
    listing = f'<div class="highlight no-copy"><pre>{text}</pre></div>'
    return show(
        Markdown(
            f'<div class="kb-source"><div class="kb-caption">{caption}</div>{listing}</div>',
            f"{caption}\n{text}",
            f"{caption}\n\n```text\n{text}\n```",
        )
    )


in_its_order("scores ahead")

# %%

# Reading
planned = in_code.get(("scores ahead", "no"), {}).get(BEFORE, nan)
in_sass_2 = lab.read(
    (
        f"**They do not run during the sum.** All {OF_THREAD} exponentials of a thread come after "
        "both waits, because the second wait moved up to the first on the way to machine code. A "
        "consumer therefore weighs only when both of its matmuls have ended."
    )
    if planned == 0
    else f"Of the {OF_THREAD} exponentials of a thread, {planned:.0f} come between the wait for "
    "the scores and the wait for the sum."
)
how_drawn_2 = lab.read(
    "Then what brings the gain? In the timeline, a dashed line marks where both matmuls of a "
    "consumer end, as computed."
)
lab.together(in_sass_2, how_drawn_2)

# %%

# Drawing
lab.draw(
    traced,
    "Rung 2: one weighs while the other's matmuls run",
    in_words("scores ahead"),
    timelines("scores ahead", LANES, 2.8),
)

# %%

# Reading
as_stamped = in_code.get(("scores ahead", "yes"), {})
not_our_reason = lab.read(
    "**The other's matmuls run meanwhile:** one cook prepares while the other bakes. The gain is "
    "real, but our reason for it was wrong, which timing alone would not have shown."
)
idle_2 = lab.read(
    "Yet the oven still stands idle for "
    f"{100 * idle_units(traced.rows, 'scores ahead'):.0f} % of the time, because the other's two "
    "matmuls end before a consumer is back."
    + (
        ""
        if (as_stamped.get(BEFORE), as_stamped.get("of them before the next stamp"))
        == (0, OF_THREAD)
        else " (The stamps have changed the order of this code.)"
    )
)
lab.together(not_our_reason, idle_2)

# %%
# Rung 3: order kept
# ------------------
#
# **The change:** the wait for the next tile of keys moves from the top of the loop to just before
# the wait for the sum. A wait for a barrier is itself a loop with a branch, and the wait for the
# sum does not move across that branch:
#
# .. code-block:: python
#
#    # the next of n tiles of keys, in slot `after`
#    mbarrier.wait(k_full.index(after), ((i + 1) // STAGES) & 1, pred=i + 1 < n)
#    acc = warpgroup_mma_wait(0, deps=[acc])
#
# **Expected:** a gain, because a consumer now weighs during its own sum, too.

# Reading
early = in_code.get(("a branch", "no"), {}).get(BEFORE, nan)
measured_3 = lab.read(told("a branch"))
bars_3 = climbed("a branch")
in_sass_3 = lab.read(
    "In the SASS, all exponentials now come before the wait for the sum:"
    if early == OF_THREAD
    else f"In the SASS, {early} of {OF_THREAD} exponentials now come before the wait for the sum:"
)
lab.together(measured_3, bars_3, in_sass_3)

# %%

# Drawing
in_its_order("a branch")

# %%
# We traced rung 5, which without a mask differs from rung 3 only in its row sums. A thin bar is a
# wait for a sum that has, by the computed row, already ended.

# %%

# Drawing
lab.draw(
    traced,
    "Rung 3's order, on rung 5: weighing during the sum",
    in_words("no turns"),
    timelines("no turns", LANES, 3.0, marked="overlap"),
)

# %%

# Reading
seen_late = [
    seen - end
    for _, end, _, what, seen in on_units(traced.rows, "no turns")
    if what == "s"
][4:]
scores_seen = sum(seen_late) / len(seen_late) if seen_late else nan
level = abs(gain("sums in threads", "full", "scores ahead")) < SCATTER
faster_with_stamps = took_5 < (1 - SCATTER) * took_2 and level
ends_of_sum = sums_end(traced.rows, "no turns")
overlaps = [
    ends_of_sum[row["role"], row["sum"]] - row["scores"]
    for row in traced.rows
    if row["version"] == "no turns" and row["role"] in CONSUMERS
]
overlap = sum(overlaps) / len(overlaps) if overlaps else nan
weighs_5 = mean_cycles(traced.rows, "no turns", "scores", "weighed")
overlapping = overlap / weighs_5
weighs_of = [
    (row["role"], row["scores"], row["weighed"])
    for row in traced.rows
    if row["version"] == "no turns" and row["role"] in CONSUMERS
]
of_other = [  # cycles of a consumer's weighing in which the units work for the other
    max(0, min(weighed, end) - max(scores, begin))
    for begin, end, served, *_ in on_units(traced.rows, "no turns")
    for role, scores, weighed in weighs_of
    if role != served
]
for_other = sum(of_other) / len(weighs_of) / weighs_5 if weighs_of else nan
branch_slower = min(gain("a branch", m) for m in ("full", "causal")) < -SCATTER
lab.read(
    "**The overlap is there, and yet rung 3 is slower than rung 2.**"
    + (
        " Its branch stays, because without it, rung 6 is "
        f"{verdict(gain('without the branch', 'causal', 'turns'))} with a causal mask."
        if gain("without the branch", "causal", "turns") < -SCATTER
        else ""
    )
    if branch_slower and 0 < overlapping < 0.5
    else f"A consumer weighs for {weighs_5:,.0f} cycles, and its sum runs for at least the "
    f"first {overlap:,.0f} of them, if the units serve in order."
)

# %%

# Reading
lab.read(
    (
        "With stamps, rung 5 takes "
        f"{100 * (1 - took_5 / took_2):.0f} % fewer cycles per tile than rung 2, and yet it is no "
        "faster in the ladder below. "
        if faster_with_stamps
        else ""
    )
    + "An overlap therefore needs **two checks**: whether it exists, in the SASS, and whether it "
    "pays, by timing the kernel without stamps."
)

# %%
# How much of rung 2's gain we can explain
# ----------------------------------------
#
# Is it enough that the cooks alternate? To see this, we let the consumers of rung 1 take turns. In
# its turn, a consumer runs its sum and issues its next scores, so that the other's matmuls cannot
# come between. All three are timed again, in one run:

# %%


# Measuring
def cycles_per_tile(requests, late=0, tiles=10_000):
    free, ready, done = 0, [0, late], [0, 0]
    while min(done) < tiles * len(requests):
        me = ready.index(min(ready))  # first come, first served
        matmuls, pause = requests[done[me] % len(requests)]
        free = max(free, ready[me]) + matmuls
        ready[me] = free + pause
        done[me] += 1
    return free / tiles


STARTS = (0, 500, 1400)  # of consumer 1, in cycles after consumer 0
REQUESTS = {
    "two roles": [(512, after_scores), (512, after_sum)],
    "scores ahead": [(1024, after_scores + after_sum)],
    "no turns": [(1024, after_scores + after_sum - 512)],
}
modelled = {
    version: [cycles_per_tile(requests, start) for start in STARTS]
    if traced.rows
    else [nan] * len(STARTS)
    for version, requests in REQUESTS.items()
}


def in_line(requests, late=0, tiles=40):
    """Whom ``cycles_per_tile`` serves, from when to when, and which request of its tile."""
    free, ready, done, served = 0, [0, late], [0, 0], []
    while min(done) < tiles * len(requests):
        me = ready.index(min(ready))
        which = done[me] % len(requests)
        begin = max(free, ready[me])
        free = begin + requests[which][0]
        ready[me] = free + requests[which][1]
        done[me] += 1
        served.append((begin, free, me, which))
    assert free / tiles == cycles_per_tile(requests, late, tiles)
    return served


def requests_of(rows):
    """The requests of rungs 1 and 2 in the model, with the pauses of rung 1's timeline."""
    scores, of_sum = (round(took) for took in pauses(rows))
    return [(512, scores), (512, of_sum)], [(1024, scores + of_sum)]


def lanes_of_model(rows):
    """(name, requests, start of consumer 1, what each request is) of each lane."""
    two, one = requests_of(rows)
    # in rung 1's requests the scores come first
    yield "rung 1, together", two, STARTS[0], ("s", "pv")
    yield f"rung 1, {STARTS[2]:,} late", two, STARTS[2], ("s", "pv")
    yield "rung 2, together", one, STARTS[0], ("s, pv",)


def model_in_words(rows):
    took = [
        f"{name}: {cycles_per_tile(requests, late):,.0f} cycles per tile"
        for name, requests, late, _ in lanes_of_model(rows)
    ]
    return (
        "The matmul units over time, in three lanes. On rung 1, started together, the two "
        "consumers' scores and then their sums follow each other, and then the units are idle. "
        f"{'; '.join(took)}."
    )


def draw_model(axes, rows):
    window = 6000
    axes.figure.set_size_inches(5.4, 2.7)
    for consumer, ink in enumerate(INKS.values()):
        axes.barh(
            0,
            0,
            label=f"consumer {consumer}",
            color=lab.colour(ink),
            edgecolor="white",
        )
    names = []
    for lane, (name, requests, late, whats) in enumerate(lanes_of_model(rows)):
        served, last = in_line(requests, late), 0
        start = next(at for at, *_, me, which in served[60:] if (me, which) == (0, 0))
        for begin, end, me, which in served:
            left, right = max(begin - start, 0), min(end - start, window)
            if right <= 0 or left >= window:
                continue
            if left > last:
                axes.barh(lane, left - last, 0.7, last, color=MUTED, alpha=0.15)
            if left - last > 0.07 * window:
                middle = {"ha": "center", "va": "center", "color": MUTED}
                axes.text((last + left) / 2, lane, "idle", fontsize=9, **middle)
            ink = lab.colour(list(INKS.values())[me])
            axes.barh(lane, right - left, 0.7, left, color=ink, edgecolor="white")
            if right - left > 0.06 * window:
                what = ", ".join(f"${part}$" for part in whats[which].split(", "))
                axes.text((left + right) / 2, lane, what, fontsize=10, **WHITE)
            last = right
        axes.barh(lane, window - last, 0.7, last, color=MUTED, alpha=0.15)
        axes.text(
            window + 120, lane, f"{cycles_per_tile(requests, late):,.0f}", va="center"
        )
        names.append(name)
    axes.text(window + 120, -0.75, "per tile", va="center", fontsize=9, color=MUTED)
    axes.set(xlim=(0, window), ylim=(len(names) - 0.5, -0.5), xlabel="cycles of the SM")
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.grid(visible=False)


# %%


# Measuring
def rebound(function, **names):
    """A function, or a kernel, with something else behind some of the names that it reads."""
    plain = getattr(function, "fn", function)
    seen = plain.__globals__ | names
    copy = FunctionType(plain.__code__, seen, plain.__name__, plain.__defaults__)
    copy.__annotations__ = plain.__annotations__
    return copy if plain is function else gluon.jit(copy)


def in_place_of_stamps(hook, loop, consumer, kernel, launch):
    """The launch of a kernel in whose loop something else happens where it could take stamps."""
    loop = rebound(loop, _stamp=gluon.jit(hook))
    consumer = rebound(consumer, _in_order=loop)
    return rebound(launch, _roles_kernel=rebound(kernel, _consumer=consumer))


def begin_late(trace_ptr, role, i, event, n, TRACE: gl.constexpr):
    """Let consumer 1 begin its first tile LATE cycles after it could."""
    if role == 1 and event == 0:  # noqa: SIM102 (only the second is asked on the GPU)
        if i == 0:
            begin = gl.inline_asm_elementwise(
                "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip
            now = begin
            while now - begin < LATE:  # noqa: F821 (which is rebound)
                now = gl.inline_asm_elementwise(
                    "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                    is_pure=False, pack=1,
                )  # fmt: skip


def take_turns(trace_ptr, role, i, event, n, TRACE: gl.constexpr):
    """Let a consumer issue its sum and its next scores, then the other; consumer 1 is first."""
    if event == 4:  # the values are there, and the sum comes next
        wait_for_turn(role)
    if event == 2:  # noqa: SIM102 (the scores are issued)
        if role == 0 or i > 0:
            pass_turn(role, 2)
    if role == 1 and event == 5:  # noqa: SIM102 (after the last sum, consumer 0 waits once more)
        if i == n - 1:
            pass_turn(role, 2)


def alternating_providers(
    parts, rung_1, rung_2, seqlen, batch, heads, head_dim, mask, causal, dtype
):
    """Rung 1, its versions that alternate, and rung 2, each beside rung 1's output once."""
    qkv, launch = draw(batch, heads, seqlen, head_dim, dtype), parts[-1]
    hooks = {
        f"{start} late": rebound(begin_late, LATE=gl.constexpr(start))
        for start in STARTS[1:]
    } | {"takes turns": take_turns}
    ours = {"rung 1": partial(launch, *qkv, False, **rung_1)}
    for name, hook in hooks.items():
        ours[name] = partial(in_place_of_stamps(hook, *parts), *qkv, False, **rung_1)
    ours["rung 2"] = partial(launch, *qkv, False, **rung_2)
    ours = {name: lab.tried(version) for name, version in ours.items()}
    right = ours["rung 1"]().float()
    for name, version in ours.items():
        if isinstance(version, lab.Absent):
            continue
        if not (version().float() - right).norm() < 0.01 * right.norm():
            raise lab.CheckFailed(f"{name} and rung 1 differ")
    return {"matmul": matmul()} | ours


alternating = lab.bench(
    "rung 1, made to alternate",
    points([4096], (128,))[:1],
    partial(
        alternating_providers,
        (_in_order, _consumer, _roles_kernel, run),
        RUNGS["two roles"],
        RUNGS["scores ahead"],
    ),
    **FORWARD,
)
tested = bool(alternating.rows) and not alternating.skipped

# %%

# Reading
at_one, at_two, at_five = (cycles_a_tile(traced.rows, v) for v in REQUESTS)
(in_step, still_in_step, apart_1), (together_2, *_), (together_5, *_) = (
    modelled.values()
)
in_line_1 = in_step - sum(map(sum, REQUESTS["two roles"]))
in_model = in_step / together_2 - 1
locks = abs(still_in_step - in_step) < 1 < in_step - apart_1
from_any_start = bool(traced.rows) and all(
    abs(cycles_per_tile(REQUESTS["scores ahead"], start, 500) - together_2) < 10
    for start in range(0, 2700, 100)
)
OF_TEST = {  # provider: what it is called, and its cycles in the model
    f"{STARTS[1]} late": (
        f"rung 1, {STARTS[1]:,} cycles late",
        still_in_step,
    ),
    f"{STARTS[2]} late": (f"rung 1, {STARTS[2]:,} cycles late", apart_1),
    "takes turns": ("rung 1, in turns", apart_1),
    "rung 2": ("rung 2", together_2),
}
over_rung_1 = {
    name: alternating.rate(name) / alternating.rate("rung 1") - 1 if tested else nan
    for name in OF_TEST
}


def in_the_test(name, called, took):
    row = {"version": called}
    for what, change in (
        ("measured, %", over_rung_1[name]),
        ("in the model, %", in_step / took - 1),
    ):
        row[what] = f"{100 * change + 0.0:+.1f}".replace("-", "−").replace(
            "+0.0", "0.0"
        )
    return row


SERVED = {  # provider: what it is called, and whom the units serve in the time of a tile
    "rung 1": ("rung 1", ((0, "pv"), (1, "pv"), (0, "s"), (1, "s"))),
    "takes turns": ("rung 1, in turns", ((0, "pv"), (0, "s"), (1, "pv"), (1, "s"))),
    "rung 2": ("rung 2", ((0, "s"), (0, "pv"), (1, "s"), (1, "pv"))),
}


def gains_of(rows):
    """The gain over rung 1 of those in SERVED that were timed."""
    rates = {row["provider"]: row["rate"] for row in rows}
    return {
        name: rates[name] / rates["rung 1"] - 1
        for name in SERVED
        if name in rates and "rung 1" in rates
    }


def served_in_words(rows):
    listed = "; ".join(
        f"{SERVED[name][0]}: " + ", ".join(f"{what} of consumer {me}" for me, what in order)
        + (f", {100 * gains_of(rows)[name]:+.1f} %" if name != "rung 1" else "")
        for name, (_, order) in SERVED.items()
        if name in gains_of(rows)
    )
    return f"Blocks in three rows, the matmuls of a tile in the order in which they run. {listed}."


def draw_served(axes, rows):
    axes.figure.set_size_inches(5.4, 1.9)
    gains, tiles = gains_of(rows), 2
    names = [called for called, _ in SERVED.values()]
    for lane, (name, (_, order)) in enumerate(SERVED.items()):
        for at, (me, what) in enumerate(order * tiles):
            ink = lab.colour(INKS[CONSUMERS[me]])
            axes.barh(lane, 1, 0.7, at, color=ink, edgecolor="white")
            axes.text(at + 0.5, lane, f"${what}$", fontsize=10, **WHITE)
        if name != "rung 1" and name in gains:
            said = f"{100 * gains[name]:+.1f} %".replace("-", "\N{MINUS SIGN}")
            names[lane] += f"\n{said}"  # at the left, where a phone shows it
    axes.set_yticks(range(len(SERVED)), names, fontsize=10)
    axes.set(xlim=(0, 4 * tiles), ylim=(len(SERVED) - 0.5, -0.5), xticks=[])
    axes.set_xlabel("order on the matmul units; idle time left out", fontsize=10)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


lab.draw(
    alternating,
    "Whom the units serve, and the gain over rung 1",
    served_in_words,
    draw_served,
)

# %%

# Reading
of_early, of_late, of_turns, of_rung_2 = over_rung_1.values()
promised = in_step / apart_1 - 1  # by a late start or turns, in the model
part = of_turns / of_rung_2 if SCATTER < of_turns < of_rung_2 else nan
refuted = locks and of_late < min(of_early, promised / 2)
if tested:
    assert part > 0.5  # as the summary says
by_turns = lab.read(
    (
        "**With turns alone, rung 1 reaches "
        + ("more than half" if 0.5 < part < 0.75 else f"{100 * part:.0f} %")
        + " of rung 2's gain.** "
        if part == part
        else f"Against rung 1, we measured {verdict(of_turns)} in turns and {verdict(of_rung_2)} "
        "on rung 2. "
    )
    + "But a turn also joins a sum to the next scores, so this test does not isolate alternation."
    if tested
    else "The recorded run does not include this test."
)
the_rest = (
    lab.read(
        "The rest is **unexplained**. We suspected that rung 1's consumers fall into step, but "
        "where one of them starts late, our model of this predicts a gain of "
        f"{100 * promised:.0f} %, and we measured {100 * of_late:.0f} %."
        if refuted
        else "The rest is **unexplained**."
    )
    if tested
    else None
)
lab.together(by_turns, the_rest)

# %%

# Folded: Is it lockstep? A model, and the test that refutes it
weigh_together = both_at(traced.rows, "two roles", [("scores", "weighed")])
the_model = lab.read(
    "**The model.** On the timeline of rung 1, with two visits per tile, both consumers weigh "
    f"together for {100 * weigh_together:.0f} % of their weighing. We call this lockstep. If it "
    "costs the time, rung 1 must become faster when its consumers alternate."
)
its_terms = lab.read(
    "In the model, two consumers wait in line for the units and pause after each request. "
    "`requests` lists those of one tile, as (cycles of matmuls, cycles of the pause after them), "
    "and consumer 1 begins `late` cycles after consumer 0:"
)
its_code = lab.source(cycles_per_tile)
its_pauses = lab.read(
    f"Rung 1's timeline gives its two pauses: {after_scores:,.0f} cycles after the scores and "
    f"{after_sum:,.0f} after the sum, each up to the next issue. For rung 2 we merge the requests "
    "and add the pauses. The figure above shows what follows."
)
its_figure = lab.draw(
    traced,
    "The model: two visits can fall into lockstep",
    model_in_words,
    draw_model,
)
its_findings = lab.read(
    (
        "**In the model, two visits let the consumers fall into lockstep, and one visit does "
        "not.** If rung 1's consumers start together, they stay in step: both weigh at the same "
        f"time, and the units are idle. If they start {STARTS[2]:,} cycles apart, they alternate, "
        "and two visits "
        + (
            "cost no more than one. "
            if apart_1 < together_2 + 5
            else "cost less than in step. "
        )
        if locks
        else f"On rung 1 each consumer waits in line for {in_line_1:,.0f} cycles per tile. "
    )
    + (
        "With one visit they alternate, whenever we let consumer 1 begin. "
        if from_any_start
        else ""
    )
    + (
        f"In the model, rung 2 is {100 * in_model:.1f} % faster than rung 1, as in the timelines. "
        if abs(in_model - (at_one / at_two - 1)) < 0.001
        else f"In the model, rung 2 is {100 * in_model:.1f} % faster than rung 1, and in the "
        f"timelines {100 * (at_one / at_two - 1):.1f} %. "
    )
    + (
        "For the forced order, however, the model is wrong: it predicts "
        f"{together_5:,.0f} cycles per tile, and the timeline shows {at_five:,.0f}."
        if together_5 < (1 - SCATTER) * at_five
        else ""
    )
    if traced.rows
    else f"{nan}"
)
how_tested = (
    lab.read(
        "**The test.** We tried to make rung 1 alternate in two ways: consumer 1 begins late, or "
        "the consumers take turns, each issuing its sum and its next scores before the other does. "
        "We did not trace whether they alternate after a late start."
    )
    if tested
    else None
)
in_test = (
    lab.table(
        [in_the_test(name, *of_test) for name, of_test in OF_TEST.items()],
        "Gain over rung 1, all timed again in one run: length 4,096, without a mask",
    )
    if tested
    else None
)
tiles_of_keys = 4096 // 128
what_test_says = (
    lab.read(
        (
            "In the model, only the long delay helps, and it brings "
            f"{100 * promised:.1f} %; measured, it brings {100 * of_late:.1f} %, and the short one "
            f"{100 * of_early:.1f} %. The long delay itself, which the model's rates leave out, is "
            f"{100 * STARTS[2] / (tiles_of_keys * by_version['two roles']):.1f} % of the time of a "
            f"program's {tiles_of_keys} tiles, too little to close the gap. The model is therefore "
            "refuted. "
            if refuted
            else f"A start {STARTS[2]:,} cycles late brings {verdict(of_late)}, and one "
            f"{STARTS[1]:,} cycles late {verdict(of_early)}. "
        )
        + "Turns do not isolate lockstep either, because a turn also joins a sum to the next "
        "scores."
    )
    if tested
    else None
)
lab.together(
    the_model,
    its_terms,
    its_code,
    its_pauses,
    its_figure,
    its_findings,
    how_tested,
    in_test,
    what_test_says,
)

# %%

# Folded: The timelines of rungs 1, 2 and 5 in numbers
of_rung_1 = lab.read(
    f"**Rung 1.** A tile takes {by_version['two roles']:,.0f} cycles, and its matmuls take "
    f"{ideal:,.0f}. After its sum, a consumer is away for {after_sum:,.0f} cycles, and the other's "
    f"sum takes {half:,.0f}."
)
of_rung_2_timeline = lab.read(
    f"**Rung 2.** A tile takes {by_version['scores ahead']:,.0f} cycles, so the units are idle for "
    f"{100 * idle_units(traced.rows, 'scores ahead'):.0f} % of the time. From its dashed line to "
    f"its next scores, a consumer is away for {took_2 - ideal / 2:,.0f} cycles, and the other's "
    f"two matmuls fill only {ideal / 2:,.0f} of them. The two consumers begin to weigh at least "
    f"{apart(earliest, 'scores ahead', 'earliest'):,.0f} cycles apart, if both matmuls of a "
    "consumer end as computed."
    + (
        " With stamps, too, all exponentials come after both waits."
        if as_stamped.get(BEFORE) == 0
        else ""
    )
)
of_rung_5 = lab.read(
    f"**Rung 5.** A consumer weighs for {weighs_5:,.0f} cycles, and its sum runs for at least the "
    f"first {overlap:,.0f} of them, if the units serve in order, as in the computed row. "
    + (
        "For most of the rest, the units work for the other consumer, as on rung 2. "
        if for_other > (1 - overlapping) / 2
        else ""
    )
    + (
        "The consumers hardly ever issue at the same time, even without turns."
        if both_at(traced.rows, "no turns", [("begins", "issued")]) < 0.02
        else ""
    )
)
how_far_to_trust = lab.read(
    "The computed row is only a sketch: on average, rung 5's consumers see their scores "
    f"{scores_seen:.0f} cycles later than the row says. "
    + (
        f"With stamps, a tile takes {took_5:,.0f} cycles on rung 5 and {took_2:,.0f} on rung 2, "
        "but in the ladder the two are level without a mask. Idle shares therefore cannot rank the "
        "rungs."
        if faster_with_stamps
        else ""
    )
)
lab.together(of_rung_1, weighing_1, of_rung_2_timeline, of_rung_5, how_far_to_trust)

# %%
# Rungs 4 to 6: small changes
# ---------------------------
#
# - **Rung 4, one loop.** Up to rung 3, a causal kernel has a loop for masked tiles and another for
#   the rest. Now a branch asks whether the mask cuts the tile. Without a mask, nothing changes.
# - **Rung 5, row sums in threads.** The 128 weights of a query lie in four threads. Each now adds
#   up its own 32, and the four parts meet only after the loop, which saves
#   :term:`shuffles <shuffle>`.
# - **Rung 6, turns.** A consumer waits at a :term:`named barrier` before it issues its two matmuls,
#   and then lets the other issue. FlashAttention-3 calls this :term:`ping-pong scheduling`.

# %%


# Measuring
RATES = {  # per SM and cycle, and the instruction
    "exponential": (16, "MUFU"), "maximum": (64, "FMNMX"), "conversion": (64, "F2FP"),
    "multiply-add": (128, "FFMA"), "sum": (128, "FADD"), "multiplication": (128, "FMUL"),
}  # fmt: skip


def instructions():
    inputs = (*draw(1, 16, 1024, 128), False)
    ((_, compiled),) = lab.compiled_by(lambda: run(*inputs, **so_far))
    code = " ".join(between_waits(machine_code(compiled)))
    rows = []
    for what, (rate, word) in RATES.items():
        count = len(re.findall(rf"\b{word}\b", code))
        row = {
            "instruction": what,
            "SASS": word,
            "per thread": count,
            "per cycle of an SM": rate,
        }
        rows.append(row | {"cycles of an SM": round(256 * count / rate)})
    return rows


work = lab.attempt(
    "One iteration of both consumers", instructions if HOPPER else NEEDS_HOPPER
)


busy = {row["instruction"]: row["cycles of an SM"] for row in work.rows}
counted = sum(busy.values()) / 2  # of both consumers, of whom one is meant
weighing = mean_cycles(traced.rows, "turns", "scores", "weighed")
for_sum = mean_cycles(traced.rows, "turns", "weighed", "sum")
contended = both_at(earliest, "turns", away("turns"))
until_scores = mean_cycles(traced.rows, "turns", "begins", "scores")
comes_back = by_version["turns"] - until_scores
shared, spent = counted / (1 - contended / 2), comes_back - for_sum

# %%

# %%
# This is the whole ladder; *full* means without a mask. The last bar is *the package's kernel*,
# which is rung 6 made persistent and extended from multiples of 128 to any length.

# Drawing
already = plt.get_fignums()
ladder = lab.ladder(
    steps,
    "From plain Triton to the package's Gluon kernel",
    ["plain Triton", *RUNGS, "Kernel Book"],
    by="mask",
    where={"seqlen": 4096},
    names={name: f"{number} {name}" for number, name in enumerate(RUNGS, 1)}
    | {
        "a branch": "3 order kept",
        "sums in threads": "5 row sums in threads",
        "Kernel Book": "the package's kernel",
    },
)
for panel in [
    p for n in plt.get_fignums() if n not in already for p in plt.figure(n).axes
]:
    ends = {
        round(bar.get_y() + bar.get_height() / 2): bar.get_width()
        for bar in panel.patches
    }
    panel.grid(visible=False)  # which would cross the numbers
    for label in list(panel.texts):  # with a digit more: the text speaks of small gains
        if (at := label.get_position()[1]) in ends:
            label.remove()
            panel.annotate(
                f"{ends[at]:.1f}", (ends[at], at), (-4, 0), textcoords="offset points",
                ha="right", va="center", fontsize=10, color="white",
                fontweight=label.get_fontweight(),
            )  # fmt: skip
    panel.annotate(
        "cuBLAS", (100, 1), (0, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", fontsize=10, color=MUTED,
    )  # fmt: skip
ladder

# %%

# Reading
if not traced.rows:
    steps.rate("turns", mask="full")  # says why numbers are missing

expected_there = gain("one loop", "causal") > SCATTER > abs(gain("one loop", "full"))
no_effect = all(abs(gain("turns", mask)) < SCATTER for mask in ("full", "causal"))
pay_a_little = all(
    SCATTER < gain("sums in threads", mask) < 0.04 for mask in ("full", "causal")
)
make_up = abs(gain("turns", "full", "scores ahead")) < SCATTER
make_up = make_up and gain("a branch", "full") < -SCATTER
small_changes = lab.read(
    f"**One loop brings {100 * gain('one loop', 'causal'):.1f} % with a causal mask.** Row sums in "
    "threads pay a little with either mask, and turns bring nothing here."
    + (" Without a mask, the three together only make up for what rung 3 lost." if make_up else "")
    if expected_there and pay_a_little and no_effect
    else f"Rung 4 is {of_both('one loop', 'a branch')}; rung 5, "
    f"{of_both('sums in threads', 'one loop')}; rung 6, {of_both('turns', 'sums in threads')}."
)
if steps.rows:  # as the summary says
    assert branch_slower
    assert expected_there
    assert abs(gain("without the branch", "full", "turns")) < SCATTER
    assert gain("without the branch", "causal", "turns") < -SCATTER
what_is_left = (
    lab.read(
        f"Something is left to gain: with the units never idle, a tile would take {ideal:,.0f} "
        f"cycles, and on rung 6's timeline it takes {by_version['turns']:,.0f}."
    )
    if traced.rows and by_version["turns"] > (1 + SCATTER) * ideal
    else None
)
lab.together(small_changes, what_is_left)

# %%

# Measuring
HALVES = {
    "from the issue to its scores": (ideal / 4, until_scores),
    "from the scores to the next issue": (3 * ideal / 4, comes_back),
    "together, a tile of keys": (ideal, by_version["turns"]),
}
PARTS = {
    "needs for the counted instructions, at the rates of an SM": counted,
    "the same, at half the rates while both are away from their matmuls": shared,
    "takes until its next issue, as traced": comes_back,
    "of these, to weigh": weighing,
    "to wait for its sum": for_sum,
    "to rescale and begin anew, with stamps": comes_back - weighing - for_sum,
}


def half_of_tile(part, wanted, took):
    wanted, took = round(wanted), round(took)
    cells = {"if never idle": f"{wanted:,}", "traced": f"{took:,}"}
    return {"a consumer": part} | cells | {"late": f"{took - wanted:,}"}


# %%

# Folded: Where rung 6 loses time, more changes of it, and every version as compiled
with_turns = [
    config is not None and config.take_turns
    for of_lengths in choice.CHOICES.values()
    for _, config in of_lengths
]
about_changes = lab.read(
    (
        "**Rung 4.** Between the two loops Triton repacked the weights; the instructions for this "
        "(`PRMT`) are gone, but we do not know whether they cost the time. "
        if compiled_to("two roles", "permutations")
        == compiled_to("one loop", "permutations")
        else "**Rung 4.** Between the two loops Triton repacked the weights. "
    )
    + (
        "**Turns.** The package's kernel takes them for most shapes, because it was fastest with "
        "them there. "
        if 2 * sum(with_turns) > len(with_turns)
        else ""
    )
    if steps.rows
    else f"{nan}"
)
more_changes = lab.table(
    changes if steps.rows else [],
    "Four changes to rung 6, the package's kernel against it, and two changes to that kernel",
)
no_third_slot = all(
    gain("three stages", mask, "turns") < SCATTER for mask in ("full", "causal")
)
never_idle = lab.read(
    f"The units are idle for {100 * idle_units(traced.rows, 'turns'):.0f} % of the timeline. "
    f"They would never be idle if a consumer needed {ideal:,.0f} cycles for a tile: "
    f"{ideal / 4:,.0f} until its scores are there, and {3 * ideal / 4:,.0f} until it comes back, "
    "while its own sum and the other's two matmuls run. The table compares this with the timeline:"
)
before_scores = lab.read(
    "**Until the scores are there:** by the computed row, they wait in line for only "
    f"{scores_in_line(traced.rows, 'turns'):.0f} cycles. "
    + (
        "The loader asks for keys (▲ in the timeline; ▼ for values) more than a tile ahead"
        if asked_ahead(traced.rows, "turns") > by_version["turns"]
        else "The loader asks for keys (▲ in the timeline; ▼ for values) "
        f"{asked_ahead(traced.rows, 'turns'):,.0f} cycles ahead"
    )
    + (", and a third slot in each ring does not pay." if no_third_slot else ".")
)
after_scores_6 = lab.read(
    f"**After the scores:** weighing and rescaling take {spent:,.0f} cycles. The counted "
    f"instructions need {shared:,.0f}, even if a consumer has only half the rates whenever both "
    "are away from their matmuls. "
    + (
        f"We do not know why it takes {100 * (spent / shared - 1):.0f} % longer."
        if spent > shared
        else ""
    )
)
halves = lab.table(
    [half_of_tile(part, *both) for part, both in HALVES.items()] if traced.rows else [],
    "Rung 6: cycles of a consumer, with stamps",
)
in_parts = lab.table(
    [
        {"from its scores on, a consumer": part, "cycles": f"{took:,.0f}"}
        for part, took in PARTS.items()
    ]
    if traced.rows and work.rows
    else [],
    "Rung 6: cycles of a consumer from its scores on",
)
timeline = lab.draw(
    traced,
    "Rung 6, with the loader",
    in_words("turns"),
    timelines("turns", ("loader", *LANES), 3.2, tiles=3),
)
lab.together(
    timeline,
    never_idle,
    halves,
    before_scores,
    after_scores_6,
    work,
    in_parts,
    about_changes,
    compiled,
    unmasked,
    more_changes,
)

# %%
# Registers for the consumers
# ---------------------------

# Reading
EQUAL = VERSIONS["equal registers"]["REGISTERS"]
OF_TILES = 64 + 64 + 32  # s and acc in float32, p in 16 bits
assert 0.9 * EQUAL < OF_TILES < EQUAL  # hardly any is left
lab.read(
    "All rungs rest on a setting that we have not mentioned yet. With equal shares of the "
    "registers, a consumer's `s`, `acc` and `p` alone nearly fill those of a thread. The loader "
    "needs few, so `gl.warp_specialize`, which starts the roles, gives some of its share to the "
    "consumers:"
)

# %%


# Drawing
def registers_of_thread(axes):
    most = so_far["REGISTERS"]
    for lane, registers in enumerate((EQUAL, most)):
        left = 0
        for name, number, shade in (("s", 64, 1), ("acc", 64, 0.85), ("p", 32, 0.7)):
            look = {"color": lab.colour("Kernel Book"), "alpha": shade, "edgecolor": "white"}
            axes.barh(lane, number, 0.7, left, **look)
            axes.text(left + number / 2, lane, f"{name}  {number}", fontsize=10, **WHITE)
            left += number
        axes.barh(lane, registers - left, 0.7, left, color=MUTED, alpha=0.15)
        beside = registers - left < 20  # too narrow for its text
        at, side = (registers + 3, "left") if beside else ((left + registers) / 2, "center")
        axes.text(at, lane, f"{registers - left} left", fontsize=10, va="center", ha=side)
    named = [f"equal: {EQUAL}", f"unequal: {most}"]
    axes.set_yticks(range(2), named, fontsize=10)
    axes.set(xlim=(0, most + 2), ylim=(1.5, -0.5), xlabel="registers of a consumer's thread")
    axes.grid(False)


lab.sketch(
    "What a consumer's thread keeps in registers",
    f"Two bars. Of {EQUAL} registers, s fills 64, acc 64 and p 32, so {EQUAL - OF_TILES} are left. "
    f"Of {so_far['REGISTERS']}, {so_far['REGISTERS'] - OF_TILES} are left.",
    registers_of_thread,
    height=1.9,
)

# %%


def waits_of(name):
    """How often the machine code of a version waits per matmul, which is 8 instructions."""
    matmuls, waits = (
        compiled_to(name, what) for what in ("matmul instructions", "waits for them")
    )
    return f"{8 * waits / matmuls:.0f}"


def with_registers(name, registers):
    row = {"registers of a thread": registers}
    for mask in ("full", "causal"):
        row[f"{mask}, % of cuBLAS"] = f"{100 * steps.share(name, mask=mask):.1f}"
    return row | {"waits per matmul": waits_of(name)}


lab.table(
    [
        with_registers("turns", "consumer 240, loader 24"),
        with_registers("equal registers", "168 each"),
    ]
    if steps.rows
    else [],
    "Rung 6, with unequal and with equal shares of the registers",
)

# %%

# Reading
halved = steps.rate("turns", mask="full") / steps.rate("equal registers", mask="full")
spilled = compiled_to("equal registers", "spills")
one_by_one = waits_of("equal registers") == "8"
twice_as_fast = lab.read(
    "**Without a mask, unequal shares make the kernel "
    + ("twice" if round(halved, 1) in (2, 2.1) else f"{halved:.1f} times")
    + " as fast,** the largest effect in this chapter."
)
two_causes = (
    lab.read(
        "With equal shares, the machine code waits after each of a matmul's 8 instructions, so "
        "that no matmul is asynchronous. It also spills registers to memory."
    )
    if one_by_one and spilled > 0
    else None
)
lab.together(twice_as_fast, two_causes)

# %%

# Folded: How the registers and the matmuls are counted
shares_of_registers = lab.read(
    "An SM has 65,536 registers for a program's 384 threads (the loader's warp counts as four, "
    f"because registers are handed out per warpgroup): {65_536 // 384 // 8 * 8} each, rounded down "
    "to a multiple of 8. In a consumer, `s` and `acc` take 64 per thread each, and `p` another 32."
)
per_matmul = (
    lab.read(
        "The matmuls are counted in the machine code with a causal mask. The two consumers have "
        "four matmuls each, of 8 instructions: the first scores, the two of the loop, and the last "
        f"sum. That makes 64 instructions, with {compiled_to('turns', 'waits for them')} waits at "
        f"240 registers and {compiled_to('equal registers', 'waits for them')} at 168. The "
        f"compiler reports {spilled} spilled values at 168."
    )
    if compiled_to("turns", "matmul instructions") == 64
    and compiled_to("turns", "waits for them") == 8
    else None
)
lab.together(shares_of_registers, per_matmul)

# %%
# Persistent programs, in pairs
# -----------------------------
#
# Only one program fits on an SM, because it takes nearly all registers and most of the shared
# memory. So nothing is computed there while it ends and the next begins. A :term:`persistent`
# program instead computes one tile of queries after another.
#
# With a causal mask, later queries see more keys. *In pairs*, a program takes a long tile and then
# the short one that makes the total equal. In the figure, a bar is a tile of queries, and its
# number how many tiles of keys it sees:


# Measuring
lengths = [8, 7, 6, 5, 4, 3, 2, 1]  # of tiles of queries, in tiles of keys
programs = 4
every_fourth = [(lengths[p], lengths[p + programs]) for p in range(programs)]
in_pairs = [(lengths[p], lengths[-1 - p]) for p in range(programs)]


def shares_of_programs(*panels):
    shades = (1, 0.7)  # of one colour: both are the same kind of work
    ways = {"tiles in order": every_fourth, "in pairs": in_pairs}
    for axes, (name, tiles) in zip(panels, ways.items(), strict=True):
        for program, (first, second) in enumerate(tiles):
            for left, length, shade in (
                (0, first, shades[0]),
                (first, second, shades[1]),
            ):
                axes.barh(
                    program, length, 0.8, left, color=lab.colour("Kernel Book"),
                    alpha=shade, edgecolor="white",
                )  # fmt: skip
                text = {"ha": "center", "va": "center", "color": "white"}
                axes.text(left + length / 2, program, str(length), fontsize=10, **text)
        longest = max(map(sum, tiles))
        axes.set(xlim=(0, 12.4), xticks=range(0, 13, 3), xlabel="tiles of keys")
        named = [f"program {program}" for program in range(programs)]
        axes.set_yticks(range(programs), named if axes is panels[0] else [])
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{name}: ends after {longest}", fontsize=11)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines["left"].set_visible(False)


# %%

# Drawing
lab.sketch(
    "Four persistent programs, causal",
    "Bars of eight tiles of queries, one row per program. In order: 8 and 4, 7 and 3, 6 and 2, 5 "
    "and 1 tiles of keys, so the last program ends after 12. In pairs: 8 and 1, 7 and 2, 6 and 3, "
    "5 and 4, so all end after 9.",
    shares_of_programs,
    panels=2,
    height=2.4,
)

# %%


def in_ladder(called, name):
    row = {"kernel": called}
    for mask in ("full", "causal"):
        row[f"{mask}, %"] = f"{100 * steps.share(name, mask=mask):.1f}"
    return row


PERSISTENT = {
    "rung 6": "turns",
    "package: one program per tile": "a program per tile",
    "package: persistent, tiles in order": "persistent",
    "package: persistent, in pairs if causal": "Kernel Book",
}
lab.table(
    [in_ladder(*both) for both in PERSISTENT.items()] if steps.rows else [],
    "Rung 6 and the package's kernel: % of cuBLAS",
)

# %%

# Reading
in_order_gains = gain("persistent", "full", "a program per tile")
in_order_loses = gain("persistent", "causal", "a program per tile")
in_pairs_gain = gain("Kernel Book", "causal", "a program per tile")
slower_per_tile = all(
    gain("a program per tile", mask, last) < -SCATTER for mask in ("full", "causal")
)
still_faster = all(gain("Kernel Book", mask, last) > 0 for mask in ("full", "causal"))
if steps.rows:  # as the open questions say
    assert slower_per_tile
persistence = lab.read(
    "**Persistence pays where all programs get about the same work:** without a mask, because all "
    "tiles of queries are equally long, and with a causal mask only in pairs."
    if min(in_order_gains, in_pairs_gain) > SCATTER and in_order_loses < -SCATTER
    else f"A persistent kernel brings {verdict(in_order_gains)} without a mask; with a causal mask "
    f"it brings {verdict(in_order_loses)} with the tiles in order and {verdict(in_pairs_gain)} in "
    "pairs."
)
against_rung_6 = lab.read(
    "Against rung 6, the package's kernel gains little, because with one program per tile it is "
    "slower than rung 6."
    if slower_per_tile and still_faster
    else "Against rung 6, the package's kernel is "
    + of_both("Kernel Book", last).replace("no difference", "level")
    + "."
)
lab.together(persistence, against_rung_6)

# %%
# The package's kernel: checks, speed and cost
# --------------------------------------------
#
# The package's kernel runs as ``attention(..., backend="gluon")``. On Hopper, in 16 bits, it is the
# default wherever we measured it to be faster than plain Triton.


# Measuring
def configuration(head_dim, mask, longest, config):
    row = {"head_dim": head_dim, "mask": mask}
    row["keys up to"] = "any" if longest == float("inf") else f"{longest:,}"
    if config is None:
        return row | {"kernel": "plain Triton"}
    row |= {"kernel": "in Gluon", "consumers": config.consumers, "keys": config.block_n}
    row |= {"stages": config.stages, "turns": "yes" if config.take_turns else "no"}
    row["persistent"] = "yes" if config.persistent else "no"
    registers, of_loader = choice.REGISTERS[config.consumers]
    return row | {"registers": f"{registers}, loader {of_loader}"}


# the longest row first, so that the table has all columns
choices = [
    configuration(*key, *chosen)
    for key, of_lengths in choice.CHOICES.items()
    for chosen in of_lengths
]
cut_as = lab.table(
    sorted(choices, key=len, reverse=True),
    "What was fastest as a whole, with or without turns, and how the Gluon kernel is cut",
)

# %%


# Measuring
MASKS = {"full": (False, None), "causal": (True, None), "window": (False, (70, 40))}


def package(q, k, v, is_causal, backend, window=None):
    """The output and lse of one of the package's two kernels, with grouped heads."""
    return attention(
        q, k, v, is_causal=is_causal, window=window, enable_gqa=True, return_lse=True,
        backend=backend,
    )  # fmt: skip


def every_case():
    for head_dim in (64, 128):
        for mask in MASKS:
            for n_q, n_k in ((1, 127), (65, 193), (777, 1001)):
                dtypes = (torch.bfloat16, torch.float16)
                for dtype in dtypes[: 1 + (mask == "causal")]:
                    sizes = (2, 6, 2, n_q, n_k, head_dim)
                    yield from case_of_kernel(sizes, dtype, mask)


def case_of_kernel(sizes, dtype, mask):
    is_causal, window = MASKS[mask]
    q, k, v = drawn(sizes, dtype)
    ours, lse = package(q, k, v, is_causal, "gluon", window)
    scale = sizes[-1] ** -0.5
    truth, true_lse = reference.attention(q, k, v, is_causal, scale, window)
    theirs = by_pytorch(q, k, v, is_causal, window)
    what = f"{sizes}, {mask}"
    yield lab.Case(what, "forward", ours, theirs, truth)
    # Where a query sees few keys, lse is hardly more than a score, whose products the matmul units
    # add up with truncation: so it may err by 24 times the rounding to float32.
    yield lab.Case(what, "lse", lse, true_lse.float(), true_lse, factor=24)


right = lab.check("The package's kernel", every_case(), here=HOPPER)

# %%


# Measuring
def again_and_beside():
    rows = []
    for head_dim in (64, 128):
        for mask in ("full", "causal"):
            is_causal, _ = MASKS[mask]
            q, k, v = drawn((2, 6, 2, 1501, 1501, head_dim), torch.bfloat16)
            launches = 200
            out, lse = package(q, k, v, is_causal, "gluon")
            plain, plain_lse = package(q, k, v, is_causal, "triton")
            differ = 0
            for _ in range(launches):
                repeated, _ = package(q, k, v, is_causal, "gluon")
                differ += not torch.equal(out, repeated)
            truth, _ = reference.attention(q, k, v, is_causal)
            case = lab.Case("", "forward", out, plain, truth)
            if differ or not case.row()["ok"]:
                raise lab.CheckFailed(
                    f"{head_dim}, {mask}: {differ} differ; {case.row()}"
                )
            row = {"head_dim": head_dim, "mask": mask, "error": case.row()["error"]}
            row["plain Triton's error"] = case.row()["torch_error"]
            row["difference in lse"] = (lse - plain_lse).abs().max().item()
            rows.append(row | {"launches": launches, "with other bits": differ})
    return rows


# %%

# Measuring
repeated = lab.attempt(
    "Beside plain Triton, length 1,501, and repeated",
    again_and_beside if HOPPER else NEEDS_HOPPER,
)

# %%


# Measuring
def soak(at_most=10_000, seconds=25):
    generator = torch.Generator().manual_seed(0)
    begin, shapes, wrong, most, number = time.time(), set(), 0, 0, 0
    while number < at_most and time.time() - begin < seconds:
        # odd, so that few kernels are compiled; all else is drawn
        n_q, n_k = (2 * torch.randint(1, 900, (2,), generator=generator) + 1).tolist()
        head_dim = (64, 128)[number % 2]
        is_causal = bool(torch.randint(2, (1,), generator=generator))
        q, k, v = drawn((2, 6, 2, n_q, n_k, head_dim), torch.bfloat16)
        out, _ = package(q, k, v, is_causal, "gluon")
        shapes.add((n_q, n_k, head_dim, is_causal))
        if number % 10 == 0:
            plain, _ = package(q, k, v, is_causal, "triton")
            apart = (out.float() - plain.float()).norm() / plain.float().norm()
            wrong += not apart < 0.01
        most = max(most, n_q, n_k)
        number += 1
    torch.cuda.synchronize()
    if wrong:
        raise lab.CheckFailed(
            f"{wrong} launches of the soak test differ from plain Triton."
        )
    row = {"launches": number, "shapes": len(shapes), "longest": most}
    return [row | {"finished": number, "seconds": round(time.time() - begin, 1)}]


# %%

# Measuring
soaked = lab.attempt("Launches of random shapes", soak if HOPPER else NEEDS_HOPPER)

# %%

# Folded: The package's kernel whole, its tiles and roles by shape, and every check
whole = lab.listing(
    {
        "A persistent program goes from one tile of queries to the next without a stop; the loop "
        "of a consumer has the same three steps": hopper.consume,
        "The loader fetches whatever any consumer of the program sees; a consumer gives back, "
        "unread, the tiles that it does not see itself": hopper.load,
        "How a consumer weighs": hopper.weigh,
        "The kernel": hopper.attention_hopper_fwd_kernel,
    }
    | ({"How it shares out the work": hopper.share} if hasattr(hopper, "share") else {})
)
named = lab.read(
    "The checks cover odd lengths, grouped heads, causal masks and windows. An input is named by "
    "its (batch, heads, heads of keys, queries, keys, head_dim). `lse` is the logsumexp of each "
    "query, which the kernel returns in float32."
)
every_tenth = lab.read(
    "Of the launches with random shapes, every tenth was compared with plain Triton. The test "
    "fails if one of these differs by 1 % of its size or more; none did."
)
lab.together(cut_as, named, right, repeated, soaked, every_tenth, whole)

# %%

# Reading
launched, other_bits = (
    sum(row[what] for row in repeated.rows) if repeated.rows else nan
    for what in ("launches", "with other bits")
)
ended = soaked.rows[0] if soaked.rows else {}
number_of, finished = (ended.get(what, nan) for what in ("launches", "finished"))
said = right.plain.split("\n")[0].partition(": ")[2].rstrip(".")
passed, where, of_run = said.partition(" on ")
lab.read(
    f"Against float64, **{passed}**{where}{of_run.partition(', the worst')[0]}. A kernel that "
    f"lacks a barrier can be right many times and then wrong once, so we repeated {launched:,} "
    "launches, and "
    + (f"{other_bits} gave other bits. " if other_bits else "all gave the same bits. ")
    + (
        f"All {number_of:,} launches with random shapes finished. "
        if number_of == finished
        else f"Of {number_of:,} launches with random shapes, {finished:,} finished. "
    )
    + "This makes a missing barrier unlikely but does not rule it out."
)

# %%
# Each row compares with the faster of cuDNN (called through PyTorch's SDPA) and FlashAttention 4
# (FA 4); version 3, which was written for Hopper, was not available. A filled dot is what the
# package chooses by itself.


# Measuring
def share_of_library(row):
    """The share of the speeds as the table prints them."""
    whole = row["its speed"] == row["its speed"]
    return round(row["by default"]) / round(row["its speed"]) if whole else nan


def with_fewer_lines(sweep):
    """A sweep without the line that lies under that of Kernel Book; the table below has it."""
    kept = [name for name in sweep.providers if name != "in Gluon"]
    others = [with_fewer_lines(other) for other in sweep.elsewhere]
    return replace(sweep, providers=kept, elsewhere=others)


lines = with_fewer_lines(speed)
CALLED = {"SDPA cuDNN": "cuDNN", "FlashAttention": "FlashAttention 4"}
SHORT = {"SDPA cuDNN": "cuDNN", "FlashAttention": "FA 4"}
SEEN = {  # how each is drawn, the smaller above the larger
    "Kernel Book": {"marker": "o", "s": 64, "zorder": 3},
    "in Gluon": {"marker": "o", "s": 52, "zorder": 3, "facecolors": "none"},
    "plain Triton": {"marker": "v", "s": 40, "zorder": 4},
}
IN_LEGEND = {"in Gluon": "Gluon, not chosen"}
NOT_TAKEN = {  # where the package takes plain Triton, which then has no mark of its own
    (row["head_dim"], row["mask"], row["length"])
    for row in at_points
    if row["chosen"] == "plain"
}


def of_the_fastest(rows):
    """The share of the fastest library that each has, by point."""
    rates = {}
    for row in rows:
        at = row["head_dim"], row["mask"], row["seqlen"]
        rates.setdefault(at, {})[row["provider"]] = row["rate"]
    kept = {}
    for point in points(LENGTHS, (128, 64)):
        at = point["head_dim"], point["mask"], point["seqlen"]
        has = rates.get(at, {})
        if best := max((has.get(name, 0) for name in PEERS), default=0):
            hidden = "plain Triton" if at in NOT_TAKEN else "in Gluon"
            kept[at] = {
                name: 100 * round(has[name]) / round(best)  # as in the table
                for name in SEEN
                if name in has and name != hidden
            }
    return kept


def faster_library(rows):
    """The fastest library at each point."""
    best = {}
    for row in rows:
        at = row["head_dim"], row["mask"], row["seqlen"]
        if row["provider"] in PEERS and row["rate"] > best.get(at, (0,))[0]:
            best[at] = row["rate"], row["provider"]
    return {at: name for at, (_, name) in best.items()}


def beside_in_words(rows):
    faster = faster_library(rows)
    of_points = "; ".join(
        f"head_dim {head_dim}, {mask}, {seqlen:,}, {SHORT[faster[head_dim, mask, seqlen]]}: "
        + ", ".join(f"{name} {share:.0f}" for name, share in has.items())
        for (head_dim, mask, seqlen), has in of_the_fastest(rows).items()
    )
    return f"Marks in rows, % of the fastest library. {of_points}."


def inked(name, look):
    """The look of a mark with its colour; a hollow one has only an edge."""
    if "facecolors" in look:
        return look | {"edgecolors": lab.colour("Kernel Book"), "linewidths": 1.4}
    return look | {"color": MUTED if name == "plain Triton" else lab.colour(name)}


def beside_libraries(axes, rows):
    axes.figure.set_size_inches(5.4, 4.8)
    groups, ys, labels, farthest = {}, [], [], [100]
    faster = faster_library(rows)
    for at, has in of_the_fastest(rows).items():
        if at[:2] not in groups:  # a line of its own names the group
            groups[at[:2]] = ys[-1] + 2 if ys else -1
            ys.append(groups[at[:2]] + 1)
        else:
            ys.append(ys[-1] + 1)
        labels.append(f"{at[2]:,}")
        farthest += has.values()
        for name, look in SEEN.items():
            if name in has:
                axes.scatter(has[name], ys[-1], **inked(name, look))
        axes.annotate(
            SHORT[faster[at]], (1, ys[-1]), (5, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9.5, color=MUTED,
        )  # fmt: skip
    for (head_dim, mask), y in groups.items():
        axes.annotate(
            f"head_dim {head_dim}, {mask}", (0, y), (-4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=10.5, color=MUTED,
        )  # fmt: skip
    for name, look in SEEN.items():
        label = IN_LEGEND.get(name, name)
        axes.scatter([], [], label=label, **inked(name, look))
    axes.axvline(100, color=MUTED, linestyle="--", linewidth=1)
    axes.set_yticks(ys, labels)
    least = min(70, 5 * int(min(farthest) / 5))
    axes.set(xlim=(least, max(farthest) + 2), ylim=(max(ys, default=1) + 0.7, -1.6))
    axes.set_xlabel(f"% of the faster library's speed; begins at {least}")
    axes.grid(axis="both", visible=True)


lab.draw(
    speed, "Forward of 16,384 tokens, by length", beside_in_words, beside_libraries
)


# %%

# Folded: All points in TFLOP/s
without_mask = lab.plot(
    lines, "head_dim 128, full", where={"head_dim": 128, "mask": "full"}, names=CALLED
)
with_mask = lab.plot(
    lines,
    "head_dim 128, causal",
    where={"head_dim": 128, "mask": "causal"},
    names=CALLED,
)
slower = [row for row in at_points if row["in Gluon"] < (1 - SCATTER) * row["plain"]]
takes_plain = bool(slower) and {
    (row["head_dim"], row["mask"], row["chosen"]) for row in slower
} == {(64, "causal", "plain")}


def lines_of_kernel(module):
    """Lines of the functions of a module that run on the GPU, without empty ones."""
    kernels = [x.fn for x in vars(module).values() if hasattr(x, "fn")]
    own = [kernel for kernel in kernels if kernel.__module__ == module.__name__]
    return sum(
        bool(line.strip())
        for kernel in own
        for line in inspect.getsource(kernel).split("\n")
    )


of_gluon, of_triton = lines_of_kernel(hopper), lines_of_kernel(plain_triton)
length_of_code = lab.read(
    f"The Gluon kernel has {of_gluon:,} lines of GPU code, and plain Triton {of_triton:,}."
)
of_all = lab.table(
    [
        {
            "point": f"{row['head_dim']}, {row['mask']}, {row['length']:,}",
            "share": f"{100 * share_of_library(row):.1f} %",
            "Kernel Book": f"{row['by default']:.0f}",
            "in Gluon": f"{row['in Gluon']:.0f}",
            "plain Triton": f"{row['plain']:.0f}",
            "fastest library": f"{row['its speed']:.0f}, {row['library']}",
        }
        for row in at_points
        if speed.rows
    ],
    "Head_dim, mask and length: Kernel Book's share of the fastest library, and TFLOP/s",
)
lab.together(without_mask, with_mask, of_all, length_of_code)

# %%


# Reading
ahead = [row for row in at_points if share_of_library(row) > 1 + SCATTER]
behind = [row for row in at_points if share_of_library(row) < 1 - SCATTER]
absent = [name for name in PEERS if name in speed.skipped]
at_hand = [CALLED[name] for name in PEERS if name not in absent]
the_library = (
    f"{at_hand[0]}, the only library of this run,"
    if len(at_hand) == 1
    else "the faster library"
)
shares = sorted(map(share_of_library, behind))
level_at = len(at_points) - len(ahead) - len(behind)
if speed.rows and not absent:  # as the introduction and the summary say
    assert len(behind) > len(at_points) / 2
    assert {row["length"] for row in ahead} == {min(LENGTHS)}
    assert all(row in behind for row in at_points if row["length"] == max(LENGTHS))


lab.read(
    (
        f"**Against {the_library} the package is behind in {len(behind)} of {len(at_points)} "
        f"rows,** by at most {100 * (1 - shares[0]):.0f} %, and ahead in {len(ahead)}"
        + ("; in the others they are level." if level_at else ".")
        if behind
        else f"Against {the_library} the package is ahead in {len(ahead)} of {len(at_points)} "
        "rows, and behind in none."
    )
    if speed.rows
    else f"{nan}"
)

# %%

# Reading
worth = [row["in Gluon"] / row["plain"] for row in at_points]

lab.read(
    "**The gain over plain Triton costs code:** the Gluon kernel has "
    f"{of_gluon / of_triton:.1f} times as many lines for the GPU, and is at best "
    f"{max(worth):.1f} times as fast. "
    + (
        f"At head_dim 64 with a causal mask, it is slower in {len(slower)} rows, by up to "
        f"{100 * (1 - min(worth)):.0f} %."
        if takes_plain
        else f"It is slower in {len(slower)} of {len(at_points)} rows."
    )
    if speed.rows
    else f"{nan}"
)

# %%
# **Write such a kernel** when two kinds of work share an SM, your kernel stays well below the speed
# of a matmul, and it runs often enough on one generation of GPUs to repay the work of a second
# version.
#
# **Do not write it** when your kernel must run on other GPUs, or when it waits for memory or has
# only one kind of work, because this loop only overlaps matmuls with other work of the SM.

# %%
# .. dropdown:: What this chapter leaves open
#
#    - Do the programs of plain Triton alternate better than the consumers of rung 1? We did not
#      trace them.
#    - Why is rung 3 slower than rung 2, although its overlap is there? We measured neither what
#      the stamps cost nor the clock, which may be lower where the units are busier.
#    - A turn on rung 1 makes the consumers alternate, joins a sum to the next scores, and adds a
#      wait. Which of these counts?
#    - Why does one loop pay with a causal mask?
#    - With equal registers, how much do the waits cost, and how much the spills?
#    - With one program per tile, why is the package's kernel slower than rung 6? It may pay for
#      taking any length.

# %%
# In short
# --------
#
# - **What pays:** above all more registers for the consumers; then scores one tile ahead, one loop
#   if the mask is causal, and persistent programs with equal work.
# - **What does not pay:** roles alone, forcing the order on rung 3, and turns on rung 6.
# - **Why** running the scores ahead pays is known only in part. It is not the overlap that we
#   planned, because the machine code undid it.
# - **Against libraries:** ahead only at the shortest length, and behind at the longest.
#
# The next chapter, :doc:`/chapters/attention_hopper_backward`, gives roles to the warps of the
# backward pass.
#
# Exercises
# ---------
#
# **1. Does it fit?** A program can use 227 KiB of shared memory. At head_dim 128, in 16 bits, a
# kernel like the package's keeps 64 queries per consumer, an output buffer of the same size, and
# two rings. Registers aside, which of these fit: two consumers with 2 or 3 slots of 128 keys per
# ring, two with 2 slots of 176, or three with 2 slots of 128?

# %%

# Solution: does it fit
rows = []
for consumers, keys, stages in ((2, 128, 2), (2, 128, 3), (2, 176, 2), (3, 128, 2)):
    kib = (2 * 64 * consumers + 2 * stages * keys) * 128 * 2 / 1024
    row = {"consumers": consumers, "keys": keys, "stages": stages}
    rows.append(row | {"KiB": kib, "fits": "yes" if kib <= 227 else "no"})
assert [row["fits"] for row in rows] == ["yes", "no", "no", "yes"]
slots_of_4 = (2 * 64 * 4 + 2 * 2 * 128) * 128 * 2 / 1024
lab.together(
    lab.table(rows, "Shared memory of a program"),
    lab.read(
        "The package's kernel itself would keep 4 slots of queries for three consumers, and as "
        f"many for the output, and so need {slots_of_4:.0f} KiB."
    ),
)

# %%
# **2. Read a timeline.** On rung 2's timeline, read off how many cycles a tile takes; its four
# matmuls take 512 each. How much faster would the loop be if the units were never idle, and how
# much faster at the speed of cuBLAS, by the ladder without a mask?

# %%

# Solution: read a timeline
at_cublas = 1 / steps.share("scores ahead", mask="full") - 1
lab.read(
    "From one `s` of consumer 0 to its next, a tile takes about "
    f"{round(took_2, -1):,.0f} cycles. The matmuls need {ideal:,.0f} of them, so the units are "
    f"idle for {100 * (1 - ideal / took_2):.0f} % of the time. A loop without idle units would be "
    f"{100 * (took_2 / ideal - 1):.0f} % faster. At the speed of cuBLAS, rung 2 would be "
    f"{100 * at_cublas:.0f} % faster."
    + (
        " At the full rate it would thus overtake cuBLAS, which does nothing but a matmul: "
        "the full rate is a bound, and cuBLAS the realistic goal."
        if at_cublas < took_2 / ideal - 1
        else ""
    )
    if traced.rows and steps.rows
    else f"{nan}"
)

# %%
# References
# ----------
#
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
# - NVIDIA. *CUDA C++ programming guide*, throughput of native arithmetic instructions.
# - NVIDIA. *Parallel thread execution*, the instructions ``wgmma``, ``mbarrier``, ``bar`` and
#   ``setmaxnreg``.

# %%

# Closing
of_library = [share_of_library(row) for row in at_points if row["library"] != "none"]
of_matmul = [
    speed.share("Kernel Book", head_dim=128, mask=mask, seqlen=16384)
    for mask in ("full", "causal")
]
reached, limit = (
    (of_library, "the fastest library") if of_library else (of_matmul, "a matmul")
)
lab.finish(f"{min(reached):.0%} to {max(reached):.0%} of the speed of {limit}, forward")
