"""The two backward sweeps as smallest complete kernels: dk and dv, and dq, of causal attention.

They take float32 tensors of one head, contiguous, whose length tiles divide.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_queries(
    dk, dv, k, v, keys, q_ptr, do_ptr, lse_ptr, delta_ptr, start,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what a tile of queries contributes."""
    # -- queries: rows of q and do, and two numbers for each
    queries, cols = start + tl.arange(0, BLOCK_M), tl.arange(0, k.shape[1])
    rows = queries[:, None] * k.shape[1] + cols[None, :]
    q, do = tl.load(q_ptr + rows), tl.load(do_ptr + rows)
    lse, delta = tl.load(lse_ptr + queries), tl.load(delta_ptr + queries)

    # -- weights: step 6, transposed
    s_t = tl.dot(k, q.T, input_precision="ieee")
    p_t = tl.exp(s_t - lse[None, :])
    if MASKED:
        p_t = tl.where(queries[None, :] >= keys[:, None], p_t, 0.0)

    # -- gradients: steps 1, 3 and 5, transposed
    dv = tl.dot(p_t, do, dv, input_precision="ieee")
    dp_t = tl.dot(v, do.T, input_precision="ieee")
    ds_t = p_t * (dp_t - delta[None, :])
    dk = tl.dot(ds_t, q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # -- load: the program's tile of keys and values
    first_key = tl.program_id(0) * BLOCK_N
    last_key = first_key + BLOCK_N - 1
    keys, cols = first_key + tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    own = keys[:, None] * HEAD_DIM + cols[None, :]
    k, v = tl.load(k_ptr + own) * scale, tl.load(v_ptr + own)
    dk = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)

    # -- stages: some queries see some keys from first on, and all see all from whole on
    first = first_key // BLOCK_M * BLOCK_M
    whole = tl.cdiv(last_key, BLOCK_M) * BLOCK_M

    # -- sweep: the tiles that the diagonal cuts, then the rest
    for start in range(first, whole, BLOCK_M):
        dk, dv = add_queries(
            dk, dv, k, v, keys, q_ptr, do_ptr, lse_ptr, delta_ptr, start, BLOCK_M, MASKED=True
        )
    for start in range(whole, n, BLOCK_M):
        dk, dv = add_queries(
            dk, dv, k, v, keys, q_ptr, do_ptr, lse_ptr, delta_ptr, start, BLOCK_M, MASKED=False
        )

    # -- write: nobody else adds to these keys
    tl.store(dk_ptr + own, dk * scale)
    tl.store(dv_ptr + own, dv)


def keys_backward(q, k, v, do, lse, delta, block_m=16, block_n=16):
    """Return the gradients (dk, dv) of causal attention, each like k.

    q, k, v and do: (tokens, head_dim), lse and delta: (tokens,), all float32 and contiguous. Both
    tiles divide tokens, and are powers of two from 16 on, as head_dim is.
    """
    n, head_dim = k.shape
    assert n % block_m == n % block_n == 0
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dkdv_kernel[(n // block_n,)](
        q, k, v, do, lse, delta, dk, dv, n, head_dim**-0.5, block_m, block_n, head_dim
    )
    return dk, dv


@triton.jit
def add_keys(
    dq, q, do, lse, delta, queries, k_ptr, v_ptr, start, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dq what a tile of keys contributes."""
    # -- keys: rows of k and v
    keys, cols = start + tl.arange(0, BLOCK_N), tl.arange(0, q.shape[1])
    rows = keys[:, None] * q.shape[1] + cols[None, :]
    k, v = tl.load(k_ptr + rows) * scale, tl.load(v_ptr + rows)

    # -- weights: step 6
    s = tl.dot(q, k.T, input_precision="ieee")
    p = tl.exp(s - lse[:, None])
    if MASKED:
        p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)

    # -- gradient: steps 1, 3 and 5
    dp = tl.dot(do, v.T, input_precision="ieee")
    ds = p * (dp - delta[:, None])
    dq = tl.dot(ds, k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # -- load: the program's tile of queries, and two numbers for each
    first_query = tl.program_id(0) * BLOCK_M
    end = first_query + BLOCK_M
    queries, cols = first_query + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    own = queries[:, None] * HEAD_DIM + cols[None, :]
    q, do = tl.load(q_ptr + own), tl.load(do_ptr + own)
    lse, delta = tl.load(lse_ptr + queries), tl.load(delta_ptr + queries)
    dq = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    # -- stages: all queries see all keys before whole, and none sees a key from end on
    whole = (first_query + 1) // BLOCK_N * BLOCK_N

    # -- sweep: the tiles below the diagonal, then those that it cuts
    for start in range(0, whole, BLOCK_N):
        dq = add_keys(
            dq, q, do, lse, delta, queries, k_ptr, v_ptr, start, scale, BLOCK_N, MASKED=False
        )
    for start in range(whole, end, BLOCK_N):
        dq = add_keys(
            dq, q, do, lse, delta, queries, k_ptr, v_ptr, start, scale, BLOCK_N, MASKED=True
        )

    # -- write: nobody else adds to these queries; k had the scale of step 5
    tl.store(dq_ptr + own, dq)


def queries_backward(q, k, v, do, lse, delta, block_m=16, block_n=16):
    """Return the gradient dq of causal attention, like q; arguments are those of keys_backward."""
    n, head_dim = q.shape
    assert n % block_m == n % block_n == 0
    dq = torch.empty_like(q)
    dq_kernel[(n // block_m,)](
        q, k, v, do, lse, delta, dq, n, head_dim**-0.5, block_m, block_n, head_dim
    )
    return dq
