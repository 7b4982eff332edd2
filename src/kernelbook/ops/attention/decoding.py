"""Few queries and many keys, as in decoding: programs share the keys of a head, then merge.

The forward kernel has a program for each tile of queries. A language model that writes a word asks
with one query per head, so that most SMs would have no program, and a program one row of work in a
tile of 128. Here a program owns a part of the keys of one head, and the queries of all heads that
read these keys are the rows of its tile, so that each key is read once.

A part leaves what the loop over keys leaves: acc, l_i and m_i. The parts of a row are merged as
tiles are: with m the largest of their maxima,

    l = sum over parts of exp2(m_i - m) * l_i,    out = sum over parts of exp2(m_i - m) * acc / l

Not their logsumexps are merged, because m_i + log2(l_i) is rounded: where scores are millions, it
would lose all of l_i. A second kernel adds the parts up, always in the same order.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.forward import sum_of_weights, weigh
from kernelbook.ops.attention.scope import key_stages, seen_keys
from kernelbook.ops.attention.tiles import (
    ALIGNMENT,
    LN2,
    LOG2E,
    LOWEST,
    PRECISION,
    describe,
    empty_dense_like,
    head_block,
    head_of,
    load_tile,
    steps_of,
)
from kernelbook.ops.launch import Launch, planned


@triton.jit
def rows_of_group(q, batch, key_head, group, start_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile of queries that read one head of keys, and of which query each row is.

    Row r is query r // group of head key_head * group + r % group: neighbours see the same keys.
    """
    ptr, n_queries, n_columns, step_batch, step_head, step_row = q
    UNIT: tl.constexpr = ALIGNMENT // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    row = start_row + tl.arange(0, ROWS)
    query = row // group
    head = (key_head * group + row % group).to(tl.int64)
    start = tl.cast(batch, tl.int64) * step_batch + head * step_head + query.to(tl.int64) * step_row
    columns = tl.arange(0, COLUMNS)
    there = (query < n_queries)[:, None] & (columns < n_columns)[None, :]
    return tl.load(ptr + start[:, None] * UNIT + columns[None, :], mask=there, other=0.0), query


@triton.jit
def average(acc, l_i, m_i, n_visible):
    """Return out and lse of rows of which all keys have been met."""
    l_i = sum_of_weights(l_i, n_visible)
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]  # a query that sees nothing gives 0
    return out, (m_i + tl.log2(l_i)) * LN2


