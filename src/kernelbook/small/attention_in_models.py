"""A window and a split query as the smallest complete kernels of attention in models.

Both take contiguous float32 tensors of one sequence, the first of one head: no dispatch, no
descriptors, no gradients.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def attend(acc, l_i, m_i, q, k_ptr, v_ptr, start, queries, left, MASKED: tl.constexpr):
    """Add one tile of keys to the running sums of a tile of queries."""
    keys, cols = start + tl.arange(0, q.shape[0]), tl.arange(0, q.shape[1])
    rows = keys[:, None] * q.shape[1] + cols[None, :]
    s = tl.dot(q, tl.load(k_ptr + rows).T, input_precision="ieee")
    if MASKED:
        behind = queries[:, None] - keys[None, :]
        s = tl.where((behind >= 0) & (behind <= left), s, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m_i - m_new)
    acc = tl.dot(p, tl.load(v_ptr + rows), acc * alpha[:, None], input_precision="ieee")
    return acc, l_i * alpha + tl.sum(p, axis=1), m_new


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
def part_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n_keys, share, scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + head * HEAD_DIM + cols) * scale
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    l_i, m_i = 0.0, -float("inf")

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
