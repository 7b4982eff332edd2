"""Backward pass of packed attention: dq, dk and dv in two sweeps, in one fixed order.

The sweeps are those of :mod:`backward`. Rows past the end of a sequence are those of the next one.
Tiles read zeros there, as past the end of a tensor, and write nothing: see
:func:`tiles.head_of_sequence`. The statistics, lse and delta, are laid out anew, (heads, padded):
each sequence begins there at a multiple of PADDING, and no tile reaches the next one. So they need
no mask, and descriptors, which want aligned addresses, can read them.

With PADDING = 128 sequence b begins at (cu[b] // 128 + b) * 128. That is known without looking at
other sequences, and the distance to the next is at least the length of b, rounded up. The host
knows the size of the whole, (total // 128 + batch) * 128, without looking at the offsets.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.backward import PADDING, describe_rows, sweep_keys, sweep_queries
from kernelbook.ops.attention.scope import key_stages, query_stages, seeing_queries, seen_keys
from kernelbook.ops.attention.tiles import (
    LOG2E,
    describe,
    empty_fit,
    head_block,
    head_of_sequence,
    load_tile,
    place,
    store_tile,
)
from kernelbook.ops.attention.varlen import SIZES, launch, sequence
from kernelbook.ops.launch import Launch, planned


@triton.jit
def padded_start(first_row, batch, PADDING: tl.constexpr):
    """Return where the statistics of a sequence begin: a multiple of PADDING, beyond all before.

    The difference between two neighbours is at least the length of the first, rounded up.
    """
    return tl.multiple_of((first_row // PADDING + batch) * PADDING, PADDING)


@triton.jit(do_not_specialize=["total_q", "max_seqlen_q"])
def attention_varlen_preprocess_kernel(
    out_ptr,  # output of forward, (total_q, heads, HEAD_DIM), contiguous
    do_ptr,  # its gradient, of the same shape
    lse_ptr,  # logsumexp, natural, (heads, total_q), contiguous
    dlse_ptr,  # its gradient, contiguous, or None
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    delta_ptr,  # output, (heads, padded)
    lse_log2_ptr,  # output, (heads, padded)
    stride_doh,
    stride_dom,
    heads,
    total_q,
    max_seqlen_q,
    padded,  # rows of the statistics of a head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # PADDING: what is written ends where a sequence's room ends
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
):
    # -- place: a tile of queries of one head of one sequence
    n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    batch_head, tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    batch, head = batch_head // heads, (batch_head % heads).to(tl.int64)
    first_q, seqlen_q = sequence(cu_q_ptr, batch, total_q, max_seqlen_q)
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile * BLOCK_M >= seqlen_q:
        return

    # -- delta: one number per query
    cols = tl.arange(0, BLOCK_D)[None, :]
    exist = queries < seqlen_q
    inside = exist[:, None] & (cols < HEAD_DIM)
    rows = (first_q + queries).to(tl.int64)
    out_ptrs = out_ptr + (rows * heads + head)[:, None] * HEAD_DIM + cols
    do_ptrs = do_ptr + head * stride_doh + rows[:, None] * stride_dom + cols
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, axis=1)
    if dlse_ptr is not None:  # dS gains P * dlse, and delta enters dS as -P * delta
        delta -= tl.load(dlse_ptr + head * total_q + rows, mask=exist, other=0.0)

    # -- guard: exp2(s - inf) is 0, for a query that sees no key and for one past the end
    lse = tl.load(lse_ptr + head * total_q + rows, mask=exist, other=float("-inf"))
    nothing = lse == float("-inf")
    padded_rows = head * padded + padded_start(first_q, batch, BLOCK_M) + queries
    tl.store(delta_ptr + padded_rows, tl.where(nothing, 0.0, delta))
    tl.store(lse_log2_ptr + padded_rows, tl.where(nothing, float("inf"), lse * LOG2E))


@triton.jit(do_not_specialize=SIZES)
def attention_varlen_dkdv_kernel(
    q_desc,  # queries, (1, heads, total_q, head_dim), packed, as describe describes them
    k_desc,  # keys, (1, heads // GROUP, total_k, head_dim)
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    lse_rows,  # logsumexp in base 2, (heads, padded): a descriptor or a pointer
    delta_rows,  # rowsum(dO * O), likewise
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    dk_desc,  # output, as the keys
    dv_desc,  # output, as the keys
    batch_heads,  # batch * heads // GROUP
    heads_k,
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate: see tuned.backward_heads_at_once
    padded,  # rows of the statistics of a head
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DESCRIBED: tl.constexpr,  # whether the statistics come by descriptors
    GROUP: tl.constexpr,  # query heads that share a head of keys
    PADDING: tl.constexpr,  # what the statistics of a sequence are padded to a multiple of
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    # -- place: the first keys are seen by the most queries, and come first
    tile, batch_head = place(tl.cdiv(max_seqlen_k, BLOCK_N), batch_heads, heads_at_once)
    batch, head_k = batch_head // heads_k, batch_head % heads_k
    start_n = tile * BLOCK_N
    first_k, seqlen_k = sequence(cu_k_ptr, batch, total_k, max_seqlen_k)
    if start_n >= seqlen_k:
        return
    first_q, seqlen_q = sequence(cu_q_ptr, batch, total_q, max_seqlen_q)

    # -- load: keys past the end are zeros, and their rows of dk and dv are not written
    k = load_tile(head_of_sequence(k_desc, head_k, first_k, seqlen_k, BLOCK_N, BLOCK_D), start_n)
    v = load_tile(head_of_sequence(v_desc, head_k, first_k, seqlen_k, BLOCK_N, BLOCK_D), start_n)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)

    # -- stages: queries that see all keys of the tile, between queries that see some, and no others
    first_seeing, end_seeing = seeing_queries(
        start_n + tl.arange(0, BLOCK_N), seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first, whole, cut, end = query_stages(
        start_n, start_n + BLOCK_N - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_M,
    )  # fmt: skip
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT
    if not MASKED:
        whole = first

    # -- sweep: the queries of every head that reads these keys
    start = padded_start(first_q, batch, PADDING)
    for member in range(GROUP):
        row = head_k * GROUP + member
        q_head = head_of_sequence(q_desc, row, first_q, seqlen_q, BLOCK_M, BLOCK_D)
        do_head = head_of_sequence(do_desc, row, first_q, seqlen_q, BLOCK_M, BLOCK_D)
        if MASKED:
            dk, dv = sweep_queries(
                dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, None, None,
                row, padded, first, whole, first_seeing, end_seeing, sm_scale * LOG2E,
                True, HAS_LEFT, "none", DESCRIBED, BLOCK_M, start,
            )  # fmt: skip
        dk, dv = sweep_queries(
            dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, None, None,
            row, padded, whole, cut, first_seeing, end_seeing, sm_scale * LOG2E,
            False, False, "none", DESCRIBED, BLOCK_M, start,
        )  # fmt: skip
        if HAS_LEFT:
            dk, dv = sweep_queries(
                dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, None, None,
                row, padded, cut, end, first_seeing, end_seeing, sm_scale * LOG2E,
                False, True, "none", DESCRIBED, BLOCK_M, start,
            )  # fmt: skip

    # -- write: the accumulators, in the dtype of the gradient
    dk_head = head_of_sequence(dk_desc, head_k, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    dv_head = head_of_sequence(dv_desc, head_k, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    store_tile(dk_head, start_n, dk * sm_scale)
    store_tile(dv_head, start_n, dv)


@triton.jit(do_not_specialize=SIZES)
def attention_varlen_dq_kernel(
    q_desc,  # queries, (1, heads, total_q, head_dim), packed, as describe describes them
    k_desc,  # keys, (1, heads // group, total_k, head_dim)
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    lse_ptr,  # logsumexp in base 2, (heads, padded)
    delta_ptr,  # rowsum(dO * O), (heads, padded)
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    dq_desc,  # output, as the queries
    batch_heads,  # batch * heads
    heads,
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate: see tuned.backward_heads_at_once
    padded,  # rows of the statistics of a head
    group,  # query heads that share a head of keys
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PADDING: tl.constexpr,  # what the statistics of a sequence are padded to a multiple of
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    # -- place: the last queries see the most keys, and come first
    n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile, batch_head = place(n_tiles, batch_heads, heads_at_once)
    batch, head = batch_head // heads, batch_head % heads
    start_m = (n_tiles - 1 - tile) * BLOCK_M
    first_q, seqlen_q = sequence(cu_q_ptr, batch, total_q, max_seqlen_q)
    if start_m >= seqlen_q:
        return
    first_k, seqlen_k = sequence(cu_k_ptr, batch, total_k, max_seqlen_k)

    # -- load: queries past the end are zeros, and their rows of dq are not written
    start = padded_start(first_q, batch, PADDING) + start_m
    rows = head.to(tl.int64) * padded + start + tl.arange(0, BLOCK_M)
    lse_log2 = tl.load(lse_ptr + rows)
    delta = tl.load(delta_ptr + rows)
    q = load_tile(head_of_sequence(q_desc, head, first_q, seqlen_q, BLOCK_M, BLOCK_D), start_m)
    do = load_tile(head_of_sequence(do_desc, head, first_q, seqlen_q, BLOCK_M, BLOCK_D), start_m)
    k_head = head_of_sequence(k_desc, head // group, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    v_head = head_of_sequence(v_desc, head // group, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- stages: keys that all queries of the tile see, between keys that some see, and no others
    first_visible, n_visible = seen_keys(
        start_m + tl.arange(0, BLOCK_M), seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first, whole, cut, end = key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip
    if HAS_LEFT:
        dq = sweep_keys(
            dq, q, do, lse_log2, delta, k_head, v_head, first, whole, first_visible, n_visible,
            sm_scale * LOG2E, True, True, BLOCK_N,
        )  # fmt: skip
    dq = sweep_keys(
        dq, q, do, lse_log2, delta, k_head, v_head, whole, cut, first_visible, n_visible,
        sm_scale * LOG2E, False, False, BLOCK_N,
    )  # fmt: skip
    dq = sweep_keys(
        dq, q, do, lse_log2, delta, k_head, v_head, cut, end, first_visible, n_visible,
        sm_scale * LOG2E, True, False, BLOCK_N,
    )  # fmt: skip

    # -- write: the accumulators, in the dtype of the gradient
    dq_head = head_of_sequence(dq_desc, head, first_q, seqlen_q, BLOCK_M, BLOCK_D)
    store_tile(dq_head, start_m, dq * sm_scale)


def statistics(
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    max_seqlen_q: int,
) -> torch.Tensor:
    """Return lse in base 2 and delta, float32, (2, heads, padded)."""
    # I/O: read out + read do + read lse + write lse_log2 + write delta
    _, heads, total, head_dim = do.shape
    batch = len(cu_q) - 1
    padded = (total // PADDING + batch) * PADDING
    stats = torch.empty((2, heads, padded), dtype=torch.float32, device=out.device)
    lse_log2, delta = stats.unbind()
    run = _preprocess_launch(do.shape, do.stride(), batch, max_seqlen_q, padded)
    run(out, do, lse, dlse, cu_q, delta, lse_log2)
    return stats


@planned
def _preprocess_launch(do_shape, do_strides, batch, max_seqlen_q, padded) -> Launch:
    _, heads, total_q, head_dim = do_shape
    return Launch(
        attention_varlen_preprocess_kernel, (batch * heads * runtime.cdiv(max_seqlen_q, PADDING),),
        *do_strides[1:3], heads, total_q, max_seqlen_q, padded,
        HEAD_DIM=head_dim, BLOCK_M=PADDING, BLOCK_D=head_block(head_dim), num_warps=8,
    )  # fmt: skip


def _keys_backward(q, k, v, do, lse_log2, delta, cu_q, cu_k, longest, bounds, sm_scale):
    """Return (dk, dv)."""
    # I/O: read k + read v + write dk + write dv, and read q + read do for each tile of keys
    config = tuned.backward_config("dkdv", q)
    dk, dv = _empty_packed(k), _empty_packed(v)
    rows = lse_log2, delta
    if config.described and config.described_rows:
        rows = [describe_rows(x, config.block_m) for x in rows]
    run = launch(
        attention_varlen_dkdv_kernel, config, q, k, len(cu_q) - 1, longest, bounds, sm_scale,
        lse_log2.shape[1], by_keys=True, DESCRIBED=config.described and config.described_rows,
        GROUP=q.shape[1] // k.shape[1], PADDING=PADDING,
    )  # fmt: skip
    how = {"described": config.described, "packed": True}
    q, do = (describe(x, config.block_m, **how) for x in (q, do))
    k, v, *to = (describe(x, config.block_n, **how) for x in (k, v, dk, dv))
    run(q, k, v, do, *rows, cu_q, cu_k, *to)
    return dk, dv


def _queries_backward(q, k, v, do, lse_log2, delta, cu_q, cu_k, longest, bounds, sm_scale):
    """Return dq."""
    # I/O: read q + read do + write dq, and read k + read v for each tile of queries
    config = tuned.backward_config("dq", q)
    dq = _empty_packed(q)
    run = launch(
        attention_varlen_dq_kernel, config, q, k, len(cu_q) - 1, longest, bounds, sm_scale,
        lse_log2.shape[1], q.shape[1] // k.shape[1], PADDING=PADDING,
    )  # fmt: skip
    how = {"described": config.described, "packed": True}
    q, do, to = (describe(x, config.block_m, **how) for x in (q, do, dq))
    k, v = (describe(x, config.block_n, **how) for x in (k, v))
    run(q, k, v, do, lse_log2, delta, cu_q, cu_k, to)
    return dq


def _empty_packed(x: torch.Tensor) -> torch.Tensor:
    """Allocate the gradient of x, (1, heads, total, head_dim), as packed tensors lie."""
    return empty_fit(x.transpose(1, 2)).transpose(1, 2)


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
    *,
    dq_needed: bool = True,
    dkdv_needed: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (dq, dk, dv) in two sweeps; what is not needed is None.

    q, k, v, do and gradients are seen as (1, heads, total, head_dim), and descriptors fit; out is
    contiguous, (total_q, heads, head_dim).
    """
    stats = statistics(out, lse, do, dlse, cu_q, longest[0])
    operands = q, k, v, do, *stats, cu_q, cu_k, longest, bounds, sm_scale
    dk, dv = _keys_backward(*operands) if dkdv_needed else (None, None)
    return _queries_backward(*operands) if dq_needed else None, dk, dv