@triton.jit(do_not_specialize=["seqlen_k", "left", "right", "n_parts"])
def attention_decode_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM), as describe describes without descriptor
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM), as describe describes them
    v_desc,  # values, as the keys
    out_ptr,  # output, as the queries; of parts acc, (rows of it, n_parts, HEAD_DIM), contiguous
    lse_ptr,  # logsumexp, (batch, heads, seqlen_q); of parts m_i, (rows of it, n_parts)
    l_ptr,  # of parts l_i, as m_i
    step_b,  # strides of out, as multiples of UNIT
    step_h,
    step_m,
    heads_k,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    n_parts,  # programs that share the keys of a head
    sm_scale,  # the scores are sm_scale * q k^T
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WHOLE: tl.constexpr,  # whether there is one part, so that there is nothing to merge
    BLOCK_M: tl.constexpr,  # rows of a tile: queries of all heads of a group
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
    UNIT: tl.constexpr,  # of the strides of out
):
    # -- place: which rows of which group, and which part of its keys
    n_rows = group * seqlen_q
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    start_row = tl.program_id(0) % n_tiles * BLOCK_M
    part = tl.program_id(0) // n_tiles % n_parts
    batch_head = tl.program_id(0) // n_tiles // n_parts
    batch, key_head = batch_head // heads_k, batch_head % heads_k
    k_head = head_of(k_desc, batch, key_head, BLOCK_N, BLOCK_D)
    v_head = head_of(v_desc, batch, key_head, BLOCK_N, BLOCK_D)

    # -- load: the queries, once
    q, query = rows_of_group(q_desc, batch, key_head, group, start_row, BLOCK_M, BLOCK_D)
    first_visible, n_visible = seen_keys(
        query, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- share: an equal part of the tiles of keys that some query of the tile sees
    first, _, _, end = key_stages(
        start_row // group, (start_row + BLOCK_M - 1) // group, seqlen_q, seqlen_k, left, right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    tiles = tl.maximum(tl.cdiv(end - first, BLOCK_N), 0)
    share = tl.cdiv(tiles, n_parts)
    first_key = first + tl.minimum(part * share, tiles) * BLOCK_N
    last_key = first + tl.minimum((part + 1) * share, tiles) * BLOCK_N

    # -- loop: score, weigh, accumulate
    scale_log2 = sm_scale * LOG2E
    for start_n in range(first_key, last_key, BLOCK_N):
        k = load_tile(k_head, start_n)
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        p, alpha, l_i, m_i = weigh(
            qk, l_i, m_i, start_n, n_visible, scale_log2, True, 0, first_visible, HAS_LEFT
        )
        v = load_tile(v_head, start_n)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    # -- write: the average, or what has been added up so far
    head = key_head * group + (start_row + tl.arange(0, BLOCK_M)) % group
    rows = (batch * heads_k * group + head).to(tl.int64) * seqlen_q + query
    inside = query < seqlen_q
    cols = tl.arange(0, BLOCK_D)
    if WHOLE:
        acc, m_i = average(acc, l_i, m_i, n_visible)
        of_heads = head.to(tl.int64) * step_h + query.to(tl.int64) * step_m
        out_rows = (batch.to(tl.int64) * step_b + of_heads) * UNIT
    else:
        rows = rows * n_parts + part
        tl.store(l_ptr + rows, l_i, mask=inside)
        out_rows = rows * HEAD_DIM
    tl.store(lse_ptr + rows, m_i, mask=inside)
    out_ptrs = out_ptr + out_rows[:, None] + cols[None, :]
    tl.store(out_ptrs, acc, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["seqlen_k", "left", "right", "n_parts"])
def attention_merge_kernel(
    acc_ptr,  # of each part its sum of p * v, (rows, n_parts, HEAD_DIM), contiguous
    m_ptr,  # of each part its largest score in base 2, (rows, n_parts)
    l_ptr,  # of each part its sum of p
    out_ptr,  # output, (batch, heads, seqlen_q, HEAD_DIM), of which these are the rows
    lse_ptr,  # natural logarithm of the sum of exponentials, (rows,)
    step_b,  # strides of out, as multiples of UNIT
    step_h,
    step_m,
    heads,
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    n_parts,
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, at least n_parts
    BLOCK_P: tl.constexpr,  # parts that are read at a time
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
    UNIT: tl.constexpr,  # of the strides of out
):
    row = tl.program_id(0).to(tl.int64)
    first = row * n_parts

    # -- maximum: of all parts
    every = tl.arange(0, PARTS)
    m = tl.max(tl.load(m_ptr + first + every, mask=every < n_parts, other=LOWEST), axis=0)

    # -- add up: parts, rescaled to this maximum
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    l_i = tl.zeros((BLOCK_P,), tl.float32)
    for start in range(0, n_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        there = parts < n_parts
        alpha = tl.exp2(tl.load(m_ptr + first + parts, mask=there, other=LOWEST) - m)
        l_i += alpha * tl.load(l_ptr + first + parts, mask=there, other=0.0)
        ptrs = acc_ptr + (first + parts)[:, None] * HEAD_DIM + cols[None, :]
        some = tl.load(ptrs, mask=there[:, None] & (cols < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(alpha[:, None] * some, axis=0)

    # -- write
    query = (row % seqlen_q).to(tl.int32)
    _, n_visible = seen_keys(query, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
    out, lse = average(acc[None, :], tl.sum(l_i, axis=0)[None], m[None], n_visible[None])
    batch, head = row // seqlen_q // heads, row // seqlen_q % heads
    out_ptr += (batch * step_b + head * step_h + row % seqlen_q * step_m) * UNIT
    tl.store(out_ptr + cols[None, :], out, mask=(cols < HEAD_DIM)[None, :])
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)


# -- the rule: when programs share the keys of a head, and how many

FEWEST_KEYS = 1024
"""Below this, the forward kernel is done in microseconds, and there is nothing to share."""

FEWEST_TILES = 2
"""Tiles of keys in a part: the second is on its way while the first is computed."""

KEYS_PER_QUERY = 8
"""Below this, queries are not few beside keys, and the forward kernel's larger tiles do better."""

MOST_PARTS = 256
"""Parts of a head: one program merges all parts of a row."""

PROGRAMS = 2
"""Programs per SM, at most, so that all run at once: of more, the last would run alone.

On an H200, over batches of 1 to 32, 1,024 to 131,072 keys, and 16 heads or 32 on 8, this lost 2 %
of the speed of the best number of parts on average, where 8 programs per SM had lost 6 %. One
program lost 1 %, but with a number of heads that is no power of two it would leave up to half of
the SMs without one.
"""


def n_parts(
    q: torch.Tensor, k: torch.Tensor, is_causal: bool, window: scope.Window | None = None
) -> int:
    """Return among how many programs the keys of a head are shared; 0 is for the forward kernel."""
    # before anything that costs the host time
    if k.shape[2] < max(FEWEST_KEYS, KEYS_PER_QUERY * q.shape[2]):
        return 0
    left, _ = scope.bounds(is_causal, window, q.shape[2], k.shape[2])
    decode, forward = tuned.decode_config(q), tuned.forward_config(q)
    return _n_parts(q.shape, k.shape, left, decode, forward, runtime.multiprocessors(q.device))


@planned
def _n_parts(q_shape, k_shape, left, decode, forward, multiprocessors: int) -> int:
    batch, heads, seqlen_q, _ = q_shape
    heads_k, n_keys = k_shape[1:3]
    if left is not None:
        n_keys = min(n_keys, left + seqlen_q)  # at most these are seen, and the rest is not read
    if decode is None or n_keys < max(FEWEST_KEYS, KEYS_PER_QUERY * seqlen_q):
        return 0
    # -- which kernel: queries that fit in one tile decode, and those that would leave most SMs idle
    rows = heads // heads_k * seqlen_q
    forward_programs = batch * heads * runtime.cdiv(seqlen_q, forward.block_m)
    if rows > decode.block_m and 4 * forward_programs > multiprocessors:
        return 0
    # -- how many parts: as many as run at once, and none so short that it does not pay
    groups = batch * heads_k * runtime.cdiv(rows, decode.block_m)
    tiles = runtime.cdiv(n_keys, decode.block_n)
    parts = PROGRAMS * multiprocessors // groups
    parts = max(1, min(parts, tiles // FEWEST_TILES, MOST_PARTS))
    return runtime.cdiv(tiles, runtime.cdiv(tiles, parts))  # so that no part is empty


# -- launches

MERGED_AT_ONCE = 8192
"""Numbers of acc that the merge reads at a time: 64 registers in each of 128 threads."""


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    n_parts: int,
    window: scope.Window | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as :func:`forward.attention_forward` does, with keys shared in parts."""
    # I/O: read q + read k + read v + write out + write lse; write and read acc of each part
    out = empty_dense_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    config = tuned.decode_config(q)
    described = (
        describe(q, config.block_m, described=False),
        describe(k, config.block_n, described=config.described),
        describe(v, config.block_n, described=config.described),
    )
    left, right = scope.bounds(is_causal, window, q.shape[2], k.shape[2])
    steps, unit = steps_of(q.shape, out.stride(), q.itemsize)
    launches = _launches(config, q.shape, k.shape, left, right, sm_scale, n_parts, steps, unit)
    if n_parts == 1:
        launches[0](*described, out, lse, lse)
        return out, lse
    acc = torch.empty((*lse.shape, n_parts, q.shape[3]), dtype=torch.float32, device=q.device)
    m_i, l_i = torch.empty((2, *lse.shape, n_parts), dtype=torch.float32, device=q.device)
    launches[0](*described, acc, m_i, l_i)
    launches[1](acc, m_i, l_i, out, lse)
    return out, lse


@planned
def _launches(
    config, q_shape, k_shape, left, right, sm_scale, n_parts, steps, unit
) -> tuple[Launch, Launch]:
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    rows = heads // heads_k * seqlen_q
    block_m = min(config.block_m, max(16, runtime.next_power_of_2(rows)))
    lengths = seqlen_q, seqlen_k, left or 0, right or 0
    block_d, parts = head_block(head_dim), runtime.next_power_of_2(n_parts)
    decode = Launch(
        attention_decode_kernel,
        (batch * heads_k * n_parts * runtime.cdiv(rows, block_m),),
        *steps, heads_k, heads // heads_k, *lengths, n_parts, sm_scale,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        WHOLE=n_parts == 1,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        UNIT=unit,
        **config.options,
    )  # fmt: skip
    merge = Launch(
        attention_merge_kernel,
        (batch * heads * seqlen_q,),
        *steps, heads, *lengths, n_parts,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        PARTS=parts,
        BLOCK_P=min(parts, MERGED_AT_ONCE // block_d),
        BLOCK_D=block_d,
        UNIT=unit,
        num_warps=4,
    )  # fmt: skip
    return decode, merge
