"""The forward pass: one program computes one tile of queries, and streams all keys past it."""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.attention.common import (
    LN2,
    LOG2E,
    Config,
    _finite,
    _load_tile,
    _place,
    capability,
    describe,
    head_block,
    l2_cache,
    largest_that_fits,
)


@triton.jit
def _attend(
    acc,  # sum over keys of p * v so far, (BLOCK_M, BLOCK_D)
    l_i,  # sum over keys of p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    q,  # queries, (BLOCK_M, BLOCK_D)
    k_desc,
    v_desc,
    batch,
    head_k,
    first_key,  # of the keys to attend to: a multiple of BLOCK_N
    last_key,  # one past the last
    n_visible,  # how many keys, from the first, each query sees, (BLOCK_M,)
    scale_log2,  # turns a product of q and k into an exponent of 2
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query does not see some of these keys
):
    """Attend to the keys from first_key to last_key, a tile at a time."""
    for start_n in range(first_key, last_key, BLOCK_N):
        # -- scores: one product, and what a query does not see is -inf
        k = _load_tile(k_desc, batch, head_k, start_n)
        qk = tl.dot(q, k.T, input_precision="tf32x3")
        if MASKED:
            keys = start_n + tl.arange(0, BLOCK_N)
            qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))

        # -- rescale: what was summed relative to the old maximum
        m_new = tl.maximum(m_i, tl.max(qk, axis=1) * scale_log2)
        m_exp = _finite(m_new) if MASKED else m_new
        alpha = tl.exp2(m_i - m_exp)
        p = tl.exp2(qk * scale_log2 - m_exp[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        m_i = m_new

        # -- accumulate: the other product
        v = _load_tile(v_desc, batch, head_k, start_n)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="tf32x3")
    return acc, l_i, m_i


@triton.jit
def _attention_fwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM)
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM)
    v_desc,  # values, as the keys
    out_ptr,  # output, as the queries, contiguous
    lse_ptr,  # natural logarithm of the sum of exponentials, (batch, heads, seqlen_q), contiguous
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    sm_scale,  # the scores are sm_scale * q k^T
    HEADS_AT_ONCE: tl.constexpr,  # heads whose tiles take turns: see _heads_at_once
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    ALL_WHOLE: tl.constexpr,  # whether no tile has to be masked
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
):
    # -- place: which tile of which head; the last queries see the most keys and come first
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, batch_head = _place(n_tiles, batch_heads, HEADS_AT_ONCE)
    batch, head = batch_head // heads, batch_head % heads
    start_m = (n_tiles - 1 - tile) * BLOCK_M
    queries = start_m + tl.arange(0, BLOCK_M)

    # -- load: the queries, once
    q = _load_tile(q_desc, batch, head, start_m)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- stages: keys that all queries of the tile see, then keys that some see, and no others
    n_visible = tl.full((BLOCK_M,), 0, tl.int32) + seqlen_k
    seen_by_all, seen_by_some = seqlen_k, seqlen_k
    if IS_CAUSAL:
        n_visible = tl.minimum(queries + 1 + (seqlen_k - seqlen_q), seqlen_k)
        seen_by_all = tl.maximum(tl.minimum(start_m + 1 + (seqlen_k - seqlen_q), seqlen_k), 0)
        seen_by_some = tl.minimum(start_m + BLOCK_M + (seqlen_k - seqlen_q), seqlen_k)
    whole = seen_by_all // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_desc, v_desc, batch, head // group, 0, whole, n_visible,
        sm_scale * LOG2E, BLOCK_N, MASKED=False,
    )  # fmt: skip
    if not ALL_WHOLE:
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_desc, v_desc, batch, head // group, whole, seen_by_some, n_visible,
            sm_scale * LOG2E, BLOCK_N, MASKED=True,
        )  # fmt: skip

    # -- write: the average, and the logarithm from which backward finds p again
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that saw nothing gives 0
    first_row = batch_head.to(tl.int64) * seqlen_q + start_m
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    inside = queries < seqlen_q
    out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + cols[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    tl.store(lse_ptr + rows, (m_i + tl.log2(l_i)) * LN2, mask=inside)


CONFIGS = {
    (64, 2): Config(64, 128, 4, 2),
    (128, 2): Config(64, 128, 4, 1, maxnreg=168),
    (256, 2): Config(128, 64, 8, 2),
    (64, 4): Config(64, 64, 4, 2),
    (128, 4): Config(64, 32, 4, 1),
    (256, 4): Config(64, 32, 4, 1),
}
"""Tiles on Hopper, by the largest head_dim that they are for and the bytes of an element. Small
programs of four warps, three on a multiprocessor, overlap better than large ones: while one waits
for a product, another computes exponentials. At head_dim 128 and 16,384 tokens on an H200 this tile
gave 573 TFLOP/s, without tiles on their way ahead; 128 queries by 64 keys in two stages, of which
two programs fit, 535; and eight warps, whose two groups wait for each other, 485. In the causal
case, 168 registers let a third program in: 550 against 470. Specialized warps
(``warp_specialize``) gave wrong results with Triton 3.6."""

ELSEWHERE = Config(128, 32, 8, 2), Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(16, 16, 4, 1)
"""Tiles for other devices, and where the above ask for more shared memory than there is. Without
tensor descriptors in hardware every element has its own address, and large tiles do not fit."""

INTERPRETED = Config(32, 32, 1, 1)
"""Tiles for the interpreter: small, so that small tests meet several."""


def _config(q: torch.Tensor) -> Config:
    """Return how the forward kernel is cut for these queries on their device."""
    if runtime.INTERPRETED:
        return INTERPRETED
    columns = head_block(q.shape[-1])
    configs = ELSEWHERE
    if capability(q.device) == 9:
        configs = CONFIGS[max(columns, 64), q.itemsize], *ELSEWHERE

    def bytes_of(config: Config) -> int:
        rows = config.block_m + 2 * config.block_n * config.num_stages
        return rows * columns * q.itemsize + 1024  # and a few for barriers

    return largest_that_fits(configs, bytes_of, q.device, f"head_dim {q.shape[-1]} in {q.dtype}")


def _heads_at_once(k: torch.Tensor, group: int, is_causal: bool) -> int:
    """Return how many heads' tiles take turns: as many as have keys and values for half of L2.

    Taking turns lets the heaviest tiles of several heads start first, and light ones fill the
    gaps; too many heads at once would read their keys from memory again for each tile. Where tiles
    weigh the same there is nothing to gain. A power of two, so that few kernels are compiled.
    """
    if not is_causal:
        return 1
    bytes_a_head = 2 * k.shape[2] * k.shape[3] * k.itemsize
    fitting = max(1, l2_cache(k.device) // 2 // bytes_a_head) * group
    return min(64, 2 ** (fitting.bit_length() - 1))


def _attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for operands that are checked, not empty, and of which descriptors fit."""
    # I/O: read q + read k + read v + write out + write lse
    batch, heads, seqlen_q, head_dim = q.shape
    heads_k, seqlen_k = k.shape[1:3]
    out = torch.empty((batch, heads, seqlen_q, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    config = _config(q)
    group = heads // heads_k
    grid = (batch * heads * triton.cdiv(seqlen_q, config.block_m),)
    _attention_fwd_kernel[grid](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n),
        out, lse, batch * heads, heads, group, seqlen_q, seqlen_k, sm_scale,
        HEADS_AT_ONCE=_heads_at_once(k, group, is_causal),
        HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal,
        ALL_WHOLE=not is_causal and seqlen_k % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )  # fmt: skip
    return out, lse
