"""A window, a packed batch and a split query as the smallest complete kernels of their chapter.

They take contiguous float32 tensors, the first two of one head: no dispatch, no descriptors, no
gradients.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def update(acc, l_i, m_i, s, v):
    """Add a tile of scores and values to the running sums of a tile of queries."""
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m_i - m_new)
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i * alpha + tl.sum(p, axis=1), m_new


@triton.jit
def attend(acc, l_i, m_i, q, k_ptr, v_ptr, start, queries, left, MASKED: tl.constexpr):
    """Add the tile of keys that begins at ``start``, masked by the window or not."""
    keys, cols = start + tl.arange(0, q.shape[0]), tl.arange(0, q.shape[1])
    rows = keys[:, None] * q.shape[1] + cols[None, :]
    s = tl.dot(q, tl.load(k_ptr + rows).T, input_precision="ieee")
    if MASKED:
        behind = queries[:, None] - keys[None, :]
        s = tl.where((behind >= 0) & (behind <= left), s, -float("inf"))
    return update(acc, l_i, m_i, s, tl.load(v_ptr + rows))


@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, left, scale, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    # -- load: the program's tile of queries
    first_query = tl.program_id(0) * BLOCK
    last_query = first_query + BLOCK - 1
    queries, cols = first_query + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    rows = queries[:, None] * HEAD_DIM + cols[None, :]
    q = tl.load(q_ptr + rows) * scale
    acc = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    l_i = tl.zeros((BLOCK,), tl.float32)
    m_i = tl.full((BLOCK,), -1e30, tl.float32)

    # -- stages: what some query sees, rounded outwards; what all of them see, inwards
    first_some = tl.maximum(first_query - left, 0)
    first_all = tl.maximum(last_query - left, 0)
    end_all, end = first_query + 1, last_query + 1
    first = first_some // BLOCK * BLOCK
    whole = tl.cdiv(first_all, BLOCK) * BLOCK
    cut = tl.maximum(end_all // BLOCK * BLOCK, whole)

    # -- loops: the left edge, the middle, the right edge
    for start in range(first, whole, BLOCK):
        acc, l_i, m_i = attend(acc, l_i, m_i, q, k_ptr, v_ptr, start, queries, left, MASKED=True)
    for start in range(whole, cut, BLOCK):
        acc, l_i, m_i = attend(acc, l_i, m_i, q, k_ptr, v_ptr, start, queries, left, MASKED=False)
    for start in range(cut, end, BLOCK):
        acc, l_i, m_i = attend(acc, l_i, m_i, q, k_ptr, v_ptr, start, queries, left, MASKED=True)

    # -- write: the average
    tl.store(out_ptr + rows, acc / l_i[:, None])


def window_attention(q, k, v, left, block=16):
    """Attention of a causal window: query i sees the keys i - left to i.

    q, k and v: (tokens, head_dim), float32, contiguous; ``block`` divides tokens, and both it and
    head_dim are powers of two from 16 on.
    """
    n, head_dim = q.shape
    assert n % block == 0
    out = torch.empty_like(q)
    window_kernel[(n // block,)](q, k, v, out, left, head_dim**-0.5, block, head_dim)
    return out


@triton.jit
def packed_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, scale, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    # -- place: which sequence, which of its tiles of queries, and whether there is one
    sequence, tile = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets_ptr + sequence)
    length = tl.load(offsets_ptr + sequence + 1) - begin
    if tile * BLOCK >= length:
        return

    # -- load: from here on, row 0 is the first row of the sequence
    q_ptr += begin * HEAD_DIM
    k_ptr += begin * HEAD_DIM
    v_ptr += begin * HEAD_DIM
    out_ptr += begin * HEAD_DIM
    queries, cols = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    rows = queries[:, None] * HEAD_DIM + cols[None, :]
    own = (queries < length)[:, None]
    q = tl.load(q_ptr + rows, mask=own, other=0.0) * scale
    acc = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    l_i = tl.zeros((BLOCK,), tl.float32)
    m_i = tl.full((BLOCK,), -1e30, tl.float32)

    # -- loop: its keys up to the diagonal; the rows of the next sequence read as zeros
    for start in range(0, (tile + 1) * BLOCK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        at = keys[:, None] * HEAD_DIM + cols[None, :]
        k = tl.load(k_ptr + at, mask=(keys < length)[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=(keys < length)[:, None], other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee")
        s = tl.where(queries[:, None] >= keys[None, :], s, -float("inf"))
        acc, l_i, m_i = update(acc, l_i, m_i, s, v)

    # -- write: the average, of rows that exist
    tl.store(out_ptr + rows, acc / l_i[:, None], mask=own)


def packed_attention(q, k, v, offsets, longest, block=16):
    """Causal attention of each sequence of a packed batch.

    q, k and v: (total, head_dim), float32, contiguous; offsets: int32, where the sequences begin
    and the last one ends; ``longest`` is the length of the longest.
    """
    out = torch.empty_like(q)
    grid = (len(offsets) - 1, triton.cdiv(longest, block))
    head_dim = q.shape[1]
    packed_kernel[grid](q, k, v, out, offsets, head_dim**-0.5, block, head_dim)
    return out


@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n_keys, share, scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # -- place: which head, and which part of its keys
    head, part = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + head * HEAD_DIM + cols) * scale
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    l_i, m_i = 0.0, -float("inf")

    # -- loop: the keys of this part, a tile at a time
    end = tl.minimum((part + 1) * share, n_keys)
    for start in range(part * share, end, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = (keys < end)[:, None]
        rows = (head * n_keys + keys)[:, None] * HEAD_DIM + cols[None, :]
        k = tl.load(k_ptr + rows, mask=inside, other=0.0)
        v = tl.load(v_ptr + rows, mask=inside, other=0.0)
        s = tl.where(keys < end, tl.sum(q[None, :] * k, axis=1), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=0))
        p, alpha = tl.exp(s - m_new), tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m_i = m_new

    # -- write: the average of the part, and its lse
    place = part * tl.num_programs(0) + head
    tl.store(out_ptr + place * HEAD_DIM + cols, acc / l_i)
    tl.store(lse_ptr + place, m_i + tl.log(l_i))


def attend_in_parts(q, k, v, share):
    """Attend to each part of ``share`` keys as if there were no others: (outs, lses), to merge.

    q: (heads, head_dim), one query per head; k and v: (heads, keys, head_dim); all float32 and
    contiguous; head_dim is a power of two. Returns (parts, heads, head_dim) and (parts, heads).
    """
    heads, n_keys, head_dim = k.shape
    parts = triton.cdiv(n_keys, share)
    outs, lses = q.new_empty(parts, heads, head_dim), q.new_empty(parts, heads)
    part_kernel[(heads, parts)](
        q, k, v, outs, lses, n_keys, share, head_dim**-0.5, BLOCK=16, HEAD_DIM=head_dim
    )
    return outs, lses
