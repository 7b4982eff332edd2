"""Attention of packed sequences, without padding: the forward kernel, and where sequences lie.

A packed tensor is (total, heads, head_dim): sequence b is its rows cu[b] to cu[b + 1], where cu are
offsets in the GPU's memory, which the host cannot read without waiting. So the grid has the tiles
of the longest sequence for every sequence, and a program whose tile lies past the end of its own
sequence returns at once.

The loop over tiles is that of :mod:`forward`. The rows after a sequence are those of the next one,
and may hold anything, also NaN, which a weight of 0 would not remove. So a tile reads zeros there,
as past the end of a tensor: see :func:`tiles.head_of_sequence`. Nothing is written there either.

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
    describe,
    head_block,
    head_of_sequence,
    load_tile,
    place,
)
from kernelbook.ops.launch import Launch, planned


@triton.jit
def sequence(cu_ptr, batch, total, max_seqlen):
    """Return (first row, length) of a sequence. Offsets that are wrong stay within the tensor."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + batch), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_ptr + batch + 1), first), total)
    return first, tl.minimum(end - first, max_seqlen)


SIZES = [
    "batch_heads", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k", "left", "right",
    "heads_at_once",
]  # fmt: skip
"""What differs from batch to batch: a kernel that were specialised on it would be compiled anew."""


@triton.jit(do_not_specialize=SIZES)
def attention_varlen_fwd_kernel(
    q_desc,  # queries, (1, heads, total_q, HEAD_DIM), packed, as describe describes them
    k_desc,  # keys, (1, heads // group, total_k, HEAD_DIM)
    v_desc,  # values, as the keys
    cu_q_ptr,  # where sequences begin, int32, (batch + 1,)
    cu_k_ptr,
    out_ptr,  # output, (total_q, heads, HEAD_DIM), contiguous
    lse_ptr,  # natural logarithm of the sum of exponentials, (heads, total_q), contiguous
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
    group,  # query heads that share a head of keys
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

    # -- load: the queries, once; those past the end are zeros, and are not written
    k_head = head_of_sequence(k_desc, head // group, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    v_head = head_of_sequence(v_desc, head // group, first_k, seqlen_k, BLOCK_N, BLOCK_D)
    q = load_tile(head_of_sequence(q_desc, head, first_q, seqlen_q, BLOCK_M, BLOCK_D), start_m)
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

    # -- begin: the scores of the first tile of keys
    scale_log2 = sm_scale * LOG2E
    k = load_tile(k_head, first)
    qk = tl.dot(q, k.T, input_precision=PRECISION)

    # -- attend: the last tile, after which there is none to score, comes after the loops
    last = tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0) * BLOCK_N
    cut = tl.minimum(cut, last)
    if HAS_LEFT:
        whole = tl.minimum(whole, last)
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

    # -- end: the last tile
    p, alpha, l_i, m_i = weigh(
        qk, l_i, m_i, last, n_visible, scale_log2, True, 0, first_visible, HAS_LEFT
    )
    v = load_tile(v_head, last)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    # -- write: the average, and the logarithm from which backward finds p again
    l_i = sum_of_weights(l_i, n_visible)
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that sees nothing gives 0
    rows = (first_q + queries).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = queries < seqlen_q
    out_ptrs = out_ptr + (rows * heads + head)[:, None] * HEAD_DIM + cols[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    lse_ptrs = lse_ptr + head.to(tl.int64) * total_q + rows
    tl.store(lse_ptrs, (m_i + tl.log2(l_i)) * LN2, mask=inside)


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
    run = launch(
        attention_varlen_fwd_kernel, config, q, k, len(cu_q) - 1, longest, bounds, sm_scale,
        heads // k.shape[1], HEAD_DIM=head_dim,
    )  # fmt: skip
    q = describe(q, config.block_m, described=config.described, packed=True)
    k, v = (describe(x, config.block_n, described=config.described, packed=True) for x in (k, v))
    run(q, k, v, cu_q, cu_k, out, lse)
    return out, lse


def launch(
    kernel, config, q, k, batch, longest, bounds, sm_scale, *rest, by_keys=False, **options
) -> Launch:
    """Return how a kernel is launched: a program for each tile of queries, or ``by_keys`` of keys.

    Tiles alternate between as many heads as if all sequences were equally long.
    """
    own, flowing = (k, q) if by_keys else (q, k)
    bytes_a_head = runtime.cdiv(2 * flowing.numel() * flowing.itemsize, batch * own.shape[1])
    at_once = tuned.backward_heads_at_once(bytes_a_head, q.device, bounds[0] is not None)
    tiles = runtime.cdiv(longest[by_keys], config.block_n if by_keys else config.block_m)
    return _launch(
        kernel, config, batch, own.shape[1], tiles, q.shape, k.shape, longest, bounds, sm_scale,
        at_once, *rest, **options,
    )  # fmt: skip


@planned
def _launch(
    kernel, config, batch, heads, tiles, q_shape, k_shape, longest, bounds, sm_scale, at_once,
    *rest, **options,
) -> Launch:  # fmt: skip
    left, right = bounds
    return Launch(
        kernel, (batch * heads * tiles,),
        batch * heads, heads, q_shape[2], k_shape[2], *longest, left or 0, right or 0, sm_scale,
        at_once, *rest,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(q_shape[3]),
        **options,
        **config.options,
    )  # fmt: skip
