"""Backward pass of attention: dq, dk and dv without a seqlen_q by seqlen_k matrix in memory.

With S = scale Q K^T, P = softmax(S) and O = P V, a gradient dO of O gives

    dV = P^T dO,   dP = dO V^T,   dS = P ∘ (dP - delta),   dQ = scale dS K,   dK = scale dS^T Q,

where delta = rowsum(dO ∘ O), which is rowsum(dP ∘ P), one number per query. P is recomputed tile by
tile from the logsumexp that forward left: P = exp(S - lse).

    two sweeps  dk and dv by programs that own a tile of keys, dq by programs that own a tile of
                queries: seven matmuls per pair of tiles, and every sum in one fixed order
    one sweep   programs that own a tile of keys compute all three and add their part of dq into
                float32 memory: five matmuls, and the order of the additions differs between runs

Programs that own keys compute the transposes S^T and dP^T, because the results of these matmuls,
P^T and dS^T, are then the left operands of the next ones and can stay in registers.

Source: Dao, "FlashAttention-2", arXiv:2307.08691, 2023, section 3.1.2; the transposed matmuls and
the additions into dq: Shah et al., "FlashAttention-3", arXiv:2407.08608, 2024.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelbook import runtime
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.scope import key_stages, query_stages, seeing_queries, seen_keys
from kernelbook.ops.attention.tiles import (
    LOG2E,
    PRECISION,
    KnownLaunch,
    aligned,
    all_but_the_address,
    describe_by,
    describe_tiles,
    empty_like,
    head_block,
    head_of,
    load_tile,
    place,
    rest_of_tiles,
    store_tile,
)
from kernelbook.ops.launch import Launch, planned


@triton.jit(do_not_specialize=["n_counters"])
def preprocess_kernel(
    out_ptr,  # output of forward, (batch, heads, seqlen_q, head_dim), contiguous
    do_ptr,  # its gradient, of the same shape
    lse_ptr,  # logsumexp, natural, (batch, heads, seqlen_q), contiguous
    dlse_ptr,  # its gradient, contiguous, or None
    stats_ptr,  # output, lse in base 2 and then delta, (2, batch, heads, padded_q)
    counter_ptr,  # output, zeros for the kernel that comes next, or None
    n_counters,
    stride_ob,
    stride_oh,
    stride_om,
    stride_dob,
    stride_doh,
    stride_dom,
    heads,
    seqlen_q,
    padded_q,  # seqlen_q rounded up, so that no tile of queries ends past its row
    head_dim,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    # -- place: a tile of queries of one head
    n_tiles = padded_q // BLOCK_M
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    queries = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)[None, :]
    exist = queries < seqlen_q
    inside = exist[:, None] & (cols < head_dim)

    # -- delta: one number per query
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + queries[:, None] * stride_om + cols
    do_ptrs = do_ptr + batch * stride_dob + head * stride_doh + queries[:, None] * stride_dom + cols
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, axis=1)
    rows = batch_head * seqlen_q + queries
    if dlse_ptr is not None:  # dS gains P * dlse, and delta enters dS as -P * delta
        delta -= tl.load(dlse_ptr + rows, mask=exist, other=0.0)

    # -- guard: exp2(s - inf) is 0, for a query that sees no key and for one past the end
    lse = tl.load(lse_ptr + rows, mask=exist, other=float("-inf"))
    nothing = lse == float("-inf")
    stats_ptr += batch_head * padded_q + queries
    tl.store(stats_ptr, tl.where(nothing, float("inf"), lse * LOG2E))
    n_rows = tl.num_programs(0).to(tl.int64) * BLOCK_M  # of all heads, padded
    tl.store(stats_ptr + n_rows, tl.where(nothing, 0.0, delta))
    if counter_ptr is not None:
        for i in range(tl.program_id(0), n_counters, tl.num_programs(0)):
            tl.store(counter_ptr + i, 0)


@triton.jit
def load_row(rows, row, start, query, padded_q, BLOCK_M: tl.constexpr, DESCRIBED: tl.constexpr):
    """Read statistics of some queries of one head, by a descriptor or by pointers."""
    if DESCRIBED:
        return tl.reshape(rows.load([row, start + query]), (BLOCK_M,))
    else:
        rows += row.to(tl.int64) * padded_q + start
        return tl.load(rows + query + tl.arange(0, BLOCK_M))


@triton.jit
def sweep_queries(
    dk,  # accumulator, (BLOCK_N, BLOCK_D)
    dv,
    k,  # keys and values, (BLOCK_N, BLOCK_D)
    v,
    q_head,  # queries of one head, and the gradient of their out: see head_of
    do_head,
    lse_rows,
    delta_rows,
    dq_desc,
    dq_ptr,
    row,  # batch * heads + head
    padded_q,
    first_query,  # a multiple of BLOCK_M
    last_query,  # one past the last
    first_seeing,  # the first query that sees each key, (BLOCK_N,)
    end_seeing,  # one past the last
    scale_log2,
    MASKED: tl.constexpr,  # whether some of these queries come before the first of a key
    LEFT: tl.constexpr,  # whether some of these queries come after the last of a key
    DQ: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    start=0,  # where the statistics of the first query lie in their row
):
    """Add to dk and dv, and with DQ to dq in memory, what a range of queries contributes."""
    for start_m in tl.range(first_query, last_query, BLOCK_M):
        # -- recompute: P^T = exp(S^T - lse)
        q = load_tile(q_head, start_m)
        do = load_tile(do_head, start_m)
        lse_log2 = load_row(lse_rows, row, start, start_m, padded_q, BLOCK_M, DESCRIBED)
        qk_t = tl.dot(k, q.T, input_precision=PRECISION)
        p_t = tl.exp2(qk_t * scale_log2 - lse_log2[None, :])
        if MASKED:
            queries = start_m + tl.arange(0, BLOCK_M)
            p_t = tl.where(queries[None, :] >= first_seeing[:, None], p_t, 0.0)
        if LEFT:
            queries = start_m + tl.arange(0, BLOCK_M)
            p_t = tl.where(queries[None, :] < end_seeing[:, None], p_t, 0.0)

        # -- gradients: of values while dS is computed, then of keys. No load after the matmul
        # of dv begins, because a wait inside the pipeline of matmuls would serialise them.
        dp_t = tl.dot(v, do.T, input_precision=PRECISION)
        delta = load_row(delta_rows, row, start, start_m, padded_q, BLOCK_M, DESCRIBED)
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)

        # -- add: what these keys contribute to dq
        if DQ != "none":
            dq = tl.dot(ds_t.T, k, input_precision=PRECISION)
            if DQ == "descriptor":
                dq_desc.atomic_add([row * padded_q + start_m, 0], dq)
            else:
                rows = row.to(tl.int64) * padded_q + start_m + tl.arange(0, BLOCK_M)
                cols = tl.arange(0, k.shape[1])
                dq_ptrs = dq_ptr + rows[:, None] * k.shape[1] + cols[None, :]
                tl.atomic_add(dq_ptrs, dq, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["left", "right", "heads_at_once"])
def dkdv_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, head_dim), as describe describes them
    k_desc,  # keys, (batch, heads // GROUP, seqlen_k, head_dim)
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    lse_rows,  # logsumexp in base 2, (batch * heads, padded_q): a descriptor or a pointer
    delta_rows,  # rowsum(dO * O), likewise
    dk_desc,  # output, as the keys
    dv_desc,  # output, as the keys
    dq_desc,  # sums in float32, (batch * heads * padded_q, BLOCK_D), or None
    dq_ptr,  # the same sums, or None
    batch_heads_k,  # batch * heads // GROUP
    heads_k,
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    padded_q,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate: see tuned.backward_heads_at_once
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DQ: tl.constexpr,  # how to add to dq: "descriptor", "pointer" or "none"
    DESCRIBED: tl.constexpr,  # whether the statistics come by descriptors
    GROUP: tl.constexpr,  # query heads that share a head of keys
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    # -- place: the first keys are seen by the most queries, and come first
    tile, batch_head_k = place(tl.cdiv(seqlen_k, BLOCK_N), batch_heads_k, heads_at_once)
    batch, head_k = batch_head_k // heads_k, batch_head_k % heads_k
    start_n = tile * BLOCK_N
    k = load_tile(head_of(k_desc, batch, head_k, BLOCK_N, BLOCK_D), start_n)
    v = load_tile(head_of(v_desc, batch, head_k, BLOCK_N, BLOCK_D), start_n)
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
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or DQ != "none"
    if not MASKED:
        whole = first
    if DQ != "none":  # a key past the end must not reach dq; elsewhere it stays in its own row
        exist = start_n + tl.arange(0, BLOCK_N) < seqlen_k
        first_seeing = tl.where(exist, first_seeing, seqlen_q)

    # -- sweep: the queries of every head that reads these keys
    for member in range(GROUP):
        q_head = head_of(q_desc, batch, head_k * GROUP + member, BLOCK_M, BLOCK_D)
        do_head = head_of(do_desc, batch, head_k * GROUP + member, BLOCK_M, BLOCK_D)
        row = batch_head_k * GROUP + member
        if MASKED:
            dk, dv = sweep_queries(
                dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, dq_desc, dq_ptr,
                row, padded_q, first, whole, first_seeing, end_seeing, sm_scale * LOG2E,
                True, HAS_LEFT, DQ, DESCRIBED, BLOCK_M,
            )  # fmt: skip
        dk, dv = sweep_queries(
            dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, dq_desc, dq_ptr,
            row, padded_q, whole, cut, first_seeing, end_seeing, sm_scale * LOG2E,
            False, False, DQ, DESCRIBED, BLOCK_M,
        )  # fmt: skip
        if HAS_LEFT:
            dk, dv = sweep_queries(
                dk, dv, k, v, q_head, do_head, lse_rows, delta_rows, dq_desc, dq_ptr,
                row, padded_q, cut, end, first_seeing, end_seeing, sm_scale * LOG2E,
                False, True, DQ, DESCRIBED, BLOCK_M,
            )  # fmt: skip

    # -- write: the accumulators, in the dtype of the gradient
    store_tile(head_of(dk_desc, batch, head_k, BLOCK_N, BLOCK_D), start_n, dk * sm_scale)
    store_tile(head_of(dv_desc, batch, head_k, BLOCK_N, BLOCK_D), start_n, dv)


@triton.jit
def sweep_keys(
    dq,  # accumulator, (BLOCK_M, BLOCK_D)
    q,  # queries, (BLOCK_M, BLOCK_D)
    do,  # gradient of their out
    lse_log2,  # statistics of the queries, (BLOCK_M,)
    delta,
    k_head,  # keys and values of one head: see head_of
    v_head,
    first_key,  # a multiple of BLOCK_N
    last_key,  # one past the last
    first_visible,  # the first key that each query sees, (BLOCK_M,)
    n_visible,  # one past the last
    scale_log2,
    MASKED: tl.constexpr,  # whether some of these keys come after the last of a query
    LEFT: tl.constexpr,  # whether some of these keys come before the first of a query
    BLOCK_N: tl.constexpr,
):
    """Add to dq what a range of keys contributes."""
    for start_n in tl.range(first_key, last_key, BLOCK_N):
        k = load_tile(k_head, start_n)
        v = load_tile(v_head, start_n)
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        p = tl.exp2(qk * scale_log2 - lse_log2[:, None])
        if MASKED:
            keys = start_n + tl.arange(0, BLOCK_N)
            p = tl.where(keys[None, :] < n_visible[:, None], p, 0.0)
        if LEFT:
            keys = start_n + tl.arange(0, BLOCK_N)
            p = tl.where(keys[None, :] >= first_visible[:, None], p, 0.0)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["left", "right", "heads_at_once"])
def dq_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, head_dim), as describe describes them
    k_desc,  # keys, (batch, heads // group, seqlen_k, head_dim)
    v_desc,  # values, as the keys
    do_desc,  # gradient of out, as the queries
    lse_ptr,  # logsumexp in base 2, (batch * heads, padded_q)
    delta_ptr,  # rowsum(dO * O), (batch * heads, padded_q)
    dq_desc,  # output, as the queries
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    padded_q,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate: see tuned.backward_heads_at_once
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ALL_WHOLE: tl.constexpr,  # whether no tile has to be masked
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    # -- place: the last queries see the most keys, and come first
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, batch_head = place(n_tiles, batch_heads, heads_at_once)
    batch, head = batch_head // heads, batch_head % heads
    start_m = (n_tiles - 1 - tile) * BLOCK_M
    rows = batch_head.to(tl.int64) * padded_q + start_m + tl.arange(0, BLOCK_M)
    lse_log2 = tl.load(lse_ptr + rows)
    delta = tl.load(delta_ptr + rows)
    q = load_tile(head_of(q_desc, batch, head, BLOCK_M, BLOCK_D), start_m)
    do = load_tile(head_of(do_desc, batch, head, BLOCK_M, BLOCK_D), start_m)
    k_head = head_of(k_desc, batch, head // group, BLOCK_N, BLOCK_D)
    v_head = head_of(v_desc, batch, head // group, BLOCK_N, BLOCK_D)
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
    if not ALL_WHOLE:
        dq = sweep_keys(
            dq, q, do, lse_log2, delta, k_head, v_head, cut, end, first_visible, n_visible,
            sm_scale * LOG2E, True, False, BLOCK_N,
        )  # fmt: skip

    # -- write: the accumulators, in the dtype of the gradient
    store_tile(head_of(dq_desc, batch, head, BLOCK_M, BLOCK_D), start_m, dq * sm_scale)


PADDING = 128
"""The statistics of a head are padded to a multiple of this, the largest block_m."""


def describe_rows(x: torch.Tensor, block: int) -> TensorDescriptor:
    """Describe the statistics, (rows, padded_q), so that a tile is a part of one row."""
    return describe_tiles(x, (1, block))


def _preprocess(out, lse, do, dlse) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lse_log2, delta), both float32, (batch * heads, padded_q)."""
    return statistics(out, lse, do, dlse).unbind()


