"""The forward pass for Hopper in Gluon: one warp loads, and groups of four warps compute.

A program computes a tile of 64 queries for each of its consumers, and then its next tile: there is
one program for each SM, and what it computes in each of its turns is known before. The loader, one
warp, keeps a ring of tiles of keys and values filled, by the copy engine (TMA). Each consumer is a
warpgroup: the four warps that issue one asynchronous matmul (wgmma). It issues the scores of the
next tile, then the weighted sum of the last one, and makes weights of scores while that sum is
computed.

Roles talk through barriers in shared memory. ``full`` says that a tile has come, ``empty`` that all
consumers have read it; use i of a slot of the ring waits for parity i & 1 of ``full``, and the
loader for the other parity of ``empty``.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", NeurIPS 2024.
"""

import torch
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

from kernelbook import runtime
from kernelbook.ops.attention import scope, tiles, tuned
from kernelbook.ops.attention.scope import key_stages, seen_keys
from kernelbook.ops.attention.tiles import LN2, LOG2E, LOWEST, PACKED_END
from kernelbook.ops.hopper.choice import (  # noqa: F401  (what says whether and how it runs)
    CHOICES,
    CONFIGS,
    REGISTERS,
    Config,
    choose,
    forward_choice,
    supported,
)
from kernelbook.ops.hopper.parts import named_barrier, tma_load, tma_store
from kernelbook.ops.launch import planned

ROWS = gl.constexpr(64)
"""Queries of a consumer: the rows of one wgmma."""

COLUMNS = gl.constexpr(8)
"""Numbers that a row of the table of tiles of packed sequences has room for: see ``varlen``."""

FIRST_BARRIER = gl.constexpr(9)
"""The first of the named barriers by which consumers take turns; Triton uses low ones."""


# -- turns


@gluon.jit
def wait_for_turn(ME: gl.constexpr):
    """Wait until it is the turn of this consumer to issue matmuls."""
    named_barrier("sync", FIRST_BARRIER + ME, 256)


