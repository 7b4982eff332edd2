"""Attention of packed sequences, without padding: the forward kernel, and where sequences lie.

A packed tensor is (total, heads, head_dim): sequence b is its rows cu[b] to cu[b + 1], where cu are
offsets in the GPU's memory, which the host cannot read without waiting. So the grid has the tiles
of the longest sequence for every sequence, and a program whose tile lies past the end of its own
sequence returns at once.

The loop over tiles is that of :mod:`forward`. Two things differ, because the rows after a sequence
are those of the next one, and may hold anything, also NaN:

    values   the last tile of keys may reach into the next sequence. There its weights are 0, and
             0 * NaN is NaN, so that values past the end are replaced by zeros. Only the last tile
             of a sequence pays for that
    results  are written by pointers, under a mask, because a descriptor knows only the end of the
             tensor, and not that of the sequence

Source: Dao, "FlashAttention-2", arXiv:2307.08691, 2023, whose library packs sequences in this way.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.forward import attend, sum_of_weights, weigh
from kernelbook.ops.attention.scope import key_stages, seen_keys
from kernelbook.ops.attention.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PRECISION,
    cut_off,
    describe,
    head_block,
    head_of,
    load_tile,
    place,
    until,
)
from kernelbook.ops.launch import Launch, planned


@triton.jit
def sequence(cu_ptr, batch, total, max_seqlen):
    """Return (first row, length) of a sequence. Offsets that are wrong stay within the tensor."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + batch), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_ptr + batch + 1), first), total)
    return first, tl.minimum(end - first, max_seqlen)


