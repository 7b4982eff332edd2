"""
Forward at the speed of Hopper
==============================

Attention needs matmuls and exponentials, and while a kernel waits for one kind, the units for the
other easily stand idle. *Which loop keeps the matmul units at work, and what is each change to it
worth?*

Picture two cooks who share one oven. While a dish bakes, its cook cannot go on, so the oven is
always in use only if one cook prepares while the other bakes. Here the matmul units are the oven,
and the exponentials are what is to be prepared. We climb to a faster kernel in six rungs, one
change each. Without a mask, one of them brings most of the gain, though not for the reason we wrote
it.

You will learn

- in which order a loop issues its work so that the matmul units wait less, and why this order is
  faster;
- how to check in the machine code (:term:`SASS`), and on a timeline of the :term:`SM`, whether a
  kernel does what you planned;
- when it pays to write such a kernel, beside plain Triton and a fast library.

The kernels are written in :term:`Gluon`, Triton's lower language, and need a Hopper GPU (H100,
H200). Elsewhere this page checks the order of the loop in PyTorch, and replays a recorded run.
"""

# sphinx_gallery_thumbnail_number = 1
import re
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial

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
# Where plain Triton stops
# ------------------------
#
# If matmuls and exponentials took turns, the matmul units would stand idle for a third of the time
# or more. For each score matmuls do :math:`4 D` operations at head_dim :math:`D`, and other units
# compute one exponential. In 16 bits a Hopper SM does 4,096 of the former per cycle, and 16 of the
# latter:


# Drawing
MATMUL_RATE, EXPONENTIAL_RATE = 4096, 16  # operations of an SM per cycle


def cycles(head_dim, rows=128, keys=128):
    """Cycles that the matmuls and the exponentials of one tile take at the full rate."""
    scores = rows * keys
    return scores * 4 * head_dim / MATMUL_RATE, scores / EXPONENTIAL_RATE


def both_orders(axes):
    place, ticks, labels = 0, [], []
    for head_dim in (128, 64):
        matmuls, exponentials = cycles(head_dim)
        for overlap in (False, True):
            start, height = (0 if overlap else matmuls), (0.38 if overlap else 0.76)
            axes.barh(place, matmuls, height, align="edge", color=lab.colour("matmul"))
            axes.barh(
                place + (0.38 if overlap else 0), exponentials, height, start,
                align="edge", color=lab.colour("Kernel Book"),
            )  # fmt: skip
            end = max(matmuls, start + exponentials)
            axes.text(end + 40, place + 0.38, f"{end:,.0f}", va="center", fontsize=10)
            ticks.append(place + 0.38)
            labels.append(f"head_dim {head_dim}, {'at once' if overlap else 'in turn'}")
            place += 1
    for label, ink in (("matmuls", "matmul"), ("exponentials", "Kernel Book")):
        axes.barh(0, 0, color=lab.colour(ink), label=label)
    axes.legend(loc="lower right", fontsize=10)
    axes.set(xlim=(0, 3450), ylim=(place, -0.2), xlabel="cycles of an SM")
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


lab.sketch(
    "A tile of 128 queries and 128 keys",
    "Bars of cycles. At head_dim 128 the matmuls take 2,048 cycles, in grey, and the exponentials "
    "1,024, in blue: 3,072 if one waits for the other, 2,048 if both run at once. At head_dim 64 "
    "both take 1,024: 2,048 in turn, 1,024 at once.",
    both_orders,
    height=2.8,
)

# %%
# The kernel of :doc:`/chapters/attention_fast`, here called *plain Triton*, puts two
# :term:`programs <program>` on an SM, so that one can use the :term:`matmul units <matrix unit>`
# while the other computes exponentials. But who uses them when is left to the SM.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Give each warp a role, and let every consumer issue two matmuls together: the scores of a tile
#    and the sum of the tile before. Then the sum can run while the consumer computes exponentials,
#    and the consumer stops once per tile instead of twice. Which of the two counts?
#
# The roles are those of :doc:`/chapters/warps_with_roles`. A *loader* :term:`warp` fills a ring of
# tiles of keys and a ring of tiles of values. Two *consumers*, each a :term:`warpgroup` with 64
# queries of its own, compute. Each slot of a ring has a ``full`` and an ``empty``
# :term:`barrier <mbarrier>`.

# %%
# The order of the loop
# ---------------------
#
# By letting the scores run one tile ahead, a consumer has exponentials to compute during a matmul.
# Matmuls on Hopper are asynchronous: a warpgroup *issues* one and *waits* for its result later. The
# exponentials of a tile need its scores, but the weighted sum of the tile *before* needs nothing of
# this tile. So iteration :math:`i`
#
# 1. issues the scores :math:`s_i = q k_i^T`, and behind them the sum
#    :math:`acc \mathrel{+}= p_{i-1} v_{i-1}`,
# 2. waits for the scores only, and *weighs* them: it computes :math:`m_i`,
#    :math:`\alpha = e^{m_{i-1} - m_i}` and :math:`p_i = e^{s_i - m_i}`, while the sum is computed,
# 3. waits for the sum, and multiplies ``acc`` by :math:`\alpha`.
#
# At full rates, for the 64 queries of one consumer:


# Drawing
def drawn_loops(axes):
    half, exponentials = cycles(128, rows=64)[0] / 2, cycles(128, rows=64)[1]
    shown = 2.45 * (2 * half + exponentials)
    orders = {
        "in order": (0, half + exponentials, half, 2 * half + exponentials, 0),
        "one tile ahead": (0, half, half, 2 * half, 1),
    }
    for row, (begin, of_sum, weighs, period, behind) in enumerate(orders.values()):
        for i in range(6):
            for lane, start, width, ink, label in (
                (0, begin, half, "matmul", f"$s_{i}$"),
                (0, of_sum, half, "copy", f"$p_{i - behind}\\,v_{i - behind}$"),
                (1, weighs, exponentials, "Kernel Book", f"$p_{i}$"),
            ):
                left = i * period + start
                right = min(left + width, shown)
                if right <= left or "-1" in label:
                    continue
                y = 2.6 * row + lane
                axes.barh(
                    y, right - left, 0.8, left, color=lab.colour(ink), edgecolor="white"
                )
                if right == left + width:
                    text = {"ha": "center", "va": "center", "color": "white"}
                    axes.text((left + right) / 2, y, label, fontsize=11, **text)
    units = ("matmul units", "exponentials")
    ticks = [2.6 * row + lane for row in (0, 1) for lane in (0, 1)]
    axes.set_yticks(ticks, [f"{order}: {unit}" for order in orders for unit in units])
    axes.set(xlim=(0, shown), ylim=(4.2, -0.6), xlabel="cycles of an SM")
    axes.grid(False)


