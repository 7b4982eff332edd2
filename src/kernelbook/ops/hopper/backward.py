"""The backward pass for Hopper in Gluon: one sweep, and a warp that adds up dq meanwhile.

A program owns 128 keys, and meets all queries that see them. Its roles:

    two consumers  a warpgroup each, with 64 of the keys. It computes the transposes S^T and dP^T of
                   its keys' scores, makes P^T and dS^T of them in registers, and adds to its dv and
                   dk, in registers as well. dS^T goes to shared memory, and of what both have put
                   there each consumer computes a half of the program's part of dq.
    the loader     a warp that keeps a ring of queries, gradients and their statistics filled.
    the adder      a warp that adds the program's parts of dq to sums in memory, in float32.

So there are five matmuls for a pair of tiles, where two sweeps compute seven. For the formulas and
names see :mod:`kernelbook.ops.attention.backward`.

**Barriers**, and who arrives how often in a phase. Step t of a program is its t-th tile of queries,
and its slot in the rings is t mod STAGES; use u = t // STAGES of a slot waits for parity u & 1 of
``full``, and the loader for the other parity of ``empty``.

    k_full, v_full   1 phase         the loader announces bytes, once; the copy engine brings them
    q_full[slot]     1 a step        likewise: queries, and their lse
    do_full[slot]    1 a step        likewise: gradients of out, and their delta
    q_empty[slot]    2 arrivals      each consumer once a step, after S and dk have read the slot
    do_empty[slot]   2 arrivals      each consumer once a step, after dP and dv have read the slot
    part_full[c]     1 arrival       consumer c once a step, when its half of dq is in the buffer
    part_empty[c]    1 arrival       the adder once a step, when the copy engine has read that half
    barrier 9        256 threads     both consumers once a step, when dS^T is in shared memory, and
                                     once at the end, when no matmul reads keys any more

dS^T has two buffers, in turns: who writes one in step t has met the other consumer in step t - 1,
when that one had finished its matmuls of step t - 2.

**A fixed order.** Queries come from the last to the first. The sums of a tile of queries get the
parts of programs of ascending keys: a program says how far it is in a counter in memory, and the
adder of the next keys waits until that is past the same tile. Program ids ascend with the keys of a
head. So a program waits for a smaller id alone, and programs start in the order of their ids: the
unfinished one of the smallest id waits for nobody, and none waits forever. Because tiles come from
the last to the first, programs under a causal mask begin at the same tile, one after another, and
who begins later has less to do.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", NeurIPS 2024.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernelbook import runtime
from kernelbook.ops.attention import backward as plain
from kernelbook.ops.attention import scope, tiles, tuned
from kernelbook.ops.attention.scope import query_stages, seeing_queries
from kernelbook.ops.attention.tiles import LOG2E, place
from kernelbook.ops.hopper.backward_choice import (  # noqa: F401  (what says whether and how it runs)
    CONFIGS,
    Config,
    backward_choice,
    supported,
)
from kernelbook.ops.hopper.forward import _all_but_the_address, coordinates, exp2
from kernelbook.ops.hopper.parts import named_barrier, tma_load, tma_store
from kernelbook.ops.launch import Launch, planned

ROWS = gl.constexpr(64)
"""Keys of a consumer: the rows of one wgmma."""

KEYS = gl.constexpr(2 * 64)
"""Keys of a program."""

MEETING = gl.constexpr(9)
"""The named barrier at which the consumers meet; Triton uses low ones."""


# -- parts


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to memory, by the copy engine, in whatever order."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


# Triton 3.6 and 3.7 can do it, and have no name for it.
tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


@gluon.jit
def position_of(ptr):
    """Read how far another program is; what it has added before is then there.

    The lanes of the warp agree on the smallest that one of them read,
    because Triton takes a number for the same in all of them.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .s32 seen; ld.acquire.gpu.global.s32 seen, [$1];"
        " redux.sync.min.s32 $0, seen, 0xffffffff; fence.proxy.async.global; }",
        "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def announce(ptr, position):
    """Say how far this program is, when its additions are in memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff;"
        " st.release.gpu.global.s32 [$1], $2; mov.u32 $0, $2;",
        "=r,l,r", [ptr.to(gl.int64), position], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def keep_seen(
    p,  # transposed weights, (keys, queries)
    first,  # the first query of the tile that sees each key, (keys,)
    end,  # one past the last
    HAS_LEFT: gl.constexpr,  # whether end says anything
):
    """Make 0 of the weights of pairs of which the query does not see the key.

    Which query a register of a thread belongs to differs between threads only by a part of its last
    three bits: see ``mask_row_ends``.
    """
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    of_3: gl.constexpr = gl.SliceLayout(3, parts.type.layout)
    of_2: gl.constexpr = gl.SliceLayout(2, of_3)
    of_row: gl.constexpr = gl.SliceLayout(1, of_2)
    a = gl.arange(0, p.shape[1] // 8, gl.SliceLayout(0, of_2))[None, :][:, :, None][:, :, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, of_3)))[None, :][None, :, :]
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, parts.type.layout))))[
        None, :
    ][None, :, :][None, :, :, :]
    query = 8 * a + c
    b = b[:, :, :, None]
    first = gl.convert_layout(first, of_row, assert_trivial=True)
    first = first[:, None][:, :, None][:, :, :, None]
    parts = gl.where(query >= first - 2 * b, parts, 0.0)
    if HAS_LEFT:
        end = gl.convert_layout(end, of_row, assert_trivial=True)
        end = end[:, None][:, :, None][:, :, :, None]
        parts = gl.where(query < end - 2 * b, parts, 0.0)
    return gl.convert_layout(gl.reshape(parts, p.shape), p.type.layout, assert_trivial=True)


# -- the loader


@gluon.jit
def fetch(
    desc,
    stats_desc,
    ring,  # buffers, (STAGES, BLOCK_M, HEAD_DIM)
    stats,  # buffers of one statistic of the same queries, (STAGES, BLOCK_M)
    full,
    empty,
    step,
    at,  # where the tile lies, for the descriptor
    stats_row,
    STAGES: gl.constexpr,
):
    """Ask for a tile and its statistic as soon as both consumers have read their slot."""
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes + stats_desc.block_type.nbytes)
    tma_load(desc, at, full.index(slot), ring.index(slot))
    tma_load(stats_desc, [stats_row], full.index(slot), stats.index(slot))


@gluon.jit
def load(loading, constants: gl.constexpr):
    """Load keys and values once, and queries and gradients for step after step."""
    descs, buffers, barriers, where, walk = loading
    q_desc, k_desc, v_desc, do_desc, stats_desc = descs
    q_s, do_s, lse_s, delta_s, k_s, v_s, _, _ = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, _, _ = barriers
    batch, head_k, heads_k, batches, padded_q, _, _, packed = where
    start_n, end_tile, tiles_of_head, group, seqlen_q, seqlen_k = walk
    start_of_stats, end_q, end_k = packed
    BLOCK_M: gl.constexpr = constants[0]
    Q_STAGES: gl.constexpr = constants[1]
    DO_STAGES: gl.constexpr = constants[7]
    # -- keys and values: a half for each consumer
    mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
    mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
    for half in gl.static_range(2):
        at = coordinates(batch, head_k, start_n + half * ROWS, seqlen_k, end_k)
        tma_load(k_desc, at, k_full, k_s.index(half))
    for half in gl.static_range(2):
        at = coordinates(batch, head_k, start_n + half * ROWS, seqlen_k, end_k)
        tma_load(v_desc, at, v_full, v_s.index(half))
    # -- queries: of each head that reads these keys, from the last
    step = 0
    for member in range(group):
        head = head_k * group + member
        row_of_head = (batch * heads_k + head_k) * group + member
        for i in range(tiles_of_head):
            row = (end_tile - 1 - i) * BLOCK_M
            lse_row = row_of_head * padded_q + start_of_stats + row
            delta_row = lse_row + batches * heads_k * group * padded_q
            at = coordinates(batch, head, row, seqlen_q, end_q)
            fetch(q_desc, stats_desc, q_s, lse_s, q_full, q_empty, step, at, lse_row, Q_STAGES)
            fetch(
                do_desc, stats_desc, do_s, delta_s, do_full, do_empty, step, at, delta_row,
                DO_STAGES,
            )  # fmt: skip
            step += 1


# -- the adder


@gluon.jit
def add(adding, constants: gl.constexpr):
    """Add to the sums of dq what the consumers put into the buffer, a tile of queries a step."""
    sums_desc, counter_ptr, buffers, barriers, where, walk = adding
    parts = buffers[7]
    part_full, part_empty = barriers[6], barriers[7]
    batch, head_k, heads_k, _, padded_q, tile, end_before, packed = where
    _, end_tile, tiles_of_head, group, _, _ = walk
    BLOCK_M: gl.constexpr = constants[0]
    HEAD_DIM: gl.constexpr = constants[2]
    ORDERED: gl.constexpr = constants[5]
    n_tiles = padded_q // BLOCK_M  # at least as many as a head has
    position = 0  # how far the program of the keys before is known to be
    step = 0
    for member in range(group):
        row_of_head = ((batch * heads_k + head_k) * group + member) * padded_q
        for i in range(tiles_of_head):
            m = end_tile - 1 - i
            row = row_of_head + packed[0] + m * BLOCK_M
            # -- wait: for the part, and in a fixed order for the program of the keys before
            own_position = member * n_tiles + n_tiles - m
            begins = True  # whether no other program adds to these sums before
            if ORDERED:
                begins = m >= end_before
                if not begins:
                    while position < own_position:
                        position = position_of(counter_ptr - 1)
            for half in gl.static_range(2):
                mbarrier.wait(part_full.index(half), step & 1)
            # -- add: or write, where nothing is there yet
            if ORDERED and begins:
                for half in gl.static_range(2):
                    if BLOCK_M == 64:
                        tma_store(sums_desc, [row, half * (HEAD_DIM // 2)], parts.index(half))
                    else:
                        tma_store(sums_desc, [row + half * ROWS, 0], parts.index(half))
            else:
                for half in gl.static_range(2):
                    if BLOCK_M == 64:
                        tma_add(sums_desc, [row, half * (HEAD_DIM // 2)], parts.index(half))
                    else:
                        tma_add(sums_desc, [row + half * ROWS, 0], parts.index(half))
            # -- go on: the consumers when the buffer is read, the next program when all is added
            tma.store_wait(0)
            for half in gl.static_range(2):
                mbarrier.arrive(part_empty.index(half))
            if ORDERED:
                announce(counter_ptr, own_position)
            step += 1


# -- a consumer


@gluon.jit
def consume(computing, ME: gl.constexpr, constants: gl.constexpr):
    """Compute dk and dv of 64 keys, and half of what the program adds to dq.

    Matmuls are issued so that there is one to compute while this warpgroup does something else: dP
    while weights are made of S, dv while dS is handed over, and dk while dq is. To issue dv before
    dS is made of dP was measured not to be faster, and takes more registers.
    """
    dk_desc, dv_desc, buffers, barriers, where, walk, limits, sm_scale = computing
    q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, part_full, part_empty = barriers
    batch, head_k, _, _, _, _, _, packed = where
    start_n, end_tile, tiles_of_head, group, seqlen_q, seqlen_k = walk
    left, right = limits
    BLOCK_M: gl.constexpr = constants[0]
    Q_STAGES: gl.constexpr = constants[1]
    HEAD_DIM: gl.constexpr = constants[2]
    HAS_LEFT: gl.constexpr = constants[3]
    HAS_RIGHT: gl.constexpr = constants[4]
    ALL_WHOLE: gl.constexpr = constants[6]
    DO_STAGES: gl.constexpr = constants[7]
    LATE: gl.constexpr = constants[8]
    PART: gl.constexpr = HEAD_DIM * BLOCK_M // KEYS  # columns of this consumer's half of dq
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    key: gl.constexpr = gl.SliceLayout(1, score_layout)
    query: gl.constexpr = gl.SliceLayout(0, score_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dtype: gl.constexpr = dk_desc.dtype
    scale_log2 = sm_scale * LOG2E
    own_n = start_n + ME * ROWS
    _, whole, cut, _ = query_stages(
        own_n, own_n + ROWS - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    k, v = k_s.index(ME), v_s.index(ME)
    steps = group * tiles_of_head

    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    none = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    no_part = gl.zeros([ROWS, PART], gl.float32, part_layout)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)

    i = tiles_of_head  # tiles of this head from here on
    for step in range(steps):
        i = gl.where(i == 0, tiles_of_head, i) - 1
        start_m = (end_tile - tiles_of_head + i) * BLOCK_M
        q_slot, do_slot = step % Q_STAGES, step % DO_STAGES
        q, do = q_s.index(q_slot), do_s.index(do_slot)
        # -- weights: while dP is computed
        mbarrier.wait(q_full.index(q_slot), (step // Q_STAGES) & 1)  # wait 1
        s = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
        if not LATE:
            lse = lse_s.index(q_slot).load(query)
        mbarrier.wait(do_full.index(do_slot), (step // DO_STAGES) & 1)  # wait 2
        dp = warpgroup_mma(v, do.permute([1, 0]), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # wait 3
        if LATE:
            lse = lse_s.index(q_slot).load(query)
        p = exp2(s * scale_log2 - lse[None, :])
        if not ALL_WHOLE:
            at_edge = start_m < whole
            if HAS_LEFT:
                at_edge = at_edge | (start_m >= cut)
            if at_edge:
                keys = own_n + gl.arange(0, ROWS, key)
                first, end = seeing_queries(
                    keys, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
                )
                # a key past the end must not reach dq
                first = gl.where(keys < seqlen_k, first, seqlen_q)
                p = keep_seen(p, first - start_m, end - start_m, HAS_LEFT)
        # -- dS: and dv, while the consumers meet
        weights = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
        if not LATE:
            delta = delta_s.index(do_slot).load(query)
        dp = warpgroup_mma_wait(0, deps=[dp])  # wait 4
        if LATE:
            delta = delta_s.index(do_slot).load(query)
        ds = (p * (dp - delta[None, :])).to(dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        ds_s.index(2 * (step % 2) + ME).store(ds)
        fence_async_shared()
        named_barrier("sync", MEETING, 256)  # wait 5
        # -- dq: half of it, of the keys of both, handed over while dk is computed
        part = no_part
        for half in gl.static_range(2):
            ds_t = ds_s.index(2 * (step % 2) + half)
            keys_of_half = k_s.index(half)
            if BLOCK_M == 64:
                keys_of_half = keys_of_half.slice(ME * PART, PART, dim=1)
            else:
                ds_t = ds_t.slice(ME * ROWS, ROWS, dim=1)
            part = warpgroup_mma(
                ds_t.permute([1, 0]), keys_of_half, part, use_acc=half > 0, is_async=True
            )
        ds = gl.convert_layout(ds, operand, assert_trivial=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        part, dv = warpgroup_mma_wait(1, deps=[part, dv])  # wait 6
        mbarrier.arrive(do_empty.index(do_slot))
        mbarrier.wait(part_empty.index(ME), (step & 1) ^ 1)  # wait 7
        parts.index(ME).store(part)
        fence_async_shared()
        mbarrier.arrive(part_full.index(ME))
        dk = warpgroup_mma_wait(0, deps=[dk])  # wait 8
        mbarrier.arrive(q_empty.index(q_slot))

    # -- write: into the place of keys and values, which no matmul reads any more
    named_barrier("sync", MEETING, 256)
    k.store((dk * sm_scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    at = coordinates(batch, head_k, own_n, seqlen_k, packed[2])
    tma_store(dk_desc, at, k)
    tma_store(dv_desc, at, v)
    tma.store_wait(0)


@gluon.jit
def share(descs, counter_ptr, where, walk, limits, sm_scale, constants: gl.constexpr):
    """Share the work of a program between its roles."""
    # -- shared memory
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums_desc = descs
    BLOCK_M: gl.constexpr = constants[0]
    Q_STAGES: gl.constexpr = constants[1]
    HEAD_DIM: gl.constexpr = constants[2]
    DO_STAGES: gl.constexpr = constants[7]
    dtype: gl.constexpr = q_desc.dtype
    PART: gl.constexpr = HEAD_DIM * BLOCK_M // KEYS
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], gl.float32)
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK_M, HEAD_DIM], q_layout)
    do_s = gl.allocate_shared_memory(dtype, [DO_STAGES, BLOCK_M, HEAD_DIM], q_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], row_layout)
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], k_layout)
    v_s = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], k_layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_M], ds_layout)
    parts = gl.allocate_shared_memory(gl.float32, [2, ROWS, PART], part_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], bar)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], bar)
    part_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    part_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for b in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
    for b in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(b), count=1)
        mbarrier.init(do_empty.index(b), count=2)
    for b in gl.static_range(2):
        mbarrier.init(part_full.index(b), count=1)
        mbarrier.init(part_empty.index(b), count=1)

    # -- roles
    buffers = (q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts)
    barriers = (k_full, v_full, q_full, q_empty, do_full, do_empty, part_full, part_empty)
    computing = (dk_desc, dv_desc, buffers, barriers, where, walk, limits, sm_scale)
    loading = ((q_desc, k_desc, v_desc, do_desc, stats_desc), buffers, barriers, where, walk)
    adding = (sums_desc, counter_ptr, buffers, barriers, where, walk)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (computing, ME_0, constants)),
            (consume, (computing, ME_1, constants)),
            (load, (loading, constants)),
            (add, (adding, constants)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit(
    do_not_specialize=[
        "batches",
        "heads_k",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "heads_at_once",
    ]
)
def attention_hopper_bwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM), in tiles of BLOCK_M
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM), in tiles of ROWS
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    stats_desc,  # lse in base 2, and then delta, (2 * batch * heads * padded_q,)
    dk_desc,  # output, as the keys
    dv_desc,  # output, as the keys
    sums_desc,  # sums of dq in float32, (batch * heads * padded_q, HEAD_DIM)
    counter_ptr,  # how far programs are, (batch * heads // group, tiles of keys), of zeros, or None
    batches,
    heads_k,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    padded_q,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate
    HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    ORDERED: gl.constexpr,  # whether parts of dq are added in a fixed order
    ALL_WHOLE: gl.constexpr,  # whether no tile has to be masked
    BLOCK_M: gl.constexpr,
    Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    LATE: gl.constexpr,  # whether statistics are read late: see Config
):
    # -- place: these keys, and the tiles of queries of each head that see some of them
    n_tiles = gl.cdiv(seqlen_k, KEYS)
    tile, batch_head_k = place(n_tiles, batches * heads_k, heads_at_once)
    start_n = tile * KEYS
    first, _, _, end = query_stages(
        start_n, start_n + KEYS - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    end_tile = gl.cdiv(end, BLOCK_M)
    tiles_of_head = gl.maximum(end_tile - first // BLOCK_M, 0)
    end_before = 0  # one past the last tile that the keys before meet
    if ORDERED:
        _, _, _, end = query_stages(
            start_n - KEYS, start_n - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
            BLOCK_M,
        )  # fmt: skip
        end_before = gl.where(tile > 0, gl.cdiv(end, BLOCK_M), 0)
        counter_ptr += batch_head_k * n_tiles + tile

    # -- roles
    batch, head_k = batch_head_k // heads_k, batch_head_k % heads_k
    where = (batch, head_k, heads_k, batches, padded_q, tile, end_before, (0, None, None))
    walk = (start_n, end_tile, tiles_of_head, group, seqlen_q, seqlen_k)
    constants: gl.constexpr = (
        BLOCK_M, Q_STAGES, HEAD_DIM, HAS_LEFT, HAS_RIGHT, ORDERED, ALL_WHOLE, DO_STAGES, LATE,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums_desc)
    share(descs, counter_ptr, where, walk, (left, right), sm_scale, constants)


# -- the end


@triton.jit(do_not_specialize=["heads", "seqlen_q", "padded_q"])
def attention_hopper_dq_kernel(
    sums_ptr,  # sums of dq in float32, (batch * heads, padded_q, HEAD_DIM)
    dq_ptr,  # output, (batch, heads, seqlen_q, HEAD_DIM)
    heads,
    seqlen_q,
    padded_q,
    stride_b,  # of dq
    stride_h,
    stride_m,
    sm_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # -- place: some rows of a head, one after another in memory
    n_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    batch_head = (tl.program_id(0) // n_blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    row = tl.program_id(0) % n_blocks * BLOCK_M
    rows, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    there = rows < seqlen_q - row
    # -- scale, and convert
    sums_ptr += (batch_head * padded_q + row) * HEAD_DIM
    dq_ptr += batch * stride_b + head * stride_h + row.to(tl.int64) * stride_m
    dq = tl.load(sums_ptr + rows * HEAD_DIM + cols, mask=there) * sm_scale
    tl.store(dq_ptr + rows * stride_m + cols, dq.to(dq_ptr.dtype.element_ty), mask=there)


# -- on the host


@planned
def _rest_of_sums(rows: int, columns: int, part: int) -> dict[str, object]:
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, part], gl.float32)
    at_zero, block = torch.empty(0, dtype=torch.float32), [ROWS.value, part]
    return vars(TensorDescriptor(at_zero, [rows, columns], [columns, 1], block, layout))


@planned
def _rest_of_stats(size: int, block_m: int) -> dict[str, object]:
    layout = gl.NVMMASharedLayout.get_default_for([block_m], gl.float32)
    return vars(
        TensorDescriptor(torch.empty(0, dtype=torch.float32), [size], [1], [block_m], layout)
    )


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    deterministic: bool = True,
    dlse: torch.Tensor | None = None,
    window: scope.Window | None = None,
    *,
    dq_needed: bool = True,
    dkdv_needed: bool = True,
    config: Config | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (dq, dk, dv) for operands that are checked, and that :func:`supported` allows.

    ``deterministic`` adds the parts of dq in a fixed order; otherwise ``config`` says whether to.
    Where dq alone, or dk and dv alone are needed, one of the two sweeps of ``attention.backward``
    suffices, and what is not needed is None. ``config`` is how the kernel is cut: by default as
    with the backend "gluon". To run the fastest kernels, ask :func:`backward_choice` first.
    """
    if not (dq_needed and dkdv_needed):
        return plain.attention_backward(
            q, k, v, out, lse, do, is_causal, sm_scale, deterministic, dlse, window,
            dq_needed=dq_needed, dkdv_needed=dkdv_needed,
        )  # fmt: skip
    # I/O: what statistics does + read k + read v + write dk + write dv + write dq, and for each
    # tile of keys read q + read do + read and write sums of dq
    if config is None:
        config = backward_choice(
            (9, 0), q.dtype, q.shape, k.shape, is_causal, window, deterministic, "gluon"
        ).config
    ordered = deterministic or config.ordered
    device = q.device
    dq, dk, dv = map(tiles.empty_dense_like, (q, k, v))
    plan = _plan(
        config, device, runtime.multiprocessors(device), q.dtype, q.shape, k.shape,
        *[x.stride() for x in (q, k, v, do, dq, dk, dv)], is_causal, window, sm_scale, ordered,
    )  # fmt: skip
    counter = None
    if ordered:
        counter = torch.empty(plan.counters, dtype=torch.int32, device=device)
    stats = plain.statistics(out, lse, do, dlse, counter)
    # -- sums: in a fixed order the first part is written, so that only a tile of queries that see
    # nothing would keep what was there
    new = torch.zeros if plan.zeroed else torch.empty
    sums = new(plan.sums, dtype=torch.float32, device=device)
    plan.sweep(*map(_describe, (q, k, v, do, stats, dk, dv, sums), plan.rests), counter)
    plan.end(sums, dq)
    return dq, dk, dv