@triton.jit
def store_rows(
    out_ptr,  # (total, heads, HEAD_DIM), contiguous
    tile,  # rows of one head, (rows, BLOCK_D)
    first_row,  # of the tile
    end,  # of the sequence: one past its last row
    heads,
    head,
    HEAD_DIM: tl.constexpr,
):
    """Write a tile of rows of one head, but for what lies past the end of the sequence."""
    rows = first_row + tl.arange(0, tile.shape[0])
    cols = tl.arange(0, tile.shape[1])
    ptrs = out_ptr + (rows.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + cols[None, :]
    tl.store(ptrs, tile, mask=(rows < end)[:, None] & (cols < HEAD_DIM)[None, :])


SIZES = ["batch_heads", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k", "left", "right"]
"""What differs from batch to batch: a kernel that were specialised on it would be compiled anew."""


@triton.jit(do_not_specialize=[*SIZES, "heads_at_once"])
def attention_varlen_fwd_kernel(
    q_desc,  # queries, (1, heads, total_q, HEAD_DIM), as describe describes them
    k_desc,  # keys, (1, heads // group, total_k, HEAD_DIM)
    v_desc,  # values, as the keys
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    out_ptr,  # output, (total_q, heads, HEAD_DIM), contiguous
    lse_ptr,  # natural logarithm of the sum of exponentials, (heads, total_q), contiguous
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    total_q,
    total_k,
    max_seqlen_q,
    max_seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    heads_at_once,  # heads whose tiles alternate
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
):
    # -- place: which tile of which head; the last queries see the most keys and come first
    n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile, batch_head = place(n_tiles, batch_heads, heads_at_once)
    batch, head = batch_head // heads, batch_head % heads
    start_m = (n_tiles - 1 - tile) * BLOCK_M
    first_q, seqlen_q = sequence(cu_q_ptr, batch, total_q, max_seqlen_q)
    if start_m >= seqlen_q:
        return
    first_k, seqlen_k = sequence(cu_k_ptr, batch, total_k, max_seqlen_k)

    # -- load: the queries, once; those past the end are computed, and not written
    k_head = head_of(k_desc, 0, head // group, BLOCK_N, BLOCK_D)
    v_head = until(head_of(v_desc, 0, head // group, BLOCK_N, BLOCK_D), first_k + seqlen_k)
    q = load_tile(head_of(q_desc, 0, head, BLOCK_M, BLOCK_D), first_q + start_m)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- stages: keys that all queries of the tile see, between keys that some see, and no others
    queries = start_m + tl.arange(0, BLOCK_M)
    first_visible, n_visible = seen_keys(
        queries, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first, whole, cut, end = key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip
    last = tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0) * BLOCK_N
    cut = tl.minimum(cut, last)

    # -- rows: from here on keys are counted from the first of all sequences
    end_k, first, cut, last = first_k + seqlen_k, first_k + first, first_k + cut, first_k + last
    n_visible += first_k
    if HAS_LEFT:
        first_visible += first_k
    whole = tl.minimum(first_k + whole, last)

    # -- begin: the scores of the first tile of keys
    scale_log2 = sm_scale * LOG2E
    k = load_tile(k_head, first)
    qk = tl.dot(q, k.T, input_precision=PRECISION)

    # -- attend: the last tile, after which there is none to score, comes after the loops
    if HAS_LEFT:
        acc, l_i, m_i, qk = attend(
            acc, l_i, m_i, qk, q, k_head, v_head, first, whole, n_visible, scale_log2, BLOCK_N,
            True, first_visible, LEFT=True,
        )  # fmt: skip
    acc, l_i, m_i, qk = attend(
        acc, l_i, m_i, qk, q, k_head, v_head, whole, cut, n_visible, scale_log2, BLOCK_N,
        MASKED=False,
    )  # fmt: skip
    if HAS_RIGHT:
        acc, l_i, m_i, qk = attend(
            acc, l_i, m_i, qk, q, k_head, v_head, cut, last, n_visible, scale_log2, BLOCK_N,
            MASKED=True,
        )  # fmt: skip

    # -- end: the last tile, where keys may be those of the next sequence
    p, alpha, l_i, m_i = weigh(
        qk, l_i, m_i, last, n_visible, scale_log2, True, 0, first_visible, HAS_LEFT
    )
    v = cut_off(load_tile(v_head, last), v_head, last, end_k)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    # -- write: the average, and the logarithm from which backward finds p again
    l_i = sum_of_weights(l_i, n_visible - first_k)
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that sees nothing gives 0
    store_rows(out_ptr, out, first_q + start_m, first_q + seqlen_q, heads, head, HEAD_DIM)
    lse_ptrs = lse_ptr + head.to(tl.int64) * total_q + first_q + queries
    tl.store(lse_ptrs, (m_i + tl.log2(l_i)) * LN2, mask=queries < seqlen_q)


def attention_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    bounds: scope.Window,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of packed operands, seen as (1, heads, total, head_dim).

    They are checked, not empty, and of which descriptors fit. out is (total, heads, head_dim).
    """
    # I/O: read q + read k + read v + write out + write lse
    _, heads, total, head_dim = q.shape
    out = torch.empty((total, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    config = tuned.forward_config(q)
    batch = len(cu_q) - 1
    run = _launch(
        config, q.shape, k.shape, batch, longest, bounds, sm_scale,
        heads_at_once(k, batch, heads // k.shape[1], bounds),
    )  # fmt: skip
    q = describe(q, config.block_m, described=config.described)
    k, v = (describe(x, config.block_n, described=config.described) for x in (k, v))
    run(q, k, v, cu_q, cu_k, out, lse)
    return out, lse


def heads_at_once(k: torch.Tensor, batch: int, group: int, bounds: scope.Window) -> int:
    """Return between how many heads tiles of queries alternate, if sequences are equally long."""
    bytes_a_head = runtime.cdiv(2 * k.shape[2] * k.shape[3] * k.itemsize, batch * group)
    return tuned.backward_heads_at_once(bytes_a_head, k.device, bounds[0] is not None)


@planned
def _launch(config, q_shape, k_shape, batch, longest, bounds, sm_scale, at_once) -> Launch:
    _, heads, total_q, head_dim = q_shape
    heads_k, total_k = k_shape[1:3]
    left, right = bounds
    return Launch(
        attention_varlen_fwd_kernel, (batch * heads * runtime.cdiv(longest[0], config.block_m),),
        batch * heads, heads, heads // heads_k, total_q, total_k, *longest, left or 0, right or 0,
        sm_scale, at_once,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(head_dim),
        **config.options,
    )  # fmt: skip
