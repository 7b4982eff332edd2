"""The forward pass in FP8 for Hopper in Gluon: the roles of forward.py, with operands of 8 bits.

    value = stored * descale,   out = softmax(scale * q k^T) v

What descales are, why weights are multiplied by 2^8 and why sums over tiles are float32, says
``ops/attention/fp8.py``. Two matmuls of 8 bits take as long as the exponentials between them, so
that every other instruction counts. Three things save most:

**The order of keys.** The four threads that share a row of a result of wgmma hold two neighbours
each of every 8 columns, but as an operand of 8 bits four neighbours each of every 16: weights would
have to move between threads. A softmax does not ask in which order keys come, so instead the tile
of keys gets its rows in an order after which each thread already has what it needs:

    column  64 h + 8 a + 2 b + c  of the scores  is key  16 a + 4 b + 2 h + c  of the tile of 128

with thread b = 0 to 3, h and c = 0 or 1. In thread b, key and column differ by names of registers
only, which cost nothing. Values stay as they are stored. The copy engine brings keys in this order:
to it, they are rows 0 to 3 of quadruples of keys, and it copies rows 2 h and 2 h + 1 of all 32
quadruples of a tile at a time. Masks ask for the key, not for the column.

**Words.** Weights are converted four at a time, into the register in which the second matmul reads
them, and stay there until the next iteration issues it. In float32 they would need the registers of
the next scores, and would have to be moved out of their way.

**Sums.** wgmma adds numbers of 8 bits up with fewer bits than float32 has, so each tile has a sum
of its own. To add it to what was before takes as many instructions as to rescale that alone:
acc * alpha + sum is one multiply-add.

Sources: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", NeurIPS 2024; which
thread holds what: NVIDIA, "Parallel Thread Execution ISA", section "wgmma.mma_async".
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernelbook import runtime
from kernelbook.ops.attention import scope, tiles, tuned
from kernelbook.ops.attention.fp8 import P_LOG2, TINY, _keys_contiguous, load_descale
from kernelbook.ops.attention.scope import seen_keys
from kernelbook.ops.attention.tiles import LN2, LOG2E, LOWEST
from kernelbook.ops.hopper.choice import REGISTERS, Config
from kernelbook.ops.hopper.forward import (
    ROWS,
    exp2,
    give_back,
    pass_turn,
    place,
    place_of_consumer,
    sum_in_thread,
    turns_of_program,
    wait_for_turn,
    write,
)
from kernelbook.ops.hopper.fp8_choice import CONFIGS, unsupported
from kernelbook.ops.hopper.parts import tma_load
from kernelbook.ops.launch import Launch, planned

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether this Triton has made the method public that reads a buffer as one of another shape."""


