"""
Backward in one sweep
=====================

The backward pass of plain Triton computes every weight of attention twice, once in each of its two
sweeps, because no program can keep the gradients of its keys *and* those of all queries. *What does
it take to compute each weight once, and can the gradients still be the same bits in every run?*

You will learn

- why five matmuls in place of seven need roles for the :term:`warps <warp>`, and where each of
  seven tiles lies meanwhile;
- how programs add to the same sums in a fixed order, why none waits for ever, and what the order
  costs;
- how the kernel compares with the fastest libraries, with their deterministic modes too, and where
  it is behind.

The kernels are written in :term:`Gluon` and need a Hopper GPU (H100, H200). Without one, this page
computes the sweep and its order in PyTorch and in a simulation, and shows the checks and times of a
recorded run. :doc:`/chapters/attention_backward` derives the gradients,
:doc:`/chapters/warps_with_roles` explains rings, barriers and the copy engine, and
:doc:`/chapters/attention_hopper` does for the forward pass what this chapter does for the backward
pass.
"""

# sphinx_gallery_thumbnail_number = 1
import time
from functools import partial

import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.lab.attention_bench import (
    BACKWARD,
    draw,
    flash,
    matmul,
    points,
    sdpa,
    step,
    verdict,
)
from kernelbook.ops.attention import backward as plain
from kernelbook.ops.attention.forward import attention_forward
from kernelbook.ops.attention.tiles import LOG2E, place
from kernelbook.ops.hopper import backward as hopper
from kernelbook.ops.hopper import backward_choice as choice
from kernelbook.ops.hopper.backward import (
    ROWS,
    announce,
    keep_seen,
    position_of,
    tma_add,
)
from kernelbook.ops.hopper.forward import exp2
from kernelbook.ops.hopper.parts import named_barrier, tma_load, tma_store

nan = float("nan")
lab.start(
    "attention_hopper_backward",
    "kernelbook.ops.attention.backward",
    "kernelbook.ops.hopper.backward",
)

# %%
# Seven matmuls, or five
# ----------------------
#
# For a tile of queries and a tile of keys, with the scores :math:`S = \sigma Q K^\top`, the weights
# :math:`P` and ``delta`` of :doc:`/chapters/attention_backward`, the backward pass computes
#
# .. math::
#
#    S, \qquad dP = dO\,V^\top, \qquad dV \mathrel{+}= P^\top dO, \qquad
#    dK \mathrel{+}= dS^\top Q, \qquad dQ \mathrel{+}= dS\,K
#
# with :math:`dS = P \circ (dP - \mathrm{delta})`. These are five matmuls. The trouble is the three
# ``+=``: :math:`dK` and :math:`dV` are sums over queries, :math:`dQ` is a sum over keys. So the
# kernels of plain Triton take **two sweeps**: in one a program owns keys and computes four of the
# matmuls, in the other it owns queries and computes :math:`S` and :math:`dP` again, which makes
# seven. A kernel whose matmuls run at the same speed but that needs only five would be faster by
# :math:`7/5 = 1.4`.
#
# In **one sweep** a program owns keys, keeps :math:`dK` and :math:`dV` in :term:`registers
# <register>`, and adds its part of :math:`dQ` to sums in memory, tile after tile. The chapter on
# the backward pass tried that in plain Triton (``deterministic=False``), and it was slower. The
# ladder below shows by how much. Two things are in its way.
#
# **Space.** The table counts what a program with 128 keys holds at head_dim 128 while it meets 64
# queries. An :term:`SM` has 256 KiB of registers and 227 KiB of :term:`shared memory`, and neither
# would hold all of it.

KEYS, QUERIES, HEAD_DIM, KIB = 128, 64, 128, 1024

held = {  # rows, columns, bytes of a number, where
    "dK and dV": (2 * KEYS, HEAD_DIM, 4, "registers"),
    "S and dP": (2 * KEYS, QUERIES, 4, "registers"),
    "P and dS in 16 bits": (2 * KEYS, QUERIES, 2, "registers"),
    "K and V": (2 * KEYS, HEAD_DIM, 2, "shared memory"),
    "Q and dO, two of each": (4 * QUERIES, HEAD_DIM, 2, "shared memory"),
    "dS, for the other consumer, twice": (2 * KEYS, QUERIES, 2, "shared memory"),
    "the part of dQ, to be added": (QUERIES, HEAD_DIM, 4, "shared memory"),
}

# %%

# Measuring
rows, room = [], {"registers": 0, "shared memory": 0}
for what, (n_rows, columns, size, where) in held.items():
    kib = n_rows * columns * size // KIB
    room[where] += kib
    rows.append({"what": what, "KiB": kib, "where": where})
rows += [{"what": "in all", "KiB": kib, "where": where} for where, kib in room.items()]
assert room["registers"] < 256
assert room["shared memory"] < 227
lab.table(rows, "What a program holds")

# %%
# Registers are nearly full, because addresses, statistics and the warps that do not compute need
# some, too. A program of plain Triton has no say in this: where a tile lies is the compiler's
# choice.
#
# **Waiting.** Each part of :math:`dQ` leaves the SM. If the warps that compute also add, they wait
# for memory in every step.

# %%
# Which operand comes from where
# ------------------------------
#
# A matmul of Hopper takes its *right* operand from shared memory, its *left* one from shared memory
# or from registers, and leaves its result in registers. Moreover, what it leaves is distributed
# over the threads as a left operand has to be. So we compute the *transposed* scores :math:`S^\top
# = K Q^\top`, with keys as rows, and likewise :math:`dP^\top = V dO^\top`. Then the weights and
# :math:`dS^\top` are left operands where they are.

operands = [
    ("S^T = K Q^T", "shared memory", "registers, becomes P^T"),
    ("dP^T = V dO^T", "shared memory", "registers, becomes dS^T"),
    ("dV += P^T dO", "registers", "registers, stays there"),
    ("dK += dS^T Q", "registers", "registers, stays there"),
    ("part of dQ = dS K", "shared memory", "registers, leaves the SM"),
]
columns = ("matmul", "left operand from", "result")
lab.table(
    [dict(zip(columns, row, strict=True)) for row in operands],
    "Five matmuls; the right operand is in shared memory",
)

# %%
# Only the last one is out of place. It sums over the *keys* of a tile, which are spread over both
# :term:`warpgroups <warpgroup>` that compute, the *consumers*. So :math:`dS^\top` is written to
# shared memory, once, and is read from there transposed, which the matmul does on its way. Nothing
# else that a consumer computes is ever written to shared memory to be read by a matmul.
#
# The sweep in PyTorch, with the names of the kernel: a program owns the keys of a tile, and meets
# tiles of queries from the last to the first.


