"""The forward pass: one program computes one tile of queries, looping over tiles of keys."""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.scope import key_stages, seen_keys
from kernelbook.ops.attention.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PRECISION,
    KnownLaunch,
    all_but_the_address,
    describe_by,
    empty_dense_like,
    head_block,
    head_of,
    load_tile,
    place,
    steps_of,
)
from kernelbook.ops.launch import planned


@triton.jit
def row_max(x):
    """Return the largest number of each row, in two steps.

    A one-step reduction inherits the layout of the scores. To scale acc by it, Triton 3.6 would
    carry a second copy of acc through the loop, and the assembler would then wait for each
    instruction of a matmul. (The assembler, ptxas, reports this as C7514.)
    """
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.max(tl.max(halves, axis=1), axis=1)


@triton.jit
def weigh(
    qk,  # dot products of queries and keys, (BLOCK_M, BLOCK_N)
    l_i,  # sum over keys of p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    start_n,  # the first key
    n_visible,  # one past the last key that each query sees, (BLOCK_M,)
    scale_log2,  # sm_scale * log2(e): makes an exponent of 2 of a dot product
    MASKED: tl.constexpr,  # whether some query does not see some of these keys
    P_LOG2: tl.constexpr = 0,  # the weights are times 2 to this power
    first_visible=0,  # the first key that each query sees, (BLOCK_M,)
    LEFT: tl.constexpr = False,  # whether some of these keys lie before it
):
    """Make weights of the scores of a tile: return (p, alpha, l_i, m_i)."""
    # -- mask: what a query does not see is -inf
    if MASKED:
        keys = start_n + tl.arange(0, qk.shape[1])
        qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
    if LEFT:
        keys = start_n + tl.arange(0, qk.shape[1])
        qk = tl.where(keys[None, :] >= first_visible[:, None], qk, float("-inf"))

    # -- rescale: alpha converts sums relative to the old maximum to the new maximum
    m_new = tl.maximum(m_i, row_max(qk) * scale_log2)
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(qk * scale_log2 - (m_new - P_LOG2)[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    return p, alpha, l_i, m_new


@triton.jit
def sum_of_weights(l_i, n_visible):
    """Return l_i, or NaN where a query sees keys and all their scores are -inf.

    Softmax of nothing but -inf is undefined, and 0 would look like a query that sees no key.
    """
    return tl.where((l_i == 0) & (n_visible > 0), float("nan"), l_i)


@triton.jit
def attend(
    acc,  # sum over keys of p * v so far, (BLOCK_M, BLOCK_D)
    l_i,  # sum over keys of p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    qk,  # dot products with the first tile of keys, (BLOCK_M, BLOCK_N)
    q,  # queries, (BLOCK_M, BLOCK_D)
    k_head,  # keys and values of one head: see head_of
    v_head,
    first_key,  # of the keys to attend to: a multiple of BLOCK_N
    last_key,  # one past the last
    n_visible,  # one past the last key that each query sees, (BLOCK_M,)
    scale_log2,  # sm_scale * log2(e): makes an exponent of 2 of a dot product
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query does not see some of these keys
    first_visible=0,  # the first key that each query sees, (BLOCK_M,)
    LEFT: tl.constexpr = False,  # whether some of these keys lie before it
):
    """Attend to the keys from first_key to last_key, a tile at a time, and score the next tile."""
    for start_n in range(first_key, last_key, BLOCK_N):
        # -- weigh: the tile that the previous iteration has scored
        p, alpha, l_i, m_i = weigh(
            qk, l_i, m_i, start_n, n_visible, scale_log2, MASKED, 0, first_visible, LEFT
        )
        # -- accumulate: one matmul
        v = load_tile(v_head, start_n)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        # -- score: the other matmul, for the next iteration
        k = load_tile(k_head, start_n + BLOCK_N)
        qk = tl.dot(q, k.T, input_precision=PRECISION)
    return acc, l_i, m_i, qk


@triton.jit(do_not_specialize=["left", "right"])
def attention_fwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM), as describe describes them
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM)
    v_desc,  # values, as the keys
    out_ptr,  # output, as the queries, its last dimension contiguous
    lse_ptr,  # natural logarithm of the sum of exponentials, (batch, heads, seqlen_q), contiguous
    step_b,  # strides of out, as multiples of UNIT
    step_h,
    step_m,
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    HEADS_AT_ONCE: tl.constexpr,  # heads whose tiles alternate: see tuned.forward_heads_at_once
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ALL_WHOLE: tl.constexpr,  # whether no tile has to be masked
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
    UNIT: tl.constexpr,  # of the strides of out
):
    # -- place: which tile of which head; the last queries see the most keys and come first
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, batch_head = place(n_tiles, batch_heads, HEADS_AT_ONCE)
    batch, head = batch_head // heads, batch_head % heads
    k_head = head_of(k_desc, batch, head // group, BLOCK_N, BLOCK_D)
    v_head = head_of(v_desc, batch, head // group, BLOCK_N, BLOCK_D)
    start_m = (n_tiles - 1 - tile) * BLOCK_M

    # -- load: the queries, once
    q = load_tile(head_of(q_desc, batch, head, BLOCK_M, BLOCK_D), start_m)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- stages: keys that all queries of the tile see, between keys that some see, and no others
    first_visible, n_visible = seen_keys(
        start_m + tl.arange(0, BLOCK_M), seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
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
    if not ALL_WHOLE:
        acc, l_i, m_i, qk = attend(
            acc, l_i, m_i, qk, q, k_head, v_head, cut, last, n_visible, scale_log2, BLOCK_N,
            MASKED=True,
        )  # fmt: skip

    # -- end: the last tile
    p, alpha, l_i, m_i = weigh(
        qk, l_i, m_i, last, n_visible, scale_log2, not ALL_WHOLE, 0, first_visible, HAS_LEFT
    )
    v = load_tile(v_head, last)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    # -- write: the average, and the logarithm from which backward finds p again
    l_i = sum_of_weights(l_i, n_visible)
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that sees nothing gives 0
    queries = start_m + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    inside = queries < seqlen_q
    first = batch.to(tl.int64) * step_b + head.to(tl.int64) * step_h
    rows = out_ptr + (first + queries.to(tl.int64) * step_m) * UNIT
    tl.store(rows[:, None] + cols[None, :], out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seqlen_q + queries
    tl.store(lse_ptrs, (m_i + tl.log2(l_i)) * LN2, mask=inside)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    window: scope.Window | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for operands that are checked, not empty, and of which descriptors fit."""
    # I/O: read q + read k + read v + write out + write lse
    out = empty_dense_like(q)
    run, size, *rests = _launch(
        tuned.forward_config(q), q.device, runtime.l2_cache(q.device), q.dtype, q.shape, k.shape,
        q.stride(), k.stride(), v.stride(), out.stride(), is_causal, window, sm_scale,
    )  # fmt: skip
    lse = torch.empty(size, dtype=torch.float32, device=q.device)
    run(*map(describe_by, rests, (q, k, v)), out, lse)
    return out, lse


@planned
def _launch(
    config, device, l2_cache, dtype, q_shape, k_shape, q_strides, k_strides, v_strides, out_strides,
    is_causal, window, sm_scale,
) -> tuple:  # fmt: skip
    """Return how the kernel is launched, the size of lse, and how q, k and v are described."""
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    left, right = scope.bounds(is_causal, window, seqlen_q, seqlen_k)
    heads_at_once = 1
    if scope.uneven(left, right):
        bytes_a_head = 2 * seqlen_k * head_dim * dtype.itemsize
        heads_at_once = tuned.heads_in_l2(bytes_a_head, heads // heads_k, device)
    steps, unit = steps_of(q_shape, out_strides, dtype.itemsize)
    run = KnownLaunch(
        attention_fwd_kernel, (batch * heads * runtime.cdiv(seqlen_q, config.block_m),),
        *steps, batch * heads, heads, heads // heads_k, seqlen_q, seqlen_k, left or 0, right or 0,
        sm_scale,
        HEADS_AT_ONCE=heads_at_once,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        ALL_WHOLE=scope.all_whole(left, right, seqlen_k, config.block_n),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(head_dim),
        UNIT=unit,
        **config.options,
    )  # fmt: skip
    return (
        run,
        (batch, heads, seqlen_q),
        all_but_the_address(dtype, q_shape, q_strides, config.block_m, None, config.described),
        all_but_the_address(dtype, k_shape, k_strides, config.block_n, None, config.described),
        all_but_the_address(dtype, k_shape, v_strides, config.block_n, None, config.described),
    )