def _describe(x: torch.Tensor, rest: dict[str, object]) -> TensorDescriptor:
    return tiles.descriptor(x, rest, TensorDescriptor)


class Plan(NamedTuple):
    """How gradients are computed: launches, sizes of what they need, and descriptors' rests."""

    sweep: Launch
    end: Launch
    sums: tuple[int, ...]
    zeroed: bool
    counters: int
    rests: tuple[dict[str, object], ...]


@planned
def _plan(
    config, device, multiprocessors, dtype, q_shape, k_shape, q_strides, k_strides, v_strides,
    do_strides, dq_strides, dk_strides, dv_strides, is_causal, window, sm_scale, ordered,
) -> Plan:  # fmt: skip
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    left, right = scope.bounds(is_causal, window, seqlen_q, seqlen_k)
    padded_q = runtime.cdiv(seqlen_q, plain.PADDING) * plain.PADDING
    all_see = right is None or seqlen_k - seqlen_q + right >= 0
    at_once = _heads_at_once(config, device, dtype.itemsize, q_shape, k_shape, left, right, ordered)
    rows, m = ROWS.value, config.block_m
    rests = (
        _all_but_the_address(dtype, q_shape, q_strides, m),
        _all_but_the_address(dtype, k_shape, k_strides, rows),
        _all_but_the_address(dtype, k_shape, v_strides, rows),
        _all_but_the_address(dtype, q_shape, do_strides, m),
        _rest_of_stats(2 * batch * heads * padded_q, m),
        _all_but_the_address(dtype, k_shape, dk_strides, rows),
        _all_but_the_address(dtype, k_shape, dv_strides, rows),
        _rest_of_sums(batch * heads * padded_q, head_dim, head_dim * m // KEYS.value),
    )
    return Plan(
        _launch(config, q_shape, k_shape, padded_q, left, right, sm_scale, ordered, at_once),
        _scale_launch(device, dtype, q_shape, padded_q, dq_strides, sm_scale),
        (batch, heads, padded_q, head_dim),
        not (ordered and all_see),
        batch * heads_k * runtime.cdiv(seqlen_k, KEYS.value),
        rests,
    )


@planned
def _scale_launch(device, dtype, shape, padded_q, dq_strides, sm_scale) -> Launch:
    batch, heads, seqlen_q, head_dim = shape
    block_m = 2048 // head_dim
    return tiles.KnownLaunch(
        attention_hopper_dq_kernel, (batch * heads * runtime.cdiv(seqlen_q, block_m),),
        heads, seqlen_q, padded_q, *dq_strides[:3], sm_scale, HEAD_DIM=head_dim, BLOCK_M=block_m,
        num_warps=4,
    )  # fmt: skip


def _heads_at_once(config, device, itemsize, q_shape, k_shape, left, right, ordered) -> int:
    """Return between how many heads tiles of keys alternate.

    In a fixed order as many as fill the GPU: they begin together, each tile of keys a step after
    the one before, and the tiles of the next heads take their places in the same order. Under a
    causal mask later keys have less to do, so that places come free too fast for that order, unless
    more heads alternate.
    """
    if ordered:
        n_tiles = runtime.cdiv(k_shape[2], KEYS.value)
        fill = max(1, round(runtime.multiprocessors(device) / n_tiles))
        return fill * (config.heads if scope.uneven(left, right) else 1)
    flowing = 2 * (q_shape[1] // k_shape[1]) * q_shape[2] * q_shape[3] * itemsize
    return tuned.backward_heads_at_once(flowing, device, left is not None)


def _launch(
    config, q_shape, k_shape, padded_q, left, right, sm_scale, ordered, heads_at_once
) -> Launch:
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    return tiles.KnownLaunch(
        attention_hopper_bwd_kernel, (batch * heads_k * runtime.cdiv(seqlen_k, KEYS.value),),
        batch, heads_k, heads // heads_k, seqlen_q, seqlen_k, left or 0, right or 0, padded_q,
        sm_scale, heads_at_once,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        ORDERED=ordered,
        ALL_WHOLE=scope.all_whole(left, right, seqlen_k, KEYS.value),
        BLOCK_M=config.block_m,
        Q_STAGES=config.q_stages,
        DO_STAGES=config.do_stages,
        LATE=config.late,
        num_warps=4,
    )  # fmt: skip