lab.sketch(
    "One consumer, head_dim 128: in order, and one tile ahead",
    "Bars over time. In order, the scores of a tile, its exponentials and its sum follow each "
    "other, 512 cycles each, so a tile takes 1,536. One tile ahead, the sum of the tile before "
    "runs during the exponentials of this one, so from the second tile on a tile takes 1,024 and "
    "the matmul units never wait.",
    drawn_loops,
    height=3,
)

# %%
# One consumer alone saves a third of its time. But the kernel has two, and while one weighs, the
# other can use the units, whichever of the two loops they run.
#
# The rescaling comes after the sum, because :math:`p_{i-1}` was computed with the old maximum. In
# PyTorch, from the last tile of keys to the first (a causal mask then cuts only the first of them):
#
# .. literalinclude:: attention_hopper.py
#    :language: python
#    :pyobject: one_tile_ahead
#    :start-at: p = v_before = None
#    :end-before: return acc
#    :dedent:


# Measuring
def one_tile_ahead(q, k, v, scale, is_causal=False, block_n=32):
    """Attention in the order of the kernel's loop, from the last tile of keys to the first."""
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    seen = seen.tril(n_k - n_q) if is_causal else seen
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


# %%

# Folded: The loop in PyTorch, whole and against float64
lab.check(
    "The order of the loop, in PyTorch", cases_in_pytorch(), stand_in="on the CPU"
)

# %%
# The loop in Gluon
# -----------------
#
# In Gluon the loop has the same three steps and the same names. It begins with both matmuls:
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
# - ``q`` holds the ``ROWS`` = 64 queries of this consumer; ``k_s`` and ``v_s`` are the rings, of
#   ``STAGES`` = 2 slots with ``BLOCK_N`` = 128 keys or values each. All are in shared memory.
#   ``.index(slot)`` takes one slot, or its barrier in ``k_full``. ``permute`` transposes a tile.
# - ``mbarrier.wait`` takes a parity, which flips each time the ring has gone round once:
#   ``(i // STAGES) & 1``.
# - ``s`` are the scores, ``acc`` is the sum so far, and ``p`` the weights of the tile before. All
#   are in registers. ``gl.zeros`` only says what ``s`` looks like, because ``use_acc=False``
#   overwrites it.
#
# Then it weighs, and only after that waits for the sum:
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
# - Matmuls end in the order of their issue, so ``warpgroup_mma_wait(1)``, which waits until only
#   one is under way, waits for the scores. ``mbarrier.arrive`` gives a slot back to the loader.
# - The weights are powers of 2 instead of :math:`e`, so ``scale_log2`` is the scale times
#   :math:`\log_2 e`. With a causal mask, the scores of later keys are set to -inf first.
# - ``convert_layout`` changes which thread holds which element: ``row`` is the layout of one number
#   per query, and that of ``p`` is for the left factor of a matmul.
#
# Around the loop
# ---------------
#
# The loader fills the rings, the last tile of keys first (``of_head`` is the first row of the
# head):
#
# .. literalinclude:: attention_hopper.py
#    :language: python
#    :pyobject: _loader
#    :start-at: for i in range(n + 1)
#    :lines: 1-7
#    :dedent:
#
# In the same iteration it loads the values of tile :math:`i - 1` likewise, because the consumers
# ask for them in this order.
#
# A consumer computes the first scores and the last sum outside the loop, because in an iteration
# they belong to different tiles:
#
# .. code-block:: python
#
#    mbarrier.wait(q_full.index(ME), 0)  # this consumer's queries
#    # -- begin: the scores of the tile that has none before it
#    mbarrier.wait(k_full.index(0), 0)
#    k = k_s.index(0).permute([1, 0])
#    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
#    s = warpgroup_mma_wait(0, deps=[s])
#    mbarrier.arrive(k_empty.index(0))
#    ...  # weigh them, then run the loop for i = 1 to n - 1
#    # -- end: the sum of the last tile
#    slot = (n - 1) % STAGES
#    mbarrier.wait(v_full.index(slot), ((n - 1) // STAGES) & 1)
#    acc = warpgroup_mma(p, v_s.index(slot), acc, is_async=True)
#    acc = warpgroup_mma_wait(0, deps=[acc])
#    # -- write: where the queries were, and from there to the output
#    q.store((acc * gl.convert_layout(1 / l_i, row)[:, None]).to(q.dtype))
#    fence_async_shared()
#    tma_store(out_desc, [of_head + start_m, 0], q)
#    tma.store_wait(0)

# %%
# A ladder of six rungs
# ---------------------
#
# The ladder measures each change by itself: one kernel runs every rung, and each rung turns one
# switch on and keeps those before it.
#
# 1. *two roles*: a loader, and two consumers that do one thing after the other;
# 2. *scores ahead*: the loop above;
# 3. *a branch*, which forces the assembler to keep the order of that loop;
# 4. *one loop* for tiles with and without a mask;
# 5. *sums in threads*: each thread adds up its own part of :math:`l_i`;
# 6. *turns*: the consumers issue one after the other.

# Whole
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
# The yardstick, 100 %, is a :term:`cuBLAS` matmul; the length is 4,096 and head_dim 128. Blue is
# the rung that has most to teach, and the last bar the package's own kernel, a rung 6 for any
# length.

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
lab.ladder(
    steps,
    "From plain Triton to the package's Gluon kernel",
    ["plain Triton", *RUNGS, "Kernel Book"],
    by="mask",
    where={"seqlen": 4096},
    names={name: f"{number} {name}" for number, name in enumerate(RUNGS, 1)}
    | {"Kernel Book": "the package"},
    lit="scores ahead",
)


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


SCATTER = 0.02  # less is no difference: the section on speed has how far two timings are apart


def verdict(change):
    """What a change of the speed is called, if it is more than scatter."""
    if change != change:
        return f"{nan}"
    if abs(change) < SCATTER:
        return "makes no difference"
    return f"{'gains' if change > 0 else 'loses'} {100 * abs(change):.0f} %"


def of_both(after, before):
    """What one version gains over another with each mask, in words."""
    full, causal = (verdict(gain(after, m, before)) for m in ("full", "causal"))
    if full == causal:
        return f"{full} with either mask"
    for verb in ("gains ", "loses "):
        if full.startswith(verb):
            causal = causal.removeprefix(verb)
    return f"{full} without a mask and {causal} with a causal one"


def from_to(low, high, digits):
    low, high = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def told(name):
    """What a rung gains over the one before, in words."""
    return f"**Measured:** it {of_both(name, rung_before(name))}. "


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
    ("persistent", "a program per tile", "that, persistent, every fourth tile"),
    ("Kernel Book", "a program per tile", "that, persistent, in pairs if causal"),
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
NUMBERS = {
    "two roles": 1,
    "scores ahead": 2,
    "no turns": 5,
    "turns": 6,
}  # of the rungs, by their recorded names
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