@gluon.jit
def pass_turn(ME: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next consumer issue."""
    named_barrier("arrive", FIRST_BARRIER + (ME + 1) % CONSUMERS, 256)


# -- which tiles


@gluon.jit
def coordinates(batch, head, row, length, end):
    """Where a tile lies, for a descriptor: of a tensor, or of packed sequences.

    ``end`` is None, or the row of the packed tensor at which a sequence of so many rows ends: see
    :func:`tiles.describe`.
    """
    if end is None:
        return [batch, head, row, 0]
    else:
        return [PACKED_END, end, head, PACKED_END - length + row, 0]


@gluon.jit
def turns_of_program(heads_and_limits, constants: gl.constexpr):
    """Return how many tiles of queries this program has."""
    n_tiles, batch_heads, _, _, _, _, _, _, packed = heads_and_limits
    tiles_in_all = n_tiles * batch_heads
    if constants[9]:
        pairs = gl.cdiv(tiles_in_all, 2)
        mine = gl.cdiv(pairs - gl.program_id(0), gl.num_programs(0))
        has_the_last = (pairs - 1) % gl.num_programs(0) == gl.program_id(0)
        return 2 * mine - ((tiles_in_all % 2 == 1) & has_the_last).to(gl.int32)
    if constants[10] or packed is not None:
        full_turns = tiles_in_all // gl.num_programs(0)
        over = tiles_in_all - full_turns * gl.num_programs(0)
        return full_turns + (forth_and_back(full_turns) < over).to(gl.int32)
    return gl.cdiv(tiles_in_all - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def forth_and_back(turn):
    """Return this program's place among the programs of a turn, which every other turn reverses.

    Where tiles get shorter from place to place, what a program has too much of in one turn, it has
    too little of in the next.
    """
    me = gl.program_id(0)
    return gl.where(turn % 2 == 1, gl.num_programs(0) - 1 - me, me)


@gluon.jit
def order_of_turn(turn, n_tiles, batch_heads, constants: gl.constexpr):
    """Return (first_head, rest): this program's tile in a turn is number ``rest`` of some heads'.

    The tiles of HEADS_AT_ONCE heads, from first_head on, follow each other by their lengths. A pair
    is one from the beginning of them and one from the end, so that all pairs take equally long. The
    heads have an even number of tiles, so that only the last of all can be without another.
    """
    HEADS_AT_ONCE: gl.constexpr = constants[0]
    of_heads = n_tiles * HEADS_AT_ONCE
    if constants[9]:
        pair = turn // 2 * gl.num_programs(0) + gl.program_id(0)
        group = 2 * pair // of_heads
        rest = pair - group * of_heads // 2
        of_heads = gl.minimum(of_heads, n_tiles * (batch_heads - group * HEADS_AT_ONCE))
        return group * HEADS_AT_ONCE, gl.where(turn % 2 == 1, of_heads - 1 - rest, rest)
    me = gl.program_id(0)
    if constants[10]:
        me = forth_and_back(turn)
    order = turn * gl.num_programs(0) + me
    group = order // of_heads
    return group * HEADS_AT_ONCE, order - group * of_heads


@gluon.jit
def tile_of_turn(turn, heads_and_limits):
    """Return (head, start_m, seqlen_q, seqlen_k, first_q, first_k): which tile of which packed
    sequence this program has in a turn.

    Tiles of some heads alternate, in the order of a table, from long ones to short ones: see
    ``varlen.order_tiles_kernel``. The heads after those go through the table backwards, so that
    lengths never jump and what one turn leaves uneven the next one evens out.
    """
    n_tiles, n_heads, _, _, _, _, _, _, packed = heads_and_limits
    table_ptr, _, heads_at_once = packed
    order = turn * gl.num_programs(0) + forth_and_back(turn)
    first_head = order // (n_tiles * heads_at_once) * heads_at_once
    rest = order - first_head * n_tiles
    alternating = gl.minimum(n_heads - first_head, heads_at_once)
    backwards = (gl.cdiv(n_heads, heads_at_once) - first_head // heads_at_once) % 2 == 0
    tile = rest // alternating
    tile = gl.where(backwards, n_tiles - 1 - tile, tile)
    tile_ptr = table_ptr + tile * COLUMNS
    start_m, seqlen_q, seqlen_k = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
    first_q, first_k = gl.load(tile_ptr + 3), gl.load(tile_ptr + 4)
    return first_head + rest % alternating, start_m, seqlen_q, seqlen_k, first_q, first_k


@gluon.jit
def lengths_of_turn(turn, heads_and_limits):
    """Return (seqlen_q, seqlen_k) of the sequence whose tile this program has in a turn."""
    _, _, _, _, seqlen_q, seqlen_k, _, _, packed = heads_and_limits
    if packed is not None:
        _, _, seqlen_q, seqlen_k, _, _ = tile_of_turn(turn, heads_and_limits)
    return seqlen_q, seqlen_k


@gluon.jit
def place(turn, heads_and_limits, constants: gl.constexpr):
    """Return (batch_head, start_m, first, end): queries and tiles of keys of this program's turn.

    Tiles of queries alternate between heads; the last queries see the most keys and come first.
    """
    n_tiles, batch_heads, _, _, _, _, left, right, packed = heads_and_limits
    HEADS_AT_ONCE: gl.constexpr = constants[0]
    BLOCK_M: gl.constexpr = constants[4] * ROWS
    BLOCK_N: gl.constexpr = constants[5]
    seqlen_q, seqlen_k = lengths_of_turn(turn, heads_and_limits)
    if packed is None:
        first_head, rest = order_of_turn(turn, n_tiles, batch_heads, constants)
        batch_head, tile = first_head, rest
        if HEADS_AT_ONCE > 1:
            alternating = gl.minimum(batch_heads - first_head, HEADS_AT_ONCE)
            batch_head = first_head + rest % alternating
            tile = rest // alternating
        start_m = (n_tiles - 1 - tile) * BLOCK_M
    else:
        batch_head, start_m, _, _, _, _ = tile_of_turn(turn, heads_and_limits)
    first, _, _, end = key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, constants[1],
        constants[2], BLOCK_N,
    )  # fmt: skip
    first = first // BLOCK_N
    return batch_head, start_m, first, gl.maximum(gl.cdiv(end, BLOCK_N), first + 1)


@gluon.jit
def place_of_consumer(turn, heads_and_limits, ME: gl.constexpr, constants: gl.constexpr):
    """Return (start_m, first, whole, cut, end, unseen) of a consumer's own queries.

    ``unseen`` tiles of keys from the right edge of the program's on they do not see. Tiles below
    whole have keys to mask on the left, those from cut on keys to mask on the right.
    """
    _, _, _, _, _, _, left, right, _ = heads_and_limits
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    seqlen_q, seqlen_k = lengths_of_turn(turn, heads_and_limits)
    _, start_m, first, end = place(turn, heads_and_limits, constants)
    start_m += ME * ROWS
    _, whole, cut, own_end = key_stages(
        start_m, start_m + ROWS - 1, seqlen_q, seqlen_k, left, right, constants[1], constants[2],
        BLOCK_N,
    )  # fmt: skip
    unseen = 0
    if constants[2]:
        # a consumer that gives back a tile still holds values of the one before
        unseen = gl.minimum(end - gl.maximum(gl.cdiv(own_end, BLOCK_N), first + 1), STAGES - 1)
        unseen = gl.maximum(unseen, 0)
    end -= unseen
    if constants[10]:
        # each edge by itself: a tile that the left bound cuts is masked on the right only where the
        # right bound cuts it too
        last = gl.minimum(start_m + ROWS - 1, seqlen_q - 1)
        first_all, _ = seen_keys(last, seqlen_q, seqlen_k, left, right, constants[1], constants[2])
        _, end_all = seen_keys(start_m, seqlen_q, seqlen_k, left, right, constants[1], constants[2])
        return start_m, first, gl.cdiv(first_all, BLOCK_N), end_all // BLOCK_N, end, unseen
    cut = gl.minimum(cut // BLOCK_N, end - 1)
    return start_m, first, gl.minimum(whole // BLOCK_N, cut), cut, end, unseen


# -- the loader


@gluon.jit
def fetch(
    desc,
    ring,  # buffers, (STAGES, BLOCK_N, HEAD_DIM)
    full,
    empty,
    i,  # which tile of this program's, counted from its first
    at,  # where the tile lies, for the descriptor
    STAGES: gl.constexpr,
):
    """Ask for a tile of keys or values as soon as all consumers have read what is in its slot."""
    slot = i % STAGES
    mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma_load(desc, at, full.index(slot), ring.index(slot))


@gluon.jit
def load(loading, constants: gl.constexpr):
    """Load what all turns of this program need, as soon as there is room for it."""
    descs, buffers, barriers, heads_and_limits = loading
    q_desc, k_desc, v_desc, _ = descs
    q_s, k_s, v_s, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, _, heads, group, seqlen_q, seqlen_k, _, _, packed = heads_and_limits
    v_length, v_end = seqlen_k, None
    if packed is not None:
        v_end = 0
    CONSUMERS: gl.constexpr = constants[4]
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    # -- keys and values: in the order in which they are read, keys one tile ahead
    i = 0
    v_batch, v_head, v_row = 0, 0, 0
    for turn in range(turns_of_program(heads_and_limits, constants)):
        batch_head, start_m, first, end = place(turn, heads_and_limits, constants)
        batch, head = batch_head // heads, batch_head % heads
        end_q, end_k = None, None
        if packed is not None:
            _, _, seqlen_q, seqlen_k, first_q, first_k = tile_of_turn(turn, heads_and_limits)
            end_q, end_k = first_q + seqlen_q, first_k + seqlen_k
        for tile in range(end - first):
            k_row = (end - 1 - tile) * BLOCK_N
            at = coordinates(batch, head // group, k_row, seqlen_k, end_k)
            fetch(k_desc, k_s, k_full, k_empty, i, at, STAGES)
            if i > 0:
                at = coordinates(v_batch, v_head, v_row, v_length, v_end)
                fetch(v_desc, v_s, v_full, v_empty, i - 1, at, STAGES)
            # -- queries: for each consumer its own, as soon as it has read the last ones
            if tile == 0:
                for g in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(g), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(g), q_desc.block_type.nbytes)
                    at = coordinates(batch, head, start_m + g * ROWS, seqlen_q, end_q)
                    tma_load(q_desc, at, q_full.index(g), q_s.index(g))
            v_batch = batch
            v_head = head // group
            v_row = k_row
            if packed is not None:
                v_length, v_end = seqlen_k, end_k
            i += 1
    at = coordinates(v_batch, v_head, v_row, v_length, v_end)
    fetch(v_desc, v_s, v_full, v_empty, i - 1, at, STAGES)


# -- a consumer


@gluon.jit
def exp2(x):
    """2 to the power x, where a result below 2^-126 is 0: one instruction instead of four."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sum_in_thread(p):
    """Add up what each thread has of each row: (rows, 4), of threads that share a row.

    A sum over all of the row would have to ask the neighbours in each iteration.
    """
    p = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def mask_row_ends(
    s,  # scores, (rows, keys)
    first,  # a query does not see the keys before this one of the tile, (rows,)
    end,  # nor those from this one on, (rows,)
    MASKED: gl.constexpr,  # whether end says anything
    LEFT: gl.constexpr,  # whether first does
):
    """Make -inf of the scores of keys that a query does not see.

    Of eight keys a thread has two, so that key 8 a + 2 b + c belongs to thread b of the four that
    share a row. Only b differs between threads: with it on the side of the bounds, the keys are
    constants of the instructions, and not registers, of which a consumer has none to spare.
    """
    parts = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    of_3: gl.constexpr = gl.SliceLayout(3, parts.type.layout)
    of_2: gl.constexpr = gl.SliceLayout(2, of_3)
    of_row: gl.constexpr = gl.SliceLayout(1, of_2)
    a = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, of_2))[None, :][:, :, None][:, :, :, None]
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, of_3)))[None, :][None, :, :]
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, parts.type.layout))))[
        None, :
    ][None, :, :][None, :, :, :]
    key = 8 * a + c
    b = b[:, :, :, None]
    if MASKED:
        end = gl.convert_layout(end, of_row, assert_trivial=True)[:, None][:, :, None][
            :, :, :, None
        ]
        parts = gl.where(key < end - 2 * b, parts, -float("inf"))
    if LEFT:
        first = gl.convert_layout(first, of_row, assert_trivial=True)
        first = first[:, None][:, :, None][:, :, :, None]
        parts = gl.where(key >= first - 2 * b, parts, -float("inf"))
    return gl.convert_layout(gl.reshape(parts, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def weigh(
    s,  # dot products of queries and keys, masked, (ROWS, BLOCK_N)
    l_i,  # sum over keys of p so far, in four parts, (ROWS, 4)
    m_i,  # largest score so far, in base 2, (ROWS,)
    scale_log2,
):
    """Make weights of the scores of a tile: return (p, alpha, l_i, m_i)."""
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale_log2)
    alpha = exp2(m_i - m_new)
    p = exp2(s * scale_log2 - m_new[:, None])
    part = sum_in_thread(p)
    of_part: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    l_i = l_i * gl.convert_layout(alpha, of_part, assert_trivial=True)[:, None] + part
    return p, alpha, l_i, m_new


@gluon.jit
def finish(l_i, m_i, lse_ptr, turn, heads_and_limits, ME: gl.constexpr, constants: gl.constexpr):
    """Write lse of this consumer's queries of a turn, and return by what to multiply the sum."""
    _, _, _, _, _, _, left, right, packed = heads_and_limits
    row: gl.constexpr = m_i.type.layout
    seqlen_q, seqlen_k = lengths_of_turn(turn, heads_and_limits)
    batch_head, start_m, _, _ = place(turn, heads_and_limits, constants)
    queries = start_m + ME * ROWS + gl.arange(0, ROWS, row)
    seen = seen_keys(queries, seqlen_q, seqlen_k, left, right, constants[1], constants[2])
    total = gl.convert_layout(gl.sum(l_i, 1), row, assert_trivial=True)
    total = gl.where((total == 0) & (seen[1] > 0), float("nan"), total)  # see sum_of_weights
    if packed is None:
        lse_ptr += batch_head.to(gl.int64) * seqlen_q
    else:
        _, _, _, _, first_q, _ = tile_of_turn(turn, heads_and_limits)
        lse_ptr += batch_head.to(gl.int64) * packed[1] + first_q
    lse_ptrs = lse_ptr + queries
    gl.store(lse_ptrs, (m_i + gl.log2(total)) * LN2, mask=queries < seqlen_q)
    return 1 / gl.where(total == 0, 1.0, total)


@gluon.jit
def write(acc, inverse, out_desc, buffer, turn, heads_and_limits, ME, constants: gl.constexpr):
    """Write out of this consumer's queries of a turn, by a copy that is not waited for."""
    heads, packed = heads_and_limits[2], heads_and_limits[8]
    end_q = None
    seqlen_q, _ = lengths_of_turn(turn, heads_and_limits)
    if packed is not None:
        _, _, _, _, first_q, _ = tile_of_turn(turn, heads_and_limits)
        end_q = first_q + seqlen_q
    row_of_acc: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    batch_head, start_m, _, _ = place(turn, heads_and_limits, constants)
    acc = acc * gl.convert_layout(inverse, row_of_acc, assert_trivial=True)[:, None]
    tma.store_wait(0)  # the last turn's copy may not have read the buffer
    buffer.store(acc.to(out_desc.dtype))
    fence_async_shared()
    batch, head = batch_head // heads, batch_head % heads
    tma_store(out_desc, coordinates(batch, head, start_m + ME * ROWS, seqlen_q, end_q), buffer)


@gluon.jit
def give_back(i, n, barriers, ME: gl.constexpr, constants: gl.constexpr):
    """Let tiles i to i + n - 1 go unread, each in a turn of its own."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = constants[6]
    for j in range(i, i + n):
        slot = j % STAGES
        if constants[7]:
            wait_for_turn(ME)
            pass_turn(ME, constants[4])
        mbarrier.wait(k_full.index(slot), (j // STAGES) & 1)
        mbarrier.arrive(k_empty.index(slot))
        mbarrier.wait(v_full.index(slot), (j // STAGES) & 1)
        mbarrier.arrive(v_empty.index(slot))


@gluon.jit
def consume(computing, ME: gl.constexpr, constants: gl.constexpr):
    """Compute the rows of one consumer, turn after turn, in one loop over all tiles of keys.

    Between turns nothing stops: the first scores of a turn are computed with the last sum of the
    turn before.
    """
    out_desc, lse_ptr, buffers, barriers, heads_and_limits, scale_log2 = computing
    q_s, k_s, v_s, out_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, _, _, _, _, _, left, right, packed = heads_and_limits
    HAS_LEFT: gl.constexpr = constants[1]
    HAS_RIGHT: gl.constexpr = constants[2]
    ALL_WHOLE: gl.constexpr = constants[3]
    CONSUMERS: gl.constexpr = constants[4]
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    TURNS: gl.constexpr = constants[7]
    HEAD_DIM: gl.constexpr = constants[8]
    WINDOW: gl.constexpr = constants[10]
    ONE_TURN: gl.constexpr = constants[11]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    row_of_acc: gl.constexpr = gl.SliceLayout(1, acc_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dtype: gl.constexpr = out_desc.dtype
    q = q_s.index(ME)
    out_buffer = out_s.index(ME)

    # -- turns: the first one
    turns = turns_of_program(heads_and_limits, constants)
    turn = 0
    seqlen_q, seqlen_k = lengths_of_turn(turn, heads_and_limits)
    start_m, first, whole, cut, tile, unseen = place_of_consumer(
        turn, heads_and_limits, ME, constants
    )
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
        s = mask_row_ends(s, seen[0] - start_n, seen[1] - start_n, True, HAS_LEFT)
    weights, _, l_i, m_i = weigh(s, no_sum, m_i, scale_log2)
    p = gl.convert_layout(weights.to(dtype), operand, assert_trivial=True)
    continues = False  # whether there is a sum, to which the weights of before add

    # -- attend: from the last key to the first, one tile of weights behind the scores
    more = tile > first  # whether there is another tile
    if not ONE_TURN:
        more = more | (turns > 1)
    mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=more)
    while more:
        # -- next: tile of keys, or if that was the first one, tile of queries
        before = i
        i += 1
        tile -= 1
        begins = tile < first
        if not ONE_TURN and begins:
            turn += 1
            if packed is not None:
                seqlen_q, seqlen_k = lengths_of_turn(turn, heads_and_limits)
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
        mbarrier.wait(v_full.index(slot_before), (before // STAGES) & 1)
        acc = warpgroup_mma(p, v_s.index(slot_before), acc, use_acc=continues, is_async=True)
        if TURNS:
            pass_turn(ME, CONSUMERS)
        # -- finish: statistics of the last turn, while the matmuls run
        inverse = m_i
        if not ONE_TURN and begins:
            inverse = finish(l_i, m_i, lse_ptr, turn - 1, heads_and_limits, ME, constants)
            m_i = gl.full([ROWS], LOWEST, gl.float32, row)
            l_i = sum_in_thread(gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout))
        # -- weigh: while the sum is computed. One loop for all tiles: between loops, Triton would
        # carry the weights number by number, and take each pair apart in each iteration
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(slot))
        if tile == first:
            mbarrier.arrive(q_empty.index(ME))
        if WINDOW:
            # most tiles that are masked are masked on one side, which takes half as long as both
            if tile >= cut:
                own = start_m + gl.arange(0, ROWS, row)
                seen = seen_keys(own, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
                s = mask_row_ends(s, seen[0], seen[1] - tile * BLOCK_N, True, False)
            if tile < whole:
                own = start_m + gl.arange(0, ROWS, row)
                seen = seen_keys(own, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
                s = mask_row_ends(s, seen[0] - tile * BLOCK_N, seen[1], False, True)
        elif not ALL_WHOLE:
            at_edge = tile >= cut
            if HAS_LEFT:
                at_edge = at_edge | (tile < whole)
            if at_edge:
                own = start_m + gl.arange(0, ROWS, row)
                seen = seen_keys(own, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
                start_n = tile * BLOCK_N
                s = mask_row_ends(s, seen[0] - start_n, seen[1] - start_n, True, HAS_LEFT)
        weights, alpha, l_i, m_i = weigh(s, l_i, m_i, scale_log2)
        # -- rescale: not before the next keys are there. That wait is a branch, behind which the
        # assembler moves no weights; it would compute them after the sum, and overlap nothing.
        more = tile > first
        if not ONE_TURN:
            more = more | (turn + 1 < turns)
        mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=more)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot_before))
        if begins:  # not left out with one turn: Triton 3.6 cannot compile the loop without it
            write(acc, inverse, out_desc, out_buffer, turn - 1, heads_and_limits, ME, constants)
        continues = not begins
        acc = acc * gl.convert_layout(alpha, row_of_acc, assert_trivial=True)[:, None]
        p = gl.convert_layout(weights.to(dtype), operand, assert_trivial=True)

    # -- end: the sum of the first tile
    mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
    acc = warpgroup_mma(p, v_s.index(i % STAGES), acc, use_acc=continues, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    inverse = finish(l_i, m_i, lse_ptr, turn, heads_and_limits, ME, constants)
    write(acc, inverse, out_desc, out_buffer, turn, heads_and_limits, ME, constants)
    tma.store_wait(0)


@gluon.jit
def share(
    descs,  # of q, k, v and out
    lse_ptr,
    heads_and_limits,
    sm_scale,
    constants: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Share the work of a program between its roles."""
    # -- shared memory: queries, rings of keys and values, results, and a barrier for each tile
    q_desc, _, _, out_desc = descs
    CONSUMERS: gl.constexpr = constants[4]
    BLOCK_N: gl.constexpr = constants[5]
    STAGES: gl.constexpr = constants[6]
    HEAD_DIM: gl.constexpr = constants[8]
    dtype: gl.constexpr = q_desc.dtype
    QUERY_SLOTS: gl.constexpr = CONSUMERS if CONSUMERS != 3 else 4
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [QUERY_SLOTS, ROWS, HEAD_DIM], layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    out_s = gl.allocate_shared_memory(dtype, [QUERY_SLOTS, ROWS, HEAD_DIM], layout)
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
    buffers = (q_s, k_s, v_s, out_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    loading = (descs, buffers, barriers, heads_and_limits)
    computing = (out_desc, lse_ptr, buffers, barriers, heads_and_limits, sm_scale * LOG2E)
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


@gluon.jit(do_not_specialize=["left", "right"])
def attention_hopper_fwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM), in tiles of ROWS
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM), in tiles of BLOCK_N
    v_desc,  # values, as the keys
    out_desc,  # output, as the queries
    lse_ptr,  # natural logarithm of the sum of exponentials, (batch, heads, seqlen_q), contiguous
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
    ONE_TURN: gl.constexpr,  # whether each program has one tile of queries
):
    n_tiles = gl.cdiv(seqlen_q, CONSUMERS * ROWS)
    heads_and_limits = (
        n_tiles, batch_heads, heads, group, seqlen_q, seqlen_k, left, right, None,
    )  # fmt: skip
    constants: gl.constexpr = (
        HEADS_AT_ONCE, HAS_LEFT, HAS_RIGHT, ALL_WHOLE, CONSUMERS, BLOCK_N, STAGES, TURNS, HEAD_DIM,
        PAIRED, HAS_LEFT and HAS_RIGHT, ONE_TURN,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, out_desc)
    share(
        descs, lse_ptr, heads_and_limits, sm_scale, constants, CONSUMER_REGISTERS, LOADER_REGISTERS
    )  # fmt: skip