@gluon.jit
def reinterpreted(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a buffer in shared memory as one of another shape."""
    if RENAMED:
        return buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
    else:
        return buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)


# -- the loader


@gluon.jit
def fetch_keys(desc, ring, full, empty, i, batch, head, row, STAGES: gl.constexpr):
    """Ask for a tile of keys as soon as there is room, two rows of each four at a time."""
    slot = i % STAGES
    mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * desc.block_type.nbytes)
    for h in gl.static_range(2):
        where = [batch, head, row // 4, 2 * h, 0]
        tma_load(desc, where, full.index(slot), ring.index(2 * slot + h))


@gluon.jit
def fetch_values(desc, ring, full, empty, i, batch, head, row, STAGES: gl.constexpr):
    """Ask for a tile of values, which lie with their keys beside each other."""
    slot = i % STAGES
    mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma_load(desc, [batch, head, 0, row], full.index(slot), ring.index(slot))


@gluon.jit
def load(loading, constants: gl.constexpr):
    """Load what all turns of this program need, as soon as there is room for it."""
    descs, buffers, barriers, heads_and_limits = loading
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, _, heads, group, _, _, _, _, _ = heads_and_limits
    CONSUMERS: gl.constexpr = constants[4]
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    # -- keys and values: in the order in which they are read, keys one tile ahead
    i = 0
    v_batch, v_head, v_row = 0, 0, 0
    for turn in range(turns_of_program(heads_and_limits, constants)):
        batch_head, start_m, first, end = place(turn, heads_and_limits, constants)
        batch, head = batch_head // heads, batch_head % heads
        for tile in range(end - first):
            k_row = (end - 1 - tile) * BLOCK_N
            fetch_keys(k_desc, k_s, k_full, k_empty, i, batch, head // group, k_row, STAGES)
            if i > 0:
                fetch_values(v_desc, v_s, v_full, v_empty, i - 1, v_batch, v_head, v_row, STAGES)
            # -- queries: for each consumer its own, as soon as it has read the last ones
            if tile == 0:
                for g in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(g), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(g), q_desc.block_type.nbytes)
                    tma_load(
                        q_desc, [batch, head, start_m + g * ROWS, 0], q_full.index(g), q_s.index(g)
                    )
            v_batch = batch
            v_head = head // group
            v_row = k_row
            i += 1
    fetch_values(v_desc, v_s, v_full, v_empty, i - 1, v_batch, v_head, v_row, STAGES)


# -- a consumer


@gluon.jit
def packed(p):
    """Round weights to e4m3: (rows, columns) in the scores' order of keys become words, int32,
    (rows, columns / 4), of four keys each, one after the other.

    As words they pass from one iteration to the next in a quarter of the registers; numbers of 8
    bits would be taken apart, one in each register.
    """
    p = gl.reshape(p, [p.shape[0], 2, p.shape[1] // 16, 4, 2])
    p = gl.reshape(gl.permute(p, (0, 2, 3, 1, 4)), [p.shape[0], p.shape[2] * 4, 2, 2])
    even, odd = gl.split(p)
    key_0, key_2 = gl.split(even)
    key_1, key_3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [key_0, key_1, key_2, key_3], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def as_operand(words, LAYOUT: gl.constexpr):
    """Return the numbers of 8 bits in words of four: no instruction, as wgmma reads such words."""
    four = gl.join(gl.join(words, words), gl.join(words, words))
    four = gl.reshape(four, [words.shape[0], 4 * words.shape[1]])
    four = gl.convert_layout(four, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def mask_keys(
    s,  # scores, (rows, columns), whose order of keys is that of the module's docstring
    first,  # a query does not see the keys before this one of the tile, (rows,)
    end,  # nor those from this one on, (rows,)
    LEFT: gl.constexpr,  # whether first says anything
):
    """Make -inf of the scores of keys that a query does not see.

    Only b differs between threads: with it on the side of the bounds, the keys are constants of the
    instructions, and not registers, of which a consumer has none to spare.
    """
    parts = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    of_3: gl.constexpr = gl.SliceLayout(3, parts.type.layout)
    of_2: gl.constexpr = gl.SliceLayout(2, of_3)
    of_row: gl.constexpr = gl.SliceLayout(1, of_2)
    ha = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, of_2))[None, :][:, :, None][:, :, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, of_3)))[None, :][None, :, :]
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, parts.type.layout))))[
        None, :
    ][None, :, :][None, :, :, :]
    AS: gl.constexpr = s.shape[1] // 16
    key = 16 * (ha % AS) + 2 * (ha // AS) + c
    b = b[:, :, :, None]
    end = gl.convert_layout(end, of_row, assert_trivial=True)[:, None][:, :, None][:, :, :, None]
    parts = gl.where(key < end - 4 * b, parts, -float("inf"))
    if LEFT:
        first = gl.convert_layout(first, of_row, assert_trivial=True)
        first = first[:, None][:, :, None][:, :, :, None]
        parts = gl.where(key >= first - 4 * b, parts, -float("inf"))
    return gl.convert_layout(gl.reshape(parts, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def weigh(
    s,  # dot products of stored queries and keys, masked, (ROWS, BLOCK_N)
    l_i,  # sum over keys of 2^8 * p so far, in four parts, (ROWS, 4)
    m_i,  # largest score so far, in base 2, (ROWS,)
    scale_log2,
):
    """Make weights, times 2^8, of the scores of a tile: return (p, alpha, l_i, m_i)."""
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale_log2)
    alpha = exp2(m_i - m_new)
    p = exp2(s * scale_log2 - (m_new - P_LOG2)[:, None])
    part = sum_in_thread(p)
    of_part: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    l_i = l_i * gl.convert_layout(alpha, of_part, assert_trivial=True)[:, None] + part
    return p, alpha, l_i, m_new


@gluon.jit
def scale_of_turn(turn, scales, heads_and_limits, constants: gl.constexpr):
    """Return what turns products of stored q and k of this turn into exponents of 2, in float32.

    The factors are multiplied in float64, as in ``attention.fp8.scale_of_scores``.
    """
    sm_scale, q_descale_ptr, k_descale_ptr, _, q_step, k_step, _ = scales
    batch_head, _, _, _ = place(turn, heads_and_limits, constants)
    q_descale = load_descale(q_descale_ptr, batch_head, q_step, False)
    k_descale = load_descale(k_descale_ptr, batch_head // heads_and_limits[3], k_step, False)
    scale_log2 = sm_scale.to(gl.float64) * LOG2E * q_descale * k_descale
    return gl.where(scale_log2 < TINY, TINY, scale_log2).to(gl.float32)


@gluon.jit
def finish(
    l_i, m_i, lse_ptr, turn, scales, heads_and_limits, ME: gl.constexpr, constants: gl.constexpr
):
    """Write lse of this consumer's queries of a turn, and return by what to multiply the sum."""
    _, _, _, group, seqlen_q, seqlen_k, left, right, _ = heads_and_limits
    _, _, _, v_descale_ptr, _, _, v_step = scales
    row: gl.constexpr = m_i.type.layout
    batch_head, start_m, _, _ = place(turn, heads_and_limits, constants)
    v_descale = load_descale(v_descale_ptr, batch_head // group, v_step, True)
    queries = start_m + ME * ROWS + gl.arange(0, ROWS, row)
    seen = seen_keys(queries, seqlen_q, seqlen_k, left, right, constants[1], constants[2])
    total = gl.convert_layout(gl.sum(l_i, 1), row, assert_trivial=True)
    total = gl.where((total == 0) & (seen[1] > 0), float("nan"), total)  # see sum_of_weights
    lse_ptrs = lse_ptr + batch_head.to(gl.int64) * seqlen_q + queries
    gl.store(lse_ptrs, (m_i - P_LOG2 + gl.log2(total)) * LN2, mask=queries < seqlen_q)
    return v_descale / gl.where(total == 0, 1.0, total)


@gluon.jit
def consume(computing, ME: gl.constexpr, constants: gl.constexpr):
    """Compute the rows of one consumer, turn after turn, in one loop over all tiles of keys.

    As ``forward.consume``, where comments explain what is the same. ``acc`` lacks the last two
    tiles, and ``alpha`` rescales it to the largest score with which the first of these was weighed.
    """
    out_desc, lse_ptr, buffers, barriers, heads_and_limits, scales = computing
    q_s, k_s, v_s, out_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, _, _, _, seqlen_q, seqlen_k, left, right, _ = heads_and_limits
    HAS_LEFT: gl.constexpr = constants[1]
    HAS_RIGHT: gl.constexpr = constants[2]
    ALL_WHOLE: gl.constexpr = constants[3]
    CONSUMERS: gl.constexpr = constants[4]
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    TURNS: gl.constexpr = constants[7]
    HEAD_DIM: gl.constexpr = constants[8]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    row_of_acc: gl.constexpr = gl.SliceLayout(1, acc_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    q = q_s.index(ME)
    out_buffer = out_s.index(ME)

    # -- turns: the first one
    turns = turns_of_program(heads_and_limits, constants)
    turn = 0
    start_m, first, whole, cut, tile, unseen = place_of_consumer(
        turn, heads_and_limits, ME, constants
    )
    scale_log2 = scale_of_turn(turn, scales, heads_and_limits, constants)
    if TURNS and ME == CONSUMERS - 1:
        pass_turn(ME, CONSUMERS)
    give_back(0, unseen, barriers, ME, constants)

    # -- begin: the last tile, which has no tile before it
    i = unseen
    tile -= 1
    m_i = gl.full([ROWS], LOWEST, gl.float32, row)
    mbarrier.wait(q_full.index(ME), 0)
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    s = warpgroup_mma(q, k_s.index(i % STAGES).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(i % STAGES))
    if tile == first:
        mbarrier.arrive(q_empty.index(ME))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    no_sum = sum_in_thread(gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout))
    if not ALL_WHOLE:
        own = start_m + gl.arange(0, ROWS, row)
        seen = seen_keys(own, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
        start_n = tile * BLOCK_N
        s = mask_keys(s, seen[0] - start_n, seen[1] - start_n, HAS_LEFT)
    p, alpha, l_i, m_i = weigh(s, no_sum, m_i, scale_log2)
    words = packed(p)

    # -- attend: from the last key to the first, one tile of weights behind the scores
    more = (tile > first) | (turns > 1)  # whether there is another tile
    mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=more)
    while more:
        # -- next: tile of keys, or if that was the first one, tile of queries
        before = i
        i += 1
        tile -= 1
        begins = tile < first
        if begins:
            turn += 1
            start_m, first, whole, cut, tile, unseen = place_of_consumer(
                turn, heads_and_limits, ME, constants
            )
            give_back(i, unseen, barriers, ME, constants)
            i += unseen
            tile -= 1
            mbarrier.wait(q_full.index(ME), turn & 1)
            if HAS_RIGHT:
                mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
        # -- issue: the scores of this tile, then the sum of the one before
        slot, slot_before = i % STAGES, before % STAGES
        if TURNS:
            wait_for_turn(ME)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        s = warpgroup_mma(q, k_s.index(slot).permute([1, 0]), s, use_acc=False, is_async=True)
        weights = as_operand(words, operand)
        mbarrier.wait(v_full.index(slot_before), (before // STAGES) & 1)
        part = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
        v = v_s.index(slot_before).permute([1, 0])
        part = warpgroup_mma(weights, v, part, use_acc=False, is_async=True)
        if TURNS:
            pass_turn(ME, CONSUMERS)
        # -- finish: statistics of the last turn, and the scale of this one, while the matmuls run
        inverse = m_i
        if begins:
            inverse = finish(l_i, m_i, lse_ptr, turn - 1, scales, heads_and_limits, ME, constants)
            scale_log2 = scale_of_turn(turn, scales, heads_and_limits, constants)
            m_i = gl.full([ROWS], LOWEST, gl.float32, row)
            l_i = sum_in_thread(gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout))
        # -- weigh: while the sum is computed
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(slot))
        if tile == first:
            mbarrier.arrive(q_empty.index(ME))
        if not ALL_WHOLE:
            at_edge = tile >= cut
            if HAS_LEFT:
                at_edge = at_edge | (tile < whole)
            if at_edge:
                own = start_m + gl.arange(0, ROWS, row)
                seen = seen_keys(own, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
                start_n = tile * BLOCK_N
                s = mask_keys(s, seen[0] - start_n, seen[1] - start_n, HAS_LEFT)
        p, next_alpha, l_i, m_i = weigh(s, l_i, m_i, scale_log2)
        # -- accumulate: not before the next keys are there
        more = (tile > first) | (turn + 1 < turns)
        mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=more)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(v_empty.index(slot_before))
        acc = acc * gl.convert_layout(alpha, row_of_acc, assert_trivial=True)[:, None] + part
        if begins:
            write(acc, inverse, out_desc, out_buffer, turn - 1, heads_and_limits, ME, constants)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
        alpha = next_alpha
        words = packed(p)

    # -- end: the sum of the first tile
    weights = as_operand(words, operand)
    mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
    part = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    v = v_s.index(i % STAGES).permute([1, 0])
    part = warpgroup_mma(weights, v, part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    acc = acc * gl.convert_layout(alpha, row_of_acc, assert_trivial=True)[:, None] + part
    inverse = finish(l_i, m_i, lse_ptr, turn, scales, heads_and_limits, ME, constants)
    write(acc, inverse, out_desc, out_buffer, turn, heads_and_limits, ME, constants)
    tma.store_wait(0)


# If one key were a constant, all weights but one would be the same register, and ptxas would fill
# half of a word of packed() from a register that nothing wrote, and rows come out NaN.
@gluon.jit(do_not_specialize=["left", "right", "seqlen_k"])
def attention_hopper_fp8_fwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM), in tiles of ROWS
    k_desc,  # keys, (batch, heads // group, quadruples, 4, HEAD_DIM), in two rows of each
    v_desc,  # values, (batch, heads // group, HEAD_DIM, seqlen_k), in tiles of BLOCK_N keys
    q_descale_ptr,  # one number, one for each (batch, head), or None
    k_descale_ptr,
    v_descale_ptr,
    out_desc,  # output, as the queries
    lse_ptr,  # natural logarithm of the sum of exponentials, (batch, heads, seqlen_q), contiguous
    q_step,  # from the descale of one head to that of the next: 0 or 1
    k_step,
    v_step,
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    HEADS_AT_ONCE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    ALL_WHOLE: gl.constexpr,  # whether no tile has to be masked
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    PAIRED: gl.constexpr,  # whether programs take pairs of a long and a short tile of queries
):
    # -- shared memory: queries, rings of keys and values, results, and a barrier for each tile
    dtype: gl.constexpr = q_desc.dtype
    v_dtype: gl.constexpr = v_desc.dtype
    out_dtype: gl.constexpr = out_desc.dtype
    QUERY_SLOTS: gl.constexpr = CONSUMERS if CONSUMERS != 3 else 4
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_N // 4, 2, HEAD_DIM], dtype
    )
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_N], v_dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], out_dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [QUERY_SLOTS, ROWS, HEAD_DIM], q_layout)
    k_halves = gl.allocate_shared_memory(
        dtype, [2 * STAGES, BLOCK_N // 4, 2, HEAD_DIM], half_layout
    )
    k_shape: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
    k_s = reinterpreted(k_halves, k_shape, k_layout)
    v_s = gl.allocate_shared_memory(v_dtype, [STAGES, HEAD_DIM, BLOCK_N], v_layout)
    out_s = gl.allocate_shared_memory(out_dtype, [QUERY_SLOTS, ROWS, HEAD_DIM], out_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_SLOTS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_SLOTS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for g in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(q_empty.index(g), count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(k_full.index(b), count=1)
        mbarrier.init(v_full.index(b), count=1)
        mbarrier.init(k_empty.index(b), count=CONSUMERS)
        mbarrier.init(v_empty.index(b), count=CONSUMERS)

    # -- roles
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    n_tiles = gl.cdiv(seqlen_q, CONSUMERS * ROWS)
    heads_and_limits = (
        n_tiles, batch_heads, heads, group, seqlen_q, seqlen_k, left, right, None,
    )  # fmt: skip
    constants: gl.constexpr = (
        HEADS_AT_ONCE, HAS_LEFT, HAS_RIGHT, ALL_WHOLE, CONSUMERS, BLOCK_N, STAGES, TURNS, HEAD_DIM,
        PAIRED, False,
    )  # fmt: skip
    scales = (sm_scale, q_descale_ptr, k_descale_ptr, v_descale_ptr, q_step, k_step, v_step)
    descs = (q_desc, k_desc, v_desc)
    loading = (descs, (q_s, k_halves, v_s, out_s), barriers, heads_and_limits)
    computing = (out_desc, lse_ptr, (q_s, k_s, v_s, out_s), barriers, heads_and_limits, scales)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    ME_2: gl.constexpr = 2
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (computing, ME_0, constants)),
                (consume, (computing, ME_1, constants)),
                (load, (loading, constants)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (computing, ME_0, constants)),
                (consume, (computing, ME_1, constants)),
                (consume, (computing, ME_2, constants)),
                (load, (loading, constants)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, LOADER_REGISTERS],
        )


# -- on the host

KINDS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}