def units_while_away(rows, version):
    """What the matmul units do while a consumer does all else, in cycles per tile of keys.

    Returns (its own matmuls, the other's, nothing), of all tiles but the first and the last.
    """
    served = list(on_units(rows, version))
    own = other = spent = tiles = 0
    for row in rows:
        inside = SPAN[0] < row["tile"] < SPAN[-1]
        if row["version"] != version or row["role"] not in CONSUMERS or not inside:
            continue
        tiles += 1
        for a, b in away(version):
            spent += row[b] - row[a]
            for begin, end, role, _, _ in served:
                both = max(0, min(row[b], end) - max(row[a], begin))
                own += both * (role == row["role"])
                other += both * (role != row["role"])
    found = (own, other, spent - own - other)
    return [cycles_there / tiles for cycles_there in found] if tiles else [nan] * 3


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
    "The section on speed times the package's choice twice, under two names, and at "
    f"{close} of {len(twice)} points the two are closer than {100 * SCATTER:.0f} %; at most they "
    f"are {100 * max(twice):.1f} % apart. At the length of the ladder, plain Triton and the "
    f"package's kernel were timed in both figures, at most {100 * max(both_figures):.1f} % apart."
    if speed.rows and steps.rows
    else f"{nan}"
)
lab.together(all_right, in_two_timings)

# %%

# Reading
most = {
    mask: max((gain(name, mask), number) for number, name in enumerate(LADDER, 1))
    for mask in ("full", "causal")
}
full_most, causal_most = (f"{number} ({100 * g:.0f} %)" for g, number in most.values())
lab.read(
    f"The largest gains are rung {full_most} without a mask and rung {causal_most} with a causal "
    f'one. Below, less than {100 * SCATTER:.0f} % counts as "no difference": at '
    + (
        f"all {len(twice)} points two timings of one kernel were closer than that."
        if close == len(twice)
        else f"{close} of {len(twice)} points two timings of one kernel were closer than that, and "
        + (
            f"at one {100 * max(twice):.1f} % apart."
            if len(twice) - close == 1
            else f"at most they were {100 * max(twice):.1f} % apart."
        )
    )
    if speed.rows and steps.rows
    else f"{nan}"
)

# %%
# Rung 1: two roles
# -----------------
#
# Do the consumers work like our two cooks? **The change:** a loader loads, and two consumers share
# the matmul units. Each issues its scores and waits for them, weighs, issues its sum and waits for
# that. **Expected:** a gain, because one cook can prepare while the other bakes.

# Reading
lab.read(told("two roles"))

# %%
# To see why the expected gain is missing, we let the consumers of one program take *stamps*. A
# stamp stores the cycle counter of the SM, for each role, iteration and event of the loop:
#
# .. code-block:: python
#
#    @gluon.jit
#    def stamp(trace_ptr, role, i, event, n):
#        now = gl.inline_asm_elementwise(
#            "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)],
#            dtype=gl.int32, is_pure=False, pack=1,
#        )
#        at = trace_ptr + (role * n + i) * EVENTS + event
#        gl.store(at, now, mask=gl.program_id(0) == 0)

# Reading
lab.read(
    "Stamps slow rungs differently, so a timeline shows what happens at the same time, and only "
    "the ladder how fast a rung is."
    + (
        " (Plain Triton takes no stamps, so why it is faster without a mask stays open.)"
        if gain("two roles", "full") < -SCATTER
        else ""
    )
    if steps.rows
    else f"{nan}"
)

# %%
# A consumer's bar is grey or orange from the issue of a matmul to its result, and blue otherwise;
# the number in a blue bar is the tile of keys. The lowest row is computed: it serves the matmuls in
# the order of their issue, each for 512 cycles, the full rate.


# Drawing
WHITE = {"ha": "center", "va": "center", "color": "white"}


def draw_units(axes, rows, version, place, start, window):
    """Draw the matmuls of a version on the units, and where these are idle."""
    last = 0
    for begin, end, role, what, _ in on_units(rows, version):
        begin, end = max(begin - start, 0), min(end - start, window)
        if end <= 0 or begin >= window:
            continue
        ink = lab.colour(INKS[role])
        axes.barh(place, end - begin, 0.7, begin, color=ink, edgecolor="white")
        if end - begin > 0.06 * window:
            axes.text((begin + end) / 2, place, f"${what}$", fontsize=10, **WHITE)
        if begin - last > 0.05 * window:
            middle = {"ha": "center", "va": "center", "color": MUTED}
            axes.text((last + begin) / 2, place, "idle", fontsize=9, **middle)
        last = end


def draw_consumer(axes, own, version, place, start, window):
    """Draw where a consumer stands at its matmuls, and when it does all else."""
    for row in own:
        parts = [(ends, INKS[row["role"]]) for ends in at_matmuls(version)]
        parts += [(ends, "Kernel Book") for ends in away(version)]
        for (a, b), ink in parts:
            begin, end = max(row[a] - start, 0), min(row[b] - start, window)
            if end <= begin:
                continue
            axes.barh(place, end - begin, 0.7, begin, color=lab.colour(ink))
            if ink == "Kernel Book" and end - begin > 0.08 * window:
                axes.text((begin + end) / 2, place, str(row["tile"]), **WHITE)


def named_inks(axes):
    """Name the colours of the bars in the legend."""
    for role, ink in INKS.items():
        axes.barh(0, 0, label=f"matmuls of {role}", color=lab.colour(ink))
    everything_else = {"label": "all else, mostly weighing"}
    axes.barh(0, 0, color=lab.colour("Kernel Book"), **everything_else)


def timelines(version, lanes, window, height):
    """What draws some lanes of a version for so many cycles, from its second traced tile on."""

    def of_loader(axes, rows, place, start):
        for row in rows:
            for at, mark in ((row["asks"], "^"), (row["begins"], "v")):
                if 0 <= at - start <= window:
                    ink = lab.colour("matmul")
                    axes.plot(at - start, place, mark, markersize=5, color=ink)

    def how(axes, rows):
        rows = [row for row in with_earliest(rows) if row["version"] == version]
        start = next(row["asks"] for row in rows if row["tile"] == SPAN[1])
        axes.figure.set_size_inches(5.4, height)
        named_inks(axes)
        for y, lane in enumerate(lanes):
            own = [row for row in rows if row["role"] == lane]
            if lane == UNITS:
                draw_units(axes, rows, version, y, start, window)
            elif lane == "loader":
                of_loader(axes, own, y, start)
            else:
                draw_consumer(axes, own, version, y, start, window)
        axes.set(xlim=(0, window), xlabel="cycles of the SM")
        axes.set_yticks(range(len(lanes)), lanes, fontsize=10)
        axes.invert_yaxis()
        axes.grid(axis="x", visible=True)
        axes.grid(axis="y", visible=False)

    return how