def one_sweep(q, k, v, do, is_causal=False, block_m=32, block_n=64, order=None):
    """(dq, dk, dv), where ``order`` is the order in which tiles of keys add to dq."""
    n_q, n_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    seen = seen.tril(n_k - n_q) if is_causal else seen
    # -- what the forward pass has left
    s = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    delta = (do * (s.softmax(-1) @ v)).sum(-1)

    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for tile in order or range(-(-n_k // block_n)):
        keys = slice(tile * block_n, (tile + 1) * block_n)
        for start in reversed(range(0, n_q, block_m)):
            queries = slice(start, start + block_m)
            if not seen[queries, keys].any():
                continue
            tile_q, tile_do = q[:, :, queries], do[:, :, queries]
            # -- in registers: keys are rows
            s = k[:, :, keys] @ tile_q.mT * scale
            p = (s - lse[:, :, None, queries]).exp()
            p = p.masked_fill(~seen[queries, keys].T, 0.0)
            dp = v[:, :, keys] @ tile_do.mT
            ds = p * (dp - delta[:, :, None, queries])
            dv[:, :, keys] += p @ tile_do
            dk[:, :, keys] += ds @ tile_q * scale
            # -- in memory: to these queries other tiles of keys add as well
            dq[:, :, queries] += ds.mT @ k[:, :, keys] * scale
    return dq, dk, dv


# %%
# The check compares all three gradients with float64.


# Measuring
def drawn(sizes, dtype):
    """Random q, k, v and do of (batch, heads, heads of keys, queries, keys, head_dim)."""
    batch, heads, heads_k, n_q, n_k, head_dim = sizes
    q, k, v = draw(batch, heads, n_q, head_dim, dtype, heads_k=heads_k, seqlen_k=n_k)
    return q, k, v, torch.randn_like(q)


def by_pytorch(q, k, v, do, is_causal, window=None):
    """PyTorch's gradients in the dtype of q, with the mask that the book's truth has."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    at = torch.arange(n_q, device=q.device)[:, None] + n_k - n_q
    j = torch.arange(n_k, device=q.device)
    mask = (j <= at) if is_causal else torch.ones_like(j <= at)
    if window is not None:
        mask = mask & (j >= at - window[0]) & (j <= at + window[1])
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=mask)
    return torch.autograd.grad(out, leaves, do)


def three_cases(what, ours, q, k, v, do, is_causal, window=None, factor=4):
    scale = q.shape[3] ** -0.5
    truth = reference.attention_backward(q, k, v, do, is_causal, scale, None, window)
    theirs = by_pytorch(q, k, v, do, is_causal, window)
    for name, *results in zip(("dq", "dk", "dv"), ours, theirs, truth, strict=True):
        yield lab.Case(what, name, *results, factor=factor)


def cases_in_pytorch():
    for sizes in (
        (1, 2, 2, 100, 100, 64),
        (1, 2, 2, 65, 127, 128),
        (2, 1, 1, 1, 300, 64),
    ):
        for is_causal in (False, True):
            inputs = drawn(sizes, torch.float32)
            ours = one_sweep(*inputs, is_causal)
            what = f"{sizes}{', causal' * is_causal}"
            yield from three_cases(what, ours, *inputs, is_causal, factor=8)


lab.check("The sweep in PyTorch", cases_in_pytorch())

# %%
# One kernel, many switches
# -------------------------
#
# One kernel can do all rungs of the ladder, and each rung turns one switch on. It takes less than
# the package's kernel: head_dim 128, and lengths that 128 divides. Each rung shows its piece of it;
# the kernel as a whole is in the next box. ``_stamp`` notes the time for a timeline later and is
# compiled away unless ``TRACE`` is set.

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

BLOCK_M = gl.constexpr(64)  # queries in a tile
STAGES = gl.constexpr(2)  # tiles of queries, and as many of gradients
COLUMNS = gl.constexpr(128)  # head_dim
EVENTS = gl.constexpr(6)


@gluon.jit
def _stamp(trace_ptr, traced, role, i, event, TRACE: gl.constexpr):
    """Note the cycle of the SM at which a role of the traced program came to an event."""
    if TRACE:
        now = gl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        mine = gl.program_id(0) == traced[0]
        gl.store(trace_ptr + (role * traced[1] + i) * EVENTS + event, now, mask=mine)


@gluon.jit
def _loader(descs, buffers, barriers, walk):
    q_desc, k_desc, v_desc, do_desc, stats_desc = descs
    q_s, do_s, lse_s, delta_s, k_s, v_s, _, _ = buffers
    kv_full, q_full, q_empty, do_full, do_empty, _, _ = barriers
    start_n, row_of_head, n_tiles, steps, all_rows = walk
    mbarrier.expect(
        kv_full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
    )
    for half in gl.static_range(2):
        row = row_of_head + start_n + half * ROWS
        tma_load(k_desc, [row, 0], kv_full, k_s.index(half))
        tma_load(v_desc, [row, 0], kv_full, v_s.index(half))
    nbytes: gl.constexpr = q_desc.block_type.nbytes + stats_desc.block_type.nbytes
    for i in range(steps):
        slot, parity = i % STAGES, (i // STAGES) & 1
        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
        mbarrier.wait(q_empty.index(slot), parity ^ 1)
        mbarrier.expect(q_full.index(slot), nbytes)
        tma_load(q_desc, [row, 0], q_full.index(slot), q_s.index(slot))
        tma_load(stats_desc, [row], q_full.index(slot), lse_s.index(slot))
        mbarrier.wait(do_empty.index(slot), parity ^ 1)
        mbarrier.expect(do_full.index(slot), nbytes)
        tma_load(do_desc, [row, 0], do_full.index(slot), do_s.index(slot))
        tma_load(stats_desc, [all_rows + row], do_full.index(slot), delta_s.index(slot))


@gluon.jit
def _adder(
    adding, trace_ptr, traced,
    IN_ORDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    sums_desc, counter_ptr, buffers, barriers, walk = adding
    parts = buffers[7]
    part_full, part_empty = barriers[5], barriers[6]
    start_n, row_of_head, n_tiles, steps, _ = walk
    position = 0  # how far the program of the keys before is known to be
    for i in range(steps):
        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
        _stamp(trace_ptr, traced, 2, i, 0, TRACE)
        # -- wait: in a fixed order for the program of the keys before
        if IN_ORDER:  # noqa: SIM102 (only the second is asked on the GPU)
            if start_n > 0:
                while position < i + 1:
                    position = position_of(counter_ptr - 1)
        _stamp(trace_ptr, traced, 2, i, 1, TRACE)
        for half in gl.static_range(2):
            mbarrier.wait(part_full.index(half), i & 1)
        _stamp(trace_ptr, traced, 2, i, 2, TRACE)
        # -- add: what both consumers have handed over
        for half in gl.static_range(2):
            tma_add(sums_desc, [row, half * (COLUMNS // 2)], parts.index(half))
        # -- go on: the consumers, and the program of the next keys
        tma.store_wait(0)
        for half in gl.static_range(2):
            mbarrier.arrive(part_empty.index(half))
        if IN_ORDER:
            announce(counter_ptr, i + 1)
        _stamp(trace_ptr, traced, 2, i, 3, TRACE)


@gluon.jit
def _consumer(
    computing, trace_ptr, traced,
    ME: gl.constexpr, IS_CAUSAL: gl.constexpr, OVERLAP: gl.constexpr,
    HALVES: gl.constexpr, ADDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, sums_desc, buffers, barriers, walk, sm_scale = computing
    q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts = buffers
    kv_full, q_full, q_empty, do_full, do_empty, part_full, part_empty = barriers
    start_n, row_of_head, n_tiles, steps, _ = walk
    PART: gl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_M, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS, 16]
    )
    part_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PART, 16]
    )
    key: gl.constexpr = gl.SliceLayout(1, score_layout)
    query: gl.constexpr = gl.SliceLayout(0, score_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dtype: gl.constexpr = dk_desc.dtype
    scale_log2 = sm_scale * LOG2E
    own_n = start_n + ME * ROWS
    k, v = k_s.index(ME), v_s.index(ME)
    none = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    part = gl.zeros([BLOCK_M, PART], gl.float32, part_layout)
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    mbarrier.wait(kv_full, 0)

    for i in range(steps):
        slot, parity = i % STAGES, (i // STAGES) & 1
        start_m = (n_tiles - 1 - i) * BLOCK_M
        q, do = q_s.index(slot), do_s.index(slot)
        # -- issue: the scores, and behind them dP
        _stamp(trace_ptr, traced, ME, i, 0, TRACE)
        mbarrier.wait(q_full.index(slot), parity)
        s = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
        if OVERLAP:
            mbarrier.wait(do_full.index(slot), parity)
            dp = warpgroup_mma(
                v, do.permute([1, 0]), none, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=[s])
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        _stamp(trace_ptr, traced, ME, i, 1, TRACE)
        # -- weigh: while dP is computed
        lse = lse_s.index(slot).load(query)
        p = exp2(s * scale_log2 - lse[None, :])
        if IS_CAUSAL:  # noqa: SIM102 (only the second is asked on the GPU)
            if start_m < own_n + ROWS - 1:
                keys = own_n + gl.arange(0, ROWS, key)
                p = keep_seen(p, keys - start_m, keys, False)
        if not OVERLAP:
            mbarrier.wait(do_full.index(slot), parity)
            dp = warpgroup_mma(
                v, do.permute([1, 0]), none, use_acc=False, is_async=True
            )
        weights = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
        delta = delta_s.index(slot).load(query)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta[None, :])).to(dtype)
        _stamp(trace_ptr, traced, ME, i, 2, TRACE)
        # -- hand dS over: while dv is computed
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        if not OVERLAP:
            dv = warpgroup_mma_wait(0, deps=[dv])
        ds_s.index(2 * (i % 2) + ME).store(ds)
        fence_async_shared()
        if HALVES:
            named_barrier("sync", 9, 256)  # both consumers
        else:
            named_barrier("sync", 9 + ME, 128)  # the warps of this one
        _stamp(trace_ptr, traced, ME, i, 3, TRACE)
        # -- part of dq: half of the columns, of the keys of both
        if HALVES:
            for half in gl.static_range(2):
                ds_t = ds_s.index(2 * (i % 2) + half).permute([1, 0])
                columns = k_s.index(half).slice(ME * PART, PART, dim=1)
                part = warpgroup_mma(
                    ds_t, columns, part, use_acc=half > 0, is_async=True
                )
        else:  # all columns, of its own keys
            ds_t = ds_s.index(2 * (i % 2) + ME).permute([1, 0])
            part = warpgroup_mma(ds_t, k, part, use_acc=False, is_async=True)
        if not OVERLAP:
            part = warpgroup_mma_wait(0, deps=[part])
        # -- hand the part over: while dk is computed
        ds_operand = gl.convert_layout(ds, operand, assert_trivial=True)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        if OVERLAP:
            part, dv = warpgroup_mma_wait(1, deps=[part, dv])
        else:
            dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(do_empty.index(slot))
        _stamp(trace_ptr, traced, ME, i, 4, TRACE)
        if ADDER:
            mbarrier.wait(part_empty.index(ME), (i & 1) ^ 1)
        else:
            tma.store_wait(0)
        parts.index(ME).store(part)
        fence_async_shared()
        if ADDER:
            mbarrier.arrive(part_full.index(ME))
        else:
            column = ME * PART if HALVES else 0
            tma_add(sums_desc, [row_of_head + start_m, column], parts.index(ME))
        _stamp(trace_ptr, traced, ME, i, 5, TRACE)
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_empty.index(slot))

    # -- write: dk and dv, where keys and values were
    named_barrier("sync", 9, 256)
    k.store((dk * sm_scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    tma_store(dk_desc, [row_of_head + own_n, 0], k)
    tma_store(dv_desc, [row_of_head + own_n, 0], v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seqlen", "heads", "heads_at_once", "pid", "n_traced"])
def _one_sweep_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums_desc,
    counter_ptr, trace_ptr, heads, seqlen, sm_scale, heads_at_once, pid, n_traced,
    IS_CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, HALVES: gl.constexpr,
    ADDER: gl.constexpr, IN_ORDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    # -- place: these keys of a head, and the queries that see them
    tile, head = place(seqlen // 128, heads, heads_at_once)
    start_n = tile * 128
    n_tiles = seqlen // BLOCK_M
    steps = n_tiles
    if IS_CAUSAL:
        steps = n_tiles - start_n // BLOCK_M
    counter_ptr += head * (seqlen // 128) + tile

    # -- share
    dtype: gl.constexpr = q_desc.dtype
    PART: gl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [64, COLUMNS], dtype
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, BLOCK_M], dtype
    )
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_M, PART], gl.float32
    )
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_M], gl.float32
    )
    ring: gl.constexpr = [STAGES, BLOCK_M, COLUMNS]
    q_s = gl.allocate_shared_memory(dtype, ring, tile_layout)
    do_s = gl.allocate_shared_memory(dtype, ring, tile_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    v_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_M], ds_layout)
    parts = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, PART], part_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    part_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    part_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(kv_full, count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
        mbarrier.init(do_full.index(b), count=1)
        mbarrier.init(do_empty.index(b), count=2)
    for b in gl.static_range(2):
        mbarrier.init(part_full.index(b), count=1)
        mbarrier.init(part_empty.index(b), count=1)

    # -- roles: two consumers, a loader, and perhaps an adder
    buffers = (q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, part_full, part_empty)
    walk = (start_n, head * seqlen, n_tiles, steps, heads * seqlen)
    traced = (pid, n_traced)
    descs = (q_desc, k_desc, v_desc, do_desc, stats_desc)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    computing = (dk_desc, dv_desc, sums_desc, buffers, barriers, walk, sm_scale)
    if ADDER:
        adding = (sums_desc, counter_ptr, buffers, barriers, walk)
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_0,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_1,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (_loader, (descs, buffers, barriers, walk)),
                (_adder, (adding, trace_ptr, traced, IN_ORDER, TRACE)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_0,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_1,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (_loader, (descs, buffers, barriers, walk)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# %%
# Each change adds its switch to those before it. All are timed in one run at length 4,096 and
# head_dim 128, beside a :term:`cuBLAS` matmul, both ways of plain Triton, and the package's kernel.
# Times are those of the whole backward pass: ``delta`` before the sweep, zeros for the sums of
# :math:`dQ`, and their conversion to 16 bits behind it count as well.

LADDER = {
    "one sweep with roles": {
        "OVERLAP": False, "HALVES": False, "ADDER": False, "IN_ORDER": False,
    },
    "half the columns": {"HALVES": True},
    "overlap": {"OVERLAP": True},
    "an adder": {"ADDER": True},
    "a fixed order": {"IN_ORDER": True},
}  # fmt: skip

# %%


# Measuring
VERSIONS, so_far = {}, {}
for name, change in LADDER.items():
    VERSIONS[name] = so_far = so_far | change
HOPPER = runtime.capability(runtime.DEVICE) == (9, 0)
NEEDS_HOPPER = lab.Absent("it needs a GPU of compute capability 9.0, which is Hopper")


def described(x, rows, columns, kind=gl.bfloat16):
    """A descriptor of all heads, one below the other, in tiles of so many rows."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return TensorDescriptor.from_tensor(
        x.view(-1, x.shape[-1]), [rows, columns], layout
    )


def described_rows(stats):
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_M.value], gl.float32)
    return TensorDescriptor.from_tensor(stats.view(-1), [BLOCK_M.value], layout)


