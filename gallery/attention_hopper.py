from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kernelbook.ops.hopper.forward import (
    ROWS,
    exp2,
    mask_row_ends,
    pass_turn,
    sum_in_thread,
    wait_for_turn,
)
from kernelbook.ops.attention.tiles import LOG2E, LOWEST, place
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
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
        _load(q_desc, [of_head + start_m + g * ROWS, 0], q_full.index(g), q_s.index(g))
    for i in range(n + 1):  # keys one tile ahead of values
        if i < n:
            slot, parity = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), parity ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            start_n = of_head + (n - 1 - i) * BLOCK_N
            _load(k_desc, [start_n, 0], k_full.index(slot), k_s.index(slot))
            _stamp(trace_ptr, 2, i, 0, n, TRACE)
        if i > 0:
            slot, parity = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
            mbarrier.wait(v_empty.index(slot), parity ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            start_n = of_head + (n - i) * BLOCK_N
            _load(v_desc, [start_n, 0], v_full.index(slot), v_s.index(slot))
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
        if MASK_BY_BRANCH:
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
    _store(out_desc, [of_head + start_m, 0], q)
    tma.store_wait(0)


@gluon.jit
def _roles_kernel(
    q, k, v, out, trace_ptr, heads, seqlen, scale_log2,
    HEADS_AT_ONCE: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    BRANCH: gl.constexpr, ONE_LOOP: gl.constexpr, IN_THREAD: gl.constexpr,
    TURNS: gl.constexpr, ON_DEVICE: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    # -- place: the last queries see the most keys and come first
    BLOCK_M: gl.constexpr = 2 * ROWS
    n_tiles = seqlen // BLOCK_M
    tile, head = place(n_tiles, heads, HEADS_AT_ONCE)
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
        q_desc = tma.make_tensor_descriptor(
            q, [rows, row], [row, 1], [ROWS, row], of_q
        )
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
    loading = ((q_desc, k_desc, v_desc), buffers, barriers, head * seqlen, start_m, trace_ptr)
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