LANES = (*CONSUMERS, UNITS)
lab.draw(
    traced,
    "Rung 1: both weigh, and the matmul units are idle",
    in_words("two roles"),
    timelines("two roles", LANES, 6000, 2.8),
)

# %%

# Reading
late = [seen - end for _, end, _, _, seen in on_units(traced.rows, "two roles")][4:]
lab.read(
    f"**The units are idle for {100 * idle_units(traced.rows, 'two roles'):.0f} % of the time.** "
    "The cooks do not alternate: the scores of one run right behind those of the other, so "
    f"the two begin to weigh only {apart(traced.rows, 'two roles', 'scores'):,.0f} cycles apart, "
    "and while both weigh nobody has a matmul for the units. Weighing takes far longer than the "
    "sketch's 512 cycles, partly for maxima, sums and conversions, and because both consumers "
    "often share the units. A suspect: in each tile a consumer stands in "
    "line for the matmul units twice. (Every result is seen "
    f"{min(late, default=nan):.0f} to {max(late, default=nan):.0f} cycles after its matmul ends in "
    "the computed row.)"
)

# %%
# Rung 2: scores ahead
# --------------------
#
# What if a consumer comes to the units once per tile, with two matmuls? **The change:** the scores
# run one tile ahead. **Expected:** a gain, above all because a consumer then weighs while its own
# sum runs.

# Reading
lab.read(told("scores ahead"))

# %%
# Do the exponentials really run during the sum? A launch, ``kernel[grid](...)``, returns the
# compiled kernel, and ``cuobjdump``, which comes with Triton, turns its binary into SASS:
#
# .. literalinclude:: attention_hopper.py
#    :language: python
#    :pyobject: machine_code
#    :lines: 1, 3-
#
# An iteration, reduced to matmuls (``HGMMA``), waits for them (``WARPGROUP.DEPBAR``, which ends in
# the argument of ``warpgroup_mma_wait``), and exponentials (``MUFU.EX2``):


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
    caption = f"SASS of rung {number}, abridged, without a mask"
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
lab.read(
    (
        f"**They do not.** All {OF_THREAD} exponentials of a thread stand behind both waits. On "
        "the way to machine code the second wait has moved up to the first, so a consumer weighs "
        "only when both matmuls have ended."
    )
    if planned == 0
    else f"{planned:.0f} of the {OF_THREAD} exponentials of a thread stand between the wait for "
    "the scores and the wait for the sum. The timeline:"
)

# %%

# Drawing
lab.draw(
    traced,
    "Rung 2: one weighs during the other's matmuls",
    in_words("scores ahead"),
    timelines("scores ahead", LANES, 6000, 2.8),
)

# %%

# Reading
as_stamped = in_code.get(("scores ahead", "yes"), {})
lab.read(
    "**The other's matmuls run meanwhile:** one cook prepares while the other bakes. A consumer "
    "now stands in line once per tile, with two matmuls, so the two begin to weigh at least "
    f"{apart(earliest, 'scores ahead', 'earliest'):,.0f} cycles apart, and the units are idle for "
    f"{100 * idle_units(traced.rows, 'scores ahead'):.0f} % of the time. (Both are estimates: "
    "the end of the matmuls is computed here, because a stamp could keep the wait from moving.)"
    + (
        ""
        if (as_stamped.get(BEFORE), as_stamped.get("of them before the next stamp"))
        == (0, OF_THREAD)
        else " The stamps have changed the order of this code, as the table in the fold shows."
    )
)

# %%
# Rung 3: a branch
# ----------------
#
# Would the planned overlap gain even more? **The change:** the wait for the next tile of keys moves
# from the top of the loop to just before the wait for the sum (and the first one to before the
# loop). A wait for a barrier is itself a loop with a branch, and the wait for the sum does not move
# across it:
#
# .. code-block:: python
#
#    mbarrier.wait(k_full.index(after), ((i + 1) // STAGES) & 1, pred=i + 1 < n)
#    acc = warpgroup_mma_wait(0, deps=[acc])
#
# ``after`` is the slot of the next keys, and ``pred`` says whether there are any. **Expected:** a
# gain, because a consumer now computes exponentials during its own sum, too.

# Reading
early = in_code.get(("a branch", "no"), {}).get(BEFORE, nan)
forced = f"all {early}" if early == OF_THREAD else f"{early} of {OF_THREAD}"
lab.read(
    told("a branch")
    + (
        f"Now {forced} exponentials of a thread stand before the wait for the sum. "
        if max(gain("a branch", mask) for mask in ("full", "causal")) < SCATTER
        else ""
    )
    + f"Removing the branch from the last rung {of_both('without the branch', 'turns')}"
    + (
        ", so **forcing the order gains nothing.**"
        if abs(gain("without the branch", "full", "turns")) < SCATTER
        else "."
    )
)

# %%

# Reading
weighs_in_order, weighs_ahead = (
    mean_cycles(traced.rows, version, "scores", "weighed")
    for version in ("two roles", "no turns")
)
lab.read(
    "The timeline of rung 5, which adds up `l_i` in another way, shows the overlap in the next "
    "figure: having weighed, a consumer waits for its sum for only "
    f"{mean_cycles(traced.rows, 'no turns', 'weighed', 'sum'):.0f} cycles. "
    + (
        f"But weighing alone takes {weighs_ahead:,.0f} cycles, against {weighs_in_order:,.0f} with "
        "the rescaling of `acc` on rung 1. **So slower weighing takes back a part of what the "
        "overlap saves.**"
        if weighs_ahead > weighs_in_order
        else f"Weighing takes {weighs_ahead:,.0f} cycles."
    )
)

# %%
# Why the loop is faster
# ----------------------
#
# While a consumer weighs, its own sum can run, or the other's matmuls. Which makes rung 2 faster?
# Here is consumer 0 above the units, on three rungs:


# Drawing
COMPARED = {  # as traced, and the name of the rung
    "two roles": "two roles",
    "scores ahead": "scores ahead",
    "no turns": "sums in threads",
}


def of_three_rungs(axes, rows):
    rows, window, lane = with_earliest(rows), 6000, CONSUMERS[0]
    axes.figure.set_size_inches(5.4, 4.2)
    named_inks(axes)
    for number, version in enumerate(COMPARED):
        of_version = [row for row in rows if row["version"] == version]
        own = [row for row in of_version if row["role"] == lane]
        start = next(row["asks"] for row in own if row["tile"] == SPAN[1])
        y = 2.7 * number
        draw_consumer(axes, own, version, y, start, window)
        draw_units(axes, of_version, version, y + 0.9, start, window)
    # the last rung's waits for sums are too short to be seen as such
    row = next(row for row in own if row["sum"] > start + 2000)
    axes.annotate(
        "waits for its sum", ((row["weighed"] + row["sum"]) / 2 - start, y - 0.35),
        xytext=(0, 14), textcoords="offset points", ha="center", fontsize=9, color=MUTED,
        arrowprops={"arrowstyle": "->", "color": MUTED},
    )  # fmt: skip
    axes.set(xlim=(0, window), xlabel="cycles of the SM")
    places = [2.7 * number + z for number in range(len(COMPARED)) for z in (0, 0.9)]
    labels = [(f"rung {NUMBERS[v]}", "units") for v in COMPARED]
    axes.set_yticks(places, [label for pair in labels for label in pair], fontsize=10)
    axes.invert_yaxis()
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)