def run(q, k, v, out, lse, do, is_causal, trace=None, traced=0, **options):
    batch, n_heads, seqlen, head_dim = q.shape
    heads, scale = batch * n_heads, head_dim**-0.5
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    stats = hopper._statistics(out, lse, do, None)
    sums = torch.zeros(q.shape, device=q.device, dtype=torch.float32)
    counter = torch.zeros(heads * seqlen // 128, device=q.device, dtype=torch.int32)
    at_once = hopper._heads_at_once(
        choice.CONFIGS[128], q, k, None, 0 if is_causal else None, options["IN_ORDER"]
    )
    tiles = [described(x, 64, 128) for x in (q, k, v, do, dk, dv)]
    part = described(sums, 64, 64 if options["HALVES"] else 128, gl.float32)
    _one_sweep_kernel[(heads * seqlen // 128,)](
        *tiles[:4], described_rows(stats), *tiles[4:], part, counter,
        counter if trace is None else trace, heads, seqlen, scale, at_once, traced,
        seqlen // BLOCK_M.value, IS_CAUSAL=is_causal, TRACE=trace is not None,
        num_warps=4, **options,
    )  # fmt: skip
    return torch.mul(sums, scale, out=dq), dk, dv


def forward_of(q, k, v, is_causal, window=None):
    """out and lse, which the backward pass is given."""
    return attention_forward(q, k, v, is_causal, q.shape[3] ** -0.5, window)


def in_plain_triton(inputs, is_causal, deterministic):
    """The whole backward pass in plain Triton: two sweeps if deterministic, otherwise one."""
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal)
    scale = q.shape[3] ** -0.5
    return partial(
        plain.attention_backward, q, k, v, out, lse, do, is_causal, scale, deterministic
    )


def in_gluon(inputs, is_causal, deterministic, window=None, config=None):
    """The whole backward pass by the package's Gluon kernel."""
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal, window)
    return partial(
        hopper.attention_backward, q, k, v, out, lse, do, is_causal, q.shape[3] ** -0.5,
        deterministic, None, window, config=config,
    )  # fmt: skip


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    inputs = drawn((batch, heads, heads, seqlen, seqlen, head_dim), dtype)
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal)
    ours = {
        name: partial(run, q, k, v, out, lse, do, is_causal, **options)
        for name, options in VERSIONS.items()
    }
    ours["Kernel Book"] = in_gluon(inputs, is_causal, True)
    ours = {
        name: lab.tried(version) if HOPPER else NEEDS_HOPPER
        for name, version in ours.items()
    }
    two_and_one = {
        "two sweeps": in_plain_triton(inputs, is_causal, True),
        "one sweep, plain Triton": in_plain_triton(inputs, is_causal, False),
    }
    return {"matmul": matmul()} | two_and_one | ours