def statistics(
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    counter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return lse in base 2 and delta, float32, (2, batch * heads, padded_q), and set the counter,
    where there is one, to zero. Descriptors of out and do fit."""
    # I/O: read out + read do + read lse + write lse_log2 + write delta
    lse, dlse = aligned(lse), aligned(dlse)
    run, size = _preprocess_launch(
        out.device, out.dtype, do.dtype, None if dlse is None else dlse.dtype, out.shape,
        out.stride(), do.stride(), 0 if counter is None else counter.shape[0],
    )  # fmt: skip
    stats = torch.empty(size, dtype=torch.float32, device=out.device)
    run(out, do, lse, dlse, stats, counter)
    return stats


@planned
def _preprocess_launch(
    device, dtype, do_dtype, dlse_dtype, shape, out_strides, do_strides, n_counters
) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch, and the size of the statistics."""
    batch, heads, seqlen_q, head_dim = shape
    block = tuned.INTERPRETED.block_m if runtime.INTERPRETED else PADDING
    padded_q = runtime.cdiv(seqlen_q, PADDING) * PADDING
    run = KnownLaunch(
        preprocess_kernel, (batch * heads * (padded_q // block),),
        n_counters, *out_strides[:3], *do_strides[:3], heads, seqlen_q, padded_q, head_dim,
        BLOCK_M=block, BLOCK_D=head_block(head_dim), num_warps=8,
    )  # fmt: skip
    return run, (2, batch * heads, padded_q)


def _keys_backward(q, k, v, do, lse_log2, delta, is_causal, sm_scale, window=None, dq_sums=None):
    """Return (dk, dv), and add sm_scale ** -1 * dq to dq_sums where these are given."""
    # I/O: read k + read v + write dk + write dv, and read q + read do for each tile of keys
    config = tuned.backward_config("dkdv" if dq_sums is None else "all", q)
    dk, dv = empty_like(k), empty_like(v)
    how, dq_desc, dq_ptr = "none", None, None
    if dq_sums is not None and config.described and not runtime.INTERPRETED:
        how = "descriptor"
        dq_rows = dq_sums.view(-1, dq_sums.shape[-1])
        dq_desc = describe_tiles(dq_rows, (config.block_m, dq_rows.shape[1]))
    elif dq_sums is not None:
        how, dq_ptr = "pointer", dq_sums
    run, rests = _keys_launch(
        config, q.device, runtime.l2_cache(q.device), q.dtype, do.dtype, q.shape, k.shape,
        delta.shape, q.stride(), k.stride(), v.stride(), do.stride(), dk.stride(), dv.stride(),
        is_causal, window, sm_scale, how,
    )  # fmt: skip
    run(*map(describe_by, rests, (q, k, v, do, lse_log2, delta, dk, dv)), dq_desc, dq_ptr)
    return dk, dv


@planned
def _keys_launch(
    config, device, l2_cache, dtype, do_dtype, q_shape, k_shape, rows_shape, q_strides, k_strides,
    v_strides, do_strides, dk_strides, dv_strides, is_causal, window, sm_scale, how,
) -> tuple:  # fmt: skip
    """Return the launch, and how its first tensors are described."""
    batch, heads_k, seqlen_k, head_dim = k_shape
    heads, seqlen_q = q_shape[1:3]
    left, right = scope.bounds(is_causal, window, seqlen_q, seqlen_k)
    flowing = 2 * (heads // heads_k) * seqlen_q * head_dim * dtype.itemsize
    run = KnownLaunch(
        dkdv_kernel, (batch * heads_k * runtime.cdiv(seqlen_k, config.block_n),),
        batch * heads_k, heads_k, seqlen_q, seqlen_k, left or 0, right or 0, rows_shape[1],
        sm_scale, tuned.backward_heads_at_once(flowing, device, left is not None),
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        DQ=how,
        DESCRIBED=config.described and config.described_rows,
        GROUP=heads // heads_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(head_dim),
        **config.options,
    )  # fmt: skip
    rows = None
    if config.described and config.described_rows:
        rows = rest_of_tiles(torch.float32, rows_shape, (rows_shape[1], 1), (1, config.block_m))

    def rest(shape, strides, block, dtype=dtype):
        return all_but_the_address(dtype, shape, strides, block, None, config.described)

    of_k, of_v, of_dk, of_dv = (
        rest(k_shape, strides, config.block_n)
        for strides in (k_strides, v_strides, dk_strides, dv_strides)
    )
    of_q = rest(q_shape, q_strides, config.block_m)
    of_do = rest(q_shape, do_strides, config.block_m, do_dtype)
    return run, (of_q, of_k, of_v, of_do, rows, rows, of_dk, of_dv)


def _queries_backward(q, k, v, do, lse_log2, delta, is_causal, sm_scale, window=None):
    """Return dq."""
    # I/O: read q + read do + write dq, and read k + read v for each tile of queries
    left, right = scope.bounds(is_causal, window, q.shape[2], k.shape[2])
    config = tuned.backward_config("dq", q, scope.most_seen(left, right))
    dq = empty_like(q)
    run, rests = _queries_launch(
        config, q.device, runtime.l2_cache(q.device), q.dtype, do.dtype, q.shape, k.shape,
        delta.shape, q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(), left, right,
        sm_scale,
    )  # fmt: skip
    run(*map(describe_by, rests, (q, k, v, do, lse_log2, delta, dq)))
    return dq


@planned
def _queries_launch(
    config, device, l2_cache, dtype, do_dtype, q_shape, k_shape, rows_shape, q_strides, k_strides,
    v_strides, do_strides, dq_strides, left, right, sm_scale,
) -> tuple:  # fmt: skip
    """Return the launch, and how its tensors are described."""
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    group = heads // heads_k
    flowing = runtime.cdiv(2 * seqlen_k * head_dim * dtype.itemsize, group)
    run = KnownLaunch(
        dq_kernel, (batch * heads * runtime.cdiv(seqlen_q, config.block_m),),
        batch * heads, heads, group, seqlen_q, seqlen_k, left or 0, right or 0, rows_shape[1],
        sm_scale, tuned.backward_heads_at_once(flowing, device, left is not None),
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        ALL_WHOLE=scope.all_whole(left, right, seqlen_k, config.block_n),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(head_dim),
        **config.options,
    )  # fmt: skip

    def rest(shape, strides, block, dtype=dtype):
        return all_but_the_address(dtype, shape, strides, block, None, config.described)

    of_q, of_dq = (rest(q_shape, strides, config.block_m) for strides in (q_strides, dq_strides))
    of_k, of_v = (rest(k_shape, strides, config.block_n) for strides in (k_strides, v_strides))
    of_do = rest(q_shape, do_strides, config.block_m, do_dtype)
    return run, (of_q, of_k, of_v, of_do, None, None, of_dq)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    deterministic: bool,
    dlse: torch.Tensor | None = None,
    window: scope.Window | None = None,
    *,
    dq_needed: bool = True,
    dkdv_needed: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (dq, dk, dv) for operands that are checked, not empty, and of which descriptors fit.

    ``deterministic`` chooses two sweeps; otherwise there is one, and dq is added up in float32 in
    memory in whatever order programs come. What is not needed is None: where dq alone, or dk and dv
    alone are needed, one of the two sweeps suffices.
    """
    lse_log2, delta = _preprocess(out, lse, do, dlse)
    operands = q, k, v, do, lse_log2, delta, is_causal, sm_scale, window
    one_sweep = dq_needed and dkdv_needed and not deterministic
    if not one_sweep or tuned.config("all", q) is None:  # it needs the most shared memory
        dk, dv = _keys_backward(*operands) if dkdv_needed else (None, None)
        return _queries_backward(*operands) if dq_needed else None, dk, dv
    batch, heads, seqlen_q, head_dim = q.shape
    dq_sums = torch.zeros(
        (batch, heads, delta.shape[1], head_block(head_dim)), dtype=torch.float32, device=q.device
    )
    dk, dv = _keys_backward(*operands, dq_sums)
    dq = empty_like(q)
    torch.mul(dq_sums[:, :, :seqlen_q, :head_dim], sm_scale, out=dq)
    return dq, dk, dv