def three_rungs_in_words(rows):
    idle = ", ".join(
        f"{100 * idle_units(rows, version):.0f} % on rung {NUMBERS[version]}"
        for version in COMPARED
    )
    return (
        "Bars over time. On rung 1 the units compute two scores, then are idle, then compute two "
        "sums. On rungs 2 and 5 they compute scores and sum of one consumer, then those of the "
        "other. On rung 5 a consumer weighs from the end of its scores on, and then waits for its "
        f"sum for a moment only. The units are idle for {idle}."
    )


lab.draw(
    traced,
    "Consumer 0 and the matmul units on three rungs",
    three_rungs_in_words,
    of_three_rungs,
)

# %%
# What do the units do during a consumer's blue bars? (% of cuBLAS is from the ladder.)

beside_away = {version: units_while_away(earliest, version) for version in COMPARED}


def on_rung(version, name):
    row = {"rung": f"{NUMBERS[version]}, {name}"}
    for what, took in zip(
        ("its own sum", "the other's matmuls", "idle"),
        beside_away[version],
        strict=True,
    ):
        row[what] = f"{took:,.0f}"
    return row | {"% of cuBLAS": round(100 * steps.share(name, mask="full"))}


lab.table(
    [on_rung(*rung) for rung in COMPARED.items()] if traced.rows and steps.rows else [],
    "The matmul units while a consumer does all else: cycles per tile of keys, without a mask",
)

# %%

# Reading
own_sum, others_matmuls, _ = zip(*beside_away.values(), strict=True)
between = abs(gain("sums in threads", "full", "scores ahead"))
alternate = (
    others_matmuls[0] < 0.8 * min(others_matmuls[1:])
    and min(others_matmuls[1:]) > 0.9 * ideal / 2
    and between < SCATTER < gain("scores ahead", "full")
    and planned == 0
)
lab.read(
    (
        "**The speed goes with the other's matmuls.** Of their 1,024 cycles per tile, "
        f"{others_matmuls[0]:,.0f} run beside a consumer's own work on rung 1, and almost all on "
        "rungs 2 and 5. Only on rung 5 a consumer's own sum does, too, for "
        f"{own_sum[2]:,.0f} cycles. "
        + (
            f"With stamps that helps ({took_5:,.0f} cycles per tile against {took_2:,.0f}), but in "
            "the ladder, without stamps, the two rungs are level. "
            if took_5 < (1 - SCATTER) * took_2
            else "Yet the two rungs are level. "
        )
        + "So what counts is that the cooks alternate; the overlap adds no speed that we can "
        "measure."
    )
    if alternate
    else f"On rung 1, {others_matmuls[0]:,.0f} cycles of the other's matmuls run beside a "
    "consumer's own work."
)

# %%
# What makes them alternate? A model tests our suspect. Two consumers stand in line for the units,
# and pause after each request; ``requests`` holds those of a tile, as (cycles of matmuls, cycles of
# the pause after them):


def cycles_per_tile(requests, tiles=10_000):
    free, ready, done = 0, [0, 0], [0, 0]
    while min(done) < tiles * len(requests):
        me = ready.index(min(ready))  # first come, first served
        matmuls, pause = requests[done[me] % len(requests)]
        free = max(free, ready[me]) + matmuls
        ready[me] = free + pause
        done[me] += 1
    return free / tiles


# %%
# Rung 1's timeline gives the two pauses, each from the end of a matmul to the next issue. For rung
# 2 we keep them, and make one request of two. In the forced order of rung 5 weighing begins 512
# cycles earlier:

after_scores, after_sum = (
    round(took) if took == took else nan for took in pauses(traced.rows)
)
REQUESTS = {
    "two roles": [(512, after_scores), (512, after_sum)],
    "scores ahead": [(1024, after_scores + after_sum)],
    "no turns": [(1024, after_scores + after_sum - 512)],
}
modelled = {
    version: cycles_per_tile(requests) if traced.rows else nan
    for version, requests in REQUESTS.items()
}
lab.table(
    [
        {
            "rung": f"{NUMBERS[version]}, {COMPARED[version]}",
            "requests + pauses": ", ".join(f"{a:,} + {b:,.0f}" for a, b in requests),
            "model": f"{modelled[version]:,.0f}",
            "timeline": f"{cycles_a_tile(traced.rows, version):,.0f}",
        }
        for version, requests in REQUESTS.items()
        if traced.rows
    ],
    "Cycles per tile of keys, in the model and on the timelines",
)

# %%

# Reading
at_one, at_two, at_five = (cycles_a_tile(traced.rows, v) for v in REQUESTS)
in_model = modelled["two roles"] / modelled["scores ahead"] - 1
lab.read(
    f"From rung 1 to rung 2 the model gains {100 * in_model:.0f} %, the timelines "
    f"{100 * (at_one / at_two - 1):.0f} %, and the ladder {100 * gain('scores ahead', 'full'):.0f} "
    "%."
)

# %%

# Drawing
own = [sum(map(sum, requests)) for requests in list(REQUESTS.values())[:2]]
in_line = [m - o for m, o in zip(list(modelled.values())[:2], own, strict=True)]
REASON = (
    "What makes it faster",
    "Standing in line for the matmul units once per tile instead of twice accounts for most of the "
    f"gain. In the model, a consumer stands in line for {in_line[0]:,.0f} cycles per tile on rung "
    "1, and never on rung 2, because the cooks alternate by themselves.",
)
explained = (
    abs(in_model - at_one / at_two + 1) < 0.03
    and in_model > gain("scores ahead", "full") / 2
    and in_line[1] < 1 < in_line[0]
)


def boxed(title, text):
    """A box like that of the key idea."""
    name = f'<p class="admonition-title">{title}</p>'
    html = f'<div class="kb-key admonition">{name}<p>{text}</p></div>'
    return show(Markdown(html, f"{title}. {text}", f"**{title}**\n\n{text}"))


boxed(*REASON) if alternate and explained else None

# %%

