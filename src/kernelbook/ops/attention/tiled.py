"""Attention in tiles, in plain PyTorch: what the kernels do, to be read before them.

Any device, any float dtype, any leading dimensions. Nothing here is fast: a tile is a matrix that
PyTorch allocates, where a kernel keeps it on chip.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
ICLR 2024, algorithms 1 and 2.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from kernelbook.ops.attention.scope import Window, bounds, keys_seen


def key_tiles(
    start_m: int,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
    block_n: int,
    is_causal: bool,
    window: Window | None = None,
) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, masked) for each tile of keys that a tile of queries has to meet.

    The tile holds queries start_m to start_m + block_m. Keys that some of them do not see have to
    be masked; they come before and after those that all of them see. Keys that none sees do not
    come at all.
    """
    rule = seqlen_q, seqlen_k, *bounds(is_causal, window, seqlen_q, seqlen_k)
    first_seen_by_some, end_seen_by_all = keys_seen(start_m, *rule)
    first_seen_by_all, end_seen_by_some = keys_seen(min(start_m + block_m, seqlen_q) - 1, *rule)
    first = max(0, first_seen_by_some) // block_n * block_n
    for start_n in range(first, min(end_seen_by_some, seqlen_k), block_n):
        end_n = min(start_n + block_n, seqlen_k)
        yield start_n, end_n, start_n < first_seen_by_all or end_n > end_seen_by_all


def _scores(q, k, start_m, start_n, rule, scale, masked):
    """scale * q k^T for one tile, -inf where a query does not see a key."""
    scores = scale * q @ k.mT
    if masked:
        i = torch.arange(start_m, start_m + q.shape[-2], device=q.device).unsqueeze(1)
        j = torch.arange(start_n, start_n + k.shape[-2], device=q.device)
        first, end = keys_seen(i, *rule)
        scores = scores.masked_fill((j < first) | (j >= end), -torch.inf)
    return scores


def _finite(m):
    """Zero in the place of -inf: exp(x - m) of a row that sees nothing is then 0, not NaN."""
    return m.masked_fill(m == -torch.inf, 0)


def tiled_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): attention, and the natural logarithm of each row's sum.

    Args:
        q: queries, (..., seqlen_q, head_dim).
        k: keys, (..., seqlen_k, head_dim).
        v: values, as ``k``.
        is_causal: whether query i sees only keys j <= i + seqlen_k - seqlen_q.
        scale: what the products of q and k are multiplied by; ``None`` means head_dim ** -0.5.
        window: (left, right), how many keys beside its own a query sees; None is no bound.
        block_m: queries in a tile.
        block_n: keys in a tile.
    """
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    rule = seqlen_q, seqlen_k, *bounds(is_causal, window, seqlen_q, seqlen_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    # -- begin: a tile of queries, that has seen nothing
    for start_m in range(0, seqlen_q, block_m):
        rows = slice(start_m, min(start_m + block_m, seqlen_q))
        q_i = q[..., rows, :]
        m_i = torch.full_like(lse[..., rows], -torch.inf)  # largest score so far
        l_i = torch.zeros_like(m_i)  # sum of exp(score - m_i) so far
        acc = torch.zeros_like(q_i)  # sum of exp(score - m_i) * v so far
        tiles = key_tiles(start_m, seqlen_q, seqlen_k, block_m, block_n, is_causal, window)
        for start_n, end_n, masked in tiles:
            # -- meet: a tile of keys; its scores are gone when the next one comes
            k_j, v_j = k[..., start_n:end_n, :], v[..., start_n:end_n, :]
            scores = _scores(q_i, k_j, start_m, start_n, rule, scale, masked)
            # -- rescale: what was summed relative to the old maximum
            m_new = torch.maximum(m_i, scores.amax(-1))
            alpha = torch.exp(m_i - _finite(m_new))  # takes old sums to the new maximum
            p = torch.exp(scores - _finite(m_new).unsqueeze(-1))
            l_i = l_i * alpha + p.sum(-1)
            acc = acc * alpha.unsqueeze(-1) + p @ v_j
            m_i = m_new
        # -- end: divide once, and keep the logarithm of the sum
        out[..., rows, :] = acc / l_i.masked_fill(l_i == 0, 1).unsqueeze(-1)
        lse[..., rows] = m_i + l_i.log()
    return out, lse


def tiled_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv), with p computed again from lse, a tile at a time.

    Arguments are those of :func:`tiled_forward`, its two results, and ``do``, the gradient of out.
    """
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    rule = seqlen_q, seqlen_k, *bounds(is_causal, window, seqlen_q, seqlen_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # -- begin: delta, one number per query, and then a tile of queries
    delta = (do * out).sum(-1)  # sum over keys of p * dp, for each query
    for start_m in range(0, seqlen_q, block_m):
        rows = slice(start_m, min(start_m + block_m, seqlen_q))
        q_i, do_i = q[..., rows, :], do[..., rows, :]
        lse_i, delta_i = (x[..., rows].unsqueeze(-1) for x in (lse, delta))
        tiles = key_tiles(start_m, seqlen_q, seqlen_k, block_m, block_n, is_causal, window)
        for start_n, end_n, masked in tiles:
            # -- meet: a tile of keys, and what the pair contributes to each gradient
            keys = slice(start_n, end_n)
            k_j, v_j = k[..., keys, :], v[..., keys, :]
            scores = _scores(q_i, k_j, start_m, start_n, rule, scale, masked)
            p = torch.exp(scores - _finite(lse_i))
            dv[..., keys, :] += p.mT @ do_i
            dp = do_i @ v_j.mT
            ds = p * (dp - delta_i)
            dq[..., rows, :] += scale * ds @ k_j
            dk[..., keys, :] += scale * ds.mT @ q_i
    return dq, dk, dv


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse = tiled_forward(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return *tiled_backward(*ctx.saved_tensors, do, **ctx.options), None


def tiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """Return out of :func:`tiled_forward`, differentiable once, by :func:`tiled_backward`."""
    return _TiledAttention.apply(q, k, v, options)