def describe(x: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Describe a tensor, of which a tile is ``block``."""
    described = object.__new__(TensorDescriptor)
    described.__dict__ = {**_all_but_the_address(x.dtype, x.shape, x.stride(), block), "base": x}
    return described


@planned
def _all_but_the_address(dtype, shape, strides, block) -> dict[str, object]:
    unit = tiles.ALIGNMENT.value // dtype.itemsize
    strides = [s if n > 1 else unit for s, n in zip(strides[:-1], shape, strict=False)]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), KINDS[dtype])
    at_zero = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(at_zero, list(shape), [*strides, 1], list(block), layout))


def in_quadruples(k: torch.Tensor) -> torch.Tensor:
    """Return keys as (batch, heads, quadruples, 4, head_dim): a view, or a copy.

    Where 4 does not divide their number, the last quadruple would reach beyond them, and perhaps
    beyond the memory that is there, so that a copy gets room for it. What is in it is masked.
    """
    batch, heads, seqlen, head_dim = k.shape
    if seqlen % 4:
        room = torch.empty(
            (batch, heads, runtime.cdiv(seqlen, 4) * 4, head_dim), dtype=k.dtype, device=k.device
        )
        room[:, :, :seqlen].copy_(k)
        k = room
    return k.unflatten(2, (-1, 4))


def supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why :func:`attention_fp8_forward` cannot take these operands as they lie, or None
    where it can. Values may lie in any way."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.numel() == 0:
            return f"{name} is empty"
    if reason := unsupported(runtime.capability(q.device), q.dtype, v.dtype, q.shape[3]):
        return reason
    for name, x in {"q": q, "k": k}.items():
        if not tiles.fits(x):
            return f"the address or a stride of {name} is not a multiple of 16 bytes"
    return None


def attention_fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    is_causal: bool,
    sm_scale: float,
    out_dtype: torch.dtype,
    window: scope.Window | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for operands that are checked, and that :func:`supported` allows.

    As :func:`kernelbook.ops.attention.fp8.attention_fp8_forward`, with sums over tiles in float32.
    ``config`` is how the kernel is cut: by default as ``CONFIGS`` has it.
    """
    # I/O: read q + read k + read v + write out + write lse
    v_t = _keys_contiguous(v)
    quadruples = in_quadruples(k)
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    left, right = scope.bounds(is_causal, window, q.shape[2], k.shape[2])
    config = config or CONFIGS[q.shape[3]]
    steps = tuple(0 if x is None or x.numel() == 1 else 1 for x in descales)
    run = _launch(
        config, runtime.multiprocessors(q.device), q.shape, k.shape, left, right, sm_scale,
        tuned.forward_heads_at_once(k, q.shape[1] // k.shape[1], scope.uneven(left, right)), steps,
    )  # fmt: skip
    rows, keys, columns = ROWS.value, config.block_n, q.shape[3]
    run(
        describe(q, (1, 1, rows, columns)),
        describe(quadruples, (1, 1, keys // 4, 2, columns)),
        describe(v_t, (1, 1, columns, keys)),
        *(None if x is None else runtime.readable(x).contiguous() for x in descales),
        describe(out, (1, 1, rows, columns)),
        lse,
    )
    return out, lse


@planned
def _launch(
    config, multiprocessors, q_shape, k_shape, left, right, sm_scale, heads_at_once, steps
) -> Launch:
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    n_tiles = runtime.cdiv(seqlen_q, config.consumers * ROWS.value)
    programs = batch * heads * n_tiles
    several = config.persistent and programs > multiprocessors
    paired = several and config.paired and scope.uneven(left, right)
    if config.persistent:
        programs = min(runtime.cdiv(programs, 2) if paired else programs, multiprocessors)
    if paired:
        # all pairs are equal, so that few heads suffice, and their keys stay in L2
        heads_at_once = 1 + n_tiles % 2
    return Launch(
        attention_hopper_fp8_fwd_kernel, (programs,),
        *steps, batch * heads, heads, heads // heads_k, seqlen_q, seqlen_k, left or 0, right or 0,
        sm_scale,
        HEADS_AT_ONCE=heads_at_once,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        ALL_WHOLE=scope.all_whole(left, right, seqlen_k, config.block_n),
        CONSUMERS=config.consumers,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        TURNS=config.take_turns,
        CONSUMER_REGISTERS=REGISTERS[config.consumers][0],
        LOADER_REGISTERS=REGISTERS[config.consumers][1],
        PAIRED=paired,
        num_warps=4,
    )  # fmt: skip