# -- on the host


def describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe (batch, heads, seqlen, head_dim) so that a tile is ``rows`` rows of one head."""
    rest = _all_but_the_address(x.dtype, x.shape, x.stride(), rows)
    return tiles.descriptor(x, rest, TensorDescriptor)


@planned
def _all_but_the_address(dtype, shape, strides, rows) -> dict[str, object]:
    unit = tiles.ALIGNMENT.value // dtype.itemsize
    strides = [s if n > 1 else unit for s, n in zip(strides[:-1], shape, strict=False)]
    block = [1, 1, rows, shape[3]]
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    at_zero = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(at_zero, list(shape), [*strides, 1], block, layout))


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    window: scope.Window | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for operands that are checked, and that :func:`supported` allows.

    ``config`` is how the kernel is cut: by default as :func:`kernelbook.attention` has it with the
    backend "gluon". To run the fastest kernel, ask :func:`forward_choice` first.
    """
    # I/O: read q + read k + read v + write out + write lse
    if config is None:
        chosen = forward_choice((9, 0), q.dtype, q.shape, k.shape, is_causal, window, "gluon")
        config = chosen.config
    device, dtype = q.device, q.dtype
    out = tiles.empty_dense_like(q)
    run, size, *rests = _launch(
        config, device, runtime.multiprocessors(device), dtype, q.shape, k.shape, q.stride(),
        k.stride(), v.stride(), out.stride(), is_causal, window, sm_scale,
    )  # fmt: skip
    lse = torch.empty(size, dtype=torch.float32, device=device)
    run(*map(_describe, (q, k, v, out), rests), lse)
    return out, lse