# Reading
lab.read(
    (
        "Rung 5 is slower than in the model: weighing slows and the scores come late, as "
        '"What is left" counts.'
        if at_five > 1.05 * modelled["no turns"] and weighs_ahead > weighs_in_order
        else f"For the forced order the model promises {modelled['no turns']:,.0f} cycles, and the "
        f"timeline of rung 5 has {at_five:,.0f}."
    )
    if traced.rows
    else f"{nan}"
)

# %%
# Rungs 4 to 6: small changes
# ---------------------------
#
# - **Rung 4, one loop.** The first tiles of keys, which the mask cuts, had a loop of their own.
#   Since rung 2 the weights go from iteration to iteration, and with two loops Triton took them
#   apart into 16-bit numbers and paired them again (``PRMT``). In the one loop a branch asks
#   whether the mask cuts the tile.
# - **Rung 5, sums in threads.** Each thread adds up its own part of :math:`l_i`, because the whole
#   is needed only at the end. That saves :term:`shuffles <shuffle>`.
# - **Rung 6, turns.** Before its two matmuls, a consumer waits at its :term:`named barrier`
#   (``wait_for_turn(ME)``), and after them it lets the other go (``pass_turn(ME, 2)``; consumer 1
#   does so before the loop, too). FlashAttention-3 calls this :term:`ping-pong scheduling`.


# Reading
if not traced.rows:
    steps.rate("turns", mask="full")  # says why numbers are missing

issue_without = both_at(traced.rows, "no turns", [("begins", "issued")])
expected_there = gain("one loop", "causal") > SCATTER > abs(gain("one loop", "full"))
no_effect = all(abs(gain("turns", mask)) < SCATTER for mask in ("full", "causal"))
of_sums = [gain("sums in threads", mask) for mask in ("full", "causal")]
with_turns = [
    config is not None and config.take_turns
    for of_lengths in choice.CHOICES.values()
    for _, config in of_lengths
]
lab.read(
    (
        "**One loop pays with a causal mask:** it removes all "
        f"{compiled_to('scores ahead', 'permutations'):.0f} `PRMT` that rung 2 had brought, and "
        f"gains {100 * gain('one loop', 'causal'):.0f} %. "
        if expected_there
        and compiled_to("two roles", "permutations")
        == compiled_to("one loop", "permutations")
        else ""
    )
    + (
        f"**Sums in threads** gain {from_to(*(100 * g for g in sorted(of_sums)), 0)} %, about as "
        "much as two timings of one kernel differ. "
        if min(of_sums) > SCATTER / 2 and max(of_sums) < 2 * SCATTER
        else ""
    )
    + (
        "**Turns make no difference** here, probably because the cooks alternate without them. "
        if no_effect and issue_without < 0.02
        else ""
    )
    + (
        "The package's kernel still takes them for most shapes, where with them it was fastest as "
        "a whole."
        if no_effect and 2 * sum(with_turns) > len(with_turns)
        else ""
    )
)

# %%

# Folded: All versions as compiled, and rungs 2 and 3 without a mask
lab.together(compiled, unmasked)

# %%
# Registers for the consumers
# ---------------------------
#
# The largest effect of the page has no bar in the ladder, because no rung can do without it. An SM
# has 65,536 registers for a program's 384 threads (the loader's warp counts as four): 168 each,
# rounded down to a multiple of 8. But in a consumer ``s`` and ``acc`` take 64 of a thread each, and
# ``p`` another 32, which leaves hardly any to compute with. So the loader hands over all but 24:
# 3 × 168 = 240 + 240 + 24.
#
# .. code-block:: python
#
#    gl.warp_specialize(
#        [(_consumer, ...), (_consumer, ...), (_loader, ...)],  # the roles
#        [4, 1],  # warps of the second role and the third; the first has 4, too
#        [240, 24],  # and registers of each of their threads
#    )


def with_registers(name, registers):
    row = {"registers of consumer, loader": registers}
    for mask in ("full", "causal"):
        row[f"{mask}, %"] = round(100 * steps.share(name, mask=mask))
    row["matmul instructions"] = compiled_to(name, "matmul instructions")
    return row | {"waits for them": compiled_to(name, "waits for them")}


lab.table(
    [
        with_registers("turns", "240, 24"),
        with_registers("equal registers", "168, 168"),
    ]
    if steps.rows
    else [],
    "The last rung: % of cuBLAS, and its code with a causal mask",
)

# %%

# Reading
halved = steps.rate("turns", mask="full") / steps.rate("equal registers", mask="full")
lab.read(
    (
        "Without a mask, handing over makes the kernel twice as fast. "
        if round(halved, 1) in (2, 2.1)
        else f"Without a mask, handing over makes the kernel {halved:.1f} times as fast. "
    )
    + (
        "Short of registers, the assembler waits after every matmul instruction, so that no matmul "
        "is asynchronous. "
        if compiled_to("equal registers", "waits for them")
        == compiled_to("equal registers", "matmul instructions")
        else ""
    )
)

# %%
# Persistent, and in pairs
# ------------------------
#
# One program fits on an SM, so nothing is computed there while one ends and the next begins. A
# :term:`persistent` program computes one tile of queries after another.
#
# With a causal mask later queries see more keys, so it matters which tiles a program takes. Of
# eight tiles of queries, the longest first, each of four programs takes every fourth, or a *pair*,
# one from the beginning and one from the end:


# Drawing
lengths = [8, 7, 6, 5, 4, 3, 2, 1]  # of tiles of queries, in tiles of keys
programs = 4
every_fourth = [(lengths[p], lengths[p + programs]) for p in range(programs)]
in_pairs = [(lengths[p], lengths[-1 - p]) for p in range(programs)]


def shares_of_programs(*panels):
    shades = (lab.colour("Kernel Book"), lab.colour("copy"))
    ways = {"every fourth tile": every_fourth, "in pairs": in_pairs}
    for axes, (name, tiles) in zip(panels, ways.items(), strict=True):
        for program, (first, second) in enumerate(tiles):
            for left, length, ink in (
                (0, first, shades[0]),
                (first, second, shades[1]),
            ):
                axes.barh(program, length, 0.8, left, color=ink, edgecolor="white")
                text = {"ha": "center", "va": "center", "color": "white"}
                axes.text(left + length / 2, program, str(length), fontsize=10, **text)
        longest = max(map(sum, tiles))
        axes.set(
            xlim=(0, 12.4), yticks=[], xticks=range(0, 13, 3), xlabel="tiles of keys"
        )
        axes.set_title(f"{name}: the last ends after {longest}", fontsize=11)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines["left"].set_visible(False)


lab.sketch(
    "Four persistent programs, eight tiles of queries, causal",
    "Bars, one row per program. Every fourth tile: 8 and 4, 7 and 3, 6 and 2, 5 and 1 tiles of "
    "keys, so the last program ends after 12. In pairs: 8 and 1, 7 and 2, 6 and 3, 5 and 4, so all "
    "end after 9.",
    shares_of_programs,
    panels=2,
    height=2.4,
)