steps = lab.bench("ladder", points([4096], (128,)), ladder_providers, **BACKWARD)
running = [name for name in VERSIONS if name not in steps.skipped]
lab.ladder(
    steps,
    "From two sweeps to one in a fixed order",
    ["two sweeps", "one sweep, plain Triton", *LADDER, "Kernel Book"],
    by="mask",
    where={"seqlen": 4096},
)

# %%


# Measuring
def worst_of_each():
    """One row for each version, of which all cases have to pass."""
    found = []
    for name in running:
        rows = []
        for is_causal in (False, True):
            for length in (128, 384, 1152):
                q, k, v, do = drawn((1, 8, 8, length, length, 128), torch.bfloat16)
                out, lse = forward_of(q, k, v, is_causal)
                ours = run(q, k, v, out, lse, do, is_causal, **VERSIONS[name])
                what = f"{name}, {length}{', causal' * is_causal}"
                cases = three_cases(what, ours, q, k, v, do, is_causal)
                rows += [case.row() for case in cases]
        if failed := [row for row in rows if not row["ok"]]:
            raise lab.CheckFailed(f"{len(failed)} of {len(rows)} failed: {failed[0]}")
        worst = max(rows, key=lambda row: row["error"] / row["tolerance"])
        row = {"version": name, "cases": len(rows), "error": worst["error"]}
        row |= {"PyTorch's": worst["torch_error"], "tolerance": worst["tolerance"]}
        found.append(row)
    return found


# %%

# Folded: Every version against float64
lab.attempt(
    "The worst gradient of each version, bfloat16, lengths 128 to 1,152, against float64",
    worst_of_each if HOPPER else NEEDS_HOPPER,
)

# %%

# Reading


def gain(name, mask, before):
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def told(name):
    """What a rung gains over the one before, in words."""
    names = ["two sweeps", *LADDER]
    return step(steps, names[names.index(name) - 1], name)


lab.read(
    f"**Where we start:** two sweeps reach {100 * steps.share('two sweeps', mask='full'):.0f} % of "
    f"the matmul without a mask. As they compute seven matmuls and five are counted, their "
    f"matmuls run at {140 * steps.share('two sweeps', mask='full'):.0f} %. One sweep in plain "
    f"Triton {verdict(gain('one sweep, plain Triton', 'full', 'two sweeps'))} against two, "
    f"although it computes fewer matmuls."
)

# %%
# Rung 1: one sweep with roles
# ----------------------------
#
# A loader warp fills a ring of queries and one of gradients. Two consumers, a warpgroup each, own
# 64 of the 128 keys, and compute :math:`dK` and :math:`dV` of theirs. Each waits for every matmul
# that it issues, and computes a part of :math:`dQ` of its own, from its own keys. It puts the part
# into a buffer in shared memory and asks the copy engine to *add* the buffer to the sums in memory:
# ``tma_add`` is the copy from shared memory to memory with an addition at its end, done where the
# sums are, in the L2 cache. Before it writes the next part, a consumer waits until the engine has
# read the buffer.

# Reading
lab.read(told("one sweep with roles"))

# %%
# Rung 2: half of the columns
# ---------------------------
#
# Two consumers now add two parts to the same sums, one for the keys of each, so twice as many bytes
# go to memory as there have to. Each part of 64 queries by 128 columns also takes 64 registers per
# thread. Instead, both write their :math:`dS^\top` to shared memory and meet at a named barrier.
# Then each computes *half of the columns* for the keys of both:
#
# .. literalinclude:: attention_hopper_backward.py
#    :language: python
#    :pyobject: _consumer
#    :start-at: # -- part of dq
#    :end-before: else:  # all columns
#    :dedent:
#
# The two matmuls of ``static_range`` go to the same 32 registers. The buffers of :math:`dS^\top`
# are two for each consumer, used in turns, so one meeting per step suffices: a consumer that writes
# in step :math:`t` has met the other in step :math:`t - 1`, and by then the other had finished the
# matmuls of step :math:`t - 2`.

# Reading
lab.read(told("half the columns"))

# %%
# Rung 3: overlap
# ---------------
#
# A consumer waits for a matmul only when it needs the result. While it does something else, another
# matmul is under way: :math:`dP^\top` while the scores become weights, :math:`dV` while
# :math:`dS^\top` is written and the consumers meet, :math:`dK` while the part of :math:`dQ` is
# handed over.
#
# .. literalinclude:: attention_hopper_backward.py
#    :language: python
#    :pyobject: _consumer
#    :start-at: # -- hand the part over
#    :end-before: # -- write
#    :dedent:

# Reading
lab.read(told("overlap"))

# %%
# Rung 4: an adder
# ----------------
#
# Whoever asks the copy engine for an addition must wait for it before the buffer is used again. A
# warp of its own can do that, the *adder*. A consumer puts its half into the buffer, tells the
# adder by an mbarrier, and goes on. It waits only if the buffer has not been read since the step
# before.
#
# .. literalinclude:: attention_hopper_backward.py
#    :language: python
#    :pyobject: _adder
#    :start-at: for half in
#    :end-before: if IN_ORDER
#    :dedent:

# Reading
lab.read(told("an adder"))

