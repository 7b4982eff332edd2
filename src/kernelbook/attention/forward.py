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
    _visible,
    capability,
    describe,
    head_block,
    l2_cache,
    largest_that_fits,
)


@triton.jit
def _row_max(x):
    """Return the largest number of each row, in two steps.

    What comes of a single step has the layout of the scores. To scale acc by it, Triton 3.6 would
    carry acc through the loop twice, and the assembler would wait for each instruction of a
    product (ptxas C7514).
    """
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.max(tl.max(halves, axis=1), axis=1)


@triton.jit
def _weigh(
    qk,  # products of queries and keys, (BLOCK_M, BLOCK_N)
    l_i,  # sum over keys of p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    start_n,  # the first key
    n_visible,  # how many keys, from the first of all, each query sees, (BLOCK_M,)
    scale_log2,  # turns a product of q and k into an exponent of 2
    MASKED: tl.constexpr,  # whether some query does not see some of these keys
    P_LOG2: tl.constexpr = 0,  # the weights are times 2 to this power
):
    """Turn the scores of a tile into weights: return (p, alpha, l_i, m_i)."""
    # -- mask: what a query does not see is -inf
    if MASKED:
        keys = start_n + tl.arange(0, qk.shape[1])
        qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))

    # -- rescale: alpha takes what was summed relative to the old maximum to the new one
    m_new = tl.maximum(m_i, _row_max(qk) * scale_log2)
    m_exp = _finite(m_new) if MASKED else m_new
    alpha = tl.exp2(m_i - m_exp)
    p = tl.exp2(qk * scale_log2 - (m_exp - P_LOG2)[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    return p, alpha, l_i, m_new


@triton.jit
def _attend(
    acc,  # sum over keys of p * v so far, (BLOCK_M, BLOCK_D)
    l_i,  # sum over keys of p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    qk,  # products of the queries and the first tile of keys, (BLOCK_M, BLOCK_N)
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
    """Attend to the keys from first_key to last_key, a tile at a time, and score the next tile."""
    for start_n in range(first_key, last_key, BLOCK_N):
        # -- weigh: the tile that the turn before has scored
        p, alpha, l_i, m_i = _weigh(qk, l_i, m_i, start_n, n_visible, scale_log2, MASKED)
        # -- accumulate: one product
        v = _load_tile(v_desc, batch, head_k, start_n)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="tf32x3")
        # -- score: the other product, for the next turn
        k = _load_tile(k_desc, batch, head_k, start_n + BLOCK_N)
        qk = tl.dot(q, k.T, input_precision="tf32x3")
    return acc, l_i, m_i, qk


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
    head_k = head // group
    start_m = (n_tiles - 1 - tile) * BLOCK_M

    # -- load: the queries, once
    q = _load_tile(q_desc, batch, head, start_m)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- begin: the scores of the first tile of keys
    scale_log2 = sm_scale * LOG2E
    k = _load_tile(k_desc, batch, head_k, 0)
    qk = tl.dot(q, k.T, input_precision="tf32x3")

    # -- stages: keys that all queries of the tile see, then keys that some see, and no others
    n_visible, seen_by_all, seen_by_some = _visible(start_m, seqlen_q, seqlen_k, IS_CAUSAL, BLOCK_M)
    last = tl.maximum(tl.cdiv(seen_by_some, BLOCK_N) - 1, 0) * BLOCK_N
    cut = tl.minimum(seen_by_all // BLOCK_N * BLOCK_N, last)
    acc, l_i, m_i, qk = _attend(
        acc, l_i, m_i, qk, q, k_desc, v_desc, batch, head_k, 0, cut, n_visible,
        scale_log2, BLOCK_N, MASKED=False,
    )  # fmt: skip
    if not ALL_WHOLE:
        acc, l_i, m_i, qk = _attend(
            acc, l_i, m_i, qk, q, k_desc, v_desc, batch, head_k, cut, last, n_visible,
            scale_log2, BLOCK_N, MASKED=True,
        )  # fmt: skip

    # -- end: the last tile, after which there is none to score
    p, alpha, l_i, m_i = _weigh(qk, l_i, m_i, last, n_visible, scale_log2, not ALL_WHOLE)
    v = _load_tile(v_desc, batch, head_k, last)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="tf32x3")

    # -- write: the average, and the logarithm from which backward finds p again
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that saw nothing gives 0
    first_row = batch_head.to(tl.int64) * seqlen_q + start_m
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    inside = start_m + tl.arange(0, BLOCK_M) < seqlen_q
    out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + cols[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    tl.store(lse_ptr + rows, (m_i + tl.log2(l_i)) * LN2, mask=inside)


CONFIGS = {
    (32, 2): Config(64, 128, 4, 2, maxnreg=128),
    (64, 2): Config(128, 128, 8, 2, maxnreg=128),
    (128, 2): Config(128, 64, 8, 2, maxnreg=128),
    (256, 2): Config(128, 64, 8, 2),
    (64, 4): Config(64, 64, 4, 2),
    (128, 4): Config(64, 32, 4, 1),
    (256, 4): Config(64, 32, 4, 1),
}
"""Tiles on Hopper, by the largest head_dim that they are for and the bytes of an element, in
ascending order. With 128 registers a thread two programs of eight warps run on a multiprocessor:
while one waits for a product, the other computes exponentials. On an H200, causal, with 16,384
tokens in bfloat16, that gave 531 TFLOP/s at head_dim 64, and 637 at 128. Three programs of 64
queries, four warps and 168 registers gave 494 and 564: they read keys and values twice as often.
One program of 128 queries and 128 keys without the limit gave 510 at head_dim 128. At head_dim 32,
with 4,096 tokens, four programs of four warps gave 309, and two of eight 272. Specialized warps
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
        ours = (c for (d, size), c in CONFIGS.items() if size == q.itemsize and columns <= d)
        configs = next(ours), *ELSEWHERE

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