def _describe(x: torch.Tensor, rest: dict[str, object]) -> TensorDescriptor:
    return tiles.descriptor(x, rest, TensorDescriptor)


@planned
def _launch(
    config, device, multiprocessors, dtype, q_shape, k_shape, q_strides, k_strides, v_strides,
    out_strides, is_causal, window, sm_scale,
) -> tuple:  # fmt: skip
    """Return how the kernel is launched, the size of lse, and how q, k, v and out are described."""
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    left, right = scope.bounds(is_causal, window, seqlen_q, seqlen_k)
    heads_at_once = 1
    if scope.uneven(left, right):
        bytes_a_head = 2 * seqlen_k * head_dim * dtype.itemsize
        heads_at_once = tuned.heads_in_l2(bytes_a_head, heads // heads_k, device)
    programs = batch * heads * runtime.cdiv(seqlen_q, config.consumers * ROWS.value)
    several = config.persistent and programs > multiprocessors
    paired = several and config.paired and scope.uneven(left, right)
    if config.persistent:
        programs = min(runtime.cdiv(programs, 2) if paired else programs, multiprocessors)
    if paired:
        # all pairs are equal, so that few heads suffice, and their keys stay in L2
        heads_at_once = 1 + runtime.cdiv(seqlen_q, config.consumers * ROWS.value) % 2
    if several and left is not None and right is not None:
        # The first queries of a head see fewer keys: with their tiles after all others, programs
        # end together. L2 still holds what is read: in one half the keys, in the other the values.
        bytes_of_keys = min(seqlen_k, left + right + 1) * head_dim * dtype.itemsize
        heads_at_once = tuned.heads_in_l2(bytes_of_keys, heads // heads_k, device)
    run = tiles.KnownLaunch(
        attention_hopper_fwd_kernel, (programs,),
        batch * heads, heads, heads // heads_k, seqlen_q, seqlen_k, left or 0, right or 0, sm_scale,
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
        ONE_TURN=not several,
        num_warps=4,
    )  # fmt: skip
    rows = ROWS.value, config.block_n, config.block_n, ROWS.value
    shapes = q_shape, k_shape, k_shape, q_shape
    strides = q_strides, k_strides, v_strides, out_strides
    rests = map(_all_but_the_address, [dtype] * 4, shapes, strides, rows)
    return run, (batch, heads, seqlen_q), *rests