# %%
# Rung 5: a fixed order
# ---------------------
#
# The additions above come in whatever order programs reach them, so the last bits of :math:`dQ`
# differ between runs, because the sum of floating-point numbers depends on their order. Now that
# there is an adder, it can wait for its turn without holding up anybody else: until the program of
# the keys before has added its part to the same queries. Each program counts in memory how far it
# is. The adder of the next one reads that counter:
#
# .. literalinclude:: attention_hopper_backward.py
#    :language: python
#    :pyobject: _adder
#    :start-at: # -- wait
#    :end-before: # -- add
#    :dedent:
#
# .. dropdown:: How a counter promises that the sums are in memory
#
#    The copy engine works beside the threads, so "I have asked for the addition" is not yet "it is
#    done". ``announce`` waits until the engine has *completed* its additions, not only read the
#    buffer; a *fence* then orders what the engine did before what the thread does, and the counter
#    is written with *release*, which no other SM sees before all that precedes it. Likewise the
#    reader takes the counter with *acquire* and a fence, before its own engine adds.
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: position_of
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: announce

# Reading
lab.read(
    told("a fixed order")
    + "This version gives the same bits in every run. The package's kernel, which takes windows, "
    "grouped heads and any length, *writes* the first part instead of adding it, so that the sums "
    "need no zeros, and reaches "
    f"{100 * steps.share('Kernel Book', mask='full'):.0f} % of the matmul without a mask and "
    f"{100 * steps.share('Kernel Book', mask='causal'):.0f} % with a causal one."
)

# %%
# Why nobody waits for ever
# -------------------------
#
# Programs that wait for each other may stand still: if those on the SMs wait for one that has not
# started, it never will. The argument that this cannot happen has three steps.
#
# 1. A program waits for one other, that of the keys *before* its own in the same head.
# 2. Program ids ascend with the keys of a head, and programs start in the order of their ids.
# 3. So among the programs that have started and not finished, the one of the smallest id waits for
#    none of the others: what it could wait for has a smaller id, hence has started, and is
#    finished. So it goes on, and finishes. Then the same holds for the next.
#
# The second half of step 2 is what every GPU does, though no manual promises it. If it did not
# hold, a program could draw its number from a counter in memory when it starts.
#
# To see the order at work, let's simulate it. In each tick a program on an SM may do one step of
# its own if the program of the keys before has done that step in a tick before.