# %%

# Reading
beside = {
    way: sorted(100 * gain(way, mask, "turns") for mask in ("full", "causal"))
    for way in ("a program per tile", "Kernel Book")
}


lab.read(
    "**Measured:** without a mask, persistence "
    f"{verdict(gain('persistent', 'full', 'a program per tile'))}. With a causal mask it "
    f"{verdict(gain('persistent', 'causal', 'a program per tile'))} as on the left, "
    f"and {verdict(gain('Kernel Book', 'causal', 'a program per tile'))} in pairs. "
    + (
        "With one program per tile the package's kernel starts "
        f"{from_to(*(-slower for slower in beside['a program per tile'][::-1]), 0)} % behind rung "
        "6, probably because it serves any length. Persistent, **it is level.**"
        if beside["a program per tile"][1] < 0
        and max(map(abs, beside["Kernel Book"])) < 100 * SCATTER
        else ""
    )
)

# %%

# Folded: More changes of the last rung, and those of the package's kernel
lab.table(
    changes if steps.rows else [],
    "Four changes of the last rung, the package's kernel beside it, and two changes of that",
)

# %%
# What is left
# ------------
#
# Why are the units still idle at times? (The ladder's percentages are shares of cuBLAS. Here the
# measure is the full rate, which cuBLAS does not reach either.) The units are never idle if a
# consumer needs 2,048 cycles for a tile: 512 until its scores are there, and then 1,536 until it
# comes back, in which its own sum and the other's two matmuls run. The last rung misses both:


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

# %%


busy = {row["instruction"]: row["cycles of an SM"] for row in work.rows}
counted = sum(busy.values()) / 2  # of both consumers, of whom one is meant
weighing = mean_cycles(traced.rows, "turns", "scores", "weighed")
for_sum = mean_cycles(traced.rows, "turns", "weighed", "sum")
contended = both_at(earliest, "turns", away("turns"))
until_scores = mean_cycles(traced.rows, "turns", "begins", "scores")
comes_back = by_version["turns"] - until_scores
HALVES = {
    "from the issue to its scores": (ideal / 4, until_scores),
    "from the scores to the next issue": (3 * ideal / 4, comes_back),
    "together, a tile of keys": (ideal, by_version["turns"]),
}


def half_of_tile(part, wanted, took):
    wanted, took = round(wanted), round(took)
    cells = {"if never idle": f"{wanted:,}", "traced": f"{took:,}"}
    return {"a consumer": part} | cells | {"late": f"{took - wanted:,}"}


lab.table(
    [half_of_tile(part, *both) for part, both in HALVES.items()] if traced.rows else [],
    "The last rung: cycles of a consumer, with stamps",
)

# %%

# Reading
shared, spent = counted / (1 - contended / 2), comes_back - for_sum
lab.read(
    "**A consumer is late twice,** and so the units are idle for "
    f"{100 * idle_units(traced.rows, 'turns'):.0f} % of the time. Its scores wait only "
    f"{scores_in_line(traced.rows, 'turns'):.0f} cycles behind the other's matmuls, but are seen "
    "later than at the full rate. "
    + (
        f"Then weighing and rescaling take {spent:,.0f} cycles, although the six kinds of "
        f"instructions that we counted need {counted:,.0f} alone, and {shared:,.0f} if the "
        "consumers share the rates whenever both are away from their matmuls. "
        if shared < spent
        else f"Then weighing and rescaling take {spent:,.0f} cycles. "
    )
    + "Why the scores come late and the weighing is slow is **an open question**. "
    + (
        "(The loader is early enough.)"
        if asked_ahead(traced.rows, "turns") > by_version["turns"]
        else f"(The loader asks for keys {asked_ahead(traced.rows, 'turns'):,.0f} cycles ahead.)"
    )
)

# %%

# Folded: The instructions of one iteration, counted, and the time from the scores on
parts = {
    "needs for the counted instructions, at the rates of an SM": counted,
    "the same, at half the rates while both are away from their matmuls": shared,
    "takes until its next issue, as traced": comes_back,
    "of these, to weigh": weighing,
    "to wait for its sum": for_sum,
    "to rescale and begin anew, with stamps": comes_back - weighing - for_sum,
}
in_parts = lab.table(
    [
        {"from its scores on, a consumer": part, "cycles": f"{took:,.0f}"}
        for part, took in parts.items()
    ]
    if traced.rows and work.rows
    else [],
    "The last rung: cycles of a consumer from its scores on",
)
lab.together(work, in_parts)

# %%

# Folded: The timeline of rung 6, and when the loader asks for keys (▲) and values (▼)
lab.draw(
    traced,
    "Rung 6, with the loader",
    in_words("turns"),
    timelines("turns", ("loader", *LANES), 9000, 3.2),
)

# %%
# Is it right?
# ------------
#
# The package's kernel is ``attention(..., backend="gluon")``, and on Hopper the default in 16 bits
# at head_dim 64 or 128, where it was measured to be faster than plain Triton.
#
# .. dropdown:: The kernel whole
#
#    The loop has the same steps: issue, weigh, rescale. New is how it begins, because a persistent
#    program goes on from one tile of queries to the next without a stop. ``place_of_consumer`` says
#    where the next queries lie and which tiles of keys they see. The loader fetches what any
#    consumer of the program sees, so each gives back, unread, the tiles that it does not see
#    itself.
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/forward.py
#       :pyobject: consume
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/forward.py
#       :pyobject: load
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/forward.py
#       :pyobject: weigh
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/forward.py
#       :pyobject: attention_hopper_fwd_kernel

# %%


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

# Folded: Tiles and roles by shape, every check, and the repeated launches
named = lab.read(
    "An input is named by its (batch, heads, heads of keys, queries, keys, head_dim). `lse` is the "
    "logsumexp of each query, which the kernel returns in float32."
)
lab.together(cut_as, named, right, repeated, soaked)

# %%

# Reading
launched, other_bits = (
    sum(row[what] for row in repeated.rows) if repeated.rows else nan
    for what in ("launches", "with other bits")
)
ended = soaked.rows[0] if soaked.rows else {}
came_to_an_end = (
    f"all {ended.get('launches', nan):,}"
    if ended.get("launches") == ended.get("finished")
    else f"{ended.get('finished', nan):,}"
)
said = right.plain.split("\n")[0].partition(": ")[2].rstrip(".")
lab.read(
    "**It passed every check.** Over odd lengths, grouped heads, causal masks and windows, against "
    f"float64, {said}. With a barrier missing, a kernel can be right many times and then wrong "
    f"once. We repeated {launched:,} launches and {other_bits or 'none'} gave different bits, "
    "which makes such a mistake unlikely but does not exclude it. Of launches with random shapes, "
    f"{came_to_an_end} came to their end, and every tenth agreed with plain Triton."
)

