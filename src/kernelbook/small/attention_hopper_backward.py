"""The backward pass of attention in one sweep and in a fixed order, in plain Triton.

Of one head without a mask, in float16, for lengths that ``TILE`` divides. On a GPU it is slow: what
stands in its way is what the chapter on one sweep is about.
"""

import torch
import triton
import triton.language as tl

TILE = 64
"""Keys of a program, and queries that it meets at a time."""


@triton.jit
def sweep_in_turn_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr,  # (seqlen, HEAD_DIM)
    lse_ptr, delta_ptr,  # of each query, (seqlen,), float32
    sums_ptr,  # of dq, (seqlen, HEAD_DIM), float32, zeros
    counter_ptr,  # of each program, int32, zeros
    seqlen, scale,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    counter_ptr += tile
    rows, cols = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)[None, :]
    at_key = (tile * TILE + rows)[:, None] * HEAD_DIM + cols
    k, v = tl.load(k_ptr + at_key), tl.load(v_ptr + at_key)
    dk = tl.zeros((TILE, HEAD_DIM), tl.float32)
    dv = tl.zeros((TILE, HEAD_DIM), tl.float32)
    for i in range(seqlen // TILE):  # tiles of queries, the last first
        query = seqlen - (i + 1) * TILE + rows
        at_query = query[:, None] * HEAD_DIM + cols
        q, do = tl.load(q_ptr + at_query), tl.load(do_ptr + at_query)
        # -- five matmuls: keys are rows
        s = tl.dot(k, q.T) * scale
        p = tl.exp(s - tl.load(lse_ptr + query)[None, :])
        dp = tl.dot(v, do.T)
        ds = (p * (dp - tl.load(delta_ptr + query)[None, :])).to(q.dtype)
        dv += tl.dot(p.to(q.dtype), do)
        dk += tl.dot(ds, q)
        part = tl.dot(ds.T, k)
        # -- wait: until the program of the keys before has added its part
        if tile > 0:
            while tl.atomic_add(counter_ptr - 1, 0, sem="acquire") < i + 1:
                pass
            tl.debug_barrier()
        # -- add: no other program has its turn
        sums = tl.load(sums_ptr + at_query) + part * scale
        tl.store(sums_ptr + at_query, sums)
        # -- announce: this step is done, and its sums are in memory
        tl.debug_barrier()
        tl.atomic_xchg(counter_ptr, i + 1, sem="release")
    tl.store(dk_ptr + at_key, (dk * scale).to(k.dtype))
    tl.store(dv_ptr + at_key, dv.to(k.dtype))


def sweep_in_turn(q, k, v, do):
    """(dq, dk, dv) of q, k, v and do of one head, (seqlen, head_dim), in float16."""
    seqlen, head_dim = q.shape
    if seqlen % TILE:
        raise ValueError(f"q has {seqlen} rows, but TILE, which is {TILE}, must divide them.")
    scale = head_dim**-0.5
    # what the forward pass would have left
    s = q.float() @ k.float().T * scale
    lse, out = s.logsumexp(-1), s.softmax(-1) @ v.float()
    delta = (do.float() * out).sum(-1)

    sums = torch.zeros(q.shape, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    programs = seqlen // TILE
    counter = torch.zeros(programs, device=q.device, dtype=torch.int32)
    sweep_in_turn_kernel[(programs,)](
        q, k, v, do, dk, dv, lse, delta, sums, counter, seqlen, scale,
        HEAD_DIM=head_dim, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return sums.to(q.dtype), dk, dv