def simulate(n_tiles, n_heads, n_sms, is_causal, at_once=1, backwards=False):
    """What each SM does in each tick: (head, tile, whether it worked); None if all stand still."""
    waiting = [
        (first + i % at_once, i // at_once)
        for first in range(0, n_heads, at_once)
        for i in range(n_tiles * at_once)
    ]
    if backwards:
        waiting = [(head, n_tiles - 1 - tile) for head, tile in waiting]
    done = dict.fromkeys(waiting, 0)
    on_sm, ticks = [None] * n_sms, []
    while waiting or any(on_sm):
        for sm in range(n_sms):
            if on_sm[sm] is None and waiting:
                on_sm[sm] = waiting.pop(0)
        may = {
            (head, tile)
            for head, tile in filter(None, on_sm)
            if tile == 0 or done[head, tile - 1] > done[head, tile]
        }
        if not may:
            return None
        ticks.append([p and (*p, p in may) for p in on_sm])
        for head, tile in may:
            done[head, tile] += 1
        for sm, program in enumerate(on_sm):
            steps_of = n_tiles - program[1] if program and is_causal else n_tiles
            if program and done[program] == steps_of:
                on_sm[sm] = None
    return ticks


assert (
    simulate(8, 3, 4, is_causal=False) is not None
)  # fewer SMs than programs of a head
assert simulate(8, 3, 4, is_causal=False, backwards=True) is None


# %%


# Drawing
def at_work(ticks):
    """The share of ticks in which an SM works."""
    worked = sum(bool(cell and cell[2]) for tick in ticks for cell in tick)
    return worked / (len(ticks) * len(ticks[0]))


SHOWN = {"full": simulate(8, 4, 8, False), "causal": simulate(8, 4, 8, True)}


def schedules(*panels):
    inks = ("Kernel Book", "PyTorch", "Liger", "SDPA flash")
    for axes, (mask, ticks) in zip(panels, SHOWN.items(), strict=True):
        for at, tick in enumerate(ticks):
            for sm, cell in enumerate(tick):
                if cell:
                    head, _, worked = cell
                    ink = lab.colour(inks[head]) if worked else lab.colour("matmul")
                    shade = 0.85 if worked else 0.25
                    axes.barh(sm, 1, 0.8, at, align="edge", color=ink, alpha=shade)
        axes.set(xlim=(0, len(ticks)), ylim=(8, -0.2), yticks=[], xlabel="steps")
        axes.spines["left"].set_visible(False)
        axes.set_title(f"{mask}: {100 * at_work(ticks):.0f} % at work", fontsize=11)


lab.sketch(
    "Eight SMs, four heads of eight tiles of keys, in a fixed order",
    "Each row is an SM, each colour a head, and grey is waiting. Without a mask the programs of "
    "the first head start one step after another, and those of the next heads follow without a "
    "gap. With a causal mask programs of later keys have fewer steps, all of a head end together, "
    "and those of the next head wait again.",
    schedules,
    panels=2,
    height=3.2,
)

# %%
# Without a mask the wait is paid once: the programs of the first head start one step after another,
# end one step after another, and the next head takes their places with the same delays. With a
# causal mask, programs of later keys have fewer steps. They meet queries from the *last* to the
# first, so that all of a head begin at the same queries, in turn. But then they also end together,
# and the next head begins with the same wait. The simulation exaggerates, because it takes a whole
# step to pass a turn on; the exercises have more of it.

# %%
# Who waits for whom
# ------------------
#
# As in the chapter on the forward pass, roles of one program write down the cycle of their SM at
# certain points. The program is in the middle of its head, so in a fixed order it has others before
# it.


# Measuring
TRACED = ["half the columns", "overlap", "a fixed order"]
SPAN = range(24, 32)  # steps, from the middle of 64
POINTS = ("begins", "scores", "dS", "met", "matmuls", "handed over")
OF_ADDER = ("asks", "its turn", "has parts", "added")


def stamps():
    q, k, v, do = drawn((4, 16, 16, 4096, 4096, 128), torch.bfloat16)
    out, lse = forward_of(q, k, v, False)
    rows, n = [], 4096 // BLOCK_M.value
    for version in TRACED:
        options = VERSIONS[version]
        at_once = hopper._heads_at_once(
            choice.CONFIGS[128], q, k, None, None, options["IN_ORDER"]
        )
        trace = torch.zeros(3, n, len(POINTS), device=q.device, dtype=torch.int32)
        for _ in range(3):  # the keys in the middle of the first head
            run(q, k, v, out, lse, do, False, trace, 16 * min(at_once, 64), **options)
        found = trace.tolist()
        start = found[0][SPAN[0]][0]
        for role, who in enumerate(("consumer 0", "consumer 1", "adder")):
            if who == "adder" and not options["ADDER"]:
                continue
            names = OF_ADDER if who == "adder" else POINTS
            for i in SPAN:
                # the counter has 32 bits, and may have begun anew
                at = [(x - start + 2**31) % 2**32 - 2**31 for x in found[role][i]]
                row = {"version": version, "role": who, "step": i}
                row |= dict.fromkeys((*POINTS, *OF_ADDER))
                rows.append(row | dict(zip(names, at, strict=False)))
    return rows


traced = lab.attempt(
    "Stamps of one program, in cycles of its SM", stamps if HOPPER else NEEDS_HOPPER
)

# %%


# Drawing
SHADES = {  # from one point to another
    ("begins", "scores"): ("waits for queries and scores", "SDPA flash"),
    ("scores", "dS"): ("makes P and dS", "Kernel Book"),
    ("dS", "met"): ("writes dS, meets the other", "PyTorch"),
    ("met", "matmuls"): ("waits for dq", "Liger"),
    ("matmuls", "handed over"): ("hands it over", "FlexAttention"),
    ("asks", "its turn"): ("waits for its turn", "SDPA cuDNN"),
    ("its turn", "has parts"): ("waits for parts", "matmul"),
    ("has parts", "added"): ("adds", "quack"),
}


def timelines(axes, rows):
    names, place, window = set(), 0, 14000
    ticks, labels = [], []
    for version in TRACED:
        for role in ("consumer 0", "consumer 1", "adder"):
            own = [r for r in rows if (r["version"], r["role"]) == (version, role)]
            for row in own:
                for (a, b), (label, ink) in SHADES.items():
                    if row[a] is None or row[b] is None:
                        continue
                    begin, end = max(row[a], 0), min(row[b], window)
                    if end > begin:
                        new = label if label not in names else None
                        names.add(label)
                        axes.barh(
                            place, end - begin, 0.7, begin, label=new,
                            color=lab.colour(ink),
                        )  # fmt: skip
            if own:
                ticks.append(place)
                labels.append(f"{version}: {role}")
                place += 1
        place += 0.6
    axes.set(xlim=(0, window), xlabel="cycles of the SM")
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", visible=True)


def of_version(rows, version, role="consumer 0"):
    return [r for r in rows if (r["version"], r["role"]) == (version, role)]


def cycles_a_step(rows, version):
    """Cycles from one step to the next of a consumer, over the span that was traced."""
    own = of_version(rows, version)
    return (own[-1]["begins"] - own[0]["begins"]) / (len(own) - 1) if own else nan


def part_of(rows, version, a, b, role="consumer 0"):
    """Which share of its time a role spends between two points."""
    own = of_version(rows, version, role)
    spent = sum(r[b] - r[a] for r in own)
    return spent / len(own) / cycles_a_step(rows, version) if own else nan


def in_words(rows):
    return "Timelines of two consumers and, in the last version, an adder. " + " ".join(
        f"{version}: {cycles_a_step(rows, version):,.0f} cycles a step, of which "
        f"{100 * part_of(rows, version, 'scores', 'dS'):.0f} % making P and dS, "
        f"{100 * part_of(rows, version, 'matmuls', 'handed over'):.0f} % handing dq over."
        for version in TRACED
    )


lab.draw(traced, "A program's roles, eight steps", in_words, timelines)

# %%

# Reading
a_step = {version: cycles_a_step(traced.rows, version) for version in TRACED}
ideal = (
    5 * 2 * QUERIES * KEYS * HEAD_DIM / 4096
)  # an SM does 4,096 operations per cycle
last = TRACED[-1]
if not traced.rows:
    steps.rate("an adder", mask="full")  # says why numbers are missing
lab.read(
    f"The five matmuls of a step take {ideal:,.0f} cycles of the matmul units. A step takes "
    f"{a_step['half the columns']:,.0f} cycles if every matmul is waited for, "
    f"{a_step['overlap']:,.0f} with overlap, and {a_step[last]:,.0f} in the last version, in "
    f"which the matmul units work {100 * ideal / a_step[last]:.0f} % of the time. There a consumer "
    f"spends {100 * part_of(traced.rows, last, 'scores', 'dS'):.0f} % of a step making weights and "
    f"dS, {100 * part_of(traced.rows, last, 'dS', 'met'):.0f} % until it has met the other, and "
    f"{100 * part_of(traced.rows, last, 'matmuls', 'handed over'):.0f} % handing its part over. "
    f"The adder waits for its turn for "
    f"{100 * part_of(traced.rows, last, 'asks', 'its turn', 'adder'):.0f} % of a step and adds for "
    f"{100 * part_of(traced.rows, last, 'has parts', 'added', 'adder'):.0f} %."
)

# %%
# The kernel of the package
# -------------------------
#
# The package's kernel is the last rung for any length, windows, grouped heads and head_dim 64. It
# is ``kernelbook.ops.hopper.backward.attention_backward``, and ``backward_choice`` says where it
# was measured to be faster than two sweeps. At head_dim 64 :math:`dK` and :math:`dV` are half as
# large, so a tile has 128 queries.


# Folded: What was fastest, by head_dim, mask and length
def chosen(head_dim, mask, deterministic, longest, config):
    row = {"head_dim": head_dim, "mask": mask}
    row["the same bits"] = "required" if deterministic else "not required"
    row["keys up to"] = "any" if longest == float("inf") else f"{longest:,}"
    if config is None:
        return row | {"kernel": "two sweeps"}
    row |= {"kernel": "one sweep", "queries": config.block_m}
    return row | {
        "order": "fixed" if config.ordered or deterministic else "as they come"
    }


# the longest row first, so that the table has all columns
choices = [chosen(*key, *row) for key, rows in choice.CHOICES.items() for row in rows]
lab.table(sorted(choices, key=len, reverse=True), "What the package's table says")

# %%
# .. dropdown:: The kernel whole
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: load
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: add
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: consume
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: attention_hopper_bwd_kernel

# %%
# Is it right?
# ------------
#
# The check compares all gradients at both head sizes with float64, over odd lengths, queries and
# keys of different length, grouped heads, causal masks and windows, in a fixed order and without
# one. Where there is no Hopper GPU, the sweep in PyTorch stands in for the kernel, and its rows say
# so.

# Measuring
MASKS = {"full": (False, None), "causal": (True, None), "window": (False, (70, 40))}


def every_case():
    for head_dim in (64, 128):
        for mask, (is_causal, window) in MASKS.items():
            for n_q, n_k in ((1, 127), (65, 193), (777, 1001)):
                sizes = (2, 6, 2, n_q, n_k, head_dim)
                if HOPPER:
                    inputs = drawn(sizes, torch.bfloat16)
                    for deterministic in (True, False)[: 1 + (mask == "causal")]:
                        free = None if deterministic else choice.FREE[head_dim]
                        ours = in_gluon(
                            inputs, is_causal, deterministic, window, free
                        )()
                        what = f"{sizes}, {mask}{', no order' * (not deterministic)}"
                        yield from three_cases(what, ours, *inputs, is_causal, window)
                elif n_q < 777 and window is None:
                    inputs = drawn((2, 2, 2, n_q, n_k, head_dim), torch.float32)
                    ours = one_sweep(*inputs, is_causal)
                    what = f"{sizes}, {mask}, the sweep in PyTorch"
                    yield from three_cases(what, ours, *inputs, is_causal, factor=8)


lab.check("The package's kernel", every_case())

# %%
# **The same bits.** One input, a thousand launches in a fixed order and a thousand without, while a
# second stream keeps the GPU busy with other work, so that programs start at other times in every
# launch. A race between the roles would show here, too: ``dk`` and ``dv`` have to be the same bits
# in either case.


# Measuring
def repeated(launches=1000):
    rows = []
    inputs = drawn((2, 8, 4, 1501, 1501, 128), torch.bfloat16)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=runtime.DEVICE)
    for order, deterministic in (("fixed", True), ("as they come", False)):
        for is_causal in (False, True):
            free = None if deterministic else choice.FREE[128]
            launch = in_gluon(inputs, is_causal, deterministic, None, free)
            first, differ = launch(), torch.zeros(3, device=runtime.DEVICE)
            for number in range(launches):
                if number % 8 == 0:
                    with torch.cuda.stream(other):
                        a @ a
                again = launch()
                pairs = zip(first, again, strict=True)
                differ += torch.stack([(x != y).any() for x, y in pairs])
            row = {"order": order, "mask": "causal" if is_causal else "full"}
            row |= {"launches": launches}
            counts = zip(("dq", "dk", "dv"), differ.int().tolist(), strict=True)
            row |= {f"{name} differs": count for name, count in counts}
            if (
                row["dk differs"]
                + row["dv differs"]
                + deterministic * row["dq differs"]
            ):
                raise lab.CheckFailed(f"Other bits: {row}")
            rows.append(row)
    return rows


