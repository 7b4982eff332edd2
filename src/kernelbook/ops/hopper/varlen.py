"""Attention of packed sequences for Hopper in Gluon: forward, and backward in one sweep.

The roles are those of :mod:`forward` and :mod:`backward`. What is new is where a tile lies. The
host knows how many rows there are in all, and not where sequences begin. With tiles of M rows it
plans total // M + batch slots for a head. Sequence b begins at slot cu[b] // M + b, which is known
without looking at the sequences before, and up to the next one there are at least as many slots as
it has tiles. So the sequence of a slot is found by bisection. At most one slot of a sequence has no
tile; in a grid with the tiles of the longest sequence for each, all programs past the end of a
shorter one would have none.

Backward launches a program for each slot. Forward has one program for each SM, as for sequences of
one length, because a program's beginning and end cost a short tile much: a small kernel before it
writes a table of all tiles, in the order of :func:`order_tiles_kernel`, through which programs go
turn by turn.

Rows after a sequence are those of the next one. Copies read zeros there, and write nothing: see
:func:`kernelbook.ops.attention.tiles.describe`.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernelbook import runtime
from kernelbook.ops.attention import scope, tiles, tuned, varlen_backward
from kernelbook.ops.attention.backward import PADDING
from kernelbook.ops.attention.scope import key_stages, query_stages, seen_keys
from kernelbook.ops.attention.tiles import place
from kernelbook.ops.attention.varlen import sequence
from kernelbook.ops.attention.varlen_backward import padded_start
from kernelbook.ops.hopper import backward, forward
from kernelbook.ops.hopper.backward import KEYS
from kernelbook.ops.hopper.choice import REGISTERS
from kernelbook.ops.hopper.forward import COLUMNS, ROWS
from kernelbook.ops.launch import Launch, planned

# -- which sequence


@triton.jit
def largest(x):
    """Return the largest number of a tensor, or the number that x is."""
    if x.type.is_block():
        return tl.max(x, 0)
    else:
        return x


@triton.jit
def sequence_of_slot(cu_ptr, batch, slot, ROWS_OF_SLOT: tl.constexpr):
    """Return the last sequence that begins at this slot, or of a tensor at each slot, or before."""
    low, high = slot * 0, slot * 0 + (batch - 1)
    while largest(high - low) > 0:
        middle = (low + high + 1) // 2
        fits = tl.load(cu_ptr + middle) // ROWS_OF_SLOT + middle <= slot
        high = tl.where(fits, high, middle - 1)
        low = tl.where(fits, middle, low)
    return low


# -- forward

SIZES = ["batch", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k", "left", "right"]
"""What differs from batch to batch: a kernel that were specialised on it would be compiled anew."""

MINE, OTHERS = 32, 256
"""How many slots a program puts into their order, and how many it compares these with at a time."""

NOWHERE = tl.constexpr(-(2**31))
"""The rank of a slot without a tile."""

OF_A_BAND = tl.constexpr(2**21)
"""At least twice the tiles of keys that a tile of queries sees."""


@triton.jit
def tiles_of_slots(slot, slots, cu_q_ptr, cu_k_ptr, of_batch, mask, BLOCK_M, BLOCK_N):
    """Return (rank, start_m, seqlen_q, seqlen_k, first_q, first_k) of the tile of each slot.

    Tiles of higher rank come first: those of a band of rows before those of the next band. In the
    last band tiles that see many tiles of keys come before those that see few, in the band before
    it the other way round, and so on: lengths never jump. A slot without a tile has the lowest rank
    of all.
    """
    batch, total_q, total_k, max_seqlen_q, max_seqlen_k, rows_of_band = of_batch
    left, right, HAS_LEFT, HAS_RIGHT = mask
    b = sequence_of_slot(cu_q_ptr, batch, slot, BLOCK_M)
    first_q, seqlen_q = sequence(cu_q_ptr, b, total_q, max_seqlen_q)
    first_k, seqlen_k = sequence(cu_k_ptr, b, total_k, max_seqlen_k)
    start_m = (slot - first_q // BLOCK_M - b) * BLOCK_M
    first, _, _, end = key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip
    length = tl.maximum(tl.cdiv(end, BLOCK_N) - first // BLOCK_N, 1)
    bands_after = (total_q - 1) // rows_of_band - first_q // rows_of_band
    rank = bands_after * OF_A_BAND + tl.where(bands_after % 2 == 0, length, -length)
    there = (slot < slots) & (start_m >= 0) & (start_m < seqlen_q)
    return tl.where(there, rank, NOWHERE), start_m, seqlen_q, seqlen_k, first_q, first_k


@triton.jit(do_not_specialize=[*SIZES, "slots", "rows_of_band"])
def order_tiles_kernel(
    table_ptr,  # output, int32, (slots + 1, COLUMNS): start_m, seqlen_q, seqlen_k, first_q, first_k
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    slots,
    batch,
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,
    right,
    rows_of_band,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MINE: tl.constexpr,  # slots of a program
    OTHERS: tl.constexpr,  # slots that it compares them with at a time
):
    # -- place: the tiles of these slots
    of_batch = (batch, total_q, total_k, max_seqlen_q, max_seqlen_k, rows_of_band)
    mask = (left, right, HAS_LEFT, HAS_RIGHT)
    slot = tl.program_id(0) * MINE + tl.arange(0, MINE)
    rank, start_m, seqlen_q, seqlen_k, first_q, first_k = tiles_of_slots(
        slot, slots, cu_q_ptr, cu_k_ptr, of_batch, mask, BLOCK_M, BLOCK_N
    )
    # -- compare: a tile's row is the number of tiles before it
    row, n_tiles = slot * 0, 0
    for first in range(0, slots, OTHERS):
        other = first + tl.arange(0, OTHERS)
        of_other, _, _, _, _, _ = tiles_of_slots(
            other, slots, cu_q_ptr, cu_k_ptr, of_batch, mask, BLOCK_M, BLOCK_N
        )
        before = of_other[None, :] > rank[:, None]
        before |= (of_other[None, :] == rank[:, None]) & (other[None, :] > slot[:, None])
        row += tl.sum(before.to(tl.int32), 1)
        n_tiles += tl.sum((of_other != NOWHERE).to(tl.int32), 0)
    # -- write: the row of each tile, and last of all how many there are
    there = rank != NOWHERE
    row_ptrs = table_ptr + row * COLUMNS
    tl.store(row_ptrs, start_m, mask=there)
    tl.store(row_ptrs + 1, seqlen_q, mask=there)
    tl.store(row_ptrs + 2, seqlen_k, mask=there)
    tl.store(row_ptrs + 3, first_q, mask=there)
    tl.store(row_ptrs + 4, first_k, mask=there)
    tl.store(table_ptr + slots * COLUMNS, n_tiles, mask=tl.program_id(0) == 0)


@gluon.jit(do_not_specialize=["slots", "total_q", "left", "right", "heads_at_once"])
def attention_varlen_hopper_fwd_kernel(
    q_desc,  # queries, (1, heads, total_q, HEAD_DIM), packed, in tiles of ROWS
    k_desc,  # keys, (1, heads // group, total_k, HEAD_DIM), packed, in tiles of BLOCK_N
    v_desc,  # values, as the keys
    out_desc,  # output, as the queries
    table_ptr,  # tiles in their order, and how many, int32, (slots + 1, COLUMNS)
    lse_ptr,  # natural logarithm of the sum of exponentials, (heads, total_q), contiguous
    slots,
    heads,
    total_q,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate
    group,  # query heads that share a head of keys
    HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    # -- place: the host does not know how many tiles there are, so that programs may be too many
    n_tiles = gl.load(table_ptr + slots * COLUMNS)
    packed = (table_ptr, total_q, heads_at_once)
    heads_and_limits = (n_tiles, heads, heads, group, 0, 0, left, right, packed)
    constants: gl.constexpr = (
        1, HAS_LEFT, HAS_RIGHT, False, CONSUMERS, BLOCK_N, STAGES, TURNS, HEAD_DIM, False,
        HAS_LEFT and HAS_RIGHT, False,
    )  # fmt: skip
    if gl.program_id(0) >= n_tiles * heads:
        return
    # -- roles
    descs = (q_desc, k_desc, v_desc, out_desc)
    forward.share(
        descs, lse_ptr, heads_and_limits, sm_scale, constants, CONSUMER_REGISTERS, LOADER_REGISTERS
    )  # fmt: skip


@planned
def _rest_of_packed(dtype, shape, strides, rows) -> dict[str, object]:
    """Return what is said of every packed (1, heads, total, head_dim), wherever it lies."""
    block = (1, 1, 1, rows, shape[3])
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return {**tiles.rest_of_tiles(dtype, shape, strides, block, packed=True), "layout": layout}


def _describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    rest = _rest_of_packed(x.dtype, x.shape, x.stride(), rows)
    return tiles.descriptor(x, rest, TensorDescriptor)


def attention_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    bounds: scope.Window,
    sm_scale: float,
    config: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attention.varlen.attention_varlen_forward``, cut as ``config`` says."""
    # I/O: read q + read k + read v + write out + write lse
    _, heads, total, head_dim = q.shape
    out = torch.empty((total, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    rows, batch = ROWS.value, len(cu_q) - 1
    slots = total // (config.consumers * rows) + batch
    table = torch.empty((slots + 1, COLUMNS.value), dtype=torch.int32, device=q.device)
    order, run = _forward_plan(config, q.device, q.shape, k.shape, batch, longest, bounds, sm_scale)
    order(table, cu_q, cu_k)
    run(
        _describe(q, rows), _describe(k, config.block_n), _describe(v, config.block_n),
        _describe(out.transpose(0, 1).unsqueeze(0), rows), table, lse,
    )  # fmt: skip
    return out, lse


@planned
def _forward_plan(
    config, device, q_shape, k_shape, batch, longest, bounds, sm_scale
) -> tuple[Launch, Launch]:
    """Return the launches that put tiles into an order, and that compute them in it."""
    _, heads, total_q, head_dim = q_shape
    _, heads_k, total_k, _ = k_shape
    left, right = bounds
    block_m = config.consumers * ROWS.value
    slots = total_q // block_m + batch
    bytes_a_head = 4 * total_k * head_dim  # of keys and values; in L2 as many as it holds at a time
    bands = min(1000, runtime.cdiv(bytes_a_head, runtime.l2_cache(device)))
    mask = {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}
    order = Launch(
        order_tiles_kernel, (runtime.cdiv(slots, MINE),),
        slots, batch, total_q, total_k, *longest, left or 0, right or 0,
        runtime.cdiv(total_q, bands), **mask, COLUMNS=COLUMNS.value, BLOCK_M=block_m,
        BLOCK_N=config.block_n, MINE=MINE, OTHERS=OTHERS, num_warps=4,
    )  # fmt: skip
    consumer_registers, loader_registers = REGISTERS[config.consumers]
    run = Launch(
        attention_varlen_hopper_fwd_kernel,
        (min(slots * heads, runtime.multiprocessors(device)),),
        slots, heads, total_q, left or 0, right or 0, sm_scale,
        tuned.heads_in_l2(bytes_a_head, heads // heads_k, device), heads // heads_k,
        HEAD_DIM=head_dim, **mask,
        CONSUMERS=config.consumers,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        TURNS=config.take_turns,
        CONSUMER_REGISTERS=consumer_registers,
        LOADER_REGISTERS=loader_registers,
        num_warps=4,
    )  # fmt: skip
    return order, run


# -- backward

HEADS_AT_ONCE = 8
"""Between how many heads tiles of keys alternate. With few, programs of one sequence begin together
and wait for each other's turn to add; with many, queries are read from memory again. At head_dim
128 and 32 sequences, with 1, 4, 8 and 16 heads: 5.85, 4.96, 4.83 and 5.16 ms causal."""


@gluon.jit(do_not_specialize=[*SIZES, "padded", "heads_k", "heads_at_once"])
def attention_varlen_hopper_bwd_kernel(
    q_desc,  # queries, (1, heads, total_q, HEAD_DIM), packed, in tiles of BLOCK_M
    k_desc,  # keys, (1, heads // group, total_k, HEAD_DIM), packed, in tiles of 64
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    stats_desc,  # lse in base 2, and then delta, (2 * heads * padded,)
    dk_desc,  # output, as the keys
    dv_desc,  # output, as the keys
    sums_desc,  # sums of dq in float32, (heads * padded, HEAD_DIM)
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    counter_ptr,  # how far programs are, (heads // group, slots), of zeros
    batch,
    heads_k,
    group,  # query heads that share a head of keys
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    padded,  # rows of the statistics of a head: see varlen_backward
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate
    HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    PADDING: gl.constexpr,  # what the statistics of a sequence are padded to a multiple of
    BLOCK_M: gl.constexpr,
    Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    LATE: gl.constexpr,  # whether statistics are read late: see backward_choice
):
    # -- place: these keys of a sequence, and the tiles of its queries that see some of them
    slots = total_k // KEYS + batch
    slot, head_k = place(slots, heads_k, heads_at_once)
    b = sequence_of_slot(cu_k_ptr, batch, slot, KEYS)
    first_k, seqlen_k = sequence(cu_k_ptr, b, total_k, max_seqlen_k)
    tile = slot - first_k // KEYS - b
    start_n = tile * KEYS
    if (tile < 0) | (start_n >= seqlen_k):
        return
    first_q, seqlen_q = sequence(cu_q_ptr, b, total_q, max_seqlen_q)
    first, _, _, end = query_stages(
        start_n, start_n + KEYS - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    end_tile = gl.cdiv(end, BLOCK_M)
    tiles_of_head = gl.maximum(end_tile - first // BLOCK_M, 0)
    _, _, _, end = query_stages(
        start_n - KEYS, start_n - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    # with wrong offsets the slot before may be another sequence's, and to wait for it would hang
    follows = (tile > 0) & (sequence_of_slot(cu_k_ptr, batch, slot - 1, KEYS) == b)
    end_before = gl.where(follows, gl.cdiv(end, BLOCK_M), 0)
    counter_ptr += head_k * slots + slot

    # -- roles
    packed = (padded_start(first_q, b, PADDING), first_q + seqlen_q, first_k + seqlen_k)
    where = (0, head_k, heads_k, 1, padded, tile, end_before, packed)
    walk = (start_n, end_tile, tiles_of_head, group, seqlen_q, seqlen_k)
    constants: gl.constexpr = (
        BLOCK_M, Q_STAGES, HEAD_DIM, HAS_LEFT, HAS_RIGHT, True, False, DO_STAGES, LATE,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums_desc)
    backward.share(descs, counter_ptr, where, walk, (left, right), sm_scale, constants)


@triton.jit(do_not_specialize=[*SIZES, "heads", "padded"])
def attention_varlen_hopper_dq_kernel(
    sums_ptr,  # sums of dq in float32, (heads, padded, HEAD_DIM)
    dq_ptr,  # output, (total_q, heads, HEAD_DIM), contiguous
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    batch,
    heads,
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,
    right,
    padded,
    sm_scale,
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # -- place: some rows of a head of a sequence, one after another in memory
    n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile, b_head = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    b, head = b_head // heads, (b_head % heads).to(tl.int64)
    first_q, seqlen_q = sequence(cu_q_ptr, b, total_q, max_seqlen_q)
    _, seqlen_k = sequence(cu_k_ptr, b, total_k, max_seqlen_k)
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile * BLOCK_M >= seqlen_q:
        return
    # -- scale, and convert; nobody has written sums of a query that sees no key
    first, end = seen_keys(queries, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
    there = (queries < seqlen_q)[:, None]
    sees = (first < end)[:, None]
    cols = tl.arange(0, HEAD_DIM)[None, :]
    rows = head * padded + padded_start(first_q, b, PADDING) + queries
    dq = tl.load(sums_ptr + rows[:, None] * HEAD_DIM + cols, mask=there & sees, other=0.0)
    rows = (first_q + queries).to(tl.int64) * heads + head
    dq_ptrs = dq_ptr + rows[:, None] * HEAD_DIM + cols
    tl.store(dq_ptrs, (dq * sm_scale).to(dq_ptr.dtype.element_ty), mask=there)


def attention_varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    bounds: scope.Window,
    sm_scale: float,
    config: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``attention.varlen_backward.attention_varlen_backward``, in one sweep, cut as ``config``
    says, and always in a fixed order."""
    # I/O: what statistics do + read k + read v + write dk + write dv + write dq, and for each tile
    # of keys read q + read do + read and write sums of dq
    _, heads, total, head_dim = q.shape
    batch, device = len(cu_q) - 1, q.device
    stats = varlen_backward.statistics(out, lse, do, dlse, cu_q, longest[0])
    padded = stats.shape[2]
    sums = torch.empty((heads, padded, head_dim), dtype=torch.float32, device=device)
    dq, dk, dv = (
        torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
        for x in (q, k, v)
    )
    sweep, end, n_counters, of_stats, of_sums = _backward_plan(
        config, device, q.shape, k.shape, batch, longest, bounds, sm_scale, padded
    )
    counter = torch.zeros(n_counters, dtype=torch.int32, device=device)
    dk, dv = dk.transpose(1, 2), dv.transpose(1, 2)
    rows = ROWS.value
    sweep(
        _describe(q, config.block_m), _describe(k, rows), _describe(v, rows),
        _describe(do, config.block_m), tiles.descriptor(stats, of_stats, TensorDescriptor),
        _describe(dk, rows), _describe(dv, rows),
        tiles.descriptor(sums, of_sums, TensorDescriptor), cu_q, cu_k, counter,
    )  # fmt: skip
    end(sums, dq, cu_q, cu_k)
    return dq.transpose(1, 2), dk, dv


@planned
def _backward_plan(
    config, device, q_shape, k_shape, batch, longest, bounds, sm_scale, padded
) -> tuple:
    """Return the launches, the number of counters, and what is said of statistics and of sums."""
    _, heads, total_q, head_dim = q_shape
    _, heads_k, total_k, _ = k_shape
    left, right = bounds
    slots = total_k // KEYS.value + batch
    mask = {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}
    limits = total_q, total_k, *longest, left or 0, right or 0, padded, sm_scale
    sweep = Launch(
        attention_varlen_hopper_bwd_kernel, (slots * heads_k,),
        batch, heads_k, heads // heads_k, *limits, HEADS_AT_ONCE,
        HEAD_DIM=head_dim, **mask,
        PADDING=PADDING, BLOCK_M=config.block_m, Q_STAGES=config.q_stages,
        DO_STAGES=config.do_stages, LATE=config.late, num_warps=4,
    )  # fmt: skip
    block_m = 4096 // head_dim
    end = Launch(
        attention_varlen_hopper_dq_kernel, (batch * heads * runtime.cdiv(longest[0], block_m),),
        batch, heads, *limits, HEAD_DIM=head_dim, **mask, PADDING=PADDING, BLOCK_M=block_m,
        num_warps=4,
    )  # fmt: skip
    return (
        sweep, end, heads_k * slots,
        backward._rest_of_stats(2 * heads * padded, config.block_m),
        backward._rest_of_sums(heads * padded, head_dim, head_dim * config.block_m // KEYS.value),
    )  # fmt: skip