# %%
# How fast is it?
# ---------------
#
# The libraries are cuDNN, through PyTorch's SDPA, and FlashAttention 4 (FlashAttention-3 was not at
# hand). All points have 16,384 tokens. "Kernel Book" names no backend, which at head_dim 128 gives
# the kernel in Gluon.


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
lab.plot(
    lines, "head_dim 128, full", where={"head_dim": 128, "mask": "full"}, names=CALLED
)

# %%

# Folded: The same with a causal mask
lab.plot(
    lines,
    "head_dim 128, causal",
    where={"head_dim": 128, "mask": "causal"},
    names=CALLED,
)

# %%

# Folded: The speeds at all twelve points
lab.table(
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

# %%


# Reading
def of_chosen(row):
    """The speed of the kernel that the package chooses, timed under its own name."""
    return row["plain" if row["chosen"] == "plain" else "in Gluon"]


slower = [row for row in at_points if row["in Gluon"] < (1 - SCATTER) * row["plain"]]
ahead = [row for row in at_points if share_of_library(row) > 1 + SCATTER]
behind = [row for row in at_points if share_of_library(row) < 1 - SCATTER]
absent = [name for name in PEERS if name in speed.skipped]
at_hand = [CALLED[name] for name in PEERS if name not in absent]
the_library = (
    f"{at_hand[0]}, the only library of this run"
    if len(at_hand) == 1
    else f"the faster of {' and '.join(at_hand)} at each point"
)
late = all(row in behind for row in at_points if row["length"] == LENGTHS[-1])
shares = sorted(map(share_of_library, behind))
lab.read(
    f"Against {the_library}, the package is ahead by more than {100 * SCATTER:.0f} % at "
    f"{len(ahead)} of {len(at_points)} points"
    + (
        f" and **behind at {len(behind)}**"
        + (f", among them every point of length {LENGTHS[-1]:,}" if late else "")
        + f". Where it is behind, it reaches {100 * shares[0]:.0f} "
        + (f"to {100 * shares[-1]:.0f} " if len(shares) > 1 else "")
        + "% of the library's speed."
        if behind
        else ", and behind nowhere."
    )
    if speed.rows
    else f"{nan}"
)

# %%

# Reading
worth = [row["in Gluon"] / row["plain"] for row in at_points]
lab.read(
    f"Against plain Triton, the kernel in Gluon is {min(worth):.2f} to {max(worth):.2f} times as "
    "fast"
    + (
        f". It is **slower at {len(slower)} points**, with a causal mask at head_dim 64, so there "
        "the package takes plain Triton."
        if slower and {(r["head_dim"], r["mask"]) for r in slower} == {(64, "causal")}
        else f", and slower at {len(slower)} of {len(at_points)} points."
    )
    if speed.rows
    else f"{nan}"
)

# %%
# When to write Gluon
# -------------------
#
# **Write it** when two kinds of work should overlap, a timeline shows that they do not, and the
# kernel runs often enough on one generation of GPUs to repay a second version. **Do not** write it
# when the kernel waits for memory, one kind of work fills it, or it must run on other GPUs.

# %%
# What breaks it
# --------------
#
# Two mistakes raise no error:
#
# **Rescaling too early.** It looks natural to rescale ``acc`` as soon as :math:`\alpha` is known.
# But the sum that arrives later was weighed with the old maximum.
#
# .. code-block:: python
#
#    acc = acc * alpha + p @ v_before  # wrong
#    acc = (acc + p @ v_before) * alpha  # right
#
# **Forgetting the end.** The scores run one tile ahead, so after the loop one sum is still missing.
#
# .. code-block:: python
#
#    return acc / l_i  # wrong
#    return (acc + p @ v_before) / l_i  # right


# Measuring
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


rows = []
q, k, v = drawn((1, 2, 2, 64, 256, 64), torch.float32)
truth, _ = reference.attention(q, k, v)
for mistake in ("none", "rescale too early", "forget the end"):
    error = (with_mistake(q, k, v, mistake) - truth).norm() / truth.norm()
    rows.append({"mistake": mistake, "error": f"{error.item():.1e}"})
assert [float(row["error"]) > 1e-2 for row in rows] == [False, True, True]
lab.table(rows, "Error of the whole, relative to its size")

# %%
# In short
# --------
#
# - **Why the loop is faster:** a cook who comes to the oven once per dish hardly waits for it, and
#   the two cooks alternate. The plan was that each also prepares while his own dish bakes; that
#   made the kernel no faster.
# - **What pays:** scores one tile ahead and, with a causal mask, one loop. Sums in threads add at
#   most a little, and persistent programs make up for what serving any length costs.
# - **What the roles need:** the loader's registers, handed to the consumers.
# - **What does not pay:** roles alone, a forced order, and turns.
# - **Beside libraries:** mostly ahead at short lengths, and behind at the longest.
#
# :doc:`/chapters/attention_hopper_backward` gives the warps of the backward pass roles, too.
#
# Exercises
# ---------
#
# **1. Does it fit?** A program can have 227 KiB of shared memory. At head_dim 128 in 16 bits the
# package's kernel keeps 64 queries per consumer, two rings and, unlike the kernel of this page, a
# separate buffer for its output, as large as that for the queries. Which fit: two consumers with 2
# or with 3 slots of 128 keys, two with 2 slots of 176, three with 2 slots of 128?

# %%

# Solution: does it fit
rows = []
for consumers, keys, stages in ((2, 128, 2), (2, 128, 3), (2, 176, 2), (3, 128, 2)):
    kib = (2 * 64 * consumers + 2 * stages * keys) * 128 * 2 / 1024
    row = {"consumers": consumers, "keys": keys, "stages": stages}
    rows.append(row | {"KiB": kib, "fits": "yes" if kib <= 227 else "no"})
assert [row["fits"] for row in rows] == ["yes", "no", "no", "yes"]
lab.table(rows, "Shared memory of a program")

# %%
# **2. Stand in line once.** Let a consumer pause for :math:`w` cycles after its scores and for 100
# after its sum. With ``cycles_per_tile``, what do one and two requests per tile cost
# for :math:`w` of 512, 1,024 and 1,536? When are the units always at work?

# %%


# Solution: stand in line once
rows = []
for w in (512, 1024, 1536):
    two = cycles_per_tile([(512, w), (512, 100)])
    one = cycles_per_tile([(1024, w + 100)])
    rows.append({"w": w, "two requests": f"{two:,.0f}", "one request": f"{one:,.0f}"})
assert rows[0]["two requests"] == rows[0]["one request"] == "2,048"
assert [row["one request"] < row["two requests"] for row in rows] == [False, True, True]
lab.table(
    rows, "Cycles per tile: 2,048 if the units are always at work, as for w of 512"
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