again = lab.attempt(
    "One input, again and again, beside other work",
    repeated if HOPPER else NEEDS_HOPPER,
)
again

# %%


# Measuring
def soak(launches=1000):
    generator = torch.Generator().manual_seed(0)
    begin, shapes, most, worst = time.time(), set(), 0, 0.0
    for number in range(launches):
        # odd, so that few kernels are compiled; all else is drawn
        n_q, n_k = (2 * torch.randint(1, 900, (2,), generator=generator) + 1).tolist()
        head_dim, is_causal = (64, 128)[number % 2], bool(number // 2 % 2)
        inputs = drawn((2, 6, 2, n_q, n_k, head_dim), torch.bfloat16)
        ours = in_gluon(inputs, is_causal, True)()
        shapes.add((n_q, n_k, head_dim, is_causal))
        most = max(most, n_q, n_k)
        if number % 10 == 0:
            theirs = in_plain_triton(inputs, is_causal, True)()
            for x, y in zip(ours, theirs, strict=True):
                apart = (x.float() - y.float()).norm() / y.float().norm().clamp_min(1)
                worst = max(worst, apart.item())
    torch.cuda.synchronize()
    if not worst < 0.01:
        raise lab.CheckFailed(f"{worst:.3f} from plain Triton in the soak test.")
    row = {"launches": launches, "shapes": len(shapes), "longest": most}
    return [row | {"finished": launches, "seconds": round(time.time() - begin, 1)}]


# Folded: Launches of random shapes, which all have to finish
lab.attempt("Launches of random shapes", soak if HOPPER else NEEDS_HOPPER)

# %%

# Reading
found = {(row["order"], row["mask"]): row for row in again.rows}
of_free = [
    found.get(("as they come", mask), {}).get("dq differs", nan)
    for mask in ("full", "causal")
]
lab.read(
    f"In a fixed order no bit differs in {1000:,} launches. As parts come, `dq` differs from the "
    f"first launch in {of_free[0]:,.0f} of {1000:,} launches without a mask and in "
    f"{of_free[1]:,.0f} with a causal one, and `dk` and `dv` never do, because no other program "
    f"adds to them."
)

# %%
# How fast is it?
# ---------------
#
# All points have 16,384 tokens in all. Beside the two ways of the package stand cuDNN, which
# PyTorch calls as a backend of SDPA, and FlashAttention 4, which takes one sweep as well and has a
# deterministic mode. Only the backward pass is timed. The libraries are called by
# ``torch.autograd.grad`` and both of ours directly, which makes no difference as long as the GPU
# takes longer than the host.

# Measuring
LENGTHS = [1024, 4096, 16384]
PEERS = ("SDPA cuDNN", "FlashAttention")


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    *qkv, do = drawn((batch, heads, heads, seqlen, seqlen, head_dim), dtype)
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    inputs = (*qkv, do)
    fixed, free = NEEDS_HOPPER, NEEDS_HOPPER
    if HOPPER:
        fixed = lab.tried(in_gluon(inputs, is_causal, True))
        options = (None, choice.FREE[head_dim])
        free = lab.tried(in_gluon(inputs, is_causal, False, *options))
    return {
        "matmul": matmul(),
        "SDPA cuDNN": sdpa("CUDNN_ATTENTION", leaves, do, is_causal=is_causal),
        "FlashAttention": flash(leaves, do, causal=is_causal),
        "FlashAttention, deterministic": flash(
            leaves, do, causal=is_causal, deterministic=True
        ),
        "two sweeps": in_plain_triton(inputs, is_causal, True),
        "one sweep, no order": free,
        "Kernel Book": fixed,
    }


speed = lab.bench("backward", points(LENGTHS), providers, **BACKWARD)
lab.plot(speed, "head_dim 128, full", where={"head_dim": 128, "mask": "full"})

# %%

lab.plot(speed, "head_dim 128, causal", where={"head_dim": 128, "mask": "causal"})

# %%

# Folded: The same at head_dim 64, full
lab.plot(speed, "head_dim 64, full", where={"head_dim": 64, "mask": "full"})

# %%

# Folded: The same at head_dim 64, causal
lab.plot(speed, "head_dim 64, causal", where={"head_dim": 64, "mask": "causal"})

# %%

# Measuring
at_points = []
for point in points(LENGTHS, (128, 64)):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    library, _ = speed.best_peer(*PEERS, **where)
    row = {"head_dim": point["head_dim"], "mask": point["mask"]}
    row["length"] = point["seqlen"]
    columns = {
        "two sweeps": "two sweeps",
        "no order": "one sweep, no order",
        "fixed order": "Kernel Book",
        "FA4, fixed": "FlashAttention, deterministic",
    }
    row |= {column: speed.rate(name, **where) for column, name in columns.items()}
    row |= {"library": library}
    row["its speed"] = nan if library == "none" else speed.rate(library, **where)
    at_points.append(row)
lab.table(
    [
        {key: f"{x:.0f}" if isinstance(x, float) else x for key, x in row.items()}
        for row in at_points
        if speed.rows
    ],
    "TFLOP/s of our ways, of FlashAttention's deterministic mode, and of the fastest library",
)

# %%


# Reading
def best_of_ours(row):
    return max(row["fixed order"], row["two sweeps"])


def shares(head_dim, mask, of):
    rows = [r for r in at_points if (r["head_dim"], r["mask"]) == (head_dim, mask)]
    found = [100 * best_of_ours(row) / row[of] for row in rows]
    return f"{min(found):.0f} to {max(found):.0f} %"


ahead = [row for row in at_points if row["fixed order"] > row["two sweeps"]]
over_theirs = [row for row in at_points if best_of_ours(row) > row["FA4, fixed"]]
absent = [
    name for name in (*PEERS, "FlashAttention, deterministic") if name in speed.skipped
]
lab.read(
    f"One sweep in a fixed order is faster than two at {len(ahead)} of {len(at_points)} points. "
    f"The better of the two reaches, of the fastest library, {shares(128, 'full', 'its speed')} at "
    f"head_dim 128 without a mask, {shares(128, 'causal', 'its speed')} with a causal one, and "
    f"{shares(64, 'full', 'its speed')} and {shares(64, 'causal', 'its speed')} at head_dim 64. Of "
    f"FlashAttention's deterministic mode, which promises the same as ours, it reaches "
    f"{shares(128, 'full', 'FA4, fixed')} and {shares(128, 'causal', 'FA4, fixed')} at head_dim "
    f"128, and is ahead at {len(over_theirs)} of {len(at_points)} points. "
    + (f"Absent from this run: {', '.join(absent)}." if absent else "")
    if speed.rows
    else f"{nan}"
)

# %%
# What it does not reach, and why
# -------------------------------
#
# **Head size 64.** The matmuls of a pair of a query and a key are half as long as at head_dim 128,
# and everything else is as long: one exponential, the conversions of :math:`P` and :math:`dS`,
# writing :math:`dS` to shared memory and meeting there. Tiles of 128 queries halve the number of
# meetings, but :math:`S` and :math:`dP` then take 128 registers of each thread, and the compiler
# spills some, most with a causal mask, where the code of the mask is in the loop.
#
# **Short sequences.** Before the sweep, a kernel reads ``out`` and ``do`` for ``delta``; behind it,
# another reads the sums of :math:`dQ` in float32 and writes them in 16 bits. Both move as many
# bytes at length 1,024 as at 16,384, because the number of tokens is the same, while the sweep has
# a sixteenth of the work. The same is true of FlashAttention, which has these two kernels as well.


# Measuring
def around():
    q, k, v, do = drawn((16, 16, 16, 1024, 1024, 128), torch.bfloat16)
    out, lse = forward_of(q, k, v, False)
    sums, dq = torch.zeros(q.shape, device=q.device), torch.empty_like(q)
    parts = {
        "delta, before": lambda: hopper._statistics(out, lse, do, None),
        "conversion, behind": lambda: torch.mul(sums, 0.1, out=dq),
    }
    return [
        {"what": what, "ms": triton.testing.do_bench(part, return_mode="median")}
        for what, part in parts.items()
    ]


beside = lab.attempt("Around the sweep", around if HOPPER else NEEDS_HOPPER)

# %%

# Reading
in_all = sum(row["ms"] for row in beside.rows) if beside.rows else nan


def share_around(seqlen):
    where = {"head_dim": 128, "mask": "full", "seqlen": seqlen}
    return 100 * in_all / speed.milliseconds_at("Kernel Book", **where)


def cost(head_dim, mask, seqlen=16384):
    where = {"head_dim": head_dim, "mask": mask, "seqlen": seqlen}
    fixed, free = (
        speed.rate(n, **where) for n in ("Kernel Book", "one sweep, no order")
    )
    return fixed / free - 1


lab.read(
    f"**Around the sweep.** At head_dim 128 without a mask, these two kernels take "
    f"{share_around(1024):.0f} % of the time at length 1,024 and {share_around(16384):.1f} % at "
    f"16,384. "
    f"**The order.** At length 16,384 a fixed order {verdict(cost(128, 'full'))} at head_dim 128 "
    f"without a mask and {verdict(cost(128, 'causal'))} with a causal one; at head_dim 64 it "
    f"{verdict(cost(64, 'full'))} and {verdict(cost(64, 'causal'))}."
)

# %%
# What breaks it
# --------------
#
# **To start from the wrong end.** With program ids that descend with the keys, the simulation above
# stands still, as soon as a head has more tiles of keys than there are SMs for them: each program
# waits for one that has not started. On a GPU that is a kernel which never returns.
#
# **To trust that zeros stay zeros.** The last tile of keys may be longer than the keys are. The
# copy engine fills it with zeros, so the score of a key that is not there is 0, and its weight
# :math:`e^{0 - \mathrm{lse}}`. In two sweeps that is harmless, because it reaches only the gradient
# of that key, which is not written. In one sweep it is multiplied by a row of zeros and added to
# :math:`dQ`. If all scores are far below zero, so is lse, and the weight is more than float32
# holds.

lse = torch.tensor([-5.0, -50.0, -100.0])  # of three queries
weight = (0.0 - lse).exp()
rows = []
for mistake in (True, False):
    p = weight if mistake else torch.zeros_like(weight)
    of_dq = p * 0.0  # dS of this key, times the key, which is zeros
    row = {"padded keys are": "not masked" if mistake else "masked"}
    row |= {f"lse {x:.0f}": f"{y:.0f}" for x, y in zip(lse, of_dq, strict=True)}
    rows.append(row)
assert [row["lse -100"] for row in rows] == ["nan", "0"]
lab.table(rows, "What a key that is not there adds to dq")

# %%
# **To expect the same bits of the same numbers.** Any order of the tiles of keys gives right
# gradients, and each gives others:

rows = []
q, k, v, do = drawn((1, 2, 2, 64, 512, 64), torch.float32)
orders = {"ascending": list(range(8)), "again": list(range(8))}
orders["descending"] = list(reversed(range(8)))
first = one_sweep(q, k, v, do)[0]
for name, order in orders.items():
    dq, _, _ = one_sweep(q, k, v, do, order=order)
    apart = ((dq - first).norm() / first.norm()).item()
    differ = 100 * (dq != first).float().mean().item()
    rows.append({"order": name, "elements that differ, %": round(differ)})
    assert apart < 1e-5
assert [row["elements that differ, %"] > 0 for row in rows] == [False, False, True]
lab.table(rows, "dq in float32, by the order in which tiles of keys add to it")

# %%
# Exercises
# ---------
#
# **1. What one sweep may gain.** Suppose that the matmuls of a kernel with two sweeps run at 85 %
# of the speed of a large one. Which share does the backward pass reach, if five matmuls are
# counted? At which speed must the matmuls of a kernel with one sweep run, so that it is 1.25 times
# as fast?

# %%

# Solution: what one sweep may gain
reached = 5 / 7 * 0.85
rows = [
    {"what": "two sweeps reach", "share": f"{100 * reached:.0f} %"},
    {"what": "the matmuls of one sweep run at", "share": f"{125 * reached:.0f} %"},
]
assert rows[0]["share"] == "61 %"
lab.table(rows, "Of the speed of a large matmul")

# %% **2. Does it fit?** At head_dim 128, could a program take tiles of 128 queries, or 96? Count
# shared memory (227 KiB) and the registers of the tiles that a consumer of 64 keys holds in
# float32, of the 240 that each of its 128 threads has.

# %%

# Solution: does it fit
rows = []
for queries in (64, 96, 128):
    shared = 2 * KEYS * 128 * 2 + 4 * queries * 128 * 2 + 2 * KEYS * queries * 2
    shared = (shared + queries * 128 * 4) / KIB
    registers = (2 * 64 * 128 + 2 * 64 * queries) / 128
    row = {
        "queries": queries,
        "shared memory, KiB": shared,
        "registers": int(registers),
    }
    rows.append(row | {"fits": "yes" if shared < 227 and registers < 240 else "no"})
assert [row["fits"] for row in rows] == ["yes", "no", "no"]
lab.table(rows, "Tiles of queries at head_dim 128")

# %%
# FlashAttention 4 takes 80 queries at head_dim 128 where nothing is masked. Its tiles need not be
# powers of two; Triton's must be, so 80 and 96 are out of reach whatever fits.
#
# **3. More heads at once.** With a causal mask, tiles of one head wait for each other because they
# start too close together. Let the tiles of several heads alternate: in the simulation, with 16
# tiles and 16 SMs, 1, 2, 4 and 8 heads at once of 32. Is it still free of deadlocks? What speaks
# against many heads at once?

# %%

# Solution: more heads at once
rows = []
for at_once in (1, 2, 4, 8):
    ticks = simulate(16, 32, 16, is_causal=True, at_once=at_once)
    row = {"heads at once": at_once, "SMs at work": f"{100 * at_work(ticks):.0f} %"}
    rows.append(row)
shares_at_work = [int(row["SMs at work"].split()[0]) for row in rows]
assert shares_at_work == sorted(shares_at_work)
assert shares_at_work[-1] > 1.2 * shares_at_work[0]
lab.table(rows, "Causal, in a fixed order")

# %% It is: in each head, ids still ascend with the keys. But the programs that run at the same time
# then read the queries of more heads, and add to more sums, which have to stay in the L2 cache: at
# length 16,384 and head_dim 128, queries, gradients and sums of one head are 16 MiB.

# %%
# References
# ----------
#
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - NVIDIA. *Parallel thread execution*, the instructions ``cp.reduce.async.bulk.tensor``, ``fence``
#   and ``redux``, and the memory consistency model.

# %%

# Closing
of_library = [
    best_of_ours(r) / r["its speed"] for r in at_points if r["library"] != "none"
]
of_matmul = [
    speed.share("Kernel Book", head_dim=128, mask=mask, seqlen=16384)
    for mask in ("full", "causal")
]
reached, limit = (
    (of_library, "the fastest library") if of_library else (of_matmul, "a matmul")
)
lab.finish(
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of {limit}, backward"
)
